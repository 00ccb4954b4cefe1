"""Tasks that must go on: what raises is logged and started again.

An exception in such a task is a bug, and must cost no more than what the task had in hand. The delay before it starts
again grows while it crashes at once each time, so that a task that cannot get past a message does not spin.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

RESTART_DELAY_SECONDS_MAX = 5.0
RESTART_FORGIVEN_SECONDS = 1.0
"""A task that ran for so long starts again with the shortest delay: it does not crash on everything."""

_SHORTEST_DELAY_SECONDS = 0.002
_DOUBLINGS_MAX = 12


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
            # The exponent has a bound: a float has one too.
            delay_seconds = _SHORTEST_DELAY_SECONDS * 2 ** min(crashes_in_a_row - 1, _DOUBLINGS_MAX)
            await trio.sleep(min(RESTART_DELAY_SECONDS_MAX, delay_seconds))
        else:
            return
