"""What vLLM's scheduler makes of a failed load, as the worker side's ledger reports it, with any cache groups.

Requests are reported, never blocks: see `connector.worker.ledger`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
from vllm.distributed.kv_events import BlockStored
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.lora.request import LoRARequest
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from connector.clock import BootClock
from connector.observe.log import LINES_PER_CAUSE
from connector.protocol import QuarantineLifted, ReceiveEnded
from connector.step_metadata import WorkerReport
from connector.worker.ledger import TransferLedger
from statemachine.failures import AbortedByClient, BadParams
from tests.unit.hybrid_engine import REMOTE_DECODE, HybridEngine, full, mla, replayed, ring, state, tokens_of, window
from tests.unit.log_lines import listening

FAMILIES: dict[str, Callable[[], Sequence[KVCacheSpec]]] = {
    "full attention": lambda: [full()],
    "window": lambda: [full(), window(40)],
    "cached states": lambda: [full(), state("align", speculative=1)],
    "ring buffer": lambda: [mla(), ring()],
    "window that is replayed": lambda: [mla(), replayed(40)],
}
TOKENS = [position % 500 for position in range(100)]
CACHED = 48
RANKS = 2


@pytest.fixture(autouse=True)
def any_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the worker side can register is not the matter here."""
    monkeypatch.setattr("connector.nixl_connector.require_supported", lambda *_: None)


@pytest.mark.parametrize("params", ["x", [1], 7, {"do_remote_prefill": 1}], ids=repr)
def test_parameters_of_another_type_end_the_request_and_no_engine(params: object) -> None:
    """vLLM's front end in Rust lets them pass (`vllm_xargs`), and its scheduler looks into them."""
    engine = HybridEngine([full()])
    engine.submit("a", TOKENS, params)
    engine.step()
    assert isinstance(engine.rejection_of("a").failure, BadParams)
    engine.step(KVConnectorOutput(finished_recving={"a"}, failed_recving={"a"}))
    assert engine.finished["a"] == "error"


class Load:
    """A request "a" on D, which has two ranks, that waits for its KV after a prefix hit."""

    def __init__(self, family: str, *, recomputes: bool = False) -> None:
        specs = FAMILIES[family]()
        prefill = HybridEngine(specs)
        prefill.prefill("a", TOKENS)
        self.decode = HybridEngine(specs, recomputes=recomputes, tells_events=True)
        self.decode.run("warm", [*TOKENS[:CACHED], 0, 0, 0], None)
        self.decode.events.clear()
        self.free_before = self.free_blocks
        self.ledgers = [TransferLedger(BootClock(), 30.0) for _ in range(RANKS)]
        self.aggregator = KVOutputAggregator(RANKS)
        self.pull = self.decode.load("a", TOKENS, prefill.params["a"])
        for ledger in self.ledgers:
            ledger.enter(self.pull)
        assert self.free_blocks < self.free_before

    @property
    def tokens_to_compute(self) -> int:
        """After the prefix hit, with the end of it that is replayed."""
        groups = self.decode.cache_config.kv_cache_groups
        return len(TOKENS) - CACHED + max(group.kv_cache_spec.prefix_replay_tokens for group in groups)

    @property
    def free_blocks(self) -> int:
        blocks: int = self.decode.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return blocks

    def report(self, rank: int, *, quarantined: bool = False) -> None:
        """A rank's actors have given up."""
        self.ledgers[rank].record(
            ReceiveEnded(
                request_id="a",
                failure=AbortedByClient(),
                local_block_ids=self.pull.local_block_ids,
                quarantined=quarantined,
            )
        )

    def succeed(self) -> None:
        """All ranks have read everything."""
        for ledger in self.ledgers:
            ledger.record(ReceiveEnded(request_id="a", failure=None, local_block_ids=[], quarantined=False))
        self.step()

    def lift(self, rank: int) -> None:
        """A rank's READs write no more."""
        self.ledgers[rank].record(QuarantineLifted(local_block_ids=self.pull.local_block_ids))

    def fail(self, *, quarantined: bool = False) -> None:
        """All ranks report in one step, one of them perhaps with READs in flight."""
        self.report(0, quarantined=quarantined)
        for rank in range(1, RANKS):
            self.report(rank)
        self.step()

    def step(self) -> None:
        """One in which every worker reports what its ledger has heard, and vLLM puts that together."""
        outputs: list[ModelRunnerOutput | None] = [
            ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=self._reported(ledger))
            for ledger in self.ledgers
        ]
        together = self.aggregator.aggregate(outputs)
        assert together is not None
        self.decode.step(together.kv_connector_output)

    def _reported(self, ledger: TransferLedger) -> KVConnectorOutput:
        results = ledger.take_results()
        return KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving | {each.request_id for each in ledger.take_loaded()},
            failed_recving=results.failed_recving,
            kv_connector_worker_meta=ledger.take_report(),
        )

    def references_found(self) -> Counter[int]:
        """Of every block, as vLLM's pool counts them."""
        blocks = self.decode.scheduler.kv_cache_manager.block_pool.blocks
        return +Counter({block.block_id: block.ref_cnt for block in blocks if not block.is_null})

    def references_expected(self) -> Counter[int]:
        """One for each table that a block is in; no quarantine."""
        tables = [table for name in self.decode.scheduler.requests for table in self.decode.tables(name)]
        return Counter(block.block_id for table in tables for block in table if not block.is_null)

    def references(self) -> set[int]:
        """How often the blocks of the load are held."""
        blocks = self.decode.scheduler.kv_cache_manager.block_pool.blocks
        return {blocks[block_id].ref_cnt for block_id in self.pull.local_block_ids}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_failed_load_ends_the_request_and_leaves_nothing_behind(family: str) -> None:
    load = Load(family)
    load.fail()
    assert load.decode.finished["a"] == "error"
    assert load.free_blocks == load.free_before
    load.decode.run("again", TOKENS, None)
    # Nothing of what was to be loaded is taken for cached.
    assert load.decode.computed["again"] == load.tokens_to_compute


