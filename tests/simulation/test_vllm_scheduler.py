"""The simulator with vLLM's own scheduler: seeds, what must have happened in them, and broken connectors it notices.

A seed that fails here is replayed by `python -m tests.simulation --level vllm --seed N`, which shrinks it too.
Plans that once found a bug are in vllm/regressions/ and run as well.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any, TypeAlias

import msgspec
import pytest

from connector.protocol import LeaseGranted, QuarantineLifted, ReceiveEnded
from connector.scheduler.connector_scheduler import ConnectorScheduler
from connector.scheduler.kept_blocks import KeptBlocks
from connector.scheduler.lends import Lends
from connector.scheduler.pulls import Pulls
from connector.worker.ledger import TransferLedger
from statemachine.draining import Draining
from statemachine.lending import RELEASED, AnswerHold, HoldAsked, Lending
from statemachine.loads import Room
from tests.simulation import cluster
from tests.simulation.__main__ import read_plan
from tests.simulation.cluster import Result
from tests.simulation.faults import (
    DECODE_LINK_KINDS,
    MESSAGE_KINDS,
    PREFILL_KINDS,
    VLLM_KINDS,
    Fault,
    Kind,
    Plan,
    draw_plan,
    draw_shape,
)
from tests.simulation.vllm.cluster import (
    WITH_DRAFTS,
    WITH_STATES,
    WITH_STATES_AND_OVERLAP,
    WITH_WINDOWS,
    simulate,
)
from tests.simulation.vllm.sleep import MODES

pytestmark = pytest.mark.timeout(400)  # one plays all plans, if it runs by itself

REGRESSIONS = sorted((Path(__file__).parent / "vllm" / "regressions").glob("*.json"))
SEEDS = (3, 10, 13, 18, 29, 31, 37, 54, 56, 79, 82, 100, 107, 172, 192, 194, 671)
"""Engines speculate in 29, 37, 56 and 172. Models have windows in 3, 31 and 192. They have states in 10, 79, 100 and
194, where both roles cache them, in 18 and 671 (D alone does), 82 (P alone), 54, 107 and storm 153 (nobody). Steps
overlap in 3, 10, 18, 31, 54, 79, 82, 107, 194 and 671."""
STORMS = range(148, 156)
WITH_STATES_AND_HANGING_READS = 100
NOTIFICATION_KINDS = (Kind.NOTIFICATION_LOSS, Kind.NOTIFICATION_DUPLICATE, Kind.NOTIFICATION_DELAY)
STORMS_OVER_PREFILL = (*PREFILL_KINDS, Kind.WORKER_STOPS)

EXPECTED = (
    "D stands still",
    "P drains when a request comes",
    "a lease read by several engines",
    "a worker stopped on P",
    "abort on D in PREEMPTED",
    "abort on D in RUNNING",
    "abort on D in WAITING",
    "abort on D in WAITING_FOR_REMOTE_KVS",
    "abort on D in WAITING_FOR_REMOTE_KVS, loaded",
    "abort on P in FINISHED_LENGTH_CAPPED",
    "abort on P in PREEMPTED",
    "abort on P in RUNNING",
    "abort on P in WAITING",
    "abort on P in WAITING_FOR_REMOTE_KVS",
    "abort on P in WAITING_FOR_REMOTE_KVS, loaded",
    "a device is late",
    "a sample that comes late",
    "damaged parameters",
    "forged parameters",
    "full prefix hit on D",
    "full prefix hit on P",
    "lent on by a link",
    "load failed, recomputed",
    "load failed, request failed",
    "loaded by a link",
    "loaded on D",
    "loaded on P",
    "overlapping steps",
    "parameters of another prompt",
    "parameters used again",
    "partial prefix hit on D",
    "partial prefix hit on P",
    "preemption on D",
    "preemption on P",
    "prompt below a block on D",
    "prompt below a block on P",
    "prompt in chunks on D",
    "prompt in chunks on P",
    "quarantine",
    "read back",
    "samples on several engines",
    "several requests in a step",
    "stopped",
    "two samples",
)
"""What the schedulers do in these seeds, each at least once."""
EXPECTED_WITH_STATES = (
    "a device is late",
    "a prompt is computed whole, because nothing is lent",
    "abort on D in PREEMPTED",
    "abort on D in RUNNING",
    "abort on D in WAITING",
    "abort on D in WAITING_FOR_REMOTE_KVS",
    "abort on D in WAITING_FOR_REMOTE_KVS, loaded",
    "abort on P in FINISHED_LENGTH_CAPPED",
    "abort on P in PREEMPTED",
    "abort on P in RUNNING",
    "abort on P in WAITING",
    "abort on P in WAITING_FOR_REMOTE_KVS",
    "abort on P in WAITING_FOR_REMOTE_KVS, loaded",
    "full prefix hit on D",
    "full prefix hit on P",
    "load failed, recomputed",
    "load failed, request failed",
    "loaded on D",
    "loaded on P",
    "overlapping steps",
    "parameters used again",
    "partial prefix hit on D",
    "partial prefix hit on P",
    "preemption on D",
    "preemption on P",
    "prefix hit within a block on D",
    "prefix hit within a block on P",
    "prompt below a block on D",
    "prompt in chunks on D",
    "prompt in chunks on P",
    "quarantine",
    "read back",
    "samples on several engines",
    "stopped",
)
"""The same where models have states."""
NOT_WHERE_STEPS_OVERLAP = {
    "abort on P in WAITING_FOR_REMOTE_KVS",
    "abort on P in WAITING_FOR_REMOTE_KVS, loaded",
    "loaded on P",
    "quarantine",
    "read back",
}
"""A state moves on with each step, so D lends none when steps overlap. And no READ hangs in these seeds."""
EXPECTED_WITH_DRAFTS = (
    "abort on D in PREEMPTED",
    "abort on D in WAITING_FOR_REMOTE_KVS",
    "abort on D in WAITING_FOR_REMOTE_KVS, loaded",
    "drafts refused on D",
    "drafts refused on P",
    "drafts taken on D",
    "drafts taken on P",
    "full prefix hit on D",
    "load failed, recomputed",
    "load failed, request failed",
    "loaded on D",
    "loaded on P",
    "partial prefix hit on D",
    "preemption on D",
    "preemption on P",
    "prompt in chunks on P",
    "read back",
)
"""The same where a draft model has slots beyond the tokens of requests."""
EXPECTED_WITH_WINDOWS = (
    "abort on D in RUNNING",
    "abort on D in WAITING",
    "abort on D in WAITING_FOR_REMOTE_KVS",
    "abort on D in WAITING_FOR_REMOTE_KVS, loaded",
    "abort on P in FINISHED_LENGTH_CAPPED",
    "abort on P in RUNNING",
    "abort on P in WAITING",
    "abort on P in WAITING_FOR_REMOTE_KVS",
    "abort on P in WAITING_FOR_REMOTE_KVS, loaded",
    "full prefix hit on D",
    "full prefix hit on P",
    "load failed, recomputed",
    "load failed, request failed",
    "loaded on D",
    "loaded on P",
    "overlapping steps",
    "partial prefix hit on D",
    "partial prefix hit on P",
    "preemption on D",
    "prompt below a block on D",
    "prompt in chunks on D",
    "prompt in chunks on P",
    "read back",
    "samples on several engines",
)
"""The same where they have windows."""


def reads_that_hang(seed: int) -> Plan:
    """From when the engines have met, and for longer than a request waits for them."""
    shape = draw_shape(seed)
    links = [f"{d}>{p}" for p in shape.prefill_names for d in shape.decode_names]
    stall = Fault(kind=Kind.READ_STALL, target="", at_seconds=1.5, duration_seconds=9.0, probability=0.6)
    return Plan(seed=seed, faults=[msgspec.structs.replace(stall, target=link) for link in links])


def storm(seed: int) -> Plan:
    """Two or three kinds of faults on all engines or links. Those of handshakes begin when the engines meet."""
    shape = draw_shape(seed)
    faults = []
    for number, kind in enumerate(VLLM_KINDS):
        if number % len(STORMS) != seed - STORMS.start:
            continue
        if kind in MESSAGE_KINDS:
            targets = [f"{p}>{d}" for p in shape.prefill_names for d in shape.decode_names]
        elif kind in DECODE_LINK_KINDS:
            targets = [f"{d}>{p}" for p in shape.prefill_names for d in shape.decode_names]
        else:
            targets = shape.prefill_names if kind in STORMS_OVER_PREFILL else shape.decode_names
        at_seconds = 0.0 if kind in MESSAGE_KINDS or kind is Kind.PREPARE_REFUSED else 0.5
        if kind is Kind.CRASH_NEW_ID:
            at_seconds = 1.5  # there must be somebody left to tell that a worker has stopped
        if kind is Kind.READ_STALL:
            at_seconds = 1.5  # engines that have not met by then read nothing at all
        # Longer than a request waits for its READs, so that blocks are quarantined, and than what comes first: engines
        # that pause, poll nothing or are started again.
        duration_seconds = 9.0 if kind in DECODE_LINK_KINDS else 2.5
        faults += [
            Fault(kind=kind, target=target, at_seconds=at_seconds, duration_seconds=duration_seconds, probability=0.6)
            for target in targets
        ]
    return Plan(seed=seed, faults=faults)


@functools.cache
def result_of(seed: int) -> Result:
    return simulate(storm(seed) if seed in STORMS else draw_plan(seed, VLLM_KINDS))


@pytest.mark.parametrize("seed", [*SEEDS, *STORMS])
def test_seed(seed: int) -> None:
    result = result_of(seed)
    assert result.violations == []
    assert result.requests > 20
    assert result.outcomes["done"] > 0


@pytest.mark.parametrize("path", REGRESSIONS, ids=lambda path: path.stem)
def test_regression(path: Path) -> None:
    assert simulate(read_plan(path)).violations == []


def test_a_decode_engine_that_lends_back_drains() -> None:
    """What comes meanwhile it answers, and lends nothing of it (an oracle of `VllmEngine`)."""
    result = simulate(Plan(seed=2, faults=[msgspec.structs.replace(DRAIN, target="d0")]))
    assert result.violations == []
    assert result.coverage["read back"] > 10
    assert result.coverage["D drains when a request comes"] > 0
    assert result.coverage["an engine drained"] == 1


def test_engines_sleep_and_wake_up() -> None:
    """In each of vLLM's modes; who comes while they sleep waits, and is served."""
    coverage: Counter[str] = Counter()
    for seed in (1, 8, 45):
        result = simulate(Plan(seed=seed, faults=SLEEPS))
        assert result.violations == []
        assert result.outcomes["done"] > 0
        coverage += result.coverage
    for role in "PD":
        assert [mode for mode in MODES if not coverage[f"{role} asleep in mode {mode}"]] == []
        assert coverage[f"{role} woke up, and requests were waiting"] > 0


