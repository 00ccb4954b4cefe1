"""Scales in the blocks, with vLLM's own Triton attention on tensors of a processor: its kernels are not run, and what
it does with the cache before them needs none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl
from vllm.v1.kv_cache_interface import KVCacheConfig, get_kv_quant_mode

from connector.config import ConnectorOptions
from connector.ports.nixl_agent import RealNixlPort
from connector.unsupported import UnsupportedCache
from connector.worker.connector_worker import ConnectorWorker
from connector.worker.token_scales import lay_out_scales
from tests.unit.vllm_setup import (
    HEAD_SIZE,
    KV_HEADS,
    allocate,
    attention_layers,
    attention_spec,
    cache_config,
    layer_name,
)

LAYERS = 2
TYPES = {"int8_per_token_head": torch.int8, "fp8_per_token_head": torch.uint8, "int4_per_token_head": torch.uint8}
SHARING = layer_name(LAYERS)
"""Has no cache of its own: that of the first layer."""


class Engine:
    """Layers with caches of one type, as vLLM binds them before it registers the cache."""

    def __init__(self, config: VllmConfig, cache_type: str, layout: str) -> None:
        config.compilation_config.static_forward_context.clear()
        self.layers: list[Attention] = attention_layers(config, LAYERS + 1, HEAD_SIZE, KV_HEADS)
        spec = attention_spec(dtype=TYPES[cache_type], kv_quant_mode=get_kv_quant_mode(cache_type))
        self.caches: KVCacheConfig = cache_config(
            TritonAttentionBackend.customize_spec(spec), layers=LAYERS, layout=layout
        )
        self.tensors = allocate(self.caches, layout=layout)
        self.tensors[SHARING] = self.tensors[layer_name(0)]
        for layer, cache in zip(self.layers, self.tensors.values(), strict=True):
            layer.attn_backend, layer.kv_cache_dtype = TritonAttentionBackend, cache_type
            with set_current_vllm_config(config):
                layer.impl = TritonAttentionImpl(
                    2 * KV_HEADS, HEAD_SIZE, 1.0, KV_HEADS, None, None, kv_cache_dtype=cache_type
                )
            layer.bind_kv_cache(cache)

    @property
    def memory(self) -> torch.Tensor:
        """Of all layers, as bytes."""
        return torch.empty(0, dtype=torch.uint8).set_(self.layers[0].kv_cache.untyped_storage())

    def read(self) -> torch.Tensor:
        """Have READs fill all blocks; what is in them then."""
        generator = torch.Generator().manual_seed(5)
        self.memory.copy_(torch.randint(0, 256, self.memory.shape, dtype=torch.uint8, generator=generator))
        return self.memory.clone()

    def first_pass(self) -> None:
        """What each layer does with its cache before its kernels."""
        for layer in self.layers:
            layer.impl._pth_key_value_caches(layer.kv_cache)


@pytest.fixture
def engine(config: VllmConfig) -> Callable[..., Engine]:
    return lambda cache_type="int8_per_token_head", layout="LBHNC": Engine(config, cache_type, layout)


@pytest.mark.parametrize("cache_type", TYPES)
def test_control_the_first_pass_spoils_what_was_read(engine: Callable[..., Engine], cache_type: str) -> None:
    """Of vLLM alone. If this fails, vLLM does it in another way, and what is done about it here is to be looked at."""
    d = engine(cache_type)
    read = d.read()
    d.first_pass()
    assert not torch.equal(d.memory, read)
    assert d.layers[0].impl._k_scale_cache.unique().tolist() == [1.0]


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC"])
@pytest.mark.parametrize("cache_type", TYPES)
def test_what_was_read_before_the_first_pass_stays(
    config: VllmConfig, engine: Callable[..., Engine], cache_type: str, layout: str
) -> None:
    d = engine(cache_type, layout)
    lay_out_scales(config)
    for layer in d.layers:
        assert layer.impl._k_scale_cache.unique().tolist() == layer.impl._v_scale_cache.unique().tolist() == [1.0]
    read = d.read()
    d.first_pass()
    assert torch.equal(d.memory, read)


def test_a_worker_has_it_done_before_nixl_knows_the_memory(
    config: VllmConfig, engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Opened(Exception):
        pass

    def open_port(*args: Any, **rest: Any) -> RealNixlPort:
        raise Opened([layer.impl._v_scale_cache is not None for layer in d.layers])

    d = engine()
    monkeypatch.setattr(RealNixlPort, "open", open_port)
    worker = ConnectorWorker(config, d.caches, ConnectorOptions())
    with pytest.raises(Opened) as caught:
        worker.register_kv_caches(d.tensors)
    assert caught.value.args == ([True, True, True],)


def test_layers_without_such_scales_or_without_a_cache_are_left_alone(
    config: VllmConfig, engine: Callable[..., Engine]
) -> None:
    d = engine()
    d.layers[0].kv_cache_dtype = "auto"
    d.layers[1].kv_cache = torch.tensor([])
    lay_out_scales(config)
    assert [layer.impl._k_scale_cache is None for layer in d.layers] == [True, True, False]


@pytest.mark.parametrize(
    "changed",
    [None, lambda self: None, lambda self, cache: None, lambda self, cache: cache.no_such_thing],
    ids=["it is gone", "it takes something else", "it does nothing", "it fails"],
)
def test_where_it_cannot_be_seen_to_be_done_the_engine_does_not_start(
    config: VllmConfig, engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, changed: Any
) -> None:
    engine()
    if changed is None:
        monkeypatch.delattr(TritonAttentionImpl, "_ensure_scale_caches")
    else:
        monkeypatch.setattr(TritonAttentionImpl, "_ensure_scale_caches", changed)
    with pytest.raises(UnsupportedCache) as caught:
        lay_out_scales(config)
    assert caught.value.field == "--kv-cache-dtype"
    assert caught.value.found == f"int8_per_token_head ({layer_name(0)})"
    assert "TritonAttentionImpl" in caught.value.expected
