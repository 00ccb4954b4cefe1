"""Figures: every worker event is counted once, survives vLLM's way to the front end, and appears under the right name.

The wiring is vLLM's own: its aggregation over ranks, its serialisation, its periodic log line, and its Prometheus
hook with a registry of the test. The built-in connector's metrics are the yardstick for names, buckets and meaning.
"""

from __future__ import annotations

import collections
import functools
import pickle
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector, MultiKVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats, NixlPromMetrics
from vllm.v1.metrics import loggers, ray_wrappers
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from connector.clock import BootClock, Clock, to_ns
from connector.observe import catalogue
from connector.observe.stats import ConnectorPromMetrics, ConnectorStats
from connector.ports.nixl import ReadMeasured
from connector.protocol import (
    QuarantineLifted,
    ReceiveEnded,
    SendEnded,
    SumsWanted,
    WorkerEvent,
    WorkerStopped,
)
from connector.runtime.figures import Figures
from connector.scheduler.engine_figures import EngineFigures
from statemachine.failures import AbortedByClient, DeadlineExceeded, Failure, LeaseNotProven, Quarantined
from statemachine.lease import LeaseName
from tests.unit.test_ledger import SettableClock

MIB = 2**20
LABELS = ["model_name", "engine"]
TRANSFER_CONFIG = KVTransferConfig(
    kv_connector="NixlConnector", kv_connector_module_path="connector", kv_role="kv_both"
)
NOT_PROVEN = LeaseNotProven(peer="p", remote_request_id="r", waited_seconds=1.0)
STUCK = Quarantined(reads=1, waited_seconds=30.0, cause="aborted")


def received(failure: Failure | None = None, *, quarantined: bool = False) -> ReceiveEnded:
    return ReceiveEnded(request_id="r", failure=failure, local_block_ids=[1], quarantined=quarantined)


def measured(seconds: float = 0.02, *, mebibytes: int = 4, descriptors: int = 64) -> ReadMeasured:
    return ReadMeasured(
        handle=1,
        seconds_in_transport=seconds,
        seconds_to_post=seconds / 10,
        bytes=mebibytes * MIB,
        descriptors=descriptors,
    )


def test_the_class_is_found_by_its_own_name() -> None:
    """So does vLLM look up whose figures these are, where several connectors are combined."""
    named = KVConnectorFactory.get_connector_class(TRANSFER_CONFIG)
    assert KVConnectorFactory.get_connector_class_by_name(named.__name__) is named


COUNTED_IN: list[tuple[WorkerEvent, dict[str, Any]]] = [
    (received(), {"counts": {"completed_receives": 1}}),
    (received(NOT_PROVEN), {"counts": {"failed_receives|LeaseNotProven": 1}}),
    (
        received(STUCK, quarantined=True),
        {"counts": {"failed_receives|Quarantined": 1, "quarantined_receives": 1}},
    ),
    (SendEnded(lease=LeaseName("r", 1), expired=True), {"counts": {"vllm:nixl_num_kv_expired_reqs": 1}}),
    (
        measured(),
        {
            "samples": {
                "vllm:nixl_xfer_time_seconds": [0.02],
                "vllm:nixl_post_time_seconds": [0.002],
                "vllm:nixl_bytes_transferred": [4 * MIB],
                "vllm:nixl_num_descriptors": [64],
            }
        },
    ),
    (SendEnded(lease=LeaseName("r", 1), expired=False), {}),
    (WorkerStopped(reason="its actors died"), {}),
    (QuarantineLifted(local_block_ids=[1]), {}),
]
EVERYTHING = [event for event, _ in COUNTED_IN]


def add_to(stats: ConnectorStats, event: WorkerEvent) -> None:
    """As the worker's ledger does."""
    match event:
        case ReceiveEnded(failure=None):
            stats.count_loaded(1)
        case _:
            stats.add(event)


