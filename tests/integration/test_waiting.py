"""Requests that wait in D's queue for a long time, inside the real scheduler: a live P waits with them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import uuid4

import pytest

from tests.integration.house import BLOCK_TOKENS, LEASE_SECONDS, USABLE_BLOCKS, House, check_loaded, check_not_loaded
from tests.rig import EngineRig, RequestSpec, free_port, prompt

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TOLERANCE_SECONDS = 10.0
HELD_SECONDS = 1.5 * LEASE_SECONDS
"""Longer than a lease lasts that is not renewed, or only once."""
BLOCKERS = 40
BLOCKER_TOKENS = (USABLE_BLOCKS - 2) * BLOCK_TOKENS
"""Together they take minutes if nobody aborts them."""


def narrow_engine(house: House) -> EngineRig:
    """A decode engine that serves one request at a time."""
    options = dataclasses.replace(
        house.decode.options, engine_id=f"rig-{uuid4().hex[:12]}", side_channel_port=free_port(), max_requests=1
    )
    return EngineRig(options, house.directory)


@pytest.fixture(scope="module")
def narrow(shared_house: House) -> Iterator[EngineRig]:
    with narrow_engine(shared_house) as engine:
        engine.wait_ready()
        yield engine


@contextmanager
def occupied(decode: EngineRig, name: str) -> Iterator[None]:
    """Inside, whatever is submitted waits in the queue of an engine that makes steps."""
    names = [f"{name}-{number}" for number in range(BLOCKERS)]
    decode.submit(*(RequestSpec(each, prompt(each, 2), BLOCKER_TOKENS) for each in names))
    yield
    decode.abort(*names)
    decode.wait_all(names)


def test_a_request_that_waits_for_three_lease_times_is_served(house: House, narrow: EngineRig) -> None:
    """D has not met P before, and holds what waits in its queue; P gives nothing away meanwhile."""
    name = "long-queue"
    house.prefill.kill()
    house.restart_prefill(same_id=False)
    tokens = prompt(name, 3 * BLOCK_TOKENS)
    params = house.prefill.prefill(name, tokens)
    with occupied(narrow, f"{name}-blocker"):
        narrow.submit(RequestSpec(name, tokens, 2, params))
        time.sleep(3 * LEASE_SECONDS)
        lent = house.prefill.snapshot().requests
        assert not narrow.has_ended(name)
    outcome = narrow.wait(name)
    assert outcome.received, f"{house.traces.reason(name)}, while P had lent {lent}"
    check_loaded(outcome, tokens, 2)


def test_a_lease_outlives_an_engine_that_makes_no_step(house: House, narrow: EngineRig) -> None:
    """Scenario 62: D's engine thread stands still for longer than a lease, as in a long step; its actors do not."""
    name, tokens = "no-step", prompt("no-step", 3 * BLOCK_TOKENS)
    house.expect_loaded(narrow, f"{name}-before", prompt(f"{name}-before", 40))
    params = house.prefill.prefill(name, tokens)
    with occupied(narrow, f"{name}-blocker"):
        narrow.submit(RequestSpec(name, tokens, 2, params))
        house.traces.wait_for_state("hold", f"{name}/0", "held")
        narrow.pause_steps()
        time.sleep(HELD_SECONDS)
        lent = house.prefill.snapshot().requests
        narrow.resume_steps()
    outcome = narrow.wait(name)
    assert outcome.received, f"{house.traces.reason(name)}, while P had lent {lent}"
    check_loaded(outcome, tokens, 2)


def test_blocks_that_a_killed_decode_engine_has_held_come_back_when_their_lease_is_over(house: House) -> None:
    """Scenario 54: its requests wait in its queue, it renews their leases, and then it is gone without a word."""
    prompts = {f"stranded-{number}": prompt(f"stranded-{number}", 3 * BLOCK_TOKENS) for number in range(4)}
    with narrow_engine(house) as engine:
        engine.wait_ready()
        house.expect_loaded(engine, "before-stranded", prompt("before-stranded", 40))
        params = house.prefill.prefill_all(prompts)
        engine.submit(*(RequestSpec(f"blocker-{number}", prompt("b", 2), BLOCKER_TOKENS) for number in range(BLOCKERS)))
        engine.submit(*(RequestSpec(name, tokens, 2, params[name]) for name, tokens in prompts.items()))
        time.sleep(HELD_SECONDS)
        assert set(house.prefill.snapshot().requests) == set(prompts), "they are held"
        engine.kill()
        house.prefill.wait_until_whole(LEASE_SECONDS + TOLERANCE_SECONDS)
    for name in prompts:
        assert house.traces.wait_for_state("lease", name, "expired")
    house.expect_loaded(house.decode, "after-stranded", prompt("after-stranded", 100))


def test_a_request_that_waits_for_a_killed_engine_fails_as_soon_as_it_is_scheduled(
    house: House, narrow: EngineRig
) -> None:
    """P dies while D holds its blocks; D's control connection was reset long before the request is scheduled."""
    name, tokens = "waits-for-dead", prompt("waits-for-dead", 70)
    house.expect_loaded(narrow, "before-death", prompt("before-death", 40))
    params = house.prefill.prefill(name, tokens)
    with occupied(narrow, "death-blocker"):
        narrow.submit(RequestSpec(name, tokens, 2, params))
        house.traces.wait_for_state("hold", f"{name}/0", "held")
        house.prefill.kill()
        time.sleep(1.0)
    outcome = narrow.wait(name, 20)
    house.restart_prefill(same_id=False)
    check_not_loaded(narrow, outcome, tokens)
    house.expect_failed_by_no_time_limit(name)
