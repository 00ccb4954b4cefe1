"""The doorman of a ROUTER: carries out what the `Admission` core says of its connections (`statemachine/admission.py`).

libzmq accepts whoever comes, and keeps what they send until it is whole. It says through a monitor which descriptors it
has accepted and closed, and with each message over which of them it came. That is enough:

* A descriptor is looked at where it lies (`TCP_INFO` says how much has been received), and never read from.
* A connection is cut off by shutting its TCP connection down; libzmq then sees its end and closes it. Its I/O thread
  may close the descriptor at any moment, and another part of the process get its number. So it is duplicated first,
  and the duplicate is shut down only if it still is a connection of our port. The duplicate takes the place of a
  descriptor that is kept for this: there may be no other.
* libzmq tries without a pause to accept a connection for which there is no descriptor, and could tell of each time; we
  ask the kernel instead, when connections are measured, whether somebody waits and a descriptor is left.
* Messages that had come before are delivered all the same. They are dropped while the connection is known to be cut
  off, and afterwards are messages of a connection that has ended (`Admission.arrived`).

One connection's messages may be counted as another's for a moment, when its descriptor is used again before they are
taken. They are few: no more than may wait.
"""

from __future__ import annotations

import itertools
import os
import resource
import select
import socket
import struct
from collections.abc import Callable
from typing import TypeAlias

import zmq

from connector.clock import NS_PER_SECOND, BootClock
from connector.ports.tcp import peer_address, received_bytes, waiting
from statemachine.admission import Admission, AdmissionLimits, CutOff, Verdict

Socket: TypeAlias = "zmq.Socket[bytes]"

CONNECTIONS_MAX = 4096
DESCRIPTORS_SHARE = 4
"""A listener has at most this part of the descriptors that the process may have."""

MEASURED_EVERY_NS = NS_PER_SECOND // 10
"""How often connections are measured, up to MEASURED_AT_A_TIME of them; less often in proportion if they are more."""
MEASURED_AT_A_TIME = 256

MEASURED_IDLE_EVERY_NS = NS_PER_SECOND
"""The same while there are none."""

GONE = 0
"""The number of a connection that is not known any more."""

NOWHERE = -1
"""The descriptor of a ROUTER that is not bound yet."""

_EVENTS = zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
_EVENT = struct.Struct("=hi")

_RESET = struct.pack("ii", 1, 0)
"""Do linger, for no second: `SO_LINGER` of Linux."""


