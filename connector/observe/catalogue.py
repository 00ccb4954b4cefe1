"""Every metric of the connector, as data: names, kinds, labels with all their values, buckets, and what they mean.

`stats` registers what stands here, `runtime.figures` and `scheduler.engine_figures` fill it in. The tables of
docs/operations/metrics.md are what `python -m connector.observe.catalogue` prints, and the dashboard and the alerts are
tested against it.

Labels are bounded: their values are states and machines of the tables, kinds of failures, words from this file, and
versions. Never an engine, a request or an address. Every series exists from the start, at 0 (`up` and `build_info` at
1): one that appears with its first event has no increase that an alert could see.

Ranks. Counters and histograms add up what all ranks of an engine have seen. Gauges of ranks show the largest value of
all of them, so that they do not depend on the parallel size: a request that only one rank still reads is one request
that is being read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from connector.observe.traced import MACHINES, QUEUED
from statemachine import hold, lease, lending, peer, remote_engine, request
from statemachine.failures import (
    ConnectionCutOff,
    ConsumerUnknown,
    Failure,
    LeaseExpired,
    MessageMalformed,
    NotificationsDropped,
    UcxPortClosed,
)
from statemachine.kernel import Machine

PREFIX = "vllm:nixl_actor_"
NO_REASON = "none"
"""Value of the label `reason` where nothing has failed."""
OTHER = "other"
"""Value of a label for what has no name here."""

WHY_GONE = {
    lending.RELEASED: "released",
    lending.EXPIRED: "expired",
    lending.WITHDRAWN: "withdrawn",
    lending.SUPERSEDED: "superseded",
    lending.UNKNOWN: "unknown",
    lending.CROWDED: "crowded",
    lending.AMBIGUOUS: "ambiguous",
    lending.GRACE_OVER: "left",
    remote_engine.RESTARTED: "restarted",
    remote_engine.REPLACED: "replaced",
    remote_engine.RESIZED: "resized",
    remote_engine.LEFT: "engine_left",
    remote_engine.ASSUMED_OVER: "assumed_over",
    remote_engine.RETIRED: "retired",
}
"""Why D counts on a lease no longer, as a label. P is another process: whatever else it says is OTHER."""

Kind = Literal["gauge", "counter", "histogram"]
Side = Literal["P", "D", "both"]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric.

    Attributes:
        name: as it is registered; Prometheus shows a counter with `_total` behind it, and a histogram as `_bucket`,
            `_sum` and `_count`.
        documentation: its help text, and its row in the documentation.
        side: which engines have something to show. With `bidirectional_kv_xfer` each engine is both.
        labels: beside vLLM's own, `model_name` and `engine`.
        series: values of `labels`; all that can ever occur.
        buckets: upper bounds, of a histogram.
    """

    name: str
    kind: Kind
    documentation: str
    side: Side
    labels: tuple[str, ...] = ()
    series: tuple[tuple[str, ...], ...] = ((),)
    buckets: tuple[float, ...] = ()

    @property
    def shown(self) -> str:
        """Its name on the page of metrics, but for the suffixes of a histogram."""
        return f"{self.name}_total" if self.kind == "counter" else self.name

    def key(self, *values: str) -> str:
        """Names one series within `ConnectorStats.data`."""
        return "|".join((self.name.removeprefix(PREFIX), *values))


def kinds(failure: type[Failure] = Failure) -> Iterator[str]:
    """Names of the failures that can occur: those that nothing is derived from."""
    below = failure.__subclasses__()
    if not below:
        yield failure.__name__
    for derived in below:
        yield from kinds(derived)


_SAID_ONLY = {
    each.__name__
    for each in (
        MessageMalformed,
        NotificationsDropped,
        ConnectionCutOff,
        ConsumerUnknown,
        LeaseExpired,
        UcxPortClosed,
    )
}
"""Failures that the engine which lends logs, and that end no request and no connection."""

ENDING_KINDS = tuple(sorted(kind for kind in kinds() if kind not in _SAID_ONLY))

