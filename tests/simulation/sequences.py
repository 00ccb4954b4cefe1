"""Sequence diagrams of single requests, drawn from simulated runs: `python -m tests.simulation.sequences DIRECTORY`.

Each `Story` is one request between one prefill and one decode engine in the simulator, with what goes wrong in it. What
is drawn is what happened: commands and worker events at the doors of the connector, messages on the side channel and to
the control socket, READs, and every transition of the machines, in the order of virtual time. Nothing here says how the
story goes, so a change of the product changes the diagram, and the test on drift says so.

The engines are the simulator's, with a generator that always draws the middle (`_Steady`): no queue, no client that
leaves, no prefix hit, unless the story says so.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import trio
from trio.testing import MockClock

from connector.clock import NS_PER_SECOND
from connector.config import ConnectorOptions
from connector.ports.nixl import ReadMeasured
from connector.protocol import Command, ReceiveEnded, WorkerEvent
from connector.wire import control
from statemachine.trace import TransitionRecord
from tests.simulation.active_faults import ActiveFaults
from tests.simulation.agenda import Agenda
from tests.simulation.cluster import make_trio_deterministic, options_of
from tests.simulation.engines import DecodeEngine, Engine, PrefillEngine
from tests.simulation.fake_network import FakeLink, FakeNetwork
from tests.simulation.fake_nixl import FakeNixlWorld, FlyingRead
from tests.simulation.faults import Fault, Kind, Plan, draw_shape, engine_of
from tests.simulation.oracles import Oracles
from tests.simulation.process import Surroundings, Variant
from tests.simulation.shapes import BLOCK_TOKENS

LINK = "d0>p0"
BLOCKS = 4
FOREVER_SECONDS = 60.0
BEGINS_SECONDS = 1.0
"""When the client sends its prompt; what is drawn is counted from there."""
TO_DECODE_SECONDS = 0.004
GRANT_LATE_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True)
class Story:
    """One diagram. D has met P before if `acquainted`, and then the faults begin with the story, not before it."""

    name: str
    title: str
    faults: Sequence[Fault] = ()
    acquainted: bool = True
    options: dict[str, float] = field(default_factory=dict)
    variant: Variant = Variant.SAME
    grant_is_late: bool = False
    meanwhile: Callable[[Stage], Awaitable[None]] | None = None
    """What else happens, beginning with the request."""


def _fault(kind: Kind, target: str, seconds: float = FOREVER_SECONDS) -> Fault:
    return Fault(kind=kind, target=target, at_seconds=0.0, duration_seconds=seconds)


async def _replace_prefill(stage: Stage) -> None:
    """P dies in the middle of the READ, and comes back under its old engine id."""
    await trio.sleep(0.1)
    stage.prefill.crash()
    stage.note("p0", "killed")
    await trio.sleep(0.03)
    stage.prefill.start(stage.prefill.process.engine_id)
    stage.watch(stage.prefill)
    stage.nursery.start_soon(stage.prefill.process.run)
    stage.note("p0", "a new process, the same engine id")


async def _lose_a_release(stage: Stage) -> None:
    """The first one does not arrive."""
    network = stage.network
    carry = network.carry

    def lossy(link: FakeLink, frames: tuple[bytes, ...]) -> None:
        if isinstance(control.decode_request(frames), control.Release):
            stage.sheet.add(f"Dw--xPw: {_said_by_decode(frames)}")
            network.carry = carry  # type: ignore[method-assign]
        else:
            carry(link, frames)

    await trio.lowlevel.checkpoint()
    network.carry = lossy  # type: ignore[method-assign]


async def _reset_links(stage: Stage) -> None:
    await trio.sleep(0.1)
    stage.network.reset_links(lambda source, target: True)


async def _kill_decode(stage: Stage) -> None:
    await trio.sleep(0.1)
    stage.decode.crash()
    stage.note("d0", "killed")


STORIES = (
    Story(name="plain", title="A request that is served, and the first meeting of the two engines", acquainted=False),
    Story(
        name="release-overtakes-grant",
        title="A release that arrives before P's worker has heard of the grant",
        grant_is_late=True,
    ),
    Story(
        name="handshake-times-out",
        title="P does not answer: the request fails, the next one fails at once",
        acquainted=False,
        faults=(_fault(Kind.PARTITION, LINK),),
    ),
    Story(
        name="incompatible",
        title="P serves KV that does not fit",
        acquainted=False,
        variant=Variant.OTHER_BLOCKS,
    ),
    Story(
        name="bad-params",
        title="The request names blocks that P does not have",
        faults=(_fault(Kind.BAD_PARAMS, "d0"),),
    ),
    Story(
        name="read-fails-once",
        title="A READ fails: its connection is rebuilt, and the request is tried again",
        faults=(_fault(Kind.READ_ERROR, LINK, 0.0246),),
    ),
    Story(
        name="read-errs-early",
        title="A READ is said to have failed, and goes on in part: nothing is read again before it is over",
        faults=(_fault(Kind.READ_ERRS_EARLY, LINK, 0.0246),),
    ),
    Story(name="read-fails", title="Both READs fail", faults=(_fault(Kind.READ_ERROR, LINK),)),
    Story(
        name="lease-lapses",
        title="The network is cut for longer than a lease: the READ ends well, and P says that its blocks were gone",
        faults=(_fault(Kind.PARTITION, LINK, 4.5),),
    ),
    Story(
        name="read-never-ends",
        title="A READ that hangs: the client is answered, the blocks stay in quarantine until the READ has ended",
        options={"request_timeout_seconds": 1.0},
        faults=(_fault(Kind.READ_STALL, LINK, 8.0),),
    ),
    Story(
        name="deadline-passes",
        title="The request takes too long",
        options={"request_timeout_seconds": 1.0},
        faults=(_fault(Kind.READ_STALL, LINK, 2.0),),
    ),
    Story(
        name="abort-while-reading",
        title="The client leaves in the middle of a READ",
        faults=(_fault(Kind.ABORT, "d0"), _fault(Kind.READ_STALL, LINK, 1.0)),
    ),
    Story(
        name="abort-while-waiting",
        title="The client leaves while the handshake is under way",
        acquainted=False,
        faults=(_fault(Kind.ABORT, "d0"), _fault(Kind.PARTITION, LINK, BEGINS_SECONDS + 0.5)),
    ),
    Story(
        name="prefill-restarts",
        title="P dies in the middle of a READ and comes back with the same engine id",
        faults=(_fault(Kind.READ_STALL, LINK, 0.2),),
        meanwhile=_replace_prefill,
    ),
    Story(
        name="release-is-lost",
        title="A release is lost: it is said again until P answers",
        meanwhile=_lose_a_release,
    ),
    Story(
        name="hold-is-lost",
        title="Holds are lost: the READ does not wait for them, the report does",
        faults=(_fault(Kind.MESSAGE_LOSS, LINK, 0.5),),
    ),
    Story(
        name="link-is-reset",
        title="A control connection is reset in the middle of a READ: the connection is rebuilt when the READ is over",
        faults=(_fault(Kind.READ_STALL, LINK, 0.3),),
        meanwhile=_reset_links,
    ),
    Story(
        name="decode-dies",
        title="D dies: P keeps the blocks until the lease ends",
        faults=(_fault(Kind.READ_STALL, LINK, 1.0),),
        meanwhile=_kill_decode,
    ),
)


class _Steady(random.Random):
    """Draws the middle of whatever it is asked for."""

    def random(self) -> float:
        return 0.5


class _Sheet:
    """The lines of a diagram. A sink for transition records, too."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.is_open = False
        self._last_seconds = -1.0
        self._last_line = ""

    def add(self, line: str) -> None:
        if not self.is_open:
            return
        if "--x" in line and line == self._last_line:
            line += ", again and again"
        elif line == self._last_line.removesuffix(", again and again") and "--x" in line:
            return
        self._last_line = line
        now = trio.current_time()
        if now - self._last_seconds >= 0.0005:
            self.lines.append(f"Note over D: {_moment(now - BEGINS_SECONDS)}")
            self._last_seconds = now
        self.lines.append(line)

    def append(self, record: TransitionRecord) -> None:
        """As the list that `Rank.write` appends to."""
        if record.from_state in (None, record.to_state):
            return
        side = "D" if record.engine_id.startswith("d") else "P"
        reason = f", {record.reason}" if record.reason and record.to_state in ("draining", "failed", "expired") else ""
        self.add(
            f"Note over {side}w: {record.machine} {record.from_state} → {record.to_state} ({record.event}{reason})"
        )


