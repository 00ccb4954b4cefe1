"""The simulator over a few dozen seeds, its own determinism, and that a failing plan is shrunk.

A seed that fails here is replayed by `python -m tests.simulation --seed N`, which shrinks it too. Plans that once found
a bug are in regressions/ and run as well. That the oracles do complain is shown by test_mutants.
"""

from __future__ import annotations

import random
import re
import sys
from collections import Counter
from itertools import product
from pathlib import Path

import msgspec
import pytest
import trio
from trio.testing import MockClock

from connector.protocol import PeerAddress, QuarantineLifted, ReceiveEnded
from connector.tools.timeline.export import Document
from statemachine.failures import AbortedByClient
from statemachine.lease import LeaseName
from tests.simulation.__main__ import main, read_plan
from tests.simulation.active_faults import ActiveFaults
from tests.simulation.agenda import Agenda
from tests.simulation.cluster import options_of
from tests.simulation.divergence import HASH_SEEDS, first_divergence, trace_in_a_process_of_its_own
from tests.simulation.engines import DecodeEngine, Prefilled
from tests.simulation.fake_network import FakeNetwork
from tests.simulation.fake_nixl import FakeNixlWorld
from tests.simulation.faults import Fault, Kind, Plan, draw_plan, draw_shape
from tests.simulation.model import JUNK, Prompt, Table
from tests.simulation.mutants.catalogue import CATALOGUE
from tests.simulation.mutants.mutant import Patch
from tests.simulation.oracles import Oracles
from tests.simulation.process import PORT, Surroundings
from tests.simulation.scripted import simulate
from tests.simulation.shapes import BLOCK_TOKENS, EngineShape, SecondGroup
from tests.simulation.shrink import shrink

REGRESSIONS = sorted((Path(__file__).parent / "regressions").glob("*.json"))
SEEDS = 16
"""`make simulate-fresh` runs others at every time, `make simulate` as many as wanted."""
SHAPES = 30
SEEDS_OF_A_MUTANT = 12


@pytest.mark.parametrize("seed", range(SEEDS))
def test_seed(seed: int) -> None:
    result = simulate(draw_plan(seed))
    assert result.violations == []
    assert result.requests > 10  # few, where the only prefill engine is dead for most of the time
    assert result.outcomes["done"] > 0


@pytest.mark.parametrize("path", REGRESSIONS, ids=lambda path: path.stem)
def test_regression(path: Path) -> None:
    assert simulate(read_plan(path)).violations == []


def test_without_faults_every_request_is_served() -> None:
    """But for samples whose engine hears of them when others have read and released the blocks."""
    seeds = [seed for seed in range(200) if not draw_plan(seed).faults][:3]
    assert len(seeds) == 3
    coverage: Counter[str] = Counter()
    for seed in seeds:
        result = simulate(draw_plan(seed))
        assert result.violations == []
        assert set(result.outcomes) <= {"done", "not awaited", "AbortedByClient", "TooManyPeers", "LeaseOver"}
        coverage += result.coverage
    assert coverage["a lease read by several engines"] > 10
    assert coverage["queued for three lease times"] > 0


def test_who_names_wrong_sizes_fails_alone() -> None:
    wrong = Fault(kind=Kind.WRONG_SIZES, target="d0", at_seconds=0.0, duration_seconds=4.0, probability=0.3)
    result = simulate(Plan(seed=2, faults=[wrong]))
    assert result.violations == []
    assert result.outcomes["BadParams"] > 5
    assert set(result.outcomes) <= {"done", "not awaited", "AbortedByClient", "BadParams", "LeaseOver"}


def test_clocks_that_part_are_not_felt() -> None:
    slews = [
        Fault(kind=Kind.CLOCK_SLEW, target=engine, at_seconds=0.0, duration_seconds=9.0) for engine in ("d0", "p0")
    ]
    result = simulate(Plan(seed=4, faults=slews))
    assert result.violations == []
    assert result.faults_fired[Kind.CLOCK_SLEW] > 1
    assert set(result.outcomes) <= {"done", "not awaited", "AbortedByClient", "LeaseOver"}


@pytest.mark.parametrize("engine", ["p0", "d0"])
def test_a_worker_that_stops_says_so_and_costs_what_it_had_in_hand(engine: str) -> None:
    stops = Fault(kind=Kind.WORKER_STOPS, target=engine, at_seconds=1.0, duration_seconds=1.5)
    result = simulate(Plan(seed=2, faults=[stops]))
    assert result.violations == []
    assert result.faults_fired[Kind.WORKER_STOPS] == 1
    assert result.outcomes["done"] > 20


