"""What becomes of an engine whose actors have died: the option `on_actor_death`.

`degrade`: it lives on without KV transfer. Requests that wait for KV fail, the policy of vLLM decides what that means,
and P lends nothing any more. `exit`: its process ends, so that its supervisor (Kubernetes) starts another one.

The end is a SIGTERM to the own process, not an exception in the next step: an idle engine takes no step. vLLM takes the
end of a worker or of the engine core for what it is, ends all others, and its API server with them.

An engine core that has something to do does not end at SIGTERM. It refuses new requests until its answers are complete
and nothing is lent any more, for which `--shutdown-timeout` and leases leave minutes. So a process that still lives
ORDERLY_END_SECONDS later ends without asking anybody.
"""

from __future__ import annotations

import math
import os
import signal
import threading

from connector.config import ConnectorOptions
from connector.observe.log import get_logger
from connector.thread_limit import NoThreadLeft, start_thread
from connector.wire.bounded import shorten

REASON_LENGTH_MAX = 300
ORDERLY_END_SECONDS = 5.0
"""How long vLLM has for the end that it makes of SIGTERM."""
EXIT_STATUS = 1

_log = get_logger()


def act_on(options: ConnectorOptions, reason: str) -> None:
    """The actors of this process have died of `reason`. One line, and the end of the process if that is asked for."""
    if options.on_actor_death == "degrade":
        _log.critical(
            "this engine transfers no KV any more: %s. It goes on without (on_actor_death=degrade); restart it",
            shorten(reason, REASON_LENGTH_MAX),
        )
        return
    _log.critical(
        "this engine transfers no KV any more: %s. Its process %d ends now, whatever it is doing in %g s "
        "(on_actor_death=exit)",
        shorten(reason, REASON_LENGTH_MAX),
        os.getpid(),
        ORDERLY_END_SECONDS,
    )
    hard_end = threading.Timer(ORDERLY_END_SECONDS, os._exit, (EXIT_STATUS,))
    hard_end.daemon = True  # an interpreter that ends in order does not wait for it
    try:
        start_thread(hard_end)
    except NoThreadLeft:  # of which this may be what comes
        signal.alarm(math.ceil(ORDERLY_END_SECONDS))  # which ends the process where nobody takes that signal
    os.kill(os.getpid(), signal.SIGTERM)
