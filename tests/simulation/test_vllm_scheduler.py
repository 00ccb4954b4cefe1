"""The simulator with vLLM's own scheduler: seeds, what must have happened in them, and broken connectors it notices.

A seed that fails here is replayed by `python -m tests.simulation --level vllm --seed N`, which shrinks it too.
Plans that once found a bug are in vllm/regressions/ and run as well.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from connector.protocol import LeaseGranted, QuarantineLifted, ReceiveEnded, StartPull
from connector.scheduler import lends
from connector.scheduler.connector_scheduler import ConnectorScheduler
from connector.scheduler.lends import Lends
from connector.scheduler.pulls import Pulls
from connector.step_metadata import WorkerReport
from connector.wire.signatures import ParamsKeys
from connector.worker.finishing import Finishing, Loaded
from connector.worker.ledger import TransferLedger
from statemachine.lending import RELEASED, AnswerHold, HoldAsked, Lending
from tests.simulation import cluster
from tests.simulation.__main__ import read_plan
from tests.simulation.cluster import Result
from tests.simulation.divergence import HASH_SEEDS, first_divergence, trace_in_a_process_of_its_own
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

pytestmark = pytest.mark.timeout(400)  # some play all plans by themselves, or in a process that imports vLLM

REGRESSIONS = sorted((Path(__file__).parent / "vllm" / "regressions").glob("*.json"))
SEEDS = (3, 13, 18, 20, 24, 37, 56, 57, 79, 82, 100, 107, 109, 192, 194)
"""Engines speculate in 20, which has windows, 37, 56 and 57. Models have windows in 3, whose steps overlap, and in 192.
They have states in 79, 100 and 194, where both roles cache them, in 18 and 109 (D alone does), 82 (P alone), 107 and
storm 153 (nobody). Steps overlap in 18, 79, 82, 107 and 194."""
STORMS = range(148, 156)
NOTIFICATION_KINDS = (Kind.NOTIFICATION_LOSS, Kind.NOTIFICATION_DUPLICATE, Kind.NOTIFICATION_DELAY)
STORMS_OVER_PREFILL = (*PREFILL_KINDS, Kind.WORKER_STOPS)

EXPECTED = (
    "D stands still",
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
    "damaged parameters",
    "forged parameters",
    "full prefix hit on D",
    "full prefix hit on P",
    "load failed, recomputed",
    "load failed, request failed",
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


def test_everything_that_matters_happens_in_these_seeds() -> None:
    coverage: Counter[str] = Counter()
    faults: Counter[Kind] = Counter()
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


@pytest.mark.slow
def test_a_seed_gives_the_same_trace_in_another_process() -> None:
    here = result_of(SEEDS[0]).trace_lines()
    elsewhere = trace_in_a_process_of_its_own(["--level", "vllm", "--seed", str(SEEDS[0])], HASH_SEEDS[0])
    assert here.count(b"\n") > 500
    assert first_divergence(here, elsewhere) is None


# --- oracles complain about what is broken --------------------------------------------------------------------------


def ignore_the_prefix_hit_when_counting(patch: pytest.MonkeyPatch) -> None:
    matched = ConnectorScheduler.get_num_new_matched_tokens
    patch.setattr(
        ConnectorScheduler,
        "get_num_new_matched_tokens",
        lambda self, request, num_computed_tokens: matched(self, request, 0),
    )


def ignore_the_prefix_hit_when_pairing(patch: pytest.MonkeyPatch) -> None:
    load = Pulls.load

    def paired_from_the_start(self: Pulls, *arguments: Any) -> Any:
        command = load(self, *arguments)
        if isinstance(command, StartPull):
            groups = tuple(msgspec.structs.replace(group, local_first=0) for group in command.groups)
            return msgspec.structs.replace(command, groups=groups)
        return command

    patch.setattr(Pulls, "load", paired_from_the_start)


def believe_forged_parameters(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ParamsKeys, "find_fault", lambda self, signature, params, *, lends_back: None)


def load_for_whatever_prompt(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pulls, "_check_prompt", lambda *_: None)


def keep_no_blocks(patch: pytest.MonkeyPatch) -> None:
    finished = ConnectorScheduler.request_finished
    patch.setattr(
        ConnectorScheduler, "request_finished", lambda self, *arguments: (False, finished(self, *arguments)[1])
    )


def lend_back_what_a_step_more_writes_into(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lends, "_can_lend_back", lambda vllm_config, groups: True)
    patch.setattr(Lends, "_is_settled", lambda self, request: True)


def never_tell_of_a_grant(patch: pytest.MonkeyPatch) -> None:
    grant = Lends._grant

    def in_silence(self: Lends, *arguments: Any) -> dict[str, Any]:
        tell = self._tell
        patch.setattr(self, "_tell", lambda command: isinstance(command, LeaseGranted) or tell(command))
        params = grant(self, *arguments)
        patch.setattr(self, "_tell", tell)
        return params

    patch.setattr(Lends, "_grant", in_silence)


def call_every_load_a_success(patch: pytest.MonkeyPatch) -> None:
    record = TransferLedger.record

    def optimistically(self: TransferLedger, outcome: Any) -> None:
        if isinstance(outcome, ReceiveEnded):
            outcome = msgspec.structs.replace(outcome, failure=None)
        record(self, outcome)

    patch.setattr(TransferLedger, "record", optimistically)


def report_quarantined_blocks_as_free(patch: pytest.MonkeyPatch) -> None:
    record = TransferLedger.record

    def carelessly(self: TransferLedger, outcome: Any) -> None:
        if isinstance(outcome, ReceiveEnded):
            outcome = msgspec.structs.replace(outcome, quarantined=False)
        record(self, outcome)

    patch.setattr(TransferLedger, "record", carelessly)


def never_lift_a_quarantine(patch: pytest.MonkeyPatch) -> None:
    record = TransferLedger.record
    patch.setattr(
        TransferLedger,
        "record",
        lambda self, outcome: None if isinstance(outcome, QuarantineLifted) else record(self, outcome),
    )


def report_every_load_twice(patch: pytest.MonkeyPatch) -> None:
    finish = Finishing.finish
    before: dict[int, set[str]] = {}

    def once_more(self: Finishing, loaded: Sequence[Loaded]) -> set[str]:
        finished = finish(self, loaded)
        repeated, before[id(self)] = before.get(id(self), set()), finished
        return finished | repeated

    patch.setattr(Finishing, "finish", once_more)


def report_before_the_device_is_done(patch: pytest.MonkeyPatch) -> None:
    finish = Finishing.finish

    def at_once(self: Finishing, loaded: Sequence[Loaded]) -> set[str]:
        finish(self, loaded)
        return {each.request_id for each in loaded}

    patch.setattr(Finishing, "finish", at_once)


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


def go_on_lending_when_a_worker_has_stopped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ConnectorScheduler, "_stop_lending", lambda self, reason: None)


def forget_what_the_second_rank_quarantined(patch: pytest.MonkeyPatch) -> None:
    aggregate = WorkerReport.aggregate

    def of_one_rank(self: WorkerReport, other: WorkerReport) -> WorkerReport:
        return dataclasses.replace(aggregate(self, other), quarantined=self.quarantined)

    patch.setattr(WorkerReport, "aggregate", of_one_rank)


STALL = Fault(kind=Kind.READ_STALL, target="d0>p0", at_seconds=0.0, duration_seconds=6.0)
STOPPED = Fault(kind=Kind.WORKER_STOPS, target="p0", at_seconds=1.0, duration_seconds=2.0)
ERRORS = Fault(kind=Kind.READ_ERROR, target="d0>p0", at_seconds=0.0, duration_seconds=4.0)


BROKEN: list[tuple[Callable[[pytest.MonkeyPatch], None], list[Fault], int, str]] = [
    (ignore_the_prefix_hit_when_counting, [], 12, "scheduler"),
    (ignore_the_prefix_hit_when_pairing, [], 12, "bytes"),
    (believe_forged_parameters, [], 4, "bytes"),
    (load_for_whatever_prompt, [], 12, "bytes"),
    (keep_no_blocks, [], 12, "scheduler"),
    (lend_back_what_a_step_more_writes_into, [], 107, "bytes"),
    (never_tell_of_a_grant, [], 12, "leaks"),
    (call_every_load_a_success, [ERRORS], 12, "bytes"),
    (report_quarantined_blocks_as_free, [STALL], 2, "block reuse"),
    (never_lift_a_quarantine, [STALL], 9, "blocks"),
    (report_every_load_twice, [], 12, "scheduler"),
    (report_before_the_device_is_done, [], 24, "bytes"),
    (say_held_of_what_was_released, [], 1, "proof"),
    (go_on_lending_when_a_worker_has_stopped, [STOPPED], 12, "scheduler"),
    (forget_what_the_second_rank_quarantined, [STALL], 2, "blocks"),
]
"""What is broken, under which faults and seed, and the oracle that notices. The seeds are quick ones."""


@pytest.mark.parametrize(
    ("break_it", "faults", "seed", "oracle"),
    BROKEN,
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_broken_connector_is_noticed(
    break_it: Callable[[pytest.MonkeyPatch], None],
    faults: list[Fault],
    seed: int,
    oracle: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = Plan(seed=seed, faults=faults)
    monkeypatch.setattr(cluster, "LIVENESS_SECONDS", 15.0)  # what never ends is as open then as after two minutes
    break_it(monkeypatch)
    assert oracle in {violation.oracle for violation in simulate(plan).violations}


def test_what_the_connectors_are_broken_in_passes_unbroken() -> None:
    plans = [Plan(seed=seed, faults=faults) for _, faults, seed, _ in BROKEN]
    for index, plan in enumerate(plans):
        if plan not in plans[:index]:
            assert simulate(plan).violations == []
