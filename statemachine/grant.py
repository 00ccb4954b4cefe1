"""What an engine does with the blocks of one request when it ends: its scheduler's part in lending them.

    present    it is here, and its blocks are not lent, as it looks now
    accepted   they are to be lent; it is not computed yet
    computing  it is computed, and the ranks know the lease, which is not granted yet
    lent       it has ended, and its blocks are kept until the ranks say that the lease is over
    freed      they were lent, and are vLLM's again
    ended      it has ended, and its blocks are not lent

The lease itself, rank by rank, is in `lease`. What is lent: the blocks of a prefill that another engine goes on from
(`for_decode`), and with read-back those of an answer, as long as the engine has enough blocks beside them. Otherwise
two engines can wait for each other: P's queue holds D's blocks, P has none free for its queue because they are lent to
D, and D's queue, which holds those, waits for D's.

Terms. An engine that serves no KV any more (`is_stopped`) lends nothing. One that is to end (`draining`) lends what it
has accepted before, until a lease would outlast its grace period: that is paid for and is read within moments. Answers
are lent to save time in the next turn of a conversation, for which it will not be there.
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple, TypeAlias

import msgspec

from statemachine.draining import Draining
from statemachine.kernel import NO_EFFECTS, Effect, Event, Machine, MachineState, pairs, to
from statemachine.lease import LeaseName

LEFT_TO_REQUESTS = 0.25
"""Share of the pool's blocks that has to be free for those of an answer to be lent."""


class State(MachineState):
    PRESENT = "present"
    ACCEPTED = "accepted"
    COMPUTING = "computing"
    LENT = "lent"
    FREED = "freed"
    ENDED = "ended"


class NotLent(enum.Enum):
    """Why a prefill is not lent."""

    STOPPED = "stopped"
    DRAINING = "draining"
    REQUEST_ID = "request_id"
    """No engine takes its id."""


class Terms(NamedTuple):
    """On which an engine lends at this moment."""

    draining: Draining
    is_stopped: bool

    @property
    def accept(self) -> bool:
        """Whether what comes now will be lent."""
        return not self.is_stopped and self.draining.accepts


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """Value of the machine.

    Attributes:
        request: of vLLM; opaque here.
        for_decode: another engine goes on from its prompt.
        heard_ns: when the engine first heard of it.
        lease: from `computing` on.
    """

    request_id: str
    request: Any
    for_decode: bool
    heard_ns: int
    state: State = State.PRESENT
    lease: LeaseName | None = None


class Arrived(Event, frozen=True, kw_only=True):
    """The request has come. `is_wanted`: somebody may want its blocks; `is_nameable`: its id can be part of a lease's
    name."""

    is_wanted: bool
    is_nameable: bool
    terms: Terms


class Scheduled(Event, frozen=True, kw_only=True):
    """It has blocks and is computed from now on; again after a preemption, or where a session goes on. `lease`: a name
    that nothing else has had."""

    is_wanted: bool
    lease: LeaseName
    terms: Terms


class Finished(Event, frozen=True, kw_only=True):
    """It has ended.

    Attributes:
        is_whole: what has been computed of it is known, and of use to others.
        free_share: of the pool's blocks; those of this request are not among them.
        is_waited_for: a request of the engine's own would have room if nothing were lent back.
        lease: as in `Scheduled`.
    """

    now_ns: int
    is_whole: bool
    free_share: float
    is_waited_for: bool
    lease: LeaseName
    terms: Terms


class LeaseOver(Event, frozen=True, kw_only=True):
    """On all ranks; vLLM frees the blocks."""


class LeaveTokens(Effect, frozen=True, kw_only=True):
    """Take the tokens that D computes itself out of the prompt, if there are any."""

    request: Any


class NoteNotLent(Effect, frozen=True, kw_only=True):
    """D computes the prompt itself."""

    request_id: str
    why: NotLent


class AnnounceLease(Effect, frozen=True, kw_only=True):
    """Tell the ranks that `lease` is being computed. `heard_ns`: as of the request."""

    lease: LeaseName
    heard_ns: int


class GrantLease(Effect, frozen=True, kw_only=True):
    """Keep the blocks, tell the ranks, and write the answer that names them."""

    request: Any
    for_decode: bool
    lease: LeaseName


