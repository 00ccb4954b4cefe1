"""Fuzzing of what decodes bytes from outside, and of the sockets that they come through.

* `targets`: the entry points, what each may raise, and valid messages to begin with.
* `mutations`: how a valid message becomes a damaged one.
* `decoders`: one entry point under atheris, which keeps what leads to new code (`python -m tests.fuzz.decoders NAME`).
* `sockets`: damaged messages for the listener and the control socket of a real prefill engine.

`python -m tests.fuzz --minutes 10` (`make fuzz MINUTES=10`) runs all of them. `tests/unit/test_wire_fuzz.py` has a
short form with hypothesis, which also bounds memory and work.
"""
