"""Many handshakes at once: how long they take, and what the engine's steps pay for them.

`python -m tests.bench.bench_handshakes` starts one process with real agents, listeners and control sockets of up to 72
ranks, and meets them from a worker's actors (supervisor, real agent, real sockets) in this process. Beside that the
main thread plays the engine: a step computes in Python for 5 ms, or sleeps for 5 ms.

Models
  paged     80 layers of attention, 8 KV heads, pages of 64 KiB or 16 KiB; D's rank and P's are of 8
  opaque    250 regions of latent caches whose blocks are not looked into, as in DeepSeek models
  stages    one engine of 8 ranks in each of 9 pipeline stages (72 ranks), 80 layers of attention; D has one rank

Layers lie in allocations of their own, which every rank has at other addresses.

First table: what the first handshake with an engine computes, alone on a quiet thread. Second table, for each number of
engines that are met at once
  met       from the first command until the last of them is connected
  step      median, 99th percentile and longest, before and during the handshakes
  lost      what all steps during the handshakes took longer than the median before
  turn      processor time of the longest turn of the actors' loop, with the name of its task: nothing else of the loop
            runs meanwhile. Only where a step sleeps, because to measure it takes time of its own
  call      the same of the NIXL calls, which release the interpreter

All times are in milliseconds. The switch interval is what the connector sets while transfers are open.

What it does not show: a network, an engine that does something real, agents with connections to a network card.
"""

from __future__ import annotations

import argparse
import gc
import mmap
import statistics
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import trio

from connector.clock import BootClock
from connector.config import ConnectorOptions
from connector.layout.geometry import RankId, RankLayout
from connector.layout.local import LocalRank
from connector.layout.remote import layout_from_metadata
from connector.layout.shapes import LayerShape
from connector.observe.event_log import EventLog
from connector.ports.nixl import MemoryRange
from connector.ports.nixl_agent import RealNixlPort
from connector.ports.nixl_agent.core import AgentCore
from connector.ports.zmq_bridge import ZmqSideChannel
from connector.protocol import Command, PeerAddress, TrackLease
from connector.runtime.context import WorkerContext
from connector.runtime.figures import Figures
from connector.runtime.listener import HandshakeListener
from connector.runtime.recorder import Recorder
from connector.runtime.supervisor import Supervisor
from connector.runtime.thread import ActorThread
from connector.wire.control import (
    REQUEST_BYTES_MAX,
    HeldLease,
    Hold,
    HoldAnswer,
    Released,
    decode_request,
    encode_answer,
)
from connector.wire.handshake import decode_reply, encode_reply
from connector.wire.inspection import EngineFacts
from connector.worker.switch_interval import SwitchInterval
from statemachine.failures import Failure
from statemachine.lease import LeaseName
from statemachine.trace import TransitionRecord
from tests.bench.source import other_process, tell
from tests.rig.facts import LEAVE_SECRET, NO_IDENTITY, payload_of
from tests.rig.layouts import attention_rank, attention_shapes, latent_shapes, plan_engine

HOST = "127.0.0.1"
AGENTS = 72
BLOCKS = 256
MAPS = 250
MAP_BYTES = BLOCKS * (512 << 10)
"""Room for the largest page: all heads of 128 tokens."""
STEP_SECONDS = 0.005
QUIET_STEPS = 200
MEET_SECONDS_MAX = 120.0
LEASE_NS = 30_000_000_000


@dataclass(frozen=True)
class Model:
    """What both sides run, and how they are split.

    Attributes:
        tokens: of a block.
        tp_size, stages: of each prefill engine.
        decode_tp_size: the decode rank is the first of so many.
        meetings: how many engines are met at once.
    """

    name: str
    shapes: dict[str, LayerShape]
    tokens: int
    tp_size: int
    stages: int
    decode_tp_size: int
    meetings: tuple[int, ...]

    @property
    def ranks(self) -> list[RankId]:
        """Those of an engine that the decode rank deals with."""
        return [RankId(stage, rank) for stage in range(self.stages) for rank in range(self.ranks_of_stage)]

    @property
    def ranks_of_stage(self) -> int:
        return self.tp_size // self.decode_tp_size

    def layout(self, engine_id: str, rank: RankId, tp_size: int, addresses: Sequence[int]) -> RankLayout:
        """Its layers at `addresses`, in turn; a decode engine has one stage."""
        stages = self.stages if engine_id != "decode" else 1
        names = np.array_split(list(self.shapes), stages)[rank.pp_rank]
        layout = attention_rank(
            engine_id,
            {str(name): self.shapes[str(name)] for name in names},
            address=1,
            blocks=BLOCKS,
            tokens=self.tokens,
            pp_rank=rank.pp_rank,
            tp_rank=rank.tp_rank,
            tp_size=tp_size,
        )
        regions = (
            msgspec.structs.replace(region, base_address=address)
            for region, address in zip(layout.regions, addresses, strict=False)
        )
        return msgspec.structs.replace(layout, regions=tuple(regions))


