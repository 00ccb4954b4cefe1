"""Peers that come and go: one decode engine meets hundreds of prefill engines, each for one READ, and what it keeps of
them is counted and judged. `python -m tests.actors.churn --peers 1000` prints the figures; its exit status is 1 when
something was left. With `--tcp` everything goes over TCP.

The decode engine is this process: the production actors, a real NIXL agent, real ZMQ sockets. The prefill engines are
the same, several to a process, and the processes are forked from one that has imported NIXL, which takes seconds. How
the engines of a process come and go is one of `Manner`; READs are under way when some of them die. Nobody tells the
decode engine that one is gone, but for a place in its table that another one needs, and for the time to live of engines
that are not connected any more.

What is counted is what the kernel knows of this process: descriptors, which of them are sockets, threads, and resident
memory; and what the port and the roster hold. Before it is counted nobody is open, and every peer has been forgotten.
All of it must be what it was, but for memory: a pool of an allocator that grows once is no leak. What each peer leaves
behind is seen in every round, so a round that has grown too much is followed by another one.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import enum
import gc
import itertools
import math
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from multiprocessing.connection import Connection

import msgspec
import trio

from connector.config import ConnectorOptions
from connector.ports.nixl import PortCounts
from connector.protocol import PeerAddress
from tests.actors.engines import HOST, Engine, engine, until
from tests.rig.network import free_port
from tests.rig.process import resident_bytes, stop_process

PEERS_PER_PROCESS = 12
PLACES = 30
"""In the table of the decode engine: those of two processes and a half."""
TIME_TO_LIVE_SECONDS = 1.0
WAIT_SECONDS = 240.0
OPTIONS = ConnectorOptions(
    peer_limit=PLACES,
    engine_ttl=TIME_TO_LIVE_SECONDS,
    backoff_initial_seconds=0.02,
    backoff_max_seconds=0.05,
    quiesce_timeout_seconds=2.0,
    kv_lease_duration=120.0,
    request_timeout_seconds=100.0,
)
BLOCK = 7
"""That is read of every peer."""
REST_SECONDS_MAX = 5.0
"""For descriptors and threads that are closed by a thread of somebody else's."""
GROWTH_BYTES_MAX = 16 << 10
"""Of resident memory, for each peer. In the mean of a thousand it was 4 kB, at the beginning up to 13
(docs/performance.md); a peer that is kept whole has more."""
ROUNDS_MAX = 3
ENDS = {"done", "ConnectionRefused", "PeerBackoff", "TransferError", "ControlLinkLost"}


class Manner(enum.Enum):
    """How the engines of a process come, and how they go."""

    LEAVE = "new ones, which are shut down"
    DIE = "new ones, which are killed"
    RESTART = "the same ids at the same addresses as before, killed"
    REPLACE = "new ids at the same addresses as before, killed"
    DIE_IN_THE_MIDDLE = "new ones, which are stopped, read from, and killed"
    LINGER = "new ones, whose workers have ended, and whose listeners answer for them still"

    @property
    def keeps_addresses(self) -> bool:
        return self in (Manner.RESTART, Manner.REPLACE)


