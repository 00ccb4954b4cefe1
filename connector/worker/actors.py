"""What runs beside the engine thread: the NIXL agent, with which the KV cache is registered, the control socket and the
thread of the actors.

They come and go together: made when the cache is there, stopped when the engine ends, and where the engine sleeps
(`sleep_mode`) stopped before its memory goes and made anew when that is back. To peers it is then an engine that was
started again: the agent has another name, and nothing of the one before is remembered.
"""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

from vllm import envs
from vllm.platforms import current_platform

from connector.addresses import join_address
from connector.clock import Clock
from connector.config import ConnectorOptions
from connector.descriptor_limit import raise_descriptor_limit
from connector.observe import catalogue
from connector.observe.event_log import EventLog, FailureLog
from connector.observe.log import StrangerLog, get_logger
from connector.observe.trace_writer import TraceWriter
from connector.ports.gate import Access
from connector.ports.nixl_agent import RealNixlPort
from connector.ports.side_channel import Listener, SideChannel
from connector.ports.zmq_bridge import ZmqSideChannel
from connector.protocol import AfterSteps, Command, WorkerEvent
from connector.runtime.context import WorkerContext
from connector.runtime.figures import Figures
from connector.runtime.recorder import Recorder
from connector.runtime.supervisor import SHUTDOWN_GRACE_SECONDS, Supervisor
from connector.runtime.thread import ActorThread, ThreadStartError
from connector.step_metadata import HandshakeMetadata
from connector.versions import NIXL, shown_version
from connector.wire.administration import LEAVE_SECRET_BYTES
from connector.wire.handshake import ActorExtension
from connector.wire.metadata import encode_agent_metadata
from connector.worker.cache_memory import scratch_beside
from connector.worker.control_socket import control_port, listening_host, open_control_socket
from connector.worker.device_allocations import device_allocations
from connector.worker.device_stream import make_current
from connector.worker.engine_facts import engine_facts
from connector.worker.registration import Registration
from connector.worker.sleep_mode import ucx_config
from statemachine.failures import Failure

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

STOP_TIMEOUT_SECONDS = 4 * SHUTDOWN_GRACE_SECONDS

ACTORS_THREAD = "kv-transfer-actors"

_log = get_logger()