def _moment(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.3f} s"


@dataclass
class Stage:
    """One story being played."""

    sheet: _Sheet
    nursery: trio.Nursery
    network: FakeNetwork
    prefill: PrefillEngine
    decode: DecodeEngine

    def note(self, engine: str, text: str) -> None:
        self.sheet.add(f"Note over {engine[0].upper()},{engine[0].upper()}w: {text}")

    def watch(self, engine: Engine) -> None:
        """Draw the commands that its engine gives to its connector."""
        rank, side = engine.process.ranks[0], engine.name[0].upper()
        deliver = rank.deliver

        def watched(command: Command) -> None:
            self.sheet.add(f"{side}->>{side}w: {type(command).__name__}")
            deliver(command)

        rank.deliver = watched  # type: ignore[method-assign]


def draw(story: Story) -> str:
    """Play the story, and write down what happened as a Mermaid sequence diagram."""
    make_trio_deterministic(0)
    agenda, clock, sheet = Agenda(), MockClock(autojump_threshold=0), _Sheet()
    agenda.drive(clock)
    trio.run(_play, story, agenda, sheet, clock=clock)
    head = [
        "sequenceDiagram",
        f"  title {story.title}",
        "  participant P as P: scheduler",
        "  participant Pw as P: connector",
        "  participant Dw as D: connector",
        "  participant D as D: scheduler",
    ]
    return "\n".join([*head, *(f"  {line}" for line in sheet.lines)]) + "\n"


