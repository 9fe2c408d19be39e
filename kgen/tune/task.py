"""One candidate as plain data, and the one function that evaluates it, wherever that runs.

A `Task` goes to an executor, an `Outcome` comes back; both are dataclasses of JSON values. A
candidate takes two tasks: `compile` needs a processor and no GPU, `measure` verifies and times on
the task's device and expects to have it to itself.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from math import isfinite
from typing import Any, Literal

from kgen.build import compile_kernel
from kgen.emit import render
from kgen.errors import BuildError
from kgen.package import find_package, spec_from_canonical
from kgen.spec import Spec
from kgen.verdict import CASES

TIMING_SECONDS = 2.0  # that a candidate is timed for at most
LIMIT_SECONDS = 60.0  # for each step of a candidate, before it counts as hanging

Step = Literal["compile", "measure"]

# What `evaluate` returns where a candidate is not finished: compiled without spills, or right and
# timed. `kgen.tune.result` makes `winner` or `slower` of the latter.
COMPILED, TIMED = "compiled", "timed"
FAILED = ("compile", "spills", "timeout", "wrong")
STATUSES = ("winner", "slower", *FAILED, "constraint")


@dataclass(frozen=True)
class Task:
    """What a worker is asked to do.

    spec: `Spec.canonical()`, its schedule ignored; schedule: the candidate's. arch: to compile for,
    for instance `sm_90a`. device: index of the GPU to measure on. limit: seconds until a worker is
    killed. seconds: of timing at most. cases: of verification, of kgen.verdict.CASES.
    """

    step: Step
    spec: dict[str, Any] = field(hash=False)
    schedule: dict[str, Any] = field(hash=False)
    arch: str
    device: int = 0
    limit: float = LIMIT_SECONDS
    seconds: float = TIMING_SECONDS
    cases: int = len(CASES)

    def to_json(self) -> dict[str, Any]:
        """Plain values; `Task(**values)` is the task again."""
        return asdict(self)


@dataclass(frozen=True)
class Outcome:
    """What became of a task. Times in ms, `*_seconds` in s.

    status: see COMPILED, TIMED, FAILED. max_error: against fp64, over all cases. spills: bytes
    stored and loaded. registers: of the kernel that uses most. lasting: whether another run would
    find the same; if not, it is not kept.
    """

    status: str
    reason: str = ""
    ms: float | None = None
    p20: float | None = None
    p80: float | None = None
    relative_error: float | None = None
    rounds: int | None = None
    registers: int | None = None
    spills: int | None = None
    max_error: float | None = None
    compile_seconds: float | None = None
    measure_seconds: float | None = None
    kernel_sha256: str | None = None
    lasting: bool = True

    def to_json(self) -> dict[str, Any]:
        """The fields that hold something; JSON has no infinities and no NaN."""
        return {
            key: value
            for key, value in asdict(self).items()
            if value is not None and not (isinstance(value, float) and not isfinite(value))
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Outcome:
        """The outcome of `to_json`. Raises: ValueError if it is not one."""
        kinds: dict[str, tuple[type, ...]] = {
            one.name: (int, float) if "float" in str(one.type) else (int,) for one in fields(cls)
        }
        kinds |= {"status": (str,), "reason": (str,), "kernel_sha256": (str,), "lasting": (bool,)}
        for key, value in values.items():
            wrong = key not in kinds or not isinstance(value, kinds[key])
            if wrong or (type(value) is bool) != (kinds[key] == (bool,)):
                raise ValueError(f"{key}: {value!r}")
        if values.get("status") not in (TIMED, *FAILED):
            raise ValueError(f"status: {values.get('status')!r}")
        if values["status"] == TIMED and not values.get("ms", 0) > 0:
            raise ValueError(f"ms: {values.get('ms')!r}")
        return cls(**values)


def evaluate(task: Task) -> Outcome:
    """Do a task's step. The function that executors are given; importable by name anywhere."""
    return compile_candidate(task) if task.step == "compile" else measure_candidate(task)


