"""Conversations between real engines with `bidirectional_kv_xfer`: what D has answered comes back to P with the next
prompt, and P reads its KV from D instead of computing it.

P keeps no cached prefixes, so that whatever it does not read it computes. Parameters are signed.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from connector.tools.cli.main import app
from connector.versions import is_vllm_at_least
from tests.e2e.client import ANSWER_TOKENS, REQUEST_TRANSFER, Answer, PrefillDecode
from tests.e2e.cluster import HANDSHAKE_TIMEOUT_SECONDS, SETTLE_SECONDS, Room, Traces
from tests.e2e.engines import BLOCK_SIZE_TOKENS, LOOPBACK, EngineOptions, EngineSet, free_port
from tests.e2e.test_routers import ask, example, running, sources, url_of
from tests.e2e.tiny_model import tiny_gemma, tiny_llama, vocabulary

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(420)]

KEPT_SECONDS = 10.0
"""Longer than a busy machine takes from D's answer to P's read-back; a test does little in between."""
TURNS = 4
PROXY = Path("examples/disaggregated/disaggregated_serving/disagg_proxy_multiturn.py")
RECEIVES = "vllm:nixl_actor_completed_receives_total"
OPTIONS: dict[str, Any] = {
    "handshake_timeout_seconds": HANDSHAKE_TIMEOUT_SECONDS,
    "bidirectional_kv_xfer": True,
    "kv_recompute_threshold": BLOCK_SIZE_TOKENS,
    "decoder_kv_blocks_ttl": KEPT_SECONDS,
}


class Conversing:
    """A prefill engine that reads too, and computes what it cannot read, and a consumer."""

    model = staticmethod(tiny_llama)
    overlaps = False
    has_windows = False

    def __init__(self, directory: Path) -> None:
        self.traces = Traces(directory / "traces")
        directory.mkdir(parents=True, exist_ok=True)
        keys = directory / "params.keys"
        assert CliRunner().invoke(app, ["keys", "params", "add", str(keys)]).exit_code == 0
        common: dict[str, Any] = {
            "model": self.model(),
            "logs": directory,
            "context_tokens": 1024,
            "trace_directory": self.traces.directory,
            "extra_config": OPTIONS | {"params_keys_file": str(keys)},
            "arguments": ("--async-scheduling" if self.overlaps else "--no-async-scheduling",),
        }
        self._engines = EngineSet()
        self.prefill, self.decode = self._engines.start(
            EngineOptions(
                name="reads-back",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                prefix_caching=False,
                core=0,
                **common,
            ),
            EngineOptions(name="lends-back", kv_role="kv_consumer", core=1, **common),
        )

    def close(self) -> None:
        self._engines.stop()


class ConversingWithWindows(Conversing):
    """A step is scheduled before the one before it has ended."""

    model = staticmethod(tiny_gemma)
    overlaps = True
    has_windows = True


@pytest.fixture
def conversing(room: Room) -> Conversing:
    return room.occupy(Conversing)


@pytest.fixture
def service(conversing: Conversing) -> Iterator[PrefillDecode]:
    with PrefillDecode(conversing.prefill, conversing.decode) as service:
        yield service


def said(count: int, seed: object) -> list[int]:
    """By the client: tokens."""
    return random.Random(f"said {seed}").choices(range(3, len(vocabulary()) - 1), k=count)


def turn(service: PrefillDecode, key: str, tokens: list[int], params: Any) -> Answer:
    """What D answers to one prompt; `params` came with D's answer to the one before."""
    prefilled = service.prefill_client.complete(tokens, max_tokens=1, request_id=f"{key}-p", kv_transfer_params=params)
    assert prefilled.ok, prefilled.error
    assert prefilled.kv_transfer_params is not None
    alone = service.alone(tokens)  # not later: D keeps what it has answered for a while only
    answered = service.decode(tokens, prefilled.kv_transfer_params, f"{key}-d")
    assert answered.ok, answered.error
    assert answered.token_ids == alone.token_ids
    return answered


def assert_right(service: PrefillDecode, answers: Sequence[tuple[list[int], tuple[int, ...]]]) -> None:
    """Of a conversation that is over: each prompt was answered as D alone answers it."""
    for asked, answer in answers:
        assert answer == service.alone(asked).token_ids


def test_every_turn_but_the_first_is_read_back(conversing: Conversing, service: PrefillDecode) -> None:
    converse(conversing, service)


def test_windows_are_read_back_from_steps_that_overlap(room: Room) -> None:
    conversing = room.occupy(ConversingWithWindows)
    with PrefillDecode(conversing.prefill, conversing.decode) as service:
        converse(conversing, service)


