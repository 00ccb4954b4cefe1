"""The executor of a remote engine: what it is told when it has crashed, or is about to end, is not lost."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import msgspec
import pytest

from connector.clock import NS_PER_SECOND, BootClock
from connector.observe.event_log import EventLog
from connector.runtime.peer_actor import PeerActor
from connector.runtime.wait_notices import WaitNotices
from statemachine import remote_engine
from statemachine.kernel import Effect, Event
from statemachine.lease import LeaseName
from statemachine.peer import State
from statemachine.remote_engine import (
    Connected,
    Crashed,
    LetGo,
    LinkLost,
    MeetAsked,
    ReadEnded,
    Recall,
    RemoteEngine,
    Retire,
)
from statemachine.roster import PeerKey
from tests.rig.pulls import pull


class Core:
    """Raises over the first event that it is told."""

    is_finished = False

    def __init__(self) -> None:
        self.heard: list[Event] = []

    def handle(self, event: Event, now_ns: int) -> list[Effect]:
        self.heard.append(event)
        if len(self.heard) == 1:
            raise RuntimeError("a mistake")
        return []

    def next_deadline(self) -> None:
        return None

    def request_ids(self) -> list[str]:
        return []

    def quarantined(self) -> list[tuple[str, int]]:
        return []


def notices_of(core: Core | RemoteEngine) -> WaitNotices:
    log = EventLog("decode", 0, clock=BootClock(), log_failure=lambda subject, failure: None)
    return WaitNotices(log, core, says_who_is_queued=True, name=lambda command, came_ns: command.request_id)


@pytest.mark.parametrize(
    "ended",
    [
        ReadEnded(request_id="r", read=0, connection=1, ended_ns=0),
        LetGo(lease=LeaseName("p-1", 7)),
        Retire(),
        Recall(address="host"),
    ],
    ids=lambda event: type(event).__name__,
)
def test_what_is_told_after_a_crash_waits_for_the_recovery(ended: Event) -> None:
    """What it has crashed over is fed again then, if nobody would ever tell it a second time: the end of a READ, and
    what the roster and the scheduler say once."""
    actor, core, woken = object.__new__(PeerActor), Core(), list[bool]()
    vars(actor).update(
        core=core,
        _key=PeerKey("prefill", 1, 1, 1),
        _context=SimpleNamespace(
            clock=SimpleNamespace(now_ns=lambda: 0), recorder=SimpleNamespace(catch_up=lambda: None)
        ),
        _inbox=deque(),
        _pulls={},
        _notices=notices_of(core),
        _attention=SimpleNamespace(set=lambda: woken.append(True)),
        _in_hand=None,
        _crash=None,
        _was_connected=False,
        _on_disconnected=lambda: None,
        _is_running=True,
        _is_at_work=False,
    )
    lost = LinkLost(connection=1, detail="")
    actor.tell(ended)
    actor.tell(lost)
    assert core.heard == [ended]
    assert woken
    crash, actor._crash = actor._crash, None
    assert crash is not None
    actor.recover(crash)
    assert isinstance(core.heard[1], Crashed)
    assert core.heard[2:] == [ended]
    actor._handle_all()
    assert core.heard[3:] == [lost]


def test_who_came_too_late_is_for_the_successor() -> None:
    """And is as old by then as it is: a lease may be taken to have begun when the engine first heard of the request."""
    now_ns = 0
    limits = remote_engine.EngineLimits(
        lease_ns=30,
        margin_ns=1,
        request_ns=120,
        quiesce_ns=10,
        grace_ns=1,
        backoff_first_ns=1,
        backoff_max_ns=1,
        incompatible_ns=1,
        retries=1,
    )
    actor, core = object.__new__(PeerActor), RemoteEngine("prefill", "host", limits)
    vars(actor).update(
        core=core,
        _key=PeerKey("prefill", 1, 1, 1),
        _context=SimpleNamespace(
            clock=SimpleNamespace(now_ns=lambda: now_ns),
            recorder=SimpleNamespace(catch_up=lambda: None),
        ),
        _inbox=deque(),
        _for_successor=[],
        _commands_waiting=0,
        _pulls={},
        _notices=notices_of(core),
        _start_handshake=lambda effect: None,
        _tear_down=lambda effect: None,
        _attention=SimpleNamespace(set=lambda: None),
        _in_hand=None,
        _crash=None,
        _was_connected=False,
        _on_disconnected=lambda: None,
        _wakes_at_ns=None,
        _is_running=True,
        _is_at_work=False,
    )
    actor.tell(MeetAsked(address="host"))
    actor.tell(Connected(connection=1, workers=("PP 0 TP 0",), is_builtin=True, life="a"))
    actor.tell(Retire())
    assert core.state is State.DISCONNECTING
    command = pull("r", [1])
    actor.put(command)
    now_ns = 5
    actor.tell(remote_engine.TornDown(connection=1))
    assert actor._crash is None
    assert core.is_finished
    age_seconds = command.age_seconds + now_ns / NS_PER_SECOND
    assert not actor._pulls
    actor.recover(RuntimeError("a mistake"))  # reports nothing: the successor will read into its blocks
    assert actor.take_unhandled() == [msgspec.structs.replace(command, age_seconds=age_seconds)]
