"""An engine that sleeps, as vLLM's worker has the connector follow it. Whole engines: `tests/e2e/test_sleep.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.platforms import current_platform

from connector.clock import NS_PER_SECOND
from connector.config import ConnectorOptions
from connector.nixl_connector import NixlActorConnector
from connector.ports.nixl import NixlCallFailed
from connector.protocol import LeaseGranted, ReleaseUnread, TrackLease
from connector.runtime.thread import ActorThread
from connector.step_metadata import StepMetadata
from connector.unsupported import UnsupportedCache
from connector.wire.metadata import decode_agent_metadata
from connector.worker import actors, sleep_mode
from connector.worker.actors import WorkerActors
from connector.worker.connector_worker import ConnectorWorker
from connector.worker.memory_stays import NAME
from connector.worker.registration import require_supported
from connector.worker.sleep_mode import MemoryInUse, ucx_config
from statemachine.failures import ConnectorStopped
from statemachine.lease import LeaseName
from tests.rig.pulls import pull
from tests.unit.hand_clock import HandClock
from tests.unit.vllm_setup import allocate, attention_spec, cache_config, engine_config, single_rank, write_model

CACHES = cache_config(attention_spec())


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[VllmConfig]:
    """Of an engine with sleep mode, on a vLLM that has the hooks."""
    config = engine_config(write_model(tmp_path / "model"))
    monkeypatch.setattr(config.model_config, "enable_sleep_mode", True)
    monkeypatch.setattr(sleep_mode, "is_vllm_at_least", lambda version: True)
    monkeypatch.delenv("UCX_TLS", raising=False)
    monkeypatch.delenv("UCX_CUDA_IPC_ENABLE_MNNVL", raising=False)
    (tmp_path / "rendezvous").mkdir()
    with single_rank(config, tmp_path / "rendezvous"):
        yield config


@pytest.fixture
def caches() -> dict[str, torch.Tensor]:
    return allocate(CACHES)


@pytest.fixture
def worker(config: VllmConfig, caches: dict[str, torch.Tensor]) -> Iterator[ConnectorWorker]:
    worker = ConnectorWorker(config, CACHES, ConnectorOptions())
    try:
        worker.register_kv_caches(caches)
        yield worker
    finally:
        worker.shutdown()


def agent_of(worker: ConnectorWorker) -> bytes:
    """What peers are told of the NIXL agent."""
    assert worker.handshake_metadata is not None
    return decode_agent_metadata(worker.handshake_metadata.agent_metadata).agent_metadata


def test_nixl_knows_the_memory_but_while_the_engine_sleeps(worker: ConnectorWorker, config: VllmConfig) -> None:
    before = agent_of(worker)
    assert config.model_config.sleep_mode_backend != NAME
    for _ in range(2):
        worker.unregister_kv_caches()
        assert worker.handshake_metadata is None
    worker.restore_kv_caches()
    after = agent_of(worker)
    worker.restore_kv_caches()
    assert before != after == agent_of(worker)


def test_who_comes_while_the_engine_sleeps_is_refused(worker: ConnectorWorker) -> None:
    """vLLM schedules nobody then."""
    worker.unregister_kv_caches()
    worker.start_load_kv(StepMetadata([pull("early", [1])]))
    results = worker.get_transfer_results()
    assert results.failed_recving == results.finished_recving == {"early"}
    stats = worker.take_stats()
    assert stats is not None
    assert any(ConnectorStopped.__name__ in key for key in stats.data["counts"])
    assert worker.take_report() is None


def test_who_waits_in_the_queue_is_known_again_when_the_engine_wakes_up(
    worker: ConnectorWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What came before the engine fell asleep and what came since, in this order, and as old as it is."""
    clock = HandClock()
    monkeypatch.setattr(worker, "_clock", clock)
    monkeypatch.setattr(worker.ledger, "_clock", clock)
    told: list[object] = []
    monkeypatch.setattr(ActorThread, "post", lambda self, command: told.append(command))
    before, gone, later = (track(name) for name in ("before", "gone", "later"))
    left = ReleaseUnread(request_id="later", lease=later.lease, peer=later.peer, age_seconds=0.0)
    worker.start_load_kv(StepMetadata([before, gone]))
    worker.start_load_kv(StepMetadata([msgspec.structs.replace(left, request_id="gone", lease=gone.lease)]))
    clock.ns += 2 * NS_PER_SECOND
    worker.unregister_kv_caches()
    clock.ns += 3 * NS_PER_SECOND
    worker.start_load_kv(StepMetadata([later, left]))
    clock.ns += 4 * NS_PER_SECOND
    told.clear()
    worker.restore_kv_caches()
    assert told == [
        msgspec.structs.replace(before, age_seconds=1.0 + 9.0),
        msgspec.structs.replace(later, age_seconds=1.0 + 4.0),
        msgspec.structs.replace(left, age_seconds=4.0),
    ]
    worker.unregister_kv_caches()
    told.clear()
    worker.restore_kv_caches()
    assert told == [msgspec.structs.replace(before, age_seconds=1.0 + 9.0)]


def track(request_id: str) -> TrackLease:
    asked = pull(request_id, [1])
    return TrackLease(request_id=request_id, lease=asked.lease, peer=asked.peer, age_seconds=1.0)


def test_an_engine_that_lends_does_not_fall_asleep(worker: ConnectorWorker) -> None:
    """vLLM waits until nothing is lent. If it did not, nothing would be given up, and all goes on."""
    before = agent_of(worker)
    lease = LeaseName("cmpl-1", 7)
    worker.start_load_kv(StepMetadata([LeaseGranted(lease=lease, blocks=1, fixed_seconds=None)]))
    with pytest.raises(MemoryInUse, match=r"cannot sleep.*1 transfer\(s\) have not ended"):
        worker.unregister_kv_caches()
    assert agent_of(worker) == before
    worker.restore_kv_caches()
    assert agent_of(worker) == before


