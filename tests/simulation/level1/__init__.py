"""Level 1 of the simulator: the cores under a heap of events, in virtual nanoseconds.

Level 2 (the package around this one) runs the production actors; here there is nothing between a core and the world but
an executor: a few lines that hand events in, carry effects out and keep one timer. `RemoteEngine` runs once for each
rank of a decode engine and each prefill engine that it knows, with a `Roster` for each rank, `Lending` once for each
rank of a prefill engine, all as they are. Everything else is the world around them, small enough that thousands of
requests a second go through it: engines of one or two ranks with block pools that reuse at once, clocks of different
zero and rate, links and READs that fail in every way that is known, peers with the built-in connector.

    heap        time: events in order
    clock       the clock of an engine
    shape       the cluster of a seed
    faults      links, and what faults do to messages
    world       what everything shares, and the log of transitions
    executor    what drives a core
    transport   connections and READs, which write for as long as they fly
    reader      the executor of a `RemoteEngine`
    decode      decode engines: pool, ranks, reports, and the executor of a `Roster`
    prefill     prefill engines: prompts, pool, and the executor of a `Lending`
    builtin     engines with the built-in connector, on either side
    oracles     what must hold
    run         one run: phases, faults, verdict
"""
