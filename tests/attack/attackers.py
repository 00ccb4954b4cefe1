"""The attacks, each in a process of its own with the lowest priority, until the other end of its pipe closes.

Each works on many connections in one thread, and counts what it has tried. None waits for an answer that it does not
need. `source`: the address of this machine that it comes from, another one than the decode engine's.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import multiprocessing
import os
import random
import resource
import select
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from connector.wire.administration import MEET_PLACES_MAX, Meet
from connector.wire.control import REQUEST_BYTES_MAX, AskSums, Hold, Release, encode_request
from connector.wire.handshake import encode_request as encode_handshake
from connector.wire.inspection import WHATS, Inspect
from statemachine.lease import LEASES_PER_MESSAGE_MAX, LeaseName
from tests.attack.zmtp import EMPTY, GREETING, HELLO, HELLO_BYTES, endless, frame, many_frames, message
from tests.fuzz.mutations import mutate
from tests.fuzz.targets import TARGETS

Address = tuple[str, int]

CONNECTIONS = 10_000
FLOODERS = 4
"""Connections of one flood."""
FEW = 64
"""Connections of an attack that says something over each of them."""
PIECES = 64
"""Messages that are handed to the kernel together."""
FEW_LARGE = 10
"""Connections or messages of an attack whose messages keep everybody waiting, itself too."""

_LEASES = tuple(LeaseName(f"cmpl-{number}", number) for number in range(LEASES_PER_MESSAGE_MAX))
_WHO = {"engine_id": "stranger", "rank": 0, "ranks": 1}


@dataclass
class Tally:
    """What an attack has done so far."""

    connections: int = 0
    refused: int = 0
    """Attempts to connect that failed."""
    ended: int = 0
    """Connections that the other end has closed."""
    open: int = 0
    messages: int = 0
    """Of those that were handed to the kernel together, only if all were."""
    bytes: int = 0
    problem: str = ""

    @property
    def tried(self) -> int:
        """Attempts to connect or messages, whichever are more: a listener that defends itself takes few connections."""
        return max(self.connections + self.refused, self.messages)


@dataclass
class Peer:
    """One connection of an attack: what it has still to send, and what it does with what comes."""

    connection: socket.socket
    pending: memoryview
    more: Callable[[], bytes]
    """What to send next; empty: nothing, until the attack says so."""
    messages: int = 0
    """In what `more` returns."""
    hello: int = HELLO_BYTES
    """Bytes of the other end's that are awaited before `more` is asked for the first time."""
    reads: bool = True
    has_begun: bool = False
    """`more` was asked."""


class Attack:
    """Connections to one address, and their I/O."""

    def __init__(self, target: Address, source: Callable[[], str], tally: Tally) -> None:
        self.target = target
        self.source = source
        self.tally = tally
        self.peers: dict[int, Peer] = {}
        self.poll = select.epoll()

    def connect(
        self,
        first: bytes,
        more: Callable[[], bytes] = bytes,
        *,
        messages: int = 0,
        hello: bool = True,
        reads: bool = True,
    ) -> bool:
        try:
            connection = socket.create_connection(self.target, timeout=2, source_address=(self.source(), 0))
        except OSError as error:
            self.tally.refused += 1
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL):
                self.tally.problem = str(error)
            return False
        connection.setblocking(False)
        self.tally.connections += 1
        self.tally.open += 1
        peer = Peer(connection, memoryview(first), more, messages, HELLO_BYTES if hello else 0, reads)
        self.peers[connection.fileno()] = peer
        self.poll.register(connection.fileno(), select.EPOLLIN | select.EPOLLOUT)
        return True

    def turn(self, seconds: float) -> None:
        """Send and receive whatever can be."""
        for descriptor, events in self.poll.poll(seconds, 1024):
            peer = self.peers[descriptor]
            try:
                if events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR) and (peer.reads or peer.hello):
                    received = peer.connection.recv(min(1 << 20, peer.hello) if peer.hello else 1 << 20)
                    if not received:
                        raise ConnectionResetError
                    peer.hello = max(0, peer.hello - len(received))
                if events & select.EPOLLHUP:
                    raise ConnectionResetError
                if events & select.EPOLLOUT:
                    self._send(peer)
                self._watch(peer)
            except BlockingIOError:
                continue
            except OSError:
                self.drop(peer)
                self.tally.ended += 1

    def _send(self, peer: Peer) -> None:
        if not peer.pending and not peer.hello:
            peer.pending = memoryview(peer.more())
            peer.has_begun = True
        if peer.pending:
            sent = peer.connection.send(peer.pending)
            self.tally.bytes += sent
            peer.pending = peer.pending[sent:]
            if not peer.pending and peer.has_begun:
                self.tally.messages += peer.messages

    def _watch(self, peer: Peer) -> None:
        waits = select.EPOLLIN if peer.reads or peer.hello else 0
        wants = select.EPOLLOUT if peer.pending or (peer.messages and not peer.hello) else 0
        self.poll.modify(peer.connection.fileno(), waits | wants)

    def drop(self, peer: Peer) -> None:
        del self.peers[peer.connection.fileno()]
        self.poll.unregister(peer.connection.fileno())
        peer.connection.close()
        self.tally.open -= 1

    def say(self, peer: Peer, what: bytes) -> None:
        """Send so much now, if the kernel takes it."""
        try:
            self.tally.bytes += peer.connection.send(what)
        except BlockingIOError:
            return
        except OSError:
            self.drop(peer)
            self.tally.ended += 1