def _opaque() -> dict[str, LayerShape]:
    shapes = latent_shapes(layers=MAPS, bytes_per_token=1152)
    return {name: msgspec.structs.replace(shape, whole_blocks=True) for name, shape in shapes.items()}


_PAGED = attention_shapes(layers=80, heads=8, head_bytes=512)
MODELS = (
    Model("paged, 64 KiB", _PAGED, 128, 8, 1, 8, (1, 8, 32, 72)),
    Model("paged, 16 KiB", _PAGED, 32, 8, 1, 8, (72,)),
    Model("opaque", _opaque(), 56, 1, 1, 1, (1, 32, 72)),
    Model("stages", _PAGED, 64, 8, 9, 1, (1,)),
)


class Memory:
    """Address space for every layer. Nothing of it is touched."""

    def __init__(self) -> None:
        self._maps = [mmap.mmap(-1, MAP_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(MAPS)]
        self.addresses: list[int] = [np.frombuffer(each, np.uint8).ctypes.data for each in self._maps]
        self.ranges = [MemoryRange(address, MAP_BYTES) for address in self.addresses]

    def turned(self, number: int) -> list[int]:
        """The same addresses in another order for each rank."""
        first = number % MAPS
        return self.addresses[first:] + self.addresses[:first]


# --- the prefill engines ----------------------------------------------------------------------------------------------


def payloads(
    model: Model, engine: int, memory: Memory, agents: Sequence[bytes], control_port: int
) -> dict[RankId, bytes]:
    """What the listener of one engine answers; `agents` are NIXL's metadata, those of its ranks first."""
    life, found = uuid.uuid4().hex, {}
    for number, rank in enumerate(model.ranks):
        layout = model.layout(f"{model.name} {engine}", rank, model.tp_size, memory.turned(engine + 17 * number))
        found[rank] = payload_of(
            layout,
            agents[number],
            compatibility_hash="hash",
            life=life,
            control_host=HOST,
            control_port=control_port,
            stages=model.stages,
        )
    return found


async def serve() -> None:
    """The other process: says where its engines listen, and goes on until it is killed."""
    memory = Memory()
    agents = [RealNixlPort.open(f"prefill-{n}-{uuid.uuid4()}", memory.ranges) for n in range(AGENTS)]
    metadata = [agent.agent_metadata for agent in agents]
    side_channel = ZmqSideChannel()
    control = side_channel.listen(HOST, 0, frame_bytes_max=REQUEST_BYTES_MAX)
    ports: dict[str, list[int]] = {}
    async with trio.open_nursery() as nursery:
        for model in MODELS:
            ports[model.name] = []
            for engine in range(max(model.meetings)):
                of_engine = metadata if model.stages > 1 else metadata[engine:]
                listener = HandshakeListener(
                    side_channel=side_channel,
                    host=HOST,
                    port=0,
                    payloads=payloads(model, engine, memory, of_engine, control.port),
                    perf_counter=time.perf_counter,
                    log_bad_frame=print,
                    log_cut_off=lambda address, why: None,
                    log_crash=print,
                )
                await nursery.start(listener.run)
                ports[model.name].append(listener.port)
        tell(ports)
        while True:
            asked = await control.receive()
            request = decode_request(asked.frames_untrusted)
            if isinstance(request, Hold):
                held = tuple(HeldLease(*lease, LEASE_NS) for lease in request.leases)
                answer: HoldAnswer | Released = HoldAnswer(sent_ns=request.sent_ns, held=held)
            else:
                answer = Released(leases=request.leases)
            control.reply(asked.reply_address, encode_answer(answer))


# --- the decode rank --------------------------------------------------------------------------------------------------


class Turns(trio.abc.Instrument):
    """Processor time of each turn of the actors' loop, in seconds, with the name of its task."""

    def __init__(self) -> None:
        self.found: list[tuple[float, str]] = []
        self._began = 0.0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._began = time.thread_time()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self.found.append((time.thread_time() - self._began, task.name))


class MeteredPort(RealNixlPort):
    """A real agent; `calls` has the processor time of each call on its thread."""

    calls: list[tuple[float, str]]

    async def _call(self, operation: str, call: Callable[[AgentCore], Any]) -> Any:
        """Called for whatever is asked of the agent's thread."""

        def metered(core: AgentCore) -> Any:
            began = time.thread_time()
            try:
                return call(core)
            finally:
                self.calls.append((time.thread_time() - began, operation))

        return await super()._call(operation, metered)


@dataclass
class Connected:
    """A trace sink that waits for peers to be connected."""

    wanted: int
    ready: threading.Event = field(default_factory=threading.Event)
    failures: list[str] = field(default_factory=list)
    count: int = 0

    def write(self, *records: TransitionRecord) -> None:
        peers = [record for record in records if record.machine == "peer"]
        self.count += sum(record.to_state == "ready" != record.from_state for record in peers)
        self.failures += [record.detail for record in peers if record.detail]
        if self.count == self.wanted or self.failures:
            self.ready.set()

    def close(self) -> None:
        return


@dataclass
class Decode:
    """A decode rank's actors in their thread."""

    thread: ActorThread[Command]
    connected: Connected
    turns: Turns | None
    calls: list[tuple[float, str]]


@contextmanager
def decode_rank(model: Model, memory: Memory, wanted: int, *, is_metered: bool) -> Iterator[Decode]:
    """The actors of a worker that knows nobody yet, and waits for `wanted` engines."""
    layout = model.layout("decode", RankId(0, 0), model.decode_tp_size, memory.addresses)
    local = LocalRank(layout=layout, shapes=model.shapes, compatibility_hash="hash", identity=NO_IDENTITY)
    port = MeteredPort.open(f"decode-{uuid.uuid4()}", memory.ranges)
    assert isinstance(port, MeteredPort)
    port.calls = []

    def log_failure(subject: str, failure: Failure) -> None:
        connected.failures.append(str(failure))

    connected, turns, clock = Connected(wanted), Turns() if is_metered else None, BootClock()

    async def make() -> Supervisor:
        if turns is not None:
            trio.lowlevel.add_instrument(turns)
        side_channel = ZmqSideChannel()
        context = WorkerContext(
            options=ConnectorOptions(handshake_timeout_seconds=60.0),
            local=local,
            draw_name=lambda: uuid.uuid4().hex,
            nixl_port=port,
            side_channel=side_channel,
            clock=clock,
            recorder=Recorder(engine_id="decode", rank=0, role="kv_consumer", clock=clock, sink=connected),
            figures=Figures(),
            emit=lambda event: None,
            log_failure=log_failure,
            log_crash=lambda name, error: connected.failures.append(f"{name}: {error!r}"),
            event_log=EventLog("decode", 0, clock=clock, log_failure=log_failure),
        )
        return Supervisor(
            context,
            control=side_channel.listen(HOST, 0),
            leave_secret=LEAVE_SECRET,
            deliver_posted=lambda: None,
            facts=EngineFacts(),
        )

    thread: ActorThread[Command] = ActorThread("actors", make, lambda error: connected.failures.append(repr(error)))
    thread.start()
    try:
        yield Decode(thread, connected, turns, port.calls)
    finally:
        thread.stop(30.0)


# --- the engine -------------------------------------------------------------------------------------------------------


def _compute(turns: int) -> int:
    total = 0
    for number in range(turns):
        total += number & 7
    return total


def _turns_of_a_step() -> int:
    """So many turns of `_compute` take STEP_SECONDS when nobody disturbs."""
    began = time.perf_counter()
    _compute(1_000_000)
    first = time.perf_counter() - began
    seconds = [first]
    for _ in range(10):
        began = time.perf_counter()
        _compute(1_000_000)
        seconds.append(time.perf_counter() - began)
    return round(1_000_000 * STEP_SECONDS / min(seconds))


def _steps(step: Callable[[], object], is_over: Callable[[int], bool]) -> list[float]:
    """Milliseconds of each step, until it is over."""
    found: list[float] = []
    while not is_over(len(found)):
        began = time.perf_counter()
        step()
        found.append((time.perf_counter() - began) * 1e3)
    return found


def meet(
    model: Model, memory: Memory, ports: Sequence[int], step: Callable[[], object], *, is_metered: bool
) -> list[str]:
    """Meet the engines at `ports` at once; the cells of a row."""
    with decode_rank(model, memory, len(ports), is_metered=is_metered) as decode:
        gc.collect()
        gc.freeze()  # as vLLM does when its engine is up
        quiet = _steps(step, lambda done: done >= QUIET_STEPS)
        if decode.turns is not None:
            decode.turns.found.clear()  # those of its start
        interval = SwitchInterval(ConnectorOptions().switch_interval_seconds)
        interval.shorten(True)
        began = time.perf_counter()
        for number, port in enumerate(ports):
            address = PeerAddress(
                engine_id=f"{model.name} {number}", host=HOST, port=port, tp_size=model.tp_size, pp_size=model.stages
            )
            decode.thread.post(
                TrackLease(request_id=f"r{number}", lease=LeaseName(f"p{number}", 1), peer=address, age_seconds=0.0)
            )
        decode.thread.flush()
        deadline = began + MEET_SECONDS_MAX
        met_at: list[float] = []
        waiter = threading.Thread(
            target=lambda: decode.connected.ready.wait(MEET_SECONDS_MAX) and met_at.append(time.perf_counter())
        )
        waiter.start()
        during = _steps(step, lambda _: decode.connected.ready.is_set() or time.perf_counter() > deadline)
        waiter.join()
        interval.shorten(False)
        if decode.connected.failures or decode.connected.count < len(ports):
            raise RuntimeError(f"{decode.connected.count} engines met, failures {decode.connected.failures[:3]}")
        lost = sum(during) - len(during) * statistics.median(quiet)
        turn, call = _longest(decode.turns.found if decode.turns is not None else []), _longest(decode.calls)
    return [
        f"{(met_at[0] - began) * 1e3:,.0f}",
        _spread(quiet),
        _spread(during),
        f"{lost:,.0f}",
        turn,
        call,
    ]


def _longest(found: Sequence[tuple[float, str]]) -> str:
    if not found:
        return ""
    seconds, name = max(found)
    return f"{seconds * 1e3:.1f} {name.rsplit('.', 1)[-1]}"


def _spread(steps: Sequence[float]) -> str:
    ordered = sorted(steps)
    at_99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return f"{statistics.median(ordered):.1f} / {at_99:.1f} / {ordered[-1]:.1f}"


# --- phases -----------------------------------------------------------------------------------------------------------


def phases(model: Model, memory: Memory) -> list[str]:
    """Milliseconds of each phase of the first handshake with an engine, on a quiet thread."""
    layout = model.layout("decode", RankId(0, 0), model.decode_tp_size, memory.addresses)
    local = LocalRank(layout=layout, shapes=model.shapes, compatibility_hash="hash", identity=NO_IDENTITY)
    frames = {
        rank: encode_reply(payload, 0.0)
        for rank, payload in payloads(model, 0, memory, [bytes(20_000)] * len(model.ranks), 1).items()
    }
    name = f"{model.name} 0"

    def decode() -> list[Any]:
        return [
            decode_reply(each, peer=name, address="", expected_hash="hash", identity=NO_IDENTITY).metadata
            for each in frames.values()
        ]

    metadata = decode()

    def layouts() -> list[RankLayout]:
        return [
            layout_from_metadata(each, rank=rank, tp_size=model.tp_size, local=local)
            for rank, each in zip(model.ranks, metadata, strict=True)
        ]

    remotes = layouts()
    return [_milliseconds(decode), _milliseconds(layouts), _milliseconds(lambda: plan_engine(layout, remotes))]


def _milliseconds(call: Callable[[], object]) -> str:
    seconds = []
    for _ in range(7):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return f"{statistics.median(seconds) * 1e3:.2f}"


def _print_row(cells: Sequence[object]) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def measure(ports: dict[str, list[int]], models: Sequence[Model]) -> None:
    memory = Memory()
    print("\nPhases of the first handshake with an engine, all its ranks, ms\n")
    _print_row(["model", "ranks", "decode", "layouts", "plan"])
    _print_row(["---"] * 5)
    for model in models:
        _print_row([model.name, len(model.ranks), *phases(model, memory)])
    print("\nMet at once, ms\n")
    header = ["model", "engines", "a step", "met", "step before", "step meanwhile", "lost", "turn", "call"]
    _print_row(header)
    _print_row(["---"] * len(header))
    turns = _turns_of_a_step()
    for model in models:
        for engines in model.meetings:
            of_model = ports[model.name][:engines]
            row = meet(model, memory, of_model, lambda: _compute(turns), is_metered=False)
            _print_row([model.name, engines, "computes", *row])
            row = meet(model, memory, of_model, lambda: time.sleep(STEP_SECONDS), is_metered=True)
            _print_row([model.name, engines, "sleeps", *row])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.bench_handshakes", description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", choices=[model.name for model in MODELS], help="default: all")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        trio.run(serve)
        return
    with other_process("tests.bench.bench_handshakes", "--serve") as (_, ports):
        measure(ports, [model for model in MODELS if options.model is None or model.name in options.model])


if __name__ == "__main__":
    main()
