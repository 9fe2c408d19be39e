"""The schedules that are legal for a spec, and those of them that are worth measuring.

Nothing is compiled here: the constraints say what is legal, the cost model what is hopeless.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from kgen.arch import ARCHS, Arch
from kgen.constraints import check
from kgen.errors import UsageError
from kgen.fused import MAX_N
from kgen.geometry import Geometry, geometry
from kgen.math_kinds import FFMA, MATHS
from kgen.plan import make_plan
from kgen.spec import FUSED, STRATEGIES, Schedule, Spec
from kgen.strategy import predicted_ms
from kgen.tiling import round_up

Knob = int | str
Axes = dict[str, tuple[Knob, ...]]

# Candidates predicted to take longer than this times the best of their strategy are left out. The
# model was off by up to 2.6 / 1.4 where it was measured, see OVERLAP_LOSS in kgen.strategy.
FACTOR = 2.0
POWERS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
HYBRID_THREADS = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
STAGES = (1, 2, 3, 4, 6, 8, 12, 16)  # into which two_kernel may cut the input channels
MOST_TILE_K = 64
WIDTH_PARTS = 8  # into which the fused kernels may cut the output's width, at least


@dataclass(frozen=True)
class Candidate:
    """One legal schedule. predicted_ms: for one sample where the batch is dynamic.

    schedule: what goes into the spec. spec_hash: of the spec with that schedule. point: the same
    with every knob of its strategy spelled out, sorted; empty where it is on no axis.
    """

    strategy: str
    schedule: dict[str, Knob] = field(hash=False)
    spec_hash: str
    predicted_ms: float
    is_default: bool = False
    point: tuple[tuple[str, Knob], ...] = ()

    @property
    def key(self) -> str:
        """The schedule as text: equal schedules have equal keys."""
        return schedule_key(self.schedule)


@dataclass(frozen=True)
class Refused:
    """A schedule that the constraints refuse, with the first rule that it breaks."""

    strategy: str
    schedule: dict[str, Knob]
    reason: str


@dataclass(frozen=True)
class Space:
    """What there is to choose from. `candidates` starts with the default schedule.

    pruned: legal, left out by the cost model. axes: the values of each strategy's knobs.
    """

    spec: Spec
    candidates: tuple[Candidate, ...]
    pruned: tuple[Candidate, ...]
    refused: tuple[Refused, ...]
    axes: dict[str, Axes]

    @property
    def default(self) -> Candidate:
        """The spec's own schedule, with its free knobs left to the cost model."""
        return self.candidates[0]


def schedule_key(schedule: dict[str, Any]) -> str:
    """A schedule as canonical JSON."""
    return json.dumps(schedule, sort_keys=True, separators=(",", ":"))


def with_schedule(spec: Spec, schedule: dict[str, Any]) -> Spec:
    """The spec with another schedule. Raises: pydantic.ValidationError for unknown knobs."""
    return spec.model_copy(update={"schedule": Schedule.model_validate(schedule)})


def block_hash(spec: Spec) -> str:
    """The hash of what is computed, whatever its schedule: 16 hex digits."""
    return spec.model_copy(update={"schedule": Schedule()}).hash()


def enumerate_space(
    spec: Spec,
    strategies: Sequence[str] | None = None,
    maths: Sequence[str] | None = None,
    *,
    factor: float = FACTOR,
    arch: Arch | None = None,
) -> Space:
    """All legal schedules of a checked spec, in a fixed order.

    strategies: None for all that fit. maths: of the strategies on tensor cores; None for the one
    that the spec names, else all that meet kgen's tolerance: a math decides accuracy and the range
    of x, so a spec that names one keeps it, and one that names `ffma` gets no tensor cores unless
    asked. factor: see FACTOR. arch: that predictions are for; None for the spec's first target.
    Raises: UsageError for an unknown strategy or math, for maths that no strategy has, or a factor
    below 1.
    """
    _known("strategy", strategies or (), STRATEGIES)
    _known("math", maths or (), tuple(MATHS))
    if not factor >= 1:
        raise UsageError(f"factor {factor:g} is below 1: it would leave out the best prediction")
    arch = arch or ARCHS[spec.targets[0]]
    given = spec.schedule.math
    if strategies is None:
        strategies = [one for one in STRATEGIES if maths or given != FFMA or one not in FUSED]
    if maths and not set(strategies) & set(FUSED):
        raise UsageError(f"maths are of the strategies {', '.join(FUSED)}, which are not tried")
    chosen = tuple(maths or _default_maths(given))
    found = _Found(spec, arch)
    own: dict[str, Knob] = spec.schedule.model_dump(exclude_none=True)
    found.add(make_plan(spec).strategy, own, is_default=True)
    axes: dict[str, Axes] = {}
    for strategy in dict.fromkeys(strategies):
        bare: dict[str, Knob] = {"strategy": strategy}
        if strategy in FUSED:
            bare["math"] = chosen[0]
        issues = check(with_schedule(spec, bare))
        if issues:  # it does not fit, whatever its knobs
            found.refused.append(Refused(strategy, bare, _reason(issues[0])))
            continue
        axes[strategy] = _axes(spec, strategy, chosen)
        for schedule in _grid(strategy, axes[strategy]):
            found.add(strategy, schedule, on_axes=True)
        found.add(strategy, bare)  # the model's own choice, where the grid does not hold it
    kept, pruned = _prune(found.candidates.values(), factor)
    return Space(spec, kept, pruned, tuple(found.refused), axes)


