"""What fetches vLLM's source distribution: what it says when it cannot, and what it unpacks."""

from __future__ import annotations

import sys
import tarfile
from pathlib import Path

import pytest

from tests.upstream import __main__ as upstream
from tests.upstream import source
from tests.upstream.source import DISTRIBUTION, NotFetched, source_distribution, unpack

NOBODY_LISTENS = "http://127.0.0.1:1/"


def test_without_an_index_it_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(source, "KEPT", tmp_path / "kept")
    for name, value in {"PIP_INDEX_URL": NOBODY_LISTENS, "PIP_RETRIES": "0", "PIP_EXTRA_INDEX_URL": ""}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(NotFetched, match=rf"the source distribution of {DISTRIBUTION} .* cannot be fetched: ERROR"):
        source_distribution()


@pytest.mark.parametrize(
    ("given", "ci", "status"), [(["--or-skip"], None, 0), (["--or-skip"], "true", 1), ([], None, 1)]
)
def test_what_cannot_be_fetched_is_left_out_only_where_somebody_sees_it(
    given: list[str],
    ci: str | None,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def not_there() -> Path:
        raise NotFetched("1.2", "no index")

    monkeypatch.setattr(upstream, "source_distribution", not_there)
    monkeypatch.setattr(sys, "argv", ["upstream", *given])
    monkeypatch.delenv("CI", raising=False)
    if ci is not None:
        monkeypatch.setenv("CI", ci)
    with pytest.raises(SystemExit) as ended:
        upstream.main()
    assert ended.value.code == status
    said = capsys.readouterr().err
    assert "no index" in said
    assert said.startswith("SKIPPED: ") == (status == 0)


def test_a_distribution_that_is_there_is_not_fetched_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(source, "KEPT", tmp_path)
    monkeypatch.setenv("PIP_INDEX_URL", NOBODY_LISTENS)
    there = tmp_path / f"{DISTRIBUTION}-{source.installed()}.tar.gz"
    there.touch()
    assert source_distribution() == there


def test_unpacks_one_folder(tmp_path: Path) -> None:
    packed = tmp_path / "packed" / "vllm-1"
    for name in ("tests/v1/one.py", "tests/v10/two.py", "vllm/three.py"):
        (packed / name).parent.mkdir(parents=True, exist_ok=True)
        (packed / name).touch()
    archive = tmp_path / "vllm-1.tar.gz"
    with tarfile.open(archive, "w:gz") as writer:
        writer.add(packed, "vllm-1")
    root = unpack(archive, tmp_path / "unpacked", "tests/v1")
    assert root == tmp_path / "unpacked" / "vllm-1"
    assert [each.relative_to(root) for each in root.rglob("*.py")] == [Path("tests/v1/one.py")]
