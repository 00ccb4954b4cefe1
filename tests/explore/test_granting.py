"""Exhaustive search over `Granting`, the core of an engine's scheduler for what it lends: two requests of every kind,
their events in every order, and an engine that serves, drains, and stops."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from statemachine import grant
from statemachine.draining import Draining
from statemachine.draining import State as DrainingState
from statemachine.grant import AnnounceLease, GrantLease, LeaveTokens, NoteNotLent, NotLent, Terms, WithdrawLease
from statemachine.granting import Arrived, Finished, Granting, LeaseOver, Scheduled
from statemachine.lease import LeaseName

BEGINS_NS, STOPS_NS, LEASE_NS = 10, 20, 30
SERVING = Draining(lease_ns=LEASE_NS)
DRAINS = Draining(lease_ns=LEASE_NS, state=DrainingState.DRAINING, began_ns=BEGINS_NS, ends_ns=STOPS_NS + LEASE_NS)
TIMES: dict[str, tuple[int, Terms]] = {
    "serves": (0, Terms(SERVING, is_stopped=False)),
    "drains": (BEGINS_NS, Terms(DRAINS, is_stopped=False)),
    "drains for long": (STOPS_NS, Terms(DRAINS, is_stopped=False)),
    "has stopped": (STOPS_NS, Terms(SERVING, is_stopped=True)),
}
"""When, and on which terms it lends then."""
LATER = {
    "serves": ("drains", "has stopped"),
    "drains": ("drains for long", "has stopped"),
    "drains for long": ("has stopped",),
}

ABROAD, HERE, LENT, OVER = range(4)


class Asked(NamedTuple):
    """One request, as vLLM and the ranks know it.

    Attributes:
        came: when.
        announced: the ranks know of its lease, which is neither granted nor withdrawn.
    """

    stage: int = ABROAD
    came: str = ""
    for_decode: bool = False
    is_wanted: bool = False
    is_computed: bool = False
    announced: LeaseName | None = None


class World(NamedTuple):
    now: str
    requests: tuple[Asked, ...]
    names: frozenset[LeaseName] = frozenset()


class Broken(Exception):
    pass


Choice = tuple[str, Callable[["Turn"], None]]


class Turn:
    """One choice, being carried out."""

    def __init__(self, world: World, core: Granting) -> None:
        self.core, self.now = core.copy(), world.now
        self.requests, self.names = list(world.requests), set(world.names)

    def world(self) -> World:
        return World(self.now, tuple(self.requests), frozenset(self.names))

    def change(self, number: int, **fields: Any) -> None:
        self.requests[number] = self.requests[number]._replace(**fields)

    def tell(self, number: int, event: Any) -> bool:
        """Whether the blocks are kept."""
        at_ns, terms = TIMES[self.now]
        is_granted = False
        for effect in self.core.handle(event, at_ns):
            asked = self.requests[number]
            match effect:
                case AnnounceLease(lease=lease):
                    self._require(asked.is_wanted and asked.announced is None, "it is announced twice, or for nothing")
                    self._require(self._may_begin(asked, terms), "it is announced, and will not be lent")
                    self._name(lease)
                    self.change(number, announced=lease)
                case GrantLease(lease=lease, for_decode=for_decode):
                    is_granted = True
                    if lease != asked.announced:
                        self._require(asked.announced is None, "it is lent under another name than it was announced")
                        self._name(lease)
                    self._require(for_decode is asked.for_decode, "it is taken for another kind")
                    self._require(asked.is_wanted, "nobody wants it")
                    self._require(self._may_grant(asked, terms, at_ns), "it is lent on terms that do not allow it")
                    self.change(number, announced=None)
                case WithdrawLease(lease=lease):
                    self._require(lease == asked.announced, "what is withdrawn was not announced")
                    self.change(number, announced=None)
                case LeaveTokens() | NoteNotLent():
                    self._require(asked.for_decode, "it is no prefill")
        return is_granted

    def _name(self, lease: LeaseName) -> None:
        self._require(lease not in self.names, "two leases have one name")
        self.names.add(lease)

    @staticmethod
    def _may_begin(asked: Asked, terms: Terms) -> bool:
        return not terms.is_stopped and (terms.draining.accepts or asked.came == "serves")

    @staticmethod
    def _may_grant(asked: Asked, terms: Terms, at_ns: int) -> bool:
        if terms.is_stopped or asked.stage != HERE:
            return False
        return terms.draining.accepts or (asked.for_decode and asked.announced is not None and at_ns < STOPS_NS)

    @staticmethod
    def _require(holds: bool, what: str) -> None:
        if not holds:
            raise Broken(what)

    # --- what happens -----------------------------------------------------------------------------------------------

    def come(self, number: int, *, for_decode: bool, is_wanted: bool) -> None:
        self.requests[number] = Asked(HERE, self.now, for_decode, is_wanted)
        arrived = Arrived(
            request_id=str(number),
            request=number,
            for_decode=for_decode,
            is_wanted=is_wanted,
            is_nameable=True,
            terms=TIMES[self.now][1],
        )
        self.tell(number, arrived)

    def schedule(self, number: int) -> None:
        self.change(number, is_computed=True)
        is_wanted = self.requests[number].is_wanted
        self.tell(number, Scheduled(request_id=str(number), is_wanted=is_wanted, terms=TIMES[self.now][1]))

    def finish(self, number: int, *, is_whole: bool, leaves_enough: bool, is_waited_for: bool) -> None:
        asked = self.requests[number]
        finished = Finished(
            request_id=str(number),
            is_whole=is_whole and asked.is_wanted,
            free_share=grant.LEFT_TO_REQUESTS - (not leaves_enough) * 0.01,
            is_waited_for=is_waited_for,
            terms=TIMES[self.now][1],
        )
        is_granted = self.tell(number, finished)
        if is_granted and not asked.for_decode:
            self._require(leaves_enough and not is_waited_for, "an answer is lent although the engine needs its blocks")
        self._require(self.requests[number].announced is None, "its lease is neither granted nor withdrawn")
        self.change(number, stage=LENT if is_granted else OVER)

    def end_lease(self, number: int) -> None:
        self.tell(number, LeaseOver(request_id=str(number)))
        self.change(number, stage=OVER)

    def pass_on(self, now: str) -> None:
        self.now = now


def choices(world: World) -> Iterator[Choice]:
    for now in LATER.get(world.now, ()):
        yield f"it {now}", lambda turn, now=now: turn.pass_on(now)
    for number, asked in enumerate(world.requests):
        if asked.stage == ABROAD:
            for for_decode in (True, False):
                for is_wanted in (True, False):
                    yield (
                        f"request {number} comes ({for_decode=}, {is_wanted=})",
                        lambda turn, number=number, for_decode=for_decode, is_wanted=is_wanted: turn.come(
                            number, for_decode=for_decode, is_wanted=is_wanted
                        ),
                    )
        elif asked.stage == HERE:
            yield f"request {number} is scheduled", lambda turn, number=number: turn.schedule(number)
            for is_whole in (True, False) if asked.is_computed else (False,):
                for leaves_enough, is_waited_for in ((True, False), (True, True), (False, False)):
                    ends = functools.partial(
                        Turn.finish,
                        number=number,
                        is_whole=is_whole,
                        leaves_enough=leaves_enough,
                        is_waited_for=is_waited_for,
                    )
                    yield f"request {number} ends ({is_whole=}, {leaves_enough=}, {is_waited_for=})", ends
        elif asked.stage == LENT:
            yield f"the lease of request {number} is over", lambda turn, number=number: turn.end_lease(number)


def check(world: World, core: Granting) -> None:
    """What it says of itself is what its requests are."""
    here = [asked for asked in world.requests if asked.stage == HERE]
    lent = sum(asked.stage == LENT for asked in world.requests)
    answering = sum(not asked.for_decode for asked in here)
    accepted = sum(asked.for_decode and _is_accepted(asked) for asked in here)
    if (core.counts.lent, core.counts.answering) != (lent + accepted, answering):
        raise Broken(f"it counts {core.counts}, of {lent} lent, {accepted} accepted and {answering} answered")
    announced = {str(number) for number, asked in enumerate(world.requests) if asked.announced is not None}
    if set(core.computing) != announced:
        raise Broken("what the ranks know is not what it says is computed")
    if set(core.prompts) != {name for name in announced if world.requests[int(name)].for_decode}:
        raise Broken("what others go on from is not what it says they do")


def _is_accepted(asked: Asked) -> bool:
    """Also where the engine has stopped since, until the request ends."""
    return asked.announced is not None or (asked.is_wanted and asked.came == "serves")


def search() -> int:
    """Everything; how many states there are. Raises Broken."""
    first = World("serves", (Asked(), Asked()))
    seen = {(first, Granting(1).freeze(0))}
    frontier: deque[tuple[World, Granting, tuple[str, ...]]] = deque([(first, Granting(1), ())])
    while frontier:
        world, core, scenario = frontier.popleft()
        for said, execute in choices(world):
            turn = Turn(world, core)
            after = (*scenario, said)
            try:
                execute(turn)
                check(turn.world(), turn.core)
            except Broken as broken:
                raise Broken(f"{broken}, after {'; '.join(after)}") from broken
            nameless = turn.world()._replace(names=frozenset())
            key = nameless, turn.core.freeze(0)
            if key not in seen:
                seen.add(key)
                frontier.append((turn.world(), turn.core, after))
    return len(seen)


def test_nothing_is_wrong_with_the_production_core() -> None:
    assert search() > 1000


def _schedule_always(value: grant.Grant, event: grant.Scheduled) -> tuple[grant.Grant, Any]:
    computing = (
        value
        if not event.is_wanted
        else grant.msgspec.structs.replace(value, state=grant.State.COMPUTING, lease=event.lease)
    )
    return computing, (AnnounceLease(lease=event.lease, heard_ns=0),) if event.is_wanted else ()


def _never_withdraw(value: grant.Grant, event: grant.Finished) -> tuple[grant.Grant, Any]:
    after, effects = _finish(value, event)
    return after, tuple(effect for effect in effects if not isinstance(effect, WithdrawLease))


_finish = grant._finish
BROKEN: dict[str, dict[str, Any]] = {
    "what comes while it drains is lent": {"_schedule": _schedule_always},
    "what was announced is never withdrawn": {"_finish": _never_withdraw},
    "granted until the end": {"_lends": lambda value, event: not event.terms.is_stopped},
    "granted although it has stopped": {"_lends": lambda value, event: True},
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for function, instead in BROKEN[name].items():
        monkeypatch.setattr(grant, function, instead)
        for pair, transition in grant.MACHINE.table.items():
            if transition.handler.__name__ == function:
                monkeypatch.setitem(grant.MACHINE.table, pair, grant.to(instead, *transition.targets))
    with pytest.raises(Broken):
        search()


def test_a_request_whose_id_comes_again_has_ended() -> None:
    """vLLM refuses that; nothing is left of the former one all the same."""
    core, terms = Granting(1), TIMES["serves"][1]
    arrived = Arrived(request_id="a", request=0, for_decode=True, is_wanted=True, is_nameable=True, terms=terms)
    core.handle(arrived, 0)
    (announced,) = core.handle(Scheduled(request_id="a", is_wanted=True, terms=terms), 0)
    assert isinstance(announced, AnnounceLease)
    assert core.handle(arrived, 0) == [WithdrawLease(lease=announced.lease), LeaveTokens(request=0)]
    (again,) = core.handle(Scheduled(request_id="a", is_wanted=True, terms=terms), 0)
    assert isinstance(again, AnnounceLease)
    assert again.lease != announced.lease
    core.handle(Finished(request_id="a", is_whole=True, free_share=1.0, is_waited_for=False, terms=terms), 0)
    core.handle(arrived, 0)
    assert core.counts == (1, 0, 0)


def _arrived(request_id: str, when: str = "serves", *, for_decode: bool = True, is_nameable: bool = True) -> Arrived:
    return Arrived(
        request_id=request_id,
        request=request_id,
        for_decode=for_decode,
        is_wanted=True,
        is_nameable=is_nameable,
        terms=TIMES[when][1],
    )


def _finished(request_id: str, *, is_whole: bool = True, free_share: float = 1.0) -> Finished:
    terms = TIMES["serves"][1]
    return Finished(request_id=request_id, is_whole=is_whole, free_share=free_share, is_waited_for=False, terms=terms)


def test_no_two_leases_have_one_number() -> None:
    """Also of two requests: a client may give the id of one to the other later."""
    core, terms = Granting(7), TIMES["serves"][1]
    numbers = []
    for request_id in "abc":
        core.handle(_arrived(request_id), 0)
    for request_id in "abc":
        (announced,) = core.handle(Scheduled(request_id=request_id, is_wanted=True, terms=terms), 0)
        assert isinstance(announced, AnnounceLease)
        numbers.append(announced.lease.number)
    for request_id in "de":
        core.handle(_arrived(request_id, for_decode=False), 0)
        (granted,) = core.handle(_finished(request_id), 0)
        assert isinstance(granted, GrantLease)
        numbers.append(granted.lease.number)
    assert numbers == [7, 8, 9, 10, 11]


def test_nothing_is_kept_of_what_is_over() -> None:
    core = Granting(1)
    assert core.counts == (0, 0, 0)
    nothing = core.freeze(0)
    for request_id, is_lent in (("a", True), ("b", False)):
        core.handle(_arrived(request_id), 0)
        core.handle(Scheduled(request_id=request_id, is_wanted=True, terms=TIMES["serves"][1]), 0)
        core.handle(_finished(request_id, is_whole=is_lent), 0)
        assert (core.grant(request_id) is not None) is is_lent
        core.handle(LeaseOver(request_id=request_id), 0)
        assert core.grant(request_id) is None
    assert core.freeze(0) == nothing


@pytest.mark.parametrize(
    ("when", "is_nameable", "why", "not_lent"),
    [
        ("drains", True, NotLent.DRAINING, 1),
        ("has stopped", True, NotLent.STOPPED, 1),
        ("has stopped", False, NotLent.STOPPED, 1),
        ("serves", False, NotLent.REQUEST_ID, 0),
    ],
)
def test_of_a_prefill_that_is_not_lent_it_is_said_why(
    when: str, is_nameable: bool, why: NotLent, not_lent: int
) -> None:
    core = Granting(1)
    prefill = _arrived("a", when, is_nameable=is_nameable)
    assert core.handle(prefill, 0) == [NoteNotLent(request_id="a", why=why)]
    assert core.counts == (0, not_lent, 0)
    # Nobody asked for the blocks of an answer.
    assert core.handle(_arrived("b", when, for_decode=False, is_nameable=is_nameable), 0) == []
    assert core.counts == (0, not_lent, 1)


@pytest.mark.parametrize(("free_share", "is_lent"), [(grant.LEFT_TO_REQUESTS, True), (0.24, False)])
def test_an_answer_is_lent_while_enough_is_left_to_requests(free_share: float, is_lent: bool) -> None:
    core = Granting(1)
    core.handle(_arrived("a", for_decode=False), 0)
    assert len(core.handle(_finished("a", free_share=free_share), 0)) == is_lent
    assert core.counts == (int(is_lent), 0, 0)
