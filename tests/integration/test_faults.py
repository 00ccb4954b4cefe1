"""Prefill engines that hang, die and come back, leases that end, actors that crash: what becomes of the blocks."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.integration.house import (
    BLOCK_TOKENS,
    LEASE_SECONDS,
    QUIESCE_SECONDS,
    REQUEST_SECONDS,
    USABLE_BLOCKS,
    House,
    check_loaded,
    check_not_loaded,
    local_request,
    wait_for_reads,
)
from tests.rig import BlackHole, EngineRig, RequestSpec, dead_params, expected_output, prompt

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

_POLICIES = pytest.mark.parametrize("policy", ["fail", "recompute"])
_TOLERANCE = 10.0
"""What a busy machine may stretch a time limit by, in seconds; it tells an end from none."""


def engine_of(house: House, policy: str) -> EngineRig:
    return house.decode if policy == "fail" else house.recompute


@contextmanager
def endless_read(house: House, decode: EngineRig, name: str, tokens: list[int]) -> Iterator[None]:
    """Inside, a request of that name has a READ in flight that does not end: the prefill engine is frozen.

    D is connected before, so that nothing but the READ waits for the prefill engine.
    """
    house.expect_loaded(decode, f"warm-up-{name}", prompt(f"warm-up-{name}", 40))
    params = house.prefill.prefill(name, tokens)
    house.prefill.freeze()
    try:
        decode.submit(RequestSpec(name, tokens, 2, params))
        wait_for_reads(decode, 1)
        yield
    finally:
        house.prefill.thaw()


def check_quarantine_ends(house: House, decode: EngineRig, name: str) -> None:
    """The READ ends, and with it the quarantine; the scheduler hears of it in its next step, so there must be one."""
    deadline = time.monotonic() + _TOLERANCE
    for step in itertools.count():
        decode.decode(f"step-{step}-{name}", prompt("step", 10), None)
        free = decode.wait_until_idle(20).free_blocks
        if free == USABLE_BLOCKS:
            return
        assert time.monotonic() < deadline, f"{free} of {USABLE_BLOCKS} blocks are free"


def check_never_handed_out(decode: EngineRig, name: str, quarantined: frozenset[int]) -> None:
    """Requests that take every block that can be had get none of these."""
    room = (USABLE_BLOCKS - len(quarantined)) * BLOCK_TOKENS
    halves = {f"{name}-{half}": prompt(f"{name}-{half}", room // 2 - BLOCK_TOKENS) for half in range(4)}
    decode.submit(*(local_request(half, tokens) for half, tokens in halves.items()))
    used: set[int] = set()
    for outcome in decode.wait_all(list(halves)):
        assert outcome.output_token_ids == expected_output(halves[outcome.request_id], 1)
        used.update(outcome.block_ids)
    assert len(used) > USABLE_BLOCKS // 2
    assert not used & quarantined


# ---- leases


@_POLICIES
def test_a_lease_that_has_ended_is_never_believed(house: House, policy: str) -> None:
    """Scenarios 1 and 2: P frees and overwrites before D is told; D ends expired, with nothing loaded."""
    decode, name = engine_of(house, policy), f"lapsed-{policy}"
    tokens = prompt(name, 3 * BLOCK_TOKENS)
    params = house.prefill.prefill(name, tokens)
    assert house.prefill.snapshot().requests == {name: "FINISHED_LENGTH_CAPPED"}  # on loan
    house.prefill.wait_until_whole(LEASE_SECONDS + _TOLERANCE)
    assert house.prefill.overwrite_free_blocks() == USABLE_BLOCKS
    outcome = decode.decode(name, tokens, params, max_tokens=2)
    check_not_loaded(decode, outcome, tokens)
    path = house.traces.wait_for_state("request", name, "expired")
    assert "done" not in path, path
    assert house.traces.reason(name) == "LeaseOver"
    house.expect_loaded(decode, f"after-{name}", prompt(f"after-{name}", 100))


# ---- a prefill engine that hangs: release of a handle is not the end of its READ


@_POLICIES
def test_blocks_of_a_read_that_never_ends_are_quarantined(house: House, policy: str) -> None:
    """Scenarios 5 and 45: the request ends in time, its blocks do not return to the pool until the READ has ended."""
    decode, name = engine_of(house, policy), f"endless-{policy}"
    tokens = prompt(name, 5 * BLOCK_TOKENS)
    with endless_read(house, decode, name, tokens):
        outcome = decode.wait(name, REQUEST_SECONDS + QUIESCE_SECONDS + _TOLERANCE)
        check_not_loaded(decode, outcome, tokens)
        path = house.traces.wait_for_state("request", name, "failed")
        assert path == ["pending_handshake", "reading", "draining", "failed"]
        records = house.traces.records("request", name)
        draining = next(record for record in records if record.to_state == "draining")
        assert records[-1].mono_ns - draining.mono_ns >= QUIESCE_SECONDS * 1e9
        assert house.traces.reason(name) == "Quarantined"
        quarantined = decode.inspect().unowned_blocks
        assert len(quarantined) == 5
        assert not quarantined & set(outcome.block_ids)  # a recomputation has other blocks
        assert decode.wait_until_idle(20).free_blocks == USABLE_BLOCKS - 5
        check_never_handed_out(decode, name, quarantined)
        assert decode.inspect().unowned_blocks == quarantined
    check_quarantine_ends(house, decode, name)
    house.prefill.wait_until_whole(LEASE_SECONDS + _TOLERANCE)
    expect_loaded_soon(house, decode, f"after-{name}")


def test_a_prefill_engine_that_hangs_costs_a_lease_and_no_deadline(house: House) -> None:
    """Scenario 45: what is asked of it is not answered, so its READs are not waited for until requests time out."""
    patience = {**house.decode.options.extra_config, "request_timeout_seconds": 300.0}
    with house.extra_engine(extra_config=patience) as decode:
        decode.wait_ready()
        tokens = prompt("hung", 5 * BLOCK_TOKENS)
        with endless_read(house, decode, "hung", tokens):
            outcome = decode.wait("hung", 2 * LEASE_SECONDS + QUIESCE_SECONDS + _TOLERANCE)
            check_not_loaded(decode, outcome, tokens)
            assert house.traces.reason("hung") == "Quarantined"
        check_quarantine_ends(house, decode, "hung")
        house.prefill.wait_until_whole(LEASE_SECONDS + _TOLERANCE)
        expect_loaded_soon(house, decode, "after-hung")


def test_an_aborted_request_whose_read_never_ends_is_quarantined_too(house: House) -> None:
    """Scenarios 5 and 8: the client is gone at once, the blocks stay until the READ has ended."""
    tokens = prompt("endless-aborted", 5 * BLOCK_TOKENS)
    with endless_read(house, house.decode, "endless-aborted", tokens):
        house.decode.abort("endless-aborted")
        assert house.decode.wait("endless-aborted").finish == "abort"
        assert house.decode.snapshot().free_blocks == USABLE_BLOCKS - 5
        house.decode.wait_until_idle(REQUEST_SECONDS + QUIESCE_SECONDS + _TOLERANCE)
        assert house.traces.reason("endless-aborted") == "Quarantined"
        quarantined = house.decode.inspect().unowned_blocks
        assert len(quarantined) == 5
        check_never_handed_out(house.decode, "endless-aborted", quarantined)
    check_quarantine_ends(house, house.decode, "endless-aborted")


def test_an_abort_in_mid_read_waits_for_the_read_and_then_frees_both_sides(house: House) -> None:
    """Scenario 8: nothing is freed while the READ lands; then D's blocks are, and P is told that it may."""
    tokens = prompt("aborted-reading", 5 * BLOCK_TOKENS)
    # The READ is waited for until the test has seen what it wants, and P runs again.
    patience = {**house.decode.options.extra_config, "quiesce_timeout_seconds": 60.0}
    with house.extra_engine(extra_config=patience) as decode:
        decode.wait_ready()
        with endless_read(house, decode, "aborted-reading", tokens):
            decode.abort("aborted-reading")
            house.traces.wait_for_state("request", "aborted-reading", "draining")
            assert decode.snapshot().free_blocks == USABLE_BLOCKS - 5
        decode.wait_until_whole(20)
        path = house.traces.wait_for_state("request", "aborted-reading", "failed")
        assert path == ["pending_handshake", "reading", "draining", "failed"]
        assert house.traces.reason("aborted-reading") == "AbortedByClient"
        house.traces.expect_plain_lease("aborted-reading")


