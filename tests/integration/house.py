"""Three engines that all tests of a session share, because starting them is what takes the time.

READs go over TCP (`UCX_TLS`), where they are asynchronous: with a prefill engine that is frozen they stay in flight for
as long as a test wants, which over CMA they never are. All time limits are short, so that each failure can be waited
for; they are still longer than a busy machine may keep one process from running.

A test leaves the engines as it found them: no request open, every block free, the prefill engine running. It may
replace the prefill engine (`restart_prefill`), as the decode engines must not mind.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from tests.integration.traces import Traces
from tests.rig import OURS, EngineOptions, EngineRig, RequestOutcome, RequestSpec, expected_output, free_port, prompt

LAYERS = 4
BLOCKS = 64
USABLE_BLOCKS = BLOCKS - 1
"""One block is never handed out."""
BLOCK_TOKENS = 32
MAX_BATCHED_TOKENS = 128
"""A longer prompt is prefilled in chunks."""

LEASE_SECONDS = 8.0
"""Longer than a request may take: a READ that hangs ends by the time limit of its request. And half of it is longer
than a busy machine may stand still."""
HANDSHAKE_SECONDS = 6.0
REQUEST_SECONDS = 7.0
QUIESCE_SECONDS = 1.0
GRACE_SECONDS = 0.2
TIME_LIMITS = ("HandshakeTimeout", "DeadlineExceeded", "PeerSilent", "LeaseNotProven")
"""Failures of a request whose prefill engine was waited for until a time limit."""

LONG_HANDSHAKE: dict[str, Any] = {"handshake_timeout_seconds": 20.0}
"""For engines of which no test wants a time limit: the default is shorter than a busy machine may stand still."""

SHAPE: dict[str, Any] = {"layers": LAYERS, "blocks": BLOCKS, "max_batched_tokens": MAX_BATCHED_TOKENS}


def _options(
    role: Literal["kv_producer", "kv_consumer"], policy: Literal["fail", "recompute"], traces: Path
) -> EngineOptions:
    return EngineOptions(
        OURS,
        role,
        free_port(),
        kv_load_failure_policy=policy,
        extra_config={
            "kv_lease_duration": LEASE_SECONDS,
            "handshake_timeout_seconds": HANDSHAKE_SECONDS,
            "request_timeout_seconds": REQUEST_SECONDS,
            "quiesce_timeout_seconds": QUIESCE_SECONDS,
            "backend_grace_seconds": GRACE_SECONDS,
            "backoff_initial_seconds": 0.2,
            "backoff_max_seconds": 0.5,
            "trace_directory": str(traces),
        },
        environment={"UCX_TLS": "tcp,self"},
        record_calls=True,
        **SHAPE,
    )


class House:
    """One prefill engine, and one decode engine per load-failure policy."""

    def __init__(self, stack: ExitStack, directory: Path) -> None:
        self._stack = stack
        self.directory = directory
        self.traces = Traces(directory / "traces")
        self.prefill = self._start(_options("kv_producer", "fail", directory / "traces"))
        self.decode = self._start(_options("kv_consumer", "fail", directory / "traces"))
        """Policy `fail`: a request whose load failed ends in an error."""
        self.recompute = self._start(_options("kv_consumer", "recompute", directory / "traces"))
        """Policy `recompute`: it is computed here instead."""
        for engine in (self.prefill, self.decode, self.recompute):
            engine.wait_ready()

    def _start(self, options: EngineOptions) -> EngineRig:
        return self._stack.enter_context(EngineRig(options, self.directory))

    @property
    def decode_engines(self) -> tuple[EngineRig, EngineRig]:
        """Both of them."""
        return self.decode, self.recompute

    def restart_prefill(self, *, same_id: bool) -> None:
        """Put a new prefill engine where the old one was; the old one must be dead."""
        assert not self.prefill.alive
        options = self.prefill.options
        if not same_id:
            options = dataclasses.replace(options, engine_id=f"rig-{uuid4().hex[:12]}")
        self.prefill = self._start(options)
        self.prefill.wait_ready()

    def extra_engine(self, **changes: Any) -> EngineRig:
        """One more engine, of both roles and policy `fail`, for a test that ruins it; use as a context manager.

        `changes`: options that it has different from the others.
        """
        return EngineRig(
            dataclasses.replace(
                self.decode.options,
                kv_role="kv_both",
                engine_id=f"rig-{uuid4().hex[:12]}",
                side_channel_port=free_port(),
                **changes,
            ),
            self.directory,
        )

    def expect_loaded(self, decode: EngineRig, name: str, tokens: list[int]) -> RequestOutcome:
        """Move one prompt and check all of it: the plain case works."""
        outcome = decode.decode(name, tokens, self.prefill.prefill(name, tokens))
        check_loaded(outcome, tokens)
        return outcome

    def expect_failed_by_no_time_limit(self, name: str) -> None:
        """The request has failed because something was noticed, however long a busy machine took for that."""
        assert self.traces.reason(name) not in TIME_LIMITS

    def expect_whole(self) -> None:
        """No request is open anywhere and every block is free."""
        for engine in (self.prefill, *self.decode_engines):
            engine.wait_until_whole(30)


def check_pair(prefill: EngineRig, decode: EngineRig, name: str, *, shared_tokens: int, freed_seconds: float) -> None:
    """Several requests at once, several lengths, a common prefix that the next one finds in D's prefix cache; every
    byte right, and the blocks given back within `freed_seconds`."""
    shared = prompt(f"{name}-shared", shared_tokens)
    prompts = {f"{name}-{length}": prompt(f"{name}-{length}", length, shared) for length in (7, 64, 100, 150, 300)}
    params = prefill.prefill_all(prompts)
    decode.submit(*(RequestSpec(each, tokens, 3, params[each]) for each, tokens in prompts.items()))
    for outcome in decode.wait_all(list(prompts)):
        check_loaded(outcome, prompts[outcome.request_id], 3)
    again = prompt(f"{name}-again", 200, shared)
    outcome = decode.decode(f"{name}-again", again, prefill.prefill(f"{name}-again", again), 70)
    check_loaded(outcome, again, 70)
    assert outcome.local_cached_tokens == shared_tokens
    for engine in (prefill, decode):
        engine.wait_until_whole(freed_seconds)


def wait_for_reads(decode: EngineRig, count: int) -> None:
    """Wait until so many READs are with NIXL, while their requests still wait for them."""
    started = time.monotonic()
    while (holdings := decode.inspect().holdings) is None or holdings.reads < count:
        assert time.monotonic() < started + REQUEST_SECONDS, f"not {count} READs in {REQUEST_SECONDS} s: {holdings}"
        time.sleep(0.01)


def check_loaded(outcome: RequestOutcome, tokens: list[int], max_tokens: int = 1) -> None:
    """The request was loaded, every byte was right, and so was the answer."""
    assert outcome.finish == "length", outcome
    assert outcome.received, outcome
    assert outcome.checked_pages > 0
    assert outcome.mismatched_pages == 0
    assert outcome.output_token_ids == expected_output(tokens, max_tokens)


def check_not_loaded(engine: EngineRig, outcome: RequestOutcome, tokens: list[int]) -> None:
    """The load was reported as failed, and the policy of the engine was followed."""
    assert outcome.receive_failed, outcome
    assert not outcome.received
    if engine.options.kv_load_failure_policy == "fail":
        assert outcome.finish == "error"
        assert outcome.output_token_ids == []
    else:
        assert outcome.finish == "length"
        assert outcome.output_token_ids == expected_output(tokens, len(outcome.output_token_ids))
        assert outcome.mismatched_pages == 0


def local_request(name: str, tokens: list[int]) -> RequestSpec:
    """A request that has nothing to do with a prefill engine."""
    return RequestSpec(name, tokens)


@contextmanager
def open_house(directory: Path) -> Iterator[House]:
    """Start the engines; they end with the block, whatever happens."""
    with ExitStack() as stack:
        yield House(stack, directory)
