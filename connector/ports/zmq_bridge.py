"""The real side channel: ZMQ sockets in a trio loop. Implements `ports.side_channel`.

Design
* pyzmq has no trio support, so a socket is watched through its `zmq.FD`. libzmq makes that descriptor readable only
  when its state changes from "nothing to look at", and any call on the socket may use the change up. Hence two rules:
  (1) try the operation without blocking first and park only when it says EAGAIN; (2) after any other call on the same
  socket read EVENTS, and wake the parked task if there is something to receive. A listener receives in one task and
  replies from any, so `reply` follows rule 2 by cancelling the scope that `receive` parks in.
* A message is taken in one go, without a checkpoint, so a cancelled receive takes nothing.
* What becomes of a connection is known to libzmq only. It tells through a monitor: a second socket, on which it sends
  an event for each change. A requester and a link wait for both at once: an epoll of their two descriptors is itself a
  descriptor, and one task can wait for it without others. A failed attempt to connect is the event CLOSED, the end of a
  connection is DISCONNECTED; neither says why.
* A server of something else mostly ends the connection when it sees ZMQ's greeting: DISCONNECTED comes before
  HANDSHAKE_SUCCEEDED, and another look at it shows no greeting. If nobody listens any more by then, a process has ended
  that the kernel had accepted a connection for. Others wait for the end of a line, which the greeting has not, or say
  something themselves that libzmq takes for the beginning of a message; this looks like a process that hangs. So when
  no greeting has come for a while, a second connection is made, which sends a line, and looks at what comes back.
* A link's socket would try to connect again after the end of its connection. It is set to do so after a long time, and
  closed long before. (libzmq can also be told never to try again, but then it throws away what has arrived.)
* A requester is a DEALER that behaves like a REQ (empty delimiter frame first) for one exchange and is then closed. A
  REQ would keep a late reply out too, but cannot be abandoned half way and waits for ever if the peer was restarted.
* Host names are looked up here (in trio's worker thread) and not by libzmq: its I/O thread would stop for all peers
  while a name server does not answer. ZMQ only ever sees numeric addresses to connect to.
* Who may connect is for the gate (`connector/ports/gate.py`). A client with keys has to know the key of the server
  before it connects. A link is told it. A requester tries the accepted keys one after the other, beginning with the one
  that the address had last; of a fleet whose engines share a few keys that is a matter of milliseconds, and of one
  attempt later. A server that does not know the client's key says so. One that has another key than was expected, or
  none, ends the connection without a word, and so does a server of something else: when no key has fitted, another
  connection is made, which greets, and the greeting that comes back says what it is.
* Bounds: frames larger than `frame_bytes_max` are dropped here and counted; those of more than twice that make libzmq
  drop the connection before it holds them in memory (not counted: they never arrive). Bytes that are not ZMTP end their
  connection inside libzmq as well, and so does a greeting that takes too long.
* A listener hands out messages of all connections in turn, and libzmq reads no more of a connection while some of its
  messages wait. How many connections there may be, what each may cost, and that a message must end, is for the doorman
  (`connector/ports/doorman.py`).
* libzmq has no limit to the frames of a message, and a ROUTER hands out nothing else before the last one was taken,
  also when the connection has ended. So a message of too many frames is dropped in pieces: no other can be read
  meanwhile, but other tasks go on. Whoever sent it is shut out for a while. How many frames there can be is bounded by
  the bytes that may come: an empty frame has two of them, and takes 64 in memory.
* A client is no safer than a listener: where it connects to is what a request says. Of a message of too many frames it
  takes no more than it may have, and closes its socket. libzmq keeps the parts of a message until the last one has
  come, and all whole messages that nobody has taken; so few may wait, and a task of the channel looks at all clients
  now and then. One that has received more beyond whole messages than may wait is lost (a link), or has met something
  else than a side channel (a requester). So is the largest one when all together have received too much.
* Replies are queued for each connection, and few: who reads none is cut off by the kernel after a while. A large reply
  that is sent to many is kept once.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import re
import select
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeAlias

import msgspec
import trio
import zmq
from zmq.utils.monitor import parse_monitor_message

from connector.addresses import is_ip_address, join_address
from connector.observe.log import log_crash
from connector.ports.doorman import Doorman, connections_max
from connector.ports.gate import ANYBODY, NOT_ALLOWED, Access, Gate
from connector.ports.host_names import HostNames
from connector.ports.side_channel import (
    FRAMES_TOO_MANY_MAX,
    ConnectionRefused,
    LinkLost,
    ListenerCounts,
    NotAllowed,
    NotASideChannel,
    PortUnavailable,
    Reached,
    ReplyAddress,
    Request,
    SideChannelError,
)
from connector.ports.tcp import received_bytes
from statemachine.admission import AdmissionLimits

Socket: TypeAlias = "zmq.Socket[bytes]"

SOCKETS_MAX = 3 * 8192
"""Sockets at once (libzmq's own default is 1023): every peer may be shaking hands at the same time, and each requester
or link has three (its own, and the two ends of its monitor)."""

REPLY_FRAME_BYTES_MAX = 16 << 20
REPLY_FRAMES_MAX = 8
"""What a requester takes, the delimiter included. The largest reply of a peer is a payload (`PAYLOAD_BYTES_MAX` of
`connector/wire/handshake.py`) and a clock; the rest is room for what encryption adds."""

REPLY_UNFINISHED_BYTES_MAX = REPLY_FRAME_BYTES_MAX + (1 << 20)
"""What a requester may have received without a whole message: one frame of a reply is large, and no more."""

LINK_FRAME_BYTES_MAX = (2 << 20) + (1 << 16)
LINK_FRAMES_MAX = 4
"""What a link takes, the delimiter included. The largest answer of a peer is one frame (`ANSWER_BYTES_MAX` of
`connector/wire/control.py` and of `inspection.py`); the rest is room for what encryption adds."""

LINK_WAITING_MAX = 4
"""Messages that wait in a link to be taken; libzmq reads no further ones meanwhile."""

LINK_UNFINISHED_BYTES_MAX = (LINK_WAITING_MAX + 1) * LINK_FRAME_BYTES_MAX + (1 << 20)
"""What a link may have received beyond the messages that were taken: those that wait, the one that comes, and what the
kernel keeps. One frame of an answer is large, and no more."""

CLIENTS_UNFINISHED_BYTES_MAX = 24 << 20
"""What all clients of a process together may have received without whole messages, for longer than it takes to look at
them twice. These are bytes on the wire: of empty frames libzmq keeps 32 times as much (64 bytes for two). The largest
reply fits, and nothing has to be lost for others that come at the same time: hardly any takes so long."""

CLIENTS_MEASURED_EVERY_SECONDS = 0.25
CLIENTS_MEASURED_AT_A_TIME = 32
"""Before other tasks have their turn: there is a link for each rank of each engine that is connected."""

LINK_QUEUED_MAX = 1000
"""Messages that wait in a link for a connection, or for a peer that does not read."""

LINK_RECONNECT_SECONDS = 24 * 3600
"""See the module's text."""

OVERSIZE_FACTOR = 2
"""A listener reads frames up to this many times its limit, to drop and count them; larger ones end the connection."""

REQUESTS_QUEUED_MAX = 8
"""Messages of one connection that wait in a listener; libzmq reads no further ones meanwhile."""

REPLIES_QUEUED_MAX = 256
"""Replies that wait for one slow requester before further ones are dropped."""

UNREAD_SECONDS = 10
"""So long a requester may leave replies unread before its connection is given up."""

GREETING_LIMIT_SECONDS = 10
"""So long a connection may take to greet a listener."""

BACKLOG = 1024
"""Connections that the kernel keeps for a listener until they are accepted."""

RECEIVE_BUFFER_BYTES = 256 * 1024
"""Of one connection of a listener or of a link, in the kernel, which may take twice as much."""
UNFINISHED_SLACK_BYTES = 64 * 1024
"""What a connection of a listener may have received beyond the largest message, before it is in the middle of one that
is too large: frames and encryption have headers."""

DROPPED_UNITS, DROPPED_FRAME_UNITS = 4, 1
"""What a message out of bounds costs its sender, and each frame of it that is dropped; see `Listener.charge`."""

NEWCOMERS = "newcomers"
"""Who are not connected yet, and whose addresses are not known."""

DROPPED_AT_A_TIME = 512
"""Frames that a listener drops before other tasks have their turn: a millisecond or so. It hears nobody before the last
frame of a message was dropped, so turns must not be much shorter either."""
FRAMES_PER_MESSAGE = 8
"""To look at a message costs as much as to drop so many frames."""

SHARED_FRAME_BYTES_MIN = 64 * 1024
SHARED_FRAMES_MAX = 16
"""Frames of replies that are so large are kept for the next reply that is equal, so many of them."""

KEEPALIVE_IDLE_SECONDS, KEEPALIVE_PROBES, KEEPALIVE_PROBE_SECONDS = 60, 3, 10
"""Whose machine has vanished without a word is noticed by the kernel after this time of silence and so many probes. At
both ends of a connection: a decode engine that wants nothing says nothing either."""

UNACKNOWLEDGED_SECONDS = 30
"""Where something was sent the kernel does not probe: it sends it again, by itself for a quarter of an hour. What the
other machine has not acknowledged for so long ends the connection. A lease that nobody renews is over then, too."""

GREETING_SECONDS = 1.0
"""How long a server may take to greet before something else is thought to listen there, and then to show what it is."""

GREETING_FIRST_BYTE = b"\xff"
"""Of every ZMQ connection in both directions."""

A_LINE = b"GET / HTTP/1.0\r\n\r\n"
"""What nearly every server answers that waits for a line."""

LOOKED_AT_BYTES = 40

OWN_GREETING = b"\xff" + bytes(8) + b"\x7f\x03"
"""The beginning of one, as far as it takes to be answered by a whole one; it names no mechanism yet."""
GREETING_BYTES = 64
MECHANISM_AT = slice(12, 32)

SHORT_BODY_BYTES_MAX, SHORT_HEADER_BYTES, LONG_HEADER_BYTES = 255, 2, 9
"""Of a frame of ZMTP: flags, and the length in a byte or in eight."""
ENCRYPTION_BYTES = 33
"""What CURVE adds to a frame: the name of the command, a nonce, a code of authentication, the flags."""

ADDRESSES_REMEMBERED_MAX = 4096
"""With the key that each had last."""

REFUSED = "the connection was refused, or there is no way to the host"
ENDED = "the connection was ended before anything was said"
ENDLESS = "it sends a message without end"
NOT_LET_IN = (
    "it does not let this engine in: our address is not in its allowed_peers, or our public key not among its accepted "
    "keys"
)
NOT_A_PEER = "the address {address} is not in allowed_peers of this engine"
NO_KEY_HERE = "it speaks to those only who have a key, and this engine has none (curve_directory)"
NO_KEY_THERE = "it has no key, and this engine speaks to those only who have one (allow_insecure_peers)"
OTHER_KEY = "it has a key that is not among the {count} accepted keys of this engine"

_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252})")


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
        """Raises NameNotResolved, ConnectionRefused and NotASideChannel; SideChannelError when no socket can be had."""
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
            raise ConnectionRefused(self._host, self._port, ENDED)
        raise NotAllowed(self._host, self._port, error)

    async def _attempt(self, address: str, frames: Sequence[bytes], key: bytes | None) -> tuple[bytes, ...] | None:
        """Ask a server that has this key; None: it has another one, or is something else."""
        if self._closed:  # while something was waited for that cannot be cancelled
            raise trio.ClosedResourceError("this requester was closed while it waited")
        self._close_sockets()
        try:
            dealer = self._socket = self._channel.make_client(address, key)
            dealer.setsockopt(zmq.MAXMSGSIZE, REPLY_FRAME_BYTES_MAX)
            dealer.setsockopt(zmq.RCVHWM, 1)  # it takes one message
            dealer.setsockopt(zmq.HANDSHAKE_IVL, 0)  # how long to wait for a greeting is our own business
            monitor = self._monitor = self._channel.monitor(dealer)
            dealer.connect(_endpoint(address, self._port))
            # The server may have ended the connection before anything could be sent. The monitor tells why.
            with contextlib.suppress(zmq.Again):
                dealer.send_multipart([b"", *frames], zmq.NOBLOCK)
        except (zmq.ZMQError, OSError) as error:
            raise SideChannelError(self._host, self._port, str(error)) from error
        has_looked = False
        while True:
            reply = _receive_bounded(dealer, REPLY_FRAMES_MAX, REPLY_FRAME_BYTES_MAX)
            if reply is not None:
                break
            monitor.catch_up()
            if monitor.connection_failed:
                raise ConnectionRefused(self._host, self._port, REFUSED)
            if monitor.refused:
                raise NotAllowed(self._host, self._port, NOT_LET_IN)
            if monitor.disconnected and not monitor.greeted:
                await trio.lowlevel.checkpoint()
                return None
            is_ungreeted = monitor.connected and not monitor.greeted
            with trio.move_on_after(GREETING_SECONDS if is_ungreeted and not has_looked else math.inf) as patience:
                await monitor.until_news()
            if patience.cancelled_caught:
                has_looked = True
                await self._look_who_listens(address)
            if self._closed:
                raise trio.ClosedResourceError("this requester was closed while it waited")
        await trio.lowlevel.cancel_shielded_checkpoint()
        if not reply.is_delimited:
            raise self._something_else("what came back is not a delimited reply within bounds")
        return reply.frames[1:]

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

        Raises NotASideChannel when it does not greet, and ConnectionRefused when nobody listens any more.
        """
        said = b""
        try:
            with trio.move_on_after(GREETING_SECONDS):
                async with await trio.open_tcp_stream(address, self._port) as stream:
                    with contextlib.suppress(trio.BrokenResourceError):
                        await stream.send_all(OWN_GREETING)
                        while len(said) < GREETING_BYTES and (more := await stream.receive_some(GREETING_BYTES)):
                            said += more
        except OSError as error:
            raise ConnectionRefused(self._host, self._port, REFUSED) from error
        if not said.startswith(GREETING_FIRST_BYTE):
            raise self._something_else(
                "it closes the connection instead of greeting as ZMQ does, or has shut this address out"
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
            monitor.close()
        if socket is not None:
            socket.close()


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
            message = _receive_bounded(self._dealer, LINK_FRAMES_MAX, LINK_FRAME_BYTES_MAX)
            if message is None:
                return None
            self._finished_bytes += sum(wire_bytes(len(each), self._is_encrypted) for each in message.frames)
            if message.is_delimited:
                return message.frames[1:]
            self._lose("what the peer sent is not a delimited message within bounds")
        if self._arrived:
            return self._arrived.popleft()
        if self._is_refused:
            raise NotAllowed(self._host, self._port, NOT_LET_IN)
        raise LinkLost(self._host, self._port, self._lost or "")

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
            while message := _receive_bounded(self._dealer, LINK_FRAMES_MAX, LINK_FRAME_BYTES_MAX):
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
        """Also wakes the task that is parked on them."""
        self._channel.forget(self)
        self._monitor.close()
        self._dealer.close()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if self._lost is None:
                self._close_sockets()


class _Dropped:
    """A message that a listener is dropping."""

    __slots__ = ("first", "frames", "has_swamped", "sender", "wire_bytes")

    def __init__(self, sender: bytes, first: zmq.Frame, frames: int = 0, wire_bytes: int = 0) -> None:
        self.sender = sender
        # The frame that says whose it is.
        self.first = first
        # So many were taken, that one not counted, and so many bytes they had on the wire.
        self.frames = frames
        self.wire_bytes = wire_bytes
        # It has too many frames, and the doorman knows. Their bytes are of no more interest.
        self.has_swamped = False


class ZmqListener:
    """A bound ROUTER. Made by `ZmqSideChannel.listen`."""

    def __init__(
        self,
        channel: ZmqSideChannel,
        router: Socket,
        doorman: Doorman,
        unguard: Callable[[], None],
        frames_max: int,
        frame_bytes_max: int,
    ) -> None:
        self._channel = channel
        self._is_encrypted = channel.access.keys is not None
        self._unguard = unguard
        self._router = router
        self._doorman = doorman
        self._frames_max = frames_max
        self._frame_bytes_max = frame_bytes_max
        self._port = int(router.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])
        self._closed = False
        self._receiving = False
        self._parked: trio.CancelScope | None = None
        self._oversized_requests = 0
        self._undelimited_requests = 0
        self._dropped_replies = 0
        # Large frames of replies, the one that was sent last comes last.
        self._shared: OrderedDict[bytes, zmq.Frame] = OrderedDict()
        # Frames of it are still to come.
        self._dropping: _Dropped | None = None
        # Only so much was taken at a time.
        self._has_more = False

    @property
    def port(self) -> int:
        return self._port

    async def receive(self) -> Request:
        """One task at a time. Raises trio.ClosedResourceError once the listener is closed."""
        if self._receiving:
            raise trio.BusyResourceError("another task is receiving from this listener")
        self._receiving = True
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
            while True:
                request = self._take()
                if request is not None:
                    await trio.lowlevel.cancel_shielded_checkpoint()
                    return request
                if self._has_more:
                    await trio.lowlevel.checkpoint()
                else:
                    await self._park()
        finally:
            self._receiving = False

    async def _park(self) -> None:
        """Wait until there may be something to do: a descriptor says so, `reply` does, it is time, or it is closed."""
        with trio.CancelScope() as self._parked:
            with trio.move_on_after(self._doorman.seconds_to_look()):
                await trio.lowlevel.wait_readable(self._doorman.fileno())
        self._parked = None

    def _take(self) -> Request | None:
        """The next request within bounds, without waiting; None when there is none now, or `_has_more` to look at."""
        self._has_more = False
        if self._closed:
            raise trio.ClosedResourceError("this listener is closed")
        self._doorman.look(is_dropping=self._dropping is not None)
        frames_left = DROPPED_AT_A_TIME
        while frames_left > 0:
            if self._dropping is not None:
                frames_left -= self._drop(self._dropping, frames_left)
                continue
            try:
                first = self._router.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                self._doorman.none_waits()
                return None
            frames_left -= FRAMES_PER_MESSAGE
            identity = first.bytes
            if not self._doorman.hears(identity, first):
                self._dropping = _Dropped(identity, first)
                continue
            frames, oversized = self._receive_rest(identity, first)
            if len(frames) < 2 or frames[0] != b"":
                self._undelimited_requests += 1
            elif oversized:
                self._oversized_requests += 1
            else:
                return Request(identity, frames[1:])
            self._doorman.charge(identity, DROPPED_UNITS, understood=False)
        self._has_more = True
        return None

    def _receive_rest(self, identity: bytes, first: zmq.Frame) -> tuple[tuple[bytes, ...], bool]:
        """The frames of a message after the identity, and whether some are missing or were cut."""
        frames: list[bytes] = []
        oversized = False
        taken_bytes = 0
        while self._router.getsockopt(zmq.RCVMORE):
            if len(frames) > self._frames_max:
                self._dropping = _Dropped(identity, first, len(frames), taken_bytes)
                return tuple(frames), True
            frame = self._router.recv(zmq.NOBLOCK)
            taken_bytes += wire_bytes(len(frame), self._is_encrypted)
            is_large = len(frame) > self._frame_bytes_max
            oversized |= is_large
            frames.append(b"" if is_large else frame)
        self._doorman.taken(identity, taken_bytes)
        return tuple(frames), oversized

    def _drop(self, message: _Dropped, frames_max: int) -> int:
        """Up to so many frames of it; how many. They are there: libzmq delivers messages whole. Frames are neither
        copied nor asked for twice: of strangers there may be many."""
        dropped = 0
        has_more = bool(self._router.getsockopt(zmq.RCVMORE))
        while has_more and dropped < frames_max:
            frame = self._router.recv(zmq.NOBLOCK, copy=False)
            has_more = frame.more
            dropped += 1
            if not message.has_swamped:
                message.wire_bytes += wire_bytes(len(frame), self._is_encrypted)
        message.frames += dropped
        if message.frames > self._frames_max + 1 + FRAMES_TOO_MANY_MAX and not message.has_swamped:
            message.has_swamped = True
            self._doorman.swamped(message.sender, message.first)
        if not has_more:
            self._dropping = None
            if not message.has_swamped:
                self._doorman.taken(message.sender, message.wire_bytes)
                units = message.frames * DROPPED_FRAME_UNITS
                self._doorman.charge(message.sender, units, understood=False)
                if message.frames > self._frames_max + 1:
                    self._doorman.dropped_frames(message.sender, message.first, message.frames)
        return dropped

    def reply(self, address: ReplyAddress, frames: Sequence[bytes]) -> None:
        """Raises trio.ClosedResourceError once the listener is closed."""
        if self._closed:
            raise trio.ClosedResourceError("this listener is closed")
        try:
            self._router.send_multipart([address, b"", *map(self._shareable, frames)], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError:  # EHOSTUNREACH: the requester is gone. EAGAIN: it does not read.
            self._dropped_replies += 1
        if self._parked is not None and int(self._router.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._parked.cancel()

    def _shareable(self, frame: bytes) -> bytes | zmq.Frame:
        """In a form that costs no memory for each requester that it is queued for, if it is large."""
        if len(frame) < SHARED_FRAME_BYTES_MIN:
            return frame
        shared = self._shared.pop(frame, None) or zmq.Frame(frame, copy=True)
        self._shared[frame] = shared
        if len(self._shared) > SHARED_FRAMES_MAX:
            self._shared.popitem(last=False)
        return shared

    def charge(self, address: ReplyAddress, units: int, *, understood: bool = True) -> None:
        self._doorman.charge(address, units, understood=understood)

    def counts(self) -> ListenerCounts:
        return ListenerCounts(
            oversized_requests=self._oversized_requests,
            undelimited_requests=self._undelimited_requests,
            dropped_replies=self._dropped_replies,
            dropped_requests=self._doorman.dropped,
            cut_off=self._doorman.cut_off,
        )

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._channel.forget(self)
            trio.lowlevel.notify_closing(self._doorman.fileno())  # wakes the task that is parked on it
            self._unguard()
            self._doorman.close()
            self._router.close()


class ZmqSideChannel:
    """All side-channel sockets of a process, in one context with one I/O thread. Implements `SideChannel`.

    Args:
        access: who is let in, and where it connects to.
        on_refusal: told whom a listener has not let in, an address or NEWCOMERS, and in a sentence why.
    """

    def __init__(
        self, access: Access = ANYBODY, on_refusal: Callable[[str, str], None] = lambda stranger, sentence: None
    ) -> None:
        self.access = access
        self._on_refusal = on_refusal
        self._gate: Gate | None = None
        self._host_names = HostNames()
        # Of addresses that were reached last; None: it had none.
        self._keys: dict[tuple[str, int], bytes | None] = {}
        self._context: zmq.Context[Socket] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, SOCKETS_MAX)
        self._monitors = itertools.count()
        self._open: set[ZmqRequester | ZmqListener | ZmqLink] = set()
        self._is_measuring = False
        self._closed = False

    def connect(self, host: str, port: int) -> ZmqRequester:
        """A requester for (host, port); nothing is sent, and no name looked up, before it asks."""
        self._refuse_if_closed()
        _check_address(host, port, port_min=1)
        requester = ZmqRequester(self, host, port)
        self._open.add(requester)
        self._measure_clients()
        return requester

    @property
    def public_key(self) -> str | None:
        keys = self.access.keys
        return keys.public_key.decode() if keys is not None else None

    @property
    def may_be_insecure(self) -> bool:
        """Whether connections without a key may be made."""
        return self.access.keys is None or self.access.allows_insecure

    async def numeric_address(self, host: str, port: int) -> str:
        """The address of `host`, if this channel may connect to it. Raises NameNotResolved and NotAllowed."""
        address = await self._host_names.address(host, port)
        if not self.access.allows_address(address):
            raise NotAllowed(host, port, NOT_A_PEER.format(address=address))
        return address

    async def keys_to_try(self, host: str, port: int) -> Iterator[bytes | None]:
        """Keys that the server at this address may have, the most likely one first."""
        keys = self.access.keys
        if keys is None:
            return iter([None])
        await keys.look_again()
        known = self._keys.get((host, port), b"")
        is_usable = known in keys.accepted if known is not None else self.access.allows_insecure
        return itertools.chain([known] if is_usable else [], (key for key in keys.accepted if key != known))

    def remember_key(self, host: str, port: int, key: bytes | None) -> None:
        """The server at this address has this key."""
        self._keys.pop((host, port), None)
        self._keys[host, port] = key
        if len(self._keys) > ADDRESSES_REMEMBERED_MAX:
            del self._keys[next(iter(self._keys))]

    async def open_link(self, host: str, port: int, server_key: str | None = None) -> ZmqLink:
        """Resolve the host and begin to connect. Raises SideChannelError."""
        self._refuse_if_closed()
        _check_address(host, port, port_min=1)
        address = await self.numeric_address(host, port)
        key = await self._link_key(host, port, server_key)
        self._refuse_if_closed()
        try:
            dealer = self.make_client(address, key)
        except (zmq.ZMQError, OSError) as error:
            raise SideChannelError(host, port, str(error)) from error
        try:
            dealer.setsockopt(zmq.MAXMSGSIZE, LINK_FRAME_BYTES_MAX)
            dealer.setsockopt(zmq.SNDHWM, LINK_QUEUED_MAX)
            dealer.setsockopt(zmq.RCVHWM, LINK_WAITING_MAX)
            dealer.setsockopt(zmq.RCVBUF, RECEIVE_BUFFER_BYTES)
            dealer.setsockopt(zmq.RECONNECT_IVL, LINK_RECONNECT_SECONDS * 1000)
            monitor = self.monitor(dealer)
        except (zmq.ZMQError, OSError) as error:
            dealer.close()
            raise SideChannelError(host, port, str(error)) from error
        try:
            dealer.connect(_endpoint(address, port))
        except zmq.ZMQError as error:
            monitor.close()
            dealer.close()
            raise SideChannelError(host, port, str(error)) from error
        link = ZmqLink(self, host, port, dealer, monitor, is_encrypted=key is not None)
        self._open.add(link)
        self._measure_clients()
        return link

    def listen(
        self,
        host: str,
        port: int,
        *,
        frames_max: int = 4,
        frame_bytes_max: int = 64 * 1024,
        on_cut_off: Callable[[str, str], None] = lambda address, why: None,
    ) -> ZmqListener:
        """Bind (host, port); port 0 takes a free one. Host: an address of this machine, an interface name, or "*"."""
        self._refuse_if_closed()
        if host != "*":
            _check_address(host, port, port_min=0)
        try:
            router = self.make_socket(zmq.ROUTER, ipv6=":" in host)
        except zmq.ZMQError as error:
            raise SideChannelError(host, port, str(error)) from error
        try:
            router.setsockopt(zmq.MAXMSGSIZE, frame_bytes_max * OVERSIZE_FACTOR)
            router.setsockopt(zmq.RCVHWM, REQUESTS_QUEUED_MAX)
            router.setsockopt(zmq.SNDHWM, REPLIES_QUEUED_MAX)
            router.setsockopt(zmq.RCVBUF, RECEIVE_BUFFER_BYTES)
            router.setsockopt(zmq.BACKLOG, BACKLOG)
            router.setsockopt(zmq.HANDSHAKE_IVL, GREETING_LIMIT_SECONDS * 1000)
            router.setsockopt(zmq.TCP_MAXRT, UNREAD_SECONDS * 1000)
            router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            limits = AdmissionLimits(
                connections_max=connections_max(),
                unfinished_bytes_max=frames_max * frame_bytes_max + UNFINISHED_SLACK_BYTES,
                waiting_bytes_max=REQUESTS_QUEUED_MAX * frames_max * frame_bytes_max + 2 * RECEIVE_BUFFER_BYTES,
            )
            gate = self._open_gate()
            events = self.make_socket(zmq.PAIR, ipv6=False)
            endpoint = f"inproc://monitor-{next(self._monitors)}"
            doorman = Doorman(router, events, endpoint, limits, on_cut_off, self._say_no_room)
        except (zmq.ZMQError, OSError) as error:
            router.close()
            raise SideChannelError(host, port, str(error)) from error
        unguard = partial(gate.forget, gate.guard(router, doorman))
        try:
            router.bind(_endpoint(host, port))
        except zmq.ZMQError as error:
            unguard()
            doorman.close()
            router.close()
            kind = PortUnavailable if error.errno in (errno.EADDRINUSE, errno.EACCES) else SideChannelError
            raise kind(host, port, str(error)) from error
        listener = ZmqListener(self, router, doorman, unguard, frames_max, frame_bytes_max)
        self._open.add(listener)
        return listener

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            for still_open in list(self._open):
                still_open.close()
            if self._gate is not None:
                self._gate.close()
            self._context.term()

    def _say_no_room(self, waits: int) -> None:
        said = (
            f"nobody can connect: no file descriptor is left in this process, and {waits} wait; raise the limit "
            "(ulimit -n), or see who uses them up (ls /proc/<pid>/fd)"
        )
        self._on_refusal(NEWCOMERS, said)

    def make_socket(self, kind: int, *, ipv6: bool) -> Socket:
        """A socket of this channel's context, for the classes of this module. Raises zmq.ZMQError."""
        made: Socket = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.IPV6, int(ipv6))
        made.setsockopt(zmq.TCP_KEEPALIVE, 1)
        made.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE_SECONDS)
        made.setsockopt(zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_PROBES)
        made.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_PROBE_SECONDS)
        return made

    def make_client(self, address: str, key: bytes | None) -> Socket:
        """A socket that connects to a server with this key; None: to one that has none. Raises zmq.ZMQError."""
        made = self.make_socket(zmq.DEALER, ipv6=":" in address)
        made.setsockopt(zmq.TCP_MAXRT, UNACKNOWLEDGED_SECONDS * 1000)
        keys = self.access.keys
        if key is not None and keys is not None:
            try:
                made.setsockopt(zmq.CURVE_SERVERKEY, key)
                made.setsockopt(zmq.CURVE_PUBLICKEY, keys.public_key)
                made.setsockopt(zmq.CURVE_SECRETKEY, keys.secret_key)
            except zmq.ZMQError:
                made.close()
                raise
        return made

    async def _link_key(self, host: str, port: int, server_key: str | None) -> bytes | None:
        """The key to expect of a listener that says that it has this one. Raises NotAllowed."""
        keys = self.access.keys
        if server_key is None:
            if not self.may_be_insecure:
                raise NotAllowed(host, port, NO_KEY_THERE)
            return None
        if keys is None:
            raise NotAllowed(host, port, NO_KEY_HERE)
        await keys.look_again()
        key = server_key.encode()
        if key not in keys.accepted:
            raise NotAllowed(host, port, OTHER_KEY.format(count=len(keys.accepted)))
        return key

    def _open_gate(self) -> Gate:
        """Raises zmq.ZMQError."""
        if self._gate is None:
            self._gate = Gate(self.access, self.make_socket(zmq.ROUTER, ipv6=False), self._on_refusal)
        return self._gate

    def monitor(self, watched: Socket) -> Monitor:
        """Watch the connections of a socket that has none yet. Raises zmq.ZMQError."""
        return Monitor(watched, self.make_socket(zmq.PAIR, ipv6=False), f"inproc://monitor-{next(self._monitors)}")

    def forget(self, closed: ZmqRequester | ZmqListener | ZmqLink) -> None:
        """For `closed` to say that it is."""
        self._open.discard(closed)

    def _measure_clients(self) -> None:
        """As long as there are any. The task belongs to the trio run: whoever has the channel need not know of it."""
        if not self._is_measuring:
            self._is_measuring = True
            trio.lowlevel.spawn_system_task(self._measure_until_none_is_open)

    async def _measure_until_none_is_open(self) -> None:
        before: dict[ZmqRequester | ZmqLink, int] = {}
        try:
            while clients := [each for each in self._open if not isinstance(each, ZmqListener)]:
                unfinished: dict[ZmqRequester | ZmqLink, int] = {}
                for number, client in enumerate(clients, start=1):
                    try:
                        if client in self._open:
                            unfinished[client] = client.measure()
                    except Exception as error:
                        # A task of the run itself must not raise: everything would end.
                        log_crash("measuring of a client of the side channel", error)
                    if number % CLIENTS_MEASURED_AT_A_TIME == 0:
                        await trio.lowlevel.checkpoint()
                # After a pause of the loop whole messages wait everywhere. By the next time they are taken.
                self._give_up_largest({each: min(size, before.get(each, 0)) for each, size in unfinished.items()})
                before = unfinished
                await trio.sleep(CLIENTS_MEASURED_EVERY_SECONDS)
        finally:
            self._is_measuring = False

    def _give_up_largest(self, unfinished: dict[ZmqRequester | ZmqLink, int]) -> None:
        """Until the bytes that others have received without a whole message are few enough together."""
        total = sum(size for client, size in unfinished.items() if client in self._open)
        for client in sorted(unfinished, key=unfinished.__getitem__, reverse=True):
            if total <= CLIENTS_UNFINISHED_BYTES_MAX:
                return
            if client in self._open:
                total -= unfinished[client]
                client.give_up()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise trio.ClosedResourceError("this side channel is closed")


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
        """An attempt to connect has failed."""
        self.connected = False
        """A connection was accepted."""
        self.greeted = False
        """The other end speaks ZMQ."""
        self.refused = False
        """The other end has said that it does not let us in."""
        self.disconnected = False
        """A connection has ended."""
        self._descriptor: int | None = None
        try:
            watched.monitor(address, _WATCHED_EVENTS)
            events.connect(address)
            self._both = select.epoll(2)
        except (zmq.ZMQError, OSError):
            events.close()
            raise
        for each in (watched, events):
            self._both.register(each.FD, select.EPOLLIN)

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
        """Over the connection that `catch_up` has told of. Takes no event in: who waits for one would miss it."""
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
            self.connection_failed |= event == zmq.EVENT_CLOSED
            self.connected |= event == zmq.EVENT_CONNECTED
            self.greeted |= event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self.refused |= event == zmq.EVENT_HANDSHAKE_FAILED_AUTH and parsed["value"] == int(NOT_ALLOWED)
            self.disconnected |= event == zmq.EVENT_DISCONNECTED

    def close(self) -> None:
        """Before the watched socket is closed. Wakes the task that waits for news."""
        trio.lowlevel.notify_closing(self._both.fileno())
        self._both.close()
        self._watched.disable_monitor()
        self._events.close()