@pytest.mark.parametrize("family", FAMILIES)
def test_a_failed_load_is_computed_here(family: str) -> None:
    load = Load(family, recomputes=True)
    load.fail()
    for _ in range(5):
        load.decode.step()
    assert load.decode.finished["a"] == "length"
    assert load.decode.computed["a"] == load.tokens_to_compute
    assert load.free_blocks == load.free_before


def stored(engine: HybridEngine) -> set[tuple[int | None, object]]:
    """Blocks of which routers were told since `events` was cleared: group and hash. None is told of twice."""
    told = [event for event in engine.events if isinstance(event, BlockStored)]
    blocks = [(event.group_idx, block) for event in told for block in event.block_hashes]
    assert len(set(blocks)) == len(blocks)
    return set(blocks)


def computed_alone(family: str) -> set[tuple[int | None, object]]:
    engine = Load(family).decode
    engine.run("b", TOKENS, None)
    return stored(engine)


@pytest.mark.parametrize("family", FAMILIES)
def test_routers_are_told_of_blocks_when_they_are_loaded(family: str) -> None:
    """By vLLM's KV cache events. Of states in the middle of a prompt there are none on D."""
    load = Load(family)
    load.step()
    assert not load.decode.events
    load.succeed()
    for _ in range(3):
        load.decode.step()
    assert load.decode.finished["a"] == "length"
    wanted = computed_alone(family)
    assert wanted
    if family == "cached states":
        assert stored(load.decode) < wanted
    else:
        assert stored(load.decode) == wanted


@pytest.mark.parametrize("quarantined", [False, True], ids=["over", "in quarantine"])
@pytest.mark.parametrize("recomputes", [False, True], ids=["fail", "recompute"])
@pytest.mark.parametrize("family", FAMILIES)
def test_routers_are_told_nothing_of_blocks_that_were_not_loaded(
    family: str, recomputes: bool, quarantined: bool
) -> None:
    load = Load(family, recomputes=recomputes)
    load.fail(quarantined=quarantined)
    for _ in range(5):
        load.decode.step()
    wanted = computed_alone(family) if recomputes else set()
    assert stored(load.decode) == wanted
    if quarantined:
        load.lift(0)
        load.step()
        assert stored(load.decode) == wanted


