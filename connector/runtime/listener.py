"""The listener: answers handshakes in the scheduler process of a prefill engine.

One task, one socket. A request is decoded by `wire.handshake` within bounds; one that is malformed, or names a rank
that does not exist, costs its sender an error reply and nothing else. The reply carries this process's monotonic clock,
read as late as possible: it is the clock that stamps lease deadlines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import trio

from connector.ports.side_channel import Listener, SideChannel
from connector.runtime.clock import NS_PER_SECOND, Clock
from connector.wire.handshake import BadFrame, encode_error, encode_reply, parse_request

REQUEST_FRAMES_MAX = 2
REQUEST_FRAME_BYTES_MAX = 1024


class HandshakeListener:
    """Serves `payloads` (by pipeline and tensor parallel rank) at a bound socket."""

    def __init__(
        self,
        *,
        side_channel: SideChannel,
        host: str,
        port: int,
        payloads: Mapping[tuple[int, int], bytes],
        clock: Clock,
        log_bad_frame: Callable[[str], None],
    ) -> None:
        self._side_channel = side_channel
        self._listener: Listener = side_channel.listen(
            host, port, frames_max=REQUEST_FRAMES_MAX, frame_bytes_max=REQUEST_FRAME_BYTES_MAX
        )
        self._payloads = dict(payloads)
        self._clock = clock
        self._log_bad_frame = log_bad_frame
        self._stop_requested = trio.Event()

    @property
    def port(self) -> int:
        return self._listener.port

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until `stop`."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._serve)
                task_status.started()
                await self._stop_requested.wait()
                nursery.cancel_scope.cancel()
        finally:
            self._side_channel.close()

    def stop(self) -> None:
        self._stop_requested.set()

    def deliver(self, command: None) -> None:
        """The listener takes no commands."""

    async def _serve(self) -> None:
        while True:
            asked = await self._listener.receive()
            payload = self._answer(asked.frames_untrusted)
            seconds = self._clock.now_ns() / NS_PER_SECOND
            self._listener.reply(asked.reply_address, encode_reply(payload, seconds))

    def _answer(self, frames_untrusted: tuple[bytes, ...]) -> bytes:
        try:
            wanted = parse_request(frames_untrusted)
        except BadFrame as error:
            self._log_bad_frame(error.detail)
            return encode_error(error.detail)
        payload = self._payloads.get((wanted.pp_rank, wanted.tp_rank))
        if payload is None:
            detail = f"there is no rank (pp {wanted.pp_rank}, tp {wanted.tp_rank}) here"
            self._log_bad_frame(detail)
            return encode_error(detail)
        return payload
