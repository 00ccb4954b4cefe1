"""The Grafana dashboard: it is what its generator makes, and asks for what exists."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from connector.observe import catalogue
from tests.unit.test_alerts import _NAME, counts_unlike, metric_shown_as, wrong_in

GRAFANA = Path(__file__).parents[2] / "docs" / "operations" / "grafana"
DASHBOARD: dict[str, Any] = json.loads((GRAFANA / "nixl-actor.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", GRAFANA / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_file_is_what_the_generator_makes(generate: ModuleType) -> None:
    assert (GRAFANA / "nixl-actor.json").read_text() == generate.render(), "run docs/operations/grafana/generate.py"


def test_every_query_asks_for_what_exists_and_for_what_is_chosen() -> None:
    for expression in EXPRESSIONS:
        assert _NAME.search(expression), expression
        assert wrong_in(expression) == [], expression
        for _, conditions in _NAME.findall(expression):
            assert 'job=~"$job", instance=~"$instance", model_name=~"$model"' in conditions, expression


def test_a_query_compares_only_what_is_counted_alike() -> None:
    """Otherwise what it shows depends on the number of ranks."""
    assert [expression for expression in EXPRESSIONS if counts_unlike(expression)] == []


def test_every_metric_is_on_the_dashboard() -> None:
    asked = {metric_shown_as(name) for expression in EXPRESSIONS for name, _ in _NAME.findall(expression)}
    assert {metric.name for metric in catalogue.METRICS if metric not in asked} == set()


def test_panels_lie_side_by_side() -> None:
    places = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in places, panel["title"]
                places.add((x, y))
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_units_are_those_of_the_metrics() -> None:
    for panel in PANELS:
        names = {name for target in panel["targets"] for name, _ in _NAME.findall(target["expr"])}
        metrics = {metric_shown_as(name) for name in names}
        if all(metric is not None and metric.name.endswith("_seconds") for metric in metrics):
            assert panel["fieldConfig"]["defaults"]["unit"] == "s", panel["title"]
