"""The curves of `bench_scale`: what a request and a peer cost over how many there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

FIGURES = {
    "read_us": "us per READ",
    "open_kib": "KiB per open request\nand rank",
    "peer_ms": "ms per rank\nof a peer",
    "peer_kib": "KiB per rank\nof a peer",
}
AXES = {"peers": "peers", "open": "open requests", "ranks": "ranks of a peer"}


def plot(curves: Mapping[tuple[str, str, str], Sequence[tuple[int, float]]], directory: Path) -> None:
    """Draw `scale.png` and `scale.svg`: a row for each figure, a column for each axis, a line for each level.

    `curves`: points by (level, axis, figure).
    """
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update(
        {
            "font.size": 8,
            "svg.fonttype": "none",
            "svg.hashsalt": "scale",  # the same figures make the same file
        }
    )
    from matplotlib import pyplot

    drawing, grid = pyplot.subplots(len(FIGURES), len(AXES), figsize=(8, 6.5), sharex="col", sharey="row")
    for row, (figure, about) in zip(grid, FIGURES.items(), strict=True):
        row[0].set_ylabel(about)
        for place, axis in zip(row, AXES, strict=True):
            for level in dict.fromkeys(level for level, *_ in curves):
                points = curves[level, axis, figure]
                place.plot([x for x, _ in points], [y for _, y in points], marker="o", markersize=3, label=level)
            place.set_xscale("log")
            place.minorticks_off()
            place.grid(visible=True, alpha=0.3)
        row[0].set_ylim(bottom=0)  # of the whole row, once all is in it
    for place, axis_about in zip(grid[-1], AXES.values(), strict=True):
        place.set_xlabel(axis_about)
    drawing.legend(*grid[0][0].get_legend_handles_labels(), loc="upper center", ncols=3, frameon=False)
    drawing.tight_layout(rect=(0, 0, 1, 0.96))
    directory.mkdir(parents=True, exist_ok=True)
    drawing.savefig(directory / "scale.png", dpi=100)
    drawing.savefig(directory / "scale.svg", metadata={"Date": None})
