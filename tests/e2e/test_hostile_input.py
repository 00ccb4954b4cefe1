"""What comes from outside and is wrong: parameters that a router spoiled, and bytes on the side channel that no engine
sent. Each costs the request or the frame a clear error, and nothing else.
"""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import httpx
import msgspec
import pytest
import zmq

from connector.observe import catalogue
from tests.e2e.client import ANSWER_TOKENS, NO_ANSWER, REQUEST_TRANSFER
from tests.e2e.cluster import (
    HANDSHAKE_TIMEOUT_SECONDS,
    PREFILL_BLOCKS,
    OnePrefillTwoDecode,
    prompt,
    wait_for,
)
from tests.e2e.engines import LOOPBACK, Engine
from tests.e2e.metrics_page import Page

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(420)]

TOKENS = 100
Params = dict[str, Any]


def without(key: str) -> Callable[[Params], Params]:
    return lambda params: {name: value for name, value in params.items() if name != key}


def spoilt(**changes: Any) -> Callable[[Params], Params]:
    return lambda params: params | changes


def with_blocks(change: Callable[[list[int]], list[Any]]) -> Callable[[Params], Params]:
    return lambda params: params | {"remote_block_ids": [change(params["remote_block_ids"][0])]}


MALFORMED: dict[str, tuple[Callable[[Params], Params], str]] = {
    "engine id missing": (without("remote_engine_id"), "remote_engine_id"),
    "request id missing": (without("remote_request_id"), "remote_request_id"),
    "host missing": (without("remote_host"), "remote_host"),
    "port missing": (without("remote_port"), "remote_port"),
    "blocks missing": (without("remote_block_ids"), "remote_block_ids"),
    "tp size missing": (without("tp_size"), "tp_size"),
    "engine id a number": (spoilt(remote_engine_id=7), "remote_engine_id"),
    "engine id null": (spoilt(remote_engine_id=None), "remote_engine_id"),
    "engine id empty": (spoilt(remote_engine_id=""), "remote_engine_id"),
    "request id huge": (spoilt(remote_request_id="x" * 100_000), "remote_request_id"),
    "host another endpoint": (spoilt(remote_host="127.0.0.1:1,ipc:///tmp/x"), "remote_host"),
    "port a name": (spoilt(remote_port="5600a"), "remote_port"),
    "port negative": (spoilt(remote_port=-1), "remote_port"),
    "port huge": (spoilt(remote_port=70_000), "remote_port"),
    "port not a number": (spoilt(remote_port=math.nan), "remote_port"),
    "tp size zero": (spoilt(tp_size=0), "tp_size"),
    "tp size huge": (spoilt(tp_size=10**9), "tp_size"),
    "pp size huge": (spoilt(pp_size=2**62), "pp_size"),
    "number of the lease a string": (spoilt(lease_number="first"), "lease_number"),
    "number of the lease zero": (spoilt(lease_number=0), "lease_number"),
    "fewer tokens than the prompt": (spoilt(remote_num_tokens=TOKENS - 1), "remote_num_tokens"),
    "push": (spoilt(transfer_mode="push"), "transfer_mode"),
    "flag a string": (spoilt(do_remote_prefill="yes"), "do_remote_prefill"),
    "flag a number": (spoilt(do_remote_decode=1), "do_remote_decode"),
    "blocks not nested": (spoilt(remote_block_ids=[1, 2, 3, 4]), "remote_block_ids"),
    "a block a string": (with_blocks(lambda ids: [*ids[:-1], "3"]), "remote_block_ids"),
    "a block negative": (with_blocks(lambda ids: [*ids[:-1], -1]), "remote_block_ids"),
    "a block huge": (with_blocks(lambda ids: [*ids[:-1], 2**40]), "remote_block_ids"),
    "a block that P does not have": (with_blocks(lambda ids: [*ids[:-1], PREFILL_BLOCKS]), "remote_block_ids"),
    "too few blocks": (with_blocks(lambda ids: ids[:-1]), "remote_block_ids"),
    "no blocks": (with_blocks(lambda _: []), "remote_block_ids"),
    "no cache group": (spoilt(remote_block_ids=[]), "remote_block_ids"),
    "more than a million blocks": (with_blocks(lambda ids: ids * 275_000), "remote_block_ids"),
}
"""By name: what the router does to the parameters, and the field that the error must name."""


