"""Prefill engines that are not there, that die, and that come back.

The rule in every test: a dead prefill engine costs the requests that need it, within their deadline, and nobody else.
Under the policy `fail` such a request is an error for its client, under `recompute` D computes the prompt itself.

Killing is SIGKILL to every process of the engine at once. Order: the engine that a test leaves dead is started again by
the next test that needs it, and the tests about restarts look at what the restart is like for D.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from connector.observe.traced import TERMINAL
from tests.e2e.client import Answer, PrefillDecode
from tests.e2e.cluster import (
    HANDSHAKE_TIMEOUT_SECONDS,
    LEASE_SECONDS,
    PREFILL_BLOCKS,
    REQUEST_TIMEOUT_SECONDS,
    SETTLE_SECONDS,
    OnePrefillTwoDecode,
    blocks_of,
    prompt,
)
from tests.e2e.stalls import Stall, watched
from tests.rig.network import BlackHole, dead_params, free_port

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(420)]

TOKENS = 100
DEADLINE_MARGIN_SECONDS = 5.0
"""For a busy machine, and for the computation of the prompt under the policy `recompute`."""
HEALTHY_LIMIT_SECONDS = 0.5
NORMAL_TIME_MARGIN_SECONDS = 1.0
"""By how much a request that needs no P may take longer while others wait for a dead one."""
NOTICED_SECONDS = HANDSHAKE_TIMEOUT_SECONDS - 1
"""A request for an engine whose port refuses connections ends at once. This is for a busy machine, where vLLM's queue
alone may take five seconds (`stalls`); what waits for an answer takes longer."""
STALL_SECONDS = 2.0
"""After which D's stacks are taken. vLLM's queue spins for a second before it sleeps."""
ATTEMPTS = 3


def prefilled(service: PrefillDecode, key: str) -> dict[str, Any]:
    """Parameters of the prompt of `key`, which P has computed."""
    answer = service.prefill(prompt(TOKENS, key), key)
    assert answer.ok, answer.error
    assert answer.kv_transfer_params is not None
    return answer.kv_transfer_params


def decode(service: PrefillDecode, key: str, params: dict[str, Any]) -> Answer:
    return service.decode(prompt(TOKENS, key), params, key)


def prefill_and_decode(service: PrefillDecode, key: str) -> Answer:
    return decode(service, key, prefilled(service, key))


def assert_serves(cluster: OnePrefillTwoDecode, name: str) -> None:
    """Both D are served by P, as if nothing had been."""
    for policy, service in (("fail", cluster.fail), ("recompute", cluster.recompute)):
        key = f"{name}-{policy}"
        answer = decode(service, key, prefilled(service, key))
        assert answer.ok, (policy, answer.error)
        assert answer.token_ids == service.alone(prompt(TOKENS, key)).token_ids
        cluster.traces.assert_plain(key)


def assert_lost(cluster: OnePrefillTwoDecode, service: PrefillDecode, key: str, answer: Answer) -> None:
    """The request ended without its KV, in time, in the way of its policy."""
    assert cluster.traces.ended_request(key).states[-1] in ("failed", "expired")
    assert answer.seconds < REQUEST_TIMEOUT_SECONDS + DEADLINE_MARGIN_SECONDS
    if service is cluster.fail:
        assert answer.status == 500
    else:
        assert answer.ok, answer.error
        assert answer.token_ids == service.alone(prompt(TOKENS, key)).token_ids


class Disturbed(AssertionError):
    """A request that needs no P, or whose P is well, did not take its normal time."""

    def __init__(self, what: str, stalls: Sequence[Stall] = ()) -> None:
        seen = "\n\n".join(str(stall) for stall in stalls if stall.stacks)
        super().__init__(f"{what}\n{seen}")
        self.by_chance = not stalls or any(stall.in_queue for stall in stalls)
        """Whether the machine stood still before anything could be shown, or vLLM's own queue held D up (`stalls`)."""


