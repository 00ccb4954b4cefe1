"""The model checker for the core of an engine's scheduler, `Loads`: exhaustive search over what vLLM 0.32 does with a
few requests and a small pool.

What vLLM does is reduced to what the order of requests depends on (`Scheduler.schedule`). There is a queue of requests
that hold blocks, or held some when they were queued, which is served first; and the queue of all others, in the order
of arrival or by priority. Both are served from the head. A request that a connector has let pass, or that waits for its
load, is left where it is, and the next one is looked at; the first one whose blocks are not free ends the step. A load
is begun only with blocks that are free beside those that requests still need that load or have loaded, or whose load
has failed. Whoever runs has all blocks that it needs.

Everything else is a choice that the search makes both ways: a request comes, in any order; a step; a load ends, or
fails, with or without its blocks in quarantine; a quarantine ends, or never does; a request ends, with or without its
blocks being lent back; the client leaves; the cache loses what was loaded.

Requests may name one lease. Then there are the ranks, too: they are told with each step what has been decided before
it, and let go of the lease when those that they have heard of have ended, which the core hears of later. A READ that
begins after that would read what may be somebody else's.

Checked in every step: of what a request may load exactly one thing becomes (it is read, or released unread); what is
being read ends, or is aborted; nothing is read of a lease that the ranks have let go of, and where what is loaded is
shared, nothing twice; in the end the core knows nothing any more, and the ranks keep nothing. And liveness: from every
world, if no load fails any more, no quarantine ends and nobody comes or leaves, each request is served that fits beside
the quarantine. That all of this is what vLLM does is shown elsewhere, with its own scheduler
(tests/unit/test_orders.py).
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import NamedTuple

import msgspec

from statemachine.load import AbortLoad, ReleaseUnread, StartLoad
from statemachine.loads import (
    Allocated,
    Answer,
    Asked,
    Ended,
    Heard,
    LetGo,
    LoadEffect,
    LoadEnded,
    Loads,
    Room,
    SayNoRoom,
    SayRoomFound,
    StepScheduled,
)
from tests.explore.search import first_stuck, scenario_of

ABROAD, WAITING, LOADING, LOADED, FAILED, RUNNING, OVER = range(7)
"""Where a request is. The third to the fifth hold blocks, or held them when they were queued."""


class Kind(NamedTuple):
    """What a request needs: blocks in all, and how many of them are loaded; 0: nothing is. Those with the same `lease`
    read the same; None: of its own."""

    blocks: int
    loads: int = 0
    lease: int | None = None


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What is searched.

    Attributes:
        requests: that may come.
        pool: blocks.
        by_priority: the first one comes first, whenever it comes; otherwise in the order of arrival.
        quarantines: how many loads may leave their blocks in quarantine.
        failures: how many loads may fail.
        lends_back: whether the blocks of requests that have ended may be lent back.
        aborts: whether clients may leave.
        shares: as of the core.
    """

    name: str
    requests: tuple[Kind, ...]
    pool: int
    by_priority: bool = False
    quarantines: int = 0
    failures: int = 2
    lends_back: bool = False
    aborts: bool = False
    shares: bool = False


