"""Pulling KV inside the real scheduler: kinds of prompts, aborts in every state, preemption, bad parameters."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from connector.config import ConnectorOptions
from tests.integration.house import (
    BLOCK_TOKENS,
    HANDSHAKE_SECONDS,
    LAYERS,
    USABLE_BLOCKS,
    House,
    check_loaded,
    check_not_loaded,
)
from tests.rig import BlackHole, RequestSpec, dead_params, prompt

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

_RACES = 12
_ATTEMPTS = 3


def test_prompts_of_all_lengths_in_one_step(house: House) -> None:
    """Shorter than a block, whole blocks, a token more or less, several chunks; every byte is compared."""
    lengths = (1, 5, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 4 * BLOCK_TOKENS, 300)
    prompts = {f"length-{length}": prompt(f"length-{length}", length) for length in lengths}
    params = house.prefill.prefill_all(prompts)
    house.decode.submit(*(RequestSpec(name, tokens, 3, params[name]) for name, tokens in prompts.items()))
    for outcome in house.decode.wait_all(list(prompts)):
        tokens = prompts[outcome.request_id]
        check_loaded(outcome, tokens, 3)
        assert outcome.checked_pages == -(-len(tokens) // BLOCK_TOKENS) * LAYERS
        house.traces.expect_plain_request(outcome.request_id)
        house.traces.expect_plain_lease(outcome.request_id)


def test_prefix_hits_are_not_moved_again(house: House) -> None:
    """Partial hit: only the rest is read. Same prompt again: one token is left to load, whatever is cached."""
    shared = prompt("shared", 2 * BLOCK_TOKENS)
    for name, length, local in (
        ("hit-none", 100, 0),
        ("hit-partial", 100, 2 * BLOCK_TOKENS),
        ("hit-partial", 97, 3 * BLOCK_TOKENS),
        ("hit-whole-blocks", 2 * BLOCK_TOKENS, BLOCK_TOKENS),
    ):
        tokens = prompt(name, length, shared)
        outcome = house.expect_loaded(house.decode, f"{name}-{length}", tokens)
        assert (outcome.local_cached_tokens, outcome.external_cached_tokens) == (local, length - local)
    house.prefill.wait_until_idle(10)  # what was not read was given back with the rest


def test_abort_before_anything_is_scheduled_gives_the_blocks_back(house: House) -> None:
    """Scenarios 25 and 55: nothing is read, the prefill engine is told, and nobody waits for a report."""
    tokens = prompt("abort-waiting", 64)
    params = house.prefill.prefill("abort-waiting", tokens)
    house.decode.pause_steps()
    house.decode.submit(RequestSpec("abort-waiting", tokens, 1, params))
    house.decode.abort("abort-waiting")
    assert house.decode.wait("abort-waiting").finish == "abort"
    house.decode.resume_steps()
    house.traces.expect_plain_lease("abort-waiting")


def test_abort_while_the_handshake_is_pending(house: House) -> None:
    """The request ends at once and its blocks are free long before the handshake would have failed."""
    with BlackHole() as hole:
        before = house.decode.wait_until_whole(20).free_blocks
        house.decode.submit(RequestSpec("abort-pending", prompt("abort-pending", 64), 1, dead_params(hole.port, 2)))
        house.traces.wait_for_state("request", "abort-pending", "pending_handshake")
        assert house.decode.snapshot().free_blocks == before - 2
        house.decode.abort("abort-pending")
        assert house.decode.wait("abort-pending").finish == "abort"
        house.decode.wait_until_whole(20)
        path = house.traces.wait_for_state("request", "abort-pending", "failed")
        assert path == ["pending_handshake", "failed"]
        assert house.traces.reason("abort-pending") == "AbortedByClient"


def test_the_switch_interval_is_short_while_something_is_open(house: House) -> None:
    """The connector's threads get the interpreter soon then; before and afterwards it is as Python sets it."""
    with BlackHole() as hole:
        house.decode.wait_until_whole(20)
        usual = house.decode.snapshot().switch_interval_seconds
        house.decode.submit(RequestSpec("interval", prompt("interval", 64), 1, dead_params(hole.port, 2)))
        house.traces.wait_for_state("request", "interval", "pending_handshake")
        short = ConnectorOptions().switch_interval_seconds
        assert house.decode.snapshot().switch_interval_seconds == pytest.approx(short) != usual
        house.decode.abort("interval")
        assert house.decode.wait("interval").finish == "abort"
        house.decode.wait_until_whole(20)
        assert house.decode.snapshot().switch_interval_seconds == pytest.approx(usual)