@pytest.mark.parametrize("seed", [3, 4])
def test_prefill_engines_that_drain_one_after_the_other_cost_nobody_anything(seed: int) -> None:
    """But who waits in D's queue for longer than the grace period, and whose client has left. Of seeds in which no
    sample comes too late for a lease that others have released."""
    names = draw_shape(seed).prefill_names
    drains = [
        Fault(kind=Kind.DRAIN, target=name, at_seconds=1.0 + number, duration_seconds=0.1)
        for number, name in enumerate(names)
    ]
    result = simulate(Plan(seed=seed, faults=drains))
    assert result.violations == []
    assert result.faults_fired[Kind.DRAIN] >= len(names)
    assert result.outcomes["done"] > 50
    assert set(result.outcomes) <= {"done", "not awaited", "AbortedByClient", "LeaseOver"}
    assert result.outcomes["LeaseOver"] <= 1


def test_known_peers_are_met_whatever_else_happens_and_disturb_nobody() -> None:
    """In the seeds that draw some."""
    drawn = (draw_plan(seed) for seed in range(200))
    knowing = [plan for plan in drawn if any(fault.kind is Kind.KNOWN_PEER for fault in plan.faults)]
    assert len(knowing) > 15
    named = [fault for plan in knowing for fault in plan.faults if fault.kind is Kind.KNOWN_PEER]
    assert {fault.at_seconds == 0.0 for fault in named} == {True, False}  # by an option, and by a message
    for plan in knowing[:4]:
        assert simulate(plan).violations == []


@pytest.mark.parametrize("at_seconds", [0.0, 0.5], ids=["by an option", "by a message"])
def test_a_known_peer_that_was_away_is_met_without_a_request(at_seconds: float) -> None:
    """It comes back under another name when nobody asks for anything any more."""
    plan = [
        Fault(kind=Kind.KNOWN_PEER, target="d0>p0", at_seconds=at_seconds, duration_seconds=1.0),
        Fault(kind=Kind.CRASH_NEW_ID, target="p0", at_seconds=1.0, duration_seconds=20.0),
    ]
    result = simulate(Plan(seed=0, faults=plan))
    assert result.violations == []
    met = [
        seconds
        for seconds, record in result.timed_trace()
        if (record.machine, record.subject, record.to_state) == ("peer", "p0-life2", "ready")
    ]
    assert 21.0 < met[0] < 24.0


def test_an_engine_that_dies_while_it_drains_is_an_engine_that_dies() -> None:
    plan = [
        Fault(kind=Kind.DRAIN, target="p0", at_seconds=1.0, duration_seconds=0.1),
        Fault(kind=Kind.CRASH_SAME_ID, target="p0", at_seconds=1.03, duration_seconds=0.5),
        Fault(kind=Kind.DRAIN, target="p0", at_seconds=2.5, duration_seconds=0.1),
    ]
    for seed in range(3):
        assert simulate(Plan(seed=seed, faults=plan)).violations == []


def test_a_router_that_repeats_itself_elsewhere_or_after_a_restart_gets_no_wrong_kv() -> None:
    repeats = [
        Fault(kind=Kind.ROUTER_RETRY, target=name, at_seconds=0.0, duration_seconds=9.0) for name in ("d0", "d1")
    ]
    restarts = [
        Fault(kind=kind, target=engine, at_seconds=at, duration_seconds=0.05)
        for kind, engine, at in (
            (Kind.CRASH_DECODE, "d0", 1.0),
            (Kind.CRASH_SAME_ID, "p0", 1.5),
            (Kind.CRASH_DECODE, "d1", 2.0),
        )
    ]
    result = simulate(Plan(seed=0, faults=[*repeats, *restarts]))
    assert result.violations == []
    assert result.outcomes["BlocksConsumed"] > 5
    assert result.outcomes["LeaseOver"] > 5


@pytest.mark.parametrize("seed", [3, 7])
def test_a_seed_gives_the_same_trace_in_another_process(seed: int) -> None:
    here = simulate(draw_plan(seed)).trace_lines()
    elsewhere = trace_in_a_process_of_its_own(["--seed", str(seed)], HASH_SEEDS[0])
    assert here.count(b"\n") > 500
    assert first_divergence(here, elsewhere) is None


def test_engines_of_every_sort_meet() -> None:
    """The simulator has to keep them apart from plain ones."""
    shapes = [draw_shape(seed) for seed in range(SHAPES)]
    pairs = [
        (shape.model, shape.engines[prefill], shape.engines[decode])
        for shape in shapes
        for prefill in shape.prefill_names
        for decode in shape.decode_names
    ]
    assert {(model.heads, p.tp_size, d.tp_size) for model, p, d in pairs} == set(product((1, 2), repeat=3))
    assert {model.second for model, _, _ in pairs} == set(SecondGroup)
    assert {(p.block_tokens > d.block_tokens) - (p.block_tokens < d.block_tokens) for _, p, d in pairs} == {-1, 0, 1}
    plans = [draw_plan(seed) for seed in range(SHAPES)]
    of_ranks = {fault.kind for plan in plans for fault in plan.faults if "." in fault.target}
    assert of_ranks >= {Kind.PAUSE, Kind.READ_STALL, Kind.NOTIFICATION_LOSS}


