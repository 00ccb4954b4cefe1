"""NIXL agents that are not real, moving real bytes: `FakeNixlWorld` and `FakeNixlPort`.

A port keeps the contract of `connector.ports.nixl` and passes the same suite as the real one. Time is trio's, so that
under a `MockClock` a READ of minutes takes none. Memory is memory of this process: a registered range is an address,
and a READ copies bytes from address to address, half of them when half of its time is over and the rest at its end. So
what somebody overwrites while a READ is under way shows in the bytes that arrive, as it would with real DMA.

What it takes over from real agents (measured on NIXL 1.5.1 over UCX)
* a READ that nobody waits for any more goes on writing: after its agent was removed, and after the port was closed over
  it (`aclose` calls it abandoned);
* there is no error status, only an exception from a call or the end of a READ;
* the end of a READ with an error does not mean that it writes nothing any more (`NixlRules.read_errs_early`), unless it
  had a single descriptor;
* with `reads_inline` a READ is over when it is posted, as over shared memory; otherwise it takes its time afterwards,
  as over a network;
* one thread serves all calls of a port: a call waits for those before it, an inline READ holds up the others;
* death of a peer: its READs fail with a part of the bytes landed, everything to it raises from then on, its agent stays
  loaded; what is sent before anybody notices is lost without a word;
* a hung peer: READs that need its help stay in flight for as long as it hangs;
* a READ of memory that is gone breaks the connection although the peer lives;
* a list that was prepared before its agent was removed is of no use after the agent was added again;
* an agent that NIXL forgets by itself: what was posted to it goes on, what is asked of it raises;
* adding the same agent with other metadata is refused, adding it again is not, and loads it anew if it was forgotten;
* a call that the agent's thread has begun is not withdrawn when it is cancelled: it is done, and returns;
* a connection is made soon after its agent was loaded, or when a process that stood still goes on, to whoever is at its
  place then: where the agent's has ended and another one was opened there since (`FakeNixlWorld.open`), other memory is
  read;
* notifications of one sender keep their order.

Not modelled: what NIXL refuses to release, names that are not UTF-8.
"""

from __future__ import annotations

import ctypes
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf

import msgspec
import numpy as np
import numpy.typing as npt
import trio

from connector.ports.nixl import (
    AgentName,
    DescriptorIds,
    DescriptorListHandle,
    ListenerLost,
    MemoryKind,
    MemoryRange,
    MemoryRun,
    NixlCallFailed,
    NixlEvent,
    NotificationReceived,
    PortBroken,
    PortClosed,
    PortCounts,
    PortReadEnded,
    ReadHandle,
    ReadMeasured,
    ReadPosted,
)
from tests.simulation.agenda import Agenda
from tests.simulation.faults import DEATH_NOTICED_SECONDS, engine_of

CALL_SECONDS = 20e-6
"""How long the agent's thread takes for a call."""
FIRST_READ_BYTES = 8
"""With which a connection is made."""
STRAY_GRACE_SECONDS = 0.5
"""How long after the removal of a connection pieces of READs that erred early still arrive."""
LOOK_EXPECTING_SECONDS = 0.001
LOOK_IDLE_SECONDS = 0.05
"""How soon a notification that has arrived is looked at."""

BACKEND_ERROR = "nixlBackendError: NIXL_ERR_BACKEND"
DISCONNECTED = "nixlRemoteDisconnectError: NIXL_ERR_REMOTE_DISCONNECT"
NOT_FOUND = "nixlNotFoundError: NIXL_ERR_NOT_FOUND"
INVALID = "nixlInvalidParamError: NIXL_ERR_INVALID_PARAM"
MISMATCH = "nixlMismatchError: NIXL_ERR_MISMATCH"
NOT_ALLOWED = "nixlNotAllowedError: NIXL_ERR_NOT_ALLOWED"


