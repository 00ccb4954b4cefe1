"""The campaign of crashes: `python -m tests.simulation.crashes`.

    --every N     every n-th point only, from number --seed on
    --scene NAME  of this scene only (`tests.simulation.crashes.scenes`)
    --point N     this one of a scene; prints what the log said
    --os          the same with an OSError
    --moment S --task N    an await that goes on waiting at that moment: which
    --jobs N      so many at a time

Exit status 1 when something does not hold.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from tests.simulation.crashes.campaign import Found, references, run, tries
from tests.simulation.crashes.points import Injected, InjectedOs
from tests.simulation.crashes.scenes import SCENES, play

SHOWN_MAX = 12
"""Points of one complaint that are printed."""


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.crashes")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scene", choices=SCENES)
    parser.add_argument("--point", type=int)
    parser.add_argument("--os", action="store_true")
    parser.add_argument("--moment", type=float)
    parser.add_argument("--task", type=int)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    chosen = parser.parse_args()
    if chosen.point is not None or chosen.moment is not None:
        error = InjectedOs if chosen.os else Injected
        verdict = play(
            chosen.scene or next(iter(SCENES)), chosen.point, error, moment=chosen.moment, struck=chosen.task
        )
        say("\n".join([str(verdict.hit), *verdict.lines, *verdict.complaints]))
        return int(bool(verdict.complaints))
    of_scenes = references()
    for scene, reference in of_scenes.items():
        if reference.complaints:
            say("\n".join([f"{scene} without a fault:", *reference.complaints]))
            return 1
    everything = [each for each in tries(of_scenes) if chosen.scene in (None, each.scene)]
    part = everything[chosen.seed % chosen.every :: chosen.every]
    sites = [site for reference in of_scenes.values() for site in reference.sites]
    say(f"points       {len(sites)} at {len(set(sites))} places; {len(everything)} runs, of which {len(part)} now")
    found, began = Found(), time.monotonic()
    for tried, verdict in run(part, chosen.jobs):
        found.note(tried, verdict)
    for complaint, those in sorted(found.complaints.items()):
        say(f"{complaint}: {len(those)}")
        for each in those[:SHOWN_MAX]:
            say(f"    {each}")
    say(f"runs         {found.tried} in {time.monotonic() - began:.0f} s")
    say("died         " + ", ".join(f"{place} {count}" for place, count in sorted(found.deaths.items())))
    say(f"verdict      {'failed' if found.complaints else 'all passed'}")
    return int(bool(found.complaints))


if __name__ == "__main__":
    sys.exit(main())
