"""Seeds that were not run before: what is said of them, and that no level hides another."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

import pytest

from tests.simulation import fresh

LIMIT_SECONDS = 30.0


def says(*lines: str, then: str = "exit 0") -> list[str]:
    """A command in place of a level; `make test` runs the real ones."""
    return ["sh", "-c", f'printf "%s\\n" "$@"; {then}', "sh", *lines]


PASSED = ("seeds        2", "verdict      all passed")


def test_all_levels_run_from_the_same_seed_for_the_same_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fresh", "--seconds", "0.5", "--seed", "131"])
    command = fresh._command
    monkeypatch.setattr(fresh, "_command", lambda *what: says(" ".join(command(*what)[1:]), *PASSED, then="exit 1"))
    assert fresh.main() == 1
    expected = ["levels 1, 2, vllm: seeds from 131 on, for 0.5 s"]
    for level in ("1", "2", "vllm"):
        called = f"-m tests.simulation --level {level} --seed 131 --seconds 0.5"
        expected += [f"--- level {level}", called, *PASSED]
    assert capsys.readouterr().out.splitlines() == expected


@pytest.mark.parametrize("said", [("seeds        0", "verdict      all passed"), ("verdict      all passed",)])
def test_a_level_that_runs_no_seed_has_failed(said: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert not fresh.run({"1": says(*said), "2": says(*PASSED)}, LIMIT_SECONDS)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "FAILED" in line] == ["verdict      level 1 has run no seed, FAILED"]


def test_no_two_runs_begin_alike(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["fresh"])
    monkeypatch.setattr(fresh, "_command", lambda level, first, seconds: says("seeds 1", f"verdict {first}"))
    started = []
    for _ in range(2):
        assert fresh.main() == 0
        started.append(int(capsys.readouterr().out.split()[-1]))
        time.sleep(0.002)
    assert abs(started[0] / 1000 - time.time()) < LIMIT_SECONDS
    assert started[0] < started[1]


@pytest.mark.parametrize("failing", ["1", "2"])
def test_a_seed_that_fails_is_shown_and_hides_no_other(failing: str, capsys: pytest.CaptureFixture[str]) -> None:
    bad = says("seed 7", "seed 8", "  bytes: wrong", "seed 9", "seeds  3", "coverage 5", then="exit 1")
    levels = dict.fromkeys(("1", "2"), says("seed 7", "seed 8", *PASSED, "coverage 6"))
    assert not fresh.run(levels | {failing: bad}, LIMIT_SECONDS)
    said = capsys.readouterr().out
    assert "seed 8\n  bytes: wrong\n" in said
    assert "all passed" in said
    assert "seed 7" not in said
    assert "seed 9" not in said
    assert "coverage 5" in said
    assert "coverage 6" not in said  # A log is read from its end.


def test_a_seed_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    start = subprocess.Popen

    def start_and_hear(command: list[str], *, stdout: IO[str], **others: Any) -> subprocess.Popen[bytes]:
        """Back when it has said all, however long a shell takes to start: none of its time is used up before."""
        process = start(command, stdout=stdout, **others)
        ends_at = time.monotonic() + LIMIT_SECONDS
        while Path(f"/proc/self/fd/{stdout.fileno()}").read_text() != "\n".join([*command[4:], ""]):
            assert time.monotonic() < ends_at
            time.sleep(0.01)
        if command is not hangs:
            process.wait(LIMIT_SECONDS)
        return process

    hangs = says("seed 7", "seed 8", then="exec sleep 600")
    monkeypatch.setattr(subprocess, "Popen", start_and_hear)
    assert not fresh.run({"1": hangs, "2": says(*PASSED)}, 0.1)
    said = capsys.readouterr().out
    assert said.startswith("--- level 1\nseed 8\nverdict      level 1 hangs, FAILED\n--- level 2\n")
    assert said.endswith("all passed\n")
