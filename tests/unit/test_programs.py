"""What tests need and do not find is said at the end of `make test`, and is an error of a run of the CI."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import programs
from tests.unit.browser import NAMES


def machine(directory: Path, monkeypatch: pytest.MonkeyPatch, *names: str, ci: str | None) -> str:
    """With these programs and no others on its path. Returns a directory in which nothing is unpacked."""
    for name in names:
        (directory / name).write_text("#!/bin/sh\n")
        (directory / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(directory))
    monkeypatch.delenv("CI", raising=False)
    if ci is not None:
        monkeypatch.setenv("CI", ci)
    return str(directory / "unpacked")


@pytest.mark.parametrize(
    ("ci", "apt", "status", "word"),
    [
        ("true", ["apt-get"], 1, "ERROR"),
        ("true", [], 0, "NOT TESTED"),
        (None, ["apt-get"], 0, "NOT TESTED"),
        ("false", ["apt-get"], 0, "NOT TESTED"),
    ],
)
def test_each_that_is_missing_is_named_with_its_tests_and_its_source(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ci: str | None,
    apt: list[str],
    status: int,
    word: str,
) -> None:
    unpacked = machine(tmp_path, monkeypatch, *apt, "promtool", ci=ci)
    assert programs.main(unpacked) == status
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(", so ")[0] for line in lines] == [f"{word}: no browser", f"{word}: no prometheus"]
    assert "tests/unit/test_timeline_page.py" in lines[0]
    assert "chromium-headless-shell" in lines[0]
    assert "tests/integration/test_prometheus.py" in lines[1]
    assert "make prometheus" in lines[1]


@pytest.mark.parametrize("browser", NAMES)
def test_where_all_are_there_nothing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], browser: str
) -> None:
    machine(tmp_path, monkeypatch, "apt-get", browser, ci="true")
    unpacked = tmp_path / "unpacked"
    unpacked.mkdir()
    for name in ("promtool", "prometheus"):
        (unpacked / name).write_text("#!/bin/sh\n")
        (unpacked / name).chmod(0o755)
    assert programs.main(str(unpacked)) == 0
    assert capsys.readouterr().out == ""


def test_the_tests_that_are_named_exist_and_skip() -> None:
    root = Path(programs.__file__).parents[1]
    for each in programs.programs():
        for named in each.tests:
            text = (root / named).read_text()
            # The fixture `page` skips, or the test itself.
            assert "(page: Browser" in text or "skipif" in text, named
    assert 'pytest.skip(f"no browser' in (root / "tests/unit/conftest.py").read_text()
