"""Spec + arch -> Plan: everything the templates and the launcher need, decided and frozen.

The Plan is the only thing a template sees. Sizes are in elements unless a name ends in `bytes`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from kgen.arch import ARCHS, SMEM_RESERVED, Arch
from kgen.chain import Coefficient, Step, fold, pointer_name
from kgen.fused import IN_FLIGHT, PORTABLE_ACCUMULATORS, THREADS, FusedTile
from kgen.geometry import Geometry, geometry
from kgen.launches import Argument, Launch, SmemRegion
from kgen.ops import OPS
from kgen.plan_fused import fused_launches, fused_smem_map
from kgen.spec import FUSED, Spec
from kgen.strategy import (
    HYBRID_VALUES,
    choose_strategy,
    complete_fused,
    hybrid_smem,
    hybrid_threads,
    planned_archs,
    vector_width,
)
from kgen.tiling import Tile, complete, round_up
from kgen.version import __version__

NORM_THREADS = 128
NORM_VECTORS = 8  # vector loads that a thread of the normalise kernel keeps in flight
# More partial moments than this for one (sample, group) are reduced once, by their own launch,
# instead of by every block that normalises.
INLINE_PARTIALS = 1024
# Registers of threads that multiply, normalise and load in the fused kernel: 128 on average.
REGISTER_SPLIT = {"single_pass": (168, 72, 104), "recompute": (168, 72, 104)}


@dataclass(frozen=True)
class Plan:
    """The decisions for one spec. `tile` is None for strategies without one."""

    kgen_version: str
    spec_name: str
    spec_hash: str
    strategy: str
    template: str
    arch: Arch
    targets: tuple[str, ...]
    g: Geometry
    num_groups: int
    eps: float
    has_conv_bias: bool
    padding: tuple[int, int] | str
    parameters: tuple[str, ...]
    torch_chain: tuple[str, ...]
    coefficients: tuple[Coefficient, ...]
    steps: tuple[Step, ...]
    vec: int
    tile: Tile | None
    threads: int
    norm_threads: int
    norm_vectors: int
    separate_reduce: bool
    launches: tuple[Launch, ...]
    smem_map: tuple[SmemRegion, ...]
    workspace_per_sample: int
    reasons: tuple[str, ...] = field(default=())
    fused: FusedTile | None = None
    workspace_fixed: int = 0

    @property
    def group_channels(self) -> int:
        """Channels of one group."""
        return self.g.C_out // self.num_groups

    @property
    def x_alignment(self) -> int:
        """Bytes that the address of x must be a multiple of."""
        return 4 * self.tile.copy if self.tile else 4

    @property
    def conv_parameters(self) -> tuple[str, ...]:
        """C++ names of the chain's pointers: the convolution's bias first, if it has one."""
        bias = ("conv_bias",) if self.has_conv_bias else ()
        return bias + tuple(pointer_name(name) for name in self.parameters)

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """Every parameter of the block, in the order of the emitted op."""
        bias = (Argument("conv_bias", "conv.bias"),) if self.has_conv_bias else ()
        return (
            Argument("conv_weight", "conv.weight"),
            *bias,
            *(Argument(name, name) for name in self.parameters),
            Argument("gamma", "group_norm.weight"),
            Argument("beta", "group_norm.bias"),
        )

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the block's parameters by state_dict key."""
        g = self.g
        return {
            one.key: (g.C_out, g.C_in, g.R, g.S)
            if one.key == "conv.weight"
            else ((g.C_out, 1, 1) if one.key in self.parameters else (g.C_out,))
            for one in self.arguments
        }

    @property
    def shape_arguments(self) -> tuple[str, ...]:
        """Arguments of the eager block's constructor that give a parameter's shape."""
        return tuple(f"{name}_shape" for name in self.parameters)

    @property
    def head(self) -> tuple[Step, ...]:
        """The chain's leading affine steps, which the fused kernel folds into one multiply-add."""
        return tuple(takewhile(lambda step: OPS[step.op].fold is not None, self.steps))

    @property
    def tail(self) -> tuple[Step, ...]:
        """The steps after the head, the first one on a prescaled value where it has that form."""
        steps = self.steps[len(self.head) :]
        if steps and self.prescale:
            return (replace(steps[0], op=f"{steps[0].op}_prescaled"), *steps[1:])
        return steps

    @property
    def prescale(self) -> str | None:
        """The constant, as C++, that the head multiplies by for the first step of the tail."""
        steps = self.steps[len(self.head) :]
        return OPS[steps[0].op].prescale if steps else None

    @property
    def tail_sources(self) -> tuple[str, ...]:
        """Files of device functions of the tail that the chain itself does not use, sorted."""
        return tuple(f"device/pointwise/{step.op}.cuh" for step in self.tail if step.op not in OPS)

    @property
    def in_flight(self) -> int:
        """Jobs of a block in flight in the fused kernel."""
        return IN_FLIGHT

    @property
    def registers(self) -> tuple[int, int, int] | None:
        """Registers of threads that multiply, normalise, load; None where all have the same."""
        wide = self.fused is not None and self.fused.accumulators > PORTABLE_ACCUMULATORS
        return REGISTER_SPLIT[self.strategy] if wide else None

    @property
    def chain_sources(self) -> tuple[str, ...]:
        """Files of the pointwise device functions that the chain uses, sorted."""
        return tuple(sorted({f"device/pointwise/{step.op}.cuh" for step in self.steps}))


