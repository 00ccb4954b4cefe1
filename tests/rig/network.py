"""Free ports, prefill engines that are not there, and servers of something else."""

from __future__ import annotations

import http.server
import os
import random
import socket
import socketserver
import ssl
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from types import TracebackType
from typing import Any
from uuid import uuid4

# Below the range from which Linux takes the ports of outgoing connections, so none of those can take ours in between.
_FIRST_PORT = 20_000
_LAST_PORT = 32_000
_ATTEMPTS = 200
_given: deque[int] = deque(maxlen=1000)
"""The newest that this process was given: nothing may listen yet at one that an engine was started with."""


def has_ipv6() -> bool:
    """Whether this machine has its loopback address."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def _own_ports() -> range:
    """The ports from which this process chooses. An engine listens many seconds after its port was chosen, so the
    workers of pytest-xdist, which run side by side, have none in common. Without such workers a process has all."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0")  # gw0, gw1, ...
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    count = (_LAST_PORT + 1 - _FIRST_PORT) // workers
    first = _FIRST_PORT + int(worker.removeprefix("gw")) % workers * count
    return range(first, first + count)


def free_port() -> int:
    """A loopback TCP port on which nothing listens now, and that this process was not given lately.

    Raises:
        OSError: none was found; something must be holding thousands of them.
    """
    ports = _own_ports()
    for _ in range(_ATTEMPTS):
        port = random.choice(ports)
        if port in _given:
            continue
        with socket.socket() as candidate:
            try:
                candidate.bind(("127.0.0.1", port))
            except OSError:
                continue
            _given.append(port)
            return port
    raise OSError(f"no free port among {_ATTEMPTS} tried in {_FIRST_PORT}..{_LAST_PORT}")


class BlackHole:
    """A listener that lets TCP connect (the kernel does that for it) and never says a word.

    It stands for a peer that hangs, where a closed port stands for one that has ended: the first is only noticed by a
    deadline.
    """

    def __init__(self) -> None:
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", free_port()))
        self._listener.listen(64)

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Stop listening; connections end with a reset."""
        self._listener.close()

    def __enter__(self) -> BlackHole:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def dead_params(port: int, blocks: int) -> dict[str, Any]:
    """What a router would hand on for a prefill engine at `port` that has lent `blocks` blocks and is no more."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(range(1, blocks + 1))],
        "remote_engine_id": f"dead-{uuid4().hex[:12]}",
        "remote_request_id": f"dead-request-{uuid4().hex[:12]}",
        "remote_host": "127.0.0.1",
        "remote_port": port,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": None,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
    }


# --- servers of something else ----------------------------------------------------------------------------------------


@contextmanager
def served(server: socketserver.BaseServer) -> Iterator[int]:
    """Runs a server in a thread; its port."""
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        host_and_port: Any = server.server_address
        yield host_and_port[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _QuietHttp(http.server.SimpleHTTPRequestHandler):
    """Reads a line before it says anything."""

    def log_message(self, *_: object) -> None:
        return


class _Tls(socketserver.BaseRequestHandler):
    """A greeting that is not TLS is refused before any certificate is needed."""

    def handle(self) -> None:
        with suppress(ssl.SSLError):
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).wrap_socket(self.request, server_side=True)


class _RefusesAtOnce(socketserver.BaseRequestHandler):
    """A server that answers and closes at once, as most HTTP servers do."""

    def handle(self) -> None:
        self.request.recv(100)
        self.request.sendall(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n")


class _Banner(socketserver.StreamRequestHandler):
    """A server that greets as SSH does: libzmq takes its banner for the beginning of a message."""

    def handle(self) -> None:
        self.wfile.write(b"SSH-2.0-OpenSSH_9.9\r\n")
        self.rfile.read()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False


OTHER_SERVERS: dict[str, Callable[[], AbstractContextManager[int]]] = {
    "http that reads lines": lambda: served(http.server.ThreadingHTTPServer(("127.0.0.1", 0), _QuietHttp)),
    "http that refuses at once": lambda: served(_Server(("127.0.0.1", 0), _RefusesAtOnce)),
    "tls": lambda: served(_Server(("127.0.0.1", 0), _Tls)),
    "a banner": lambda: served(_Server(("127.0.0.1", 0), _Banner)),
}
"""By what they do with a greeting of ZMQ: how to run one on a free port of the loopback."""
