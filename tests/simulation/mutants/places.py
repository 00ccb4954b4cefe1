"""Where mutants of the cores are run: small products of the model checker, faults of level 1, files of tests."""

from __future__ import annotations

import msgspec

from tests.explore import Product
from tests.explore.product import TICK_NS
from tests.simulation.faults import Kind
from tests.simulation.mutants.mutant import fault

ONE = Product(name="one request", restarts=True)
TWO = Product(name="two requests", requests=((0, 0), (0, 1)), restarts=True)
SHARED = Product(name="two requests, one lease", requests=((0, 0), (0, 0)), restarts=True)
KEPT = Product(name="two requests, one lease that is kept", requests=((0, 0), (0, 0)), keeps=True)
SIBLINGS = Product(name="two engines, one lease", requests=((0, 0), (1, 0)), restarts=True, dies=True)
TWINS = Product(name="two engines of one id", requests=((0, 0), (1, 0)), twins=True)
TWO_OF_P = Product(name="two ranks of P", prefill_ranks=2, restarts=True)
TWO_OF_D = Product(name="two ranks of D", decode_ranks=2)
SUPERVISED = Product(
    name="two requests, one lease, under a supervisor", requests=((0, 0), (0, 0)), supervised=True, clocks=(TICK_NS,)
)
TWO_NAMES = Product(
    name="two requests, one lease, one name without its number", requests=((0, 0), (0, 0)), unnumbered=(1,)
)
LEAVES = Product(name="P leaves, two requests, one lease", requests=((0, 0), (0, 0)), leaves=True)
BUILTIN = Product(name="built-in P", requests=((0, 0), (0, 1)), is_builtin=True)


def within(product: Product, deviations: int) -> Product:
    return msgspec.structs.replace(product, deviations=deviations)


ERRS_EARLY = (fault(Kind.READ_ERRS_EARLY, "d0>p0", 0.2, 4.0, 0.3),)

CORE = "tests/unit/test_remote_engine_rules.py"
SAMPLES = "tests/unit/test_samples.py"
ROSTER = "tests/unit/test_roster.py"
LENDING = "tests/unit/test_lending.py"
LEASE = "tests/unit/test_lease_machine.py"
KEEPER = "tests/unit/test_lease_keeper.py"
