"""Mutants of what keeps strangers out."""

from __future__ import annotations

from connector.wire import params, signatures
from connector.wire.signatures import ParamsKeys
from tests.simulation.mutants.mutant import ByTest, Edit, Mutant

SIGNATURES = "tests/unit/test_signatures.py"

MUTANTS = (
    Mutant(
        name="signatures are not compared",
        broken="parameters that carry any signature with a known key are believed",
        changes=(Edit(ParamsKeys.find_fault, "if not hmac.compare_digest(", "if False and ("),),
        place=ByTest(f"{SIGNATURES}::test_every_field_is_bound"),
    ),
    Mutant(
        name="unsigned parameters are believed",
        broken="parameters without a signature count as genuine",
        changes=(Edit(params.require_genuine, "if allows_unsigned:", "if True:"),),
        place=ByTest(f"{SIGNATURES}::test_parameters_without_a_signature_are_refused_unless_that_is_allowed"),
    ),
    Mutant(
        name="a mixed fleet believes forged parameters",
        broken="where unsigned parameters are allowed, wrong signatures are too",
        changes=(Edit(params.require_genuine, "is None:", "is None or allows_unsigned:"),),
        place=ByTest(f"{SIGNATURES}::test_a_wrong_signature_is_refused_even_where_none_is_needed"),
    ),
    Mutant(
        name="the direction is not signed",
        broken="what D gives out for P counts as what P gives out for D",
        changes=(Edit(signatures._digest, "_LENDS_BACK if lends_back else _LENDS", "_LENDS"),),
        place=ByTest(f"{SIGNATURES}::test_the_direction_is_bound"),
    ),
)
