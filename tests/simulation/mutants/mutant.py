"""What a mutant is, and `Patch`, which breaks the product and mends it again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from statemachine.kernel import Handler, Machine, Pair, to
from tests.simulation.faults import Fault, Kind, Plan, draw_plan

SEEDS = 12
"""How many seeds a mutant may live through."""


class Patch:
    """Changes to the product, undone in reverse order when its block ends."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> Patch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        while self._undo:
            self._undo.pop()()

    def attribute(self, owner: Any, name: str, value: object) -> None:
        """Replace an attribute of a class or module, which must exist."""
        before = getattr(owner, name)
        self._undo.append(lambda: setattr(owner, name, before))
        setattr(owner, name, value)

    def handler(self, machine: Machine[Any], pair: Pair, handler: Handler) -> None:
        """Replace what `machine` does for one pair of its table; the new handler may lead to any state."""
        before = machine.table[pair]
        self._undo.append(lambda: machine.table.__setitem__(pair, before))
        machine.table[pair] = to(handler, *machine.states)


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One way to break the product.

    Attributes:
        name: unique.
        row: number of the field failure that it repeats; None: nobody reported it.
        broken: one sentence that says what is wrong.
        apply: breaks the product.
        faults: what provokes it, the same for every seed; empty: it needs no fault; None: those that the seed draws.
        oracle: the one that has to complain; None: any.
        first_seed, seeds: the first one, and how many it may live through.
    """

    name: str
    row: int | None
    broken: str
    apply: Callable[[Patch], None]
    faults: tuple[Fault, ...] | None = ()
    oracle: str | None = None
    first_seed: int = 0
    seeds: int = SEEDS

    def plans(self) -> Iterator[Plan]:
        for seed in range(self.first_seed, self.first_seed + self.seeds):
            yield draw_plan(seed) if self.faults is None else Plan(seed=seed, faults=list(self.faults))


def fault(kind: Kind, target: str, at_seconds: float, duration_seconds: float, probability: float = 1.0) -> Fault:
    return Fault(
        kind=kind,
        target=target,
        at_seconds=at_seconds,
        duration_seconds=duration_seconds,
        probability=probability,
    )
