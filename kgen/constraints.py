"""Every semantic rule of a spec, once. Serves error messages, the tuner and `kgen explain`.

A rule is a generator of issues, registered with the keys it reads: where one of those keys is
itself invalid the rule is skipped, so that one mistake is reported once.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import isqrt

from kgen.arch import ARCHS, REGISTERS_PER_THREAD
from kgen.errors import Issue
from kgen.fused import THREADS as FUSED_THREADS
from kgen.geometry import geometry
from kgen.math_kinds import FFMA, MATHS
from kgen.names import CPP_KEYWORDS, MAX_NAME, MODULE_ATTRIBUTES, YAML_WORDS
from kgen.ops import OPS
from kgen.plan import make_plan
from kgen.spec import FUSED, INT_MAX, GroupNorm, Spec
from kgen.strategy import choose_strategy, fused_misfit, hybrid_misfit
from kgen.tiling import TILE_KNOBS, Tile, complete, fits_registers, round_up, with_stage

Rule = Callable[[Spec], Iterator[Issue]]
_RULES: list[tuple[tuple[str, ...], Rule]] = []

JOB_SLACK = 1 << 16  # numbers of jobs that a block of the fused kernel adds before it compares
FLOAT32_MIN, FLOAT32_MAX = 1.2e-38, 3.4e38  # least normal and greatest value, rounded inwards


def _reads(*paths: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        _RULES.append((paths, rule))
        return rule

    return register


def check(spec: Spec, skip: frozenset[str] = frozenset()) -> list[Issue]:
    """Every rule that `spec` breaks; empty if it is legal for all its targets.

    skip: dotted paths that are already known to be invalid; rules that read them are not run.
    Lines are not filled in: a Spec does not know its file.
    """

    def touched(path: str) -> bool:
        return any(bad == path or bad.startswith((path + ".", path + "[")) for bad in skip)

    issues: list[Issue] = []
    sound = not skip
    for paths, rule in _RULES:
        if any(touched(path) for path in paths):
            continue
        if "*" in paths and not sound:
            continue
        found = list(rule(spec))
        sound = sound and not found
        issues += dict.fromkeys(found)  # a rule may find the same for both axes
    return issues


def divisors(value: int) -> list[int]:
    """Divisors of `value`, ascending."""
    small = [number for number in range(1, isqrt(value) + 1) if value % number == 0]
    return sorted({*small, *(value // number for number in small)})


def nearest(value: int, legal: list[int]) -> int:
    """The legal value nearest to `value`; the smaller one of two equally near."""
    return min(legal, key=lambda one: (abs(one - value), one))


def name_problem(name: str) -> str:
    """Why `name` cannot become a Python package and a C++ function; empty if it can."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name):
        return "must be letters, digits and underscores, and start with a letter"
    if len(name) > MAX_NAME:
        return f"has {len(name)} letters, at most {MAX_NAME} are allowed"
    if name in CPP_KEYWORDS or keyword.iskeyword(name):
        return "is a keyword of C++, CUDA or Python"
    if name.lower() in YAML_WORDS:
        return "is a boolean or empty to other YAML readers"
    if "__" in name or name.endswith("_"):
        return "must not end in an underscore or hold two in a row (reserved in C++)"
    return ""


@_reads("name")
def _name(spec: Spec) -> Iterator[Issue]:
    problem = name_problem(spec.name)
    if problem:
        near = re.sub(r"_+", "_", re.sub(r"\W+", "_", spec.name, flags=re.ASCII)).strip("_")
        near = near[:MAX_NAME] if near[:1].isalpha() else f"block_{near}"[:MAX_NAME].rstrip("_")
        if name_problem(near):
            near = f"{near}_block"
        yield Issue("name", f"{_short(spec.name)} {problem}", f"for instance {near}")


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")


@_reads("targets")
def _targets(spec: Spec) -> Iterator[Issue]:
    for index, target in enumerate(spec.targets):
        if target in spec.targets[:index]:
            yield Issue(f"targets[{index}]", f"{target} is named twice", "leave one out")


