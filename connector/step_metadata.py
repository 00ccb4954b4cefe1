"""What vLLM carries between the two sides of the connector: step metadata, handshake metadata, worker reports.

vLLM pickles these objects from one process to the other. Deadlines cross as durations, because the clocks of two
processes have nothing in common.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from connector.observe.spans import PullTimes
from connector.protocol import Command
from connector.wire.handshake import ActorExtension


@dataclass
class StepMetadata(KVConnectorMetadata):
    """What one scheduler step tells every worker: commands, in the order in which they were decided."""

    commands: list[Command] = field(default_factory=list)
    saves: tuple[list[int], ...] = ()
    """Staged on the host: logical blocks of each cache group to copy there after the forward pass; empty: none."""
    ends_prompt_to_lend: bool = False
    """With this step a request may finish whose prompt another engine takes over."""


@dataclass
class HandshakeMetadata(KVConnectorHandshakeMetadata):
    """One rank's part of the handshake payload, on its way from the worker to the scheduler process, which serves it.

    The metadata is bytes already, so that peers get what the worker made. `leave_secret` is for the scheduler process
    alone (`wire.administration.Leave`).
    """

    compatibility_hash: str
    agent_metadata: bytes
    extension: ActorExtension
    """Without the name of its life, which only the scheduler process knows."""
    leave_secret: bytes = field(repr=False)


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """What the scheduler must know beyond finished and failed requests.

    `quarantined` are blocks that READs may still write into, `lifted` those of which this is no longer true. One entry
    per worker and event, so that with several ranks a block is kept until the last of them lets go. `pulls`: where vLLM
    traces, the times of requests that have ended on a rank.
    """

    quarantined: list[list[int]] = field(default_factory=list)
    lifted: list[list[int]] = field(default_factory=list)
    stopped: str | None = None
    """Why a worker serves no more; None: all of them do. Of several workers, the first that says so."""
    gauges: dict[int, dict[str, float]] = field(default_factory=dict)
    """By number of the rank: its gauges (`observe.catalogue`), all of them, if one has changed."""
    pulls: list[PullTimes] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        assert isinstance(other, WorkerReport)
        return WorkerReport(
            quarantined=self.quarantined + other.quarantined,
            lifted=self.lifted + other.lifted,
            stopped=other.stopped if self.stopped is None else self.stopped,
            gauges=self.gauges | other.gauges,
            pulls=self.pulls + other.pulls,
        )
