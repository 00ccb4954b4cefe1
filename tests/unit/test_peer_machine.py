"""The peer machine (one remote prefill engine as a decode rank sees it), against its specification.

What must hold in every history: at most one handshake is in flight, and none while the last connection still stands;
whatever a successful handshake made is torn down or abandoned exactly once; and whoever wants the peer is told, sooner
or later, that it is ready or that it failed.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from statemachine.failures import BadParams, Failure, HandshakeTimeout, Incompatible, PeerRetired, TransferError
from statemachine.kernel import Effect, Event, ProtocolError
from statemachine.peer import (
    MACHINE,
    Abandon,
    AnnounceFailed,
    AnnounceReady,
    BackoffElapsed,
    ConnectionSuspect,
    DrainReads,
    HandshakeFailed,
    HandshakeSucceeded,
    Peer,
    QuiesceTimeout,
    ReadsDrained,
    Refuse,
    Retired,
    StartBackoff,
    StartHandshake,
    State,
    TearDown,
    TornDown,
    Wanted,
)

NEW = Peer(engine_id="prefill")
LOST = TransferError(peer="prefill", operation="READ", error="REMOTE_DISCONNECT", transport_lost=True)
SILENT = HandshakeTimeout(peer="prefill", address="h:1", timeout_seconds=5.0)
UNLIKE = Incompatible(
    peer="prefill", address="h:1", field="dtype", local="float16", remote="bfloat16", advice="start it alike"
)
RETIRED = PeerRetired(peer="prefill")

FAILED = HandshakeFailed(failure=SILENT)
INCOMPATIBLE = HandshakeFailed(failure=UNLIKE)
SUSPECT = ConnectionSuspect(failure=LOST, was_of_use=True)
LOST_UNUSED = ConnectionSuspect(failure=LOST, was_of_use=False)


def run(peer: Peer, *events: Event) -> tuple[Peer, list[Effect]]:
    """Feed `events`; all effects in order."""
    effects: list[Effect] = []
    for event in events:
        peer, more = MACHINE.step(peer, event)
        effects += more
    return peer, effects


def after(*events: Event) -> Peer:
    return run(NEW, *events)[0]


READY = after(Wanted(), HandshakeSucceeded())


# --- handshakes -----------------------------------------------------------------------------------------------------


def test_the_first_request_starts_a_handshake_and_the_others_share_it() -> None:
    peer, effects = run(NEW, Wanted(), Wanted(), Wanted())
    assert (peer.state, effects) == (State.HANDSHAKING, [StartHandshake()])
    peer, effects = run(peer, HandshakeSucceeded())
    assert (peer.state, effects) == (State.READY, [AnnounceReady()])


def test_a_failed_handshake_fails_who_waits_and_backs_off() -> None:
    peer, effects = run(NEW, Wanted(), FAILED)
    assert peer.state is State.BACKOFF
    assert effects == [StartHandshake(), AnnounceFailed(failure=SILENT), StartBackoff(failures=1)]


def test_an_incompatible_peer_says_so_to_who_waits_and_to_who_comes_later() -> None:
    peer, effects = run(NEW, Wanted(), INCOMPATIBLE)
    assert peer.state is State.INCOMPATIBLE
    told = AnnounceFailed(failure=UNLIKE)
    assert effects == [StartHandshake(), told, StartBackoff(failures=1, is_incompatible=True)]
    assert run(peer, Wanted()) == (peer, [Refuse(failure=UNLIKE)])


def test_what_the_requests_say_wrongly_of_an_engine_is_not_asked_again_soon() -> None:
    rejected = HandshakeFailed(failure=BadParams(field="tp_size", expected="2", found="4"))
    peer, effects = run(NEW, Wanted(), rejected)
    assert peer.state is State.INCOMPATIBLE
    assert StartBackoff(failures=1, is_incompatible=True) in effects


def test_during_back_off_requests_fail_at_once_and_nothing_is_tried() -> None:
    peer = after(Wanted(), FAILED)
    assert run(peer, Wanted(), Wanted()) == (peer, [Refuse(failure=SILENT)] * 2)


@pytest.mark.parametrize("failed", [FAILED, INCOMPATIBLE])
def test_after_the_back_off_it_is_tried_again_when_somebody_wants_it(failed: Event) -> None:
    peer, effects = run(after(Wanted(), failed), BackoffElapsed())
    assert (peer.state, effects) == (State.IDLE, [])
    peer, effects = run(peer, Wanted())
    assert (peer.state, effects) == (State.HANDSHAKING, [StartHandshake()])


def test_failures_in_a_row_are_counted_and_forgotten_on_success() -> None:
    peer = NEW
    for failures in (1, 2, 3):
        peer, effects = run(peer, Wanted(), FAILED)
        assert effects[-1] == StartBackoff(failures=failures)
        peer, _ = run(peer, BackoffElapsed())
    peer, _ = run(peer, Wanted(), HandshakeSucceeded())
    assert (peer.failures, peer.failure) == (0, None)


@pytest.mark.parametrize("result", [HandshakeSucceeded(), FAILED, INCOMPATIBLE])
@pytest.mark.parametrize("peer", [NEW, READY, after(Wanted(), FAILED), run(READY, SUSPECT)[0]])
def test_no_result_comes_without_a_handshake(peer: Peer, result: Event) -> None:
    with pytest.raises(ProtocolError, match="no handshake is in flight"):
        MACHINE.step(peer, result)


# --- rebuilding -----------------------------------------------------------------------------------------------------


def test_a_suspect_connection_drains_before_it_is_torn_down() -> None:
    peer, effects = run(READY, SUSPECT)
    assert (peer.state, effects) == (State.DRAINING, [DrainReads()])
    peer, effects = run(peer, ReadsDrained())
    assert (peer.state, effects) == (State.DISCONNECTING, [TearDown()])
    peer, effects = run(peer, TornDown())
    assert (peer.state, effects) == (State.IDLE, [])


@pytest.mark.parametrize(
    "events", [(Wanted(), ReadsDrained(), TornDown()), (ReadsDrained(), Wanted(), Wanted(), TornDown())]
)
def test_a_peer_that_is_given_up_is_connected_anew_when_it_is_torn_down(events: tuple[Event, ...]) -> None:
    peer, effects = run(READY, SUSPECT, *events)
    # Torn down first: the same agent can be added only after it was removed.
    assert (peer.state, effects) == (State.IDLE, [DrainReads(), TearDown()])
    peer, effects = run(peer, Wanted(), HandshakeSucceeded())
    assert (peer.state, effects) == (State.READY, [StartHandshake(), AnnounceReady()])


REBUILT = (LOST_UNUSED, ReadsDrained(), TornDown(), Wanted(), HandshakeSucceeded())
"""A connection that was of no use is lost, and another one takes its place."""


def test_the_second_connection_in_a_row_that_was_of_no_use_is_rebuilt_after_a_delay() -> None:
    peer, _ = run(READY, *REBUILT)
    assert peer.state is State.READY
    peer, effects = run(peer, LOST_UNUSED, Wanted(), ReadsDrained(), TornDown())
    assert peer.state is State.BACKOFF
    assert effects == [DrainReads(), TearDown(), AnnounceFailed(failure=LOST), StartBackoff(failures=1)]
    peer, _ = run(peer, BackoffElapsed(), Wanted(), HandshakeSucceeded())
    peer, effects = run(peer, LOST_UNUSED, ReadsDrained(), TornDown())
    assert (peer.state, effects) == (
        State.BACKOFF,
        [DrainReads(), TearDown(), AnnounceFailed(failure=LOST), StartBackoff(failures=2)],
    )


def test_a_connection_that_was_of_use_is_rebuilt_at_once_however_many_were_not_before_it() -> None:
    peer, _ = run(READY, *REBUILT, SUSPECT, ReadsDrained(), TornDown(), Wanted(), HandshakeSucceeded(), *REBUILT)
    assert peer.state is State.READY


def test_reads_that_never_end_cost_the_connection_and_fail_who_waits() -> None:
    peer, effects = run(READY, SUSPECT, Wanted(), QuiesceTimeout())
    assert peer.state is State.BACKOFF
    told = AnnounceFailed(failure=LOST)
    assert effects == [DrainReads(), Abandon(failure=LOST), told, StartBackoff(failures=1)]
    peer, effects = run(peer, BackoffElapsed())
    assert (peer.state, effects) == (State.IDLE, [])


def test_agents_that_are_not_removed_cost_the_connection_and_fail_who_waits() -> None:
    peer, effects = run(READY, SUSPECT, ReadsDrained(), Wanted(), QuiesceTimeout())
    assert peer.state is State.BACKOFF
    told = AnnounceFailed(failure=LOST)
    assert effects == [DrainReads(), TearDown(), Abandon(failure=LOST), told, StartBackoff(failures=1)]


@pytest.mark.parametrize("peer", [NEW, after(Wanted()), after(Wanted(), FAILED), run(READY, SUSPECT)[0]])
def test_late_news_of_a_lost_connection_means_nothing(peer: Peer) -> None:
    assert run(peer, SUSPECT) == (peer, [])


# --- retiring -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("peer", [NEW, after(Wanted(), FAILED), after(Wanted(), INCOMPATIBLE)])
def test_a_peer_that_is_not_connected_is_gone_at_once(peer: Peer) -> None:
    peer, effects = run(peer, Retired())
    assert (peer.state, effects) == (State.GONE, [])


def test_a_connected_peer_drains_before_it_is_gone() -> None:
    peer, effects = run(READY, Retired())
    assert (peer.state, effects) == (State.DRAINING, [DrainReads()])
    peer, effects = run(peer, ReadsDrained())
    assert (peer.state, effects) == (State.DISCONNECTING, [TearDown()])
    peer, effects = run(peer, TornDown())
    assert (peer.state, effects) == (State.GONE, [])


def test_a_retiring_peer_whose_reads_never_end_is_gone_and_its_connection_abandoned() -> None:
    peer, effects = run(READY, Retired(), QuiesceTimeout())
    assert peer.state is State.GONE
    assert effects[:2] == [DrainReads(), Abandon(failure=RETIRED)]
    assert not any(isinstance(effect, StartBackoff) for effect in effects)


@pytest.mark.parametrize("events", [(), (ReadsDrained(),)])
def test_a_retiring_peer_takes_no_more_requests(events: tuple[Event, ...]) -> None:
    retiring, _ = run(READY, Retired(), *events)
    assert run(retiring, Wanted()) == (retiring, [])


@pytest.mark.parametrize(("result", "told"), [(FAILED, SILENT), (INCOMPATIBLE, UNLIKE)])
def test_retired_during_a_handshake_that_fails(result: Event, told: Failure) -> None:
    peer, effects = run(NEW, Wanted(), Retired(), result)
    assert peer.state is State.GONE
    assert [effect.failure for effect in effects if isinstance(effect, AnnounceFailed)] == [told]


def test_retired_during_a_handshake_that_succeeds_tears_down_what_it_made() -> None:
    peer, effects = run(NEW, Wanted(), Retired(), HandshakeSucceeded())
    assert peer.state is State.DRAINING
    assert effects == [StartHandshake(), AnnounceFailed(failure=RETIRED), DrainReads()]
    peer, effects = run(peer, ReadsDrained(), TornDown())
    assert (peer.state, effects) == (State.GONE, [TearDown()])


def test_retired_during_a_handshake_that_succeeds_bears_reads_that_never_end() -> None:
    peer, effects = run(NEW, Wanted(), Retired(), HandshakeSucceeded(), QuiesceTimeout())
    assert peer.state is State.GONE
    assert effects.count(Abandon(failure=RETIRED)) == 1


@pytest.mark.parametrize("drained", [(), (ReadsDrained(),)])
def test_retired_while_given_up_it_is_not_rebuilt(drained: tuple[Event, ...]) -> None:
    given_up, _ = run(READY, SUSPECT, Wanted(), *drained)
    peer, effects = run(given_up, Retired())
    assert effects == []
    rest = (TornDown(),) if drained else (ReadsDrained(), TornDown())
    assert run(peer, *rest)[0].state is State.GONE


def test_what_is_gone_stays_gone() -> None:
    gone = after(Retired())
    for event in (Wanted(), SUSPECT, BackoffElapsed(), ReadsDrained(), QuiesceTimeout(), TornDown(), Retired()):
        assert run(gone, event) == (gone, [])


# --- random histories -----------------------------------------------------------------------------------------------

_CONNECTED = (State.READY, State.DRAINING, State.DISCONNECTING)
_BACKING_OFF = (State.BACKOFF, State.INCOMPATIBLE)


class PeerUnderLawfulShell(RuleBasedStateMachine):
    """A shell that keeps its promises: one result per handshake, no request for a peer that is gone. Who waits while a
    connection is given up wants the next one when it is torn down, or is told that there will be none."""

    @initialize()
    def start(self) -> None:
        self.peer = NEW
        self.handshakes_open = 0
        self.connections_open = 0
        self.unanswered = False
        self.retired = False
        self.failures = self.losses = 0

    def feed(self, event: Event) -> None:
        before = self.peer
        if isinstance(event, ConnectionSuspect) and before.state is State.READY:
            self.losses = 0 if event.was_of_use else self.losses + 1
        self.peer, effects = MACHINE.step(before, event)
        for effect in effects:
            self.execute(event, effect)
        assert (DrainReads() in effects) == (self.entered(before, State.DRAINING))
        backs_off = any(isinstance(effect, StartBackoff) for effect in effects)
        assert backs_off == any(self.entered(before, state) for state in _BACKING_OFF)

    def entered(self, before: Peer, state: State) -> bool:
        return before.state is not state and self.peer.state is state

    def execute(self, event: Event, effect: Effect) -> None:
        match effect:
            case StartHandshake():
                assert self.handshakes_open == 0
                assert self.connections_open == 0
                assert not self.retired
                self.handshakes_open = 1
            case Abandon():
                self.connections_open -= 1
                assert self.connections_open == 0
            case TearDown():
                assert self.connections_open == 1
            case AnnounceReady():
                assert self.peer.state is State.READY
                self.unanswered = False
            case AnnounceFailed() | Refuse():
                self.unanswered = False
            case StartBackoff(failures=failures) if isinstance(event, TornDown):
                assert failures == self.losses - 1, "the first is rebuilt at once"
            case StartBackoff(failures=failures):
                self.failures += 1
                assert failures == self.failures

    @precondition(lambda self: not MACHINE.is_terminal(self.peer) and self.peer.state is not State.READY)
    @rule()
    def want(self) -> None:
        self.unanswered = True
        self.feed(Wanted())
        self.tell_who_waits()

    @precondition(lambda self: self.handshakes_open)
    @rule()
    def handshake_succeeds(self) -> None:
        self.handshakes_open, self.connections_open = 0, 1
        self.failures = 0
        self.feed(HandshakeSucceeded())

    @precondition(lambda self: self.handshakes_open)
    @rule(result=st.sampled_from([FAILED, INCOMPATIBLE]))
    def handshake_fails(self, result: Event) -> None:
        self.handshakes_open = 0
        self.feed(result)

    @precondition(lambda self: self.peer.state is State.DRAINING)
    @rule()
    def reads_drain(self) -> None:
        self.feed(ReadsDrained())

    @precondition(lambda self: self.peer.state is State.DISCONNECTING)
    @rule()
    def is_torn_down(self) -> None:
        self.connections_open -= 1
        self.feed(TornDown())
        if self.unanswered and self.peer.state is State.IDLE:
            self.feed(Wanted())

    def tell_who_waits(self) -> None:
        if self.retired and self.peer.state in (State.DRAINING, State.DISCONNECTING):
            self.unanswered = False

    @rule(event=st.sampled_from([SUSPECT, LOST_UNUSED, QuiesceTimeout(), BackoffElapsed()]))
    def news_or_timer_comes(self, event: Event) -> None:
        """At any time: both may be late."""
        self.feed(event)

    @rule()
    def retire(self) -> None:
        self.retired = True
        self.feed(Retired())
        self.tell_who_waits()

    @invariant()
    def a_handshake_is_open_exactly_while_handshaking(self) -> None:
        assert self.handshakes_open == (1 if self.peer.state is State.HANDSHAKING else 0)

    @invariant()
    def a_connection_is_open_exactly_from_ready_until_it_is_torn_down(self) -> None:
        assert self.connections_open == (1 if self.peer.state in _CONNECTED else 0)

    @invariant()
    def nobody_waits_for_what_will_not_come(self) -> None:
        if self.peer.state not in (State.HANDSHAKING, State.DRAINING, State.DISCONNECTING):
            assert not self.unanswered

    @invariant()
    def a_failed_peer_knows_why(self) -> None:
        if self.peer.state in _BACKING_OFF:
            assert self.peer.failure is not None

    @invariant()
    def retired_peers_do_not_come_back(self) -> None:
        if self.retired:
            assert self.peer.state in (State.HANDSHAKING, State.DRAINING, State.DISCONNECTING, State.GONE)
            assert MACHINE.is_terminal(self.peer) or self.peer.is_retiring

    def teardown(self) -> None:
        """Retired, and with nothing left to come, it is gone, and everybody was answered."""
        if not hasattr(self, "peer"):
            return
        self.retire()
        if self.handshakes_open:
            self.handshake_succeeds()
        if self.peer.state is State.DRAINING:
            self.reads_drain()
        if self.peer.state is State.DISCONNECTING:
            self.is_torn_down()
        assert MACHINE.is_terminal(self.peer)
        self.nobody_waits_for_what_will_not_come()


TestPeerUnderLawfulShell = PeerUnderLawfulShell.TestCase
TestPeerUnderLawfulShell.settings = settings(max_examples=300, stateful_step_count=30, deadline=None)


# --- all values -----------------------------------------------------------------------------------------------------

ALL_EVENTS: tuple[Event, ...] = (
    Wanted(),
    HandshakeSucceeded(),
    FAILED,
    INCOMPATIBLE,
    BackoffElapsed(),
    SUSPECT,
    LOST_UNUSED,
    ReadsDrained(),
    QuiesceTimeout(),
    TornDown(),
    Retired(),
)


def test_no_sequence_of_events_breaks_the_machine() -> None:
    """Every event in every reachable value with at most two failures and two losses in a row; lawful or not, only a
    ProtocolError may come out."""
    assert {type(event) for event in ALL_EVENTS} == set(MACHINE.events)
    broken: dict[tuple[Event, ...], str] = {}
    histories: dict[Peer, tuple[Event, ...]] = {NEW: ()}
    frontier = [NEW]
    while frontier:
        peer = frontier.pop(0)
        for event in ALL_EVENTS:
            history = (*histories[peer], event)
            try:
                following, effects = MACHINE.step(peer, event)
            except ProtocolError:
                continue
            except AssertionError as error:
                broken[history] = repr(error)
                continue
            if MACHINE.is_terminal(peer):
                assert (following, effects) == (peer, ())
            if following not in histories and max(following.failures, following.losses) <= 2:
                histories[following] = history
                frontier.append(following)
    assert len(histories) > 20
    assert {peer.state for peer in histories} == set(State)
    assert broken == {}
