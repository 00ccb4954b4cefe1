"""A network that is not real: `FakeNetwork`, and a `FakeSideChannel` on it for each process.

A side channel keeps the contract of `connector.ports.side_channel` and passes the same suite as the real one. What the
network does to a message is decided by its rules: how long each copy takes, and how many copies there are. Rules see
hosts only, not contents. A host is a process: `FakeNetwork.kill` ends it.

Unlike TCP the network may lose a message while both ends live on; that stands for a connection that breaks under one. A
lost message of a link is lost for good, and the link does not notice. Only the first packet of a link, which connects
it, is sent again. The news that a connection was refused or reset are messages, too.

Who may stay connected to a listener, and who is heard, is decided by the product's `Admission`, with a smaller common
allowance than the real listener's, so that few messages are a flood.
"""

from __future__ import annotations

import itertools
import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import trio

from connector.clock import to_ns
from connector.ports.side_channel import (
    FRAMES_TOO_MANY_MAX,
    AccessRefused,
    ConnectionEnded,
    LinkEnded,
    ListenerCounts,
    NameNotResolved,
    PortRefused,
    PortUnavailable,
    Reached,
    ReplyAddress,
    Request,
    SideChannelError,
)
from connector.ports.zmq_bridge.listener import DROPPED_UNITS
from statemachine.admission import Admission, AdmissionLimits, AdmissionRates, CutOff, Verdict
from tests.simulation.agenda import Agenda
from tests.simulation.faults import LATENCY_SECONDS

LOOPBACK = "127.0.0.1"
CONNECT_AGAIN_SECONDS = 1.0
"""After this time the first packet of a link is sent again if it was lost."""
LINK_QUEUED_MAX = 1000
"""Messages of a link that are under way or wait for its connection."""

ADMISSION = AdmissionLimits(
    connections_max=4096,
    unfinished_bytes_max=1 << 30,
    waiting_bytes_max=0,
    rates=AdmissionRates(common_units=1000, common_units_per_second=1000),
)
"""Messages arrive whole here, so their sizes are of no account."""

REFUSED = "Connection refused"
NOT_LET_IN = "it does not let us in"
NOT_CONNECTED = 0
"""The number of a connection that has ended, for `Admission`."""
RESET = "Connection reset by peer"
UNANSWERED = "it has ended the connection"

_HOST = re.compile(r"[A-Za-z0-9_.:%\[\]-]{1,253}")


def _now_ns() -> int:
    return to_ns(trio.current_time())


class NetworkRules:
    """How the network behaves; the faults of a simulation override it."""

    def delays(self, source: str, target: str) -> Sequence[float]:
        """Seconds until each copy of a message arrives: none, one or several."""
        return (LATENCY_SECONDS,)

    def keeps_order(self, source: str, target: str) -> bool:
        """Whether messages of a link, and the news of its end, arrive in the order in which they were sent."""
        return True

    def refuses(self, source: str, target: str) -> bool:
        """Whether a connection is refused although somebody listens."""
        return False

    def admits(self, source: str, target: str) -> bool:
        """Whether a listener lets a process in that connects to it."""
        return True

    def resolves(self, host: str) -> bool:
        """Whether a name server knows the host."""
        return not host.endswith(".invalid")


@dataclass(eq=False)
class _Letter:
    """A request on its way to an address."""

    host: str
    port: int
    identity: ReplyAddress
    frames: tuple[bytes, ...]


