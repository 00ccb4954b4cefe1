"""One lease on the prefill engine: the blocks of one request on one rank, lent until every reader is done.

    computing   the prefill runs; the blocks are the request's own
    held        the prefill has finished: the blocks are kept for readers until `deadline_ns`
    done        every engine that held the lease has released it on all its ranks: the blocks are freed
    expired     nobody renewed it in time: the blocks are freed
    withdrawn   it ended without being lent (aborted, failed, nothing computed)
    superseded  the engine computes another request under the same id, and has freed the blocks by itself

Readers. A decode engine says that it wants the blocks by holding the lease, rank by rank, and that it is done by
releasing it. `holders` has one entry for each engine: how many of its ranks are our partners, and which of them have
released. Decode engines with the built-in connector do not hold; each of their ranks sends one notification when it is
done. They count as one holder, whose ranks are the senders' agent names, because a notification does not say which
engine it comes from. The lease is done when every holder is complete; a release counts as a hold too, so an engine that
needs nothing (a full prefix hit) may release at once. A sender counts once, however often it repeats itself. Holders
that disagree about the number of ranks are resolved to the largest: holding on longer is safe. A rank that holds after
it has released wants the blocks again, and is told that they are held: an engine that has forgotten that it had them
(it restarted under its name, or evicted us), and whose client comes again while another of its ranks still reads.
Whoever was told that the blocks are held has to release them itself: two engines may have been started under one id,
a stranger may know it, and what a rank has sent before it evicted us may arrive when it has met us anew. So a rank says
with each hold and release which incarnation it is (`Reader.incarnation`): a name that nobody else has, and that it
draws anew each time it meets us. Under one such name nothing is held again that was released: a hold that comes behind
its own release is late, and is told that the lease is over.

Overtaking. The client's answer may reach a fast reader before the engine's next step tells this rank of the grant. So
holds and releases in `computing` are remembered, and the promise that a hold was given (`deadline_ns`) is kept by the
grant.

A lease that is over never comes back. This is what makes `Held` a proof for everything before it: whoever is told
`Held` at an instant knows that the blocks were lent at all times until then (docs/architecture.md, "Why the proof is
right").

The bound. Renewals end at `latest_ns`: a reader that never reads cannot pin our memory for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import msgspec

from statemachine.kernel import NO_EFFECTS, Effect, Event, Machine, MachineState, pairs, to


class LeaseName(NamedTuple):
    """What a lease is called between engines: the request's id on P, and a number that no other lease of this life of P
    has. The number is 0 where the parameters carried none."""

    request_id: str
    number: int


class State(MachineState):
    COMPUTING = "computing"
    HELD = "held"
    DONE = "done"
    EXPIRED = "expired"
    WITHDRAWN = "withdrawn"
    SUPERSEDED = "superseded"


HEARTBEATS_PER_LEASE = 6
"""How often a reader sends heartbeats to a built-in engine in the time of a lease, as built-in readers do."""
HEARTBEAT_NUMERATOR, HEARTBEAT_DENOMINATOR = 2, 3
"""A heartbeat keeps a lease for this part of its time, as in the built-in connector."""

LEASES_PER_MESSAGE_MAX = 512
"""Leases that one message between engines is about."""

LENT_BACK = "lent_back"
"""What records have as the reason of a lease that lends an answer's blocks for read-back, while nobody has asked for
them."""

READERS_MAX = 1024
"""Readers of decode engines with one id that hold one lease, and that are remembered to have released it."""

BUILTIN_READERS = ""
"""The holder that stands for all built-in readers; no engine id is empty."""


class Reader(NamedTuple):
    """One rank of a decode engine, for as long as it knows us: its number, and its incarnation, a name that it has
    drawn for that and nobody else has, nor itself before or after. Empty: it has said none."""

    rank: int
    incarnation: str


class Holder(msgspec.Struct, frozen=True):
    """Decode engines of one id as readers of one lease. There may be several of that id, by mistake or after a restart.

    Attributes:
        ranks: how many of its ranks are partners of this rank.
        released: those that are done, by number; agent names where the engine is a built-in one.
        promised: those that were told that their blocks are kept, and have not released them since. Each may prove a
            READ by that, so the word of another one in its name is not enough.
        left: those that have released them, and will not hold them again; at most READERS_MAX.
    """

    engine_id: str
    ranks: int
    released: frozenset[int | str] = frozenset()
    promised: frozenset[Reader] = frozenset()
    left: frozenset[Reader] = frozenset()

    @property
    def is_complete(self) -> bool:
        return len(self.released) >= self.ranks and not self.promised

    @property
    def unreleased_incarnations(self) -> int:
        """How many incarnations have not released the blocks although all ranks are done: an engine has started again,
        or two have one id."""
        return len(self.promised) if len(self.released) >= self.ranks else 0


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """Value of the machine.

    Attributes:
        deadline_ns: until when the blocks are kept; in `computing`, what holders have been promised so far.
        granted_ns, latest_ns: when it was granted, and what no renewal goes beyond; set by the grant.
        fixed_ns: it lasts for so long, whoever holds it; None: for as long as somebody does.
        blocks: how many are lent, for the trace.
        age_ns: for how long the engine had known the request when this was made, for the trace.
    """

    name: LeaseName
    state: State = State.COMPUTING
    holders: tuple[Holder, ...] = ()
    deadline_ns: int = 0
    granted_ns: int = 0
    latest_ns: int = 0
    fixed_ns: int | None = None
    blocks: int = 0
    age_ns: int = 0

    def holder(self, engine_id: str) -> Holder | None:
        """What is known of the engines of this id."""
        return next((each for each in self.holders if each.engine_id == engine_id), None)

    def has_left(self, engine_id: str, reader: Reader) -> bool:
        """Whether this one has released it already, so that a hold of it is late."""
        known = self.holder(engine_id)
        return known is not None and reader in known.left

    @property
    def may_end_unread(self) -> bool:
        """It lends an answer's blocks back, and nobody has asked for them: no conversation goes on after its last turn,
        so that it expires then is as it should be."""
        return self.fixed_ns is not None and not self.holders


class Granted(Event, frozen=True, kw_only=True):
    """The prefill finished; the blocks are lent until `deadline_ns`, and with renewals until `latest_ns` at most.
    `granted_ns` and `fixed_ns` are for people."""

    deadline_ns: int
    latest_ns: int
    granted_ns: int = 0
    fixed_ns: int | None = None
    blocks: int = 0


class Held(Event, frozen=True, kw_only=True):
    """`rank` of an engine, of which `ranks` ranks are our partners, wants the blocks until `deadline_ns`, and is told
    that they are kept. `incarnation`: which of that rank (`Reader`); empty: it has said none."""

    engine_id: str
    rank: int
    ranks: int
    deadline_ns: int
    incarnation: str = ""


class Renewed(Event, frozen=True, kw_only=True):
    """A built-in reader still waits: keep the blocks until `deadline_ns`."""

    deadline_ns: int


class ReaderDone(Event, frozen=True, kw_only=True):
    """`rank` of `engine_id` needs the blocks no more, and `ranks` ranks of that engine will say so. `incarnation` as
    in `Held`."""

    engine_id: str
    rank: int | str
    ranks: int
    incarnation: str = ""


class DeadlinePassed(Event, frozen=True, kw_only=True):
    """The timer of this lease fired; a renewal may have moved the deadline since it was set."""

    now_ns: int


class Withdrawn(Event, frozen=True, kw_only=True):
    """The request ended without lending its blocks."""


class Superseded(Event, frozen=True, kw_only=True):
    """The engine computes another request under the same id, so it has freed this one's blocks by itself. That breaks
    what readers were told. vLLM refuses an id whose blocks it keeps."""


class StartLeaseTimer(Effect, frozen=True, kw_only=True):
    """Feed DeadlinePassed at `deadline_ns`."""

    deadline_ns: int


class FreeBlocks(Effect, frozen=True, kw_only=True):
    """Tell the engine that the blocks may be freed. Exactly once for each lease that was granted, unless it was
    superseded: the engine knows requests by their ids, and would free the blocks of the other one."""

    expired: bool


Effects: TypeAlias = tuple[StartLeaseTimer | FreeBlocks, ...]


def _is_read(lease: Lease) -> bool:
    return bool(lease.holders) and all(holder.is_complete for holder in lease.holders)


def _with_reader(lease: Lease, event: Held | ReaderDone) -> Lease:
    """The lease after this message; the sender's holder moves to the end."""
    others = tuple(each for each in lease.holders if each.engine_id != event.engine_id)
    known = lease.holder(event.engine_id) or Holder(event.engine_id, 0)
    released, promised, left = known.released, known.promised, known.left
    reader = frozenset((Reader(event.rank, event.incarnation),)) if isinstance(event.rank, int) else frozenset[Reader]()
    if isinstance(event, Held):
        released, promised = released - {event.rank}, promised | reader
    else:
        released, promised = released | {event.rank}, promised - reader
        if event.incarnation and len(left) < READERS_MAX:
            left |= reader
    holder = Holder(event.engine_id, max(event.ranks, known.ranks), released, promised, left)
    return msgspec.structs.replace(lease, holders=(*others, holder))


