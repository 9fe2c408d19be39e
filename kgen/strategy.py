"""Which strategy suits a spec, what each would take, and whether it fits at all."""

from __future__ import annotations

from kgen.arch import ARCHS, Arch
from kgen.chain import fold
from kgen.geometry import Geometry
from kgen.spec import INT_MAX, Schedule, Spec
from kgen.tiling import TILE_KNOBS, complete

# Of the fp32 pipe that cuDNN's convolution without TF32 reached on the flagship's shape, an H200.
LIBRARY_SHARE = 1 / 3
LAUNCH_SECONDS = 3e-6  # that a kernel takes however little it does
HYBRID_THREADS = 512
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
    if spec.schedule.strategy is not None:
        return spec.schedule.strategy, (f"strategy {spec.schedule.strategy}: given by the spec",)
    knobs = [key for key in (*TILE_KNOBS, "math") if getattr(spec.schedule, key) is not None]
    if knobs:
        return "two_kernel", (f"strategy two_kernel: implied by {knobs[0]}",)
    times = {name: predicted_ms(spec, g, arch, name) for name in ("two_kernel", "hybrid")}
    for name, other in (("two_kernel", "hybrid"), ("hybrid", "two_kernel")):
        if times[name] is None:
            return other, (f"strategy {other}: {name} does not fit the targets",)
    best = min(times, key=lambda name: times[name] or float("inf"))
    listed = ", ".join(f"{name} {time:.3g} ms" for name, time in times.items() if time is not None)
    samples = "one sample" if g.N is None else f"{g.N} samples"
    return best, (f"strategy {best}: predicted for {samples} on {arch.board}: {listed}",)


def predicted_ms(spec: Spec, g: Geometry, arch: Arch, strategy: str) -> float | None:
    """Predicted time of a strategy in ms, for one sample where the batch is dynamic.

    A coarse model, meant for comparing strategies: two_kernel runs its multiply-adds at the
    tile's share of the fp32 pipe and moves x once and y three times; hybrid runs the library's
    convolution at LIBRARY_SHARE of that pipe and moves x once and y four times; each launch costs
    LAUNCH_SECONDS on top. None if it does not fit.
    """
    N = g.N or 1
    x_bytes, y_bytes = 4 * N * g.x_elements, 4 * N * g.y_elements
    fma_seconds = N * g.y_elements * g.taps / arch.fma_rate
    if strategy == "hybrid":
        if hybrid_misfit(spec, g):
            return None
        conv = max(fma_seconds / LIBRARY_SHARE, (x_bytes + y_bytes) / arch.bandwidth)
        return 1e3 * (conv + 3 * y_bytes / arch.bandwidth + 3 * LAUNCH_SECONDS)
    # Threads that were given to hybrid say nothing about a tile.
    schedule = Schedule() if spec.schedule.strategy == "hybrid" else spec.schedule
    tile = complete(g, g.C_out // spec.norm.num_groups, schedule, planned_archs(spec, arch))
    if tile is None:
        return None
    share = tile.cost(arch) * 128 / g.taps  # clocks spent over clocks of the fp32 pipe alone
    conv = max(fma_seconds * share, (x_bytes + y_bytes) / arch.bandwidth)
    return 1e3 * (conv + 2 * y_bytes / arch.bandwidth + 2 * LAUNCH_SECONDS)
