"""Figures of the connector: from worker events to vLLM's periodic log line and to Prometheus.

What metrics there are is in `catalogue`. Their figures are made in three places:

    trio thread of a worker      what the machines did, and what is only counted (`runtime.figures`)
    engine thread of a worker    what was reported to vLLM (`ConnectorStats.add`)
    scheduler's process          what concerns the whole engine, and all gauges (`scheduler.engine_figures`)

vLLM takes a `ConnectorStats` of every worker and one of the scheduler's process with each step, adds them up, and sends
them to the front end, where `reduce` makes the log line and `ConnectorPromMetrics` feeds Prometheus. On the way only
`data` survives: plain lists and numbers, keyed by name.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from connector import DISTRIBUTION
from connector.observe import catalogue
from connector.observe.catalogue import Metric
from connector.ports.nixl import ReadMeasured
from connector.protocol import (
    ReceiveEnded,
    SendEnded,
    WorkerEvent,
)
from connector.versions import NIXL, shown_version
from statemachine.failures import AbortedByClient, Failure

MEBIBYTE = 2**20

# Keys of `ConnectorStats.data`: by key of a series (`Metric.key`) an integer, a list of values, the newest value.
COUNTS = "counts"
SAMPLES = "samples"
GAUGES = "gauges"

# Measured: one entry per completed READ.
_MEASURED = tuple(
    metric.key()
    for metric in (
        catalogue.TRANSFER_SECONDS,
        catalogue.POST_SECONDS,
        catalogue.TRANSFER_BYTES,
        catalogue.TRANSFER_DESCRIPTORS,
    )
)
_EXPIRED, _COMPLETED = catalogue.EXPIRED_LEASES.key(), catalogue.COMPLETED.key()
_QUARANTINED, _LATE = catalogue.QUARANTINED.key(), catalogue.LATE_NOTIFICATIONS.key()
_FAILED_TRANSFERS = catalogue.FAILED_TRANSFERS.key()
_FAILED = {kind: catalogue.FAILED_BY_KIND.key(kind) for (kind,) in catalogue.FAILED_BY_KIND.series}

_LOGGED = frozenset((*_MEASURED, _EXPIRED, _COMPLETED, _QUARANTINED, _LATE, _FAILED_TRANSFERS, *_FAILED.values()))
"""What the periodic line is made from."""


class ConnectorStats(KVConnectorStats):
    """Figures since the last `reset`. `data` is what crosses processes; without it, or with an empty one, all is 0."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        # A copy, because vLLM hands one dict to several loggers, and each of them adds up in what it was given.
        copied = {part: {key: copy.copy(value) for key, value in data[part].items()} for part in data} if data else None
        super().__init__(data=copied or _nothing())

    @classmethod
    def of_periodic_line(cls, data: Mapping[str, Any]) -> ConnectorStats:
        """What the periodic line says of `data`. A front end adds up what it is given until there is something to say,
        and an engine that only lends may never have that: nothing else may be kept until then."""
        kept = {part: {key: value for key, value in data[part].items() if key in _LOGGED} for part in (COUNTS, SAMPLES)}
        return cls(_nothing() | kept)

    def add(self, event: WorkerEvent) -> None:
        """Fold one worker event in, but for a receive that has been loaded, which may still fail (`count_loaded`)."""
        match event:
            case ReadMeasured():
                measured = event.seconds_in_transport, event.seconds_to_post, event.bytes, event.descriptors
                samples = self.data[SAMPLES]
                for key, value in zip(_MEASURED, measured, strict=True):
                    samples.setdefault(key, []).append(value)
            case ReceiveEnded(failure=Failure() as failure, quarantined=is_quarantined):
                self.count_failed(failure)
                if is_quarantined:
                    self.count(_QUARANTINED, 1)
            case SendEnded(expired=True):
                self.count(_EXPIRED, 1)
            case _:
                pass

    def count_loaded(self, requests: int) -> None:
        """So many requests may be used."""
        counts = self.data[COUNTS]
        counts[_COMPLETED] = counts.get(_COMPLETED, 0) + requests

    def count_failed(self, failure: Failure) -> None:
        """A request may not."""
        self.count(_FAILED[failure.kind], 1)

    def count(self, key: str, amount: int) -> None:
        """Add to one series of a counter."""
        counts = self.data[COUNTS]
        counts[key] = counts.get(key, 0) + amount

    def sample(self, key: str, *values: float) -> None:
        """Add to one series of a histogram."""
        self.data[SAMPLES].setdefault(key, []).extend(values)

    def set_gauges(self, gauges: Mapping[str, float]) -> None:
        """From now on these are the values."""
        self.data[GAUGES].update(gauges)

    def reset(self) -> None:
        self.data = _nothing()

    def clone_and_reset(self) -> ConnectorStats:
        """The figures so far; this object starts again from nothing."""
        figures = ConnectorStats()
        figures.data, self.data = self.data, figures.data
        return figures

    def is_empty(self) -> bool:
        """Whether there is nothing to say in the periodic line: no READ, no end of a request, no failure."""
        return _LOGGED.isdisjoint(self.data[COUNTS]) and _LOGGED.isdisjoint(self.data[SAMPLES])

    def aggregate(self, other: KVConnectorStats) -> ConnectorStats:
        """Add the figures of `other`, which stays as it is, and return self."""
        for key, count in other.data[COUNTS].items():
            self.count(key, count)
        for key, values in other.data[SAMPLES].items():
            self.sample(key, *values)
        self.set_gauges(other.data[GAUGES])
        return self

    def reduce(self) -> dict[str, int | float]:
        """The figures of vLLM's periodic log line.

        Those that the built-in connector prints too have its names. Receives that the client gave up are no failures.
        """
        counts, samples = self.data[COUNTS], self.data[SAMPLES]
        failed = {
            kind: counts[key] for kind, key in _FAILED.items() if key in counts and kind != AbortedByClient.__name__
        }
        return {
            **_transfer_figures(*(samples.get(key, ()) for key in _MEASURED)),
            "Num failed transfers": counts.get(_FAILED_TRANSFERS, 0),
            "Num KV expired reqs": counts.get(_EXPIRED, 0),
            "Num notifs after expiry": counts.get(_LATE, 0),
            "Num completed receives": counts.get(_COMPLETED, 0),
            "Num failed receives": sum(failed.values()),
            **{f"Num failed receives ({kind})": count for kind, count in failed.items()},
            "Num quarantined receives": counts.get(_QUARANTINED, 0),
        }