def test_ranks_disagree_and_tails_are_zeroed() -> None:
    stall = Fault(kind=Kind.READ_STALL, target="d0.1>p0", at_seconds=0.5, duration_seconds=9.0)
    seed = next(seed for seed in range(SHAPES) if draw_shape(seed).engines["d0"].tp_size > 1)
    result = simulate(Plan(seed=seed, faults=[stall]))
    assert result.violations == []
    assert result.coverage["a rank failed alone"]
    seed = next(
        seed
        for seed in range(SHAPES)
        if draw_shape(seed).engines["d0"].block_tokens > draw_shape(seed).engines["p0"].block_tokens
    )
    assert simulate(Plan(seed=seed, faults=[])).coverage["tail zeroed"]


@pytest.mark.parametrize("order", ["reported before", "reported with the last rank"])
def test_blocks_that_are_lifted_as_the_last_rank_reports_go_back_once(order: str) -> None:
    """The scheduler hears of all of it in one poll, before the script of the request runs again."""
    agenda, clock = Agenda(), MockClock(autojump_threshold=0)
    agenda.drive(clock)
    trio.run(_lift_with_the_last_report, agenda, order == "reported before", clock=clock)


async def _lift_with_the_last_report(agenda: Agenda, is_reported_before: bool) -> None:
    options = options_of(draw_shape(0))
    rules = ActiveFaults(Plan(seed=0, faults=[]))
    oracles = Oracles(options=options, faults=[], isolates=False)
    around = Surroundings(
        agenda=agenda,
        network=FakeNetwork(agenda),
        nixl=FakeNixlWorld(agenda, rules, lambda detail: oracles.complain("agents", detail)),
        faults=rules,
        oracles=oracles,
        options=options,
        trace=[],
        reads_inline=True,
        engines={"d0": EngineShape(tp_size=2)},
    )
    decode = DecodeEngine(around, "d0", random.Random(0))
    decode.chance = random.Random(0)  # the request is read, and its client stays
    decode.process.deliver = lambda command: None  # what the connector makes of it is said below
    prompt = Prompt(around.model, 1, 4 * BLOCK_TOKENS)
    source = Prefilled(
        address=PeerAddress(engine_id="p0", host="p0.sim", port=PORT, tp_size=1),
        engine="p0",
        owner="p0.1",
        lease=LeaseName("a", 1),
        prompt=prompt,
        tables=(Table(0, [0, 1, 2, 3]),),
        pool_blocks=8,
    )
    free = len(decode.pool)
    agenda.start(decode.serve("b", source))
    blocks = oracles.pulls["b"].blocks
    assert len(decode.pool) == free - len(blocks) == free - 4

    def report(tp_rank: int, *, quarantined: bool) -> None:
        failure = AbortedByClient()
        ended = ReceiveEnded(request_id="b", failure=failure, local_block_ids=blocks, quarantined=quarantined)
        decode.hear(tp_rank, ended)

    report(0, quarantined=True)
    if is_reported_before:
        await trio.sleep(1.0)
    assert len(decode.pool) == free - len(blocks)
    report(1, quarantined=False)
    decode.hear(0, QuarantineLifted(local_block_ids=blocks))
    await trio.sleep(1.0)
    assert sorted(decode.pool.take(free)) == list(range(free))  # each once
    assert (decode.process.ranks[0].memory.flat == JUNK).all()  # nobody has written into them since
    assert oracles.violations == []


@pytest.mark.parametrize(
    ("kind", "engine"), [(Kind.CRASH_DECODE, "d0"), (Kind.CRASH_NEW_ID, "p0"), (Kind.CRASH_SAME_ID, "p0")]
)
def test_an_engine_whose_last_rank_dies_late_comes_back(kind: Kind, engine: str) -> None:
    """Its port is that of the life before, whose tasks have to end first; the fault is over by then."""
    seed = next(seed for seed in range(SHAPES) if draw_shape(seed).engines[engine].tp_size > 1)
    crash = Fault(kind=kind, target=f"{engine}.1", at_seconds=1.0, duration_seconds=0.001)
    result = simulate(Plan(seed=seed, faults=[crash]))
    assert result.faults_fired[kind] == 1
    assert result.violations == []


def test_a_quarantine_that_is_full_refuses_what_is_new_and_comes_to_an_end() -> None:
    """A tenth of D's blocks may be in quarantine, and a tenth of its READs hang for a while; the probes are served."""
    hang = Fault(kind=Kind.FULL_QUARANTINE, target="d0", at_seconds=0.5, duration_seconds=4.0, probability=0.1)
    result = simulate(Plan(seed=6, faults=[hang]))
    assert result.violations == []
    assert result.outcomes["QuarantineFull"] == result.coverage["refused by a full quarantine"] > 0
    assert result.outcomes["done"] > 50