@pytest.mark.parametrize("recomputes", [False, True], ids=["fail", "recompute"])
@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_of_all_groups_stay_out_of_the_pool_while_reads_may_write_to_them(family: str, recomputes: bool) -> None:
    load = Load(family, recomputes=recomputes)
    load.fail(quarantined=True)
    for _ in range(5):
        load.decode.step()
    assert load.decode.finished["a"] == ("length" if recomputes else "error")
    assert load.references() == {1}
    assert load.free_blocks == load.free_before - len(load.pull.local_block_ids)
    load.lift(0)
    load.step()
    assert load.free_blocks == load.free_before


@pytest.mark.parametrize("recomputes", [False, True], ids=["fail", "recompute"])
@pytest.mark.parametrize("reported_before", [True, False], ids=["a step before", "in the same step"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_quarantine_that_is_lifted_as_the_last_rank_reports(
    family: str, reported_before: bool, recomputes: bool
) -> None:
    """The lift does not free what the request itself still holds; and what the request frees is free once."""
    load = Load(family, recomputes=recomputes)
    load.report(0, quarantined=True)
    if reported_before:
        load.step()
        assert "a" not in load.decode.finished  # the other rank has not said anything
        assert load.references() == {2}
    load.report(1)
    load.lift(0)
    load.step()
    for number in range(5):  # somebody else wants blocks meanwhile
        load.decode.submit(f"other {number}", [number, *TOKENS[1:]], None, max_tokens=4)
        load.decode.step()
        assert load.references_found() == load.references_expected()
    assert load.decode.finished["a"] == ("length" if recomputes else "error")
    for _ in range(8):
        load.decode.step()
    assert load.free_blocks == load.free_before
    free = load.decode.scheduler.kv_cache_manager.block_pool.free_block_queue.get_all_free_blocks()
    assert len({block.block_id for block in free}) == load.free_blocks


def test_vllm_takes_no_single_blocks_from_an_engine_with_several_groups() -> None:
    """Why the ledger reports none."""
    load = Load("window")
    with pytest.raises(RuntimeError, match="multiple KV cache groups"):
        load.decode.step(KVConnectorOutput(finished_recving={"a"}, failed_recving={"a"}, invalid_block_ids={3}))


def test_a_burst_of_quarantines_is_a_few_lines() -> None:
    """As of a prefill engine that hangs while hundreds of requests read from it: a line a step, and those bounded."""
    decode = HybridEngine([full()], blocks=1 + 64)
    bursts = [[[number] for number in range(first, first + 4)] * RANKS for first in range(1, 61, 4)]
    with listening() as lines:
        for blocks in bursts:
            decode.step(KVConnectorOutput(kv_connector_worker_meta=WorkerReport(quarantined=blocks)))
        for blocks in bursts:
            decode.step(KVConnectorOutput(kv_connector_worker_meta=WorkerReport(lifted=blocks)))
    what_to_do = "; what to do: nixl-actor ps names the engines whose READs do not end"
    said = [line for line in lines.texts if line.startswith("4 blocks are quarantined until their READs have ended")]
    in_all = [4 * (number + 1) for number in range(LINES_PER_CAUSE)]
    assert all(f", {blocks} in all{what_to_do}" in line for line, blocks in zip(said, in_all, strict=True))
    said = [line for line in lines.texts if line.startswith("4 quarantined blocks are free again")]
    left = [60 - blocks for blocks in in_all]
    assert all(f", {blocks} are left" in line for line, blocks in zip(said, left, strict=True))


def test_who_has_blocks_is_served_while_a_failed_load_finds_too_few() -> None:
    """vLLM stands still otherwise, and for good: "a" is at the head of its queue and "b", which lacks nothing, behind.
    The blocks of "a" are quarantined, and what is left of the pool belongs to "b"."""
    prompts = {"a": TOKENS[:80], "b": TOKENS[10:90]}
    prefill = HybridEngine([full()])
    decode = HybridEngine([full()], blocks=1 + 2 * 5, recomputes=True)
    for name, tokens in prompts.items():
        prefill.prefill(name, tokens)
        decode.load(name, tokens, prefill.params[name])
    blocks = decode.pull_of("a").local_block_ids
    decode.step(
        KVConnectorOutput(
            finished_recving={"a", "b"},
            failed_recving={"a"},
            kv_connector_worker_meta=WorkerReport(quarantined=[blocks]),
        )
    )
    for _ in range(5):
        decode.step()
    assert list(decode.finished) == ["b", "a"], "the second in the blocks of the first"
    assert decode.computed["a"] == len(prompts["a"])


@pytest.mark.parametrize("failures", [1, 2])
def test_failed_loads_are_computed_although_loads_of_higher_priority_find_too_few_blocks(failures: int) -> None:
    """vLLM stands still otherwise, and for good, with all blocks free: it reserves those of the failed loads, the load
    before them in the queue does not fit beside that, and nobody behind it is looked at."""
    prefill = HybridEngine([full()])
    decode = HybridEngine([full()], blocks=1 + 10, recomputes=True, policy="priority")
    failing = {f"failing {number}": TOKENS[number : 80 + number] for number in range(failures)}
    urgent = {f"urgent {number}": tokens_of(96, seed=1 + number) for number in range(2)}
    for name, tokens in failing.items():
        prefill.prefill(name, tokens)
        decode.load(name, tokens, prefill.params[name], priority=1)
    decode.step(KVConnectorOutput(finished_recving=set(failing), failed_recving=set(failing)))
    for name, tokens in urgent.items():
        prefill.prefill(name, tokens)
        decode.submit(name, tokens, prefill.params[name])
    for _ in range(20):
        loaded = set(urgent) & decode.loading
        decode.step(KVConnectorOutput(finished_recving=loaded))
    assert decode.finished.keys() == failing.keys() | urgent.keys()
    assert {decode.computed[name] for name in failing} == {80}
    assert {decode.computed[name] for name in urgent} == {1}, "their KV was loaded"


def test_nor_do_they_wait_for_one_when_the_places_for_adapters_were_taken_as_they_failed() -> None:
    """vLLM does not ask then, and takes them out of the queue of those that hold blocks all the same."""
    prefill = HybridEngine([full()])
    decode = HybridEngine([full()], blocks=1 + 10, recomputes=True, policy="priority")
    decode.scheduler.lora_config = SimpleNamespace(max_loras=1)
    one, other = (LoRARequest(f"adapter {number}", number, f"/nowhere/{number}") for number in (1, 2))
    failing, urgent = TOKENS[:80], tokens_of(96, seed=1)
    prefill.run("failing", failing, REMOTE_DECODE, lora_request=one)
    prefill.prefill("urgent", urgent)
    decode.load("failing", failing, prefill.params["failing"], priority=2, lora_request=one)
    decode.submit("local", tokens_of(5, seed=2), None, max_tokens=4, priority=1, lora_request=other)
    decode.step()
    decode.submit("urgent", urgent, prefill.params["urgent"])
    decode.step(KVConnectorOutput(finished_recving={"failing"}, failed_recving={"failing"}))
    for _ in range(20):
        decode.step(KVConnectorOutput(finished_recving={"urgent"} & decode.loading))
    assert list(decode.finished) == ["local", "failing", "urgent"]


def test_nobody_but_failed_loads_passes_one_that_finds_too_few_blocks() -> None:
    """Others would have the blocks that it waits for."""
    prefill = HybridEngine([full()])
    decode = HybridEngine([full()], blocks=1 + 10, recomputes=True, policy="priority")
    failing, urgent, other = TOKENS[:80], tokens_of(96, seed=1), tokens_of(80, seed=2)
    prefill.prefill("failing", failing)
    prefill.prefill("urgent", urgent)
    decode.load("failing", failing, prefill.params["failing"], priority=2)
    decode.step(KVConnectorOutput(finished_recving={"failing"}, failed_recving={"failing"}))
    decode.submit("urgent", urgent, prefill.params["urgent"])
    decode.submit("other", other, None, priority=1)
    for _ in range(10):
        decode.step(KVConnectorOutput(finished_recving={"urgent"} & decode.loading))
    assert list(decode.finished) == ["failing", "urgent", "other"]
