"""One NIXL READ handle: from posted to released, or stuck.

    posted     NIXL may write into local memory
    done       it completed
    errored    it ended with an error; nothing more is written
    released   the handle is disposed of
    stuck      nobody waits for it any more, but its end has not been seen: its destination stays quarantined

Only the end of a READ proves that it no longer writes. So the handle is released after its end, never before, and a
stuck one is watched for as long as the process lives: when it ends after all, the quarantine is lifted.
"""

from __future__ import annotations

import msgspec

from statemachine.failures import Failure
from statemachine.kernel import NO_EFFECTS, Effect, Effects, Event, Machine, MachineState, pairs, to


class State(MachineState):
    POSTED = "posted"
    DONE = "done"
    ERRORED = "errored"
    RELEASED = "released"
    STUCK = "stuck"


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """Value of the machine: read number `read` of `request_id`."""

    request_id: str
    read: int
    state: State = State.POSTED
    failure: Failure | None = None


class Completed(Event, frozen=True, kw_only=True):
    """All bytes are in local memory."""


class Errored(Event, frozen=True, kw_only=True):
    """It ended with an error."""

    failure: Failure


class Abandoned(Event, frozen=True, kw_only=True):
    """The request that wanted it has ended without it."""


class HandleReleased(Event, frozen=True, kw_only=True):
    """The handle is disposed of."""


class Inform(Effect, frozen=True, kw_only=True):
    """Tell the request's actor how the READ ended (`failure` None: completed)."""

    failure: Failure | None


class ReleaseHandle(Effect, frozen=True, kw_only=True):
    """Dispose of the handle."""


class LiftQuarantine(Effect, frozen=True, kw_only=True):
    """Its destination blocks may return to the pool."""


def _complete(transfer: Transfer, event: Completed) -> tuple[Transfer, Effects]:
    return msgspec.structs.replace(transfer, state=State.DONE), (Inform(failure=None), ReleaseHandle())


def _error(transfer: Transfer, event: Errored) -> tuple[Transfer, Effects]:
    errored = msgspec.structs.replace(transfer, state=State.ERRORED, failure=event.failure)
    return errored, (Inform(failure=event.failure), ReleaseHandle())


def _abandon(transfer: Transfer, event: Abandoned) -> tuple[Transfer, Effects]:
    return msgspec.structs.replace(transfer, state=State.STUCK), NO_EFFECTS


def _complete_late(transfer: Transfer, event: Completed) -> tuple[Transfer, Effects]:
    return msgspec.structs.replace(transfer, state=State.DONE), (LiftQuarantine(), ReleaseHandle())


def _error_late(transfer: Transfer, event: Errored) -> tuple[Transfer, Effects]:
    errored = msgspec.structs.replace(transfer, state=State.ERRORED, failure=event.failure)
    return errored, (LiftQuarantine(), ReleaseHandle())


def _release(transfer: Transfer, event: HandleReleased) -> tuple[Transfer, Effects]:
    return msgspec.structs.replace(transfer, state=State.RELEASED), NO_EFFECTS


_POSTED, _STUCK, _ENDED = State.POSTED, State.STUCK, (State.DONE, State.ERRORED)

MACHINE: Machine[Transfer] = Machine(
    name="transfer",
    states=State,
    initial=_POSTED,
    terminal=frozenset({State.RELEASED}),
    events=(Completed, Errored, Abandoned, HandleReleased),
    table={
        (_POSTED, Completed): to(_complete, State.DONE),
        (_POSTED, Errored): to(_error, State.ERRORED),
        (_POSTED, Abandoned): to(_abandon, State.STUCK),
        (_STUCK, Completed): to(_complete_late, State.DONE),
        (_STUCK, Errored): to(_error_late, State.ERRORED),
        (State.DONE, HandleReleased): to(_release, State.RELEASED),
        (State.ERRORED, HandleReleased): to(_release, State.RELEASED),
    },
    ignored={
        **pairs(_ENDED, (Abandoned,), "it has ended already; its end is on its way to the request"),
        **pairs((_STUCK,), (Abandoned,), "abandoned once is enough"),
    },
    impossible={
        **pairs((_POSTED, _STUCK), (HandleReleased,), "a handle is released only after its end was seen"),
        **pairs(_ENDED, (Completed, Errored), "a READ ends once"),
    },
)
