"""What the engine thread does for `verify`, for tests without one: checksums of memory at addresses of this process.

Written anew, in numbers of any size, so that it can be compared with `connector/worker/block_sums.py`.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence

import msgspec
import numpy as np

from connector.layout.geometry import RankLayout
from connector.layout.verification import Numbers, lent_blocks, lent_runs
from connector.protocol import LeaseGranted, Stretch, SumsFound, SumsWanted
from connector.runtime.verification import lease_sums, stretches
from connector.wire.control import encode_sums

_MASK = 2**64 - 1


@functools.cache
def factor(place: int) -> int:
    """What the word at `place` of a block is multiplied by: SplitMix64, odd."""
    mixed = (place + 1) * 0x9E3779B97F4A7C15 & _MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
    return (mixed ^ mixed >> 31) | 1


def sum_of(content: bytes) -> int:
    """The checksum of a block, as a signed number of 64 bits. Words have 4 bytes, or fewer, and are signed, but for
    single bytes."""
    width = math.gcd(4, len(content))
    words = (
        int.from_bytes(content[start : start + width], "little", signed=width > 1)
        for start in range(0, len(content), width)
    )
    total = sum(word * factor(place) for place, word in enumerate(words)) & _MASK
    return total - (total >> 63 << 64)


def sums_of(wanted: Sequence[Stretch]) -> Numbers:
    return np.array(
        [
            sum_of(ctypes.string_at(each.address + block * each.stride_bytes, each.length_bytes))
            for each in wanted
            for block in each.blocks.tolist()
        ],
        np.int64,
    )


def found(wanted: SumsWanted) -> SumsFound:
    return SumsFound(ticket=wanted.ticket, sums=sums_of(wanted.stretches))


def with_sums(granted: LeaseGranted, layout: RankLayout, block_ids: Sequence[list[int]], verify: str) -> LeaseGranted:
    """The grant as a rank's actors hear of it; `block_ids` by cache group."""
    if verify == "off":
        return granted
    blocks = lent_blocks(layout, block_ids, sampled=verify == "sampled")
    sums = lease_sums(blocks, sums_of(stretches(lent_runs(layout, blocks))))
    return msgspec.structs.replace(granted, sums=encode_sums(sums))
