"""Adds POST /session to vLLM's API server: a session of streamed input, which vLLM has for callers in Python and for
sound alone. For `EngineOptions.changes`.

Called with `id`, `kv_transfer_params`, `inputs` of `tokens` and `max_tokens` each, and whether these come `in_turns`:
each when the one before is answered, and the end after the last answer. Otherwise all come at once, the end too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse

from tests.e2e.after_import import change_module


async def _session(raw: Request) -> JSONResponse:
    from vllm import SamplingParams
    from vllm.engine.protocol import StreamingInput
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    body = await raw.json()
    inputs, answered = body["inputs"], asyncio.Semaphore(0)

    def sampled(each: dict[str, Any]) -> SamplingParams:
        return SamplingParams(
            temperature=0,
            max_tokens=each["max_tokens"],
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
            extra_args={"kv_transfer_params": body["kv_transfer_params"]},
        )

    async def stream() -> AsyncIterator[StreamingInput]:
        for each in inputs:
            yield StreamingInput(TokensPrompt(prompt_token_ids=each["tokens"]), sampled(each))
            if body["in_turns"]:
                await answered.acquire()

    token_ids: list[int] = []
    params = None
    async for output in raw.app.state.engine_client.generate(stream(), sampled(inputs[0]), body["id"]):
        params = output.kv_transfer_params or params
        for answer in output.outputs:
            token_ids += answer.token_ids
            if answer.finish_reason is not None:
                answered.release()
    return JSONResponse({"token_ids": token_ids, "kv_transfer_params": params})


def with_sessions(module: Any) -> None:
    build = module.build_app

    def build_with_sessions(*arguments: Any, **options: Any) -> Any:
        app = build(*arguments, **options)
        app.add_api_route("/session", _session, methods=["POST"])
        return app

    module.build_app = build_with_sessions


change_module("vllm.entrypoints.launchers.api_server.entry", with_sessions)
