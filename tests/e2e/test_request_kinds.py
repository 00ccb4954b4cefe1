"""Every kind of request through a prefill and a decode engine: the answer is the one that D computes on its own, and
the traces say that it came about the intended way.

Both engines prefill in chunks of 64 tokens, D has 40 blocks, P is a producer and D a consumer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from tests.e2e.client import ANSWER_TOKENS, REQUEST_TRANSFER
from tests.e2e.cluster import (
    BLOCK_BYTES,
    CONTEXT_TOKENS,
    DECODE_BLOCKS,
    LEASE_SECONDS,
    SETTLE_SECONDS,
    OnePrefillTwoDecode,
    blocks_of,
    prompt,
)
from tests.e2e.engines import BLOCK_SIZE_TOKENS
from tests.plain_paths import LEASE_PATHS_PLAIN

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(420)]

NOTIFIED_SECONDS = 1.5 * LEASE_SECONDS
"""A lease that ends as it should, and in this time, was ended by its notification: one that D has kept, renewed and let
go of later is longer."""

LOGPROB_TOLERANCE = 1e-3
"""Of float32, which one chunk more or less rounds otherwise."""

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "json": {"structured_outputs": {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 3}}},
    "regex": {"structured_outputs": {"regex": "[0-9]{3}-[a-c]{12}"}},
    "choice": {"structured_outputs": {"choice": ["yes", "no"]}},
    "repetition": {"repetition_penalty": 1.9},
    "presence": {"presence_penalty": 1.9, "frequency_penalty": 1.9, "logit_bias": {"64": 8, "65": 8}},
    "bias": {"logit_bias": {"70": 9, "71": 8}},
    "allowed": {"allowed_token_ids": [64, 65, 66, 67]},
    "bad words": {"bad_words": ["a", "e", "i", "o"], "logit_bias": {"64": 9, "65": 7}},
    "stop string": {"stop": ["a", "b"], "allowed_token_ids": [64, 65, 66, 67]},
    "stop token": {"stop_token_ids": list(range(256))},
}
"""What clients may ask for beside greedy decoding. With each the answer is another one, by name."""


@pytest.mark.parametrize("tokens", [1, 20, 32, 33, 96, 900], ids="{} tokens".format)
def test_the_answer_equals_that_of_d_alone(cluster: OnePrefillTwoDecode, tokens: int) -> None:
    """Shorter than a block, exactly one, one token more, several exactly, and long in chunks."""
    for name, service in (("fail", cluster.fail), ("recompute", cluster.recompute)):
        text, key = prompt(tokens, f"length {tokens} {name}"), f"length-{tokens}-{name}"
        answer = service.pd(text, key)
        assert answer.ok, answer.error
        assert answer.token_ids == service.alone(text).token_ids
        request, lease = cluster.traces.assert_plain(key)
        assert (request.blocks, request.length_bytes) == (blocks_of(tokens), blocks_of(tokens) * BLOCK_BYTES)
        assert lease.blocks == blocks_of(tokens)


@pytest.mark.parametrize("tokens", [96, 106], ids=["whole blocks", "and a part of one"])
def test_a_prompt_that_d_has_cached_is_not_read_again(cluster: OnePrefillTwoDecode, tokens: int) -> None:
    """vLLM always leaves the last token of a prompt to be computed, so the block that it lies in is asked for; nothing
    else is, and the lease of all blocks ends at once. Scenarios 41 and 57."""
    text, keys = prompt(tokens, f"cached {tokens}"), (f"cached-{tokens}-first", f"cached-{tokens}-again")
    answers = [cluster.fail.pd(text, key) for key in keys]
    assert answers[0].ok, answers[0].error
    assert answers[0].token_ids == answers[1].token_ids == cluster.fail.alone(text).token_ids
    request, lease = cluster.traces.assert_plain(keys[1])
    assert (request.blocks, request.length_bytes) == (1, BLOCK_BYTES)
    assert lease.blocks == blocks_of(tokens)
    # Nothing, where P's worker heard of the grant after D was through.
    assert sum(visit.seconds for visit in lease.visits[1:] if visit.seconds is not None) < NOTIFIED_SECONDS


def test_only_what_lies_behind_a_common_prefix_is_read(cluster: OnePrefillTwoDecode) -> None:
    common = prompt(2 * BLOCK_SIZE_TOKENS, "common")
    for number, tokens in enumerate((100, 70)):
        text, key = common + prompt(tokens, f"behind {number}"), f"prefix-{number}"
        answer = cluster.fail.pd(text, key)
        assert answer.ok, answer.error
        assert answer.token_ids == cluster.fail.alone(text).token_ids
        request, _ = cluster.traces.assert_plain(key)
        cached = 0 if number == 0 else 2
        assert request.blocks == blocks_of(len(text)) - cached


@pytest.mark.parametrize(("tokens", "more"), [(90, 1), (96, 70)], ids=["by a token", "by several blocks"])
def test_a_prompt_that_goes_on_behind_what_p_was_given(cluster: OnePrefillTwoDecode, tokens: int, more: int) -> None:
    """As from a router that appends the token that P has sampled."""
    text, key = prompt(tokens + more, f"goes on by {more}"), f"goes-on-{more}"
    params = cluster.fail.prefill(text[:tokens], key).kv_transfer_params
    assert params is not None
    answer = cluster.fail.decode(text, params, key)
    assert answer.ok, answer.error
    assert answer.token_ids == cluster.fail.alone(text).token_ids
    request, _ = cluster.traces.assert_plain(key)
    assert request.blocks == blocks_of(tokens)


def test_several_requests_in_one_step(cluster: OnePrefillTwoDecode) -> None:
    prompts = {f"together-{number}": prompt(20 + 47 * number, f"together {number}") for number in range(6)}
    answers = cluster.fail.pd_concurrently(prompts)
    for key, text in prompts.items():
        assert answers[key].ok, answers[key].error
        assert answers[key].token_ids == cluster.fail.alone(text).token_ids
        cluster.traces.assert_plain(key)


@pytest.mark.parametrize("count", [2, 8])
def test_samples_of_one_prompt_are_read_once(cluster: OnePrefillTwoDecode, count: int) -> None:
    """vLLM hands them to the engine one by one, and D has let go of P's blocks before the last ones come."""
    client = cluster.fail.decode_client
    for number in range(6):
        text, key = prompt(90 + number, f"{count} samples {number}"), f"{count}-samples-{number}"
        answers = client.samples(text, count, key, cluster.fail.prefill(text, key).kv_transfer_params)
        assert set(answers) == {cluster.fail.alone(text).token_ids}
        (request,) = cluster.traces.ended_samples(key)
        assert request.blocks == blocks_of(len(text))