Step = Iterator[None]


def keep(attack: Attack, count: int, open_one: Callable[[], bool], pause_seconds: float = 0.0) -> Step:
    """Have so many connections open all the time, as far as they are accepted."""
    while True:
        for _ in range(min(64, count - len(attack.peers))):
            if not open_one():
                break
        attack.turn(0.02 if len(attack.peers) >= count else 0.002)
        if pause_seconds:
            time.sleep(pause_seconds)
        yield


def flood(attack: Attack, make: Callable[[], bytes], *, reads: bool = True, pieces: int = PIECES) -> Step:
    """The same over a few connections as fast as they take it; an ended one is replaced at once."""

    def more() -> bytes:
        return b"".join(make() for _ in range(pieces))

    return keep(attack, FLOODERS, lambda: attack.connect(HELLO, more, messages=pieces, reads=reads))


def after_a_word(attack: Attack, word: bytes, piece: bytes) -> Step:
    """Over a few connections: what an engine would say, and then the same piece as fast as they take it."""

    def connect() -> bool:
        said = itertools.chain([word], itertools.repeat(piece))
        return attack.connect(HELLO, lambda: next(said), messages=1)

    return keep(attack, FLOODERS, connect)


def dribble(attack: Attack, count: int, said: bytes, rest: bytes) -> Step:
    """Say something, and then a byte now and then, on every connection."""
    position = 0
    steps = keep(attack, count, lambda: attack.connect(said, hello=False))
    due = time.monotonic()
    for _ in steps:
        if time.monotonic() >= due:
            due = time.monotonic() + 1.0
            for peer in list(attack.peers.values()):
                attack.say(peer, rest[position : position + 1])
            position = (position + 1) % len(rest)
        yield


def idle(attack: Attack, count: int, said: bytes) -> Step:
    return keep(attack, count, lambda: attack.connect(said))


def come_and_go(attack: Attack) -> Step:
    """Connect, ask for a handshake, leave, as fast as it goes."""
    ask = message(encode_handshake(0, 0))
    while True:
        for _ in range(32):
            attack.connect(HELLO, lambda: ask, messages=1)
        for _ in range(8):
            attack.turn(0.001)
        for peer in list(attack.peers.values()):
            attack.drop(peer)
        yield


def hold(leases: tuple[LeaseName, ...] = _LEASES) -> bytes:
    return message(*encode_request(Hold(**_WHO, sent_ns=1, leases=leases)))


@functools.cache
def large_holds() -> tuple[bytes, ...]:
    """As long as a message may be: with more leases than it may name, and with its leases over and over."""
    one = msgspec.msgpack.encode(["a", 0])
    head = msgspec.msgpack.encode({"type": "hold", **_WHO, "sent_ns": 1})
    field = msgspec.msgpack.encode("leases")
    room = REQUEST_BYTES_MAX - len(head) - 64
    many = room // len(one)
    too_many = field + b"\xdd" + many.to_bytes(4, "big") + one * many
    once = field + msgspec.msgpack.encode([("a", 0)] * LEASES_PER_MESSAGE_MAX)
    times = room // len(once)
    return tuple(
        message(b"\xde" + (head[0] - 0x80 + fields).to_bytes(2, "big") + head[1:] + rest)
        for fields, rest in ((1, too_many), (times, once * times))
    )