def make_plan(spec: Spec, arch: Arch | None = None, separate_reduce: bool | None = None) -> Plan:
    """Decide everything for a checked spec. Pure: same arguments, same plan.

    arch: the generation to optimise for; the spec's first target if None. separate_reduce:
    whether two_kernel's partial moments get a launch of their own; None lets their number decide.
    """
    arch = arch or ARCHS[spec.targets[0]]
    g = geometry(spec.problem)
    coefficients, steps = fold(spec)
    strategy, reasons = choose_strategy(spec, g, arch)
    common = _Common(
        spec=spec,
        arch=arch,
        g=g,
        coefficients=coefficients,
        steps=steps,
        vec=vector_width(g),
    )
    if strategy == "hybrid":
        return _hybrid(common, reasons)
    if strategy in FUSED:
        return _fused(common, strategy, reasons)
    return _two_kernel(common, reasons, separate_reduce)


@dataclass(frozen=True)
class _Common:
    """What all strategies need."""

    spec: Spec
    arch: Arch
    g: Geometry
    coefficients: tuple[Coefficient, ...]
    steps: tuple[Step, ...]
    vec: int

    @property
    def chain_arguments(self) -> tuple[str, ...]:
        bias = ("conv.bias",) if self.spec.problem.conv_bias else ()
        return bias + self.spec.parameters

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of a Plan that do not depend on the strategy."""
        spec = self.spec
        return {
            "kgen_version": __version__,
            "spec_name": spec.name,
            "spec_hash": spec.hash(),
            "arch": self.arch,
            "targets": spec.targets,
            "g": self.g,
            "num_groups": spec.norm.num_groups,
            "eps": spec.norm.eps,
            "has_conv_bias": spec.problem.conv_bias,
            "padding": spec.problem.padding,
            "parameters": spec.parameters,
            "torch_chain": tuple(
                OPS[step.op].torch.format(parameter=step.parameter) for step in spec.pointwise
            ),
            "coefficients": self.coefficients,
            "steps": self.steps,
            "vec": self.vec,
        }


def _two_kernel(common: _Common, reasons: tuple[str, ...], separate_reduce: bool | None) -> Plan:
    spec, g, name = common.spec, common.g, common.spec.name
    group_channels = g.C_out // spec.norm.num_groups
    tile = complete(g, group_channels, spec.schedule, planned_archs(spec, common.arch))
    assert tile is not None, "check(spec) was not called"
    tiles = tile.tiles[0] * tile.tiles[1]
    units = g.C_out // tile.unit
    if separate_reduce is None:
        separate_reduce = tiles * units // spec.norm.num_groups > INLINE_PARTIALS
    plane = g.P * g.Q
    norm_threads = min(NORM_THREADS, max(32, -(-plane // common.vec // 32) * 32))
    norm_vectors = min(NORM_VECTORS, max(1, -(-plane // (norm_threads * common.vec))))
    segments = -(-plane // (norm_threads * norm_vectors * common.vec))
    launches = [
        Launch(
            f"{name}_conv", tile.blocks, tile.threads, tile.smem,
            ("x", "conv.weight", *common.chain_arguments, "y", "workspace"),
        ),
        Launch(
            f"{name}_normalise", g.C_out * segments, norm_threads, 0,
            ("y", "workspace", "group_norm.weight", "group_norm.bias"),
        ),
    ]  # fmt: skip
    if separate_reduce:
        launches.insert(
            1, Launch(f"{name}_reduce", spec.norm.num_groups, NORM_THREADS, 0, ("workspace",))
        )
    x_end = -(-tile.smem_x // 16) * 16
    moments = f"Moments [{tile.tile_k // tile.unit}][{tile.pixel_threads // 32}]"
    smem_map = (
        SmemRegion(f"{name}_conv", "smem_x", 0, tile.smem_x,
                   f"float [{tile.tile_c}][{tile.in_h}][{tile.pitch_x}]"),
        SmemRegion(f"{name}_conv", "smem_w", x_end, tile.smem_w,
                   f"float [{tile.tile_c}][{g.R}][{g.S}][{tile.pitch_k}]"),
        SmemRegion(f"{name}_conv", "smem_moments", x_end + tile.smem_w, tile.smem_moments,
                   moments),
    )  # fmt: skip
    return Plan(
        **common.fields,
        strategy="two_kernel",
        template="two_kernel.cu.j2",
        tile=tile,
        threads=tile.threads,
        norm_threads=norm_threads,
        norm_vectors=norm_vectors,
        separate_reduce=separate_reduce,
        launches=tuple(launches),
        smem_map=smem_map,
        workspace_per_sample=2 * units * tiles
        + (2 * spec.norm.num_groups if separate_reduce else 0),
        reasons=reasons,
    )


def _hybrid(common: _Common, reasons: tuple[str, ...]) -> Plan:
    spec, g, name = common.spec, common.g, common.spec.name
    group_channels = g.C_out // spec.norm.num_groups
    threads = spec.schedule.threads or hybrid_threads(g, group_channels, common.vec)
    affine, moments, coefficients = hybrid_smem(group_channels, threads, len(common.coefficients))
    launch = Launch(
        # Whole vectors: the compiler reads three floats of the last moments as four.
        f"{name}_norm", spec.norm.num_groups, threads,
        round_up(affine + moments + coefficients, 16),
        ("conv_out", *common.chain_arguments, "group_norm.weight", "group_norm.bias", "y"),
    )  # fmt: skip
    each = f"{len(common.coefficients)} floats each"
    smem_map = (
        SmemRegion(f"{name}_norm", "smem_affine", 0, affine,
                   f"float2 [{group_channels}]: gamma / deviation, beta"),
        SmemRegion(f"{name}_norm", "smem_moments", affine, moments, f"Moments [{threads // 32}]"),
        SmemRegion(f"{name}_norm", "smem_coefficients", affine + moments, coefficients,
                   f"Coefficients [{group_channels}], {each}"),
    )  # fmt: skip
    return Plan(
        **common.fields,
        strategy="hybrid",
        template="hybrid.cu.j2",
        tile=None,
        threads=threads,
        norm_threads=threads,
        norm_vectors=HYBRID_VALUES // common.vec,
        separate_reduce=False,
        launches=(launch,),
        smem_map=smem_map,
        workspace_per_sample=0,
        reasons=reasons,
    )


def _fused(common: _Common, strategy: str, reasons: tuple[str, ...]) -> Plan:
    spec, name = common.spec, common.spec.name
    tile = complete_fused(spec, common.g, common.arch, strategy)
    assert tile is not None, "check(spec) was not called"
    return Plan(
        **common.fields,
        strategy=strategy,
        template="fused.cu.j2",
        tile=None,
        threads=THREADS,
        norm_threads=THREADS,
        norm_vectors=1,
        separate_reduce=False,
        launches=fused_launches(name, strategy, tile, common.chain_arguments),
        smem_map=fused_smem_map(f"{name}_fused", tile),
        workspace_fixed=tile.workspace_fixed_bytes // 4,
        workspace_per_sample=tile.workspace_sample_bytes // 4,
        reasons=reasons,
        fused=tile,
    )


def resident_blocks(plan: Plan) -> int:
    """Blocks of the plan's first kernel that fit one SM at once, by the plan's own estimate."""
    if plan.tile is not None:
        return plan.tile.blocks_per_sm(plan.arch)
    if plan.fused is not None:
        return 1  # by its registers
    by_threads = plan.arch.threads_per_sm // plan.threads
    smem = plan.launches[0].smem_bytes + SMEM_RESERVED
    return min(plan.arch.blocks_per_sm, by_threads, plan.arch.smem_per_sm // smem)
