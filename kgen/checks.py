"""The checks behind `kgen verify`: a candidate against the fp64 oracle.

A candidate is trusted with nothing: its output memory is poisoned before each run, guard zones
surround what it may write, its inputs are compared afterwards, and it runs before the oracle in
some cases and after it in others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch

from kgen.geometry import geometry
from kgen.reference import Parameters, chunks, draw, eager_fp32, oracle
from kgen.spec import Spec
from kgen.verdict import CASES, CaseResult, Report, tolerance

DYNAMIC_BATCHES = (3, 2)  # sizes that a dynamic batch is verified at, alternating
GUARD = 4096  # floats of guard zone on each side of what a kernel may write
POISON = 0x7FC5A5A5  # bits of a quiet NaN that no computation produces
# In a (sample, channel) where eager fp32 itself misses the tolerance, a kernel may be off by this
# much times eager's largest error there.
ILL_CONDITIONED_FACTOR = 4.0


class Candidate(Protocol):
    """Something that claims to compute the block: (x, parameters) -> y."""

    def __call__(self, x: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        """y [N, C_out, P, Q] for x [N, C_in, H, W]."""


class PackageCandidate:
    """An imported package as a candidate, with the entry that writes into given memory."""

    def __init__(self, package: Any) -> None:
        self.package = package

    def __call__(self, x: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        """The package's op, with memory that it allocates itself."""
        ordered = (parameters[key] for key in self.package.PARAMETERS)
        y: torch.Tensor = self.package.fused_block(x, *ordered)
        return y

    def guarded_problem(self, x: torch.Tensor, parameters: Parameters, y: torch.Tensor) -> str:
        """Run into poisoned memory between guard zones; what went wrong, or empty.

        y: the output of an earlier run on the same inputs, to be met bit for bit.
        """
        block = self.package.block
        output, output_whole = _guarded(y.numel(), x.device)
        workspace, workspace_whole = _guarded(block.workspace_floats(x.shape[0]), x.device)
        block.launch(x, parameters, output.view(y.shape), workspace)
        for label, inner, whole in (
            ("output", output, output_whole),
            ("workspace", workspace, workspace_whole),
        ):
            if not _is_poison(whole[:GUARD]) or not _is_poison(whole[GUARD + inner.numel() :]):
                return f"wrote outside its {label}"
        unwritten = int((output.view(torch.int32) == POISON).sum())
        if unwritten:
            return f"left {unwritten} output elements unwritten"
        if not same_bits(output, y.reshape(-1)):
            return "gave other bits on a second run with the same inputs"
        return ""


