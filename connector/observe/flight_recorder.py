"""What has just happened in this process, kept in memory: the last steps of all machines, whether or not a trace is
written.

An operator asks after a request has got stuck or has failed, and nobody writes traces all the time. So every worker
keeps the last STEPS_KEPT steps as tuples of values that exist anyway; a step costs one tuple. They become
`TransitionRecord`s when somebody asks (`render`), by the same function that renders them for a trace file.

    core --observer--> Step --> ring of STEPS_KEPT, overwritten from the oldest
                            \\-> ring of BAD_ENDS_KEPT: failed and expired requests, leases that nobody has read

Steps that lead to the state they come from (a lease that is renewed, one READ of several that ends) are left out: they
would be most of the ring, and what they changed is in the value of the next step. Bad ends have a ring of their own,
because they are asked for longest after they happened: on an engine that serves fifty requests a second the first ring
reaches back less than half a minute. Neither requests whose clients have left nor answers that were lent back and that
nobody has read are among them: there may be many, nothing is wrong with them, and they would take the others' places.

Which values live now is not read from here but from the cores (`connector/runtime/inspector.py`).
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple, TypeAlias

from connector.clock import NS_PER_SECOND
from connector.observe.traced import CREATED, MACHINE_OF
from statemachine import hold, lease, request
from statemachine.failures import AbortedByClient, Failure
from statemachine.kernel import Event
from statemachine.trace import TransitionRecord

STEPS_KEPT = 8192
BAD_ENDS_KEPT = 1024

BAD_ENDS: frozenset[object] = frozenset({request.State.FAILED, request.State.EXPIRED, lease.State.EXPIRED})

AmountsNow: TypeAlias = tuple[int | None, int | None, int | None]
"""Blocks, bytes, descriptors, as far as they are known."""

NO_AMOUNTS: AmountsNow = (None, None, None)

_NAME_OF = {kind: machine.name for kind, machine in MACHINE_OF.items()}


class Step(NamedTuple):
    """One step of a machine, as it is kept: `before` and `event` are None for a value that was made. The recorder makes
    plain tuples of this form, which cost half as much."""

    at_ns: int
    before: Any
    event: Event | None
    after: Any
    peer: str | None
    """Engine id of the other side, where the core has one."""
    amounts: AmountsNow
    entered_ns: int
    """When the instance came into the state that this step leaves."""


class FlightRecorder:
    """See the module's docstring. `keep` is `deque.append`, so that a step costs no call of Python's."""

    def __init__(self, steps_kept: int = STEPS_KEPT, bad_ends_kept: int = BAD_ENDS_KEPT) -> None:
        self._steps: deque[tuple[Any, ...]] = deque(maxlen=steps_kept)
        self._bad_ends: deque[tuple[Any, ...]] = deque(maxlen=bad_ends_kept)
        self.keep = self._steps.append
        self.keep_bad_end = self._bad_ends.append

    def __len__(self) -> int:
        return len(self._steps)

    def newest_first(self) -> list[tuple[Any, ...]]:
        """Everything that is kept, as fields of `Step`; of what was overwritten only the bad ends."""
        steps = list(self._steps)
        oldest_ns = steps[0][0] if steps else 0
        older_ends = [each for each in self._bad_ends if each[0] < oldest_ns]
        return steps[::-1] + older_ends[::-1]

    def oldest_ns(self) -> int | None:
        """From when on every step is kept."""
        return self._steps[0][0] if self._steps else None


def render(fields: tuple[Any, ...], number: int, wall: float, engine_id: str, rank: int, role: str) -> TransitionRecord:
    """`fields`: of a `Step`; `wall`: the time of day of the step."""
    at_ns, before, event, after, peer_id, (blocks, length_bytes, descriptors), entered_ns = fields
    kind: type[Any] = after.__class__
    failure: Failure | None = None
    why: str | None = None
    who: str | None = None
    age_ns: int | None = None
    kept_until_ns: int | None = None
    remote_request_id: str | None = None
    lease_number: int | None = None
    if kind is request.Request:
        name, named = after.request_id, after.lease
        remote_request_id, lease_number = named.request_id or None, named.number  # senseless parameters name none
        failure, age_ns = after.failure, after.age_ns
    elif kind is hold.Hold:
        named = after.lease
        remote_request_id, lease_number = named.request_id, named.number
        name, why = f"{remote_request_id}/{after.rank}", after.why
        kept_until_ns = after.proven_until_ns if after.proven_until_ns >= 0 else None
    elif kind is lease.Lease:
        named = after.name
        name, lease_number, age_ns = named.request_id, named.number, after.age_ns
        blocks = after.blocks or None  # not known before the grant
        kept_until_ns = after.deadline_ns or None
        if after.may_end_unread:
            why = lease.LENT_BACK
        elif after.state is lease.State.EXPIRED:
            who = lease.holders_in_words(after)
    else:
        name, failure = after.engine_id, after.failure
    return TransitionRecord(
        number,
        wall,
        at_ns,
        engine_id,
        rank,
        role,
        _NAME_OF[kind],
        name,
        before.state.text if before is not None else None,
        event.__class__.__name__ if event is not None else CREATED,
        after.state.text,
        failure.kind if failure is not None else why,
        str(failure) if failure is not None else who,
        peer_id,
        remote_request_id,
        lease_number,
        blocks,
        length_bytes,
        descriptors,
        (at_ns - entered_ns) / NS_PER_SECOND if before is not None else None,
        age_ns / NS_PER_SECOND if age_ns is not None and before is None else None,
        kept_until_ns,
    )


def is_bad_end(value: Any) -> bool:
    """Whether the end that a value has come to is worth a place for longer; see the module's docstring."""
    if value.state not in BAD_ENDS:
        return False
    if isinstance(value, lease.Lease):
        return not value.may_end_unread
    return not isinstance(value.failure, AbortedByClient)


def is_about(value: Any, text: str) -> bool:
    """Whether a value concerns a request one of whose ids contains `text`."""
    if isinstance(value, request.Request):
        return text in value.request_id or text in value.lease.request_id
    if isinstance(value, hold.Hold):
        return text in value.lease.request_id
    return isinstance(value, lease.Lease) and text in value.name.request_id
