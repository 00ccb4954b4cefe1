"""What the rig reads out of our connector's private parts, all in one place; nothing here is for product code.

A leak is counted, not guessed: the NIXL port says what it holds, and each dictionary that has an entry per request is
measured. The built-in connector keeps other books, so for it there is nothing to say (None).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.rig.messages import Holdings

if TYPE_CHECKING:
    from connector.nixl_connector import NixlActorConnector
    from connector.ports.nixl import NixlPort


@dataclass(frozen=True)
class Inside:
    """Both roles of our connector in one engine process."""

    worker: NixlActorConnector
    scheduler: NixlActorConnector

    @classmethod
    def of(cls, worker: Any, scheduler: Any) -> Inside | None:
        """None for another connector."""
        return cls(worker, scheduler) if type(worker).__module__.startswith("connector.") else None

    @property
    def _supervisor(self) -> Any:
        side = self.worker._worker
        assert side is not None
        return None if side._thread is None else side._thread._main

    @property
    def nixl_port(self) -> NixlPort:
        """Keep it to ask what it holds after a shutdown."""
        port: NixlPort = self._supervisor._context.nixl_port
        return port

    def holdings(self) -> Holdings:
        """What the connector holds now. The numbers are read while the actors run: wait until nothing changes."""
        supervisor, lender, worker = self._supervisor, self.scheduler._scheduler, self.worker._worker
        assert lender is not None
        assert worker is not None
        counts = self.nixl_port.counts()
        actors = list(supervisor._peers.values())
        cores = [actor.core.view() for actor in actors]
        return Holdings(
            remote_agents=counts.remote_agents,
            descriptor_lists=counts.descriptor_lists,
            reads=counts.reads,
            peer_actors=len(actors),
            pulls=len(lender._loads._loads),
            prefills=len(lender._lends.computing),
            receives=len(worker.ledger._open_receives),
            sends=len(worker.ledger._open_sends),
            requests_of_actors=len(supervisor._roster._of_request)
            + sum(len(actor._pulls) for actor in actors)
            + sum(core.requests + core.quarantined for core in cores),
            leases=len(supervisor._lease_keeper._core._leases) + sum(core.claims for core in cores),
        )

    def crash_actors(self) -> None:
        """Make the nursery that all actors live in fail, as a bug in the supervisor would."""
        side = self.worker._worker
        assert side is not None
        assert side._thread is not None
        token, supervisor = side._thread._token, self._supervisor
        assert token is not None
        token.run_sync_soon(supervisor._nursery.start_soon, _fail)


async def _fail() -> None:
    raise RuntimeError("injected by the test")
