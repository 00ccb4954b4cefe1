"""Leases between this project's connector and vLLM's own that are renewed by heartbeats, either way round.

With leases that a test can outwait: so they end, where the machine is so busy that heartbeats come seconds late.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.cluster import Room, prompt
from tests.e2e.mixed_pairs import KV_EXPIRED, Mixed, ShortLeases, both_ways, occupied

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(420)]

TOKENS = 100
OVER_SECONDS = 2.0
"""Beyond the end of a lease; less than our lease is longer than the built-in one's."""
NOBODYS = "nobodys"
"""Begins the ids of requests whose leases are meant to end by themselves."""


@pytest.fixture
def mixed(room: Room) -> Iterator[Mixed]:
    with both_ways(room.occupy(ShortLeases)) as mixed:
        yield mixed


def sleep_until(moment: float) -> None:
    """Of the monotonic clock; it may be over already, where it took long to occupy the engines."""
    time.sleep(max(0.0, moment - time.monotonic()))


def test_a_request_that_waits_in_the_queue_for_longer_than_its_lease_is_read(mixed: Mixed) -> None:
    """D's heartbeats renew it. A lease for which no D was asked ends meanwhile, on either P.

    Both ways at once: each engine is busy as D and lends as P.
    """
    pair, before = mixed.pair, mixed.troubles()
    texts = {way: prompt(TOKENS, way.key("late")) for way in mixed.ways}
    alone = {way: way.service.alone(text).token_ids for way, text in texts.items()}
    for way in mixed.ways:
        way.prefilled(prompt(TOKENS, way.key(NOBODYS)), f"{NOBODYS}-{way.decode.name}")
    params = {way: way.prefilled(texts[way], way.key("late")) for way in mixed.ways}
    lent = time.monotonic()
    with ThreadPoolExecutor(2) as pool, occupied(pair.builtin):
        with occupied(pair.ours):
            answers = {
                way: pool.submit(way.service.decode, texts[way], params[way], way.key("late")) for way in mixed.ways
            }
            sleep_until(lent + pair.builtin_lease_seconds + OVER_SECONDS)
            assert not answers[mixed.to_ours].done(), "nothing had to wait"
        sleep_until(lent + pair.our_lease_seconds + OVER_SECONDS)
        assert not answers[mixed.to_builtin].done(), "nothing had to wait"
    for way in mixed.ways:
        answer = answers[way].result()
        assert answer.ok, answer.error
        assert answer.token_ids == alone[way]
        way.assert_read(way.key("late"))
        way.assert_blocks_are_free()
    for lease in pair.traces.ended_leases(mixed.to_builtin.key("late"), pair.our_ranks):
        held_seconds = lease.visits[1].seconds
        assert held_seconds is not None
        assert held_seconds > pair.our_lease_seconds
    for lease in pair.traces.ended_leases(f"{NOBODYS}-{pair.builtin.name}", pair.our_ranks):
        assert lease.states == ("computing", "held", "expired")
    after = mixed.troubles()
    # Each rank counts.
    assert {name: count - before[name] for name, count in after.items() if count != before[name]} == {
        f"{pair.ours.name} {KV_EXPIRED}": pair.our_ranks,
        f"{pair.builtin.name} {KV_EXPIRED}": pair.builtin_ranks,
    }
    # Either P warns of what nobody has released, and of that alone.
    mixed.assert_logs_are_clean(
        allowed=[
            f"Releasing expired KV blocks for request cmpl-{NOBODYS}-",
            f"LeaseExpired: request cmpl-{NOBODYS}-",
        ]
    )
