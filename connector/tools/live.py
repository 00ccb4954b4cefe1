"""What running engines say of themselves, for tools: their handshake payloads, and the rows of their workers.

    address --side channel--> what each rank is, and where its control socket listens (`connector.tools.asking`)
            --control socket--> rows (`connector.wire.inspection`)

Everything is bounded: each engine has ENGINE_SECONDS in all, all engines are asked at once, and one that does not
answer is an `EngineReport` with the reason in `problem`, not an exception. The sockets are those of the engines
themselves (`connector.ports.zmq_bridge`). Nothing that is asked changes anything.

A decode engine names the prefill engines that it reads from (`PeerRow.address`), so one address is enough to find both
sides of a request. A host name may be that of several engines, as that of a headless Service in Kubernetes is: then
each is asked at its own address.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

import msgspec
import trio

from connector.addresses import join_address
from connector.observe.history import best_named
from connector.ports.gate import ANYBODY, Access
from connector.ports.host_names import HostNames
from connector.ports.side_channel import (
    DescriptorsExhausted,
    Link,
    LinkEnded,
    NameNotResolved,
    SideChannel,
    SideChannelError,
)
from connector.ports.zmq_bridge import ZmqSideChannel
from connector.ports.zmq_bridge.refusals import REFUSED
from connector.tools.asking import Address, AddressError, NotAsked, advertisement, engines_behind, parse_address
from connector.wire import control
from connector.wire.bounded import DecodeFailed, shorten
from connector.wire.handshake import Advertisement
from connector.wire.inspection import (
    ROWS_MAX,
    AnyRow,
    EngineRow,
    Inspect,
    Inspected,
    LeaseRow,
    PeerRow,
    RecordRow,
    RequestRow,
    What,
    decode_inspected,
)
from statemachine import failures

ENGINE_SECONDS = 2.0
"""For one engine: name look-up, handshake with each rank, all questions."""
ASK_AGAIN_SECONDS = 0.5
"""A worker that is asked for much at once drops questions."""
FOLLOWED_SECONDS = 0.6
"""The same for an engine that was not named: what explains a request must not wait long for a P that hangs, because
that is what it explains."""
LOOKED_UP_MAX = 8
"""Ids on the other side of a request that are looked for too."""
ENGINES_MAX = 256
WORKERS_MAX = 256
"""How many of one engine are asked."""
ROWS_TOTAL_MAX = 20_000
"""How many rows of one kind are taken from one worker."""

NOT_CONNECTED = frozenset({"backoff", "incompatible", "draining", "disconnecting"})
"""States of peers with which something is wrong now."""

R = TypeVar("R", bound=AnyRow)


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What one worker said. `problem`: why it said nothing, or not all; `ran_out`: because this tool has not asked on,
    for the time was over when it had begun to answer, or when others of its engine had, or there are too many."""

    rank: tuple[int, int]
    advertisement: Advertisement | None = None
    rows: tuple[AnyRow, ...] = ()
    problem: str | None = None
    ran_out: bool = False
    wall_ahead_seconds: float | None = None
    """Its time of day less ours, at most `round_trip_seconds` wrong."""
    round_trip_seconds: float | None = None

    def of(self, kind: type[R]) -> list[R]:
        return [row for row in self.rows if isinstance(row, kind)]

    @property
    def engine(self) -> EngineRow | None:
        return next(iter(self.of(EngineRow)), None)

    @property
    def is_builtin(self) -> bool:
        """It is a worker of the built-in connector, which answers no questions."""
        return self.advertisement is not None and self.advertisement.actor is None

    @property
    def draining(self) -> str:
        """Whether its engine is to end: "draining", "drained", or nothing."""
        actor = self.advertisement.actor if self.advertisement is not None else None
        return actor.draining if actor is not None else ""


@dataclass(frozen=True, kw_only=True)
class Silent:
    """An engine that could not be asked, or a worker of one. `engine_id`: what it is called, as far as is known.
    `ran_out`: it answers, and had no time to tell all."""

    address: str
    engine_id: str | None
    kind: str
    problem: str
    ran_out: bool = False

    @property
    def is_of_asker(self) -> bool:
        """The problem lies with the tool: its address, its keys, or its time limit. A decode engine has others."""
        return self.ran_out or self.kind in (failures.NotAllowed.__name__, failures.AddressNotResolved.__name__)


