"""Every family of models from vLLM's tensors to a peer's, over the wire, at unlike sizes; judged by the bytes.

Both engines' ranks are real registrations of tensors that vLLM laid out. The decode rank knows of the prefill ranks
what their metadata says after encoding and decoding. Its plan is carried out as plain copies, and then its memory has
to be what it would be if it had computed the request itself.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_pp_group
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    iter_layer_specs,
)

from connector.layout.blocks import GroupBlocks
from connector.layout.geometry import LayoutMismatch, RankId, RankLayout
from connector.layout.landing import Permute, landing_layers
from connector.layout.remote import layout_from_metadata
from connector.layout.sources import partners
from connector.unsupported import UnsupportedCache
from connector.wire.handshake import incompatibilities
from connector.wire.identity import Difference
from connector.wire.metadata import decode_agent_metadata
from connector.worker import cache_regions
from connector.worker import registration as registering
from connector.worker.cache_regions import has_latent_rows
from connector.worker.registration import require_supported
from tests.rig.layouts import plan_engine
from tests.unit.builtin_worker import builtin_registration, differing_fields
from tests.unit.cache_families import (
    FAMILIES,
    NUM_BLOCKS,
    Content,
    MakeSpecs,
    Rank,
    be_rank,
    carry_out,
    deepseek_v4,
    make_rank,
    one_group_of_b_and_c,
    rings_and_states,
    rings_and_windows,
    rings_of_two_heads,
    seen,
    with_drafts,
)
from tests.unit.vllm_setup import (
    allow_kernel_block_size,
    engine_config,
    latent_engine_config,
    single_rank,
    write_model,
)

TOKENS = 128
"""Of the request: whole blocks of both engines."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmConfig]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "DS")
        get_conv_state_layout.cache_clear()
        config = engine_config(write_model(tmp_path_factory.mktemp("model")))
        with single_rank(config, tmp_path_factory.mktemp("rendezvous")):
            yield config
    get_conv_state_layout.cache_clear()


def _tables(rank: Rank, numbers: Iterator[int]) -> list[list[int]]:
    """Blocks for the request in each cache group: one for a state. No block is in two groups."""
    return [
        [
            next(numbers)
            for _ in range(1 if _is_of_states(group) else math.ceil(TOKENS / group.kv_cache_spec.block_size))
        ]
        for group in rank.caches.kv_cache_groups
    ]


def _is_of_states(group: KVCacheGroupSpec) -> bool:
    return any(isinstance(spec, MambaSpec | CircularBufferSpec) for spec in iter_layer_specs(group.kv_cache_spec))


def _shuffled(seed: int) -> Iterator[int]:
    return iter(random.Random(seed).sample(range(NUM_BLOCKS), NUM_BLOCKS))


RINGS: dict[str, Callable[..., dict[str, KVCacheSpec]]] = {
    "ring buffers and states": rings_and_states,
    "ring buffers of two heads": rings_of_two_heads,
    "ring buffers and windows": rings_and_windows,
}
"""With ring buffers of another capacity."""
PACKED = [family for family in FAMILIES if family.startswith("latent, compressed") or family in RINGS]
"""What vLLM places with blocks outermost only."""


def _layout_of(family: str) -> str:
    return "BLHNC" if family in PACKED else "LBHNC"


def _check_transfer(
    config: VllmConfig,
    monkeypatch: pytest.MonkeyPatch,
    make_specs: MakeSpecs,
    *,
    prefill_tp: int,
    decode_tp: int,
    prefill_block: int = 64,
    layouts: tuple[str, str] = ("LBHNC", "LBHNC"),
    kernel_block_tokens: int | None = None,
    stages: int = 1,
    permutes: bool = False,
) -> None:
    monkeypatch.setattr(config.kv_transfer_config, "enable_permute_local_kv", permutes)
    # With one, windows are not read from smaller blocks (below).
    monkeypatch.setattr(config.cache_config, "enable_prefix_caching", prefill_block % 64 == 0)
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
        specs = make_specs(prefill_tp, prefill_block)
        by_stage = [list(layers) for layers in np.array_split(sorted(specs), stages)]
        prefill = [
            make_rank(
                config,
                monkeypatch,
                specs,
                engine_id="prefill",
                tp_rank=other,
                tp_size=prefill_tp,
                layout=layouts[0],
                kernel_block_tokens=kernel_block_tokens,
                pp_rank=pp_rank,
                stage=stage if stages > 1 else None,
            )
            for pp_rank, stage in enumerate(by_stage)
            for other in partners(tp_rank, decode_tp, prefill_tp)
        ]
        monkeypatch.setattr(get_pp_group(), "rank_in_group", 0)
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
        carry_out(decode, prefill, tables)
        assert torch.equal(decode.memory, expected)
        assert decode.registration.permute is (Permute.ORDERS if permutes else Permute.NEVER)


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in PACKED])
def test_every_family_in_pipeline_stages(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, family: str, layout: str, stages: int
) -> None:
    """A stage has some of the layers, and perhaps none of a cache group; what shares memory is another set in each."""
    layouts, tp = (layout, layout), 1 if family in OF_EQUAL_RANKS else 2
    _check_transfer(config, monkeypatch, FAMILIES[family], prefill_tp=tp, decode_tp=1, stages=stages, layouts=layouts)


