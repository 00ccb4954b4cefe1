"""What all suites share: the order of the tests, and an orderly end.

Cheap suites run first, so that a broken table is reported in seconds and not behind minutes of engine starts. A
terminated run (`kill`, a CI time limit) ends like an interrupted one: fixtures are torn down and engines stopped.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from vllm.config import VllmConfig

TESTS = Path(__file__).parent

SUITES_IN_ORDER = ("unit", "explore", "conformance", "simulation", "actors", "bench", "integration", "gpu", "e2e")
"""Cheap ones first, but `conformance`, whose one long file would keep one of two processes busy alone at the end."""


def pytest_configure(config: pytest.Config) -> None:
    """SIGTERM interrupts, as Ctrl-C does. So does Ctrl-C in a run that a shell has begun in the background: such a run
    ignores SIGINT, and so would the programs that tests start."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Suites by cost; within a suite, tests marked slow or e2e last; otherwise the order of collection."""

    def cost(item: pytest.Item) -> tuple[int, bool, bool]:
        suite = item.path.relative_to(TESTS).parts[0]
        rank = SUITES_IN_ORDER.index(suite) if suite in SUITES_IN_ORDER else -1
        return rank, item.get_closest_marker("e2e") is not None, item.get_closest_marker("slow") is not None

    items.sort(key=cost)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmConfig]:
    """Of an engine of one rank, whose process groups this process has meanwhile."""
    # Here, because tests/gpu runs without vLLM.
    from tests.unit.vllm_setup import engine_config, single_rank, write_model

    config = engine_config(write_model(tmp_path_factory.mktemp("model")))
    with single_rank(config, tmp_path_factory.mktemp("rendezvous")):
        yield config
