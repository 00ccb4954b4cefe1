"""Checksums between two processes: a bit that changes in P's memory after the sum was made is found by D.

Whole engines with vLLM's own scheduler and our worker, so the engine threads sum. D finds in P's memory what it would
find of a wire that lies.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.house import BLOCK_TOKENS, LONG_HANDSHAKE, SHAPE, check_loaded, check_not_loaded
from tests.integration.traces import Traces
from tests.rig import OURS, EngineRig, engine_pair, prompt

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module", params=["all", "sampled"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    directory: Path = tmp_path_factory.mktemp("verify")
    options = {"verify": request.param, "trace_directory": str(directory / "traces")} | LONG_HANDSHAKE
    with engine_pair(OURS, directory, extra_config=options, **SHAPE) as (prefill, decode):
        yield prefill, decode, Traces(directory / "traces"), request.param


def prefilled(prefill: EngineRig, name: str, tokens: list[int]) -> dict[str, Any]:
    """The steps of another prompt follow, so that the sums have been made."""
    params = prefill.prefill(name, tokens)
    prefill.prefill(f"{name}-another", prompt(f"{name}-another", 40))
    return params


def test_prompts_of_several_lengths_are_loaded(pair: Any) -> None:
    prefill, decode, _, _ = pair
    for tokens in (1, BLOCK_TOKENS, 3 * BLOCK_TOKENS + 7, 12 * BLOCK_TOKENS):
        name = f"right-{tokens}"
        text = prompt(name, tokens)
        check_loaded(decode.decode(name, text, prefilled(prefill, name, text)), text)


def test_a_bit_that_changes_is_found(pair: Any) -> None:
    prefill, decode, traces, _ = pair
    text = prompt("wrong", 5 * BLOCK_TOKENS)
    for number in range(5):
        name = f"wrong-{number}"
        params = prefilled(prefill, name, text)
        block = params["remote_block_ids"][0][number]
        prefill.damage_block(block)
        check_not_loaded(decode, decode.decode(name, text, params), text)
        assert traces.reason(name) == "Corrupt"
        prefill.damage_block(block)
    after = prompt("after", 70)
    check_loaded(decode.decode("after", after, prefilled(prefill, "after", after)), after)
