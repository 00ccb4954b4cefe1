"""A machine instance in the shell: its current value, and a trace record per transition.

`apply` stores the new value before it returns the effects, so an effect that fails leaves the machine where the table
says it is. With no sink, a transition costs the table's step and one comparison.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from connector.runtime.clock import NS_PER_SECOND, Clock
from statemachine.failures import Failure
from statemachine.kernel import Effects, Event, Machine, Value
from statemachine.trace import TraceSink, TransitionRecord

V = TypeVar("V", bound=Value)


class Recorder:
    """Numbers and writes the transition records of one process. `sink` None: nothing is recorded."""

    def __init__(self, *, engine_id: str, rank: int, role: str, clock: Clock, sink: TraceSink | None) -> None:
        self.engine_id = engine_id
        self.rank = rank
        self.role = role
        self.clock = clock
        self.sink = sink
        self._seq = 0

    def next_seq(self) -> int:
        seq = self._seq
        self._seq += 1
        return seq


class Tracked(Generic[V]):
    """One instance of `machine`.

    Args:
        subject: what the record calls it.
        peer, remote_request_id, blocks: constant fields of its records.
    """

    __slots__ = (
        "_entered_ns",
        "_machine",
        "_recorder",
        "blocks",
        "bytes",
        "descriptors",
        "peer",
        "remote_request_id",
        "subject",
        "value",
    )

    def __init__(
        self,
        machine: Machine[V],
        value: V,
        recorder: Recorder,
        *,
        subject: str,
        peer: str | None = None,
        remote_request_id: str | None = None,
        blocks: int | None = None,
    ) -> None:
        self._machine = machine
        self._recorder = recorder
        self.value = value
        self.subject = subject
        self.peer = peer
        self.remote_request_id = remote_request_id
        self.blocks = blocks
        self.bytes: int | None = None
        self.descriptors: int | None = None
        self._entered_ns = 0
        if recorder.sink is not None:
            self._record(None, "Created")

    @property
    def is_terminal(self) -> bool:
        return self._machine.is_terminal(self.value)

    def apply(self, event: Event) -> Effects:
        """Step, record, and return what to do. Raises ProtocolError, leaving everything as it was."""
        before = self.value
        self.value, effects = self._machine.step(before, event)
        if self._recorder.sink is not None and self.value is not before:
            self._record(before.state.value, type(event).__name__)
        return effects

    def _record(self, from_state: str | None, event: str) -> None:
        recorder = self._recorder
        assert recorder.sink is not None
        now_ns = recorder.clock.now_ns()
        failure: Failure | None = getattr(self.value, "failure", None)
        recorder.sink.write(
            TransitionRecord(
                seq=recorder.next_seq(),
                wall=recorder.clock.wall(),
                mono_ns=now_ns,
                engine_id=recorder.engine_id,
                rank=recorder.rank,
                role=recorder.role,
                machine=self._machine.name,
                subject=self.subject,
                from_state=from_state,
                event=event,
                to_state=self.value.state.value,
                reason=failure.kind if failure is not None else None,
                detail=str(failure) if failure is not None else None,
                peer=self.peer,
                remote_request_id=self.remote_request_id,
                blocks=self.blocks,
                bytes=self.bytes,
                descriptors=self.descriptors,
                seconds_in_from=(now_ns - self._entered_ns) / NS_PER_SECOND if from_state is not None else None,
            )
        )
        if from_state != self.value.state.value:
            self._entered_ns = now_ns
