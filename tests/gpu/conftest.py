"""The device of these tests: `--device cuda`, or memory of the host."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch

from tests.gpu.device_memory import use
from tests.gpu.prefill_ranks import PrefillProcess


def pytest_addoption(parser: pytest.Parser) -> None:
    """Known when pytest is told to collect this folder or something in it."""
    parser.addoption("--device", default="cpu", help="where the KV of tests/gpu lies: cuda, cuda:1, or cpu")


def pytest_configure(config: pytest.Config) -> None:
    """A device that was asked for and is not there is no reason to pass."""
    name = config.getoption("--device", default="cpu")
    if torch.device(name).type != "cpu" and not torch.cuda.is_available():
        raise pytest.UsageError(f"--device {name}: torch {torch.__version__} of {sys.executable} sees no such device")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    device = torch.device(request.config.getoption("--device", default="cpu"))
    if device.type != "cpu":
        device = torch.device(device.type, device.index or 0)
    use(device)
    return device


@pytest.fixture(scope="session")
def gpu(device: torch.device) -> torch.device:
    """For what memory of the host cannot stand for."""
    if device.type == "cpu":
        pytest.skip("needs a device (--device cuda)")
    return device


@pytest.fixture(scope="module")
def prefill(device: torch.device) -> Iterator[PrefillProcess]:
    with PrefillProcess(device) as process:
        yield process
