"""Engines that are put together in other ways than one API server in front of one group of workers: what their tests
have in common.

A group of them has a module of its own, so that it has ended before the next is started.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.e2e.client import PrefillDecode
from tests.e2e.cluster import CONTEXT_TOKENS, Traces, prompt
from tests.e2e.engines import EngineOptions
from tests.e2e.tiny_model import tiny_llama
from tests.plain_paths import REQUEST_PATHS_PLAIN

LENGTHS = (1, 20, 33, 300, 700)
CACHE_BLOCKS = 300
LEASE_SECONDS = 120.0
"""Longer than the patience of `blocks_are_free`: only a notification ends it in time."""
HANDSHAKE_TIMEOUT_SECONDS = 30.0
"""Several engines share two cores."""


def options(
    directory: Path,
    name: str,
    arguments: tuple[str, ...] = (),
    *,
    model: Path | None = None,
    extra_config: Mapping[str, Any] = MappingProxyType({}),
    **others: Any,
) -> EngineOptions:
    return EngineOptions(
        name=name,
        model=model or tiny_llama(),
        logs=directory / "logs",
        trace_directory=directory / "traces",
        context_tokens=CONTEXT_TOKENS,
        arguments=("--num-gpu-blocks-override", str(CACHE_BLOCKS), *arguments),
        extra_config={
            "kv_lease_duration": LEASE_SECONDS,
            "handshake_timeout_seconds": HANDSHAKE_TIMEOUT_SECONDS,
            **extra_config,
        },
        **others,
    )


def assert_serves(service: PrefillDecode, traces: Traces, name: str, ranks: int = 1) -> None:
    """Prompts of several lengths, one after another."""
    for tokens in LENGTHS:
        text, key = prompt(tokens, f"{name} {tokens}"), f"{name}-{tokens}"
        answer = service.pd(text, key)
        assert answer.ok, answer.error
        assert answer.token_ids == service.alone(text).token_ids
        requests = traces.ended_on_ranks(key, ranks)
        assert all(request.states in REQUEST_PATHS_PLAIN for request in requests), requests
    assert service.prefill_client.blocks_are_free()
    assert service.decode_client.blocks_are_free()
