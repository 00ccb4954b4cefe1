"""`nixl-actor trace …`: what trace files say. Renders what `summary.py`, `course.py` and `conformance.py` find.

Exit status: 0; 1 when nothing was found, or `check` has findings; 2 when the traces cannot be read, or there are none.
"""

from __future__ import annotations

import gc
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer

from connector.tools.cli.output import PIPE_COLUMNS, plain, say, say_json, wall_clock

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from connector.observe.clocks import Clock
    from connector.observe.history import History, Story
    from connector.tools.summary import Outcome, SlowRequest, Summary, Times
    from connector.tools.trace_reader import ProcessTrace
    from statemachine.trace import TransitionRecord

NOTHING_FOUND = 1
CANNOT_READ = 2

CANDIDATES_MAX = 10
FINDINGS_SHOWN = 50
SLOWEST_STATES = 5
ENDS_SHOWN = 3
DIGITS = 4
"""How many digits durations have here, where people compare them."""

app = typer.Typer(help="What the trace files of one or several engines say.", no_args_is_help=True)

Read = TypeVar("Read")

Directory = Annotated[
    Path,
    typer.Argument(
        metavar="DIR",
        help="Where the engines write their traces (option trace_directory); files of several machines may be put "
        "together. A single file too.",
        exists=True,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]


def _seconds(text: str) -> float:
    from connector.tools.durations import parse_duration

    try:
        return parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


Since = Annotated[
    float | None,
    typer.Option(
        "--since",
        metavar="DURATION",
        parser=_seconds,
        help="Only what has ended since then, or has not: 1h is the last hour. Units: s, min, h, d.",
    ),
]


@dataclass
class _Traces:
    """What is in a directory, read once."""

    processes: list[ProcessTrace]

    @cached_property
    def histories(self) -> list[History]:
        from connector.observe.history import histories
        from connector.tools.trace_reader import merged

        return histories(merged(self.processes))

    @cached_property
    def stories(self) -> list[Story]:
        from connector.observe.history import stories

        return stories(self.histories)

    @cached_property
    def clocks(self) -> dict[int, Clock]:
        from connector.observe.clocks import clocks

        return clocks(self.stories)


def _read(directory: Path) -> _Traces:
    from connector.tools.trace_reader import read_processes

    traces = _Traces(_reading(directory, lambda: read_processes(directory)))
    if not any(process.records for process in traces.processes):
        _fail(f"no transition is recorded in {directory}", NOTHING_FOUND)
    return traces


def records_about(request: str, directory: Path) -> list[TransitionRecord]:
    """What bears on a request that is called so, or has this in its id."""
    from connector.tools.trace_reader import read_trace_about

    return _reading(directory, lambda: read_trace_about(directory, request))


def _reading(directory: Path, read: Callable[[], Read]) -> Read:
    from connector.observe.trace_format import TraceFileError, TraceSchemaError
    from connector.tools.trace_reader import require_trace_files

    # Millions of objects are made that all live until the end: a collector would look at them again and again.
    gc.disable()
    try:
        require_trace_files(directory)
        return read()
    except (OSError, TraceFileError, TraceSchemaError) as error:
        _fail(str(error), CANNOT_READ)


def _fail(sentence: str, status: int) -> NoReturn:
    say(sentence, err=True)
    raise typer.Exit(status)


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_COLUMNS)


def _line(console: Console, text: str) -> None:
    """One that the terminal folds where it is too long for it, so that a file or a pipe has it whole."""
    console.print(_text(text), soft_wrap=True)


def _text(value: object, style: str = "") -> Text:
    from rich.text import Text

    return Text(plain(value), style)


# --- summary --------------------------------------------------------------------------------------------------------


