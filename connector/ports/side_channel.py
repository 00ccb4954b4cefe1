"""The door to the side channel: request/reply frames between engines, as a Protocol.

The real one is `zmq_bridge.ZmqSideChannel`; the simulator has a fake network. Both pass
tests/conformance/side_channel_suite.py.

Contract
* Addresses are (host, port). Every method runs in the trio thread. Nothing here blocks the thread.
* A `Requester` serves one exchange: `ask` sends the frames once and returns the frames of the first reply. There is
  no way to send again: after a timeout or a cancellation the requester is closed and a fresh one is made, because the
  built-in listener has no room for a request id and a late reply could be taken for the next one's.
* `ask` raises `PortRefused` as soon as an attempt to connect fails: nobody listens on that port, or there is no way to
  the host; and when the process that listened there ends before it has greeted. It raises `ConnectionEnded` as soon as
  the connection ends later, unless the reply has come, and when it has ended before and the process goes on, and says
  nothing over another one. A host that does not answer at all is a matter of the caller's timeout.
* A side channel may have keys, and be restricted to address ranges. `ask` raises `AccessRefused`, before it connects,
  for an address outside of them, and as soon as the other end does not let it in, or cannot prove that it has a key
  that is accepted here. From a process that a listener does not let in, nothing is handed out, and nothing is
  answered.
* Where this process lacks a descriptor, `ask`, `open_link` and `listen` raise `DescriptorsExhausted`, or `reached` says
  so.
* `ask` raises `NameNotResolved` when the name server does not know the host, and `NotASideChannel` when something else
  than a listener of ours answers: it speaks no ZMQ, or what comes back first is not a delimited reply within the
  implementation's bounds. Waiting on would not help. While nothing answers, `reached` says how far the question came.
* A `Link` is one connection to a listener, for any number of messages in both directions. It never reconnects: a new
  connection may lead to another process. `open_link` resolves the host name and begins to connect; frames sent before
  the connection stands wait for it. Messages arrive in the order in which they were sent.
* A link to a listener with keys needs to be told which one is expected (`server_key`); it has to be accepted here.
  `open_link` and `Link.receive` raise `AccessRefused` as `ask` does; `receive` does so for ever.
* `Link.receive` raises `LinkEnded` as soon as the connection was refused, reset or closed by the peer (also when the
  peer's process died), after it has returned what arrived before. So it does when the peer sends what is not a
  delimited message within the implementation's bounds. From then on `send` returns False and every `receive` raises
  `LinkEnded` again. What was sent shortly before may be lost without a word: only an answer proves arrival. A peer that
  hangs is a matter of the caller's timeout, and so is a machine that vanished: a link to it is lost after some 30 s.
* Timeouts are the caller's (trio cancel scopes). A cancelled `ask` loses nothing but its own exchange; a cancelled
  `receive`, of a link or a listener, loses nothing.
* A `Listener` hands out each incoming request once, as (reply address, frames), in order of arrival, at most
  `frames_max` frames of `frame_bytes_max` bytes; anything larger is dropped and counted, as is a message without the
  delimiter or with nothing after it (`frames_untrusted` is never empty). One with more than FRAMES_TOO_MANY_MAX frames
  too many ends its connection, and its address may not connect again for a while. `reply` never blocks: what
  cannot be queued for a slow or vanished requester is dropped and counted. Messages of one link carry the same reply
  address for as long as the link lives, and each may be answered any number of times, at any time.
* The code that serves a request says what it has cost (`Listener.charge`). A connection that costs too much is not
  heard until others have had their share, and one that goes on is ended, as is one for which there is no room; the
  rules are those of `statemachine/admission.py`. `on_cut_off` is told: address, why.
* Closing is immediate (no linger) and idempotent. It wakes tasks that wait with trio.ClosedResourceError.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol, TypeAlias

import msgspec

from connector.addresses import join_address
from connector.ports.descriptors import NONE_LEFT
from statemachine.failures import (
    AddressNotResolved,
    ConnectionRefused,
    HandshakeMalformed,
    HandshakeRefused,
    NoDescriptorLeft,
    NotAllowed,
    PeerFailure,
)

ReplyAddress: TypeAlias = bytes

FRAMES_TOO_MANY_MAX = 4096
"""Frames more than a listener takes, with which a message is still dropped and no more: engines may be behind the
address of its sender, and it is dropped within ten milliseconds or so, which its sender pays for."""

SENT_BYTES_PER_UNIT, DECODED_BYTES_PER_UNIT = 8192, 2048
"""How much can be sent, or looked at by a decoder, for one unit of `Listener.charge`."""


def units_to_send(frames: Sequence[bytes]) -> int:
    """What it costs to send these, beside the work of making them."""
    return sum(map(len, frames)) // SENT_BYTES_PER_UNIT


def units_to_decode(frames: Sequence[bytes]) -> int:
    """What it costs to decode or refuse these, beside the work that they ask for."""
    return sum(map(len, frames)) // DECODED_BYTES_PER_UNIT


class Request(msgspec.Struct, frozen=True):
    """One request as it came in. `frames_untrusted` excludes identity and the empty delimiter."""

    reply_address: ReplyAddress
    frames_untrusted: tuple[bytes, ...]


class ListenerCounts(msgspec.Struct, frozen=True):
    """Frames that went nowhere."""

    oversized_requests: int
    undelimited_requests: int
    dropped_replies: int
    dropped_requests: int = 0
    """Requests that were dropped because their connections had sent more than they may."""


class SideChannelError(Exception):
    """The address cannot be used (bad host name, port in use). `host` and `port` say which."""

    listener: ClassVar[str] = "side channel"
    """What is meant to listen there, in words."""

    def __init__(self, host: str, port: int, error: str) -> None:
        super().__init__(f"{self.listener} {join_address(host, port)}: {error}")
        self.host = host
        self.port = port
        self.error = error

    @property
    def why(self) -> str:
        """The reason in a sentence for people, where they know the address: "there" is where the listener should be."""
        return self.error


class PortUnavailable(SideChannelError):
    """Nobody can listen at this port: something listens there already, or this process may not."""


class PortRefused(SideChannelError):
    """An attempt to connect failed: nobody listens on this port, or the host cannot be reached."""

    @property
    def why(self) -> str:
        return "nothing listens there: the engine has ended, or the address is wrong"


class ConnectionEnded(SideChannelError):
    """The other end has ended the connection, or its machine has, before the question was answered."""


class NameNotResolved(SideChannelError):
    """The name server does not know the host, or cannot be asked. `error` is what the resolver said."""

    @property
    def why(self) -> str:
        return f"the host name {self.host} does not resolve here ({self.error})"


class DescriptorsExhausted(SideChannelError):
    """This process has no descriptor left with which the address could be asked. Says nothing of who listens there."""

    @property
    def why(self) -> str:
        return "this process has no descriptor left (`ulimit -n`)"


class AccessRefused(SideChannelError):
    """One of the two ends does not let the other one in, or does not connect to it. `error` says which, and why."""


class NotASideChannel(SideChannelError):
    """Something accepts connections on this port and is no listener of ours. `error` says what shows it."""

    @property
    def why(self) -> str:
        return f"what listens there is not a NIXL connector: {self.error}"


class LinkEnded(SideChannelError):
    """The connection of a link was refused or has ended. `error` says how."""

    listener = "control socket"


def without_socket(host: str, port: int, error: Exception) -> SideChannelError:
    """Why there is no socket for this address, where `error` of the kernel or of ZMQ says so."""
    kind = DescriptorsExhausted if getattr(error, "errno", None) in NONE_LEFT else SideChannelError
    return kind(host, port, str(error))


def failure_of(error: SideChannelError, *, peer: str, address: str) -> PeerFailure:
    """The failure of the engine `peer` whose side channel at `address` could not be asked."""
    match error:
        case PortRefused():
            return ConnectionRefused(peer=peer, address=address)
        case NameNotResolved():
            return AddressNotResolved(peer=peer, address=address, host=error.host, error=error.error)
        case DescriptorsExhausted():
            return NoDescriptorLeft(peer=peer, address=address)
        case AccessRefused():
            return NotAllowed(peer=peer, address=address, detail=error.error)
        case NotASideChannel():
            return HandshakeMalformed(peer=peer, address=address, field="greeting", detail=error.error)
        case ConnectionEnded():
            return HandshakeRefused(peer=peer, address=address, detail=error.error)
        case _:
            detail = f"its address cannot be used: {error.error}"
            return HandshakeRefused(peer=peer, address=address, detail=detail)


class Reached(enum.Enum):
    """How far a question has come that is not answered yet."""

    NOTHING = enum.auto()
    """Nothing was sent: the name server has not answered, or this process has not come to it."""
    NO_DESCRIPTOR = enum.auto()
    """This process has no descriptor left for a connection."""
    ADDRESS = enum.auto()
    """The host has not answered."""
    PORT = enum.auto()
    """The connection was accepted, and nothing was heard over it."""
    LISTENER = enum.auto()
    """The other end speaks ZMQ."""


class Requester(Protocol):
    @property
    def reached(self) -> Reached:
        """How far the question has come, also after `ask` was cancelled."""
        ...

    async def ask(self, frames: Sequence[bytes]) -> tuple[bytes, ...]:
        """Send one request and wait for its reply (frames after the delimiter). At most once per requester."""
        ...

    def close(self) -> None: ...


class Link(Protocol):
    """One connection to a listener; see the contract."""

    def send(self, frames: Sequence[bytes]) -> bool:
        """Queue one message. Never blocks. False when it was not taken: the queue is full, or the link is lost.

        Raises trio.ClosedResourceError after `close`.
        """
        ...

    async def receive(self) -> tuple[bytes, ...]:
        """The next message from the peer (frames after the delimiter). One task at a time.

        Raises LinkEnded, AccessRefused, trio.ClosedResourceError after `close`, and trio.BusyResourceError.
        """
        ...

    def close(self) -> None: ...


class Listener(Protocol):
    @property
    def port(self) -> int:
        """The bound port (useful when 0 was asked for)."""
        ...

    async def receive(self) -> Request: ...

    def reply(self, address: ReplyAddress, frames: Sequence[bytes]) -> None: ...

    def sender_of(self, address: ReplyAddress) -> str:
        """From where a request came that would be answered there: the numeric address of its connection; empty: that
        has ended."""
        ...

    def charge(self, address: ReplyAddress, units: int, *, understood: bool = True) -> None:
        """What a request has cost, in units of some 10 us. `understood`: it was one that an engine or a tool sends."""
        ...

    def counts(self) -> ListenerCounts: ...

    def close(self) -> None: ...


class SideChannel(Protocol):
    @property
    def public_key(self) -> str | None:
        """What those have to expect who open a link to a listener of this channel; None: no key."""
        ...

    def connect(self, host: str, port: int) -> Requester:
        """Raises SideChannelError for a host name or port that cannot be used."""
        ...

    async def open_link(self, host: str, port: int, server_key: str | None = None) -> Link:
        """Resolve the host and begin to connect; does not wait for the connection.

        `server_key`: the `public_key` of the listener's channel, as the other end says. Raises SideChannelError for an
        address that cannot be used or a name that does not resolve, and AccessRefused.
        """
        ...

    def listen(
        self,
        host: str,
        port: int,
        *,
        frames_max: int = 4,
        frame_bytes_max: int = 64 * 1024,
        on_cut_off: Callable[[str, str], None] = lambda address, why: None,
    ) -> Listener:
        """Raises PortUnavailable when the port is in use or forbidden, DescriptorsExhausted, and SideChannelError when
        the host is not ours."""
        ...

    def close(self) -> None:
        """Close every socket that is still open, and the context."""
        ...
