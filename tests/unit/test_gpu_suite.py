"""tests/gpu without a device: it skips with a reason, and a device that is named has to be there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.device_memory import use

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/gpu/test_sums.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)


def test_any_device_where_there_is_none_skips_all_and_says_so_in_the_last_line() -> None:
    ended = run("--device", "any")
    assert ended.returncode == 0
    assert "2 skipped" in ended.stdout
    assert "passed" not in ended.stdout
    last = ended.stdout.splitlines()[-1]
    assert last.startswith("SKIPPED: ")
    assert last.endswith("sees no CUDA device. Nothing of tests/gpu was tested.")


def test_a_device_that_is_named_and_is_not_there_is_an_error() -> None:
    ended = run("--device", "cuda:1")
    assert ended.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--device cuda:1: " in ended.stderr


@pytest.mark.parametrize(("device", "expected"), [("cuda:0", ["current", "used"]), ("cpu", [])])
def test_what_is_tested_has_a_context(monkeypatch: pytest.MonkeyPatch, device: str, expected: list[str]) -> None:
    """Also before a tensor is made, which makes it: the first tests call CUDA's driver."""
    made: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: made.append("current"))
    monkeypatch.setattr(torch, "zeros", lambda _, *, device: made.append("used"))
    use(torch.device(device))
    assert made == expected
