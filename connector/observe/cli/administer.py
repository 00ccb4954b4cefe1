"""Commands that change what engines do: `drain`, `meet`.

Exit status, for scripts:
  drain    0 it has drained, or with --no-wait has begun; 1 it has not in time, or its grace period ended with something
           lent; 2 it could not be asked
  meet     0 all are connected; 1 some are not; 2 the decode engine could not be asked
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from connector.observe.cli.live import BAD, SERVED, UNASKED, KeyDirectory, access_of
from connector.observe.cli.output import say

if TYPE_CHECKING:
    from connector.wire.administration import DrainReport


def drain(
    engine: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Side channel of the prefill engine.")],
    wait: Annotated[bool, typer.Option(help="Until nothing is lent any more, or its grace period is over.")] = True,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds to wait; otherwise as long as the engine does.", min=0.05)
    ] = None,
    keys: KeyDirectory = None,
) -> None:
    """CHANGES the engine: it lends no new prefill, tells its decode engines that it leaves, and may be ended after it.

    There is no way back but a restart. What it has lent is served until it is read, for drain_grace_seconds at most.
    """
    from connector.observe.administration import AdministrationError
    from connector.observe.administration import drain as drain_engine
    from connector.observe.live import AddressError, parse_address

    shown: list[DrainReport] = []

    def show(report: DrainReport) -> None:
        if not shown or (report.state, report.lent) != (shown[-1].state, shown[-1].lent):
            say(_line(report))
        shown.append(report)

    try:
        address, access = parse_address(engine), access_of(keys)
        report = drain_engine(address, waits=wait, timeout_seconds=timeout, show=show, access=access)
    except AddressError as error:
        raise typer.BadParameter(str(error)) from None
    except AdministrationError as error:
        say(error, err=True)
        raise typer.Exit(UNASKED if not shown else BAD) from None
    has_drained = report.state == "drained" and not report.lent
    raise typer.Exit(SERVED if has_drained or not wait else BAD)


def _line(report: DrainReport) -> str:
    later = f"{report.not_lent} came since and are not lent"
    if report.state == "drained":
        left = (
            f"{report.lent} prefill(s) are still lent, and the grace period is over"
            if report.lent
            else "nothing is lent"
        )
        return f"drained after {report.seconds:.1f} s: {left}; {later}; the engine may be ended"
    return (
        f"draining for {report.seconds:.1f} s: {report.lent} prefill(s) lent; {later}; {report.seconds_left:.0f} s left"
    )


def meet(
    engine: Annotated[str, typer.Argument(metavar="DECODE", help="HOST:PORT, side channel of the decode engine.")],
    prefills: Annotated[list[str], typer.Argument(metavar="PREFILL...", help="The same of prefill engines.")],
    timeout: Annotated[float, typer.Option(help="Seconds to wait.", min=0.05)] = 10.0,
    keys: KeyDirectory = None,
) -> None:
    """CHANGES the decode engine: each of its ranks connects these prefill engines now, before a request needs them.

    It goes on trying those that do not answer, and connects them again when they are back, for as long as it lives.
    """
    from connector.observe.administration import FINAL_STATES, AdministrationError
    from connector.observe.administration import meet as meet_engines
    from connector.observe.live import AddressError, parse_address
    from connector.wire.administration import MEET_PLACES_MAX

    if len(prefills) > MEET_PLACES_MAX:
        raise typer.BadParameter(f"at most {MEET_PLACES_MAX} prefill engines at a time")
    try:
        places = [str(parse_address(each)) for each in prefills]
        reports = meet_engines(parse_address(engine), places, timeout_seconds=timeout, access=access_of(keys))
    except AddressError as error:
        raise typer.BadParameter(str(error)) from None
    except AdministrationError as error:
        say(error, err=True)
        raise typer.Exit(UNASKED) from None
    for (stage, rank), report in reports.items():
        for row in report.rows:
            name = f" engine {row.engine_id}" if row.engine_id else ""
            problem = f": {row.problem}" if row.problem else ""
            say(f"rank {stage}.{rank}, {row.place}: {row.state}{name}{problem}")
    rows = [row for report in reports.values() for row in report.rows]
    are_met = all(row.state in FINAL_STATES and row.state != "unknown" for row in rows)
    raise typer.Exit(SERVED if are_met else BAD)
