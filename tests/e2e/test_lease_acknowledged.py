"""Leases by acknowledgement, on real engines: P and a D of two data-parallel ranks.

Two engines that hold the same blocks, a request that waits in D's queue for three lease times, and a P that dies while
D holds its blocks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from connector.observe.catalogue import RENEWALS
from connector.observe.traced import TERMINAL
from connector.tools.trace_reader import read_trace
from statemachine.trace import TransitionRecord
from tests.e2e.client import CALL_TIMEOUT_SECONDS, Client, PrefillDecode
from tests.e2e.cluster import Room, blocks_of, prompt, wait_for
from tests.e2e.engines import BLOCK_SIZE_TOKENS, LOOPBACK, OVER_TCP, EngineOptions, EngineSet, cores
from tests.e2e.tiny_model import tiny_llama
from tests.rig.network import BlackHole, dead_params

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(420)]

LEASE_SECONDS = 10.0
HANDSHAKE_SECONDS = 60.0
"""Longer than any engine is to be occupied by a request that waits for a handshake."""
TOKENS = 100
SAMPLES = 4
SAMPLE_TOKENS = 16
OCCUPANT_BLOCKS = 31
CONTEXT_TOKENS = 1024
PREFILL_BLOCKS = 64
DECODE_BLOCKS = OCCUPANT_BLOCKS + 3
"""Of each rank; one of them is never handed out, and the rest is too little for a request."""
AT_ONCE_SECONDS = LEASE_SECONDS / 2
"""What would end a request whose P is dead in any case takes the rest of its lease, or a handshake's time."""


