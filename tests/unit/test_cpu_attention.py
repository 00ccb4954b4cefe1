"""K and V in the order of vLLM's CPU attention, between blocks of any sizes; written by vLLM's own kernels.

Engines of one or two ranks have vLLM's attention layers and its metadata builder, which chooses the instruction set.
Tokens are written by the layer. What arrives on the decode rank has to be what its own layer would have written.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from vllm.platforms import CpuArchEnum, current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from connector.layout.blocks import GroupBlocks
from connector.layout.geometry import LayoutMismatch, RankId
from connector.layout.plan import plan_engine
from connector.layout.remote import layout_from_metadata
from connector.unsupported import UnsupportedCache
from connector.worker.registration import derive_registration
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

pytestmark = pytest.mark.timeout(180)

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
    ) -> None:
        dtype, head_size = ORDERS[order]
        config = engine_config(write_model(directory / "model", head_dim=head_size), block_size=block_size, dtype=dtype)
        config.kv_transfer_config.engine_id = engine_id
        self.layers = attention_layers(config, LAYERS, head_size, KV_HEADS // tp_size)
        spec = self.layers[0].get_kv_cache_spec(config)
        self.caches = cache_config(spec, layers=LAYERS, num_blocks=BLOCKS)
        names = [layer_name(index) for index in range(LAYERS)]
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
    generator = torch.Generator().manual_seed(5)
    remote = [6, 2, 5][: math.ceil(TOKENS / prefill_block)]
    local = [1, 7, 4][: math.ceil(TOKENS / decode_block)]
    dtype, head_size = ORDERS[order]
    # What P's last block has beyond the prompt is read as far as chunks reach, and nothing behind that.
    chunk = math.gcd(prefill_block, decode_block)
    read, lent, held = math.ceil(TOKENS / chunk) * chunk, len(remote) * prefill_block, len(local) * decode_block
    size = (LAYERS, 2, max(lent, held), KV_HEADS, head_size)
    content = torch.randn(size, generator=generator).to(getattr(torch, dtype))
    for engine in prefill:
        engine.rank.memory.random_(0, 256, generator=generator)
        engine.write(content[:, :, :lent], remote)
    content[:, :, read:] = 0
    before = decode.rank.memory.random_(0, 256, generator=generator).clone()
    decode.write(content[:, :, :held], local)
    expected = decode.rank.memory.clone()
    decode.rank.memory.copy_(before)
    tables = [GroupBlocks(local=local, remote=remote, num_tokens=TOKENS)]
    carry_out(decode.rank, [engine.rank for engine in prefill], tables)
    assert torch.equal(decode.rank.memory, expected)


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
