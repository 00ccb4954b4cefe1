"""The router in docs/examples: what it asks a prefill engine for, whatever the client asks for."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

FILE = Path(__file__).parents[2] / "docs" / "examples" / "router.py"
CALLS: list[tuple[str, type[CompletionRequest | ChatCompletionRequest], dict[str, Any]]] = [
    ("/v1/completions", CompletionRequest, {"prompt": "Once"}),
    ("/v1/chat/completions", ChatCompletionRequest, {"messages": [{"role": "user", "content": "Once"}]}),
]


def router() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_router", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def asked_of_prefill(path: str, body: dict[str, Any]) -> dict[str, Any]:
    asked: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content))
        return httpx.Response(200, json={"kv_transfer_params": {"do_remote_prefill": True}})

    async def call() -> None:
        found = router().Router(["http://prefill"], ["http://decode"], keeps_conversations=False)
        found._http = httpx.AsyncClient(transport=httpx.MockTransport(answer))
        assert await found._prefilled(path, body, {}, None) == {"do_remote_prefill": True}

    asyncio.run(call())
    return asked[0]


@pytest.mark.parametrize(("path", "kind", "prompt"), CALLS, ids=["completions", "chat"])
@pytest.mark.parametrize(
    "wish",
    [
        {"n": 3},
        {"min_tokens": 8},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"max_completion_tokens": 64},
    ],
    ids=lambda wish: "-".join(wish),
)
def test_one_token_of_one_sample_is_asked_for(
    path: str, kind: type[CompletionRequest | ChatCompletionRequest], prompt: dict[str, Any], wish: dict[str, Any]
) -> None:
    """vLLM refuses to make fewer tokens than the least, and lends the KV of each sample, of which D reads one."""
    asked = asked_of_prefill(path, {"model": "any", "max_tokens": 64, **prompt, **wish})
    sampling = kind.model_validate(asked).to_sampling_params(1, {})
    assert (sampling.n, sampling.max_tokens, asked["stream"]) == (1, 1, False)
