"""The class that vLLM's factory loads: the production connector, with what a simulation must provide.

`NixlConnector` here is the production class; only its two sides are made anew. The scheduler side gets a clock and the
name of its life from the seed, and the listener of a simulated process. The worker side is the production
`ConnectorWorker` without `register_kv_caches`, which is where it would open real doors: its thread is a stand-in that
hands commands to the actors of a simulated process. When the engine falls asleep and wakes up, these are the ranks of
one life of the process and of the next.

vLLM makes connectors without arguments of ours, so what they need lies in a context variable while they are made. The
address comes from the environment, as in production.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from connector.clock import Clock
from connector.config import ConnectorOptions, parse_options
from connector.nixl_connector import NixlActorConnector as ProductionConnector
from connector.protocol import Command
from connector.scheduler.connector_scheduler import ConnectorScheduler
from connector.step_metadata import HandshakeMetadata
from connector.worker.cache_memory import CacheMemory
from connector.worker.connector_worker import ConnectorWorker
from connector.worker.finishing import Finishing, Run
from connector.worker.landing import BlockPermuter
from connector.worker.ledger import TransferLedger
from statemachine.draining import Draining
from tests.simulation.model import RankMemory

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


@dataclass(frozen=True, kw_only=True)
class Birth:
    """What the connectors of one life of an engine are made of; what is of a worker, of one rank of it."""

    host: str
    port: int
    life: str
    scheduler_clock: Clock
    worker_clock: Clock
    memory: RankMemory
    send: Callable[[list[Command]], None]
    """Hands the commands of a step to the actors."""
    make_actors: Callable[[], None]
    """In place of those that have ended."""
    actors_gave_memory_back: Callable[[], bool]
    """Whether the actors have ended, and nothing of theirs reads or writes in the KV cache."""
    serve_anew: Callable[[], None]
    """Has the listener tell of the actors that there are now."""
    run: Run
    """What a device does with its memory."""
    stop_serving: Callable[[str], None]
    """Has the listener refuse handshakes."""
    draining: Callable[[], Draining]
    """Whether it is to end, as the listener knows."""


_birth: contextvars.ContextVar[Birth] = contextvars.ContextVar("birth")


@contextlib.contextmanager
def being_born(birth: Birth) -> Iterator[None]:
    """Connectors made inside belong to this life."""
    environment = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": birth.host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(birth.port),
        "VLLM_SSM_CONV_STATE_LAYOUT": "DS",  # the only one of convolutions that the connector serves
    }
    before = {name: os.environ.get(name) for name in environment}
    token = _birth.set(birth)
    os.environ.update(environment)
    try:
        yield
    finally:
        _birth.reset(token)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class ActorsNextDoor:
    """In place of the thread of the actors: they run in this one, and get their commands when it comes to them."""

    def __init__(self, send: Callable[[list[Command]], None]) -> None:
        self._send = send
        self._posted: list[Command] = []
        self.death: BaseException | None = None
        self.is_called = False
        """It never waits for a thread to wake up."""

    @property
    def is_dead(self) -> bool:
        return self.death is not None

    def lateness(self) -> tuple[int, float]:
        return 0, 0.0

    def post(self, command: Command) -> None:
        self._posted.append(command)

    def flush(self) -> None:
        commands, self._posted = self._posted, []
        self._send(commands)


class SimulatedActors:
    """In place of the agent, the control socket and the thread of one life: a rank of the simulated process."""

    nixl_lag_seconds = 0.0

    def __init__(self, birth: Birth) -> None:
        self._birth = birth
        self.thread = ActorsNextDoor(birth.send)

    def start(self, *, is_warm: bool) -> None:
        self._birth.make_actors()

    def stop(self) -> bool:
        """The simulated process stops its actors itself."""
        return self._birth.actors_gave_memory_back()


class ListenerNextDoor:
    """In place of the thread of the listener, which runs in this one."""

    def __init__(self, birth: Birth) -> None:
        self.stop_serving = birth.stop_serving
        self._serve_anew = birth.serve_anew
        self._draining = birth.draining
        self.totals: dict[str, int] = {}
        self.is_dead = False

    @property
    def draining(self) -> Draining:
        return self._draining()

    def serve(self, ranks: Mapping[tuple[int, int], HandshakeMetadata], life: str) -> None:
        """The simulated process knows what to say, and under which name."""
        self._serve_anew()

    def stop(self) -> None:
        """The simulated process stops its listener itself."""


class SimulatedWorker(ConnectorWorker):
    """The production worker side in front of a simulated process."""

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, options: ConnectorOptions, birth: Birth
    ) -> None:
        super().__init__(vllm_config, kv_cache_config, options)
        self._clock = birth.worker_clock
        self.ledger = TransferLedger(birth.worker_clock, options.kv_lease_duration)
        make_actors: Any = functools.partial(SimulatedActors, birth)
        self._make_actors = make_actors
        self._actors = make_actors()
        self._thread = self._actors.thread
        self._follows_sleep = True
        cache_memory = CacheMemory([torch.from_numpy(birth.memory.flat.view(np.int64))])
        self._finishing = Finishing(birth.run, BlockPermuter({}), cache_memory)


class NixlConnector(ProductionConnector):
    """See the module's docstring."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        birth = _birth.get()
        options = parse_options(vllm_config.kv_transfer_config.kv_connector_extra_config)
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = ConnectorScheduler(
                vllm_config, kv_cache_config, options, clock=birth.scheduler_clock, life=birth.life
            )
            self._scheduler._listener = ListenerNextDoor(birth)  # type: ignore[assignment]
        else:
            self._worker = SimulatedWorker(vllm_config, kv_cache_config, options, birth)

    @property
    def scheduler_side(self) -> ConnectorScheduler:
        return self._scheduler_side

    @property
    def worker_side(self) -> ConnectorWorker:
        return self._worker_side
