"""vLLM plug-in: makes the connector known under the name `NixlActorConnector`, and its options part of what vLLM checks
in its own configuration.

vLLM calls `register` through the entry point group `vllm.general_plugins`, once in every process and sometimes twice.
It must not raise: it is called in every engine, whatever connector that uses.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig

CONNECTOR_NAME = "NixlActorConnector"
CONNECTOR_MODULE = "connector.nixl_connector"

_SEVERAL = "MultiConnector"
_VLLM_CHECK = "_verify_kv_transfer_compat"
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""All the names under which torch takes the settings of its allocator."""
_RANK_SUFFIX = re.compile(r"_dp[0-9]{1,5}\Z")
"""What vLLM appends to the engine id in the process of each data-parallel engine."""
_RANK_SUFFIX_LENGTH_MAX = len("_dp99999")
_MARK = "_checks_options_of_nixl_actor_connector"


def register() -> None:
    """Register the connector with vLLM's factory, and its options with vLLM's check of its configuration. Calling it
    again changes nothing."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with contextlib.suppress(ValueError):  # Registered already.
        KVConnectorFactory.register_connector(CONNECTOR_NAME, CONNECTOR_MODULE, CONNECTOR_NAME)
    _check_options_with_vllm()


def check_options(vllm_config: VllmConfig) -> None:
    """Raises OptionError or UnsupportedCache when this connector is configured, alone or as one of several, with
    options that it could not start with, or that the rest of the configuration does not allow."""
    configured = list(_leaves(vllm_config.kv_transfer_config))
    ours = [each for each in configured if _is_ours(each)]
    for each in ours:
        _check_options(vllm_config, each)
    if ours and len(configured) > 1:
        _require_that_all_bear_stages(vllm_config, configured)


def _check_options(vllm_config: VllmConfig, config: KVTransferConfig) -> None:
    """Check the options of one connector of ours."""
    from connector.config import check_trace_directory, parse_options
    from connector.key_files import check_key_files
    from connector.step_overlap import require_role_that_reads

    _require_engine_id_for_peers(config)
    _require_no_routed_experts(vllm_config)
    _require_no_retried_steps(vllm_config)
    _require_engines_that_stay(vllm_config)
    _require_memory_that_stays(vllm_config, config)
    options = parse_options(config.kv_connector_extra_config)
    check_key_files(options)
    require_role_that_reads(vllm_config, options, config)
    check_trace_directory(options)  # last, because it may create it


def share_policy(config: KVTransferConfig) -> None:
    """Give this connector, where it is one of several, the `kv_load_failure_policy` of the engine.

    vLLM's scheduler looks at that of `MultiConnector` alone. What a connector in it has of its own, or has by default,
    counts for nothing, and it could not see the engine's, to say in the log and to tools what follows a failed load.
    """
    if config.kv_connector == _SEVERAL and "connectors" in config.kv_connector_extra_config:
        extra = config.kv_connector_extra_config
        # Not changed in place: the dictionaries belong to the caller that made the configuration.
        config.kv_connector_extra_config = extra | {
            "connectors": [_with_policy(child, config) for child in extra["connectors"]]
        }


def _leaves(config: KVTransferConfig) -> Iterator[KVTransferConfig]:
    """All connectors that are not made of others."""
    if config.kv_connector == _SEVERAL:
        for child in config.kv_connector_extra_config.get("connectors", []):
            yield from _leaves(_config_of(child, config))
    else:
        yield config


def _config_of(child: dict[str, Any], parent: KVTransferConfig) -> KVTransferConfig:
    """The configuration of a connector in another, as vLLM makes it."""
    from vllm.config import KVTransferConfig

    return KVTransferConfig(**{"engine_id": parent.engine_id, **child})


def _with_policy(child: dict[str, Any], parent: KVTransferConfig) -> dict[str, Any]:
    name, policy = "kv_load_failure_policy", parent.kv_load_failure_policy
    config = _config_of(child, parent)
    if config.kv_connector == _SEVERAL:
        config.kv_load_failure_policy = policy
        share_policy(config)
        return child | {name: policy, "kv_connector_extra_config": config.kv_connector_extra_config}
    if not _is_ours(config):
        return child
    if child.get(name, policy) != policy:
        from connector.observe.log import get_logger

        get_logger().warning(
            "%s %s of %s does not count: it is one of several connectors, and that of %s does, which is %s",
            name,
            child[name],
            config.kv_connector,
            _SEVERAL,
            policy,
        )
    return child | {name: policy}


def _require_engine_id_for_peers(config: KVTransferConfig) -> None:
    """Raise UnsupportedCache for an `engine_id` that other engines would refuse in each message that has it.

    There has to be room for what vLLM appends later with data parallelism. It may be there already: vLLM checks
    a configuration again where it derives another one from it.
    """
    from connector.wire.bounded import ID_LENGTH_MAX, IDENTIFIER_PATTERN, render_untrusted

    engine_id = config.engine_id or ""
    length_max = ID_LENGTH_MAX - _RANK_SUFFIX_LENGTH_MAX
    if re.search(IDENTIFIER_PATTERN, engine_id) is None or len(_RANK_SUFFIX.sub("", engine_id)) > length_max:
        from connector.unsupported import UnsupportedCache

        expected = (
            f"1 to {length_max} characters, none of them a control character, because other engines refuse any other; "
            "leave engine_id out of --kv-transfer-config, so that each process has one of its own, or change it"
        )
        raise UnsupportedCache("engine_id", render_untrusted(engine_id), expected)


def _require_no_routed_experts(vllm_config: VllmConfig) -> None:
    """Raise UnsupportedCache for an engine that is to answer with them. vLLM refuses that itself, of connectors whose
    names it knows: `NixlConnector`, and not ours."""
    if vllm_config.aux_output_config.enable_return_routed_experts:
        from connector.unsupported import UnsupportedCache

        expected = (
            "false, so leave --enable-return-routed-experts out: they are known where a prompt is computed, and vLLM"
            " takes none of them from P to D"
        )
        raise UnsupportedCache("enable_return_routed_experts", True, expected)


def _require_no_retried_steps(vllm_config: VllmConfig) -> None:
    """Raise UnsupportedCache for an engine that may go on after a step that has failed.

    Commands travel to the workers with a step, and worker events back with its results, each once. vLLM drops both when
    a step fails, and with several ranks it is not known which of them had got or told theirs: vLLM counts the ranks
    that have told of a request, so that one that tells twice would pass for another one. Requests would stay for good,
    and their blocks.
    """
    if vllm_config.parallel_config.enable_fault_tolerance:
        from connector.unsupported import UnsupportedCache

        expected = (
            "false, so leave --enable-fault-tolerance out and have the engine restarted: what the connector's processes"
            " tell each other with a step that fails is lost, and an engine that went on would keep blocks for good"
        )
        raise UnsupportedCache("enable_fault_tolerance", True, expected)


def _require_engines_that_stay(vllm_config: VllmConfig) -> None:
    """Raise UnsupportedCache for an engine whose number of workers may change while it serves.

    vLLM captures CUDA graphs then, in workers that read and lend meanwhile and in new ones after they have been asked
    for their handshake metadata, and tells a connector of neither. What connects to a peer for the first time while a
    graph is captured breaks the capture.
    """
    if vllm_config.parallel_config.enable_elastic_ep:
        from connector.unsupported import UnsupportedCache

        expected = (
            "false, so leave --enable-elastic-ep out: engines that come later capture CUDA graphs while KV is read, and"
            " the connector is not told when"
        )
        raise UnsupportedCache("enable_elastic_ep", True, expected)


def _require_that_all_bear_stages(vllm_config: VllmConfig, several: Sequence[KVTransferConfig]) -> None:
    """Raise UnsupportedCache for pipeline stages where one of several connectors raises for them. Each is told what the
    workers of all connectors say of themselves, and vLLM's base class raises for what comes from a second stage."""
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if stages == 1:
        return
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1

    for each in several:
        found = KVConnectorFactory.get_connector_class(each)
        if found.set_xfer_handshake_metadata_pp_aware is KVConnectorBase_V1.set_xfer_handshake_metadata_pp_aware:
            from connector.unsupported import UnsupportedCache

            expected = (
                f"1, or this connector without {each.kv_connector} beside it, which raises for what a rank of a second"
                " stage tells others"
            )
            raise UnsupportedCache(f"pipeline_parallel_size with {_SEVERAL}", stages, expected)


