"""Lines of the log for requests that wait for long: in vLLM's queue, and then for their KV. One of each kind for each.

A command of the engine begins a wait, and the next one of the same request, or its end, ends it. What a request waits
for is asked of the core when the line is due.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from connector.clock import NS_PER_SECOND, to_ns
from connector.observe.event_log import WAIT_SAID_AFTER_SECONDS, EventLog, describe_wait
from connector.protocol import StartPull, TrackLease
from statemachine.remote_engine import RemoteEngine


class WaitNotices:
    """The lines for people about requests of one peer actor that wait for long.

    Args:
        log: where the lines go.
        says_who_is_queued: vLLM's queue is one for all ranks, so one of them says it.
        name: what the log calls a request, by its command and the moment at which that came (ns).
    """

    def __init__(
        self,
        log: EventLog,
        core: RemoteEngine,
        *,
        says_who_is_queued: bool,
        name: Callable[[TrackLease | StartPull, int], str],
    ) -> None:
        self._log = log
        self._core = core
        self._says_who_is_queued = says_who_is_queued
        self._name = name
        # What may come to wait for long, with the moment at which it came; in the order of these.
        self._due: deque[tuple[int, TrackLease | StartPull]] = deque()
        # The last command of each request, until its line is written or it waits no more.
        self._last: dict[str, TrackLease | StartPull] = {}

    def begin(self, command: TrackLease | StartPull, now_ns: int) -> None:
        """What the request waited for before has come."""
        if self._says_who_is_queued or isinstance(command, StartPull):
            self._last[command.request_id] = command
            self._due.append((now_ns, command))
        else:
            self.end(command.request_id)

    def end(self, request_id: str) -> None:
        """It waits for nothing."""
        self._last.pop(request_id, None)

    def next_deadline(self) -> int | None:
        """When `write` has something to say, if nothing ends before (ns); None: nothing waits."""
        while self._due and not self._waits(self._due[0][1]):
            self._due.popleft()
        return self._due[0][0] + to_ns(WAIT_SAID_AFTER_SECONDS) if self._due else None

    def write(self, now_ns: int) -> None:
        """The lines that are due."""
        while (due_ns := self.next_deadline()) is not None and due_ns <= now_ns:
            came_ns, command = self._due.popleft()
            self.end(command.request_id)
            if isinstance(command, StartPull):
                self._write_what_it_waits_for(command, came_ns, now_ns)
            elif self._is_queued(command):
                self._log.queued(self._name(command, came_ns), command.request_id)

    def _waits(self, command: TrackLease | StartPull) -> bool:
        return self._last.get(command.request_id) is command

    def _is_queued(self, command: TrackLease) -> bool:
        """Whether this engine is still the one that holds its lease: it may have been told of another one since."""
        claim = self._core.view_claim(command.lease)
        return claim is not None and command.request_id in claim.queued

    def _write_what_it_waits_for(self, command: StartPull, came_ns: int, now_ns: int) -> None:
        view = self._core.view_request(command.request_id)
        if view is None:
            return
        left = ""
        if view.until_ns is not None:  # of its state; the connection may fail, and it with it, before
            left = f"; at most {(view.until_ns - now_ns) / NS_PER_SECOND:.0f} s longer"
        self._log.waits(self._name(command, came_ns), describe_wait(view, self._core.state) + left)
