"""The page /metrics of an engine, as numbers, and what known traffic adds to it.

Tests compare the whole growth of a page (`grown`, on a prefill engine `grown_on_p`) with what is expected, so that a
series that must not change is tested too. Left out is what depends on who was faster: `WANDERING`, the peers, and
whether P's answer came after the READ (the state `proving`). `assert_states_agree` looks at the latter two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from connector.observe import catalogue as c
from connector.observe.catalogue import METRICS, Metric
from connector.observe.traced import MACHINES, QUEUED
from tests.e2e.client import Client, PrefillDecode
from tests.e2e.cluster import blocks_of, wait_for

Labels = tuple[str, ...]
"""Values, in the order of the metric's labels."""
Growth = dict[tuple[str, Labels], float]
"""By the metric's name, for a histogram with `_count`, and its labels."""

XFER, POST, BYTES, DESCRIPTORS, _, _, EXPIRED, AFTER_EXPIRY = c.BUILTIN

WANDERING = (c.WAKE_UP_SECONDS, c.RENEWALS)
"""Depend on how often the engine steps, and on how long things take."""


class Page:
    """What an engine shows of the metrics of the catalogue: counters and gauges as they are, histograms by their
    number of samples and their sum."""

    def __init__(self, text: str) -> None:
        shown = {
            sample.name: {}
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name.startswith("vllm:nixl_")
        }
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name in shown:
                    shown[sample.name][frozenset(sample.labels.items())] = sample.value
        self._values: dict[tuple[str, Labels], float] = {}
        for metric in METRICS:
            suffixes = ("_count", "_sum") if metric.kind == "histogram" else ("",)
            for suffix in suffixes:
                for labels, value in shown.get(metric.shown + suffix, {}).items():
                    by_name = dict(labels)
                    key = metric.name + suffix, tuple(by_name[label] for label in metric.labels)
                    self._values[key] = value

    @classmethod
    def of(cls, client: Client) -> Page:
        return cls(client.metrics_page())

    def __getitem__(self, key: Metric | tuple[Any, ...]) -> float:
        """`page[METRIC]` or `page[METRIC, "value of a label", ...]`; of a histogram the number of samples."""
        return self._values[_key(key)]

    def total(self, metric: Metric, *values: str) -> float:
        """The sum of a histogram's samples."""
        return self._values[f"{metric.name}_sum", values]

    def since(self, before: Page) -> Growth:
        """What counters and histograms have grown by; those that have."""
        gauges = {metric.name for metric in METRICS if metric.kind == "gauge"}
        grown = {}
        for key, value in self._values.items():
            if key[0] not in gauges and not key[0].endswith("_sum") and value != before._values[key]:
                grown[key] = value - before._values[key]
        return grown


def expected(counts: Mapping[Metric | tuple[Metric, ...], float]) -> Growth:
    """In the form of `Page.since`, without what is 0, from keys as those of a page."""
    return {_key(key): count for key, count in counts.items() if count}


def growth_of(found: Growth, *key: Any) -> int:
    """Of one series, named as `page[...]` does."""
    return int(found.get(_key(key), 0))


def _key(key: Metric | tuple[Any, ...]) -> tuple[str, Labels]:
    metric, *values = key if isinstance(key, tuple) else (key,)
    name = f"{metric.name}_count" if metric.kind == "histogram" else metric.name
    return name, tuple(map(str, values))


def grown(before: Page, client: Client) -> Growth:
    """What has grown since, without what wanders, peers, and proofs that came late."""
    names = {name for metric in WANDERING for name in (metric.name, f"{metric.name}_count")}
    return {
        key: value
        for key, value in Page.of(client).since(before).items()
        if key[0] not in names and key[1][:1] != ("peer",) and key[1][:2] != ("request", "proving")
    }


def meet(service: PrefillDecode, text: str) -> tuple[Page, Page]:
    """The pages of P and of D, once they have met over a request with this text and nothing of it is open."""
    before = Page.of(service.decode_client)
    answer = service.pd(text)
    assert answer.ok, answer.error
    assert_nothing_is_open(service.prefill_client)
    wait_for_releases(service.decode_client, before, 1)
    return Page.of(service.prefill_client), Page.of(service.decode_client)


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


