"""The model checker: breadth-first search over products of the production machines.

The world is what the machines are connected by in production, reduced to what matters: a decode engine with some ranks
and the block pool of its scheduler, a prefill engine with as many ranks and its own pool, NIXL between them, a channel
for notifications, and time. The machines are not modelled: the search calls their `step`, and executes their effects as
the shell does. Everything else is a choice that the search makes both ways:

    the shell       a command reaches a rank, a READ is posted or its end is noticed, a timer fires, in any order
    NIXL            a READ completes, fails, or never ends; a handshake succeeds or fails
    the channel     a notification is delivered, lost, or delivered and kept (so that it comes again)
    the engines     the client aborts; P crashes and restarts with the same engine id; D crashes, and its clients leave
    time            each lease passes through three phases: proven on D, no longer proven on D, over on P

Time has no numbers. What is true of every execution is only the order: D stops believing in a lease before P ends it,
because D takes off the clock error and P starts its timer later. That order is what the phases say.

Blocks are reused at once: a block that P frees holds foreign KV from then on. So a READ that completes after its
blocks were freed has brought foreign bytes, and a machine that calls it done is caught.

The search is exhaustive up to a number of deviations. What should happen promptly (a request starts, a READ is posted,
its end is noticed, a notification arrives) does, unless a deviation delays it; a fault is a deviation (crash, abort,
loss, duplication, a READ or a handshake that fails, a READ that hangs), and so is a timer that fires although what it
waits for was about to happen. With n deviations every execution is found that differs from the plain one in n places,
in every order of everything else.

Checked in every state (the numbers are those of the invariants in the design):
    1  D's blocks return to its pool only when no READ that names them is in flight, or they are quarantined
    2  a rank reports a request exactly once, and only where one is awaited
    3  a request that ends done holds the KV of its own prompt
    5  P frees a lease exactly once
    -  an agent is removed only when no READ from it is in flight
and, over the whole graph, that from every reachable state an end is reachable without deviations, where an end is:
every request reported by every rank, every lease ended.

A world is a flat tuple of small integers: machine values are interned, and each (value, event) is stepped once. Ranks
are interchangeable, and so are requests, so worlds that differ only in their order count once. A violation is reported
with the shortest sequence of choices that leads to it.
"""

from __future__ import annotations

import functools
import itertools
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import msgspec

from statemachine import lease, peer, request, transfer
from statemachine.failures import HandshakeTimeout, PeerRestarted, PeerRetired, TransferError
from statemachine.kernel import Effect, Event, Machine, ProtocolError


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """What is searched: so many requests on so many ranks, with so many deviations in one execution."""

    requests: int = 2
    ranks: int = 2
    deviations: int = 1
    retries: int = 1
    states_max: int = 5_000_000


