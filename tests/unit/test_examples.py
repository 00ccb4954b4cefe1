"""The manifests in docs/examples: their configuration is one that vLLM and the connector take, and its parts fit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from vllm import envs
from vllm.config import KVTransferConfig

from connector.config import parse_options

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
POD_ADDRESS = {"fieldRef": {"fieldPath": "status.podIP"}}


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((EXAMPLES / "compose.yaml").read_text())
    return found


def deployments() -> Iterator[dict[str, Any]]:
    for each in yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text()):
        if each["kind"] == "Deployment":
            yield each


def container_of(deployment: dict[str, Any]) -> dict[str, Any]:
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    found: dict[str, Any] = container
    return found


def transfer_config(arguments: Sequence[str]) -> KVTransferConfig:
    return KVTransferConfig(**json.loads(arguments[arguments.index("--kv-transfer-config") + 1]))


def port_of(arguments: Sequence[str]) -> int:
    (port,) = (each.removeprefix("--port=") for each in arguments if each.startswith("--port="))
    return int(port)


def commands() -> dict[str, list[str]]:
    services = compose()["services"]
    found = {f"compose {name}": services[name]["command"] for name in ("prefill", "decode")}
    return found | {f"kubernetes {each['metadata']['name']}": container_of(each)["args"] for each in deployments()}


@pytest.mark.parametrize("name", commands())
def test_the_configuration_is_taken(name: str) -> None:
    config = transfer_config(commands()[name])
    assert (config.kv_connector, config.kv_connector_module_path) == ("NixlConnector", "connector")
    assert config.kv_role == ("kv_producer" if "prefill" in name else "kv_consumer")
    parse_options(config.kv_connector_extra_config)


def test_engines_on_one_host_have_ports_of_their_own_and_are_where_the_router_looks() -> None:
    services = compose()["services"]
    engines = [services[name] for name in ("prefill", "decode")]
    assert len({each["environment"]["VLLM_NIXL_SIDE_CHANNEL_PORT"] for each in engines}) == 2
    assert len({str(each["deploy"]["resources"]["reservations"]["devices"]) for each in engines}) == 2
    for name in ("prefill", "decode"):
        url = f"http://127.0.0.1:{port_of(services[name]['command'])}"
        assert f"--{name}={url}" in services["router"]["command"]
        assert f"{url}/health" in services[name]["healthcheck"]["test"]


def test_pods_are_found_under_addresses_of_their_own() -> None:
    for deployment in deployments():
        container = container_of(deployment)
        variables = {each["name"]: each.get("value", each.get("valueFrom")) for each in container["env"]}
        assert variables["VLLM_NIXL_SIDE_CHANNEL_HOST"] == POD_ADDRESS
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        assert ports == {
            "http": port_of(container["args"]),
            "side-channel": int(variables["VLLM_NIXL_SIDE_CHANNEL_PORT"]),
        }
        spec = deployment["spec"]
        assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]


def shutdown_seconds_of(arguments: Sequence[str]) -> int:
    (seconds,) = (each.removeprefix("--shutdown-timeout=") for each in arguments if "shutdown" in each)
    return int(seconds)


def test_a_prefill_container_has_the_time_to_drain() -> None:
    """It drains at SIGTERM, for as long as vLLM waits, and is killed only when vLLM must have ended."""
    prefill = compose()["services"]["prefill"]
    shutdown_seconds = shutdown_seconds_of(prefill["command"])
    options = parse_options(transfer_config(prefill["command"]).kv_connector_extra_config)
    assert options.drain_grace_seconds <= shutdown_seconds < int(prefill["stop_grace_period"].removesuffix("s"))
    assert options.kv_lease_duration < shutdown_seconds, "a lease that was granted last lasts for its time"


def test_a_prefill_pod_outlives_the_leases_that_it_has_given() -> None:
    """It drains before SIGTERM, and what a late router still asks for is computed after it."""
    (prefill,) = (each for each in deployments() if each["metadata"]["name"] == "prefill")
    container = container_of(prefill)
    command = container["lifecycle"]["preStop"]["exec"]["command"][-1]
    drain, pause = command.split("; sleep ")
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert drain == f'nixl-actor drain "$VLLM_NIXL_SIDE_CHANNEL_HOST:{ports["side-channel"]}"'
    shutdown_seconds = shutdown_seconds_of(container["args"])
    options = parse_options(transfer_config(container["args"]).kv_connector_extra_config)
    needed_seconds = options.drain_grace_seconds + int(pause) + shutdown_seconds
    assert needed_seconds < prefill["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert options.kv_lease_duration < shutdown_seconds, "a lease that was granted last lasts for its time"


def test_variables_are_known_to_vllm() -> None:
    named = set(compose()["services"]["prefill"]["environment"])
    named |= {each["name"] for deployment in deployments() for each in container_of(deployment)["env"]}
    assert named <= set(envs.environment_variables)