class PrefillAndTwoRanks:
    """A producer, and a consumer of two data-parallel ranks that compute a prompt themselves when its KV does not come.

    READs go over TCP: they need the producer's help, and hang while it is stopped.
    """

    def __init__(self, directory: Path) -> None:
        self.trace_directory = directory / "traces"
        common: dict[str, Any] = {
            "model": tiny_llama(),
            "logs": directory / "logs",
            "context_tokens": CONTEXT_TOKENS,
            "trace_directory": self.trace_directory,
        }
        self._engines = EngineSet()
        self.prefill, self.decode = self._engines.start(
            EngineOptions(
                name="prefill",
                core=0,
                kv_role="kv_producer",
                extra_config={"kv_lease_duration": LEASE_SECONDS},
                arguments=("--num-gpu-blocks-override", str(PREFILL_BLOCKS)),
                **common,
            ),
            EngineOptions(
                name="decode",
                kv_role="kv_consumer",
                kv_load_failure_policy="recompute",
                # Of leases P's own word counts; this only has to be longer than a handshake may take.
                extra_config={
                    "kv_lease_duration": HANDSHAKE_SECONDS + 1,
                    "handshake_timeout_seconds": HANDSHAKE_SECONDS,
                },
                arguments=(
                    *("--num-gpu-blocks-override", str(DECODE_BLOCKS)),
                    *("--data-parallel-size", "2"),
                ),
                environment={"UCX_TLS": OVER_TCP, "VLLM_CPU_OMP_THREADS_BIND": "|".join(cores(1, 2))},
                **common,
            ),
        )
        self.service = PrefillDecode(self.prefill, self.decode)

    def close(self) -> None:
        self.service.close()
        self._engines.stop()

    def need_prefill(self) -> None:
        """Have a working producer."""
        if not self.prefill.running:
            self.prefill.restart().wait_healthy()

    def prefilled(self, key: str) -> dict[str, Any]:
        """Parameters of the prompt of `key`, which P has computed."""
        answer = self.service.prefill(prompt(TOKENS, key), key)
        assert answer.ok, answer.error
        assert answer.kv_transfer_params is not None
        return answer.kv_transfer_params

    def overwrite(self) -> None:
        """Have P compute other prompts into every block that is free."""
        tokens = CONTEXT_TOKENS - 100
        for number in range(2 * PREFILL_BLOCKS // blocks_of(tokens) + 1):
            answer = self.service.prefill_client.complete(prompt(tokens, f"{number} {time.time_ns()}"), max_tokens=1)
            assert answer.ok, answer.error

    def samples(self, key: str, params: dict[str, Any] | None, rank: int | None = None) -> list[tuple[int, ...]]:
        """The token ids of several samples of one prompt, which are all the most likely tokens.

        Sampling with `top_k` 1, because vLLM refuses several samples with temperature 0.
        """
        body = _body(key, SAMPLE_TOKENS) | {"n": SAMPLES, "temperature": 1.0, "top_k": 1}
        if params is None:
            body["cache_salt"] = "computed-alone"
        else:
            body["kv_transfer_params"] = params
        answer = httpx.post(self._url, json=body, headers=_headers(key, rank), timeout=CALL_TIMEOUT_SECONDS)
        answer.raise_for_status()
        return [tuple(choice["token_ids"]) for choice in answer.json()["choices"]]

    @property
    def _url(self) -> str:
        return f"http://{LOOPBACK}:{self.decode.options.http_port}/v1/completions"

    @contextmanager
    def occupied(self, rank: int) -> Iterator[str]:
        """What comes to one rank of D waits in its queue until the block is left: a request that waits for a hung
        engine has the rank's blocks; its key. It costs no core, unlike one that computes, and with three engines on two
        cores that decides whether a READ takes a moment or seconds.
        """
        key = f"occupant-{time.time_ns()}"
        with BlackHole() as hole, Client(self.decode, data_parallel_rank=rank) as d:
            text, params = prompt(OCCUPANT_BLOCKS * BLOCK_SIZE_TOKENS, key), dead_params(hole.port, OCCUPANT_BLOCKS)
            with d.leaving(text, max_tokens=1, request_id=key, kv_transfer_params=params) as occupant:
                self.request_in(key, "pending_handshake")
                yield key
                assert not occupant.is_answered, "nothing had to wait"

    def requests(self, key: str) -> dict[str, TransitionRecord]:
        """The latest transition of each of D's requests for `key`, by subject."""
        found: dict[str, TransitionRecord] = {}
        for record in read_trace(self.trace_directory):
            if record.machine == "request" and f"cmpl-{key}-" in record.subject:
                found[record.subject] = record
        return found

    def reset_seen(self, since: float) -> float:
        """Unix time at which a rank of D has first seen its connection to P reset, after `since`."""

        def found() -> float | None:
            resets = [
                record.wall
                for record in read_trace(self.trace_directory)
                if (record.machine, record.event, record.reason) == ("peer", "ConnectionSuspect", "ControlLinkLost")
                and record.wall > since
            ]
            return min(resets, default=None)

        return wait_for(found, "D sees that its connection to P was reset")

    def held_by(self, remote_request_id: str, ranks: int) -> None:
        """Wait until P has told so many ranks of D that it keeps these blocks."""

        def holders() -> set[str]:
            return {
                record.engine_id
                for record in read_trace(self.trace_directory)
                if (record.machine, record.to_state) == ("hold", "held")
                and record.subject.startswith(remote_request_id)
            }

        wait_for(lambda: len(holders()) == ranks or None, f"{ranks} engine(s) that hold {remote_request_id}")

    def request_in(self, key: str, *states: str) -> TransitionRecord:
        """D's request for `key` once it is in one of these states."""

        def found() -> TransitionRecord | None:
            return next((each for each in self.requests(key).values() if each.to_state in states), None)

        return wait_for(found, f"request {key} in {' or '.join(states)}")


def _body(key: str, max_tokens: int) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": prompt(TOKENS, key),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def _headers(key: str, rank: int | None) -> dict[str, str]:
    headers = {"X-Request-Id": key}
    return headers if rank is None else headers | {"X-data-parallel-rank": str(rank)}


@pytest.fixture
def ranks(room: Room) -> PrefillAndTwoRanks:
    group = room.occupy(PrefillAndTwoRanks)
    group.need_prefill()
    return group


def test_samples_of_one_prompt_on_two_decode_engines_are_all_right(ranks: PrefillAndTwoRanks) -> None:
    """n = 4: vLLM gives the samples to both ranks, with the same parameters. One rank is done with them and releases
    them while the other one is still busy with another request; P overwrites whatever it takes for free. Scenario 69.

    Both are busy at first: a rank that hears of the samples only after the other has released them is told that it
    comes too late, and computes the prompt.
    """
    key = "four-samples"
    alone = ranks.samples(key, None)
    params = ranks.prefilled(key)
    lent = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        with ranks.occupied(1):
            with ranks.occupied(0):
                answer = pool.submit(ranks.samples, key, params)
                ranks.held_by(params["remote_request_id"], 2)
            first = ranks.request_in(key, "done")
            of_first = {name for name, each in ranks.requests(key).items() if each.engine_id == first.engine_id}
            wait_for(
                lambda: all(ranks.requests(key)[name].to_state == "done" for name in of_first) or None,
                "the samples of the first rank",
            )
            time.sleep(max(0.5, lent + 1.2 * LEASE_SECONDS - time.monotonic()))  # P hears of it; a first lease is over
            ranks.overwrite()
        samples = answer.result()
    ended = ranks.requests(key)
    assert len({each.engine_id for each in ended.values()}) == 2, "one rank served them all: nothing is shown"
    states = {name: f"{each.to_state} {each.reason or ''}" for name, each in ended.items()}
    assert samples == alone, states
    assert {each.to_state for each in ended.values()} == {"done"}, states


def test_a_request_that_waits_in_the_queue_for_three_lease_times_is_read(ranks: PrefillAndTwoRanks) -> None:
    key = "long-in-the-queue"
    alone = ranks.samples(key, None)
    sides = (ranks.service.prefill_client, ranks.service.decode_client)
    before = [side.metric(RENEWALS.shown) for side in sides]
    params = ranks.prefilled(key)
    with ThreadPoolExecutor(1) as pool:
        with ranks.occupied(0):
            answer = pool.submit(ranks.samples, key, params, 0)
            time.sleep(3 * LEASE_SECONDS)
            assert not answer.done()
        samples = answer.result()
    states = {name: f"{each.to_state} {each.reason or ''}" for name, each in ranks.requests(key).items()}
    assert samples == alone, states
    assert {each.to_state for each in ranks.requests(key).values()} == {"done"}, states
    for side, renewals in zip(sides, before, strict=True):
        assert side.metric(RENEWALS.shown) >= renewals + 1


@pytest.mark.parametrize("state", ["in mid-read", "in the queue"])
def test_a_prefill_engine_that_is_killed_while_d_holds_its_blocks(ranks: PrefillAndTwoRanks, state: str) -> None:
    """D's request ends soon after the moment at which the connection to P was reset, which is when the kernel has taken
    the killed processes down; or, if it is scheduled later, soon after that."""
    key = state.replace(" ", "-")
    warm_up = f"warm-up-of-{len(key)}"
    assert ranks.samples(warm_up, ranks.prefilled(warm_up), 0)
    alone = ranks.samples(key, None)
    params = ranks.prefilled(key)
    with ThreadPoolExecutor(1) as pool:
        if state == "in mid-read":
            ranks.prefill.pause()
            answer = pool.submit(ranks.samples, key, params, 0)
            ranks.request_in(key, "reading")
            killed = time.time()
            ranks.prefill.kill()
            since = ranks.reset_seen(killed)
        else:
            with ranks.occupied(0) as occupant:
                answer = pool.submit(ranks.samples, key, params, 0)
                ranks.held_by(params["remote_request_id"], 1)
                killed = time.time()
                ranks.prefill.kill()
                ranks.reset_seen(killed)
            since = ranks.request_in(occupant, *TERMINAL["request"]).wall
        samples = answer.result()
    requests = ranks.requests(key)
    ended = {name: (each.to_state, each.reason, round(each.wall - since, 2)) for name, each in requests.items()}
    assert samples == alone, ended
    first = min(requests.values(), key=lambda each: each.wall)
    assert first.to_state in TERMINAL["request"] - {"done"}, ended
    assert first.wall - since < AT_ONCE_SECONDS, ended
