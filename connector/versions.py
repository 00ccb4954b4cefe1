"""Which versions are installed, as the log, traces, metrics and tools say them."""

from __future__ import annotations

from importlib import metadata

NIXL = ("nixl", "nixl-cu12", "nixl-cu13")
"""Distributions that NIXL comes in: a wheel for one kind of device may be installed without the one that chooses."""

UNKNOWN = "unknown"
"""The version that is shown of what runs without having been installed."""


def installed_version(*distributions: str) -> str | None:
    """The version of the first of these that is installed; None: none is."""
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def shown_version(*distributions: str) -> str:
    """The same in a line for people, and where something has to stand."""
    return installed_version(*distributions) or UNKNOWN
