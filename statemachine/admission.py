"""Admission: who may stay connected to a listener, and whose messages are looked at.

Sans I/O, as the other cores are, and for a listener of any kind: connections are numbers, senders are addresses. The
executor (`connector/ports/zmq_bridge.py`) tells of connections that open and close and of what they have received,
asks before it hands out a message, and ends the connections that it is told to end.

A listener takes messages of all connections in turn, so one that sends much delays the others by one message each
time. What is left to decide is how much work anybody can cause, and how much memory anybody can take:

* Work is counted in units; whoever serves a message says what it cost. Everybody draws on a common allowance first.
  When that is used up, each connection has one of its own, which others cannot use up. A connection that has neither is
  not heard: its messages are dropped, unread, which costs little. One that goes on all the same is cut off. What was
  dropped long ago is forgiven: an engine's connection may last for months, and through many a flood. What is left of a
  connection that has ended draws on the common allowance alone: who comes and goes has no other.
* A newcomer's own allowance is enough for a handshake. It grows while the connection lasts, so a peer that has been
  there for a while is heard in a flood, however many newcomers there are.
* There is a limit to the connections. For one too many, another is cut off: the oldest that has never said anything
  that was understood; or else, of the address that has most connections, the one that said nothing for longest.
* Somebody may wait while no descriptor is left. Then the oldest that has never said anything that was understood makes
  room, and no other: who is heard has a quarter of the descriptors at most, so it is somebody else who uses them up.
* A message has to come to its end. A connection that has received more bytes since its last whole message than all
  messages that may wait is in the middle of one that is too large, and is cut off; the transport would keep all of it.
  One over which no message has come at all is allowed less: some old protocols do not show whose a message is.
  When the unfinished messages of all connections together are too large, the largest goes.
* An address one of whose connections was cut off for what it sent is shut out for a while, longer each time; what
  connections it has besides stay. So is one that connects more often than any engine.

All of this costs the same however many connections there are, but for the choice of whom to cut off and `measured`.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterable

import msgspec

NS_PER_SECOND = 1_000_000_000

TOO_MANY = "too many connections"
NO_DESCRIPTORS = "no file descriptor was left for another connection"
ENDLESS = "a message without end"
FLOOD = "more messages than any engine sends"
SHUT_OUT = "its address is shut out"

SHUT_OUT_DOUBLINGS_MAX = 10
UNHEARD_BYTES_IN_A_FLOOD = 16 << 10
"""While messages are dropped of which nobody knows whose they are, for `AdmissionLimits.unheard_bytes_max`."""
FORGOTTEN_AT_A_TIME = 2
"""Addresses that are looked at for each new one."""


class AdmissionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes:
    connections_max: open at a time.
    unfinished_bytes_max: that a connection may have received since its last whole message.
    unfinished_bytes_total_max: the same of all together.
    unheard_bytes_max: the same of a connection over which no message has come yet.
    common_units: the common allowance when it is full; `common_units_per_second` is what comes back.
    newcomer_units: a connection's own allowance at first; it grows by `own_units_per_second` up to `own_units`.
    dropped_max, dropped_per_second: messages that are dropped before their connection is cut off, as an allowance.
    connects, connects_per_second: connections of one address, as an allowance.
    shut_out_ns: how long an address is shut out the first time; twice as long each time, up to `shut_out_ns_max`, until
        nothing was held against it for that long.
    addresses_max: addresses that are remembered.
    """

    connections_max: int
    unfinished_bytes_max: int
    unheard_bytes_max: int
    unfinished_bytes_total_max: int = 256 << 20
    common_units: int = 20_000
    common_units_per_second: int = 20_000
    newcomer_units: int = 256
    own_units: int = 4_000
    own_units_per_second: int = 200
    dropped_max: int = 256
    dropped_per_second: int = 1
    connects: int = 4_096
    connects_per_second: int = 256
    shut_out_ns: int = NS_PER_SECOND // 2
    shut_out_ns_max: int = 30 * NS_PER_SECOND
    addresses_max: int = 4_096


class Verdict(enum.Enum):
    """On a message that has arrived."""

    SERVE = enum.auto()
    DROP = enum.auto()
    CUT_OFF = enum.auto()
    """Drop it, and end its connection."""


class CutOff(msgspec.Struct, frozen=True):
    """End this connection. Said once for each."""

    connection: int
    address: str
    why: str


class Allowance:
    """So many units at most, of which some come back each second. What is spent last may be more than is left."""

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
        self._units -= units


class _Connection:
    __slots__ = ("address", "drops", "is_heard", "own", "received_bytes", "unfinished_bytes", "was_heard")

    def __init__(self, address: str, own: Allowance, drops: Allowance) -> None:
        self.address = address
        self.own = own
        # How often it may go on although it is not heard.
        self.drops = drops
        # Since it was measured last, a whole message has come.
        self.is_heard = False
        # Ever.
        self.was_heard = False
        self.received_bytes = 0
        self.unfinished_bytes = 0


class _Address:
    __slots__ = ("connects", "open", "shut_out_until_ns", "strikes")

    def __init__(self, connects: Allowance) -> None:
        self.connects = connects
        self.strikes = 0
        self.shut_out_until_ns = 0
        # Its connections, the one that said nothing for longest first.
        self.open: OrderedDict[int, None] = OrderedDict()


