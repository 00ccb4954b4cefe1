"""`nixl-actor keys`: what it makes, and how the file of keys is rolled with it."""

from __future__ import annotations

import re
import resource
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from connector.ports.curve_keys import CurveKeys
from connector.tools.cli.main import app
from connector.wire.signatures import ParamsKeys, parse_keys

runner = CliRunner()

SECURITY = Path(__file__).parents[2] / "docs" / "operations" / "security.md"


def keys(*arguments: str) -> Result:
    return runner.invoke(app, ["keys", *arguments])


def done(*arguments: str) -> str:
    result = keys(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


def read(file: Path) -> ParamsKeys:
    assert file.stat().st_mode & 0o077 == 0
    return parse_keys(file.read_text())


def ids(file: Path) -> list[str]:
    return [key.key_id for key in read(file).keys]


def test_a_pair_of_keys(tmp_path: Path) -> None:
    said = done("curve", str(tmp_path / "prefill"))
    made = CurveKeys(str(tmp_path / "prefill"))
    assert list(made.accepted.values()) == ["prefill"]
    assert made.secret_key.decode() not in said
    done("curve", str(tmp_path / "other"), "--name", "decode")
    assert list(CurveKeys(str(tmp_path / "other")).accepted.values()) == ["decode"]


@pytest.mark.parametrize("name", ["", "a/b", "..//x", "a b", "x" * 65])
def test_names_that_are_no_file(tmp_path: Path, name: str) -> None:
    assert keys("curve", str(tmp_path / "new"), "--name", name).exit_code == 2
    assert not (tmp_path / "new").exists()


def test_a_pair_is_never_overwritten(tmp_path: Path) -> None:
    done("curve", str(tmp_path), "--name", "a")
    before = CurveKeys(str(tmp_path)).public_key
    assert keys("curve", str(tmp_path), "--name", "b").exit_code == 2
    assert CurveKeys(str(tmp_path)).public_key == before


@contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    """What a full disk does to who writes a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size_bytes", [0, 120], ids=["neither key", "the public key"])
def test_a_disk_that_is_full_leaves_no_key_in_the_way(tmp_path: Path, size_bytes: int) -> None:
    """The disk has room for so much."""
    with files_of_at_most(size_bytes):
        result = keys("curve", str(tmp_path), "--name", "a")
    assert result.exit_code == 2
    assert tmp_path.name in result.output.translate(str.maketrans("", "", "\n │"))
    assert not [each for each in tmp_path.rglob("*") if each.is_file()]
    done("curve", str(tmp_path), "--name", "a")
    assert accepted_by(tmp_path) == ["a"]


def copied(key: Path, *directories: Path) -> None:
    for each in directories:
        shutil.copyfile(key, each / "accepted" / key.name)


def accepted_by(directory: Path) -> list[str]:
    return sorted(CurveKeys(str(directory)).accepted.values())


def accepts(one: Path, other: Path) -> bool:
    """Whether one lets the other in."""
    return CurveKeys(str(other)).public_key in CurveKeys(str(one)).accepted


def test_a_pair_that_is_there_is_refused_with_what_to_do_instead(tmp_path: Path) -> None:
    directory = tmp_path / "prefill"
    done("curve", str(directory))
    for again in ([], ["--name", "prefill-2"]):
        result = keys("curve", str(directory), *again)
        assert result.exit_code == 2
        said = result.output.translate(str.maketrans("", "", "\n │"))  # folded to a box
        assert "isalreadythere,andnothingisoverwritten" in said
        assert "anotherdirectoryunderanothername(--name)" in said
        assert "docs/operations/security.md" in said
    assert accepted_by(directory) == ["prefill"]


def test_a_pair_is_rolled_by_the_steps_of_the_documentation(tmp_path: Path) -> None:
    """At each step engines with either pair and a decode engine accept each other, if they did before."""
    prefill, decode, rolled = (tmp_path / name for name in ("prefill", "decode", "prefill-2"))
    done("curve", str(prefill))
    done("curve", str(decode))
    copied(prefill / "accepted" / "prefill.key", decode)
    copied(decode / "accepted" / "decode.key", prefill)

    section = SECURITY.read_text().partition("To roll a pair")[2].partition("Deleting a key")[0]
    (command,) = re.findall(r"`nixl-actor (keys curve [^`]*)`", section)
    result = runner.invoke(app, command.replace("/etc/kv", str(tmp_path)).split())
    assert result.exit_code == 0, result.output
    assert f"`/etc/kv/{rolled.name}/accepted/prefill-2.key`" in section
    copied(rolled / "accepted" / "prefill-2.key", prefill, decode)
    assert accepted_by(decode) == ["decode", "prefill", "prefill-2"]
    for name in ("prefill.key", "decode.key"):
        copied(prefill / "accepted" / name, rolled)
    for one, other in ((prefill, decode), (rolled, decode), (rolled, prefill)):
        assert accepts(one, other)
        assert accepts(other, one)
    for each in (rolled, decode):
        (each / "accepted" / "prefill.key").unlink()
    assert accepted_by(rolled) == accepted_by(decode) == ["decode", "prefill-2"]


def test_a_file_of_keys_is_rolled(tmp_path: Path) -> None:
    file = tmp_path / "params.keys"
    said = done("params", "add", str(file), "--id", "old")
    secret = read(file).keys[0].secret
    assert secret.hex() not in said
    done("params", "add", str(file), "--id", "new")
    assert ids(file) == ["old", "new"], "the new one is accepted, and does not sign yet"
    done("params", "use", str(file), "new")
    assert ids(file) == ["new", "old"]
    done("params", "drop", str(file), "old")
    assert ids(file) == ["new"]
    assert [each.name for each in tmp_path.iterdir()] == [file.name]


def test_ids_begin_with_the_date_and_no_other_file_has_them(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("params.keys", "other.keys")]
    for file in files * 2:
        done("params", "add", str(file))
    made = [key for file in files for key in read(file).keys]
    assert all(key.key_id.startswith(time.strftime("%Y-")) for key in made)
    assert len({key.key_id for key in made}) == len({key.secret for key in made}) == 4


@pytest.mark.parametrize(
    "arguments",
    [["use", "unknown"], ["drop", "unknown"], ["drop", "first"], ["add", "--id", "first"], ["add", "--id", "a b"]],
)
def test_what_cannot_be_done_leaves_the_file_as_it_was(tmp_path: Path, arguments: list[str]) -> None:
    file = tmp_path / "params.keys"
    done("params", "add", str(file), "--id", "first")
    before = file.read_text()
    command, *rest = arguments
    result = keys("params", command, str(file), *rest)
    assert result.exit_code == 2
    assert file.read_text() == before
    assert read(file).keys[0].secret.hex() not in result.output


def test_a_file_that_makes_no_sense_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "params.keys"
    file.write_text("half writ")
    for command in (["add", str(file)], ["use", str(file), "a"], ["drop", str(file), "a"]):
        assert keys("params", *command).exit_code == 2
    assert file.read_text() == "half writ"


def test_comments_are_kept_and_go_with_their_key(tmp_path: Path) -> None:
    file = tmp_path / "params.keys"
    done("params", "add", str(file), "--id", "a")
    head, key_a = file.read_text().splitlines()
    file.write_text(f"{head}\n# of the fleet in the north\n\n# made by Ann\n{key_a}\n# the end\n")
    file.chmod(0o600)
    done("params", "add", str(file), "--id", "b")
    *_, key_b, end = file.read_text().splitlines()
    assert end == "# the end"
    file.write_text(file.read_text().replace(key_b, f"\n  # made by Bob\n{key_b}"))
    done("params", "use", str(file), "b")
    above = [head, "# of the fleet in the north", ""]
    of_b = ["", "  # made by Bob", key_b]
    assert file.read_text().splitlines() == [*above, *of_b, "# made by Ann", key_a, "# the end"]
    done("params", "drop", str(file), "a")
    assert file.read_text().splitlines() == [*above, *of_b, "# the end"]


@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_stays_one_and_what_it_leads_to_is_written(tmp_path: Path, is_there: bool) -> None:
    (tmp_path / "shared").mkdir()
    file, link = tmp_path / "shared" / "params.keys", tmp_path / "link"
    link.symlink_to(Path("shared") / "params.keys")
    if is_there:
        done("params", "add", str(file), "--id", "a")
    assert str(link) in done("params", "add", str(link), "--id", "b")
    done("params", "use", str(link), "b")
    assert link.is_symlink()
    assert ids(file) == ["b", "a"][: 1 + is_there]
    assert sorted(tmp_path.rglob("*")) == [link, file.parent, file]


def test_a_link_that_leads_to_itself_is_an_error_of_usage(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(link)
    result = keys("params", "add", str(link))
    assert result.exit_code == 2
    assert isinstance(result.exception, SystemExit)


@pytest.mark.parametrize("command", [["add"], ["use", "a"], ["drop", "a"]])
def test_a_file_that_cannot_be_looked_for_is_an_error_of_usage(tmp_path: Path, command: list[str]) -> None:
    """As in a directory that this user may not search; a name that is too long is refused to everybody."""
    name, *rest = command
    result = keys("params", name, str(tmp_path / ("x" * 300)), *rest)
    assert result.exit_code == 2
    assert isinstance(result.exception, SystemExit)


@pytest.mark.parametrize("command", [["ps"], ["doctor"], ["why", "x"], ["drain", "h:1"], ["meet", "h:1", "h:2"]])
def test_a_tool_whose_keys_cannot_be_used_says_so(tmp_path: Path, command: list[str]) -> None:
    result = runner.invoke(app, [*command, "--keys", str(tmp_path)])
    assert result.exit_code == 2
    said = result.output.translate(str.maketrans("", "", " \n│"))  # folded to a box
    assert "engine.key_secret" in said
    assert "nixl-actorkeyscurvemakes" in said
