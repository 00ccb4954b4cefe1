"""A connection to a listener, for as long as both ends want it.

A link's socket would try to connect again after the end of its connection. It is set to do so after a long time, and
closed long before. (libzmq can also be told never to try again, but then it throws away what has arrived.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import trio
import zmq

from connector.ports.side_channel import AccessRefused, LinkEnded
from connector.ports.zmq_bridge.frames import Socket, receive_bounded, wire_bytes
from connector.ports.zmq_bridge.monitor import Monitor
from connector.ports.zmq_bridge.refusals import ENDED, ENDLESS, NOT_LET_IN, REFUSED

if TYPE_CHECKING:
    from connector.ports.zmq_bridge.channel import ZmqSideChannel

LINK_FRAME_BYTES_MAX = (2 << 20) + (1 << 16)
LINK_FRAMES_MAX = 4
"""What a link takes, the delimiter included. The largest answer of a peer is one frame (`ANSWER_BYTES_MAX` of
`connector/wire/control.py` and of `inspection.py`); the rest is room for what encryption adds."""

LINK_WAITING_MAX = 4
"""Messages that wait in a link to be taken; libzmq reads no further ones meanwhile."""

LINK_UNFINISHED_BYTES_MAX = (LINK_WAITING_MAX + 1) * LINK_FRAME_BYTES_MAX + (1 << 20)
"""What a link may have received beyond the messages that were taken: those that wait, the one that comes, and what the
kernel keeps. One frame of an answer is large, and no more."""

LINK_QUEUED_MAX = 1000
"""Messages that wait in a link for a connection, or for a peer that does not read."""

LINK_RECONNECT_SECONDS = 24 * 3600
"""See the text of this module."""


class ZmqLink:
    """One connection to a listener. Made by `ZmqSideChannel.open_link`. Implements `Link`."""

    def __init__(
        self, channel: ZmqSideChannel, host: str, port: int, dealer: Socket, monitor: Monitor, *, is_encrypted: bool
    ) -> None:
        self._channel = channel
        self._is_encrypted = is_encrypted
        self._host = host
        self._port = port
        self._dealer = dealer
        self._monitor = monitor
        self._arrived: deque[tuple[bytes, ...]] = deque()
        """What had arrived when the link was lost."""
        self._lost: str | None = None
        """Why the link is lost; its sockets are closed then."""
        self._is_refused = False
        """It is lost because the other end has not let it in."""
        self._closed = False
        self._receiving = False
        self._parked: trio.CancelScope | None = None
        # On the wire, of the messages that were taken.
        self._finished_bytes = 0

    def send(self, frames: Sequence[bytes]) -> bool:
        if self._closed:
            raise trio.ClosedResourceError("this link is closed")
        self._look_at_connection()
        if self._lost is not None:
            return False
        try:
            self._dealer.send_multipart([b"", *frames], zmq.NOBLOCK)
            sent = True
        except zmq.Again:
            sent = False
        if self._parked is not None and int(self._dealer.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._parked.cancel()
        return sent

    async def receive(self) -> tuple[bytes, ...]:
        if self._receiving:
            raise trio.BusyResourceError("another task is receiving from this link")
        self._receiving = True
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
            frames = self._take()
            if frames is not None:
                await trio.lowlevel.cancel_shielded_checkpoint()
                return frames
            while frames is None:
                with trio.CancelScope() as self._parked:
                    await self._monitor.until_news()
                self._parked = None
                frames = self._take()
            return frames
        finally:
            self._receiving = False
            self._parked = None

    def _take(self) -> tuple[bytes, ...] | None:
        """The next message, without waiting; None when there is none now."""
        if self._closed:
            raise trio.ClosedResourceError("this link is closed")
        self._look_at_connection()
        if self._lost is None:
            message = receive_bounded(self._dealer, LINK_FRAMES_MAX, LINK_FRAME_BYTES_MAX)
            if message is None:
                return None
            self._finished_bytes += sum(wire_bytes(len(each), self._is_encrypted) for each in message.frames)
            if message.is_delimited:
                return message.frames[1:]
            self._lose("what the peer sent is not a delimited message within bounds")
        if self._arrived:
            return self._arrived.popleft()
        if self._is_refused:
            raise AccessRefused(self._host, self._port, NOT_LET_IN)
        raise LinkEnded(self._host, self._port, self._lost or "")

    def _look_at_connection(self) -> None:
        """Notice the end of the connection."""
        if self._lost is not None:
            return
        self._monitor.catch_up()
        if self._monitor.connection_failed:
            self._lose(REFUSED)
        elif self._monitor.refused:
            self._is_refused = True
            self._lose(NOT_LET_IN)
        elif self._monitor.disconnected:
            # libzmq has told of all that arrived before it told of the end.
            while message := receive_bounded(self._dealer, LINK_FRAMES_MAX, LINK_FRAME_BYTES_MAX):
                if not message.is_delimited:
                    break
                self._arrived.append(message.frames[1:])
            self._lose("the peer has closed the connection" if self._monitor.greeted else ENDED)

    def measure(self) -> int:
        """How many bytes have come beyond the messages that were taken. Loses the connection if they are too many."""
        if self._lost is None and not self._closed and self._monitor.has_news:
            self._look_at_connection()
        if self._lost is not None or self._closed:
            return 0
        unfinished = max(0, self._monitor.received_bytes() - self._finished_bytes)
        if unfinished > LINK_UNFINISHED_BYTES_MAX:
            self.give_up()
        return unfinished

    def give_up(self) -> None:
        """What it receives has no end."""
        if self._lost is None and not self._closed:
            self._lose(ENDLESS)

    def _lose(self, error: str) -> None:
        self._lost = error
        self._close_sockets()

    def _close_sockets(self) -> None:
        """Close both sockets, which also wakes the task that is parked on them."""
        self._channel.forget(self)
        self._monitor.close()
        self._dealer.close()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if self._lost is None:
                self._close_sockets()
