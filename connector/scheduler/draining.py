"""The scheduler's part in ending a prefill engine without a request noticing.

An engine drains when `nixl-actor drain` or SIGTERM asks for it. `SchedulerDraining` hears of both (of SIGTERM before
vLLM does, if `--shutdown-timeout` leaves time), and keeps vLLM's loop going until the engine has drained and the
metrics have shown it. Which prefills are still lent then is in `statemachine/grant.py`.

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
from statemachine.draining import MACHINE, Asked, Draining, State

SIGTERM_CAUSE = "SIGTERM"
SHOWN_LATE_NS = 5 * NS_PER_SECOND
"""How long after the grace period vLLM's loop is kept going at most, for the listener to say that it is over."""


class SchedulerDraining:
    """The scheduler's thread's view of an engine that may be to end. See the module's docstring.

    Args:
        listener: whose `draining` says how far the engine has come; None: it serves nobody yet, or no more.
        grace_ns: of the grace period after SIGTERM; 0: vLLM leaves none, so the signal is not caught.
        lease_ns: how long a lease lasts that nobody renews.
    """

    def __init__(
        self, clock: Clock, listener: Callable[[], ListenerThread | None], *, grace_ns: int, lease_ns: int
    ) -> None:
        self._clock = clock
        self._listener = listener
        self._grace_ns = grace_ns
        self._serving = Draining(lease_ns=lease_ns)
        self.sigterm: Asked | None = None
        """It has come. The listener's thread hears of it a little later."""
        self._former_handler: Callable[[int, FrameType | None], Any] | None = None
        # The state that the metrics have shown.
        self._shown = State.SERVING

    @property
    def value(self) -> Draining:
        """Whether the engine is to end, and how far it has come."""
        listener = self._listener()
        value = self._serving if listener is None else listener.draining
        return value if self.sigterm is None else MACHINE.step(value, self.sigterm)[0]

    def show(self) -> State:
        """The state, which is being shown in the metrics."""
        self._shown = self.value.state
        return self._shown

    @property
    def keeps_stepping(self) -> bool:
        """Whether vLLM has to go on although it has nothing to do."""
        listener, value = self._listener(), self.value
        if listener is None or listener.is_dead or value.state is State.SERVING:
            return False
        if value.state is self._shown is State.DRAINED:
            return False
        return self._clock.now_ns() < value.ends_ns + SHOWN_LATE_NS

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
        if listener is not None and self.sigterm is None:
            now_ns = self._clock.now_ns()
            self.sigterm = Asked(now_ns=now_ns, cause=SIGTERM_CAUSE, grace_ns=self._grace_ns, workers=0)
            listener.drain(SIGTERM_CAUSE, self._grace_ns)
        if self._former_handler is not None:
            self._former_handler(number, frame)
