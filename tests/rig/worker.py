"""The stand-in for vLLM's worker: KV cache, the connector's worker side, and a "model" that writes known bytes.

vLLM's engine core makes it (`worker_cls`) and calls it through the uniprocess executor, so everything around it is
vLLM's. What vLLM's own worker does with a connector is repeated here in its order: it is made in
`initialize_from_config`, gets the KV caches, and in each step is bound to the step's metadata, asked to start loading
after the forward pass (before it, if a load is synchronous), waited for, asked for results, errors, statistics and
events, and unbound.

A step's forward pass, for each request scheduled: compare what a connector has loaded for it, once; then write the
slots of the scheduled tokens. Both follow `content`.

Design: `_Tokens` is what a worker remembers of a request; `_Pages` is the arithmetic on the KV cache;
`ConnectorProbe` is what the rig measures. The worker is found through the executor, so tests need no global variable.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer import ensure_kv_transfer_initialized, get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.utils import copy_kv_blocks
from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.worker.gpu_worker import init_worker_distributed_environment
from vllm.v1.worker.utils import allocate_kv_cache
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from tests.rig.content import TokenDigests, place_words
from tests.rig.messages import CallTimes, Check
from tests.rig.process import open_files

_WORD_BYTES = 8

NOBODYS_WORD = 0x0BAD_0BAD_0BAD_0BAD
"""Fills blocks that no request owns when a test wants what was in them gone."""


class ConnectorProbe:
    """What the rig observes of the worker side of the connector. Ids are request ids, times monotonic nanoseconds."""

    def __init__(self) -> None:
        self.start_load_kv = CallTimes()
        self.get_transfer_results = CallTimes()
        self.forward = CallTimes()
        self.step_wall_ns_max = 0
        self.steps = 0
        self.start_ns = 0
        self.received_ns: dict[str, int] = {}
        self.failed: set[str] = set()
        self.mismatched_pages: dict[str, int] = {}
        self.checked_pages: dict[str, int] = {}

    def reset_times(self) -> None:
        """Start the times and their maxima anew; what is known of requests stays."""
        self.start_load_kv = CallTimes()
        self.get_transfer_results = CallTimes()
        self.forward = CallTimes()
        self.step_wall_ns_max = 0

    def note_results(self, output: KVConnectorOutput, now_ns: int) -> None:
        """Take down what the connector reported in this step."""
        for request_id in output.finished_recving or ():
            self.received_ns[request_id] = now_ns
        self.failed |= output.failed_recving

    def forget(self, request_id: str) -> None:
        """The request has ended and its outcome has been told."""
        for notes in (self.received_ns, self.mismatched_pages, self.checked_pages):
            notes.pop(request_id, None)
        self.failed.discard(request_id)


class _Tokens:
    """What a worker remembers of a request: its tokens, its blocks, how much of both is computed."""

    def __init__(self, new: NewRequestData) -> None:
        assert new.prompt_token_ids is not None
        self.digests = TokenDigests()
        self.digests.extend(new.prompt_token_ids)
        self.block_ids: list[int] = list(new.block_ids[0])
        self.computed = new.num_computed_tokens
        self.checked = False
        self.resumed = False
        arguments = new.sampling_params.extra_args or {}
        self.check = Check(arguments["rig_check"])

    def update(self, blocks: tuple[list[int], ...] | None, computed: int, resumed: bool) -> None:
        """Take over what the scheduler says about a request it has scheduled before."""
        self.computed = computed
        if resumed:
            # Preempted: its blocks were taken away, and what is computed now comes from the prefix cache.
            self.block_ids = []
            self.checked = False
            self.resumed = True
        if blocks is not None:
            self.block_ids.extend(blocks[0])


class _Pages:
    """The KV cache as 64-bit words: one view [blocks, heads, tokens of a block, columns] per layer."""

    def __init__(self, caches: Iterable[torch.Tensor], block_size_tokens: int) -> None:
        self._layers = [cache.view(torch.int64) for cache in caches]
        self._block_size = block_size_tokens
        heads, columns = self._layers[0].shape[1], self._layers[0].shape[3]
        self._places = [place[None] for place in torch.from_numpy(place_words(len(self._layers), heads, columns))]
        # The corners of a slot: first and last head, first and last column.
        head_step, column_step = max(1, heads - 1), max(1, columns - 1)
        self._layer_corners = [layer[:, ::head_step, :, ::column_step] for layer in self._layers]
        self._place_corners = [place[:, ::head_step, ::column_step] for place in self._places]

    @property
    def page_length_bytes(self) -> int:
        return int(self._layers[0][0].numel()) * _WORD_BYTES

    def _slots(self, block_ids: list[int], tokens: npt.NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = np.array(block_ids, dtype=np.int64)[tokens // self._block_size]
        return torch.from_numpy(blocks), torch.from_numpy(tokens % self._block_size)

    def write(self, request: _Tokens, start: int, stop: int) -> None:
        """Write the slots of tokens [start, stop)."""
        blocks, slots = self._slots(request.block_ids, np.arange(start, stop))
        words = torch.from_numpy(request.digests.words(start, stop))[:, None, None]
        for layer, place in zip(self._layers, self._places, strict=True):
            layer[blocks, :, slots, :] = words ^ place

    def mismatches(self, request: _Tokens, stop: int) -> tuple[int, int]:
        """Compare tokens [0, stop) with what belongs there: (pages that differ, pages compared)."""
        tokens, layers, places = np.arange(stop), self._layers, self._places
        if request.check is Check.EDGES:
            place = tokens % self._block_size
            tokens = tokens[(place == 0) | (place == self._block_size - 1) | (tokens == stop - 1)]
            layers, places = self._layer_corners, self._place_corners
        blocks, slots = self._slots(request.block_ids, tokens)
        words = torch.from_numpy(request.digests.words(0, stop)[tokens])[:, None, None]
        different = 0
        for layer, layer_places in zip(layers, places, strict=True):
            wrong = (layer[blocks, :, slots, :] != (words ^ layer_places)).flatten(1).any(1)
            different += int(blocks[wrong].unique().numel())
        return different, int(blocks.unique().numel()) * len(layers)

    def damage(self, block_id: int) -> None:
        """Change one bit, in the last layer."""
        self._layers[-1][block_id, 0, 1, 0] ^= 1 << 4

    def overwrite(self, block_ids: list[int]) -> None:
        """Fill blocks with bytes that belong to no token."""
        for layer in self._layers:
            layer[block_ids] = NOBODYS_WORD


class _PagesOnCpus(_Pages):
    """Pages that the layers write with their own kernels, in an order that the rig does not know."""

    def __init__(self, layers: Mapping[str, Any], caches: Mapping[str, torch.Tensor], block_size_tokens: int) -> None:
        super().__init__(caches.values(), block_size_tokens)
        self._attention = [layers[name] for name in caches]
        self._caches = list(caches.values())

    def write(self, request: _Tokens, start: int, stop: int) -> None:
        self._write_into(self._caches, request, start, stop)

    def mismatches(self, request: _Tokens, stop: int) -> tuple[int, int]:
        """Compare every byte of all pages. What the kernel changes shows where the bytes of these tokens are."""
        expected, inverted = ([torch.zeros_like(cache) for cache in self._caches] for _ in range(2))
        self._write_into(expected, request, 0, stop)
        self._write_into(inverted, request, 0, stop, inverts=True)
        blocks, _ = self._slots(request.block_ids, np.arange(stop))
        blocks, different = blocks.unique(), 0
        for found, right, inverse in zip(self._caches, expected, inverted, strict=True):
            ours, theirs, others = (each[blocks].view(torch.int16) for each in (found, right, inverse))
            different += int(((theirs != others) & (ours != theirs)).flatten(1).any(1).sum())
        return different, int(blocks.numel()) * len(self._caches)

    def _write_into(
        self, caches: Iterable[torch.Tensor], request: _Tokens, start: int, stop: int, *, inverts: bool = False
    ) -> None:
        blocks, slots = self._slots(request.block_ids, np.arange(start, stop))
        words = torch.from_numpy(request.digests.words(start, stop))[:, None, None]
        for attention, cache, place in zip(self._attention, caches, self._places, strict=True):
            content = words ^ place
            k, v = (~content if inverts else content).view(cache.dtype).chunk(2, dim=-1)
            where = blocks * self._block_size + slots
            attention.impl.do_kv_cache_update(attention, k.contiguous(), v.contiguous(), cache, where)


def _timed(call: Callable[[], Any], times: CallTimes) -> tuple[Any, CallTimes, int]:
    wall_start, cpu_start = time.monotonic_ns(), time.thread_time_ns()
    result = call()
    wall_ns, cpu_ns = time.monotonic_ns() - wall_start, time.thread_time_ns() - cpu_start
    return result, times.plus(wall_ns, cpu_ns), wall_ns


class RigWorker(WorkerBase):  # type: ignore[misc]  # mypy is not shown vLLM's types
    """A worker for vLLM's executors that computes no model; see the module's docstring."""

    attention_backend: type[AttentionBackend] | None = None
    """The attention backend of all layers; None: vLLM's choice. vLLM makes the worker, so it is set on the class,
    before."""

    computes_on_cpus = False
    """K and V lie where the kernels of attention on CPUs write them. Set on the class, too."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        local_rank: int,
        rank: int,
        distributed_init_method: str,
        is_driver_worker: bool = False,
    ) -> None:
        super().__init__(vllm_config, local_rank, rank, distributed_init_method, is_driver_worker)
        self.probe = ConnectorProbe()
        self.before_load: Callable[[int], None] = lambda _now_ns: None
        """Called with the time right before `start_load_kv`."""
        self.forward: Callable[[], None] = lambda: None
        """What each step does besides."""
        self._requests: dict[str, _Tokens] = {}
        self._pages: _Pages | None = None
        self.files_before_connector: set[str] = set()
        """What the descriptors referred to that were open before the connector's worker side was made."""

    # ---- start-up, in the order in which the engine core calls it

    def init_device(self) -> None:
        self.device = torch.device("cpu")
        init_worker_distributed_environment(
            self.vllm_config, self.rank, self.distributed_init_method, self.local_rank, "gloo"
        )

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Make the attention layers, which is where vLLM and connectors look for specs and back ends."""
        heads = self.model_config.get_num_attention_heads(self.parallel_config)
        head_dim = self.model_config.get_head_size()
        with set_current_vllm_config(self.vllm_config):
            for index in range(self.model_config.hf_config.num_hidden_layers):
                Attention(
                    heads,
                    head_dim,
                    head_dim**-0.5,
                    num_kv_heads=self.model_config.get_num_kv_heads(self.parallel_config),
                    cache_config=self.cache_config,
                    prefix=f"model.layers.{index}.self_attn.attn",
                    attn_backend=self.attention_backend,
                )

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        layers = self.compilation_config.static_forward_context
        return {name: layer.get_kv_cache_spec(self.vllm_config) for name, layer in layers.items()}

    def determine_available_memory(self) -> int:
        """Enough for the number of blocks asked for, in bytes; vLLM takes num_gpu_blocks_override of it."""
        blocks = self.cache_config.num_gpu_blocks_override
        assert blocks is not None
        return int(blocks * sum(spec.page_size_bytes for spec in self.get_kv_cache_spec().values()))

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        self.cache_config.num_gpu_blocks = kv_cache_config.num_blocks
        assert not kv_cache_config.needs_kv_cache_zeroing, "the rig zeroes no blocks"
        self.files_before_connector = set(open_files().values())
        started_ns = time.monotonic_ns()
        ensure_kv_transfer_initialized(self.vllm_config, kv_cache_config)
        self.probe.start_ns = time.monotonic_ns() - started_ns
        caches = allocate_kv_cache(kv_cache_config, self.device, self.cache_config.get_resolved_kv_cache_layout())
        if self.computes_on_cpus:
            layers = self._choose_instruction_set(kv_cache_config)
            self._pages = _PagesOnCpus(layers, caches, self.cache_config.block_size)
        else:
            self._pages = _Pages(caches.values(), self.cache_config.block_size)
        started_ns = time.monotonic_ns()
        get_kv_transfer_group().register_kv_caches(caches)
        self.probe.start_ns += time.monotonic_ns() - started_ns
        get_kv_transfer_group().set_host_xfer_buffer_ops(copy_kv_blocks)

    def _choose_instruction_set(self, kv_cache_config: KVCacheConfig) -> dict[str, Any]:
        """Make the metadata builder, which tells the layers, as vLLM's own worker does before it registers a cache."""
        (group,) = kv_cache_config.kv_cache_groups
        CPUAttentionBackend.get_builder_cls()(group.kv_cache_spec, group.layer_names, self.vllm_config, self.device)
        layers: dict[str, Any] = self.compilation_config.static_forward_context
        return layers

    def compile_or_warm_up_model(self) -> CompilationTimes:
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def get_kv_connector_handshake_metadata(self) -> dict[tuple[int, int], Any] | None:
        metadata = get_kv_transfer_group().get_handshake_metadata()
        return None if metadata is None else {(get_pp_group().rank_in_group, get_tp_group().rank_in_group): metadata}

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def shutdown(self) -> None:
        if has_kv_transfer_group():
            ensure_kv_transfer_shutdown()

    # ---- a step

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        connector = get_kv_transfer_group()
        output = KVConnectorOutput()
        with set_forward_context(None, self.vllm_config):
            connector.handle_preemptions(scheduler_output.kv_connector_metadata)
            connector.bind_connector_metadata(scheduler_output.kv_connector_metadata)
            load_ns = self._start_load_kv() if scheduler_output.has_sync_kv_loads else 0
            sampled = self._forward(scheduler_output)
            _, self.probe.forward, _ = _timed(self.forward, self.probe.forward)
            if not scheduler_output.has_sync_kv_loads:
                load_ns = self._start_load_kv()
            connector.wait_for_save()
            results_ns = self._collect(output, scheduler_output.finished_req_ids)
            connector.clear_connector_metadata()
        self.probe.step_wall_ns_max = max(self.probe.step_wall_ns_max, load_ns + results_ns)
        self.probe.steps += 1
        return ModelRunnerOutput(
            req_ids=list(sampled),
            req_id_to_index={request_id: index for index, request_id in enumerate(sampled)},
            sampled_token_ids=list(sampled.values()),
            kv_connector_output=None if output.is_empty() else output,
        )

    def _start_load_kv(self) -> int:
        connector, context = get_kv_transfer_group(), get_forward_context()
        self.before_load(time.monotonic_ns())
        _, self.probe.start_load_kv, wall_ns = _timed(
            lambda: connector.start_load_kv(context), self.probe.start_load_kv
        )
        return wall_ns

    def _collect(self, output: KVConnectorOutput, finished_request_ids: set[str]) -> int:
        connector = get_kv_transfer_group()
        results, self.probe.get_transfer_results, wall_ns = _timed(
            lambda: connector.get_transfer_results(finished_request_ids), self.probe.get_transfer_results
        )
        output.finished_sending = results.finished_sending or None
        output.finished_recving = results.finished_recving or None
        output.failed_recving = results.failed_recving
        output.invalid_block_ids = connector.get_block_ids_with_load_errors()
        output.kv_connector_stats = connector.get_kv_connector_stats()
        output.kv_cache_events = connector.get_kv_connector_kv_cache_events()
        output.kv_connector_worker_meta = connector.build_connector_worker_meta()
        self.probe.note_results(output, time.monotonic_ns())
        return wall_ns

    def _forward(self, scheduler_output: SchedulerOutput) -> dict[str, list[int]]:
        """Check and write the KV of the scheduled tokens; the tokens sampled, per request (none in mid-prefill)."""
        for request_id in scheduler_output.finished_req_ids:
            self._requests.pop(request_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            self._requests[new.req_id] = _Tokens(new)
        self._update_cached(scheduler_output.scheduled_cached_reqs)
        sampled: dict[str, list[int]] = {}
        for request_id, scheduled in scheduler_output.num_scheduled_tokens.items():
            sampled[request_id] = self._forward_one(request_id, scheduled)
        return sampled

    def _update_cached(self, cached: CachedRequestData) -> None:
        for request_id, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            self._requests[request_id].update(blocks, computed, request_id in cached.resumed_req_ids)

    def _forward_one(self, request_id: str, scheduled: int) -> list[int]:
        request = self._requests[request_id]
        assert self._pages is not None
        stop = request.computed + scheduled
        if not request.checked:
            self._check(request_id, request, stop)
        self._pages.write(request, request.computed, stop)
        if stop < len(request.digests):
            return []
        token = request.digests.next_token()
        request.digests.extend([token])
        return [token]

    def _check(self, request_id: str, request: _Tokens, stop: int) -> None:
        """Compare the slots that are said to hold the request's KV already, before anything relies on them.

        When everything was loaded, vLLM computes the last token again to have something to sample from: that slot, too,
        was loaded, and is compared before it is written.
        """
        request.checked = True
        loaded = request_id in self.probe.received_ns and request_id not in self.probe.failed and not request.resumed
        until = stop if loaded and stop == request.computed + 1 else request.computed
        if until == 0:
            return
        assert self._pages is not None
        different, compared = self._pages.mismatches(request, until)
        notes = self.probe
        notes.mismatched_pages[request_id] = notes.mismatched_pages.get(request_id, 0) + different
        notes.checked_pages[request_id] = notes.checked_pages.get(request_id, 0) + compared

    # ---- for the rig

    @property
    def page_length_bytes(self) -> int:
        """Bytes of one block of one layer."""
        assert self._pages is not None
        return self._pages.page_length_bytes

    @property
    def connector(self) -> Any:
        """The connector's worker side; it is gone after `shutdown`."""
        return get_kv_transfer_group()

    def block_ids(self, request_id: str) -> tuple[int, ...]:
        """Blocks of a request, as of the last step it was scheduled in; empty when it never was."""
        request = self._requests.get(request_id)
        return () if request is None else tuple(request.block_ids)

    def damage_block(self, block_id: int) -> None:
        """Change one bit of it, in one layer."""
        assert self._pages is not None
        self._pages.damage(block_id)

    def overwrite_blocks(self, block_ids: list[int]) -> None:
        """Fill blocks with bytes that belong to no token."""
        assert self._pages is not None
        if block_ids:
            self._pages.overwrite(block_ids)
