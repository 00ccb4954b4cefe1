"""Models whose layers have unlike numbers of KV heads: MiMo-V2 has 4 in full attention and 8 in windows, Gemma 4 some
heads of twice the size.

On a rank with one head nothing in vLLM's specs says how many neighbours hold the same one; and vLLM makes the blocks of
one kind longer so that pages come out alike, with other sizes at other tensor parallel sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec

from connector.families import layer_shapes, names_several_numbers_of_heads
from connector.layout.blocks import GroupBlocks
from connector.layout.geometry import LayoutMismatch, RankId
from connector.layout.remote import Stated, layout_from_metadata, stated_by
from connector.layout.sources import partners
from connector.worker.registration import describe
from tests.unit.cache_families import Content, Rank, carry_out, make_rank
from tests.unit.vllm_setup import (
    cache_config,
    draft_model,
    engine_config,
    latent_engine_config,
    single_rank,
    write_model,
)

TOKENS = 64
FULL_LAYER, WINDOW_LAYER = "model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"
SIZES = (1, 2, 4, 8, 16)

MIMO = {"full": (4, 48, 32), "window": (8, 48, 32)}
GEMMA = {"full": (2, 64, 64), "window": (8, 32, 32)}
"""Heads, and sizes of K and V of one."""


def config_of(tmp_path_factory: pytest.TempPathFactory, **entries: int) -> Iterator[VllmConfig]:
    model = write_model(tmp_path_factory.mktemp("model"), num_attention_heads=16, **entries)
    config = engine_config(model, block_size=32, enable_prefix_caching=False)
    with single_rank(config, tmp_path_factory.mktemp("rendezvous")):
        yield config


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmConfig]:
    yield from config_of(tmp_path_factory, num_key_value_heads=4, swa_num_key_value_heads=8)


def specs(model: dict[str, tuple[int, int, int]], tp_size: int) -> dict[str, KVCacheSpec]:
    def fields(kind: str) -> dict[str, object]:
        heads, k_size, v_size = model[kind]
        heads = max(1, heads // tp_size)
        sizes = {"head_size": k_size, "head_size_v": v_size}
        return {"block_size": 32, "num_kv_heads": heads, "dtype": torch.bfloat16, **sizes}

    return {
        FULL_LAYER: FullAttentionSpec(**fields("full")),
        WINDOW_LAYER: SlidingWindowSpec(**fields("window"), sliding_window=128),
    }


class Pair:
    """Engines of one model, of any tensor parallel size."""

    def __init__(
        self, config: VllmConfig, patch: pytest.MonkeyPatch, model: dict[str, tuple[int, int, int]], tokens: int
    ) -> None:
        self._config, self._patch, self._model, self._tokens = config, patch, model, tokens

    def rank(self, tp_rank: int, tp_size: int, engine_id: str) -> Rank:
        of_rank = specs(self._model, tp_size)
        made = make_rank(self._config, self._patch, of_rank, engine_id=engine_id, tp_rank=tp_rank, tp_size=tp_size)
        made.memory.zero_()
        return made

    def tables(self, rank: Rank, first: int) -> list[list[int]]:
        sizes = [group.kv_cache_spec.block_size for group in rank.caches.kv_cache_groups]
        starts = [first + 4 * index for index in range(len(sizes))]
        return [list(range(at, at + -(-self._tokens // size))) for at, size in zip(starts, sizes, strict=True)]

    def read(self, prefill_size: int, decode_size: int) -> None:
        content = Content(specs(self._model, 1), self._tokens, torch.Generator().manual_seed(1))
        prefill = [self.rank(rank, prefill_size, "p") for rank in range(prefill_size)]
        for each in prefill:
            content.write(each, self.tables(each, 1))
        for number in range(decode_size):
            decode = self.rank(number, decode_size, "d")
            ours, theirs = self.tables(decode, 3), self.tables(prefill[0], 1)
            blocks = [
                GroupBlocks(local=mine, remote=its, num_tokens=self._tokens)
                for mine, its in zip(ours, theirs, strict=True)
            ]
            asked = partners(number, decode_size, prefill_size)
            carry_out(decode, [each for each in prefill if each.tp_rank in asked], blocks)
            arrived = decode.memory.clone()
            decode.memory.zero_()
            content.write(decode, ours)
            assert torch.equal(arrived, decode.memory), f"rank {number}"


@pytest.mark.parametrize("tokens", [16, 64])
@pytest.mark.parametrize("model", [MIMO, GEMMA], ids=["MiMo", "Gemma 4"])
@pytest.mark.parametrize(("prefill_size", "decode_size"), list(product(SIZES, repeat=2)))
def test_each_rank_gets_its_heads(
    config: VllmConfig,
    monkeypatch: pytest.MonkeyPatch,
    prefill_size: int,
    decode_size: int,
    model: dict[str, tuple[int, int, int]],
    tokens: int,
) -> None:
    Pair(config, monkeypatch, model, tokens).read(prefill_size, decode_size)


def test_a_built_in_engine_needs_our_tensor_parallel_size(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says nothing of heads."""
    pair = Pair(config, monkeypatch, MIMO, TOKENS)
    for prefill_size, decode_size in product(SIZES, repeat=2):
        p = describe(pair.rank(0, prefill_size, "p").registration.layout, b"agent")
        d = pair.rank(0, decode_size, "d").registration
        if prefill_size == decode_size:
            layout_from_metadata(p, rank=RankId(0, 0), tp_size=prefill_size, local=d)
            continue
        with pytest.raises(LayoutMismatch) as refused:
            layout_from_metadata(p, rank=RankId(0, 0), tp_size=prefill_size, local=d)
        assert (refused.value.field, refused.value.remote) == ("tp_size", str(prefill_size))
        assert "unlike numbers of KV heads" in refused.value.advice


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"heads": {FULL_LAYER: 2}}, f"KV heads of {FULL_LAYER} on each of 1 ranks"),
        ({"group_tokens": (32,)}, "number of cache groups"),
        ({"group_tokens": (0, 32)}, "cache group 0"),
        ({"groups": {FULL_LAYER: 1}}, f"cache group of {FULL_LAYER}"),
        ({"group_tokens": (32, 32)}, f"block length of {FULL_LAYER} on rank 0 of 1"),
    ],
)
def test_what_an_engine_says_that_cannot_be_is_refused(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, change: dict[str, object], field: str
) -> None:
    own = Pair(config, monkeypatch, MIMO, TOKENS).rank(0, 1, "p").registration
    said = stated_by(own.identity)
    false = Stated(**{"heads": said.heads, "groups": said.groups, "group_tokens": said.group_tokens, **change})
    with pytest.raises(LayoutMismatch) as refused:
        layout_from_metadata(describe(own.layout, b"agent"), rank=RankId(0, 0), tp_size=1, local=own, stated=false)
    assert refused.value.field == field


