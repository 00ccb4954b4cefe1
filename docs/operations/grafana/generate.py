"""Writes nixl-actor.json beside this file: the Grafana dashboard of the connector.

    python docs/operations/grafana/generate.py

A dashboard in JSON is two thousand lines of which fifty say something; these are here. `tests/unit/test_dashboard.py`
fails when the file is not what this makes, `tests/integration/test_prometheus.py` asks a real Prometheus every query.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

OUTPUT = Path(__file__).with_name("nixl-actor.json")
UID = "nixl-actor"

WIDTH, HEIGHT = 24, 8
CHOSEN = 'job=~"$job", instance=~"$instance", model_name=~"$model"'
DATA_SOURCE = {"type": "prometheus", "uid": "${datasource}"}

EACH_RANK_COUNTS = "Each rank counts: what meets all ranks of an engine is counted as many times."

Query = tuple[str, str]
"""An expression in which {} stands for what is chosen above, and its legend."""


def rate(counter: str, by: str = "", **labels: str) -> str:
    """Per second, added up."""
    return f"sum{by and f' by ({by}) '}(rate({selected(counter, **labels)}[$__rate_interval]))"


def selected(metric: str, **labels: str) -> str:
    """What is chosen above, with further conditions; a value that begins with ~ is a pattern, with ! excluded."""
    conditions = [CHOSEN]
    for label, value in labels.items():
        operator, value = {"~": ("=~", value[1:]), "!": ("!=", value[1:])}.get(value[:1], ("=", value))
        conditions.append(f'{label}{operator}"{value}"')
    return f"{metric}{{{', '.join(conditions)}}}"


def quantile(share: float, histogram: str, by: str = "", **labels: str) -> str:
    """Of the samples of the last interval."""
    return (
        f"histogram_quantile({share:g}, {rate(f'{histogram}_bucket', ', '.join(filter(None, ['le', by])), **labels)})"
    )


def mean(histogram: str, by: str = "", **labels: str) -> str:
    return f"{rate(f'{histogram}_sum', by, **labels)} / {rate(f'{histogram}_count', by, **labels)}"


def most(gauge: str, by: str = "", **labels: str) -> str:
    """Added up over engines."""
    return f"sum{by and f' by ({by}) '}({selected(gauge, **labels)})"


def panel(
    title: str,
    queries: Sequence[Query],
    *,
    unit: str = "short",
    kind: str = "timeseries",
    width: int = 8,
    description: str = "",
    stacked: bool = False,
    is_table: bool = False,
) -> dict[str, Any]:
    targets = [
        {
            "datasource": DATA_SOURCE,
            "expr": expression,
            "legendFormat": legend,
            "refId": chr(ord("A") + number),
            **({"format": "table", "instant": True} if is_table else {}),
        }
        for number, (expression, legend) in enumerate(queries)
    ]
    custom = {"fillOpacity": 20, "stacking": {"mode": "normal"}} if stacked else {"fillOpacity": 5}
    defaults: dict[str, Any] = {"unit": unit, "custom": custom if kind == "timeseries" else {}}
    if kind == "timeseries":
        defaults["min"] = 0
    return {
        "title": title,
        "description": description,
        "type": kind,
        "datasource": DATA_SOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {"tooltip": {"mode": "multi", "sort": "desc"}} if kind == "timeseries" else {},
        "gridPos": {"w": width, "h": HEIGHT},
    }


def quantiles(histogram: str, **labels: str) -> list[Query]:
    return [(quantile(share, histogram, **labels), f"p{share * 100:g}") for share in (0.5, 0.95, 0.99)]


ROWS: dict[str, list[dict[str, Any]]] = {
    "Overview": [
        panel(
            "Actors up",
            [(f"min by (instance, engine) ({selected('vllm:nixl_actor_up')})", "{{instance}} {{engine}}")],
            kind="stat",
            width=6,
            description="0: every transfer of this engine fails until it is restarted.",
        ),
        panel(
            "KV wait (D)",
            quantiles("vllm:nixl_actor_kv_wait_seconds", outcome="loaded"),
            unit="s",
            width=9,
            description="From the arrival of a request until vLLM was told that its KV is loaded.",
        ),
        panel(
            "Requests with KV from elsewhere (D)",
            [
                (rate("vllm:nixl_actor_kv_wait_seconds_count", outcome="loaded"), "loaded"),
                (rate("vllm:nixl_actor_kv_wait_seconds_count", outcome="failed"), "failed"),
                (rate("vllm:nixl_actor_local_prefills_total"), "computed here"),
                (rate("vllm:nixl_actor_completed_receives_total"), "loaded by ranks"),
            ],
            unit="reqps",
            width=9,
        ),
        panel("Requests by state (D)", [(most("vllm:nixl_actor_requests", "state"), "{{state}}")], stacked=True),
        panel(
            "Engines that are to end (P)",
            [
                (most("vllm:nixl_actor_draining"), "draining or drained"),
                (most("vllm:nixl_actor_drained"), "drained"),
                (rate("vllm:nixl_actor_prefills_not_lent_total", "reason"), "prefills not lent per second: {{reason}}"),
            ],
            description="Drained: nothing is lent any more, the engine may be taken away.",
        ),
        panel("Leases by state (P)", [(most("vllm:nixl_actor_leases", "state"), "{{state}}")], stacked=True),
        panel(
            "Oldest that are open",
            [
                (f"max ({selected('vllm:nixl_actor_oldest_queued_seconds')})", "request in the queue (D)"),
                (f"max ({selected('vllm:nixl_actor_oldest_request_seconds')})", "request that loads (D)"),
                (f"max ({selected('vllm:nixl_actor_oldest_lease_seconds')})", "lease that is held (P)"),
            ],
            unit="s",
            description="In steps of ten seconds.",
        ),
        panel("KV read (D)", [(rate("vllm:nixl_bytes_transferred_sum"), "bytes per second")], unit="Bps"),
    ],
    "Where the time goes (D)": [
        panel(
            "Seconds per request, by state",
            [
                (
                    f"{rate('vllm:nixl_actor_state_seconds_sum', 'state', machine='request')} / on () group_left () "
                    f"{rate('vllm:nixl_actor_transitions_total', machine='request', state='~done|failed|expired')}",
                    "{{state}}",
                ),
                (mean("vllm:nixl_actor_kv_wait_seconds"), "all of the wait, vLLM's queue included"),
            ],
            unit="s",
            width=12,
            description="Means over all ranks. What is missing to the whole was spent in vLLM's queue, or waiting for "
            "its next step, or for the slowest rank.",
        ),
        panel(
            "95th percentile of each state",
            [(quantile(0.95, "vllm:nixl_actor_state_seconds", "state", machine="request"), "{{state}}")],
            unit="s",
            width=12,
        ),
        panel("One READ", quantiles("vllm:nixl_xfer_time_seconds"), unit="s", width=6),
        panel("Starting a READ", quantiles("vllm:nixl_post_time_seconds"), unit="s", width=6),
        panel("Bytes of a READ", [(mean("vllm:nixl_bytes_transferred"), "mean")], unit="bytes", width=6),
        panel("Descriptors of a READ", [(mean("vllm:nixl_num_descriptors"), "mean")], width=6),
    ],
    "Leases": [
        panel(
            "Lent now (P)",
            [
                (most("vllm:nixl_actor_lent_blocks"), "blocks"),
                (most("vllm:nixl_actor_kv_blocks"), "blocks of the pool, of all engines"),
                (most("vllm:nixl_actor_lent_tokens"), "tokens"),
            ],
            description="What P keeps for decode engines and cannot use.",
        ),
        panel(
            "Granted (P)",
            [
                (rate("vllm:nixl_actor_granted_leases_total"), "leases per second"),
                (rate("vllm:nixl_actor_granted_blocks_total"), "blocks per second"),
                (rate("vllm:nixl_actor_granted_tokens_total"), "tokens per second"),
            ],
        ),
        panel(
            "How they end (P)",
            [
                (
                    rate(
                        "vllm:nixl_actor_transitions_total",
                        "state",
                        machine="lease",
                        state="~done|expired|withdrawn|superseded",
                    ),
                    "{{state}}",
                )
            ],
            unit="ops",
            description=EACH_RANK_COUNTS,
        ),
        panel(
            "How long they are held (P)",
            quantiles("vllm:nixl_actor_state_seconds", machine="lease", state="held"),
            unit="s",
        ),
        panel(
            "Margin when the last READ ended (D)",
            [
                (quantile(share, "vllm:nixl_actor_lease_margin_seconds"), f"p{share * 100:g}")
                for share in (0.01, 0.05, 0.5)
            ],
            unit="s",
            description="How much longer than needed the lease is proven to have lasted. Near 0, requests will fail.",
        ),
        panel(
            "Holds and renewals",
            [
                (rate("vllm:nixl_actor_holds_total", "side"), "holds, {{side}}"),
                (rate("vllm:nixl_actor_renewals_total", "side"), "renewals, {{side}}"),
            ],
            unit="ops",
            description=EACH_RANK_COUNTS,
        ),
    ],
    "Peers (D)": [
        panel("Prefill engines by state", [(most("vllm:nixl_actor_peers", "state"), "{{state}}")], stacked=True),
        panel(
            "Handshake, 95th percentile",
            [(quantile(0.95, "vllm:nixl_actor_handshake_seconds", "outcome"), "{{outcome}}")],
            unit="s",
        ),
        panel(
            "Lost, refused, tried again",
            [
                (rate("vllm:nixl_actor_failed_handshakes_total"), "handshakes failed"),
                (
                    rate("vllm:nixl_actor_transitions_total", machine="peer", state="draining"),
                    "connections given up",
                ),
                (rate("vllm:nixl_actor_retries_total"), "requests tried again"),
            ],
            unit="ops",
            description=EACH_RANK_COUNTS,
        ),
    ],
    "Failures": [
        panel(
            "Requests without their KV on a rank, by kind (D)",
            [(f"{rate('vllm:nixl_actor_failed_receives_total', 'reason')} > 0", "{{reason}}")],
            unit="ops",
            width=12,
            stacked=True,
            description=f"{EACH_RANK_COUNTS} How many requests fail is in the overview.",
        ),
        panel(
            "Prompts that D computes without anybody having asked",
            [(rate("vllm:nixl_actor_local_prefills_total", "reason"), "parameters {{reason}}")],
            unit="reqps",
            width=12,
        ),
        panel(
            "Below the requests (D)",
            [
                (rate("vllm:nixl_actor_failed_reads_total"), "READs"),
                (rate("vllm:nixl_num_failed_notifications_total"), "notifications"),
                (rate("vllm:nixl_num_failed_transfers_total"), "all, as the built-in connector counts"),
            ],
            unit="ops",
            description=EACH_RANK_COUNTS,
        ),
        panel(
            "Blocks out of the pool (D)",
            [
                (most("vllm:nixl_actor_quarantined_blocks"), "blocks"),
                (rate("vllm:nixl_actor_quarantined_receives_total"), "requests per second, counted by each rank"),
            ],
        ),
        panel(
            "Leases (P)",
            [
                (rate("vllm:nixl_num_kv_expired_reqs_total"), "expired"),
                (rate("vllm:nixl_num_notifications_after_expiry_total"), "read after they had expired"),
                (rate("vllm:nixl_actor_stray_releases_total"), "releases of what was not lent"),
            ],
            unit="ops",
            description=EACH_RANK_COUNTS,
        ),
    ],
    "Health": [
        panel("Waking up", quantiles("vllm:nixl_actor_wake_up_seconds"), unit="s"),
        panel(
            "Lateness now",
            [
                (f"max ({selected('vllm:nixl_actor_loop_lag_seconds')})", "seconds"),
                (f"max ({selected('vllm:nixl_actor_nixl_lag_seconds')})", "seconds that a call of NIXL lasts"),
                (most("vllm:nixl_actor_mailbox_messages"), "commands that wait"),
            ],
            description="0 unless the actors do not wake up, or NIXL does not return from a call.",
        ),
        panel(
            "Transitions by machine",
            [
                (rate("vllm:nixl_actor_transitions_total", "machine"), "{{machine}}"),
                (rate("vllm:nixl_actor_trace_records_missing_total"), "missing in the trace"),
                (rate("vllm:nixl_actor_crashes_total"), "bugs of the connector"),
            ],
            unit="ops",
        ),
        panel(
            "Strangers turned away",
            [(rate("vllm:nixl_actor_turned_away_total", "where, why"), "{{where}}: {{why}}")],
            unit="ops",
            width=24,
            description="Who it was is in the engine's log. Each rank has its own control socket and notifications.",
        ),
        panel(
            "Versions",
            [(f"count by (model_name, version, vllm, nixl) ({selected('vllm:nixl_actor_build_info')})", "")],
            kind="table",
            width=24,
            is_table=True,
        ),
    ],
}


def variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATA_SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def dashboard() -> dict[str, Any]:
    """The whole model, with panels placed from left to right."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, members in ROWS.items():
        panels.append(
            {"type": "row", "title": title, "collapsed": False, "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1}}
        )
        x, y = 0, y + 1
        for member in members:
            width = member["gridPos"]["w"]
            if x + width > WIDTH:
                x, y = 0, y + HEIGHT
            panels.append(member | {"gridPos": {"x": x, "y": y, "w": width, "h": HEIGHT}})
            x += width
        y += HEIGHT
    for number, each in enumerate(panels, start=1):
        each["id"] = number
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    return {
        "uid": UID,
        "title": "NIXL actor connector",
        "description": "KV transfer between prefill (P) and decode (D) engines. Metrics: docs/operations/metrics.md.",
        "tags": ["vllm", "nixl"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                source,
                variable("model", "Model", "label_values(vllm:nixl_actor_up, model_name)"),
                variable("job", "Job", "label_values(vllm:nixl_actor_up, job)"),
                variable("instance", "Engine", 'label_values(vllm:nixl_actor_up{job=~"$job"}, instance)'),
            ]
        },
        "annotations": {"list": []},
        "panels": panels,
    }


def render() -> str:
    """The text of the file."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    OUTPUT.write_text(render())
