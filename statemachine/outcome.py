"""What one event of a core has led to: effects for its executor, steps for its observer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from statemachine.kernel import Effect
from statemachine.trace import Note, Observer, StepSeen

EffectT = TypeVar("EffectT", bound=Effect)


class Outcome(Generic[EffectT]):
    """The outcome of an event for one core. The core's parts add to it; the core hands it out when everything that
    follows from the event is done.

    Args:
        observe: told of every step.

    Attributes:
        effects: what the executor is to do, in order.
        steps: of the core's machines, in order; not yet told to the observer.
    """

    __slots__ = ("_note", "_whose", "effects", "observe", "steps")

    def __init__(self, observe: Observer | None = None) -> None:
        self.effects: list[EffectT] = []
        self.steps: list[StepSeen] = []
        self.observe = observe
        self._note: Callable[[Note], object] | None = None
        self._whose: object = None
        if observe is not None:
            self._note, self._whose = observe

    def take(self, now_ns: int) -> list[EffectT]:
        """The effects. The observer is told last, after everything that was to be done: if it raises, that costs
        records, and the effects come next time."""
        if self.steps:
            steps, self.steps = self.steps, []
            if self._note is not None:
                self._note((self._whose, now_ns, steps))
        effects, self.effects = self.effects, []
        return effects
