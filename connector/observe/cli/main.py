"""`nixl-actor`, and `python -m connector`: the groups of commands, put together."""

from __future__ import annotations

import typer

from connector.observe.cli import trace

app = typer.Typer(
    name="nixl-actor",
    help="Why is this request stuck, and where did the time go?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(trace.app, name="trace")


def main() -> None:
    app(prog_name="nixl-actor")
