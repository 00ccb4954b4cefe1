"""Which part may import which: the house stays as it was drawn.

Every import statement of every source file counts, wherever it stands: at the top, inside a function, under
TYPE_CHECKING, or as a call with a constant name. What a statement drags in behind it is checked in fresh interpreters.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]

HEAVY = ("torch", "vllm", "nixl", "nixl_cu12", "zmq")
"""What must not be loaded by accident; nixl_cu12 is the package that `nixl` forwards to."""

WORLDLY = frozenset(
    [
        "asyncio",
        "concurrent",
        "datetime",
        "multiprocessing",
        "random",
        "secrets",
        "select",
        "selectors",
        "signal",
        "socket",
        "subprocess",
        "threading",
        "time",
        "uuid",
    ]
)
"""The part of the standard library that is clock, chance, thread or network."""


SPECS = (
    "ChunkedLocalAttentionSpec",
    "CircularBufferSpec",
    "FullAttentionSpec",
    "MLAAttentionSpec",
    "MambaSpec",
    "SlidingWindowSpec",
    "UniformTypeKVCacheSpecs",
)
"""vLLM's classes of cache specs."""


COMMAND_LINE = [
    "connector.tools.cli.main",
    "connector.tools.diagnosis",
    "connector.tools.explanation",
    "connector.tools.live",
]
"""What the commands that ask running engines load: they have to start in a fraction of a second."""


class Import(NamedTuple):
    """`file` (path below the root) imports `module` in `line`."""

    file: str
    line: int
    module: str


class Rule(NamedTuple):
    """`is_allowed` must hold for every import of every file below one of `folders`, except for `except_for`: folders
    or files."""

    name: str
    folders: tuple[str, ...]
    is_allowed: Callable[[str], bool]
    except_for: tuple[str, ...] = ()


def is_in(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def neither(*packages: str) -> Callable[[str], bool]:
    return lambda module: not is_in(module, *packages)


def of_ours_only(*packages: str) -> Callable[[str], bool]:
    """Of this project; `from connector import x` counts for `connector.x`."""
    parents = {package.rpartition(".")[0] for package in packages}
    return lambda module: not is_in(module, "connector") or module in parents or is_in(module, *packages)


def stands_alone(module: str) -> bool:
    top = module.partition(".")[0]
    return top in ("msgspec", "statemachine") or top in sys.stdlib_module_names


def stands_alone_with(*packages: str) -> Callable[[str], bool]:
    return lambda module: stands_alone(module) or is_in(module, *packages)


RULES = [
    Rule("statemachine stands alone", ("statemachine",), stands_alone),
    Rule(
        "machines know no clock, chance, thread or network",
        ("statemachine",),
        neither(*WORLDLY),
    ),
    Rule("layout is arithmetic", ("connector/layout",), neither("nixl", "vllm", "trio", "zmq", "torch", *WORLDLY)),
    Rule(
        "layout knows what wire has decoded, and the form in which the port takes descriptors",
        ("connector/layout",),
        of_ours_only("connector.layout", "connector.wire", "connector.ports.nixl"),
    ),
    Rule("wire is bytes", ("connector/wire",), neither("nixl", "vllm", "trio", "zmq", "torch", "numpy", *WORLDLY)),
    Rule("wire does not know what its values mean", ("connector/wire",), of_ours_only("connector.wire")),
    Rule(
        "the protocol of the two sides knows neither of them, but the form of what the port says",
        ("connector/protocol.py",),
        stands_alone_with("numpy", "connector.ports.nixl", "connector.addresses"),
    ),
    Rule("only ports touch NIXL and ZMQ", ("connector", "statemachine"), neither("nixl", "zmq"), ("connector/ports",)),
    Rule(
        "ports know nothing of who uses them",
        ("connector/ports",),
        neither("connector.runtime", "connector.worker", "connector.scheduler", "connector.wire"),
    ),
    Rule(
        "runtime knows neither vLLM nor who uses it",
        ("connector/runtime",),
        neither("connector.worker", "connector.scheduler", "connector.nixl_connector", "vllm", "torch"),
    ),
    Rule(
        "tools know neither vLLM nor torch",
        ("connector/tools",),
        neither("vllm", "torch", "nixl", "connector.runtime", "connector.worker", "connector.scheduler"),
    ),
    Rule(
        "no engine needs a tool",
        ("connector", "statemachine"),
        neither("connector.tools"),
        ("connector/tools", "connector/__main__.py"),
    ),
    Rule(
        "product code imports neither tests nor diagrams",
        ("connector", "statemachine"),
        neither("tests", "diagrams", "pytest", "hypothesis"),
    ),
    Rule(
        "only families tells cache specs apart",
        ("connector",),
        neither(*(f"vllm.v1.kv_cache_interface.{name}" for name in SPECS)),
        ("connector/families.py",),
    ),
]


# --- reading the sources --------------------------------------------------------------------------------------------


def imports_of(source: str, file: str) -> Iterator[Import]:
    """Every import in `source`; of `from a import b` both `a` and `a.b`, since b may be a module."""
    package = file.removesuffix(".py").removesuffix("/__init__").split("/")
    if not file.endswith("__init__.py"):
        package = package[:-1]
    for node in ast.walk(ast.parse(source, file)):
        match node:
            case ast.Import(names=names):
                for name in names:
                    yield Import(file, node.lineno, name.name)
            case ast.ImportFrom(module=module, names=names, level=level):
                parents = package[: len(package) - level + 1] if level else []
                base = ".".join([*parents, *([module] if module else [])])
                yield Import(file, node.lineno, base)
                for name in names:
                    yield Import(file, node.lineno, f"{base}.{name.name}")
            case ast.Call(
                func=ast.Name(id="__import__" | "import_module") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(module)), *_],
            ):
                yield Import(file, node.lineno, module)


