"""When each request on this rank was in which state, for the spans that the scheduler side makes.

Only where vLLM traces. It is a sink of transition records: those of a request are kept until it is over, and what they
come to waits until the engine thread tells vLLM of its end. Written to in the trio thread, taken from on the engine
thread; both touch a dict by one operation at a time.
"""

from __future__ import annotations

import time

import msgspec

from connector.observe.history import FAILED, histories
from connector.observe.log import get_logger
from connector.observe.spans import LANDING, Part, PullTimes, times_of
from connector.observe.traced import TERMINAL
from statemachine import request
from statemachine.failures import Failure
from statemachine.trace import TransitionRecord

_REQUEST = request.MACHINE.name
_ENDS = TERMINAL[_REQUEST]


class PullTimer:
    """A `statemachine.trace.TraceSink`."""

    def __init__(self) -> None:
        self._open: dict[str, list[TransitionRecord]] = {}
        self._ended: dict[str, PullTimes] = {}

    def write(self, *records: TransitionRecord) -> None:
        """Never raises."""
        for record in records:
            if record.machine == _REQUEST:
                self._write(record)

    def _write(self, record: TransitionRecord) -> None:
        if record.from_state is None:
            self._open[record.subject] = []
        records = self._open.get(record.subject)
        if records is None:
            return
        records.append(record)
        if record.to_state in _ENDS:
            del self._open[record.subject]
            try:
                (history,) = histories(records)
                times = times_of(history)
            except Exception:  # whatever it is: a span is not worth a request
                get_logger().exception("no span is made of request %r", record.subject)
                return
            if times is not None:
                self._ended[record.subject] = times

    def close(self) -> None:
        """Nothing is open."""

    def take(self, request_id: str, failure: Failure | None = None) -> PullTimes | None:
        """Engine thread: vLLM is being told that a request has been loaded, or has failed. None: it never reached the
        actors. `failure`: why it could not be finished when it had been read."""
        times = self._ended.pop(request_id, None)
        if times is None or times.reason is not None:
            return times
        landed_ns = max(time.time_ns(), times.end_ns)
        times = msgspec.structs.replace(times, parts=(*times.parts, Part(LANDING, times.end_ns, landed_ns)))
        if failure is None:
            return times
        return msgspec.structs.replace(times, outcome=FAILED, reason=failure.kind, detail=str(failure))
