"""Ending a prefill engine without a request noticing: what vLLM does, what is asked of us, and how the parts share it.

What vLLM 0.32 does at SIGTERM (`entrypoints/launchers/launcher.py`, `v1/engine/utils.py`, `v1/engine/core.py`):

1. The API server passes SIGTERM on to each engine core, and waits for `--shutdown-timeout` seconds. Then it kills. With
   the default, 0, the kill comes in the same moment: nothing that is lent survives, and no `shutdown` of ours is
   called. Meanwhile it goes on taking HTTP requests.
2. The engine core notes the signal. New requests are answered as aborted, which a client of P sees as an answer with
   `finish_reason: abort` and no kv_transfer_params; those that the API server cannot tokenize any more, with HTTP 500.
   With a timeout of 0 those in hand are aborted too; else they are computed to their end.
3. Its loop ends when `Scheduler.has_requests` is false: no request waits or runs, none has finished whose blocks are
   kept (so a lease keeps the engine alive), and no connector says `has_pending_push_work`.
4. `EngineCore.shutdown`: the executor first (the worker's connector: control socket, READs, NIXL agent), then the
   scheduler (its connector: the listener). Decode engines see their links reset.

vLLM tells a connector nothing of 1 to 3. So a connector with a lease would keep vLLM from ending until the kill, would
renew that lease for whoever asks, would be asked for further ones by those prefills that are still computed, and would
then vanish without a word.

What happens here instead. An engine drains when it is asked to: by `nixl-actor drain` on its side channel, while it
serves, or by SIGTERM if `--shutdown-timeout` leaves time (`catch_sigterm` puts itself in front of vLLM's handler).

    scheduler's thread   this module, `lends`                 which prefills are lent; `has_pending_push_work`
    listener's thread    `connector/runtime/draining.py`      the machine `statemachine/draining.py`; tells the workers
    each worker          `statemachine/lending.py`            no renewal beyond the grace period; tells decode engines
    decode engine        `statemachine/departure.py`          what `Leaving` means, and the end of the process after it

Which prefills are lent. Those that were accepted before: their prompts are queued or computed, which is paid for, and
they are read within moments. But not in the last `kv_lease_duration` of the grace period: what is granted lasts for its
time. Those that come later are computed and answered without kv_transfer_params, so the decode engine computes the
prompt: a router that has not heard yet that the engine leaves costs its clients time, and none of them an error. They
are counted (`prefills_not_lent`). To answer with an error would be quicker, but routers pass errors of P on to clients.

When it has drained, it says so once in the log and in the gauge `drained`, `nixl-actor drain` returns, and after
SIGTERM vLLM's loop ends. The loop is kept going until then, so that decode engines are told before the sockets close,
and until the gauge has been shown. An engine that is asleep while it drains shows the gauge with its next step; the
log, `ps` and `drain` do not need one.

An engine that vLLM shuts down without a drain (step 4 alone) cannot wait for anybody: the executor kills workers that
take longer than VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS, 5 by default, and those of an engine core that was killed have
nobody left who would end them, and hold the device's memory meanwhile. Its workers tell their decode engines all the
same, in the connector's `shutdown` and with no grace period: it is they who have the connections, and the listener's
thread could not tell them any more, because they end before the scheduler does.

A built-in decode engine cannot be told. It reads what is lent, and takes the end of the process for a failure.
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
