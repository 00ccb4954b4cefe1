"""The real side channel: ZMQ sockets in a trio loop. Implements `ports.side_channel`.

Design
* pyzmq has no trio support, so a socket is watched through its `zmq.FD`. libzmq makes that descriptor readable only
  when its state changes from "nothing to look at", and any call on the socket may use the change up. Hence two rules:
  (1) try the operation without blocking first and park only when it says EAGAIN; (2) after any other call on the same
  socket read EVENTS, and wake the parked task if there is something to receive. A listener receives in one task and
  replies from any, so `reply` follows rule 2 by cancelling the scope that `receive` parks in.
* A message is taken in one go, without a checkpoint, so a cancelled receive takes nothing.
* A requester is a DEALER that behaves like a REQ (empty delimiter frame first) for one exchange and is then closed. A
  REQ would keep a late reply out too, but cannot be abandoned half way and waits for ever if the peer was restarted.
* Host names are looked up here (in trio's worker thread) and not by libzmq: its I/O thread would stop for all peers
  while a name server does not answer. ZMQ only ever sees numeric addresses to connect to.
* Bounds: frames larger than `frame_bytes_max` are dropped here and counted; far larger ones make libzmq drop the
  connection before it holds them in memory (not counted: they never arrive). Bytes that are not ZMTP end their
  connection inside libzmq as well.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence
from typing import TypeAlias

import msgspec
import trio
import zmq

from connector.ports.side_channel import ListenerCounts, ReplyAddress, Request, SideChannelError

Socket: TypeAlias = "zmq.Socket[bytes]"

SOCKETS_MAX = 8192
"""Sockets at once (libzmq's own default is 1023): every peer may be shaking hands at the same time."""

REPLY_FRAME_BYTES_MAX = 64 * 1024 * 1024
REPLY_FRAMES_MAX = 16
"""What a requester takes. 64 MiB is the metadata of some 300,000 regions."""

OVERSIZE_FACTOR = 16
"""A listener reads frames up to this many times its limit, to drop and count them; larger ones end the connection."""

REPLIES_QUEUED_MAX = 1000
"""Replies that wait for one slow requester before further ones are dropped."""

KEEPALIVE_IDLE_SECONDS = 60
"""A requester whose machine vanished without a word is noticed by the kernel after this time and a few probes."""

_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252})")


class ZmqRequester:
    """One exchange with one listener. Made by `ZmqSideChannel.connect`."""

    def __init__(self, channel: ZmqSideChannel, host: str, port: int) -> None:
        self._channel = channel
        self._host = host
        self._port = port
        self._socket: Socket | None = None
        self._asked = False
        self._closed = False
        self._asking: trio.CancelScope | None = None

    async def ask(self, frames: Sequence[bytes]) -> tuple[bytes, ...]:
        """Raises SideChannelError when the name does not resolve or the reply is not a reply; see `Requester`."""
        if self._closed:
            raise trio.ClosedResourceError("this requester is closed")
        if self._asked:
            raise RuntimeError("a requester serves one exchange; connect again")
        self._asked = True
        try:
            with trio.CancelScope() as self._asking:
                return await self._exchange(frames)
        finally:
            self.close()
        raise trio.ClosedResourceError("this requester was closed while it waited")

    async def _exchange(self, frames: Sequence[bytes]) -> tuple[bytes, ...]:
        address = await _numeric_address(self._host, self._port)
        try:
            dealer = self._socket = self._channel.make_socket(zmq.DEALER, ipv6=":" in address)
            dealer.setsockopt(zmq.MAXMSGSIZE, REPLY_FRAME_BYTES_MAX)
            dealer.connect(_endpoint(address, self._port))
            dealer.send_multipart([b"", *frames], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise SideChannelError(self._host, self._port, str(error)) from error
        while True:
            reply = _receive_bounded(dealer, REPLY_FRAMES_MAX, REPLY_FRAME_BYTES_MAX)
            if reply is not None:
                break
            await trio.lowlevel.wait_readable(dealer.FD)
            if self._closed:  # after the descriptor became readable, before this task ran
                raise trio.ClosedResourceError("this requester was closed while it waited")
        await trio.lowlevel.cancel_shielded_checkpoint()
        if reply.oversized or len(reply.frames) < 2 or reply.frames[0] != b"":
            raise SideChannelError(self._host, self._port, "what came back is not a delimited reply within bounds")
        return reply.frames[1:]

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._channel.forget(self)
            if self._socket is not None:
                _close_socket(self._socket)
            if self._asking is not None:
                self._asking.cancel()  # it may be waiting for a name server instead


class ZmqListener:
    """A bound ROUTER. Made by `ZmqSideChannel.listen`."""

    def __init__(self, channel: ZmqSideChannel, router: Socket, frames_max: int, frame_bytes_max: int) -> None:
        self._channel = channel
        self._router = router
        self._frames_max = frames_max
        self._frame_bytes_max = frame_bytes_max
        self._port = int(router.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])
        self._closed = False
        self._receiving = False
        self._parked: trio.CancelScope | None = None
        self._oversized_requests = 0
        self._undelimited_requests = 0
        self._dropped_replies = 0

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
            request = self._take()
            if request is not None:
                await trio.lowlevel.cancel_shielded_checkpoint()
                return request
            while request is None:
                await self._park()
                request = self._take()
            return request
        finally:
            self._receiving = False

    async def _park(self) -> None:
        """Wait until there may be something to receive: the descriptor says so, or `reply` does, or it is closed."""
        with trio.CancelScope() as self._parked:
            await trio.lowlevel.wait_readable(self._router.FD)
        self._parked = None

    def _take(self) -> Request | None:
        """The next request within bounds, without waiting; None when there is none now."""
        while not self._closed:
            message = _receive_bounded(self._router, self._frames_max + 2, self._frame_bytes_max)
            if message is None:
                return None
            if len(message.frames) < 3 or message.frames[1] != b"":
                self._undelimited_requests += 1
            elif message.oversized:
                self._oversized_requests += 1
            else:
                return Request(message.frames[0], message.frames[2:])
        raise trio.ClosedResourceError("this listener is closed")

    def reply(self, address: ReplyAddress, frames: Sequence[bytes]) -> None:
        """Raises trio.ClosedResourceError once the listener is closed."""
        if self._closed:
            raise trio.ClosedResourceError("this listener is closed")
        try:
            self._router.send_multipart([address, b"", *frames], zmq.NOBLOCK)
        except zmq.ZMQError:  # EHOSTUNREACH: the requester is gone. EAGAIN: it does not read.
            self._dropped_replies += 1
        if self._parked is not None and int(self._router.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._parked.cancel()

    def counts(self) -> ListenerCounts:
        return ListenerCounts(self._oversized_requests, self._undelimited_requests, self._dropped_replies)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._channel.forget(self)
            _close_socket(self._router)


class ZmqSideChannel:
    """All side-channel sockets of a process, in one context with one I/O thread. Implements `SideChannel`."""

    def __init__(self) -> None:
        self._context: zmq.Context[Socket] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, SOCKETS_MAX)
        self._open: set[ZmqRequester | ZmqListener] = set()
        self._closed = False

    def connect(self, host: str, port: int) -> ZmqRequester:
        """A requester for (host, port); nothing is sent, and no name looked up, before it asks."""
        self._refuse_if_closed()
        _check_address(host, port, port_min=1)
        requester = ZmqRequester(self, host, port)
        self._open.add(requester)
        return requester

    def listen(self, host: str, port: int, *, frames_max: int = 4, frame_bytes_max: int = 64 * 1024) -> ZmqListener:
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
            router.setsockopt(zmq.SNDHWM, REPLIES_QUEUED_MAX)
            router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            router.setsockopt(zmq.TCP_KEEPALIVE, 1)
            router.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE_SECONDS)
            router.bind(_endpoint(host, port))
        except zmq.ZMQError as error:
            router.close()
            raise SideChannelError(host, port, str(error)) from error
        listener = ZmqListener(self, router, frames_max, frame_bytes_max)
        self._open.add(listener)
        return listener

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            for still_open in list(self._open):
                still_open.close()
            self._context.term()

    def make_socket(self, kind: int, *, ipv6: bool) -> Socket:
        """A socket of this channel's context, for the classes of this module. Raises zmq.ZMQError."""
        made: Socket = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.IPV6, int(ipv6))
        return made

    def forget(self, closed: ZmqRequester | ZmqListener) -> None:
        """For `closed` to say that it is."""
        self._open.discard(closed)

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise trio.ClosedResourceError("this side channel is closed")


