"""The door to NIXL: what the actors may ask of an agent, as a Protocol.

The real agent is `nixl_agent.RealNixlPort`; the simulator has a fake. Both pass tests/conformance/nixl_suite.py.

Contract (each line is a test of the suite)
* All methods are called from the trio thread only. Methods declared `async` are checkpoints; the others never block.
* Handles are plain ints made by the port. A handle is never reused in the life of a port.
* `post_read` returns once the READ is posted. Whatever happens to it later arrives as exactly one `ReadDone` or
  `ReadErrored` event, never both, never twice; a READ that never ends has no event. A post that NIXL refuses raises
  `NixlCallFailed` and leaves nothing behind that could still write.
* After `ReadDone` or `ReadErrored` nothing of that READ writes to local memory any more. Nothing else proves this:
  in particular `release_read` of a READ in flight does not stop it (nixl.md fact 1), and the port refuses such a
  release with `ReadInFlight`.
* The notification given to `post_read` reaches the remote agent after the READ is done, and never when it failed.
* Events are delivered in the order in which they became known, through the `on_event` callback, in the trio thread,
  outside of any port method. The callback must not raise.
* Cancelling an async method never loses the effect of the call: it either never started or its result is disposed of.
* `aclose` waits for READs in flight at most `grace_seconds`, then closes anyway and returns the handles it had to
  abandon; memory named by an abandoned READ must not be reused by the process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

AgentName: TypeAlias = str
"""Name of a NIXL agent, decoded (NIXL itself returns bytes)."""

DescriptorListHandle: TypeAlias = int
ReadHandle: TypeAlias = int

DescriptorIds: TypeAlias = npt.NDArray[np.int32]
"""Indices into a prepared descriptor list, shape [n], region-major."""


class MemoryRun(msgspec.Struct, frozen=True):
    """`count` blocks of `length_bytes`, the first at `address`, one every `stride_bytes` (>= length_bytes)."""

    address: int
    length_bytes: int
    stride_bytes: int
    count: int
    device_id: int = 0


class MemoryRange(msgspec.Struct, frozen=True):
    """A registered range: `length_bytes` from `address`."""

    address: int
    length_bytes: int
    device_id: int = 0


class ReadDone(msgspec.Struct, frozen=True):
    """A READ completed; all its bytes are in local memory.

    `completed_ns` is the shell's monotonic clock just after completion was seen. `seconds_in_transport` and
    `seconds_to_post` are what NIXL's telemetry says (0.0 when it says nothing).
    """

    handle: ReadHandle
    completed_ns: int
    bytes: int
    descriptors: int
    seconds_in_transport: float = 0.0
    seconds_to_post: float = 0.0


class ReadErrored(msgspec.Struct, frozen=True):
    """A READ ended with an error; it is quiescent. `transport_lost`: see `statemachine.failures.TransferError`."""

    handle: ReadHandle
    completed_ns: int
    error: str
    transport_lost: bool


class NotificationReceived(msgspec.Struct, frozen=True):
    """A notification from `sender` (an agent name, which need not have been added here). Bytes are untrusted."""

    sender: AgentName
    message_untrusted: bytes


class PortBroken(msgspec.Struct, frozen=True):
    """The thread or process behind the port is gone; no further event will come and every call raises."""

    error: str


NixlEvent: TypeAlias = ReadDone | ReadErrored | NotificationReceived | PortBroken


class NixlCallFailed(Exception):
    """A NIXL call raised. `operation` names it, `transport_lost` says that the peer's connection is gone."""

    def __init__(self, operation: str, error: str, *, transport_lost: bool = False) -> None:
        super().__init__(f"{operation}: {error}")
        self.operation = operation
        self.error = error
        self.transport_lost = transport_lost


class ReadInFlight(Exception):
    """`release_read` of a READ whose end has not been seen: refused, because it would not stop the READ."""


class PortClosed(Exception):
    """The port is closed or broken."""


class PortCounts(msgspec.Struct, frozen=True):
    """What the port holds right now; all zero (but registered_ranges) means nothing leaked."""

    remote_agents: int
    descriptor_lists: int
    reads: int
    registered_ranges: int


class NixlPort(Protocol):
    """One NIXL agent. See the module's contract."""

    @property
    def agent_name(self) -> AgentName: ...

    @property
    def agent_metadata(self) -> bytes:
        """What a peer passes to its `add_remote_agent`; includes the registered memory."""
        ...

    def set_event_callback(self, on_event: Callable[[NixlEvent], None]) -> None:
        """Set once, before the first async call."""
        ...

    async def add_remote_agent(self, metadata: bytes) -> AgentName:
        """Load a peer. Raises NixlCallFailed (garbage metadata, own metadata, same name with other metadata)."""
        ...

    async def remove_remote_agent(self, name: AgentName) -> None:
        """Forget a peer; unknown names are ignored. READs in flight to it stay in flight and still end in an event."""
        ...

    async def prepare_local(self, runs: Sequence[MemoryRun]) -> DescriptorListHandle:
        """Prepare local descriptors; ids run through `runs` in order, `count` ids each."""
        ...

    async def prepare_remote(self, agent: AgentName, runs: Sequence[MemoryRun]) -> DescriptorListHandle:
        """The same for a peer's memory. Raises NixlCallFailed for memory that the peer did not register."""
        ...

    async def release_descriptor_list(self, handle: DescriptorListHandle) -> None: ...

    async def post_read(
        self,
        local: DescriptorListHandle,
        local_ids: DescriptorIds,
        remote: DescriptorListHandle,
        remote_ids: DescriptorIds,
        notification: bytes,
    ) -> ReadHandle:
        """Start reading remote_ids[i] into local_ids[i]; `notification` is sent to the peer when all is read."""
        ...

    async def release_read(self, handle: ReadHandle) -> None:
        """Dispose of a READ that has ended. Raises ReadInFlight otherwise; releasing twice is a no-op."""
        ...

    async def send_notification(self, agent: AgentName, message: bytes) -> None:
        """Raises NixlCallFailed when the connection is known to be gone. Delivery is not guaranteed."""
        ...

    def expect_notifications(self, expected: bool) -> None:
        """While true, incoming notifications are looked for often (about every millisecond), else rarely."""
        ...

    def counts(self) -> PortCounts: ...

    async def aclose(self, grace_seconds: float) -> list[ReadHandle]:
        """Close; returns the READs that had to be abandoned in flight. Idempotent."""
        ...