def test_a_guess_that_another_engine_knows_to_be_wrong_is_refused(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A configuration that does not name the second number in a way that is known: D takes 8 heads for 4."""
    for unnamed in config_of(tmp_path_factory, num_key_value_heads=4):
        pair = Pair(unnamed, monkeypatch, MIMO, TOKENS)
        assert not names_several_numbers_of_heads(unnamed.model_config)
        with pytest.raises(LayoutMismatch, match=f"^KV heads of {WINDOW_LAYER} "):
            pair.read(4, 8)


@pytest.mark.parametrize(("prefill_size", "decode_size"), [(1, 8), (4, 8), (8, 4), (16, 8), (8, 16)])
def test_each_rank_gets_its_heads_of_a_draft_model_that_has_more_of_them(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, prefill_size: int, decode_size: int
) -> None:
    """4 in the model, 8 in the draft model, whose layer is the one with the window."""
    drafting = write_model(tmp_path_factory.mktemp("draft"), num_attention_heads=16, num_key_value_heads=8)
    for config in config_of(tmp_path_factory, num_key_value_heads=4):
        speculative = draft_model(config, drafts=2)
        speculative.draft_model_config = engine_config(drafting).model_config
        monkeypatch.setattr(config, "speculative_config", speculative)
        Pair(config, monkeypatch, MIMO, TOKENS).read(prefill_size, decode_size)


def test_beside_latent_attention_the_layers_with_heads_are_the_draft_models(
    tmp_path: Path,
) -> None:
    """A model of latent attention names a number of heads all the same: 8, and the draft model has 2."""
    model = latent_engine_config(tmp_path / "latent").model_config
    draft = engine_config(write_model(tmp_path / "draft", num_key_value_heads=2)).model_config
    spec = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=32, head_size_v=32, dtype=torch.bfloat16)
    caches = cache_config(spec, layers=1)
    (shape,) = layer_shapes(caches, model, 8, prefix_caching=False, draft_config=draft).values()
    assert (shape.components[0].units, shape.heads_unknown) == (2, False)