def _require_memory_that_stays(vllm_config: VllmConfig, config: KVTransferConfig) -> None:
    """Raise UnsupportedCache for an engine whose KV cache may get other memory behind the same addresses: NIXL has
    registered what was there first, and would go on reading and writing that. vLLM refuses it itself, of the variable
    by which torch knew it first."""
    model = vllm_config.model_config
    if config.kv_buffer_device == "cpu" or (model is not None and model.enable_cumem_allocator):
        return
    for name in _ALLOCATOR_VARIABLES:
        settings = os.environ.get(name, "").replace(" ", "")
        if "expandable_segments:True" in settings.split(","):
            from connector.unsupported import UnsupportedCache

            expected = (
                "settings without expandable_segments:True, or any with --enable-cumem-allocator: torch may move what"
                " lies in such a segment to other memory, and NIXL would go on reading and writing the one before"
            )
            raise UnsupportedCache(name, settings, expected)


def _is_ours(config: KVTransferConfig) -> bool:
    """Whether this connector is configured, or a class derived from it. Imports only what vLLM imports in this process
    anyway."""
    if config.kv_connector_module_path is None:
        return bool(config.kv_connector == CONNECTOR_NAME)
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    found = KVConnectorFactory.get_connector_class(config)
    module = sys.modules.get(CONNECTOR_MODULE)
    return module is not None and issubclass(found, module.NixlActorConnector)


def _check_options_with_vllm() -> None:
    """Wrap vLLM's own check of a configuration that has a connector; afterwards `share_policy`.

    It runs in every configuration, in the first process, before an engine is started and a model is loaded. Of a
    connector's class vLLM asks nothing there that comes with the options, unless it captures whole CUDA graphs; so
    there is nothing to override. It runs late in the making of a configuration, after vLLM has looked the class up: so
    it is in time also where VLLM_PLUGINS leaves this plug-in out, and the class has just been imported.

    Where vLLM has no such method, options are checked when the connector is made.
    """
    from vllm.config import VllmConfig

    own = getattr(VllmConfig, _VLLM_CHECK, None)
    if own is None or hasattr(own, _MARK):
        return

    @functools.wraps(own)
    def check(self: Any) -> None:
        own(self)
        if self.kv_transfer_config is not None and self.kv_transfer_config.kv_connector is not None:
            check_options(self)
            share_policy(self.kv_transfer_config)

    setattr(check, _MARK, True)
    setattr(VllmConfig, _VLLM_CHECK, check)
