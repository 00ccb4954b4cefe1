"""The rig itself: what it calls right is right, and what is wrong it notices.

It is shown with our connector; tests/integration/test_builtin.py uses it with vLLM's built-in one. One pair of small
engines serves all tests of the module, because starting it is what takes the time. Each test uses request ids and
prompts of its own and leaves no request behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rig import (
    OURS,
    BlackHole,
    EngineOptions,
    EngineRig,
    RequestSpec,
    RigError,
    dead_params,
    engine_pair,
    expected_output,
    free_port,
    prompt,
)
from tests.rig.content import TokenDigests, place_words

pytestmark = pytest.mark.slow

_LAYERS = 4
_BLOCKS = 48

Pair = tuple[EngineRig, EngineRig]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("rig")
    with engine_pair(OURS, directory, layers=_LAYERS, blocks=_BLOCKS, max_batched_tokens=128) as engines:
        yield engines


def test_content_tells_prompts_positions_and_places_apart() -> None:
    first, second = TokenDigests(), TokenDigests()
    first.extend([1, 2, 3, 4])
    second.extend([1, 2, 9, 4])
    ours, theirs = first.words(0, 4), second.words(0, 4)
    assert list(ours[:2]) == list(theirs[:2])  # a shared prefix has equal bytes
    assert ours[2] != theirs[2]
    assert ours[3] != theirs[3]  # an equal token behind another prefix has not
    assert len(set(place_words(3, 4, 8).flatten().tolist())) == 3 * 4 * 8


def test_a_prompt_moves_and_every_byte_is_compared(pair: Pair) -> None:
    prefill, decode = pair
    tokens = prompt("moves", 100)
    outcome = decode.decode("moves", tokens, prefill.prefill("moves", tokens), max_tokens=3)
    assert outcome.finish == "length"
    assert outcome.received
    assert outcome.output_token_ids == expected_output(tokens, 3)
    assert (outcome.external_cached_tokens, outcome.local_cached_tokens) == (100, 0)
    assert (outcome.mismatched_pages, outcome.checked_pages) == (0, 4 * _LAYERS)
    assert outcome.load_started_ns is not None
    assert outcome.received_ns is not None
    assert outcome.submitted_ns < outcome.load_started_ns < outcome.received_ns < outcome.ended_ns
    prefill.wait_until_idle(10)  # the notification has freed the blocks, long before the lease of 30 s ends


def test_a_chunked_prefill_and_several_requests_at_once(pair: Pair) -> None:
    prefill, decode = pair
    prompts = {f"many-{length}": prompt(f"many-{length}", length) for length in (5, 33, 64, 300)}
    params = prefill.prefill_all(prompts)
    decode.submit(*(RequestSpec(name, tokens, 1, params[name]) for name, tokens in prompts.items()))
    for outcome in decode.wait_all(list(prompts)):
        assert outcome.received
        assert outcome.output_token_ids == expected_output(prompts[outcome.request_id], 1)
        assert outcome.mismatched_pages == 0
        assert outcome.checked_pages > 0
    prefill.wait_until_idle(10)


def test_a_shared_prefix_is_not_moved_twice(pair: Pair) -> None:
    prefill, decode = pair
    shared = prompt("shared", 64)
    for name, local in (("first", 0), ("second", 64)):
        tokens = prompt(name, 100, shared)
        outcome = decode.decode(name, tokens, prefill.prefill(name, tokens))
        assert (outcome.local_cached_tokens, outcome.external_cached_tokens) == (local, 100 - local)
        assert outcome.mismatched_pages == 0


def test_wrong_bytes_are_noticed(pair: Pair) -> None:
    """The blocks named in the parameters are another request's: a success to the connector, not to the rig."""
    prefill, decode = pair
    right, wrong = prompt("right", 96), prompt("wrong", 96)
    params = prefill.prefill_all({"right": right, "wrong": wrong})
    params["right"]["remote_block_ids"] = params["wrong"]["remote_block_ids"]
    outcome = decode.decode("right", right, params["right"])
    assert outcome.received
    assert outcome.mismatched_pages == outcome.checked_pages == 3 * _LAYERS
    decode.decode("wrong", wrong, params["wrong"])
    prefill.wait_until_idle(10)


def test_a_receive_that_fails_is_told(pair: Pair) -> None:
    _, decode = pair
    with BlackHole() as hole:
        outcome = decode.decode("nobody", prompt("nobody", 64), dead_params(hole.port, 2))
    assert outcome.finish == "error"
    assert outcome.receive_failed
    assert not outcome.received


