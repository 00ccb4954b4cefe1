"""What the README of the simulator names exists: tests, mutants, fault kinds, files. No mutant is left out of it."""

from __future__ import annotations

import re
from pathlib import Path

from tests.simulation.faults import Kind
from tests.simulation.mutants.catalogue import CATALOGUE

ROOT = Path(__file__).parents[2]
README = (Path(__file__).parent / "README.md").read_text()
ROWS = {int(row): text for row, text in re.findall(r"^\| (\d+) \| (.*) \|$", README, re.MULTILINE)}


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", README)
    assert len(named) > 40
    for path, function in named:
        text = (ROOT / path).read_text()
        assert not function or f"def {function}(" in text, (path, function)


def test_every_file_that_is_named_exists() -> None:
    for path in re.findall(r"`(regressions/[\w.-]+)`", README):
        assert (Path(__file__).parent / path).is_file(), path
    for path in re.findall(r"`(diagrams/[\w./-]+\.mmd)`", README):
        assert (ROOT / path).is_file(), path


def test_every_mutant_of_a_row_is_named_there_and_no_other() -> None:
    for row, text in ROWS.items():
        named = set(re.findall(r"(?<!\*)\*([^*|]+)\*(?!\*)", text))
        assert named <= CATALOGUE.keys(), (row, named - CATALOGUE.keys())
    for mutant in CATALOGUE.values():
        if mutant.row is not None:
            assert f"*{mutant.name}*" in ROWS[mutant.row], (mutant.row, mutant.name)


def test_every_fault_kind_that_is_named_exists() -> None:
    values = {kind.value for kind in Kind}
    for names in re.findall(r"fault kinds? ((?:`\w+`(?:, )?)+)", README):
        assert set(re.findall(r"`(\w+)`", names)) <= values, names