@_reads("chain")
def _chain_order(spec: Spec) -> Iterator[Issue]:
    norms = [index for index, step in enumerate(spec.chain) if isinstance(step, GroupNorm)]
    if not norms:
        hint = "end the chain with `- group_norm: {num_groups: N}`"
        yield Issue("chain", "has no group_norm; a chain ends with one", hint)
    for index in norms[1:]:
        yield Issue(f"chain[{index}]", "a second group_norm is not supported yet; only one", "")
    if norms:
        for index in range(norms[0] + 1, len(spec.chain)):
            step = spec.chain[index]
            if not isinstance(step, GroupNorm):
                message = f"{step.op} after group_norm is not supported yet"
                yield Issue(f"chain[{index}]", message, "group_norm must be the last op")


@_reads("chain")
def _parameter_names(spec: Spec) -> Iterator[Issue]:
    seen: dict[str, int] = {}
    for index, step in enumerate(spec.chain):
        if isinstance(step, GroupNorm) or step.parameter is None:
            continue
        path, name = f"chain[{index}].{step.op}", step.parameter
        problem = name_problem(name)
        if problem:
            yield Issue(path, f"parameter name {_short(name)} {problem}", "for instance bias")
        elif name in MODULE_ATTRIBUTES or name in OPS:
            message = f"parameter name {name!r} is taken: the emitted module already uses it"
            yield Issue(path, message, f"for instance {name}_param")
        elif name in seen:
            message = f"parameter {name!r} is used twice (first in chain[{seen[name]}])"
            yield Issue(path, message, f"for instance {name}_{index}")
        seen.setdefault(name, index)


@_reads("chain", "problem.out_channels")
def _groups(spec: Spec) -> Iterator[Issue]:
    channels = spec.problem.out_channels
    for index, step in enumerate(spec.chain):
        if not isinstance(step, GroupNorm):
            continue
        path = f"chain[{index}].group_norm"
        if step.num_groups < 1 or channels % step.num_groups:
            legal = divisors(channels)
            near = nearest(step.num_groups, legal)
            listed = ", ".join(map(str, legal)) if len(legal) <= 24 else f"a divisor, e.g. {near}"
            yield Issue(
                f"{path}.num_groups",
                f"num_groups {step.num_groups} does not divide out_channels {channels}",
                f"nearest legal value {near}; num_groups must be one of {listed}",
            )
        if step.eps < FLOAT32_MIN:
            message = f"eps {step.eps:g} is zero or subnormal in float32"
            yield Issue(f"{path}.eps", message, "the least legal value is 1.2e-38")
        if step.eps > FLOAT32_MAX:
            message = f"eps {step.eps:g} is infinite in float32"
            yield Issue(f"{path}.eps", message, "the usual value is 1e-5")


@_reads("problem")
def _window(spec: Spec) -> Iterator[Issue]:
    problem, g = spec.problem, geometry(spec.problem)
    if problem.padding == "same" and g.stride != (1, 1):
        message = f"padding `same` needs stride 1, the spec has {list(g.stride)}"
        yield Issue("problem.padding", message, "give the padding as numbers")
        return
    for axis, (key, size) in enumerate((("height", g.H), ("width", g.W))):
        if g.extent[axis] > g.padded[axis]:
            missing = g.extent[axis] - g.padded[axis]
            yield Issue(
                f"problem.{key}",
                f"the filter spans {g.extent[axis]} (kernel_size and dilation), more than the "
                f"padded {key} {g.padded[axis]}",
                f"{key} must be at least {size + missing}",
            )
        elif problem.padding != "same" and g.pad_before[axis] >= g.extent[axis]:
            most = [extent - 1 for extent in g.extent]
            yield Issue(
                "problem.padding",
                f"padding {g.pad_before[axis]} is not smaller than the filter's span "
                f"{g.extent[axis]}: border outputs would see no input",
                f"at most {most[0] if most[0] == most[1] else most}",
            )
            return


@_reads("problem")
def _sizes(spec: Spec) -> Iterator[Issue]:
    g = geometry(spec.problem)
    limits = (
        ("problem.height", "height x width", g.padded[0] * g.padded[1]),
        ("problem.in_channels", "in_channels x kernel_size", g.taps),
    )
    for path, what, value in limits:
        if value > INT_MAX:
            yield Issue(path, f"{what} is {value}, more than {INT_MAX}", "split the problem")


