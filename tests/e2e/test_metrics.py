"""Every metric of the catalogue on both sides of real engines, after traffic that is known.

Pages of before and after are compared, so that the engines may have served others before. What is not expected may not
have changed, but for what depends on who was faster (`wandering`).

The gauges are read from engines that nobody has asked anything since: what they show must not depend on a next step.
"""

from __future__ import annotations

from typing import Any

import pytest

from connector.observe import catalogue as c
from tests.e2e.client import Client
from tests.e2e.cluster import BLOCK_BYTES, LEASE_SECONDS, OnePrefillTwoDecode, blocks_of, prompt, wait_for
from tests.e2e.engines import LOOPBACK, free_port
from tests.e2e.metrics_page import Page, expected

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

TOKENS = 100
REQUESTS = 6
BLOCKS = blocks_of(TOKENS)

WANDERING = (c.WAKE_UP_SECONDS, c.RENEWALS)
"""Depend on how often the engine steps, and on how long things take."""

XFER, POST, BYTES, DESCRIPTORS, _, _, EXPIRED, AFTER_EXPIRY = c.BUILTIN


def grown(before: Page, client: Client) -> dict[tuple[str, tuple[str, ...]], float]:
    """What has grown since, without what wanders, peers, and proofs that came late."""
    names = {name for metric in WANDERING for name in (metric.name, f"{metric.name}_count")}
    return {
        key: value
        for key, value in Page.of(client).since(before).items()
        if key[0] not in names and key[1][:1] != ("peer",) and key[1][:2] != ("request", "proving")
    }


def wait_for_releases(client: Client, before: Page, count: int) -> int:
    """P has confirmed so many releases. That is told with a step, so the engine is given some: how many."""
    steps = 0

    def are_released() -> bool | None:
        nonlocal steps
        steps += 1
        client.complete("step", max_tokens=1)
        key = (c.TRANSITIONS, "hold", "released", c.NO_REASON)
        return True if Page.of(client)[key] - before[key] >= count else None

    wait_for(are_released, f"{count} confirmed releases")
    return steps


def assert_nothing_is_open(client: Client) -> None:
    """Within a moment, and without a step."""

    def is_shown() -> bool | None:
        page = Page.of(client)
        gauges = [
            *(page[c.REQUESTS, state] for (state,) in c.REQUESTS.series),
            *(page[c.LEASES, state] for (state,) in c.LEASES.series),
            *(page[metric] for metric in (c.LENT_BLOCKS, c.LENT_TOKENS, c.QUARANTINED_BLOCKS)),
            *(page[metric] for metric in (c.MAILBOX_MESSAGES, c.LOOP_LAG_SECONDS)),
        ]
        return True if not any(gauges) and page[c.UP] == 1 else None

    wait_for(is_shown, "gauges of an engine with nothing in hand")


def healthy_on_d(requests: int) -> dict[Any, float]:
    """What so many requests that are loaded add on a decode engine with one rank."""
    return {
        c.COMPLETED: requests,
        (c.KV_WAIT_SECONDS, "loaded"): requests,
        c.LEASE_MARGIN_SECONDS: requests,
        **dict.fromkeys((XFER, POST, BYTES, DESCRIPTORS), requests),
        (c.HOLDS, "decode"): requests,
        **{(c.TRANSITIONS, "hold", state, "none"): requests for state in ("wanted", "held", "releasing", "released")},
        **{(c.STATE_SECONDS, "hold", state): requests for state in ("wanted", "held", "releasing")},
        **{(c.TRANSITIONS, "request", state, "none"): requests for state in ("pending_handshake", "reading", "done")},
        **{(c.STATE_SECONDS, "request", state): requests for state in ("pending_handshake", "reading")},
    }


def granted_on_p(leases: int, read: int) -> dict[Any, float]:
    """What so many leases add on a prefill engine, of which some are read and the others expire."""
    ends = {(c.TRANSITIONS, "lease", "done", "none"): read}
    if leases > read:
        ends |= {(c.TRANSITIONS, "lease", "expired", "none"): leases - read, EXPIRED: leases - read}
    return ends | {
        c.GRANTED_LEASES: leases,
        c.GRANTED_BLOCKS: leases * BLOCKS,
        c.GRANTED_TOKENS: leases * TOKENS,
        (c.HOLDS, "prefill"): read,
        (c.TRANSITIONS, "lease", "computing", "none"): leases,
        (c.STATE_SECONDS, "lease", "computing"): leases,
    }


def grown_on_p(before: Page, client: Client, *, read: int) -> dict[tuple[str, tuple[str, ...]], float]:
    """`grown`, without `held`. D may have released a lease before the step of P that grants it, the one after its
    answer: such a lease goes from computing to done. Each that was not read was held."""
    found = grown(before, client)
    entered = found.pop((c.TRANSITIONS.name, ("lease", "held", "none")), 0)
    assert found.pop((f"{c.STATE_SECONDS.name}_count", ("lease", "held")), 0) == entered
    granted = found[c.GRANTED_LEASES.name, ()]
    assert granted - read <= entered <= granted
    return found


