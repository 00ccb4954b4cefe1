"""The loop of the one thread that touches a NIXL agent.

It takes calls from a queue, polls the READs in flight and the notifications, and hands results and events to the
port.

Pauses follow activity: nothing but polling makes UCX progress (there is no progress thread, it would burn a core), so
the loop polls without pause while a poll finds work, and then pauses a fraction of the time since it last did, up to a
ceiling that depends on what it waits for. A call ends a pause at once.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Sequence

from connector.cpu_affinity import leave_single_cpu
from connector.observe.log import get_logger
from connector.ports.descriptors import TooFewDescriptors, require_descriptors
from connector.ports.nixl import PortBroken, PortReadEnded, ReadHandle, ReadPosted
from connector.ports.nixl_agent.call_queue import CallQueue
from connector.ports.nixl_agent.calls import Call, CallRefused, Outgoing, ReadOrdered, ThreadEnded
from connector.ports.nixl_agent.core import AgentCore
from connector.ports.nixl_agent.poll_cost import PollCost
from connector.thread_limit import NoThreadLeft, require_threads, start_thread

PAUSE_READING_SECONDS_MAX = 0.0005
"""Longest pause while READs are in flight, unless nothing has happened for long. Each look that does not ask about a
READ which has ended lets it go unnoticed for so long, and P's blocks stay lent for nothing."""

PAUSE_QUIET_FRACTION = 0.001
"""READs from a peer that hangs stay in flight until it goes on, or for ever. After a long time in which nothing has
moved, and no call has come, the pause may be this fraction of it, up to what it would be without READs: what has taken
so long is noticed later by a thousandth of that."""

PAUSE_EXPECTING_SECONDS_MAX = 0.002
"""Longest pause while notifications are expected: how long blocks that a built-in engine has released stay lent. Each
look may take the interpreter from the engine for a moment."""

PAUSE_IDLE_SECONDS_MAX = 0.05
"""Longest pause otherwise: 20 polls a second keep connections alive for well under 1 % of a core."""

MOVES_IN_A_ROW = 3
"""Polls one after another that have moved something, as their cost says, without an event. What arrives by the megabyte
takes many: from the third on each halves the time in which nothing has moved. A few may be dear for another reason."""

PAUSE_SECONDS_MIN = 0.00005
"""Shorter pauses are not worth a system call (the kernel's timer slack alone is 50 us); the loop spins instead."""

PAUSE_FRACTION = 0.25
"""Pause this fraction of the time since the last activity: a wait overshoots by at most a quarter."""

LOOK_SECONDS = 0.0002
"""Calls that wait are run for so long before there is another look at READs in flight."""

OPEN_PROGRESS_SECONDS = 10.0
"""How often `on_wait` is told for how long the agent has been waited for."""

EXIT_SECONDS_MAX = 2.0
"""How long the end of the process waits for a port that was not closed."""

AGENT_THREADS = 2
"""One of NIXL, and one that UCX starts for the first agent of a process."""
AGENT_DESCRIPTORS = 15
"""What UCX takes for the first agent of a process at least, on a machine without a GPU and RDMA. It ends the process
where it lacks one at some places."""

UNDELIVERED_EVENTS_MAX = 10_000
"""Notifications are left inside NIXL while so many events wait for the trio thread."""

_log = get_logger()


