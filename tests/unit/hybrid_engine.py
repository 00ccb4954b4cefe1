"""vLLM's own scheduler with several KV cache groups and the connector's scheduler side, without an engine.

The production connector is made by vLLM's factory and called by vLLM's scheduler; there is no worker, so a step's
tokens are made up and what a worker would report is handed in by the test. Every command of the scheduler side is kept.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.config import KVEventsConfig, KVTransferConfig
from vllm.distributed.kv_events import KVCacheEvent
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import (
    KVCacheBlock,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from connector.nixl_connector import NixlActorConnector
from connector.protocol import Command, LeaseGranted, RejectPull, ReleaseUnread, StartPull
from connector.step_metadata import StepMetadata
from connector.wire.params import RemotePrefill, parse_remote_prefill
from tests.unit.vllm_setup import block_hasher, draft_model, scheduling_config

BLOCK_TOKENS = 16
MAX_MODEL_TOKENS = 512
SAMPLED_TOKEN = 7
REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}

_HEAD = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}


def full() -> FullAttentionSpec:
    return FullAttentionSpec(block_size=BLOCK_TOKENS, **_HEAD)


def gapped(tokens: int) -> RSWASpec:
    """Of an answer only the last tokens are kept."""
    return RSWASpec(block_size=BLOCK_TOKENS, rswa_window=tokens, **_HEAD)


def mla() -> MLAAttentionSpec:
    return MLAAttentionSpec(block_size=BLOCK_TOKENS, **_HEAD)


def window(tokens: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=BLOCK_TOKENS, sliding_window=tokens, **_HEAD)


def replayed(tokens: int) -> SlidingWindowMLASpec:
    """A window that is not in the prefix cache: after a hit vLLM computes it anew."""
    return SlidingWindowMLASpec(block_size=BLOCK_TOKENS, sliding_window=tokens, bounded_replay=True, **_HEAD)


def ring() -> CircularBufferSpec:
    return CircularBufferSpec(block_size=8, head_size_v=0, **_HEAD)


def chunked(tokens: int) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(block_size=BLOCK_TOKENS, attention_chunk_size=tokens, **_HEAD)


def state(mode: str, *, speculative: int = 0) -> MambaSpec:
    """One block for the whole request, or, when states are cached, one per block of tokens."""
    return MambaSpec(
        block_size=MAX_MODEL_TOKENS if mode == "none" else BLOCK_TOKENS,
        shapes=((4,), (4,)),
        dtypes=(torch.float32, torch.float32),
        mamba_cache_mode=mode,
        num_speculative_blocks=speculative,
    )


class HybridEngine:
    """A scheduler whose model has one layer per cache group.

    Args:
        specs: one per cache group.
        recomputes: policy for a failed load: compute the prompt here, or fail the request.
        admits_what_fits: a prompt is begun only when there are blocks for all of it.
        options: of the connector.
        overlaps: a step may be scheduled before the one before it has ended (async scheduling).
        role: vLLM's `kv_role`.
        policy: in which order vLLM's queue is served.
        drafts: tokens that a draft model proposes after a step; vLLM keeps slots for them.
        tells_events: vLLM's KV cache events are collected in `events`.
        long_prefill_tokens: vLLM's `long_prefill_token_threshold`, which adapts to the number of requests; 0: none.
        match_tokens: where prefixes are cached (`prefix_match_unit`); None: where vLLM would. The attribute is what
            vLLM makes of it.
    """

    def __init__(
        self,
        specs: Sequence[KVCacheSpec],
        *,
        engine_id: str = "engine",
        blocks: int = 200,
        batch_tokens: int = MAX_MODEL_TOKENS,
        caches_prefixes: bool = True,
        recomputes: bool = False,
        admits_what_fits: bool = True,
        options: Mapping[str, Any] | None = None,
        overlaps: bool = False,
        role: str = "kv_both",
        policy: str = "fcfs",
        drafts: int = 0,
        tells_events: bool = False,
        long_prefill_tokens: int = 0,
        match_tokens: int | None = None,
    ) -> None:
        config = self.config = copy.copy(scheduling_config(BLOCK_TOKENS, MAX_MODEL_TOKENS))
        config.scheduler_config = copy.copy(config.scheduler_config)
        config.scheduler_config.max_num_batched_tokens = batch_tokens
        config.scheduler_config.async_scheduling = overlaps
        config.scheduler_config.scheduler_reserve_full_isl = admits_what_fits
        config.scheduler_config.policy = policy
        config.scheduler_config.long_prefill_token_threshold = long_prefill_tokens
        config.scheduler_config.long_prefill_token_threshold_adaptive = long_prefill_tokens > 0
        config.speculative_config = draft_model(config, drafts) if drafts else None
        config.cache_config = copy.copy(config.cache_config)
        config.cache_config.num_gpu_blocks = blocks
        config.cache_config.enable_prefix_caching = caches_prefixes
        config.cache_config.prefix_match_unit = match_tokens
        config.cache_config.mamba_cache_mode = next(
            (spec.mamba_cache_mode for spec in specs if isinstance(spec, MambaSpec)), "none"
        )
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="NixlConnector",
            kv_connector_module_path="connector",
            engine_id=engine_id,
            kv_role=role,
            kv_buffer_device="cpu",
            kv_load_failure_policy="recompute" if recomputes else "fail",
            kv_connector_extra_config=dict(options or {}),
        )
        if tells_events:
            config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        self.cache_config = _cache_config(specs, blocks)
        block_size, self.match_tokens = resolve_kv_cache_block_sizes(self.cache_config, config)
        self.scheduler = (AsyncScheduler if overlaps else Scheduler)(
            vllm_config=config,
            kv_cache_config=self.cache_config,
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_size,
            hash_block_size=self.match_tokens,
        )
        assert isinstance(self.scheduler.connector, NixlActorConnector)
        self.events: list[KVCacheEvent] = []
        self.scheduler.kv_event_publisher.publish = lambda batch: self.events.extend(batch.events)
        self.commands: list[Command] = []
        self.params: dict[str, Any] = {}
        self.finished: dict[str, str] = {}
        self.computed: Counter[str] = Counter()
        """Tokens computed here, per request."""
        self._content: dict[int, set[tuple[str, int, int]]] = {}

    def submit(
        self,
        name: str,
        tokens: Sequence[int] | None,
        params: dict[str, Any] | None,
        *,
        max_tokens: int = 1,
        prompt_logprobs: int | None = None,
        abort_immediately: bool = False,
        priority: int = 0,
        **given: Any,
    ) -> Request:
        """A request arrives. `params` as the client sends them; `abort_immediately` if vLLM has refused the request;
        the lower `priority` is served first; `given`: what else vLLM's request has, an adapter, embeddings."""
        request = Request(
            request_id=name,
            prompt_token_ids=None if tokens is None else list(tokens),
            sampling_params=SamplingParams(
                max_tokens=max_tokens,
                ignore_eos=True,
                prompt_logprobs=prompt_logprobs,
                extra_args={"kv_transfer_params": params},
            ),
            pooling_params=None,
            block_hasher=block_hasher(self.match_tokens),
            abort_immediately=abort_immediately,
            priority=priority,
            **given,
        )
        self.scheduler.add_request(request)
        return request

    def step(self, reported: KVConnectorOutput | None = None) -> None:
        """Schedule, compute, and tell the scheduler of it, together with what the worker reports."""
        self.compute(self.schedule(), reported)

    def schedule(self) -> SchedulerOutput:
        """A step is under way."""
        output = self.scheduler.schedule()
        metadata = output.kv_connector_metadata
        assert isinstance(metadata, StepMetadata)
        self.commands += metadata.commands
        return output

    def compute(self, output: SchedulerOutput, reported: KVConnectorOutput | None = None) -> None:
        """A step that was scheduled ends."""
        metadata = output.kv_connector_metadata
        assert isinstance(metadata, StepMetadata)
        for request_id, scheduled in output.num_scheduled_tokens.items():
            self._note_written(request_id, scheduled)
        self.forward(output, metadata)
        sampled = []
        for request_id, scheduled in output.num_scheduled_tokens.items():
            request = self.scheduler.requests.get(request_id)  # None: aborted meanwhile
            # The scheduler has counted the scheduled tokens already.
            is_whole = request is not None and request.num_computed_tokens >= request.num_tokens
            sampled.append([SAMPLED_TOKEN] if scheduled and is_whole else [])
        self.computed.update(output.num_scheduled_tokens)
        names = list(output.num_scheduled_tokens)
        ended = self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=sampled,
                kv_connector_output=reported,
            ),
        )
        for outputs in ended.values():
            for each in outputs.outputs:
                self._note(each)

    def forward(self, output: SchedulerOutput, metadata: StepMetadata) -> None:
        """The forward pass of a step; there is no worker, so nothing happens."""

    def still_holds(self, block_id: int, name: str, group: int, place: int) -> bool:
        """Whether a block is nobody else's, and has what this request computed for this place of its table."""
        owned = self.scheduler.kv_cache_manager.block_pool.blocks[block_id].ref_cnt > 0
        return owned and (name, group, place) in self._content.get(block_id, ())

    def _note_written(self, name: str, scheduled: int) -> None:
        """Of the blocks that a step writes nobody has what was there before; of those of a prefix hit, one more has."""
        first = self.scheduler.requests[name].num_computed_tokens - scheduled
        for group, table in enumerate(self.tables(name)):
            for place, block in enumerate(table):
                content = self._content.setdefault(block.block_id, set())
                if block.ref_cnt == 1 and (place + 1) * BLOCK_TOKENS > first:
                    content.clear()
                content.add((name, group, place))

    def _note(self, output: EngineCoreOutput) -> None:
        if output.kv_transfer_params is not None:
            self.params[output.request_id] = output.kv_transfer_params
        if output.finish_reason is not None:
            self.finished[output.request_id] = str(output.finish_reason)

    def run(self, name: str, tokens: Sequence[int] | None, params: dict[str, Any] | None, **settings: Any) -> None:
        """A request that needs nothing from outside, from its arrival to its end. `settings`: as for `submit`."""
        self.submit(name, tokens, params, **settings)
        for _ in range(50):
            self.step()
            if name in self.finished:
                return
        raise AssertionError(f"{name} has not finished in 50 steps")

    def prefill(self, name: str, tokens: Sequence[int]) -> RemotePrefill:
        """Compute a prompt for somebody else; what the answer says about its KV."""
        self.run(name, tokens, REMOTE_DECODE)
        self.step()  # The grant goes to the worker with the next step.
        return parse_remote_prefill(self.params[name])

    def load(
        self,
        name: str,
        tokens: Sequence[int],
        params: dict[str, Any],
        *,
        max_tokens: int = 1,
        priority: int = 0,
        **given: Any,
    ) -> StartPull:
        """Submit a request whose KV lies elsewhere; the pull that it starts."""
        self.submit(name, tokens, params, max_tokens=max_tokens, priority=priority, **given)
        self.step()
        return self.pull_of(name)

    def loaded(self, name: str) -> None:
        """The worker reports success."""
        self.step(KVConnectorOutput(finished_recving={name}))

    @property
    def loading(self) -> set[str]:
        """Requests that the worker is told to load, and of which vLLM has heard nothing yet."""
        names: set[str] = set(self.scheduler.connector._scheduler._loads.loading)
        return names

    def pull_of(self, name: str) -> StartPull:
        (pull,) = [each for each in self.commands if isinstance(each, StartPull) and each.request_id == name]
        return pull

    def is_released_unread(self, name: str) -> bool:
        """Whether nothing is read for it. One of both was told the worker: what to read, or that P is to be told."""
        kinds = StartPull | ReleaseUnread
        (command,) = [each for each in self.commands if isinstance(each, kinds) and each.request_id == name]
        return isinstance(command, ReleaseUnread)

    def rejection_of(self, name: str) -> RejectPull:
        (rejection,) = [each for each in self.commands if isinstance(each, RejectPull) and each.request_id == name]
        return rejection

    def grant_of(self, name: str) -> LeaseGranted:
        (grant,) = [each for each in self.commands if isinstance(each, LeaseGranted) and each.lease.request_id == name]
        return grant

    def tables(self, name: str) -> tuple[Sequence[KVCacheBlock], ...]:
        """The block tables of a request whose blocks are not freed."""
        tables: tuple[Sequence[KVCacheBlock], ...] = self.scheduler.kv_cache_manager.get_blocks(name).blocks
        return tables


