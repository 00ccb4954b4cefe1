"""Ranks of real engines, as far as their KV cache goes, for every family of models.

A family says what each layer of a tiny model caches on one of n ranks, in vLLM's own specs. `make_rank` lets vLLM group
them, place them in memory and make the tensors, and has them registered as that rank. `Content` is the KV of the whole
model, made up; it is laid into a rank's tensors, or compared with them, by heads and channels, without our geometry.
`carry_out` is a READ: the decode rank's plan as plain copies, from ranks that it knows by their metadata.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_pp_group
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheLayout,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    get_kv_quant_mode,
)
from vllm.v1.worker.utils import allocate_kv_cache

from connector.layout.blocks import GroupBlocks
from connector.layout.geometry import LayoutMismatch, RankId, RankLayout
from connector.layout.plan import EnginePlan
from connector.layout.remote import layout_from_metadata, stated_by
from connector.protocol import Memory, Permutation
from connector.wire.metadata import decode_agent_metadata, encode_agent_metadata
from connector.worker.cache_memory import CacheMemory
from connector.worker.finishing import Finishing, Loaded, run_at_once
from connector.worker.landing import BlockPermuter, landing_caches
from connector.worker.packing import PackedBlocks
from connector.worker.registration import Registration, derive_registration
from tests.on_vllm.moved import (
    get_kv_cache_config_from_groups,
    get_kv_cache_groups,
    project_kv_cache_groups_to_worker,
)
from tests.rig.layouts import plan_engine
from tests.unit.layout_oracle import expand_runs
from tests.unit.vllm_setup import KV_HEADS

NUM_BLOCKS = 16

Specs: TypeAlias = dict[str, KVCacheSpec]
MakeSpecs: TypeAlias = Callable[[int, int], Specs]


def _attention(
    kind: type[AttentionSpec], tp: int, block: int, *, heads: int = KV_HEADS, **changes: object
) -> KVCacheSpec:
    fields = {
        "block_size": block,
        "num_kv_heads": max(1, KV_HEADS // tp),
        "head_size": 32,
        "dtype": torch.float32,
    }
    return kind(**fields | changes)


def _latent(kind: type[AttentionSpec], block: int, *, head_size: int = 96, **changes: object) -> KVCacheSpec:
    fields = {
        "block_size": block,
        "num_kv_heads": 1,
        "max_tp_shards": 1,
        "head_size": head_size,
        "dtype": torch.bfloat16,
    }
    return kind(**fields | changes)


def _state(kind: str, tp: int, block: int, *, groups: int = 8) -> MambaSpec:
    """16 heads of 4 channels; groups of B and C with 4 channels each, of which a rank has one at least."""
    held_groups = max(1, groups // tp)
    shapes = {
        "MAMBA1": ((64 // tp, 3), (64 // tp, 5)),
        "MAMBA2": ((64 // tp + 2 * held_groups * 4, 3), (16 // tp, 4, 4)),
        "GDN_ATTN": (((2 * 32 + 64) // tp, 3), (16 // tp, 4, 2)),
    }
    return MambaSpec(
        block_size=block,
        shapes=shapes[kind],
        dtypes=(torch.bfloat16, torch.float32),
        mamba_type=MambaAttentionBackendEnum[kind],
    )


def _hybrid(kind: str) -> Callable[[int, int], dict[str, KVCacheSpec]]:
    """One layer of attention to three of states, whose page is padded to that of attention."""

    def specs(tp: int, block: int) -> dict[str, KVCacheSpec]:
        attention = _attention(FullAttentionSpec, tp, block)
        state = replace(_state(kind, tp, block), page_size_padded=attention.page_size_bytes)
        return {f"model.layers.{layer}.mixer": attention if layer % 4 == 1 else state for layer in range(8)}

    return specs


def _layers(*kinds: KVCacheSpec, count: int = 3) -> dict[str, KVCacheSpec]:
    return {f"model.layers.{layer}.self_attn.attn": kinds[layer % len(kinds)] for layer in range(count * len(kinds))}


def _compressed(rows: dict[str, object]) -> MakeSpecs:
    """The caches of DeepSeek-V4: windows of latents, one entry for several tokens, its indexer, and what is not yet
    compressed. `rows`: what latents of tokens are made of. Entries and states have pages of unlike sizes.
    """

    def specs(tp: int, block: int) -> dict[str, KVCacheSpec]:
        window = _latent(SlidingWindowMLASpec, block, sliding_window=block, **rows)
        layers: dict[str, KVCacheSpec] = {f"model.layers.{layer}.attn.swa_cache": window for layer in range(3)}
        for layer, tokens, state_block in ((1, 4, block // 2), (2, 32, block)):
            name = f"model.layers.{layer}.attn"
            layers[name] = _latent(MLAAttentionSpec, block, tokens_per_state=tokens, **rows)
            layers[f"{name}.compressor.state_cache"] = _latent(
                SlidingWindowMLASpec, state_block, head_size=16, dtype=torch.float32, sliding_window=tokens
            )
        layers["model.layers.1.attn.indexer.k_cache"] = _latent(
            MLAAttentionSpec, block, head_size=36, dtype=torch.uint8, tokens_per_state=4, alignment=128
        )
        return layers

    return specs


def deepseek_v4(index_bytes: int) -> Specs:
    """The caches of DeepSeek-V4 in its own sizes, latents in bfloat16, with twelve layers, the last of them for drafts.

    `index_bytes`: of an entry of the indexers: 132 in FP8, 68 in MXFP4.
    """
    entry: dict[str, Any] = {"alignment": 512, "model_version": "deepseek_v4", "cache_dtype_str": "auto"}
    state: dict[str, Any] = {"alignment": 512, "dtype": torch.float32}
    layers: Specs = {}
    for layer, tokens in enumerate((128, 128, *(4, 128) * 4, 4, 0)):
        name, of_indexer = f"model.layers.{layer}.attn", tokens == 4
        layers[f"{name}.swa_cache"] = _latent(SlidingWindowMLASpec, 64, head_size=512, sliding_window=128, **entry)
        if not tokens:
            continue
        layers[name] = _latent(MLAAttentionSpec, 256, head_size=512, tokens_per_state=tokens, **entry)
        # An entry of an indexer's layer is made of the tokens of two.
        window, block = (8, 4) if of_indexer else (128, 8)
        width = 4 if of_indexer else 2
        layers[f"{name}.compressor.state_cache"] = _latent(
            SlidingWindowMLASpec, block, head_size=width * 512, sliding_window=window, **state
        )
        if of_indexer:
            layers[f"{name}.indexer.k_cache"] = _latent(
                MLAAttentionSpec, 256, head_size=index_bytes, dtype=torch.uint8, tokens_per_state=tokens, alignment=512
            )
            layers[f"{name}.indexer.compressor.state_cache"] = _latent(
                SlidingWindowMLASpec, block, head_size=width * 128, sliding_window=window, **state
            )
    return layers


def _ring(*, tokens: int = 8, heads: int = 1, head_size: int = 32, dtype: torch.dtype = torch.bfloat16) -> KVCacheSpec:
    return CircularBufferSpec(
        block_size=tokens, num_kv_heads=heads, head_size=head_size, head_size_v=0, dtype=dtype, dcp_sharded=False
    )


def rings_and_states(
    tp: int, block: int, *, capacity: int = 12, padded: bool = True, rows: int = 3
) -> dict[str, KVCacheSpec]:
    """The caches of Qwen4-exp: attention with raw and compressed keys, gated delta nets, and a state of all ranks.

    `padded`: states have pages as long as those of attention. `rows`: of the state of all ranks.
    """
    attention = _attention(FullAttentionSpec, tp, block)
    page_bytes = attention.page_size_bytes if padded else None
    layers: dict[str, KVCacheSpec] = {}
    for layer in range(8):
        if layer % 4 < 3:
            states = replace(_state("GDN_ATTN", tp, block), page_size_padded=page_bytes)
            layers[f"model.layers.{layer}.linear_attn"] = states
            continue
        name = f"model.layers.{layer}.self_attn"
        layers[f"{name}.attn"] = attention
        layers[f"{name}.key_state"] = _ring(tokens=capacity)
        layers[f"{name}.compressed_key"] = _latent(MLAAttentionSpec, block, head_size=32, tokens_per_state=4)
    layers["model.layers.1.ple"] = MambaSpec(
        block_size=block,
        shapes=((20, rows),),
        dtypes=(torch.bfloat16,),
        mamba_type=MambaAttentionBackendEnum.SHORT_CONV,
        tp_replicated=True,
        page_size_padded=page_bytes,
    )
    return layers


def rings_of_two_heads(tp: int, block: int, *, capacity: int = 8) -> dict[str, KVCacheSpec]:
    """The caches of GLM5-next: latents, an indexer with pooled entries, and of the open pool its keys and scores."""
    layers: dict[str, KVCacheSpec] = {}
    for layer in range(3):
        name = f"model.layers.{layer}.self_attn"
        layers[f"{name}.attn"] = _latent(MLAAttentionSpec, block)
        layers[f"{name}.indexer.k_cache"] = _latent(
            MLAAttentionSpec, block, head_size=36, dtype=torch.uint8, tokens_per_state=4
        )
        layers[f"{name}.indexer.tail"] = _ring(tokens=capacity, heads=2)
    return layers


def rings_and_windows(tp: int, block: int, *, capacity: int = 8) -> dict[str, KVCacheSpec]:
    """The caches of DeepSeek-V4.1: windows that are replayed, compressed latents, padded pages, unlike ring buffers."""
    rows = {"dtype": torch.uint8, "head_size": 96, "alignment": 96, "model_version": "deepseek_v4"}
    window = _latent(
        SlidingWindowMLASpec, block // 2, sliding_window=32, state_content_bytes=100, bounded_replay=True, **rows
    )
    layers: dict[str, KVCacheSpec] = {f"model.layers.{layer}.attn.swa_cache": window for layer in range(4)}
    for layer in range(0, 4, 2):
        name = f"model.layers.{layer}.attn"
        layers[name] = _latent(MLAAttentionSpec, block, tokens_per_state=2, state_content_bytes=68, **rows)
        layers[f"{name}.compressor.state_cache"] = _ring(tokens=capacity, head_size=48, dtype=torch.float32)
        layers[f"{name}.indexer.k_cache"] = _latent(
            MLAAttentionSpec, block, head_size=36, dtype=torch.uint8, tokens_per_state=2, alignment=96
        )
        layers[f"{name}.indexer.state_cache"] = _ring(tokens=capacity, head_size=16, dtype=torch.float32)
    return layers


def one_group_of_b_and_c(tp: int, block: int) -> dict[str, KVCacheSpec]:
    """Mamba 2 whose ranks all have the same B and C; only the model's configuration can tell."""
    return {f"model.layers.{layer}.mixer": _state("MAMBA2", tp, block, groups=1) for layer in range(3)}


