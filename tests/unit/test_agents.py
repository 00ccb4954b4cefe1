"""Who stands on shared agents: every order of loads, answers and ends, with a few owners of one agent."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator

import pytest

from statemachine.agents import Agents, Loaded, Remove, TellLost, TellOver
from statemachine.failures import TransferError

LOST = TransferError(peer="p", operation="READ", error="lost", transport_lost=True)
NAME = "p"

Step = tuple[str, int]


class World:
    """NIXL, which does what it is told in order and answers whenever it likes, and owners of one agent.

    Each time that NIXL loads the agent afresh is an incarnation, with a number.
    """

    def __init__(self, loads: list[int]) -> None:
        self.agents = Agents()
        self.incarnation = 0
        self.is_loaded = False
        self.told: deque[tuple[str, int]] = deque()  # what NIXL has not come to
        self.loading: dict[int, tuple[int, int | None]] = {}  # the owner of a load, and what NIXL has loaded
        self.removing: dict[int, tuple[tuple[int, int], ...]] = {}  # by incarnation, who waits for its removal
        self.removed: set[int] = set()
        self.stands: dict[int, int] = {}  # by owner, on which incarnation
        self.lost: set[int] = set()  # incarnations that somebody has given up
        self.waits: set[tuple[int, int]] = (
            set()
        )  # who has let go of which incarnation, and was not told that it is over
        self.left = list(loads)  # by owner

    def steps(self) -> Iterator[Step]:
        yield from (("load", owner) for owner, left in enumerate(self.left) if left)
        if self.told:
            yield "do", 0
        yield from (("answer", load) for load, (_, loaded) in self.loading.items() if loaded is not None)
        yield from (("confirm", each) for each in self.removing if each in self.removed)
        for owner in self.stands:
            yield "fail", owner
            yield "leave", owner

    def take(self, step: Step) -> None:
        kind, which = step
        getattr(self, kind)(which)

    # --- NIXL -------------------------------------------------------------------------------------------------------

    def do(self, _: int) -> None:
        kind, which = self.told.popleft()
        if kind == "add":
            if not self.is_loaded:
                self.is_loaded, self.incarnation = True, self.incarnation + 1
            self.loading[which] = self.loading[which][0], self.incarnation
        else:
            assert self.is_loaded
            assert self.incarnation not in self.stands.values(), "it is removed under somebody"
            assert which == self.incarnation
            self.is_loaded = False
            self.removed.add(which)

    # --- owners -----------------------------------------------------------------------------------------------------

    def load(self, owner: int) -> None:
        self.left[owner] -= 1
        self.begin(owner)

    def begin(self, owner: int) -> None:
        load = self.agents.begin_load()
        self.loading[load] = owner, None
        self.told.append(("add", load))

    def answer(self, load: int) -> None:
        owner, loaded = self.loading.pop(load)
        assert loaded is not None
        result = self.agents.end_load(load, NAME, owner)
        if result is Loaded.AGAIN:
            assert loaded in self.removed or loaded in self.removing, "nothing is wrong with it"
            self.begin(owner)
        elif result is Loaded.REFUSED:
            assert owner in self.stands or loaded in self.lost, "nothing is wrong with it"
        else:
            assert owner not in self.stands
            assert loaded not in self.lost, "what has failed over it may go on"
            assert self.is_loaded
            assert loaded == self.incarnation
            assert loaded not in self.removing
            self.stands[owner] = loaded

    def fail(self, owner: int) -> None:
        self.let_go(owner, is_lost=True)

    def leave(self, owner: int) -> None:
        self.let_go(owner, is_lost=False)

    def let_go(self, owner: int, *, is_lost: bool) -> None:
        incarnation = self.stands.pop(owner)
        others = {each for each, stands in self.stands.items() if stands == incarnation}
        is_news = is_lost and incarnation not in self.lost
        waits = owner, incarnation
        self.waits.add(waits)
        told: set[int] = set()
        for effect in self.agents.let_go(NAME, owner, LOST if is_lost else None, waits):
            match effect:
                case TellLost(agent=agent, owner=other, failure=failure):
                    assert (agent, failure) == (NAME, LOST)
                    assert other not in told
                    told.add(other)
                case TellOver(waiting=waiting):
                    assert others, "the last one waits for the removal"
                    assert not is_lost, "what has failed over it may go on"
                    assert waiting == waits
                    self.waits.remove(waits)
                case Remove(agent=agent, waiting=waiting):
                    assert agent == NAME
                    assert not others
                    self.told.append(("remove", incarnation))
                    self.removing[incarnation] = waiting
        assert told == (others if is_news else set())
        if is_lost:
            self.lost.add(incarnation)

    def confirm(self, incarnation: int) -> None:
        for waits in self.removing.pop(incarnation):
            assert waits[1] == incarnation
            self.waits.remove(waits)

    # --- the search -------------------------------------------------------------------------------------------------

    def check_end(self) -> None:
        """Nothing is under way."""
        assert self.is_loaded is bool(self.stands)
        assert {incarnation for _, incarnation in self.waits} <= set(self.stands.values()), "nobody tells it"
        assert self.agents.is_lost(NAME) is (not self.stands or self.incarnation in self.lost)

    def key(self) -> str:
        state = {name: value for name, value in vars(self).items() if name != "agents"}
        agents = self.agents
        known = [(name, list(each.owners), each.failure, list(each.waiting)) for name, each in agents._by_name.items()]
        return repr((state, known, agents._removed))


def search(loads: list[int]) -> int:
    first = World(loads)
    seen = {first.key()}
    open_ = [first]
    while open_:
        world = open_.pop()
        steps = list(world.steps())
        if not any(kind in ("do", "answer", "confirm") for kind, _ in steps):
            world.check_end()
        for step in steps:
            after = copy.deepcopy(world)
            after.take(step)
            key = after.key()
            if key not in seen:
                seen.add(key)
                open_.append(after)
    return len(seen)


@pytest.mark.parametrize("loads", [[2, 1], [1, 1, 1]])
def test_in_no_order_is_an_agent_removed_under_somebody_or_joined_after_a_failure_or_left_loaded(
    loads: list[int],
) -> None:
    """`loads`: how many, by owner."""
    assert search(loads) > 1000
