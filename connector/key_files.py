"""The files of secrets that options name: read at start, and again when they have changed.

A file that cannot be read, or makes no sense, is an `OptionError` at start: an engine that ran without its keys would
either trust everybody or nobody. Later it is a line in the log, and the keys of before stay: somebody may be writing
the file just now.

Files are looked at from threads that may wait for them, never from the engine thread.
"""

from __future__ import annotations

import os

from connector.config import ConnectorOptions, OptionError
from connector.observe.log import get_logger
from connector.wire.signatures import KeysError, ParamsKeys, parse_keys

FILE_BYTES_MAX = 1 << 20

_log = get_logger()


class ParamsKeyFile:
    """The keys of the option `params_keys_file`. `keys` is replaced as a whole, so any thread may look.

    Raises OptionError.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            self._seen = _identity(path)
            self.keys: ParamsKeys = parse_keys(_text(path))
        except (OSError, ValueError) as error:
            raise OptionError("params_keys_file", f"params_keys_file {path} cannot be used: {error}") from None

    def look_again(self) -> None:
        """Take over what has changed. Waits for the file system."""
        try:
            now = _identity(self._path)
            if now == self._seen:
                return
            self._seen = now
            self.keys = parse_keys(_text(self._path))
        except (OSError, ValueError) as error:
            _log.error("params_keys_file %s: %s; the keys of before stay in use", self._path, error)
            return
        ids = ", ".join(key.key_id for key in self.keys.keys)
        _log.info("params_keys_file %s was read again: %s; the first one signs", self._path, ids)


def params_key_file(options: ConnectorOptions) -> ParamsKeyFile | None:
    """None: the option is not set. Raises OptionError."""
    return None if options.params_keys_file is None else ParamsKeyFile(options.params_keys_file)


def _identity(path: str) -> tuple[int, int, int]:
    """Differs when the file was written, or replaced, as Kubernetes does with the files of a secret."""
    found = os.stat(path)
    return found.st_ino, found.st_size, found.st_mtime_ns


def _text(path: str) -> str:
    with open(path, "rb") as file:
        content = file.read(FILE_BYTES_MAX + 1)
    if len(content) > FILE_BYTES_MAX:
        raise KeysError(f"it is larger than {FILE_BYTES_MAX} bytes")
    return content.decode("utf-8")