def with_drafts(kind: str, drafts: int, *, pads: bool = True) -> Specs:
    """States of one kind beside attention, on an engine that drafts so many tokens: vLLM keeps as many more columns of
    their convolution. `pads`: their pages are as long as those of attention; otherwise there is none beside them."""
    attention = _attention(FullAttentionSpec, 1, 64)
    shapes, dtypes = {
        "SHORT_CONV": (Shapes.short_conv_state_shape(1, 64, 3, drafts), (torch.bfloat16,)),
        "MAMBA2": (Shapes.mamba2_state_shape(1, 64, 8, 16, 4, 4, 4, drafts), (torch.bfloat16, torch.float32)),
        "GDN_ATTN": (Shapes.gated_delta_net_state_shape(1, 8, 16, 4, 4, 4, drafts), (torch.bfloat16, torch.float32)),
        "KDA": (Shapes.kda_state_shape(1, 16, 4, num_spec=drafts), (torch.bfloat16, torch.float32)),
    }[kind]
    state = MambaSpec(
        block_size=64,
        shapes=shapes,
        dtypes=dtypes,
        mamba_type=MambaAttentionBackendEnum["GDN_ATTN" if kind == "KDA" else kind],
        page_size_padded=attention.page_size_bytes if pads else None,
    )
    return {f"model.layers.{layer}.mixer": attention if pads and layer % 4 == 1 else state for layer in range(8)}


