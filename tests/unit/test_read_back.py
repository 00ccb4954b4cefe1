"""Read-back (`bidirectional_kv_xfer`): D lends what it has decoded, and P reads what the next prompt begins with.

Under vLLM's own scheduler on both sides; the worker is played here.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse, ChatCompletionStreamResponse
from vllm.entrypoints.openai.completion.protocol import CompletionResponse, CompletionStreamResponse
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec
from vllm.v1.request import Request, RequestStatus

from connector.protocol import Command, LeaseComputing, LeaseGranted, ReleaseUnread, StartPull, TrackLease
from connector.scheduler.cache_groups import NULL_BLOCK_ID
from connector.scheduler.prefix_digest import Digests, prefix_digests
from connector.versions import is_vllm_at_least
from statemachine.failures import Failure
from statemachine.grant import LEFT_TO_REQUESTS
from statemachine.lease import LeaseName
from tests.unit.hybrid_engine import (
    BLOCK_TOKENS,
    REMOTE_DECODE,
    SAMPLED_TOKEN,
    HybridEngine,
    chunked,
    full,
    gapped,
    state,
    window,
)
from tests.unit.log_lines import listening

BOTH_WAYS = {"bidirectional_kv_xfer": True, "kv_recompute_threshold": 1}
PROMPT = list(range(1, 5 * BLOCK_TOKENS + 4))
ANSWER = 6
"""Tokens that D samples."""
THEIRS = len(PROMPT) + ANSWER - 1
"""Whose KV D has when it has finished: the last one was sampled, and not computed."""
NEXT_PROMPT = [*PROMPT, *[SAMPLED_TOKEN] * ANSWER, *range(500, 520)]


@pytest.fixture(autouse=True)
def any_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the worker side can register is not the matter here."""
    monkeypatch.setattr("connector.nixl_connector.require_supported", lambda *_: None)


def engine(name: str, *specs: KVCacheSpec, options: dict[str, Any] | None = None, **settings: Any) -> HybridEngine:
    return HybridEngine(
        list(specs) or [full()],
        engine_id=name,
        options=BOTH_WAYS if options is None else options,
        # One state for the whole request cannot be cached.
        caches_prefixes=not any(isinstance(spec, MambaSpec) for spec in specs),
        **settings,
    )


def answer_first(decode: HybridEngine, prefill: HybridEngine) -> None:
    """A prompt is prefilled on P and answered on D."""
    prefill.prefill("first", PROMPT)
    decode.load("first", PROMPT, prefill.params["first"], max_tokens=ANSWER)
    decode.loaded("first")
    for _ in range(ANSWER + 2):
        decode.step()
    assert "first" in decode.finished


def first_turn(decode: HybridEngine, prefill: HybridEngine) -> dict[str, Any]:
    """The same; the parameters that D's answer carries."""
    answer_first(decode, prefill)
    found: dict[str, Any] = decode.params["first"]
    return found


def commands(engine: HybridEngine, name: str) -> list[Command]:
    """About one request."""
    return [
        each
        for each in engine.commands
        if name in (getattr(each, "request_id", None), getattr(getattr(each, "lease", None), "request_id", None))
    ]


@pytest.mark.parametrize(
    "specs", [[full()], [full(), window(40)], [full(), state("none")]], ids=["full", "window", "state"]
)
def test_the_next_prompt_is_read_from_the_engine_that_has_answered(specs: list[KVCacheSpec]) -> None:
    prefill, decode = engine("p", *specs), engine("d", *specs)
    params = first_turn(decode, prefill)
    assert (params["do_remote_decode"], params["do_remote_prefill"]) == (True, False)
    left = prefill.scheduler.connector._scheduler._groups.tokens_left_to_decode  # type: ignore[union-attr]
    assert params["remote_num_tokens"] == THEIRS
    assert params["remote_engine_id"] == "d"
    grant = decode.grant_of("first")
    assert grant.fixed_seconds == 480.0
    assert params["lease_number"] == grant.lease.number

    pull = prefill.load("second", NEXT_PROMPT, params)
    assert (pull.peer.engine_id, pull.lease) == ("d", grant.lease)
    assert (pull.num_tokens, pull.remote_num_tokens) == (THEIRS, THEIRS)
    assert [list(group.remote_block_ids) for group in pull.groups] == params["remote_block_ids"]
    prefill.loaded("second")
    for _ in range(3):
        prefill.step()
    assert prefill.computed["second"] == len(NEXT_PROMPT) - left - THEIRS
    lent = prefill.params["second"]
    assert (lent["do_remote_prefill"], lent["remote_engine_id"]) == (True, "p")
    assert lent["remote_num_tokens"] == len(NEXT_PROMPT) - left
    assert [type(each) for each in commands(prefill, "second")] == [TrackLease, StartPull, LeaseComputing, LeaseGranted]


