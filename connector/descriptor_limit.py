"""How many file descriptors a worker, a scheduler or `nixl-actor` may have.

UCX takes two for each engine that a worker is connected to over TCP, and where none is left for one that connects it
listens no more until the process ends (docs/nixl.md fact 38). Each connection to a listener is one, and a quarter of
all is the most that one has (`ports/doorman.py`): after a restart of P every rank of every D connects at once, and who
is one too many is cut off. vLLM raises the limit of its API server, and so of what that starts, to 65,535 or, if the
hard limit is lower, not at all; nor where there is no such server (`--headless`, `LLM`).
"""

from __future__ import annotations

import resource

from connector.observe.log import get_logger

DESCRIPTORS_MAX = 1 << 20
"""Not raised beyond, whatever the hard limit is: there are programs that count through all descriptors which a process
may have, and a child inherits the limit. This is the kernel's own default for the hard limit (`fs.nr_open`)."""

_log = get_logger()


def raise_descriptor_limit() -> None:
    """To the hard limit, or DESCRIPTORS_MAX. Never lowers it, never raises."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS_MAX if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS_MAX)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:
        _log.warning("this process may have %d file descriptors, and no more: %s (ulimit -n)", soft, error)
        return
    _log.info("this process may have %d file descriptors now, up from %d (ulimit -n)", wanted, soft)
