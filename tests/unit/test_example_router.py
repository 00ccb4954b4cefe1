"""The example router between two engines that are no engines: what it passes on, and what it keeps to itself."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
from starlette.requests import Request

ROUTER = Path(__file__).resolve().parents[2] / "docs" / "examples" / "router.py"
OF_P = {"remote_request_id": "cmpl-of-p", "do_remote_prefill": True}
OF_D = {"remote_request_id": "cmpl-of-d", "do_remote_prefill": True}


class Engines:
    """Both: P at p, D at d. Each remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: dict[str, dict[str, Any]] = {}
        self.answer: bytes | None = None
        self.answer_of_p: bytes | None = None

    def __call__(self, request: httpx.Request) -> httpx.Response:
        host = request.url.host
        self.asked[host] = json.loads(request.content)
        if host == "p" and self.answer_of_p is not None:
            return httpx.Response(200, content=self.answer_of_p)
        if host == "d" and self.answer is not None:
            return httpx.Response(200, content=self.answer)
        if host == "d" and self.asked[host].get("stream"):
            return httpx.Response(200, content=Streamed(STREAM))
        return httpx.Response(200, json={"choices": [], "kv_transfer_params": OF_P if host == "p" else OF_D})


STREAM = [
    'data: {"choices": [{"text": "a\u2028"}]}\n\nda'.encode(),
    b'ta: {"choices": [{"finish_reason": "stop"}], "kv_transfer_params": ',
    json.dumps(OF_D).encode() + b"}\n\n",
    b"data: [DONE]\n\n",
]
"""As vLLM writes it from 0.33 on, in chunks that end anywhere."""


class Streamed(httpx.AsyncByteStream):
    def __init__(self, chunks: list[bytes]) -> None:
        self._chunks = chunks

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self._chunks:
            yield chunk


IDLE_SECONDS = 3.0
"""Clearly less than the five after which vLLM closes a connection (VLLM_HTTP_TIMEOUT_KEEP_ALIVE)."""


def router_module() -> Any:
    spec = importlib.util.spec_from_file_location("example_router", ROUTER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def call(body: Any, engines: Engines, *, keeps_conversations: bool) -> bytes:
    module = router_module()
    headers = [(b"x-conversation-id", b"one")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
    scope |= {"server": ("router", 80), "scheme": "http"}

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    is_streamed = isinstance(body, dict) and body.get("stream")

    async def ask() -> bytes:
        router = module.Router(["http://p"], ["http://d"], keeps_conversations=keeps_conversations)
        router._http = httpx.AsyncClient(transport=httpx.MockTransport(engines))
        for _ in range(2):
            answer = await router.complete(Request(scope, receive))
            content = bytes(answer.body) if not is_streamed else b"".join([x async for x in answer.body_iterator])
        return content

    return trio.run(ask)


@pytest.mark.parametrize("keeps_conversations", [False, True])
def test_no_client_chooses_or_learns_an_engines_request_ids(keeps_conversations: bool) -> None:
    """Whoever knows that of what is lent ends the engine (docs/operations/security.md)."""
    engines = Engines()
    answer = call({"prompt": "a", "request_id": "cmpl-of-d"}, engines, keeps_conversations=keeps_conversations)
    assert json.loads(answer) == {"choices": []}
    assert all("request_id" not in asked for asked in engines.asked.values())
    assert engines.asked["d"]["kv_transfer_params"] == OF_P
    given_to_p = engines.asked["p"]["kv_transfer_params"]
    assert given_to_p == (OF_D if keeps_conversations else {"do_remote_decode": True, "do_remote_prefill": False})


@pytest.mark.parametrize("keeps_conversations", [False, True])
def test_nor_from_an_answer_that_is_streamed(keeps_conversations: bool) -> None:
    engines = Engines()
    answer = call({"prompt": "a", "stream": True}, engines, keeps_conversations=keeps_conversations)
    events = [event.removeprefix("data: ") for event in answer.decode().split("\n\n")]
    assert [json.loads(event) for event in events[:2]] == [
        {"choices": [{"text": "a\u2028"}]},
        {"choices": [{"finish_reason": "stop"}]},
    ]
    assert events[2:] == ["[DONE]", ""]
    given_to_p = engines.asked["p"]["kv_transfer_params"]
    assert given_to_p == (OF_D if keeps_conversations else {"do_remote_decode": True, "do_remote_prefill": False})


@pytest.mark.parametrize("content", [b"<html>", b"[1]"])
def test_where_p_gives_no_answer_of_an_engine_d_computes_the_prompt(content: bytes) -> None:
    engines = Engines()
    engines.answer_of_p = content
    assert json.loads(call({"prompt": "a"}, engines, keeps_conversations=False)) == {"choices": []}
    assert engines.asked["d"]["kv_transfer_params"] is None


def test_a_call_that_is_no_object_is_refused() -> None:
    engines = Engines()
    assert "object" in json.loads(call(["a"], engines, keeps_conversations=False))["error"]
    assert not engines.asked


@pytest.mark.parametrize("content", [b"<html>", b"[1]", b'{"error": "no"}'])
def test_what_is_no_answer_of_an_engine_is_passed_on_as_it_is(content: bytes) -> None:
    engines = Engines()
    engines.answer = content
    assert call({"prompt": "a"}, engines, keeps_conversations=True) == content


def test_no_call_is_sent_over_a_connection_that_an_engine_is_about_to_close() -> None:
    """It would fail with a 502, and the engine has done nothing."""
    connections = 0

    async def serve(stream: trio.SocketStream) -> None:
        nonlocal connections
        connections += 1
        async for _ in stream:
            await stream.send_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    async def test() -> None:
        async with trio.open_nursery() as nursery:
            (listener,) = await nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
            port = listener.socket.getsockname()[1]
            router = router_module().Router([], [], keeps_conversations=False)
            async with router._http as http:
                for idle_seconds in (0, IDLE_SECONDS, 0):
                    await http.get(f"http://127.0.0.1:{port}/", timeout=10)
                    await trio.sleep(idle_seconds)
            nursery.cancel_scope.cancel()

    trio.run(test)
    assert connections == 2
