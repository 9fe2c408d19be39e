"""What `kgen emit` does to one spec, a line a step: render, compile, verify, write."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from kgen.build import compile_kernel
from kgen.compiler import Build, CompileError, nvrtc_version
from kgen.emit import render, write
from kgen.errors import CheckError
from kgen.spec import Spec
from kgen.verify import verify, why_no_device, why_no_simulator

Say = Callable[[str, str], None]


@contextmanager
def progress_on_terminal(text: str) -> Iterator[Any]:
    """A spinner with the elapsed time on stderr while something runs; nothing off a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(text)
        yield lambda detail: bar.update(task, description=f"{text}: {detail}")


def emit_step_by_step(
    path: Path,
    spec: Spec,
    output: Path,
    render_only: bool,
    no_verify: bool,
    force: bool,
    quiet: bool,
) -> dict[str, Any]:
    """Emit one loaded spec to `output/<name>`, telling each step; returns the steps' figures.

    quiet: tell nothing. Nothing is written unless all steps that were not skipped succeeded.
    Raises: BuildError, CheckError where verification failed, UsageError.
    """

    def say(step: str, text: str) -> None:
        if not quiet:
            click.echo(f"  {step:9}{text}")

    if not quiet:
        click.echo(f"{path}: {spec.name} {spec.hash()}")
    folder = output / spec.name
    start = time.perf_counter()
    text = render(spec)
    lines = len(text["kernel.cu"].splitlines())
    result: dict[str, Any] = {"spec": str(path), "name": spec.name, "spec_hash": spec.hash(),
                              "package": str(folder), "skipped": {}}  # fmt: skip
    say("render", f"{lines} lines of CUDA, {1e3 * (time.perf_counter() - start):.0f} ms")
    if render_only:
        result["skipped"] = {"compile": "--render-only", "verify": "--render-only"}
    else:
        result["builds"] = _compile_targets(spec, text["kernel.cu"], say, result["skipped"])
        if no_verify:
            result["skipped"]["verify"] = "--no-verify"
        else:
            _verify_one(spec, say, result)
    for step, reason in result["skipped"].items():
        say(step, f"skipped: {reason}")
    result["written"] = write(folder, text, force=force)
    say("write", f"{folder} ({'written' if result['written'] else 'unchanged'})")
    return result


def _compile_targets(
    spec: Spec, source: str, say: Say, skipped: dict[str, str]
) -> list[dict[str, Any]]:
    """Compile for every target; each kernel's figures. Raises: BuildError."""
    try:
        nvrtc_version()
    except CompileError as error:
        skipped["compile"] = str(error)
        return []
    builds = []
    for target in spec.targets:
        with progress_on_terminal(f"compiling {spec.name} for {target}"):
            build = compile_kernel(source, target)
        how = "cached" if build.cached else f"NVRTC {build.nvrtc}"
        say("compile", f"{target}: {build.seconds:.2f} s ({how}), {len(build.cubin):,} bytes")
        for one in build.resources:
            spills = one.spill_stores + one.spill_loads
            say("", f"{one.kernel}: {one.registers} registers, "
                    f"{f'{spills} bytes of spills' if spills else 'no spills'}")  # fmt: skip
        builds.append(_build_facts(build))
    return builds


def _build_facts(build: Build) -> dict[str, Any]:
    return {
        "arch": build.arch,
        "nvrtc": build.nvrtc,
        "seconds": build.seconds,
        "cached": build.cached,
        "cubin_bytes": len(build.cubin),
        "kernels": [vars(one) for one in build.resources],
    }


def _verify_one(spec: Spec, say: Say, result: dict[str, Any]) -> None:
    """Verify on the GPU, else on the simulator. Raises: CheckError."""
    device, problem = "cuda", why_no_device()
    if problem:
        device, no_simulator = "simulator", why_no_simulator()
        if no_simulator:
            reason = f"{problem} to verify on, and no simulator: {no_simulator}"
            result["skipped"]["verify"] = reason
            return
    with progress_on_terminal(f"verifying {spec.name} on {device}") as detail:
        report = verify(spec, device=device, progress=detail)
    result["report"] = report.to_json()
    if not report.passed:
        raise CheckError(report.summary())
    say("verify" if device == "cuda" else "simulate", report.headline())
