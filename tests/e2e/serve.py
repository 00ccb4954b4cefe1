"""vLLM's API server whose processes are forked instead of started anew: `python -m tests.e2e.serve <its arguments>`.

An engine is three processes and more, one after another, and on a CPU vLLM has each import everything again: eight
seconds of a core, most of what the start of a tiny engine takes. Here they are imported once, and inherited. What an
engine does is the same; the demo starts its engines in the way that users do.
"""

from __future__ import annotations

import os
import runpy
from typing import Any

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


def fork_the_rest() -> None:
    """Have vLLM fork, also where its CPU platform asks for `spawn`, which it does to set OpenMP's environment.

    The engines of tests compute with one thread each, which `EngineOptions` says in the environment from the start.
    """
    from vllm.platforms import current_platform

    platform: Any = type(current_platform)
    check_and_update = platform.check_and_update_config

    def and_fork(cls: type, config: Any) -> None:
        check_and_update(config)
        os.environ[METHOD] = "fork"

    platform.check_and_update_config = classmethod(and_fork)
    os.environ[METHOD] = "fork"


def import_what_all_need() -> None:
    import vllm.v1.engine.core
    import vllm.v1.executor.multiproc_executor
    import vllm.v1.worker.cpu_worker  # noqa: F401


if __name__ == "__main__":
    fork_the_rest()
    import_what_all_need()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
