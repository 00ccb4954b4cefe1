"""What an engine process holds of the operating system's: threads, descriptors, memory. Linux only, as vLLM is."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from pathlib import Path


def thread_names() -> tuple[str, ...]:
    """Python threads, the main thread left out."""
    main_thread = threading.main_thread()
    return tuple(sorted(thread.name for thread in threading.enumerate() if thread is not main_thread))


def native_threads() -> int:
    """Threads of any kind, NIXL's and ZMQ's included."""
    return len(os.listdir("/proc/self/task"))


def thread_states(process_id: int) -> set[str]:
    """Those of all threads of a process, as the kernel abbreviates them: "T" is stopped. Empty: it is gone."""
    states = set()
    with contextlib.suppress(FileNotFoundError):
        for thread in Path(f"/proc/{process_id}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                states.add((thread / "stat").read_text().rpartition(")")[2].split()[0])
    return states


def resident_bytes() -> int:
    """Memory in use."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_files(process_id: int | str = "self") -> dict[int, str]:
    """What each open descriptor refers to; sockets and pipes carry a number that is theirs alone."""
    targets: dict[int, str] = {}
    for entry in Path(f"/proc/{process_id}/fd").iterdir():
        try:
            targets[int(entry.name)] = os.readlink(entry)
        except OSError:  # the descriptor of the directory itself, or another one, is gone by now
            continue
    return targets


def kinds_of_files(process_id: int | str = "self") -> Counter[str]:
    """The same without those numbers."""
    return Counter(target.partition(":[")[0] for target in open_files(process_id).values())


def shared_mappings(process_id: int | str = "self") -> Counter[str]:
    """Memory that other processes may have mapped, too: device and inode of each."""
    lines = Path(f"/proc/{process_id}/maps").read_text().splitlines()
    mappings = (line.split() for line in lines)
    return Counter(f"{device}/{inode}" for _, rights, _, device, inode, *_ in mappings if rights.endswith("s"))
