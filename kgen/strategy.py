"""Which strategy suits a spec, what each would take, and whether it fits at all."""

from __future__ import annotations

from functools import lru_cache

from kgen.arch import ARCHS, Arch
from kgen.chain import fold
from kgen.fused import (
    IN_FLIGHT,
    MAX_ACCUMULATORS,
    PORTABLE_ACCUMULATORS,
    THREADS,
    FusedTile,
    choices,
    grid,
)
from kgen.geometry import Geometry
from kgen.math_kinds import DEFAULT_MATH, FFMA, MATHS
from kgen.spec import FUSED, INT_MAX, STRATEGIES, Schedule, Spec
from kgen.tiling import TILE_KNOBS, complete

# Of the fp32 pipe that cuDNN's convolution without TF32 reached on the flagship's shape, an H200.
LIBRARY_SHARE = 1 / 3
LAUNCH_SECONDS = 3e-6  # that a kernel takes however little it does
HYBRID_THREADS = 512
EXPOSED_CLOCKS = 10000  # from a unit's last products to its last store
# Time of a job over what its slowest part alone would take: 1.1 to 2.6 where it was measured, see
# benchmarks/NOTES.md.
OVERLAP_LOSS = 1.4
FILL_CLOCKS = 15000  # of the fused kernel before its first and after its last job
HYBRID_VALUES = 32  # values a thread of the hybrid kernel reads before it merges their moments


def planned_archs(spec: Spec, arch: Arch) -> tuple[Arch, ...]:
    """The generations that a plan must fit: the one it is optimised for, then the targets."""
    others = (ARCHS[target] for target in spec.targets)
    return tuple(dict.fromkeys((arch, *others)))


