"""vLLM's prefix cache is emptied from outside (new weights, a benchmark) while KV is lent, waited for, or in use."""

from __future__ import annotations

import pytest

from tests.e2e.cluster import OnePrefillTwoDecode, prompt, wait_for
from tests.rig.network import BlackHole, dead_params

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(420)]

RUNNING_TOKENS = 100


def test_of_p_while_blocks_are_lent(cluster: OnePrefillTwoDecode) -> None:
    """It is refused, as with any block in use, and D reads what was lent. Afterwards it succeeds."""
    service, key, text = cluster.fail, "reset-lent", prompt(300, "reset lent")
    params = service.prefill(text, key).kv_transfer_params
    assert params is not None
    assert service.prefill_client.reset_cache() is False
    answer = service.decode(text, params, key)
    assert answer.ok, answer.error
    assert answer.token_ids == service.alone(text).token_ids
    cluster.traces.assert_plain(key)
    wait_for(lambda: service.prefill_client.reset_cache() or None, "the blocks are free and the cache is reset")
    assert service.prefill(text).cached_tokens == 0


def test_of_p_with_what_it_computes(cluster: OnePrefillTwoDecode) -> None:
    """vLLM takes the blocks of running requests back and computes them again; those that are lent it cannot take back,
    says so, and goes on."""
    service, key, text = cluster.fail, "reset-running", prompt(300, "reset running")
    params = service.prefill(text, key).kv_transfer_params
    assert params is not None
    tokens = service.prefill_client.stream(prompt(50, key), max_tokens=RUNNING_TOKENS)
    first = next(tokens)
    assert service.prefill_client.reset_cache(with_running=True) is None
    answer = service.decode(text, params, key)  # first of all: what is lent is kept for some seconds only
    assert answer.ok, answer.error
    assert len([first, *tokens]) == RUNNING_TOKENS
    assert answer.token_ids == service.alone(text).token_ids
    cluster.traces.assert_plain(key)


def test_of_d_while_a_request_waits_for_its_kv(cluster: OnePrefillTwoDecode) -> None:
    """Its blocks are in use too."""
    service, key = cluster.fail, "reset-waiting"
    d = service.decode_client
    with BlackHole() as hole:
        params = dead_params(hole.port, 4)
        with d.leaving(prompt(100, key), request_id=key, kv_transfer_params=params) as client:
            cluster.traces.request_in(key, "pending_handshake")
            assert d.reset_cache() is False
            assert d.reset_cache(with_running=True) is None
            assert not client.is_answered
        assert cluster.traces.ended_request(key).reason == "AbortedByClient"
    wait_for(lambda: d.reset_cache() or None, "the blocks are free and the cache is reset")
    text = prompt(100, "reset waiting next")
    answer = service.pd(text, "reset-waiting-next")
    assert answer.ok, answer.error
    assert answer.token_ids == service.alone(text).token_ids
