"""The lease machine on the prefill engine, against its specification.

The random search compares it, after every event, with a naive model that only counts: which engines hold the lease, how
many ranks they have, who has released, and the latest deadline. What matters most is that the blocks are freed exactly
once, and never before every holder has released them or the deadline has passed.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from statemachine.kernel import Effect, Event, ProtocolError
from statemachine.lease import (
    MACHINE,
    DeadlinePassed,
    FreeBlocks,
    Granted,
    Held,
    Lease,
    LeaseName,
    ReaderDone,
    Renewed,
    StartLeaseTimer,
    State,
    Superseded,
    Withdrawn,
    holders_in_words,
)

NEW = Lease(name=LeaseName("cmpl-1", 1))
GRANTED = Granted(deadline_ns=100, latest_ns=1000)
DONE, EXPIRED = FreeBlocks(expired=False), FreeBlocks(expired=True)


def hold(engine_id: str = "d", ranks: int = 1, deadline_ns: int = 100, rank: int = 0, incarnation: str = "a") -> Held:
    return Held(engine_id=engine_id, rank=rank, ranks=ranks, deadline_ns=deadline_ns, incarnation=incarnation)


def release(rank: int | str = 0, ranks: int = 1, engine_id: str = "d", incarnation: str = "a") -> ReaderDone:
    return ReaderDone(engine_id=engine_id, rank=rank, ranks=ranks, incarnation=incarnation)


def run(lease: Lease, *events: Event) -> tuple[Lease, list[Effect]]:
    """Feed `events`; all effects in order."""
    effects: list[Effect] = []
    for event in events:
        lease, more = MACHINE.step(lease, event)
        effects += more
    return lease, effects


HELD = run(NEW, GRANTED)[0]


# --- the end by readers -----------------------------------------------------------------------------------------------


def test_a_grant_keeps_the_blocks_until_the_deadline() -> None:
    lease, effects = run(NEW, GRANTED)
    assert (lease.state, lease.deadline_ns, lease.latest_ns) == (State.HELD, 100, 1000)
    assert effects == [StartLeaseTimer(deadline_ns=100)]


def test_the_only_reader_ends_it_whether_or_not_it_has_held_it_before() -> None:
    assert run(HELD, release())[1] == [DONE]
    lease, effects = run(HELD, hold(), release())
    assert (lease.state, effects) == (State.DONE, [DONE])


def test_the_last_rank_of_the_last_engine_ends_it() -> None:
    lease, effects = run(HELD, hold("d", 2), hold("e", 1), release(0, 2), release(0, 1, "e"))
    assert (lease.state, effects) == (State.HELD, [])
    lease, effects = run(lease, release(1, 2))
    assert (lease.state, effects) == (State.DONE, [DONE])


def test_an_engine_that_holds_keeps_the_blocks_although_another_has_released_them() -> None:
    """Two engines are given the same parameters: parallel samples under vLLM's balancer."""
    lease, effects = run(HELD, hold("first"), hold("second"), release(engine_id="first"))
    assert (lease.state, effects) == (State.HELD, [])


def test_an_engine_that_comes_after_the_end_changes_nothing() -> None:
    ended, _ = run(HELD, hold("first"), release(engine_id="first"))
    assert run(ended, hold("second", deadline_ns=900)) == (ended, [])


def test_a_rank_counts_once_however_often_it_says_so() -> None:
    lease, effects = run(HELD, *[release(0, 2)] * 5)
    assert (lease.state, effects) == (State.HELD, [])


def test_a_rank_that_holds_again_after_its_release_wants_the_blocks_again() -> None:
    """It has forgotten that it had them, and is told that they are held while another rank reads."""
    lease, effects = run(HELD, release(0, 2), hold("d", 2, rank=0), release(1, 2))
    assert (lease.state, effects) == (State.HELD, [])
    assert lease.holders[0].released == {1}
    assert run(lease, release(0, 2))[1] == [DONE]


