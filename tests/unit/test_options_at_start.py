"""Wrong options are found when vLLM makes its configuration: in the first process, before any model is loaded."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.config import CompilationConfig, CUDAGraphMode, KVTransferConfig, VllmConfig
from vllm.platforms import current_platform

from connector.config import OptionError

WRONG: dict[str, Any] = {"kv_lease_durations": 3}
OURS: dict[str, Any] = {
    "kv_connector": "NixlConnector",
    "kv_connector_module_path": "connector",
    "kv_role": "kv_both",
}
WITH_WRONG: dict[str, dict[str, Any]] = {
    "alone": OURS | {"kv_connector_extra_config": WRONG},
    "by its own name": {
        "kv_connector": "NixlActorConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": WRONG,
    },
    "beside another": {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [OURS | {"kv_connector_extra_config": WRONG}]},
    },
}


@pytest.fixture
def with_cuda_graphs(monkeypatch: pytest.MonkeyPatch) -> CompilationConfig:
    """The platform of these tests is a CPU, which knows no graphs; what is asked of vLLM is what it does with them."""
    platform = type(current_platform)
    monkeypatch.setattr(platform, "check_and_update_config", classmethod(lambda cls, config: None))
    monkeypatch.setattr(platform, "support_static_graph_mode", classmethod(lambda cls: True))
    return CompilationConfig(cudagraph_mode=CUDAGraphMode.FULL)


@pytest.mark.parametrize("how", WITH_WRONG)
def test_the_error_is_that_of_the_option(with_cuda_graphs: CompilationConfig, how: str) -> None:
    """And comes out as it is: the last line of a traceback begins with its name."""
    with pytest.raises(OptionError, match="did you mean kv_lease_duration") as refused:
        VllmConfig(kv_transfer_config=KVTransferConfig(**WITH_WRONG[how]), compilation_config=with_cuda_graphs)
    assert refused.value.option == "kv_lease_durations"


def test_right_options_change_nothing(with_cuda_graphs: CompilationConfig) -> None:
    config = VllmConfig(kv_transfer_config=KVTransferConfig(**OURS), compilation_config=with_cuda_graphs)
    assert config.compilation_config.cudagraph_mode is CUDAGraphMode.FULL
