"""The rules of KV transfer: pure state machines, without clock, I/O or threads.

Imports neither trio, zmq, torch, nixl nor vllm (tests/unit/test_imports.py enforces it). `kernel` says what a machine
is; `request`, `lease`, `peer` and `transfer` are the four machines; `failures` are the typed reasons; `trace` is the
record of one transition.
"""
