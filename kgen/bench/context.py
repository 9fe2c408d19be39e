"""Under which circumstances a benchmark ran, and what may have disturbed it."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from kgen.bench.record import Context
from kgen.compiler import nvrtc_version
from kgen.version import __version__

Query = Callable[[Sequence[str]], str]

CLOCKS = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw")
# Bits of NVML's nvmlClocksEventReasons that slow a GPU down; the others only describe its state.
SLOWED_BY = {
    0x4: "the power cap",
    0x8: "a hardware slowdown",
    0x20: "software thermal limits",
    0x40: "hardware thermal limits",
    0x80: "a power brake",
}
# Bits by the counter of the time that each was set, where there is one.
COUNTERS = {
    "sw_power_cap": 0x4,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake_slowdown": 0x80,
}


def nvidia_smi(arguments: Sequence[str]) -> str:
    """Output of nvidia-smi, empty where it is missing or fails."""
    command = ["nvidia-smi", *arguments, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _identity(device: int) -> list[str]:
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return ["-i", uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"]


def clocks(which: Sequence[str], query: Query = nvidia_smi) -> dict[str, float]:
    """MHz, degrees and watts by the names in CLOCKS; empty where they cannot be read."""
    found: dict[str, float] = {}
    fields = query([*which, f"--query-gpu={','.join(CLOCKS)}"]).split(",")
    for name, text in zip(CLOCKS, fields, strict=False):
        try:
            found[name] = float(text)
        except ValueError:
            continue
    return found


def slowed_by(which: Sequence[str], query: Query = nvidia_smi) -> list[str]:
    """What holds the clocks down at this moment."""
    for key in ("clocks_event_reasons.active", "clocks_throttle_reasons.active"):
        text = query([*which, f"--query-gpu={key}"])
        try:
            bits = int(text, 16)
        except ValueError:
            continue
        return [reason for bit, reason in SLOWED_BY.items() if bits & bit]
    return []


def slowed_for(which: Sequence[str], query: Query = nvidia_smi) -> dict[str, float]:
    """Seconds since the driver was loaded that something held the clocks down, by its name.

    Empty where the driver does not count them (before 550).
    """
    keys = ",".join(f"clocks_event_reasons_counters.{name}" for name in COUNTERS)
    texts = query([*which, f"--query-gpu={keys}"]).split(",")
    found: dict[str, float] = {}
    for bit, text in zip(COUNTERS.values(), texts, strict=False):
        with suppress(ValueError):
            found[SLOWED_BY[bit]] = 1e-6 * float(text.strip().removesuffix("us"))
    return found


def other_processes(
    which: Sequence[str],
    query: Query = nvidia_smi,
    exists: Callable[[int], bool] = lambda pid: Path(f"/proc/{pid}").exists(),
) -> list[str]:
    """Other processes with memory on the GPU, `pid name` each.

    In a container the driver may name this process by a number that means nothing inside: if it is
    not listed by its own, one process that cannot be seen from here is taken for it.
    """
    lines = query([*which, "--query-compute-apps=pid,process_name"]).splitlines()
    found = [(pid.strip(), name.strip()) for pid, name in (_pair(one) for one in lines) if pid]
    own = str(os.getpid())
    if own in (pid for pid, _ in found):
        found = [one for one in found if one[0] != own]
    else:
        unseen = [one for one in found if not (one[0].isdecimal() and exists(int(one[0])))]
        if unseen:
            found.remove(unseen[0])
    return [f"{pid} {name}" for pid, name in found]


def _pair(line: str) -> tuple[str, str]:
    pid, _, name = line.partition(",")
    return pid, name


def checkout_commit(folder: Path = Path(__file__).parent) -> str | None:
    """The commit that the files of this package are of, None where git cannot tell."""

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(folder), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    tracked = git("ls-files", "--error-unmatch", "__init__.py")  # not a checkout of something else
    head = git("rev-parse", "HEAD") if tracked else None
    changed = git("status", "--porcelain", "--untracked-files=no", ".")
    return None if head is None or changed is None else head + ("-dirty" if changed else "")


class Circumstances:
    """What is looked at before a run, around its timing, and while the GPU is still warm from it.

    command: the arguments that repeat the run.
    """

    def __init__(self, command: Sequence[str], device: int = 0, query: Query = nvidia_smi) -> None:
        self.command, self.device, self.query = command, device, query
        self.which = _identity(device)
        self.before = clocks(self.which, query)
        self.others = set(other_processes(self.which, query))
        self.slowed: dict[str, float] = {}
        self.warnings: list[str] = []
        if not self.before:
            self.warnings.append("nvidia-smi gave no clocks: a throttled GPU would go unnoticed")

    def timing_begins(self) -> None:
        """Called before the first timed call."""
        self.slowed = slowed_for(self.which, self.query)

    def timing_ended(self) -> Context:
        """The context of the record; called after the last timed call."""
        properties = torch.cuda.get_device_properties(self.device)
        after = clocks(self.which, self.query)
        others = self.others | set(other_processes(self.which, self.query))
        warnings = [
            *self.warnings,
            *(f"another process was on the GPU: {one}" for one in sorted(others)),
            *self.throttled(),
        ]
        driver = self.query([*self.which, "--query-gpu=driver_version"]) or "unknown"
        return Context(
            gpu=properties.name,
            driver=driver,
            sms=properties.multi_processor_count,
            torch=torch.__version__,
            cuda=torch.version.cuda or "none",
            cudnn=torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
            nvrtc=nvrtc_version(),
            kgen=__version__,
            python=sys.version.split()[0],
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            command=" ".join(self.command),
            flags={
                "cudnn.allow_tf32": torch.backends.cudnn.allow_tf32,
                "cuda.matmul.allow_tf32": torch.backends.cuda.matmul.allow_tf32,
                "cudnn.benchmark": torch.backends.cudnn.benchmark,
                "cudnn.deterministic": torch.backends.cudnn.deterministic,
            },
            clocks_before=self.before,
            clocks_after=after,
            commit=checkout_commit(),
            warnings=tuple(warnings),
        )

    def throttled(self) -> list[str]:
        """A line for each reason for which clocks were held down since the timing began."""
        counted = slowed_for(self.which, self.query)
        if not counted:
            now = slowed_by(self.which, self.query)
            return [f"the clocks were held down by {one} when the timing ended" for one in now]
        during = {one: after - self.slowed.get(one, after) for one, after in counted.items()}
        return [
            f"the clocks were held down by {one} for {seconds:.2f} s of the timing"
            for one, seconds in during.items()
            if seconds > 0
        ]
