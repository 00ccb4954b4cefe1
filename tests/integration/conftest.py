"""The engines that all tests of this suite share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.house import House, open_house


@pytest.fixture(scope="package")
def shared_house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """Started once, and ended before the next suite needs the machine; tests use `house`."""
    with open_house(tmp_path_factory.mktemp("integration")) as house:
        yield house


@pytest.fixture
def house(shared_house: House) -> Iterator[House]:
    """The shared engines; whole again after each test, or the test has failed."""
    yield shared_house
    shared_house.expect_whole()
