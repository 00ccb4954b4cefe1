"""What puts another version of vLLM in front of the installed one."""

from __future__ import annotations

import os
import sys
import tarfile
from importlib import metadata
from pathlib import Path

import pytest

from tests.on_vllm import __main__ as on_vllm
from tests.on_vllm import versions
from tests.on_vllm.moved import _first
from tests.upstream.source import NotFetched

VERSION = "9.9.0"


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where a version is kept whose source distribution has one module; its archive is fetched once."""
    packed = tmp_path / f"vllm-{VERSION}"
    (packed / "vllm").mkdir(parents=True)
    (packed / "vllm" / "__init__.py").write_text("import os\n")
    archive = tmp_path / "vllm.tar.gz"
    with tarfile.open(archive, "w:gz") as writer:
        writer.add(packed, packed.name)
    fetched: list[str] = []

    def fetch(version: str) -> Path:
        assert not fetched
        fetched.append(version)
        return archive

    monkeypatch.setattr(versions, "source_distribution", fetch)
    monkeypatch.setattr(versions, "KEPT", tmp_path / "kept")
    return tmp_path / "kept"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["on_vllm", *arguments])
    return on_vllm.main()


def test_it_is_made_once_with_the_compiled_code_and_says_its_version(kept: Path) -> None:
    folder = versions.folder_of(VERSION)
    assert versions.folder_of(VERSION) == folder == kept / VERSION
    assert list(kept.iterdir()) == [folder]
    assert list((folder / "vllm").glob("_C*.so"))
    (found,) = metadata.distributions(name="vllm", path=[str(folder)])
    assert found.version == f"{VERSION}+cpu"
    assert {point.group for point in found.entry_points} >= {"vllm.general_plugins"}


def test_one_that_was_interrupted_is_not_kept(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Path) -> None:
        raise OSError("no space")

    with monkeypatch.context() as patch:
        patch.setattr(versions, "_add_compiled_code", full)
        with pytest.raises(OSError, match="no space"):
            versions.folder_of(VERSION)
    assert not list(kept.iterdir())


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("status", [0, 3])
def test_a_module_finds_it_first_and_its_status_is_ours(
    status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "looks.py").write_text(
        "import os, sys, importlib.util\n"
        "found = importlib.util.find_spec('vllm').origin\n"
        "assert 'kept' in found, found\n"
        "assert os.environ['PYTHONPATH'].endswith(sys.argv[1]), sys.argv\n"
        "sys.exit(int(sys.argv[2]))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert run(monkeypatch, VERSION, "looks", str(tmp_path), str(status)) == status
    assert os.environ["PYTHONPATH"] == str(tmp_path)


def test_without_its_source_distribution_nothing_is_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def not_there(version: str) -> Path:
        raise NotFetched(version, "no index")

    monkeypatch.setattr(on_vllm, "folder_of", not_there)
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, VERSION, "pytest")
    assert ended.value.code == 1
    assert f"{VERSION} cannot be fetched: no index" in capsys.readouterr().err


def test_what_no_version_has_is_named() -> None:
    with pytest.raises(ImportError, match="has lost in none of os, no_such_module"):
        _first(("os", "no_such_module"), "lost")
