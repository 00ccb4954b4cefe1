"""How many simulated requests a second each level of the simulator takes through the machines, on one core.

`python -m tests.bench.bench_simulation [--seeds COUNT]` runs the first COUNT seeds of each level, with the faults that
are drawn for them, three times over, and prints the median. A request counts once, however many ranks it has; what a
decode engine started counts, also what was refused or what no client waited for, so the share that was served is
printed beside it. Time is the processor's for this process, from the plan to the verdict: building the cluster, all
phases, the oracles and the disposal of the run are in it, so a busy machine disturbs it little. Design target of level
1: several thousand a second.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import NamedTuple

from tests.simulation.__main__ import LEVELS, Level

RUNS = 3
LEVEL2_SHARE = 10
"""Level 2 is so many times slower; it gets fewer seeds."""


class Measured(NamedTuple):
    requests: int
    served: int
    seconds: float


def measure(level: Level, seeds: int) -> Measured:
    requests = served = 0
    started = time.process_time()
    for seed in range(seeds):
        result = level.simulate(level.draw(seed))
        requests += result.requests
        served += result.outcomes["done"]
        assert not result.violations, f"level {level.name}, seed {seed}: {result.violations[0]}"
    return Measured(requests, served, time.process_time() - started)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.bench_simulation")
    parser.add_argument("--seeds", type=int, default=60, metavar="COUNT")
    arguments = parser.parse_args()
    for name, level in LEVELS.items():
        seeds = arguments.seeds if name == "1" else max(1, arguments.seeds // LEVEL2_SHARE)
        measure(level, 1)  # imports, and first use of everything
        runs = [measure(level, seeds) for _ in range(RUNS)]
        rates = sorted(run.requests / run.seconds for run in runs)
        print(
            f"level {name}: {statistics.median(rates):8,.0f} requests/s (of {RUNS} runs {rates[0]:,.0f} to "
            f"{rates[-1]:,.0f}), {seeds} seeds, {runs[0].requests} requests, {runs[0].served / runs[0].requests:.0%} "
            "served"
        )


if __name__ == "__main__":
    main()
