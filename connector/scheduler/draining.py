"""The scheduler's part in ending a prefill engine without a request noticing.

An engine drains when `nixl-actor drain` or SIGTERM asks for it. `SchedulerDraining` hears of both (of SIGTERM before
vLLM does, if `--shutdown-timeout` leaves time). It says which prefills are still lent: those that were accepted before,
but not in the last `kv_lease_duration` of the grace period. And it keeps vLLM's loop going until the engine has drained
and the metrics have shown it.

It is needed because vLLM tells a connector nothing of its end: an engine that lends would keep vLLM from ending until
vLLM kills it, and would go on lending meanwhile. What vLLM does, and the other parts, are in docs/architecture.md,
"Draining".
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from connector.clock import NS_PER_SECOND, Clock
from connector.scheduler.listener_thread import ListenerThread
from statemachine.draining import State

SIGTERM_CAUSE = "SIGTERM"
SHOWN_LATE_NS = 5 * NS_PER_SECOND
"""How long after the grace period vLLM's loop is kept going at most, for the listener to say that it is over."""


class SchedulerDraining:
    """The scheduler's thread's view of an engine that may be to end. See the module's docstring.

    Args:
        listener: whose `draining` says how far the engine has come; None: it serves nobody yet, or no more.
        grace_ns: of the grace period after SIGTERM; 0: vLLM leaves none, so the signal is not caught.
    """

    def __init__(self, clock: Clock, listener: Callable[[], ListenerThread | None], *, grace_ns: int) -> None:
        self._clock = clock
        self._listener = listener
        self._grace_ns = grace_ns
        self.is_asked = False
        """SIGTERM has come; the machine hears of it a little later, in the listener's thread."""
        self._asked_ns = 0
        self._former_handler: Callable[[int, FrameType | None], Any] | None = None
        # The state that the metrics have shown.
        self._shown = State.SERVING

    @property
    def state(self) -> State:
        listener = self._listener()
        state = listener.draining.state if listener is not None else State.SERVING
        return State.DRAINING if state is State.SERVING and self.is_asked else state

    @property
    def accepts(self) -> bool:
        """Whether prefills that come now will be lent."""
        return self.state is State.SERVING

    @property
    def grants(self) -> bool:
        """Whether those that were accepted are lent when they finish now."""
        listener = self._listener()
        if self.accepts:
            return True
        if listener is None or listener.draining.state is State.SERVING:
            return listener is not None  # SIGTERM came in this moment
        return self._clock.now_ns() < listener.draining.stops_granting_ns

    def show(self) -> State:
        """The state, which is being shown in the metrics."""
        self._shown = self.state
        return self._shown

    @property
    def keeps_stepping(self) -> bool:
        """Whether vLLM has to go on although it has nothing to do."""
        listener, state = self._listener(), self.state
        if listener is None or listener.is_dead or state is State.SERVING or state is self._shown is State.DRAINED:
            return False
        ends_ns = max(listener.draining.ends_ns, self._asked_ns + self._grace_ns if self.is_asked else 0)
        return self._clock.now_ns() < ends_ns + SHOWN_LATE_NS

    # --- SIGTERM ----------------------------------------------------------------------------------------------------

    def catch_sigterm(self) -> None:
        """Hear of the SIGTERM that ends the engine core, before vLLM's own handler does.

        Only where that is vLLM's and this is the thread that handles signals: in a process of its own for the engine
        core. Any other program has its own reasons to take SIGTERM.
        """
        if not self._grace_ns or threading.current_thread() is not threading.main_thread():
            return
        former = signal.getsignal(signal.SIGTERM)
        if callable(former) and getattr(former, "__module__", "").startswith("vllm."):
            self._former_handler = former
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def forget_sigterm(self) -> None:
        """Put vLLM's handler back, unless somebody has replaced ours."""
        former, self._former_handler = self._former_handler, None
        if former is not None and signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, former)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        listener = self._listener()
        if listener is not None and not self.is_asked:
            self._asked_ns, self.is_asked = self._clock.now_ns(), True
            listener.drain(SIGTERM_CAUSE, self._grace_ns)
        if self._former_handler is not None:
            self._former_handler(number, frame)