def normal_seconds(service: PrefillDecode) -> float:
    """How long D takes for a request that needs no P; the slowest of a few, the machine is shared."""
    answers = [service.alone(prompt(TOKENS, f"normal {number}")) for number in range(3)]
    assert all(answer.ok for answer in answers)
    return max(answer.seconds for answer in answers)


def assert_undisturbed(service: PrefillDecode, normal: float, waiting: Sequence[Future[Answer]] = ()) -> None:
    """A request that needs no P takes its normal time, while others wait for a dead one."""
    if any(each.done() for each in waiting):
        raise Disturbed("the others were to wait, or nothing is shown")
    assert_in_time(
        service,
        [partial(service.alone, prompt(TOKENS, "undisturbed"))] * ATTEMPTS,
        normal + NORMAL_TIME_MARGIN_SECONDS,
        waiting,
    )


def assert_in_time(
    service: PrefillDecode,
    calls: Sequence[Callable[[], Answer]],
    limit_seconds: float,
    waiting: Sequence[Future[Answer]],
) -> list[Answer]:
    """The answers of `calls` up to the first that takes no longer than the limit.

    The machine may stand still for a second or two, and not through any fault of D, so there are several calls, as long
    as the others wait. A D that waits with them has no second one.
    """
    answers: list[Answer] = []
    stalls = []
    for call in calls:
        with watched(service.decode_engine, STALL_SECONDS) as stall:
            answer = call()
        assert answer.ok, answer.error
        answers.append(answer)
        if answer.seconds < limit_seconds and not any(each.done() for each in waiting):
            return answers
        stalls.append(stall)
        if any(each.done() for each in waiting):
            break
    needed_seconds = [round(each.seconds, 3) for each in answers]
    raise Disturbed(f"D needed {needed_seconds} s, the limit is {limit_seconds:.3f} s", stalls)


def played_again_if_disturbed(play: Callable[[OnePrefillTwoDecode, str], None], cluster: OnePrefillTwoDecode) -> None:
    """`play` a scenario, and again when D was disturbed by chance. The text it gets is new each time.

    A D that is held up by a dead engine shows other stacks, and is held up every time.
    """
    for time in ("first", "second", "third"):
        cluster.need_prefill()
        try:
            play(cluster, time)
            return
        except Disturbed as disturbed:
            warnings.warn(f"disturbed: {disturbed}", stacklevel=1)
            if not disturbed.by_chance or time == "third":
                raise


def start(pool: ThreadPoolExecutor, service: PrefillDecode, key: str, params: dict[str, Any]) -> Future[Answer]:
    return pool.submit(decode, service, key, params)


# --- engines that never were ------------------------------------------------------------------------------------------


def test_a_healthy_engine_is_served_while_eight_requests_wait_for_eight_dead_ones(cluster: OnePrefillTwoDecode) -> None:
    """Eight listeners that never answer. Beside them four closed ports, which are noticed at once. Scenario 61."""
    played_again_if_disturbed(serve_beside_eight_dead_ones, cluster)


