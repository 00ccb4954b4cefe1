"""What the first request between two engines costs, and what it costs when they have met before.

`python -m tests.bench.bench_prewarm [--rounds N] [--blocks N]` starts two real engine cores (tests/rig) for each round:
cold, and with the option `known_peers`, in turns. Of a pre-warmed one it first waits until `nixl-actor meet` says that
it has met its prefill engine. Then requests are read one after the other: the first, and further ones, which are warm.

A pre-warmed first request is to take at most LIMIT times a warm one, from LIMIT_BLOCKS blocks on (17 MB, a prompt of
256 tokens; 64 are 134 MB). A request of one block is shown only: the first READ between two agents takes NIXL and UCX
some two milliseconds longer than further ones, whether or not they have been told to connect before, and that is most
of it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

from connector.observe.administration import meet
from connector.observe.live import Address
from tests.bench.case import BLOCK_TOKENS
from tests.bench.sides import Side
from tests.rig import OURS, EngineOptions, EngineRig, free_port

LIMIT = 1.5
LIMIT_BLOCKS = 8
WARM_REQUESTS = 8
MEET_SECONDS = 30.0


def measure(directory: Path, blocks: int, *, prewarms: bool) -> tuple[float, float]:
    """Milliseconds of the first request, and the median of the further ones."""
    pool = (WARM_REQUESTS + 2) * blocks + 32
    prefill_port, decode_port = free_port(), free_port()
    place = f"127.0.0.1:{prefill_port}"
    known = {"known_peers": [place]} if prewarms else {}
    with (
        EngineRig(EngineOptions(OURS, "kv_producer", prefill_port, blocks=pool), directory) as prefill,
        EngineRig(
            EngineOptions(OURS, "kv_consumer", decode_port, blocks=pool, extra_config=known), directory
        ) as decode,
    ):
        prefill.wait_ready()
        decode.wait_ready()
        if prewarms:
            started = time.monotonic()
            (report,) = meet(Address("127.0.0.1", decode_port), [place], timeout_seconds=MEET_SECONDS).values()
            assert [row.state for row in report.rows] == ["met"], report
            assert time.monotonic() - started < MEET_SECONDS
        side = Side("ours", prefill, decode)
        times = [side.transfer([f"r{number}"], blocks * BLOCK_TOKENS).done_ms[0] for number in range(WARM_REQUESTS + 1)]
    return times[0], statistics.median(times[1:])


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--blocks", type=int, nargs="*", default=[1, LIMIT_BLOCKS, 64])
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
        if blocks >= LIMIT_BLOCKS:
            worst = max(worst, statistics.median(ratios[True]))
    print(f"limit {LIMIT}: {'kept' if worst <= LIMIT else 'not kept'}")
    return 0 if worst <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
