"""Checksums of blocks in a device's memory: those that a host finds for the same bytes.

P may have its blocks on a device and D on the host, or the other way round.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from connector.protocol import Stretch
from connector.worker.block_sums import BlockSums
from tests.gpu.patience import patient
from tests.rig.sums import sums_of

pytestmark = pytest.mark.timeout(patient(120))

BYTES = 1 << 20
BLOCKS = [5, 0, 9, 40, 40]


def stretch(memory: torch.Tensor, first: int, length: int, stride: int) -> Stretch:
    return Stretch(
        address=memory.data_ptr() + first,
        stride_bytes=stride,
        length_bytes=length,
        count=(memory.numel() - first - length) // stride + 1,
        blocks=np.array(BLOCKS, np.int64),
    )


@pytest.mark.parametrize("at_once_bytes", [8 << 20, 10_000])
def test_the_sums_are_those_of_the_host(
    at_once_bytes: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of blocks that lie close and apart, at places that are aligned and not, all at once and in pieces."""
    monkeypatch.setattr("connector.worker.block_sums._AT_ONCE_BYTES", at_once_bytes)
    host = torch.randint(0, 256, (2, BYTES), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    ours = [each.to(device, copy=True) for each in host]
    places = [(0, 4096, 4096), (64, 4096, 8192), (8, 24, 40), (3, 7, 9)]
    sums = BlockSums(ours)
    for _ in range(2):  # the second time with what it keeps of the first
        found = sums.of([stretch(each, *place) for each in ours for place in places])
        assert found.tolist() == sums_of([stretch(each, *place) for each in host for place in places]).tolist()
    ours[1][4096 * BLOCKS[0] + 17] ^= 1
    found = sums.of([stretch(each, 0, 4096, 4096) for each in ours])
    expected = sums_of([stretch(each, 0, 4096, 4096) for each in host])
    assert (found != expected).nonzero()[0].tolist() == [len(BLOCKS)]