def test_everything_that_matters_happens_in_these_seeds() -> None:
    hanging = simulate(reads_that_hang(WITH_STATES_AND_HANGING_READS))
    assert hanging.violations == []
    coverage, faults = Counter(hanging.coverage), Counter(hanging.faults_fired)
    for seed in (*SEEDS, *STORMS):
        coverage += result_of(seed).coverage
        faults += result_of(seed).faults_fired
    expected = [*EXPECTED]
    for circumstance, whats in (
        (WITH_STATES, EXPECTED_WITH_STATES),
        (WITH_STATES_AND_OVERLAP, sorted(set(EXPECTED_WITH_STATES) - NOT_WHERE_STEPS_OVERLAP)),
        (WITH_WINDOWS, EXPECTED_WITH_WINDOWS),
        (WITH_DRAFTS, EXPECTED_WITH_DRAFTS),
    ):
        expected += [f"{what}, {circumstance}" for what in whats]
    assert [what for what in expected if not coverage[what]] == []
    # Engines of ours send no notifications; level 1 has built-in ones.
    assert [kind for kind in VLLM_KINDS if not faults[kind] and kind not in NOTIFICATION_KINDS] == []


# --- oracles complain about what is broken --------------------------------------------------------------------------


def load_for_whatever_prompt(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pulls, "_check_prompt", lambda *_: None)


