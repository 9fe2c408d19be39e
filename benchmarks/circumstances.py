"""Times shipped specs against eager PyTorch and torch.compile, in one process.

    python benchmarks/measure.py specs/*.yaml --output benchmarks/results/h200.json
    python benchmarks/measure.py specs/conv8x32_k3_gn8.yaml --shapes --output ...

Each kernel is verified before it is timed. Rows are timed in interleaved rounds with CUDA events,
medians in ms: `cold` flushes L2 before each call, `warm` does not, and `graph` replays a CUDA graph
of the call with a flushed L2, so that the host's cost drops out. Errors are against fp64.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from shapes import SHAPES, shaped

import kgen
from kgen.bench.cuda import graphed
from kgen.bench.run import errors as largest_and_rms
from kgen.checks import PackageCandidate, verify_candidate
from kgen.compiler import nvrtc_version
from kgen.constraints import check
from kgen.package import find_package
from kgen.reference import EagerBlock, draw
from kgen.spec import Schedule
from kgen.verdict import CASES

KINDS = ("cold", "warm", "graph")
FLUSH_BYTES = 256 << 20  # several times any L2


def without_folder(argument: str) -> str:
    """A result file's place in the repository, wherever this run wrote it."""
    name = Path(argument).name
    return f"benchmarks/results/{name}" if name.endswith(".json") else argument


def context(script: str) -> dict[str, object]:
    query = "name,driver_version,clocks.sm,clocks.mem"
    smi = subprocess.run(
        ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
        capture_output=True, text=True, check=True,
    ).stdout.splitlines()[0]  # fmt: skip
    name, driver, sm_clock, memory_clock = (part.strip() for part in smi.split(","))
    return {
        "gpu": name,
        "driver": driver,
        "clocks": {"sm": sm_clock, "memory": memory_clock},
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nvrtc": nvrtc_version(),
        "kgen": kgen.__version__,
        "python": sys.version.split()[0],
        "cudnn_allow_tf32": torch.backends.cudnn.allow_tf32,
        "date": datetime.date.today().isoformat(),
        "command": f"python benchmarks/{script} " + " ".join(map(without_folder, sys.argv[1:])),
    }


def time_rounds(
    rows: dict[str, Callable[[], object]], rounds: int, cold: bool
) -> dict[str, dict[str, float]]:
    """Interleaved rounds: every row once a round, so that drift hits all of them alike."""
    flush = torch.empty(FLUSH_BYTES // 4, device="cuda") if cold else None
    for call in rows.values():
        call()
        call()
    times: dict[str, list[float]] = {label: [] for label in rows}
    for _ in range(rounds):
        for label, call in rows.items():
            if flush is not None:
                flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            times[label].append(start.elapsed_time(end))
    result = {}
    for label, values in times.items():
        values.sort()
        result[label] = {
            "median": statistics.median(values),
            "p20": values[len(values) // 5],
            "p80": values[len(values) * 4 // 5],
        }
    return result


def errors(spec: kgen.Spec, y: torch.Tensor, x: torch.Tensor, parameters: dict) -> dict:
    biggest, rms = largest_and_rms(spec, y, x, parameters)
    return {"max_error": biggest, "rms_error": rms}


def measure(spec: kgen.Spec, strategies: list[str], rounds: int, cases: int) -> dict[str, object]:
    variants = {spec.schedule.strategy: spec} if spec.schedule.strategy else {}
    for strategy in strategies:
        variant = spec.with_strategy(strategy)
        if not check(variant):
            variants.setdefault(strategy, variant)
    batch = 16 if spec.problem.batch == "dynamic" else spec.problem.batch
    x, parameters = draw(spec, batch, "uniform", 0, "cuda")
    eager = EagerBlock(spec).cuda().eval()
    eager.load_state_dict(parameters)
    torch._dynamo.reset()  # else a second size of the block is compiled for any size, and slower
    compiled = torch.compile(EagerBlock(spec).cuda().eval(), dynamic=False)
    compiled.load_state_dict({f"_orig_mod.{key}": one for key, one in parameters.items()})
    rows: dict[str, Callable[[], object]] = {}
    facts: dict[str, dict] = {}
    for variant in variants.values():
        package = find_package(variant)
        report = verify_candidate(variant, PackageCandidate(package), "cuda", CASES[:cases])
        if not report.passed:
            print(report.table(), flush=True)  # what is wrong has no time
            facts[f"kgen {report.strategy}"] = {"failed": report.summary()}
            continue
        ordered = [parameters[key] for key in package.PARAMETERS]
        row = f"kgen {report.strategy}"
        rows[row] = lambda package=package, ordered=ordered: package.fused_block(x, *ordered)
        facts[row] = {
            "spec_hash": variant.hash(),
            "verified_cases": len(report.cases),
            "verified_max_error": report.max_error,
            "launches": package.manifest["launches"],
            "kernel_sha256": package.manifest["files"]["kernel.cu"],
        }
    rows["eager"] = lambda: eager(x)
    rows["torch.compile"] = lambda: compiled(x)
    with torch.no_grad():
        for label, call in rows.items():
            facts.setdefault(label, {}).update(errors(spec, call(), x, parameters))
            torch.cuda.empty_cache()
        graphs = {label: graphed(call) for label, call in rows.items()}
        for kind, calls in (("cold", rows), ("warm", rows), ("graph", graphs)):
            for label, times in time_rounds(calls, rounds, cold=kind != "warm").items():
                facts[label][kind] = times
    plan = kgen.make_plan(spec)
    needed = 4 * batch * (plan.g.x_elements + plan.g.y_elements)
    return {
        "name": spec.name,
        "spec_hash": spec.hash(),
        "batch": batch,
        "x": list(x.shape),
        "bytes_needed": needed,
        "rounds": rounds,
        "chosen": kgen.make_plan(spec.model_copy(update={"schedule": Schedule()})).strategy,
        "rows": facts,
    }


def copy_rate() -> float:
    """Bytes read and written a second by a device-to-device copy of 1 GiB."""
    source = torch.empty(1 << 28, device="cuda")
    target = torch.empty_like(source)
    times = time_rounds({"copy": lambda: target.copy_(source)}, 20, cold=False)
    return 8 * source.numel() / times["copy"]["median"] * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("specs", nargs="+", type=Path)
    parser.add_argument("--strategies", default="single_pass,recompute,two_kernel,hybrid")
    parser.add_argument("--cases", type=int, default=len(CASES), help="of verification")
    parser.add_argument("--shapes", action="store_true", help="other shapes of the first spec")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    result: dict[str, object] = context("measure.py")
    result["copy_bytes_per_second"] = copy_rate()
    result["specs"] = []
    loaded = [(path.name, kgen.load_spec(path)) for path in arguments.specs]
    if arguments.shapes:
        loaded = [(loaded[0][0], shaped(loaded[0][1], shape)) for shape in SHAPES]
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    for file, spec in loaded:
        strategies = arguments.strategies.split(",")
        one = {"spec": file, **measure(spec, strategies, arguments.rounds, arguments.cases)}
        result["specs"].append(one)
        print(f"{one['name']}  x {one['x']}  needs {one['bytes_needed'] / 1e6:.1f} MB")
        for label, row in one["rows"].items():
            if "failed" in row:
                continue
            medians = "  ".join(f"{kind} {row[kind]['median']:8.4f}" for kind in KINDS)
            print(f"  {label:18} {medians} ms  max error {row['max_error']:.2e}", flush=True)
        torch.cuda.empty_cache()
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
