"""What one request costs the actors' thread, in counts: a regression shows without a clock, on any machine.

A healthy request of a peer that is connected, on the fake ports and in virtual time, where a run is the same each time.
The engine thread's share is in `tests/unit/test_engine_thread.py`, the way between threads in
`tests/actors/test_hand_overs.py`. When a change is worth more work for each request, these figures are raised with it.
"""

from __future__ import annotations

import gc
import statistics
import tracemalloc
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest
import trio

from connector.ports.nixl import NixlEvent, PortReadEnded
from connector.wire import control
from tests.rig.work import Counted
from tests.simulation.bare_engines import BareEngines, on_fakes
from tests.simulation.fake_network import FakeLink
from tests.simulation.fake_nixl import FakeNixlPort

FEW, MANY = 8, 512
"""Blocks of a request."""
CALLS_OF_A_COMMAND = 341
CALLS_OF_AN_END = 155
"""What is allowed, a tenth more than there were when this was written; the same of a READ and of a whole request."""
SLACK = 8
"""A heap drops stale entries and a dict grows now or later, whoever's turn it is: far less than one for each block."""
MEASURED = 5
"""Requests of which the median is taken: in one of them a dict may grow that holds many requests."""
OBJECTS_OF_AN_OPEN_REQUEST = 50
"""A tenth more than the 45 that there were."""
OBJECTS_LEFT_BEHIND = 5
"""A lease that was released is remembered on both sides (`CONSUMED_MAX`, `ENDED_MAX`), in their order."""
TRANSIENT_BYTES_PER_BLOCK = 120
"""A dozen arrays of numbers."""