_STATES_WITH_FAILURE: tuple[object, ...] = (
    request.State.DRAINING,
    request.State.FAILED,
    request.State.EXPIRED,
    peer.State.DRAINING,
    peer.State.BACKOFF,
    peer.State.INCOMPATIBLE,
    peer.State.GONE,
)
"""What is entered because of a failure."""


def reasons(state: object) -> tuple[str, ...]:
    """What the label `reason` of a transition into `state` may be."""
    if state in _STATES_WITH_FAILURE:
        return (*ENDING_KINDS, OTHER)
    if state is hold.State.GONE:
        return (*WHY_GONE.values(), OTHER)
    if state is lease.State.EXPIRED:
        return (lease.LENT_BACK, NO_REASON)
    return (NO_REASON,)


def living_states(machine: Machine[Any, Any]) -> tuple[str, ...]:
    """Those in which an instance can stay."""
    return tuple(state.value for state in machine.states if state not in machine.terminal)


# --- of the built-in connector --------------------------------------------------------------------------------------

_POST_SECONDS_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
_BYTES_BUCKETS = tuple(2**exponent for exponent in range(11, 34, 2))
_DESCRIPTOR_BUCKETS = (10, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10000, 20000, 50000)

TRANSFER_SECONDS = Metric(
    name="vllm:nixl_xfer_time_seconds",
    kind="histogram",
    documentation="Time from the start of a READ to its completion, in seconds.",
    side="D",
    buckets=_POST_SECONDS_BUCKETS[1:],
)
POST_SECONDS = Metric(
    name="vllm:nixl_post_time_seconds",
    kind="histogram",
    documentation="Time that NIXL took to start a READ, in seconds.",
    side="D",
    buckets=_POST_SECONDS_BUCKETS,
)
TRANSFER_BYTES = Metric(
    name="vllm:nixl_bytes_transferred",
    kind="histogram",
    documentation="Bytes that one READ moved.",
    side="D",
    buckets=_BYTES_BUCKETS,
)
TRANSFER_DESCRIPTORS = Metric(
    name="vllm:nixl_num_descriptors",
    kind="histogram",
    documentation="Descriptors of one READ.",
    side="D",
    buckets=_DESCRIPTOR_BUCKETS,
)
FAILED_TRANSFERS = Metric(
    name="vllm:nixl_num_failed_transfers",
    kind="counter",
    documentation="Failed READs, handshakes and notifications together. Leases that expired are counted apart.",
    side="D",
)
"""What the built-in connector calls a failed transfer: everything below the level of a request that went wrong."""

FAILED_NOTIFICATIONS = Metric(
    name="vllm:nixl_num_failed_notifications",
    kind="counter",
    documentation="Notifications that could not be sent; they are part of vllm:nixl_num_failed_transfers too.",
    side="D",
)
EXPIRED_LEASES = Metric(
    name="vllm:nixl_num_kv_expired_reqs",
    kind="counter",
    documentation="Leases that ended before every reader had read the blocks.",
    side="P",
)
LATE_NOTIFICATIONS = Metric(
    name="vllm:nixl_num_notifications_after_expiry",
    kind="counter",
    documentation="Readers that say they have read blocks whose lease had expired before, one for each of their "
    "ranks, however often it says so. A reader with this connector does not use what it has read so late.",
    side="P",
)

BUILTIN = (
    TRANSFER_SECONDS,
    POST_SECONDS,
    TRANSFER_BYTES,
    TRANSFER_DESCRIPTORS,
    FAILED_TRANSFERS,
    FAILED_NOTIFICATIONS,
    EXPIRED_LEASES,
    LATE_NOTIFICATIONS,
)
"""Those that the built-in connector has too, with its names, meanings and bucket boundaries, so that its dashboards and
alerts keep working and a fleet that runs both can be summed."""

# --- gauges ---------------------------------------------------------------------------------------------------------

