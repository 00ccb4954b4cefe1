"""What an engine does whose actors have died, by its option; in a process of its own, which may end by it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from connector.actor_death import EXIT_STATUS, ORDERLY_END_SECONDS
from connector.config import parse_options

ROOT = Path(__file__).parents[2]

DIES = """
import sys, time
from connector.actor_death import act_on
from connector.config import parse_options
act_on(parse_options({"on_actor_death": sys.argv[1]}), "its actors died: OSError('injected')\\nERROR forged")
time.sleep(1)
print("lives on")
"""

BUSY = """
import signal, sys, threading, time
from connector.actor_death import act_on
from connector.config import parse_options
signal.signal(signal.SIGTERM, lambda *_: print("asked to end", flush=True))
dying = threading.Thread(target=act_on, args=(parse_options({"on_actor_death": sys.argv[1]}), "its actors died"))
dying.start()
while True:
    time.sleep(0.1)
"""
"""Like vLLM's engine core while it has work, which dies by the hand of another thread than the one with the signals."""


WITHOUT_THREADS = """
import signal, sys, threading, time
from connector.actor_death import act_on
from connector.config import parse_options
signal.signal(signal.SIGTERM, lambda *_: print("asked to end", flush=True))
def start(thread):
    raise RuntimeError("can't start new thread")
is_at_limit = threading.Event()
def die():
    is_at_limit.wait()
    act_on(parse_options({"on_actor_death": sys.argv[1]}), "its actors died")
threading.Thread(target=die).start()
threading.Thread.start = start
is_at_limit.set()
for _ in range(600):
    time.sleep(0.1)
print("lives on")
"""
"""As `BUSY`, in a process that may have no more threads once `die` runs."""


def die(how: str, program: str = DIES) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, how]
    return subprocess.run(command, cwd=ROOT, timeout=250, capture_output=True, text=True, check=False)


def test_by_default_it_goes_on() -> None:
    assert parse_options({}, {}).on_actor_death == "degrade"
    died = die("degrade")
    assert (died.returncode, died.stdout) == (0, "lives on\n")
    assert "transfers no KV any more: its actors died: OSError" in died.stderr


def test_it_ends_when_asked_to_with_one_line_that_has_the_cause() -> None:
    died = die("exit")
    assert (died.returncode, died.stdout) == (-signal.SIGTERM, "")
    (line,) = died.stderr.splitlines()
    assert "transfers no KV any more: its actors died: OSError" in line
    assert "on_actor_death=exit" in line


def test_it_ends_although_sigterm_does_not_end_it() -> None:
    began = time.monotonic()
    died = die("exit", BUSY)
    assert (died.returncode, died.stdout) == (EXIT_STATUS, "asked to end\n")
    assert time.monotonic() - began >= ORDERLY_END_SECONDS
    assert f"in {ORDERLY_END_SECONDS:g} s" in died.stderr


def test_it_ends_although_it_may_have_no_more_threads() -> None:
    died = die("exit", WITHOUT_THREADS)
    assert (died.returncode, died.stdout) == (-signal.SIGALRM, "asked to end\n")
