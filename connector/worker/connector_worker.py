"""The worker-process side, on the engine thread: registration once, then commands out and worker events in.

After `register_kv_caches` the engine thread makes no NIXL and no ZMQ call, and it waits for the actors only where the
engine falls asleep or wakes up (`sleep_mode`). `start_load_kv` appends this step's commands to a deque and wakes the
actors once; `get_transfer_results` empties the deque of worker events. Neither waits for another thread. The engine
thread waits for the device in four cases: for copies between it and the host where KV is staged there
(`host_staging`), for checksums with the option `verify` (`block_sums`), on ROCm before states are reported
(`finishing`), and where a step may still write blocks that are lent with it (`step_fence`). On CPUs, what follows a
READ (permuting, packing, zeroing) is computed in `get_transfer_results`.

What is open is in the ledger; when the thread of the actors dies, it ends everything on their behalf (`ledger`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.platforms import current_platform

from connector.actor_death import act_on
from connector.clock import NS_PER_SECOND, BootClock, Clock
from connector.config import ConnectorOptions
from connector.key_files import channel_access
from connector.layout.geometry import RankLayout
from connector.layout.verification import lent_blocks, lent_runs
from connector.observe import catalogue
from connector.observe.event_log import FailureLog
from connector.observe.hang_notice import HangNotice
from connector.observe.log import CrashCount, get_logger, log_crash, root_cause
from connector.observe.sinks import combined
from connector.observe.spans import makes_spans
from connector.observe.stats import ConnectorStats
from connector.observe.trace_log import open_trace_log
from connector.observe.trace_writer import TraceWriter
from connector.protocol import (
    AfterSteps,
    Command,
    LeaseComputing,
    LeaseGranted,
    LoadFailed,
    RejectPull,
    ReleaseUnread,
    SendEnded,
    StartPull,
    SumsFound,
    SumsWanted,
    TrackLease,
    WarmedUp,
    WorkerEvent,
    WorkerStopped,
)
from connector.runtime.figures import Figures
from connector.runtime.recorder import Recorder
from connector.runtime.thread import ActorThread
from connector.runtime.verification import lease_sums, stretches
from connector.staging import advertised_layout_name, is_staged
from connector.step_metadata import HandshakeMetadata, StepMetadata, WorkerReport
from connector.wire.control import NO_SUMS, encode_sums
from connector.worker.actors import ACTORS_THREAD, WorkerActors
from connector.worker.block_sums import BlockSums
from connector.worker.cache_memory import CacheMemory
from connector.worker.cpu_attention import packed_blocks
from connector.worker.device_allocations import shift_buffer_ids
from connector.worker.finishing import Finishing, run_at_once, run_on
from connector.worker.host_staging import HostStaging, make_host_buffers
from connector.worker.landing import BlockPermuter, landing_caches
from connector.worker.ledger import TransferLedger
from connector.worker.memory_stays import keep_memory
from connector.worker.parallelism import placement
from connector.worker.pull_timer import PullTimer
from connector.worker.registration import Registration, derive_registration
from connector.worker.sleep_mode import MemoryInUse, follows_sleep
from connector.worker.step_fence import StepFence, end_of_steps_on, writes_late
from connector.worker.switch_interval import SwitchInterval
from connector.worker.token_scales import lay_out_scales
from statemachine.failures import Failure
from statemachine.trace import TraceSink

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import CopyBlocksOp
    from vllm.v1.kv_cache_interface import KVCacheConfig

_ACTORS_HANG = (
    "the KV transfer actors were called %.0f s ago and have not come: a call of theirs does not return, or something "
    "keeps the interpreter. No KV is transferred until they go on, leases are not renewed, and what waits for KV does "
    "not end, because READs may still write"
)

LATE_SECONDS = 0.25
"""Actors that have not woken up for so long are late. Their lateness is shown in multiples of it."""

_NOT_LATE = (0, 0.0)
_MAILBOX_MESSAGES = catalogue.MAILBOX_MESSAGES.key()
_LOOP_LAG_SECONDS = catalogue.LOOP_LAG_SECONDS.key()
_NIXL_LAG_SECONDS = catalogue.NIXL_LAG_SECONDS.key()

_log = get_logger()


class ConnectorWorker:
    """See the module's docstring. Every method is called from the engine thread.

    Raises OptionError for keys that cannot be used.
    """

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, options: ConnectorOptions) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._options = options
        self._access = channel_access(options)
        # Once the cache is registered; others when the engine has slept.
        self._make_actors: Callable[[], WorkerActors] | None = None
        # And not while it sleeps.
        self._actors: WorkerActors | None = None
        self._thread: ActorThread[Command | AfterSteps] | None = None
        self._follows_sleep = False  # until the cache is registered
        self._is_asleep = False
        # What the actors are told when it wakes up, and when that came.
        self._put_off: list[tuple[Command, int]] = []
        self._rank_number = 0
        # Of the engine thread; the actors have their own.
        self._log_failure: FailureLog | None = None
        self._has_died = False
        self._is_copy = False
        self._is_warm = False
        # kv_producer, kv_consumer or kv_both.
        self._role: str = vllm_config.kv_transfer_config.kv_role
        self._trace: TraceSink | None = None
        self._trace_writer: TraceWriter | None = None  # one of those that `_trace` writes to
        # Where vLLM traces.
        self._pull_timer = PullTimer() if makes_spans(vllm_config) else None
        self._staging: HostStaging | None = None
        self._finishing = Finishing(run_at_once, BlockPermuter({}), CacheMemory(()))
        # With the option verify.
        self._block_sums: BlockSums | None = None
        self._fence: StepFence | None = None
        self._layout: RankLayout | None = None
        self._clock: Clock = BootClock()
        self._switch_interval = SwitchInterval(options.switch_interval_seconds)
        self.ledger = TransferLedger(self._clock, options.kv_lease_duration)
        self._figures = Figures()
        self._crashes = CrashCount()
        # Gauges as they were reported last; commands that waited then, and for how many LATE_SECONDS.
        self._gauges: dict[str, float] = {}
        self._late = _NOT_LATE
        self._nixl_lag_seconds = 0.0
        shift_buffer_ids()  # vLLM allocates the KV cache after this.
        self._hang_notice = HangNotice(ACTORS_THREAD, "the KV transfer actors", _ACTORS_HANG)

    # --- once ---------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Register the KV cache with NIXL and start the actors. A copy of another rank does neither.

        Raises UnsupportedCache, NixlCallFailed or ThreadStartError; the engine does not start then.
        """
        place = placement(self._vllm_config)
        staged = is_staged(self._vllm_config)
        self._follows_sleep = follows_sleep(self._vllm_config)
        if not (staged or self._follows_sleep):
            keep_memory(self._vllm_config)  # a copy's too: an engine sleeps as a whole
        if place.is_copy:
            self._is_copy = True
            return
        self._rank_number = place.number
        self._log_failure = FailureLog(self._vllm_config.kv_transfer_config.engine_id, place.number)
        registered = kv_caches
        if staged:
            layout_name = advertised_layout_name(self._vllm_config)
            registered = make_host_buffers(self._kv_cache_config, kv_caches, layout_name)
        registration = derive_registration(self._vllm_config, self._kv_cache_config, registered)
        lay_out_scales(self._vllm_config)
        layout = registration.layout
        if registered is not kv_caches:
            self._staging = HostStaging(self._kv_cache_config, kv_caches, registered)
        has_states = any(group.tokens_per_kernel_block == 0 for group in layout.groups)
        self._finishing = self._make_finishing(registration, registered, has_states=has_states)
        if self._options.verify != "off":
            self._block_sums, self._layout = BlockSums(registered.values()), layout
        device = next(iter(kv_caches.values())).device
        end_of_steps = end_of_steps_on(device)
        if end_of_steps is not None and writes_late(
            self._vllm_config, has_states=has_states, is_last_stage=place.is_last_stage
        ):
            self._fence = StepFence(end_of_steps)
        self._trace = self._make_trace(layout.engine_id, place.number)
        self._make_actors = partial(
            WorkerActors,
            self._vllm_config,
            self._kv_cache_config,
            self._options,
            registration,
            place.number,
            registered,
            device,
            access=self._access,
            role=self._role,
            clock=self._clock,
            figures=self._figures,
            recorder=Recorder(
                engine_id=layout.engine_id,
                rank=place.number,
                role=self._role,
                clock=self._clock,
                sink=self._trace,
                figures=self._figures,
                count_crash=lambda: self._figures.note(catalogue.CRASHES),
            ),
            trace=self._trace_writer,
            emit=self._emit,
            log_crash=self._note_crash,
            on_death=self._note_death,
        )
        self._start_actors()

    def _make_finishing(
        self, registration: Registration, registered: dict[str, torch.Tensor], *, has_states: bool
    ) -> Finishing:
        """`registered`: the tensors that READs write into, by layer."""
        return Finishing(
            run_on(next(iter(registered.values())).device),
            BlockPermuter(landing_caches(registration.layout, registered)),
            CacheMemory(registered.values()),
            self._staging,
            packed_blocks=packed_blocks(self._vllm_config, registration, registered),
            synchronizes=self._staging is None and current_platform.is_rocm() and has_states,
        )

    def _start_actors(self) -> None:
        """Raises NixlCallFailed or ThreadStartError."""
        assert self._make_actors is not None
        actors = self._make_actors()
        self._thread = actors.thread
        try:
            actors.start(is_warm=self._is_warm)
        except Exception:
            self._thread = None
            raise
        self._actors = actors

    def _make_trace(self, engine_id: str, rank: int) -> TraceSink | None:
        """Where transitions are recorded. Raises TraceDirectoryError."""
        options = self._options
        sinks: list[TraceSink] = [] if self._pull_timer is None else [self._pull_timer]
        if options.trace_directory is not None:
            lines = open_trace_log(
                options.trace_directory,
                engine_id=engine_id,
                role=self._role,
                rank=rank,
                file_bytes=options.trace_file_bytes,
                files_kept=options.trace_files_kept,
                sample=options.trace_sample,
            )
            missing = catalogue.TRACE_RECORDS_MISSING
            self._trace_writer = TraceWriter(
                lines, on_missing=lambda records: self._figures.note(missing, times=records)
            )
            sinks.append(self._trace_writer)
        return combined(sinks)

    @property
    def is_staged(self) -> bool:
        """Whether transfers are between host buffers."""
        return self._staging is not None

    def set_copy_operation(self, copy_operation: CopyBlocksOp) -> None:
        if self._staging is not None:
            self._staging.set_copy_operation(copy_operation)

    @property
    def handshake_metadata(self) -> HandshakeMetadata | None:
        return self._actors.handshake_metadata if self._actors is not None else None

    def note_warm(self) -> None:
        """vLLM has warmed the engine up: it asks for the handshake metadata after that, or has a first step made."""
        if self._is_warm or self._thread is None:
            return
        self._is_warm = True
        self._thread.post(WarmedUp())
        self._thread.flush()

    def _emit(self, event: WorkerEvent) -> None:
        """Trio thread: for the engine thread, which hears of it with its next step. An idle engine takes none."""
        self.ledger.record(event)
        if isinstance(event, WorkerStopped):
            self._die(event.reason)

    def _note_crash(self, actor_name: str, error: BaseException) -> None:
        """Trio thread."""
        log_crash(actor_name, error)
        self._figures.note(catalogue.CRASHES)

    def _note_death(self, error: BaseException) -> None:
        """Trio thread, which ends with this."""
        self._note_crash("supervisor", error)
        self._die(f"its actors died: {root_cause(error)!r}")

    def _die(self, reason: str) -> None:
        """Once, and not while the engine itself shuts down."""
        if self._thread is not None and not self._has_died:
            self._has_died = True
            act_on(self._options, reason)

    def unregister_kv_caches(self) -> None:
        """The engine falls asleep, and the memory of its KV cache goes: end what touches it. Idempotent.

        Raises MemoryInUse: something may still read or write there, and it has to stay.
        """
        actors, thread = self._actors, self._thread
        if actors is None or thread is None or not self._follows_sleep:
            return
        if self.ledger.transfers:
            raise MemoryInUse(f"{self.ledger.transfers} transfer(s) have not ended")
        was_dead = thread.is_dead
        if not actors.stop():
            in_use = MemoryInUse("NIXL has not given it back")
            if not was_dead:  # it is now: who comes is refused, and nothing is lent any more
                thread.death = in_use
                self._die(str(in_use))
            raise in_use
        if was_dead:
            return
        self._actors = self._thread = None
        self._is_asleep = True
        self._put_off = list(self.ledger.tracked)
        self._figures.clear()
        self._late, self._nixl_lag_seconds = _NOT_LATE, 0.0
        self._switch_interval.shorten(False)
        _log.info("the memory of the KV cache is not registered with NIXL while this engine sleeps")

    def restore_kv_caches(self) -> None:
        """The engine wakes up, and its KV cache has memory again. Idempotent.

        Raises NixlCallFailed or ThreadStartError; the connector is still asleep then.
        """
        if not self._is_asleep:
            return
        self._start_actors()
        self._is_asleep = False
        assert self._thread is not None
        now_ns = self._clock.now_ns()
        for command, came_ns in self._put_off:
            self._thread.post(_aged(command, now_ns - came_ns))
        self._put_off = []
        self._thread.flush()

    def shutdown(self) -> None:
        """Stop the actors and close the agent; bounded in time. Idempotent."""
        self._switch_interval.shorten(False)
        actors, self._actors, self._thread = self._actors, None, None
        if actors is not None:
            actors.stop()
        if self._trace is not None:
            self._trace.close()
            self._trace = None

    # --- every step ---------------------------------------------------------------------------------------------

    def start_load_kv(self, metadata: StepMetadata) -> None:
        """Hand this step's commands to the actors. Raises CopyOperationMissing: nothing could be transferred then."""
        thread = self._thread
        self.note_warm()
        commands = metadata.commands
        if self._is_copy:
            self._answer_as_copy(commands)
        if not commands or (thread is None and not self._is_asleep):
            return
        if self._staging is not None:
            self._staging.require_copy_operation()
        is_dead = thread is not None and thread.is_dead
        for command in commands:
            self.ledger.enter(command)
            if is_dead:
                self.ledger.refuse(command, "its actors died earlier")
        if thread is None:
            self._take_asleep(commands)
        if thread is None or is_dead:
            return
        for command in commands:
            told = command if self._block_sums is None else self._with_sums(command, self._block_sums)
            thread.post(told if self._fence is None else self._fence.with_steps(told))
        self._switch_interval.shorten(self.ledger.is_open)
        thread.flush()

    def _take_asleep(self, commands: Sequence[Command]) -> None:
        """What concerns requests in vLLM's queue is put off until the engine is awake; none is taken out before."""
        now_ns = self._clock.now_ns()
        for command in commands:
            if isinstance(command, StartPull | RejectPull):
                self.ledger.refuse(command, "its engine sleeps")
            else:
                self._put_off.append((command, now_ns))

    def _with_sums(self, command: Command, block_sums: BlockSums) -> Command:
        """A grant with the checksums of what is lent: nobody can read it before."""
        if not isinstance(command, LeaseGranted) or command.block_ids is None:
            return command
        assert self._layout is not None
        try:
            blocks = lent_blocks(self._layout, command.block_ids, sampled=self._options.verify == "sampled")
            found = block_sums.of(stretches(lent_runs(self._layout, blocks)), after_steps=True)
            sums = lease_sums(blocks, found)
        except Exception as error:  # a check is not worth a step
            log_crash("checksums", error)
            return msgspec.structs.replace(command, block_ids=None, sums=NO_SUMS)
        return msgspec.structs.replace(command, block_ids=None, sums=encode_sums(sums))

    def _find_sums(self, wanted: Sequence[SumsWanted], thread: ActorThread[Command | AfterSteps]) -> None:
        """Sum what READs have left, for the actors, which compare."""
        assert self._block_sums is not None
        for each in wanted:
            try:
                found = SumsFound(ticket=each.ticket, sums=self._block_sums.of(each.stretches))
            except Exception as error:
                found = SumsFound(ticket=each.ticket, sums=np.empty(0, np.int64), error=repr(error))
            thread.post(found)
        thread.flush()

    def _answer_as_copy(self, commands: Sequence[Command]) -> None:
        """Nobody reads from a copy, and it reads nothing. vLLM waits until all ranks say that what is lent was read,
        and that a request which loads has ended, also where it is refused."""
        for command in commands:
            match command:
                case LeaseGranted(lease=lease):
                    self.ledger.enter(command)
                    self.ledger.record(SendEnded(lease=lease, expired=False))
                case StartPull() | RejectPull():
                    self.ledger.enter(command)
                    self.ledger.refuse(command, "its rank holds a copy of another one's KV, and reads nothing")
                case _:
                    pass

    def note_step(self, metadata: StepMetadata) -> None:
        """The device has been given all that this step computes, drafts included."""
        if self._fence is not None:
            self._fence.note_step()
            if metadata.ends_prompt_to_lend:
                self._fence.wait()
        if self._block_sums is not None:
            self._block_sums.note_step()

    def save(self, metadata: StepMetadata) -> None:
        """After the step's forward pass: copy to the host what it has written for requests that will be lent."""
        if self._staging is not None and metadata.saves:
            self._staging.save(metadata.saves)

    def get_transfer_results(self) -> KVConnectorTransferResults:
        """What has ended since the last step."""
        if self._thread is not None and self._thread.is_dead:
            self.ledger.fail_closed(self._thread.death)
            self._figures.clear()
        results = self.ledger.take_results()
        if self.ledger.sums_wanted and self._thread is not None:
            self._find_sums(self.ledger.take_sums_wanted(), self._thread)
        failed: Mapping[str, Failure] = {}
        if (loaded := self.ledger.take_loaded()) or self._finishing.running:
            usable, failed = self._finishing.finish(loaded)
            self.ledger.end_loaded(usable, failed, results)
            if failed:
                self._tell_failed(failed)
        if self._pull_timer is not None:
            self._note_pulls(self._pull_timer, results.finished_recving, failed)
        self._switch_interval.shorten(self.ledger.is_open)
        return results

    def _tell_failed(self, failed: Mapping[str, Failure]) -> None:
        """In the log, and to the actors, which answer for requests."""
        assert self._log_failure is not None
        for request_id, failure in failed.items():
            self._log_failure(f"request {request_id}", failure)
            if self._thread is not None:
                self._thread.post(LoadFailed(request_id=request_id, failure=failure))
        if self._thread is not None:
            self._thread.flush()

    def take_stats(self) -> ConnectorStats | None:
        """Figures since the last call, or None when nothing happened. Never raises: a figure is not worth a step."""
        try:
            stats, taken = self.ledger.take_stats(), self._figures.take()
            if taken is None:
                return stats
            stats = stats or ConnectorStats()
            for key, count in taken.counts.items():
                stats.count(key, count)
            for key, values in taken.samples.items():
                stats.sample(key, *values)
            return stats
        except Exception as error:
            self._crashes.note("figures of a step", error)
            return None

    def take_report(self) -> WorkerReport | None:
        """News for the scheduler process, if there are any."""
        report = self.ledger.take_report()
        thread = self._thread
        if thread is None:
            return report
        late, nixl_lag_seconds = self._late, self._nixl_lag_seconds
        try:
            if self._actors is not None:
                self._nixl_lag_seconds = self._actors.nixl_lag_seconds
            if thread.is_called or late is not _NOT_LATE:
                self._late = _NOT_LATE if thread.is_dead else self._lateness(thread)
            is_as_before = (self._late, self._nixl_lag_seconds) == (late, nixl_lag_seconds)
            if (found := self._figures.take_gauges()) is None and is_as_before:
                return report
            gauges = {
                **(found or self._gauges),
                _MAILBOX_MESSAGES: self._late[0],
                _LOOP_LAG_SECONDS: self._late[1],
                _NIXL_LAG_SECONDS: self._nixl_lag_seconds,
            }
            if gauges == self._gauges:
                return report
            self._gauges = gauges
            report = report or WorkerReport()
            report.gauges[self._rank_number] = gauges
        except Exception as error:  # what the report says of requests and blocks is told all the same
            self._crashes.note("gauges of a step", error)
        return report

    def _lateness(self, thread: ActorThread[Command | AfterSteps]) -> tuple[int, float]:
        """How many commands wait for the actors, and since when, in seconds; nothing, unless that is long."""
        messages, seconds = thread.lateness()
        self._hang_notice.note(seconds)
        late_by = seconds // LATE_SECONDS * LATE_SECONDS
        return (messages, late_by) if late_by else _NOT_LATE

    def _note_pulls(self, timer: PullTimer, finished: Iterable[str], failed: Mapping[str, Failure]) -> None:
        try:
            for request_id in finished:
                if (times := timer.take(request_id, failed.get(request_id))) is not None:
                    self.ledger.note_pull(times)
        except Exception as error:
            self._crashes.note("times of a request", error)


def _aged(command: Command, age_ns: int) -> Command:
    """The same, said so much later."""
    if isinstance(command, TrackLease | ReleaseUnread | LeaseComputing):
        return msgspec.structs.replace(command, age_seconds=command.age_seconds + age_ns / NS_PER_SECOND)
    return command
