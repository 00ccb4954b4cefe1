"""Seeds that nobody has run before, on all levels at once: `python -m tests.simulation.fresh --seconds 40`.

The first seed is the time in milliseconds, so no two runs share one; it is printed before anything runs. A level runs
in a process of its own, one seed after another until the time is up. How much it ran is printed when it has ended, and
of one that failed all that it says but the seeds that went well. One that hangs is ended, and its last seed is printed.
Exit status 1 when a seed failed, or a level ran none.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import IO

from tests.simulation.__main__ import say

LEVELS = ("1", "2", "vllm")
HANG_SECONDS = 300.0
"""A level may take so much longer than it was told to: the last seed, and shrinking plans that failed."""
SEED_LINE = "seed "
SUMMARY_LINE = "seeds "
HOW_MUCH = (SUMMARY_LINE, "requests ", "virtual time ", "verdict ")
SOME_SEEDS = re.compile(rf"{SUMMARY_LINE} *[1-9]")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.fresh", description="seeds not run before")
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--seed", type=int, help="begin there instead")
    arguments = parser.parse_args()
    first = int(time.time() * 1000) if arguments.seed is None else arguments.seed
    say(f"levels {', '.join(LEVELS)}: seeds from {first} on, for {arguments.seconds:g} s")
    levels = {level: _command(level, first, arguments.seconds) for level in LEVELS}
    return 0 if run(levels, arguments.seconds + HANG_SECONDS) else 1


def _command(level: str, first: int, seconds: float) -> list[str]:
    module = [sys.executable, "-m", "tests.simulation"]
    return [*module, "--level", level, "--seed", str(first), "--seconds", str(seconds)]


def run(levels: Mapping[str, Sequence[str]], limit_seconds: float) -> bool:
    """Run the command of each level, all at once, and print what they say. Whether all ended well and in time."""
    deadline = time.monotonic() + limit_seconds
    with contextlib.ExitStack() as stack:
        started = []
        for level, command in levels.items():
            said = stack.enter_context(tempfile.TemporaryFile("w+"))
            process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
            stack.callback(_end, process)
            started.append((level, process, said))
        verdicts = [_conclude(level, process, said, deadline) for level, process, said in started]
    return all(verdicts)


def _conclude(level: str, process: subprocess.Popen[bytes], said: IO[str], deadline: float) -> bool:
    """The end of one level."""
    try:
        ended_well = process.wait(max(0.0, deadline - time.monotonic())) == 0
        hangs = False
    except subprocess.TimeoutExpired:
        _end(process)
        ended_well, hangs = False, True
    say(f"--- level {level}")
    said.seek(0)
    lines = said.read().splitlines()
    ran_some = any(map(SOME_SEEDS.match, lines))
    has_passed = ended_well and ran_some
    for line, following in itertools.zip_longest(lines, lines[1:], fillvalue=""):
        # A seed that went well has nothing to say.
        went_well = line.startswith(SEED_LINE) and following.startswith((SEED_LINE, SUMMARY_LINE))
        if line.startswith(HOW_MUCH) if has_passed else not went_well:
            say(line)
    if hangs:
        say(f"verdict      level {level} hangs, FAILED")
    elif ended_well and not ran_some:
        say(f"verdict      level {level} has run no seed, FAILED")
    return has_passed


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


if __name__ == "__main__":
    sys.exit(main())
