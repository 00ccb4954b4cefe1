"""The model checker finds nothing in the production cores, and finds what is wrong with broken ones.

A broken core is production's with one rule replaced: a handler of a machine, a method of a core, or a constant. One
that is not caught is a hole in the checker.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import pytest

from statemachine import departure, hold, lease, lending, peer, remote_engine, request
from statemachine.deadlines import Deadlines
from statemachine.failures import AbortedByClient
from statemachine.kernel import NO_EFFECTS, Effect, Effects, Event, Handler, Machine, Pair, to
from statemachine.lending import Lending
from statemachine.remote_engine import RemoteEngine, claims, messages
from statemachine.remote_engine.claims import Claims
from statemachine.remote_engine.connections import Connections
from statemachine.request import State
from tests.explore import PRODUCTS, Cores, Explored, Product, Violation, explore
from tests.explore.product import SLOW_NS, TICK_NS

ONE = Product(name="one request", deviations=2, restarts=True)
TWO = Product(name="two requests", requests=((0, 0), (0, 1)), restarts=True)
SHARED = Product(name="two requests, one lease", requests=((0, 0), (0, 0)), restarts=True)
SIBLINGS = Product(name="two engines, one lease", requests=((0, 0), (1, 0)), restarts=True)
TWO_OF_P = Product(name="two ranks of P", prefill_ranks=2)
TWO_OF_D = Product(name="two ranks of D", decode_ranks=2)
CHECKED = Product(name="one request that is checked", checks=True)
LEAVING = Product(name="P leaves", deviations=2, leaves=True)
BUILTIN = Product(name="built-in P", is_builtin=True, deviations=2)

# As little as is needed to find what takes many deviations.
LEAN = Product(name="one request, nothing around it", deviations=3, aborts=False, clocks=(TICK_NS,))
LEAN_SIBLINGS = msgspec.structs.replace(LEAN, requests=((0, 0), (1, 0)), deviations=2)
LEAN_SLOW = msgspec.structs.replace(LEAN, clocks=(SLOW_NS,), deviations=2)


# --- production -----------------------------------------------------------------------------------------------------


@functools.cache
def searched(product: Product) -> Explored:
    return explore(product)


SEARCHED = [msgspec.structs.replace(product, deviations=1) for product in PRODUCTS]
SEARCHED += [product for product in PRODUCTS if product.name == "one request under a supervisor"]
"""One deviation here, and two where a rank has everything around it; `python -m tests.explore` searches as many as the
product says."""


@pytest.mark.parametrize("product", SEARCHED, ids=lambda product: f"{product.name}, {product.deviations}")
def test_nothing_is_wrong_with_the_production_cores(product: Product) -> None:
    found = searched(product)
    assert found.states > 400
    assert found.ends > 10


def test_without_deviations_there_is_one_end() -> None:
    found = searched(msgspec.structs.replace(ONE, deviations=0))
    assert found.ends == 1
    assert found.states < 20


def test_the_search_takes_nearly_every_transition() -> None:
    """A new transition is taken, or it is explained here why not."""
    taken = frozenset().union(*(searched(product).taken for product in SEARCHED))
    every = {
        (machine.name, state.value, event.__name__)
        for machine in (request.MACHINE, peer.MACHINE, hold.MACHINE, lease.MACHINE)
        for state, event in machine.table
    }
    assert every - taken == {pair for pairs in NOT_TAKEN.values() for pair in pairs}


NOT_TAKEN: dict[str, set[tuple[str, str, str]]] = {
    "P does not use a request's id again, and lends everything that it computes": {
        ("lease", "computing", "Superseded"),
        ("lease", "held", "Superseded"),
        ("lease", "computing", "Withdrawn"),
    },
    "every request names blocks that P has": {("request", "pending_handshake", "ParamsRejected")},
    "it takes one deviation until a request is proving, and another one to end it": {
        ("request", "proving", "Aborted"),
        ("request", "proving", "DeadlinePassed"),
        ("request", "proving", "ShellFailed"),
    },
    "it takes two deviations until P is disconnecting slowly": {("peer", "disconnecting", "Retired")},
}


def test_the_search_sends_every_event() -> None:
    """A new event is sent, or it is explained here why not."""
    sent = frozenset().union(*(searched(product).events for product in SEARCHED))
    every = {
        each
        for module in (messages, lending)
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, Event) and each.__module__ == module.__name__
    }
    assert every - sent == set(NOT_SENT)


NOT_SENT: dict[type[Event], str] = {
    remote_engine.BlocksRejected: "every request names blocks that P has",
    remote_engine.Recall: "READs that hang, a retirement and a late request are too many deviations for a search; "
    "tests/unit/test_remote_engine.py, tests/actors/test_quiescence.py",
    lending.Withdrawn: "P lends everything that it computes: nobody has the parameters of anything else",
}


def test_a_search_is_repeated_exactly() -> None:
    first, second = explore(TWO), explore(TWO)
    assert (first.states, first.edges, first.taken) == (second.states, second.edges, second.taken)


# --- broken cores ---------------------------------------------------------------------------------------------------


class Patch:
    """Breaks machines and cores for one test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def handler(self, machine: Machine[Any, Any], pair: Pair, handler: Handler) -> None:
        assert pair in machine.table
        self._monkeypatch.setitem(machine.table, pair, to(handler, *machine.states))

    def attribute(self, owner: Any, name: str, value: object) -> None:
        self._monkeypatch.setattr(owner, name, value)