class Turn(enum.Enum):
    """What is read of an engine."""

    FIRST = "first"
    LAST = "last"


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """What this process has, and what the decode engine knows."""

    descriptors: int
    sockets: int
    threads: int
    resident_bytes: int
    port: PortCounts
    peers: int


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Of the peers after those that warm everything up.

    Attributes:
        peers: how many were met, in all rounds.
        by_manner: how many of them came and went how, by name of the manner.
        forgotten: how many the decode engine has given up.
        ends: how the requests ended, by kind of failure.
        before, after: what it holds.
        peers_of_a_round: at least so many.
        grown_bytes: resident memory, by round.
    """

    peers: int
    by_manner: dict[str, int]
    forgotten: int
    ends: dict[str, int]
    before: Held
    after: Held
    peers_of_a_round: int
    grown_bytes: tuple[int, ...]

    @property
    def left(self) -> list[str]:
        """What must not be; empty: nothing was left of anybody."""
        before, after = self.before, self.after
        wrong = [
            f"{getattr(after, what)} {what}, not {getattr(before, what)}"
            for what in ("descriptors", "sockets", "threads")
            if getattr(after, what) > getattr(before, what)
        ]
        if (after.peers, after.port.remote_agents, after.port.reads) != (0, 0, 0) or after.port != before.port:
            wrong.append(f"{after.peers} peers, {after.port}, not {before.port}")
        # Those that came back with their id are the same for the decode engine.
        if self.forgotten < self.peers - self.by_manner.get(Manner.RESTART.name, 0):
            wrong.append(f"{self.forgotten} of {self.peers} peers given up")
        if self.ends.get("done", 0) < self.peers - self.by_manner.get(Manner.LINGER.name, 0):
            wrong.append(f"{self.ends.get('done', 0)} READs done with {self.peers} peers")
        wrong += [f"{count} requests ended as {kind}" for kind, count in self.ends.items() if kind not in ENDS]
        if self.has_grown:
            wrong.append(f"memory grew by {self.grown_bytes} bytes, in rounds of {self.peers_of_a_round} peers")
        return wrong

    @property
    def has_grown(self) -> bool:
        """In each round, and by more than what an allocator keeps at hand."""
        return min(self.grown_bytes) > self.peers_of_a_round * GROWTH_BYTES_MAX


class Introduced(msgspec.Struct, frozen=True):
    """A prefill engine, as its process describes it."""

    engine_id: str
    port: int
    life: str


# --- the process of some prefill engines ----------------------------------------------------------------------------

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["nixl._api", "tests.actors.engines"])


def run_engines(to_parent: Connection, engine_ids: list[str], ports: list[int]) -> None:
    """Program of such a process: it serves until its parent closes the pipe. When that says something, its workers end
    first."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # NIXL speaks there
    trio.run(serve, to_parent, engine_ids, ports)


async def serve(to_parent: Connection, engine_ids: list[str], ports: list[int]) -> None:
    async with contextlib.AsyncExitStack() as stack:
        introduced, engines = [], []
        for number, (engine_id, port) in enumerate(zip(engine_ids, ports, strict=True)):
            p = await stack.enter_async_context(engine(engine_id, serves=True, port=port, options=OPTIONS))
            p.memory[:] = 1 + number
            for turn in Turn:
                p.lend(f"{turn.value}-{engine_id}-{p.life}")
            engines.append(p)
            introduced.append(Introduced(engine_id, p.address.port, p.life))
        to_parent.send_bytes(msgspec.json.encode(introduced))
        await trio.lowlevel.wait_readable(to_parent.fileno())
        with contextlib.suppress(EOFError):
            to_parent.recv_bytes()
            for p in engines:
                p.supervisor.stop()
                await p.port.aclose(1.0)
            to_parent.send_bytes(b"")
            await trio.lowlevel.wait_readable(to_parent.fileno())


class Peers:
    """Some prefill engines in a process."""

    def __init__(self, engine_ids: list[str], ports: list[int]) -> None:
        self.engine_ids = engine_ids
        self._pipe, theirs = FORKS.Pipe()
        self.process = FORKS.Process(target=run_engines, args=(theirs, engine_ids, ports), daemon=True)
        self.process.start()
        theirs.close()
        self.introduced: list[Introduced] = []

    async def introduce(self) -> None:
        self.introduced = msgspec.json.decode(await self._said(), type=list[Introduced])

    async def end_workers(self) -> None:
        """Their listeners go on."""
        self._pipe.send_bytes(b"")
        await self._said()

    async def _said(self) -> bytes:
        with trio.fail_after(WAIT_SECONDS):
            await trio.lowlevel.wait_readable(self._pipe.fileno())
        return self._pipe.recv_bytes()

    @property
    def ports(self) -> list[int]:
        return [each.port for each in self.introduced]

    def stop(self) -> None:
        """As a hang does."""
        pid = self.process.pid
        assert pid is not None
        stop_process(pid)

    async def end(self, *, kill: bool) -> None:
        if kill:
            self.process.kill()
        self._pipe.close()
        await trio.lowlevel.wait_readable(self.process.sentinel)
        self.process.join()
        self.process.close()