class EngineStats(ConnectorStats):
    """Figures of the scheduler's process, which vLLM takes only if they are not empty, and otherwise would forget."""

    def is_empty(self) -> bool:
        return False


def _nothing() -> dict[str, dict[str, Any]]:
    return {COUNTS: {}, SAMPLES: {}, GAUGES: {}}


def _transfer_figures(
    transport_seconds: Sequence[float],
    post_seconds: Sequence[float],
    lengths_bytes: Sequence[int],
    descriptors: Sequence[int],
) -> dict[str, int | float]:
    """Means and 90th percentiles over READs; all 0 when there was none."""
    reads = len(transport_seconds)
    mebibytes = sum(lengths_bytes) / MEBIBYTE
    seconds = sum(transport_seconds)
    return {
        "Num successful transfers": reads,
        "Avg xfer time (ms)": _mean(transport_seconds, scale=1e3),
        "P90 xfer time (ms)": _percentile_90(transport_seconds, scale=1e3),
        "Avg post time (ms)": _mean(post_seconds, scale=1e3),
        "P90 post time (ms)": _percentile_90(post_seconds, scale=1e3),
        "Avg MB per transfer": _mean(lengths_bytes, scale=1 / MEBIBYTE),
        # Of one READ while it runs: concurrent ones do not add up. 0 when the transport was too quick for its clock.
        "Throughput (MB/s)": round(mebibytes / seconds, 3) if seconds > 0 else 0,
        "Avg number of descriptors": round(_mean(descriptors), 1),
    }


def _mean(values: Sequence[float], *, scale: float = 1.0) -> float:
    return round(sum(values) / len(values) * scale, 3) if values else 0


def _percentile_90(values: Sequence[float], *, scale: float) -> float:
    return round(float(np.percentile(values, 90)) * scale, 3) if values else 0


# --- Prometheus -----------------------------------------------------------------------------------------------------

MOST_RECENT = "mostrecent"
"""How the gauges of several front ends are joined, as vLLM's own: what one of them has heard last is the value."""


class ConnectorPromMetrics(KVConnectorPromMetrics):
    """Registers the metrics once per front end and feeds them with the `data` of `ConnectorStats`.

    Only the classes that vLLM passes are used, and of these only what Ray's have too: `labels` with positions, `inc`,
    `set` and `observe`.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        # By engine and key of the series.
        self._by_key: dict[int, dict[str, Any]] = {engine: {} for engine in per_engine_labelvalues}
        for metric in catalogue.METRICS:
            registered = self._register(metric)
            for engine, values in per_engine_labelvalues.items():
                for labels in metric.series:
                    self._by_key[engine][metric.key(*labels)] = registered.labels(*values, *labels)
                if metric is catalogue.BUILD_INFO:
                    registered.labels(*values, *_versions()).set(1)
        for series in self._by_key.values():
            for metric in catalogue.OURS:
                if metric.kind == "gauge" and metric is not catalogue.BUILD_INFO:
                    for labels in metric.series:
                        # Engines start only when their actors do.
                        series[metric.key(*labels)].set(1 if metric is catalogue.UP else 0)

    def _register(self, metric: Metric) -> Any:
        shared = {
            "name": metric.name,
            "documentation": metric.documentation,
            "labelnames": [*self._labelnames, *metric.labels],
        }
        if metric.kind == "gauge":
            return self._gauge_cls(**shared, multiprocess_mode=MOST_RECENT)
        if metric.kind == "counter":
            return self._counter_cls(**shared)
        return self._histogram_cls(**shared, buckets=metric.buckets)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record the figures of one interval of one engine."""
        data, by_key = transfer_stats_data, self._by_key[engine_idx]
        for key, count in data[COUNTS].items():
            by_key[key].inc(count)
        for key, values in data[SAMPLES].items():
            child = by_key[key]
            for value in values:
                child.observe(value)
        for key, value in data[GAUGES].items():
            by_key[key].set(value)


def _versions() -> tuple[str, str, str]:
    """The versions of this package, vLLM and NIXL, whatever their distributions are called."""
    return shown_version(DISTRIBUTION), vllm.__version__, shown_version(*NIXL)