def hybrid_threads(g: Geometry, group_channels: int, vec: int) -> int:
    """Threads of the hybrid kernel: one vector each at least, HYBRID_THREADS at most."""
    vectors = group_channels * g.P * g.Q // vec
    return min(HYBRID_THREADS, max(32, -(-vectors // 32) * 32))


def hybrid_smem(group_channels: int, threads: int, coefficients: int) -> tuple[int, int, int]:
    """Dynamic shared memory of the hybrid kernel, bytes: affine pairs, moments, coefficients."""
    return 8 * group_channels, 12 * (threads // 32), 4 * group_channels * coefficients


def hybrid_misfit(spec: Spec, g: Geometry) -> str:
    """Why hybrid cannot run a spec, with the limit; empty if it can on all targets."""
    channels = g.C_out // spec.norm.num_groups
    threads = spec.schedule.threads or hybrid_threads(g, channels, vector_width(g))
    group = channels * g.P * g.Q
    if group + threads * HYBRID_VALUES > INT_MAX:
        return f"a group has {group} elements, hybrid indexes fewer than {INT_MAX}"
    smem = sum(hybrid_smem(channels, threads, len(fold(spec)[0])))
    for target in spec.targets:
        limit = ARCHS[target].smem_per_block
        if smem > limit:
            return f"a hybrid block needs {smem} bytes of shared memory, {target} has {limit}"
    return ""


def vector_width(g: Geometry) -> int:
    """Floats of one memory instruction that never straddles two output planes."""
    return next(width for width in (4, 2, 1) if g.P * g.Q % width == 0)


def choose_strategy(spec: Spec, g: Geometry, arch: Arch) -> tuple[str, tuple[str, ...]]:
    """The strategy and the reasons for it, one line each."""
    schedule = spec.schedule
    if schedule.strategy is not None:
        return schedule.strategy, (f"strategy {schedule.strategy}: given by the spec",)
    if schedule.math in MATHS:
        candidates: tuple[str, ...] = FUSED
        why = f"math {schedule.math} is for {' and '.join(FUSED)}; "
    else:
        knobs = [key for key in (*TILE_KNOBS, "math") if getattr(schedule, key) is not None]
        if knobs:
            return "two_kernel", (f"strategy two_kernel: implied by {knobs[0]}",)
        candidates, why = STRATEGIES, ""
        if schedule.threads not in (None, THREADS):
            candidates = tuple(name for name in STRATEGIES if name not in FUSED)
            why = f"threads {schedule.threads}, {' and '.join(FUSED)} have {THREADS}; "
    found = {name: predicted_ms(spec, g, arch, name) for name in candidates}
    times = {name: time for name, time in found.items() if time is not None}
    misfits = tuple(
        f"{name} does not fit: {fused_misfit(spec, g, arch, name)}"
        for name in candidates
        if name in FUSED and name not in times
    )
    if not times:
        return candidates[-1], misfits
    best = min(times, key=times.__getitem__)
    listed = ", ".join(f"{name} {time:.3g} ms" for name, time in times.items())
    samples = "one sample" if g.N is None else f"{g.N} samples"
    reason = f"strategy {best}: {why}predicted for {samples} on {arch.board}: {listed}"
    return best, (reason, *misfits)


def fused_misfit(spec: Spec, g: Geometry, arch: Arch, strategy: str) -> str:
    """Why single_pass or recompute cannot run a spec, with the limit; empty if it can."""
    archs = planned_archs(spec, arch)
    return _search(spec.schedule, g, spec.norm.num_groups, archs, strategy)[1]


def complete_fused(spec: Spec, g: Geometry, arch: Arch, strategy: str) -> FusedTile | None:
    """The tile that is expected to be fastest on `arch`, fits all targets and keeps every knob."""
    archs = planned_archs(spec, arch)
    return _search(spec.schedule, g, spec.norm.num_groups, archs, strategy)[0]


@lru_cache(maxsize=256)
def _search(
    schedule: Schedule, g: Geometry, num_groups: int, archs: tuple[Arch, ...], strategy: str
) -> tuple[FusedTile | None, str]:
    """The best tile, or None and what the nearest one lacks."""
    math_name = schedule.math if schedule.math in MATHS else DEFAULT_MATH
    portable = not all(one.warpgroup_products for one in archs)
    limit = PORTABLE_ACCUMULATORS if portable else MAX_ACCUMULATORS
    tiles = choices(g, num_groups, str(math_name), limit, schedule.tile_w)
    if schedule.tile_h is not None:
        tiles = [tile for tile in tiles if tile.tile_h == schedule.tile_h]
    if not tiles:
        return None, "no tile has the given tile_h and tile_w"
    smem = min(archs, key=lambda one: one.smem_per_block)
    small = [tile for tile in tiles if tile.smem <= smem.smem_per_block]
    if not small:
        least = min(tile.smem for tile in tiles)
        return None, (
            f"the smallest tile needs {least} bytes of shared memory, {smem.name} has "
            f"{smem.smem_per_block}"
        )
    if strategy == "single_pass":
        sms = min(archs, key=lambda one: one.sms)
        needed = min(tile.least_blocks() for tile in small)
        small = [tile for tile in small if tile.least_blocks() <= sms.sms]
        if not small:
            return None, (
                f"what is normalised together takes {needed} SMs to hold, {sms.board} ({sms.name}) "
                f"has {sms.sms}"
            )
    return min(small, key=lambda tile: fused_seconds(tile, archs[0], strategy)), ""


def fused_seconds(tile: FusedTile, arch: Arch, strategy: str) -> float:
    """Expected time of the fused kernel, for one sample where the batch is dynamic."""
    single = strategy == "single_pass"
    blocks = grid(tile.unit_jobs, arch.sms, aligned=single)
    rounds = -(-(tile.g.N or 1) * tile.units * tile.unit_jobs // blocks)
    clock = arch.fma_rate / 128 / arch.sms
    clocks = max(tile.costs(arch, stores=True).values())
    if not single:
        clocks += max(tile.costs(arch, stores=False).values())
    elif 2 * tile.unit_jobs > IN_FLIGHT * blocks:
        # No second unit fits beside the first: nothing covers the wait for statistics.
        clocks += EXPOSED_CLOCKS / -(-tile.unit_jobs // blocks)
    return (OVERLAP_LOSS * rounds * clocks + FILL_CLOCKS) / clock


def predicted_ms(spec: Spec, g: Geometry, arch: Arch, strategy: str) -> float | None:
    """Predicted time of a strategy in ms, for one sample where the batch is dynamic.

    A coarse model, meant for comparing strategies. single_pass and recompute: see
    `FusedTile.costs`. two_kernel runs its multiply-adds at the tile's share of the fp32 pipe and
    moves x once and y three times; hybrid runs the library's convolution at LIBRARY_SHARE of that
    pipe and moves x once and y four times; each launch costs LAUNCH_SECONDS on top. None if it
    does not fit.
    """
    N = g.N or 1
    x_bytes, y_bytes = 4 * N * g.x_elements, 4 * N * g.y_elements
    fma_seconds = N * g.y_elements * g.taps / arch.fma_rate
    # Knobs that were given to another strategy say nothing about this one.
    schedule = spec.schedule
    fused = schedule.strategy in FUSED or schedule.math in MATHS
    if strategy in FUSED:
        if schedule.strategy in ("hybrid", "two_kernel") or schedule.math == FFMA:
            schedule = Schedule()
        archs = planned_archs(spec, arch)
        found = _search(schedule, g, spec.norm.num_groups, archs, strategy)[0]
        if found is None:
            return None
        seconds = fused_seconds(found, arch, strategy)
        floor = (x_bytes + y_bytes) / arch.bandwidth
        return 1e3 * (max(seconds, floor) + 2 * LAUNCH_SECONDS)
    if strategy == "hybrid":
        if hybrid_misfit(spec, g):
            return None
        conv = max(fma_seconds / LIBRARY_SHARE, (x_bytes + y_bytes) / arch.bandwidth)
        return 1e3 * (conv + 3 * y_bytes / arch.bandwidth + 3 * LAUNCH_SECONDS)
    if schedule.strategy == "hybrid" or fused:
        schedule = Schedule()
    tile = complete(g, g.C_out // spec.norm.num_groups, schedule, planned_archs(spec, arch))
    if tile is None:
        return None
    share = tile.cost(arch) * 128 / g.taps  # clocks spent over clocks of the fp32 pipe alone
    conv = max(fma_seconds * share, (x_bytes + y_bytes) / arch.bandwidth)
    return 1e3 * (conv + 2 * y_bytes / arch.bandwidth + 2 * LAUNCH_SECONDS)
