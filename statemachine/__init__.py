"""The rules of KV transfer: pure state machines, without clock, I/O or threads.

Imports neither trio, zmq, torch, nixl nor vllm (tests/unit/test_imports.py enforces it).

    kernel         what a machine is: states, events, a table of transitions, effects

    request        machine: one request that reads from P, on one rank of D
    peer           machine: the connection of that rank to one prefill engine
    hold           machine: one lease of that engine on one of its ranks, as D knows it
    departure      machine: whether that engine has said that it ends
    introduction   machine: an engine that is connected before a request needs it; and the core of a rank of D for all
                   of these
    lease          machine: one lease, on one rank of P
    draining       machine: an engine that is to end, in its scheduler's process
    load           machine: one request that may load KV, as the scheduler of its engine knows it
    grant          machine: what that scheduler does with the blocks of one request when it ends

    remote_engine  core of a rank of D for one prefill engine: composes request, peer, hold and departure
    roster         core of a rank of D for all prefill engines that it knows
    lending        core of a rank of P: all of its leases
    loads          core of an engine's scheduler: which requests may have blocks, and what is loaded for them
    granting       core of an engine's scheduler: whose blocks are lent
    admission      core of whoever listens: what strangers may cost. It has a method for each event instead of `handle`,
                   because it is asked for every message that comes

    agents         who stands on the agents that NIXL has loaded for a rank of D, and when they are removed
    quarantine     when blocks in quarantine are too many to go on reading
    outcome        what an event of a core has led to: effects, and steps for its observer
    deadlines      the timers of a core
    pauses         between attempts: they double, and differ from rank to rank
    remembered     keys that are remembered, the newest ones
    failures       why something has failed: types
    trace          the record of one transition, and who is told of it
"""

DISTRIBUTION = "nixl-actor-connector"
"""Whose package this is: python-statemachine installs one of the same name."""
