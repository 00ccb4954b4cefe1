"""The draining machine: what an engine that is to end waits for."""

from __future__ import annotations

import pytest

from statemachine.draining import (
    MACHINE,
    Asked,
    Counted,
    Draining,
    SayDrained,
    SayDraining,
    State,
    TellWorkers,
    WorkerDone,
)
from statemachine.kernel import Effect, Event

SERVING = Draining(lease_ns=30)
ASKED = Asked(now_ns=100, cause="a test", grace_ns=60, workers=2)


def after(*events: Event) -> tuple[Draining, list[Effect]]:
    """The value, and everything it led to but for its beginning."""
    value, effects = MACHINE.step(SERVING, ASKED)
    assert effects == (SayDraining(), TellWorkers(grace_ns=60))
    led_to: list[Effect] = []
    for event in events:
        value, effects = MACHINE.step(value, event)
        led_to += effects
    return value, led_to


def test_it_waits_until_every_worker_was_told_and_nothing_is_lent() -> None:
    done = [WorkerDone(worker=0), WorkerDone(worker=1)]
    for events in (
        (Counted(now_ns=101, lent=0),),
        (done[0], Counted(now_ns=101, lent=0)),
        (*done, Counted(now_ns=101, lent=1)),
    ):
        value, effects = after(*events)
        assert (value.state, effects) == (State.DRAINING, [])
    value, effects = after(*done, Counted(now_ns=101, lent=1), Counted(now_ns=102, lent=0))
    assert (value.state, effects) == (State.DRAINED, [SayDrained(lent=0)])


@pytest.mark.parametrize("lent", [0, 3])
def test_the_grace_period_bounds_the_wait(lent: int) -> None:
    value, effects = after(Counted(now_ns=159, lent=lent), Counted(now_ns=160, lent=lent))
    assert (value.state, effects) == (State.DRAINED, [SayDrained(lent=lent)])
    assert (value.began_ns, value.ends_ns, value.stops_granting_ns) == (100, 160, 130)


def test_it_begins_once_and_is_said_once() -> None:
    again = Asked(now_ns=150, cause="another", grace_ns=9999, workers=7)
    value, effects = after(again, WorkerDone(worker=0), WorkerDone(worker=1), again, Counted(now_ns=151, lent=0))
    assert (value.cause, value.ends_ns, effects) == ("a test", 160, [SayDrained(lent=0)])
    value, effects = after(Counted(now_ns=160, lent=2), again, WorkerDone(worker=1))
    assert (value.state, effects) == (State.DRAINED, [SayDrained(lent=2)])
