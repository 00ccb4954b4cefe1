"""More broken connectors that the simulator with vLLM's own scheduler notices, and what all of them rest on: unbroken,
the same plans pass; a seed is the same run in every process. `test_vllm_scheduler` has a broken one for each oracle.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from connector.protocol import StartPull
from connector.scheduler import lends
from connector.scheduler.connector_scheduler import ConnectorScheduler
from connector.scheduler.lends import Lends
from connector.scheduler.pulls import Pulls
from connector.step_metadata import WorkerReport
from connector.wire.signatures import ParamsKeys
from connector.worker.finishing import Finished, Finishing, Loaded
from tests.simulation.divergence import HASH_SEEDS, first_divergence, trace_in_a_process_of_its_own
from tests.simulation.faults import Fault, Kind, Plan
from tests.simulation.test_vllm_scheduler import (
    BROKEN,
    SEEDS,
    STALL,
    Broken,
    change_ends_of_loads,
    name_of,
    oracles_that_notice,
    result_of,
)
from tests.simulation.vllm.cluster import simulate

pytestmark = pytest.mark.timeout(400)


@pytest.mark.slow
def test_a_seed_gives_the_same_trace_in_another_process() -> None:
    here = result_of(SEEDS[0]).trace_lines()
    elsewhere = trace_in_a_process_of_its_own(["--level", "vllm", "--seed", str(SEEDS[0])], HASH_SEEDS[0])
    assert here.count(b"\n") > 500
    assert first_divergence(here, elsewhere) is None


def ignore_the_prefix_hit_when_counting(patch: pytest.MonkeyPatch) -> None:
    matched = ConnectorScheduler.get_num_new_matched_tokens
    patch.setattr(
        ConnectorScheduler,
        "get_num_new_matched_tokens",
        lambda self, request, num_computed_tokens: matched(self, request, 0),
    )


def ignore_the_prefix_hit_when_pairing(patch: pytest.MonkeyPatch) -> None:
    load = Pulls.load

    def paired_from_the_start(self: Pulls, *arguments: Any, **options: Any) -> Any:
        command = load(self, *arguments, **options)
        if isinstance(command, StartPull):
            groups = tuple(msgspec.structs.replace(group, local_first=0) for group in command.groups)
            return msgspec.structs.replace(command, groups=groups)
        return command

    patch.setattr(Pulls, "load", paired_from_the_start)


def believe_forged_parameters(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ParamsKeys, "find_fault", lambda self, signature, params, *, lends_back: None)


def lend_back_what_a_step_more_writes_into(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lends, "_can_lend_back", lambda vllm_config, groups: True)
    patch.setattr(Lends, "_is_settled", lambda self, request: True)


def call_every_load_a_success(patch: pytest.MonkeyPatch) -> None:
    change_ends_of_loads(patch, failure=None)


def report_every_load_twice(patch: pytest.MonkeyPatch) -> None:
    finish = Finishing.finish
    before: dict[int, set[str]] = {}

    def once_more(self: Finishing, loaded: Sequence[Loaded]) -> Finished:
        finished = finish(self, loaded)
        repeated, before[id(self)] = before.get(id(self), set()), finished.usable
        return finished._replace(usable=finished.usable | repeated)

    patch.setattr(Finishing, "finish", once_more)


def report_before_the_device_is_done(patch: pytest.MonkeyPatch) -> None:
    finish = Finishing.finish

    def at_once(self: Finishing, loaded: Sequence[Loaded]) -> Finished:
        return finish(self, loaded)._replace(usable={each.request_id for each in loaded})

    patch.setattr(Finishing, "finish", at_once)


def go_on_lending_when_a_worker_has_stopped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ConnectorScheduler, "_stop_lending", lambda self, reason: None)


def forget_what_the_second_rank_quarantined(patch: pytest.MonkeyPatch) -> None:
    aggregate = WorkerReport.aggregate

    def of_one_rank(self: WorkerReport, other: WorkerReport) -> WorkerReport:
        return dataclasses.replace(aggregate(self, other), quarantined=self.quarantined)

    patch.setattr(WorkerReport, "aggregate", of_one_rank)


STOPPED = Fault(kind=Kind.WORKER_STOPS, target="p0", at_seconds=1.0, duration_seconds=2.0)
ERRORS = Fault(kind=Kind.READ_ERROR, target="d0>p0", at_seconds=0.0, duration_seconds=4.0)

OTHERS: list[Broken] = [
    (ignore_the_prefix_hit_when_counting, [], 12, "scheduler"),
    (ignore_the_prefix_hit_when_pairing, [], 12, "bytes"),
    (believe_forged_parameters, [], 4, "bytes"),
    (lend_back_what_a_step_more_writes_into, [], 107, "bytes"),
    (call_every_load_a_success, [ERRORS], 12, "bytes"),
    (report_every_load_twice, [], 12, "scheduler"),
    (report_before_the_device_is_done, [], 24, "bytes"),
    (go_on_lending_when_a_worker_has_stopped, [STOPPED], 12, "scheduler"),
    (forget_what_the_second_rank_quarantined, [STALL], 2, "blocks"),
]


@pytest.mark.parametrize(("break_it", "faults", "seed", "oracle"), OTHERS, ids=name_of)
def test_broken_connector_is_noticed(
    break_it: Callable[[pytest.MonkeyPatch], None],
    faults: list[Fault],
    seed: int,
    oracle: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert oracle in oracles_that_notice(break_it, faults, seed, monkeypatch)


def test_what_the_connectors_are_broken_in_passes_unbroken() -> None:
    plans = [Plan(seed=seed, faults=faults) for _, faults, seed, _ in (*BROKEN, *OTHERS)]
    for index, plan in enumerate(plans):
        if plan not in plans[:index]:
            assert simulate(plan).violations == []
