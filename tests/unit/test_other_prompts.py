"""Parameters that get to another request than the one that they were given out for: P says what its prompt was, and D
compares. Under vLLM's own scheduler on both sides. Scenario 32.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from connector.protocol import LocalPrefillsSeen, RejectPull, ReleaseUnread, StartPull
from connector.scheduler.prefix_digest import prompt_digests
from connector.versions import is_vllm_at_least
from statemachine.failures import BadParams, WrongPrompt
from tests.rig.patience import PATIENCE_SECONDS
from tests.unit.adapter_files import save_adapter
from tests.unit.hybrid_engine import (
    BLOCK_TOKENS,
    REMOTE_DECODE,
    SAMPLED_TOKEN,
    HybridEngine,
    full,
    mla,
    ring,
    state,
    window,
)

PROMPT = list(range(1, 5 * BLOCK_TOKENS + 4))
FAMILIES = pytest.mark.parametrize(
    "specs", [[full()], [full(), window(40)], [full(), state("none")]], ids=["full", "window", "state"]
)
STOP_TOKEN = 9


@pytest.fixture(autouse=True)
def any_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the worker side can register is not the matter here."""
    monkeypatch.setattr("connector.nixl_connector.require_supported", lambda *_: None)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of an adapter are not known while a busy machine has not read them."""
    monkeypatch.setattr("connector.scheduler.adapters.WAIT_SECONDS", PATIENCE_SECONDS)


def engine(name: str, *specs: KVCacheSpec, **settings: Any) -> HybridEngine:
    # One state for the whole request cannot be cached.
    caches_prefixes = not any(isinstance(spec, MambaSpec) for spec in specs)
    return HybridEngine(list(specs) or [full()], engine_id=name, caches_prefixes=caches_prefixes, **settings)


def lent(*specs: KVCacheSpec, max_tokens: int = 1) -> dict[str, Any]:
    """The parameters of PROMPT, as they come out of a router."""
    prefill = engine("p", *specs)
    prefill.run("a", PROMPT, REMOTE_DECODE, max_tokens=max_tokens)
    returned: dict[str, Any] = json.loads(json.dumps(prefill.params["a"]))
    return returned


def asked(
    decode: HybridEngine, prompt: list[int] | None, params: dict[str, Any], **settings: Any
) -> StartPull | ReleaseUnread | RejectPull:
    """What the worker is told of a request with these parameters."""
    decode.submit("r", prompt, params, **settings)
    decode.step()
    (told,) = [each for each in decode.commands if isinstance(each, StartPull | ReleaseUnread | RejectPull)]
    return told


@FAMILIES
def test_the_prompt_that_was_lent_is_loaded(specs: list[KVCacheSpec]) -> None:
    assert isinstance(asked(engine("d", *specs), PROMPT, lent(*specs)), StartPull)


@FAMILIES
@pytest.mark.parametrize(
    "prompt",
    [[*PROMPT[:-2], 999, PROMPT[-1]], [999, *PROMPT[1:]], list(reversed(PROMPT)), PROMPT[:-2], PROMPT[:BLOCK_TOKENS]],
    ids=["late", "early", "reversed", "cut", "one block"],
)
def test_another_prompt_is_not(specs: list[KVCacheSpec], prompt: list[int]) -> None:
    told = asked(engine("d", *specs), prompt, lent(*specs))
    assert isinstance(told, RejectPull)
    assert told.failure.kind in ("WrongPrompt", "BadParams")
    assert isinstance(told.failure, WrongPrompt) or (len(prompt) < len(PROMPT) and len(specs) > 1)


@FAMILIES
@pytest.mark.parametrize("more", [[], list(range(600, 620))], ids=["the same", "longer"])
def test_a_router_that_has_lost_the_digest_is_told_so(specs: list[KVCacheSpec], more: list[int]) -> None:
    """And not that it has taken one prompt for another."""
    params = lent(*specs)
    del params["prefix_digests"]
    told = asked(engine("d", *specs), [*PROMPT, *more], params)
    assert isinstance(told, RejectPull)
    assert isinstance(told.failure, BadParams)
    assert told.failure.field == "prefix_digests"


@FAMILIES
@pytest.mark.parametrize("more", [[7], [7] * (BLOCK_TOKENS + 1)], ids=["a token", "a block"])
def test_a_prompt_that_goes_on_behind_what_was_lent_is_loaded_as_far(specs: list[KVCacheSpec], more: list[int]) -> None:
    """A router has appended the first token."""
    params = lent(*specs)
    told = engine("d", *specs).load("r", [*PROMPT, *more], params)
    assert told.num_tokens == told.remote_num_tokens == params["remote_num_tokens"] <= len(PROMPT)
    pages = -(-told.num_tokens // BLOCK_TOKENS)
    assert told.groups[0].local_first + len(told.groups[0].local_block_ids) == pages


def lent_with_drafts_behind_its_end(*specs: KVCacheSpec) -> dict[str, Any] | None:
    """The answer is SAMPLED_TOKEN and STOP_TOKEN. A draft behind them was taken for right in the same step."""
    prefill = engine("p", *specs)
    request = prefill.submit("a", PROMPT, REMOTE_DECODE, max_tokens=9)
    request.sampling_params.stop_token_ids = [STOP_TOKEN]
    prefill.step()
    request.spec_token_ids = [STOP_TOKEN, 1]
    verified = ModelRunnerOutput(
        req_ids=["a"], req_id_to_index={"a": 0}, sampled_token_ids=[[*request.spec_token_ids, 2]]
    )
    ended = prefill.scheduler.update_from_output(prefill.scheduler.schedule(), verified)
    (told,) = [each for outputs in ended.values() for each in outputs.outputs]
    assert told.new_token_ids == [STOP_TOKEN]
    if not is_vllm_at_least("0.33"):  # which counts the draft no more
        assert request.num_computed_tokens > request.num_tokens
    return told.kv_transfer_params


@pytest.mark.parametrize("more", [[], [1], [1, 2, 3]])
def test_drafts_behind_the_end_of_the_answer_are_not_lent(more: list[int]) -> None:
    params = lent_with_drafts_behind_its_end()
    assert params is not None
    answered = [*PROMPT, SAMPLED_TOKEN, STOP_TOKEN]
    pull = asked(engine("d"), [*answered, *more], params)
    assert isinstance(pull, StartPull)
    # From 0.33 on the last token counts as not computed, as it does where no draft was.
    assert pull.num_tokens == len(answered) - is_vllm_at_least("0.33")


def test_a_ring_buffer_that_such_drafts_are_in_is_not_lent() -> None:
    assert lent_with_drafts_behind_its_end(mla(), ring()) is None


@pytest.mark.parametrize(("refused", "is_lent"), [(0, True), (1, False)])
def test_a_ring_buffer_is_lent_where_all_drafts_of_the_last_step_are_in_the_answer(refused: int, is_lent: bool) -> None:
    """Drafts that were refused have been written into it, too."""
    prefill = engine("p", mla(), ring())
    request = prefill.submit("a", PROMPT, REMOTE_DECODE, max_tokens=3)
    prefill.step()
    request.spec_token_ids = [SAMPLED_TOKEN, 1][: 1 + refused]
    sampled = [[SAMPLED_TOKEN, SAMPLED_TOKEN]]
    verified = ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0}, sampled_token_ids=sampled)
    ended = prefill.scheduler.update_from_output(prefill.scheduler.schedule(), verified)
    (told,) = [each for outputs in ended.values() for each in outputs.outputs]
    assert told.finish_reason is not None
    assert (told.kv_transfer_params is not None) == is_lent


@FAMILIES
def test_the_turn_after_a_tool_has_answered_is_computed(specs: list[KVCacheSpec]) -> None:
    """Turn by turn vLLM runs tools in one call, and hands the parameters of the call to each."""
    decode, params = engine("d", *specs), lent(*specs)
    decode.load("r", PROMPT, params, max_tokens=2)
    decode.loaded("r")
    for _ in range(3):
        decode.step()
    assert "r" in decode.finished
    turn = [*PROMPT, SAMPLED_TOKEN, SAMPLED_TOKEN, *range(600, 620)]
    decode.run("turn", turn, params)
    decode.step()  # Commands go to the worker with the next step.
    assert decode.is_released_unread("turn")
    assert (decode.finished["turn"], decode.params) == ("length", {})
    cached = 0 if len(specs) > 1 and isinstance(specs[1], MambaSpec) else len(PROMPT) // BLOCK_TOKENS * BLOCK_TOKENS
    assert decode.computed["turn"] == len(turn) - cached


@FAMILIES
def test_a_longer_prompt_that_does_not_begin_with_it_is_refused(specs: list[KVCacheSpec]) -> None:
    params = lent(*specs)
    told = asked(engine("d", *specs), [999, *PROMPT[1:], *range(600, 620)], params)
    assert isinstance(told, RejectPull)
    assert told.failure.kind == "WrongPrompt"
    assert (told.engine_id, told.lease.request_id) == (params["remote_engine_id"], params["remote_request_id"])
    assert told.lease.number == params["lease_number"]
    # Which two a router has taken for each other.
    assert f"{params['remote_request_id']} on prefill engine {params['remote_engine_id']} (" in str(told.failure)


async def _turns(count: int) -> list[Any]:
    """The sampling parameters of each turn of a call in which vLLM runs a tool between every two."""
    asked: list[Any] = []

    async def generate(prompt: object, params: SamplingParams, request_id: str, **_: object) -> AsyncIterator[Any]:
        asked.append((request_id, params.extra_args))
        yield SimpleNamespace(metrics=None)

    async def run_tool() -> None:
        return None

    serving = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=100),
        engine_client=SimpleNamespace(generate=generate),
        _log_inputs=lambda *_, **__: None,
    )
    context = SimpleNamespace(
        append_output=lambda _: None,
        append_tool_output=lambda _: None,
        need_builtin_tool_call=lambda: len(asked) < count,
        call_tool=run_tool,
    )
    params = SamplingParams(extra_args={"kv_transfer_params": lent()})
    turns: Any = OpenAIServingResponses._generate_with_builtin_tools
    async for _ in turns(serving, "call", {}, params, context):
        pass
    return asked


def test_each_turn_of_a_call_has_the_parameters_of_the_call() -> None:
    """What vLLM does, for the tests above."""
    asked = asyncio.run(_turns(3))
    assert [name for name, _ in asked] == ["call_0", "call_1", "call_2"]
    assert all(extra["kv_transfer_params"]["do_remote_prefill"] for _, extra in asked)


@pytest.mark.parametrize("ends", [True, False], ids=["behind its end", "beside it"])
def test_a_prompt_that_goes_on_comes_later(ends: bool) -> None:
    """The next turn of such a call: what was lent is in the cache, or about to be, and is not read again."""
    decode, params = engine("d"), lent()
    decode.load("first", [*PROMPT, SAMPLED_TOKEN], params)
    if ends:
        decode.loaded("first")
    decode.submit("the next turn", [*PROMPT, SAMPLED_TOKEN, 7], params)
    decode.step()
    if not ends:
        decode.loaded("first")
        decode.step()
    assert decode.is_released_unread("the next turn")


def test_p_may_have_decoded_more_than_is_wanted() -> None:
    """The prompt is loaded, and what P has answered after it too, if D's prompt goes on with it."""
    params = lent(max_tokens=3)
    assert params["remote_num_tokens"] == len(PROMPT) + 2
    for prompt, kind in (
        (PROMPT, StartPull),
        ([*PROMPT, SAMPLED_TOKEN, SAMPLED_TOKEN], StartPull),
        ([*PROMPT, SAMPLED_TOKEN], RejectPull),
        ([*PROMPT, SAMPLED_TOKEN, 999], RejectPull),
    ):
        assert isinstance(asked(engine("d"), prompt, params), kind), len(prompt)