class WithdrawLease(Effect, frozen=True, kw_only=True):
    """Tell the ranks that what they know of is not lent."""

    lease: LeaseName


Effects: TypeAlias = tuple[LeaveTokens | NoteNotLent | AnnounceLease | GrantLease | WithdrawLease, ...]


def _arrive(grant: Grant, event: Arrived) -> tuple[Grant, Effects]:
    terms = event.terms
    if grant.for_decode and not terms.accept:
        why = NotLent.STOPPED if terms.is_stopped else NotLent.DRAINING
        return grant, (NoteNotLent(request_id=grant.request_id, why=why),)
    if not event.is_nameable:
        noted = NoteNotLent(request_id=grant.request_id, why=NotLent.REQUEST_ID)
        return grant, (noted,) if grant.for_decode else NO_EFFECTS
    if not event.is_wanted or not terms.accept:
        return grant, NO_EFFECTS
    accepted = msgspec.structs.replace(grant, state=State.ACCEPTED)
    return accepted, (LeaveTokens(request=grant.request),) if grant.for_decode else NO_EFFECTS


def _schedule(grant: Grant, event: Scheduled) -> tuple[Grant, Effects]:
    is_promised = grant.state is State.ACCEPTED and not event.terms.is_stopped
    if not event.is_wanted or not (event.terms.accept or is_promised):
        return grant, NO_EFFECTS
    computing = msgspec.structs.replace(grant, state=State.COMPUTING, lease=event.lease)
    return computing, (AnnounceLease(lease=event.lease, heard_ns=grant.heard_ns),)


def _finish(grant: Grant, event: Finished) -> tuple[Grant, Effects]:
    if event.is_whole and _lends(grant, event):
        lease = grant.lease or event.lease
        granted = GrantLease(request=grant.request, for_decode=grant.for_decode, lease=lease)
        return msgspec.structs.replace(grant, state=State.LENT, lease=lease), (granted,)
    ended = msgspec.structs.replace(grant, state=State.ENDED)
    return ended, (WithdrawLease(lease=grant.lease),) if grant.lease is not None else NO_EFFECTS


def _lends(grant: Grant, event: Finished) -> bool:
    terms = event.terms
    if terms.is_stopped:
        return False
    if terms.accept:
        # Who waits for what is lent back would never find room where answers end as fast as leases do.
        return grant.for_decode or (event.free_share >= LEFT_TO_REQUESTS and not event.is_waited_for)
    return grant.for_decode and grant.state is State.COMPUTING and terms.draining.grants(event.now_ns)


def _free(grant: Grant, event: LeaseOver) -> tuple[Grant, Effects]:
    return msgspec.structs.replace(grant, state=State.FREED), NO_EFFECTS


_PRESENT, _ACCEPTED, _COMPUTING, _LENT = State.PRESENT, State.ACCEPTED, State.COMPUTING, State.LENT

MACHINE: Machine[Grant, Effects] = Machine(
    name="grant",
    states=State,
    initial=_PRESENT,
    terminal=frozenset({State.FREED, State.ENDED}),
    events=(Arrived, Scheduled, Finished, LeaseOver),
    table={
        (_PRESENT, Arrived): to(_arrive, _PRESENT, _ACCEPTED),
        (_PRESENT, Scheduled): to(_schedule, _PRESENT, _COMPUTING),
        (_PRESENT, Finished): to(_finish, _LENT, State.ENDED),
        (_ACCEPTED, Scheduled): to(_schedule, _ACCEPTED, _COMPUTING),
        (_ACCEPTED, Finished): to(_finish, _LENT, State.ENDED),
        (_COMPUTING, Finished): to(_finish, _LENT, State.ENDED),
        (_LENT, LeaseOver): to(_free, State.FREED),
    },
    ignored={
        **pairs((_COMPUTING,), (Scheduled,), "the ranks know of it already"),
        **pairs((_LENT,), (Scheduled, Finished), "a request ends once"),
        **pairs((_PRESENT, _ACCEPTED, _COMPUTING), (LeaseOver,), "said of another request, which has had its id"),
    },
    impossible=pairs((_ACCEPTED, _COMPUTING, _LENT), (Arrived,), "a request that comes is a new one"),
)
