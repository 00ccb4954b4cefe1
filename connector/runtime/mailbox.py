"""Mailboxes: how messages reach an actor, from other actors and from the engine thread.

`Mailbox` is for senders in the trio thread. Sending is synchronous and never blocks, so that an actor can send while
it handles a message. A mailbox fed from outside has a limit; what does not fit is refused and counted by the sender.

`EngineMailbox` carries commands from the engine thread. A command costs one `deque.append`; a step costs at most one
wake-up of the trio loop, whatever the number of commands. Two rules make that safe:

* `armed` is cleared before the deque is emptied. A command appended in between finds `armed` false and schedules
  another (maybe empty) drain; the other order could leave a command behind with nobody coming for it.
* the drain never raises: an exception in a callback of `run_sync_soon` would crash the whole trio run.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import trio

M = TypeVar("M")


class Mailbox(Generic[M]):
    """Inbox of one actor. One consumer, any number of senders in the same thread."""

    def __init__(self, limit: int | None = None) -> None:
        self._messages: deque[M] = deque()
        self._arrived = trio.Event()
        self._limit = limit

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, message: M) -> bool:
        """False when the mailbox is full and the message was not taken."""
        if self._limit is not None and len(self._messages) >= self._limit:
            return False
        self._messages.append(message)
        self._arrived.set()
        return True

    def take_one(self) -> M | None:
        """The oldest message, or None."""
        return self._messages.popleft() if self._messages else None

    async def wait(self, timeout_seconds: float) -> None:
        """Return when there is a message, or after the timeout. Always a checkpoint."""
        if self._messages:
            await trio.lowlevel.checkpoint()
            return
        self._arrived = trio.Event()
        if timeout_seconds == math.inf:
            await self._arrived.wait()
            return
        with trio.move_on_after(timeout_seconds):
            await self._arrived.wait()


class EngineMailbox(Generic[M]):
    """Engine thread -> trio thread. See the module's docstring for the rules."""

    def __init__(self, deliver: Callable[[M], None], on_error: Callable[[BaseException], None]) -> None:
        self._commands: deque[M] = deque()
        self._armed = False
        self._deliver = deliver
        self._on_error = on_error

    def append(self, command: M) -> None:
        """Engine thread: queue a command. It travels with the next `flush`."""
        self._commands.append(command)

    def flush(self, token: trio.lowlevel.TrioToken) -> None:
        """Engine thread: wake the trio loop if there is something to deliver. Raises trio.RunFinishedError."""
        if self._commands and not self._armed:
            self._armed = True
            token.run_sync_soon(self._drain)

    def _drain(self) -> None:
        self._armed = False
        while self._commands:
            try:
                self._deliver(self._commands.popleft())
            except Exception as error:
                with contextlib.suppress(Exception):
                    self._on_error(error)
