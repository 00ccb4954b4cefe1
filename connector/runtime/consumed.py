"""Blocks of prefill engines that were read and released, so that nobody here reads them once more.

A grant says until when P keeps the blocks, and that is no longer true once their last reader has let go of them. Who
uses the same kv_transfer_params again (a router that retries) would read whatever P has put there since. The book
belongs to the supervisor, not to the actor of the peer: a peer may be forgotten, to make room in the table or because
it is gone, and known again a moment later, all within the time of one grant.
"""

from __future__ import annotations

CONSUMED_MAX = 1 << 16
"""Released requests that are remembered, the latest ones. What is older than its lease is refused by its proof."""


class ConsumedBlocks:
    """Requests of remote engines whose blocks this engine has released."""

    def __init__(self) -> None:
        self._released: dict[tuple[str, str], None] = {}

    def add(self, engine_id: str, remote_request_id: str) -> None:
        self._released[engine_id, remote_request_id] = None
        if len(self._released) > CONSUMED_MAX:
            del self._released[next(iter(self._released))]

    def has(self, engine_id: str, remote_request_id: str) -> bool:
        return (engine_id, remote_request_id) in self._released