REQUESTS = Metric(
    name=f"{PREFIX}requests",
    kind="gauge",
    documentation="Requests that wait for KV, by state: queued (vLLM has not scheduled it yet), then the states of the "
    "machine request.",
    side="D",
    labels=("state",),
    series=tuple((state,) for state in (QUEUED, *living_states(request.MACHINE))),
)
LEASES = Metric(
    name=f"{PREFIX}leases",
    kind="gauge",
    documentation="Leases by state: computing (its prompt is being computed) and held (its blocks wait for readers).",
    side="P",
    labels=("state",),
    series=tuple((state,) for state in living_states(lease.MACHINE)),
)
OLDEST_QUEUED_SECONDS = Metric(
    name=f"{PREFIX}oldest_queued_seconds",
    kind="gauge",
    documentation="For how long the request whose KV is elsewhere and that has waited longest in vLLM's queue has "
    "waited, in seconds, in steps of ten; 0 where none has for so long. It has no blocks yet, and no deadline.",
    side="D",
)
OLDEST_REQUEST_SECONDS = Metric(
    name=f"{PREFIX}oldest_request_seconds",
    kind="gauge",
    documentation="For how long the request that loads longest has loaded, in seconds, in steps of ten; 0 where none "
    "has for so long. Each ends within request_timeout_seconds and quiesce_timeout_seconds, unless the actors hang.",
    side="D",
)
OLDEST_LEASE_SECONDS = Metric(
    name=f"{PREFIX}oldest_lease_seconds",
    kind="gauge",
    documentation="For how long the lease that is held longest has been held, in seconds, in steps of ten; 0 where "
    "none has for so long.",
    side="P",
)
LENT_BLOCKS = Metric(
    name=f"{PREFIX}lent_blocks",
    kind="gauge",
    documentation="KV blocks of the leases that are held, which vLLM cannot use for anything else. A block of several "
    "leases counts once for each.",
    side="P",
)
KV_BLOCKS = Metric(
    name=f"{PREFIX}kv_blocks",
    kind="gauge",
    documentation="KV blocks of the engine's pool. Those that are lent or in quarantine are among them.",
    side="both",
)
LENT_TOKENS = Metric(
    name=f"{PREFIX}lent_tokens", kind="gauge", documentation="Tokens whose KV is in the blocks that are lent.", side="P"
)
QUARANTINED_BLOCKS = Metric(
    name=f"{PREFIX}quarantined_blocks",
    kind="gauge",
    documentation="KV blocks kept out of the block pool, because READs of requests that have ended may still write "
    "into them.",
    side="D",
)
PEERS = Metric(
    name=f"{PREFIX}peers",
    kind="gauge",
    documentation="Known prefill engines, by the state of the machine peer.",
    side="D",
    labels=("state",),
    series=tuple((state,) for state in living_states(peer.MACHINE)),
)
MAILBOX_MESSAGES = Metric(
    name=f"{PREFIX}mailbox_messages",
    kind="gauge",
    documentation="Commands of the engine that wait for the actors, if they are late; 0 while they are not.",
    side="both",
)
LOOP_LAG_SECONDS = Metric(
    name=f"{PREFIX}loop_lag_seconds",
    kind="gauge",
    documentation="How long the actors have been called and have not woken up, in seconds, if that is long; 0 while it "
    "is not.",
    side="both",
)
NIXL_LAG_SECONDS = Metric(
    name=f"{PREFIX}nixl_lag_seconds",
    kind="gauge",
    documentation="For how long NIXL has not come back from a call, in seconds, if that is long; 0 while it does. No "
    "READ begins or is seen to end meanwhile, whichever engine it is from.",
    side="both",
)
UP = Metric(
    name=f"{PREFIX}up",
    kind="gauge",
    documentation="1 while every rank can read and lend KV; 0 when the actors of one have died, its NIXL agent is "
    "broken, its UCX has closed its port, or the handshake listener has died. Restart the engine then.",
    side="both",
)
DRAINING = Metric(
    name=f"{PREFIX}draining",
    kind="gauge",
    documentation="1 from when the engine was asked to end (nixl-actor drain, SIGTERM); 0 before.",
    side="P",
)
DRAINED = Metric(
    name=f"{PREFIX}drained",
    kind="gauge",
    documentation="1 when an engine that is to end lends nothing any more, or its grace period is over: it may be "
    "taken away. An engine that makes no step meanwhile shows it with the next one; its log and nixl-actor ps do at "
    "once.",
    side="P",
)
BUILD_INFO = Metric(
    name=f"{PREFIX}build_info",
    kind="gauge",
    documentation="1; versions of the connector, of vLLM and of NIXL as labels.",
    side="both",
    labels=("version", "vllm", "nixl"),
    series=(),
)