def test_abort_races_the_read_and_the_first_tokens(house: House) -> None:
    """Scenarios 8 and 27: aborts at every moment from the submission to the end; no engine dies, no block is lost."""
    prompts = {f"race-{number}": prompt(f"race-{number}", 90) for number in range(_RACES)}
    for number, (name, tokens) in enumerate(prompts.items()):
        params = house.prefill.prefill(name, tokens)
        house.decode.submit(RequestSpec(name, tokens, 50, params))
        time.sleep(0.001 * number)
        house.decode.abort(name)
        assert house.decode.wait(name).finish in ("abort", "length")
    house.expect_whole()
    for name in prompts:  # however far it came, the prefill engine was told, and did not have to wait for the deadline
        house.traces.wait_for_state("lease", name, "done")
    house.expect_loaded(house.decode, "after-races", prompt("after-races", 90))


def test_preemption_takes_blocks_away_and_the_answers_stay_right(house: House) -> None:
    """Two requests that fit when they are loaded and do not when one grows, also if the other is still loading then."""
    blocks, more_blocks = USABLE_BLOCKS // 2 - 3, 8
    assert 2 * blocks < USABLE_BLOCKS < 2 * blocks + more_blocks
    prompts = {name: prompt(name, blocks * BLOCK_TOKENS) for name in ("stays", "preempted")}
    params = house.prefill.prefill_all(prompts)
    new_tokens = more_blocks * BLOCK_TOKENS
    house.decode.submit(*(RequestSpec(name, tokens, new_tokens, params[name]) for name, tokens in prompts.items()))
    outcomes = house.decode.wait_all(list(prompts))
    assert sum(outcome.preemptions for outcome in outcomes) > 0
    for outcome in outcomes:
        check_loaded(outcome, prompts[outcome.request_id], new_tokens)


