"""The kernel: a wrong declaration is refused with every defect named, and `step` never does what the table forbids.

A small machine (a door) is declared right once; each test breaks one thing about it. The second half looks at the
production machines as tables: reasons, reachability of an end, absorption.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec
import pytest

from statemachine import hold, lease, peer, request
from statemachine.kernel import (
    NO_EFFECTS,
    TERMINAL_REASON,
    Effect,
    Effects,
    Event,
    Machine,
    ProtocolError,
    TableError,
    Transition,
    pairs,
    to,
)


class State(enum.Enum):
    CLOSED = "closed"
    OPEN = "open"
    BROKEN = "broken"


class OtherState(enum.Enum):
    CLOSED = "closed"


class Pushed(Event, frozen=True, kw_only=True):
    """Opens a closed door; breaks an open one when `force` is enough."""

    force: int = 1


class Pulled(Event, frozen=True, kw_only=True):
    """Closes an open door."""


class Painted(Event, frozen=True, kw_only=True):
    """Changes nothing."""


class NotDeclared(Event, frozen=True, kw_only=True):
    """Belongs to no machine."""


class Ring(Effect, frozen=True, kw_only=True):
    """Something to do."""


class Door(msgspec.Struct, frozen=True, kw_only=True):
    state: State = State.CLOSED
    uses: int = 0


def _push(door: Door, event: Pushed) -> tuple[Door, Effects]:
    state = State.BROKEN if event.force > 1 else State.OPEN
    return Door(state=state, uses=door.uses + 1), (Ring(),)


def _pull(door: Door, event: Pulled) -> tuple[Door, Effects]:
    return Door(state=State.CLOSED, uses=door.uses + 1), NO_EFFECTS


TABLE = {
    (State.CLOSED, Pushed): to(_push, State.OPEN, State.BROKEN),
    (State.OPEN, Pulled): to(_pull, State.CLOSED),
}
IGNORED = pairs((State.CLOSED, State.OPEN), (Painted,), "paint does not move a door")
IMPOSSIBLE = {
    (State.CLOSED, Pulled): "it is closed already",
    (State.OPEN, Pushed): "it is open already",
}


def declare(**changes: Any) -> Machine[Door, Effects]:
    """The door, with parts of its declaration replaced."""
    declaration: dict[str, Any] = {
        "name": "door",
        "states": State,
        "initial": State.CLOSED,
        "terminal": frozenset({State.BROKEN}),
        "events": (Pushed, Pulled, Painted),
        "table": TABLE,
        "ignored": IGNORED,
        "impossible": IMPOSSIBLE,
    }
    return Machine(**(declaration | changes))


def defects(**changes: Any) -> list[str]:
    with pytest.raises(TableError) as caught:
        declare(**changes)
    assert caught.value.machine == "door"
    for defect in caught.value.defects:
        assert defect in str(caught.value)  # whoever reads the traceback sees all of them
    return caught.value.defects


def without(entries: Any, *keys: Any) -> dict[Any, Any]:
    return {pair: entry for pair, entry in entries.items() if pair not in keys}


# --- declarations ---------------------------------------------------------------------------------------------------


def test_the_sound_declaration_is_accepted() -> None:
    door = declare()
    assert door.initial is State.CLOSED
    assert door.ignored[(State.BROKEN, Pushed)] == TERMINAL_REASON


@pytest.mark.parametrize(
    ("part", "pair"),
    [
        ("table", (State.OPEN, Pulled)),
        ("ignored", (State.OPEN, Painted)),
        ("impossible", (State.OPEN, Pushed)),
    ],
)
def test_a_missing_pair_is_named(part: str, pair: tuple[State, type[Event]]) -> None:
    declared = {"table": TABLE, "ignored": IGNORED, "impossible": IMPOSSIBLE}[part]
    found = defects(**{part: without(declared, pair)})
    assert f"({pair[0].value}, {pair[1].__name__}) must be declared once, found nowhere" in found


@pytest.mark.parametrize(
    ("part", "entry", "found"),
    [
        ("ignored", {(State.OPEN, Pulled): "twice"}, "table and ignored"),
        ("impossible", {(State.OPEN, Pulled): "twice"}, "table and impossible"),
        ("impossible", {(State.OPEN, Painted): "twice"}, "ignored and impossible"),
    ],
)
def test_a_pair_declared_twice_is_named_with_both_places(
    part: str, entry: dict[tuple[State, type[Event]], str], found: str
) -> None:
    both: dict[str, dict[Any, str]] = {"ignored": dict(IGNORED), "impossible": dict(IMPOSSIBLE)}
    declared = both[part]
    ((state, event),) = entry
    expected = f"({state.value}, {event.__name__}) must be declared once, found {found}"
    assert defects(**{part: {**declared, **entry}}) == [expected]


@pytest.mark.parametrize("part", ["table", "ignored", "impossible"])
@pytest.mark.parametrize("pair", [(OtherState.CLOSED, Pushed), (State.CLOSED, NotDeclared)])
def test_a_pair_of_another_machine_is_named(part: str, pair: tuple[enum.Enum, type[Event]]) -> None:
    declared: dict[str, dict[Any, Any]] = {"table": dict(TABLE), "ignored": dict(IGNORED), "impossible": IMPOSSIBLE}
    entry = to(_pull, State.CLOSED) if part == "table" else "foreign"
    found = defects(**{part: declared[part] | {pair: entry}})
    assert found == [f"({pair[0]}, {pair[1]}) is not a pair of this machine"]


def test_a_terminal_state_may_have_no_entry_of_its_own() -> None:
    pair = (State.BROKEN, Pushed)
    assert defects(table={**TABLE, pair: to(_push, State.OPEN)}) == [
        "(broken, Pushed) must be declared once, found table and ignored"
    ]
    assert defects(impossible={**IMPOSSIBLE, pair: "it is broken"}) == [
        "(broken, Pushed) must be declared once, found ignored and impossible"
    ]
    assert defects(ignored={**IGNORED, pair: "it is broken"}) == [
        "(broken, Pushed): terminal states are ignored by the kernel"
    ]


def test_a_transition_that_leads_nowhere_is_named() -> None:
    nowhere = {**TABLE, (State.OPEN, Pulled): Transition(_pull, frozenset())}
    assert defects(table=nowhere) == ["(open, Pulled) leads nowhere"]


def test_an_unreachable_state_is_named() -> None:
    assert defects(table={**TABLE, (State.CLOSED, Pushed): to(_push, State.OPEN)}) == ["state broken cannot be reached"]


def test_states_that_only_reach_each_other_are_unreachable() -> None:
    # From broken nothing leads on, so with broken as the only target of closed, open is an island.
    assert defects(table={**TABLE, (State.CLOSED, Pushed): to(_push, State.BROKEN)}) == ["state open cannot be reached"]


def test_all_defects_are_listed_at_once() -> None:
    found = defects(
        table={(State.CLOSED, Pushed): to(_push, State.OPEN), (State.OPEN, Pulled): Transition(_pull, frozenset())},
        impossible={},
    )
    assert found == [
        "(closed, Pulled) must be declared once, found nowhere",
        "(open, Pushed) must be declared once, found nowhere",
        "(open, Pulled) leads nowhere",
        "state broken cannot be reached",
    ]


# --- step -----------------------------------------------------------------------------------------------------------


def test_a_transition_yields_a_new_value_and_effects_and_leaves_the_old_value() -> None:
    before = Door()
    after, effects = declare().step(before, Pushed())
    assert after == Door(state=State.OPEN, uses=1)
    assert effects == (Ring(),)
    assert before == Door()


def test_an_ignored_event_returns_the_very_same_value() -> None:
    # Identity matters: the shell records a transition when the value is another one.
    before = Door(state=State.OPEN, uses=3)
    after, effects = declare().step(before, Painted())
    assert after is before
    assert effects == ()


def test_an_impossible_event_raises_the_declared_reason_and_leaves_the_value() -> None:
    before = Door(state=State.OPEN, uses=3)
    with pytest.raises(ProtocolError, match="it is open already") as caught:
        declare().step(before, Pushed())
    error = caught.value
    assert (error.machine, error.state, error.event) == ("door", "open", "Pushed")
    assert error.why_impossible == "it is open already"
    assert before == Door(state=State.OPEN, uses=3)


def test_an_event_of_another_machine_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="not an event of this machine"):
        declare().step(Door(), NotDeclared())
    with pytest.raises(ProtocolError, match="not an event of this machine"):
        declare().step(Door(state=State.BROKEN), NotDeclared())


def test_a_handler_that_leads_where_the_table_does_not_allow_is_stopped() -> None:
    before = Door(uses=7)
    door = declare(
        table={
            (State.CLOSED, Pushed): to(_push, State.OPEN),
            (State.OPEN, Pulled): to(_pull, State.CLOSED, State.BROKEN),
        }
    )
    with pytest.raises(ProtocolError, match="led to broken, which the table does not allow"):
        door.step(before, Pushed(force=2))
    assert before == Door(uses=7)


def test_a_terminal_state_absorbs_every_event() -> None:
    door, broken = declare(), Door(state=State.BROKEN)
    assert door.is_terminal(broken)
    assert not door.is_terminal(Door())
    for event in (Pushed(), Pulled(), Painted()):
        assert door.step(broken, event) == (broken, ())


# --- the production machines as tables ------------------------------------------------------------------------------

MACHINES: list[Machine[Any, Any]] = [hold.MACHINE, lease.MACHINE, peer.MACHINE, request.MACHINE]
each_machine = pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)


@each_machine
def test_every_reason_says_something(machine: Machine[Any, Any]) -> None:
    for reason in (*machine.ignored.values(), *machine.impossible.values()):
        assert len(reason.split()) >= 3


@each_machine
def test_every_event_means_something_somewhere(machine: Machine[Any, Any]) -> None:
    assert {event for _, event in machine.table} == set(machine.events)


@each_machine
def test_targets_are_states_of_the_machine(machine: Machine[Any, Any]) -> None:
    for transition in machine.table.values():
        assert transition.targets <= set(machine.states)


@each_machine
def test_every_state_has_a_way_to_an_end(machine: Machine[Any, Any]) -> None:
    ends = set(machine.terminal)
    while True:
        before = len(ends)
        ends |= {state for (state, _), transition in machine.table.items() if transition.targets & ends}
        if len(ends) == before:
            break
    assert ends == set(machine.states)


@each_machine
def test_events_are_frozen_and_told_apart_by_their_tag(machine: Machine[Any, Any]) -> None:
    names = [event.__name__ for event in machine.events]
    assert len(set(names)) == len(names)
    for event in machine.events:
        config = event.__struct_config__
        assert config.frozen
        assert config.tag == event.__name__