def meet(choose: random.Random) -> bytes:
    """Places that are new each time; nobody listens there."""
    hosts = (f"127.{choose.randint(1, 250)}.{choose.randint(0, 250)}.1" for _ in range(MEET_PLACES_MAX))
    places = (f"{host}:{choose.randint(1, 1023)}" for host in hosts)
    return message(*encode_request(Meet(places=tuple(places))))


def ask_sums() -> bytes:
    return message(*encode_request(AskSums(lease=_LEASES[0], part=0)))


def release() -> bytes:
    return message(*encode_request(Release(**_WHO, leases=_LEASES)))


def inspect(choose: random.Random) -> bytes:
    return message(*encode_request(Inspect(number=1, what=choose.choice(WHATS), match=choose.choice(("", "no such")))))


def garbage(choose: random.Random) -> bytes:
    target = TARGETS[choose.choice(("control-request", "handshake-request"))]
    return message(mutate(target.seeds, choose))


FRAMES_OF_A_REQUEST = 30_000
FRAMES_OF_A_HOLD = 500_000
"""Empty ones that are fewer bytes than such a message may have, or hardly more."""

OVERSIZE = frame(bytes(16 << 20))[: 1 << 16]
"""The beginning: the length is said first."""

_MEET = meet(random.Random(1))

HANDSHAKE, CONTROL = "side channel", "control socket"


@dataclass(frozen=True)
class Kind:
    """An attack on one of the two sockets."""

    socket: str
    step: Callable[[Attack, random.Random], Step]
    what: str = field(default="")
    is_spread: bool = False
    """Each connection comes from another address."""
    crowd: int = 0
    """So many connections are all that it is, and it has begun when it has tried them; 0: it is not a crowd."""
    begun: int = 100
    """Of one that is no crowd: it has begun when it has tried more connections or messages than this."""

    def has_begun(self, tally: Tally) -> bool:
        if self.crowd:
            return tally.connections + tally.refused >= self.crowd
        return tally.tried > self.begun


