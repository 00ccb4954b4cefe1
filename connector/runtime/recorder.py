"""Takes note of every step of every core of one process: for the flight recorder always, for a trace if there is one,
and has it counted.

The cores tell an observer of each step of a machine; `Recorder.observer` makes one for a core. A step becomes a tuple
in the ring of the flight recorder (`connector/observe/flight_recorder.py`), and with a sink a record as well; one
function renders both.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeAlias

from connector.clock import Clock
from connector.observe.flight_recorder import (
    BAD_ENDS,
    NO_AMOUNTS,
    AmountsNow,
    FlightRecorder,
    render,
)
from connector.observe.log import CrashCount, log_crash
from connector.runtime.figures import Figures
from statemachine import hold, lease, peer, request
from statemachine.kernel import Event
from statemachine.trace import Observer, TraceSink, TransitionRecord

Amounts: TypeAlias = Callable[[str], AmountsNow]
"""By request id: blocks, bytes, descriptors, as far as they are known."""

_ENDS: frozenset[object] = (
    request.MACHINE.terminal | peer.MACHINE.terminal | hold.MACHINE.terminal | lease.MACHINE.terminal
)

_REQUEST = request.MACHINE.name
_LOGGED = frozenset({peer.MACHINE.name, lease.MACHINE.name})


class Recorder:
    """See the module's docstring. Its observers never raise.

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
    ) -> None:
        self.engine_id = engine_id
        self.rank = rank
        self.role = role
        self.clock = clock
        self.flight = flight if flight is not None else FlightRecorder()
        self._sink = sink
        self._figures = figures
        self._crashes = CrashCount(log_crash)
        self._seq = 0

    def observer(self, peer_id: str | None, amounts: Amounts | None = None, log: Observer | None = None) -> Observer:
        """For a core that deals with the engine `peer_id` (None: with many). `log` is told of every other state that a
        peer or a lease comes to."""
        keep, keep_bad_end, now_ns = self.flight.keep, self.flight.keep_bad_end, self.clock.now_ns
        write = self._write if self._sink is not None else None
        figures = self._figures
        # When each living instance of this core entered its state, by its state's class and its subject.
        entered_ns: dict[tuple[type, Hashable], int] = {}

        def observe(machine: str, subject: Hashable, before: Any, event: Event | None, after: Any) -> None:
            if before is after:
                return
            # What only looks on must not cost a request anything: a mistake ends here.
            state = after.state
            is_same = before is not None and before.state is state
            at_ns, key = now_ns(), (state.__class__, subject)
            since_ns = entered_ns.get(key, at_ns)
            if state in _ENDS:
                entered_ns.pop(key, None)
            elif not is_same:
                entered_ns[key] = at_ns
            try:
                if figures is not None:
                    if is_same:
                        figures.count_within(before, event)
                    else:
                        figures.count(before, event, after, at_ns - since_ns)
            except Exception as error:
                self._crashes.note("counting of transitions", error)
            if is_same and write is None:
                return
            try:
                known = amounts(after.request_id) if amounts is not None and machine == _REQUEST else NO_AMOUNTS
                step = (at_ns, before, event, after, peer_id, known, since_ns)
                if not is_same:
                    keep(step)
                    if state in BAD_ENDS:
                        keep_bad_end(step)
                if write is not None:
                    write(step)
                if log is not None and not is_same and machine in _LOGGED:
                    log(machine, subject, before, event, after)
            except Exception as error:
                self._crashes.note("recording of transitions", error)

        return observe

    def render(self, fields: tuple[Any, ...], number: int) -> TransitionRecord:
        """A step that was kept. Its time of day is what it would be if the clock had not been set since."""
        passed_ns = self.clock.now_ns() - fields[0]
        return render(
            fields,
            number=number,
            wall=self.clock.wall() - passed_ns / 1e9,
            engine_id=self.engine_id,
            rank=self.rank,
            role=self.role,
        )

    def _write(self, fields: tuple[int, Any, Event | None, Any, str | None, AmountsNow, int]) -> None:
        assert self._sink is not None
        record = render(
            fields,
            number=self._seq,
            wall=self.clock.wall(),
            engine_id=self.engine_id,
            rank=self.rank,
            role=self.role,
        )
        self._sink.write(record)
        self._seq += 1
