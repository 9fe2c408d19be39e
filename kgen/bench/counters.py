"""What ncu counts of a kernel, in a process of its own."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from kgen.bench.timing import DYNAMIC_BATCH
from kgen.build import compile_kernel
from kgen.emit import render
from kgen.errors import UsageError
from kgen.spec import Spec

SECONDS = 120
STALLS = (
    "barrier", "dispatch_stall", "lg_throttle", "long_scoreboard", "math_pipe_throttle",
    "mio_throttle", "not_selected", "short_scoreboard", "wait",
)  # fmt: skip
# Name in a record -> ncu's metric. Bytes and nanoseconds are added up over the launches of one
# call; percentages and stalls, warps that wait for each instruction issued, are the longest one's.
SUMS = {
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_write_bytes": "dram__bytes_write.sum",
    "nanoseconds": "gpu__time_duration.sum",
}
SHARES = {
    "issue_percent": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "tensor_percent": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "lsu_percent": "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed",
    **{
        f"stall_{one}": f"smsp__average_warps_issue_stalled_{one}_per_issue_active.ratio"
        for one in STALLS
    },
}


def why_no_ncu() -> str:
    """Why nothing can be counted here; empty if it can."""
    return "" if shutil.which("ncu") else "ncu is not on PATH"


@dataclass(frozen=True)
class Counted:
    """What one call of a spec's kernels did. counters: by name, spills in bytes among them.
    launch_ns: the time of each launch under the profiler, in order."""

    counters: dict[str, float]
    launch_ns: tuple[float, ...]


def count(spec: Spec, device: str) -> Counted:
    """Count one call of a spec's kernels on a device, for instance `cuda:0`.

    Only kgen's own kernels count, not a library's convolution. Raises: UsageError if ncu fails.
    """
    metrics = {metric: name for name, metric in {**SUMS, **SHARES}.items()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spec.json"
        path.write_text(json.dumps(spec.canonical()))
        command = [
            "ncu", "--csv", "--print-units", "base", "--clock-control", "none",
            "--kernel-name", f"regex:^{spec.name}_", "--metrics", ",".join(metrics),
            sys.executable, "-m", "kgen.bench.counters", str(path), device,
        ]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UsageError(f"ncu failed: {error}") from None
    if done.returncode or '"ID"' not in done.stdout:
        last = (done.stdout + done.stderr).strip().splitlines()[-1:] or ["no output"]
        raise UsageError(f"ncu failed: {last[0]}")
    launches = parse(done.stdout, metrics)
    found = combine(launches)
    import torch

    from kgen.runtime import native_arch

    arch = native_arch(*torch.cuda.get_device_capability(device))
    build = compile_kernel(render(spec)["kernel.cu"], arch)
    found["spill_bytes"] = float(sum(one.spill_stores + one.spill_loads for one in build.resources))
    return Counted(found, tuple(one["nanoseconds"] for one in launches))


def parse(output: str, metrics: dict[str, str]) -> list[dict[str, float]]:
    """ncu's CSV as one mapping a launch, in order of the launches. metrics: ncu's name -> ours."""
    launches: dict[str, dict[str, float]] = {}
    for row in csv.DictReader(output[output.index('"ID"') :].splitlines()):
        name = metrics[row["Metric Name"]]
        launches.setdefault(row["ID"], {})[name] = float(row["Metric Value"].replace(",", ""))
    return list(launches.values())


def combine(launches: list[dict[str, float]]) -> dict[str, float]:
    """One call's counters from those of its launches."""
    longest = max(launches, key=lambda one: one["nanoseconds"])
    return {name: sum(one[name] for one in launches) for name in SUMS} | {
        name: longest[name] for name in SHARES
    }


def main() -> None:
    """Call a spec's kernels once, for ncu to watch. Arguments: a file with the spec as JSON, and
    the device."""
    import torch

    from kgen.geometry import geometry
    from kgen.package import find_package, spec_from_canonical
    from kgen.reference import draw

    spec = spec_from_canonical(json.loads(Path(sys.argv[1]).read_text()))
    device = sys.argv[2]
    torch.cuda.set_device(device)
    x, parameters = draw(spec, geometry(spec.problem).N or DYNAMIC_BATCH, "uniform", 0, device)
    package = find_package(spec)
    with torch.no_grad():
        package.fused_block(x, *(parameters[key] for key in package.PARAMETERS))
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
