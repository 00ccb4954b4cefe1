"""Every family of models from vLLM's tensors to a peer's, over the wire, at unlike sizes; judged by the bytes.

Both engines' ranks are real registrations of tensors that vLLM laid out. The decode rank knows of the prefill ranks
what their metadata says after encoding and decoding. Its plan is carried out as plain copies, and then its memory has
to be what it would be if it had computed the request itself.
"""

from __future__ import annotations

import ctypes
import math
import random
from collections.abc import Iterator

import msgspec
import pytest
import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import MambaSpec

from connector.layout import GroupBlocks, RankLayout, partners, plan_engine
from connector.wire.metadata import decode_agent_metadata, encode_agent_metadata
from connector.wire.peer_layout import understand
from connector.worker.registration import Registration
from connector.worker.unsupported import UnsupportedCache
from tests.unit.builtin_worker import builtin_registration
from tests.unit.cache_families import FAMILIES, NUM_BLOCKS, Content, Rank, be_rank, make_rank
from tests.unit.layout_oracle import expand_runs
from tests.unit.vllm_setup import allow_kernel_block_size, engine_config, single_rank, write_model

pytestmark = pytest.mark.timeout(180)

TOKENS = 128
"""Of the request: whole blocks of both engines."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmConfig]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "DS")
        config = engine_config(write_model(tmp_path_factory.mktemp("model")))
        with single_rank(config, tmp_path_factory.mktemp("rendezvous")):
            yield config


def _seen(local: Registration, remote: Rank) -> RankLayout:
    """What the local rank makes of the remote one's metadata."""
    sent = encode_agent_metadata(remote.registration.agent_metadata(b"agent"))
    return understand(decode_agent_metadata(sent), tp_rank=remote.tp_rank, tp_size=remote.tp_size, local=local)


def _tables(rank: Rank, numbers: Iterator[int]) -> list[list[int]]:
    """Blocks for the request in each cache group: one for a state. No block is in two groups."""
    return [
        [
            next(numbers)
            for _ in range(
                1 if isinstance(group.kv_cache_spec, MambaSpec) else math.ceil(TOKENS / group.kv_cache_spec.block_size)
            )
        ]
        for group in rank.caches.kv_cache_groups
    ]


def _shuffled(seed: int) -> Iterator[int]:
    return iter(random.Random(seed).sample(range(NUM_BLOCKS), NUM_BLOCKS))


def _carry_out(decode: Rank, prefill: list[Rank], tables: list[GroupBlocks]) -> None:
    """The plan as plain copies between the tensors, inside of what each rank registered."""
    seen = [_seen(decode.registration, rank) for rank in prefill]
    plan = plan_engine(decode.registration.layout, seen)
    pairs = plan.pair(tables)
    by_rank = {rank.tp_rank: rank for rank in prefill}
    for read in plan.reads:
        local, remote = expand_runs(read.local_runs), expand_runs(read.remote_runs)
        for ours, theirs in zip(*(ids.tolist() for ids in read.chunk_descriptor_ids(pairs)), strict=True):
            (to, length_bytes), (source, source_length_bytes) = local[ours], remote[theirs]
            assert length_bytes == source_length_bytes
            assert _is_registered(decode, to, length_bytes)
            assert _is_registered(by_rank[read.remote_rank], source, length_bytes)
            ctypes.memmove(to, source, length_bytes)


def _is_registered(rank: Rank, address: int, length_bytes: int) -> bool:
    return any(
        area.address <= address and address + length_bytes <= area.address + area.length_bytes
        for area in rank.registration.ranges
    )


def _check_transfer(
    config: VllmConfig,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    *,
    prefill_tp: int,
    decode_tp: int,
    prefill_block: int = 64,
    layouts: tuple[str, str] = ("LBHNC", "LBHNC"),
    kernel_block_tokens: int | None = None,
) -> None:
    make_specs = FAMILIES[family]
    generator = torch.Generator().manual_seed(7)
    content = Content(make_specs(1, 64), TOKENS, generator)
    for tp_rank in range(decode_tp):
        decode = make_rank(
            config,
            monkeypatch,
            make_specs(decode_tp, 64),
            engine_id="decode",
            tp_rank=tp_rank,
            tp_size=decode_tp,
            layout=layouts[1],
            kernel_block_tokens=kernel_block_tokens,
        )
        prefill = [
            make_rank(
                config,
                monkeypatch,
                make_specs(prefill_tp, prefill_block),
                engine_id="prefill",
                tp_rank=other,
                tp_size=prefill_tp,
                layout=layouts[0],
                kernel_block_tokens=kernel_block_tokens,
            )
            for other in partners(tp_rank, decode_tp, prefill_tp)
        ]
        remote = _tables(prefill[0], _shuffled(5))
        local = _tables(decode, _shuffled(6))
        for rank in prefill:
            rank.memory.copy_(torch.randint(0, 256, rank.memory.shape, dtype=torch.uint8, generator=generator))
            content.write(rank, remote)
        before = torch.randint(0, 256, decode.memory.shape, dtype=torch.uint8, generator=generator)
        decode.memory.copy_(before)
        content.write(decode, local)
        expected = decode.memory.clone()
        assert not torch.equal(expected, before)
        decode.memory.copy_(before)
        tables = [GroupBlocks(local=ours, remote=theirs) for ours, theirs in zip(local, remote, strict=True)]
        _carry_out(decode, prefill, tables)
        assert torch.equal(decode.memory, expected)


SIZES = [(1, 1), (1, 2), (2, 1), (2, 4), (4, 1), (2, 8), (8, 4)]


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_at_every_size(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, family: str, prefill_tp: int, decode_tp: int
) -> None:
    _check_transfer(config, monkeypatch, family, prefill_tp=prefill_tp, decode_tp=decode_tp)


