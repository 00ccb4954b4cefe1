"""The page /metrics of an engine, as numbers."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from connector.observe.catalogue import METRICS, Metric
from tests.e2e.client import Client

Labels = tuple[str, ...]
"""Values, in the order of the metric's labels."""


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

    def __getitem__(self, key: Metric | tuple[Metric, ...] | tuple[Metric, str]) -> float:
        """`page[METRIC]` or `page[METRIC, "value of a label", ...]`; of a histogram the number of samples."""
        metric, *values = key if isinstance(key, tuple) else (key,)
        assert isinstance(metric, Metric)
        name = f"{metric.name}_count" if metric.kind == "histogram" else metric.name
        return self._values[name, tuple(map(str, values))]

    def total(self, metric: Metric, *values: str) -> float:
        """The sum of a histogram's samples."""
        return self._values[f"{metric.name}_sum", values]

    def since(self, before: Page) -> dict[tuple[str, Labels], float]:
        """What counters and histograms have grown by; those that have."""
        gauges = {metric.name for metric in METRICS if metric.kind == "gauge"}
        grown = {}
        for key, value in self._values.items():
            if key[0] not in gauges and not key[0].endswith("_sum") and value != before._values[key]:
                grown[key] = value - before._values[key]
        return grown


def expected(counts: Mapping[Metric | tuple[Metric, ...], float]) -> dict[tuple[str, Labels], float]:
    """In the form of `Page.since`, from keys as those of a page."""
    found: dict[tuple[str, Labels], float] = {}
    for key, count in counts.items():
        metric, *values = key if isinstance(key, tuple) else (key,)
        name = f"{metric.name}_count" if metric.kind == "histogram" else metric.name
        found[name, tuple(map(str, values))] = count
    return found