class FakeNetwork:
    """Carries messages between the side channels that were made on it. Its agenda must be running."""

    def __init__(self, agenda: Agenda, rules: NetworkRules | None = None) -> None:
        self.agenda = agenda
        self.rules = rules or NetworkRules()
        self._ports = itertools.count(20_000)
        self._identities = itertools.count(1)
        self._listeners: dict[tuple[str, int], FakeListener] = {}
        self._requesters: dict[ReplyAddress, FakeRequester] = {}
        self._links: dict[ReplyAddress, FakeLink] = {}
        # Those that who opened them has not closed, lost or not.
        self._unclosed: dict[FakeLink, None] = {}

    def new_port(self) -> int:
        return next(self._ports)

    def bind(self, listener: FakeListener) -> None:
        address = (listener.host, listener.port)
        if address in self._listeners:
            raise PortUnavailable(*address, "Address already in use")
        self._listeners[address] = listener

    def unbind(self, listener: FakeListener) -> None:
        """The connections of its links end."""
        if self._listeners.get((listener.host, listener.port)) is not listener:
            return  # its process is dead
        del self._listeners[listener.host, listener.port]
        for link in [link for link in self._links.values() if link.listener is listener]:
            self._end(link, RESET)
        for requester in [requester for requester in self._requesters.values() if requester.listener is listener]:
            self._end_question(requester)

    def kill(self, host: str) -> None:
        """End the process `host`. It notices nothing and does nothing any more; its peers learn of it in time."""
        for listener in [listener for listener in self._listeners.values() if listener.host == host]:
            listener.die()
        for requester in [requester for requester in self._requesters.values() if requester.source == host]:
            requester.die()
        for link in [link for link in self._unclosed if link.source == host]:
            link.die()

    def reset_links(self, is_meant: Callable[[str, str], bool]) -> int:
        """Break the connections of links whose two hosts are meant; returns how many."""
        links = [
            link for link in self._links.values() if link.listener is not None and is_meant(link.source, link.host)
        ]
        for link in links:
            link.is_broken = True
            self._end(link, RESET)
        return len(links)

    def admit(self, requester: FakeRequester) -> ReplyAddress:
        identity = b"requester %d" % next(self._identities)
        self._requesters[identity] = requester
        return identity

    def dismiss(self, identity: ReplyAddress) -> None:
        requester = self._requesters.pop(identity, None)
        if requester is not None and requester.listener is not None:
            requester.listener.farewell(identity)

    def ask(self, source: str, host: str, port: int, identity: ReplyAddress, frames: tuple[bytes, ...]) -> None:
        letter = _Letter(host, port, identity, frames)
        for delay_seconds in self.rules.delays(source, host):
            self.agenda.after(delay_seconds, lambda: self._arrive(letter))

    def inject(self, host: str, port: int, frames: tuple[bytes, ...]) -> None:
        """A request from nowhere; its reply is dropped."""
        self._arrive(_Letter(host, port, b"nowhere", frames))

    def _arrive(self, letter: _Letter) -> None:
        listener = self._listeners.get((letter.host, letter.port))
        requester = self._requesters.get(letter.identity)
        is_refused = requester is not None and self.rules.refuses(requester.source, letter.host)
        if listener is not None and requester is not None and not self.rules.admits(requester.source, letter.host):
            for delay_seconds in self.rules.delays(letter.host, requester.source):
                self.agenda.after(delay_seconds, requester.take_rejection)
        elif listener is not None and not is_refused:
            if requester is not None:
                requester.reached = Reached.LISTENER
                if requester.listener is None:
                    requester.listener = listener
                    listener.welcome(letter.identity, requester.source)
            listener.take_in(letter.identity, letter.frames)
        elif requester is not None:
            for delay_seconds in self.rules.delays(letter.host, requester.source):
                self.agenda.after(delay_seconds, requester.take_refusal)

    def answer(self, source: str, identity: ReplyAddress, frames: tuple[bytes, ...]) -> bool:
        """False when nobody waits for the reply."""
        link = self._links.get(identity)
        if link is not None:
            self._send_back(link, lambda: link.take_in(frames))
            return True
        requester = self._requesters.get(identity)
        if requester is None:
            return False
        for delay_seconds in self.rules.delays(source, requester.source):
            at = trio.current_time() + delay_seconds
            requester.last_arrival = max(at, requester.last_arrival)
            self.agenda.at(at, lambda: requester.take_in(frames))
        return True

    def _end_question(self, requester: FakeRequester) -> None:
        """Let a requester know that its connection has ended, behind what was sent to it."""
        for delay_seconds in self.rules.delays(requester.host, requester.source):
            self.agenda.at(max(trio.current_time() + delay_seconds, requester.last_arrival), requester.take_end)

    # --- links ------------------------------------------------------------------------------------------------------

    def open_link(self, link: FakeLink) -> ReplyAddress:
        identity = b"link %d" % next(self._identities)
        self._links[identity] = link
        self._unclosed[link] = None
        self._connect(link, identity)
        return identity

    def close_link(self, identity: ReplyAddress) -> None:
        link = self._links.pop(identity, None)
        if link is not None and link.listener is not None:
            link.listener.farewell(identity)

    def cut_off(self, identity: ReplyAddress) -> None:
        """A listener ends a connection."""
        link, requester = self._links.get(identity), self._requesters.get(identity)
        if link is not None:
            link.is_broken = True
            self._end(link, RESET)
        if requester is not None:
            self._end_question(requester)

    def unclosed_links(self, source: str) -> int:
        """How many links this process has opened and not closed; a leak of sockets shows here."""
        return sum(link.source == source for link in self._unclosed)

    def forget_link(self, link: FakeLink) -> None:
        self._unclosed.pop(link, None)
        self.close_link(link.identity)

    def _connect(self, link: FakeLink, identity: ReplyAddress) -> None:
        """Send the first packet of a link until it arrives."""
        if identity not in self._links:
            return
        delays = self.rules.delays(link.source, link.host)
        if delays:
            self.agenda.after(min(delays), lambda: self._take_connection(link))
        else:
            self.agenda.after(CONNECT_AGAIN_SECONDS, lambda: self._connect(link, identity))

    def _take_connection(self, link: FakeLink) -> None:
        listener = self._listeners.get((link.host, link.port))
        if listener is None or self.rules.refuses(link.source, link.host):
            self._end(link, REFUSED)
        elif not self.rules.admits(link.source, link.host):
            self._send_back(link, lambda: link.lose(NOT_LET_IN, is_refused=True))
        else:
            link.establish(listener)

    def carry(self, link: FakeLink, frames: tuple[bytes, ...]) -> None:
        """Take a message of an established link to its listener."""
        for delay_seconds in self.rules.delays(link.source, link.host):
            at = trio.current_time() + delay_seconds
            if self.rules.keeps_order(link.source, link.host):
                at = link.last_arrival_there = max(at, link.last_arrival_there)
            link.under_way += 1
            self.agenda.at(at, lambda: self._arrive_on(link, frames))

    def _arrive_on(self, link: FakeLink, frames: tuple[bytes, ...]) -> None:
        link.under_way -= 1
        listener = link.listener
        if link.is_broken or listener is None or self._listeners.get((link.host, link.port)) is not listener:
            self._end(link, RESET)
        else:
            listener.take_in(link.identity, frames)

    def _end(self, link: FakeLink, error: str) -> None:
        """Let a link know that it has no connection any more."""
        self._send_back(link, lambda: link.lose(error))

    def _send_back(self, link: FakeLink, arrive: Callable[[], None]) -> None:
        """Something travels from the peer of a link to the link."""
        for delay_seconds in self.rules.delays(link.host, link.source):
            at = trio.current_time() + delay_seconds
            if self.rules.keeps_order(link.host, link.source):
                at = link.last_arrival_here = max(at, link.last_arrival_here)
            self.agenda.at(at, arrive)