def test_requests_that_d_preempts(cluster: OnePrefillTwoDecode) -> None:
    """Five requests that come at once, and grow until no three of them fit into D's 40 blocks: some lose their blocks,
    read as they are, and are computed again. Their answers are long, so that they meet on a machine that takes a second
    to begin each."""
    answer_tokens = 260
    prompts = {f"preempted-{number}": prompt(200, f"preempted {number}") for number in range(5)}
    assert len(prompts) * blocks_of(200) < DECODE_BLOCKS < 3 * blocks_of(200 + answer_tokens)
    before = cluster.fail.decode_client.metric("vllm:num_preemptions_total")
    prefilled = cluster.fail.prefill_concurrently(prompts)
    answers = cluster.fail.decode_concurrently(prompts, prefilled, answer_tokens)
    assert [answer.error for answer in answers.values() if not answer.ok] == []
    assert cluster.fail.decode_client.metric("vllm:num_preemptions_total") > before
    for key, text in prompts.items():
        assert answers[key].token_ids == cluster.fail.alone(text, answer_tokens).token_ids
        cluster.traces.assert_plain(key)
    assert cluster.fail.decode_client.blocks_are_free()


def test_a_prefill_of_more_tokens_than_one(cluster: OnePrefillTwoDecode) -> None:
    """P then lends more blocks than the prompt needs."""
    text, key = prompt(3 * BLOCK_SIZE_TOKENS, "sampled on"), "sampled-on"
    prefilled = cluster.fail.prefill_client.complete(
        text, max_tokens=2 * BLOCK_SIZE_TOKENS, request_id=key, kv_transfer_params=REQUEST_TRANSFER
    )
    assert prefilled.kv_transfer_params is not None
    assert len(prefilled.kv_transfer_params["remote_block_ids"][0]) > 3
    answer = cluster.fail.decode(text, prefilled.kv_transfer_params, key)
    assert answer.ok, answer.error
    assert answer.token_ids == cluster.fail.alone(text).token_ids
    request, _ = cluster.traces.assert_plain(key)
    assert request.blocks == 3


