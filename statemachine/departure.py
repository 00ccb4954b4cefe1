"""Whether a remote prefill engine is to end, as a decode rank knows it.

    stays      nothing else is known
    leaving    it has said so (`Leaving` on a control socket): what it lends can be read, for as long as it keeps it
    left       it had said so, and its connection has ended since, or could not be made again: its process is gone, and
               with it whatever it lent

Leaving changes nothing for requests. Who holds a lease there goes on; who comes with a lease that was granted before is
served; only P knows which these are, so it is asked for each, and answers at once. Nothing new is lent there, so
nothing new comes.

Left is what spares everybody the wait. A connection that ends without a word may be rebuilt, so requests wait for a
handshake, and releases are said again. After a word it is the end that was announced: requests fail at once
(`PeerLeaving`), nothing is owed any more, and nobody connects again to say it. A request that comes later may be one of
the process that has taken the place of that one, so one attempt is made for it. If the port refuses that, whatever
waits fails, and the next request tries again: to be refused costs no time, so there is no pause in which a new process
would not be found. If the attempt fails otherwise, the shortest pause follows. An engine that is found there and does
not fit is told as that (`Incompatible`), and not as the departure of the one before; nor is what happens at another
address than that where the engine was: no attempt there is one of these.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from statemachine.kernel import NO_EFFECTS, Effect, Event, Machine, MachineState, pairs, to


class State(MachineState):
    STAYS = "stays"
    LEAVING = "leaving"
    LEFT = "left"


class Departure(msgspec.Struct, frozen=True, kw_only=True):
    """Value of the machine. `until_ns`: when the grace period is over that it has named."""

    state: State = State.STAYS
    until_ns: int = 0


class LeavingAnnounced(Event, frozen=True, kw_only=True):
    """A rank of it has said, over a connection that stands, that the engine leaves by then."""

    until_ns: int


class ConnectionEnded(Event, frozen=True, kw_only=True):
    """Its process is gone: a control socket or the transport was closed at its end."""


class AttemptFailed(Event, frozen=True, kw_only=True):
    """It could not be connected where it was: for who came since, or again, after a connection that failed
    otherwise."""


class Connected(Event, frozen=True, kw_only=True):
    """It is connected: the same process, which says again that it leaves, or another one."""


class NoteLeaving(Effect, frozen=True, kw_only=True):
    """For people, once."""


class LoseEverything(Effect, frozen=True, kw_only=True):
    """Fail every request that wants something of it, and forget what it is owed."""


Effects: TypeAlias = tuple[NoteLeaving | LoseEverything, ...]


def _say(departure: Departure, event: LeavingAnnounced) -> tuple[Departure, Effects]:
    is_new = departure.state is State.STAYS
    return Departure(state=State.LEAVING, until_ns=event.until_ns), (NoteLeaving(),) if is_new else NO_EFFECTS


def _end(departure: Departure, event: ConnectionEnded | AttemptFailed) -> tuple[Departure, Effects]:
    return msgspec.structs.replace(departure, state=State.LEFT), (LoseEverything(),)


def _stay(departure: Departure, event: Connected) -> tuple[Departure, Effects]:
    return Departure(), NO_EFFECTS


_STAYS, _LEAVING, _LEFT = State.STAYS, State.LEAVING, State.LEFT

MACHINE: Machine[Departure, Effects] = Machine(
    name="departure",
    states=State,
    initial=_STAYS,
    terminal=frozenset(),
    events=(LeavingAnnounced, ConnectionEnded, AttemptFailed, Connected),
    table={
        (_STAYS, LeavingAnnounced): to(_say, _LEAVING),
        (_LEAVING, LeavingAnnounced): to(_say, _LEAVING),
        (_LEAVING, ConnectionEnded): to(_end, _LEFT),
        (_LEAVING, AttemptFailed): to(_end, _LEFT),
        (_LEAVING, Connected): to(_stay, _STAYS),
        (_LEFT, AttemptFailed): to(_end, _LEFT),
        (_LEFT, Connected): to(_stay, _STAYS),
    },
    ignored={
        **pairs((_STAYS,), (ConnectionEnded, AttemptFailed), "nobody had said that it would end: it may be back soon"),
        **pairs((_STAYS,), (Connected,), "nothing else was known"),
        **pairs((_LEFT,), (ConnectionEnded,), "it is gone already"),
        **pairs((_LEFT,), (LeavingAnnounced,), "another rank of it has said so in the moment in which one ended"),
    },
    impossible={},
)
