"""The worker-process side, on the engine thread: registration once, then commands out and outcomes in.

After `register_kv_caches` the engine thread makes no NIXL and no ZMQ call. `start_load_kv` appends this step's commands
to a deque and wakes the actors once; `get_transfer_results` empties the deque of outcomes. Neither waits for anything.

What the engine thread remembers is only what it must be able to give back when the actors are gone: the requests that
wait for KV and the leases that vLLM holds blocks for. If their thread dies, everything fails closed. Waiting requests
are reported as failed with their blocks quarantined, because nobody watches their READs any more; leases are given
back once they could have been renewed no longer; new requests are refused.
"""

from __future__ import annotations

import random
import time
import uuid
from collections import deque
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.platforms import current_platform

from connector.config import ConnectorOptions
from connector.observe.log import FailureLog, get_logger, log_crash
from connector.observe.stats import ConnectorStats
from connector.observe.trace_log import open_trace_log
from connector.ports.nixl_agent import RealNixlPort
from connector.ports.zmq_bridge import ZmqSideChannel
from connector.runtime.clock import MonotonicClock
from connector.runtime.context import LocalRank
from connector.runtime.messages import (
    Command,
    LeaseGranted,
    Outcome,
    QuarantineLifted,
    ReceiveEnded,
    RejectPull,
    SendEnded,
    StartPull,
)
from connector.runtime.supervisor import RENEWAL_FRACTION, SHUTDOWN_GRACE_SECONDS, Supervisor
from connector.runtime.thread import ActorThread, ThreadStartError
from connector.runtime.tracked import Recorder
from connector.scheduler.metadata import HandshakeMetadata, StepMetadata, WorkerReport
from connector.wire.metadata import encode_agent_metadata
from connector.worker.registration import Registration, derive_registration
from statemachine.failures import ConnectorStopped
from statemachine.trace import TraceSink

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

STOP_TIMEOUT_SECONDS = 4 * SHUTDOWN_GRACE_SECONDS

_log = get_logger()


