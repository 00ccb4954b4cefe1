"""The stacks that a late request leaves behind, taken from processes that stand where the test puts them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.e2e.cluster import wait_for
from tests.e2e.stalls import DUMP_TIMEOUT_SECONDS, Stall, stacks_of, watched

SLEEPER = "import sys, time\ndef stands_here():\n    print('up', flush=True)\n    time.sleep(60)\nstands_here()"


@pytest.fixture
def engine() -> Iterator[Any]:
    """A process that is as good as an engine: it has a process id."""
    with subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield SimpleNamespace(pid=process.pid)
        process.kill()


def test_takes_the_stacks_of_what_is_late(engine: Any) -> None:
    with watched(engine, 0.05) as stall:
        wait_for(lambda: stall.stacks or None, "the stacks of what is late", 2 * DUMP_TIMEOUT_SECONDS)
    assert "stands_here" in str(stall)


def test_takes_none_of_what_is_in_time(engine: Any) -> None:
    with watched(engine, 30.0) as stall:
        pass
    assert not stall.stacks


def test_a_process_that_is_gone_has_none(engine: Any) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert stacks_of(SimpleNamespace(pid=gone.pid)) == {}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("core", "worker", "expected"),
    [
        ("poll\nSpinCondition.wait", "poll\nSpinCondition.wait", True),
        ("poll\nSpinCondition.wait", "AgentThread.call", False),
        ("Listener.request_finished", "poll\nSpinCondition.wait", False),
    ],
)
def test_the_queue_is_to_blame_when_both_ends_wait(core: str, worker: str, expected: bool) -> None:
    stall = Stall()
    stall.stacks = {"VLLM::EngineCore (1)": core, "VLLM::Worker (2)": worker, "python (3)": ""}
    assert stall.in_queue is expected


def test_nobody_is_to_blame_when_nothing_was_seen() -> None:
    assert not Stall().in_queue
