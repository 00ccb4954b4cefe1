"""NIXL as level 1 sees it: connections, and READs that write into a decode engine's memory for as long as they fly.

A READ copies the tags of half its blocks when half of its time is over, and the rest at its end; what was freed or
reused meanwhile shows. Whether it may still write is known here and nowhere else: `writing` of each rank. It ends

* in time, or after a fault that held it up (stall, partition) is over;
* with an error of its own, or when its connection breaks: an error that says so, or the death of the engine;
* late (fault READ_LATE): nothing ends it before its time but the death of its own process, and then it does write.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from connector.runtime.clock import ClockSample
from statemachine import transfer
from statemachine.failures import TransferError
from tests.simulation.faults import Kind
from tests.simulation.level1.heap import MICROSECOND, SECOND

if TYPE_CHECKING:
    from tests.simulation.level1.actor import Attempt, Run
    from tests.simulation.level1.decode import DecodeRank
    from tests.simulation.level1.faults import Link
    from tests.simulation.level1.prefill import PrefillLife, PrefillRank
    from tests.simulation.level1.world import World

READ_NS = 200 * MICROSECOND
BLOCK_NS = 10 * MICROSECOND
LATE_SECONDS_MAX = 12.0
BREAKS = 0.75
"""How often an error of a READ means that the connection is lost."""


class Connection:
    """A loaded peer. `open_reads`: orders that its actor has not seen the end of; `flying`: READs that may write."""

    __slots__ = (
        "back",
        "clock_sample",
        "consumers",
        "flying",
        "is_broken",
        "life",
        "link",
        "open_reads",
        "rank",
        "sources",
    )

    def __init__(self, rank: DecodeRank, life: PrefillLife, clock_sample: ClockSample) -> None:
        self.rank = rank
        self.life = life
        self.clock_sample = clock_sample
        self.sources, self.consumers = _sources(rank, life)
        decode, prefill = rank.life.engine.name, life.engine.name
        self.link: Link = rank.world.links[decode, prefill]
        self.back: Link = rank.world.links[prefill, decode]
        self.flying: dict[Read, None] = {}
        self.open_reads = 0
        self.is_broken = life.is_dead


def _sources(rank: DecodeRank, life: PrefillLife) -> tuple[list[PrefillRank], int]:
    """The ranks that a rank of D reads from, and how many ranks of D read from each of them."""
    theirs, ours = len(life.ranks), len(rank.life.ranks)
    if theirs >= ours:
        width = theirs // ours
        return life.ranks[rank.number * width : (rank.number + 1) * width], 1
    return [life.ranks[rank.number * theirs // ours]], ours // theirs


class Read:
    """One READ, from its order to the release of its handle. `failure` and `ended_ns` (D's clock): how it ended."""

    __slots__ = (
        "attempt",
        "connection",
        "ended_ns",
        "fails",
        "failure",
        "half_ns",
        "is_flying",
        "is_late",
        "is_skipped",
        "piece",
        "run",
        "value",
    )

    def __init__(self, run: Run, attempt: Attempt, connection: Connection, piece: int) -> None:
        self.run = run
        self.attempt = attempt
        self.connection = connection
        self.piece = piece
        self.value: transfer.Transfer | None = None
        self.failure: TransferError | None = None
        self.ended_ns = 0
        self.half_ns = 0
        self.fails = False
        self.is_late = False
        self.is_skipped = False
        self.is_flying = False

    def names(self) -> tuple[str, int, str]:
        engine, rank, request_id = self.run.names()
        return engine, rank, f"{request_id}/{self.piece}"


class Transport:
    """Moves READs on."""

    __slots__ = ("_chance", "_heap", "_oracles")

    def __init__(self, world: World) -> None:
        self._heap = world.heap
        self._oracles = world.oracles
        self._chance = world.transport_chance.random

    def launch(self, read: Read) -> None:
        connection = read.connection
        blocks = read.run.pull.blocks
        writing = connection.rank.writing[read.piece]
        if not writing.isdisjoint(blocks):
            self._oracles.complain("block reuse", f"{read.run.pull.request_id} reads into blocks being written")
        writing.update(blocks)
        connection.flying[read] = None
        read.is_flying = True
        half_ns = int((0.25 + 0.75 * self._chance()) * (READ_NS + BLOCK_NS * len(blocks)))
        link = connection.link
        if link.active:
            half_ns *= link.slowdown()
            if link.hit(Kind.READ_LATE):
                read.is_late = True
                half_ns = int(self._chance() * LATE_SECONDS_MAX * SECOND / 2)
            elif link.hit(Kind.READ_ERROR):
                read.fails = True
        read.half_ns = half_ns
        self._heap.after(half_ns, self._reach_half, read)

    def _reach_half(self, read: Read) -> None:
        if self._may_move(read, self._reach_half):
            blocks = read.run.pull.blocks
            self._copy(read, 0, len(blocks) // 2)
            if read.fails:
                self._fail(read)
            else:
                self._heap.after(read.half_ns, self._reach_end, read)

    def _reach_end(self, read: Read) -> None:
        if self._may_move(read, self._reach_end):
            blocks = read.run.pull.blocks
            self._copy(read, len(blocks) // 2, len(blocks))
            self._end(read, None)

    def _may_move(self, read: Read, again: Any) -> bool:
        if not read.is_flying:
            return False
        connection = read.connection
        if connection.link.active or connection.back.active:
            # A READ needs both directions.
            stalled_ns = max(connection.link.stalled_until_ns(), connection.back.stalled_until_ns())
            if stalled_ns > self._heap.now_ns:
                self._heap.at(stalled_ns, again, read)
                return False
        if connection.life.is_dead:
            if read.is_late:
                self._end(read, self._lost(connection))
            return False  # Otherwise the break of the connection ends it, when the death is noticed.
        return True

    def _copy(self, read: Read, begin: int, end: int) -> None:
        connection = read.connection
        pull = read.run.pull
        source = connection.sources[read.piece].memory
        target = connection.rank.memory[read.piece]
        cached = pull.cached
        for here, there in zip(pull.blocks[begin:end], pull.prompt.blocks[cached + begin : cached + end], strict=True):
            target[here] = source[there]

    def _fail(self, read: Read) -> None:
        connection = read.connection
        if self._chance() < BREAKS:
            self.break_connection(connection)
        else:
            peer = connection.life.engine_id
            self._end(read, TransferError(peer=peer, operation="READ", error="refused", transport_lost=False))

    def break_connection(self, connection: Connection) -> None:
        """It is of no use any more, and its READs end, but for the late ones."""
        connection.is_broken = True
        for read in [read for read in connection.flying if not read.is_late]:
            self._end(read, self._lost(connection))

    @staticmethod
    def _lost(connection: Connection) -> TransferError:
        return TransferError(peer=connection.life.engine_id, operation="READ", error="lost", transport_lost=True)

    def _end(self, read: Read, failure: TransferError | None) -> None:
        """From here on it writes nothing."""
        connection = read.connection
        read.is_flying = False
        del connection.flying[read]
        connection.rank.writing[read.piece].difference_update(read.run.pull.blocks)
        read.failure = failure
        connection.rank.see_end(read)
