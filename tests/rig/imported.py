"""What every engine process of the rig needs of vLLM: imported once, by the process that they are forked from.

Nothing is started here, and NIXL is left out: UCX reads its environment when it is loaded.
"""

import vllm.engine.arg_utils
import vllm.v1.engine.core
import vllm.v1.executor.uniproc_executor
import vllm.v1.worker.cpu_worker  # noqa: F401

import tests.rig.worker  # noqa: F401