class Port:
    """What D's NIXL port is asked, and the work that each end of a READ means."""

    def __init__(self, engines: BareEngines, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: Counter[str] = Counter()
        self.ends: list[Counted] = []
        port = engines.decode.port
        for name in ("add_remote_agent", "remove_remote_agent", "prepare_local", "prepare_remote", "post_read"):
            self._note(port, name, monkeypatch)
        for name in ("release_descriptor_list", "send_notification"):
            self._note(port, name, monkeypatch)
        self._hear = port._on_event
        monkeypatch.setattr(port, "_on_event", self._count)

    def _note(self, port: FakeNixlPort, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        method = getattr(port, name)

        def noted(*arguments: object) -> object:
            self.asked[name] += 1
            return method(*arguments)

        monkeypatch.setattr(port, name, noted)

    def _count(self, event: NixlEvent) -> None:
        assert self._hear is not None
        if not isinstance(event, PortReadEnded):
            self._hear(event)
            return
        with Counted() as work:
            self._hear(event)
        self.ends.append(work)


class Said(Counter[tuple[str, str]]):
    """How many messages D has sent over its links: by kind and host."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        send = FakeLink.send

        def noted(link: FakeLink, frames: tuple[bytes, ...]) -> bool:
            self[type(control.decode_request(tuple(frames))).__name__, link.host] += 1
            return send(link, frames)

        monkeypatch.setattr(FakeLink, "send", noted)


def run(use: Callable[[BareEngines], Awaitable[None]], *, ranks: int = 1) -> None:
    """With one peer that is connected, and with caches warm."""

    async def prepared(engines: BareEngines) -> None:
        await engines.begin(0, 12)
        await engines.end(12)
        await use(engines)

    on_fakes(prepared, ranks=ranks, pool_blocks=MANY)


async def announced(engines: BareEngines, number: int) -> None:
    """A request whose lease is held."""
    engines.lend(number)
    engines.announce(number)
    await trio.sleep(0.01)


async def work_of(engines: BareEngines, port: Port, number: int, blocks: int) -> tuple[Counted, Counted]:
    """From the command to the order of its READ; from the end of that to the report."""
    await announced(engines, number)
    command = engines.pull_command(number, blocks)
    asked = port.asked["post_read"]
    with Counted() as work:
        engines.decode.supervisor.deliver(command)
    assert port.asked["post_read"] == asked + 1
    await trio.sleep(0.01)
    await engines.end_newest()
    return work, port.ends[-1]


# --- Python ---------------------------------------------------------------------------------------------------------


def test_no_python_runs_for_each_block(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(engines: BareEngines) -> None:
        port = Port(engines, monkeypatch)
        few, many = [await work_of(engines, port, number, blocks) for number, blocks in ((100, FEW), (101, MANY))]
        for of_few, of_many in zip(few, many, strict=True):
            assert abs(of_many.calls - of_few.calls) <= SLACK
            assert abs(of_many.lines - of_few.lines) <= SLACK
        command, end = many
        assert command.calls <= CALLS_OF_A_COMMAND
        assert end.calls <= CALLS_OF_AN_END

    run(use)


def test_a_request_costs_the_same_beside_many_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(engines: BareEngines) -> None:
        port = Port(engines, monkeypatch)
        alone = await work_of(engines, port, 100, FEW)
        await engines.begin(1000, 1300)
        beside = await work_of(engines, port, 101, FEW)
        for of_one, of_another in zip(alone, beside, strict=True):
            assert abs(of_another.calls - of_one.calls) <= SLACK
            assert abs(of_another.lines - of_one.lines) <= SLACK

    run(use)


# --- memory ---------------------------------------------------------------------------------------------------------


def objects() -> int:
    """Blocks of memory that Python and numpy hold, as far as they were asked for since tracing began."""
    gc.collect()
    return len(tracemalloc.take_snapshot().traces)


def test_an_open_request_holds_few_objects_and_none_for_each_block(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(engines: BareEngines) -> None:
        all_held: dict[int, list[int]] = {FEW: [], MANY: []}
        transient = {}
        for number, blocks in enumerate((FEW, MANY) * (1 + MEASURED), 100):
            await announced(engines, number)
            command = engines.pull_command(number, blocks)
            before = objects()
            tracemalloc.reset_peak()
            bytes_before = tracemalloc.get_traced_memory()[0]
            engines.decode.supervisor.deliver(command)
            transient[blocks] = tracemalloc.get_traced_memory()[1] - bytes_before
            all_held[blocks].append(objects() - before)
            await trio.sleep(0.01)
            await engines.end_newest()
        held = {blocks: statistics.median(counts[1:]) for blocks, counts in all_held.items()}  # the first fill caches
        assert abs(held[MANY] - held[FEW]) <= SLACK
        assert held[MANY] <= OBJECTS_OF_AN_OPEN_REQUEST
        assert transient[MANY] - transient[FEW] <= TRANSIENT_BYTES_PER_BLOCK * (MANY - FEW)

    traced(use)


def test_a_request_that_has_ended_leaves_only_the_name_of_its_lease() -> None:
    async def use(engines: BareEngines) -> None:
        await engines.begin(100, 400)
        await engines.end(300)
        before = objects()
        await engines.begin(400, 500)
        await engines.end(100)
        assert objects() - before <= 100 * OBJECTS_LEFT_BEHIND

    traced(use)


def traced(use: Callable[[BareEngines], Awaitable[None]]) -> None:
    gc.collect()
    gc.freeze()  # what other tests hold is not walked through each time objects are counted
    tracemalloc.start()
    try:
        run(use)
    finally:
        tracemalloc.stop()
        gc.unfreeze()


# --- messages, calls, turns -----------------------------------------------------------------------------------------


def test_a_request_is_one_read_and_one_release_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lease is asked for once, when it is announced; nothing is said between the command and the report."""

    async def use(engines: BareEngines) -> None:
        port, said = Port(engines, monkeypatch), Said(monkeypatch)
        hosts = [f"p0.{rank}" for rank in range(3)]
        await announced(engines, 100)
        assert said == {("Hold", host): 1 for host in hosts}
        said.clear()
        await engines.pull_and_end(100)
        assert port.asked == {"post_read": 3}
        assert said == {("Release", host): 1 for host in hosts}

    run(use, ranks=3)


def test_requests_of_one_step_share_their_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(engines: BareEngines) -> None:
        said = Said(monkeypatch)
        await engines.begin(100, 140)
        assert said == {("Hold", "p0.0"): 1}
        said.clear()
        await engines.end(40)
        assert said == {("Release", "p0.0"): 1}

    run(use)


class Turns(trio.abc.Instrument):
    """How often each task ran, by its name."""

    def __init__(self) -> None:
        self.taken: Counter[str] = Counter()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.taken[task.name.rpartition(".")[2]] += 1


def test_no_task_is_started_for_a_request_and_those_that_are_there_run_once_for_each_message() -> None:
    """The actor's task says what is due (hold, release), and that of the link hears the answers. READs have none."""

    async def use(engines: BareEngines) -> None:
        turns = Turns()
        trio.lowlevel.add_instrument(turns)
        await engines.begin(100, 101)
        await engines.end(1)
        trio.lowlevel.remove_instrument(turns)
        assert turns.taken["_run_peer"] == 2
        assert turns.taken["_receive"] == 2 * 2  # each wakes up, and looks once more before it waits
        of_others = {"keep_running", "main"}  # what P keeps running, and this test
        assert turns.taken.keys() == {"_run_peer", "_receive", *of_others}

    run(use)
