"""What a model caches per layer, which part of it a rank holds, and where that part lies in the rank's memory.

`LayerShape` is the same for all ranks of all engines that run the model: components with their number of units and the
bytes of one unit. One rule shards all of them: n units over t ranks are n / t units each, or, when there are fewer
units than ranks, one unit that t / n neighbours hold alike. Grouped-query attention with few KV heads, the latent of
MLA (one unit) and the groups of Mamba's B and C are all this rule.

`paged_pieces` and `state_pieces` say where a rank's part lies in a block of a region. Strides are in bytes; those of
vLLM's tensors can be used as they are, those of a peer follow from the name of its layout (`page_strides`).
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from connector.layout.geometry import Piece

RING, REPLICATED = "ring", "replicated"
"""Components of layers whose blocks are one per request and alike on all ranks: ring buffers, and whole states."""

KEYS, VALUES, KEYS_AND_VALUES, LATENT = "k", "v", "kv", "latent"
"""Components of attention: K and V of a head, both in a form of the attention back end, and what all heads share."""

SLOTS, STATE_OF_RANK = "kv_slots", "state"
"""Components of which nobody knows how they are divided among ranks: slots in place of heads, and what a rank has of a
state. Each rank has units of its own."""


class ImpossibleShard(ValueError):
    """A model that cannot be split over this many ranks. The engine itself should have refused it."""


class Component(msgspec.Struct, frozen=True, kw_only=True):
    """One axis of a layer's cache that tensor parallelism splits."""

    name: str
    units: int
    """In the whole model: KV heads, channels, groups."""
    bytes_per_unit: int
    """Bytes of one token of a unit, or of the whole state where there are no tokens."""
    bytes_per_lane: int = 0
    """0: the components of a token lie side by side. Otherwise a head's block holds its components one after another,
    and each as lanes: so many bytes of the first token, of the second and so on to the last, then the next lane."""


class LayerShape(msgspec.Struct, frozen=True, kw_only=True):
    """The cache of one layer. `components` are in the order in which memory holds them."""

    name: str
    components: tuple[Component, ...]
    group: int = 0
    is_state: bool = False
    """False: a block holds tokens, and all components have the same units."""
    dcp_sharded: bool = False
    """With decode context parallelism, ranks hold different tokens of it."""
    clipped: bool = False
    """A request keeps only its last tokens, in blocks that a prefix cache gives to other requests: no block of ours may
    be filled in part, because others would take it for whole."""
    whole_blocks: bool = False
    """The order of tokens in a block is unknown: it can only be read into a block of the same size."""
    whole_ranks: bool = False
    """How the ranks share it is unknown: it can only be read from an engine with as many ranks, from the same one."""
    heads_unknown: bool = False
    """Each rank here holds one KV head, and nothing here says how many neighbours hold the same one: `units` counts the
    ranks. An engine with fewer heads or ranks than that has to say how many it holds."""
    tokens_per_entry: int = 1
    """More than 1 in a compressed cache, where that many tokens have one entry in place of one each."""

    @property
    def holds_heads(self) -> bool:
        """K and V of heads, which ranks share as they share heads."""
        return self.components[0].name in (KEYS, KEYS_AND_VALUES)