class Broken(NamedTuple):
    """One broken core: what is done to it, where it is searched, what is violated."""

    apply: Callable[[Patch], None]
    product: Product
    violated: str


def stay(value: Any, event: Event) -> tuple[Any, Effects]:
    return value, NO_EFFECTS


def without(handler: Handler, *unwanted: type[Effect]) -> Handler:
    def forgetful(value: Any, event: Event) -> tuple[Any, Effects]:
        value, effects = handler(value, event)
        return value, tuple(effect for effect in effects if not isinstance(effect, unwanted))

    return forgetful


def _end_now(ending: State, failure: Any) -> Handler:
    def end(value: request.Request, event: Event) -> tuple[request.Request, Effects]:
        ended = msgspec.structs.replace(value, state=ending, failure=failure, in_flight=frozenset())
        return ended, (request.Report(failure=failure),)

    return end


READING, DRAINING, PENDING, PROVING = State.READING, State.DRAINING, State.PENDING_HANDSHAKE, State.PROVING
ABORTED = AbortedByClient()


def done_without_proof(patch: Patch) -> None:
    """Scenario 1: a READ that completes is a READ of the right bytes."""
    complete = request.MACHINE.table[READING, request.ReadCompleted].handler
    patch.handler(
        request.MACHINE,
        (READING, request.ReadCompleted),
        lambda value, event: complete(value, msgspec.structs.replace(event, proven_until_ns=event.completed_ns)),
    )


def proof_without_drift(patch: Patch) -> None:
    """Scenario 77: two clocks are taken for one."""
    patch.attribute(claims, "DRIFT_DIVISOR", 10**9)


def proof_from_the_answer(patch: Patch) -> None:
    """What remains is counted from when the answer came, not from when it was asked for."""
    prove = Claims.prove

    def late(self: Claims, lease: Any, rank: int, sent_ns: int, remaining_ns: int, now_ns: int) -> Any:
        return prove(self, lease, rank, now_ns, remaining_ns, now_ns)

    patch.attribute(Claims, "prove", late)


def proof_of_an_earlier_life(patch: Patch) -> None:
    """A connection is made anew, and what was proven over the last one still counts."""
    patch.handler(hold.MACHINE, (hold.State.HELD, hold.Reconnected), stay)


def any_answer_is_a_proof(patch: Patch) -> None:
    """Whoever answers is believed to hold the blocks, even if it says that it does not."""
    answered = RemoteEngine._take_hold_answer

    def believe(self: RemoteEngine, event: Any, now_ns: int) -> None:
        held = (*event.held, *((name, 0) for name, _ in event.gone))
        answered(self, msgspec.structs.replace(event, held=held, gone=()), now_ns)

    patch.attribute(RemoteEngine, "_take_hold_answer", believe)


