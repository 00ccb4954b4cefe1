"""Tools that ask what lives, at random moments of simulated runs with faults: what they are told was true at some
moment between question and answer, and nothing that is to hold is disturbed. Some of what they send is no question."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import trio

from connector.observe.traced import QUEUED
from connector.ports.side_channel import SideChannelError
from connector.runtime.inspector import UNMET
from connector.wire.control import encode_request
from connector.wire.inspection import (
    WHATS,
    AnyRow,
    HoldRow,
    Inspect,
    Inspected,
    LeaseRow,
    RecordRow,
    RequestRow,
    decode_inspected,
)
from statemachine.trace import TransitionRecord
from tests.simulation.agenda import Agenda
from tests.simulation.cluster import Result, run_cluster
from tests.simulation.fake_network import FakeSideChannel
from tests.simulation.faults import Plan, draw_plan, generator
from tests.simulation.process import Process, Rank
from tests.simulation.scripted import ScriptedCluster

SEEDS = range(8)
PAUSE_SECONDS_MAX = 0.15
ANSWER_SECONDS = 1.0
"""How long the tool waits: a process may be paused, its clock slewed, and the message lost."""
NO_QUESTIONS = (
    b"",
    b"\xc1",
    b"\x81\xa4type\xa7inspect",
    b"\x83\xa4type\xa7inspect\xa6number\xff\xa4what\xa6leases",
    b"\x83\xa4type\xa7inspect\xa6number\x01\xa4what\x04",
    bytes(3000),
)

Key = tuple[str, int, str, str]
"""Engine id, rank, machine, subject."""


class InspectedCluster(ScriptedCluster):
    """A cluster with a tool that asks."""

    def __init__(self, plan: Plan, agenda: Agenda) -> None:
        super().__init__(plan, agenda)
        self._numbers_asked = 0
        self._known: dict[Key, list[tuple[int, TransitionRecord]]] = {}
        self._indexed = 0
        self.shown: Counter[str] = self._oracles.coverage

    async def _safety_phase(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._ask_about_everybody)
            await super()._safety_phase()
            nursery.cancel_scope.cancel()

    async def _ask_about_everybody(self) -> None:
        chance = generator(self._plan.seed, "tools")
        channel = FakeSideChannel(self._around.network, "tool")
        while True:
            await trio.sleep(chance.uniform(0.0, PAUSE_SECONDS_MAX))
            engine = chance.choice(self._engines)
            process = engine.process
            rank = chance.choice(process.ranks)
            questions = [
                Inspect(
                    number=chance.getrandbits(40),
                    what=chance.choice(WHATS),
                    match=chance.choice(["", "", "r1", engine.name]),
                    rows=chance.choice([1, 7, 256]),
                )
                for _ in range(chance.randint(1, 4))
            ]
            nonsense = chance.choice(NO_QUESTIONS) if chance.random() < 0.2 else None
            if not rank.is_dead:
                await self._ask_rank(channel, process, rank, questions, nonsense)

    async def _ask_rank(
        self, channel: FakeSideChannel, process: Process, rank: Rank, questions: list[Inspect], nonsense: bytes | None
    ) -> None:
        with trio.move_on_after(ANSWER_SECONDS):
            try:
                link = await channel.open_link(rank.host, rank.control.port)
            except SideChannelError:
                return
            try:
                if nonsense is not None:
                    link.send((nonsense,))
                for question in questions:
                    asked_at = len(self._trace)
                    link.send(encode_request(question))
                    answer = decode_inspected(await link.receive())
                    if not rank.is_dead:
                        self._check(process, rank, question, answer, asked_at)
            except SideChannelError:
                return
            finally:
                link.close()

    # --- whether it was true ----------------------------------------------------------------------------------------

    def _check(self, process: Process, rank: Rank, question: Inspect, answer: Inspected, asked_at: int) -> None:
        assert (answer.number, answer.what) == (question.number, question.what)
        assert len(answer.rows) <= question.rows
        self._index()
        place = (process.engine_id, rank.tp_rank)
        for row in answer.rows:
            self.shown[f"shown {type(row).__name__}"] += 1
            for key, state in _said(row, place):
                possible = self._states(key, asked_at)
                if state not in possible:
                    self._oracles.complain("inspection", f"{key} is said to be {state}, and was {possible}")

    def _index(self) -> None:
        """What the trace has got since the last time, by instance."""
        for number in range(self._indexed, len(self._trace)):
            record: TransitionRecord = self._trace[number]
            key = (record.engine_id, record.rank, record.machine, record.subject)
            self._known.setdefault(key, []).append((number, record))
        self._indexed = len(self._trace)

    def _states(self, key: Key, asked_at: int) -> set[str]:
        """Those that instances of this name were in between the question and now; empty: there was none. There may be
        several: an engine that different requests describe with different sizes is two peers."""
        states: list[str] = []
        since: set[str] = set()
        for number, record in self._known.get(key, []):
            if number >= asked_at:
                since.add(record.to_state)
                continue
            if record.from_state in states:
                states.remove(record.from_state)
            states.append(record.to_state)
        return since.union(states)


def _said(row: AnyRow, place: tuple[str, int]) -> Iterator[tuple[Key, str]]:
    match row:
        case RequestRow(state=state) if state != QUEUED:
            yield (*place, "request", row.request_id), state
        case LeaseRow():
            yield (*place, "lease", row.request_id), row.state
        case HoldRow(state=state) if state != UNMET:
            yield (*place, "hold", f"{row.remote_request_id}/{row.rank}"), state
        case RecordRow(record=record):
            assert (record.engine_id, record.rank) == place
        case _:
            pass


def run(seed: int) -> Result:
    return run_cluster(draw_plan(seed), InspectedCluster)


@pytest.fixture(scope="module")
def results() -> list[Result]:
    return [run(seed) for seed in SEEDS]


def test_what_tools_are_told_was_true_and_nothing_is_disturbed(results: list[Result]) -> None:
    assert [(each.plan.seed, violation) for each in results for violation in each.violations] == []


def test_rows_of_every_kind_are_shown_in_some_run(results: list[Result]) -> None:
    shown: Counter[str] = Counter()
    for each in results:
        shown += each.coverage
    for kind in ("EngineRow", "PeerRow", "RequestRow", "HoldRow", "LeaseRow", "ReadRow", "RecordRow"):
        assert shown[f"shown {kind}"] > 0, kind


def test_a_run_with_tools_is_repeatable() -> None:
    assert run(3).fingerprint() == run(3).fingerprint()