@pytest.mark.parametrize("another", ["b", ""])
def test_another_process_under_the_same_engine_id_does_not_release_what_was_promised_to_this_one(another: str) -> None:
    """Two engines were started with one id, an engine was started again, or a stranger knows an id: whoever was told
    that the blocks are kept may prove a READ by it, whatever another one says."""
    lease, effects = run(HELD, hold(incarnation="a"), hold(incarnation=another), release(incarnation=another))
    assert (lease.state, effects) == (State.HELD, [])
    lease, effects = run(lease, *[release(incarnation=another)] * 3)
    assert (lease.state, effects) == (State.HELD, [])
    assert run(lease, release(incarnation="a"))[1] == [DONE]


def test_another_process_may_release_what_nobody_was_promised() -> None:
    """As after a restart of D, whose earlier process never asked."""
    assert run(HELD, release(incarnation="b"))[1] == [DONE]


def test_what_a_process_that_has_ended_was_promised_ends_with_the_lease() -> None:
    lease, effects = run(
        HELD, hold(incarnation="a"), hold(incarnation="b"), release(incarnation="b"), DeadlinePassed(now_ns=100)
    )
    assert (lease.state, effects) == (State.EXPIRED, [EXPIRED])
    assert holders_in_words(lease) == "held by d (1 of 1 ranks are done, and not 1 other process(es) of that id)"


def test_ranks_that_disagree_about_their_number_are_resolved_to_the_largest() -> None:
    lease, effects = run(HELD, hold("d", 3, rank=0), release(0, 1), release(1, 2))
    assert (lease.state, effects) == (State.HELD, [])
    assert run(lease, release(2, 1))[1] == [DONE]
    lease, effects = run(HELD, hold("d", 1), hold("d", 2), release(0, 1))
    assert (lease.state, effects) == (State.HELD, [])


def test_readers_that_overtake_the_grant_are_remembered() -> None:
    lease, effects = run(NEW, hold("d", 2), release(0, 2), release(0, 1, "e"))
    assert (lease.state, effects) == (State.COMPUTING, [])
    lease, effects = run(lease, GRANTED)
    assert (lease.state, effects) == (State.HELD, [StartLeaseTimer(deadline_ns=100)])
    assert run(lease, release(1, 2))[1] == [DONE]


def test_when_everybody_overtakes_the_grant_it_is_done_with_it() -> None:
    lease, effects = run(NEW, release(0, 2), release(1, 2), GRANTED)
    assert (lease.state, effects) == (State.DONE, [DONE])


# --- the end by time --------------------------------------------------------------------------------------------------


def test_the_deadline_frees_the_blocks() -> None:
    lease, effects = run(HELD, DeadlinePassed(now_ns=100))
    assert (lease.state, effects) == (State.EXPIRED, [EXPIRED])


@pytest.mark.parametrize("renewal", [hold(deadline_ns=300), Renewed(deadline_ns=300)])
def test_a_renewal_moves_the_deadline_and_the_timer_follows_when_it_fires(renewal: Event) -> None:
    lease, effects = run(HELD, renewal)
    assert (lease.deadline_ns, effects) == (300, [])
    assert run(lease, DeadlinePassed(now_ns=100)) == (lease, [StartLeaseTimer(deadline_ns=300)])
    assert run(lease, DeadlinePassed(now_ns=299))[0] == lease
    assert run(lease, DeadlinePassed(now_ns=300))[1] == [EXPIRED]


@pytest.mark.parametrize("deadline_ns", [0, 99, 100])
@pytest.mark.parametrize("kind", [hold, Renewed])
def test_no_renewal_moves_the_deadline_earlier(kind: type[Renewed], deadline_ns: int) -> None:
    assert run(HELD, kind(deadline_ns=deadline_ns))[0].deadline_ns == 100


@pytest.mark.parametrize("kind", [hold, Renewed])
def test_no_renewal_goes_beyond_the_total_bound(kind: type[Renewed]) -> None:
    lease, _ = run(HELD, kind(deadline_ns=5000))
    assert lease.deadline_ns == 1000
    assert run(lease, DeadlinePassed(now_ns=1000))[1] == [EXPIRED]