def report_before_drained(patch: Patch) -> None:
    """Scenario 3: a failure is reported when it is seen, while another READ goes on."""
    patch.handler(request.MACHINE, (READING, request.ReadFailed), _end_now(State.FAILED, ABORTED))


def abort_without_draining(patch: Patch) -> None:
    """Scenario 8: the destination is freed under a READ."""
    patch.handler(request.MACHINE, (READING, request.Aborted), _end_now(State.FAILED, ABORTED))


def quarantine_nothing(patch: Patch) -> None:
    """Scenario 5: the blocks of a READ that never ended go back to the pool."""
    patch.handler(request.MACHINE, (DRAINING, request.QuiesceTimeout), _end_now(State.FAILED, ABORTED))


def an_error_is_the_end(patch: Patch) -> None:
    """Scenario 70: a READ that failed is taken to write no more."""
    end_read = RemoteEngine._end_read
    patch.attribute(
        RemoteEngine,
        "_end_read",
        lambda self, event, now_ns: end_read(self, msgspec.structs.replace(event, is_quiescent=True), now_ns),
    )


def grace_skipped(patch: Patch) -> None:
    """What failed on a connection is taken to be over as soon as the connection is torn down."""
    end_tear_down = RemoteEngine._end_tear_down

    def hurry(self: RemoteEngine, number: int, now_ns: int) -> None:
        limits = self._limits
        self._limits = msgspec.structs.replace(limits, grace_ns=0)
        end_tear_down(self, number, now_ns)
        self._limits = limits

    patch.attribute(RemoteEngine, "_end_tear_down", hurry)


def quarantine_lifted_early(patch: Patch) -> None:
    """Scenario 5: the end of one READ lifts the quarantine of all."""
    quiesce = Connections.quiesce

    def early(self: Connections, request_id: str, read: int) -> bool:
        if request_id in self._quarantined:
            self._quarantined[request_id] = {read}
        return quiesce(self, request_id, read)

    patch.attribute(Connections, "quiesce", early)


def quarantine_never_lifted(patch: Patch) -> None:
    """The blocks of a quarantined request are lost for ever."""
    patch.attribute(RemoteEngine, "_quiesce_quarantined", lambda self, request_id, read: None)


def tear_down_with_open_reads(patch: Patch) -> None:
    """Scenario 14: the agent is removed under a READ."""
    patch.handler(
        peer.MACHINE,
        (peer.State.READY, peer.ConnectionSuspect),
        lambda value, event: (
            msgspec.structs.replace(value, state=peer.State.DISCONNECTING, failure=event.failure),
            (peer.TearDown(),),
        ),
    )


def quarantine_without_suspicion(patch: Patch) -> None:
    """Scenario 74: READs from one P never end, and request after request is sent there."""
    patch.attribute(RemoteEngine, "_suspect", lambda self, number, failure, now_ns: None)


def post_what_was_ordered(patch: Patch) -> None:
    """A READ that waited for its turn is posted on a connection that became suspect meanwhile."""

    def wants(self: RemoteEngine, request_id: str) -> bool:
        found = self._requests.get(request_id)
        return found is not None and found.state is READING

    patch.attribute(RemoteEngine, "wants", wants)


def wait_for_ever(patch: Patch) -> None:
    """Scenario 45: no deadline ends the wait for a READ."""
    patch.handler(request.MACHINE, (DRAINING, request.QuiesceTimeout), stay)
    patch.handler(peer.MACHINE, (peer.State.DRAINING, peer.QuiesceTimeout), stay)


def no_deadline(patch: Patch) -> None:
    """Scenario 45: a request waits for a handshake that never ends. That it may end after all bounds nothing."""
    set_timer = Deadlines.set

    def forget(self: Deadlines[Any], key: Any, at_ns: int) -> None:
        if key[0] != "deadline":
            set_timer(self, key, at_ns)

    patch.attribute(Deadlines, "set", forget)