def connections_max() -> int:
    """That one listener of this process has at a time."""
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
        on_no_room: told of so many that wait to be accepted, when nobody can make room for them.
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
        self._measured_ns = self._clock.now_ns()
        self.cut_off = 0
        """Connections so far."""
        self.dropped = 0
        """Messages so far, for want of an allowance."""
        # Without a limit: libzmq's I/O thread would wait for us.
        events.setsockopt(zmq.RCVHWM, 0)
        try:
            router.monitor(endpoint, _EVENTS)
            events.connect(endpoint)
            self._both = select.epoll(2)
            self._nothing = os.open(os.devnull, os.O_RDONLY)
            self._spare = os.dup(self._nothing)
        except (zmq.ZMQError, OSError):
            events.close()
            raise
        for each in (router, events):
            self._both.register(each.FD, select.EPOLLIN)

    def fileno(self) -> int:
        """Readable when there is news of the ROUTER or of its connections."""
        return self._both.fileno()

    def seconds_to_look(self) -> float:
        """When to look again though there is no news."""
        return max(0, self._measured_ns + self._interval_ns() - self._clock.now_ns()) / NS_PER_SECOND

    def look(self) -> None:
        """Take in what has become of connections, and measure them when it is time."""
        self._catch_up()
        if self._clock.now_ns() >= self._measured_ns + self._interval_ns():
            self._measure()

    def is_shut_out(self, address: str) -> bool:
        """For the gate; address: numeric."""
        return self._admission.is_shut_out(address, self._clock.now_ns())

    def hears(self, identity: bytes, first: zmq.Frame) -> bool:
        """Whether a message that came from `identity`, and of which this is the first frame, is to be served."""
        number = self._by_identity.get(identity)
        if number is None:
            self._catch_up()
            number = self._by_descriptor.get(_descriptor_of(first), GONE)
            if number != GONE:
                connection = self._connections[number]
                self._by_identity.pop(connection.identity or b"", None)
                connection.identity = identity
                self._by_identity[identity] = number
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

    def charge(self, identity: bytes, units: int, *, understood: bool) -> None:
        """What a message has cost; see `Admission.served`."""
        number = self._by_identity.get(identity, GONE)
        self._admission.served(number, units, understood=understood, now_ns=self._clock.now_ns())

    def close(self) -> None:
        """Before the ROUTER is closed."""
        self._both.close()
        self._router.disable_monitor()
        self._events.close()
        os.close(self._spare)
        os.close(self._nothing)

    # --- connections ------------------------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        while True:
            try:
                event, descriptor = _EVENT.unpack_from(self._events.recv_multipart(zmq.NOBLOCK)[0])
            except zmq.Again:
                return
            if event & 0xFFFF == zmq.EVENT_ACCEPTED:
                self._open(descriptor)
            elif event & 0xFFFF == zmq.EVENT_DISCONNECTED:
                self._forget(descriptor)
            else:
                self._listening = descriptor

    def _open(self, descriptor: int) -> None:
        self._forget(descriptor)
        number, address = next(self._numbers), peer_address(descriptor)
        self._connections[number] = _Connection(descriptor, address)
        self._by_descriptor[descriptor] = number
        self._carry_out(self._admission.opened(number, address, self._clock.now_ns()))

    def _forget(self, descriptor: int) -> None:
        number = self._by_descriptor.pop(descriptor, None)
        if number is not None:
            connection = self._connections.pop(number)
            self._ended.discard(number)
            if connection.identity is not None:
                self._by_identity.pop(connection.identity, None)
            self._admission.closed(number)

    def _interval_ns(self) -> int:
        if not self._connections:
            return MEASURED_IDLE_EVERY_NS
        return MEASURED_EVERY_NS * max(MEASURED_AT_A_TIME, len(self._connections)) // MEASURED_AT_A_TIME

    def _measure(self) -> None:
        received = [(number, received_bytes(each.descriptor)) for number, each in self._connections.items()]
        self._measured_ns = self._clock.now_ns()
        self._carry_out(self._admission.measured(received, self._measured_ns))
        # The descriptor of somebody who was cut off comes back first.
        if self._listening != NOWHERE and not self._ended:
            self._make_room()

    def _make_room(self) -> None:
        """For whoever waits to be accepted while no descriptor is left."""
        if (waits := waiting(self._listening)) and not self._is_descriptor_left():
            cut_off = self._admission.no_descriptor_left()
            self._carry_out(cut_off)
            if not cut_off:
                self._on_no_room(waits)

    def _is_descriptor_left(self) -> bool:
        try:
            os.close(os.dup(self._nothing))
        except OSError:
            return False
        return True

    def _carry_out(self, cut_off: list[CutOff]) -> None:
        for each in cut_off:
            connection = self._connections.get(each.connection)
            if connection is not None:
                self._ended.add(each.connection)
                self._shut_down(connection)
            self.cut_off += 1
            self._on_cut_off(each.address, each.why)

    def _shut_down(self, connection: _Connection) -> None:
        try:
            os.dup2(connection.descriptor, self._spare, inheritable=False)
        except OSError:  # libzmq has closed it
            return
        duplicate = socket.socket(fileno=self._spare)
        try:
            port = int(self._router.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])
            if duplicate.getsockname()[1] == port and duplicate.getpeername()[0] == connection.address:
                # So that libzmq's close resets it: a sender that goes on would be left to the kernel for a minute.
                duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                duplicate.shutdown(socket.SHUT_RDWR)
        except (OSError, IndexError, TypeError):  # it has ended, or is something else by now
            pass
        finally:
            duplicate.detach()
            os.dup2(self._nothing, self._spare, inheritable=False)


def _descriptor_of(frame: zmq.Frame) -> int:
    """Of the connection that it came over; -1: libzmq says nothing of it."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1
