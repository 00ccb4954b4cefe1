"""The alerts: every one fires when it should and stays silent when it should, and has an entry in the runbook.

The two answers are promtool's, from series that are written here; where promtool is not installed (`make prometheus`
unpacks it) those tests skip, and the names and labels in the expressions are checked all the same.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from connector.observe import catalogue
from connector.observe.catalogue import Metric
from tests.programs import find_prometheus

ROOT = Path(__file__).parents[2]
OPERATIONS = ROOT / "docs" / "operations"
ALERTS = OPERATIONS / "prometheus" / "alerts.yaml"
SCRAPE = OPERATIONS / "prometheus" / "scrape.yaml"
RULES: dict[str, dict[str, Any]] = {
    rule["alert"]: rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]
}

PROMTOOL = find_prometheus("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="no promtool: `make prometheus` unpacks it")

MINUTES = 30
"""Length of the series, with a value each minute."""


# --- names and labels -------------------------------------------------------------------------------------------------

_NAME = re.compile(r"(vllm:\w+)(\{[^}]*\})?")
_OF_A_PROCESS = re.compile(r"\b(?:up|process_start_time_seconds)(\{[^}]*\})")
"""What Prometheus, and its library in vLLM's process, have of every target."""
_COMMAND = re.compile(r"`(?:nixl-actor (?:ps|why|doctor|trace)\b|py-spy |(?:sum|count)\b[^`]*\(vllm:)")
"""What an operator can paste: a command, or a query for Prometheus."""
_CONDITION = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')


def metric_shown_as(name: str, of_histograms: tuple[str, ...] = ("_bucket", "_sum", "_count")) -> Metric | None:
    for metric in catalogue.METRICS:
        suffixes = of_histograms if metric.kind == "histogram" else ("",)
        if name in {metric.shown + suffix for suffix in suffixes}:
            return metric
    return None


def wrong_in(expression: str, *suffixes: str) -> list[str]:
    """Names of metrics that do not exist, labels that they have not, and values that these never take."""
    wrong = []
    for name, conditions in _NAME.findall(expression):
        metric = metric_shown_as(name, suffixes) if suffixes else metric_shown_as(name)
        if metric is None:
            wrong.append(name)
            continue
        for label, operator, value in _CONDITION.findall(conditions):
            if label in ("job", "instance", "model_name", "engine"):
                continue
            if label not in metric.labels:
                wrong.append(f"{name}: {label}")
                continue
            values = {series[metric.labels.index(label)] for series in metric.series}
            if not any(re.fullmatch(value, each) if "~" in operator else each == value for each in values):
                wrong.append(f"{name}: {label}={value}")
    return wrong


ONCE_A_REQUEST = (
    catalogue.KV_WAIT_SECONDS,
    catalogue.LOCAL_PREFILLS,
    catalogue.PREFILLS_NOT_LENT,
    catalogue.GRANTED_LEASES,
    catalogue.GRANTED_BLOCKS,
    catalogue.GRANTED_TOKENS,
)
"""What the scheduler's process counts. All other counters and histograms add up what each rank counts."""


def counts_unlike(expression: str) -> bool:
    """Whether it has counters of which some count a request once, and some once for each rank."""
    metrics = [metric for name, _ in _NAME.findall(expression) if (metric := metric_shown_as(name)) is not None]
    return len({metric in ONCE_A_REQUEST for metric in metrics if metric.kind != "gauge"}) == 2


def test_what_is_wrong_in_an_expression_is_found() -> None:
    assert wrong_in('rate(vllm:nixl_actor_retries[5m]) + vllm:nixl_actor_peers{state="busy", kind="x"}') == [
        "vllm:nixl_actor_retries",
        "vllm:nixl_actor_peers: state=busy",
        "vllm:nixl_actor_peers: kind",
    ]
    assert wrong_in('vllm:nixl_actor_transitions_total{machine="lease", state=~"done|expired", instance="x"}') == []


