"""Whether this process has a file descriptor left, which libraries rarely say when they lack one."""

from __future__ import annotations

import errno
import os

NONE_LEFT = (errno.EMFILE, errno.ENFILE)
"""Errors for want of a descriptor: of the process, or of the machine."""


def is_descriptor_left() -> bool:
    """At this moment."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return error.errno not in NONE_LEFT
    return True