def _strange(kind: type[AttentionSpec], **changes: Any) -> KVCacheSpec:
    return kind(**{"block_size": 64, "num_kv_heads": 4, "head_size": 32, "dtype": torch.float32} | changes)


SIZES = [(1, 1), (1, 2), (2, 1), (2, 4), (4, 1), (2, 8), (8, 4)]


OWN_BLOCKS = "window with blocks of its own"
MIXED_RINGS = "ring buffers and states"
SLOTS = ("K and V in slots of their own", "K and V in planes")
"""Only their attention back ends know where in a block a head lies. At some TP there are as many slots as heads."""
UNKNOWN_STATES = "states of unknown kinds"
"""The built-in connector does not start with them."""
OF_EQUAL_RANKS = (*SLOTS, UNKNOWN_STATES)
"""How ranks share them is unknown."""
STATES_ONLY = ("states only", UNKNOWN_STATES)


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), SIZES)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in OF_EQUAL_RANKS])
def test_every_family_at_every_size(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, family: str, prefill_tp: int, decode_tp: int
) -> None:
    layouts = (_layout_of(family),) * 2
    _check_transfer(config, monkeypatch, FAMILIES[family], prefill_tp=prefill_tp, decode_tp=decode_tp, layouts=layouts)


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), list(itertools.product((1, 2, 4, 8), repeat=2)))
@pytest.mark.parametrize("family", OF_EQUAL_RANKS)
def test_what_ranks_share_in_an_unknown_way_goes_to_an_engine_of_the_same_size(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, family: str, prefill_tp: int, decode_tp: int
) -> None:
    """Whatever a block of a rank holds is what that of the same rank needs."""
    if prefill_tp == decode_tp:
        _check_transfer(config, monkeypatch, FAMILIES[family], prefill_tp=prefill_tp, decode_tp=decode_tp)
        return
    decode, prefill = (
        make_rank(config, monkeypatch, FAMILIES[family](tp, 64), engine_id=name, tp_rank=0, tp_size=tp)
        for name, tp in (("decode", decode_tp), ("prefill", prefill_tp))
    )
    sizes = f"tp_size is {decode_tp} here and {prefill_tp} there"
    with pytest.raises(LayoutMismatch, match=rf"{sizes}; .* how ranks share .* is unknown"):
        seen(decode.registration, prefill)


@pytest.mark.parametrize("name", ["n_groups", "mamba_n_groups", "mamba_ngroups"])
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 2), (4, 2), (2, 2)])
def test_b_and_c_that_all_ranks_hold_alike(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, name: str, prefill_tp: int, decode_tp: int
) -> None:
    monkeypatch.setattr(config.model_config.hf_text_config, name, 1, raising=False)
    _check_transfer(config, monkeypatch, one_group_of_b_and_c, prefill_tp=prefill_tp, decode_tp=decode_tp)


def test_b_and_c_in_unknown_number_are_refused(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken for groups of one rank each, they do not add up on an engine of another size."""
    with pytest.raises(LayoutMismatch, match=r"block length of model\.layers\.0\.mixer"):
        _check_transfer(config, monkeypatch, one_group_of_b_and_c, prefill_tp=1, decode_tp=2)


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
        and not (family in PACKED and layout not in ("BLHNC", "BLNHC"))
        and not (family == "ring buffers of two heads" and layout == "BLNHC")
        and not (family in HYBRIDS and layout in ("LHBNC", "BLNHC", "BHLNC"))
    ],
)
def test_every_family_in_every_layout(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, family: str, layout: str
) -> None:
    prefill_tp = 1 if family in OF_EQUAL_RANKS else 2
    layouts = (layout, layout)
    _check_transfer(config, monkeypatch, FAMILIES[family], prefill_tp=prefill_tp, decode_tp=1, layouts=layouts)


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
    _check_transfer(config, monkeypatch, FAMILIES[family], prefill_tp=1, decode_tp=2, layouts=layouts)


OPAQUE = ("latent with an indexer", *SLOTS, *PACKED)
"""Some blocks hold the scales of all tokens behind the tokens, or are of one size whatever the engine's is."""


@pytest.mark.parametrize(
    ("layouts", "prefill_tp", "decode_tp", "prefill_block"),
    [
        (("LBNHC", "LBHNC"), 1, 1, 64),
        (("LBHNC", "LBNHC"), 1, 2, 32),
        (("LBHNC", "LBNHC"), 4, 2, 128),
        (("LBHNC", "LBHNC"), 1, 1, 32),
        (("LBHNC", "LBHNC"), 2, 1, 32),
    ],
)
@pytest.mark.parametrize(
    "family", [family for family in FAMILIES if not family.startswith(("latent", "states")) and family not in OPAQUE]
)
def test_blocks_that_are_put_in_our_order(
    config: VllmConfig,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    layouts: tuple[str, str],
    prefill_tp: int,
    decode_tp: int,
    prefill_block: int,
) -> None:
    """With several cache groups too: what does not take part, such as a state in the same memory, stays as it is."""
    _check_transfer(
        config,
        monkeypatch,
        FAMILIES[family],
        prefill_tp=prefill_tp,
        decode_tp=decode_tp,
        prefill_block=prefill_block,
        layouts=layouts,
        permutes=True,
    )


@pytest.mark.parametrize("family", ["latent", "latent with an indexer", "states only"])
def test_caches_without_heads_have_nothing_to_put_in_order(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    monkeypatch.setattr(config.kv_transfer_config, "enable_permute_local_kv", True)
    rank = make_rank(config, monkeypatch, FAMILIES[family](1, 64), engine_id="decode", tp_rank=0, tp_size=1)
    assert rank.registration.permute is Permute.ORDERS
    assert landing_layers(rank.registration.layout) == {}


@pytest.mark.parametrize("prefill_block", [32, 128])
@pytest.mark.parametrize("family", OPAQUE)
def test_block_sizes_that_differ_are_refused_where_it_matters(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, family: str, prefill_block: int
) -> None:
    decode, prefill = (
        make_rank(
            config,
            monkeypatch,
            FAMILIES[family](1, block),
            engine_id=name,
            tp_rank=0,
            tp_size=1,
            layout=_layout_of(family),
        )
        for name, block in (("decode", 64), ("prefill", prefill_block))
    )
    with pytest.raises(LayoutMismatch, match=r"block size of model\..* is \d+ here and \d+ there"):
        seen(decode.registration, prefill)


@pytest.mark.parametrize("prefill_block", [32, 128])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in (*OPAQUE, *STATES_ONLY)])
def test_block_sizes_that_differ(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, family: str, prefill_block: int
) -> None:
    _check_transfer(config, monkeypatch, FAMILIES[family], prefill_tp=2, decode_tp=1, prefill_block=prefill_block)