class WorkerActors:
    """See the module's docstring. Made, started and stopped on the engine thread.

    Args:
        rank_number: `Placement.number`.
        registered: the tensors that NIXL knows, by layer.
        access: who is let in at the control socket.
        role: kv_producer, kv_consumer or kv_both.
        recorder: of all their lives, so that what was is remembered, and a trace is that of one process.
        trace: where it writes to, if to files.
        emit: takes worker events, in the thread of the actors.
        log_crash: the same, for what a task has raised.
        on_death: the same, for what the thread dies of.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        options: ConnectorOptions,
        registration: Registration,
        rank_number: int,
        registered: Mapping[str, torch.Tensor],
        device: torch.device,
        *,
        access: Access,
        role: str,
        clock: Clock,
        figures: Figures,
        recorder: Recorder,
        trace: TraceWriter | None,
        emit: Callable[[WorkerEvent], None],
        log_crash: Callable[[str, BaseException], None],
        on_death: Callable[[BaseException], None],
    ) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._options = options
        self._registration = registration
        self._rank_number = rank_number
        self._registered = registered
        self._device = device
        self._access = access
        self._role = role
        self._clock = clock
        self._figures = figures
        self._recorder = recorder
        self._trace = trace
        self._emit = emit
        self._log_crash = log_crash
        self.thread: ActorThread[Command | AfterSteps] = ActorThread(
            ACTORS_THREAD, self._make_supervisor, on_death, figures.note_wake_up
        )
        self._is_warm = False
        self._nixl_port: RealNixlPort | None = None
        self._handshake_metadata: HandshakeMetadata | None = None

    @property
    def handshake_metadata(self) -> HandshakeMetadata:
        """What peers are told. Once they have started."""
        assert self._handshake_metadata is not None
        return self._handshake_metadata

    @property
    def nixl_lag_seconds(self) -> float:
        """For how long NIXL has not come back from a call; 0 unless that is long."""
        assert self._nixl_port is not None
        return self._nixl_port.lag_seconds

    def start(self, *, is_warm: bool) -> None:
        """Register and start. `is_warm`: as for `Supervisor`. Raises NixlCallFailed or ThreadStartError, and leaves
        nothing behind."""
        self._is_warm = is_warm
        port = self._nixl_port = self._register_with_nixl()
        try:
            self.thread.start()
        except ThreadStartError:
            port.close_blocking(SHUTDOWN_GRACE_SECONDS)
            raise
        self._log_start()

    def stop(self) -> bool:
        """End the actors and close the agent; bounded in time. Whether NIXL has given the memory back: it keeps that
        where a READ may still write. Idempotent."""
        if not self.thread.stop(STOP_TIMEOUT_SECONDS):
            _log.error("the KV transfer actors did not stop within %g s", STOP_TIMEOUT_SECONDS)
            return False
        return self._nixl_port is None or self._nixl_port.counts().registered_ranges == 0

    def _register_with_nixl(self) -> RealNixlPort:
        """Raises NixlCallFailed."""
        layout, registered, options = self._registration.layout, self._registered, self._options
        raise_descriptor_limit()
        return RealNixlPort.open(
            uuid.uuid4().hex,
            self._registration.ranges,
            backends=options.backends,
            num_threads=options.num_threads,
            ucx_config=ucx_config(self._vllm_config),
            package="nixl_rocm" if current_platform.is_rocm() else "nixl",
            scratch=scratch_beside(next(iter(registered.values())), layout.device_id, layout.memory_kind)
            if layout.memory_kind == "VRAM"
            else None,
            owner=tuple(registered.values()),
            is_read_from=self._role != "kv_consumer" or options.bidirectional_kv_xfer,
            # Without a current device UCX finds no CUDA context and does without NVLink.
            prepare_thread=lambda: make_current(self._device),
            timeout_seconds=options.registration_timeout_seconds,
            on_wait=lambda seconds: _log.info(
                "NIXL has been registering %.1f GB of KV cache for %.0f s (registration_timeout_seconds: %g)",
                self._gigabytes,
                seconds,
                options.registration_timeout_seconds,
            ),
        )

    @property
    def _gigabytes(self) -> float:
        return sum(each.length_bytes for each in self._registration.ranges) / 1e9

    def _log_start(self) -> None:
        layout, extension = self._registration.layout, self.handshake_metadata.extension
        _log.info(
            "%.2f GB of KV cache in %d memory ranges (%s) are registered with NIXL %s, back ends %s; control socket "
            "%s; TP %d of %d, PP %d [%s rank %d]",
            self._gigabytes,
            len(self._registration.ranges),
            layout.memory_kind,
            shown_version(*NIXL),
            ", ".join(self._options.backends),
            join_address(extension.control_host, extension.control_port),
            layout.tp_rank,
            layout.tp_size,
            layout.pp_rank,
            layout.engine_id,
            self._rank_number,
        )

    # --- in the thread of the actors ----------------------------------------------------------------------------

    async def _make_supervisor(self) -> Supervisor:
        """Whatever raises, no socket is left open: its context would be waited for without end when it is collected,
        and an engine that cannot start would not end."""
        make_current(self._device)  # for `StepFence`, whose events are asked for here
        assert self._nixl_port is not None
        log_failure = FailureLog(self._registration.layout.engine_id, self._rank_number)
        with ExitStack() as opened:
            side_channel = opened.enter_context(closing(self._make_side_channel()))
            control_host, control = self._open_control_socket(side_channel, log_failure)
            metadata = self._handshake_metadata = self._describe(
                self._nixl_port.agent_metadata, control_host, control.port, side_channel.public_key
            )
            control_address = join_address(control_host, control.port)
            supervisor = Supervisor(
                self._context(self._nixl_port, side_channel, log_failure),
                control=control,
                leave_secret=metadata.leave_secret,
                deliver_posted=self.thread.deliver_posted,
                facts=engine_facts(
                    self._vllm_config, self._kv_cache_config, self._options, self._registration, control_address
                ),
                ids_repeat=envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION,
                is_warm=self._is_warm,
            )
            opened.pop_all()  # the supervisor closes it from here on
        return supervisor

    def _context(self, nixl_port: RealNixlPort, side_channel: SideChannel, log_failure: FailureLog) -> WorkerContext:
        engine_id, clock = self._registration.layout.engine_id, self._clock
        return WorkerContext(
            options=self._options,
            local=self._registration,
            draw_name=lambda: uuid.uuid4().hex,
            nixl_port=nixl_port,
            side_channel=side_channel,
            clock=clock,
            recorder=self._recorder,
            figures=self._figures,
            emit=self._emit,
            log_failure=log_failure,
            log_crash=self._log_crash,
            event_log=EventLog(engine_id, self._rank_number, clock=clock, log_failure=log_failure),
            trace=self._trace,
        )

    def _make_side_channel(self) -> ZmqSideChannel:
        """What it turns away at the control socket is logged and counted."""
        log_stranger = StrangerLog("control socket")

        def refuse(address: str, sentence: str) -> None:
            log_stranger(address, sentence)
            self._figures.note(catalogue.TURNED_AWAY, catalogue.CONTROL_SOCKET, catalogue.REFUSED)

        def say_no_room(sentence: str) -> None:
            log_stranger("newcomers", sentence)
            self._figures.note(catalogue.TURNED_AWAY, catalogue.CONTROL_SOCKET, catalogue.NO_ROOM)

        return ZmqSideChannel(self._access, refuse, say_no_room)

    def _open_control_socket(self, side_channel: SideChannel, log_failure: FailureLog) -> tuple[str, Listener]:
        """Where peers are told that the control socket listens, and this. What it cuts off is logged and counted."""

        def cut_off(subject: str, failure: Failure) -> None:
            log_failure(subject, failure)
            self._figures.note(catalogue.TURNED_AWAY, catalogue.CONTROL_SOCKET, catalogue.CUT_OFF)

        port = control_port(self._vllm_config, self._options, self._rank_number)
        host = listening_host(self._vllm_config.parallel_config)
        return open_control_socket(side_channel, host, cut_off, port)

    def _describe(self, agent_metadata: bytes, host: str, port: int, public_key: str | None) -> HandshakeMetadata:
        """What peers are told in the handshake. `host`, `port`, `public_key`: of the control socket."""
        registration, layout = self._registration, self._registration.layout
        is_mapped = ucx_config(self._vllm_config) is None
        return HandshakeMetadata(
            compatibility_hash=registration.compatibility_hash,
            agent_metadata=encode_agent_metadata(registration.agent_metadata(agent_metadata)),
            extension=ActorExtension(
                life="",
                tp_size=layout.tp_size,
                dcp_size=layout.dcp_size,
                pp_size=self._vllm_config.parallel_config.pipeline_parallel_size,
                tp_rank=layout.tp_rank,
                pp_rank=layout.pp_rank,
                control_host=host,
                control_port=port,
                control_key=public_key,
                identity=registration.identity,
                verify=self._options.verify,
                device_allocations=device_allocations(registration.ranges) if is_mapped else None,
            ),
            leave_secret=secrets.token_bytes(LEAVE_SECRET_BYTES),
        )
