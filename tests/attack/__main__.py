"""`make attack`: every attack on a real prefill engine, and a table of what it did.

    python -m tests.attack [NAME ...] [--connections N] [--rounds N] [--source ADDRESS] [--json FILE]

Exit status 1 when a pull or a newcomer's handshake failed, when pulls took more than LIMIT times as long, in median,
during an attack as before and after it, or when the engine has logged a traceback.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from pathlib import Path

from tests.attack.attackers import CONNECTIONS, allow_connections, kinds
from tests.attack.scene import Outcome, scene

LIMIT = 2.0
MB = 1 << 20
LOG_SHOWN = 3000
"""Characters from the first traceback on."""

HEADINGS = (
    "attack",
    "connections",
    "ended",
    "open at the end",
    "messages",
    "MB sent",
    "memory before, most, after (MB)",
    "descriptors: most, after",
    "pull before and after (ms)",
    "pull meanwhile (ms)",
    "ratio",
    "slowest tenth (ms)",
    "newcomer's handshake (ms)",
)


def row(outcome: Outcome) -> tuple[str, ...]:
    tally = outcome.tally
    newcomers = outcome.handshakes
    handshake = f"{newcomers.median * 1000:.0f}" if newcomers.seconds else "-"
    return (
        outcome.name,
        f"{tally.connections:,}",
        f"{tally.ended:,}",
        f"{tally.open:,}",
        f"{tally.messages:,}",
        f"{tally.bytes / MB:,.0f}",
        ", ".join(f"{each / MB:.0f}" for each in outcome.memory),
        ", ".join(str(each) for each in outcome.descriptors),
        f"{outcome.calm.median * 1000:.1f}",
        f"{outcome.during.median * 1000:.1f}" + (f", {outcome.during.failed} failed" if outcome.during.failed else ""),
        f"{outcome.ratio:.2f}",
        f"{outcome.during.slowest_tenth * 1000:.0f}",
        handshake + (f", {newcomers.failed} failed" if newcomers.failed else ""),
    )


def line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.attack", description=__doc__)
    parser.add_argument(
        "names", nargs="*", choices=[[], *kinds()], metavar="NAME", help="which attacks; all by default"
    )
    parser.add_argument("--connections", type=int, default=CONNECTIONS, help="of attacks that only have many")
    parser.add_argument("--rounds", type=int, default=8, help="of five pulls and a handshake, for each attack")
    parser.add_argument("--source", help="address of this machine that all attacks come from")
    parser.add_argument("--json", type=Path, help="the figures, for programs")
    options = parser.parse_args()
    allowed = allow_connections(options.connections)
    if allowed < options.connections:
        print(f"this machine allows {allowed:,} connections of one process, not {options.connections:,}")
    outcomes = []
    with tempfile.TemporaryDirectory() as directory, scene(Path(directory)) as made:
        print(line(HEADINGS))
        print("|" + "---|" * len(HEADINGS), flush=True)
        for name in options.names or kinds():
            outcome = made.attack(name, connections=allowed, rounds=options.rounds, source=options.source)
            outcomes.append(outcome)
            print(line(row(outcome)), flush=True)
            if outcome.tally.problem:
                print(f"{name}: {outcome.tally.problem}")
            for problem in (*outcome.during.problems, *outcome.handshakes.problems):
                print(f"{name}: {problem}")
            if outcome.during.failed:
                print("what the decode engine's log says:")
                print(made.decode.log_path.read_text()[-LOG_SHOWN:])
        log = made.prefill.log_path.read_text()
        crashes = log.count("Traceback")
        print(f"log of the prefill engine: {len(log.splitlines())} lines, {crashes} tracebacks")
        if crashes:
            print(log[log.index("Traceback") :][:LOG_SHOWN])
    if options.json is not None:
        options.json.write_text(json.dumps([dataclasses.asdict(each) for each in outcomes], indent=1))
    slowed = [f"{each.name} {each.ratio:.2f}" for each in outcomes if each.ratio > LIMIT]
    if slowed:
        print(f"pulls took more than {LIMIT:g} times as long during: {', '.join(slowed)}")
    return int(bool(crashes or slowed) or any(each.during.failed or each.handshakes.failed for each in outcomes))


if __name__ == "__main__":
    sys.exit(main())
