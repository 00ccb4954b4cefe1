"""Another version of vLLM on CPUs: its Python, with the compiled code of the installed one."""

from __future__ import annotations

import shutil
import tempfile
from importlib import metadata, util
from pathlib import Path

from connector.versions import VLLM
from tests.upstream.source import DISTRIBUTION, source_distribution, unpack

KEPT = Path(__file__).resolve().parents[2] / ".state" / "on-vllm"
BUILD = "cpu"
"""What the version has to say after its `+` for vLLM to choose its platform for CPUs."""


def folder_of(version: str) -> Path:
    """The folder to put in front of all others where modules are looked for; made the first time. Raises NotFetched."""
    kept = KEPT / version
    if not kept.exists():
        KEPT.mkdir(parents=True, exist_ok=True)
        archive = source_distribution(version)
        # Made beside it and then renamed: one that was interrupted is no version.
        with tempfile.TemporaryDirectory(dir=KEPT) as directory:
            root = unpack(archive, Path(directory), DISTRIBUTION)
            _add_compiled_code(root / DISTRIBUTION)
            _add_metadata(root, version)
            root.rename(kept)
    return kept


def _add_compiled_code(package: Path) -> None:
    installed = util.find_spec(DISTRIBUTION)
    assert installed is not None
    assert installed.origin is not None
    beside = Path(installed.origin).parent
    for library in beside.rglob("*.so"):
        target = package / library.relative_to(beside)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, target)


def _add_metadata(root: Path, version: str) -> None:
    """With the entry points of the installed one: those that vLLM itself needs."""
    # The first: one that was put in front of the installed one may be there, too.
    installed = next(found for name in VLLM for found in metadata.distributions(name=name))
    folder = root / f"{DISTRIBUTION}-{version}+{BUILD}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: {version}+{BUILD}\n")
    (folder / "entry_points.txt").write_text(installed.read_text("entry_points.txt") or "")
