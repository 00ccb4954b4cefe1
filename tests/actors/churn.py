"""Peers that come and go: one decode engine meets hundreds of prefill engines, each for one READ, and what it keeps of
them is counted. `python -m tests.actors.churn --peers 1000` prints the figures.

The decode engine is this process: the production actors, a real NIXL agent, real ZMQ sockets. The prefill engines are
the same, several to a process, and the processes are forked from one that has imported NIXL, which takes seconds. How
the engines of a process come and go is one of `Manner`; READs are under way when some of them die. Nobody tells the
decode engine that one is gone, but for a place in its table that another one needs, and for the time to live of engines
that are not connected any more.

What is counted is what the kernel knows of this process: descriptors, which of them are sockets, threads, and resident
memory; and what the port and the roster hold. Before it is counted nobody is open, and every peer has been forgotten.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import enum
import gc
import itertools
import multiprocessing
import os
import resource
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import trio

from connector.config import ConnectorOptions
from connector.ports.nixl import PortCounts
from connector.protocol import PeerAddress
from tests.actors.engines import HOST, Engine, engine, until
from tests.rig.network import free_port

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


class Manner(enum.Enum):
    """How the engines of a process come, and how they go."""

    LEAVE = "new ones, which are shut down"
    DIE = "new ones, which are killed"
    RESTART = "the same ids at the same addresses as before, killed"
    REPLACE = "new ids at the same addresses as before, killed"
    DIE_IN_THE_MIDDLE = "new ones, which are stopped, read from, and killed"

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
        peers: how many were met.
        forgotten: how many the decode engine has given up.
        ends: how the requests ended, by kind of failure.
        before, after: what it holds.
    """

    peers: int
    forgotten: int
    ends: dict[str, int]
    before: Held
    after: Held


class Introduced(msgspec.Struct, frozen=True):
    """A prefill engine, as its process describes it."""

    engine_id: str
    port: int
    life: str


# --- the process of some prefill engines ----------------------------------------------------------------------------

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["nixl._api", "tests.actors.engines"])


def run_engines(to_parent: Connection, engine_ids: list[str], ports: list[int]) -> None:
    """Program of such a process: it serves until its parent closes the pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # NIXL speaks there
    trio.run(serve, to_parent, engine_ids, ports)


async def serve(to_parent: Connection, engine_ids: list[str], ports: list[int]) -> None:
    async with contextlib.AsyncExitStack() as stack:
        introduced = []
        for number, (engine_id, port) in enumerate(zip(engine_ids, ports, strict=True)):
            p = await stack.enter_async_context(engine(engine_id, serves=True, port=port, options=OPTIONS))
            p.memory[:] = 1 + number
            for turn in Turn:
                p.lend(f"{turn.value}-{engine_id}-{p.life}")
            introduced.append(Introduced(engine_id, p.address.port, p.life))
        to_parent.send_bytes(msgspec.json.encode(introduced))
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
        with trio.fail_after(WAIT_SECONDS):
            await trio.lowlevel.wait_readable(self._pipe.fileno())
        self.introduced = msgspec.json.decode(self._pipe.recv_bytes(), type=list[Introduced])

    @property
    def ports(self) -> list[int]:
        return [each.port for each in self.introduced]

    async def stop(self) -> None:
        """As a hang does; every thread of it has stopped."""
        pid = self.process.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        threads = Path(f"/proc/{pid}/task")
        while any(_state_of(thread) != "T" for thread in threads.iterdir()):
            await trio.sleep(0.001)

    async def end(self, *, kill: bool) -> None:
        if kill:
            self.process.kill()
        self._pipe.close()
        await trio.lowlevel.wait_readable(self.process.sentinel)
        self.process.join()
        self.process.close()


def _state_of(thread: Path) -> str:
    return (thread / "stat").read_text().rpartition(")")[2].split()[0]


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
    if manner is Manner.DIE_IN_THE_MIDDLE:
        await ask_all(d, peers, Turn.FIRST, ends)
        await peers.stop()
    waited = await ask_all(d, peers, Turn.LAST, ends, waits=manner is not Manner.DIE_IN_THE_MIDDLE)
    await peers.end(kill=manner is not Manner.LEAVE)
    for request_id in waited:
        ended = await until(lambda request_id=request_id: d.received(request_id), WAIT_SECONDS)
        ends[ended.failure.kind if ended.failure is not None else "done"] += 1
    d.outcomes.clear()
    d.failures.clear()
    return _take_forgotten(d)


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


async def at_rest(d: Engine) -> Held:
    """When the decode engine has forgotten everybody."""
    await until(lambda: not d.supervisor._peers, WAIT_SECONDS)
    await trio.sleep(0.2)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed shows as freed
    return Held(
        descriptors=len(os.listdir("/proc/self/fd")),
        sockets=sum(_is_socket(each) for each in os.listdir("/proc/self/fd")),
        threads=len(os.listdir("/proc/self/task")),
        resident_bytes=int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize(),
        port=d.counts(),
        peers=len(d.supervisor._peers),
    )


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


async def churn(
    peers: int,
    *,
    warm_up_processes: int = len(Manner),
    say: Callable[[str], None] = lambda line: None,
) -> Figures:
    """Meet so many, after those of the processes that warm everything up."""
    ends: Counter[str] = Counter()
    numbers = itertools.count()
    async with engine("d", options=OPTIONS) as d:
        last: Peers | None = None
        before: Held | None = None
        met = forgotten = 0
        for process, manner in enumerate(itertools.cycle(Manner)):
            if process == warm_up_processes:
                before = await at_rest(d)
                say(f"at first {before}")
                _take_forgotten(d)
                forgotten = 0
                ends.clear()
            if before is not None and met >= peers:
                break
            new_ids = [f"p{next(numbers)}" for _ in range(PEERS_PER_PROCESS)]
            assert last is not None or not manner.keeps_addresses
            ports = last.ports if last is not None and manner.keeps_addresses else free_ports(len(new_ids))
            ids = last.engine_ids if last is not None and manner is Manner.RESTART else new_ids
            async with started(ids, ports) as last:
                forgotten += await meet(d, last, manner, ends)
            if before is not None:
                met += PEERS_PER_PROCESS
                if met % (PEERS_PER_PROCESS * 2 * len(Manner)) == 0:
                    say(f"{met:6} {await at_rest(d)}")
        assert before is not None
        after = await at_rest(d)
        forgotten += _take_forgotten(d)
        return Figures(peers=met, forgotten=forgotten, ends=ends, before=before, after=after)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.actors.churn", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--peers", type=int, default=1000)
    parser.add_argument("--json", action="store_true", help="print nothing but the figures, as JSON")
    arguments = parser.parse_args()

    def say(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    if arguments.json:
        figures = trio.run(lambda: churn(arguments.peers, warm_up_processes=1))
        say("@" + msgspec.json.encode(figures).decode())
        return
    figures = trio.run(lambda: churn(arguments.peers, say=say))
    say(f"{figures.peers} peers, {figures.forgotten} given up, {figures.ends}")
    say(f"before {figures.before}")
    say(f"after  {figures.after}")
    say(f"memory {(figures.after.resident_bytes - figures.before.resident_bytes) / figures.peers:+.0f} bytes a peer")


if __name__ == "__main__":
    main()