SETTINGS = (
    Setting(name="three loads", requests=(Kind(3, 2),) * 3, pool=6, aborts=True),
    Setting(name="a small pool", requests=(Kind(3, 2),) * 4, pool=4),
    Setting(name="loads of unlike sizes", requests=(Kind(2, 1), Kind(4, 3), Kind(3, 2)), pool=5, aborts=True),
    Setting(
        name="loads of unlike sizes, by priority",
        requests=(Kind(4, 3), Kind(2, 1), Kind(3, 2)),
        pool=5,
        by_priority=True,
    ),
    Setting(name="by priority", requests=(Kind(3, 3),) * 4, pool=6, by_priority=True),
    Setting(name="beside prompts that are computed", requests=(Kind(3, 2), Kind(2), Kind(3, 3)), pool=4, aborts=True),
    Setting(name="a quarantine", requests=(Kind(4, 3), Kind(2, 1), Kind(3)), pool=5, quarantines=1, aborts=True),
    Setting(name="two quarantines", requests=(Kind(3, 2),) * 4, pool=8, quarantines=2),
    Setting(
        name="two quarantines, by priority",
        requests=(Kind(4, 4), Kind(3, 2), Kind(2, 2)),
        pool=7,
        quarantines=2,
        by_priority=True,
    ),
    Setting(name="answers that are lent back", requests=(Kind(4, 2), Kind(3), Kind(3)), pool=5, lends_back=True),
    Setting(
        name="answers that are lent back beside a quarantine",
        requests=(Kind(4, 2), Kind(3), Kind(2, 2)),
        pool=6,
        quarantines=1,
        lends_back=True,
    ),
    Setting(name="samples", requests=(Kind(3, 2, 0),) * 3, pool=6, failures=1, aborts=True),
    Setting(name="samples that share", requests=(Kind(3, 2, 0),) * 3, pool=6, failures=1, aborts=True, shares=True),
    Setting(
        name="samples of two prompts that share, by priority",
        requests=(Kind(3, 2, 0), Kind(4, 3, 1), Kind(3, 2, 0), Kind(4, 3, 1)),
        pool=5,
        failures=1,
        by_priority=True,
        shares=True,
    ),
    Setting(
        name="samples beside a quarantine",
        requests=(Kind(4, 3, 0), Kind(2, 2), Kind(4, 3, 0)),
        pool=6,
        failures=1,
        quarantines=1,
    ),
)


class Held(NamedTuple):
    """A lease, as the ranks know it.

    Attributes:
        users: requests that they have been told of and that have not ended there.
        is_kept: until they are told to let go.
        is_gone: they have let go.
        has_begun: something was read.
        is_cached: a load of it has ended well, and the cache still has it, where what is loaded is shared.
        is_spoilt: a load of it has failed or was aborted, or a client has left: others may try, and may come too late.
    """

    users: frozenset[int] = frozenset()
    is_kept: bool = False
    is_gone: bool = False
    has_begun: bool = False
    is_cached: bool = False
    is_spoilt: bool = False


COME, READ, READ_AND_KEPT, LEFT, LET_GO = range(5)
"""What the ranks are told: a request has come; it is to be read; and its lease kept until they are told to let go of
it; nothing, or nothing more, is read; nobody wants a lease."""
READS = (READ, READ_AND_KEPT)


class World(NamedTuple):
    """Everything but the core, which is kept beside it.

    Attributes:
        stages: of each request.
        waiting, holding: vLLM's queues, of requests by number.
        quarantined: blocks; lent_back: requests whose blocks are.
        loading: those that are read, as far as the worker knows.
        unread: those of which nothing has become yet.
        waived: those that have no blocks yet, and will load nothing, because others have.
        lacking: those of which it was said that they lack room.
        commands: what the ranks are told with the next step, about a request or a lease.
        leases: as the ranks know them.
        read: requests that load, and that the ranks have read.
    """

    stages: tuple[int, ...]
    waiting: tuple[int, ...] = ()
    holding: tuple[int, ...] = ()
    quarantined: tuple[int, ...] = ()
    lent_back: tuple[int, ...] = ()
    failures: int = 0
    loading: frozenset[int] = frozenset()
    unread: frozenset[int] = frozenset()
    waived: frozenset[int] = frozenset()
    lacking: frozenset[int] = frozenset()
    commands: tuple[tuple[int, int], ...] = ()
    leases: tuple[Held, ...] = ()
    read: frozenset[int] = frozenset()


class Broken(Exception):
    """Something is wrong. `scenario`: the shortest way there."""

    def __init__(self, what: str, scenario: list[str]) -> None:
        super().__init__(f"{what}, after {'; '.join(scenario)}")


