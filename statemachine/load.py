"""One request whose KV another engine has, as the scheduler of its own engine knows it.

    queued        vLLM has given it no blocks yet; whoever lends keeps its own until then
    loading       it has blocks, the ranks read into them, and vLLM has parked it
    failed        a rank has failed, and vLLM is about to queue it again, before all others
    to_compute    it has been queued behind those that hold blocks: vLLM reserves what it needs, and computes it
    without_room  so it is, but what is kept from the pool leaves it no room
    loaded        all ranks have read
    computed      it has blocks, and nothing is loaded for it, or no more
    ended         it has ended before

`failed`, `to_compute` and `without_room` are of loads that have failed, where vLLM computes what it could not load
(`recompute`). What requests wait for one another is in `loads`.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from statemachine.kernel import NO_EFFECTS, Effect, Event, Machine, MachineState, pairs, to


class State(MachineState):
    QUEUED = "queued"
    LOADING = "loading"
    FAILED = "failed"
    TO_COMPUTE = "to_compute"
    WITHOUT_ROOM = "without_room"
    LOADED = "loaded"
    COMPUTED = "computed"
    ENDED = "ended"


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Value of the machine.

    Attributes:
        source: what is to be read, and from where; opaque here.
        heard_ns: when the engine first heard of it.
        lease: what it reads is lent under this name, by which it is told from all others; None: under none.
        began_ns: when it got blocks to read into.
        is_suspended: no load begins, so this one is not offered, and may be computed instead.
        is_taken: nor is it because what is lent was taken by others, and may be gone.
        is_released: nothing will be read for it, which whoever lends has been told.
    """

    request_id: str
    source: Any
    heard_ns: int
    lease: str | None = None
    state: State = State.QUEUED
    began_ns: int = 0
    is_suspended: bool = False
    is_taken: bool = False
    is_released: bool = False


class Asked(Event, frozen=True, kw_only=True):
    """vLLM looks for blocks for it. `is_suspended`: no load may begin now. `is_taken`: what is lent was taken."""

    is_suspended: bool = False
    is_taken: bool = False


class Taken(Event, frozen=True, kw_only=True):
    """What is lent has served another request, so that this one finds it in the cache, or is computed."""


class NoRoomFound(Event, frozen=True, kw_only=True):
    """What is kept from the pool leaves it no room."""


class RoomReturned(Event, frozen=True, kw_only=True):
    """Nothing is kept from the pool any more."""


class Allocated(Event, frozen=True, kw_only=True):
    """It has blocks. `loads`: KV is to be read into them."""

    now_ns: int
    loads: bool


class LoadEnded(Event, frozen=True, kw_only=True):
    """On all ranks."""

    has_failed: bool


class Ended(Event, frozen=True, kw_only=True):
    """The request has ended. `has_failed`: because its load has (`fail`), of which vLLM tells afterwards."""

    has_failed: bool = False


class StartLoad(Effect, frozen=True, kw_only=True):
    """Read into its blocks. `keeps_lease`: the ranks keep the lease until they are told to let go of it (`Loads`)."""

    request_id: str
    source: Any
    keeps_lease: bool = False


class ReleaseUnread(Effect, frozen=True, kw_only=True):
    """Nothing is read: whoever lends may free its blocks."""

    request_id: str
    source: Any


class NoteComputed(Effect, frozen=True, kw_only=True):
    """vLLM computes what it needs of it and does not find in the cache; because no load began (`was_suspended`), or
    what is lent was taken by others (`was_taken`), or there is nothing to load."""

    request_id: str
    source: Any
    was_suspended: bool
    was_taken: bool


class AbortLoad(Effect, frozen=True, kw_only=True):
    """Nobody waits for what is being read."""

    request_id: str


class NoteWait(Effect, frozen=True, kw_only=True):
    """The wait for its KV, which began at `heard_ns`, is over."""

    heard_ns: int
    is_loaded: bool


class LeaveLease(Effect, frozen=True, kw_only=True):
    """The request wants nothing more of what is lent."""


Effects: TypeAlias = tuple[StartLoad | ReleaseUnread | AbortLoad | NoteComputed | NoteWait | LeaveLease, ...]


def _offer(load: Load, event: Asked) -> tuple[Load, Effects]:
    return msgspec.structs.replace(load, is_suspended=event.is_suspended, is_taken=event.is_taken), NO_EFFECTS


def _queue_behind(load: Load, event: Asked) -> tuple[Load, Effects]:
    return msgspec.structs.replace(load, state=State.TO_COMPUTE), NO_EFFECTS


def _lose_room(load: Load, event: NoRoomFound) -> tuple[Load, Effects]:
    return msgspec.structs.replace(load, state=State.WITHOUT_ROOM), NO_EFFECTS


def _regain_room(load: Load, event: RoomReturned) -> tuple[Load, Effects]:
    return msgspec.structs.replace(load, state=State.TO_COMPUTE), NO_EFFECTS


