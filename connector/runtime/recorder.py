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
    Step,
    key_of,
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
        # With a sink: when each living machine instance entered its state; dropped in the record of its end.
        self._entered_ns: dict[Hashable, int] = {}

    def observer(self, peer_id: str | None, amounts: Amounts | None = None, log: Observer | None = None) -> Observer:
        """For a core that deals with the engine `peer_id` (None: with many). `log` is told of every other state that a
        peer or a lease comes to."""
        keep, keep_bad_end, now_ns = self.flight.keep, self.flight.keep_bad_end, self.clock.now_ns
        write = self._write if self._sink is not None else None
        count = self._figures.observer() if self._figures is not None else None

        def observe(machine: str, subject: Hashable, before: object, event: Event | None, after: object) -> None:
            # What is only looked at must not cost a request anything: a mistake ends here.
            if count is not None:
                try:
                    count(machine, subject, before, event, after)
                except Exception as error:
                    self._crashes.note("counting of transitions", error)
            state = after.state  # type: ignore[attr-defined]
            is_same = before is not None and before.state is state  # type: ignore[attr-defined]
            if is_same and (write is None or before is after):
                return
            try:
                known = amounts(after.request_id) if amounts is not None and machine == _REQUEST else NO_AMOUNTS  # type: ignore[attr-defined]
                step = (now_ns(), before, event, after, peer_id, known)
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
        step = Step._make(fields)
        passed_ns = self.clock.now_ns() - step.at_ns
        return render(
            step,
            number=number,
            wall=self.clock.wall() - passed_ns / 1e9,
            engine_id=self.engine_id,
            rank=self.rank,
            role=self.role,
            entered_ns=None,
        )

    def _write(self, fields: tuple[int, object, Event | None, object, str | None, AmountsNow]) -> None:
        assert self._sink is not None
        step = Step._make(fields)
        now_ns, before, after = step.at_ns, step.before, step.after
        key = key_of(after, step.peer)
        entered_ns = self._entered_ns.get(key, now_ns)
        if after.state in _ENDS:
            self._entered_ns.pop(key, None)
        elif before is None or before.state is not after.state:
            self._entered_ns[key] = now_ns
        record = render(
            step,
            number=self._seq,
            wall=self.clock.wall(),
            engine_id=self.engine_id,
            rank=self.rank,
            role=self.role,
            entered_ns=entered_ns,
        )
        self._sink.write(record)
        self._seq += 1
