"""The door to NIXL: what the actors may ask of an agent, as a Protocol.

The real agent is `nixl_agent.RealNixlPort`; the simulator has a fake. Both pass tests/conformance/nixl_suite.py.

Contract (each line is a test of the suite)
* All methods are called from the trio thread only. Methods declared `async` are checkpoints; the others never block.
  Whatever the order is in which they are called is the order in which NIXL is.
* Handles are plain ints made by the port. A handle is never reused in the life of a port.
* `post_read` gives an order and returns at once. The READ's end arrives as exactly one `PortReadEnded` event, also when
  NIXL refused it, or the port was closed before its turn came: then `was_posted` is false, and nothing of it can write.
  A READ that never ends has no such event. Before it ends there may be one `ReadPosted`: NIXL has all of it.
  What `post_read` raises it raises before anything is ordered.
* `PortReadEnded` without an error: all bytes are in local memory, and nothing of that READ writes there any more.
* `PortReadEnded` with an error: part of the bytes may have arrived. NIXL reports the error of the first descriptor that
  failed, while the transport may still be working on the others. `quiescent` says whether that is excluded: only if
  the READ had a single descriptor, NIXL knows its error, and released its handle. If it is false, bytes may land at any
  later time. Nothing else proves a READ's end: NIXL cannot stop one, and releasing its handle does not (docs/nixl.md
  fact 1).
* NIXL may forget an agent that was not removed. Then READs from it end with an error as soon as that is noticed, with
  `transport_lost` and not quiescent, new ones are refused with `transport_lost`, and so are notifications. Removing the
  agent and adding it again heals it.
* Metadata that are refused cost nothing that is loaded, also when they name an agent that is.
* Whose agent metadata are can be asked without loading them.
* A peer that is reached is the process that answered: what comes to listen at its place later is not read.
* The port releases READs by itself. The handle of a READ that errored and is not quiescent is kept until its remote
  agent was removed, and then released; what NIXL refuses to release is kept until the port is closed.
* Events are delivered in the order in which they became known, through the `on_event` callback, in the trio thread,
  outside of any port method: a handle is known before its events come. The callback may call the port; it must not
  raise.
* Cancelling an async method never loses the effect of the call: it either never started or its result is disposed of.
* A sender whose name cannot be decoded does not end the port. `PortCounts.notification_polls_lost` counts what it cost.
* An agent at which peers cannot connect any more says so once (`ListenerLost`), within seconds. All else goes on.
* `aclose` waits for READs in flight at most `grace_seconds`, then closes anyway. It returns the handles of all READs
  that may still write: those in flight and those that errored and are not known to be over. Memory named by them must
  not be reused by the process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

AgentName: TypeAlias = str
"""Name of a NIXL agent, decoded (NIXL itself returns bytes)."""

DescriptorListHandle: TypeAlias = int
ReadHandle: TypeAlias = int

DescriptorIds: TypeAlias = npt.NDArray[np.int32]
"""Indices into a prepared descriptor list, shape [n], region-major."""

MemoryKind: TypeAlias = Literal["DRAM", "VRAM"]
"""NIXL's name for where memory lies: the host's, or a device's."""


class MemoryRun(msgspec.Struct, frozen=True, gc=False):
    """`count` blocks of `length_bytes`, the first at `address`, one every `stride_bytes` (>= length_bytes)."""

    address: int
    length_bytes: int
    stride_bytes: int
    count: int
    device_id: int = 0
    memory_kind: MemoryKind = "DRAM"


class MemoryRange(msgspec.Struct, frozen=True):
    """A registered range: `length_bytes` from `address`."""

    address: int
    length_bytes: int
    device_id: int = 0
    memory_kind: MemoryKind = "DRAM"


class ReadPosted(msgspec.Struct, frozen=True):
    """A READ was handed to NIXL and has not ended yet: the port has come to the next one."""

    handle: ReadHandle


