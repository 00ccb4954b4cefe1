"""The real NIXL port: the contract's suite over UCX, and what only a real agent and a real thread can show."""

from __future__ import annotations

import atexit
import base64
import codecs
import contextlib
import gc
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from connector.clock import BootClock
from connector.observe import hang_notice
from connector.ports.nixl import (
    AgentName,
    MemoryRange,
    MemoryRun,
    NixlCallFailed,
    NixlEvent,
    NixlPort,
    PortCounts,
    PortReadEnded,
    ReadHandle,
)
from connector.ports.nixl_agent import RealNixlPort
from connector.ports.nixl_agent import core as agent_core
from connector.ports.nixl_agent import port as agent_port
from connector.ports.nixl_agent import thread as agent_thread
from connector.ports.nixl_agent.looks import IN_TURN_MAX, OLDEST_MAX
from connector.ports.nixl_agent.metadata import UCX_ADDRESS_VERSION_KNOWN, MetadataUnreadable
from tests.conformance.nixl_suite import (
    BLOCK_BYTES,
    BLOCKS,
    NixlPortSuite,
    NixlWorld,
    Peer,
    Reader,
    Recorder,
    new_memory,
    new_reader,
    pattern,
    read_in_flight,
    reader_and_peer,
    reader_and_source,
    whole,
)
from tests.conformance.ucx import dropped, in_version, of_memory_type, unwritten
from tests.rig.process import stop_process
from tests.unit.log_lines import Lines, listening

ROOT = Path(__file__).parents[2]
STEPWISE_TRANSPORTS = "tcp,self"
"""UCX without shared memory: a READ then needs the peer's help, so a paused peer holds it up."""


@contextmanager
def transports(stepwise: bool) -> Iterator[dict[str, str]]:
    """The environment of agents made inside (UCX reads it when an agent is made)."""
    before = os.environ.pop("UCX_TLS", None)
    if stepwise:
        os.environ["UCX_TLS"] = STEPWISE_TRANSPORTS
    try:
        yield dict(os.environ)
    finally:
        os.environ.pop("UCX_TLS", None)
        if before is not None:
            os.environ["UCX_TLS"] = before


class ProcessPeer(Peer):
    """`nixl_peer` in a process."""

    def __init__(self, process: trio.Process) -> None:
        self._process = process
        self._pending = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    async def introduce(self) -> None:
        said = await self._hear()
        self.metadata = base64.b64decode(said["metadata"])
        self.run = MemoryRun(said["address"], BLOCK_BYTES, BLOCK_BYTES, BLOCKS)

    async def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        while True:
            line, newline, rest = self._pending.partition(b"\n")
            if not newline:
                chunk = await self._process.stdout.receive_some()
                assert chunk, "the peer process ended"
                self._pending += chunk
                continue
            self._pending = rest
            if line.startswith(b"@"):
                return json.loads(line[1:])

    async def _order(self, **order: object) -> dict[str, Any]:
        assert self._process.stdin is not None
        await self._process.stdin.send_all(json.dumps(order).encode() + b"\n")
        return await self._hear()

    async def pause(self) -> None:
        stop_process(self._process.pid)

    async def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    async def kill(self) -> None:
        self._process.kill()
        await self._process.wait()

    async def lose_block(self, block: int) -> None:
        assert (await self._order(do="lose", block=block))["lost"]

    async def notifications(self) -> list[tuple[AgentName, bytes]]:
        said = await self._order(do="notifications")
        return [(sender, base64.b64decode(message)) for sender, message in said["notifications"]]

    async def notify(self, metadata: bytes, message: bytes) -> None:
        given = {"metadata": metadata, "message": message}
        await self._order(do="notify", **{name: base64.b64encode(value).decode() for name, value in given.items()})


class RealWorld(NixlWorld):
    def __init__(self, backends: tuple[str, ...] = ("UCX",)) -> None:
        self.backends = backends
        self.ports: list[RealNixlPort] = []
        self.processes: list[trio.Process] = []

    async def open_port(
        self, ranges: Sequence[MemoryRange], *, stepwise: bool = False, agent_name: AgentName | None = None
    ) -> NixlPort:
        with transports(stepwise):
            port = RealNixlPort.open(agent_name or f"port-{uuid.uuid4()}", ranges, self.backends)
        self.ports.append(port)
        return port

    async def open_peer(self, *, stepwise: bool) -> Peer:
        with transports(stepwise) as environment:
            process = await trio.lowlevel.open_process(
                [sys.executable, "-m", "tests.conformance.nixl_peer", *self.backends],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=ROOT,
                env=environment,
            )
        self.processes.append(process)
        peer = ProcessPeer(process)
        await peer.introduce()
        return peer

    async def forget_agent(self, port: NixlPort, name: AgentName) -> None:
        assert isinstance(port, RealNixlPort)
        await port._call("forget_agent", lambda core: core._agent.remove_remote_agent(name))

    async def fail_next_read_early(self, port: NixlPort) -> None:
        fail_one_check(port)

    async def lose_listener(self, port: NixlPort) -> None:
        assert isinstance(port, RealNixlPort)
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), port._core.listeners[0].descriptor)

    async def break_port(self, port: NixlPort) -> None:
        assert isinstance(port, RealNixlPort)
        port._core.poll_notifications = _fail  # type: ignore[method-assign]

    async def end(self) -> None:
        with trio.CancelScope(shield=True):
            for port in self.ports:
                await port.aclose(0)
            for process in self.processes:
                process.kill()
                await process.wait()
                for pipe in (process.stdin, process.stdout):
                    if pipe is not None:
                        await pipe.aclose()


def _fail(*_: object) -> list[NixlEvent]:
    raise RuntimeError("broken on purpose")


