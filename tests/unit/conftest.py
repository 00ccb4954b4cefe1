"""The browser in which the timeline page is tested. Without a Chromium these tests are skipped, and say so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.browser import NAMES, Browser, find_browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    path = find_browser()
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is on the path")
    with Browser(path, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def page(browser: Browser) -> Iterator[Browser]:
    """A window of the usual size; whatever a page complains of fails the test."""
    browser.complaints.clear()
    browser.size(1280, 800)
    yield browser
    assert browser.complaints == []