@dataclass(frozen=True, kw_only=True)
class EngineReport:
    """One engine, as it was found at `address`.

    Attributes:
        problem: why it could not be asked; `problem_kind` is a stable name for it.
        refusal: why nobody can read from it any more; its workers were asked all the same. None: it serves.
        named_by: engine ids of those that sent us there.
        not_resolved: why the host name does not resolve here that it advertises for its side channel; None: it does.
    """

    address: Address
    ranks: tuple[RankReport, ...] = ()
    problem: str | None = None
    problem_kind: str | None = None
    refusal: str | None = None
    named_by: tuple[str, ...] = ()
    not_resolved: str | None = None

    def of(self, kind: type[R]) -> list[R]:
        return [row for rank in self.ranks for row in rank.of(kind)]

    @cached_property
    def engine_id(self) -> str | None:
        """Looked for once, because that may be among all rows."""
        for rank in self.ranks:
            if rank.engine is not None:
                return rank.engine.engine_id
            if rank.advertisement is not None and rank.advertisement.metadata is not None:
                return rank.advertisement.metadata.engine_id
        return None

    @property
    def name(self) -> str:
        """Its id; without one, its address."""
        return self.engine_id or str(self.address)

    @property
    def role(self) -> str:
        return next((rank.engine.facts.role for rank in self.ranks if rank.engine is not None), "")

    @property
    def answers(self) -> bool:
        return any(rank.engine is not None for rank in self.ranks)

    @property
    def first_problem(self) -> str | None:
        """Why it could not be asked, or the first thing that is wrong with it."""
        of_ranks = (rank.problem for rank in self.ranks if rank.problem is not None)
        return self.problem or self.refusal or next(of_ranks, None)

    def silence(self, names: Mapping[str, str]) -> Silent | None:
        """Why it, or a worker of it, could not be asked; None: all that answer questions have.

        `names`: engine ids by address, for one that has not said its own.
        """
        problem, kind, ran_out = self.problem, self.problem_kind, False
        if problem is None and not self.answers:
            problem, kind = self.refusal, failures.HandshakeRefused.__name__
        if problem is None:
            # Also one that has not come to say who it is: what it knows of a request is not known either.
            asked = [rank for rank in self.ranks if not rank.is_builtin]
            silent = sorted((rank for rank in asked if rank.problem is not None), key=lambda rank: rank.ran_out)
            if silent:
                problem, ran_out = silent[0].problem, silent[0].ran_out
            kind = failures.ControlLinkLost.__name__
        if problem is None:
            return None
        name = self.engine_id or names.get(str(self.address))
        return Silent(address=str(self.address), engine_id=name, kind=kind or "", problem=problem, ran_out=ran_out)


@dataclass(frozen=True, kw_only=True)
class Question:
    """Rows of one kind; see `connector.wire.inspection.Inspect`. `rows_max`: of each worker."""

    what: What
    match: str = ""
    rows_max: int = ROWS_TOTAL_MAX


