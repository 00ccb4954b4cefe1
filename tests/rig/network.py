"""Free ports, and prefill engines that are not there."""

from __future__ import annotations

import random
import socket
from types import TracebackType
from typing import Any
from uuid import uuid4

# Below the range from which Linux takes the ports of outgoing connections, so none of those can take ours in between.
_FIRST_PORT = 20_000
_LAST_PORT = 32_000
_ATTEMPTS = 200


def free_port() -> int:
    """A loopback TCP port on which nothing listens now.

    Raises:
        OSError: none was found; something must be holding thousands of them.
    """
    for _ in range(_ATTEMPTS):
        port = random.randint(_FIRST_PORT, _LAST_PORT)
        with socket.socket() as candidate:
            try:
                candidate.bind(("127.0.0.1", port))
            except OSError:
                continue
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
