"""Prefill engines that a decode rank is to meet before a request needs them, by where they are.

    pausing   it is asked after a pause, at first at once
    asking    who is there? In flight
    meeting   an engine has said who it is, and is being connected
    met       it is connected
    own       it is this engine itself, which fleets name that all have one configuration

An operator or a router names places, not engines: an engine id may be drawn at each start. So the side channel of each
place is asked first; engines with this connector say there who they are and how many ranks they have, which is what a
request would have said. A built-in engine does not say its sizes, so it cannot be met before a request that does: it is
asked again now and then, because another engine may take its place.

Whatever fails is tried again, after a pause that doubles, and said once until the engine has been met. Ranks that lose
an engine together do not come back to it together: their pauses differ. An engine whose
connection is lost is met again: it, or the one that has taken its place. No engine that is connected is given up for
one that nobody has asked for yet (`roster.py`), and requests do not wait for any of this: a request for an engine that
is being met shares the handshake, as requests share theirs.

Whoever reaches the control socket may name places. Said again and again, a place is asked as often as its first pause
allows. One that only a tool has named is forgotten when nobody could be met there for `forget_ns`; and where PLACES_MAX
are known, a new one displaces the one that was unmet for longest. Places of an option are kept, and so are engines that
are met.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, TypeAlias, assert_never

import msgspec

from statemachine.deadlines import Deadlines
from statemachine.failures import Failure
from statemachine.kernel import NO_EFFECTS, Effect, Event, Machine, MachineState, pairs, to
from statemachine.pauses import doubled_ns, spread_ns

PLACES_MAX = 256

Place: TypeAlias = str
"""host:port of a side channel."""
Problem: TypeAlias = Failure | str
"""Why an attempt failed; a sentence for people where no failure has a type for it."""
Engine: TypeAlias = Hashable
"""What is known of an engine that has answered; opaque to the core, but for being equal to itself."""


class State(MachineState):
    PAUSING = "pausing"
    ASKING = "asking"
    MEETING = "meeting"
    MET = "met"
    OWN = "own"


class Introduction(msgspec.Struct, frozen=True, kw_only=True):
    """Value of the machine.

    Attributes:
        failures: attempts that failed in a row.
        engine: that answered last.
        problem: why the last attempt failed; None since it was met.
    """

    place: Place
    state: State = State.PAUSING
    failures: int = 0
    engine: Engine | None = None
    problem: Problem | None = None


class PauseOver(Event, frozen=True, kw_only=True):
    """It is to be asked now."""


class Answered(Event, frozen=True, kw_only=True):
    """This engine is there. `is_own`: it is the one that asks. `is_connected`: it is connected already."""

    place: Place
    engine: Engine
    is_own: bool = False
    is_connected: bool = False


class Failed(Event, frozen=True, kw_only=True):
    """Nobody is there who can be met, or it could not be connected in time."""

    place: Place
    problem: Problem


class Connected(Event, frozen=True, kw_only=True):
    """The engine that answered is connected, because of this or of a request."""


class Lost(Event, frozen=True, kw_only=True):
    """Its connection has ended."""


class AskWho(Effect, frozen=True, kw_only=True):
    """Ask the side channel who is there; feed Answered or Failed."""

    place: Place


class Meet(Effect, frozen=True, kw_only=True):
    """Connect this engine, unless it is; feed EngineConnected when it has been. If it is not in time, the core sees it
    by itself."""

    place: Place
    engine: Any


class SayForgotten(Effect, frozen=True, kw_only=True):
    """For people: it is not asked again until it is named again."""

    place: Place
    unmet_ns: int


class StartPause(Effect, frozen=True, kw_only=True):
    """Feed PauseOver after a pause that grows with `failures`."""

    failures: int


class SayFailed(Effect, frozen=True, kw_only=True):
    """For people: once until it has been met."""

    place: Place
    problem: Problem


Effects: TypeAlias = tuple[AskWho | Meet | StartPause | SayFailed, ...]

CoreEffect: TypeAlias = AskWho | Meet | SayFailed | SayForgotten


def _ask(value: Introduction, event: PauseOver) -> tuple[Introduction, Effects]:
    return msgspec.structs.replace(value, state=State.ASKING), (AskWho(place=value.place),)


def _meet(value: Introduction, event: Answered) -> tuple[Introduction, Effects]:
    if event.is_own:
        return msgspec.structs.replace(value, state=State.OWN, engine=None, problem=None), NO_EFFECTS
    meeting = msgspec.structs.replace(value, state=State.MEETING, engine=event.engine)
    return meeting, (Meet(place=value.place, engine=event.engine),)


def _pause(value: Introduction, event: Failed) -> tuple[Introduction, Effects]:
    failures = value.failures + 1
    paused = msgspec.structs.replace(value, state=State.PAUSING, failures=failures, problem=event.problem)
    effects: Effects = (StartPause(failures=failures),)
    if value.problem is None:
        effects = (*effects, SayFailed(place=value.place, problem=event.problem))
    return paused, effects


def _be_met(value: Introduction, event: Connected) -> tuple[Introduction, Effects]:
    return msgspec.structs.replace(value, state=State.MET, failures=0, problem=None), NO_EFFECTS


def _lose(value: Introduction, event: Lost) -> tuple[Introduction, Effects]:
    return msgspec.structs.replace(value, state=State.PAUSING), (StartPause(failures=1),)


_PAUSING, _ASKING, _MEETING, _MET, _OWN = State.PAUSING, State.ASKING, State.MEETING, State.MET, State.OWN

MACHINE: Machine[Introduction, Effects] = Machine(
    name="introduction",
    states=State,
    initial=_PAUSING,
    terminal=frozenset({_OWN}),
    events=(PauseOver, Answered, Failed, Connected, Lost),
    table={
        (_PAUSING, PauseOver): to(_ask, _ASKING),
        (_PAUSING, Connected): to(_be_met, _MET),
        (_ASKING, Answered): to(_meet, _MEETING, _OWN),
        (_ASKING, Failed): to(_pause, _PAUSING),
        (_MEETING, Connected): to(_be_met, _MET),
        (_MEETING, Failed): to(_pause, _PAUSING),
        (_MET, Lost): to(_lose, _PAUSING),
    },
    ignored={
        **pairs((_ASKING,), (Connected, Lost), "who is there now is being asked"),
        **pairs((_PAUSING, _MEETING), (Lost,), "the attempt that is due, or in flight, finds out"),
        **pairs((_MET,), (Connected,), "it is connected again before the end of the last connection was told"),
        **pairs((_MET, _PAUSING), (Failed,), "a timer of an attempt that has ended since"),
        **pairs((_ASKING, _MEETING, _MET), (PauseOver,), "a timer of a pause that has ended otherwise"),
    },
    impossible=pairs((_PAUSING, _MEETING, _MET), (Answered,), "nobody was asked"),
)


# --- the core of a rank: all of its introductions ---------------------------------------------------------------------


class Named(Event, frozen=True, kw_only=True):
    """The engines at these places are to be met. `is_kept`: the places are never forgotten."""

    places: tuple[Place, ...]
    is_kept: bool = False


class EngineConnected(Event, frozen=True, kw_only=True):
    """An engine is connected, whoever wanted it."""

    engine: Engine


class EngineLost(Event, frozen=True, kw_only=True):
    """The connection of an engine has been taken back."""

    engine: Engine


class EngineNotMet(Event, frozen=True, kw_only=True):
    """An attempt to connect an engine has failed, whoever wanted it, or was not made."""

    engine: Engine
    failure: Failure


MEETING_TIMEOUTS = 4
"""Handshake timeouts that an engine may take to be connected: questions about its first rank and about the others, its
control sockets, the first READs."""


class IntroductionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Durations in nanoseconds.

    Attributes:
        pause_first_ns, pause_max_ns: between two attempts; it doubles.
        handshake_ns: how long one question of a handshake may take.
        forget_ns: that a place which no option names may be unmet; None: for ever.
    """

    pause_first_ns: int
    pause_max_ns: int
    handshake_ns: int
    forget_ns: int | None = None