@dataclass
class Survey:
    """What all engines said, in the order in which they were named."""

    engines: list[EngineReport] = field(default_factory=list)

    def of(self, kind: type[R]) -> list[tuple[EngineReport, R]]:
        return [(engine, row) for engine in self.engines for row in engine.of(kind)]

    def rows(self) -> Iterator[tuple[str, int, AnyRow]]:
        """Engine id, number of the worker, row. Times of day are ours, as far as clocks could be compared."""
        for engine in self.engines:
            for number, rank in enumerate(engine.ranks):
                for row in rank.rows:
                    if isinstance(row, RecordRow) and rank.wall_ahead_seconds is not None:
                        wall = row.record.wall - rank.wall_ahead_seconds
                        row = msgspec.structs.replace(row, record=msgspec.structs.replace(row.record, wall=wall))
                    yield engine.engine_id or "", number, row

    def leaving(self) -> list[str]:
        """The engines that lend nothing any more, because they drain or have drained."""
        return [
            each.name
            for each in self.engines
            if each.role != "kv_consumer" and any(rank.draining for rank in each.ranks)
        ]

    def silent(self) -> list[Silent]:
        """The engines and workers that could not be asked."""
        names = {row.address: row.engine_id for _, row in self.of(PeerRow)}
        return [silence for each in self.engines if (silence := each.silence(names)) is not None]

    def other_names(self, text: str) -> list[str]:
        """The ids without `text` of the requests that a person means by it (`best_named`), each once: what a router
        calls them on the other side."""
        of_rows: dict[tuple[str, ...], None] = {}
        for _, _, row in self.rows():
            match row:
                case RequestRow():
                    of_rows[row.request_id, row.remote_request_id] = None
                case LeaseRow():
                    of_rows[(row.request_id,)] = None
                case RecordRow(record=record) if record.machine == "request":
                    of_rows[record.subject, record.remote_request_id or record.subject] = None
                case RecordRow(record=record) if record.machine == "lease":
                    of_rows[(record.subject,)] = None
                case _:
                    pass
        meant = best_named(of_rows, lambda names: names, text)
        return list(dict.fromkeys(name for names in meant for name in names if text not in name))

    def with_rows_of(self, other: Survey) -> Survey:
        """The same engines, with what a later survey has found of them beside it; what both have told, once."""
        more = {each.address: each for each in other.engines}
        return Survey([_merged(each, more[each.address]) if each.address in more else each for each in self.engines])


def _merged(engine: EngineReport, more: EngineReport) -> EngineReport:
    further = {rank.rank: rank for rank in more.ranks}
    ranks = []
    for rank in engine.ranks:
        # The later answer counts, of what both tell. Two rows of one answer stay, though they may be about the same:
        # requests that describe an engine by unlike sizes make two peers.
        later = {row.identity: row for row in (further[rank.rank].rows if rank.rank in further else ())}
        rows = (*(row for row in rank.rows if row.identity not in later), *later.values())
        ranks.append(replace(rank, rows=rows))
    return replace(engine, ranks=tuple(ranks))


# --- asking -----------------------------------------------------------------------------------------------------------


def survey(
    addresses: Iterable[Address],
    questions: Sequence[Question],
    *,
    follow: bool = True,
    seconds: float = ENGINE_SECONDS,
    followed_seconds: float = FOLLOWED_SECONDS,
    access: Access = ANYBODY,
) -> Survey:
    """Ask all, and with `follow` the prefill engines that they name. Blocks no longer than the two together, and
    `seconds` for names.

    `access`: with which keys; see `connector.tools.asking.tool_access`.
    """

    async def run() -> Survey:
        async with opened_surveyor(seconds, followed_seconds, access) as surveyor:
            return await surveyor.survey(addresses, questions, follow=follow)

    return trio.run(run)


def look_up(
    text: str,
    addresses: Iterable[Address],
    *,
    seconds: float = ENGINE_SECONDS,
    followed_seconds: float = FOLLOWED_SECONDS,
    access: Access = ANYBODY,
) -> Survey:
    """Everything that engines know of requests with `text` in an id, on both sides.

    A router may give a request another id on P than on D. Where that is so, the ids that the first answers name are
    looked for as well.
    """

    async def run() -> Survey:
        async with opened_surveyor(seconds, followed_seconds, access) as surveyor:
            found = await surveyor.survey(addresses, _questions_about(text))
            further = found.other_names(text)[:LOOKED_UP_MAX]
            if not further:
                return found
            known = [each.address for each in found.engines if each.answers]
            questions = [question for name in further for question in _questions_about(name) if question.match]
            more = await surveyor.survey(known, questions, follow=False)
            return found.with_rows_of(more)

    return trio.run(run)


def _questions_about(text: str) -> list[Question]:
    return [
        Question(what="engine"),
        Question(what="peers"),
        Question(what="quarantines"),
        Question(what="requests", match=text),
        Question(what="holds", match=text),
        Question(what="leases", match=text),
        Question(what="local_prefills", match=text),
        Question(what="without_room", match=text),
        Question(what="records", match=text),
    ]


@contextlib.asynccontextmanager
async def opened_surveyor(
    seconds: float = ENGINE_SECONDS, followed_seconds: float = FOLLOWED_SECONDS, access: Access = ANYBODY
) -> AsyncIterator[Surveyor]:
    """Sockets for any number of surveys."""
    side_channel = ZmqSideChannel(access)
    try:
        yield Surveyor(side_channel, seconds, followed_seconds)
    finally:
        side_channel.close()


