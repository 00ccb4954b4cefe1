"""What is handed to the agent's thread, and what comes back.

Errors cross as text, never as what NIXL raised (see the package).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from connector.clock import BootClock
from connector.ports.nixl import AgentName, DescriptorIds, DescriptorListHandle, NixlEvent, PortReadEnded, ReadHandle

if TYPE_CHECKING:
    from connector.ports.nixl_agent.core import AgentCore

CLOCK = BootClock()


class CallRefused(Exception):
    """A call failed before or inside NIXL. Carries text only."""

    def __init__(self, error: str, *, transport_lost: bool = False, no_descriptor_left: bool = False) -> None:
        super().__init__(error)
        self.error = error
        self.transport_lost = transport_lost
        self.no_descriptor_left = no_descriptor_left


class _Queued:
    """Something on its way to the agent's thread.

    Either the thread or a canceller claims it, whichever comes first; a lock taken once is the atomic test-and-set.
    """

    __slots__ = ("_claim",)

    def __init__(self) -> None:
        self._claim = threading.Lock()

    def claim(self) -> bool:
        """True for the first caller only."""
        return self._claim.acquire(blocking=False)


class Call(_Queued):
    """A call on its way to the agent's thread and back. `run` is what the thread does with the agent.

    `failure` is set when the call failed, `closed` when the thread ended before it came to it, else `result` holds.
    """

    __slots__ = ("closed", "failure", "result", "run")

    def __init__(self, run: Callable[[AgentCore], Any]) -> None:
        super().__init__()
        self.run = run
        self.result: Any = None
        self.failure: CallRefused | None = None
        self.closed = False


class ReadOrdered(_Queued):
    """A READ whose turn comes. No task waits for it: what becomes of it are events."""

    __slots__ = ("handle", "local", "local_ids", "remote", "remote_ids")

    def __init__(
        self,
        handle: ReadHandle,
        local: DescriptorListHandle,
        local_ids: DescriptorIds,
        remote: DescriptorListHandle,
        remote_ids: DescriptorIds,
    ) -> None:
        super().__init__()
        self.handle = handle
        self.local = local
        self.local_ids = local_ids
        self.remote = remote
        self.remote_ids = remote_ids

    def refused(self, error: str, *, transport_lost: bool = False) -> PortReadEnded:
        """Nothing of it was handed to NIXL."""
        return PortReadEnded(
            handle=self.handle,
            ended_ns=CLOCK.now_ns(),
            error=error,
            transport_lost=transport_lost,
            was_posted=False,
        )


class FirstReadOver(msgspec.Struct, frozen=True):
    """There is no first READ from `agent` in flight any more: whoever waits for that may ask what became of it."""

    agent: AgentName


class ThreadEnded(msgspec.Struct, frozen=True):
    """The last thing the thread says. `abandoned`: READs that may still write, so their memory must not be reused."""

    abandoned: tuple[ReadHandle, ...]


Outgoing = Call | FirstReadOver | ThreadEnded | NixlEvent
