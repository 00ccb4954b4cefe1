"""The doorman of a ROUTER: carries out what the `Admission` core says of its connections (`statemachine/admission.py`).

It learns from a libzmq monitor which descriptors are accepted and closed, and from each message which of them it came
over. It asks the kernel how much each connection has received, and never reads from one. It cuts a connection off by
shutting its TCP connection down; libzmq sees the end and closes the descriptor.
What libzmq and the kernel do that this depends on is in docs/architecture.md, "The doorman".
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import select
import socket
import struct
from collections.abc import Callable, Iterator
from typing import TypeAlias

import trio
import zmq

from connector.addresses import without_interface
from connector.clock import NS_PER_SECOND, BootClock
from connector.ports.descriptors import is_descriptor_left
from connector.ports.tcp import peer_address, received_bytes, unread_bytes, waiting
from statemachine.admission import MANY_FRAMES, Admission, AdmissionLimits, CutOff, Untaken, Verdict

Socket: TypeAlias = "zmq.Socket[bytes]"

CONNECTIONS_MAX = 4096
DESCRIPTORS_SHARE = 4
"""A listener has at most this part of the descriptors that the process may have."""

MEASURED_EVERY_NS = NS_PER_SECOND // 10
"""How often connections are measured."""
MEASURED_AT_A_TIME = 256
"""How many connections are measured at a time, in turn, and how many more of those over which something comes just
then."""

MEASURED_IDLE_EVERY_NS = NS_PER_SECOND
"""How often, while there are none, it is looked whether a connection waits for a descriptor."""

TURNS = 2
"""So many messages for each connection, and each that had one has had its turn. Once would do if none came or went."""

LATE_NS = NS_PER_SECOND // 10
"""After the look for messages, and what was measured is too much by what has come since."""

GONE = 0
"""The number of a connection that is not known any more."""

NOWHERE = -1
"""The descriptor of a ROUTER that is not bound yet."""

_EVENTS = zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
_EVENT = struct.Struct("=hi")

_RESET = struct.pack("ii", 1, 0)
"""Do linger, for no second: `SO_LINGER` of Linux."""


def connections_max() -> int:
    """Most connections that one listener of this process may have at a time."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        CONNECTIONS_MAX if soft == resource.RLIM_INFINITY else max(1, min(CONNECTIONS_MAX, soft // DESCRIPTORS_SHARE))
    )


class _Connection:
    __slots__ = ("address", "descriptor", "identity")

    def __init__(self, descriptor: int, address: str) -> None:
        self.descriptor = descriptor
        self.address = address
        self.identity: bytes | None = None