def verify_candidate(
    spec: Spec,
    candidate: Candidate,
    device: str | torch.device,
    cases: tuple[tuple[str, int], ...] = CASES,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Check a candidate on every case. progress: told the case that starts."""
    results = []
    for index, (distribution, seed) in enumerate(cases):
        progress(f"{distribution}, seed {seed}")
        problem = spec.problem.batch
        batch = DYNAMIC_BATCHES[index % 2] if problem == "dynamic" else problem
        x, parameters = draw(spec, batch, distribution, seed, device)
        results.append(
            check_case(
                spec, candidate, x, parameters, distribution, seed, candidate_first=index % 2 == 0
            )
        )
    name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "cpu"
    strategy = getattr(getattr(candidate, "package", None), "manifest", {}).get("strategy", "")
    atol, rtol = tolerance(spec.schedule.math)
    return Report(spec.name, spec.hash(), strategy, name, atol, rtol, tuple(results))


def check_case(
    spec: Spec,
    candidate: Candidate,
    x: torch.Tensor,
    parameters: Parameters,
    distribution: str = "given",
    seed: int = 0,
    *,
    candidate_first: bool = True,
) -> CaseResult:
    """Check a candidate on one problem.

    Order of the checks: shape, dtype and device; inputs unchanged; finiteness; values; then, for
    packages, guard zones, unwritten elements and equal bits on a second run.
    """
    base = CaseResult(distribution, seed, x.shape[0], passed=False, reason="")
    before = {"x": x.clone(), **{key: one.clone() for key, one in parameters.items()}}
    if not candidate_first:  # let the answer pass through the allocator before the candidate runs
        for part in chunks(spec, x):
            oracle(spec, x[part], parameters).float()
    g = geometry(spec.problem)
    y_shape = (x.shape[0], g.C_out, g.P, g.Q)
    # Leave poison in the memory that the candidate's output is likely to be allocated from.
    _poisoned(y_shape[0] * g.y_elements, x.device)
    with torch.no_grad():
        y = candidate(x, parameters)
    if y.shape != y_shape or y.dtype != x.dtype or y.device != x.device:
        found = f"{tuple(y.shape)} {y.dtype} on {y.device}"
        return _failed(base, f"returned {found} for x {tuple(x.shape)} {x.dtype} on {x.device}")
    for key, old in before.items():
        if not same_bits(old, x if key == "x" else parameters[key]):
            return _failed(base, f"changed its input {key}")
    return _compare(spec, candidate, x, parameters, y, base)


def _compare(
    spec: Spec,
    candidate: Candidate,
    x: torch.Tensor,
    parameters: Parameters,
    y: torch.Tensor,
    base: CaseResult,
) -> CaseResult:
    kernel, eager, low, high = _Errors(), _Errors(), float("inf"), float("-inf")
    ill, outside = False, 0
    atol, rtol = tolerance(spec.schedule.math)
    for part in chunks(spec, x):
        wanted = oracle(spec, x[part], parameters)
        finite = wanted.isfinite()
        wrong = int(((y[part].isfinite() != finite) | (y[part].isnan() != wanted.isnan())).sum())
        if wrong:
            return _failed(
                base, f"{wrong} elements differ from the oracle in being finite, inf or NaN"
            )
        low = min(low, float(wanted[finite].min())) if finite.any() else low
        high = max(high, float(wanted[finite].max())) if finite.any() else high
        bound = torch.where(finite, atol + rtol * wanted.abs(), float("inf"))
        own = kernel.add(y[part], wanted, finite)
        reference = eager.add(eager_fp32(spec, x[part], parameters), wanted, finite)
        # Planes in which eager fp32 itself misses the tolerance get its own error as their bound.
        missed = (reference > bound).amax((2, 3), keepdim=True)
        ill = ill or bool(missed.any())
        allowed = ILL_CONDITIONED_FACTOR * reference.amax((2, 3), keepdim=True)
        outside += int((own > torch.where(missed, torch.maximum(bound, allowed), bound)).sum())
    errors = replace(
        base,
        max_error=kernel.maximum,
        rms_error=kernel.rms,
        eager_max_error=eager.maximum,
        eager_rms_error=eager.rms,
    )
    g = geometry(spec.problem)
    # One value alone is its own mean: such a block gives beta, whatever it is given.
    alone = g.C_out // spec.norm.num_groups * g.P * g.Q == 1
    errors = replace(errors, constant=high - low < 10 * atol and not alone)
    if outside:
        more = (
            f", or {ILL_CONDITIONED_FACTOR:g} x eager's own error where that is more" if ill else ""
        )
        return _failed(
            replace(errors, ill_conditioned=ill),
            f"{outside} elements are off by more than {atol} + {rtol} x |oracle|{more}",
        )
    guarded = getattr(candidate, "guarded_problem", None)
    problem = guarded(x, parameters, y) if guarded is not None else ""
    if problem:
        return _failed(errors, problem)
    return replace(errors, passed=True, ill_conditioned=ill)


class _Errors:
    """Running maximum and root mean square of absolute errors."""

    def __init__(self) -> None:
        self.maximum, self._squares, self._count = 0.0, 0.0, 0

    def add(self, y: torch.Tensor, wanted: torch.Tensor, finite: torch.Tensor) -> torch.Tensor:
        """Count a part of the output; returns its errors, 0 where the oracle is not finite."""
        error = torch.where(finite, (y.double() - wanted).abs(), 0.0)
        # A value that is not finite where the oracle is counts as infinitely wrong.
        error = torch.where(error.isnan(), float("inf"), error)
        self.maximum = max(self.maximum, float(error.max())) if error.numel() else self.maximum
        self._squares += float(error.square().sum())
        self._count += error.numel()
        return error

    @property
    def rms(self) -> float:
        return float((self._squares / max(1, self._count)) ** 0.5)


def _failed(result: CaseResult, reason: str) -> CaseResult:
    return replace(result, passed=False, reason=reason)


def _poisoned(count: int, device: torch.device) -> torch.Tensor:
    return torch.full((count,), POISON, dtype=torch.int32, device=device).view(torch.float32)


def _guarded(count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """`count` poisoned floats between guard zones, and the whole buffer."""
    whole = _poisoned(count + 2 * GUARD, device)
    return whole[GUARD : GUARD + count], whole


def _is_poison(memory: torch.Tensor) -> bool:
    return bool((memory.view(torch.int32) == POISON).all())


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether float32 tensors of one size hold the same bits, NaN included."""
    return torch.equal(
        a.contiguous().view(torch.int32), b.contiguous().reshape(a.shape).view(torch.int32)
    )
