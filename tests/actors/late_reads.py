"""A NIXL agent whose READs are over for NIXL long before they are over: the bytes come when the test says so.

UCX reports an error for a READ as soon as one of its requests has failed, whatever the others do, and NIXL may refuse
to release the READ's handle; a peer that hangs leaves READs that never end. Neither can be brought about at will with
a real transport, so the Python agent of one name is given other methods here. What lands in the end is moved by the
real `transfer`, on the thread that owns the agent.

Whether a late READ lands follows UCX: it does as long as the peer's agent is loaded, and does not after the agent was
removed once the READ has ended in an error, because then its endpoint is closed.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import nixl._api
import pytest

from connector.ports.nixl_agent.core import AgentCore


class Answer(Enum):
    """What NIXL says of a READ that is under way."""

    IN_FLIGHT = "PROC, for ever"
    ERROR = "an error, with requests of it still in flight, and the handle is not released"
    ERROR_AT_POST = "an error from `transfer` itself, otherwise like ERROR"


class LateReads:
    """Takes over the READs that the agent `agent_name` posts from now on, `kept_max` at most, until `let_go`."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, agent_name: str, answer: Answer, kept_max: int | None = None
    ) -> None:
        self._kept_max = kept_max
        self.posted = 0
        """READs taken over."""
        self.landed = 0
        """READs whose bytes came late."""
        self._agent_name = agent_name
        self._answer = answer
        self._kept: list[Any] = []
        self._holding = True
        self._original = {
            name: getattr(nixl._api.nixl_agent, name)
            for name in ("transfer", "check_xfer_state", "release_xfer_handle", "remove_remote_agent", "get_new_notifs")
        }
        for name in self._original:
            own = getattr(self, f"_{name}")
            original = self._original[name]

            def method(agent: Any, *args: Any, own: Any = own, original: Any = original) -> Any:
                return own(agent, *args) if agent.name == self._agent_name else original(agent, *args)

            monkeypatch.setattr(nixl._api.nixl_agent, name, method)
        # The port's own, from a peer that it has not met, which are not meant.
        monkeypatch.setattr(AgentCore, "_read_first", lambda *_: None)

    def let_go(self) -> None:
        """The bytes of every READ that is still kept come now, and later READs are ordinary ones."""
        self._holding = False

    @staticmethod
    def _error() -> Exception:
        error: Exception = nixl._api.nixlBind.nixlBackendError("injected: one request of several failed")
        return error

    def _transfer(self, agent: Any, handle: Any, *args: Any) -> str:
        if not self._holding or self.posted == self._kept_max:
            state: str = self._original["transfer"](agent, handle, *args)
            return state
        self.posted += 1
        self._kept.append(handle)
        if self._answer is Answer.ERROR_AT_POST:
            raise self._error()
        return "PROC"

    def _check_xfer_state(self, agent: Any, handle: Any) -> str:
        if not any(handle is kept for kept in self._kept):
            state: str = self._original["check_xfer_state"](agent, handle)
            return state
        if self._answer is Answer.IN_FLIGHT:
            return "PROC"
        raise self._error()

    def _release_xfer_handle(self, agent: Any, handle: Any) -> None:
        if any(handle is kept for kept in self._kept):
            raise self._error()
        self._original["release_xfer_handle"](agent, handle)

    def _remove_remote_agent(self, agent: Any, name: Any) -> None:
        if self._answer is not Answer.IN_FLIGHT:
            self._kept.clear()
        self._original["remove_remote_agent"](agent, name)

    def _get_new_notifs(self, agent: Any, *args: Any) -> Any:
        """Polled all the time by the thread that owns the agent."""
        if not self._holding:
            while self._kept:
                self._original["transfer"](agent, self._kept[-1])
                self._kept.pop()
                self.landed += 1
        return self._original["get_new_notifs"](agent, *args)
