"""The harness with the connector that comes with vLLM: proves that a pair of engines works on this machine, and that
comparing answers would notice wrong KV, before any test blames this project's connector."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.client import PrefillDecode
from tests.e2e.engines import EngineOptions, EngineSet
from tests.e2e.tiny_model import tiny_llama

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(420)]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefillDecode]:
    logs = tmp_path_factory.mktemp("engines")
    model: Path = tiny_llama()
    options = [
        EngineOptions(name=name, model=model, logs=logs, core=core, connector="builtin")
        for core, name in enumerate(("prefill", "decode"))
    ]
    with EngineSet() as engines:
        prefill, decode = engines.start(*options)
        with PrefillDecode(prefill, decode) as service:
            yield service


def prompt(tokens: int, seed: int = 0) -> str:
    """Text of one token per character that does not repeat itself soon."""
    return "".join(chr(ord("a") + (n * n * 7 + n // 11 + seed * 5) % 26) for n in range(tokens))


def test_answers_through_both_engines_equal_those_of_the_decode_engine_alone(service: PrefillDecode) -> None:
    for tokens in (1, 20, 32, 33, 500):
        through_both, alone = service.pd(prompt(tokens), f"len-{tokens}"), service.alone(prompt(tokens))
        assert through_both.ok, through_both.error
        assert through_both.prompt_tokens == tokens
        assert through_both.token_ids == alone.token_ids


def test_the_answer_shows_when_the_kv_is_that_of_another_prompt(service: PrefillDecode) -> None:
    asked, other = prompt(200, seed=1), prompt(200, seed=2)
    prefilled = service.prefill(other)
    assert prefilled.kv_transfer_params is not None
    wrong = service.decode(asked, prefilled.kv_transfer_params)
    assert wrong.ok, wrong.error
    assert wrong.token_ids != service.alone(asked).token_ids
