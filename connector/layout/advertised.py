"""What peers are told about a `RankLayout`: the granularity of the built-in connector of the same version.

Where regions of several cache groups begin at one address, peers are told about one region, with the block length of
one of them. All sizes are told in kernel blocks, also those of states, which are not split. `layout.remote` makes a
layout from such metadata again.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from connector.layout.geometry import RankLayout, Region
from connector.layout.shapes import LATENT, REPLICATED
from connector.wire.metadata import SHARED_GROUP, AgentMetadata


class AdvertisedRegion(msgspec.Struct, frozen=True, kw_only=True):
    """The regions of one address, of different cache groups, as the one region that peers are told about.

    Sizes are of kernel blocks also where a block is a state, which is not split.
    """

    members: tuple[Region, ...]
    name: str
    block_length_bytes: int
    block_stride_bytes: int
    num_blocks: int
    group: int

    @property
    def layers(self) -> list[str]:
        """The layers that have memory here, group by group."""
        return [layer for member in self.members for layer in layers_in_order(member)]


def layers_in_order(region: Region) -> list[str]:
    """The layers of a region in the order in which they lie in a block."""
    return list(dict.fromkeys(piece.layer for piece in sorted(region.pieces, key=lambda piece: piece.offset_bytes)))


def sizing_region(members: Sequence[Region]) -> Region:
    """Among regions that share a base address, the one whose block length is advertised."""
    # As the built-in connector does: the last latent cache decides, and if there is none, the first cache. A region
    # that spans a whole row of layers counts as the last one: the others at its address are layers that open the row.
    latent = [region for region in members if any(piece.component == LATENT for piece in region.pieces)]
    rows = [region for region in latent if region.block_length_bytes == region.block_stride_bytes]
    return (rows or latent or members[:1])[-1]


def advertised_regions(layout: RankLayout) -> list[AdvertisedRegion]:
    """The regions as peers see them, in the order of `layout`."""
    by_address: dict[int, list[Region]] = {}
    for region in layout.regions:
        by_address.setdefault(region.base_address, []).append(region)
    return [_advertised(tuple(members), layout) for members in by_address.values()]


def kernel_blocks_per_state(region: Region, layout: RankLayout) -> int:
    """How many of the kernel blocks that are advertised make one block of `region`: 1 unless it holds states."""
    is_state = not layout.cache_groups[region.group].tokens_per_kernel_block
    return layout.kernel_blocks_per_block if is_state else 1


def _advertised(members: tuple[Region, ...], layout: RankLayout) -> AdvertisedRegion:
    sizes = sizing_region(members)
    parts = kernel_blocks_per_state(sizes, layout)
    groups = {region.group for region in members}
    return AdvertisedRegion(
        members=members,
        name=members[0].name,
        block_length_bytes=sizes.block_length_bytes // parts,
        block_stride_bytes=sizes.block_stride_bytes // parts,
        num_blocks=sizes.num_blocks * parts,
        group=groups.pop() if len(groups) == 1 else SHARED_GROUP,
    )


def ssm_sizes(layout: RankLayout) -> tuple[int, int]:
    """Bytes of the convolution's part and of the SSM's part of a state; zeros where no state is split over ranks."""
    for region in layout.regions:
        *_, last = region.pieces
        if last.component == "ssm":
            return last.offset_bytes, (last.stop - last.start) * last.bytes_per_unit
    return 0, 0


def replicated_block_length(layout: RankLayout) -> int | None:
    """Bytes of a block of the states that all ranks hold alike, as advertised; None where there are none."""
    for region in layout.regions:
        if region.pieces[0].component == REPLICATED:
            return region.block_length_bytes // kernel_blocks_per_state(region, layout)
    return None


def describe(layout: RankLayout, nixl_metadata: bytes) -> AgentMetadata:
    """The metadata that tells a peer about `layout`; `nixl_metadata` is the agent's own part."""
    regions = advertised_regions(layout)
    return AgentMetadata(
        engine_id=layout.engine_id,
        agent_metadata=nixl_metadata,
        kv_caches_base_addr=[region.members[0].base_address for region in regions],
        device_id=layout.device_id,
        num_blocks=min(region.num_blocks for region in regions),
        block_lens=[region.block_length_bytes for region in regions],
        block_strides=[region.block_stride_bytes for region in regions],
        kv_cache_layout=layout.layout_name,
        block_size=layout.kernel_block_size_tokens,
        ssm_sizes=ssm_sizes(layout),
        attn_backend_name=layout.attention_backend,
        physical_blocks_per_logical_kv_block=layout.kernel_blocks_per_block,
        region_num_blocks=[region.num_blocks for region in regions],
        region_group_ids=[region.group for region in regions],
        region_names=[region.name for region in regions],
        region_mem_types=[region.members[0].memory_kind for region in regions],
        dcp_size=layout.dcp_size,
        pcp_size=layout.pcp_size,
        ple_block_len=replicated_block_length(layout),
        region_members=[region.layers for region in regions],
        packed_member_layouts=dict(layout.pages_in_rows),
    )
