"""vLLM's API server, forked from a process that has imported it: `ForkedServer`, and `python -m tests.e2e.serve`.

An engine is three processes and more, one after another, and on a CPU vLLM has each import everything again: twelve
seconds of a core for the API server, eight for each of the others, which is most of what the start of a tiny engine
takes. Here one process for the whole run of tests imports it and starts nothing; engines are forked from it, and so are
theirs. What an engine does is the same; the demo starts its engines in the way that users do.

The process reads orders from its standard input, a line of JSON each, and answers with the id of the process that it
has forked. It ends with its input. Its children are nobody's to wait for, so they are watched through a pidfd.
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tests.e2e.calm import calm_environment
from tests.rig import lan

ROOT = Path(__file__).resolve().parents[2]
METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
CHANGES = "CHANGES_OF_VLLM"
"""Environment: a module of the tests that changes vLLM in an engine's processes, imported before the server runs."""
ON_CUDA = os.environ.get("ENGINES_ON") == "cuda"
"""Whether engines compute on CUDA devices (docs/first-gpu-run.md); those with one rank share the first one."""
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""A process with OpenMP's threads cannot be forked; the engines of tests compute with one each anyway."""


class ForkedServer:
    """One API server in a session of its own; of `subprocess.Popen`, what `Engine` needs."""

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str], log: Path, machine: int | None = None
    ) -> None:
        self.pid = _parent().fork(arguments, environment, log, machine)
        try:
            self._end = os.pidfd_open(self.pid)
        except ProcessLookupError:
            self._end = -1
        self._ended = self._end < 0

    def poll(self) -> int | None:
        """None while it runs, then 0: its parent does not say with which status it ended."""
        return 0 if self._has_ended(0) else None

    def wait(self, timeout: float) -> int:
        """Until it has ended; `subprocess.TimeoutExpired` when that takes longer than `timeout` seconds."""
        if not self._has_ended(timeout):
            raise subprocess.TimeoutExpired(["a forked API server"], timeout)
        return 0

    def terminate(self) -> None:
        """SIGTERM; nothing when it has ended."""
        if not self._has_ended(0):
            signal.pidfd_send_signal(self._end, signal.SIGTERM)

    def _has_ended(self, timeout: float) -> bool:
        if not self._ended:
            poll = select.poll()
            poll.register(self._end, select.POLLIN)
            self._ended = bool(poll.poll(timeout * 1000))
            if self._ended:
                os.close(self._end)
        return self._ended


class _Parent:
    """The process that engines are forked from."""

    def __init__(self) -> None:
        environment = os.environ | ({} if ON_CUDA else calm_environment()) | ONE_THREAD
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.serve"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the tests, which end their engines in good order
        )
        atexit.register(self._close)

    def fork(
        self, arguments: Sequence[str], environment: Mapping[str, str], log: Path, machine: int | None = None
    ) -> int:
        order: dict[str, Any] = {"arguments": list(arguments), "environment": dict(environment)}
        order |= {"log": str(log), "machine": machine}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def _close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@cache
def _parent() -> _Parent:
    return _Parent()


def start_parent() -> None:
    """Unless it runs. It has the network of the thread that does so, and with it engines that are told no other one."""
    _parent()


# --- in the process that engines are forked from --------------------------------------------------------------------


def fork_the_rest() -> None:
    """Have vLLM fork, also where its CPU platform asks for `spawn`, which it does to set OpenMP's environment."""
    from vllm.platforms import current_platform

    platform: Any = type(current_platform)
    check_and_update = platform.check_and_update_config

    def and_fork(cls: type, config: Any) -> None:
        check_and_update(config)
        os.environ[METHOD] = "fork"

    platform.check_and_update_config = classmethod(and_fork)


def import_what_all_need() -> None:
    """NIXL is not among it: UCX reads its environment when it is loaded."""
    import vllm.entrypoints.openai.api_server
    import vllm.v1.engine.core
    import vllm.v1.executor.multiproc_executor  # noqa: F401
    from vllm.platforms import current_platform

    importlib.import_module(f"vllm.v1.worker.{'cpu' if current_platform.is_cpu() else 'gpu'}_worker")


def become_server(order: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """The rest of this process's life."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if order["machine"] is not None:
        lan.enter(order["machine"])
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # looked up already when vLLM was imported
    nothing, log = os.open(os.devnull, os.O_RDONLY), os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for file in (nothing, log):
        os.close(file)
    if changes := environment.get(CHANGES):
        importlib.import_module(changes)
    sys.argv = ["api_server", *order["arguments"]]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


def main() -> None:
    at_start = set(os.environ)
    # What vLLM prints meanwhile must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    faulthandler.enable()  # an engine's process that dies of a signal says where, in that engine's log
    fork_the_rest()
    import_what_all_need()
    imported = {name: value for name, value in os.environ.items() if name not in at_start} | {METHOD: "fork"}
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children that have ended leave nothing
    while line := sys.stdin.readline():
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            os.setsid()
            answers.close()
            become_server(order, {**imported, **order["environment"]})
            return
        answers.write(f"{child}\n")
        answers.flush()


if __name__ == "__main__":
    main()
