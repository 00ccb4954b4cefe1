"""Admission: who may stay connected to a listener, and whose messages are looked at.

Sans I/O, as the other cores are, and for a listener of any kind: connections are numbers, senders are addresses. The
executor (`connector/ports/doorman.py`) tells of connections that open and close and of what they have received,
asks before it hands out a message, and ends the connections that it is told to end.

A listener takes messages of all connections in turn, so one that sends much delays the others by one message each
time. What is left to decide is how much work anybody can cause, and how much memory anybody can take:

* Work is counted in units; whoever serves a message says what it cost. Everybody draws on a common allowance first.
  When that is used up, each connection has one of its own, which others cannot use up. A connection that has neither is
  not heard: its messages are dropped, unread, which costs little. One that goes on all the same is cut off. What was
  dropped long ago is forgiven: an engine's connection may last for months, and through many a flood. What is left of a
  connection that has ended draws on the common allowance alone: who comes and goes has no other. If messages that are
  left have more frames than any engine sends, their address pays for these: it is shut out when it cannot any more.
* Nobody owes more than an allowance holds when it is full: for what a flood has cost engines do not suffer for minutes.
* A newcomer's own allowance is enough for a handshake. It grows while the connection lasts, so a peer that has been
  there for a while is heard in a flood, however many newcomers there are.
* There is a limit to the connections. For one too many, another is cut off: the oldest that has never said anything
  that was understood; or else, of the address that has most connections, the one that said nothing for longest.
* Somebody may wait while no descriptor is left. Then the oldest that has never said anything that was understood makes
  room, and no other: who is heard has a quarter of the descriptors at most, so it is somebody else who uses them up.
* A message has to come to its end. What a connection has received beyond its whole messages is of one that has not. If
  that is more than a message may have, the connection is cut off. What the transport has not read yet does not count:
  it may be whole messages. Behind a message that was taken just before, others may wait that are whole. So such a
  connection may have received more, and does not count when the unfinished messages of all connections together are too
  large, and the largest goes.
* A message that has far more frames than any engine sends keeps the listener from hearing anybody else until it is
  over (docs/architecture.md, "Strangers"). Its sender is cut off, or has gone by then. Its address is shut out for as
  long as there is, and so are its connections that have never said anything that was understood; for another one soon
  afterwards, all that it has. If what comes meanwhile is too large, all go of whom more than a few words wait: to end
  only the largest would leave what it has sent, and room for the next.
* An address one of whose connections was cut off for what it sent is shut out for a while, longer each time; what
  connections it has besides stay. Of one that connects more often than any engine each connection is ended that comes
  too soon, and nothing is held against it: a thousand engines behind one address come back at once.

All of this costs the same however many connections there are, but for the choice of whom to cut off; and `measured`, as
much as it is told.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterable

import msgspec

from statemachine.deadlines import NS_PER_SECOND
from statemachine.pauses import doubled_ns

TOO_MANY = "too many connections"
NO_DESCRIPTORS = "no file descriptor was left for another connection"
ENDLESS = "a message without end"
FLOOD = "more messages than any engine sends"
MANY_FRAMES = "a message of more frames than any engine sends"
TOO_OFTEN = "its address connects more often than engines do"
SHUT_OUT = "its address is shut out"
UNHEARD = "too much has come while nobody could be heard"

SHUT_OUT_DOUBLINGS_MAX = 10
UNHEARD_BYTES_IN_A_FLOOD = 16 << 10
"""While messages are dropped of which nobody knows whose they are, for `AdmissionLimits.unfinished_bytes_max` of a
connection over which no message has come yet: some protocols do not show whose a message is."""
FEW_BYTES = 4 << 10
"""Bytes that may wait of a connection without its being ended while nobody is heard. 4,096 such connections have twice
as much as may be unfinished."""
HANDSHAKE_BYTES_MAX = 1 << 10
"""What a connection receives beside messages: greetings, and keys if there are any."""
FORGOTTEN_AT_A_TIME = 2
"""Addresses that are looked at for each new one."""


class AdmissionRates(msgspec.Struct, frozen=True, kw_only=True):
    """The limits that are alike for every listener.

    Attributes:
        unfinished_bytes_total_max: that all connections together may have received beyond their whole messages. In
            memory, ZMQ keeps up to 32 times as much: 256 MiB.
        common_units: the common allowance when it is full; `common_units_per_second` is what comes back.
        newcomer_units: a connection's own allowance at first; it grows by `own_units_per_second` up to `own_units`.
        dropped_max, dropped_per_second: messages that are dropped before their connection is cut off, as an allowance.
        connects, connects_per_second: connections of one address, as an allowance.
        left_frames, left_frames_per_second: frames of messages that have too many, and that were dropped after the
            connections of an address had ended, as an allowance.
        shut_out_ns: how long an address is shut out the first time; twice as long each time, up to `shut_out_ns_max`,
            until nothing was held against it for that long.
        addresses_max: addresses that are remembered.
    """

    unfinished_bytes_total_max: int = 8 << 20
    common_units: int = 20_000
    common_units_per_second: int = 20_000
    newcomer_units: int = 256
    own_units: int = 4_000
    own_units_per_second: int = 200
    dropped_max: int = 256
    dropped_per_second: int = 1
    connects: int = 4_096
    connects_per_second: int = 256
    left_frames: int = 65_536
    left_frames_per_second: int = 4_096
    shut_out_ns: int = NS_PER_SECOND // 2
    shut_out_ns_max: int = 30 * NS_PER_SECOND
    addresses_max: int = 4_096


class AdmissionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of one listener.

    Attributes:
        connections_max: open at a time.
        unfinished_bytes_max: bytes on the wire that a connection may have sent beyond its whole messages, and that the
            transport has read. An empty frame has two bytes there, for which ZMQ keeps 32 times as much.
        waiting_bytes_max: so much more, if a message of the connection was taken since it was measured.
    """

    connections_max: int
    unfinished_bytes_max: int
    waiting_bytes_max: int
    rates: AdmissionRates = AdmissionRates()


