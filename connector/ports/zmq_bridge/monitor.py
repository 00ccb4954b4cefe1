"""What becomes of a connection, as libzmq tells; and the wait for that and for messages together.

libzmq tells through a second socket, on which it sends an event for each change. A failed attempt to connect is the
event CLOSED, the end of a connection is DISCONNECTED; neither says why. An epoll of the descriptors of both sockets is
itself a descriptor, and one task can wait for it without others.
"""

from __future__ import annotations

import contextlib
import select

import trio
import zmq
from zmq.utils.monitor import parse_monitor_message

from connector.ports.gate import NOT_ALLOWED
from connector.ports.side_channel import Reached
from connector.ports.tcp import received_bytes
from connector.ports.zmq_bridge.frames import Socket

_WATCHED_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
)


class Monitor:
    """What libzmq says of the connections of one socket, which connects to one address; and the wait for both."""

    def __init__(self, watched: Socket, events: Socket, address: str) -> None:
        self._watched = watched
        self._events = events
        self.connection_failed = False
        """An attempt to connect has failed, and none had succeeded before. libzmq connects again after the end of a
        connection, and fails where the listener has closed; what has become of that connection is what counts."""
        self.connected = False
        """A connection was accepted."""
        self.greeted = False
        """The other end speaks ZMQ."""
        self.refused = False
        """The other end has said that it does not let us in."""
        self.disconnected = False
        """A connection has ended. libzmq connects again, so what is told here may be of several."""
        self.ended_after_greeting = False
        """One whose other end had greeted has."""
        self._descriptor: int | None = None
        try:
            watched.monitor(address, _WATCHED_EVENTS)
            events.connect(address)
            self._both = select.epoll(2)
            for each in (watched, events):
                self._both.register(each.FD, select.EPOLLIN)
        except (zmq.ZMQError, OSError):
            events.close()
            raise

    @property
    def reached(self) -> Reached:
        """How far what was sent has come."""
        if self.greeted:
            return Reached.LISTENER
        return Reached.PORT if self.connected else Reached.ADDRESS

    async def until_news(self) -> None:
        """Wait until there may be something to look at in the watched socket or here, or this is closed."""
        if not self._both.closed:
            with contextlib.suppress(trio.ClosedResourceError):
                await trio.lowlevel.wait_readable(self._both.fileno())

    @property
    def has_news(self) -> bool:
        """Whether there may be something to look at. To ask costs less than to look."""
        return bool(self._both.poll(0))

    def received_bytes(self) -> int:
        """Over the connection that `catch_up` has told of. Takes no event in: a task that waits for one would miss
        it."""
        return 0 if self._descriptor is None else received_bytes(self._descriptor)

    def catch_up(self) -> None:
        """Take in all events up to now. Look at the attributes afterwards: the events are used up."""
        while True:
            try:
                message = self._events.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            parsed = parse_monitor_message(message)
            event = parsed["event"]
            if event == zmq.EVENT_CONNECTED:
                self._descriptor = parsed["value"]
            elif event in (zmq.EVENT_CLOSED, zmq.EVENT_DISCONNECTED):
                self._descriptor = None
            self.connection_failed |= event == zmq.EVENT_CLOSED and not self.connected
            self.connected |= event == zmq.EVENT_CONNECTED
            self.greeted |= event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self.refused |= event == zmq.EVENT_HANDSHAKE_FAILED_AUTH and parsed["value"] == int(NOT_ALLOWED)
            self.disconnected |= event == zmq.EVENT_DISCONNECTED
            self.ended_after_greeting |= event == zmq.EVENT_DISCONNECTED and self.greeted

    def close(self) -> None:
        """Before the watched socket is closed. Wakes the task that waits for news."""
        trio.lowlevel.notify_closing(self._both.fileno())
        self._both.close()
        self._watched.disable_monitor()
        self._events.close()