def wire_bytes(frame_bytes: int, is_encrypted: bool) -> int:
    """What a frame of so many bytes has on the wire."""
    body_bytes = frame_bytes + ENCRYPTION_BYTES if is_encrypted else frame_bytes
    return body_bytes + (SHORT_HEADER_BYTES if body_bytes <= SHORT_BODY_BYTES_MAX else LONG_HEADER_BYTES)


class _Message(msgspec.Struct, frozen=True):
    """A ZMQ message as it was taken from a socket."""

    frames: tuple[bytes, ...]
    is_whole: bool
    """Otherwise it was out of bounds. The rest is still in the socket, which is of no more use."""

    @property
    def is_delimited(self) -> bool:
        """It is within bounds, and something follows an empty frame."""
        return self.is_whole and len(self.frames) >= 2 and self.frames[0] == b""


def _receive_bounded(open_socket: Socket, frames_max: int, frame_bytes_max: int) -> _Message | None:
    """Take one message without waiting; None when there is none. Of one that is out of bounds no more than one frame
    beyond them is taken: there may be millions, and who sends it is not heard any further."""
    frames: list[bytes] = []
    while True:
        try:
            frame = open_socket.recv(zmq.NOBLOCK)
        except zmq.Again:  # only before the first frame: libzmq delivers messages whole
            return None
        if len(frames) == frames_max or len(frame) > frame_bytes_max:
            return _Message(tuple(frames), is_whole=False)
        frames.append(frame)
        if not open_socket.getsockopt(zmq.RCVMORE):
            return _Message(tuple(frames), is_whole=True)


def _check_address(host: str, port: int, *, port_min: int) -> None:
    """Refuse what cannot be an address, before libzmq or a name server sees it."""
    if not port_min <= port <= 65535:
        raise SideChannelError(host, port, f"the port must be {port_min} to 65535")
    if not is_ip_address(host) and _HOST_NAME.fullmatch(host) is None:
        raise SideChannelError(host[:256], port, "neither an IP address nor a host name")


def _endpoint(host: str, port: int) -> str:
    """The ZMQ endpoint; IPv6 addresses in brackets."""
    return f"tcp://{join_address(host, port)}"
