"""The byte oracle of read plans: random models and engines, judged by what lies in memory afterwards.

A case is a model (layers of heads, slots, latents, states or ring buffers in cache groups) and two engines that run it,
each with a tensor parallel size, block sizes, an order of axes and padding of its own, and a request with its block
tables. The oracle makes up the request's KV, lays it into the memory of the prefill ranks that one decode rank deals
with, carries out that rank's plan as plain copies, and compares all of the decode rank's memory with what should be
there: the same KV as the decode rank would hold it, zeros where its blocks got nothing, and everything else as it was.

The oracle has its own idea of who holds what and where: numpy views of memory made by reshaping and transposing, and a
loop over single tokens. Of the product it uses what it judges: the shapes, strides and pieces of
`connector.layout.shapes`, and the plan made from them.

    python -m tests.unit.layout_oracle --examples 100000 [--first-seed 0] [--family attention]

runs that many seeds in turn, prints how often each feature occurred, and stops at the first case that fails.
tests/gpu/test_layouts.py has the same cases carried out by NIXL.
"""

from __future__ import annotations

import argparse
import collections
import functools
import math
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol
from unittest.mock import patch

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from connector.layout import plan
from connector.layout.blocks import GroupBlocks
from connector.layout.geometry import CacheGroup, Piece, RankId, RankLayout, Region
from connector.layout.landing import LandingOrder, Permute, landing_layout
from connector.layout.plan import EnginePlan
from connector.layout.shapes import (
    REPLICATED,
    RING,
    Component,
    LayerShape,
    attention,
    latent,
    mamba,
    page_strides,
    paged_pieces,
    state_pieces,
)
from connector.layout.sources import partners
from connector.layout.steps import Steps
from connector.ports.nixl import MemoryKind, MemoryRun
from connector.protocol import Permutation
from connector.worker.landing import BlockPermuter, landing_caches
from tests.rig.layouts import plan_engine

Bytes = npt.NDArray[np.uint8]

FAMILIES = ("attention", "groups", "states", "context", "chunks", "slots", "whole")
"""One cache group of attention; several groups with windows; attention with states; ranks with tokens of their own;
attention in one or two groups, with smaller blocks on P, and heads before tokens in them; attention whose heads share
slots in a way that only its back end knows; attention with ring buffers and states that are not divided."""

MAMBA, PART = "mamba", "state"
"""Kinds of states, beside RING and REPLICATED: divided by channels and heads; a rank's part that cannot be divided."""

KINDS = {
    "k": "attention",
    "latent": "MLA",
    "kv_slots": "slots",
    RING: "ring buffers",
    REPLICATED: "states that all ranks hold alike",
    PART: "undivided states",
    "conv_x": "states",
}
"""What a layer is called in the table of coverage, by its first component."""

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


class OracleError(AssertionError):
    """The plan did not do what it should have. The message says which byte of which rank is wrong."""


# --- cases ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """Memory that is laid out as one: `layers[i][g]` is the layer of group g that uses the i-th slice, or None.

    `shapes` of all layers of tokens in it are alike. A state in slice i has memory of its own when `own_states`, and
    otherwise lies in the pages of slice i.
    """

    layers: tuple[tuple[LayerShape | None, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One side. `groups` has the block sizes of each cache group; a state group counts no tokens."""

    engine_id: str
    tp_size: int
    layout_name: str
    padding_bytes: int
    groups: tuple[CacheGroup, ...]
    num_ids: int
    pp_size: int = 1
    dcp_size: int = 1

    @property
    def ranks(self) -> list[RankId]:
        return [RankId(stage, rank) for stage in range(self.pp_size) for rank in range(self.tp_size)]


