"""The device of these tests: `--device cuda`, memory of the host, or what there is (`--device any`)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from connector.tools.ucx_devices import READS_WITHOUT_NVLINK
from tests.gpu.device_memory import use
from tests.gpu.prefill_ranks import PrefillProcess

FOLDER = Path(__file__).parent
ANY = "any"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Known when pytest is told to collect this folder or something in it."""
    parser.addoption(
        "--device",
        default="cpu",
        help="where the KV of tests/gpu lies: cuda, cuda:1, cpu, or any: cuda, and without a device all is skipped",
    )


def pytest_configure(config: pytest.Config) -> None:
    """A device that was asked for by name and is not there is no reason to pass."""
    name = config.getoption("--device", default="cpu")
    if name != ANY and torch.device(name).type != "cpu" and not torch.cuda.is_available():
        raise pytest.UsageError(f"--device {name}: {_no_device()}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _is_without_device(config):
        for item in items:
            if item.path.is_relative_to(FOLDER):
                item.add_marker(pytest.mark.skip(reason=_no_device()))


def pytest_unconfigure(config: pytest.Config) -> None:
    """The last line: nobody takes tests that were skipped for tests that have passed."""
    if _is_without_device(config) and not hasattr(config, "workerinput"):
        print(f"SKIPPED: {_no_device()}. Nothing of tests/gpu was tested.")  # noqa: T201


def _is_without_device(config: pytest.Config) -> bool:
    return config.getoption("--device", default="cpu") == ANY and not torch.cuda.is_available()


def _no_device() -> str:
    return f"torch {torch.__version__} of {sys.executable} sees no CUDA device"


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    name = request.config.getoption("--device", default="cpu")
    os.environ.setdefault(READS_WITHOUT_NVLINK, "y")  # or cuda_ipc is not tested on a machine that has none
    device = torch.device("cuda" if name == ANY else name)
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
