"""A prefill engine that says that it will end, seen from a decode rank's core: who goes on, and who fails at once."""

from __future__ import annotations

import pytest

from statemachine import departure, peer
from statemachine.departure import Departure, State
from statemachine.failures import (
    BadParams,
    ConnectionRefused,
    Failure,
    HandshakeTimeout,
    Incompatible,
    LeaseOver,
    NotAllowed,
    PeerBackoff,
    PeerLeaving,
    TransferError,
    WrongEngine,
)
from statemachine.remote_engine import (
    ConnectFailed,
    LeavingSaid,
    LinkLost,
    NoteHandshakeFailure,
    NoteLeaving,
    PostReads,
    Report,
    SendHold,
    SendRelease,
    Started,
    StartHandshake,
    TearDown,
    TornDown,
)
from tests.unit.test_remote_engine_rules import LIMITS, MS, A, B, Executor, reading

REFUSED = ConnectionRefused(peer="p", address="host")
SILENT = HandshakeTimeout(peer="p", address="host", timeout_seconds=5.0)


def leaving(d: Executor, grace_ns: int = 20_000 * MS) -> Executor:
    d.feed(LeavingSaid(connection=d.connects, grace_ns=grace_ns))
    return d


def ended(d: Executor) -> dict[str, str]:
    """Requests that were reported since, with the kind of their failure."""
    return {each.request_id: each.failure.kind if each.failure is not None else "" for each in d.take(Report)}


def left() -> Executor:
    """Nobody wanted anything when it ended."""
    d = leaving(reading())
    d.held(d.now_ns, 20_000 * MS)
    d.read("r")
    assert ended(d) == {"r": ""}
    d.take(SendRelease)
    d.feed(LinkLost(connection=1, detail="closed"))
    (torn_down,) = d.take(TearDown)
    d.feed(TornDown(connection=torn_down.connection))
    assert d.core.state is peer.State.IDLE
    return d


def test_what_is_held_of_an_engine_that_leaves_is_read() -> None:
    d = leaving(reading())
    assert [each.grace_ns for each in d.take(NoteLeaving)] == [20_000 * MS]
    d.held(d.now_ns, 20_000 * MS)
    d.read("r")
    assert ended(d) == {"r": ""}
    assert leaving(d).take(NoteLeaving) == [], "it is said once"


def test_who_comes_with_a_lease_of_before_is_served() -> None:
    """Its answer was on the way to the client when the engine said that it leaves."""
    d = leaving(reading())
    d.take(SendHold)
    d.start("late", B)
    (hold,) = d.take(SendHold)
    assert hold.leases == (B,)
    assert [each.request_id for each in d.take(PostReads)] == ["r", "late"]


def test_what_the_engine_does_not_lend_any_more_fails_as_it_says() -> None:
    d = leaving(reading())
    d.gone("expired")
    d.read("r")
    (report,) = d.take(Report)
    assert isinstance(report.failure, LeaseOver)


@pytest.mark.parametrize("how", ["link", "read"])
def test_when_its_process_is_gone_everybody_fails_at_once_and_nobody_connects(how: str) -> None:
    d = leaving(reading())
    d.announce("queued", B)
    d.take(StartHandshake)
    if how == "link":
        d.feed(LinkLost(connection=1, detail="closed"))
        lost = TransferError(peer="p", operation="READ", error="gone", transport_lost=True)
        d.read("r", failure=lost)
    else:
        lost = TransferError(peer="p", operation="READ", error="gone", transport_lost=True)
        d.read("r", failure=lost)
    assert ended(d) == {"r": "PeerLeaving"}
    (torn_down,) = d.take(TearDown)
    d.feed(TornDown(connection=torn_down.connection))
    d.pass_until(LIMITS.lease_ns * 3)
    assert d.take(StartHandshake) == []
    assert d.core.next_deadline() is None, "nothing is owed to it"
    d.start("queued", B)
    assert ended(d) == {"queued": "PeerLeaving"}
    assert d.take(StartHandshake) == []
    assert d.core.is_unused


