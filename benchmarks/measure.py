"""Times shipped specs against eager PyTorch and torch.compile, in one process.

    python benchmarks/measure.py specs/*.yaml --output benchmarks/results/h200.json

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

import kgen
from kgen.compiler import nvrtc_version
from kgen.package import find_package
from kgen.reference import EagerBlock, chunks, draw, oracle

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


def graphed(call: Callable[[], object]) -> Callable[[], object]:
    """The call as one CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def errors(spec: kgen.Spec, y: torch.Tensor, x: torch.Tensor, parameters: dict) -> dict:
    biggest, squares, count = 0.0, 0.0, 0
    for part in chunks(spec, x):
        error = (y[part].double() - oracle(spec, x[part], parameters)).abs()
        biggest = max(biggest, float(error.max()))
        squares += float(error.square().sum())
        count += error.numel()
    return {"max_error": biggest, "rms_error": (squares / count) ** 0.5}


def measure(path: Path, strategies: list[str], rounds: int) -> dict[str, object]:
    spec = kgen.load_spec(path)
    variants = {spec.schedule.strategy or "chosen": spec}
    for strategy in strategies:
        variants.setdefault(strategy, spec.with_strategy(strategy))
    batch = 16 if spec.problem.batch == "dynamic" else spec.problem.batch
    x, parameters = draw(spec, batch, "uniform", 0, "cuda")
    eager = EagerBlock(spec).cuda().eval()
    eager.load_state_dict(parameters)
    compiled = torch.compile(EagerBlock(spec).cuda().eval())
    compiled.load_state_dict({f"_orig_mod.{key}": one for key, one in parameters.items()})
    rows: dict[str, Callable[[], object]] = {}
    facts: dict[str, dict] = {}
    for variant in variants.values():
        report = kgen.verify(variant)
        if not report.passed:
            raise SystemExit(report.table())
        package = find_package(variant)
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
        graphs = {label: graphed(call) for label, call in rows.items()}
        for kind, calls in (("cold", rows), ("warm", rows), ("graph", graphs)):
            for label, times in time_rounds(calls, rounds, cold=kind != "warm").items():
                facts[label][kind] = times
    plan = kgen.make_plan(spec)
    needed = 4 * batch * (plan.g.x_elements + plan.g.y_elements)
    return {
        "spec": path.name,
        "name": spec.name,
        "spec_hash": spec.hash(),
        "batch": batch,
        "x": list(x.shape),
        "bytes_needed": needed,
        "rounds": rounds,
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
    parser.add_argument("--strategies", default="two_kernel,hybrid")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    result: dict[str, object] = context("measure.py")
    result["copy_bytes_per_second"] = copy_rate()
    result["specs"] = []
    for path in arguments.specs:
        one = measure(path, arguments.strategies.split(","), arguments.rounds)
        result["specs"].append(one)
        print(f"{one['name']}  x {one['x']}  needs {one['bytes_needed'] / 1e6:.1f} MB")
        for label, row in one["rows"].items():
            medians = "  ".join(f"{kind} {row[kind]['median']:8.4f}" for kind in KINDS)
            print(f"  {label:18} {medians} ms  max error {row['max_error']:.2e}", flush=True)
        torch.cuda.empty_cache()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