def test_a_divergence_is_found_where_it_begins() -> None:
    one = b"".join(b"record %d\n" % number for number in range(20))
    found = first_divergence(one, one.replace(b"record 12", b"record twelve"))
    assert found is not None
    assert (found.line, found.first, found.second) == (13, b"record 12", b"record twelve")
    assert found.before == [b"record %d" % number for number in range(7, 12)]
    shorter = first_divergence(one, one[: one.index(b"record 19")])
    assert shorter is not None
    assert (shorter.line, shorter.first, shorter.second) == (20, b"record 19", None)
    assert "the trace has ended" in str(shorter)
    assert first_divergence(one, one) is None


@pytest.mark.parametrize("level", ["1", "2"])
def test_the_command_line_says_what_happened(
    level: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["simulation", "--level", level, "--seed", "3", "--seeds", "2", "--fingerprint"])
    assert main() == 0
    said = capsys.readouterr().out
    expected = (
        "seeds        2",
        "requests",
        "virtual time",
        "faults       message_loss",
        "transitions taken",
        "fingerprint",
    )
    for line in expected:
        assert line in said
    assert said.endswith("verdict      all passed\n")


def test_a_seed_that_fails_is_a_page_and_its_shrunk_plan_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stall = Fault(kind=Kind.READ_STALL, target="d0>p0", at_seconds=1.5, duration_seconds=6.0)
    jump = Fault(kind=Kind.WALL_CLOCK_JUMP, target="d0", at_seconds=0.5, duration_seconds=0.1)
    plan, html = tmp_path / "plan.json", tmp_path / "run.html"
    monkeypatch.setattr("tests.simulation.__main__.FAILURES", tmp_path / "failures")
    with Patch() as patch:
        CATALOGUE["quarantine not reported"].apply(patch)
        for seed in range(SEEDS_OF_A_MUTANT):
            plan.write_bytes(msgspec.json.encode(Plan(seed=seed, faults=[stall, jump])))
            monkeypatch.setattr(sys, "argv", ["simulation", "--faults", str(plan), "--html", str(html)])
            if main() == 1:
                break
    shrunk = tmp_path / "run-shrunk.html"
    assert str(shrunk) in capsys.readouterr().out
    shown, smallest = (document_in(path) for path in (html, shrunk))
    assert [fault.kind for fault in shown.faults] == ["read_stall", "wall_clock_jump"]
    assert [fault.kind for fault in smallest.faults] == ["read_stall"]
    for each in (shown, smallest):
        assert len(each.stories) > 10
        assert {complaint.oracle for complaint in each.complaints} >= {"block reuse"}
        assert each.command is not None
        # A jump of the wall clock by hours moves nothing: times are the simulator's.
        assert all((row.steps[0] or 0) < 300e6 for row in each.histories)


def document_in(path: Path) -> Document:
    """What a timeline page shows."""
    (data,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', path.read_text(), re.DOTALL)
    return msgspec.json.decode(data, type=Document)


@pytest.mark.parametrize("level", ["1", "2"])
def test_a_page_of_a_seed_joins_both_sides_of_its_requests(
    level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "seed.html"
    monkeypatch.setattr(sys, "argv", ["simulation", "--level", level, "--seed", "3", "--html", str(path)])
    assert main() == 0
    shown = document_in(path)
    both = [row for row in shown.stories if row.requests and row.holds and row.leases]
    assert len(both) > 0.5 * len(shown.stories)
    assert all(lease in row.leases for row in both for lease in row.held)


def test_different_seeds_give_different_traces() -> None:
    assert simulate(draw_plan(0)).fingerprint() != simulate(draw_plan(2)).fingerprint()


def test_a_plan_survives_its_file() -> None:
    plan = draw_plan(7)
    assert plan.faults
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan


def test_a_failing_plan_is_shrunk_to_the_fault_that_matters() -> None:
    harmless = [Fault(kind=Kind.WALL_CLOCK_JUMP, target="d0", at_seconds=at, duration_seconds=0.1) for at in (0.5, 1.0)]
    stall = Fault(kind=Kind.READ_STALL, target="d0>p0", at_seconds=1.5, duration_seconds=6.0)
    with Patch() as patch:
        CATALOGUE["quarantine not reported"].apply(patch)
        for seed in range(SEEDS_OF_A_MUTANT):
            plan = Plan(seed=seed, faults=[harmless[0], stall, harmless[1]])
            if any(each.oracle == "block reuse" for each in simulate(plan).violations):
                assert shrink(plan, "block reuse", simulate).faults == [stall]
                return
    pytest.fail("no seed failed")
