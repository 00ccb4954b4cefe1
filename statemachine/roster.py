"""The roster of a decode rank: which remote engines it knows, which of them a request belongs to, which it retires.

Sans I/O, as the other cores are: `handle(event, now_ns)` returns what to do, `next_deadline()` says when
`advance(now_ns)` has something to do. The executor (`connector/runtime/supervisor.py`) carries out effects in order and
decides nothing. Nothing here reads a clock: `now_ns` is the executor's, and never goes back.

A member is one remote engine as requests describe it: a `RemoteEngine` core with its executor. Whether it is in use or
connected changes with every event of that core. So it is asked when a decision depends on it (`Member`), and no copy is
kept here that could become stale. Kept here is what only the roster decides or is told: who was admitted, where it is
looked for, when it was last asked for, and whether it was retired.

Rules:

* Requests that describe an engine alike share a member, others do not. What a client says of an engine's sizes may be
  wrong: then the handshake fails for those who say the same, and for nobody else.
* There is a limit to the members that stay. For a newcomer that finds no room, the unused member that was asked for
  longest ago is retired, one that is not connected before one that is. A connected one goes too, because a dead engine
  that nobody uses may look connected, for minutes or until it is asked for something: with a full table, engines that
  replaced others would not find a place. Not for a newcomer that no request needs yet, and nor does one that is just
  being connected: of more engines that are to be met than can stay, each would drive out another without end, and leave
  its sockets behind.
* A newcomer is refused when nobody can be retired for it, and when the connector stops. From then on nothing begins at
  a member either: it would fail with the member's end, and be told another reason than the true one.
* When a member has connected, other engines that were looked for at the same place are gone: they are retired. Not by
  one that is retired itself: its answer has come late, after that of the engine which has replaced it.
* A member that is unused and not connected is retired when it was not asked for in a long time. A live connection is
  kept however idle it is: each removal of an agent that is used again leaks sockets (docs/nixl.md fact 11).
* A member is retired once. It has made room then; what is asked of it before it has ended is handed to it all the same,
  and ends in it, or in its successor. But READs that hang may keep it for ever. When it has nothing else left and is
  asked for, it is recalled, and needs room as a newcomer does: the engine may be back, elsewhere under its id.
* An abort goes to the member that the request was handed to.
* That nobody wants a lease any more is told to the member that keeps it, and brings nobody.
* While too many blocks are in quarantine (`quarantine.py`), a request that is to be read is refused, whichever engine
  has its KV; that engine is told, as of one that needs nothing. Who only waits in the queue is handed to its member
  all the same: there may be room when its turn comes.
* A request whose id is that of one in quarantine at the same member is refused in the same way: what is kept of that
  one goes by its id, and its blocks must come back, not those of its namesake.

Each event costs the same however many members there are, but for a newcomer to a full roster, which has all of them
looked at. A connection concerns those who share its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol, TypeAlias

from statemachine import request
from statemachine.deadlines import Deadlines
from statemachine.failures import Failure, ParamsFailure, QuarantineFull, RequestIdInQuarantine, TooManyPeers
from statemachine.kernel import Effect, Event
from statemachine.lease import LeaseName
from statemachine.quarantine import Quarantine


class PeerKey(NamedTuple):
    """A remote engine as requests describe it, with the sizes of its parallelism as a client says them."""

    engine_id: str
    tp_size: int
    dcp_size: int
    pp_size: int


class Member(Protocol):
    """What is asked of a member."""

    @property
    def is_unused(self) -> bool:
        """Nobody wants anything of it."""
        ...

    @property
    def is_connected(self) -> bool: ...

    @property
    def is_shaking_hands(self) -> bool:
        """It is being connected."""
        ...

    @property
    def may_be_recalled(self) -> bool:
        """It was retired, and may never end: READs hang."""
        ...


# --- events: from the engine ----------------------------------------------------------------------------------------


class Asked(Event, frozen=True, kw_only=True):
    """A request wants something of an engine.

    Attributes:
        place: where the engine is said to be, as host:port.
        is_awaited: a report is awaited, so a refusal is one. Otherwise nobody misses what is not done.
        age_ns: how long the engine has known the request.
        message: what it wants; opaque to the core.
    """

    key: PeerKey
    place: str
    request_id: str
    lease: LeaseName
    is_awaited: bool
    message: Any
    age_ns: int = 0


class MeetAsked(Event, frozen=True, kw_only=True):
    """An engine is to be connected, although no request needs it yet. `place` and `message` are as in `Asked`."""

    key: PeerKey
    place: str
    message: Any


class AbortAsked(Event, frozen=True, kw_only=True):
    """The engine gave a request up; it may have ended already. `message` is as in `Asked`."""

    request_id: str
    message: Any


class LetGo(Event, frozen=True, kw_only=True):
    """Nobody wants a lease of this engine any more. `message` is as in `Asked`."""

    key: PeerKey
    message: Any


class Rejected(Event, frozen=True, kw_only=True):
    """A report is awaited, but the request's parameters are not to be acted on. `lease`, `peer`: what they name, where
    that can be read."""

    request_id: str
    failure: ParamsFailure
    message: Any
    lease: LeaseName = LeaseName("", 0)
    peer: str = ""
    age_ns: int = 0


class Stopped(Event, frozen=True, kw_only=True):
    """The connector stops; `failure` is what requests are told from here on that find no member."""

    failure: Failure


# --- events: from the members ---------------------------------------------------------------------------------------


class Connecting(Event, frozen=True, kw_only=True):
    """A member tries to connect to its engine at this place."""

    key: PeerKey
    place: str


class Connected(Event, frozen=True, kw_only=True):
    """The engine has answered there."""

    key: PeerKey


class RequestEnded(Event, frozen=True, kw_only=True):
    """A member has reported a request."""

    request_id: str


class QuarantineBegan(Event, frozen=True, kw_only=True):
    """A request has ended in a member, and so many blocks of it may still be written into."""

    key: PeerKey
    request_id: str
    blocks: int


class QuarantineEnded(Event, frozen=True, kw_only=True):
    """They are written into no more."""

    key: PeerKey
    request_id: str


class Ended(Event, frozen=True, kw_only=True):
    """Nothing is left of a member."""

    key: PeerKey


# --- effects --------------------------------------------------------------------------------------------------------


class Admit(Effect, frozen=True, kw_only=True):
    """Start a member; `message` is the first that it will be handed."""

    key: PeerKey
    message: Any


class HandOver(Effect, frozen=True, kw_only=True):
    """Give a message to its member."""

    key: PeerKey
    message: Any


class TellUnread(Effect, frozen=True, kw_only=True):
    """Tell a member that nothing will be read of what this message wants: it was refused."""

    key: PeerKey
    message: Any


class NoteNotMet(Effect, frozen=True, kw_only=True):
    """There is no room for an engine that no request needs."""

    key: PeerKey
    failure: Failure


class NoteQuarantine(Effect, frozen=True, kw_only=True):
    """The limit of the quarantine was reached, or room has come back. `blocks` are in quarantine now."""

    is_full: bool
    blocks: int
    limit_blocks: int


class Retire(Effect, frozen=True, kw_only=True):
    """Let a member end, as soon as it can; feed Ended."""

    key: PeerKey


class Recall(Effect, frozen=True, kw_only=True):
    """A member that was retired is wanted again, and would not end: let it go on. `message` as in Admit."""

    key: PeerKey
    message: Any


class Refuse(Effect, frozen=True, kw_only=True):
    """Report that a request has failed without reaching a member. The trace shows its life like any other: it is made
    as `fresh`, and `event` ends it as `ended`."""

    message: Any
    fresh: request.Request
    event: request.PeerFailed | request.ParamsRejected
    ended: request.Request


RosterEffect: TypeAlias = Admit | HandOver | TellUnread | NoteNotMet | NoteQuarantine | Retire | Recall | Refuse


# --- the core -------------------------------------------------------------------------------------------------------


class _Entry:
    """What is known of one member.

    Attributes:
        place: where it is looked for: the first one that was asked for, then the latest that it tried.
        asked_ns: when it was last asked for.
        is_retired: it was told so, and has not ended yet.
    """

    __slots__ = ("asked_ns", "is_retired", "place")

    def __init__(self, place: str, asked_ns: int) -> None:
        self.place = place
        self.asked_ns = asked_ns
        self.is_retired = False


class MemberView(NamedTuple):
    """What the roster knows of one member, for people: where it is looked for, and when it was last asked for."""

    place: str
    asked_ns: int
    is_retired: bool


class Roster:
    """See the module's docstring.

    Args:
        members_max: how many members stay, at most. Those that were retired do not count.
        idle_ns: for how long a member is kept that is not connected and not asked for. It goes by twice that at the
            latest. None: it is kept for ever.
        quarantine_blocks_max: see `quarantine.py`.
        member: how a member is asked; called only with keys of members.
    """

    def __init__(
        self, *, members_max: int, idle_ns: int | None, quarantine_blocks_max: int, member: Callable[[PeerKey], Member]
    ) -> None:
        self._members_max = members_max
        self._idle_ns = idle_ns
        self._member = member
        # From Admit to Ended.
        self._entries: dict[PeerKey, _Entry] = {}
        # How many of these were not retired.
        self._staying = 0
        # The entries by the place where they are looked for; never empty dicts.
        self._at_place: dict[str, dict[PeerKey, None]] = {}
        # The member of each request whose report is awaited.
        self._of_request: dict[str, PeerKey] = {}
        # When to see whether a member is idle: one entry for each that stays; none if they are kept for ever.
        self._timers: Deadlines[PeerKey] = Deadlines()
        # Of all members, by member and request.
        self._quarantine = Quarantine(quarantine_blocks_max)
        # Why nobody is admitted any more.
        self._stopped: Failure | None = None

    def __len__(self) -> int:
        """How many members have not ended."""
        return len(self._entries)

    @property
    def quarantined_blocks(self) -> int:
        """How many blocks are in quarantine, for all members together."""
        return self._quarantine.blocks

    def next_deadline(self) -> int | None:
        """Never earlier than `idle_ns` after the event that brought it: who is admitted moves no deadline forward."""
        return self._timers.next_ns()

    def advance(self, now_ns: int) -> list[RosterEffect]:
        """Retire who has been idle for too long."""
        effects: list[RosterEffect] = []
        while (key := self._timers.take_due(now_ns)) is not None:
            assert self._idle_ns is not None
            entry, member = self._entries[key], self._member(key)
            idle_until_ns = entry.asked_ns + self._idle_ns
            if idle_until_ns > now_ns:
                self._timers.set(key, idle_until_ns)
            elif member.is_unused and not member.is_connected:
                effects += self._retire([key])
            else:
                self._timers.set(key, now_ns + self._idle_ns)
        return effects

    def handle(self, event: Event, now_ns: int) -> list[RosterEffect]:
        """Take one event in; returns what to do, in order."""
        match event:
            case Asked():
                return self._ask(event, now_ns)
            case MeetAsked():
                if self._stopped is None or event.key in self._entries:
                    handed_over = self._hand_over(event, now_ns, takes_connected=False)
                    return handed_over or [NoteNotMet(key=event.key, failure=self._crowded(event))]
            case RequestEnded(request_id=request_id):
                self._of_request.pop(request_id, None)
            case AbortAsked(request_id=request_id, message=message):
                key = self._of_request.get(request_id)
                if key is not None and key in self._entries:
                    return [HandOver(key=key, message=message)]
            case LetGo(key=key, message=message):
                if key in self._entries:
                    return [HandOver(key=key, message=message)]
            case Rejected(request_id=request_id, failure=failure, lease=lease, peer=peer):
                return [_refuse(event, request_id, lease, peer, request.ParamsRejected(failure=failure))]
            case Connecting(key=key, place=place):
                self._look_at(key, place)
            case Connected(key=key):
                return self._retire(self._replaced_by(key))
            case QuarantineBegan(key=key, request_id=request_id, blocks=blocks):
                return self._keep_aside((key, request_id), blocks)
            case QuarantineEnded(key=key, request_id=request_id):
                return self._keep_aside((key, request_id), 0)
            case Ended(key=key):
                self._forget(key)
            case Stopped(failure=failure):
                self._stopped = self._stopped or failure
            case _:
                raise TypeError(f"{type(event).__name__} is not an event of this core")
        return []

    def view(self, key: PeerKey) -> MemberView | None:
        """None: not a member, or not any more."""
        entry = self._entries.get(key)
        return None if entry is None else MemberView(entry.place, entry.asked_ns, entry.is_retired)

    # --- who is admitted --------------------------------------------------------------------------------------------

    def _ask(self, asked: Asked, now_ns: int) -> list[RosterEffect]:
        key = asked.key
        entry = self._entries.get(key)
        if self._stopped is not None and (entry is None or asked.is_awaited):
            return self._turn_away(asked, self._stopped)
        if asked.is_awaited and self._quarantine.is_full:
            full = QuarantineFull(blocks=self._quarantine.blocks, limit=self._quarantine.limit_blocks)
            return self._turn_away_for_now(asked, entry, full)
        if asked.is_awaited and (blocks := self._quarantine.blocks_of((key, asked.request_id))):
            return self._turn_away_for_now(asked, entry, RequestIdInQuarantine(blocks=blocks))
        effects = self._hand_over(asked, now_ns, takes_connected=True)
        if not effects:
            if entry is not None and not asked.is_awaited:
                # There is no room to recall it. It may hold the lease for this request, which may have ended.
                return [HandOver(key=key, message=asked.message)]
            return self._turn_away_for_now(asked, entry, self._crowded(asked))
        if asked.is_awaited:
            self._of_request[asked.request_id] = key
        return effects

    def _hand_over(self, asked: Asked | MeetAsked, now_ns: int, *, takes_connected: bool) -> list[RosterEffect]:
        """Give the message to its member, which is admitted or recalled before, if need be. No effect if there is no
        room. `takes_connected`: a member that is connected, or just being connected, may be retired to make room."""
        key, message = asked.key, asked.message
        entry = self._entries.get(key)
        effects: list[RosterEffect] = []
        is_recalled = entry is not None and entry.is_retired and self._member(key).may_be_recalled
        if entry is None or is_recalled:
            if self._staying >= self._members_max:
                effects = self._make_room(takes_connected=takes_connected)
                if not effects:
                    return []
            if is_recalled:
                self._forget(key)
            self._enter(key, asked.place, now_ns)
            effects.append((Recall if is_recalled else Admit)(key=key, message=message))
        else:
            entry.asked_ns = now_ns
        return [*effects, HandOver(key=key, message=message)]

    def _crowded(self, asked: Asked | MeetAsked) -> TooManyPeers:
        return TooManyPeers(peer=asked.key.engine_id, address=asked.place, limit=self._members_max)

    def _turn_away(self, asked: Asked, failure: Failure) -> list[RosterEffect]:
        if not asked.is_awaited:
            return []
        self._of_request.pop(asked.request_id, None)  # it is there if a member has ended without hearing of it
        failed = request.PeerFailed(failure=failure)
        return [_refuse(asked, asked.request_id, asked.lease, asked.key.engine_id, failed)]

    def _turn_away_for_now(self, asked: Asked, entry: _Entry | None, failure: Failure) -> list[RosterEffect]:
        """It may not be read at present. A member that has heard of the request holds the lease for it."""
        refused = self._turn_away(asked, failure)
        return refused if entry is None else [*refused, TellUnread(key=asked.key, message=asked.message)]

    def _keep_aside(self, owner: tuple[PeerKey, str], blocks: int) -> list[RosterEffect]:
        """So many blocks of a request are in quarantine now."""
        quarantine = self._quarantine
        was_full = quarantine.is_full
        quarantine.keep(owner, blocks)
        if quarantine.is_full is was_full:
            return []
        limit = quarantine.limit_blocks
        return [NoteQuarantine(is_full=quarantine.is_full, blocks=quarantine.blocks, limit_blocks=limit)]

    def _make_room(self, *, takes_connected: bool) -> list[RosterEffect]:
        """Retire one member; no effect if there is none that may go."""
        found: tuple[bool, int, PeerKey] | None = None
        for key, entry in self._entries.items():
            member = self._member(key)
            if entry.is_retired or not member.is_unused:
                continue
            if (member.is_connected or member.is_shaking_hands) and not takes_connected:
                continue
            candidate = (member.is_connected, entry.asked_ns, key)
            if found is None or candidate[:2] < found[:2]:
                found = candidate
        return self._retire([found[2]]) if found is not None else []

    # --- who is retired --------------------------------------------------------------------------------------------

    def _replaced_by(self, key: PeerKey) -> list[PeerKey]:
        entry = self._entries.get(key)
        if entry is None or entry.is_retired:  # the answer of an engine that was replaced may come late
            return []
        return [other for other in self._at_place[entry.place] if other.engine_id != key.engine_id]

    def _retire(self, keys: Iterable[PeerKey]) -> list[RosterEffect]:
        effects: list[RosterEffect] = []
        for key in keys:
            entry = self._entries[key]
            if not entry.is_retired:
                entry.is_retired = True
                self._staying -= 1
                self._timers.cancel(key)
                effects.append(Retire(key=key))
        return effects

    # --- what is known of them --------------------------------------------------------------------------------------

    def _enter(self, key: PeerKey, place: str, now_ns: int) -> None:
        self._entries[key] = _Entry(place, now_ns)
        self._staying += 1
        self._at_place.setdefault(place, {})[key] = None
        if self._idle_ns is not None:
            self._timers.set(key, now_ns + self._idle_ns)

    def _look_at(self, key: PeerKey, place: str) -> None:
        entry = self._entries.get(key)
        if entry is not None and entry.place != place:
            _remove(self._at_place, entry.place, key)
            self._at_place.setdefault(place, {})[key] = None
            entry.place = place

    def _forget(self, key: PeerKey) -> None:
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        if not entry.is_retired:
            self._staying -= 1
            self._timers.cancel(key)
        _remove(self._at_place, entry.place, key)


def _remove(index: dict[str, dict[PeerKey, None]], name: str, key: PeerKey) -> None:
    del index[name][key]
    if not index[name]:
        del index[name]


def _refuse(
    asked: Asked | Rejected,
    request_id: str,
    lease: LeaseName,
    peer: str,
    event: request.PeerFailed | request.ParamsRejected,
) -> Refuse:
    fresh = request.Request(request_id=request_id, lease=lease, peer=peer, retries_left=0, age_ns=asked.age_ns)
    ended, _ = request.MACHINE.step(fresh, event)
    return Refuse(message=asked.message, fresh=fresh, event=event, ended=ended)