def test_parameters_without_digests() -> None:
    """A built-in P numbers no lease, and says no more than how many tokens it lends; P of ours says what they are."""
    params = lent()
    del params["prefix_digests"]
    assert isinstance(asked(engine("d"), PROMPT, params), RejectPull)
    del params["lease_number"]
    assert isinstance(asked(engine("d"), PROMPT, params), StartPull)


def test_a_request_that_loads_nothing_is_not_compared() -> None:
    """It needs all of the prompt computed."""
    other = list(reversed(PROMPT))
    decode = engine("d")
    assert isinstance(asked(decode, other, lent(), prompt_logprobs=1), ReleaseUnread)


def test_what_vllm_has_refused_is_released() -> None:
    """An answer of an error has been given already; vLLM makes a request up that ends before it has begun."""
    decode = engine("d")
    decode.submit("r", [0], lent(), abort_immediately=True)
    decode.scheduler.finish_requests(["r"], RequestStatus.FINISHED_ABORTED)
    decode.step()
    assert decode.is_released_unread("r")


def lora(path: Path) -> dict[str, Any]:
    return {"lora_request": LoRARequest("adapter", 1, str(path))}


def embeds(*rows: float) -> dict[str, Any]:
    return {"prompt_embeds": torch.tensor(rows).repeat_interleave(4).reshape(-1, 4)}


