"""States of cores. Each distinct one is kept once, under a number, and each event is fed to it once.

Two cores whose `freeze` is equal behave alike, up to a shift of their clock. So the search keeps one of them with the
time at which it looks so, and all times that go in and come out are relative to now. A world can then name its cores by
numbers, and a step that was done before is a look into a table.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, TypeAlias

import msgspec

from statemachine import hold, lease, peer, request
from statemachine.kernel import Effect, Event
from statemachine.lending import Lending
from statemachine.remote_engine import (
    BlocksResolved,
    HoldAnswered,
    ReadEnded,
    RemoteEngine,
    ResolveBlocks,
    SendHold,
)
from statemachine.trace import StepSeen
from tests.observer import observer_of

Core: TypeAlias = RemoteEngine | Lending
Taken: TypeAlias = tuple[str, str, str]
"""(machine, state, event): one transition that was taken."""

BEGIN_NS = 1_000_000
"""Any time that is not near zero, so that nothing that matters lies before the clock's zero."""

MACHINES = {machine.name: machine for machine in (request.MACHINE, peer.MACHINE, hold.MACHINE, lease.MACHINE)}


class CoreBroken(Exception):
    """A core raised, or asks to be called again at once for ever."""


class Shelf:
    """See the module's docstring.

    Args:
        reads: how many READs a request needs.
        are_checked: whether what they leave is checked.
    """

    def __init__(self, reads: int, *, are_checked: bool) -> None:
        self._reads = reads
        self._are_checked = are_checked
        self._ids: dict[Hashable, int] = {}
        self._frozen: list[Any] = []
        self._cores: list[tuple[Core, int] | None] = []
        self._deadlines: list[int | None] = []
        self._stepped: dict[tuple[int, Event | None], tuple[int, tuple[Effect, ...]]] = {}
        self._elapsed: dict[tuple[int, int], int] = {}
        self._renamed: dict[tuple[int, int], int] = {}
        # By order: names and whatever has been renamed before.
        self._names: dict[int, dict[Any, Any]] = {}
        self.taken: set[Taken] = set()
        self.events: set[type[Event]] = set()
        """Those that cores have taken in."""
        self.observer = observer_of(self._observe)
        """To be given to cores: which transitions were taken."""

    def __len__(self) -> int:
        return sum(core is not None for core in self._cores)

    def _observe(self, now_ns: int, steps: list[StepSeen]) -> None:
        for name, _, before, event, _ in steps:
            if before is not None and (before.state, type(event)) in MACHINES[name].table:
                self.taken.add((name, before.state.value, type(event).__name__))

    def add(self, core: Core, now_ns: int = BEGIN_NS) -> int:
        number = self._number((type(core).__name__, core.freeze(now_ns)))
        if self._cores[number] is None:
            self._cores[number] = (core, now_ns)
            next_ns = core.next_deadline()
            self._deadlines[number] = None if next_ns is None else next_ns - now_ns
        return number

    def deadline(self, number: int) -> int | None:
        """Nanoseconds to its next deadline; not more than 0: it is due."""
        return self._deadlines[number]

    def core(self, number: int) -> Core:
        kept = self._cores[number]
        assert kept is not None
        return kept[0]

    def elapse(self, number: int, by_ns: int) -> int:
        """Time passes, and nobody looks at the clock yet."""
        elapsed = self._elapsed.get((number, by_ns))
        if elapsed is None:
            kept = self._cores[number]
            assert kept is not None
            core, now_ns = kept
            elapsed = self._elapsed[number, by_ns] = self.add(core, now_ns + by_ns)
        return elapsed

    def step(self, number: int, event: Event | None) -> tuple[int, tuple[Any, ...]]:
        """One turn of its executor: take `event` in (None: a deadline has passed), and do what is due.

        Times in `event` and in the effects are relative to now.
        """
        stepped = self._stepped.get((number, event))
        if stepped is None:
            kept = self._cores[number]
            assert kept is not None
            core, now_ns = kept[0].copy(), kept[1]
            if event is not None:
                self.events.add(type(event))
            try:
                effects = [] if event is None else self._handle(core, _later(event, now_ns), now_ns)
                effects += core.advance(now_ns)
            except Exception as error:
                raise CoreBroken(f"{type(core).__name__} raises {error!r}") from error
            next_ns = core.next_deadline()
            if next_ns is not None and next_ns <= now_ns:
                raise CoreBroken(f"{type(core).__name__} is due again as soon as it has done what was due")
            earlier = tuple(_earlier(effect, now_ns) for effect in effects)
            stepped = self._stepped[number, event] = (self.add(core, now_ns), earlier)
        return stepped

    def _handle(self, core: Core, event: Event, now_ns: int) -> list[Effect]:
        done: list[Effect] = []
        for effect in core.handle(event, now_ns):
            if isinstance(effect, ResolveBlocks):
                answer = BlocksResolved(
                    request_id=effect.request_id,
                    connection=effect.connection,
                    reads=self._reads,
                    are_checked=self._are_checked,
                )
                self.events.add(BlocksResolved)
                done += self._handle(core, answer, now_ns)
            else:
                done.append(effect)
        return done

    # --- names ------------------------------------------------------------------------------------------------------

    def _number(self, frozen: Hashable) -> int:
        number = self._ids.get(frozen)
        if number is None:
            number = self._ids[frozen] = len(self._frozen)
            self._frozen.append(frozen)
            self._cores.append(None)
            self._deadlines.append(None)
        return number

    def renamed(self, number: int, order: int, names: Mapping[str, str]) -> int:
        """The number of this state with other names in it. There need not be a core of it."""
        renamed = self._renamed.get((number, order))
        if renamed is None:
            known = self._names.setdefault(order, dict(names))
            renamed = self._renamed[number, order] = self._number(_rename(self._frozen[number], known))
        return renamed


def _later(event: Event, now_ns: int) -> Event:
    if isinstance(event, HoldAnswered):
        return msgspec.structs.replace(event, sent_ns=event.sent_ns + now_ns)
    if isinstance(event, ReadEnded):
        return msgspec.structs.replace(event, ended_ns=event.ended_ns + now_ns)
    return event


def _earlier(effect: Effect, now_ns: int) -> Effect:
    if isinstance(effect, SendHold):
        return msgspec.structs.replace(effect, sent_ns=effect.sent_ns - now_ns)
    return effect


def _rename(value: Any, known: dict[Any, Any]) -> Any:
    if value.__class__ is int or value.__class__ is bool:
        return value
    renamed = known.get(value)
    if renamed is None:
        renamed = known[value] = _rename_new(value, known)
    return renamed


def _rename_new(value: Any, known: dict[Any, Any]) -> Any:
    if isinstance(value, tuple):
        parts = [_rename(each, known) for each in value]
        if parts and isinstance(parts[0], lease.Holder):
            parts.sort(key=lambda holder: holder.engine_id)  # as `freeze` has them
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, frozenset):
        return frozenset(_rename(each, known) for each in value)
    if isinstance(value, msgspec.Struct):
        parts = [_rename(getattr(value, field), known) for field in value.__struct_fields__]
        return type(value)(**dict(zip(value.__struct_fields__, parts, strict=True)))
    return value
