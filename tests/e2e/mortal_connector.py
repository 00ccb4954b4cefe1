"""The connector with actors that a test can kill: `kv_connector_module_path` of engines in `test_actor_death`.

A file appears, and the thread of the worker's actors dies as it would of a bug in trio's own loop. Whether the engine
is idle meanwhile does not matter: another thread looks for the file.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import torch

from connector.nixl_connector import NixlActorConnector

DEADLY_FILE_VARIABLE = "TEST_DEADLY_FILE"
LOOK_SECONDS = 0.05


class NixlConnector(NixlActorConnector):
    """See the module's docstring."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        threading.Thread(target=self._die_when_told, daemon=True).start()

    def _die_when_told(self) -> None:
        deadly = Path(os.environ[DEADLY_FILE_VARIABLE])
        while not deadly.exists():
            time.sleep(LOOK_SECONDS)
        thread = self._worker_side._thread
        assert thread is not None
        assert thread._token is not None
        thread._token.run_sync_soon(_die)


def _die() -> None:
    raise RuntimeError("killed by a test")