def fail_without_report(patch: Patch) -> None:
    """Scenario 43: the handshake fails and nobody fails the request."""
    handler = request.MACHINE.table[PENDING, request.PeerFailed].handler
    patch.handler(request.MACHINE, (PENDING, request.PeerFailed), without(handler, request.Report))


def report_twice(patch: Patch) -> None:
    """Scenario 24: an abort is reported, and the end of the request is reported too."""
    handler = request.MACHINE.table[PENDING, request.Aborted].handler

    def twice(value: Any, event: Event) -> tuple[Any, Effects]:
        value, effects = handler(value, event)
        return value, (*effects, *effects)

    end = RemoteEngine._end_request

    def end_again(self: RemoteEngine, ended: request.Request, failure: Any, now_ns: int) -> None:
        self._requests.setdefault(ended.request_id, ended)
        end(self, ended, failure, now_ns)

    patch.handler(request.MACHINE, (PENDING, request.Aborted), twice)
    patch.attribute(RemoteEngine, "_end_request", end_again)


def leave_unanswered(patch: Patch) -> None:
    """Scenario 41: a request that comes when the peer is ready is parked and forgotten."""
    patch.attribute(RemoteEngine, "_offer", lambda self, request_id: None)


def back_off_for_ever(patch: Patch) -> None:
    """Scenario 76: a peer stays in back-off, and so does whoever wants it."""
    patch.handler(peer.MACHINE, (peer.State.BACKOFF, peer.BackoffElapsed), stay)


def release_before_the_last_user(patch: Patch) -> None:
    """The first of several requests with the same parameters gives the blocks back."""
    leave = Claims.leave

    def hurry(self: Claims, name: Any, request_id: str, now_ns: int) -> None:
        leave(self, name, request_id, now_ns)
        claim = self.get(name)
        if claim is not None and claim.users:
            self._outcome.effects.append(remote_engine.SendRelease(connection=1, rank=0, leases=(name,)))

    patch.attribute(Claims, "leave", hurry)


def release_before_the_first_user(patch: Patch) -> None:
    """A lease that is named first while P is connected is let go of before it has a user."""
    want = Claims.want

    def released(self: Claims, name: Any, *args: Any, **more: Any) -> Any:
        is_new = self.get(name) is None
        found = want(self, name, *args, **more)
        if is_new and found.holds:
            self._release_holds(found)
        return found

    patch.attribute(Claims, "want", released)


def never_renew(patch: Patch) -> None:
    """A lease is held once, and runs out under a request that waits in the queue."""
    prove = Claims.prove

    def once(self: Claims, lease: Any, rank: int, sent_ns: int, remaining_ns: int, now_ns: int) -> Any:
        claim = prove(self, lease, rank, sent_ns, remaining_ns, now_ns)
        self.dues.cancel((lease, rank))
        return claim

    patch.attribute(Claims, "prove", once)


def hold_when_started(patch: Patch) -> None:
    """Scenario of the queue: nothing is held before the request is scheduled."""
    patch.attribute(RemoteEngine, "_announce", lambda self, event, now_ns: None)


def held_after_the_end(patch: Patch) -> None:
    """P says Held of what it has freed."""
    hold_asked = Lending._hold

    def always(self: Lending, asked: Any, now_ns: int) -> None:
        hold_asked(self, asked, now_ns)
        answer = self._outcome.effects[-1]
        assert isinstance(answer, lending.AnswerHold)
        held = (*answer.held, *((name, self._limits.lease_ns) for name, _ in answer.gone))
        self._outcome.effects[-1] = msgspec.structs.replace(answer, held=held, gone=())

    patch.attribute(Lending, "_hold", always)


