"""Emitted kernels on the simulator as candidates for the checks of `kgen verify`; needs torch."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from kgen.arch import ARCHS
from kgen.checks import check_case
from kgen.emit import make_manifest
from kgen.errors import BuildError, UsageError
from kgen.package import find_package, spec_of
from kgen.plan import Plan, make_plan
from kgen.reference import Parameters, draw, exact_fp32
from kgen.simulator.device import Options, SimulationError
from kgen.simulator.ptx import PtxError
from kgen.simulator.reduce import MAX_BATCH, describe, multiply_adds, reduced, samples
from kgen.simulator.simulate import Outcome, Simulation
from kgen.spec import Spec, load_spec
from kgen.verdict import CASES, CaseResult, Report, tolerance
from kgen.version import __version__

CASE_MACS = 1_000_000_000  # multiply-adds of all cases on the first target: about 10 s


class SimulatedCandidate:
    """Runs one simulation a call and keeps its outcome."""

    def __init__(self, simulation: Simulation, options: Options) -> None:
        self.simulation, self.options = simulation, options
        self.outcome: Outcome | None = None

    def __call__(self, x: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        """y [N, C_out, P, Q] for x on the CPU."""
        conv_out = None
        if self.simulation.plan.strategy == "hybrid":
            conv_out = library_convolution(self.simulation.spec, x, parameters).numpy()
        arrays = {key: one.numpy() for key, one in parameters.items()}
        self.outcome = self.simulation.run(x.numpy(), arrays, conv_out, self.options)
        return torch.from_numpy(self.outcome.y)

    def guarded_problem(self, x: torch.Tensor, parameters: Parameters, y: torch.Tensor) -> str:
        """What the simulator found wrong with the run that gave y; empty if nothing."""
        assert self.outcome is not None
        return "; ".join(self.outcome.problems[:3])


def library_convolution(spec: Spec, x: torch.Tensor, parameters: Parameters) -> torch.Tensor:
    """The convolution without bias that a hybrid plan starts from, fp32 [N, C_out, P, Q]."""
    problem = spec.problem
    with exact_fp32():
        return torch.nn.functional.conv2d(
            x,
            parameters["conv.weight"],
            stride=problem.stride,
            padding=problem.padding,
            dilation=problem.dilation,
        )


def _with_findings(result: CaseResult, candidate: SimulatedCandidate) -> CaseResult:
    """A case whose values are wrong, with the findings that may be why."""
    if result.passed or candidate.outcome is None or not candidate.outcome.findings:
        return result
    found = "; ".join(str(one) for one in candidate.outcome.findings[:3])
    return result if found in result.reason else replace(result, reason=f"{result.reason}; {found}")


@dataclass(frozen=True)
class _Job:
    """What is simulated for one target: a spec and plan, and how many samples."""

    spec: Spec
    plan: Plan
    batch: int
    source: str | None  # CUDA as it stands in a package, or None to render it
    problem: str = ""  # why no run of this can be right


def _job(source: Spec | ModuleType | str | os.PathLike[str], full: bool) -> tuple[Spec, _Job]:
    """The spec to be verified, and what to simulate for each of its targets."""
    if isinstance(source, ModuleType) or (not isinstance(source, Spec) and Path(source).is_dir()):
        package = find_package(source)
        spec, text = spec_of(package), package.block.source
        plan = make_plan(spec)
        batch = samples(plan) if full else min(samples(plan), MAX_BATCH)
        return spec, _Job(spec, plan, batch, text, _manifest_problem(package.manifest, spec, plan))
    spec = source if isinstance(source, Spec) else load_spec(source)
    if full:
        plan = make_plan(spec)
        return spec, _Job(spec, plan, samples(plan), None)
    small, plan = reduced(spec, ARCHS[spec.targets[0]])
    return spec, _Job(small, plan, samples(plan), None)


def _manifest_problem(found: dict[str, Any], spec: Spec, plan: Plan) -> str:
    """How a package would launch its kernels otherwise than the simulator does; empty if alike."""
    planned = json.loads(json.dumps(make_manifest(spec, plan)))
    wrong = [key for key in planned if key != "kgen_version" and planned[key] != found.get(key)]
    version = found.get("kgen_version")
    return (
        f"manifest.json of kgen {version} differs from what kgen {__version__} plans for the same "
        f"spec: {', '.join(wrong)}"
        if wrong
        else ""
    )


def verify_on_simulator(
    source: Spec | ModuleType | str | os.PathLike[str],
    *,
    full: bool = False,
    trace: tuple[int, int] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """`kgen.verify` on the simulator, for each target of the spec.

    A package runs with its own kernel.cu and must launch it as its spec's plan does.

    The first case of each target runs with all checks; on the first target the other cases follow
    with values and bounds alone: what the checks look for does not depend on the data. Of a large
    problem as many cases run as CASE_MACS allows, two at least; the report says how many.
    """
    start = time.perf_counter()
    spec, job = _job(source, full)
    affordable = max(2, CASE_MACS // max(1, multiply_adds(job.plan, job.batch)))
    cases = CASES[:affordable]
    ran = describe(spec, job.spec, job.batch)
    if len(cases) < len(CASES):
        ran += f", the first {len(cases)} of {len(CASES)} cases because of its size"
    results: list[CaseResult] = []
    if job.problem:
        results.append(CaseResult("manifest", 0, job.batch, False, job.problem))
    traced: tuple[str, ...] = ()
    for number, target in enumerate(spec.targets):
        simulation = Simulation(job.spec, job.plan, target, job.source)
        for index, (distribution, seed) in enumerate(cases if number == 0 else cases[:1]):
            progress(f"{target}, {distribution}, seed {seed}")
            first = number == 0 and index == 0
            options = Options(checks=index == 0, trace=trace if first else None)
            candidate = SimulatedCandidate(simulation, options)
            x, parameters = draw(job.spec, job.batch, distribution, seed, "cpu")
            try:
                result = check_case(job.spec, candidate, x, parameters, distribution, seed)
            except SimulationError as error:
                failed = CaseResult(distribution, seed, job.batch, False, str(error), target=target)
                results.append(failed)
                break  # what hangs once would hang in every case
            except PtxError as error:
                raise BuildError(f"{spec.name} for {target}: {error}") from None
            results.append(replace(_with_findings(result, candidate), target=target))
            if first and candidate.outcome is not None:
                traced = candidate.outcome.trace
                if trace is not None and not traced:
                    raise UsageError(f"no block {trace[0]} with a thread {trace[1]} was launched")
    atol, rtol = tolerance(spec.schedule.math)
    return Report(
        name=spec.name,
        spec_hash=spec.hash(),
        strategy=job.plan.strategy,
        device=f"simulator ({', '.join(spec.targets)})",
        atol=atol,
        rtol=rtol,
        cases=tuple(results),
        ran=ran,
        seconds=time.perf_counter() - start,
        trace=traced,
    )