class Introductions:
    """All of a rank. Sans I/O: `handle` and `advance` return what to do, in order. See the module's docstring.

    Its events are Named, EngineConnected, EngineLost and EngineNotMet, and of the machine those that name a place:
    Answered, Failed.

    Args:
        identity: of the rank; it decides where in a range its pauses end (`pauses.spread_ns`).
    """

    def __init__(self, limits: IntroductionLimits, identity: str = "") -> None:
        self._limits = limits
        self._identity = identity
        self._values: dict[Place, Introduction] = {}
        # Places whose engine is this one; never empty.
        self._of_engine: dict[Engine, set[Place]] = {}
        self._kept: set[Place] = set()
        # Since when a place pauses that was asked before.
        self._pausing_since_ns: dict[Place, int] = {}
        # Since when a place is unmet, or when it was named again after that; of those that may be forgotten. Own ones
        # are in here too: they can be displaced, and have no timer that would end them.
        self._unmet_since_ns: dict[Place, int] = {}
        # Pauses of places that pause, and bounds of those that meet.
        self._timers: Deadlines[Place] = Deadlines()
        self._effects: list[CoreEffect] = []

    def values(self) -> tuple[Introduction, ...]:
        return tuple(self._values.values())

    def get(self, place: Place) -> Introduction | None:
        return self._values.get(place)

    def next_deadline(self) -> int | None:
        return self._timers.next_ns()

    def handle(self, event: Event, now_ns: int) -> list[CoreEffect]:
        """Take one event in; returns what to do, in order."""
        match event:
            case Named():
                self._name(event, now_ns)
                return self.advance(now_ns)  # who is new is due
            case Answered(place=place) | Failed(place=place):
                self._step(place, event, now_ns)
                if isinstance(event, Answered) and event.is_connected:
                    self._tell(event.engine, Connected(), now_ns)
            case EngineConnected(engine=engine):
                self._tell(engine, Connected(), now_ns)
            case EngineLost(engine=engine):
                self._tell(engine, Lost(), now_ns)
            case EngineNotMet(engine=engine, failure=failure):
                for place in self._places_of(engine):
                    if self._values[place].state is State.MEETING:  # others did not ask for this attempt
                        self._step(place, Failed(place=place, problem=failure), now_ns)
            case _:
                raise TypeError(f"{type(event).__name__} is not an event of this core")
        return self._take_effects()

    def _name(self, named: Named, now_ns: int) -> None:
        """One that waits is asked as soon as a first pause would be over."""
        for place in named.places:
            if (known := self._values.get(place)) is None:
                if not self._has_room(now_ns):
                    continue
                self._values[place] = Introduction(place=place)
                self._timers.set(place, now_ns)
            elif (paused_ns := self._pausing_since_ns.get(place)) is not None:
                self._timers.set(place, max(now_ns, paused_ns + self._limits.pause_first_ns))
            if named.is_kept:
                self._kept.add(place)
                self._unmet_since_ns.pop(place, None)
            elif known is None or place in self._unmet_since_ns:
                self._unmet_since_ns[place] = now_ns

    def _has_room(self, now_ns: int) -> bool:
        """Whether another place may be known; makes room where that costs nothing that works."""
        if len(self._values) < PLACES_MAX:
            return True
        idle = [place for place in self._unmet_since_ns if self._values[place].state in (State.PAUSING, State.OWN)]
        longest = min(idle, key=lambda place: self._unmet_since_ns[place], default=None)
        if longest is None or self._unmet_since_ns[longest] >= now_ns:
            return False
        self._forget(longest, now_ns)
        return True

    def _forget(self, place: Place, now_ns: int) -> None:
        """`place` pauses, or is this engine's own."""
        value = self._values.pop(place)
        if value.engine is not None:
            self._index(place, value.engine, None)
        self._timers.cancel(place)
        self._pausing_since_ns.pop(place, None)
        self._effects.append(SayForgotten(place=place, unmet_ns=now_ns - self._unmet_since_ns.pop(place)))

    def advance(self, now_ns: int) -> list[CoreEffect]:
        """Ask whose pause is over; give up what takes too long; forget who was not met for too long."""
        while (place := self._timers.take_due(now_ns)) is not None:
            if self._values[place].state is State.MEETING:
                self._step(place, Failed(place=place, problem=NOT_CONNECTED), now_ns)
            elif self._is_over(place, now_ns):
                self._forget(place, now_ns)
            else:
                self._step(place, PauseOver(), now_ns)
        return self._take_effects()

    def _is_over(self, place: Place, now_ns: int) -> bool:
        since_ns, forget_ns = self._unmet_since_ns.get(place), self._limits.forget_ns
        return since_ns is not None and forget_ns is not None and now_ns - since_ns >= forget_ns

    def _tell(self, engine: Engine, event: Event, now_ns: int) -> None:
        for place in self._places_of(engine):
            self._step(place, event, now_ns)

    def _places_of(self, engine: Engine) -> list[Place]:
        return sorted(self._of_engine.get(engine, ()))

    def _step(self, place: Place, event: Event, now_ns: int) -> None:
        before = self._values[place]
        after, effects = MACHINE.step(before, event)
        self._values[place] = after
        if after.engine != before.engine:
            self._index(place, before.engine, after.engine)
        if after.state is not before.state:
            self._timers.cancel(place)
            self._note_state(place, after.state, now_ns)
        for effect in effects:
            match effect:
                case StartPause(failures=failures):
                    pause_ns = doubled_ns(self._limits.pause_first_ns, self._limits.pause_max_ns, failures - 1)
                    self._timers.set(place, now_ns + spread_ns(pause_ns, self._identity, place, failures))
                case Meet():
                    self._timers.set(place, now_ns + MEETING_TIMEOUTS * self._limits.handshake_ns)
                    self._effects.append(effect)
                case AskWho() | SayFailed():
                    self._effects.append(effect)
                case _:
                    assert_never(effect)

    def _note_state(self, place: Place, state: State, now_ns: int) -> None:
        """It has come into this one."""
        self._pausing_since_ns.pop(place, None)
        if state is State.PAUSING:
            self._pausing_since_ns[place] = now_ns
        if state is State.MET:
            self._unmet_since_ns.pop(place, None)
        elif place not in self._kept:
            self._unmet_since_ns.setdefault(place, now_ns)

    def _index(self, place: Place, before: Engine | None, after: Engine | None) -> None:
        if before is not None:
            self._of_engine[before].discard(place)
            if not self._of_engine[before]:
                del self._of_engine[before]
        if after is not None:
            self._of_engine.setdefault(after, set()).add(place)

    def _take_effects(self) -> list[CoreEffect]:
        effects, self._effects = self._effects, []
        return effects


NOT_CONNECTED = "it answers, and was not connected in time"