class Found(NamedTuple):
    """How large a search was that found nothing wrong."""

    states: int
    edges: int


class _Wrong(Exception):
    pass


class _Turn:
    """One choice, being carried out."""

    def __init__(self, setting: Setting, world: World, core: Loads) -> None:
        self.setting = setting
        self.core = core.copy()
        self.stages = list(world.stages)
        self.waiting, self.holding = list(world.waiting), list(world.holding)
        self.quarantined, self.lent_back = list(world.quarantined), list(world.lent_back)
        self.failures = world.failures
        self.loading, self.unread, self.lacking = set(world.loading), set(world.unread), set(world.lacking)
        self.waived = set(world.waived)
        self.commands, self.leases, self.read = list(world.commands), list(world.leases), set(world.read)

    def world(self) -> World:
        return World(
            tuple(self.stages),
            tuple(self.waiting),
            tuple(self.holding),
            tuple(self.quarantined),
            tuple(self.lent_back),
            self.failures,
            frozenset(self.loading),
            frozenset(self.unread),
            frozenset(self.waived),
            frozenset(self.lacking),
            tuple(self.commands),
            tuple(self.leases),
            frozenset(self.read),
        )

    # --- blocks -----------------------------------------------------------------------------------------------------

    def held(self, request: int) -> int:
        kind = self.setting.requests[request]
        return {LOADING: kind.loads, LOADED: kind.loads, RUNNING: kind.blocks}.get(self.stages[request], 0)

    @property
    def kept(self) -> int:
        return sum(self.setting.requests[each].loads for each in self.quarantined) + sum(
            self.setting.requests[each].blocks for each in self.lent_back
        )

    @property
    def free(self) -> int:
        return self.setting.pool - self.kept - sum(map(self.held, range(len(self.stages))))

    @property
    def reserved(self) -> int:
        """What requests still need that are on the way to run: they load, have loaded, or their load has failed."""
        begun = [each for each in range(len(self.stages)) if self._is_begun(each)]
        return sum(self.setting.requests[each].blocks - self.held(each) for each in begun)

    def _is_begun(self, request: int) -> bool:
        if self.stages[request] in (LOADING, LOADED, FAILED):
            return True
        is_named = request in self.unread or request in self.waived
        return self.stages[request] == WAITING and self.setting.requests[request].loads > 0 and not is_named

    def room(self, request: int) -> Room:
        quarantined = sum(self.setting.requests[each].loads for each in self.quarantined)
        needed = self.setting.requests[request].blocks
        if not self.kept or needed + self.kept <= self.setting.pool:
            return Room.ENOUGH
        return Room.TAKEN_BY_LENT_BACK if needed + quarantined <= self.setting.pool else Room.LACKING

    # --- the core ---------------------------------------------------------------------------------------------------

    def tell(self, event: Heard | Allocated | LoadEnded | Ended | StepScheduled) -> None:
        self._take(self.core.handle(event, 0))

    def ask(self, request: int) -> Answer:
        shares, lease = self.setting.shares, self.lease(request)
        is_named = request in self.unread or request in self.waived
        pays = is_named and not (shares and lease >= 0 and self.leases[lease].is_cached)
        asked = Asked(request_id=str(request), room=self.room(request), pays=pays)
        answer, effects = self.core.ask(asked)
        self._take(effects)
        if answer is Answer.LOAD and not (pays and request in self.unread):
            raise _Wrong(f"request {request} loads what it does not name, or once more")
        return answer

    def _take(self, effects: list[LoadEffect]) -> None:
        for effect in effects:
            match effect:
                case StartLoad(source=request, keeps_lease=keeps_lease):
                    self._become(request)
                    self.loading.add(request)
                    self._order(READ_AND_KEPT if keeps_lease else READ, request)
                case ReleaseUnread(source=request):
                    self._become(request)
                    if self.stages[request] == WAITING:
                        self.waived.add(request)
                    elif self.stages[request] == OVER:
                        self._note_end(request, is_loaded=False)
                    self._order(LEFT, request)
                case AbortLoad(request_id=request_id):
                    self._note_end(int(request_id), is_loaded=False)
                    self.loading.remove(int(request_id))
                    self.read.discard(int(request_id))
                    self._order(LEFT, int(request_id))
                case LetGo(source=request):
                    self.commands.append((LET_GO, self.lease(request)))
                case SayNoRoom(request_id=request_id):
                    self.lacking.add(int(request_id))
                case SayRoomFound(request_id=request_id):
                    self.lacking.remove(int(request_id))
                case _:
                    pass  # for figures and people

    def _become(self, request: int) -> None:
        if request not in self.unread:
            raise _Wrong(f"what request {request} names is read or released twice")
        self.unread.remove(request)

    # --- the ranks --------------------------------------------------------------------------------------------------

    def lease(self, request: int) -> int:
        """-1: of its own, of which they know nothing here."""
        lease = self.setting.requests[request].lease
        return -1 if lease is None else lease

    def _note_end(self, request: int, *, is_loaded: bool) -> None:
        if (lease := self.lease(request)) >= 0:
            held = self.leases[lease]
            self.leases[lease] = held._replace(
                is_cached=held.is_cached or is_loaded, is_spoilt=held.is_spoilt or not is_loaded
            )

    def _order(self, command: int, request: int) -> None:
        if self.lease(request) >= 0:
            self.commands.append((command, request))

    def _carry_out(self) -> None:
        """The step goes to the ranks."""
        for command, subject in self.commands:
            if command == LET_GO:
                self._keep(subject, is_kept=False)
            elif command == LEFT:
                self._leave(subject)
            elif not self.leases[self.lease(subject)].is_gone:
                self._join(subject, reads=command in READS, keeps=command == READ_AND_KEPT)
            elif command in READS and not self.leases[self.lease(subject)].is_spoilt:
                raise _Wrong(f"request {subject} reads what the ranks have let go of")
        self.commands.clear()

    def _join(self, request: int, *, reads: bool, keeps: bool) -> None:
        lease = self.lease(request)
        held = self.leases[lease]
        if reads and held.has_begun and self.setting.shares and not held.is_spoilt:
            raise _Wrong(f"request {request} reads what another one has read")
        self.leases[lease] = held._replace(
            users=held.users | {request},
            is_kept=held.is_kept or keeps,
            has_begun=held.has_begun or reads,
        )

    def _leave(self, request: int) -> None:
        lease = self.lease(request)
        users = self.leases[lease].users
        if request in users:
            self.leases[lease] = self.leases[lease]._replace(users=users - {request})
            self._let_go_if_unwanted(lease)

    def _keep(self, lease: int, *, is_kept: bool) -> None:
        self.leases[lease] = self.leases[lease]._replace(is_kept=is_kept)
        self._let_go_if_unwanted(lease)

    def _let_go_if_unwanted(self, lease: int) -> None:
        held = self.leases[lease]
        if not (held.users or held.is_kept):
            self.leases[lease] = held._replace(is_gone=True)

    # --- what happens -----------------------------------------------------------------------------------------------

    def end_reads(self, request: int) -> None:
        """Those of the ranks, which vLLM hears of later."""
        self.read.add(request)
        self._leave(request)

    def come(self, request: int) -> None:
        self.stages[request] = WAITING
        self.waiting.append(request)
        if self.setting.by_priority:
            self.waiting.sort()
        if self.setting.requests[request].loads:
            self.unread.add(request)
            lease = self.setting.requests[request].lease
            self.tell(Heard(request_id=str(request), source=request, lease=None if lease is None else str(lease)))
            self._order(COME, request)

    def end_load(self, request: int, *, fails: bool, quarantines: bool = False) -> None:
        """vLLM hears of it; blocks of a load that has failed are freed when it is its turn."""
        self.loading.remove(request)
        self.read.discard(request)
        self._note_end(request, is_loaded=not fails)
        self.stages[request] = FAILED if fails else LOADED
        self.failures += fails
        if quarantines:
            self.quarantined.append(request)
        self.tell(LoadEnded(request_id=str(request), has_failed=fails))

    def end_quarantine(self, request: int) -> None:
        """Its READ has ended."""
        self.quarantined.remove(request)

    def end_lease(self, request: int) -> None:
        """What was lent back for it is not lent any more."""
        self.lent_back.remove(request)

    def lose(self, lease: int) -> None:
        """Its blocks are somebody else's, so whoever comes later finds nothing in the cache."""
        self.leases[lease] = self.leases[lease]._replace(is_cached=False)

    def end(self, request: int, *, is_lent_back: bool = False) -> None:
        self.stages[request] = OVER
        self.waived.discard(request)
        for queue in (self.waiting, self.holding):
            if request in queue:
                queue.remove(request)
        if is_lent_back:
            self.lent_back.append(request)
        self.tell(Ended(request_id=str(request)))

    def step(self) -> None:
        """vLLM schedules one."""
        passed: list[int] = []
        passed_holding: list[int] = []
        while queue := self.holding or self.waiting:
            request = queue[0]
            kind = self.setting.requests[request]
            if self.stages[request] == LOADING:
                passed_holding.append(queue.pop(0))
                continue
            loads = False
            if self.stages[request] != LOADED:
                self.stages[request] = WAITING
                answer = self.ask(request)
                if answer is Answer.LET_PASS:
                    passed.append(queue.pop(0))
                    continue
                loads = answer is Answer.LOAD
            needed = kind.loads if loads else kind.blocks - self.held(request)
            if needed > self.free - (self.reserved if loads else 0):
                break
            if needed or not loads:
                self.stages[request] = LOADING if loads else RUNNING
                queue.pop(0)
                self.waived.discard(request)
                self.tell(Allocated(request_id=str(request), loads=loads))
                if loads:
                    passed_holding.append(request)
        self.holding[:0] = passed_holding
        self.waiting[:0] = passed
        if self.setting.by_priority:
            self.waiting.sort()
        if self.core.has_to_step:
            self.tell(StepScheduled(blocks_are_kept=self.kept > 0))
        self._carry_out()


