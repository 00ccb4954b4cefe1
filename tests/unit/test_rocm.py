"""What a worker does otherwise on a platform with ROCm: NIXL's package has another name there, and states that were
read become visible to kernels with a synchronization only. No such device was at hand; the platform is made to say so.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import product

import nixl
import nixl._api
import pytest
import torch
from vllm._aiter_ops import rocm_aiter_ops
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.rocm_aiter_fa import AiterFlashAttentionBackend
from vllm.v1.attention.backends.rocm_attn import RocmAttentionBackend
from vllm.v1.attention.backends.rocm_segmented_attn import RocmSegmentedAttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec

from connector.config import parse_options
from connector.ports.nixl import NixlCallFailed
from connector.protocol import ReceiveEnded
from connector.wire.handshake import incompatibilities
from connector.wire.identity import AS_SHAPED, IN_SLOTS
from connector.worker.connector_worker import ConnectorWorker
from tests.unit.cache_families import FAMILIES, Rank, make_caches, make_rank, seen
from tests.unit.test_engine_thread import pull
from tests.unit.vllm_setup import (
    HEAD_SIZE,
    KV_HEADS,
    attention_layers,
    attention_spec,
    layer_name,
)


def worker_of(family: str, config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> ConnectorWorker:
    """On a platform with ROCm, with the cache of a model of that family."""
    caches, tensors = make_caches(config, monkeypatch, FAMILIES[family](1, 32), kernel_block_tokens=32)
    monkeypatch.setattr(type(current_platform), "is_rocm", lambda self: True)
    worker = ConnectorWorker(config, caches, parse_options({}))
    worker.register_kv_caches(tensors)
    return worker


@pytest.fixture
def nixl_of_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl_rocm", nixl)
    monkeypatch.setitem(sys.modules, "nixl_rocm._api", nixl._api)


@pytest.mark.usefixtures("nixl_of_rocm")
@pytest.mark.parametrize(("family", "synchronizations"), [("full attention", 0), ("mamba 2", 1)])
def test_states_are_synchronized_before_vllm_is_told(
    family: str, synchronizations: int, config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: made.append(1))
    worker = worker_of(family, config, monkeypatch)
    try:
        assert not worker.get_transfer_results().finished_recving
        assert not made
        worker.ledger.enter(pull("a", [1]))
        worker.ledger.record(
            ReceiveEnded(
                request_id="a", failure=None, local_block_ids=[1], quarantined=False, permutation=None, unfilled=None
            )
        )
        assert worker.get_transfer_results().finished_recving == {"a"}
        assert len(made) == synchronizations
    finally:
        worker.shutdown()


def test_the_package_that_is_missing_is_named(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NixlCallFailed, match="nixl_rocm"):
        worker_of("full attention", config, monkeypatch)


def test_one_back_end_that_keeps_k_and_v_apart_on_one_engine_only(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT` says which; nothing else that engines tell each other differs."""

    def engine(*, is_shuffled: bool) -> Rank:
        monkeypatch.setattr(rocm_aiter_ops, "is_shuffle_kv_cache_enabled", lambda: is_shuffled)
        spec = FullAttentionSpec(block_size=32, num_kv_heads=4, head_size=32, dtype=torch.bfloat16)
        specs = {"layers.0": AiterFlashAttentionBackend.customize_spec(spec)}
        return make_rank(config, monkeypatch, specs, engine_id=f"shuffled {is_shuffled}", tp_rank=0, tp_size=1)

    together, apart = (engine(is_shuffled=shuffles) for shuffles in (False, True))
    for ours, theirs in ((together, apart), (apart, together)):
        assert [len(seen(ours.registration, rank).regions) for rank in (ours, theirs)] == [1, 1]
        for not_packed in ("", "only engines on CPUs do"):
            (found,) = incompatibilities(
                ours.registration.identity,
                theirs.registration.identity,
                enforce_factors=True,
                not_packed=not_packed,
            )
            assert found.field == "order of elements in a block of layers.0"
            assert {found.local, found.remote} == {AS_SHAPED, IN_SLOTS}
            assert "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT" in found.advice
    assert not incompatibilities(apart.registration.identity, apart.registration.identity, enforce_factors=True)


@pytest.fixture
def without_layers(config: VllmConfig) -> Iterator[None]:
    """Of other tests, before and after."""
    config.compilation_config.static_forward_context.clear()
    yield
    config.compilation_config.static_forward_context.clear()


@pytest.mark.usefixtures("without_layers")
def test_back_ends_that_fill_their_slots_in_unlike_ways_do_not_fit(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them have two slots of one size. Their names are a factor too, but that can be skipped."""
    monkeypatch.setattr(rocm_aiter_ops, "is_shuffle_kv_cache_enabled", lambda: True)

    def engine(name: str, backend: type[AttentionBackend]) -> Rank:
        config.compilation_config.static_forward_context.clear()
        (layer,) = attention_layers(config, 1, HEAD_SIZE, KV_HEADS)
        layer.attn_backend = backend
        spec = attention_spec(32, dtype=torch.bfloat16)
        specs = {layer_name(0): backend.customize_spec(spec)}
        return make_rank(config, monkeypatch, specs, engine_id=name, tp_rank=0, tp_size=1)

    backends = {
        backend.get_name(): backend
        for backend in (RocmAttentionBackend, RocmSegmentedAttentionBackend, AiterFlashAttentionBackend)
    }
    decode, prefill = ({name: engine(f"{side} {name}", each) for name, each in backends.items()} for side in "dp")
    for ours, theirs in product(backends, backends):
        assert len(seen(decode[ours].registration, prefill[theirs]).regions) == 1
        identities = decode[ours].registration.identity, prefill[theirs].registration.identity
        found = incompatibilities(*identities, enforce_factors=False, not_packed="")
        if ours == theirs:
            assert not found
            continue
        (differs,) = found
        assert differs.field == f"order of elements in a block of {layer_name(0)}"
        assert (ours in differs.local, theirs in differs.remote) == (True, True)
        assert "the same attention back end" in differs.advice
