"""`make fuzz`: every entry point for bytes from outside, and the two sockets of a real engine, for so many minutes.

    python -m tests.fuzz [--minutes N] [--only NAME ...] [--seed N] [--directory DIRECTORY]

What leads to new code is kept in the directory (`.state/fuzz`, which git ignores) and is where the next run begins. An
input that breaks something is written under `crashes` there; its name and how to run it again are printed, and the exit
status is 1.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path

from tests.fuzz.sockets import fuzz_sockets
from tests.fuzz.targets import TARGETS

SOCKETS = "sockets"
SOCKETS_SHARE = 0.3
"""Of the time."""
CORPUS_SENT_MAX = 2000
EXTRA_SECONDS = 120
"""How long a process may take beyond its time before it counts as hanging."""


def fuzz_decoder(name: str, seconds: int, directory: Path) -> tuple[str, str]:
    """What was tried, and what is wrong, if anything is."""
    command = [sys.executable, "-m", "tests.fuzz.decoders", name, str(seconds), str(directory)]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=seconds + EXTRA_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return "", "it hangs"
    said = ran.stdout + ran.stderr
    statistics = dict(re.findall(r"^stat::(\w+):\s+(\d+)", said, re.MULTILINE))
    tried = f"{int(statistics.get('number_of_executed_units', 0)):,} inputs"
    if ran.returncode == 0:
        kept = len(list((directory / "corpus" / name).iterdir()))
        return f"{tried}, {kept} kept, {statistics.get('peak_rss_mb', '?')} MB at most", ""
    return tried, f"exit status {ran.returncode}\n{said[-3000:]}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--only", nargs="+", choices=[*TARGETS, SOCKETS], default=[*TARGETS, SOCKETS])
    parser.add_argument("--seed", type=int, help="of the messages for the sockets; another one each time by default")
    parser.add_argument("--directory", type=Path, default=Path(".state/fuzz"))
    options = parser.parse_args()
    directory = options.directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    before = set((directory / "crashes").glob("*"))
    decoders = [name for name in options.only if name != SOCKETS]
    for_sockets = options.minutes * 60 * (SOCKETS_SHARE if decoders else 1.0) if SOCKETS in options.only else 0.0
    problems = []
    for name in decoders:
        seconds = max(1, int((options.minutes * 60 - for_sockets) / len(decoders)))
        tried, problem = fuzz_decoder(name, seconds, directory)
        print(f"{name:<28} {tried:<60} {'BROKEN' if problem else 'good'}", flush=True)
        problems += [f"{name}: {problem}"] if problem else []
    if for_sockets:
        seed = int(time.time()) if options.seed is None else options.seed
        kept = sorted((directory / "corpus").glob("*request/*"))[:CORPUS_SENT_MAX]
        sent = fuzz_sockets(for_sockets, seed, [path.read_bytes() for path in kept], directory)
        tried = f"{sent.messages:,} messages over {sent.connections:,} connections, seed {seed}"
        print(f"{SOCKETS:<28} {tried:<60} {'BROKEN' if sent.problem else 'good'}")
        problems += [f"{SOCKETS}: {sent.problem}"] if sent.problem else []
    for problem in problems:
        print(problem)
    for path in sorted(set((directory / "crashes").glob("*")) - before):
        name = next((name for name in TARGETS if path.name.startswith(f"{name}-")), None)
        again = f"python -m tests.fuzz.decoders {name} {path}" if name is not None else "each line is a message"
        print(f"reproducer: {path} ({again})")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
