"""What the end-to-end tests of a run share: the room with its engines (see `cluster`), and an order in which no group
of engines has to be started twice."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.cluster import BuiltinAndOurs, OnePrefillTwoDecode, Room
from tests.e2e.traced import Traced

MODULES_IN_ORDER = (
    "test_beside_offloading",
    "test_builtin_compatibility",
    "test_mixed_pairs",
    "test_options_at_start",
    "test_metrics",
    "test_request_kinds",
    "test_cache_reset",
    "test_routers",
    "test_hostile_input",
    "test_aborts",
    "test_dead_prefill",
    "test_lease_acknowledged",
    "test_why",
    "test_mixed_leases",
)
"""The modules that share engines, those that break them last."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Known when pytest is told to collect this folder or something in it."""
    parser.addoption("--builtin", action="store_true", help="test_families with vLLM's own connector on both sides")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules of the list in its order, behind all others."""
    items.sort(key=lambda item: MODULES_IN_ORDER.index(item.path.stem) if item.path.stem in MODULES_IN_ORDER else -1)


@pytest.fixture(scope="session")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    room = Room(tmp_path_factory.mktemp("engines"))
    yield room
    room.clear()


@pytest.fixture
def unmended(room: Room) -> OnePrefillTwoDecode:
    """One producer, two consumers; the test before may have killed the producer."""
    return room.occupy(OnePrefillTwoDecode)


@pytest.fixture
def cluster(unmended: OnePrefillTwoDecode) -> OnePrefillTwoDecode:
    """One producer, two consumers; the producer works."""
    unmended.need_prefill()
    return unmended


@pytest.fixture
def mixed(room: Room) -> BuiltinAndOurs:
    return room.occupy(BuiltinAndOurs)


@pytest.fixture
def traced(room: Room) -> Traced:
    return room.occupy(Traced)