def held_at_the_end(patch: Patch) -> None:
    """P says Held of a lease at its bound, and frees it in the same moment."""

    def hold_asked(self: Lending, asked: Any, now_ns: int) -> None:
        held, gone = [], []
        deadline_ns = now_ns + self._limits.lease_ns
        for name in asked.leases:
            known, why = self._find(name)
            reader = lease.Reader(asked.rank, asked.incarnation)
            if known is None or self._leases[known].has_left(asked.engine_id, reader):
                gone.append((name, why or lending.RELEASED))
                continue
            self._step(
                known,
                lease.Held(
                    engine_id=asked.engine_id,
                    rank=asked.rank,
                    ranks=asked.ranks,
                    deadline_ns=deadline_ns,
                    incarnation=asked.incarnation,
                ),
            )
            held.append((name, max(0, self._leases[known].deadline_ns - now_ns)))
        self._outcome.effects.append(
            lending.AnswerHold(reply_to=asked.reply_to, sent_ns=asked.sent_ns, held=tuple(held), gone=tuple(gone))
        )

    patch.attribute(Lending, "_hold", hold_asked)


def deadline_moved_back(patch: Patch) -> None:
    """Scenario 62: the hold of a second engine brings the end closer for the first one."""
    handler = lease.MACHINE.table[lease.State.HELD, lease.Held].handler

    def shorten(value: lease.Lease, event: lease.Held) -> tuple[lease.Lease, Effects]:
        after, effects = handler(value, event)
        if len(after.holders) == len(value.holders):
            return after, effects
        deadline_ns = event.deadline_ns - (60 if value.holders else 0)
        after = msgspec.structs.replace(after, deadline_ns=deadline_ns)
        return after, (lease.StartLeaseTimer(deadline_ns=deadline_ns),)

    patch.handler(lease.MACHINE, (lease.State.HELD, lease.Held), shorten)


def renewals_forgotten(patch: Patch) -> None:
    """The timer of the grant ends a lease that was renewed since."""
    patch.handler(
        lease.MACHINE,
        (lease.State.HELD, lease.DeadlinePassed),
        lambda value, event: (
            msgspec.structs.replace(value, state=lease.State.EXPIRED),
            (lease.FreeBlocks(expired=True),),
        ),
    )


def first_release_frees(patch: Patch) -> None:
    """Scenario 69: the first of two decode engines ends the lease of both."""
    patch.attribute(lease, "_is_read", lambda value: any(holder.is_complete for holder in value.holders))


def first_rank_releases_for_all(patch: Patch) -> None:
    """The first rank of a decode engine ends the lease of all its ranks."""
    patch.attribute(lease.Holder, "is_complete", property(lambda self: bool(self.released)))


def repeats_are_counted(patch: Patch) -> None:
    """Scenario 19: a rank that releases twice releases for all."""
    with_reader = lease._with_reader

    def count(value: lease.Lease, event: lease.Held | lease.ReaderDone) -> lease.Lease:
        after = with_reader(value, event)
        repeated = any(event.rank in holder.released for holder in value.holders)
        for reader in [each for holder in after.holders for each in holder.promised]:
            if isinstance(event, lease.ReaderDone) and repeated:
                after = with_reader(
                    after, msgspec.structs.replace(event, rank=reader.rank, incarnation=reader.incarnation)
                )
        return after

    patch.attribute(lease, "_with_reader", count)


def never_expire(patch: Patch) -> None:
    """Scenario 54: blocks whose reader is gone are kept for ever."""
    patch.handler(lease.MACHINE, (lease.State.HELD, lease.DeadlinePassed), stay)


def free_and_stay_held(patch: Patch) -> None:
    """A lease that was released expires once more."""
    patch.handler(
        lease.MACHINE,
        (lease.State.HELD, lease.ReaderDone),
        lambda value, event: (value, (lease.FreeBlocks(expired=False),)),
    )


def free_in_silence(patch: Patch) -> None:
    """The lease ends, and the engine is not told that it may free the blocks."""
    handler = lease.MACHINE.table[lease.State.HELD, lease.ReaderDone].handler
    patch.handler(lease.MACHINE, (lease.State.HELD, lease.ReaderDone), without(handler, lease.FreeBlocks))


