"""Whether something was raised because there is no memory: on a device, or on the host, where torch has no type for it.

An engine on processors, and one whose KV is staged on the host, take memory of the host to put blocks in order. Where
the kernel refuses it (`ulimit -v`, `vm.overcommit_memory` 2) that costs the request, as on a device.
"""

from __future__ import annotations

import torch

_IN_WORDS = ("out of memory", "can't allocate memory", "not enough memory")
"""What torch says of pinned memory, of the host's on Linux, and of that elsewhere."""


def lacks_memory(error: Exception) -> bool:
    """The same may succeed later, or in smaller parts."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _IN_WORDS)