def _release_unread(load: Load) -> Effects:
    """Give the lease back, unless that was done before."""
    return () if load.is_released else (ReleaseUnread(request_id=load.request_id, source=load.source), LeaveLease())


def _take(load: Load, event: Taken) -> tuple[Load, Effects]:
    return msgspec.structs.replace(load, is_released=True), _release_unread(load)


def _allocate(load: Load, event: Allocated) -> tuple[Load, Effects]:
    if not event.loads:
        computed = NoteComputed(
            request_id=load.request_id,
            source=load.source,
            was_suspended=load.is_suspended,
            was_taken=load.is_taken,
        )
        return msgspec.structs.replace(load, state=State.COMPUTED), (computed, *_release_unread(load))
    loading = msgspec.structs.replace(load, state=State.LOADING, began_ns=event.now_ns)
    return loading, (StartLoad(request_id=load.request_id, source=load.source),)


def _compute(load: Load, event: Allocated) -> tuple[Load, Effects]:
    return msgspec.structs.replace(load, state=State.COMPUTED), NO_EFFECTS


def _end_load(load: Load, event: LoadEnded) -> tuple[Load, Effects]:
    state = State.FAILED if event.has_failed else State.LOADED
    waited = NoteWait(heard_ns=load.heard_ns, is_loaded=not event.has_failed)
    return msgspec.structs.replace(load, state=state), (waited, LeaveLease())


def _end_queued(load: Load, event: Ended) -> tuple[Load, Effects]:
    return msgspec.structs.replace(load, state=State.ENDED), _release_unread(load)


def _end_loading(load: Load, event: Ended) -> tuple[Load, Effects]:
    waited = (NoteWait(heard_ns=load.heard_ns, is_loaded=False),) if event.has_failed else ()
    ended = AbortLoad(request_id=load.request_id), LeaveLease()
    return msgspec.structs.replace(load, state=State.ENDED), (*waited, *ended)


def _end(load: Load, event: Ended) -> tuple[Load, Effects]:
    return msgspec.structs.replace(load, state=State.ENDED), NO_EFFECTS


_QUEUED, _LOADING, _FAILED = State.QUEUED, State.LOADING, State.FAILED
_TO_COMPUTE, _WITHOUT_ROOM = State.TO_COMPUTE, State.WITHOUT_ROOM

MACHINE: Machine[Load, Effects] = Machine(
    name="load",
    states=State,
    initial=_QUEUED,
    terminal=frozenset({State.LOADED, State.COMPUTED, State.ENDED}),
    events=(Asked, Taken, NoRoomFound, RoomReturned, Allocated, LoadEnded, Ended),
    table={
        (_QUEUED, Asked): to(_offer, _QUEUED),
        (_QUEUED, Taken): to(_take, _QUEUED),
        (_QUEUED, Allocated): to(_allocate, _LOADING, State.COMPUTED),
        (_QUEUED, Ended): to(_end_queued, State.ENDED),
        (_LOADING, LoadEnded): to(_end_load, State.LOADED, _FAILED),
        (_LOADING, Ended): to(_end_loading, State.ENDED),
        (_FAILED, Asked): to(_queue_behind, _TO_COMPUTE),
        (_FAILED, Allocated): to(_compute, State.COMPUTED),
        (_FAILED, Ended): to(_end, State.ENDED),
        (_TO_COMPUTE, NoRoomFound): to(_lose_room, _WITHOUT_ROOM),
        (_TO_COMPUTE, Allocated): to(_compute, State.COMPUTED),
        (_TO_COMPUTE, Ended): to(_end, State.ENDED),
        (_WITHOUT_ROOM, RoomReturned): to(_regain_room, _TO_COMPUTE),
        (_WITHOUT_ROOM, Allocated): to(_compute, State.COMPUTED),
        (_WITHOUT_ROOM, Ended): to(_end, State.ENDED),
    },
    ignored={
        **pairs((_QUEUED,), (NoRoomFound,), "it waits as any other request does, and nothing is reserved for it"),
        **pairs((_LOADING,), (Taken,), "it reads the same, and the ranks have heard of that before they let go"),
        **pairs((_LOADING,), (Asked, NoRoomFound, Allocated), "vLLM has parked it"),
        **pairs((_TO_COMPUTE, _WITHOUT_ROOM), (Asked,), "it is queued as any other request"),
        **pairs((_WITHOUT_ROOM,), (NoRoomFound,), "that is known"),
        **pairs((_QUEUED, _FAILED, _TO_COMPUTE, _WITHOUT_ROOM), (LoadEnded,), "nothing is read for it; said twice"),
    },
    impossible={
        **pairs((_FAILED, _TO_COMPUTE, _WITHOUT_ROOM), (Taken,), "it wants nothing of what is lent any more"),
        **pairs((_QUEUED, _LOADING, _FAILED, _TO_COMPUTE), (RoomReturned,), "it does not lack any"),
        **pairs((_FAILED,), (NoRoomFound,), "whoever asks first is queued behind others, whatever room there is"),
    },
)
