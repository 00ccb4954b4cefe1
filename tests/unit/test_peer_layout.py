"""Every family of models from vLLM's tensors to a peer's, over the wire, at unlike sizes; judged by the bytes.

Both engines' ranks are real registrations of tensors that vLLM laid out. The decode rank knows of the prefill ranks
what their metadata says after encoding and decoding. Its plan is carried out as plain copies, and then its memory has
to be what it would be if it had computed the request itself.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator

import pytest
import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import MambaSpec

from connector.layout import GroupBlocks, RankLayout, partners, plan_engine
from connector.wire.metadata import decode_agent_metadata, encode_agent_metadata
from connector.wire.peer_layout import understand
from connector.worker.registration import Registration
from tests.unit.cache_families import FAMILIES, Content, Rank, make_rank
from tests.unit.layout_oracle import expand_runs
from tests.unit.vllm_setup import engine_config, single_rank, write_model

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
            )
            for other in partners(tp_rank, decode_tp, prefill_tp)
        ]
        remote = _tables(prefill[0], iter([5, 2, 7, 1, 4, 6, 3, 0]))
        local = _tables(decode, iter([3, 6, 1, 4, 0, 5, 7, 2]))
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


@pytest.mark.parametrize("layout", ["LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_in_every_layout(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, family: str, layout: str
) -> None:
    _check_transfer(config, monkeypatch, family, prefill_tp=2, decode_tp=1, layouts=(layout, layout))