class Doorman:
    """See the module's docstring. Made before the ROUTER is bound; raises zmq.ZMQError and OSError.

    Args:
        events: a PAIR of the same context, which the doorman closes.
        endpoint: for the monitor, inproc and not used before.
        on_cut_off: told of each connection that is cut off: its address, and why.
        on_no_room: told of so many that wait to be accepted, when no connection can be ended to make room for them.
    """

    def __init__(
        self,
        router: Socket,
        events: Socket,
        endpoint: str,
        limits: AdmissionLimits,
        on_cut_off: Callable[[str, str], None],
        on_no_room: Callable[[int], None],
    ) -> None:
        self._router = router
        self._events = events
        self._on_cut_off = on_cut_off
        self._on_no_room = on_no_room
        self._listening = NOWHERE
        self._clock = BootClock()
        self._admission = Admission(limits, self._clock.now_ns())
        self._numbers = itertools.count(1)
        self._connections: dict[int, _Connection] = {}
        # Those of them that were cut off, and are not closed yet.
        self._ended: set[int] = set()
        self._by_descriptor: dict[int, int] = {}
        self._by_identity: dict[bytes, int] = {}
        self._looked_ns = self._measured_ns = self._clock.now_ns()
        # The last measurement was forgotten. The next one is not: a flood that keeps the process busy could go on for
        # ever.
        self._was_late = False
        # Those that are still to be measured in this round.
        self._unmeasured: list[int] = []
        # Messages since some were measured.
        self._taken = 0
        # A message of far too many frames keeps all others waiting, or has until just before.
        self._is_deaf = False
        self._newcomers = trio.lowlevel.ParkingLot()
        self.dropped = 0
        """Messages so far, for want of an allowance."""
        with contextlib.ExitStack() as undo:
            undo.callback(events.close)
            # Without a limit: libzmq's I/O thread would wait for us.
            events.setsockopt(zmq.RCVHWM, 0)
            router.monitor(endpoint, _EVENTS)
            events.connect(endpoint)
            self._both = undo.enter_context(select.epoll(2))
            self._busy = undo.enter_context(select.epoll())
            self._nothing = os.open(os.devnull, os.O_RDONLY)
            undo.callback(os.close, self._nothing)
            self._spare = os.dup(self._nothing)
            undo.callback(os.close, self._spare)
            for each in (router, events):
                self._both.register(each.FD, select.EPOLLIN)
            undo.pop_all()

    def fileno(self) -> int:
        """Readable when there is news of the ROUTER or of its connections."""
        return self._both.fileno()

    def seconds_to_look(self) -> float:
        """When to look again though there is no news."""
        return max(0, self._measured_ns + self._interval_ns() - self._clock.now_ns()) / NS_PER_SECOND

    def look(self, *, is_dropping: bool) -> None:
        """Take in what has become of connections, and measure them when it is time and each has had its turn, or none
        has: frames of a message are still to be dropped."""
        self._looked_ns = self._clock.now_ns()
        self._catch_up()
        if is_dropping:
            self._measure_in_time(Untaken.ALL)
        elif self._taken > TURNS * len(self._connections):
            self._hear_all()
            self._measure_in_time(Untaken.SOME)

    def none_waits(self) -> None:
        """All messages were taken."""
        self._hear_all()
        self._measure_in_time(Untaken.NONE)

    def is_shut_out(self, address: str) -> bool:
        """For the gate; address: numeric."""
        return self._admission.is_shut_out(address, self._clock.now_ns())

    async def until_heard(self) -> None:
        """For the gate: no connection is let in while messages are not taken, for what it sends would have to be
        kept."""
        while self._is_deaf:
            await self._newcomers.park()

    def hears(self, identity: bytes, first: zmq.Frame) -> bool:
        """Whether a message that came from `identity`, and of which this is the first frame, is to be served."""
        self._taken += 1
        number = self._by_identity.get(identity)
        if number is None:
            self._catch_up()
            number = self._bind(identity, first)
        if number in self._ended:
            self.dropped += 1
            return False
        now_ns = self._clock.now_ns()
        verdict = self._admission.arrived(number, now_ns)
        if verdict is Verdict.SERVE:
            return True
        self.dropped += 1
        if verdict is Verdict.CUT_OFF:
            self._carry_out(self._admission.flooded(number, now_ns))
        return False

    def _bind(self, identity: bytes, first: zmq.Frame) -> int:
        """The connection over which this came first from `identity`."""
        number = self._by_descriptor.get(_descriptor_of(first), GONE)
        if number == GONE or self._connections[number].address != _address_of(first):
            return GONE  # it has ended, and its descriptor is another's by now
        connection = self._connections[number]
        self._by_identity.pop(connection.identity or b"", None)
        connection.identity = identity
        self._by_identity[identity] = number
        return number

    def taken(self, identity: bytes, wire_bytes: int) -> None:
        """A whole message that came from `identity`, of so many bytes on the wire."""
        self._admission.taken(self._by_identity.get(identity, GONE), wire_bytes)

    def swamped(self, identity: bytes, first: zmq.Frame) -> None:
        """A message that came from `identity`, and of which this is the first frame, has far too many of them."""
        address, now_ns = _address_of(first), self._clock.now_ns()
        number = self._by_identity.get(identity, GONE)
        is_news = not self._admission.is_shut_out(address, now_ns)
        cut_off = self._admission.swamped(number, address, now_ns)
        self._is_deaf = True
        self._carry_out(cut_off)
        if is_news and not cut_off:
            self._on_cut_off(address, MANY_FRAMES)  # it has gone by itself, and is not let in again

    def dropped_frames(self, identity: bytes, first: zmq.Frame, frames: int) -> None:
        """A message that came from `identity`, and of which this is the first frame, has some too many of them."""
        if identity in self._by_identity:
            return  # its connection pays
        address, now_ns = _address_of(first), self._clock.now_ns()
        was_shut_out = self._admission.is_shut_out(address, now_ns)
        self._admission.left(address, frames, now_ns)
        if not was_shut_out and self._admission.is_shut_out(address, now_ns):
            self._on_cut_off(address, MANY_FRAMES)

    def sender_of(self, identity: bytes) -> str:
        """The numeric address of the connection over which messages come from `identity`; empty: it has ended."""
        connection = self._connections.get(self._by_identity.get(identity, GONE))
        return connection.address if connection is not None else ""

    def charge(self, identity: bytes, units: int, *, understood: bool) -> None:
        """What a message has cost; see `Admission.served`."""
        number = self._by_identity.get(identity, GONE)
        self._admission.served(number, units, understood=understood, now_ns=self._clock.now_ns())

    def close(self) -> None:
        """Before the ROUTER is closed."""
        self._hear_all()
        self._both.close()
        self._busy.close()
        self._router.disable_monitor()
        self._events.close()
        os.close(self._spare)
        os.close(self._nothing)

    # --- connections ------------------------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        news = list(self._news())
        last = {descriptor: at for at, (_, descriptor) in enumerate(news)}
        for at, (event, descriptor) in enumerate(news):
            if event == zmq.EVENT_LISTENING:
                self._listening = descriptor
                continue
            self._forget(descriptor)
            if event == zmq.EVENT_ACCEPTED and last[descriptor] == at:
                self._open(descriptor)

    def _news(self) -> Iterator[tuple[int, int]]:
        """Events that libzmq has told of, with their descriptors."""
        while True:
            try:
                event, descriptor = _EVENT.unpack_from(self._events.recv_multipart(zmq.NOBLOCK)[0])
            except zmq.Again:
                return
            yield event & 0xFFFF, descriptor

    def _open(self, descriptor: int) -> None:
        number, address = next(self._numbers), peer_address(descriptor)
        self._connections[number] = _Connection(descriptor, address)
        self._by_descriptor[descriptor] = number
        with contextlib.suppress(OSError):  # it has ended, or is something else by now
            self._busy.register(descriptor, select.EPOLLIN)
        self._carry_out(self._admission.opened(number, address, self._clock.now_ns()))

    def _forget(self, descriptor: int) -> None:
        number = self._by_descriptor.pop(descriptor, None)
        if number is not None:
            connection = self._connections.pop(number)
            with contextlib.suppress(OSError):  # the kernel has forgotten it
                self._busy.unregister(descriptor)
            self._ended.discard(number)
            if connection.identity is not None:
                self._by_identity.pop(connection.identity, None)
            self._admission.closed(number)

    def _interval_ns(self) -> int:
        return MEASURED_EVERY_NS if self._connections else MEASURED_IDLE_EVERY_NS

    def _hear_all(self) -> None:
        self._is_deaf = False
        self._newcomers.unpark_all()

    def _measure_in_time(self, untaken: Untaken) -> None:
        if self._clock.now_ns() >= self._measured_ns + self._interval_ns():
            self._measure(untaken)

    def _measure(self, untaken: Untaken) -> None:
        if not self._unmeasured:
            self._unmeasured = list(self._connections)
        busy = [self._by_descriptor.get(descriptor, GONE) for descriptor, _ in self._busy.poll(0, MEASURED_AT_A_TIME)]
        in_turn = self._unmeasured[-MEASURED_AT_A_TIME:]
        del self._unmeasured[-MEASURED_AT_A_TIME:]
        descriptors = [
            (number, self._connections[number].descriptor)
            for number in dict.fromkeys((*busy, *in_turn))
            if number in self._connections
        ]
        # In this order what comes between the two questions counts as not read.
        received = [
            (number, size, unread_bytes(descriptor) if size else 0)
            for number, descriptor in descriptors
            for size in (received_bytes(descriptor),)
        ]
        self._measured_ns = self._clock.now_ns()
        if untaken is not Untaken.ALL and self._is_late():
            self._unmeasured += in_turn
            return
        self._taken = 0
        self._carry_out(self._admission.measured(received, self._measured_ns, untaken))
        # The descriptor of a connection that was cut off comes back first.
        if self._listening != NOWHERE and not self._ended:
            self._make_room()

    def _is_late(self) -> bool:
        self._was_late = not self._was_late and self._measured_ns - self._looked_ns > LATE_NS
        return self._was_late

    def _make_room(self) -> None:
        """For connections that wait to be accepted while no descriptor is left."""
        if (waits := waiting(self._listening)) and not is_descriptor_left():
            cut_off = self._admission.no_descriptor_left()
            self._carry_out(cut_off)
            if not cut_off:
                self._on_no_room(waits)

    def _carry_out(self, cut_off: list[CutOff]) -> None:
        for each in cut_off:
            connection = self._connections.get(each.connection)
            if connection is not None:
                self._ended.add(each.connection)
                self._shut_down(connection)
            self._on_cut_off(each.address, each.why)

    def _shut_down(self, connection: _Connection) -> None:
        try:
            os.dup2(connection.descriptor, self._spare, inheritable=False)
        except OSError:  # libzmq has closed it
            return
        duplicate = None
        try:
            duplicate = socket.socket(fileno=self._spare)
            port = int(self._router.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])
            if duplicate.getsockname()[1] == port and duplicate.getpeername()[0] == connection.address:
                # So that libzmq's close resets it: a sender that goes on would be left to the kernel for a minute.
                duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                duplicate.shutdown(socket.SHUT_RDWR)
        except (OSError, IndexError, TypeError):  # it has ended, or is something else by now, perhaps no socket
            pass
        finally:
            if duplicate is not None:
                duplicate.detach()
            os.dup2(self._nothing, self._spare, inheritable=False)


def _address_of(frame: zmq.Frame) -> str:
    """The numeric address of the sender, as `peer_address` says it; empty: libzmq does not tell."""
    try:
        return without_interface(str(frame.get("Peer-Address")))
    except zmq.ZMQError:
        return ""


def _descriptor_of(frame: zmq.Frame) -> int:
    """The descriptor of the connection that the frame came over; -1: libzmq does not tell."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1
