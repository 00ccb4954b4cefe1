"""Engines that sleep and wake up: the memory of their KV cache goes in between, and no page of it is touched meanwhile.

vLLM tells connectors of it from 0.33 on. `sleep_on_cpu` has its CPU build do what it does on devices, where nothing is
changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from connector.tools.conformance import check
from connector.tools.trace_reader import read_processes
from connector.versions import is_vllm_at_least
from tests.e2e.client import Client, PrefillDecode
from tests.e2e.cluster import BUILTIN_CONFIG, Traces, prompt, wait_for
from tests.e2e.deployments import assert_serves, options
from tests.e2e.engines import EngineOptions, EngineSet
from tests.e2e.serve import ON_CUDA
from tests.plain_paths import LEASE_PATHS_PLAIN

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not is_vllm_at_least("0.33"), reason="this vLLM does not say when an engine sleeps"),
]

STILL_AWAKE_SECONDS = 1.0
RANKS = 1 if ON_CUDA else 2
"""Of D: all of an engine's ranks sleep, or none. One device has room for one."""


class Sleepers:
    """Two engines of ours, the second one of several ranks; or one and a built-in one."""

    def __init__(self, directory: Path, *, is_mixed: bool) -> None:
        self.traces = Traces(directory / "traces")
        self._engines = EngineSet()

        def sleeping(name: str, core: int, **others: Any) -> EngineOptions:
            return options(
                directory,
                name,
                ("--enable-sleep-mode",),
                core=core,
                changes="tests.e2e.sleep_on_cpu",
                environment={"VLLM_SERVER_DEV_MODE": "1"},
                **others,
            )

        if is_mixed:
            builtin = {"connector": "builtin", "calm_polling": True, "extra_config": BUILTIN_CONFIG}
            second = sleeping("builtin", 1, **builtin)
        else:
            second = sleeping("second", 1, tensor_parallel_size=RANKS)
        self.first, self.second = self._engines.start(sleeping("first", 0), second)

    def stop(self) -> None:
        """Their traces are those of processes that have not begun anew."""
        self._engines.stop()
        assert check(read_processes(self.traces.directory)).findings == ()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sleepers]:
    found = Sleepers(tmp_path_factory.mktemp("sleep"), is_mixed=False)
    try:
        yield found
    finally:
        found.stop()


@pytest.fixture
def service(pair: Sleepers) -> Iterator[PrefillDecode]:
    with PrefillDecode(pair.first, pair.second) as found:
        yield found


def sleep_once(client: Client) -> None:
    assert client.sleep()
    client.wake_up()


def test_what_is_read_when_they_have_slept(pair: Sleepers, service: PrefillDecode) -> None:
    """P, then D, then both, and once more: their caches are registered anew each time."""
    p, d = service.prefill_client, service.decode_client
    assert_serves(service, pair.traces, "before", RANKS)
    for number, sleepers in enumerate(([p], [d], [p, d], [p])):
        for each in sleepers:
            sleep_once(each)
        assert_serves(service, pair.traces, f"slept-{number}", RANKS)
    assert p.blocks_are_free()
    assert d.blocks_are_free()
    for engine, ranks, slept in ((pair.first, 1, 3), (pair.second, RANKS, 2)):
        assert engine.log().count("is not registered with NIXL while this engine sleeps") == ranks * slept
        assert engine.log().count("are registered with NIXL") == ranks * (1 + slept)


def test_p_falls_asleep_when_nothing_is_lent_any_more(pair: Sleepers, service: PrefillDecode) -> None:
    text, key = prompt(300, "lent"), "sleep-lent"
    params = service.prefill(text, key).kv_transfer_params
    with ThreadPoolExecutor(1) as beside:
        asleep = beside.submit(service.prefill_client.sleep)
        with pytest.raises(TimeoutError):
            asleep.result(STILL_AWAKE_SECONDS)
        answer = service.decode(text, params, key)
        assert asleep.result()
    service.prefill_client.wake_up()
    assert answer.ok, answer.error
    assert answer.token_ids == service.alone(text).token_ids
    pair.traces.assert_plain(key)
    assert_serves(service, pair.traces, "lent-before", RANKS)


def test_a_request_that_comes_while_d_sleeps(pair: Sleepers, service: PrefillDecode) -> None:
    """It waits in the queue, and is read when D is awake: P keeps its blocks for so long."""
    text, key = prompt(300, "asleep"), "asleep"
    params = service.prefill(text, key).kv_transfer_params
    d = service.decode_client
    assert d.sleep()
    with ThreadPoolExecutor(1) as beside:
        answered = beside.submit(service.decode, text, params, key)
        wait_for(lambda: d.metric("vllm:num_requests_waiting") or None, "the request in D's queue")
        d.wake_up()
        answer = answered.result()
    assert answer.ok, answer.error
    assert answer.token_ids == service.alone(text).token_ids
    pair.traces.assert_plain(key)


def test_one_that_the_client_gives_up_while_d_sleeps(pair: Sleepers, service: PrefillDecode) -> None:
    text, key, d = prompt(300, "given up"), "given-up-asleep", service.decode_client
    params = service.prefill(text, key).kv_transfer_params
    assert d.sleep()
    with d.leaving(text, request_id=key, kv_transfer_params=params):
        wait_for(lambda: d.metric("vllm:num_requests_waiting") or None, "the request in D's queue")
    d.wake_up()
    assert_serves(service, pair.traces, "given-up-before", RANKS)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory, pair: Sleepers) -> Iterator[Sleepers]:
    pair.stop()
    found = Sleepers(tmp_path_factory.mktemp("mixed"), is_mixed=True)
    try:
        yield found
    finally:
        found.stop()


def assert_reads(service: PrefillDecode, name: str) -> None:
    for tokens in (33, 300):
        text = prompt(tokens, f"{name} {tokens}")
        answer = service.pd(text, f"{name}-{tokens}")
        assert answer.ok, answer.error
        assert answer.token_ids == service.alone(text).token_ids


def test_a_builtin_d_reads_from_ours_that_has_slept(mixed: Sleepers) -> None:
    with PrefillDecode(mixed.first, mixed.second) as service:
        assert_reads(service, "ours-before")
        for number in range(2):
            sleep_once(service.prefill_client)
            assert_reads(service, f"ours-slept-{number}")
            assert mixed.traces.ended_lease(f"ours-slept-{number}-300").states in LEASE_PATHS_PLAIN


def test_our_d_reads_from_a_builtin_p_that_has_slept(mixed: Sleepers) -> None:
    with PrefillDecode(mixed.second, mixed.first) as service:
        assert_reads(service, "builtin-before")
        sleep_once(service.prefill_client)
        assert_reads(service, "builtin-slept")
        sleep_once(service.decode_client)
        assert_reads(service, "builtin-d-slept")


def test_our_d_connects_anew_when_a_builtin_p_says_that_it_has_registered_anew(mixed: Sleepers) -> None:
    """Which it says where what it tells peers has changed by that. Without a network card it is the same as before."""
    key, text = "registered-anew", prompt(300, "registered anew")
    with PrefillDecode(mixed.second, mixed.first) as service:
        assert_reads(service, "registered-before")
        params = service.prefill(text, key).kv_transfer_params
        assert params is not None
        params["remote_registration_generation"] += 1
        answer = service.decode(text, params, key)
        assert answer.ok, answer.error
        assert answer.token_ids == service.alone(text).token_ids
        request = mixed.traces.ended_request(key)
        assert request.states == ("pending_handshake", "reading", "done")
    assert mixed.first.log().count("has registered its KV cache anew (number ") == 1