def kinds(connections: int = CONNECTIONS) -> dict[str, Kind]:
    """By name. `connections`: of those attacks that only have many."""
    dripped = GREETING[10:]
    once_asked = message(encode_handshake(0, 0))
    return {
        "idle connections": Kind(
            HANDSHAKE, lambda a, c: idle(a, connections, HELLO), "greeted, silent", crowd=connections
        ),
        "idle connections, control": Kind(
            CONTROL, lambda a, c: idle(a, connections, HELLO), "greeted, silent", crowd=connections
        ),
        "half a greeting": Kind(
            HANDSHAKE,
            lambda a, c: dribble(a, connections, GREETING[:10], dripped),
            "a byte each second",
            crowd=connections,
        ),
        "half a message": Kind(
            CONTROL,
            lambda a, c: dribble(a, connections, b"", HELLO + frame(b"x" * 200)),
            "a byte each second, from the first byte on",
            crowd=connections,
        ),
        "come and go": Kind(HANDSHAKE, lambda a, c: come_and_go(a), "connect, ask, leave"),
        "handshakes": Kind(HANDSHAKE, lambda a, c: flood(a, lambda: once_asked), "requests"),
        "handshakes, unread": Kind(HANDSHAKE, lambda a, c: flood(a, lambda: once_asked, reads=False), "replies unread"),
        "garbage, side channel": Kind(HANDSHAKE, lambda a, c: flood(a, lambda: garbage(c)), "damaged messages"),
        "garbage, control": Kind(CONTROL, lambda a, c: flood(a, lambda: garbage(c)), "damaged messages"),
        "holds": Kind(CONTROL, lambda a, c: flood(a, hold), "of 512 leases that are not lent"),
        "small holds": Kind(CONTROL, lambda a, c: flood(a, lambda: hold(_LEASES[:1])), "of one lease that is not lent"),
        "holds, unread": Kind(CONTROL, lambda a, c: flood(a, hold, reads=False), "answers unread"),
        "large holds": Kind(
            CONTROL,
            lambda a, c: flood(a, lambda: c.choice(large_holds()), pieces=1),
            "of 2 MiB: more leases than one may name, or its leases over and over",
        ),
        "releases": Kind(CONTROL, lambda a, c: flood(a, release), "of 512 leases that are not lent"),
        "questions": Kind(CONTROL, lambda a, c: flood(a, lambda: inspect(c)), "Inspect of every kind"),
        "meets": Kind(CONTROL, lambda a, c: flood(a, lambda: _MEET), "64 places where nobody is, over and over"),
        "meets, spread": Kind(
            CONTROL, lambda a, c: flood(a, lambda: meet(c)), "64 new places, each connection from another address", True
        ),
        "sums": Kind(CONTROL, lambda a, c: flood(a, ask_sums), "checksums of leases that are not lent"),
        "oversize frames": Kind(CONTROL, lambda a, c: flood(a, lambda: OVERSIZE), "of 16 MiB, refused by their length"),
        "endless messages": Kind(CONTROL, lambda a, c: flood(a, endless), "parts of 64 KiB, never a last one"),
        "endless messages, empty frames": Kind(
            CONTROL, lambda a, c: after_a_word(a, hold(), EMPTY * FRAMES_OF_A_HOLD), "a hold, then never a last frame"
        ),
        "many frames": Kind(
            CONTROL,
            lambda a, c: after_a_word(a, hold(), many_frames(FRAMES_OF_A_HOLD)),
            f"a hold, then messages of {FRAMES_OF_A_HOLD:,} empty frames",
            begun=FEW_LARGE,
        ),
        "many frames, side channel": Kind(
            HANDSHAKE,
            lambda a, c: after_a_word(a, once_asked, many_frames(FRAMES_OF_A_REQUEST)),
            f"a request, then messages of {FRAMES_OF_A_REQUEST:,} empty frames",
            begun=FEW_LARGE,
        ),
        "many frames, spread": Kind(
            CONTROL,
            lambda a, c: after_a_word(a, hold(), many_frames(FRAMES_OF_A_HOLD)),
            "the same, each connection from another address",
            True,
            begun=FEW_LARGE,
        ),
        "holds, spread": Kind(CONTROL, lambda a, c: flood(a, hold), "each connection from another address", True),
        "questions, spread": Kind(
            CONTROL, lambda a, c: flood(a, lambda: inspect(c)), "each connection from another address", True
        ),
        "handshakes, spread": Kind(
            HANDSHAKE, lambda a, c: flood(a, lambda: once_asked), "each connection from another address", True
        ),
        "come and go, spread": Kind(
            HANDSHAKE, lambda a, c: come_and_go(a), "each connection from another address", True
        ),
        "bytes that are not ZMTP": Kind(
            HANDSHAKE,
            lambda a, c: keep(a, FEW, lambda: a.connect(c.randbytes(4096), hello=False)),
            "4 KiB, over and over",
            crowd=FEW,
        ),
    }


def allow_connections(count: int) -> int:
    """Raise this process's limit of descriptors as far as it may be; how many connections it has room for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 200
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return count if soft == resource.RLIM_INFINITY else min(count, soft - 200)


def run(name: str, target: Address, source: str, connections: int, seed: int, pipe: Connection) -> None:
    """Entry point of the process: attack, and say how it stands whenever asked, until the pipe closes."""
    os.nice(19)
    tally = Tally()
    choose = random.Random(seed)
    kind = kinds(allow_connections(connections))[name]

    def anywhere() -> str:
        return f"127.{choose.randint(1, 250)}.{choose.randint(0, 250)}.{choose.randint(2, 250)}"

    attack = Attack(target, anywhere if kind.is_spread else lambda: source, tally)
    steps = kind.step(attack, choose)
    with contextlib.suppress(EOFError, OSError):
        for _ in steps:
            if pipe.poll():
                pipe.recv()
                pipe.send(tally)


class Attacker:
    """An attack under way, as the test sees it; a context manager."""

    def __init__(self, name: str, target: Address, source: str, connections: int = CONNECTIONS, seed: int = 1) -> None:
        context: Any = multiprocessing.get_context("spawn")
        self._pipe, child = context.Pipe()
        self._process = context.Process(
            target=run, args=(name, target, source, connections, seed, child), name=f"attack: {name}", daemon=True
        )
        self._child = child
        self._name = name

    def __enter__(self) -> Attacker:
        self._process.start()
        self._child.close()
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def tally(self, timeout_seconds: float = 60.0) -> Tally:
        self._pipe.send(None)
        if not self._pipe.poll(timeout_seconds):
            raise TimeoutError(f"{self._name} says nothing")
        tally = self._pipe.recv()
        assert isinstance(tally, Tally)
        return tally
