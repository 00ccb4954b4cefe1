"""The leases that one rank of D wants from one prefill engine, and what it says of them to each rank of P.

A claim is a lease with those here who want it (announced or reading) and its hold on each rank of P. It lives from the
first request that names it until nobody wants it and nothing is owed: until each rank has confirmed the release, or the
lease must be over.

What is to be said, a renewal or a release, is due at a time for each lease and rank, and is said while a connection is
spoken over (`link`); what is due together travels together. Who wants a lease that P does not keep is told
by the core: methods that lose a lease return its claim for that.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import assert_never

import msgspec

from statemachine import hold
from statemachine.deadlines import NS_PER_SECOND, Deadlines
from statemachine.kernel import Event
from statemachine.lease import HEARTBEATS_PER_LEASE, LEASES_PER_MESSAGE_MAX, LeaseName
from statemachine.outcome import Outcome
from statemachine.remembered import Remembered
from statemachine.remote_engine.connections import Connection
from statemachine.remote_engine.messages import (
    Address,
    EngineEffect,
    EngineLimits,
    NotifyReleases,
    SendHeartbeat,
    SendHold,
    SendRelease,
    TimerKey,
)

CONSUMED_MAX = 1 << 14
"""Released leases that are remembered, the newest ones. P remembers longer, unless it is a built-in engine."""

DRIFT_DIVISOR = 6
"""A sixth is taken off what P says remains: two clocks part by that much if chrony slews one forward and the other back
as fast as it can (83,333 ppm each)."""

RESENDS_PER_LEASE = 20
SAID_EARLY_DIVISOR = 2
"""What is due within half of the pause before something is said again goes with what is due now."""

ASSUMED_OVER = (
    "the lease of a built-in engine, taken to have begun when this engine first heard of the request, is over"
)

RESTARTED = "the engine is another process than the one that lent them"
REPLACED = "the engine runs the built-in connector now, and one with this connector has lent them"
RESIZED = "the engine has come back with another number of ranks"
LEFT = "the engine has ended or sleeps, as it had said"
RETIRED = "the engine was given up here: another one has its place, it was idle, or the connector stops"


class Claim:
    """A lease that somebody here wants, or that is owed a release.

    Attributes:
        address: where its last request says that P is.
        heard_ns: when this engine first heard of a request that names it; may lie before the clock's zero.
        users: ids of the requests that want it, announced or in hand.
        holds: by rank of P; empty until P was first met.
        is_kept: also while it has no users.
    """

    __slots__ = ("address", "heard_ns", "holds", "is_kept", "lease", "users")

    def __init__(self, lease: LeaseName, address: Address, heard_ns: int) -> None:
        self.lease = lease
        self.address = address
        self.heard_ns = heard_ns
        self.users: dict[str, None] = {}
        self.holds: list[hold.Hold] = []
        self.is_kept = False

    @property
    def is_wanted(self) -> bool:
        return self.is_kept or len(self.users) > 0

    @property
    def proven_until_ns(self) -> int:
        return min((each.proven_until_ns for each in self.holds), default=-1)

    @property
    def gone(self) -> str | None:
        """Why P does not keep it, if any rank said so."""
        return next((each.why for each in self.holds if each.state is hold.State.GONE), None)

    @property
    def is_over(self) -> bool:
        return bool(self.holds) and all(hold.MACHINE.is_terminal(each) for each in self.holds)

    def copy(self) -> Claim:
        other = Claim(self.lease, self.address, self.heard_ns)
        other.users = dict(self.users)
        other.holds = list(self.holds)
        other.is_kept = self.is_kept
        return other

    def freeze(self, now_ns: int, lease_ns: int) -> Hashable:
        holds = tuple(
            msgspec.structs.replace(
                each,
                proven_until_ns=each.proven_until_ns - now_ns if each.proven_until_ns >= 0 else -1,
            )
            for each in self.holds
        )
        # When it was heard of matters until a built-in engine is met, and only for the length of a lease.
        age_ns = min(now_ns - self.heard_ns, lease_ns) if not self.holds else 0
        return (self.lease, self.address, frozenset(self.users), self.is_kept, holds, age_ns)


class Claims:
    """The claims of one core.

    Args:
        timers: of the core; those that concern a lease or what a rank of P answers are set and cancelled here.
        outcome: what there is to say, and the steps of holds, are added to it.

    Attributes:
        link: the connection that leases are spoken of over; None unless the peer is ready.
        dues: when a lease is to be asked for, or its release said, again; by lease and rank of P. Empty without a link.
    """

    __slots__ = ("_by_lease", "_consumed", "_limits", "_outcome", "_timers", "_wanted", "dues", "link")

    def __init__(self, limits: EngineLimits, timers: Deadlines[TimerKey], outcome: Outcome[EngineEffect]) -> None:
        self._limits = limits
        self._timers = timers
        self._outcome = outcome
        self.link: Connection | None = None
        # Dropped when nobody wants it (`Claim.is_wanted`) and nothing is owed.
        self._by_lease: dict[LeaseName, Claim] = {}
        # Those of them that are wanted, and were not given up because the engine has left.
        self._wanted: set[LeaseName] = set()
        # Leases that were released here, the last so many. None of them is wanted again.
        self._consumed = Remembered(CONSUMED_MAX)
        # One heap for all ranks: the next deadline costs the same however many there are.
        self.dues: Deadlines[tuple[LeaseName, int]] = Deadlines()

    def __len__(self) -> int:
        return len(self._by_lease)

    def __iter__(self) -> Iterator[Claim]:
        return iter(self._by_lease.values())

    def get(self, lease: LeaseName) -> Claim | None:
        return self._by_lease.get(lease)

    @property
    def are_wanted(self) -> bool:
        """Whether somebody here wants any."""
        return bool(self._wanted)

    # --- who wants what ---------------------------------------------------------------------------------------------

    def is_consumed(self, lease: LeaseName) -> bool:
        """Whether its release was said, or is owed: P may free the blocks at any time."""
        claim = self._by_lease.get(lease)
        return _text(lease) in self._consumed or (claim is not None and bool(claim.holds) and not claim.is_wanted)

    def want(
        self, lease: LeaseName, request_id: str, address: Address, heard_ns: int, now_ns: int, *, keeps: bool = False
    ) -> Claim:
        """`request_id` wants the lease: it is held from now on, and not released before the request has ended. `keeps`:
        nor after that, before `let_go`. If P cannot keep it, its claim is `gone` at once; who has only announced the
        request learns so when it starts."""
        claim = self._by_lease.get(lease)
        if claim is not None:
            if lease not in self._wanted and claim.gone is None:
                self._wanted.add(lease)
            self._timers.cancel(("release_given_up", lease))
            claim.users[request_id] = None
            claim.address = address
            claim.is_kept = claim.is_kept or keeps
            return claim
        self._wanted.add(lease)
        claim = self._by_lease[lease] = Claim(lease, address, heard_ns)
        claim.users[request_id] = None
        claim.is_kept = keeps
        if self.link is not None:
            self._meet(claim, self.link, now_ns)
        return claim

    def leave(self, lease: LeaseName, request_id: str, now_ns: int) -> None:
        """One request less wants this lease; the last one lets go of it."""
        claim = self._by_lease.get(lease)
        if claim is None or request_id not in claim.users:
            return
        del claim.users[request_id]
        self._end_if_unwanted(claim, now_ns)

    def end_keeping(self, lease: LeaseName, now_ns: int) -> None:
        """It is held for the requests that want it alone from now on."""
        claim = self._by_lease.get(lease)
        if claim is not None and claim.is_kept:
            claim.is_kept = False
            self._end_if_unwanted(claim, now_ns)

    def _end_if_unwanted(self, claim: Claim, now_ns: int) -> None:
        if claim.is_kept or claim.users:
            return
        self._wanted.discard(claim.lease)
        if claim.holds:
            self._release_holds(claim)
        # Else P was never met: it may be named again, and P is told when it is met in time.
        if claim.is_over:
            self._drop(claim)
            return
        # When it must be over on every rank of P.
        given_up_ns = max([now_ns + self._limits.lease_ns, *(each.proven_until_ns for each in claim.holds)])
        self._timers.set(("release_given_up", claim.lease), given_up_ns)

    def _release_holds(self, claim: Claim) -> None:
        self._consumed.add(_text(claim.lease))
        for rank in range(len(claim.holds)):
            self._step_hold(claim, rank, hold.Unwanted())

    def drop_if_over(self, claim: Claim) -> None:
        if claim.is_over and not claim.users:
            self._drop(claim)

    def _drop(self, claim: Claim) -> None:
        self._by_lease.pop(claim.lease, None)
        self._wanted.discard(claim.lease)
        self._timers.cancel(("assumed", claim.lease))
        self._timers.cancel(("release_given_up", claim.lease))
        for rank in range(self._ranks):
            self.dues.cancel((claim.lease, rank))

    def drop_all(self) -> None:
        """Nothing is asked for or said any more: the leases end by themselves."""
        for claim in list(self._by_lease.values()):
            self._lose_holds(claim, RETIRED)
            self._drop(claim)

    def give_up(self, lease: LeaseName) -> None:
        """The lease must be over, whether P has heard of our release or not."""
        claim = self._by_lease[lease]
        for rank in range(len(claim.holds)):
            self._step_hold(claim, rank, hold.GiveUp())
        self._drop(claim)

    # --- what P says ------------------------------------------------------------------------------------------------

    def _asked_for(self, lease: LeaseName, rank: int) -> Claim | None:
        """The claim that this rank of P may say something of. An answer may name any lease: also one that nobody was
        asked for yet, or that was lost with an engine of fewer ranks."""
        claim = self._by_lease.get(lease)
        return claim if claim is not None and rank < len(claim.holds) else None

    def prove(self, lease: LeaseName, rank: int, sent_ns: int, remaining_ns: int, now_ns: int) -> Claim | None:
        """P keeps it for `remaining_ns`, as it said when it was asked at `sent_ns`. Returns it if something follows."""
        claim = self._asked_for(lease, rank)
        if claim is None or hold.MACHINE.is_terminal(claim.holds[rank]):
            return None
        reach_ns = remaining_ns - remaining_ns // DRIFT_DIVISOR - self._limits.margin_ns
        self._step_hold(claim, rank, hold.HeldByPeer(proven_until_ns=sent_ns + max(0, reach_ns)))
        if claim.holds[rank].state is hold.State.HELD and self.link is not None:
            # Before half of what was granted is gone.
            self.dues.set((lease, rank), max(now_ns + self.resend_ns, sent_ns + reach_ns // 2))
        return claim

    def lose(self, lease: LeaseName, rank: int, why: str) -> Claim | None:
        """This rank does not keep it. Returns it if that is news."""
        claim = self._asked_for(lease, rank)
        if claim is None or hold.MACHINE.is_terminal(claim.holds[rank]):
            return None
        self._step_hold(claim, rank, hold.GoneAtPeer(why=why))
        return claim

    def lose_everywhere(self, lease: LeaseName, why: str) -> Claim:
        """All ranks before anybody is told: the last user to end would release what is left."""
        claim = self._by_lease[lease]
        self._lose_holds(claim, why)
        return claim

    def lose_all(self, why: str, ranks: int, *, but_numbered: bool = False) -> list[Claim]:
        """Every lease, or all but those with a number; `ranks`: of P, for those of which it was never asked. Returns
        them."""
        claims = [each for each in self._by_lease.values() if not (but_numbered and each.lease.number)]
        for claim in claims:
            if not claim.holds:
                self._begin_holds(claim, ranks)
            self._lose_holds(claim, why)
        return claims

    def _lose_holds(self, claim: Claim, why: str) -> None:
        for rank in range(len(claim.holds)):
            self._step_hold(claim, rank, hold.GoneAtPeer(why=why))

    def want_none(self) -> None:
        """The engine has left: none of them is worth a handshake. Who wants one still is told when it starts."""
        self._wanted.clear()

    def confirm_release(self, lease: LeaseName, rank: int) -> None:
        """This rank knows that we are done with it."""
        claim = self._asked_for(lease, rank)
        if claim is not None and claim.holds[rank].state is hold.State.RELEASING:
            self._step_hold(claim, rank, hold.ReleaseConfirmed())
            self.drop_if_over(claim)

    # --- what is said to P ------------------------------------------------------------------------------------------

    @property
    def _ranks(self) -> int:
        return self.link.ranks if self.link is not None else 0

    @property
    def resend_ns(self) -> int:
        """The pause before something is said again."""
        return min(NS_PER_SECOND, self._limits.lease_ns // RESENDS_PER_LEASE)

    def speak_over(self, link: Connection, now_ns: int) -> list[Claim]:
        """P is connected. Returns what it cannot keep."""
        self._be_silent()
        self.link = link
        return [claim for claim in list(self._by_lease.values()) if not self._meet(claim, link, now_ns)]

    def fall_silent(self) -> None:
        """Nothing is said from now on: the connection is given up."""
        self._be_silent()
        self.link = None

    def _be_silent(self) -> None:
        for rank in range(self._ranks):
            self.note_answer(rank)
        self.dues.clear()

    def _meet(self, claim: Claim, link: Connection, now_ns: int) -> bool:
        """Say what there is to say about this lease to each rank; False: none of them keeps it."""
        if claim.holds and len(claim.holds) != link.ranks:
            self._lose_holds(claim, RESIZED)
            return False
        for rank in range(len(claim.holds)):
            self._step_hold(claim, rank, hold.Reconnected())
        if not claim.holds:
            self._begin_holds(claim, link.ranks)
            if not claim.is_wanted:
                self._release_holds(claim)
        if link.is_builtin and claim.lease.number:
            self._lose_holds(claim, REPLACED)
            return False
        if link.is_builtin:
            until_ns = claim.heard_ns + self._limits.lease_ns - self._limits.margin_ns
            for rank in range(link.ranks):
                self._step_hold(claim, rank, hold.Assumed(until_ns=until_ns))
            self._timers.set(("assumed", claim.lease), until_ns)
        for rank, each in enumerate(claim.holds):
            if not hold.MACHINE.is_terminal(each):
                self.dues.set((claim.lease, rank), now_ns)
        return True

    def _begin_holds(self, claim: Claim, ranks: int) -> None:
        for rank in range(ranks):
            fresh = hold.Hold(lease=claim.lease, rank=rank)
            claim.holds.append(fresh)
            self._outcome.steps.append(("hold", (claim.lease, rank), None, None, fresh))

    def _step_hold(self, claim: Claim, rank: int, event: Event) -> None:
        before = claim.holds[rank]
        after, effects = hold.MACHINE.step(before, event)
        claim.holds[rank] = after
        if after is not before:
            self._outcome.steps.append(("hold", (claim.lease, rank), before, event, after))
        for effect in effects:
            match effect:
                case hold.SayReleased():
                    if rank < self._ranks:  # there are fewer where P is not connected, or has come back smaller
                        self.dues.set((claim.lease, rank), 0)
                case _:
                    assert_never(effect)

    def ask_for_proof(self, lease: LeaseName, of_ns: int, now_ns: int) -> None:
        """Ask each rank at once that has not proven to have kept it until `of_ns`."""
        claim = self._by_lease[lease]
        for rank in range(self._ranks):
            if claim.holds[rank].proven_until_ns < of_ns:
                self.dues.set((lease, rank), now_ns)

    def send_due(self, now_ns: int) -> None:
        """Say what is due to each rank, many leases in one message: with what is due now goes what is due soon. Leases
        that came at different moments are renewed together from then on."""
        link, first_ns = self.link, self.dues.next_ns()
        if link is None or first_ns is None or first_ns > now_ns:
            return
        alike: dict[tuple[int, hold.State], list[LeaseName]] = {}
        while (due := self.dues.take_due(now_ns + self.resend_ns // SAID_EARLY_DIVISOR)) is not None:
            lease, rank = due
            alike.setdefault((rank, self._by_lease[lease].holds[rank].state), []).append(lease)
        for (rank, state), leases in alike.items():
            for first in range(0, len(leases), LEASES_PER_MESSAGE_MAX):
                batch = tuple(leases[first : first + LEASES_PER_MESSAGE_MAX])
                self._say(link, rank, state, batch, now_ns)

    def _say(self, link: Connection, rank: int, state: hold.State, leases: tuple[LeaseName, ...], now_ns: int) -> None:
        effects, again_ns = self._outcome.effects, now_ns + self.resend_ns
        if state in hold.MACHINE.terminal:
            return
        if state is hold.State.RELEASING and link.is_builtin:
            effects.append(NotifyReleases(connection=link.number, rank=rank, leases=leases))
            for lease in leases:
                self.confirm_release(lease, rank)
            return
        if state is hold.State.RELEASING:
            effects.append(SendRelease(connection=link.number, rank=rank, leases=leases))
        elif link.is_builtin:
            effects.append(SendHeartbeat(connection=link.number, rank=rank, leases=leases))
            again_ns = now_ns + self._limits.lease_ns // HEARTBEATS_PER_LEASE
        else:
            effects.append(SendHold(connection=link.number, rank=rank, sent_ns=now_ns, leases=leases))
        if not link.is_builtin and not self._expects_answer(rank):
            self._timers.set(("answer", rank), now_ns + self._limits.lease_ns - self.resend_ns)
        for lease in leases:
            self.dues.set((lease, rank), again_ns)

    def _expects_answer(self, rank: int) -> bool:
        return ("answer", rank) in self._timers or ("answer_grace", rank) in self._timers

    def note_answer(self, rank: int) -> None:
        self._timers.cancel(("answer", rank))
        self._timers.cancel(("answer_grace", rank))

    # --- for the explorer -------------------------------------------------------------------------------------------

    def copy(self, timers: Deadlines[TimerKey], outcome: Outcome[EngineEffect], link: Connection | None) -> Claims:
        """For a copy of the core, whose timers, outcome and current connection these are."""
        other = type(self)(self._limits, timers, outcome)
        other.link = link if self.link is not None else None
        other._by_lease = {lease: claim.copy() for lease, claim in self._by_lease.items()}
        other._wanted = set(self._wanted)
        other._consumed = self._consumed.copy()
        other.dues = self.dues.copy()
        return other

    def freeze(self, now_ns: int) -> Hashable:
        return (
            frozenset(each.freeze(now_ns, self._limits.lease_ns) for each in self._by_lease.values()),
            frozenset(self._wanted),
            self._consumed.freeze(),
            self.link is not None,
            self.dues.freeze(now_ns),
        )


def _text(lease: LeaseName) -> str:
    """A text that stands for this lease and no other."""
    return f"{lease.number} {lease.request_id}"
