"""Read plans of random models and engines, judged by bytes, and whether the judge notices plans that are broken.

The oracle itself is tests/unit/layout_oracle.py. Seeds draw its cases evenly; hypothesis draws them to find the odd
one, and shrinks what fails. `make oracle` runs many more.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.layout import blocks, copies, landing, plan, shapes, sources
from connector.layout.blocks import GroupBlocks, GroupPair
from connector.layout.geometry import LayoutMismatch
from tests.unit import layout_oracle
from tests.unit.layout_oracle import FAMILIES, OracleError, again, case_of, check, draw_case
from tests.unit.properties import on_any_machine

SEEDS = 300
"""How many cases of each family a broken plan may live through."""


@pytest.mark.parametrize("family", FAMILIES)
def test_seeds(family: str) -> None:
    for seed in range(400):
        try:
            check(case_of(seed, family))
        except Exception as error:
            error.add_note(again(seed, family))
            raise


@settings(on_any_machine, max_examples=150)
@given(st.randoms(use_true_random=False))
def test_attention(chance: random.Random) -> None:
    check(draw_case(chance, "attention"))


@settings(on_any_machine, max_examples=150)
@given(st.randoms(use_true_random=False))
def test_groups(chance: random.Random) -> None:
    check(draw_case(chance, "groups"))


@settings(on_any_machine, max_examples=150)
@given(st.randoms(use_true_random=False))
def test_states(chance: random.Random) -> None:
    check(draw_case(chance, "states"))


@settings(on_any_machine, max_examples=150)
@given(st.randoms(use_true_random=False))
def test_chunks(chance: random.Random) -> None:
    check(draw_case(chance, "chunks"))


@settings(on_any_machine, max_examples=150)
@given(st.randoms(use_true_random=False))
def test_context(chance: random.Random) -> None:
    check(draw_case(chance, "context"))


@settings(on_any_machine, max_examples=150)
@given(st.randoms(use_true_random=False))
def test_slots(chance: random.Random) -> None:
    check(draw_case(chance, "slots"))


@settings(on_any_machine, max_examples=150)
@given(st.randoms(use_true_random=False))
def test_whole(chance: random.Random) -> None:
    check(draw_case(chance, "whole"))


def test_every_feature_occurs() -> None:
    """Guards the tests above: cases of a kind that is never drawn prove nothing."""
    counts = collections.Counter(
        feature for family in FAMILIES for seed in range(400) for feature in case_of(seed, family).features
    )
    for feature in (
        *(f"{one} = {ratio} x {other}" for ratio in (2, 4, 8) for one, other in (("D_TP", "P_TP"), ("P_TP", "D_TP"))),
        "D_TP = 1 x P_TP",
        "neither TP divides the other",
        "GQA with fewer heads than ranks of D",
        "GQA with fewer heads than ranks of P",
        "MLA",
        "attention",
        "P's kernel block smaller",
        "P's kernel block larger",
        "neither kernel block divides the other",
        "logical block larger than the kernel's",
        "different ratios of logical to kernel block",
        "window",
        "prefix hit",
        "groups share tensors",
        "blocks of several lengths in a group",
        "states",
        "different orders of axes",
        "block outermost on both sides",
        "padding",
        "lanes",
        "P with 2 pipeline stages",
        "P with 3 pipeline stages",
        "tokens split on P, tokens split on D",
        "tokens split on P, tokens whole on D",
        "tokens whole on P, tokens split on D",
        "entries of several tokens",
        "entries of several kinds in a group",
        "slots",
        "ring buffers",
        "states that all ranks hold alike",
        "undivided states",
    ):
        assert counts[feature] >= 10, feature


@pytest.mark.parametrize("permute", [landing.Permute.BLOCK_SIZES, landing.Permute.ORDERS])
def test_landing_layouts_are_chosen(permute: landing.Permute) -> None:
    """Guards the tests above: of the cases that they judge, enough have one, and blocks that are filled in part."""
    found = collections.Counter[str]()
    right = layout_oracle.plan_engine

    def engine_plan(local: Any, remotes: Any, given: Any = landing.Permute.NEVER) -> plan.EnginePlan:
        made = right(local, remotes, given)
        if given is permute and made.landing is not None:
            (pairs, *_) = made.pair(case.tables)
            found["blocks in part"] += any(pair.unfilled_block.size for pair in pairs)
            found["blocks of several chunks"] += max(made.landing.chunks) > 1
            found["all"] += 1
        return made

    with patch.object(layout_oracle, "plan_engine", engine_plan):
        for seed in range(300):
            for family in ("attention", "chunks"):
                case = case_of(seed, family)
                check(case)
    assert min(found[kind] for kind in ("blocks in part", "blocks of several chunks", "all")) >= 15, found


def test_a_seed_is_the_same_case_again() -> None:
    assert [msgspec.to_builtins(case_of(3, family).tables) for family in FAMILIES] == [
        msgspec.to_builtins(case_of(3, family).tables) for family in FAMILIES
    ]


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert layout_oracle.main(["--examples", "30", "--first-seed", "7"]) == 0
    assert "30 examples agree byte for byte" in capsys.readouterr().out


def test_command_line_names_the_case_that_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with _no_zeroing():
        assert layout_oracle.main(["--examples", "200", "--family", "groups"]) == 1
    assert "again: python -m tests.unit.layout_oracle --examples 1 --first-seed" in capsys.readouterr().out


# --- broken plans ---------------------------------------------------------------------------------------------------


def _slice_at_the_start() -> AbstractContextManager[Any]:
    """D_TP > P_TP: every decode rank reads the first heads of the prefill rank's block."""
    return patch.object(copies, "_address", lambda region, piece, unit: region.base_address + piece.offset_bytes)


