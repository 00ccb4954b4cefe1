"""Whether this process has file descriptors left, which libraries rarely say when they lack one.

libzmq ends the process where it lacks one at some places: so it is asked before whether there are enough.
"""

from __future__ import annotations

import errno
import os
from contextlib import ExitStack

NONE_LEFT = (errno.EMFILE, errno.ENFILE)
"""Errors for want of a descriptor: of the process, or of the machine."""


class TooFewDescriptors(Exception):
    """There is no room for what was to be made."""

    def __init__(self) -> None:
        super().__init__(
            "this process may have too few file descriptors: raise the hard limit (`ulimit -Hn`), or see who uses them "
            "up (ls /proc/<pid>/fd)"
        )


def require_descriptors(count: int) -> None:
    """Raises TooFewDescriptors unless the process may have so many more at this moment."""
    with ExitStack() as held:
        try:
            for _ in range(count):
                held.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            if error.errno in NONE_LEFT:
                raise TooFewDescriptors from error


def is_descriptor_left() -> bool:
    """At this moment."""
    try:
        require_descriptors(1)
    except TooFewDescriptors:
        return False
    return True
