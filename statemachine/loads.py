"""The core of an engine's scheduler for requests that load KV: which of them may have blocks, where vLLM's own order
would stand still.

Sans I/O. `handle(event, now_ns)` returns what to do, and `ask` an answer with it; the executor is
`connector/scheduler/connector_scheduler.py`. It has no deadlines: vLLM or a rank says what happens.

vLLM serves its queue in order, and stops at the first request whose blocks it cannot have. What it takes for granted
does not hold here in three cases. `get_num_new_matched_tokens` can have a request passed over, and that is all that a
connector can do about the order.

A request whose load failed gives its blocks back and is scheduled again, under the policy `recompute`. vLLM 0.32 does
both at the head of the queue of those that hold blocks: if the pool has too few for it then, nobody behind it is
looked at any more, not even those that have all they need, and with nothing running the engine stands still for good.
So the first time that such a request asks, it is passed over: vLLM then puts it at the head of the ordinary queue,
which is served after those that hold blocks (`failed` to `to_compute`).

Until it has blocks again, vLLM reserves as many as it needs: loads are begun only with what is left. Where the queue is
one of priorities, others stand before it, and if one of these is a load that does not fit beside what is reserved,
nobody behind it is looked at any more. So while such requests wait, a load that has got no blocks lets them pass in the
step after it, and nobody else.

One that does not fit beside what is kept from the pool waits for nobody, and nobody for it. But vLLM reserves all the
same, so no load would begin: prompts are computed here until it has its blocks (`without_room`).

Several requests may name one lease: the samples of a prompt (`n`), which vLLM hands over one by one, or prompts that go
on from the lent one. Whoever lends frees its blocks when a reader has let go of them. Where others find in the cache
what one has loaded (`shares`), one reads: who asks meanwhile is passed over until that load has ended, and then all
others let go, however long they are queued. If it has failed, nobody waits for a second one: each tries, and the ranks
know whether they still hold the lease. Elsewhere each of them reads, and the ranks keep the lease until they are told
that nobody here wants it any more (`LetGo`): they would let go of it with the first READ that ends, of which this core
hears later.

A request that comes when others have been served by the lease and have let go of it (it is taken) computes what it does
not find in the cache. If it has served nobody, because their loads have failed for good (`fail`) or the clients have
left, the ranks tell whoever comes, and whether that one is computed is a matter of the policy.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from statemachine import load as machine
from statemachine.kernel import Effect, Event
from statemachine.load import AbortLoad, Load, NoteComputed, NoteWait, ReleaseUnread, StartLoad, State
from statemachine.remembered import Remembered

SERVED = frozenset({State.LOADED, State.FAILED, State.COMPUTED})
"""In which a request has got what it needs of what is lent, or computes it."""
TAKEN_MAX = 16_384
"""Leases that were let go of and are remembered: more than are taken while a tool that vLLM runs answers."""


class Answer(enum.Enum):
    """To a request that asks for blocks."""

    LET_PASS = "let pass"
    """None in this step; those behind it are looked at."""
    LOAD = "load"
    """It may have blocks, and loads."""
    COMPUTE = "compute"
    """It may have blocks, and loads nothing."""


class Room(enum.Enum):
    """Whether a request fits into the pool beside the blocks that are kept from it, once all others have come back."""

    ENOUGH = "enough"
    LACKING = "lacking"
    TAKEN_BY_LENT_BACK = "taken by what is lent back"
    """It would fit if nothing were lent back."""


# --- events ---------------------------------------------------------------------------------------------------------


class Heard(Event, frozen=True, kw_only=True):
    """A request has come of which something may be loaded. `lease` is as in `Load`."""

    request_id: str
    source: Any
    lease: str | None = None


class Asked(Event, frozen=True, kw_only=True):
    """vLLM looks for blocks for a request, whether or not it loads anything. See `Loads.ask`.

    Attributes:
        pays: something can be loaded for it, and is better loaded than computed.
        num_tokens: that it has, for people.
    """

    request_id: str
    room: Room
    pays: bool
    num_tokens: int = 0


class Allocated(Event, frozen=True, kw_only=True):
    """A request has got blocks. `loads`: as it was offered, KV is read into them."""

    request_id: str
    loads: bool


class StepScheduled(Event, frozen=True, kw_only=True):
    """Whoever asks from now on asks for the next step. `blocks_are_kept`: some are kept from the pool."""

    blocks_are_kept: bool


class LoadEnded(Event, frozen=True, kw_only=True):
    """All ranks have ended; it is of no matter whether the request is of this connector."""

    request_id: str
    has_failed: bool


class Ended(Event, frozen=True, kw_only=True):
    """A request has ended. `has_failed`: because its load has."""

    request_id: str
    has_failed: bool = False


# --- effects --------------------------------------------------------------------------------------------------------


class LetGo(Effect, frozen=True, kw_only=True):
    """No request here wants anything of this lease any more. Said unless what is loaded is shared."""

    source: Any


class SayNoRoom(Effect, frozen=True, kw_only=True):
    """For people: a request waits until blocks come back that are kept from the pool. Once for each."""

    request_id: str
    num_tokens: int


class SayRoomFound(Effect, frozen=True, kw_only=True):
    """For people: a request of which SayNoRoom was said has its blocks, or has ended."""

    request_id: str


class SayNoLoads(Effect, frozen=True, kw_only=True):
    """For people: no load begins, because that of this request has failed and it lacks room."""

    request_id: str


class SayLoadsAgain(Effect, frozen=True, kw_only=True):
    """For people: loads begin again."""


LoadEffect: TypeAlias = (
    StartLoad
    | ReleaseUnread
    | AbortLoad
    | NoteComputed
    | NoteWait
    | LetGo
    | SayNoRoom
    | SayRoomFound
    | SayNoLoads
    | SayLoadsAgain
)


@dataclass(slots=True)
class _Lease:
    """What is lent, by the requests that are queued with it or load.

    Attributes:
        users: these. Never empty.
        loading: how many of them load.
        was_tried: a load has failed or was aborted.
        has_served: a request was loaded, or computed, because nothing was to be read or its load has failed.
    """

    users: set[str] = field(default_factory=set)
    loading: int = 0
    was_tried: bool = False
    has_served: bool = False

    def copy(self) -> _Lease:
        return _Lease(set(self.users), self.loading, self.was_tried, self.has_served)


# --- the core -------------------------------------------------------------------------------------------------------


class Loads:
    """See the module's docstring.

    Args:
        shares: whether a request finds in the cache what another one with the same beginning has loaded.

    Attributes: read, and not changed, by others, in every step.
        queued, loading: the requests in these states, by id, those that came into it first at the beginning.
        has_to_step: whether StepScheduled would lead to anything.
    """

    def __init__(self, *, shares: bool) -> None:
        self._shares = shares
        # Those that are not over.
        self._loads: dict[str, Load] = {}
        # The same by state.
        self._by_state: dict[State, dict[str, Load]] = {
            state: {} for state in State if state not in machine.MACHINE.terminal
        }
        self.queued, self.loading = self._by_state[State.QUEUED], self._by_state[State.LOADING]
        # In this step: those that were offered and have got no blocks.
        self._offered: set[str] = set()
        # Whether only those in `to_compute` may have blocks in this step, because a load got none in the last one.
        self._lets_pass = False
        # Requests, of any kind, that were passed over for want of room; and those of them that would have it if nothing
        # were lent back.
        self._without_room: set[str] = set()
        self._behind_lent_back: set[str] = set()
        # Those that requests in these states name.
        self._leases: dict[str, _Lease] = {}
        # The leases that have served, and that were let go of.
        self._taken = Remembered(TAKEN_MAX)
        self.has_to_step = False
        # Of the event that is being taken in.
        self._effects: list[LoadEffect] = []

    def handle(self, event: Event, now_ns: int) -> list[LoadEffect]:
        """Take one event in; returns what to do, in order."""
        match event:
            case Heard(request_id=request_id, source=source, lease=lease):
                # vLLM refuses an id that it knows, so it has no other request of it any more.
                self._end(request_id, has_failed=False)
                self._put(None, Load(request_id=request_id, source=source, heard_ns=now_ns, lease=lease))
                if lease is not None:
                    self._leases.setdefault(lease, _Lease()).users.add(request_id)
            case Allocated(request_id=request_id, loads=loads):
                self._leave_queue(request_id)
                self._step(request_id, machine.Allocated(now_ns=now_ns, loads=loads))
            case LoadEnded(request_id=request_id, has_failed=has_failed):
                self._step(request_id, machine.LoadEnded(has_failed=has_failed))
            case Ended(request_id=request_id, has_failed=has_failed):
                self._end(request_id, has_failed=has_failed)
            case StepScheduled(blocks_are_kept=blocks_are_kept):
                self._begin_step(blocks_are_kept)
            case _:
                raise TypeError(f"{type(event).__name__} is not an event of this core")
        return self._take()

    def ask(self, asked: Asked) -> tuple[Answer, list[LoadEffect]]:
        """Take the question in; returns its answer, and what to do."""
        return self._answer(asked), self._take()

    def _take(self) -> list[LoadEffect]:
        self.has_to_step = self._lets_pass or len(self._offered) > 0 or self._are_suspended
        effects, self._effects = self._effects, []
        return effects

    @property
    def waits_for_lent_back(self) -> bool:
        """Whether a request would have room if nothing were lent back."""
        return len(self._behind_lent_back) > 0

    def is_taken(self, request_id: str) -> bool:
        """Whether what is lent to it has served others, and was let go of."""
        load = self._loads.get(request_id)
        return load is not None and (load.is_released or (load.lease is not None and load.lease in self._taken))

    def would_load(self, request_id: str) -> bool:
        """Whether a request may load, once it is its turn and has room."""
        return self._state(request_id) is State.QUEUED and not self._are_suspended and not self.is_taken(request_id)

    # --- the queue --------------------------------------------------------------------------------------------------

    def _answer(self, asked: Asked) -> Answer:
        request_id = asked.request_id
        before = self._state(request_id)
        loads = asked.pays and self.would_load(request_id)
        is_suspended = asked.pays and self._are_suspended
        is_taken = asked.pays and self.is_taken(request_id)
        self._step(request_id, machine.Asked(is_suspended=is_suspended, is_taken=is_taken))
        if before is State.FAILED:
            return Answer.LET_PASS
        if asked.room is not Room.ENOUGH:
            self._find_no_room(asked)
            return Answer.LET_PASS
        if self._lets_pass and before is not State.TO_COMPUTE:
            return Answer.LET_PASS
        if not loads:
            return Answer.COMPUTE
        if self._shares and self._is_waited_for(self._loads[request_id].lease):
            return Answer.LET_PASS
        self._offered.add(request_id)
        return Answer.LOAD

    def _is_waited_for(self, lease: str | None) -> bool:
        """Whether one is reading it, in which others will find what they need."""
        return lease is not None and self._leases[lease].loading > 0 and not self._leases[lease].was_tried

    @property
    def _are_suspended(self) -> bool:
        """vLLM keeps all that is free, and more, for a load that has failed: no other would begin before that one has
        its blocks, and nobody behind a load that cannot begin is looked at."""
        return len(self._by_state[State.WITHOUT_ROOM]) > 0

    def _find_no_room(self, asked: Asked) -> None:
        request_id = asked.request_id
        were_suspended = self._are_suspended
        if self._state(request_id) is not None:
            self._step(request_id, machine.NoRoomFound())
        if self._are_suspended and not were_suspended:
            self._effects.append(SayNoLoads(request_id=request_id))
        if request_id not in self._without_room:
            self._without_room.add(request_id)
            self._effects.append(SayNoRoom(request_id=request_id, num_tokens=asked.num_tokens))
        if asked.room is Room.TAKEN_BY_LENT_BACK:
            self._behind_lent_back.add(request_id)

    def _leave_queue(self, request_id: str) -> None:
        self._offered.discard(request_id)
        if request_id in self._without_room:
            self._without_room.remove(request_id)
            self._effects.append(SayRoomFound(request_id=request_id))
        self._behind_lent_back.discard(request_id)

    def _end(self, request_id: str, *, has_failed: bool) -> None:
        self._leave_queue(request_id)
        self._step(request_id, machine.Ended(has_failed=has_failed))

    def _begin_step(self, blocks_are_kept: bool) -> None:
        if not blocks_are_kept:
            # Their turn may be far off; what they need is kept for them as for all whose load has failed.
            for request_id in list(self._by_state[State.WITHOUT_ROOM]):
                self._step(request_id, machine.RoomReturned())
        # A failed one may not have asked yet: vLLM skips it while others have taken all places for adapters (LoRA).
        behind = len(self._by_state[State.FAILED]) + len(self._by_state[State.TO_COMPUTE])
        self._lets_pass = bool(self._offered) and behind > 0
        self._offered.clear()

    # --- loads ------------------------------------------------------------------------------------------------------

    def _state(self, request_id: str) -> State | None:
        found = self._loads.get(request_id)
        return None if found is None else found.state

    def _step(self, request_id: str, event: Event) -> None:
        before = self._loads.get(request_id)
        if before is None:
            return  # nothing is loaded for it, or it is over
        were_suspended = self._are_suspended
        after, effects = machine.MACHINE.step(before, event)
        self._put(before, after)
        for effect in effects:
            if isinstance(effect, machine.LeaveLease):
                self._let_go(before, after.state)
                continue
            if isinstance(effect, StartLoad):
                effect = msgspec.structs.replace(effect, keeps_lease=not self._shares)
                if before.lease is not None:
                    self._leases[before.lease].loading += 1
            self._effects.append(effect)
        if were_suspended and not self._are_suspended:
            self._effects.append(SayLoadsAgain())

    def _let_go(self, load: Load, after: State) -> None:
        if load.lease is None:
            return
        lease = self._leases[load.lease]
        lease.users.remove(load.request_id)
        lease.has_served = lease.has_served or after in SERVED
        if load.state is State.LOADING:
            lease.loading -= 1
            lease.was_tried = lease.was_tried or after is not State.LOADED
        if not lease.users:
            del self._leases[load.lease]
            if lease.has_served:
                self._taken.add(load.lease)
            if not self._shares:
                self._effects.append(LetGo(source=load.source))
        elif self._shares and after is State.LOADED:
            # The ranks let go of it with the READ, but for those who wait here and of whom they have heard before.
            self._taken.add(load.lease)
            for user in sorted(lease.users):
                self._step(user, machine.Taken())

    def _put(self, before: Load | None, after: Load) -> None:
        request_id = after.request_id
        if before is not None and before.state is not after.state:
            del self._by_state[before.state][request_id]
        if after.state in self._by_state:
            self._by_state[after.state][request_id] = self._loads[request_id] = after
        else:
            del self._loads[request_id]

    # --- for the explorer -------------------------------------------------------------------------------------------

    def copy(self) -> Loads:
        """An independent core that behaves alike."""
        other = Loads(shares=self._shares)
        other._loads = dict(self._loads)
        for state, loads in self._by_state.items():
            other._by_state[state].update(loads)
        other._offered = set(self._offered)
        other._lets_pass = self._lets_pass
        other._without_room = set(self._without_room)
        other._behind_lent_back = set(self._behind_lent_back)
        other._leases = {name: lease.copy() for name, lease in self._leases.items()}
        other._taken = self._taken.copy()
        other.has_to_step = self.has_to_step
        return other

    def freeze(self, now_ns: int) -> Hashable:
        """Equal for two cores that behave alike from `now_ns` on; since when their requests are known is of no matter
        for that."""
        return (
            frozenset(msgspec.structs.replace(load, heard_ns=0, began_ns=0) for load in self._loads.values()),
            frozenset(self._offered),
            self._lets_pass,
            frozenset(self._without_room),
            frozenset(self._behind_lent_back),
            frozenset((name, lease.was_tried, lease.has_served) for name, lease in self._leases.items()),
            self._taken.freeze(),
        )
