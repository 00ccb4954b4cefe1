"""A router for prefill and decode engines, as small as it can be: for tests and for reading, not for production.

    pip install httpx starlette uvicorn
    python router.py --prefill http://p1:8100 http://p2:8100 --decode http://d1:8200 --port 8000

Each prompt goes to a prefill engine for one token of one sample, and then, with the `kv_transfer_params` of its answer
as they are, to a decode engine, whose answer is passed on as it comes. Engines take turns. Where no prefill engine
answers, or one answers without parameters (it lends nothing any more), the decode engine computes the prompt itself.

With `--conversations`, for engines with `bidirectional_kv_xfer`: what a decode engine said of the blocks that it keeps
goes to the prefill engine with the next prompt that has the same `X-Conversation-Id` header.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

REQUEST_TRANSFER = {"do_remote_decode": True, "do_remote_prefill": False}
NOT_FOR_ONE_TOKEN = ("stream_options", "max_completion_tokens", "min_tokens")
DATA = b"data: "
"""What the lines of a streamed answer begin with."""
CONVERSATIONS_MAX = 100_000
PREFILL_SECONDS_MAX = 120.0
IDLE_SECONDS_MAX = 2.0
"""vLLM closes a connection that was idle for five seconds (VLLM_HTTP_TIMEOUT_KEEP_ALIVE); one that is used just then
fails. So it is closed here, well before."""

_log = logging.getLogger("router")


class Router:
    """Takes turns among the engines."""

    def __init__(self, prefill: list[str], decode: list[str], *, keeps_conversations: bool) -> None:
        self._prefill, self._decode = itertools.cycle(prefill), itertools.cycle(decode)
        self._prefills = len(prefill)
        # By conversation: the decode engine that has answered last, and what it said of its blocks.
        self._conversations: OrderedDict[str, tuple[str, dict[str, Any]]] | None = None
        if keeps_conversations:
            self._conversations = OrderedDict()
        limits = httpx.Limits(max_connections=None, keepalive_expiry=IDLE_SECONDS_MAX)
        self._http = httpx.AsyncClient(timeout=None, limits=limits)

    async def complete(self, request: Request) -> Response:
        """Any of the two calls of OpenAI's interface."""
        try:
            body = await request.json()
        except ValueError:
            body = None
        if not isinstance(body, dict):
            return JSONResponse({"error": "the body of a call is a JSON object"}, status_code=400)
        body.pop("request_id", None)  # a client that knows the id of what is lent can end the engine that lends it
        headers = {"X-Request-Id": request.headers.get("x-request-id") or str(uuid.uuid4())}
        conversation = request.headers.get("x-conversation-id")
        decode, params = self._recall(conversation)
        body["kv_transfer_params"] = await self._prefilled(request.url.path, body, headers, params)
        asked = self._http.build_request("POST", decode + request.url.path, json=body, headers=headers)
        try:
            answer = await self._http.send(asked, stream=True)
        except httpx.HTTPError as error:
            return JSONResponse({"error": f"decode engine {decode}: {error!r}"}, status_code=502)
        if body.get("stream"):
            events = self._passed_on(answer, conversation, decode)
            return StreamingResponse(events, answer.status_code, media_type="text/event-stream")
        content = self._remember(conversation, decode, await answer.aread())
        return Response(content, answer.status_code, media_type="application/json")

    async def _passed_on(self, answer: httpx.Response, conversation: str | None, decode: str) -> AsyncIterator[bytes]:
        """A streamed answer, line by line: vLLM has the parameters in its events, too, from 0.33 on."""
        rest = b""
        try:
            async for chunk in answer.aiter_bytes():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    yield self._remember_line(conversation, decode, line) + b"\n"
            yield self._remember_line(conversation, decode, rest)
        finally:
            await answer.aclose()  # a client that left: the engine is told, and gives up its request

    def _remember_line(self, conversation: str | None, decode: str, line: bytes) -> bytes:
        if not line.startswith(DATA) or b'"kv_transfer_params"' not in line:
            return line
        return DATA + self._remember(conversation, decode, line.removeprefix(DATA))

    async def _prefilled(
        self, path: str, body: dict[str, Any], headers: dict[str, str], params: dict[str, Any] | None
    ) -> dict[str, Any] | None:
        """The parameters with which a decode engine finds the prompt's KV; None: it has to compute it."""
        one_token = {key: value for key, value in body.items() if key not in NOT_FOR_ONE_TOKEN}
        one_token |= {"max_tokens": 1, "n": 1, "stream": False, "kv_transfer_params": params or REQUEST_TRANSFER}
        for _ in range(self._prefills):
            engine = next(self._prefill)
            try:
                answer = await self._http.post(
                    engine + path, json=one_token, headers=headers, timeout=PREFILL_SECONDS_MAX
                )
                answer.raise_for_status()
                found: dict[str, Any] | None = answer.json().get("kv_transfer_params")
                return found
            except (httpx.HTTPError, ValueError, AttributeError) as error:  # not JSON, or no object
                _log.warning("prefill engine %s: %r", engine, error)
        return None

    def _recall(self, conversation: str | None) -> tuple[str, dict[str, Any] | None]:
        if self._conversations is not None and conversation in self._conversations:
            assert conversation is not None
            return self._conversations.pop(conversation)
        return next(self._decode), None

    def _remember(self, conversation: str | None, decode: str, content: bytes) -> bytes:
        """What a decode engine says of its blocks. Returns its answer without that: no client has to know."""
        try:
            answer = json.loads(content)
        except ValueError:
            return content
        params = answer.pop("kv_transfer_params", None) if isinstance(answer, dict) else None
        if not params:
            return content
        if self._conversations is not None and conversation is not None:
            self._conversations[conversation] = decode, params
            while len(self._conversations) > CONVERSATIONS_MAX:
                self._conversations.popitem(last=False)
        return json.dumps(answer).encode()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--prefill", nargs="+", required=True, metavar="URL")
    parser.add_argument("--decode", nargs="+", required=True, metavar="URL")
    parser.add_argument("--conversations", action="store_true")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    router = Router(arguments.prefill, arguments.decode, keeps_conversations=arguments.conversations)
    routes = [Route(f"/v1/{call}", router.complete, methods=["POST"]) for call in ("completions", "chat/completions")]
    routes.append(Route("/health", lambda _: Response()))
    uvicorn.run(Starlette(routes=routes), host=arguments.host, port=arguments.port, log_level="warning")


if __name__ == "__main__":
    main()