class NixlRules:
    """How the transport behaves; the faults of a simulation override it. Names are agents' names."""

    def read_seconds(self, initiator: AgentName, target: AgentName, length_bytes: int) -> float:
        """How long a READ takes when nothing holds it up."""
        return 200e-6 + length_bytes / 5e9

    def read_error(self, initiator: AgentName, target: AgentName) -> bool:
        """Whether a READ fails at half of its way, and breaks the connection."""
        return False

    def read_errs_early(self, initiator: AgentName, target: AgentName) -> bool:
        """Whether a READ of several descriptors ends with an error when half of its time is over, while the rest is
        still on its way. The connection stays."""
        return False

    def read_lies(self, initiator: AgentName, target: AgentName) -> bool:
        """Whether a READ ends without an error, and one bit of what it has written is wrong."""
        return False

    def stray_seconds(self, initiator: AgentName, target: AgentName) -> float:
        """How long after such an end the last piece arrives (inf: never, though it may at any time). The others are
        spread over that time."""
        return 1.0

    def strays_outlive_removal(self, initiator: AgentName, target: AgentName) -> bool:
        """Whether pieces still arrive when the connection was removed more than `STRAY_GRACE_SECONDS` ago."""
        return False

    def read_stalls_until(self, initiator: AgentName, target: AgentName) -> float:
        """The moment until which READs do not move on."""
        return 0.0

    def prepare_refused(self, initiator: AgentName, target: AgentName) -> bool:
        """Whether descriptors of a peer's memory cannot be prepared this time."""
        return False

    def notification_delays(self, sender: AgentName, receiver: AgentName) -> Sequence[float]:
        """Seconds until each copy of a notification arrives: none, one or several."""
        return (30e-6,)


class _Metadata(msgspec.Struct, frozen=True, array_like=True):
    """What a port says about itself. `instance` tells two agents of one name apart."""

    magic: str
    name: str
    instance: int
    ranges: list[tuple[int, int, MemoryKind]]
    end: str


_METADATA_MARK = "fake-nixl"


@dataclass(eq=False)
class _Connection:
    """One `add_remote_agent`: useless once it is broken, removed or forgotten."""

    owner: FakeNixlPort
    metadata: bytes
    named: FakeNixlPort
    """Whose metadata these are."""
    target: FakeNixlPort
    """Who is read: not `named` where another process listened at its place when the connection was made."""
    settled: trio.Event
    """It is made, or it never will be."""
    followers: list[Callable[[], None]]
    """What goes on when it is made."""
    is_made: bool = False
    is_reached: bool = False
    """Something was read over it: `reach` asks no more."""
    is_broken: bool = False
    is_removed: bool = False
    is_forgotten: bool = False
    """NIXL has dropped it by itself."""


@dataclass(eq=False)
class _PreparedList:
    connection: _Connection | None
    """None: local memory."""
    addresses: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]


@dataclass(eq=False)
class FlyingRead:
    """A READ on its way: `pieces` are (local address, remote address, length in bytes); `copied` of them are here."""

    handle: ReadHandle
    initiator: FakeNixlPort
    connection: _Connection
    pieces: list[tuple[int, int, int]]
    posted_seconds: float
    seconds: float
    fails: bool
    errs_early: bool
    lies: bool
    is_inline: bool
    """It is over when it is posted, which takes its time."""
    copied: int = 0
    is_stray: bool = False
    """Its end was reported as an error, and it goes on writing."""
    stray_interval_seconds: float = 0.0
    has_ended: bool = False
    """It writes nothing any more."""

    @property
    def length_bytes(self) -> int:
        return sum(length for _, _, length in self.pieces)

    def writes_into(self, address: int, length_bytes: int) -> bool:
        """Whether it may still write into this memory."""
        return any(
            to < address + length_bytes and address < to + length
            for to, _, length in itertools.islice(self.pieces, self.copied, None)
        )


