"""Takes note of every step of every core of one process: for the flight recorder always, for a trace if there is one,
and has it counted.

The cores tell an observer of their steps; `Recorder.observer` makes one for a core. What it is told is only noted then,
so that a READ need not wait for its own bookkeeping. `catch_up` does that, when the executor has carried out what the
steps led to, and in any case before the engine thread hears of a result. A step becomes a tuple in the ring of the
flight recorder (`connector/observe/flight_recorder.py`), and with a sink a record as well; one function renders both.

    core --observer--> notes --catch_up--> flight recorder, trace, log of peers and leases
                                      \\--> figures
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

from connector.clock import NS_PER_SECOND, Clock
from connector.observe.flight_recorder import (
    NO_AMOUNTS,
    AmountsNow,
    FlightRecorder,
    is_bad_end,
    render,
)
from connector.observe.log import CrashCount, log_crash
from connector.observe.traced import MACHINES
from connector.runtime.figures import Figures
from statemachine import lease, peer, request
from statemachine.trace import LogSteps, Observer, StepSeen, TraceSink, TransitionRecord

Amounts: TypeAlias = Callable[[str], AmountsNow]
"""By request id: blocks, bytes, descriptors, as far as they are known."""

_ENDS: frozenset[object] = frozenset(state for machine in MACHINES for state in machine.terminal)

SET_CLOCK_NOTICED_NS = NS_PER_SECOND // 10
"""After the time of day was set, so long may records have the old one: to read two clocks for each costs as much as
making it."""

_REQUEST = request.MACHINE.name
_LOGGED = frozenset({peer.MACHINE.name, lease.MACHINE.name})


_Core: TypeAlias = tuple[str | None, Amounts | None, LogSteps | None, dict[int, int]]
"""Whose steps they are: its peer, `amounts` and `log` as `Recorder.observer` was given them, and when each living
instance of it entered its state, by the identity of its value, which the core keeps until the step that replaces it. A
plain tuple, because a named one is taken apart by way of an iterator, for every step."""


class Recorder:
    """See the module's docstring. Neither its observers nor `catch_up` ever raise.

    Without `sink` no trace is written; without `figures` nothing is counted; without `flight` the flight recorder has
    its usual size. `log_crash` writes a line with a traceback: what raised it, what it raised.
    """

    def __init__(
        self,
        *,
        engine_id: str,
        rank: int,
        role: str,
        clock: Clock,
        sink: TraceSink | None,
        figures: Figures | None = None,
        flight: FlightRecorder | None = None,
        log_crash: Callable[[str, BaseException], None] = log_crash,
        count_crash: Callable[[], None] = lambda: None,
    ) -> None:
        self.engine_id = engine_id
        self.rank = rank
        self.role = role
        self.clock = clock
        self.flight = flight if flight is not None else FlightRecorder()
        self._sink = sink
        self._figures = figures
        self._crashes = CrashCount(log_crash, count_crash)
        self._seq = 0
        # What `_started` said last, and until when that is taken for right.
        self._started_at = 0.0
        self._started_until_ns = 0
        # What the observers were told since the last `catch_up`.
        self._notes: deque[tuple[_Core, int, list[StepSeen]]] = deque()

    def observer(self, peer_id: str | None, amounts: Amounts | None = None, log: LogSteps | None = None) -> Observer:
        """For the core of the engine `peer_id` (None: it has many). `log` is told of every other state that a
        peer or a lease comes to."""
        core: _Core = (peer_id, amounts, log, {})
        return Observer(self._notes.append, core)

    def catch_up(self) -> None:
        """Keep, trace, log and count what has been noted. What only looks on must not cost a request anything: a
        bug ends here."""
        notes = self._notes
        if not notes:
            return
        keep, sink = self.flight.keep, self._sink
        if sink is not None and notes[0][1] >= self._started_until_ns:
            self._started_at = self._started()
            self._started_until_ns = self.clock.now_ns() + SET_CLOCK_NOTICED_NS
        started = self._started_at
        taken: list[tuple[Any, ...]] = []
        records: list[TransitionRecord] = []
        while notes:
            (peer_id, amounts, log, entered_ns), at_ns, steps = notes.popleft()
            for machine, subject, before, event, after in steps:
                if before is after:
                    continue
                state = after.state
                is_same = before is not None and before.state is state
                since_ns = entered_ns.pop(id(before), at_ns)
                known = NO_AMOUNTS
                try:
                    if amounts is not None and machine == _REQUEST:
                        known = amounts(after.request_id)
                except Exception as error:
                    self._crashes.note("amounts of a request", error)
                step = (at_ns, before, event, after, peer_id, known, since_ns)
                taken.append(step)
                if not is_same:
                    keep(step)
                if state not in _ENDS:
                    entered_ns[id(after)] = since_ns if is_same else at_ns
                elif is_bad_end(after):
                    self.flight.keep_bad_end(step)
                try:
                    if sink is not None:
                        wall = started + at_ns / NS_PER_SECOND
                        records.append(render(step, self._seq, wall, self.engine_id, self.rank, self.role))
                        self._seq += 1
                    if log is not None and not is_same and machine in _LOGGED:
                        log(machine, subject, before, event, after)
                except Exception as error:
                    self._crashes.note("recording of transitions", error)
        try:
            if sink is not None and records:
                sink.write(*records)
        except Exception as error:
            self._crashes.note("recording of transitions", error)
        try:
            if self._figures is not None:
                self._figures.count(taken)
        except Exception as error:
            self._crashes.note("counting of transitions", error)

    def entered_ns(self, observer: Observer, value: object) -> int | None:
        """When a living value of the core that `observer` was made for came into its state. None: the core has not told
        the step that made it, which it does with its next event."""
        self.catch_up()
        entered_ns: dict[int, int] = observer.whose[3]
        return entered_ns.get(id(value))

    def render(self, fields: tuple[Any, ...], number: int) -> TransitionRecord:
        """A step as a record. Its time of day is what it would be if the clock had not been set since."""
        wall = self._started() + fields[0] / NS_PER_SECOND
        return render(fields, number, wall, self.engine_id, self.rank, self.role)

    def _started(self) -> float:
        """The time of day at which the clock that steps are dated by was 0."""
        return self.clock.wall() - self.clock.now_ns() / NS_PER_SECOND
