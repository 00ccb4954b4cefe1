"""Names of agents, which NIXL has as bytes and the port as text."""

from __future__ import annotations

import codecs
import contextlib
import threading
from collections.abc import Iterator

from connector.ports.nixl import AgentName

_thread_state = threading.local()


@contextlib.contextmanager
def lenient_decoding(wanted: bool) -> Iterator[None]:
    """Let a call of NIXL, on this thread, replace bytes that are not UTF-8 instead of raising.

    `getNotifs` takes all notifications out of the agent, and then decodes the names of their senders. If one name is
    not UTF-8, the exception takes the notifications of all senders with it, and no call of the binding gets around
    that: each returns the same map. What it does honour is Python's registry of codec error handlers, where "strict"
    can be replaced. The replacement acts as before for every other call and thread. Still it is process-wide, so it is
    made only in a process that such a sender has reached.
    """
    if wanted:
        codecs.register_error("strict", _strict_but_here)
    _thread_state.is_lenient = wanted
    try:
        yield
    finally:
        _thread_state.is_lenient = False


def _strict_but_here(error: UnicodeError) -> tuple[str | bytes, int]:
    if isinstance(error, UnicodeDecodeError) and getattr(_thread_state, "is_lenient", False):
        return codecs.backslashreplace_errors(error)
    return codecs.strict_errors(error)


def agent_text(name: str | bytes) -> AgentName:
    """An agent name as text; one that is not UTF-8 stays distinguishable."""
    if isinstance(name, bytes):
        return name.decode("utf-8", "backslashreplace")
    # What `lenient_decoding` has let through is, with CPython 3.14, a string of too wide a kind, which equals no other.
    return name if name.isascii() else name.encode("utf-8", "backslashreplace").decode()