def test_a_streamed_answer(cluster: OnePrefillTwoDecode) -> None:
    text, key = prompt(150, "streamed"), "streamed"
    params = cluster.fail.prefill(text, key).kv_transfer_params
    token_ids = tuple(cluster.fail.decode_client.stream(text, request_id=key, kv_transfer_params=params))
    assert token_ids == cluster.fail.alone(text).token_ids
    cluster.traces.assert_plain(key)


@pytest.mark.parametrize("in_turns", [False, True], ids=["at once", "in turns"])
def test_a_session_goes_on_behind_what_is_loaded(cluster: OnePrefillTwoDecode, in_turns: bool) -> None:
    """P has computed its first input."""
    key = f"session-on-d-{in_turns}"
    inputs = [
        (list(prompt(tokens, f"{key} {tokens}").encode()), answer) for tokens, answer in ((100, 4), (40, 5), (70, 6))
    ]
    params = cluster.fail.prefill_client.complete(
        inputs[0][0], max_tokens=1, request_id=key, kv_transfer_params=REQUEST_TRANSFER
    ).kv_transfer_params
    token_ids, _ = cluster.fail.decode_client.session(inputs, key, params, in_turns=in_turns)
    alone, _ = cluster.recompute.decode_client.session(inputs, f"{key}-alone", None, in_turns=in_turns)
    assert len(token_ids) == sum(answer for _, answer in inputs)
    assert token_ids == alone
    request, _ = cluster.traces.assert_plain(key)
    assert request.blocks == blocks_of(100)


def test_a_session_is_lent_whole(cluster: OnePrefillTwoDecode) -> None:
    """With what P has answered between its inputs, but for the last token of each answer, which vLLM drops."""
    first, second = (list(prompt(tokens, f"lent session {tokens}").encode()) for tokens in (50, 70))
    token_ids, params = cluster.fail.prefill_client.session(
        [(first, 3), (second, 1)], "session-on-p", REQUEST_TRANSFER, in_turns=False
    )
    whole = [*first, *token_ids[:2], *second]
    answer = cluster.fail.decode(whole, params, "session-on-p")
    assert answer.ok, answer.error
    assert answer.token_ids == cluster.fail.alone(whole).token_ids
    request, _ = cluster.traces.assert_plain("session-on-p")
    assert request.blocks == blocks_of(len(whole))


