"""K and V in the order of vLLM's CPU attention, between blocks of any sizes; written by vLLM's own kernels.

Engines of one or two ranks have vLLM's attention layers and its metadata builder, which chooses the instruction set.
Tokens are written by the layer. What arrives on the decode rank has to be what its own layer would have written, also
from a prefill engine on GPUs. There is none here; its tokens are written where FlashAttention writes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from vllm.platforms import CpuArchEnum, current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, SlidingWindowSpec

from connector.families import layer_shapes, layer_specs
from connector.layout.blocks import GroupBlocks
from connector.layout.geometry import LayoutMismatch, RankId
from connector.layout.plan import EnginePlan
from connector.layout.remote import layout_from_metadata
from connector.layout.sources import partners
from connector.layout.verification import match
from connector.unsupported import UnsupportedCache
from connector.worker.cpu_attention import packed_blocks, why_not_packed
from connector.worker.registration import derive_registration
from tests.rig.attention import OrderedAttention
from tests.rig.layouts import plan_engine
from tests.unit.cache_families import Rank, be_rank, carry_out, seen
from tests.unit.vllm_setup import (
    KV_HEADS,
    allocate,
    attention_layers,
    cache_config,
    engine_config,
    layer_name,
    single_rank,
    write_model,
)

LAYERS = 2
BLOCKS = 8
TOKENS = 70
"""Of the request: part of a block, on either side."""
BLOCK_SIZES = [(32, 64), (64, 32), (32, 96), (96, 64), (64, 64)]
ORDERS = {
    "vec": ("float32", 32),
    "vec of 16 bits": ("bfloat16", 64),
    "vec16": ("float32", 80),
    "amx": ("bfloat16", 64),
}
"""Type and size of a head that make vLLM choose this instruction set, where the machine has it."""


@pytest.fixture(scope="module", autouse=True)
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    config = engine_config(write_model(tmp_path_factory.mktemp("model")))
    with single_rank(config, tmp_path_factory.mktemp("rendezvous")):
        yield


class Engine:
    """One rank of an engine, with layers that write into its cache."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        directory: Path,
        order: str,
        block_size: int,
        *,
        engine_id: str,
        tp_rank: int = 0,
        tp_size: int = 1,
        layout: str = "LBHNC",
        on_gpus: bool = False,
        packs: bool = False,
        **arguments: Any,
    ) -> None:
        dtype, head_size = ORDERS[order]
        model = write_model(directory / "model", head_dim=head_size)
        config = self.config = engine_config(model, block_size=block_size, dtype=dtype, **arguments)
        config.kv_transfer_config.engine_id = engine_id
        config.kv_transfer_config.kv_connector_extra_config = {"enforce_handshake_compat": not packs}
        if on_gpus:
            # What a back end for CPUs cannot have, and vLLM would not let it.
            config.cache_config.kv_cache_layout = layout
        self.on_gpus = on_gpus
        self.layers = attention_layers(config, LAYERS, head_size, KV_HEADS // tp_size)
        spec = self.layers[0].get_kv_cache_spec(config)
        self.caches = cache_config(spec, layers=LAYERS, num_blocks=BLOCKS, layout=layout)
        names = [layer_name(index) for index in range(LAYERS)]
        if on_gpus:
            for layer in self.layers:
                layer.attn_backend = OrderedAttention
        else:
            CPUAttentionBackend.get_builder_cls()(spec, names, config, torch.device("cpu"))
        self.block_size = block_size
        self.tensors = allocate(self.caches, layout=layout, kernel_block_size=block_size)
        be_rank(monkeypatch, "connector.worker.parallelism", tp_rank, tp_size)
        self.rank = Rank(
            tp_rank=tp_rank,
            tp_size=tp_size,
            specs=dict.fromkeys(names, spec),
            caches=self.caches,
            tensors=self.tensors,
            registration=derive_registration(config, self.caches, self.tensors),
        )

    @property
    def instruction_set(self) -> object:
        return self.layers[0].isa

    def write(self, content: torch.Tensor, table: list[int]) -> None:
        """`content`: [layers, K and V, tokens, heads of the model, elements]."""
        heads = KV_HEADS // self.rank.tp_size
        first = heads * self.rank.tp_rank
        position = torch.arange(content.shape[2])
        slots = torch.tensor(table)[position // self.block_size] * self.block_size + position % self.block_size
        for index, layer in enumerate(self.layers):
            k, v = content[index, :, :, first : first + heads].contiguous()
            if self.on_gpus:
                cache = self.tensors[layer_name(index)].transpose(1, 2)
                for of_tokens, part in zip((k, v), cache.split(k.shape[-1], dim=-1), strict=True):
                    part[slots // self.block_size, slots % self.block_size] = of_tokens
                continue
            assert isinstance(layer.impl, CPUAttentionBackendImpl)
            try:
                layer.impl.do_kv_cache_update(layer, k, v, self.tensors[layer_name(index)], slots)
            except RuntimeError as error:
                if "Unsupported CPU attention configuration" not in str(error):
                    raise
                pytest.skip("vLLM's build for this machine has no kernel that writes in this order")


def _machine(monkeypatch: pytest.MonkeyPatch, order: str) -> None:
    """vLLM has the kernels that write for AMX wherever there is AVX-512; it uses them where the machine says so."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: order == "amx")


def _of_request(*engines: Engine) -> list[int]:
    """Blocks, in no order, for all tokens of the request."""
    return [6, 2, 5, 1, 7][: math.ceil(TOKENS / engines[0].block_size)]


def _arrives(decode: Engine, prefill: list[Engine]) -> EnginePlan:
    """Read a request from `prefill` and compare: all of `decode`'s memory is as its own layers would have left it."""
    generator = torch.Generator().manual_seed(5)
    remote, local = _of_request(*prefill), _of_request(decode)
    # What P's last block has beyond the prompt is read as far as chunks reach, and nothing behind that.
    chunk = math.gcd(prefill[0].block_size, decode.block_size)
    read = math.ceil(TOKENS / chunk) * chunk
    lent, held = len(remote) * prefill[0].block_size, len(local) * decode.block_size
    head_size, dtype = decode.layers[0].head_size, decode.tensors[layer_name(0)].dtype
    content = torch.randn((LAYERS, 2, max(lent, held), KV_HEADS, head_size), generator=generator).to(dtype)
    for engine in prefill:
        engine.rank.memory.random_(0, 256, generator=generator)
        engine.write(content[:, :, :lent], remote)
    content[:, :, read:] = 0
    before = decode.rank.memory.random_(0, 256, generator=generator).clone()
    decode.write(content[:, :, :held], local)
    expected = decode.rank.memory.clone()
    decode.rank.memory.copy_(before)
    tables = [GroupBlocks(local=local, remote=remote, num_tokens=TOKENS)]
    packed = packed_blocks(decode.config, decode.rank.registration, decode.tensors)
    plan = carry_out(decode.rank, [engine.rank for engine in prefill], tables, packed)
    assert torch.equal(decode.rank.memory, expected)
    return plan


@pytest.mark.skipif(current_platform.get_cpu_architecture() is not CpuArchEnum.X86, reason="kernels of x86")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("prefill_block", "decode_block"), BLOCK_SIZES)
@pytest.mark.parametrize("order", ORDERS)
def test_tokens_arrive_as_the_kernel_would_have_written_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, order: str, prefill_block: int, decode_block: int, ranks: int
) -> None:
    _machine(monkeypatch, order)
    decode = Engine(monkeypatch, tmp_path, order, decode_block, engine_id="decode")
    prefill = [
        Engine(monkeypatch, tmp_path, order, prefill_block, engine_id="prefill", tp_rank=rank, tp_size=ranks)
        for rank in range(ranks)
    ]
    assert decode.instruction_set == prefill[0].instruction_set == order.split()[0]
    assert _arrives(decode, prefill).landing is None


@pytest.mark.skipif(current_platform.get_cpu_architecture() is not CpuArchEnum.X86, reason="kernels of x86")
@pytest.mark.parametrize(
    ("layout", "prefill_block", "decode_block", "prefill_ranks", "decode_rank"),
    [
        ("LBHNC", 64, 64, 1, RankId(0, 0)),
        ("LBNHC", 64, 64, 1, RankId(0, 0)),
        ("LBHNC", 16, 64, 1, RankId(0, 0)),
        ("LBNHC", 16, 64, 2, RankId(0, 0)),
        ("LBNHC", 96, 32, 1, RankId(0, 1)),
        ("LBHNC", 48, 32, 2, RankId(0, 0)),
        ("BLNHC", 32, 64, 2, RankId(0, 1)),
        ("BLHNC", 16, 32, 1, RankId(0, 1)),
        ("LHBNC", 16, 32, 1, RankId(0, 0)),
    ],
)
@pytest.mark.parametrize("order", ORDERS)
def test_what_is_read_from_gpus_is_as_the_kernel_would_have_written_it(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    order: str,
    layout: str,
    prefill_block: int,
    decode_block: int,
    prefill_ranks: int,
    decode_rank: RankId,
) -> None:
    """Rank 1 of a decode engine is one of two."""
    _machine(monkeypatch, order)
    prefill = [
        Engine(
            monkeypatch,
            tmp_path,
            order,
            prefill_block,
            engine_id="prefill",
            tp_rank=rank,
            tp_size=prefill_ranks,
            layout=layout,
            on_gpus=True,
        )
        for rank in range(prefill_ranks)
    ]
    decode_ranks = decode_rank.tp_rank + 1
    decode = Engine(
        monkeypatch,
        tmp_path,
        order,
        decode_block,
        engine_id="decode",
        tp_rank=decode_rank.tp_rank,
        tp_size=decode_ranks,
        packs=True,
    )
    assert decode.instruction_set == order.split()[0]
    read = partners(decode_rank.tp_rank, decode_ranks, prefill_ranks, 1, 1)
    plan = _arrives(decode, [prefill[rank] for rank in read])
    assert plan.landing is not None
    assert plan.landing.packs


@pytest.mark.skipif(current_platform.get_cpu_architecture() is not CpuArchEnum.X86, reason="kernels of x86")
@pytest.mark.parametrize("order", ORDERS)
def test_equal_blocks_are_copied_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, order: str) -> None:
    _machine(monkeypatch, order)
    decode, prefill = (Engine(monkeypatch, tmp_path, order, 64, engine_id=name) for name in ("decode", "prefill"))
    plan = plan_engine(decode.rank.registration.layout, [seen(decode.rank.registration, prefill.rank)])
    (rows,) = plan.reads[0].rows
    assert len(rows.local_starts) == LAYERS
    block_bytes = decode.tensors[layer_name(0)][0].nbytes
    assert [run.length_bytes for run in plan.reads[0].local_runs] == [block_bytes] * LAYERS