# --- histograms -----------------------------------------------------------------------------------------------------

_SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_MARGIN_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0, 60.0, 120.0, 300.0)
_LAG_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 10.0)

LOADED, FAILED = "loaded", "failed"
CONNECTED = "connected"

HANDSHAKE_SECONDS = Metric(
    name=f"{PREFIX}handshake_seconds",
    kind="histogram",
    documentation="Time that one attempt to connect to a prefill engine took, in seconds, by its outcome.",
    side="D",
    labels=("outcome",),
    series=((CONNECTED,), (FAILED,)),
    buckets=_SECONDS_BUCKETS,
)
KV_WAIT_SECONDS = Metric(
    name=f"{PREFIX}kv_wait_seconds",
    kind="histogram",
    documentation="Time from when D heard of a request, which then waits in vLLM's queue, until vLLM was told that all "
    "ranks have loaded its KV or that it has failed, in seconds. One for each request; aborted ones are left out.",
    side="D",
    labels=("outcome",),
    series=((LOADED,), (FAILED,)),
    buckets=_SECONDS_BUCKETS,
)
STATE_SECONDS = Metric(
    name=f"{PREFIX}state_seconds",
    kind="histogram",
    documentation="Time spent in a state of a machine, in seconds, when it is left.",
    side="both",
    labels=("machine", "state"),
    series=tuple((machine.name, state) for machine in MACHINES for state in living_states(machine)),
    buckets=_SECONDS_BUCKETS,
)
LEASE_MARGIN_SECONDS = Metric(
    name=f"{PREFIX}lease_margin_seconds",
    kind="histogram",
    documentation="How much longer than to the end of the last READ of a loaded request its lease is proven to have "
    "lasted, in seconds.",
    side="D",
    buckets=_MARGIN_BUCKETS,
)
WAKE_UP_SECONDS = Metric(
    name=f"{PREFIX}wake_up_seconds",
    kind="histogram",
    documentation="Time from the engine's call until the actors have woken up to it, in seconds.",
    side="both",
    buckets=_LAG_BUCKETS,
)

# --- counters -------------------------------------------------------------------------------------------------------

DECODE, PREFILL = "decode", "prefill"
ABSENT, UNUSABLE, CONTINUED, WINDOW, ADAPTER, MEDIA, NO_ROOM = (
    "absent",
    "unusable",
    "continued",
    "window",
    "adapter",
    "media",
    "no_room",
)
SIDE_CHANNEL, CONTROL_SOCKET, NOTIFICATIONS = "side_channel", "control_socket", "notifications"
REFUSED, CUT_OFF, MALFORMED, DROPPED = "refused", "cut_off", "malformed", "dropped"
DRAINING_REASON, STOPPED_REASON, REQUEST_ID_REASON = "draining", "stopped", "request_id"

