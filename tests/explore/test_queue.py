"""The search over what an engine's scheduler asks finds nothing wrong with the production core, and finds what is wrong
with broken ones, each of which has one rule replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import msgspec
import pytest

from statemachine import load
from statemachine.kernel import Event
from statemachine.load import AbortLoad, State
from statemachine.loads import (
    Allocated,
    Answer,
    Asked,
    Ended,
    Heard,
    LetGo,
    LoadEnded,
    Loads,
    Room,
    SayNoRoom,
    SayRoomFound,
    StepScheduled,
)
from tests.explore.queue import SETTINGS, Broken, Setting, search


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_nothing_is_wrong_with_the_production_core(setting: Setting) -> None:
    assert search(setting).states > 200


class Watched(Loads):
    """Notes what its machine goes through."""

    taken: ClassVar[set[tuple[State, str]]] = set()

    def _step(self, request_id: str, event: Event) -> None:
        before = self._loads.get(request_id)
        if before is not None:
            self.taken.add((before.state, type(event).__name__))
        super()._step(request_id, event)

    def copy(self) -> Watched:
        return _like(self, Watched(shares=self._shares))


def search_all(core: Callable[..., Loads]) -> None:
    for setting in SETTINGS:
        search(setting, core)


def test_every_transition_is_taken() -> None:
    search_all(Watched)
    every = {(state, event.__name__) for state, event in load.MACHINE.table}
    assert every - Watched.taken == NOT_TAKEN


NOT_TAKEN = {
    # Where all that was loaded is computed again, vLLM asks first.
    (State.FAILED, "Allocated"),
}


def _like(core: Loads, other: Any) -> Any:
    copied = Loads.copy(core)
    for name, value in vars(copied).items():
        setattr(other, name, value)
    return other


def broken(**methods: Callable[..., Any]) -> type[Loads]:
    """The core with these methods instead of its own."""
    made = type("BrokenLoads", (Loads,), methods)

    def copy(self: Loads) -> Any:
        return _like(self, made(shares=self._shares))

    made.copy = copy  # type: ignore[method-assign]
    return made


def _has_enough(core: Loads, asked: Asked) -> Answer:
    return Loads._answer(core, msgspec.structs.replace(asked, room=Room.ENOUGH))


def _is_never_behind(core: Loads, asked: Asked) -> Answer:
    if core._loads.get(asked.request_id) and core._loads[asked.request_id].state is State.FAILED:
        core._step(asked.request_id, load.Asked())
    return Loads._answer(core, asked)


def _lets_nobody_pass(core: Loads, is_kept: bool) -> None:
    Loads._begin_step(core, is_kept)
    core._lets_pass = False


def _goes_on_letting_pass(core: Loads, is_kept: bool) -> None:
    lets_pass = core._lets_pass
    Loads._begin_step(core, is_kept)
    core._lets_pass = core._lets_pass or lets_pass


def _loads_again(core: Loads, asked: Asked) -> Answer:
    answer = Loads._answer(core, asked)
    return Answer.LOAD if answer is Answer.COMPUTE and asked.request_id == "0" else answer


def _lets_go_early(core: Loads, ended: load.Load, after: State) -> None:
    """Although others want the lease."""
    if ended.lease is not None and not core._shares:
        core._effects.append(LetGo(source=ended.source))
    Loads._let_go(core, ended, after)


def _forgets_what_was_loaded(core: Loads, ended: load.Load, after: State) -> None:
    """They try, as after a load that was aborted."""
    Loads._let_go(core, ended, State.ENDED)


def _never_lets_go(core: Loads, ended: load.Load, after: State) -> None:
    Loads._let_go(core, ended, after)
    core._effects = [each for each in core._effects if not isinstance(each, LetGo)]


BROKEN = {
    "a failed load stands before those that have their blocks": broken(_answer=_is_never_behind),
    "what is kept from the pool is not looked at": broken(_answer=_has_enough),
    "a load lets nobody pass": broken(_begin_step=_lets_nobody_pass),
    "a load lets everybody pass for good": broken(_begin_step=_goes_on_letting_pass),
    "loads begin beside one that lacks room": broken(_are_suspended=property(lambda core: False)),
    "who has ended is not forgotten": broken(_leave_queue=lambda core, request_id: None),
    "what is read is read once more": broken(_answer=_loads_again),
    "samples are read side by side": broken(_is_waited_for=lambda core, lease: False),
    "what was let go of is read": broken(is_taken=lambda core, request_id: False),
    "what one has loaded is tried by others": broken(_let_go=_forgets_what_was_loaded),
    "the first one to end lets go": broken(_let_go=_lets_go_early),
    "nobody lets go": broken(_let_go=_never_lets_go),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_found(name: str) -> None:
    with pytest.raises(Broken, match=", after request"):
        search_all(BROKEN[name])


def test_a_request_whose_id_comes_again_has_ended() -> None:
    """vLLM refuses that; nothing is left of the former one all the same."""
    core = Loads(shares=True)
    heard = Heard(request_id="a", source=1)
    core.handle(heard, 0)
    core.handle(Allocated(request_id="a", loads=True), 0)
    assert AbortLoad(request_id="a") in core.handle(heard, 0)
    assert (list(core.queued), list(core.loading)) == (["a"], [])


@pytest.mark.parametrize("ending", [Allocated(request_id="a", loads=False), Ended(request_id="a")])
def test_who_has_its_blocks_or_has_ended_lacks_room_no_more(ending: Event) -> None:
    core = Loads(shares=True)
    asked = Asked(request_id="a", room=Room.TAKEN_BY_LENT_BACK, pays=False, num_tokens=40)
    assert core.ask(asked) == (Answer.LET_PASS, [SayNoRoom(request_id="a", num_tokens=40)])
    assert core.ask(asked) == (Answer.LET_PASS, [])
    assert core.waits_for_lent_back
    assert core.handle(ending, 0) == [SayRoomFound(request_id="a")]
    assert not core.waits_for_lent_back
    assert core.handle(Ended(request_id="a"), 0) == []


@pytest.mark.parametrize("has_blocks", [False, True])
def test_while_a_load_has_failed_others_wait_a_step_for_one_that_got_no_blocks_and_for_no_other(
    has_blocks: bool,
) -> None:
    core = Loads(shares=True)
    for name in ("failed", "first", "second"):
        core.handle(Heard(request_id=name, source=1), 0)
    core.handle(Allocated(request_id="failed", loads=True), 0)
    core.handle(LoadEnded(request_id="failed", has_failed=True), 0)
    assert core.ask(Asked(request_id="first", room=Room.ENOUGH, pays=True))[0] is Answer.LOAD
    if has_blocks:
        core.handle(Allocated(request_id="first", loads=True), 0)
    answers = []
    for _ in range(2):
        core.handle(StepScheduled(blocks_are_kept=False), 0)
        answers.append(core.ask(Asked(request_id="second", room=Room.ENOUGH, pays=True))[0])
    assert answers[0] is (Answer.LOAD if has_blocks else Answer.LET_PASS)
    assert answers[1] is (Answer.LET_PASS if has_blocks else Answer.LOAD)


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_who_comes_after_a_lease_has_served_all_others_reads_nothing_of_it(shares: bool, waits: bool) -> None:
    """Also where another one waited for the load: it is told when that ends, and who comes later knows nobody of it."""
    core = Loads(shares=shares)
    names = ["first", "other"] if waits and shares else ["first"]
    for name in names:
        core.handle(Heard(request_id=name, source=1, lease="l"), 0)
    core.handle(Allocated(request_id="first", loads=True), 0)
    core.handle(LoadEnded(request_id="first", has_failed=False), 0)
    assert [core.is_taken(name) for name in names[1:]] == [True] * len(names[1:])
    core.handle(Heard(request_id="late", source=1, lease="l"), 0)
    assert core.is_taken("late")
    assert core.ask(Asked(request_id="late", room=Room.ENOUGH, pays=True))[0] is Answer.COMPUTE


def test_what_one_has_loaded_is_taken_although_another_one_still_loads_it() -> None:
    """Two load it side by side when a load has failed before; the ranks let go of it with the first that succeeds."""
    core = Loads(shares=True)
    for name in ("failed", "first", "second"):
        core.handle(Heard(request_id=name, source=1, lease="l"), 0)
        core.handle(Allocated(request_id=name, loads=True), 0)
    core.handle(LoadEnded(request_id="failed", has_failed=True), 0)
    core.handle(LoadEnded(request_id="first", has_failed=False), 0)
    core.handle(Heard(request_id="late", source=1, lease="l"), 0)
    assert (list(core.loading), core.is_taken("late")) == (["second"], True)
