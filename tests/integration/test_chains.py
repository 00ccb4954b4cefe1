"""A chain of engines over real NIXL: what one engine has computed is loaded by a second, and lent on to a third, every
byte compared. With the built-in connector in each place.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.integration.house import BLOCK_TOKENS, LONG_HANDSHAKE, SHAPE, check_loaded
from tests.rig import BUILTIN, OURS, EngineOptions, EngineRig, free_port, prompt

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

_FREED_SECONDS = 10
"""Blocks that are free by then were released, and did not wait for the end of a lease."""


@pytest.mark.parametrize(
    ("connectors", "staged"),
    [
        ((OURS, OURS, OURS), False),
        ((BUILTIN, OURS, OURS), False),
        ((OURS, BUILTIN, OURS), False),
        ((OURS, OURS, BUILTIN), False),
        ((OURS, OURS, OURS), True),
    ],
    ids=["ours", "built-in first", "built-in link", "built-in last", "staged"],
)
def test_what_was_loaded_is_lent_on(connectors: tuple[Any, Any, Any], staged: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"extra_config": {"kv_lease_duration": 25} | LONG_HANDSHAKE, "staged": staged, **SHAPE}
    with ExitStack() as stack:
        first, link, last = engines = [
            stack.enter_context(EngineRig(EngineOptions(connector, "kv_both", free_port(), **options), tmp_path))
            for connector in connectors
        ]
        for engine in engines:
            engine.wait_ready()
        for number, length in enumerate((3 * BLOCK_TOKENS, 5 * BLOCK_TOKENS + 7)):
            name, tokens = f"chain-{number}", prompt(f"chain-{number}", length)
            params = first.prefill(name, tokens)
            linked = link.decode(name, tokens, params | {"do_remote_decode": True})
            check_loaded(linked, tokens, 1)
            assert linked.kv_transfer_params is not None
            first.wait_until_whole(_FREED_SECONDS)
            first.overwrite_free_blocks()  # the third reads what the second has
            answered = last.decode(name, tokens, json.loads(json.dumps(linked.kv_transfer_params)), 5)
            check_loaded(answered, tokens, 5)
        for engine in engines:
            engine.wait_until_whole(_FREED_SECONDS)
