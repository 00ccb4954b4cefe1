"""An observer of cores that a test is told of their steps by."""

from __future__ import annotations

from collections.abc import Callable

from statemachine.trace import Observer, StepSeen


def observer_of(tell: Callable[[int, list[StepSeen]], None]) -> Observer:
    """One that tells a function when the steps were made, and which."""
    return Observer(lambda noted: tell(*noted[1:]))