class _Found:
    """Collects candidates; of several with the same plan the first stays."""

    def __init__(self, spec: Spec, arch: Arch) -> None:
        self._spec, self._arch, self._g = spec, arch, geometry(spec.problem)
        self.candidates: dict[object, Candidate] = {}
        self.refused: list[Refused] = []

    def add(
        self,
        strategy: str,
        schedule: dict[str, Knob],
        *,
        is_default: bool = False,
        on_axes: bool = False,
    ) -> None:
        spec = with_schedule(self._spec, schedule)
        issues = check(spec)
        if issues:
            self.refused.append(Refused(strategy, schedule, _reason(issues[0])))
            return
        plan = make_plan(spec)
        identity = (plan.strategy, plan.tile, plan.fused, plan.threads)
        point = tuple(sorted(schedule.items())) if on_axes else ()
        known = self.candidates.get(identity)
        if known is not None:
            if on_axes and not known.point:  # the default's place on the axes
                self.candidates[identity] = replace(known, point=point)
            return
        time = predicted_ms(spec, self._g, self._arch, strategy)
        self.candidates[identity] = Candidate(
            strategy=strategy,
            schedule=schedule,
            spec_hash=spec.hash(),
            predicted_ms=float("inf") if time is None else time,
            is_default=is_default,
            point=point,
        )


def _reason(issue: Any) -> str:
    return f"{issue.path}: {issue.message}"


def _known(what: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Raises: UsageError, naming the nearest, for a name that is not known."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
            raise UsageError(f"unknown {what} {name!r}; {hint}")


def _default_maths(given: str | None) -> tuple[str, ...]:
    if given in MATHS:
        return (str(given),)
    return tuple(name for name, math in MATHS.items() if math.tolerance_met)


def _prune(
    found: Iterable[Candidate], factor: float
) -> tuple[tuple[Candidate, ...], tuple[Candidate, ...]]:
    """Those within `factor` of the best predicted of their strategy, and the others."""
    candidates = tuple(found)
    best: dict[str, float] = {}
    for one in candidates:
        best[one.strategy] = min(one.predicted_ms, best.get(one.strategy, float("inf")))

    def keeps(one: Candidate) -> bool:
        return one.is_default or one.predicted_ms <= factor * best[one.strategy]

    kept = tuple(one for one in candidates if keeps(one))
    return kept, tuple(one for one in candidates if not keeps(one))


def _grid(strategy: str, axes: Axes) -> Iterator[dict[str, Knob]]:
    for values in product(*axes.values()):
        yield {"strategy": strategy, **dict(zip(axes, values, strict=True))}


def _axes(spec: Spec, strategy: str, maths: tuple[str, ...]) -> Axes:
    """The values of every knob that a strategy takes, with those that the spec itself gives."""
    g = geometry(spec.problem)
    if strategy == "hybrid":
        axes: Axes = {"threads": HYBRID_THREADS}
    elif strategy in FUSED:
        axes = {
            "math": maths,
            "tile_h": _up_to(g.P, POWERS[:7]),
            "tile_w": _fused_widths(g),
        }
    else:
        whole = (g.C_out,) if g.C_out <= MOST_TILE_K else ()
        axes = {
            "tile_h": _up_to(g.P, POWERS[:7]),
            "tile_w": _up_to(g.Q, POWERS[3:]),
            "tile_k": tuple(sorted({*_up_to(g.C_out, (4, 8, 16, 32, MOST_TILE_K)), *whole})),
            "tile_c": tuple(sorted({-(-g.C_in // stages) for stages in STAGES})),
            "pixels": POWERS[:4],
            "threads": (*POWERS[5:], 512, 1024),
        }
    given = spec.schedule.model_dump(exclude_none=True)
    if spec.schedule.strategy not in (None, strategy):
        return axes  # its knobs are another strategy's
    return {
        knob: tuple(sorted({*values, given[knob]})) if type(given.get(knob)) is int else values
        for knob, values in axes.items()
    }


def _up_to(limit: int, values: tuple[int, ...]) -> tuple[int, ...]:
    """Values that are not needlessly above the limit: at most one reaches it."""
    below = tuple(value for value in values if value < limit)
    return (*below, *values[len(below) : len(below) + 1])


def _fused_widths(g: Geometry) -> tuple[int, ...]:
    """Widths that cut the output into about equal parts, each of at most two products."""
    across = -(-g.Q // (2 * MAX_N))
    parts = range(across, WIDTH_PARTS * across + 1)
    return tuple(sorted({min(g.Q, round_up(-(-g.Q // one), 4)) for one in parts}))
