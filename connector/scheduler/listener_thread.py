"""The listener's thread in the scheduler process: started when there is something to serve, joined at shutdown."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from connector.observe.log import get_logger, root_cause
from connector.observe.log import log_crash as log_actor_crash
from connector.ports.zmq_bridge import ZmqSideChannel
from connector.runtime.listener import HandshakeListener
from connector.runtime.thread import ActorThread
from connector.step_metadata import HandshakeMetadata
from connector.wire.handshake import encode_payload

STOP_TIMEOUT_SECONDS = 5.0

_log = get_logger()


class ListenerThread:
    """Serves the handshake payloads of all ranks of this engine at (host, port).

    Args:
        on_death: called in its thread, with the reason, when that ends without being asked to.
    """

    def __init__(
        self,
        host: str,
        port: int,
        ranks: Mapping[tuple[int, int], HandshakeMetadata],
        life: str,
        on_death: Callable[[str], None],
    ) -> None:
        self._on_death = on_death
        self._host = host
        self._port = port
        self._payloads = {
            rank: encode_payload(metadata.compatibility_hash, metadata.agent_metadata, metadata.extension(life))
            for rank, metadata in ranks.items()
        }
        self._bad_frames = 0
        self._cut_off = 0
        self._thread: ActorThread[str] = ActorThread("kv-handshake-listener", self._make, self._log_error)

    def start(self) -> None:
        """Bind and serve. Raises ThreadStartError when the address cannot be used."""
        self._thread.start()

    def stop_serving(self, reason: str) -> None:
        """From now on every handshake is refused, with this reason."""
        self._thread.post(reason)
        self._thread.flush()

    def stop(self) -> None:
        if not self._thread.stop(STOP_TIMEOUT_SECONDS):
            _log.error("the handshake listener did not stop within %g s", STOP_TIMEOUT_SECONDS)

    async def _make(self) -> HandshakeListener:
        return HandshakeListener(
            side_channel=ZmqSideChannel(),
            host=self._host,
            port=self._port,
            payloads=self._payloads,
            perf_counter=time.perf_counter,
            log_bad_frame=self._log_bad_frame,
            log_cut_off=self._log_cut_off,
            log_crash=log_actor_crash,
        )

    def _log_bad_frame(self, detail: str) -> None:
        """Powers of two only: a port scanner must not fill the log."""
        self._bad_frames += 1
        if self._bad_frames & (self._bad_frames - 1) == 0:
            _log.warning("side channel: refused a bad request (number %d): %s", self._bad_frames, detail)

    def _log_cut_off(self, address: str, why: str) -> None:
        """Powers of two only, for the same reason."""
        self._cut_off += 1
        if self._cut_off & (self._cut_off - 1) == 0:
            _log.warning("side channel: ended a connection from %s (number %d): %s", address, self._cut_off, why)

    def _log_error(self, error: BaseException) -> None:
        log_actor_crash("handshake listener's thread", error)
        self._on_death(f"the handshake listener died: {root_cause(error)!r}")