def all_imports() -> list[Import]:
    found: list[Import] = []
    for package in ("statemachine", "connector"):
        for path in sorted((ROOT / package).rglob("*.py")):
            found += imports_of(path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix())
    return found


def violations(rule: Rule, imports: list[Import]) -> list[Import]:
    def is_below(file: str, folders: tuple[str, ...]) -> bool:
        return any(file == folder or file.startswith(folder + "/") for folder in folders)

    return [
        each
        for each in imports
        if is_below(each.file, rule.folders)
        and not is_below(each.file, rule.except_for)
        and not rule.is_allowed(each.module)
    ]


@pytest.fixture(scope="module")
def imports() -> list[Import]:
    return all_imports()


def test_the_sources_are_found(imports: list[Import]) -> None:
    files = {each.file for each in imports}
    for rule in RULES:
        for folder in rule.folders:
            assert any(file == folder or file.startswith(folder + "/") for file in files), folder


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_imports_keep(rule: Rule, imports: list[Import]) -> None:
    broken = [f"{each.file}:{each.line} imports {each.module}" for each in violations(rule, imports)]
    assert broken == []


@pytest.mark.parametrize(
    ("file", "source", "module"),
    [
        ("statemachine/x.py", "import trio", "trio"),
        ("statemachine/x.py", "import time", "time"),
        ("statemachine/x.py", "from connector.runtime import clock", "connector.runtime"),
        ("statemachine/sub/x.py", "def f():\n    from trio import sleep", "trio"),
        ("statemachine/x.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch", "torch"),
        ("connector/layout/x.py", "import importlib\nimportlib.import_module('vllm.config')", "vllm.config"),
        ("connector/layout/x.py", "from importlib import import_module\nimport_module('zmq')", "zmq"),
        ("connector/wire/x.py", "__import__('torch')", "torch"),
        ("connector/wire/x.py", "from ..runtime.thread import x", "connector.runtime.thread"),
        ("connector/wire/x.py", "from .. import scheduler", "connector.scheduler"),
        ("connector/wire/__init__.py", "from ..worker import x", "connector.worker"),
        ("connector/wire/x.py", "from connector.layout.geometry import Region", "connector.layout.geometry"),
        ("connector/wire/x.py", "import vllm", "vllm"),
        ("connector/layout/x.py", "from connector import protocol", "connector.protocol"),
        ("connector/protocol.py", "from connector.layout.geometry import Region", "connector.layout.geometry"),
        ("connector/protocol.py", "import torch", "torch"),
        (
            "connector/scheduler/x.py",
            "from vllm.v1.kv_cache_interface import MambaSpec",
            "vllm.v1.kv_cache_interface.MambaSpec",
        ),
        ("connector/runtime/x.py", "import zmq.error", "zmq.error"),
        ("connector/x.py", "import nixl._api as api", "nixl._api"),
        ("connector/ports/x.py", "from connector import wire", "connector.wire"),
        ("connector/runtime/x.py", "from connector import worker", "connector.worker"),
        ("statemachine/x.py", "from diagrams.draw import svg", "diagrams.draw"),
    ],
)
def test_a_forbidden_import_is_noticed_wherever_it_hides(file: str, source: str, module: str) -> None:
    found = list(imports_of(source, file))
    assert module in {each.module for rule in RULES for each in violations(rule, found)}


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("connector/ports/x.py", "import nixl, zmq"),
        ("statemachine/x.py", "import enum, msgspec\nfrom statemachine.kernel import to"),
        ("connector/layout/x.py", "import nixlish"),
        ("connector/layout/x.py", "from connector import wire\nfrom connector.wire.metadata import AgentMetadata"),
        ("connector/runtime/x.py", "from connector.ports.nixl import NixlPort\nfrom .clock import to_ns"),
    ],
)
def test_a_permitted_import_is_left_alone(file: str, source: str) -> None:
    found = list(imports_of(source, file))
    assert [each for rule in RULES for each in violations(rule, found)] == []


