"""Chaos: two prefill and two decode engines under load, while everything around them is broken on purpose.

    make chaos MINUTES=5 SEED=1              this project's connector; exit status 1 if a promise was not kept
    make chaos MINUTES=5 SEED=1 BUILTIN=1    and then the same plan with the built-in connector, reported beside it

What is real
    Four vLLM API servers with a small Llama, NIXL over TCP and over shared memory, signals, sockets, and the network:
    each engine has one of its own, and the kernel forwards between them. One decode engine has the load-failure policy
    `fail` and copies over shared memory, the other one `recompute` and reads over TCP.
    A client in the place of a router asks for prompts whose answers were computed before.

What is done to them
    A plan (`plan`) is drawn from the seed: prefill engines are killed, stopped for shorter and for longer than a lease,
    drained by the command `nixl-actor drain` and by SIGTERM (`drains`), and come back with the same or with another
    engine id; the network loses, without a word, all that a prefill engine sends or gets, or its READs alone; strangers
    send garbage and keep connections half open on side channels and control sockets; proxies between the engines delay,
    hold back, refuse and reset. The clients of the load (`load`) leave, send parameters twice, to both engines, too
    late, malformed or not at all. The plan is printed and can be replayed; when each thing happens relative to a
    request cannot.

What is promised, and judged at the end (`report`)
    No wrong answer. Every call ends. No decode engine restarts. With `recompute` no client sees an error but those that
    it caused itself. An engine that is drained says in time that it has, and no plain request fails with it, whatever
    the policy, unless something else was done to it as well. When everything has settled, no block, lease, hold, READ,
    agent, list, thread, socket, file or peer is left but those of the live connections (`remains`). A decode engine is
    compared with what it was before the load; a life of a prefill engine that the load has left, with the one after it,
    of which each decode engine has read once.

Parts
    plan       what happens, when and to whom; a value
    proxy      TCP proxies with bad manners, one thread for all
    strangers  who sends garbage and keeps connections half open
    cluster    the engines and their proxies
    drains     how engines are drained, and what came of it
    load       the clients, and what became of each call
    remains    what engines hold of their own and of the operating system's
    run        one run from start to report
    report     the result, its verdict, and how it is printed
"""
