"""Staged on the host: whenever vLLM's own scheduler lends blocks, the host has what the device wrote into them.

The device is a model: each write of a token leaves a new mark in the slot that the scheduler's block tables name, and a
save copies the marks of a block. What is lent has to be the same on both sides. Blocks that the host never got, or got
too early, differ.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import CachedRequestData, KVConnectorBlockState, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec
from vllm.v1.request import RequestStatus

from connector.families import Keeps
from connector.protocol import LeaseGranted
from connector.scheduler.cache_groups import TransferGroup
from connector.scheduler.host_saves import blocks_to_save
from connector.step_metadata import StepMetadata
from connector.wire.params import RemotePrefill, parse_remote_prefill
from tests.unit.hybrid_engine import (
    BLOCK_TOKENS,
    MAX_MODEL_TOKENS,
    HybridEngine,
    chunked,
    full,
    mla,
    state,
    window,
)
from tests.unit.vllm_setup import scheduling_config

HALF = BLOCK_TOKENS // 2

Marks = dict[tuple[int, int], dict[int, int]]
"""By (cache group, block): mark by slot."""


class StagedEngine(HybridEngine):
    """A prefill engine on an accelerator that NIXL cannot reach."""

    def __init__(self, specs: Sequence[KVCacheSpec], **options: Any) -> None:
        super().__init__(specs, **options)
        self._specs = specs
        self._marks = 0
        self.device: Marks = {}
        self.host: Marks = {}
        self.saves: list[tuple[list[int], ...]] = []

    def forward(self, output: SchedulerOutput, metadata: StepMetadata) -> None:
        cached = output.scheduled_cached_reqs
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for name, scheduled in output.num_scheduled_tokens.items():
            tables = self.scheduler.kv_cache_manager.get_block_ids(name)
            for group, (spec, table) in enumerate(zip(self._specs, tables, strict=True)):
                for token in range(starts[name], starts[name] + scheduled):
                    self._write(spec, group, table, token)
        self.saves.append(metadata.saves)
        for group, blocks in enumerate(metadata.saves):
            for block in blocks:
                self.host[group, block] = copy.copy(self.device[group, block])

    def _write(self, spec: KVCacheSpec, group: int, table: Sequence[int], token: int) -> None:
        self._marks += 1
        slot = 0 if isinstance(spec, MambaSpec) else token % BLOCK_TOKENS
        self.device.setdefault((group, table[token // spec.block_size]), {})[slot] = self._marks

    def expect_on_host(self, lent: RemotePrefill) -> None:
        """All that a decode engine may read."""
        for group, blocks in enumerate(lent.block_ids):
            assert blocks, "a case in which a group lends nothing shows nothing"
            for block in blocks:
                assert self.host.get((group, block)) == self.device[group, block], (group, block)


@pytest.fixture(autouse=True)
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's configuration is made before, as that of the CPU that this is. What can be registered does not matter."""
    monkeypatch.setattr("connector.nixl_connector.require_supported", lambda *_: None)
    scheduling_config(BLOCK_TOKENS, MAX_MODEL_TOKENS)
    monkeypatch.setattr(current_platform, "device_type", "cuda")


FAMILIES: dict[str, list[KVCacheSpec]] = {
    "full attention": [full()],
    "latent": [mla()],
    "sliding window": [full(), window(40), window(40)],
    "chunked local attention": [full(), chunked(48)],
    "state of the request": [full(), state("none")],
    "state of each block": [full(), state("align")],
}

BATCHES = {"at once": 512, "in chunks of blocks": 2 * BLOCK_TOKENS, "in chunks of half a block": BLOCK_TOKENS + HALF}


def engine(family: str, **options: Any) -> StagedEngine:
    """Without a prefix cache where a state of the whole request cannot be cached."""
    return StagedEngine(FAMILIES[family], caches_prefixes="request" not in family, **options)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_lent_is_on_the_host(family: str, batch: str) -> None:
    prefill = engine(family, batch_tokens=BATCHES[batch])
    prefill.expect_on_host(prefill.prefill("a", range(5 * BLOCK_TOKENS + 5)))


@pytest.mark.parametrize("family", [family for family in FAMILIES if "request" not in family])
def test_so_is_what_another_request_had_computed(family: str) -> None:
    """The other one was not lent, so nobody has saved its blocks."""
    prefill = engine(family, batch_tokens=2 * BLOCK_TOKENS)
    tokens = list(range(6 * BLOCK_TOKENS + 5))
    prefill.run("here", tokens, None)
    assert not any(prefill.saves)
    prefill.expect_on_host(prefill.prefill("lent", tokens))
    assert prefill.computed["lent"] < len(tokens) - BLOCK_TOKENS, "no prefix hit"


def test_so_is_what_is_decoded_before_a_request_is_lent() -> None:
    prefill = engine("full attention")
    prefill.run("a", range(BLOCK_TOKENS - 2), {"do_remote_decode": True}, max_tokens=BLOCK_TOKENS)
    (blocks,) = prefill.params["a"]["remote_block_ids"]
    assert len(blocks) == 2
    assert [prefill.host[0, block] for block in blocks] == [prefill.device[0, block] for block in blocks]


