"""What an engine process holds of the operating system's: threads, descriptors, memory. Linux only, as vLLM is."""

from __future__ import annotations

import os
import threading
from pathlib import Path


def thread_names() -> tuple[str, ...]:
    """Python threads, the main thread left out."""
    main_thread = threading.main_thread()
    return tuple(sorted(thread.name for thread in threading.enumerate() if thread is not main_thread))


def native_threads() -> int:
    """Threads of any kind, NIXL's and ZMQ's included."""
    return len(os.listdir("/proc/self/task"))


def resident_bytes() -> int:
    """Memory in use."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_files() -> dict[int, str]:
    """What each open descriptor refers to; sockets and pipes carry a number that is theirs alone."""
    targets: dict[int, str] = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            targets[int(entry.name)] = os.readlink(entry)
        except OSError:  # the descriptor of the directory itself is gone by now
            continue
    return targets