Choice = tuple[str, bool, Callable[[_Turn], None]]
"""In words; whether it happens for sure sooner or later; how."""


def _choices(setting: Setting, world: World) -> Iterator[Choice]:
    yield "a step", True, _Turn.step
    for request, stage in enumerate(world.stages):
        name = f"request {request}"
        if stage == ABROAD:
            yield f"{name} comes", False, partial(_Turn.come, request=request)
            continue
        is_known = setting.requests[request].lease is not None
        is_told = all((reads, request) not in world.commands for reads in READS)
        if stage == LOADING and is_known and is_told and request not in world.read:
            yield f"{name} is read", True, partial(_Turn.end_reads, request=request)
        elif stage == LOADING and is_told:
            yield f"{name} is loaded", True, partial(_Turn.end_load, request=request, fails=False)
            if world.failures < setting.failures:
                yield (
                    f"the load of {name} fails",
                    False,
                    partial(_Turn.end_load, request=request, fails=True),
                )
                if len(world.quarantined) < setting.quarantines:
                    yield (
                        f"the load of {name} fails and may write on",
                        False,
                        partial(_Turn.end_load, request=request, fails=True, quarantines=True),
                    )
        if stage == RUNNING:
            yield f"{name} ends", True, partial(_Turn.end, request=request)
            if setting.lends_back:
                yield (
                    f"{name} ends and is lent back",
                    False,
                    partial(_Turn.end, request=request, is_lent_back=True),
                )
        if setting.aborts and stage in (WAITING, LOADED, FAILED, RUNNING):
            yield f"the client of {name} leaves", False, partial(_Turn.end, request=request)
        if setting.aborts and stage == LOADING:
            yield f"the client of {name} leaves", False, _abort_loading(request)
    for lease, held in enumerate(world.leases):
        if setting.shares and held.is_cached:
            yield f"the cache loses what {lease} lends", False, partial(_Turn.lose, lease=lease)
    for request in world.quarantined:
        yield f"the READ of {request} ends", False, partial(_Turn.end_quarantine, request=request)
    for request in world.lent_back:
        yield f"the lease of {request} is over", True, partial(_Turn.end_lease, request=request)