def add_noted(stats: ConnectorStats, note: Callable[[Figures], None]) -> None:
    """What the actors count themselves, as the worker adds it."""
    figures = Figures()
    note(figures)
    taken = figures.take()
    assert taken is not None
    for key, count in taken.counts.items():
        stats.count(key, count)


def stats_of(*events: WorkerEvent) -> ConnectorStats:
    stats = ConnectorStats()
    for event in events:
        add_to(stats, event)
    return stats


# --- counting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("event", "expected"), COUNTED_IN, ids=[type(o).__name__ for o in EVERYTHING])
def test_a_worker_event_is_counted_where_it_belongs_and_nowhere_else(
    event: WorkerEvent, expected: dict[str, Any]
) -> None:
    stats = stats_of(event)
    assert stats.data == ConnectorStats().data | expected
    assert stats.is_empty() == (not expected)


def test_every_worker_event_has_a_case_here() -> None:
    """But for what asks the engine thread for something, and says nothing of a transfer."""
    assert {type(event) for event in EVERYTHING} == set(WorkerEvent.__args__) - {SumsWanted}


def test_an_empty_dict_is_a_start_from_nothing() -> None:
    """vLLM's base class makes its instances with one."""
    stats = ConnectorStats({})
    assert stats.is_empty()
    stats.add(measured())
    assert stats.data == stats_of(measured()).data


def test_clone_and_reset_hands_everything_over_once() -> None:
    stats = stats_of(*EVERYTHING)
    before = stats_of(*EVERYTHING).data
    clone = stats.clone_and_reset()
    assert clone.data == before
    assert stats.is_empty()
    stats.add(measured())
    stats.add(received(NOT_PROVEN))
    assert clone.data == before


def test_aggregate_adds_and_leaves_the_other_alone() -> None:
    one, other = stats_of(*EVERYTHING, received(STUCK)), stats_of(received(NOT_PROVEN), measured(0.5))
    other_before = stats_of(received(NOT_PROVEN), measured(0.5)).data
    assert one.aggregate(other) is one
    assert one.data == stats_of(*EVERYTHING, received(STUCK), received(NOT_PROVEN), measured(0.5)).data
    one.add(received(NOT_PROVEN))
    assert other.data == other_before


def test_what_is_made_from_a_dict_does_not_write_into_it() -> None:
    """vLLM gives one dict to all loggers; each adds the next interval to what it made of it."""
    data = stats_of(*EVERYTHING).data
    ConnectorStats(data).aggregate(stats_of(*EVERYTHING))
    assert data == stats_of(*EVERYTHING).data


# --- the way through vLLM -------------------------------------------------------------------------------------------


def test_ranks_are_added_up_by_vllm() -> None:
    ranks = [stats_of(received(), measured(0.1)), stats_of(received(NOT_PROVEN), measured(0.2)), None]
    outputs = [
        ModelRunnerOutput(
            req_ids=[], req_id_to_index={}, kv_connector_output=KVConnectorOutput(kv_connector_stats=stats)
        )
        for stats in ranks
    ]
    total = KVOutputAggregator(expected_finished_count=3).aggregate(outputs)
    assert total is not None
    assert total.kv_connector_output is not None
    stats = total.kv_connector_output.kv_connector_stats
    assert isinstance(stats, ConnectorStats)
    assert stats.data == stats_of(received(), measured(0.1), received(NOT_PROVEN), measured(0.2)).data


def across_processes(stats: ConnectorStats) -> dict[str, Any]:
    """From worker to scheduler process by pickle, from there to the front end inside vLLM's own message."""
    in_scheduler: ConnectorStats = pickle.loads(pickle.dumps(stats))
    sent = MsgpackEncoder().encode(SchedulerStats(kv_connector_stats=in_scheduler.to_dict()))
    arrived: SchedulerStats = MsgpackDecoder(SchedulerStats).decode(sent)
    assert arrived.kv_connector_stats is not None
    return arrived.kv_connector_stats


