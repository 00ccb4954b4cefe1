"""The core of a prefill rank: every lease that it has out, who holds them, and when they end.

Sans I/O, as h11 is: `handle(event, now_ns)` returns what to do, `next_deadline()` says when `advance(now_ns)` has
something to do. The executor (`connector/runtime/lease_keeper.py`) carries out effects and decides nothing. Nothing
here reads a clock: `now_ns` is the executor's, and never goes back.

Where events come from. The engine's scheduler says which requests will be lent (`Computing`), are (`Granted`) or will
not be (`Withdrawn`). Decode engines of our kind hold and release by messages on the control socket (`HoldAsked`,
`ReleaseAsked`) and are always answered. Built-in decode engines send notifications through NIXL (`ReleaseNotified`,
`HeartbeatNotified`) and are not. Everything that comes from a peer may be late, repeated, or about something that is
not lent here; such a message is answered or counted, and changes nothing. What a process of a decode engine was told is
kept until that process releases it or the lease is over: another one that has its engine id, a mistake of whoever
starts engines or of a stranger, does not speak for it.

A process that has stood still, because it was stopped or its machine was, finds messages of that time and deadlines
that have passed, in no order. It ends nothing before it has taken these messages in: a lease that lasts longer than it
was said to harms nobody, and one that its reader has renewed or released in time must not count as one that nobody
wanted.

A lease that is over is remembered with the reason, so that who comes too late is told why. What has been forgotten
since is "not lent here", which is just as final.

Leaving. When the engine is to end (`Leave`), what is lent is served on: released, or over at its deadline. Only
renewals come to an end, with the grace period. A lease that was granted or promised is kept (a decode engine may have
proved READs by it, and a built-in one takes it for granted), so nothing is lent after a grace period of at least
`lease_ns` if nothing is granted in the last `lease_ns` of it. Which prefills are still granted is the scheduler's
matter (`grant`). Every decode engine that has asked for a lease is told at once, and one that
is met later when it first asks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import TypeAlias, assert_never

import msgspec

from statemachine import lease as machine
from statemachine.deadlines import NS_PER_SECOND, Deadlines
from statemachine.kernel import Effect, Event, ProtocolError
from statemachine.lease import BUILTIN_READERS, HEARTBEAT_DENOMINATOR, HEARTBEAT_NUMERATOR, Lease, LeaseName
from statemachine.outcome import Outcome
from statemachine.trace import Observer

ENDED_MAX = 1 << 16
"""Leases remembered after their end."""
HOLDERS_MAX = 64
"""Decode engines that hold one lease; samples of one prompt are spread over few."""

HEARERS_MAX = 4096
"""Decode ranks that are told when this engine leaves: those that were met last."""

LATE_READERS_MAX = 64
"""Ranks that are remembered to have released a lease that has expired; further ones count with each repetition."""

RELEASED, EXPIRED, WITHDRAWN = "released by its readers", "expired", "withdrawn"
SUPERSEDED = "superseded: this engine has used its request id again"
UNKNOWN = "not lent here: released long ago, or this engine has restarted since"
CROWDED = "held by too many decode engines already"
GRACE_OVER = "this engine leaves, and its grace period is over"
AMBIGUOUS = "named without its lease_number, and request ids come again here"

_WHY = {
    machine.State.DONE: RELEASED,
    machine.State.EXPIRED: EXPIRED,
    machine.State.WITHDRAWN: WITHDRAWN,
    machine.State.SUPERSEDED: SUPERSEDED,
}

ReplyAddress: TypeAlias = Hashable
"""Where an answer goes; opaque to the core."""


class LendingLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Durations in nanoseconds.

    Attributes:
        lease_ns: how long a grant or a hold keeps the blocks.
        total_ns: how long renewals can keep them in all.
        ids_repeat: request ids are those of the clients, so that of an earlier lease may come again, or that of one of
            an earlier life of this engine, which nobody here remembers.
        standstill_ns: who comes to a deadline so late has stood still, and takes in for as long what it was sent
            meanwhile before it ends what is due.
    """

    lease_ns: int
    total_ns: int
    ids_repeat: bool = False
    standstill_ns: int = NS_PER_SECOND

    @property
    def heartbeat_ns(self) -> int:
        """How long a built-in reader's heartbeat keeps them."""
        return self.lease_ns * HEARTBEAT_NUMERATOR // HEARTBEAT_DENOMINATOR


