"""The interpreter's switch interval: shorter while transfers are open, and afterwards what it was."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from connector.worker.switch_interval import SwitchInterval


@pytest.fixture(autouse=True)
def five_milliseconds() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    yield
    sys.setswitchinterval(before)


def interval() -> float:
    return pytest.approx(sys.getswitchinterval())  # type: ignore[no-any-return]


def test_it_is_short_while_it_is_wanted() -> None:
    switch = SwitchInterval(0.0005)
    for wanted, expected in ((False, 0.005), (True, 0.0005), (True, 0.0005), (False, 0.005), (True, 0.0005)):
        switch.shorten(wanted)
        assert interval() == expected


def test_zero_leaves_it_alone() -> None:
    SwitchInterval(0.0).shorten(True)
    assert interval() == 0.005


def test_a_shorter_one_is_left_alone() -> None:
    sys.setswitchinterval(0.0001)
    switch = SwitchInterval(0.0005)
    switch.shorten(True)
    assert interval() == 0.0001
    switch.shorten(False)
    assert interval() == 0.0001


def test_what_somebody_sets_meanwhile_stays() -> None:
    switch = SwitchInterval(0.0005)
    switch.shorten(True)
    sys.setswitchinterval(0.002)
    switch.shorten(False)
    assert interval() == 0.002
