"""The connector inside vLLM's real engine core, on the rig: real NIXL, real ZMQ, one process per engine.

What is here needs more than the actors alone (tests/actors) and less than a model (tests/e2e): who frees which block
and when, both load-failure policies, peers that hang, die and come back, leaks over a thousand requests. The rows of
the table of field failures (tests/simulation/README.md) that a test stands for are named in its docstring, as
"scenario 5".

Parts
    house     three engines for all tests of the session: one prefill engine, two decode engines, one for each policy
    traces    what the engines wrote about their state transitions
"""
