"""Finds where two runs of one plan part: `python -m tests.simulation.divergence --seed N` (or `--faults FILE`).

A run is a pure function of its plan, so the same plan must give the same trace, byte for byte, in another process with
another PYTHONHASHSEED. When it does not, something drew from a set's order, an address, a clock or a generator that is
not of the seed, and the first record that differs is close behind it. It is printed with the records before it, which
both runs have, and with what each run says instead.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).parents[2]
HASH_SEEDS = ("1", "4711")
RUN_TIMEOUT_SECONDS = 300.0
CONTEXT_RECORDS = 5


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Where two traces part. `line` counts from one; a trace that has ended says None."""

    line: int
    before: list[bytes]
    first: bytes | None
    second: bytes | None

    def __str__(self) -> str:
        shared = "".join(f"   {record.decode()}\n" for record in self.before)
        ended = b"(the trace has ended)"
        return (
            f"record {self.line} differs; the records before it\n{shared}"
            f"one run  {(self.first or ended).decode()}\nthe other {(self.second or ended).decode()}"
        )


def first_divergence(first: bytes, second: bytes) -> Divergence | None:
    """Compare two traces, record by record. None: they are the same."""
    ours, theirs = first.splitlines(), second.splitlines()
    for number, (one, other) in enumerate(zip_longest(ours, theirs)):
        if one != other:
            before = ours[max(0, number - CONTEXT_RECORDS) : number]
            return Divergence(line=number + 1, before=before, first=one, second=other)
    return None


def trace_in_a_process_of_its_own(simulation_arguments: list[str], hash_seed: str) -> bytes:
    """What `python -m tests.simulation` with these arguments traces. Raises CalledProcessError or TimeoutExpired."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "trace")
        subprocess.run(
            [sys.executable, "-m", "tests.simulation", *simulation_arguments, "--trace", str(path)],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            check=True,
            timeout=RUN_TIMEOUT_SECONDS,
            stdout=subprocess.DEVNULL,
        )
        return path.read_bytes()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation.divergence", description="Takes the arguments of python -m tests.simulation."
    )
    _, arguments = parser.parse_known_args()
    one, other = (trace_in_a_process_of_its_own(arguments, hash_seed) for hash_seed in HASH_SEEDS)
    found = first_divergence(one, other)
    sys.stdout.write(f"{found}\n" if found else f"the same {one.count(chr(10).encode())} records in both runs\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
