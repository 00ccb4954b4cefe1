"""The manifests in docs/examples: their arguments are such that vLLM, the router and the connector take them, and their
parts fit."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from vllm import envs
from vllm_router.launch_router import parse_router_args
from vllm_router.router_args import RouterArgs

from connector.config import ConnectorOptions, parse_options
from connector.tools.asking import parse_address
from connector.tools.ucx_devices import READS_WITHOUT_NVLINK
from tests.unit.serve_arguments import serve_arguments, transfer_config

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
SCRAPE = EXAMPLES.parent / "operations" / "prometheus" / "scrape.yaml"
POD_ADDRESS = {"fieldRef": {"fieldPath": "status.podIP"}}
NAMESPACE = {"fieldRef": {"fieldPath": "metadata.namespace"}}
ENGINES = ("prefill", "decode")


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((EXAMPLES / "compose.yaml").read_text())
    return found


def objects(kind: str, file: str = "kubernetes.yaml") -> dict[str, dict[str, Any]]:
    """By name."""
    found = yaml.safe_load_all((EXAMPLES / file).read_text())
    return {each["metadata"]["name"]: each for each in found if each["kind"] == kind}


def deployments(file: str = "kubernetes.yaml") -> Iterator[dict[str, Any]]:
    """Of engines."""
    found = objects("Deployment", file)
    return (found[name] for name in ENGINES)


def container_of(deployment: dict[str, Any]) -> dict[str, Any]:
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    found: dict[str, Any] = container
    return found


def labels_of(deployment: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = deployment["spec"]["template"]["metadata"]["labels"]
    return found


def ports_of(container: dict[str, Any]) -> dict[str, int]:
    return {each["name"]: each["containerPort"] for each in container["ports"]}


def variables_of(container: dict[str, Any]) -> dict[str, Any]:
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in container["env"]}


def port_of(arguments: Sequence[str]) -> int:
    port: int = serve_arguments(arguments).port
    return port


def commands() -> dict[str, list[str]]:
    services = compose()["services"]
    found = {f"compose {name}": services[name]["command"] for name in ENGINES}
    for file in ("kubernetes.yaml", "llm-d.yaml"):
        found |= {f"{file} {each['metadata']['name']}": container_of(each)["args"] for each in deployments(file)}
    return found


def router_of_kubernetes() -> tuple[dict[str, Any], RouterArgs]:
    deployment = objects("Deployment")["router"]
    container = container_of(deployment)
    assert container["command"] == ["vllm-router"]
    return deployment, parse_router_args(container["args"])


@pytest.mark.parametrize("name", commands())
def test_the_configuration_is_taken(name: str) -> None:
    config = transfer_config(commands()[name])
    assert (config.kv_connector, config.kv_connector_module_path) == ("NixlConnector", "connector")
    assert config.kv_role == ("kv_producer" if "prefill" in name else "kv_consumer")
    parse_options(config.kv_connector_extra_config)
    assert serve_arguments(commands()[name]).model_tag, "the model is the first argument"


def options_of(arguments: Sequence[str]) -> ConnectorOptions:
    return parse_options(transfer_config(arguments).kv_connector_extra_config)


def test_engines_may_reach_the_ports_that_engines_have_and_no_others() -> None:
    (policy,) = objects("NetworkPolicy").values()
    among_engines, from_all = policy["spec"]["ingress"]
    assert policy["spec"]["podSelector"] == among_engines["from"][0]["podSelector"]
    opened = {(each["port"], each.get("endPort", each["port"])) for each in among_engines["ports"]}
    for deployment in deployments():
        container = container_of(deployment)
        ports = ports_of(container)
        first, last = map(int, variables_of(container)["UCX_TCP_PORT_RANGE"].split("-"))
        assert opened == {(ports[each], ports[each]) for each in ("side-channel", "control")} | {(first, last)}
        assert [each["port"] for each in from_all["ports"]] == [ports["http"]]
        assert len({*ports.values(), *range(first, last + 1)}) == len(ports) + last + 1 - first, "ports clash"


def test_engines_on_one_host_have_ports_of_their_own_and_are_where_the_router_looks() -> None:
    services = compose()["services"]
    engines = [services[name] for name in ENGINES]
    ports = [int(each["environment"]["VLLM_NIXL_SIDE_CHANNEL_PORT"]) for each in engines]
    ports += [options_of(each["command"]).control_port for each in engines]
    ports += [port_of(each["command"]) for each in engines]
    for each in engines:
        first, last = map(int, each["environment"]["UCX_TCP_PORT_RANGE"].split("-"))
        assert not {*ports} & {*range(first, last + 1)}
    assert len(set(ports)) == len(ports)
    urls = {name: f"http://127.0.0.1:{port_of(services[name]['command'])}" for name in ENGINES}
    for name in ENGINES:
        assert f"{urls[name]}/health" in services[name]["healthcheck"]["test"]
    assert services["router"]["entrypoint"] == ["vllm-router"]
    router = parse_router_args(services["router"]["command"])
    assert router.vllm_pd_disaggregation
    assert router.prefill_urls == [(urls["prefill"], None)]
    assert router.decode_urls == [urls["decode"]]
    assert router.port not in [port_of(services[name]["command"]) for name in ENGINES]


def test_prometheus_asks_the_engines_of_the_examples() -> None:
    jobs = {each["job_name"]: each for each in yaml.safe_load(SCRAPE.read_text())["scrape_configs"]}
    services = compose()["services"]
    assert all(services[name]["network_mode"] == "host" for name in ENGINES)
    (static,) = jobs["vllm"]["static_configs"]
    assert static["targets"] == [f"127.0.0.1:{port_of(services[name]['command'])}" for name in ENGINES]
    (by_name,) = jobs["vllm-pods"]["dns_sd_configs"]
    assert by_name["names"] == [f"{name}.default.svc.cluster.local" for name in ENGINES]
    for name, deployment in zip(ENGINES, deployments(), strict=True):
        assert objects("Service")[name]["spec"]["clusterIP"] == "None"
        assert by_name["port"] == port_of(container_of(deployment)["args"])


def test_engines_on_one_host_use_a_device_each_and_may_open_each_others_memory() -> None:
    engines = [compose()["services"][name] for name in ENGINES]
    used = [each["environment"]["CUDA_VISIBLE_DEVICES"] for each in engines]
    assert len(set(used)) == len(engines)
    for each in engines:
        (devices,) = each["deploy"]["resources"]["reservations"]["devices"]
        assert set(devices["device_ids"]) == set(used)
        assert each["ipc"] == each["pid"] == "host"


def test_the_router_finds_the_pods_of_each_role() -> None:
    deployment, router = router_of_kubernetes()
    assert router.vllm_pd_disaggregation
    assert router.service_discovery
    for selector, engine in zip((router.prefill_selector, router.decode_selector), deployments(), strict=True):
        assert selector.items() <= labels_of(engine).items()
        others = [each for each in objects("Deployment").values() if each != engine]
        assert not any(selector.items() <= labels_of(each).items() for each in others)
        assert router.service_discovery_port == port_of(container_of(engine)["args"])
    container = container_of(deployment)
    variables = variables_of(container)
    assert router.service_discovery_namespace == "$(NAMESPACE)"
    assert variables["NAMESPACE"] == NAMESPACE
    assert ports_of(container) == {"http": router.port}
    assert router.host == "0.0.0.0"


def test_the_router_may_look_for_pods() -> None:
    deployment, _ = router_of_kubernetes()
    account = deployment["spec"]["template"]["spec"]["serviceAccountName"]
    assert account in objects("ServiceAccount")
    (binding,) = objects("RoleBinding").values()
    assert [(each["kind"], each["name"]) for each in binding["subjects"]] == [("ServiceAccount", account)]
    (rule,) = objects("Role")[binding["roleRef"]["name"]]["rules"]
    assert rule == {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}


def test_services_lead_to_what_they_are_called_after() -> None:
    pods = objects("Deployment")
    services = objects("Service")
    assert services.keys() == {"llm", *ENGINES}
    for name, service in services.items():
        (target,) = (pod for pod in pods.values() if service["spec"]["selector"].items() <= labels_of(pod).items())
        assert target["metadata"]["name"] == {"llm": "router"}.get(name, name)
        ports = ports_of(container_of(target))
        for each in service["spec"]["ports"]:
            assert each["targetPort"] in ports
            # Without an address of its own a Service translates no ports.
            assert service["spec"].get("clusterIP") != "None" or each["port"] == ports[each["targetPort"]]


def test_whoever_speaks_to_a_pod_is_let_in() -> None:
    (policy,) = objects("NetworkPolicy").values()
    among_themselves, from_outside = policy["spec"]["ingress"]
    selected = policy["spec"]["podSelector"]["matchLabels"]
    assert among_themselves["from"] == [{"podSelector": {"matchLabels": selected}}]
    for deployment in objects("Deployment").values():
        assert selected.items() <= labels_of(deployment).items()
        http = ports_of(container_of(deployment))["http"]
        assert http in [each["port"] for each in from_outside["ports"]]


def test_pods_are_found_under_addresses_of_their_own() -> None:
    for deployment in deployments():
        container = container_of(deployment)
        variables = variables_of(container)
        assert variables["VLLM_NIXL_SIDE_CHANNEL_HOST"] == POD_ADDRESS
        assert ports_of(container) == {
            "http": port_of(container["args"]),
            "side-channel": int(variables["VLLM_NIXL_SIDE_CHANNEL_PORT"]),
            "control": options_of(container["args"]).control_port,
        }
    for deployment in objects("Deployment").values():
        assert deployment["spec"]["selector"]["matchLabels"] == labels_of(deployment)
    for deployment in deployments("llm-d.yaml"):
        assert variables_of(container_of(deployment))["VLLM_NIXL_SIDE_CHANNEL_HOST"] == POD_ADDRESS


def shutdown_seconds_of(arguments: Sequence[str]) -> int:
    seconds: int = serve_arguments(arguments).shutdown_timeout
    return seconds


def grace_seconds_of(deployment: dict[str, Any]) -> int:
    seconds: int = deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    return seconds


def pre_stop_of(container: dict[str, Any]) -> list[str]:
    command: list[str] = container["lifecycle"]["preStop"]["exec"]["command"]
    return command


def test_a_prefill_container_has_the_time_to_drain() -> None:
    """It drains at SIGTERM, for as long as vLLM waits, and is killed only when vLLM must have ended."""
    prefill = compose()["services"]["prefill"]
    shutdown_seconds = shutdown_seconds_of(prefill["command"])
    options = options_of(prefill["command"])
    assert options.drain_grace_seconds < shutdown_seconds < int(prefill["stop_grace_period"].removesuffix("s"))
    assert options.kv_lease_duration < shutdown_seconds, "a lease that was granted last lasts for its time"


@pytest.mark.parametrize("file", ["kubernetes.yaml", "llm-d.yaml"])
def test_a_prefill_pod_outlives_the_leases_that_it_has_given(file: str) -> None:
    """It drains before SIGTERM, and what a late router still asks for is computed after it."""
    prefill, _ = deployments(file)
    container = container_of(prefill)
    shell, flag, script = pre_stop_of(container)
    assert (shell, flag) == ("sh", "-c")
    drain, pause = script.split("; sleep ")
    side_channel = variables_of(container)["VLLM_NIXL_SIDE_CHANNEL_PORT"]
    assert drain == f'nixl-actor drain "[$VLLM_NIXL_SIDE_CHANNEL_HOST]:{side_channel}" >/proc/1/fd/1 2>&1'
    shutdown_seconds = shutdown_seconds_of(container["args"])
    options = options_of(container["args"])
    assert options.drain_grace_seconds + int(pause) + shutdown_seconds < grace_seconds_of(prefill)
    assert options.kv_lease_duration < shutdown_seconds, "a lease that was granted last lasts for its time"


@pytest.mark.parametrize("host", ["10.0.0.1", "fd00::1"])
def test_the_address_of_a_pod_is_taken_in_brackets_whatever_its_kind(host: str) -> None:
    assert parse_address(f"[{host}]:5600").port == 5600


@pytest.mark.parametrize("file", ["kubernetes.yaml", "llm-d.yaml"])
def test_a_decode_pod_finishes_the_answers_that_it_writes(file: str) -> None:
    """With vLLM's default SIGTERM ends them all, however long the pod may take."""
    _, decode = deployments(file)
    container = container_of(decode)
    command, pause = pre_stop_of(container)
    assert command == "sleep"
    shutdown_seconds = shutdown_seconds_of(container["args"])
    assert shutdown_seconds > 0
    assert int(pause) + shutdown_seconds < grace_seconds_of(decode)


