"""What a peer's metadata must have in common with us, wherever things lie: refusals of a handshake.

`require_same_form` checks the metadata before a layout is derived from it (`remote`), `require_same_sizes` checks the
sizes in it against the derived layout. Whether the two sides' memory holds the same, and which ranks read from which,
is checked when the reads are planned (`plan`). Every refusal names a field, both values and what to do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from connector.layout.advertised import advertised_regions, replicated_block_length, sizing_region, ssm_sizes
from connector.layout.geometry import CacheGroup, LayoutMismatch, RankLayout, Region
from connector.layout.shapes import RING, LayerShape
from connector.wire.metadata import AgentMetadata

CPU_ATTENTION = "CPU_ATTN"
"""The attention back end whose blocks are not in the order that a layout's name says."""

SAME_MODEL = "start both engines with the same model, the same --kv-cache-dtype and the same vLLM version"
NUMBER_OF_GROUPS = "number of KV cache groups"
SAME_GROUPS = "start both engines with the same model, and the hybrid KV cache manager on or off on both"
SAME_LAYOUT = "start both engines with the same model, and the same VLLM_KV_CACHE_LAYOUT"
SAME_STATES = (
    "start both engines with the same model, the same num_speculative_tokens in --speculative-config, by which the"
    " convolution of a state and a ring buffer are longer, and the same --mamba-cache-dtype and --mamba-ssm-cache-dtype"
)
SAME_ROWS = (
    "start both engines with the same model, and the same VLLM_KV_CACHE_LAYOUT, --kv-cache-dtype and indexer_kv_dtype"
    " in --attention-config"
)


def is_to_be_packed(local_backend: str, remote_backend: str) -> bool:
    """Whether what is read from a peer with that attention back end has to be put in the order of attention on CPUs."""
    return local_backend == CPU_ATTENTION != remote_backend


def has_ring_buffers(shapes: Iterable[LayerShape]) -> bool:
    return any(component.name == RING for shape in shapes for component in shape.components)


def require_same_form(
    ours: RankLayout,
    metadata: AgentMetadata,
    groups: Sequence[CacheGroup],
    shapes: Collection[LayerShape],
    tp_size: int,
    not_packed: str,
) -> None:
    """`groups` are the cache groups of the peer, whose stages have `tp_size` ranks; `not_packed` says why blocks of K
    and V as the tensor's shape says cannot be packed here; empty: they can. Raises LayoutMismatch.
    """
    _require_same_rows(ours, metadata)
    backends = (ours.attention_backend, metadata.attn_backend_name)
    if is_to_be_packed(*backends):
        if not_packed:
            raise LayoutMismatch("attention_backend", *backends, not_packed)
    elif CPU_ATTENTION in backends and len(set(backends)) > 1:
        advice = (
            "start both engines with the same attention back end: on CPUs the order of K and V in a block depends on "
            "the processor, and only an engine on CPUs can put it in its own"
        )
        raise LayoutMismatch("attention_backend", *backends, advice)
    _require_same_blocks(ours, groups, shapes)
    _require_same_ranks(ours, tp_size, shapes)
    if has_ring_buffers(shapes):
        _require_same_pages(ours, metadata, tp_size)


def _require_same_rows(ours: RankLayout, metadata: AgentMetadata) -> None:
    """Of latent caches. A peer without rows, as pipeline stages are, is read into ours."""
    theirs = metadata.packed_member_layouts
    if not theirs or (ours.pages_in_rows and metadata.block_size != ours.kernel_block_size_tokens):
        return
    for layer in {**ours.pages_in_rows, **theirs}:
        here, there = ours.pages_in_rows.get(layer, "none"), theirs.get(layer, "none")
        if here != there:
            raise LayoutMismatch(f"place and length of {layer} in a row of layers", here, there, SAME_ROWS)


