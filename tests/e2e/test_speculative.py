"""Engines that decode speculatively, with drafts from the prompt or from a model with KV of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.client import Client, PrefillDecode
from tests.e2e.cluster import Traces, prompt
from tests.e2e.deployments import LENGTHS, assert_serves, options
from tests.e2e.engines import Engine, EngineSet
from tests.e2e.tiny_model import tiny_llama

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(420)]

DRAFTS = 2
FROM_THE_PROMPT = {
    "method": "ngram",
    "num_speculative_tokens": DRAFTS,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}


def by_a_model() -> dict[str, Any]:
    """Drafts of a model that has KV of its own, which travels too."""
    return {"method": "draft_model", "model": str(tiny_llama()), "num_speculative_tokens": DRAFTS}


def speculating(config: dict[str, Any] | None) -> tuple[str, ...]:
    return () if config is None else ("--speculative-config", json.dumps(config))


@pytest.fixture(scope="module")
def speculative(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Engine], Traces]]:
    """Two with a draft model, one that drafts from the prompt, and one that does not speculate."""
    directory = tmp_path_factory.mktemp("speculative")
    kinds = {"prefill": by_a_model(), "decode": by_a_model(), "from-prompt": FROM_THE_PROMPT, "plain": None}
    with EngineSet() as engines:
        started = engines.start(
            *(
                options(directory, name, core=core % 2, arguments=speculating(config))
                for core, (name, config) in enumerate(kinds.items())
            )
        )
        yield dict(zip(kinds, started, strict=True)), Traces(directory / "traces")


def test_the_kv_of_a_draft_model_travels_too(speculative: tuple[dict[str, Engine], Traces]) -> None:
    """The drafts are those of the model itself, so nearly all are accepted, if its KV is right."""
    engines, traces = speculative
    with PrefillDecode(engines["prefill"], engines["decode"]) as service:
        drafted, accepted = (
            service.decode_client.metric(f"vllm:spec_decode_num_{what}_tokens_total") for what in ("draft", "accepted")
        )
        for tokens in LENGTHS:
            text, key = prompt(tokens, f"drafts {tokens}"), f"drafts-{tokens}"
            answer = service.pd(text, key)
            assert answer.ok, answer.error
        drafted = service.decode_client.metric("vllm:spec_decode_num_draft_tokens_total") - drafted
        accepted = service.decode_client.metric("vllm:spec_decode_num_accepted_tokens_total") - accepted
        assert drafted > 0
        assert accepted >= 0.8 * drafted
        assert_serves(service, traces, "draft-model")


def test_an_engine_without_the_draft_model_is_incompatible(speculative: tuple[dict[str, Engine], Traces]) -> None:
    """It has fewer layers; the log of D says so with both numbers, and nothing is read."""
    engines, traces = speculative
    with PrefillDecode(engines["from-prompt"], engines["decode"]) as service:
        answer = service.pd(prompt(100, "no draft model"), "no-draft-model")
        assert not answer.ok
        assert traces.ended_request("no-draft-model").reason == "Incompatible"


def test_drafts_from_the_prompt(speculative: tuple[dict[str, Engine], Traces]) -> None:
    """One side drafts, the other does not: there is no KV of drafts. The prompts repeat themselves."""
    engines, traces = speculative
    for prefill, decode in (("plain", "from-prompt"), ("from-prompt", "plain")):
        with PrefillDecode(engines[prefill], engines[decode]) as service:
            for tokens in LENGTHS:
                text, key = ("abcabcabd" * tokens)[:tokens], f"repeats-{prefill}-{tokens}"
                answer = service.pd(text, key)
                assert answer.ok, answer.error
                assert answer.token_ids == service.alone(text).token_ids
                traces.assert_plain(key)
    with Client(engines["from-prompt"]) as client:
        assert client.metric("vllm:spec_decode_num_accepted_tokens_total") > 0
