"""The listener's thread in the scheduler process: started when there is something to serve, joined at shutdown.

What the engine's workers are told when it is to end goes out from here too (`connector/runtime/draining.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing

import msgspec

from connector.clock import Clock
from connector.descriptor_limit import raise_descriptor_limit
from connector.observe import catalogue
from connector.observe.log import StrangerLog, get_logger, root_cause
from connector.observe.log import log_crash as log_actor_crash
from connector.ports.gate import ANYBODY, Access
from connector.ports.side_channel import DescriptorsExhausted, PortUnavailable, SideChannel, SideChannelError
from connector.ports.zmq_bridge import ZmqSideChannel
from connector.runtime.draining import EngineDraining, OwnWorker
from connector.runtime.listener import HandshakeListener
from connector.runtime.thread import ActorThread
from connector.step_metadata import HandshakeMetadata
from connector.wire.handshake import encode_payload
from statemachine.draining import Draining, State
from statemachine.granting import LentCounts

STOP_TIMEOUT_SECONDS = 5.0

_log = get_logger()


class ListenerThread:
    """Serves the handshake payloads of all ranks of this engine at (host, port).

    Args:
        on_death: called in its thread, with the reason, when that ends without being asked to.
        grace_ns, lease_ns: of the grace period when the engine is to end, and of a lease.
        count: what the engine lends now. Called in its thread.
        look_again: see `HandshakeListener`.
        access: who is let in.
        workers_access: what the engine's own workers let in.
    """

    def __init__(
        self,
        host: str,
        port: int,
        ranks: Mapping[tuple[int, int], HandshakeMetadata],
        life: str,
        on_death: Callable[[str], None],
        *,
        clock: Clock,
        grace_ns: int,
        lease_ns: int,
        count: Callable[[], LentCounts],
        look_again: Callable[[], None] | None = None,
        access: Access = ANYBODY,
        workers_access: Access = ANYBODY,
    ) -> None:
        self._access = access
        self._workers_access = workers_access
        self._on_death = on_death
        self._look_again = look_again
        self._host = host
        self._port = port
        self._ranks = dict(ranks)
        self._life = life
        self._clock = clock
        self._grace_ns = grace_ns
        self._count = count
        self._log_stranger = StrangerLog("side channel")
        self.draining = Draining(lease_ns=lease_ns)
        """Whether the engine is to end, and how far it has come. Replaced in the listener's thread."""
        self.totals: Mapping[str, int] = {}
        """What was counted here since the start, by the key of the series. Replaced in the listener's thread."""
        self._listener: HandshakeListener | None = None
        self._thread: ActorThread[Callable[[HandshakeListener], None]] = ActorThread(
            "kv-handshake-listener", self._make, self._log_error
        )

    def start(self) -> None:
        """Bind and serve. Raises ThreadStartError when the address cannot be used."""
        raise_descriptor_limit()  # by which connections are counted
        self._thread.start()

    def serve(self, ranks: Mapping[tuple[int, int], HandshakeMetadata], life: str) -> None:
        """From now on these, which are as many. For peers the engine has been started again."""
        self._thread.post(lambda listener: self._replace(listener, ranks, life))
        self._thread.flush()

    def stop_serving(self, reason: str) -> None:
        """From now on every handshake is refused, with this reason."""
        self._thread.post(lambda listener: listener.stop_serving(reason))
        self._thread.flush()

    def drain(self, cause: str, grace_ns: int) -> None:
        """Begin to drain, unless that has begun. May be called in a signal handler."""
        self._thread.post(lambda listener: listener.drain(cause, grace_ns))
        self._thread.flush()

    @property
    def is_dead(self) -> bool:
        return self._thread.is_dead

    def stop(self) -> None:
        if not self._thread.stop(STOP_TIMEOUT_SECONDS):
            _log.error("the handshake listener did not stop within %g s", STOP_TIMEOUT_SECONDS)

    async def _make(self) -> HandshakeListener:
        try:
            return self._made()
        except DescriptorsExhausted:
            raise  # it says what to do, and the address has nothing to do with it
        except SideChannelError as error:
            raise type(error)(error.host, error.port, f"{error.error}; {_what_to_do(error)}") from error

    def _made(self) -> HandshakeListener:
        """Whatever raises, no socket is left open: its context would be waited for without end when it is collected."""
        with ExitStack() as opened:
            side_channel = opened.enter_context(closing(ZmqSideChannel(self._access, self._refuse, self._say_no_room)))
            to_workers = opened.enter_context(closing(ZmqSideChannel(self._workers_access)))
            listener = self._listener = self._listen(side_channel, to_workers)
            opened.pop_all()  # the listener closes them from here on
        return listener

    def _listen(self, side_channel: SideChannel, to_workers: SideChannel) -> HandshakeListener:
        return HandshakeListener(
            side_channel=side_channel,
            host=self._host,
            port=self._port,
            payloads=self._payloads(),
            perf_counter=time.perf_counter,
            log_bad_frame=self._log_bad_frame,
            log_cut_off=self._log_cut_off,
            log_crash=self._note_crash,
            look_again=self._look_again,
            draining=EngineDraining(
                side_channel=to_workers,
                workers=self._workers(),
                clock=self._clock,
                grace_ns=self._grace_ns,
                lease_ns=self.draining.lease_ns,
                count=self._count,
                on_change=self._show_draining,
                say=lambda line: _log.warning("%s", line),
                log_crash=self._note_crash,
            ),
        )

    def _workers(self) -> list[OwnWorker]:
        return [
            OwnWorker(said.control_host, said.control_port, said.control_key, each.leave_secret)
            for each in self._ranks.values()
            for said in (each.extension,)
        ]

    def _replace(
        self, listener: HandshakeListener, ranks: Mapping[tuple[int, int], HandshakeMetadata], life: str
    ) -> None:
        self._ranks, self._life = dict(ranks), life
        listener.answer_with(self._payloads())
        listener.tell_workers(self._workers())

    def _show_draining(self, draining: Draining) -> None:
        self.draining = draining
        if self._listener is not None:
            self._listener.answer_with(self._payloads())

    def _payloads(self) -> dict[tuple[int, int], bytes]:
        state = "" if self.draining.state is State.SERVING else self.draining.state.value
        return {
            rank: encode_payload(
                metadata.compatibility_hash,
                metadata.agent_metadata,
                msgspec.structs.replace(metadata.extension, life=self._life, draining=state),
            )
            for rank, metadata in self._ranks.items()
        }

    def _refuse(self, address: str, sentence: str) -> None:
        self._log_stranger(address, sentence)
        self._count_turned_away(catalogue.REFUSED)

    def _say_no_room(self, sentence: str) -> None:
        self._log_stranger("newcomers", sentence)
        self._count_turned_away(catalogue.NO_ROOM)

    def _log_bad_frame(self, detail: str) -> None:
        self._log_stranger("bad requests", f"refused a bad request: {detail}")
        self._count_turned_away(catalogue.MALFORMED)

    def _log_cut_off(self, address: str, why: str) -> None:
        self._log_stranger(address, f"ended a connection from {address}: {why}")
        self._count_turned_away(catalogue.CUT_OFF)

    def _count_turned_away(self, why: str) -> None:
        self._add_one(catalogue.TURNED_AWAY.key(catalogue.SIDE_CHANNEL, why))

    def _add_one(self, key: str) -> None:
        self.totals = {**self.totals, key: self.totals.get(key, 0) + 1}

    def _note_crash(self, task_name: str, error: BaseException) -> None:
        log_actor_crash(task_name, error)
        self._add_one(catalogue.CRASHES.key())

    def _log_error(self, error: BaseException) -> None:
        self._note_crash("handshake listener's thread", error)
        self._on_death(f"the handshake listener died: {root_cause(error)!r}")


def _what_to_do(error: SideChannelError) -> str:
    """For whoever starts an engine that cannot listen there."""
    if isinstance(error, PortUnavailable):
        return (
            "another engine or program listens there, or this process may not: give each engine on a host a "
            "VLLM_NIXL_SIDE_CHANNEL_PORT of its own (data-parallel engines take the port plus their index)"
        )
    return (
        "VLLM_NIXL_SIDE_CHANNEL_HOST has to be an address of this machine, and VLLM_NIXL_SIDE_CHANNEL_PORT, with the "
        "data-parallel index added, a port that there is"
    )
