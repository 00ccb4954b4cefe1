"""Ends process groups of engines, with what they leave behind: `end`, and `python tests/e2e/reaper.py`.

The script is the last of the nets of `tests.e2e.engines`: it reads the groups to end from its standard input, and ends
them when the input closes, however the program that wrote it has ended. Nothing but Python's own library is imported,
so that it is there at once.

vLLM's processes talk to each other through segments of shared memory. One of them, Python's resource tracker, removes
those that nobody removed; it is killed with its group, so the segments are removed here: those that processes of the
group have mapped.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Set
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
GONE_TIMEOUT_SECONDS = 10.0
POLL_SECONDS = 0.02


def shared_memory(group: int) -> set[Path]:
    """The segments that processes of this group have mapped and that still have a name."""
    found = set()
    for pid in members(group):
        with contextlib.suppress(OSError):  # it has ended
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                name = line.partition("/")[2]
                if name.startswith("dev/shm/") and not name.endswith(" (deleted)"):
                    found.add(Path("/") / name)
    return found


def members(group: int) -> list[int]:
    """Processes of the group that are not zombies."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, of, *_ = (process / "stat").read_text().rpartition(")")[2].split()
            if int(of) == group and state != "Z":
                found.append(int(process.name))
    return found


def remove(segments: Set[Path]) -> None:
    """Nothing where they are gone."""
    for segment in segments:
        with contextlib.suppress(FileNotFoundError):
            segment.unlink()


def wait_gone(group: int, timeout_seconds: float) -> None:
    """Until no process of the group is left, so that its ports and memory are free again."""
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except (ProcessLookupError, PermissionError):
            return
        time.sleep(POLL_SECONDS)


def end(groups: Set[int]) -> None:
    """SIGKILL to all of them."""
    segments = {group: shared_memory(group) for group in groups}
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
    for group, left in segments.items():
        wait_gone(group, GONE_TIMEOUT_SECONDS)
        remove(left)


def main() -> None:
    """Lines `watch N` and `forget N`, N being the number of a process group."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        word, group = line.split()
        (groups.add if word == "watch" else groups.discard)(int(group))
    end(groups)


if __name__ == "__main__":
    main()
