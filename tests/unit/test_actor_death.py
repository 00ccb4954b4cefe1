"""What an engine does whose actors have died, by its option; in a process of its own, which may end by it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

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


def die(how: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", DIES, how]
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
