"""The scheduler-process side: which requests pull, which are lent, and what the worker is told each step.

Everything here runs on the engine's scheduler thread between two forward passes, so it only looks things up and
appends commands. It makes no call to NIXL or ZMQ; the listener has a thread of its own (`listener_thread`).

Decode side. A request that names a prefill engine is in one of two collections, and then in none:

    _waiting   known, not scheduled yet; the worker keeps its lease alive
    _loading   its blocks are allocated and the worker reads into them; vLLM has parked it
    neither    loaded, failed, or nothing had to be read; from here on it is an ordinary request

A request whose load failed gives its blocks back and is scheduled again, under the policy `recompute`. vLLM 0.32 does
both at the head of the queue of those that hold blocks: if the pool has too few for it then, nobody behind it is
looked at any more, not even those that have all they need, and with nothing running the engine stands still for good.
So the first time that such a request asks, it is told to come again: vLLM then puts it at the head of the ordinary
queue, which is served after those that hold blocks (`_failed`).

Until it has blocks again, vLLM reserves as many as it needs: loads are begun only with what is left. Where the queue is
one of priorities, others stand before it, and if one of these is a load that does not fit beside what is reserved,
nobody behind it is looked at any more. So while such requests wait (`_to_compute`), a load that has got no blocks lets
them pass in the step after it, and nobody else (`_lets_pass`). One that does not fit beside what is kept from the pool
(`kept_blocks`) waits for nobody, and nobody for it. But vLLM reserves all the same, so no load would begin: prompts are
computed here until it has its blocks (`_failed_without_room`).

kv_transfer_params comes from outside. A request whose parameters cannot be decoded, or are not signed as those of this
fleet are (`connector.wire.signatures`), is parked like any other, and the worker fails it: only on that path the client
gets an error under the policy `fail`, and a recomputation under `recompute`. Until then nobody has heard of the engine
that they name.

Of a prompt that goes on from the one that was lent, as where a router has appended the token that P has sampled, what
was lent is loaded and the rest computed. Parameters may also come once more with such a prompt: where vLLM runs tools
itself (`/v1/responses`), each turn of a call has those of the call. By then the blocks are P's again, and most of the
prompt is in the prefix cache here. So it is computed here, and nothing is read for it.

An engine may have several KV cache groups (full attention next to sliding windows or states); both sides list the
block tables of a request group by group, in the same order. Which blocks of a table travel is in `cache_groups`. Blocks
are paired by position: after a prefix-cache hit of h blocks D reads P's blocks h.. into its own.

Some models make D compute the last tokens of every prompt itself: a state (Mamba) cannot be rewound to before the token
that samples, and draft modules that look several tokens ahead must not see drafts. P then leaves these tokens out of
the prompt, because a state of one token more is another state. It does so when the request comes, and only if it will
lend. vLLM appends to the prompt of a session whose input is streamed: nobody knows then which tokens will be the last,
so such a session is computed whole, and not lent.

Prefill side. When a request with `do_remote_decode` finishes, its blocks are kept, and the answer says where they are
and what the lease on them is called. A client may repeat a request's id; the number of the lease is not repeated, by
this process or by one that is started in its place. Once a worker says that it serves no more, nothing is lent: the
answer names no blocks, so the decode engine computes the prompt itself, and the listener refuses handshakes. An engine
that is to end lends what it has accepted, and no more (`draining`).

Read-back (`bidirectional_kv_xfer`). D keeps the blocks of a finished request as P does, for `decoder_kv_blocks_ttl`,
and its answer names them. The next prompt of the conversation comes to P with these parameters: P reads what it has not
cached of what both are known to begin with (`prefix_digest`), as D would, and computes the rest. All that this saves is
time, so whatever is wrong with such parameters, or cannot be read (a state of more tokens than the prompt has), P
computes itself. Only from engines that answer for their leases: of a built-in D nobody knows whether it still has the
blocks. Parameters without a number are of such a one, or came through a router that drops the keys that it does not
know: nothing is read, and the blocks are released as if it had been.

A lease of D ends in its time, whoever holds it. Otherwise two engines can wait for each other: P's queue holds D's
blocks, P has none free for its queue because they are lent to D, and D's queue, which holds those, waits for D's. For
the same reason D lends nothing while few of its blocks are free.

Quarantine. A block that a READ may still write into must not be given to anybody. The worker reports it in the same
step in which it reports the request as failed; taking a reference of our own on the block keeps it out of the free
list when vLLM frees the request, until the worker reports that the READ has ended.
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import vllm
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from connector import DISTRIBUTION
from connector.actor_death import act_on
from connector.clock import NS_PER_SECOND, Clock, to_ns
from connector.config import ConnectorOptions, in_force
from connector.families import Keeps
from connector.key_files import listener_access, own_workers_access, params_key_file, warn_of_insecurity
from connector.observe import catalogue
from connector.observe.log import CrashCount, EventLog, FailureLog, get_logger, is_said
from connector.observe.stats import EngineStats
from connector.own_address import is_all_interfaces, told_host
from connector.protocol import (
    LOCAL_PREFILLS_NAMED_MAX,
    AbortPull,
    Command,
    GroupPull,
    LeaseComputing,
    LeaseGranted,
    LeaseWithdrawn,
    LocalPrefill,
    LocalPrefillsSeen,
    PeerAddress,
    RejectPull,
    StartPull,
    TrackLease,
)
from connector.runtime.draining import Lent
from connector.scheduler.beside_offloading import tell_offloading_of_reads
from connector.scheduler.cache_groups import TransferGroup, transfer_groups
from connector.scheduler.draining import SchedulerDraining
from connector.scheduler.engine_figures import EngineFigures
from connector.scheduler.far_ends import FarEnds
from connector.scheduler.host_saves import blocks_to_save
from connector.scheduler.kept_blocks import KeptBlocks
from connector.scheduler.listener_thread import ListenerThread
from connector.scheduler.prefix_digest import Digests, numbers_media, prefix_digests, prompt_digests
from connector.scheduler.request_spans import request_spans
from connector.staging import is_staged
from connector.step_metadata import HandshakeMetadata, StepMetadata, WorkerReport
from connector.step_overlap import may_read
from connector.versions import shown_version
from connector.wire.bounded import ID_LENGTH_MAX, shorten
from connector.wire.control import is_request_id
from connector.wire.params import (
    ParamsError,
    ParamsKind,
    RemotePrefill,
    build_remote_prefill,
    classify,
    names_source,
    parse_remote_prefill,
    require_genuine,
)
from statemachine.draining import State
from statemachine.failures import BadParams, ParamsFailure, WrongPrompt
from statemachine.lease import LeaseName

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

LEFT_TO_REQUESTS = 0.25
"""Share of D's blocks that has to be free for it to keep those of a request that has finished."""

