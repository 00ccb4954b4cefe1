"""A crash of the executor of a remote engine: what it was told before its task runs again is neither lost nor heard."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

from connector.runtime.peer_actor import PeerActor
from statemachine.kernel import Effect, Event
from statemachine.remote_engine import Crashed, LinkLost, ReadEnded
from statemachine.roster import PeerKey


class Core:
    """Raises over the first event that it is told."""

    is_finished = takes_nobody = False

    def __init__(self) -> None:
        self.heard: list[Event] = []

    def handle(self, event: Event, now_ns: int) -> list[Effect]:
        self.heard.append(event)
        if len(self.heard) == 1:
            raise RuntimeError("a mistake")
        return []

    def next_deadline(self) -> None:
        return None


def test_what_is_told_after_a_crash_waits_for_the_recovery() -> None:
    """The end of a READ over which it has crashed is fed again then: nobody would ever tell it a second time."""
    actor, core, woken = object.__new__(PeerActor), Core(), list[bool]()
    vars(actor).update(
        core=core,
        _key=PeerKey("prefill", (1, 1, 1)),
        _context=SimpleNamespace(
            clock=SimpleNamespace(now_ns=lambda: 0), recorder=SimpleNamespace(catch_up=lambda: None)
        ),
        _inbox=deque(),
        _to_be_said=deque(),
        _unverified={},
        _executors={},
        _attention=SimpleNamespace(set=lambda: woken.append(True)),
        _in_hand=None,
        _crash=None,
        _is_running=True,
        _is_at_work=False,
    )
    ended = ReadEnded(request_id="r", read=0, connection=1, ended_ns=0)
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
    actor._hear_all()
    assert core.heard[3:] == [lost]
