"""The cache of a model for tests without vLLM: layers whose blocks all ranks hold alike, each layer a region."""

from __future__ import annotations

from connector.layout.geometry import Region
from connector.layout.shapes import LayerShape, PageStrides, latent, paged_pieces

TOKENS = 32
"""Of a block."""


def latent_cache(
    base_addresses: list[int], *, block_bytes: int, block_stride_bytes: int, num_blocks: int
) -> tuple[tuple[Region, ...], dict[str, LayerShape]]:
    """Regions and shapes of layers.0, layers.1 and so on, one at each address."""
    bytes_per_token = block_bytes // TOKENS
    shapes = [latent(f"layers.{layer}", bytes_per_token=bytes_per_token) for layer in range(len(base_addresses))]
    strides = PageStrides(layer=0, block=block_stride_bytes, head=0, token=bytes_per_token, tokens=TOKENS)
    regions = tuple(
        Region(
            name=shape.name,
            base_address=address,
            block_length_bytes=block_bytes,
            block_stride_bytes=block_stride_bytes,
            num_blocks=num_blocks,
            memory_kind="DRAM",
            pieces=paged_pieces(shape, tp_rank=0, tp_size=1, strides=strides),
        )
        for shape, address in zip(shapes, base_addresses, strict=True)
    )
    return regions, {shape.name: shape for shape in shapes}