def test_blocks_in_an_unknown_order_have_to_be_of_one_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(current_platform, "get_cpu_architecture", lambda: CpuArchEnum.ARM)
    decode, same, other = (
        Engine(monkeypatch, tmp_path, "vec", size, engine_id=name)
        for name, size in (("decode", 64), ("same", 64), ("other", 32))
    )
    assert decode.instruction_set == "neon"
    local = decode.rank.registration
    plan_engine(local.layout, [seen(local, same.rank)])
    with pytest.raises(LayoutMismatch, match=r"is 64 here and 32 there; .* same --block-size") as caught:
        seen(local, other.rank)
    assert caught.value.field == f"block size of {layer_name(0)}"


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("attn_backend_name", "FLASH_ATTN", "attention_backend is CPU_ATTN here and FLASH_ATTN there"),
        ("kv_cache_layout", "LBNHC", "kv_cache_layout is a known one here and LBNHC there"),
    ],
)
def test_another_order_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, field: str, value: str, named: str
) -> None:
    _machine(monkeypatch, "vec")
    local = Engine(monkeypatch, tmp_path, "vec", 64, engine_id="decode").rank.registration
    metadata = msgspec.structs.replace(local.agent_metadata(b"agent"), engine_id="other")
    assert layout_from_metadata(metadata, rank=RankId(0, 0), tp_size=1, local=local).regions == local.layout.regions
    with pytest.raises(LayoutMismatch, match=named):
        layout_from_metadata(
            msgspec.structs.replace(metadata, **{field: value}), rank=RankId(0, 0), tp_size=1, local=local
        )