# --- events ---------------------------------------------------------------------------------------------------------


class Computing(Event, frozen=True, kw_only=True):
    """A request that will be lent has been scheduled. `age_ns`: how long the engine has known it."""

    lease: LeaseName
    age_ns: int = 0


class Granted(Event, frozen=True, kw_only=True):
    """The request has finished, and the engine keeps its blocks until it is told of the lease's end.

    `fixed_ns`: the lease ends after so long, whoever holds it; None: it lasts and is renewed as the limits say.
    """

    lease: LeaseName
    blocks: int = 0
    fixed_ns: int | None = None


class Withdrawn(Event, frozen=True, kw_only=True):
    """It ended without being lent."""

    lease: LeaseName


class HoldAsked(Event, frozen=True, kw_only=True):
    """`rank` of the decode engine `engine_id`, `ranks` of which are our partners, wants these leases.
    `incarnation`: what that rank calls itself for as long as it knows us (`lease.Reader`); empty: it has not said.

    `sent_ns` is the asker's own clock; it is echoed.
    """

    reply_to: ReplyAddress
    engine_id: str
    rank: int
    ranks: int
    sent_ns: int
    leases: tuple[LeaseName, ...]
    incarnation: str = ""


class ReleaseAsked(Event, frozen=True, kw_only=True):
    """The same rank needs these leases no more."""

    reply_to: ReplyAddress
    engine_id: str
    rank: int
    ranks: int
    leases: tuple[LeaseName, ...]
    incarnation: str = ""


class ReleaseNotified(Event, frozen=True, kw_only=True):
    """A rank of a built-in decode engine, known by its agent's name, needs a request no more; `ranks` will say so."""

    sender: str
    request_id: str
    ranks: int


class HeartbeatNotified(Event, frozen=True, kw_only=True):
    """A rank of a built-in decode engine still waits for these requests, each named once.

    `or_release`: what else the same text may mean, where a request id begins like a heartbeat; it does if such a
    request is lent.
    """

    sender: str
    request_ids: tuple[str, ...]
    or_release: ReleaseNotified | None = None


class Leave(Event, frozen=True, kw_only=True):
    """This engine is to end: no lease is renewed beyond `grace_ns` from now. Said again, it is only answered.

    `reply_to`: who has asked for it; None: nobody waits for an answer, because the engine ends now.
    """

    reply_to: ReplyAddress | None
    grace_ns: int


# --- effects --------------------------------------------------------------------------------------------------------


class AnswerHold(Effect, frozen=True, kw_only=True):
    """`held`: leases with the nanoseconds that they are kept from now on at least; `gone`: with the reason."""

    reply_to: ReplyAddress
    sent_ns: int
    held: tuple[tuple[LeaseName, int], ...]
    gone: tuple[tuple[LeaseName, str], ...]


class AnswerRelease(Effect, frozen=True, kw_only=True):
    """These leases need not be released again."""

    reply_to: ReplyAddress
    leases: tuple[LeaseName, ...]


class AnswerLeave(Effect, frozen=True, kw_only=True):
    """The decode engines have been told; `leases` have not ended."""

    reply_to: ReplyAddress
    leases: int


class TellLeaving(Effect, frozen=True, kw_only=True):
    """Tell a decode rank that this engine leaves: what it lends is kept for `grace_ns` at most."""

    reply_to: ReplyAddress
    grace_ns: int


class FreeBlocks(Effect, frozen=True, kw_only=True):
    """Tell the engine that it may free the blocks of this lease. Exactly once for each that was granted and was not
    superseded."""

    lease: LeaseName
    expired: bool


class ForgetLease(Effect, frozen=True, kw_only=True):
    """This lease is over, whatever ended it: what the executor keeps of it is of no more use. Exactly once for each,
    and after its FreeBlocks."""

    lease: LeaseName


class WatchNotifications(Effect, frozen=True, kw_only=True):
    """Whether anybody may be reading from us, so that notifications should be looked for often."""

    is_expected: bool


class NoteLateRelease(Effect, frozen=True, kw_only=True):
    """A reader was done with blocks that were not lent when it said so.

    `was_expired`: they had been lent, and the lease had expired before; said once for each rank. Otherwise they were
    never lent, or not to be lent after all, or nothing is remembered of them.
    """

    sender: str
    request_id: str
    was_expired: bool


