"""Processes that an engine forks get their signals alone: imported in engines that name it as `EngineOptions.changes`.

A forked process has the pipe by which a signal wakes the loop of its parent, so vLLM's API server would take a SIGTERM
that its engine core or a worker has got for one of its own. Started as users do it, these processes have pipes of their
own.
"""

from __future__ import annotations

import os
import signal

os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
