"""Where an engine's processes stand when a request takes too long: the stacks of all their threads.

A test that finds its request late says who held it up, or nobody will know when it happens on a machine that is not at
hand. py-spy reads the stacks from outside, so the engine needs no preparation and does not notice.

One cause has a name, because it is not the connector's and comes by itself on a busy machine: vLLM's engine core and
its worker each wait for the other's message in the shared-memory queue, because neither came to run (`calm`) or a
wake-up was lost; vLLM looks again after five seconds (SHM_READER_RECHECK_INTERVAL_MS in its shm_broadcast).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.e2e.engines import Engine

DUMP_TIMEOUT_SECONDS = 20.0
QUEUE_WAIT = "SpinCondition.wait"
QUEUE_READERS = ("EngineCore", "Worker")
"""Parts of the titles of the two processes that talk through the queue."""


class Stall:
    """What was seen of an engine while something took longer than it should."""

    def __init__(self) -> None:
        self.stacks: dict[str, str] = {}
        """By the title of the process. Empty: it did not take that long."""

    @property
    def in_queue(self) -> bool:
        """Whether the engine core and its worker both waited for a message of the other."""
        return all(
            any(part in title and QUEUE_WAIT in stack for title, stack in self.stacks.items()) for part in QUEUE_READERS
        )

    def __str__(self) -> str:
        return "\n".join(f"--- {title}\n{stack}" for title, stack in self.stacks.items()) or "no stacks were taken"


@contextmanager
def watched(engine: Engine, after_seconds: float) -> Iterator[Stall]:
    """Take the engine's stacks if the block is not over `after_seconds` after it began."""
    stall, over = Stall(), threading.Event()

    def wait() -> None:
        if not over.wait(after_seconds):
            stall.stacks = stacks_of(engine)

    watch = threading.Thread(target=wait, name="stall-watch")
    watch.start()
    try:
        yield stall
    finally:
        over.set()
        watch.join()


def stacks_of(engine: Engine) -> dict[str, str]:
    """The stacks of each process of the engine, by its title and id; why there are none, where py-spy fails."""
    try:
        server = psutil.Process(engine.pid)
        processes = [server, *server.children(recursive=True)]
    except psutil.NoSuchProcess:
        return {}
    stacks = {}
    for process in processes:
        try:
            title = " ".join(process.cmdline())[:60]
        except psutil.NoSuchProcess:
            continue
        stacks[f"{title} ({process.pid})"] = _stacks_of_process(process.pid)
    return stacks


def _stacks_of_process(pid: int) -> str:
    beside = Path(sys.executable).with_name("py-spy")
    program = str(beside) if beside.exists() else shutil.which("py-spy")
    if program is None:
        return "py-spy is not installed"
    try:
        done = subprocess.run(
            [program, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=DUMP_TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"py-spy gave no answer within {DUMP_TIMEOUT_SECONDS:g} s"
    return done.stdout if done.returncode == 0 else done.stderr
