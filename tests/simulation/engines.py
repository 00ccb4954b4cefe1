"""The engines of a simulated cluster: production actors on fake ports, and the scheduler of each as a script.

`Engine` is what outlives the lives of an engine (`process`): the block pool of the scheduler and the poll of worker
events. `PrefillEngine` and `DecodeEngine` play the parts of vLLM's scheduler that the connector meets; what they do
that takes time is a script on the agenda. A block that is freed is overwritten at once and handed out again first, so
that whoever still reads or writes it is caught.

What the scheduler decides goes to all ranks. As in vLLM, a request has been received, or sent, when all ranks have said
so; it was not received when any of them failed, and a block is kept from the pool for as long as any rank's READs may
write into it.

Any engine may die: its clients get an error, and it comes back with an empty cache.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import msgspec
import trio

from connector.protocol import (
    AbortPull,
    GroupPull,
    LeaseComputing,
    LeaseGranted,
    LeaseWithdrawn,
    PeerAddress,
    QuarantineLifted,
    ReceiveEnded,
    RejectPull,
    ReleaseUnread,
    SendEnded,
    StartPull,
    TrackLease,
    WorkerEvent,
    WorkerStopped,
)
from statemachine.failures import BadParams, Failure
from statemachine.lease import LeaseName
from statemachine.quarantine import limit_of
from tests.simulation.agenda import Signal
from tests.simulation.faults import Kind
from tests.simulation.model import (
    WINDOW_TOKENS,
    Prompt,
    Table,
    block_counts,
    tables,
)
from tests.simulation.oracles import Lent, Pull
from tests.simulation.process import Process, Surroundings, Variant
from tests.simulation.shapes import BLOCK_TOKENS, EngineShape, SecondGroup

POOL_TOKENS = 1024
"""What fits into the blocks of an engine."""
REQUEST_BLOCKS_MAX = 10
"""Of the usual size."""
STEP_SECONDS_MAX = 0.005
QUEUE_LEASES = 3.2
"""How many lease times a request waits in the queue of a decode engine that is overrun."""
OVERRUN_SHARE = 0.006
WRONG_TP_SIZES = (1, 2, 3, 4, 8, 1024)


def prompt_tokens(number: int, blocks: int) -> int:
    """How long the prompt of a request is that fills `blocks` of the usual size, the last one more or less."""
    return blocks * BLOCK_TOKENS - number * 7 % BLOCK_TOKENS


class Pool:
    """Free blocks; the lowest is handed out first."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._free = list(range(blocks))

    def __len__(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        return [heapq.heappop(self._free) for _ in range(count)]

    def give(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            heapq.heappush(self._free, block)


@dataclass
class _Entry:
    """A request that waits for blocks."""

    count: int
    served: Signal
    blocks: list[int] | None = None


class Engine:
    """A scheduler: a pool, and worker events that are looked at once a step. Its first life begins at once."""

    def __init__(self, around: Surroundings, name: str, chance: random.Random, variant: Variant = Variant.SAME) -> None:
        self.around = around
        self.agenda = around.agenda
        self.name = name
        self.chance = chance
        self.process: Process
        self.pool: Pool
        self.shape = around.engines.get(name, EngineShape())
        self._events: deque[tuple[int, WorkerEvent]] = deque()
        self._polls = False
        self._queue: deque[_Entry] = deque()
        self._lives = 0
        self.lent_prefills = 0
        """Those that are lent, or were accepted and will be."""
        self.start(name, variant)

    def start(self, engine_id: str, variant: Variant = Variant.SAME) -> None:
        """A new life, with an empty cache."""
        self._lives += 1
        self.pool = Pool(POOL_TOKENS // self.shape.block_tokens)
        self.process = Process(
            self.around, self, engine_id, self._lives, self.chance, blocks=self.pool.blocks, variant=variant
        )

    def crash(self) -> None:
        """The process is gone, and everybody who waits for it is told."""
        self.process.kill()
        self._events.clear()
        self.lent_prefills = 0
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
        for rank in self.process.ranks:
            rank.memory.forget(blocks)
        self.pool.give(blocks)
        self._serve_queue()

    def _serve_queue(self) -> None:
        while self._queue and self._queue[0].count <= len(self.pool):
            entry = self._queue.popleft()
            entry.blocks = self.pool.take(entry.count)
            self.around.oracles.check_unwritten(self.name, entry.blocks, self.process.blocks_written_to(), "hands out")
            entry.served.set()

    # --- worker events ---------------------------------------------------------------------------------------------

    def hear(self, tp_rank: int, event: WorkerEvent) -> None:
        """The connector emitted a worker event; the scheduler learns of it with its next step."""
        self._events.append((tp_rank, event))
        if not self._polls:
            self._polls = True
            stopped = self.around.faults.hits(Kind.STOP_POLLING, self.name)
            next_step = trio.current_time() + self.step_seconds()
            at = max(next_step, stopped.end_seconds) if stopped is not None else next_step
            self.agenda.at(at, self._poll)

    def _poll(self) -> None:
        self._polls = False
        while self._events:
            self.act_on(*self._events.popleft())

    def act_on(self, tp_rank: int, event: WorkerEvent) -> None:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Prefilled:
    """What P's answer carries to the client, and what nobody but the simulation knows."""

    address: PeerAddress
    engine: str
    owner: str
    lease: LeaseName
    prompt: Prompt
    tables: tuple[Table, ...]
    pool_blocks: int
    """Ids of blocks are below this."""

    @property
    def request_id(self) -> str:
        return self.lease.request_id


class PrefillEngine(Engine):
    """Computes prompts and lends their blocks."""

    def __init__(self, around: Surroundings, name: str, chance: random.Random, variant: Variant = Variant.SAME) -> None:
        super().__init__(around, name, chance, variant)
        self._blocks: dict[str, list[int]] = {}
        self._still_lending: dict[str, set[int]] = {}
        """The ranks on which a lease has not ended."""

    def start(self, engine_id: str, variant: Variant = Variant.SAME) -> None:
        # As in production: no later life repeats a number.
        self._lease_numbers = itertools.count(1 + self.chance.getrandbits(48))
        super().start(engine_id, variant)

    @property
    def owner(self) -> str:
        """Who lends: one life of this engine."""
        return f"{self.name}.{self.process.life}"

    async def prefill(self, request_id: str, content: int, tokens: int) -> Prefilled | None:
        """Compute a prompt. None: the engine died, the request was given up before it was through, or a worker of the
        engine cannot serve any more, and the answer says nothing of blocks."""
        process = self.process
        if process.has_died() or process.refuses_because is not None or not process.accepts_prefills:
            return None
        self.lent_prefills += 1
        prefilled = await self._prefill(process, request_id, content, tokens)
        if prefilled is None and not process.has_died():
            self.lent_prefills -= 1
        return prefilled

    async def _prefill(self, process: Process, request_id: str, content: int, tokens: int) -> Prefilled | None:
        """One that was accepted."""
        counts = block_counts(self.around.model, self.shape, tokens)
        taken = await self.take(process, sum(count for _, count in counts))
        if taken is None:
            return None
        lease = LeaseName(request_id, next(self._lease_numbers))
        self.around.oracles.lend(
            [
                Lent(
                    request_id=request_id,
                    number=lease.number,
                    owner=self.owner,
                    prefill=self.name,
                    tp_rank=rank.tp_rank,
                )
                for rank in process.ranks
            ]
        )
        process.deliver(LeaseComputing(lease=lease))
        await self.agenda.sleep(self.chance.uniform(0.001, 0.04))
        if process.has_died():
            return None
        if self.chance.random() < 0.03 or process.refuses_because is not None or not process.grants:
            process.deliver(LeaseWithdrawn(lease=lease))
            self.give(taken)
            return None
        prompt = Prompt(self.around.model, content, tokens)
        written = prompt if process.variant is Variant.SAME else prompt.otherwise()
        of_groups = tables(counts, taken)
        for rank in process.ranks:
            rank.memory.write(of_groups, written)
        return self._grant(process, lease, prompt, of_groups, taken)

    def _grant(
        self, process: Process, lease: LeaseName, prompt: Prompt, of_groups: tuple[Table, ...], blocks: list[int]
    ) -> Prefilled:
        """The workers hear of the grant with the next step, perhaps later than the client has its answer."""
        request_id = lease.request_id
        self._blocks[request_id] = blocks
        self._still_lending[request_id] = {rank.tp_rank for rank in process.ranks}
        self.around.oracles.grant(self.owner, request_id, [rank.clock.now_ns() for rank in process.ranks])
        granted = LeaseGranted(lease=lease, blocks=len(blocks))
        block_ids = [table.blocks for table in of_groups]

        def grant() -> None:
            for rank in process.ranks:
                rank.grant(granted, block_ids)

        self.agenda.after(self.step_seconds(), grant)
        return Prefilled(
            address=process.address,
            engine=self.name,
            owner=self.owner,
            lease=lease,
            prompt=prompt,
            tables=of_groups,
            pool_blocks=self.pool.blocks,
        )

    def hear(self, tp_rank: int, event: WorkerEvent) -> None:
        if isinstance(event, SendEnded):
            now_ns = self.process.ranks[tp_rank].clock.now_ns()
            if not self.around.oracles.free(self.owner, event.lease.request_id, tp_rank, now_ns, expired=event.expired):
                return
        super().hear(tp_rank, event)

    def act_on(self, tp_rank: int, event: WorkerEvent) -> None:
        """The blocks are free again when the lease has ended on every rank."""
        if isinstance(event, WorkerStopped):
            self.process.stop_serving(event.reason)
        elif isinstance(event, SendEnded):
            still_lending = self._still_lending[event.lease.request_id]
            still_lending.discard(tp_rank)
            if not still_lending:
                del self._still_lending[event.lease.request_id]
                self.lent_prefills -= 1
                self.give(self._blocks.pop(event.lease.request_id))

    def crash(self) -> None:
        self.around.oracles.forget_leases(self.owner)
        self._blocks.clear()
        self._still_lending.clear()
        super().crash()


@dataclass(kw_only=True)
class _Receive:
    """What the ranks have said of a request whose KV is awaited.

    Attributes:
        awaited_from: ranks that have not reported.
        written_by: ranks whose READs may still write into the blocks, as far as they have said.
        lifted_early: ranks that have lifted a quarantine before they said that there is one; vLLM learns of both at
            once, and only their balance counts.
        failure: that of the first rank that failed.
        was_quarantined: whether it ended with READs in flight. Its request is gone then, and so is its script's claim
            to the blocks: the last rank's lift gives them back, perhaps before the script has run again.
    """

    blocks: list[int]
    ended: Signal
    awaited_from: set[int]
    written_by: set[int] = field(default_factory=set)
    lifted_early: set[int] = field(default_factory=set)
    failure: Failure | None = None
    was_quarantined: bool = False


class DecodeEngine(Engine):
    """Pulls KV and decodes from it."""

    def __init__(self, around: Surroundings, name: str, chance: random.Random) -> None:
        self._receives: dict[str, _Receive] = {}
        self._quarantined: list[_Receive] = []
        """Those that have ended with READs in flight."""
        self._malformed: set[str] = set()
        self._announced: dict[str, float] = {}
        """When each request was announced."""
        self._wrong_sizes: set[str] = set()
        super().__init__(around, name, chance)

    def crash(self) -> None:
        self.around.oracles.forget_pulls(self.name)
        receives, self._receives = self._receives, {}
        self._quarantined.clear()
        self._malformed.clear()
        super().crash()
        for receive in receives.values():
            receive.ended.set()

    async def serve_again(self, request_id: str, source: Prefilled) -> None:
        """A router repeats itself with parameters that were used before; the blocks may be somebody else's by now."""
        if source.request_id in self._malformed or self.process.has_died():
            return
        self.around.oracles.reuse(source.owner, source.request_id)
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
            ranks = self.shape.tp_size
            self.around.oracles.take_over(source.owner, source.request_id, self.name, request_id, ranks)
            self._track(request_id, source)

    def _track(self, request_id: str, source: Prefilled) -> None:
        self._announced[request_id] = trio.current_time()
        self.process.deliver(
            TrackLease(request_id=request_id, peer=source.address, lease=source.lease, age_seconds=0.0)
        )

    async def serve_misdirected(self, request_id: str, source: Prefilled) -> None:
        """One request whose client says other sizes of the prefill engine than those that it has."""
        sizes = [size for size in WRONG_TP_SIZES if size != source.address.tp_size]
        address = msgspec.structs.replace(source.address, tp_size=self.chance.choice(sizes))
        self._wrong_sizes.add(request_id)
        misdirected = replace(source, address=address)
        self._track(request_id, misdirected)
        await self.serve(request_id, misdirected)

    def _is_malformed(self, request_id: str, source: Prefilled) -> bool:
        """Whether its parameters cannot be read. One with wrong sizes has its own, and was announced."""
        return source.request_id in self._malformed and request_id not in self._wrong_sizes

    async def serve(
        self, request_id: str, source: Prefilled, *, is_repeated: bool = False, is_urgent: bool = False
    ) -> None:
        """One announced request, until its blocks are free again or its engine is dead."""
        process = self.process
        await self._wait_in_the_queue(is_urgent=is_urgent)
        if process.has_died():
            return
        kind = self.chance.random()
        tokens = source.prompt.tokens
        cached = self.chance.randint(0, self.shape.blocks_of(tokens)) if kind < 0.2 else 0
        if kind > 0.92:
            if not self._is_malformed(request_id, source):
                self._need_nothing(request_id, source)
            return
        counts = block_counts(self.around.model, self.shape, tokens, cached)
        blocks = await self.take(process, sum(count for _, count in counts))
        if blocks is not None:
            await self._load(process, request_id, source, tables(counts, blocks), is_repeated=is_repeated)

    async def _wait_in_the_queue(self, *, is_urgent: bool) -> None:
        kind = self.chance.random()
        if kind < 0.2:
            await self.agenda.sleep(self.chance.uniform(0.0, 2.0))
        elif kind > 1.0 - OVERRUN_SHARE and not is_urgent:
            self.around.oracles.coverage["queued for three lease times"] += 1
            await self.agenda.sleep(QUEUE_LEASES * self.around.options.kv_lease_duration)
        if (queue := self.around.faults.hits(Kind.LONG_QUEUE, self.name)) is not None:
            await self.agenda.sleep(max(0.0, queue.end_seconds - trio.current_time()))

    def _need_nothing(self, request_id: str, source: Prefilled) -> None:
        """Everything is cached, or the client left before the request was scheduled."""
        pull = self._note_start(request_id, source, (), awaited=False)
        self.process.deliver(
            ReleaseUnread(
                request_id=request_id,
                peer=source.address,
                lease=source.lease,
                age_seconds=pull.started_seconds - pull.announced_seconds,
            )
        )

    async def _load(
        self,
        process: Process,
        request_id: str,
        source: Prefilled,
        mine: tuple[Table, ...],
        *,
        is_repeated: bool,
    ) -> None:
        pull = self._start(request_id, source, mine, is_repeated=is_repeated)
        ended = Signal(self.agenda)
        ranks = {rank.tp_rank for rank in process.ranks}
        receive = self._receives[request_id] = _Receive(blocks=pull.blocks, ended=ended, awaited_from=ranks)
        stormy = self.around.faults.hits(Kind.ABORT, self.name) is not None
        if stormy or self.chance.random() < 0.03:
            await ended.wait_at_most(self.chance.choice([0.0, 0.0003, 0.002, 0.1, 1.0]) * self.chance.random())
            self._abort(process, pull)
        await ended.wait()
        if process.has_died() or receive.was_quarantined:
            return
        prompt = source.prompt
        if receive.failure is not None:  # recomputed here, or another request's
            prompt = prompt.otherwise()
            for rank in process.ranks:
                rank.memory.write(mine, prompt)
        await self._decode(process, pull, mine, prompt)

    def _note_start(
        self,
        request_id: str,
        source: Prefilled,
        mine: tuple[Table, ...],
        *,
        awaited: bool,
        is_repeated: bool = False,
    ) -> Pull:
        now = trio.current_time()
        announced_seconds = self._announced.pop(request_id, now)
        has_wrong_sizes = request_id in self._wrong_sizes
        blocks = [block for table in mine for block in table.blocks]
        pull = Pull(
            request_id=request_id,
            decode=self.name,
            prefill=source.engine,
            ranks=self.shape.tp_size,
            blocks=blocks,
            awaited=awaited,
            announced_seconds=announced_seconds,
            started_seconds=now,
            owner=source.owner,
            remote_request_id=source.request_id,
            may_fail=is_repeated or has_wrong_sizes,
            has_wrong_sizes=has_wrong_sizes and awaited and bool(blocks),
        )
        self.around.oracles.start(pull)
        return pull

    def _start(self, request_id: str, source: Prefilled, mine: tuple[Table, ...], *, is_repeated: bool) -> Pull:
        pull = self._note_start(request_id, source, mine, awaited=True, is_repeated=is_repeated)
        if self._is_malformed(request_id, source):
            pull.has_bad_params = pull.may_fail = True
            failure = BadParams(field="remote_block_ids", expected="numbers", found="words")
            self.process.deliver(RejectPull(request_id=request_id, local_block_ids=pull.blocks, failure=failure))
            return pull
        groups = [self._group_pull(*each) for each in zip(self.around.model.groups, mine, source.tables, strict=True)]
        if pull.blocks and self.around.faults.hits(Kind.BAD_PARAMS, self.name):
            pull.has_bad_params = pull.may_fail = True
            groups[0].remote_block_ids[-1] = source.pool_blocks + self.chance.randrange(source.pool_blocks)
        self.process.deliver(
            StartPull(
                request_id=request_id,
                peer=source.address,
                lease=source.lease,
                groups=tuple(groups),
                num_tokens=source.prompt.tokens,
                remote_num_tokens=source.prompt.tokens,
                age_seconds=pull.started_seconds - pull.announced_seconds,
            )
        )
        return pull

    def _group_pull(self, group: SecondGroup, mine: Table, theirs: Table) -> GroupPull:
        return GroupPull(
            local_block_ids=mine.blocks,
            local_first=mine.first,
            remote_block_ids=list(theirs.blocks),
            window_tokens=WINDOW_TOKENS if group is SecondGroup.WINDOW else None,
        )

    def _abort(self, process: Process, pull: Pull) -> None:
        if not process.has_died():
            pull.is_aborted = True
            process.deliver(AbortPull(request_id=pull.request_id))

    async def _decode(self, process: Process, pull: Pull, mine: tuple[Table, ...], prompt: Prompt) -> None:
        """Decode for a while; the KV must be right from the beginning to the end."""
        for when in ("at the start of decoding", "when decoding ended"):
            for rank in process.ranks:
                wrong = rank.memory.wrong_blocks(mine, prompt)
                self.around.oracles.check_bytes(pull, rank.tp_rank, wrong, when)
            await self.agenda.sleep(self.chance.uniform(0.0, 0.15))
            if process.has_died():
                return
        self.give(pull.blocks)

    def hear(self, tp_rank: int, event: WorkerEvent) -> None:
        oracles = self.around.oracles
        match event:
            case ReceiveEnded():
                oracles.report(event.request_id, tp_rank, event.failure)
                if event.quarantined:
                    self._keep_aside(tp_rank, len(event.local_block_ids))
            case QuarantineLifted():
                self._keep_aside(tp_rank, -len(event.local_block_ids))
            case _:
                pass
        super().hear(tp_rank, event)

    def _keep_aside(self, tp_rank: int, blocks: int) -> None:
        limit_blocks = limit_of(self.around.options_of(self.name).quarantine_limit, self.pool.blocks)
        self.around.oracles.keep_aside(self.name, tp_rank, blocks, limit_blocks)

    def act_on(self, tp_rank: int, event: WorkerEvent) -> None:
        match event:
            case ReceiveEnded():
                self._end_receive(tp_rank, event)
            case QuarantineLifted(local_block_ids=blocks):
                self._lift(tp_rank, blocks)
            case _:
                pass

    def _end_receive(self, tp_rank: int, event: ReceiveEnded) -> None:
        """One rank has reported; the last one ends the request."""
        receive = self._receives.get(event.request_id)
        if receive is None:
            return
        receive.awaited_from.discard(tp_rank)
        if event.quarantined:
            if event.local_block_ids != receive.blocks:  # vLLM keeps those aside that are named
                named = f"{event.local_block_ids} of {receive.blocks}"
                self.around.oracles.complain("block reuse", f"{event.request_id}: {named} are named in quarantine")
            if tp_rank not in receive.lifted_early:
                receive.written_by.add(tp_rank)
        if event.failure is None:
            self._zero(tp_rank, event)
        elif receive.failure is None:
            receive.failure = event.failure
        if not receive.awaited_from:
            del self._receives[event.request_id]
            if receive.written_by:
                receive.was_quarantined = True
                self._quarantined.append(receive)
            receive.ended.set()

    def _zero(self, tp_rank: int, event: ReceiveEnded) -> None:
        """What no READ has filled."""
        if event.unfilled is not None:
            self.around.oracles.coverage["tail zeroed"] += 1
            self.process.ranks[tp_rank].memory.zero(event.unfilled)

    def _lift(self, tp_rank: int, blocks: list[int]) -> None:
        """One rank's READs write no more; the last one frees the blocks of a request that has ended."""
        for receive in [*self._quarantined, *self._receives.values()]:
            if receive.blocks == blocks and tp_rank in receive.written_by:
                receive.written_by.discard(tp_rank)
                if not receive.written_by and receive in self._quarantined:
                    self._quarantined.remove(receive)
                    self.give(blocks)
                return
            if receive.blocks == blocks and tp_rank in receive.awaited_from:
                receive.lifted_early.add(tp_rank)
                return
        self.around.oracles.complain("leaks", f"{self.name}: blocks {blocks} were never quarantined")
