"""Ways in which a request was reported as loaded with KV that is not its own; each is shown by bytes.

Sizes that a client says wrongly need an engine of several ranks, which the rig does not have: those tests run the
actors of all ranks in this process (tests/actors), on real NIXL and ZMQ. The others run whole engines.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import numpy as np
import pytest

from connector.config import ConnectorOptions
from connector.protocol import PeerAddress
from tests.actors.engines import Engine, lend_by_all, parallel_engine, until
from tests.actors.test_parallel import fill, run
from tests.integration.house import BLOCK_TOKENS, USABLE_BLOCKS, House, check_loaded, check_not_loaded
from tests.rig import BlackHole, EngineRig, RequestSpec, dead_params, expected_output, prompt

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


# ---- sizes that the client says wrongly (scenario 68)


def said(p: Engine, **sizes: int) -> PeerAddress:
    """P as the parameters of a request name it that were not forwarded as P made them."""
    return msgspec.structs.replace(p.address, **sizes)


async def outcome_of(d: Engine, name: str, ps: list[Engine], peer: PeerAddress) -> str:
    """Read three blocks: "right bytes", "WRONG BYTES", or how it failed."""
    whole, theirs, ours = fill(ps), [1, 2, 9], [5, 6, 7]
    d.memory[:] = 0
    d.borrow(name, lend_by_all(ps, f"remote-{name}"), peer, ours, theirs)
    ended = await until(lambda: d.received(name), 20.0)
    if ended.failure is not None:
        return f"{ended.failure.kind}: {ended.failure}"
    return "right bytes" if (d.by_head()[:, ours] == whole[:, theirs]).all() else "WRONG BYTES"


@pytest.mark.parametrize(
    ("ranks", "wrong"),
    [
        (8, {"tp_size": 4}),  # 4 KV heads: each is held by two ranks, and the first four ranks hold two of them
        (1, {"tp_size": 2}),
        (2, {"tp_size": 1}),
        (2, {"tp_size": 4}),
        (1, {"pp_size": 2}),
        (2, {"tp_size": 2, "dcp_size": 2}),
    ],
)
def test_a_request_that_says_wrong_sizes_fails_and_the_right_ones_after_it_are_served(
    ranks: int, wrong: dict[str, int]
) -> None:
    """And every rank of P gets its blocks back."""

    async def test() -> None:
        async with parallel_engine("p", ranks, serves=True) as ps, parallel_engine("d", 1) as (d,):
            first = await outcome_of(d, "wrong", ps, said(ps[0], **wrong))
            after = [await outcome_of(d, f"right-{number}", ps, ps[0].address) for number in range(2)]
            assert after == ["right bytes"] * 2, f"after one that said {wrong} and ended with {first}"
            assert first.startswith("BadParams: ")
            for size in wrong.values():
                assert str(size) in first, f"what was said is not in {first!r}"
            for lent in ("remote-right-0", "remote-right-1"):
                for each in ps:
                    assert not (await until(lambda each=each, lent=lent: each.sent(lent))).expired

    run(test)


@pytest.mark.parametrize(("ranks", "wrong"), [(1, 2), (2, 1), (8, 4)])
def test_a_request_that_says_wrong_sizes_fails_none_that_wait_beside_it(ranks: int, wrong: int) -> None:
    """All come before the first handshake."""

    async def test() -> None:
        options = ConnectorOptions(handshake_timeout_seconds=5.0)
        async with parallel_engine("p", ranks, serves=True) as ps, parallel_engine("d", 1, options=options) as (d,):
            whole = fill(ps)
            names = {"before": ps[0].address, "wrong": said(ps[0], tp_size=wrong), "after": ps[0].address}
            for number, (name, peer) in enumerate(names.items()):
                d.borrow(name, lend_by_all(ps, f"remote-{name}"), peer, [5 + number], [1 + number])
            ended = {name: await until(lambda name=name: d.received(name)) for name in names}
            kinds = {name: each.failure.kind if each.failure else "done" for name, each in ended.items()}
            right = (d.by_head()[:, [5, 7]] == whole[:, [1, 3]]).all()
            assert (kinds, right) == ({"before": "done", "wrong": "BadParams", "after": "done"}, np.True_)

    run(test)


def test_an_engine_serves_on_after_wrong_sizes(house: House) -> None:
    """The same inside the real scheduler: one router that says tp_size 2 of an engine that has 1."""
    tokens = prompt("sizes", 3 * BLOCK_TOKENS)
    params = house.prefill.prefill_all({"sizes-wrong": tokens, "sizes-right": prompt("sizes-right", 70)})
    house.decode.submit(
        RequestSpec("sizes-wrong", tokens, 2, params["sizes-wrong"] | {"tp_size": 2}),
        RequestSpec("sizes-right", prompt("sizes-right", 70), 2, params["sizes-right"]),
    )
    check_not_loaded(house.decode, house.decode.wait("sizes-wrong"), tokens)
    check_loaded(house.decode.wait("sizes-right"), prompt("sizes-right", 70), 2)
    house.expect_loaded(house.decode, "sizes-next", prompt("sizes-next", 70))


# ---- two decode engines, one lease (scenario 69)


@contextmanager
def full_engine(decode: EngineRig, name: str) -> Iterator[None]:
    """Inside, nothing is scheduled on `decode`: a request that waits for a hung engine has nearly all of its blocks.

    For at most as long as a handshake may take. The engine makes steps, so that its actors hear of what waits.
    """
    with BlackHole() as hole:
        blocks = USABLE_BLOCKS - 2
        blocker = RequestSpec(name, prompt(name, blocks * BLOCK_TOKENS), 1, dead_params(hole.port, blocks))
        decode.submit(blocker)
        yield
        decode.wait(name)


def test_two_engines_that_hold_the_same_blocks_are_both_served(house: House) -> None:
    """The samples of one prompt on two data-parallel ranks: the first one is done while the second waits in its queue.
    P lends until both are done."""
    tokens = prompt("siblings", 3 * BLOCK_TOKENS)
    for engine in house.decode_engines:
        house.expect_loaded(engine, f"siblings-warm-up-{id(engine)}", prompt(f"warm-up-{id(engine)}", 40))
    params = house.prefill.prefill("siblings", tokens)
    with full_engine(house.decode, "siblings-blocker"):
        house.decode.submit(RequestSpec("siblings-second", tokens, 2, params))
        house.traces.wait_for_state("hold", "siblings/0", "held")  # its engine steps, and its actors say that it waits
        first = house.recompute.decode("siblings-first", tokens, params, 2)
        check_loaded(first, tokens, 2)
        house.prefill.overwrite_free_blocks()
        assert not house.decode.has_ended("siblings-second"), "nothing is shown"
    second = house.decode.wait("siblings-second")
    assert second.mismatched_pages == 0, f"received {second.received}: {second.mismatched_pages} pages are wrong"
    check_loaded(second, tokens, 2)
    house.prefill.wait_until_whole(10)
    house.traces.expect_plain_lease("siblings")


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_an_engine_that_comes_after_the_release_is_told_so(house: House, policy: str) -> None:
    first, second = (house.recompute, house.decode) if policy == "fail" else (house.decode, house.recompute)
    name, tokens = f"released-{policy}", prompt(f"released-{policy}", 3 * BLOCK_TOKENS)
    params = house.prefill.prefill(name, tokens)
    check_loaded(first.decode(f"{name}-first", tokens, params, 2), tokens, 2)
    house.prefill.wait_until_whole(10)
    assert house.prefill.overwrite_free_blocks() == USABLE_BLOCKS
    outcome = second.decode(f"{name}-second", tokens, params, 2)
    check_not_loaded(second, outcome, tokens)
    assert house.traces.wait_for_state("request", f"{name}-second", "expired")[-1] == "expired"


# ---- fewer tokens than D will load (scenario 71)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_tokens_that_p_does_not_have_are_not_taken_from_its_blocks(house: House, policy: str) -> None:
    """P computed 3 tokens less than D's prompt has. The last block is full on D, and must not be cached as it came."""
    decode = house.decode if policy == "fail" else house.recompute
    name = f"short-{policy}"
    tokens = prompt(name, 4 * BLOCK_TOKENS)
    # The prefill engine's blocks hold somebody's bytes beyond the 125 tokens.
    house.expect_loaded(decode, f"{name}-before", prompt(f"{name}-before", 40))
    house.prefill.wait_until_whole(10)
    house.prefill.overwrite_free_blocks()
    params = house.prefill.prefill(name, tokens[:-3])
    assert params["remote_num_tokens"] == len(tokens) - 3
    decode.submit(RequestSpec(name, tokens, 2, params))
    outcome = decode.wait(name)
    longer = prompt(f"{name}-longer", 4 * BLOCK_TOKENS + 10, tokens)
    next_turn = decode.decode(f"{name}-longer", longer, None, 2)
    wrong_pages = {"loaded": outcome.mismatched_pages, "from the prefix cache": next_turn.mismatched_pages}
    assert wrong_pages == {"loaded": 0, "from the prefix cache": 0}, f"received: {outcome.received}"
    assert next_turn.output_token_ids == expected_output(longer, 2)
    if outcome.finish != "error":
        assert outcome.output_token_ids == expected_output(tokens, 2)
