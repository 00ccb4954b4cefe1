"""What a machine is: states, events, effects, and one table.

A machine is declared once, as data: the enum of its states, its event types, and for every pair (state, event type)
exactly one of

* a `Transition`: a pure handler `(value, event) -> (value', effects)` and the states that it may lead to,
* an entry in `ignored`: the event means nothing here, with the reason,
* an entry in `impossible`: the shell must never let this happen, with the reason.

The kernel checks at import that the table is total, that terminal states absorb (every event in them is ignored) and
that every state can be reached. So a new event cannot be added without saying what it does in every state, and the
diagrams and the model checker read the same table that production runs.

The instance of a machine is a frozen value with a field `state`. `step` never changes it: an illegal event raises
`ProtocolError` and leaves the value as it was, so that the shell can fail that one subject and nothing else.

Effects are data too. The shell executes them in order, after it has stored the new value.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Something that happened. Time enters machines only as a field of an event."""


class Effect(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Something that the shell must do."""


class MachineState(enum.Enum):
    """Base of the enums of states. Members are hashed by identity, in C: every step looks two of them up, and the hash
    of `enum.Enum` is a Python function that costs a third of the step. `text` is the value, without the property that
    `value` is."""

    __hash__ = object.__hash__

    def __init__(self, text: str) -> None:
        self.text = text


class Value(Protocol):
    """The value of a machine instance: frozen, with its state in the field `state`."""

    @property
    def state(self) -> enum.Enum: ...


V = TypeVar("V", bound=Value)
Effects = tuple[Effect, ...]
E = TypeVar("E", bound=Effects)
Handler = Callable[[Any, Any], tuple[Any, Any]]
Pair = tuple[enum.Enum, type[Event]]

NO_EFFECTS: Any = ()
"""Whatever the effects of a machine are, it may have none."""


class ProtocolError(Exception):
    """An event arrived in a state in which it is declared impossible. The value is unchanged."""

    def __init__(self, machine: str, state: str, event: str, why_impossible: str) -> None:
        super().__init__(f"{machine}: {event} in state {state} is impossible ({why_impossible})")
        self.machine = machine
        self.state = state
        self.event = event
        self.why_impossible = why_impossible


class TableError(Exception):
    """A machine's declaration is wrong. Raised at import, lists every defect."""

    def __init__(self, machine: str, defects: list[str]) -> None:
        super().__init__(f"machine {machine}:\n  " + "\n  ".join(defects))
        self.machine = machine
        self.defects = defects


@dataclass(frozen=True, slots=True)
class Transition:
    """A handler and the states it may lead to (the diagram's arrows)."""

    handler: Handler
    targets: frozenset[enum.Enum]


def to(handler: Handler, *targets: enum.Enum) -> Transition:
    """Entry of a table: `handler` leads to one of `targets`."""
    return Transition(handler, frozenset(targets))


def pairs(states: Iterable[enum.Enum], events: Iterable[type[Event]], reason: str) -> dict[Pair, str]:
    """Entries of `ignored` or `impossible`: every one of `events` in every one of `states`, for one reason."""
    event_types = tuple(events)
    return {(state, event): reason for state in states for event in event_types}


TERMINAL_REASON = "terminal states absorb"


class Machine(Generic[V, E]):
    """A checked declaration. `step` is the only way to run it. `V` is its value; `E` lists its effects, so that whoever
    executes them can show that none is left out.

    Args:
        name: as it appears in traces and diagrams.
        states: enum of all states; `initial` is where a value starts, `terminal` where it ends.
        events: every event type of the machine.
        table, ignored, impossible: see the module's docstring. Entries for terminal states are made by the kernel.

    Raises:
        TableError: when the declaration is not total or not sound.
    """

    def __init__(
        self,
        *,
        name: str,
        states: type[enum.Enum],
        initial: enum.Enum,
        terminal: frozenset[enum.Enum],
        events: tuple[type[Event], ...],
        table: Mapping[Pair, Transition],
        ignored: Mapping[Pair, str],
        impossible: Mapping[Pair, str],
    ) -> None:
        self.name = name
        self.states = states
        self.initial = initial
        self.terminal = terminal
        self.events = events
        self.table = dict(table)
        self.ignored = dict(ignored) | pairs(terminal, events, TERMINAL_REASON)
        self.impossible = dict(impossible)
        defects = self._defects(declared_ignored=ignored)
        if defects:
            raise TableError(name, defects)

    def step(self, value: V, event: Event) -> tuple[V, E]:
        """The next value and what to do. Pure.

        Raises:
            ProtocolError: the pair is declared impossible, or the event is not one of this machine's.
        """
        pair = (value.state, event.__class__)
        transition = self.table.get(pair)
        if transition is not None:
            result: tuple[V, E] = transition.handler(value, event)
            if result[0].state in transition.targets:
                return result
            raise ProtocolError(
                self.name,
                value.state.value,
                type(event).__name__,
                f"its handler led to {result[0].state.value}, which the table does not allow",
            )
        if pair in self.ignored:
            return value, NO_EFFECTS
        reason = self.impossible.get(pair, "not an event of this machine")
        raise ProtocolError(self.name, value.state.value, type(event).__name__, reason)

    def is_terminal(self, value: V) -> bool:
        return value.state in self.terminal

    def _defects(self, *, declared_ignored: Mapping[Pair, str]) -> list[str]:
        defects: list[str] = []
        all_pairs = {(state, event) for state in self.states for event in self.events}
        for state, event in sorted(all_pairs, key=lambda pair: (pair[0].value, pair[1].__name__)):
            pair = (state, event)
            where = [
                kind
                for kind, entries in (("table", self.table), ("ignored", self.ignored), ("impossible", self.impossible))
                if pair in entries
            ]
            if len(where) != 1:
                found = " and ".join(where) if where else "nowhere"
                defects.append(f"({state.value}, {event.__name__}) must be declared once, found {found}")
        for state, event in (*self.table, *self.ignored, *self.impossible):
            if (state, event) not in all_pairs:
                defects.append(f"({state}, {event}) is not a pair of this machine")
        for state, event in declared_ignored:
            if state in self.terminal:
                defects.append(f"({state.value}, {event.__name__}): terminal states are ignored by the kernel")
        for (state, event), transition in self.table.items():
            if not transition.targets:
                defects.append(f"({state.value}, {event.__name__}) leads nowhere")
        defects.extend(f"state {state.value} cannot be reached" for state in self._unreachable())
        return defects

    def _unreachable(self) -> list[enum.Enum]:
        reached = {self.initial}
        frontier = [self.initial]
        while frontier:
            state = frontier.pop()
            for (source, _), transition in self.table.items():
                if source is state:
                    fresh = transition.targets - reached
                    reached |= fresh
                    frontier.extend(fresh)
        return [state for state in self.states if state not in reached]