def test_memory_that_nixl_keeps_does_not_go(worker: ConnectorWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a READ hangs. Nothing is transferred any more, as when the actors have died."""

    def stop(self: WorkerActors) -> bool:
        assert whole_stop(self)
        return False

    whole_stop = WorkerActors.stop
    monkeypatch.setattr(WorkerActors, "stop", stop)
    with pytest.raises(MemoryInUse, match="NIXL has not given it back"):
        worker.unregister_kv_caches()
    worker.restore_kv_caches()
    worker.start_load_kv(StepMetadata([pull("late", [1])]))
    assert worker.get_transfer_results().failed_recving == {"late"}
    report = worker.take_report()
    assert report is not None
    assert report.stopped is not None
    assert "NIXL has not given it back" in report.stopped


def test_an_engine_that_cannot_register_stays_asleep(worker: ConnectorWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **named: object) -> None:
        raise NixlCallFailed("open", "no memory may be locked")

    worker.unregister_kv_caches()
    with monkeypatch.context() as patch:
        patch.setattr(actors.RealNixlPort, "open", refuse)
        with pytest.raises(NixlCallFailed, match="no memory may be locked"):
            worker.restore_kv_caches()
        assert worker.handshake_metadata is None
    worker.restore_kv_caches()
    assert worker.handshake_metadata is not None


def test_an_engine_may_end_while_it_sleeps(worker: ConnectorWorker) -> None:
    worker.unregister_kv_caches()
    worker.shutdown()


@pytest.mark.parametrize("version_has_hooks", [False, True])
def test_without_sleep_mode_nothing_changes(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, caches: dict[str, torch.Tensor], version_has_hooks: bool
) -> None:
    """Of an engine whose allocator could; it is refused by what stands in the allocator's place."""
    monkeypatch.setattr(config.model_config, "enable_sleep_mode", False)
    monkeypatch.setattr(sleep_mode, "is_vllm_at_least", lambda version: version_has_hooks)
    worker = ConnectorWorker(config, CACHES, ConnectorOptions())
    try:
        worker.register_kv_caches(caches)
        before = agent_of(worker)
        worker.unregister_kv_caches()
        worker.restore_kv_caches()
        assert agent_of(worker) == before
    finally:
        worker.shutdown()
    assert config.model_config.sleep_mode_backend == NAME
    assert ucx_config(config) is None


# --- what is refused at start -----------------------------------------------------------------------------------------


def test_a_vllm_without_the_hooks(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless what NIXL knows is memory of the host, which is still there when the engine wakes up."""
    monkeypatch.setattr(sleep_mode, "is_vllm_at_least", lambda version: False)
    refusal = r"enable_sleep_mode True.* vLLM 0\.33 and.* kv_buffer_device cpu.* --enable-cumem-allocator is enough"
    with pytest.raises(UnsupportedCache, match=refusal):
        require_supported(config, CACHES)
    monkeypatch.setattr(current_platform, "device_type", "cuda")
    require_supported(config, CACHES)


@pytest.mark.parametrize(
    ("transports", "is_refused"),
    [
        (None, False),
        ("tcp,self,cuda_copy", False),
        ("^cuda_ipc", False),
        ("^cuda", False),
        ("rc_x,cuda_copy", False),
        ("all", True),
        ("tcp,cuda_ipc,cuda_copy", True),
        (" tcp, cuda_ipc", True),
        (" ^tcp, cuda_ipc", False),
        ("tcp,cuda", True),
        ("^tcp", True),
    ],
)
def test_ucx_that_would_map_memory_which_goes(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, transports: str | None, is_refused: bool
) -> None:
    """It is told not to, for this agent alone, and what the environment says has precedence."""
    assert ucx_config(config) == "TLS=^cuda_ipc"
    if transports is not None:
        monkeypatch.setenv("UCX_TLS", transports)
    if not is_refused:
        require_supported(config, CACHES)
        return
    with pytest.raises(UnsupportedCache, match=r"enable_sleep_mode with UCX_TLS.*without cuda_ipc"):
        require_supported(config, CACHES)


def test_nvlink_between_nodes(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is a matter of cuda_ipc too; with the allocator alone it is to be had."""
    monkeypatch.setenv("UCX_CUDA_IPC_ENABLE_MNNVL", "y")
    with pytest.raises(UnsupportedCache, match="enable_sleep_mode with UCX_CUDA_IPC_ENABLE_MNNVL"):
        require_supported(config, CACHES)
    monkeypatch.setattr(config.model_config, "enable_sleep_mode", False)
    require_supported(config, CACHES)


@pytest.mark.parametrize(
    ("has_hooks", "device", "backends", "can_sleep"),
    [
        (False, "cuda", ["UCX"], False),
        (False, "cpu", ["UCX"], True),
        (True, "cuda", ["UCX"], True),
        (True, "cuda", ["LIBFABRIC"], False),
        (True, "cpu", ["LIBFABRIC"], True),
    ],
)
def test_says_whether_it_can_sleep(
    monkeypatch: pytest.MonkeyPatch, has_hooks: bool, device: str, backends: list[str], can_sleep: bool
) -> None:
    """vLLM asks from 0.33 on."""
    monkeypatch.setattr(sleep_mode, "is_vllm_at_least", lambda version: has_hooks)
    monkeypatch.setattr(current_platform, "device_type", "cuda")
    transfers = KVTransferConfig(
        kv_connector="NixlConnector",
        kv_role="kv_both",
        kv_buffer_device=device,
        kv_connector_extra_config={"backends": backends},
    )
    assert NixlActorConnector.supports_sleep_mode(transfers) == can_sleep
