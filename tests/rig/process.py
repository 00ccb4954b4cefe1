"""What an engine process holds of the operating system's: threads, descriptors, memory. Linux only, as vLLM is."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

STOPPED_TIMEOUT_SECONDS = 60.0
STOPPED_OR_ENDED = frozenset("TZX")


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


def stop_process(process_id: int) -> None:
    """SIGSTOP, and back when every thread has stopped: see `wait_stopped`."""
    os.kill(process_id, signal.SIGSTOP)
    wait_stopped(lambda: [process_id])


def wait_stopped(process_ids: Callable[[], Iterable[int]]) -> None:
    """Until all threads of these processes, which were sent SIGSTOP, have stopped or ended. One thread takes the
    signal, and tells the others when it has a turn: until then they go on. Raises TimeoutError."""
    deadline = time.monotonic() + STOPPED_TIMEOUT_SECONDS
    while any(thread_states(process_id) - STOPPED_OR_ENDED for process_id in process_ids()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes have not stopped within {STOPPED_TIMEOUT_SECONDS:g} s")
        time.sleep(0.001)


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