def _abort_loading(request: int) -> Callable[[_Turn], None]:
    """vLLM keeps the blocks until the worker has ended, which is at once here."""

    def abort(turn: _Turn) -> None:
        turn.end(request)
        if request in turn.loading:
            raise _Wrong(f"the worker reads on for request {request}, which has ended")

    return abort


def _is_served(setting: Setting, world: World) -> bool:
    """Whether nobody waits who could be served, and nothing is left."""
    kept = sum(setting.requests[each].loads for each in world.quarantined)
    waiting = [each for each, stage in enumerate(world.stages) if stage not in (ABROAD, OVER)]
    return not world.lent_back and all(setting.requests[each].blocks + kept > setting.pool for each in waiting)


def _require_nothing_left(world: World, core: Loads) -> None:
    for request in world.lacking:
        if world.stages[request] not in (WAITING, FAILED):
            raise _Wrong(f"request {request} is said to lack room, and has its blocks or has ended")
    if all(stage in (ABROAD, OVER) for stage in world.stages):
        held = [lease for lease, each in enumerate(world.leases) if each.users or each.is_kept]
        if held and not world.commands:
            raise _Wrong(f"the ranks keep {held}, which nobody wants")
        if world.loading or world.unread:
            raise _Wrong(f"nothing has become of what {sorted(world.loading | world.unread)} name")
        left = core.copy()
        left.handle(StepScheduled(blocks_are_kept=False), 0)
        fresh = Loads(shares=True)
        fresh._taken = left._taken  # is bounded, and outlives them
        if left.freeze(0) != fresh.freeze(0):
            raise _Wrong("the core knows of requests that are over")


