"""What the first request for a prefill engine costs a decode engine, and what it costs when they have met before.

`python -m tests.bench.bench_prewarm [--rounds N] [--blocks N]` starts three real engine cores (tests/rig) for each
round, cold and pre-warmed in turns: a decode engine, a prefill engine that it has read from before, so that nothing of
its own happens for the first time, and one that is new to it. Pre-warmed, it is told of the new one (`nixl-actor meet`)
and waited for until it has met it. Then requests are read from the new one, one after the other: the first, and further
ones, which are warm.

A pre-warmed first request is to take at most LIMIT times a warm one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Literal

from connector.tools.administration import meet
from connector.tools.asking import Address
from tests.bench.case import BLOCK_TOKENS
from tests.bench.sides import Side
from tests.rig import OURS, EngineOptions, EngineRig, free_port

LIMIT = 1.5
WARM_REQUESTS = 8
MEET_SECONDS = 30.0


def measure(directory: Path, blocks: int, *, prewarms: bool) -> tuple[float, float]:
    """Milliseconds of the first request, and the median of the further ones."""
    pool = (WARM_REQUESTS + 2) * blocks + 32

    def engine(role: Literal["kv_producer", "kv_consumer"]) -> EngineRig:
        return EngineRig(EngineOptions(OURS, role, free_port(), blocks=2 * pool), directory)

    with engine("kv_producer") as known, engine("kv_producer") as new, engine("kv_consumer") as decode:
        for each in (known, new, decode):
            each.wait_ready()
        before = Side("known", known, decode)
        for number in range(WARM_REQUESTS):
            before.transfer([f"k{number}"], blocks * BLOCK_TOKENS)
        if prewarms:
            place = f"127.0.0.1:{new.options.side_channel_port}"
            asked = Address("127.0.0.1", decode.options.side_channel_port)
            (report,) = meet(asked, [place], timeout_seconds=MEET_SECONDS).values()
            assert [row.state for row in report.rows] == ["met"], report
        side = Side("ours", new, decode)
        times = [side.transfer([f"r{number}"], blocks * BLOCK_TOKENS).done_ms[0] for number in range(WARM_REQUESTS + 1)]
    return times[0], statistics.median(times[1:])


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--blocks", type=int, nargs="*", default=[1, 8, 64])
    options = parser.parse_args(arguments)
    worst = 0.0
    for blocks in options.blocks:
        ratios: dict[bool, list[float]] = {False: [], True: []}
        for number in range(options.rounds):
            for prewarms in (False, True):
                with tempfile.TemporaryDirectory() as directory:
                    first, warm = measure(Path(directory), blocks, prewarms=prewarms)
                ratios[prewarms].append(first / warm)
                kind = "met before" if prewarms else "cold"
                print(f"{blocks:3} blocks, round {number}, {kind:10}: first {first:8.2f} ms, warm {warm:8.2f} ms")
        for prewarms, found in ratios.items():
            kind = "met before" if prewarms else "cold"
            print(f"{blocks:3} blocks, {kind:10}: first / warm, median of {len(found)}: {statistics.median(found):.2f}")
        worst = max(worst, statistics.median(ratios[True]))
    print(f"limit {LIMIT}: {'kept' if worst <= LIMIT else 'not kept'}")
    return 0 if worst <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
