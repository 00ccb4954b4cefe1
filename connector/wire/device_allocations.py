"""What UCX finds its mappings of another process's device memory by, as an engine says it of its own memory.

Who reads device memory over CUDA IPC maps it. UCX keeps such a mapping for as long as the reading process lives, also
when the other one has ended, and takes it again for memory of the same process id, process id namespace, address and
buffer id, whichever process that is now (docs/nixl.md fact 40). A container that is started again may repeat all four.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

ALLOCATIONS_MAX = 8192
"""An engine has one for each layer at most, a few for states."""

_Unsigned: TypeAlias = Annotated[int, Meta(ge=0)]
MACHINE_PATTERN = r"\A[0-9a-f-]{0,64}\Z"


class Allocation(msgspec.Struct, frozen=True, array_like=True):
    """One allocation of device memory. `buffer_id`: CUDA's number of it, which counts within a process."""

    address: _Unsigned
    length_bytes: Annotated[int, Meta(ge=1)]
    buffer_id: _Unsigned


class DeviceAllocations(msgspec.Struct, frozen=True, kw_only=True):
    """The allocations that hold a rank's KV cache, and whose they are.

    `machine`: the id of its boot, empty where it is not known. `process_namespace`: the inode of the namespace that
    `process_id` counts in, or 0.
    """

    machine: Annotated[str, Meta(pattern=MACHINE_PATTERN)]
    process_id: Annotated[int, Meta(ge=1)]
    process_namespace: _Unsigned
    allocations: Annotated[tuple[Allocation, ...], Meta(max_length=ALLOCATIONS_MAX)]
