"""Read plans carried out by NIXL: two processes, an agent for each rank, and the byte oracle's judgement.

tests/unit/layout_oracle.py carries a plan out as plain copies; here the same cases go through what a connector does
with a plan: prepared lists of runs, descriptor ids, READs, blocks that are put in order on the device, and zeros for
what no READ fills. That takes the plan's word for nothing: NIXL numbers the descriptors of a run itself, refuses memory
that is not registered and pairs of different lengths, and joins neighbours. All decode ranks of a case read at once,
each from all its prefill ranks, and all memory of each is compared with what the oracle expects.

The prefill ranks live in a process of their own (`prefill_ranks`), the decode ranks in this one.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
import torch
import trio

from connector.layout.geometry import RankId
from connector.layout.landing import Permute
from connector.layout.plan import ReadPlan
from connector.layout.sources import partners
from connector.ports.nixl import DescriptorIds, MemoryRun, NixlEvent, PortReadEnded
from connector.protocol import Memory
from connector.worker.cache_memory import CacheMemory, Numbers
from connector.worker.finishing import Finishing, Loaded, run_on
from connector.worker.landing import BlockPermuter, landing_caches
from tests.gpu.device_memory import DeviceMemory
from tests.gpu.patience import patient
from tests.gpu.prefill_ranks import CLOSE_SECONDS, PrefillProcess, PrefillRank, open_port
from tests.rig.layouts import plan_engine
from tests.unit.layout_oracle import (
    FAMILIES,
    Case,
    Expectation,
    OracleError,
    Rank,
    again,
    case_of,
    make_content,
    permutation_of,
)

pytestmark = pytest.mark.timeout(patient(300))

READ_SECONDS = patient(60.0)
SEEDS = 10_000
"""Among how many cases of a family that of a row is looked for."""

Change = Callable[[ReadPlan, DescriptorIds, DescriptorIds], tuple[DescriptorIds, DescriptorIds]]
"""What to do to the local and remote descriptor ids of a READ before it is posted."""


# --- cases ----------------------------------------------------------------------------------------------------------

Condition = Callable[[Case], bool]


def _all(*conditions: Condition) -> Condition:
    return lambda case: all(condition(case) for condition in conditions)


def _has(*features: str) -> Condition:
    return lambda case: set(features) <= set(case.features)


def _has_ratio(decode: int, prefill: int) -> Condition:
    return lambda case: case.decode.tp_size * prefill == case.prefill.tp_size * decode


def _has_heads(case: Case) -> bool:
    """Several in a page on both sides, so that ranks of different numbers hold different parts."""
    heads = case.shapes[0].components[0].units
    return all(heads >= 2 * engine.tp_size for engine in (case.decode, case.prefill))


def _has_few_heads(case: Case) -> bool:
    """Some ranks hold the same head, but not all do."""
    return 1 < case.shapes[0].components[0].units < max(case.decode.tp_size, case.prefill.tp_size)


def _has_layouts(decode: str, prefill: str) -> Condition:
    """Two orders of axes, and pages of several heads and tokens, which alone tell them apart."""
    return lambda case: (
        _has_heads(case)
        and (decode, prefill) == (case.decode.layout_name, case.prefill.layout_name)
        and all(
            math.gcd(ours.tokens_per_kernel_block, theirs.tokens_per_kernel_block) > 1
            for ours, theirs in zip(case.decode.groups, case.prefill.groups, strict=True)
        )
    )


def _has_slots(of_rank: int) -> Condition:
    return lambda case: case.shapes[0].components[0].units == of_rank * case.decode.tp_size


def _groups_apart(case: Case) -> bool:
    return "groups share tensors" not in case.features


def _blocks_outermost_on_one_side(case: Case) -> bool:
    return case.decode.layout_name.startswith("B") != case.prefill.layout_name.startswith("B")


ROWS: dict[str, tuple[str, Condition]] = {
    "equal TP": ("attention", _all(_has("attention"), _has_heads, _has_ratio(1, 1))),
    "D_TP twice P_TP": ("attention", _all(_has("attention"), _has_heads, _has_ratio(2, 1))),
    "D_TP four times P_TP": ("attention", _all(_has("attention"), _has_heads, _has_ratio(4, 1))),
    "P_TP twice D_TP": ("attention", _all(_has("attention"), _has_heads, _has_ratio(1, 2))),
    "P_TP four times D_TP": ("attention", _all(_has("attention"), _has_heads, _has_ratio(1, 4))),
    "neither TP divides the other": (
        "attention",
        _all(_has("attention", "neither TP divides the other"), _has_heads),
    ),
    "GQA, fewer heads than ranks of D": (
        "attention",
        _all(_has("GQA with fewer heads than ranks of D"), _has_few_heads, _has_ratio(4, 1)),
    ),
    "GQA, fewer heads than ranks of P": (
        "attention",
        _all(_has("GQA with fewer heads than ranks of P"), _has_few_heads, _has_ratio(1, 4)),
    ),
    "GQA, fewer heads than ranks of both": (
        "attention",
        _all(
            _has("GQA with fewer heads than ranks of D", "GQA with fewer heads than ranks of P"),
            _has_few_heads,
            _has_ratio(2, 1),
        ),
    ),
    "MLA, D_TP twice P_TP": ("attention", _all(_has("MLA"), _has_ratio(2, 1))),
    "MLA, P_TP twice D_TP": ("attention", _all(_has("MLA"), _has_ratio(1, 2))),
    "MLA, block lengths of each layer's own": (
        "attention",
        lambda case: (
            case.shapes[0].components[0].name == "latent" and _has("blocks of several lengths in a group")(case)
        ),
    ),
    "entries of several tokens": (
        "attention",
        _all(_has("entries of several tokens", "P's kernel block smaller"), _has_ratio(1, 2)),
    ),
    "entries of several kinds in a group, with windows": (
        "groups",
        _all(_has("entries of several kinds in a group", "window"), _has_ratio(2, 1)),
    ),
    "sliding windows": ("groups", _all(_has("window", "attention"), _groups_apart)),
    "sliding windows, groups share tensors": ("groups", _has("window", "attention", "groups share tensors")),
    "sliding windows, groups share tensors, D_TP twice P_TP": (
        "groups",
        _all(_has("window", "attention", "groups share tensors"), _has_ratio(2, 1)),
    ),
    "sliding windows, groups share tensors, P_TP twice D_TP": (
        "groups",
        _all(_has("window", "attention", "groups share tensors"), _has_ratio(1, 2)),
    ),
    "states and attention, equal TP": ("states", _all(_has("states", "attention"), _has_ratio(1, 1))),
    "states and attention, D_TP twice P_TP": ("states", _all(_has("states", "attention"), _has_ratio(2, 1))),
    "states and attention, D_TP four times P_TP": ("states", _all(_has("states", "attention"), _has_ratio(4, 1))),
    "states and attention, P_TP twice D_TP": ("states", _all(_has("states", "attention"), _has_ratio(1, 2))),
    "states and attention, P_TP four times D_TP": ("states", _all(_has("states", "attention"), _has_ratio(1, 4))),
    "states in the pages of attention": ("states", _has("states", "attention", "groups share tensors")),
    "P's blocks smaller": ("attention", _has("attention", "P's kernel block smaller")),
    "P's blocks larger": ("attention", _has("attention", "P's kernel block larger")),
    "neither block divides the other": ("attention", _has("attention", "neither kernel block divides the other")),
    "equal kernel pages under different logical sizes": (
        "attention",
        _has("attention", "equal kernel blocks", "different ratios of logical to kernel block"),
    ),
    "heads before tokens into tokens before heads": ("attention", _has_layouts("LBNHC", "LBHNC")),
    "tokens before heads into heads before tokens": ("attention", _has_layouts("LBHNC", "LBNHC")),
    "heads before tokens into tokens before heads, D_TP twice P_TP": (
        "attention",
        _all(_has_layouts("LBNHC", "LBHNC"), _has_ratio(2, 1)),
    ),
    "heads before tokens into tokens before heads, P_TP twice D_TP": (
        "attention",
        _all(_has_layouts("LBNHC", "LBHNC"), _has_ratio(1, 2)),
    ),
    "heads before tokens into tokens before heads, P's blocks smaller": (
        "attention",
        _all(_has_layouts("LBNHC", "LBHNC"), _has("P's kernel block smaller")),
    ),
    "heads before tokens into tokens before heads, sliding windows": (
        "groups",
        _all(_has_layouts("LBNHC", "LBHNC"), _has("window")),
    ),
    "heads before tokens on both sides, P's blocks smaller": (
        "chunks",
        _all(_has_layouts("LBHNC", "LBHNC"), _has("P's kernel block smaller"), _has_ratio(1, 1)),
    ),
    "heads before tokens on both sides, P's blocks smaller, D_TP twice P_TP": (
        "chunks",
        _all(_has_layouts("LBHNC", "LBHNC"), _has("P's kernel block smaller"), _has_ratio(2, 1)),
    ),
    "heads before tokens on both sides, P's blocks smaller, P_TP twice D_TP": (
        "chunks",
        _all(_has_layouts("LBHNC", "LBHNC"), _has("P's kernel block smaller"), _has_ratio(1, 2)),
    ),
    "heads before tokens on both sides, P's blocks smaller, sliding windows": (
        "chunks",
        _all(_has_layouts("LBHNC", "LBHNC"), _has("P's kernel block smaller", "window")),
    ),
    "heads outside of blocks": ("attention", _has_layouts("LHBNC", "LHBNC")),
    "blocks outermost": ("attention", _all(_has("attention", "block outermost on both sides"), _has_heads)),
    "blocks outermost on one side": ("attention", _all(_has("attention"), _has_heads, _blocks_outermost_on_one_side)),
    "padded pages": ("attention", _all(_has("attention", "padding"), _has_heads)),
    "prefix hit": ("attention", _all(_has("attention", "prefix hit"), _has_heads)),
    "two pipeline stages": ("attention", _all(_has("P with 2 pipeline stages", "attention"), _has_heads)),
    "three pipeline stages, P_TP twice D_TP": (
        "attention",
        _all(_has("P with 3 pipeline stages", "attention"), _has_heads, _has_ratio(1, 2)),
    ),
    "pipeline stages, groups share tensors": (
        "groups",
        _has("P with 2 pipeline stages", "attention", "groups share tensors"),
    ),
    "pipeline stages, states and attention": ("states", _has("P with 2 pipeline stages", "attention", "states")),
    "K and V in slots of their own": ("slots", _all(_has("slots", "window"), _has_slots(4))),
    "K and V in planes, blocks outermost on one side": (
        "slots",
        _all(_has("slots"), _has_slots(2), _blocks_outermost_on_one_side),
    ),
    "ring buffers, equal TP": ("whole", _all(_has("ring buffers", "attention"), _groups_apart, _has_ratio(1, 1))),
    "ring buffers, D_TP twice P_TP": ("whole", _all(_has("ring buffers", "MLA"), _groups_apart, _has_ratio(2, 1))),
    "ring buffers in the pages of attention, P_TP twice D_TP": (
        "whole",
        _all(_has("ring buffers", "attention", "groups share tensors"), _has_ratio(1, 2)),
    ),
    "states that all ranks hold alike, D_TP twice P_TP": (
        "whole",
        _all(_has("states that all ranks hold alike", "attention"), _has_ratio(2, 1)),
    ),
    "states that all ranks hold alike, P_TP twice D_TP": (
        "whole",
        _all(_has("states that all ranks hold alike", "attention"), _has_ratio(1, 2)),
    ),
    "undivided states, equal TP": ("whole", _all(_has("undivided states", "attention"), _groups_apart)),
    "undivided states in the pages of attention": (
        "whole",
        _has("undivided states", "attention", "groups share tensors"),
    ),
    "tokens split on P": ("context", _all(_has("tokens split on P, tokens whole on D"), _has_ratio(1, 4))),
    "tokens split on D": ("context", _all(_has("tokens whole on P, tokens split on D"), _has_ratio(4, 1))),
    "tokens split on both": ("context", _all(_has("tokens split on P, tokens split on D"), _has_ratio(1, 1))),
    "tokens split on both, P's ranks twice D's": (
        "context",
        _all(_has("tokens split on P, tokens split on D"), _has_ratio(1, 2)),
    ),
    "tokens split on both, D's ranks twice P's": (
        "context",
        _all(_has("tokens split on P, tokens split on D"), _has_ratio(2, 1)),
    ),
}
"""What has to be shown: family of cases, and what makes a case one of the row."""


def _is_worth_it(case: Case) -> bool:
    """More than one rank somewhere, and every cache group has something to read, of each of several ranks' tokens."""
    return max(case.decode.tp_size, case.prefill.tp_size) > 1 and all(
        max(table.local_first * ours, table.remote_first * theirs)
        + (max(ours, theirs) if "context" in case.family else 0)
        < min(
            (table.local_first + len(table.local)) * ours,
            (table.remote_first + len(table.remote)) * theirs,
            math.inf if table.num_tokens is None else table.num_tokens,
        )
        for table, ours, theirs in zip(
            case.tables,
            (group.positions_per_id for group in case.decode.groups),
            (group.positions_per_id for group in case.prefill.groups),
            strict=True,
        )
    )


