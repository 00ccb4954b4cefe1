"""A configuration of the built-in connector can be taken over: every option and environment variable that the installed
one reads for transfers by pull is known here, with its default, or docs/options.md says what differs.

The installed sources are read, so a version of vLLM that reads another one makes this fail.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from connector.config import ConnectorOptions, parse_options

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "options.md").read_text()
SECTION = PAGE.partition("\n## Options of the built-in connector\n")[2]

DEFAULTS_OF_OUR_OWN = {"num_threads"}
"""docs/options.md says why."""
PUSH_ONLY = "push_"
"""What the names of files with transfers by push begin with."""


def sources() -> list[Path]:
    """Of the built-in connector, without what only transfers by push use."""
    parts = ("vllm.distributed.kv_transfer.kv_connector.v1.nixl", "vllm.distributed.nixl_utils")
    found = []
    for part in parts:
        spec = importlib.util.find_spec(part)
        assert spec is not None
        assert spec.origin is not None
        origin = Path(spec.origin)
        found += sorted(origin.parent.glob("*.py")) if origin.name == "__init__.py" else [origin]
    return [path for path in found if not path.name.startswith(PUSH_ONLY)]


def nodes() -> Iterator[ast.AST]:
    for path in sources():
        yield from ast.walk(ast.parse(path.read_text()))


def builtin_options() -> dict[str, Any]:
    """Names in `kv_connector_extra_config`, and their defaults."""
    found: dict[str, Any] = {}
    for node in nodes():
        match node:
            case ast.Call(
                func=ast.Attribute(attr="get_from_extra_config"), args=[ast.Constant(value=str(name)), default]
            ):
                found[name] = ast.literal_eval(default)
            case ast.Call(func=ast.Attribute(attr="get_from_extra_config")):
                raise AssertionError(f"a call that this test does not understand: {ast.unparse(node)}")
            case ast.Attribute(attr="kv_connector_extra_config"):
                raise AssertionError("options are read in another way, too")
    return found


def variables_in(nodes: Iterable[ast.AST]) -> set[str]:
    """Environment variables: attributes of `vllm.envs`, and what is read from, set in or looked for in `os.environ`.

    AssertionError where something else is done with `os.environ`, or with a name that is computed.
    """
    found, understood, met = set(), set(), set()
    for node in nodes:
        match node:
            case ast.Attribute(value=ast.Name(id="envs"), attr=name):
                found.add(name)
            case ast.Call(
                func=ast.Attribute(attr="getenv") | ast.Name(id="getenv"), args=[ast.Constant(value=str(name)), *_]
            ):
                found.add(name)
            case (
                ast.Subscript(value=environ, slice=ast.Constant(value=str(name)))
                | ast.Call(
                    func=ast.Attribute(value=environ, attr="get" | "setdefault" | "pop"),
                    args=[ast.Constant(value=str(name)), *_],
                )
                | ast.Compare(left=ast.Constant(value=str(name)), ops=[ast.In() | ast.NotIn()], comparators=[environ])
            ) if _is_environ(environ):
                found.add(name)
                understood.add(environ)
            case ast.Call(func=ast.Attribute(attr="getenv") | ast.Name(id="getenv")):
                raise AssertionError(f"a call that this test does not understand: {ast.unparse(node)}")
        if _is_environ(node):
            met.add(node)
    assert met <= understood, (
        f"variables are read in another way, too: line {min(each.lineno for each in met - understood)}"
    )
    return found


def _is_environ(node: ast.AST) -> bool:
    """`os.environ`, or `environ` imported from there."""
    match node:
        case ast.Attribute(attr="environ") | ast.Name(id="environ"):
            return True
    return False


def builtin_variables() -> set[str]:
    return variables_in(nodes())


def test_the_sources_are_found() -> None:
    assert {"base_worker.py", "pull_worker.py", "base_scheduler.py", "nixl_utils.py"} <= {
        each.name for each in sources()
    }
    assert {"kv_lease_duration", "engine_ttl", "num_threads"} <= set(builtin_options())
    assert {"VLLM_NIXL_SIDE_CHANNEL_HOST", "UCX_RCACHE_MAX_UNRELEASED"} <= builtin_variables()


@pytest.mark.parametrize(
    "code",
    [
        "envs.NAME",
        "os.environ['NAME']",
        "os.environ['NAME'] = '1'",
        "del os.environ['NAME']",
        "environ['NAME']",
        "os.environ.get('NAME')",
        "os.environ.get('NAME', '0')",
        "os.environ.setdefault('NAME', '0')",
        "os.environ.pop('NAME', None)",
        "'NAME' in os.environ",
        "if 'NAME' not in os.environ: pass",
        "os.getenv('NAME')",
        "getenv('NAME', '0')",
    ],
)
def test_a_variable_is_found_however_it_is_read(code: str) -> None:
    assert variables_in(ast.walk(ast.parse(code))) == {"NAME"}


@pytest.mark.parametrize(
    "code",
    ["os.environ[name]", "os.environ.get(f'{name}')", "os.environ.copy()", "os.getenv(name)", "read(os.environ)"],
)
def test_a_read_of_an_unknown_variable_does_not_go_unnoticed(code: str) -> None:
    with pytest.raises(AssertionError, match=r"understand|in another way"):
        variables_in(ast.walk(ast.parse(code)))


@pytest.mark.parametrize("name", sorted(builtin_options()))
def test_an_option_has_the_builtin_default_or_a_reason(name: str) -> None:
    theirs = builtin_options()[name]
    ours = msgspec.json.decode(msgspec.json.encode(ConnectorOptions()))
    assert name in ours
    assert f"`{name}`" in SECTION
    if name not in DEFAULTS_OF_OUR_OWN:
        assert ours[name] == theirs
    parse_options({name: theirs}, {})


@pytest.mark.parametrize("value", [64, 0, -1, "64", " 64\n", "+64", "-1", "0", 64.0, 1e6])
def test_a_threshold_is_the_whole_number_that_the_builtin_connector_takes_it_for(value: Any) -> None:
    """It asks int(), and reads back any number of tokens unless that is more than 0."""
    options = parse_options({"kv_recompute_threshold": value}, {})
    assert options.kv_recompute_threshold == max(int(value), 0)
    assert type(options.kv_recompute_threshold) is int


@pytest.mark.parametrize("name", ["bidirectional_kv_xfer", "enforce_handshake_compat"])
@pytest.mark.parametrize("value", [0, 1, False, True])
def test_what_is_asked_whether_it_is_true_may_be_a_number(name: str, value: Any) -> None:
    assert getattr(parse_options({name: value}, {}), name) is bool(value)


def test_every_truth_of_the_builtin_connector_is_among_them() -> None:
    truths = {name for name, default in builtin_options().items() if isinstance(default, bool)}
    assert truths == {"bidirectional_kv_xfer", "enforce_handshake_compat"}


def test_the_builtin_connector_asks_int_for_one_option_only() -> None:
    asked = [
        argument.args[0].value
        for node in nodes()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "int"
        for argument in node.args
        if isinstance(argument, ast.Call)
        and isinstance(argument.func, ast.Attribute)
        and argument.func.attr == "get_from_extra_config"
        and isinstance(argument.args[0], ast.Constant)
    ]
    assert asked == ["kv_recompute_threshold"]


@pytest.mark.parametrize("name", sorted(builtin_variables()))
def test_an_environment_variable_is_explained(name: str) -> None:
    assert f"`{name}`" in SECTION


def test_every_option_in_the_table_is_one_of_the_builtin_connector() -> None:
    first_cells = [line.split("|")[1] for line in SECTION.splitlines() if line.startswith("| `")]
    named = {name for cell in first_cells for name in cell.split("`")[1::2]}
    assert named == set(builtin_options()) | builtin_variables()