async def _play(story: Story, agenda: Agenda, sheet: _Sheet) -> None:
    faults_begin = BEGINS_SECONDS if story.acquainted else 0.0
    plan = Plan(
        seed=0,
        faults=[msgspec.structs.replace(fault, at_seconds=faults_begin) for fault in story.faults],
    )
    faults = ActiveFaults(plan)
    faults._chance = _Steady(0)
    options = msgspec.structs.replace(_plain_options(), **story.options)
    around = Surroundings(
        agenda=agenda,
        network=_watched_network(FakeNetwork(agenda, faults), sheet),
        nixl=_watched_nixl(FakeNixlWorld(agenda, faults), sheet),
        faults=faults,
        oracles=Oracles(options=options, faults=plan.faults, isolates=False),
        options=options,
        trace=sheet,  # type: ignore[arg-type]
        reads_inline=False,
    )
    async with trio.open_nursery() as nursery:
        prefill = PrefillEngine(around, "p0", _Steady(0), story.variant)
        decode = DecodeEngine(around, "d0", _Steady(0))
        stage = Stage(sheet, nursery, around.network, prefill, decode)
        for engine in (prefill, decode):
            _watch_worker_events(engine, sheet)
            stage.watch(engine)
            nursery.start_soon(engine.process.run)
        await trio.sleep(0.001)
        if story.acquainted:
            await _serve(stage, agenda, 1)
        await trio.sleep_until(BEGINS_SECONDS)
        if story.grant_is_late:
            prefill.step_seconds = lambda: GRANT_LATE_SECONDS  # type: ignore[method-assign]
        sheet.is_open = True
        if story.meanwhile is not None:
            nursery.start_soon(story.meanwhile, stage)
        await _serve(stage, agenda, 2)
        await trio.sleep(FOREVER_SECONDS)
        sheet.is_open = False
        assert around.oracles.violations == [], around.oracles.violations
        nursery.cancel_scope.cancel()


async def _serve(stage: Stage, agenda: Agenda, number: int) -> None:
    """A prompt through both engines."""
    ended = trio.Event()

    async def script() -> None:
        prefilled = await stage.prefill.prefill(f"p0-r{number}", number, BLOCKS * BLOCK_TOKENS)
        assert prefilled is not None
        await agenda.sleep(TO_DECODE_SECONDS)
        stage.decode.announce([f"d0-r{number}"], prefilled)
        await stage.decode.serve(f"d0-r{number}", prefilled)

    agenda.start(script(), ended.set)
    await ended.wait()


def _plain_options() -> ConnectorOptions:
    shape = msgspec.structs.replace(
        draw_shape(0),
        lease_seconds=4.0,
        lease_limit_seconds=900.0,
        request_timeout_seconds=6.0,
        handshake_timeout_seconds=0.8,
        peer_limit=8,
    )
    return options_of(shape)


# --- what is watched ------------------------------------------------------------------------------------------------


