"""Every metric of the catalogue on both sides of real engines, after traffic that is known.

Pages of before and after are compared, so that the engines may have served others before. What is not expected may not
have changed, but for what depends on who was faster (`metrics_page`). Beside another connector the same is asked in
`test_beside_offloading`.

The gauges are read from engines that nobody has asked anything since: what they show must not depend on a next step.

What the engines have logged at their start is checked here too.
"""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
import trio
import vllm

from connector import DISTRIBUTION
from connector.observe import catalogue as c
from connector.ports.gate import ANYBODY
from connector.ports.zmq_bridge import ZmqSideChannel
from connector.tools.administration import require_administration
from connector.tools.asking import Address
from connector.versions import NIXL, shown_version
from connector.wire.control import Release, Released, decode_answer, encode_request
from statemachine.lease import LeaseName
from tests.e2e.client import REQUEST_TRANSFER
from tests.e2e.cluster import (
    BLOCK_BYTES,
    LEASE_SECONDS,
    REQUEST_TIMEOUT_SECONDS,
    OnePrefillTwoDecode,
    blocks_of,
    prompt,
    wait_for,
)
from tests.e2e.engines import LOOPBACK, Engine, free_port
from tests.e2e.metrics_page import (
    AFTER_EXPIRY,
    BYTES,
    DESCRIPTORS,
    EXPIRED,
    POST,
    XFER,
    Page,
    assert_nothing_is_open,
    assert_states_agree,
    expected,
    granted_on_p,
    grown,
    grown_on_p,
    growth_of,
    healthy_on_d,
    meet,
    wait_for_releases,
)
from tests.rig.network import BlackHole, dead_params

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(420)]

TOKENS = 100
REQUESTS = 6
BLOCKS = blocks_of(TOKENS)


def assert_start_is_said(engine: Engine, options: str) -> None:
    """Version and `options`; where handshakes are answered; memory, NIXL and its back ends, and the control socket."""
    said = [line for line in engine.log().splitlines() if " INFO " in line]
    version = f"{DISTRIBUTION} {shown_version(DISTRIBUTION)} (vLLM {vllm.__version__}) as kv_"
    started = [line for line in said if version in line]
    assert started
    assert all(options in line and "kv_load_failure_policy=" in line for line in started), started
    port = engine.options.side_channel_port
    assert any(re.search(rf"handshakes are answered at \S+:{port}\b", line) for line in said)
    registered = re.compile(
        r"\d+\.\d\d GB of KV cache in [1-9]\d* memory ranges \(\w+\) are registered with NIXL "
        rf"{re.escape(shown_version(*NIXL))}, back ends UCX; control socket \S+:[1-9]\d*; TP 0 of 1"
    )
    assert any(registered.search(line) for line in said)


def test_the_log_says_at_start_what_runs(cluster: OnePrefillTwoDecode) -> None:
    assert_start_is_said(cluster.prefill, f"kv_lease_duration={float(LEASE_SECONDS)}")
    assert_start_is_said(cluster.failing, f"request_timeout_seconds={float(REQUEST_TIMEOUT_SECONDS)}")


