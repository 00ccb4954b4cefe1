"""This connector beside vLLM's `OffloadingConnector` in a `MultiConnector`: each does its part, and both are counted.

P names this connector first, D the other one. A prompt that D has offloaded is loaded from there, or from P; whichever
it is, the answer is the same, and P hears that its blocks are not needed any more.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import Client, PrefillDecode
from tests.e2e.cluster import Room, Traces, prompt, wait_for
from tests.e2e.engines import EngineOptions, EngineSet
from tests.e2e.tiny_model import tiny_llama
from tests.plain_paths import LEASE_PATHS_PLAIN

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(420)]

REQUESTS = 100
AT_ONCE = 10
TOKENS = 100
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


def test_both_do_their_part_and_are_counted(combined: Combined, service: PrefillDecode) -> None:
    ask(service, "new")
    p, d = service.prefill_client, service.decode_client
    assert d.metric("vllm:nixl_actor_completed_receives_total") == REQUESTS
    assert d.metric("vllm:nixl_bytes_transferred_count") >= REQUESTS
    assert d.metric("vllm:nixl_actor_kv_wait_seconds_count") == REQUESTS
    assert d.metric("vllm:nixl_actor_lease_margin_seconds_count") == REQUESTS
    assert d.metric("vllm:nixl_actor_requests") == 0
    assert p.metric("vllm:nixl_actor_granted_leases_total") == REQUESTS
    assert p.metric("vllm:nixl_actor_granted_tokens_total") == REQUESTS * TOKENS
    assert p.metric("vllm:nixl_num_kv_expired_reqs_total") == 0
    wait_for(lambda: p.metric("vllm:nixl_actor_lent_blocks") == 0 or None, "no block is lent")
    assert p.metric("vllm:nixl_actor_leases") == 0
    stored, loaded = offloaded(p)
    assert stored > 0 == loaded, "P has computed every prompt for the first time"
    for request_id in prompts(0, REQUESTS, "new"):
        combined.traces.assert_plain(request_id)

    # Again: P lends blocks that it has loaded from the host, and so does D with most of what it needs.
    ask(service, "again")
    assert offloaded(p)[1] > 0
    assert offloaded(d)[1] > 0
    for request_id in prompts(0, REQUESTS, "again"):
        lease = combined.traces.ended_lease(request_id)
        assert lease.states in LEASE_PATHS_PLAIN, request_id
    assert p.blocks_are_free()
    assert d.blocks_are_free()
    for engine in (combined.prefill, combined.decode):
        assert "Traceback" not in engine.log()
