"""The simulator with vLLM's own scheduler: seeds, what must have happened in them, and broken connectors it notices.

A seed that fails here is replayed by `python -m tests.simulation --scheduler vllm --seed N`, which shrinks it too.
Plans that once found a bug are in vllm/regressions/ and run as well.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from connector.runtime.consumed import ConsumedBlocks
from connector.runtime.messages import LeaseGranted, QuarantineLifted, ReceiveEnded, StartPull
from connector.scheduler.connector_scheduler import ConnectorScheduler, PullPhase
from connector.worker.ledger import TransferLedger
from tests.simulation.__main__ import read_plan
from tests.simulation.cluster import Result
from tests.simulation.faults import (
    DECODE_LINK_KINDS,
    MESSAGE_KINDS,
    PREFILL_KINDS,
    Fault,
    Kind,
    Plan,
    draw_plan,
    draw_shape,
)
from tests.simulation.vllm.cluster import simulate

ROOT = Path(__file__).parents[2]
REGRESSIONS = sorted((Path(__file__).parent / "vllm" / "regressions").glob("*.json"))
SEEDS = range(8)
STORMS = range(148, 156)
SEEDS_OF_A_MUTANT = 6

EXPECTED = (
    "D stands still",
    "abort on D in PREEMPTED",
    "abort on D in RUNNING",
    "abort on D in WAITING",
    "abort on D in WAITING_FOR_REMOTE_KVS",
    "abort on D in WAITING_FOR_REMOTE_KVS, loaded",
    "abort on P in FINISHED_LENGTH_CAPPED",
    "abort on P in PREEMPTED",
    "abort on P in RUNNING",
    "abort on P in WAITING",
    "damaged parameters",
    "full prefix hit on D",
    "full prefix hit on P",
    "load failed, recomputed",
    "load failed, request failed",
    "overlapping steps",
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
    "several requests in a step",
    "two samples",
)
"""What the schedulers do in these seeds, each at least once."""


def storm(seed: int) -> Plan:
    """Two or three kinds of faults on all engines or links. Those of messages begin when the engines meet."""
    shape = draw_shape(seed)
    faults = []
    for number, kind in enumerate(Kind):
        if number % len(STORMS) != seed - STORMS.start:
            continue
        if kind in MESSAGE_KINDS:
            targets = [f"{p}>{d}" for p in shape.prefill_names for d in shape.decode_names]
        elif kind in DECODE_LINK_KINDS:
            targets = [f"{d}>{p}" for p in shape.prefill_names for d in shape.decode_names]
        else:
            targets = shape.prefill_names if kind in PREFILL_KINDS else shape.decode_names
        at_seconds = 0.0 if kind in MESSAGE_KINDS else 0.5
        # Longer than a request waits for its READs, so that blocks are quarantined.
        duration_seconds = 9.0 if kind is Kind.READ_STALL else 2.5
        faults += [
            Fault(kind=kind, target=target, at_seconds=at_seconds, duration_seconds=duration_seconds, probability=0.6)
            for target in targets
        ]
    return Plan(seed=seed, faults=faults)


@functools.cache
def result_of(seed: int) -> Result:
    return simulate(storm(seed) if seed in STORMS else draw_plan(seed))


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
    assert [what for what in EXPECTED if not coverage[what]] == []
    assert [kind for kind in Kind if not faults[kind]] == []


@pytest.mark.slow
@pytest.mark.timeout(240)  # two processes that import vLLM
def test_seeds_give_the_same_traces_in_every_process(tmp_path: Path) -> None:
    traces = []
    for hash_seed in ("1", "4711"):
        path = tmp_path / f"trace-{hash_seed}"
        command = [sys.executable, "-m", "tests.simulation", "--scheduler", "vllm", "--seed", "7", "--seeds", "2"]
        subprocess.run(
            [*command, "--trace", str(path)],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            check=True,
            timeout=110,
            capture_output=True,
        )
        traces.append(path.read_bytes())
    assert traces[0].count(b"\n") > 500
    assert traces[0] == traces[1]


# --- oracles complain about what is broken --------------------------------------------------------------------------


def never_untrack(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ConnectorScheduler, "_untrack", lambda self, request_id, pull: None)


def ignore_the_prefix_hit_when_counting(patch: pytest.MonkeyPatch) -> None:
    matched = ConnectorScheduler.get_num_new_matched_tokens
    patch.setattr(
        ConnectorScheduler,
        "get_num_new_matched_tokens",
        lambda self, request, num_computed_tokens: matched(self, request, 0),
    )


def ignore_the_prefix_hit_when_pairing(patch: pytest.MonkeyPatch) -> None:
    load = ConnectorScheduler._load

    def paired_from_the_start(self: ConnectorScheduler, request_id: str, pull: Any, blocks: Any) -> Any:
        command = load(self, request_id, pull, blocks)
        if isinstance(command, StartPull):
            remote = list(pull.remote.block_ids[0][: len(command.local_block_ids)])
            return msgspec.structs.replace(command, remote_block_ids=remote)
        return command

    patch.setattr(ConnectorScheduler, "_load", paired_from_the_start)


def keep_no_blocks(patch: pytest.MonkeyPatch) -> None:
    finished = ConnectorScheduler.request_finished
    patch.setattr(
        ConnectorScheduler, "request_finished", lambda self, *arguments: (False, finished(self, *arguments)[1])
    )


def load_once_more_after_a_failure(patch: pytest.MonkeyPatch) -> None:
    update = ConnectorScheduler.update_connector_output

    def unsettled(self: ConnectorScheduler, output: Any) -> None:
        update(self, output)
        for request_id in output.failed_recving:
            if request_id in self._pulls:
                self._pulls[request_id].phase = PullPhase.WAITING

    patch.setattr(ConnectorScheduler, "update_connector_output", unsettled)


def never_tell_of_a_grant(patch: pytest.MonkeyPatch) -> None:
    grant = ConnectorScheduler._grant

    def in_silence(self: ConnectorScheduler, *arguments: Any) -> dict[str, Any]:
        params = grant(self, *arguments)
        self._commands = [command for command in self._commands if not isinstance(command, LeaseGranted)]
        return params

    patch.setattr(ConnectorScheduler, "_grant", in_silence)


def call_every_load_a_success(patch: pytest.MonkeyPatch) -> None:
    hear = TransferLedger.hear

    def optimistically(self: TransferLedger, outcome: Any) -> None:
        if isinstance(outcome, ReceiveEnded):
            outcome = msgspec.structs.replace(outcome, failure=None)
        hear(self, outcome)

    patch.setattr(TransferLedger, "hear", optimistically)


def report_quarantined_blocks_as_free(patch: pytest.MonkeyPatch) -> None:
    hear = TransferLedger.hear

    def carelessly(self: TransferLedger, outcome: Any) -> None:
        if isinstance(outcome, ReceiveEnded):
            outcome = msgspec.structs.replace(outcome, quarantined=False)
        hear(self, outcome)

    patch.setattr(TransferLedger, "hear", carelessly)


def never_lift_a_quarantine(patch: pytest.MonkeyPatch) -> None:
    hear = TransferLedger.hear
    patch.setattr(
        TransferLedger,
        "hear",
        lambda self, outcome: None if isinstance(outcome, QuarantineLifted) else hear(self, outcome),
    )


def report_every_load_twice(patch: pytest.MonkeyPatch) -> None:
    take = TransferLedger.take_results
    before: dict[int, set[str]] = {}

    def once_more(self: TransferLedger) -> KVConnectorTransferResults:
        results = take(self)
        repeated, before[id(self)] = before.get(id(self), set()), set(results.finished_recving)
        results.finished_recving |= repeated
        return results

    patch.setattr(TransferLedger, "take_results", once_more)


def forget_what_was_consumed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ConsumedBlocks, "has", lambda self, engine_id, remote_request_id: False)


STALL = Fault(kind=Kind.READ_STALL, target="d0>p0", at_seconds=0.0, duration_seconds=6.0)
ERRORS = Fault(kind=Kind.READ_ERROR, target="d0>p0", at_seconds=0.0, duration_seconds=4.0)


@pytest.mark.parametrize(
    ("break_it", "faults", "oracle"),
    [
        (never_untrack, [], "leaks"),
        (ignore_the_prefix_hit_when_counting, [], "scheduler"),
        (ignore_the_prefix_hit_when_pairing, [], "bytes"),
        (keep_no_blocks, [], "scheduler"),
        (load_once_more_after_a_failure, [ERRORS], "report once"),
        (never_tell_of_a_grant, [], "leaks"),
        (call_every_load_a_success, [ERRORS], "bytes"),
        (report_quarantined_blocks_as_free, [STALL], "block reuse"),
        (never_lift_a_quarantine, [STALL], "blocks"),
        (report_every_load_twice, [], "scheduler"),
        (forget_what_was_consumed, [], "bytes"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_broken_connector_is_noticed(
    break_it: Callable[[pytest.MonkeyPatch], None], faults: list[Fault], oracle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(monkeypatch)
    seen: Counter[str] = Counter()
    for seed in range(SEEDS_OF_A_MUTANT):
        seen.update(violation.oracle for violation in simulate(Plan(seed=seed, faults=faults)).violations)
        if seen[oracle]:
            return
    pytest.fail(f"the oracle {oracle!r} saw nothing in {SEEDS_OF_A_MUTANT} seeds; others: {dict(seen)}")
