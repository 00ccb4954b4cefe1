"""Beside vLLM's OffloadingConnector: what it still has to copy is copied before KV is read into its blocks. vLLM's own
scheduler, `MultiConnector`, and the scheduler side of both connectors."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler as offloading
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from connector.protocol import StartPull
from connector.scheduler import beside_offloading
from tests.unit.hybrid_engine import (
    BLOCK_TOKENS,
    MAX_MODEL_TOKENS,
    HybridEngine,
    _cache_config,
    block_hasher,
    full,
    scheduling_config,
    tokens_of,
)
from tests.unit.log_lines import listening

BLOCKS = 24
OURS = {
    "kv_connector": "NixlConnector",
    "kv_connector_module_path": "connector",
    "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
}
OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "cpu_bytes_to_use": 1 << 26,
        "spec_name": "HostOffloadingSpec",
        "spec_module_path": "tests.e2e.host_offloading",
    },
}


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM's method is put back, because it is wrapped once for a process."""
    monkeypatch.setattr("connector.nixl_connector.require_supported", lambda *_: None)
    its_class = offloading.OffloadingConnectorScheduler
    own = its_class.update_state_after_alloc
    yield
    its_class.update_state_after_alloc = own


def scheduler(children: list[dict[str, Any]]) -> Scheduler:
    config = copy.copy(scheduling_config(BLOCK_TOKENS, MAX_MODEL_TOKENS))
    config.scheduler_config = copy.copy(config.scheduler_config)
    config.scheduler_config.async_scheduling = False
    config.cache_config = copy.copy(config.cache_config)
    config.cache_config.num_gpu_blocks = BLOCKS
    config.cache_config.enable_prefix_caching = True
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        engine_id="d",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"connectors": children},
    )
    cache_config = _cache_config([full()], BLOCKS)
    block_size, hash_block_size = resolve_kv_cache_block_sizes(cache_config, config)
    return Scheduler(
        vllm_config=config,
        kv_cache_config=cache_config,
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
        hash_block_size=hash_block_size,
    )


def request(name: str, tokens: list[int], params: dict[str, Any] | None) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=1, ignore_eos=True, extra_args={"kv_transfer_params": params}),
        pooling_params=None,
        block_hasher=block_hasher(BLOCK_TOKENS, MAX_MODEL_TOKENS),
    )


def offloading_side(engine: Scheduler) -> Any:
    (found,) = [
        each.connector_scheduler
        for each in engine.connector._connectors  # type: ignore[union-attr]
        if type(each).__name__ == "OffloadingConnector"
    ]
    return found


def step(engine: Scheduler, names_of: list[dict[str, Any]]) -> tuple[set[int], dict[int, set[int]], set[int]]:
    """One step: the blocks that a READ begins to write into, those that each copy to the host is made from, and which
    copies have to be made first."""
    output = engine.schedule()
    metadata = dict(
        zip((each["kv_connector"] for each in names_of), output.kv_connector_metadata.metadata, strict=True)
    )
    of_offloading = metadata["OffloadingConnector"]
    reads = {
        block_id
        for command in metadata["NixlConnector"].commands
        if isinstance(command, StartPull) and command.awaited
        for block_id in command.local_block_ids
    }
    copies = {number: set(job.src_spec.block_ids.tolist()) for number, job in of_offloading.store_jobs.items()}
    names = list(output.num_scheduled_tokens)
    sampled = []
    for name in names:
        found = engine.requests[name]
        sampled.append([7] if found.num_computed_tokens >= found.num_tokens else [])
    engine.update_from_output(
        output,
        ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
        ),
    )
    return reads, copies, set(of_offloading.jobs_to_flush or ())


@pytest.mark.parametrize("children", [[OURS, OFFLOADING], [OFFLOADING, OURS]], ids=["ours first", "ours last"])
def test_what_a_read_will_overwrite_is_copied_to_the_host_before(children: list[dict[str, Any]]) -> None:
    """Otherwise the host has the KV of one request under the name of another one, and hands it out later."""
    prefill = HybridEngine([full()], engine_id="p")
    read, computed = tokens_of(18 * BLOCK_TOKENS, seed=2), tokens_of(16 * BLOCK_TOKENS + 1, seed=1)
    prefill.prefill("read", read)
    engine = scheduler(children)
    engine.add_request(request("computed", computed, None))
    _, copies, _ = step(engine, children)
    ((number, copied),) = copies.items()
    engine.add_request(request("read", read, prefill.params["read"]))
    reads, _, first = step(engine, children)
    assert reads & copied, "the pool has room for one of them"
    assert first == {number}


def test_a_prefix_hit_is_overwritten_by_nobody() -> None:
    children = [OURS, OFFLOADING]
    engine = scheduler(children)
    engine.add_request(request("computed", tokens_of(4 * BLOCK_TOKENS + 1, seed=1), None))
    step(engine, children)
    again = request("again", tokens_of(4 * BLOCK_TOKENS + 1, seed=1), None)
    hit = engine.kv_cache_manager.get_computed_blocks(again)[0]
    assert len(hit.blocks[0]) == 4
    side = offloading_side(engine)
    side.update_state_after_alloc(again, hit, 0)
    assert side._current_batch_allocated_block_ids == set()


def test_a_vllm_that_cannot_be_told_is_said_to_be_dangerous(monkeypatch: pytest.MonkeyPatch) -> None:
    beside_offloading._say_once.cache_clear()
    engine = scheduler([OURS, OFFLOADING])
    side = offloading_side(engine)
    monkeypatch.delattr(side, "_current_batch_allocated_block_ids")
    blocks = engine.kv_cache_manager.empty_kv_cache_blocks
    with listening() as lines:
        for _ in range(2):
            side.update_state_after_alloc(request("x", [1], None), blocks, 0)
    (line,) = [each for each in lines.records if each.levelno == logging.WARNING]
    assert "may be overwritten" in line.getMessage()


def test_it_is_wrapped_once() -> None:
    scheduler([OURS, OFFLOADING])
    wrapped = offloading.OffloadingConnectorScheduler.update_state_after_alloc
    scheduler([OFFLOADING, OURS])
    assert offloading.OffloadingConnectorScheduler.update_state_after_alloc is wrapped