@pytest.mark.parametrize("name", RULES)
def test_an_alert_asks_for_what_exists(name: str) -> None:
    assert _NAME.search(RULES[name]["expr"]) or _OF_A_PROCESS.search(RULES[name]["expr"])
    assert wrong_in(RULES[name]["expr"]) == []


def test_alerts_about_a_process_ask_for_those_that_are_scraped_here_and_for_no_others() -> None:
    jobs = {each["job_name"] for each in yaml.safe_load(SCRAPE.read_text())["scrape_configs"]} - {"ray"}
    asked = [labels for rule in RULES.values() for labels in _OF_A_PROCESS.findall(rule["expr"])]
    assert len(asked) == 6
    for labels in asked:
        ((label, operator, value),) = _CONDITION.findall(labels)
        assert (label, operator) == ("job", "=~")
        assert {job for job in (*jobs, "ray", "prometheus", "node") if re.fullmatch(value, job)} == jobs


START_OF_A_PROCESS = re.compile(r"^process_start_time_seconds ", re.MULTILINE)


def test_the_start_of_a_process_is_on_the_page_of_one_api_server(monkeypatch: pytest.MonkeyPatch) -> None:
    from prometheus_client import generate_latest
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    assert START_OF_A_PROCESS.search(generate_latest(get_prometheus_registry()).decode())


def test_the_start_of_a_process_is_not_on_the_page_of_several_api_servers(tmp_path: Path) -> None:
    """Which is why the alert asks for `up` too. In a process of its own: prometheus_client decides when imported."""
    page = (
        "from prometheus_client import generate_latest\n"
        "from vllm.v1.metrics.prometheus import get_prometheus_registry\n"
        "print(generate_latest(get_prometheus_registry()).decode())"
    )
    variables = os.environ | {
        "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)
    }  # as setup_multiprocess_prometheus of vLLM does
    done = subprocess.run([sys.executable, "-c", page], capture_output=True, text=True, timeout=250, env=variables)
    assert done.returncode == 0, done.stderr
    assert not START_OF_A_PROCESS.search(done.stdout)


def test_an_alert_compares_only_what_is_counted_alike() -> None:
    """Otherwise its threshold depends on the number of ranks. One divides by that number."""
    assert [name for name, rule in RULES.items() if counts_unlike(rule["expr"])] == ["NixlActorLeasesExpire"]


def test_names_that_come_with_underscores_or_from_ray_are_those_that_are_asked_for() -> None:
    for job in yaml.safe_load(SCRAPE.read_text())["scrape_configs"]:
        (rule,) = job["metric_relabel_configs"]
        assert rule["source_labels"] == [rule["target_label"]] == ["__name__"]
        assert rule["replacement"] == "vllm:${1}"
        for prefix in ("vllm_", "ray_vllm_"):
            found = re.fullmatch(rule["regex"], f"{prefix}nixl_actor_up")
            assert found is not None
            assert rule["replacement"].replace("${1}", found.group(1)) == "vllm:nixl_actor_up"
        for other in ("vllm:nixl_actor_up", "ray_node_cpu_count", "process_start_time_seconds"):
            assert re.fullmatch(rule["regex"], other) is None


@needs_promtool
def test_the_example_of_a_configuration_is_one() -> None:
    assert PROMTOOL is not None
    checked = subprocess.run([PROMTOOL, "check", "config", str(SCRAPE)], capture_output=True, text=True, timeout=250)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("name", RULES)
