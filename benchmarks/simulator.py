"""Times one full sample of a spec on the simulator, and says where the time goes.

    python benchmarks/simulator.py specs/conv8x32_k3_gn8.yaml \\
        --output benchmarks/results/simulator.json

Three runs on this machine's CPU: without checks, with them, and with checks off and every step
timed, whose seconds are summed by category of instruction.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import platform
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

import kgen
from kgen.compiler import nvrtc_version
from kgen.reference import draw, oracle
from kgen.simulator import device as simulated_device
from kgen.simulator.candidate import SimulatedCandidate
from kgen.simulator.device import Options
from kgen.simulator.simulate import Simulation


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def timed_decoding(spent: dict[str, float]):
    """`decode_kernel` whose steps add their seconds to `spent`, by category."""
    original = simulated_device.decode_kernel

    def decode(kernel):
        def timed(one):
            if one.step is None:
                return one

            def step(resident, active):
                start = time.perf_counter()
                one.step(resident, active)
                spent[one.category] += time.perf_counter() - start

            return dataclasses.replace(one, step=step)

        return [timed(one) for one in original(kernel)]

    return original, decode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("spec", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    spec = kgen.load_spec(arguments.spec)
    plan = kgen.make_plan(spec)
    simulation = Simulation(spec, plan, spec.targets[0])
    x, parameters = draw(spec, 1, "uniform", 0, "cpu")
    wanted = oracle(spec, x, parameters)
    seconds = {}
    for label, options in (("unchecked", Options(checks=False)), ("checked", Options())):
        candidate = SimulatedCandidate(simulation, options)
        start = time.perf_counter()
        y = candidate(x, parameters)
        seconds[label] = round(time.perf_counter() - start, 3)
        error = float((y.double() - wanted).abs().max())
        problems = list(candidate.outcome.problems)
    spent: dict[str, float] = defaultdict(float)
    original, simulated_device.decode_kernel = timed_decoding(spent)
    start = time.perf_counter()
    SimulatedCandidate(simulation, Options(checks=False))(x, parameters)
    total = time.perf_counter() - start
    simulated_device.decode_kernel = original
    spent["parsing, scheduling and the rest"] = total - sum(spent.values())
    record = {
        "cpu": cpu_name(),
        "python": sys.version.split()[0],
        "numpy": np.__version__,
        "nvrtc": nvrtc_version(),
        "kgen": kgen.__version__,
        "date": datetime.date.today().isoformat(),
        "command": f"python benchmarks/simulator.py {arguments.spec} --output "
        f"benchmarks/results/{arguments.output.name}",
        "spec_hash": spec.hash(),
        "outputs": plan.g.y_elements,
        "multiply_adds": plan.g.y_elements * plan.g.taps,
        "max_error": error,
        "problems": problems,
        "seconds": seconds,
        "share_by_category": {
            name: round(value / total, 3)
            for name, value in sorted(spent.items(), key=lambda item: -item[1])
        },
    }
    arguments.output.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record["seconds"]), json.dumps(record["share_by_category"], indent=1))


if __name__ == "__main__":
    main()
