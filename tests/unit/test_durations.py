"""Durations for people."""

from __future__ import annotations

import pytest

from connector.tools.durations import duration, parse_duration


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0, "0 ms"),
        (1e-9, "0 ms"),
        (0.000_345, "0.345 ms"),
        (0.0123, "12.3 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (3.0, "3 s"),
        (12.84, "12.8 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min"),
        (75.2, "1 min 15 s"),
        (600.0, "10 min"),
        (3599.4, "59 min 59 s"),
        (3599.9, "1 h"),
        (7275.0, "2 h 1 min"),
        (360_000.0, "100 h"),
        (-0.5, "-500 ms"),
        (-90.0, "-1 min 30 s"),
        (-1e-9, "0 ms"),
    ],
)
def test_it_has_three_digits_and_the_unit_that_people_would_take(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_who_compares_durations_gets_more_digits() -> None:
    assert [duration(each, 4) for each in (0.012_345, 12.345, 75.0)] == ["12.35 ms", "12.35 s", "1 min 15 s"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("1.5 h", 5400), ("15m", 900), ("15min", 900), (" 1h ", 3600), ("2d", 172_800)],
)
def test_what_people_write_is_read(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "-1h", "1y", "1h30", "1 h 30 min", "nan", "inf", "1e3"])
def test_what_is_no_duration_is_refused_with_what_to_write(text: str) -> None:
    with pytest.raises(ValueError, match="as in 1h"):
        parse_duration(text)
