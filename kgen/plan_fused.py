"""The launches of single_pass and recompute and their shared memory, from the tile."""

from __future__ import annotations

from kgen.fused import (
    CHUNK_C,
    CONSUMERS,
    PREPARE_BLOCKS,
    PREPARE_THREADS,
    THREADS,
    FusedTile,
)
from kgen.launches import Launch, SmemRegion, Team
from kgen.tiling import round_up


def fused_launches(
    name: str, strategy: str, tile: FusedTile, chain_arguments: tuple[str, ...]
) -> tuple[Launch, ...]:
    """The launch that prepares weights and workspace, and the one that does the rest."""
    single = strategy == "single_pass"
    jobs = tile.units * tile.unit_jobs
    team = Team(
        jobs_per_sample=jobs if single else 2 * jobs,
        unit_jobs=tile.unit_jobs,
        least=tile.least_blocks() if single else 1,
        aligned=single,
    )
    prepared = ("conv.weight", "workspace", "N")
    norm = ("group_norm.weight", "group_norm.bias")
    return (
        Launch(f"{name}_prepare", 0, PREPARE_THREADS, 0, prepared, blocks=PREPARE_BLOCKS),
        Launch(
            f"{name}_fused", 0, THREADS, tile.smem,
            ("x", *chain_arguments, *norm, "y", "workspace", "N"), team=team,
        ),
    )  # fmt: skip


def fused_smem_map(kernel: str, tile: FusedTile) -> tuple[SmemRegion, ...]:
    """Where the fused kernel keeps what; regions start at multiples of 16 bytes."""
    sums, norms, affine, barriers = tile.smem_small
    blocks = CHUNK_C // tile.math.slice_channels
    images = tile.image_chunks if tile.weights_resident else 1
    rows = f"[{tile.in_rows}][{tile.g.stride[1]}][{tile.pitch_x}]"
    regions = (
        ("smem_weights", images * tile.chunk_weight_bytes,
         f"[{images}][{tile.math.sets}][{2 * tile.steps}][64] slices"),
        ("smem_x_parts", tile.slots * tile.part_bytes, f"[{tile.slots}][{blocks}]{rows} slices"),
        ("smem_tiles", CONSUMERS * tile.smem_out,
         f"float [{CONSUMERS}][{tile.slab_channels}][{tile.pitch_channel}]"),
        ("smem_sums", sums, f"RowSums [{CONSUMERS}][2][64]"),
        ("smem_norms", norms, f"Norm [2][{tile.slab_channels}]"),
        ("smem_affine", affine, f"float2 [{tile.g.C_out}]: gamma, beta"),
        ("smem_barriers", barriers, f"mbarrier [{tile.mbarriers}]"),
    )  # fmt: skip
    found, offset = [], 0
    for region, size, layout in regions:
        found.append(SmemRegion(kernel, region, offset, size, layout))
        offset += round_up(size, 16)
    return tuple(found)
