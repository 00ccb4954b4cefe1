"""Prefill and decode engines made of the production actors, real NIXL agents and real ZMQ sockets, and numpy memory.

Everything of vLLM is left out: a test plays the scheduler by delivering commands and reading outcomes. Both engines
live in one process and one trio run; NIXL moves the bytes between their buffers as it would between processes.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import trio

from connector.config import ConnectorOptions
from connector.layout.geometry import RankLayout
from connector.ports.nixl import MemoryRange, PortCounts
from connector.ports.nixl_agent import RealNixlPort
from connector.ports.zmq_bridge import ZmqSideChannel
from connector.runtime.clock import NS_PER_SECOND, MonotonicClock
from connector.runtime.context import LocalRank
from connector.runtime.listener import HandshakeListener
from connector.runtime.messages import (
    LeaseComputing,
    LeaseGranted,
    Outcome,
    PeerAddress,
    ReceiveEnded,
    SendEnded,
    StartPull,
)
from connector.runtime.supervisor import Supervisor
from connector.runtime.tracked import Recorder
from connector.wire.handshake import encode_payload
from connector.wire.metadata import describe, encode_agent_metadata
from statemachine.failures import Failure
from statemachine.trace import TransitionRecord
from tests.rig.latent_cache import TOKENS, latent_cache
from tests.rig.pulls import one_group

LAYERS = 3
BLOCKS = 64
BLOCK_BYTES = 4096
HASH = "same-model"

T = TypeVar("T")


class ListSink:
    """Keeps trace records."""

    def __init__(self) -> None:
        self.records: list[TransitionRecord] = []

    def write(self, record: TransitionRecord) -> None:
        self.records.append(record)

    def close(self) -> None:
        return

    def path(self, machine: str, subject: str) -> list[str]:
        """The states that one instance went through."""
        states = [r.to_state for r in self.records if r.machine == machine and r.subject == subject]
        return [state for i, state in enumerate(states) if i == 0 or states[i - 1] != state]


@dataclass
class Engine:
    """One engine of one rank: memory, actors, and what they told the engine thread."""

    engine_id: str
    memory: npt.NDArray[np.uint8]
    supervisor: Supervisor
    port: RealNixlPort
    trace: ListSink
    outcomes: list[Outcome]
    failures: list[tuple[str, Failure]]
    crashes: list[tuple[str, BaseException]]
    incarnation: str = field(default_factory=lambda: uuid.uuid4().hex)
    listener: HandshakeListener | None = None

    @property
    def address(self) -> PeerAddress:
        assert self.listener is not None
        return PeerAddress(engine_id=self.engine_id, host="127.0.0.1", port=self.listener.port, tp_size=1)

    def blocks(self, ids: list[int]) -> npt.NDArray[np.uint8]:
        """Contents of blocks in all layers, shape [layers, blocks, bytes]."""
        return self.memory[:, ids, :]

    def counts(self) -> PortCounts:
        return self.port.counts()

    def received(self, request_id: str) -> ReceiveEnded | None:
        found = [o for o in self.outcomes if isinstance(o, ReceiveEnded) and o.request_id == request_id]
        assert len(found) <= 1, f"{request_id} was reported {len(found)} times"
        return found[0] if found else None

    def sent(self, request_id: str) -> SendEnded | None:
        found = [o for o in self.outcomes if isinstance(o, SendEnded) and o.request_id == request_id]
        assert len(found) <= 1, f"{request_id} was freed {len(found)} times"
        return found[0] if found else None

    # --- as the scheduler would ---------------------------------------------------------------------------------

    def lend(self, request_id: str, *, lease_seconds: float = 30.0) -> float:
        """Finish a prefill; returns when the lease ends, in this process's clock (seconds)."""
        self.supervisor.deliver(LeaseComputing(request_id=request_id))
        self.supervisor.deliver(LeaseGranted(request_id=request_id, lease_seconds=lease_seconds, blocks=1))
        return MonotonicClock().now_ns() / NS_PER_SECOND + lease_seconds

    def pull(
        self,
        request_id: str,
        peer: Engine | PeerAddress,
        local: list[int],
        remote: list[int],
        *,
        lease_expires_at: float | None = None,
        incarnation: str | None = None,
        awaited: bool = True,
        remote_request_id: str | None = None,
    ) -> None:
        address = peer.address if isinstance(peer, Engine) else peer
        known = peer.incarnation if isinstance(peer, Engine) and incarnation is None else incarnation
        self.supervisor.deliver(
            StartPull(
                request_id=request_id,
                peer=address,
                remote_request_id=remote_request_id or f"remote-{request_id}",
                groups=one_group(local, remote),
                num_tokens=None,
                remote_num_tokens=None,
                awaited=awaited,
                age_seconds=0.0,
                lease_expires_at=lease_expires_at,
                incarnation=known if lease_expires_at is not None else None,
            )
        )