def keep_no_blocks(patch: pytest.MonkeyPatch) -> None:
    finished = ConnectorScheduler.request_finished
    patch.setattr(
        ConnectorScheduler, "request_finished", lambda self, *arguments: (False, finished(self, *arguments)[1])
    )


def never_tell_of_a_grant(patch: pytest.MonkeyPatch) -> None:
    grant = Lends._grant

    def in_silence(self: Lends, *arguments: Any) -> dict[str, Any]:
        tell = self._tell
        patch.setattr(self, "_tell", lambda command: isinstance(command, LeaseGranted) or tell(command))
        params = grant(self, *arguments)
        patch.setattr(self, "_tell", tell)
        return params

    patch.setattr(Lends, "_grant", in_silence)


def change_ends_of_loads(patch: pytest.MonkeyPatch, **changes: Any) -> None:
    """The ledger of each worker hears of every end with these fields changed."""
    record = TransferLedger.record

    def changed(self: TransferLedger, event: Any) -> None:
        record(self, msgspec.structs.replace(event, **changes) if isinstance(event, ReceiveEnded) else event)

    patch.setattr(TransferLedger, "record", changed)


def report_quarantined_blocks_as_free(patch: pytest.MonkeyPatch) -> None:
    change_ends_of_loads(patch, quarantined=False)