@contextlib.asynccontextmanager
async def started(engine_ids: list[str], ports: list[int]) -> AsyncIterator[Peers]:
    """They are gone when the block has ended, in which they have to be ended."""
    peers = Peers(engine_ids, ports)
    try:
        await peers.introduce()
        yield peers
    except BaseException:
        with trio.CancelScope(shield=True), contextlib.suppress(ValueError):  # closed already
            await peers.end(kill=True)
        raise


# --- the decode engine ----------------------------------------------------------------------------------------------


async def meet(d: Engine, peers: Peers, manner: Manner, ends: Counter[str]) -> int:
    """One READ of each, all at once; then they go. Returns how many peers were given up meanwhile."""
    waits = manner not in (Manner.DIE_IN_THE_MIDDLE, Manner.LINGER)
    if manner is Manner.DIE_IN_THE_MIDDLE:
        await ask_all(d, peers, Turn.FIRST, ends)
        peers.stop()
    elif manner is Manner.LINGER:
        await peers.end_workers()
    asked = await ask_all(d, peers, Turn.LAST, ends, waits=waits)
    if manner is Manner.LINGER:
        await take_ends(d, asked, ends)
    await peers.end(kill=manner is not Manner.LEAVE)
    if manner is Manner.DIE_IN_THE_MIDDLE:
        await take_ends(d, asked, ends)
    d.events.clear()
    d.failures.clear()
    return _take_forgotten(d)


async def take_ends(d: Engine, request_ids: list[str], ends: Counter[str]) -> None:
    for request_id in request_ids:
        ended = await until(lambda request_id=request_id: d.received(request_id), WAIT_SECONDS)
        ends[ended.failure.kind if ended.failure is not None else "done"] += 1


def _take_forgotten(d: Engine) -> int:
    """How many peers were given up since the last time."""
    count = sum(each.machine == "peer" and each.to_state == "gone" for each in d.trace.records)
    d.trace.records.clear()
    return count


async def ask_all(d: Engine, peers: Peers, turn: Turn, ends: Counter[str], *, waits: bool = True) -> list[str]:
    """Ask each for its block; returns the requests that were not waited for."""
    names = {}
    for number, each in enumerate(peers.introduced):
        request_id = f"{each.engine_id}-{each.life}-{turn.value}"
        names[request_id] = number
        address = PeerAddress(engine_id=each.engine_id, host=HOST, port=each.port, tp_size=1)
        d.memory[:, number] = 0
        d.pull(request_id, address, [number], [BLOCK], remote_request_id=f"{turn.value}-{each.engine_id}-{each.life}")
    if not waits:
        return list(names)
    for request_id, number in names.items():
        ended = await until(lambda request_id=request_id: d.received(request_id), WAIT_SECONDS)
        assert ended.failure is None, ended.failure
        assert (d.blocks([number]) == 1 + number).all()
        ends["done"] += 1
    return []


async def at_rest(d: Engine, before: Held | None = None) -> Held:
    """When the decode engine has forgotten everybody, and holds no more than `before`; or what it does hold."""
    await until(lambda: not d.supervisor._peers, WAIT_SECONDS)
    await trio.sleep(0.2)
    deadline = trio.current_time() + REST_SECONDS_MAX
    while before is not None and _has_more(held(d), before) and trio.current_time() < deadline:
        await trio.sleep(0.1)
    return held(d)


