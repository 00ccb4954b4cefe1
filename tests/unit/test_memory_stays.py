"""What vLLM's worker calls to free the memory of a KV cache, once the connector has registered that."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory

from connector.config import ConnectorOptions
from connector.worker.connector_worker import ConnectorWorker
from connector.worker.memory_stays import NAME, MemoryIsRegistered, keep_memory
from tests.unit.log_lines import listening
from tests.unit.vllm_setup import allocate, attention_spec, cache_config, engine_config, single_rank, write_model


@pytest.mark.parametrize("times", [1, 2])
def test_what_frees_the_cache_is_refused(tmp_path: Path, times: int) -> None:
    """As `Worker.sleep` and `Worker.discard` find it, also beside another connector of the same process."""
    config = engine_config(write_model(tmp_path))
    for _ in range(times):
        keep_memory(config)
    backend = SleepModeBackendFactory.create_backend(config.model_config)
    for level in (1, 2):
        with pytest.raises(MemoryIsRegistered, match=rf"sleep level {level} is refused.*kv_buffer_device cpu"):
            backend.suspend(level)
    with pytest.raises(MemoryIsRegistered, match="release of kv_cache is refused"):
        backend.discard(("kv_cache",))
    assert backend.state() == "RUNNING"
    backend.resume()


def test_of_several_workers_none_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM would take the other ranks' answers for those to its next step, and end."""
    config = engine_config(write_model(tmp_path))
    monkeypatch.setattr(config.parallel_config, "world_size", 2)
    keep_memory(config)
    backend = SleepModeBackendFactory.create_backend(config.model_config)
    with listening() as lines:
        backend.suspend(1)
        backend.discard(("kv_cache",))
        backend.resume()
    said = [each for each in lines.texts if each.startswith("MemoryIsRegistered: ")]
    assert len(said) == 2
    assert "sleep level 1 is refused" in said[0]
    assert all(each.endswith("No memory was given up") for each in said)


def test_a_worker_keeps_what_it_has_registered(tmp_path: Path) -> None:
    config = engine_config(write_model(tmp_path / "model"))
    (tmp_path / "rendezvous").mkdir()
    caches = cache_config(attention_spec())
    with single_rank(config, tmp_path / "rendezvous"):
        worker = ConnectorWorker(config, caches, ConnectorOptions())
        assert config.model_config.sleep_mode_backend != NAME
        worker.register_kv_caches(allocate(caches))
        worker.shutdown()
    assert config.model_config.sleep_mode_backend == NAME
