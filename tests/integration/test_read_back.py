"""Read-back (`bidirectional_kv_xfer`) over real NIXL: P reads the beginning of a conversation's next prompt from the D
that has answered, every byte is compared, and each side's blocks come back. With the built-in connector on either side.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.integration.house import BLOCK_TOKENS, LONG_HANDSHAKE, SHAPE, check_loaded
from tests.rig import BUILTIN, OURS, Check, EngineRig, RequestOutcome, RequestSpec, engine_pair, expected_output, prompt

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TTL_SECONDS = 6.0
OPTIONS = {
    "bidirectional_kv_xfer": True,
    "kv_recompute_threshold": BLOCK_TOKENS,
    "decoder_kv_blocks_ttl": TTL_SECONDS,
    "kv_lease_duration": 25,
} | LONG_HANDSHAKE
REMOTE_DECODE: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
ANSWER = 5
_FREED_SECONDS = 10
"""Blocks that are free by then were released, and did not wait for the end of a lease."""


@contextmanager
def pair(directory: Path, prefill: Any, decode: Any, **others: Any) -> Iterator[tuple[EngineRig, EngineRig]]:
    with engine_pair(prefill, directory, decode_connector=decode, extra_config=OPTIONS, **SHAPE, **others) as engines:
        yield engines


def turn(
    engines: tuple[EngineRig, EngineRig], name: str, tokens: list[int], params: dict[str, Any]
) -> tuple[RequestOutcome, RequestOutcome]:
    """What P and D made of one prompt. P has forgotten what it computed before."""
    prefill, decode = engines
    prefill.wait_until_whole(_FREED_SECONDS)
    prefill.overwrite_free_blocks()
    prefilled = prefill.decode(f"{name}-on-p", tokens, params)
    assert prefilled.mismatched_pages == 0
    assert prefilled.output_token_ids == expected_output(tokens, 1)
    answered = decode.decode(f"{name}-on-d", tokens, as_json(prefilled), ANSWER)
    check_loaded(answered, tokens, ANSWER)
    return prefilled, answered


def as_json(outcome: RequestOutcome) -> dict[str, Any]:
    """As a router hands it on."""
    assert outcome.kv_transfer_params is not None
    found: dict[str, Any] = json.loads(json.dumps(outcome.kv_transfer_params))
    return found


@pytest.mark.parametrize(
    ("prefill", "decode", "is_read_back"),
    [(OURS, OURS, True), (BUILTIN, OURS, True), (OURS, BUILTIN, False)],
    ids=["ours", "built-in P", "built-in D"],
)
def test_a_conversation_is_read_back(prefill: Any, decode: Any, is_read_back: bool, tmp_path: Path) -> None:
    """Our P reads from a D that answers for its leases, and computes what a built-in D may not have any more."""
    with pair(tmp_path, prefill, decode) as engines:
        tokens, params = prompt("conversation", 3 * BLOCK_TOKENS + 7), REMOTE_DECODE
        there = 0
        for number in range(3):
            prefilled, answered = turn(engines, f"turn-{number}", tokens, params)
            assert prefilled.received is (is_read_back and number > 0)
            if prefilled.received:
                assert prefilled.external_cached_tokens == there
                assert prefilled.checked_pages > 0
            there = len(tokens) + ANSWER - 1
            tokens = [*tokens, *answered.output_token_ids, *prompt(f"more-{number}", 40)]
            params = as_json(answered)
            assert params["do_remote_decode"]
        for engine in engines:
            engine.wait_until_whole(TTL_SECONDS + 20)


def test_an_abort_while_p_reads_back_leaves_nothing(tmp_path: Path) -> None:
    """The client goes away while a READ from D is in flight: P waits for its end, then both sides have their blocks
    again, and D does not wait for its lease to run out. The client that asks once more is answered, and what follows is
    read back as before."""
    settings: dict[str, Any] = {
        "environment": {"UCX_TLS": "tcp,self"},  # a READ needs the other side then, and is held up by a frozen one
        "prefill_options": {"kv_load_failure_policy": "recompute"},
        "decode_options": {"extra_config": OPTIONS | {"decoder_kv_blocks_ttl": 10 * TTL_SECONDS}},
    }
    with pair(tmp_path, OURS, OURS, **settings) as engines:
        prefill, decode = engines
        tokens, params = prompt("aborted", 3 * BLOCK_TOKENS + 7), REMOTE_DECODE
        for number in range(2):  # the second is read back, so that P is connected to D
            prefilled, answered = turn(engines, f"turn-{number}", tokens, params)
            assert prefilled.received is (number > 0)
            tokens = [*tokens, *answered.output_token_ids, *prompt(f"more-{number}", 40)]
            params = as_json(answered)
        prefill.wait_until_whole(_FREED_SECONDS)
        prefill.overwrite_free_blocks()
        decode.freeze()
        try:
            prefill.submit(RequestSpec("aborted", tokens, 1, params, Check.EVERY_BYTE))
            deadline = time.monotonic() + _FREED_SECONDS
            while (holdings := prefill.inspect().holdings) is None or not holdings.reads:
                assert time.monotonic() < deadline, f"no READ: {holdings}"
                time.sleep(0.01)
            prefill.abort("aborted")
            assert prefill.wait("aborted").finish == "abort"
            snapshot = prefill.snapshot()
            assert snapshot.free_blocks < snapshot.blocks - 1, "freed while the READ may write"
        finally:
            decode.thaw()
        prefill.wait_until_whole(_FREED_SECONDS)
        decode.wait_until_whole(_FREED_SECONDS)
        for engine in engines:
            holdings = engine.inspect().holdings
            assert holdings is not None
            assert holdings.reads == 0
        for number in range(2):
            prefilled, answered = turn(engines, f"again-{number}", tokens, params)
            assert prefilled.received is (number > 0)
            tokens = [*tokens, *answered.output_token_ids, *prompt(f"and-more-{number}", 40)]
            params = as_json(answered)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EngineRig, EngineRig]]:
    """A pair for tests that leave nothing behind."""
    with pair(tmp_path_factory.mktemp("ours"), OURS, OURS) as engines:
        yield engines


def test_what_nobody_reads_back_is_freed_in_time(ours: tuple[EngineRig, EngineRig]) -> None:
    turn(ours, "only", prompt("only", 100), REMOTE_DECODE)
    free = ours[1].snapshot().free_blocks
    assert free < ours[1].snapshot().blocks - 1
    ours[1].wait_until_whole(TTL_SECONDS + 10)


def test_what_is_too_little_to_read_is_given_back_at_once(ours: tuple[EngineRig, EngineRig]) -> None:
    tokens = prompt("short", BLOCK_TOKENS - ANSWER)
    _, answered = turn(ours, "short", tokens, REMOTE_DECODE)
    longer = [*tokens, *answered.output_token_ids, *prompt("more", 40)]
    prefilled, _ = turn(ours, "longer", longer, as_json(answered))
    assert not prefilled.received
    ours[1].wait_until_whole(TTL_SECONDS + 10)


def test_a_lease_of_d_that_is_over_is_not_read(ours: tuple[EngineRig, EngineRig]) -> None:
    """The client comes back too late: P is told so, and the policy decides."""
    tokens = prompt("late", 100)
    _, answered = turn(ours, "late", tokens, REMOTE_DECODE)
    ours[1].wait_until_whole(TTL_SECONDS + 10)
    ours[1].overwrite_free_blocks()
    ours[0].wait_until_whole(_FREED_SECONDS)
    ours[0].overwrite_free_blocks()
    longer = [*tokens, *answered.output_token_ids, *prompt("later", 40)]
    outcome = ours[0].decode("later-on-p", longer, as_json(answered))
    assert outcome.receive_failed
    assert not outcome.mismatched_pages
