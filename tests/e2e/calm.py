"""Engines that wait without starving the machine.

vLLM's processes wait for each other by calling sched_yield in a loop: the shared-memory queue between engine core and
worker for up to a second after each message, the collectives of tensor parallelism on a CPU for as long as they last.
On Linux 6.18 such loops can keep every other task of a small machine from running, for seconds with one engine and for
a minute with two ranks. Seen on two cores: a process that only sleeps woke 59 s late, and the kernel logged
"rcu_preempt kthread starved for 14752 jiffies" with the running task in sched_yield. Whatever a test measures then is
an accident.

So the tests' engines are started with a sched_yield of our own that sleeps for a moment. It is a shared library for
LD_PRELOAD, built once with the C compiler of the machine; without a compiler the engines run as they are.

NIXL's progress thread, which the built-in connector runs in each worker, calls poll in such a loop. One takes a core;
with two ranks a process that only sleeps woke 16 s late, and leases of 30 s ended. So where `CALM_POLLING` is set in
its environment, a process sleeps for a moment after each poll that was not to wait and has found nothing. Elsewhere
poll is as it was: ZMQ calls it like that too, and our engines have no such thread.
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
CALM_POLLING = "CALM_POLLING"
SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <poll.h>
#include <stdlib.h>
#include <time.h>

static void sleep_for_a_moment(void) {
    struct timespec moment = {0, 50000};
    nanosleep(&moment, 0);
}

int sched_yield(void) {
    sleep_for_a_moment();
    return 0;
}

int poll(struct pollfd *files, nfds_t count, int timeout) {
    static int (*original)(struct pollfd *, nfds_t, int);
    if (!original)
        original = (int (*)(struct pollfd *, nfds_t, int))dlsym(RTLD_NEXT, "poll");
    int found = original(files, count, timeout);
    if (found == 0 && timeout == 0 && getenv("CALM_POLLING"))
        sleep_for_a_moment();
    return found;
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
