"""Commands that ask running engines: `why`, `ps`, `doctor`.

Exit status, for scripts:
  why      0 its KV was loaded; 1 it failed, or its prompt was computed where it should have been read, or D let go of
           its blocks unread; 2 nobody could be asked, or, with --failed, somebody could not and none of the others says
           that it failed; or no trace file is there (--trace); 3 nothing is known of it; 4 it waits, or a rank of D
           that may not have loaded it does not answer
  ps       0; 2 nobody could be asked
  doctor   0 no problem; 1 a problem; 2 nobody could be asked
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from connector.environment import CURVE_DIRECTORY_VARIABLE, ENGINES_VARIABLE
from connector.tools.cli.output import PIPE_COLUMNS, say, say_json, wall_clock
from connector.tools.cli.trace import records_about

if TYPE_CHECKING:
    from rich.console import Console, Group

    from connector.ports.gate import Access
    from connector.tools.asking import Address
    from connector.tools.explanation import Explanation
    from connector.tools.live import Survey

JSON_SCHEMA = 1
"""The `schema` that `--json` prints. It grows when the meaning of a field changes."""

SERVED, BAD, UNASKED, UNKNOWN, WAITS = 0, 1, 2, 3, 4
_EXIT_OF_OUTCOME = {"served": SERVED, "failed": BAD, "computed_locally": BAD, "not_read": BAD, "waiting": WAITS}
MATCHES_SHOWN_MAX = 20

Engines = Annotated[
    list[str] | None,
    typer.Option(
        "--engine",
        "-e",
        metavar="HOST:PORT",
        help="Side channel of an engine; again for more. Otherwise NIXL_ACTOR_ENGINES, otherwise the side channel of "
        "this environment (port 5600). Prefill engines that a decode engine reads from are found by themselves.",
    ),
]
Named = Annotated[
    list[str] | None,
    typer.Argument(metavar="HOST:PORT", help="The same as --engine.", show_default=False),
]
KeyDirectory = Annotated[
    str | None,
    typer.Option(
        "--keys",
        "-k",
        metavar="DIR",
        envvar=CURVE_DIRECTORY_VARIABLE,
        help="Directory of keys (nixl-actor keys curve) of this tool, for engines with the option curve_directory.",
    ),
]
Seconds = Annotated[float, typer.Option("--timeout", help="Seconds for each engine.", min=0.05, max=600.0)]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")]


def why(
    request: Annotated[str, typer.Argument(help="The id of the request, or a part of it, as the client sent it.")],
    engine: Engines = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", metavar="DIR", help="Read the trace files there, or one file, instead of asking engines."
        ),
    ] = None,
    failed: Annotated[
        bool, typer.Option("--failed", help="Of the requests that match only those with which something went wrong.")
    ] = False,
    timeout: Seconds = 1.0,
    keys: KeyDirectory = None,
    json: AsJson = False,
) -> None:
    """Why is this request stuck, or did it fail: its state, what it waits for, what happened, what to do."""
    from connector.tools.explanation import Live, explain, explain_nothing, facts_of_silent, find, live_of

    if trace is not None:
        from connector.tools.course import brought_together

        records, shifts = brought_together(records_about(request, trace))
        live = Live(shifts=shifts)
        looked_at = [str(trace)]
    else:
        from connector.tools.live import look_up
        from connector.wire.inspection import MATCH_LENGTH_MAX

        addresses = _addresses(engine)
        if request != request.encode("utf-8", "replace").decode():
            raise typer.BadParameter("this is not UTF-8, as ids of requests are; give a part of the id that is")
        if len(request) > MATCH_LENGTH_MAX:
            raise typer.BadParameter(
                f"engines are asked for at most {MATCH_LENGTH_MAX} characters; give a part of the id"
            )
        found = look_up(
            request,
            addresses,
            seconds=timeout,
            followed_seconds=_followed_seconds(timeout),
            access=ready_to_ask(keys),
        )
        records, live = live_of(found.rows(), found.silent(), found.leaving())
        looked_at = [f"{each.engine_id} at {each.address}" for each in found.engines if each.answers]
        if not looked_at:
            _fail_unasked(found, as_json=json, is_named=bool(engine) or bool(os.environ.get(ENGINES_VARIABLE)))
    cases = find(request, records, live)
    explanations = [explain(case, live) for case in cases]
    if not explanations:
        nothing = explain_nothing(request, live, looked_at, is_trace=trace is not None)
        _print_json({"matches": [], "nothing": nothing}) if json else say(nothing)
        raise typer.Exit(UNASKED if failed and live.silent else UNKNOWN)  # what has failed there is not known
    if failed:
        explanations = [each for each in explanations if _went_wrong(each)]
    silent = facts_of_silent(live)
    if json:
        _print_json({"matches": explanations, "silent": silent})
    elif not explanations:
        say(f"Of {len(cases)} request(s) with {request!r} in an id none has failed.")
        _print_silent(silent)
    elif len(explanations) == 1:
        _print_explanation(explanations[0], None if trace is not None else time.time())
    else:
        typer.echo(f"{len(explanations)} requests match; name one of them:")
        newest_first = explanations[::-1]
        in_order = sorted(newest_first, key=_urgency)
        for each in in_order[:MATCHES_SHOWN_MAX]:
            say(f"  {each.request} on {_where(each)}")
            say(f"    {each.cause}")
        if len(in_order) > MATCHES_SHOWN_MAX:
            say(f"  ... and {len(in_order) - MATCHES_SHOWN_MAX} more (--json has all)")
        _print_silent(silent)
    if not explanations and silent:
        raise typer.Exit(UNASKED)  # what has failed there is not known
    codes = [_EXIT_OF_OUTCOME[each.outcome] for each in explanations]
    raise typer.Exit(next((code for code in (BAD, WAITS) if code in codes), SERVED))


def _print_silent(facts: Sequence[str]) -> None:
    for fact in facts:
        say(f"  {fact}")


def _went_wrong(each: Explanation) -> bool:
    """A client that has left is as it wanted."""
    return _EXIT_OF_OUTCOME[each.outcome] == BAD and each.kind != "AbortedByClient"


def _urgency(each: Explanation) -> int:
    """The least first: a load that failed, which a client may have seen; then all else that went wrong, of which there
    may be any number (a lease for each prefill of a time without decode engine, prompts that D was to compute); then
    what waits."""
    if _went_wrong(each):
        return 0 if each.outcome == "failed" and each.side == "D" else 1
    return 2 if each.outcome == "waiting" else 3


def ps(
    engines: Named = None,
    engine: Engines = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Again and again, until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option(help="Seconds between two looks with --watch.", min=0.1)] = 1.0,
    timeout: Seconds = 2.0,
    keys: KeyDirectory = None,
    json: AsJson = False,
) -> None:
    """What lives now: peers, requests, leases and who holds them, READs, quarantined blocks."""
    addresses, access = _addresses(engines, engine), ready_to_ask(keys)
    from rich.console import Console, Group

    from connector.tools.cli.tables import tables

    console = Console()
    width: int | None = console.width
    if not console.is_terminal:
        console, width = Console(width=PIPE_COLUMNS), None  # nobody folds what goes into a file
    if not watch:
        found = _survey_everything(addresses, timeout, access)
        if json:
            _print_json(_as_data(found))
        else:
            console.print(*tables(found, width), sep="\n")
        raise typer.Exit(0 if any(each.answers for each in found.engines) else UNASKED)
    from rich.live import Live as Screen

    with contextlib.ExitStack() as stack:
        try:
            on_screen = console.is_terminal and not json
            screen = (
                stack.enter_context(Screen(console=console, screen=True, auto_refresh=False)) if on_screen else None
            )
            while True:
                found = _survey_everything(addresses, timeout, access)
                if json:
                    _print_json(_as_data(found), is_one_of_many=True)
                elif screen is not None:
                    if not console.is_terminal:  # it was closed: rich shows nothing there, and fails nowhere
                        raise typer.Exit(UNASKED)
                    screen.update(_fitted(console, Group(*tables(found, console.width))), refresh=True)
                else:
                    say(f"--- {wall_clock(time.time())}")
                    console.print(*tables(found, width), sep="\n")
                time.sleep(interval)
        except* KeyboardInterrupt:  # in a group if it came while engines were asked, which trio does
            pass


def _fitted(console: Console, shown: Group) -> Group:
    """With a line above that says so where the screen cuts it off."""
    from rich.console import Group

    lines_left_out = len(console.render_lines(shown, pad=False)) - console.height
    if lines_left_out <= 0:
        return shown
    return Group(f"{lines_left_out + 1} lines do not fit on this screen (without --watch all are shown)", shown)


def doctor(
    engines: Named = None,
    engine: Engines = None,
    timeout: Seconds = 3.0,
    keys: KeyDirectory = None,
    json: AsJson = False,
) -> None:
    """Check engines: addresses, whether they fit, transports, clocks, leases, versions; and what went wrong so far."""
    from connector.tools.diagnosis import RECORDS_ASKED, diagnose
    from connector.tools.live import Question, survey
    from connector.tools.ucx_devices import opened_for
    from connector.wire.inspection import WHATS

    questions = [Question(what=what, rows_max=RECORDS_ASKED) for what in WHATS]
    named, access = _addresses(engines, engine), ready_to_ask(keys)
    found = survey(named, questions, seconds=timeout, followed_seconds=timeout, access=access)
    found, looked_for = _with_readers_of_expired(found, timeout, access)
    findings = diagnose(found, named, opened_for(found.engines), looked_for)
    if json:
        told = [{"address": str(each.address), "engine_id": each.engine_id} for each in found.engines]
        _print_json({"engines": told, "findings": findings})
    else:
        for finding in findings:
            say(f"{finding.level}: ", fg=_COLOURS[finding.level], nl=False)
            say(f"[{finding.check}] {finding.what}")
            if finding.advice:
                say(f"    {finding.advice}")
        problems = sum(finding.level == "problem" for finding in findings)
        asked = ", ".join(f"{each.engine_id} at {each.address}" for each in found.engines if each.answers)
        say(f"{problems} problem(s); asked {asked or 'nobody'}")
    if not any(each.answers for each in found.engines):
        raise typer.Exit(UNASKED)
    raise typer.Exit(BAD if any(finding.level == "problem" for finding in findings) else SERVED)


_COLOURS = {"problem": "red", "warning": "yellow", "note": "blue"}


# --- asking -----------------------------------------------------------------------------------------------------------


def _addresses(*named: list[str] | None) -> list[Address]:
    from connector.tools.asking import AddressError, chosen_addresses

    try:
        return chosen_addresses([each for some in named for each in some or ()])
    except AddressError as error:
        raise typer.BadParameter(str(error)) from None


def ready_to_ask(directory: str | None) -> Access:
    """What a command that asks engines may do with the keys in this directory, or without any."""
    from connector.descriptor_limit import raise_descriptor_limit
    from connector.ports.curve_keys import KeyDirectoryError
    from connector.tools.asking import tool_access

    raise_descriptor_limit()  # a shell's is mostly 1,024, and each worker of a fleet that is asked takes some
    try:
        return tool_access(directory)
    except KeyDirectoryError as error:
        advice = "nixl-actor keys curve makes such a directory"
        raise typer.BadParameter(f"{error}; {advice}", param_hint="--keys") from None


def _followed_seconds(timeout: float) -> float:
    from connector.tools.live import FOLLOWED_SECONDS

    return max(FOLLOWED_SECONDS, timeout / 2)


def _survey_everything(addresses: list[Address], timeout: float, access: Access) -> Survey:
    from connector.tools.live import Question, survey
    from connector.wire.inspection import WHATS

    questions = [Question(what=what) for what in WHATS if what != "records"]
    return survey(addresses, questions, seconds=timeout, followed_seconds=timeout, access=access)


def _with_readers_of_expired(found: Survey, timeout: float, access: Access) -> tuple[Survey, frozenset[str]]:
    """What all records say of leases that expired and that the newest records do not show as read; and of which request
    ids on P every worker has told that."""
    from connector.tools.diagnosis import leases_to_look_for
    from connector.tools.live import LOOKED_UP_MAX, Question, survey
    from connector.wire.inspection import RecordRow

    wanted = leases_to_look_for(found)[:LOOKED_UP_MAX]
    if not wanted:
        return found, frozenset()
    known = [each.address for each in found.engines if each.answers]
    questions = [Question(what="engine"), *(Question(what="records", match=name) for name in wanted)]
    more = survey(known, questions, follow=False, seconds=timeout, access=access)
    if any(each.problem or any(rank.problem for rank in each.ranks) for each in more.engines):
        return found.with_rows_of(more), frozenset()
    # P tells only of those whose ids it shows whole.
    told = {row.record.subject for _, row in more.of(RecordRow) if row.record.machine == "lease"}
    return found.with_rows_of(more), frozenset(told.intersection(wanted))


def _fail_unasked(found: Survey, *, as_json: bool, is_named: bool) -> None:
    problems = [f"{each.address}: {each.first_problem}" for each in found.engines]
    if as_json:
        _print_json({"matches": [], "nothing": "no engine could be asked", "problems": problems})
    else:
        say("No engine could be asked:", err=True)
        for problem in problems:
            say(f"  {problem}", err=True)
        if not is_named:
            say("  No address was given: name a decode engine (--engine HOST:PORT, or NIXL_ACTOR_ENGINES).", err=True)
    raise typer.Exit(UNASKED)


# --- showing ----------------------------------------------------------------------------------------------------------


def _print_json(data: dict[str, Any], *, is_one_of_many: bool = False) -> None:
    say_json({"schema": JSON_SCHEMA, **data}, is_one_of_many=is_one_of_many)


def _print_explanation(each: Explanation, now: float | None) -> None:
    """`now`: Unix time, where running engines have said it."""
    say(each.cause, bold=True)
    say(f"  request   {each.request} on {_where(each)}" + (f", reading from {each.peer}" if each.peer else ""))
    since = ""
    if each.since_seconds is not None:
        since = f", for {_age(each.since_seconds)}"
    elif each.since_wall is not None:
        since = f", since {wall_clock(each.since_wall)}"
        since += f", {_age(now - each.since_wall)} ago" if now is not None else ""
    waits = f", waits for {each.waits_for}" if each.waits_for else ""
    until = f", until {_age(each.until_seconds)} from now at the latest" if each.until_seconds is not None else ""
    say(f"  state     {each.state}{since}{waits}{until}")
    if each.detail and each.detail not in each.cause:
        say(f"  detail    {each.detail}")
    for fact in each.facts:
        say(f"  also      {fact}")
    for line in each.happened[:1]:
        say(f"  happened  from {wall_clock(line.wall)} on")
    for line in each.happened:
        say(f"  {line.offset_seconds:+9.3f} s  {line.side}  {line.what}")
    say(f"  next      {each.next}")
    say(f"  to do     {each.advice}")


def _as_data(found: Survey) -> dict[str, Any]:
    """Schema of `ps --json`: engines, their workers, and the rows of each kind by the name of the kind."""
    import msgspec

    from connector.wire.inspection import WHATS

    return {
        "wall": time.time(),
        "engines": [
            {
                "address": str(engine.address),
                "engine_id": engine.engine_id,
                "role": engine.role,
                "named_by": list(engine.named_by),
                "problem": engine.problem,
                "problem_kind": engine.problem_kind,
                "refusal": engine.refusal,
                "ranks": [
                    {
                        "pp_rank": rank.rank[0],
                        "tp_rank": rank.rank[1],
                        "problem": rank.problem,
                        "draining": rank.draining,
                        **{
                            what: [msgspec.to_builtins(row) for row in rank.rows if row.what == what]
                            for what in WHATS
                            if what != "records"
                        },
                    }
                    for rank in engine.ranks
                ],
            }
            for engine in found.engines
        ],
    }


def _where(each: Explanation) -> str:
    return f"{each.side} ({each.engine_id}" + (f" rank {each.rank})" if each.rank is not None else ")")


def _age(seconds: float | None) -> str:
    from connector.tools.durations import duration

    return "?" if seconds is None else duration(seconds)
