"""The sequence diagrams in the repository are what the simulator plays, and between them they show every way to end."""

from __future__ import annotations

from pathlib import Path

import pytest

from statemachine import lease, request
from tests.simulation.sequences import STORIES, Story, draw

DIRECTORY = Path(__file__).parents[2] / "diagrams" / "sequences"
DRAWN = {story.name: draw(story) for story in STORIES}


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name)
def test_the_file_is_up_to_date(story: Story) -> None:
    assert (DIRECTORY / f"{story.name}.mmd").read_text() == DRAWN[story.name], "run `make diagrams`"


def test_there_are_no_others() -> None:
    assert {path.stem for path in DIRECTORY.iterdir()} == DRAWN.keys()


def test_the_architecture_shows_the_plain_one() -> None:
    page = (DIRECTORY.parents[1] / "docs" / "architecture.md").read_text()
    assert DRAWN["plain"] in page, "run `make diagrams`, and copy it"


def test_a_story_is_played_the_same_every_time() -> None:
    assert draw(STORIES[0]) == DRAWN[STORIES[0].name]


def test_every_state_of_a_request_is_entered_in_one_of_them() -> None:
    everything = "".join(DRAWN.values())
    for state in (*request.State, lease.State.HELD, lease.State.DONE, lease.State.EXPIRED):
        assert f"→ {state.value} (" in everything, state
