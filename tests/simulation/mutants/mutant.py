"""What a mutant is: a name, what is broken, how, and where an oracle must notice it.

The ways to break something are data too. `Edit` replaces a piece of a function's source, so a mutant shows the very
rule that it removes; the piece must occur exactly once, so a mutant whose code has changed says so. The new code is put
into the function object itself: tables of machines, other modules and bound methods see it wherever they hold it.
"""

from __future__ import annotations
import __future__

import builtins
import dis
import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import CodeType, FunctionType, TracebackType
from typing import Any, Literal, TypeAlias

from statemachine import departure, draining, hold, introduction, lease, peer, request
from statemachine.kernel import Machine, to
from tests.explore import Product
from tests.simulation.faults import LEVEL1_KINDS, LEVEL2_KINDS, VLLM_KINDS, Fault, Kind, Plan, draw_plan

MACHINES: tuple[Machine[Any, Any], ...] = (
    request.MACHINE,
    peer.MACHINE,
    hold.MACHINE,
    lease.MACHINE,
    departure.MACHINE,
    draining.MACHINE,
    introduction.MACHINE,
)

Level: TypeAlias = Literal[1, 2, "vllm"]
"""Of the simulator."""
KINDS: dict[Level, Sequence[Kind]] = {1: LEVEL1_KINDS, 2: LEVEL2_KINDS, "vllm": VLLM_KINDS}
SEEDS = 6
"""How many seeds a mutant may live through."""


@dataclass(frozen=True)
class Edit:
    """In the source of `function` (of its getter, if it is a property), `before` becomes `after`."""

    function: Any
    before: str
    after: str

    def apply(self, patch: Patch) -> None:
        patch.edit(self.function, self.before, self.after)


@dataclass(frozen=True)
class Set:
    """An attribute of a class or module, which must exist, gets another value."""

    owner: Any
    name: str
    value: Any

    def apply(self, patch: Patch) -> None:
        patch.attribute(self.owner, self.name, self.value)


@dataclass(frozen=True)
class Do:
    """Whatever cannot be said as an edit."""

    apply: Callable[[Patch], None]


Change: TypeAlias = Edit | Set | Do


def _globals_of(code: CodeType) -> Iterator[str]:
    for each in dis.get_instructions(code):
        if each.opname == "LOAD_GLOBAL":
            yield each.argval
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _globals_of(inner)


class Patch:
    """Changes to the product, undone in reverse order when its block ends."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        # Of functions that were edited; `inspect` knows only what stands in the file.
        self._sources: dict[FunctionType, str] = {}

    def __enter__(self) -> Patch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        while self._undo:
            self._undo.pop()()

    def attribute(self, owner: Any, name: str, value: object) -> None:
        before = inspect.getattr_static(owner, name)
        self._undo.append(lambda: setattr(owner, name, before))
        setattr(owner, name, value)

    def edit(self, function: Any, before: str, after: str) -> None:
        if isinstance(function, property):
            function = function.fget
        assert isinstance(function, FunctionType), function
        source = self._sources.get(function) or textwrap.dedent(inspect.getsource(function))
        if source.count(before) != 1:
            raise ValueError(f"{function.__qualname__} has {before!r} {source.count(before)} times")
        # Decorators stay as they are: only the code of the function changes.
        source = source.replace(before, after)
        lines = source.splitlines()
        first = next(number for number, line in enumerate(lines) if line.startswith(("def ", "async def ")))
        module = dict(function.__globals__)
        flags = __future__.annotations.compiler_flag
        exec(compile("\n".join(lines[first:]), inspect.getfile(function), "exec", flags), module)
        code, original = module[function.__name__].__code__, function.__code__
        if unknown := set(_globals_of(code)) - vars(builtins).keys() - module.keys():
            raise ValueError(f"{function.__qualname__}, edited, uses {sorted(unknown)}, which it does not know")
        if code.co_freevars != original.co_freevars:
            raise ValueError(f"{function.__qualname__} has a closure, which an edit cannot keep")
        self._undo.append(lambda: setattr(function, "__code__", original))
        function.__code__ = code
        self._sources[function] = source
        for machine in MACHINES:
            self._free(machine, function)

    def _free(self, machine: Machine[Any, Any], handler: FunctionType) -> None:
        """A handler that has changed may lead to any state."""
        for pair, transition in list(machine.table.items()):
            if transition.handler is handler:
                self._undo.append(partial(machine.table.__setitem__, pair, transition))
                machine.table[pair] = to(handler, *machine.states)


# --- where a mutant is noticed --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Explored:
    """The model checker, wider and wider up to the deviations of `product`. `invariant`: what its complaint begins
    with."""

    product: Product
    invariant: str

    def __str__(self) -> str:
        return f"explorer, {self.product.name}"

    @property
    def oracle(self) -> str:
        return self.invariant


@dataclass(frozen=True)
class Seeds:
    """The simulator on `level`, seed after seed, until `oracle` complains.

    Attributes:
        faults: what provokes it, the same for every seed; empty: it needs no fault; None: those that the seed draws.
        first, count: of the seeds.
    """

    level: Level
    oracle: str
    faults: tuple[Fault, ...] | None = None
    first: int = 0
    count: int = SEEDS

    def __str__(self) -> str:
        return f"level {self.level}"

    def plans(self) -> Iterator[Plan]:
        for seed in range(self.first, self.first + self.count):
            yield (
                draw_plan(seed, KINDS[self.level]) if self.faults is None else Plan(seed=seed, faults=list(self.faults))
            )


@dataclass(frozen=True)
class ByTest:
    """A test, by file and name; it must fail."""

    test: str

    def __str__(self) -> str:
        return "test"

    @property
    def oracle(self) -> str:
        return f"`{self.test}`"


Place: TypeAlias = Explored | Seeds | ByTest


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One way to break the product.

    Attributes:
        name: unique.
        rule: key in `rules.RULES` of the rule of the cores that it removes; None: it breaks something else.
        row: number of the field failure that it repeats; None: nobody reported it.
        broken: one sentence that says what is wrong.
        changes: how.
        place: where, and by which oracle, it must be noticed.
    """

    name: str
    broken: str
    changes: tuple[Change, ...]
    place: Place
    rule: str | None = None
    row: int | None = None

    def apply(self, patch: Patch) -> None:
        for change in self.changes:
            change.apply(patch)


def fault(kind: Kind, target: str, at_seconds: float, duration_seconds: float, probability: float = 1.0) -> Fault:
    return Fault(
        kind=kind,
        target=target,
        at_seconds=at_seconds,
        duration_seconds=duration_seconds,
        probability=probability,
    )
