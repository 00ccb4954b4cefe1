"""NIXL as level 1 sees it: connections, and READs that write into a decode engine's memory for as long as they fly.

A READ copies the tags of half its blocks when half of its time is over, and the rest at its end; what was freed or
reused meanwhile shows. Whether it may still write is known here and nowhere else: `writing` of each rank. It ends

* in time, or after a fault that held it up (stall, partition) is over;
* with an error, of its own or because its connection breaks. Where it had a single descriptor NIXL can show that it is
  over. Otherwise nobody knows, though most often it is;
* early (fault READ_ERRS_EARLY): the error is told, and parts of it go on writing until their time has come, or until
  their connection was torn down and a part of the back end's grace has passed;
* late (fault READ_LATE): nothing ends it before its time but the death of its own process, and then it does write.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from statemachine.failures import Failure, TransferError
from tests.simulation.faults import Kind
from tests.simulation.level1.heap import MICROSECOND, SECOND

if TYPE_CHECKING:
    from tests.simulation.level1.decode import DecodeRank, Pull
    from tests.simulation.level1.faults import Link
    from tests.simulation.level1.prefill import PrefillLife, PrefillRank
    from tests.simulation.level1.reader import Reader
    from tests.simulation.level1.world import World

READ_NS = 200 * MICROSECOND
BLOCK_NS = 10 * MICROSECOND
LATE_SECONDS_MAX = 12.0
BREAKS = 0.75
"""How often an error of a READ means that the connection is lost."""
MERGED = 0.3
"""How often NIXL makes one descriptor of a READ of several blocks."""
GRACE_NEEDED = 0.8
"""Part of the grace that a READ may really go on for; the clock that counts it may be fast."""


class Agent:
    """A process of P, as loaded by one rank of D. `connections`: those that stand on it; `leaving`: those that were
    given up because of `failure`, while others still stand on it."""

    __slots__ = ("connections", "failure", "leaving")

    def __init__(self) -> None:
        self.connections: dict[Connection, None] = {}
        self.leaving: list[Connection] = []
        self.failure: Failure | None = None


class Connection:
    """A loaded peer, as a rank of D numbers it. `ranks`: those of P that it deals with; `pieces`: so many of them are
    read from; `consumers`: ranks of its engine that deal with one of P. `flying`: READs that may write."""

    __slots__ = (
        "back",
        "consumers",
        "flying",
        "is_broken",
        "is_reset",
        "is_suspect",
        "is_torn_down",
        "life",
        "link",
        "number",
        "open_reads",
        "pieces",
        "rank",
        "ranks",
        "reader",
    )

    def __init__(self, reader: Reader, life: PrefillLife, number: int) -> None:
        rank = reader.rank
        self.reader = reader
        self.rank: DecodeRank = rank
        self.life = life
        self.number = number
        self.ranks, self.consumers = sources(rank.number, len(rank.life.ranks), life)
        self.pieces = 1 if rank.world.cluster.is_replicated else len(self.ranks)
        decode, prefill = rank.life.engine.name, life.engine.name
        self.link: Link = rank.world.links[decode, prefill]
        self.back: Link = rank.world.links[prefill, decode]
        self.flying: dict[Read, None] = {}
        self.open_reads = 0
        self.is_broken = life.is_dead
        self.is_reset = False
        self.is_suspect = False
        self.is_torn_down = False


def sources(rank: int, ours: int, life: PrefillLife) -> tuple[list[PrefillRank], int]:
    """The ranks that `rank` of `ours` ranks of D deals with, and how many ranks of D deal with each of them."""
    theirs = len(life.ranks)
    if theirs >= ours:
        width = theirs // ours
        return life.ranks[rank * width : (rank + 1) * width], 1
    return [life.ranks[rank * theirs // ours]], ours // theirs


class Read:
    """One READ, from its order on. `failure`: how it ended; `is_reported`: its end has been told."""

    __slots__ = (
        "completed_ns",
        "connection",
        "failure",
        "half_ns",
        "is_flying",
        "is_late",
        "is_merged",
        "is_reported",
        "piece",
        "plan",
        "pull",
    )

    def __init__(self, pull: Pull, connection: Connection, piece: int) -> None:
        self.pull = pull
        self.connection = connection
        self.piece = piece
        self.failure: TransferError | None = None
        self.completed_ns = 0
        self.half_ns = 0
        self.plan: Kind | None = None
        self.is_late = False
        self.is_merged = True
        self.is_flying = False
        self.is_reported = False


class Transport:
    """Moves READs on."""

    __slots__ = ("_chance", "_grace_ns", "_heap", "_oracles")

    def __init__(self, world: World) -> None:
        self._heap = world.heap
        self._oracles = world.oracles
        self._chance = world.transport_chance.random
        self._grace_ns = int(world.cluster.engine.grace_ns * GRACE_NEEDED)

    def launch(self, read: Read) -> None:
        connection = read.connection
        blocks = read.pull.blocks
        writing = connection.rank.writing[read.piece]
        if not writing.isdisjoint(blocks):
            self._oracles.complain("block reuse", f"{read.pull.request_id} reads into blocks being written")
        writing.update(blocks)
        connection.flying[read] = None
        read.is_flying = True
        chance = self._chance
        read.is_merged = len(blocks) == 1 or chance() < MERGED
        half_ns = int((0.25 + 0.75 * chance()) * (READ_NS + BLOCK_NS * len(blocks)))
        link = connection.link
        if link.active:
            half_ns *= link.slowdown()
            if link.hit(Kind.READ_LATE):
                read.is_late = True
                half_ns = int(chance() * LATE_SECONDS_MAX * SECOND / 2)
            elif link.hit(Kind.READ_ERROR):
                read.plan = Kind.READ_ERROR
            elif not read.is_merged and link.hit(Kind.READ_ERRS_EARLY):
                read.plan = Kind.READ_ERRS_EARLY
        read.half_ns = half_ns
        self._heap.after(half_ns, self._reach_half, read)

    def _reach_half(self, read: Read) -> None:
        if self._may_move(read, self._reach_half):
            self._copy(read, 0, len(read.pull.blocks) // 2)
            if read.plan is Kind.READ_ERROR:
                self._fail(read)
                return
            if read.plan is Kind.READ_ERRS_EARLY:
                self._err_early(read)
            self._heap.after(read.half_ns, self._reach_end, read)

    def _reach_end(self, read: Read) -> None:
        if self._may_move(read, self._reach_end):
            blocks = read.pull.blocks
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
            if read.is_late or read.is_reported:
                self._end(read, self._lost(connection))
            return False  # Otherwise the break of the connection ends it, when the death is noticed.
        return True

    def _copy(self, read: Read, begin: int, end: int) -> None:
        connection = read.connection
        pull = read.pull
        source = connection.ranks[read.piece].memory
        target = connection.rank.memory[read.piece]
        cached = pull.cached
        for here, there in zip(pull.blocks[begin:end], pull.prompt.blocks[cached + begin : cached + end], strict=True):
            target[here] = source[there]

    def _fail(self, read: Read) -> None:
        connection = read.connection
        if self._chance() < BREAKS:
            self.break_connection(connection)
        else:
            self._end(read, self._refused(connection))

    def _err_early(self, read: Read) -> None:
        """One of its parts has failed; the others go on for a while."""
        connection = read.connection
        read.failure = self._lost(connection) if self._chance() < BREAKS else self._refused(connection)
        read.is_reported = True
        read.half_ns = int(self._chance() * LATE_SECONDS_MAX * SECOND / 2)
        connection.rank.see_end(read)

    def break_connection(self, connection: Connection) -> None:
        """It is of no use any more, and its READs end, but for the late ones and what is left of those that failed."""
        connection.is_broken = True
        for read in [read for read in connection.flying if not (read.is_late or read.is_reported)]:
            self._end(read, self._lost(connection))

    def tear_down(self, connection: Connection) -> None:
        """Its agents are removed; what is left of READs that failed ends soon."""
        connection.is_torn_down = True
        for read in connection.flying:
            if not read.is_reported:
                self._oracles.complain("agent", f"{connection.life.engine_id} is removed under a READ")
            self._heap.after(int(self._chance() * self._grace_ns), self._die_away, read)

    def _die_away(self, read: Read) -> None:
        if read.is_flying:
            self._end(read, None)

    @staticmethod
    def _lost(connection: Connection) -> TransferError:
        return TransferError(peer=connection.life.engine_id, operation="READ", error="lost", transport_lost=True)

    @staticmethod
    def _refused(connection: Connection) -> TransferError:
        return TransferError(peer=connection.life.engine_id, operation="READ", error="refused", transport_lost=False)

    def _end(self, read: Read, failure: TransferError | None) -> None:
        """From here on it writes nothing."""
        connection = read.connection
        read.is_flying = False
        read.completed_ns = self._heap.now_ns
        del connection.flying[read]
        connection.rank.writing[read.piece].difference_update(read.pull.blocks)
        if not read.is_reported:
            read.failure = failure
            read.is_reported = True
            connection.rank.see_end(read)
