"""Proves an emitted package right against the fp64 oracle, or says where it is wrong.

This module is the entry point; the checks themselves are in `kgen.checks`, which needs torch, and
the verdicts in `kgen.verdict`.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from types import ModuleType

from kgen.compiler import CompileError, nvrtc_version
from kgen.errors import UsageError
from kgen.spec import Spec
from kgen.verdict import Report


def verify(
    source: Spec | ModuleType | str | os.PathLike[str],
    *,
    device: str = "cuda",
    full: bool = False,
    trace: tuple[int, int] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Verify a spec, a spec file, an emitted package or its folder.

    device: `cuda` for the current CUDA device, `simulator` for this machine's CPU: the PTX of the
    same kernels, on a copy reduced in batch, height and width unless `full`. An emitted package is
    simulated with its own kernel.cu, at its own height and width, on two samples unless `full`.
    trace: (block, thread) to record on the simulator. progress: told what is being checked.
    The verdict is in the report; a wrong kernel raises nothing.
    Raises: UsageError where there is no such device, SpecError, BuildError.
    """
    if device not in ("cuda", "simulator"):
        raise UsageError(f"unknown device {device!r}; legal are cuda and simulator")
    if device == "cuda" and (full or trace is not None):
        raise UsageError("full size and trace are options of the simulator (--device simulator)")
    problem = why_no_device() if device == "cuda" else why_no_simulator()
    if problem:
        other = "; --device simulator runs the kernels on this machine's CPU"
        raise UsageError(f"cannot verify: {problem}{other if device == 'cuda' else ''}")
    if device == "simulator":
        from kgen.simulator.candidate import verify_on_simulator

        return verify_on_simulator(source, full=full, trace=trace, progress=progress)
    from kgen.checks import PackageCandidate, verify_candidate
    from kgen.package import find_package, spec_of

    package = find_package(source)
    return verify_candidate(spec_of(package), PackageCandidate(package), "cuda", progress=progress)


def why_no_simulator() -> str:
    """Why nothing can be simulated here; empty if it can."""
    for name, extra in (("numpy", "cuda"), ("torch", "torch")):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed (pip install 'kgen[{extra}]')"
    try:
        nvrtc_version()
    except CompileError as error:
        return str(error)
    return ""


def why_no_device() -> str:
    """Why nothing can be verified here; empty if it can."""
    try:
        import torch
    except ImportError:
        return "torch is not installed (pip install 'kgen[torch]')"
    if not torch.cuda.is_available():
        return "no CUDA device"
    try:
        import cuda.bindings.driver  # noqa: F401
    except ImportError:
        return "cuda-bindings is not installed (pip install 'kgen[cuda]')"
    return ""