def test_requests_that_are_served(cluster: OnePrefillTwoDecode) -> None:
    service = cluster.fail
    p, d = service.prefill_client, service.decode_client
    began = time.monotonic()
    p_before, d_before = meet(service, prompt(TOKENS, "they meet"))

    asked = {f"metrics-{number}": prompt(TOKENS, f"metrics {number}") for number in range(REQUESTS)}
    answers = service.pd_concurrently(asked)
    assert all(answer.ok for answer in answers.values())
    assert_nothing_is_open(p)
    assert_nothing_is_open(d)
    assert Page.of(d)[c.PEERS, "ready"] == 1

    assert grown_on_p(p_before, p, released=REQUESTS) == expected(granted_on_p(REQUESTS, tokens=TOKENS))
    steps = wait_for_releases(d, d_before, REQUESTS)
    assert grown(d_before, d) == expected(healthy_on_d(REQUESTS) | {(c.LOCAL_PREFILLS, "absent"): steps})

    page = Page.of(d)
    assert page.total(BYTES) - d_before.total(BYTES) == REQUESTS * BLOCKS * BLOCK_BYTES
    assert page.total(DESCRIPTORS) - d_before.total(DESCRIPTORS) >= REQUESTS
    waited = page.total(c.KV_WAIT_SECONDS, "loaded") - d_before.total(c.KV_WAIT_SECONDS, "loaded")
    read = page.total(c.STATE_SECONDS, "request", "reading") - d_before.total(c.STATE_SECONDS, "request", "reading")
    assert 0 < read < waited < sum(answer.seconds for answer in answers.values())
    margin = (page.total(c.LEASE_MARGIN_SECONDS) - d_before.total(c.LEASE_MARGIN_SECONDS)) / REQUESTS
    assert 0 <= margin <= LEASE_SECONDS
    assert page[c.HANDSHAKE_SECONDS, "connected"] >= 1
    for before, client in ((p_before, p), (d_before, d)):
        page = Page.of(client)
        wake_ups = page[c.WAKE_UP_SECONDS] - before[c.WAKE_UP_SECONDS]
        woke_seconds = page.total(c.WAKE_UP_SECONDS) - before.total(c.WAKE_UP_SECONDS)
        assert wake_ups >= 1
        # One after another, and also at steps that belong to no answer.
        assert 0 < woke_seconds < time.monotonic() - began
    assert assert_states_agree(p) == {}
    assert assert_states_agree(d) == {("peer", "ready"): 1}


def test_requests_that_fail_and_blocks_that_nobody_reads(cluster: OnePrefillTwoDecode) -> None:
    service = cluster.fail
    p, d = service.prefill_client, service.decode_client
    p_before, d_before = meet(service, prompt(TOKENS, "they meet again"))

    unread_prompt = prompt(TOKENS, "metrics unread")
    unread = service.prefill(unread_prompt, "metrics-unread").kv_transfer_params
    assert unread is not None
    # It is granted with the step after the answer.
    page = wait_for(lambda: found if (found := Page.of(p))[c.LEASES, "held"] else None, "a lease that is held")
    assert (page[c.LEASES, "held"], page[c.LENT_BLOCKS], page[c.LENT_TOKENS]) == (1, BLOCKS, TOKENS)

    once_prompt = prompt(TOKENS, "metrics twice")
    once = service.prefill(once_prompt, "metrics-once").kv_transfer_params
    assert once is not None
    assert service.decode(once_prompt, once, "metrics-once").ok
    salted = {"cache_salt": "so that it is loaded again"}
    assert d.complete(once_prompt, request_id="metrics-twice", kv_transfer_params=once, **salted).ok

    nowhere = unread | {"remote_engine_id": "nobody", "remote_host": LOOPBACK, "remote_port": free_port()}
    assert not d.complete(unread_prompt, kv_transfer_params=nowhere).ok
    assert not d.complete(prompt(TOKENS, "bad"), kv_transfer_params=once | {"remote_port": "no port"}).ok
    assert d.complete("lost", max_tokens=1).ok
    assert d.complete("asks nothing", max_tokens=1, kv_transfer_params={"do_remote_prefill": False}).ok

    assert_nothing_is_open(p)
    assert not service.decode(unread_prompt, unread, "metrics-unread").ok
    assert_nothing_is_open(d)
    assert grown_on_p(p_before, p, released=1) == expected(granted_on_p(2, tokens=TOKENS, expired=1))
    assert Page.of(p)[AFTER_EXPIRY] == p_before[AFTER_EXPIRY]

    steps = wait_for_releases(d, d_before, 1)
    found = grown(d_before, d)
    # The READ from the expired lease may have begun before P's answer came, and it may have ended by then or not.
    reads = found[c.TRANSITIONS.name, ("request", "reading", "none")]
    assert reads in (1, 2)
    found = {key: value for key, value in found.items() if key[1][:2] != ("request", "draining")}
    kinds = ("ConnectionRefused", "BadParams")
    assert found == expected(
        healthy_on_d(1)
        | {(c.FAILED_BY_KIND, kind): 1 for kind in (*kinds, "LeaseOver")}
        | {(c.TRANSITIONS, "request", "failed", kind): 1 for kind in kinds}
        | {
            c.HANDSHAKES_FAILED: 1,
            c.BUILTIN[4]: 1,
            (c.HANDSHAKE_SECONDS, "failed"): found[f"{c.HANDSHAKE_SECONDS.name}_count", ("failed",)],
            (c.KV_WAIT_SECONDS, "failed"): 3,
            (c.TRANSITIONS, "request", "pending_handshake", "none"): 4,
            (c.STATE_SECONDS, "request", "pending_handshake"): 4,
            (c.TRANSITIONS, "request", "expired", "LeaseOver"): 1,
            (c.TRANSITIONS, "hold", "wanted", "none"): 2,
            (c.STATE_SECONDS, "hold", "wanted"): 2,
            (c.TRANSITIONS, "hold", "gone", "expired"): 1,
            (c.LOCAL_PREFILLS, "absent"): 1 + steps,
            (c.LOCAL_PREFILLS, "unusable"): 1,
            (c.LOCAL_PREFILLS, "continued"): 1,
        }
        | {(c.TRANSITIONS, "request", "reading", "none"): reads, (c.STATE_SECONDS, "request", "reading"): reads}
        | dict.fromkeys((XFER, POST, BYTES, DESCRIPTORS), reads)
    )
    assert found[f"{c.HANDSHAKE_SECONDS.name}_count", ("failed",)] >= 1
    assert assert_states_agree(p) == {}
    assert_states_agree(d)


