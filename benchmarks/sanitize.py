"""Runs every shipped spec once under each compute-sanitizer tool and records the verdicts.

    python benchmarks/sanitize.py specs/*.yaml --output benchmarks/results/h200_sanitizer.json

Each run launches the emitted kernels of one spec and strategy at full size; only they are checked.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")


def child(path: str, strategy: str) -> None:
    """What runs under the sanitizer: one call of the block on random data."""
    import torch

    import kgen
    from kgen.package import find_package
    from kgen.reference import draw
    from kgen.spec import Schedule

    spec = kgen.load_spec(path)
    if spec.schedule.strategy != strategy:
        spec = spec.model_copy(update={"schedule": Schedule(strategy=strategy)})
    batch = 3 if spec.problem.batch == "dynamic" else spec.problem.batch
    x, parameters = draw(spec, batch, "uniform", 0, "cuda")
    package = find_package(spec)
    y = package.fused_block(x, *(parameters[key] for key in package.PARAMETERS))
    torch.cuda.synchronize()
    print("finite", bool(y.isfinite().all()))


def run(job: tuple[str, str, str]) -> dict[str, object]:
    tool, path, strategy = job
    name = Path(path).stem
    command = [
        "compute-sanitizer", "--tool", tool, "--kernel-name", f"kernel_substring={name}_",
        "--error-exitcode", "9", sys.executable, __file__, "--child", path, strategy,
    ]  # fmt: skip
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
        output, code = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired:
        output, code = "timeout", 124
    summary = re.findall(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (.*)", output)
    clean = code == 0 and "finite True" in output and bool(summary)
    result = {"tool": tool, "spec": Path(path).name, "strategy": strategy, "clean": clean,
              "exit_code": code, "summary": summary}  # fmt: skip
    if not clean:
        result["output"] = output[-1500:]
    return result


def main() -> None:
    if len(sys.argv) == 4 and sys.argv[1] == "--child":
        child(sys.argv[2], sys.argv[3])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("specs", nargs="+")
    parser.add_argument("--strategies", default="two_kernel,hybrid")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    jobs = [
        (tool, path, strategy)
        for path in arguments.specs
        for strategy in arguments.strategies.split(",")
        for tool in TOOLS
    ]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        results = list(pool.map(run, jobs))
    sys.path.insert(0, str(Path(__file__).parent))
    from measure import context

    record = {**context([]), "results": results}
    record["command"] = "python benchmarks/sanitize.py " + " ".join(sys.argv[1:])
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(record, indent=1) + "\n")
    for one in results:
        if not one["clean"]:
            print(one["tool"], one["spec"], one["strategy"], one["exit_code"], one["summary"])
            print(one.get("output", ""))
    print(f"{sum(one['clean'] for one in results)} of {len(results)} runs clean")


if __name__ == "__main__":
    main()
