"""Cache groups that share memory: which layer has which group's block table, addresses do not show."""

from __future__ import annotations

import msgspec
import pytest

from connector.layout.advertised import describe
from connector.layout.geometry import CacheGroup, LayoutMismatch, RankId, RankLayout
from connector.layout.local import LocalRank
from connector.layout.remote import Stated, layout_from_metadata
from connector.layout.shapes import LayerShape, attention
from connector.wire.identity import KvIdentity
from tests.rig.layouts import attention_rank

TOKENS, GROUPS = 16, 3
LAYERS = tuple(f"layers.{number}" for number in range(2 * GROUPS))
IN_TURN, SWAPPED = (0, 1, 2, 0, 1, 2), (0, 1, 2, 0, 2, 1)
IDENTITY = KvIdentity(factors={}, layers={}, group_tokens=(TOKENS,) * GROUPS)


def rank(name: str, groups: tuple[int, ...], address: int) -> tuple[RankLayout, dict[str, LayerShape]]:
    """Two rows of memory, in each of which a layer of each group lies."""
    shapes = {
        layer: attention(layer, heads=2, k_bytes=32, v_bytes=32, group=group)
        for layer, group in zip(LAYERS, groups, strict=True)
    }
    of_each = [
        attention_rank(
            name,
            {layer: shapes[layer]},
            address=address + (number // GROUPS << 16),
            blocks=8,
            tokens=TOKENS,
            groups=(CacheGroup(tokens_per_kernel_block=TOKENS),) * GROUPS,
        )
        for number, layer in enumerate(LAYERS)
    ]
    regions = sorted((region for each in of_each for region in each.regions), key=lambda region: region.base_address)
    return msgspec.structs.replace(of_each[0], regions=tuple(regions)), shapes


def test_layers_that_have_changed_places_are_refused() -> None:
    """Each would be read with the other's block table, without an error."""
    ours, shapes = rank("d", IN_TURN, 1 << 20)
    local = LocalRank(layout=ours, shapes=shapes, compatibility_hash="", identity=IDENTITY)

    def see(groups: tuple[int, ...]) -> RankLayout:
        theirs, _ = rank("p", groups, 1 << 24)
        said = Stated(heads={}, groups=dict(zip(LAYERS, groups, strict=True)), group_tokens=(TOKENS,) * GROUPS)
        metadata = describe(theirs, b"agent")
        return layout_from_metadata(metadata, rank=RankId(0, 0), tp_size=1, local=local, stated=said)

    assert see(IN_TURN).engine_id == "p"
    with pytest.raises(LayoutMismatch) as refused:
        see(SWAPPED)
    assert (refused.value.field, refused.value.local, refused.value.remote) == ("cache group of layers.4", "1", "2")
