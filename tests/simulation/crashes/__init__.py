"""A fault at every point: what if this await, or this call of a port, raised?

Handlers of errors are the code that runs least. So here they all run: a short scene with all that a request can go
through (`scenes`) is played once to count its points, and then once more for each of them, with an exception there.

A point is an await of production code that was suspended and is about to go on, or a call of something that production
code was given: NIXL's port, sockets, the file of the trace, what counts, what logs. It raises before anything is done.

What must hold whatever it was (`run`): nothing comes out of a method that vLLM calls; every request is reported exactly
once, and in time; one that is done has its bytes; no block is given back that a READ may write into, and none is kept
for ever; every lease ends once; the log says what happened; requests that come later are served. Unless the whole trio
run has died of it: then they fail at once.

Awaits that go on waiting to the end (for a stop, a deadline, a message that never comes) are points too: at some
moments of a scene one of the tasks that wait is made to raise.

points      the points, and the exception at one of them
engines     engines whose thread of actors is a task: the production `ActorThread`, `ConnectorWorker` and ledger
run         what every scene is played with, and what must hold
scenes      the plans
campaign    which points are tried
__main__    the campaign: `python -m tests.simulation.crashes`
"""