def test_a_block_that_a_chunk_fills_in_part_is_saved_with_each_chunk() -> None:
    prefill = engine("full attention", batch_tokens=BLOCK_TOKENS + HALF)
    (first, second, third), *_ = prefill.prefill("a", range(3 * BLOCK_TOKENS)).block_ids
    assert [saves for saves in prefill.saves if saves] == [([first, second],), ([second, third],)]


def test_the_last_save_is_of_a_step_before_the_one_that_grants() -> None:
    prefill = engine("full attention", batch_tokens=BLOCK_TOKENS)
    prefill.submit("a", range(2 * BLOCK_TOKENS), {"do_remote_decode": True})
    steps_with_saves, granted = [], None
    for step in range(5):
        prefill.step()
        steps_with_saves += [step] if prefill.saves[-1] else []
        if granted is None and any(isinstance(command, LeaseGranted) for command in prefill.commands):
            granted = step
    assert granted is not None
    assert steps_with_saves == [0, 1]
    assert granted > 1


@pytest.mark.parametrize(
    ("family", "blocks"), [("full attention", 14), ("sliding window", 24), ("state of each block", 16)]
)
def test_a_request_that_was_preempted_is_saved_anew(family: str, blocks: int) -> None:
    """What grows takes its blocks; what is left of them in the prefix cache counts when it comes back."""
    prefill = engine(family, blocks=blocks, batch_tokens=BLOCK_TOKENS + HALF, admits_what_fits=False)
    prefill.submit("grows", range(1000, 1000 + 4 * BLOCK_TOKENS), None, max_tokens=4 * BLOCK_TOKENS)
    for _ in range(4):
        prefill.step()
    request = prefill.submit("a", range(8 * BLOCK_TOKENS + 3), {"do_remote_decode": True})
    saves_before = 0
    for _ in range(300):
        prefill.step()
        if not request.num_preemptions:
            saves_before += bool(prefill.saves[-1])
        if "a" in prefill.finished:
            break
    assert request.num_preemptions
    assert saves_before
    prefill.expect_on_host(parse_remote_prefill(prefill.params["a"]))


def test_a_request_that_ends_without_being_lent_is_saved_no_more() -> None:
    prefill = engine("full attention", batch_tokens=BLOCK_TOKENS)
    prefill.submit("a", range(4 * BLOCK_TOKENS), {"do_remote_decode": True})
    prefill.step()
    assert prefill.saves[-1]
    prefill.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    prefill.step()
    assert prefill.saves[-1] == ()


def test_without_staging_nothing_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current_platform, "device_type", "cpu")
    prefill = engine("full attention")
    prefill.prefill("a", range(2 * BLOCK_TOKENS))
    assert not any(prefill.saves)


def _step(**requests: tuple[int, int]) -> SchedulerOutput:
    """Requests scheduled before, by name: tokens that the scheduler takes for computed, and tokens of this step."""
    output = SchedulerOutput.make_empty()
    output.scheduled_cached_reqs = CachedRequestData.make_empty()
    output.scheduled_cached_reqs.req_ids = list(requests)
    output.scheduled_cached_reqs.num_computed_tokens = [computed for computed, _ in requests.values()]
    output.num_scheduled_tokens = {name: scheduled for name, (_, scheduled) in requests.items()}
    tables = {name: ([10 * number + block for block in range(1, 9)],) for number, name in enumerate(requests)}
    output.kv_connector_block_state = KVConnectorBlockState(set(requests), tables.__getitem__, {})
    return output


GROUPS = (TransferGroup(group_id=0, block_size=BLOCK_TOKENS, keeps=Keeps()),)


def test_drafts_that_may_have_been_rejected_move_the_first_block_back() -> None:
    """The scheduler counts them as computed until it hears of the step before."""
    output = _step(a=(2 * BLOCK_TOKENS + 2, 3))
    assert blocks_to_save(output, {"a"}, GROUPS, drafts_max=2) == ([3],)
    assert blocks_to_save(output, {"a"}, GROUPS, drafts_max=3) == ([2, 3],)


def test_a_block_that_two_requests_share_is_saved_once() -> None:
    output = _step(a=(0, BLOCK_TOKENS), b=(0, BLOCK_TOKENS), c=(0, BLOCK_TOKENS))
    assert output.kv_connector_block_state is not None
    output.kv_connector_block_state.resolve_block_ids = lambda name: ([7 if name != "c" else 8],)
    assert blocks_to_save(output, {"a", "b"}, GROUPS, drafts_max=0) == ([7],)


def test_the_first_step_saves_from_the_first_token_on() -> None:
    output = _step(resumed=(BLOCK_TOKENS, BLOCK_TOKENS))
    assert blocks_to_save(output, {"resumed"}, GROUPS, drafts_max=0) == ([2],)
    output.scheduled_cached_reqs.resumed_req_ids = {"resumed"}
    assert blocks_to_save(output, {"resumed"}, GROUPS, drafts_max=0) == ([1, 2],)