def test_figures_survive_the_way_to_the_front_end() -> None:
    stats = stats_of(*EVERYTHING)
    assert across_processes(stats) == stats.data


def logged(*intervals: ConnectorStats) -> list[str]:
    lines: list[str] = []
    periodic = KVConnectorLogging(TRANSFER_CONFIG)
    for stats in intervals:
        periodic.observe(across_processes(stats))
    periodic.log(lambda template, *values: lines.append(template % values))
    periodic.log(lambda template, *values: lines.append(template % values))
    return lines


def test_the_periodic_line_of_vllm_shows_the_figures_of_the_interval() -> None:
    first = stats_of(*EVERYTHING)
    for metric in (catalogue.READS_FAILED, catalogue.HANDSHAKES_FAILED, catalogue.FAILED_NOTIFICATIONS):
        add_noted(first, lambda figures, metric=metric: figures.note_failed(metric))
    (line,) = logged(first, stats_of(measured(0.04), received(NOT_PROVEN), received(AbortedByClient())))
    assert "Num successful transfers=2, Avg xfer time (ms)=30.0" in line
    assert "Throughput (MB/s)=133.333" in line
    assert "Num failed transfers=3," in line
    assert "Num KV expired reqs=1," in line
    assert "Num failed receives=3, Num failed receives (LeaseNotProven)=2" in line
    assert "Aborted" not in line


def lending() -> ConnectorStats:
    """Of a step of an engine whose leases are held and released, and which reads nothing."""
    stats = stats_of(SendEnded(lease=LeaseName("r", 1), expired=False))
    stats.count(catalogue.TRANSITIONS.key("lease", "done", catalogue.OTHER), 1)
    stats.sample(catalogue.STATE_SECONDS.key("lease", "held"), 0.1)
    stats.set_gauges({catalogue.UP.key(): 1})
    return stats


@pytest.mark.parametrize("is_combined", [False, True], ids=["alone", "of several"])
def test_a_front_end_that_has_nothing_to_print_keeps_nothing(is_combined: bool) -> None:
    """vLLM starts anew only after it has printed a line, which one of a healthy prefill engine never does."""

    def kept(steps: int) -> Any:
        periodic = KVConnectorLogging(TRANSFER_CONFIG)
        if is_combined:
            periodic.connector_cls = MultiConnector
        for _ in range(steps):
            figures = across_processes(lending())
            periodic.observe({"NixlActorConnector": figures} if is_combined else figures)
            periodic.log(lambda template, *values: pytest.fail(template % values))
        accumulated = periodic.transfer_stats_accumulator
        assert accumulated is not None
        return accumulated.to_dict()

    assert kept(10) == kept(1)


def test_an_interval_with_failures_only_is_logged_too() -> None:
    (line,) = logged(stats_of(received(DeadlineExceeded(timeout_seconds=1.0, phase="reading"))))
    assert "Num successful transfers=0" in line
    assert "Num failed receives (DeadlineExceeded)=1" in line


def test_an_interval_without_anything_is_not_logged() -> None:
    assert logged(ConnectorStats()) == []


def test_a_transfer_too_quick_for_the_clock_has_no_throughput() -> None:
    assert stats_of(measured(0.0)).reduce()["Throughput (MB/s)"] == 0


def test_shared_figures_of_the_periodic_line_agree_with_the_built_in_connector() -> None:
    builtin = NixlKVConnectorStats()
    for seconds, mebibytes, descriptors in TRANSFERS:
        builtin.record_transfer(telemetry(seconds, mebibytes, descriptors))
    builtin.record_failed_handshake()
    builtin.record_kv_expired_req()
    stats = stats_of(
        *(measured(s, mebibytes=m, descriptors=d) for s, m, d in TRANSFERS),
        SendEnded(lease=LeaseName("r", 1), expired=True),
    )
    add_noted(stats, lambda figures: figures.note_failed(catalogue.HANDSHAKES_FAILED))
    ours = stats.reduce()
    expected = builtin.reduce()
    assert {key: ours[key] for key in expected} == pytest.approx(expected, abs=0.001)


