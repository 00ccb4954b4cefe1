"""How many of D's blocks may be out of its pool because READs that never end may still write into them.

A request whose READs do not end is over all the same, and its blocks are in quarantine until nothing can write into
them any more (`request.py`, Quarantined). One engine that hangs costs the blocks of the requests that read from it
then, and no more, for nothing is read from it after that. But engines can hang one after the other, for as long as the
network is what is broken, and each takes its part of the pool; with none left D serves nobody, not even who needs no KV
from elsewhere.

So there is a limit. Once as many blocks are in it, nothing new is read from anywhere until enough have come back:
a request that would be read fails at once with `QuarantineFull`, and computes its prompt here if the policy says so.
What is being read at that moment goes on, and may still end in quarantine; so the limit can be exceeded by the blocks
of those. Nobody waits for room: blocks come back when a READ ends, or when a connection has been torn down and the
grace of the back end has passed, neither of which has a bound.

Each rank counts for itself. A request is on all ranks, and fails on all if it does on one; READs from an engine that
hangs hang on all ranks, so their counts hardly differ.
"""

from __future__ import annotations

from collections.abc import Hashable


class Quarantine:
    """See the module's docstring.

    Args:
        limit_blocks: how many blocks may be in quarantine before nothing new is read; at least 1.
    """

    def __init__(self, limit_blocks: int) -> None:
        self.limit_blocks = limit_blocks
        self.blocks = 0
        """Kept aside now."""
        self.is_full = False
        """Nothing new may be read."""
        # By whose they were.
        self._blocks_of: dict[Hashable, int] = {}

    def blocks_of(self, owner: Hashable) -> int:
        """Kept aside now of this owner's."""
        return self._blocks_of.get(owner, 0)

    def keep(self, owner: Hashable, blocks: int) -> None:
        """So many blocks of `owner`, which has ended, are in quarantine now; 0: nothing writes into them any more."""
        self.blocks += blocks - self._blocks_of.pop(owner, 0)
        if blocks:
            self._blocks_of[owner] = blocks
        self.is_full = self.blocks >= self.limit_blocks


def limit_of(share: float, blocks: int) -> int:
    """How many blocks a `share` of a cache of so many comes to: at least one."""
    return max(1, int(share * blocks))
