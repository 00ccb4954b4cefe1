"""Pictures of figures, as PNG for reading and as SVG for pages that are enlarged.

matplotlib without a screen. Every picture says what its axes are and is written twice, by `save`.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from itertools import groupby
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")  # before pyplot is imported: there is no screen
mpl.rcParams["svg.fonttype"] = "none"  # text stays text: smaller, and it can be searched
mpl.rcParams["svg.hashsalt"] = "bench"  # the same figures give the same file

import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.figure import Figure as Picture  # noqa: E402
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator  # noqa: E402
from PIL import Image  # noqa: E402

from tests.bench.report import Figure  # noqa: E402

PICTURE = "beside-built-in"
BETTER, WORSE = "#2a7f62", "#b5482f"
ROW_INCHES, WIDTH_INCHES = 0.19, 11.0
SMALLEST, LARGEST = 0.001, 100.0
"""Ratios beyond are drawn up to the edge; the number beside the bar is right."""
DPI, COLOURS = 80, 32
HEAD_ROWS = 1.4
"""Height of a case's name, the gap above it included."""


def save(picture: Picture, directory: Path, name: str) -> list[Path]:
    """Write `name.png` and `name.svg`; their paths. A picture of the same figures is the same file."""
    directory.mkdir(parents=True, exist_ok=True)
    png, svg = (directory / f"{name}.{ending}" for ending in ("png", "svg"))
    drawn = BytesIO()
    picture.savefig(drawn, dpi=DPI, bbox_inches="tight")
    Image.open(drawn).convert("RGB").quantize(COLOURS).save(png, optimize=True)  # a third of the size
    picture.savefig(svg, bbox_inches="tight", metadata={"Date": None})
    plt.close(picture)
    return [png, svg]


def ratio_bars(figures: Sequence[Figure], title: str) -> Picture:
    """A bar for each figure that has a ratio: ours / built-in on a logarithmic axis, from 1 to the median of the
    rounds, with a line from the smallest to the largest. One colour where ours is better, another where it is not."""
    shown = [each for each in figures if each.ratio is not None]
    places, labels, heads = _places(shown)
    picture, axes = plt.subplots(figsize=(WIDTH_INCHES, ROW_INCHES * (max(places, default=0) + 3) + 0.8))
    for place, each in zip(places, shown, strict=True):
        assert each.ratio is not None
        ratio, low, high = (_within(value) for value in (each.ratio, min(each.ratios), max(each.ratios)))
        is_better = each.ratio >= 1 if each.more_is_better else each.ratio <= 1
        axes.barh(place, ratio - 1, left=1, height=0.72, color=BETTER if is_better else WORSE)
        axes.plot((low, high), (place, place), color="black", linewidth=0.8)
        axes.annotate(
            f"{each.ratio:.2g}",
            (max(1.0, high), place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=7.5,
        )
    for place, name in heads:
        axes.annotate(
            name, (0, place), xycoords=("axes fraction", "data"), xytext=(-6, 0), textcoords="offset points",
            ha="right", va="center", fontsize=8.5, fontweight="bold",
        )  # fmt: skip
    axes.set_yticks(places, labels, fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(max(places, default=0) + 1, -1)
    axes.set_xscale("log")
    axes.set_xlim(SMALLEST, LARGEST)
    axes.xaxis.set_major_locator(FixedLocator([10.0**power for power in range(-3, 3)]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.tick_params(axis="x", top=True, labeltop=True)
    axes.axvline(1, color="black", linewidth=1)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("left", "right"):
        axes.spines[side].set_visible(False)
    axes.set_xlabel("ours / built-in; green: ours is better; thin line: smallest to largest of the rounds", fontsize=9)
    axes.set_title(title, fontsize=11)
    return picture


def _within(ratio: float) -> float:
    return min(max(ratio, SMALLEST), LARGEST)


def _places(figures: Sequence[Figure]) -> tuple[list[float], list[str], list[tuple[float, str]]]:
    """Rows from above: a head for each case, below it its figures."""
    places: list[float] = []
    labels: list[str] = []
    heads: list[tuple[float, str]] = []
    row = 0.0
    for name, group in groupby(figures, key=lambda each: each.case):
        row += HEAD_ROWS
        heads.append((row - 1, name))
        for each in group:
            places.append(row)
            labels.append(f"{each.figure}{' (more is better)' if each.more_is_better else ''}")
            row += 1
    return places, labels, heads


def plot(figures: Sequence[Figure], directory: Path) -> list[Path]:
    """The picture of a run; the files written."""
    return save(ratio_bars(figures, "This connector beside the built-in one"), directory, PICTURE)