class Admission:
    """See the module's docstring. `now_ns` never goes back."""

    def __init__(self, limits: AdmissionLimits, now_ns: int = 0) -> None:
        self._limits = limits
        self._common = Allowance(limits.common_units, limits.common_units, limits.common_units_per_second, now_ns)
        # Messages since connections were measured last, of none that is known.
        self._dropped_of_nobody = 0
        # Those that are open and were not cut off.
        self._connections: dict[int, _Connection] = {}
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
        limits = self._limits
        known = self._meet(address, now_ns)
        if self.is_shut_out(address, now_ns):
            return [CutOff(connection, address, SHUT_OUT)]
        if not known.connects.is_left(now_ns):
            self._shut_out(known, now_ns)
            return [CutOff(connection, address, SHUT_OUT)]
        known.connects.spend(1)
        cut_off = [self._cut_off_one(TOO_MANY)] if len(self._connections) >= limits.connections_max else []
        own = Allowance(limits.newcomer_units, limits.own_units, limits.own_units_per_second, now_ns)
        drops = Allowance(limits.dropped_max, limits.dropped_max, limits.dropped_per_second, now_ns)
        self._connections[connection] = _Connection(address, own, drops)
        self._strange[connection] = None
        known.open[connection] = None
        return cut_off

    def closed(self, connection: int) -> None:
        """It has ended, whoever ended it."""
        known = self._connections.pop(connection, None)
        if known is not None:
            self._strange.pop(connection, None)
            del self._addresses[known.address].open[connection]

    def is_shut_out(self, address: str, now_ns: int) -> bool:
        known = self._addresses.get(address)
        return known is not None and now_ns < known.shut_out_until_ns

    def no_descriptor_left(self) -> list[CutOff]:
        """There is none for a connection that waits to be accepted."""
        return [self._cut_off_one(NO_DESCRIPTORS)] if self._strange else []

    def measured(self, received: Iterable[tuple[int, int]], now_ns: int) -> list[CutOff]:
        """So many bytes each of these connections has received since it was opened."""
        limits = self._limits
        is_flooded = self._dropped_of_nobody > limits.dropped_max
        unheard_bytes_max = UNHEARD_BYTES_IN_A_FLOOD if is_flooded else limits.unheard_bytes_max
        self._dropped_of_nobody = 0
        cut_off = []
        largest, total_bytes = [], 0
        for connection, received_bytes in received:
            known = self._connections.get(connection)
            if known is None:
                continue
            if known.is_heard:
                known.is_heard = False
                known.received_bytes = received_bytes
            known.unfinished_bytes = received_bytes - known.received_bytes
            bytes_max = limits.unfinished_bytes_max if known.was_heard else unheard_bytes_max
            if known.unfinished_bytes > bytes_max:
                cut_off.append(self._cut_off_for_cause(connection, ENDLESS, now_ns))
            else:
                total_bytes += known.unfinished_bytes
                largest.append((known.unfinished_bytes, connection))
        if total_bytes > self._limits.unfinished_bytes_total_max:
            largest.sort()
            while total_bytes > self._limits.unfinished_bytes_total_max:
                unfinished_bytes, connection = largest.pop()
                total_bytes -= unfinished_bytes
                cut_off.append(self._cut_off_for_cause(connection, ENDLESS, now_ns))
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

    def flooded(self, connection: int, now_ns: int) -> list[CutOff]:
        """After `Verdict.CUT_OFF`."""
        known = self._connections.get(connection)
        return [] if known is None else [self._cut_off_for_cause(connection, FLOOD, now_ns)]

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
        """Of those that are open, of which there is one at least."""
        if self._strange:
            connection = next(iter(self._strange))
        else:
            crowd = max(self._addresses.values(), key=lambda address: len(address.open))
            connection = next(iter(crowd.open))
        address = self._connections[connection].address
        self.closed(connection)
        return CutOff(connection, address, why)

    def _cut_off_for_cause(self, connection: int, why: str, now_ns: int) -> CutOff:
        address = self._connections[connection].address
        self.closed(connection)
        self._shut_out(self._addresses[address], now_ns)
        return CutOff(connection, address, why)

    def _shut_out(self, address: _Address, now_ns: int) -> None:
        limits = self._limits
        if now_ns - address.shut_out_until_ns > limits.shut_out_ns_max:
            address.strikes = 0
        seconds_ns = min(limits.shut_out_ns_max, limits.shut_out_ns << address.strikes)
        address.shut_out_until_ns = max(address.shut_out_until_ns, now_ns + seconds_ns)
        address.strikes = min(address.strikes + 1, SHUT_OUT_DOUBLINGS_MAX)

    def _meet(self, address: str, now_ns: int) -> _Address:
        known = self._addresses.get(address)
        if known is None:
            limits = self._limits
            known = _Address(Allowance(limits.connects, limits.connects, limits.connects_per_second, now_ns))
            self._addresses[address] = known
            self._forget_addresses()
        else:
            self._addresses.move_to_end(address)
        return known

    def _forget_addresses(self) -> None:
        """Those that were met longest ago, unless a connection of theirs is open; of these there is a limit, too."""
        for _ in range(FORGOTTEN_AT_A_TIME):
            if len(self._addresses) <= self._limits.addresses_max:
                return
            oldest, known = next(iter(self._addresses.items()))
            if known.open:
                self._addresses.move_to_end(oldest)
            else:
                del self._addresses[oldest]
