"""Pipeline stages and context parallelism: which ranks are told apart, what is refused, as whom peers see a rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import TransferTopology
from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.kv_cache_interface import CircularBufferSpec, KVCacheSpec

from connector.config import parse_options
from connector.layout.geometry import RankId, RankLayout
from connector.layout.remote import layout_from_metadata
from connector.layout.sources import consumers, partners
from connector.protocol import LeaseComputing, LeaseGranted, RejectPull
from connector.step_metadata import StepMetadata
from connector.unsupported import UnsupportedCache
from connector.versions import is_vllm_at_least
from connector.wire.metadata import decode_agent_metadata, encode_agent_metadata
from connector.worker.connector_worker import ConnectorWorker
from connector.worker.parallelism import placement, ranks_of, require_supported_parallelism
from statemachine.failures import BadParams
from statemachine.lease import LeaseName
from tests.rig.facts import facts
from tests.rig.pulls import pull
from tests.unit.builtin_worker import builtin_registration, differing_fields
from tests.unit.cache_families import FAMILIES, Rank, be_rank, make_caches, make_rank, rings_of_two_heads
from tests.unit.vllm_setup import (
    allow_kernel_block_size,
    engine_config,
    latent_engine_config,
    single_rank,
    write_model,
)

KERNEL_BLOCK = 16
"""What the attention back end for MLA on CPUs works with; blocks are of 64."""

BUILTIN_WORKER = "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmConfig]:
    """Of an engine that only prefills, with a model of latent attention."""
    config = latent_engine_config(tmp_path_factory.mktemp("latent"))
    config.kv_transfer_config.kv_role = "kv_producer"
    with single_rank(config, tmp_path_factory.mktemp("rendezvous")):
        yield config


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of an engine, and where in it this process is."""

    tp: int = 1
    pp: int = 1
    dcp: int = 1
    pcp: int = 1
    tp_rank: int = 0
    pp_rank: int = 0
    pcp_rank: int = 0

    def apply(self, config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in (
            ("tensor_parallel_size", self.tp),
            ("pipeline_parallel_size", self.pp),
            ("decode_context_parallel_size", self.dcp),
            ("prefill_context_parallel_size", self.pcp),
            # What vLLM sets for an engine with a NIXL connector.
            ("cp_kv_cache_interleave_size", 64 if self.dcp > 1 else 1),
        ):
            monkeypatch.setattr(config.parallel_config, name, value)
        group = type("Group", (), {"rank_in_group": self.pcp_rank})
        for module in ("connector.worker.parallelism", BUILTIN_WORKER):
            be_rank(monkeypatch, module, self.tp_rank, self.tp)
            monkeypatch.setattr(f"{module}.get_pcp_group", group)
        monkeypatch.setattr(get_pp_group(), "rank_in_group", self.pp_rank)


@pytest.mark.parametrize(
    ("sizes", "rank", "size", "is_copy"),
    [
        (Sizes(tp=4, tp_rank=3), (0, 3), 4, False),
        (Sizes(tp=2, pp=3, tp_rank=1, pp_rank=2), (2, 1), 2, False),
        (Sizes(tp=4, dcp=4, tp_rank=2), (0, 2), 4, False),
        (Sizes(tp=2, pcp=2, tp_rank=1, pcp_rank=0), (0, 1), 2, False),
        (Sizes(tp=2, pcp=2, tp_rank=1, pcp_rank=1), (0, 1), 2, True),
        (Sizes(pcp=4, dcp=4, pcp_rank=3), (0, 3), 4, False),
    ],
    ids=str,
)
def test_placement(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, sizes: Sizes, rank: Any, size: int, is_copy: bool
) -> None:
    sizes.apply(config, monkeypatch)
    require_supported_parallelism(config)
    place = placement(config)
    assert (place.rank, place.size, place.is_copy) == (rank, size, is_copy)
    assert (place.tp_rank, place.tp_size) == (sizes.tp_rank, sizes.tp)
    assert place.number == rank[0] * size + rank[1]
    assert place.is_last_stage is (sizes.pp_rank == sizes.pp - 1)
    assert ranks_of(config.parallel_config) == sizes.pp * size


@pytest.mark.parametrize(
    ("sizes", "role", "field", "found"),
    [
        (Sizes(pp=2), "kv_consumer", "pipeline_parallel_size", "2"),
        (Sizes(pp=2), "kv_both", "pipeline_parallel_size", "2"),
        (Sizes(pcp=2), "kv_consumer", "prefill_context_parallel_size", "2"),
        (Sizes(pcp=4), "kv_both", "prefill_context_parallel_size", "4"),
        (Sizes(tp=4, dcp=2), "kv_producer", "decode_context_parallel_size", "2"),
        (Sizes(tp=2, dcp=2, pcp=2), "kv_producer", "decode_context_parallel_size", "2 with prefill_context"),
        (Sizes(dcp=2, pcp=4), "kv_producer", "decode_context_parallel_size", "2 with prefill_context"),
    ],
    ids=str,
)
def test_what_is_refused_at_start(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, sizes: Sizes, role: str, field: str, found: str
) -> None:
    sizes.apply(config, monkeypatch)
    monkeypatch.setattr(config.kv_transfer_config, "kv_role", role)
    with pytest.raises(UnsupportedCache) as caught:
        require_supported_parallelism(config)
    assert caught.value.field.startswith(field)
    assert caught.value.found.startswith(found)


@pytest.mark.parametrize(
    ("pp", "backend", "is_new", "is_refused"),
    [(2, "ray", False, True), (2, "ray", True, False), (2, "mp", False, False), (1, "ray", False, False)],
)
def test_stages_want_the_executor_of_ray_that_hears_all_of_them(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, pp: int, backend: str, is_new: bool, is_refused: bool
) -> None:
    if is_refused and is_vllm_at_least("0.33"):
        pytest.skip("this version of vLLM has the executor alone that hears all of them")
    Sizes(pp=pp).apply(config, monkeypatch)
    monkeypatch.setattr(config.kv_transfer_config, "kv_role", "kv_producer")
    monkeypatch.setattr(config.parallel_config, "distributed_executor_backend", backend)
    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", str(int(is_new)))
    with pytest.raises(UnsupportedCache, match="RAY_V2") if is_refused else contextlib.nullcontext():
        require_supported_parallelism(config)


def test_heads_are_not_split_by_tokens(config: VllmConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain = engine_config(write_model(tmp_path))
    Sizes(tp=2, dcp=2).apply(plain, monkeypatch)
    with pytest.raises(UnsupportedCache, match="decode_context_parallel_size of a model without MLA, 2"):
        require_supported_parallelism(plain)


def _rank(config: VllmConfig, monkeypatch: pytest.MonkeyPatch, sizes: Sizes, family: str = "latent") -> Rank:
    sizes.apply(config, monkeypatch)
    specs: dict[str, KVCacheSpec] = FAMILIES[family](sizes.tp, 64)
    return make_rank(
        config,
        monkeypatch,
        specs,
        engine_id="prefill-engine",
        tp_rank=sizes.tp_rank,
        tp_size=sizes.tp,
        pp_rank=sizes.pp_rank,
        kernel_block_tokens=KERNEL_BLOCK,
    )


SHARDED = [Sizes(tp=2, dcp=2, tp_rank=1), Sizes(tp=4, dcp=4, tp_rank=2), Sizes(pcp=2, dcp=2, pcp_rank=1)]
COPIED = [Sizes(tp=2, pcp=2, tp_rank=1), Sizes(pcp=4)]


@pytest.mark.parametrize("sizes", [*SHARDED, *COPIED], ids=str)
@pytest.mark.parametrize("family", ["latent", "latent with an indexer"])
def test_equals_the_builtin_registration(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, family: str, sizes: Sizes
) -> None:
    """And a peer takes it for what it is."""
    rank = _rank(config, monkeypatch, sizes, family)
    builtin, builtin_hash, builtin_ranges = builtin_registration(config, rank.caches, rank.tensors)
    registration = rank.registration
    advertised = registration.agent_metadata(builtin.agent_metadata)
    assert differing_fields(advertised, builtin) == {"region_members"}
    assert registration.compatibility_hash == builtin_hash
    assert [(area.address, area.length_bytes) for area in registration.ranges] == builtin_ranges
    layout = registration.layout
    sent = decode_agent_metadata(encode_agent_metadata(advertised))
    assert layout_from_metadata(sent, rank=layout.rank, tp_size=layout.tp_size, local=registration) == layout
    assert (layout.dcp_size, layout.pcp_size) == (sizes.dcp, sizes.pcp)
    assert {(group.dcp_size, group.dcp_rank) for group in layout.cache_groups} == {
        (sizes.dcp, (sizes.tp_rank or sizes.pcp_rank) if sizes.dcp > 1 else 0)
    }


def test_tokens_in_turn_by_less_than_a_block_are_refused(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    Sizes(tp=2, dcp=2).apply(config, monkeypatch)
    monkeypatch.setattr(config.parallel_config, "cp_kv_cache_interleave_size", 1)
    with pytest.raises(UnsupportedCache, match="cp_kv_cache_interleave_size 1; supported: the block size 64"):
        make_rank(
            config,
            monkeypatch,
            FAMILIES["latent"](2, 64),
            engine_id="prefill-engine",
            tp_rank=0,
            tp_size=2,
            kernel_block_tokens=KERNEL_BLOCK,
        )


def test_ranks_that_share_tokens_have_whole_ring_buffers(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of which vLLM says that they are split could not be put together."""
    allow_kernel_block_size(monkeypatch, 64)
    Sizes(tp=2, dcp=2, tp_rank=1).apply(config, monkeypatch)
    specs = rings_of_two_heads(2, 64)
    split = {
        layer: replace(spec, dcp_sharded=True) if isinstance(spec, CircularBufferSpec) else spec
        for layer, spec in specs.items()
    }
    place: dict[str, Any] = {"engine_id": "prefill-engine", "tp_rank": 1, "tp_size": 2, "layout": "BLHNC"}
    layout = make_rank(config, monkeypatch, specs, **place).registration.layout
    assert [(group.tokens_per_kernel_block, group.dcp_size) for group in layout.cache_groups] == [(64, 2), (0, 1)]
    with pytest.raises(UnsupportedCache, match="decode_context_parallel_size with ring buffers of"):
        make_rank(config, monkeypatch, split, **place)


@pytest.mark.parametrize("prefill", [(1, 1), (2, 1), (4, 1), (2, 2), (4, 4), (8, 8)], ids=str)
@pytest.mark.parametrize("decode", [(1, 1), (2, 1), (4, 1), (2, 2), (4, 4), (8, 8)], ids=str)
def test_partners_are_the_builtin_ones(decode: tuple[int, int], prefill: tuple[int, int]) -> None:
    """The same ranks are asked and told, with the same number of consumers. Sizes are (TP, DCP)."""
    (decode_tp, decode_dcp), (prefill_tp, prefill_dcp) = decode, prefill
    for tp_rank in range(decode_tp):
        topology = TransferTopology(
            tp_rank=tp_rank,
            tp_size=decode_tp,
            block_size=64,
            engine_id="d",
            is_mla=True,
            is_mamba=False,
            total_num_kv_heads=1,
            attn_backends=[],
            dcp_size=decode_dcp,
        )
        ours = partners(tp_rank, decode_tp, prefill_tp, decode_dcp, prefill_dcp)
        assert list(ours) == topology.handshake_target_ranks(prefill_tp, prefill_dcp)
        told = {consumers(_layout(rank, *prefill), _layout(tp_rank, *decode)) for rank in ours}
        assert told == {topology.dcp_consumer_count(prefill_tp, prefill_dcp)}


def _layout(tp_rank: int, tp_size: int, dcp_size: int) -> RankLayout:
    return RankLayout(
        engine_id="any",
        tp_rank=tp_rank,
        tp_size=tp_size,
        dcp_size=dcp_size,
        pcp_size=1,
        regions=(),
        kernel_block_size_tokens=64,
        kernel_blocks_per_block=1,
        layout_name="LBHNC",
        attention_backend="ANY",
    )


def test_a_copy_serves_nobody_and_keeps_nothing_back(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM frees the blocks of a request when every rank has said that they were read."""
    sizes = Sizes(pcp=2, pcp_rank=1)
    sizes.apply(config, monkeypatch)
    caches, tensors = make_caches(config, monkeypatch, FAMILIES["latent"](1, 64), kernel_block_tokens=KERNEL_BLOCK)
    worker = ConnectorWorker(config, caches, parse_options({}))
    worker.register_kv_caches(tensors)
    try:
        assert worker.handshake_metadata is None
        a, b = LeaseName("a", 1), LeaseName("b", 2)
        worker.start_load_kv(StepMetadata([LeaseComputing(lease=a), LeaseComputing(lease=b)]))
        assert worker.get_transfer_results().finished_sending == set()
        worker.start_load_kv(StepMetadata([LeaseGranted(lease=a, blocks=2)]))
        assert worker.get_transfer_results().finished_sending == {"a"}
        assert worker.get_transfer_results().finished_sending == set()
        assert worker.ledger._open_sends == {}
        # vLLM waits for every rank of a request that loads, one that is refused among them.
        failure = BadParams(field="do_remote_prefill", expected="false", found="true")
        refused = RejectPull(request_id="c", local_block_ids=[1, 2], failure=failure)
        worker.start_load_kv(StepMetadata([refused, pull("d", [3])]))
        results = worker.get_transfer_results()
        assert results.finished_recving == results.failed_recving == {"c", "d"}
        assert worker.ledger.take_report() is None, "nothing is kept back, and it goes on"
    finally:
        worker.shutdown()


@pytest.mark.parametrize(
    "sizes", [Sizes(tp=4, dcp=4, tp_rank=1), Sizes(tp=2, pp=3, tp_rank=1, pp_rank=2)], ids=["DCP", "PP"]
)
def test_a_worker_says_which_rank_it_is_and_what_it_understands(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, sizes: Sizes
) -> None:
    sizes.apply(config, monkeypatch)
    caches, tensors = make_caches(config, monkeypatch, FAMILIES["latent"](1, 64), kernel_block_tokens=KERNEL_BLOCK)
    worker = ConnectorWorker(config, caches, parse_options({"verify": "all"}))
    worker.register_kv_caches(tensors)
    try:
        assert worker.handshake_metadata is not None
        said = worker.handshake_metadata.extension
        assert said == facts(
            life="",
            tp_size=sizes.tp,
            dcp_size=sizes.dcp,
            pp_size=sizes.pp,
            tp_rank=sizes.tp_rank,
            pp_rank=sizes.pp_rank,
            control_host=said.control_host,
            control_port=said.control_port,
            identity=said.identity,
            verify="all",
        )
        assert said.identity is not None
    finally:
        worker.shutdown()


def test_ranks_are_told_apart_in_every_stage(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [
        _rank(config, monkeypatch, Sizes(pp=2, tp=2, pp_rank=stage, tp_rank=number)).registration.layout.rank
        for stage in range(2)
        for number in range(2)
    ]
    assert ranks == [RankId(0, 0), RankId(0, 1), RankId(1, 0), RankId(1, 1)]