class AgentThread:
    """Runs one `AgentCore`.

    `deliver` is called on this thread with everything that goes back; `backlog` tells how much of it still waits there.
    """

    def __init__(
        self,
        make_core: Callable[[], AgentCore],
        name: str,
        deliver: Callable[[Sequence[Outgoing]], None],
        backlog: Callable[[], int],
    ) -> None:
        self._deliver = deliver
        self._backlog = backlog
        self._calls: CallQueue[Call | ReadOrdered] = CallQueue()
        self._opened = threading.Event()
        self._open_failure: CallRefused | None = None
        self._ended = threading.Event()
        self._close_at: float | None = None
        self._expecting = False
        self.turns = 0
        """How often its loop has come round, which it does several times a second unless a call does not return."""
        self.core: AgentCore | None = None
        self.abandoned: tuple[ReadHandle, ...] = ()
        self.name = name
        self._thread = threading.Thread(target=self._main, args=(make_core,), name=name, daemon=True)

    def open(self, timeout_seconds: float, on_wait: Callable[[float], None]) -> AgentCore:
        """Start the thread and wait for its agent; `on_wait` hears for how long so far. Raises CallRefused."""
        atexit.register(self._end_before_exit)
        try:
            start_thread(self._thread)
        except NoThreadLeft as error:
            atexit.unregister(self._end_before_exit)
            raise CallRefused(str(error)) from None
        started = time.monotonic()
        while not self._opened.wait(min(OPEN_PROGRESS_SECONDS, max(0.0, started + timeout_seconds - time.monotonic()))):
            waited_seconds = time.monotonic() - started
            if waited_seconds >= timeout_seconds:
                self.close(0.0)
                raise CallRefused(f"no NIXL agent within {timeout_seconds:g} s")
            on_wait(waited_seconds)
        if self.core is None:
            raise self._open_failure or CallRefused("the agent's thread ended")
        return self.core

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    @property
    def is_closing(self) -> bool:
        """It was told to end; its agent may be gone already."""
        return self._close_at is not None

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, queued: Call | ReadOrdered) -> bool:
        """Queue something. False (and the caller keeps it) when the thread has ended."""
        self._calls.put(queued)
        return not (self._ended.is_set() and queued.claim())

    def expect_notifications(self, expected: bool) -> None:
        self._expecting = expected
        self._calls.ring()

    def close(self, grace_seconds: float) -> None:
        """End the thread when no READ is in flight, or after `grace_seconds`; may be called again to hurry it."""
        self._close_at = time.monotonic() + grace_seconds
        self._calls.ring()

    def join(self, timeout_seconds: float) -> None:
        self._thread.join(timeout_seconds)

    def _end_before_exit(self) -> None:
        """End while there is time: a thread that is stopped inside C++ may abort the process (1 run of 6 did)."""
        self.close(0.0)
        self.join(EXIT_SECONDS_MAX)

    def _main(self, make_core: Callable[[], AgentCore]) -> None:
        leave_single_cpu()
        try:
            require_threads(AGENT_THREADS)
            require_descriptors(AGENT_DESCRIPTORS)
            self.core = make_core()
        except (NoThreadLeft, TooFewDescriptors) as error:
            self._open_failure = CallRefused(str(error), no_descriptor_left=isinstance(error, TooFewDescriptors))
        except Exception as error:
            # A new exception: the traceback of this one would carry NIXL objects to another thread.
            self._open_failure = (
                CallRefused(error.error) if isinstance(error, CallRefused) else CallRefused(f"{_kind(error)}: {error}")
            )
        self._opened.set()
        if self.core is not None:
            self._run(self.core)
        self._ended.set()
        atexit.unregister(self._end_before_exit)

    def _run(self, core: AgentCore) -> None:
        failure: str | None = None
        try:
            self._serve(core)
        except Exception as error:
            failure = f"{_kind(error)}: {error}"
        self.abandoned = (*core.reads, *core.errored)
        if self.abandoned or core.first_reads or failure is not None:
            if self.abandoned:
                _log.warning(
                    "%d READ(s) have not ended: their NIXL agent is kept until this process ends, with the memory that "
                    "they may still write into",
                    len(self.abandoned),
                )
            core.leak()
        else:
            try:
                core.destroy()
            except Exception as error:
                failure = f"{_kind(error)}: {error}"
                core.leak()
        self._ended.set()  # before the last look at the queue: see `submit`
        refused = self._refuse_queued()
        broken = [PortBroken(failure)] if failure is not None else []
        self._deliver([*refused, *broken, ThreadEnded(self.abandoned)])

    def _refuse_queued(self) -> list[Outgoing]:
        refused: list[Outgoing] = []
        while (queued := self._calls.take()) is not None:
            if not queued.claim():
                continue
            if isinstance(queued, ReadOrdered):
                refused.append(queued.refused("the port is closed"))
            else:
                queued.closed = True
                refused.append(queued)
        return refused

    def _serve(self, core: AgentCore) -> None:
        """One call at a time. A burst of them hides no completion for longer than one takes, and is not slowed down
        by a look after each. What a look costs is bounded (`looks`), so the last of many READs is posted as quickly
        as the first."""
        active_at = moved_at = looked_at = time.monotonic()
        notifications_at = 0.0
        pause_seconds = 0.0
        active_in_a_row = 0
        cost = PollCost()
        while True:
            self.turns += 1
            # Before the next call: a poll may have hung until long after the port was closed, and whoever closed it was
            # told of all READs that may still write.
            if self._close_at is not None and time.monotonic() >= self._close_at:
                return
            if self._execute_next(core, pause_seconds):
                active_at = moved_at = time.monotonic()
                if active_at - looked_at < LOOK_SECONDS and not self._calls.is_empty:
                    continue
            started, started_cpu = time.monotonic(), time.thread_time()
            if self._close_at is not None and (not core.reads or started >= self._close_at):
                return
            events = core.poll_reads()
            ceiling_seconds = self._pause_seconds_max(core, started - moved_at)
            # Without READs this is what makes UCX progress: a peer may be reading from us.
            is_due = not core.reads or started >= notifications_at
            if is_due and self._backlog() < UNDELIVERED_EVENTS_MAX:
                events += core.poll_notifications()
                notifications_at = started + min(ceiling_seconds, PAUSE_EXPECTING_SECONDS_MAX)
            now, cpu_seconds = time.monotonic(), time.thread_time() - started_cpu
            looked_at = now
            if events:
                self._deliver(events)
                self._tidy(core)
            has_paused = pause_seconds >= PAUSE_SECONDS_MIN
            is_active = bool(events) or cost.has_worked(cpu_seconds, core.looked_at, after_pause=has_paused)
            may_be = has_paused and cost.may_have_worked(cpu_seconds, core.looked_at)
            if not (events or core.looked_at):
                cost.learn(cpu_seconds, after_pause=has_paused)
            active_in_a_row = active_in_a_row + 1 if is_active else 0
            if is_active:
                active_at = now
                if events:
                    moved_at = now
                elif active_in_a_row >= MOVES_IN_A_ROW:
                    moved_at += (now - moved_at) / 2
            if is_active or may_be:
                notifications_at = now
                pause_seconds = 0.0
            else:
                floor_seconds = 0.0 if core.reads else PAUSE_SECONDS_MIN
                pause_seconds = max(min((now - active_at) * PAUSE_FRACTION, ceiling_seconds), floor_seconds)

    def _pause_seconds_max(self, core: AgentCore, quiet_seconds: float) -> float:
        """`quiet_seconds`: for how long nothing has moved."""
        most = PAUSE_EXPECTING_SECONDS_MAX if self._expecting else PAUSE_IDLE_SECONDS_MAX
        if core.reads:
            least = PAUSE_READING_SECONDS_MAX
        elif core.first_reads:
            least = PAUSE_EXPECTING_SECONDS_MAX
        else:
            return most
        return max(least, min(most, quiet_seconds * PAUSE_QUIET_FRACTION))

    def _execute_next(self, core: AgentCore, pause_seconds: float) -> bool:
        """Wait for a call and run it. False when the pause went by without one."""
        call = self._calls.take()
        if call is None and pause_seconds >= PAUSE_SECONDS_MIN:
            self._calls.wait(pause_seconds)
            call = self._calls.take()
        if call is None:
            return False
        if call.claim():
            self._deliver([self._post(core, call) if isinstance(call, ReadOrdered) else self._call(core, call)])
            self._tidy(core)
        return True

    def _call(self, core: AgentCore, call: Call) -> Call:
        try:
            call.result = call.run(core)
        except Exception as error:
            text, lost = core.describe(error)
            exhausted = isinstance(error, CallRefused) and error.no_descriptor_left
            call.failure = CallRefused(text, transport_lost=lost, no_descriptor_left=exhausted)
        return call

    def _post(self, core: AgentCore, order: ReadOrdered) -> ReadPosted | PortReadEnded:
        try:
            return core.post_read(order)
        except Exception as error:
            text, lost = core.describe(error)
            return order.refused(text, transport_lost=lost)

    def _tidy(self, core: AgentCore) -> None:
        """After what is waited for has been delivered."""
        measured = core.tidy()
        if measured:
            self._deliver(measured)


def _kind(error: Exception) -> str:
    return type(error).__name__
