"""The tests of `test_families` on routes of its kinds in the other direction, or between engines that are alike."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e import test_families as families
from tests.e2e.test_families import MORE_ROUTES, Served, Stable

pytestmark = families.pytestmark

stable = families.stable


@pytest.fixture(scope="module", params=MORE_ROUTES, ids=str)
def served(stable: Stable, request: pytest.FixtureRequest) -> Iterator[Served]:
    with stable.serve(request.param) as served:
        yield served


test_prompts_of_several_lengths = families.test_prompts_of_several_lengths
test_several_requests_at_once = families.test_several_requests_at_once
test_what_lies_behind_a_common_prefix = families.test_what_lies_behind_a_common_prefix
test_the_answer_shows_when_the_kv_is_that_of_another_prompt = (
    families.test_the_answer_shows_when_the_kv_is_that_of_another_prompt
)
test_blocks_come_back_on_both_sides = families.test_blocks_come_back_on_both_sides