@functools.cache
def _cases() -> dict[str, tuple[str, int]]:
    """Family and seed of the case of each row; no case is that of two."""
    chosen: dict[str, tuple[str, int]] = {}
    for seed, family in itertools.product(range(SEEDS), FAMILIES):
        case = case_of(seed, family)
        lacking = [row for row in ROWS if row not in chosen]
        if not lacking:
            break
        row = next((row for row in lacking if ROWS[row][0] == family and ROWS[row][1](case)), None)
        if row is not None and _is_worth_it(case):
            chosen[row] = family, seed
    return chosen


# --- what a connector does with a plan ------------------------------------------------------------------------------


def _as_planned(
    _: ReadPlan, local_ids: DescriptorIds, remote_ids: DescriptorIds
) -> tuple[DescriptorIds, DescriptorIds]:
    return local_ids, remote_ids


def _carry_out(
    case: Case,
    prefill: PrefillProcess,
    change: Change = _as_planned,
    *,
    permute: Permute = Permute.NEVER,
    device: torch.device | None = None,
) -> int:
    """All decode ranks read; returns the number of descriptors. Raises OracleError when the bytes are wrong.

    `permute`: for which peers READs go to a landing layout, and the blocks are put in order then.
    `device`: of D's memory; None: that of P's.
    """
    content = make_content(case, np.random.default_rng(case.noise))
    homes = [DeviceMemory(device or prefill.device) for _ in case.decode.ranks]
    ranks = [
        Rank(case, case.decode, number, np.random.default_rng((case.noise, *number)), home=home)
        for number, home in zip(case.decode.ranks, homes, strict=True)
    ]
    expectations = [Expectation(case, rank, content) for rank in ranks]
    descriptors = 0

    async def read(rank: Rank, home: DeviceMemory) -> None:
        nonlocal descriptors
        home.upload()
        descriptors += await _read(case, rank, home, prefill_ranks, change, permute=permute)
        home.download()

    async def read_all() -> None:
        with trio.fail_after(READ_SECONDS):
            async with trio.open_nursery() as nursery:
                for rank, home in zip(ranks, homes, strict=True):
                    nursery.start_soon(read, rank, home)

    with prefill.ranks(case) as prefill_ranks:
        trio.run(read_all)
    for expectation in expectations:
        expectation.require()
    return descriptors


