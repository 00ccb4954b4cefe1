"""vLLM's own scheduler-level tests of its connector, with this connector in the built-in one's place.

`python -m tests.upstream` fetches vLLM's source distribution (44 MB) once, unpacks its tests and runs those that name a
connector by its registered name only. Tests of the built-in connector's insides are not among them.

`source` fetches and unpacks, also the proxy that `tests/e2e/test_routers.py` starts.
"""
