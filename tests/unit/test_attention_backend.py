"""Tests of latent attention mean the same on every x86-64 machine.

Where the machine has AMX, vLLM prefers AMX_MLA, which works with other kernel blocks than CPU_MLA, and in bfloat16
only. So configurations and engines of these tests name the back end that they mean. Here vLLM is made to believe in
either machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention import selector

from tests.e2e.engines import EngineOptions
from tests.e2e.test_families import FAMILIES, Kind, Stable
from tests.on_vllm.moved import make_arg_parser
from tests.unit.vllm_setup import engine_config, latent_engine_config, write_latent_model

KERNEL_BLOCK_TOKENS = 16
"""Of CPU_MLA; vLLM takes no other block size with it."""


@pytest.fixture(params=[False, True], ids=["without AMX", "with AMX"])
def has_amx(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """What vLLM finds out about the machine. It remembers what it chose."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: request.param)
    selector._cached_get_attn_backend.cache_clear()
    yield request.param
    selector._cached_get_attn_backend.cache_clear()


def chosen(config: VllmConfig) -> str:
    (backend,) = get_current_attn_backends(config)
    name: str = backend.get_name()
    return name


def configured(options: EngineOptions) -> VllmConfig:
    """What an engine makes of its command line."""
    parser = make_arg_parser(FlexibleArgumentParser())
    return AsyncEngineArgs.from_cli_args(parser.parse_args(options.server_arguments())).create_engine_config()


def test_what_vllm_prefers_depends_on_the_machine(has_amx: bool, tmp_path: Path) -> None:
    """Why a test has to say what it means; and that the machine can be pretended."""
    assert chosen(engine_config(write_latent_model(tmp_path))) == ("AMX_MLA" if has_amx else "CPU_MLA")


def test_configurations_are_those_of_any_machine(has_amx: bool, tmp_path: Path) -> None:
    config = latent_engine_config(tmp_path)
    assert chosen(config) == "CPU_MLA"
    assert config.cache_config.block_size == KERNEL_BLOCK_TOKENS


def test_engines_are_those_of_any_machine(has_amx: bool, tmp_path: Path) -> None:
    latent = [name for name, family in FAMILIES.items() if "kv_lora_rank" in _hf_config(family.model())]
    assert latent
    for name in latent:
        config = configured(Stable(tmp_path, builtin=False).options(Kind(name)))
        assert config.model_config.use_mla
        assert config.model_config.dtype == torch.float32
        assert chosen(config) == "CPU_MLA"


def _hf_config(model: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    return config
