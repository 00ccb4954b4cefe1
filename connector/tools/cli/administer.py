"""Commands that change what engines do: `drain`, `meet`.

Exit status, for scripts:
  drain    0 all have drained, or with --no-wait have begun; 1 one has not in time, or its grace period ended with
           something lent, or it answered no more; 2 one could not be asked, and was not told to drain
  meet     0 all are connected; 1 some are not; 2 the decode engine could not be asked
Ctrl-C ends both with 130; `drain` undoes nothing then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from connector.tools.cli.live import BAD, SERVED, UNASKED, KeyDirectory, ready_to_ask
from connector.tools.cli.output import say

if TYPE_CHECKING:
    from connector.tools.asking import Address
    from connector.wire.administration import DrainReport


def drain(
    engines: Annotated[
        list[str],
        typer.Argument(
            metavar="HOST:PORT...",
            help="Side channel of the prefill engine; of a data-parallel deployment those of all its engines, one port "
            "after another.",
        ),
    ],
    wait: Annotated[bool, typer.Option(help="Until nothing is lent any more, or the grace period is over.")] = True,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds to wait; otherwise as long as the engines do.", min=0.05)
    ] = None,
    keys: KeyDirectory = None,
) -> None:
    """CHANGES engines: they lend no new prefill, tell their decode engines that they leave, and may be ended after it.

    There is no way back but a restart. What they have lent is served until it is read, for drain_grace_seconds at most.
    Requests whose answers an engine writes itself are not waited for: it computes them as ever.
    """
    from connector.tools.administration import AdministrationError
    from connector.tools.administration import drain as drain_engines
    from connector.tools.asking import AddressError, parse_address

    shown: dict[Address, DrainReport] = {}

    def show(address: Address, report: DrainReport) -> None:
        before = shown.get(address)
        if before is None or (report.state, report.lent) != (before.state, before.lent):
            say(f"{address}: {_line(report)}" if len(addresses) > 1 else _line(report))
        shown[address] = report

    try:
        addresses, access = list(dict.fromkeys(map(parse_address, engines))), ready_to_ask(keys)
    except AddressError as error:
        raise typer.BadParameter(str(error)) from None
    codes = {SERVED}
    try:
        ends = drain_engines(addresses, waits=wait, timeout_seconds=timeout, show=show, access=access)
    except* KeyboardInterrupt:
        say("interrupted; engines that were told to drain go on draining: nixl-actor ps shows which", err=True)
        raise
    for address, end in ends.items():
        if isinstance(end, AdministrationError):
            say(end, err=True)
            codes.add(BAD if address in shown else UNASKED)
        elif wait and (end.state != "drained" or end.lent):
            codes.add(BAD)
            if end.state != "drained":
                of_which = f"{address}: " if len(addresses) > 1 else ""
                say(
                    f"{of_which}not drained in the time (--timeout): {end.lent} prefill(s) are still lent; the engine "
                    "goes on draining, and nixl-actor ps shows who holds what it lends",
                    err=True,
                )
    raise typer.Exit(max(codes))


def _line(report: DrainReport) -> str:
    later = f"{report.not_lent} came since and are not lent"
    if report.state == "drained":
        left = (
            f"{report.lent} prefill(s) are still lent, and the grace period is over"
            if report.lent
            else "nothing is lent"
        )
        end = (
            f"{report.answering} request(s) whose answers it writes end with the engine, unless vLLM is given "
            "--shutdown-timeout for them"
            if report.answering
            else "the engine may be ended"
        )
        return f"drained after {report.seconds:.1f} s: {left}; {later}; {end}"
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

    It goes on trying those that do not answer, and connects them again when they are back. One that could not be met
    for `engine_ttl` is forgotten.
    """
    from connector.observe.advice import named, told
    from connector.tools.administration import FINAL_STATES, AdministrationError
    from connector.tools.administration import meet as meet_engines
    from connector.tools.asking import AddressError, parse_address
    from connector.wire.administration import MEET_PLACES_MAX

    if len(prefills) > MEET_PLACES_MAX:
        raise typer.BadParameter(f"at most {MEET_PLACES_MAX} prefill engines at a time")
    try:
        places = [str(parse_address(each)) for each in prefills]
        reports = meet_engines(parse_address(engine), places, timeout_seconds=timeout, access=ready_to_ask(keys))
    except AddressError as error:
        raise typer.BadParameter(str(error)) from None
    except AdministrationError as error:
        say(error, err=True)
        raise typer.Exit(UNASKED) from None
    for (stage, rank), report in reports.items():
        for row in report.rows:
            name = f" engine {row.engine_id}" if row.engine_id else ""
            what, advice = told(row.kind, row.problem)
            problem = f": {named(row.kind, what)}" if what else ""
            say(f"rank {stage}.{rank}, {row.place}: {row.state}{name}{problem}")
            if advice:
                say(f"    {advice}")
    rows = [row for report in reports.values() for row in report.rows]
    are_met = all(row.state in FINAL_STATES and row.state != "unknown" for row in rows)
    raise typer.Exit(SERVED if are_met else BAD)