def is_said(engine: Engine, key: str, field: str) -> bool | None:
    """True if the log names request and field; of many failures of a kind in a row it only says how many there were."""
    lines = engine.log().splitlines()
    named = any(key in line and field in line for line in lines)
    return named or any("BadParams: further lines are only counted" in line for line in lines) or None


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_parameters(cluster: OnePrefillTwoDecode, name: str) -> None:
    """An error for the client under the policy `fail`, the right answer under `recompute`; the field is named in the
    trace and in D's log. Scenarios 32, 38 and 43."""
    spoil, field = MALFORMED[name]
    text, slug = prompt(TOKENS, name), name.replace(" ", "-")
    right = cluster.fail.alone(text).token_ids
    for policy, service, engine in (
        ("fail", cluster.fail, cluster.failing),
        ("recompute", cluster.recompute, cluster.recomputing),
    ):
        key = f"{slug}-{policy}"
        params = service.prefill(text, f"{key}-p").kv_transfer_params
        assert params is not None
        answer = service.decode(text, spoil(params), key)
        if policy == "fail":
            assert answer.status == 500
        else:
            assert answer.ok, answer.error
            assert answer.token_ids == right
        record = cluster.traces.last_record(key)
        assert (record.to_state, record.reason) == ("failed", "BadParams")
        assert f"kv_transfer_params.{field}" in (record.detail or "")
        wait_for(partial(is_said, engine, key, field), f"a line about {key}")
    good = cluster.fail.pd(text, f"{slug}-good")
    assert good.ok, good.error
    assert good.token_ids == right
    cluster.traces.assert_plain(f"{slug}-good")


def test_parameters_of_an_engine_with_other_cache_groups(cluster: OnePrefillTwoDecode) -> None:
    """Its model is another one, or its hybrid KV cache manager is off: trace and log say so, and blame no router."""
    text, key = prompt(TOKENS, "two cache groups"), "two-cache-groups"
    params = cluster.fail.prefill(text, f"{key}-p").kv_transfer_params
    assert params is not None
    assert cluster.fail.decode(text, params | {"remote_block_ids": [[1, 2, 3, 4]] * 2}, key).status == 500
    record = cluster.traces.last_record(key)
    assert (record.to_state, record.reason) == ("failed", "Incompatible")
    said = "number of KV cache groups is 2 there and 1 here; what to do: start both engines with the same model"
    assert said in (record.detail or "")
    wait_for(lambda: any(key in line and said in line for line in cluster.failing.log().splitlines()), "its line")
    cluster.assert_serves(cluster.fail, f"{key}-next")


def test_parameters_that_vllm_itself_refuses(cluster: OnePrefillTwoDecode) -> None:
    """Those that are no object, and numbers beyond 64 bits."""
    for value in (["do_remote_prefill"], "text", 7, {"do_remote_prefill": True, "remote_port": 10**30}):
        answer = cluster.fail.decode_client.complete("abc", kv_transfer_params=value)
        assert answer.status == 400
    cluster.assert_serves(cluster.fail, "not-an-object-next")


def test_keys_that_nobody_knows_are_ignored(cluster: OnePrefillTwoDecode) -> None:
    """Routers add their own."""
    text, key = prompt(TOKENS, "extra keys"), "extra-keys"
    params = cluster.fail.prefill(text, key).kv_transfer_params
    assert params is not None
    answer = cluster.fail.decode(text, params | {"router": {"name": "r", "hops": [1, 2]}, "": None}, key)
    assert answer.ok, answer.error
    assert answer.token_ids == cluster.fail.alone(text).token_ids
    cluster.traces.assert_plain(key)


def completions(
    engine: Engine, texts: list[str], request_id: str, params: Params, max_tokens: int = ANSWER_TOKENS
) -> httpx.Response:
    """One call with several prompts."""
    body = {
        "model": "tiny",
        "prompt": texts,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "kv_transfer_params": params,
    }
    url = f"http://{LOOPBACK}:{engine.options.http_port}/v1/completions"
    return httpx.post(url, json=body, headers={"X-Request-Id": request_id}, timeout=60, trust_env=False)


