"""Beside vLLM's built-in connector: pairs of one engine of each kind, and the faults that only ours is free of.

The second half is the control of this suite: the same instruments, pointed at the built-in connector, show what they
are there to show. Should a later vLLM do better, these tests say so by failing, and can go.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.integration.house import BLOCK_TOKENS, LAYERS, SHAPE, House, check_loaded, check_not_loaded, check_pair
from tests.rig import BUILTIN, EngineRig, RequestSpec, engine_pair, prompt

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

_BUILTIN_LEASE_SECONDS = 12
_FREED_SECONDS = 8
"""Blocks that are free by then were released by the consumer, not by the end of the lease."""

Pair = tuple[EngineRig, EngineRig]


@pytest.fixture(scope="module")
def builtin(shared_house: House) -> Iterator[Pair]:
    """A built-in prefill and decode engine of the same model as the shared engines."""
    with engine_pair(
        BUILTIN,
        shared_house.directory,
        extra_config={"kv_lease_duration": _BUILTIN_LEASE_SECONDS},
        record_calls=True,
        **SHAPE,
    ) as pair:
        yield pair


def test_our_decode_engine_reads_from_a_builtin_prefill_engine(house: House, builtin: Pair) -> None:
    """Wire formats, one way: handshake, notifications, and what a lease is worth without a grant."""
    check_pair(
        builtin[0], house.decode, "builtin-to-ours", shared_tokens=2 * BLOCK_TOKENS, freed_seconds=_FREED_SECONDS
    )


def test_a_builtin_decode_engine_reads_from_our_prefill_engine(house: House, builtin: Pair) -> None:
    """Wire formats, the other way; our leases end because they were released."""
    check_pair(
        house.prefill, builtin[1], "ours-to-builtin", shared_tokens=2 * BLOCK_TOKENS, freed_seconds=_FREED_SECONDS
    )
    for length in (7, 64, 100, 150, 300):
        house.traces.expect_plain_lease(f"ours-to-builtin-{length}")


def test_an_aborted_request_frees_the_blocks_of_a_builtin_prefill_engine(house: House, builtin: Pair) -> None:
    """Scenario 55 with a built-in P: it understands that nobody will read."""
    tokens = prompt("mixed-abort", 64)
    params = builtin[0].prefill("mixed-abort", tokens)
    house.decode.pause_steps()
    house.decode.submit(RequestSpec("mixed-abort", tokens, 1, params))
    house.decode.abort("mixed-abort")
    assert house.decode.wait("mixed-abort").finish == "abort"
    house.decode.resume_steps()
    builtin[0].wait_until_whole(_FREED_SECONDS)


def test_what_was_lent_before_p_was_put_back_to_the_builtin_connector_is_not_read(house: House, builtin: Pair) -> None:
    """Under its engine id and at its address. D has what it takes to read, from blocks that hold something else."""
    tokens = prompt("put-back", 3 * BLOCK_TOKENS)
    there = ("remote_engine_id", "remote_host", "remote_port", "remote_block_ids")
    after = builtin[0].prefill("another", prompt("another", 3 * BLOCK_TOKENS))
    params = house.prefill.prefill("put-back", tokens) | {key: after[key] for key in there}
    check_not_loaded(house.decode, house.decode.decode("put-back", tokens, params), tokens)
    assert house.traces.reason("put-back") == "LeaseOver"
    for prefill in (house.prefill, builtin[0]):
        prefill.wait_until_whole(10 * _BUILTIN_LEASE_SECONDS)


# ---- controls


def test_control_a_builtin_pair_believes_in_a_lease_that_has_ended(builtin: Pair) -> None:
    """Scenario 1 as the built-in connector lives it: a success, and every page is somebody else's."""
    prefill, decode = builtin
    tokens = prompt("control-lapsed", 3 * BLOCK_TOKENS)
    params = prefill.prefill("control-lapsed", tokens)
    prefill.wait_until_whole(10 * _BUILTIN_LEASE_SECONDS)
    prefill.overwrite_free_blocks()
    outcome = decode.decode("control-lapsed", tokens, params)
    assert outcome.finish == "length"
    assert outcome.received
    assert not outcome.receive_failed
    assert outcome.mismatched_pages == outcome.checked_pages == 3 * LAYERS


def test_control_the_builtin_engine_thread_calls_nixl(builtin: Pair) -> None:
    """The instrument that finds no call of ours finds those of the built-in connector."""
    prefill, decode = builtin
    decode.inspect(reset_calls=True)
    started = time.monotonic()
    tokens = prompt("control-calls", 64)
    check_loaded(decode.decode("control-calls", tokens, prefill.prefill("control-calls", tokens)), tokens)
    assert time.monotonic() - started < 60
    calls = decode.inspect().engine_thread_calls
    assert calls.get("nixl_agent.make_prepped_xfer", 0) > 0
    assert calls.get("nixl_agent.transfer", 0) > 0
