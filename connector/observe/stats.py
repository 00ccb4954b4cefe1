"""Figures of the connector: from outcomes to vLLM's periodic log line and to Prometheus.

Outcomes are folded into `ConnectorStats` on the engine thread of every worker. vLLM sends that to the scheduler's
process, adds the ranks up, and from there to the front end, where `reduce` makes the log line and
`ConnectorPromMetrics` feeds Prometheus. On the way only `data` survives: plain lists and integers, keyed by name.

The Prometheus metrics that the built-in connector also has keep its names, meanings and bucket boundaries, so that
dashboards and alerts keep working and a fleet that runs both can be summed. Ours are called `vllm:nixl_actor_*`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from connector.protocol import (
    HandshakeFailureNoted,
    LateNotificationNoted,
    NotificationFailureNoted,
    Outcome,
    ReceiveEnded,
    SendEnded,
    TransferFailureNoted,
    TransferMeasured,
)
from statemachine.failures import AbortedByClient, Failure

MEBIBYTE = 2**20

# Keys of `ConnectorStats.data`. Measured: one entry per completed READ.
TRANSFER_SECONDS = "transfer_seconds"
POST_SECONDS = "post_seconds"
TRANSFER_BYTES = "transfer_bytes"
TRANSFER_DESCRIPTORS = "transfer_descriptors"
MEASURED = (TRANSFER_SECONDS, POST_SECONDS, TRANSFER_BYTES, TRANSFER_DESCRIPTORS)

# Counted: one integer each.
COMPLETED_RECEIVES = "completed_receives"
QUARANTINED_RECEIVES = "quarantined_receives"
FAILED_HANDSHAKES = "failed_handshakes"
FAILED_TRANSFERS = "failed_transfers"
FAILED_NOTIFICATIONS = "failed_notifications"
EXPIRED_LEASES = "expired_leases"
LATE_NOTIFICATIONS = "late_notifications"
COUNTED = (
    COMPLETED_RECEIVES,
    QUARANTINED_RECEIVES,
    FAILED_HANDSHAKES,
    FAILED_TRANSFERS,
    FAILED_NOTIFICATIONS,
    EXPIRED_LEASES,
    LATE_NOTIFICATIONS,
)

# Counted by kind of failure: a dict from the kind to an integer.
FAILED_RECEIVES = "failed_receives"

TRANSPORT_FAILURES = (FAILED_TRANSFERS, FAILED_HANDSHAKES, FAILED_NOTIFICATIONS)
"""What the built-in connector calls a failed transfer: everything below the level of a request that went wrong."""

_COUNTED_AS: dict[type[Outcome], str] = {
    HandshakeFailureNoted: FAILED_HANDSHAKES,
    TransferFailureNoted: FAILED_TRANSFERS,
    NotificationFailureNoted: FAILED_NOTIFICATIONS,
    LateNotificationNoted: LATE_NOTIFICATIONS,
}


class ConnectorStats(KVConnectorStats):
    """Figures since the last `reset`. `data` is what crosses processes; without it, or with an empty one, all is 0."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        # A copy, because vLLM hands one dict to several loggers, and each of them adds up in what it was given.
        super().__init__(data={key: copy.copy(value) for key, value in data.items()} if data else _nothing())

    def add(self, outcome: Outcome) -> None:
        """Fold one outcome in."""
        match outcome:
            case TransferMeasured():
                self.data[TRANSFER_SECONDS].append(outcome.seconds_in_transport)
                self.data[POST_SECONDS].append(outcome.seconds_to_post)
                self.data[TRANSFER_BYTES].append(outcome.bytes)
                self.data[TRANSFER_DESCRIPTORS].append(outcome.descriptors)
            case ReceiveEnded():
                self._add_receive(outcome)
            case SendEnded(expired=True):
                self.data[EXPIRED_LEASES] += 1
            case _:
                key = _COUNTED_AS.get(type(outcome))
                if key is not None:
                    self.data[key] += 1

    def _add_receive(self, ended: ReceiveEnded) -> None:
        if ended.failure is None:
            self.data[COMPLETED_RECEIVES] += 1
        else:
            by_kind = self.data[FAILED_RECEIVES]
            by_kind[ended.failure.kind] = by_kind.get(ended.failure.kind, 0) + 1
        if ended.quarantined:
            self.data[QUARANTINED_RECEIVES] += 1

    def reset(self) -> None:
        self.data = _nothing()

    def clone_and_reset(self) -> ConnectorStats:
        """The figures so far; this object starts again from nothing."""
        figures = ConnectorStats(self.data)
        self.reset()
        return figures

    def is_empty(self) -> bool:
        """A list without entries, a count of 0, no failure of any kind."""
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> ConnectorStats:
        """Add the figures of `other`, which stays as it is, and return self."""
        for key in MEASURED:
            self.data[key].extend(other.data[key])
        for key in COUNTED:
            self.data[key] += other.data[key]
        by_kind = self.data[FAILED_RECEIVES]
        for kind, count in other.data[FAILED_RECEIVES].items():
            by_kind[kind] = by_kind.get(kind, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """The figures of vLLM's periodic log line.

        Those that the built-in connector prints too have its names. Receives that the client gave up are no failures.
        """
        data = self.data
        failed = {kind: count for kind, count in data[FAILED_RECEIVES].items() if kind != AbortedByClient.__name__}
        return {
            **_transfer_figures(*(data[key] for key in MEASURED)),
            "Num failed transfers": sum(data[key] for key in TRANSPORT_FAILURES),
            "Num KV expired reqs": data[EXPIRED_LEASES],
            "Num notifs after expiry": data[LATE_NOTIFICATIONS],
            "Num completed receives": data[COMPLETED_RECEIVES],
            "Num failed receives": sum(failed.values()),
            **{f"Num failed receives ({kind})": count for kind, count in sorted(failed.items())},
            "Num quarantined receives": data[QUARANTINED_RECEIVES],
        }


def _nothing() -> dict[str, Any]:
    return {**{key: [] for key in MEASURED}, **dict.fromkeys(COUNTED, 0), FAILED_RECEIVES: {}}


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

_POST_SECONDS_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
_TRANSFER_SECONDS_BUCKETS = _POST_SECONDS_BUCKETS[1:]
_BYTES_BUCKETS = tuple(2**exponent for exponent in range(11, 34, 2))
_DESCRIPTOR_BUCKETS = (10, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10000, 20000, 50000)

_HISTOGRAMS = (
    (
        "vllm:nixl_xfer_time_seconds",
        "Time from the start of a READ to its completion, in seconds.",
        _TRANSFER_SECONDS_BUCKETS,
        TRANSFER_SECONDS,
    ),
    (
        "vllm:nixl_post_time_seconds",
        "Time that NIXL took to start a READ, in seconds.",
        _POST_SECONDS_BUCKETS,
        POST_SECONDS,
    ),
    ("vllm:nixl_bytes_transferred", "Bytes that one READ moved.", _BYTES_BUCKETS, TRANSFER_BYTES),
    ("vllm:nixl_num_descriptors", "Descriptors of one READ.", _DESCRIPTOR_BUCKETS, TRANSFER_DESCRIPTORS),
)
"""Name, documentation, bucket boundaries, and key of the data."""

_COUNTERS = (
    (
        "vllm:nixl_num_failed_transfers",
        "Failed READs, handshakes and notifications together. Leases that expired are counted apart.",
        TRANSPORT_FAILURES,
    ),
    (
        "vllm:nixl_num_failed_notifications",
        "Notifications that could not be sent; they are part of vllm:nixl_num_failed_transfers too.",
        (FAILED_NOTIFICATIONS,),
    ),
    (
        "vllm:nixl_num_kv_expired_reqs",
        "Leases that ended before every consumer had read the blocks. Counted on the prefill engine.",
        (EXPIRED_LEASES,),
    ),
    (
        "vllm:nixl_num_notifications_after_expiry",
        "Consumers that say they have read blocks which are not lent (any more), one for each of their ranks. Counted "
        "on the prefill engine.",
        (LATE_NOTIFICATIONS,),
    ),
    (
        "vllm:nixl_actor_failed_handshakes",
        "Handshakes that failed, each counted once however many requests waited for it.",
        (FAILED_HANDSHAKES,),
    ),
    ("vllm:nixl_actor_failed_reads", "READs that failed or could not be started.", (FAILED_TRANSFERS,)),
    (
        "vllm:nixl_actor_completed_receives",
        "Requests whose KV arrived under a proven lease, one for each rank.",
        (COMPLETED_RECEIVES,),
    ),
    (
        "vllm:nixl_actor_quarantined_receives",
        "Requests that ended while READs might still write into their blocks, which stay out of the pool until those "
        "end; one for each rank.",
        (QUARANTINED_RECEIVES,),
    ),
)
"""Name, documentation, and the keys of the data whose sum it counts."""

_FAILED_RECEIVES_NAME = "vllm:nixl_actor_failed_receives"
_FAILED_RECEIVES_DOCUMENTATION = (
    "Requests whose KV did not arrive, by the kind of the failure that ended them (AbortedByClient: the client went "
    "away); one for each rank."
)
_KIND_LABEL = "reason"


class ConnectorPromMetrics(KVConnectorPromMetrics):
    """Registers the metrics once per front end and feeds them with the `data` of `ConnectorStats`."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._histograms = {
            key: self._per_engine(
                self._histogram_cls(name=name, documentation=documentation, buckets=buckets, labelnames=labelnames)
            )
            for name, documentation, buckets, key in _HISTOGRAMS
        }
        self._counters = [
            (keys, self._per_engine(self._counter_cls(name=name, documentation=documentation, labelnames=labelnames)))
            for name, documentation, keys in _COUNTERS
        ]
        self._failed_receives = self._counter_cls(
            name=_FAILED_RECEIVES_NAME,
            documentation=_FAILED_RECEIVES_DOCUMENTATION,
            labelnames=[*labelnames, _KIND_LABEL],
        )
        # Every kind starts at 0: a series that appears with its first failure has no increase that an alert could see.
        for values in per_engine_labelvalues.values():
            for kind in _kinds(Failure):
                self._failed_receives.labels(*values, kind)

    def _per_engine(self, metric: Any) -> dict[int, Any]:
        children: dict[int, Any] = create_metric_per_engine(metric, self.per_engine_labelvalues)
        return children

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record the figures of one interval of one engine."""
        for key, histograms in self._histograms.items():
            for value in transfer_stats_data[key]:
                histograms[engine_idx].observe(value)
        for keys, counters in self._counters:
            increase = sum(transfer_stats_data[key] for key in keys)
            if increase:
                counters[engine_idx].inc(increase)
        for kind, count in transfer_stats_data[FAILED_RECEIVES].items():
            self._failed_receives.labels(*self.per_engine_labelvalues[engine_idx], kind).inc(count)


def _kinds(failure: type[Failure]) -> Iterator[str]:
    """Names of the failures that can occur: those that nothing is derived from."""
    below = failure.__subclasses__()
    if not below:
        yield failure.__name__
    for derived in below:
        yield from _kinds(derived)
