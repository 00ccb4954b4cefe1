"""This machine and this process, as others can tell them from others. A sandbox may hide either."""

from __future__ import annotations

from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_OWN_NAMESPACE = Path("/proc/self/ns/pid")


def boot_id() -> str:
    """The same in all containers of a machine, until it is started again; another on each machine. Empty: unknown."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def process_namespace() -> int:
    """The inode of the namespace that `os.getpid()` counts in, 0: unknown. Linux gives such numbers out again."""
    try:
        return _OWN_NAMESPACE.stat().st_ino
    except OSError:
        return 0
