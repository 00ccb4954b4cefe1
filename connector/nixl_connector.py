"""The class that vLLM loads: `KVConnectorBase_V1` in front of the scheduler side and the worker side.

It decides nothing. vLLM makes one instance per role; each method belongs to one role and goes to that side.

It has three names. vLLM chooses some defaults by `NixlConnector` in the configuration, where a module path takes
precedence over the built-in class of that name. But where several connectors are combined (`MultiConnector`), vLLM
looks classes up by their own names, and `NixlConnector` is the built-in one there. So the class is called
`NixlActorConnector`, and is registered under that name as soon as this module is imported. `NixlPullConnector` is what
the built-in class is called itself, for configurations that name it so.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    CopyBlocksOp,
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from connector.clock import BootClock
from connector.config import parse_options, warn_of_options
from connector.observe.stats import ConnectorPromMetrics, ConnectorStats
from connector.plugin import register
from connector.scheduler.cache_groups import has_windows_of_other_blocks
from connector.scheduler.connector_scheduler import ConnectorScheduler
from connector.step_metadata import StepMetadata
from connector.step_overlap import require_role_that_reads
from connector.worker.connector_worker import ConnectorWorker
from connector.worker.control_socket import require_control_ports
from connector.worker.registration import require_supported
from connector.worker.sleep_mode import supports_sleep_mode

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class NixlActorConnector(KVConnectorBase_V1, SupportsHMA):
    """Pull-based KV transfer between prefill and decode engines.

    Raises at construction OptionError for an option that it does not know, and UnsupportedCache for an engine whose KV
    cache it cannot transfer, or into whose blocks it could not read safely.
    """

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra_config = vllm_config.kv_transfer_config.kv_connector_extra_config
        options = parse_options(extra_config)
        require_role_that_reads(vllm_config, options, vllm_config.kv_transfer_config)
        require_supported(vllm_config, kv_cache_config)
        require_control_ports(vllm_config, options)
        self._has_windows_of_other_blocks = has_windows_of_other_blocks(
            [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups],
            vllm_config.parallel_config.decode_context_parallel_size,
        )
        self._scheduler: ConnectorScheduler | None = None
        self._worker: ConnectorWorker | None = None
        if role is KVConnectorRole.SCHEDULER:
            warn_of_options(extra_config, options)
            self._scheduler = ConnectorScheduler(
                vllm_config, kv_cache_config, options, clock=BootClock(), life=uuid.uuid4().hex
            )
        else:
            self._worker = ConnectorWorker(vllm_config, kv_cache_config, options)

    @property
    def _scheduler_side(self) -> ConnectorScheduler:
        assert self._scheduler is not None, "a method of the scheduler role was called on the worker's instance"
        return self._scheduler

    @property
    def _worker_side(self) -> ConnectorWorker:
        assert self._worker is not None, "a method of the worker role was called on the scheduler's instance"
        return self._worker

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """A prefix hit of full attention may reach further than the last cached state: a load always brings a state.

        Not where groups of unlike block sizes have windows. vLLM 0.32 takes it that states alone may lag behind, cuts
        all hits to that of full attention, and dies of a window that has fewer blocks.
        """
        return not self._has_windows_of_other_blocks

    # --- both roles ---------------------------------------------------------------------------------------------

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Asked from vLLM 0.33 on, at start."""
        return supports_sleep_mode(kv_transfer_config)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Heads before tokens, so that a block of one head is contiguous; MLA has no heads to order."""
        if vllm_config.model_config is None or vllm_config.model_config.use_mla:
            return None
        return "LBHNC"

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """For the periodic line of a front end. Prometheus is fed with `data` itself."""
        return ConnectorStats.of_periodic_line(data) if data else ConnectorStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ConnectorPromMetrics:
        return ConnectorPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()
        if self._scheduler is not None:
            self._scheduler.shutdown()

    # --- scheduler role -----------------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduler_side.bind_cache_manager(kv_cache_manager)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        group_ids: tuple[int, ...] = self._kv_cache_config.transfer_group_ids
        return group_ids

    def on_new_request(self, request: Request) -> None:
        self._scheduler_side.on_new_request(request)
        if not isinstance(request.kv_transfer_params, dict):
            # vLLM looks into it next, and its engine core would end. The request has been noted as a malformed one.
            request.kv_transfer_params = None

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler_side.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._scheduler_side.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._scheduler_side.build_step_metadata(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._scheduler_side.update_connector_output(connector_output)

    def has_pending_push_work(self) -> bool:
        """Nothing is pushed; but what the worker has to be told of, or what an engine that is to end has lent, keeps an
        engine going, and this is vLLM's question."""
        return self._scheduler is not None and self._scheduler.keeps_stepping

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler_side.request_finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler_side.request_finished(request, block_ids)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        self._scheduler_side.serve_handshakes(metadata)

    # --- worker role --------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker_side.register_kv_caches(kv_caches)

    def set_host_xfer_buffer_ops(self, copy_operation: CopyBlocksOp) -> None:
        """How to copy blocks between device and host; used only where KV is staged on the host."""
        self._worker_side.set_copy_operation(copy_operation)

    def unregister_kv_caches(self) -> None:
        self._worker_side.unregister_kv_caches()

    def restore_kv_caches(self) -> None:
        self._worker_side.restore_kv_caches()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Asked for when the engine has been warmed up, and when it has woken up."""
        self._worker_side.note_warm()
        return self._worker_side.handshake_metadata

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        self._worker_side.start_load_kv(metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self._worker_side.get_transfer_results()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """The older form of `get_transfer_results`; failed requests are in both of its sets."""
        results = self._worker_side.get_transfer_results()
        return results.finished_sending, results.finished_recving

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._worker_side.take_report()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Figures since the last step: of this worker, or of the whole engine."""
        return self._worker.take_stats() if self._worker is not None else self._scheduler_side.take_stats()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request is scheduled only after all its layers are here."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Nothing to save layer by layer: see `wait_for_save`."""

    def wait_for_save(self) -> None:
        """After all that the step computes. Staged on the host: copy there what it has written. Otherwise peers read
        from the KV cache itself, when it has been written."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        self._worker_side.note_step(metadata)
        if self._worker_side.is_staged:
            self._worker_side.save(metadata)


NixlConnector = NixlPullConnector = NixlActorConnector
register()
