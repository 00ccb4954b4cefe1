"""Tasks that must go on: what raises is logged and started again.

An exception in such a task is a bug, and must cost no more than what the task had in hand. The delay before it starts
again grows while it crashes at once each time, so that a task that cannot get past a message does not spin.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from connector.clock import NS_PER_SECOND, to_ns
from statemachine.pauses import doubled_ns

RESTART_DELAY_SECONDS_MAX = 5.0
RESTART_FORGIVEN_SECONDS = 1.0
"""A task that ran for so long starts again with the shortest delay: it does not crash on everything."""

_SHORTEST_DELAY_SECONDS = 0.002


def _nothing_to_recover(error: BaseException) -> None:
    """What the task works on is good as it stands."""


async def keep_running(
    name: str,
    run: Callable[[], Awaitable[None]],
    log_crash: Callable[[str, BaseException], None],
    recover: Callable[[BaseException], None] = _nothing_to_recover,
) -> None:
    """Run until `run` returns or is cancelled.

    Args:
        name: of the task, for the log.
        log_crash: writes a line with a traceback: which task, what it raised.
        recover: called after each crash, before `run` is called again.
    """
    crashes_in_a_row = 0
    while True:
        started = trio.current_time()
        try:
            await run()
        except Exception as error:
            has_worked = trio.current_time() - started >= RESTART_FORGIVEN_SECONDS
            crashes_in_a_row = 1 if has_worked else crashes_in_a_row + 1
            log_crash(name, error)
            try:
                recover(error)
            except Exception as second_error:
                log_crash(name, second_error)
            first_ns, max_ns = to_ns(_SHORTEST_DELAY_SECONDS), to_ns(RESTART_DELAY_SECONDS_MAX)
            await trio.sleep(doubled_ns(first_ns, max_ns, crashes_in_a_row - 1) / NS_PER_SECOND)
        except BaseExceptionGroup as group:
            # Some of its tasks had not ended yet when it was cancelled. Not all of what it has raised is `Cancelled`.
            cancelled, errors = group.split(trio.Cancelled)
            if cancelled is None or not isinstance(errors, ExceptionGroup):
                raise
            log_crash(name, errors)
            raise cancelled from None
        else:
            return
