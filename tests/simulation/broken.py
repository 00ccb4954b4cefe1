"""Machines that are broken on purpose, to see whether somebody notices."""

from __future__ import annotations

from typing import Any

from statemachine.kernel import Machine, Pair, to


def broken(machine: Machine[Any, Any], pair: Pair, handler: Any, *targets: Any) -> Machine[Any, Any]:
    """`machine` with another handler for one pair; the arrows of production's stay declared, for the kernel's sake."""
    targets = (*targets, *(machine.table[pair].targets if pair in machine.table else ()))
    terminal_pairs = {(state, event) for state in machine.terminal for event in machine.events}
    return Machine(
        name=machine.name,
        states=machine.states,
        initial=machine.initial,
        terminal=machine.terminal,
        events=machine.events,
        table=machine.table | {pair: to(handler, *targets)},
        ignored={key: why for key, why in machine.ignored.items() if key not in terminal_pairs and key != pair},
        impossible={key: why for key, why in machine.impossible.items() if key != pair},
    )