@app.command()
def summary(directory: Directory, json: AsJson = False) -> None:
    """Outcomes by reason, time per state, each P as its D saw it, and the states that cost the most."""
    from connector.tools.summary import summarize

    traces = _read(directory)
    found = summarize(traces.histories, traces.stories)
    if json:
        say_json(found)
        return
    console = _console()
    console.print(
        f"{found.records} transitions of {len(found.engines)} engine(s) in {_duration(found.seconds)}: "
        f"{found.requests} requests ({found.requests_per_second:.1f}/s), {_amount(found.bytes)} read "
        f"({_amount(found.bytes_per_second)}/s)"
    )
    console.print(f"wait for KV on D, from allocated blocks to the end: {_times(found.kv_wait)}")
    console.print(f"before that in vLLM's queue: {_times(found.queued)}\n")
    console.print(_outcome_table("requests on D", found.outcomes))
    console.print(_outcome_table("leases on P", found.lease_outcomes))
    console.print(_state_table(found))
    if found.peers:
        console.print(_peer_table(found))
    costly = sorted((each for each in found.states if each.machine == "request"), key=lambda each: -each.times.total)
    console.print("requests spent most of their time in:")
    for each in costly[:SLOWEST_STATES]:
        console.print(_text(f"  {each.state:20} {_duration(each.times.total)} in all, {_times(each.times)}"))


def _outcome_table(title: str, outcomes: Iterable[Outcome]) -> Table:
    table = _table(title, "outcome", "reason")
    table.add_column("count", justify="right")
    for each in outcomes:
        _add(table, each.state, each.reason or "", each.count)
    return table


def _state_table(found: Summary) -> Table:
    table = _table(
        "time per state", "machine", "state", right=("visits", "p50", "p95", "p99", "longest", "in all", "open")
    )
    machine = ""
    for each in found.states:
        if machine and machine != each.machine:
            table.add_section()
        machine, times = each.machine, each.times
        shown = [_duration(value) if times.count else "" for value in (times.p50, times.p95, times.p99, times.longest)]
        _add(table, machine, each.state, times.count, *shown, _duration(times.total), each.open or "")
    return table


def _peer_table(found: Summary) -> Table:
    table = _table(
        "by peer (per rank of D)", "D", "P", right=("requests", "done", "read", "p50", "p99", "connected", "failures")
    )
    for each in found.peers:
        kinds = ", ".join(f"{kind} {count}" for kind, count in each.failures.items())
        times = (_duration(each.seconds.p50), _duration(each.seconds.p99)) if each.seconds.count else ("", "")
        _add(
            table,
            each.engine_id,
            each.peer,
            each.requests,
            each.done,
            _amount(each.bytes),
            *times,
            each.connections,
            kinds,
        )
    return table


# --- one request ----------------------------------------------------------------------------------------------------


@app.command()
def show(
    request: Annotated[str, typer.Argument(help="An id of the request: the client's, D's or P's; a part will do.")],
    directory: Directory,
    json: AsJson = False,
) -> None:
    """One request on both sides in one time line, with the clocks of all processes brought together."""
    from connector.observe.clocks import clocks
    from connector.observe.history import histories, matching, stories
    from connector.tools.course import course

    told = histories(records_about(request, directory))
    known = stories(told)
    found = matching(known, request)
    if not found:
        _fail(f"no request in {directory} is called {request}", NOTHING_FOUND)
    at = clocks(known)
    courses = [course(story, at, told) for story in found[:CANDIDATES_MAX]]
    left_out = (
        f"{len(found) - len(courses)} more requests have {request} in their ids" if len(found) > len(courses) else ""
    )
    if json:
        say_json([[_moment(each) for each in one.moments] for one in courses])
        if left_out:
            say(left_out, err=True)
        return
    console = _console()
    for story, one in zip(found, courses, strict=False):
        _describe(console, story)
        table = _table(None, "", "who", "machine", "state", "because of", right=("at", "for"))
        for each in one.moments:
            record = each.record
            who = f"{each.history.engine_id} rank {each.history.rank}"
            why = record.event if record.reason is None else f"{record.event}: {record.reason}"
            stays = "" if each.dwell_seconds is None else _duration(each.dwell_seconds)
            state = each.state if record.from_state != each.state else f"({each.state})"
            subject = record.machine if record.machine != "peer" else f"peer {record.subject}"
            _add(table, each.side, who, subject, state, why, f"{each.offset_seconds:.4f} s", stays)
        console.print(table)
        for detail in dict.fromkeys(each.record.detail for each in one.moments if each.record.detail):
            _line(console, f"  {detail}")
        for process, seconds in one.shifts.items():
            moved = f"was moved by {seconds * 1e3:+.1f} ms to agree with the others"
            console.print(_text(f"  the clock of {process} {moved}"))
        console.print()
    if left_out:
        console.print(_text(left_out))


