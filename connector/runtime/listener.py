"""The listener: answers handshakes in the scheduler process of an engine, whatever its role.

One task, one socket. A request is decoded by `wire.handshake` within bounds; one that is malformed, or names a rank
that does not exist, costs its sender an error reply and nothing else. A bug costs the request that it occurs with: it
is logged, and the task goes on.

Once the engine's workers cannot serve any more, every request is answered with the reason, so that decode engines give
up at once; tools still learn where its workers are, which may know why. An engine that is to end is told so here, and
goes on answering: what it lends can still be read (`connector/runtime/draining.py`).

Files of keys that the scheduler process uses are looked at again from here, every few seconds: its other thread must
not wait for a file system.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import trio

from connector.observe.log import ProblemLog
from connector.ports.side_channel import Listener, SideChannel, units_to_send
from connector.runtime.draining import EngineDraining, OwnWorker
from connector.runtime.restarts import keep_running
from connector.thread_limit import NoThreadLeft
from connector.waiting_threads import call_in_thread
from connector.wire.administration import encode_report, is_drain
from connector.wire.bounded import DecodeFailed
from connector.wire.handshake import encode_error, encode_refusal, encode_reply, parse_request

REQUEST_FRAMES_MAX = 2
REQUEST_FRAME_BYTES_MAX = 1024
LOOK_AGAIN_SECONDS = 2.0

ASKED_BY_A_TOOL = "nixl-actor drain"
"""Why an engine drains that was asked to on its side channel."""

REQUEST_UNITS = 8
"""What a request costs who sends it, beside the length of the answer; see `Listener.charge`."""


class HandshakeListener:
    """Serves `payloads` (by pipeline and tensor parallel rank) at a bound socket.

    Args:
        perf_counter: seconds, for the replies; see `encode_reply`.
        log_bad_frame: told why a request was refused.
        log_cut_off: told of each connection that was ended: its address, and why.
        log_crash: writes a line with a traceback: which task, what it raised.
        look_again: called every LOOK_AGAIN_SECONDS, in a thread that may wait; None: there is nothing to look at.
        draining: begins when a tool asks for it. None: this engine cannot be asked to.
    """

    def __init__(
        self,
        *,
        side_channel: SideChannel,
        host: str,
        port: int,
        payloads: Mapping[tuple[int, int], bytes],
        perf_counter: Callable[[], float],
        log_bad_frame: Callable[[str], None],
        log_cut_off: Callable[[str, str], None],
        log_crash: Callable[[str, BaseException], None],
        look_again: Callable[[], None] | None = None,
        draining: EngineDraining | None = None,
    ) -> None:
        self._look_again = look_again
        self._side_channel = side_channel
        self._listener: Listener = side_channel.listen(
            host,
            port,
            frames_max=REQUEST_FRAMES_MAX,
            frame_bytes_max=REQUEST_FRAME_BYTES_MAX,
            on_cut_off=log_cut_off,
        )
        self._payloads = dict(payloads)
        # Why the engine has stopped serving; None: it has not.
        self._refusal: str | None = None
        self._perf_counter = perf_counter
        self._log_bad_frame = log_bad_frame
        self._log_crash = log_crash
        self._draining = draining
        self._stop_requested = trio.Event()

    @property
    def port(self) -> int:
        return self._listener.port

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until `stop`."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(keep_running, "handshake listener", self._serve, self._log_crash)
                if self._look_again is not None:
                    look = partial(self._look_at_files, self._look_again)
                    nursery.start_soon(keep_running, "look at files of keys", look, self._log_crash)
                if self._draining is not None:
                    nursery.start_soon(keep_running, "draining", self._draining.run, self._log_crash)
                task_status.started()
                await self._stop_requested.wait()
                nursery.cancel_scope.cancel()
        finally:
            if self._draining is not None:
                self._draining.close()
            self._side_channel.close()

    def stop(self) -> None:
        self._stop_requested.set()

    def stop_serving(self, reason: str) -> None:
        """From now on answer every request with an error that says why."""
        self._refusal = reason
        self.answer_with(self._payloads)

    def answer_with(self, payloads: Mapping[tuple[int, int], bytes]) -> None:
        """From now on say this of the ranks, and no more than where they are if the engine has stopped serving."""
        refusal = self._refusal
        self._payloads = {
            rank: payload if refusal is None else encode_refusal(payload, refusal) for rank, payload in payloads.items()
        }

    def tell_workers(self, workers: Sequence[OwnWorker]) -> None:
        """From now on these are told that the engine is to end."""
        if self._draining is not None:
            self._draining.workers = workers

    def deliver(self, command: Callable[[HandshakeListener], None]) -> None:
        """What the scheduler's thread wants done."""
        command(self)

    def drain(self, cause: str, grace_ns: int) -> None:
        """Begin to drain, unless that has begun."""
        assert self._draining is not None
        self._draining.ask(cause, grace_ns)

    async def _look_at_files(self, look_again: Callable[[], None]) -> None:
        log_problems = ProblemLog()
        while True:
            await trio.sleep(LOOK_AGAIN_SECONDS)
            try:
                await call_in_thread(look_again)
                log_problems({})
            except NoThreadLeft as error:
                problem = f"the files of keys of the scheduler process cannot be looked at: {error}"
                log_problems({"thread": problem}, "the keys of before stay in use")

    async def _serve(self) -> None:
        while True:
            asked = await self._listener.receive()
            error, payload = self._answer(asked.frames_untrusted)
            units = REQUEST_UNITS + (units_to_send([payload]) if error is None else 0)
            self._listener.charge(asked.reply_address, units, understood=error is None)
            if error is not None:
                self._log_bad_frame(error)
            self._listener.reply(asked.reply_address, encode_reply(payload, self._perf_counter()))

    def _answer(self, frames_untrusted: tuple[bytes, ...]) -> tuple[str | None, bytes]:
        """What is wrong with a request, if anything is, and the payload of the reply."""
        refusal = self._refusal
        if self._draining is not None and is_drain(frames_untrusted):
            self._draining.ask(ASKED_BY_A_TOOL)
            return None, encode_report(self._draining.report()) if refusal is None else encode_error(refusal)
        try:
            wanted = parse_request(frames_untrusted)
        except DecodeFailed as error:
            return error.detail, encode_error(refusal or error.detail)
        payload = self._payloads.get((wanted.pp_rank, wanted.tp_rank))
        if payload is None:
            detail = f"there is no rank (pp {wanted.pp_rank}, tp {wanted.tp_rank}) here"
            return detail, encode_error(refusal or detail)
        return None, payload
