"""The handshake listener of an engine that lends nothing and is never to end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from connector.clock import BootClock, to_ns
from connector.scheduler.listener_thread import ListenerThread
from connector.step_metadata import HandshakeMetadata
from statemachine.granting import LentCounts
from tests.rig.facts import LEAVE_SECRET, facts


def one_rank(control_host: str = "127.0.0.1", control_port: int = 1) -> HandshakeMetadata:
    """The handshake metadata of an engine of one rank."""
    extension = facts(life="", control_host=control_host, control_port=control_port)
    return HandshakeMetadata("hash", b"agent", extension, LEAVE_SECRET)


def make_listener_thread(
    host: str,
    port: int,
    ranks: Mapping[tuple[int, int], HandshakeMetadata],
    life: str = "0" * 32,
    on_death: Callable[[str], None] = lambda reason: None,
    **others: Any,
) -> ListenerThread:
    """Not started. `others`: of `ListenerThread`."""
    usual = {"clock": BootClock(), "grace_ns": to_ns(60), "lease_ns": to_ns(30), "count": lambda: LentCounts(0, 0)}
    return ListenerThread(host, port, ranks, life, on_death, **usual | others)
