"""Pairs of an engine with this project's connector and one with vLLM's own, of unequal tensor-parallel sizes, and what
the tests of such pairs share.

Our side is seen in its traces, the built-in one in its metrics: it counts leases that nobody released (`KV_EXPIRED`),
and releases of what it does not lend any more. So blocks that are free, and were not counted, were released.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.client import CALL_TIMEOUT_SECONDS, Client, PrefillDecode
from tests.e2e.cluster import BUILTIN_CONFIG, HANDSHAKE_TIMEOUT_SECONDS, Traces, prompt, small_options, wait_for
from tests.e2e.engines import LOOPBACK, OVER_TCP, Engine, EngineSet
from tests.e2e.tiny_model import tiny_deepseek
from tests.plain_paths import LEASE_PATHS_PLAIN, REQUEST_PATHS_PLAIN

RUNNING_MAX = 4
"""Requests that run at a time, so that others have to wait for them."""
RECOMPUTED_TOKENS = 1
"""Missing tokens that our D computes instead of reading them."""
ATTEMPTS = 3
OCCUPANTS = 128
OCCUPANT_TOKENS = 900
"""Answers that keep an engine busy: more than a minute of work for a tiny model."""

LEASE_END_SECONDS = 20.0
"""After its time, on a busy machine."""

REQUESTS_ENDED = "vllm:request_success_total"
REQUESTS_GIVEN = ("vllm:num_requests_running", "vllm:num_requests_waiting", REQUESTS_ENDED)
KV_EXPIRED = "vllm:nixl_num_kv_expired_reqs_total"
COUNTERS_OF_TROUBLE = (
    KV_EXPIRED,
    "vllm:nixl_num_notifications_after_expiry_total",
    "vllm:nixl_num_failed_transfers_total",
    "vllm:nixl_num_failed_notifications_total",
)
LOG_LEVEL = re.compile(r"(?:\(.*?\) )?(?:WARNING|ERROR|CRITICAL) ")
"""How a line of vLLM's log begins that says that something is wrong."""


class UnequalPair:
    """Two engines, one of which has two ranks. Each takes both roles.

    READs go over TCP: they need the help of the engine that lends, and hang while it is stopped.
    """

    our_ranks: int
    builtin_ranks: int
    our_lease_seconds = builtin_lease_seconds = 30

    @staticmethod
    def of_the_model() -> dict[str, Any]:
        """Options of both engines."""
        return {}

    def __init__(self, directory: Path) -> None:
        self.traces = Traces(directory / "traces")
        common: dict[str, Any] = {
            "environment": {"UCX_TLS": OVER_TCP},
            "arguments": ("--max-num-seqs", str(RUNNING_MAX)),
            **self.of_the_model(),
        }
        our_config = {
            "kv_lease_duration": self.our_lease_seconds,
            "handshake_timeout_seconds": HANDSHAKE_TIMEOUT_SECONDS,
            "decode_recompute_threshold": RECOMPUTED_TOKENS + 1,
        }
        self._engines = EngineSet()
        self.ours, self.builtin = self._engines.start(
            small_options(
                directory,
                "ours",
                core=0,
                tensor_parallel_size=self.our_ranks,
                trace_directory=self.traces.directory,
                extra_config=our_config,
                **common,
            ),
            small_options(
                directory,
                "builtin",
                core=1,
                tensor_parallel_size=self.builtin_ranks,
                connector="builtin",
                calm_polling=True,
                extra_config=BUILTIN_CONFIG | {"kv_lease_duration": self.builtin_lease_seconds},
                **common,
            ),
        )

    def close(self) -> None:
        self._engines.stop()


class OursWithTwoRanks(UnequalPair):
    our_ranks, builtin_ranks = 2, 1


class BuiltinWithTwoRanks(UnequalPair):
    our_ranks, builtin_ranks = 1, 2


class BuiltinWithReplicas(BuiltinWithTwoRanks):
    """Both ranks of a model with latent attention have the same KV."""

    @staticmethod
    def of_the_model() -> dict[str, Any]:
        return {"model": tiny_deepseek(), "attention_backend": "CPU_MLA", "prefix_caching": False}


class ShortLeases(OursWithTwoRanks):
    """Leases that a test can outwait. Ours is the longer one, because so long it believes in one of the other, which
    answers nothing; and not more than twice as long, so that its heartbeats come often enough for the other.
    """

    our_lease_seconds, builtin_lease_seconds = 18, 12


