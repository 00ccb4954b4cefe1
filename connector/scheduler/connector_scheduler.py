"""The scheduler-process side: which requests pull, which are lent, and what the worker is told each step.

Everything here runs on the engine's scheduler thread between two forward passes, so it only looks things up and
appends commands. It makes no call to NIXL or ZMQ; the listener has a thread of its own (`listener_thread`).

Decode side. A request that names a prefill engine is a `Pull`:

    waiting    known, not scheduled yet; its lease is kept alive by heartbeats
    loading    its blocks are allocated and the worker reads into them; vLLM has parked it
    settled    loaded, failed, or nothing had to be read; from here on it is an ordinary request

kv_transfer_params comes from outside. What cannot be decoded still parks the request like any other, and the worker
fails it: that is the one path that ends in an error for the client under the policy `fail`, and in a recomputation
under `recompute`.

An engine may have several KV cache groups (full attention next to sliding windows or states); both sides list the
block tables of a request group by group, in the same order. Which blocks of a table travel is in `cache_groups`. Blocks
are paired by position: after a prefix-cache hit of h blocks D reads P's blocks h.. into its own.

Some models make D compute the last tokens of every prompt itself: a state (Mamba) cannot be rewound to before the token
that samples, and draft modules that look several tokens ahead must not see drafts. P then leaves these tokens out of
the prompt, because a state of one token more is another state.

Prefill side. When a request with `do_remote_decode` finishes, its blocks are kept, and the answer says where they are,
until when, and by which incarnation of this engine.

Quarantine. A block that a READ may still write into must not be given to anybody. The worker reports it in the same
step in which it reports the request as failed; taking a reference of our own on the block keeps it out of the free
list when vLLM frees the request, until the worker reports that the READ has ended.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from connector.config import ConnectorOptions
from connector.observe.log import get_logger
from connector.runtime.clock import NS_PER_SECOND, Clock
from connector.runtime.messages import (
    AbortPull,
    Command,
    GroupPull,
    LeaseComputing,
    LeaseGranted,
    LeaseWithdrawn,
    PeerAddress,
    RejectPull,
    StartPull,
    TrackLease,
)
from connector.scheduler.cache_groups import TransferGroup, transfer_groups
from connector.scheduler.host_saves import blocks_to_save
from connector.scheduler.listener_thread import ListenerThread
from connector.scheduler.metadata import HandshakeMetadata, StepMetadata, WorkerReport
from connector.staging import is_staged
from connector.wire.params import (
    ParamsError,
    ParamsKind,
    RemotePrefill,
    build_remote_prefill,
    classify,
    parse_remote_prefill,
)
from statemachine.failures import BadParams

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

_log = get_logger()


class PullPhase(enum.Enum):
    WAITING = "waiting"
    LOADING = "loading"
    SETTLED = "settled"


@dataclass
class Pull:
    """One request of the decode side. `remote` is None when kv_transfer_params was rejected, for `rejection`."""

    remote: RemotePrefill | None
    rejection: BadParams | None
    heard_ns: int
    phase: PullPhase = PullPhase.WAITING


class ConnectorScheduler:
    """See the module's docstring.

    Args:
        clock: of this process.
        incarnation: a fresh name for this life of the engine.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        options: ConnectorOptions,
        *,
        clock: Clock,
        incarnation: str,
    ) -> None:
        parallel = vllm_config.parallel_config
        self._options = options
        self._engine_id: str = vllm_config.kv_transfer_config.engine_id
        self._host: str = envs.VLLM_NIXL_SIDE_CHANNEL_HOST
        self._port: int = envs.VLLM_NIXL_SIDE_CHANNEL_PORT + parallel.data_parallel_index
        # With TP 1, the ranks that share each block's tokens count as transfer ranks.
        self._tp_size: int = max(parallel.tensor_parallel_size, parallel.decode_context_parallel_size)
        self._dcp_size: int = parallel.decode_context_parallel_size
        self._pp_size: int = parallel.pipeline_parallel_size
        self._groups: tuple[TransferGroup, ...] = transfer_groups(kv_cache_config, self._dcp_size)
        self._tokens_left_to_decode = _tokens_left_to_decode(vllm_config, kv_cache_config)
        self._is_staged = is_staged(vllm_config)
        self._drafts_max: int = vllm_config.num_speculative_tokens
        self._clock = clock
        self._incarnation = incarnation
        self._pulls: dict[str, Pull] = {}
        self._computing: set[str] = set()
        self._commands: list[Command] = []
        self._listener: ListenerThread | None = None
        self._block_pool: BlockPool | None = None

    # --- requests -----------------------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """Take note of a request that will read from a prefill engine, and keep its lease alive from now on."""
        pull = self._read_params(request)
        if pull is None:
            if _wants_remote_decode(request):
                self._leave_tokens_to_decode(request)
            return
        self._pulls[request.request_id] = pull
        if pull.remote is not None:
            self._commands.append(
                TrackLease(
                    request_id=request.request_id,
                    peer=_address(pull.remote),
                    remote_request_id=pull.remote.request_id,
                )
            )

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """How many prompt tokens the prefill engine holds beyond the ones that this engine has cached."""
        pull = self._pulls.get(request.request_id)
        if pull is None or pull.phase is not PullPhase.WAITING:
            return 0, False
        count = self._tokens_to_load(request) - num_computed_tokens
        return (count, True) if count > 0 else (0, False)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Blocks were allocated: start the pull, or tell the prefill engine that none is needed."""
        request_id = request.request_id
        pull = self._pulls.get(request_id)
        if pull is not None and pull.phase is PullPhase.WAITING:
            if num_external_tokens > 0:
                pull.phase = PullPhase.LOADING
                self._commands.append(self._load(request, pull, blocks))
            else:
                self._settle_without_loading(request_id, pull)
        elif _wants_remote_decode(request) and request_id not in self._computing:
            self._computing.add(request_id)
            self._commands.append(LeaseComputing(request_id=request_id))

    def request_finished(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request has ended. Returns whether its blocks are kept, and what the client's answer carries."""
        request_id = request.request_id
        pull = self._pulls.pop(request_id, None)
        if pull is not None:
            if pull.phase is PullPhase.WAITING:
                self._settle_without_loading(request_id, pull)
            elif pull.phase is PullPhase.LOADING:
                self._commands.append(AbortPull(request_id=request_id))
            return False, None
        if not _wants_remote_decode(request):
            return False, None
        completed = request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        if not completed or not any(block_ids):
            if request_id in self._computing:
                self._computing.discard(request_id)
                self._commands.append(LeaseWithdrawn(request_id=request_id))
            return False, None
        self._computing.discard(request_id)
        return True, self._grant(request, block_ids)

    # --- steps --------------------------------------------------------------------------------------------------

    def build_step_metadata(self, output: SchedulerOutput) -> StepMetadata:
        """Everything decided since the last step, and what this one has to save on the host."""
        commands, self._commands = self._commands, []
        if not self._is_staged:
            return StepMetadata(commands)
        return StepMetadata(
            commands, blocks_to_save(output, self._computing, self._groups, drafts_max=self._drafts_max)
        )

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """The worker's results, before vLLM frees anything because of them."""
        for request_id in output.finished_recving or ():
            pull = self._pulls.get(request_id)
            if pull is not None:
                pull.phase = PullPhase.SETTLED
        report = output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self._keep_quarantined(report)

    # --- side channel -------------------------------------------------------------------------------------------

    def serve_handshakes(self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]) -> None:
        """Start the listener with every rank's payload. Raises ThreadStartError, for instance for a port in use."""
        ranks: dict[tuple[int, int], HandshakeMetadata] = {}
        for rank, payload in metadata.items():
            if not isinstance(payload, HandshakeMetadata):
                raise TypeError(f"rank {rank} sent {type(payload).__name__}, expected HandshakeMetadata")
            ranks[rank] = payload
        if self._listener is None:
            self._listener = ListenerThread(self._host, self._port, ranks, self._incarnation)
            self._listener.start()

    def bind_block_pool(self, block_pool: BlockPool) -> None:
        self._block_pool = block_pool

    def shutdown(self) -> None:
        if self._listener is not None:
            self._listener.stop()
            self._listener = None

    # --- inside -------------------------------------------------------------------------------------------------

    def _read_params(self, request: Request) -> Pull | None:
        params_untrusted = request.kv_transfer_params
        try:
            if classify(params_untrusted) is not ParamsKind.REMOTE_PREFILL:
                return None
            remote = parse_remote_prefill(params_untrusted)
            self._check_fit(remote, request)
        except ParamsError as error:
            return Pull(remote=None, rejection=error.failure, heard_ns=self._clock.now_ns())
        return Pull(remote=remote, rejection=None, heard_ns=self._clock.now_ns())

    def _check_fit(self, remote: RemotePrefill, request: Request) -> None:
        """Raise ParamsError for what no READ could make sense of."""
        ours, theirs = len(self._groups), len(remote.block_ids)
        if ours != theirs:
            expected = f"block ids of {ours} KV cache group(s), as this engine has"
            raise ParamsError(BadParams(field="remote_block_ids", expected=expected, found=f"{theirs} group(s)"))
        tokens = self._tokens_to_load(request)
        has_states = any(group.is_state for group in self._groups)
        if has_states and tokens and not request.skip_reading_prefix_cache and remote.num_tokens not in (None, tokens):
            expected = f"{tokens}, the state after exactly so many tokens"
            raise ParamsError(BadParams(field="remote_num_tokens", expected=expected, found=str(remote.num_tokens)))

    def _tokens_to_load(self, request: Request) -> int:
        """Counted from the start of the request, prefix hits included."""
        tokens: int = max(0, request.num_prompt_tokens - self._tokens_left_to_decode)
        return tokens

    def _leave_tokens_to_decode(self, request: Request) -> None:
        """P: take the tokens that D computes itself out of the prompt. What is sampled after it is of no use then."""
        count = self._tokens_left_to_decode
        # D loads nothing for a request that must not read cached KV (prompt logprobs): it needs no particular state.
        if not count or request.num_prompt_tokens <= count or request.skip_reading_prefix_cache:
            return
        if request.prompt_token_ids is not None:
            request.prompt_token_ids = request.prompt_token_ids[:-count]
        if request.prompt_embeds is not None:
            request.prompt_embeds = request.prompt_embeds[:-count]
        del request._all_token_ids[-count:]
        request.num_prompt_tokens -= count
        request.max_tokens = 1

    def _load(self, request: Request, pull: Pull, blocks: KVCacheBlocks) -> StartPull | RejectPull:
        request_id, remote, tokens = request.request_id, pull.remote, self._tokens_to_load(request)
        tables: Sequence[Sequence[int]] = remote.block_ids if remote is not None else [()] * len(self._groups)
        groups = tuple(
            group.pull(blocks.blocks[group.group_id], table, tokens)
            for group, table in zip(self._groups, tables, strict=True)
        )
        if remote is None:
            assert pull.rejection is not None
            local = [block_id for group in groups for block_id in group.local_block_ids]
            return RejectPull(request_id=request_id, local_block_ids=local, failure=pull.rejection)
        return self._start_pull(request_id, pull, remote, groups, tokens, awaited=True)

    def _settle_without_loading(self, request_id: str, pull: Pull) -> None:
        """Nothing is read: the prefill engine may free its blocks now."""
        pull.phase = PullPhase.SETTLED
        if pull.remote is not None:
            self._commands.append(self._start_pull(request_id, pull, pull.remote, (), None, awaited=False))
        elif pull.rejection is not None:
            _log.warning("request %s: %s", request_id, pull.rejection)

    def _start_pull(
        self,
        request_id: str,
        pull: Pull,
        remote: RemotePrefill,
        groups: tuple[GroupPull, ...],
        num_tokens: int | None,
        *,
        awaited: bool,
    ) -> StartPull:
        return StartPull(
            request_id=request_id,
            peer=_address(remote),
            remote_request_id=remote.request_id,
            groups=groups,
            num_tokens=num_tokens,
            remote_num_tokens=remote.num_tokens,
            awaited=awaited,
            age_seconds=(self._clock.now_ns() - pull.heard_ns) / NS_PER_SECOND,
            lease_expires_at=remote.lease_expires_at,
            incarnation=remote.incarnation,
        )

    def _grant(self, request: Request, block_ids: tuple[list[int], ...]) -> dict[str, Any]:
        lease_seconds = self._options.kv_lease_duration
        tokens = request.num_computed_tokens
        lent = [group.lend(block_ids[group.group_id], tokens) for group in self._groups]
        self._commands.append(
            LeaseGranted(request_id=request.request_id, lease_seconds=lease_seconds, blocks=sum(map(len, lent)))
        )
        # The worker starts its timer when it hears of the grant, which is later: what D is told is the earlier end.
        return build_remote_prefill(
            engine_id=self._engine_id,
            request_id=request.request_id,
            host=self._host,
            port=self._port,
            block_ids=lent,
            tp_size=self._tp_size,
            dcp_size=self._dcp_size,
            pp_size=self._pp_size,
            num_tokens=tokens,
            lease_expires_at=self._clock.now_ns() / NS_PER_SECOND + lease_seconds,
            incarnation=self._incarnation,
        )

    def _keep_quarantined(self, report: WorkerReport) -> None:
        pool = self._block_pool
        if pool is None:
            return
        for block_ids in report.quarantined:
            _log.warning("%d blocks are quarantined until their READs have ended", len(block_ids))
            pool.touch([pool.blocks[block_id] for block_id in block_ids])
        for block_ids in report.lifted:
            _log.info("%d quarantined blocks are free again", len(block_ids))
            pool.free_blocks([pool.blocks[block_id] for block_id in block_ids])


def _tokens_left_to_decode(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """How many tokens at the end of a prompt D computes itself; the built-in connector counts in the same way."""
    replays = any(group.kv_cache_spec.prefix_replay_tokens > 0 for group in kv_cache_config.kv_cache_groups)
    for_state = 1 if kv_cache_config.has_mamba_layers or replays else 0
    count: int = max(for_state, vllm_config.num_prefill_lookahead_tokens - 1)
    return count


def _wants_remote_decode(request: Request) -> bool:
    try:
        return classify(request.kv_transfer_params) is ParamsKind.REMOTE_DECODE
    except ParamsError:
        return False


def _address(remote: RemotePrefill) -> PeerAddress:
    return PeerAddress(
        engine_id=remote.engine_id,
        host=remote.host,
        port=remote.port,
        tp_size=remote.tp_size,
        dcp_size=remote.dcp_size,
        pp_size=remote.pp_size,
    )
