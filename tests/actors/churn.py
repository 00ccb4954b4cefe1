"""Peers that come and go: one decode engine meets hundreds of prefill engines, each for one READ, and what it keeps of
them is counted. `python -m tests.actors.churn --peers 1000` prints the figures.

The decode engine is this process: the production actors, a real NIXL agent, real ZMQ sockets. The prefill engines are
the same, several to a process, since a process costs seconds and an agent costs milliseconds. How the engines of a
process come and go is one of `Manner`; READs are under way when some of them die. Nobody tells the decode engine that
one is gone, but for a place in its table that another one needs, and for the time to live of engines that are not
connected any more.

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
import json
import os
import resource
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import trio

from connector.config import ConnectorOptions
from connector.ports.nixl import PortCounts
from connector.protocol import PeerAddress
from tests.actors.engines import HOST, Engine, engine, until

ROOT = Path(__file__).parents[2]
PEERS_PER_PROCESS = 10
PLACES = 25
"""In the table of the decode engine: those of two processes and a half."""
TIME_TO_LIVE_SECONDS = 1.0
WAIT_SECONDS = 60.0
OPTIONS = ConnectorOptions(
    peer_limit=PLACES,
    engine_ttl=TIME_TO_LIVE_SECONDS,
    backoff_initial_seconds=0.02,
    backoff_max_seconds=0.05,
    quiesce_timeout_seconds=2.0,
    kv_lease_duration=3.0,
    request_timeout_seconds=20.0,
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


@dataclass(frozen=True, kw_only=True)
class Held:
    """What this process has, and what the decode engine knows."""

    descriptors: int
    sockets: int
    threads: int
    resident_bytes: int
    port: PortCounts
    peers: int


@dataclass(kw_only=True)
class Figures:
    """`ends`: how the requests ended, by kind of failure; `before`: after the first processes, which warm everything
    up."""

    peers: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    before: Held
    after: Held


class Introduced(msgspec.Struct, frozen=True):
    """A prefill engine, as its process describes it."""

    engine_id: str
    port: int
    life: str


# --- the process of some prefill engines ----------------------------------------------------------------------------


async def serve(engine_ids: list[str], ports: list[int]) -> None:
    """Until standard input ends."""
    async with contextlib.AsyncExitStack() as stack:
        said = []
        for number, (engine_id, port) in enumerate(zip(engine_ids, ports, strict=True)):
            p = await stack.enter_async_context(engine(engine_id, serves=True, port=port, options=OPTIONS))
            p.memory[:] = 1 + number
            for turn in Turn:
                p.lend(f"{turn.value}-{engine_id}-{p.life}")
            said.append(Introduced(engine_id, p.address.port, p.life))
        sys.stdout.write("@" + msgspec.json.encode(said).decode() + "\n")
        sys.stdout.flush()
        async with trio.lowlevel.FdStream(os.dup(sys.stdin.fileno())) as orders:
            async for _ in orders:
                pass


class Peers:
    """Some prefill engines in a process."""

    def __init__(self, process: trio.Process, introduced: list[Introduced]) -> None:
        self.process = process
        self.introduced = introduced

    @property
    def engine_ids(self) -> list[str]:
        return [each.engine_id for each in self.introduced]

    @property
    def ports(self) -> list[int]:
        return [each.port for each in self.introduced]

    async def stop(self) -> None:
        """As a hang does; every thread of it has stopped."""
        self.process.send_signal(signal.SIGSTOP)
        while os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOHANG) is None:
            await trio.sleep(0.001)

    async def end(self, *, kill: bool) -> None:
        assert self.process.stdin is not None
        if kill:
            self.process.kill()
        await self.process.stdin.aclose()
        await self.process.wait()
        assert self.process.stdout is not None
        await self.process.stdout.aclose()


async def start(engine_ids: list[str], ports: list[int]) -> Peers:
    process = await trio.lowlevel.open_process(
        [sys.executable, "-m", "tests.actors.churn", "--serve", json.dumps([engine_ids, ports])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    assert process.stdout is not None
    said = b""
    with trio.fail_after(WAIT_SECONDS):
        while not (line := said.rpartition(b"@")[2]).endswith(b"\n") or b"@" not in said:
            chunk = await process.stdout.receive_some()
            assert chunk, "the process of the prefill engines ended"
            said += chunk
    return Peers(process, msgspec.json.decode(line, type=list[Introduced]))


@contextlib.asynccontextmanager
async def started(engine_ids: list[str], ports: list[int]) -> AsyncIterator[Peers]:
    """They are gone at the end, whatever happens."""
    peers = await start(engine_ids, ports)
    try:
        yield peers
    finally:
        if peers.process.returncode is None:
            with trio.CancelScope(shield=True):
                await peers.end(kill=True)


# --- the decode engine ----------------------------------------------------------------------------------------------


async def meet(d: Engine, peers: Peers, manner: Manner, ends: Counter[str]) -> None:
    """One READ of each, all at once; then they go."""
    if manner is Manner.DIE_IN_THE_MIDDLE:
        await ask_all(d, peers, Turn.FIRST, ends)
        await peers.stop()
    waited = await ask_all(d, peers, Turn.LAST, ends, waits=manner is not Manner.DIE_IN_THE_MIDDLE)
    await peers.end(kill=manner is not Manner.LEAVE)
    for request_id in waited:
        ended = await until(lambda request_id=request_id: d.received(request_id), WAIT_SECONDS)
        ends[ended.failure.kind if ended.failure is not None else "done"] += 1
    d.outcomes.clear()
    d.trace.records.clear()
    d.failures.clear()


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


async def churn(
    peers: int, *, warm_up_processes: int = len(Manner), say: Callable[[str], None] = lambda line: None
) -> Figures:
    """Meet so many, after those of the processes that warm everything up."""
    ends: Counter[str] = Counter()
    numbers = itertools.count()
    async with engine("d", options=OPTIONS) as d:
        last: Peers | None = None
        before: Held | None = None
        met = 0
        for process, manner in enumerate(itertools.cycle(Manner)):
            if process == warm_up_processes:
                before = await at_rest(d)
                say(f"at first {before}")
                ends.clear()
            if before is not None and met >= peers:
                break
            new_ids = [f"p{next(numbers)}" for _ in range(PEERS_PER_PROCESS)]
            assert last is not None or not manner.keeps_addresses
            ports = last.ports if last is not None and manner.keeps_addresses else [0] * PEERS_PER_PROCESS
            ids = last.engine_ids if last is not None and manner is Manner.RESTART else new_ids
            async with started(ids, ports) as last:
                await meet(d, last, manner, ends)
            if before is not None:
                met += PEERS_PER_PROCESS
                if met % (PEERS_PER_PROCESS * 2 * len(Manner)) == 0:
                    say(f"{met:6} {await at_rest(d)}")
        assert before is not None
        return Figures(peers=met, ends=ends, before=before, after=await at_rest(d))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.actors.churn", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--peers", type=int, default=1000)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        trio.run(serve, *json.loads(arguments.serve))
        os._exit(0)

    def say(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    figures = trio.run(lambda: churn(arguments.peers, say=say))
    say(f"{figures.peers} peers, {dict(figures.ends)}")
    say(f"before {figures.before}")
    say(f"after  {figures.after}")
    say(f"memory {(figures.after.resident_bytes - figures.before.resident_bytes) / figures.peers:+.0f} bytes a peer")


if __name__ == "__main__":
    main()
