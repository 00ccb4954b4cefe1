"""What the documents name exists: files, tests, links, facts about NIXL; and so does what the code cites of them."""

from __future__ import annotations

import re
import subprocess
import traceback
from pathlib import Path

import pytest

from connector.config import OptionError
from connector.ports.side_channel import PortUnavailable
from connector.unsupported import UnsupportedCache
from connector.worker.memory_stays import MemoryIsRegistered

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
FACTS_TEST = ROOT / "tests" / "conformance" / "test_nixl_facts.py"
SUITE = ROOT / "tests" / "conformance" / "nixl_suite.py"
FACTS = (ROOT / "docs" / "nixl.md").read_text()
NUMBERS = {int(number) for number in re.findall(r"^\*\*(\d+)\. ", FACTS, re.MULTILINE)}

_PATH = re.compile(r"`((?:connector|statemachine|tests|diagrams|docs)/[\w./-]*)(?:::([\w:]+))?`")
_CITED = re.compile(r"nixl\.md,?\s+facts? (\d+)(?:(?:,| and)\s+(\d+))?")


@pytest.fixture(params=DOCUMENTS, ids=lambda path: path.name)
def document(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_every_file_that_is_named_exists(document: Path) -> None:
    named = _PATH.findall(document.read_text())
    missing = sorted({path for path, _ in named if not (ROOT / path).exists()})
    assert missing == []
    for path, function in named:
        last = function.rpartition("::")[2]
        assert not last or f"def {last}(" in (ROOT / path).read_text(), (path, function)


def test_every_module_that_is_run_exists(document: Path) -> None:
    modules = re.findall(r"python -m ((?:tests|diagrams|connector|statemachine)[\w.]*)", document.read_text())
    for module in modules:
        path = ROOT.joinpath(*module.split("."))
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), module


def test_every_target_of_make_exists(document: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:`|^)make ([\w-]+)", document.read_text(), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_every_link_leads_somewhere(document: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)", document.read_text()):
        assert (document.parent / link).exists(), link


def anchors_of(text: str) -> set[str]:
    """Of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_anchor_of_a_link_exists(document: Path) -> None:
    for link, anchor in re.findall(r"\]\(([^)#:\s]*)#([^)]+)\)", document.read_text()):
        page = document.parent / link if link else document
        assert anchor in anchors_of(page.read_text()), f"{link}#{anchor}"


ENDS_A_START = (
    OptionError("control_port", "it is taken"),
    PortUnavailable("127.0.0.1", 5600, "Address already in use"),
    UnsupportedCache("KV cache of a layer", "NewSpec", "others"),
    MemoryIsRegistered("sleep"),
    RuntimeError("NIXL_ERR_BACKEND"),
)
"""What may end the start of an engine, at different times."""

OF_A_HEALTHY_START = (
    "nixl-actor-connector 0.1.0: handshakes are answered at 10.0.3.7:5600",
    "(EngineCore pid=71) WARNING 11-27 14:00:00 [system_utils.py:255] Found ulimit of 20000 and failed to "
    "automatically increase with error not allowed to raise maximum limit. This can cause fd limit errors like "
    "`OSError: [Errno 24] Too many open files`. Consider increasing with ulimit -n",
)
"""Lines that the command must not name."""


@pytest.mark.parametrize("error", ENDS_A_START, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("before", ["", "(EngineCore pid=71) ERROR 11-27 14:00:00 [core.py:1100] "])
def test_what_ends_a_start_is_found_in_the_log_by_the_command_of_the_readme(
    tmp_path: Path, error: Exception, before: str
) -> None:
    line = before + traceback.format_exception_only(error)[0].splitlines()[0]
    log = tmp_path / "log"
    log.write_text("\n".join([*OF_A_HEALTHY_START, line, "INFO 11-27 14:00:01 [core.py:1] the end"]))
    (command,) = re.findall(r"^grep -n (.* )LOG( .*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    found = subprocess.run(f"grep -n {command[0]}{log}{command[1]}", shell=True, text=True, stdout=subprocess.PIPE)
    assert found.stdout == f"{len(OF_A_HEALTHY_START) + 1}:{line}\n"


def test_what_is_said_of_a_port_that_is_taken_is_quoted_right() -> None:
    quoted = re.findall(
        r"`(PortUnavailable: [^`]*|give each engine [^`]*)`", (ROOT / "docs" / "options.md").read_text()
    )
    error, advice = quoted
    found = PortUnavailable("HOST", 1, "...")
    assert f"{type(found).__name__}: {found}".replace(":1:", ":PORT:") == error
    assert advice in (ROOT / "connector" / "scheduler" / "listener_thread.py").read_text().replace(
        '"\n            "', ""
    )


def test_tests_and_suites_that_show_a_fact_exist() -> None:
    shown = FACTS_TEST.read_text()
    for prefix in re.findall(r"`(test_facts?_[\d_and]+)", FACTS):
        assert f"def {prefix}" in shown, prefix
    suite = SUITE.read_text()
    for name in re.findall(r"\*suite:\*\s+`(\w+)`", FACTS):
        assert f"def {name}(" in suite, name


def test_every_test_of_a_fact_is_named_by_the_fact() -> None:
    for numbers in re.findall(r"def test_facts?_((?:\d+_(?:and_)?)+)", FACTS_TEST.read_text()):
        for number in re.findall(r"\d+", numbers):
            fact = re.search(rf"^\*\*{number}\. .*?(?=^\*\*\d+\. |^## |\Z)", FACTS, re.MULTILINE | re.DOTALL)
            assert fact is not None, number
            assert "*test:*" in fact.group(), number


def test_every_fact_that_is_cited_exists() -> None:
    sources = [path for folder in ("connector", "statemachine", "tests", "docs") for path in (ROOT / folder).rglob("*")]
    cited = {
        (path.relative_to(ROOT).as_posix(), int(number))
        for path in sources
        if path.suffix in (".py", ".md")
        for numbers in _CITED.findall(path.read_text())
        for number in numbers
        if number
    }
    assert len(cited) > 10
    assert {each for each in cited if each[1] not in NUMBERS} == set()
