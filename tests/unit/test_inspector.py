"""What the inspector lists of real cores, without actors, sockets or agents (`tests/actors/test_inspection.py`)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import trio

from connector.clock import NS_PER_SECOND
from connector.runtime.inspector import Inspector
from connector.runtime.recorder import Recorder
from connector.wire.inspection import EngineFacts, HoldRow, Inspect, What, decode_inspected
from statemachine import peer, remote_engine
from statemachine.lease import LeaseName
from statemachine.remote_engine import EngineLimits, RemoteEngine
from tests.unit.hand_clock import HandClock

S = NS_PER_SECOND
LIMITS = EngineLimits(
    lease_ns=30 * S,
    margin_ns=S,
    request_ns=120 * S,
    quiesce_ns=10 * S,
    grace_ns=S,
    backoff_first_ns=S,
    backoff_max_ns=30 * S,
    incompatible_ns=60 * S,
    retries=1,
)
LEASE = LeaseName("lent", 7)
RANKS = ("tp0", "tp1")
ADDRESS = "10.0.0.1:5600"


class Asked:
    """The inspector of a worker that reads from one engine."""

    def __init__(self) -> None:
        self.clock = HandClock()
        recorder = Recorder(engine_id="d", rank=0, role="worker", clock=self.clock, sink=None)
        observer = recorder.observer("P")
        self.core = RemoteEngine("P", ADDRESS, LIMITS, observe=observer)
        actor = SimpleNamespace(core=self.core, observer=observer)
        context: Any = SimpleNamespace(clock=self.clock, recorder=recorder)
        nobody: Any = None
        peers: Any = {"P": actor}
        self._inspector = Inspector(
            facts=EngineFacts(),
            context=context,
            peers=peers,
            roster=nobody,
            lease_keeper=nobody,
            introducer=nobody,
            control=nobody,
            deferred=(),
            stopped=lambda: None,
        )

    def handle(self, event: Any) -> None:
        self.core.handle(event, self.clock.now_ns())
        self.core.advance(self.clock.now_ns())

    def rows(self, what: What) -> tuple[Any, ...]:
        (frame,) = trio.run(self._inspector._answer, Inspect(number=1, what=what), b"tool")
        return decode_inspected([frame]).rows


def announced() -> Asked:
    asked = Asked()
    asked.handle(remote_engine.Announced(request_id="wants", lease=LEASE, address=ADDRESS, age_ns=0))
    return asked


def holds(asked: Asked) -> list[tuple[int, str, str | None]]:
    return [(row.rank, row.state, row.why) for row in asked.rows("holds") if isinstance(row, HoldRow)]


def test_a_lease_that_no_rank_was_asked_for_yet_has_one_row() -> None:
    assert holds(announced()) == [(0, "unmet", None)]


@pytest.mark.parametrize("goes", [False, True])
def test_the_holds_of_all_ranks_are_told_also_while_the_engine_is_not_connected(goes: bool) -> None:
    asked = announced()
    asked.handle(remote_engine.Connected(connection=1, workers=RANKS, is_builtin=False, life="x"))
    asked.clock.ns += S
    for rank, (held, gone) in enumerate([(((LEASE, 29 * S),), ()), ((), ((LEASE, "expired"),))]):
        answer = remote_engine.HoldAnswered(connection=1, rank=rank, sent_ns=100 * S, held=held, gone=gone)
        asked.handle(answer)
    if goes:
        asked.handle(remote_engine.LinkLost(connection=1, detail="reset"))
        asked.handle(remote_engine.TornDown(connection=1))
        assert asked.core.state is not peer.State.READY
        assert asked.core.view().ranks == 0
    assert holds(asked) == [(0, "held", None), (1, "gone", "expired")]
