"""On which CPUs the connector's threads may run.

vLLM's CPU worker pins its main thread to one core of its OpenMP team, and a new thread inherits that: actors and copies
of KV would take the core from the model while others idle. A wider mask is somebody's choice, for the sake of NUMA for
example, and is left alone.
"""

from __future__ import annotations

import os


def leave_single_cpu() -> None:
    """Let the calling thread run where the parent process may, if it has inherited a single CPU.

    The parent is the server that started the worker: its mask shows what this process was given.
    """
    try:
        if len(os.sched_getaffinity(0)) == 1:
            os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
    except (OSError, AttributeError):  # not permitted here, or not Linux: the mask stays as it is
        return