def states_of_unknown_kinds(tp: int, block: int) -> dict[str, KVCacheSpec]:
    """A short convolution, linear attention, and three convolutions with a recurrent state."""
    kinds: list[tuple[str, tuple[tuple[int, ...], ...]]] = [
        ("SHORT_CONV", ((64 // tp, 3),)),
        ("LINEAR", ((16 // tp, 4, 4),)),
        ("GDN_ATTN", ((32 // tp, 3), (32 // tp, 3), (64 // tp, 3), (16 // tp, 4, 2))),
    ]
    return {
        f"model.layers.{layer}.mixer": MambaSpec(
            block_size=block,
            shapes=shapes,
            dtypes=(torch.float32,) * len(shapes),
            mamba_type=MambaAttentionBackendEnum[kind],
            page_size_padded=2560,
        )
        for layer, (kind, shapes) in enumerate(kinds)
    }


FAMILIES: Mapping[str, MakeSpecs] = {
    "full attention": lambda tp, block: _layers(_attention(FullAttentionSpec, tp, block)),
    "unlike K and V": lambda tp, block: _layers(_attention(FullAttentionSpec, tp, block, head_size_v=16)),
    "quantised heads": lambda tp, block: _layers(
        _attention(
            FullAttentionSpec,
            tp,
            block,
            dtype=torch.int8,
            kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD,
            state_content_bytes=72,
        )
    ),
    "K and V in slots of their own": lambda tp, block: _layers(
        _attention(
            FullAttentionSpec,
            tp,
            block,
            dtype=torch.uint8,
            kv_quant_mode=KVQuantMode.NVFP4,
            num_head_slots=2 * max(1, KV_HEADS // tp),
            state_content_bytes=18,
        )
    ),
    "K and V in planes": lambda tp, block: _layers(
        _attention(
            FullAttentionSpec,
            tp,
            block,
            dtype=torch.bfloat16,
            num_head_slots=2,
            state_content_bytes=2 * 32 * max(1, KV_HEADS // tp),
        )
    ),
    "sinks": lambda tp, block: _layers(_attention(SinkFullAttentionSpec, tp, block, sink_len=block)),
    "gaps behind the prompt": lambda tp, block: _layers(_attention(RSWASpec, tp, block, rswa_window=64)),
    "several head sizes": lambda tp, block: _layers(
        _attention(FullAttentionSpec, tp, block), _attention(FullAttentionSpec, tp, block, head_size=64)
    ),
    "sliding window": lambda tp, block: _layers(
        _attention(FullAttentionSpec, tp, block),
        _attention(SlidingWindowSpec, tp, block, sliding_window=64),
        _attention(SlidingWindowSpec, tp, block, sliding_window=64),
    ),
    "window with blocks of its own": lambda tp, block: _layers(
        _attention(FullAttentionSpec, tp, block),
        _attention(SlidingWindowSpec, tp, block * 2, sliding_window=64, head_size=16),
    ),
    "chunked local attention": lambda tp, block: _layers(
        _attention(FullAttentionSpec, tp, block),
        _attention(ChunkedLocalAttentionSpec, tp, block, attention_chunk_size=128),
    ),
    "latent": lambda tp, block: _layers(_latent(MLAAttentionSpec, block)),
    "latent, opaque": lambda tp, block: _layers(
        _latent(
            MLAAttentionSpec,
            block,
            dtype=torch.uint8,
            head_size=96,
            state_content_bytes=656,
            cache_dtype_str="fp8_ds_mla",
        )
    ),
    "latent in FP8": lambda tp, block: _layers(
        *(
            _latent(kind, block, dtype=torch.uint8, cache_dtype_str=name, kv_quant_mode=get_kv_quant_mode(name), **more)
            for kind, name, more in (
                (MLAAttentionSpec, "fp8", {}),
                (SlidingWindowMLASpec, "fp8_e5m2", {"sliding_window": 64}),
            )
        )
    ),
    "latent with an indexer": lambda tp, block: {
        **_layers(_latent(MLAAttentionSpec, block)),
        **{
            f"model.layers.{layer}.self_attn.indexer.k_cache": _latent(
                MLAAttentionSpec, block, head_size=132, dtype=torch.uint8
            )
            for layer in range(3)
        },
    },
    "latent with a window": lambda tp, block: _layers(
        _latent(MLAAttentionSpec, block), _latent(SlidingWindowMLASpec, block, sliding_window=64)
    ),
    "latent, compressed": _compressed(
        {
            "dtype": torch.uint8,
            "head_size": 96,
            "state_content_bytes": 100,
            "alignment": 96,
            "cache_dtype_str": "fp8_ds_mla",
            "model_version": "deepseek_v4",
        }
    ),
    "latent, compressed, in elements": _compressed({"model_version": "deepseek_v4"}),
    "mamba 1": _hybrid("MAMBA1"),
    "mamba 2": _hybrid("MAMBA2"),
    "gated delta net": _hybrid("GDN_ATTN"),
    "ring buffers and states": rings_and_states,
    "ring buffers of two heads": rings_of_two_heads,
    "ring buffers and windows": rings_and_windows,
    "states of unknown kinds": states_of_unknown_kinds,
    "states only": lambda tp, block: {f"model.layers.{layer}.mixer": _state("MAMBA2", tp, block) for layer in range(3)},
}
"""Specs by layer, of one of n ranks and with blocks of so many tokens."""


@dataclass(frozen=True, kw_only=True)
class Rank:
    """A rank with its memory, which vLLM laid out."""

    tp_rank: int
    tp_size: int
    pp_rank: int = 0
    specs: Mapping[str, KVCacheSpec]
    caches: KVCacheConfig
    tensors: Mapping[str, torch.Tensor]
    registration: Registration

    @property
    def memory(self) -> torch.Tensor:
        """All of it, as bytes."""
        storage = next(iter(self.tensors.values())).untyped_storage()
        return torch.empty(0, dtype=torch.uint8).set_(storage)


def make_caches(
    config: VllmConfig,
    monkeypatch: pytest.MonkeyPatch,
    specs: Mapping[str, KVCacheSpec],
    *,
    layout: str = "LBHNC",
    kernel_block_tokens: int | None = None,
    stage: Sequence[str] | None = None,
) -> tuple[KVCacheConfig, dict[str, torch.Tensor]]:
    """Groups, placement and tensors, as vLLM's engine makes them. `stage`: the layers of this one; None: all."""
    monkeypatch.setattr(config.cache_config, "kv_cache_layout", layout)
    groups = get_kv_cache_groups(config, dict(specs))
    if stage is not None:
        groups = project_kv_cache_groups_to_worker(groups, {layer: specs[layer] for layer in stage})
    per_block = 1 << 20
    caches = get_kv_cache_config_from_groups(config, groups, per_block)
    size = caches.kv_cache_tensors[0].size // caches.num_blocks * NUM_BLOCKS
    caches = get_kv_cache_config_from_groups(config, groups, size)
    assert caches.num_blocks == NUM_BLOCKS
    kernel_sizes = [
        group.kv_cache_spec.block_size
        if kernel_block_tokens is None or isinstance(group.kv_cache_spec, MambaSpec)
        else min(kernel_block_tokens, group.kv_cache_spec.block_size)
        for group in groups
    ]
    tensors = allocate_kv_cache(caches, torch.device("cpu"), KVCacheLayout[layout], kernel_sizes)
    return caches, tensors


def make_rank(
    config: VllmConfig,
    monkeypatch: pytest.MonkeyPatch,
    specs: Mapping[str, KVCacheSpec],
    *,
    engine_id: str,
    tp_rank: int,
    tp_size: int,
    layout: str = "LBHNC",
    kernel_block_tokens: int | None = None,
    pp_rank: int = 0,
    stage: Sequence[str] | None = None,
) -> Rank:
    """Register the cache of a rank, in this process, which vLLM takes for a single rank."""
    caches, tensors = make_caches(
        config, monkeypatch, specs, layout=layout, kernel_block_tokens=kernel_block_tokens, stage=stage
    )
    monkeypatch.setattr(config.kv_transfer_config, "engine_id", engine_id)
    be_rank(monkeypatch, "connector.worker.parallelism", tp_rank, tp_size)
    monkeypatch.setattr(get_pp_group(), "rank_in_group", pp_rank)
    return Rank(
        tp_rank=tp_rank,
        tp_size=tp_size,
        pp_rank=pp_rank,
        specs=_grouped_specs(caches),
        caches=caches,
        tensors=tensors,
        registration=derive_registration(config, caches, tensors),
    )


def be_rank(monkeypatch: pytest.MonkeyPatch, module: str, tp_rank: int, tp_size: int) -> None:
    monkeypatch.setattr(f"{module}.get_tensor_model_parallel_rank", lambda: tp_rank)
    monkeypatch.setattr(f"{module}.get_tensor_model_parallel_world_size", lambda: tp_size)


def _grouped_specs(caches: KVCacheConfig) -> dict[str, KVCacheSpec]:
    """Grouping may change block sizes."""
    specs: dict[str, KVCacheSpec] = {}
    for group in caches.kv_cache_groups:
        for layer in group.layer_names:
            spec = group.kv_cache_spec
            specs[layer] = spec.kv_cache_specs[layer] if isinstance(spec, UniformTypeKVCacheSpecs) else spec
    return specs


def seen(local: Registration, remote: Rank) -> RankLayout:
    """What the local rank makes of what the remote one says. Of a built-in engine, which says less, it makes the same,
    or nothing."""
    sent = encode_agent_metadata(remote.registration.agent_metadata(b"agent"))
    rank, metadata = RankId(remote.pp_rank, remote.tp_rank), decode_agent_metadata(sent)
    stated = stated_by(remote.registration.identity)
    assert stated is not None
    found = layout_from_metadata(metadata, rank=rank, tp_size=remote.tp_size, local=local, stated=stated)
    try:
        unsaid = layout_from_metadata(metadata, rank=rank, tp_size=remote.tp_size, local=local)
    except LayoutMismatch as mismatch:
        if "unlike numbers of KV heads" not in mismatch.advice:
            raise
        assert local.layout.tp_size != remote.tp_size
    else:
        assert unsaid == found
    return found


def carry_out(
    decode: Rank, prefill: list[Rank], tables: list[GroupBlocks], packed: PackedBlocks | None = None
) -> EnginePlan:
    """The plan as plain copies between the tensors, inside of what each rank registered, and all that follows them.

    `packed`: of the decode rank, where its blocks have to be packed.
    """
    local_side = decode.registration
    plan = plan_engine(local_side.layout, [seen(local_side, rank) for rank in prefill], local_side.permute)
    pairs = plan.pair(tables)
    by_rank = {RankId(rank.pp_rank, rank.tp_rank): rank for rank in prefill}
    for read, of_read in zip(plan.reads, pairs, strict=True):
        local, remote = expand_runs(read.local_runs), expand_runs(read.remote_runs)
        for ours, theirs in zip(*(ids.tolist() for ids in read.descriptor_ids(of_read)), strict=True):
            (to, length_bytes), (source, source_length_bytes) = local[ours], remote[theirs]
            assert length_bytes == source_length_bytes
            assert _is_registered(decode, to, length_bytes)
            assert _is_registered(by_rank[read.remote_rank], source, length_bytes)
            ctypes.memmove(to, source, length_bytes)
    addresses, lengths = plan.unfilled(pairs[0])
    unfilled = Memory(addresses=addresses, lengths=lengths)
    for address, length_bytes in zip(unfilled.addresses.tolist(), unfilled.lengths.tolist(), strict=True):
        assert _is_registered(decode, address, length_bytes)
    permutation = None
    if plan.landing is not None:
        ratios = (group.kernel_blocks_per_block for group in local_side.layout.cache_groups)
        kernel_blocks = [
            [block * ratio + part for block in table.local for part in range(ratio)]
            for table, ratio in zip(tables, ratios, strict=True)
        ]
        permutation = Permutation(
            kernel_blocks=tuple(np.array(numbers) for numbers in kernel_blocks),
            chunks=plan.landing.chunks,
            heads_first=plan.landing.heads_first,
            packs=plan.landing.packs,
        )
    memory = CacheMemory(decode.tensors.values())
    permuter = BlockPermuter(landing_caches(local_side.layout, decode.tensors))
    finishing = Finishing(run_at_once, permuter, memory, packed_blocks=packed)
    assert not finishing.finish([Loaded("any", ([],), permutation, unfilled)]).failed
    return plan


def _is_registered(rank: Rank, address: int, length_bytes: int) -> bool:
    return any(
        area.address <= address and address + length_bytes <= area.address + area.length_bytes
        for area in rank.registration.ranges
    )


class Content:
    """A request's KV: of tokens or entries [positions, heads of the model, bytes], of states [units, bytes]."""

    def __init__(self, one_rank: Mapping[str, KVCacheSpec], positions: int, generator: torch.Generator) -> None:
        self._tokens: dict[str, torch.Tensor] = {}
        self._states: dict[str, list[torch.Tensor]] = {}
        for layer, spec in one_rank.items():
            if isinstance(spec, MambaSpec | CircularBufferSpec):
                sizes = [(units, size // units) for units, size in _state_parts(spec)]
                self._states[layer] = [_noise(size, generator) for size in sizes]
            else:
                assert isinstance(spec, AttentionSpec)
                size = (positions // spec.tokens_per_state, spec.num_heads, spec.state_content_size_bytes)
                self._tokens[layer] = _noise(size, generator)

    def write(self, rank: Rank, tables: Sequence[Sequence[int]]) -> None:
        """Lay the request into blocks of a rank: logical ids of each cache group."""
        for group, table in zip(rank.caches.kv_cache_groups, tables, strict=True):
            for layer in group.layer_names:
                if layer in self._states:
                    (block,) = table
                    self._write_state(rank, layer, rank.tensors[layer][block].view(torch.uint8).view(-1))
                else:
                    self._write_tokens(rank, layer, table)

    def _write_tokens(self, rank: Rank, layer: str, table: Sequence[int]) -> None:
        tensor = rank.tensors[layer].view(torch.uint8)
        content = _of_rank(self._tokens[layer], rank, tensor.shape[3])
        kernel_tokens = tensor.shape[2]
        ratio = tensor.shape[0] // NUM_BLOCKS
        kernel_blocks = [block * ratio + part for block in table for part in range(ratio)]
        for index, position in enumerate(range(0, content.shape[0], kernel_tokens)):
            page = content[position : position + kernel_tokens]
            tensor[kernel_blocks[index], :, : page.shape[0]] = page.transpose(0, 1)

    def _write_state(self, rank: Rank, layer: str, page: torch.Tensor) -> None:
        """Each part of the convolution is split over the ranks by itself."""
        parts = [part[_held(part.shape[0], rank)].flatten() for part in self._states[layer]]
        page[:] = torch.cat(parts)


def _state_parts(spec: MambaSpec | CircularBufferSpec) -> list[tuple[int, int]]:
    """(units, bytes) of the parts of a state on a single rank: what ranks share out, one after another in memory."""
    if isinstance(spec, CircularBufferSpec) or spec.tp_replicated:
        return [(1, spec.real_page_size_bytes)]
    if spec.mamba_type.name in ("SHORT_CONV", "LINEAR") or len(spec.shapes) != 2:
        return [(8, spec.state_content_size_bytes)]
    (channels, rows), state = spec.shapes
    groups = (channels - 64) // 8
    row_bytes = rows * spec.dtypes[0].itemsize
    ssm = (state[0], prod(state) * spec.dtypes[1].itemsize)
    splits = {
        "MAMBA1": [(64, 64)],
        "MAMBA2": [(64, 64), (groups, groups * 4), (groups, groups * 4)],
        "GDN_ATTN": [(32, 32), (32, 32), (64, 64)],
    }[spec.mamba_type.name]
    assert sum(part for _, part in splits) == channels
    return [*((units, part * row_bytes) for units, part in splits), ssm]


def _of_rank(content: torch.Tensor, rank: Rank, bytes_per_slot: int) -> torch.Tensor:
    """What a rank holds of [positions, slots, bytes]: some slots, or some heads of each slot, which then has all."""
    if content.shape[2] == bytes_per_slot:
        return content[:, _held(content.shape[1], rank)]
    return content.unflatten(2, (KV_HEADS, -1))[:, :, _held(KV_HEADS, rank)].flatten(2)


def _held(units: int, rank: Rank) -> list[int]:
    """Which units a rank holds; neighbours share one where there are fewer units than ranks."""
    if units < rank.tp_size:
        return [rank.tp_rank * units // rank.tp_size]
    per_rank = units // rank.tp_size
    return list(range(rank.tp_rank * per_rank, (rank.tp_rank + 1) * per_rank))


def _noise(size: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 256, tuple(size), dtype=torch.uint8, generator=generator)
