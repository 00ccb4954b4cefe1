"""Versions of what is installed, where they are said."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata

import msgspec
import pytest

from connector.observe.stats import _versions as labels
from connector.versions import NIXL, installed_version, shown_version
from connector.worker.engine_facts import _versions as told


def installed(versions: dict[str, str]) -> Callable[[str], str]:
    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    return version


def test_versions_are_those_of_the_distributions() -> None:
    assert installed_version("msgspec") == shown_version("msgspec") == msgspec.__version__
    assert (installed_version("no such distribution"), shown_version("no such distribution")) == (None, "unknown")


@pytest.mark.parametrize("name", NIXL)
def test_nixl_s_is_known_in_whichever_distribution_it_came(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """In the log, with tools and as a label."""
    monkeypatch.setattr(metadata, "version", installed({name: "1.5.7"}))
    assert shown_version(*NIXL) == told()["nixl"] == labels()[2] == "1.5.7"
    assert "trio" not in told()
    assert labels()[0] == "unknown"