def test_a_prefill_engine_that_refuses_connections(cluster: OnePrefillTwoDecode) -> None:
    """It is asked for again if its first backoff, of half a second, was over before the step that shows it."""
    service = cluster.fail
    meet(service, prompt(TOKENS, "they meet before"))
    nowhere = dead_params(free_port(), 1)

    def is_shown() -> bool | None:
        assert not service.decode(prompt(20, "refused"), nowhere).ok
        page = Page.of(service.decode_client)
        return True if (page[c.PEERS, "ready"], page[c.PEERS, "backoff"]) == (1, 1) else None

    wait_for(is_shown, "a peer in backoff")


def test_the_page_of_each_side_has_every_metric(cluster: OnePrefillTwoDecode) -> None:
    for client in (cluster.fail.prefill_client, cluster.fail.decode_client):
        text = client.metrics_page()
        for metric in c.METRICS:
            assert f"# TYPE {metric.shown.removesuffix('_total')}" in text or f"# TYPE {metric.shown} " in text
        (build,) = (line for line in text.splitlines() if line.startswith("vllm:nixl_actor_build_info{"))
        assert 'version="' in build
        assert "unknown" not in build


def say_released(engine: Engine, lease: LeaseName, *ranks: int) -> None:
    """As these ranks of a decode engine do that has read the blocks; back when P has answered all of them."""

    async def run() -> None:
        side_channel = ZmqSideChannel(ANYBODY)
        try:
            actor = await require_administration(side_channel, Address(LOOPBACK, engine.options.side_channel_port))
            link = await side_channel.open_link(actor.control_host, actor.control_port, actor.control_key)
            with closing(link):
                for rank in ranks:
                    release = Release(engine_id="a-late-reader", rank=rank, ranks=max(ranks) + 1, leases=(lease,))
                    assert link.send(encode_request(release))
                    with trio.fail_after(REQUEST_TIMEOUT_SECONDS):
                        answer = decode_answer(await link.receive())
                    assert answer == Released(leases=(lease,))
        finally:
            side_channel.close()

    trio.run(run)