def test_a_decode_container_finishes_the_answers_that_it_writes() -> None:
    decode = compose()["services"]["decode"]
    assert 0 < shutdown_seconds_of(decode["command"]) < int(decode["stop_grace_period"].removesuffix("s"))


@pytest.mark.parametrize("name", [each for each in commands() if "decode" in each])
def test_a_decode_engine_computes_what_it_cannot_load(name: str) -> None:
    """vLLM's default answers with HTTP 500."""
    assert transfer_config(commands()[name]).kv_load_failure_policy == "recompute"


@pytest.mark.parametrize("file", ["kubernetes.yaml", "llm-d.yaml"])
def test_an_engine_whose_actors_have_died_is_started_again(file: str) -> None:
    for deployment in deployments(file):
        assert options_of(container_of(deployment)["args"]).on_actor_death == "exit"


def test_the_name_of_a_role_is_that_of_all_its_pods() -> None:
    """An engine that is not ready is the one that somebody asks about."""
    for name in ENGINES:
        service = objects("Service")[name]["spec"]
        assert service["clusterIP"] == "None"
        assert service["publishNotReadyAddresses"]


def test_variables_are_known_to_vllm() -> None:
    named = set(compose()["services"]["prefill"]["environment"])
    for file in ("kubernetes.yaml", "llm-d.yaml"):
        named |= {name for deployment in deployments(file) for name in variables_of(container_of(deployment))}
    of_others = {"UCX_TCP_PORT_RANGE", READS_WITHOUT_NVLINK, "HF_TOKEN"}
    assert named - of_others <= set(envs.environment_variables)