# ---- a prefill engine that dies


@pytest.mark.parametrize(("policy", "same_id"), [("fail", True), ("recompute", False)], ids=["same-id", "new-id"])
def test_a_killed_prefill_engine_fails_its_reads_and_its_successor_is_used(
    house: House, policy: str, same_id: bool
) -> None:
    """Scenarios 13, 30, 43, 47 and 48: SIGKILL with READs in flight, then another engine at the same address."""
    decode = engine_of(house, policy)
    prompts = {f"killed-{policy}-{number}": prompt(f"killed-{policy}-{number}", 70) for number in range(4)}
    for number, engine in enumerate(house.decode_engines):  # both know the old engine
        house.expect_loaded(engine, f"before-{policy}-{number}", prompt(f"before-{policy}", 40))
    params = house.prefill.prefill_all(prompts)
    house.prefill.freeze()
    decode.submit(*(RequestSpec(name, tokens, 2, params[name]) for name, tokens in prompts.items()))
    wait_for_reads(decode, len(prompts))
    was_dying_seconds = house.prefill.kill()
    for outcome in decode.wait_all(list(prompts), REQUEST_SECONDS + QUIESCE_SECONDS + _TOLERANCE):
        check_not_loaded(decode, outcome, prompts[outcome.request_id])
        path = house.traces.wait_for("request", outcome.request_id, lambda path: path[-1:] in (["failed"], ["expired"]))
        assert path[:2] == ["pending_handshake", "reading"]
        # Unless the engine took longer to die than its requests had: until then nobody can see that it will.
        if was_dying_seconds < REQUEST_SECONDS / 2:
            assert house.traces.reason(outcome.request_id) != "Quarantined"
    decode.wait_until_whole(20)

    house.restart_prefill(same_id=same_id)
    stale_name, stale_tokens = next(iter(prompts.items()))
    stale = decode.decode(f"stale-{policy}", stale_tokens, params[stale_name], 2)
    # Whatever lies there now, it is not what was lent. Who has computed the prompt has it cached, and reads nothing.
    if policy == "fail":
        check_not_loaded(decode, stale, stale_tokens)
    else:
        assert (stale.received, stale.receive_failed, stale.mismatched_pages) == (False, False, 0)
        assert stale.output_token_ids == expected_output(stale_tokens, 2)
    for number, engine in enumerate(house.decode_engines):
        expect_loaded_soon(house, engine, f"after-{policy}-{number}")