def test_an_engine_that_ends_without_a_word_is_connected_again() -> None:
    d = reading()
    d.feed(LinkLost(connection=1, detail="closed"))
    lost = TransferError(peer="p", operation="READ", error="gone", transport_lost=True)
    d.read("r", failure=lost)
    (torn_down,) = d.take(TearDown)
    d.feed(TornDown(connection=torn_down.connection))
    assert d.take(StartHandshake)
    assert ended(d) == {}


def test_a_read_that_fails_for_another_reason_does_not_mean_that_it_is_gone() -> None:
    d = leaving(reading())
    d.announce("queued", B)
    d.read("r", failure=TransferError(peer="p", operation="READ", error="?", transport_lost=False), is_quiescent=False)
    (torn_down,) = d.take(TearDown)
    d.feed(TornDown(connection=torn_down.connection))
    d.pass_until(d.now_ns + LIMITS.grace_ns)
    assert ended(d) == {"r": "TransferError"}
    d.connect()
    d.start("queued", B)
    assert [each.request_id for each in d.take(PostReads)] == ["r", "queued"]
    leaving(d)
    assert len(d.take(NoteLeaving)) == 2, "each connection hears of it"


def test_it_is_tried_once_for_who_comes_later_and_without_a_pause() -> None:
    """A port that refuses costs nothing; and the next request may be one of the new process."""
    d = left()
    for name, lease in (("x", A._replace(number=7)), ("y", A._replace(number=8))):
        d.start(name, lease)
        assert len(d.take(StartHandshake)) == 1
        d.feed(ConnectFailed(failure=REFUSED))
        assert ended(d) == {name: "PeerLeaving"}
        assert len(d.take(NoteHandshakeFailure)) == 1
        assert d.core.state is peer.State.IDLE
    d.pass_until(d.now_ns + LIMITS.lease_ns)
    assert d.take(StartHandshake) == [], "nobody wants it"
    d.start("z", A._replace(number=9))
    d.connect(life="2")
    assert [each.request_id for each in d.take(PostReads) if each.connection == d.connects] == ["z"]
    assert ended(d) == {}


def test_what_is_announced_of_an_engine_that_is_gone_makes_one_attempt() -> None:
    d = left()
    late = A._replace(number=7)
    d.announce("queued", late)
    assert len(d.take(StartHandshake)) == 1
    d.feed(ConnectFailed(failure=REFUSED))
    d.pass_until(d.now_ns + 2 * LIMITS.lease_ns)
    assert d.take(StartHandshake) == []
    d.start("queued", late)
    assert ended(d) == {"queued": "PeerLeaving"}


