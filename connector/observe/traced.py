"""What is traced: the machines whose steps become transition records, the name of the step that makes an instance, and
that of the state before it.

Only values: whatever makes, reads or counts records takes them from here.
"""

from __future__ import annotations

from typing import Any

from statemachine import hold, lease, peer, request
from statemachine.kernel import Machine

MACHINE_OF: dict[type[Any], Machine[Any, Any]] = {
    request.Request: request.MACHINE,
    hold.Hold: hold.MACHINE,
    peer.Peer: peer.MACHINE,
    lease.Lease: lease.MACHINE,
}
"""By the type of its values. Further machines are of whole engines (departure, draining, introduction), or of the
scheduler's process (load, grant), and have no records."""

MACHINES: tuple[Machine[Any, Any], ...] = tuple(MACHINE_OF.values())

TERMINAL: dict[str, frozenset[str]] = {
    machine.name: frozenset(state.value for state in machine.terminal) for machine in MACHINES
}
"""States that end an instance, by the name of its machine."""

QUEUED = "queued"
"""State of a request that the connector knows of and vLLM has not scheduled yet; no machine exists for it."""

CREATED = "Created"
"""The event of a record that makes an instance. No machine has an event of this name."""