class FakeRequester:
    """One exchange. Made by `FakeSideChannel.connect`."""

    def __init__(self, network: FakeNetwork, source: str, host: str, port: int) -> None:
        self._network = network
        self.source = source
        self.host = host
        self._port = port
        self.last_arrival = 0.0
        self._identity: ReplyAddress | None = None
        self._reply: tuple[bytes, ...] | None = None
        self._is_refused = False
        self._has_ended = False
        self._is_rejected = False
        self.reached = Reached.NOTHING
        self.listener: FakeListener | None = None
        """Where its question arrived."""
        self._is_dead = False
        self._news = trio.Event()
        self._is_closed = False
        self.on_close: Callable[[], object] = lambda: None

    async def ask(self, frames: Sequence[bytes]) -> tuple[bytes, ...]:
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._is_closed:
            raise trio.ClosedResourceError
        if self._identity is not None:
            raise RuntimeError("a requester serves one exchange")
        if not self._network.rules.resolves(self.host):
            raise NameNotResolved(self.host, self._port, "Name or service not known")
        self.reached = Reached.ADDRESS
        self._identity = self._network.admit(self)
        self._network.ask(self.source, self.host, self._port, self._identity, tuple(frames))
        try:
            await self._news.wait()
        finally:
            self._network.dismiss(self._identity)
        if self._reply is not None:
            return self._reply
        if self._is_refused:
            raise PortRefused(self.host, self._port, REFUSED)
        if self._has_ended:
            raise ConnectionEnded(self.host, self._port, UNANSWERED)
        if self._is_rejected:
            raise AccessRefused(self.host, self._port, NOT_LET_IN)
        raise trio.ClosedResourceError

    def take_in(self, frames: tuple[bytes, ...]) -> None:
        """A reply has arrived; the first one counts."""
        if self._reply is None and not self._is_closed and not self._is_dead:
            self._reply = frames
            self._news.set()

    def take_refusal(self) -> None:
        """The host has said that nobody listens."""
        if not self._is_closed and not self._is_dead:
            self._is_refused = True
            self._news.set()

    def take_end(self) -> None:
        """The listener has ended the connection, or its process has ended."""
        if not self._is_closed and not self._is_dead:
            self._has_ended = True
            self._news.set()

    def take_rejection(self) -> None:
        """The listener has said that it does not let this process in."""
        if not self._is_closed and not self._is_dead:
            self._is_rejected = True
            self._news.set()

    def die(self) -> None:
        """Its process is gone: nothing arrives any more, and nobody notices."""
        self._is_dead = True
        if self._identity is not None:
            self._network.dismiss(self._identity)

    def close(self) -> None:
        self._is_closed = True
        self._news.set()
        self.on_close()
        if self._identity is not None:
            self._network.dismiss(self._identity)


