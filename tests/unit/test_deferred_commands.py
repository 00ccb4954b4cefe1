"""Commands that wait for the device, and what may overtake them; with steps that a test ends in place of a device's."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import trio
from trio.testing import MockClock

from connector.protocol import (
    AbortPull,
    AfterSteps,
    Command,
    LeaseComputing,
    LeaseGranted,
    LeaseWithdrawn,
    StartPull,
    TrackLease,
)
from connector.runtime.deferred_commands import DeferredCommands
from connector.runtime.restarts import keep_running
from connector.runtime.supervisor import Supervisor
from statemachine.lease import LeaseName
from statemachine.roster import PeerKey
from tests.rig.pulls import let_go, pull, release_unread


class Steps:
    """They are over when a test says so."""

    def __init__(self) -> None:
        self.over = 0
        self.asked = 0

    def after(self, number: int, command: StartPull) -> AfterSteps:
        return AfterSteps(command, lambda: self._are_over(number))

    def _are_over(self, number: int) -> bool:
        self.asked += 1
        return self.over >= number


class Actors:
    """What they were told, and what went wrong."""

    def __init__(self) -> None:
        self.told: list[Command] = []
        self.crashes: list[str] = []
        self.failures: list[str] = []
        self.deferred = DeferredCommands(self.told.append, self.note_failure)

    def note_crash(self, name: str, error: BaseException) -> None:
        self.crashes.append(f"{name}: {error}")

    def note_failure(self, error: Exception) -> None:
        self.failures.append(str(error))

    def take(self, *commands: Command | AfterSteps) -> None:
        for command in commands:
            self.deferred.take(command)


def run(test: Callable[[Actors, Steps], object], then: Callable[[Actors, Steps], object]) -> Actors:
    """`test`, a second in which the actors run, `then`, and another second."""
    actors, steps = Actors(), Steps()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(actors.deferred.run)
            test(actors, steps)
            await trio.sleep(1)
            then(actors, steps)
            await trio.sleep(1)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0))
    return actors


def test_a_read_waits_for_the_steps_before_it_and_nobody_else_has_to_ask() -> None:
    """The engine may be idle, and make its next step late."""
    first, second = pull("a", [1]), pull("b", [1])

    def test(actors: Actors, steps: Steps) -> None:
        actors.take(steps.after(1, first), steps.after(2, second))
        assert actors.told == []
        assert len(actors.deferred) == 2

    def then(actors: Actors, steps: Steps) -> None:
        assert actors.told == []
        steps.over = 1

    actors = run(test, then)
    assert actors.told == [first]
    assert len(actors.deferred) == 1


def test_all_that_wait_go_when_the_last_step_is_over() -> None:
    commands = [pull("a", [1]), pull("b", [1]), pull("c", [1])]

    def test(actors: Actors, steps: Steps) -> None:
        actors.take(*(steps.after(1, command) for command in commands))

    def then(actors: Actors, steps: Steps) -> None:
        steps.over = 1

    assert run(test, then).told == commands


def test_the_device_is_asked_only_while_something_waits() -> None:
    asked = []

    def test(actors: Actors, steps: Steps) -> None:
        steps.over = 1
        actors.take(steps.after(1, pull("a", [1])))

    def then(actors: Actors, steps: Steps) -> None:
        asked.append(steps.asked)
        actors.take(steps.after(2, pull("b", [1])))
        steps.over = 2

    assert len(run(test, then).told) == 2
    assert asked == [1]


def test_an_abort_stays_behind_the_read_that_it_is_to_end() -> None:
    first, abort = pull("a", [1]), AbortPull(request_id="a")

    def test(actors: Actors, steps: Steps) -> None:
        actors.take(steps.after(1, first), abort)
        assert actors.told == []

    def then(actors: Actors, steps: Steps) -> None:
        steps.over = 1

    actors = run(test, then)
    assert actors.told == [first, abort]
    actors.take(abort)
    assert actors.told[-1] == abort, "nothing of the request waits any more"


def test_a_lease_is_let_go_of_behind_the_last_read_of_it() -> None:
    """Otherwise it would be kept from then on, for nobody."""
    read, abort = pull("a", [1]), AbortPull(request_id="a")
    actors, steps = Actors(), Steps()
    actors.take(steps.after(1, read), abort, let_go("a"), let_go("b"))
    assert actors.told == [let_go("b")]
    steps.over = 1
    actors.deferred._let_through()
    assert actors.told == [let_go("b"), read, abort, let_go("a")]


def test_what_a_retired_actor_has_not_heard_goes_to_its_successor_before_what_waits_for_the_device() -> None:
    """A request that is said to be queued when it has ended is never said to be anything else again."""
    first, abort = pull("a", [1]), AbortPull(request_id="a")
    unhandled = TrackLease(request_id="a", lease=first.lease, peer=first.peer, age_seconds=0.0)
    actors, steps = Actors(), Steps()
    actors.take(steps.after(1, first), abort)
    supervisor = object.__new__(Supervisor)
    vars(supervisor).update(
        _deferred=actors.deferred, _hand_out=actors.told.append, _forget=lambda key: None, _log_crash=actors.note_crash
    )

    async def run_nothing() -> None:
        pass

    retired = SimpleNamespace(run=run_nothing, recover=None, take_unhandled=lambda: [unhandled])
    trio.run(supervisor._run_peer, PeerKey("p", 1, 1, 1), retired)
    steps.over = 1
    actors.deferred._let_through()
    assert actors.told == [unhandled, first, abort]
    assert actors.crashes == []


def test_everything_else_passes() -> None:
    """P has lent what D asks for by now, and D keeps its queue's leases, however long the device takes."""
    first = pull("a", [1])
    others: list[Command] = [
        TrackLease(request_id="b", lease=LeaseName("p-b", 1), peer=first.peer, age_seconds=0.0),
        LeaseComputing(lease=LeaseName("r", 1)),
        LeaseGranted(lease=LeaseName("a", 1), blocks=1),
        LeaseWithdrawn(lease=LeaseName("a", 1)),
        AbortPull(request_id="c"),
        release_unread("d"),
    ]
    actors, steps = Actors(), Steps()
    actors.take(steps.after(1, first), *others)
    assert actors.told == others


