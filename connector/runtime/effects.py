"""How executors carry out what a core says: all of it, in order, whatever becomes of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from statemachine.kernel import Effect

EffectT = TypeVar("EffectT", bound=Effect)


def internal_error(error: Exception) -> str:
    """What people are told of a bug of ours, in the failure of what it has cost."""
    return f"internal error: {error!r}; please report it"


def carry_out(
    effects: Iterable[EffectT], execute: Callable[[EffectT], None], on_error: Callable[[Exception], object]
) -> None:
    """An effect that raises (a bug) costs itself alone: the core takes all of them for done."""
    for effect in effects:
        try:
            execute(effect)
        except Exception as error:
            on_error(error)
