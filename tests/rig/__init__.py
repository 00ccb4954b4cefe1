"""The connector rig: a real vLLM engine core around a KV connector, with no model in it.

What it is for
    Tests and benchmarks that need the connector's whole life (scheduler side and worker side, several requests a step,
    aborts, preemption, both load-failure policies, a peer that dies) but not a model, and not half a minute of
    start-up.

What is real, and what is not
    Real: `EngineCore` with its `Scheduler`, KV cache manager and prefix cache, the uniprocess executor, the order in
    which vLLM calls a connector, the KV cache tensors and their layout, NIXL over UCX, ZMQ, one operating-system
    process per engine. Both roles of the connector live in one process, as they do under that executor.
    Not real: the model. `worker.RigWorker` stands where vLLM's worker does; its "forward pass" writes, for every token
    scheduled, bytes that only this token at this place behind this prefix has (see `content`), and compares what the
    connector has loaded with them before it uses it. So a prefill engine leaves behind bytes that are a pure function
    of the prompt, and a decode engine can tell for each byte whether it is the right one: no oracle crosses processes.

How it is used
    with engine_pair(OURS, directory) as (prefill, decode):
        params = prefill.prefill("a", prompt("a", 100))
        outcome = decode.decode("a", prompt("a", 100), params)
        assert outcome.received and not outcome.mismatched_pages

Parts
    content    which bytes belong to which token; pure
    messages   what crosses the pipe between the test and an engine process
    engine     the test's handle of one engine process: start, submit, wait, abort, pause, kill, close
    child      the engine process: configuration, the step loop, the commands
    worker     the stand-in for vLLM's worker: KV cache, the connector's worker side, the clock around its calls
    inside     what our connector holds, counted: NIXL objects, requests, leases
    attention  a back end whose blocks can be read into blocks of another size
    accelerator  the CPU as a device that NIXL cannot reach, for host staging
    call_recorder  which thread calls NIXL and ZMQ
    process    threads, descriptors and memory of an engine process
    network    free ports and prefill engines that are not there
    patience   how long to wait
    lan        machines with a network between them that loses what it is told to lose

Everything waits with a deadline, and a closed rig leaves no process behind. Importing this package imports neither
vLLM nor torch: only engine processes do.
"""

from tests.rig.content import expected_output, prompt
from tests.rig.engine import EngineRig, RigError, engine_pair
from tests.rig.messages import (
    BUILTIN,
    OURS,
    Check,
    ConnectorChoice,
    EngineOptions,
    Holdings,
    Inspection,
    RequestOutcome,
    RequestSpec,
    Snapshot,
)
from tests.rig.network import BlackHole, dead_params, free_port

__all__ = [
    "BUILTIN",
    "OURS",
    "BlackHole",
    "Check",
    "ConnectorChoice",
    "EngineOptions",
    "EngineRig",
    "Holdings",
    "Inspection",
    "RequestOutcome",
    "RequestSpec",
    "RigError",
    "Snapshot",
    "dead_params",
    "engine_pair",
    "expected_output",
    "free_port",
    "prompt",
]