class Verdict(enum.Enum):
    """On a message that has arrived."""

    SERVE = enum.auto()
    DROP = enum.auto()
    CUT_OFF = enum.auto()
    """Drop it, and end its connection."""


class Untaken(enum.Enum):
    """Which of the messages that have come were not taken yet when connections are measured."""

    NONE = enum.auto()
    SOME = enum.auto()
    """Some were not; each connection that had any has had at least one taken."""
    ALL = enum.auto()
    """Nobody is heard before the last frame of a message has been taken."""


class CutOff(msgspec.Struct, frozen=True):
    """End this connection. Said once for each."""

    connection: int
    address: str
    why: str


class Allowance:
    """So many units at most, of which some come back each second. What is spent last may be more than is left; as many
    are owed at most."""

    __slots__ = ("_at_ns", "_per_second", "_units", "_units_max")

    def __init__(self, units: float, units_max: float, per_second: float, now_ns: int) -> None:
        self._units = units
        self._units_max = units_max
        self._per_second = per_second
        self._at_ns = now_ns

    def is_left(self, now_ns: int) -> bool:
        passed_ns = now_ns - self._at_ns
        if passed_ns > 0:
            self._at_ns = now_ns
            self._units = min(self._units_max, self._units + passed_ns * self._per_second / NS_PER_SECOND)
        return self._units > 0

    def spend(self, units: float) -> None:
        self._units = max(-self._units_max, self._units - units)


class _Connection:
    __slots__ = (
        "address",
        "drops",
        "finished_bytes",
        "is_heard",
        "measured_bytes",
        "own",
        "unfinished_bytes",
        "was_heard",
    )

    def __init__(self, address: str, own: Allowance, drops: Allowance) -> None:
        self.address = address
        self.own = own
        # How often it may go on although it is not heard.
        self.drops = drops
        # A whole message has come over it since it was measured last; ever.
        self.is_heard = False
        self.was_heard = False
        # Of the bytes that it has received: those of whole messages, and what it was in the middle of when measured.
        self.finished_bytes = 0
        self.unfinished_bytes = 0
        # All that it had received when it was measured last while no message waited.
        self.measured_bytes = 0


