"""The thread that trio runs in, seen from the engine thread.

One per worker process and one in the scheduler process. It is started when there is something to do (after vLLM has
forked or spawned its processes), posted to without blocking, and joined with a bound.

When it dies, everything fails closed: `death` says why, what is posted is not taken, and the owner on the engine thread
(worker.connector_worker) posts no more and reports what was open as failed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

import trio

from connector.cpu_affinity import leave_single_cpu
from connector.observe.log import log_crash
from connector.thread_limit import NoThreadLeft, start_thread
from connector.thread_mailbox import ThreadMailbox

C = TypeVar("C")

START_TIMEOUT_SECONDS = 30.0


class ActorMain(Protocol[C]):  # type: ignore[misc]
    """What runs in the thread."""

    def deliver(self, command: C) -> None: ...

    async def run(self, task_status: trio.TaskStatus[None]) -> None: ...

    def stop(self) -> None: ...


class ThreadStartError(RuntimeError):
    """The actors could not be started; the connector is unusable."""


class ActorThread(Generic[C]):
    """Runs an `ActorMain` in a thread of its own.

    Args:
        name: of the thread.
        make_main: called in the thread, inside the trio run; makes the main and the doors it uses.
        on_error: called in the thread with what it dies of. What `deliver` raises is a line in the log, and the thread
            goes on.
        on_wake_up: called in the thread when it has woken up for commands, with the seconds since it was called.
    """

    def __init__(
        self,
        name: str,
        make_main: Callable[[], Awaitable[ActorMain[C]]],
        on_error: Callable[[BaseException], None],
        on_wake_up: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._name = name
        self._make_main = make_main
        self._mailbox: ThreadMailbox[C] = ThreadMailbox(
            self._deliver, lambda error: log_crash(f"mailbox of {name}", error), on_wake_up
        )
        self._on_error = on_error
        self._thread: threading.Thread | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        self._main: ActorMain[C] | None = None
        self._started = threading.Event()
        self.death: BaseException | None = None
        self._ended = False

    @property
    def is_dead(self) -> bool:
        """The thread ended without being asked to."""
        return self.death is not None

    @property
    def is_called(self) -> bool:
        """Whether it was woken up for commands, and has not come to them."""
        return self._mailbox.is_waiting

    def lateness(self) -> tuple[int, float]:
        """How many commands wait for it, and for how many seconds it has been called."""
        return len(self._mailbox), self._mailbox.waits_seconds

    def start(self) -> None:
        """Start and wait until the actors run. Raises ThreadStartError."""
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        try:
            start_thread(thread)
        except NoThreadLeft as error:
            raise ThreadStartError(f"{self._name} could not start: {error}") from error
        self._thread = thread
        if not self._started.wait(START_TIMEOUT_SECONDS):
            raise ThreadStartError(f"{self._name} did not start within {START_TIMEOUT_SECONDS:g} s")
        if self.death is not None:
            raise ThreadStartError(f"{self._name} could not start: {self.death}") from self.death

    def post(self, command: C) -> None:
        """Engine thread: queue a command. It travels with the next `flush`."""
        self._mailbox.append(command)

    def flush(self) -> None:
        """Engine thread: at most one wake-up for everything that was posted."""
        if self._token is None or self.death is not None:
            return
        try:
            self._mailbox.flush(self._token)
        except trio.RunFinishedError:
            if not self._ended:
                self.death = self.death or RuntimeError("the trio run has finished")

    def deliver_posted(self) -> None:
        """In the thread: deliver what was posted until now, flushed or not."""
        self._mailbox.drain()

    def stop(self, timeout_seconds: float) -> bool:
        """End the actors and join the thread. False when it did not end in time. Idempotent."""
        thread, token = self._thread, self._token
        if thread is None:
            return True
        self._ended = True
        if token is not None and self._main is not None:
            # It may have ended already; then joining is all that is left.
            with contextlib.suppress(trio.RunFinishedError):
                token.run_sync_soon(self._main.stop)
        thread.join(timeout_seconds)
        if thread.is_alive():
            return False
        self._thread = None
        return True

    # --- in the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        leave_single_cpu()
        try:
            trio.run(self._main_task)
        except BaseException as error:
            # Nothing above this frame could handle it; the engine thread reads `death`.
            self.death = error
            if self._started.is_set():  # otherwise `start` raises
                self._on_error(error)
        else:
            if not self._ended:
                self.death = RuntimeError("the actors ended without being asked to")
                if self._started.is_set():
                    self._on_error(self.death)
        finally:
            self._started.set()

    async def _main_task(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._main = await self._make_main()
        async with trio.open_nursery() as nursery:
            await nursery.start(self._main.run)
            self._started.set()

    def _deliver(self, command: C) -> None:
        assert self._main is not None
        self._main.deliver(command)
