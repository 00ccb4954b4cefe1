"""vLLM's source distribution: fetched once, kept, and unpacked in part."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from connector.versions import VLLM, shown_version

KEPT = Path(__file__).resolve().parents[2] / ".state" / "upstream"
DISTRIBUTION = "vllm"
BUILD_NEEDS = ("setuptools-rust", "setuptools-scm")
"""pip asks a source distribution for its metadata before it keeps it, and vLLM's needs these to answer."""


class NotFetched(Exception):
    """pip did not get the source distribution; the message has the last line of what it said."""

    def __init__(self, wanted: str, said: str) -> None:
        lines = said.strip().splitlines() or ["it said nothing"]
        super().__init__(f"the source distribution of {DISTRIBUTION} {wanted} cannot be fetched: {lines[-1]}")


def may_be_missing() -> bool:
    """Whether tests that need it may be left out where it cannot be fetched: not in a continuous integration, which
    says so by the variable CI, because nobody would notice."""
    return os.environ.get("CI", "").lower() not in ("1", "true")


def end_without(error: NotFetched, *, or_skip: bool) -> NoReturn:
    """End the program, well if what needs the distribution may be left out."""
    is_skipped = or_skip and may_be_missing()
    sys.stderr.write(f"{'SKIPPED: ' if is_skipped else ''}{error}\n")
    sys.exit(0 if is_skipped else 1)


def installed() -> str:
    """Its version, without what tells the build."""
    return shown_version(*VLLM).partition("+")[0]


def source_distribution(version: str | None = None) -> Path:
    """The archive of that version, or of the installed one; fetched (44 MB) the first time. Raises NotFetched."""
    wanted = version or installed()
    KEPT.mkdir(parents=True, exist_ok=True)
    if not (found := _kept(wanted)):
        with tempfile.TemporaryDirectory() as needs:
            _pip(wanted, ["install", "--target", needs, *BUILD_NEEDS], os.environ)
            environment = os.environ | {
                "PYTHONPATH": needs,
                "VLLM_TARGET_DEVICE": "empty",
                "VLLM_VERSION_OVERRIDE": wanted,
                "SETUPTOOLS_SCM_PRETEND_VERSION": wanted,
            }
            fetch = ["download", "--no-deps", "--no-binary", DISTRIBUTION, "--no-build-isolation", "--dest", str(KEPT)]
            _pip(wanted, [*fetch, f"{DISTRIBUTION}=={wanted}"], environment)
        found = _kept(wanted)
    return found[0]


def unpack(source: Path, directory: Path, part: str) -> Path:
    """What lies below the folder `part` of the distribution. Returns the root that the part is relative to."""
    with tarfile.open(source) as archive:
        members = [each for each in archive.getmembers() if each.name.partition("/")[2].startswith(f"{part}/")]
        archive.extractall(directory, members, filter="data")
    (root,) = directory.iterdir()
    return root


def _kept(wanted: str) -> list[Path]:
    return sorted(KEPT.glob(f"{DISTRIBUTION}-{wanted}*.tar.gz"))


def _pip(wanted: str, arguments: list[str], environment: Mapping[str, str]) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    ended = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, check=False)
    if ended.returncode != 0:
        raise NotFetched(wanted, ended.stderr)
