"""Commands and worker events: what the scheduler side tells the actors of a worker, and what they tell back.

The scheduler side decides commands; the step metadata (`step_metadata`) carries them to the worker process, whose
engine thread hands them to the actors as they are. Worker events come back to the engine thread. Who has handed one
over changes nothing in it. No vLLM in here: the runtime imports this module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from connector.addresses import join_address
from connector.ports.nixl import ReadMeasured
from statemachine.failures import Failure, ParamsFailure
from statemachine.lease import LeaseName


class PeerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """A remote engine as a request names it."""

    engine_id: str
    host: str
    port: int
    tp_size: int
    """What the client says. Facts about sizes are in the engine's own handshake; a built-in engine tells none."""
    dcp_size: int = 1
    pp_size: int = 1
    registration: int = 0
    """As of `wire.params.RemotePrefill`."""

    def __str__(self) -> str:
        return join_address(self.host, self.port)


# --- commands: decode side ------------------------------------------------------------------------------------------


class GroupPull(msgspec.Struct, frozen=True, kw_only=True):
    """The block tables of one KV cache group: logical ids, consecutive in the request on both sides."""

    local_block_ids: list[int]
    """Blocks to read into."""
    local_first: int
    """How many blocks of our size lie before local_block_ids[0] in the request."""
    remote_block_ids: list[int]
    """The peer's block ids as it sent them, without placeholders. They begin with the first block of the request when
    the group keeps everything; otherwise they end with the last one of `remote_num_tokens`."""
    window_tokens: int | None = None
    """Only so many tokens at the end are needed, and kept by either side; None: all."""


