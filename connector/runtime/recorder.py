"""Makes a trace record of every step that a core takes.

The cores tell an observer of each step of a machine; `Recorder.observer` makes one for a core. Without a sink there is
no observer, and a transition costs the core's own comparison with None.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeAlias

from connector.clock import NS_PER_SECOND, Clock
from statemachine import hold, lease, peer, request
from statemachine.failures import Failure
from statemachine.kernel import Event
from statemachine.lease import LeaseName
from statemachine.trace import Observer, TraceSink, TransitionRecord

Amounts: TypeAlias = Callable[[str], tuple[int | None, int | None, int | None]]
"""By request id: blocks, bytes, descriptors, as far as they are known."""

_ENDS: frozenset[object] = (
    request.MACHINE.terminal | peer.MACHINE.terminal | hold.MACHINE.terminal | lease.MACHINE.terminal
)

_NO_AMOUNTS = (None, None, None)


class Recorder:
    """Numbers and writes the transition records of one process. `sink` None: nothing is recorded."""

    def __init__(self, *, engine_id: str, rank: int, role: str, clock: Clock, sink: TraceSink | None) -> None:
        self.engine_id = engine_id
        self.rank = rank
        self.role = role
        self.clock = clock
        self._sink = sink
        self._seq = 0
        # When each living machine instance entered its state; dropped in the record of its end.
        self._entered_ns: dict[tuple[str, str | None, Hashable], int] = {}

    def observer(self, peer_id: str | None, amounts: Amounts | None = None) -> Observer | None:
        """For a core that deals with the engine `peer_id` (None: with many). None when nothing is recorded."""
        sink = self._sink
        if sink is None:
            return None

        def observe(machine: str, subject: Hashable, before: object, event: Event | None, after: object) -> None:
            self._record(sink, machine, subject, before, event, after, peer_id, amounts)

        return observe

    def _record(
        self,
        sink: TraceSink,
        machine: str,
        subject: Hashable,
        before: object,
        event: Event | None,
        after: object,
        peer_id: str | None,
        amounts: Amounts | None,
    ) -> None:
        if before is after:
            return
        now_ns = self.clock.now_ns()
        key = (machine, peer_id, subject)
        from_state = before.state.value if before is not None else None  # type: ignore[attr-defined]
        state = after.state  # type: ignore[attr-defined]
        entered_ns = self._entered_ns.get(key, now_ns)
        if state in _ENDS:
            self._entered_ns.pop(key, None)
        elif from_state != state.value:
            self._entered_ns[key] = now_ns
        failure: Failure | None = getattr(after, "failure", None)
        name, remote_request_id, lease_number = _names(subject, after)
        blocks, length_bytes, descriptors = _NO_AMOUNTS
        kept_until_ns: int | None = None
        if isinstance(after, lease.Lease):
            blocks = after.blocks or None  # not known before the grant
            kept_until_ns = after.deadline_ns or None
        elif isinstance(after, hold.Hold):
            kept_until_ns = after.proven_until_ns if after.proven_until_ns >= 0 else None
        elif amounts is not None and isinstance(after, request.Request):
            blocks, length_bytes, descriptors = amounts(name)
        sink.write(
            TransitionRecord(
                seq=self._seq,
                wall=self.clock.wall(),
                mono_ns=now_ns,
                engine_id=self.engine_id,
                rank=self.rank,
                role=self.role,
                machine=machine,
                subject=name,
                from_state=from_state,
                event=type(event).__name__ if event is not None else "Created",
                to_state=state.value,
                reason=failure.kind if failure is not None else getattr(after, "why", None),
                detail=str(failure) if failure is not None else None,
                peer=peer_id,
                remote_request_id=remote_request_id,
                lease_number=lease_number,
                blocks=blocks,
                bytes=length_bytes,
                descriptors=descriptors,
                seconds_in_from=(now_ns - entered_ns) / NS_PER_SECOND if before is not None else None,
                age_seconds=_age_seconds(after) if before is None else None,
                kept_until_ns=kept_until_ns,
            )
        )
        self._seq += 1


def _age_seconds(made: object) -> float | None:
    age_ns: int | None = getattr(made, "age_ns", None)
    return None if age_ns is None else age_ns / NS_PER_SECOND


def _names(subject: Hashable, value: object) -> tuple[str, str | None, int | None]:
    """What the record calls the instance; the id on P of the request that it is about, and the number of its lease."""
    if isinstance(value, request.Request):
        named = value.lease
        return value.request_id, named.request_id or None, named.number  # parameters that make no sense name none
    if isinstance(value, hold.Hold):
        return f"{value.lease.request_id}/{value.rank}", value.lease.request_id, value.lease.number
    if isinstance(subject, LeaseName):
        return subject.request_id, None, subject.number
    return str(subject), None, None
