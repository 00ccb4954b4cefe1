"""Checksums of lent blocks (option `verify`), on a decode rank: asked for, made, compared.

    before the READs    D asks each rank of P that it reads from for the checksums of the lease. P has made them when
                        the prompt was computed, and before anybody could read
    a READ has ended    the engine thread sums the blocks that it has filled, of which there is a checksum
    they are compared   the core, which has asked for that (`CheckRead`), hears whether they are equal, or else why not
                        (`Corrupt`)

A request waits for P's checksums in pending_handshake, and for ours in reading. Its deadline bounds either wait, and
nothing is in flight then. When what is a rule of the core: this module only asks, sums and compares.

Questions and answers travel over the link to the control socket, in parts (`connector.wire.control`). Either may be
lost; a question is repeated until it is answered, or nobody waits for the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np
import trio

from connector.layout.verification import Compared, Match, Numbers
from connector.ports.nixl import MemoryRun
from connector.protocol import Stretch, SumsFound, SumsWanted, WorkerEvent
from connector.wire.bounded import DecodeFailed
from connector.wire.control import NO_SUMS, AskSums, LeaseSums, Sums, decode_sums
from statemachine.failures import ActorCrashed, Corrupt, Failure
from statemachine.lease import LeaseName

ASKED_AGAIN_SECONDS = 0.01, 0.5
"""The first pause, which doubles, and the longest: P may hear of its own grant later than the question."""


class KnownSums(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The checksums of a lease on one rank of P: `blocks` by cache group; `sums` of one region after the other, each in
    the order of its group's blocks, and where those of each region start."""

    blocks: tuple[Numbers, ...]
    sums: Numbers
    starts: Numbers