def test_logprobs_are_those_of_d_alone(cluster: OnePrefillTwoDecode) -> None:
    """They show a small error in KV that leaves the most probable tokens what they are."""
    text, key = prompt(150, "logprobs"), "logprobs"
    params = cluster.fail.prefill(text, key).kv_transfer_params
    found = cluster.fail.decode_client.logprobs(text, request_id=key, kv_transfer_params=params)
    alone = cluster.fail.decode_client.logprobs(text, cache_salt="computed-alone")
    assert len(found) == len(alone) == ANSWER_TOKENS
    for ours, theirs in zip(found, alone, strict=True):
        assert len(ours) == 5
        assert ours == pytest.approx(theirs, abs=LOGPROB_TOLERANCE)
    cluster.traces.assert_plain(key)


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_sampling(cluster: OnePrefillTwoDecode, name: str) -> None:
    """Grammars, penalties and the like count the prompt and every token of the answer, the first one included, which P
    has sampled before. Where that one ends the answer, P's answer ends as well, and lends the prompt all the same.

    So it is where D has to compute the prompt, because its load fails."""
    key = f"settings-{name.replace(' ', '-')}"
    asked = {"prompt": prompt(100, key)} | SETTINGS[name]
    alone = cluster.fail.alone(asked)
    assert alone.ok, alone.error
    assert alone.token_ids != cluster.fail.alone(prompt(100, key)).token_ids
    answer = cluster.fail.pd(asked, key)
    assert answer.ok, answer.error
    assert (answer.token_ids, answer.finish_reason) == (alone.token_ids, alone.finish_reason)
    request, _ = cluster.traces.assert_plain(key)
    assert request.blocks == blocks_of(100)

    bad_params = {"do_remote_prefill": True, "remote_engine_id": 0}
    computed = cluster.recompute.decode(asked, bad_params, f"{key}-computed")
    assert computed.ok, computed.error
    assert (computed.token_ids, computed.finish_reason) == (alone.token_ids, alone.finish_reason)
    assert cluster.traces.last_record(f"{key}-computed").reason == "BadParams"


@pytest.mark.parametrize("settings", [{"prompt_logprobs": 2}, {"echo": True, "logprobs": 1}], ids=["alone", "in echo"])
def test_logprobs_of_a_prompt_need_it_computed(cluster: OnePrefillTwoDecode, settings: Mapping[str, Any]) -> None:
    """vLLM loads no prompt of which somebody wants these. P has its blocks back when D has its request."""
    key = f"prompt-logprobs-{'-'.join(settings)}"
    asked = {"prompt": prompt(100, key)} | settings
    answer = cluster.fail.pd(asked, key)
    assert answer.ok, answer.error
    assert answer.token_ids == cluster.fail.alone(asked).token_ids
    request, lease = cluster.traces.both(key)[0], cluster.traces.ended_lease(key)
    assert request is None
    assert lease.states in LEASE_PATHS_PLAIN


@pytest.mark.parametrize(
    "refused",
    [{"prompt": prompt(CONTEXT_TOKENS + 1, "long")}, {"structured_outputs": {"regex": "[0-9"}}, {"model": "nobody"}],
    ids=["too long", "no grammar", "no model"],
)
def test_a_call_that_d_refuses(cluster: OnePrefillTwoDecode, refused: Mapping[str, Any]) -> None:
    """P has its blocks back, and not only when the lease expires."""
    key = f"refused-by-d-{next(iter(refused))}"
    asked = {"prompt": prompt(100, key)}
    params = cluster.fail.prefill(asked, key).kv_transfer_params
    assert params is not None
    answer = cluster.fail.decode(asked | refused, params, key)
    assert answer.status in (httpx.codes.BAD_REQUEST, httpx.codes.NOT_FOUND), answer.error
    assert cluster.traces.ended_lease(key).states in LEASE_PATHS_PLAIN


def test_an_ordinary_request_takes_no_part_in_it(cluster: OnePrefillTwoDecode) -> None:
    """On P without `do_remote_decode`, and on D with both flags false."""
    text = prompt(80, "ordinary")
    alone = cluster.fail.alone(text)
    on_prefill = cluster.fail.prefill_client.complete(text, request_id="ordinary-p")
    flags = {"do_remote_prefill": False, "do_remote_decode": False}
    on_decode = cluster.fail.decode(text, flags, "ordinary-d")
    assert on_prefill.token_ids == on_decode.token_ids == alone.token_ids
    assert on_prefill.kv_transfer_params is None
    assert cluster.traces.both("ordinary-p") == cluster.traces.both("ordinary-d") == (None, None)


def test_blocks_come_back_on_both_sides(cluster: OnePrefillTwoDecode) -> None:
    for client in (cluster.fail.prefill_client, cluster.fail.decode_client, cluster.recompute.decode_client):
        assert client.blocks_are_free(LEASE_SECONDS + SETTLE_SECONDS)