def assert_states_agree(client: Client) -> dict[tuple[str, str], float]:
    """Of each machine, peers and proofs included: as many have come into a state as have left it or are in it by the
    gauges. Returns how many are where, of those that are somewhere. The engine is given steps, because what happens to
    peers and holds is told with one."""

    def are_inside() -> dict[tuple[str, str], float] | None:
        client.complete("step", max_tokens=1)
        page = Page.of(client)
        inside = {
            (machine.name, state): sum(page[c.TRANSITIONS, machine.name, state, reason] for reason in c.reasons(member))
            - page[c.STATE_SECONDS, machine.name, state]
            for machine in MACHINES
            for state, member in ((member.value, member) for member in machine.states)
            if state in c.living_states(machine)
        }
        assert min(inside.values()) >= 0, inside
        shown = {("request", state): page[c.REQUESTS, state] for (state,) in c.REQUESTS.series if state != QUEUED}
        shown |= {("peer", state): page[c.PEERS, state] for (state,) in c.PEERS.series}
        shown |= {("lease", state): page[c.LEASES, state] for (state,) in c.LEASES.series}
        agree = all(inside[key] == value for key, value in shown.items())
        return {key: value for key, value in inside.items() if value} if agree else None

    return wait_for(are_inside, "as many in each state as have come to it and have not left it")


def healthy_on_d(requests: int) -> dict[Any, float]:
    """What so many requests that are loaded, each with a lease of its own, add on a decode engine with one rank."""
    return loaded_on_d(requests) | let_go_on_d(requests, held=requests)


def loaded_on_d(requests: int) -> dict[Any, float]:
    """Of these, what is counted for the requests."""
    return {
        c.COMPLETED: requests,
        (c.KV_WAIT_SECONDS, "loaded"): requests,
        c.LEASE_MARGIN_SECONDS: requests,
        **dict.fromkeys((XFER, POST, BYTES, DESCRIPTORS), requests),
        **{(c.TRANSITIONS, "request", state, "none"): requests for state in ("pending_handshake", "reading", "done")},
        **{(c.STATE_SECONDS, "request", state): requests for state in ("pending_handshake", "reading")},
    }


def let_go_on_d(leases: int, *, held: int) -> dict[Any, float]:
    """Of these, what is counted for the leases, of which D has let go at the end. Those that P has confirmed before
    were held."""
    return {
        (c.HOLDS, "decode"): held,
        (c.TRANSITIONS, "hold", "held", "none"): held,
        (c.STATE_SECONDS, "hold", "held"): held,
        **{(c.TRANSITIONS, "hold", state, "none"): leases for state in ("wanted", "releasing", "released")},
        **{(c.STATE_SECONDS, "hold", state): leases for state in ("wanted", "releasing")},
    }


def granted_on_p(leases: int, *, tokens: int, expired: int = 0, held: int | None = None) -> dict[Any, float]:
    """What so many leases of prompts of `tokens` add on a prefill engine. D releases those that do not expire; it has
    asked P to hold as many of them as `held` says, by default all."""
    released = leases - expired
    ends = {(c.TRANSITIONS, "lease", "done", "none"): released}
    if expired:
        ends |= {(c.TRANSITIONS, "lease", "expired", "none"): expired, EXPIRED: expired}
    return ends | {
        c.GRANTED_LEASES: leases,
        c.GRANTED_BLOCKS: leases * blocks_of(tokens),
        c.GRANTED_TOKENS: leases * tokens,
        (c.HOLDS, "prefill"): released if held is None else held,
        (c.TRANSITIONS, "lease", "computing", "none"): leases,
        (c.STATE_SECONDS, "lease", "computing"): leases,
    }


def grown_on_p(before: Page, client: Client, *, released: int) -> Growth:
    """`grown`, without `held`. D may have released a lease before the step of P that grants it, the one after its
    answer: such a lease goes from computing to done. Each that was not released was held."""
    found = grown(before, client)
    entered = found.pop((c.TRANSITIONS.name, ("lease", "held", "none")), 0)
    assert found.pop((f"{c.STATE_SECONDS.name}_count", ("lease", "held")), 0) == entered
    granted = found[c.GRANTED_LEASES.name, ()]
    assert granted - released <= entered <= granted
    return found
