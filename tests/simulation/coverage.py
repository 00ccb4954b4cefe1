"""Which transitions of the machines' tables a simulation has taken.

The trace has no record of a transition that changes nothing (a request that is rejected by a peer in back-off), so they
are counted where they happen: in the handlers of the tables, which are wrapped for as long as somebody counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from statemachine import hold, lease, peer, request
from statemachine.kernel import Handler, Machine, Transition

MACHINES: tuple[Machine[Any, Any], ...] = (request.MACHINE, hold.MACHINE, peer.MACHINE, lease.MACHINE)

TransitionKey = tuple[str, str, str]
"""Machine, state, event."""


@contextmanager
def counted_transitions() -> Iterator[Counter[TransitionKey]]:
    """Counts until the block is left, in whatever runs in this process."""
    taken: Counter[TransitionKey] = Counter()
    tables = [dict(machine.table) for machine in MACHINES]
    try:
        for machine in MACHINES:
            for (state, event), transition in machine.table.items():
                key = (machine.name, str(state.value), event.__name__)
                machine.table[state, event] = Transition(_counting(transition.handler, key, taken), transition.targets)
        yield taken
    finally:
        for machine, table in zip(MACHINES, tables, strict=True):
            machine.table.update(table)


def _counting(handler: Handler, key: TransitionKey, taken: Counter[TransitionKey]) -> Handler:
    def counting(value: Any, event: Any) -> Any:
        taken[key] += 1
        return handler(value, event)

    return counting


def coverage_lines(taken: Counter[TransitionKey]) -> Iterable[str]:
    """For people: per machine, how many of its transitions were taken, and which never."""
    for machine in MACHINES:
        keys = [(machine.name, str(state.value), event.__name__) for state, event in machine.table]
        missing = [f"{state}+{event}" for name, state, event in keys if not taken[name, state, event]]
        never = f"; never {', '.join(missing)}" if missing else ""
        yield f"{machine.name:12} {len(keys) - len(missing)} of {len(keys)} transitions taken{never}"
