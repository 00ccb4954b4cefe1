"""The comparison with the built-in connector, without an engine: what can rot while nobody runs it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.bench.__main__ import LIMITS, measure
from tests.bench.case import Case, Round, Rounds, percentile, turns
from tests.bench.cases import CASES
from tests.bench.limits import Limit
from tests.bench.plots import plot
from tests.bench.report import Figure, as_json, limits_table, markdown, table
from tests.rig import BUILTIN, OURS

README = (Path(__file__).parents[1] / "bench" / "README.md").read_text()

SLOWER = Figure("four", "done, ms", builtin=[10.0, 20.0, 10.0], ours=[20.0, 20.0, 5.0])
FASTER = Figure("four", "GB/s", builtin=[2.0, 2.0], ours=[5.0, 3.0])
UNKNOWN = Figure("idle", "cores of P", builtin=[0.0], ours=[0.5])


def test_names_of_cases_are_unique_and_in_the_readme() -> None:
    names = [case.name for case in CASES] + [LIMITS]
    assert len(set(names)) == len(names)
    assert [name for name in names if f"`{name}`" not in README] == []


def test_a_ratio_is_the_median_of_the_ratios_of_rounds() -> None:
    assert SLOWER.ratios == [2.0, 1.0, 0.5]
    assert SLOWER.ratio == 1.0  # that of the medians is 2
    assert FASTER.ratio == 2.0
    assert (FASTER.more_is_better, SLOWER.more_is_better) == (True, False)
    assert UNKNOWN.ratio is None


def test_the_table_has_a_line_for_each_figure_also_without_a_ratio() -> None:
    lines = table([SLOWER, FASTER, UNKNOWN]).splitlines()[1:]
    assert [line.split()[-3:] for line in lines[:1]] == [["1.00", "0.50", "2.00"]]
    assert lines[1].endswith("(more is better)")
    assert lines[2].split()[-2:] == ["0.000", "0.500"]
    assert "memcpy" in limits_table([Limit("memcpy", "GB/s", [1.0, 2.0])])


def test_the_page_has_all_of_it_and_shows_what_is_worse() -> None:
    worse = Figure("idle", "cores of D", builtin=[0.5], ours=[1.0])
    page = markdown([SLOWER, FASTER, worse], [Limit("memcpy", "GB/s", [1.0, 2.0, 4.0])], {"four": "x", "idle": "y"})
    lines = page.splitlines()
    assert lines[2:5] == [
        "| `four`: x | done, ms | 10 | 20 | 1.00 (0.50 to 2.00) |",
        "|  | GB/s | 2 | 4 | 2.00 (1.50 to 2.50) |",
        "| `idle`: y | cores of D | 0.5 | 1 | **2.00** (2.00 to 2.00) |",
    ]
    assert lines[-1] == "| memcpy | 2 | 1 | 4 | GB/s |"


def test_the_json_has_every_value() -> None:
    written = json.loads(json.dumps(as_json([SLOWER, UNKNOWN], [Limit("memcpy", "GB/s", [1.0])])))
    assert [each["ours"] for each in written["figures"]] == [SLOWER.ours, UNKNOWN.ours]
    assert [each["ratio"] for each in written["figures"]] == [1.0, None]
    assert written["limits"] == [{"name": "memcpy", "unit": "GB/s", "values": [1.0]}]


def test_pictures_are_written_twice_and_show_each_ratio(tmp_path: Path) -> None:
    png, svg = plot([SLOWER, FASTER, UNKNOWN], tmp_path / "new")
    assert png.read_bytes().startswith(b"\x89PNG")
    drawn = svg.read_text()
    assert "done, ms" in drawn
    assert "GB/s" in drawn
    assert "cores of P" not in drawn  # it has no ratio


def test_rounds_are_gathered_by_side_whatever_their_order() -> None:
    @contextmanager
    def opened(directory: Path) -> Iterator[Rounds]:
        assert directory.is_dir()

        def rounds(number: int) -> Iterator[tuple[str, Round]]:
            for label in turns([BUILTIN.label, OURS.label], number):
                yield label, {"done, ms": number * (10.0 if label == OURS.label else 1.0)}

        yield rounds

    (figure,) = measure(Case("made", "by a test", opened), pairs=3)
    assert (figure.builtin, figure.ours) == ([1.0, 2.0, 3.0], [10.0, 20.0, 30.0])


@pytest.mark.parametrize(("percent", "value"), [(50, 2), (99, 4), (100, 4), (1, 1)])
def test_percentiles_are_values_that_occurred(percent: float, value: int) -> None:
    assert percentile([4, 1, 3, 2], percent) == value