LendingEffect: TypeAlias = (
    AnswerHold
    | AnswerRelease
    | AnswerLeave
    | TellLeaving
    | FreeBlocks
    | ForgetLease
    | WatchNotifications
    | NoteLateRelease
)
"""What this core may have its executor do."""


# --- the core -------------------------------------------------------------------------------------------------------


class Lending:
    """See the module's docstring.

    Args:
        observe: told of every step.
    """

    def __init__(self, limits: LendingLimits, observe: Observer | None = None) -> None:
        self._limits = limits
        # The leases that are not over. `_ended` never has a key of it: a lease that is over does not come back.
        self._leases: dict[LeaseName, Lease] = {}
        # Why the others are over, oldest first, at most ENDED_MAX. In a plain dict the way to the oldest leads past all
        # that were deleted before it.
        self._ended: OrderedDict[LeaseName, str] = OrderedDict()
        # Of those that have expired: the engines and ranks of which a release is no news (`_not_late`), and those that
        # have said by now that they were done; never empty.
        self._readers_of_expired: dict[LeaseName, frozenset[tuple[str, int | str]]] = {}
        # The newest lease of each request id that is in one of the two above.
        self._newest: dict[str, LeaseName] = {}
        # Request ids that more than one lease has had; a subset of the keys of `_newest`.
        self._reused: set[str] = set()
        # One entry for each lease in state `held`, at or before its deadline.
        self._timers: Deadlines[LeaseName] = Deadlines()
        # Until when nothing ends, because this process had stood still. What is due by then ends then, however late it
        # is: an executor that is always late still ends each lease.
        self._hears_until_ns: int | None = None
        # Who is told when this engine leaves, the rank that was met last at the end; at most HEARERS_MAX.
        self._hearers: OrderedDict[ReplyAddress, None] = OrderedDict()
        # When this engine's grace period is over; None: it does not leave.
        self._leaves_ns: int | None = None
        self._outcome: Outcome[LendingEffect] = Outcome(observe)

    def next_deadline(self) -> int | None:
        return self._timers.next_ns() if self._hears_until_ns is None else self._hears_until_ns

    @property
    def hears_first(self) -> bool:
        """Whether what is due has not ended, because this process had stood still. Never for longer than it has been
        given (`LendingLimits.standstill_ns`), if it is advanced when it says."""
        return self._hears_until_ns is not None

    def advance(self, now_ns: int) -> list[LendingEffect]:
        """End what is due. One at a time: if one raises, the others stay due."""
        if self._hears_first(now_ns):
            return self._outcome.take(now_ns)
        while (due := self._timers.take_due(now_ns)) is not None:
            self._step(due, machine.DeadlinePassed(now_ns=now_ns))
        self._hears_until_ns = None
        return self._outcome.take(now_ns)

    def _hears_first(self, now_ns: int) -> bool:
        """Whether nothing ends yet, because this process has stood still and has not heard what it was sent."""
        if self._hears_until_ns is None:
            due_ns, standstill_ns = self._timers.next_ns(), self._limits.standstill_ns
            if due_ns is None or now_ns - due_ns < standstill_ns:
                return False
            self._hears_until_ns = now_ns + standstill_ns
        return now_ns < self._hears_until_ns

    def handle(self, event: Event, now_ns: int) -> list[LendingEffect]:
        """Take one event in; returns what to do, in order."""
        match event:
            case HoldAsked():
                self._hold(event, now_ns)
            case ReleaseAsked():
                self._release(event)
            case ReleaseNotified():
                self._count_notification(event)
            case HeartbeatNotified():
                self._renew(event, now_ns)
            case Computing(lease=lease, age_ns=age_ns):
                self._begin(lease, age_ns)
            case Granted(lease=lease, blocks=blocks, fixed_ns=fixed_ns):
                self._begin(lease)
                lasts_ns, total_ns = (
                    (self._limits.lease_ns, self._limits.total_ns) if fixed_ns is None else (fixed_ns, fixed_ns)
                )
                deadline_ns, latest_ns = now_ns + lasts_ns, self._bounded(now_ns + total_ns)
                granted = machine.Granted(
                    deadline_ns=deadline_ns,
                    latest_ns=latest_ns,
                    granted_ns=now_ns,
                    fixed_ns=fixed_ns,
                    blocks=blocks,
                )
                self._step(lease, granted)
            case Withdrawn(lease=lease):
                if lease in self._leases:
                    self._step(lease, machine.Withdrawn())
            case Leave(reply_to=reply_to, grace_ns=grace_ns):
                self._leave(now_ns, grace_ns)
                if reply_to is not None:
                    self._outcome.effects.append(AnswerLeave(reply_to=reply_to, leases=len(self._leases)))
            case _:
                raise TypeError(f"{type(event).__name__} is not an event of this core")
        return self._outcome.take(now_ns)

    # --- peers ------------------------------------------------------------------------------------------------------

    def _hold(self, asked: HoldAsked, now_ns: int) -> None:
        held: list[tuple[LeaseName, int]] = []
        gone: list[tuple[LeaseName, str]] = []
        deadline_ns = self._bounded(now_ns + self._limits.lease_ns)
        for name in asked.leases:
            known, why = self._find(name)
            reader = _reader(asked, name)
            if known is not None and self._leases[known].has_left(asked.engine_id, reader):
                known, why = None, RELEASED
            if known is not None and self._is_full(known, asked.engine_id, reader):
                known, why = None, CROWDED
            if known is not None and self._leases[known].state is machine.State.COMPUTING and deadline_ns <= now_ns:
                known, why = None, GRACE_OVER
            if known is None:
                gone.append((name, why))
                continue
            hold = machine.Held(
                engine_id=asked.engine_id,
                rank=asked.rank,
                ranks=asked.ranks,
                deadline_ns=deadline_ns,
                incarnation=reader.incarnation,
            )
            self._step(known, hold)
            remaining_ns = self._leases[known].deadline_ns - now_ns
            if remaining_ns > 0:
                held.append((name, remaining_ns))
            else:
                # Its total bound is reached, and only its timer is late. Nobody is told Held of what ends now: D's
                # clock need not have moved since it asked, and a READ of this very moment would count as proven.
                self._step(known, machine.DeadlinePassed(now_ns=now_ns))
                gone.append((name, EXPIRED))
        self._outcome.effects.append(
            AnswerHold(reply_to=asked.reply_to, sent_ns=asked.sent_ns, held=tuple(held), gone=tuple(gone))
        )
        self._note_hearer(asked.reply_to, now_ns)

    # --- leaving ----------------------------------------------------------------------------------------------------

    def _leave(self, now_ns: int, grace_ns: int) -> None:
        if self._leaves_ns is not None:
            return
        self._leaves_ns = now_ns + grace_ns
        self._outcome.effects += [TellLeaving(reply_to=hearer, grace_ns=grace_ns) for hearer in self._hearers]

    def _note_hearer(self, reply_to: ReplyAddress, now_ns: int) -> None:
        is_new = reply_to not in self._hearers
        self._hearers.pop(reply_to, None)
        self._hearers[reply_to] = None
        if len(self._hearers) > HEARERS_MAX:
            self._hearers.popitem(last=False)
        if is_new and self._leaves_ns is not None:
            self._outcome.effects.append(TellLeaving(reply_to=reply_to, grace_ns=max(0, self._leaves_ns - now_ns)))

    def _bounded(self, deadline_ns: int) -> int:
        """`deadline_ns`, or the end of the grace period of an engine that leaves, if that is earlier."""
        return deadline_ns if self._leaves_ns is None else min(deadline_ns, self._leaves_ns)

    def _release(self, asked: ReleaseAsked) -> None:
        for name in asked.leases:
            known, why = self._find(name)
            reader = _reader(asked, name)
            if known is not None and self._is_full(known, asked.engine_id, reader):
                continue  # it was never told that it holds anything
            if known is not None:
                done = machine.ReaderDone(
                    engine_id=asked.engine_id, rank=asked.rank, ranks=asked.ranks, incarnation=reader.incarnation
                )
                self._step(known, done)
            else:
                self._note_late(self._meant(name), why, name.request_id, asked.engine_id, asked.engine_id, asked.rank)
        self._outcome.effects.append(AnswerRelease(reply_to=asked.reply_to, leases=asked.leases))

    def _count_notification(self, notified: ReleaseNotified) -> None:
        name = self._newest.get(notified.request_id)
        if name in self._leases:
            assert name is not None
            self._step(name, machine.ReaderDone(engine_id=BUILTIN_READERS, rank=notified.sender, ranks=notified.ranks))
        else:
            why = UNKNOWN if name is None else self._ended[name]
            self._note_late(name, why, notified.request_id, notified.sender, BUILTIN_READERS, notified.sender)

    def _note_late(
        self, name: LeaseName | None, why: str, request_id: str, sender: str, engine_id: str, rank: int | str
    ) -> None:
        """A rank is done with what is not lent. That is worth a note unless it only repeats itself."""
        if why == RELEASED:
            return
        if why == EXPIRED:
            assert name is not None
            before = self._readers_of_expired.get(name, frozenset())
            if (engine_id, rank) in before:
                return
            if len(before) < LATE_READERS_MAX:
                self._readers_of_expired[name] = before | {(engine_id, rank)}
        self._outcome.effects.append(NoteLateRelease(sender=sender, request_id=request_id, was_expired=why == EXPIRED))

    def _renew(self, notified: HeartbeatNotified, now_ns: int) -> None:
        release = notified.or_release
        if release is not None and release.request_id in self._newest:
            self._count_notification(release)
            return
        deadline_ns = self._bounded(now_ns + self._limits.heartbeat_ns)
        for request_id in notified.request_ids:
            name = self._newest.get(request_id)
            if name is not None and name in self._leases:
                self._step(name, machine.Renewed(deadline_ns=deadline_ns))

    def _is_full(self, name: LeaseName, engine_id: str, reader: machine.Reader) -> bool:
        """Whether who asks is no holder of this lease yet, and cannot become one: every step looks at all that are."""
        lease = self._leases[name]
        known = lease.holder(engine_id)
        if known is None:
            return len(lease.holders) >= HOLDERS_MAX
        return len(known.promised) >= machine.READERS_MAX and reader not in known.promised

    def lent_as(self, name: LeaseName) -> LeaseName | None:
        """The lease, lent now or soon, that a peer means by this name, which may lack the number."""
        return self._find(name)[0]

    def _find(self, name: LeaseName) -> tuple[LeaseName | None, str]:
        """The lease that a peer means, or None and why there is none."""
        if name in self._leases:
            return name, ""
        if name.number == 0 and name.request_id in self._newest:
            if self._limits.ids_repeat or name.request_id in self._reused:
                return None, AMBIGUOUS
            newest = self._newest[name.request_id]
            return (newest, "") if newest in self._leases else (None, self._ended[newest])
        return None, self._ended.get(name, UNKNOWN)

    def _meant(self, name: LeaseName) -> LeaseName | None:
        """The lease that is over which a peer means, if it is remembered."""
        if name in self._ended:
            return name
        return self._newest.get(name.request_id) if name.number == 0 else None

    # --- leases -----------------------------------------------------------------------------------------------------

    def _begin(self, name: LeaseName, age_ns: int = 0) -> None:
        """Know this lease, from when it is computed or, if that was not told, granted."""
        if name in self._leases:
            return
        before = self._newest.get(name.request_id)
        if before is not None:
            self._reused.add(name.request_id)
            if before in self._leases:
                self._step(before, machine.Superseded())
        if name in self._ended:
            # What was proven of it holds for ever.
            raise ProtocolError("lease", self._ended[name], "Computing or Granted", "no number is given out twice")
        self._newest[name.request_id] = name
        fresh = Lease(name=name, age_ns=age_ns)
        self._leases[name] = fresh
        self._outcome.steps.append(("lease", name, None, None, fresh))
        if len(self._leases) == 1:
            self._outcome.effects.append(WatchNotifications(is_expected=True))

    def _step(self, name: LeaseName, event: Event) -> None:
        before = self._leases[name]
        after, effects = machine.MACHINE.step(before, event)
        self._leases[name] = after
        self._outcome.steps.append(("lease", name, before, event, after))
        self._execute(name, effects)
        if machine.MACHINE.is_terminal(after):
            self._forget(name, _WHY[after.state])
            if after.state is machine.State.EXPIRED and (readers := _not_late(after)):
                self._readers_of_expired[name] = readers

    def _execute(self, name: LeaseName, effects: machine.Effects) -> None:
        for effect in effects:
            match effect:
                case machine.StartLeaseTimer(deadline_ns=deadline_ns):
                    self._timers.set(name, deadline_ns)
                case machine.FreeBlocks(expired=expired):
                    self._outcome.effects.append(FreeBlocks(lease=name, expired=expired))
                case _:
                    assert_never(effect)

    def _forget(self, name: LeaseName, why: str) -> None:
        del self._leases[name]
        self._timers.cancel(name)
        self._outcome.effects.append(ForgetLease(lease=name))
        self._ended[name] = why
        if len(self._ended) > ENDED_MAX:
            oldest, _ = self._ended.popitem(last=False)
            self._readers_of_expired.pop(oldest, None)
            if self._newest.get(oldest.request_id) == oldest:
                del self._newest[oldest.request_id]
                self._reused.discard(oldest.request_id)
        if not self._leases:
            self._outcome.effects.append(WatchNotifications(is_expected=False))

    # --- for the explorer -------------------------------------------------------------------------------------------

    def copy(self) -> Lending:
        other = type(self)(self._limits, self._outcome.observe)
        other._leases = dict(self._leases)
        other._ended = self._ended.copy()
        other._readers_of_expired = dict(self._readers_of_expired)
        other._newest = dict(self._newest)
        other._reused = set(self._reused)
        other._timers = self._timers.copy()
        other._hears_until_ns = self._hears_until_ns
        other._hearers = self._hearers.copy()
        other._leaves_ns = self._leaves_ns
        return other

    def freeze(self, now_ns: int) -> Hashable:
        """Equal for two cores that behave alike from `now_ns` on. Times are relative to it."""
        leases = frozenset(
            msgspec.structs.replace(
                lease,
                holders=tuple(sorted(lease.holders, key=lambda holder: holder.engine_id)),
                deadline_ns=max(0, lease.deadline_ns - now_ns),
                granted_ns=0,
                latest_ns=max(0, lease.latest_ns - now_ns),
                age_ns=0,
            )
            for lease in self._leases.values()
        )
        return (
            leases,
            frozenset(self._ended.items()),
            frozenset(self._readers_of_expired.items()),
            frozenset(self._newest.items()),
            frozenset(self._reused),
            self._timers.freeze(now_ns),
            tuple(self._hearers),
            None if self._leaves_ns is None else max(0, self._leaves_ns - now_ns),
            None if self._hears_until_ns is None else max(0, self._hears_until_ns - now_ns),
        )

    # --- for people -------------------------------------------------------------------------------------------------

    def leases(self) -> tuple[Lease, ...]:
        """What is lent now, oldest first."""
        return tuple(self._leases.values())

    def lease(self, name: LeaseName) -> Lease | None:
        """The lease of this name as it is now; None: it is over, or never was."""
        return self._leases.get(name)


