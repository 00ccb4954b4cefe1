"""What an engine writes into its log at start: what runs, with which options, and what will not do as it stands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import vllm
from vllm import envs

from connector import DISTRIBUTION
from connector.addresses import is_all_interfaces, join_address
from connector.config import ConnectorOptions, in_force, unknown_variables
from connector.environment import VARIABLES
from connector.key_files import warn_of_insecurity
from connector.observe.log import get_logger
from connector.versions import beside_the_accepted, shown_version

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_log = get_logger()


def tell_of_start(vllm_config: VllmConfig, options: ConnectorOptions, advertised_host: str) -> None:
    """A line of what runs, and a warning for each thing that will not do. `advertised_host`: told to other engines."""
    transfer = vllm_config.kv_transfer_config
    _log.info(
        "%s %s (vLLM %s) as %s; kv_load_failure_policy=%s, %s; all other options have their defaults [%s]",
        DISTRIBUTION,
        shown_version(DISTRIBUTION),
        vllm.__version__,
        transfer.kv_role,
        transfer.kv_load_failure_policy,
        in_force(options),
        transfer.engine_id,
    )
    port = envs.VLLM_NIXL_SIDE_CHANNEL_PORT + vllm_config.parallel_config.data_parallel_index
    warn_of_insecurity(options, join_address(envs.VLLM_NIXL_SIDE_CHANNEL_HOST, port))
    for warning in _warnings(vllm_config, advertised_host):
        _log.warning("%s", warning)


def _warnings(vllm_config: VllmConfig, advertised_host: str) -> Iterator[str]:
    for name, found, accepted in beside_the_accepted():
        yield (
            f"{name} {found} is installed, with which nobody has run this connector: it is made for {name}{accepted}, "
            "and anything may go wrong; install a version of that, or run the tests with this one"
        )
    for name in unknown_variables():
        yield f"the environment variable {name} means nothing here; there are {', '.join(VARIABLES)}"
    if envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION:
        yield (
            "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION is set: vLLM ends this engine when a client's request id comes "
            "again while its blocks are lent or read into (AssertionError: duplicate request id); unset it"
        )
    api_servers = getattr(vllm_config.parallel_config, "_api_process_count", 1)
    if api_servers > 1 and vllm_config.shutdown_timeout:
        yield (
            f"this engine has {api_servers} API servers, and vLLM waits for those first: SIGTERM comes here when "
            "--shutdown-timeout is over, so this engine does not drain, and no answer in hand is finished; set "
            "--api-server-count 1, or take it from the router and run `nixl-actor drain` before SIGTERM"
        )
    if is_all_interfaces(advertised_host):
        yield (
            f"VLLM_NIXL_SIDE_CHANNEL_HOST is {envs.VLLM_NIXL_SIDE_CHANNEL_HOST}, and this machine has no route by "
            "which vLLM would find the address to tell others: no other machine reaches this engine; set VLLM_HOST_IP, "
            "or that variable, to it"
        )
