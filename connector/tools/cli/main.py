"""`nixl-actor`, and `python -m connector`: what operators ask of running engines and of traces, tell engines to do, and
keys for engines.

Starting has to be quick, so nothing here or in the modules of the commands imports vLLM, torch or NIXL, and what only
one command needs is imported by it.
"""

from __future__ import annotations

import os
import sys

import typer

from connector.ports.descriptors import TooFewDescriptors
from connector.thread_limit import NoThreadLeft
from connector.tools.cli import keys, trace
from connector.tools.cli.administer import drain, meet
from connector.tools.cli.live import doctor, ps, why
from connector.tools.cli.output import say, show_what_cannot_be_encoded

app = typer.Typer(
    name="nixl-actor",
    help="Why is this request stuck, and where did the time go? Reads from engines with the NIXL actor connector.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(why)
app.command()(ps)
app.command()(doctor)
app.command()(drain)
app.command()(meet)
app.add_typer(trace.app, name="trace")
app.add_typer(keys.app, name="keys")


def main() -> None:
    """Entry point. Ctrl-C ends it with status 130, as shells have it; 2 where it cannot ask for want of threads or
    descriptors, or cannot write what it has found."""
    show_what_cannot_be_encoded()
    status = 0
    try:
        app(prog_name="nixl-actor")
    except* KeyboardInterrupt:  # in a group if it came while engines were asked, which trio does
        status = 130
    except* (NoThreadLeft, TooFewDescriptors) as errors:
        say(f"nixl-actor cannot ask: {_first(errors)}", err=True)
        status = 2
    except* OSError as errors:
        say(f"nixl-actor: {_first(errors)}", err=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left would fail again at the end
        status = 2
    if status:
        sys.exit(status)


def _first(errors: BaseExceptionGroup[Exception]) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
