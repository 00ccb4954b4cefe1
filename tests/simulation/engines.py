"""The engines of a simulated cluster: production actors on fake ports, and the scheduler of each as a script.

`Process` is one life of one engine: memory, clock, actors, listener. `Engine` is what outlives it: the block pool of
the scheduler and the poll of outcomes. `PrefillEngine` and `DecodeEngine` play the parts of vLLM's scheduler that the
connector meets; what they do that takes time is a script on the agenda. A block that is freed is overwritten at once
and handed out again first, so that whoever still reads or writes it is caught.

Any engine may die: its clients get an error, and it comes back with an empty cache.
"""

from __future__ import annotations

import enum
import heapq
import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import trio

from connector.config import ConnectorOptions
from connector.ports.nixl import MemoryRange
from connector.runtime.clock import NS_PER_SECOND, to_ns
from connector.runtime.context import LocalRank
from connector.runtime.listener import HandshakeListener
from connector.runtime.messages import (
    AbortPull,
    LeaseComputing,
    LeaseGranted,
    LeaseWithdrawn,
    Outcome,
    PeerAddress,
    QuarantineLifted,
    ReceiveEnded,
    RejectPull,
    SendEnded,
    StartPull,
    TrackLease,
)
from connector.runtime.supervisor import Supervisor
from connector.runtime.tracked import Recorder
from connector.wire.handshake import encode_payload
from connector.wire.metadata import describe, encode_agent_metadata
from statemachine import request
from statemachine.failures import BadParams, Failure
from statemachine.trace import TransitionRecord
from tests.rig.layouts import attention_rank, attention_shapes
from tests.rig.pulls import one_group
from tests.simulation.agenda import Agenda, Signal
from tests.simulation.fake_network import FakeNetwork, FakeSideChannel
from tests.simulation.fake_nixl import FakeNixlWorld
from tests.simulation.faults import ActiveFaults, Kind
from tests.simulation.oracles import Lent, Oracles, Pull, Words, expected_words

LAYERS = 3
BLOCKS = 64
BLOCK_WORDS = 16
WORD_BYTES = 8
BLOCK_BYTES = BLOCK_WORDS * WORD_BYTES
REQUEST_BLOCKS_MAX = 10
PORT = 5600
STEP_SECONDS_MAX = 0.005
DRIFT_PPB_MAX = 45_000
"""Two clocks drift apart by at most twice this, which is within what the product allows for."""
JUNK = np.uint64(0xEEEEEEEEEEEEEEEE)


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What all engines share."""

    agenda: Agenda
    network: FakeNetwork
    nixl: FakeNixlWorld
    faults: ActiveFaults
    oracles: Oracles
    options: ConnectorOptions
    trace: list[TransitionRecord]
    reads_inline: bool


class ProcessClock:
    """The clock of one process: trio's, from another zero, running a little fast or slow; its wall time jumps."""

    def __init__(self, offset_ns: int, drift_ppb: int) -> None:
        self._offset_ns = offset_ns
        self._drift_ppb = drift_ppb
        self.wall_error_seconds = 0.0

    def now_ns(self) -> int:
        true_ns = round(trio.current_time() * NS_PER_SECOND)
        return self._offset_ns + true_ns + true_ns * self._drift_ppb // NS_PER_SECOND

    def true_seconds(self, local_ns: int) -> float:
        """When, in trio's time, this clock shows `local_ns`."""
        return (local_ns - self._offset_ns) / (1 + self._drift_ppb / NS_PER_SECOND) / NS_PER_SECOND

    def ahead_by(self, offset_ns: int) -> ProcessClock:
        """The clock of another process on the same machine: at the same pace, from another zero."""
        return ProcessClock(self._offset_ns + offset_ns, self._drift_ppb)

    def wall(self) -> float:
        return 1.7e9 + trio.current_time() + self.wall_error_seconds


