"""Which weights the adapter of a request has (LoRA), as a text that two engines can compare.

A request names its adapter, and names are re-pointed: `/v1/load_lora_adapter` puts other weights under one, on one
engine earlier than on another. KV that one of them has computed before is then another adapter's for the other. vLLM
tells the two apart by their paths, in the prefix cache of one engine. Where an adapter lies may differ between engines,
so they compare what lies there (`connector.weights`).

Files are looked at when a request comes whose adapter was not looked at for ten seconds, and read where they have
changed. vLLM has read them a moment ago, to load them, and its engine thread waited for that. Here it waits for a
second at most, and then not again before the look has come back: of a file system that hangs nothing is known. Each
look that is late halves the time for which others are waited for, so many adapters of such a file system cost two
seconds and not as many as they are. What is not known on both sides is not compared.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from connector.clock import NS_PER_SECOND, Clock
from connector.observe.log import get_logger
from connector.thread_limit import NoThreadLeft, start_thread
from connector.weights import adapter_files, adapter_fingerprint

if TYPE_CHECKING:
    from vllm.v1.request import Request

LOOK_NS = 10 * NS_PER_SECOND
WAIT_SECONDS = 1.0
ADAPTERS_MAX = 1024
"""How many are remembered; the one that was asked for first goes first."""
LATE_MAX = 16
"""Looks, and threads, that may be late; no other begins then."""

_log = get_logger()


class AdapterWeights:
    """See the module's docstring. Lives on the scheduler's thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._known: dict[str, _Adapter] = {}
        # Whose last look did not come back in time, for as long as that is under way, and not due again.
        self._late: list[_Adapter] = []

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
        now_ns = self._clock.now_ns()
        if adapter.is_due(now_ns):
            self._look_at(adapter, now_ns)
        return adapter.found

    def _look_at(self, adapter: _Adapter, now_ns: int) -> None:
        self._late = [each for each in self._late if each.is_looked_at or not each.is_due(now_ns)]
        if len(self._late) >= LATE_MAX:
            adapter.forget()
        elif not adapter.look(now_ns, WAIT_SECONDS / 2 ** len(self._late)):
            self._late.append(adapter)


class _Adapter:
    """What lies at one path."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._found: str | None = None
        self._files: list[tuple[int, ...]] | None = None
        self._looked_ns: int | None = None
        self._has_looked = threading.Event()
        self._has_looked.set()

    @property
    def is_looked_at(self) -> bool:
        """In this moment."""
        return not self._has_looked.is_set()

    @property
    def found(self) -> str | None:
        """Its fingerprint; None: it is not known."""
        return None if self.is_looked_at else self._found

    def is_due(self, now_ns: int) -> bool:
        """Whether it was not looked at of late, and is not now."""
        return not self.is_looked_at and (self._looked_ns is None or now_ns >= self._looked_ns + LOOK_NS)

    def look(self, now_ns: int, wait_seconds: float) -> bool:
        """Whether the look has come back meanwhile."""
        self._looked_ns = now_ns
        self._has_looked.clear()
        try:
            start_thread(threading.Thread(target=self._look, name="adapter-files", daemon=True))
        except NoThreadLeft as error:
            self.forget()
            self._has_looked.set()
            _log.warning("the files of adapter %s cannot be read: %s", self._path, error)
        if self._has_looked.wait(wait_seconds):
            return True
        _log.warning(
            "the files of adapter %s were not read in %.3g s: does their file system hang?", self._path, wait_seconds
        )
        return False

    def forget(self) -> None:
        """Nothing is known of it, until it is looked at again."""
        self._found = self._files = None

    def _look(self) -> None:
        """In a thread of its own."""
        try:
            config, weights = adapter_files(self._path)
            files = [_described(config), _described(weights)]
            if files != self._files:
                self._found, self._files = adapter_fingerprint(config, weights), files
        except Exception as error:  # whatever a file of somebody else's may have in it
            self.forget()
            _log.debug("the weights of adapter %s are not known: %s", self._path, error)
        finally:
            self._has_looked.set()


def _described(file: Path) -> tuple[int, ...]:
    """Unlike for a file that was written or put in its place, whichever time it was given."""
    stat = file.stat()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
