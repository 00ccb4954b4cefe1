"""The result of a run of chaos: what was seen, which promises were not kept, and the table that people read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from tests.chaos.drains import Disturbance, Drain, counts, failed_in, is_excused
from tests.chaos.load import Call, Results, Usage
from tests.chaos.plan import DECODE
from tests.chaos.remains import Processes

QUANTILES = (0.5, 0.95, 1.0)
SLOWEST_KEPT = 20
MEMORY_RATIO_MAX = 1.1
"""Of a decode engine's memory after the chaos to that before. It was 1.00 (docs/performance.md)."""


class Tally(msgspec.Struct, kw_only=True):
    """Calls to one decode engine.

    Attributes:
        outcomes: right, wrong, left, client's error, error.
        errors: what clients saw that had done nothing wrong.
        own_errors: what clients saw that had caused it: how they used the request, and what they saw.
        seconds: of plain requests that were answered, the quantiles of QUANTILES.
        loaded: requests whose KV came from a prefill engine, as the engine counted them; of a built-in one 0.
        failures: kinds of failed loads, as the engine counted them.
    """

    outcomes: dict[str, int] = {}
    errors: dict[str, int] = {}
    own_errors: dict[str, int] = {}
    seconds: tuple[float, ...] = ()
    loaded: int = 0
    failures: dict[str, int] = {}


class Slow(msgspec.Struct, frozen=True, kw_only=True):
    """One of the calls that lasted longest."""

    engine: str
    name: str
    usage: str
    at_seconds: float
    seconds: float


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Resident memory of a worker."""

    engine: str
    at_seconds: float
    megabytes: float


class Report(msgspec.Struct, kw_only=True):
    """All that a run has to say."""

    connector: str
    seed: int
    seconds: float
    faults: dict[str, int] = {}
    impossible_faults: dict[str, int] = {}
    """Whose target was not there: a control socket of a built-in engine, or of one that had ended."""
    calls: dict[str, Tally] = {}
    lost_prefills: dict[str, int] = {}
    lives: dict[str, int] = {}
    slowest: list[Slow] = []
    wrong_answers: int = 0
    wrong_by_usage: dict[str, int] = {}
    never_ended: int = 0
    deaths: list[str] = []
    """Of decode engines."""
    drains: list[Drain] = []
    failed_in_drains: list[str] = []
    """Plain requests that failed with an engine which was drained, and nothing else of the plan is why."""
    excused_in_drains: int = 0
    """Those that failed with one to which something else was done as well."""
    left: list[str] = []
    """What engines held when everything had settled, and must not."""
    traces_wrong: list[str] = []
    """Records that the machines do not allow."""
    traced: int = 0
    memory: list[Memory] = []
    settled_seconds: float = 0.0
    processes_before: dict[str, Processes] = {}
    processes_ended: dict[str, Processes] = {}
    """When all had settled, before prefill engines were replaced."""
    processes_after: dict[str, Processes] = {}
    sockets_kept: dict[str, int] = {}
    """By prefill engine: those of `processes_ended` that NIXL keeps because decode engines have connected anew."""

    def count(self, results: Results, disturbances: Sequence[Disturbance] = ()) -> None:
        """Take what the clients saw, when all drains are known."""
        for engine in DECODE:
            calls = [call for call in results.calls if call.engine == engine]
            tally = self.calls.setdefault(engine, Tally())
            tally.outcomes = dict(Counter(_outcome(call) for call in calls))
            tally.errors = dict(Counter(c.error for c in calls if c.error and not c.is_caused_by_client))
            tally.own_errors = dict(
                Counter(f"{c.usage.value}: {c.error}" for c in calls if c.error and c.is_caused_by_client)
            )
            tally.seconds = _quantiles([c.seconds for c in calls if c.usage is Usage.PLAIN and c.is_right])
        self.slowest = [
            Slow(
                engine=call.engine,
                name=call.name,
                usage=call.usage.value,
                at_seconds=round(call.at_seconds, 1),
                seconds=round(call.seconds, 2),
            )
            for call in sorted(results.calls, key=lambda call: -call.seconds)[:SLOWEST_KEPT]
        ]
        self.wrong_answers = sum(call.is_wrong for call in results.calls)
        self.wrong_by_usage = dict(Counter(call.usage.value for call in results.calls if call.is_wrong))
        self.never_ended = sum(call.never_ended for call in results.calls)
        self.lost_prefills = dict(results.lost_prefills)
        for drain, call in failed_in(self.drains, results.calls):
            if is_excused(call, drain, disturbances):
                self.excused_in_drains += 1
            else:
                self.failed_in_drains.append(
                    f"{drain.engine}, drained by {drain.way} at {drain.from_seconds:.0f} s: {call.engine} answered "
                    f"{call.name} of {call.at_seconds:.1f} s with {call.error}"
                )

    @property
    def memory_grown(self) -> dict[tuple[str, str], tuple[float, float]]:
        """Megabytes before and after, of each process of the decode engines."""
        return {
            (engine, role): (before.resident_bytes / 1e6, after.resident_bytes / 1e6)
            for engine in DECODE
            for role, before in self.processes_before.get(engine, {}).items()
            # Not of one that was started again.
            if (after := self.processes_after.get(engine, {}).get(role)) is not None and after.pid == before.pid
        }

    @property
    def broken_promises(self) -> list[str]:
        """Empty: everything is as it must be with this project's connector."""
        broken = []
        if self.wrong_answers:
            broken.append(f"{self.wrong_answers} wrong answers")
        if self.never_ended:
            broken.append(f"{self.never_ended} calls did not end")
        broken += self.deaths
        recomputing = self.calls.get("recompute", Tally())
        broken += [f"recompute: {count} clients saw {error}" for error, count in recomputing.errors.items()]
        broken += [
            f"recompute: {count} clients saw {error}"
            for error, count in recomputing.own_errors.items()
            if not error.endswith(REFUSED_BY_VLLM)
        ]
        for engine, tally in self.calls.items():
            broken += [f"{engine}: {tally.failures[kind]} {kind}" for kind in BUGS if tally.failures.get(kind)]
            if not tally.outcomes.get(RIGHT):
                broken.append(f"{engine}: no right answer at all")
        broken += [each for drain in self.drains for each in drain.broken_promises]
        broken += self.failed_in_drains
        broken += [f"left: {each}" for each in self.left]
        broken += [
            f"left: {engine}, {role}: memory from {before:.0f} to {after:.0f} MB"
            for (engine, role), (before, after) in self.memory_grown.items()
            if after > MEMORY_RATIO_MAX * before
        ]
        broken += [f"trace: {each}" for each in self.traces_wrong]
        return broken


