"""State transitions that the engines of a test wrote, read back while they run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from connector.tools.trace_reader import read_trace
from statemachine.trace import TransitionRecord
from tests.plain_paths import LEASE_PATHS_PLAIN, REQUEST_PATHS_PLAIN

TRACE_SECONDS = 30.0
"""How long a record that must come is waited for; it comes within milliseconds."""


class Traces:
    """The trace files of a directory, one per process."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def records(self, machine: str, subject: str) -> list[TransitionRecord]:
        """Transitions of one instance, in order; a line that is still being written is left out."""
        records = read_trace(self._directory) if self._directory.is_dir() else []
        found = [record for record in records if (record.machine, record.subject) == (machine, subject)]
        return sorted(found, key=lambda record: record.mono_ns)

    def path(self, machine: str, subject: str) -> list[str]:
        """States that one instance went through, without repetitions."""
        states = [record.to_state for record in self.records(machine, subject)]
        return [state for index, state in enumerate(states) if index == 0 or states[index - 1] != state]

    def wait_for(self, machine: str, subject: str, reached: Callable[[list[str]], bool]) -> list[str]:
        """Wait until the path of an instance is as wanted, and return it.

        Raises:
            AssertionError: it was not within TRACE_SECONDS; shows the path.
        """
        deadline = time.monotonic() + TRACE_SECONDS
        while not reached(path := self.path(machine, subject)):
            assert time.monotonic() < deadline, f"{machine} {subject} went through {path}"
            time.sleep(0.01)
        return path

    def wait_for_state(self, machine: str, subject: str, state: str) -> list[str]:
        """Wait until an instance is in `state`; the path that led there."""
        return self.wait_for(machine, subject, lambda path: path[-1:] == [state])

    def reason(self, request_id: str) -> str | None:
        """Wait until a request has ended, of which the engine may know before it is written; why, where it failed."""
        self.wait_for("request", request_id, lambda path: path[-1:] in (["done"], ["failed"], ["expired"]))
        return self.records("request", request_id)[-1].reason

    def expect_plain_lease(self, request_id: str) -> None:
        """Wait until a lease is over; it was lent, and it ended because its readers released it."""
        assert tuple(self.wait_for_state("lease", request_id, "done")) in LEASE_PATHS_PLAIN

    def expect_plain_request(self, request_id: str) -> None:
        """Wait until a request is done; nothing went wrong on its way."""
        assert tuple(self.wait_for_state("request", request_id, "done")) in REQUEST_PATHS_PLAIN