def test_engines_on_one_host_read_from_each_other_without_nvlink_too() -> None:
    for name in ENGINES:
        assert compose()["services"][name]["environment"][READS_WITHOUT_NVLINK] == "y"


def test_engines_get_weights_and_keep_them() -> None:
    """A gated model needs a token, which whoever runs an open one need not have."""
    models = set()
    for deployment in deployments():
        container, spec = container_of(deployment), deployment["spec"]["template"]["spec"]
        assert variables_of(container)["HF_TOKEN"]["secretKeyRef"]["optional"]
        mounted = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
        assert {"/dev/shm", "/root/.cache/huggingface"} <= mounted.keys()
        assert {each["name"] for each in spec["volumes"]} == set(mounted.values())
        models.add(serve_arguments(container["args"]).model_tag)
    for name in ENGINES:
        service = compose()["services"][name]
        assert "HF_TOKEN" in service["environment"]
        assert [each.rpartition(":")[2] for each in service["volumes"]] == ["/root/.cache/huggingface"]
        models.add(service["command"][0].removeprefix("${MODEL:-").removesuffix("}"))
    assert len(models) == 1
    assert not models.pop().startswith("meta-llama/"), "these are gated"


def test_the_image_that_is_described_is_the_one_of_the_manifests() -> None:
    """With the package's name and what it needs."""
    said = (EXAMPLES / "README.md").read_text()
    (image,) = {container_of(each)["image"] for each in objects("Deployment").values()}
    assert f"docker build --tag {image} image" in said
    assert f"IMAGE={image} docker compose" in said
    project = tomllib.loads((EXAMPLES.parents[1] / "pyproject.toml").read_text())["project"]
    wheel = project["name"].replace("-", "_")
    (nixl,) = (each for each in project["optional-dependencies"]["vllm"] if each.startswith("nixl"))
    assert f"RUN pip install /tmp/{wheel}-*.whl '{nixl}' vllm-router" in said
    assert f"FROM vllm/vllm-openai:v{image.rpartition(':')[2]}\n" in said


def test_prometheus_finds_each_pod_by_the_names_that_engines_share() -> None:
    jobs = yaml.safe_load((EXAMPLES.parent / "operations" / "prometheus" / "scrape.yaml").read_text())["scrape_configs"]
    (found,) = (each for job in jobs for each in job.get("dns_sd_configs", ()))
    assert found["type"] == "A"
    assert [name.partition(".")[0] for name in found["names"]] == list(ENGINES)
    for name in ENGINES:
        assert found["port"] in [each["port"] for each in objects("Service")[name]["spec"]["ports"]]