def never_lift_a_quarantine(patch: pytest.MonkeyPatch) -> None:
    record = TransferLedger.record
    patch.setattr(
        TransferLedger,
        "record",
        lambda self, outcome: None if isinstance(outcome, QuarantineLifted) else record(self, outcome),
    )


def say_held_of_what_was_released(patch: pytest.MonkeyPatch) -> None:
    hold = Lending._hold

    def generously(self: Lending, asked: HoldAsked, now_ns: int) -> None:
        hold(self, asked, now_ns)
        answer = self._outcome.effects[-1]
        assert isinstance(answer, AnswerHold)
        released = tuple((lease, self._limits.lease_ns) for lease, why in answer.gone if why == RELEASED)
        gone = tuple(each for each in answer.gone if each[1] != RELEASED)
        self._outcome.effects[-1] = msgspec.structs.replace(answer, held=answer.held + released, gone=gone)

    patch.setattr(Lending, "_hold", generously)


def lend_although_it_is_to_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Draining, "accepts", True)


def tell_nobody_that_it_has_slept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ConnectorScheduler, "serve_handshakes", lambda *_: None)


def never_forget_what_was_read(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TransferLedger, "transfers", 1)


def pass_nobody_over(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KeptBlocks, "room_for", lambda *_: Room.ENOUGH)


DRAIN = Fault(kind=Kind.DRAIN, target="p0", at_seconds=1.0, duration_seconds=0.1)
SLEEPS = [
    Fault(kind=Kind.SLEEP, target="p0", at_seconds=1.0, duration_seconds=1.5),
    Fault(kind=Kind.SLEEP, target="d0", at_seconds=2.0, duration_seconds=1.0),
]
STALL = Fault(kind=Kind.READ_STALL, target="d0>p0", at_seconds=1.5, duration_seconds=6.0)

Broken: TypeAlias = tuple[Callable[[pytest.MonkeyPatch], None], list[Fault], int, str]
"""What is broken, under which faults and seed, and the oracle that notices."""

BROKEN: list[Broken] = [
    (load_for_whatever_prompt, [], 12, "bytes"),
    (keep_no_blocks, [], 12, "scheduler"),
    (never_tell_of_a_grant, [], 12, "leaks"),
    (report_quarantined_blocks_as_free, [STALL], 2, "block reuse"),
    (never_lift_a_quarantine, [STALL], 2, "blocks"),
    (say_held_of_what_was_released, [], 1, "proof"),
    (lend_although_it_is_to_end, [DRAIN], 2, "draining"),
    (pass_nobody_over, [], 2, "standstill"),
    (tell_nobody_that_it_has_slept, SLEEPS, 8, "recovery"),
    (never_forget_what_was_read, SLEEPS, 8, "sleep"),
]
"""One for each oracle, with quick seeds; `test_broken_connectors` has others."""


def oracles_that_notice(
    break_it: Callable[[pytest.MonkeyPatch], None], faults: list[Fault], seed: int, patch: pytest.MonkeyPatch
) -> set[str]:
    patch.setattr(cluster, "LIVENESS_SECONDS", 15.0)  # what never ends is as open then as after two minutes
    break_it(patch)
    return {violation.oracle for violation in simulate(Plan(seed=seed, faults=faults)).violations}


def name_of(value: object) -> str:
    return value.__name__ if isinstance(value, FunctionType) else ""


@pytest.mark.parametrize(("break_it", "faults", "seed", "oracle"), BROKEN, ids=name_of)
def test_broken_connector_is_noticed(
    break_it: Callable[[pytest.MonkeyPatch], None],
    faults: list[Fault],
    seed: int,
    oracle: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert oracle in oracles_that_notice(break_it, faults, seed, monkeypatch)
