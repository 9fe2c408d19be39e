"""Counts what the fused kernels of a spec and of its other shapes do, with ncu.

    python benchmarks/counters.py specs/conv8x32_k3_gn8.yaml \\
        --output benchmarks/results/h200_counters.json

One row for each size and strategy that fits it: bytes of DRAM over those needed, the time under the
profiler, how busy the pipes are, and why warps wait: warps stalled for each reason, for each
instruction issued. The values are not checked; `kgen bench` verifies and times the same kernels.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch
from circumstances import context
from shapes import SHAPES, shaped

import kgen
from kgen.bench.counters import SHARES, SUMS, parse
from kgen.bench.timing import DYNAMIC_BATCH
from kgen.constraints import check
from kgen.package import find_package
from kgen.reference import draw
from kgen.spec import FUSED

METRICS = {metric: name for name, metric in {**SUMS, **SHARES}.items()}


def variants(path: Path) -> list[tuple[str, kgen.Spec]]:
    """Sizes and their specs, one for each fused strategy that fits."""
    spec = kgen.load_spec(path)
    sizes = {"as in the spec": spec, **{shape: shaped(spec, shape) for shape in SHAPES}}
    return [
        (size, variant)
        for size, one in sizes.items()
        for variant in (one.with_strategy(strategy) for strategy in FUSED)
        if not check(variant)
    ]


def child(path: Path) -> None:
    """Launch every variant once."""
    for _, spec in variants(path):
        x, parameters = draw(spec, kgen.make_plan(spec).g.N or DYNAMIC_BATCH, "uniform", 0, "cuda")
        package = find_package(spec)
        with torch.no_grad():
            package.fused_block(x, *(parameters[key] for key in package.PARAMETERS))
        torch.cuda.synchronize()


def main() -> None:
    if sys.argv[1] == "--child":
        child(Path(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("spec", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    command = [
        "ncu", "--csv", "--print-units", "base", "--clock-control", "none",
        "--kernel-name", "regex:_fused$", "--metrics", ",".join(METRICS),
        sys.executable, __file__, "--child", str(arguments.spec),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode or '"ID"' not in done.stdout:
        raise SystemExit(f"ncu failed:\n{(done.stdout + done.stderr)[-2000:]}")
    rows = []
    for (size, spec), counted in zip(
        variants(arguments.spec), parse(done.stdout, METRICS), strict=True
    ):
        plan = kgen.make_plan(spec)
        needed = 4 * (plan.g.N or DYNAMIC_BATCH) * (plan.g.x_elements + plan.g.y_elements)
        moved = counted["dram_read_bytes"] + counted["dram_write_bytes"]
        row = {
            "size": size, "strategy": plan.strategy, "spec_hash": spec.hash(),
            "bytes_needed": needed, "dram_over_needed": moved / needed, **counted,
        }  # fmt: skip
        rows.append(row)
        print(
            f"{size:14} {plan.strategy:12} {row['nanoseconds'] / 1e6:.4f} ms, "
            f"DRAM {row['dram_over_needed']:.3f} of needed, issue {row['issue_percent']:.0f} %, "
            f"tensor {row['tensor_percent']:.0f} %, LSU {row['lsu_percent']:.0f} %"
        )
    record = {**context("counters.py"), "spec": arguments.spec.name, "rows": rows}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
