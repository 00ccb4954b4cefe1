"""vLLM's configuration of a simulated engine, and what of it a seed decides.

A configuration is made once in a process for each block size, because that looks at a model's files and at the
platform; engines get copies with their own numbers. The KV cache is described by hand: the cache groups, which are all
that the scheduler looks at.
"""

from __future__ import annotations

import copy
import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
)

from connector.config import ConnectorOptions
from connector.wire.signatures import ParamsKey, ParamsKeys, format_keys
from tests.simulation.faults import draw_shape, generator
from tests.simulation.model import LAYERS, SECOND_LAYERS, STATE_WORDS, WINDOW_TOKENS
from tests.simulation.shapes import BLOCK_TOKENS, EngineShape, Model, SecondGroup
from tests.unit.vllm_setup import draft_model, scheduling_config

CONNECTOR_MODULE = "tests.simulation.vllm.connector"
MAX_MODEL_TOKENS = 256
STATES_OF_A_REQUEST = 2
"""Blocks of the KV cache that there are for states, for each request that a step may have."""
DRAFTS_MAX = 6
KEPT_FOR_READ_BACK_SECONDS = 0.4
"""Short: pools are small, and what nobody reads back stands in everybody's way for so long."""


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """What a seed decides about its schedulers.

    Attributes:
        recomputes: policy for a failed load: compute the prompt here, or fail the request.
        overlaps: asynchronous scheduling: a step is scheduled while the one before it is computed.
        stops: some answers end by a token that the client has named. Where steps overlap one more is under way then,
            which writes beyond the end; an end by length is seen to come.
        collects_early: the connector is called when the forward pass is launched, as on an accelerator, instead of
            when it is over.
        splits_roles: P is a producer, unless it reads back while steps overlap, and D a consumer; otherwise both are
            both.
        prefill_blocks, decode_blocks: of the KV cache, in blocks of the usual size, without the one that vLLM keeps for
            itself.
        batch_tokens: most tokens of a step; longer prompts are computed in chunks.
        batch_requests: most requests of a step.
        read_slowdown: how much longer a READ takes than with scripted engines, so that steps pass meanwhile.
        reads_back: D keeps blocks for the next prompt of a conversation, which P reads back (`bidirectional_kv_xfer`).
        signs: engines sign the parameters that they give out; not where routers take something out of all of them.
        device_is_late: what is to be done with the blocks of a loaded request is done some time later, as on a GPU.
        prefill_caches_states, decode_caches_states: where the model has states, which of them are kept. With prefix
            caching, that at the end of each block of tokens that a step ends with, each in a block of its own
            (`mamba_cache_mode` align); without, the last one of a request (none). vLLM has no other modes.
        has_priorities: vLLM's queues are served by priority, and requests have different ones.
        match_fraction: of a block; prefixes are cached at the end of each such part (`prefix_match_unit`). Where states
            are cached, a hit may end within a block then, of which the request gets a copy. 1: whole blocks alone.
        drafts: tokens that a draft model proposes after each step (speculative decoding), for which vLLM keeps slots
            beyond the tokens of a request, but not while it loads; 0: none. Not where steps overlap, nor with states.
    """

    recomputes: bool
    overlaps: bool
    stops: bool
    collects_early: bool
    splits_roles: bool
    prefill_blocks: int
    decode_blocks: int
    batch_tokens: int
    batch_requests: int
    read_slowdown: int
    reads_back: bool
    device_is_late: bool
    signs: bool
    prefill_caches_states: bool
    decode_caches_states: bool
    has_priorities: bool
    match_fraction: int
    drafts: int


_scratch: list[tempfile.TemporaryDirectory[str]] = []
"""Of this process; it is removed when that ends."""


@functools.cache
def _params_keys_file() -> str:
    _scratch.append(tempfile.TemporaryDirectory(prefix="simulated-keys-"))
    path = Path(_scratch[0].name) / "params.keys"
    path.write_text(format_keys(ParamsKeys((ParamsKey("simulated", bytes(range(32))),))))
    return str(path)


def draw_knobs(seed: int) -> Knobs:
    """Policies alternate; so do the ways to schedule, at half the pace. One seed in 16 has priorities: of those whose
    engines compute what failed to load, and whose steps overlap."""
    chance = generator(seed, "scheduler")
    of_states = generator(seed, "states")
    return Knobs(
        recomputes=seed % 2 == 0,
        overlaps=seed // 2 % 2 == 1,
        stops=seed // 2 % 2 == 1 and generator(seed, "end by tokens").random() < 0.5,
        collects_early=chance.random() < 0.5,
        splits_roles=chance.random() < 0.5,
        prefill_blocks=chance.randint(20, 48),
        decode_blocks=chance.randint(16, 40),
        batch_tokens=chance.choice([32, 48, 64]),
        batch_requests=chance.choice([3, 5, 8]),
        read_slowdown=chance.choice([1, 10, 100]),
        reads_back=chance.random() < 0.5,
        device_is_late=chance.random() < 0.5,
        signs=generator(seed, "signatures").random() < 0.5 and draw_shape(seed).numbers_leases,
        prefill_caches_states=of_states.random() < 0.5,
        decode_caches_states=of_states.random() < 0.5,
        has_priorities=seed % 16 == 14,
        match_fraction=generator(seed, "prefix matches").choice([1, 2, 4]),
        drafts=_draw_drafts(seed),
    )


