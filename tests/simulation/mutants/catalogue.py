"""All mutants, and the table of what notices each.

Dropped, because nothing that anybody outside can see depends on them:

* READING ignores PeerLost: the READ ends by itself, or the lease, the deadline and the drain bound the wait; the event
  only makes the failure come earlier.
"""

from __future__ import annotations

from pathlib import Path

from tests.simulation.mutants import decode, executors, prefill, ranks, roster, security, wire
from tests.simulation.mutants.mutant import Mutant

TABLE = Path(__file__).parent / "TABLE.md"

PARTS: dict[str, tuple[Mutant, ...]] = {
    "A decode rank and one remote engine (`RemoteEngine`, and the machines request, hold and peer)": decode.MUTANTS,
    "Which remote engines a decode rank knows (`Roster`)": roster.MUTANTS,
    "A prefill rank (`Lending`, and the machine lease)": prefill.MUTANTS,
    "Their executors": executors.MUTANTS,
    "Messages": wire.MUTANTS,
    "Strangers": security.MUTANTS,
    "Ranks and cache groups": ranks.MUTANTS,
}

CATALOGUE: dict[str, Mutant] = {mutant.name: mutant for part in PARTS.values() for mutant in part}


def table() -> str:
    """Markdown: every mutant, the rule that it removes, where it is noticed, and by what."""
    lines = [
        "# Mutants, and what notices them",
        "",
        "Made by `python -m tests.simulation.mutants --table` from the catalogue; `make mutants` runs all of them and",
        "fails when one is not noticed as it says here. Rules are quoted in `rules.py`.",
    ]
    for part, mutants in PARTS.items():
        lines += ["", f"## {part}", "", "| mutant | what is broken | rule removed | where | noticed by |"]
        lines += ["|---|---|---|---|---|"]
        for mutant in mutants:
            rule = mutant.rule or ""
            lines.append(f"| {mutant.name} | {mutant.broken} | {rule} | {mutant.place} | {mutant.place.oracle} |")
    return "\n".join(lines) + "\n"
