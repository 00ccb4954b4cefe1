"""The door to the side channel: request/reply frames between engines, as a Protocol.

The real one is `zmq_bridge.ZmqSideChannel`; the simulator has a fake network. Both pass
tests/conformance/side_channel_suite.py.

Contract
* Addresses are (host, port). Every method runs in the trio thread. Nothing here blocks the thread.
* A `Requester` serves one exchange: `ask` sends the frames once and returns the frames of the first reply. There is
  no way to send again: after a timeout or a cancellation the requester is closed and a fresh one is made, because the
  built-in listener has no room for a request id and a late reply could be taken for the next one's.
* `ask` raises SideChannelError when the host name does not resolve, and when what comes back first is not a delimited
  reply within the implementation's bounds: waiting on would not help.
* Timeouts are the caller's (trio cancel scopes). A cancelled `ask` loses nothing but its own exchange.
* A `Listener` hands out each incoming request once, as (reply address, frames), in order of arrival, at most
  `frames_max` frames of `frame_bytes_max` bytes; anything larger is dropped and counted, as is a message without the
  delimiter or with nothing after it (`frames_untrusted` is never empty). `reply` never blocks: what
  cannot be queued for a slow or vanished requester is dropped and counted.
* Closing is immediate (no linger) and idempotent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import msgspec

ReplyAddress: TypeAlias = bytes


class Request(msgspec.Struct, frozen=True):
    """One request as it came in. `frames_untrusted` excludes identity and the empty delimiter."""

    reply_address: ReplyAddress
    frames_untrusted: tuple[bytes, ...]


class ListenerCounts(msgspec.Struct, frozen=True):
    """Frames that went nowhere."""

    oversized_requests: int
    undelimited_requests: int
    dropped_replies: int


class SideChannelError(Exception):
    """The address cannot be used (bad host name, port in use). `host` and `port` say which."""

    def __init__(self, host: str, port: int, error: str) -> None:
        super().__init__(f"side channel {host}:{port}: {error}")
        self.host = host
        self.port = port
        self.error = error


class Requester(Protocol):
    async def ask(self, frames: Sequence[bytes]) -> tuple[bytes, ...]:
        """Send one request and wait for its reply (frames after the delimiter). At most once per requester."""
        ...

    def close(self) -> None: ...


class Listener(Protocol):
    @property
    def port(self) -> int:
        """The bound port (useful when 0 was asked for)."""
        ...

    async def receive(self) -> Request: ...

    def reply(self, address: ReplyAddress, frames: Sequence[bytes]) -> None: ...

    def counts(self) -> ListenerCounts: ...

    def close(self) -> None: ...


class SideChannel(Protocol):
    def connect(self, host: str, port: int) -> Requester:
        """Raises SideChannelError for a host name or port that cannot be used."""
        ...

    def listen(self, host: str, port: int, *, frames_max: int = 4, frame_bytes_max: int = 64 * 1024) -> Listener:
        """Raises SideChannelError when the address is in use or not ours."""
        ...

    def close(self) -> None:
        """Close every socket that is still open, and the context."""
        ...