def _heads_before_tokens() -> AbstractContextManager[Any]:
    """The order of heads and tokens in memory is ignored."""
    right = shapes.page_strides

    def strides(layout_name: str, **sizes: int) -> shapes.PageStrides:
        return right(layout_name.replace("NHC", "HNC"), **sizes)

    return patch.object(layout_oracle, "page_strides", strides)


def _order_of_the_shape() -> AbstractContextManager[Any]:
    """Lanes are not known of: K and V are taken to lie side by side in each token."""
    right = layout_oracle.paged_pieces

    def pieces(shape: shapes.LayerShape, **where: Any) -> Any:
        plain = tuple(msgspec.structs.replace(component, bytes_per_lane=0) for component in shape.components)
        return right(msgspec.structs.replace(shape, components=plain), **where)

    return patch.object(layout_oracle, "paged_pieces", pieces)


def _lanes_of_our_block() -> AbstractContextManager[Any]:
    """The other side's lanes are taken to be as far apart as ours, although its blocks are longer or shorter."""
    right = copies.copies_between

    def between(local: Any, remote: Any, found: Sequence[sources.Source], cuts: Any) -> list[copies.Copy]:
        same = [
            msgspec.structs.replace(
                source,
                remote_piece=msgspec.structs.replace(
                    source.remote_piece, lane_stride_bytes=source.local_piece.lane_stride_bytes
                ),
            )
            for source in found
        ]
        return right(local, remote, same, cuts)

    return patch.object(plan, "copies_between", between)


def _entries_taken_for_tokens() -> AbstractContextManager[Any]:
    """A block of a compressed cache is read as if each of its tokens had an entry."""
    right = copies.copies_between

    def each(piece: Any) -> Any:
        return msgspec.structs.replace(piece, tokens_per_entry=1)

    def between(local: Any, remote: Any, found: Sequence[sources.Source], cuts: Any) -> list[copies.Copy]:
        plain = [
            msgspec.structs.replace(
                source, local_piece=each(source.local_piece), remote_piece=each(source.remote_piece)
            )
            for source in found
        ]
        return right(local, remote, plain, cuts)

    return patch.object(plan, "copies_between", between)


def _absorb_what_is_dense_here() -> AbstractContextManager[Any]:
    """Stretches that are contiguous on our side are read as one, whatever the other side's order."""
    right = copies._absorb_loops

    def absorb(copy: copies.Copy) -> copies.Copy:
        loops = tuple((count, local_step, local_step) for count, local_step, _ in copy.loops)
        return right(msgspec.structs.replace(copy, loops=loops))

    return patch.object(copies, "_absorb_loops", absorb)


def _join_what_is_adjacent_here() -> AbstractContextManager[Any]:
    right = copies._are_neighbours

    def are_neighbours(first: copies.Copy, second: copies.Copy) -> bool:
        adjacent = first.remote_address + first.length_bytes
        return right(first, msgspec.structs.replace(second, remote_address=adjacent))

    return patch.object(copies, "_are_neighbours", are_neighbours)


def _pair_as(change: Callable[[GroupBlocks], dict[str, Any]]) -> AbstractContextManager[Any]:
    right = GroupPair.pair

    def pair(self: GroupPair, tables: GroupBlocks) -> blocks.ChunkPairs:
        return right(self, msgspec.structs.replace(tables, **change(tables)))

    return patch.object(GroupPair, "pair", pair)


def _prefix_ignored() -> AbstractContextManager[Any]:
    """The first remote block goes into the first local one, although a prefix is there already."""
    return _pair_as(lambda _: {"local_first": 0})


def _window_ignored() -> AbstractContextManager[Any]:
    """The other side's list is taken to start with the request, although a window has clipped it."""
    return _pair_as(lambda _: {"remote_first": 0, "num_tokens": None})


def _length_ignored() -> AbstractContextManager[Any]:
    """All of the other side's last block is read."""
    return _pair_as(lambda _: {"num_tokens": None})