class PageStrides(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes from one layer, block, head and token to the next, and the tokens of a block; or entries for tokens."""

    layer: int
    block: int
    head: int
    token: int
    tokens: int


def attention(name: str, *, heads: int, k_bytes: int, v_bytes: int, group: int = 0) -> LayerShape:
    """Attention: K and V of a head side by side in each token. Sizes are bytes of one head of one token."""
    k = Component(name=KEYS, units=heads, bytes_per_unit=k_bytes)
    v = Component(name=VALUES, units=heads, bytes_per_unit=v_bytes)
    return LayerShape(name=name, components=(k, v), group=group)


def latent(name: str, *, bytes_per_token: int, group: int = 0) -> LayerShape:
    """Multi-head latent attention, or any other cache that all ranks hold alike."""
    component = Component(name=LATENT, units=1, bytes_per_unit=bytes_per_token)
    return LayerShape(name=name, components=(component,), group=group)


def mamba(
    name: str,
    *,
    channels: int,
    groups: int,
    heads: int,
    channel_bytes: int,
    group_bytes: int,
    head_bytes: int,
    group: int = 0,
) -> LayerShape:
    """Mamba 2: the convolution's x, B and C one after another, then the SSM state.

    `channel_bytes`: convolution state of one channel of x; `group_bytes`: of one group of B, and of C; `head_bytes`:
    SSM state of one head. Zero groups is Mamba 1, which has no B and C here; its SSM state has a head per channel.
    """
    components = [Component(name="conv_x", units=channels, bytes_per_unit=channel_bytes)]
    if groups:
        components.append(Component(name="conv_b", units=groups, bytes_per_unit=group_bytes))
        components.append(Component(name="conv_c", units=groups, bytes_per_unit=group_bytes))
    components.append(Component(name="ssm", units=heads, bytes_per_unit=head_bytes))
    return LayerShape(name=name, components=tuple(components), group=group, is_state=True)


def shard(units: int, tp_rank: int, tp_size: int) -> tuple[int, int]:
    """Which of `units` a rank holds: first and one past the last. Raises ImpossibleShard."""
    if units % tp_size and tp_size % units:
        raise ImpossibleShard(f"{units} units cannot be split over {tp_size} ranks")
    start = tp_rank * units // tp_size
    return start, max(start + 1, (tp_rank + 1) * units // tp_size)


def page_strides(
    layout_name: str,
    *,
    layers: int,
    blocks: int,
    heads: int,
    tokens: int,
    bytes_per_token: int,
    padding_bytes: int = 0,
) -> PageStrides:
    """Strides of a tensor whose axes lie in memory in the order of `layout_name`, for instance LBHNC.

    L: layers, B: blocks, H: heads of this rank, N: tokens, C: content of one head of one token, `bytes_per_token` of
    it. `padding_bytes` follow each block (each row of blocks, where B is outermost). Raises ValueError for other names.
    """
    sizes = {"L": layers, "B": blocks, "H": heads, "N": tokens}
    if sorted(layout_name) != sorted("LBHNC") or not layout_name.endswith("C"):
        raise ValueError(f"{layout_name} is not an order of the axes L, B, H, N, with C innermost")
    strides: dict[str, int] = {}
    extent_bytes = bytes_per_token
    for axis in reversed(layout_name[:-1]):
        if axis == "B":
            extent_bytes += padding_bytes
        strides[axis] = extent_bytes
        extent_bytes *= sizes[axis]
    return PageStrides(layer=strides["L"], block=strides["B"], head=strides["H"], token=strides["N"], tokens=tokens)


def paged_pieces(shape: LayerShape, *, tp_rank: int, tp_size: int, strides: PageStrides) -> tuple[Piece, ...]:
    """A rank's part of a layer of tokens, in a block whose first byte is that of its first head's first token.

    Raises ValueError for lanes where a head's tokens are not one after another.
    """
    (units,) = {component.units for component in shape.components}
    start, stop = shard(units, tp_rank, tp_size)
    tokens_are_dense = strides.token == sum(component.bytes_per_unit for component in shape.components)
    if any(component.bytes_per_lane for component in shape.components) and not tokens_are_dense:
        raise ValueError(f"the lanes of {shape.name} need the tokens of a head one after another")
    pieces: list[Piece] = []
    content_bytes = 0
    for component in shape.components:
        lane_bytes = component.bytes_per_lane
        pieces.append(
            Piece(
                layer=shape.name,
                component=component.name,
                start=start,
                stop=stop,
                offset_bytes=content_bytes * (strides.tokens if lane_bytes else 1),
                bytes_per_unit=component.bytes_per_unit,
                unit_stride_bytes=strides.head,
                token_stride_bytes=lane_bytes or strides.token,
                lanes=component.bytes_per_unit // lane_bytes if lane_bytes else 1,
                lane_stride_bytes=lane_bytes * strides.tokens,
                tokens_per_entry=shape.tokens_per_entry,
            )
        )
        content_bytes += component.bytes_per_unit
    return tuple(pieces)


def state_pieces(shape: LayerShape, *, tp_rank: int, tp_size: int) -> tuple[Piece, ...]:
    """A rank's part of a layer of states: the components one after another from the start of a block."""
    pieces: list[Piece] = []
    offset_bytes = 0
    for component in shape.components:
        start, stop = shard(component.units, tp_rank, tp_size)
        pieces.append(
            Piece(
                layer=shape.name,
                component=component.name,
                start=start,
                stop=stop,
                offset_bytes=offset_bytes,
                bytes_per_unit=component.bytes_per_unit,
                unit_stride_bytes=component.bytes_per_unit,
            )
        )
        offset_bytes += (stop - start) * component.bytes_per_unit
    return tuple(pieces)


def moved(pieces: Iterable[Piece], offset_bytes: int) -> tuple[Piece, ...]:
    """The same pieces further into a block."""
    return tuple(msgspec.structs.replace(piece, offset_bytes=piece.offset_bytes + offset_bytes) for piece in pieces)


def counted_by(shape: LayerShape, factor: int) -> LayerShape:
    """The same layer, `factor` of whose units are one."""
    components = (msgspec.structs.replace(each, units=each.units // factor) for each in shape.components)
    return msgspec.structs.replace(shape, components=tuple(components))


def widened(pieces: Iterable[Piece], factor: int) -> tuple[Piece, ...]:
    """The same bytes where units are counted `factor` times: each is that many, all in the same place."""
    if factor == 1:
        return tuple(pieces)
    return tuple(
        msgspec.structs.replace(
            piece,
            start=unit * factor,
            stop=(unit + 1) * factor,
            offset_bytes=piece.offset_bytes + (unit - piece.start) * piece.unit_stride_bytes,
            unit_stride_bytes=0,
        )
        for piece in pieces
        for unit in range(piece.start, piece.stop)
    )


def of_unit(pieces: Iterable[Piece], unit: int) -> tuple[Piece, ...]:
    """One unit of each piece, in a block that holds nothing else."""
    return tuple(msgspec.structs.replace(piece, start=unit, stop=unit + 1, unit_stride_bytes=0) for piece in pieces)
