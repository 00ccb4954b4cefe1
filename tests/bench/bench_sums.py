"""What checksums of blocks cost (option `verify`): the sums on the engine thread, and a request with and without them.

`python -m tests.bench.bench_sums` first sums memory of this process as a worker does, with one thread of torch. Then it
starts three pairs of real engine cores (tests/rig), with `verify` off, sampled and all, and lets each read requests in
turns; those that wait for their turn are stopped.

Figures, medians, with the smallest and the largest in brackets
  GB/s     of `BlockSums`, by processor time, over the lengths of a block of one region; random blocks of 1 GiB
  faults   page faults for each MB that is summed: whether the C library had kept the memory of the intermediate
           results, or had to take it from the operating system again, is most of the difference between two rounds
  sums     milliseconds of processor time for what one side sums of a request, by `verify`
  request  milliseconds from entry into `start_load_kv` on D until D was told. D asks for the checksums before it
           reads, and P sums with the step that follows the prompt, so what of that is not over is in it
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch

from connector.layout.verification import Numbers, spread
from connector.protocol import Stretch
from connector.worker.block_sums import BlockSums
from tests.bench.case import BLOCK_TOKENS, room, turns
from tests.bench.sides import Side, side
from tests.rig import OURS, EngineOptions

MODES = ("off", "sampled", "all")
MEMORY_BYTES = 1 << 30
SUMMED_BYTES = 128 << 20
LENGTHS = (4 << 10, 16 << 10, 64 << 10, 1 << 20)
REQUESTS = (8, 64)
"""Blocks of a request, each of 2 MiB in 32 regions."""
WARM_UP = 2


def shown(values: list[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def seconds_of(block_sums: BlockSums, stretches: list[Stretch], rounds: int) -> list[float]:
    """Processor time of this thread, of each round; the first one, which makes the factors, is not among them."""
    found = []
    for _ in range(rounds + 1):
        started = time.thread_time_ns()
        block_sums.of(stretches)
        found.append((time.thread_time_ns() - started) / 1e9)
    return found[1:]


def measure_sums(rounds: int) -> None:
    torch.set_num_threads(1)
    memory = torch.randint(0, 256, (MEMORY_BYTES,), dtype=torch.uint8)
    block_sums = BlockSums([memory])
    random = np.random.default_rng(1)

    def stretch(length: int, first: int, count: int, blocks: Numbers) -> Stretch:
        return Stretch(
            address=memory.data_ptr() + first, stride_bytes=length, length_bytes=length, count=count, blocks=blocks
        )

    for length in LENGTHS:
        count = MEMORY_BYTES // length
        blocks = random.permutation(count)[: SUMMED_BYTES // length]
        faults_before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        times = seconds_of(block_sums, [stretch(length, 0, count, blocks)], rounds)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults_before
        rates = shown([SUMMED_BYTES / each / 1e9 for each in times], 2)
        print(
            f"blocks of {length >> 10:5} KiB: {rates} GB/s, faults {faults / (rounds + 1) / (SUMMED_BYTES / 1e6):.0f}"
        )

    shape = EngineOptions(OURS, "kv_both", 0)
    region_bytes = MEMORY_BYTES // shape.layers
    in_region = region_bytes // shape.page_length_bytes
    for count in REQUESTS:
        chosen = random.permutation(in_region)[:count]
        for mode, summed in (("sampled", spread(chosen)), ("all", chosen)):
            stretches = [
                stretch(shape.page_length_bytes, layer * region_bytes, in_region, summed)
                for layer in range(shape.layers)
            ]
            times = seconds_of(block_sums, stretches, rounds)
            print(f"{count:3} blocks, sums, {mode:8}: {shown([each * 1e3 for each in times], 1)} ms")


def measure_requests(rounds: int) -> None:
    times: dict[tuple[int, str], list[float]] = {(blocks, mode): [] for blocks in REQUESTS for mode in MODES}
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        sides: list[tuple[str, Side]] = []
        for mode in MODES:
            (own := Path(directory) / mode).mkdir()
            pair = stack.enter_context(side(OURS, own, extra_config={"verify": mode}, **room(2, max(REQUESTS))))
            for engine in (pair.prefill, pair.decode):
                stack.callback(engine.thaw)  # a stopped process cannot end in an orderly way
                engine.freeze()
            sides.append((mode, pair))
        for number in range(WARM_UP + rounds):
            for blocks in REQUESTS:
                for mode, pair in turns(sides, number):
                    with pair.awake():
                        transferred = pair.transfer([f"{blocks}-{number}"], blocks * BLOCK_TOKENS)
                    if number >= WARM_UP:
                        times[blocks, mode] += transferred.done_ms
    for (blocks, mode), found in times.items():
        print(f"{blocks:3} blocks, request, verify {mode:8}: {shown(found, 1)} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    measure_sums(options.rounds)
    measure_requests(options.rounds)


if __name__ == "__main__":
    main()