@pytest.mark.parametrize("family", ["sliding window", OWN_BLOCKS, "chunked local attention", "latent with a window"])
def test_windows_are_not_read_from_smaller_blocks(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """P keeps what the window needs, which may begin inside of a block of D that the prefix cache takes for whole."""
    monkeypatch.setattr(config.cache_config, "enable_prefix_caching", True)
    decode, prefill = (
        make_rank(config, monkeypatch, FAMILIES[family](1, block), engine_id=name, tp_rank=0, tp_size=1)
        for name, block in (("decode", 64), ("prefill", 32))
    )
    with pytest.raises(LayoutMismatch, match=r"block size of .*; its window needs a --block-size on P"):
        seen(decode.registration, prefill)


@pytest.mark.parametrize("prefill_block", [64, 128])
@pytest.mark.parametrize("family", ["full attention", "sliding window", "latent", "mamba 1", "mamba 2"])
def test_several_kernel_blocks_in_a_block(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, family: str, prefill_block: int
) -> None:
    """As many as their block sizes ask for, on either side; a state is one block all the same."""
    allow_kernel_block_size(monkeypatch, 32)
    _check_transfer(
        config,
        monkeypatch,
        FAMILIES[family],
        prefill_tp=2,
        decode_tp=1,
        prefill_block=prefill_block,
        kernel_block_tokens=32,
    )


LATENT = [family for family in FAMILIES if family.startswith("latent") or family in RINGS.keys() - {MIXED_RINGS}]


@pytest.fixture(scope="module")
def latent_config(tmp_path_factory: pytest.TempPathFactory, config: VllmConfig) -> VllmConfig:
    """Of a model that vLLM takes for one of latent attention. Its process groups are those of `config`."""
    return latent_engine_config(tmp_path_factory.mktemp("latent"))


BUILTIN_CASES = [
    *((family, "LBHNC", 1, 64) for family in FAMILIES if family not in (*PACKED, OWN_BLOCKS, UNKNOWN_STATES)),
    *((OWN_BLOCKS, layout, 1, None) for layout in ("LBHNC", "BLHNC")),
    # Of states with blocks outermost the built-in connector advertises strides that are not theirs.
    *((family, "BLHNC", 1, 64) for family in FAMILIES if family not in (*HYBRIDS, OWN_BLOCKS, *STATES_ONLY)),
    *((family, "LBHNC", 4, 64) for family in ("full attention", "latent", *HYBRIDS)),
    ("full attention", "LBHNC", 8, 64),
    *((family, "LBHNC", 1, 32) for family in ("full attention", *HYBRIDS)),
    *((family, "BLNHC", 1, 64) for family in ("full attention", "latent")),
    *((family, "LHBNC", 2, 64) for family in ("full attention", "latent")),
    *((family, "BLHNC", 4, 64) for family in RINGS),
]


@pytest.mark.parametrize(("family", "layout", "tp_size", "kernel_block"), BUILTIN_CASES)
def test_equals_the_builtin_registration(
    config: VllmConfig,
    latent_config: VllmConfig,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    layout: str,
    tp_size: int,
    kernel_block: int | None,
) -> None:
    """All of the metadata, the hash and the registered ranges, for the last of `tp_size` ranks."""
    if family in LATENT:
        config = latent_config
    if kernel_block is not None:
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
    assert differing_fields(advertised, builtin) == {"region_members"}
    assert registration.compatibility_hash == builtin_hash
    assert [(area.address, area.length_bytes) for area in registration.ranges] == builtin_ranges
    sent = decode_agent_metadata(msgspec.msgpack.encode(builtin))
    assert (
        layout_from_metadata(sent, rank=RankId(0, tp_size - 1), tp_size=tp_size, local=registration)
        == registration.layout
    )


# --- latent caches as whole rows ------------------------------------------------------------------------------------


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with vLLM 0.33, whichever is installed."""
    monkeypatch.setattr(cache_regions, "is_vllm_at_least", lambda _: True)
    allow_kernel_block_size(monkeypatch, 64)


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("prefill_tp", [1, 2])
@pytest.mark.parametrize("family", LATENT)
def test_latent_caches_are_whole_rows_from_0_33_on(
    latent_config: VllmConfig, monkeypatch: pytest.MonkeyPatch, family: str, prefill_tp: int
) -> None:
    _check_transfer(
        latent_config,
        monkeypatch,
        FAMILIES[family],
        prefill_tp=prefill_tp,
        decode_tp=1,
        layouts=("BLHNC", "BLHNC"),
        kernel_block_tokens=64,
    )


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("family", ["latent", "latent with an indexer", "latent with a window"])
def test_stages_whose_regions_are_of_a_layer_each_are_read_into_rows(
    latent_config: VllmConfig, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    layers = len(FAMILIES[family](1, 64))

    def has_rows(config: VllmConfig, caches: Sequence[torch.Tensor], layout_name: str, *, states: bool) -> bool:
        return len(caches) == layers and has_latent_rows(config, caches, layout_name, states=states)

    monkeypatch.setattr(registering, "has_latent_rows", has_rows)
    layouts = ("BLHNC", "BLHNC")
    _check_transfer(latent_config, monkeypatch, FAMILIES[family], prefill_tp=1, decode_tp=1, stages=2, layouts=layouts)


def _rank_of_rows(config: VllmConfig, monkeypatch: pytest.MonkeyPatch, family: str = "latent with an indexer") -> Rank:
    return make_rank(config, monkeypatch, FAMILIES[family](1, 64), engine_id="p", tp_rank=0, tp_size=1, layout="BLHNC")


@pytest.mark.usefixtures("rows")
def test_a_row_holds_all_layers_and_peers_are_told_where(
    latent_config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = _rank_of_rows(latent_config, monkeypatch)
    told = rank.registration.agent_metadata(b"agent")
    assert told.block_lens == told.block_strides
    assert len(told.block_lens) == 1
    assert set(told.packed_member_layouts) == set(rank.specs)
    ends = [offset + length for offset, length in sorted(told.packed_member_layouts.values())]
    assert [offset for offset, _ in sorted(told.packed_member_layouts.values())] == [0, *ends[:-1]]
    assert ends[-1] <= told.block_lens[0]


@pytest.mark.usefixtures("rows")
def test_a_peer_whose_pages_lie_elsewhere_in_a_row_is_refused(
    latent_config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = _rank_of_rows(latent_config, monkeypatch, "latent, opaque")
    told = ours.registration.agent_metadata(b"agent")
    layer, (offset, length) = next(iter(told.packed_member_layouts.items()))
    told.packed_member_layouts[layer] = (offset + 1, length)
    with pytest.raises(LayoutMismatch, match=f"place and length of {layer} in a row of layers is"):
        layout_from_metadata(told, rank=RankId(0, 0), tp_size=1, local=ours.registration)


@pytest.mark.usefixtures("rows")
def test_a_peer_with_rows_does_not_fit_an_engine_without(
    latent_config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registering, "has_latent_rows", lambda *_, **__: False)
    ours = _rank_of_rows(latent_config, monkeypatch)
    told = ours.registration.agent_metadata(b"agent")
    told.packed_member_layouts["model.layers.0.attn"] = (0, 64)
    with pytest.raises(LayoutMismatch, match="in a row of layers is none here"):
        layout_from_metadata(told, rank=RankId(0, 0), tp_size=1, local=ours.registration)


# --- ring buffers, and states that all ranks hold -------------------------------------------------------------------


def _ring_rank(
    config: VllmConfig,
    monkeypatch: pytest.MonkeyPatch,
    specs: Mapping[str, KVCacheSpec],
    *,
    engine_id: str = "decode",
    tp_size: int = 1,
    layout: str = "BLHNC",
) -> Rank:
    return make_rank(config, monkeypatch, specs, engine_id=engine_id, tp_rank=0, tp_size=tp_size, layout=layout)


def _as_builtin(decode: Rank, prefill: Rank) -> RankLayout:
    """What the decode rank makes of the prefill rank if that does not say which layers share memory."""
    metadata = msgspec.structs.replace(prefill.registration.agent_metadata(b"agent"), region_members=[])
    return layout_from_metadata(
        metadata, rank=RankId(0, prefill.tp_rank), tp_size=prefill.tp_size, local=decode.registration
    )


@pytest.mark.parametrize("family", RINGS)
def test_a_builtin_peer_with_ring_buffers_is_understood(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    decode, prefill = (
        _ring_rank(config, monkeypatch, FAMILIES[family](1, 64), engine_id=name) for name in ("decode", "prefill")
    )
    assert _as_builtin(decode, prefill) == seen(decode.registration, prefill) == prefill.registration.layout


def test_a_builtin_peer_with_pages_of_other_sizes_is_refused(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which layers of unlike groups begin at one address depends on how many heads a page has."""
    decode, prefill = (
        _ring_rank(config, monkeypatch, rings_and_states(tp, 64), engine_id=name, tp_size=tp)
        for name, tp in (("decode", 1), ("prefill", 2))
    )
    seen(decode.registration, prefill)
    with pytest.raises(LayoutMismatch, match="tp_size is 1 here and 2 there; with ring buffers the built-in"):
        _as_builtin(decode, prefill)


@pytest.mark.parametrize("sees", [lambda ours, theirs: seen(ours.registration, theirs), _as_builtin])
@pytest.mark.parametrize("capacity", [4, 16])
@pytest.mark.parametrize("family", RINGS)
def test_ring_buffers_of_another_capacity_are_refused(
    config: VllmConfig,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    capacity: int,
    sees: Callable[[Rank, Rank], RankLayout],
) -> None:
    """With speculative decoding on one side only, a token has another slot there. Most pages are of the same size."""
    decode = _ring_rank(config, monkeypatch, FAMILIES[family](1, 64))
    prefill = _ring_rank(config, monkeypatch, RINGS[family](1, 64, capacity=capacity), engine_id="prefill")
    with pytest.raises(
        LayoutMismatch, match=r"(block length|cache group) of model\.layers.*(key_state|tail|state_cache)"
    ) as caught:
        sees(decode, prefill)
    assert ("num_speculative_tokens" in caught.value.advice) is caught.value.field.startswith("block length")


def test_ring_buffers_in_another_layout_are_refused(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    decode, prefill = (
        _ring_rank(config, monkeypatch, rings_and_states(1, 64), engine_id=name, layout=layout)
        for name, layout in (("decode", "BLHNC"), ("prefill", "BLNHC"))
    )
    with pytest.raises(LayoutMismatch, match="kv_cache_layout is BLHNC here and BLNHC there"):
        seen(decode.registration, prefill)


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (2, 1), (1, 4)])
def test_states_without_padding_beside_ring_buffers(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, prefill_tp: int, decode_tp: int
) -> None:
    """Then most of what begins at the address of a region is of another length than it says."""
    specs = functools.partial(rings_and_states, padded=False)
    layouts = ("BLHNC", "BLHNC")
    _check_transfer(config, monkeypatch, specs, prefill_tp=prefill_tp, decode_tp=decode_tp, layouts=layouts)