def _extended(lease: Lease, deadline_ns: int) -> Lease:
    """Deadlines only move forward; in `computing` there is no bound yet."""
    if lease.state is State.HELD:
        deadline_ns = min(deadline_ns, lease.latest_ns)
    return msgspec.structs.replace(lease, deadline_ns=max(lease.deadline_ns, deadline_ns))


def _grant(lease: Lease, event: Granted) -> tuple[Lease, Effects]:
    deadline_ns = max(lease.deadline_ns, event.deadline_ns)
    latest_ns = max(deadline_ns, event.latest_ns)
    held = msgspec.structs.replace(
        lease,
        state=State.HELD,
        deadline_ns=deadline_ns,
        granted_ns=event.granted_ns,
        latest_ns=latest_ns,
        fixed_ns=event.fixed_ns,
        blocks=event.blocks,
    )
    if _is_read(held):
        return msgspec.structs.replace(held, state=State.DONE), (FreeBlocks(expired=False),)
    return held, (StartLeaseTimer(deadline_ns=deadline_ns),)


def _hold(lease: Lease, event: Held) -> tuple[Lease, Effects]:
    return _extended(_with_reader(lease, event), event.deadline_ns), NO_EFFECTS


def _renew(lease: Lease, event: Renewed) -> tuple[Lease, Effects]:
    return _extended(lease, event.deadline_ns), NO_EFFECTS


