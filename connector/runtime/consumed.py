"""What this engine has read and released: whoever names it again would read somebody else's KV.

One memory for all peers, because it must outlive the actor of a peer: one that was evicted and is met again still has
the same blocks, and a proof of its lease says nothing about a release that this engine sent itself.
"""

from __future__ import annotations

CONSUMED_MAX = 1 << 16
"""Released requests that are remembered, the latest ones. What is older than its lease is refused by its proof."""


class ConsumedBlocks:
    """Names of released requests: engine id and request id of the prefill engine."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, str], None] = {}

    def add(self, engine_id: str, remote_request_id: str) -> None:
        self._names[engine_id, remote_request_id] = None
        if len(self._names) > CONSUMED_MAX:
            del self._names[next(iter(self._names))]

    def __contains__(self, name: tuple[str, str]) -> bool:
        return name in self._names