def test_what_a_hold_was_promised_before_the_grant_is_kept() -> None:
    """Also beyond the bound: nobody is told Held of what is freed earlier."""
    lease, effects = run(NEW, hold(deadline_ns=150), GRANTED)
    assert (lease.deadline_ns, effects) == (150, [StartLeaseTimer(deadline_ns=150)])
    lease, effects = run(NEW, hold(deadline_ns=1500), GRANTED)
    assert (lease.deadline_ns, effects) == (1500, [StartLeaseTimer(deadline_ns=1500)])
    assert lease.latest_ns == 1500


def test_a_heartbeat_before_the_grant_means_nothing() -> None:
    assert run(NEW, Renewed(deadline_ns=900), GRANTED) == run(NEW, GRANTED)


# --- the other ends ---------------------------------------------------------------------------------------------------


def test_a_request_that_ends_without_lending_frees_nothing() -> None:
    lease, effects = run(NEW, hold(), Withdrawn(), release(), GRANTED)
    assert (lease.state, effects) == (State.WITHDRAWN, [])


def test_an_abort_after_the_grant_takes_nothing_back() -> None:
    """Somebody may be reading: readers or the deadline end it."""
    assert run(HELD, Withdrawn()) == (HELD, [])


@pytest.mark.parametrize("before", [NEW, HELD])
def test_blocks_that_the_engine_has_freed_by_itself_are_not_freed_again(before: Lease) -> None:
    lease, effects = run(before, Superseded(), release(), DeadlinePassed(now_ns=100))
    assert (lease.state, effects) == (State.SUPERSEDED, [])


def test_nothing_is_due_before_the_grant() -> None:
    with pytest.raises(ProtocolError, match="set by the grant"):
        MACHINE.step(NEW, DeadlinePassed(now_ns=1))


def test_a_request_finishes_once() -> None:
    with pytest.raises(ProtocolError, match="finishes once"):
        MACHINE.step(HELD, GRANTED)


@pytest.mark.parametrize("end", [release(), DeadlinePassed(now_ns=100), Superseded()])
def test_what_comes_after_the_end_frees_nothing_again(end: Event) -> None:
    ended, _ = run(HELD, end)
    late = [release(7), hold("e"), Renewed(deadline_ns=900), DeadlinePassed(now_ns=900), Withdrawn(), GRANTED]
    assert run(ended, *late, Superseded()) == (ended, [])


# --- random histories -------------------------------------------------------------------------------------------------

_engines = st.sampled_from(["", "d", "e"])
_ranks = st.integers(1, 3)
_incarnations = st.sampled_from(["", "a", "b"])
_lease_ns = st.integers(1, 100)