COMPLETED = Metric(
    name=f"{PREFIX}completed_receives",
    kind="counter",
    documentation="Requests whose KV arrived under a proven lease, one for each rank.",
    side="D",
)
FAILED_BY_KIND = Metric(
    name=f"{PREFIX}failed_receives",
    kind="counter",
    documentation="Requests whose KV did not arrive, by the kind of the failure that ended them (AbortedByClient: the "
    "client went away); one for each rank.",
    side="D",
    labels=("reason",),
    series=tuple((kind,) for kind in ENDING_KINDS),
)
QUARANTINED = Metric(
    name=f"{PREFIX}quarantined_receives",
    kind="counter",
    documentation="Requests that ended while READs might still write into their blocks, which stay out of the pool "
    "until those end; one for each rank.",
    side="D",
)
HANDSHAKES_FAILED = Metric(
    name=f"{PREFIX}failed_handshakes",
    kind="counter",
    documentation="Handshakes that failed and that requests waited for, each counted once however many these were. "
    "Not those with an engine that no request needs yet (known_peers, nixl-actor meet).",
    side="D",
)
READS_FAILED = Metric(
    name=f"{PREFIX}failed_reads",
    kind="counter",
    documentation="READs that failed or could not be started.",
    side="D",
)
RETRIES = Metric(
    name=f"{PREFIX}retries",
    kind="counter",
    documentation="Further attempts of requests whose connection was lost while they were read.",
    side="D",
)
HOLDS = Metric(
    name=f"{PREFIX}holds",
    kind="counter",
    documentation="Leases that were held: on the side decode, when a rank of P has confirmed it; on the side prefill, "
    "when a decode engine has asked for the first time.",
    side="both",
    labels=("side",),
    series=((DECODE,), (PREFILL,)),
)
RENEWALS = Metric(
    name=f"{PREFIX}renewals",
    kind="counter",
    documentation="Leases that were held again while they were held; on the side prefill also by the heartbeat of a "
    "built-in decode engine.",
    side="both",
    labels=("side",),
    series=((DECODE,), (PREFILL,)),
)
LOCAL_PREFILLS = Metric(
    name=f"{PREFIX}local_prefills",
    kind="counter",
    documentation="Requests whose prompt D computes itself without anybody having asked for that: their "
    "kv_transfer_params are absent (counted on a kv_consumer only), ask for nothing (unusable), are those of a shorter "
    "prompt, with which this one begins, or of an equal one that others have loaded and let go of (continued), or lack "
    "a block that the last token sees and vLLM has freed on P (window); or P had other weights under the name of their "
    "adapter (adapter), or other images or sound in the places of the same tokens (media); or vLLM keeps what is free "
    "for one whose load has failed and that does not fit beside blocks in quarantine or lent back (no_room).",
    side="D",
    labels=("reason",),
    series=((ABSENT,), (UNUSABLE,), (CONTINUED,), (WINDOW,), (ADAPTER,), (MEDIA,), (NO_ROOM,)),
)
GRANTED_LEASES = Metric(
    name=f"{PREFIX}granted_leases", kind="counter", documentation="Leases that were granted.", side="P"
)
GRANTED_BLOCKS = Metric(
    name=f"{PREFIX}granted_blocks", kind="counter", documentation="KV blocks that were lent.", side="P"
)
GRANTED_TOKENS = Metric(
    name=f"{PREFIX}granted_tokens", kind="counter", documentation="Tokens whose KV was lent.", side="P"
)
PREFILLS_NOT_LENT = Metric(
    name=f"{PREFIX}prefills_not_lent",
    kind="counter",
    documentation="Prefills that were answered without kv_transfer_params, so that D computes the prompt: the engine "
    "drains (draining), a worker has stopped (stopped), or engines take no such id of a request (request_id).",
    side="P",
    labels=("reason",),
    series=((DRAINING_REASON,), (STOPPED_REASON,), (REQUEST_ID_REASON,)),
)
STRAY_RELEASES = Metric(
    name=f"{PREFIX}stray_releases",
    kind="counter",
    documentation="Releases of what this engine does not know, has withdrawn or superseded, or cannot tell apart (an "
    "id of two leases, without a number): it has restarted since, or somebody talks to the wrong engine. Each "
    "repetition counts. A further release of a lease that its readers have released does not.",
    side="P",
)
TRACE_RECORDS_MISSING = Metric(
    name=f"{PREFIX}trace_records_missing",
    kind="counter",
    documentation="Records of transitions that were not written to trace_directory, because its file system did not "
    "keep up or refused them.",
    side="both",
)
TURNED_AWAY = Metric(
    name=f"{PREFIX}turned_away",
    kind="counter",
    documentation="What strangers wanted and did not get at the side_channel, at a control_socket or by "
    "notifications: newcomers that are not in allowed_peers or have no accepted key (refused), connections that were "
    "ended for what they sent or for want of room, or whose address was shut out for it (cut_off), messages that make "
    "no sense (malformed), notifications of which too many waited (dropped), moments in which no file descriptor was "
    "left and somebody waited (no_room). Who is shut out already is not counted again.",
    side="both",
    labels=("where", "why"),
    series=(
        *((where, why) for where in (SIDE_CHANNEL, CONTROL_SOCKET) for why in (REFUSED, CUT_OFF, MALFORMED, NO_ROOM)),
        *((NOTIFICATIONS, why) for why in (MALFORMED, DROPPED)),
    ),
)
CRASHES = Metric(
    name=f"{PREFIX}crashes",
    kind="counter",
    documentation="Bugs of the connector: a task of its actors or of its handshake listener raised. The log has "
    "the traceback. What it was about is lost; requests that failed because of it are in "
    "vllm:nixl_actor_failed_receives_total (ActorCrashed) too.",
    side="both",
)
TRANSITIONS = Metric(
    name=f"{PREFIX}transitions",
    kind="counter",
    documentation="Entries of a machine into a state; the reason is the kind of the failure that led there, or for a "
    "hold that is gone what P said, and lent_back for a lease of an answer that was kept for read-back and that nobody "
    "has asked for.",
    side="both",
    labels=("machine", "state", "reason"),
    series=tuple(
        (machine.name, state.value, reason)
        for machine in MACHINES
        for state in machine.states
        for reason in reasons(state)
    ),
)