class Explored(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a search that found nothing wrong. `taken`: every (machine, state, event) that was stepped."""

    bounds: Bounds
    states: int
    edges: int
    ends: int
    deepest: int
    seconds: float
    taken: frozenset[tuple[str, str, str]]


class Violation(Exception):
    """An invariant does not hold. `scenario` is the shortest sequence of choices that leads there."""

    def __init__(self, invariant: str, scenario: list[str]) -> None:
        steps = "\n".join(f"  {number:3}. {step}" for number, step in enumerate(scenario, 1))
        super().__init__(f"{invariant}, after\n{steps}")
        self.invariant = invariant
        self.scenario = scenario


class TooManyStates(Exception):
    """The search was given up; its bounds are too wide."""


class Machines(msgspec.Struct, frozen=True, kw_only=True):
    """The machines to search over: production's, unless a test breaks one to see whether the search notices."""

    request: Machine[request.Request] = request.MACHINE
    lease: Machine[lease.Lease] = lease.MACHINE
    peer: Machine[peer.Peer] = peer.MACHINE
    transfer: Machine[transfer.Transfer] = transfer.MACHINE


class _Broken(Exception):
    """An invariant failed while a choice was executed; the search adds the scenario."""


World: TypeAlias = tuple[int, ...]


class Choice(NamedTuple):
    """Something that can happen: in words, what it costs of the deviations, and how to carry it out."""

    said: str
    cost: int
    execute: Callable[[_Execution], None]


# Phases of a lease, and a time within each, against a proof that ends at 1.
_PROVEN, _UNPROVEN, _OVER = 0, 1, 2
_PROOF = request.Proof(proven_until_ns=1, basis="granted")

# Life of a READ. What is on its way (ordered, completed, failed) is prompt unless it was delayed.
_NONE, _ORDERED, _FLYING, _COMPLETED, _FAILED, _HUNG = range(6)
_DELAYED = 8
"""Added to a state of a READ or of a notification that is not prompt any more."""
_IN_FLIGHT = (_ORDERED, _ORDERED + _DELAYED, _FLYING, _HUNG)

_NOBODY = -1


class _Fields(NamedTuple):
    """Where things lie in a world: offsets of the parts, which are per request or per (rank, request)."""

    incarnation: int
    deviations_left: int
    phase: int
    waiting_ranks: int
    p_lends: int
    ranks: int
    rank_size: int

    # Offsets inside a rank.
    peer: int
    connected: int
    request: int
    read: int
    read_from: int
    read_good: int
    transfer: int
    reported: int
    quarantined: int
    lease: int
    freed: int
    release: int
    notification: int
    start_delayed: int


def _fields(requests: int) -> _Fields:
    inside = [2 + index * requests for index in range(12)]
    return _Fields(
        incarnation=0,
        deviations_left=1,
        phase=2,
        waiting_ranks=2 + requests,
        p_lends=2 + 2 * requests,
        ranks=2 + 3 * requests,
        rank_size=2 + 12 * requests,
        peer=0,
        connected=1,
        request=inside[0],
        read=inside[1],
        read_from=inside[2],
        read_good=inside[3],
        transfer=inside[4],
        reported=inside[5],
        quarantined=inside[6],
        lease=inside[7],
        freed=inside[8],
        release=inside[9],
        notification=inside[10],
        start_delayed=inside[11],
    )


Stepped: TypeAlias = tuple[int, tuple[Effect, ...]]


class _Search:
    """The state of one search: interned values, memoised steps, and the layout of worlds."""

    def __init__(self, bounds: Bounds, machines: Machines) -> None:
        self.bounds = bounds
        self.machines = machines
        self.at = _fields(bounds.requests)
        self._values: list[Any] = []
        self._ids: dict[Any, int] = {}
        self._stepped: dict[tuple[int, Event], Stepped] = {}
        self.taken: set[tuple[str, str, str]] = set()
        requests = range(bounds.requests)
        self._orders = list(itertools.permutations(requests))
        self._lost = TransferError(peer="P", operation="READ", error="lost", transport_lost=True)
        self._unreachable = HandshakeTimeout(peer="P", timeout_seconds=5)
        self._restarted = PeerRestarted(peer="P", expected_incarnation="0", found_incarnation="1")

    # --- machine values -----------------------------------------------------------------------------------------

    def intern(self, value: Any) -> int:
        known = self._ids.get(value)
        if known is None:
            known = self._ids[value] = len(self._values)
            self._values.append(value)
        return known

    def value(self, identity: int) -> Any:
        return self._values[identity]

    def step(self, machine: Machine[Any], identity: int, event: Event) -> Stepped:
        stepped = self._stepped.get((identity, event))
        if stepped is None:
            before = self._values[identity]
            try:
                after, effects = machine.step(before, event)
            except ProtocolError as error:
                raise _Broken(f"an impossible event happens: {error}") from error
            if (before.state, type(event)) in machine.table:
                self.taken.add((machine.name, before.state.value, type(event).__name__))
            stepped = self._stepped[identity, event] = (self.intern(after), effects)
        return stepped

    # --- worlds -------------------------------------------------------------------------------------------------

    def starts(self) -> list[World]:
        """Every prefill is computed on P and no request has reached a rank of D.

        The leases are held already, or, as a deviation, one of them will be granted late.
        """
        plain = self._start(late=False)
        return [plain, self._start(late=True)] if self.bounds.deviations else [plain]

    def _start(self, *, late: bool) -> World:
        at, bounds = self.at, self.bounds
        requests = range(bounds.requests)
        world = [0] * (at.ranks + at.rank_size * bounds.ranks)
        world[at.deviations_left] = bounds.deviations - int(late)
        for r in requests:
            world[at.waiting_ranks + r] = bounds.ranks
            world[at.p_lends + r] = 1
        for k in range(bounds.ranks):
            base = at.ranks + k * at.rank_size
            world[base + at.peer] = self.intern(peer.Peer(engine_id="P"))
            world[base + at.connected] = _NOBODY
            for r in requests:
                world[base + at.request + r] = _NOBODY
                world[base + at.read_from + r] = _NOBODY
                world[base + at.transfer + r] = _NOBODY
                is_late = late and k == r == 0
                state = lease.State.COMPUTING if is_late else lease.State.HELD
                deadline_ns = None if is_late else 2
                world[base + at.lease + r] = self.intern(
                    lease.Lease(request_id=str(r), state=state, deadline_ns=deadline_ns)
                )
        return tuple(world)

    def canonical(self, world: World) -> World:
        """One representative of all worlds that differ only in the order of ranks and of requests."""
        at, size = self.at, self.at.rank_size
        best: World | None = None
        ranks = [world[base : base + size] for base in range(at.ranks, len(world), size)]
        for order in self._orders:
            if order == self._orders[0]:
                head, bodies = world[: at.ranks], sorted(ranks)
            else:
                head = (*world[:2], *_permuted(world[2 : at.ranks], order))
                bodies = sorted((*rank[:2], *_permuted(rank[2:], order)) for rank in ranks)
            candidate = (*head, *itertools.chain.from_iterable(bodies))
            if best is None or candidate < best:
                best = candidate
        assert best is not None
        return best

    def is_end(self, world: World) -> bool:
        at = self.at
        if any(world[at.waiting_ranks : at.waiting_ranks + self.bounds.requests]):
            return False
        for base in range(at.ranks, len(world), at.rank_size):
            for r in range(self.bounds.requests):
                held = world[base + at.lease + r]
                if held != _NOBODY and not self.machines.lease.is_terminal(self.value(held)):
                    return False
        return True

    # --- choices ------------------------------------------------------------------------------------------------

    def choices(self, world: World) -> list[Choice]:
        """Everything that can happen next. What is prompt goes first, and leaves no other choice than to delay it."""
        at, bounds = self.at, self.bounds
        found: list[Choice] = []
        for k in range(bounds.ranks):
            base = at.ranks + k * at.rank_size
            for r in range(bounds.requests):
                found += self._prompt_choices(world, k, base, r)
                if found:
                    return found
        found.append(Choice("P crashes and restarts with the same engine id", 1, _Execution.crash))
        if any(world[at.waiting_ranks : at.waiting_ranks + bounds.requests]):
            found.append(Choice("D crashes", 1, _Execution.crash_decode))
        for r in range(bounds.requests):
            phase = world[at.phase + r]
            if phase < _OVER:
                said = ("D's proof of lease {} ends", "lease {} is over on P")[phase].format(r)
                found.append(Choice(said, self._cost_of_time(world, r), functools.partial(_Execution.pass_time, r=r)))
            if world[at.waiting_ranks + r]:
                found.append(Choice(f"the client aborts request {r}", 1, functools.partial(_Execution.abort, r=r)))
        for k in range(bounds.ranks):
            base = at.ranks + k * at.rank_size
            found += self._peer_choices(world, k, base)
            for r in range(bounds.requests):
                found += self._request_choices(world, k, base, r)
                found += self._lease_choices(world, k, base, r)
        return found

    def _cost_of_time(self, world: World, r: int) -> int:
        """A lease is long: that it runs out under a request that is being served is a deviation."""
        if world[self.at.phase + r] != _PROVEN or not world[self.at.waiting_ranks + r]:
            return 0
        reads = range(self.at.ranks + self.at.read + r, len(world), self.at.rank_size)
        return int(all(world[read] != _HUNG for read in reads))

    def _prompt_choices(self, world: World, k: int, base: int, r: int) -> list[Choice]:
        at = self.at
        if world[base + at.request + r] == _NOBODY and not world[base + at.start_delayed + r]:
            return [
                Choice(f"rank {k}: request {r} starts", 0, lambda run: run.begin(k, r)),
                Choice(f"rank {k}: request {r} is slow to start", 1, lambda run: run.delay_start(k, r)),
            ]
        read = world[base + at.read + r]
        if read == _ORDERED:
            return [
                Choice(f"rank {k}: the READ of {r} is posted", 0, lambda run: run.post(k, r)),
                Choice(f"rank {k}: the READ of {r} waits for its turn", 1, lambda run: run.delay_read(k, r)),
            ]
        if read in (_COMPLETED, _FAILED):
            return [
                Choice(f"rank {k}: the end of the READ of {r} is noticed", 0, lambda run: run.notice(k, r)),
                Choice(f"rank {k}: the end of the READ of {r} goes unnoticed", 1, lambda run: run.delay_read(k, r)),
            ]
        if world[base + at.notification + r] == 1:
            return [
                Choice(f"P rank {k}: the release of {r} arrives", 0, lambda run: run.arrive(k, r, keep=False)),
                Choice(f"P rank {k}: the release of {r} arrives twice", 1, lambda run: run.arrive(k, r, keep=True)),
                Choice(f"P rank {k}: the release of {r} is lost", 1, lambda run: run.drop(k, r)),
                Choice(f"P rank {k}: the release of {r} is slow", 1, lambda run: run.delay_release(k, r)),
            ]
        return []

    def _peer_choices(self, world: World, k: int, base: int) -> list[Choice]:
        at = self.at
        state = self.value(world[base + at.peer]).state
        if state is peer.State.HANDSHAKING:
            failed = peer.HandshakeFailed(failure=self._unreachable)
            refused = peer.HandshakeIncompatible(failure=self._unreachable)
            return [
                Choice(f"rank {k}: the handshake succeeds", 0, lambda run: run.connect(k)),
                Choice(f"rank {k}: the handshake fails", 1, lambda run: run.step_peer(k, failed)),
                Choice(f"rank {k}: P is incompatible", 1, lambda run: run.step_peer(k, refused)),
            ]
        if state in (peer.State.BACKOFF, peer.State.INCOMPATIBLE):
            return [Choice(f"rank {k}: the back-off is over", 0, lambda run: run.step_peer(k, peer.BackoffElapsed()))]
        if state is peer.State.DRAINING:
            hung = any(world[base + at.read + r] == _HUNG for r in range(self.bounds.requests))
            timed_out = peer.QuiesceTimeout()
            return [Choice(f"rank {k}: the drain times out", int(not hung), lambda run: run.step_peer(k, timed_out))]
        if state is peer.State.READY:
            suspect = peer.ConnectionSuspect(failure=self._lost)
            return [
                Choice(f"rank {k}: a notification cannot be sent", 1, lambda run: run.step_peer(k, suspect)),
                Choice(f"rank {k}: P is given up", 1, lambda run: run.step_peer(k, peer.Retired())),
            ]
        return []

    def _request_choices(self, world: World, k: int, base: int, r: int) -> list[Choice]:
        at = self.at
        name = f"rank {k}: request {r}"
        identity = world[base + at.request + r]
        if identity == _NOBODY:
            return [Choice(f"{name} starts at last", 0, lambda run: run.begin(k, r))]
        found = self._read_choices(world, k, base, r)
        value = self.value(identity)
        if self.machines.request.is_terminal(value):
            return found
        hung = world[base + at.read + r] == _HUNG
        deadline = request.DeadlinePassed(timeout_seconds=120)
        found.append(
            Choice(f"{name}: its deadline passes", int(not hung), lambda run: run.step_request(k, r, deadline))
        )
        if value.state is request.State.DRAINING:
            waited = request.QuiesceTimeout(waited_seconds=30)
            found.append(
                Choice(f"{name}: its READ does not end", int(not hung), lambda run: run.step_request(k, r, waited))
            )
        if world[at.phase + r] != _PROVEN and value.proof is not None:
            lapsed = request.LeaseLapsed(now_ns=world[at.phase + r])
            found.append(Choice(f"{name}: the lease timer fires", 0, lambda run: run.step_request(k, r, lapsed)))
        return found

    def _read_choices(self, world: World, k: int, base: int, r: int) -> list[Choice]:
        at = self.at
        name = f"rank {k}: the READ of {r}"
        read = world[base + at.read + r]
        peer_lives = world[base + at.read_from + r] == world[at.incarnation]
        if read == _ORDERED + _DELAYED:
            return [Choice(f"{name} is posted at last", 0, lambda run: run.post(k, r))]
        if read in (_COMPLETED + _DELAYED, _FAILED + _DELAYED):
            return [Choice(f"{name}: its end is noticed at last", 0, lambda run: run.notice(k, r))]
        if read == _FLYING and peer_lives:
            return [
                Choice(f"{name} completes", 0, lambda run: run.land(k, r)),
                Choice(f"{name} fails", 1, lambda run: run.lose(k, r)),
                Choice(f"{name} hangs", 1, lambda run: run.hang(k, r)),
            ]
        if read == _FLYING:
            return [
                Choice(f"{name} fails, P is gone", 0, lambda run: run.lose(k, r)),
                Choice(f"{name} hangs", 1, lambda run: run.hang(k, r)),
            ]
        if read == _HUNG:
            end = _Execution.land if peer_lives else _Execution.lose
            return [Choice(f"{name} ends after all", 1, lambda run: end(run, k, r))]
        return []

    def _lease_choices(self, world: World, k: int, base: int, r: int) -> list[Choice]:
        at = self.at
        found: list[Choice] = []
        if world[base + at.notification + r]:
            found.append(Choice(f"P rank {k}: the release of {r} arrives", 0, lambda run: run.arrive(k, r, keep=False)))
        held = world[base + at.lease + r]
        if held == _NOBODY:
            return found
        state = self.value(held).state
        if state is lease.State.COMPUTING:
            granted = lease.Granted(deadline_ns=2)
            found.append(Choice(f"P rank {k}: lease {r} is granted", 0, lambda run: run.step_lease(k, r, granted)))
            withdrawn = lease.Withdrawn()
            found.append(Choice(f"P rank {k}: lease {r} is withdrawn", 1, lambda run: run.step_lease(k, r, withdrawn)))
        elif state is lease.State.HELD and world[at.phase + r] == _OVER:
            over = lease.DeadlinePassed(now_ns=2)
            found.append(Choice(f"P rank {k}: lease {r} times out", 0, lambda run: run.step_lease(k, r, over)))
        return found


def _permuted(parts: World, order: tuple[int, ...]) -> World:
    """Per-request parts, each in the order given."""
    width = len(order)
    return tuple(parts[start + index] for start in range(0, len(parts), width) for index in order)


class _Execution:
    """One choice being carried out: the shell's part of the machines' effects, on a mutable copy of the world."""

    def __init__(self, search: _Search, world: World) -> None:
        self._search = search
        self._at = search.at
        self.world = list(world)

    def _base(self, k: int) -> int:
        return self._at.ranks + k * self._at.rank_size

    def _ranks(self) -> range:
        return range(self._search.bounds.ranks)

    def _requests(self) -> range:
        return range(self._search.bounds.requests)

    # --- the engines and time -----------------------------------------------------------------------------------

    def crash(self) -> None:
        """P is a new process: its leases and its memory are gone, and so is everything on its way to it."""
        at, world = self._at, self.world
        world[at.incarnation] += 1
        for r in self._requests():
            world[at.p_lends + r] = 0
            for k in self._ranks():
                world[self._base(k) + at.lease + r] = _NOBODY
                world[self._base(k) + at.notification + r] = 0

    def crash_decode(self) -> None:
        """D is a new process: its requests and whatever was written into its memory are gone; P has not noticed."""
        at, world = self._at, self.world
        given_up = request.Request(
            request_id="", remote_request_id="", peer="P", awaited=False, retries_left=0, state=request.State.FAILED
        )
        for k in self._ranks():
            base = self._base(k)
            world[base + at.peer] = self._search.intern(peer.Peer(engine_id="P"))
            world[base + at.connected] = _NOBODY
            for r in self._requests():
                world[base + at.request + r] = self._search.intern(given_up)
                world[base + at.read + r] = _NONE
                world[base + at.read_from + r] = _NOBODY
                world[base + at.read_good + r] = 0
                world[base + at.transfer + r] = _NOBODY
                world[base + at.reported + r] = 1
                world[base + at.quarantined + r] = 0
                world[base + at.release + r] = 0
                world[base + at.start_delayed + r] = 0
        for r in self._requests():
            world[at.waiting_ranks + r] = 0

    def pass_time(self, r: int) -> None:
        self.world[self._at.phase + r] += 1

    def abort(self, r: int) -> None:
        """The command reaches the ranks that have started the request; the others start it and abort it at once."""
        for k in self._ranks():
            if self.world[self._base(k) + self._at.request + r] == _NOBODY:
                self.begin(k, r)
            self.step_request(k, r, request.Aborted())

    # --- requests -----------------------------------------------------------------------------------------------

    def delay_start(self, k: int, r: int) -> None:
        self.world[self._base(k) + self._at.start_delayed + r] = 1

    def begin(self, k: int, r: int) -> None:
        """The command reaches the rank; an actor that is finished is replaced by a fresh one."""
        at, base = self._at, self._base(k)
        if self._search.value(self.world[base + at.peer]).state is peer.State.GONE:
            self.world[base + at.peer] = self._search.intern(peer.Peer(engine_id="P"))
            self.world[base + at.connected] = _NOBODY
        value = request.Request(
            request_id=str(r),
            remote_request_id=str(r),
            peer="P",
            awaited=True,
            retries_left=self._search.bounds.retries,
        )
        self.world[self._base(k) + self._at.request + r] = self._search.intern(value)
        self.step_peer(k, peer.Wanted())

    def step_request(self, k: int, r: int, event: Event) -> None:
        at, base = self._at, self._base(k)
        after, effects = self._search.step(self._search.machines.request, self.world[base + at.request + r], event)
        self.world[base + at.request + r] = after
        released = False
        for effect in effects:
            match effect:
                case request.PostReads():
                    self._order_read(base, r)
                case request.AwaitPeer():
                    self.step_peer(k, peer.Wanted())
                case request.SendRelease():
                    released = True
                case request.Report():
                    self._report(k, r, effect)
                case _:
                    pass
        if released:
            self._release(k, r)

    def _state(self, k: int, r: int) -> request.State | None:
        identity = self.world[self._base(k) + self._at.request + r]
        return None if identity == _NOBODY else self._search.value(identity).state

    def _order_read(self, base: int, r: int) -> None:
        at, world = self._at, self.world
        if world[base + at.read + r] != _NONE:
            raise _Broken("a READ is ordered while another one of the same request is open")
        world[base + at.read + r] = _ORDERED
        world[base + at.read_from + r] = world[base + at.connected]
        world[base + at.read_good + r] = 0

    def _report(self, k: int, r: int, effect: request.Report) -> None:
        at, world, base = self._at, self.world, self._base(k)
        if world[base + at.reported + r]:
            raise _Broken(f"invariant 2: rank {k} reports request {r} twice")
        world[base + at.reported + r] = 1
        world[at.waiting_ranks + r] -= 1
        if effect.failure is None and not world[base + at.read_good + r]:
            raise _Broken(f"invariant 3: request {r} is done on rank {k} with KV that P had freed")
        if effect.quarantined:
            world[base + at.quarantined + r] = 1
            if world[base + at.transfer + r] != _NOBODY:
                self._step_transfer(k, r, transfer.Abandoned())
        if world[at.waiting_ranks + r] == 0:
            self._free_on_d(r)

    def _free_on_d(self, r: int) -> None:
        """All ranks have reported: the scheduler frees the blocks, but for those that are quarantined."""
        at, world = self._at, self.world
        for k in self._ranks():
            base = self._base(k)
            open_read = world[base + at.read + r] in _IN_FLIGHT
            if open_read and not world[base + at.quarantined + r]:
                raise _Broken(f"invariant 1: blocks of request {r} are freed while rank {k} may write into them")

    # --- reads --------------------------------------------------------------------------------------------------

    def post(self, k: int, r: int) -> None:
        """The NIXL owner comes to the order: it is posted, or skipped because nobody wants it any more."""
        at, world, base = self._at, self.world, self._base(k)
        if self._state(k, r) is request.State.READING:
            world[base + at.read + r] = _FLYING
            world[base + at.transfer + r] = self._search.intern(transfer.Transfer(request_id=str(r), read=0))
            return
        world[base + at.read + r] = _NONE
        world[base + at.quarantined + r] = 0
        self.step_request(k, r, request.ReadSkipped(read=0, now_ns=self._now(r)))
        self._settle(k)

    def land(self, k: int, r: int) -> None:
        at, world, base = self._at, self.world, self._base(k)
        world[base + at.read + r] = _COMPLETED
        world[base + at.read_good + r] = world[at.p_lends + r]

    def lose(self, k: int, r: int) -> None:
        self.world[self._base(k) + self._at.read + r] = _FAILED

    def hang(self, k: int, r: int) -> None:
        self.world[self._base(k) + self._at.read + r] = _HUNG

    def delay_read(self, k: int, r: int) -> None:
        self.world[self._base(k) + self._at.read + r] += _DELAYED

    def notice(self, k: int, r: int) -> None:
        """The end of a READ reaches the owner, and through it the actor: the peer first, then the request."""
        at, world, base = self._at, self.world, self._base(k)
        failed = world[base + at.read + r] in (_FAILED, _FAILED + _DELAYED)
        world[base + at.read + r] = _NONE
        lost = self._search._lost
        self._step_transfer(k, r, transfer.Errored(failure=lost) if failed else transfer.Completed())
        world[base + at.transfer + r] = _NOBODY
        if failed and world[base + at.read_from + r] == world[base + at.connected]:
            self.step_peer(k, peer.ConnectionSuspect(failure=lost))
        # A completion is stamped when it is noticed: not earlier than it happened.
        now_ns = self._now(r)
        if failed:
            self.step_request(k, r, request.ReadFailed(read=0, now_ns=now_ns, failure=lost))
        else:
            self.step_request(k, r, request.ReadCompleted(read=0, completed_ns=now_ns))
        world[base + at.read_from + r] = _NOBODY
        self._settle(k)

    def _step_transfer(self, k: int, r: int, event: Event) -> None:
        at, world, base = self._at, self.world, self._base(k)
        machine = self._search.machines.transfer
        after, effects = self._search.step(machine, world[base + at.transfer + r], event)
        for effect in effects:
            match effect:
                case transfer.LiftQuarantine():
                    world[base + at.quarantined + r] = 0
                case transfer.ReleaseHandle():
                    if world[base + at.read + r] in _IN_FLIGHT:
                        raise _Broken(f"rank {k}: the handle of request {r} is released while its READ is in flight")
                    after, _ = self._search.step(machine, after, transfer.HandleReleased())
                case _:
                    pass
        world[base + at.transfer + r] = after

    def _now(self, r: int) -> int:
        return self.world[self._at.phase + r]

    # --- peers --------------------------------------------------------------------------------------------------

    def connect(self, k: int) -> None:
        self.world[self._base(k) + self._at.connected] = self.world[self._at.incarnation]
        self.step_peer(k, peer.HandshakeSucceeded())

    def step_peer(self, k: int, event: Event) -> None:
        at, world, base = self._at, self.world, self._base(k)
        after, effects = self._search.step(self._search.machines.peer, world[base + at.peer], event)
        world[base + at.peer] = after
        for effect in effects:
            match effect:
                case peer.AnnounceReady():
                    self._announce(k)
                case peer.AnnounceFailed():
                    for r in self._waiting(k):
                        self.step_request(k, r, request.PeerFailed(failure=effect.failure))
                    for r in self._requests():
                        world[base + at.release + r] = 0
                case peer.TearDownConnection():
                    if self._open_reads(k):
                        raise _Broken(f"rank {k}: the agent of P is removed while a READ from it is in flight")
                    world[base + at.connected] = _NOBODY
                case peer.AbandonConnection():
                    self._abandon(k)
                case _:
                    pass
        self._settle(k)

    def _waiting(self, k: int) -> list[int]:
        return [r for r in self._requests() if self._state(k, r) is request.State.PENDING_HANDSHAKE]

    def _open_reads(self, k: int) -> list[int]:
        at, world, base = self._at, self.world, self._base(k)
        return [
            r
            for r in self._requests()
            if world[base + at.read + r] != _NONE and world[base + at.read_from + r] == world[base + at.connected]
        ]

    def _announce(self, k: int) -> None:
        """Offer the connection to every waiting request, then send what was waiting to be sent."""
        at, world, base = self._at, self.world, self._base(k)
        for r in self._waiting(k):
            if world[base + at.connected] == 0:
                ready = request.PeerReady(now_ns=self._now(r), reads=1, proof=_PROOF)
                self.step_request(k, r, ready)
            else:
                # Every request was granted by the first incarnation.
                self.step_request(k, r, request.PeerFailed(failure=self._search._restarted))
        for r in self._requests():
            if world[base + at.release + r]:
                world[base + at.release + r] = 0
                self._send(k, r)

    def _abandon(self, k: int) -> None:
        at, world, base = self._at, self.world, self._base(k)
        world[base + at.connected] = _NOBODY
        lost = PeerRetired(peer="P")
        for r in self._requests():
            if self._state(k, r) is request.State.READING:
                self.step_request(k, r, request.PeerLost(failure=lost))

    def _settle(self, k: int) -> None:
        at, world, base = self._at, self.world, self._base(k)
        known: peer.Peer = self._search.value(world[base + at.peer])
        state = known.state
        if state is peer.State.DRAINING and not self._open_reads(k):
            self.step_peer(k, peer.ReadsDrained())
        elif state is peer.State.IDLE and self._waiting(k):
            self.step_peer(k, peer.Wanted())
        elif known.retiring or state is peer.State.GONE:
            for r in self._waiting(k):
                self.step_request(k, r, request.PeerFailed(failure=PeerRetired(peer="P")))

    # --- notifications and leases -------------------------------------------------------------------------------

    def _release(self, k: int, r: int) -> None:
        base = self._base(k)
        if self._search.value(self.world[base + self._at.peer]).state is peer.State.READY:
            self._send(k, r)
        else:
            self.world[base + self._at.release + r] = 1

    def _send(self, k: int, r: int) -> None:
        at, world, base = self._at, self.world, self._base(k)
        if world[base + at.connected] == world[at.incarnation]:
            world[base + at.notification + r] = 1

    def arrive(self, k: int, r: int, *, keep: bool) -> None:
        base = self._base(k)
        self.world[base + self._at.notification + r] = 1 + _DELAYED if keep else 0
        if self.world[base + self._at.lease + r] != _NOBODY:
            self.step_lease(k, r, lease.ConsumerNotified(sender="D", expected=1))

    def drop(self, k: int, r: int) -> None:
        self.world[self._base(k) + self._at.notification + r] = 0

    def delay_release(self, k: int, r: int) -> None:
        self.world[self._base(k) + self._at.notification + r] += _DELAYED

    def step_lease(self, k: int, r: int, event: Event) -> None:
        at, world, base = self._at, self.world, self._base(k)
        after, effects = self._search.step(self._search.machines.lease, world[base + at.lease + r], event)
        world[base + at.lease + r] = after
        for effect in effects:
            match effect:
                case lease.CountEarlyNotifications():
                    self.step_lease(k, r, lease.EarlyNotificationsCounted())
                case lease.FreeBlocks():
                    if world[base + at.freed + r]:
                        raise _Broken(f"invariant 5: P rank {k} frees lease {r} twice")
                    world[base + at.freed + r] = 1
                case _:
                    pass
        if all(world[self._base(rank) + at.freed + r] for rank in self._ranks()):
            world[at.p_lends + r] = 0


def explore(bounds: Bounds | None = None, machines: Machines | None = None) -> Explored:
    """Search everything within `bounds`. Raises Violation, or TooManyStates when there is too much of it."""
    bounds = bounds or Bounds()
    search = _Search(bounds, machines or Machines())
    began = time.perf_counter()
    worlds = search.starts()
    index = {search.canonical(start): number for number, start in enumerate(worlds)}
    parents = [(_NOBODY, "lease 0 is granted late on rank 0" if number else "") for number in range(len(worlds))]
    depths = [0] * len(worlds)
    back: list[list[int]] = [[] for _ in worlds]
    ends: list[int] = []
    edges = 0
    frontier = deque(range(len(worlds)))
    while frontier:
        here = frontier.popleft()
        world = worlds[here]
        if search.is_end(world):
            ends.append(here)
        for choice in search.choices(world):
            if choice.cost > world[search.at.deviations_left]:
                continue
            execution = _Execution(search, world)
            execution.world[search.at.deviations_left] -= choice.cost
            try:
                choice.execute(execution)
            except _Broken as broken:
                raise Violation(str(broken), [*_scenario(parents, here), choice.said]) from broken
            there = tuple(execution.world)
            key = search.canonical(there)
            known = index.get(key)
            edges += 1
            if known is None:
                known = index[key] = len(worlds)
                if known >= bounds.states_max:
                    raise TooManyStates(f"more than {bounds.states_max} states within {bounds}")
                worlds.append(there)
                parents.append((here, choice.said))
                depths.append(depths[here] + 1)
                back.append([])
                frontier.append(known)
            if choice.cost == 0:
                back[known].append(here)
    _require_ends(worlds, parents, back, ends)
    return Explored(
        bounds=bounds,
        states=len(worlds),
        edges=edges,
        ends=len(ends),
        deepest=max(depths),
        seconds=time.perf_counter() - began,
        taken=frozenset(search.taken),
    )


def _scenario(parents: list[tuple[int, str]], here: int) -> list[str]:
    steps: list[str] = []
    while here != _NOBODY:
        here, said = parents[here]
        steps.append(said)
    return [step for step in reversed(steps) if step]


def _require_ends(worlds: list[World], parents: list[tuple[int, str]], back: list[list[int]], ends: list[int]) -> None:
    """Liveness: walk back from the ends over edges that are no faults; every world must be met."""
    reaches_end = bytearray(len(worlds))
    frontier = list(ends)
    for end in ends:
        reaches_end[end] = 1
    while frontier:
        for before in back[frontier.pop()]:
            if not reaches_end[before]:
                reaches_end[before] = 1
                frontier.append(before)
    stuck = reaches_end.find(0)
    if stuck >= 0:
        raise Violation("liveness: no end is reachable without deviations", _scenario(parents, stuck))


def main(arguments: list[str]) -> int:
    """`python -m statemachine.explore [requests [ranks [deviations]]]`: search, and say what was searched."""
    numbers = [int(argument) for argument in arguments]
    bounds = Bounds(**dict(zip(("requests", "ranks", "deviations"), numbers, strict=False)))
    sys.stdout.write(
        f"exploring {bounds.requests} requests, {bounds.ranks} ranks, {bounds.deviations} deviations ...\n"
    )
    sys.stdout.flush()
    try:
        found = explore(bounds)
    except Violation as violation:
        sys.stdout.write(f"VIOLATION: {violation}\n")
        return 1
    rate = found.states / found.seconds
    sys.stdout.write(
        f"nothing wrong in {found.states:,} states, {found.edges:,} edges, {found.ends:,} ends, "
        f"{found.deepest} choices deep, {len(found.taken)} transitions taken, {found.seconds:.1f} s ({rate:,.0f}/s)\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