class _Message(msgspec.Struct, frozen=True):
    """A whole ZMQ message, cut to its bounds; `oversized` says that something was cut."""

    frames: tuple[bytes, ...]
    oversized: bool


def _receive_bounded(open_socket: Socket, frames_max: int, frame_bytes_max: int) -> _Message | None:
    """Take one whole message without waiting, keeping no more than the bounds; None when there is none."""
    frames: list[bytes] = []
    oversized = False
    more = True
    while more:
        try:
            frame = open_socket.recv(zmq.NOBLOCK)
        except zmq.Again:  # only before the first frame: libzmq delivers messages whole
            return None
        oversized |= len(frames) == frames_max or len(frame) > frame_bytes_max
        if len(frames) < frames_max:
            frames.append(frame if len(frame) <= frame_bytes_max else b"")
        more = bool(open_socket.getsockopt(zmq.RCVMORE))
    return _Message(tuple(frames), oversized)


def _close_socket(open_socket: Socket) -> None:
    """Wake the task that is parked on it (trio.ClosedResourceError), then close it."""
    trio.lowlevel.notify_closing(open_socket.FD)
    open_socket.close()


def _check_address(host: str, port: int, *, port_min: int) -> None:
    """Refuse what cannot be an address, before libzmq or a name server sees it."""
    if not port_min <= port <= 65535:
        raise SideChannelError(host, port, f"the port must be {port_min} to 65535")
    if not _is_ip_address(host) and _HOST_NAME.fullmatch(host) is None:
        raise SideChannelError(host[:256], port, "neither an IP address nor a host name")


def _is_ip_address(host: str) -> bool:
    try:
        ipaddress.ip_address(_unbracketed(host))
    except ValueError:
        return False
    return True


def _unbracketed(host: str) -> str:
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def _endpoint(host: str, port: int) -> str:
    """The ZMQ endpoint; IPv6 addresses in brackets."""
    bare = _unbracketed(host)
    return f"tcp://[{bare}]:{port}" if ":" in bare else f"tcp://{bare}:{port}"


async def _numeric_address(host: str, port: int) -> str:
    """The address of `host`, IPv4 if it has one (as libzmq would choose). Raises SideChannelError."""
    if _is_ip_address(host):
        await trio.lowlevel.checkpoint()
        return _unbracketed(host)
    try:
        found = await trio.socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise SideChannelError(host, port, f"the name does not resolve: {error}") from error
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return str(found[0][4][0])