def held(d: Engine) -> Held:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed shows as freed
    return Held(
        descriptors=len(os.listdir("/proc/self/fd")),
        sockets=sum(_is_socket(each) for each in os.listdir("/proc/self/fd")),
        threads=len(os.listdir("/proc/self/task")),
        resident_bytes=resident_bytes(),
        port=d.counts(),
        peers=len(d.supervisor._peers),
    )


def _has_more(now: Held, before: Held) -> bool:
    return now.descriptors > before.descriptors or now.sockets > before.sockets or now.threads > before.threads


def _is_socket(descriptor: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:")
    except FileNotFoundError:
        return False


def free_ports(count: int) -> list[int]:
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return sorted(ports)


class Churn:
    """One decode engine, and peers that come and go one process after another, in all manners in turns."""

    def __init__(self, d: Engine) -> None:
        self.met = self.forgotten = 0
        self.by_manner: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self._d = d
        self._manners = itertools.cycle(Manner)
        self._numbers = itertools.count()
        self._last: Peers | None = None

    async def next_process(self) -> None:
        manner = next(self._manners)
        new_ids = [f"p{next(self._numbers)}" for _ in range(PEERS_PER_PROCESS)]
        last = self._last
        assert last is not None or not manner.keeps_addresses
        ports = last.ports if last is not None and manner.keeps_addresses else free_ports(len(new_ids))
        ids = last.engine_ids if last is not None and manner is Manner.RESTART else new_ids
        async with started(ids, ports) as self._last:
            self.forgotten += await meet(self._d, self._last, manner, self.ends)
        self.met += PEERS_PER_PROCESS
        self.by_manner[manner.name] += PEERS_PER_PROCESS

    async def rest(self, before: Held | None = None) -> Held:
        seen = await at_rest(self._d, before)
        self.forgotten += _take_forgotten(self._d)
        return seen

    def forget(self) -> None:
        """Count from here on."""
        self.met = self.forgotten = 0
        self.by_manner.clear()
        self.ends.clear()


async def churn(peers: int, *, say: Callable[[str], None] = lambda line: None) -> Figures:
    """Meet so many, after one process of each manner that warms everything up; as often again as memory has grown."""
    async with engine("d", options=OPTIONS) as d:
        churned = Churn(d)
        for _ in Manner:
            await churned.next_process()
        before = after = await churned.rest()
        say(f"at first {before}")
        churned.forget()
        grown_bytes: tuple[int, ...] = ()
        while True:
            start = after
            for number in range(1, math.ceil(peers / PEERS_PER_PROCESS) + 1):
                await churned.next_process()
                if number % (2 * len(Manner)) == 0:
                    say(f"{churned.met:6} {await churned.rest(before)}")
            after = await churned.rest(before)
            grown_bytes += (after.resident_bytes - start.resident_bytes,)
            figures = Figures(
                peers=churned.met,
                by_manner=churned.by_manner,
                forgotten=churned.forgotten,
                ends=churned.ends,
                before=before,
                after=after,
                peers_of_a_round=peers,
                grown_bytes=grown_bytes,
            )
            if not figures.has_grown or len(grown_bytes) == ROUNDS_MAX:
                return figures


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.actors.churn", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--peers", type=int, default=1000)
    parser.add_argument("--tcp", action="store_true", help="over TCP instead of what UCX prefers here")
    arguments = parser.parse_args()
    if arguments.tcp:
        os.environ["UCX_TLS"] = "tcp,self"  # also of the processes that are started from here on

    def say(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    figures = trio.run(lambda: churn(arguments.peers, say=say))
    say(f"{figures.peers} peers, {figures.forgotten} given up, {figures.ends}")
    say(f"before {figures.before}")
    say(f"after  {figures.after}")
    say(f"memory {', '.join(f'{each / arguments.peers:+.0f}' for each in figures.grown_bytes)} bytes a peer")
    for each in figures.left:
        say(f"LEFT: {each}")
    return 1 if figures.left else 0


if __name__ == "__main__":
    sys.exit(main())