@asynccontextmanager
async def engine(
    engine_id: str,
    *,
    options: ConnectorOptions | None = None,
    serves: bool = False,
    port: int = 0,
    incarnation: str | None = None,
    compatibility_hash: str = HASH,
    block_bytes: int = BLOCK_BYTES,
) -> AsyncIterator[Engine]:
    """Start one engine; its actors are stopped and its doors closed at the end."""
    memory = np.zeros((LAYERS, BLOCKS, block_bytes), np.uint8)
    regions, shapes = latent_cache(
        [memory[layer].ctypes.data for layer in range(LAYERS)],
        block_bytes=block_bytes,
        block_stride_bytes=block_bytes,
        num_blocks=BLOCKS,
    )
    layout = RankLayout(
        engine_id=engine_id,
        tp_rank=0,
        tp_size=1,
        dcp_size=1,
        pcp_size=1,
        regions=regions,
        kernel_block_size_tokens=TOKENS,
        kernel_blocks_per_block=1,
        layout_name="LBHNC",
        attention_backend="TEST",
    )
    nixl_port = RealNixlPort.open(uuid.uuid4().hex, [MemoryRange(memory.ctypes.data, memory.nbytes)], "DRAM")
    clock, trace, outcomes = MonotonicClock(), ListSink(), list[Outcome]()
    failures, crashes = list[tuple[str, Failure]](), list[tuple[str, BaseException]]()
    supervisor = Supervisor(
        options=options or ConnectorOptions(),
        local=LocalRank(layout=layout, shapes=shapes, compatibility_hash=compatibility_hash),
        nixl_port=nixl_port,
        side_channel=ZmqSideChannel(),
        clock=clock,
        recorder=Recorder(engine_id=engine_id, rank=0, role="worker", clock=clock, sink=trace),
        emit=outcomes.append,
        log_failure=lambda subject, failure: failures.append((subject, failure)),
        log_crash=lambda name, error: crashes.append((name, error)),
        jitter=random.Random(0),
    )
    made = Engine(engine_id, memory, supervisor, nixl_port, trace, outcomes, failures, crashes)
    if incarnation is not None:
        made.incarnation = incarnation
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(supervisor.run)
            if serves:
                metadata = encode_agent_metadata(describe(layout, nixl_port.agent_metadata))
                payload = encode_payload(compatibility_hash, metadata, made.incarnation)
                made.listener = HandshakeListener(
                    side_channel=ZmqSideChannel(),
                    host="127.0.0.1",
                    port=port,
                    payloads={(0, 0): payload},
                    clock=clock,
                    log_bad_frame=lambda detail: None,
                )
                await nursery.start(made.listener.run)
            try:
                yield made
            finally:
                if made.listener is not None:
                    made.listener.stop()
                supervisor.stop()
    finally:
        with trio.CancelScope(shield=True):
            await nixl_port.aclose(1.0)


async def until(found: Callable[[], T | None], seconds: float = 10.0) -> T:
    """Wait until `found` returns something true, and return it."""
    with trio.fail_after(seconds):
        while True:
            value = found()
            if value:
                return value
            await trio.sleep(0.002)