def test_readers_that_come_after_the_lease_has_expired(cluster: OnePrefillTwoDecode) -> None:
    """Each of their ranks counts once, however often it says so."""
    service, key = cluster.fail, "metrics-late"
    p = service.prefill_client
    p_before, _ = meet(service, prompt(TOKENS, "they meet before it is late"))
    params = service.prefill(prompt(TOKENS, key), key).kv_transfer_params
    assert params is not None
    cluster.traces.ended_lease(key, LEASE_SECONDS + REQUEST_TIMEOUT_SECONDS)
    say_released(cluster.prefill, LeaseName(params["remote_request_id"], params["lease_number"]), 0, 1, 0, 1, 1)
    assert service.alone(prompt(TOKENS, "a step")).ok
    assert p.complete("another step", max_tokens=1).ok
    found = wait_for(
        lambda: page if (page := Page.of(p))[AFTER_EXPIRY] > p_before[AFTER_EXPIRY] else None, "late ranks"
    )
    assert found[AFTER_EXPIRY] - p_before[AFTER_EXPIRY] == 2
    assert found[EXPIRED] - p_before[EXPIRED] == 1
    assert found[c.STRAY_RELEASES] == p_before[c.STRAY_RELEASES]


def test_releases_of_what_nobody_has_lent(cluster: OnePrefillTwoDecode) -> None:
    """One for each rank that says so, and nothing else changes."""
    service = cluster.fail
    p = service.prefill_client
    before, _ = meet(service, prompt(TOKENS, "they meet before the stranger"))
    say_released(cluster.prefill, LeaseName("cmpl-nobody-s-0", 12345), 0, 1)

    def are_counted() -> bool | None:
        assert p.complete("a step", max_tokens=1).ok
        return True if Page.of(p)[c.STRAY_RELEASES] - before[c.STRAY_RELEASES] == 2 else None

    wait_for(are_counted, "stray releases")
    assert grown(before, p) == expected({c.STRAY_RELEASES: 2})


def test_a_lease_whose_prompt_is_being_computed(cluster: OnePrefillTwoDecode) -> None:
    """It is until P has answered; the client of this one goes away meanwhile. Once more if the answer was there before:
    then the lease was granted, and nobody reads it."""
    ends = [end_of_a_lease_without_its_client(cluster, "metrics-computing")]
    while ends[-1] == ("computing", "held", "expired") and len(ends) < 4:
        ends.append(end_of_a_lease_without_its_client(cluster, f"metrics-computing-{len(ends)}"))
    assert ends[-1] == ("computing", "withdrawn"), ends


def end_of_a_lease_without_its_client(cluster: OnePrefillTwoDecode, key: str) -> tuple[str, ...]:
    """The states of a lease that the page has shown in `computing`, or that was granted before it could."""
    p = cluster.fail.prefill_client
    before, _ = meet(cluster.fail, prompt(TOKENS, f"they meet before {key}"))
    tokens = p.stream(prompt(TOKENS, key), max_tokens=800, request_id=key, kv_transfer_params=REQUEST_TRANSFER)
    next(tokens)

    def shown() -> Page | None:
        page, lease = Page.of(p), cluster.traces.both(key)[1]
        return page if page[c.LEASES, "computing"] or (lease is not None and lease.states[-1] != "computing") else None

    page = wait_for(shown, "a lease in computing")
    tokens.close()
    states = cluster.traces.ended_lease(key, LEASE_SECONDS + REQUEST_TIMEOUT_SECONDS).states
    if not page[c.LEASES, "computing"]:
        return states
    assert page[c.LEASES, "computing"] == 1
    assert (page[c.LEASES, "held"], page[c.LENT_BLOCKS], page[c.LENT_TOKENS]) == (0, 0, 0)
    assert p.complete("a step", max_tokens=1).ok
    assert_nothing_is_open(p)
    if states == ("computing", "withdrawn"):
        assert grown(before, p) == expected(
            {(c.TRANSITIONS, "lease", state, "none"): 1 for state in states}
            | {(c.STATE_SECONDS, "lease", "computing"): 1}
        )
    return states


