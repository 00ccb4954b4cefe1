"""What every actor of one worker process shares: who we are, the doors to the outside, and the way back.

Nothing in here is mutable state of the protocol; that belongs to the cores.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from connector.clock import Clock, to_ns
from connector.config import ConnectorOptions
from connector.layout.local import LocalRank
from connector.layout.plan_cache import PlanCache
from connector.machine import boot_id
from connector.observe.event_log import EventLog
from connector.observe.trace_writer import TraceWriter
from connector.ports.nixl import NixlPort
from connector.ports.side_channel import SideChannel
from connector.protocol import WorkerEvent
from connector.runtime.figures import Figures
from connector.runtime.mapped_memory import MappedMemory
from connector.runtime.pace import Pace
from connector.runtime.reads import Reads
from connector.runtime.recorder import Recorder
from connector.runtime.verification import SumDesk
from statemachine.failures import Failure
from statemachine.remote_engine import EngineLimits


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """What a worker process gives its supervisor, and this to all actors.

    Attributes:
        draw_name: a new one with each call, which no other process of any engine has or has had: 32 hex digits.
        figures: where what no transition tells is counted.
        emit: hands a worker event to the engine thread.
        log_failure: writes one line for people: subject, failure.
        log_crash: writes a line with a traceback: what raised it, what it raised.
        event_log: what becomes of peers and leases, for people.
        trace: the trace of this process, which the recorder writes to; None: there is none.
    """

    options: ConnectorOptions
    local: LocalRank
    draw_name: Callable[[], str]
    nixl_port: NixlPort
    side_channel: SideChannel
    clock: Clock
    recorder: Recorder
    figures: Figures
    emit: Callable[[WorkerEvent], None]
    log_failure: Callable[[str, Failure], None]
    log_crash: Callable[[str, BaseException], None]
    event_log: EventLog
    trace: TraceWriter | None = None

    @property
    def identity(self) -> str:
        """Of this rank among all that may wait for the same engine: their pauses differ by it."""
        layout = self.local.layout
        return f"{layout.engine_id}/{layout.tp_rank}"


@dataclass(frozen=True, kw_only=True)
class ActorContext(WorkerContext):
    """Shared by the supervisor's actors: what the process gives them, and what is made once for all of them.

    Attributes:
        plans: of READs from the engines that were met.
        pace: of long computations.
        mapped: device memory of engines that were connected to.
        sums: where the engine thread is asked for checksums.
    """

    reads: Reads
    plans: PlanCache
    mapped: MappedMemory
    pace: Pace
    sums: SumDesk

    @classmethod
    def of(cls, worker: WorkerContext, reads: Reads) -> ActorContext:
        """That of a worker process whose READs go through `reads`."""
        return cls(
            **vars(worker),
            reads=reads,
            plans=PlanCache(),
            mapped=MappedMemory(boot_id(), os.environ, is_on_device=worker.local.layout.memory_kind == "VRAM"),
            pace=Pace(worker.clock),
            sums=SumDesk(worker.emit),
        )


def engine_limits(options: ConnectorOptions) -> EngineLimits:
    """What a decode rank's cores are given of the options."""
    return EngineLimits(
        lease_ns=to_ns(options.kv_lease_duration),
        margin_ns=to_ns(options.lease_margin_seconds),
        request_ns=to_ns(options.request_timeout_seconds),
        quiesce_ns=to_ns(options.quiesce_timeout_seconds),
        grace_ns=to_ns(options.backend_grace_seconds),
        backoff_first_ns=to_ns(options.backoff_initial_seconds),
        backoff_max_ns=to_ns(options.backoff_max_seconds),
        incompatible_ns=to_ns(options.incompatible_backoff_seconds),
        retries=options.transfer_retries,
    )
