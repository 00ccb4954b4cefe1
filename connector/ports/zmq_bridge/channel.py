"""All side-channel sockets of a process: makes them, says who may connect where, and keeps clients within bounds.

What the sockets of listeners are set to stands here, where they are made.

* Host names are looked up here (in trio's worker thread) and not by libzmq: its I/O thread would stop for all peers
  while a name server does not answer. ZMQ only ever sees numeric addresses to connect to.
* Who may connect is for the gate (`connector/ports/gate.py`). A client with keys has to know the key of the server
  before it connects. A link is told it; a requester tries the accepted keys.
* A client is no safer than a listener: where it connects to is what a request says. Of a message of too many frames it
  takes no more than it may have, and closes its socket. libzmq keeps the parts of a message until the last one has
  come, and all whole messages that nobody has taken; so few may wait, and a task of the channel looks at all clients
  now and then. One that has received more beyond whole messages than may wait is lost (a link), or has met something
  else than a side channel (a requester). So is the largest one when all together have received too much.
* A ROUTER names its connections by counting, and a client may name itself. Where it has taken the name that comes next,
  libzmq ends the process. It begins at a number of C's `rand`, which nobody seeds: so a listener does.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import re
import secrets
from collections.abc import Callable, Iterator
from functools import partial

import trio
import zmq

from connector.addresses import is_ip_address
from connector.observe.log import log_crash
from connector.ports.descriptors import TooFewDescriptors, is_descriptor_left, require_descriptors
from connector.ports.doorman import Doorman, connections_max
from connector.ports.gate import ANYBODY, Access, Gate
from connector.ports.host_names import HostNames
from connector.ports.side_channel import (
    AccessRefused,
    DescriptorsExhausted,
    PortUnavailable,
    SideChannelError,
    without_socket,
)
from connector.ports.zmq_bridge.frames import Socket, endpoint
from connector.ports.zmq_bridge.link import (
    LINK_FRAME_BYTES_MAX,
    LINK_QUEUED_MAX,
    LINK_RECONNECT_SECONDS,
    LINK_WAITING_MAX,
    ZmqLink,
)
from connector.ports.zmq_bridge.listener import ZmqListener
from connector.ports.zmq_bridge.monitor import Monitor
from connector.ports.zmq_bridge.refusals import NO_KEY_HERE, NO_KEY_THERE, OTHER_KEY
from connector.ports.zmq_bridge.requester import ZmqRequester
from connector.thread_limit import require_threads
from statemachine.admission import AdmissionLimits

SOCKETS_MAX = 3 * 8192
"""Sockets at once (libzmq's own default is 1023): every peer may be shaking hands at the same time, and each requester
or link has three (its own, and the two ends of its monitor)."""

CLIENTS_UNFINISHED_BYTES_MAX = 24 << 20
"""What all clients of a process together may have received without whole messages, for longer than it takes to look at
them twice. These are bytes on the wire: of empty frames libzmq keeps 32 times as much (64 bytes for two). The largest
reply fits, and nothing has to be lost for others that come at the same time: hardly any takes so long."""

CLIENTS_MEASURED_EVERY_SECONDS = 0.25
CLIENTS_MEASURED_AT_A_TIME = 32
"""Before other tasks have their turn: there is a link for each rank of each engine that is connected."""

OVERSIZE_FACTOR = 2
"""A listener reads frames up to this many times its limit, to drop and count them; larger ones end the connection."""

REQUESTS_QUEUED_MAX = 8
"""Messages of one connection that wait in a listener; libzmq reads no further ones meanwhile."""

REPLIES_QUEUED_MAX = 256
"""Replies that wait for one slow requester before further ones are dropped."""

GREETING_LIMIT_SECONDS = 10
"""So long a connection may take to greet a listener."""

BACKLOG = 1024
"""Connections that the kernel keeps for a listener until they are accepted."""

RECEIVE_BUFFER_BYTES = 256 * 1024
"""The receive buffer that the kernel is asked for, for a connection of a listener or a link. It may take twice that."""
UNFINISHED_SLACK_BYTES = 64 * 1024
"""What a connection of a listener may have received beyond the largest message, before it is in the middle of one that
is too large: frames and encryption have headers."""

UNACKNOWLEDGED_SECONDS = 30
"""A connection ends whose other end has acknowledged nothing for so long, or has left unread what it was sent. By
itself the kernel would send it again for a quarter of an hour. A lease that nobody renews is over then, too."""

KEEPALIVE_IDLE_SECONDS, KEEPALIVE_PROBE_SECONDS = 10, 5
"""Where nothing is said the kernel asks, after this time of silence and then again and again: so a machine that has
vanished without a word is noticed at both ends. Linux counts no probes where `UNACKNOWLEDGED_SECONDS` is set: a
connection ends when one is unanswered and so much time has passed since the last word. So several must fit into it, or
the first that a network loses ends a connection to a healthy engine."""

CONTEXT_THREADS = 2
"""What libzmq starts for a context: an I/O thread, and one that takes closed sockets away."""

CONTEXT_DESCRIPTORS = 6
"""What it takes for a context and its first socket. With two to four of them libzmq ends the process."""

ADDRESSES_REMEMBERED_MAX = 4096
"""With the key that each had last."""

NOT_A_PEER = "the address {address} is not in allowed_peers of this engine"

_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252})")


class ZmqSideChannel:
    """All side-channel sockets of a process, in one context with one I/O thread. Implements `SideChannel`.

    Args:
        access: who is let in, and where it connects to.
        on_refusal: told the address that a listener has not let in, and in a sentence why.
        on_no_room: told in a sentence that a process wants to connect and no file descriptor is left.

    Raises NoThreadLeft and TooFewDescriptors.
    """

    def __init__(
        self,
        access: Access = ANYBODY,
        on_refusal: Callable[[str, str], None] = lambda address, sentence: None,
        on_no_room: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self.access = access
        self._on_refusal = on_refusal
        self._on_no_room = on_no_room
        self._gate: Gate | None = None
        self._host_names = HostNames()
        # Of addresses that were reached last; None: it had none.
        self._keys: dict[tuple[str, int], bytes | None] = {}
        require_threads(CONTEXT_THREADS)
        require_descriptors(CONTEXT_DESCRIPTORS)
        self._context: zmq.Context[Socket] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, SOCKETS_MAX)
        # With the first socket libzmq starts its threads, and ends the process where it may have no more of them. So
        # that is now, when there was just room for them and an engine starts, and not later, when one that drains tells
        # its workers. It stays open: libzmq gives the descriptor of a closed one back at some later time.
        self._first = self._context.socket(zmq.PAIR)
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
        """The address of `host`, if this channel may connect to it. Raises as `HostNames.address` does, and
        AccessRefused."""
        address = await self._host_names.address(host, port)
        if not self.access.allows_address(address):
            raise AccessRefused(host, port, NOT_A_PEER.format(address=address))
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
            raise without_socket(host, port, error) from error
        try:
            dealer.setsockopt(zmq.MAXMSGSIZE, LINK_FRAME_BYTES_MAX)
            dealer.setsockopt(zmq.SNDHWM, LINK_QUEUED_MAX)
            dealer.setsockopt(zmq.RCVHWM, LINK_WAITING_MAX)
            dealer.setsockopt(zmq.RCVBUF, RECEIVE_BUFFER_BYTES)
            dealer.setsockopt(zmq.RECONNECT_IVL, LINK_RECONNECT_SECONDS * 1000)
            monitor = self.monitor(dealer)
        except (zmq.ZMQError, OSError) as error:
            dealer.close()
            raise without_socket(host, port, error) from error
        try:
            dealer.connect(endpoint(address, port))
        except zmq.ZMQError as error:
            monitor.close()
            dealer.close()
            raise without_socket(host, port, error) from error
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
        """Bind (host, port); port 0 takes a free one. Host: an address of this machine, a name of it, an interface
        name, or "*". Of a name the IPv4 address is taken if it has one, which is what others connect to."""
        self._refuse_if_closed()
        if host != "*":
            _check_address(host, port, port_min=0)
        _seed_rand()
        try:
            router = self.make_socket(zmq.ROUTER, ipv6=":" in host)
        except zmq.ZMQError as error:
            raise _cannot_listen(host, port, error) from error
        try:
            router.setsockopt(zmq.MAXMSGSIZE, frame_bytes_max * OVERSIZE_FACTOR)
            router.setsockopt(zmq.RCVHWM, REQUESTS_QUEUED_MAX)
            router.setsockopt(zmq.SNDHWM, REPLIES_QUEUED_MAX)
            router.setsockopt(zmq.RCVBUF, RECEIVE_BUFFER_BYTES)
            router.setsockopt(zmq.BACKLOG, BACKLOG)
            router.setsockopt(zmq.HANDSHAKE_IVL, GREETING_LIMIT_SECONDS * 1000)
            router.setsockopt(zmq.TCP_MAXRT, UNACKNOWLEDGED_SECONDS * 1000)
            router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            limits = AdmissionLimits(
                connections_max=connections_max(),
                unfinished_bytes_max=frames_max * frame_bytes_max + UNFINISHED_SLACK_BYTES,
                waiting_bytes_max=REQUESTS_QUEUED_MAX * frames_max * frame_bytes_max,
            )
            gate = self._open_gate()
            events = self.make_socket(zmq.PAIR, ipv6=False)
            told_at = f"inproc://monitor-{next(self._monitors)}"
            doorman = Doorman(router, events, told_at, limits, on_cut_off, self._say_no_room)
        except (zmq.ZMQError, OSError) as error:
            router.close()
            raise _cannot_listen(host, port, error) from error
        unguard = partial(gate.forget, gate.guard(router, doorman))
        try:
            _bind(router, host, port)
        except zmq.ZMQError as error:
            unguard()
            doorman.close()
            router.close()
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                raise PortUnavailable(host, port, str(error)) from error
            raise _cannot_listen(host, port, error) from error
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
            self._first.close()
            self._context.term()

    def _say_no_room(self, waits: int) -> None:
        self._on_no_room(
            f"nobody can connect: no file descriptor is left in this process, and {waits} wait; raise the hard "
            "limit (ulimit -Hn), or see who uses them up (ls /proc/<pid>/fd)"
        )

    def make_socket(self, kind: int, *, ipv6: bool) -> Socket:
        """A socket of this channel's context, for the classes of this package. Raises zmq.ZMQError."""
        made: Socket = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.IPV6, int(ipv6))
        made.setsockopt(zmq.TCP_KEEPALIVE, 1)
        made.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE_SECONDS)
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
        """The key to expect of a listener that says that it has this one. Raises AccessRefused."""
        keys = self.access.keys
        if server_key is None:
            if not self.may_be_insecure:
                raise AccessRefused(host, port, NO_KEY_THERE)
            return None
        if keys is None:
            raise AccessRefused(host, port, NO_KEY_HERE)
        await keys.look_again()
        key = server_key.encode()
        if key not in keys.accepted:
            raise AccessRefused(host, port, OTHER_KEY.format(count=len(keys.accepted)))
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
        """Start the task that measures clients as long as there are any. It belongs to the trio run: the owner of the
        channel need not know of it."""
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
                try:
                    client.give_up()
                except Exception as error:
                    # As where they are measured.
                    log_crash("the end of a client of the side channel", error)

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise trio.ClosedResourceError("this side channel is closed")


