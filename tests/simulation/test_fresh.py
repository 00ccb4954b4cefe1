"""Seeds that were not run before: what is said of them, and that no level hides another."""

from __future__ import annotations

import sys
import time

import pytest

from tests.simulation import fresh

LIMIT_SECONDS = 30.0


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


@pytest.mark.slow
def test_all_levels_run_until_the_time_is_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fresh", "--seconds", "0.5", "--seed", "131"])
    assert fresh.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "levels 1, 2, vllm: seeds from 131 on, for 0.5 s"
    assert [line for line in lines if line.startswith("---")] == [
        "--- level 1",
        "--- level 2",
        "--- level vllm",
    ]
    assert lines.count("verdict      all passed") == 3
    assert all(int(line.split()[1]) > 0 for line in lines if line.startswith("seeds  "))


def test_no_two_runs_begin_alike(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["fresh"])
    monkeypatch.setattr(fresh, "_command", lambda level, first, seconds: python(f"print({first})"))
    started = []
    for _ in range(2):
        assert fresh.main() == 0
        started.append(int(capsys.readouterr().out.splitlines()[-1]))
        time.sleep(0.002)
    assert abs(started[0] / 1000 - time.time()) < LIMIT_SECONDS
    assert started[0] < started[1]


@pytest.mark.parametrize("failing", ["1", "2"])
def test_a_seed_that_fails_is_shown_and_hides_no_other(failing: str, capsys: pytest.CaptureFixture[str]) -> None:
    bad = "print('seed 7'); print('seed 8'); print('  bytes: wrong'); print('seed 9'); print('seeds  3'); exit(1)"
    levels = dict.fromkeys(
        ("1", "2"), python("print('seed 7'); print('seed 8'); print('seeds  2'); print('all passed')")
    )
    assert not fresh.run(levels | {failing: python(bad)}, LIMIT_SECONDS)
    said = capsys.readouterr().out
    assert "seed 8\n  bytes: wrong\n" in said
    assert "all passed" in said
    assert "seed 7" not in said
    assert "seed 9" not in said


def test_a_seed_that_hangs_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    hangs = "import time; print('seed 7'); print('seed 8', flush=True); time.sleep(600)"
    # Long enough for two interpreters to start on a busy machine; one of them uses it up.
    assert not fresh.run({"1": python(hangs), "2": python("print('all passed')")}, 10.0)
    said = capsys.readouterr().out
    assert said.startswith("--- level 1\nseed 8\nverdict      level 1 hangs, FAILED\n--- level 2\n")
    assert said.endswith("all passed\n")