def test_what_is_cached_is_not_read() -> None:
    prefill, decode = engine("p"), engine("d")
    params = first_turn(decode, prefill)
    prefill.run("again", PROMPT, REMOTE_DECODE)
    pull = prefill.load("second", NEXT_PROMPT, params)
    (group,) = pull.groups
    assert group.local_first == len(PROMPT) // BLOCK_TOKENS
    assert len(group.local_block_ids) == -(-THEIRS // BLOCK_TOKENS) - group.local_first


@pytest.mark.parametrize(("threshold", "is_read"), [(THEIRS, True), (THEIRS + 1, False), (0, True), (-1, True)])
def test_few_tokens_are_computed_instead(threshold: int, is_read: bool) -> None:
    """D's blocks are given back at once then."""
    prefill = engine("p", options={**BOTH_WAYS, "kv_recompute_threshold": threshold})
    params = first_turn(engine("d"), engine("p"))
    prefill.submit("second", NEXT_PROMPT, params)
    prefill.step()
    assert prefill.is_released_unread("second") is not is_read
    if not is_read:
        assert prefill.computed["second"] == len(NEXT_PROMPT)
        assert "second" in prefill.params


def test_d_computes_few_tokens_itself() -> None:
    prefill = engine("p", options={})
    prefill.prefill("a", PROMPT)
    for threshold, is_read in ((len(PROMPT), True), (len(PROMPT) + 1, False)):
        decode = engine("d", options={"decode_recompute_threshold": threshold})
        decode.submit("a", PROMPT, prefill.params["a"])
        decode.step()
        assert decode.is_released_unread("a") is not is_read


@pytest.mark.parametrize(
    ("specs", "tokens"),
    [([full()], len(PROMPT)), ([full(), window(40)], 0), ([full(), chunked(64)], 0), ([full(), state("none")], 0)],
    ids=["full", "window", "chunks", "state"],
)
def test_a_prompt_that_goes_on_otherwise(specs: list[KVCacheSpec], tokens: int) -> None:
    """A chat template may leave out or add something of the answer. Of the prompt before it the KV is the same; a
    state, or what a window has left, is that of all of D's tokens."""
    prefill, decode = engine("p", *specs), engine("d", *specs)
    params = first_turn(decode, prefill)
    fresh = engine("p", *specs)
    fresh.submit("second", [*PROMPT, 499, *[SAMPLED_TOKEN] * ANSWER, *range(500, 520)], params)
    fresh.step()
    assert fresh.is_released_unread("second") is not bool(tokens)
    if tokens:
        assert fresh.pull_of("second").num_tokens == tokens


def _edited(prompt: list[int]) -> list[int]:
    return [*prompt[:3], 999, *prompt[4:]]


@pytest.mark.parametrize("prompt", [_edited(NEXT_PROMPT), PROMPT[:30], list(reversed(NEXT_PROMPT))])
def test_what_a_prompt_does_not_begin_with_is_not_read(prompt: list[int]) -> None:
    """A client edits what was said before, cuts it, or its router mistakes one conversation for another."""
    params = first_turn(engine("d"), engine("p"))
    fresh = engine("p")
    fresh.run("second", prompt, params)
    assert fresh.computed["second"] == len(prompt)
    assert fresh.is_released_unread("second"), "D may have its blocks back"


def _without_digests(params: dict[str, Any]) -> None:
    del params["prefix_digests"]


def _other_digests(params: dict[str, Any]) -> None:
    params["prefix_digests"] = [[tokens, "0" * 32] for tokens, _ in params["prefix_digests"]]


@pytest.mark.parametrize("change", [_without_digests, _other_digests])
def test_without_a_digest_that_fits_nothing_is_read(change: Any) -> None:
    params = first_turn(engine("d"), engine("p"))
    change(params)
    fresh = engine("p")
    fresh.run("second", NEXT_PROMPT, params)
    assert fresh.computed["second"] == len(NEXT_PROMPT)


def test_a_digest_is_of_all_that_kv_depends_on() -> None:
    """Tokens, what stands for images among them, the adapter, and the salt that keeps users apart."""

    def request(tokens: list[int] | None, **others: Any) -> Request:
        sampling = SamplingParams(max_tokens=1)
        return Request("r", tokens, sampling, None, **others)

    def image(identifier: str, offset: int) -> MultiModalFeatureSpec:
        place = PlaceholderRange(offset=offset, length=2)
        return MultiModalFeatureSpec(data=None, modality="image", identifier=identifier, mm_position=place)

    def digests(request: Request, lengths: list[int], *, media_are_numbered: bool = False) -> Digests:
        return prefix_digests(request, lengths, media_are_numbered=media_are_numbered)

    tokens = list(range(100, 140))
    adapter = LoRARequest("adapter", 1, "/nowhere")
    requests = [
        request(tokens),
        request([*tokens[:19], 1, *tokens[20:]]),
        request(tokens, mm_features=[image("one", 5)]),
        request(tokens, mm_features=[image("other", 5)]),
        request(tokens, mm_features=[image("one", 6)]),
        request(tokens, lora_request=adapter),
        request(tokens, cache_salt="mine"),
    ]
    found = [dict(digests(each, [10, 20, 40])) for each in requests]
    assert len({each[20] for each in found}) == len({each[40] for each in found}) == len(requests)
    assert found[0][10] == found[1][10]
    assert found[0] == dict(digests(request(tokens), [10, 20, 40]))
    behind = request(tokens, mm_features=[image("one", 25)])
    assert dict(digests(behind, [20])) == {20: found[0][20]}
    embeds = [request(None, prompt_embeds=each) for each in (torch.zeros(4, 8), torch.ones(4, 8))]
    assert digests(embeds[0], [2]) == digests(request(None, prompt_embeds=torch.zeros(3, 8)), [2])
    assert digests(embeds[0], [2]) != digests(embeds[1], [2])
    assert digests(requests[2], [20], media_are_numbered=True) == []
    assert digests(requests[0], [20], media_are_numbered=True) == digests(requests[0], [20])


def _without_address(params: dict[str, Any]) -> None:
    del params["remote_port"]


def _malformed(params: dict[str, Any]) -> None:
    params["remote_port"] = "eighty"


def _other_groups(params: dict[str, Any]) -> None:
    params["remote_block_ids"] *= 2


@pytest.mark.parametrize("change", [_without_address, _malformed, _other_groups])
def test_what_cannot_be_read_is_computed(change: Any) -> None:
    prefill, decode = engine("p"), engine("d")
    params = first_turn(decode, prefill)
    change(params)
    fresh = engine("p")
    fresh.run("second", NEXT_PROMPT, params)
    assert fresh.computed["second"] == len(NEXT_PROMPT)
    assert fresh.params["second"]["remote_num_tokens"] == len(NEXT_PROMPT)
    assert not [each for each in fresh.commands if isinstance(each, StartPull | ReleaseUnread | TrackLease)]


@pytest.mark.parametrize("first_tokens", [[0], [0, 0, 0]])
def test_first_tokens_of_other_groups_end_no_engine(first_tokens: list[int]) -> None:
    """Who sends a request may write anything into its parameters."""
    specs = [full(), window(40)]
    params = first_turn(engine("d", *specs), engine("p", *specs))
    params["first_tokens"] = first_tokens
    fresh = engine("p", *specs)
    fresh.run("second", NEXT_PROMPT, params)
    assert fresh.computed["second"] == len(NEXT_PROMPT)


FORWARDED = (
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "remote_block_ids",
    "remote_num_tokens",
    "remote_blocks_expiry_time",
    "tp_size",
    "dcp_size",
    "pp_size",
    "transfer_mode",
)
"""What a router forwards that names the built-in connector's keys one by one, as llm-d's sidecar does."""


def test_what_names_no_lease_is_computed_and_its_blocks_are_given_back() -> None:
    """As of a built-in D, of which nobody knows whether it still has the blocks, or behind a router that drops keys of
    ours. Before, D kept them for all of `decoder_kv_blocks_ttl`, and nobody said so."""
    params = first_turn(engine("d"), engine("p"))
    known = REMOTE_DECODE | {key: params[key] for key in FORWARDED}
    prefill = engine("p")
    with listening() as lines:
        for number in range(1, 4):
            prefill.run(f"again-{number}", NEXT_PROMPT[:-number], known)
    assert prefill.computed["again-1"] == len(NEXT_PROMPT) - 1
    said = [text for text in lines.texts if "lease_number" in text]
    assert [re.findall(r"^prompt (\S+) .*forward all keys.*\(number (\d)\)$", text) for text in said] == [
        [("again-1", "1")],
        [("again-2", "2")],
    ]
    tracked, started, released = (
        [each for each in prefill.commands if isinstance(each, kind)] for kind in (TrackLease, StartPull, ReleaseUnread)
    )
    lease = LeaseName(params["remote_request_id"], 0)
    assert [(each.request_id, each.lease) for each in tracked] == [(f"again-{n}", lease) for n in (1, 2, 3)]
    assert (started, [each.lease for each in released]) == ([], [lease] * 3)


def test_malformed_parameters_are_named_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    params = first_turn(engine("d"), engine("p"))
    _malformed(params)
    prefill = engine("p")
    logged: list[tuple[str, Failure]] = []
    connector: Any = prefill.scheduler.connector
    monkeypatch.setattr(connector._scheduler._pulls, "_log_failure", lambda *said: logged.append(said))
    prefill.submit("second", NEXT_PROMPT, params)
    ((subject, failure),) = logged
    assert "remote_port" in str(failure)
    assert re.fullmatch(r"request second, which is computed whole, known for \d+\.\d s", subject)


def test_without_the_option_nothing_is_lent_or_read_back() -> None:
    params = first_turn(engine("d"), engine("p"))
    prefill = engine("p", options={})
    prefill.run("second", NEXT_PROMPT, params)
    assert prefill.computed["second"] == len(NEXT_PROMPT)
    decode = engine("d", options={})
    decode.load("second", NEXT_PROMPT, prefill.params["second"], max_tokens=ANSWER)
    decode.loaded("second")
    for _ in range(ANSWER + 2):
        decode.step()
    assert "second" in decode.finished
    assert "second" not in decode.params


def test_a_request_without_parameters_is_not_lent() -> None:
    """It is not part of a conversation between engines."""
    decode = engine("d")
    decode.run("local", PROMPT, None, max_tokens=ANSWER)
    assert "local" not in decode.params
    assert not [each for each in decode.commands if isinstance(each, LeaseGranted)]


def test_nothing_is_lent_back_while_few_blocks_are_free() -> None:
    """What nobody may ever read would stand in the way of requests that wait."""
    prefill, decode = engine("p"), engine("d", blocks=40)
    lent = 0
    for number in range(8):
        name, tokens = str(number), [number * 10 + each for each in PROMPT]
        prefill.prefill(name, tokens)
        decode.load(name, tokens, prefill.params[name], max_tokens=ANSWER)
        decode.loaded(name)
        for _ in range(ANSWER + 2):
            decode.step()
        lent += name in decode.params
        assert decode.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() >= LEFT_TO_REQUESTS * 40
    assert 1 < lent < 8
    assert len(decode.finished) == 8


def test_what_vllm_streams_says_where_blocks_are_from_0_33_on() -> None:
    """Its proxy for conversations looks for that in streams, and so has nothing read back before (docs/using.md)."""
    for whole, chunk in (
        (CompletionResponse, CompletionStreamResponse),
        (ChatCompletionResponse, ChatCompletionStreamResponse),
    ):
        assert "kv_transfer_params" in whole.model_fields
        assert ("kv_transfer_params" in chunk.model_fields) == is_vllm_at_least("0.33")


def test_what_is_lent_ends_where_blocks_of_the_answer_are_gone() -> None:
    """The null block stands there, which holds nobody's KV."""
    prefill, decode, answer = engine("p", gapped(32)), engine("d", gapped(32)), 6 * BLOCK_TOKENS
    prefill.prefill("first", PROMPT)
    decode.load("first", PROMPT, prefill.params["first"], max_tokens=answer)
    decode.loaded("first")
    other = engine("p", gapped(32))
    other.submit("decodes too", PROMPT, REMOTE_DECODE, max_tokens=answer)
    for _ in range(answer + 2):
        decode.step()
        other.step()
    blocks = -(-len(PROMPT) // BLOCK_TOKENS)
    for params in (decode.params["first"], other.params["decodes too"]):
        (table,) = params["remote_block_ids"]
        assert (len(table), params["remote_num_tokens"]) == (blocks, blocks * BLOCK_TOKENS)
        assert NULL_BLOCK_ID not in table
    pull = prefill.load("second", [*PROMPT, *[SAMPLED_TOKEN] * answer, 500], decode.params["first"])
    assert pull.num_tokens == blocks * BLOCK_TOKENS


def test_an_aborted_request_is_not_lent() -> None:
    prefill, decode = engine("p"), engine("d")
    prefill.prefill("first", PROMPT)
    decode.load("first", PROMPT, prefill.params["first"], max_tokens=50)
    decode.loaded("first")
    decode.step()
    decode.scheduler.finish_requests("first", RequestStatus.FINISHED_ABORTED)
    decode.step()
    assert not [each for each in decode.commands if isinstance(each, LeaseGranted)]


@pytest.mark.parametrize(
    ("specs", "is_lent"), [([full()], True), ([full(), window(40)], True), ([full(), state("none")], False)]
)
def test_an_engine_whose_steps_overlap_lends_only_what_a_step_more_leaves_alone(
    specs: list[KVCacheSpec], is_lent: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        decode = engine("d", *specs, overlaps=True)
    assert ("lends no blocks" in caplog.text) is not is_lent
    assert decode.scheduler.connector._scheduler._lends._lends_back is is_lent  # type: ignore[union-attr]


@pytest.mark.parametrize("answer_tokens", range(1, BLOCK_TOKENS + 2))
def test_a_step_that_is_under_way_leaves_a_window_where_it_is(answer_tokens: int) -> None:
    """D meets the end of its answer when the step after it is scheduled, wherever its blocks end."""
    specs = [full(), window(40)]
    prefill, decode = engine("p", *specs), engine("d", *specs, overlaps=True)
    prefill.prefill("first", PROMPT)
    decode.load("first", PROMPT, prefill.params["first"], max_tokens=50)
    decode.loaded("first")
    request = decode.scheduler.requests["first"]
    under_way = decode.schedule()
    while not request.is_finished():
        if request.num_output_tokens == answer_tokens - 1:
            request.sampling_params.stop_token_ids = [SAMPLED_TOKEN]
        step, under_way = under_way, decode.schedule()
        decode.compute(step)
    assert under_way.num_scheduled_tokens == {"first": 1}
    decode.compute(under_way)
    fresh = engine("p", *specs)
    fresh.submit("second", [*PROMPT, *[SAMPLED_TOKEN] * answer_tokens, 1], decode.params["first"])
    fresh.step()
    pull = fresh.pull_of("second")
    assert pull.num_tokens == len(PROMPT) + answer_tokens - 1
    firsts = decode.params["first"]["first_tokens"]
    assert firsts[1] <= pull.num_tokens - 39
    for number, (group, first) in enumerate(zip(pull.groups, firsts, strict=True)):
        for place, block_id in enumerate(group.remote_block_ids, first // BLOCK_TOKENS):
            assert decode.still_holds(block_id, "first", number, place)