def search(setting: Setting, core: Callable[..., Loads] = Loads) -> Found:
    """Everything within `setting`. Raises Broken with the shortest scenario."""
    leases = {kind.lease for kind in setting.requests if kind.lease is not None}
    first = World((ABROAD,) * len(setting.requests), leases=(Held(),) * len(leases))
    begun = core(shares=setting.shares)
    index: dict[Hashable, int] = {(first, begun.freeze(0)): 0}
    worlds: list[tuple[World, Loads]] = [(first, begun)]
    parents: list[tuple[int, str]] = [(-1, "")]
    sure_sources, sure_targets = array("l"), array("l")
    frontier, edges = deque([0]), 0
    while frontier:
        here = frontier.popleft()
        world, known = worlds[here]
        for said, is_sure, execute in _choices(setting, world):
            turn = _Turn(setting, world, known)
            try:
                execute(turn)
                after = turn.world()
                _require_nothing_left(after, turn.core)
            except (_Wrong, KeyError) as wrong:
                raise Broken(str(wrong), [*scenario_of(parents, here), said]) from wrong
            edges += 1
            key = after, turn.core.freeze(0)
            there = index.get(key)
            if there is None:
                there = index[key] = len(worlds)
                worlds.append((after, turn.core))
                parents.append((here, said))
                frontier.append(there)
            if is_sure:
                sure_sources.append(here)
                sure_targets.append(there)
    served = [number for number, (world, _) in enumerate(worlds) if _is_served(setting, world)]
    stuck = first_stuck(len(worlds), served, sure_sources, sure_targets)
    if stuck is not None:
        raise Broken("nobody is served any more", scenario_of(parents, stuck))
    return Found(len(worlds), edges)
