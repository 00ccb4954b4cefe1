"""An agent that is no engine of ours: a built-in decode engine, or somebody who got hold of handshake metadata.

It owns no memory and has no actors; it loads an agent's public metadata and sends notifications, over real NIXL.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import nixl._api


class Stranger:
    """One such agent. Used from one thread."""

    def __init__(self, name: str | bytes) -> None:
        config = nixl._api.nixl_agent_config(enable_prog_thread=False, num_threads=0, backends=["UCX"])
        self._agent: Any = nixl._api.nixl_agent(name, config)

    def meet(self, agent_metadata: bytes) -> str:
        """Load an agent; its name."""
        name = self._agent.add_remote_agent(agent_metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def notify(self, name: str, message: bytes) -> None:
        """Send; UCX needs `progress` until it has arrived."""
        self._agent.send_notif(name, message)

    def progress(self) -> None:
        self._agent.get_new_notifs()

    def close(self) -> None:
        del self._agent


@contextmanager
def stranger(name: str | bytes | None = None) -> Iterator[Stranger]:
    agent = Stranger(name if name is not None else f"stranger-{uuid.uuid4().hex}")
    try:
        yield agent
    finally:
        agent.close()