LIES: dict[str, tuple[Callable[[Params], Params], str, str]] = {
    "another prompt": (spoilt(prefix_digests=[[TOKENS, "0" * 32]]), "failed", "WrongPrompt"),
    "no word of the prompt": (without("prefix_digests"), "failed", "BadParams"),
    "another engine": (spoilt(remote_engine_id="somebody-else"), "failed", "WrongEngine"),
    "another lease": (spoilt(lease_number=1), "expired", "LeaseOver"),
    "other sizes": (spoilt(tp_size=2), "failed", "BadParams"),
    "a host without address": (
        spoilt(remote_engine_id="nowhere", remote_host="no-such-host.invalid"),
        "failed",
        "AddressNotResolved",
    ),
}
"""By name: well-formed parameters that are not true, and how the request must end."""


@pytest.mark.parametrize("name", LIES)
def test_parameters_that_are_not_true(cluster: OnePrefillTwoDecode, name: str) -> None:
    """Scenarios 66 and 68 and, for the lease, scenario 1."""
    spoil, state, reason = LIES[name]
    text, slug = prompt(TOKENS, name), name.replace(" ", "-")
    for policy, service in (("fail", cluster.fail), ("recompute", cluster.recompute)):
        key = f"{slug}-{policy}"
        params = service.prefill(text, f"{key}-p").kv_transfer_params
        assert params is not None
        answer = service.decode(text, spoil(params), key)
        record = cluster.traces.last_record(key)
        assert (record.to_state, record.reason) == (state, reason), record.detail
        assert "internal error" not in (record.detail or "")  # it is not a bug of the connector
        if policy == "fail":
            assert answer.status == 500
        else:
            assert answer.token_ids == service.alone(text).token_ids
    cluster.assert_serves(cluster.fail, f"{slug}-next")


def test_the_port_of_another_server(cluster: OnePrefillTwoDecode) -> None:
    """P's own API, in place of its side channel: no engine that hangs, and noticed before the handshake's timeout."""
    text, key = prompt(TOKENS, "api port"), "api-port"
    params = cluster.fail.prefill(text, f"{key}-p").kv_transfer_params
    assert params is not None
    api_port = cluster.prefill.options.http_port
    # Another name, or the connection that D has to P by now is used.
    answer = cluster.fail.decode(text, params | {"remote_engine_id": "elsewhere", "remote_port": api_port}, key)
    assert answer.status == 500
    assert answer.seconds < HANDSHAKE_TIMEOUT_SECONDS
    record = cluster.traces.last_record(key)
    assert (record.to_state, record.reason) == ("failed", "HandshakeMalformed")
    cluster.assert_serves(cluster.fail, "api-port-next")


def test_what_the_client_sees_of_a_failure(cluster: OnePrefillTwoDecode) -> None:
    """As failures.md says: vLLM passes no reason on. The log of D has it, kind first, by the request's id."""
    text = prompt(TOKENS, "seen")
    params = cluster.fail.prefill(text, "seen-p").kv_transfer_params
    assert params is not None
    wrong = params | {"lease_number": 1}
    plain = cluster.fail.decode(text, wrong, "seen-plain")
    assert plain.status == 500
    said = {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}
    assert json.loads(plain.error) == {"error": said}
    body = {"model": "tiny", "prompt": text, "max_tokens": 4, "kv_transfer_params": wrong, "stream": True}
    url = f"http://{LOOPBACK}:{cluster.failing.options.http_port}/v1/completions"
    streamed = httpx.post(url, json=body, timeout=60, trust_env=False)
    assert streamed.status_code == 200
    events = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line]
    assert events[-1] == "[DONE]"
    assert [json.loads(event) for event in events[:-1]] == [{"error": said}]
    lost = without("do_remote_prefill")(params)
    assert cluster.fail.decode(text, lost, "seen-lost").ok
    assert cluster.recompute.decode(text, wrong, "seen-recompute").ok
    assert any(
        " LeaseOver: request " in line and "seen-plain" in line and "known for" in line
        for line in cluster.failing.log().splitlines()
    )