class PortReadEnded(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a READ. See the module's contract for what it proves.

    Attributes:
        ended_ns: `connector.clock.BootClock` just after the end was seen.
        error: None when all bytes have arrived.
        transport_lost: the connection to the peer is gone; see `statemachine.failures.TransferError`.
        quiescent: nothing of this READ writes to local memory any more. Always true without an error.
        was_posted: false when nothing was handed to the transport.
        bytes: length of the whole READ, whether or not it has arrived; 0 when it was not posted.
        descriptors: number of descriptors that the READ was posted with.
    """

    handle: ReadHandle
    ended_ns: int
    error: str | None
    transport_lost: bool = False
    quiescent: bool = True
    was_posted: bool = True
    bytes: int = 0
    descriptors: int = 0


class ReadMeasured(msgspec.Struct, frozen=True, kw_only=True):
    """What NIXL's telemetry says of a READ without an error; comes some time after its end, or never.

    Attributes:
        bytes, descriptors: as in `PortReadEnded`.
        seconds_in_transport, seconds_to_post: 0.0 when NIXL says nothing.
    """

    handle: ReadHandle
    bytes: int
    descriptors: int
    seconds_in_transport: float
    seconds_to_post: float


class NotificationReceived(msgspec.Struct, frozen=True):
    """A notification from `sender` (an agent name, which need not have been added here). Bytes are untrusted."""

    sender: AgentName
    message_untrusted: bytes


class PortBroken(msgspec.Struct, frozen=True):
    """The thread or process behind the port is gone; no further event will come and every call raises."""

    error: str


class ListenerLost(msgspec.Struct, frozen=True):
    """No peer can connect to this agent any more that has not before. What is connected goes on, and so does the port.
    Comes once."""

    error: str


NixlEvent: TypeAlias = ReadPosted | PortReadEnded | ReadMeasured | NotificationReceived | ListenerLost | PortBroken


class NixlCallFailed(Exception):
    """A NIXL call raised. `operation` names it, `transport_lost` says that the peer's connection is gone,
    `no_descriptor_left` that this process had none for what it needed."""

    def __init__(
        self, operation: str, error: str, *, transport_lost: bool = False, no_descriptor_left: bool = False
    ) -> None:
        super().__init__(f"{operation}: {error}")
        self.operation = operation
        self.error = error
        self.transport_lost = transport_lost
        self.no_descriptor_left = no_descriptor_left


class PortClosed(Exception):
    """The port is closed or broken."""


class PortCounts(msgspec.Struct, frozen=True):
    """What the port holds right now.

    Attributes:
        remote_agents: loaded peers, and those whose removal waits for a READ in flight.
        descriptor_lists: prepared lists.
        reads: READs that may still write: those in flight, and those that errored and whose handle is kept.
            Not those whose turn has not come.
        registered_ranges: of our own memory.
        errored_reads: those of `reads` that have ended.
        notification_polls_lost: how often NIXL failed to hand over what had arrived, since the port was opened.
        lag_seconds: for how long NIXL has not come back from a call; 0 unless that is long.
    """

    remote_agents: int
    descriptor_lists: int
    reads: int
    registered_ranges: int
    errored_reads: int = 0
    notification_polls_lost: int = 0
    lag_seconds: float = 0.0


class NixlPort(Protocol):
    """One NIXL agent. See the module's contract."""

    @property
    def agent_name(self) -> AgentName: ...

    @property
    def agent_metadata(self) -> bytes:
        """What a peer passes to its `add_remote_agent`; includes the registered memory."""
        ...

    def agent_named_in(self, metadata: bytes) -> AgentName | None:
        """Whose metadata these are; nothing is loaded. None: it cannot be made out."""
        ...

    def set_event_callback(self, on_event: Callable[[NixlEvent], None]) -> None:
        """Set once, before the first async call."""
        ...

    async def add_remote_agent(self, metadata: bytes) -> AgentName:
        """Load a peer. Raises NixlCallFailed (garbage metadata, own metadata, same name with other metadata)."""
        ...

    async def remove_remote_agent(self, name: AgentName) -> None:
        """Forget a peer and make its descriptor lists useless; unknown names are ignored.

        READs in flight to it stay in flight and still end in an event. NIXL forgets the peer once the last of them has
        ended, and then the handles of its READs that errored are released.
        """
        ...

    async def prepare_local(self, runs: Sequence[MemoryRun]) -> DescriptorListHandle:
        """Prepare local descriptors; ids run through `runs` in order, `count` ids each. One kind of memory."""
        ...

    async def prepare_remote(self, agent: AgentName, runs: Sequence[MemoryRun]) -> DescriptorListHandle:
        """The same for a peer's memory. Raises NixlCallFailed for memory that the peer did not register."""
        ...

    async def reach(self, agent: AgentName) -> None:
        """Wait until something was read from a peer, after its first list was prepared. Raises NixlCallFailed when that
        fails. Not bounded: a peer that hangs, or whose packets are dropped, is not reached."""
        ...

    async def release_descriptor_list(self, handle: DescriptorListHandle) -> None: ...

    def post_read(
        self,
        local: DescriptorListHandle,
        local_ids: DescriptorIds,
        remote: DescriptorListHandle,
        remote_ids: DescriptorIds,
    ) -> ReadHandle:
        """Order a READ of remote_ids[i] into local_ids[i]; its turn comes after everything asked before. Raises
        PortClosed."""
        ...

    async def send_notification(self, agent: AgentName, message: bytes) -> None:
        """Raises NixlCallFailed when the connection is known to be gone. Delivery is not guaranteed."""
        ...

    def expect_notifications(self, expected: bool) -> None:
        """While true, incoming notifications are looked for often (about every two milliseconds), else rarely."""
        ...

    def counts(self) -> PortCounts: ...

    async def aclose(self, grace_seconds: float) -> list[ReadHandle]:
        """Close; returns the READs that may still write (see the contract). Idempotent."""
        ...