RIGHT = "right"
REFUSED_BY_VLLM = "HTTP 400"
BUGS = ("ActorCrashed", "ConnectorStopped")


def _outcome(call: Call) -> str:
    if call.is_wrong:
        return "wrong"
    if call.error:
        return "client's own error" if call.is_caused_by_client else "error"
    if call.left:
        return "client left"
    return RIGHT


def _quantiles(seconds: Sequence[float]) -> tuple[float, ...]:
    if not seconds:
        return ()
    ordered = sorted(seconds)
    return tuple(ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in QUANTILES)


# --- for people -------------------------------------------------------------------------------------------------------

LABEL_WIDTH = 62
COLUMN_WIDTH = 24


def render(reports: Sequence[Report]) -> str:
    """All reports side by side, a column each."""
    lines = [_line(f"seed {reports[0].seed}, {reports[0].seconds:g} s", [each.connector for each in reports])]

    def section(title: str, tables: Iterable[Mapping[str, object]]) -> None:
        kept = list(tables)
        names = list(dict.fromkeys(name for table in kept for name in table))
        if names:
            lines.append(f"\n{title}")
            lines.extend(_line(f"  {name}", [table.get(name, "-") for table in kept]) for name in names)

    section("faults", [each.faults for each in reports])
    section("faults whose target was not there", [each.impossible_faults for each in reports])
    section("drains", [_drains(each) for each in reports])
    section(
        "prefill calls that gave no parameters (the router goes on without)", [dict(r.lost_prefills) for r in reports]
    )
    for engine in DECODE:
        tallies = [each.calls.get(engine, Tally()) for each in reports]
        section(f"calls to the decode engine with policy `{engine}`", [tally.outcomes for tally in tallies])
        section(f"  `{engine}`: errors that no client caused", [tally.errors for tally in tallies])
        section(f"  `{engine}`: errors that clients caused", [tally.own_errors for tally in tallies])
        section(f"  `{engine}`: loads", [({"loaded": t.loaded} if t.loaded else {}) | t.failures for t in tallies])
        section(f"  `{engine}`: seconds of plain requests", [_latency(tally) for tally in tallies])
    section("result", [_result(each) for each in reports])
    section("wrong answers by what the client did", [each.wrong_by_usage for each in reports])
    section("left when all had settled", [dict.fromkeys(report.left, "left") for report in reports])
    section("memory before and after, MB", [_memory(each) for each in reports])
    return "\n".join(lines)


def _line(label: str, values: Iterable[object]) -> str:
    return f"{label:{LABEL_WIDTH}}" + "".join(f"{value!s:>{COLUMN_WIDTH}}" for value in values)


def _latency(tally: Tally) -> dict[str, object]:
    names = ("median", "95 of 100", "longest")
    return {name: f"{value:.2f}" for name, value in zip(names, tally.seconds, strict=False)}


def _drains(report: Report) -> dict[str, object]:
    if not report.drains:
        return {}
    return counts(report.drains) | {
        "plain requests that failed with a drained engine": len(report.failed_in_drains),
        "  and that something else of the plan explains": report.excused_in_drains,
    }


def _result(report: Report) -> dict[str, object]:
    said: dict[str, object] = {
        "wrong answers": report.wrong_answers,
        "calls that did not end": report.never_ended,
        "deaths of decode engines": len(report.deaths),
        "seconds until all had settled": f"{report.settled_seconds:.0f}",
    }
    if report.traced:
        said["trace records that the machines allow"] = report.traced - len(report.traces_wrong)
        said["trace records that they do not allow"] = len(report.traces_wrong)
    return said


def _memory(report: Report) -> dict[str, object]:
    return {
        f"{engine}, {role}": f"{before:.0f} / {after:.0f}"
        for (engine, role), (before, after) in report.memory_grown.items()
    }