def test_several_prompts_with_the_parameters_of_the_first(cluster: OnePrefillTwoDecode) -> None:
    """`/v1/completions` takes a list of prompts and one set of parameters, and its answer has those of the first one.
    A digest shows of each other one that it is another. Scenario 32."""
    lengths = {TOKENS: "", 2 * TOKENS: "WrongPrompt", TOKENS - 1: "WrongPrompt", TOKENS // 2: "WrongPrompt"}
    for policy, service in (("fail", cluster.fail), ("recompute", cluster.recompute)):
        key = f"several-{policy}"
        texts = [prompt(tokens, f"{key} {tokens}") for tokens in lengths] + [prompt(TOKENS, f"{key} as long")]
        kinds = [*lengths.values(), "WrongPrompt"]
        right = [service.alone(text).token_ids for text in texts]
        assert len(set(right)) == len(texts)
        prefilled = completions(cluster.prefill, texts, f"{key}-p", dict(REQUEST_TRANSFER), max_tokens=1)
        params = prefilled.raise_for_status().json()["kv_transfer_params"]
        answer = completions(service.decode_engine, texts, key, params)
        _, *others = [each.records[-1] for each in cluster.traces.ended_prompts(key, len(texts))]
        assert [(each.to_state, each.reason) for each in others] == [("failed", kind) for kind in kinds[1:]]
        if policy == "fail":
            assert answer.status_code == 500
        else:
            assert [tuple(each["token_ids"]) for each in answer.raise_for_status().json()["choices"]] == right
    for service in cluster.services:
        cluster.assert_serves(service, f"several-next-{service.decode_engine.options.name}")


def test_parameters_that_were_used_before(cluster: OnePrefillTwoDecode) -> None:
    """A router sends the same request twice; by the second time P has lent the blocks to somebody else. Scenario 2.
    D knows that it has let go of them, so it computes the prompt."""
    text = prompt(TOKENS, "twice")
    params = cluster.fail.prefill(text, "twice").kv_transfer_params
    assert params is not None
    assert cluster.fail.decode(text, params, "twice").ok
    cluster.traces.assert_plain("twice")
    # Another salt, or D would have the prompt cached.
    before = Page.of(cluster.fail.decode_client)[catalogue.LOCAL_PREFILLS, "continued"]
    again = cluster.fail.decode_client.complete(
        text, request_id="twice-again", kv_transfer_params=params, cache_salt="again"
    )
    assert again.ok, again.error
    assert again.token_ids == cluster.fail.alone(text).token_ids
    assert Page.of(cluster.fail.decode_client)[catalogue.LOCAL_PREFILLS, "continued"] == before + 1
    cluster.assert_serves(cluster.fail, "twice-next")


# --- P's side channel -------------------------------------------------------------------------------------------------

REPLY_SECONDS = 20.0
NO_REPLY_SECONDS = 0.5

GET_METADATA = b"get_meta_msg"

REFUSED_FRAMES: dict[str, bytes] = {
    "not message pack": b"\xc1\xff\x00 hello",
    "empty": b"",
    "text": b"GET / HTTP/1.1\r\n\r\n",
    "arity four": msgspec.msgpack.encode((GET_METADATA, 0, 0, 0)),
    "arity one": msgspec.msgpack.encode((GET_METADATA,)),
    "a map": msgspec.msgpack.encode({"get": "meta"}),
    "another word": msgspec.msgpack.encode((b"get_something", 0, 0)),
    "rank unknown": msgspec.msgpack.encode((GET_METADATA, 0, 5)),
    "pipeline rank unknown": msgspec.msgpack.encode((GET_METADATA, 1, 0)),
    "rank negative": msgspec.msgpack.encode((GET_METADATA, 0, -1)),
    "rank huge": msgspec.msgpack.encode((GET_METADATA, 0, 2**60)),
    "rank a string": msgspec.msgpack.encode((GET_METADATA, 0, "0")),
    "nested": b"\x91" * 1000,
}

LEGAL_FRAMES = {
    "current": msgspec.msgpack.encode((GET_METADATA, 0, 0)),
    "older": msgspec.msgpack.encode((GET_METADATA, 0)),
}


@pytest.fixture
def zmq_context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def ask(
    context: zmq.Context[zmq.Socket[bytes]],
    port: int,
    frames: list[bytes],
    timeout_seconds: float = REPLY_SECONDS,
    kind: int = zmq.REQ,
) -> list[bytes] | None:
    """The reply's frames, None when there is none in time."""
    with context.socket(kind) as asker:
        asker.setsockopt(zmq.LINGER, 0)
        asker.connect(f"tcp://{LOOPBACK}:{port}")
        asker.send_multipart(frames)
        return asker.recv_multipart() if asker.poll(int(timeout_seconds * 1e3)) else None


def assert_answers(context: zmq.Context[zmq.Socket[bytes]], port: int) -> None:
    """Handshakes are answered: the payload, then the listener's clock."""
    for name, frame in LEGAL_FRAMES.items():
        reply = ask(context, port, [frame])
        assert reply is not None, name
        payload = msgspec.msgpack.decode(reply[0])
        assert payload["compatibility_hash"]
        assert payload["agent_metadata_bytes"]
        assert msgspec.msgpack.decode(reply[1]) > 0


def test_frames_that_are_no_request_are_refused(
    cluster: OnePrefillTwoDecode, zmq_context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    """Each gets an error back, and the listener goes on: it answers the frame of older engines too. Scenario 38."""
    port = cluster.prefill.options.side_channel_port
    for name, frame in REFUSED_FRAMES.items():
        reply = ask(zmq_context, port, [frame])
        assert reply is not None, name
        payload = msgspec.msgpack.decode(reply[0])
        assert payload["error"], name
        assert "agent_metadata_bytes" not in payload, name
    reply = ask(zmq_context, port, [LEGAL_FRAMES["current"], b"another"])
    assert reply is not None
    assert msgspec.msgpack.decode(reply[0])["error"]
    assert_answers(zmq_context, port)
    assert "refused a bad request" in cluster.prefill.log()


def test_frames_that_cannot_be_answered_are_dropped(
    cluster: OnePrefillTwoDecode, zmq_context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    """Huge ones, many at once, and those without the delimiter that a reply needs. Scenario 38."""
    port = cluster.prefill.options.side_channel_port
    for frames in ([b"x" * (64 << 20)], [b""] * 50, [LEGAL_FRAMES["current"], b"x" * (1 << 20)]):
        assert ask(zmq_context, port, frames, NO_REPLY_SECONDS) is None
    assert ask(zmq_context, port, [LEGAL_FRAMES["current"]], NO_REPLY_SECONDS, zmq.DEALER) is None
    assert_answers(zmq_context, port)


def test_bytes_that_are_not_zmq(cluster: OnePrefillTwoDecode, zmq_context: zmq.Context[zmq.Socket[bytes]]) -> None:
    port = cluster.prefill.options.side_channel_port
    greeting = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f"
    for garbage in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x00" * 10_000, greeting + b"\xff" * 64, b"\x16\x03\x01"):
        with socket.create_connection((LOOPBACK, port), timeout=REPLY_SECONDS) as connection:
            connection.sendall(garbage)
    half_open = [socket.create_connection((LOOPBACK, port), timeout=REPLY_SECONDS) for _ in range(50)]
    try:
        assert_answers(zmq_context, port)
    finally:
        for connection in half_open:
            connection.close()


def test_a_new_engine_can_shake_hands_after_all_this(cluster: OnePrefillTwoDecode) -> None:
    """A lie about the engine id makes D ask P's side channel again, and its answer is the real one."""
    text, key = prompt(TOKENS, "after garbage"), "after-garbage"
    params = cluster.fail.prefill(text, key).kv_transfer_params
    assert params is not None
    answer = cluster.fail.decode(text, params | {"remote_engine_id": "fresh"}, key)
    assert answer.status != NO_ANSWER
    found = wait_for(lambda: cluster.traces.last_record(key).detail, "the failure in words")
    assert str(cluster.prefill.options.engine_id) in found
    cluster.assert_serves(cluster.fail, "after-garbage-next")
