"""What drives a core: hands events in, carries effects out in order, keeps one timer. It decides nothing.

A core whose engine is paused, or whose executor has crashed, is not run until `closed_until_ns`; what comes meanwhile
waits, in order. One that is closed for ever hears nothing more. The timer is set for the core's next deadline on the
clock of its engine. A deadline that has passed already fires after everything else that happens at this moment, so that
what comes together goes out together, as it does when an actor empties its mailbox first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from statemachine.kernel import Effect, Event
from statemachine.trace import Observer, StepSeen
from tests.observer import observer_of
from tests.simulation.level1.clock import DriftingClock
from tests.simulation.level1.heap import FOREVER, Call
from tests.simulation.level1.world import World


class Core(Protocol):
    def handle(self, event: Any, now_ns: int) -> Sequence[Effect]: ...

    def advance(self, now_ns: int) -> Sequence[Effect]: ...

    def next_deadline(self) -> int | None: ...


class Executor:
    """`effects`: what carries out each type of effect. Answers that come at once are put into `answers`."""

    __slots__ = (
        "_alarm_ns",
        "_clock",
        "_core",
        "_deadline_ns",
        "_effects",
        "_heap",
        "_is_emptying",
        "_log",
        "_mailbox",
        "answers",
        "closed_until_ns",
        "world",
    )

    def __init__(self, world: World, clock: DriftingClock, effects: dict[type[Effect], Any]) -> None:
        self.world = world
        self.closed_until_ns = 0
        self.answers: list[Event] = []
        self._mailbox: deque[tuple[Call, Any]] = deque()
        self._is_emptying = False
        self._heap = world.heap
        self._clock = clock
        self._log = world.log.extend
        self._effects = effects
        # The alarm that is set, in true time, and the deadline that it is set for, by the clock.
        self._alarm_ns = FOREVER
        self._deadline_ns = FOREVER
        self._core: Core

    def names(self) -> tuple[str, int]:
        raise NotImplementedError

    @property
    def observer(self) -> Observer:
        """For its core."""
        return observer_of(self._observe)

    def _observe(self, now_ns: int, steps: list[StepSeen]) -> None:
        at_ns = self._heap.now_ns
        for step in steps:
            self._log((at_ns, self, *step))

    # --- events -----------------------------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        return self.closed_until_ns > self._heap.now_ns or (bool(self._mailbox) and not self._is_emptying)

    def hold_back(self, call: Call, argument: Any) -> None:
        """It is closed: what comes waits, in order."""
        if self.closed_until_ns < FOREVER:
            self._mailbox.append((call, argument))
            if len(self._mailbox) == 1:
                self._heap.at(self.closed_until_ns, self._open, None)

    def _open(self, _: None) -> None:
        if self.closed_until_ns > self._heap.now_ns:
            if self.closed_until_ns < FOREVER:
                self._heap.at(self.closed_until_ns, self._open, None)
            return
        self._is_emptying = True
        while self._mailbox and self.closed_until_ns <= self._heap.now_ns:
            call, argument = self._mailbox.popleft()
            call(argument)
        self._is_emptying = False

    def deliver(self, event: Event) -> None:
        """An event for the core, when it runs."""
        now_ns = self._heap.now_ns
        if self.closed_until_ns > now_ns or (self._mailbox and not self._is_emptying):
            self.hold_back(self.deliver, event)
            return
        self._carry_out(self._core.handle(event, self._clock.local_ns(now_ns)))
        self._set_alarm()

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        carriers = self._effects
        for effect in effects:
            carriers[effect.__class__](effect)
        while self.answers:
            answers, self.answers = self.answers, []
            now_ns = self._clock.local_ns(self._heap.now_ns)
            for event in answers:
                for effect in self._core.handle(event, now_ns):
                    carriers[effect.__class__](effect)

    # --- the timer --------------------------------------------------------------------------------------------------

    def look_at_clock(self) -> None:
        """The clock's rate has changed."""
        self._deadline_ns = FOREVER
        self._set_alarm()

    def _set_alarm(self) -> None:
        """Moves it forward only: one that is too early finds nothing to do and sets itself again."""
        deadline_ns = self._core.next_deadline()
        if deadline_ns is None or deadline_ns >= self._deadline_ns:
            return
        self._deadline_ns = deadline_ns
        self._alarm_ns = at_ns = max(self._heap.now_ns, self._clock.true_ns(deadline_ns))
        self._heap.at(at_ns, self._wake, at_ns)

    def _wake(self, at_ns: int) -> None:
        if at_ns != self._alarm_ns:
            return  # There was an earlier one since.
        now_ns = self._heap.now_ns
        if self.closed_until_ns > now_ns:
            if self.closed_until_ns < FOREVER:
                self._alarm_ns = self.closed_until_ns
                self._heap.at(self.closed_until_ns, self._wake, self.closed_until_ns)
            return
        self._alarm_ns = self._deadline_ns = FOREVER
        self._carry_out(self._core.advance(self._clock.local_ns(now_ns)))
        self._set_alarm()
