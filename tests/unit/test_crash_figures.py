"""A mistake in the connector is a figure of the engine where it was made, whether or not a request fails of it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from connector.config import ConnectorOptions
from connector.observe.stats import COUNTS
from connector.protocol import LocalPrefillsSeen
from connector.runtime.supervisor import Supervisor
from connector.step_metadata import StepMetadata
from connector.worker.connector_worker import ConnectorWorker
from tests.unit.vllm_setup import allocate, attention_spec, cache_config, engine_config, single_rank, write_model

WAIT_SECONDS = 30.0


def test_a_message_with_which_the_actors_of_a_worker_crash_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It concerns no request."""

    def broken(self: Supervisor, command: Any) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(Supervisor, "_hand_out", broken)
    config = engine_config(write_model(tmp_path / "model"))
    (tmp_path / "rendezvous").mkdir()
    caches = cache_config(attention_spec())
    with single_rank(config, tmp_path / "rendezvous"):
        worker = ConnectorWorker(config, caches, ConnectorOptions())
        worker.register_kv_caches(allocate(caches))
        worker.note_warm()
        worker.start_load_kv(StepMetadata([LocalPrefillsSeen(count=1, named=())]))
        crashes, deadline = 0, time.monotonic() + WAIT_SECONDS
        while crashes < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
            stats = worker.take_stats()
            crashes += stats.data[COUNTS].get("crashes", 0) if stats is not None else 0
        worker.shutdown()
    assert crashes == 2, "the word that the engine is warm is a message too"
