"""What simulated engines are, as plain data: what a model caches, over how many ranks an engine is spread, how many
tokens its blocks hold. What follows from it in memory is in `model`."""

from __future__ import annotations

import enum

import msgspec

from connector.runtime.deferred_commands import LOOK_SECONDS

RANK_LAG_SECONDS_MAX = 0.0005
"""How much later than the first one another rank may take up a step."""
LATE_DEVICES = 0.25
"""How many ranks have a device that still writes when the engine knows what a step came to."""
DEVICE_SECONDS_MAX = 0.02
"""Until a late device has done what it was told with the blocks of a loaded request: longer than some steps, so that
they may be somebody else's by then if nobody waits for it."""
LATE_DEVICE_SECONDS_MAX = 0.003
HEARD_SECONDS_MAX = RANK_LAG_SECONDS_MAX + LATE_DEVICE_SECONDS_MAX + 2 * LOOK_SECONDS
"""By then every rank's actors have heard of a step."""
BLOCK_TOKENS = 16
"""Of engines whose blocks have the usual size."""
BLOCK_TOKENS_MAX = 32


class SecondGroup(enum.Enum):
    """What a model caches beside full attention."""

    NONE = "nothing else"
    WINDOW = "sliding window"
    STATE = "state"


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """What all engines of a cluster serve."""

    heads: int = 1
    second: SecondGroup = SecondGroup.NONE

    @property
    def groups(self) -> tuple[SecondGroup, ...]:
        """The cache groups; NONE stands for full attention."""
        first = (SecondGroup.NONE,)
        return first if self.second is SecondGroup.NONE else (*first, self.second)


class EngineShape(msgspec.Struct, frozen=True, kw_only=True):
    """How one engine is built."""

    tp_size: int = 1
    block_tokens: int = BLOCK_TOKENS

    def blocks_of(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)