class FaultyAgent:
    """A NIXL agent that does what it is told to by `faults`, and all else as the real one does."""

    def __init__(self, agent: Any, **faults: Callable[..., object]) -> None:
        self.agent = agent
        self.faults = faults

    def __getattr__(self, name: str) -> Any:
        return self.faults.get(name) or getattr(self.agent, name)


def inject(port: NixlPort, **faults: Callable[..., object]) -> Any:
    """Put faults before the agent of a port; returns the agent behind them."""
    assert isinstance(port, RealNixlPort)
    agent = port._core._agent
    port._core._agent = FaultyAgent(agent, **faults)
    return agent


def fail_one_check(port: NixlPort) -> None:
    """The first READ that is found in flight is reported as failed, as UCX does when one request of it fails."""
    failing: list[Any] = []

    def check(transfer: Any) -> Any:
        state = agent.check_xfer_state(transfer)
        if state == "PROC" and not failing:
            failing.append(transfer)
        if transfer in failing:
            raise RuntimeError("one request failed, on purpose")
        return state

    agent = inject(port, check_xfer_state=check)


class Held:
    """Has NIXL call all READs of a port in flight until they are let go, and counts what is asked about them.

    Attributes:
        looks: how often NIXL was asked for the state of a READ, in each look.
        looks_at_post: how many there had been at each post.
        found: the look in which the end of a READ was found, counted from 1.
    """

    def __init__(self, port: NixlPort) -> None:
        assert isinstance(port, RealNixlPort)
        self.looks: list[int] = []
        self.looks_at_post: list[int] = []
        self.found: dict[ReadHandle, int] = {}
        self._port = port
        self._asked = 0
        self._done: list[Any] = []
        self._failed: list[Any] = []
        self._agent = inject(port, transfer=self._transfer, check_xfer_state=self._check)
        self._poll_reads = port._core.poll_reads
        port._core.poll_reads = self._look  # type: ignore[method-assign]

    def _transfer(self, transfer: Any) -> str:
        self.looks_at_post.append(len(self.looks))
        self._agent.transfer(transfer)
        return "PROC"

    def _check(self, transfer: Any) -> Any:
        self._asked += 1
        if any(transfer is each for each in self._failed):
            raise RuntimeError("a request failed, on purpose")
        return self._agent.check_xfer_state(transfer) if any(transfer is each for each in self._done) else "PROC"

    def _look(self) -> list[NixlEvent]:
        asked = self._asked
        events = self._poll_reads()
        self.looks.append(self._asked - asked)
        self.found |= {event.handle: len(self.looks) for event in events if isinstance(event, PortReadEnded)}
        return events

    async def let_go(self, done: Sequence[ReadHandle], failed: Sequence[ReadHandle] = ()) -> int:
        """Between two looks; returns how many there were so far."""

        def let_go(core: agent_core.AgentCore) -> int:
            for handle in done:
                self._done += [core.reads[handle].transfer, core.reads[handle].probe]
            self._failed += [core.reads[handle].transfer for handle in failed]
            return len(self.looks)

        looks: int = await self._port._call("let_go", let_go)
        return looks


@asynccontextmanager
async def real_world() -> AsyncIterator[RealWorld]:
    world = RealWorld()
    try:
        yield world
    finally:
        await world.end()


IDLE_ATTEMPTS = 4


