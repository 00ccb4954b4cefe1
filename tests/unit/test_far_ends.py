"""The far end of a window is P's own from the step that computes the last token of a prompt to the end of the lease.

With vLLM's own scheduler and block pool. What the blocks hold, and that D reads them, is in `test_cache_groups` and,
with faults, in the simulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from connector.nixl_connector import NixlActorConnector
from connector.step_metadata import StepMetadata
from connector.wire.params import parse_remote_prefill
from tests.unit.hybrid_engine import (
    BLOCK_TOKENS,
    REMOTE_DECODE,
    SAMPLED_TOKEN,
    HybridEngine,
    full,
    params_of_builtin_p,
    run_streamed,
    state,
    streamed,
    tokens_of,
    window,
)

WINDOW_TOKENS = 40
LENGTH = 103
"""Of a prompt: its last token sees the one at 63, the last of its block."""
FAR_END = 3
"""The place of that block."""
BLOCKS = 60
assert LENGTH - WINDOW_TOKENS == (FAR_END + 1) * BLOCK_TOKENS - 1


@pytest.fixture(autouse=True)
def any_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the worker side can register is not the matter here."""
    monkeypatch.setattr("connector.nixl_connector.require_supported", lambda *_: None)


class Engine(HybridEngine):
    """Full attention beside a window. `before_forward`: what happens when a step is scheduled."""

    def __init__(self, **options: Any) -> None:
        super().__init__([full(), window(WINDOW_TOKENS)], **{"blocks": BLOCKS, **options})
        self.held_in_steps: list[dict[str, list[int]]] = []
        self.aborts_in_step: str | None = None

    @property
    def held(self) -> dict[str, list[int]]:
        connector = self.scheduler.connector
        assert isinstance(connector, NixlActorConnector)
        return connector._scheduler._lends._far_ends.held

    @property
    def free(self) -> int:
        free: int = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return free

    def forward(self, output: SchedulerOutput, metadata: StepMetadata) -> None:
        self.held_in_steps.append(self.held)
        if self.aborts_in_step is not None:
            self.scheduler.finish_requests(self.aborts_in_step, RequestStatus.FINISHED_ABORTED)
            self.aborts_in_step = None


def test_nobody_else_gets_it_before_the_lease_has_ended() -> None:
    prefill = Engine(caches_prefixes=False)
    all_free = prefill.free
    remote = prefill.prefill("a", tokens_of(LENGTH))
    (far_end,) = prefill.held["a"]
    assert remote.block_ids[1][0] == far_end
    assert remote.first_tokens == (0, FAR_END * BLOCK_TOKENS)
    assert prefill.free == all_free - len({*remote.block_ids[0], *remote.block_ids[1]})
    for number in range(4):
        prefill.run(f"other {number}", tokens_of(300, seed=number), None, max_tokens=40)
    assert prefill.still_holds(far_end, "a", 1, FAR_END)
    prefill.step(KVConnectorOutput(finished_sending={"a"}))
    assert (prefill.held, prefill.free) == ({}, all_free)


@pytest.mark.parametrize("length", [LENGTH - 1, LENGTH + 1, WINDOW_TOKENS, 1])
def test_where_no_block_ends_nothing_is_held(length: int) -> None:
    prefill = Engine()
    prefill.prefill("a", tokens_of(length))
    assert not any(prefill.held_in_steps)


def test_it_is_held_from_the_step_that_computes_the_last_token() -> None:
    prefill = Engine(batch_tokens=32)
    prefill.prefill("a", tokens_of(LENGTH))
    assert [bool(held) for held in prefill.held_in_steps] == [False, False, False, True, True]


def test_a_request_that_ends_otherwise_lets_go_of_it() -> None:
    prefill = Engine()
    all_free = prefill.free
    prefill.submit("a", tokens_of(LENGTH), REMOTE_DECODE)
    prefill.aborts_in_step = "a"
    prefill.step()
    assert prefill.held_in_steps[0]
    prefill.step()
    assert (prefill.held, prefill.free) == ({}, all_free)


def test_more_tokens_than_the_prompt_move_the_window_on() -> None:
    """D computes such prompts: P lends the window after all of them."""
    prefill, decode = Engine(), Engine()
    prefill.run("a", tokens_of(LENGTH), REMOTE_DECODE, max_tokens=4)
    assert any(prefill.held_in_steps)
    assert prefill.held == {}
    assert prefill.params["a"]["first_tokens"] == [0, (FAR_END + 1) * BLOCK_TOKENS]
    decode.run("a", tokens_of(LENGTH), prefill.params["a"])
    assert decode.computed["a"] == LENGTH


def test_a_step_that_is_under_way_does_not_move_the_window_on() -> None:
    """An answer that ends with its first token, as one that may be longer."""
    prefill, decode = Engine(overlaps=True), Engine()
    request = prefill.submit("a", tokens_of(LENGTH), REMOTE_DECODE, max_tokens=9)
    request.sampling_params.stop_token_ids = [SAMPLED_TOKEN]
    prompt_step, step_under_way = prefill.schedule(), prefill.schedule()
    prefill.compute(prompt_step)
    prefill.compute(step_under_way)
    pull = decode.load("b", tokens_of(LENGTH), prefill.params["a"])
    assert pull.num_tokens == LENGTH - 1
    assert pull.groups[1].remote_block_ids[:1] == prefill.held["a"]


