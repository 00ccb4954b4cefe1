"""The scheduler-process side: what vLLM's scheduler asks of the connector, and what the worker is told each step.

Everything here runs on the engine's scheduler thread between two forward passes, so it only looks things up and
appends commands. It makes no call to NIXL or ZMQ; the listener has a thread of its own (`listener_thread`).

    pulls        what of a prompt is read from another engine
    lends        whose blocks are kept for another engine

What becomes of a request that loads KV, and which requests may have blocks now, is decided in `statemachine/loads.py`,
whose effects are carried out here. On P a prompt that is read back goes the same way, before it is computed and lent.

Quarantine. A block that a READ may still write into must not be given to anybody. The worker reports it in the same
step in which it reports the request as failed; taking a reference of our own on the block keeps it out of the free
list when vLLM frees the request, until the worker reports that the READ has ended.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, assert_never

from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from connector.actor_death import act_on
from connector.addresses import is_loopback, join_address
from connector.clock import NS_PER_SECOND, Clock, to_ns
from connector.config import ConnectorOptions
from connector.key_files import listener_access, own_workers_access, params_key_file
from connector.observe import catalogue
from connector.observe.event_log import EventLog, FailureLog
from connector.observe.log import CrashCount, get_logger
from connector.observe.stats import EngineStats
from connector.own_address import told_host
from connector.ports.side_channel import SideChannelError
from connector.protocol import (
    LOCAL_PREFILLS_NAMED_MAX,
    AbortPull,
    Command,
    LocalPrefill,
    LocalPrefillsSeen,
    PeerAddress,
    RoomFound,
    RoomLacking,
)
from connector.scheduler.adapters import AdapterWeights
from connector.scheduler.beside_offloading import tell_offloading_of_reads
from connector.scheduler.cache_groups import CacheGroups
from connector.scheduler.draining import SchedulerDraining
from connector.scheduler.engine_figures import EngineFigures
from connector.scheduler.kept_blocks import KeptBlocks
from connector.scheduler.lends import Lends, wants_remote_decode
from connector.scheduler.listener_thread import ListenerThread
from connector.scheduler.pulls import Pulls, WaitingPull
from connector.scheduler.request_spans import request_spans
from connector.scheduler.start_log import tell_of_start
from connector.scheduler.vllm_admission import Admission
from connector.staging import is_staged
from connector.step_metadata import HandshakeMetadata, StepMetadata, WorkerReport
from connector.wire.bounded import PORT_MAX
from statemachine.draining import State
from statemachine.kernel import Event
from statemachine.load import AbortLoad, NoteComputed, NoteWait, ReleaseUnread, StartLoad
from statemachine.loads import (
    Allocated,
    Answer,
    Asked,
    Ended,
    Heard,
    LetGo,
    LoadEffect,
    LoadEnded,
    Loads,
    SayLoadsAgain,
    SayNoLoads,
    SayNoRoom,
    SayRoomFound,
    StepScheduled,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

QUARANTINE_ASKED_NS = NS_PER_SECOND
"""How long after a step an idle engine makes another one to hear whether a quarantine has ended, if it is asked."""

_log = get_logger()


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
        self._vllm_config = vllm_config
        self._options = options
        key_file = params_key_file(options)
        self._look_again = key_file.look_again if key_file is not None else None
        self._listener_access = listener_access(options)
        self._workers_access = own_workers_access(options)
        self._engine_id: str = vllm_config.kv_transfer_config.engine_id
        self._host: str = envs.VLLM_NIXL_SIDE_CHANNEL_HOST
        self._port: int = envs.VLLM_NIXL_SIDE_CHANNEL_PORT + parallel.data_parallel_index
        if not 0 < self._port <= PORT_MAX:
            problem = f"VLLM_NIXL_SIDE_CHANNEL_PORT, plus the index of a data-parallel engine, must be 1 to {PORT_MAX}"
            raise SideChannelError(self._host, self._port, problem)
        self._clock = clock
        self._life = life
        self._is_staged = is_staged(vllm_config)
        # When the last step was scheduled.
        self._stepped_ns = clock.now_ns()
        self._commands: list[Command] = []
        # Requests without parameters that concern us, since the last step: how many, and the first of them.
        self._local_prefills = 0
        self._local_prefills_named: list[LocalPrefill] = []
        self._listener: ListenerThread | None = None
        # What it serves.
        self._served: dict[tuple[int, int], HandshakeMetadata] = {}
        # After SIGTERM vLLM waits for so long, and then kills.
        shutdown_seconds = min(vllm_config.shutdown_timeout, options.drain_grace_seconds)
        self._draining = SchedulerDraining(
            clock,
            lambda: self._listener,
            grace_ns=to_ns(shutdown_seconds),
            lease_ns=to_ns(options.kv_lease_duration),
        )
        self._cache_manager: KVCacheManager | None = None
        self._log_failure = FailureLog(self._engine_id, 0)
        self._event_log = EventLog(self._engine_id, 0, clock=clock, log_failure=self._log_failure)
        self._figures = EngineFigures(clock)
        self._crashes = CrashCount()
        self._groups = CacheGroups(vllm_config, kv_cache_config)
        self._loads = Loads(shares=self._groups.are_shared)
        self._kept = KeptBlocks()
        adapters = AdapterWeights(clock)
        self._pulls = Pulls(
            vllm_config, self._groups, options, key_file, adapters, clock=clock, log_failure=self._log_failure
        )
        advertised = PeerAddress(
            engine_id=self._engine_id,
            host=told_host(self._host),
            port=self._port,
            # With TP 1, the ranks that share each block's tokens count as transfer ranks.
            tp_size=max(parallel.tensor_parallel_size, parallel.decode_context_parallel_size),
            dcp_size=parallel.decode_context_parallel_size,
            pp_size=parallel.pipeline_parallel_size,
        )
        self._lends = Lends(
            vllm_config,
            self._groups,
            options,
            advertised,
            key_file,
            adapters,
            clock=clock,
            life=life,
            draining=self._draining,
            kept=self._kept,
            loads=self._loads,
            figures=self._figures,
            tell=self._tell,
        )
        # Whether every request is meant to bring its KV along; with both roles, some are computed here.
        self._is_decode_only: bool = vllm_config.kv_transfer_config.kv_role == "kv_consumer"
        # Where vLLM traces.
        self._spans = request_spans(vllm_config)
        tell_of_start(vllm_config, options, advertised.host)

    # --- requests -----------------------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """Take note of a request that will read from another engine, and keep its lease alive from now on. Of one that
        will be lent, note when it came."""
        for_decode = wants_remote_decode(request)
        self._lends.arrive(request, for_decode=for_decode)
        pull = self._pulls.of_decode(request)
        if pull is None and for_decode:
            pull = self._pulls.of_prefill(request)
        if pull is None:
            if not for_decode:
                self._note_local_prefill(request)
            return
        self._follow(Heard(request_id=request.request_id, source=pull, lease=pull.lease_key))
        if self._spans is not None:
            self._spans.hear(request)
        command = self._pulls.track(request.request_id, pull)
        if command is not None:
            self._tell(command)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many prompt tokens the other engine holds beyond the ones that this engine has cached.

        None: ask again in the next step, after those that have to go first (`statemachine/loads.py`).
        """
        count, pays = 0, False
        if (load := self._loads.queued.get(request.request_id)) is not None:
            pull: WaitingPull = load.source
            count = pull.tokens - num_computed_tokens
            is_end = self._groups.are_shared and count <= self._groups.tokens_not_found
            if is_end and self._loads.is_taken(load.request_id):
                count = 0  # another request has loaded it, and P may have its blocks back
            pays = count > 0 and self._tokens_to_compute(request, pull, count) >= pull.at_least
        # vLLM does not hear what is said of a request that may not read the prefix cache.
        loads = pays and self._loads.would_load(request.request_id) and not request.skip_reading_prefix_cache
        asked = Asked(
            request_id=request.request_id,
            room=self._kept.room_for(request, num_computed_tokens + count if loads else None),
            pays=pays,
            num_tokens=request.num_tokens,
        )
        answer, effects = self._loads.ask(asked)
        self._carry_out(effects)
        if answer is Answer.LET_PASS:
            return None, False
        return (count, True) if answer is Answer.LOAD else (0, False)

    def _tokens_to_compute(self, request: Request, pull: WaitingPull, count: int) -> int:
        """How many tokens of a prompt vLLM computes if none of the `count` that can be loaded is.

        Where states are cached, these may be more: the last cached state may lie long before the end of the attention
        that is cached, which is what vLLM tells a connector. Or fewer: it tells of whole blocks alone.
        """
        manager = self._cache_manager
        if not (self._groups.has_states and pull.at_least) or manager is None:
            return count
        cached: int = manager.get_computed_blocks(request)[1]
        return pull.tokens - cached

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Blocks were allocated: start the pull, or tell the engine that lends them that none is needed."""
        loads = num_external_tokens > 0
        allocated = Allocated(request_id=request.request_id, loads=loads)
        self._carry_out(self._loads.handle(allocated, self._clock.now_ns()), blocks)
        if not loads:  # otherwise it comes again when it has been loaded
            self._lends.schedule(request)

    def request_finished(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request has ended. Returns whether its blocks are kept, and what the client's answer carries."""
        # Under the policy `fail` a load that has failed ends the request before its results come here.
        has_failed = request.status == RequestStatus.FINISHED_ERROR
        self._follow(Ended(request_id=request.request_id, has_failed=has_failed))
        if self._spans is not None:
            self._spans.end(request.request_id)
        answer = self._lends.finish(request, block_ids)
        return answer is not None, answer

    # --- steps --------------------------------------------------------------------------------------------------

    def build_step_metadata(self, output: SchedulerOutput) -> StepMetadata:
        """Everything decided since the last step, and what this one has to save on the host."""
        if self._local_prefills_named:
            seen = LocalPrefillsSeen(count=self._local_prefills, named=tuple(self._local_prefills_named))
            self._tell(seen)
            self._local_prefills, self._local_prefills_named = 0, []
        commands, self._commands = self._commands, []
        self._stepped_ns = self._clock.now_ns()
        if self._loads.has_to_step:
            self._follow(StepScheduled(blocks_are_kept=not self._kept.is_none))
        lends = self._lends
        if lends.prompts:
            lends.follow(output)
        if self._spans is not None:
            self._spans.step()
        saves = lends.saves(output) if self._is_staged else ()
        return StepMetadata(commands, saves, bool(lends.prompts) and lends.ends_prompt(output))

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """The worker's results, before vLLM frees anything because of them."""
        failed = output.failed_recving or set()
        for request_id in output.finished_recving or ():
            self._follow(LoadEnded(request_id=request_id, has_failed=request_id in failed))
        if output.finished_sending:
            self._lends.end_leases(output.finished_sending)
        report = output.kv_connector_worker_meta
        if self._spans is not None:
            pulls = report.pulls if isinstance(report, WorkerReport) else ()
            self._spans.report(pulls, output.finished_recving or ())
        if isinstance(report, WorkerReport):
            self._keep_quarantined(report)
            self._figures.take_over(report.gauges)
            if report.stopped is not None and self._lends.stopped is None:
                self._stop_lending(report.stopped)

    def take_stats(self) -> EngineStats | None:
        """Figures since the last step; None: nothing has changed. Never raises: a figure is not worth a step."""
        try:
            listener, draining = self._listener, State.SERVING
            if self._draining.sigterm is not None or (
                listener is not None and listener.draining.state is not State.SERVING
            ):
                draining = self._draining.show()  # not asked while it serves: this is done with every step
            if listener is not None:
                self._figures.count_on(listener.totals)
            queued, loading = self._loads.queued, self._loads.loading
            return self._figures.take(
                len(queued),
                len(self._lends.computing),
                draining,
                is_up=self._lends.stopped is None,
                quarantined_blocks=self._kept.quarantined,
                queued_since_ns=next(iter(queued.values())).heard_ns if queued else None,
                loading_since_ns=next(iter(loading.values())).began_ns if loading else None,
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
        """Start the listener with every rank's payload; or have it serve others, when the engine has slept.

        Raises ThreadStartError, for instance for a port in use.
        """
        ranks: dict[tuple[int, int], HandshakeMetadata] = {}
        for rank, payload in metadata.items():
            if not isinstance(payload, HandshakeMetadata):
                raise TypeError(f"rank {rank} sent {type(payload).__name__}, expected HandshakeMetadata")
            ranks[rank] = payload
        if self._listener is None:
            self._listener = ListenerThread(
                self._host,
                self._port,
                ranks,
                self._life,  # its first
                self._note_listener_death,
                look_again=self._look_again,
                access=self._listener_access,
                workers_access=self._workers_access,
                clock=self._clock,
                grace_ns=to_ns(self._options.drain_grace_seconds),
                lease_ns=to_ns(self._options.kv_lease_duration),
                count=self._lends.counts,
            )
            self._listener.start()
            self._draining.catch_sigterm()
            local_only = "; only engines on this machine reach it" if is_loopback(self._host) else ""
            at = join_address(self._host, self._port)
            _log.info("handshakes are answered at %s%s [%s]", at, local_only, self._engine_id)
        elif ranks != self._served:
            self._lends.registration += 1
            self._listener.serve(ranks, uuid.uuid4().hex)
            _log.info("handshakes are answered with the KV cache as it is registered now [%s]", self._engine_id)
        self._served = ranks

    def bind_cache_manager(self, manager: KVCacheManager) -> None:
        self._cache_manager = manager
        self._lends.bind(manager.block_pool)
        self._kept.bind(manager.block_pool, Admission(self._vllm_config, manager))
        self._figures.note_pool(manager.block_pool.num_gpu_blocks)
        tell_offloading_of_reads()

    def shutdown(self) -> None:
        self._draining.forget_sigterm()
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.stop()

    # --- inside -------------------------------------------------------------------------------------------------

    def _tell(self, command: Command) -> None:
        """The worker, with the next step."""
        self._commands.append(command)

    def _stop_lending(self, reason: str) -> None:
        """A worker cannot serve its KV any more. What is lent already is given back by the workers, as it ends."""
        self._lends.stop(reason)
        _log.critical(
            "a worker serves no KV any more (%s): prefills are answered without kv_transfer_params from now on, so "
            "decode engines compute the prompts themselves; restart this engine",
            reason,
        )
        if self._listener is not None:
            self._listener.stop_serving(reason)

    def _note_local_prefill(self, request: Request) -> None:
        """The prompt is computed here, and nobody asks for it: perhaps a router has lost the parameters."""
        if request.pooling_params is not None:
            return  # vLLM takes parameters with requests that generate, and with no others
        reason = catalogue.UNUSABLE if request.kv_transfer_params else catalogue.ABSENT
        if reason is catalogue.UNUSABLE or self._is_decode_only:
            self._figures.note_local_prefill(reason)
        self._local_prefills += 1
        self._name_local_prefill(request.request_id, reason, request.num_prompt_tokens)

    def _name_local_prefill(self, request_id: str, reason: str, tokens: int) -> None:
        if len(self._local_prefills_named) < LOCAL_PREFILLS_NAMED_MAX:
            self._local_prefills_named.append(LocalPrefill(request_id=request_id, reason=reason, tokens=tokens))

    def _note_listener_death(self, reason: str) -> None:
        """In the listener's thread. Nobody reaches this engine any more, so it lends nothing."""
        if self._listener is not None:  # otherwise it is shutting down
            self._lends.stop(reason)
            act_on(self._options, reason)

    def _follow(self, event: Event) -> None:
        self._carry_out(self._loads.handle(event, self._clock.now_ns()))

    def _carry_out(self, effects: Iterable[LoadEffect], blocks: KVCacheBlocks | None = None) -> None:
        """`blocks`: that were allocated."""
        for effect in effects:
            match effect:
                case StartLoad(request_id=request_id, source=pull, keeps_lease=keeps_lease):
                    assert blocks is not None
                    self._tell(self._pulls.load(request_id, pull, blocks, keeps_lease=keeps_lease))
                case ReleaseUnread(request_id=request_id, source=pull):
                    self._release_unread(request_id, pull)
                case NoteComputed():
                    self._note_computed(effect)
                case AbortLoad(request_id=request_id):
                    self._tell(AbortPull(request_id=request_id))
                case NoteWait(heard_ns=heard_ns, is_loaded=is_loaded):
                    waited_seconds = (self._clock.now_ns() - heard_ns) / NS_PER_SECOND
                    self._figures.note_wait(waited_seconds, is_loaded=is_loaded)
                case LetGo(source=pull):
                    self._tell(self._pulls.let_go(pull))
                case SayNoRoom(request_id=request_id, num_tokens=num_tokens):
                    self._say_no_room(request_id, num_tokens)
                case SayRoomFound(request_id=request_id):
                    self._tell(RoomFound(request_id=request_id))
                case SayNoLoads(request_id=request_id):
                    self._event_log.loads_nothing(f"request {request_id}")
                case SayLoadsAgain():
                    self._event_log.loads_again()
                case _:
                    assert_never(effect)

    def _say_no_room(self, request_id: str, num_tokens: int) -> None:
        quarantined, lent_back = self._kept.quarantined, self._kept.lent_back
        self._event_log.finds_no_room(f"request {request_id}", num_tokens, quarantined, lent_back)
        self._tell(
            RoomLacking(request_id=request_id, num_tokens=num_tokens, quarantined=quarantined, lent_back=lent_back)
        )

    def _note_computed(self, computed: NoteComputed) -> None:
        pull = computed.source
        because = pull.computed_because
        if computed.was_suspended:
            because = catalogue.NO_ROOM
        elif computed.was_taken:
            because = catalogue.CONTINUED
        if because is not None:
            self._figures.note_local_prefill(because)
            self._name_local_prefill(computed.request_id, because, pull.prompt_tokens)

    def _release_unread(self, request_id: str, pull: WaitingPull) -> None:
        """Nothing is read: the engine that lends may free its blocks now."""
        command = self._pulls.release_unread(request_id, pull)
        if command is not None:
            self._tell(command)
        if self._spans is not None:
            self._spans.forget(request_id)

    def _keep_quarantined(self, report: WorkerReport) -> None:
        for block_ids in report.quarantined:
            self._kept.quarantine(block_ids)
        if report.quarantined:
            self._event_log.blocks_quarantined(_distinct(report.quarantined), self._kept.quarantined)
        for block_ids in report.lifted:
            self._kept.lift(block_ids)
        if report.lifted:
            self._event_log.given_back(_distinct(report.lifted), self._kept.quarantined)


def _distinct(reported: Sequence[Sequence[int]]) -> int:
    """Blocks: each rank reports its own part of the same."""
    return len(set(itertools.chain.from_iterable(reported)))
