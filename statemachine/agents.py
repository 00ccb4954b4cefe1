"""The agents that one rank has NIXL load, and who stands on them.

An agent is what NIXL knows of one worker of a peer. Loading one that is loaded does nothing, and removing it takes it
from everybody. So whoever wants one shares it, and it is removed when the last who stands on it lets go:

    nobody     it is not loaded, or its removal has been ordered
    sound      somebody stands on it, and nobody has found anything wrong
    given up   somebody has let go of it because of a failure. The others are told, once, and nobody joins them: what
               is in flight over it in part may write for as long as it is loaded, and it can be of use again only when
               it was removed and loaded afresh (docs/nixl.md)

NIXL does what it is told in order, and answers later. An agent may be loaded while its last owner lets go: it is loaded
already, and removed next. So whose load was under way when a removal was ordered loads once more.

Sans I/O; the executor is `connector/runtime/reads.py`. Who stands on an agent and who waits for its end are opaque.
"""

from __future__ import annotations

import enum
from typing import Any, TypeAlias

from statemachine.failures import Failure
from statemachine.kernel import Effect


class Loaded(enum.Enum):
    """What has come of a load."""

    STANDS = "it stands on the agent"
    REFUSED = "the agent has to be removed first"
    AGAIN = "it is to be loaded once more"


class TellLost(Effect, frozen=True, kw_only=True):
    """Another one has given this agent up, so `owner` has to, as soon as its READs over it have ended."""

    agent: str
    owner: Any
    failure: Failure


class Remove(Effect, frozen=True, kw_only=True):
    """Have NIXL remove the agent, and tell each of `waiting` when that has been done, or has failed."""

    agent: str
    waiting: tuple[Any, ...]


class TellOver(Effect, frozen=True, kw_only=True):
    """It need not wait for any removal."""

    waiting: Any


AgentEffect: TypeAlias = TellLost | Remove | TellOver


class _Agent:
    """One that somebody stands on.

    Attributes:
        owners: who; never empty.
        failure: why one of them has given it up.
        waiting: who has let go, and waits for its removal.
    """

    __slots__ = ("failure", "owners", "waiting")

    def __init__(self) -> None:
        self.owners: dict[Any, None] = {}
        self.failure: Failure | None = None
        self.waiting: list[Any] = []


class Agents:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._by_name: dict[str, _Agent] = {}
        # Of each load that is under way, whose agent is not known yet: whose removal was ordered since it began.
        self._removed: dict[int, set[str]] = {}
        self._loads = 0

    def begin_load(self) -> int:
        """NIXL is told to load an agent. Returns the number of the load; `end_load` follows."""
        self._loads += 1
        self._removed[self._loads] = set()
        return self._loads

    def end_load(self, load: int, agent: str | None, owner: Any) -> Loaded:
        """NIXL has loaded this agent for `owner`; None: it has not."""
        removed = self._removed.pop(load)
        if agent is None:
            return Loaded.REFUSED
        if agent in removed:
            return Loaded.AGAIN
        found = self._by_name.setdefault(agent, _Agent())
        if found.failure is not None or owner in found.owners:
            return Loaded.REFUSED
        found.owners[owner] = None
        return Loaded.STANDS

    def let_go(self, agent: str, owner: Any, failure: Failure | None, waiting: Any) -> list[AgentEffect]:
        """`owner` stands on it no more. `failure`: why it is of no use to anybody. None: it is only not needed, and if
        others stand on it that is all. `waiting` is told when it is over."""
        found = self._by_name.get(agent)
        if found is None:
            return [TellOver(waiting=waiting)]
        found.owners.pop(owner, None)
        if not found.owners:
            del self._by_name[agent]
            for removed in self._removed.values():
                removed.add(agent)
            return [Remove(agent=agent, waiting=(*found.waiting, waiting))]
        if failure is None:
            return [TellOver(waiting=waiting)]
        found.waiting.append(waiting)
        if found.failure is not None:
            return []
        found.failure = failure
        return [TellLost(agent=agent, owner=other, failure=failure) for other in found.owners]

    def is_lost(self, agent: str) -> bool:
        """Nobody stands on it any more, or somebody has given it up."""
        found = self._by_name.get(agent)
        return found is None or found.failure is not None
