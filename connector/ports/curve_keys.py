"""Keys of CURVE, ZMQ's encryption, in a directory: one's own pair, and the public keys of those that are let in.

    engine.key_secret    the pair of this process
    accepted/*.key       public keys, one in each file; the names of the files are for people

The format is that of pyzmq's certificates (`zmq.auth`). A process that has the secret of an accepted key is believed,
whether it serves or asks: keys say who belongs to the fleet, not which engine it is.

The folder of accepted keys is looked at again, at most every LOOK_SECONDS, when a process connects or is to be
connected to. So a key that is added or taken away counts within seconds, for connections from then on. A folder that
hangs, as on a network file system that is away, costs one connection LOOK_WAIT_SECONDS, and the keys of before stay in
use until it answers. A file there that makes no sense is an error at start; later it is a line in the log, and the key
that it had before stays accepted until the file is gone: somebody may be writing it just now. One's own pair is read
once: a socket that listens keeps the key that it was bound with.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import trio
import zmq
from zmq.auth import certs
from zmq.utils import z85

from connector.observe.log import ProblemLog, get_logger, log_crash
from connector.thread_limit import NoThreadLeft
from connector.waiting_threads import call_in_thread

OWN_PAIR = "engine.key_secret"
ACCEPTED_FOLDER = "accepted"
LOOK_SECONDS = 1.0
LOOK_WAIT_SECONDS = 0.5
KEYS_MAX = 4096
FILE_BYTES_MAX = 1 << 16
KEY_BYTES = 32

_log = get_logger()


class KeyDirectoryError(Exception):
    """A directory of keys cannot be used. The text names the file, and shows no secret."""


class CurveKeys:
    """The keys in `directory`. Raises KeyDirectoryError.

    Attributes:
        public_key: of this process, in the text form of ZMQ (Z85, 40 characters).
        secret_key: in the same form.
        accepted: public keys, and the names of their files.
    """

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)
        self._looked_at = time.monotonic()
        own = self._directory / OWN_PAIR
        public_key, secret_key = _read_certificate(own)
        if secret_key is None:
            raise KeyDirectoryError(f"{own} has no secret-key")
        self.public_key = public_key
        self.secret_key = secret_key
        accepted, problems = _read_accepted(self._directory / ACCEPTED_FOLDER)
        if problems:
            raise KeyDirectoryError(next(iter(problems.values())))
        self.accepted: Mapping[bytes, str] = accepted
        self._log_problems = ProblemLog()
        # Set when the look that is under way ends; None: none is.
        self._look: trio.Event | None = None
        self._is_late = False

    def __repr__(self) -> str:
        return f"CurveKeys({str(self._directory)!r})"

    async def look_again(self) -> None:
        """Take over what has changed in the folder, unless somebody has looked a moment ago. Waits a bounded time."""
        since_look = time.monotonic() - self._looked_at
        if self._look is None:
            if since_look < LOOK_SECONDS:
                return
            self._looked_at, since_look = time.monotonic(), 0.0
            self._look, self._is_late = trio.Event(), False
            # A task of the run: a connection waits for it a moment only.
            trio.lowlevel.spawn_system_task(self._look_now, self._look)
        with trio.move_on_after(max(0.0, LOOK_WAIT_SECONDS - since_look)) as scope:
            await self._look.wait()
        if scope.cancelled_caught and not self._is_late:
            self._is_late = True
            _log.error("%s does not answer; the keys of before stay in use", self._directory / ACCEPTED_FOLDER)

    async def _look_now(self, ended: trio.Event) -> None:
        folder = self._directory / ACCEPTED_FOLDER
        try:
            found, problems = await call_in_thread(partial(_read_accepted, folder))
            self._log_problems(problems, "the key that it had before stays accepted until it is deleted")
            found |= {key: name for key, name in self.accepted.items() if name in problems}
            if found != self.accepted:
                _log.info("accepted keys in %s: %s", folder, ", ".join(sorted(found.values())) or "none")
                self.accepted = found
        except KeyDirectoryError as error:
            self._log_problems({ACCEPTED_FOLDER: str(error)}, "the keys of before stay in use")
        except NoThreadLeft as error:
            problem = f"{folder} cannot be looked at: {error}"
            self._log_problems({ACCEPTED_FOLDER: problem}, "the keys of before stay in use")
        except Exception as error:  # a task of the run itself must not raise: everything would end
            log_crash("accepted keys", error)
        finally:
            self._look = None
            ended.set()


def make_pair(directory: Path, name: str) -> tuple[Path, Path]:
    """Make a pair for a process, and accept it there too; the files of the pair and of the public key.

    Raises FileExistsError where there is a pair, and OSError, and leaves no key behind then.
    """
    directory.mkdir(parents=True, exist_ok=True)
    accepted = directory / ACCEPTED_FOLDER
    accepted.mkdir(exist_ok=True)
    public_key, secret_key = zmq.curve_keypair()
    own, public = directory / OWN_PAIR, accepted / f"{name}.key"
    _write_new(public, public_key, None)
    try:
        _write_new(own, public_key, secret_key)
    except BaseException:
        public.unlink()
        raise
    return own, public


def _write_new(path: Path, public_key: bytes, secret_key: bytes | None) -> None:
    mode = 0o644 if secret_key is None else 0o600
    created = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with open(created, "w", encoding="ascii") as file:
            file.write("# CURVE key of an engine. " + ("Public.\n" if secret_key is None else "Secret: stays here.\n"))
            file.write(f'\ncurve\n    public-key = "{public_key.decode()}"\n')
            if secret_key is not None:
                file.write(f'    secret-key = "{secret_key.decode()}"\n')
    except BaseException:  # the disk is full
        path.unlink()
        raise


def _read_accepted(folder: Path) -> tuple[dict[bytes, str], dict[str, str]]:
    """The keys with the names of their files, and what is wrong with the other files. Raises KeyDirectoryError."""
    try:
        paths = sorted(folder.glob("*.key"))
        if not folder.is_dir():
            raise KeyDirectoryError(f"{folder} is not a directory")
    except OSError as error:
        raise KeyDirectoryError(f"{folder} cannot be read: {error}") from None
    if len(paths) > KEYS_MAX:
        raise KeyDirectoryError(f"{folder} has {len(paths)} keys; {KEYS_MAX} are possible")
    accepted, problems = {}, {}
    for path in paths:
        try:
            accepted[_read_certificate(path)[0]] = path.stem
        except KeyDirectoryError as error:
            problems[path.stem] = str(error)
    return accepted, problems


def _read_certificate(path: Path) -> tuple[bytes, bytes | None]:
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise KeyDirectoryError(f"{path} is too large for a key")
        public_key, secret_key = certs.load_certificate(path)
    except (OSError, ValueError) as error:
        raise KeyDirectoryError(f"{path} cannot be read: {error}") from None
    for key in (public_key, secret_key):
        if key is not None and not _is_key(key):
            raise KeyDirectoryError(f"{path} has a key that is none: 40 characters of Z85 were expected")
    return public_key, secret_key


def _is_key(text: bytes) -> bool:
    try:
        return len(text) == 40 and len(z85.decode(text)) == KEY_BYTES
    except (ValueError, KeyError, OverflowError, struct.error):  # what pyzmq's decoder raises for text that is no Z85
        return False