def test_requests_that_are_served(cluster: OnePrefillTwoDecode) -> None:
    service = cluster.fail
    p, d = service.prefill_client, service.decode_client
    assert service.pd(prompt(TOKENS, "they meet"), "metrics-meet").ok
    assert_nothing_is_open(p)
    wait_for_releases(d, Page.of(d), 0)
    p_before, d_before = Page.of(p), Page.of(d)

    asked = {f"metrics-{number}": prompt(TOKENS, f"metrics {number}") for number in range(REQUESTS)}
    answers = service.pd_concurrently(asked)
    assert all(answer.ok for answer in answers.values())
    assert_nothing_is_open(p)
    assert_nothing_is_open(d)
    assert Page.of(d)[c.PEERS, "ready"] == 1

    assert grown_on_p(p_before, p, read=REQUESTS) == expected(granted_on_p(REQUESTS, REQUESTS))
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


def test_requests_that_fail_and_blocks_that_nobody_reads(cluster: OnePrefillTwoDecode) -> None:
    service = cluster.fail
    p, d = service.prefill_client, service.decode_client
    assert service.pd(prompt(TOKENS, "they meet again"), "metrics-meet-again").ok
    assert_nothing_is_open(p)
    wait_for_releases(d, Page.of(d), 0)
    p_before, d_before = Page.of(p), Page.of(d)

    unread_prompt = prompt(TOKENS, "metrics unread")
    unread = service.prefill(unread_prompt, "metrics-unread").kv_transfer_params
    assert unread is not None
    page = Page.of(p)
    assert (page[c.LEASES, "held"], page[c.LENT_BLOCKS], page[c.LENT_TOKENS]) == (1, BLOCKS, TOKENS)

    once_prompt = prompt(TOKENS, "metrics twice")
    once = service.prefill(once_prompt, "metrics-once").kv_transfer_params
    assert once is not None
    assert service.decode(once_prompt, once, "metrics-once").ok
    salted = {"cache_salt": "so that it is loaded again"}
    assert not d.complete(once_prompt, request_id="metrics-twice", kv_transfer_params=once, **salted).ok

    nowhere = unread | {"remote_engine_id": "nobody", "remote_host": LOOPBACK, "remote_port": free_port()}
    assert not d.complete(prompt(TOKENS, "nowhere"), kv_transfer_params=nowhere).ok
    assert not d.complete(prompt(TOKENS, "bad"), kv_transfer_params=once | {"remote_port": "no port"}).ok
    assert d.complete("lost", max_tokens=1).ok
    assert d.complete("asks nothing", max_tokens=1, kv_transfer_params={"do_remote_prefill": False}).ok

    assert_nothing_is_open(p)
    assert not service.decode(unread_prompt, unread, "metrics-unread").ok
    assert_nothing_is_open(d)
    assert grown_on_p(p_before, p, read=1) == expected(granted_on_p(2, 1))
    assert Page.of(p)[AFTER_EXPIRY] == p_before[AFTER_EXPIRY]

    steps = wait_for_releases(d, d_before, 1)
    found = grown(d_before, d)
    # The READ from the expired lease may have begun before P's answer came, and it may have ended by then or not.
    reads = found[c.TRANSITIONS.name, ("request", "reading", "none")]
    assert reads in (1, 2)
    found = {key: value for key, value in found.items() if key[1][:2] != ("request", "draining")}
    kinds = ("BlocksConsumed", "ConnectionRefused", "BadParams")
    assert found == expected(
        healthy_on_d(1)
        | {(c.FAILED_BY_KIND, kind): 1 for kind in (*kinds, "LeaseOver")}
        | {(c.TRANSITIONS, "request", "failed", kind): 1 for kind in kinds}
        | {
            c.HANDSHAKES_FAILED: 1,
            c.BUILTIN[4]: 1,
            (c.HANDSHAKE_SECONDS, "failed"): found[f"{c.HANDSHAKE_SECONDS.name}_count", ("failed",)],
            (c.KV_WAIT_SECONDS, "failed"): 4,
            (c.TRANSITIONS, "request", "pending_handshake", "none"): 5,
            (c.STATE_SECONDS, "request", "pending_handshake"): 5,
            (c.TRANSITIONS, "request", "expired", "LeaseOver"): 1,
            (c.TRANSITIONS, "hold", "wanted", "none"): 2,
            (c.STATE_SECONDS, "hold", "wanted"): 2,
            (c.TRANSITIONS, "hold", "gone", "expired"): 1,
            (c.LOCAL_PREFILLS, "absent"): 1 + steps,
            (c.LOCAL_PREFILLS, "unusable"): 1,
        }
        | {(c.TRANSITIONS, "request", "reading", "none"): reads, (c.STATE_SECONDS, "request", "reading"): reads}
        | dict.fromkeys((XFER, POST, BYTES, DESCRIPTORS), reads)
    )
    assert found[f"{c.HANDSHAKE_SECONDS.name}_count", ("failed",)] >= 1


def test_the_page_of_each_side_has_every_metric(cluster: OnePrefillTwoDecode) -> None:
    for client in (cluster.fail.prefill_client, cluster.fail.decode_client):
        text = client.metrics_page()
        for metric in c.METRICS:
            assert f"# TYPE {metric.shown.removesuffix('_total')}" in text or f"# TYPE {metric.shown} " in text
        (build,) = (line for line in text.splitlines() if line.startswith("vllm:nixl_actor_build_info{"))
        assert 'version="' in build
        assert "unknown" not in build