def spec_of(task: Task) -> Spec:
    """The spec with the candidate's schedule. Raises: SpecError."""
    return spec_from_canonical({**task.spec, "schedule": task.schedule})


def kernel_sha256(spec: Spec) -> str:
    """Identifies the CUDA that a spec becomes: 64 hex digits."""
    return hashlib.sha256(render(spec)["kernel.cu"].encode()).hexdigest()


def compile_candidate(task: Task) -> Outcome:
    """Compile into the cache: `compiled`, `spills` or `compile`. Raises: UsageError, SpecError."""
    start = time.perf_counter()
    source = render(spec_of(task))["kernel.cu"]
    digest = hashlib.sha256(source.encode()).hexdigest()
    try:
        build = compile_kernel(source, task.arch)
    except BuildError as error:
        return Outcome("compile", first_line(error), kernel_sha256=digest)
    spills = sum(one.spill_stores + one.spill_loads for one in build.resources)
    return Outcome(
        status="spills" if spills else COMPILED,
        reason=f"{spills} bytes of registers spilled to memory" if spills else "",
        registers=max((one.registers for one in build.resources), default=0),
        spills=spills,
        compile_seconds=time.perf_counter() - start,
        kernel_sha256=digest,
    )


def measure_candidate(task: Task) -> Outcome:
    """Verify on the task's device, then time: `timed` or `wrong`.

    Times are of graph replays with flushed caches: without what the host takes to launch, which
    differs with whatever else this machine does.
    Raises: whatever a kernel that fails to launch raises; the device is then unusable for this
    process, and the caller must end it.
    """
    import torch

    from kgen.bench.cuda import CudaTimer, graphed, poisoned_replay
    from kgen.bench.timing import DYNAMIC_BATCH, time_rounds
    from kgen.checks import PackageCandidate, same_bits, verify_candidate
    from kgen.reference import draw

    start = time.perf_counter()
    spec = spec_of(task)
    device = device_name(task)
    torch.cuda.set_device(task.device)
    package = find_package(spec)
    digest: str = package.manifest["files"]["kernel.cu"]
    try:
        candidate = PackageCandidate(package)
        report = verify_candidate(spec, candidate, device, CASES[: task.cases])
        if not report.passed:
            return Outcome(
                "wrong",
                report.summary().splitlines()[0],
                max_error=report.max_error,
                measure_seconds=time.perf_counter() - start,
                kernel_sha256=digest,
            )
        batch = DYNAMIC_BATCH if spec.problem.batch == "dynamic" else spec.problem.batch
        x, parameters = draw(spec, batch, "uniform", 0, device)
        ordered = [parameters[key] for key in package.PARAMETERS]
        with torch.no_grad():
            replay = graphed(lambda: package.fused_block(x, *ordered))
            rows = time_rounds(
                {"candidate": lambda _: replay()},
                CudaTimer(device),
                cold=True,
                seconds=task.seconds,
            )
            if not same_bits(poisoned_replay(replay), package.fused_block(x, *ordered)):
                return Outcome(
                    "wrong",
                    "a replay of its graph gives other bits than a call",
                    max_error=report.max_error,
                    measure_seconds=time.perf_counter() - start,
                    kernel_sha256=digest,
                )
    except torch.OutOfMemoryError as error:  # says something about the others on the device too
        return Outcome("wrong", f"out of GPU memory: {first_line(error)}", lasting=False)
    finally:
        torch.cuda.empty_cache()
    times = rows["candidate"]
    return Outcome(
        TIMED,
        ms=times.median,
        p20=times.p20,
        p80=times.p80,
        relative_error=times.relative_error,
        rounds=times.rounds,
        max_error=report.max_error,
        measure_seconds=time.perf_counter() - start,
        kernel_sha256=digest,
    )


def device_name(task: Task) -> str:
    """The task's device, as torch calls it."""
    return f"cuda:{task.device}"


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its class where there is none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
