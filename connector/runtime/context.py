"""What every actor of one worker process shares: who we are, the doors to the outside, and the way back.

Nothing in here is mutable state of the protocol; that belongs to the actors.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from connector.config import ConnectorOptions
from connector.layout.geometry import RankLayout
from connector.layout.shapes import LayerShape
from connector.ports.side_channel import SideChannel
from connector.runtime.clock import Clock
from connector.runtime.messages import Outcome
from connector.runtime.nixl_owner import NixlOwner
from connector.runtime.tracked import Recorder
from statemachine.failures import Failure


@dataclass(frozen=True, kw_only=True)
class LocalRank:
    """This rank: its memory, and what a peer must match."""

    layout: RankLayout
    shapes: Mapping[str, LayerShape]
    """What each layer caches in the whole model; all ranks of all engines alike."""
    compatibility_hash: str
    landing: RankLayout | None = None
    """Our memory with heads and tokens in the other order, for READs from a peer that has that; None: not wanted."""


@dataclass(frozen=True, kw_only=True)
class ActorContext:
    """Shared by the supervisor's actors.

    Attributes:
        emit: hands an outcome to the engine thread.
        log_failure: writes one line for people: subject, failure.
        jitter: source of randomness for back-off delays; seeded in the simulator.
    """

    options: ConnectorOptions
    local: LocalRank
    nixl: NixlOwner
    side_channel: SideChannel
    clock: Clock
    recorder: Recorder
    emit: Callable[[Outcome], None]
    log_failure: Callable[[str, Failure], None]
    jitter: random.Random
