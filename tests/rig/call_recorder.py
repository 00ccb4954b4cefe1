"""Which thread calls NIXL and ZMQ.

Python methods of NIXL's agent and of ZMQ's sockets are replaced, in the engine process, by ones that note the calling
thread first. Destructors of NIXL's handles are among them: they call the agent from whatever thread drops the last
reference. What a library does inside its own threads is not seen, and is not meant.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

_SOCKET_METHODS = (
    "send",
    "recv",
    "send_multipart",
    "recv_multipart",
    "poll",
    "bind",
    "connect",
    "close",
    "get",
    "set",
    "getsockopt",
    "setsockopt",
)


class CallRecorder:
    """Counts calls by thread and name. Only the thread itself writes its own entries, so no lock is needed."""

    def __init__(self) -> None:
        self._calls: dict[int, dict[str, int]] = {}

    def install(self) -> None:
        """Replace the methods; before anything has made an agent or a socket."""
        import nixl._api
        import zmq

        agent = nixl._api.nixl_agent
        for name in [name for name, value in vars(agent).items() if callable(value) and not name.startswith("_")]:
            self._wrap(agent, name)
        for handle in (nixl._api.nixl_xfer_handle, nixl._api.nixl_prepped_dlist_handle):
            for name in ("release", "__del__"):
                self._wrap(handle, name)
        for name in _SOCKET_METHODS:
            self._wrap(zmq.Socket, name)
        for name in ("socket", "term"):
            self._wrap(zmq.Context, name)

    def _wrap(self, owner: type, name: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)
        label = f"{owner.__name__}.{name}"

        @functools.wraps(original)
        def noting(*args: Any, **kwargs: Any) -> Any:
            own = self._calls.setdefault(threading.get_ident(), {})
            own[label] = own.get(label, 0) + 1
            return original(*args, **kwargs)

        setattr(owner, name, noting)

    def reset(self) -> None:
        """Forget everything so far."""
        self._calls = {}

    def of_engine_thread(self) -> dict[str, int]:
        """Calls made by the main thread, which is the engine thread."""
        return dict(self._calls.get(threading.main_thread().ident or 0, {}))

    def of_other_threads(self) -> int:
        """Number of calls made by all other threads."""
        engine = threading.main_thread().ident
        return sum(sum(own.values()) for ident, own in list(self._calls.items()) if ident != engine)
