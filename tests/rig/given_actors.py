"""Stands for what runs beside the engine thread (`WorkerActors`) where a test has a thread of its own for that."""

from __future__ import annotations

from typing import Any

from connector.worker.actors import STOP_TIMEOUT_SECONDS
from connector.worker.connector_worker import ConnectorWorker


class GivenActors:
    """Has no NIXL agent."""

    def __init__(self, thread: Any) -> None:
        self.thread = thread
        self.nixl_lag_seconds = 0.0

    def stop(self) -> bool:
        stopped: bool = self.thread.stop(STOP_TIMEOUT_SECONDS)
        return stopped


def give_actors(worker: ConnectorWorker, thread: Any) -> None:
    """As if the worker had started them."""
    worker._actors = GivenActors(thread)  # type: ignore[assignment]
    worker._thread = thread