class Surveyor:
    """Asks engines over one `side_channel`: each for `seconds`, those that nobody named for `followed_seconds`."""

    def __init__(self, side_channel: SideChannel, seconds: float, followed_seconds: float) -> None:
        self._side_channel = side_channel
        self._seconds = seconds
        self._followed_seconds = followed_seconds

    async def survey(
        self, addresses: Iterable[Address], questions: Sequence[Question], *, follow: bool = True
    ) -> Survey:
        """See the module's `survey`."""
        named = (await self._one_by_one(list(dict.fromkeys(addresses))))[:ENGINES_MAX]
        found = await self._ask_all(dict.fromkeys(named, ()), questions, self._seconds)
        if not follow:
            return Survey(found)
        further: dict[Address, dict[str, None]] = {}  # each name once, however many ranks tell of that place
        known_ids = {each.engine_id for each in found}
        for engine in found:
            for row in engine.of(PeerRow):
                with contextlib.suppress(AddressError):
                    address = parse_address(row.address)
                    if address not in named and row.engine_id not in known_ids:
                        further.setdefault(address, {})[engine.name] = None
        chosen = {address: tuple(by) for address, by in list(further.items())[: ENGINES_MAX - len(named)]}
        more = await self._ask_all(chosen, questions, self._followed_seconds)
        return Survey([*found, *more])

    async def _one_by_one(self, addresses: Sequence[Address]) -> list[Address]:
        """Those whose names are of several engines are one for each of them; whatever else they are is seen later."""
        behind: dict[Address, list[Address]] = {}

        async def look_behind(address: Address) -> None:
            behind[address] = [address]
            with contextlib.suppress(NotAsked), trio.move_on_after(self._seconds):
                behind[address] = await engines_behind(address)

        async with trio.open_nursery() as nursery:
            for address in addresses:
                nursery.start_soon(look_behind, address)
        return list(dict.fromkeys(each for address in addresses for each in behind[address]))

    async def _ask_all(
        self, addresses: Mapping[Address, tuple[str, ...]], questions: Sequence[Question], seconds: float
    ) -> list[EngineReport]:
        reports: dict[Address, EngineReport] = {}

        async def ask(address: Address, named_by: tuple[str, ...]) -> None:
            reports[address] = await self._ask_engine(address, named_by, questions, seconds)

        async with trio.open_nursery() as nursery:
            for address, named_by in addresses.items():
                nursery.start_soon(ask, address, named_by)
        return [reports[address] for address in addresses]

    async def _ask_engine(
        self, address: Address, named_by: tuple[str, ...], questions: Sequence[Question], seconds: float
    ) -> EngineReport:
        deadline = trio.current_time() + seconds
        try:
            first = await advertisement(self._side_channel, address, (0, 0), seconds)
        except NotAsked as error:
            return EngineReport(address=address, problem=error.sentence, problem_kind=error.kind, named_by=named_by)
        if first.error is not None and first.actor is None:
            kind = failures.HandshakeRefused.__name__
            return EngineReport(address=address, problem=first.error, problem_kind=kind, named_by=named_by)
        ranks = tuple(await self._ask_ranks(address, first, questions, deadline))
        engine = EngineReport(address=address, ranks=ranks, refusal=first.error, named_by=named_by)
        return replace(engine, not_resolved=await self._not_resolved(engine, deadline))

    async def _not_resolved(self, engine: EngineReport, deadline: float) -> str | None:
        """Why decode engines would not find it by the name that it advertises, if it has one and this is so here."""
        advertised = next((row.facts.side_channel for row in engine.of(EngineRow)), "")
        try:
            address = parse_address(advertised)
        except AddressError:
            return None  # of no use for other reasons, which are not this one
        if address.host == engine.address.host:
            return None  # it was reached by this name
        try:
            with trio.fail_at(deadline):
                await HostNames().address(address.host, address.port)
        except trio.TooSlowError:
            return "no name server answered in time"
        except NameNotResolved as error:
            return shorten(error.error, 200)
        except DescriptorsExhausted:
            return None  # of this tool, which says nothing of the name
        return None

    async def _ask_ranks(
        self, address: Address, first: Advertisement, questions: Sequence[Question], deadline: float
    ) -> list[RankReport]:
        actor = first.actor
        sizes = (actor.pp_size, actor.tp_size) if actor is not None else (1, 1)
        ranks = itertools.product(range(sizes[0]), range(sizes[1]))
        wanted = list(itertools.islice(ranks, WORKERS_MAX))
        reports: dict[tuple[int, int], RankReport] = {}

        async def ask(rank: tuple[int, int]) -> None:
            try:
                with trio.fail_at(deadline):
                    said = first if rank == wanted[0] else await advertisement(self._side_channel, address, rank)
            except trio.TooSlowError:
                # The same task has answered for another rank.
                problem = "its handshake: no answer in the time that was left: give it more (--timeout)"
                reports[rank] = RankReport(rank=rank, problem=problem, ran_out=True)
                return
            except NotAsked as error:
                reports[rank] = RankReport(rank=rank, problem=f"its handshake: {error.sentence}")
                return
            reports[rank] = await self._ask_worker(address, rank, said, questions, deadline)

        async with trio.open_nursery() as nursery:
            for rank in wanted:
                nursery.start_soon(ask, rank)
        left_out = next(ranks, None)
        if left_out is not None:
            problem = f"not asked, and none behind it: this tool asks {WORKERS_MAX} workers of an engine"
            reports[left_out] = RankReport(rank=left_out, problem=problem, ran_out=True)
        return [reports[rank] for rank in sorted(reports)]

    async def _ask_worker(
        self,
        address: Address,
        rank: tuple[int, int],
        said: Advertisement,
        questions: Sequence[Question],
        deadline: float,
    ) -> RankReport:
        actor = said.actor
        if actor is None:
            detail = "it runs the built-in connector, which tells nothing"
            return RankReport(rank=rank, advertisement=said, problem=detail)
        rows: list[AnyRow] = []
        ahead = round_trip = None
        problem, ran_out = None, False
        link: Link | None = None
        where = f"its control socket at {join_address(actor.control_host, actor.control_port)}"
        try:
            with trio.fail_at(deadline):
                link = await self._side_channel.open_link(actor.control_host, actor.control_port, actor.control_key)
                number = 0
                for question in questions:
                    before, first = len(rows), 0
                    while len(rows) - before < question.rows_max:
                        number += 1
                        asked_at = time.time()
                        inspect = Inspect(
                            number=number,
                            what=question.what,
                            match=question.match,
                            first=first,
                            rows=min(ROWS_MAX, question.rows_max - (len(rows) - before)),
                        )
                        answer = await _answer_to(inspect, link)
                        round_trip = time.time() - asked_at
                        ahead = answer.wall - asked_at - round_trip / 2
                        if answer.first != first:
                            del rows[before:]  # it begins again
                        rows += answer.rows
                        if answer.next is None:
                            break
                        first = answer.next
        except trio.TooSlowError:
            ran_out = bool(rows)
            if ran_out:
                problem = f"{where} has told {len(rows)} row(s), and not all in the time: give it more (--timeout)"
            else:
                problem = (
                    f"{where} did not answer: the process hangs or is stopped, has no file descriptor left (its log "
                    "says so), or a firewall drops what is sent there"
                )
        except (LinkEnded, SideChannelError) as error:
            problem = f"{where} cannot be reached: {error.error}"
            if error.error == REFUSED:  # and its listener has just answered
                problem += "; its worker has ended, or the engine sleeps"
        except DecodeFailed as error:
            problem = f"{where} sent what is no answer: {error.detail}"
        finally:
            if link is not None:
                link.close()
        return RankReport(
            rank=rank,
            advertisement=said,
            rows=tuple(rows),
            problem=problem,
            ran_out=ran_out,
            wall_ahead_seconds=ahead,
            round_trip_seconds=round_trip,
        )


async def _answer_to(question: Inspect, link: Link) -> Inspected:
    """Ask until it is answered. Raises LinkEnded, DecodeFailed."""
    while True:
        link.send(control.encode_request(question))
        with trio.move_on_after(ASK_AGAIN_SECONDS):
            while True:
                answer = decode_inspected(await link.receive())
                if answer.number == question.number:
                    return answer