class Pool:
    """Free blocks; the lowest is handed out first."""

    def __init__(self) -> None:
        self._free = list(range(BLOCKS))

    def __len__(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        return [heapq.heappop(self._free) for _ in range(count)]

    def give(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            heapq.heappush(self._free, block)


class Variant(enum.Enum):
    """What an engine serves: all that are to work together the same."""

    SAME = "same"
    OTHER_MODEL = "another model"
    OTHER_BLOCKS = "blocks of another length"


class Owner(Protocol):
    """The engine that a process is a life of."""

    name: str

    def hear(self, outcome: Outcome) -> None:
        """The connector emitted an outcome."""


class Process:
    """One life of an engine. Its owner hears the outcomes, and nothing after the death.

    Args:
        blocks: of the KV cache.
        listener_offset_ns: how much the clock of the process that answers handshakes is ahead.
    """

    def __init__(
        self,
        around: Surroundings,
        engine: Owner,
        engine_id: str,
        life: int,
        chance: random.Random,
        *,
        variant: Variant = Variant.SAME,
        blocks: int = BLOCKS,
        listener_offset_ns: int = 0,
    ) -> None:
        self.engine_id = engine_id
        self.life = life
        self.variant = variant
        self.incarnation = f"{chance.getrandbits(128):032x}"
        self.memory: npt.NDArray[np.uint64] = np.full((LAYERS, blocks, BLOCK_WORDS), JUNK, np.uint64)
        self.clock = ProcessClock(chance.randrange(10**15), chance.randint(-DRIFT_PPB_MAX, DRIFT_PPB_MAX))
        self.listener_clock = self.clock.ahead_by(listener_offset_ns)
        self._is_dead = False
        self.has_ended = False
        self._blocks = blocks
        self._around = around
        self._engine = engine
        self._scope = trio.CancelScope()
        host = f"{engine.name}.sim"
        ranges = [MemoryRange(self.memory.ctypes.data, self.memory.nbytes)]
        name = f"{engine.name}.{life}"
        self.port = around.nixl.open(name, ranges, self.clock.now_ns, reads_inline=around.reads_inline)
        local = _local(engine_id, self.memory.ctypes.data, blocks, variant)
        recorder = Recorder(engine_id=engine_id, rank=0, role="worker", clock=self.clock, sink=self)
        self.supervisor = Supervisor(
            options=around.options,
            local=local,
            nixl_port=self.port,
            side_channel=FakeSideChannel(around.network, host),
            clock=self.clock,
            recorder=recorder,
            emit=self._emit,
            log_failure=lambda subject, failure: self._log_failure(subject, failure),
            log_crash=lambda actor, error: around.oracles.crash(engine.name, actor, error),
            jitter=random.Random(chance.getrandbits(64)),
        )
        self.agent_metadata = encode_agent_metadata(describe(local.layout, self.port.agent_metadata))
        self.listener = HandshakeListener(
            side_channel=FakeSideChannel(around.network, host),
            host=host,
            port=PORT,
            payloads={(0, 0): encode_payload(local.compatibility_hash, self.agent_metadata, self.incarnation)},
            clock=self.listener_clock,
            log_bad_frame=lambda detail: None,
        )

    @property
    def address(self) -> PeerAddress:
        return PeerAddress(engine_id=self.engine_id, host=f"{self._engine.name}.sim", port=PORT, tp_size=1)

    async def run(self) -> None:
        """Until `stop` or `kill`."""
        with self._scope:
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self.supervisor.run)
                    nursery.start_soon(self.listener.run)
            except Exception as error:
                self._around.oracles.crash(self._engine.name, "the supervisor or the listener", error)
        self.has_ended = True

    def stop(self) -> None:
        self.supervisor.stop()
        self.listener.stop()

    def has_died(self) -> bool:
        return self._is_dead

    def kill(self) -> None:
        self._is_dead = True
        self.port.kill()
        self._scope.cancel()

    def blocks_written_to(self) -> set[int]:
        """Blocks that READs may still write into."""
        base = self.memory.ctypes.data
        return {
            (to - base) // BLOCK_BYTES % self._blocks
            for read in self._around.nixl.reads_in_flight()
            if read.initiator is self.port
            for to, _, _ in read.pieces[read.copied :]
        }

    def write(self, record: TransitionRecord) -> None:
        if not self._is_dead:
            self._around.trace.append(record)
            if record.event == request.PeerReady.__name__ and record.to_state == request.State.READING.value:
                self._check_proof(record)

    def _check_proof(self, record: TransitionRecord) -> None:
        """The one look inside an actor: wrong by a clock's error, a proof would be caught by chance only."""
        assert record.peer is not None
        proof = self.supervisor._peers[record.peer]._runs[record.subject].machine.value.proof
        assert proof is not None
        self._around.oracles.check_proof(record.subject, self.clock.true_seconds(proof.proven_until_ns))

    def close(self) -> None:
        """The sink of the trace has nothing to close."""

    def _emit(self, outcome: Outcome) -> None:
        if not self._is_dead:
            self._engine.hear(outcome)

    def _log_failure(self, subject: str, failure: Failure) -> None:
        if not self._is_dead:
            self._around.oracles.note_failure(self._engine.name, subject, failure)


def _local(engine_id: str, address: int, blocks: int, variant: Variant) -> LocalRank:
    word_bytes = WORD_BYTES // 2 if variant is Variant.OTHER_BLOCKS else WORD_BYTES
    shapes = attention_shapes(layers=LAYERS, heads=1, head_bytes=word_bytes)
    layout = attention_rank(
        engine_id, shapes, address=address, blocks=blocks, tokens=BLOCK_WORDS, stride_bytes=BLOCK_BYTES
    )
    compatibility_hash = "another-model" if variant is Variant.OTHER_MODEL else "same-model"
    return LocalRank(layout=layout, shapes=shapes, compatibility_hash=compatibility_hash)


@dataclass
class _Entry:
    """A request that waits for blocks."""

    count: int
    served: Signal
    blocks: list[int] | None = None


class Engine:
    """A scheduler: a pool, and outcomes that are looked at once a step. Its first life begins at once."""

    def __init__(self, around: Surroundings, name: str, chance: random.Random, variant: Variant = Variant.SAME) -> None:
        self.around = around
        self.agenda = around.agenda
        self.name = name
        self.chance = chance
        self.process: Process
        self.pool: Pool
        self._outcomes: deque[Outcome] = deque()
        self._polls = False
        self._queue: deque[_Entry] = deque()
        self._lives = 0
        self.start(name, variant)

    def start(self, engine_id: str, variant: Variant = Variant.SAME) -> None:
        """A new life, with an empty cache."""
        self._lives += 1
        self.process = Process(self.around, self, engine_id, self._lives, self.chance, variant=variant)
        self.pool = Pool()

    def crash(self) -> None:
        """The process is gone, and everybody who waits for it is told."""
        self.process.kill()
        self._outcomes.clear()
        queue, self._queue = self._queue, deque()
        for entry in queue:
            entry.served.set()

    async def run(self) -> None:
        """Until the process stops or dies."""
        await self.process.run()

    def step_seconds(self) -> float:
        """How long until the engine's next step."""
        return self.chance.uniform(0.0, STEP_SECONDS_MAX)

    async def take(self, process: Process, count: int) -> list[int] | None:
        """Blocks for a request of this life, first come, first served. None: it has ended meanwhile."""
        entry = _Entry(count, Signal(self.agenda))
        self._queue.append(entry)
        self._serve_queue()
        await entry.served.wait()
        return None if process.has_died() else entry.blocks

    def give(self, blocks: list[int]) -> None:
        self.around.oracles.check_unwritten(self.name, blocks, self.process.blocks_written_to(), "frees")
        self.process.memory[:, blocks, :] = JUNK
        self.pool.give(blocks)
        self._serve_queue()

    def _serve_queue(self) -> None:
        while self._queue and self._queue[0].count <= len(self.pool):
            entry = self._queue.popleft()
            entry.blocks = self.pool.take(entry.count)
            self.around.oracles.check_unwritten(self.name, entry.blocks, self.process.blocks_written_to(), "hands out")
            entry.served.set()

    # --- outcomes ---------------------------------------------------------------------------------------------------

    def hear(self, outcome: Outcome) -> None:
        """The connector emitted an outcome; the scheduler learns of it with its next step."""
        self._outcomes.append(outcome)
        if not self._polls:
            self._polls = True
            stopped = self.around.faults.hits(Kind.STOP_POLLING, self.name)
            next_step = trio.current_time() + self.step_seconds()
            at = max(next_step, stopped.end_seconds) if stopped is not None else next_step
            self.agenda.at(at, self._poll)

    def _poll(self) -> None:
        self._polls = False
        while self._outcomes:
            self.act_on(self._outcomes.popleft())

    def act_on(self, outcome: Outcome) -> None:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Prefilled:
    """What P's answer carries to the client. `words` is the KV of the prompt, [layers, blocks, words of a block]."""

    address: PeerAddress
    engine: str
    owner: str
    request_id: str
    content: int
    words: Words
    blocks: list[int]
    lease_expires_at: float
    lease_ends_seconds: float
    """The same in true time, which only the simulation knows."""
    incarnation: str


class PrefillEngine(Engine):
    """Computes prompts and lends their blocks."""

    def __init__(self, around: Surroundings, name: str, chance: random.Random, variant: Variant = Variant.SAME) -> None:
        super().__init__(around, name, chance, variant)
        self._blocks: dict[str, list[int]] = {}

    @property
    def owner(self) -> str:
        """Who lends: one life of this engine."""
        return f"{self.name}.{self.process.life}"

    async def prefill(self, request_id: str, content: int, blocks: int) -> Prefilled | None:
        """Compute a prompt. None: the engine died or the request was given up before it was through."""
        process = self.process
        if process.has_died():
            return None
        taken = await self.take(process, blocks)
        if taken is None:
            return None
        self.around.oracles.lend(Lent(request_id=request_id, owner=self.owner, prefill=self.name))
        process.supervisor.deliver(LeaseComputing(request_id=request_id))
        await self.agenda.sleep(self.chance.uniform(0.001, 0.04))
        if process.has_died():
            return None
        if self.chance.random() < 0.03:
            process.supervisor.deliver(LeaseWithdrawn(request_id=request_id))
            self.give(taken)
            return None
        words = expected_words(content, 0, (LAYERS, blocks, BLOCK_WORDS))
        # Another model computes something else from the same prompt.
        process.memory[:, taken, :] = words if process.variant is Variant.SAME else ~words
        return self._grant(process, request_id, content, words, taken)

    def _grant(self, process: Process, request_id: str, content: int, words: Words, blocks: list[int]) -> Prefilled:
        """The worker hears of the grant with the next step, perhaps later than the client has its answer."""
        lease_seconds = self.around.options.kv_lease_duration
        self._blocks[request_id] = blocks
        granted_ns = process.clock.now_ns()
        ends_seconds = process.clock.true_seconds(granted_ns + to_ns(lease_seconds))
        lent = self.around.oracles.leases[self.owner, request_id]
        lent.is_granted, lent.granted_seconds, lent.ends_seconds = True, trio.current_time(), ends_seconds
        granted = LeaseGranted(request_id=request_id, lease_seconds=lease_seconds, blocks=len(blocks))
        self.agenda.after(self.step_seconds(), lambda: process.supervisor.deliver(granted))
        return Prefilled(
            address=process.address,
            engine=self.name,
            owner=self.owner,
            request_id=request_id,
            content=content,
            words=words,
            blocks=blocks,
            lease_expires_at=granted_ns / NS_PER_SECOND + lease_seconds,
            lease_ends_seconds=ends_seconds,
            incarnation=process.incarnation,
        )

    def hear(self, outcome: Outcome) -> None:
        if isinstance(outcome, SendEnded) and not self.around.oracles.free(self.owner, outcome.request_id):
            return
        super().hear(outcome)

    def act_on(self, outcome: Outcome) -> None:
        if isinstance(outcome, SendEnded):
            self.give(self._blocks.pop(outcome.request_id))

    def crash(self) -> None:
        self.around.oracles.forget_leases(self.owner)
        self._blocks.clear()
        super().crash()


class DecodeEngine(Engine):
    """Pulls KV and decodes from it."""

    def __init__(self, around: Surroundings, name: str, chance: random.Random) -> None:
        self._ended: dict[str, Signal] = {}
        self._outcome_of: dict[str, ReceiveEnded] = {}
        self._quarantined: list[list[int]] = []
        self._malformed: set[str] = set()
        super().__init__(around, name, chance)

    def crash(self) -> None:
        self.around.oracles.forget_pulls(self.name)
        ended, self._ended = self._ended, {}
        self._outcome_of.clear()
        self._quarantined.clear()
        self._malformed.clear()
        super().crash()
        for signal in ended.values():
            signal.set()

    async def serve_again(self, request_id: str, source: Prefilled, process: Process) -> None:
        """A router repeats itself with parameters that `process` has used; the blocks may be somebody else's by now.

        Not after a restart: like another engine, the next life cannot know what this one has released.
        """
        if self.around.faults.hits(Kind.ROUTER_RETRY, self.name) is not None:
            await self.agenda.sleep(self.chance.uniform(0.0, 0.3))
            if process.has_died() or source.request_id in self._malformed:
                return
            self._track(request_id, source)
            await self.serve(request_id, source, is_repeated=True)

    def announce(self, request_ids: list[str], source: Prefilled) -> None:
        """Samples of one prompt have arrived, together, before one of them can let go of the blocks.

        When their parameters are malformed, nobody can tell whose blocks they want: no peer hears of them.
        """
        if self.around.faults.hits(Kind.BAD_PARAMS, self.name) and self.chance.random() < 0.5:
            self._malformed.add(source.request_id)
            return
        for request_id in request_ids:
            self.around.oracles.take_over(source.owner, source.request_id, self.name, request_id)
            self._track(request_id, source)

    def _track(self, request_id: str, source: Prefilled) -> None:
        self.process.supervisor.deliver(
            TrackLease(request_id=request_id, peer=source.address, remote_request_id=source.request_id)
        )

    async def serve(self, request_id: str, source: Prefilled, *, is_repeated: bool = False) -> None:
        """One announced request, until its blocks are free again or its engine is dead."""
        process = self.process
        heard_seconds = trio.current_time()
        if self.chance.random() < 0.2:
            await self.agenda.sleep(self.chance.uniform(0.0, 2.0))  # it waits in the queue
        if (queue := self.around.faults.hits(Kind.LONG_QUEUE, self.name)) is not None:
            await self.agenda.sleep(max(0.0, queue.end_seconds - trio.current_time()))
        if process.has_died():
            return
        kind = self.chance.random()
        cached = self.chance.randint(0, len(source.blocks)) if kind < 0.2 else 0
        if kind > 0.92:
            if source.request_id not in self._malformed:
                self._settle_without_reading(request_id, source, heard_seconds)
            return
        blocks = await self.take(process, len(source.blocks) - cached)
        if blocks is not None:
            await self._load(process, request_id, source, cached, blocks, heard_seconds, is_repeated=is_repeated)

    def _settle_without_reading(self, request_id: str, source: Prefilled, heard_seconds: float) -> None:
        """Everything is cached, or the client left before the request was scheduled."""
        self._start(request_id, source, 0, [], heard_seconds, awaited=False)

    async def _load(
        self,
        process: Process,
        request_id: str,
        source: Prefilled,
        cached: int,
        blocks: list[int],
        heard_seconds: float,
        *,
        is_repeated: bool,
    ) -> None:
        ended = self._ended[request_id] = Signal(self.agenda)
        pull = self._start(request_id, source, cached, blocks, heard_seconds, awaited=True, is_repeated=is_repeated)
        stormy = self.around.faults.hits(Kind.ABORT, self.name) is not None
        if stormy or self.chance.random() < 0.03:
            await ended.wait_at_most(self.chance.choice([0.0, 0.0003, 0.002, 0.1, 1.0]) * self.chance.random())
            self._abort(process, pull)
        await ended.wait()
        if process.has_died():
            return
        outcome = self._outcome_of.pop(request_id)
        if outcome.quarantined:
            self._quarantined.append(blocks)
            return
        words = source.words[:, cached:, :]
        if outcome.failure is not None:  # recomputed here, or another request's
            words = expected_words(~source.content & 0xFFFFFFFF, 0, (LAYERS, len(blocks), BLOCK_WORDS))
            process.memory[:, blocks, :] = words
        await self._decode(process, pull, words)

    def _start(
        self,
        request_id: str,
        source: Prefilled,
        cached: int,
        blocks: list[int],
        heard_seconds: float,
        *,
        awaited: bool,
        is_repeated: bool = False,
    ) -> Pull:
        now = trio.current_time()
        pull = Pull(
            request_id=request_id,
            decode=self.name,
            prefill=source.engine,
            blocks=blocks,
            awaited=awaited,
            started_seconds=now,
            lease_ends_seconds=source.lease_ends_seconds,
            owner=source.owner,
            remote_request_id=source.request_id,
            may_fail=is_repeated,
        )
        self.around.oracles.start(pull)
        remote_block_ids = source.blocks[: cached + len(blocks)]
        if source.request_id in self._malformed:
            pull.has_bad_params = pull.may_fail = True
            failure = BadParams(field="remote_block_ids", expected="numbers", found="words")
            self.process.supervisor.deliver(RejectPull(request_id=request_id, local_block_ids=blocks, failure=failure))
            return pull
        if awaited and blocks and self.around.faults.hits(Kind.BAD_PARAMS, self.name):
            pull.has_bad_params = pull.may_fail = True
            remote_block_ids = [*remote_block_ids[:-1], BLOCKS + self.chance.randrange(BLOCKS)]
        self.process.supervisor.deliver(
            StartPull(
                request_id=request_id,
                peer=source.address,
                remote_request_id=source.request_id,
                groups=one_group(blocks, remote_block_ids, local_first=cached) if awaited else (),
                num_tokens=None,
                remote_num_tokens=None,
                awaited=awaited,
                age_seconds=now - heard_seconds,
                lease_expires_at=source.lease_expires_at,
                incarnation=source.incarnation,
            )
        )
        return pull

    def _abort(self, process: Process, pull: Pull) -> None:
        if not process.has_died():
            pull.is_aborted = True
            process.supervisor.deliver(AbortPull(request_id=pull.request_id))

    async def _decode(self, process: Process, pull: Pull, words: Words) -> None:
        """Decode for a while; the KV must be right from the beginning to the end."""
        for when in ("at the start of decoding", "when decoding ended"):
            self.around.oracles.check_bytes(pull, process.memory[:, pull.blocks, :], words, when)
            await self.agenda.sleep(self.chance.uniform(0.0, 0.15))
            if process.has_died():
                return
        self.give(pull.blocks)

    def hear(self, outcome: Outcome) -> None:
        if isinstance(outcome, ReceiveEnded):
            self.around.oracles.report(outcome.request_id, outcome.failure)
        super().hear(outcome)

    def act_on(self, outcome: Outcome) -> None:
        match outcome:
            case ReceiveEnded(request_id=request_id):
                waiting = self._ended.pop(request_id, None)
                if waiting is not None:
                    self._outcome_of[request_id] = outcome
                    waiting.set()
            case QuarantineLifted(local_block_ids=blocks):
                if blocks in self._quarantined:
                    self._quarantined.remove(blocks)
                    self.give(list(blocks))
                else:
                    process = self.process
                    self.agenda.after(STEP_SECONDS_MAX, lambda: self._lift_later(process, blocks))
            case _:
                pass

    def _lift_later(self, process: Process, blocks: list[int]) -> None:
        """The request's script has not seen its end yet."""
        if process.has_died():
            return
        if blocks in self._quarantined:
            self._quarantined.remove(blocks)
            self.give(list(blocks))
        else:
            self.around.oracles.complain("leaks", f"{self.name}: blocks {blocks} were never quarantined")