class FakeLink:
    """One connection to a listener. Made by `FakeSideChannel.open_link`."""

    def __init__(self, network: FakeNetwork, source: str, host: str, port: int) -> None:
        self._network = network
        self.source = source
        self.host = host
        self.port = port
        self.listener: FakeListener | None = None
        """Where it leads to, once its first packet has arrived there."""
        self.is_broken = False
        self.under_way = 0
        self.last_arrival_there = 0.0
        self.last_arrival_here = 0.0
        self._to_send: list[tuple[bytes, ...]] = []
        self._arrived: deque[tuple[bytes, ...]] = deque()
        self._lost: str | None = None
        self._is_refused = False
        self._is_closed = False
        self._is_dead = False
        self._is_receiving = False
        self._news = trio.Event()
        self.on_close: Callable[[], object] = lambda: None
        self.identity = network.open_link(self)

    def send(self, frames: Sequence[bytes]) -> bool:
        if self._is_closed:
            raise trio.ClosedResourceError
        if self._lost is not None or self.under_way + len(self._to_send) >= LINK_QUEUED_MAX:
            return False
        if self._is_dead:
            return True
        if self.listener is None:
            self._to_send.append(tuple(frames))
        else:
            self._network.carry(self, tuple(frames))
        return True

    async def receive(self) -> tuple[bytes, ...]:
        if self._is_receiving:
            raise trio.BusyResourceError
        self._is_receiving = True
        try:
            await trio.lowlevel.checkpoint()
            while not self._is_closed and (self._is_dead or (not self._arrived and self._lost is None)):
                self._news = trio.Event()
                await self._news.wait()
        finally:
            self._is_receiving = False
        if self._is_closed:
            raise trio.ClosedResourceError
        if self._arrived:
            return self._arrived.popleft()
        if self._is_refused:
            raise AccessRefused(self.host, self.port, NOT_LET_IN)
        raise LinkEnded(self.host, self.port, self._lost or "")

    def establish(self, listener: FakeListener) -> None:
        """Its first packet has arrived."""
        if self.listener is None and not self._is_closed:
            self.listener = listener
            listener.welcome(self.identity, self.source)
            to_send, self._to_send = self._to_send, []
            for frames in to_send:
                self._network.carry(self, frames)

    def take_in(self, frames: tuple[bytes, ...]) -> None:
        """A message from the listener has arrived."""
        if self.is_broken:
            return
        if not self._is_closed and not self._is_dead and self._lost is None:
            self._arrived.append(frames)
            self._news.set()

    def lose(self, error: str, *, is_refused: bool = False) -> None:
        """The news of its end have arrived. `is_refused`: the listener has not let it in."""
        if not self._is_closed and not self._is_dead and self._lost is None:
            self._lost = error
            self._is_refused = is_refused
            self._network.close_link(self.identity)
            self._news.set()

    def die(self) -> None:
        """Its process is gone: nothing arrives any more, and nobody notices."""
        self._is_dead = True
        self._network.forget_link(self)

    def close(self) -> None:
        self._is_closed = True
        self._network.forget_link(self)
        self._news.set()
        self.on_close()


