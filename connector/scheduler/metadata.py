"""What one scheduler step tells the worker: the commands for its actors, and what to save on the host.

vLLM pickles this object to the worker processes. Deadlines cross as durations, because the clocks of two processes
have nothing in common.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from connector.runtime.messages import Command


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Commands of one step, in the order in which the scheduler decided them."""

    commands: list[Command] = field(default_factory=list)
    saves: tuple[list[int], ...] = ()
    """Staged on the host: logical blocks of each cache group to copy there after the forward pass; empty: none."""


@dataclass
class HandshakeMetadata(KVConnectorHandshakeMetadata):
    """One rank's part of the handshake payload, on its way from the worker to the scheduler process.

    The scheduler process adds its incarnation and serves it. Bytes, so that what peers get is what the worker made.
    """

    compatibility_hash: str
    agent_metadata: bytes


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """What the scheduler must know beyond finished and failed requests: blocks that READs may still write into.

    One entry per worker and event, so that with several ranks a block is kept until the last of them lets go.
    """

    quarantined: list[list[int]] = field(default_factory=list)
    lifted: list[list[int]] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        assert isinstance(other, WorkerReport)
        return WorkerReport(quarantined=self.quarantined + other.quarantined, lifted=self.lifted + other.lifted)