def _seed_rand() -> None:
    """So that nobody knows the names that a ROUTER which is made next gives to its connections."""
    ctypes.CDLL(None).srand(ctypes.c_uint(secrets.randbits(32)))


def _cannot_listen(host: str, port: int, error: Exception) -> SideChannelError:
    """For whoever starts an engine, what to do about it where that is a matter of descriptors."""
    failed = without_socket(host, port, error)
    if isinstance(failed, DescriptorsExhausted):
        return DescriptorsExhausted(host, port, f"{failed.error}; {TooFewDescriptors()}")
    return failed


def _bind(router: Socket, host: str, port: int) -> None:
    """Raises zmq.ZMQError."""
    if not is_descriptor_left():  # libzmq lists the interfaces, and ends the process where it cannot
        raise zmq.ZMQError(errno.EMFILE)
    try:
        router.bind(endpoint(host, port))
    except zmq.ZMQError as error:
        if error.errno != errno.ENODEV or is_ip_address(host):
            raise
        # A name, or an interface, without an IPv4 address. With this option libzmq would prefer IPv6.
        router.setsockopt(zmq.IPV6, 1)
        router.bind(endpoint(host, port))


def _check_address(host: str, port: int, *, port_min: int) -> None:
    """Refuse what cannot be an address, before libzmq or a name server sees it."""
    if not port_min <= port <= 65535:
        raise SideChannelError(host, port, f"the port must be {port_min} to 65535")
    if not is_ip_address(host) and _HOST_NAME.fullmatch(host) is None:
        raise SideChannelError(host[:256], port, "neither an IP address nor a host name")
