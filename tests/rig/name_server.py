"""A name server that hangs or is slow: `socket.getaddrinfo` as the resolver's threads see it."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock


class NameServer:
    """Names that begin with "hang" wait until it lets go, "found" ones are 127.0.0.1, "several" ones are 127.0.0.1 and
    127.0.0.2, "unknown" ones do not exist. "slow" ones are found after `slow_seconds`. Of "late" ones the first
    question waits until it lets go, and finds; those after it are lost. Of "lost" ones the first is lost, and those
    after it say at once that the name does not exist.

    Attributes:
        asked: how often each name was.
    """

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.slow_seconds = 0.0
        self._may_answer = threading.Event()
        self._is_over = threading.Event()
        self._resolve = socket.getaddrinfo

    def let_go(self) -> None:
        self._may_answer.set()

    def end(self) -> None:
        self._may_answer.set()
        self._is_over.set()

    def getaddrinfo(self, host: Any, port: Any, *args: Any, **settings: Any) -> Any:
        name = str(host)
        self.asked[name] += 1
        is_first = self.asked[name] == 1
        if name.startswith("hang") or (name.startswith("late") and is_first):
            self._may_answer.wait(60)
        elif (name.startswith("lost") and is_first) or name.startswith("late"):
            self._is_over.wait(60)
        elif name.startswith("slow"):
            time.sleep(self.slow_seconds)
        if name.startswith(("hang", "unknown", "lost")):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        if name.startswith("several"):
            addresses = ("127.0.0.1", "127.0.0.2")
            return [entry for each in addresses for entry in self._resolve(each, port, *args, **settings)]
        return self._resolve(
            "127.0.0.1" if name.startswith(("found", "slow", "late")) else host, port, *args, **settings
        )


@contextlib.contextmanager
def name_server() -> Iterator[NameServer]:
    """In place of the system's; whatever hangs ends with it."""
    server = NameServer()
    with mock.patch.object(socket, "getaddrinfo", server.getaddrinfo):
        try:
            yield server
        finally:
            server.end()