TAKEN_MAX = 16_384
"""Leases: more than are taken while a tool that vLLM runs answers."""

QUARANTINE_ASKED_NS = NS_PER_SECOND
"""How long after a step an idle engine makes another one to hear whether a quarantine has ended, if it is asked."""

_LOOPBACK = ("localhost", "127.0.0.1", "::1")

_log = get_logger()


@dataclass(frozen=True, slots=True)
class WaitingPull:
    """A request of the decode side that is not scheduled yet.

    Attributes:
        remote: what its kv_transfer_params say, or why nothing is done about them.
        tokens: to be loaded, counted from the start of the request, prefix hits included.
        at_least: fewer tokens than these are computed here.
        heard_ns: when this engine first heard of it.
        computed_because: why nothing is to be loaded, as local prefills are counted; None: something is, or there is
            nothing to load.
    """

    remote: RemotePrefill | ParamsFailure
    tokens: int
    at_least: int
    heard_ns: int
    computed_because: str | None = None


class _Loading(NamedTuple):
    """When this engine first heard of a request, and when its blocks were allocated."""

    heard_ns: int
    began_ns: int


class ConnectorScheduler:
    """See the module's docstring.

    Args:
        clock: of this process.
        life: a fresh random name for this run of the engine: 32 hex digits, as of a version 4 UUID.

    Raises OptionError for keys that cannot be used.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        options: ConnectorOptions,
        *,
        clock: Clock,
        life: str,
    ) -> None:
        parallel = vllm_config.parallel_config
        self._options = options
        # What parameters are signed with; None: they are not.
        self._key_file = params_key_file(options)
        self._listener_access = listener_access(options)
        self._workers_access = own_workers_access(options)
        self._engine_id: str = vllm_config.kv_transfer_config.engine_id
        self._host: str = envs.VLLM_NIXL_SIDE_CHANNEL_HOST
        self._told_host = told_host(self._host)
        self._port: int = envs.VLLM_NIXL_SIDE_CHANNEL_PORT + parallel.data_parallel_index
        # With TP 1, the ranks that share each block's tokens count as transfer ranks.
        self._tp_size: int = max(parallel.tensor_parallel_size, parallel.decode_context_parallel_size)
        self._dcp_size: int = parallel.decode_context_parallel_size
        self._pp_size: int = parallel.pipeline_parallel_size
        self._groups: tuple[TransferGroup, ...] = transfer_groups(kv_cache_config, self._dcp_size)
        self._tokens_left_to_decode = _tokens_left_to_decode(vllm_config, kv_cache_config)
        self._has_states = any(group.keeps.is_state for group in self._groups)
        self._keeps_all_tokens = not any(group.keeps.is_clipped for group in self._groups)
        self._is_staged = is_staged(vllm_config)
        self._drafts_max: int = vllm_config.num_speculative_tokens
        self._lends_back = options.bidirectional_kv_xfer and self._can_lend_back(vllm_config)
        self._may_read = may_read(vllm_config)
        self._numbers_media = numbers_media(vllm_config)
        self._clock = clock
        self._life = life
        # Decode side; see the module's docstring. No request id is in both.
        self._waiting: dict[str, WaitingPull] = {}
        # The one that began first is the first one.
        self._loading: dict[str, _Loading] = {}
        # Loads that failed and have not asked again since; see the module's docstring.
        self._failed: set[str] = set()
        # Those of them that have asked, and have no blocks yet.
        self._to_compute: set[str] = set()
        # In this step: loads that may begin and have no blocks yet; and whether all others let those above pass.
        self._offered: set[str] = set()
        self._lets_pass = False
        # The leases of which requests here have got what they wanted, or begun to, oldest first; at most TAKEN_MAX.
        self._taken: OrderedDict[tuple[str, LeaseName], None] = OrderedDict()
        # Prefill side. The first number is random, so that a later life of this engine repeats none: its peers may
        # still ask for leases of this one. 48 bits leave room up to the 63 of the wire.
        self._lease_numbers = itertools.count(1 + int(life[:12], 16))
        # When this engine first heard of the requests that will be lent and were not scheduled yet, by request id.
        self._heard_ns: dict[str, int] = {}
        # Requests of clients, whose answers this engine writes.
        self._answering: set[str] = set()
        # Leases of the requests that run and will be lent, by request id.
        self._computing: dict[str, LeaseName] = {}
        # Those of them whose prompt another engine takes over.
        self._prompts_to_lend: dict[str, Request] = {}
        # Where D computes more than the last token of every prompt, that one sees nothing that P gives back.
        self._far_ends = FarEnds(self._groups if not self._tokens_left_to_decode else ())
        self._kept = KeptBlocks()
        # Requests that were passed over because what is kept leaves no room for them; and those of them whose loads
        # have failed.
        self._without_room: set[str] = set()
        self._behind_lent_back: set[str] = set()
        self._failed_without_room: set[str] = set()
        # When the last step was scheduled.
        self._stepped_ns = clock.now_ns()
        # Why this engine lends nothing any more; None: it does. The listener's thread may set it too.
        self._stopped: str | None = None
        self._commands: list[Command] = []
        # Requests without parameters that concern us, since the last step: how many, and the first of them.
        self._local_prefills = 0
        self._local_prefills_named: list[LocalPrefill] = []
        self._listener: ListenerThread | None = None
        # After SIGTERM vLLM waits for so long, and then kills.
        shutdown_seconds = min(vllm_config.shutdown_timeout, options.drain_grace_seconds)
        self._draining = SchedulerDraining(clock, lambda: self._listener, grace_ns=to_ns(shutdown_seconds))
        # Prefills that came while it drained or after it had stopped, and are not lent.
        self._not_lent = 0
        # Those whose ids no engine takes.
        self._unnameable = 0
        # Prompts whose parameters name the blocks of an answer, and no lease.
        self._numberless = 0
        self._cache_manager: KVCacheManager | None = None
        self._block_pool: BlockPool | None = None
        self._log_failure = FailureLog(self._engine_id, 0)
        self._event_log = EventLog(self._engine_id, 0, clock=clock, log_failure=self._log_failure)
        _log.info(
            "%s %s (vLLM %s) as %s; kv_load_failure_policy=%s, %s; all other options have their defaults [%s]",
            DISTRIBUTION,
            shown_version(DISTRIBUTION),
            vllm.__version__,
            vllm_config.kv_transfer_config.kv_role,
            vllm_config.kv_transfer_config.kv_load_failure_policy,
            in_force(options),
            self._engine_id,
        )
        warn_of_insecurity(options, f"{self._host}:{self._port}")
        if is_all_interfaces(self._told_host):
            _log.warning(
                "VLLM_NIXL_SIDE_CHANNEL_HOST is %s, and this machine has no route by which vLLM would find the address "
                "to tell others: no other machine reaches this engine; set VLLM_HOST_IP, or that variable, to it",
                self._host,
            )
        self._figures = EngineFigures(clock)
        self._crashes = CrashCount()
        # Whether every request is meant to bring its KV along; with both roles, some are computed here.
        self._is_decode_only: bool = vllm_config.kv_transfer_config.kv_role == "kv_consumer"
        # Where vLLM traces.
        self._spans = request_spans(vllm_config)

    # --- requests -----------------------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """Take note of a request that will read from a prefill engine, and keep its lease alive from now on. Of one
        that will be lent, note when it came."""
        if not _wants_remote_decode(request):
            self._answering.add(request.request_id)
        lends = self._accepts_prefills and self._will_lend(request)
        if lends:
            self._heard_ns[request.request_id] = self._clock.now_ns()
        if _wants_remote_decode(request):
            self._note_not_lent(request.request_id)
            if lends:
                self._leave_tokens_to_decode(request)
            pull = self._pull_back(request)
        else:
            pull = self._pull(request)
            if pull is None:
                self._note_local_prefill(request)
        if pull is None:
            return
        self._waiting[request.request_id] = pull
        if self._spans is not None:
            self._spans.hear(request)
        if isinstance(pull.remote, RemotePrefill):
            self._commands.append(
                TrackLease(
                    request_id=request.request_id,
                    lease=_lease(pull.remote),
                    peer=_address(pull.remote),
                    age_seconds=self._age_seconds(pull.heard_ns),
                )
            )

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many prompt tokens the prefill engine holds beyond the ones that this engine has cached.

        None: ask again in the next step, after those that hold blocks or may pass; or because there is no room for it
        beside blocks that nobody knows when they come back (`kept_blocks`).
        """
        request_id = request.request_id
        if request_id in self._failed:
            self._failed.remove(request_id)
            self._to_compute.add(request_id)
            return None, False
        pull = self._waiting.get(request_id)
        loaded = num_computed_tokens if pull is None else pull.tokens
        if not self._kept.leave_room(request, loaded):
            if request_id in self._to_compute:
                self._to_compute.remove(request_id)  # nobody waits for it
                self._failed_without_room.add(request_id)
                if len(self._failed_without_room) == 1:
                    self._event_log.loads_nothing(f"request {request_id}")
            self._note_no_room(request)
            if self._kept.would_leave_room(request, loaded):
                self._behind_lent_back.add(request_id)
            return None, False
        if self._lets_pass and request_id not in self._to_compute:
            return None, False
        if pull is None:
            return 0, False
        count = pull.tokens - num_computed_tokens
        if self._failed_without_room and count > 0:
            # vLLM keeps all that is free, and more, for the one that has failed: no load would begin before it does,
            # and nobody behind one that cannot is looked at. Nor behind one whose parameters are bad.
            self._waiting[request_id] = replace(pull, computed_because=catalogue.NO_ROOM)
            return 0, False
        if count < 1 or self._tokens_to_compute(request, pull, count) < pull.at_least:
            return 0, False
        self._offered.add(request_id)
        return count, True

    def _tokens_to_compute(self, request: Request, pull: WaitingPull, count: int) -> int:
        """Of a prompt of which `count` tokens can be loaded, how many vLLM computes if none is.

        Where states are cached, these may be more: the last cached state may lie long before the end of the attention
        that is cached, which is what vLLM tells a connector. Or fewer: it tells of whole blocks alone.
        """
        manager = self._cache_manager
        if not (self._has_states and pull.at_least) or manager is None:
            return count
        cached: int = manager.get_computed_blocks(request)[1]
        return pull.tokens - cached

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Blocks were allocated: start the pull, or tell the engine that lends them that none is needed."""
        request_id = request.request_id
        self._to_compute.discard(request_id)
        self._offered.discard(request_id)
        self._found_room(request_id)
        pull = self._waiting.pop(request_id, None)
        if pull is not None:
            self._note_taken(pull.remote)
            if num_external_tokens > 0:
                self._loading[request_id] = _Loading(pull.heard_ns, self._clock.now_ns())
                self._commands.append(self._load(request, pull, blocks))
                return  # it comes again when it has been loaded
            if pull.computed_because is not None:
                self._figures.note_local_prefill(pull.computed_because)
            self._skip_load(request_id, pull)
            if self._spans is not None:
                self._spans.forget(request_id)
        if self._begins_lease(request):
            lease = self._computing[request_id] = self._new_lease(request_id)
            now_ns = self._clock.now_ns()
            age_seconds = (now_ns - self._heard_ns.pop(request_id, now_ns)) / NS_PER_SECOND
            self._commands.append(LeaseComputing(lease=lease, age_seconds=age_seconds))
            if _wants_remote_decode(request):
                self._far_ends.expect(request)
                self._prompts_to_lend[request_id] = request

    def request_finished(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request has ended. Returns whether its blocks are kept, and what the client's answer carries."""
        request_id = request.request_id
        self._failed.discard(request_id)
        self._to_compute.discard(request_id)
        self._found_room(request_id)
        self._answering.discard(request_id)
        self._heard_ns.pop(request_id, None)
        self._prompts_to_lend.pop(request_id, None)
        pull = self._waiting.pop(request_id, None)
        if pull is not None:
            self._note_taken(pull.remote)
            self._skip_load(request_id, pull)
            if self._spans is not None:
                self._spans.forget(request_id)
            return False, None
        if self._spans is not None:
            self._spans.end(request_id)
        if request_id in self._loading:
            loading = self._loading.pop(request_id)
            if request.status == RequestStatus.FINISHED_ERROR:
                # Under the policy `fail`, before the results come here.
                self._note_wait(loading.heard_ns, is_loaded=False)
            self._commands.append(AbortPull(request_id=request_id))
            return False, None
        if not self._will_lend(request):
            return False, None
        completed = request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        lease = self._computing.get(request_id)
        keeps = (
            any(block_ids)
            and _computed_tokens(request) > 0
            and self._is_settled(request)
            and self._lends_at_its_end(request, is_accepted=lease is not None)
        )
        if not completed or not keeps:
            self._computing.pop(request_id, None)
            if lease is not None:
                self._commands.append(LeaseWithdrawn(lease=lease))
            self._far_ends.let_go(request_id)
            return False, None
        answer = self._grant(request, lease or self._new_lease(request_id), block_ids)
        # After it counts as lent: the listener's thread, which counts both, would take this engine for drained.
        self._computing.pop(request_id, None)
        return True, answer

    # --- steps --------------------------------------------------------------------------------------------------

    def build_step_metadata(self, output: SchedulerOutput) -> StepMetadata:
        """Everything decided since the last step, and what this one has to save on the host."""
        if self._local_prefills:
            seen = LocalPrefillsSeen(count=self._local_prefills, named=tuple(self._local_prefills_named))
            self._commands.append(seen)
            self._local_prefills, self._local_prefills_named = 0, []
        commands, self._commands = self._commands, []
        self._stepped_ns = self._clock.now_ns()
        if self._failed_without_room and self._kept.is_none:
            # Their turn may be far off; what they need is kept for them as for all whose load has failed.
            self._to_compute |= self._failed_without_room
            self._failed_without_room.clear()
            self._event_log.loads_again()
        self._lets_pass = False
        if self._offered:
            self._lets_pass = len(self._to_compute) > 0
            self._offered.clear()
        if self._computing:
            self._far_ends.follow(output)
        if self._spans is not None:
            self._spans.step()
        saves: tuple[list[int], ...] = ()
        if self._is_staged:
            saves = blocks_to_save(output, self._computing, self._groups, drafts_max=self._drafts_max)
        return StepMetadata(commands, saves, bool(self._prompts_to_lend) and self._ends_prompt_to_lend(output))

    def _ends_prompt_to_lend(self, output: SchedulerOutput) -> bool:
        """Whether one of them has its first token after this step, which may be its last one."""
        scheduled = output.num_scheduled_tokens
        return any(
            request_id in scheduled and request.num_computed_tokens + scheduled[request_id] >= request.num_prompt_tokens
            for request_id, request in self._prompts_to_lend.items()
        )

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """The worker's results, before vLLM frees anything because of them."""
        failed = output.failed_recving or set()
        self._failed |= self._loading.keys() & failed
        for request_id in output.finished_recving or ():
            loading = self._loading.pop(request_id, None)
            if loading is not None:
                self._note_wait(loading.heard_ns, is_loaded=request_id not in failed)
        for request_id in output.finished_sending or ():
            self._far_ends.let_go(request_id)
        self._figures.end_leases(output.finished_sending or ())
        self._kept.end(output.finished_sending or ())
        report = output.kv_connector_worker_meta
        if self._spans is not None:
            pulls = report.pulls if isinstance(report, WorkerReport) else ()
            self._spans.report(pulls, output.finished_recving or ())
        if isinstance(report, WorkerReport):
            self._keep_quarantined(report)
            self._figures.take_over(report.gauges)
            if report.stopped is not None and self._stopped is None:
                self._stop_lending(report.stopped)

    def take_stats(self) -> EngineStats | None:
        """Figures since the last step; None: nothing has changed. Never raises: a figure is not worth a step."""
        try:
            listener, draining = self._listener, State.SERVING
            if self._draining.is_asked or (listener is not None and listener.draining.state is not State.SERVING):
                draining = self._draining.show()  # not asked while it serves: this is done with every step
            is_up = self._stopped is None
            return self._figures.take(
                len(self._waiting),
                len(self._computing),
                draining,
                is_up=is_up,
                quarantined_blocks=self._kept.quarantined,
                loading_since_ns=next(iter(self._loading.values())).began_ns if self._loading else None,
            )
        except Exception as error:
            self._crashes.note("figures of the engine", error)
            return None

    @property
    def keeps_stepping(self) -> bool:
        """Whether vLLM has to go on although it has nothing to do: there are commands that the worker has not got, an
        engine that is to end has not drained, or a quarantine may have ended.

        Commands wait where requests are queued and not served: scheduling is paused, by `/pause` or `/sleep`. Such a
        request does not count as work for vLLM, so an idle engine core would not step until it is resumed, and nobody
        would hold its lease meanwhile.

        vLLM 0.32 asks in `has_work`, that is: before it waits for input, for whether a pause or a shutdown is complete,
        and for whether there is anything to step. A step takes all commands with it, also one that schedules nothing,
        and none makes new ones by itself: so each of these is put off by a step, and the engine core waits again after
        it. It is a step without a forward pass, which touches no KV cache: vLLM lets no engine sleep that still loads.
        Ranks of data parallelism take no part in it: whether they go on together is decided by unfinished requests.

        That a quarantine has ended is heard of with a step, and while there is one vLLM resets no prefix cache, without
        which no pause and no sleep is complete. An idle engine is asked here when it is told to do such a thing, and
        makes one step before it does.
        """
        if self._kept.quarantined and self._clock.now_ns() - self._stepped_ns >= QUARANTINE_ASKED_NS:
            return True
        return bool(self._commands) or self._draining.keeps_stepping

    # --- side channel -------------------------------------------------------------------------------------------

    def serve_handshakes(self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]) -> None:
        """Start the listener with every rank's payload. Raises ThreadStartError, for instance for a port in use."""
        ranks: dict[tuple[int, int], HandshakeMetadata] = {}
        for rank, payload in metadata.items():
            if not isinstance(payload, HandshakeMetadata):
                raise TypeError(f"rank {rank} sent {type(payload).__name__}, expected HandshakeMetadata")
            ranks[rank] = payload
        if self._listener is None:
            look_again = self._key_file.look_again if self._key_file is not None else None
            self._listener = ListenerThread(
                self._host,
                self._port,
                ranks,
                self._life,
                self._note_listener_death,
                look_again=look_again,
                access=self._listener_access,
                workers_access=self._workers_access,
                clock=self._clock,
                grace_ns=to_ns(self._options.drain_grace_seconds),
                lease_ns=to_ns(self._options.kv_lease_duration),
                count=self._count_lent,
            )
            self._listener.start()
            self._draining.catch_sigterm()
            local_only = "; only engines on this machine reach it" if self._host in _LOOPBACK else ""
            _log.info("handshakes are answered at %s:%d%s [%s]", self._host, self._port, local_only, self._engine_id)

    def bind_cache_manager(self, manager: KVCacheManager) -> None:
        self._cache_manager = manager
        self._block_pool = manager.block_pool
        self._far_ends.bind(manager.block_pool)
        self._kept.bind(manager)
        tell_offloading_of_reads()

    def shutdown(self) -> None:
        self._draining.forget_sigterm()
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.stop()

    # --- inside -------------------------------------------------------------------------------------------------

    def _can_lend_back(self, vllm_config: VllmConfig) -> bool:
        """Whether the blocks of a request that has decoded are known to be those of so many tokens when it finishes.

        Where steps overlap, one more may be under way then, which writes beyond them: a state is lost with it. Drafts
        that were refused do the same, and a window has moved with them. What is staged on the host is copied there
        after a prefill only.
        """
        overlaps, speculates = vllm_config.scheduler_config.async_scheduling, self._drafts_max > 0
        if self._is_staged:
            why = "its KV is staged in memory of the host (kv_buffer_device cpu)"
        elif self._has_states and (overlaps or speculates):
            why = "its model has states, and steps overlap (async scheduling) or speculate"
        elif speculates and not self._keeps_everything:
            why = "its model has windows, and steps speculate"
        else:
            return True
        _log.warning("bidirectional_kv_xfer: this engine lends no blocks of what it has decoded, because %s", why)
        return False

    @property
    def _keeps_everything(self) -> bool:
        """No group has a state, or a table that is clipped."""
        return all(group.keeps == Keeps() for group in self._groups)

    def _stop_lending(self, reason: str) -> None:
        """A worker cannot serve its KV any more. What is lent already is given back by the workers, as it ends."""
        self._stopped = reason
        _log.critical(
            "a worker serves no KV any more (%s): prefills are answered without kv_transfer_params from now on, so "
            "decode engines compute the prompts themselves; restart this engine",
            reason,
        )
        if self._listener is not None:
            self._listener.stop_serving(reason)

    def _note_local_prefill(self, request: Request) -> None:
        """The prompt is computed here, and nobody asks for it: perhaps a router has lost the parameters."""
        if request.kv_transfer_params:
            self._figures.note_local_prefill(catalogue.UNUSABLE)
        elif self._is_decode_only:
            self._figures.note_local_prefill(catalogue.ABSENT)
        self._local_prefills += 1
        if len(self._local_prefills_named) < LOCAL_PREFILLS_NAMED_MAX:
            self._local_prefills_named.append(
                LocalPrefill(
                    request_id=request.request_id,
                    has_params=bool(request.kv_transfer_params),
                    prompt_tokens=request.num_prompt_tokens,
                )
            )

    def _note_listener_death(self, reason: str) -> None:
        """In the listener's thread. Nobody reaches this engine any more, so it lends nothing."""
        if self._listener is not None:  # otherwise it is shutting down
            self._stopped = self._stopped or reason
            act_on(self._options, reason)

    def _pull(self, request: Request) -> WaitingPull | None:
        """D: of a request whose KV is on P, as its parameters say; None: it is not to be read from anywhere."""
        params_untrusted = request.kv_transfer_params
        tokens, now_ns = self._tokens_to_load(request), self._clock.now_ns()
        because = None
        try:
            if classify(params_untrusted) is not ParamsKind.REMOTE_PREFILL:
                return None
            if not self._may_read:
                # A request that belongs to D. What is read for it could be overwritten: see `step_overlap`.
                expected = "false on an engine of kv_role kv_producer with async scheduling"
                raise ParamsError(BadParams(field="do_remote_prefill", expected=expected, found="true"))
            remote = self._genuine(parse_remote_prefill(params_untrusted), lends_back=False)
            if remote.num_tokens is None:
                # What an engine with these options computes of it. Clipped tables are counted from their end.
                computed = max(0, request.num_prompt_tokens - self._tokens_left_to_decode)
                remote = msgspec.structs.replace(remote, num_tokens=computed)
            lent = self._lent_beginning(remote, request)
            if lent is not None and _lease_key(remote) in self._taken:
                tokens, because = 0, catalogue.CONTINUED
            else:
                tokens = tokens if lent is None else lent
                self._check_fit(remote, request, tokens)
                if lent is None:
                    self._check_prompt(remote, request)
                if self._loads(request):
                    tokens = self._tokens_to_go_on_from(remote, request, tokens)
                    because = None if tokens else catalogue.WINDOW
        except ParamsError as error:
            return WaitingPull(error.failure, tokens=tokens, at_least=0, heard_ns=now_ns)
        at_least = self._options.decode_recompute_threshold
        return WaitingPull(remote, tokens=tokens, at_least=at_least, heard_ns=now_ns, computed_because=because)

    def _note_wait(self, heard_ns: int, *, is_loaded: bool) -> None:
        self._figures.note_wait((self._clock.now_ns() - heard_ns) / NS_PER_SECOND, is_loaded=is_loaded)

    def _pull_back(self, request: Request) -> WaitingPull | None:
        """P: of a prompt whose beginning a D has; None: there is none, or what it has is of no use."""
        params_untrusted = request.kv_transfer_params
        if not self._options.bidirectional_kv_xfer or not names_source(params_untrusted):
            return None
        heard_ns = self._clock.now_ns()
        try:
            remote = self._genuine(parse_remote_prefill(params_untrusted), lends_back=True)
        except ParamsError as error:
            age_seconds = self._age_seconds(heard_ns)
            subject = f"request {request.request_id}, which is computed whole, known for {age_seconds:.1f} s"
            self._log_failure(subject, error.failure)
            return None
        groups = len(self._groups)
        if len(remote.block_ids) != groups or len(remote.first_tokens) not in (0, groups):
            _log.debug("request %s is computed whole: its parameters are of another kind of engine", request.request_id)
            return None
        if remote.lease_number is None:
            self._note_numberless(request.request_id)
        tokens, at_least = self._tokens_to_read_back(request, remote), self._options.kv_recompute_threshold
        return WaitingPull(remote, tokens=tokens, at_least=at_least, heard_ns=heard_ns)

    def _note_numberless(self, request_id: str) -> None:
        """P: parameters of an answer that say neither what is lent nor under which number: nothing is read."""
        self._numberless += 1
        if is_said(self._numberless):
            _log.warning(
                "prompt %s is computed whole, and the blocks of the answer that it goes on from are given back unread: "
                "their kv_transfer_params have no lease_number; what to do: have the router forward all keys, and not "
                "only those that it knows, as llm-d's sidecar does; where D has the built-in connector, leave "
                "bidirectional_kv_xfer off (number %d)",
                request_id,
                self._numberless,
            )

    def _tokens_to_read_back(self, request: Request, remote: RemotePrefill) -> int:
        """Of those that a D has, as many as this prompt is known to begin with (`prefix_digest`). Of a prompt that is
        loaded whole vLLM computes the last token again, which a state does not allow."""
        if remote.lease_number is None:
            return 0
        theirs, ours = remote.num_tokens or 0, request.num_prompt_tokens
        said = {tokens: digest for tokens, digest in remote.prefix_digests if tokens <= min(theirs, ours)}
        equal = [tokens for tokens, digest in self._prefix_digests(request, said) if said[tokens] == digest]
        tokens = max(equal, default=0)
        if self._keeps_everything:
            return tokens
        # A clipped table or a state is that of all of their tokens, and has to begin where ours needs it.
        is_whole = ours > tokens == theirs and self._tokens_to_go_on_from(remote, request, tokens) == tokens
        return tokens if is_whole else 0

    def _prefix_digests(self, request: Request, lengths: Collection[int]) -> Digests:
        return prefix_digests(request, lengths, numbers_media=self._numbers_media)

    def _genuine(self, remote: RemotePrefill, *, lends_back: bool) -> RemotePrefill:
        """Raise ParamsError for parameters that no engine of this fleet has given out. See `require_genuine`."""
        if self._key_file is None:
            return remote
        allows_unsigned = self._options.allow_insecure_peers
        return require_genuine(remote, self._key_file.keys, lends_back=lends_back, allows_unsigned=allows_unsigned)

    def _check_fit(self, remote: RemotePrefill, request: Request, tokens: int) -> None:
        """Raise ParamsError for parameters that no READ of so many tokens of this request can satisfy."""
        ours, theirs = len(self._groups), len(remote.block_ids)
        if ours != theirs:
            expected = f"block ids of {ours} KV cache group(s), as this engine has"
            raise ParamsError(BadParams(field="remote_block_ids", expected=expected, found=f"{theirs} group(s)"))
        if remote.first_tokens and len(remote.first_tokens) != ours:
            expected = f"one for each of {ours} KV cache group(s)"
            raise ParamsError(BadParams(field="first_tokens", expected=expected, found=str(len(remote.first_tokens))))
        if not self._loads(request):
            return
        found = remote.num_tokens or 0
        if self._has_states and found != tokens:
            expected = f"{tokens}, the state after exactly so many tokens"
            raise ParamsError(BadParams(field="remote_num_tokens", expected=expected, found=str(found)))
        if found < tokens:
            # A prefix hit covers the front: if anything is loaded, the last of these tokens is.
            expected = f"at least {tokens}, the tokens of the prompt that this engine loads"
            raise ParamsError(BadParams(field="remote_num_tokens", expected=expected, found=str(found)))

    def _check_prompt(self, remote: RemotePrefill, request: Request) -> None:
        """Raise ParamsError for parameters that were given out for another prompt (`prefix_digest`). For which, a
        built-in P does not say; it numbers no lease."""
        if remote.lease_number is None or not self._loads(request):
            return
        prompt = request.num_prompt_tokens
        # A digest of fewer tokens than are loaded shows nothing of the rest.
        said = {length: digest for length, digest in remote.prefix_digests if length <= prompt}
        ours = prompt_digests(request, [length for length in said if length >= self._tokens_to_load(request)])
        # Of embeddings nobody has a digest.
        is_shown = any(said[length] == digest for length, digest in ours)
        if not is_shown and (remote.prefix_digests or request.prompt_embeds is None):
            raise ParamsError(WrongPrompt(lent_tokens=remote.num_tokens or 0, tokens=prompt))

    def _loads(self, request: Request) -> bool:
        """D: whether anything of its prompt is loaded. A request that must not read cached KV (prompt logprobs) loads
        nothing; nor does one that vLLM makes up, with a prompt of its own, to have the blocks of one released that it
        has refused."""
        is_made_up: bool = request.abort_immediately
        return self._tokens_to_load(request) > 0 and not request.skip_reading_prefix_cache and not is_made_up

    def _tokens_to_load(self, request: Request) -> int:
        """Counted from the start of the request, prefix hits included."""
        tokens: int = max(0, request.num_prompt_tokens - self._tokens_left_to_decode)
        return tokens

    def _tokens_to_go_on_from(self, remote: RemotePrefill, request: Request, tokens: int) -> int:
        """How many to load, so many or one fewer. 0: the lender lends too little for either.

        Of a prompt that is loaded whole vLLM has the last token computed again, with block tables that are clipped for
        a token after it: where a block ends with what only the last one sees, that block is missing. If a token fewer
        is loaded, it is there, and is read if P lends its own.
        """
        if self._keeps_all_tokens:
            return tokens
        firsts = self._first_tokens(remote)
        # A state is that of all tokens.
        fewest = tokens if self._has_states else max(1, tokens - 1)
        for loaded in range(tokens, fewest - 1, -1):
            computed = min(loaded, request.num_prompt_tokens - 1)
            if all(
                max(first, group.first_in_table(loaded, group.block_size)) <= group.first_needed(loaded, computed)
                for group, first in zip(self._groups, firsts, strict=True)
            ):
                return loaded
        return 0

    def _first_tokens(self, remote: RemotePrefill) -> Sequence[int]:
        """Which token the lender's blocks of each group begin with."""
        if remote.first_tokens:
            return remote.first_tokens
        # A built-in one does not say, but clips its tables as ours are.
        theirs = remote.num_tokens or 0
        pairs = zip(self._groups, remote.block_ids, strict=True)
        ratio = max((group.remote_blocks_per_block(table, theirs) for group, table in pairs), default=1)
        return [group.first_in_table(theirs, max(1, group.block_size // ratio)) for group in self._groups]

    def _lent_beginning(self, remote: RemotePrefill, request: Request) -> int | None:
        """D: how many tokens are lent, where there are fewer than it loads and its prompt is known to begin with them;
        otherwise None."""
        tokens, lent = self._tokens_to_load(request), remote.num_tokens or 0
        said = [digest for length, digest in remote.prefix_digests if length == lent]
        if remote.lease_number is None or lent >= tokens or not said:
            return None
        return lent if prompt_digests(request, [lent]) == [(lent, said[0])] else None

    def _note_taken(self, remote: RemotePrefill | ParamsFailure) -> None:
        """D: a request has got what it wants of these blocks, or begins to."""
        if isinstance(remote, RemotePrefill):
            self._taken[_lease_key(remote)] = None
            if len(self._taken) > TAKEN_MAX:
                self._taken.popitem(last=False)

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
        if request.prompt_is_token_ids is not None:  # of a prompt that has both
            request.prompt_is_token_ids = request.prompt_is_token_ids[:-count]
        del request._all_token_ids[-count:]
        request.num_prompt_tokens -= count
        request.max_tokens = 1

    def _load(self, request: Request, pull: WaitingPull, blocks: KVCacheBlocks) -> StartPull | RejectPull:
        request_id, remote, tokens = request.request_id, pull.remote, pull.tokens
        tables: Sequence[Sequence[int]] = (
            remote.block_ids if isinstance(remote, RemotePrefill) else [()] * len(self._groups)
        )
        groups = tuple(
            group.pull(blocks.blocks[group.group_id], table, tokens)
            for group, table in zip(self._groups, tables, strict=True)
        )
        if not isinstance(remote, RemotePrefill):
            local = [block_id for group in groups for block_id in group.local_block_ids]
            age_seconds = self._age_seconds(pull.heard_ns)
            return RejectPull(request_id=request_id, local_block_ids=local, failure=remote, age_seconds=age_seconds)
        return self._start_pull(request_id, pull, remote, groups, tokens, awaited=True)

    def _skip_load(self, request_id: str, pull: WaitingPull) -> None:
        """Nothing is read: the prefill engine may free its blocks now."""
        if isinstance(pull.remote, RemotePrefill):
            self._commands.append(self._start_pull(request_id, pull, pull.remote, (), None, awaited=False))
        else:
            age_seconds = self._age_seconds(pull.heard_ns)
            subject = f"request {request_id}, for which nothing is read, known for {age_seconds:.1f} s"
            self._log_failure(subject, pull.remote)

    def _start_pull(
        self,
        request_id: str,
        pull: WaitingPull,
        remote: RemotePrefill,
        groups: tuple[GroupPull, ...],
        num_tokens: int | None,
        *,
        awaited: bool,
    ) -> StartPull:
        return StartPull(
            request_id=request_id,
            lease=_lease(remote),
            peer=_address(remote),
            groups=groups,
            num_tokens=num_tokens,
            remote_num_tokens=remote.num_tokens,
            awaited=awaited,
            age_seconds=self._age_seconds(pull.heard_ns),
        )

    def _age_seconds(self, heard_ns: int) -> float:
        return (self._clock.now_ns() - heard_ns) / NS_PER_SECOND

    def _begins_lease(self, request: Request) -> bool:
        """Whether what is computed of it from now on is to be lent."""
        if self._stopped is not None or request.request_id in self._computing or not self._will_lend(request):
            return False
        return self._draining.accepts or request.request_id in self._heard_ns

    def _lends_at_its_end(self, request: Request, *, is_accepted: bool) -> bool:
        """Whether the blocks of a request that has finished are lent. `is_accepted`: it was announced to be."""
        if self._stopped is not None:
            return False
        if self._draining.accepts:
            return _wants_remote_decode(request) or self._may_lend_back()
        return is_accepted and _wants_remote_decode(request) and self._draining.grants

    @property
    def _accepts_prefills(self) -> bool:
        """Whether the blocks of prefills that come now will be lent."""
        return self._stopped is None and self._draining.accepts

    def _note_not_lent(self, request_id: str) -> None:
        """A prefill has come whose blocks will not be lent, if this is one."""
        if not self._accepts_prefills:
            self._not_lent += 1
            self._figures.note_not_lent(
                catalogue.DRAINING_REASON if self._stopped is None else catalogue.STOPPED_REASON
            )
        elif not is_request_id(request_id):
            self._figures.note_not_lent(catalogue.REQUEST_ID_REASON)
            self._unnameable += 1
            if is_said(self._unnameable):
                _log.warning(
                    "prefill %s is answered without kv_transfer_params, so that D computes the prompt: its id has more "
                    "than %d characters or control characters; what to do: have clients send ids of printable ASCII "
                    "in X-Request-Id (number %d)",
                    shorten(request_id),
                    ID_LENGTH_MAX,
                    self._unnameable,
                )

    def _count_lent(self) -> Lent:
        """In the listener's thread."""
        accepted = len(self._heard_ns) + len(self._computing)
        return Lent(lent=accepted + self._figures.leases_held, not_lent=self._not_lent, answering=len(self._answering))

    def _will_lend(self, request: Request) -> bool:
        """Whether its blocks are kept for another engine when it has finished."""
        if _wants_remote_decode(request):
            # Streamed input: which tokens are left to D is known only at its end. Where none are, it is as any other.
            is_wanted = not (request.resumable and self._tokens_left_to_decode)
        else:
            is_wanted = self._lends_back and bool(request.kv_transfer_params)
        return is_wanted and is_request_id(request.request_id)

    def _may_lend_back(self) -> bool:
        if self._behind_lent_back:
            return False  # they would never find room, where answers end as fast as leases do
        pool = self._block_pool
        return pool is None or pool.get_num_free_blocks() >= LEFT_TO_REQUESTS * pool.num_gpu_blocks

    def _is_settled(self, request: Request) -> bool:
        """Whether its states are those of what would be lent. A step that is still under way moves a state on; so do
        drafts that were taken for right behind the last token of the answer."""
        if not self._has_states:
            return True
        is_under_way: bool = request.num_in_flight_tokens > 0
        return not is_under_way and request.num_computed_tokens <= request.num_tokens

    def _new_lease(self, request_id: str) -> LeaseName:
        return LeaseName(request_id, next(self._lease_numbers))

    def _grant(self, request: Request, lease: LeaseName, block_ids: tuple[list[int], ...]) -> dict[str, Any]:
        expires_seconds: float | None = None
        is_for_decode = _wants_remote_decode(request)
        # More than it has tokens where drafts behind the last one were taken for right.
        computed = _computed_tokens(request)
        tokens = min(group.unbroken(block_ids[group.group_id], computed) for group in self._groups)
        if is_for_decode:
            lease_seconds = self._options.kv_lease_duration
            tokens = min(tokens, request.num_tokens)
        else:
            lease_seconds = self._options.decoder_kv_blocks_ttl
            expires_seconds = time.perf_counter() + lease_seconds
            tokens = min(tokens, request.num_tokens - 1)
        lengths = {min(tokens, request.num_prompt_tokens), tokens} - {0}
        digests = prompt_digests(request, lengths) if is_for_decode else self._prefix_digests(request, lengths)
        far_ends = self._far_ends.lend(request.request_id, tokens)
        lent = [group.lend(block_ids[group.group_id], tokens, far_ends.get(group.group_id)) for group in self._groups]
        pairs = zip(self._groups, lent, strict=True)
        firsts = () if self._keeps_all_tokens else tuple(group.first_token(table, tokens) for group, table in pairs)
        blocks = sum(map(len, lent))
        self._commands.append(
            LeaseGranted(
                lease=lease,
                lease_seconds=lease_seconds,
                blocks=blocks,
                is_renewable=is_for_decode,
                block_ids=tuple(lent) if self._options.verify != "off" else None,
            )
        )
        self._figures.grant(request.request_id, blocks, tokens)
        if not is_for_decode:
            self._kept.lend_back(request.request_id, (*block_ids, *lent))
        remote = RemotePrefill(
            engine_id=self._engine_id,
            request_id=lease.request_id,
            host=self._told_host,
            port=self._port,
            block_ids=tuple(map(tuple, lent)),
            tp_size=self._tp_size,
            dcp_size=self._dcp_size,
            pp_size=self._pp_size,
            num_tokens=tokens,
            lease_number=lease.number,
            prefix_digests=tuple(digests),
            first_tokens=firsts,
        )
        keys = self._key_file.keys if self._key_file is not None else None
        return build_remote_prefill(remote, expires_seconds=expires_seconds, keys=keys)

    def _keep_quarantined(self, report: WorkerReport) -> None:
        if report.quarantined:
            self._event_log.kept_aside(_distinct(report.quarantined))
        for block_ids in report.quarantined:
            self._kept.quarantine(block_ids)
        if report.lifted:
            self._event_log.given_back(_distinct(report.lifted))
        for block_ids in report.lifted:
            self._kept.lift(block_ids)

    def _note_no_room(self, request: Request) -> None:
        """Once for each request."""
        if request.request_id in self._without_room:
            return
        self._without_room.add(request.request_id)
        self._event_log.finds_no_room(
            f"request {request.request_id}", request.num_tokens, self._kept.quarantined, self._kept.lent_back
        )

    def _found_room(self, request_id: str) -> None:
        """It has blocks now, or has ended."""
        self._without_room.discard(request_id)
        self._behind_lent_back.discard(request_id)
        if request_id in self._failed_without_room:
            self._failed_without_room.remove(request_id)
            if not self._failed_without_room:
                self._event_log.loads_again()


def _distinct(reported: Sequence[Sequence[int]]) -> int:
    """Blocks: each rank reports its own part of the same."""
    return len(set(itertools.chain.from_iterable(reported)))


def _computed_tokens(request: Request) -> int:
    """Of a request that has ended: not those of a step that is still under way, for D may read before they are there.
    vLLM has taken those off a session already, whose count may be less than none then."""
    computed: int = request.num_computed_tokens - request.num_in_flight_tokens
    return computed


def _tokens_left_to_decode(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """How many tokens at the end of a prompt D computes itself; the built-in connector uses the same number."""
    replays = any(group.kv_cache_spec.prefix_replay_tokens > 0 for group in kv_cache_config.kv_cache_groups)
    for_state = 1 if kv_cache_config.has_mamba_layers or replays else 0
    count: int = max(for_state, vllm_config.num_prefill_lookahead_tokens - 1)
    return count


def _wants_remote_decode(request: Request) -> bool:
    try:
        return classify(request.kv_transfer_params) is ParamsKind.REMOTE_DECODE
    except ParamsError:
        return False


def _lease(remote: RemotePrefill) -> LeaseName:
    return LeaseName(remote.request_id, remote.lease_number or 0)


def _lease_key(remote: RemotePrefill) -> tuple[str, LeaseName]:
    """Also of other engines than one."""
    return remote.engine_id, _lease(remote)


def _address(remote: RemotePrefill) -> PeerAddress:
    return PeerAddress(
        engine_id=remote.engine_id,
        host=remote.host,
        port=remote.port,
        tp_size=remote.tp_size,
        dcp_size=remote.dcp_size,
        pp_size=remote.pp_size,
    )
