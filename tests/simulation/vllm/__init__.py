"""The simulator with vLLM's own scheduler on both sides.

The actors, the fake ports and the faults are those of `tests.simulation`; what is scripted there is real here: an
engine is vLLM's `Scheduler` with its block pool and prefix cache, and a connector made by vLLM's factory, stepped as
vLLM's engine core steps it. There is no model: a simulated worker writes known words into the KV cache and reads the
next token out of them, so wrong KV shows both in memory and in the answer.

    config       vLLM's configuration of an engine, and what of it a seed decides
    content      which words and which answer belong to a prompt
    connector    the class that vLLM loads: the production connector with a clock and actors of the simulation
    worker       the calls of vLLM's worker to the connector, and the stand-in for a forward pass
    engine       one engine: scheduler, worker, step loop
    oracles      what must hold beyond `tests.simulation.oracles`
    cluster      clients, probes, a run

Of the simulator only this package, and what runs mutants on it, import vLLM.
"""