def test_another_order_of_the_tensor_is_refused_at_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The kernels know one order of heads and tokens only, and so do we."""
    _machine(monkeypatch, "vec")
    with pytest.raises(UnsupportedCache, match="tokens of a head one after another"):
        Engine(monkeypatch, tmp_path, "vec", 64, engine_id="decode", layout="LBNHC")


# --- from GPUs ------------------------------------------------------------------------------------------------------


def _pair(monkeypatch: pytest.MonkeyPatch, directory: Path, **of_decode: Any) -> tuple[Engine, Engine]:
    """A decode engine on CPUs, and a prefill engine on GPUs with blocks of the same size."""
    prefill = Engine(monkeypatch, directory, "vec", 64, engine_id="prefill", on_gpus=True)
    return Engine(monkeypatch, directory, "vec", 64, engine_id="decode", **({"packs": True} | of_decode)), prefill


def test_blocks_of_any_size_are_packed_in_an_unknown_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The layer knows it; we need not."""
    monkeypatch.setattr(current_platform, "get_cpu_architecture", lambda: CpuArchEnum.ARM)
    decode, _ = _pair(monkeypatch, tmp_path)
    assert decode.instruction_set == "neon"
    local = decode.rank.registration
    for size in (16, 48, 64, 128):
        prefill = Engine(monkeypatch, tmp_path, "vec", size, engine_id="prefill", on_gpus=True, layout="LBNHC")
        plan = plan_engine(local.layout, [seen(local, prefill.rank)])
        assert plan.landing is not None
        assert plan.landing.packs


