"""One request on the prefill engine: its blocks are lent until every consumer is done, or until the deadline.

    computing   the prefill runs; nothing is lent yet
    held        the prefill has finished: the blocks are kept for the decode engine until `deadline_ns`
    done        every expected consumer has notified: the blocks are freed
    expired     the deadline passed first: the blocks are freed, whoever reads them now reads foreign KV
    released    the request ended without lending (aborted, failed, nothing computed): its blocks were never kept

Consumers are counted per sender, not per message: a duplicated notification frees nothing early. The expected number
comes with each notification; senders that disagree are resolved to the largest number, because holding on longer is
safe (the deadline still ends it) and freeing early is not.

A notification can overtake the grant, because the answer with the block ids may reach a fast reader before the engine's
next step tells the worker. It is remembered in `computing` and counted right after the grant, so that every lease that
ends has been held, and only a held lease frees blocks.
"""

from __future__ import annotations

import msgspec

from statemachine.kernel import NO_EFFECTS, Effect, Effects, Event, Machine, MachineState, pairs, to


class State(MachineState):
    COMPUTING = "computing"
    HELD = "held"
    DONE = "done"
    EXPIRED = "expired"
    RELEASED = "released"


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """Value of the machine. `consumers` are the agents that have notified, `expected` how many must (0: not known)."""

    request_id: str
    state: State = State.COMPUTING
    consumers: frozenset[str] = frozenset()
    expected: int = 0
    deadline_ns: int | None = None


class Granted(Event, frozen=True, kw_only=True):
    """The prefill finished; the blocks are lent until `deadline_ns` (local monotonic clock)."""

    deadline_ns: int


class ConsumerNotified(Event, frozen=True, kw_only=True):
    """`sender` needs the blocks no more; it says that `expected` consumers will say so."""

    sender: str
    expected: int


class EarlyNotificationsCounted(Event, frozen=True, kw_only=True):
    """Follows a grant that consumers had overtaken."""


class Renewed(Event, frozen=True, kw_only=True):
    """A consumer still waits: hold at least until `deadline_ns`."""

    deadline_ns: int


class DeadlinePassed(Event, frozen=True, kw_only=True):
    """A timer for this lease fired at `now_ns`; a renewal may have moved the deadline since it was set."""

    now_ns: int


class Withdrawn(Event, frozen=True, kw_only=True):
    """The request ended without lending its blocks."""


class StartLeaseTimer(Effect, frozen=True, kw_only=True):
    """Feed DeadlinePassed at `deadline_ns`."""

    deadline_ns: int


class CountEarlyNotifications(Effect, frozen=True, kw_only=True):
    """Feed EarlyNotificationsCounted."""


class FreeBlocks(Effect, frozen=True, kw_only=True):
    """Tell the engine that the blocks may be freed. Emitted exactly once per lease that was granted."""


def _is_consumed(lease: Lease) -> bool:
    return 0 < lease.expected <= len(lease.consumers)


def _grant(lease: Lease, event: Granted) -> tuple[Lease, Effects]:
    held = msgspec.structs.replace(lease, state=State.HELD, deadline_ns=event.deadline_ns)
    early: Effects = (CountEarlyNotifications(),) if lease.consumers else NO_EFFECTS
    return held, (StartLeaseTimer(deadline_ns=event.deadline_ns), *early)


def _count(lease: Lease, event: ConsumerNotified) -> Lease:
    return msgspec.structs.replace(
        lease, consumers=lease.consumers | {event.sender}, expected=max(lease.expected, event.expected)
    )


def _notify_early(lease: Lease, event: ConsumerNotified) -> tuple[Lease, Effects]:
    return _count(lease, event), NO_EFFECTS


def _notify(lease: Lease, event: ConsumerNotified) -> tuple[Lease, Effects]:
    return _free_if_consumed(_count(lease, event))


def _count_early(lease: Lease, event: EarlyNotificationsCounted) -> tuple[Lease, Effects]:
    return _free_if_consumed(lease)


def _free_if_consumed(lease: Lease) -> tuple[Lease, Effects]:
    if _is_consumed(lease):
        return msgspec.structs.replace(lease, state=State.DONE), (FreeBlocks(),)
    return lease, NO_EFFECTS


def _renew(lease: Lease, event: Renewed) -> tuple[Lease, Effects]:
    assert lease.deadline_ns is not None
    if event.deadline_ns <= lease.deadline_ns:
        return lease, NO_EFFECTS
    lease = msgspec.structs.replace(lease, deadline_ns=event.deadline_ns)
    return lease, (StartLeaseTimer(deadline_ns=event.deadline_ns),)


def _expire(lease: Lease, event: DeadlinePassed) -> tuple[Lease, Effects]:
    assert lease.deadline_ns is not None
    if event.now_ns < lease.deadline_ns:
        return lease, NO_EFFECTS
    return msgspec.structs.replace(lease, state=State.EXPIRED), (FreeBlocks(),)


def _withdraw(lease: Lease, event: Withdrawn) -> tuple[Lease, Effects]:
    return msgspec.structs.replace(lease, state=State.RELEASED), NO_EFFECTS


_COMPUTING, _HELD = State.COMPUTING, State.HELD

MACHINE: Machine[Lease] = Machine(
    name="lease",
    states=State,
    initial=_COMPUTING,
    terminal=frozenset({State.DONE, State.EXPIRED, State.RELEASED}),
    events=(Granted, ConsumerNotified, EarlyNotificationsCounted, Renewed, DeadlinePassed, Withdrawn),
    table={
        (_COMPUTING, Granted): to(_grant, _HELD),
        (_COMPUTING, ConsumerNotified): to(_notify_early, _COMPUTING),
        (_COMPUTING, Withdrawn): to(_withdraw, State.RELEASED),
        (_HELD, ConsumerNotified): to(_notify, _HELD, State.DONE),
        (_HELD, EarlyNotificationsCounted): to(_count_early, _HELD, State.DONE),
        (_HELD, Renewed): to(_renew, _HELD),
        (_HELD, DeadlinePassed): to(_expire, _HELD, State.EXPIRED),
    },
    ignored={
        **pairs((_COMPUTING,), (Renewed,), "the grant starts a fresh lease in any case"),
        **pairs((_HELD,), (Withdrawn,), "an abort after the prefill finished; consumers or the deadline end the lease"),
    },
    impossible={
        **pairs((_COMPUTING,), (DeadlinePassed, EarlyNotificationsCounted), "nothing of this precedes the grant"),
        **pairs((_HELD,), (Granted,), "a request finishes once"),
    },
)
