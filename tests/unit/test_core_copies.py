"""What the model checker takes for the same core: `copy` and `freeze` know every attribute.

An attribute that `freeze` leaves out makes two cores the same that go on differently, and what follows from one of them
is never looked at.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from statemachine import remote_engine
from statemachine.deadlines import Deadlines
from statemachine.granting import Granting
from statemachine.lease import LeaseName
from statemachine.lending import Lending, LendingLimits
from statemachine.loads import Loads
from statemachine.outcome import Outcome
from statemachine.remote_engine import EngineLimits, RemoteEngine
from statemachine.remote_engine.claims import Claim, Claims
from statemachine.remote_engine.connections import Connection, Connections

ENGINE_LIMITS = EngineLimits(**dict.fromkeys(EngineLimits.__struct_fields__, 1))
LENDING_LIMITS = LendingLimits(**dict.fromkeys(LendingLimits.__struct_fields__, 1))

EVERY_CORE = {
    "_limits": "never changes",
    "_outcome": "empty between two events",
}
GIVEN = {
    "Claims": {"_timers", "_outcome"},
    "Loads": {"_shares", "_effects", "queued", "loading"},
    "Granting": {"_next_number", "_effects"},
}
"""To a copy, when it is made."""

CORES: dict[str, tuple[Callable[[], Any], dict[str, str]]] = {
    "RemoteEngine": (
        lambda: RemoteEngine("p", "p:1", ENGINE_LIMITS),
        EVERY_CORE
        | {
            "engine_id": "never changes",
            "_identity": "never changes",
            "_waiting": "the requests in that state",
            "_proving": "the requests in that state",
            "_backoff_until_ns": "that of a timer, while it matters",
        },
    ),
    "Connection": (
        lambda: Connection(1, ("PP 0 TP 0",), 5, address="a", is_builtin=False),
        {"workers": "names for people; how many there are is in `ranks`"},
    ),
    "Connections": (Connections, {}),
    "Claim": (lambda: Claim(LeaseName("r", 1), "a", 0), {}),
    "Claims": (
        lambda: Claims(ENGINE_LIMITS, Deadlines(), Outcome()),
        {"_timers": "the core's", "_outcome": "the core's"},
    ),
    "Lending": (lambda: Lending(LENDING_LIMITS), EVERY_CORE),
    "Loads": (
        lambda: Loads(shares=True),
        {
            "_shares": "never changes",
            "_by_state": "the loads by state",
            "queued": "the loads in that state",
            "loading": "the loads in that state",
            "has_to_step": "follows from the others",
            "_effects": "empty between two events",
        },
    ),
    "Granting": (
        lambda: Granting(1),
        {
            "_next_number": "no two numbers are alike, and none means anything",
            "_accepted": "counted in `counts`",
            "_answering": "counted in `counts`",
            "_lent": "counted in `counts`",
            "_not_lent": "counted in `counts`",
            "computing": "the grants in that state",
            "prompts": "the grants in that state",
            "_effects": "empty between two events",
        },
    ),
}


@pytest.mark.parametrize("name", CORES)
def test_two_cores_of_which_any_attribute_differs_are_not_the_same(name: str) -> None:
    make, excused = CORES[name]
    core = make()
    assert set(_attributes(core)) - _named_in(type(core).freeze) == set(excused)


@pytest.mark.parametrize("name", CORES)
def test_a_copy_has_every_attribute(name: str) -> None:
    core = CORES[name][0]()
    assert set(_attributes(core)) <= _named_in(type(core).copy) | GIVEN.get(name, set())


def test_leases_that_nobody_wants_any_more_are_not_those_that_somebody_wants() -> None:
    """As when an engine has left: whoever had wanted them is still known, and no pause follows a refusal."""
    core = RemoteEngine("p", "p:1", ENGINE_LIMITS)
    core.handle(remote_engine.Announced(request_id="a", lease=LeaseName("r", 1), address="p:1", age_ns=0), 0)
    other = core.copy()
    assert core.freeze(0) == other.freeze(0)
    other._claims.want_none()
    assert core.freeze(0) != other.freeze(0)


def _attributes(core: object) -> Iterator[str]:
    yield from getattr(type(core), "__slots__", ())
    yield from getattr(core, "__dict__", ())


def _named_in(method: Callable[..., Any]) -> set[str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
