"""Names that are remembered: the newest, and at no cost to the collector of garbage."""

from __future__ import annotations

import gc
import sys
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from statemachine.remembered import Remembered
from tests.unit.properties import on_any_machine


@on_any_machine
@given(st.integers(1, 5), st.lists(st.sampled_from("abcdefgh"), max_size=40))
def test_the_newest_names_are_remembered(names_max: int, added: list[str]) -> None:
    remembered, expected = Remembered(names_max), OrderedDict[str, None]()
    for name in added:
        remembered.add(name)
        expected.setdefault(name)
        if len(expected) > names_max:
            expected.popitem(last=False)
        assert len(remembered) == len(expected)
        assert [each for each in "abcdefgh" if each in remembered] == sorted(expected)


def test_a_copy_remembers_for_itself() -> None:
    first = Remembered(2)
    first.add("a")
    second = first.copy()
    assert second.freeze() == first.freeze()
    for name in "bc":
        second.add(name)
    assert ("a" in first, "a" in second, "c" in first, "c" in second) == (True, False, False, True)
    assert second.freeze() != first.freeze()


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="from 3.14 on CPython's collector looks at every dictionary")
def test_the_collector_has_nothing_to_look_at() -> None:
    remembered = Remembered(1000)
    for number in range(2500):
        remembered.add(f"name {number}")
    assert len(remembered) == 1000
    assert not [each for each in gc.get_referents(remembered) if gc.is_tracked(each) and each is not Remembered]