# --- fresh interpreters ---------------------------------------------------------------------------------------------


def modules_below(folder: str) -> list[str]:
    names = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        names.append(name.removesuffix(".__init__"))
    return names


def loaded_by(modules: list[str], suspects: tuple[str, ...]) -> list[str]:
    """Which of `suspects` (top-level names) a fresh interpreter has loaded after importing `modules`."""
    program = (
        "import importlib, json, sys\n"
        "modules, suspects = json.loads(sys.argv[1])\n"
        "for module in modules: importlib.import_module(module)\n"
        "print(json.dumps([name for name in suspects if name in sys.modules]))\n"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program, json.dumps([modules, suspects])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    loaded: list[str] = json.loads(finished.stdout.splitlines()[-1])
    return loaded


@pytest.mark.parametrize(
    ("modules", "suspects"),
    [
        (["connector"], (*HEAVY, "trio")),
        (["connector", "connector.plugin", "connector.config"], HEAVY),
        (modules_below("statemachine"), (*HEAVY, "trio", "connector", "numpy")),
        (modules_below("connector/layout"), (*HEAVY, "trio")),
        ([*modules_below("connector/wire"), "connector.protocol"], (*HEAVY, "trio", "connector.layout")),
        (modules_below("connector/runtime"), HEAVY),
        (["connector.tools.timeline.export"], (*HEAVY, "trio", "numpy")),
        (modules_below("tests/gpu"), ("vllm", "zmq")),
        (COMMAND_LINE, ("torch", "vllm", "nixl", "nixl_cu12", "numpy", "structlog")),
        (["connector.tools.cli.main"], (*HEAVY, "trio", "numpy")),
    ],
    ids=[
        "connector",
        "plugin and config",
        "statemachine",
        "layout",
        "wire and protocol",
        "runtime",
        "timeline",
        "gpu",
        "tools",
        "cli",
    ],
)
def test_importing_loads_nothing_heavy(modules: list[str], suspects: tuple[str, ...]) -> None:
    assert loaded_by(modules, suspects) == []


def test_what_is_loaded_would_be_seen() -> None:
    assert loaded_by(["zmq", "trio"], (*HEAVY, "trio")) == ["zmq", "trio"]


PACKAGES = [path for path in ("statemachine", "connector") for path in sorted((ROOT / path).rglob("__init__.py"))]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: str(path.parent.relative_to(ROOT)))
def test_every_package_says_what_each_of_its_modules_is_for(package: Path) -> None:
    """But for `connector` itself, which is in docs/architecture.md, and the one whose modules make a page."""
    modules = {each.stem for each in package.parent.glob("*.py")} - {"__init__", "__main__"}
    packages = {each.parent.name for each in package.parent.glob("*/__init__.py")}
    if package.parent == ROOT / "connector":
        text = (ROOT / "docs/architecture.md").read_text()
        missing = {name for name in modules if not re.search(rf"\b{name}\b", text)}
    else:
        text = ast.get_docstring(ast.parse(package.read_text())) or ""
        missing = {
            name for name in modules | packages if not re.search(rf"^ *{name} +\S|`{name}\.py`", text, re.MULTILINE)
        }
    assert not missing
