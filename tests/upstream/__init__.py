"""vLLM's own scheduler-level tests of its connector, with this connector in the built-in one's place.

`python -m tests.upstream` fetches vLLM's source distribution (44 MB) once, unpacks its tests and runs those that get
their connector from vLLM's scheduler, by its registered name. Some of them look into the built-in connector all the
same: `in_its_place` names them, and they have to fail at just that.

`source` fetches and unpacks, also the proxy that `tests/e2e/test_routers.py` starts.
"""