HYBRIDS = ("mamba 1", "mamba 2", "gated delta net")
MIXED_PAGES = ("several head sizes", "latent with an indexer")
"""vLLM does not place these with heads outside of layers."""
LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        (family, layout)
        for family in FAMILIES
        for layout in LAYOUTS
        if not (family in MIXED_PAGES and layout in ("LHBNC", "BHLNC"))
        and not (family in HYBRIDS and layout in ("LHBNC", "BLNHC", "BHLNC"))
    ],
)
def test_every_family_in_every_layout(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, family: str, layout: str
) -> None:
    _check_transfer(config, monkeypatch, family, prefill_tp=2, decode_tp=1, layouts=(layout, layout))


@pytest.mark.parametrize("layout", ["LHBNC", "BLNHC", "BHLNC"])
@pytest.mark.parametrize("family", HYBRIDS)
def test_states_between_the_heads_of_attention_are_refused_at_start(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, family: str, layout: str
) -> None:
    """One block length is advertised for an address, and there the two differ."""
    with pytest.raises(UnsupportedCache):
        make_rank(
            config,
            monkeypatch,
            FAMILIES[family](1, 64),
            engine_id="decode",
            tp_rank=0,
            tp_size=1,
            layout=layout,
        )


@pytest.mark.parametrize("decode_layout", ["LBHNC", "LBNHC", "LHBNC", "BLHNC"])
@pytest.mark.parametrize("prefill_layout", ["LBHNC", "LBNHC", "LHBNC", "BLHNC"])
@pytest.mark.parametrize("family", ["full attention", "sliding window"])
def test_layouts_that_differ(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, family: str, prefill_layout: str, decode_layout: str
) -> None:
    layouts = (prefill_layout, decode_layout)
    _check_transfer(config, monkeypatch, family, prefill_tp=1, decode_tp=2, layouts=layouts)


@pytest.mark.parametrize("prefill_block", [32, 128])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "states only"])
def test_block_sizes_that_differ(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, family: str, prefill_block: int
) -> None:
    _check_transfer(config, monkeypatch, family, prefill_tp=2, decode_tp=1, prefill_block=prefill_block)


@pytest.mark.parametrize("prefill_block", [64, 128])
@pytest.mark.parametrize("family", ["full attention", "sliding window", "latent", "mamba 1", "mamba 2"])
def test_several_kernel_blocks_in_a_block(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, family: str, prefill_block: int
) -> None:
    """As many as their block sizes ask for, on either side; a state is one block all the same."""
    allow_kernel_block_size(monkeypatch, 32)
    _check_transfer(
        config, monkeypatch, family, prefill_tp=2, decode_tp=1, prefill_block=prefill_block, kernel_block_tokens=32
    )


LATENT = [family for family in FAMILIES if family.startswith("latent")]


@pytest.fixture(scope="module")
def latent_config(tmp_path_factory: pytest.TempPathFactory, config: VllmConfig) -> VllmConfig:
    """Of a model that vLLM takes for one of latent attention. Its process groups are those of `config`."""
    model = write_model(
        tmp_path_factory.mktemp("latent"),
        architectures=["DeepseekV2ForCausalLM"],
        model_type="deepseek_v2",
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        num_key_value_heads=8,
    )
    return engine_config(model)


BUILTIN_CASES = [
    *((family, "LBHNC", 1, 64) for family in FAMILIES),
    *((family, "BLHNC", 1, 64) for family in FAMILIES if family not in HYBRIDS),
    *((family, "LBHNC", 4, 64) for family in ("full attention", "sliding window", *LATENT, *HYBRIDS)),
    *((family, "LBHNC", 8, 64) for family in ("full attention", "sliding window")),
    *((family, "LBHNC", 1, 32) for family in ("full attention", "sliding window", "latent", *HYBRIDS)),
    *((family, "BLNHC", 1, 64) for family in ("full attention", "sliding window", "latent")),
    *((family, "LHBNC", 2, 64) for family in ("full attention", "sliding window", "latent")),
]


@pytest.mark.parametrize(("family", "layout", "tp_size", "kernel_block"), BUILTIN_CASES)
def test_equals_the_builtin_registration(
    config: VllmConfig,
    latent_config: VllmConfig,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    layout: str,
    tp_size: int,
    kernel_block: int,
) -> None:
    """All of the metadata, the hash and the registered ranges, for the last of `tp_size` ranks."""
    if family in LATENT:
        config = latent_config
    if kernel_block != 64:
        allow_kernel_block_size(monkeypatch, kernel_block)
    monkeypatch.setattr(config.parallel_config, "tensor_parallel_size", tp_size)
    ours = make_rank(
        config,
        monkeypatch,
        FAMILIES[family](tp_size, 64),
        engine_id="prefill-engine",
        tp_rank=tp_size - 1,
        tp_size=tp_size,
        layout=layout,
        kernel_block_tokens=kernel_block,
    )
    be_rank(monkeypatch, "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker", tp_size - 1, tp_size)
    builtin, builtin_hash, builtin_ranges = builtin_registration(config, ours.caches, ours.tensors)
    registration = ours.registration
    advertised = registration.agent_metadata(builtin.agent_metadata)
    for field in msgspec.structs.fields(type(advertised)):
        assert getattr(advertised, field.name) == getattr(builtin, field.name), field.name
    assert registration.compatibility_hash == builtin_hash
    assert [(area.address, area.length_bytes) for area in registration.ranges] == builtin_ranges
    sent = decode_agent_metadata(msgspec.msgpack.encode(builtin))
    assert understand(sent, tp_rank=tp_size - 1, tp_size=tp_size, local=registration) == registration.layout