async def _read(
    case: Case,
    rank: Rank,
    memory: DeviceMemory,
    prefill_ranks: Mapping[RankId, PrefillRank],
    change: Change,
    *,
    permute: Permute,
) -> int:
    """One decode rank's part; returns the number of descriptors."""
    sizes = (case.decode.tp_size, case.prefill.tp_size, case.decode.dcp_size, case.prefill.dcp_size)
    in_stage = partners(rank.tp_rank, *sizes)
    remotes = [each.layout for number, each in prefill_ranks.items() if number.tp_rank in in_stage]
    engine_plan = plan_engine(rank.layout, remotes, permute)
    pairs = engine_plan.pair(case.tables)
    descriptors, posted = 0, set()
    send, events = trio.open_memory_channel[NixlEvent](math.inf)
    port = open_port(case.decode, rank, memory)
    try:
        port.set_event_callback(send.send_nowait)
        for read, of_read in zip(engine_plan.reads, pairs, strict=True):
            local_ids, remote_ids = change(read, *read.descriptor_ids(of_read))
            agent = await port.add_remote_agent(prefill_ranks[read.remote_rank].agent_metadata)
            local = await port.prepare_local(read.local_runs)
            remote = await port.prepare_remote(agent, read.remote_runs)
            if not local_ids.size:
                continue
            posted.add(port.post_read(local, local_ids, remote, remote_ids))
            descriptors += local_ids.size
        while posted:
            event = await events.receive()
            if isinstance(event, PortReadEnded):
                assert event.error is None, event
                posted.remove(event.handle)
    finally:
        with trio.CancelScope(shield=True):
            assert await port.aclose(CLOSE_SECONDS) == []
    unfilled = _memory(*engine_plan.unfilled(pairs[0]))
    permutation = None if engine_plan.landing is None else permutation_of(case, engine_plan.landing)
    await _finish(rank, memory, Loaded("request", (), permutation, unfilled))
    return descriptors


