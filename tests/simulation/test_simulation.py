"""The simulator over a few dozen seeds, its own determinism, and oracles that do complain.

A seed that fails here is replayed by `python -m tests.simulation --seed N`, which shrinks it too. Plans that once found
a bug are in regressions/ and run as well.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from connector.runtime import peer_actor
from connector.runtime.context import ActorContext
from connector.runtime.handshake import Connection
from connector.runtime.messages import Outcome, PeerAddress, ReceiveEnded, SendEnded
from connector.runtime.peer_actor import PeerActor
from connector.runtime.request_run import RequestRun
from connector.runtime.supervisor import Supervisor
from statemachine import request
from tests.simulation.__main__ import read_plan
from tests.simulation.cluster import simulate
from tests.simulation.faults import Fault, Kind, Plan, draw_plan
from tests.simulation.shrink import shrink

ROOT = Path(__file__).parents[2]
REGRESSIONS = sorted((Path(__file__).parent / "regressions").glob("*.json"))
SEEDS = 30
SEEDS_OF_A_MUTANT = 12


@pytest.mark.parametrize("seed", range(SEEDS))
def test_seed(seed: int) -> None:
    result = simulate(draw_plan(seed))
    assert result.violations == []
    assert result.requests > 20
    assert result.outcomes["done"] > 0


@pytest.mark.parametrize("path", REGRESSIONS, ids=lambda path: path.stem)
def test_regression(path: Path) -> None:
    assert simulate(read_plan(path)).violations == []


def test_without_faults_every_request_is_served() -> None:
    seeds = [seed for seed in range(200) if not draw_plan(seed).faults][:3]
    assert len(seeds) == 3
    for seed in seeds:
        result = simulate(draw_plan(seed))
        assert set(result.outcomes) <= {"done", "not awaited", "AbortedByClient", "TooManyPeers"}


@pytest.mark.parametrize("seed", [3, 7])
def test_a_seed_gives_the_same_trace_in_every_process(seed: int, tmp_path: Path) -> None:
    traces = []
    for hash_seed in ("1", "4711"):
        path = tmp_path / f"trace-{hash_seed}"
        command = [sys.executable, "-m", "tests.simulation", "--seed", str(seed), "--trace", str(path)]
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=60, capture_output=True)
        traces.append(path.read_bytes())
    assert traces[0].count(b"\n") > 500
    assert traces[0] == traces[1]


def test_different_seeds_give_different_traces() -> None:
    assert simulate(draw_plan(0)).fingerprint() != simulate(draw_plan(2)).fingerprint()


def test_a_plan_survives_its_file() -> None:
    plan = draw_plan(7)
    assert plan.faults
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan


# --- oracles complain about what is broken --------------------------------------------------------------------------


def believe_in_every_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    forever = request.Proof(proven_until_ns=2**62, basis="granted")
    monkeypatch.setattr(PeerActor, "_proof", lambda self, run, connection: forever)


def report_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    report = PeerActor._report

    def twice(self: PeerActor, run: RequestRun, effect: request.Report) -> None:
        report(self, run, effect)
        report(self, run, effect)

    monkeypatch.setattr(PeerActor, "_report", twice)


def report_quarantined_blocks_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    def lie(outcome: Outcome) -> Outcome:
        if isinstance(outcome, ReceiveEnded):
            return msgspec.structs.replace(outcome, quarantined=False)
        return outcome

    emitting(monkeypatch, lie)


def lose_every_end_of_a_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    emitting(monkeypatch, lambda out: None if isinstance(out, SendEnded) else out)


def handshake_with_one_peer_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    handshake = PeerActor._handshake
    locks: dict[int, trio.Lock] = {}

    async def in_turn(self: PeerActor, address: PeerAddress) -> None:
        async with locks.setdefault(id(self._context), trio.Lock()):
            await handshake(self, address)

    monkeypatch.setattr(PeerActor, "_handshake", in_turn)


def keep_every_remote_list(monkeypatch: pytest.MonkeyPatch) -> None:
    async def only_the_agent(context: ActorContext, connection: Connection) -> None:
        await context.nixl.unload_agent(connection.agent)

    monkeypatch.setattr(peer_actor, "disconnect", only_the_agent)


def emitting(monkeypatch: pytest.MonkeyPatch, change: Callable[[Outcome], Outcome | None]) -> None:
    """Change what the actors tell the engine; None keeps it from it."""
    original = Supervisor.__init__

    def changed(self: Supervisor, *, emit: Callable[[Outcome], None], **others: Any) -> None:
        def tell(outcome: Outcome) -> None:
            said = change(outcome)
            if said is not None:
                emit(said)

        original(self, emit=tell, **others)

    monkeypatch.setattr(Supervisor, "__init__", changed)


@pytest.mark.parametrize(
    ("break_it", "fault", "oracle"),
    [
        (believe_in_every_lease, (Kind.PARTITION, "d0>p0", 1.0, 5.0), "bytes"),
        (report_twice, None, "report once"),
        (report_quarantined_blocks_as_free, (Kind.READ_STALL, "d0>p0", 0.0, 6.0), "block reuse"),
        (lose_every_end_of_a_lease, None, "free once"),
        (handshake_with_one_peer_at_a_time, (Kind.PARTITION, "d0>p0", 0.0, 4.0), "isolation"),
        (keep_every_remote_list, (Kind.READ_ERROR, "d0>p0", 0.0, 4.0), "leaks"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_broken_product_is_noticed(
    break_it: Callable[[pytest.MonkeyPatch], None],
    fault: tuple[Kind, str, float, float] | None,
    oracle: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faults = (
        [Fault(kind=fault[0], target=fault[1], at_seconds=fault[2], duration_seconds=fault[3])]
        if fault is not None
        else []
    )
    break_it(monkeypatch)
    for seed in range(SEEDS_OF_A_MUTANT):
        if any(each.oracle == oracle for each in simulate(Plan(seed=seed, faults=faults)).violations):
            return
    pytest.fail(f"the oracle {oracle!r} saw nothing in {SEEDS_OF_A_MUTANT} seeds")


def test_a_failing_plan_is_shrunk_to_the_fault_that_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    report_quarantined_blocks_as_free(monkeypatch)
    harmless = [Fault(kind=Kind.WALL_CLOCK_JUMP, target="d0", at_seconds=at, duration_seconds=0.1) for at in (0.5, 1.0)]
    stall = Fault(kind=Kind.READ_STALL, target="d0>p0", at_seconds=0.0, duration_seconds=6.0)
    for seed in range(SEEDS_OF_A_MUTANT):
        plan = Plan(seed=seed, faults=[harmless[0], stall, harmless[1]])
        if any(each.oracle == "block reuse" for each in simulate(plan).violations):
            assert shrink(plan, "block reuse", simulate).faults == [stall]
            return
    pytest.fail("no seed failed")
