"""A part of the campaign of crashes (`tests/simulation/crashes`), another one with each run; `make crashes` is all."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from connector.ports.nixl import NixlPort
from connector.ports.side_channel import Link, Listener, Requester, SideChannel
from connector.runtime.recorder import Recorder
from connector.runtime.thread import ActorThread
from connector.worker.ledger import TransferLedger
from tests.simulation.crashes.campaign import Found, Try, one_of_each_site, references, run, tries
from tests.simulation.crashes.points import ROOT, Injected, InjectedOs, Span
from tests.simulation.crashes.run import Verdict
from tests.simulation.crashes.scenes import SCENES, play
from tests.simulation.mutants.mutant import Edit, Patch

RUNS = 60
"""Of some three thousand."""

WHOLE_RUN = ("Supervisor.run", "ActorThread._main_task", "HandshakeListener.run")
"""Where a whole trio run waits: what raises there ends it, in production its thread."""


PARTS = (
    "connector/runtime",
    "connector/scheduler",
    "connector/worker",
    "connector/ports",
    "connector/ports/nixl_agent",
    "connector/ports/zmq_bridge",
    "connector",
)
"""Folders of what runs in an engine. In others nothing waits, but in `observe`, and that in tools."""

REAL_PORT = "the fake port stands in its place; whatever it raises comes out of a call of the port, which is a point"
A_START = "an engine that cannot start says so: test_listener_thread.py, an address that is taken is an error at start"

NOT_REACHED = {
    "connector/ports/nixl_agent/port.py": REAL_PORT,
    "connector/ports/zmq_bridge/channel.py": REAL_PORT,
    "connector/ports/zmq_bridge/link.py": REAL_PORT,
    "connector/ports/zmq_bridge/listener.py": REAL_PORT,
    "connector/ports/zmq_bridge/monitor.py": REAL_PORT,
    "connector/ports/zmq_bridge/requester.py": REAL_PORT,
    "connector/ports/doorman.py": "the gate waits for it; tests/conformance/test_doorman.py",
    "connector/ports/gate.py": "it speaks to libzmq; tests/conformance/test_strangers.py",
    "connector/ports/curve_keys.py": "a gate and real sockets ask it; tests/conformance/test_strangers.py",
    "connector/ports/host_names.py": "of the real side channel; tests/conformance/test_host_names.py",
    "connector/runtime/connections.py: await trio.lowlevel.cancel_shielded_checkpoint()": (
        "trio promises that nothing is raised there"
    ),
    "connector/runtime/deferred_commands.py: await trio.sleep(LOOK_SECONDS)": (
        "no scene has a device that is late; tests/unit/test_deferred_commands.py"
    ),
    "connector/runtime/pace.py: async with self._turn": (
        "trio hands a lock over before it lets go on who waits for it: only a cancellation can be raised there"
    ),
    "connector/runtime/supervisor.py: await trio.lowlevel.cancel_shielded_checkpoint()": (
        "trio promises that nothing is raised there"
    ),
    "connector/runtime/thread.py: await self._make_main()": A_START,
    "connector/runtime/thread.py: await nursery.start(self._main.run)": A_START,
}
"""Files, and single awaits as they are written, at which no scene has anything raised, and why."""

DOORS = {"nixl": NixlPort, "side channel": SideChannel, "requester": Requester, "link": Link, "listener": Listener}
NOT_CALLED = {
    "nixl agent_name": "no call",
    "nixl agent_metadata": "no call",
    "nixl set_event_callback": "at the start",
    "side channel public_key": "no call",
    "side channel listen": "at the start",
    "requester reached": "no call",
    "listener port": "no call",
    "listener counts": "nobody calls it but tests",
    "listener close": "who has made it closes its side channel",
}
"""Methods of ports that are called in no scene, and why."""


@pytest.fixture(scope="module")
def of_scenes() -> dict[str, Verdict]:
    return references()


@pytest.fixture(scope="module")
def everything(of_scenes: dict[str, Verdict]) -> list[Try]:
    return tries(of_scenes)


@pytest.mark.parametrize("scene", SCENES)
def test_without_a_fault_all_goes_well(of_scenes: dict[str, Verdict], scene: str) -> None:
    reference = of_scenes[scene]
    assert reference.complaints == []
    assert not reference.died
    kinds = {"await", "nixl", "side channel", "requester", "link", "listener", "trace file", "figures", "log"}
    assert {site.kind for site in reference.sites} >= kinds
    assert {site.owner for site in reference.sites} >= {"d", "p0", "p1", "p0 listener"}
    assert play(scene).sites == reference.sites, "a run is the same each time"


def test_every_await_of_an_engine_is_reached_by_a_scene_or_has_a_reason(of_scenes: dict[str, Verdict]) -> None:
    reached = frozenset[Span]().union(*(reference.reached for reference in of_scenes.values()))
    missing = set()
    for path, spans, text in _awaits():
        if reached.isdisjoint(spans):
            missing.add(path if path in NOT_REACHED else f"{path}: {text}")
    assert missing == set(NOT_REACHED), "a new await needs a scene that comes there; a reason that is not needed goes"


def test_every_call_of_a_port_is_made_in_a_scene_or_has_a_reason(of_scenes: dict[str, Verdict]) -> None:
    made = {f"{site.kind} {site.place}" for reference in of_scenes.values() for site in reference.sites}
    there_are = {f"{kind} {name}" for kind, port in DOORS.items() for name in vars(port) if not name.startswith("_")}
    assert there_are - made == set(NOT_CALLED)


def _awaits() -> Iterator[tuple[str, set[Span], str]]:
    """Their file, where they stand, and their first line.

    An `async with` is found at the whole statement, and by CPython 3.13 and later at what it enters.
    """
    for part in PARTS:
        for path in sorted(Path(ROOT, part).glob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Await | ast.AsyncWith | ast.AsyncFor):
                    entered = [item.context_expr for item in node.items] if isinstance(node, ast.AsyncWith) else []
                    file, text = str(path.relative_to(ROOT)), ast.unparse(node).splitlines()[0].removesuffix(":")
                    yield file, {_span_in(file, each) for each in (node, *entered)}, text
                elif isinstance(node, ast.comprehension):
                    assert not node.is_async, f"{path}: it has no place of its own"


def _span_in(file: str, node: ast.expr | ast.stmt) -> Span:
    return Span(file, node.lineno, node.end_lineno, node.col_offset, node.end_col_offset)


def test_whatever_raises_at_some_points_costs_what_it_may(everything: list[Try]) -> None:
    seed = random.SystemRandom().randrange(1 << 16)
    candidates = one_of_each_site(everything, seed)
    chosen = random.Random(seed).sample(candidates, RUNS)
    found = Found()
    for tried, verdict in run(chosen):
        found.note(tried, verdict)
    assert found.tried == RUNS
    assert {what: [str(each) for each in those] for what, those in found.complaints.items()} == {}, f"seed {seed}"


@pytest.mark.parametrize("owner", ["d", "p0", "p0 listener"])
def test_only_what_ends_a_whole_run_ends_it_and_in_the_middle_too(everything: list[Try], owner: str) -> None:
    """Of one process, in the middle of everything: each of its tasks that waits."""
    waiting = [each for each in everything if each.scene == "Pulls" and each.moment == 2.0 and each.site.owner == owner]
    assert len(waiting) >= 3
    for tried, verdict in run(waiting):
        assert verdict.complaints == [], tried
        assert verdict.died == tried.site.place.endswith(WHOLE_RUN), tried


def test_a_socket_that_raises_an_os_error_is_tried_too(everything: list[Try]) -> None:
    assert any(each.error is InjectedOs for each in everything)


@pytest.mark.parametrize("owner", ["d", "p0"])
def test_checksums_that_cannot_be_made_cost_a_request_and_no_step(everything: list[Try], owner: str) -> None:
    chosen = [each for each in everything if each.site.kind == "device" and each.site.owner == owner][:4]
    assert {each.error for each in chosen} == {Injected, InjectedOs}
    for tried, verdict in run(chosen):
        assert verdict.complaints == [], tried


MISTAKES = {
    "add": Edit(TransferLedger._count, "except Exception as error:", "except ZeroDivisionError as error:"),
    "note_wake_up": Edit(ActorThread.__init__, 'log_crash(f"mailbox of {name}", error)', "None"),
    "transition": Edit(Recorder.catch_up, 'self._crashes.note("counting of transitions", error)', "pass"),
}
"""By the name of the call that raises: who is to bear it does not, or says nothing."""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_product_that_does_not_bear_it_is_noticed(everything: list[Try], mistake: str) -> None:
    points = [
        each for each in everything if each.scene == "Pulls" and each.site.kind == "figures" and each.site.owner == "d"
    ]
    chosen = [each for each in points if each.site.place == mistake][:6]
    assert chosen
    with Patch() as patch:
        MISTAKES[mistake].apply(patch)
        assert any(verdict.complaints for _, verdict in run(chosen))
