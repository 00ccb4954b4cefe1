"""Runs mutants, each in a process of its own, and then the unbroken product in every place that they were run in.

A mutant is noticed when the oracle that it names complains, in the place that it names. One that hangs is ended after
`REAL_SECONDS_MAX` of real time, and counts as a survivor: virtual time has to tell. One whose run raises has not been
judged by an oracle, and counts as a survivor too.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Generic, TypeAlias, TypeVar

import hypothesis  # noqa: F401  a plugin of pytest, imported here once instead of in the process of every mutant
import msgspec
import pytest

from tests.explore import Product, Violation, explore
from tests.simulation.faults import Plan
from tests.simulation.level1.run import simulate as simulate_cores
from tests.simulation.mutants.mutant import ByTest, Explored, Level, Mutant, Patch, Seeds
from tests.simulation.scripted import simulate as simulate_actors
from tests.simulation.verdict import Violation as Complaint
from tests.simulation.vllm.cluster import simulate as simulate_schedulers

REAL_SECONDS_MAX = 120.0

T = TypeVar("T")


class Planned(msgspec.Struct, frozen=True):
    """A plan and the level of the simulator that it is for."""

    level: Level
    plan: Plan


class OneTest(msgspec.Struct, frozen=True):
    """A test, by file and name."""

    name: str


Run: TypeAlias = Product | Planned | OneTest
"""What can be done again without the mutant."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """How a mutant fared. `oracle` is None when it lived; `detail` is the complaint, or what happened instead."""

    oracle: str | None
    runs: list[Run]
    """Those that it went through; the last one noticed it, if any did."""
    seconds: float
    detail: str


def judge(mutant: Mutant) -> Verdict:
    """Run one mutant in this process, until it is noticed or its place has nothing more to offer."""
    started = time.perf_counter()
    runs: list[Run] = []
    seen: list[str] = []
    with Patch() as patch:
        mutant.apply(patch)
        for run in _runs(mutant):
            runs.append(run)
            for oracle, detail in _complaints(run):
                if _is_meant(mutant, oracle):
                    seconds = time.perf_counter() - started
                    return Verdict(oracle=oracle, runs=runs, seconds=seconds, detail=detail)
                seen.append(oracle)
    detail = f"{mutant.place.oracle} was silent" + (f", not {', '.join(sorted(set(seen)))}" if seen else "")
    return Verdict(oracle=None, runs=runs, seconds=time.perf_counter() - started, detail=detail)


def _runs(mutant: Mutant) -> Iterator[Run]:
    match mutant.place:
        case Explored(product=product):
            # Wider and wider: most of what is broken is seen in a narrow search.
            for deviations in range(product.deviations + 1):
                yield msgspec.structs.replace(product, deviations=deviations)
        case Seeds(level=level):
            for plan in mutant.place.plans():
                yield Planned(level, plan)
        case ByTest(test=test):
            yield OneTest(test)


def _is_meant(mutant: Mutant, oracle: str) -> bool:
    if isinstance(mutant.place, Explored):
        return oracle.startswith(mutant.place.invariant)
    return isinstance(mutant.place, ByTest) or oracle == mutant.place.oracle


def _complaints(run: Run) -> Iterator[tuple[str, str]]:
    """Who complains of the product as it is now, and what."""
    match run:
        case Product():
            try:
                explore(run)
            except Violation as violation:
                yield violation.invariant, str(violation)
        case Planned(level=level, plan=plan):
            for complaint in _SIMULATE[level](plan):
                yield complaint.oracle, complaint.detail
        case OneTest(name=name):
            failed = _failed_tests(name)
            if failed:
                yield f"`{name}`", ", ".join(failed)


def _simulate_cores(plan: Plan) -> list[Complaint]:
    return simulate_cores(plan).violations


def _simulate_actors(plan: Plan) -> list[Complaint]:
    return simulate_actors(plan).violations


def _simulate_schedulers(plan: Plan) -> list[Complaint]:
    return simulate_schedulers(plan).violations


_SIMULATE: dict[Level, Callable[[Plan], list[Complaint]]] = {
    1: _simulate_cores,
    2: _simulate_actors,
    "vllm": _simulate_schedulers,
}


class _Failures:
    """A plugin of pytest."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)


def _failed_tests(name: str) -> list[str]:
    """Run it in this process, where the product is broken. Raises when it could not be run at all."""
    failures = _Failures()
    arguments = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", name]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = pytest.main(arguments, plugins=[failures])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"pytest ended with {status!r} on {name}: {said.getvalue()[-2000:]}")
    return failures.failed


# --- the unbroken product -------------------------------------------------------------------------------------------


def complaints(runs: Iterable[Run]) -> list[str]:
    """What the oracles say of the product as it is."""
    found = []
    for run in runs:
        name = {Product: "product", Planned: "seed", OneTest: "test"}[type(run)]
        which = run.plan.seed if isinstance(run, Planned) else run.name
        found += [f"{name} {which}: {oracle}: {detail}" for oracle, detail in list(_complaints(run))[:1]]
    return found


def runs_used(verdicts: Iterable[Verdict]) -> list[list[Run]]:
    """What mutants went through, once each: of each product the widest, seeds with the same faults together, tests of
    one file together."""
    products: dict[str, Product] = {}
    plans: dict[tuple[Level, bytes], dict[int, Run]] = {}
    tests: dict[str, dict[str, Run]] = {}
    for run in (each for verdict in verdicts for each in verdict.runs):
        match run:
            case Product(name=name):
                known = products.get(name)
                if known is None or known.deviations < run.deviations:
                    products[name] = run
            case Planned(level=level, plan=plan):
                plans.setdefault((level, msgspec.json.encode(plan.faults)), {})[plan.seed] = run
            case OneTest(name=name):
                tests.setdefault(name.partition("::")[0], {})[name] = run
    groups: list[list[Run]] = [[product] for product in products.values()]
    groups += [list(plan.values()) for plan in plans.values()]
    return groups + [list(test.values()) for test in tests.values()]


# --- processes ------------------------------------------------------------------------------------------------------


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