class LeaseAgainstModel(RuleBasedStateMachine):
    """The model: who holds, who has released, who was promised the blocks, and until when."""

    @initialize()
    def start(self) -> None:
        self.lease = NEW
        self.now_ns = 0
        self.ranks: dict[str, int] = {}
        self.released: dict[str, set[int]] = {}
        self.told: set[tuple[str, int, str]] = set()
        self.granted = False
        self.promised_ns = 0
        self.latest_ns = 0
        self.ended_as: State | None = None
        self.timer_ns: int | None = None
        self.freed: list[bool] = []

    def feed(self, event: Event) -> None:
        before = self.lease
        self.lease, effects = MACHINE.step(before, event)
        for effect in effects:
            match effect:
                case FreeBlocks(expired=expired):
                    self.freed.append(expired)
                case StartLeaseTimer(deadline_ns=deadline_ns):
                    self.timer_ns = deadline_ns

    @property
    def is_open(self) -> bool:
        return self.ended_as is None

    def settle(self) -> None:
        is_read = all(len(self.released[engine]) >= ranks for engine, ranks in self.ranks.items())
        if self.granted and self.is_open and self.ranks and is_read and not self.told:
            self.ended_as = State.DONE

    def count(self, engine_id: str, ranks: int) -> None:
        self.ranks[engine_id] = max(ranks, self.ranks.get(engine_id, 0))
        self.released.setdefault(engine_id, set())

    def promise(self, deadline_ns: int) -> None:
        if self.granted:
            deadline_ns = min(deadline_ns, self.latest_ns)
        self.promised_ns = max(self.promised_ns, deadline_ns)

    @precondition(lambda self: not self.granted)
    @rule(lease_ns=_lease_ns, total_ns=st.integers(100, 150))
    def grant(self, lease_ns: int, total_ns: int) -> None:
        event = Granted(deadline_ns=self.now_ns + lease_ns, latest_ns=self.now_ns + total_ns)
        self.feed(event)
        if self.is_open:
            self.granted = True
            self.promised_ns = max(self.promised_ns, event.deadline_ns)
            self.latest_ns = max(self.promised_ns, event.latest_ns)
        self.settle()

    @rule(engine_id=_engines, rank=st.integers(0, 2), ranks=_ranks, incarnation=_incarnations, lease_ns=_lease_ns)
    def hold(self, engine_id: str, rank: int, ranks: int, incarnation: str, lease_ns: int) -> None:
        self.feed(hold(engine_id, ranks, self.now_ns + lease_ns, rank, incarnation))
        if self.is_open:
            self.count(engine_id, ranks)
            self.told.add((engine_id, rank, incarnation))
            self.released[engine_id].discard(rank)
            self.promise(self.now_ns + lease_ns)

    @rule(engine_id=_engines, rank=st.integers(0, 2), ranks=_ranks, incarnation=_incarnations)
    def release(self, engine_id: str, rank: int, ranks: int, incarnation: str) -> None:
        self.feed(release(rank, ranks, engine_id, incarnation))
        if self.is_open:
            self.count(engine_id, ranks)
            self.told.discard((engine_id, rank, incarnation))
            self.released[engine_id].add(rank)
        self.settle()

    @rule(lease_ns=_lease_ns)
    def renew(self, lease_ns: int) -> None:
        self.feed(Renewed(deadline_ns=self.now_ns + lease_ns))
        if self.granted and self.is_open:
            self.promise(self.now_ns + lease_ns)

    @rule(event=st.sampled_from([Withdrawn(), Superseded()]))
    def end_unlent(self, event: Event) -> None:
        self.feed(event)
        if self.is_open and not (self.granted and isinstance(event, Withdrawn)):
            self.ended_as = State.WITHDRAWN if isinstance(event, Withdrawn) else State.SUPERSEDED

    @rule(step_ns=st.integers(1, 60))
    def pass_time(self, step_ns: int) -> None:
        """The timer fires when it is due, and once."""
        self.now_ns += step_ns
        if self.timer_ns is not None and self.timer_ns <= self.now_ns:
            self.timer_ns = None
            self.feed(DeadlinePassed(now_ns=self.now_ns))
            if self.is_open and self.now_ns >= self.promised_ns:
                self.ended_as = State.EXPIRED

    @invariant()
    def it_is_where_the_model_is(self) -> None:
        expected = self.ended_as or (State.HELD if self.granted else State.COMPUTING)
        assert self.lease.state is expected

    @invariant()
    def freed_once_and_for_the_right_reason(self) -> None:
        lent = self.granted and self.ended_as in (State.DONE, State.EXPIRED)
        assert self.freed == ([self.ended_as is State.EXPIRED] if lent else [])

    @invariant()
    def the_promise_is_kept_and_watched(self) -> None:
        if self.is_open:
            assert self.lease.deadline_ns == self.promised_ns
        if self.lease.state is State.HELD:
            assert self.timer_ns is not None
            assert self.timer_ns <= self.lease.deadline_ns <= self.latest_ns

    def teardown(self) -> None:
        if hasattr(self, "lease") and self.lease.state is State.HELD:
            for _ in range(3):
                self.pass_time(200)
            assert MACHINE.is_terminal(self.lease)
            assert len(self.freed) == 1


TestLeaseAgainstModel = LeaseAgainstModel.TestCase
TestLeaseAgainstModel.settings = settings(max_examples=300, stateful_step_count=30, deadline=None)


@given(order=st.permutations([0, 1, 2, 0, 2]), grant_at=st.integers(0, 5))
@settings(deadline=None)
def test_the_order_of_releases_and_grant_does_not_matter(order: list[int], grant_at: int) -> None:
    events: list[Event] = [release(rank, 3) for rank in order]
    events.insert(grant_at, GRANTED)
    lease, effects = run(NEW, *events)
    assert lease.state is State.DONE
    assert [effect for effect in effects if isinstance(effect, FreeBlocks)] == [DONE]
