"""Engines that wait without starving the machine.

vLLM's processes wait for each other by calling sched_yield in a loop: the shared-memory queue between engine core and
worker for up to a second after each message, the collectives of tensor parallelism on a CPU for as long as they last.
On Linux 6.18 such loops can keep every other task of a small machine from running, for seconds with one engine and for
a minute with two ranks. Seen on two cores: a process that only sleeps woke 59 s late, and the kernel logged
"rcu_preempt kthread starved for 14752 jiffies" with the running task in sched_yield. Whatever a test measures then is
an accident.

So the tests' engines are started with a sched_yield of our own that sleeps for a moment. It is a shared library for
LD_PRELOAD, built once with the C compiler of the machine; without a compiler the engines run as they are.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / ".state" / "calm"
SOURCE = """
#include <time.h>
int sched_yield(void) {
    struct timespec moment = {0, 50000};
    nanosleep(&moment, 0);
    return 0;
}
"""


@cache
def calm_library() -> Path | None:
    """The library to preload; built when it is not there yet. None: there is no C compiler."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        return None
    library = FOLDER / f"calm-{hashlib.sha256(SOURCE.encode()).hexdigest()[:12]}.so"
    if not library.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
            built = Path(folder) / "calm.so"
            command = [compiler, "-shared", "-fPIC", "-O2", "-x", "c", "-", "-o", str(built)]
            subprocess.run(command, input=SOURCE, text=True, check=True, capture_output=True)
            built.rename(library)  # at once: another run may look for it
    return library


def calm_environment() -> dict[str, str]:
    """What an engine's environment needs; LD_PRELOAD may name other libraries already."""
    library = calm_library()
    if library is None:
        return {}
    return {"LD_PRELOAD": ":".join(filter(None, (str(library), os.environ.get("LD_PRELOAD"))))}
