"""What is left is counted: after a thousand requests of all kinds and a shutdown, in both processes; and in a decode
engine after prefill engines have come and gone."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.integration.house import check_loaded
from tests.rig import (
    OURS,
    BlackHole,
    EngineOptions,
    EngineRig,
    Holdings,
    RequestOutcome,
    RequestSpec,
    Snapshot,
    dead_params,
    engine_pair,
    expected_output,
    free_port,
    prompt,
)
from tests.rig.process import kinds_of_files, shared_mappings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

_BLOCKS = 128
_ROUNDS = 50
_WARM_UP_ROUNDS = 10
"""By then each pool, cache and buffer has reached its size."""
_DEAD_ENGINES = 4
_ROUNDS_TO_WAIT = 8
_HANDSHAKE_SECONDS = 3.0
_LEASE_SECONDS = 8.0
"""What blocks wait for whose request was too malformed to say whom to tell."""
_DESCRIPTORS_GROWTH_MAX = 2
_THREADS_GROWTH_MAX = 2
_RESIDENT_GROWTH_BYTES_MAX = 12 << 20
"""800 requests that left 16 KB each behind would be above it."""

_PER_ROUND = {"good": 8, "again": 4, "aborted at once": 1, "aborted": 2, "bad": 2, "dead": 2, "dead, aborted": 1}
"""Requests of a round by kind, 20 in all."""

OPTIONS = {
    "kv_lease_duration": _LEASE_SECONDS,
    "handshake_timeout_seconds": _HANDSHAKE_SECONDS,
    "backoff_initial_seconds": 0.2,
    "backoff_max_seconds": 0.4,
}


@dataclass
class Load:
    """Sends rounds of requests and knows how each has to end."""

    prefill: EngineRig
    decode: EngineRig
    dead: list[dict[str, Any]]
    sent: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    open_dead: deque[list[str]] = field(default_factory=deque)
    last_prompts: list[list[int]] = field(default_factory=list)

    def round(self, number: int) -> None:
        """One round; requests to dead engines are waited for some rounds later, as they take longer."""
        plan = [(f"{kind} {number}.{index}", kind) for kind, count in _PER_ROUND.items() for index in range(count)]
        prompts = {name: self._prompt(name, kind, index) for index, (name, kind) in enumerate(plan)}
        self.last_prompts = [prompts[name] for name, kind in plan if kind == "good"]
        params = self.prefill.prefill_all({name: prompts[name] for name, kind in plan if not kind.startswith("dead")})
        specs = {
            name: RequestSpec(name, prompts[name], 2, self._params(params, name, kind, number)) for name, kind in plan
        }
        self.sent += len(specs)
        self._abort_at_once([specs.pop(name) for name, kind in plan if kind == "aborted at once"])
        self.decode.submit(*specs.values())
        self.decode.abort(*(name for name, kind in plan if kind in ("aborted", "dead, aborted")))
        waited = [name for name, kind in plan if name in specs and kind != "dead"]
        self.open_dead.append([name for name, kind in plan if kind == "dead"])
        if len(self.open_dead) > _ROUNDS_TO_WAIT:
            waited += self.open_dead.popleft()
        for outcome in self.decode.wait_all(waited):
            self._take(outcome, prompts)

    def finish(self) -> tuple[Snapshot, Snapshot]:
        """Wait until nothing is open and every block is free, on both sides."""
        while self.open_dead:
            for outcome in self.decode.wait_all(self.open_dead.popleft()):
                self._take(outcome, {})
        # The dead engines are owed releases: D tries to reach them until their leases must be over.
        time.sleep(_LEASE_SECONDS + 2 * _HANDSHAKE_SECONDS)
        return self.prefill.wait_until_whole(60), self.decode.wait_until_whole(60)

    def _prompt(self, name: str, kind: str, index: int) -> list[int]:
        if kind == "again" and self.last_prompts:
            return self.last_prompts[index % len(self.last_prompts)]
        return prompt(name, 20 + 17 * (index % 5))

    def _params(self, params: dict[str, dict[str, Any]], name: str, kind: str, number: int) -> dict[str, Any]:
        if kind.startswith("dead"):
            return dict(self.dead[number % len(self.dead)])
        if kind == "bad":
            return params[name] | {"remote_block_ids": [[_BLOCKS + 7, -1, 0]]}
        return params[name]

    def _abort_at_once(self, specs: list[RequestSpec]) -> None:
        """Aborted before any step: they are never scheduled."""
        self.decode.pause_steps()
        self.decode.submit(*specs)
        self.decode.abort(*(spec.request_id for spec in specs))
        for outcome in self.decode.wait_all([spec.request_id for spec in specs]):
            self._take(outcome, {})
        self.decode.resume_steps()

    def _take(self, outcome: RequestOutcome, prompts: dict[str, list[int]]) -> None:
        kind = outcome.request_id.rsplit(" ", 1)[0]
        if kind in ("good", "again"):
            check_loaded(outcome, prompts[outcome.request_id], 2)
        elif kind.endswith(("aborted", "at once")):
            assert outcome.finish in ("abort", "length"), outcome  # it may have been faster than the abort
        else:
            assert outcome.finish == "error", outcome
            assert outcome.receive_failed
        self.outcomes[kind] = self.outcomes.get(kind, 0) + 1


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Load]:
    """Engines of their own, over the default transport, because they are shut down."""
    with (
        BlackHole() as hole,
        engine_pair(OURS, tmp_path, layers=4, blocks=_BLOCKS, max_batched_tokens=512, extra_config=OPTIONS) as (
            prefill,
            decode,
        ),
    ):
        dead = [dead_params(hole.port, 4) for _ in range(_DEAD_ENGINES)]
        yield Load(prefill, decode, dead)


def check_growth(before: Snapshot, after: Snapshot) -> None:
    """Between two moments at which nothing is open."""
    assert after.threads == before.threads
    assert after.native_threads <= before.native_threads + _THREADS_GROWTH_MAX
    assert after.open_files <= before.open_files + _DESCRIPTORS_GROWTH_MAX
    assert after.resident_bytes <= before.resident_bytes + _RESIDENT_GROWTH_BYTES_MAX


def test_a_thousand_requests_and_a_shutdown_leave_nothing(load: Load) -> None:
    """Scenarios 50, 51, 57: handles, agents, lists, requests, leases, threads, descriptors, memory, blocks."""
    for number in range(_WARM_UP_ROUNDS):
        load.round(number)
    before = load.finish()
    for number in range(_WARM_UP_ROUNDS, _ROUNDS):
        load.round(number)
    after = load.finish()
    assert load.sent == sum(load.outcomes.values()) == 1000
    assert load.outcomes == {kind: count * _ROUNDS for kind, count in _PER_ROUND.items()}
    for then, now in zip(before, after, strict=True):
        check_growth(then, now)

    prefill, decode = load.prefill.inspect(), load.decode.inspect()
    assert prefill.holdings == Holdings(remote_agents=0, descriptor_lists=0, reads=0)
    # One connected engine: its agent, the list of its memory and the list of our own.
    connected = Holdings(remote_agents=1, descriptor_lists=2, reads=0, peer_actors=1 + _DEAD_ENGINES)
    deadline = time.monotonic() + 2 * _LEASE_SECONDS
    while decode.holdings != connected and time.monotonic() < deadline:
        time.sleep(0.2)  # releases are owed to engines that were never met, for as long as their leases may last
        decode = load.decode.inspect()
    assert decode.holdings == connected
    assert prefill.unowned_blocks == decode.unowned_blocks == frozenset()

    for engine in (load.decode, load.prefill):
        closed = engine.close()
        assert closed is not None, engine.log_tail()
        assert closed.holdings == Holdings(remote_agents=0, descriptor_lists=0, reads=0)
        assert closed.threads == ()
        assert [target for target in closed.left_open if target.startswith("socket:")] == []
        assert closed.left_open == ()
        assert closed.seconds < 20


# --- prefill engines that come and go ---------------------------------------------------------------------------------

_LIVES_TO_WARM_UP = 3
_LIVES = 9
_LOADED_IN_A_LIFE = 4
_LIFE_BLOCKS = 64
_LIFE_OPTIONS = {
    "kv_lease_duration": 8.0,
    "handshake_timeout_seconds": 3.0,
    "quiesce_timeout_seconds": 1.0,
    "backoff_initial_seconds": 0.2,
    "backoff_max_seconds": 0.4,
    "engine_ttl": 1.0,
}
_GROWTH_OF_A_LIFE_BYTES_MAX = 1 << 17
"""For each life of a prefill engine, in the mean; it was 10 kB (docs/performance.md)."""
_ROUNDS_OF_LIVES_MAX = 3
"""A pool of the allocator that grows once is no leak: what each life leaves behind is seen in every round."""


@dataclass
class Lives:
    """A decode engine that computes what it cannot load, over TCP, and one prefill engine after another."""

    decode: EngineRig
    directory: Path
    lives: int = 0

    def live(self) -> None:
        """A prefill engine starts, serves, and is killed in the middle of a READ."""
        self.lives += 1
        options = replace(
            self.decode.options,
            kv_role="kv_producer",
            engine_id=f"life-{self.lives}",
            side_channel_port=free_port(),
        )
        with EngineRig(options, self.directory) as prefill:
            prefill.wait_ready()
            for number in range(_LOADED_IN_A_LIFE):
                name = f"life-{self.lives}-{number}"
                tokens = prompt(name, 150 + 50 * number)
                check_loaded(self.decode.decode(name, tokens, prefill.prefill(name, tokens), 2), tokens, 2)
            name = f"life-{self.lives}-last"
            tokens = prompt(name, 400)
            params = prefill.prefill(name, tokens)
            prefill.freeze()
            self.decode.submit(RequestSpec(name, tokens, 2, params))
            self._wait_for_a_read()
            prefill.kill()
            outcome = self.decode.wait(name)
            assert outcome.receive_failed
            assert outcome.output_token_ids == expected_output(tokens, 2)

    def settle(self) -> Snapshot:
        """Until no engine is known and every block is free."""
        deadline = time.monotonic() + 60
        while (inside := self.decode.inspect().holdings) is None or inside.peer_actors:
            assert time.monotonic() < deadline, inside
            time.sleep(0.1)
        return self.decode.wait_until_whole(60)

    def _wait_for_a_read(self) -> None:
        deadline = time.monotonic() + 30
        while (inside := self.decode.inspect().holdings) is None or not inside.reads:
            assert time.monotonic() < deadline, inside
            time.sleep(0.01)


@pytest.fixture
def lives(tmp_path: Path) -> Iterator[Lives]:
    options = EngineOptions(
        OURS,
        "kv_consumer",
        free_port(),
        kv_load_failure_policy="recompute",
        extra_config=_LIFE_OPTIONS,
        environment={"UCX_TLS": "tcp,self"},
        layers=4,
        blocks=_LIFE_BLOCKS,
        max_batched_tokens=512,
    )
    with EngineRig(options, tmp_path) as decode:
        decode.wait_ready()
        yield Lives(decode, tmp_path)


def test_prefill_engines_that_come_and_go_leave_nothing_behind(lives: Lives) -> None:
    """Scenarios 47 to 50 over TCP, where an engine that dies breaks READs: agents, lists, actors, threads,
    descriptors, and the memory of the decode engine that computes the prompts instead."""
    for _ in range(_LIVES_TO_WARM_UP):
        lives.live()
    before = after = lives.settle()
    grown_bytes: list[int] = []
    while not grown_bytes or (
        grown_bytes[-1] > _LIVES * _GROWTH_OF_A_LIFE_BYTES_MAX and len(grown_bytes) < _ROUNDS_OF_LIVES_MAX
    ):
        start_bytes = after.resident_bytes
        for _ in range(_LIVES):
            lives.live()
        after = lives.settle()
        grown_bytes.append(after.resident_bytes - start_bytes)
    assert lives.decode.inspect().holdings == Holdings(remote_agents=0, descriptor_lists=1, reads=0)
    assert after.threads == before.threads
    assert after.native_threads <= before.native_threads + _THREADS_GROWTH_MAX
    assert after.open_files <= before.open_files + _DESCRIPTORS_GROWTH_MAX
    assert min(grown_bytes) <= _LIVES * _GROWTH_OF_A_LIFE_BYTES_MAX, f"in rounds of {_LIVES} lives: {grown_bytes}"


def held_for_others(engine: EngineRig) -> tuple[Counter[str], Counter[str]]:
    """Descriptors by what they are, and memory that is mapped by other processes, too, or may be."""
    return kinds_of_files(engine.process_id), shared_mappings(engine.process_id)


def test_of_a_prefill_engine_that_was_killed_a_decode_engine_holds_nothing(tmp_path: Path) -> None:
    """Scenario 49, over shared memory, which a D that has mapped it keeps from being freed. D maps none of P's, and
    what it has opened for P it closes when P is gone, whether or not it has a handshake with anybody afterwards."""
    options = EngineOptions(
        OURS, "kv_consumer", free_port(), extra_config=OPTIONS, layers=4, blocks=_LIFE_BLOCKS, max_batched_tokens=512
    )
    with EngineRig(options, tmp_path) as decode:
        decode.wait_ready()
        before = held_for_others(decode)
        for life in range(2):
            name, tokens = f"killed-{life}", prompt(f"killed-{life}", 150)
            its_options = replace(options, kv_role="kv_producer", engine_id=name, side_channel_port=free_port())
            with EngineRig(its_options, tmp_path) as prefill:
                prefill.wait_ready()
                own = shared_mappings(prefill.process_id) - before[1]
                assert own, "it has none, so nothing is shown"
                check_loaded(decode.decode(name, tokens, prefill.prefill(name, tokens), 2), tokens, 2)
                files, mappings = held_for_others(decode)
                assert files - before[0], "nothing is open for P, so nothing is shown"
                assert not mappings & own
                prefill.kill()
            deadline = time.monotonic() + 60
            while any(more := [now - then for now, then in zip(held_for_others(decode), before, strict=True)]):
                assert time.monotonic() < deadline, more
                time.sleep(0.1)
            inside = decode.inspect().holdings
            assert inside is not None
            assert (inside.remote_agents, inside.descriptor_lists) == (0, 1)