def end_without_core_ns(granted_ns: int, fixed_ns: int | None, died_ns: int, lease_ns: int) -> int:
    """From when on the engine may free the blocks of a lease by itself, if this core is not there any more to say so.

    Blocks are kept while somebody who was told `Held` may prove a READ by it (invariant 5), and what the core has
    promised is lost with it. So the worst is assumed of its last moment: it heard of the grant only then, and counted
    the lease from there, or told a reader that the blocks are kept for `lease_ns`, which it does before a grant of any
    length too. It has promised nothing since. Of a grant that came later no rank was told anything; the client was
    given its parameters all the same, and a built-in reader trusts these alone.

    Args:
        granted_ns: when the engine said that it lends the blocks.
        fixed_ns: for how long, as in `Granted`.
        died_ns: when the core was found to be dead.
        lease_ns: as in `LendingLimits`.
    """
    return max(granted_ns, died_ns) + max(lease_ns, fixed_ns or 0)


def _reader(asked: HoldAsked | ReleaseAsked, name: LeaseName) -> machine.Reader:
    """Who names a lease so. Two requests of a rank may name one lease, one of them without its number: the rank takes
    them for two, and releases one while it reads the other."""
    incarnation = asked.incarnation if name.number or not asked.incarnation else f"{asked.incarnation} without a number"
    return machine.Reader(asked.rank, incarnation)


def _not_late(lease: Lease) -> frozenset[tuple[str, int | str]]:
    """Which ranks of which engines say nothing new when they release it now: they had before, or have held it and were
    told then that it ends after a fixed time, perhaps unread. They use nothing that comes later."""
    said = {(holder.engine_id, rank) for holder in lease.holders for rank in holder.released}
    if lease.fixed_ns is not None:
        said |= {(holder.engine_id, reader.rank) for holder in lease.holders for reader in holder.promised}
    return frozenset(said)