def tokens_of(length: int, *, seed: int = 0) -> list[int]:
    return [(31 * seed + 7 * position) % 500 for position in range(length)]


def params_of_builtin_p(tables: Sequence[Sequence[int]], num_tokens: int | None) -> dict[str, Any]:
    """As a built-in prefill engine answers: without what only ours says."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "p",
        "remote_request_id": "r",
        "remote_host": "localhost",
        "remote_port": 5600,
        "remote_block_ids": tables,
        "tp_size": 1,
        "remote_num_tokens": num_tokens,
    }


def run_streamed(prefill: HybridEngine, *inputs: Sequence[int]) -> Request:
    """A session of these inputs, whose end is known when the last of them has been computed."""
    session = streamed(inputs[0])
    prefill.scheduler.add_request(session)
    for tokens in inputs[1:]:
        while session.status is not RequestStatus.WAITING_FOR_STREAMING_REQ:
            prefill.step()
        prefill.scheduler.add_request(streamed(tokens))
    prefill.scheduler.add_request(streamed([0], is_last=True))
    while "a" not in prefill.finished:
        prefill.step()
    return session


def streamed(tokens: Sequence[int], *, is_last: bool = False, max_tokens: int = 1) -> Request:
    """The next input of a session; after the last, vLLM sends one more request, that counts for nothing."""
    return Request(
        "a",
        list(tokens),
        SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args={"kv_transfer_params": REMOTE_DECODE}),
        None,
        block_hasher=block_hasher(BLOCK_TOKENS),
        resumable=not is_last,
    )


def _cache_config(specs: Sequence[KVCacheSpec], blocks: int) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layers.{index}"], spec) for index, spec in enumerate(specs)]
    page = max(spec.page_size_bytes for spec in specs)
    tensors = [
        KVCacheTensor(size=page * blocks, layers=group.layer_names, layer_stride=page * blocks, block_stride=page)
        for group in groups
    ]
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=tensors, kv_cache_groups=groups)
