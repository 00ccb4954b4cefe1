"""Runs mutants, each in a process of its own, and then the unbroken product on every plan and seed that they used.

A mutant is killed when the oracle that it names complains (any, when it names none) within its seeds. One that hangs
is ended after `REAL_SECONDS_MAX` of real time, and counts as a survivor: virtual time has to tell. One whose run raises
out of the simulator has not been judged by an oracle, and counts as a survivor too.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Generic, TypeVar

import msgspec

from tests.simulation.cluster import simulate
from tests.simulation.faults import Plan
from tests.simulation.mutants.mutant import Mutant, Patch

REAL_SECONDS_MAX = 120.0

T = TypeVar("T")


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """How a mutant fared. `oracle` is None when it lived; `detail` is the complaint, or what happened instead."""

    oracle: str | None
    plans: list[Plan]
    """Those that it went through; the last one killed it, if any did."""
    seconds: float
    detail: str


def judge(mutant: Mutant) -> Verdict:
    """Run one mutant in this process, until it is killed or its seeds are used up."""
    started = time.perf_counter()
    seen: set[str] = set()
    plans: list[Plan] = []
    with Patch() as patch:
        mutant.apply(patch)
        for plan in mutant.plans():
            plans.append(plan)
            for violation in simulate(plan).violations:
                if mutant.oracle in (None, violation.oracle):
                    seconds = time.perf_counter() - started
                    return Verdict(oracle=violation.oracle, plans=plans, seconds=seconds, detail=violation.detail)
                seen.add(violation.oracle)
    detail = f"{mutant.oracle or 'no oracle'} was silent" + (f", not {', '.join(sorted(seen))}" if seen else "")
    return Verdict(oracle=None, plans=plans, seconds=time.perf_counter() - started, detail=detail)


def complaints(plans: Iterable[Plan]) -> list[str]:
    """What the oracles say of the product as it is."""
    return [
        f"seed {plan.seed}: {violation.oracle}: {violation.detail}"
        for plan in plans
        for violation in simulate(plan).violations[:1]
    ]


def plans_used(verdicts: Iterable[Verdict]) -> list[list[Plan]]:
    """The plans that mutants went through, once each, those with the same faults together."""
    used: dict[bytes, dict[int, Plan]] = {}
    for verdict in verdicts:
        for plan in verdict.plans:
            used.setdefault(msgspec.json.encode(plan.faults), {})[plan.seed] = plan
    return [list(plans.values()) for plans in used.values()]


@dataclass
class _Running(Generic[T]):
    job: T
    process: multiprocessing.process.BaseProcess
    ends_at: float


def in_processes(jobs: Iterable[T], work: Callable[[T], object], at_once: int) -> Iterator[tuple[T, object]]:
    """What `work` returns for each job, from a process of its own; an exception that ended it, or a TimeoutError."""
    fork = multiprocessing.get_context("fork")
    waiting = iter(jobs)
    running: dict[Connection, _Running[T]] = {}
    while True:
        while len(running) < at_once and (job := next(waiting, None)) is not None:
            ours, theirs = fork.Pipe(duplex=False)
            process = fork.Process(target=_answer, args=(theirs, work, job))
            process.start()
            theirs.close()
            running[ours] = _Running(job, process, time.perf_counter() + REAL_SECONDS_MAX)
        if not running:
            return
        patience = min(each.ends_at for each in running.values()) - time.perf_counter()
        ready = set(wait(list(running), max(0.0, patience)))
        for pipe, each in list(running.items()):
            if pipe not in ready and time.perf_counter() < each.ends_at:
                continue
            yield each.job, _result(pipe) if pipe in ready else _end(each.process)
            each.process.join()
            pipe.close()
            del running[pipe]


def _answer(pipe: Connection, work: Callable[[T], object], job: T) -> None:
    try:
        answer: object = work(job)
    except BaseException as error:
        answer = RuntimeError(f"{type(error).__name__}: {error}")
    pipe.send(answer)


def _result(pipe: Connection) -> object:
    try:
        return pipe.recv()
    except EOFError:
        return RuntimeError("its process ended without an answer")


def _end(process: multiprocessing.process.BaseProcess) -> TimeoutError:
    process.kill()
    return TimeoutError(f"it was ended after {REAL_SECONDS_MAX:g} s")
