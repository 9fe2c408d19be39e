"""Compares the simulator with the GPU on the same source, for shipped specs and all strategies.

    python benchmarks/agreement.py specs/*.yaml --output benchmarks/results/h200_agreement.json

Each row is one spec, strategy and distribution at the simulator's reduced size: the largest
difference between the two, and the largest error of each against fp64.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from circumstances import context

import kgen
from kgen.arch import ARCHS
from kgen.checks import PackageCandidate
from kgen.constraints import check
from kgen.package import import_package
from kgen.plan import make_plan
from kgen.reference import draw, oracle
from kgen.runtime import native_arch
from kgen.simulator.candidate import SimulatedCandidate
from kgen.simulator.device import Options
from kgen.simulator.reduce import reduced
from kgen.simulator.simulate import Simulation
from kgen.spec import STRATEGIES

CASES = (("uniform", 0), ("normal x3", 1), ("one huge value", 2))


def compare(path: Path, strategy: str) -> list[dict[str, object]]:
    spec = kgen.load_spec(path).with_strategy(strategy)
    arch = native_arch(*torch.cuda.get_device_capability())
    small, _ = reduced(spec, ARCHS[arch])
    small = small.model_copy(update={"targets": (arch,)})
    plan = make_plan(small)
    package = import_package(kgen.emit(small, tempfile.mkdtemp()))
    simulation = Simulation(small, plan, arch, package.block.source)
    rows = []
    for distribution, seed in CASES:
        x, parameters = draw(small, plan.g.N or 2, distribution, seed, "cpu")
        candidate = SimulatedCandidate(simulation, Options())
        simulated = candidate(x, parameters)
        on_gpu = {key: one.cuda() for key, one in parameters.items()}
        y = PackageCandidate(package)(x.cuda(), on_gpu).cpu()
        wanted = oracle(small, x, parameters)
        rows.append(
            {
                "spec": path.name,
                "strategy": strategy,
                "x": list(x.shape),
                "distribution": distribution,
                "kernel_sha256": package.manifest["files"]["kernel.cu"],
                "max_difference": float((simulated - y).abs().max()),
                "simulator_max_error": float((simulated.double() - wanted).abs().max()),
                "gpu_max_error": float((y.double() - wanted).abs().max()),
                "findings": list(candidate.outcome.problems),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("specs", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    pairs = [
        (path, strategy)
        for path in arguments.specs
        for strategy in STRATEGIES
        if not check(kgen.load_spec(path).with_strategy(strategy))
    ]
    # The simulator takes most of the time, on one core each.
    with ProcessPoolExecutor(8, mp_context=get_context("spawn")) as pool:
        rows = [row for found in pool.map(compare, *zip(*pairs, strict=True)) for row in found]
    record = {**context("agreement.py"), "rows": rows}
    arguments.output.write_text(json.dumps(record, indent=1) + "\n")
    for row in rows:
        print(f"{row['spec']:26} {row['strategy']:10} {row['distribution']:15} "
              f"{row['max_difference']:.2e} {len(row['findings'])} findings")  # fmt: skip


if __name__ == "__main__":
    main()
