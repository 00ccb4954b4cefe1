"""What a transition record is, and the sink that it goes to.

One record per transition of any machine. The fields are flat and stable: the trace log (JSON lines), the metrics, the
timeline and the conformance check all read the same record. P's and D's records join on the remote request id and the
number of the lease: the `subject` of P's lease is the `remote_request_id` of D's request.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol, TypeAlias

import msgspec

from statemachine.kernel import Event


class TransitionRecord(msgspec.Struct, frozen=True, gc=False):
    """One transition. Where many are made, by position: by name costs several times as much.

    Attributes:
        seq: number of the record in its process, from 0. A gap stands for records that the sample leaves out, or that
            were not written.
        wall: Unix time in seconds; for people and for joining processes, never for arithmetic on durations.
        mono_ns: monotonic clock of the process, in nanoseconds.
        engine_id, rank, role: who wrote it: the engine, which of its worker processes (only these write records), and
            the engine's `kv_role`: `kv_producer`, `kv_consumer` or `kv_both`.
        machine: `request`, `hold`, `peer` or `lease`. The other machines of the package are not recorded: what they
            lead to is said in the log.
        subject: request id (request, lease), engine id (peer), `<request id on P>/<number of the partner on P>` (hold).
        from_state: None when the instance was created.
        event: name of the event's type.
        to_state: the state it led to, which may be the same one.
        reason: kind of the failure that the new value carries, if any; of a hold that is gone, P's word for it; of a
            lease that lends an answer back, `lease.LENT_BACK` while nobody has asked for it.
        detail: the failure in words; of a lease that expired, who held it.
        peer: engine id of the other side, where there is one.
        remote_request_id: request id on the prefill engine (machines request and hold).
        lease_number: of the lease on the prefill engine (machines request, hold and lease); 0 where it has none.
        blocks, bytes, descriptors: amounts, where known.
        seconds_in_from: time spent in `from_state`.
        age_seconds: of a request or lease that was created just now: how long ago its engine's scheduler first heard of
            it. All of that it has waited in vLLM's queue, on the way there and on the way to this process.
        kept_until_ns: on the clock of `mono_ns`, until when P keeps the blocks (machine lease), or is proven or assumed
            to keep them (machine hold); None while nothing is promised.
    """

    seq: int
    wall: float
    mono_ns: int
    engine_id: str
    rank: int
    role: str
    machine: str
    subject: str
    from_state: str | None
    event: str
    to_state: str
    reason: str | None = None
    detail: str | None = None
    peer: str | None = None
    remote_request_id: str | None = None
    lease_number: int | None = None
    blocks: int | None = None
    bytes: int | None = None
    descriptors: int | None = None
    seconds_in_from: float | None = None
    age_seconds: float | None = None
    kept_until_ns: int | None = None


StepSeen: TypeAlias = tuple[str, Hashable, Any, Event | None, Any]
"""One step of a machine: its name, subject, value before, event, value after. Before and event are None for a value
that was made."""

LogSteps: TypeAlias = Callable[[str, Hashable, Any, Event | None, Any], None]
"""Told of single steps, by the fields of `StepSeen`."""

Note: TypeAlias = tuple[Any, int, list[StepSeen]]
"""Of which core, when, and its steps: all that one event, or one look at its deadlines, has led to."""


class Observer(NamedTuple):
    """Told of the steps of one core, which are its to keep. Cores call `note` themselves: it is `append` of what keeps
    notes, and a function of Python's around it would be a third of what a note costs.

    Attributes:
        whose: tells this core from the others that note to the same place.
    """

    note: Callable[[Note], object]
    whose: Any = None

    def __call__(self, now_ns: int, steps: list[StepSeen]) -> None:
        self.note((self.whose, now_ns, steps))


class TraceSink(Protocol):
    """Where records go. Called in the actors' thread, must not raise and must not block for long."""

    def write(self, *records: TransitionRecord) -> None:
        """In the order in which the transitions were made."""
        ...

    def close(self) -> None: ...
