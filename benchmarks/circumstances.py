"""What the records of these scripts say of how they were made."""

from __future__ import annotations

import datetime
import subprocess
import sys
from pathlib import Path

import torch

import kgen
from kgen.compiler import nvrtc_version


def without_folder(argument: str) -> str:
    """A result file's place in the repository, wherever this run wrote it."""
    name = Path(argument).name
    return f"benchmarks/results/{name}" if name.endswith(".json") else argument


def command_line(script: str) -> str:
    """The command that repeats this run of a script of this folder."""
    return f"python benchmarks/{script} " + " ".join(map(without_folder, sys.argv[1:]))


def context(script: str) -> dict[str, object]:
    """GPU, versions, and the command that repeats the run of a script of this folder."""
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
        "command": command_line(script),
    }
