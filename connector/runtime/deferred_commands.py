"""READs that wait for the device (`AfterSteps`), and what must not overtake them.

They are in the order in which the engine ordered them, and so are the steps that they wait for: the first one that
waits holds up the others. What else concerns the same request, or the lease that it reads (`LetGo`), goes behind it.
All other commands pass: a decode engine may ask for a lease that its P has just granted, and one that is paused keeps
what the requests in its queue will read.

The device is looked at every half millisecond while something waits. That is in the trio thread, because an engine that
has nothing else to do makes its next step late. A device that cannot be asked has failed, and what it has been given
may still be written at any time: nothing that waits for it is let through to be read.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import TypeAlias

import trio

from connector.protocol import AbortPull, AfterSteps, Command, LetGo, RejectPull, ReleaseUnread, StartPull, TrackLease
from statemachine.lease import LeaseName

Subject: TypeAlias = str | LeaseName
"""A request of ours, or what it reads."""

LOOK_SECONDS = 0.0005


class DeferredCommands:
    """See the module's docstring.

    Args:
        deliver: takes commands that need not wait any more.
        on_failed: told that the device cannot be asked. It has the actors stop, and then calls `release`.
    """

    def __init__(
        self,
        deliver: Callable[[Command], None],
        on_failed: Callable[[Exception], None],
    ) -> None:
        self._deliver = deliver
        self._on_failed = on_failed
        # With the end of the steps that each waits for; None: it waits for what is before it.
        self._deferred: deque[tuple[Command, Callable[[], bool] | None]] = deque()
        # How many of them are about it.
        self._subjects: Counter[Subject] = Counter()
        self._is_any = trio.Event()
        self._is_released = False

    def __len__(self) -> int:
        return len(self._deferred)

    def take(self, command: Command | AfterSteps) -> None:
        """Deliver it now, or later."""
        if isinstance(command, AfterSteps):
            command, are_over = command
        else:
            are_over = None
        if self._is_released or (are_over is None and not self._deferred):
            self._deliver(command)
            return
        subjects = _subjects_of(command)
        if are_over is None and self._subjects.keys().isdisjoint(subjects):
            self._deliver(command)
            return
        self._deferred.append((command, are_over))
        self._subjects.update(subjects)
        self._is_any.set()

    def release(self) -> None:
        """From now on nothing waits, whatever the device does: nothing will be read or lent any more."""
        self._is_released = True
        while self._deferred:
            self._deliver(self._pop())

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._is_any.wait()
            while self._deferred:
                self._let_through()
                if self._deferred:
                    await trio.sleep(LOOK_SECONDS)
            self._is_any = trio.Event()

    def _let_through(self) -> None:
        while self._deferred:
            _, are_over = self._deferred[0]
            try:
                if are_over is not None and not are_over():
                    return
            except Exception as error:
                self._on_failed(error)
                return
            self._deliver(self._pop())

    def _pop(self) -> Command:
        command, _ = self._deferred.popleft()
        for subject in _subjects_of(command):
            self._subjects[subject] -= 1
            if not self._subjects[subject]:
                del self._subjects[subject]
        return command


def _subjects_of(command: Command) -> tuple[Subject, ...]:
    """What it is about, and what goes behind it is about too."""
    match command:
        case StartPull(request_id=request_id, lease=lease):
            return request_id, lease
        case ReleaseUnread() | AbortPull() | RejectPull() | TrackLease():
            return (command.request_id,)
        case LetGo(lease=lease):
            return (lease,)
    return ()
