"""Clients that go away, in every phase of a request. Each leaves nothing behind: the machines end, the blocks of both
engines come back, and the next request is served.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.e2e.client import NO_ANSWER, REQUEST_TRANSFER, PrefillDecode
from tests.e2e.cluster import (
    HANDSHAKE_TIMEOUT_SECONDS,
    LEASE_SECONDS,
    OnePrefillTwoDecode,
    prompt,
    wait_for,
)
from tests.e2e.engines import Engine
from tests.plain_paths import LEASE_PATHS_PLAIN
from tests.rig.network import BlackHole, dead_params

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(420)]

PATIENCE_SECONDS = 1.0
"""After this long the clients of this file go away."""


def assert_serves(service: PrefillDecode, cluster: OnePrefillTwoDecode, key: str) -> None:
    """The next request goes the plain way, and nothing of the earlier ones is left."""
    cluster.assert_serves(service, key)
    assert service.prefill_client.blocks_are_free()
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
    with BlackHole() as hole:
        answer = cluster.fail.decode(
            prompt(100, "abort waiting"), dead_params(hole.port, 4), "abort-waiting", timeout_seconds=PATIENCE_SECONDS
        )
        assert answer.status == NO_ANSWER
        request = cluster.traces.ended_request("abort-waiting")
    assert request.states == ("pending_handshake", "failed")
    assert request.reason == "AbortedByClient"
    waited_seconds = request.visits[0].seconds
    assert waited_seconds is not None
    assert waited_seconds < HANDSHAKE_TIMEOUT_SECONDS
    assert_serves(cluster.fail, cluster, "abort-waiting-next")


def test_while_a_read_is_in_flight(cluster: OnePrefillTwoDecode) -> None:
    """The READ cannot be stopped, so the request drains; its blocks come back when the READ has ended, not before.
    Meanwhile D serves others. Scenario 8."""
    service, key = cluster.recompute, "abort-reading"
    assert_serves(service, cluster, "abort-reading-before")
    params = service.prefill(prompt(900, key), key).kv_transfer_params
    assert params is not None
    with paused(cluster.prefill):
        answer = service.decode(prompt(900, key), params, key, timeout_seconds=PATIENCE_SECONDS)
        assert answer.status == NO_ANSWER
        draining = cluster.traces.request_in(key, "draining")
        beside = service.alone(prompt(50, key))
        assert beside.ok, beside.error
        time.sleep(PATIENCE_SECONDS)
        assert cluster.traces.both(key)[0] == draining
    request = cluster.traces.ended_request(key)
    assert request.states == ("pending_handshake", "reading", "draining", "failed")
    assert request.reason == "AbortedByClient"
    assert cluster.traces.ended_lease(key).states in LEASE_PATHS_PLAIN
    assert_serves(service, cluster, "abort-reading-next")


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
    """Nothing is lent before the prefill request has ended, so nothing is taken back. Scenario 29."""
    service, key = cluster.fail, "abort-computing"
    tokens = service.prefill_client.stream(
        prompt(100, key), max_tokens=800, request_id=key, kv_transfer_params=REQUEST_TRANSFER
    )
    next(tokens)
    tokens.close()
    assert cluster.traces.ended_lease(key).states == ("computing", "released")
    assert_serves(service, cluster, "abort-computing-next")


def test_at_any_moment(cluster: OnePrefillTwoDecode) -> None:
    """Twenty clients that go away one after another, each a few milliseconds later in the life of its request."""
    service = cluster.fail
    keys = [f"abort-sweep-{number}" for number in range(20)]
    for number, key in enumerate(keys):
        params = service.prefill(prompt(100, key), key).kv_transfer_params
        assert params is not None
        service.decode(prompt(100, key), params, key, max_tokens=100, timeout_seconds=0.002 + 0.004 * number)
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
    with BlackHole() as hole:
        params = dead_params(hole.port, 1)
        keys = [f"abort-crowd-{number}" for number in range(8)]
        clients = [
            threading.Thread(target=cluster.fail.decode, args=(prompt(20, key), params, key, 4, PATIENCE_SECONDS))
            for key in keys
        ]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        for key in keys:
            assert cluster.traces.ended_request(key).reason == "AbortedByClient"
    assert_serves(cluster.fail, cluster, "abort-crowd-next")