def serve_beside_eight_dead_ones(cluster: OnePrefillTwoDecode, time: str) -> None:
    service = cluster.fail
    usual = decode(service, f"without-the-dead-{time}", prefilled(service, f"without-the-dead-{time}"))
    healthy = [f"beside-the-dead-{time}-{number}" for number in range(ATTEMPTS)]
    keys = [f"dead-{time}-{number}" for number in range(8)]
    closed = {f"closed-{time}-{number}": dead_params(free_port(), 1) for number in range(4)}
    with ExitStack() as stack:
        ports = [stack.enter_context(BlackHole()).port for _ in keys]
        pool = stack.enter_context(ThreadPoolExecutor(len(keys) + len(closed)))
        waiting = {
            key: pool.submit(service.decode, prompt(20, key), dead_params(port, 1), key)
            for key, port in zip(keys, ports, strict=True)
        }
        cluster.traces.all_in_d(keys)
        refused = {key: pool.submit(service.decode, prompt(20, key), params, key) for key, params in closed.items()}
        calls = [partial(prefill_and_decode, service, key) for key in healthy]
        answers = assert_in_time(service, calls, HEALTHY_LIMIT_SECONDS + usual.seconds, list(waiting.values()))
        for key, each in refused.items():
            assert each.result().status == 500
            assert each.result().seconds < NOTICED_SECONDS
            assert cluster.traces.last_record(key).reason == "ConnectionRefused"
        for dead, each in waiting.items():
            assert each.result().status == 500
            assert each.result().seconds < HANDSHAKE_TIMEOUT_SECONDS + DEADLINE_MARGIN_SECONDS
            record = cluster.traces.last_record(dead)
            assert (record.to_state, record.reason) == ("failed", "HandshakeTimeout")
            assert f"engine {record.peer} at" in cluster.failing.log()
            assert f"HandshakeTimeout: request {record.subject}, engine {record.peer} at" in cluster.failing.log()
    for key, answer in zip(healthy, answers, strict=False):  # as many as were needed
        assert answer.token_ids == service.alone(prompt(TOKENS, key)).token_ids
        cluster.traces.assert_plain(key)
    assert service.decode_client.blocks_are_free()


def test_an_engine_that_does_not_exist(cluster: OnePrefillTwoDecode) -> None:
    """Scenarios 43 and 26."""
    keys = ["nobody-fail", "nobody-recompute"]
    with ThreadPoolExecutor(len(keys)) as pool:
        answers = [
            start(pool, service, key, dead_params(free_port(), blocks_of(TOKENS)))
            for service, key in zip(cluster.services, keys, strict=True)
        ]
        for service, key, answer in zip(cluster.services, keys, answers, strict=True):
            assert_lost(cluster, service, key, answer.result())
            assert answer.result().seconds < NOTICED_SECONDS
            assert cluster.traces.last_record(key).reason == "ConnectionRefused"
    assert_serves(cluster, "nobody-next")


# --- P is killed ------------------------------------------------------------------------------------------------------


def test_killed_between_handshake_and_read(cluster: OnePrefillTwoDecode) -> None:
    """D has a connection that has become a dead one, and knows that it is reset. Scenarios 30 and 47."""
    played_again_if_disturbed(kill_between_handshake_and_read, cluster)


def kill_between_handshake_and_read(cluster: OnePrefillTwoDecode, time: str) -> None:
    assert_serves(cluster, f"before-the-kill-{time}")
    service, key = cluster.fail, f"killed-before-read-{time}"
    normal = normal_seconds(service)
    params = prefilled(service, key)
    cluster.prefill.kill()
    answer = decode(service, key, params)
    assert_lost(cluster, service, key, answer)
    assert answer.seconds < NOTICED_SECONDS
    assert_undisturbed(service, normal)
    assert service.decode_client.blocks_are_free()


def test_restarted_with_the_same_engine_id(unmended: OnePrefillTwoDecode) -> None:
    """Both D had a connection to the process that was killed; one has asked for nothing since. Scenario 48."""
    unmended.prefill.kill()
    unmended.restart_prefill()
    assert_serves(unmended, "same-id-again")


def test_killed_while_eight_requests_run(cluster: OnePrefillTwoDecode) -> None:
    """Four on each D. Of each four, two are on their way when P dies: over TCP they hang in the middle of the READ,
    because P has been stopped before, otherwise they may be through. The other two come after, and end at once.
    Scenario 45."""
    played_again_if_disturbed(kill_while_eight_requests_run, cluster)