def test_more_requests_than_blocks_are_served_one_after_another(house: House) -> None:
    """Scenario 60: loads that hold most of the pool still finish, and those that wait for room get it."""
    length = (USABLE_BLOCKS // 3) * BLOCK_TOKENS
    names = [f"crowd-{number}" for number in range(6)]
    prompts = {name: prompt(name, length) for name in names}
    for first in range(0, len(names), 2):
        wave = {name: prompts[name] for name in names[first : first + 2]}
        params = house.prefill.prefill_all(wave)
        house.recompute.submit(*(RequestSpec(name, tokens, 2, params[name]) for name, tokens in wave.items()))
        house.prefill.wait_until_idle(20)
    for outcome in house.recompute.wait_all(names):
        check_loaded(outcome, prompts[outcome.request_id], 2)


# ---- bad parameters (that kv_transfer_params is an object at all, vLLM checks)

Mutation = Callable[[dict[str, Any]], Any]


def _set(**fields: object) -> Mutation:
    def mutate(params: dict[str, Any]) -> Any:
        params.update(fields)
        return params

    return mutate


def _drop(field: str) -> Mutation:
    def mutate(params: dict[str, Any]) -> Any:
        del params[field]
        return params

    return mutate


_DEEP: list[Any] = []
for _ in range(200):
    _DEEP = [_DEEP]

BAD: dict[str, Mutation] = {
    "no engine id": _drop("remote_engine_id"),
    "no request id": _drop("remote_request_id"),
    "no host": _drop("remote_host"),
    "no port": _drop("remote_port"),
    "no blocks": _drop("remote_block_ids"),
    "no tp size": _drop("tp_size"),
    "engine id is a number": _set(remote_engine_id=7),
    "engine id is null": _set(remote_engine_id=None),
    "engine id is huge": _set(remote_engine_id="x" * 100_000),
    "engine id is another's": _set(remote_engine_id="somebody-else"),
    "request id has control characters": _set(remote_request_id="a\x00b\n"),
    "host is an endpoint": _set(remote_host="127.0.0.1;tcp://*"),
    "port is text": _set(remote_port="7000"),
    "port is negative": _set(remote_port=-1),
    "port is huge": _set(remote_port=1 << 40),
    "port is zero": _set(remote_port=0),
    "blocks are text": _set(remote_block_ids="1,2"),
    "blocks are not grouped": _set(remote_block_ids=[1, 2]),
    "blocks are deeply nested": _set(remote_block_ids=_DEEP),
    "block is negative": _set(remote_block_ids=[[-1, 1]]),
    "block is a float": _set(remote_block_ids=[[1.5, 2.5]]),
    "block is huge": _set(remote_block_ids=[[(1 << 64) - 1, 1]]),
    "block is beyond the cache": _set(remote_block_ids=[[USABLE_BLOCKS + 1, 1]]),
    "too few blocks": _set(remote_block_ids=[[1]]),
    "no block at all": _set(remote_block_ids=[[]]),
    "no group": _set(remote_block_ids=[]),
    "two groups": _set(remote_block_ids=[[1, 2], [1, 2]]),
    "tp size is zero": _set(tp_size=0),
    "tp size is negative": _set(tp_size=-2),
    "tp size is another": _set(tp_size=2),
    "pp size is huge": _set(pp_size=1 << 30),
    "fewer tokens than the prompt": _set(remote_num_tokens=63),
    "no tokens": _set(remote_num_tokens=0),
    "number of the lease is text": _set(lease_number="first"),
    "number of the lease is none": _set(lease_number=0),
    "lease is another": _set(lease_number=2**63 - 1),
    "push": _set(transfer_mode="push"),
    "flag is text": _set(do_remote_prefill="yes"),
    "flag is a number": _set(do_remote_decode=1),
}


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_bad_parameters_cost_their_own_request_only(house: House, policy: str) -> None:
    """Scenarios 32, 35 and 38, and bad input of each kind: an error or a recomputation, and then a good request."""
    engine = house.decode if policy == "fail" else house.recompute
    good = prompt(f"good-{policy}", 64)
    params = house.prefill.prefill(f"good-{policy}", good)
    for label, mutate in BAD.items():
        name = f"{label} ({policy})"
        tokens = prompt(name, 64)
        engine.submit(RequestSpec(name, tokens, 2, mutate(copy.deepcopy(params))))
        outcome = engine.wait(name, 30)
        try:
            check_not_loaded(engine, outcome, tokens)
        except AssertionError as error:
            raise AssertionError(f"{label}: {error}") from error
    # The lease of `params` may be over by now: what follows is a request of its own.
    house.expect_loaded(engine, f"good-after-{policy}", prompt(f"good-after-{policy}", 100))


def test_unknown_keys_are_ignored(house: House) -> None:
    """A router that adds what it knows, and a newer prefill engine, are served."""
    tokens = prompt("extra-keys", 64)
    params = house.prefill.prefill("extra-keys", tokens) | {"router": {"zone": "b"}, "remote_future": 7}
    check_loaded(house.decode.decode("extra-keys", tokens, params), tokens)


def test_a_dead_prefill_engine_delays_nobody_else(house: House) -> None:
    """Scenario 61: a healthy request is served at once while eight wait for prefill engines that hang. Once more if the
    machine stood still for so long that they had ended."""
    house.expect_loaded(house.decode, "alone", prompt("alone", 64))
    waiting = 0
    for attempt in range(_ATTEMPTS):
        with ExitStack() as stack:
            holes = [stack.enter_context(BlackHole()) for _ in range(8)]
            dead = {f"dead-{attempt}-{number}": dead_params(hole.port, 1) for number, hole in enumerate(holes)}
            house.decode.submit(*(RequestSpec(name, prompt(name, 20), 1, params) for name, params in dead.items()))
            house.expect_loaded(house.decode, f"healthy-{attempt}", prompt(f"healthy-{attempt}", 64))
            waiting = sum(not house.decode.has_ended(name) for name in dead)
            outcomes = house.decode.wait_all(list(dead), 10 * HANDSHAKE_SECONDS)
        for outcome in outcomes:
            check_not_loaded(house.decode, outcome, [])
            assert outcome.ended_ns - outcome.submitted_ns < 10 * HANDSHAKE_SECONDS * 1e9
        if waiting == len(dead):
            break
    assert waiting == len(dead), "the dead had ended before the healthy one was served: nothing is shown"


def test_the_engine_thread_calls_neither_nixl_nor_zmq(house: House) -> None:
    """Scenarios 12 and 63: after registration only the connector's own threads touch the agent and the sockets."""
    engines = (house.prefill, house.decode)
    for engine in engines:
        engine.inspect(reset_calls=True)
    with BlackHole() as hole:
        dead = RequestSpec("recorded-dead", prompt("recorded-dead", 20), 1, dead_params(hole.port, 1))
        house.decode.submit(dead)
        for number in range(50):
            name = f"recorded-{number}"
            house.expect_loaded(house.decode, name, prompt(name, 40))
        house.decode.wait("recorded-dead")
    for engine in engines:
        seen = engine.inspect()
        assert seen.engine_thread_calls == {}
        assert seen.other_thread_calls > 50
