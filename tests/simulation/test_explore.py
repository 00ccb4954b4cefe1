"""The model checker finds nothing in the production machines, and finds what is wrong with broken ones.

Each broken machine is production's with one handler replaced. A broken one that is not caught is a hole in the checker.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from statemachine import lease, peer, request
from statemachine.explore import Bounds, Machines, Violation, explore
from statemachine.kernel import NO_EFFECTS, Effects, Event
from statemachine.request import State
from tests.simulation.broken import broken


@pytest.mark.parametrize(
    "bounds",
    [
        Bounds(requests=2, ranks=2, deviations=1),
        Bounds(requests=1, ranks=1, deviations=3),
        Bounds(requests=1, ranks=2, deviations=2),
    ],
    ids=str,
)
def test_nothing_is_wrong_with_the_production_machines(bounds: Bounds) -> None:
    found = explore(bounds)
    assert found.states > 1000
    assert found.ends > 0


def _ended(value: request.Request, state: State, failure: Any) -> request.Request:
    return msgspec.structs.replace(value, state=state, failure=failure, in_flight=frozenset())


def _abort_without_draining(value: request.Request, event: Event) -> tuple[request.Request, Effects]:
    """Scenario 8: the destination is freed under a READ."""
    failure = request.AbortedByClient()
    return _ended(value, State.FAILED, failure), (request.Report(failure=failure),)


def _time_out_without_draining(value: request.Request, event: Any) -> tuple[request.Request, Effects]:
    """Scenario 5: a READ that was given up is taken for one that has ended."""
    failure = request.DeadlineExceeded(timeout_seconds=1, phase="reading")
    return _ended(value, State.EXPIRED, failure), (request.Report(failure=failure),)


def _quarantine_nothing(value: request.Request, event: Any) -> tuple[request.Request, Effects]:
    """Scenario 5: the blocks of a READ that never ended go back to the pool."""
    failure = request.Quarantined(transfers=1, waited_seconds=1, cause="x")
    return _ended(value, State.FAILED, failure), (request.Report(failure=failure),)


def _believe_every_completion(value: request.Request, event: Any) -> tuple[request.Request, Effects]:
    """Scenario 1: a READ that completes is a READ of the right bytes."""
    done = msgspec.structs.replace(value, state=State.DONE, in_flight=frozenset())
    return done, (request.SendRelease(), request.Report(failure=None))


def _report_when_draining_begins(value: request.Request, event: Any) -> tuple[request.Request, Effects]:
    """Scenario 3: a failure is reported when it is seen, while the READ goes on."""
    failure = request.AbortedByClient()
    draining = msgspec.structs.replace(value, state=State.DRAINING, failure=failure, ending=State.FAILED)
    return draining, (request.Report(failure=failure), request.StartQuiesceTimer())


def _wait_for_ever(value: request.Request, event: Any) -> tuple[request.Request, Effects]:
    """Scenario 45: no deadline anywhere."""
    return value, NO_EFFECTS


def _fail_without_report(value: request.Request, event: Any) -> tuple[request.Request, Effects]:
    """Scenario 43: the handshake fails and nobody fails the request."""
    return _ended(value, State.FAILED, event.failure), NO_EFFECTS


def _release_before_reading(value: request.Request, event: Any) -> tuple[request.Request, Effects]:
    """P is told that it may free what is about to be read."""
    reading = msgspec.structs.replace(
        value, state=State.READING, in_flight=frozenset(range(event.reads)), proof=event.proof
    )
    return reading, (request.SendRelease(), request.PostReads(reads=event.reads))


def _never_expire(value: lease.Lease, event: Any) -> tuple[lease.Lease, Effects]:
    """Scenario 54: blocks whose consumer is gone are kept for ever."""
    return value, NO_EFFECTS


def _free_and_stay_held(value: lease.Lease, event: Any) -> tuple[lease.Lease, Effects]:
    """A lease that was consumed expires once more."""
    return value, (lease.FreeBlocks(),)


def _rebuild_at_once(value: peer.Peer, event: Any) -> tuple[peer.Peer, Effects]:
    """Scenario 14: the agent is removed under a READ."""
    return msgspec.structs.replace(value, state=peer.State.IDLE), (peer.TearDownConnection(),)


def _leave_unanswered(value: peer.Peer, event: Any) -> tuple[peer.Peer, Effects]:
    """Scenario 41: a request that comes when the peer is ready is parked and forgotten."""
    return value, NO_EFFECTS


def _report_every_read(value: request.Request, event: Any) -> tuple[request.Request, Effects]:
    """Scenario 24: the failure of a READ is reported, and the end of the request is reported too."""
    ended = _ended(value, State.FAILED, value.failure)
    return ended, (request.Report(failure=value.failure), request.Report(failure=value.failure))


READING, DRAINING, PENDING = State.READING, State.DRAINING, State.PENDING_HANDSHAKE
BROKEN = [
    (Machines(request=broken(request.MACHINE, (READING, request.Aborted), _abort_without_draining, State.FAILED)), "1"),
    (
        Machines(
            request=broken(
                request.MACHINE, (READING, request.DeadlinePassed), _time_out_without_draining, State.EXPIRED
            )
        ),
        "1",
    ),
    (
        Machines(
            request=broken(request.MACHINE, (DRAINING, request.QuiesceTimeout), _quarantine_nothing, State.FAILED)
        ),
        "1",
    ),
    (
        Machines(
            request=broken(request.MACHINE, (READING, request.ReadCompleted), _believe_every_completion, State.DONE)
        ),
        "3",
    ),
    (
        Machines(request=broken(request.MACHINE, (PENDING, request.PeerReady), _release_before_reading, READING)),
        "3",
    ),
    (
        Machines(request=broken(request.MACHINE, (READING, request.Aborted), _report_when_draining_begins, DRAINING)),
        "1",
    ),
    (
        Machines(request=broken(request.MACHINE, (DRAINING, request.QuiesceTimeout), _wait_for_ever, DRAINING)),
        "liveness",
    ),
    (
        Machines(request=broken(request.MACHINE, (PENDING, request.PeerFailed), _fail_without_report, State.FAILED)),
        "liveness",
    ),
    (
        Machines(
            lease=broken(lease.MACHINE, (lease.State.HELD, lease.DeadlinePassed), _never_expire, lease.State.HELD)
        ),
        "liveness",
    ),
    (
        Machines(
            lease=broken(
                lease.MACHINE, (lease.State.HELD, lease.ConsumerNotified), _free_and_stay_held, lease.State.HELD
            )
        ),
        "5",
    ),
    (
        Machines(
            peer=broken(peer.MACHINE, (peer.State.READY, peer.ConnectionSuspect), _rebuild_at_once, peer.State.IDLE)
        ),
        "agent",
    ),
    (
        Machines(peer=broken(peer.MACHINE, (peer.State.READY, peer.Wanted), _leave_unanswered, peer.State.READY)),
        "liveness",
    ),
    (
        Machines(request=broken(request.MACHINE, (DRAINING, request.ReadCompleted), _report_every_read, State.FAILED)),
        "2",
    ),
]


def explore_wider_and_wider(machines: Machines) -> None:
    for requests, deviations in ((1, 1), (1, 2), (2, 2)):
        explore(Bounds(requests=requests, ranks=1, deviations=deviations), machines)


@pytest.mark.parametrize(("machines", "invariant"), BROKEN, ids=range(len(BROKEN)))
def test_broken_machines_are_caught(machines: Machines, invariant: str) -> None:
    with pytest.raises(Violation) as caught:
        explore_wider_and_wider(machines)
    assert invariant in caught.value.invariant
    assert caught.value.scenario