def require_same_sizes(metadata: AgentMetadata, theirs: RankLayout) -> None:
    """`theirs` is what was derived from `metadata`. Raises LayoutMismatch."""
    _require_rows(metadata)
    expected = ssm_sizes(theirs)
    if metadata.ssm_sizes != expected:
        raise LayoutMismatch(f"ssm_sizes of {theirs.tp_size} ranks", expected, metadata.ssm_sizes, SAME_STATES)
    whole_state = replicated_block_length(theirs)
    if metadata.ple_block_len != whole_state:
        raise LayoutMismatch("ple_block_len", whole_state, metadata.ple_block_len, SAME_STATES)
    _require_ring_lengths(theirs)


def _require_same_blocks(ours: RankLayout, theirs: Sequence[CacheGroup], shapes: Iterable[LayerShape]) -> None:
    """If the order of tokens in a block is unknown, both sides need blocks of the same size.

    If a window clips block tables, the peer's must begin where a block of ours does.
    """
    for shape in shapes:
        here, there = (groups[shape.group].positions_per_block for groups in (ours.cache_groups, theirs))
        if shape.clipped and there % here:
            advice = "its window needs a --block-size on P that is a multiple of D's, or D without a prefix cache"
            raise LayoutMismatch(f"block size of {shape.name}", here, there, advice)
        here, there = (groups[shape.group].tokens_per_kernel_block for groups in (ours.cache_groups, theirs))
        if shape.whole_blocks and here != there:
            advice = "start both engines with the same --block-size: where a block holds which token is not known"
            raise LayoutMismatch(f"block size of {shape.name}", here, there, advice)


def _require_same_ranks(ours: RankLayout, tp_size: int, shapes: Iterable[LayerShape]) -> None:
    """If it is unknown how the ranks share a layer, both sides need the same number of them: rank r reads rank r."""
    for shape in shapes:
        if shape.whole_ranks and ours.tp_size != tp_size:
            advice = f"start both engines with the same tensor parallel size: how ranks share {shape.name} is unknown"
            raise LayoutMismatch("tp_size", ours.tp_size, tp_size, advice)


def _require_same_pages(ours: RankLayout, metadata: AgentMetadata, tp_size: int) -> None:
    """A ring buffer is copied as it is, and its place in memory depends on the pages of other layers."""
    if ours.layout_name != metadata.kv_cache_layout:
        raise LayoutMismatch("kv_cache_layout", ours.layout_name, metadata.kv_cache_layout, SAME_LAYOUT)
    if ours.tp_size != tp_size and not metadata.region_members:
        advice = "with ring buffers the built-in connector needs an engine of the same tensor parallel size"
        raise LayoutMismatch("tp_size", ours.tp_size, tp_size, advice)


def _require_rows(metadata: AgentMetadata) -> None:
    """With blocks outermost, a row holds a block of every region. A built-in peer may state shorter strides."""
    if not metadata.kv_cache_layout.startswith("B"):
        return
    addresses = metadata.kv_caches_base_addr
    ends = (address + length for address, length in zip(addresses, metadata.block_lens, strict=True))
    row_bytes = max(ends) - min(addresses)
    if min(metadata.block_strides) < row_bytes:
        advice = "use another VLLM_KV_CACHE_LAYOUT, such as LBHNC, on both engines"
        raise LayoutMismatch("block_strides", f"at least {row_bytes}", min(metadata.block_strides), advice)


def _require_ring_lengths(theirs: RankLayout) -> None:
    """A ring buffer's length says how many tokens it holds, which depends on speculative decoding: the peer must state
    one."""
    missing = {region.group for region in theirs.regions if _is_ring(region)}
    for advertised in advertised_regions(theirs):
        told = sizing_region(advertised.members)
        if _is_ring(told):
            alike = [member for member in advertised.members if member.block_length_bytes == told.block_length_bytes]
            missing -= {member.group for member in alike}
    if missing:
        advice = "all of them begin where other layers do, whose length is advertised: they cannot be compared"
        raise LayoutMismatch(f"length of ring buffers of cache group {min(missing)}", "required", "unknown", advice)


def _is_ring(region: Region) -> bool:
    return region.pieces[0].component == RING