# --- Prometheus -----------------------------------------------------------------------------------------------------

TRANSFERS = [(0.004, 1, 12), (0.02, 64, 300), (0.3, 2048, 9000), (7.0, 30, 60_000)]
"""Seconds, MiB and descriptors of a few READs, far enough apart to fall into different buckets."""


def telemetry(seconds: float, mebibytes: int, descriptors: int) -> SimpleNamespace:
    """What NIXL tells the built-in connector about a READ like `measured`."""
    return SimpleNamespace(
        xferDuration=seconds * 1e6, postDuration=seconds * 1e5, totalBytes=mebibytes * MIB, descCount=descriptors
    )


def metric_types(registry: CollectorRegistry) -> dict[Any, Any]:
    return {kind: functools.partial(kind, registry=registry) for kind in (Gauge, Counter, Histogram)}


def our_prometheus(registry: CollectorRegistry, engines: int = 1) -> KVConnectorProm:
    """vLLM's own hook, which finds the connector by its configuration."""

    class Wired(KVConnectorProm):
        # Static, for in a class CPython 3.14 and later take a partial for a method.
        _gauge_cls = staticmethod(functools.partial(Gauge, registry=registry))
        _counter_cls = staticmethod(functools.partial(Counter, registry=registry))
        _histogram_cls = staticmethod(functools.partial(Histogram, registry=registry))

    values: dict[int, list[object]] = {engine: ["tiny", str(engine)] for engine in range(engines)}
    wired = Wired(SimpleNamespace(kv_transfer_config=TRANSFER_CONFIG), LABELS, values)
    assert isinstance(wired.prom_metrics, ConnectorPromMetrics)
    return wired