def kill_while_eight_requests_run(cluster: OnePrefillTwoDecode, time: str) -> None:
    assert_serves(cluster, f"before-the-eight-{time}")
    normal = {id(service): normal_seconds(service) for service in cluster.services}
    keys = [f"eight-{time}-{number}" for number in range(8)]
    services = {key: cluster.services[number % 2] for number, key in enumerate(keys)}
    params = {key: prefilled(services[key], key) for key in keys}
    early, late = keys[:4], keys[4:]
    with ThreadPoolExecutor(len(keys)) as pool, ThreadPoolExecutor(len(cluster.services)) as checks:
        cluster.prefill.pause()
        answers = {key: start(pool, services[key], key, params[key]) for key in early}
        for key in early:
            cluster.traces.request_in(key, "reading", "proving", *TERMINAL["request"])
        cluster.prefill.start_to_kill()
        answers |= {key: start(pool, services[key], key, params[key]) for key in late}
        undisturbed = [checks.submit(assert_undisturbed, service, normal[id(service)]) for service in cluster.services]
        for each in undisturbed:
            each.result()
        for key in keys:
            assert_right_or_lost(cluster, services[key], key, answers[key].result())
        for key in late:
            assert answers[key].result().seconds < NOTICED_SECONDS
        for key in keys:
            must_be_lost = key in late or services[key] is cluster.recompute
            assert not must_be_lost or cluster.traces.ended_request(key).states[-1] != "done"
    for service in cluster.services:
        assert_undisturbed(service, normal[id(service)])
        assert service.decode_client.blocks_are_free()


def assert_right_or_lost(cluster: OnePrefillTwoDecode, service: PrefillDecode, key: str, answer: Answer) -> None:
    if cluster.traces.ended_request(key).states[-1] == "done":
        assert answer.ok, answer.error
        assert answer.token_ids == service.alone(prompt(TOKENS, key)).token_ids
    else:
        assert_lost(cluster, service, key, answer)


def test_killed_before_the_handshake(unmended: OnePrefillTwoDecode) -> None:
    """No D has ever talked to this P, which has a new engine id."""
    cluster = unmended
    cluster.restart_prefill(engine_id=None)
    keys = ["killed-before-handshake-fail", "killed-before-handshake-recompute"]
    params = [prefilled(service, key) for service, key in zip(cluster.services, keys, strict=True)]
    cluster.prefill.kill()
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(decode, *each) for each in zip(cluster.services, keys, params, strict=True)]
        for service, key, answer in zip(cluster.services, keys, answers, strict=True):
            assert_lost(cluster, service, key, answer.result())
            assert answer.result().seconds < NOTICED_SECONDS
            assert cluster.traces.last_record(key).reason == "ConnectionRefused"


def test_restarted_with_a_new_engine_id(unmended: OnePrefillTwoDecode) -> None:
    """At the address where D has only met a dead engine."""
    unmended.restart_prefill(engine_id=None)
    assert_serves(unmended, "new-id")


# --- P lives, but its lease has ended ---------------------------------------------------------------------------------


def test_a_lease_that_has_lapsed(cluster: OnePrefillTwoDecode) -> None:
    """P frees the blocks and computes other prompts into them before D is told of them. D must not read them as if they
    were the request's, and says `expired`. Scenario 1."""
    keys = ["lapsed-fail", "lapsed-recompute"]
    params = [prefilled(service, key) for service, key in zip(cluster.services, keys, strict=True)]
    for key in keys:
        lease = cluster.traces.ended_lease(key, LEASE_SECONDS + SETTLE_SECONDS)
        assert lease.states == ("computing", "held", "expired")
    overwrite(cluster)
    for service, key, each in zip(cluster.services, keys, params, strict=True):
        assert_lost(cluster, service, key, decode(service, key, each))
        record = cluster.traces.last_record(key)
        assert (record.to_state, record.reason) == ("expired", "LeaseOver")
    assert_serves(cluster, "lapsed-next")


def overwrite(cluster: OnePrefillTwoDecode) -> None:
    """Have P compute so many other prompts that every free block has been used again."""
    client, tokens = cluster.fail.prefill_client, 900
    for number in range(2 * PREFILL_BLOCKS // blocks_of(tokens) + 1):
        assert client.complete(prompt(tokens, f"overwrite {number}"), max_tokens=1).ok