def expect_loaded_soon(house: House, decode: EngineRig, name: str) -> None:
    """Requests may still fail while D is in back-off from an engine that hung or died; soon one is loaded."""
    deadline = time.monotonic() + _TOLERANCE
    for attempt in itertools.count():
        tokens = prompt(f"{name}-{attempt}", 70)
        params = house.prefill.prefill(f"{name}-{attempt}", tokens)
        outcome = decode.decode(f"{name}-{attempt}", tokens, params, 2)
        if outcome.received:
            check_loaded(outcome, tokens, 2)
            return
        assert time.monotonic() < deadline, f"{attempt + 1} requests failed: {outcome}"
        time.sleep(0.1)


# ---- actors that crash


def test_when_the_actors_die_the_engine_lives_and_every_transfer_fails(house: House) -> None:
    """Everything fails closed: what is open, what comes later; requests of no prefill engine are served on."""
    with house.extra_engine() as engine, BlackHole() as hole:
        engine.wait_ready()
        house.expect_loaded(engine, "before-crash", prompt("before-crash", 70))
        engine.prefill("lent-at-crash", prompt("lent-at-crash", 70))
        engine.submit(RequestSpec("open-at-crash", prompt("open-at-crash", 64), 1, dead_params(hole.port, 2)))
        house.traces.wait_for_state("request", "open-at-crash", "pending_handshake")
        engine.crash_actors()
        check_not_loaded(engine, engine.wait("open-at-crash", 20), [])
        params = house.prefill.prefill("refused", prompt("refused", 6 * BLOCK_TOKENS))
        for number in range(12):  # more than the pool would bear if refused requests kept their blocks
            name = f"refused-{number}"
            engine.submit(RequestSpec(name, prompt(name, 6 * BLOCK_TOKENS), 1, params))
            check_not_loaded(engine, engine.wait(name, 20), [])
        local = prompt("local-after-crash", 100)
        assert engine.decode("local-after-crash", local, None, 3).output_token_ids == expected_output(local, 3)
        # The lease could have been renewed up to the crash; after that nobody can believe in it.
        freed = engine.wait_until_idle(2 * LEASE_SECONDS + _TOLERANCE)
        # Two blocks of the request that was open: nobody knows whether something still writes there.
        assert freed.free_blocks >= USABLE_BLOCKS - 2
        assert engine.log_path.read_text().count("transfers no KV any more") == 1
        closed = engine.close()
    assert closed is not None, "it did not shut down in an orderly way"
    assert closed.threads == ()