def _memory(addresses: Numbers, lengths: Numbers) -> Memory | None:
    return Memory(addresses=addresses, lengths=lengths) if addresses.size else None


async def _finish(rank: Rank, memory: DeviceMemory, loaded: Loaded) -> None:
    """What the product does before vLLM is told."""
    caches = {layer: memory.twin(cache) for layer, cache in rank.caches.items()}
    landing = BlockPermuter(landing_caches(rank.layout, caches))
    finishing = Finishing(run_on(memory.device), landing, CacheMemory(memory.tensors))
    finished = finishing.finish([loaded]).usable
    while not finished:
        await trio.sleep(0.001)
        finished = finishing.finish([]).usable
    assert finished == {loaded.request_id}


# --- tests ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ROWS)
def test_all_bytes_are_right(row: str, prefill: PrefillProcess) -> None:
    family, seed = _cases()[row]
    try:
        assert _carry_out(case_of(seed, family), prefill) > 0
    except Exception as error:
        error.add_note(f"the plan alone: {again(seed, family)}")
        raise


@pytest.mark.parametrize("row", [row for row in ROWS if "before" in row])
def test_blocks_that_land_in_the_peers_order_are_put_in_ours(row: str, prefill: PrefillProcess) -> None:
    """The same bytes with fewer descriptors."""
    family, seed = _cases()[row]
    case = case_of(seed, family)
    permute = Permute.BLOCK_SIZES if "both" in row else Permute.ORDERS
    assert _carry_out(case, prefill, permute=permute) < _carry_out(case, prefill)