@dataclass(frozen=True)
class Way:
    """One engine of a pair lends, the other reads."""

    pair: UnequalPair
    prefill: Engine
    decode: Engine
    service: PrefillDecode

    @property
    def traces(self) -> Traces:
        return self.pair.traces

    @property
    def is_to_ours(self) -> bool:
        return self.decode is self.pair.ours

    def key(self, name: object) -> str:
        """A request id of this way round."""
        return f"{name}-to-{self.decode.name}"

    def prefilled(self, text: str, key: str) -> dict[str, Any]:
        """Parameters of a prompt that P has computed."""
        answer = self.service.prefill(text, key)
        assert answer.ok, answer.error
        assert answer.kv_transfer_params is not None
        return answer.kv_transfer_params

    def assert_read(self, key: str, blocks: int | None = None) -> None:
        """The side that is ours went the plain way, on each of its ranks: D read so many blocks, or P's lease was
        released."""
        if not self.is_to_ours:
            self.assert_released(key)
            return
        for request in self.traces.ended_on_ranks(key, self.pair.our_ranks):
            assert request.states in REQUEST_PATHS_PLAIN, request
            assert blocks is None or request.blocks == blocks

    def assert_released(self, key: str) -> None:
        """If P is ours, its lease has ended on each rank because D said that it needs it no more."""
        if not self.is_to_ours:
            for lease in self.traces.ended_leases(key, self.pair.our_ranks):
                assert lease.states in LEASE_PATHS_PLAIN, lease

    def assert_blocks_are_free(self) -> None:
        assert self.service.prefill_client.blocks_are_free()
        assert self.service.decode_client.blocks_are_free()

    def meet(self) -> None:
        """The first request over a connection. A built-in D gives a handshake up after five seconds, which a starved
        machine makes of a millisecond; then nobody reads what P has lent, and it is waited for that P has it back."""
        for attempt in range(ATTEMPTS):
            key = self.key(f"first-{attempt}")
            answer = self.service.pd(prompt(40, key), key)
            if answer.ok:
                return
            lease_seconds = max(self.pair.our_lease_seconds, self.pair.builtin_lease_seconds)
            assert self.service.prefill_client.blocks_are_free(lease_seconds + LEASE_END_SECONDS)
        raise AssertionError(answer.error)

    def leave_in_queue(self, text: str, key: str, params: Any) -> None:
        """A client of D goes away when D, which is busy with others, has its request."""
        d = self.service.decode_client
        before = given(d)
        self._leave(text, key, params, lambda: given(d) > before)

    def leave_in_read(self, text: str, key: str, params: Any) -> None:
        """The client of D's only request goes away when D has ordered all READs for it."""
        self._leave(text, key, params, lambda: self._reads(key))

    def _leave(self, text: str, key: str, params: Any, is_there: Callable[[], bool]) -> None:
        with self.service.decode_client.leaving(text, request_id=key, kv_transfer_params=params) as client:
            wait_for(lambda: is_there() or None, f"request {key} where its client is to leave")
            assert not client.is_answered

    def _reads(self, key: str) -> bool:
        """A built-in D orders READs in the step that gives the request its blocks."""
        if not self.is_to_ours:
            return self.service.decode_client.metric("vllm:kv_cache_usage_perc") > 0
        on_ranks = [request.states[-1] for story in self.traces.stories(key) for request in story.requests]
        return on_ranks == ["reading"] * self.pair.our_ranks


@dataclass(frozen=True)
class Mixed:
    """A pair, and the two ways round; its engines have met."""

    pair: UnequalPair
    to_ours: Way
    to_builtin: Way
    logged_before: dict[str, int]
    """How many characters each engine had logged by then."""

    @property
    def ways(self) -> tuple[Way, Way]:
        return self.to_ours, self.to_builtin

    def troubles(self) -> dict[str, float]:
        """What both engines have counted that is not to happen."""
        return {
            f"{way.decode.name} {counter}": way.service.decode_client.metric(counter)
            for way in self.ways
            for counter in COUNTERS_OF_TROUBLE
        }

    def assert_logs_are_clean(self, allowed: Sequence[str] = ()) -> None:
        """No error, no traceback, and no warning without one of the `allowed` texts, since the engines have met. What
        they warn of at their start is about the machine; for their first requests see `Way.meet`."""
        for engine in (self.pair.ours, self.pair.builtin):
            log = engine.log()[self.logged_before[engine.name] :]
            assert "Traceback" not in log
            wrong = [line for line in log.splitlines() if LOG_LEVEL.match(line)]
            assert [line for line in wrong if not any(text in line for text in allowed)] == []


@contextmanager
def both_ways(pair: UnequalPair) -> Iterator[Mixed]:
    with PrefillDecode(pair.builtin, pair.ours) as to_ours, PrefillDecode(pair.ours, pair.builtin) as to_builtin:
        ways = Way(pair, pair.builtin, pair.ours, to_ours), Way(pair, pair.ours, pair.builtin, to_builtin)
        for way in ways:
            way.meet()
        yield Mixed(pair, *ways, {engine.name: len(engine.log()) for engine in (pair.ours, pair.builtin)})


def given(client: Client) -> float:
    """How many requests an engine that steps has been given. Exact while none of them is aborted."""
    page = [line.partition("{")[::2] for line in client.metrics_page().splitlines()]
    return sum(float(rest.rpartition(" ")[2]) for name, rest in page if name in REQUESTS_GIVEN)


@contextmanager
def occupied(engine: Engine) -> Iterator[None]:
    """What comes to the engine waits in its queue until the block is left: as many requests as run at a time decode,
    and many more are before it in the queue."""
    body = {"model": "tiny", "prompt": "occupant", "max_tokens": OCCUPANT_TOKENS, "n": OCCUPANTS, "stream": True}
    # `top_k` 1: vLLM refuses several samples with temperature 0.
    body |= {"temperature": 1.0, "top_k": 1, "ignore_eos": True}
    url = f"http://{LOOPBACK}:{engine.options.http_port}/v1/completions"
    with Client(engine) as client:
        before = client.metric(REQUESTS_ENDED)
        with httpx.stream("POST", url, json=body, timeout=CALL_TIMEOUT_SECONDS, trust_env=False) as response:
            response.raise_for_status()
            chunks = response.iter_bytes()  # the connection is closed when nobody refers to it
            next(chunks)
            wait_for(lambda: given(client) - before >= OCCUPANTS or None, f"{OCCUPANTS} requests")
            yield