@dataclass(frozen=True, kw_only=True)
class Case:
    """What the oracle needs, and nothing else decides the outcome."""

    family: str
    tensors: tuple[Tensor, ...]
    prefill: Engine
    decode: Engine
    decode_rank: int
    tables: tuple[GroupBlocks, ...]
    noise: int
    """Seed of the bytes."""
    features: tuple[str, ...] = field(default=(), compare=False)

    @property
    def shapes(self) -> list[LayerShape]:
        return shapes_in(self.tensors)

    def stage(self, engine: Engine, pp_rank: int) -> list[Tensor]:
        """What a pipeline stage has of the model: a stretch of the slices, counted through all tensors."""
        slices = sum(len(tensor.layers) for tensor in self.tensors)
        tensors, number = [], 0
        for tensor in self.tensors:
            stages = [(number + index) * engine.pp_size // slices for index in range(len(tensor.layers))]
            number += len(tensor.layers)
            rows = tuple(row for row, stage in zip(tensor.layers, stages, strict=True) if stage == pp_rank)
            if rows:
                tensors.append(Tensor(layers=rows))
        return tensors


def shapes_in(tensors: Sequence[Tensor]) -> list[LayerShape]:
    return [shape for tensor in tensors for row in tensor.layers for shape in row if shape is not None]


def draw_case(chance: random.Random, family: str) -> Case:
    """A random case. `chance` is a random.Random, or hypothesis's imitation of one."""
    tp_sizes = chance.choice(((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 3, 6)))
    prefill_tp, decode_tp = chance.choice(tp_sizes), chance.choice(tp_sizes)
    decode_dcp, prefill_dcp = 1, 1
    if family == "context":
        decode_dcp, prefill_dcp = (chance.choice((1, tp, tp)) for tp in (decode_tp, prefill_tp))
        if max(decode_dcp, prefill_dcp) % min(decode_dcp, prefill_dcp):
            prefill_dcp = 1
    states = (MAMBA,) if family == "states" else ()
    if family == "whole":
        states = tuple(chance.choice((RING, RING, REPLICATED, PART)) for _ in range(chance.choice((1, 1, 2))))
    if family == "slots" or PART in states:
        prefill_tp = decode_tp  # no other engine is served
    fewest, most = {"groups": (2, 3), "states": (1, 3), "chunks": (1, 2), "slots": (1, 2)}.get(family, (1, 1))
    token_groups = chance.randint(fewest, most) if most > 1 else 1
    num_groups = token_groups + len(states)
    shared = num_groups > 1 and chance.random() < 0.6
    in_lanes = family not in ("chunks", "slots") and chance.random() < 0.3
    tensors = _draw_tensors(
        chance,
        (prefill_tp, decode_tp),
        token_groups,
        states=states,
        shared=shared,
        in_lanes=in_lanes and family != "context",
        is_latent=family == "context" or (family not in ("chunks", "slots") and not in_lanes and chance.random() < 0.3),
        slots_of_rank=chance.choice((1, 2, 2, 4, 6)) if family == "slots" else 0,
    )
    unit = math.lcm(*(shape.tokens_per_entry for shape in shapes_in(tensors)))
    sizes = _draw_group_sizes(
        chance,
        token_groups,
        states=states,
        shared=shared,
        unit=unit,
        dcp_sizes=(decode_dcp, prefill_dcp),
        is_smaller_on_prefill=family == "chunks",
        is_equal=family == "slots",
    )
    counts, tables = [], []
    num_tokens = chance.randint(1, 24 * unit)
    for (decode_group, prefill_group), state in zip(sizes, (None,) * token_groups + states, strict=True):
        count, table = (
            ((1, 1), GroupBlocks(local=range(1), remote=range(1)))
            if state == RING
            else _draw_state_table(chance)
            if state is not None
            else _draw_token_table(chance, num_tokens, decode_group, prefill_group, windows=num_groups > 1)
        )
        counts.append(count)
        tables.append(table)
    decode_total, prefill_total = (sum(count[side] for count in counts) for side in (0, 1))
    # A state lies in the pages of attention only where these are one after another.
    layouts = LAYOUTS[:2] if states and shared else LAYOUTS
    if in_lanes:
        layouts = tuple(name for name in layouts if name.endswith("NC"))
    if family == "chunks":
        layouts = tuple(name for name in layouts if name.endswith("HNC"))
    layout_name = chance.choice(layouts)
    slices = sum(len(tensor.layers) for tensor in tensors)
    prefill_pp = chance.choice([pp for pp in (1, 1, 1, 2, 3) if pp <= slices])
    engines = [
        Engine(
            engine_id=name,
            tp_size=tp_size,
            # A ring buffer is served between engines of one layout.
            layout_name=layout_name if RING in states or chance.random() < 0.5 else chance.choice(layouts),
            padding_bytes=chance.choice((0, 0, 3)),
            groups=tuple(pair[side] for pair in sizes),
            num_ids=total + chance.randint(1, 3),
            pp_size=pp_size,
            dcp_size=dcp_size,
        )
        for side, (name, tp_size, pp_size, dcp_size, total) in enumerate(
            (
                (f"decode-{chance.randint(0, 99)}", decode_tp, 1, decode_dcp, decode_total),
                ("prefill", prefill_tp, prefill_pp, prefill_dcp, prefill_total),
            )
        )
    ]
    decode, prefill = engines
    case = Case(
        family=family,
        tensors=tensors,
        prefill=prefill,
        decode=decode,
        decode_rank=chance.randint(0, decode_tp - 1),
        tables=_number_blocks(chance, tables, counts, decode.num_ids, prefill.num_ids),
        noise=chance.randint(0, 2**32 - 1),
    )
    return Case(**{**case.__dict__, "features": features_of(case)})


def _draw_tensors(
    chance: random.Random,
    tp_sizes: tuple[int, int],
    token_groups: int,
    *,
    states: Sequence[str],
    shared: bool,
    in_lanes: bool,
    is_latent: bool,
    slots_of_rank: int,
) -> tuple[Tensor, ...]:
    """The model. Shared: layer i of every group lies in slice i of one tensor; in lanes: K and V of attention do.

    `slots_of_rank`: what attention has instead of heads. Two are K and V of all heads (planes), or of one head.
    """
    units = [n for n in (1, 2, 3, 4, 6, 8, 12) if all(n % t == 0 or t % n == 0 for t in tp_sizes)]
    channels = [n for n in (4, 8, 16, 6, 12) if all(n % t == 0 for t in tp_sizes)] or [24]
    depth = chance.randint(1, 3)
    heads = chance.choice(units)
    # Bytes of a lane; 0: K and V side by side in each token.
    lanes = (chance.randint(1, 2), chance.randint(1, 2)) if in_lanes else (0, 0)
    k_bytes, v_bytes = (chance.randint(1, 3) * max(1, lane) for lane in lanes)
    tokens_per_entry = chance.choice((1, 1, 2, 3)) if is_latent else 1
    names = iter(range(1000))

    def tokens(group: int) -> LayerShape:
        name = f"layers.{next(names)}"
        if slots_of_rank:
            slots = Component(name="kv_slots", units=slots_of_rank * tp_sizes[0], bytes_per_unit=k_bytes)
            return LayerShape(name=name, components=(slots,), group=group, whole_blocks=True, whole_ranks=True)
        if is_latent:
            shape = latent(name, bytes_per_token=k_bytes + v_bytes, group=group)
            return msgspec.structs.replace(shape, tokens_per_entry=tokens_per_entry)
        shape = attention(name, heads=heads, k_bytes=k_bytes, v_bytes=v_bytes, group=group)
        components = (
            msgspec.structs.replace(component, bytes_per_lane=lane)
            for component, lane in zip(shape.components, lanes, strict=True)
        )
        return msgspec.structs.replace(shape, components=tuple(components))

    state_sizes = {
        "channels": chance.choice(channels),
        "groups": chance.choice((0, *units)),
        "heads": chance.choice(channels),
        "channel_bytes": chance.randint(1, 2),
        "group_bytes": chance.randint(1, 2),
        "head_bytes": chance.randint(1, 3),
    }

    whole_bytes = {kind: chance.randint(1, 40) for kind in states if kind != MAMBA}

    def state(kind: str, group: int) -> LayerShape:
        name = f"layers.{next(names)}"
        if kind == MAMBA:
            return mamba(name, group=group, **state_sizes)
        units = tp_sizes[0] if kind == PART else 1
        whole = Component(name=kind, units=units, bytes_per_unit=whole_bytes[kind])
        return LayerShape(name=name, components=(whole,), group=group, is_state=True, whole_ranks=kind == PART)

    num_groups = token_groups + len(states)
    makers = [tokens] * token_groups + [functools.partial(state, kind) for kind in states]
    if shared:
        # Not every group has a layer in every slice, but every slice has tokens.
        rows = [
            tuple(make(group) if group == 0 or chance.random() < 0.85 else None for group, make in enumerate(makers))
            for _ in range(depth)
        ]
        used = [any(row[group] for row in rows) for group in range(num_groups)]
        rows[0] = tuple(shape if shape or used[group] else makers[group](group) for group, shape in enumerate(rows[0]))
        tensors = [Tensor(layers=tuple(rows))]
    else:
        tensors = [
            Tensor(
                layers=tuple(
                    tuple(make(group) if other == group else None for other in range(num_groups))
                    for _ in range(chance.randint(1, depth))
                )
            )
            for group, make in enumerate(makers)
        ]
    if chance.random() < 0.25:
        # A second cache with blocks of another length in the same group, as an indexer next to latent attention.
        shape = latent(f"layers.{next(names)}.indexer", bytes_per_token=chance.randint(1, 3), group=0)
        shape = msgspec.structs.replace(shape, tokens_per_entry=chance.choice((1, 1, 4)))
        tensors.append(Tensor(layers=((shape, *[None] * (num_groups - 1)),)))
    return tuple(tensors)


def _draw_group_sizes(
    chance: random.Random,
    token_groups: int,
    *,
    states: Sequence[str],
    shared: bool,
    unit: int,
    dcp_sizes: tuple[int, int],
    is_smaller_on_prefill: bool,
    is_equal: bool,
) -> list[tuple[CacheGroup, CacheGroup]]:
    """Block sizes of each group on (decode, prefill), multiples of `unit`. Groups that share memory have pages of one
    size.
    """
    decode_dcp, prefill_dcp = dcp_sizes

    def sizes() -> tuple[CacheGroup, CacheGroup]:
        decode_tokens = unit * chance.choice((1, 2, 3, 4, 8))
        prefill_tokens = decode_tokens if chance.random() < 0.4 else unit * chance.choice((1, 2, 3, 4, 6, 8))
        ratio = chance.choice((1, 1, 2, 3))
        prefill_ratio = ratio if chance.random() < 0.5 else chance.choice((1, 2, 3))
        if is_equal:
            prefill_tokens = decode_tokens
        if min(dcp_sizes) > 1:
            prefill_tokens, prefill_ratio = decode_tokens, ratio
        if is_smaller_on_prefill:
            prefill_tokens, times = unit * chance.choice((1, 2, 3)), chance.choice((1, 2, 2, 3, 4))
            decode_tokens = prefill_tokens * times
        return (
            CacheGroup(tokens_per_kernel_block=decode_tokens, kernel_blocks_per_block=ratio, dcp_size=decode_dcp),
            CacheGroup(
                tokens_per_kernel_block=prefill_tokens, kernel_blocks_per_block=prefill_ratio, dcp_size=prefill_dcp
            ),
        )

    first = sizes()
    groups = [first if shared else sizes() for _ in range(token_groups)]
    one_each = CacheGroup(tokens_per_kernel_block=0)
    return [*groups, *[(one_each, one_each)] * len(states)]


_Count = tuple[int, int]


def _draw_token_table(
    chance: random.Random, num_tokens: int, decode: CacheGroup, prefill: CacheGroup, *, windows: bool
) -> tuple[_Count, GroupBlocks]:
    """How many blocks (decode, prefill) the request has in this group, and all of a table but the ids."""
    decode_size, prefill_size = decode.positions_per_id, prefill.positions_per_id
    decode_end = math.ceil(num_tokens / decode_size)
    prefill_end = math.ceil(num_tokens / prefill_size) + chance.choice((0, 0, 1))
    decode_first = chance.choice((0, 0, chance.randint(0, decode_end)))
    prefill_first, window = 0, None
    states_tokens = True
    if windows and chance.random() < 0.5:
        window = chance.randint(1, num_tokens)
        prefill_first = (num_tokens - window) // prefill_size
        decode_first = max(decode_first, chance.randint(0, (num_tokens - window) // decode_size))
    elif chance.random() < 0.3:
        states_tokens = False
    decode_count = decode_end - decode_first + chance.choice((0, 0, 1))
    table = GroupBlocks(
        local=range(decode_count),
        remote=range(prefill_end - prefill_first),
        local_first=decode_first,
        remote_first=prefill_first,
        num_tokens=num_tokens if states_tokens else None,
        window_tokens=window,
    )
    return (decode_count, prefill_end - prefill_first), table


def _draw_state_table(chance: random.Random) -> tuple[_Count, GroupBlocks]:
    """States are few; the decode side may lack the first ones (it has them) or have one more (it makes it)."""
    remote = chance.randint(1, 2)
    first = chance.randint(0, remote - 1)
    local = remote - first + chance.choice((0, 0, 1))
    return (local, remote), GroupBlocks(local=range(local), remote=range(remote), local_first=first)


def _number_blocks(
    chance: random.Random, tables: Sequence[GroupBlocks], counts: Sequence[_Count], *num_ids: int
) -> tuple[GroupBlocks, ...]:
    """Give the tables ids. One pool for all groups of an engine, as vLLM has it."""
    pools = [list(range(ids)) for ids in num_ids]
    for pool in pools:
        chance.shuffle(pool)
        if chance.random() < 0.3:
            pool.sort()
    numbered = []
    for table, (local, remote) in zip(tables, counts, strict=True):
        ids = [[pool.pop() for _ in range(count)][::-1] for pool, count in zip(pools, (local, remote), strict=True)]
        numbered.append(
            GroupBlocks(
                local=ids[0],
                remote=ids[1],
                local_first=table.local_first,
                remote_first=table.remote_first,
                num_tokens=table.num_tokens,
                window_tokens=table.window_tokens,
            )
        )
    return tuple(numbered)


def features_of(case: Case) -> tuple[str, ...]:
    """What a case exercises, for the table of coverage."""
    decode, prefill, shapes = case.decode, case.prefill, case.shapes
    ratio = (
        f"D_TP = {decode.tp_size // prefill.tp_size} x P_TP"
        if decode.tp_size % prefill.tp_size == 0
        else f"P_TP = {prefill.tp_size // decode.tp_size} x D_TP"
        if prefill.tp_size % decode.tp_size == 0
        else "neither TP divides the other"
    )
    found = [ratio, case.family]
    if prefill.pp_size > 1:
        found.append(f"P with {prefill.pp_size} pipeline stages")
    if case.family == "context":
        ours, theirs = ("tokens split" if engine.dcp_size > 1 else "tokens whole" for engine in (decode, prefill))
        found.append(f"{theirs} on P, {ours} on D")
    if any(component.bytes_per_lane for shape in shapes for component in shape.components):
        found.append("lanes")
    if any(shape.tokens_per_entry > 1 for shape in shapes):
        found.append("entries of several tokens")
    if len({shape.tokens_per_entry for shape in shapes if shape.group == 0}) > 1:
        found.append("entries of several kinds in a group")
    for shape in shapes:
        found.append(KINDS[shape.components[0].name])
        for name, engine in (("D", decode), ("P", prefill)):
            if shape.components[0].name == "k" and shape.components[0].units < engine.tp_size:
                found.append(f"GQA with fewer heads than ranks of {name}")
    for ours, theirs, table in zip(decode.groups, prefill.groups, case.tables, strict=True):
        sizes = ours.tokens_per_kernel_block, theirs.tokens_per_kernel_block
        if min(sizes):
            if sizes[0] == sizes[1]:
                found.append("equal kernel blocks")
            elif sizes[0] % sizes[1] == 0:
                found.append("P's kernel block smaller")
            elif sizes[1] % sizes[0] == 0:
                found.append("P's kernel block larger")
            else:
                found.append("neither kernel block divides the other")
        if ours.kernel_blocks_per_block > 1 or theirs.kernel_blocks_per_block > 1:
            found.append("logical block larger than the kernel's")
        if ours.kernel_blocks_per_block != theirs.kernel_blocks_per_block:
            found.append("different ratios of logical to kernel block")
        if table.window_tokens is not None:
            found.append("window")
        if table.local_first:
            found.append("prefix hit")
    if any(sum(shape is not None for shape in row) > 1 for tensor in case.tensors for row in tensor.layers):
        found.append("groups share tensors")
    lengths = {(s.group, sum(c.units * c.bytes_per_unit for c in s.components)) for s in shapes if not s.is_state}
    if len(lengths) > len({group for group, _ in lengths}):
        found.append("blocks of several lengths in a group")
    if decode.layout_name != prefill.layout_name:
        found.append("different orders of axes")
    if decode.padding_bytes or prefill.padding_bytes:
        found.append("padding")
    if decode.layout_name.startswith("B") and prefill.layout_name.startswith("B"):
        found.append("block outermost on both sides")
    return tuple(dict.fromkeys(found))


# --- memory ---------------------------------------------------------------------------------------------------------


def held(units: int, rank: int, ranks: int) -> list[int]:
    """Units of a component that a rank holds."""
    if ranks <= units:
        each = units // ranks
        return list(range(rank * each, rank * each + each))
    return [rank // (ranks // units)]


class Home(Protocol):
    """Where the memory of a rank lies."""

    @property
    def memory_kind(self) -> MemoryKind: ...

    def place(self, array: Bytes) -> int:
        """The address of memory for the bytes of this array."""
        ...


class Rank:
    """The memory of one rank, one array of bytes for each tensor, and views of it by what the bytes mean.

    Args:
        home: where its memory lies; None: at addresses that are made up, the same in every run.

    Attributes:
        memory: by tensor.
        addresses: where each of these arrays begins.
        pages: by layer of tokens, for each component: [kernel blocks, heads held, tokens, lanes, bytes of a lane].
        caches: by layer of tokens, all of it as vLLM would have it: [kernel blocks, heads held, tokens, content].
            Of a compressed cache, here and below, tokens are entries.
        states: by layer of states, for each component: the units held, and [ids, units held, bytes of a unit].
    """

    def __init__(
        self, case: Case, engine: Engine, rank: RankId, noise: np.random.Generator, *, home: Home | None = None
    ) -> None:
        self.engine, self.rank, self.tp_rank = engine, rank, rank.tp_rank
        self.groups = tuple(
            msgspec.structs.replace(group, dcp_rank=rank.tp_rank % group.dcp_size) for group in engine.groups
        )
        tensors = case.stage(engine, rank.pp_rank)
        self.shapes = shapes_in(tensors)
        self.memory: list[Bytes] = []
        self.addresses: list[int] = []
        self._home = home
        self.pages: dict[str, list[Bytes]] = {}
        self.caches: dict[str, torch.Tensor] = {}
        self.states: dict[str, list[tuple[list[int], Bytes]]] = {}
        regions: list[Region] = []
        for tensor in tensors:
            regions.extend(self._lay_out(tensor, noise))
        self.layout = RankLayout(
            engine_id=engine.engine_id,
            pp_rank=rank.pp_rank,
            tp_rank=rank.tp_rank,
            tp_size=engine.tp_size,
            dcp_size=engine.dcp_size,
            pcp_size=1,
            regions=tuple(regions),
            kernel_block_size_tokens=1,
            kernel_blocks_per_block=1,
            layout_name=engine.layout_name,
            attention_backend="ANY",
            groups=self.groups,
        )

    def _allocate(self, length_bytes: int, noise: np.random.Generator) -> tuple[Bytes, int]:
        """Memory full of noise, and its address."""
        flat = noise.integers(0, 256, length_bytes, dtype=np.uint8)
        self.memory.append(flat)
        self.addresses.append(len(self.memory) << _ADDRESS_BITS if self._home is None else self._home.place(flat))
        return flat, self.addresses[-1]

    def _lay_out(self, tensor: Tensor, noise: np.random.Generator) -> list[Region]:
        shapes = [shape for row in tensor.layers for shape in row if shape is not None]
        tokens = next((shape for shape in shapes if not shape.is_state), None)
        state_bytes = max((self._state_bytes(shape) for shape in shapes if shape.is_state), default=0)
        if tokens is None:
            return self._lay_out_states(tensor, state_bytes, noise)
        group = self.engine.groups[tokens.group]
        sizes = {
            "L": len(tensor.layers),
            "B": self.engine.num_ids * group.kernel_blocks_per_block,
            "H": len(held(tokens.components[0].units, self.tp_rank, self.engine.tp_size)),
            "N": _entries(tokens, group).tokens_per_kernel_block,
            "C": sum(component.bytes_per_unit for component in tokens.components),
        }
        page_bytes = sizes["H"] * sizes["N"] * sizes["C"]
        lacking_bytes = -(-state_bytes // group.kernel_blocks_per_block) - page_bytes
        padding_bytes = max(self.engine.padding_bytes, lacking_bytes)
        axes = self.engine.layout_name
        split = axes.index("B") + 1
        inner_bytes = math.prod(sizes[axis] for axis in axes[split:])
        outer = tuple(sizes[axis] for axis in axes[:split])
        flat, address = self._allocate(math.prod(outer) * (inner_bytes + padding_bytes), noise)
        rows = flat.reshape(*outer, inner_bytes + padding_bytes)
        view = rows[..., :inner_bytes].reshape(tuple(sizes[axis] for axis in axes))
        view = view.transpose([axes.index(axis) for axis in "LBHNC"])
        assert np.may_share_memory(view, flat)
        strides = page_strides(
            axes,
            layers=sizes["L"],
            blocks=sizes["B"],
            heads=sizes["H"],
            tokens=sizes["N"],
            bytes_per_token=sizes["C"],
            padding_bytes=padding_bytes,
        )
        regions = []
        for index, row in enumerate(tensor.layers):
            for shape in row:
                if shape is None:
                    continue
                base_address = address + index * strides.layer
                if shape.is_state:
                    pages = flat.reshape(sizes["L"], self.engine.num_ids, -1)[index]
                    self.states[shape.name] = self._state_views(shape, pages)
                    stride_bytes = strides.block * group.kernel_blocks_per_block
                    regions.append(self._state_region(shape, base_address, stride_bytes))
                else:
                    self.pages[shape.name] = _page_views(shape, view[index])
                    self.caches[shape.name] = torch.from_numpy(view[index])
                    pieces = paged_pieces(shape, tp_rank=self.tp_rank, tp_size=self.engine.tp_size, strides=strides)
                    regions.append(self._region(shape, base_address, page_bytes, strides.block, sizes["B"], pieces))
        return regions

    def _lay_out_states(self, tensor: Tensor, state_bytes: int, noise: np.random.Generator) -> list[Region]:
        page_bytes = state_bytes + self.engine.padding_bytes
        flat, address = self._allocate(len(tensor.layers) * self.engine.num_ids * page_bytes, noise)
        slices = flat.reshape(len(tensor.layers), self.engine.num_ids, page_bytes)
        regions = []
        for index, row in enumerate(tensor.layers):
            (shape,) = [shape for shape in row if shape is not None]
            self.states[shape.name] = self._state_views(shape, slices[index])
            base_address = address + index * self.engine.num_ids * page_bytes
            regions.append(self._state_region(shape, base_address, page_bytes))
        return regions

    def _state_region(self, shape: LayerShape, base_address: int, stride_bytes: int) -> Region:
        pieces = state_pieces(shape, tp_rank=self.tp_rank, tp_size=self.engine.tp_size)
        return self._region(shape, base_address, self._state_bytes(shape), stride_bytes, self.engine.num_ids, pieces)

    def _state_bytes(self, shape: LayerShape) -> int:
        return sum(
            len(held(component.units, self.tp_rank, self.engine.tp_size)) * component.bytes_per_unit
            for component in shape.components
        )

    def _state_views(self, shape: LayerShape, pages: Bytes) -> list[tuple[list[int], Bytes]]:
        views, start = [], 0
        for component in shape.components:
            units = held(component.units, self.tp_rank, self.engine.tp_size)
            end = start + len(units) * component.bytes_per_unit
            view = pages[:, start:end].reshape(len(pages), len(units), component.bytes_per_unit)
            views.append((units, view))
            start = end
        return views

    def _region(
        self,
        shape: LayerShape,
        base_address: int,
        length_bytes: int,
        stride_bytes: int,
        num_blocks: int,
        pieces: tuple[Piece, ...],
    ) -> Region:
        return Region(
            name=shape.name,
            base_address=base_address,
            block_length_bytes=length_bytes,
            block_stride_bytes=stride_bytes,
            num_blocks=num_blocks,
            memory_kind="DRAM" if self._home is None else self._home.memory_kind,
            group=shape.group,
            pieces=pieces,
        )

    def locate(self, address: int, length_bytes: int) -> tuple[int, slice]:
        """Which array, and what of it. OracleError when it is not this rank's memory, or not all of it."""
        for index, (array, begin) in enumerate(zip(self.memory, self.addresses, strict=True)):
            if begin <= address and address + length_bytes <= begin + array.size:
                return index, slice(address - begin, address - begin + length_bytes)
        raise OracleError(f"{length_bytes} bytes at {address:#x} are outside of rank {self.tp_rank}'s memory")

    def bytes_at(self, address: int, length_bytes: int) -> Bytes:
        """The memory there. OracleError as for `locate`."""
        index, part = self.locate(address, length_bytes)
        return self.memory[index][part]


def _page_views(shape: LayerShape, pages: Bytes) -> list[Bytes]:
    """The components of a layer of tokens, whose pages are [kernel blocks, heads held, tokens, content] outside."""
    blocks, heads, tokens, _ = pages.shape
    views, start = [], 0
    for component in shape.components:
        end = start + component.bytes_per_unit
        if component.bytes_per_lane:
            of_head = pages.reshape(blocks, heads, -1)
            part = of_head[..., start * tokens : end * tokens]
            view = part.reshape(blocks, heads, -1, tokens, component.bytes_per_lane).swapaxes(2, 3)
        else:
            view = pages[..., None, start:end]
        assert np.may_share_memory(view, pages)
        views.append(view)
        start = end
    return views


_ADDRESS_BITS = 28
"""Distance of made-up addresses."""


# --- the judgement --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Content:
    """The request's KV, of all ranks, by layer.

    Attributes:
        pages: [positions, heads, content].
        states: for each component [slots, units, bytes of a unit].
    """

    pages: dict[str, Bytes]
    states: dict[str, list[Bytes]]


def make_content(case: Case, noise: np.random.Generator) -> Content:
    """Up to the end of the prefill side's last block: what lies beyond the request's tokens is transferred as well."""
    pages, states = {}, {}
    for shape in case.shapes:
        table, group = case.tables[shape.group], _entries(shape, case.prefill.groups[shape.group])
        positions = (table.remote_first + len(table.remote)) * group.positions_per_id
        if shape.is_state:
            states[shape.name] = [
                noise.integers(0, 256, (positions, component.units, component.bytes_per_unit), dtype=np.uint8)
                for component in shape.components
            ]
        else:
            size = sum(component.bytes_per_unit for component in shape.components)
            pages[shape.name] = noise.integers(0, 256, (positions, shape.components[0].units, size), dtype=np.uint8)
    return Content(pages=pages, states=states)


def write_prefill(case: Case, rank: Rank, content: Content) -> None:
    """Lay the request's KV into a prefill rank's memory as that rank would hold it."""
    for shape in rank.shapes:
        table, group = case.tables[shape.group], rank.groups[shape.group]
        if shape.is_state:
            for (units, view), values in zip(rank.states[shape.name], content.states[shape.name], strict=True):
                for slot, block in enumerate(table.remote, table.remote_first):
                    view[block] = values[slot, units]
            continue
        units = held(shape.components[0].units, rank.tp_rank, rank.engine.tp_size)
        group = _entries(shape, group)
        for kernel_block, token, position in _positions(table.remote, table.remote_first, group):
            _write_token(rank, shape, kernel_block, token, content.pages[shape.name][position, units])


def _write_token(rank: Rank, shape: LayerShape, kernel_block: int, token: int, values: Bytes) -> None:
    """`values`: [heads held, content]."""
    start = 0
    for component, view in zip(shape.components, rank.pages[shape.name], strict=True):
        end = start + component.bytes_per_unit
        place = view[kernel_block, :, token]
        place[:] = values[:, start:end].reshape(place.shape)
        start = end


def _write_expected(case: Case, rank: Rank, content: Content) -> None:
    """Change a decode rank's memory into what it has to be after the request was read."""
    for shape in case.shapes:
        table = case.tables[shape.group]
        ours, theirs = rank.groups[shape.group], case.prefill.groups[shape.group]
        first = table.remote_first * theirs.positions_per_id
        end = (table.remote_first + len(table.remote)) * theirs.positions_per_id
        if shape.is_state:
            for (units, view), values in zip(rank.states[shape.name], content.states[shape.name], strict=True):
                for slot, block in enumerate(table.local, table.local_first):
                    if first <= slot < end:
                        view[block] = values[slot, units]
            continue
        if table.num_tokens is not None:
            step = math.gcd(ours.tokens_per_kernel_block, theirs.tokens_per_kernel_block)
            end = min(end, math.ceil(table.num_tokens / step) * step)
        units = held(shape.components[0].units, rank.tp_rank, rank.engine.tp_size)
        for kernel_block, token, position in _positions(table.local, table.local_first, _entries(shape, ours)):
            arrives = np.uint8(first <= position * shape.tokens_per_entry < end)
            arrived = content.pages[shape.name][position if arrives else 0, units]
            _write_token(rank, shape, kernel_block, token, arrived * arrives)


def _entries(shape: LayerShape, group: CacheGroup) -> CacheGroup:
    """The sizes of a group in entries of one of its layers."""
    entries = group.tokens_per_kernel_block // shape.tokens_per_entry
    return msgspec.structs.replace(group, tokens_per_kernel_block=entries)


def _positions(blocks: Sequence[int], first: int, group: CacheGroup) -> list[tuple[int, int, int]]:
    """(kernel block, token within it, position in the request) of every token of the blocks."""
    ratio, size = group.kernel_blocks_per_block, group.tokens_per_kernel_block
    return [
        (
            block * ratio + part,
            token,
            (((first + index) * group.dcp_size + group.dcp_rank) * ratio + part) * size + token,
        )
        for index, block in enumerate(blocks)
        for part in range(ratio)
        for token in range(size)
    ]


class Expectation:
    """What all of a decode rank's memory has to be after the request was read; made before that."""

    def __init__(self, case: Case, rank: Rank, content: Content) -> None:
        self._rank = rank
        self._before = [array.copy() for array in rank.memory]
        _write_expected(case, rank, content)
        self._expected = [array.copy() for array in rank.memory]
        self.start_again()

    def start_again(self) -> None:
        """Put the memory back to what it was."""
        for array, old in zip(self._rank.memory, self._before, strict=True):
            array[:] = old

    def require(self) -> None:
        """Raise OracleError when a byte is wrong."""
        for index, (found, right) in enumerate(zip(self._rank.memory, self._expected, strict=True)):
            wrong = np.flatnonzero(found != right)
            if wrong.size:
                at = wrong[0]
                was = "unchanged" if found[at] == self._before[index][at] else "changed"
                raise OracleError(
                    f"{wrong.size} bytes of tensor {index} of rank {self._rank.tp_rank} are wrong, the first at {at}: "
                    f"{found[at]} ({was}) instead of {right[at]}"
                )


def check(case: Case) -> int:
    """Judge the product's plans of a case: READs to where the KV is to stay, and to landing layouts.

    Of the latter those that the product chooses, and one that it might choose for another peer. Returns the number of
    descriptors of the first. Raises OracleError.
    """
    noise = np.random.default_rng(case.noise)
    content = make_content(case, noise)
    wanted = [rank for rank in case.prefill.ranks if _deal_with_each_other(case, case.decode_rank, rank.tp_rank)]
    sizes = (case.decode.tp_size, case.prefill.tp_size, case.decode.dcp_size, case.prefill.dcp_size)
    if list(partners(case.decode_rank, *sizes)) != [rank.tp_rank for rank in wanted if rank.pp_rank == 0]:
        raise OracleError(f"rank {case.decode_rank} has to deal with ranks {wanted}")
    prefill = {rank: Rank(case, case.prefill, rank, noise) for rank in wanted}
    for rank in prefill.values():
        write_prefill(case, rank, content)
    decode = Rank(case, case.decode, RankId(0, case.decode_rank), noise)
    expectation = Expectation(case, decode, content)
    remotes = [rank.layout for rank in prefill.values()]
    engine_plan = plan_engine(decode.layout, remotes)
    _check_notified(case, engine_plan, wanted)
    descriptors = carry_out(engine_plan, case, decode, prefill)
    expectation.require()
    landings = [plan_engine(decode.layout, remotes, permute) for permute in (Permute.BLOCK_SIZES, Permute.ORDERS)]
    landings.append(_plan_of_any_order(case, decode.layout, remotes))
    for number, landing in enumerate(landings):
        if landing.landing is not None and landing.landing not in [other.landing for other in landings[:number]]:
            expectation.start_again()
            if carry_out(landing, case, decode, prefill) > descriptors and landing is not landings[-1]:
                raise OracleError(f"{landing.landing} takes more descriptors than {descriptors}")
            expectation.require()
    return descriptors


def _plan_of_any_order(case: Case, local: RankLayout, remotes: Sequence[RankLayout]) -> EnginePlan:
    """READs into a random landing layout, whether or not the peer has that order."""
    chance = random.Random(case.noise)
    whole_blocks, heads_first = chance.random() < 0.3, chance.random() < 0.7
    sizes = [[group.positions_per_kernel_block for group in side.groups] for side in (case.decode, case.prefill)]
    chunks = tuple(1 if whole_blocks else ours // math.gcd(ours, theirs) for ours, theirs in zip(*sizes, strict=True))
    order = LandingOrder(heads_first=heads_first, chunks=chunks)

    def this_one(*_arguments: object) -> Steps[tuple[RankLayout, LandingOrder | None]]:
        yield
        return landing_layout(local, order), order

    with patch.object(plan, "_target", this_one):
        return plan_engine(local, remotes)


def _deal_with_each_other(case: Case, decode_rank: int, prefill_rank: int) -> bool:
    decode, prefill = case.decode, case.prefill
    if prefill.dcp_size == 1:
        return (
            prefill_rank * decode.tp_size < (decode_rank + 1) * prefill.tp_size
            and decode_rank * prefill.tp_size < (prefill_rank + 1) * decode.tp_size
        )
    # Each has every so many blocks of a request; do they ever have the same one?
    blocks = range(math.lcm(decode.dcp_size, prefill.dcp_size))
    return any(
        block % decode.dcp_size == decode_rank % decode.dcp_size and block % prefill.dcp_size == prefill_rank
        for block in blocks
    )


def carry_out(engine_plan: EnginePlan, case: Case, decode: Rank, prefill: dict[RankId, Rank]) -> int:
    """The plan as plain copies, in no order that matters: no byte may be written twice, but to put it in order."""
    pairs = engine_plan.pair(case.tables)
    written = [np.zeros(array.size, bool) for array in decode.memory]
    descriptors = 0
    for read, of_read in zip(engine_plan.reads, pairs, strict=True):
        local_ids, remote_ids = read.descriptor_ids(of_read)
        if not local_ids.dtype == remote_ids.dtype == np.int32 or local_ids.shape != remote_ids.shape:
            raise OracleError("ids of the two sides differ in number or type")
        local, remote = expand_runs(read.local_runs), expand_runs(read.remote_runs)
        remote_rank = prefill[read.remote_rank]
        descriptors += local_ids.size
        for ours, theirs in zip(local_ids.tolist(), remote_ids.tolist(), strict=True):
            if not (0 <= ours < len(local) and 0 <= theirs < len(remote)):
                raise OracleError("a descriptor that was not prepared")
            (to, length_bytes), (source, source_length_bytes) = local[ours], remote[theirs]
            if length_bytes != source_length_bytes:
                raise OracleError(f"{source_length_bytes} bytes into {length_bytes}")
            index, part = decode.locate(to, length_bytes)
            decode.memory[index][part] = remote_rank.bytes_at(source, length_bytes)
            _mark(written[index][part], to)
    if engine_plan.landing is not None:
        put_in_order(case, decode, engine_plan.landing)
        for marks in written:
            marks[:] = False
    for address, length_bytes in zip(*(array.tolist() for array in engine_plan.unfilled(pairs[0])), strict=True):
        index, part = decode.locate(address, length_bytes)
        decode.memory[index][part] = 0
        _mark(written[index][part], address)
    return descriptors


def put_in_order(case: Case, decode: Rank, order: LandingOrder) -> None:
    """What the product does with the request's blocks after READs to the landing layout."""
    BlockPermuter(landing_caches(decode.layout, decode.caches)).permute([permutation_of(case, order)])


def permutation_of(case: Case, order: LandingOrder) -> Permutation:
    """The request's blocks as the product is told of them."""
    kernel_blocks = [
        [number for number, token, _ in _positions(table.local, 0, group) if token == 0]
        for table, group in zip(case.tables, case.decode.groups, strict=True)
    ]
    return Permutation(
        kernel_blocks=tuple(np.array(numbers, np.int64) for numbers in kernel_blocks),
        chunks=order.chunks,
        heads_first=order.heads_first,
    )


def expand_runs(runs: Sequence[MemoryRun]) -> list[tuple[int, int]]:
    """(address, length) of every descriptor, as NIXL expands a compressed list."""
    for run in runs:
        if run.stride_bytes < run.length_bytes and run.count > 1:
            raise OracleError(f"descriptors of {run} overlap")
    return [(run.address + i * run.stride_bytes, run.length_bytes) for run in runs for i in range(run.count)]


def _mark(written: npt.NDArray[np.bool_], address: int) -> None:
    if written.any():
        raise OracleError(f"bytes at {address:#x} are written twice")
    written[:] = True


def _check_notified(case: Case, engine_plan: EnginePlan, wanted: Sequence[RankId]) -> None:
    """Every partner hears from us once, and is told how many of our ranks it has to wait for."""
    told = {read.remote_rank: read.consumers for read in engine_plan.reads}
    told |= {notified.remote_rank: notified.consumers for notified in engine_plan.notify_only}
    if sorted(told) != list(wanted) or len(told) != len(engine_plan.reads) + len(engine_plan.notify_only):
        raise OracleError(f"ranks {sorted(told)} are notified instead of {list(wanted)}")
    for rank, consumers in told.items():
        waits_for = [
            reader for reader in range(case.decode.tp_size) if _deal_with_each_other(case, reader, rank.tp_rank)
        ]
        if consumers != len(waits_for):
            raise OracleError(f"rank {rank} is told to wait for {consumers} instead of {len(waits_for)}")


# --- command line ---------------------------------------------------------------------------------------------------


def case_of(seed: int, family: str) -> Case:
    """The case of a seed: the same in every process."""
    return draw_case(random.Random(f"{family} {seed}"), family)


def again(seed: int, family: str) -> str:
    """The command that judges that one case."""
    return f"python -m tests.unit.layout_oracle --examples 1 --first-seed {seed} --family {family}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 when a case failed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.unit.layout_oracle", description="Byte oracle of read plans."
    )
    parser.add_argument("--examples", type=int, default=10_000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--family", choices=FAMILIES, action="append", help="default: all of them in turn")
    options = parser.parse_args(arguments)
    families = options.family or FAMILIES
    counts: collections.Counter[str] = collections.Counter()
    descriptors, started = 0, time.monotonic()
    for number in range(options.examples):
        seed, family = options.first_seed + number // len(families), families[number % len(families)]
        case = case_of(seed, family)
        counts.update(case.features)
        try:
            descriptors += check(case)
        except Exception as error:
            print(f"seed {seed} of {family}: {type(error).__name__}: {error}\n{case}")
            print(f"again: {again(seed, family)}")
            return 1
    for feature, count in sorted(counts.items()):
        print(f"{count:8}  {feature}")
    seconds = time.monotonic() - started
    print(f"{options.examples} examples agree byte for byte; {descriptors} descriptors; {seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