def test_whole_blocks_are_read_where_the_peers_heads_come_first_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """So P's checksums can be compared with what has landed, before it is packed (option verify)."""
    decode, prefill = _pair(monkeypatch, tmp_path)
    local = decode.rank.registration
    (read,) = plan_engine(local.layout, [seen(local, prefill.rank)]).reads
    block_bytes = decode.tensors[layer_name(0)][0].nbytes
    assert [run.length_bytes for run in read.local_runs] == [block_bytes] * LAYERS
    assert match(read, prefill.rank.registration.agent_metadata(b"agent")).regions.tolist() == list(range(LAYERS))


def test_nothing_is_packed_without_the_option(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    decode, prefill = _pair(monkeypatch, tmp_path, packs=False)
    with pytest.raises(LayoutMismatch, match=r"is CPU_ATTN here and CUSTOM there; .* enforce_handshake_compat=false"):
        seen(decode.rank.registration, prefill.rank)


def test_nothing_is_packed_in_a_quantized_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its layers quantize what they write, and what is read is quantized already."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: True)
    decode, prefill = _pair(monkeypatch, tmp_path, kv_cache_dtype="fp8")
    assert not decode.rank.registration.as_shaped
    with pytest.raises(LayoutMismatch, match=r"is CPU_ATTN here and CUSTOM there; .* not quantized"):
        seen(decode.rank.registration, prefill.rank)


@pytest.mark.parametrize(
    ("named", "groups"),
    [
        ("one KV cache group", lambda spec: [spec, spec]),
        ("full attention", lambda spec: [_windowed(spec)]),
        ("full attention", lambda spec: [replace(spec, head_size_v=16)]),
    ],
    ids=["several groups", "a window", "unlike K and V"],
)
def test_only_one_group_of_full_attention_is_packed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, named: str, groups: Callable[[Any], list[Any]]
) -> None:
    decode, _ = _pair(monkeypatch, tmp_path)
    (group,) = decode.caches.kv_cache_groups
    specs = groups(group.kv_cache_spec)
    names = [group.layer_names[index :: len(specs)] for index in range(len(specs))]
    caches = replace(
        decode.caches, kv_cache_groups=[KVCacheGroupSpec(*each) for each in zip(names, specs, strict=True)]
    )
    shapes = layer_shapes(caches, decode.config.model_config, 1, prefix_caching=False)
    assert named in why_not_packed(decode.config, caches, shapes, layer_specs(caches))
    assert not why_not_packed(decode.config, decode.caches, decode.rank.registration.as_shaped, decode.rank.specs)


def _windowed(spec: FullAttentionSpec) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=spec.block_size,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        dtype=spec.dtype,
        sliding_window=64,
    )


def test_an_engine_on_gpus_reads_nothing_from_one_on_cpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever is enforced there: it has no layer that could put it in its order."""
    on_cpus, _ = _pair(monkeypatch, tmp_path)
    on_gpus = Engine(monkeypatch, tmp_path, "vec", 64, engine_id="other", on_gpus=True, packs=True)
    with pytest.raises(LayoutMismatch, match=r"is CUSTOM here and CPU_ATTN there; .* only an engine on CPUs"):
        seen(on_gpus.rank.registration, on_cpus.rank)


def test_all_ranks_that_are_read_have_to_be_packed_or_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    decode, _ = _pair(monkeypatch, tmp_path)
    ranks = [
        Engine(monkeypatch, tmp_path, "vec", 64, engine_id="p", tp_rank=rank, tp_size=2, on_gpus=rank == 1)
        for rank in range(2)
    ]
    local = decode.rank.registration
    with pytest.raises(LayoutMismatch, match="attention_backend of rank 1 is CPU_ATTN here and CUSTOM there"):
        plan_engine(local.layout, [seen(local, engine.rank) for engine in ranks])