def _watch_worker_events(engine: Engine, sheet: _Sheet) -> None:
    """Draw what the connector tells its engine, except for figures."""
    side, hear = engine.name[0].upper(), engine.hear

    def watched(tp_rank: int, event: WorkerEvent) -> None:
        if isinstance(event, ReceiveEnded):
            said = "done" if event.failure is None else event.failure.kind
            quarantined = ", blocks in quarantine" if event.quarantined else ""
            sheet.add(f"{side}w->>{side}: ReceiveEnded ({said}{quarantined})")
        elif not isinstance(event, ReadMeasured):
            sheet.add(f"{side}w->>{side}: {type(event).__name__}")
        hear(tp_rank, event)

    engine.hear = watched  # type: ignore[method-assign]


def _watched_network(network: FakeNetwork, sheet: _Sheet) -> FakeNetwork:
    """Draw what is sent over the network, and whether it arrives."""
    rules, delays = network.rules, network.rules.delays
    ask, answer, carry, connect, end = network.ask, network.answer, network.carry, network._connect, network._end
    said = "?"

    def watched(source: str, target: str) -> Sequence[float]:
        found = delays(source, target)
        sender, receiver = (engine_of(name)[0].upper() for name in (source, target))
        sheet.add(f"{sender}w{'--)' if found else '--x'}{receiver}w: {said}")
        return found

    def watched_ask(source: str, host: str, port: int, identity: bytes, frames: tuple[bytes, ...]) -> None:
        nonlocal said
        said = "handshake"
        ask(source, host, port, identity, frames)

    def watched_answer(source: str, identity: bytes, frames: tuple[bytes, ...]) -> bool:
        nonlocal said
        said = _said_by_prefill(frames)
        return answer(source, identity, frames)

    def watched_carry(link: FakeLink, frames: tuple[bytes, ...]) -> None:
        nonlocal said
        said = _said_by_decode(frames)
        carry(link, frames)

    def watched_connect(link: FakeLink, identity: bytes) -> None:
        nonlocal said
        said = "connects to the control socket"
        connect(link, identity)

    def watched_end(link: FakeLink, error: str) -> None:
        nonlocal said
        said = error
        end(link, error)

    rules.delays = watched  # type: ignore[method-assign]
    network.ask = watched_ask  # type: ignore[method-assign]
    network.answer = watched_answer  # type: ignore[method-assign]
    network.carry = watched_carry  # type: ignore[method-assign]
    network._connect = watched_connect  # type: ignore[method-assign]
    network._end = watched_end  # type: ignore[method-assign]
    return network


def _said_by_decode(frames: tuple[bytes, ...]) -> str:
    """On a control socket."""
    message = control.decode_request(frames)
    assert isinstance(message, control.LeaseRequest)
    names = ", ".join(lease.request_id for lease in message.leases)
    if isinstance(message, control.Release):
        return f"Release {names}"
    return f"Hold {names}" if names else "Hold nothing: does the control socket work?"


def _said_by_prefill(frames: tuple[bytes, ...]) -> str:
    """On the side channel or on a control socket."""
    if len(frames) > 1:
        return "what its rank looks like, its sizes, its life, its control socket"
    message = control.decode_answer(frames)
    if isinstance(message, control.Released):
        return "Released " + ", ".join(lease.request_id for lease in message.leases)
    assert isinstance(message, control.HoldAnswer)
    held = [f"{each.request_id} for {each.remaining_ns / NS_PER_SECOND:.1f} s" for each in message.held]
    gone = [f"{each.request_id} is gone ({each.why})" for each in message.gone]
    return "Held: " + (", ".join([*held, *gone]) or "nothing")


def _watched_nixl(world: FakeNixlWorld, sheet: _Sheet) -> FakeNixlWorld:
    launch, end = world.launch, world.end

    def watched_launch(read: FlyingRead) -> None:
        sheet.add(f"Dw->>Pw: READ {len(read.pieces)} descriptors, {read.length_bytes} bytes")
        launch(read)

    def watched_end(read: FlyingRead, error: str | None) -> None:
        if not read.has_ended:
            sheet.add("Pw-xDw: the READ ends with an error" if error else "Pw->>Dw: the READ is complete")
        end(read, error)

    world.launch = watched_launch  # type: ignore[method-assign]
    world.end = watched_end  # type: ignore[method-assign]
    return world


def main(directory: Path) -> None:
    """Draw every story into a file of its own."""
    directory.mkdir(exist_ok=True)
    for story in STORIES:
        path = directory / f"{story.name}.mmd"
        path.write_text(draw(story))
        sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
