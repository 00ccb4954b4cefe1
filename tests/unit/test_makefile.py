"""`make test` and `make test-all`: every part runs whatever became of the others, the exit status is that of all
together, and each file of tests is run once."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

STAND_IN = """#!/bin/sh
echo "$(basename "$0") $*" >> "$CALLS"
case "$(basename "$0") $*" in *"$FAILING"*) exit 1;; esac
"""

BEFORE = {
    "check": "ruff check .",
    "tests without engines": "tests/conformance",
    "vLLM's own tests": "-m tests.upstream",
    "engines": "tests/integration tests/gpu",
}
AFTER = {
    "another version of vLLM": "-m tests.on_vllm",
    "fresh seeds": "-m tests.simulation.fresh",
    "programs that are missing": "-m tests.programs",
}
PARTS = BEFORE | AFTER
"""What a call of each part contains."""

ONLY_IN_ALL = {
    "what takes long": "tests/integration/test_networks.py tests/e2e",
    "engines alone": "-m pytest tests/e2e/test_dead_prefill.py",
    "the oldest libraries": "-m tests.lowest",
}
PARTS_OF_ALL = BEFORE | ONLY_IN_ALL | AFTER


def run_make(directory: Path, failing: str, target: str = "test") -> tuple[int, list[str]]:
    """The target with tools that only note how they are called; those whose call contains `failing` fail."""
    tools, calls = directory / "bin", directory / "calls"
    tools.mkdir()
    for name in ("python", "ruff", "mypy"):
        (tools / name).write_text(STAND_IN)
        (tools / name).chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    environment |= {"CALLS": str(calls), "FAILING": failing}
    command = ["make", target, f"BIN={tools}", "PYTHON=true"]
    status = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=250).returncode
    return status, calls.read_text().splitlines()


@pytest.mark.parametrize(("target", "parts"), [("test", PARTS), ("test-all", PARTS_OF_ALL)])
def test_all_parts_run_in_their_order(tmp_path: Path, target: str, parts: dict[str, str]) -> None:
    status, calls = run_make(tmp_path, "nothing of the sort", target)
    assert status == 0
    places = [next(number for number, call in enumerate(calls) if sign in call) for sign in parts.values()]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("target", "failing"), [*(("test", part) for part in PARTS), *(("test-all", part) for part in ONLY_IN_ALL)]
)
def test_a_part_that_fails_hides_no_other(tmp_path: Path, target: str, failing: str) -> None:
    parts = PARTS if target == "test" else PARTS_OF_ALL
    status, calls = run_make(tmp_path, parts[failing], target)
    assert status != 0
    for sign in parts.values():
        assert any(sign in call for call in calls)


def test_each_file_of_tests_is_run_once(tmp_path: Path) -> None:
    _, calls = run_make(tmp_path, "nothing of the sort", "test-all")
    runs: Counter[str] = Counter()
    for call in calls:
        words = call.split()
        if words[1:3] == ["-m", "pytest"]:
            runs.update(files_of(words[3:]))
    there = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    assert dict(runs) == dict.fromkeys(there, 1)


def files_of(arguments: list[str]) -> set[str]:
    """What pytest runs: files below the folders and files that it is given, without those that it is to ignore."""
    ignored = {argument for before, argument in pairwise(arguments) if before == "--ignore"}
    given = [ROOT / argument for argument in arguments if argument.startswith("tests/") and argument not in ignored]
    found = {file for path in given for file in ([path] if path.is_file() else path.rglob("test_*.py"))}
    return {str(file.relative_to(ROOT)) for file in found} - ignored


def test_the_continuous_integration_calls_it() -> None:
    assert "exec make --no-print-directory test\n" in (ROOT / ".ci" / "run").read_text()
