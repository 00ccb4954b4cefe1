"""One question to one listener, and its answer.

* A requester is a DEALER that behaves like a REQ (empty delimiter frame first) for one exchange and is then closed. A
  REQ would keep a late reply out too, but cannot be abandoned half way and waits for ever if the peer was restarted.
* A server of something else mostly ends the connection when it sees ZMQ's greeting: DISCONNECTED comes before
  HANDSHAKE_SUCCEEDED, and another look at it shows no greeting. If nothing listens any more by then, a process has
  ended that the kernel had accepted a connection for. Others wait for the end of a line, which the greeting has not, or
  say something themselves that libzmq takes for the beginning of a message; this looks like a process that hangs. So
  when no greeting has come for a while, a second connection is made, which sends a line, and looks at what comes back.
* A requester with keys tries the accepted ones one after the other, beginning with the one that the address had last;
  of a fleet whose engines share a few keys that is a matter of milliseconds, and of one attempt later. A server that
  does not know the client's key says so. One that has another key than was expected, or none, ends the connection
  without a word, and so does a server of something else: when no key has fitted, another connection is made, which
  greets, and the greeting that comes back says what it is.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import trio
import zmq

from connector.ports.descriptors import is_descriptor_left
from connector.ports.side_channel import (
    AccessRefused,
    ConnectionEnded,
    DescriptorsExhausted,
    NotASideChannel,
    PortRefused,
    Reached,
    without_socket,
)
from connector.ports.zmq_bridge.frames import Message, Socket, endpoint, receive_bounded
from connector.ports.zmq_bridge.monitor import Monitor
from connector.ports.zmq_bridge.refusals import (
    ENDED,
    ENDLESS,
    NO_KEY_HERE,
    NO_KEY_THERE,
    NOT_LET_IN,
    OTHER_KEY,
    REFUSED,
    UNANSWERED,
)

if TYPE_CHECKING:
    from connector.ports.zmq_bridge.channel import ZmqSideChannel

REPLY_FRAME_BYTES_MAX = 16 << 20
REPLY_FRAMES_MAX = 8
"""What a requester takes, the delimiter included. The largest reply of a peer is a payload (`PAYLOAD_BYTES_MAX` of
`connector/wire/handshake.py`) and a clock; the rest is room for what encryption adds."""

REPLY_UNFINISHED_BYTES_MAX = REPLY_FRAME_BYTES_MAX + (1 << 20)
"""What a requester may have received without a whole message: one frame of a reply is large, and no more."""

GREETING_SECONDS = 1.0
"""How long a server may take to greet before something else is thought to listen there, and then to show what it is."""

GREETING_FIRST_BYTE = b"\xff"
"""The first byte that each end of a ZMQ connection sends."""

A_LINE = b"GET / HTTP/1.0\r\n\r\n"
"""What nearly every server answers that waits for a line."""

LOOKED_AT_BYTES = 40

OWN_GREETING = b"\xff" + bytes(8) + b"\x7f\x03"
"""The beginning of one, as far as it takes to be answered by a whole one; it names no mechanism yet."""
GREETING_BYTES = 64
MECHANISM_AT = slice(12, 32)


class ZmqRequester:
    """One exchange with one listener. Made by `ZmqSideChannel.connect`."""

    def __init__(self, channel: ZmqSideChannel, host: str, port: int) -> None:
        self._channel = channel
        self._host = host
        self._port = port
        self._socket: Socket | None = None
        self._monitor: Monitor | None = None
        # By the last attempt; while there is one its monitor knows.
        self._reached = Reached.NOTHING
        self._asked = False
        self._closed = False
        self._is_endless = False
        self._asking: trio.CancelScope | None = None

    @property
    def reached(self) -> Reached:
        return self._reached if self._monitor is None else self._monitor.reached

    async def ask(self, frames: Sequence[bytes]) -> tuple[bytes, ...]:
        """Raises NameNotResolved, PortRefused, ConnectionEnded and NotASideChannel; SideChannelError when no socket can
        be had."""
        if self._closed:
            raise trio.ClosedResourceError("this requester is closed")
        if self._asked:
            raise RuntimeError("a requester serves one exchange; connect again")
        self._asked = True
        try:
            with trio.CancelScope() as self._asking:
                return await self._exchange(frames)
            raise trio.ClosedResourceError("this requester was closed while it waited")
        except trio.ClosedResourceError:
            if self._is_endless:
                raise self._something_else(ENDLESS) from None
            raise
        finally:
            self.close()

    async def _exchange(self, frames: Sequence[bytes]) -> tuple[bytes, ...]:
        address = await self._channel.numeric_address(self._host, self._port)
        for key in await self._channel.keys_to_try(self._host, self._port):
            reply = await self._attempt(address, frames, key)
            if reply is not None:
                self._channel.remember_key(self._host, self._port, key)
                return reply
        mechanism = await self._look_at_greeting(address)
        if mechanism == b"NULL" and self._channel.may_be_insecure:
            reply = await self._attempt(address, frames, None)
            if reply is not None:
                self._channel.remember_key(self._host, self._port, None)
                return reply
        keys = self._channel.access.keys
        if mechanism == b"CURVE":
            error = NO_KEY_HERE if keys is None else OTHER_KEY.format(count=len(keys.accepted))
        elif keys is not None and not self._channel.may_be_insecure:
            error = NO_KEY_THERE
        else:
            raise PortRefused(self._host, self._port, ENDED)
        raise AccessRefused(self._host, self._port, error)

    async def _attempt(self, address: str, frames: Sequence[bytes], key: bytes | None) -> tuple[bytes, ...] | None:
        """Ask a server that has this key; None: it has another one, or is something else."""
        if self._closed:  # while something was waited for that cannot be cancelled
            raise trio.ClosedResourceError("this requester was closed while it waited")
        self._close_sockets()
        dealer, monitor = self._send(address, frames, key)
        reply = await self._await_reply(address, dealer, monitor)
        if reply is None:
            await trio.lowlevel.checkpoint()
            return None
        await trio.lowlevel.cancel_shielded_checkpoint()
        if not reply.is_delimited:
            raise self._something_else("what came back is not a delimited reply within bounds")
        return reply.frames[1:]

    def _send(self, address: str, frames: Sequence[bytes], key: bytes | None) -> tuple[Socket, Monitor]:
        """Begin to connect, and to send. Raises SideChannelError when no socket can be had."""
        try:
            dealer = self._socket = self._channel.make_client(address, key)
            dealer.setsockopt(zmq.MAXMSGSIZE, REPLY_FRAME_BYTES_MAX)
            dealer.setsockopt(zmq.RCVHWM, 1)  # it takes one message
            dealer.setsockopt(zmq.HANDSHAKE_IVL, 0)  # how long to wait for a greeting is our own business
            monitor = self._monitor = self._channel.monitor(dealer)
            dealer.connect(endpoint(address, self._port))
            # The server may have ended the connection before anything could be sent. The monitor tells why.
            with contextlib.suppress(zmq.Again):
                dealer.send_multipart([b"", *frames], zmq.NOBLOCK)
        except (zmq.ZMQError, OSError) as error:
            raise without_socket(self._host, self._port, error) from error
        return dealer, monitor

    async def _await_reply(self, address: str, dealer: Socket, monitor: Monitor) -> Message | None:
        """None: it has ended the connection instead of greeting."""
        has_looked = False
        while True:
            # In this order: libzmq hands out what has arrived before it tells of the end of the connection.
            monitor.catch_up()
            reply = receive_bounded(dealer, REPLY_FRAMES_MAX, REPLY_FRAME_BYTES_MAX)
            if reply is not None:
                return reply
            if monitor.connection_failed:
                raise PortRefused(self._host, self._port, REFUSED)
            if monitor.refused:
                raise AccessRefused(self._host, self._port, NOT_LET_IN)
            if monitor.ended_after_greeting:
                # libzmq connects again, and does not ask again what it has sent.
                raise ConnectionEnded(self._host, self._port, UNANSWERED)
            if monitor.disconnected and not monitor.greeted:
                return None
            is_ungreeted = monitor.connected and not monitor.greeted
            with trio.move_on_after(GREETING_SECONDS if is_ungreeted and not has_looked else math.inf) as patience:
                await monitor.until_news()
            if patience.cancelled_caught:
                has_looked = True
                await self._look_who_listens(address)
            if self._closed:
                raise trio.ClosedResourceError("this requester was closed while it waited")

    async def _look_who_listens(self, address: str) -> None:
        """Raises NotASideChannel when it shows itself to be something else. A process that hangs shows nothing."""
        said = GREETING_FIRST_BYTE
        with trio.move_on_after(GREETING_SECONDS), contextlib.suppress(OSError, trio.BrokenResourceError):
            async with await trio.open_tcp_stream(address, self._port) as stream:
                await stream.send_all(A_LINE)
                said = await stream.receive_some(LOOKED_AT_BYTES)
        if not said.startswith(GREETING_FIRST_BYTE):
            raise self._something_else(f"it answers a line of text with {said!r}")

    async def _look_at_greeting(self, address: str) -> bytes:
        """The mechanism of security that the server names in its greeting.

        Raises NotASideChannel when it does not greet, PortRefused when nothing listens any more, DescriptorsExhausted,
        and ConnectionEnded when nothing is to be learned: it had ended the connection, and says nothing now.
        """
        said = b""
        try:
            with trio.move_on_after(GREETING_SECONDS) as patience:
                # Who stops listening resets whoever has just come, and refuses the next: so a second time.
                for _ in range(2):
                    async with await trio.open_tcp_stream(address, self._port) as stream:
                        with contextlib.suppress(trio.BrokenResourceError):
                            await stream.send_all(OWN_GREETING)
                            while len(said) < GREETING_BYTES and (more := await stream.receive_some(GREETING_BYTES)):
                                said += more
                    if said:
                        break
        except OSError as error:  # of trio, which does not say of which kind
            if not is_descriptor_left():
                raise DescriptorsExhausted(self._host, self._port, str(error)) from error
            raise PortRefused(self._host, self._port, REFUSED) from error
        if patience.cancelled_caught and not said:  # a process that hangs or stands still shows nothing
            raise ConnectionEnded(self._host, self._port, ENDED)
        if not said.startswith(GREETING_FIRST_BYTE):
            raise self._something_else(
                "it closes the connection instead of greeting as ZMQ does, or has shut this address out, or is a proxy"
                " before an engine that has ended"
            )
        return said[MECHANISM_AT].rstrip(b"\0")

    def _something_else(self, error: str) -> NotASideChannel:
        return NotASideChannel(self._host, self._port, error)

    def measure(self) -> int:
        """How many bytes have come without a whole message. Gives up if they are too many."""
        received = 0 if self._monitor is None else self._monitor.received_bytes()
        if received > REPLY_UNFINISHED_BYTES_MAX:
            self.give_up()
        return received

    def give_up(self) -> None:
        """What it receives has no end."""
        self._is_endless = True
        self.close()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._channel.forget(self)
            self._close_sockets()
            if self._asking is not None:
                self._asking.cancel()  # it may be waiting for a name server instead

    def _close_sockets(self) -> None:
        monitor, self._monitor = self._monitor, None
        socket, self._socket = self._socket, None
        if monitor is not None:
            self._reached = monitor.reached
            # libzmq tries to connect again and again without a word; what it has is closed from here on.
            if self._reached is Reached.ADDRESS and not is_descriptor_left():
                self._reached = Reached.NO_DESCRIPTOR
            monitor.close()
        if socket is not None:
            socket.close()
