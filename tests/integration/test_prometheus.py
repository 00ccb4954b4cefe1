"""The alerts and the dashboard against a real Prometheus, which scrapes a page of metrics of each side.

The pages are made by the class that vLLM's front end makes, and fed with figures as engines send them, every series
once a second. Skips where Prometheus is not installed; `make prometheus` unpacks it.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from connector.observe import catalogue
from connector.observe.stats import ConnectorPromMetrics, ConnectorStats
from tests.e2e.engines import LOOPBACK, free_port
from tests.programs import find_prometheus

ROOT = Path(__file__).parents[2]
OPERATIONS = ROOT / "docs" / "operations"
PROMETHEUS = find_prometheus("prometheus")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROMETHEUS is None, reason="no prometheus: `make prometheus` unpacks it"),
]

SCRAPES_MIN = 5
WAIT_SECONDS = 60.0
VARIABLES = {"$__rate_interval": "30s", "$job": ".*", "$instance": ".*", "$model": ".*"}


def one_of_everything() -> dict[str, Any]:
    """Figures in which every series has something."""
    stats = ConnectorStats()
    for metric in catalogue.METRICS:
        for labels in metric.series:
            if metric.kind == "counter":
                stats.count(metric.key(*labels), 1)
            elif metric.kind == "histogram":
                stats.sample(metric.key(*labels), 0.5)
            else:
                stats.set_gauges({metric.key(*labels): 1})
    return stats.data


class FrontEnd:
    """Serves a page of metrics, and feeds it until it is closed."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        types = {kind: functools.partial(kind, registry=registry) for kind in (Gauge, Counter, Histogram)}
        config = SimpleNamespace(kv_transfer_config=None)
        self._metrics = ConnectorPromMetrics(config, types, ["model_name", "engine"], {0: ["tiny", "0"]})
        self.port = free_port()
        self._server, self._server_thread = start_http_server(self.port, LOOPBACK, registry)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._feed)
        self._thread.start()

    def _feed(self) -> None:
        while not self._is_closed.wait(1.0):
            self._metrics.observe(one_of_everything())

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join()
        self._server.shutdown()
        self._server.server_close()
        self._server_thread.join()


class Prometheus:
    """A server with the alerts, which scrapes the front ends once a second."""

    def __init__(self, directory: Path, front_ends: list[FrontEnd]) -> None:
        assert PROMETHEUS is not None
        config = yaml.safe_load((OPERATIONS / "prometheus" / "scrape.yaml").read_text()) | {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(OPERATIONS / "prometheus" / "alerts.yaml")],
        }
        job, *_ = config["scrape_configs"]
        config["scrape_configs"] = [job]
        job["static_configs"] = [{"targets": [f"{LOOPBACK}:{each.port}" for each in front_ends]}]
        (directory / "prometheus.yaml").write_text(yaml.safe_dump(config))
        address = f"{LOOPBACK}:{free_port()}"
        self._log = (directory / "log").open("wb")
        self._process = subprocess.Popen(
            [
                PROMETHEUS,
                f"--config.file={directory / 'prometheus.yaml'}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address={address}",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        self._http = httpx.Client(base_url=f"http://{address}", trust_env=False, timeout=30)

    def ask(self, path: str, **parameters: Any) -> Any:
        answer = self._http.get(f"/api/v1/{path}", params=parameters).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ask("query", query=expression)["result"]
        return found

    def answer(self, expression: str) -> list[dict[str, Any]]:
        """The first that has figures: a page that was late for a scrape is missing until the next one."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not (found := self.query(expression)) or any(each["value"][1] == "NaN" for each in found):
            if time.monotonic() > deadline:
                break
            time.sleep(0.5)
        return found

    def wait_for_scrapes(self, count: int) -> None:
        """Of each front end."""
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:
            assert self._process.poll() is None, Path(self._log.name).read_text()[-3000:]
            scraped = self.query("count_over_time(vllm:nixl_actor_up[1m])") if self._is_ready() else []
            if len(scraped) == 2 and all(float(each["value"][1]) >= count for each in scraped):
                return
            time.sleep(0.5)
        raise AssertionError(f"not {count} scrapes within {WAIT_SECONDS:g} s")

    def wait_for_alerts(self, expected: dict[str, str]) -> None:
        """Their states, at one evaluation; one of a counter that did not grow between two scrapes shows it later."""
        deadline = time.monotonic() + WAIT_SECONDS
        while (states := self._states_of(expected)) != expected:
            assert time.monotonic() < deadline, states
            time.sleep(0.5)

    def _states_of(self, names: Collection[str]) -> dict[str, str]:
        (group,) = self.ask("rules")["groups"]
        return {rule["name"]: rule["state"] for rule in group["rules"] if rule["name"] in names}

    def _is_ready(self) -> bool:
        """It answers other questions with 503 while it opens its storage."""
        try:
            return self._http.get("/-/ready").status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def close(self) -> None:
        self._http.close()
        self._process.terminate()
        self._process.wait(30)
        self._log.close()


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    front_ends = [FrontEnd(), FrontEnd()]
    server = Prometheus(tmp_path_factory.mktemp("prometheus"), front_ends)
    try:
        server.wait_for_scrapes(SCRAPES_MIN)
        yield server
    finally:
        server.close()
        for each in front_ends:
            each.close()


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((OPERATIONS / "grafana" / "nixl-actor.json").read_text())
    return found


QUERIES = [
    pytest.param(target["expr"], id=f"{panel['title']}-{target['refId']}")
    for panel in dashboard()["panels"]
    for target in panel.get("targets", ())
]


@pytest.mark.parametrize("expression", QUERIES)
def test_a_query_of_the_dashboard_has_an_answer(prometheus: Prometheus, expression: str) -> None:
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    assert "$" not in expression
    result = prometheus.answer(expression)
    assert result
    assert all(each["value"][1] != "NaN" for each in result), result


def test_what_can_be_chosen_is_there(prometheus: Prometheus) -> None:
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] != "query":
            continue
        selector, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["definition"]).groups()  # type: ignore[union-attr]
        for name, value in VARIABLES.items():
            selector = selector.replace(name, value)
        assert prometheus.answer(selector), variable["name"]
        assert prometheus.ask(f"label/{label}/values", **{"match[]": selector}), variable["name"]


def test_the_alerts_are_loaded_and_evaluated(prometheus: Prometheus) -> None:
    (group,) = prometheus.ask("rules")["groups"]
    source = yaml.safe_load((OPERATIONS / "prometheus" / "alerts.yaml").read_text())
    assert [rule["name"] for rule in group["rules"]] == [rule["alert"] for rule in source["groups"][0]["rules"]]
    assert {rule["health"] for rule in group["rules"]} == {"ok"}
    # Every counter grows, every gauge is 1, and every duration is half a second.
    prometheus.wait_for_alerts(
        {"NixlActorDown": "inactive", "NixlActorReceivesFail": "pending", "NixlActorLateReaders": "firing"}
    )


def test_prometheus_understands_the_page(prometheus: Prometheus) -> None:
    found = {
        re.sub("^vllm_", "vllm:", name).removesuffix("_total"): entries
        for name, entries in prometheus.ask("metadata").items()
    }
    for metric in catalogue.METRICS:
        (entry,) = found[metric.name]
        assert (entry["type"], entry["help"]) == (metric.kind, metric.documentation)
