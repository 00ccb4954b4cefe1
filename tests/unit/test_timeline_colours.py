"""People tell the outcomes on the timeline page apart by their colours, whatever colours they see, in light and dark.

What somebody sees who lacks one kind of cones is computed with the matrices of Machado, Oliveira and Fernandes: "A
Physiologically-based Model for Simulation of Color Vision Deficiency", IEEE Transactions on Visualization and Computer
Graphics 15(6), 2009, at severity 1.0. They apply to linear RGB. How far two colours lie apart is the distance in
CIELAB (Delta E of 1976); 2.3 is just noticeable where both are side by side.
"""

from __future__ import annotations

import re
from itertools import combinations
from math import dist
from pathlib import Path

import pytest

from connector.observe.history import OUTCOMES

SOLID = (*OUTCOMES, "queued")
"""What a bar may be filled with: how it ended; and the wait in vLLM's queue before, whatever came of it."""
STYLE = Path(__file__).parents[2] / "connector" / "tools" / "timeline" / "page.css"
APART_MIN = 15.0
WORDS_CONTRAST_MIN = 4.5
"""Of text against its ground, by the Web Content Accessibility Guidelines, level AA."""
MARKS_CONTRAST_MIN = 2.0
"""Of marks against the page: the shapes and what is written beside them say the same."""

Triple = tuple[float, float, float]
Matrix = tuple[Triple, Triple, Triple]

VISIONS: dict[str, Matrix] = {
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}

TO_XYZ: Matrix = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
"""From linear sRGB."""
WHITE: Triple = (0.9505, 1.0, 1.089)


def themes() -> dict[str, dict[str, str]]:
    """The variables of the style sheet: of a light page, of a dark system, and of a reader who wants it dark."""
    text = STYLE.read_text()
    selectors = {
        "light": r":root",
        "dark system": r':root:not\(\[data-theme="light"\]\)',
        "dark reader": r':root\[data-theme="dark"\]',
    }
    found = {}
    for theme, selector in selectors.items():
        (body,) = re.findall(rf"^\s*{selector} \{{(.*?)\}}", text, re.DOTALL | re.MULTILINE)
        found[theme] = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6});", body))
    return found


def times(matrix: Matrix, vector: Triple) -> Triple:
    x, y, z = (sum(m * v for m, v in zip(row, vector, strict=True)) for row in matrix)
    return x, y, z


def linear(colour: str) -> Triple:
    r, g, b = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return _linear(r), _linear(g), _linear(b)


def _linear(value: float) -> float:
    return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4


def lab(light: Triple) -> Triple:
    def curve(value: float) -> float:
        return value ** (1 / 3) if value > 216 / 24389 else (841 / 108) * value + 4 / 29

    r, g, b = (min(1.0, max(0.0, value)) for value in light)
    x, y, z = (curve(value / white) for value, white in zip(times(TO_XYZ, (r, g, b)), WHITE, strict=True))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def apart(one: str, other: str, vision: Matrix) -> float:
    """How far, to somebody who sees like this."""
    return dist(lab(times(vision, linear(one))), lab(times(vision, linear(other))))


def contrast(one: str, other: str) -> float:
    dark, light = sorted(times(TO_XYZ, linear(each))[1] for each in (one, other))
    return (light + 0.05) / (dark + 0.05)


def test_the_reckoning() -> None:
    """Against figures that are known: white and black, grey to everybody, and a pair that was hard to tell apart."""
    assert apart("#ffffff", "#000000", VISIONS["all cones"]) == pytest.approx(100, abs=0.1)
    assert contrast("#ffffff", "#000000") == pytest.approx(21)
    for matrix in VISIONS.values():
        assert times(matrix, (1, 1, 1)) == pytest.approx((1, 1, 1), abs=2e-6)
    assert apart("#cc79a7", "#9aa5ae", VISIONS["all cones"]) > 40
    assert apart("#cc79a7", "#9aa5ae", VISIONS["deuteranopia"]) < 4
    assert apart("#ff0000", "#00b000", VISIONS["all cones"]) > 3 * apart("#ff0000", "#00b000", VISIONS["deuteranopia"])


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("theme", ["light", "dark reader"])
def test_outcomes_and_the_queue_are_told_apart_by_their_colours(theme: str, vision: str) -> None:
    colours = themes()[theme]
    found = {
        (one, other): apart(colours[one], colours[other], VISIONS[vision]) for one, other in combinations(SOLID, 2)
    }
    assert {pair: round(each, 1) for pair, each in found.items() if each < APART_MIN} == {}


def test_dark_is_the_same_whoever_asks_for_it() -> None:
    found = themes()
    assert found["dark system"] == found["dark reader"]
    assert set(found["light"]) == set(found["dark reader"])
    assert set(SOLID) < set(found["light"])


@pytest.mark.parametrize("theme", ["light", "dark reader"])
def test_colours_are_seen_and_words_can_be_read(theme: str) -> None:
    colours = themes()[theme]
    for outcome in OUTCOMES:
        assert contrast(colours[outcome], colours["bg"]) > MARKS_CONTRAST_MIN, outcome
        on = "#ffffff" if outcome == "withdrawn" else "#0c1418"  # `--on`, in the chart and on bars
        assert contrast(colours[outcome], on) > WORDS_CONTRAST_MIN, outcome
        assert contrast(colours[f"{outcome}-tint"], colours["fg"]) > WORDS_CONTRAST_MIN, outcome
    assert contrast(colours["queued"], "#ffffff") > WORDS_CONTRAST_MIN
    for ground in ("bg", "lane"):
        assert contrast(colours["queued"], colours[ground]) > MARKS_CONTRAST_MIN
        for words in ("fg", "muted", "accent", "fault"):
            assert contrast(colours[words], colours[ground]) > WORDS_CONTRAST_MIN, (words, ground)