def test_an_alert_leads_to_its_entry_in_the_runbook(name: str) -> None:
    rule = RULES[name]
    assert rule["annotations"]["runbook_url"] == f"docs/operations/runbook.md#{name.lower()}"
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert {"summary", "description"} < set(rule["annotations"])
    text = (OPERATIONS / "runbook.md").read_text()
    entry = re.search(rf"^## {name}$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert entry is not None
    for part in ("**Means.**", "**Next.**", "**Do.**", "**Over.**"):
        assert part in entry.group(1)
    following = entry.group(1).partition("**Next.**")[2].partition("**Do.**")[0]
    assert _COMMAND.search(following), f"no command to begin with: {following}"


def test_the_runbook_has_no_entry_without_an_alert_and_names_what_exists() -> None:
    text = (OPERATIONS / "runbook.md").read_text()
    assert sorted(re.findall(r"^## (\w+)$", text, re.MULTILINE)) == sorted(RULES)
    assert wrong_in(text, "", "_sum", "_count", "_bucket") == []
    for anchor in re.findall(r"\]\(#(\w+)\)", text):
        assert anchor in {name.lower() for name in RULES}


# --- two answers each -------------------------------------------------------------------------------------------------

ON_P = 'instance="p", job="vllm", model_name="m", engine="0"'
ON_D = 'instance="d", job="vllm", model_name="m", engine="0"'


def flat(value: float) -> str:
    return f"{value}x{MINUTES}"


def growing(per_minute: float) -> str:
    return f"0+{per_minute}x{MINUTES}"


def on_p(name: str, values: str, labels: str = "") -> dict[str, str]:
    return {"series": f"vllm:{name}{{{ON_P}{labels and f', {labels}'}}}", "values": values}


def on_d(name: str, values: str, labels: str = "") -> dict[str, str]:
    return {"series": f"vllm:{name}{{{ON_D}{labels and f', {labels}'}}}", "values": values}


def of_process(name: str, values: str) -> dict[str, str]:
    return {"series": f'{name}{{instance="d", job="vllm"}}', "values": values}


def samples_of(name: str, bound: str, labels: str = "", values: str = growing(60)) -> list[dict[str, str]]:
    """A histogram of D in which everything lies below `bound`, its largest one but +Inf."""
    with_labels = labels and f"{labels}, "
    buckets = [on_d(f"{name}_bucket", values, f'{with_labels}le="{each}"') for each in (bound, "+Inf")]
    return [*buckets, on_d(f"{name}_count", values, labels)]


BEFORE_THE_FIRST_SCRAPE = "_x25 1x5"
TWO_OF_A_NIGHT = "0x17 1x2 2x9"
FOR_THREE_MINUTES = "0x17 60+60x2 180x9"
BESIDE_OTHERS = "0+60x17 1140+120x2 1440+60x8"
"""One a second, and for three minutes another one: a window of ten minutes shows these for longer than that."""


WITHOUT_WORK = [
    on_d("nixl_actor_requests", "3x15 0x15", 'state="reading"'),
    on_d("nixl_actor_requests", flat(0), 'state="queued"'),
    on_d("nixl_actor_leases", flat(0), 'state="held"'),
]
"""The last request has ended, and no step has been made since."""
LOADED = on_d("nixl_actor_completed_receives_total", growing(100))


def waits_ended(per_minute: float, outcome: str) -> dict[str, str]:
    """Requests of D, however many ranks it has."""
    return on_d("nixl_actor_kv_wait_seconds_count", growing(per_minute), f'outcome="{outcome}"')


def loads(requests_per_minute: float, ranks: int = 1) -> list[dict[str, str]]:
    """D loads so many requests."""
    by_ranks = on_d("nixl_actor_completed_receives_total", growing(requests_per_minute * ranks))
    return [waits_ended(requests_per_minute, "loaded"), by_ranks]


def fails(requests_per_minute: float, reason: str, ranks: int = 1) -> list[dict[str, str]]:
    """So many requests of D fail, on so many of its ranks."""
    return [waits_ended(requests_per_minute, "failed"), failing(requests_per_minute * ranks, reason)]


def leases(granted_per_minute: float, expired_per_minute: float, ranks: int = 1) -> list[dict[str, str]]:
    """P lends so many, of which so many expire and all others are read."""
    done_per_minute = granted_per_minute - expired_per_minute
    return [
        on_p("nixl_actor_granted_leases_total", growing(granted_per_minute)),
        entered(growing(granted_per_minute * ranks), "lease", "held", "none", on_p),
        entered(growing(done_per_minute * ranks), "lease", "done", "none", on_p),
        entered(growing(expired_per_minute * ranks), "lease", "expired", "none", on_p),
    ]


def in_hand(side: Callable[[str, str, str], dict[str, str]], leases: str, requests: str) -> list[dict[str, str]]:
    return [
        side("nixl_actor_leases", leases, 'state="held"'),
        side("nixl_actor_requests", requests, 'state="reading"'),
    ]


def computed_here(per_minute: float) -> dict[str, str]:
    return on_d("nixl_actor_local_prefills_total", growing(per_minute), 'reason="absent"')


def few_leases_expire(count: int, ranks: int) -> list[dict[str, str]]:
    """Of one that is lent each minute."""
    return [*leases(1, 0, ranks)[:3], entered(f"0x25 {count * ranks}x5", "lease", "expired", "none", on_p)]


NONE_BELOW_15 = on_d("nixl_actor_lease_margin_seconds_bucket", flat(0), 'le="15.0"')


def failing(per_minute: float, reason: str) -> dict[str, str]:
    return on_d("nixl_actor_failed_receives_total", growing(per_minute), f'reason="{reason}"')


def entered(
    values: str, machine: str, state: str, reason: str, side: Callable[[str, str, str], dict[str, str]] = on_d
) -> dict[str, str]:
    labels = f'machine="{machine}", state="{state}", reason="{reason}"'
    return side("nixl_actor_transitions_total", values, labels)


def turned_away(values: str, where: str, why: str) -> dict[str, str]:
    return on_p("nixl_actor_turned_away_total", values, f'where="{where}", why="{why}"')


def build(name: str, version: str) -> dict[str, str]:
    return on_d("nixl_actor_build_info", "1x60", f'version="{version}", vllm="0.32.0", nixl="{name}"')


CASES: dict[str, tuple[list[list[dict[str, str]]], list[list[dict[str, str]]]]] = {
    "NixlActorEngineGone": (
        [
            [of_process("up", "1x40 0x10")],
            # It has never answered, for more than half an hour.
            [of_process("up", "0x50")],
        ],
        [
            [of_process("up", "1x50")],
            [of_process("up", "1x48 0x2")],
            # It loads its model since it is scraped.
            [of_process("up", "_x30 0x20")],
            [{"series": 'up{instance="n", job="node"}', "values": "1x40 0x10"}],
        ],
    ),
    "NixlActorEngineRestarts": (
        [
            [of_process("process_start_time_seconds", "1000x9 1600x9 2200x4 2500x9")],
            [of_process("up", "1x5 0x2 1x5 0x2 1x5 0x2 1x9")],
            # Each start takes less than a minute.
            [
                of_process("process_start_time_seconds", "1000x9 1600x9 2200x4 2500x9"),
                of_process("up", "1x30"),
            ],
        ],
        [
            [of_process("process_start_time_seconds", "1000x30"), of_process("up", "1x30")],
            # Answers that were missed, of the same process.
            [of_process("process_start_time_seconds", "1000x30"), of_process("up", "1x5 0x2 1x5 0x2 1x5 0x2 1x9")],
            [of_process("process_start_time_seconds", "1000x9 1600x20"), of_process("up", "1x9 0x3 1x20")],
            [of_process("process_start_time_seconds", "1000x9 1600x4 2200x20"), of_process("up", "1x9 0x3 1x20")],
        ],
    ),
    "NixlActorDown": ([[on_d("nixl_actor_up", "1x5 0x25")]], [[on_d("nixl_actor_up", flat(1))]]),
    "NixlActorLoopStuck": (
        [
            [on_d("nixl_actor_loop_lag_seconds", f"0x20 0+60x{MINUTES - 20}")],
            # It makes no step any more, and has work.
            [on_p("nixl_actor_loop_lag_seconds", flat(6)), on_p("nixl_actor_leases", flat(3), 'state="held"')],
        ],
        [
            [on_d("nixl_actor_loop_lag_seconds", flat(0.25))],
            [on_d("nixl_actor_loop_lag_seconds", "0x15 60 0x14")],
            [on_d("nixl_actor_loop_lag_seconds", "0x15 60x15"), *WITHOUT_WORK],
        ],
    ),
    "NixlActorNixlHangs": (
        [
            [on_d("nixl_actor_nixl_lag_seconds", "0x20 0+60x9")],
            [on_p("nixl_actor_nixl_lag_seconds", flat(12)), on_p("nixl_actor_leases", flat(3), 'state="held"')],
            [on_d("nixl_actor_nixl_lag_seconds", flat(12)), on_d("nixl_actor_requests", flat(1), 'state="reading"')],
        ],
        [
            [on_d("nixl_actor_nixl_lag_seconds", flat(3))],
            [on_d("nixl_actor_nixl_lag_seconds", "0x15 60 0x14")],
            [on_d("nixl_actor_nixl_lag_seconds", "0x15 60x15"), *WITHOUT_WORK],
        ],
    ),
    "NixlActorEngineHangs": (
        [
            in_hand(on_p, "0x10 3x19", "0x29"),
            in_hand(on_d, "0x29", "0x10 1x19"),
            # One that had been held for a while.
            [*in_hand(on_p, flat(2), "0x29"), on_p("nixl_actor_oldest_lease_seconds", "0x10 20x19")],
        ],
        [
            in_hand(on_p, flat(0), flat(0)),
            # A moment of each scrape, while they come and go.
            [*in_hand(on_p, flat(3), "0x29"), on_p("nixl_actor_wake_up_seconds_count", growing(60))],
            [*in_hand(on_d, "0x29", flat(2)), on_d("nixl_actor_wake_up_seconds_count", growing(60))],
            # Nothing else goes on, and they wait.
            [*in_hand(on_p, flat(1), "0x29"), on_p("nixl_actor_oldest_lease_seconds", growing(60))],
            [*in_hand(on_d, "0x29", flat(1)), on_d("nixl_actor_oldest_queued_seconds", growing(60))],
            [*in_hand(on_d, "0x29", flat(1)), on_d("nixl_actor_oldest_request_seconds", growing(60))],
            # A prompt of very many tokens.
            [*in_hand(on_p, flat(0), "0x29"), on_p("nixl_actor_leases", flat(1), 'state="computing"')],
            # It was stopped for a minute.
            [*in_hand(on_p, flat(3), "0x29"), on_p("nixl_actor_wake_up_seconds_count", "0+60x26 1560x1 1620+60x1")],
        ],
    ),
    "NixlActorCorruptKv": (
        [
            [on_d("nixl_actor_failed_receives_total", "0x25 1x5", 'reason="Corrupt"'), LOADED],
            [on_d("nixl_actor_failed_receives_total", BEFORE_THE_FIRST_SCRAPE, 'reason="Corrupt"'), LOADED],
        ],
        [[failing(9, "TransferError"), LOADED]],
    ),
    "NixlActorParamsForged": (
        [
            [on_d("nixl_actor_failed_receives_total", "0x25 1x5", 'reason="ParamsForged"'), LOADED],
            [on_d("nixl_actor_failed_receives_total", BEFORE_THE_FIRST_SCRAPE, 'reason="ParamsForged"'), LOADED],
        ],
        [[failing(9, "BadParams"), LOADED]],
    ),
    "NixlActorCrashes": (
        [
            [on_d("nixl_actor_failed_receives_total", "0x25 1x5", 'reason="ActorCrashed"'), LOADED],
            [on_d("nixl_actor_failed_receives_total", BEFORE_THE_FIRST_SCRAPE, 'reason="ActorCrashed"'), LOADED],
        ],
        [[failing(9, "ConnectorStopped"), LOADED]],
    ),
    "NixlActorInternalErrors": (
        [
            [on_p("nixl_actor_crashes_total", "0x25 1x5")],
            [on_d("nixl_actor_crashes_total", growing(1))],
            [on_p("nixl_actor_crashes_total", BEFORE_THE_FIRST_SCRAPE)],
        ],
        [
            [on_p("nixl_actor_crashes_total", flat(7))],
            # It could not be scraped for a while.
            [on_p("nixl_actor_crashes_total", "7x10 _x10 7x9")],
        ],
    ),
    # One request or lease is enough, whatever becomes of all others.
    "NixlActorRequestsStuck": (
        [[on_d("nixl_actor_oldest_request_seconds", "0x20 0+60x9"), LOADED, failing(1, "LeaseOver")]],
        [[on_d("nixl_actor_oldest_request_seconds", flat(150)), LOADED]],
    ),
    "NixlActorRequestsQueued": (
        [[on_d("nixl_actor_oldest_queued_seconds", "0x20 0+60x9"), LOADED]],
        [[on_d("nixl_actor_oldest_queued_seconds", flat(240)), LOADED]],
    ),
    "NixlActorReceivesFail": (
        [
            [*fails(10, "LeaseOver"), *loads(100)],
            [*fails(10, "BadParams"), *loads(0)],
            # One rank of eight fails, and with it the request.
            [*fails(10, "TransferError"), *loads(100, ranks=8)],
        ],
        [
            [*fails(4, "LeaseOver"), *loads(100)],
            [*fails(4, "LeaseOver", ranks=8), *loads(100, ranks=8)],
            [failing(90, "AbortedByClient"), *loads(100)],
            # All of a quiet night's.
            [on_d("nixl_actor_kv_wait_seconds_count", "0x20 1x2 2x7", 'outcome="failed"'), *loads(0)],
            loads(100),
        ],
    ),
    "NixlActorHandshakesFail": (
        [[on_d("nixl_actor_failed_handshakes_total", growing(1))]],
        [[on_d("nixl_actor_failed_handshakes_total", "0x20 3x10")]],
    ),
    "NixlActorIncompatiblePeer": (
        [
            [entered("0x25 1x5", "peer", "incompatible", "Incompatible")],
            [entered(BEFORE_THE_FIRST_SCRAPE, "peer", "incompatible", "Incompatible")],
        ],
        # A request may be wrong about an engine's sizes, of which the handshake tells.
        [[entered(growing(9), "peer", "ready", "none")], [entered(growing(9), "peer", "incompatible", "BadParams")]],
    ),
    "NixlActorReadsFail": (
        [[on_d("nixl_actor_failed_reads_total", growing(1))]],
        [[on_d("nixl_actor_failed_reads_total", "0x20 5x10")]],
    ),
    "NixlActorKvWaitHigh": (
        [samples_of("nixl_actor_kv_wait_seconds", "5.0", 'outcome="loaded"')],
        [
            samples_of("nixl_actor_kv_wait_seconds", "1.0", 'outcome="loaded"'),
            samples_of("nixl_actor_kv_wait_seconds", "5.0", 'outcome="failed"'),
            samples_of("nixl_actor_kv_wait_seconds", "5.0", 'outcome="loaded"', TWO_OF_A_NIGHT),
            [
                on_d("nixl_actor_kv_wait_seconds_bucket", growing(60), 'outcome="loaded", le="1.0"'),
                *samples_of("nixl_actor_kv_wait_seconds", "5.0", 'outcome="loaded"', BESIDE_OTHERS),
            ],
        ],
    ),
    "NixlActorSilentLocalPrefill": (
        [[computed_here(20), *loads(100)], [computed_here(20), *loads(100, ranks=8)], [computed_here(20), *loads(0)]],
        [
            [computed_here(5), *loads(100)],
            [computed_here(5), *loads(100, ranks=8)],
            # A probe, and what somebody tries by hand.
            [computed_here(0.5), *loads(0)],
            # The only prefill engine was restarted.
            [on_d("nixl_actor_local_prefills_total", FOR_THREE_MINUTES, 'reason="absent"'), *loads(20)],
        ],
    ),
    "NixlActorBlocksQuarantined": (
        [[on_d("nixl_actor_quarantined_blocks", flat(4))]],
        [[on_d("nixl_actor_quarantined_blocks", "0x25 4x5")], [on_d("nixl_actor_quarantined_blocks", "4x25 0x5")]],
    ),
    "NixlActorQuarantineFull": (
        [
            [failing(1, "QuarantineFull")],
            [failing(1, "QuarantineFull"), LOADED],
            [on_d("nixl_actor_failed_receives_total", BEFORE_THE_FIRST_SCRAPE, 'reason="QuarantineFull"')],
        ],
        [[failing(9, "Quarantined"), LOADED]],
    ),
    "NixlActorLeasesExpire": (
        [leases(100, 5), leases(100, 5, ranks=8)],
        [
            leases(100, 0.5),
            leases(1000, 2, ranks=8),
            # A decode engine whose answers are lent back, and whose conversations do not go on.
            [*leases(100, 0), entered(growing(50), "lease", "expired", "lent_back", on_d)],
            [*leases(100, 0), entered(growing(50), "lease", "expired", "lent_back", on_p)],
            few_leases_expire(1, ranks=1),
            few_leases_expire(1, ranks=8),
            few_leases_expire(3, ranks=1),
            few_leases_expire(3, ranks=8),
        ],
    ),
    "NixlActorPoolLent": (
        [[on_p("nixl_actor_lent_blocks", "0x10 60x20"), on_p("nixl_actor_kv_blocks", flat(100))]],
        [
            [on_p("nixl_actor_lent_blocks", flat(50)), on_p("nixl_actor_kv_blocks", flat(100))],
            [on_p("nixl_actor_lent_blocks", "0x25 60x5"), on_p("nixl_actor_kv_blocks", flat(100))],
            [on_p("nixl_actor_lent_blocks", flat(0)), on_p("nixl_actor_kv_blocks", flat(0))],
        ],
    ),
    "NixlActorLateReaders": (
        [
            [on_p("nixl_num_notifications_after_expiry_total", "0x25 1x5")],
            [on_p("nixl_num_notifications_after_expiry_total", BEFORE_THE_FIRST_SCRAPE)],
        ],
        [[on_p("nixl_num_notifications_after_expiry_total", flat(7))]],
    ),
    "NixlActorLeaseMarginLow": (
        [samples_of("nixl_actor_lease_margin_seconds", "1.0")],
        [
            [*samples_of("nixl_actor_lease_margin_seconds", "20.0"), NONE_BELOW_15],
            samples_of("nixl_actor_lease_margin_seconds", "1.0", values=TWO_OF_A_NIGHT),
            [
                on_d("nixl_actor_lease_margin_seconds_bucket", FOR_THREE_MINUTES, 'le="1.0"'),
                on_d("nixl_actor_lease_margin_seconds_bucket", FOR_THREE_MINUTES, 'le="15.0"'),
                *samples_of("nixl_actor_lease_margin_seconds", "20.0", values=BESIDE_OTHERS),
            ],
        ],
    ),
    "NixlActorLeasesPinned": (
        [[on_p("nixl_actor_oldest_lease_seconds", "0x10 0+60x19"), *leases(100, 0)]],
        [[on_p("nixl_actor_oldest_lease_seconds", flat(480)), *leases(100, 0)]],
    ),
    "NixlActorStrayReleases": (
        [[on_p("nixl_actor_stray_releases_total", growing(1))]],
        [[on_p("nixl_actor_stray_releases_total", "0x20 3x10")]],
    ),
    "NixlActorFlooded": (
        [
            [turned_away(growing(2), "side_channel", "cut_off")],
            [turned_away(growing(2), "control_socket", "no_room")],
            [turned_away(growing(5000), "notifications", "dropped")],
            [turned_away(growing(700), "side_channel", "refused")],
            [
                turned_away(growing(400), "side_channel", "refused"),
                turned_away(growing(400), "control_socket", "malformed"),
            ],
        ],
        [
            # A fleet of a thousand engines of eight ranks that connects again, and an engine whose key is missing.
            [turned_away("0x20 8000x10", "control_socket", "cut_off")],
            [turned_away(growing(500), "side_channel", "refused")],
            [turned_away(growing(1), "side_channel", "cut_off"), turned_away(growing(30), "side_channel", "malformed")],
        ],
    ),
    "NixlActorTraceIncomplete": (
        [[on_p("nixl_actor_trace_records_missing_total", growing(1))]],
        [[on_p("nixl_actor_trace_records_missing_total", "0x20 5000x10")]],
    ),
    "NixlActorVersionsDiffer": (
        [[build("1.5.1", "0.1.0"), build("1.5.1", "0.2.0")]],
        [[build("1.5.1", "0.1.0")]],
    ),
}
"""By alert: series with which it fires at the end, and series with which it does not."""


EVALUATED_AT = {"NixlActorVersionsDiffer": 45, "NixlActorEngineGone": 50}
"""In minutes, where it is not the end of the series; and half a minute later, because scrapes and evaluations do not
fall together: a window of ten minutes has ten values then, and an increase of 3 is extrapolated to 3.3."""


def test_every_alert_has_both_cases() -> None:
    assert set(CASES) == set(RULES)
    assert all(fires and not_fires for fires, not_fires in CASES.values())


def test_the_series_of_the_cases_exist() -> None:
    for both in CASES.values():
        for series in (each for cases in both for case in cases for each in case):
            if _OF_A_PROCESS.fullmatch(series["series"]):
                continue
            name, labels = re.fullmatch(r"(vllm:\w+)\{(.*)\}", series["series"]).groups()  # type: ignore[union-attr]
            metric = metric_shown_as(name)
            assert metric is not None, name
            extra = {label for label, _, _ in _CONDITION.findall(labels)} - {"job", "instance", "model_name", "engine"}
            assert extra - {"le"} == set(metric.labels), name


@needs_promtool
@pytest.mark.parametrize("name", RULES)
def test_an_alert_fires_when_it_should_and_only_then(name: str, tmp_path: Path) -> None:
    assert PROMTOOL is not None
    answers = []
    for fires, cases in zip((True, False), CASES[name], strict=True):
        for series in cases:
            document = {
                "rule_files": [str(ALERTS)],
                "evaluation_interval": "30s",
                "tests": [
                    {
                        "interval": "1m",
                        "input_series": series,
                        # Without labels, which are not in question: promtool prints what it got instead.
                        "alert_rule_test": [
                            {
                                "eval_time": f"{EVALUATED_AT.get(name, MINUTES - 1)}m30s",
                                "alertname": name,
                                "exp_alerts": [],
                            }
                        ],
                    }
                ],
            }
            file = tmp_path / "test.yaml"
            file.write_text(yaml.safe_dump(document))
            done = subprocess.run([PROMTOOL, "test", "rules", str(file)], capture_output=True, text=True, timeout=250)
            assert "parse" not in done.stderr + done.stdout, done.stderr + done.stdout
            answers.append((series, fires, done.returncode != 0, done.stdout + done.stderr))
    wrong = [(series, output) for series, fires, has_fired, output in answers if fires != has_fired]
    assert wrong == []
    assert all(f'alertname="{name}"' in output for _, fires, _, output in answers if fires)
    summaries = [said for _, fires, _, output in answers if fires for said in re.findall(r'summary="([^"]*)"', output)]
    assert summaries
    assert [said for said in summaries if re.search(r"\.\d\d", said)] == [], "what is extrapolated has many digits"
