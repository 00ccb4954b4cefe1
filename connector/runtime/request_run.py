"""One request as its peer actor runs it: the machine, and what the machine does not need to know."""

from __future__ import annotations

from dataclasses import dataclass

from connector.runtime.block_tables import Resolved
from connector.runtime.messages import StartPull
from connector.runtime.nixl_owner import Quarantine
from connector.runtime.tracked import Recorder, Tracked
from statemachine import request


@dataclass(kw_only=True)
class RequestRun:
    """A request in the hands of an actor.

    Attributes:
        heard_ns: local time at which this engine first heard of the request.
        probed, probing: the peer's incarnation was looked up anew for this request, or is being looked up.
        clock_asked, clock_awaited: the peer's clock was measured anew for this request, or is being measured.
        quarantine: the READs of the current attempt.
        resolved: what the current attempt reads, on the connection that it was offered.
    """

    command: StartPull
    machine: Tracked[request.Request]
    heard_ns: int
    probed: bool = False
    probing: bool = False
    clock_asked: bool = False
    clock_awaited: bool = False
    quarantine: Quarantine | None = None
    resolved: Resolved | None = None

    @property
    def request_id(self) -> str:
        return self.command.request_id

    @property
    def state(self) -> request.State:
        return self.machine.value.state


def start_run(command: StartPull, *, retries: int, heard_ns: int, recorder: Recorder) -> RequestRun:
    """A fresh run in pending_handshake."""
    machine = Tracked(
        request.MACHINE,
        request.Request(
            request_id=command.request_id,
            remote_request_id=command.remote_request_id,
            peer=command.peer.engine_id,
            awaited=command.awaited,
            retries_left=retries,
        ),
        recorder,
        subject=command.request_id,
        peer=command.peer.engine_id,
        remote_request_id=command.remote_request_id,
        blocks=len(command.local_block_ids),
    )
    return RequestRun(command=command, machine=machine, heard_ns=heard_ns)