class Check(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """How one READ is compared with the checksums of the rank that it reads from."""

    compared: Compared
    known: KnownSums
    regions: tuple[str, ...]
    """Names of P's regions."""


def known_sums(sent: LeaseSums, matched: Match) -> KnownSums:
    """What P has sent, whose regions have the cache groups `matched.groups`. Raises DecodeFailed if it is not that."""
    if any(len(each) % 4 for each in sent.blocks) or len(sent.sums) % 8:
        raise DecodeFailed("checksums that are cut off")
    blocks = tuple(np.frombuffer(each, "<i4").astype(np.int64) for each in sent.blocks)
    counts = [blocks[group].size if 0 <= group < len(blocks) else 0 for group in matched.groups]
    flat = np.frombuffer(sent.sums, "<i8").astype(np.int64)
    if flat.size != sum(counts):
        raise DecodeFailed(f"{flat.size} checksums of {sum(counts)} blocks")
    return KnownSums(blocks=blocks, sums=flat, starts=np.cumsum([0, *counts], dtype=np.int64))


def stretches(runs: Iterable[tuple[MemoryRun, Numbers]]) -> tuple[Stretch, ...]:
    """For the engine thread: runs of local memory, and which of their blocks."""
    return tuple(
        Stretch(
            address=run.address,
            stride_bytes=run.stride_bytes,
            length_bytes=run.length_bytes,
            count=run.count,
            blocks=blocks,
        )
        for run, blocks in runs
    )


def lease_sums(blocks: Sequence[Numbers], sums: Numbers) -> LeaseSums:
    """For a peer: by cache group, and all sums region by region."""
    return LeaseSums(
        blocks=tuple(each.astype("<i4").tobytes() for each in blocks), sums=sums.astype("<i8", copy=False).tobytes()
    )


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The first block that differs, of how many that do, of how many that were compared."""

    region: int
    block: int
    differing: int
    compared: int


def difference(compared: Compared, found: Numbers, known: KnownSums) -> Difference | None:
    """`found`: sums of `compared.local`, one after another."""
    ours = np.empty_like(found)
    ours[compared.order] = found
    theirs = known.sums[known.starts[compared.regions] + compared.places]
    wrong = np.flatnonzero(ours != theirs)
    if not wrong.size:
        return None
    first = int(wrong[0])
    return Difference(
        region=int(compared.regions[first]),
        block=int(compared.remote_blocks[first]),
        differing=int(wrong.size),
        compared=int(ours.size),
    )


def failure_of(check: Check, found: SumsFound, *, peer: str, address: str, lease: LeaseName) -> Failure | None:
    """Why what a READ has left does not pass; None: it is what was lent. `found`: sums of `check.compared.local`."""
    if found.error is not None:
        return ActorCrashed(actor="checksums", error=found.error)
    differs = difference(check.compared, found.sums, check.known)
    if differs is None:
        return None
    return Corrupt(
        peer=peer,
        address=address,
        remote_request_id=lease.request_id,
        region=check.regions[differs.region],
        block=differs.block,
        differing=differs.differing,
        compared=differs.compared,
    )


class SumDesk:
    """Where sums of local memory are ordered from the engine thread. One for a rank; in the trio thread.

    Args:
        emit: hands a worker event to the engine thread.
    """

    def __init__(self, emit: Callable[[WorkerEvent], None]) -> None:
        self._emit = emit
        self._tickets = 0
        self._waiting: dict[int, Callable[[SumsFound], None]] = {}

    def order(self, wanted: tuple[Stretch, ...], on_found: Callable[[SumsFound], None]) -> int:
        """Returns a ticket. `on_found` is called once, later, unless the order is withdrawn."""
        self._tickets += 1
        self._waiting[self._tickets] = on_found
        self._emit(SumsWanted(ticket=self._tickets, stretches=wanted))
        return self._tickets

    def withdraw(self, ticket: int) -> None:
        """The engine thread may sum all the same; nobody hears of it."""
        self._waiting.pop(ticket, None)

    def deliver(self, found: SumsFound) -> None:
        on_found = self._waiting.pop(found.ticket, None)
        if on_found is not None:
            on_found(found)


class SumsMissing(Exception):
    """P could make no checksums of a lease."""


class SumsOfPeer:
    """Asks the ranks of one remote engine for checksums.

    Args:
        ask: sends a question to a rank, over a connection; False: that connection is gone.
    """

    def __init__(self, ask: Callable[[int, int, AskSums], bool]) -> None:
        self._ask_rank = ask
        self._awaited: dict[tuple[int, int, LeaseName, int], list[_Awaited]] = {}

    def take(self, connection: int, rank: int, answer: Sums) -> None:
        for awaited in self._awaited.pop((connection, rank, answer.lease, answer.part), []):
            awaited.answer = answer
            awaited.came.set()

    async def of_lease(
        self,
        connection: int,
        ranks: Iterable[tuple[int, Match | None]],
        lease: LeaseName,
        is_wanted: Callable[[], bool],
    ) -> list[KnownSums] | None:
        """Those of each of these ranks, with what of a lease is compared with it; None as of `fetch`.

        Raises DecodeFailed: a rank has sent something else; SumsMissing: it has none, and will have none.
        """
        known = []
        for rank, match in ranks:
            encoded = await self.fetch(connection, rank, lease, is_wanted)
            if encoded is None:
                return None
            if encoded == NO_SUMS:
                raise SumsMissing
            assert match is not None
            known.append(known_sums(decode_sums(encoded), match))
        return known

    async def fetch(self, connection: int, rank: int, lease: LeaseName, is_wanted: Callable[[], bool]) -> bytes | None:
        """All parts, joined; None: nobody wants them any more, or the connection is gone."""
        parts: list[bytes] = []
        while True:
            answer = await self._ask(connection, rank, AskSums(lease=lease, part=len(parts)), is_wanted)
            if answer is None:
                return None
            parts.append(answer.content)
            if len(parts) >= answer.parts:
                return b"".join(parts)

    async def _ask(self, connection: int, rank: int, asked: AskSums, is_wanted: Callable[[], bool]) -> Sums | None:
        key = (connection, rank, asked.lease, asked.part)
        awaited = _Awaited()
        self._awaited.setdefault(key, []).append(awaited)
        try:
            pause, longest = ASKED_AGAIN_SECONDS
            while is_wanted() and self._ask_rank(connection, rank, asked):
                with trio.move_on_after(pause):
                    await awaited.came.wait()
                    return awaited.answer
                pause = min(2 * pause, longest)
            return None
        finally:
            others = [each for each in self._awaited.pop(key, []) if each is not awaited]
            if others:
                self._awaited[key] = others


class _Awaited:
    def __init__(self) -> None:
        self.came = trio.Event()
        self.answer: Sums | None = None
