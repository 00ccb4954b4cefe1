"""Who may connect to a process, and where the process may connect to: the address ranges and keys of a side channel.

    Access    what is allowed: data
    Gate      asks for it when a process connects: the handler of ZAP, ZMQ's protocol for that, of one ZMQ context

libzmq asks the gate before a connection that was accepted carries anything; until it says yes nothing of what the other
end sends is handed out, and when it says no libzmq ends the connection, with a code and no word. With keys it asks only
after the other end has proven that it has the secret of the key that it shows, and that it knows ours. The gate runs in
a task of its own, beside all others of the trio loop: a flood of newcomers waits there, and so do other newcomers;
connections that stand do not. All newcomers wait while a socket takes no messages.

Every socket that listens has the gate before it, also where nothing is restricted: an address that the doorman has
shut out (`connector/ports/doorman.py`) is turned away here before libzmq hands out its messages. They would have to be
dropped one by one, of as many connections as it can make, and each late cut lets more of them in. It may come back, as
one whose connection was cut off. libzmq is told that there must be a gate (ZAP_ENFORCE_DOMAIN): without it, connections
would fail instead of being let in. And it ends connections of protocols that are too old to be asked about.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec
import trio
import zmq
from zmq.utils import z85

from connector.addresses import without_interface
from connector.observe.log import log_crash
from connector.ports.curve_keys import CurveKeys
from connector.ports.doorman import Doorman

Socket: TypeAlias = "zmq.Socket[bytes]"
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_VERSION = b"1.0"
AGAIN_SECONDS = 0.1
"""The pause after a bug: one that is made again each time does not keep the thread busy."""
ALLOWED, NOT_ALLOWED, FAILED = b"200", b"400", b"500"
NOT_NOW = FAILED
"""ZAP has 300 for this. libzmq ends no connection with it until the greeting has taken too long."""
JUDGED_AT_A_TIME = 8
"""Newcomers, before other tasks have their turn."""


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """What a side channel lets in, and where it goes.

    Attributes:
        networks: of all peers, those that connect and those that are connected to; none: any address.
        keys: None: connections are neither encrypted nor authenticated.
        allows_insecure: also connect to those that have no keys.
    """

    networks: tuple[Network, ...] = ()
    keys: CurveKeys | None = None
    allows_insecure: bool = False

    def allows_address(self, address: str) -> bool:
        """`address`: numeric, IPv4 or IPv6."""
        if not self.networks:
            return True
        found = ipaddress.ip_address(address)
        if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
            found = found.ipv4_mapped
        return any(found in network for network in self.networks)


ANYBODY = Access()

MAPPED_BITS = 96
"""Bits of an IPv6 address that precede the IPv4 address mapped into it."""


def network_of(text: str) -> Network:
    """A range of addresses. IPv4 in the clothes of IPv6 is IPv4, as the addresses are that it is compared with. Raises
    ValueError."""
    network = ipaddress.ip_network(text)
    if isinstance(network, ipaddress.IPv6Network) and network.prefixlen >= MAPPED_BITS:
        mapped = network.network_address.ipv4_mapped
        if mapped is not None:
            return ipaddress.IPv4Network((mapped, network.prefixlen - MAPPED_BITS))
    return network


class Gate:
    """The gate of one context. Made when a socket listens, in the trio loop, and closed after that.

    Args:
        on_refusal: told the address that it has not let in, and in a sentence why.
    """

    def __init__(self, access: Access, socket: Socket, on_refusal: Callable[[str, str], None]) -> None:
        self._access = access
        self._socket = socket
        self._on_refusal = on_refusal
        # By the domain of each socket.
        self._doormen: dict[bytes, Doorman] = {}
        self._domains = itertools.count()
        socket.bind(ZAP_ENDPOINT)
        trio.lowlevel.spawn_system_task(self._answer)

    def guard(self, listening: Socket, doorman: Doorman) -> bytes:
        """Ask here for every connection to this socket, which is not bound yet; the name for `forget`."""
        domain = b"%d" % next(self._domains)
        self._doormen[domain] = doorman
        listening.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        listening.setsockopt(zmq.ZAP_DOMAIN, domain)
        keys = self._access.keys
        if keys is not None:
            listening.setsockopt(zmq.CURVE_SERVER, 1)
            listening.setsockopt(zmq.CURVE_SECRETKEY, keys.secret_key)
        return domain

    def forget(self, domain: bytes) -> None:
        """Its socket is closed."""
        self._doormen.pop(domain, None)

    @property
    def is_closed(self) -> bool:
        return bool(self._socket.closed)

    def close(self) -> None:
        if not self.is_closed:
            trio.lowlevel.notify_closing(self._socket.FD)
            self._socket.close()

    async def _answer(self) -> None:
        """Until it is closed, or the trio loop ends. An open socket would keep its context from ending for ever."""
        try:
            await self._answer_all()
        finally:
            self.close()

    async def _answer_all(self) -> None:
        """Until it is closed. The descriptor tells of changes only, so it is waited for when nothing is left."""
        judged = 0
        while not self.is_closed:
            try:
                frames = self._take()
                if frames is None:
                    await trio.lowlevel.wait_readable(self._socket.FD)
                    continue
                self._reply(frames, await self._judge(frames))
                judged += 1
                if judged % JUDGED_AT_A_TIME == 0:
                    await trio.lowlevel.checkpoint()
            except trio.ClosedResourceError:
                return
            except Exception as error:
                # A task of the run itself must not raise: everything would end.
                log_crash("gate", error)
                await trio.sleep(AGAIN_SECONDS)

    def _take(self) -> list[bytes] | None:
        """A question, if there is one. Raises trio.ClosedResourceError."""
        if self.is_closed:
            raise trio.ClosedResourceError
        try:
            return self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def _reply(self, frames: Sequence[bytes], status: bytes) -> None:
        """A question that cannot be answered is one of a newcomer that is never let in."""
        if not self.is_closed:
            with contextlib.suppress(zmq.ZMQError, IndexError):
                self._socket.send_multipart(
                    [frames[0], b"", ZAP_VERSION, frames[3], status, b"", b"", b""], zmq.NOBLOCK
                )

    async def _judge(self, frames: Sequence[bytes]) -> bytes:
        """What libzmq is told of a newcomer."""
        try:
            _, _, _, _, domain, address_bytes, _, mechanism, *credentials = frames
            address = without_interface(address_bytes.decode())
            doorman = self._doormen.get(domain)
            if doorman is not None:
                await doorman.until_heard()
            if doorman is None or doorman.is_shut_out(address):
                return NOT_NOW
            why = await self._find_fault(address, mechanism, credentials)
            if why is None:
                return ALLOWED
            self._on_refusal(address, f"{address} may not connect: {why}")
        except Exception as error:  # no connection is let in by a bug
            log_crash("gate", error)
            return FAILED
        return NOT_ALLOWED

    async def _find_fault(self, address: str, mechanism: bytes, credentials: Sequence[bytes]) -> str | None:
        """Why a process may not connect; None: it may."""
        if not self._access.allows_address(address):
            return "it is not in allowed_peers"
        keys = self._access.keys
        if keys is None:
            return None
        await keys.look_again()
        key = z85.encode(credentials[0]) if mechanism == b"CURVE" and len(credentials) == 1 else b""
        return None if key in keys.accepted else f"its public key {key.decode()} is not accepted here"
