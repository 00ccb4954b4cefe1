"""Level 1 of the simulator: the production machines alone, under a heap of events in virtual nanoseconds.

Level 2 (the package around this one) runs the production actors; here the shell is a model of them, small enough that
ten thousand requests a second go through it. What is real is every table: `request` per rank of a decode engine,
`transfer` per READ, `peer` per rank and prefill engine, `lease` per rank of a prefill engine. What is modelled is what
the actors do with effects, and the world around: engines with several ranks, block pools that reuse at once, clocks
that drift, links that fail.

    heap        time: events in order
    clock       the clock of an engine
    shape       the cluster of a seed
    faults      links, and what faults do to messages
    world       what everything shares, and the log of transitions
    transport   connections and READs, which write for as long as they fly
    prefill     prefill engines: prompts, leases
    decode      decode engines: pool, ranks, reports
    actor       the model of a peer actor
    oracles     what must hold
    run         one run: phases, faults, verdict
"""