def converse(conversing: Conversing, service: PrefillDecode) -> None:
    before = service.prefill_client.metric(RECEIVES)
    tokens, params, there = said(3 * BLOCK_SIZE_TOKENS + 5, "first"), REQUEST_TRANSFER, 0
    for number in range(TURNS):
        key = f"turn-{number}"
        answered = turn(service, key, tokens, params)
        assert answered.kv_transfer_params is not None
        if number:
            request, _ = conversing.traces.assert_plain(f"{key}-p")
            of_a_group = -(-there // BLOCK_SIZE_TOKENS)
            assert request.blocks > of_a_group if conversing.has_windows else request.blocks == of_a_group
        there = answered.kv_transfer_params["remote_num_tokens"]
        assert there == len(tokens) + ANSWER_TOKENS - 1
        tokens, params = [*tokens, *answered.token_ids, *said(20, number)], answered.kv_transfer_params
    assert service.prefill_client.metric(RECEIVES) == before + TURNS - 1
    for client in (service.prefill_client, service.decode_client):
        assert client.blocks_are_free(KEPT_SECONDS + SETTLE_SECONDS)
    for engine in (conversing.prefill, conversing.decode):
        assert "Traceback" not in engine.log()


def test_a_client_that_comes_too_late_is_answered_all_the_same(conversing: Conversing, service: PrefillDecode) -> None:
    """D has freed its blocks and uses them for others; P computes the prompt."""
    tokens = said(100, "late")
    answered = turn(service, "early", tokens, REQUEST_TRANSFER)
    assert service.decode_client.blocks_are_free(KEPT_SECONDS + SETTLE_SECONDS)
    turn(service, "late", [*tokens, *answered.token_ids, *said(20, "later")], answered.kv_transfer_params)
    assert conversing.traces.last_record("late-p").reason.startswith("LeaseOver")


def test_behind_the_example_router(conversing: Conversing, service: PrefillDecode, tmp_path: Path) -> None:
    before = service.prefill_client.metric(RECEIVES)
    port = free_port()
    command = example(conversing.prefill, conversing.decode, port, "--conversations")
    tokens, answers = said(100, "routed"), []
    with running(command, port, tmp_path / "router.log") as client:
        for number in range(3):
            answer = ask(client, tokens, f"routed-{number}", conversation="one")
            answers.append((tokens, answer))
            tokens = [*tokens, *answer, *said(20, f"routed {number}")]
    assert_right(service, answers)
    assert service.prefill_client.metric(RECEIVES) == before + 2


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vLLM's proxy for conversations."""
    return sources(tmp_path_factory, PROXY.parent) / PROXY


def streamed(client: httpx.Client, asked: list[int], key: str) -> tuple[int, ...]:
    """The tokens of an answer in the conversation `key`."""
    body = {"model": "tiny", "prompt": asked, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True, "stream": True, "conversation_id": key}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == httpx.codes.OK
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    chunks = [json.loads(event) for event in events if event != "[DONE]"]
    return tuple(token for chunk in chunks for token in chunk["choices"][0]["token_ids"])


@pytest.mark.parametrize("named_in_streams", [False, True], ids=["as vLLM streams", "blocks named in streams"])
def test_behind_vllms_proxy_for_conversations(
    conversing: Conversing, service: PrefillDecode, proxy: Path, named_in_streams: bool, tmp_path: Path
) -> None:
    """It waits for D's parameters in the stream of an answer, where vLLM 0.32 has none: P computes each prompt. It puts
    the host of an engine's HTTP in the place of that of its side channel; the one that was signed counts."""
    port, key = free_port(), f"proxied {named_in_streams}"
    before = [client.metric(RECEIVES) for client in (service.prefill_client, service.decode_client)]
    tokens, decode_port = said(100, key), conversing.decode.options.http_port
    answers = []
    with ExitStack() as stack:
        if named_in_streams:
            decode_port = free_port()
            command = [sys.executable, "-m", "tests.e2e.whole_answers", url_of(conversing.decode), str(decode_port)]
            stack.enter_context(running(command, decode_port, tmp_path / "answers.log"))
        command = [sys.executable, str(proxy), "--host", LOOPBACK, "--port", str(port)]
        command += ["--prefiller-host", "localhost", "--prefiller-port", str(conversing.prefill.options.http_port)]
        command += ["--decoder-host", "localhost", "--decoder-port", str(decode_port)]
        client = stack.enter_context(running(command, port, tmp_path / "proxy.log"))
        for number in range(3):
            answer = streamed(client, tokens, key)
            answers.append((tokens, answer))
            tokens = [*tokens, *answer, *said(20, f"{key} {number}")]
    assert_right(service, answers)
    after = [client.metric(RECEIVES) for client in (service.prefill_client, service.decode_client)]
    read_back = 2 if named_in_streams or is_vllm_at_least("0.33") else 0
    assert [now - then for now, then in zip(after, before, strict=True)] == [read_back, 3]
    log = (tmp_path / "proxy.log").read_text()
    assert log.count("cache HIT") == read_back
    for engine in (conversing.prefill, conversing.decode):
        assert "ParamsForged" not in engine.log()