OURS = (
    UP,
    DRAINING,
    DRAINED,
    BUILD_INFO,
    REQUESTS,
    OLDEST_QUEUED_SECONDS,
    OLDEST_REQUEST_SECONDS,
    LEASES,
    OLDEST_LEASE_SECONDS,
    LENT_BLOCKS,
    KV_BLOCKS,
    LENT_TOKENS,
    QUARANTINED_BLOCKS,
    PEERS,
    MAILBOX_MESSAGES,
    LOOP_LAG_SECONDS,
    NIXL_LAG_SECONDS,
    KV_WAIT_SECONDS,
    HANDSHAKE_SECONDS,
    STATE_SECONDS,
    LEASE_MARGIN_SECONDS,
    WAKE_UP_SECONDS,
    COMPLETED,
    FAILED_BY_KIND,
    QUARANTINED,
    HANDSHAKES_FAILED,
    READS_FAILED,
    RETRIES,
    LOCAL_PREFILLS,
    GRANTED_LEASES,
    GRANTED_BLOCKS,
    GRANTED_TOKENS,
    PREFILLS_NOT_LENT,
    HOLDS,
    RENEWALS,
    STRAY_RELEASES,
    TURNED_AWAY,
    TRACE_RECORDS_MISSING,
    CRASHES,
    TRANSITIONS,
)
"""Those that only this connector has."""

METRICS = (*BUILTIN, *OURS)


# --- the tables of the documentation --------------------------------------------------------------------------------


def table(metrics: tuple[Metric, ...]) -> str:
    """In Markdown, a row for each metric."""
    rows = ["| metric | kind | on | labels | meaning |", "|---|---|---|---|---|"]
    for metric in metrics:
        labels = ", ".join(f"`{label}`" for label in metric.labels) or "–"
        side = {"P": "P", "D": "D", "both": "P, D"}[metric.side]
        rows.append(f"| `{metric.shown}` | {metric.kind} | {side} | {labels} | {metric.documentation} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table(BUILTIN), table(OURS), sep="\n\n")
