"""The core of an engine's scheduler for what it lends: which requests' blocks are kept for another engine.

Sans I/O. `handle(event, now_ns)` returns what to do; the executor is `connector/scheduler/lends.py`. It has no
deadlines: when a lease is over, the ranks say so (`lending`).

A client may repeat a request's id; the number of a lease is not repeated, by this process or by one that is started in
its place. `counts` is frozen and replaced as a whole with each event, so another thread may read it: an engine that
drains (`draining`) waits for what it says.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple, TypeAlias

import msgspec

from statemachine import grant as machine
from statemachine.grant import (
    AnnounceLease,
    Grant,
    GrantLease,
    LeaveTokens,
    NoteNotLent,
    State,
    Terms,
    WithdrawLease,
)
from statemachine.kernel import Event
from statemachine.lease import LeaseName

GrantEffect: TypeAlias = LeaveTokens | NoteNotLent | AnnounceLease | GrantLease | WithdrawLease


class LentCounts(NamedTuple):
    """What an engine lends.

    Attributes:
        lent: requests whose blocks are lent, and prefills that were accepted and are to be.
        not_lent: prefills that came when it had stopped lending or was to end.
        answering: requests whose answers it writes itself, and which draining does not wait for.
    """

    lent: int
    not_lent: int
    answering: int = 0


class Arrived(Event, frozen=True, kw_only=True):
    """A request has come. As in `grant.Grant` and `grant.Arrived`."""

    request_id: str
    request: object
    for_decode: bool
    is_wanted: bool
    is_nameable: bool
    terms: Terms


class Scheduled(Event, frozen=True, kw_only=True):
    """A request has blocks and is computed. As in `grant.Scheduled`."""

    request_id: str
    is_wanted: bool
    terms: Terms


class Finished(Event, frozen=True, kw_only=True):
    """A request has ended. As in `grant.Finished`."""

    request_id: str
    is_whole: bool
    free_share: float
    is_waited_for: bool
    terms: Terms


class LeaseOver(Event, frozen=True, kw_only=True):
    """vLLM frees the blocks of a request that was lent."""

    request_id: str


class Granting:
    """See the module's docstring.

    Args:
        first_number: of the leases.

    Attributes: read, and not changed, by others.
        counts: see the module's docstring.
        computing: requests whose leases are announced and not granted yet, by id.
        prompts: of these, the requests of vLLM from which other engines go on.
    """

    def __init__(self, first_number: int) -> None:
        self._next_number = first_number
        # Those that are not over.
        self._grants: dict[str, Grant] = {}
        # How many of them other engines go on from, and are in `accepted` or `computing`.
        self._accepted = 0
        # How many of the others have not ended.
        self._answering = 0
        # How many are in `lent`.
        self._lent = 0
        # Prefills that came when none was accepted.
        self._not_lent = 0
        self.counts = LentCounts(0, 0, 0)
        self.computing: dict[str, Grant] = {}
        self.prompts: dict[str, Any] = {}
        # Of the event that is being taken in.
        self._effects: list[GrantEffect] = []

    def grant(self, request_id: str) -> Grant | None:
        """None: it is over, or was never here."""
        return self._grants.get(request_id)

    def handle(self, event: Event, now_ns: int) -> list[GrantEffect]:
        """Take one event in; returns what to do, in order."""
        match event:
            case Arrived(request_id=request_id, terms=terms):
                self._arrive(event, now_ns)
                if event.for_decode and not terms.accept:
                    self._not_lent += 1
            case Scheduled(request_id=request_id, is_wanted=is_wanted, terms=terms):
                lease = self._next_lease(request_id)
                self._step(request_id, machine.Scheduled(is_wanted=is_wanted, lease=lease, terms=terms))
            case Finished():
                self._finish(event, now_ns)
            case LeaseOver(request_id=request_id):
                self._step(request_id, machine.LeaseOver())
            case _:
                raise TypeError(f"{type(event).__name__} is not an event of this core")
        self.counts = LentCounts(self._accepted + self._lent, self._not_lent, self._answering)
        effects, self._effects = self._effects, []
        return effects

    def _arrive(self, arrived: Arrived, now_ns: int) -> None:
        request_id = arrived.request_id
        if request_id in self._grants:
            # vLLM refuses an id that it knows, so it has no other request of it any more.
            self._finish(
                Finished(
                    request_id=request_id, is_whole=False, free_share=0.0, is_waited_for=False, terms=arrived.terms
                ),
                now_ns,
            )
            self._step(request_id, machine.LeaseOver())
        grant = Grant(request_id=request_id, request=arrived.request, for_decode=arrived.for_decode, heard_ns=now_ns)
        self._put(None, grant)
        event = machine.Arrived(is_wanted=arrived.is_wanted, is_nameable=arrived.is_nameable, terms=arrived.terms)
        self._step(request_id, event)

    def _finish(self, finished: Finished, now_ns: int) -> None:
        event = machine.Finished(
            now_ns=now_ns,
            is_whole=finished.is_whole,
            free_share=finished.free_share,
            is_waited_for=finished.is_waited_for,
            lease=self._next_lease(finished.request_id),
            terms=finished.terms,
        )
        self._step(finished.request_id, event)

    def _next_lease(self, request_id: str) -> LeaseName:
        return LeaseName(request_id, self._next_number)

    def _step(self, request_id: str, event: Event) -> None:
        before = self._grants.get(request_id)
        if before is None:
            return  # it is over
        after, effects = machine.MACHINE.step(before, event)
        if after.lease is not before.lease:
            self._next_number += 1
        self._put(before, after)
        self._effects += effects

    def _put(self, before: Grant | None, after: Grant) -> None:
        request_id = after.request_id
        if before is not None:
            self._count(before, -1)
            self.computing.pop(request_id, None)
            self.prompts.pop(request_id, None)
        if machine.MACHINE.is_terminal(after):
            del self._grants[request_id]
            return
        self._grants[request_id] = after
        self._count(after, 1)
        if after.state is State.COMPUTING:
            self.computing[request_id] = after
            if after.for_decode:
                self.prompts[request_id] = after.request

    def _count(self, grant: Grant, by: int) -> None:
        if grant.state is State.LENT:
            self._lent += by
        elif not grant.for_decode:
            self._answering += by
        elif grant.state is not State.PRESENT:
            self._accepted += by

    # --- for the explorer -------------------------------------------------------------------------------------------

    def copy(self) -> Granting:
        """An independent core that behaves alike."""
        other = Granting(self._next_number)
        other._grants = dict(self._grants)
        other._accepted, other._answering, other._not_lent = self._accepted, self._answering, self._not_lent
        other._lent, other.counts = self._lent, self.counts
        other.computing, other.prompts = dict(self.computing), dict(self.prompts)
        return other

    def freeze(self, now_ns: int) -> Hashable:
        """Equal for two cores that behave alike from `now_ns` on, but for the numbers of their leases."""
        return (
            frozenset(
                msgspec.structs.replace(grant, heard_ns=0, lease=grant.lease and LeaseName(grant.request_id, 0))
                for grant in self._grants.values()
            ),
            self.counts,
        )
