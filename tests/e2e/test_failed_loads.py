"""Loads that fail in models with several cache groups: the answer is right or an error, and the engine serves on.

vLLM's built-in connector once served such requests as if their KV had come (scenario 6): of several cache groups it
cannot say which blocks are bad. Two engines lend to one another, with one load failure policy each. READs go over TCP,
where those from an engine that stands still are under way for as long as it does.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import Answer, PrefillDecode
from tests.e2e.cluster import CONTEXT_TOKENS, HANDSHAKE_TIMEOUT_SECONDS, Room, Traces, prompt
from tests.e2e.engines import OVER_TCP, Engine, EngineOptions, EngineSet
from tests.e2e.tiny_model import tiny_granite

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(420)]

LENGTHS = (40, 150, 300)
"""More than one block, and of states that differ."""
CACHE_BLOCKS = 300
POLICIES = ("fail", "recompute")


class Pair:
    """Two engines with states beside attention. `policy` is that of the one that reads, and the other one lends."""

    def __init__(self, directory: Path) -> None:
        self.traces = Traces(directory / "traces")
        self._set = EngineSet()
        self._engines = dict(zip(POLICIES, self._set.start(*map(self._options, POLICIES)), strict=True))

    def _options(self, policy: Any) -> EngineOptions:
        return EngineOptions(
            name=policy,
            model=tiny_granite(),
            logs=self.traces.directory.parent / "logs",
            core=POLICIES.index(policy),
            kv_load_failure_policy=policy,
            trace_directory=self.traces.directory,
            prefix_caching=False,
            context_tokens=CONTEXT_TOKENS,
            environment={"UCX_TLS": OVER_TCP},
            extra_config={"handshake_timeout_seconds": HANDSHAKE_TIMEOUT_SECONDS},
            arguments=("--num-gpu-blocks-override", str(CACHE_BLOCKS)),
        )

    def prefill(self, policy: str) -> Engine:
        (other,) = [each for name, each in self._engines.items() if name != policy]
        return other

    def service(self, policy: str) -> PrefillDecode:
        """Both engines run."""
        for engine in self._engines.values():
            if not engine.running:
                engine.restart().wait_healthy()
        return PrefillDecode(self.prefill(policy), self._engines[policy])

    def close(self) -> None:
        self._set.stop()


@pytest.fixture
def pair(room: Room) -> Iterator[Pair]:
    return room.occupy(Pair)


def prefilled(service: PrefillDecode, key: str, tokens: int) -> dict[str, Any]:
    """Parameters of a prompt that P has computed."""
    answer = service.prefill(prompt(tokens, key), key)
    assert answer.ok, answer.error
    assert answer.kv_transfer_params is not None
    return answer.kv_transfer_params


def assert_right(service: PrefillDecode, text: str, answer: Answer) -> None:
    assert answer.ok, answer.error
    assert answer.token_ids == service.alone(text).token_ids


def assert_serves(pair: Pair, service: PrefillDecode, key: str) -> None:
    text = prompt(LENGTHS[-1], key)
    assert_right(service, text, service.pd(text, key))
    pair.traces.assert_plain(key)


def assert_lost(pair: Pair, service: PrefillDecode, policy: str, key: str, text: str, answer: Answer) -> None:
    """In the way of its policy."""
    assert pair.traces.ended_request(key).states[-1] in ("failed", "expired")
    if policy == "fail":
        assert answer.status == 500, answer
    else:
        assert_right(service, text, answer)


@pytest.mark.parametrize("policy", POLICIES)
def test_parameters_that_lack_a_cache_group(pair: Pair, policy: str) -> None:
    """The same prompt is served with the right ones."""
    with pair.service(policy) as service:
        key = f"lacks-{policy}"
        text = prompt(LENGTHS[-1], key)
        params = prefilled(service, key, len(text))
        assert len(params["remote_block_ids"]) > 1
        lacking = params | {"remote_block_ids": params["remote_block_ids"][:-1]}
        answer = service.decode(text, lacking, f"{key}-of-them")
        if policy == "fail":
            assert answer.status == 500, answer
        else:
            assert_right(service, text, answer)
        assert_right(service, text, service.decode(text, params, key))
        pair.traces.assert_plain(key)
        assert service.decode_client.blocks_are_free()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prefill_engine_that_is_killed_under_reads(pair: Pair, policy: str) -> None:
    """The blocks that they were to fill have what others have left there."""
    with pair.service(policy) as service:
        assert_serves(pair, service, f"before-{policy}")
        texts = {f"killed-{policy}-{tokens}": prompt(tokens, f"killed-{policy}-{tokens}") for tokens in LENGTHS}
        params = {key: prefilled(service, key, len(text)) for key, text in texts.items()}
        prefill = pair.prefill(policy)
        with ThreadPoolExecutor(len(texts)) as pool:
            prefill.pause()
            answers = {key: pool.submit(service.decode, text, params[key], key) for key, text in texts.items()}
            for key in texts:
                assert pair.traces.request_in(key, "reading", "done", "failed", "expired").states[-1] == "reading"
            prefill.kill()
            for key, text in texts.items():
                assert_lost(pair, service, policy, key, text, answers[key].result())
        assert service.alone(prompt(LENGTHS[-1], f"alone-{policy}")).ok
        assert service.decode_client.blocks_are_free()
    # And by an engine that has come back.
    with pair.service(policy) as service:
        assert_serves(pair, service, f"after-{policy}")
        assert service.decode_client.blocks_are_free()
