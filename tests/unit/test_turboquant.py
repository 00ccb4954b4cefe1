"""TurboQuant's two orders of a block, with vLLM's own attention; FlyDSL, which decides, is made to be there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.attention.backends import turboquant_attn
from vllm.v1.attention.backends.turboquant_attn import TurboQuantAttentionBackend, TurboQuantAttentionImpl
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode

from connector.layout.blocks import GroupBlocks
from connector.layout.geometry import LayoutMismatch
from connector.wire.handshake import incompatibilities
from connector.wire.identity import AS_SHAPED, IN_ARRAYS
from tests.unit.cache_families import Rank, carry_out, make_rank, seen
from tests.unit.vllm_setup import (
    HEAD_SIZE,
    KV_HEADS,
    attention_layers,
    layer_name,
)

LAYERS = 2
PRESET = "turboquant_4bit_nc"

Engine = Callable[..., Rank]


@pytest.fixture
def engine(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Makes the first rank of an engine, with the KV cache of vLLM's layers."""

    def make(name: str, *, has_flydsl: bool, tp: int = 1, block: int = 32) -> Rank:
        monkeypatch.setattr(turboquant_attn, "is_flydsl_available", lambda: has_flydsl)
        config.compilation_config.static_forward_context.clear()
        heads = KV_HEADS // tp
        for layer in attention_layers(config, LAYERS, HEAD_SIZE, heads):
            layer.attn_backend = TurboQuantAttentionBackend
            layer.kv_cache_dtype = PRESET
            with set_current_vllm_config(config):
                layer.impl = TurboQuantAttentionImpl(2 * heads, HEAD_SIZE, 1.0, heads, kv_cache_dtype=PRESET)
        spec = FullAttentionSpec(
            block_size=block,
            num_kv_heads=heads,
            head_size=HEAD_SIZE,
            dtype=torch.uint8,
            kv_quant_mode=KVQuantMode.TURBOQUANT_4BIT_NC,
        )
        specs = {layer_name(index): TurboQuantAttentionBackend.customize_spec(spec) for index in range(LAYERS)}
        return make_rank(config, monkeypatch, specs, engine_id=name, tp_rank=0, tp_size=tp, layout="LBNHC")

    return make


def test_an_order_that_one_engine_only_has_is_named(engine: Engine) -> None:
    """Names, types and sizes are the same."""
    apart, together = (engine(f"FlyDSL {has_flydsl}", has_flydsl=has_flydsl) for has_flydsl in (True, False))
    for ours, theirs in ((apart, together), (together, apart)):
        assert len(seen(ours.registration, theirs).regions) == LAYERS
        for not_packed in ("", "only engines on CPUs do"):
            found = incompatibilities(
                ours.registration.identity,
                theirs.registration.identity,
                enforce_factors=False,
                not_packed=not_packed,
            )
            names = [layer_name(index) for index in range(LAYERS)]
            assert [each.field for each in found] == [f"order of elements in a block of {name}" for name in names]
            assert {found[0].local, found[0].remote} == {AS_SHAPED, IN_ARRAYS}
            assert "FlyDSL" in found[0].advice
    for alike in (apart, together):
        assert not incompatibilities(alike.registration.identity, alike.registration.identity, enforce_factors=True)


@pytest.mark.parametrize(
    ("theirs", "field"),
    [({"block": 64}, f"block size of {layer_name(0)}"), ({"tp": 2}, "tp_size")],
    ids=["blocks of another size", "more ranks"],
)
def test_blocks_in_arrays_are_not_cut(engine: Engine, theirs: dict[str, int], field: str) -> None:
    """As those are that hold a token's metadata behind its data."""
    for prefill, decode in ((theirs, {}), ({}, theirs)):
        with pytest.raises(LayoutMismatch) as refused:
            seen(engine("d", has_flydsl=True, **decode).registration, engine("p", has_flydsl=True, **prefill))
        assert refused.value.field == field
        assert seen(
            engine("d", has_flydsl=False, **decode).registration, engine("p", has_flydsl=False, **prefill)
        ).regions


def test_blocks_in_arrays_are_copied_whole(engine: Engine) -> None:
    prefill, decode = (engine(name, has_flydsl=True) for name in "pd")
    prefill.memory.copy_(torch.randint(256, prefill.memory.shape, generator=torch.Generator().manual_seed(1)))
    decode.memory.zero_()
    carry_out(decode, [prefill], [GroupBlocks(local=[3, 5], remote=[1, 2], num_tokens=40)])
    for name in decode.tensors:
        assert torch.equal(decode.tensors[name][[3, 5]], prefill.tensors[name][[1, 2]])
        assert not decode.tensors[name][4].any()