@pytest.mark.parametrize(
    ("weights", "reads"), [(1.0, True), (2.0, False), (None, True)], ids=["equal", "other", "not known"]
)
def test_the_weights_of_an_adapter_are_compared(
    weights: float | None, reads: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where they are other ones D computes the prompt, with those that it has."""
    prefill, decode = engine("p"), engine("d")
    prefill.run("a", PROMPT, REMOTE_DECODE, **lora(save_adapter(tmp_path / "p", 1.0)))
    there = tmp_path / "d" if weights is None else save_adapter(tmp_path / "d", weights)
    told = asked(decode, PROMPT, prefill.params["a"], max_tokens=2, **lora(there))
    assert isinstance(told, StartPull if reads else ReleaseUnread)
    assert ("its adapter adapter has other weights here" in caplog.text) is not reads
    if not reads:
        decode.step()
        assert decode.computed["r"] == len(PROMPT) + 1
        (seen,) = [each for each in decode.commands if isinstance(each, LocalPrefillsSeen)]
        assert [(each.request_id, each.reason) for each in seen.named] == [("r", "adapter")]


def test_an_adapter_that_was_pointed_at_other_weights_meanwhile_is_another_one(tmp_path: Path) -> None:
    """Of a request that P has computed before."""
    prefill = engine("p")
    before, after = (lora(save_adapter(tmp_path / str(weights), weights)) for weights in (1.0, 2.0))
    prefill.run("a", PROMPT, REMOTE_DECODE, **before)
    assert isinstance(asked(engine("d"), PROMPT, prefill.params["a"], **after), ReleaseUnread)
    prefill.run("b", PROMPT, REMOTE_DECODE, **after)
    assert isinstance(asked(engine("d"), PROMPT, prefill.params["b"], **after), StartPull)


def test_embeddings_of_another_prompt_are_not_taken_for_this_ones() -> None:
    """vLLM answers a call with several prompts with the parameters of the first."""
    rows = [float(row) for row in range(3 * BLOCK_TOKENS)]
    prefill = engine("p")
    prefill.run("a", None, REMOTE_DECODE, **embeds(*rows))
    params = json.loads(json.dumps(prefill.params["a"]))
    assert isinstance(asked(engine("d"), None, params, **embeds(*rows)), StartPull)
    others = ([*rows[:-1], 1.5], [0.5, *rows[1:]], rows[:-1], [0.0] * len(rows), list(range(len(rows))))
    for other in others[:-1]:
        told = asked(engine("d"), None, params, **embeds(*other))
        assert isinstance(told, RejectPull)
        assert isinstance(told.failure, WrongPrompt)
    told = asked(engine("d"), [0] * len(rows), params)
    assert isinstance(told, RejectPull), "tokens where there were embeddings"


def test_what_stands_in_place_of_an_embedding_does_not_matter() -> None:
    """A chat has both: where there is a token vLLM has anything among the embeddings, and no token where there is
    none."""
    mask = [True, False, True, False]

    def digest(tokens: list[int], *rows: float, dtype: torch.dtype = torch.float32) -> object:
        given = {"prompt_embeds": torch.tensor([rows]).T.to(dtype), "prompt_is_token_ids": mask}
        return prompt_digests(request(tokens, **given), {2, 3, 4, 6})  # one has no embedding, and two are behind all

    plain = digest([5, 7, 6, 8], 9.0, 1.0, 9.0, 2.0)
    assert digest([5, 1, 6, 1], 3.0, 1.0, 3.0, 2.0) == plain
    for other in (digest([4, 7, 6, 8], 9.0, 1.0, 9.0, 2.0), digest([5, 7, 6, 8], 9.0, 1.5, 9.0, 2.0)):
        assert not set(other) & set(plain)  # type: ignore[call-overload]
    assert digest([5, 7, 6, 8], 9.0, 1.0, 9.0, 3.0)[0] == plain[0]  # type: ignore[index]
    assert digest([5, 7, 6, 8], 9.0, 1.0, 9.0, 2.0, dtype=torch.bfloat16) != plain


def request(tokens: list[int] | None, **others: Any) -> Request:
    return Request("r", tokens, SamplingParams(max_tokens=1), None, **others)


def test_the_digest_is_of_tokens_and_the_name_of_the_adapter_only() -> None:
    """A salt is for the cache of one engine, and two engines may name an image differently."""
    place = PlaceholderRange(offset=5, length=2)
    image = MultiModalFeatureSpec(data=None, modality="image", identifier="renderer0-mm-1", mm_position=place)
    plain = prompt_digests(request(PROMPT), {40, 20})
    assert [length for length, _ in plain] == [20, 40]
    for same in ({"cache_salt": "mine"}, {"mm_features": [image]}):
        assert prompt_digests(request(PROMPT, **same), {40, 20}) == plain
    adapter = LoRARequest("adapter", 1, "/nowhere")
    for other in (request(PROMPT, lora_request=adapter), request([*PROMPT[:10], 999, *PROMPT[11:]])):
        assert not set(prompt_digests(other, {40, 20})) & set(plain)


def test_where_an_embedding_stands_matters() -> None:
    """Token 0 stands for it among the tokens, and may be one itself."""
    found = [
        prompt_digests(request([0, 0], prompt_embeds=torch.ones(2, 4), prompt_is_token_ids=mask), {2})
        for mask in ([True, False], [False, True])
    ]
    assert found[0] != found[1]


def test_a_digest_of_embeddings_does_not_depend_on_what_others_there_are() -> None:
    """An engine that loads all of a prompt asks for no shorter ones. The token behind them may have been sampled, or
    be one of the prompt's."""
    given = {"prompt_embeds": torch.arange(16.0).reshape(4, 4)}
    first = request(None, **given)
    first.append_output_token_ids([7])
    mixed = {"prompt_embeds": torch.cat([given["prompt_embeds"], torch.zeros(1, 4)])}
    second = request([0, 0, 0, 0, 7], **mixed, prompt_is_token_ids=[False] * 4 + [True])
    assert prompt_digests(first, {2, 4, 5})[-1:] == prompt_digests(second, {5})


@pytest.mark.parametrize("places", [1, 4])
def test_embeddings_may_lie_in_memory_as_they_like(places: int) -> None:
    rows = torch.arange(4.0 * places).reshape(places, 4)
    plain, odd = (request(None, prompt_embeds=each) for each in (rows, rows.T.contiguous().T.requires_grad_()))
    lengths = {places, places + 1}  # there is nothing behind the last
    assert prompt_digests(odd, lengths) == prompt_digests(plain, lengths)