def _locate_as(change: Callable[[Any, Any, int], tuple[Any, Any]]) -> AbstractContextManager[Any]:
    right = blocks._locate

    def locate(chunk: Any, ids: Any, group: Any, chunks: int) -> tuple[Any, Any]:
        return change(*right(chunk, ids, group, chunks), chunks)

    return patch.object(blocks, "_locate", locate)


def _chunks_from_the_end() -> AbstractContextManager[Any]:
    """The parts of a block are filled in the wrong order."""
    return _locate_as(lambda block, chunk, chunks: (block, chunks - 1 - chunk))


def _first_kernel_block_only() -> AbstractContextManager[Any]:
    """A logical block of several kernel blocks is taken for one."""
    right = blocks._locate

    def locate(chunk: Any, ids: Any, group: Any, chunks: int) -> tuple[Any, Any]:
        block, within = right(chunk, ids, group, chunks)
        return block // group.kernel_blocks_per_block, within

    return patch.object(blocks, "_locate", locate)


def _uneven_numbering() -> AbstractContextManager[Any]:
    """Descriptor ids of a run of chunks are counted as if every chunk had a run of its own."""
    return patch.object(plan, "_steps", lambda place: (1, place.blocks if place.chunks > 1 else 0))


def _padding_ignored() -> AbstractContextManager[Any]:
    right = copies._place

    def place(region: Any, piece: Any, chunks: int, positions: int) -> copies.Place:
        found = right(region, piece, chunks, positions)
        dense = region.block_length_bytes
        return msgspec.structs.replace(found, block_stride_bytes=min(found.block_stride_bytes, dense))

    return patch.object(copies, "_place", place)


def _replica_of_another_head() -> AbstractContextManager[Any]:
    """Fewer heads than ranks: neighbours are taken to hold different heads instead of the same one."""

    def shard(units: int, tp_rank: int, tp_size: int) -> tuple[int, int]:
        if tp_size > units:
            return tp_rank % units, tp_rank % units + 1
        return tp_rank * units // tp_size, (tp_rank + 1) * units // tp_size

    return patch.object(shapes, "shard", shard)


def _c_for_b() -> AbstractContextManager[Any]:
    """Where the convolution's B is wanted, C is read."""
    right = sources._holders

    def holders(remotes: Sequence[Any]) -> dict[tuple[str, str], Any]:
        found = right(remotes)
        return {
            (layer, name): found[layer, "conv_c"] if name == "conv_b" else value
            for (layer, name), value in found.items()
        }

    return patch.object(sources, "_holders", holders)


def _no_zeroing() -> AbstractContextManager[Any]:
    """What the other side did not fill keeps what an earlier request left there."""
    nothing = np.empty(0, np.int64)
    return patch.object(plan.EnginePlan, "unfilled", lambda self, pairs: (nothing, nothing))


def _one_consumer() -> AbstractContextManager[Any]:
    """D_TP > P_TP: the prefill rank frees its blocks after the first of its readers."""
    return patch.object(plan, "consumers", lambda remote, local: 1)


def _all_tokens_here() -> AbstractContextManager[Any]:
    """A rank that has every other block is taken to have all of them."""
    return patch.object(blocks, "_held", lambda position, group, chunks: position)


def _first_part_of_the_tokens() -> AbstractContextManager[Any]:
    """All ranks of an engine that splits tokens are taken for the one that has the first block."""
    right = blocks._held

    def held(position: Any, group: Any, chunks: int) -> Any:
        return right(position, msgspec.structs.replace(group, dcp_rank=0), chunks)

    return patch.object(blocks, "_held", held)


def _one_part_of_the_tokens() -> AbstractContextManager[Any]:
    """One rank is read, as if the others had copies of its tokens."""
    right = sources._holders

    def holders(remotes: Sequence[Any]) -> Any:
        return {
            key: [msgspec.structs.replace(holder, dcp_rank=0) for holder in found]
            for key, found in right(remotes).items()
        }

    return patch.object(sources, "_holders", holders)


def _first_stage_only() -> AbstractContextManager[Any]:
    """What later pipeline stages have is not read."""
    right = plan.EnginePlan

    def without(**fields: Any) -> plan.EnginePlan:
        return right(**(fields | {"reads": tuple(read for read in fields["reads"] if read.remote_rank.pp_rank == 0)}))

    return patch.object(plan, "EnginePlan", without)


def _replicas_not_told() -> AbstractContextManager[Any]:
    """A prefill rank that nobody reads never hears of the end."""
    right = plan.EnginePlan

    def without(**fields: Any) -> plan.EnginePlan:
        return right(**(fields | {"notify_only": ()}))

    return patch.object(plan, "EnginePlan", without)


