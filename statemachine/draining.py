"""An engine that is to end: what it waits for before it may be taken away.

    serving     it lends
    draining    nothing new is accepted to be lent; its workers have been told, or are being told; what is lent is
                served
    drained     nothing is lent any more, or the grace period is over: the engine may be ended without a request
                failing

One of these for each engine, in the process of its scheduler. It is drained when every worker has told its decode
engines, or cannot be told, and nothing is lent or will be. Both are needed: an engine that lends nothing at this moment
still has decode engines to tell, which else take the end of the process for a failure. The grace period bounds both.

What was accepted before is still lent, because its prefill is paid for and is read within moments, but not in the last
part of the grace period (`stops_granting_ns`): a lease lasts for its time, and is over with the grace period then.

Draining begins once, however often and for whatever reason it is asked for; there is no way back, because decode
engines have been told. What this leads to on a worker is in `lending`, and on decode engines in `departure`.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from statemachine.kernel import NO_EFFECTS, Effect, Event, Machine, MachineState, pairs, to


class State(MachineState):
    SERVING = "serving"
    DRAINING = "draining"
    DRAINED = "drained"


class Draining(msgspec.Struct, frozen=True, kw_only=True):
    """Value of the machine.

    Attributes:
        lease_ns: how long a lease lasts that nobody renews.
        cause: why it drains, for people.
        began_ns, ends_ns: of the grace period.
        untold: workers that have neither told their decode engines nor been given up.
    """

    lease_ns: int
    state: State = State.SERVING
    cause: str = ""
    began_ns: int = 0
    ends_ns: int = 0
    untold: frozenset[int] = frozenset()

    @property
    def stops_granting_ns(self) -> int:
        """When even what was accepted before is not lent any more."""
        return self.ends_ns - self.lease_ns

    @property
    def accepts(self) -> bool:
        """Whether prefills that come now will be lent."""
        return self.state is State.SERVING

    def grants(self, now_ns: int) -> bool:
        """Whether those that were accepted before are lent if they finish now."""
        return self.accepts or now_ns < self.stops_granting_ns


class Asked(Event, frozen=True, kw_only=True):
    """Somebody wants the engine to end. `workers`: how many it has."""

    now_ns: int
    cause: str
    grace_ns: int
    workers: int


class WorkerDone(Event, frozen=True, kw_only=True):
    """A worker has told its decode engines, or cannot be told: they learn it from the end of its process then."""

    worker: int


class Counted(Event, frozen=True, kw_only=True):
    """So many prefills are lent, or were accepted and will be."""

    now_ns: int
    lent: int


class TellWorkers(Effect, frozen=True, kw_only=True):
    """Have every worker tell its decode engines; feed WorkerDone for each, and Counted now and then."""

    grace_ns: int


class SayDraining(Effect, frozen=True, kw_only=True):
    """For people."""


class SayDrained(Effect, frozen=True, kw_only=True):
    """For people. `lent`: what was not released in time."""

    lent: int


Effects: TypeAlias = tuple[TellWorkers | SayDraining | SayDrained, ...]


def _begin(draining: Draining, event: Asked) -> tuple[Draining, Effects]:
    begun = msgspec.structs.replace(
        draining,
        state=State.DRAINING,
        cause=event.cause,
        began_ns=event.now_ns,
        ends_ns=event.now_ns + event.grace_ns,
        untold=frozenset(range(event.workers)),
    )
    return begun, (SayDraining(), TellWorkers(grace_ns=event.grace_ns))


def _finish_worker(draining: Draining, event: WorkerDone) -> tuple[Draining, Effects]:
    return msgspec.structs.replace(draining, untold=draining.untold - {event.worker}), NO_EFFECTS


def _count(draining: Draining, event: Counted) -> tuple[Draining, Effects]:
    if (event.lent or draining.untold) and event.now_ns < draining.ends_ns:
        return draining, NO_EFFECTS
    return msgspec.structs.replace(draining, state=State.DRAINED), (SayDrained(lent=event.lent),)


_SERVING, _DRAINING, _DRAINED = State.SERVING, State.DRAINING, State.DRAINED

MACHINE: Machine[Draining, Effects] = Machine(
    name="draining",
    states=State,
    initial=_SERVING,
    terminal=frozenset(),
    events=(Asked, WorkerDone, Counted),
    table={
        (_SERVING, Asked): to(_begin, _DRAINING),
        (_DRAINING, WorkerDone): to(_finish_worker, _DRAINING),
        (_DRAINING, Counted): to(_count, _DRAINING, _DRAINED),
        (_DRAINED, WorkerDone): to(_finish_worker, _DRAINED),
    },
    ignored=pairs((_DRAINING, _DRAINED), (Asked,), "it drains already; whoever asks looks at how far it has come"),
    impossible={
        **pairs((_SERVING,), (WorkerDone, Counted), "nobody has been told, and nothing is counted"),
        **pairs((_DRAINED,), (Counted,), "it is counted until then"),
    },
)
