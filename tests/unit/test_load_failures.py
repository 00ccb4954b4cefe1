"""What vLLM's scheduler makes of a failed load, as the worker side's ledger reports it, with any cache groups.

Requests are reported, never blocks: see `connector.worker.ledger`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.outputs import KVConnectorOutput

from connector.runtime.clock import MonotonicClock
from connector.runtime.messages import QuarantineLifted, ReceiveEnded
from connector.worker.ledger import TransferLedger
from statemachine.failures import AbortedByClient
from tests.unit.hybrid_engine import HybridEngine, full, mla, replayed, ring, state, window

FAMILIES: dict[str, Callable[[], Sequence[KVCacheSpec]]] = {
    "full attention": lambda: [full()],
    "window": lambda: [full(), window(40)],
    "cached states": lambda: [full(), state("align", speculative=1)],
    "ring buffer": lambda: [mla(), ring()],
    "window that is replayed": lambda: [mla(), replayed(40)],
}
TOKENS = [position % 500 for position in range(100)]
CACHED = 48


@pytest.fixture(autouse=True)
def any_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the worker side can register is not the matter here."""
    monkeypatch.setattr("connector.nixl_connector.require_supported", lambda *_: None)


class Load:
    """A request "a" on D that waits for its KV, after a prefix hit."""

    def __init__(self, family: str, *, recomputes: bool = False) -> None:
        specs = FAMILIES[family]()
        prefill = HybridEngine(specs)
        prefill.prefill("a", TOKENS)
        self.decode = HybridEngine(specs, recomputes=recomputes)
        self.decode.run("warm", [*TOKENS[:CACHED], 0, 0, 0], None)
        self.free_before = self.free_blocks
        self.ledger = TransferLedger(MonotonicClock(), 30.0)
        self.pull = self.decode.load("a", TOKENS, prefill.params["a"])
        self.ledger.enter(self.pull)
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

    def fail(self, *, quarantined: bool = False) -> None:
        self.ledger.hear(
            ReceiveEnded(
                request_id="a",
                failure=AbortedByClient(),
                local_block_ids=self.pull.local_block_ids,
                quarantined=quarantined,
            )
        )
        self.step()

    def step(self) -> None:
        """One in which the worker reports what its ledger has heard."""
        results = self.ledger.take_results()
        self.decode.step(
            KVConnectorOutput(
                finished_sending=results.finished_sending,
                finished_recving=results.finished_recving,
                failed_recving=results.failed_recving,
                kv_connector_worker_meta=self.ledger.take_report(),
            )
        )


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


@pytest.mark.parametrize("recomputes", [False, True], ids=["fail", "recompute"])
@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_of_all_groups_stay_out_of_the_pool_while_reads_may_write_to_them(family: str, recomputes: bool) -> None:
    load = Load(family, recomputes=recomputes)
    load.fail(quarantined=True)
    for _ in range(5):
        load.decode.step()
    assert load.decode.finished["a"] == ("length" if recomputes else "error")
    blocks = load.decode.scheduler.kv_cache_manager.block_pool.blocks
    assert all(blocks[block_id].ref_cnt == 1 for block_id in load.pull.local_block_ids)
    assert load.free_blocks == load.free_before - len(load.pull.local_block_ids)
    load.ledger.hear(QuarantineLifted(local_block_ids=load.pull.local_block_ids))
    load.step()
    assert load.free_blocks == load.free_before


def test_vllm_takes_no_single_blocks_from_an_engine_with_several_groups() -> None:
    """Why the ledger reports none."""
    load = Load("window")
    with pytest.raises(RuntimeError, match="multiple KV cache groups"):
        load.decode.step(KVConnectorOutput(finished_recving={"a"}, failed_recving={"a"}, invalid_block_ids={3}))
