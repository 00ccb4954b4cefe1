"""What the cores are connected by in production, reduced to what matters, and what must hold in it.

A world is a decode engine or two, each with its ranks (a `RemoteEngine` each) and its block pool; the ranks of one
prefill engine (a `Lending` each) and its pool; NIXL between them; a control link from each rank of D to each rank of P;
and time. The cores are production's. Effects are executed as executors do, in a few lines each. Everything else is a
choice that the search makes both ways:

    the engines     a request is announced, starts, needs nothing, is aborted; a grant reaches a rank of P; P crashes
                    and its next life is there at once, under the same id; P leaves, and ends when nothing is lent any
                    more or its grace period is over, with a next life or without one; a rank of P hangs, for a while
                    or for good; a decode engine crashes for good
    the executors   a command, the end of a READ or a deadline is noticed late; the executor crashes
    NIXL            a READ completes, fails, fails and goes on writing, or never ends, or completes and has left what
                    nobody has lent; a handshake succeeds or fails
    the links       a message arrives, is lost, is late, or comes twice; a link is reset
    time            passes to the next deadline of anybody; D's clock is right or slow

Prompt and slow. What is on its way (a message, a command, the end of a READ, a deadline) happens at once, unless a
deviation delays it; from then on it happens at any time. What takes time (a READ, its check, a handshake, a prefill, a
request in the queue) ends before the next deadline, unless a deviation makes it slow. So time passes only when
everything that is not slow has happened, and with n deviations every execution is found that differs from a plain one
in n places.

Bytes. A block that P frees on all its ranks holds foreign KV from then on, and so does everything when P has crashed. A
READ copies at the last moment, which is when it completes. One that failed and goes on writes until its connection has
been torn down for as long as the grace of the back end. A check finds what nobody has lent. It lets foreign KV pass, so
it replaces no proof.

Checked in every step, with the numbers of the design's invariants:
    1  D's blocks return to its pool only when no READ that names them may still write, or they are quarantined
    2  a rank reports a started request exactly once, and no other
    3  a request that is reported done holds the KV of its own prompt, from every rank
    5  P frees a lease exactly once on each rank, not before the time that it has promised has passed or everybody who
       was told `Held` has released
    6  an agent is removed only when no READ from it is in flight
    7  no READ is posted on a connection that is not to be trusted
    9  a request fails only if something went wrong: until the bound of its lease it may wait in the queue (its lease
       is over when all that wanted it by then have released it). That P leaves is not wrong: until its grace period is
       over, whoever could be served is
    10 when the connection to an engine has ended that had said that it leaves, nobody connects there before somebody
       wants something new of it
The rest is liveness: 4 every wait ends, and 8 nothing is left in any core. Waits of which the product says how long
they last at most end also if what is late or slow never comes: a request that has started is reported, and a lease that
was granted is over.

A built-in P says nothing, so there (3) is weaker. Foreign KV may be taken for one's own where time passed between the
grant and the moment in which D heard of the request, because D takes the lease to begin then; where P had restarted
before D heard of the request or met P; and where clocks drift.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias, TypeVar, assert_never

from statemachine import lending, peer
from statemachine.failures import (
    ActorCrashed,
    BlocksConsumed,
    ConnectionRefused,
    ConnectorStopped,
    Corrupt,
    Failure,
    HandshakeTimeout,
    Incompatible,
    TransferError,
)
from statemachine.kernel import Event
from statemachine.lease import LeaseName
from statemachine.lending import Lending
from statemachine.remote_engine import (
    AbortAsked,
    Announced,
    CheckRead,
    Connected,
    ConnectFailed,
    Crashed,
    EngineEffect,
    EngineLimits,
    HoldAnswered,
    LeavingSaid,
    LetGo,
    LiftQuarantine,
    LinkLost,
    MeetAsked,
    NoteHandshakeFailure,
    NoteLeaving,
    NoteNotMet,
    NotificationFailed,
    NotifyReleases,
    PassToSuccessor,
    PostReads,
    ReadChecked,
    ReadEnded,
    ReleaseAnswered,
    ReleaseUnread,
    RemoteEngine,
    Report,
    ResolveBlocks,
    Retire,
    SendHeartbeat,
    SendHold,
    SendRelease,
    SharedAgentsLost,
    Started,
    StartHandshake,
    Stop,
    TearDown,
    TornDown,
    Unwatched,
    WithdrawReads,
)
from statemachine.remote_engine.claims import DRIFT_DIVISOR
from tests.explore.product import LEAVING_GRACE_NS, TICK_NS, Cores, Product
from tests.explore.shelf import CoreBroken, Shelf

T = TypeVar("T")

DEAD = -1
"""Instead of the number of a core: the decode engine has crashed."""

# What takes time: nothing to wait for, ends before the next deadline, may take for ever.
DONE, EXPECTED, SLOW = range(3)

# What is on its way: nothing, prompt, late.
NOTHING, PROMPT, LATE = range(3)

# Life of a READ. The even ones of a pair are prompt or expected, the odd ones late or slow.
(NONE, ORDERED, ORDERED_LATE, FLYING, FLYING_SLOW, HUNG, ENDED, ENDED_LATE, WRITING) = range(9)
CHECKING, CHECKING_SLOW = 9, 10
IN_FLIGHT = (ORDERED, ORDERED_LATE, FLYING, FLYING_SLOW, HUNG)
IS_OVER = (NONE, CHECKING, CHECKING_SLOW)
MAY_WRITE = (FLYING, FLYING_SLOW, HUNG, WRITING)

# How a READ has ended, before anybody has noticed.
(COMPLETED, LOST, REFUSED, LOST_WRITING, NOT_WANTED, LIED) = range(6)
ENDS = (
    "completes",
    "finds the transport lost",
    "is refused",
    "finds the transport lost and goes on writing",
    "",
    "completes with what nobody has lent",
)

# What lies in the destination of a READ.
EMPTY, OWN, FOREIGN, CORRUPT = range(4)
CONTENTS = ("nothing", "its own KV", "foreign KV", "what nobody has lent")

# A request on D: in nobody's hand, in the queue, started, or it will not come (any more).
ABROAD, QUEUED, STARTED, OFF = range(4)
NO_COMMAND, ANNOUNCE, START, NEED_NOTHING, ABORT, LET_GO, NEED_NOTHING_AND_LET_GO, ABORT_AND_LET_GO = range(8)
TURN_AWAY = 8
_LAST = {NEED_NOTHING: NEED_NOTHING_AND_LET_GO, ABORT: ABORT_AND_LET_GO}
"""What is said of a request that is the last one to want its lease."""
COMMANDS = (
    "",
    "is announced",
    "starts",
    "needs nothing",
    "is aborted",
    "has ended, and its lease is let go of",
    "needs nothing, and its lease is let go of",
    "is aborted, and its lease is let go of",
    "is turned away",
)
UNREPORTED, REPORTED, QUARANTINED = range(3)

HOLD, RELEASE, HELD, RELEASED, HEARTBEAT, NOTIFY, LEAVING = range(7)
MESSAGES = (
    "Hold",
    "Release",
    "the answer to Hold",
    "the answer to Release",
    "the heartbeat",
    "the notification",
    "Leaving",
)
TO_PEER = (HOLD, RELEASE, HEARTBEAT, NOTIFY)

FREED_BY_CRASH = 2

UNANSWERED_MAX = 3
"""Handshakes in a row that fail because P hangs; the next one lasts until it goes on. The back-off grows no more."""

# P stays, is to end, is to end and takes its time, has ended and nobody has taken its place, is to end at once.
STAYS, LEAVES, LINGERS, LEFT, STOPS = range(5)
IS_TO_END = (LEAVES, LINGERS, STOPS)

RESTING = (peer.State.IDLE, peer.State.READY, peer.State.GONE)
"""In every other state a connection is on its way to one of these."""


class Broken(Exception):
    """An invariant failed while a choice was executed; the search adds the scenario."""


class ReplyTo(NamedTuple):
    """Where P answers to: a rank of a decode engine, by its name, and which of its connections. `sender` as in
    `Message`."""

    engine: str
    rank: int
    connection: int
    sender: int


class Connection(NamedTuple):
    """What the executor of one core knows as a connection.

    Attributes:
        is_alive: the life of P that it leads to goes on.
        is_suspect: the core was told, or has found itself, that it is not to be trusted.
        links: one bit for each rank of P: its link is open.
        loss: whether the reset of a link is on its way to the core.
        is_told: the core has heard over it that P leaves.
        tear_down: whether a TearDown is on its way.
        torn_ns: on D's clock since its agents were removed; -1: they are loaded.
    """

    number: int
    is_alive: bool
    links: int
    is_suspect: bool = False
    loss: int = NOTHING
    tear_down: int = NOTHING
    torn_ns: int = -1
    is_told: bool = False


class Read(NamedTuple):
    """The READ of one request on one rank of D from one rank of P.

    Attributes:
        age_ns: on D's clock since it ended, until somebody has noticed.
    """

    status: int = NONE
    connection: int = 0
    end: int = COMPLETED
    age_ns: int = 0
    content: int = EMPTY


class Part(NamedTuple):
    """One request on one rank of D."""

    command: int
    is_late: bool
    age_ns: int
    report: int
    reads: tuple[Read, ...]


class Asked(NamedTuple):
    """One request: where it is in the decode engine's scheduler, and its parts on the ranks. `is_over`: the scheduler
    knows that it has ended; it matters where leases are kept."""

    stage: int
    is_slow: bool
    parts: tuple[Part, ...]
    is_over: bool = False


class Lent(NamedTuple):
    """One lease on one rank of P.

    Attributes:
        grant: whether the prefill still runs as far as this rank knows.
        freed: how often; FREED_BY_CRASH.
        promised_ns: on P's clock, for how much longer somebody has been promised that it is held.
        told, let_go: one bit for each core of D (`Rules.bit`): it was told `Held`; its release has arrived.
    """

    grant: int
    freed: int = 0
    promised_ns: int = 0
    told: int = 0
    let_go: int = 0


class Lease(NamedTuple):
    """One lease on P.

    Attributes:
        is_foreign: its blocks hold foreign KV by now.
        is_old: time passed before D heard of it, or P has ended when its grace period was over.
        age_ns: on P's clock since the prefill ended, as far as it matters.
    """

    is_foreign: bool
    is_old: bool
    age_ns: int
    ranks: tuple[Lent, ...]


class Message(NamedTuple):
    """On a link between a core on D and a rank of P. `age_ns` is on D's clock, since the Hold was sent.

    `leases`, by `Rules.names`, have what P says about each: how much remains, or -1: gone. `sender`: which core has
    sent it to P, of those that know P one after another in its place.
    """

    kind: int
    core: int
    connection: int
    rank: int
    age_ns: int
    leases: tuple[tuple[int, int], ...]
    sender: int = 0


class World(NamedTuple):
    """Everything. Cores are numbers on the shelf: first those of D, engine by engine, then those of P.

    Attributes:
        is_plain: nothing has deviated so far, except that requests were long in coming.
        life: which one of P this is.
        connects: how many connections each core has had; the last one has this number.
        successions: how many cores each one of D has succeeded.
        leaving: whether P stays.
        leaving_ns: on P's clock since it was told to leave, up to its grace period.
        bereaved: of each core of D, whether its connection has ended over which it had heard that P leaves, and nothing
            new is wanted since.
        hung: one bit for each rank of P: it hangs. What is sent to it waits; of several messages of one kind from one
            core the last one does, which says what those before it say.
    """

    budget: int
    is_plain: bool
    life: int
    clocks: tuple[int, ...]
    cores: tuple[int, ...]
    is_late: tuple[bool, ...]
    handshakes: tuple[int, ...]
    connects: tuple[int, ...]
    successions: tuple[int, ...]
    connections: tuple[tuple[Connection, ...], ...]
    requests: tuple[Asked, ...]
    leases: tuple[Lease, ...]
    mail: tuple[Message, ...]
    parked: tuple[Message, ...]
    bereaved: tuple[bool, ...]
    leaving: int = STAYS
    leaving_ns: int = 0
    hung: int = 0


class Choice(NamedTuple):
    """Something that can happen: in words, what it costs of the deviations, and how to carry it out.

    `is_belated`: it was late or slow, so nobody may count on it. (What an engine tells itself comes in the end.)
    """

    said: str
    cost: int
    execute: Callable[[Turn], None]
    is_belated: bool = False

    @property
    def is_sure(self) -> bool:
        return self.cost == 0 and not self.is_belated


TURN_LOST = TransferError(peer="p", operation="READ", error="lost", transport_lost=True)
TURN_REFUSED = TransferError(peer="p", operation="READ", error="refused", transport_lost=False)
UNEQUAL = Corrupt(peer="p", remote_request_id="L0", region="layer 0", block=0, differing=1, compared=1)
UNREACHABLE = HandshakeTimeout(peer="p", timeout_seconds=5)
NOBODY_THERE = ConnectionRefused(peer="p")
UNLIKE = Incompatible(peer="p", field="dtype", local="float16", remote="bfloat16", advice="start it alike")
CRASH = ActorCrashed(actor="peer actor of p", error="KeyError()")
STOPPED = ConnectorStopped(detail="shutdown")


def _incarnation(core: int, sender: int) -> str:
    """What P knows this one of the cores by that have been in this place."""
    return f"incarnation {core}.{sender}"


def _put(items: tuple[T, ...], index: int, item: T) -> tuple[T, ...]:
    return (*items[:index], item, *items[index + 1 :])


_Order: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], dict[str, str]]


class Rules:
    """One product: its shelf, its symmetries, where worlds begin, and what can happen in each."""

    def __init__(self, product: Product, cores: Cores) -> None:
        self.product = product
        self.shelf = Shelf(reads=product.prefill_ranks, are_checked=product.checks)
        self._cores = cores
        self.request_ids = [f"r{number}" for number in range(len(product.requests))]
        # A built-in engine numbers none.
        self.leases = [LeaseName(f"L{number}", 0 if product.is_builtin else 1) for number in range(product.leases)]
        # What leases are called in messages, by number: each as P has numbered it, and then each without that, which is
        # the same for a built-in engine's.
        self.names = [*self.leases, *(LeaseName(name.request_id, 0) for name in self.leases)]
        self.name_numbers = {name: self.names.index(name) for name in self.names}
        self.request_numbers = {name: number for number, name in enumerate(self.request_ids)}
        self.decode_cores = product.decode_engines * product.decode_ranks
        self._orders = self._symmetries()

    def core_named(self, reply_to: ReplyTo) -> int:
        return int(reply_to.engine.removeprefix("d")) * self.product.decode_ranks + reply_to.rank

    def engine_of(self, core: int) -> int:
        return core // self.product.decode_ranks

    def cores_of(self, engine: int) -> range:
        ranks = self.product.decode_ranks
        return range(engine * ranks, (engine + 1) * ranks)

    # --- beginning --------------------------------------------------------------------------------------------------

    def starts(self) -> list[tuple[str, World]]:
        """Every prefill has ended on P and no request has reached D; or, as deviations, one rank of P learns of a
        grant late, or the clock of a decode engine is another one than the product's first."""
        product = self.product
        clock, *others = product.clocks
        plain = self._start(late_grant=False, clocks=(clock,) * product.decode_engines, cost=0)
        found = [("", plain)]
        if product.deviations:
            late = self._start(late_grant=True, clocks=plain.clocks, cost=1)
            found.append(("rank 0 of P has not heard of the grant of lease 0", late))
            for engine, other in itertools.product(range(product.decode_engines), others):
                clocks = _put(plain.clocks, engine, other)
                said = f"the clock of d{engine} advances by {other} where P's advances by {TICK_NS}"
                found.append((said, self._start(late_grant=False, clocks=clocks, cost=1)))
        return found

    def _start(self, *, late_grant: bool, clocks: tuple[int, ...], cost: int) -> World:
        product = self.product
        decode = tuple(
            self.fresh_remote_engine(rank)
            for _ in range(product.decode_engines)
            for rank in range(product.decode_ranks)
        )
        prefill = []
        for rank in range(product.prefill_ranks):
            number = self.shelf.add(self._fresh_lending())
            for lease, name in enumerate(self.leases):
                is_late = late_grant and rank == lease == 0
                event = lending.Computing(lease=name) if is_late else lending.Granted(lease=name)
                number, _ = self.shelf.step(number, event)
            prefill.append(number)
        lent = [
            tuple(
                Lent(grant=EXPECTED if late_grant and rank == lease == 0 else DONE)
                for rank in range(product.prefill_ranks)
            )
            for lease in range(product.leases)
        ]
        part = Part(NO_COMMAND, False, 0, UNREPORTED, (Read(),) * product.prefill_ranks)
        return World(
            budget=product.deviations - cost,
            is_plain=cost == 0 and set(clocks) == {TICK_NS},
            life=1,
            clocks=clocks,
            cores=(*decode, *prefill),
            is_late=(False,) * (len(decode) + len(prefill)),
            handshakes=(DONE,) * len(decode),
            connects=(0,) * len(decode),
            successions=(0,) * len(decode),
            connections=((),) * len(decode),
            requests=tuple(Asked(ABROAD, False, (part,) * product.decode_ranks) for _ in product.requests),
            leases=tuple(Lease(is_foreign=False, is_old=False, age_ns=0, ranks=ranks) for ranks in lent),
            mail=(),
            parked=(),
            bereaved=(False,) * len(decode),
        )

    def lease_called(self, name: int) -> int:
        """The lease that is meant."""
        return name % len(self.leases)

    def name_of(self, request: int) -> LeaseName:
        """What this request calls its lease."""
        _, lease = self.product.requests[request]
        return self.names[lease + len(self.leases) * (request in self.product.unnumbered)]

    def bit(self, core: int, sender: int, name: int) -> int:
        """The one of `Lent.told` and `let_go`: to a core two names are two leases."""
        is_unnumbered = name >= len(self.leases)
        return 1 << ((is_unnumbered * (self.product.deviations + 1) + sender) * self.decode_cores + core)

    def fresh_remote_engine(self, rank: int) -> int:
        """What a rank of D has admitted."""
        fresh = self._cores.remote_engine(
            "p", "host", self.product.engine_limits, identity=str(rank), observe=self.shelf.observer
        )
        return self.shelf.add(fresh)

    def _fresh_lending(self) -> Lending:
        return self._cores.lending(self.product.lending_limits, self.shelf.observer)

    def new_life(self) -> int:
        """A rank of P that has just started."""
        return self.shelf.add(self._fresh_lending())

    # --- ends -------------------------------------------------------------------------------------------------------

    def left_over(self, world: World) -> list[str]:
        """What is still to happen; nothing: this world is an end. A READ that never ends may leave its connection and
        its quarantine, and nothing else."""
        found = []
        for request, asked in enumerate(world.requests):
            if asked.stage in (ABROAD, QUEUED):
                found.append(f"request {request} has not started")
            elif asked.stage == STARTED and any(part.report == UNREPORTED for part in asked.parts):
                found.append(f"request {request} is not reported by every rank")
            elif self.is_unheard(asked):
                found.append(f"the scheduler has not heard of the end of request {request}")
            if any(part.command for part in asked.parts):
                found.append(f"a rank has not heard of request {request}")
        for lease, lent in enumerate(world.leases):
            found += [
                f"lease {lease} is held by rank {rank} of P" for rank, each in enumerate(lent.ranks) if not each.freed
            ]
        found += [f"{MESSAGES[message.kind]} is on its way" for message in (*world.mail, *world.parked)]
        if world.leaving in IS_TO_END:
            found.append("P has not ended")
        for core, number in enumerate(world.cores):
            if number == DEAD:
                continue
            if self.shelf.deadline(number) is not None:
                found.append(f"{self.name(core)} waits for a deadline")
            kept = self.shelf.core(number)
            if isinstance(kept, RemoteEngine):
                hangs = any(read.status == HUNG for _, _, read in self.reads(world, core))
                if kept.state not in RESTING:
                    found.append(f"{self.name(core)} is {kept.state.value}")
                if not kept.is_unused and not hangs:
                    found.append(f"{self.name(core)} has something left in its core")
            elif kept.leases():
                found.append(f"{self.name(core)} has open leases in its core")
        return found

    def is_unheard(self, asked: Asked) -> bool:
        """Whether a request has ended, and the scheduler, which has its lease kept, has to hear of it."""
        is_reported = all(part.report != UNREPORTED for part in asked.parts)
        return self.product.keeps and asked.stage == STARTED and is_reported and not asked.is_over

    def namesakes(self, requests: tuple[Asked, ...], request: int) -> list[Asked]:
        """The requests of the same engine that name the same lease, itself included."""
        return [
            asked
            for asked, of in zip(requests, self.product.requests, strict=True)
            if of == self.product.requests[request]
        ]

    def wants(self, requests: tuple[Asked, ...], request: int) -> bool:
        """Whether the scheduler knows of any request that wants the lease that this one names."""
        return any(
            asked.stage in (QUEUED, STARTED) and not asked.is_over for asked in self.namesakes(requests, request)
        )

    def awaited(self, world: World) -> list[str]:
        """What has a bound, and has not ended: requests that have started, leases that were granted."""
        found = [
            f"request {request} is not reported by rank {rank}"
            for request, asked in enumerate(world.requests)
            for rank, part in enumerate(asked.parts)
            if asked.stage == STARTED and part.report == UNREPORTED
        ]
        return found + [
            f"lease {lease} is held by rank {rank} of P"
            for lease, lent in enumerate(world.leases)
            for rank, each in enumerate(lent.ranks)
            if not (each.freed or each.grant or world.hung >> rank & 1)
        ]

    def reads(self, world: World, core: int) -> Iterator[tuple[int, int, Read]]:
        """The READs of one core: request, rank of P, READ."""
        engine, rank = divmod(core, self.product.decode_ranks)
        for request, (of_engine, _) in enumerate(self.product.requests):
            if of_engine == engine:
                for source, read in enumerate(world.requests[request].parts[rank].reads):
                    yield request, source, read

    def name(self, core: int) -> str:
        if core >= self.decode_cores:
            return f"rank {core - self.decode_cores} of P"
        engine, rank = divmod(core, self.product.decode_ranks)
        return f"d{engine}" if self.product.decode_ranks == 1 else f"rank {rank} of d{engine}"

    # --- symmetry ---------------------------------------------------------------------------------------------------

    def canonical(self, world: World) -> World:
        """One representative of all worlds that differ only in the order of requests, leases or decode engines."""
        if not self._orders:
            return world
        # First by what belongs to one request alone; what is left are the orders among those that look alike.
        looks = [
            (asked, world.leases[lease].is_foreign, [each[:3] for each in world.leases[lease].ranks])
            for (_, lease), asked in zip(self.product.requests, world.requests, strict=True)
        ]
        first = looks
        best: World | None = world
        candidates: list[tuple[int, _Order]] = []
        for number, order in enumerate(self._orders, 1):
            moved = list(looks)
            for old, new in enumerate(order[0]):
                moved[new] = looks[old]
            if moved < first:
                first, best, candidates = moved, None, [(number, order)]
            elif moved == first:
                candidates.append((number, order))
        for number, order in candidates:
            other = self._reordered(world, number, order)
            if best is None or other < best:
                best = other
        assert best is not None
        return best

    def _symmetries(self) -> list[_Order]:
        """Orders of the requests, with the orders of leases and engines that follow, under which the product looks the
        same; without the plain one."""
        product = self.product
        if product.unnumbered:
            return []  # few of such are searched
        found: list[_Order] = []
        numbers = range(len(product.requests))
        for order in itertools.permutations(numbers):
            engines: dict[int, int] = {}
            leases: dict[int, int] = {}
            fits = all(
                engines.setdefault(product.requests[old][0], product.requests[new][0]) == product.requests[new][0]
                and leases.setdefault(product.requests[old][1], product.requests[new][1]) == product.requests[new][1]
                for old, new in zip(numbers, order, strict=True)
            )
            if not fits or len(set(engines.values())) < len(engines) or len(set(leases.values())) < len(leases):
                continue
            if order == tuple(numbers):
                continue
            names = {f"r{old}": f"r{new}" for old, new in enumerate(order)}
            names |= {f"L{old}": f"L{new}" for old, new in leases.items()}
            names |= {f"d{old}": f"d{new}" for old, new in engines.items()}
            cores = [
                engines[old // product.decode_ranks] * product.decode_ranks + old % product.decode_ranks
                for old in range(self.decode_cores)
            ]
            names |= {
                _incarnation(old, sender): _incarnation(new, sender)
                for old, new in enumerate(cores)
                for sender in range(product.deviations + 1)
            }
            found.append((order, tuple(leases[old] for old in sorted(leases)), tuple(cores), names))
        return found

    def _reordered(self, world: World, number: int, order: _Order) -> World:
        requests, leases, cores, names = order
        ranks = self.product.decode_ranks
        all_cores = (*cores, *range(self.decode_cores, len(world.cores)))
        clocks = list(world.clocks)
        for old, new in enumerate(cores):
            clocks[new // ranks] = world.clocks[old // ranks]

        def move(items: tuple, to: tuple[int, ...]) -> tuple:  # type: ignore[type-arg]
            moved = list(items)
            for old, new in enumerate(to):
                moved[new] = items[old]
            return tuple(moved)

        def bits(mask: int) -> int:
            senders = range(self.product.deviations + 1)
            pairs = [(at, old, new) for at in senders for old, new in enumerate(cores)]
            return sum(self.bit(new, at, 0) for at, old, new in pairs if mask & self.bit(old, at, 0))

        def readdress(message: Message) -> Message:
            moved = tuple(sorted((leases[lease], says) for lease, says in message.leases))
            return message._replace(core=cores[message.core], leases=moved)

        if cores != tuple(range(self.decode_cores)):
            lent = tuple(
                lease._replace(
                    ranks=tuple(each._replace(told=bits(each.told), let_go=bits(each.let_go)) for each in lease.ranks)
                )
                for lease in world.leases
            )
        else:
            lent = world.leases
        return World(
            world.budget,
            world.is_plain,
            world.life,
            tuple(clocks),
            move(
                tuple(each if each == DEAD else self.shelf.renamed(each, number, names) for each in world.cores),
                all_cores,
            ),
            move(world.is_late, all_cores),
            move(world.handshakes, cores),
            move(world.connects, cores),
            move(world.successions, cores),
            move(world.connections, cores),
            move(world.requests, requests),
            move(lent, leases),
            tuple(readdress(message) for message in world.mail),
            tuple(sorted(readdress(message) for message in world.parked)),
            move(world.bereaved, cores),
            world.leaving,
            world.leaving_ns,
            world.hung,
        )

    # --- choices ----------------------------------------------------------------------------------------------------

    def choices(self, world: World) -> list[Choice]:
        """Everything that can happen next. What is prompt goes first, and leaves no other choice than to delay it."""
        prompt = self._mail_choices(world) or self._prompt_choices(world)
        if prompt:
            return prompt
        due = [
            core
            for core, number in enumerate(world.cores)
            if number != DEAD and not (world.is_late[core] or self._hangs(world, core)) and self._is_due(number)
        ]
        if due:
            found = [Choice(f"{self.name(core)} does what is due", 0, _of(Turn.wake, core)) for core in due]
            found += [Choice(f"{self.name(core)} is late to do what is due", 1, _of(Turn.sleep, core)) for core in due]
            return found
        found = []
        for core, number in enumerate(world.cores):
            if number != DEAD and world.is_late[core] and not self._hangs(world, core) and self._is_due(number):
                found.append(Choice(f"{self.name(core)} does what was due", 0, _of(Turn.wake, core)))
        for index, message in enumerate(world.parked):
            if message.kind in TO_PEER and world.hung >> message.rank & 1:
                continue
            found.append(Choice(f"{self._said(message)} arrives late", 0, _of(Turn.arrive_late, index), True))
        for request in range(len(world.requests)):
            found += self._request_choices(world, request)
        for core in range(self.decode_cores):
            if world.cores[core] != DEAD:
                found += self._connection_choices(world, core)
                found += self._read_choices(world, core)
        found += self._engine_choices(world)
        if not self._is_anything_expected(world):
            ticks = self.ticks_to_next(world)
            if ticks is not None:
                found.append(Choice(f"{ticks} ticks pass", 0, _of(Turn.pass_time, ticks)))
        return found

    def _is_due(self, number: int) -> bool:
        next_ns = self.shelf.deadline(number)
        return next_ns is not None and next_ns <= 0

    def _hangs(self, world: World, core: int) -> bool:
        return core >= self.decode_cores and bool(world.hung >> (core - self.decode_cores) & 1)

    def _said(self, message: Message) -> str:
        leases = ", ".join(str(lease) for lease, _ in message.leases)
        ends = self.name(message.core), f"rank {message.rank} of P"
        start, end = ends if message.kind in TO_PEER else reversed(ends)
        return f"{MESSAGES[message.kind]} of lease {leases} from {start} to {end}"

    def _mail_choices(self, world: World) -> list[Choice]:
        if not world.mail:
            return []
        message = world.mail[0]
        said = self._said(message)
        if message.kind in TO_PEER and world.hung >> message.rank & 1:
            return [Choice(f"{said} is not taken", 0, Turn.wait_to_be_taken)]
        found = [
            Choice(f"{said} arrives", 0, Turn.arrive),
            Choice(f"{said} is late", 1, Turn.park),
            Choice(f"{said} is lost", 1, Turn.lose),
            Choice(f"{said} arrives and will come again", 1, Turn.arrive_twice),
        ]
        if message.kind in (HEARTBEAT, NOTIFY):
            found.append(Choice(f"{said} finds the transport lost", 1, Turn.fail_notification))
        return found

    def _prompt_choices(self, world: World) -> list[Choice]:
        for request, asked in enumerate(world.requests):
            for rank, part in enumerate(asked.parts):
                core = self.product.requests[request][0] * self.product.decode_ranks + rank
                if part.command and not part.is_late:
                    said = f"on {self.name(core)} request {request} {COMMANDS[part.command]}"
                    return [
                        Choice(said, 0, _of(Turn.command, request, rank)),
                        Choice(f"{said}, late", 1, _of(Turn.delay_command, request, rank)),
                    ]
                for source, read in enumerate(part.reads):
                    said = f"on {self.name(core)} the READ of request {request} from rank {source} of P"
                    if read.status == ORDERED:
                        return [
                            Choice(f"{said} is posted", 0, _of(Turn.post, request, rank, source)),
                            Choice(f"{said} waits for its turn", 1, _of(Turn.delay_read, request, rank, source)),
                        ]
                    if read.status == ENDED:
                        found = [
                            Choice(f"{said} is noticed to have ended", 0, _of(Turn.notice, request, rank, source)),
                            Choice(f"{said} has ended unnoticed", 1, _of(Turn.delay_read, request, rank, source)),
                        ]
                        if self.product.supervised:
                            # By an executor that crashed over it.
                            twice = f"{said} is noticed to have ended, twice"
                            found.append(Choice(twice, 1, _of(Turn.notice_twice, request, rank, source)))
                        return found
        for core in range(self.decode_cores):
            for connection in world.connections[core]:
                if connection.tear_down == PROMPT:
                    said = f"{self.name(core)} tears connection {connection.number} down"
                    return [
                        Choice(said, 0, _of(Turn.tear_down, core, connection.number)),
                        Choice(f"{said}, slowly", 1, _of(Turn.delay_tear_down, core, connection.number)),
                    ]
                if connection.loss == PROMPT:
                    said = f"{self.name(core)} sees connection {connection.number} reset"
                    return [
                        Choice(said, 0, _of(Turn.see_loss, core, connection.number)),
                        Choice(f"{said}, late", 1, _of(Turn.delay_loss, core, connection.number)),
                    ]
        return []

    def _request_choices(self, world: World, request: int) -> list[Choice]:
        asked = world.requests[request]
        engine = self.product.requests[request][0]
        found: list[Choice] = []
        for rank, part in enumerate(asked.parts):
            if part.command:
                name = self.name(engine * self.product.decode_ranks + rank)
                said = f"on {name} request {request} {COMMANDS[part.command]} after all"
                found.append(Choice(said, 0, _of(Turn.command, request, rank)))
        if found or world.cores[engine * self.product.decode_ranks] == DEAD:
            return found
        if self.is_unheard(asked):
            said = f"the scheduler hears that request {request} has ended"
            found.append(Choice(said, 0, _of(Turn.hear_end, request)))
            if not asked.is_slow:
                found.append(Choice(f"{said}, late", 1, _of(Turn.delay_hearing, request)))
        was_wanted = any(each.is_over for each in self.namesakes(world.requests, request))
        if asked.stage == ABROAD and was_wanted and not self.wants(world.requests, request):
            # Its lease was let go of: it is computed.
            return [Choice(f"request {request} reads nothing", 0, _of(Turn.never_come, request))]
        if asked.stage == ABROAD:
            found.append(Choice(f"request {request} is announced", 0, _of(Turn.order, request, QUEUED, ANNOUNCE)))
            found.append(Choice(f"request {request} never reaches D", 1, _of(Turn.never_come, request)))
        if asked.stage in (ABROAD, QUEUED):
            found.append(Choice(f"request {request} starts", 0, _of(Turn.order, request, STARTED, START)))
            if not asked.is_slow:
                found.append(Choice(f"request {request} is long in coming", 1, _of(Turn.delay_request, request)))
        if self.product.keeps and asked.stage in (ABROAD, QUEUED):
            said = f"request {request} starts and is turned away"
            found.append(Choice(said, 1, _of(Turn.order, request, STARTED, TURN_AWAY)))
        if self.product.aborts:
            if asked.stage == QUEUED:
                said = f"request {request} needs nothing"
                found.append(Choice(said, 1, _of(Turn.order, request, OFF, NEED_NOTHING)))
            is_awaited = any(part.report == UNREPORTED for part in asked.parts)
            if asked.stage == STARTED and is_awaited and not asked.is_over:
                said = f"the client aborts request {request}"
                found.append(Choice(said, 1, _of(Turn.order, request, STARTED, ABORT)))
        return found

    def _connection_choices(self, world: World, core: int) -> list[Choice]:
        found = []
        name = self.name(core)
        is_slow = world.handshakes[core] == SLOW
        if world.handshakes[core] and world.leaving == LEFT:
            found.append(Choice(f"{name} is refused", 0, _of(Turn.be_refused, core), is_slow))
        elif world.handshakes[core] and world.hung:
            kept = self.shelf.core(world.cores[core])
            assert isinstance(kept, RemoteEngine)
            if kept.view().peer.failures < UNANSWERED_MAX:
                found.append(Choice(f"{name} is not answered", 0, _of(Turn.fail_to_connect, core), is_slow))
            elif not is_slow:
                return [Choice(f"{name} waits for an answer", 0, _of(Turn.delay_handshake, core))]
        elif world.handshakes[core]:
            found.append(Choice(f"the handshake of {name} succeeds", 0, _of(Turn.connect, core), is_slow))
            found.append(Choice(f"the handshake of {name} fails", 1, _of(Turn.fail_to_connect, core)))
            if self.product.supervised:
                found.append(Choice(f"{name} cannot exchange KV with P", 1, _of(Turn.find_incompatible, core)))
                said = f"the handshake of {name} has succeeded when its executor crashes"
                found.append(Choice(said, 1, _of(Turn.crash_connected, core)))
        if world.handshakes[core] == EXPECTED:
            found.append(Choice(f"the handshake of {name} is slow", 1, _of(Turn.delay_handshake, core)))
        for connection in world.connections[core]:
            number = connection.number
            if connection.tear_down == LATE:
                said = f"{name} tears connection {number} down after all"
                found.append(Choice(said, 0, _of(Turn.tear_down, core, number), True))
            if connection.loss == LATE:
                said = f"{name} sees connection {number} reset after all"
                found.append(Choice(said, 0, _of(Turn.see_loss, core, number), True))
            if self.product.is_builtin and connection.torn_ns < 0:
                said = f"somebody else gives up the agents of connection {number} of {name}"
                found.append(Choice(said, 1, _of(Turn.lose_shared, core, number)))
            for rank in range(self.product.prefill_ranks):
                if connection.links >> rank & 1 and not self.product.is_builtin:
                    said = f"the link of {name} to rank {rank} of P is reset"
                    found.append(Choice(said, 1, _of(Turn.reset_link, core, number, rank)))
        if self.product.supervised:
            found.append(Choice(f"the executor of {name} crashes", 1, _of(Turn.crash_executor, core)))
            found.append(Choice(f"{name} gives P up", 1, _of(Turn.retire, core)))
            found.append(Choice(f"the connector of {name} stops", 1, _of(Turn.stop, core)))
            found.append(
                Choice(f"the connector of {name} stops and waits for no READ", 1, _of(Turn.stop_at_once, core))
            )
            found.append(Choice(f"{name} is to meet P", 1, _of(Turn.meet, core)))
        return found

    def _read_choices(self, world: World, core: int) -> list[Choice]:
        found = []
        rank = core % self.product.decode_ranks
        for request, source, read in self.reads(world, core):
            said = f"on {self.name(core)} the READ of request {request} from rank {source} of P"
            if read.status == ORDERED_LATE:
                found.append(Choice(f"{said} is posted after all", 0, _of(Turn.post, request, rank, source), True))
            elif read.status == ENDED_LATE:
                found.append(Choice(f"{said} is noticed after all", 0, _of(Turn.notice, request, rank, source), True))
            elif read.status in (FLYING, FLYING_SLOW):
                is_alive = self.connection(world, core, read.connection).is_alive
                # Nothing but an error comes of a READ from a process that is gone.
                ends: tuple[tuple[int, int], ...] = ((COMPLETED, 0), (LOST, 1), (REFUSED, 1), (LOST_WRITING, 1))
                if self.product.checks:
                    ends = (*ends, (LIED, 1))
                for end, cost in ends if is_alive else ((LOST, 0), (LOST_WRITING, 1)):
                    execute = _of(Turn.end_read, request, rank, source, end)
                    found.append(Choice(f"{said} {ENDS[end]}", cost, execute, read.status == FLYING_SLOW))
                if read.status == FLYING:
                    found.append(Choice(f"{said} is slow", 1, _of(Turn.delay_read, request, rank, source)))
                    found.append(Choice(f"{said} never ends", 1, _of(Turn.hang, request, rank, source)))
            elif read.status in (CHECKING, CHECKING_SLOW):
                is_slow = read.status == CHECKING_SLOW
                found.append(Choice(f"{said} is checked", 0, _of(Turn.check_read, request, rank, source), is_slow))
                if not is_slow:
                    later = _of(Turn.delay_read, request, rank, source)
                    found.append(Choice(f"{said} is slow to be checked", 1, later))
        return found

    def connection(self, world: World, core: int, number: int) -> Connection:
        return next(each for each in world.connections[core] if each.number == number)

    def _engine_choices(self, world: World) -> list[Choice]:
        found = []
        for lease, lent in enumerate(world.leases):
            for rank, each in enumerate(lent.ranks):
                if each.grant:
                    said = f"rank {rank} of P hears of the grant of lease {lease}"
                    found.append(Choice(said, 0, _of(Turn.grant, lease, rank), each.grant == SLOW))
                    if each.grant == EXPECTED:
                        found.append(Choice(f"{said} late", 1, _of(Turn.delay_grant, lease, rank)))
        if self.product.leaves and world.leaving == STAYS and world.life == 1:
            found.append(Choice("P is told to leave", 1, Turn.leave))
            found.append(Choice("P is told to stop", 1, Turn.stop_peer))
        if world.leaving in IS_TO_END and self.may_end(world):
            found.append(Choice("P ends, as it had said", 0, Turn.end_peer))
            found.append(Choice("P ends, as it had said, and another one takes its place", 0, Turn.replace_peer))
            if world.leaving == LEAVES:
                found.append(Choice("P takes its time to end", 1, Turn.linger))
        for rank in range(self.product.prefill_ranks if self.product.hangs else 0):
            if world.hung >> rank & 1:
                found.append(Choice(f"rank {rank} of P goes on", 0, _of(Turn.go_on, rank), True))
            elif world.leaving != LEFT:
                found.append(Choice(f"rank {rank} of P hangs", 1, _of(Turn.hang_peer, rank)))
        if self.product.restarts and world.leaving != LEFT and not all(lent.is_foreign for lent in world.leases):
            found.append(Choice("P crashes and restarts with the same engine id", 1, Turn.crash_peer))
        if self.product.dies:
            found += [
                Choice(f"d{engine} crashes", 1, _of(Turn.crash_decode, engine))
                for engine in range(self.product.decode_engines)
                if world.cores[engine * self.product.decode_ranks] != DEAD
            ]
        return found

    def may_end(self, world: World) -> bool:
        """Whether P, which leaves, has nothing to wait for any more."""
        is_drained = all(each.freed and not each.grant for lent in world.leases for each in lent.ranks)
        return is_drained or world.leaving_ns >= LEAVING_GRACE_NS

    # --- time -------------------------------------------------------------------------------------------------------

    def _is_anything_expected(self, world: World) -> bool:
        return (
            EXPECTED in world.handshakes
            or (world.leaving in (LEAVES, STOPS) and self.may_end(world))
            or any(each.grant == EXPECTED for lent in world.leases for each in lent.ranks)
            or any(
                not asked.is_slow and (asked.stage in (ABROAD, QUEUED) or self.is_unheard(asked))
                for asked in world.requests
            )
            or any(
                read.status in (FLYING, CHECKING)
                for asked in world.requests
                for part in asked.parts
                for read in part.reads
            )
        )

    def ticks_to_next(self, world: World) -> int | None:
        """How long it is until the next deadline of a core or of the world; None: there is none."""
        found = []
        for core, number in enumerate(world.cores):
            if number == DEAD:
                continue
            clock = world.clocks[self.engine_of(core)] if core < self.decode_cores else TICK_NS
            next_ns = self.shelf.deadline(number)
            if next_ns is not None and next_ns > 0:
                found.append(-(-next_ns // clock))
            if core < self.decode_cores:
                # For as long as something may write over an agent that is removed.
                grace_ns = self.product.engine_limits.grace_ns
                found += [
                    -(-(grace_ns - connection.torn_ns) // clock)
                    for connection in world.connections[core]
                    if connection.torn_ns >= 0
                ]
        if world.leaving in (LEAVES, LINGERS) and world.leaving_ns < LEAVING_GRACE_NS:
            found.append(-(-(LEAVING_GRACE_NS - world.leaving_ns) // TICK_NS))
        return min(found, default=None)


def _of(method: Callable[..., None], *args: int) -> Callable[[Turn], None]:
    return lambda turn: method(turn, *args)


class Turn:
    """One choice while it is carried out: a world that changes, until the search takes it as the next one."""

    def __init__(self, rules: Rules, world: World, cost: int) -> None:
        self._rules = rules
        self._product = rules.product
        self._shelf = rules.shelf
        self._was_plain = world.is_plain
        self.budget = world.budget - cost
        self.is_plain = world.is_plain and cost == 0
        self.life = world.life
        self.clocks = world.clocks
        self.cores = world.cores
        self.is_late = world.is_late
        self.handshakes = world.handshakes
        self.connects = world.connects
        self.successions = world.successions
        self.connections = world.connections
        self.requests = world.requests
        self.leases = world.leases
        self.mail = world.mail
        self.parked = world.parked
        self.leaving = world.leaving
        self.leaving_ns = world.leaving_ns
        self.hung = world.hung
        self.bereaved = world.bereaved

    def world(self) -> World:
        return World(
            self.budget,
            self.is_plain,
            self.life,
            self.clocks,
            self.cores,
            self.is_late,
            self.handshakes,
            self.connects,
            self.successions,
            self.connections,
            self.requests,
            self.leases,
            self.mail,
            self.parked,
            self.bereaved,
            self.leaving,
            self.leaving_ns,
            self.hung,
        )

    # --- cores ------------------------------------------------------------------------------------------------------

    def feed(self, core: int, event: Event | None) -> None:
        """One turn of the core's executor."""
        try:
            number, effects = self._shelf.step(self.cores[core], event)
        except CoreBroken as broken:
            raise Broken(str(broken)) from broken
        self.cores = _put(self.cores, core, number)
        self.is_late = _put(self.is_late, core, False)
        for effect in effects:
            if core < self._rules.decode_cores:
                self._execute(core, effect)
            else:
                self._execute_on_peer(core - self._rules.decode_cores, effect)

    def _execute(self, core: int, effect: EngineEffect) -> None:
        match effect:
            case StartHandshake():
                if self.handshakes[core]:
                    raise Broken(f"{self._rules.name(core)} begins a handshake while one is in flight")
                if self.bereaved[core]:
                    raise Broken(f"invariant 10: {self._rules.name(core)} connects to P, which had said that it leaves")
                self.handshakes = _put(self.handshakes, core, EXPECTED)
            case PostReads(request_id=request_id, connection=connection):
                request, rank = self._part_of(core, request_id)
                part = self.requests[request].parts[rank]
                if any(read.status not in IS_OVER for read in part.reads):
                    raise Broken(
                        f"invariant 1: READs of request {request} are ordered, and earlier ones may still write"
                    )
                for source in range(self._product.prefill_ranks):
                    self._set_read(request, rank, source, Read(ORDERED, connection))
            case WithdrawReads():
                pass  # whatever is ordered may end now, as not wanted; or be posted already
            case CheckRead(request_id=request_id, read=source, connection=connection):
                request, rank = self._part_of(core, request_id)
                read = self.requests[request].parts[rank].reads[source]
                self._set_read(request, rank, source, read._replace(status=CHECKING, connection=connection))
            case TearDown(connection=number, failure=failure):
                is_suspect = self._rules.connection(self.world(), core, number).is_suspect
                if is_suspect and failure is None:
                    raise Broken(
                        f"invariant 6: who shares the agents of connection {number} is not told that it failed"
                    )
                self._set_connection(core, number, tear_down=PROMPT)
            case SendHold(leases=leases):
                self._send(HOLD, core, effect.connection, effect.rank, -effect.sent_ns, leases)
            case SendRelease(leases=leases):
                self._send(RELEASE, core, effect.connection, effect.rank, 0, leases)
            case SendHeartbeat(leases=leases):
                self._send(HEARTBEAT, core, effect.connection, effect.rank, 0, leases)
            case NotifyReleases(leases=leases):
                self._send(NOTIFY, core, effect.connection, effect.rank, 0, leases)
            case Report():
                self._report(core, effect)
            case LiftQuarantine(request_id=request_id):
                request, rank = self._part_of(core, request_id)
                if self.requests[request].parts[rank].report != QUARANTINED:
                    raise Broken(f"invariant 2: a quarantine of request {request} is lifted that does not exist")
                self._require_quiescence(request, rank, "leaves its quarantine")
                self._set_part(request, rank, report=REPORTED)
            case PassToSuccessor(event=event):
                kept = self._shelf.core(self.cores[core])
                if isinstance(kept, RemoteEngine) and kept.is_finished:
                    rank = core % self._product.decode_ranks
                    self.cores = _put(self.cores, core, self._rules.fresh_remote_engine(rank))
                    self.successions = _put(self.successions, core, self.successions[core] + 1)
                self.bereaved = _put(self.bereaved, core, False)
                self.feed(core, event)
            case ResolveBlocks():
                pass  # the shelf has answered it
            case NoteHandshakeFailure() | NoteLeaving() | NoteNotMet():
                pass  # for people
            case _:
                assert_never(effect)

    def _report(self, core: int, report: Report) -> None:
        request, rank = self._part_of(core, report.request_id)
        asked = self.requests[request]
        part = asked.parts[rank]
        if asked.stage != STARTED or part.report != UNREPORTED:
            raise Broken(f"invariant 2: {self._rules.name(core)} reports request {request}, which nobody awaits")
        # Whoever was only announced when P was given up, because another engine has its place, is not known any more.
        if self._product.keeps and not self.successions[core] and isinstance(report.failure, BlocksConsumed):
            raise Broken(f"invariant 3: {self._rules.name(core)} has let go of what request {request} wants")
        if isinstance(report.failure, ActorCrashed) and report.failure is not CRASH:
            raise Broken(f"an impossible event happens: {report.failure.error}")
        if report.failure is None:
            self._require_own_bytes(core, request, part)
        elif self.is_plain:
            self._require_reason(request, report.failure)
        if report.is_quarantined:
            for read in part.reads:
                if read.status not in IS_OVER:
                    self._set_connection(core, read.connection, is_suspect=True)
        else:
            self._require_quiescence(request, rank, "is reported")
        self._set_part(request, rank, report=QUARANTINED if report.is_quarantined else REPORTED)

    def _require_quiescence(self, request: int, rank: int, said: str) -> None:
        for source, read in enumerate(self.requests[request].parts[rank].reads):
            if read.status in MAY_WRITE or (read.status in (ENDED, ENDED_LATE) and read.end == LOST_WRITING):
                raise Broken(
                    f"invariant 1: request {request} {said}, and the READ from rank {source} of P may write into its "
                    "blocks"
                )

    def _require_own_bytes(self, core: int, request: int, part: Part) -> None:
        lease = self.leases[self._product.requests[request][1]]
        is_right = self.clocks[self._rules.engine_of(core)] == TICK_NS
        for source, read in enumerate(part.reads):
            if read.content == FOREIGN and self._product.is_builtin and (lease.is_old or not is_right):
                continue
            if read.content != OWN:
                what = CONTENTS[read.content]
                raise Broken(f"invariant 3: request {request} is done with {what} from rank {source} of P")

    def _require_reason(self, request: int, failure: Failure) -> None:
        """Nothing has gone wrong. A lease may be over that D came for too late, that is at its bound, or that another
        request has used and released."""
        number = self._product.requests[request][1]
        has_been_used = any(
            part.report
            for other, (_, lease) in enumerate(self._product.requests)
            for part in self.requests[other].parts
            if lease == number and other != request
        )
        lease, limits = self.leases[self._product.requests[request][1]], self._product.engine_limits
        is_builtin, total_ns = self._product.is_builtin, self._product.lending_limits.total_ns
        bound_ns = limits.lease_ns - limits.margin_ns if is_builtin else total_ns
        # Nothing is promised beyond the grace period, and D trusts no promise to its last moment.
        is_late = self.leaving != STAYS and self.leaving_ns + self._margin_ns(limits) >= LEAVING_GRACE_NS
        if not (has_been_used or lease.is_old or is_late) and lease.age_ns < bound_ns:
            raise Broken(f"invariant 9: nothing has gone wrong, and request {request} fails: {failure}")

    @staticmethod
    def _margin_ns(limits: EngineLimits) -> int:
        """How long before the end of a promise D may stop to trust it."""
        return limits.lease_ns // DRIFT_DIVISOR + limits.margin_ns

    def _execute_on_peer(self, rank: int, effect: lending.LendingEffect) -> None:
        match effect:
            case lending.TellLeaving(reply_to=reply_to):
                assert isinstance(reply_to, ReplyTo)
                core, connection = self._rules.core_named(reply_to), reply_to.connection
                here = None if self.cores[core] == DEAD else self._connection(core, connection)
                if here is not None and here.links >> rank & 1:
                    self.mail = (*self.mail, Message(LEAVING, core, connection, rank, 0, ()))
            case lending.AnswerHold(reply_to=reply_to):
                assert isinstance(reply_to, ReplyTo)
                core, connection = self._rules.core_named(reply_to), reply_to.connection
                says = tuple(
                    sorted(
                        [(self._rules.name_numbers[name], remaining_ns) for name, remaining_ns in effect.held]
                        + [(self._rules.name_numbers[name], -1) for name, _ in effect.gone]
                    )
                )
                for name, remaining_ns in says:
                    if remaining_ns >= 0:
                        self._promise(name, rank, core, reply_to.sender, remaining_ns)
                self.mail = (*self.mail, Message(HELD, core, connection, rank, -effect.sent_ns, says))
            case lending.AnswerRelease(reply_to=reply_to, leases=leases):
                assert isinstance(reply_to, ReplyTo)
                core, connection = self._rules.core_named(reply_to), reply_to.connection
                says = tuple(sorted((self._rules.name_numbers[name], 0) for name in leases))
                self.mail = (*self.mail, Message(RELEASED, core, connection, rank, 0, says))
            case lending.FreeBlocks(lease=name, expired=expired):
                self._free(self._rules.name_numbers[name], rank, expired=expired)
            case lending.AnswerLeave() | lending.ForgetLease() | lending.WatchNotifications():
                pass  # of no matter for what is modelled
            case lending.NoteLateRelease():
                pass  # for people
            case _:
                assert_never(effect)

    def _promise(self, name: int, rank: int, core: int, sender: int, remaining_ns: int) -> None:
        lease, bit = self._rules.lease_called(name), self._rules.bit(core, sender, name)
        lent = self.leases[lease].ranks[rank]
        if lent.freed:
            raise Broken(f"invariant 5: rank {rank} of P says Held of lease {lease}, which it has freed")
        if lent.let_go & bit:
            raise Broken(f"invariant 5: rank {rank} of P keeps lease {lease} for one that will not let go of it again")
        self._set_lent(lease, rank, promised_ns=max(lent.promised_ns, remaining_ns), told=lent.told | bit)

    def _free(self, lease: int, rank: int, *, expired: bool) -> None:
        lent = self.leases[lease].ranks[rank]
        if lent.freed:
            raise Broken(f"invariant 5: rank {rank} of P frees lease {lease} twice")
        if expired and lent.promised_ns > 0:
            raise Broken(
                f"invariant 5: rank {rank} of P ends lease {lease} {lent.promised_ns} ns before what it has promised"
            )
        dead = sum(
            self._rules.bit(core, sender, name)
            for core in range(self._rules.decode_cores)
            if self.cores[core] == DEAD
            for sender in range(self.successions[core] + 1)
            for name in (0, len(self._rules.leases))
        )
        if not expired and lent.told & ~(lent.let_go | dead):
            raise Broken(f"invariant 5: rank {rank} of P frees lease {lease} while somebody who was told Held reads")
        self._set_lent(lease, rank, freed=1)
        if all(each.freed for each in self.leases[lease].ranks):
            self.leases = _put(self.leases, lease, self.leases[lease]._replace(is_foreign=True))

    def wake(self, core: int) -> None:
        self.feed(core, None)

    def sleep(self, core: int) -> None:
        self.is_late = _put(self.is_late, core, True)

    # --- parts ------------------------------------------------------------------------------------------------------

    def _part_of(self, core: int, request_id: str) -> tuple[int, int]:
        return self._rules.request_numbers[request_id], core % self._product.decode_ranks

    def _core_of(self, request: int, rank: int) -> int:
        return self._product.requests[request][0] * self._product.decode_ranks + rank

    def _set_part(self, request: int, rank: int, **changes: object) -> None:
        asked = self.requests[request]
        part = asked.parts[rank]._replace(**changes)  # type: ignore[arg-type]
        self.requests = _put(self.requests, request, asked._replace(parts=_put(asked.parts, rank, part)))

    def _set_read(self, request: int, rank: int, source: int, read: Read) -> None:
        self._set_part(request, rank, reads=_put(self.requests[request].parts[rank].reads, source, read))

    def _set_lent(self, lease: int, rank: int, **changes: int) -> None:
        lent = self.leases[lease]
        each = lent.ranks[rank]._replace(**changes)
        self.leases = _put(self.leases, lease, lent._replace(ranks=_put(lent.ranks, rank, each)))

    def _set_connection(self, core: int, number: int, **changes: int) -> None:
        self.connections = _put(
            self.connections,
            core,
            tuple(
                each._replace(**changes) if each.number == number else each  # type: ignore[arg-type]
                for each in self.connections[core]
            ),
        )

    def _connection(self, core: int, number: int) -> Connection | None:
        return next((each for each in self.connections[core] if each.number == number), None)

    # --- messages ---------------------------------------------------------------------------------------------------

    def _send(self, kind: int, core: int, number: int, rank: int, age_ns: int, leases: tuple[LeaseName, ...]) -> None:
        connection = self._connection(core, number)
        if connection is None or connection.torn_ns >= 0:
            raise Broken(f"{self._rules.name(core)} sends {MESSAGES[kind]} on a connection that is torn down")
        if connection.links >> rank & 1:
            says = tuple(sorted((self._rules.name_numbers[name], 0) for name in leases))
            self.mail = (*self.mail, Message(kind, core, number, rank, age_ns, says, self.successions[core]))

    def arrive(self) -> None:
        message, self.mail = self.mail[0], self.mail[1:]
        self._deliver(message)

    def arrive_twice(self) -> None:
        message = self.mail[0]
        self.arrive()
        self.parked = tuple(sorted((*self.parked, message)))

    def park(self) -> None:
        message, self.mail = self.mail[0], self.mail[1:]
        self.parked = tuple(sorted((*self.parked, message)))

    def wait_to_be_taken(self) -> None:
        message = self.mail[0]
        self.parked = tuple(
            each
            for each in self.parked
            if (each.kind, each.core, each.connection, each.rank)
            != (message.kind, message.core, message.connection, message.rank)
        )
        self.park()

    def lose(self) -> None:
        self.mail = self.mail[1:]

    def fail_notification(self) -> None:
        message, self.mail = self.mail[0], self.mail[1:]
        self._set_connection(message.core, message.connection, is_suspect=True)
        self.feed(message.core, NotificationFailed(connection=message.connection, failure=TURN_LOST))

    def arrive_late(self, index: int) -> None:
        message = self.parked[index]
        self.parked = (*self.parked[:index], *self.parked[index + 1 :])
        self._deliver(message)

    def _deliver(self, message: Message) -> None:
        if message.kind not in TO_PEER:
            if self.cores[message.core] != DEAD:
                if message.kind == LEAVING:
                    self._set_connection(message.core, message.connection, is_told=True)
                self.feed(message.core, self._answer(message))
            return
        names = tuple(self._rules.names[name] for name, _ in message.leases)
        engine, rank = divmod(message.core, self._product.decode_ranks)
        reply_to = ReplyTo(f"d{engine}", rank, message.connection, message.sender)
        ranks = self._product.decode_ranks
        core = self._rules.decode_cores + message.rank
        match message.kind:
            case self_kind if self_kind == HOLD:
                self.feed(
                    core,
                    lending.HoldAsked(
                        reply_to=reply_to,
                        engine_id=self._product.decode_id(engine),
                        rank=rank,
                        ranks=ranks,
                        sent_ns=-message.age_ns,
                        leases=names,
                        incarnation=_incarnation(message.core, message.sender),
                    ),
                )
            case self_kind if self_kind == RELEASE:
                for name, _ in message.leases:
                    lease = self._rules.lease_called(name)
                    let_go = self.leases[lease].ranks[message.rank].let_go
                    gone = self._rules.bit(message.core, message.sender, name)
                    self._set_lent(lease, message.rank, let_go=let_go | gone)
                self.feed(
                    core,
                    lending.ReleaseAsked(
                        reply_to=reply_to,
                        engine_id=self._product.decode_id(engine),
                        rank=rank,
                        ranks=ranks,
                        leases=names,
                        incarnation=_incarnation(message.core, message.sender),
                    ),
                )
            case self_kind if self_kind == HEARTBEAT:
                request_ids = tuple(name.request_id for name in names)
                self.feed(core, lending.HeartbeatNotified(sender=f"agent {message.core}", request_ids=request_ids))
            case _:
                for each in names:
                    notified = lending.ReleaseNotified(
                        sender=f"agent {message.core}", request_id=each.request_id, ranks=ranks
                    )
                    self.feed(core, notified)

    def _answer(self, message: Message) -> Event:
        names = self._rules.names
        if message.kind == LEAVING:
            return LeavingSaid(connection=message.connection, grace_ns=LEAVING_GRACE_NS)
        if message.kind == RELEASED:
            return ReleaseAnswered(
                connection=message.connection,
                rank=message.rank,
                leases=tuple(names[lease] for lease, _ in message.leases),
            )
        return HoldAnswered(
            connection=message.connection,
            rank=message.rank,
            sent_ns=-message.age_ns,
            held=tuple((names[lease], says) for lease, says in message.leases if says >= 0),
            gone=tuple((names[lease], "over") for lease, says in message.leases if says < 0),
        )

    # --- requests ---------------------------------------------------------------------------------------------------

    def order(self, request: int, stage: int, command: int) -> None:
        """The decode engine's scheduler tells its ranks. The first hears at once, the others as soon as they can."""
        asked = self.requests[request]
        parts = tuple(part._replace(command=command, is_late=False, age_ns=0) for part in asked.parts)
        is_slow = asked.is_slow and stage == QUEUED
        is_over = self._product.keeps and command in (NEED_NOTHING, ABORT, LET_GO)
        self.requests = _put(self.requests, request, Asked(stage, is_slow, parts, is_over))
        if is_over and command in _LAST and not self._rules.wants(self.requests, request):
            parts = tuple(part._replace(command=_LAST[command]) for part in parts)
            self.requests = _put(self.requests, request, Asked(stage, is_slow, parts, is_over))
        self.command(request, 0)

    def hear_end(self, request: int) -> None:
        """All ranks have reported it. Whoever else names its lease may come now, or has come."""
        asked = self.requests[request]
        self.requests = _put(self.requests, request, asked._replace(is_slow=False, is_over=True))
        if not self._rules.wants(self.requests, request):
            self.order(request, STARTED, LET_GO)

    def delay_hearing(self, request: int) -> None:
        self.requests = _put(self.requests, request, self.requests[request]._replace(is_slow=True))

    def command(self, request: int, rank: int) -> None:
        part = self.requests[request].parts[rank]
        core, request_id = self._core_of(request, rank), self._rules.request_ids[request]
        lease = self._rules.name_of(request)
        self._set_part(request, rank, command=NO_COMMAND, is_late=False, age_ns=0)
        if part.command in (ANNOUNCE, START, TURN_AWAY):
            self.bereaved = _put(self.bereaved, core, False)
        if part.command == ANNOUNCE:
            self.feed(core, Announced(request_id=request_id, lease=lease, address="host", age_ns=part.age_ns))
        elif part.command == START:
            started = Started(
                request_id=request_id,
                lease=lease,
                address="host",
                age_ns=part.age_ns,
                keeps_lease=self._product.keeps,
            )
            self.feed(core, started)
        elif part.command == TURN_AWAY:  # by the roster
            self._set_part(request, rank, report=REPORTED)
            keeps_lease = self._product.keeps
            unread = ReleaseUnread(request_id=request_id, lease=lease, address="host", keeps_lease=keeps_lease)
            self.feed(core, unread)
        elif part.command in (NEED_NOTHING, NEED_NOTHING_AND_LET_GO):
            self.feed(core, ReleaseUnread(request_id=request_id, lease=lease, address="host"))
        elif part.command in (ABORT, ABORT_AND_LET_GO):
            self.feed(core, AbortAsked(request_id=request_id))
        if part.command in (LET_GO, NEED_NOTHING_AND_LET_GO, ABORT_AND_LET_GO):
            self.feed(core, LetGo(lease=lease))

    def delay_command(self, request: int, rank: int) -> None:
        self._set_part(request, rank, is_late=True)

    def delay_request(self, request: int) -> None:
        self.is_plain = self._was_plain
        self.requests = _put(self.requests, request, self.requests[request]._replace(is_slow=True))

    def never_come(self, request: int) -> None:
        self.requests = _put(self.requests, request, self.requests[request]._replace(stage=OFF))

    # --- READs ------------------------------------------------------------------------------------------------------

    def post(self, request: int, rank: int, source: int) -> None:
        """Its turn has come: the executor asks whether it is still wanted."""
        read = self.requests[request].parts[rank].reads[source]
        core = self._core_of(request, rank)
        kept = self._shelf.core(self.cores[core])
        assert isinstance(kept, RemoteEngine)
        if not kept.wants(self._rules.request_ids[request]):
            self._set_read(request, rank, source, read._replace(status=ENDED, end=NOT_WANTED))
            return
        connection = self._connection(core, read.connection)
        if connection is None or connection.is_suspect or kept.state is not peer.State.READY:
            raise Broken(
                f"invariant 7: a READ of request {request} is posted on connection {read.connection}, which is not to "
                f"be trusted; the peer is {kept.state.value}"
            )
        self._set_read(request, rank, source, read._replace(status=FLYING))

    def end_read(self, request: int, rank: int, source: int, end: int) -> None:
        """It is over, or has failed; P's memory was read at this moment."""
        read = self.requests[request].parts[rank].reads[source]
        is_foreign = self.leases[self._product.requests[request][1]].is_foreign
        content = read.content
        if end in (COMPLETED, LIED):
            content = CORRUPT if end == LIED else FOREIGN if is_foreign else OWN
        self._set_read(request, rank, source, read._replace(status=ENDED, end=end, content=content))

    def notice(self, request: int, rank: int, source: int) -> None:
        read = self.requests[request].parts[rank].reads[source]
        after = Read(WRITING, read.connection) if read.end == LOST_WRITING else Read(content=read.content)
        self._set_read(request, rank, source, after)
        if read.end in (LOST, LOST_WRITING):
            self._set_connection(self._core_of(request, rank), read.connection, is_suspect=True)
        self.feed(self._core_of(request, rank), self._end_of(request, source, read))

    def notice_twice(self, request: int, rank: int, source: int) -> None:
        read = self.requests[request].parts[rank].reads[source]
        self.notice(request, rank, source)
        self.feed(self._core_of(request, rank), self._end_of(request, source, read))

    def check_read(self, request: int, rank: int, source: int) -> None:
        read = self.requests[request].parts[rank].reads[source]
        self._set_read(request, rank, source, Read(content=read.content))
        checked = ReadChecked(
            request_id=self._rules.request_ids[request],
            read=source,
            connection=read.connection,
            failure=UNEQUAL if read.content == CORRUPT else None,
        )
        self.feed(self._core_of(request, rank), checked)

    def _end_of(self, request: int, source: int, read: Read) -> ReadEnded:
        failures = {LOST: TURN_LOST, LOST_WRITING: TURN_LOST, REFUSED: TURN_REFUSED}
        return ReadEnded(
            request_id=self._rules.request_ids[request],
            read=source,
            connection=read.connection,
            ended_ns=-read.age_ns,
            failure=failures.get(read.end),
            is_quiescent=read.end != LOST_WRITING,
            was_wanted=read.end != NOT_WANTED,
        )

    def delay_read(self, request: int, rank: int, source: int) -> None:
        """To the next status: the late or slow one of its pair."""
        read = self.requests[request].parts[rank].reads[source]
        self._set_read(request, rank, source, read._replace(status=read.status + 1))

    def hang(self, request: int, rank: int, source: int) -> None:
        read = self.requests[request].parts[rank].reads[source]
        self._set_read(request, rank, source, read._replace(status=HUNG))

    # --- connections ------------------------------------------------------------------------------------------------

    def connect(self, core: int) -> None:
        self.feed(core, self._connected(core))

    def _connected(self, core: int) -> Event:
        self.handshakes = _put(self.handshakes, core, DONE)
        number = self.connects[core] + 1
        self.connects = _put(self.connects, core, number)
        connection = Connection(number, is_alive=True, links=(1 << self._product.prefill_ranks) - 1)
        self.connections = _put(self.connections, core, tuple(sorted((*self.connections[core], connection))))
        return Connected(
            connection=number,
            workers=tuple(map(str, range(self._product.prefill_ranks))),
            is_builtin=self._product.is_builtin,
            life=str(self.life),
        )

    def fail_to_connect(self, core: int) -> None:
        self.handshakes = _put(self.handshakes, core, DONE)
        self.feed(core, ConnectFailed(failure=UNREACHABLE))

    def be_refused(self, core: int) -> None:
        self.handshakes = _put(self.handshakes, core, DONE)
        self.feed(core, ConnectFailed(failure=NOBODY_THERE))

    def find_incompatible(self, core: int) -> None:
        self.handshakes = _put(self.handshakes, core, DONE)
        self.feed(core, ConnectFailed(failure=UNLIKE))

    def delay_handshake(self, core: int) -> None:
        self.handshakes = _put(self.handshakes, core, SLOW)

    def tear_down(self, core: int, number: int) -> None:
        """The executor removes the agents and closes the links."""
        reads = [read for _, _, read in self._rules.reads(self.world(), core) if read.connection == number]
        if any(read.status in IN_FLIGHT for read in reads):
            raise Broken(f"invariant 6: connection {number} is torn down while READs on it are in flight")
        if any(read.status == WRITING for read in reads):
            self._set_connection(core, number, links=0, loss=NOTHING, tear_down=NOTHING, torn_ns=0)
        else:
            self._forget_connection(core, number)
        self.feed(core, TornDown(connection=number))

    def _forget_connection(self, core: int, number: int) -> None:
        kept = tuple(each for each in self.connections[core] if each.number != number)
        self.connections = _put(self.connections, core, kept)

    def delay_tear_down(self, core: int, number: int) -> None:
        self._set_connection(core, number, tear_down=LATE)

    def see_loss(self, core: int, number: int) -> None:
        connection = self._rules.connection(self.world(), core, number)
        self._set_connection(core, number, loss=NOTHING, is_suspect=True)
        is_the_last = number == self.connects[core] and not self.handshakes[core]
        kept = self._shelf.core(self.cores[core])
        # One that was abandoned has ended before.
        if connection.is_told and is_the_last and isinstance(kept, RemoteEngine) and kept.is_connected:
            self.bereaved = _put(self.bereaved, core, True)
        self.feed(core, LinkLost(connection=number, detail="reset"))

    def delay_loss(self, core: int, number: int) -> None:
        self._set_connection(core, number, loss=LATE)

    def reset_link(self, core: int, number: int, rank: int) -> None:
        connection = self._rules.connection(self.world(), core, number)
        self._set_connection(core, number, links=connection.links & ~(1 << rank), loss=PROMPT)

    def crash_executor(self, core: int) -> None:
        """Its tasks are gone, and with them the handshake in flight."""
        self.handshakes = _put(self.handshakes, core, DONE)
        self.feed(core, Crashed(failure=CRASH))

    def crash_connected(self, core: int) -> None:
        """What was on its way to the executor when it crashed is heard when it runs again."""
        connected = self._connected(core)
        self.feed(core, Crashed(failure=CRASH))
        self.feed(core, connected)

    def lose_shared(self, core: int, number: int) -> None:
        self._set_connection(core, number, is_suspect=True)
        self.feed(core, SharedAgentsLost(connection=number, failure=TURN_LOST))

    def meet(self, core: int) -> None:
        self.bereaved = _put(self.bereaved, core, False)
        self.feed(core, MeetAsked(address="host"))

    def retire(self, core: int) -> None:
        self.feed(core, Retire())

    def stop(self, core: int) -> None:
        self.feed(core, Stop(failure=STOPPED))

    def stop_at_once(self, core: int) -> None:
        self.feed(core, Stop(failure=STOPPED))
        self.feed(core, Unwatched())

    # --- engines ----------------------------------------------------------------------------------------------------

    def grant(self, lease: int, rank: int) -> None:
        self._set_lent(lease, rank, grant=DONE)
        self.feed(self._rules.decode_cores + rank, lending.Granted(lease=self._rules.leases[lease]))

    def delay_grant(self, lease: int, rank: int) -> None:
        self._set_lent(lease, rank, grant=SLOW)

    def leave(self) -> None:
        self.is_plain = self._was_plain
        self.leaving = LEAVES
        for rank in range(self._product.prefill_ranks):
            self.feed(self._rules.decode_cores + rank, lending.Leave(reply_to=None, grace_ns=LEAVING_GRACE_NS))

    def stop_peer(self) -> None:
        """It has no grace period, and breaks its promises as if it had crashed."""
        self.leaving, self.leaving_ns = STOPS, LEAVING_GRACE_NS
        for rank in range(self._product.prefill_ranks):
            self.feed(self._rules.decode_cores + rank, lending.Leave(reply_to=None, grace_ns=0))

    def linger(self) -> None:
        self.leaving = LINGERS

    def end_peer(self) -> None:
        """Nobody takes its place. What is still lent is lost, and must not have been promised for longer."""
        if self.leaving == STOPS:
            self.crash_peer()
            self.leaving = LEFT
            return
        for lease, lent in enumerate(self.leases):
            for rank, each in enumerate(lent.ranks):
                if not each.freed and each.promised_ns > 0:
                    raise Broken(
                        f"invariant 5: P ends, as it had said, {each.promised_ns} ns before what rank {rank} has "
                        f"promised of lease {lease}"
                    )
        is_over, before = self.leaving_ns >= LEAVING_GRACE_NS, self.leases
        self.crash_peer()
        self.leases = tuple(
            lent._replace(is_old=lent.is_old or is_over, age_ns=old.age_ns)
            for lent, old in zip(self.leases, before, strict=True)
        )
        self.leaving = LEFT

    def replace_peer(self) -> None:
        self.end_peer()
        self.leaving = STAYS

    def hang_peer(self, rank: int) -> None:
        self.hung |= 1 << rank

    def go_on(self, rank: int) -> None:
        """What has waited is taken at once."""
        self.hung &= ~(1 << rank)
        waiting = [each for each in self.parked if each.kind in TO_PEER and each.rank == rank]
        self.parked = tuple(each for each in self.parked if each not in waiting)
        self.mail = (*self.mail, *waiting)

    def crash_peer(self) -> None:
        """All its ranks at once. Answers that had arrived on D's side can still be read there."""
        self.life += 1
        self.leaving, self.leaving_ns, self.hung = STAYS, 0, 0
        lost = Lent(grant=DONE, freed=FREED_BY_CRASH)
        ranks = range(self._product.prefill_ranks)
        # Whoever had not met the life that lent the blocks cannot know that a built-in engine is another one now.
        unmet = {
            lease
            for (engine, lease), asked in zip(self._product.requests, self.requests, strict=True)
            if asked.stage == ABROAD or any(not self.connects[core] for core in self._rules.cores_of(engine))
        }
        self.leases = tuple(
            Lease(is_foreign=True, is_old=lent.is_old or number in unmet, age_ns=0, ranks=(lost,) * len(ranks))
            for number, lent in enumerate(self.leases)
        )
        for rank in ranks:
            core = self._rules.decode_cores + rank
            self.cores = _put(self.cores, core, self._rules.new_life())
            self.is_late = _put(self.is_late, core, False)
        self.mail = tuple(message for message in self.mail if message.kind not in TO_PEER)
        self.parked = tuple(message for message in self.parked if message.kind not in TO_PEER)
        for core in range(self._rules.decode_cores):
            for each in self.connections[core]:
                loss = PROMPT if each.links and not self._product.is_builtin else each.loss
                self._set_connection(core, each.number, is_alive=False, links=0, loss=loss)

    def crash_decode(self, engine: int) -> None:
        """Nothing of it is left but what is on its way to P."""
        part = Part(NO_COMMAND, False, 0, REPORTED, (Read(),) * self._product.prefill_ranks)
        for request, (of_engine, _) in enumerate(self._product.requests):
            if of_engine == engine:
                asked = Asked(OFF, False, (part,) * self._product.decode_ranks)
                self.requests = _put(self.requests, request, asked)
        for core in self._rules.cores_of(engine):
            self.cores = _put(self.cores, core, DEAD)
            self.is_late = _put(self.is_late, core, False)
            self.handshakes = _put(self.handshakes, core, DONE)
            self.connections = _put(self.connections, core, ())
        self.parked = tuple(
            each for each in self.parked if each.kind in TO_PEER or self._rules.engine_of(each.core) != engine
        )

    # --- time -------------------------------------------------------------------------------------------------------

    def pass_time(self, ticks: int) -> None:
        rules = self._rules
        on_peer_ns = ticks * TICK_NS
        for core, number in enumerate(self.cores):
            if number == DEAD:
                continue
            by_ns = ticks * self.clocks[rules.engine_of(core)] if core < rules.decode_cores else on_peer_ns
            self.cores = _put(self.cores, core, self._shelf.elapse(number, by_ns))
            self.is_late = _put(self.is_late, core, False)
            if core < rules.decode_cores:
                self._age(core, by_ns)
        self._age_mail(ticks)
        if self.leaving in (LEAVES, LINGERS):
            self.leaving_ns = min(self.leaving_ns + on_peer_ns, LEAVING_GRACE_NS)
        unheard = {
            lease
            for (_, lease), asked in zip(self._product.requests, self.requests, strict=True)
            if asked.stage == ABROAD
        }
        self.leases = tuple(
            Lease(
                is_foreign=lent.is_foreign,
                is_old=lent.is_old or number in unheard,
                age_ns=min(lent.age_ns + on_peer_ns, self._product.lending_limits.total_ns),
                ranks=tuple(each._replace(promised_ns=max(0, each.promised_ns - on_peer_ns)) for each in lent.ranks),
            )
            for number, lent in enumerate(self.leases)
        )

    def _age(self, core: int, by_ns: int) -> None:
        rank = core % self._product.decode_ranks
        for request, source, read in list(self._rules.reads(self.world(), core)):
            if read.status in (ENDED, ENDED_LATE):
                self._set_read(request, rank, source, read._replace(age_ns=read.age_ns + by_ns))
        for request, (engine, _) in enumerate(self._product.requests):
            part = self.requests[request].parts[rank]
            if engine == self._rules.engine_of(core) and part.command:
                self._set_part(request, rank, age_ns=part.age_ns + by_ns)
        for connection in self.connections[core]:
            if connection.torn_ns >= 0:
                self._age_torn(core, connection, connection.torn_ns + by_ns)

    def _age_torn(self, core: int, connection: Connection, torn_ns: int) -> None:
        if torn_ns < self._product.engine_limits.grace_ns:
            self._set_connection(core, connection.number, torn_ns=torn_ns)
            return
        # The back end keeps its promise: nothing writes any more.
        rank = core % self._product.decode_ranks
        for request, source, read in list(self._rules.reads(self.world(), core)):
            if read.status == WRITING and read.connection == connection.number:
                self._set_read(request, rank, source, Read(content=read.content))
        self._forget_connection(core, connection.number)

    def _age_mail(self, ticks: int) -> None:
        """A message that is later than any lease is lost."""
        latest_ns = 2 * self._product.lending_limits.lease_ns
        aged = (
            message._replace(age_ns=message.age_ns + ticks * self.clocks[self._rules.engine_of(message.core)])
            for message in self.parked
        )
        self.parked = tuple(sorted(message for message in aged if message.age_ns <= latest_ns))