class FakeNixlWorld:
    """All agents, and the READs between them. Its agenda must be running."""

    def __init__(
        self,
        agenda: Agenda,
        rules: NixlRules | None = None,
        note_misuse: Callable[[str], None] = lambda detail: None,
    ) -> None:
        self.agenda = agenda
        self.note_copied: Callable[[FlyingRead], None] = lambda read: None
        """Told of each READ whose bytes have all arrived, at that moment."""
        self.rules = rules or NixlRules()
        self.note_misuse = note_misuse
        """Told in words of what a real agent would not forgive."""
        self._ports: dict[int, FakeNixlPort] = {}
        self._opened = 0
        self._at_place: dict[str, FakeNixlPort] = {}
        self.lies = 0
        """READs that have ended well and left something wrong."""
        self.mistaken = 0
        """Agents of a process that had ended which were loaded in another one."""
        self._reads: dict[FlyingRead, None] = {}
        self._arrivals: dict[tuple[AgentName, AgentName], float] = {}

    def open(
        self,
        agent_name: AgentName,
        ranges: Sequence[MemoryRange],
        now_ns: Callable[[], int],
        *,
        reads_inline: bool = False,
        place: str | None = None,
    ) -> FakeNixlPort:
        """Make an agent and register `ranges`, whose memory must outlive the world.

        Args:
            now_ns: its process's clock.
            place: the address and the port at which it is connected to, once those that were there before have ended.
                None: nobody else's, ever.
        """
        self._opened += 1
        port = FakeNixlPort(self, agent_name, ranges, now_ns, self._opened, reads_inline=reads_inline, place=place)
        self._ports[self._opened] = port
        if place is not None:
            self._at_place[place] = port
        return port

    def reads_in_flight(self) -> Iterable[FlyingRead]:
        """READs that may still write, also those that nobody waits for."""
        return self._reads.keys()

    def instance(self, number: int) -> FakeNixlPort | None:
        return self._ports.get(number)

    def begin_connection(self, connection: _Connection) -> None:
        names = connection.owner.agent_name, connection.named.agent_name
        self.agenda.after(self.rules.read_seconds(*names, FIRST_READ_BYTES), lambda: self._try_connection(connection))

    def _try_connection(self, connection: _Connection) -> None:
        """The first READ would be over by now."""
        if connection.is_made or connection.settled.is_set():
            return
        owner, there = connection.owner, self._who_answers_for(connection.named)
        held_up_by = _hindrance(owner, there)
        stalled_until = self.rules.read_stalls_until(owner.agent_name, there.agent_name)
        if held_up_by is not None:
            held_up_by.waiting.append(lambda: self._try_connection(connection))
        elif stalled_until > trio.current_time():
            self.agenda.at(stalled_until, lambda: self._try_connection(connection))
        else:
            self.make_connection(connection)

    def make_connection(self, connection: _Connection) -> None:
        """To whoever is there now."""
        connection.target = self._who_answers_for(connection.named)
        connection.is_made = True
        self.mistaken += connection.target is not connection.named
        if connection.target.may_be_recalled:
            self.announce_death(connection.target)
        else:
            connection.is_reached = True
            connection.settled.set()
        followers, connection.followers = connection.followers, []
        for go_on in followers:
            go_on()

    def _who_answers_for(self, named: FakeNixlPort) -> FakeNixlPort:
        """Whom one comes to who connects to this agent: where it has ended, whoever listens at its place now."""
        there = self._at_place.get(named.place or "", named)
        return named if there.may_be_recalled or not named.may_be_recalled else there

    def forget_the_dead(self) -> None:
        """In a run that goes on, when nothing is under way: nobody meets them any more."""
        self._ports = {number: port for number, port in self._ports.items() if not port.may_be_recalled}
        self._arrivals.clear()

    # --- reads --------------------------------------------------------------------------------------------------

    def launch(self, read: FlyingRead) -> None:
        self._reads[read] = None
        self.agenda.after(read.seconds / 2, lambda: self._move_on(read))

    def _move_on(self, read: FlyingRead) -> None:
        """One half of the way is over."""
        if read.has_ended:
            return
        if not read.connection.is_made:
            read.connection.followers.append(lambda: self._move_on(read))
            return
        is_half = read.copied == 0 and len(read.pieces) > 1
        if is_half and read.errs_early:
            self._go_astray(read)
            read.initiator.see_end(read, BACKEND_ERROR)
            return
        held_up_by = _hindrance(read.initiator, read.connection.target)
        if held_up_by is not None:
            held_up_by.waiting.append(lambda: self._move_on(read))
            return
        target = read.connection.target
        stalled_until = self.rules.read_stalls_until(read.initiator.agent_name, target.agent_name)
        if stalled_until > trio.current_time():
            self.agenda.at(stalled_until, lambda: self._move_on(read))
            return
        if target.may_be_recalled:
            return  # `_lose` ends it when the death is noticed.
        if not self._copy(read, len(read.pieces) // 2 if is_half else len(read.pieces)):
            self._break(read.connection)
        elif is_half:
            if read.fails:
                self._break(read.connection)
            else:
                self.agenda.after(read.seconds / 2, lambda: self._move_on(read))
        elif read.fails:
            self._break(read.connection)
        else:
            self.end(read, None)

    def _go_astray(self, read: FlyingRead) -> None:
        """One request of a READ is said to have failed, and the others go on."""
        read.is_stray = True
        connection = read.connection
        is_held_up = not connection.is_made or _hindrance(read.initiator, connection.target) is not None
        if not read.copied and not is_held_up and not connection.target.may_be_recalled:
            self._copy(read, len(read.pieces) // 2)
        names = read.initiator.agent_name, connection.target.agent_name
        read.stray_interval_seconds = self.rules.stray_seconds(*names) / (len(read.pieces) - read.copied)
        self._stray_on_later(read)

    def _stray_on_later(self, read: FlyingRead) -> None:
        if read.stray_interval_seconds == inf:
            return
        self.agenda.after(read.stray_interval_seconds, lambda: self._stray_on(read))

    def _stray_on(self, read: FlyingRead) -> None:
        """The next piece of a READ that erred early arrives."""
        if read.has_ended:
            return
        held_up_by = _hindrance(read.initiator, read.connection.target)
        if held_up_by is not None:
            held_up_by.waiting.append(lambda: self._stray_on(read))
        elif (
            read.connection.target.may_be_recalled
            or not self._copy(read, read.copied + 1)
            or read.copied == len(read.pieces)
        ):
            self._forget(read)
        else:
            self._stray_on_later(read)

    def let_strays_end(self, connection: _Connection) -> None:
        """The connection is removed: what is left of its READs that erred early is lost, if not at once."""
        names = connection.owner.agent_name, connection.target.agent_name
        if not self.rules.strays_outlive_removal(*names):
            self.agenda.after(STRAY_GRACE_SECONDS, lambda: self._end_strays(lambda read: read.connection is connection))

    def _end_strays(self, which: Callable[[FlyingRead], bool]) -> None:
        for read in [read for read in self._reads if read.is_stray and which(read)]:
            self._forget(read)

    def forget_connection(self, connection: _Connection) -> None:
        """Nobody can say any more when its READs are over."""
        for read in [each for each in self._reads if each.connection is connection]:
            if not (read.is_inline or read.is_stray):
                self._go_astray(read)
                read.initiator.see_end(read, NOT_FOUND)

    def _forget(self, read: FlyingRead) -> None:
        read.has_ended = True
        self._reads.pop(read, None)

    def _copy(self, read: FlyingRead, until: int) -> bool:
        """Copy pieces up to number `until`. False when the memory of one is gone."""
        target, named = read.connection.target, read.connection.named
        for to, source, length in itertools.islice(read.pieces, read.copied, until):
            if target.has_lost(source, length):
                return False
            ctypes.memmove(to, source if target is named else target.elsewhere(named, source, length), length)
            read.copied += 1
        if read.copied == len(read.pieces):
            self.note_copied(read)
            if read.lies:
                self._lie(read)
        return True

    def _lie(self, read: FlyingRead) -> None:
        """Another bit of another piece in each READ: which one follows from how many have lied."""
        self.lies += 1
        to, _, length = read.pieces[self.lies * 7 % len(read.pieces)]
        wrong = ctypes.c_uint8.from_address(to + self.lies * 5 % length)
        wrong.value ^= 1 << self.lies % 8

    def launch_inline(self, read: FlyingRead) -> None:
        self._reads[read] = None
        half, whole = len(read.pieces) // 2, len(read.pieces)
        self.agenda.after(read.seconds / 2, lambda: self._copy_inline(read, half))
        self.agenda.after(read.seconds, lambda: self._copy_inline(read, whole))

    def _copy_inline(self, read: FlyingRead, until: int) -> None:
        """A part of a READ that its initiator copies itself, within a call of NIXL."""
        if read.has_ended or read.is_stray:
            return
        if not read.connection.is_made:
            self.make_connection(read.connection)
        if read.initiator.may_be_recalled:
            self._forget(read)
        elif read.connection.target.may_be_recalled or not self._copy(read, until) or (read.fails and read.copied):
            self._break(read.connection)
            self._end_inline(read, DISCONNECTED)
        elif read.errs_early and 0 < read.copied < len(read.pieces):
            self._go_astray(read)
            read.initiator.see_end(read, BACKEND_ERROR)
        elif read.copied == len(read.pieces):
            self._end_inline(read, None)

    def _end_inline(self, read: FlyingRead, error: str | None) -> None:
        self._forget(read)
        read.initiator.see_end(read, error)

    def end(self, read: FlyingRead, error: str | None) -> None:
        if read.has_ended or read.is_inline or read.is_stray:
            return
        self._forget(read)
        read.initiator.see_end(read, error)

    def forget_reads_of(self, port: FakeNixlPort) -> None:
        """The process that wanted them is dead, and its memory with it."""
        for read in [read for read in self._reads if read.initiator is port]:
            self._forget(read)

    def _break(self, connection: _Connection) -> None:
        connection.is_broken = True
        connection.settled.set()
        for read in [read for read in self._reads if read.connection is connection]:
            self.end(read, DISCONNECTED)

    def announce_death(self, port: FakeNixlPort) -> None:
        self.agenda.after(DEATH_NOTICED_SECONDS, lambda: self._lose(port))

    def _lose(self, dead: FakeNixlPort) -> None:
        for port in self._ports.values():
            for connection in port.connections_to(dead):
                if connection.is_made or not port.is_paused:
                    self._break(connection)
        for read in [each for each in self._reads if each.connection.is_made and each.connection.target is dead]:
            self.end(read, DISCONNECTED)
        self._end_strays(lambda read: read.connection.target is dead)

    # --- notifications ------------------------------------------------------------------------------------------

    def send(self, sender: AgentName, receiver: FakeNixlPort, message: bytes) -> None:
        pair = (sender, receiver.agent_name)
        for delay_seconds in self.rules.notification_delays(*pair):
            at = max(trio.current_time() + delay_seconds, self._arrivals.get(pair, 0.0))
            self._arrivals[pair] = at
            self.agenda.at(at, lambda: receiver.take_in(sender, message))


class FakeNixlPort:
    """One agent; see the module's text. Made by `FakeNixlWorld.open`."""

    def __init__(
        self,
        world: FakeNixlWorld,
        agent_name: AgentName,
        ranges: Sequence[MemoryRange],
        now_ns: Callable[[], int],
        instance: int,
        *,
        reads_inline: bool,
        place: str | None,
    ) -> None:
        self._world = world
        self._agent_name = agent_name
        self._ranges = [(each.address, each.length_bytes, each.memory_kind) for each in ranges]
        self.place = place
        self._now_ns = now_ns
        self._metadata = msgspec.msgpack.encode(
            _Metadata(_METADATA_MARK, agent_name, instance, self._ranges, _METADATA_MARK)
        )
        self._reads_inline = reads_inline
        self._handles = itertools.count(1)
        self._agents: dict[AgentName, _Connection] = {}
        self._connections: list[_Connection] = []
        self._lists: dict[DescriptorListHandle, _PreparedList] = {}
        self._reads: dict[ReadHandle, FlyingRead] = {}
        self._errored: dict[ReadHandle, _Connection] = {}
        """READs that ended with an error and are not quiescent, until their connection is removed."""
        self._lost_memory: list[tuple[int, int]] = []
        self._on_event: Callable[[NixlEvent], None] | None = None
        self._events: deque[NixlEvent] = deque()
        self._arrived: deque[NotificationReceived] = deque()
        self._look_seconds = LOOK_IDLE_SECONDS
        self._is_looking = False
        self._busy_until = 0.0
        self._reads_over = trio.Event()
        self._is_closing = False
        self._is_closed = False
        self._abandoned: list[ReadHandle] = []
        self.counts_at_close: PortCounts | None = None
        """What its user had not given back when it closed the port."""
        self.is_paused = False
        self.is_dead = False
        self.waiting: list[Callable[[], None]] = []
        """What goes on when the process does."""

    # --- what only a simulation can do ------------------------------------------------------------------------------

    @property
    def may_be_recalled(self) -> bool:
        """Nobody can read from it any more."""
        return self.is_dead or self._is_closed

    def pause(self) -> None:
        """The process hangs: it sees nothing, sends nothing, and helps nobody to read from it."""
        self.is_paused = True

    def resume(self) -> None:
        if self.is_paused:
            self.is_paused = False
            waiting, self.waiting = self.waiting, []
            for go_on in waiting:
                go_on()
            self._look_later(0.0)
            self._world.agenda.after(0.0, self._announce)

    def kill(self) -> None:
        """The process is gone, with everything that it wanted."""
        self.is_dead = True
        self._world.forget_reads_of(self)
        self._world.announce_death(self)
        self._reads_over.set()
        # What waited for this process to wake up ends with the notice of its death.
        self.waiting.clear()

    def break_down(self, error: str) -> None:
        """What is behind the port fails."""
        self._close()
        self._is_closing = True
        self._events.append(PortBroken(error))
        self._world.agenda.after(0.0, self._announce)

    def lose_listener(self) -> None:
        """Nobody can connect any more who has not before."""
        self._events.append(ListenerLost("its port was closed, on purpose"))
        self._world.agenda.after(0.0, self._announce)

    def lose_memory(self, address: int, length_bytes: int) -> None:
        """Memory that stays registered cannot be read any more."""
        self._lost_memory.append((address, length_bytes))

    def has_lost(self, address: int, length_bytes: int) -> bool:
        return any(address < at + length and at < address + length_bytes for at, length in self._lost_memory)

    def connections_to(self, target: FakeNixlPort) -> list[_Connection]:
        return [each for each in self._connections if each.target is target]

    def forget_agent(self, name: AgentName) -> None:
        """Drop what was loaded of an agent. Its READs, but for those that a call of NIXL is making, go on unseen."""
        connection = self._agents.get(name)
        if connection is not None and not connection.is_forgotten:
            connection.is_forgotten = True
            connection.settled.set()
            self._world.forget_connection(connection)

    def agents_of(self, engine: str) -> list[AgentName]:
        """Agents that are loaded and whose process is one of this engine."""
        return [name for name in self._agents if engine_of(name) == engine]

    def agents_of_the_dead(self) -> list[AgentName]:
        """Agents that are loaded, and whose process is gone."""
        return [name for name, connection in self._agents.items() if connection.named.may_be_recalled]

    def elsewhere(self, named: FakeNixlPort, address: int, length_bytes: int) -> int:
        """Where this process has what is at an address of another one: other memory than what was there."""
        (there, _, _), (here, size, _) = named._ranges[0], self._ranges[0]
        return here + (address - there + size // 2) % (size - length_bytes + 1)

    # --- the port ---------------------------------------------------------------------------------------------------

    @property
    def agent_name(self) -> AgentName:
        return self._agent_name

    @property
    def agent_metadata(self) -> bytes:
        return self._metadata

    def set_event_callback(self, on_event: Callable[[NixlEvent], None]) -> None:
        self._on_event = on_event
        self._world.agenda.after(0.0, self._announce)

    def agent_named_in(self, metadata: bytes) -> AgentName | None:
        try:
            return msgspec.msgpack.decode(metadata, type=_Metadata).name
        except msgspec.DecodeError:
            return None

    async def add_remote_agent(self, metadata: bytes) -> AgentName:
        await self._turn()
        try:
            said = msgspec.msgpack.decode(metadata, type=_Metadata)
        except msgspec.DecodeError:
            raise NixlCallFailed("add_remote_agent", MISMATCH) from None
        target = self._world.instance(said.instance)
        if (said.magic, said.end) != (_METADATA_MARK, _METADATA_MARK) or target is None:
            raise NixlCallFailed("add_remote_agent", MISMATCH)
        if said.name == self._agent_name:
            raise NixlCallFailed("add_remote_agent", INVALID)
        known = self._agents.get(said.name)
        if known is not None and known.metadata != metadata:
            raise NixlCallFailed("add_remote_agent", NOT_ALLOWED)
        if known is None or known.is_forgotten:
            connection = _Connection(self, metadata, named=target, target=target, settled=trio.Event(), followers=[])
            self._agents[said.name] = connection
            self._connections.append(connection)
            self._world.begin_connection(connection)
        return said.name

    async def remove_remote_agent(self, name: AgentName) -> None:
        await self._turn()
        connection = self._agents.pop(name, None)
        if connection is not None:
            reads = sum(read.connection is connection for read in self._reads.values())
            if reads:
                self._world.note_misuse(f"{self._agent_name} removed {name} under {reads} READs")
            connection.is_removed = True
            connection.settled.set()
            of_agent = [each for each in self._connections if each.metadata == connection.metadata]
            self._errored = {handle: each for handle, each in self._errored.items() if each not in of_agent}
            for each in of_agent:  # those that were forgotten, too
                each.is_removed = True
                self._world.let_strays_end(each)
            self._drop_useless_connections()

    async def prepare_local(self, runs: Sequence[MemoryRun]) -> DescriptorListHandle:
        await self._turn()
        return self._prepare("prepare_local", None, self._ranges, runs)

    async def prepare_remote(self, agent: AgentName, runs: Sequence[MemoryRun]) -> DescriptorListHandle:
        await self._turn()
        connection = self._agents.get(agent)
        is_refused = self._world.rules.prepare_refused(self._agent_name, agent)
        if connection is None or connection.is_forgotten or is_refused:
            raise NixlCallFailed("prepare_remote", NOT_FOUND)
        ranges = msgspec.msgpack.decode(connection.metadata, type=_Metadata).ranges
        return self._prepare("prepare_remote", connection, ranges, runs)

    def _prepare(
        self,
        operation: str,
        connection: _Connection | None,
        ranges: Sequence[tuple[int, int, MemoryKind]],
        runs: Sequence[MemoryRun],
    ) -> DescriptorListHandle:
        if len({run.memory_kind for run in runs}) != 1 or not all(_is_within(run, ranges) for run in runs):
            raise NixlCallFailed(operation, NOT_FOUND)
        addresses = [run.address + run.stride_bytes * np.arange(run.count, dtype=np.int64) for run in runs]
        lengths = [np.full(run.count, run.length_bytes, np.int64) for run in runs]
        handle = next(self._handles)
        self._lists[handle] = _PreparedList(connection, np.concatenate(addresses), np.concatenate(lengths))
        return handle

    async def reach(self, agent: AgentName) -> None:
        await self._turn()
        connection = self._agents.get(agent)
        if connection is not None:
            await connection.settled.wait()
        self._refuse_if_closed()
        if connection is None or connection.is_removed or (connection.is_forgotten and not connection.is_reached):
            raise NixlCallFailed("reach", NOT_FOUND)
        if connection.is_broken and not connection.is_reached:
            raise NixlCallFailed("reach", DISCONNECTED, transport_lost=True)

    async def release_descriptor_list(self, handle: DescriptorListHandle) -> None:
        await self._turn()
        self._lists.pop(handle, None)

    def post_read(
        self,
        local: DescriptorListHandle,
        local_ids: DescriptorIds,
        remote: DescriptorListHandle,
        remote_ids: DescriptorIds,
    ) -> ReadHandle:
        self._refuse_if_closed()
        handle = next(self._handles)
        plan = partial(self._plan, handle, local, local_ids, remote, remote_ids)
        self._world.agenda.at(self._next_turn(), lambda: self._begin(handle, plan))
        return handle

    def _begin(self, handle: ReadHandle, plan: Callable[[], FlyingRead]) -> None:
        """The agent's thread has come to a READ."""
        if self.is_dead:
            return
        try:
            if self._is_closed:
                raise NixlCallFailed("post_read", "the port is closed")
            read = plan()
        except NixlCallFailed as failed:
            self._events.append(
                PortReadEnded(
                    handle=handle,
                    ended_ns=self._now_ns(),
                    error=failed.error,
                    transport_lost=failed.transport_lost,
                    was_posted=False,
                )
            )
            self._announce()
            return
        self._reads[handle] = read
        if read.connection.is_broken:
            read.has_ended = True
            self.see_end(read, DISCONNECTED)
        elif self._reads_inline:
            self._busy_until = max(self._busy_until, trio.current_time() + read.seconds)
            self._world.launch_inline(read)
        else:
            self._events.append(ReadPosted(handle))
            self._announce()
            self._world.launch(read)

    def _plan(
        self,
        handle: ReadHandle,
        local: DescriptorListHandle,
        local_ids: DescriptorIds,
        remote: DescriptorListHandle,
        remote_ids: DescriptorIds,
    ) -> FlyingRead:
        here, there = self._lists.get(local), self._lists.get(remote)
        if here is None or there is None or here.connection is not None or there.connection is None:
            raise NixlCallFailed("post_read", INVALID)
        if there.connection.is_removed or there.connection.is_forgotten:
            raise NixlCallFailed("post_read", NOT_FOUND, transport_lost=True)
        if local_ids.shape != remote_ids.shape or not (_fits(local_ids, here) and _fits(remote_ids, there)):
            raise NixlCallFailed("post_read", INVALID)
        connection = there.connection
        lengths = here.lengths[local_ids]
        if (lengths != there.lengths[remote_ids]).any():
            raise NixlCallFailed("post_read", INVALID)
        pieces = list(
            zip(here.addresses[local_ids].tolist(), there.addresses[remote_ids].tolist(), lengths.tolist(), strict=True)
        )
        rules, target = self._world.rules, connection.target.agent_name
        return FlyingRead(
            handle=handle,
            initiator=self,
            connection=connection,
            pieces=pieces,
            posted_seconds=trio.current_time(),
            seconds=rules.read_seconds(self._agent_name, target, int(lengths.sum())),
            fails=rules.read_error(self._agent_name, target),
            errs_early=rules.read_errs_early(self._agent_name, target),
            lies=rules.read_lies(self._agent_name, target),
            is_inline=self._reads_inline,
        )

    async def send_notification(self, agent: AgentName, message: bytes) -> None:
        await self._turn()
        connection = self._agents.get(agent)
        if connection is None or connection.is_forgotten:
            raise NixlCallFailed("send_notification", NOT_FOUND, transport_lost=True)
        if connection.is_broken:
            raise NixlCallFailed("send_notification", DISCONNECTED, transport_lost=True)
        self._world.send(self._agent_name, connection.target, message)

    def expect_notifications(self, expected: bool) -> None:
        self._look_seconds = LOOK_EXPECTING_SECONDS if expected else LOOK_IDLE_SECONDS

    def counts(self) -> PortCounts:
        return PortCounts(
            remote_agents=len(self._agents),
            descriptor_lists=len(self._lists),
            reads=len(self._reads) + len(self._errored),
            registered_ranges=len(self._ranges),
            errored_reads=len(self._errored),
        )

    async def aclose(self, grace_seconds: float) -> list[ReadHandle]:
        self._is_closing = True
        if self.counts_at_close is None:
            self.counts_at_close = self.counts()
        try:
            with trio.move_on_after(grace_seconds):
                while self._reads and not self._is_closed and not self.is_dead:
                    self._reads_over = trio.Event()
                    await self._reads_over.wait()
            await trio.lowlevel.checkpoint()
        finally:
            self._close()
        return list(self._abandoned)

    # --- inside -----------------------------------------------------------------------------------------------------

    async def _turn(self) -> None:
        """Wait until the agent's thread has come to this call and done it."""
        await trio.lowlevel.checkpoint_if_cancelled()
        self._refuse_if_closed()
        is_begun = self._busy_until <= trio.current_time()
        with trio.CancelScope(shield=is_begun):
            await trio.sleep_until(self._next_turn())
        if self.is_dead or self._is_closed:
            raise PortClosed(self._agent_name)

    def _next_turn(self) -> float:
        """When the agent's thread will have done what is asked of it now."""
        self._busy_until = max(self._busy_until, trio.current_time()) + CALL_SECONDS
        return self._busy_until

    def _refuse_if_closed(self) -> None:
        if self._is_closing or self.is_dead:
            raise PortClosed(self._agent_name)

    def _close(self) -> None:
        """READs in flight go on without anybody."""
        if self._is_closed:
            return
        self._is_closed = True
        self._abandoned = [*self._reads, *self._errored]
        for connection in self._agents.values():
            connection.settled.set()
        self._agents.clear()
        self._lists.clear()
        self._reads_over.set()
        if not self.is_dead:
            self._world.announce_death(self)

    def _drop_useless_connections(self) -> None:
        """Those that neither an agent nor a READ stands on, so that churn does not pile up."""
        busy = {id(read.connection) for read in self._reads.values()}
        self._connections = [each for each in self._connections if not each.is_removed or id(each) in busy]

    def see_end(self, read: FlyingRead, error: str | None) -> None:
        """The agent's thread finds that a READ has ended."""
        if self.is_dead or self._is_closed:
            return
        del self._reads[read.handle]
        quiescent = error is None or (len(read.pieces) == 1 and error != NOT_FOUND)
        if not quiescent and not read.connection.is_removed:
            self._errored[read.handle] = read.connection
        self._events.append(
            PortReadEnded(
                handle=read.handle,
                ended_ns=self._now_ns(),
                error=error,
                transport_lost=error in (DISCONNECTED, NOT_FOUND),
                quiescent=quiescent,
                bytes=read.length_bytes,
                descriptors=len(read.pieces),
            )
        )
        if error is None:
            seconds = trio.current_time() - read.posted_seconds
            self._events.append(
                ReadMeasured(
                    handle=read.handle,
                    bytes=read.length_bytes,
                    descriptors=len(read.pieces),
                    seconds_in_transport=seconds,
                    seconds_to_post=seconds if self._reads_inline else 0.0,
                )
            )
        self._announce()
        if not self._reads:
            self._reads_over.set()

    def take_in(self, sender: AgentName, message: bytes) -> None:
        """A notification has arrived; it is seen when somebody looks."""
        if not self.may_be_recalled:
            self._arrived.append(NotificationReceived(sender, message))
            self._look_later(self._look_seconds)

    def _look_later(self, seconds: float) -> None:
        if not self._is_looking and self._arrived:
            self._is_looking = True
            self._world.agenda.after(seconds, self._look)

    def _look(self) -> None:
        self._is_looking = False
        if not self.is_paused and not self.may_be_recalled:
            self._events.extend(self._arrived)
            self._arrived.clear()
            self._announce()

    def _announce(self) -> None:
        while self._events and self._on_event is not None and not self.is_paused and not self.is_dead:
            self._on_event(self._events.popleft())


def _hindrance(*ports: FakeNixlPort) -> FakeNixlPort | None:
    """Whose process hangs, of those that a READ needs."""
    return next((port for port in ports if port.is_paused and not port.may_be_recalled), None)


def _is_within(run: MemoryRun, ranges: Sequence[tuple[int, int, MemoryKind]]) -> bool:
    """Whether all blocks of a run lie in one registered range."""
    if run.count < 1 or run.length_bytes < 1 or run.stride_bytes < run.length_bytes:
        return False
    end = run.address + (run.count - 1) * run.stride_bytes + run.length_bytes
    return any(
        address <= run.address and end <= address + length and run.memory_kind == kind
        for address, length, kind in ranges
    )


def _fits(ids: DescriptorIds, prepared: _PreparedList) -> bool:
    if ids.ndim != 1 or ids.size == 0 or ids.dtype.kind != "i":
        return False
    return bool(ids.min() >= 0) and bool(ids.max() < len(prepared.addresses))