@pytest.mark.parametrize("overlaps", [False, True], ids=["in turn", "overlapping"])
def test_places_for_drafts_do_not_move_the_window_on(overlaps: bool) -> None:
    """A link of a chain has the last token to compute. Behind one token vLLM puts places of drafts, for a step that is
    as any other; they are refused."""
    first, link, last = Engine(), Engine(drafts=2, overlaps=overlaps), Engine()
    first.prefill("a", tokens_of(LENGTH))
    link.load("a", tokens_of(LENGTH), first.params["a"] | {"do_remote_decode": True})
    link.loaded("a")
    for _ in range(3):
        link.step()
    assert link.computed["a"] == 1 + 2
    pull = last.load("b", tokens_of(LENGTH), link.params["a"])
    assert pull.num_tokens == LENGTH - 1
    assert pull.groups[1].remote_block_ids[:1] == link.held["a"]


def test_one_that_is_preempted_lets_go_of_it() -> None:
    """Otherwise it would lack a block for its second life."""
    prefill = Engine(blocks=22)
    all_free = prefill.free
    prefill.submit("local", tokens_of(60, seed=1), None, max_tokens=60)
    prefill.step()
    request = prefill.submit("a", tokens_of(LENGTH), REMOTE_DECODE, max_tokens=40)
    for _ in range(200):
        before = prefill.held
        prefill.step()
        if request.num_preemptions:
            break
    assert before
    assert prefill.held == {}
    while not {"a", "local"} <= prefill.finished.keys():
        prefill.step()
    prefill.step(KVConnectorOutput(finished_sending={"a"}))
    assert (prefill.held, prefill.free) == ({}, all_free)


def test_the_last_of_several_inputs_counts() -> None:
    """A client may stream its prompt."""
    prefill, decode = Engine(), Engine()
    tokens = tokens_of(LENGTH)
    run_streamed(prefill, tokens[: LENGTH - 48], tokens[LENGTH - 48 :])
    prefill.step()
    assert {len(held["a"]) for held in prefill.held_in_steps if held} == {1}
    assert len({held["a"][0] for held in prefill.held_in_steps if held}) == 2
    pull = decode.load("b", tokens, prefill.params["a"])
    assert pull.num_tokens == LENGTH - 1
    assert pull.groups[1].remote_block_ids[0] == prefill.held["a"][0]


@pytest.mark.parametrize(("length", "lent"), [(1, None), (2, 1), (40, 39)])
def test_a_session_that_stops_in_its_first_token_lends_what_is_left_of_it(length: int, lent: int | None) -> None:
    """vLLM has taken the step that is under way off its count, and it is taken off once more."""
    prefill = Engine(overlaps=True)
    session = streamed(tokens_of(length), max_tokens=9)
    session.sampling_params.stop_token_ids = [SAMPLED_TOKEN]
    prefill.scheduler.add_request(session)
    prefill.scheduler.add_request(streamed([0], is_last=True))
    first, under_way = prefill.schedule(), prefill.schedule()
    assert under_way.num_scheduled_tokens == {"a": 1}
    prefill.compute(first)
    assert "a" in prefill.finished
    said = prefill.params.get("a")
    assert (said and parse_remote_prefill(said).num_tokens) == lent


def test_an_input_that_goes_on_lets_go_of_it() -> None:
    prefill, tokens = Engine(), tokens_of(LENGTH + 8)
    run_streamed(prefill, tokens[:LENGTH], tokens[LENGTH:])
    prefill.step()
    assert prefill.params["a"]["remote_num_tokens"] == LENGTH + 8
    assert any(prefill.held_in_steps)
    assert prefill.held == {}


def test_where_d_computes_more_than_the_last_token_nothing_is_held() -> None:
    prefill = HybridEngine([full(), window(WINDOW_TOKENS), state("align")])
    prefill.prefill("a", tokens_of(LENGTH + 1))
    connector = prefill.scheduler.connector
    assert isinstance(connector, NixlActorConnector)
    assert connector._scheduler._lends._far_ends.held == {}


@pytest.mark.parametrize("block_tokens", [4, 8, 16, 32, 64])
@pytest.mark.parametrize("length", [55, 59, 63, 71, 79, 103, 104, 167])
def test_d_loads_from_p_of_any_block_size(length: int, block_tokens: int) -> None:
    """P says what its first block begins with: D sees what it lacks, and need not know the size."""
    decode = Engine()
    seen, kept = (max(0, length - tokens) for tokens in (WINDOW_TOKENS, WINDOW_TOKENS - 1))
    for first_seen in (seen, kept):
        first = first_seen // block_tokens * block_tokens
        name = f"from {first_seen}"
        decode.submit(name, tokens_of(length), _of_p(length, block_tokens, [0, first]))
        decode.step()
        ours_lack_it = kept // BLOCK_TOKENS * BLOCK_TOKENS > seen
        if first > seen:
            assert decode.is_released_unread(name)
        else:
            assert decode.pull_of(name).num_tokens == length - ours_lack_it


def test_parameters_of_another_number_of_groups_are_refused() -> None:
    decode = Engine()
    decode.submit("a", tokens_of(LENGTH), _of_p(LENGTH, BLOCK_TOKENS, [0]))
    decode.step()
    assert decode.rejection_of("a").failure.field == "first_tokens"


def _of_p(length: int, block_tokens: int, firsts: Sequence[int]) -> dict[str, Any]:
    blocks = -(-length // block_tokens)
    tables = [list(range(1 + first // block_tokens, blocks + 1)) for first in firsts]
    params = params_of_builtin_p(tables + [tables[-1]] * (2 - len(tables)), length)
    return {**params, "first_tokens": list(firsts)}
