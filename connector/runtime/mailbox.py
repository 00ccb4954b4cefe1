"""Mailboxes: how messages reach an actor that waits for them in the trio thread, as the lease keeper does. (Peer actors
handle what they are told in the call; from other threads: `connector.thread_mailbox`.)

Sending is synchronous, never blocks and never fails, so an actor can send while it handles a message. An actor that
takes messages from outside bounds them before it puts them here.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

import trio

M = TypeVar("M")


class Mailbox(Generic[M]):
    """Inbox of one actor. One consumer, any number of senders in the same thread."""

    def __init__(self) -> None:
        self._messages: deque[M] = deque()
        self._arrived = trio.Event()

    def __len__(self) -> int:
        return len(self._messages)

    def __iter__(self) -> Iterator[M]:
        """The messages, which stay there."""
        return iter(self._messages)

    def put(self, message: M) -> None:
        self._messages.append(message)
        self._arrived.set()

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
