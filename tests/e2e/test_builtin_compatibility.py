"""This project's connector and the one that comes with the installed vLLM, as prefill and decode engine of each other.

Our engine is loaded by the name that the plug-in registers, and has `kv_role` both, as the built-in ones have.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.e2e.client import Answer, PrefillDecode
from tests.e2e.cluster import SETTLE_SECONDS, BuiltinAndOurs, blocks_of, prompt
from tests.plain_paths import LEASE_PATHS_PLAIN

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(420)]

LENGTHS = (1, 20, 32, 33, 500)
ATTEMPTS = 3
LEASE_SECONDS = 30.0
"""The default of both connectors."""


def first_that_is_ok(service: PrefillDecode, ask: Callable[[int], Answer]) -> Answer:
    """For a built-in D: it gives a handshake up after five seconds, which a starved machine makes of a millisecond.
    Then nobody reads what P has lent, and it is waited for that P has it back."""
    for attempt in range(ATTEMPTS):
        answer = ask(attempt)
        if answer.ok:
            break
        assert service.prefill_client.blocks_are_free(LEASE_SECONDS + SETTLE_SECONDS)
    assert answer.ok, answer.error
    return answer


def test_a_builtin_p_serves_our_d(mixed: BuiltinAndOurs) -> None:
    with PrefillDecode(mixed.builtin, mixed.ours) as service:
        for tokens in LENGTHS:
            text, key = prompt(tokens, f"builtin to ours {tokens}"), f"builtin-to-ours-{tokens}"
            answer = service.pd(text, key)
            assert answer.ok, answer.error
            assert answer.token_ids == service.alone(text).token_ids
            request = mixed.traces.ended_request(key)
            assert request.states == ("pending_handshake", "reading", "done")
            assert request.blocks == blocks_of(tokens)
        assert service.prefill_client.blocks_are_free()  # by notification: the lease is 30 s, the patience 20


def test_our_p_serves_a_builtin_d(mixed: BuiltinAndOurs) -> None:
    with PrefillDecode(mixed.ours, mixed.builtin) as service:
        for tokens in LENGTHS:
            text = prompt(tokens, f"ours to builtin {tokens}")
            keys: list[str] = []

            def ask(attempt: int) -> Answer:
                keys.append(f"ours-to-builtin-{tokens}-{attempt}")  # noqa: B023
                return service.pd(text, keys[-1])  # noqa: B023

            answer = first_that_is_ok(service, ask)
            assert answer.token_ids == service.alone(text).token_ids
            lease = mixed.traces.ended_lease(keys[-1])  # by notification: its time is longer than this is waited for
            assert lease.states in LEASE_PATHS_PLAIN
        assert service.prefill_client.blocks_are_free()


def test_requests_at_once_in_both_directions(mixed: BuiltinAndOurs) -> None:
    for name, prefill, decode in (
        ("to-ours", mixed.builtin, mixed.ours),
        ("from-ours", mixed.ours, mixed.builtin),
    ):
        with PrefillDecode(prefill, decode) as service:
            prompts = {f"at-once-{name}-{number}": prompt(60 + 90 * number, f"{name} {number}") for number in range(4)}
            answers = service.pd_concurrently(prompts)
            for key, text in prompts.items():
                assert answers[key].ok, answers[key].error
                assert answers[key].token_ids == service.alone(text).token_ids


def test_our_engine_was_loaded_by_the_name_of_the_plugin(mixed: BuiltinAndOurs) -> None:
    log = mixed.ours.log()
    assert "kv_connector='NixlActorConnector'" in log
    assert "kv_connector_module_path=None" in log


def test_the_answer_shows_when_the_kv_is_that_of_another_prompt(mixed: BuiltinAndOurs) -> None:
    """What all comparisons of answers rest on."""
    for prefill, decode in ((mixed.builtin, mixed.ours), (mixed.ours, mixed.builtin)):
        with PrefillDecode(prefill, decode) as service:
            asked, other = prompt(200, f"asked {prefill.name}"), prompt(200, f"other {prefill.name}")
            wrong = first_that_is_ok(service, lambda attempt: service.decode_from_another(asked, other))  # noqa: B023
            assert wrong.token_ids != service.alone(asked).token_ids
