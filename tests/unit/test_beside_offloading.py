"""Beside vLLM's OffloadingConnector: what it still has to copy is copied before KV is read into its blocks, and a load
is reported by the one of the two that does it. vLLM's own scheduler, `MultiConnector`, and the scheduler side of both
connectors."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler as offloading
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata, TransferJob
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from connector.clock import BootClock
from connector.protocol import Command, ReceiveEnded, ReleaseUnread, StartPull, TrackLease
from connector.scheduler import beside_offloading
from connector.versions import is_vllm_at_least
from connector.worker.ledger import TransferLedger
from statemachine.failures import BadParams, Failure
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
PROMPT = 4 * BLOCK_TOKENS + 1
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

TOLD_BY_US = pytest.mark.skipif(is_vllm_at_least("0.33"), reason="this vLLM sees to it by itself")


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
        block_hasher=block_hasher(BLOCK_TOKENS),
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
        if isinstance(command, StartPull)
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


@dataclass
class Decode:
    """An engine with both, and what its worker reports: of ours, what the ledger makes of a test's outcomes; of the
    other one, that all is stored, and that what a test says is loaded."""

    children: list[dict[str, Any]]
    commands: list[Command] = field(default_factory=list)
    """To ours."""
    host_loads: dict[int, TransferJob] = field(default_factory=dict)
    """Those under way."""
    told: list[tuple[str, str]] = field(default_factory=list)
    """Who has told vLLM that a request is loaded."""

    def __post_init__(self) -> None:
        self.scheduler = scheduler(self.children)
        self.ledger = TransferLedger(BootClock(), lease_seconds=30.0)
        self._completed = OffloadingWorkerMetadata()
        self._host_loaded: set[str] = set()
        self._free = self._free_blocks()

    def add(self, name: str, params: dict[str, Any] | None) -> None:
        """All have the same prompt."""
        self.scheduler.add_request(request(name, tokens_of(PROMPT, seed=1), params))

    def cache_on_the_host(self) -> None:
        """And nowhere else."""
        self.add("before", None)
        for _ in range(4):
            self.step()
        assert not self.scheduler.requests
        assert self.scheduler.reset_prefix_cache()

    def end_host_loads(self) -> None:
        for number, job in self.host_loads.items():
            self._completed.mark_completed(number)
            self._host_loaded.add(job.req_id)
        self.host_loads.clear()

    def end_pull(self, name: str, failure: Failure | None = None) -> None:
        """The actors say so."""
        self.ledger.record(
            ReceiveEnded(request_id=name, failure=failure, local_block_ids=[], quarantined=False),
        )

    def step(self) -> None:
        output = self.scheduler.schedule()
        by_child = dict(zip(self._names(), output.kv_connector_metadata.metadata, strict=True))
        for command in by_child["NixlConnector"].commands:
            self.commands.append(command)
            self.ledger.enter(command)
        self.host_loads |= by_child["OffloadingConnector"].load_jobs
        for number in by_child["OffloadingConnector"].store_jobs:
            self._completed.mark_completed(number)
        ran = list(output.num_scheduled_tokens)
        whole = [self.scheduler.requests[name] for name in ran]
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=ran,
                req_id_to_index={name: index for index, name in enumerate(ran)},
                sampled_token_ids=[[7] if each.num_computed_tokens >= each.num_tokens else [] for each in whole],
                kv_connector_output=self._report(),
            ),
        )

    def _report(self) -> KVConnectorOutput:
        ours = self.ledger.take_results()
        self.ledger.end_loaded({each.request_id for each in self.ledger.take_loaded()}, {}, ours)
        theirs, self._host_loaded = self._host_loaded, set()
        completed, self._completed = self._completed, OffloadingWorkerMetadata()
        self.told += [("NixlConnector", name) for name in ours.finished_recving]
        self.told += [("OffloadingConnector", name) for name in theirs]
        metadata = [completed if name == "OffloadingConnector" else None for name in self._names()]
        return KVConnectorOutput(
            finished_recving=ours.finished_recving | theirs,
            failed_recving=ours.failed_recving,
            kv_connector_worker_meta=MultiKVConnectorWorkerMetadata(tuple(metadata)),
        )

    def _names(self) -> list[str]:
        return [each["kv_connector"] for each in self.children]

    def _free_blocks(self) -> int:
        free: int = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return free

    def commands_for(self, name: str) -> list[Command]:
        """But for keeping its lease while it waits."""
        return [
            each
            for each in self.commands
            if not isinstance(each, TrackLease) and getattr(each, "request_id", None) == name
        ]

    def assert_nothing_is_left(self) -> None:
        (ours,) = [
            each._scheduler
            for each in self.scheduler.connector._connectors  # type: ignore[union-attr]
            if hasattr(each, "_scheduler")
        ]
        assert not ours._loads._loads
        assert not self.ledger.is_open
        assert not self.scheduler.requests
        assert self._free_blocks() == self._free


@pytest.fixture
def params() -> dict[str, Any]:
    """Of the prompt, computed by another engine."""
    prefill = HybridEngine([full()], engine_id="p")
    prefill.prefill("a", tokens_of(PROMPT, seed=1))
    found: dict[str, Any] = prefill.params["a"]
    return found


def test_a_request_that_the_other_one_loads_is_not_read_and_its_lease_is_let_go(params: dict[str, Any]) -> None:
    """Scenario 28: ours is asked for all of its tokens, and then told to load none."""
    d = Decode([OFFLOADING, OURS])
    d.cache_on_the_host()
    d.add("a", params)
    d.step()
    assert [job.req_id for job in d.host_loads.values()] == ["a"]
    (command,) = d.commands_for("a")
    assert isinstance(command, ReleaseUnread)
    d.end_pull("a")  # which nobody waits for
    d.step()
    assert d.told == [], "its KV is not there yet"
    d.end_host_loads()
    for _ in range(3):
        d.step()
    assert d.told == [("OffloadingConnector", "a")]
    d.assert_nothing_is_left()


def test_a_request_that_ours_loads_is_loaded_by_ours_alone(params: dict[str, Any]) -> None:
    """Though the other one has its prompt, too."""
    d = Decode([OURS, OFFLOADING])
    d.cache_on_the_host()
    d.add("a", params)
    d.step()
    (command,) = d.commands_for("a")
    assert isinstance(command, StartPull)
    d.end_pull("a")
    for _ in range(3):
        d.step()
    assert not d.host_loads
    assert d.told == [("NixlConnector", "a")]
    d.assert_nothing_is_left()


def test_a_request_whose_read_failed_and_that_the_other_one_loads_then_is_not_reported_by_ours_again(
    params: dict[str, Any],
) -> None:
    """Or it would go on with blocks that are still being loaded into."""
    d = Decode([OURS, OFFLOADING])
    d.cache_on_the_host()
    d.add("a", params)
    d.step()
    d.end_pull("a", BadParams(field="remote_block_ids", expected="any", found="none"))
    for _ in range(3):  # it is told to come again once
        d.step()
    assert [job.req_id for job in d.host_loads.values()] == ["a"]
    d.end_pull("a")
    d.step()
    assert d.scheduler.requests["a"].status is RequestStatus.WAITING_FOR_REMOTE_KVS
    d.end_host_loads()
    for _ in range(3):
        d.step()
    assert d.told == [("NixlConnector", "a"), ("OffloadingConnector", "a")]
    assert len(d.commands_for("a")) == 1
    d.assert_nothing_is_left()


def test_a_request_that_is_aborted_while_the_other_one_loads_it_is_not_reported_by_ours(
    params: dict[str, Any],
) -> None:
    """A second report of a request that has ended is the end of vLLM's engine."""
    d = Decode([OFFLOADING, OURS])
    d.cache_on_the_host()
    d.add("a", params)
    d.step()
    d.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    d.end_pull("a")
    d.step()
    assert "a" in d.scheduler.requests, "its blocks are still being loaded into"
    assert len(d.commands_for("a")) == 1, "there is nothing to abort"
    d.end_host_loads()
    for _ in range(2):
        d.step()
    assert d.told == [("OffloadingConnector", "a")]
    d.assert_nothing_is_left()


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


@TOLD_BY_US
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


@TOLD_BY_US
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


@TOLD_BY_US
def test_it_is_wrapped_once() -> None:
    scheduler([OURS, OFFLOADING])
    wrapped = offloading.OffloadingConnectorScheduler.update_state_after_alloc
    scheduler([OFFLOADING, OURS])
    assert offloading.OffloadingConnectorScheduler.update_state_after_alloc is wrapped