def samples(registry: CollectorRegistry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample by name and labels, without the time of creation."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in registry.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def value(registry: CollectorRegistry, name: str, engine: int = 0, **labels: str) -> float | None:
    return registry.get_sample_value(name, {"model_name": "tiny", "engine": str(engine)} | labels)


def test_metrics_of_the_built_in_connector_have_its_names_buckets_and_values() -> None:
    builtin_registry, registry = CollectorRegistry(), CollectorRegistry()
    config = SimpleNamespace(kv_transfer_config=TRANSFER_CONFIG)
    builtin_metrics = NixlPromMetrics(config, metric_types(builtin_registry), LABELS, {0: ["tiny", "0"]})
    metrics = our_prometheus(registry)

    builtin = NixlKVConnectorStats()
    for seconds, mebibytes, descriptors in TRANSFERS:
        builtin.record_transfer(telemetry(seconds, mebibytes, descriptors))
    ours = stats_of(*(measured(s, mebibytes=m, descriptors=d) for s, m, d in TRANSFERS))
    failures: list[tuple[int, Any, Callable[[Figures], None]]] = [
        (2, builtin.record_failed_transfer, lambda figures: figures.note_failed(catalogue.READS_FAILED)),
        (3, builtin.record_failed_notification, lambda figures: figures.note_failed(catalogue.FAILED_NOTIFICATIONS)),
        (4, builtin.record_failed_handshake, lambda figures: figures.note_failed(catalogue.HANDSHAKES_FAILED)),
        (6, builtin.record_notification_after_expiry, lambda figures: figures.note(catalogue.LATE_NOTIFICATIONS)),
    ]
    for times, record, note in failures:
        for _ in range(times):
            record()
            add_noted(ours, note)
    for _ in range(5):
        builtin.record_kv_expired_req()
        ours.add(SendEnded(lease=LeaseName("r", 1), expired=True))
    builtin_metrics.observe(builtin.data)
    metrics.observe(across_processes(ours))

    expected, found = samples(builtin_registry), samples(registry)
    assert len(expected) > 50
    assert {key: found.get(key) for key in expected} == pytest.approx(expected)


def test_everything_of_ours_is_called_so() -> None:
    builtin_registry, registry = CollectorRegistry(), CollectorRegistry()
    config = SimpleNamespace(kv_transfer_config=TRANSFER_CONFIG)
    NixlPromMetrics(config, metric_types(builtin_registry), LABELS, {0: ["tiny", "0"]})
    our_prometheus(registry)
    added = {name for name, _ in samples(registry)} - {name for name, _ in samples(builtin_registry)}
    assert added
    assert all(name.startswith("vllm:nixl_actor_") for name in added)


def test_ended_requests_are_counted_by_kind_and_per_engine() -> None:
    registry = CollectorRegistry()
    metrics = our_prometheus(registry, engines=2)
    stats = stats_of(received(), received(), received(NOT_PROVEN), received(STUCK, quarantined=True))
    for _ in range(2):
        metrics.observe(across_processes(stats), engine_idx=1)
    failed = "vllm:nixl_actor_failed_receives_total"
    assert value(registry, "vllm:nixl_actor_completed_receives_total", 1) == 4
    assert value(registry, "vllm:nixl_actor_quarantined_receives_total", 1) == 2
    assert value(registry, failed, 1, reason="LeaseNotProven") == 2
    assert value(registry, failed, 1, reason="Quarantined") == 2
    # Kinds that have not occurred are there already, so that the first one is an increase; the other engine has none.
    assert value(registry, failed, 1, reason="HandshakeTimeout") == 0
    assert value(registry, failed, 0, reason="LeaseNotProven") == 0
    assert value(registry, failed, 0, reason="PeerFailure") is None


def test_failed_handshakes_and_reads_are_told_apart() -> None:
    registry = CollectorRegistry()
    stats = ConnectorStats()
    for metric in (catalogue.HANDSHAKES_FAILED, catalogue.READS_FAILED, catalogue.READS_FAILED):
        add_noted(stats, lambda figures, metric=metric: figures.note_failed(metric))
    our_prometheus(registry).observe(across_processes(stats))
    assert value(registry, "vllm:nixl_actor_failed_handshakes_total") == 1
    assert value(registry, "vllm:nixl_actor_failed_reads_total") == 2
    assert value(registry, "vllm:nixl_num_failed_transfers_total") == 3


# --- the catalogue --------------------------------------------------------------------------------------------------


def families(registry: CollectorRegistry) -> dict[str, str]:
    """Kind of each metric, by the name under which the documentation has it."""
    suffix = {"counter": "_total"}
    return {family.name + suffix.get(family.type, ""): family.type for family in registry.collect()}


def test_exactly_the_metrics_of_the_catalogue_exist_with_every_series_from_the_start() -> None:
    registry = CollectorRegistry()
    our_prometheus(registry, engines=2)
    assert families(registry) == {metric.shown: metric.kind for metric in catalogue.METRICS}
    for metric in catalogue.METRICS:
        shown = f"{metric.name}_count" if metric.kind == "histogram" else metric.shown
        for engine in range(2):
            for values in metric.series:
                labels = dict(zip(metric.labels, values, strict=True))
                start = 1 if metric is catalogue.UP else 0
                assert value(registry, shown, engine, **labels) == start, (metric.name, labels)
    labels_of = {name: {key for key, _ in labels} for name, labels in samples(registry)}
    assert labels_of["vllm:nixl_actor_build_info"] == {"model_name", "engine", "version", "vllm", "nixl"}


def test_the_documentation_has_the_tables_of_the_catalogue() -> None:
    text = (Path(__file__).parents[2] / "docs" / "operations" / "metrics.md").read_text()
    for part in (catalogue.BUILTIN, catalogue.OURS):
        assert catalogue.table(part) in text, "put in what `python -m connector.observe.catalogue` prints"
    rows = re.findall(r"^\| `(vllm:\w+)` \|", text, re.MULTILINE)
    assert sorted(rows) == sorted(metric.shown for metric in catalogue.METRICS)


def test_units_are_in_the_names() -> None:
    for metric in catalogue.OURS:
        assert not metric.buckets or metric.name.endswith("_seconds"), metric.name
        assert metric.buckets == tuple(sorted(metric.buckets))
        assert all(bound > 0 for bound in metric.buckets), "Ray refuses others"


def test_labels_are_few_and_bounded() -> None:
    for metric in catalogue.METRICS:
        assert len(set(metric.series)) == len(metric.series) <= 320, metric.name
        known = {"state", "machine", "reason", "side", "outcome", "where", "why", "version", "vllm", "nixl"}
        assert set(metric.labels) <= known


def test_requests_fail_of_the_kinds_that_the_documentation_has_for_the_engine_that_loads() -> None:
    text = (Path(__file__).parents[2] / "docs" / "operations" / "failures.md").read_text()
    loads, lends = (
        set(re.findall(r"^\| `(\w+)` \|", text.partition(heading)[2].partition("\n## ")[0], re.MULTILINE))
        for heading in ("## On the engine that loads", "## On the engine that lends")
    )
    assert {kind for (kind,) in catalogue.FAILED_BY_KIND.series} == set(catalogue.ENDING_KINDS) == loads
    assert set(catalogue.kinds()) == loads | lends


def engine_figures(clock: Clock | None = None) -> EngineFigures:
    figures = EngineFigures(clock or BootClock())
    figures.take(0, 0)
    return figures


def test_gauges_are_the_newest_and_of_the_rank_with_the_most() -> None:
    registry = CollectorRegistry()
    metrics, figures = our_prometheus(registry, engines=2), engine_figures()
    reading = catalogue.REQUESTS.key("reading")
    figures.take_over({0: {reading: 3}, 1: {reading: 5}})
    for of_rank_1, shown in [(5, 5), (4, 4), (0, 3)]:
        figures.take_over({1: {reading: of_rank_1}})
        stats = figures.take(2, 1)
        assert stats is not None
        metrics.observe(across_processes(stats), engine_idx=1)
        assert value(registry, "vllm:nixl_actor_requests", 1, state="reading") == shown
    assert value(registry, "vllm:nixl_actor_requests", 1, state="queued") == 2
    assert value(registry, "vllm:nixl_actor_leases", 1, state="computing") == 1
    assert value(registry, "vllm:nixl_actor_requests", 0, state="reading") == 0
    assert figures.take(2, 1) is None, "nothing has changed"
    assert figures.take(1, 1) is not None


def test_the_age_of_the_oldest_request_and_lease_is_shown_in_steps_of_ten_seconds() -> None:
    clock = SettableClock()
    figures = engine_figures(clock)

    def shown(now_seconds: int, loading_since: int | None = None) -> tuple[float, float] | None:
        clock.seconds = now_seconds
        stats = figures.take(0, 0, loading_since_ns=None if loading_since is None else to_ns(loading_since))
        gauges = stats.data["gauges"] if stats is not None else None
        return gauges and (gauges["oldest_request_seconds"], gauges["oldest_lease_seconds"])

    for name, since in (("older", 100), ("younger", 115)):
        clock.seconds = since
        figures.grant(name, 4, 100)
    assert shown(109) == (0, 0), "the leases themselves are news"
    assert shown(110, loading_since=109) == (0, 10)
    assert shown(118, loading_since=109) is None
    assert shown(125, loading_since=109) == (10, 20)
    figures.end_leases(["older"])
    assert shown(126) == (0, 10), "of those that are left"
    figures.end_leases(["younger"])
    assert shown(127) == (0, 0)


def test_the_age_of_the_oldest_queued_request_is_shown_in_steps_of_ten_seconds() -> None:
    clock = SettableClock()
    figures = engine_figures(clock)

    def shown(now_seconds: int, since_seconds: int | None) -> float | None:
        clock.seconds = now_seconds
        stats = figures.take(1, 0, queued_since_ns=None if since_seconds is None else to_ns(since_seconds))
        return stats and stats.data["gauges"]["oldest_queued_seconds"]

    assert [shown(109, 100), shown(110, 100), shown(119, 100), shown(420, 100)] == [0, 10, None, 320]
    assert shown(421, None) == 0


@pytest.mark.parametrize(
    "happens",
    [
        lambda figures: figures.grant("b", 1, 10),
        lambda figures: figures.end_leases(["a"]),
        lambda figures: figures.note_pool(64),
        lambda figures: figures.note_wait(3.0, is_loaded=True),
        lambda figures: figures.note_local_prefill(catalogue.ABSENT),
        lambda figures: figures.note_not_lent(catalogue.DRAINING_REASON),
        lambda figures: figures.take_over({0: {catalogue.REQUESTS.key("reading"): 3}}),
    ],
)
def test_whatever_happens_is_told_with_the_next_step(happens: Callable[[EngineFigures], None]) -> None:
    figures = engine_figures()
    figures.grant("a", 4, 100)
    figures.take(0, 0, quarantined_blocks=1)
    assert figures.take(0, 0, quarantined_blocks=1) is None
    happens(figures)
    assert figures.take(0, 0, quarantined_blocks=1) is not None
    assert figures.take(0, 0) is not None, "they have come back"


def test_what_another_thread_has_counted_is_told_by_how_much_it_is_more() -> None:
    figures, totals = engine_figures(), {"crashes": 2}
    told = []
    for each in ({}, totals, totals, {"crashes": 2, "other": 1}, {"crashes": 5, "other": 1}):
        figures.count_on(each)
        stats = figures.take(0, 0)
        told.append(None if stats is None else stats.data["counts"])
    assert told == [{}, {"crashes": 2}, None, {"other": 1}, {"crashes": 3}]


def test_what_is_lent_and_kept_out_of_the_pool_is_counted_by_engine() -> None:
    figures = engine_figures()
    figures.grant("a", 4, 100)
    figures.grant("b", 2, 40)
    figures.end_leases(["a", "never lent"])
    stats = figures.take(0, 0, quarantined_blocks=2)
    assert stats is not None
    gauges = {key: found for key, found in stats.data["gauges"].items() if found}
    assert gauges == {"leases|held": 1, "lent_blocks": 2, "lent_tokens": 40, "quarantined_blocks": 2, "up": 1}
    assert stats.data["counts"] == {"granted_leases": 2, "granted_blocks": 6, "granted_tokens": 140}
    figures.end_leases(["b"])
    stats = figures.take(0, 0, is_up=False)
    assert stats is not None
    assert not any(stats.data["gauges"].values())


def test_figures_of_workers_and_of_the_scheduler_travel_together() -> None:
    registry = CollectorRegistry()
    metrics, figures = our_prometheus(registry), engine_figures()
    figures.note_wait(3.0, is_loaded=True)
    figures.note_local_prefill(catalogue.ABSENT)
    one, other = stats_of(received()), stats_of(received())
    for worker in (one, other):
        worker.count("retries", 2)
        worker.sample("wake_up_seconds", 0.5, 0.25)
    scheduler = figures.take(0, 0)
    assert scheduler is not None
    metrics.observe(across_processes(one.aggregate(other).aggregate(scheduler)))
    assert value(registry, "vllm:nixl_actor_retries_total") == 4
    assert value(registry, "vllm:nixl_actor_wake_up_seconds_count") == 4
    assert value(registry, "vllm:nixl_actor_wake_up_seconds_sum") == 1.5
    assert value(registry, "vllm:nixl_actor_kv_wait_seconds_sum", outcome="loaded") == 3.0
    assert value(registry, "vllm:nixl_actor_local_prefills_total", reason="absent") == 1
    assert value(registry, "vllm:nixl_actor_completed_receives_total") == 2


def test_gauges_alone_are_sent_and_are_no_line_of_the_log() -> None:
    """vLLM drops what the scheduler's process says if it is empty, and logs whatever is not."""
    figures = engine_figures()
    figures.grant("a", 4, 100)
    stats = figures.take(0, 0)
    assert stats is not None
    assert not stats.is_empty()
    assert logged(ConnectorStats(across_processes(stats))) == []
    together = MultiKVConnectorStats(data={"NixlActorConnector": stats_of()})
    together.aggregate(MultiKVConnectorStats(data={"NixlActorConnector": stats}))
    assert together.to_dict()["NixlActorConnector"]["gauges"]["lent_blocks"] == 4


def test_gauges_of_several_front_ends_are_joined_as_those_of_vllm() -> None:
    made: list[Any] = []

    def gauge(**arguments: Any) -> Any:
        made.append(Gauge(**arguments, registry=CollectorRegistry()))
        return made[-1]

    types = metric_types(CollectorRegistry()) | {Gauge: gauge}
    ConnectorPromMetrics(SimpleNamespace(kv_transfer_config=TRANSFER_CONFIG), types, LABELS, {0: ["tiny", "0"]})
    assert len(made) == sum(metric.kind == "gauge" for metric in catalogue.METRICS)
    assert {each._multiprocess_mode for each in made} == {"mostrecent"}
    modes = re.findall(r'multiprocess_mode="(\w+)"', Path(loggers.__file__).read_text())
    assert collections.Counter(modes).most_common(1)[0][0] == "mostrecent"


# --- Ray ------------------------------------------------------------------------------------------------------------


class RayMetric:
    """What Ray's metrics are to vLLM's wrappers; keeps what it is told, by its tags."""

    made: ClassVar[dict[str, RayMetric]] = {}

    def __init__(
        self, *, name: str, description: str, tag_keys: tuple[str, ...], boundaries: Sequence[float] | None = None
    ) -> None:
        assert re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", name)
        assert boundaries is None or all(bound > 0 for bound in boundaries)
        self._tag_keys = tag_keys
        self.told: list[tuple[float, dict[str, str]]] = []
        self.made[name] = self

    def _tell(self, number: float, tags: dict[str, str]) -> None:
        assert set(tags) == set(self._tag_keys)
        self.told.append((number, tags))

    inc = set = observe = _tell


def test_ray_takes_the_same_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own wrappers, around stand-ins of Ray's three classes."""
    monkeypatch.setattr(RayMetric, "made", {})
    stand_ins = SimpleNamespace(Gauge=RayMetric, Counter=RayMetric, Histogram=RayMetric)
    monkeypatch.setattr(ray_wrappers, "ray_metrics", stand_ins)
    monkeypatch.setattr(ray_wrappers, "_get_replica_id", lambda: "replica")
    wired = ray_wrappers.RayKVConnectorProm(
        SimpleNamespace(kv_transfer_config=TRANSFER_CONFIG), LABELS, {0: ["tiny", "0"]}
    )
    figures = engine_figures()
    figures.grant("a", 4, 100)
    figures.note_wait(3.0, is_loaded=False)
    scheduler = figures.take(0, 0)
    assert scheduler is not None
    wired.observe(across_processes(stats_of(*EVERYTHING).aggregate(scheduler)))
    assert len(RayMetric.made) == len(catalogue.METRICS)
    blocks = RayMetric.made["vllm_nixl_actor_lent_blocks"].told
    assert [number for number, _ in blocks] == [0, 4]
    ((waited, tags),) = RayMetric.made["vllm_nixl_actor_kv_wait_seconds"].told
    assert (waited, tags["outcome"], tags["ReplicaId"]) == (3.0, "failed", "replica")
