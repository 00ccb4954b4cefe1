"""The diagrams in the repository are what the tables say."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from diagrams.draw import DIRECTORY, MACHINES, arrows, render_all
from statemachine.kernel import Machine

ROOT = Path(__file__).parents[2]
FILES = render_all()


@pytest.mark.parametrize("name", FILES)
def test_the_file_is_up_to_date(name: str) -> None:
    assert (DIRECTORY / name).read_text() == FILES[name], "run `make diagrams`"


def test_there_are_no_others() -> None:
    pictures = {path.name for path in DIRECTORY.iterdir() if path.suffix in (".mmd", ".svg")}
    assert pictures == FILES.keys(), "a machine is gone: remove its pictures"


def test_every_machine_that_is_declared_is_drawn() -> None:
    sources = {path for path in (ROOT / "statemachine").glob("*.py") if "MACHINE: Machine[" in path.read_text()}
    assert {path.stem for path in sources} == {machine.name for machine in MACHINES}


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_every_transition_is_drawn(machine: Machine[Any, Any]) -> None:
    drawn = {(source, target, event) for (source, target), events in arrows(machine).items() for event in events}
    declared = {
        (source, target, event.__name__)
        for (source, event), transition in machine.table.items()
        for target in transition.targets
    }
    assert drawn == declared
    picture = ElementTree.fromstring(FILES[f"{machine.name}.svg"])
    words = " ".join(text for text in picture.itertext())
    assert all(state.value in words for state in machine.states)
    assert all(event in words for _, _, event in declared)