def test_ring_buffers_in_pipeline_stages(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = ("BLHNC", "BLHNC")
    _check_transfer(config, monkeypatch, rings_and_windows, prefill_tp=2, decode_tp=1, stages=2, layouts=layouts)


def test_ring_buffers_of_which_no_length_is_told_are_refused_at_start(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single one begins where the first layer of attention does."""
    specs = {layer: spec for layer, spec in rings_of_two_heads(1, 64).items() if "layers.0" in layer}
    with pytest.raises(UnsupportedCache, match="length of ring buffers of cache group"):
        _ring_rank(config, monkeypatch, specs)


def test_ring_buffers_with_tokens_before_heads_are_refused_at_start(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnsupportedCache, match=r"with strides .* supported: blocks that are contiguous"):
        _ring_rank(config, monkeypatch, rings_of_two_heads(1, 64), layout="BLNHC")


def test_ring_buffers_are_not_staged_on_the_host(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("connector.worker.registration.is_staged", lambda config: True)
    with pytest.raises(UnsupportedCache, match=r"kv_buffer_device cpu with the ring buffer model\.layers\.0"):
        _ring_rank(config, monkeypatch, rings_of_two_heads(1, 64))


def test_a_replicated_state_of_another_size_is_refused(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    decode, prefill = (
        _ring_rank(config, monkeypatch, rings_and_states(1, 64, padded=False, rows=rows), engine_id=name)
        for name, rows in (("decode", 3), ("prefill", 4))
    )
    with pytest.raises(LayoutMismatch, match="ple_block_len is 120 here and 160 there"):
        seen(decode.registration, prefill)


# --- what a layer keeps ---------------------------------------------------------------------------------------------


def _differing(decode: Rank, prefill: Rank) -> list[Difference]:
    """What the handshake of the two ends with, whatever is enforced."""
    ours, theirs = decode.registration.identity, prefill.registration.identity
    assert ours is not None
    assert theirs is not None
    return incompatibilities(ours, theirs, enforce_factors=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_engines_of_unlike_sizes_keep_the_same_of_a_head_and_a_state(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """On any rank, in blocks of any size; also where how ranks share a layer is unknown."""
    layout = _layout_of(family)
    ranks = [
        make_rank(config, monkeypatch, specs, engine_id="any", tp_rank=tp - 1, tp_size=tp, layout=layout)
        for tp, block in itertools.product((1, 2, 4, 8), (32, 64))
        for specs in [FAMILIES[family](tp, block)]
    ]
    for rank in ranks:
        assert rank.registration.identity is not None
        assert all(layer.content_bytes for layer in rank.registration.identity.layers.values())
        assert _differing(ranks[0], rank) == []


@pytest.mark.parametrize("kind", ["SHORT_CONV", "MAMBA2", "GDN_ATTN", "KDA"])
@pytest.mark.parametrize(("decode_drafts", "prefill_drafts"), [(3, 0), (0, 3)])
def test_states_of_engines_that_draft_unlike_numbers_of_tokens_do_not_fit(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, kind: str, decode_drafts: int, prefill_drafts: int
) -> None:
    """The convolution has as many columns more. Pages are as long as those of attention on both sides, and of a short
    convolution the metadata say nothing else: D would have read states of other columns."""
    decode, prefill = (
        make_rank(config, monkeypatch, with_drafts(kind, drafts), engine_id=name, tp_rank=0, tp_size=1)
        for name, drafts in (("decode", decode_drafts), ("prefill", prefill_drafts))
    )
    found = _differing(decode, prefill)
    states = [f"model.layers.{layer}.mixer" for layer in range(8) if layer % 4 != 1]
    assert sorted(each.field for each in found) == [f"content of {layer}" for layer in states]
    assert all("num_speculative_tokens" in each.advice for each in found)
    if kind == "SHORT_CONV":
        assert (found[0].local, found[0].remote) == tuple(
            f"{64 * (2 + drafts) * 2} bytes" for drafts in (decode_drafts, prefill_drafts)
        )


@pytest.mark.parametrize(
    ("kind", "pads", "field"),
    [
        ("MAMBA2", True, "ssm_sizes of 1 ranks"),
        ("GDN_ATTN", True, "ssm_sizes of 1 ranks"),
        ("KDA", True, "ssm_sizes of 1 ranks"),
        ("SHORT_CONV", False, "block length of model.layers.0.mixer on rank 0 of 1"),
    ],
)
def test_an_engine_that_does_not_say_how_much_it_keeps_is_told_which_option_to_look_at(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, kind: str, pads: bool, field: str
) -> None:
    """A built-in engine's metadata show that a state is longer, and not what made it so."""
    decode, prefill = (
        make_rank(config, monkeypatch, with_drafts(kind, drafts, pads=pads), engine_id=name, tp_rank=0, tp_size=1)
        for name, drafts in (("decode", 3), ("prefill", 0))
    )
    with pytest.raises(LayoutMismatch) as caught:
        seen(decode.registration, prefill)
    assert caught.value.field == field
    assert "num_speculative_tokens" in caught.value.advice


@pytest.mark.parametrize(("decode_bytes", "prefill_bytes"), [(132, 68), (68, 132)])
def test_indexers_of_another_type_do_not_fit(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, decode_bytes: int, prefill_bytes: int
) -> None:
    """The rows of all layers are of one length here whichever type the indexers have: what is in a page is padded, and
    so is the row. D would look for most of its layers in the wrong place of P's rows."""
    decode, prefill = (
        make_rank(config, monkeypatch, deepseek_v4(size), engine_id=name, tp_rank=0, tp_size=1, layout="BLHNC")
        for name, size in (("decode", decode_bytes), ("prefill", prefill_bytes))
    )
    lengths = [rank.registration.agent_metadata(b"").block_strides for rank in (decode, prefill)]
    assert lengths[0] == lengths[1]
    found = _differing(decode, prefill)
    indexers = [f"content of model.layers.{layer}.attn.indexer.k_cache" for layer in range(2, 12, 2)]
    assert sorted(each.field for each in found) == sorted(indexers)
    assert {(each.local, each.remote) for each in found} == {(f"{decode_bytes} bytes", f"{prefill_bytes} bytes")}
    assert "indexer_kv_dtype" in found[0].advice


@pytest.mark.parametrize("family", RINGS)
def test_ring_buffers_of_engines_that_draft_unlike_numbers_of_tokens_do_not_fit(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    decode, prefill = (
        _ring_rank(config, monkeypatch, RINGS[family](1, 64, capacity=capacity), engine_id=name)
        for name, capacity in (("decode", 8), ("prefill", 16))
    )
    found = _differing(decode, prefill)
    rings = sorted(layer for layer, spec in decode.specs.items() if isinstance(spec, CircularBufferSpec))
    assert sorted(each.field for each in found) == [f"content of {layer}" for layer in rings]
    assert "num_speculative_tokens" in found[0].advice


# --- what is refused ------------------------------------------------------------------------------------------------


def _plain(**changes: Any) -> dict[str, KVCacheSpec]:
    """Specs of the family of full attention, changed."""
    return {layer: replace(spec, **changes) for layer, spec in FAMILIES["full attention"](1, 64).items()}


def _renamed(specs: Mapping[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    return {layer.replace("layers.2", "layers.9"): spec for layer, spec in specs.items()}


REFUSALS: dict[str, tuple[Mapping[str, KVCacheSpec], Mapping[str, KVCacheSpec], str, str, str]] = {
    "KV heads": (_plain(), _plain(num_kv_heads=8), "KV heads of model.layers.0", "4", "8"),
    "head size": (_plain(), _plain(head_size=64, head_size_v=64), "block length of model.layers.0", "65536", "131072"),
    "size of V": (_plain(), _plain(head_size_v=16), "block length of model.layers.0", "65536", "49152"),
    "dtype": (_plain(), _plain(dtype=torch.float16), "block length of model.layers.0", "65536", "32768"),
    "layers": (_plain(), _renamed(_plain()), "KV cache region model.layers.", "absent", "present"),
    "fewer layers": (
        _plain(),
        dict(list(_plain().items())[:2]),
        "KV cache of model.layers.2",
        "present",
        "absent",
    ),
    "window": (
        FAMILIES["sliding window"](1, 64),
        dict.fromkeys(FAMILIES["sliding window"](1, 64), next(iter(_plain().values()))),
        "cache group of model.layers.1",
        "1",
        "0",
    ),
    "states": (
        FAMILIES["mamba 2"](1, 64),
        FAMILIES["gated delta net"](1, 64),
        "ssm_sizes of 1 ranks",
        "(768, 1024)",
        "(768, 512)",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_another_model_is_refused(config: VllmConfig, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    ours, theirs, field, here, there = REFUSALS[name]
    decode = make_rank(config, monkeypatch, ours, engine_id="decode", tp_rank=0, tp_size=1)
    prefill = make_rank(config, monkeypatch, theirs, engine_id="prefill", tp_rank=0, tp_size=1)
    with pytest.raises(LayoutMismatch) as caught:
        plan_engine(decode.registration.layout, [seen(decode.registration, prefill)])
    assert caught.value.field.startswith(field)
    assert (caught.value.local, caught.value.remote) == (here, there)
    assert here in str(caught.value)
    assert there in str(caught.value)


def _understood(config: VllmConfig, monkeypatch: pytest.MonkeyPatch, *, tp_size: int = 1, **changes: Any) -> RankLayout:
    """What a rank makes of the metadata of one like itself, with some of it changed."""
    rank = make_rank(config, monkeypatch, FAMILIES["full attention"](1, 64), engine_id="any", tp_rank=0, tp_size=1)
    metadata = msgspec.structs.replace(rank.registration.agent_metadata(b"agent"), engine_id="other", **changes)
    seen = layout_from_metadata(metadata, rank=RankId(0, 0), tp_size=tp_size, local=rank.registration)
    plan_engine(rank.registration.layout, [seen])
    return seen


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"kv_cache_layout": "BLNHC"}, "kv_cache_layout is BLHNC here and BLNHC there"),
        ({"block_lens": [6400]}, r"block length of model.* is 6432 here and 6400 there; .* indexer_kv_dtype"),
        ({"block_strides": [6560]}, r"block stride of model.* is 6432 here and 6560 there"),
    ],
)
def test_a_row_of_caches_that_is_not_like_ours_is_refused(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], refusal: str
) -> None:
    """Where in the row a layer lies is known of ours only."""
    specs = FAMILIES["latent, compressed"](1, 64)
    rank = make_rank(config, monkeypatch, specs, engine_id="any", tp_rank=0, tp_size=1, layout="BLHNC")
    metadata = msgspec.structs.replace(rank.registration.agent_metadata(b"agent"), **changes)
    with pytest.raises(LayoutMismatch, match=refusal):
        layout_from_metadata(metadata, rank=RankId(0, 0), tp_size=1, local=rank.registration)


def test_ranks_that_cannot_share_the_heads_are_refused(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LayoutMismatch, match="tp_size is 1 here and 3 there; 4 units cannot be split over 3 ranks"):
        _understood(config, monkeypatch, tp_size=3)


def test_two_kinds_of_memory_on_one_rank_are_refused(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _understood(config, monkeypatch, region_mem_types=["VRAM"] * 3).memory_kind == "VRAM"
    with pytest.raises(LayoutMismatch, match=r"memory of .* is DRAM here and VRAM there"):
        _understood(config, monkeypatch, region_mem_types=["DRAM", "DRAM", "VRAM"])


def test_an_unknown_layout_is_refused(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LayoutMismatch, match="kv_cache_layout is a known one here and NHD there"):
        _understood(config, monkeypatch, kv_cache_layout="NHD")


def test_a_row_that_the_strides_deny_is_refused(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the built-in connector advertises of states with blocks outermost would be read from wrong places."""
    specs = FAMILIES["states only"](1, 64)
    rank = make_rank(config, monkeypatch, specs, engine_id="d", tp_rank=0, tp_size=1, layout="BLHNC")
    builtin, _, _ = builtin_registration(config, rank.caches, rank.tensors)
    metadata = decode_agent_metadata(msgspec.msgpack.encode(builtin))
    with pytest.raises(LayoutMismatch, match="block_strides is at least 5376 here and 1792 there"):
        layout_from_metadata(metadata, rank=RankId(0, 0), tp_size=1, local=rank.registration)


STRANGE_SPECS: dict[str, tuple[KVCacheSpec, str]] = {
    "padded ring buffer": (
        _strange(CircularBufferSpec, head_size_v=0, page_size_padded=1 << 20),
        "ring buffer of .* with a page of 1048576; supported: no padding",
    ),
    "encoder": (_strange(CrossAttentionSpec), "CrossAttentionSpec"),
    "compressed heads": (_strange(FullAttentionSpec, tokens_per_state=4), "tokens_per_state .* 4"),
    "several entries of a token": (_strange(MLAAttentionSpec, tokens_per_state=Fraction(1, 4)), "tokens_per_state"),
}


@pytest.mark.parametrize("name", STRANGE_SPECS)
def test_an_unknown_cache_is_refused_by_name(config: VllmConfig, name: str) -> None:
    spec, named = STRANGE_SPECS[name]
    caches = KVCacheConfig(
        num_blocks=4, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["model.layers.0.attn"], spec)]
    )
    with pytest.raises(UnsupportedCache, match=named) as caught:
        require_supported(config, caches)
    assert "model.layers.0.attn" in str(caught.value)


def _state_of(kind: str) -> MambaSpec:
    spec = with_drafts(kind, 0)["model.layers.0.mixer"]
    assert isinstance(spec, MambaSpec)
    return spec


def _linear_attention() -> MambaSpec:
    return MambaSpec(
        block_size=64,
        shapes=Shapes.linear_attention_state_shape(16, 1, 4),
        dtypes=(torch.float32,),
        mamba_type=MambaAttentionBackendEnum.LINEAR,
    )


STATES_WITH_A_CONVOLUTION: dict[str, Callable[[], MambaSpec]] = {
    **{kind: functools.partial(_state_of, kind) for kind in ("MAMBA2", "GDN_ATTN", "KDA", "SHORT_CONV")},
    "MAMBA1": lambda: replace(_state_of("MAMBA2"), mamba_type=MambaAttentionBackendEnum.MAMBA1),
    "whole on each rank": lambda: replace(_state_of("SHORT_CONV"), tp_replicated=True),
    "of an unknown kind": lambda: replace(_linear_attention(), shapes=((64, 3), (16, 4, 4))),
}


@pytest.mark.parametrize("kind", STATES_WITH_A_CONVOLUTION)
@pytest.mark.usefixtures("channels_inside")
def test_convolutions_with_the_channels_inside_are_refused(config: VllmConfig, kind: str) -> None:
    with pytest.raises(UnsupportedCache, match="VLLM_SSM_CONV_STATE_LAYOUT SD; supported: DS"):
        require_supported(config, _of_one_state(STATES_WITH_A_CONVOLUTION[kind]()))


@pytest.mark.usefixtures("channels_inside")
def test_linear_attention_is_served_without_a_layout_of_convolutions(config: VllmConfig) -> None:
    """vLLM sets one by itself on CPUs only, and these models have no convolution."""
    require_supported(config, _of_one_state(_linear_attention()))


def test_linear_attention_has_the_same_state_in_either_layout(
    config: VllmConfig, request: pytest.FixtureRequest
) -> None:
    """An engine with the variable and one without it read each other's."""
    outside = _linear_attention()
    request.getfixturevalue("channels_inside")
    assert _linear_attention() == outside


@pytest.fixture
def channels_inside(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on GPUs, where vLLM does not choose the other one by itself."""
    get_conv_state_layout.cache_clear()
    monkeypatch.delenv("VLLM_SSM_CONV_STATE_LAYOUT")
    assert get_conv_state_layout() == "SD"
    yield
    get_conv_state_layout.cache_clear()


def _of_one_state(spec: MambaSpec) -> KVCacheConfig:
    group = KVCacheGroupSpec(["model.layers.0.mixer"], spec)
    return KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=[group])


def test_the_first_of_several_backends_names_them_all(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the hash and in the metadata, as the built-in connector has it."""
    specs = FAMILIES["full attention"](1, 64)
    backends = [CPUMLABackend, CPUAttentionBackend]
    for module in ("connector.worker.registration", "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker"):
        monkeypatch.setattr(f"{module}.get_current_attn_backends", lambda config: backends)
    allow_kernel_block_size(monkeypatch, 64)
    rank = make_rank(config, monkeypatch, specs, engine_id="prefill-engine", tp_rank=0, tp_size=1)
    builtin, builtin_hash, _ = builtin_registration(config, rank.caches, rank.tensors)
    assert rank.registration.layout.attention_backend == builtin.attn_backend_name == CPUMLABackend.get_name()
    assert rank.registration.compatibility_hash == builtin_hash