@pytest.mark.parametrize("row", ["equal TP", "D_TP twice P_TP", "states and attention, equal TP"])
@pytest.mark.parametrize("device_of_p", [True, False], ids=["P has a device", "D has a device"])
def test_one_side_on_a_device(row: str, device_of_p: bool, gpu: torch.device) -> None:
    """An engine on CPUs, or one that stages KV on the host, beside one that does not."""
    family, seed = _cases()[row]
    host = torch.device("cpu")
    with PrefillProcess(gpu if device_of_p else host) as prefill:
        assert _carry_out(case_of(seed, family), prefill, device=host if device_of_p else gpu) > 0


def _neighbour(runs: Sequence[MemoryRun], number: int) -> int:
    """Another descriptor of the same run, so that nothing but its place in memory differs."""
    end = 0
    for run in runs:
        end += run.count
        if number < end:
            assert run.count > 1
            return number + 1 if number + 1 < end else number - 1
    raise AssertionError(f"{number} is not prepared")


def _shift_remote(
    read: ReadPlan, local_ids: DescriptorIds, remote_ids: DescriptorIds
) -> tuple[DescriptorIds, DescriptorIds]:
    shifted = remote_ids.copy()
    shifted[-1] = _neighbour(read.remote_runs, int(shifted[-1]))
    return local_ids, shifted


def _shift_local(
    read: ReadPlan, local_ids: DescriptorIds, remote_ids: DescriptorIds
) -> tuple[DescriptorIds, DescriptorIds]:
    shifted = local_ids.copy()
    shifted[-1] = _neighbour(read.local_runs, int(shifted[-1]))
    return shifted, remote_ids


@pytest.mark.parametrize("shift", [_shift_remote, _shift_local])
@pytest.mark.parametrize("row", ["equal TP", "P_TP twice D_TP", "states and attention, D_TP twice P_TP"])
def test_a_shifted_descriptor_is_noticed(row: str, shift: Change, prefill: PrefillProcess) -> None:
    """One id of each READ; without the fault the same case is right (above)."""
    family, seed = _cases()[row]
    with pytest.raises(OracleError, match="are wrong"):
        _carry_out(case_of(seed, family), prefill, shift)