def _describe(console: Console, story: Story) -> None:
    lines = []
    for each in story.requests:
        queued = "" if not each.queued_seconds else f" after {_duration(each.queued_seconds)} in vLLM's queue"
        amount = f", {each.blocks} block(s), {_amount(each.length_bytes)}" if each.blocks else ""
        reason = f" ({each.reason})" if each.reason else ""
        lines.append(f"D {each.engine_id} rank {each.rank}: {each.subject}: {each.state}{reason}{queued}{amount}")
    lines += [f"P {each.engine_id} rank {each.rank}: {each.subject}: {each.state}" for each in story.leases]
    for line in lines:
        _line(console, line)


def _moment(moment: Any) -> dict[str, Any]:
    import msgspec

    record: dict[str, Any] = msgspec.to_builtins(moment.record)
    return {
        "offset_seconds": moment.offset_seconds,
        "at": moment.at,
        "side": moment.side,
        "dwell_seconds": moment.dwell_seconds,
    } | record


@app.command()
def slow(
    directory: Directory,
    count: Annotated[int, typer.Option("--number", "-n", min=1, help="How many.")] = 10,
    since: Since = None,
    json: AsJson = False,
) -> None:
    """The requests that waited longest on D, and the state that cost the time."""
    from connector.tools.summary import slow as find_slow

    traces = _read(directory)
    since_wall = _wall(since)
    found = find_slow(traces.stories, count, since_wall=since_wall)
    if json:
        say_json(found)
        return
    _say_ends(traces, since_wall)
    if not found and any(story.requests for story in traces.stories):
        _fail("no request on D of that time is in these traces", NOTHING_FOUND)
    if not found:
        _fail("no request on D is in these traces; are those of the decode engine there?", NOTHING_FOUND)
    table = _table(
        f"the slowest {len(found)} requests",
        "request on D",
        "P",
        "outcome",
        "most of it in",
        "all parts",
        right=("in all",),
    )
    for each in found:
        outcome = each.outcome if each.reason is None else f"{each.outcome} ({each.reason})"
        worst = f"{each.state} {_duration(each.state_seconds)}"
        _add(table, each.request_id, each.peer or "", outcome, worst, _parts(each), _duration(each.seconds))
    console = _console()
    console.print(table)
    command = shlex.join(["nixl-actor", "trace", "show", plain(found[0].request_id), str(directory)])
    _line(console, command)


def _wall(since: float | None) -> float:
    """The Unix time that was so many seconds ago."""
    return -math.inf if since is None else time.time() - since


def _say_ends(traces: _Traces, since_wall: float) -> None:
    """What --since may have left out because clocks differ, in one line, beside the answer."""
    from connector.tools.summary import ends

    if since_wall == -math.inf:
        return
    found = ends((process.records for process in traces.processes), since_wall)
    if found is None or (not found.earlier and found.newest.wall >= since_wall):
        return
    newest = found.newest
    shown = [f"{newest.engine_id} rank {newest.rank} ends {wall_clock(newest.wall)}"]
    shown += [
        f"{each.engine_id} rank {each.rank} {wall_clock(each.wall)}, {_duration(newest.wall - each.wall)} earlier"
        for each in found.earlier[:ENDS_SHOWN]
    ]
    if len(found.earlier) > ENDS_SHOWN:
        shown.append(f"{len(found.earlier) - ENDS_SHOWN} more earlier still")
    say(
        "--since counts back from now on this machine, by the clock of each process: what one whose clock is behind "
        f"has recorded of late may be left out. By its own clock {'; '.join(shown)}",
        err=True,
    )


def _parts(each: SlowRequest) -> str:
    return ", ".join(f"{state} {_duration(seconds)}" for state, seconds in each.parts)