def _sides_sorted_apart() -> AbstractContextManager[Any]:
    """Each side's blocks are sorted by themselves."""
    right = GroupPair.pair

    def pair(self: GroupPair, tables: GroupBlocks) -> blocks.ChunkPairs:
        return right(self, msgspec.structs.replace(tables, remote=sorted(tables.remote)))

    return patch.object(GroupPair, "pair", pair)


def _groups_confused() -> AbstractContextManager[Any]:
    """All groups are read with the blocks of the first."""
    right = plan.ReadPlan.descriptor_ids

    def ids(self: plan.ReadPlan, pairs: Sequence[blocks.ChunkPairs]) -> Any:
        return right(self, [pairs[0]] * len(pairs))

    return patch.object(plan.ReadPlan, "descriptor_ids", ids)


def _last_row_forgotten() -> AbstractContextManager[Any]:
    right = plan.copies_between

    def between(*arguments: Any) -> list[copies.Copy]:
        found = right(*arguments)
        return found[:-1] or found

    return patch.object(plan, "copies_between", between)


def _runs_by_address_only() -> AbstractContextManager[Any]:
    """A run is shared by all stretches that start at its address, although they differ in length."""
    right = plan._Runs.start

    def start(self: Any, address: int, length_bytes: int, place: copies.Place) -> int:
        known = self.__dict__.setdefault("lengths", {})
        return right(self, address, known.setdefault(address, length_bytes), place)

    return patch.object(plan._Runs, "start", start)


def _order_of_the_peer_stays() -> AbstractContextManager[Any]:
    """Blocks are left as they landed."""
    return patch.object(layout_oracle.BlockPermuter, "permute", lambda self, permutations: None)


def _zeroed_where_it_would_have_landed() -> AbstractContextManager[Any]:
    """What stays unfilled is computed for the landing layout, and zeroed after the blocks were put in order."""
    right = layout_oracle.plan_engine

    def engine_plan(local: Any, remotes: Any, permute: Any = landing.Permute.NEVER) -> plan.EnginePlan:
        found = right(local, remotes, permute)
        if found.landing is None:
            return found
        own = right(landing.landing_layout(local, found.landing), remotes).own
        return msgspec.structs.replace(found, own=own)

    return patch.object(layout_oracle, "plan_engine", engine_plan)


def _chunks_land_side_by_side() -> AbstractContextManager[Any]:
    """All heads of a smaller block lie together at the other side, and each of ours is read as if they did here."""
    right = copies._place

    def place(region: Any, piece: Any, chunks: int, positions: int) -> copies.Place:
        return right(region, msgspec.structs.replace(piece, chunk_stride_bytes=0), chunks, positions)

    return patch.object(copies, "_place", place)


def _one_chunk_put_in_order() -> AbstractContextManager[Any]:
    """A block of several of the other side's is permuted as if it were one of them."""
    right = layout_oracle.put_in_order

    def put_in_order(case: Any, decode: Any, order: landing.LandingOrder) -> None:
        right(case, decode, msgspec.structs.replace(order, chunks=(1,) * len(order.chunks)))

    return patch.object(layout_oracle, "put_in_order", put_in_order)


BROKEN = (
    _slice_at_the_start,
    _heads_before_tokens,
    _order_of_the_shape,
    _lanes_of_our_block,
    _entries_taken_for_tokens,
    _absorb_what_is_dense_here,
    _join_what_is_adjacent_here,
    _prefix_ignored,
    _window_ignored,
    _length_ignored,
    _chunks_from_the_end,
    _first_kernel_block_only,
    _uneven_numbering,
    _padding_ignored,
    _replica_of_another_head,
    _c_for_b,
    _no_zeroing,
    _one_consumer,
    _all_tokens_here,
    _first_part_of_the_tokens,
    _one_part_of_the_tokens,
    _first_stage_only,
    _replicas_not_told,
    _sides_sorted_apart,
    _groups_confused,
    _last_row_forgotten,
    _runs_by_address_only,
    _order_of_the_peer_stays,
    _zeroed_where_it_would_have_landed,
    _chunks_land_side_by_side,
    _one_chunk_put_in_order,
)


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__.strip("_"))
def test_broken_plan_is_noticed(broken: Callable[[], AbstractContextManager[Any]]) -> None:
    """The bytes have to be wrong, not just an exception somewhere; and without the fault the same case is right."""
    case = next(_noticed(broken), None)
    assert case is not None
    check(case)


def _noticed(broken: Callable[[], AbstractContextManager[Any]]) -> Iterator[layout_oracle.Case]:
    for seed in range(SEEDS):
        for family in FAMILIES:
            case = case_of(seed, family)
            with broken():
                try:
                    check(case)
                except OracleError:
                    yield case
                except (ValueError, LookupError, LayoutMismatch):
                    continue  # Noticed by the product itself, which is not the question.
