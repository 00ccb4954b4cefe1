"""A file whose file system hangs: a pipe that is full takes its place, under the same descriptor."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

FILLER = b"\n"


class StalledFile:
    """Until `go_on`, a write to it does not return."""

    def __init__(self) -> None:
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        self._filled_bytes = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                self._filled_bytes += os.write(self._write_end, FILLER * 4096)
        os.set_blocking(self._write_end, True)
        self._taken: list[bytes] = []
        self._reader: threading.Thread | None = None

    def take_the_place_of(self, path: Path) -> None:
        """Of a file that this process has open."""
        os.dup2(self._write_end, _descriptor_of(path))
        os.close(self._write_end)

    def go_on(self) -> Callable[[], list[bytes]]:
        """What is written is taken from here on. The function returned gives it, when the file has been closed."""
        if self._reader is None:
            self._reader = threading.Thread(target=self._read, daemon=True)
            self._reader.start()
        reader = self._reader

        def taken() -> list[bytes]:
            reader.join(10)
            return [b"".join(self._taken)[self._filled_bytes :]]

        return taken

    def _read(self) -> None:
        while data := os.read(self._read_end, 1 << 16):
            self._taken.append(data)
        os.close(self._read_end)


def _descriptor_of(path: Path) -> int:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") == str(path):
                return int(name)
    raise FileNotFoundError(path)