class _Address:
    __slots__ = ("connects", "has_swamped", "left_frames", "open", "shut_out_until_ns", "strikes")

    def __init__(self, connects: Allowance, left_frames: Allowance) -> None:
        self.connects = connects
        self.left_frames = left_frames
        self.strikes = 0
        # It has sent a message of far too many frames. Forgotten with the strikes.
        self.has_swamped = False
        self.shut_out_until_ns = 0
        # Its connections, the one that said nothing for longest first.
        self.open: OrderedDict[int, None] = OrderedDict()


class Admission:
    """See the module's docstring. `now_ns` never goes back."""

    def __init__(self, limits: AdmissionLimits, now_ns: int = 0) -> None:
        self._limits = limits
        self._rates = rates = limits.rates
        self._common = Allowance(rates.common_units, rates.common_units, rates.common_units_per_second, now_ns)
        # Messages since connections were measured last, of none that is known.
        self._dropped_of_nobody = 0
        # Those that are open and were not cut off.
        self._connections: dict[int, _Connection] = {}
        # What they have received since their last whole messages, as far as it was measured: the sum over them.
        self._unfinished_bytes = 0
        # The same of those that have ended: their whole messages stay until they are taken.
        self._left_bytes = 0
        # Those of them that have never said anything that was understood, the oldest first.
        self._strange: OrderedDict[int, None] = OrderedDict()
        # Those that were met last come last. One with open connections is never forgotten.
        self._addresses: OrderedDict[str, _Address] = OrderedDict()

    def __len__(self) -> int:
        """Connections that are open and were not cut off."""
        return len(self._connections)

    # --- connections ------------------------------------------------------------------------------------------------

    def opened(self, connection: int, address: str, now_ns: int) -> list[CutOff]:
        """A connection was accepted; its number was never used before."""
        limits, rates = self._limits, self._rates
        known = self._meet(address, now_ns)
        if self.is_shut_out(address, now_ns):
            return [CutOff(connection, address, SHUT_OUT)]
        if not known.connects.is_left(now_ns):
            return [CutOff(connection, address, TOO_OFTEN)]
        known.connects.spend(1)
        cut_off = [self._cut_off_one(TOO_MANY)] if len(self._connections) >= limits.connections_max else []
        own = Allowance(rates.newcomer_units, rates.own_units, rates.own_units_per_second, now_ns)
        drops = Allowance(rates.dropped_max, rates.dropped_max, rates.dropped_per_second, now_ns)
        self._connections[connection] = _Connection(address, own, drops)
        self._strange[connection] = None
        known.open[connection] = None
        return cut_off

    def closed(self, connection: int) -> None:
        """It has ended, whoever ended it."""
        known = self._connections.pop(connection, None)
        if known is not None:
            self._unfinished_bytes -= known.unfinished_bytes
            self._left_bytes += known.unfinished_bytes
            self._strange.pop(connection, None)
            del self._addresses[known.address].open[connection]

    def is_shut_out(self, address: str, now_ns: int) -> bool:
        known = self._addresses.get(address)
        return known is not None and now_ns < known.shut_out_until_ns

    def no_descriptor_left(self) -> list[CutOff]:
        """There is none for a connection that waits to be accepted."""
        return [self._cut_off_one(NO_DESCRIPTORS)] if self._strange else []

    def measured(self, received: Iterable[tuple[int, int, int]], now_ns: int, untaken: Untaken) -> list[CutOff]:
        """So many bytes each of these connections has received since it was opened, and so many of them the transport
        has not read yet. Over the others nothing has come since they were measured."""
        limits, rates = self._limits, self._rates
        is_flooded = self._dropped_of_nobody > rates.dropped_max
        unheard_bytes_max = UNHEARD_BYTES_IN_A_FLOOD if is_flooded else limits.unfinished_bytes_max
        self._dropped_of_nobody = 0
        cut_off = []
        for connection, received_bytes, unread_bytes in received:
            known = self._connections.get(connection)
            if known is None:
                continue
            if known.is_heard:
                # A message that had not come then has come to its end since, and all before it. What comes beside
                # messages (a transport's own questions, now and then) would add up in months.
                known.finished_bytes = max(known.finished_bytes, known.measured_bytes)
            if untaken is Untaken.NONE:
                known.measured_bytes = max(0, received_bytes - unread_bytes)
            # No credit: a message of another connection may have been taken for one of this.
            known.finished_bytes = min(known.finished_bytes, received_bytes)
            unfinished_bytes = max(0, received_bytes - known.finished_bytes - HANDSHAKE_BYTES_MAX)
            bytes_max = limits.unfinished_bytes_max if known.was_heard else unheard_bytes_max
            if known.is_heard:
                bytes_max += limits.waiting_bytes_max
            # What was not read may be whole messages, and the transport keeps none of it. It reads it in a moment, but
            # for one that is full: then nobody is taken from.
            kept_bytes = max(0, unfinished_bytes - unread_bytes)
            counts_bytes = unfinished_bytes if untaken is Untaken.ALL else kept_bytes
            self._set_unfinished(known, 0 if known.is_heard else counts_bytes)
            known.is_heard = False
            if kept_bytes > bytes_max:
                cut_off.append(self._cut_off_for_cause(connection, ENDLESS, now_ns))
        if untaken is not Untaken.ALL:
            self._left_bytes = 0
        if self._unfinished_bytes + self._left_bytes > rates.unfinished_bytes_total_max:
            cut_off += self._end_most() if untaken is Untaken.ALL else self._end_largest(now_ns)
        return cut_off

    # --- messages ---------------------------------------------------------------------------------------------------

    def arrived(self, connection: int, now_ns: int) -> Verdict:
        """A whole message has come over this connection, which may have ended since."""
        known = self._connections.get(connection)
        if known is None:
            if self._common.is_left(now_ns):
                return Verdict.SERVE
            self._dropped_of_nobody += 1
            return Verdict.DROP
        known.is_heard = known.was_heard = True
        if self._common.is_left(now_ns) or known.own.is_left(now_ns):
            return Verdict.SERVE
        if not known.drops.is_left(now_ns):
            return Verdict.CUT_OFF
        known.drops.spend(1)
        return Verdict.DROP

    def taken(self, connection: int, wire_bytes: int) -> None:
        """A whole message of so many bytes, served or dropped. Its connection may have ended since."""
        known = self._connections.get(connection)
        if known is not None:
            known.finished_bytes += wire_bytes
            self._set_unfinished(known, max(0, known.unfinished_bytes - wire_bytes))

    def flooded(self, connection: int, now_ns: int) -> list[CutOff]:
        """After `Verdict.CUT_OFF`."""
        known = self._connections.get(connection)
        return [] if known is None else [self._cut_off_for_cause(connection, FLOOD, now_ns)]

    def swamped(self, connection: int, address: str, now_ns: int) -> list[CutOff]:
        """A message with far too many frames has come from this address. Its connection may have ended since, or be
        taken for one of another address, which stays."""
        known = self._meet(address, now_ns)
        self._forgive(known, now_ns)
        others = [each for each in known.open if known.has_swamped or each in self._strange]
        known.has_swamped = True
        known.strikes = SHUT_OUT_DOUBLINGS_MAX
        known.shut_out_until_ns = now_ns + self._rates.shut_out_ns_max
        ended = [each for each in dict.fromkeys([connection, *others]) if each in known.open]
        return [self._cut_off(each, MANY_FRAMES) for each in ended]

    def left(self, address: str, frames: int, now_ns: int) -> None:
        """A message with too many frames, so many, was dropped. Its connection, which was of this address, has ended,
        and pays for nothing."""
        known = self._meet(address, now_ns)
        if known.left_frames.is_left(now_ns):
            known.left_frames.spend(frames)
        else:
            self._shut_out(known, now_ns)

    def served(self, connection: int, units: int, *, understood: bool, now_ns: int) -> None:
        """A message of this connection has cost so much work. It may have ended meanwhile."""
        known = self._connections.get(connection)
        if self._common.is_left(now_ns) or known is None:
            self._common.spend(units)
        else:
            known.own.spend(units)
        if known is not None and understood:
            self._strange.pop(connection, None)
            self._addresses[known.address].open.move_to_end(connection)

    # --- cutting off ------------------------------------------------------------------------------------------------

    def _cut_off_one(self, why: str) -> CutOff:
        """Cut off one of the open connections, of which there is one at least."""
        if self._strange:
            connection = next(iter(self._strange))
        else:
            crowd = max(self._addresses.values(), key=lambda address: len(address.open))
            connection = next(iter(crowd.open))
        return self._cut_off(connection, why)

    def _end_largest(self, now_ns: int) -> list[CutOff]:
        """Until what is unfinished is not too much."""
        cut_off = []
        smallest_first = sorted(self._connections, key=lambda each: self._connections[each].unfinished_bytes)
        while self._unfinished_bytes > self._rates.unfinished_bytes_total_max:
            cut_off.append(self._cut_off_for_cause(smallest_first.pop(), ENDLESS, now_ns))
        return cut_off

    def _end_most(self) -> list[CutOff]:
        """They may be engines that had to wait, and may connect again."""
        most = [each for each, known in self._connections.items() if known.unfinished_bytes > FEW_BYTES]
        return [self._cut_off(each, UNHEARD) for each in most]

    def _cut_off_for_cause(self, connection: int, why: str, now_ns: int) -> CutOff:
        cut_off = self._cut_off(connection, why)
        self._shut_out(self._addresses[cut_off.address], now_ns)
        return cut_off

    def _cut_off(self, connection: int, why: str) -> CutOff:
        address = self._connections[connection].address
        self.closed(connection)
        return CutOff(connection, address, why)

    def _set_unfinished(self, known: _Connection, unfinished_bytes: int) -> None:
        self._unfinished_bytes += unfinished_bytes - known.unfinished_bytes
        known.unfinished_bytes = unfinished_bytes

    def _forgive(self, address: _Address, now_ns: int) -> None:
        """What was long ago."""
        if now_ns - address.shut_out_until_ns > self._rates.shut_out_ns_max:
            address.strikes = 0
            address.has_swamped = False

    def _shut_out(self, address: _Address, now_ns: int) -> None:
        rates = self._rates
        self._forgive(address, now_ns)
        pause_ns = doubled_ns(rates.shut_out_ns, rates.shut_out_ns_max, address.strikes)
        address.shut_out_until_ns = max(address.shut_out_until_ns, now_ns + pause_ns)
        address.strikes = min(address.strikes + 1, SHUT_OUT_DOUBLINGS_MAX)

    def _meet(self, address: str, now_ns: int) -> _Address:
        known = self._addresses.get(address)
        if known is None:
            rates = self._rates
            known = _Address(
                Allowance(rates.connects, rates.connects, rates.connects_per_second, now_ns),
                Allowance(rates.left_frames, rates.left_frames, rates.left_frames_per_second, now_ns),
            )
            self._addresses[address] = known
            self._forget_addresses()
        else:
            self._addresses.move_to_end(address)
        return known

    def _forget_addresses(self) -> None:
        """Those that were met longest ago, unless a connection of theirs is open; of these there is a limit, too."""
        for _ in range(FORGOTTEN_AT_A_TIME):
            if len(self._addresses) <= self._rates.addresses_max:
                return
            oldest, known = next(iter(self._addresses.items()))
            if known.open:
                self._addresses.move_to_end(oldest)
            else:
                del self._addresses[oldest]
