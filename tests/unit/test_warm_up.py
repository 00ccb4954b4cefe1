"""While vLLM captures CUDA graphs nobody else may open memory on the device: engines are met when that is over.

vLLM says so when it asks for the handshake metadata; or, of a connector in `MultiConnector` that it does not ask, with
the first step.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from connector.nixl_connector import NixlActorConnector
from connector.step_metadata import StepMetadata
from tests.unit.vllm_setup import allocate, attention_spec, cache_config, engine_config, single_rank, write_model

EARLY_SECONDS = 0.3
"""An engine that does not wait asks at once."""
ASKED_SECONDS = 20.0


@pytest.fixture
def prefill() -> Iterator[socket.socket]:
    """The side channel of an engine, whose decode engine says nothing there before it has been warmed up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.fixture
def config(prefill: socket.socket, tmp_path: Path) -> Iterator[VllmConfig]:
    config = engine_config(write_model(tmp_path / "model"))
    place = f"127.0.0.1:{prefill.getsockname()[1]}"
    config.kv_transfer_config.kv_connector_extra_config = {"known_peers": [place]}
    with single_rank(config, tmp_path):
        yield config


def ask_for_metadata(connector: NixlActorConnector) -> None:
    assert connector.get_handshake_metadata() is not None


def step(connector: NixlActorConnector) -> None:
    connector.bind_connector_metadata(StepMetadata())
    connector.start_load_kv(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("end_warm_up", [ask_for_metadata, step])
def test_engines_are_met_when_vllm_has_warmed_up(
    end_warm_up: Callable[[NixlActorConnector], None], config: VllmConfig, prefill: socket.socket
) -> None:
    caches = cache_config(attention_spec())
    connector = NixlActorConnector(config, KVConnectorRole.WORKER, caches)
    try:
        connector.register_kv_caches(allocate(caches))
        prefill.settimeout(EARLY_SECONDS)
        with pytest.raises(TimeoutError):
            prefill.accept()
        end_warm_up(connector)
        prefill.settimeout(ASKED_SECONDS)
        prefill.accept()[0].close()
    finally:
        connector.shutdown()
