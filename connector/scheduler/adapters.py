"""Which weights the adapter of a request has (LoRA), as a text that two engines can compare.

A request names its adapter, and names are re-pointed: `/v1/load_lora_adapter` puts other weights under one, on one
engine earlier than on another. KV that one of them has computed before is then another adapter's for the other. vLLM
tells the two apart by their paths, in the prefix cache of one engine. Where an adapter lies may differ between engines,
so they compare what lies there (`connector.weights`).

Files are looked at when a request comes whose adapter was not looked at for ten seconds, and read where they have
changed. vLLM has read them a moment ago, to load them, and its engine thread waited for that. Here it waits for a
second at most, and then not again before the look has come back: of a file system that hangs nothing is known. What is
not known on both sides is not compared.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from connector.clock import NS_PER_SECOND, Clock
from connector.observe.log import get_logger
from connector.weights import adapter_directory, adapter_fingerprint

if TYPE_CHECKING:
    from vllm.v1.request import Request

LOOK_NS = 10 * NS_PER_SECOND
WAIT_SECONDS = 1.0
ADAPTERS_MAX = 1024
"""How many are remembered; the one that was asked for first goes first."""

_log = get_logger()


class AdapterWeights:
    """See the module's docstring. Lives on the scheduler's thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._known: dict[str, _Adapter] = {}

    def of(self, request: Request) -> str | None:
        """Of the adapter of this request; None: it has none, or its weights are not known."""
        if request.lora_request is None:
            return None
        path: str = request.lora_request.lora_path
        adapter = self._known.get(path)
        if adapter is None:
            while len(self._known) >= ADAPTERS_MAX:
                del self._known[next(iter(self._known))]
            adapter = self._known[path] = _Adapter(path)
        return adapter.fingerprint(self._clock.now_ns())


class _Adapter:
    """What lies at one path."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._found: str | None = None
        self._files: list[tuple[str, int, int]] | None = None
        self._looked_ns: int | None = None
        self._has_looked = threading.Event()
        self._has_looked.set()

    def fingerprint(self, now_ns: int) -> str | None:
        is_due = self._looked_ns is None or now_ns >= self._looked_ns + LOOK_NS
        if is_due and self._has_looked.is_set():
            self._looked_ns = now_ns
            self._has_looked.clear()
            threading.Thread(target=self._look, name="adapter-files", daemon=True).start()
            if not self._has_looked.wait(WAIT_SECONDS):
                _log.warning("the files of adapter %s cannot be read: their file system hangs", self._path)
        return self._found if self._has_looked.is_set() else None

    def _look(self) -> None:
        """In a thread of its own."""
        try:
            directory = adapter_directory(self._path)
            files = _described(directory)
            if files != self._files:
                self._found, self._files = adapter_fingerprint(directory), files
        except Exception as error:  # whatever a file of somebody else's may have in it
            self._found = self._files = None
            _log.debug("the weights of adapter %s are not known: %s", self._path, error)
        finally:
            self._has_looked.set()


def _described(directory: Path) -> list[tuple[str, int, int]]:
    """Name, size and time of each file."""
    found = ((path.name, path.stat()) for path in directory.iterdir())
    return sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in found)