@_reads("schedule")
def _schedule_keys(spec: Spec) -> Iterator[Issue]:
    schedule = spec.schedule
    if schedule.strategy == "hybrid":
        for key in (*TILE_KNOBS, "math"):
            if getattr(schedule, key) is not None:
                message = f"{key} has no meaning in strategy hybrid"
                yield Issue(f"schedule.{key}", message, "hybrid takes only threads")
    fused = schedule.strategy in FUSED or (schedule.strategy is None and schedule.math in MATHS)
    if fused:
        named = schedule.strategy or f"{' and '.join(FUSED)}, which math {schedule.math} implies"
        for key in ("tile_k", "tile_c", "pixels"):
            if getattr(schedule, key) is not None:
                message = f"{key} has no meaning in strategy {named}"
                hint = "it takes math, tile_h and tile_w"
                yield Issue(f"schedule.{key}", message, hint)
        if schedule.math == FFMA:
            message = f"math ffma is for two_kernel; {schedule.strategy} runs on tensor cores"
            yield Issue("schedule.math", message, f"one of {', '.join(MATHS)}")
        if schedule.threads not in (None, FUSED_THREADS):
            message = f"a block of strategy {named} has {FUSED_THREADS} threads"
            yield Issue("schedule.threads", message, f"nearest legal value {FUSED_THREADS}")
            return
    elif schedule.strategy == "two_kernel" and schedule.math in MATHS:
        message = f"math {schedule.math} is for {' and '.join(FUSED)}; two_kernel has only ffma"
        yield Issue("schedule.math", message, "ffma, or another strategy")
    if schedule.threads is not None and (schedule.threads % 32 or schedule.threads > 1024):
        free = schedule.strategy != "hybrid" and not (schedule.tile_h and schedule.tile_w)
        # The tiles that kgen chooses have powers of two; a given tile may have other widths.
        legal = [32, 64, 128, 256, 512, 1024] if free else list(range(32, 1025, 32))
        near = nearest(schedule.threads, legal)
        message = f"threads {schedule.threads} is not a multiple of 32 from 32 to 1024"
        yield Issue("schedule.threads", message, f"nearest legal value {near}")
    if fused or schedule.strategy == "hybrid":
        return  # the knobs below are not theirs, and that has been said
    if schedule.tile_h and schedule.pixels and schedule.tile_h % schedule.pixels:
        near = nearest(schedule.pixels, divisors(schedule.tile_h))
        message = f"pixels {schedule.pixels} does not divide tile_h {schedule.tile_h}"
        yield Issue("schedule.pixels", message, f"nearest legal value {near}")
    if schedule.tile_c is not None and schedule.tile_c > spec.problem.in_channels:
        message = f"tile_c {schedule.tile_c} exceeds in_channels {spec.problem.in_channels}"
        yield Issue("schedule.tile_c", message, f"nearest legal value {spec.problem.in_channels}")


@_reads("*")
def _fits(spec: Spec) -> Iterator[Issue]:
    """The strategy that the spec names, or that its plan would choose, fits every target."""
    g = geometry(spec.problem)
    strategy = choose_strategy(spec, g, ARCHS[spec.targets[0]])[0]
    if strategy == "hybrid":
        misfit = hybrid_misfit(spec, g)
        if misfit:
            yield Issue("schedule.strategy", misfit, "use more groups, or strategy two_kernel")
        return
    if strategy in FUSED:
        if (spec.schedule.tile_w or 0) > g.Q:
            message = f"tile_w {spec.schedule.tile_w} exceeds the output's width {g.Q}"
            yield Issue("schedule.tile_w", message, f"nearest legal value {g.Q}")
            return
        misfit = fused_misfit(spec, g, ARCHS[spec.targets[0]], strategy)
        if misfit:
            given = spec.schedule.tile_h or spec.schedule.tile_w
            other = "recompute" if strategy == "single_pass" and "SMs" in misfit else "two_kernel"
            hint = "leave out tile_h and tile_w" if given else f"use strategy {other}"
            yield Issue("schedule.strategy", f"{strategy} does not fit: {misfit}", hint)
        return
    channels = g.C_out // spec.norm.num_groups
    archs = tuple(ARCHS[target] for target in spec.targets)
    if complete(g, channels, spec.schedule, archs) is None:
        yield _why_no_tile(spec, channels)