def test_a_request_that_waits_for_the_handshake(cluster: OnePrefillTwoDecode) -> None:
    """With somebody who takes connections and never answers, until its client goes away."""
    service, key = cluster.fail, "metrics-waiting"
    d = service.decode_client
    _, before = meet(service, prompt(TOKENS, "they meet before the hole"))
    with BlackHole() as hole:
        params = dead_params(hole.port, blocks_of(TOKENS))
        with d.leaving(prompt(TOKENS, key), request_id=key, kv_transfer_params=params) as client:
            page = wait_for(
                lambda: found if (found := Page.of(d))[c.REQUESTS, "pending_handshake"] else None,
                "a request that waits",
            )
            assert page[c.REQUESTS, "pending_handshake"] == 1
            assert page[c.PEERS, "handshaking"] - before[c.PEERS, "handshaking"] == 1
            assert not client.is_answered
        assert cluster.traces.ended_request(key).reason == "AbortedByClient"
    assert d.complete("a step", max_tokens=1).ok
    assert_nothing_is_open(d)
    assert_states_agree(d)
    handshakes = (c.HANDSHAKES_FAILED.name, f"{c.HANDSHAKE_SECONDS.name}_count", c.BUILTIN[4].name)
    found = {key: value for key, value in grown(before, d).items() if key[0] not in handshakes}
    assert found.pop((c.LOCAL_PREFILLS.name, ("absent",))) >= 1  # the steps
    assert found == expected(
        {
            (c.FAILED_BY_KIND, "AbortedByClient"): 1,
            (c.TRANSITIONS, "request", "pending_handshake", "none"): 1,
            (c.STATE_SECONDS, "request", "pending_handshake"): 1,
            (c.TRANSITIONS, "request", "failed", "AbortedByClient"): 1,
        }
    )


def test_a_request_that_is_tried_again(cluster: OnePrefillTwoDecode) -> None:
    """P is killed in the middle of its READ, so nothing answers the second attempt, and D computes the prompt. P has
    stood still since before D asked, so it has never said that it holds the lease."""
    service, key = cluster.recompute, "metrics-retry"
    d = service.decode_client
    _, before = meet(service, prompt(TOKENS, "they meet before the kill"))
    params = service.prefill(prompt(TOKENS, key), key).kv_transfer_params
    assert params is not None
    with ThreadPoolExecutor(1) as pool:
        cluster.prefill.pause()
        answer = pool.submit(service.decode, prompt(TOKENS, key), params, key)
        cluster.traces.request_in(key, "reading")
        page = wait_for(lambda: found if (found := Page.of(d))[c.REQUESTS, "reading"] else None, "a request that reads")
        assert page[c.REQUESTS, "reading"] == 1
        assert (page[c.RETRIES], page[c.READS_FAILED]) == (before[c.RETRIES], before[c.READS_FAILED])
        cluster.prefill.kill()
        assert answer.result().ok
    request = cluster.traces.ended_request(key)
    assert request.states == ("pending_handshake", "reading", "draining", "pending_handshake", "failed")
    assert_nothing_is_open(d)
    inside = assert_states_agree(d)
    assert not {key for key in inside if key[0] == "request"}

    found = grown(before, d)
    assert found.pop((c.LOCAL_PREFILLS.name, ("absent",))) >= 1  # the steps
    assert found.pop((f"{c.HANDSHAKE_SECONDS.name}_count", ("failed",))) >= 1
    holds = {key: found.pop(key) for key in list(found) if key[1][:1] == ("hold",)}
    assert holds[c.TRANSITIONS.name, ("hold", "wanted", "none")] == 1
    assert (c.TRANSITIONS.name, ("hold", "held", "none")) not in holds
    lost = next(record.reason for record in request.records if record.to_state == "draining")
    handshakes = growth_of(found, c.HANDSHAKES_FAILED)
    assert handshakes >= 1
    assert found == expected(
        {
            c.RETRIES: 1,
            c.READS_FAILED: 1,
            c.HANDSHAKES_FAILED: handshakes,
            c.BUILTIN[4]: 1 + handshakes,
            (c.FAILED_BY_KIND, request.reason): 1,
            (c.KV_WAIT_SECONDS, "failed"): 1,
            (c.TRANSITIONS, "request", "pending_handshake", "none"): 2,
            (c.TRANSITIONS, "request", "reading", "none"): 1,
            (c.TRANSITIONS, "request", "draining", lost): 1,
            (c.TRANSITIONS, "request", "failed", request.reason): 1,
            (c.STATE_SECONDS, "request", "pending_handshake"): 2,
            (c.STATE_SECONDS, "request", "reading"): 1,
            (c.STATE_SECONDS, "request", "draining"): 1,
        }
    )