@pytest.mark.parametrize(
    ("found", "kind"),
    [
        (Incompatible(peer="p", address="host", field="model", local="a", remote="b", advice="start it alike"), None),
        (BadParams(field="tp_size", expected="1", found="2"), None),
        (NotAllowed(peer="p", address="host", detail="no key"), None),
        (WrongEngine(peer="p", address="host", found="q"), "PeerLeaving"),
        (SILENT, "PeerLeaving"),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_what_does_not_fit_in_its_place_says_so(found: Failure, kind: str | None) -> None:
    """A new process has its address, and started otherwise: that the old one has left would send people astray."""
    d = left()
    d.start("x", A._replace(number=7))
    d.feed(ConnectFailed(failure=found))
    assert ended(d) == {"x": kind or found.kind}
    assert len(d.take(NoteHandshakeFailure)) == 1
    d.pass_until(d.now_ns + LIMITS.lease_ns)
    assert d.take(SendRelease) == [], "nothing is owed to what has left"


@pytest.mark.parametrize(
    "found", [WrongEngine(peer="p", address="elsewhere", found="q"), SILENT, REFUSED], ids=lambda value: value.kind
)
def test_at_another_address_than_it_had_it_has_not_left(found: Failure) -> None:
    """It was started at a new address and cannot be reached there, or a router has made a port up: that the process
    before has left does not explain it."""
    d = left()
    d.feed(Started(request_id="x", lease=A._replace(number=7), address="elsewhere", age_ns=0))
    assert [each.address for each in d.take(StartHandshake)][-1:] == ["elsewhere"]
    d.feed(ConnectFailed(failure=found))
    assert ended(d) == {"x": found.kind}
    d.pass_until(d.now_ns + LIMITS.backoff_first_ns)
    d.start("y", A._replace(number=8))
    assert d.take(StartHandshake)
    d.feed(ConnectFailed(failure=SILENT))
    assert ended(d) == {"y": "PeerLeaving"}, "where it was, it has left as before"


def test_an_attempt_at_another_address_costs_nobody_what_is_lent_where_the_engine_was() -> None:
    """A router has made an address up for one request, and a new process has come where the old one was."""
    d = left()
    d.feed(Started(request_id="wrong", lease=A._replace(number=7), address="elsewhere", age_ns=0))
    d.announce("queued", A._replace(number=8))
    d.feed(ConnectFailed(failure=SILENT))
    assert ended(d) == {"wrong": SILENT.kind}
    d.pass_until(d.now_ns + LIMITS.backoff_first_ns)
    assert d.core.address == "host"
    d.connect(life="2")
    d.start("queued", A._replace(number=8))
    assert [each.request_id for each in d.take(PostReads) if each.connection == d.connects] == ["queued"]
    assert ended(d) == {}


def test_where_nothing_answers_the_shortest_pause_follows() -> None:
    d = left()
    for number in range(7, 12):
        d.start(f"x{number}", A._replace(number=number))
        assert len(d.take(StartHandshake)) == 1
        d.feed(ConnectFailed(failure=SILENT))
        assert ended(d) == {f"x{number}": "PeerLeaving"}
        assert d.core.state is peer.State.BACKOFF
        d.start(f"y{number}", A._replace(number=100 + number))
        (report,) = d.take(Report)
        assert isinstance(report.failure, PeerBackoff)
        d.pass_until(d.now_ns + LIMITS.backoff_first_ns)
        assert d.core.state is peer.State.IDLE


@pytest.mark.parametrize("failure", [REFUSED, SILENT])
def test_an_engine_that_leaves_and_cannot_be_connected_again_has_left(failure: Failure) -> None:
    """Its connection was given up because of a READ that had not ended, which says nothing of its process."""
    d = leaving(reading())
    d.read(
        "r", failure=TransferError(peer="p", operation="READ", error="late", transport_lost=False), is_quiescent=False
    )
    (torn_down,) = d.take(TearDown)
    d.announce("queued", B)
    d.feed(TornDown(connection=torn_down.connection))
    assert len(d.take(StartHandshake)) == 1
    d.feed(ConnectFailed(failure=failure))
    d.pass_until(LIMITS.lease_ns * 3)
    assert list(ended(d)) == ["r"]
    assert d.take(StartHandshake) == []
    assert d.core.next_deadline() is None, "nothing is owed to it"
    d.start("next", A._replace(number=7))
    d.feed(ConnectFailed(failure=REFUSED))
    assert ended(d) == {"next": "PeerLeaving"}


def test_a_copy_of_a_core_whose_engine_leaves_behaves_alike() -> None:
    d = reading()
    before = d.core.copy()
    leaving(d)
    assert d.core.copy().freeze(d.now_ns) == d.core.freeze(d.now_ns) != before.freeze(d.now_ns)
    assert (before.view().leaves_ns, d.core.view().leaves_ns) == (None, d.now_ns + 20_000 * MS)


def test_news_of_a_connection_that_is_given_up_is_no_news() -> None:
    d = left()
    d.take(NoteLeaving)
    leaving(d)
    assert d.take(NoteLeaving) == []
    assert departure.MACHINE.step(Departure(state=State.LEFT), departure.LeavingAnnounced(until_ns=1)) == (
        Departure(state=State.LEFT),
        (),
    )


def test_it_says_what_has_shown_that_it_is_gone() -> None:
    d = left()
    d.start("x", A._replace(number=7))
    d.feed(ConnectFailed(failure=REFUSED))
    left_as = d.core.view().peer.failure
    assert isinstance(left_as, PeerLeaving)
    assert left_as.detail == REFUSED.kind
