"""What one run of a spec's kernels does, counted on the simulator; needs torch."""

from __future__ import annotations

from typing import Any

from kgen.arch import ARCHS
from kgen.errors import BuildError
from kgen.reference import draw
from kgen.simulator.candidate import SimulatedCandidate
from kgen.simulator.device import Options, SimulationError
from kgen.simulator.ptx import PtxError
from kgen.simulator.reduce import describe, reduced, samples
from kgen.simulator.simulate import Simulation
from kgen.spec import Spec


def measure(spec: Spec) -> dict[str, Any]:
    """Counts of a reduced copy on the first target; plain JSON values, the same on every run.

    counts: per kernel, instructions by category (threads that ran them), bytes by memory space,
    sectors of 32 bytes that global accesses touch, wholly or in part, and bank conflicts.
    conflicts: the instructions behind the bank conflicts, the worst first.
    """
    target = spec.targets[0]
    small, plan = reduced(spec, ARCHS[target])
    batch = samples(plan)
    candidate = SimulatedCandidate(Simulation(small, plan, target), Options(measure=True))
    try:
        candidate(*draw(small, batch, "uniform", 0, "cpu"))
    except (SimulationError, PtxError) as error:
        raise BuildError(f"{spec.name} for {target}: {error}") from None
    outcome = candidate.outcome
    assert outcome is not None
    worst = sorted(outcome.conflicts.items(), key=lambda item: (-item[1], item[0]))
    return {
        "arch": target,
        "ran": describe(spec, small, batch),
        "counts": outcome.counts,
        "conflicts": [
            {"kernel": kernel, "line": line, "count": count} for (kernel, line), count in worst[:10]
        ],
    }
