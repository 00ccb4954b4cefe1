"""Looks at who listens, on a machine that may stand still."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from connector.ports import zmq_bridge
from connector.ports.zmq_bridge import ZmqRequester


def look_patiently(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """A look may take so long; when it begins stays as it is. The product gives up after a second, and takes who has
    not answered by then for a process that hangs, or for something else."""
    begins_after_seconds = zmq_bridge.requester.GREETING_SECONDS

    def patient(look: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def patiently(requester: ZmqRequester, address: str) -> Any:
            monkeypatch.setattr(zmq_bridge.requester, "GREETING_SECONDS", seconds)  # another look may be under way
            try:
                return await look(requester, address)
            finally:
                monkeypatch.setattr(zmq_bridge.requester, "GREETING_SECONDS", begins_after_seconds)

        return patiently

    for name in ("_look_who_listens", "_look_at_greeting"):
        monkeypatch.setattr(ZmqRequester, name, patient(getattr(ZmqRequester, name)))
