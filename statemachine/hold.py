"""One lease on one rank of the prefill engine, as a decode rank knows it: until when it is proven, and what is owed.

    wanted      a request here wants the blocks; P has not said yet whether it keeps them
    held        P keeps them: proven until `proven_until_ns`
    assumed     P is a built-in engine, which says nothing: its lease is taken to have begun when we first heard of the
                request, and our heartbeats, which may come too late, not to have moved its end
    releasing   nobody here wants them any more; P has not confirmed that it knows
    gone        P does not keep them (or its assumed lease is over, or nobody here asks P any more because it was given
                up): whatever is read from now on may be foreign KV
    released    P knows that we are done, or the lease must be over by now

The proof. P answers a hold with how much longer it keeps the blocks. The answer was given after we asked, so on our
own clock the blocks are kept until `asked + remaining`, less what two clocks may part in that time and less a margin.
No clock of another process is compared with ours. Because a lease that is over never comes back, the answer proves
everything before the moment of asking too, which is why `proven_until_ns` is never less than that moment: a request
whose READs ended before we asked is proven by any answer `Held`, however little is left.

A proof is worth what its connection is. Whoever answers on the next one may be a later life of P, which has the blocks
but does not keep them, and READs over it are not proven by what the earlier life said. So everything is asked again.

Every request of this rank that names the lease shares this value (parallel samples of one prompt carry the same
parameters); who they are is known to the core (`remote_engine`). The release is owed when the last of them has ended.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from statemachine.kernel import NO_EFFECTS, Effect, Event, Machine, MachineState, pairs, to
from statemachine.lease import LeaseName


class State(MachineState):
    WANTED = "wanted"
    HELD = "held"
    ASSUMED = "assumed"
    RELEASING = "releasing"
    GONE = "gone"
    RELEASED = "released"


class Hold(msgspec.Struct, frozen=True, kw_only=True):
    """Value of the machine.

    Attributes:
        rank: the number of the partner on P, among those of this rank.
        proven_until_ns: our own clock; -1 while nothing is proven. It moves back only with a new connection.
        why: of a hold that is gone, in P's words.
    """

    lease: LeaseName
    rank: int
    state: State = State.WANTED
    proven_until_ns: int = -1
    why: str | None = None


class HeldByPeer(Event, frozen=True, kw_only=True):
    """P keeps the blocks; see the module's docstring for what `proven_until_ns` is."""

    proven_until_ns: int


class GoneAtPeer(Event, frozen=True, kw_only=True):
    """P does not keep the blocks; or the assumed lease of a built-in P is over; or P was given up here."""

    why: str


class Assumed(Event, frozen=True, kw_only=True):
    """P turned out to be a built-in engine."""

    until_ns: int


class Reconnected(Event, frozen=True, kw_only=True):
    """P was connected anew, and may be another life of it."""


class Unwanted(Event, frozen=True, kw_only=True):
    """The last request that wanted the blocks has ended."""


class ReleaseConfirmed(Event, frozen=True, kw_only=True):
    """P knows that we are done; or a built-in P was told, which never answers."""


class GiveUp(Event, frozen=True, kw_only=True):
    """The lease must be over by now, whether P has heard of our release or not."""


class SayReleased(Effect, frozen=True, kw_only=True):
    """Tell P, until it answers."""


Effects: TypeAlias = tuple[SayReleased, ...]


def _prove(hold: Hold, event: HeldByPeer) -> tuple[Hold, Effects]:
    proven_until_ns = max(hold.proven_until_ns, event.proven_until_ns)
    return msgspec.structs.replace(hold, state=State.HELD, proven_until_ns=proven_until_ns), NO_EFFECTS


def _lose(hold: Hold, event: GoneAtPeer) -> tuple[Hold, Effects]:
    return msgspec.structs.replace(hold, state=State.GONE, why=event.why), NO_EFFECTS


def _assume(hold: Hold, event: Assumed) -> tuple[Hold, Effects]:
    return msgspec.structs.replace(hold, state=State.ASSUMED, proven_until_ns=event.until_ns), NO_EFFECTS


def _ask_anew(hold: Hold, event: Reconnected) -> tuple[Hold, Effects]:
    return msgspec.structs.replace(hold, state=State.WANTED, proven_until_ns=-1), NO_EFFECTS


def _let_go(hold: Hold, event: Unwanted) -> tuple[Hold, Effects]:
    return msgspec.structs.replace(hold, state=State.RELEASING), (SayReleased(),)


def _end(hold: Hold, event: ReleaseConfirmed | GiveUp | GoneAtPeer) -> tuple[Hold, Effects]:
    return msgspec.structs.replace(hold, state=State.RELEASED), NO_EFFECTS


_WANTED, _HELD, _ASSUMED, _RELEASING = State.WANTED, State.HELD, State.ASSUMED, State.RELEASING

MACHINE: Machine[Hold, Effects] = Machine(
    name="hold",
    states=State,
    initial=_WANTED,
    terminal=frozenset({State.GONE, State.RELEASED}),
    events=(HeldByPeer, GoneAtPeer, Assumed, Reconnected, Unwanted, ReleaseConfirmed, GiveUp),
    table={
        (_WANTED, HeldByPeer): to(_prove, _HELD),
        (_WANTED, GoneAtPeer): to(_lose, State.GONE),
        (_WANTED, Assumed): to(_assume, _ASSUMED),
        (_WANTED, Unwanted): to(_let_go, _RELEASING),
        (_HELD, HeldByPeer): to(_prove, _HELD),
        (_HELD, GoneAtPeer): to(_lose, State.GONE),
        (_HELD, Reconnected): to(_ask_anew, _WANTED),
        (_HELD, Unwanted): to(_let_go, _RELEASING),
        (_ASSUMED, GoneAtPeer): to(_lose, State.GONE),
        (_ASSUMED, Reconnected): to(_ask_anew, _WANTED),
        (_ASSUMED, Unwanted): to(_let_go, _RELEASING),
        (_RELEASING, ReleaseConfirmed): to(_end, State.RELEASED),
        (_RELEASING, GiveUp): to(_end, State.RELEASED),
        (_RELEASING, GoneAtPeer): to(_end, State.RELEASED),
    },
    ignored={
        **pairs((_RELEASING,), (HeldByPeer,), "an answer to a hold that was asked for before we let go"),
        **pairs((_ASSUMED,), (HeldByPeer,), "a built-in engine is never asked, so this is no answer"),
        **pairs((_RELEASING,), (Assumed,), "nothing is left to be assumed"),
        **pairs((_WANTED,), (Reconnected,), "nothing is proven yet"),
        **pairs((_RELEASING,), (Reconnected,), "nothing is to be proven any more; the release is said again"),
    },
    impossible={
        **pairs((_WANTED, _HELD, _ASSUMED), (ReleaseConfirmed, GiveUp), "only what is owed is confirmed or given up"),
        **pairs((_RELEASING,), (Unwanted,), "it has no users any more"),
        **pairs((_HELD, _ASSUMED), (Assumed,), "a new connection has asked anew, and says once whether P is built-in"),
    },
)
