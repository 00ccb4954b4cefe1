"""The roster: who is admitted, who makes room, who is retired, where requests go, and what it costs to know many."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from statemachine import request
from statemachine.failures import BadParams, ConnectorStopped, QuarantineFull, RequestIdInQuarantine, TooManyPeers
from statemachine.kernel import Effect, Event
from statemachine.lease import LeaseName
from statemachine.quarantine import limit_of
from statemachine.roster import (
    AbortAsked,
    Admit,
    Asked,
    Connected,
    Connecting,
    Ended,
    HandOver,
    LetGo,
    MeetAsked,
    NoteNotMet,
    NoteQuarantine,
    PeerKey,
    QuarantineBegan,
    QuarantineEnded,
    Recall,
    Refuse,
    Rejected,
    RequestEnded,
    Retire,
    Roster,
    Stopped,
    TellUnread,
)
from tests.unit.properties import on_any_machine

IDLE_NS = 1000
LEASE = LeaseName("remote", 1)
STOPPED = ConnectorStopped(detail="it is shutting down")
BAD = BadParams(field="remote_port", expected="an integer", found="'x'")


def key(engine_id: str, tp_size: int = 1) -> PeerKey:
    return PeerKey(engine_id, tp_size, 1, 1)


@dataclass
class State:
    """What a member says when it is asked."""

    is_unused: bool = True
    is_connected: bool = False
    is_shaking_hands: bool = False
    may_be_recalled: bool = False


class Driver:
    """A roster, and members whose state a test sets. Carries out what it says: a member that is retired lives on
    until the test ends it."""

    def __init__(self, members_max: int = 100, quarantine_blocks_max: int = 100, idle_ns: int | None = IDLE_NS) -> None:
        self.members: dict[PeerKey, State] = {}
        self.questions = 0
        self.roster = Roster(
            members_max=members_max,
            idle_ns=idle_ns,
            quarantine_blocks_max=quarantine_blocks_max,
            member=self._member,
        )

    @property
    def open_requests(self) -> int:
        return len(self.roster._of_request)

    def _member(self, key: PeerKey) -> State:
        self.questions += 1
        return self.members[key]

    def ask(
        self,
        key: PeerKey,
        now_ns: int = 0,
        *,
        request_id: str = "r",
        place: str = "",
        is_awaited: bool = True,
    ) -> list[Effect]:
        asked = Asked(
            key=key,
            place=place or f"{key.engine_id}:1",
            request_id=request_id,
            lease=LEASE,
            is_awaited=is_awaited,
            message=request_id,
        )
        return self.tell(asked, now_ns)

    def meet(self, key: PeerKey, now_ns: int, place: str = "") -> list[Effect]:
        return self.tell(MeetAsked(key=key, place=place or f"{key.engine_id}:1", message="meet"), now_ns)

    def tell(self, event: Event, now_ns: int = 0) -> list[Effect]:
        if isinstance(event, Ended):
            del self.members[event.key]
        effects = self.roster.handle(event, now_ns)
        for effect in effects:
            if isinstance(effect, Admit):
                assert effect.key not in self.members
                self.members[effect.key] = State()
        return effects

    def connect(self, key: PeerKey, place: str = "") -> list[Effect]:
        self.members[key].is_connected = True
        self.tell(Connecting(key=key, place=place or f"{key.engine_id}:1"))
        return self.tell(Connected(key=key))


def retired(effects: list[Effect]) -> list[str]:
    return [effect.key.engine_id for effect in effects if isinstance(effect, Retire)]


A, B, C, D = key("a"), key("b"), key("c"), key("d")


# --- who is admitted ------------------------------------------------------------------------------------------------


def test_who_is_asked_for_is_admitted_once_and_gets_every_message() -> None:
    drive = Driver()
    assert drive.ask(A, request_id="1") == [Admit(key=A, message="1"), HandOver(key=A, message="1")]
    assert drive.ask(A, request_id="2") == [HandOver(key=A, message="2")]
    assert len(drive.roster) == 1


def test_who_says_other_sizes_gets_another_member() -> None:
    drive = Driver()
    drive.ask(key("a", 1))
    assert drive.ask(key("a", 2))[0] == Admit(key=key("a", 2), message="r")


def test_a_newcomer_is_refused_when_all_are_in_use() -> None:
    drive = Driver(members_max=2)
    for each in (A, B):
        drive.ask(each)
        drive.members[each].is_unused = False
    (refused,) = drive.ask(C, request_id="late", place="host:9")
    assert isinstance(refused, Refuse)
    failure = TooManyPeers(peer="c", address="host:9", limit=2)
    assert refused.message == "late"
    assert refused.event == request.PeerFailed(failure=failure)
    assert (refused.fresh.state, refused.fresh.peer, refused.fresh.lease) == (request.MACHINE.initial, "c", LEASE)
    assert (refused.ended.state, refused.ended.failure) == (request.State.FAILED, failure)
    assert drive.ask(A, request_id="known") == [HandOver(key=A, message="known")]
    assert drive.ask(C, is_awaited=False) == [], "nobody waits for a report"


def test_a_request_whose_parameters_make_no_sense_is_refused_with_them() -> None:
    (refused,) = Driver().tell(Rejected(request_id="r", failure=BAD, message="m"))
    assert isinstance(refused, Refuse)
    assert (refused.message, refused.ended.request_id, refused.ended.failure) == ("m", "r", BAD)
    assert (refused.fresh.peer, refused.fresh.lease.request_id) == ("", "")
    (refused,) = Driver().tell(Rejected(request_id="r", failure=BAD, message="m", lease=LEASE, peer="p"))
    assert isinstance(refused, Refuse)
    assert (refused.fresh.peer, refused.fresh.lease) == ("p", LEASE)


def test_after_the_stop_only_who_is_known_gets_messages() -> None:
    drive = Driver()
    drive.ask(A)
    drive.tell(Stopped(failure=STOPPED))
    drive.tell(Stopped(failure=ConnectorStopped(detail="and again")))
    assert drive.ask(A, is_awaited=False) == [HandOver(key=A, message="r")]
    assert drive.meet(A, 0) == [HandOver(key=A, message="meet")]
    assert drive.meet(B, 0) == []
    for each in (A, B):
        (refused,) = drive.ask(each)
        assert isinstance(refused, Refuse)
        assert refused.ended.failure == STOPPED
    drive.tell(Ended(key=A))
    assert isinstance(drive.ask(A)[0], Refuse)
    assert drive.ask(A, is_awaited=False) == []


# --- who makes room -------------------------------------------------------------------------------------------------


def test_the_unused_member_that_was_asked_for_longest_ago_makes_room() -> None:
    drive = Driver(members_max=3)
    for at_ns, each in enumerate((A, B, C)):
        drive.ask(each, at_ns)
    drive.ask(A, 10)
    assert drive.ask(D, 20) == [Retire(key=B), Admit(key=D, message="r"), HandOver(key=D, message="r")]


def test_one_that_is_in_use_never_makes_room() -> None:
    drive = Driver(members_max=2)
    drive.ask(A, 0)
    drive.ask(B, 1)
    drive.members[A].is_unused = False
    assert retired(drive.ask(C, 2)) == ["b"]


def test_one_that_is_connected_makes_room_only_when_no_other_can() -> None:
    drive = Driver(members_max=2)
    drive.ask(A, 0)
    drive.ask(B, 1)
    drive.connect(A)
    assert retired(drive.ask(C, 2)) == ["b"]
    drive.members[C].is_unused = False
    assert retired(drive.ask(D, 3)) == ["a"]


def test_none_that_is_connected_makes_room_for_one_that_is_only_to_be_met() -> None:
    drive = Driver(members_max=2)
    drive.ask(A, 0)
    drive.ask(B, 1)
    drive.connect(A)
    assert retired(drive.meet(C, 2)) == ["b"]
    drive.connect(C)
    crowded = TooManyPeers(peer="d", address="d:1", limit=2)
    assert drive.meet(D, 3) == [NoteNotMet(key=D, failure=crowded)]
    assert retired(drive.ask(D, 4, is_awaited=False)) == ["a"], "a request in the queue needs it"


def test_nor_does_one_that_is_just_being_connected() -> None:
    """Two that are to be met, and one place: where a handshake takes longer than the pause of the other one, neither
    would ever be met."""
    drive = Driver(members_max=1)
    drive.meet(A, 0)
    drive.members[A].is_shaking_hands = True
    assert drive.meet(B, 1) == [NoteNotMet(key=B, failure=TooManyPeers(peer="b", address="b:1", limit=1))]
    drive.members[A].is_shaking_hands = False
    assert retired(drive.meet(B, 2)) == ["a"], "its handshake has failed"
    drive.members[B].is_shaking_hands = True
    assert retired(drive.ask(C, 3)) == ["b"], "a request needs it"


def test_one_place_is_given_away_once() -> None:
    """Who was retired has made room, and does so no second time, however long it stays."""
    drive = Driver(members_max=1)
    drive.ask(A)
    assert retired(drive.ask(B)) == ["a"]
    drive.members[B].is_unused = False
    assert isinstance(drive.ask(C)[0], Refuse)
    drive.tell(Ended(key=A))
    assert isinstance(drive.ask(C)[0], Refuse)
    drive.tell(Ended(key=B))
    assert isinstance(drive.ask(C)[0], Admit)


def test_who_was_retired_still_gets_what_is_asked_of_it_until_it_has_ended() -> None:
    drive = Driver(members_max=1)
    drive.ask(A)
    drive.ask(B)
    assert drive.ask(A) == [HandOver(key=A, message="r")]
    drive.tell(Ended(key=A))
    drive.members[B].is_unused = True
    assert drive.ask(A) == [Retire(key=B), Admit(key=A, message="r"), HandOver(key=A, message="r")]


# --- who is retired ------------------------------------------------------------------------------------------------


def test_who_was_retired_and_would_not_end_is_recalled_and_needs_room() -> None:
    drive = Driver(members_max=1)
    drive.ask(A)
    assert retired(drive.ask(B)) == ["a"]
    drive.members[A].may_be_recalled = True
    drive.members[B].is_unused = False
    refused, told = drive.ask(A, place="elsewhere:1")
    assert isinstance(refused, Refuse)
    assert told == TellUnread(key=A, message="r"), "it holds the lease of a request that was announced to it"
    assert drive.ask(A, place="elsewhere:1", is_awaited=False) == [HandOver(key=A, message="r")], "it may have ended"
    drive.members[B].is_unused = True
    assert drive.ask(A, place="elsewhere:1") == [
        Retire(key=B),
        Recall(key=A, message="r"),
        HandOver(key=A, message="r"),
    ]
    view = drive.roster.view(A)
    assert view is not None
    assert (view.place, view.is_retired) == ("elsewhere:1", False)
    drive.members[A].may_be_recalled = False
    assert drive.ask(A) == [HandOver(key=A, message="r")]


def test_who_was_recalled_at_another_place_is_replaced_by_nobody_at_the_old_one() -> None:
    drive = Driver()
    drive.ask(A, place="old:1")
    drive.ask(B, place="old:1")
    assert drive.connect(B, "old:1") == [Retire(key=A)]
    drive.members[A].may_be_recalled = True
    assert drive.ask(A, place="new:1") == [Recall(key=A, message="r"), HandOver(key=A, message="r")]
    assert drive.connect(B, "old:1") == []
    for each in (A, B):
        drive.tell(Ended(key=each))
    assert drive.roster._at_place == {}


def test_other_engines_at_the_place_of_one_that_has_answered_are_retired() -> None:
    drive = Driver()
    for each in (A, B, C, key("a", 2)):
        drive.ask(each, place="host:1" if each != C else "host:2")
    drive.members[B].is_unused = False
    assert drive.connect(A, "host:1") == [Retire(key=B)], "used or not; the same engine by other sizes stays"
    assert drive.connect(A, "host:1") == [], "once"


def test_one_that_was_replaced_replaces_nobody_when_its_answer_comes_late() -> None:
    """Both were asked, and the answer of the first, which has ended since, was longer under way."""
    drive = Driver()
    for each in (A, B):
        drive.ask(each, place="host:1")
        drive.tell(Connecting(key=each, place="host:1"))
    assert drive.tell(Connected(key=B)) == [Retire(key=A)]
    assert drive.tell(Connected(key=A)) == []


def test_an_engine_that_is_looked_for_elsewhere_since_is_not_retired() -> None:
    drive = Driver()
    drive.ask(A, place="host:1")
    drive.ask(B, place="host:2")
    drive.tell(Connecting(key=A, place="host:2"))
    assert drive.tell(Connected(key=B)) == [Retire(key=A)]
    drive = Driver()
    drive.ask(A, place="host:1")
    drive.ask(B, place="host:1")
    drive.tell(Connecting(key=A, place="host:2"))
    assert drive.tell(Connected(key=B)) == []


def test_what_a_request_says_does_not_move_a_member() -> None:
    """Only where it was tried counts: what a client says may be wrong."""
    drive = Driver()
    drive.ask(A, place="host:1")
    drive.ask(A, place="host:2")
    drive.ask(B, place="host:2")
    assert drive.connect(B, "host:2") == []


def test_what_comes_late_of_a_member_that_has_ended_changes_nothing() -> None:
    drive = Driver()
    drive.ask(A, place="host:1")
    drive.ask(B, place="host:1")
    drive.tell(Ended(key=A))
    late = (Connecting(key=A, place="host:1"), Connected(key=A), RequestEnded(request_id="r"))
    assert [drive.tell(event) for event in late] == [[], [], []]
    assert drive.roster.handle(Ended(key=A), 0) == []
    assert drive.connect(B, "host:1") == []


# --- who is idle ----------------------------------------------------------------------------------------------------


def test_without_a_time_to_live_members_are_kept_for_ever() -> None:
    drive = Driver(idle_ns=None)
    drive.ask(A, 0)
    assert drive.roster.next_deadline() is None
    assert drive.roster.advance(10**30) == []


def test_a_member_that_nobody_asks_for_is_retired() -> None:
    drive = Driver()
    drive.ask(A, 0)
    drive.ask(B, 0)
    drive.ask(B, 300)
    assert drive.roster.next_deadline() == IDLE_NS
    assert drive.roster.advance(IDLE_NS - 1) == []
    assert drive.roster.advance(IDLE_NS) == [Retire(key=A)]
    assert drive.roster.next_deadline() == 300 + IDLE_NS
    assert drive.roster.advance(300 + IDLE_NS) == [Retire(key=B)]
    assert drive.roster.next_deadline() is None


@pytest.mark.parametrize("busy", [State(is_connected=True), State(is_unused=False)])
def test_a_connection_or_a_request_keeps_a_member(busy: State) -> None:
    drive = Driver()
    drive.ask(A, 0)
    drive.members[A] = busy
    for now_ns in range(IDLE_NS, 9 * IDLE_NS, IDLE_NS):
        assert drive.roster.next_deadline() == now_ns
        assert drive.roster.advance(now_ns) == []
    drive.members[A] = State()
    assert drive.roster.advance(9 * IDLE_NS) == [Retire(key=A)]


def test_nothing_is_due_for_who_has_ended_or_was_retired() -> None:
    drive = Driver(members_max=1)
    drive.ask(A, 0)
    drive.ask(B, 0)
    drive.tell(Ended(key=B))
    assert drive.roster.next_deadline() is None
    assert drive.roster.advance(IDLE_NS) == []


# --- where a request goes -------------------------------------------------------------------------------------------


def test_an_abort_goes_where_its_request_went_until_that_has_ended() -> None:
    drive = Driver()
    drive.ask(A, request_id="1")
    drive.ask(key("a", 2), request_id="2")
    drive.ask(A, request_id="tracked", is_awaited=False)
    abort = AbortAsked(request_id="2", message="abort")
    assert drive.tell(abort) == [HandOver(key=key("a", 2), message="abort")]
    assert drive.open_requests == 2
    drive.tell(RequestEnded(request_id="2"))
    assert drive.tell(abort) == []
    assert drive.tell(AbortAsked(request_id="tracked", message="abort")) == []
    drive.tell(Ended(key=A))
    assert drive.tell(AbortAsked(request_id="1", message="abort")) == []


def test_that_a_lease_is_wanted_no_more_is_told_to_who_keeps_it_and_brings_nobody() -> None:
    drive = Driver()
    let_go = LetGo(key=A, message="let go")
    assert drive.tell(let_go) == []
    drive.ask(A)
    assert drive.tell(let_go) == [HandOver(key=A, message="let go")]
    drive.tell(Ended(key=A))
    assert drive.tell(let_go) == []
    assert len(drive.roster) == 0


def test_a_request_that_is_refused_belongs_to_nobody() -> None:
    drive = Driver()
    drive.tell(Stopped(failure=STOPPED))
    drive.ask(A, request_id="1")
    assert drive.open_requests == 0


def test_a_request_that_is_refused_when_its_member_has_ended_without_hearing_of_it_belongs_to_nobody() -> None:
    drive = Driver()
    drive.ask(A, request_id="1")
    drive.tell(Ended(key=A))
    drive.tell(Stopped(failure=STOPPED))
    (refused,) = drive.ask(A, request_id="1")
    assert isinstance(refused, Refuse)
    assert drive.open_requests == 0


def test_what_is_not_an_event_of_it_is_refused() -> None:
    with pytest.raises(TypeError):
        Driver().tell(request.Aborted())


# --- the quarantine -------------------------------------------------------------------------------------------------


def quarantine(drive: Driver, request_id: str, blocks: int, key: PeerKey = A) -> list[Effect]:
    return drive.tell(QuarantineBegan(key=key, request_id=request_id, blocks=blocks))


def lift(drive: Driver, request_id: str, key: PeerKey = A) -> list[Effect]:
    return drive.tell(QuarantineEnded(key=key, request_id=request_id))


def full() -> Driver:
    """A and B are known; six blocks are in quarantine, because of both, and no more than five may be."""
    drive = Driver(quarantine_blocks_max=5)
    for each in (A, B):
        drive.ask(each, request_id="queued", is_awaited=False)
    assert quarantine(drive, "1", 4) == []
    assert drive.ask(A, request_id="2") == [HandOver(key=A, message="2")]
    assert quarantine(drive, "2", 2, B) == [NoteQuarantine(is_full=True, blocks=6, limit_blocks=5)]
    return drive


def test_while_too_many_blocks_are_in_quarantine_nothing_new_is_read_from_anybody() -> None:
    drive = full()
    failure = QuarantineFull(blocks=6, limit=5)
    for each in (A, B):
        refused, told = drive.ask(each, request_id="late")
        assert isinstance(refused, Refuse)
        assert refused.message == "late"
        assert (refused.ended.state, refused.ended.failure) == (request.State.FAILED, failure)
        assert told == TellUnread(key=each, message="late"), "it has held the lease since the request was announced"
    (refused,) = drive.ask(C)
    assert isinstance(refused, Refuse)
    assert refused.ended.failure == failure
    assert drive.open_requests == 1, "the one from before it was full"
    assert drive.tell(AbortAsked(request_id="late", message="gone")) == [], "it has ended"


def test_an_id_whose_blocks_are_in_quarantine_is_not_used_again_at_the_same_engine() -> None:
    drive = Driver(quarantine_blocks_max=50)
    for each in (A, B):
        drive.ask(each, request_id="queued", is_awaited=False)
    quarantine(drive, "1", 4)
    refused, told = drive.ask(A, request_id="1")
    assert isinstance(refused, Refuse)
    assert refused.ended.failure == RequestIdInQuarantine(blocks=4)
    assert told == TellUnread(key=A, message="1")
    assert drive.ask(A, request_id="1", is_awaited=False) == [HandOver(key=A, message="1")], "it may wait for its turn"
    assert drive.ask(B, request_id="1") == [HandOver(key=B, message="1")], "its blocks are told apart there"
    drive.tell(RequestEnded(request_id="1"))
    lift(drive, "1")
    assert drive.ask(A, request_id="1") == [HandOver(key=A, message="1")]
    assert drive.open_requests == 1


def test_the_limit_is_noted_once_and_so_is_its_end() -> None:
    drive = full()
    assert quarantine(drive, "3", 7) == []
    assert lift(drive, "3") == []
    assert lift(drive, "2", B) == [NoteQuarantine(is_full=False, blocks=4, limit_blocks=5)]
    assert drive.ask(A, request_id="served") == [HandOver(key=A, message="served")]
    assert lift(drive, "1") == []
    assert drive.roster.quarantined_blocks == 0


def test_exactly_as_many_as_are_allowed_are_too_many_for_one_more() -> None:
    drive = Driver(quarantine_blocks_max=5)
    assert quarantine(drive, "1", 4) == []
    assert quarantine(drive, "2", 1) == [NoteQuarantine(is_full=True, blocks=5, limit_blocks=5)]


def test_a_quarantine_that_is_told_twice_counts_once() -> None:
    drive = Driver(quarantine_blocks_max=5)
    quarantine(drive, "1", 3)
    quarantine(drive, "1", 3)
    assert drive.roster.quarantined_blocks == 3
    lift(drive, "1")
    lift(drive, "1")
    assert drive.roster.quarantined_blocks == 0


def test_who_waits_in_the_queue_or_needs_nothing_is_not_refused() -> None:
    """There may be room when its turn comes; and what needs nothing costs no block."""
    drive = full()
    assert drive.ask(A, request_id="later", is_awaited=False) == [HandOver(key=A, message="later")]
    assert drive.ask(C, is_awaited=False) == [Admit(key=C, message="r"), HandOver(key=C, message="r")]


def test_a_connector_that_stops_says_so_and_not_that_its_quarantine_is_full() -> None:
    drive = full()
    drive.tell(Stopped(failure=STOPPED))
    for each in (A, C):
        (refused,) = drive.ask(each)
        assert isinstance(refused, Refuse)
        assert refused.ended.failure == STOPPED


def test_a_share_of_few_blocks_is_one_at_least() -> None:
    assert [limit_of(0.5, blocks) for blocks in (1, 2, 3, 1000)] == [1, 1, 1, 500]
    assert limit_of(1.0, 7) == 7


# --- what it costs --------------------------------------------------------------------------------------------------


def known(members: int) -> Driver:
    drive = Driver(members_max=members + 1)
    for number in range(members):
        drive.ask(key(f"e{number}"))
        drive.members[key(f"e{number}")].is_connected = True
    return drive


def test_the_cost_of_an_event_does_not_grow_with_the_members() -> None:
    def seconds(members: int) -> float:
        drive = known(members)
        began = time.thread_time()  # not that in which others run
        for _ in range(300):
            drive.ask(key("e3"))
            drive.tell(RequestEnded(request_id="r"))
            drive.ask(A)
            drive.connect(A)
            drive.tell(Ended(key=A))
        return time.thread_time() - began

    def best(members: int) -> float:
        return min(seconds(members) for _ in range(5))

    assert best(1000) < 5 * best(10)


def test_members_are_asked_only_by_who_needs_to_know() -> None:
    drive = known(50)
    drive.ask(A)
    drive.connect(A)
    drive.tell(RequestEnded(request_id="r"))
    assert drive.questions == 0
    drive.ask(B)
    assert drive.questions == 51, "a newcomer to a full roster has all of them looked at"


# --- any order of events --------------------------------------------------------------------------------------------

KEYS = st.builds(key, st.sampled_from("abc"), st.integers(1, 2))
PLACES = st.sampled_from(["host:1", "host:2"])
REQUESTS = st.sampled_from(["r", "s", "t"])


class Orders(RuleBasedStateMachine):
    """The roster beside the rules as one would write them without indexes and counts: look at everybody, each time."""

    LIMIT = 3
    QUARANTINE = 10

    def __init__(self) -> None:
        super().__init__()
        self.drive = Driver(members_max=self.LIMIT, quarantine_blocks_max=self.QUARANTINE)
        self.now_ns = 0
        self.place: dict[PeerKey, str] = {}
        self.asked_ns: dict[PeerKey, int] = {}
        self.leaving: set[PeerKey] = set()
        self.quarantined: dict[tuple[PeerKey, str], int] = {}

    def staying(self) -> list[PeerKey]:
        return [each for each in self.drive.members if each not in self.leaving]

    def expect(self, effects: list[Effect], retired: list[PeerKey]) -> None:
        """Nothing but these are retired, in any order; who left already is not told again."""
        wanted = {each for each in retired if each not in self.leaving}
        assert len(effects) == len(wanted)
        assert {effect.key for effect in effects if isinstance(effect, Retire)} == wanted
        self.leaving |= wanted

    @property
    def is_full(self) -> bool:
        return sum(self.quarantined.values()) >= self.QUARANTINE

    @rule(key=KEYS, request_id=REQUESTS, blocks=st.integers(0, 6))
    def change_quarantine(self, key: PeerKey, request_id: str, blocks: int) -> None:
        was_full = self.is_full
        self.quarantined[key, request_id] = blocks
        effects = quarantine(self.drive, request_id, blocks, key) if blocks else lift(self.drive, request_id, key)
        assert [type(effect) for effect in effects] == [NoteQuarantine] * (was_full != self.is_full)

    @rule(key=KEYS, place=PLACES)
    def meet(self, key: PeerKey, place: str) -> None:
        """Nobody needs it."""
        self.now_ns += 1
        drive, handed = self.drive, HandOver(key=key, message="meet")
        staying = self.staying()
        states = {each: drive.members[each] for each in staying}
        free = [
            each
            for each, state in states.items()
            if state.is_unused and not (state.is_connected or state.is_shaking_hands)
        ]
        free.sort(key=lambda each: self.asked_ns[each])
        is_known, has_room = self.is_known(key), len(staying) < self.LIMIT
        begins = self.begins(key, "meet")
        effects = drive.meet(key, self.now_ns, place)
        if is_known:
            assert effects == [handed]
            self.asked_ns[key] = self.now_ns
        elif not has_room and not free:
            crowded = TooManyPeers(peer=key.engine_id, address=place, limit=self.LIMIT)
            assert effects == [NoteNotMet(key=key, failure=crowded)]
        else:
            assert effects[-2:] == [begins, handed]
            self.expect(effects[:-2], [] if has_room else free[:1])
            self.leaving.discard(key)
            self.place[key], self.asked_ns[key] = place, self.now_ns

    def is_known(self, key: PeerKey) -> bool:
        """Whether there is a member that takes it in."""
        return key in self.drive.members and not (key in self.leaving and self.drive.members[key].may_be_recalled)

    def begins(self, key: PeerKey, message: str = "r") -> Effect:
        return Recall(key=key, message=message) if key in self.drive.members else Admit(key=key, message=message)

    @rule(key=KEYS, place=PLACES)
    def ask(self, key: PeerKey, place: str) -> None:
        self.now_ns += 1
        drive, handed = self.drive, HandOver(key=key, message="r")
        if self.is_full or self.quarantined.get((key, "r")):
            kinds = [Refuse, TellUnread] if key in drive.members else [Refuse]
            assert [type(effect) for effect in drive.ask(key, self.now_ns, place=place)] == kinds
            return
        if self.is_known(key):
            assert drive.ask(key, self.now_ns, place=place) == [handed]
            self.asked_ns[key] = self.now_ns
            return
        begins, staying = self.begins(key), self.staying()
        free = [each for each in staying if drive.members[each].is_unused]
        free.sort(key=lambda each: (drive.members[each].is_connected, self.asked_ns[each]))
        effects = drive.ask(key, self.now_ns, place=place)
        if len(staying) == self.LIMIT and not free:
            kinds = [Refuse, TellUnread] if key in drive.members else [Refuse]
            assert [type(effect) for effect in effects] == kinds
            return
        assert effects[-2:] == [begins, handed]
        self.expect(effects[:-2], free[:1] if len(staying) == self.LIMIT else [])
        self.leaving.discard(key)
        self.place[key], self.asked_ns[key] = place, self.now_ns

    @rule(
        data=st.data(),
        is_unused=st.booleans(),
        connection=st.sampled_from(("none", "made", "being made")),
        may_be_recalled=st.booleans(),
    )
    def change(self, data: st.DataObject, is_unused: bool, connection: str, may_be_recalled: bool) -> None:
        if self.drive.members:
            which = data.draw(st.sampled_from(sorted(self.drive.members)))
            self.drive.members[which] = State(
                is_unused, connection == "made", connection == "being made", may_be_recalled and which in self.leaving
            )

    @rule(key=KEYS, place=PLACES)
    def connect(self, key: PeerKey, place: str) -> None:
        if key not in self.drive.members:
            return
        self.place[key] = place
        effects = self.drive.connect(key, place)
        others = [each for each in self.drive.members if self.place[each] == place and each.engine_id != key.engine_id]
        self.expect(effects, [] if key in self.leaving else others)

    @rule(key=KEYS)
    def end(self, key: PeerKey) -> None:
        if key in self.drive.members:
            assert self.drive.tell(Ended(key=key)) == []
            self.leaving.discard(key)

    @rule(ns=st.integers(0, 3 * IDLE_NS))
    def wait(self, ns: int) -> None:
        self.now_ns += ns
        effects = self.drive.roster.advance(self.now_ns)
        for effect in effects:
            assert isinstance(effect, Retire)
            state = self.drive.members[effect.key]
            assert state.is_unused
            assert not state.is_connected
            assert self.asked_ns[effect.key] + IDLE_NS <= self.now_ns
        self.expect(effects, [effect.key for effect in effects if isinstance(effect, Retire)])
        deadline_ns = self.drive.roster.next_deadline()
        assert deadline_ns is None or deadline_ns > self.now_ns, "everybody who was due has been looked at"

    @invariant()
    def limits_hold(self) -> None:
        assert len(self.staying()) <= self.LIMIT
        assert len(self.drive.roster) == len(self.drive.members)
        deadline_ns = self.drive.roster.next_deadline()
        assert (deadline_ns is None) == (not self.staying())
        assert deadline_ns is None or deadline_ns <= self.now_ns + IDLE_NS


TestOrders = Orders.TestCase
TestOrders.settings = on_any_machine
