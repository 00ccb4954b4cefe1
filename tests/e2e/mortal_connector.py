"""The connector with actors that a test can kill: `kv_connector_module_path` of engines in `test_actor_death`.

A file appears, and the thread of the worker's actors dies as it would of a bug in trio's own loop; or the listener's
thread in the engine core, if that is what the file says. Whether the engine is idle meanwhile does not matter: another
thread looks for the file.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

from connector.nixl_connector import NixlActorConnector
from connector.runtime.thread import ActorThread

DEADLY_FILE_VARIABLE = "TEST_DEADLY_FILE"
LOOK_SECONDS = 0.05
WORKER, LISTENER = "worker", "listener"
"""What the file says: who is to die."""


class NixlConnector(NixlActorConnector):
    """See the module's docstring."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        _is_mortal(WORKER, lambda: self._worker_side._thread)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        super().set_xfer_handshake_metadata_pp_aware(metadata)
        listener = self._scheduler_side._listener
        assert listener is not None
        _is_mortal(LISTENER, lambda: listener._thread)


def _is_mortal(who: str, thread: Callable[[], ActorThread[Any] | None]) -> None:
    threading.Thread(target=_die_when_told, args=(who, thread), daemon=True).start()


def _die_when_told(who: str, find: Callable[[], ActorThread[Any] | None]) -> None:
    deadly = Path(os.environ[DEADLY_FILE_VARIABLE])
    while not deadly.exists() or deadly.read_text() != who:
        time.sleep(LOOK_SECONDS)
    thread = find()
    assert thread is not None
    assert thread._token is not None
    thread._token.run_sync_soon(_die)


def _die() -> None:
    raise RuntimeError("killed by a test")
