"""Which READs a look asks about: bounded, fair, and none twice."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from connector.ports.nixl import ReadHandle
from connector.ports.nixl_agent.looks import IN_TURN_MAX, OLDEST_MAX, Looks


def posted(agents: dict[str, int]) -> Looks:
    """So many READs from each agent, numbered through, in the order in which they were posted."""
    looks = Looks()
    handle = 0
    for agent, reads in agents.items():
        for _ in range(reads):
            looks.add(handle, (agent, False))
            handle += 1
    return looks


def look(looks: Looks, is_over: Callable[[ReadHandle], bool] = lambda _: False) -> list[ReadHandle]:
    """What one look asks about. Those that are over are gone afterwards."""
    asked = []
    for handle in looks.due():
        asked.append(handle)
        if is_over(handle):
            looks.remove(handle)
    assert len(set(asked)) == len(asked), "none twice"
    assert len(asked) <= OLDEST_MAX + IN_TURN_MAX
    return asked


@pytest.mark.parametrize("reads", [1, 2, IN_TURN_MAX])
def test_a_few_are_all_asked_about(reads: int) -> None:
    looks = posted({"p": reads})
    for _ in range(5):
        assert sorted(look(looks)) == list(range(reads))


@pytest.mark.parametrize("reads", [64, 2048])
def test_what_a_look_asks_does_not_grow_with_the_reads_of_an_agent(reads: int) -> None:
    looks = posted({"p": reads})
    for _ in range(100):
        assert len(look(looks)) == 1 + IN_TURN_MAX


@pytest.mark.parametrize("reads", [64, 2048])
def test_every_read_is_asked_about_in_a_round(reads: int) -> None:
    """However many stay in flight: one that ends out of order, or fails, is found."""
    looks = posted({"p": reads - 1, "q": 1})
    asked = {handle for _ in range(-(-reads // IN_TURN_MAX)) for handle in look(looks)}
    assert asked == set(range(reads))


def test_reads_that_are_posted_meanwhile_keep_nobody_waiting() -> None:
    looks = posted({"p": 2048})
    asked = set()
    for turn in range(2048 // IN_TURN_MAX):
        asked |= set(look(looks))
        for number in range(64):
            looks.add(10_000 + 64 * turn + number, ("p", False))
    assert asked >= set(range(2048))


def test_reads_that_end_in_order_are_found_in_order() -> None:
    looks = posted({"p": 2048})
    found: list[ReadHandle] = []
    for _ in range(-(-100 // OLDEST_MAX)):
        found += [handle for handle in look(looks, lambda handle: handle < 100) if handle < 100]
    assert found == list(range(100))


def test_an_agent_that_hangs_hides_nothing_of_others() -> None:
    looks = posted({"hangs": 2048, "p": 40, "q": 40})
    ends = range(2048, 2048 + 80)
    looks_made, found = 0, set[ReadHandle]()
    while len(found) < 80:
        looks_made += 1
        found |= set(look(looks, ends.__contains__)) & set(ends)
    assert looks_made <= 2 + -(-80 // OLDEST_MAX)


def test_the_oldest_of_each_of_many_agents_has_its_turn() -> None:
    agents = 10 * OLDEST_MAX
    looks = posted({f"p{number}": 100 for number in range(agents)})
    asked = {handle for _ in range(10) for handle in look(looks)[:OLDEST_MAX]}
    assert asked == {100 * number for number in range(agents)}


def test_an_agent_whose_reads_end_without_a_pause_takes_turns_with_others() -> None:
    looks = posted({"quick": 2048, "p": 1})
    assert 2048 not in look(looks, lambda handle: handle < 2048)[:OLDEST_MAX]
    assert look(looks)[0] == 2048


def test_probes_in_flight_do_not_hide_the_next_reads() -> None:
    """The probe of the first READ may have to wait for what was posted before it."""
    looks = posted({"p": 100})
    probed: list[ReadHandle] = []
    for _ in range(2):
        for handle in looks.due():
            if len(probed) < 40 and handle == len(probed):
                looks.move(handle, ("p", True))
                probed.append(handle)
    assert probed == list(range(40))
    # Of each line the oldest.
    assert set(look(looks)[:2]) == {0, 40}


def test_what_has_ended_leaves_nothing_behind() -> None:
    chance = random.Random(5)
    looks, alive = Looks(), set[ReadHandle]()
    for turn in range(2000):
        agent = f"p{chance.randrange(50)}"
        looks.add(turn, (agent, False))
        alive.add(turn)
        for handle in looks.due():
            assert handle in alive
            what = chance.random()
            if what < 0.02:
                looks.move(handle, (agent, True))
            elif what < 0.06:
                looks.remove(handle)
                alive.discard(handle)
    assert alive
    for handle in alive:
        looks.remove(handle)
    assert look(looks) == []
    assert not looks._lines
    assert not looks._line_of