def assume_for_ever(patch: Patch) -> None:
    """A built-in P is taken to keep the blocks for as long as anybody wants them."""
    handler = hold.MACHINE.table[hold.State.WANTED, hold.Assumed].handler
    patch.handler(
        hold.MACHINE,
        (hold.State.WANTED, hold.Assumed),
        lambda value, event: handler(value, msgspec.structs.replace(event, until_ns=event.until_ns + 10**6)),
    )
    patch.attribute(Claims, "lose_everywhere", lambda self, lease, why: self.get(lease))


def deviations(product: Product, number: int) -> Product:
    return msgspec.structs.replace(product, deviations=number)


def leave_at_once(patch: Patch) -> None:
    """P is told to end, and gives up what it lends in the same moment."""
    leave = Lending._leave

    def hastily(self: Lending, now_ns: int, grace_ns: int) -> None:
        leave(self, now_ns, grace_ns)
        for name in list(self._leases):
            self._step(name, lease.DeadlinePassed(now_ns=self._leases[name].deadline_ns))

    patch.attribute(Lending, "_leave", hastily)


def promise_beyond_the_end(patch: Patch) -> None:
    """P, which is to end, promises as if it stayed."""
    patch.attribute(Lending, "_bounded", lambda self, deadline_ns: deadline_ns)


def leaving_is_the_end(patch: Patch) -> None:
    """D takes the word for the end: what could be read till then fails."""
    say = departure.MACHINE.table[departure.State.STAYS, departure.LeavingAnnounced].handler
    patch.handler(
        departure.MACHINE,
        (departure.State.STAYS, departure.LeavingAnnounced),
        lambda value, event: (say(value, event)[0], (departure.LoseEverything(),)),
    )


def the_end_is_a_loss(patch: Patch) -> None:
    """D has been told, and takes the end for a connection that may come back."""
    for event in (departure.ConnectionEnded, departure.AttemptFailed):
        patch.handler(departure.MACHINE, (departure.State.LEAVING, event), stay)


def owe_to_who_has_left(patch: Patch) -> None:
    """D has been told, fails what waits, and goes on saying its releases."""
    patch.attribute(RemoteEngine, "_has_something_to_say", property(lambda self: bool(self._claims)))


def done_unchecked(patch: Patch) -> None:
    """A READ that completes is a READ of the right bytes, whatever its check finds."""
    complete = request.MACHINE.table[READING, request.ReadCompleted].handler
    patch.handler(
        request.MACHINE,
        (READING, request.ReadCompleted),
        lambda value, event: complete(msgspec.structs.replace(value, unchecked=frozenset()), event),
    )


def drain_checks(patch: Patch) -> None:
    """What is being checked is taken to be in flight, and its blocks are quarantined for good."""
    abort = request.MACHINE.table[READING, request.Aborted].handler
    patch.handler(
        request.MACHINE,
        (READING, request.Aborted),
        lambda value, event: abort(msgspec.structs.replace(value, in_flight=value.awaited), event),
    )


def wait_for_a_check(patch: Patch) -> None:
    """Neither the deadline nor the end of the lease ends the wait for a check."""

    def unless_it_is_checked(handler: Handler) -> Handler:
        return lambda value, event: handler(value, event) if value.in_flight else stay(value, event)

    for event in (request.DeadlinePassed, request.LeaseGone):
        pair = READING, event
        patch.handler(request.MACHINE, pair, unless_it_is_checked(request.MACHINE.table[pair].handler))