class StartPull(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Read a request's blocks, group by group: vLLM has parked the request until they are here.

    `num_tokens`: tokens to load, counted from the start of the request (None: as far as both tables reach);
    `remote_num_tokens`: how many the peer has, if it says so. `age_seconds`: how long ago this engine first heard of
    the request, when the command was made. `keeps_lease`: the lease is kept when this has ended, until LetGo.
    """

    request_id: str
    lease: LeaseName
    """The lease of the blocks on the peer."""
    peer: PeerAddress
    groups: tuple[GroupPull, ...]
    num_tokens: int | None
    remote_num_tokens: int | None
    age_seconds: float
    keeps_lease: bool = False

    @property
    def local_block_ids(self) -> list[int]:
        """The blocks of all groups; ids of different groups come from the same pool."""
        return [block_id for group in self.groups for block_id in group.local_block_ids]


class ReleaseUnread(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Nothing is read for the request: tell the peer that this consumer of the lease is finished.

    `age_seconds` is as in StartPull, and `keeps_lease` where such a command was turned away.
    """

    request_id: str
    lease: LeaseName
    peer: PeerAddress
    age_seconds: float
    keeps_lease: bool = False


class LetGo(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """No request here wants anything of this lease any more. Follows the last StartPull with `keeps_lease` for it."""

    lease: LeaseName
    peer: PeerAddress


class RejectPull(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The request waits for KV, but its parameters do not say where that lies, or no engine of this fleet has made
    them.

    `lease`, `engine_id`: what they name, where that can be read; for people, because nobody vouches for it.
    `age_seconds` is as in StartPull.
    """

    request_id: str
    local_block_ids: list[int]
    failure: ParamsFailure
    lease: LeaseName = LeaseName("", 0)
    engine_id: str = ""
    age_seconds: float = 0.0


class AbortPull(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine gave the request up. Unknown ids are ignored: the request may have ended already."""

    request_id: str


class TrackLease(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The request waits in the scheduler's queue: keep its lease on the peer alive.

    Exactly one StartPull or ReleaseUnread for the same request and peer follows, with which this ends. `age_seconds` is
    as there.
    """

    request_id: str
    lease: LeaseName
    peer: PeerAddress
    age_seconds: float


class MeetPeer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Connect this engine, which no request needs yet. It says its sizes itself. Not sent by the scheduler side."""

    peer: PeerAddress


# --- commands: prefill side -----------------------------------------------------------------------------------------


class LeaseComputing(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A request that will be lent has been scheduled. `age_seconds`: how long ago this engine first heard of it."""

    lease: LeaseName
    age_seconds: float = 0.0


class LeaseGranted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The request has finished; keep its blocks for `fixed_seconds` from now, whoever holds them; None: for the time of
    a lease (`kv_lease_duration`), and longer for who holds them."""

    lease: LeaseName
    blocks: int
    fixed_seconds: float | None = None
    block_ids: tuple[list[int], ...] | None = None
    """By cache group, those that are lent, where they are to have checksums."""
    sums: bytes | None = None
    """These (`wire.control.encode_sums`), which the worker has made on the way, or NO_SUMS."""


class LeaseWithdrawn(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The request ended without lending."""

    lease: LeaseName


# --- commands: either side ------------------------------------------------------------------------------------------

LOCAL_PREFILLS_NAMED_MAX = 16
"""How many requests of one step are named; the others are only counted, so that an engine that also serves plain
requests pays little for them."""


class LocalPrefill(msgspec.Struct, frozen=True, kw_only=True):
    """A request whose prompt is computed here, without anybody having asked for that.

    `reason`: as local prefills are counted. `tokens`: of the prompt, which are computed as far as they are not cached.
    """

    request_id: str
    reason: str
    tokens: int


class LocalPrefillsSeen(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Since the last step. So many neither said where their KV is nor asked for it to be lent: where a router was to
    send parameters along, it has lost them. `named` are the first LOCAL_PREFILLS_NAMED_MAX of these and of those that
    were computed for other reasons."""

    count: int
    named: tuple[LocalPrefill, ...]


class RoomLacking(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A request waits in vLLM's queue because what is kept from the pool leaves it no room: so many blocks in
    quarantine, and lent back, when that was noticed. For people only, as is RoomFound."""

    request_id: str
    num_tokens: int
    quarantined: int
    lent_back: int


class RoomFound(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """It has blocks, or has ended."""

    request_id: str


class WarmedUp(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the engine thread, once: vLLM has warmed this engine up, and has captured its CUDA graphs."""


class SumsFound(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """From the engine thread: the answer to SumsWanted. `error`: why there is none."""

    ticket: int
    sums: npt.NDArray[np.int64]
    error: str | None = None


class LoadFailed(msgspec.Struct, frozen=True, kw_only=True):
    """From the engine thread: a request of which all READs have ended well could not be finished. For people only."""

    request_id: str
    failure: Failure


Command: TypeAlias = (
    StartPull
    | ReleaseUnread
    | LetGo
    | RejectPull
    | AbortPull
    | TrackLease
    | MeetPeer
    | LeaseComputing
    | LeaseGranted
    | LeaseWithdrawn
    | LocalPrefillsSeen
    | RoomLacking
    | RoomFound
    | WarmedUp
    | SumsFound
    | LoadFailed
)


class AfterSteps(NamedTuple):
    """A READ, and whether the device has done the steps that it had been given before it.

    The worker makes it on the way to the actors. `are_over` may be called in any thread.
    """

    command: StartPull
    are_over: Callable[[], bool]


PullCommand: TypeAlias = StartPull | ReleaseUnread | LetGo | AbortPull | TrackLease | MeetPeer


# --- worker events -------------------------------------------------------------------------------------------------


class Memory(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Stretches of local memory, shape [n] each."""

    addresses: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]


class Permutation(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Blocks that READs have left in the peer's order, and that must be permuted before they are used."""

    kernel_blocks: tuple[npt.NDArray[np.int64], ...]
    """By cache group, shape [n] each."""
    chunks: tuple[int, ...]
    """By cache group: of how many blocks of the peer, one after another, each consists."""
    heads_first: bool
    """Heads before tokens in each of these."""
    packs: bool = False
    """K and V are as the tensor's shape says, and their layers have to put them in their own order."""


class ReceiveEnded(msgspec.Struct, frozen=True, kw_only=True):
    """A request that waits for KV has ended: loaded (`failure` None) or not.

    `quarantined`: READs may still write into `local_block_ids`, which are named for no other reason. Before the blocks
    are used, `permutation` must be carried out, and then `unfilled` zeroed, the parts of them that no READ has written;
    if it packs, `unfilled` is zeroed before it.
    """

    request_id: str
    failure: Failure | None
    local_block_ids: list[int]
    quarantined: bool
    permutation: Permutation | None = None
    unfilled: Memory | None = None


class SendEnded(msgspec.Struct, frozen=True, kw_only=True):
    """A lease ended; the blocks of its request may be freed. `expired`: not all its readers had read them."""

    lease: LeaseName
    expired: bool


class QuarantineLifted(msgspec.Struct, frozen=True, kw_only=True):
    """The READs that might have written into these blocks have ended."""

    local_block_ids: list[int]


class Stretch(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Blocks of local memory: `count` of `length_bytes`, one every `stride_bytes` from `address`; `blocks`, shape [n],
    are those that are meant."""

    address: int
    stride_bytes: int
    length_bytes: int
    count: int
    blocks: npt.NDArray[np.int64]


class SumsWanted(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Sum the blocks of these stretches as they are now; SumsFound with this ticket is the answer."""

    ticket: int
    stretches: tuple[Stretch, ...]


class WorkerStopped(msgspec.Struct, frozen=True, kw_only=True):
    """This worker lends no KV any more, and mostly reads none either; what is open has ended, or ends in its time."""

    reason: str


WorkerEvent: TypeAlias = ReceiveEnded | SendEnded | QuarantineLifted | ReadMeasured | SumsWanted | WorkerStopped
