"""docs/examples/README.md, "Ray Serve LLM": what is said there of Ray is so in the installed one.

Ray Serve needs packages that are not installed here, so its module for this connector is loaded by itself, with a
stand-in for the context of a replica.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import ray

from connector.wire.params import parse_remote_prefill

SOURCES = Path(ray.__file__).parent / "llm" / "_internal" / "serve"
TRANSFER = "ray.llm._internal.serve.engines.vllm.kv_transfer"
PAGE = (Path(__file__).parents[2] / "docs" / "examples" / "README.md").read_text()
RECIPE = PAGE.partition("## Ray Serve LLM")[2].partition("\n## ")[0]

PORT, HOST = "VLLM_NIXL_SIDE_CHANNEL_PORT", "VLLM_NIXL_SIDE_CHANNEL_HOST"
NODE = "10.0.0.7"
RANK, DEVICES = 3, 2


def module(name: str) -> ModuleType:
    """A file of Ray's, without the package around it."""
    spec = importlib.util.spec_from_file_location(
        f"{TRANSFER}.{name}", SOURCES / "engines/vllm/kv_transfer" / f"{name}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made
    spec.loader.exec_module(made)
    return made


@pytest.fixture
def set_up(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets a replica up: its `kv_transfer_config` afterwards, its port and its host."""
    context = SimpleNamespace(rank=SimpleNamespace(rank=RANK))
    monkeypatch.setattr(ray, "serve", SimpleNamespace(get_replica_context=lambda: context), raising=False)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: NODE, raising=False)
    # What loading leaves there is taken away again.
    for name in ("base", "nixl"):
        monkeypatch.setitem(sys.modules, f"{TRANSFER}.{name}", None)
    module("base")
    backend = module("nixl").NixlConnectorBackend
    for name in (PORT, HOST):
        monkeypatch.setenv(name, "")  # so that what is set is taken back
        monkeypatch.delenv(name)

    def run(experimental: dict[str, Any] | None = None, **config: Any) -> tuple[dict[str, Any], str, str]:
        llm = SimpleNamespace(
            experimental_configs=experimental or {},
            engine_kwargs={"kv_transfer_config": {"kv_connector": "NixlConnector", **config}},
            get_engine_config=lambda: SimpleNamespace(num_devices=DEVICES),
        )
        backend(llm).setup()
        return llm.engine_kwargs["kv_transfer_config"], os.environ[PORT], os.environ[HOST]

    return run


def base_ports() -> list[int]:
    """For prefill and for decode, in the recipe."""
    return [int(each) for each in re.findall(r"\b2\d{4}\b", RECIPE)]


def test_the_recipe_names_the_installed_ray() -> None:
    (named,) = re.findall(r"sources of Ray ([\d.]+),", RECIPE)
    assert ray.__version__.startswith(f"{named}.")


def test_each_replica_has_a_side_channel_of_its_own(set_up: Any) -> None:
    prefill, _ = base_ports()
    _, port, host = set_up()
    assert (port, host) == (str(prefill + RANK * DEVICES), NODE)


def test_the_base_of_the_ports_can_be_chosen(set_up: Any) -> None:
    (name,) = re.findall(r"experimental_configs: \{(\w+):", RECIPE)
    _, port, _ = set_up({name: 40000})
    assert port == str(40000 + RANK * DEVICES)


def test_what_the_environment_has_stays(set_up: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PORT, "5600")
    monkeypatch.setenv(HOST, "p0.example")
    _, port, host = set_up()
    assert (port, host) == ("5600", "p0.example")


def test_the_engine_id_is_written_anew_and_is_one_that_this_connector_takes(set_up: Any) -> None:
    config, port, host = set_up(engine_id="mine")
    assert config["engine_id"] == f"mine-{host}-{port}"
    del os.environ[PORT], os.environ[HOST]
    config, port, host = set_up()
    assert re.fullmatch(rf"[A-Za-z0-9]+-{re.escape(host)}-{port}", config["engine_id"])
    params = {"remote_engine_id": config["engine_id"], "remote_request_id": "r", "remote_host": host}
    params |= {"remote_port": int(port), "remote_block_ids": [[1]], "tp_size": 1}
    assert parse_remote_prefill(params).engine_id == config["engine_id"]


def test_what_is_left_of_the_configuration_is_untouched(set_up: Any) -> None:
    config, _, _ = set_up(kv_connector_module_path="connector", kv_role="kv_both")
    assert (config["kv_connector_module_path"], config["kv_role"]) == ("connector", "kv_both")


def test_decode_replicas_begin_elsewhere() -> None:
    """The module that says so needs Ray Serve, so its source is read."""
    _, decode = base_ports()
    tree = ast.parse((SOURCES / "serving_patterns/prefill_decode/builder.py").read_text())
    constants = [
        [each.value for each in node.args if isinstance(each, ast.Constant)]
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    ]
    assert ["NIXL_SIDE_CHANNEL_PORT_BASE", decode] in constants


def test_only_the_name_of_the_builtin_connector_has_a_set_up() -> None:
    tree = ast.parse((SOURCES / "engines/vllm/kv_transfer/factory.py").read_text())
    (known,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "BUILTIN_BACKENDS"
    )
    assert known["NixlConnector"] == f"{TRANSFER}.nixl:NixlConnectorBackend"
    assert "NixlActorConnector" not in known