BROKEN = [
    Broken(done_unchecked, CHECKED, "invariant 3"),
    Broken(drain_checks, deviations(CHECKED, 2), "liveness"),
    Broken(wait_for_a_check, CHECKED, "liveness"),
    Broken(leave_at_once, LEAVING, "invariant 5"),
    Broken(promise_beyond_the_end, LEAVING, "invariant 5"),
    Broken(leaving_is_the_end, LEAVING, "invariant 9"),
    Broken(the_end_is_a_loss, LEAVING, "invariant 10"),
    Broken(owe_to_who_has_left, LEAVING, "invariant 10"),
    Broken(done_without_proof, ONE, "invariant 3"),
    Broken(proof_without_drift, LEAN_SLOW, "invariant 3"),
    Broken(proof_from_the_answer, LEAN, "invariant 3"),
    Broken(proof_of_an_earlier_life, ONE, "invariant 3"),
    Broken(any_answer_is_a_proof, ONE, "invariant 3"),
    Broken(report_before_drained, TWO_OF_P, "invariant 1"),
    Broken(abort_without_draining, ONE, "invariant 1"),
    Broken(quarantine_nothing, ONE, "invariant 1"),
    Broken(an_error_is_the_end, ONE, "invariant 1"),
    Broken(grace_skipped, ONE, "invariant 1"),
    Broken(quarantine_lifted_early, deviations(TWO_OF_P, 2), "invariant 1"),
    Broken(quarantine_never_lifted, deviations(LEAN, 2), "liveness"),
    Broken(tear_down_with_open_reads, ONE, "invariant 6"),
    Broken(quarantine_without_suspicion, TWO, "invariant 7"),
    Broken(post_what_was_ordered, ONE, "invariant 7"),
    Broken(wait_for_ever, ONE, "liveness"),
    Broken(no_deadline, ONE, "liveness"),
    Broken(fail_without_report, ONE, "liveness"),
    Broken(report_twice, ONE, "invariant 2"),
    Broken(leave_unanswered, ONE, "invariant 9"),
    Broken(back_off_for_ever, ONE, "liveness"),
    Broken(release_before_the_last_user, SHARED, "invariant 3"),
    Broken(release_before_the_first_user, TWO, "invariant 9"),
    Broken(never_renew, ONE, "invariant 9"),
    Broken(hold_when_started, ONE, "invariant 9"),
    Broken(held_after_the_end, ONE, "invariant 5"),
    Broken(held_at_the_end, ONE, "invariant 3"),
    Broken(deadline_moved_back, LEAN_SIBLINGS, "invariant 5"),
    Broken(renewals_forgotten, ONE, "invariant 5"),
    Broken(first_release_frees, SIBLINGS, "invariant 5"),
    Broken(first_rank_releases_for_all, TWO_OF_D, "invariant 5"),
    Broken(repeats_are_counted, TWO_OF_D, "invariant 5"),
    Broken(never_expire, ONE, "liveness"),
    Broken(free_and_stay_held, ONE, "invariant 5"),
    Broken(free_in_silence, ONE, "liveness"),
    Broken(assume_for_ever, BUILTIN, "invariant 3"),
]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.apply.__name__)
def test_a_broken_core_is_caught(broken: Broken, monkeypatch: pytest.MonkeyPatch) -> None:
    broken.apply(Patch(monkeypatch))
    with pytest.raises(Violation) as caught:
        explore_wider_and_wider(broken.product)
    assert broken.violated in caught.value.invariant
    assert caught.value.scenario


def explore_wider_and_wider(product: Product, cores: Cores | None = None) -> None:
    for number in range(product.deviations + 1):
        explore(deviations(product, number), cores)


def test_a_broken_core_may_be_a_class_of_its_own() -> None:
    class Forgetful(Lending):
        def _forget(self, name: Any, why: str) -> None:
            super()._forget(name, why)
            self._leases.clear()

    class Hasty(RemoteEngine):
        def wants(self, request_id: str) -> bool:
            return True

    explore(TWO)
    with pytest.raises(Violation):
        explore(TWO, Cores(lending=Forgetful))
    with pytest.raises(Violation, match="invariant 7"):
        explore(ONE, Cores(remote_engine=Hasty))


# --- clocks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clock", [SLOW_NS, TICK_NS + 1])
def test_a_proof_bears_clocks_that_drift_within_the_bound(clock: int) -> None:
    explore(msgspec.structs.replace(LEAN, clocks=(clock,), deviations=2))


def test_a_clock_that_drifts_beyond_the_bound_is_caught() -> None:
    """The bound is real: D's clock one step slower, and foreign KV is taken for proven."""
    with pytest.raises(Violation, match="invariant 3"):
        explore_wider_and_wider(msgspec.structs.replace(LEAN, clocks=(SLOW_NS - 1,), deviations=2))
