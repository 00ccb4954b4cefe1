"""Copies between the device and its buffers on the host: how much at once, and where the device has no memory left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

from connector.worker import host_staging
from connector.worker.cache_memory import CacheMemory
from connector.worker.finishing import Finishing, Loaded, run_at_once
from connector.worker.host_staging import Direction, HostStaging
from connector.worker.landing import BlockPermuter
from statemachine.failures import DeviceMemoryExhausted
from tests.unit.hybrid_engine import full

BLOCKS = 12


class Operation:
    """vLLM's, on a device that has room for so many bytes of a layer beside the cache, and none for one block."""

    def __init__(self, room_bytes: int, no_room_for: int | None = None) -> None:
        self._room_bytes = room_bytes
        self._no_room_for = no_room_for
        self.calls: list[tuple[list[int], Direction]] = []

    def __call__(
        self,
        source: Mapping[str, torch.Tensor],
        target: Mapping[str, torch.Tensor],
        source_ids: Sequence[int],
        target_ids: Sequence[int],
        direction: Direction,
    ) -> None:
        for layer in source:
            if self._no_room_for in source_ids or source[layer][source_ids].nbytes > self._room_bytes:
                raise torch.OutOfMemoryError("CUDA out of memory")
            target[layer][target_ids] = source[layer][source_ids]
        self.calls.append((list(source_ids), direction))


def staging(operation: Operation) -> tuple[HostStaging, torch.Tensor, torch.Tensor]:
    """Of one layer, whose blocks have 1,024 bytes; its cache on the device, and on the host."""
    device = torch.zeros(BLOCKS, 2, 4, 32, dtype=torch.int32)
    host = torch.arange(device.numel(), dtype=torch.int32).reshape(device.shape)
    groups = [KVCacheGroupSpec(["layer"], full())]
    config = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)
    made = HostStaging(config, {"layer": device}, {"layer": host})
    made.set_copy_operation(operation)
    return made, device, host


def test_a_copy_takes_little_memory_of_the_device_however_long_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_staging, "MOVED_AT_ONCE_BYTES", 4_095)
    operation = Operation(room_bytes=3 * 1_024)
    ours, device, host = staging(operation)
    ours.load([[7, 1, 2, 9, 4, 5, 6, 11]])
    assert operation.calls == [([7, 1, 2], "h2d"), ([9, 4, 5], "h2d"), ([6, 11], "h2d")]
    loaded = [1, 2, 4, 5, 6, 7, 9, 11]
    assert torch.equal(device[loaded], host[loaded])
    assert not device[[0, 3, 8, 10]].any()
    host.zero_()
    ours.save([loaded])
    assert torch.equal(device[loaded], host[loaded])
    assert [len(ids) for ids, direction in operation.calls if direction == "d2h"] == [3, 3, 2]


def test_a_block_that_is_larger_than_what_is_moved_at_once_goes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_staging, "MOVED_AT_ONCE_BYTES", 10)
    operation = Operation(room_bytes=1_024)
    ours, _, _ = staging(operation)
    ours.load([[3, 4]])
    assert operation.calls == [([3], "h2d"), ([4], "h2d")]


def test_what_the_device_has_no_room_for_is_copied_in_smaller_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_staging, "MOVED_AT_ONCE_BYTES", 4_096)
    operation = Operation(room_bytes=2_048)
    ours, device, host = staging(operation)
    ours.load([[7, 1, 2, 9, 4]])
    assert [ids for ids, _ in operation.calls] == [[7, 1], [2, 9], [4]]
    loaded = [1, 2, 4, 7, 9]
    assert torch.equal(device[loaded], host[loaded])


def test_a_device_without_memory_fails_the_request_that_is_copied_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_staging, "MOVED_AT_ONCE_BYTES", 2_048)
    ours, device, host = staging(Operation(room_bytes=1 << 30, no_room_for=2))
    finishing = Finishing(run_at_once, BlockPermuter({}), CacheMemory([host]), ours)
    both = [Loaded("long", ([1, 2],), None, None), Loaded("short", ([3],), None, None)]
    assert finishing.finish(both) == ({"short"}, {"long": DeviceMemoryExhausted(error="CUDA out of memory")})
    assert torch.equal(device[3], host[3])
