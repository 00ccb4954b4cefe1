"""This connector beside vLLM's `OffloadingConnector` in a `MultiConnector`: each does its part, and both are counted.

P names this connector first, D the other one. A prompt that D has offloaded is loaded from there, or from P; whichever
it is, the answer is the same, and P hears that its blocks are not needed any more.

Both are told of threads for NIXL, as users of the built-in connector do who set `num_threads`; ours gives UCX none.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from connector.observe import catalogue as c
from tests.e2e.client import Client, PrefillDecode
from tests.e2e.cluster import BLOCK_BYTES, HANDSHAKE_TIMEOUT_SECONDS, Room, Traces, blocks_of, prompt, wait_for
from tests.e2e.engines import BLOCK_SIZE_TOKENS, EngineOptions, EngineSet
from tests.e2e.metrics_page import (
    BYTES,
    Page,
    assert_nothing_is_open,
    expected,
    granted_on_p,
    grown,
    grown_on_p,
    growth_of,
    healthy_on_d,
    let_go_on_d,
    loaded_on_d,
    meet,
    wait_for_releases,
)
from tests.e2e.tiny_model import tiny_llama
from tests.plain_paths import LEASE_PATHS_PLAIN

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(420)]

REQUESTS = 100
AT_ONCE = 10
TOKENS = 100
OFFLOADED_BYTES = TOKENS // BLOCK_SIZE_TOKENS * BLOCK_BYTES
"""Of one prompt: its whole blocks."""
BLOCKS = 60
"""Of each KV cache: a tenth of what all prompts take, so that all but the last ones are cached on the host only."""


class Combined:
    """Two engines with both connectors."""

    def __init__(self, directory: Path) -> None:
        self.traces = Traces(directory / "traces")
        common: dict[str, Any] = {
            "model": tiny_llama(),
            "logs": directory,
            "context_tokens": 256,
            "trace_directory": self.traces.directory,
            "extra_config": {"num_threads": 2, "handshake_timeout_seconds": HANDSHAKE_TIMEOUT_SECONDS},
            "arguments": ("--num-gpu-blocks-override", str(BLOCKS)),
        }
        self._engines = EngineSet()
        self.prefill, self.decode = self._engines.start(
            EngineOptions(name="ours-first", beside_offloading="before", core=0, **common),
            EngineOptions(name="ours-last", beside_offloading="after", core=1, **common),
        )

    def close(self) -> None:
        self._engines.stop()


@pytest.fixture
def combined(room: Room) -> Combined:
    return room.occupy(Combined)


@pytest.fixture
def service(combined: Combined) -> Iterator[PrefillDecode]:
    with PrefillDecode(combined.prefill, combined.decode) as service:
        yield service


def prompts(first: int, count: int, salt: str) -> dict[str, str]:
    """By request id; those of one number are alike whatever the salt."""
    return {f"{salt}-{number}": prompt(TOKENS, f"combined {number}") for number in range(first, first + count)}


def ask(service: PrefillDecode, salt: str) -> None:
    """All requests, some at a time; each answer is that of D alone."""
    for first in range(0, REQUESTS, AT_ONCE):
        asked = prompts(first, AT_ONCE, salt)
        answers = service.pd_concurrently(asked)
        for key, text in asked.items():
            assert answers[key].ok, answers[key].error
            assert answers[key].token_ids == service.alone(text).token_ids, key


def offloaded(client: Client) -> tuple[float, float]:
    """Bytes stored on the host and loaded from there."""
    return client.metric("vllm:kv_offload_store_bytes_total"), client.metric("vllm:kv_offload_load_bytes_total")


def external_hits(client: Client) -> float:
    """Tokens that vLLM has had from its connectors instead of computing them."""
    return client.metric("vllm:external_prefix_cache_hits_total")


def wait_for_offloaded(client: Client, stored_bytes: float, loaded_bytes: float) -> None:
    """What was stored last is counted in the step after it."""
    expected_bytes = (stored_bytes, loaded_bytes)
    wait_for(lambda: offloaded(client) == expected_bytes or None, f"{expected_bytes} bytes offloaded and loaded")


def assert_pages_are_right(service: PrefillDecode, p_before: Page, d_before: Page, requests: int) -> None:
    """They have grown by so many requests that D has read from P, and by nothing else."""
    p, d = service.prefill_client, service.decode_client
    assert_nothing_is_open(p)
    assert_nothing_is_open(d)
    assert grown_on_p(p_before, p, released=requests) == expected(granted_on_p(requests, tokens=TOKENS))
    wait_for_releases(d, d_before, requests)
    assert grown(d_before, d) == expected(healthy_on_d(requests))
    assert Page.of(d).total(BYTES) - d_before.total(BYTES) == requests * blocks_of(TOKENS) * BLOCK_BYTES


def assert_pages_are_right_of_some(service: PrefillDecode, p_before: Page, d_before: Page, requests: int) -> None:
    """They have grown by so many requests, of which D may have read some from P. It lets go of every lease, and asks P
    to hold those whose request has to wait in its queue."""
    p, d = service.prefill_client, service.decode_client
    assert_nothing_is_open(p)
    assert_nothing_is_open(d)
    wait_for_releases(d, d_before, requests)
    on_p, on_d = grown_on_p(p_before, p, released=requests), grown(d_before, d)
    read, held, asked = (
        growth_of(on_d, c.COMPLETED),
        growth_of(on_d, c.HOLDS, "decode"),
        growth_of(on_p, c.HOLDS, "prefill"),
    )
    assert read <= held <= asked <= requests
    assert read < requests
    assert on_p == expected(granted_on_p(requests, tokens=TOKENS, held=asked))
    assert on_d == expected(loaded_on_d(read) | let_go_on_d(requests, held=held))


def test_both_do_their_part_and_are_counted(combined: Combined, service: PrefillDecode) -> None:
    p, d = service.prefill_client, service.decode_client
    p_before, d_before = meet(service, prompt(TOKENS, "they meet"))
    p_stored, d_stored = offloaded(p)[0], offloaded(d)[0]
    ask(service, "new")
    assert_pages_are_right(service, p_before, d_before, REQUESTS)
    p_stored += REQUESTS * OFFLOADED_BYTES
    d_stored += 2 * REQUESTS * OFFLOADED_BYTES  # what D has read, and what it has computed alone
    wait_for_offloaded(p, p_stored, 0)
    wait_for_offloaded(d, d_stored, 0)
    for request_id in prompts(0, REQUESTS, "new"):
        combined.traces.assert_plain(request_id)

    # Again: P lends blocks that it has loaded from the host, and so does D with most of what it needs.
    p_before, d_before = Page.of(p), Page.of(d)
    d_hits = external_hits(d)
    ask(service, "again")
    wait_for_offloaded(p, p_stored, REQUESTS * OFFLOADED_BYTES)
    read_tokens = growth_of(grown(d_before, d), c.COMPLETED) * TOKENS
    d_loaded = (external_hits(d) - d_hits - read_tokens) / BLOCK_SIZE_TOKENS * BLOCK_BYTES
    assert d_loaded > 0
    wait_for_offloaded(d, d_stored, d_loaded)
    for request_id in prompts(0, REQUESTS, "again"):
        lease = combined.traces.ended_lease(request_id)
        assert lease.states in LEASE_PATHS_PLAIN, request_id
    assert p.blocks_are_free()
    assert d.blocks_are_free()
    assert_pages_are_right_of_some(service, p_before, d_before, REQUESTS)
    for engine in (combined.prefill, combined.decode):
        assert "Traceback" not in engine.log()


def test_the_pages_the_other_way_round(combined: Combined) -> None:
    """P names the other connector first, D this one."""
    with PrefillDecode(combined.decode, combined.prefill) as service:
        p_before, d_before = meet(service, prompt(TOKENS, "they meet the other way round"))
        answers = service.pd_concurrently(prompts(REQUESTS, AT_ONCE, "turned"))
        assert all(answer.ok for answer in answers.values())
        assert_pages_are_right(service, p_before, d_before, AT_ONCE)
