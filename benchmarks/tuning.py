"""Compares `kgen tune` with an exhaustive run, and kills it once on the way.

    python benchmarks/tuning.py specs/conv8x8_1x1out.yaml specs/conv1x7_k5.yaml --seconds 40 \\
        --output benchmarks/results/h200_tuning.json

For each spec: `kgen tune` is started and killed with SIGKILL, started again with the rest of the
seconds on the same store, which must keep what the first had measured, and then the same store is
filled with every candidate that is legal, those that the cost model leaves out included. At the end
the tuned winner and the best of all are timed again, in interleaved rounds. --strategies restricts
all three runs alike.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from circumstances import command_line, context

import kgen
from kgen.bench.cuda import CudaTimer, graphed
from kgen.bench.timing import DYNAMIC_BATCH, time_rounds
from kgen.package import find_package
from kgen.reference import draw
from kgen.tune import tune
from kgen.tune.space import with_schedule


def timed_lines(store: Path) -> int:
    return len(store.read_text().splitlines()) if store.exists() else 0


def command(path: Path, store: Path, seconds: float, strategies: str | None) -> list[str]:
    chosen = ["--strategies", strategies] if strategies else []
    return [
        sys.executable, "-m", "kgen", "tune", str(path), "--budget", f"{seconds:.1f}s",
        "--store", str(store), "--json", *chosen,
    ]  # fmt: skip


def again(spec: kgen.Spec, schedules: dict[str, dict[str, object]]) -> dict[str, float]:
    """Median ms of schedules of one spec, timed in turn."""
    batch = DYNAMIC_BATCH if spec.problem.batch == "dynamic" else spec.problem.batch
    x, parameters = draw(spec, batch, "uniform", 0, "cuda")
    rows = {}
    for label, schedule in schedules.items():
        package = find_package(with_schedule(spec, schedule))
        ordered = [parameters[key] for key in package.PARAMETERS]
        with torch.no_grad():
            rows[label] = graphed(partial(package.fused_block, x, *ordered))
    calls = {label: (lambda _, run=run: run()) for label, run in rows.items()}
    times = time_rounds(calls, CudaTimer("cuda"), cold=True, seconds=4.0)
    return {label: one.median for label, one in times.items()}


def compare(path: Path, seconds: float, most: float, strategies: str | None) -> dict[str, object]:
    spec = kgen.load_spec(path)
    store = Path(tempfile.mkdtemp()) / "store.jsonl"
    start = time.monotonic()
    victim = subprocess.Popen(
        command(path, store, seconds, strategies),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    while timed_lines(store) < 8 and time.monotonic() - start < seconds / 2:
        time.sleep(0.1)
    victim.kill()
    victim.wait()
    before, used = timed_lines(store), time.monotonic() - start
    done = subprocess.run(
        command(path, store, seconds - used, strategies), capture_output=True, text=True,
        timeout=seconds + 60, check=True,
    )  # fmt: skip
    tuned = json.loads(done.stdout)
    spent = time.monotonic() - start
    names = strategies.split(",") if strategies else None
    everything = tune(spec, strategies=names, budget=most, store=store, factor=1e9)
    right = [row for row in everything.rows if row.outcome is not None and row.outcome.ms]
    best = min(right, key=lambda row: row.outcome.ms)
    retimed = again(spec, {"tuned": tuned["winner"]["schedule"], "best": best.schedule})
    return {
        "spec": path.name,
        "spec_text": path.read_text(),
        "spec_hash": spec.hash(),
        "strategies": strategies or "all",
        "command": command_line("tuning.py"),
        "seconds": spent,
        "kept_after_kill": before,
        "tuned": {
            key: tuned[key] for key in ("counts", "pruned", "left", "measured", "winner", "notes")
        },
        "exhaustive": {
            "counts": everything.counts,
            "left": everything.left,
            "seconds": everything.seconds,
            "best": best.to_json(),
        },
        "retimed_ms": retimed,
        "tuned_over_best": retimed["tuned"] / retimed["best"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("specs", nargs="+", type=Path)
    parser.add_argument("--seconds", type=float, default=60, help="of tuning, the kill included")
    parser.add_argument("--most", type=float, default=300, help="seconds of the exhaustive run")
    parser.add_argument("--strategies", help="comma-separated; all that fit if left out")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    record = {**context("tuning.py"), "rows": []}
    if arguments.output.exists():  # rows of several calls in one file
        record["rows"] = json.loads(arguments.output.read_text())["rows"]
    for path in arguments.specs:
        row = compare(path, arguments.seconds, arguments.most, arguments.strategies)
        record["rows"].append(row)
        arguments.output.write_text(json.dumps(record, indent=1) + "\n")
        print(
            f"{row['spec']} {row['strategies']}: {row['seconds']:.0f} s, "
            f"kept {row['kept_after_kill']}, {row['tuned']['counts']}, "
            f"left {row['tuned']['left']}; exhaustive "
            f"{row['exhaustive']['counts']}, left {row['exhaustive']['left']}, "
            f"{row['exhaustive']['seconds']:.0f} s; {row['retimed_ms']}, "
            f"{row['tuned_over_best']:.4f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
