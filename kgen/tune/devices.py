"""The GPUs of this machine, asked from a process of its own so that the tuner holds no memory."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from kgen.compiler import CacheError, CompileError, cache_dir, compiler_identity
from kgen.errors import UsageError
from kgen.tune.workers import NICE, WorkerError, Workers
from kgen.version import __version__

PROBE_SECONDS = 300.0


@dataclass(frozen=True)
class Device:
    """One GPU. index: torch's. arch: what is compiled for it, for instance `sm_90a`; nvrtc: by
    what, see `kgen.compiler.compiler_identity`."""

    index: int
    gpu: str
    uuid: str
    arch: str
    driver: str
    nvrtc: str


@dataclass(frozen=True)
class Where:
    """What a measurement holds for, beside the block: it is no measurement of anything else."""

    gpu: str
    driver: str
    nvrtc: str
    kgen: str = __version__

    def to_json(self) -> dict[str, str]:
        """Plain values."""
        return asdict(self)


def find_devices() -> list[Device]:
    """Every visible GPU. Raises: UsageError that says why there is none."""
    probe = Workers(1, limit=lambda: PROBE_SECONDS)
    try:
        problem, devices = probe.submit(visible_devices).result()
    except WorkerError as error:
        problem, devices = f"the GPUs cannot be asked: {error}", []
    finally:
        probe.shutdown(wait=False, cancel_futures=True)
    if problem:
        raise UsageError(f"{problem}; --simulate ranks by the cost model, without a GPU")
    return devices


def choose_devices(
    found: Sequence[Device], wanted: Sequence[int] | None, targets: Sequence[str]
) -> list[Device]:
    """The devices to measure on: those wanted, else all of them.

    Raises: UsageError for one that is not there, for different models, whose times cannot be
    compared, and for a GPU that the spec is not made for.
    """
    by_index = {one.index: one for one in found}
    for index in wanted or ():
        if index not in by_index:
            listed = ", ".join(map(str, by_index))
            raise UsageError(f"--devices: there is no GPU {index}; visible are {listed}")
    chosen = [by_index[index] for index in dict.fromkeys(wanted or by_index)]
    for one in chosen:
        if (one.gpu, one.driver) != (chosen[0].gpu, chosen[0].driver):
            raise UsageError(
                f"--devices: GPU {chosen[0].index} is {chosen[0].gpu}, GPU {one.index} is "
                f"{one.gpu}; their times cannot be compared, tune on one model at a time"
            )
        if one.arch not in targets:
            raise UsageError(
                f"GPU {one.index} ({one.gpu}) is {one.arch}, the spec's targets are "
                f"{', '.join(targets)}; add {one.arch} to them to tune for it"
            )
    return chosen


def device_lock(device: Device) -> Path:
    """The file that is locked while something is timed on a device. Raises: UsageError."""
    try:
        return cache_dir() / "tune" / "locks" / f"{device.uuid}.lock"
    except CacheError as error:
        raise UsageError(str(error)) from None


def visible_devices() -> tuple[str, list[Device]]:
    """Why no GPU can be used, or the GPUs. Run in a process of its own: it initialises CUDA."""
    from kgen.verify import why_no_device

    problem = why_no_device()
    if problem:
        return problem, []
    try:
        nvrtc = compiler_identity()
    except CompileError as error:
        return str(error), []
    import torch

    from kgen.runtime import native_arch

    driver = driver_version()
    devices = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        uuid = str(getattr(properties, "uuid", "") or f"gpu-{index}")
        arch = native_arch(properties.major, properties.minor)
        devices.append(Device(index, properties.name, uuid, arch, driver, nvrtc))
    return "", devices


def driver_version() -> str:
    """The driver's version, as nvidia-smi tells it, else the CUDA version that it serves."""
    smi = shutil.which("nvidia-smi")
    if smi:
        command = [smi, "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        lines = done.stdout.split()
        if done.returncode == 0 and lines:
            return lines[0]
    from cuda.bindings import driver

    _, version = driver.cuDriverGetVersion()
    return f"CUDA {version // 1000}.{version % 1000 // 10}"


def prepare_measuring(device: int) -> None:
    """Import what measuring needs and use the device, so that no task pays or is blamed for it."""
    import torch

    import kgen.bench.cuda
    import kgen.bench.timing
    import kgen.checks
    import kgen.reference
    import kgen.tune.task  # noqa: F401

    torch.zeros(1, device=f"cuda:{device}").item()


def prepare_compiling() -> None:
    """Load NVRTC and the templates before the first task."""
    import kgen.tune.task  # noqa: F401
    from kgen.compiler import nvrtc_version

    nvrtc_version()


def local_executor(devices: Sequence[Device], compilers: int, device: int | None) -> Workers:
    """Processes of this machine: to compile where `device` is None, else the one of that GPU."""
    if device is None:
        return Workers(compilers, prepare=prepare_compiling, nice=NICE)
    lock = next(device_lock(one) for one in devices if one.index == device)
    return Workers(1, prepare=partial(prepare_measuring, device), lock=lock)


def local_executors(devices: Sequence[Device], compilers: int) -> partial[Workers]:
    """The factory of executors for these GPUs: one process each, and `compilers` that compile."""
    return partial(local_executor, tuple(devices), compilers)


def compiler_processes(devices: int) -> int:
    """Processes that compile: a core is left to each device's worker and one to the tuner."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, min(4 * devices, cores - devices - 1))