@_reads("*")
def _grid(spec: Spec) -> Iterator[Issue]:
    """Every launch has a legal grid, and every index that the kernels keep in 32 bits fits."""
    plan = make_plan(spec)
    for launch in plan.launches:
        if launch.team is not None:
            per_sample = launch.team.jobs_per_sample
            most = (INT_MAX - JOB_SLACK) // per_sample
            if most < (plan.g.N or 1):
                message = f"{launch.kernel} would have more than {INT_MAX} jobs"
                yield Issue("problem.batch", message, f"at most {most}" if most else "less work")
            continue
        blocks = launch.blocks_per_sample * (plan.g.N or 1)
        if blocks > INT_MAX:
            message = f"{launch.kernel} would have {blocks} blocks, a launch takes {INT_MAX}"
            most = INT_MAX // max(one.blocks_per_sample for one in plan.launches)
            hint = f"at most {most}" if most else "a smaller problem"
            yield Issue("problem.batch", message, hint)
            return
    if plan.tile is None:
        return
    plane = plan.g.P * plan.g.Q + plan.norm_threads * plan.norm_vectors * plan.vec
    longest = max(plan.g.P + plan.tile.tile_h, plan.g.Q + plan.tile.tile_w)
    if max(plane, longest) > INT_MAX:
        message = f"an output plane of {plan.g.P} x {plan.g.Q} cannot be indexed in 32 bits"
        yield Issue("problem.height", message, "split the problem")
    elif plan.workspace_per_sample // 2 > INT_MAX:
        partials = plan.workspace_per_sample // 2
        message = f"{partials} partial moments of one sample, at most {INT_MAX} can be indexed"
        yield Issue("schedule.tile_h", message, "a larger tile")


def _too_much_smem(tile: Tile, target: str, limit: int) -> Issue:
    one = replace(tile, tile_c=1)
    most = (limit - one.smem_moments) // (one.smem_x + one.smem_w)
    fitting = [c for c in (most, most - 1) if c > 0 and replace(tile, tile_c=c).smem <= limit]
    hint = f"nearest legal value {fitting[0]}" if fitting else "a smaller tile_h or tile_w"
    message = (
        f"a block needs {tile.smem} bytes of shared memory (input tile {tile.smem_x}, weights "
        f"{tile.smem_w}), {target} has {limit}"
    )
    path = "schedule.tile_c" if fitting else "schedule.tile_h"
    return Issue(path, message, hint)


def _why_no_tile(spec: Spec, group_channels: int) -> Issue:
    """The first rule that the given knobs break when all of them are taken together."""
    schedule, g = spec.schedule, geometry(spec.problem)
    tile_h, tile_w = schedule.tile_h or 8, schedule.tile_w or 32
    tile_k, pixels = schedule.tile_k or min(g.C_out, 8), schedule.pixels or 1
    strips = round_up(max(1, tile_h // pixels) * tile_w, 32)
    threads = schedule.threads or strips
    tile = with_stage(g, group_channels, schedule, tile_h, tile_w, tile_k, pixels, threads)
    if tile.tile_h % tile.pixels:
        near = nearest(tile.tile_h, [pixels * factor for factor in range(1, 33)])
        message = f"tile_h {tile.tile_h} is not a multiple of pixels {tile.pixels}"
        return Issue("schedule.tile_h", message, f"nearest legal value {near}")
    if tile.thread_k == 0:
        legal = [strips * sets for sets in divisors(tile_k) if strips * sets <= 1024]
        message = (
            f"threads {threads} does not fit tile_h {tile_h} x tile_w {tile_w} at {pixels} "
            f"pixels a thread ({strips} threads a set of channels) and tile_k {tile_k}"
        )
        hint = (
            f"nearest legal value {nearest(threads, legal)}"
            if legal
            else "a smaller tile, or more pixels a thread"
        )
        return Issue("schedule.threads", message, hint)
    for target in spec.targets:
        if tile.smem > ARCHS[target].smem_per_block:
            return _too_much_smem(tile, target, ARCHS[target].smem_per_block)
    if not fits_registers(tile):
        most = min(REGISTERS_PER_THREAD, 65536 // tile.threads // 8 * 8)
        message = (
            f"a thread that computes {tile.accumulators} outputs ({tile.pixels} pixels x "
            f"{tile.thread_k} channels) needs about {tile.registers} registers; with "
            f"{tile.threads} threads a block it has {most}"
        )
        smaller = [k for k in divisors(tile_k) if fits_registers(replace(tile, tile_k=k))]
        fitting = [k for k in smaller if replace(tile, tile_k=k).thread_k]
        hint = f"tile_k {fitting[-1]} fits" if fitting else "fewer pixels a thread"
        return Issue("schedule.threads", message, hint)
    listed = ", ".join(spec.targets)
    message = f"no choice of the free knobs fits {listed} with the given ones"
    return Issue("schedule", message, "leave out one knob")
