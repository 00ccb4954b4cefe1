"""What a requester makes of what its monitor tells: of one connection that has ended, or of two after each other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import zmq

from connector.ports.side_channel import ConnectionEnded
from connector.ports.zmq_bridge import ZmqRequester, monitor, requester
from connector.ports.zmq_bridge.frames import Message
from connector.ports.zmq_bridge.monitor import Monitor

REPLY = Message(frames=(b"", b"here"), is_whole=True)


async def no_news() -> None:
    await trio.lowlevel.checkpoint()


def awaited(patch: pytest.MonkeyPatch, arriving: list[Message | None], **told: bool) -> Message | None:
    """`arriving`: what has come to the socket by the time at which the monitor tells, from one time to the next."""
    looks, in_socket = iter(arriving), list[Message | None]()
    patch.setattr(requester, "receive_bounded", lambda *_: in_socket.pop() if in_socket else None)
    said = {"connected": True, "greeted": True, "connection_failed": False, "refused": False, "disconnected": True}
    news: Any = SimpleNamespace(catch_up=lambda: in_socket.append(next(looks)), until_news=no_news, **said | told)
    asking = ZmqRequester(cast(Any, None), "127.0.0.1", 1)

    async def main() -> Message | None:
        with trio.fail_after(5):
            return await asking._await_reply("127.0.0.1", cast(Any, None), news)

    return trio.run(main)


def test_a_reply_that_came_just_before_the_end_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert awaited(monkeypatch, [REPLY], ended_after_greeting=True) == REPLY


def test_a_connection_that_ended_without_a_reply_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConnectionEnded):
        awaited(monkeypatch, [None], ended_after_greeting=True)


def test_a_question_that_goes_out_over_the_next_connection_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one ended before it had greeted, and both were told of at once."""
    assert awaited(monkeypatch, [None, None, REPLY], ended_after_greeting=False) == REPLY


@pytest.mark.parametrize(
    ("events", "has_ended"),
    [
        ([zmq.EVENT_CONNECTED, zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED], True),
        ([zmq.EVENT_CONNECTED, zmq.EVENT_DISCONNECTED, zmq.EVENT_CONNECTED, zmq.EVENT_HANDSHAKE_SUCCEEDED], False),
        ([zmq.EVENT_CONNECTED, zmq.EVENT_HANDSHAKE_SUCCEEDED], False),
    ],
    ids=["greeted and ended", "ended, and the next one greets", "greeted"],
)
def test_which_of_several_connections_has_ended(
    events: list[int], has_ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = list(events)

    def receive(_: int) -> int:
        if not left:
            raise zmq.Again
        return left.pop(0)

    watch = Monitor.__new__(Monitor)
    watch._events = cast(Any, SimpleNamespace(recv_multipart=receive))
    watch.connection_failed = watch.connected = watch.greeted = watch.refused = False
    watch.disconnected = watch.ended_after_greeting = False
    monkeypatch.setattr(monitor, "parse_monitor_message", lambda event: {"event": event, "value": 7})
    watch.catch_up()
    assert watch.ended_after_greeting is has_ended
