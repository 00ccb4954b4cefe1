"""The engines of a run of chaos: two prefill engines, each behind a proxy of its side channel, and two decode engines.

Each is on a machine of its own, between which the network loses what it is told to lose (`tests.rig.lan`); the clients
and the proxies are on another one. Where no networks can be made, all are on this machine's loopback.

The decode engine `fail` copies over shared memory, `recompute` reads over TCP: a READ then needs the help of the engine
that lends, and hangs while that one is stopped.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

from connector.tools.asking import Address
from connector.tools.live import EngineReport, Question, survey
from connector.wire.inspection import EngineRow
from tests.chaos.plan import DECODE, LEASE_SECONDS, PREFILL, Kind
from tests.chaos.proxy import Proxy, ProxyThread
from tests.e2e.cluster import BUILTIN_CONFIG, CHUNK_TOKENS, small_options
from tests.e2e.engines import LOOPBACK, OVER_TCP, Engine, EngineSet
from tests.e2e.serve import start_parent
from tests.rig.lan import Lan, NoNetworks, Way

ConnectorName = Literal["ours", "builtin"]
T = TypeVar("T")

CLIENTS = "clients"
"""Their machine."""
PREFILL_BLOCKS = 400
DECODE_BLOCKS = 160
"""Of 32 tokens: the load of one engine has its place, and freed blocks are soon used again."""
REQUEST_TIMEOUT_SECONDS = 12.0
HANDSHAKE_TIMEOUT_SECONDS = 4.0
"""Less than a lease, and more than a busy machine stands still for."""
QUIESCE_TIMEOUT_SECONDS = 5.0
BACKOFF_SECONDS_MAX = 2.0
ENGINE_TTL_SECONDS = 5.0
"""Engines that are gone are forgotten within twice that."""
LEASE_LIMIT_SECONDS = 30.0
SOCKETS_OF_A_RECONNECTION = {"fail": 1, "recompute": 2}
"""That NIXL keeps of each, by decode engine: over shared memory, and over TCP (docs/nixl.md fact 11)."""
SURVEY_SECONDS = 5.0
DRAIN_GRACE_SECONDS = 10.0
SHUTDOWN_SECONDS = 20
"""vLLM's `--shutdown-timeout` of prefill engines: SIGTERM drains them. It is time for a whole grace period, and for the
end of the processes, which takes seconds on a busy machine."""

COMMON = {"kv_lease_duration": LEASE_SECONDS}
OURS_ONLY = {
    "lease_limit_seconds": LEASE_LIMIT_SECONDS,
    "request_timeout_seconds": REQUEST_TIMEOUT_SECONDS,
    "handshake_timeout_seconds": HANDSHAKE_TIMEOUT_SECONDS,
    "quiesce_timeout_seconds": QUIESCE_TIMEOUT_SECONDS,
    "backoff_max_seconds": BACKOFF_SECONDS_MAX,
    "engine_ttl": ENGINE_TTL_SECONDS,
    "drain_grace_seconds": DRAIN_GRACE_SECONDS,
}
BUILTIN_ONLY = BUILTIN_CONFIG | {"kv_lease_duration": int(LEASE_SECONDS), "engine_ttl": ENGINE_TTL_SECONDS}


@dataclass
class Prefill:
    """A prefill engine, the proxy before its side channel, and its lives."""

    engine: Engine
    proxy: Proxy
    network: threading.Lock = field(default_factory=threading.Lock)
    """Of who has the network lose something."""
    lives: int = 1
    since_wall: float = 0.0
    """Unix time at which the processes of this life were started, at the latest."""
    _is_alive: bool = True
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def end_life(self, end: Callable[[], T]) -> T:
        """`end` ends the processes: from then on its addresses refuse, as they would without proxies. Returns what that
        returns."""
        ended = end()
        with self._lock:
            self._is_alive = False
            self.proxy.refuse()
            self.proxy.forget_control()
        return ended

    def begin_life(self, *, new_id: bool) -> None:
        """Start again and wait until it serves."""
        self.lives += 1
        self.since_wall = time.time()
        changes = {"engine_id": f"{self.engine.name}-{self.lives}"} if new_id else {}
        self.engine.restart(**changes).wait_healthy()
        with self._lock:
            self._is_alive = True
            self.proxy.listen()

    def end_refusal(self, proxy: Proxy) -> None:
        """Have one of its proxies listen again, unless what is behind it has ended meanwhile."""
        with self._lock:
            if self._is_alive and proxy in (self.proxy, self.proxy.control):
                proxy.listen()


class ChaosCluster:
    """Starts everything, and ends it with the `with` block."""

    def __init__(self, connector: ConnectorName, directory: Path) -> None:
        self.connector: ConnectorName = connector
        self.directory = directory
        self.no_networks = ""
        """Why all engines are on one machine; empty: they are not."""
        self._lan: Lan | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> ChaosCluster:
        with contextlib.ExitStack() as stack:
            try:
                self._lan = stack.enter_context(Lan(*PREFILL, *DECODE, CLIENTS))
            except NoNetworks as reason:
                self.no_networks = str(reason)
            else:
                start_parent()
                stack.enter_context(self._lan.inside(CLIENTS))
            proxies = stack.enter_context(ProxyThread(self.host))
            engines = stack.enter_context(EngineSet())
            started = engines.start(
                *(self._options(name, core, engine_id=f"{name}-1") for core, name in enumerate(PREFILL)),
                *(
                    self._options(name, core, engine_id=name, kv_load_failure_policy=name)
                    for core, name in enumerate(DECODE)
                ),
            )
            self.prefill = {
                engine.name: Prefill(engine, proxies.proxy(engine.options.side_channel, names_control=True))
                for engine in started[: len(PREFILL)]
            }
            self.decode = {engine.name: engine for engine in started[len(PREFILL) :]}
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def host(self) -> str:
        """The address of clients and proxies."""
        return self._lan.machines[CLIENTS].address if self._lan is not None else LOOPBACK

    @property
    def engines(self) -> dict[str, Engine]:
        return {name: each.engine for name, each in self.prefill.items()} | self.decode

    def lose(self, kind: Kind, name: str, seconds: float) -> bool:
        """Have the network lose what this prefill engine sends or gets, for so long, one after another. What clients
        and it say to each other gets through: a router would notice. Returns whether there is such a network."""
        if self._lan is None:
            return False
        prefill = self.prefill[name]
        with prefill.network:
            way: Way = "there" if kind is Kind.LOSE_SENT else "both ways"
            for decode in DECODE:
                self._lan.cut(name, decode, way)
            if kind is not Kind.LOSE_READS:  # all others are said through proxies
                self._lan.cut(name, CLIENTS, way, but_ports=[prefill.engine.options.http_port])
            try:
                time.sleep(seconds)
            finally:
                for other in (*DECODE, CLIENTS):
                    self._lan.mend(name, other)
        return True

    def control(self, name: str) -> tuple[str, int] | None:
        """Where the engine's worker listens; None for a built-in engine, and for one that does not answer."""
        row = self.ask(name, "engine").of(EngineRow)
        if not row:
            return None
        host, _, port = row[0].facts.control.rpartition(":")
        return host, int(port)

    def ask(self, name: str, *whats: Any) -> EngineReport:
        """What the engine says of itself, asked directly."""
        address = Address(*self.engines[name].options.side_channel)
        questions = [Question(what=what) for what in whats]
        return survey([address], questions, follow=False, seconds=SURVEY_SECONDS).engines[0]

    def _options(self, name: str, core: int, **others: Any) -> Any:
        is_ours, is_prefill = self.connector == "ours", name in PREFILL
        blocks = PREFILL_BLOCKS if is_prefill else DECODE_BLOCKS
        machine = self._lan.machines[name] if self._lan is not None else None
        return small_options(
            self.directory,
            name,
            core,
            connector="actor" if is_ours else "builtin",
            calm_polling=not is_ours,
            kv_role="kv_producer" if is_prefill else "kv_consumer",
            extra_config=COMMON | OURS_ONLY if is_ours else COMMON | BUILTIN_ONLY,
            max_num_batched_tokens=CHUNK_TOKENS,
            trace_directory=self.directory / "traces" if is_ours else None,
            host=machine.address if machine is not None else LOOPBACK,
            machine=machine.process if machine is not None else None,
            environment={"UCX_TLS": OVER_TCP} if name == "recompute" else {},
            arguments=(
                *("--num-gpu-blocks-override", str(blocks)),
                *(("--shutdown-timeout", str(SHUTDOWN_SECONDS)) if is_prefill else ()),
            ),
            **others,
        )
