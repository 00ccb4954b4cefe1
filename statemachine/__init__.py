"""The rules of KV transfer: pure state machines, without clock, I/O or threads.

Imports neither trio, zmq, torch, nixl nor vllm (tests/unit/test_imports.py enforces it). `kernel` says what a machine
is; `request`, `peer`, `hold` and `lease` are the four machines. The cores compose them: `remote_engine` on D, `lending`
on P, with their timers in `deadlines`. `roster` is the core for all remote engines that a rank of D knows. `failures`
are the typed reasons; `trace` is the record of one transition.
"""

DISTRIBUTION = "nixl-actor-connector"
"""Whose package this is: python-statemachine installs one of the same name."""
