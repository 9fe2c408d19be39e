"""A smaller copy of a spec that exercises the same code: same tile, same remainders."""

from __future__ import annotations

from dataclasses import replace

from kgen.arch import Arch
from kgen.constraints import check
from kgen.geometry import geometry
from kgen.plan import Plan, make_plan
from kgen.spec import Schedule, Spec
from kgen.strategy import HYBRID_VALUES

MAX_BATCH = 2
MAX_MACS = 200_000_000  # multiply-adds of one run: a second or two
TILES = 3  # per direction: one at each edge, one between
_BATCHES = 2.3  # of a hybrid block's walk: whole ones and a remainder


def reduced(spec: Spec, arch: Arch) -> tuple[Spec, Plan]:
    """The reduced spec and its plan; the spec itself, and its plan, where it is small already.

    Batch is cut to MAX_BATCH, height and width to TILES tiles with the remainder of the full
    output, the width in steps that keep its alignment; to more of them where the filter would not
    find a row and a column more than it spans. A problem with so many channels that this
    exceeds MAX_MACS is cut to one sample and two tiles. The knobs of the full plan are kept, so
    that the kernel differs in its sizes alone.
    """
    full = make_plan(spec, arch)
    small, plan = _cut(spec, full, MAX_BATCH, TILES)
    if multiply_adds(plan, samples(plan)) > MAX_MACS:
        small, plan = _cut(spec, full, 1, TILES - 1)
    return small, plan


def samples(plan: Plan) -> int:
    """How many samples of a reduced plan are run: its batch, MAX_BATCH where that is dynamic."""
    return plan.g.N or MAX_BATCH


def multiply_adds(plan: Plan, batch: int) -> int:
    """Multiply-adds of one run, those of the hybrid's library convolution left out."""
    return batch * plan.g.y_elements * (1 if plan.strategy == "hybrid" else plan.g.taps)


def _cut(spec: Spec, full: Plan, batch: int, tiles: int) -> tuple[Spec, Plan]:
    fixed, g, arch = _with_knobs(spec, full), full.g, full.arch
    if full.tile is not None:
        tile_h, tile_w = full.tile.tile_h, full.tile.tile_w
    elif full.fused is not None:
        tile_h, tile_w = full.fused.tile_h, full.fused.tile_w
    else:
        rows = HYBRID_VALUES * full.threads * _BATCHES / (full.group_channels * g.Q)
        tile_h, tile_w = max(1, round(rows / tiles)), g.Q
    best = fixed
    span_h, span_w = (
        1 + (taps - 1) * step for taps, step in zip((g.R, g.S), g.dilation, strict=True)
    )
    down = _enough(tiles, g.P, tile_h, g.stride[0], g.H - min(g.H, span_h + 1))
    across = _enough(tiles, g.Q, tile_w, g.stride[1], g.W - min(g.W, span_w + 1))
    for extra in range(4):  # a tile more changes P * Q, on which the vector width depends
        P = _fewer(g.P, tile_h, down + extra)
        Q = _fewer(g.Q, tile_w, across)
        height, width = g.H - (g.P - P) * g.stride[0], g.W - (g.Q - Q) * g.stride[1]
        best = _resized(fixed, batch, height, width)
        plan = make_plan(best, arch, full.separate_reduce)
        if plan.vec == full.vec or P == g.P:
            break
    return best, make_plan(best, arch, full.separate_reduce)


def _enough(tiles: int, size: int, tile: int, stride: int, most: int) -> int:
    """The least number of tiles from `tiles` on that takes at most `most` off the input."""
    while (size - _fewer(size, tile, tiles)) * stride > most:
        tiles += 1
    return tiles


def _fewer(size: int, tile: int, tiles: int) -> int:
    """A smaller size with `tiles` tiles and the same remainder."""
    rest = size % tile or tile
    return min(size, (tiles - 1) * tile + rest)


def _with_knobs(spec: Spec, plan: Plan) -> Spec:
    """The spec with every knob of its plan given."""
    if plan.fused is not None:
        schedule = Schedule.model_validate(
            {
                "strategy": plan.strategy,
                "math": plan.fused.math.name,
                "tile_h": plan.fused.tile_h,
                "tile_w": plan.fused.tile_w,
            }
        )
    elif plan.tile is None:
        schedule = Schedule(strategy="hybrid", threads=plan.threads)
    else:
        tile = plan.tile
        schedule = Schedule(
            strategy="two_kernel",
            tile_h=tile.tile_h,
            tile_w=tile.tile_w,
            tile_k=tile.tile_k,
            tile_c=tile.tile_c,
            pixels=tile.pixels,
            threads=tile.threads,
        )
    return spec.model_copy(update={"schedule": schedule})


def _resized(spec: Spec, most: int, height: int, width: int) -> Spec:
    batch = spec.problem.batch
    problem = spec.problem.model_copy(
        update={
            "batch": batch if batch == "dynamic" else min(batch, most),
            "height": height,
            "width": width,
        }
    )
    small = spec.model_copy(update={"problem": problem})
    return spec if check(small) else small


def describe(spec: Spec, small: Spec, batch: int) -> str:
    """What was run, in words: the sizes, and that they were reduced where they were."""
    g, full = geometry(small.problem), geometry(spec.problem)
    ran = f"x [{batch}, {g.C_in}, {g.H}, {g.W}]"
    if replace(g, N=None) == replace(full, N=None) and batch == (full.N or batch):
        return f"{ran}, the full size"
    whole = f"x [{full.N or 'N'}, {full.C_in}, {full.H}, {full.W}]"
    return f"{ran}, a reduced copy of {whole} with the same tile remainders"
