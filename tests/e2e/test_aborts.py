"""Clients that go away, in every phase of a request. Each leaves nothing behind: the machines end, the blocks of both
engines come back, and the next request is served.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tests.e2e.client import REQUEST_TRANSFER, PrefillDecode
from tests.e2e.cluster import (
    HANDSHAKE_TIMEOUT_SECONDS,
    LEASE_SECONDS,
    SETTLE_SECONDS,
    OnePrefillTwoDecode,
    prompt,
    wait_for,
)
from tests.e2e.engines import Engine
from tests.plain_paths import LEASE_PATHS_PLAIN
from tests.rig.network import BlackHole, dead_params

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(420)]

STILL_SECONDS = 1.0
"""After this long a READ that cannot end has still not ended."""
ATTEMPTS = 4
SWEEP_TOKENS = 100


def assert_serves(service: PrefillDecode, cluster: OnePrefillTwoDecode, key: str) -> None:
    """The next request goes the plain way, and nothing of the earlier ones is left."""
    cluster.assert_serves(service, key)
    assert service.prefill_client.blocks_are_free(LEASE_SECONDS + SETTLE_SECONDS)
    assert service.decode_client.blocks_are_free()


@contextmanager
def paused(engine: Engine) -> Iterator[None]:
    """All processes of the engine stand still."""
    engine.pause()
    try:
        yield
    finally:
        engine.resume()


def test_while_it_waits_for_the_handshake(cluster: OnePrefillTwoDecode) -> None:
    """The request ends at once, not when the handshake does: nothing is in flight."""
    d, key = cluster.fail.decode_client, "abort-waiting"
    with BlackHole() as hole:
        params = dead_params(hole.port, 4)
        with d.leaving(prompt(100, key), request_id=key, kv_transfer_params=params) as client:
            cluster.traces.request_in(key, "pending_handshake")
            assert not client.is_answered
        request = cluster.traces.ended_request(key)
    assert request.states == ("pending_handshake", "failed")
    assert request.reason == "AbortedByClient"
    waited_seconds = request.visits[0].seconds
    assert waited_seconds is not None
    assert waited_seconds < HANDSHAKE_TIMEOUT_SECONDS
    assert_serves(cluster.fail, cluster, "abort-waiting-next")


def test_while_a_read_is_in_flight(cluster: OnePrefillTwoDecode) -> None:
    """The READ cannot be stopped, so the request drains; its blocks come back when the READ has ended, not before.
    Meanwhile D serves others. Scenario 8."""
    for attempt in range(ATTEMPTS):
        if not abort_while_a_read_is_in_flight(cluster, f"abort-reading-{attempt}"):
            break
    else:
        pytest.fail("P has stood still for longer than a lease each time")


def abort_while_a_read_is_in_flight(cluster: OnePrefillTwoDecode, key: str) -> bool:
    """Whether P stood still for so long that its lease may have been over before it heard of the release."""
    service = cluster.recompute
    assert_serves(service, cluster, f"{key}-before")
    params = service.prefill(prompt(900, key), key).kv_transfer_params
    assert params is not None
    stopped = time.monotonic()
    with paused(cluster.prefill):
        with service.decode_client.leaving(prompt(900, key), request_id=key, kv_transfer_params=params) as client:
            cluster.traces.request_in(key, "reading")
            assert not client.is_answered
        draining = cluster.traces.request_in(key, "draining")
        beside = service.alone(prompt(50, key))
        assert beside.ok, beside.error
        time.sleep(STILL_SECONDS)
        assert cluster.traces.both(key)[0] == draining
    was_long = time.monotonic() - stopped > LEASE_SECONDS / 2
    request = cluster.traces.ended_request(key)
    assert request.states == ("pending_handshake", "reading", "draining", "failed")
    assert request.reason == "AbortedByClient"
    lease = cluster.traces.ended_lease(key, LEASE_SECONDS + SETTLE_SECONDS)
    assert_serves(service, cluster, f"{key}-next")
    if was_long and lease.states[-1] == "expired":
        return True
    assert lease.states in LEASE_PATHS_PLAIN
    return False


def test_while_the_answer_is_decoded(cluster: OnePrefillTwoDecode) -> None:
    text, key = prompt(100, "abort decoding"), "abort-decoding"
    params = cluster.fail.prefill(text, key).kv_transfer_params
    tokens = cluster.fail.decode_client.stream(text, max_tokens=800, request_id=key, kv_transfer_params=params)
    next(tokens)
    tokens.close()
    cluster.traces.assert_plain(key)
    running = cluster.fail.decode_client.metric
    wait_for(lambda: running("vllm:num_requests_running") == 0 or None, "D gives the aborted request up")
    assert_serves(cluster.fail, cluster, "abort-decoding-next")


def test_while_p_is_computing(cluster: OnePrefillTwoDecode) -> None:
    """Nothing is lent before the prefill request has ended, so nothing is taken back. Scenario 29.

    Once more if P heard of it only when it had answered: then the lease was granted, and nobody reads it.
    """
    ends: list[tuple[str, ...]] = []
    while len(ends) < ATTEMPTS and (not ends or ends[-1] == ("computing", "held", "expired")):
        ends.append(end_of_a_lease_without_its_client(cluster, f"abort-computing-{len(ends)}"))
    assert ends[-1] == ("computing", "withdrawn"), ends
    assert_serves(cluster.fail, cluster, "abort-computing-next")


def end_of_a_lease_without_its_client(cluster: OnePrefillTwoDecode, key: str) -> tuple[str, ...]:
    """The states of a lease whose client leaves with the first token of many."""
    tokens = cluster.fail.prefill_client.stream(
        prompt(100, key), max_tokens=800, request_id=key, kv_transfer_params=REQUEST_TRANSFER
    )
    next(tokens)
    tokens.close()
    return cluster.traces.ended_lease(key, LEASE_SECONDS + SETTLE_SECONDS).states


def test_at_any_moment(cluster: OnePrefillTwoDecode) -> None:
    """Twenty clients that go away one after another, each later in the life of its request than the one before."""
    service = cluster.fail
    assert_serves(service, cluster, "abort-sweep-before")  # so that they have met
    usual = service.pd(prompt(100, "abort sweep usual"), "abort-sweep-usual", SWEEP_TOKENS)
    assert usual.ok, usual.error
    keys = [f"abort-sweep-{number}" for number in range(20)]
    for number, key in enumerate(keys):
        params = service.prefill(prompt(100, key), key).kv_transfer_params
        assert params is not None
        # The first ones while D is about to read; the last one when it has nearly answered.
        patience_seconds = max(0.002, usual.seconds * (number / len(keys)) ** 2)
        service.decode(prompt(100, key), params, key, SWEEP_TOKENS, timeout_seconds=patience_seconds)
    for key in keys:
        request, _ = cluster.traces.both(key)
        if request is not None:  # otherwise the client was gone before D had read its request
            cluster.traces.ended_request(key)
            assert cluster.traces.ended_lease(key).states[-1] == "done"
    assert any(cluster.traces.both(key)[0] for key in keys)
    wait_for(
        lambda: service.prefill_client.blocks_are_free(1.0) or None,
        "the leases of requests that never reached D end at their deadline",
        timeout_seconds=2 * LEASE_SECONDS,
    )
    assert_serves(service, cluster, "abort-sweep-next")


def test_when_the_answer_has_been_given(cluster: OnePrefillTwoDecode) -> None:
    """The connection breaks between the last token and the end of the stream."""
    text, key = prompt(60, "abort late"), "abort-late"
    params = cluster.fail.prefill(text, key).kv_transfer_params
    tokens = cluster.fail.decode_client.stream(text, max_tokens=4, request_id=key, kv_transfer_params=params)
    assert len([next(tokens) for _ in range(4)]) == 4
    tokens.close()
    cluster.traces.assert_plain(key)
    assert_serves(cluster.fail, cluster, "abort-late-next")


def test_many_at_once(cluster: OnePrefillTwoDecode) -> None:
    """Eight clients of one prefill engine that does not answer go away together."""
    d = cluster.fail.decode_client
    with BlackHole() as hole:
        keys = [f"abort-crowd-{number}" for number in range(8)]
        with ExitStack() as crowd:
            for key in keys:
                params = dead_params(hole.port, 1) | {"remote_request_id": key}
                crowd.enter_context(d.leaving(prompt(20, key), request_id=key, kv_transfer_params=params))
            cluster.traces.all_in_d(keys)
        for key in keys:
            assert cluster.traces.ended_request(key).reason == "AbortedByClient"
    assert_serves(cluster.fail, cluster, "abort-crowd-next")
