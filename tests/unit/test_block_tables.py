"""From block tables to READs: what is refused although every id is one that the peer has."""

from __future__ import annotations

import pytest

from connector.layout.geometry import BlockIdError
from connector.protocol import GroupPull, PeerAddress, StartPull
from connector.runtime.block_tables import resolve
from statemachine.lease import LeaseName
from tests.rig.layouts import attention_rank, attention_shapes, plan_engine

BLOCK_TOKENS = 32


def pull(remote_block_ids: list[int], *, tokens: int, remote_tokens: int | None) -> StartPull:
    local = list(range(1, 1 + -(-tokens // BLOCK_TOKENS)))
    group = GroupPull(local_block_ids=local, local_first=0, remote_block_ids=remote_block_ids)
    return StartPull(
        request_id="a",
        lease=LeaseName("remote-a", 1),
        peer=PeerAddress(engine_id="p", host="127.0.0.1", port=1, tp_size=1),
        groups=(group,),
        num_tokens=tokens,
        remote_num_tokens=remote_tokens,
        age_seconds=0.0,
    )


@pytest.mark.parametrize("tokens", [96, 128, 160])
def test_the_end_of_a_window_is_not_taken_for_the_beginning_of_a_prompt(tokens: int) -> None:
    """P keeps a window in a layer where D keeps everything, and has computed 300 tokens: it has let go of the first."""
    shapes = attention_shapes(layers=1, heads=2, head_bytes=64)
    ours = attention_rank("d", shapes, address=1 << 20, blocks=16, tokens=BLOCK_TOKENS)
    theirs = attention_rank("p", shapes, address=1 << 24, blocks=16, tokens=BLOCK_TOKENS)
    plan = plan_engine(ours, [theirs])
    with pytest.raises(BlockIdError, match="5 blocks of 300 tokens, for a group that keeps all 10"):
        resolve(plan, pull([6, 7, 8, 9, 10], tokens=tokens, remote_tokens=300))
    whole = resolve(plan, pull(list(range(6, 16)), tokens=tokens, remote_tokens=300))
    assert [each.remote_ids.tolist() for each in whole.reads] == [list(range(6, 6 + tokens // BLOCK_TOKENS))]
