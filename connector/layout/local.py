"""What this rank knows about itself, and a peer has to match."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from connector.layout.geometry import RankLayout
from connector.layout.landing import Permute
from connector.layout.shapes import LayerShape
from connector.wire.identity import NOT_PACKED, KvIdentity


class LocalRank(msgspec.Struct, frozen=True, kw_only=True):
    """This rank: its memory, and what a peer must match."""

    layout: RankLayout
    shapes: Mapping[str, LayerShape]
    """What each layer caches in the whole model; all ranks of all engines alike."""
    compatibility_hash: str
    identity: KvIdentity
    permute: Permute = Permute.NEVER
    """From which peers READs may land in the peer's order, for the engine thread to permute."""
    as_shaped: Mapping[str, LayerShape] = {}
    """What each layer caches on a peer whose attention keeps K and V as the tensor's shape says. This rank's attention
    does not, and it packs what it reads from such a peer (`landing`). Empty: nothing is packed."""
    not_packed: str = NOT_PACKED
    """Why nothing is packed, and what to do; empty: it is."""
