"""A network that is not real: `FakeNetwork`, and a `FakeSideChannel` on it for each process.

A side channel keeps the contract of `connector.ports.side_channel` and passes the same suite as the real one. What the
network does to a message is decided by its rules: how long each copy takes, and how many copies there are. Rules see
hosts only, not contents.

Like ZMQ it keeps a request for an address at which nobody listens until somebody does, or until its requester is
closed. Unlike TCP it may lose a message while both ends live on; that stands for a connection that breaks under one.
"""

from __future__ import annotations

import itertools
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import trio

from connector.ports.side_channel import ListenerCounts, ReplyAddress, Request, SideChannelError
from tests.simulation.agenda import Agenda

LOOPBACK = "127.0.0.1"
LATENCY_SECONDS = 50e-6

_HOST = re.compile(r"[A-Za-z0-9_.:%\[\]-]{1,253}")


class NetworkRules:
    """How the network behaves; the faults of a simulation override it."""

    def delays(self, source: str, target: str) -> Sequence[float]:
        """Seconds until each copy of a message arrives: none, one or several."""
        return (LATENCY_SECONDS,)


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
        self._waiting: list[_Letter] = []

    def new_port(self) -> int:
        return next(self._ports)

    def bind(self, listener: FakeListener) -> None:
        address = (listener.host, listener.port)
        if address in self._listeners:
            raise SideChannelError(*address, "Address already in use")
        self._listeners[address] = listener
        waiting, self._waiting = self._waiting, []
        for letter in waiting:
            self._arrive(letter)

    def unbind(self, listener: FakeListener) -> None:
        self._listeners.pop((listener.host, listener.port), None)

    def admit(self, requester: FakeRequester) -> ReplyAddress:
        identity = b"requester %d" % next(self._identities)
        self._requesters[identity] = requester
        return identity

    def dismiss(self, identity: ReplyAddress) -> None:
        self._requesters.pop(identity, None)
        self._waiting = [letter for letter in self._waiting if letter.identity != identity]

    def ask(self, source: str, host: str, port: int, identity: ReplyAddress, frames: tuple[bytes, ...]) -> None:
        letter = _Letter(host, port, identity, frames)
        for delay_seconds in self.rules.delays(source, host):
            self.agenda.after(delay_seconds, lambda: self._arrive(letter))

    def inject(self, host: str, port: int, frames: tuple[bytes, ...]) -> None:
        """A request from nowhere; its reply is dropped."""
        self._arrive(_Letter(host, port, b"nowhere", frames))

    def _arrive(self, letter: _Letter) -> None:
        listener = self._listeners.get((letter.host, letter.port))
        if listener is not None:
            listener.take_in(letter.identity, letter.frames)
        elif letter.identity in self._requesters:
            self._waiting.append(letter)

    def answer(self, source: str, identity: ReplyAddress, frames: tuple[bytes, ...]) -> bool:
        """False when nobody waits for the reply."""
        requester = self._requesters.get(identity)
        if requester is None:
            return False
        for delay_seconds in self.rules.delays(source, requester.source):
            self.agenda.after(delay_seconds, lambda: requester.take_in(frames))
        return True


class FakeRequester:
    """One exchange. Made by `FakeSideChannel.connect`."""

    def __init__(self, network: FakeNetwork, source: str, host: str, port: int) -> None:
        self._network = network
        self.source = source
        self._host = host
        self._port = port
        self._identity: ReplyAddress | None = None
        self._reply: tuple[bytes, ...] | None = None
        self._news = trio.Event()
        self._is_closed = False

    async def ask(self, frames: Sequence[bytes]) -> tuple[bytes, ...]:
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._is_closed:
            raise trio.ClosedResourceError
        if self._identity is not None:
            raise RuntimeError("a requester serves one exchange")
        self._identity = self._network.admit(self)
        self._network.ask(self.source, self._host, self._port, self._identity, tuple(frames))
        try:
            await self._news.wait()
        finally:
            self._network.dismiss(self._identity)
        if self._reply is None:
            raise trio.ClosedResourceError
        return self._reply

    def take_in(self, frames: tuple[bytes, ...]) -> None:
        """A reply has arrived; the first one counts."""
        if self._reply is None and not self._is_closed:
            self._reply = frames
            self._news.set()

    def close(self) -> None:
        self._is_closed = True
        self._news.set()
        if self._identity is not None:
            self._network.dismiss(self._identity)


class FakeListener:
    """Made by `FakeSideChannel.listen`."""

    def __init__(self, network: FakeNetwork, host: str, port: int, frames_max: int, frame_bytes_max: int) -> None:
        self._network = network
        self.host = host
        self._port = port
        self._frames_max = frames_max
        self._frame_bytes_max = frame_bytes_max
        self._requests: deque[Request] = deque()
        self._news = trio.Event()
        self._is_receiving = False
        self._is_closed = False
        self._oversized_requests = 0
        self._undelimited_requests = 0
        self._dropped_replies = 0
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
        )

    def take_in(self, identity: ReplyAddress, frames: tuple[bytes, ...]) -> None:
        """A request has arrived."""
        if not frames:
            self._undelimited_requests += 1
        elif len(frames) > self._frames_max or any(len(frame) > self._frame_bytes_max for frame in frames):
            self._oversized_requests += 1
        else:
            self._requests.append(Request(identity, frames))
            self._news.set()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._requests.clear()
            self._network.unbind(self)
            self._news.set()


class FakeSideChannel:
    """The side channel of one process on `host`."""

    def __init__(self, network: FakeNetwork, host: str = LOOPBACK) -> None:
        self._network = network
        self._host = host
        self._open: list[FakeRequester | FakeListener] = []
        self._is_closed = False

    def connect(self, host: str, port: int) -> FakeRequester:
        if self._is_closed:
            raise trio.ClosedResourceError
        if not _HOST.fullmatch(host) or not 1 <= port <= 65535:
            raise SideChannelError(host, port, "Invalid argument")
        requester = FakeRequester(self._network, self._host, host, port)
        self._open.append(requester)
        return requester

    def listen(self, host: str, port: int, *, frames_max: int = 4, frame_bytes_max: int = 64 * 1024) -> FakeListener:
        if self._is_closed:
            raise trio.ClosedResourceError
        if host != self._host:
            raise SideChannelError(host, port, "Cannot assign requested address")
        listener = FakeListener(self._network, host, port or self._network.new_port(), frames_max, frame_bytes_max)
        self._open.append(listener)
        return listener

    def close(self) -> None:
        self._is_closed = True
        while self._open:
            self._open.pop().close()
