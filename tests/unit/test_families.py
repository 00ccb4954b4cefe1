"""The table of cache specs: every row answers, and what has no row is refused by name."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    UniformTypeKVCacheSpecs,
)

from connector.families import FAMILIES, Holds, Keeps, family_of, keeps, require_known_spec
from connector.unsupported import UnsupportedCache
from tests.unit.hybrid_engine import BLOCK_TOKENS, chunked, full, ring, state, window

LATENT: dict[str, Any] = {"block_size": BLOCK_TOKENS, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
LATENT_WINDOW = SlidingWindowMLASpec(sliding_window=24, cache_dtype_str="auto", **LATENT)
COMPRESSOR = SlidingWindowMLASpec(sliding_window=8, **LATENT)

KEPT: list[tuple[KVCacheSpec, Holds, Keeps]] = [
    (full(), Holds.TOKENS, Keeps()),
    (window(40), Holds.TOKENS, Keeps(window=40)),
    (chunked(64), Holds.TOKENS, Keeps(chunk=64)),
    (MLAAttentionSpec(**LATENT), Holds.TOKENS, Keeps()),
    (LATENT_WINDOW, Holds.TOKENS, Keeps(window=24)),
    (COMPRESSOR, Holds.TOKENS, Keeps(window=8, is_read_again=False)),
    (ring(), Holds.RING, Keeps(is_state=True)),
    (state("all"), Holds.STATE, Keeps(is_state=True)),
]


@pytest.mark.parametrize(("spec", "holds", "kept"), KEPT, ids=lambda value: type(value).__name__)
def test_what_a_row_says(spec: KVCacheSpec, holds: Holds, kept: Keeps) -> None:
    assert (family_of(spec).holds, keeps(spec)) == (holds, kept)


@pytest.mark.parametrize(("spec", "holds", "kept"), KEPT, ids=lambda value: type(value).__name__)
def test_a_group_of_uniform_layers_is_as_its_layers(spec: KVCacheSpec, holds: Holds, kept: Keeps) -> None:
    group = UniformTypeKVCacheSpecs(block_size=spec.block_size, kv_cache_specs={"a": spec, "b": spec})
    assert (family_of(group).holds, keeps(group)) == (holds, kept)


def test_a_subclass_without_a_row_is_refused_by_name() -> None:
    """Its blocks mean something else, although it is an MLA cache to `isinstance`."""
    spec = HiddenStateCacheSpec(**LATENT)
    assert isinstance(spec, MLAAttentionSpec | FullAttentionSpec)
    with pytest.raises(UnsupportedCache) as caught:
        require_known_spec("layers.0", spec)
    assert (caught.value.field, caught.value.found) == ("KV cache of layers.0", "HiddenStateCacheSpec")
    assert caught.value.expected == ", ".join(kind.__name__ for kind in FAMILIES)


@pytest.mark.parametrize("tokens", [4, Fraction(1, 2)])
def test_only_latent_caches_may_be_compressed(tokens: int | Fraction) -> None:
    with pytest.raises(UnsupportedCache, match=r"tokens_per_state of layers\.0"):
        require_known_spec("layers.0", replace(full(), tokens_per_state=tokens))
    latent = replace(MLAAttentionSpec(**LATENT), tokens_per_state=tokens)
    if tokens == 4:
        require_known_spec("layers.0", latent)
    else:
        with pytest.raises(UnsupportedCache, match=r"tokens_per_state of layers\.0"):
            require_known_spec("layers.0", latent)