def test_nothing_waits_any_more_once_the_actors_have_stopped() -> None:
    actors, steps = Actors(), Steps()
    first, abort = pull("a", [1]), AbortPull(request_id="a")
    actors.take(steps.after(1, first), abort)
    actors.deferred.release()
    assert actors.told == [first, abort]
    assert len(actors.deferred) == 0
    actors.take(steps.after(1, pull("b", [1])))
    assert actors.told[-1] == pull("b", [1]), "nobody lets anything through any more"


def test_what_waits_goes_on_waiting_when_its_task_has_crashed(monkeypatch: pytest.MonkeyPatch) -> None:
    actors, steps = Actors(), Steps()
    first = pull("a", [1])
    sleep, sleeps = trio.sleep, []

    async def raises_once(seconds: float) -> None:
        sleeps.append(seconds)
        if len(sleeps) == 1:
            raise RuntimeError("a crash")
        await sleep(seconds)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep_running, "deferred commands", actors.deferred.run, actors.note_crash)
            actors.take(steps.after(1, first))
            await sleep(5)
            assert actors.told == []
            steps.over = 1
            await sleep(5)
            nursery.cancel_scope.cancel()

    monkeypatch.setattr("connector.runtime.deferred_commands.trio.sleep", raises_once)
    trio.run(main, clock=MockClock(autojump_threshold=0))
    assert actors.told == [first]
    assert actors.crashes == ["deferred commands: a crash"]


def test_nothing_is_let_through_for_a_device_that_cannot_be_asked() -> None:
    """What it has been given may still be written. Who is told has the actors stop, and then nothing waits any more."""

    def test(actors: Actors, _: Steps) -> None:
        def broken() -> bool:
            raise RuntimeError("CUDA error: unspecified launch failure")

        actors.take(AfterSteps(pull("a", [1]), broken), AfterSteps(pull("b", [1]), broken))

    def then(actors: Actors, _: Steps) -> None:
        assert actors.told == []
        assert set(actors.failures) == {"CUDA error: unspecified launch failure"}
        actors.deferred.release()

    actors = run(test, then)
    assert [command.request_id for command in actors.told if isinstance(command, StartPull)] == ["a", "b"]