class TestRealNixlPort(NixlPortSuite):
    def world(self) -> AbstractAsyncContextManager[NixlWorld]:
        return real_world()

    # What only a real thread can show

    def test_the_agent_is_called_from_one_thread_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Every call into NIXL of a port's life, and the end of every NIXL handle, in whatever way it comes about."""
        gc.collect()  # what other tests have left is none of its business
        callers: dict[str, set[int]] = {}
        bindings = agent_core._import_nixl("nixl")

        def watched(name: str, original: Callable[..., object]) -> Callable[..., object]:
            def call(self: object, *args: object, **kwargs: object) -> object:
                callers.setdefault(name, set()).add(threading.get_ident())
                return original(self, *args, **kwargs)

            return call

        for kind in (bindings.nixl_agent, bindings.nixl_xfer_handle, bindings.nixl_prepped_dlist_handle):
            for name in ("__init__", "__del__", "release", *(n for n in vars(kind) if not n.startswith("_"))):
                original = vars(kind).get(name)
                if callable(original) and not isinstance(original, staticmethod):
                    monkeypatch.setattr(kind, name, watched(f"{kind.__name__}.{name}", original))

        async def scenario(world: NixlWorld) -> None:
            reader, *_ = await reader_and_source(world)
            with pytest.raises(NixlCallFailed) as failed:
                await reader.post([0], [BLOCKS])
            del failed
            await reader.recorder.done(await reader.post([0], [0]))

        self.run(scenario)
        gc.collect()
        assert callers.keys() >= {
            "nixl_agent.__init__",
            "nixl_xfer_handle.__del__",
            "nixl_prepped_dlist_handle.__del__",
        }
        assert threading.get_ident() not in set().union(*callers.values())
        assert max(len(threads) for threads in callers.values()) == 2  # two ports, a thread each

    @pytest.mark.parametrize(("descriptors", "posts"), [(1, 1), (64, 2)], ids=["single", "with a probe"])
    def test_what_stands_between_an_order_and_its_end(
        self, descriptors: int, posts: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each call of NIXL may be a wait for the interpreter. Before the end of a READ is told there are those that
        post it and its probe, however many descriptors it has; it is measured and released after that."""
        said: list[str] = []
        bindings = agent_core._import_nixl("nixl")

        def watched(name: str) -> Callable[..., object]:
            original = getattr(bindings.nixl_agent, name)

            def call(*args: object, **kwargs: object) -> object:
                said.append(name)
                return original(*args, **kwargs)

            return call

        for name in ("make_prepped_xfer", "transfer", "get_xfer_telemetry", "release_xfer_handle"):
            monkeypatch.setattr(bindings.nixl_agent, name, watched(name))
        deliver = RealNixlPort._deliver

        def deliver_noted(port: RealNixlPort, items: Sequence[object]) -> None:
            said.extend(type(item).__name__ for item in items)
            deliver(port, items)

        monkeypatch.setattr(RealNixlPort, "_deliver", deliver_noted)

        async def scenario(world: NixlWorld) -> None:
            reader, *_ = await reader_and_source(world)
            ids = list(range(descriptors))
            await reader.recorder.done(await reader.post(ids, ids))
            await reader.recorder.until(lambda: "ReadMeasured" in said)
            said.clear()
            await reader.recorder.done(await reader.post(ids, ids))
            await reader.recorder.until(lambda: "ReadMeasured" in said)

        self.run(scenario)
        told = said.index("PortReadEnded")
        waited_for = [name for name in said[:told] if name != "ReadPosted"]
        assert sorted(waited_for) == ["make_prepped_xfer"] * posts + ["transfer"] * posts
        afterwards = said[told + 1 : said.index("ReadMeasured")]
        assert afterwards == ["get_xfer_telemetry"] + ["release_xfer_handle"] * posts

    def test_a_queue_of_slow_calls_does_not_hide_the_end_of_a_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Posting may take 30 ms, and many posts may queue up: READs are looked at between any two of them. Here there
        are always some more until the end is told, however long the thread of the other agent takes over the READ."""

        async def scenario(world: NixlWorld) -> None:
            memory, run = new_memory()
            source = await world.open_port(whole(memory), stepwise=True)
            source.expect_notifications(True)
            reader = await new_reader(world, stepwise=True)
            await reader.connect(source.agent_metadata, run)
            assert isinstance(reader.port, RealNixlPort)
            monkeypatch.setattr(reader.port._core, "send_notification", lambda *_: time.sleep(0.03))
            returned_ns: list[int] = []
            is_told = False

            async def slow_calls() -> None:
                while not is_told:
                    await reader.port.send_notification(source.agent_name, b"")
                    returned_ns.append(BootClock().now_ns())

            await reader.recorder.end_of(await reader.post([0], [0]))
            async with trio.open_nursery() as nursery:
                for _ in range(5):
                    nursery.start_soon(slow_calls)
                await trio.testing.wait_all_tasks_blocked()
                nursery.start_soon(reader.post, range(BLOCKS), range(BLOCKS))
                await trio.testing.wait_all_tasks_blocked()  # the READ is queued before the calls that follow
                for _ in range(30):
                    nursery.start_soon(slow_calls)
                with trio.fail_after(30):
                    await reader.recorder.until(lambda: len(reader.recorder.ends()) == 2)
                is_told = True
            _, end = reader.recorder.ends().values()
            assert end.ended_ns < returned_ns[-15]

        self.run(scenario)

    # The first READ from a peer

    @pytest.mark.parametrize("stepwise", [False, True], ids=["copies", "tcp"])
    def test_the_connection_is_made_before_anybody_reads(self, stepwise: bool) -> None:
        """By a READ of the port's own, which nobody is told of."""

        async def scenario(world: NixlWorld) -> None:
            reader, peer = await reader_and_peer(world, stepwise=stepwise)
            assert isinstance(reader.port, RealNixlPort)
            core = reader.port._core
            while core.first_reads:
                await trio.sleep(0.001)
            assert bytes(core._scratch_owner) == pattern(0)[: agent_core.PROBE_BYTES]
            await reader.port.prepare_remote(reader.peer_name, [peer.run])
            assert not core.first_reads, "one for each peer"
            assert reader.recorder.events == []
            assert reader.port.counts().reads == 0
            assert reader.untouched(range(BLOCKS))

        self.run(scenario)

    def test_an_engine_whose_ports_drop_everything_holds_up_nobody(self) -> None:
        """As behind a firewall."""

        async def scenario(world: NixlWorld) -> None:
            reader, _ = await reader_and_peer(world, stepwise=True)
            behind = await world.open_peer(stepwise=True)
            assert isinstance(behind, ProcessPeer)
            with contextlib.ExitStack() as firewall:
                metadata = firewall.enter_context(dropped(behind.pid, behind.metadata))

                async def let_it_fail() -> None:
                    await trio.sleep(10.0)
                    firewall.close()

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(let_it_fail)  # the kernel alone would try for two minutes
                    name = await reader.port.add_remote_agent(metadata)
                    await reader.port.prepare_remote(name, [behind.run])
                    await reader.recorder.done(await reader.post([1], [2]))
                    with trio.move_on_after(0.2) as waited:
                        await reader.port.reach(name)
                    assert waited.cancelled_caught
                    await reader.port.remove_remote_agent(name)
                    nursery.cancel_scope.cancel()
            assert reader.port.counts().remote_agents == 1

        self.run(scenario)

    def test_many_peers_that_hang_before_their_first_read_leave_the_thread_its_pauses(self) -> None:
        """As behind a firewall that drops what goes to the ports of UCX. Looking at many READs takes long, and is no
        progress: without pauses the thread would take a core, and the interpreter from the engine."""

        async def scenario(world: NixlWorld) -> None:
            peer = await world.open_peer(stepwise=True)
            reader = await new_reader(world, stepwise=True)
            assert isinstance(reader.port, RealNixlPort)
            core, thread = reader.port._core, reader.port._thread
            await peer.pause()
            await reader.connect(peer.metadata, peer.run)
            (transfer,) = core.first_reads.values()

            async def turns_beside(others: int) -> int:
                """The most in a third of a second: in another one the machine may have stood still."""
                core.first_reads.update((f"other {number}", transfer) for number in range(others))
                turns = [thread.turns]
                for _ in range(3):
                    await trio.sleep(1 / 3)
                    turns.append(thread.turns)
                for number in range(others):
                    del core.first_reads[f"other {number}"]
                return max(after - before for before, after in itertools.pairwise(turns))

            await trio.sleep(0.5)  # it does not pause for a while after it has connected
            one = await turns_beside(0)
            assert await turns_beside(31) < 5 * one
            await reader.port.remove_remote_agent(reader.peer_name)
            await peer.resume()

        self.run(scenario)

    @pytest.mark.parametrize("ends", ["removed", "closed"])
    def test_a_peer_that_hangs_before_its_first_read_keeps_nobody(self, ends: str) -> None:
        async def scenario(world: NixlWorld) -> None:
            peer = await world.open_peer(stepwise=True)
            reader = await new_reader(world, stepwise=True)
            assert isinstance(reader.port, RealNixlPort)
            core = reader.port._core
            await peer.pause()
            await reader.connect(peer.metadata, peer.run)
            assert core.first_reads
            assert reader.port.counts().reads == 0
            if ends == "closed":
                assert await reader.port.aclose(5.0) == []
                return
            await reader.port.remove_remote_agent(reader.peer_name)
            assert reader.port.counts().remote_agents == 0
            assert not core.first_reads
            await peer.resume()
            await reader.connect(peer.metadata, peer.run)
            await reader.recorder.done(await reader.post([1], [1]))
            assert reader.holds([1], [1])

        self.run(scenario)

    def test_a_first_read_that_fails_is_nobodys_failure(self, monkeypatch: pytest.MonkeyPatch) -> None:
        bindings = agent_core._import_nixl("nixl")

        def fail(*arguments: object) -> object:
            raise bindings.nixlBind.nixlRemoteDisconnectError("injected")

        async def scenario(world: NixlWorld) -> None:
            memory, run = new_memory()
            source = await world.open_port(whole(memory))
            reader = await new_reader(world)
            with monkeypatch.context() as patched:
                patched.setattr(bindings.nixl_agent, "transfer", fail)
                await reader.connect(source.agent_metadata, run)
            assert reader.recorder.events == []
            await reader.recorder.done(await reader.post([0], [0]))

        self.run(scenario)

    def test_a_peer_that_cannot_be_loaded_for_want_of_a_descriptor(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def scenario(world: NixlWorld) -> None:
            reader = await new_reader(world)
            inject(reader.port, add_remote_agent=_fail)
            for is_left in (True, False):
                monkeypatch.setattr(agent_core, "is_descriptor_left", partial(bool, is_left))
                with pytest.raises(NixlCallFailed, match="broken on purpose") as failed:
                    await reader.port.add_remote_agent(reader.port.agent_metadata)
                assert failed.value.no_descriptor_left is not is_left

        self.run(scenario)

    def test_an_agent_that_nobody_reads_from_does_without_its_listeners(self) -> None:
        async def scenario(world: NixlWorld) -> None:
            memory, _ = new_memory()
            port = RealNixlPort.open(f"port-{uuid.uuid4()}", whole(memory), is_read_from=False)
            recorder = Recorder(port)
            await world.lose_listener(port)
            await trio.sleep(2 * agent_port.LOOKED_AT_SECONDS)
            assert recorder.events == []
            await port.aclose(0)

        self.run(scenario)

    # Many READs in flight

    @pytest.mark.parametrize("reads", [64, 2048])
    def test_what_posting_costs_does_not_grow_with_the_reads_in_flight(self, reads: int) -> None:
        async def scenario(world: NixlWorld) -> None:
            reader, *_ = await reader_and_source(world)
            port = reader.port
            assert isinstance(port, RealNixlPort)
            await reader.recorder.done(await reader.post([0], [0]))
            held = Held(port)
            gate = threading.Event()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(port._call, "wait", lambda _: _wait(gate))
                await trio.testing.wait_all_tasks_blocked()
                handles = [reader.order([number % BLOCKS], [number % BLOCKS]) for number in range(reads)]
                gate.set()
            await reader.begun(handles[-1])
            assert max(np.diff(held.looks_at_post)) <= 1, "a look for each post, while orders wait"
            looks = len(held.looks)
            await reader.post([0], [0])
            while len(held.looks) < looks + 2 * reads // IN_TURN_MAX:
                await trio.sleep(0.001)
            # The READs of one agent stand in two lines at most, each of which has an oldest one.
            assert max(held.looks) in (1 + IN_TURN_MAX, 2 + IN_TURN_MAX)
            assert port.counts().reads == reads + 1
            await held.let_go(handles)
            await reader.recorder.until(lambda: len(reader.recorder.ends()) == 1 + reads)
            assert port.counts().reads == 1

        self.run(scenario)

    def test_an_end_out_of_order_and_a_failure_are_found_among_many_reads(self) -> None:
        async def scenario(world: NixlWorld) -> None:
            reader, *_ = await reader_and_source(world)
            await reader.recorder.done(await reader.post([0], [0]))
            held = Held(reader.port)
            handles = [reader.order([number % BLOCKS], [number % BLOCKS]) for number in range(2048)]
            await reader.begun(handles[-1])
            before = await held.let_go([handles[700]], failed=[handles[1500]])
            await reader.recorder.done(handles[700])
            await reader.recorder.failed(handles[1500], quiescent=True)
            assert held.found.keys() == {handles[700], handles[1500]}
            assert max(held.found.values()) <= before + 2048 // IN_TURN_MAX

        self.run(scenario)

    def test_a_peer_that_hangs_does_not_hide_the_ends_of_other_reads(self) -> None:
        """Nor do the probes of READs hide those that were posted later."""

        async def scenario(world: NixlWorld) -> None:
            reader, _, _, memory = await reader_and_source(world)
            other = await world.open_port(whole(memory))
            name = await reader.port.add_remote_agent(other.agent_metadata)
            run = MemoryRun(memory.ctypes.data, BLOCK_BYTES, BLOCK_BYTES, BLOCKS)
            remote = await reader.port.prepare_remote(name, [run])
            one, two = np.array([0], np.int32), np.array([0, 2], np.int32)
            await reader.recorder.done(await reader.post([0], [0]))
            await reader.recorder.done(await reader.begun(reader.order_between(reader.local, two, remote, two)))
            held = Held(reader.port)
            hang = [reader.order_between(reader.local, one, reader.remote, one) for _ in range(2048)]
            of_other = [reader.order_between(reader.local, two, remote, two) for _ in range(2 * OLDEST_MAX)]
            await reader.begun(of_other[-1])
            before = await held.let_go(of_other)
            for handle in of_other:
                await reader.recorder.done(handle)
            # Each is asked about twice, at the side of one of those that hang.
            assert max(held.found.values()) <= before + 2 * (2 + 1)
            assert not held.found.keys() & set(hang)

        self.run(scenario)

    # Metadata that would end the process

    def test_a_ucx_address_of_an_unknown_version_is_never_given_to_nixl(self) -> None:
        """docs/nixl.md fact 37. What is handed over is loaded as ever."""

        async def scenario(world: NixlWorld) -> None:
            reader, peer = await new_reader(world), await world.open_peer(stepwise=True)
            given: list[bytes] = []

            def add_remote_agent(metadata: bytes) -> object:
                given.append(metadata)
                return agent.add_remote_agent(metadata) if metadata == peer.metadata else b"harmless"

            agent = inject(reader.port, add_remote_agent=add_remote_agent)
            for version in range(UCX_ADDRESS_VERSION_KNOWN + 1, 16):
                with pytest.raises(NixlCallFailed, match=f"its UCX address is of version {version}"):
                    await reader.port.add_remote_agent(in_version(peer.metadata, version))
            for number in (6, 1 << 31):
                with pytest.raises(NixlCallFailed, match=f"its memory is of type {number}"):
                    await reader.port.add_remote_agent(of_memory_type(peer.metadata, number))
            for changed in unwritten(peer.metadata).values():
                with pytest.raises(NixlCallFailed, match="its metadata are not as NIXL writes them"):
                    await reader.port.add_remote_agent(changed)
            assert not given
            assert reader.port.counts().remote_agents == 0
            await reader.port.add_remote_agent(peer.metadata)
            assert given == [peer.metadata]

        self.run(scenario)

    def test_where_nixl_writes_other_metadata_they_are_left_to_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def unreadable(metadata: bytes) -> None:
            raise MetadataUnreadable

        monkeypatch.setattr("connector.ports.nixl_agent.core.ucx_version", unreadable)

        async def scenario(world: NixlWorld) -> None:
            reader, _ = await reader_and_peer(world, stepwise=True)
            await reader.recorder.done(await reader.post([0], [0]))

        self.run(scenario)

    # Errors that only a faulty agent has

    def test_a_post_that_raises_after_it_has_posted_counts_as_posted(self) -> None:
        async def scenario(world: NixlWorld) -> None:
            reader, peer = await reader_and_peer(world, stepwise=True)
            await reader.recorder.done(await reader.post([0], [0]))
            reader.memory[:] = 0
            await peer.pause()

            def transfer(*args: Any) -> object:
                agent.transfer(*args)
                raise RuntimeError("posting failed half way, on purpose")

            agent = inject(reader.port, transfer=transfer)
            several = await reader.post(range(BLOCKS - 1), range(BLOCKS - 1))
            single = await reader.post([BLOCKS - 1], [BLOCKS - 1])
            await trio.sleep(0.2)
            assert len(reader.recorder.ends()) == 1, "only the first one has ended"
            assert reader.port.counts() == PortCounts(1, 2, 2, 1)
            await peer.resume()
            for handle, quiescent in ((several, False), (single, True)):
                end = await reader.recorder.failed(handle, quiescent=quiescent)
                assert "on purpose" in (end.error or "")
            assert reader.holds(range(BLOCKS), range(BLOCKS))

        self.run(scenario)

    def test_a_post_that_raises_before_it_has_posted_ends_with_its_error(self) -> None:
        async def scenario(world: NixlWorld) -> None:
            reader, *_ = await reader_and_source(world)
            inject(reader.port, transfer=_fail)
            for blocks, quiescent in (([1], True), ([3, 5], False)):
                end = await reader.recorder.failed(await reader.post(blocks, blocks), quiescent=quiescent)
                assert end.error == "RuntimeError: broken on purpose"
            assert reader.port.counts() == PortCounts(1, 2, 1, 1, errored_reads=1)
            assert reader.untouched(range(BLOCKS))

        self.run(scenario)

    def test_what_nixl_will_not_release_is_kept_to_the_end(self) -> None:
        async def scenario(world: NixlWorld) -> None:
            reader, peer = await reader_and_peer(world, stepwise=True)
            await reader.recorder.done(await reader.post([0], [0]))
            inject(reader.port, release_xfer_handle=_fail)
            await reader.recorder.done(await reader.post([1, 3], [1, 3]))  # what NIXL calls done is done
            assert reader.port.counts() == PortCounts(1, 2, 0, 1)
            await peer.pause()
            handles = [await reader.post(blocks, blocks) for blocks in ([4, 6], [8])]
            await peer.kill()
            for handle in handles:
                await reader.recorder.failed(handle, quiescent=False)
            await reader.port.remove_remote_agent(reader.peer_name)
            assert reader.port.counts() == PortCounts(0, 2, 2, 1, errored_reads=2)
            assert sorted(await reader.port.aclose(10)) == handles

        self.run(scenario)

    def test_a_removal_that_nixl_refuses_takes_no_end_of_a_read_with_it(self, caplog: pytest.LogCaptureFixture) -> None:
        """The removal waits for a READ, so it comes with the READ's end."""

        async def scenario(world: NixlWorld) -> None:
            reader, *_ = await reader_and_source(world)
            await reader.recorder.done(await reader.post([0], [0]))
            held = Held(reader.port)
            done, failed = reader.order([1, 3], [1, 3]), reader.order([4], [4])
            await reader.begun(failed)
            await reader.port.remove_remote_agent(reader.peer_name)
            inject(reader.port, remove_remote_agent=_fail)
            await held.let_go([done], failed=[failed])
            for handle in (done, failed):
                await reader.recorder.end_of(handle)
            await reader.port._call("tidied", lambda _: None)  # which is done before the next call
            assert reader.port.counts().remote_agents == 0

        self.run(scenario)
        assert "NIXL keeps agent" in caplog.text

    # Names that are not UTF-8

    def test_a_sender_whose_name_is_not_utf8_costs_one_poll(self, caplog: pytest.LogCaptureFixture) -> None:
        """Its first notification takes down with it what came at the same moment; from then on nothing is lost."""
        before = codecs.lookup_error("strict")
        nameless_name = r"name\xff\xfe"

        async def scenario(world: NixlWorld) -> None:
            reader, source, recorder, _ = await reader_and_source(world)
            nameless = nameless_agent()
            nameless.add_remote_agent(source.agent_metadata)
            nameless.send_notif(source.agent_name, b"lost")
            while source.counts().notification_polls_lost == 0:
                nameless.get_new_notifs()  # makes its side progress
                await trio.sleep(0.01)
            assert recorder.notifications() == []
            for turn in range(20):
                nameless.send_notif(source.agent_name, b"%d" % turn)
                await reader.port.send_notification(source.agent_name, b"%d" % turn)
            while len(recorder.notifications()) < 40:
                nameless.get_new_notifs()
                await trio.sleep(0.01)
            for name in (nameless_name, reader.port.agent_name):
                received = [message for sender, message in recorder.notifications() if sender == name]
                assert received == [b"%d" % turn for turn in range(20)]
            assert source.counts().notification_polls_lost == 1
            with pytest.raises(UnicodeDecodeError):  # everybody else is as strict as before
                b"\xff".decode()
            agents = source.counts().remote_agents
            with pytest.raises(NixlCallFailed, match="not UTF-8"):
                await source.add_remote_agent(nameless.get_agent_metadata())
            assert source.counts().remote_agents == agents

        try:
            self.run(scenario)
        finally:
            codecs.register_error("strict", before)
        assert caplog.text.count("is not UTF-8") == 1

    # What it costs, and how it ends

    def test_an_idle_port_costs_almost_nothing(self) -> None:
        async def scenario(world: NixlWorld) -> None:
            reader = await new_reader(world)
            assert isinstance(reader.port, RealNixlPort)
            thread = reader.port._thread
            turns = []
            for _ in range(IDLE_ATTEMPTS):
                await trio.sleep(1)
                before = thread.turns
                await trio.sleep(3)
                turns.append(thread.turns - before)
                # Two of them for each pause, and thirty more each time that the machine makes an empty poll look like
                # work. A busy one does so again and again, so it is looked at more than once.
                if turns[-1] < 10 * 3 / agent_thread.PAUSE_IDLE_SECONDS_MAX:
                    break
            else:
                pytest.fail(f"an idle port's thread took {turns} turns in three seconds each")
            await reader.port.aclose(0)

        self.run(scenario)

    def test_ports_leave_no_threads_and_no_descriptors(self) -> None:
        def held() -> tuple[int, int]:
            return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

        def open_and_close() -> None:
            async def scenario(world: NixlWorld) -> None:
                reader, *_ = await reader_and_source(world)
                await reader.recorder.end_of(await reader.post([0], [0]))

            self.run(scenario)

        open_and_close()
        threads, descriptors = held()
        for _ in range(5):
            open_and_close()
        deadline = time.monotonic() + 10
        while (now := held())[0] > threads or now[1] > descriptors:  # other threads may be ending, too
            assert time.monotonic() < deadline, f"{now} now, {threads, descriptors} before"
            time.sleep(0.01)

    def test_opening_fails_with_the_reason(self) -> None:
        memory, _ = new_memory()
        with pytest.raises(NixlCallFailed) as failed:
            RealNixlPort.open("x", whole(memory), backends=("NO_SUCH_BACKEND",))
        assert failed.value.operation == "open"
        assert "NO_SUCH_BACKEND" in failed.value.error
        with pytest.raises(NixlCallFailed) as failed:
            RealNixlPort.open("x", [MemoryRange(-1, 4096)])
        assert failed.value.error

        def no_device() -> None:
            raise RuntimeError("no such device")

        with pytest.raises(NixlCallFailed, match="no such device"):
            RealNixlPort.open("x", whole(memory), prepare_thread=no_device)
        assert not _threads_named("nixl-x")

    def test_opening_is_bounded_and_a_late_agent_is_taken_apart(self, monkeypatch: pytest.MonkeyPatch) -> None:
        memory, _ = new_memory()
        release = threading.Event()
        monkeypatch.setattr(agent_thread, "OPEN_PROGRESS_SECONDS", 0.05)
        waited: list[float] = []
        with pytest.raises(NixlCallFailed, match=r"within 2 s"):
            RealNixlPort.open(
                "late",
                whole(memory),
                prepare_thread=lambda: _wait(release),
                timeout_seconds=2.0,  # so long that a pause of this process is not all of it
                on_wait=waited.append,
            )
        assert waited == sorted(waited)
        assert 1 <= len(waited) <= 40
        (thread,) = _threads_named("nixl-late")
        release.set()
        thread.join(30)
        assert not thread.is_alive()

    def test_threads_of_ucx_are_not_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What one of them could not read, in the middle of a READ, nobody would notice (docs/nixl.md fact 32)."""
        monkeypatch.setattr(RealNixlPort, "open", partial(RealNixlPort.open, num_threads=1))

        async def scenario(world: NixlWorld) -> None:
            reader, peer = await reader_and_peer(world, stepwise=False)
            many = [0, 2] * 1000  # so many that NIXL hands them to a thread; no two of them are neighbours
            await reader.recorder.done(await reader.post(many, many))
            await peer.lose_block(33)
            blocks = [*many, 33, *many]
            end = await reader.recorder.failed(await reader.post(blocks, blocks), quiescent=False)
            assert end.transport_lost

        self.run(scenario)

    @pytest.mark.parametrize(
        ("backends", "num_threads", "mode"),
        [
            (("POSIX",), 2, "NIXL_THREAD_SYNC_RW"),
            (("POSIX",), 0, "NIXL_THREAD_SYNC_NONE"),
            (("UCX",), 2, "NIXL_THREAD_SYNC_NONE"),
        ],
        ids=["threads of another back end", "no threads", "threads of UCX"],
    )
    def test_an_agent_that_threads_of_its_back_end_use_too_is_guarded(
        self, backends: tuple[str, ...], num_threads: int, mode: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Scenario 79, for back ends whose threads are used: two threads in an agent that guards nothing are the end of
        the process. POSIX is the only other one that can be made on any machine: it moves nothing between engines, so
        that it is refused once there is an agent."""
        binding, modes = agent_core._import_nixl("nixl").nixlBind, []
        make = binding.nixlAgent

        def noted(name: str, config: Any) -> object:
            modes.append(config.syncMode.name)
            return make(name, config)

        monkeypatch.setattr(binding, "nixlAgent", noted)
        memory, _ = new_memory()
        with suppress(NixlCallFailed):
            RealNixlPort.open("guarded", whole(memory), backends=backends, num_threads=num_threads).close_blocking(30)
        assert modes == [mode]

    def test_a_pinned_thread_does_not_pin_the_agent(self) -> None:
        if len(os.sched_getaffinity(os.getppid())) == 1:
            pytest.skip("the parent process may use one CPU only")
        seen: list[set[int]] = []

        def open_pinned() -> None:
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
            port = RealNixlPort.open("pinned", [], prepare_thread=lambda: seen.append(os.sched_getaffinity(0)))
            port.close_blocking(30)

        thread = threading.Thread(target=open_pinned)
        thread.start()
        thread.join(60)
        assert seen == [os.sched_getaffinity(os.getppid())]

    def test_closing_without_a_trio_run(self) -> None:
        memory, _ = new_memory()
        never_attached = RealNixlPort.open("never", whole(memory))
        assert never_attached.close_blocking(30) == []
        assert not _threads_named("nixl-never")
        orphan = RealNixlPort.open("orphan", whole(memory))

        async def main() -> None:
            Recorder(orphan)
            await orphan.prepare_local([MemoryRun(memory.ctypes.data, BLOCK_BYTES, BLOCK_BYTES, BLOCKS)])

        trio.run(main)
        assert orphan.close_blocking(30) == []
        assert not _threads_named("nixl-orphan")

    def test_memory_is_kept_until_the_port_is_closed_and_no_longer(self) -> None:
        memory, _ = new_memory()
        port = RealNixlPort.open("keeper", whole(memory), owner=memory)
        kept = weakref.ref(memory)
        del memory
        gc.collect()
        assert kept() is not None
        assert port.close_blocking(30) == []
        gc.collect()
        assert kept() is None

    def test_memory_is_kept_with_an_agent_that_cannot_be_destroyed(self) -> None:
        """Nobody knows what an agent that broke still does."""
        memory, _ = new_memory()
        port = RealNixlPort.open("broken", whole(memory), owner=memory)
        kept = weakref.ref(memory)
        port._core.poll_notifications = _fail  # type: ignore[method-assign]
        port.expect_notifications(True)
        port._thread.join(30)
        assert port._thread.ended
        del memory, port
        gc.collect()
        assert kept() is not None

    def test_a_flood_of_notifications_waits_inside_nixl(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """While nobody takes the events, few are taken out of NIXL; none is lost, and all come once somebody does."""
        monkeypatch.setattr(agent_thread, "UNDELIVERED_EVENTS_MAX", 5)

        async def scenario(world: NixlWorld) -> None:
            reader = await new_reader(world)
            flooded = await world.open_port([])
            assert isinstance(flooded, RealNixlPort)
            flooded.expect_notifications(True)
            name = await reader.port.add_remote_agent(flooded.agent_metadata)
            await flooded.release_descriptor_list(1)  # ties it to this run, without a callback
            for number in range(30):
                await reader.port.send_notification(name, b"%d" % number)
                await trio.sleep(0.02)
            assert flooded._backlog() < 30
            recorder = Recorder(flooded)
            await recorder.until(lambda: len(recorder.notifications()) == 30)
            assert [message for _, message in recorder.notifications()] == [b"%d" % n for n in range(30)]

        self.run(scenario)

    def test_a_call_that_does_not_return_is_said_once_and_so_is_that_it_has(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(agent_port, "LOOKED_AT_SECONDS", 0.02)
        gate = threading.Event()

        async def said(lines: Lines, count: int) -> list[str]:
            with trio.fail_after(30):
                while len(texts := [text for text in lines.texts if "NIXL" in text]) < count:
                    await trio.sleep(0.01)
            return texts

        async def scenario(world: NixlWorld) -> None:
            reader = await new_reader(world)
            port = reader.port
            assert isinstance(port, RealNixlPort)
            with listening() as lines:
                await trio.sleep(0.2)
                assert not await said(lines, 0)
                monkeypatch.setattr(hang_notice, "HANGS_SECONDS", 0.2)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(port._call, "stuck", lambda _: _wait(gate))
                    (hangs,) = await said(lines, 1)
                    assert "has not returned from a call" in hangs
                    assert f"`py-spy dump --pid {os.getpid()}`" in hangs
                    assert f"nixl-{port.agent_name}"[:64] in hangs
                    await trio.sleep(0.3)
                    assert await said(lines, 1) == [hangs]
                    assert port.counts().lag_seconds == port.lag_seconds >= 0.2
                    gate.set()
                assert "go on, after" in (await said(lines, 2))[1]
                with trio.fail_after(30):  # one that is looked at so often may be late again for a moment
                    while port.counts().lag_seconds:
                        await trio.sleep(0.01)

        self.run(scenario)

    def test_a_read_that_was_ordered_while_nixl_hung_is_not_posted_after_the_port_was_closed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hangs, gate = threading.Event(), threading.Event()

        async def scenario(world: NixlWorld) -> None:
            reader, *_ = await reader_and_source(world)
            assert isinstance(reader.port, RealNixlPort)
            core = reader.port._core

            poll = core.poll_reads

            def hang() -> list[Any]:
                core.poll_reads = poll  # type: ignore[method-assign]
                hangs.set()
                _wait(gate)
                return poll()

            core.poll_reads = hang  # type: ignore[method-assign]
            while not hangs.is_set():
                await trio.sleep(0.01)
            handle = reader.order([1, 2], [3, 4])
            monkeypatch.setattr(agent_port, "TEARDOWN_SECONDS_MAX", 0.2)
            assert await reader.port.aclose(0) == []
            gate.set()
            with trio.fail_after(10):  # of one that was posted nobody hears the end
                assert not (await reader.recorder.end_of(handle)).was_posted
            assert reader.untouched(range(BLOCKS))

        self.run(scenario)

    def test_a_callback_that_raises_breaks_nothing(self, caplog: pytest.LogCaptureFixture) -> None:
        async def scenario(world: NixlWorld) -> None:
            reader, source, *_ = await reader_and_source(world)
            seen: list[object] = []

            def faulty(event: object) -> None:
                seen.append(event)
                raise RuntimeError("a bug of the caller")

            source.set_event_callback(faulty)
            for turn in range(3):
                await reader.port.send_notification(source.agent_name, b"%d" % turn)
            while len(seen) < 3:
                await trio.sleep(0.01)

        self.run(scenario)
        assert "a bug of the caller" in caplog.text

    @pytest.mark.parametrize("how", ["forgotten", "abandoned"])
    def test_the_process_ends_well_with_a_port_that(self, how: str) -> None:
        """Nobody closed the port, or a READ had to be left in flight: neither may crash or hang the end."""
        with transports(stepwise=True) as environment:
            said_at_its_end(how, environment=environment)

    def test_a_hangup_that_nohup_has_a_process_ignore_is_ignored(self) -> None:
        """UCX would take the signal, and log each of its steps from then on."""
        assert "DEBUG" not in said_at_its_end("hung_up", "nohup")


def said_at_its_end(program: str, *before: str, environment: Mapping[str, str] | None = None) -> str:
    """All that one of the programs below has written, when it has ended well."""
    command = f"from tests.conformance.test_nixl_agent import {program}; {program}()"
    ended = subprocess.run(
        [*before, sys.executable, "-c", command],
        cwd=ROOT,
        env=environment,
        timeout=250,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    assert "reached the end" in ended.stdout
    return ended.stdout + ended.stderr


def forgotten() -> None:
    """Program: leave a port open. Its thread must be over before the interpreter takes itself apart."""

    def look() -> None:
        if not _threads_named("nixl-forgotten"):
            sys.stdout.write("reached the end\n")

    atexit.register(look)  # runs after what is registered later
    memory, _ = new_memory()
    port = RealNixlPort.open("forgotten", whole(memory))
    port.expect_notifications(True)
    globals()["kept"] = port, memory


def abandoned() -> None:
    """Program: close a port while a READ from a paused peer is in flight. Its agent must live on, with the READ and the
    memory that this may write into, although nobody else keeps it."""

    async def main() -> tuple[weakref.ref[agent_core.AgentCore], weakref.ref[object]]:
        async with real_world() as world:
            peer = await world.open_peer(stepwise=True)
            memory, run = new_memory()
            port = RealNixlPort.open("abandoned", whole(memory), owner=memory)
            reader = Reader(port, memory, run)
            await reader.connect(peer.metadata, peer.run)
            handle = await read_in_flight(reader, peer)
            assert await port.aclose(0) == [handle]
            return weakref.ref(port._core), weakref.ref(memory)

    core_kept, memory_kept = trio.run(main)
    gc.collect()
    core = core_kept()
    assert core is not None
    assert len(core.reads) == core.registered_ranges == 1
    assert memory_kept() is not None
    sys.stdout.write("reached the end\n")


def hung_up() -> None:
    """Program: the terminal that it was started from goes away while it has a port."""
    memory, _ = new_memory()
    port = RealNixlPort.open("hung-up", whole(memory))
    os.kill(os.getpid(), signal.SIGHUP)
    port.close_blocking(30)
    sys.stdout.write("reached the end\n")


def _wait(event: threading.Event) -> None:
    assert event.wait(30)


def nameless_agent() -> Any:
    """A bare NIXL agent whose name is not UTF-8."""
    bindings = agent_core._import_nixl("nixl")
    config = bindings.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
    return bindings.nixl_agent(b"name\xff\xfe", config)


def _threads_named(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]