class ConnectorWorker:
    """See the module's docstring. Every method is called from the engine thread."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, options: ConnectorOptions) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._options = options
        self._handshake_metadata: HandshakeMetadata | None = None
        self._thread: ActorThread[Command] | None = None
        self._trace: TraceSink | None = None
        self._outcomes: deque[Outcome] = deque()
        self._stats = ConnectorStats()
        self._invalid_blocks: set[int] = set()
        self._report = WorkerReport()
        self._open_receives: dict[str, list[int]] = {}
        self._open_sends: dict[str, float] = {}
        self._dead_since: float | None = None

    # --- once ---------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Register the KV cache with NIXL and start the actors.

        Raises UnsupportedCache, NixlCallFailed or ThreadStartError; the engine does not start then.
        """
        registration = derive_registration(self._vllm_config, self._kv_cache_config, kv_caches)
        layout = registration.layout
        if self._options.trace_directory is not None:
            self._trace = open_trace_log(
                self._options.trace_directory, engine_id=layout.engine_id, role="worker", rank=layout.tp_rank
            )
        nixl_port = RealNixlPort.open(
            uuid.uuid4().hex,
            registration.ranges,
            registration.memory_kind,
            backends=self._options.backends,
            num_threads=self._options.num_threads,
            prepare_thread=(lambda: _make_device_current(layout.device_id))
            if registration.memory_kind == "VRAM"
            else None,
        )
        self._handshake_metadata = HandshakeMetadata(
            compatibility_hash=registration.compatibility_hash,
            agent_metadata=encode_agent_metadata(registration.agent_metadata(nixl_port.agent_metadata)),
        )
        self._thread = ActorThread(
            "kv-transfer-actors", lambda: self._make_supervisor(registration, nixl_port), self._log_error
        )
        try:
            self._thread.start()
        except ThreadStartError:
            nixl_port.close_blocking(SHUTDOWN_GRACE_SECONDS)
            raise

    @property
    def handshake_metadata(self) -> HandshakeMetadata | None:
        return self._handshake_metadata

    async def _make_supervisor(self, registration: Registration, nixl_port: RealNixlPort) -> Supervisor:
        layout = registration.layout
        clock = MonotonicClock()
        return Supervisor(
            options=self._options,
            local=LocalRank(layout=layout, compatibility_hash=registration.compatibility_hash),
            nixl_port=nixl_port,
            side_channel=ZmqSideChannel(),
            clock=clock,
            recorder=Recorder(
                engine_id=layout.engine_id, rank=layout.tp_rank, role="worker", clock=clock, sink=self._trace
            ),
            emit=self._outcomes.append,
            log_failure=FailureLog(layout.engine_id, layout.tp_rank),
            log_crash=log_crash,
            jitter=random.Random(layout.engine_id),
        )

    def _log_error(self, error: BaseException) -> None:
        log_crash("supervisor", error)

    def shutdown(self) -> None:
        """Stop the actors and close the agent; bounded in time. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None and not thread.stop(STOP_TIMEOUT_SECONDS):
            _log.error("the KV transfer actors did not stop within %g s", STOP_TIMEOUT_SECONDS)
        if self._trace is not None:
            self._trace.close()
            self._trace = None

    # --- every step ---------------------------------------------------------------------------------------------

    def start_load_kv(self, metadata: StepMetadata) -> None:
        """Hand this step's commands to the actors."""
        thread = self._thread
        if not metadata.commands or thread is None:
            return
        for command in metadata.commands:
            self._remember(command)
            if thread.is_dead:
                self._refuse(command)
            else:
                thread.post(command)
        thread.flush()

    def get_transfer_results(self) -> KVConnectorTransferResults:
        """What has ended since the last step."""
        results = KVConnectorTransferResults()
        if self._thread is not None and self._thread.is_dead:
            self._fail_closed(self._thread.death)
        while self._outcomes:
            outcome = self._outcomes.popleft()
            if self._is_repeated(outcome):
                continue
            self._stats.add(outcome)
            match outcome:
                case ReceiveEnded():
                    self._end_receive(outcome, results)
                case SendEnded(request_id=request_id):
                    results.finished_sending.add(request_id)
                case QuarantineLifted(local_block_ids=block_ids):
                    self._report.lifted.append(block_ids)
                case _:
                    pass
        return results

    def take_invalid_blocks(self) -> set[int]:
        """Blocks that were not loaded, of the requests reported as failed by the last `get_transfer_results`."""
        invalid, self._invalid_blocks = self._invalid_blocks, set()
        return invalid

    def take_report(self) -> WorkerReport | None:
        """News about quarantined blocks for the scheduler process, if there are any."""
        if not self._report.quarantined and not self._report.lifted:
            return None
        report, self._report = self._report, WorkerReport()
        return report

    def take_stats(self) -> ConnectorStats | None:
        """Figures since the last call, or None when nothing happened."""
        return None if self._stats.is_empty() else self._stats.clone_and_reset()

    # --- inside -------------------------------------------------------------------------------------------------

    def _remember(self, command: Command) -> None:
        match command:
            case StartPull(awaited=True) | RejectPull():
                self._open_receives[command.request_id] = command.local_block_ids
            case LeaseGranted(request_id=request_id, lease_seconds=lease_seconds):
                self._open_sends[request_id] = time.perf_counter() + lease_seconds
            case _:
                pass

    def _is_repeated(self, outcome: Outcome) -> bool:
        """Whether vLLM was told already: when the actors died, what was open was ended on their behalf."""
        match outcome:
            case ReceiveEnded(request_id=request_id):
                return self._open_receives.pop(request_id, None) is None
            case SendEnded(request_id=request_id):
                return self._open_sends.pop(request_id, None) is None
            case _:
                return False

    def _end_receive(self, outcome: ReceiveEnded, results: KVConnectorTransferResults) -> None:
        results.finished_recving.add(outcome.request_id)
        if outcome.failure is None:
            return
        results.failed_recving.add(outcome.request_id)
        self._invalid_blocks.update(outcome.local_block_ids)
        if outcome.quarantined:
            self._report.quarantined.append(outcome.local_block_ids)

    def _refuse(self, command: Command) -> None:
        """The actors are dead and will not see this command: no READ of it exists, so its blocks are free."""
        match command:
            case StartPull(awaited=True) | RejectPull():
                failure = ConnectorStopped(detail="its actors died earlier")
                self._outcomes.append(
                    ReceiveEnded(
                        request_id=command.request_id,
                        failure=failure,
                        local_block_ids=command.local_block_ids,
                        quarantined=False,
                    )
                )
            case _:
                pass

    def _fail_closed(self, death: BaseException | None) -> None:
        now = time.perf_counter()
        if self._dead_since is None:
            self._dead_since = now
            _log.critical(
                "the KV transfer actors have died (%r): every transfer fails from now on; restart this engine", death
            )
        failure = ConnectorStopped(detail=f"its actors died: {death!r}")
        for request_id, block_ids in list(self._open_receives.items()):
            self._outcomes.append(
                ReceiveEnded(request_id=request_id, failure=failure, local_block_ids=block_ids, quarantined=True)
            )
        # A consumer may have renewed a lease up to the moment of death; after this nobody can believe in it.
        longest_renewal = self._dead_since + self._options.kv_lease_duration * RENEWAL_FRACTION
        for request_id, deadline in list(self._open_sends.items()):
            if now >= max(deadline, longest_renewal):
                self._outcomes.append(SendEnded(request_id=request_id, expired=True))


def _make_device_current(device_id: int) -> None:
    """On the agent's thread: without a current device UCX finds no CUDA context and does without NVLink."""
    import torch

    current_platform.set_device(torch.device(f"{current_platform.device_type}:{device_id}"))
