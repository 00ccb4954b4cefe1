"""`make test`: every part runs whatever became of the others, and the exit status is that of all together."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

STAND_IN = """#!/bin/sh
echo "$(basename "$0") $*" >> "$CALLS"
case "$(basename "$0") $*" in *"$FAILING"*) exit 1;; esac
"""

PARTS = {
    "check": "ruff check .",
    "tests without engines": "tests/conformance",
    "vLLM's own tests": "-m tests.upstream",
    "fresh seeds": "-m tests.simulation.fresh",
    "engines, two files at a time": "--no-loadscope-reorder tests/integration",
    "engines alone": "-m pytest tests/e2e/test_dead_prefill.py",
    "programs that are missing": "-m tests.programs",
}
"""What a call of each part contains."""


def run_make(directory: Path, failing: str) -> tuple[int, list[str]]:
    """`make test` with tools that only note how they are called; those whose call contains `failing` fail."""
    tools, calls = directory / "bin", directory / "calls"
    tools.mkdir()
    for name in ("python", "ruff", "mypy"):
        (tools / name).write_text(STAND_IN)
        (tools / name).chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    environment |= {"CALLS": str(calls), "FAILING": failing}
    command = ["make", "test", f"BIN={tools}", "PYTHON=true"]
    status = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=250).returncode
    return status, calls.read_text().splitlines()


def test_all_parts_run_in_their_order(tmp_path: Path) -> None:
    status, calls = run_make(tmp_path, failing="nothing of the sort")
    assert status == 0
    places = [next(number for number, call in enumerate(calls) if sign in call) for sign in PARTS.values()]
    assert places == sorted(places)


@pytest.mark.parametrize("failing", PARTS)
def test_a_part_that_fails_hides_no_other(tmp_path: Path, failing: str) -> None:
    status, calls = run_make(tmp_path, failing=PARTS[failing])
    assert status != 0
    for sign in PARTS.values():
        assert any(sign in call for call in calls)


def test_the_continuous_integration_calls_it() -> None:
    assert "exec make --no-print-directory test\n" in (ROOT / ".ci" / "run").read_text()
