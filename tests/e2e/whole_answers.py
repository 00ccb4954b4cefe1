"""In front of a decode engine: each answer as a stream of one chunk, which is the whole answer.

What vLLM streams has no `kv_transfer_params`, and its proxy for conversations looks for them there. This stands for an
engine whose streams have them.

    python -m tests.e2e.whole_answers ENGINE_URL PORT
"""

from __future__ import annotations

import sys

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route


def serve(engine: str, port: int) -> None:
    client = httpx.AsyncClient(timeout=None, trust_env=False)

    async def complete(request: Request) -> Response:
        asked = await request.json() | {"stream": False}
        headers = {name: value for name, value in request.headers.items() if name == "x-request-id"}
        answer = await client.post(engine + request.url.path, json=asked, headers=headers)
        if answer.status_code != httpx.codes.OK:
            return Response(answer.content, answer.status_code)
        return Response(f"data: {answer.text}\n\ndata: [DONE]\n\n", media_type="text/event-stream")

    app = Starlette(
        routes=[Route("/v1/completions", complete, methods=["POST"]), Route("/health", lambda _: Response())]
    )
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