class FakeListener:
    """Made by `FakeSideChannel.listen`."""

    def __init__(
        self,
        network: FakeNetwork,
        host: str,
        port: int,
        frames_max: int,
        frame_bytes_max: int,
        on_cut_off: Callable[[str, str], None],
    ) -> None:
        self._network = network
        self.host = host
        self._port = port
        self._frames_max = frames_max
        self._frame_bytes_max = frame_bytes_max
        self._on_cut_off = on_cut_off
        self._admission = Admission(ADMISSION, _now_ns())
        self._connections = itertools.count(1)
        # Of connections that are open and were not cut off.
        self._numbers: dict[ReplyAddress, int] = {}
        self._addresses: dict[ReplyAddress, str] = {}
        self._identities: dict[int, ReplyAddress] = {}
        self._dropped_requests = 0
        self._requests: deque[Request] = deque()
        self._news = trio.Event()
        self._is_receiving = False
        self._is_closed = False
        self._oversized_requests = 0
        self._undelimited_requests = 0
        self._dropped_replies = 0
        self.on_arrival: Callable[[tuple[bytes, ...]], None] = lambda frames: None
        """Told of each request that arrives, before anybody receives it."""
        network.bind(self)

    @property
    def port(self) -> int:
        return self._port

    async def receive(self) -> Request:
        if self._is_closed:
            raise trio.ClosedResourceError
        if self._is_receiving:
            raise trio.BusyResourceError
        self._is_receiving = True
        try:
            await trio.lowlevel.checkpoint()
            while not self._requests:
                if self._is_closed:
                    raise trio.ClosedResourceError
                self._news = trio.Event()
                await self._news.wait()
        finally:
            self._is_receiving = False
        return self._requests.popleft()

    def reply(self, address: ReplyAddress, frames: Sequence[bytes]) -> None:
        if self._is_closed:
            raise trio.ClosedResourceError
        if not self._network.answer(self.host, address, tuple(frames)):
            self._dropped_replies += 1

    def counts(self) -> ListenerCounts:
        return ListenerCounts(
            oversized_requests=self._oversized_requests,
            undelimited_requests=self._undelimited_requests,
            dropped_replies=self._dropped_replies,
            dropped_requests=self._dropped_requests,
        )

    def sender_of(self, address: ReplyAddress) -> str:
        return self._addresses.get(address, "")

    def charge(self, address: ReplyAddress, units: int, *, understood: bool = True) -> None:
        number = self._numbers.get(address, NOT_CONNECTED)
        self._admission.served(number, units, understood=understood, now_ns=_now_ns())

    def welcome(self, identity: ReplyAddress, address: str) -> None:
        """A connection was made."""
        number = next(self._connections)
        self._numbers[identity], self._identities[number] = number, identity
        self._addresses[identity] = address
        self._cut_off(self._admission.opened(number, address, _now_ns()))

    def farewell(self, identity: ReplyAddress) -> None:
        """A connection has ended."""
        number = self._numbers.pop(identity, None)
        if number is not None:
            del self._identities[number]
            del self._addresses[identity]
            self._admission.closed(number)

    def _cut_off(self, connections: Sequence[CutOff]) -> None:
        for each in connections:
            identity = self._identities.pop(each.connection)
            del self._numbers[identity]
            del self._addresses[identity]
            self._on_cut_off(each.address, each.why)
            self._network.cut_off(identity)

    def _hears(self, identity: ReplyAddress) -> bool:
        number = self._numbers.get(identity, NOT_CONNECTED)
        verdict = self._admission.arrived(number, _now_ns())
        if verdict is Verdict.CUT_OFF:
            self._cut_off(self._admission.flooded(number, _now_ns()))
        return verdict is Verdict.SERVE

    def take_in(self, identity: ReplyAddress, frames: tuple[bytes, ...]) -> None:
        """A request has arrived."""
        if not self._hears(identity):
            self._dropped_requests += 1
        elif not frames:
            self._undelimited_requests += 1
            self.charge(identity, DROPPED_UNITS, understood=False)
        elif len(frames) > self._frames_max or any(len(frame) > self._frame_bytes_max for frame in frames):
            self._oversized_requests += 1
            self.charge(identity, DROPPED_UNITS, understood=False)
            if len(frames) > self._frames_max + FRAMES_TOO_MANY_MAX and identity in self._numbers:
                number, address = self._numbers[identity], self._addresses[identity]
                self._cut_off(self._admission.swamped(number, address, _now_ns()))
        else:
            self.on_arrival(frames)
            self._requests.append(Request(identity, frames))
            self._news.set()

    @property
    def waiting(self) -> int:
        """Requests that have arrived and that nobody has received."""
        return len(self._requests)

    def poison(self, request: Any) -> None:
        """Have something received that is no request."""
        self._requests.append(request)
        self._news.set()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._requests.clear()
            self._network.unbind(self)
            self._news.set()

    def die(self) -> None:
        """Its process is gone: nothing arrives any more, and nobody notices."""
        self._requests.clear()
        self._network.unbind(self)