def _draw_drafts(seed: int) -> int:
    """In one of four seeds of those that may have them."""
    chance = generator(seed, "draft model")
    may_draft = seed // 2 % 2 == 0 and draw_shape(seed).model.second is not SecondGroup.STATE
    return chance.randint(1, DRAFTS_MAX) if chance.random() < 0.25 and may_draft else 0


def engine_configuration(
    *, knobs: Knobs, model: Model, shape: EngineShape, is_prefill: bool, engine_id: str, options: ConnectorOptions
) -> tuple[VllmConfig, KVCacheConfig]:
    """What vLLM needs to make the scheduler of one engine."""
    tokens = (knobs.prefill_blocks if is_prefill else knobs.decode_blocks) * BLOCK_TOKENS
    caches_states = knobs.prefill_caches_states if is_prefill else knobs.decode_caches_states
    has_states = model.second is SecondGroup.STATE
    if has_states:
        blocks = tokens // shape.block_tokens + STATES_OF_A_REQUEST * knobs.batch_requests + 1
    else:
        # A window needs at most as many blocks again.
        blocks = len(model.groups) * tokens // shape.block_tokens + 1
    config = copy.copy(scheduling_config(shape.block_tokens, MAX_MODEL_TOKENS))
    config.parallel_config = copy.copy(config.parallel_config)
    config.parallel_config.tensor_parallel_size = shape.tp_size
    config.scheduler_config = copy.copy(config.scheduler_config)
    config.scheduler_config.max_num_batched_tokens = knobs.batch_tokens
    config.scheduler_config.max_num_seqs = knobs.batch_requests
    config.scheduler_config.async_scheduling = knobs.overlaps
    config.scheduler_config.policy = "priority" if knobs.has_priorities else "fcfs"
    config.speculative_config = draft_model(config, knobs.drafts) if knobs.drafts else None
    config.cache_config = copy.copy(config.cache_config)
    config.cache_config.num_gpu_blocks = blocks
    if len(model.groups) > 1:  # vLLM refuses it otherwise
        config.cache_config.prefix_match_unit = shape.block_tokens // knobs.match_fraction
    if has_states:
        config.cache_config.mamba_cache_mode = "align" if caches_states else "none"
        config.cache_config.enable_prefix_caching = caches_states
    role = "kv_both"
    if knobs.splits_roles:
        # What is read back on a producer could be overwritten where steps overlap; the connector refuses that.
        reads = knobs.reads_back and knobs.overlaps
        role = ("kv_both" if reads else "kv_producer") if is_prefill else "kv_consumer"
    # The actors get these from the simulator; here is what the connector accepts together.
    handshake_seconds = min(options.handshake_timeout_seconds, options.request_timeout_seconds)
    options = msgspec.structs.replace(options, handshake_timeout_seconds=handshake_seconds)
    if knobs.reads_back:
        options = msgspec.structs.replace(
            options,
            bidirectional_kv_xfer=True,
            kv_recompute_threshold=shape.block_tokens // 2,
            decoder_kv_blocks_ttl=KEPT_FOR_READ_BACK_SECONDS,
        )
    if knobs.signs:
        options = msgspec.structs.replace(options, params_keys_file=_params_keys_file())
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="NixlConnector",
        kv_connector_module_path=CONNECTOR_MODULE,
        engine_id=engine_id,
        kv_role=role,
        kv_buffer_device="cpu",
        kv_load_failure_policy="recompute" if knobs.recomputes else "fail",
        kv_connector_extra_config=_extra_config(options),
    )
    return config, _cache_config(model, shape, blocks, caches_states=caches_states)


def _cache_config(model: Model, shape: EngineShape, blocks: int, *, caches_states: bool) -> KVCacheConfig:
    sizes = {"block_size": shape.block_tokens, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    names = [f"layers.{layer}" for layer in range(LAYERS)]
    groups = [KVCacheGroupSpec(names, FullAttentionSpec(**sizes))]
    if model.second is not SecondGroup.NONE:
        more = [f"layers.{layer}" for layer in range(LAYERS, LAYERS + SECOND_LAYERS)]
        spec: KVCacheSpec = SlidingWindowSpec(sliding_window=WINDOW_TOKENS, **sizes)
        if model.second is SecondGroup.STATE:
            spec = _state_spec(shape, is_cached=caches_states)
        groups.append(KVCacheGroupSpec(more, spec))
        names = names + more
    page = groups[0].kv_cache_spec.page_size_bytes
    size = page * blocks * len(names)
    tensor = KVCacheTensor(size=size, layers=names, layer_stride=page * blocks, block_stride=page)
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[tensor], kv_cache_groups=groups)


def _state_spec(shape: EngineShape, *, is_cached: bool) -> MambaSpec:
    """As vLLM makes it: a state for each block of tokens, or one for as many tokens as a request may have."""
    return MambaSpec(
        block_size=shape.block_tokens if is_cached else MAX_MODEL_TOKENS,
        shapes=((1,), (STATE_WORDS - 1,)),
        dtypes=(torch.float32, torch.float32),
        mamba_cache_mode="align" if is_cached else "none",
    )


def _extra_config(options: ConnectorOptions) -> dict[str, object]:
    """The options that differ from their defaults, as a user would write them."""
    given, defaults = msgspec.to_builtins(options), msgspec.to_builtins(ConnectorOptions())
    return {name: value for name, value in given.items() if value != defaults[name]}