def test_pause_abort_and_snapshot(pair: Pair) -> None:
    prefill, decode = pair
    tokens = prompt("aborted", 64)
    params = prefill.prefill("aborted", tokens)
    assert prefill.snapshot().requests == {"aborted": "FINISHED_LENGTH_CAPPED"}  # on loan
    decode.pause_steps()
    decode.submit(RequestSpec("aborted", tokens, 1, params))
    before = decode.snapshot()
    assert before.requests == {"aborted": "WAITING"}
    decode.abort("aborted")
    assert decode.wait("aborted").finish == "abort"
    assert decode.snapshot().steps == before.steps
    decode.resume_steps()
    decode.wait_until_idle(10)
    prefill.wait_until_idle(10)


def test_times_of_the_connector_calls_add_up_and_reset(pair: Pair) -> None:
    prefill, decode = pair
    decode.snapshot(reset_times=True)
    tokens = prompt("timed", 64)
    started = decode.decode("timed", tokens, prefill.prefill("timed", tokens))
    decode.pause_steps()  # the step in which the worker forgets the request would count anew after the reset
    times = decode.snapshot(reset_times=True)
    assert times.start_load_kv.calls == times.get_transfer_results.calls > 0
    spent_ns = times.start_load_kv.wall_ns + times.get_transfer_results.wall_ns
    assert 0 < times.step_wall_ns_max <= spent_ns <= started.ended_ns - started.submitted_ns + times.step_wall_ns_max
    assert decode.snapshot().start_load_kv.calls == 0
    decode.resume_steps()
    prefill.wait_until_idle(10)


def test_preemption_takes_blocks_away_and_the_answer_stays_right(pair: Pair) -> None:
    prefill, decode = pair
    prompts = {name: prompt(name, 20 * 32) for name in ("stays", "preempted")}
    params = prefill.prefill_all(prompts)
    decode.submit(*(RequestSpec(name, tokens, 200, params[name]) for name, tokens in prompts.items()))
    outcomes = decode.wait_all(list(prompts))
    assert sum(outcome.preemptions for outcome in outcomes) > 0  # 2 x (20 + 7) blocks in a pool of 47
    for outcome in outcomes:
        assert outcome.output_token_ids == expected_output(prompts[outcome.request_id], 200)
        assert outcome.mismatched_pages == 0
    prefill.wait_until_idle(10)


def test_overwritten_blocks_are_nobodys(pair: Pair) -> None:
    """A prefix cached on the decode engine is forgotten with its bytes, so nothing wrong can be hit."""
    prefill, decode = pair
    tokens = prompt("overwritten", 64)
    decode.decode("kept", tokens, None)
    assert decode.overwrite_free_blocks() == _BLOCKS - 1  # one block is never handed out
    outcome = decode.decode("again", tokens, prefill.prefill("again", tokens))
    assert outcome.local_cached_tokens == 0
    assert outcome.mismatched_pages == 0


def test_free_blocks_are_handed_out_in_the_order_asked_for(pair: Pair) -> None:
    _, decode = pair
    orders = {"rising": None, "shuffled": 1, "shuffled alike": 1}
    blocks = {}
    for name, seed in orders.items():
        decode.wait_until_whole(10)
        assert decode.arrange_free_blocks(seed) == _BLOCKS - 1  # one block is never handed out
        blocks[name] = decode.decode(name, prompt(name, 10 * 32), None).block_ids
    assert blocks["rising"] == tuple(range(1, 11))
    assert sorted(blocks["shuffled"]) != list(blocks["shuffled"]) == list(blocks["shuffled alike"])


def test_an_engine_that_cannot_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    options = EngineOptions(
        OURS, "kv_producer", free_port(), layers=_LAYERS, blocks=_BLOCKS, extra_config={"backends": ["bandages"]}
    )
    with EngineRig(options, tmp_path) as engine, pytest.raises(RigError, match="bandages"):
        engine.wait_ready()
    assert not engine.alive


def test_a_killed_engine_is_noticed_and_the_other_ends_in_an_orderly_way(pair: Pair) -> None:
    """The last test of the module: it uses the engines up."""
    prefill, decode = pair
    tokens = prompt("lost", 100)
    params = prefill.prefill("lost", tokens)
    prefill.kill()
    with pytest.raises(RigError, match="exit code -9"):
        prefill.snapshot()
    assert decode.decode("lost", tokens, params).receive_failed
    assert decode.decode("alone", tokens, None).output_token_ids == expected_output(tokens, 1)
    assert prefill.close() is None
    assert decode.close() is not None
    assert not prefill.alive
    assert not decode.alive