@app.command()
def failures(directory: Directory, since: Since = None, json: AsJson = False) -> None:
    """What went wrong, by kind: how often, with whom, the last examples, and what to do."""
    from connector.tools.summary import failures as find_failures

    traces = _read(directory)
    since_wall = _wall(since)
    found = find_failures(traces.histories, since_wall=since_wall)
    if json:
        say_json(found)
        return
    _say_ends(traces, since_wall)
    console = _console()
    if not found:
        console.print("nothing has failed")
    for each in found:
        peers = f" with {', '.join(each.peers)}" if each.peers else ""
        from_to = f"{wall_clock(each.first_wall)} to {wall_clock(each.last_wall)}"
        console.print(_text(each.kind, "bold"), _text(f"{each.count} x, of {each.of}s, {from_to}{peers}"))
        if each.advice:
            _line(console, f"  what to do: {each.advice}")
        for example in each.examples:
            _line(console, f"  {wall_clock(example.wall)} {example.subject}: {example.detail or each.kind}")


# --- the machines' word ---------------------------------------------------------------------------------------------


@app.command()
def check(directory: Directory, json: AsJson = False) -> None:
    """Compare the records with the machines' tables, and name each one that they do not allow."""
    from connector.tools.conformance import check as find

    verdict = find(_read(directory).processes)
    if json:
        say_json(
            {
                "processes": verdict.processes,
                "records": verdict.records,
                "missing": verdict.missing,
                "findings": [
                    {"file": str(each.path), "line": each.line, "problem": each.problem, "record": each.record}
                    for each in verdict.findings
                ],
            }
        )
    else:
        for finding in verdict.findings[:FINDINGS_SHOWN]:
            say(finding)
        if len(verdict.findings) > FINDINGS_SHOWN:
            say(f"and {len(verdict.findings) - FINDINGS_SHOWN} more")
        result = f"{len(verdict.findings)} finding(s)" if verdict.findings else "all allowed"
        missing = f"; {verdict.missing} are missing" if verdict.missing else ""
        say(f"{verdict.records} records of {verdict.processes} process(es): {result}{missing}")
    if verdict.findings:
        raise typer.Exit(NOTHING_FOUND)


@app.command()
def export(
    directory: Directory,
    perfetto: Annotated[Path | None, typer.Option(help="Write a file for https://ui.perfetto.dev.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the timeline page, one file with everything in it.")] = None,
    otlp: Annotated[str | None, typer.Option(help="Send spans to this OpenTelemetry collector.")] = None,
) -> None:
    """Write the records for other tools: Perfetto, the timeline page, OpenTelemetry."""
    if perfetto is None and html is None and otlp is None:
        _fail("name at least one of --perfetto, --html and --otlp", CANNOT_READ)
    traces = _read(directory)
    if html is not None:
        from connector.tools.timeline.export import export_html

        _attempt(lambda: export_html(traces.stories, html, title=plain(directory)))
        say(html)
    if perfetto is not None:
        from connector.tools.perfetto import export_perfetto

        _attempt(lambda: export_perfetto(traces.stories, traces.histories, traces.clocks, perfetto))
        say(perfetto)
    if otlp is not None:
        _send(traces, otlp)


def _send(traces: _Traces, endpoint: str) -> None:
    try:
        from connector.observe.otlp import ExportError, export_otlp
    except ImportError as error:
        _fail(f"{error}; pip install 'nixl-actor-connector[otlp]'", CANNOT_READ)
    try:
        say(f"{export_otlp(traces.stories, traces.clocks, endpoint)} spans sent to {endpoint}")
    except ExportError as error:
        _fail(str(error), CANNOT_READ)


def _attempt(write: Callable[[], object]) -> None:
    try:
        write()
    except ImportError as error:
        _fail(f"{error}; pip install 'nixl-actor-connector[perfetto]'", CANNOT_READ)
    except OSError as error:
        _fail(str(error), CANNOT_READ)


# --- rendering ------------------------------------------------------------------------------------------------------


def _table(title: str | None, *columns: str, right: Iterable[str] = ()) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for column in right:
        table.add_column(column, justify="right")
    return table


def _add(table: Table, *cells: object) -> None:
    table.add_row(*(_text(cell) for cell in cells))


def _times(times: Times) -> str:
    if not times.count:
        return "none"
    return (
        f"p50 {_duration(times.p50)}, p95 {_duration(times.p95)}, p99 {_duration(times.p99)}, "
        f"longest {_duration(times.longest)}"
    )


def _duration(seconds: float) -> str:
    from connector.tools.durations import duration

    return duration(seconds, DIGITS)


def _amount(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