class FakeSideChannel:
    """The side channel of one process on `host`."""

    def __init__(self, network: FakeNetwork, host: str = LOOPBACK) -> None:
        self._network = network
        self._host = host
        # In the order in which they were opened.
        self._open: dict[FakeRequester | FakeListener | FakeLink, None] = {}
        self._is_closed = False

    @property
    def network(self) -> FakeNetwork:
        return self._network

    def _check(self, host: str, port: int) -> None:
        if self._is_closed:
            raise trio.ClosedResourceError
        if not _HOST.fullmatch(host) or not 1 <= port <= 65535:
            raise SideChannelError(host, port, "Invalid argument")

    @property
    def public_key(self) -> None:
        """There are no keys here; who is let in is up to the rules."""
        return None

    async def open_link(self, host: str, port: int, server_key: str | None = None) -> FakeLink:
        self._check(host, port)
        await trio.lowlevel.checkpoint()
        self._check(host, port)
        if not self._network.rules.resolves(host):
            raise NameNotResolved(host, port, "Name or service not known")
        link = FakeLink(self._network, self._host, host, port)
        self._keep(link)
        return link

    def connect(self, host: str, port: int) -> FakeRequester:
        self._check(host, port)
        requester = FakeRequester(self._network, self._host, host, port)
        self._keep(requester)
        return requester

    def listen(
        self,
        host: str,
        port: int,
        *,
        frames_max: int = 4,
        frame_bytes_max: int = 64 * 1024,
        on_cut_off: Callable[[str, str], None] = lambda address, why: None,
    ) -> FakeListener:
        if self._is_closed:
            raise trio.ClosedResourceError
        if host != self._host:
            raise SideChannelError(host, port, "Cannot assign requested address")
        listener = FakeListener(
            self._network, host, port or self._network.new_port(), frames_max, frame_bytes_max, on_cut_off
        )
        self._open[listener] = None
        return listener

    def _keep(self, opened: FakeRequester | FakeLink) -> None:
        """Until it is closed."""
        self._open[opened] = None
        opened.on_close = lambda: self._open.pop(opened, None)

    def close(self) -> None:
        self._is_closed = True
        while self._open:
            self._open.popitem()[0].close()