def _remember_reader(lease: Lease, event: ReaderDone) -> tuple[Lease, Effects]:
    return _with_reader(lease, event), NO_EFFECTS


def _finish_reader(lease: Lease, event: ReaderDone) -> tuple[Lease, Effects]:
    lease = _with_reader(lease, event)
    if _is_read(lease):
        return msgspec.structs.replace(lease, state=State.DONE), (FreeBlocks(expired=False),)
    return lease, NO_EFFECTS


def _expire(lease: Lease, event: DeadlinePassed) -> tuple[Lease, Effects]:
    # Renewals do not move the timer: it is set again when it fires, once a lease instead of once a renewal.
    if event.now_ns < lease.deadline_ns:
        return lease, (StartLeaseTimer(deadline_ns=lease.deadline_ns),)
    return msgspec.structs.replace(lease, state=State.EXPIRED), (FreeBlocks(expired=True),)


def _withdraw(lease: Lease, event: Withdrawn) -> tuple[Lease, Effects]:
    return msgspec.structs.replace(lease, state=State.WITHDRAWN), NO_EFFECTS


def _supersede(lease: Lease, event: Superseded) -> tuple[Lease, Effects]:
    return msgspec.structs.replace(lease, state=State.SUPERSEDED), NO_EFFECTS


_COMPUTING, _HELD = State.COMPUTING, State.HELD

MACHINE: Machine[Lease, Effects] = Machine(
    name="lease",
    states=State,
    initial=_COMPUTING,
    terminal=frozenset({State.DONE, State.EXPIRED, State.WITHDRAWN, State.SUPERSEDED}),
    events=(Granted, Held, Renewed, ReaderDone, DeadlinePassed, Withdrawn, Superseded),
    table={
        (_COMPUTING, Granted): to(_grant, _HELD, State.DONE),
        (_COMPUTING, Held): to(_hold, _COMPUTING),
        (_COMPUTING, ReaderDone): to(_remember_reader, _COMPUTING),
        (_COMPUTING, Withdrawn): to(_withdraw, State.WITHDRAWN),
        (_COMPUTING, Superseded): to(_supersede, State.SUPERSEDED),
        (_HELD, Held): to(_hold, _HELD),
        (_HELD, Renewed): to(_renew, _HELD),
        (_HELD, ReaderDone): to(_finish_reader, _HELD, State.DONE),
        (_HELD, DeadlinePassed): to(_expire, _HELD, State.EXPIRED),
        (_HELD, Superseded): to(_supersede, State.SUPERSEDED),
    },
    ignored={
        **pairs((_COMPUTING,), (Renewed,), "the grant starts a fresh lease in any case"),
        **pairs((_HELD,), (Withdrawn,), "an abort after the prefill finished; readers or the deadline end the lease"),
    },
    impossible={
        **pairs((_COMPUTING,), (DeadlinePassed,), "the timer is set by the grant"),
        **pairs((_HELD,), (Granted,), "a request finishes once"),
    },
)


def holders_in_words(ended: Lease, where: Callable[[str], str] = lambda engine_id: "") -> str:
    """Who wanted its blocks, where that is, if it is known, and how far each has come."""
    if not ended.holders:
        return "no decode engine has asked for it"
    held = "held by " + ", ".join(
        f"{holder.engine_id or 'built-in engines'}{f' at {at}' if (at := where(holder.engine_id)) else ''} "
        f"({len(holder.released)} of {holder.ranks} ranks are done"
        + (f", and not {count} other process(es) of that id)" if (count := holder.unreleased_incarnations) else ")")
        for holder in ended.holders
    )
    # Who holds it is alive, then: it is not the length of a lease that was too short.
    if ended.fixed_ns is not None:
        return f"{held}, for a fixed time (decoder_kv_blocks_ttl)"
    if ended.deadline_ns < ended.latest_ns:
        return held
    return f"{held}, and renewed until its limit (lease_limit_seconds, or the grace period of a drain)"
