"""What the cores show of themselves to people: true, and without a way back in."""

from __future__ import annotations

import pytest

from statemachine import peer, remote_engine, request, roster
from statemachine.failures import ConnectionRefused, DeadlineExceeded
from statemachine.lease import LeaseName
from statemachine.remote_engine import EngineLimits, RemoteEngine
from statemachine.roster import PeerKey, Roster

SECOND = 10**9
LIMITS = EngineLimits(
    lease_ns=30 * SECOND,
    margin_ns=0,
    request_ns=120 * SECOND,
    quiesce_ns=20 * SECOND,
    grace_ns=SECOND,
    backoff_first_ns=SECOND,
    backoff_max_ns=8 * SECOND,
    incompatible_ns=60 * SECOND,
    retries=0,
)
LEASE = LeaseName("on-p", 3)


@pytest.fixture
def core() -> RemoteEngine:
    return RemoteEngine("p", "h:1", LIMITS)


def start(core: RemoteEngine, name: str = "on-d", at: int = 5 * SECOND) -> None:
    core.handle(remote_engine.Started(request_id=name, lease=LEASE, address="h:1", age_ns=2 * SECOND), at)


def read(core: RemoteEngine, at: int = 6 * SECOND) -> None:
    core.handle(remote_engine.Connected(connection=1, workers=("PP 0 TP 0",), is_builtin=False, life="a"), at)
    core.handle(remote_engine.BlocksResolved(request_id="on-d", connection=1, reads=2), at)


def test_a_request_that_waits_says_since_when_and_until_when(core: RemoteEngine) -> None:
    start(core)
    view = core.view_request("on-d")
    assert view is not None
    assert view.value.state is request.State.PENDING_HANDSHAKE
    assert (view.started_ns, view.until_ns) == (5 * SECOND, 125 * SECOND)
    assert core.request_ids() == ["on-d"]
    assert core.view_request("nobody") is None


def test_a_draining_request_has_the_bound_of_its_drain(core: RemoteEngine) -> None:
    start(core)
    read(core)
    core.handle(remote_engine.AbortAsked(request_id="on-d"), 40 * SECOND)
    view = core.view_request("on-d")
    assert view is not None
    assert view.value.state is request.State.DRAINING
    assert view.until_ns == 60 * SECOND


def test_a_request_says_what_it_waits_for(core: RemoteEngine) -> None:
    """Until it is known what to read, for the peer; or for what the connected peer has to say of its blocks."""

    def said(by: RemoteEngine = core) -> str:
        view = by.view_request("on-d")
        assert view is not None
        return view.waits_for

    def read_ended(read: int) -> remote_engine.ReadEnded:
        return remote_engine.ReadEnded(request_id="on-d", read=read, connection=1, ended_ns=7 * SECOND)

    start(core)
    assert said() == "peer"
    core.handle(remote_engine.Connected(connection=1, workers=("PP 0 TP 0",), is_builtin=False, life="a"), 6 * SECOND)
    assert said() == "checksums"
    core.handle(remote_engine.BlocksResolved(request_id="on-d", connection=1, reads=2), 6 * SECOND)
    core.handle(read_ended(0), 7 * SECOND)
    assert said() == "reads"
    aborted = core.copy()
    aborted.handle(remote_engine.AbortAsked(request_id="on-d"), 7 * SECOND)
    assert said(aborted) == "quiescence"
    core.handle(read_ended(1), 7 * SECOND)
    assert said() == "proof"


def test_an_announced_request_is_queued_until_it_is_started(core: RemoteEngine) -> None:
    core.handle(remote_engine.Announced(request_id="on-d", lease=LEASE, address="h:1", age_ns=SECOND), 3 * SECOND)
    assert core.queued() == [("on-d", LEASE)]
    claim = core.view_claim(LEASE)
    assert claim is not None
    assert (claim.heard_ns, claim.users, claim.queued, claim.holds) == (2 * SECOND, ("on-d",), ("on-d",), ())
    start(core)
    assert core.queued() == []
    assert core.claimed() == [LEASE]
    read(core)
    claim = core.view_claim(LEASE)
    assert claim is not None
    assert [each.state.value for each in claim.holds] == ["wanted"]
    assert core.view_claim(LeaseName("other", 1)) is None


def test_the_view_of_the_connection_counts_what_stands_on_it(core: RemoteEngine) -> None:
    assert core.view().peer.state is peer.State.IDLE
    start(core)
    read(core)
    view = core.view()
    assert (view.peer.state, view.ranks, view.requests, view.claims, view.reads) == (peer.State.READY, 1, 1, 1, 2)
    assert view.backoff_until_ns is None
    assert not view.is_builtin


def test_an_engine_that_backs_off_says_until_when(core: RemoteEngine) -> None:
    start(core)
    core.handle(remote_engine.ConnectFailed(failure=ConnectionRefused(peer="p", address="h:1")), 6 * SECOND)
    view = core.view()
    assert view.peer.state is peer.State.BACKOFF
    assert view.backoff_until_ns is not None
    assert 6 * SECOND < view.backoff_until_ns <= 7 * SECOND


def test_a_quarantined_request_counts_the_reads_that_are_left(core: RemoteEngine) -> None:
    start(core)
    read(core)
    core.advance(125 * SECOND)
    assert core.quarantined() == []
    core.advance(145 * SECOND)
    assert core.view_request("on-d") is None
    assert core.quarantined() == [("on-d", 2)]
    assert core.view().quarantined == 1
    ended = remote_engine.ReadEnded(request_id="on-d", read=0, connection=1, ended_ns=146 * SECOND)
    core.handle(ended, 146 * SECOND)
    assert core.quarantined() == [("on-d", 1)]


def test_looking_changes_nothing(core: RemoteEngine) -> None:
    start(core)
    read(core)
    before = core.freeze(7 * SECOND)
    for _ in range(2):
        core.view()
        core.request_ids()
        core.view_request("on-d")
        core.claimed()
        core.queued()
        core.view_claim(LEASE)
        core.quarantined()
    assert core.freeze(7 * SECOND) == before
    assert core.handle(remote_engine.AbortAsked(request_id="nobody"), 7 * SECOND) == []


def test_the_roster_says_where_a_member_is_looked_for() -> None:
    core = RemoteEngine("p", "h:1", LIMITS)
    known = Roster(members_max=2, idle_ns=SECOND, quarantine_blocks_max=9, member=lambda key: core)
    key = PeerKey("p", 1, 1, 1)
    assert known.view(key) is None
    known.handle(
        roster.Asked(key=key, place="h:1", request_id="r", lease=LEASE, is_awaited=True, message=None), 4 * SECOND
    )
    assert known.view(key) == ("h:1", 4 * SECOND, False)
    known.handle(roster.Connecting(key=key, place="h:2"), 5 * SECOND)
    assert known.view(key) == ("h:2", 4 * SECOND, False)


def test_the_failure_of_a_request_is_there_while_it_drains(core: RemoteEngine) -> None:
    start(core)
    read(core)
    core.advance(125 * SECOND)
    view = core.view_request("on-d")
    assert view is not None
    assert isinstance(view.value.failure, DeadlineExceeded)
