"""The files of secrets that options name, and what the options of security mean for the sockets.

They are read at start, and again when they have changed.

A file that cannot be read, or makes no sense, is an `OptionError` at start: an engine that ran without its keys would
trust either every process or none. Later it is a line in the log, and the keys of before stay: somebody may be writing
the file just now.

Files are looked at from threads that may wait for them, never from the engine thread.
"""

from __future__ import annotations

import os

import msgspec

from connector.config import ConnectorOptions, OptionError
from connector.observe.log import ProblemLog, get_logger
from connector.ports.curve_keys import CurveKeys, KeyDirectoryError
from connector.ports.gate import Access, network_of
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
        self._log_problems = ProblemLog()

    def look_again(self) -> None:
        """Take over what has changed. Waits for the file system."""
        try:
            now = _identity(self._path)
            if now == self._seen:
                self._log_problems({})
                return
            text = _text(self._path)
            self._seen = now  # a file that could not be read is tried again: who may read it does not show
            self.keys = parse_keys(text)
        except (OSError, ValueError) as error:
            problem = f"params_keys_file {self._path}: {error}"
            self._log_problems({self._path: problem}, "the keys of before stay in use")
            return
        self._log_problems({})
        ids = ", ".join(key.key_id for key in self.keys.keys)
        _log.info("params_keys_file %s was read again: %s; the first one signs", self._path, ids)


def params_key_file(options: ConnectorOptions) -> ParamsKeyFile | None:
    """None: the option is not set. Raises OptionError."""
    return None if options.params_keys_file is None else ParamsKeyFile(options.params_keys_file)


def channel_access(options: ConnectorOptions) -> Access:
    """Who may connect to a worker's control socket, and where the worker connects to. Raises OptionError."""
    keys: CurveKeys | None = None
    if options.curve_directory is not None:
        try:
            keys = CurveKeys(options.curve_directory)
        except KeyDirectoryError as error:
            raise OptionError("curve_directory", f"curve_directory cannot be used: {error}") from None
    return Access(
        networks=tuple(network_of(each) for each in options.allowed_peers),
        keys=keys,
        allows_insecure=options.allow_insecure_peers,
    )


def listener_access(options: ConnectorOptions) -> Access:
    """Who may connect to the side channel: also engines without keys, if such are allowed. Raises OptionError.

    A ZMQ socket is either for those with keys or for those without, and a built-in engine knows one port only. So the
    side channel has no key then; the control sockets, which built-in engines do not know, have theirs all the same.
    """
    access = channel_access(options)
    return msgspec.structs.replace(access, keys=None) if options.allow_insecure_peers else access


def own_workers_access(options: ConnectorOptions) -> Access:
    """To the control sockets of an engine's own workers, wherever they are. Raises OptionError."""
    return msgspec.structs.replace(channel_access(options), networks=())


def check_key_files(options: ConnectorOptions) -> None:
    """Raises OptionError when an engine with these options could not start."""
    params_key_file(options)
    channel_access(options)


def warn_of_insecurity(options: ConnectorOptions, side_channel: str) -> None:
    """One line at start where an engine trusts others without asking."""
    keys = {"curve_directory": options.curve_directory, "params_keys_file": options.params_keys_file}
    missing = [name for name, value in keys.items() if value is None]
    if len(missing) == len(keys) and not options.allowed_peers:
        _log.warning(
            "no security: whoever reaches the side channel at %s can read and write the KV cache of this engine, and "
            "whoever sends it a request decides where it connects to (options curve_directory, "
            "params_keys_file, allowed_peers: docs/operations/security.md)",
            side_channel,
        )
    elif options.allow_insecure_peers and len(missing) < len(keys):
        opened = [
            text
            for name, text in (
                ("curve_directory", f"the side channel at {side_channel} is open to peers without a key"),
                ("params_keys_file", "kv_transfer_params without a signature are believed"),
            )
            if name not in missing
        ]
        _log.warning("allow_insecure_peers: %s (docs/operations/security.md)", "; ".join(opened))


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
