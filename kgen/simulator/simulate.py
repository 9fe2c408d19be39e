"""Runs a whole plan on the simulator: allocates the tensors, launches the kernels, collects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kgen.arch import ARCHS
from kgen.build import compile_kernel
from kgen.compiler import Build
from kgen.emit import render
from kgen.plan import Plan
from kgen.simulator.device import Device, Options
from kgen.simulator.watch import Finding
from kgen.spec import Spec

Array = Any
SIMULATED_SMS = 3  # on which a cooperative launch runs, unless it needs more


@dataclass(frozen=True)
class Outcome:
    """One run of a plan.

    y: float32 [N, C_out, P, Q]. problems: what is wrong with the run, in words, empty if nothing.
    counts: per kernel, deterministic. conflicts: (kernel, PTX line) -> bank conflicts.
    """

    y: Array
    findings: tuple[Finding, ...]
    problems: tuple[str, ...]
    counts: dict[str, dict[str, int]]
    conflicts: dict[tuple[str, int], int]
    trace: tuple[str, ...]


class Simulation:
    """The kernels of one plan, compiled for one architecture, ready to run on a CPU."""

    def __init__(self, spec: Spec, plan: Plan, arch: str, source: str | None = None) -> None:
        """source: CUDA to run in place of what the plan renders to (for tests that break it).

        Raises: BuildError if it does not compile.
        """
        self.spec, self.plan, self.arch = spec, plan, arch
        self.source = source if source is not None else render(spec, plan)["kernel.cu"]
        build = compile_kernel(self.source, arch)
        self.ptx = build.ptx
        self.limit_problems = tuple(_over_limits(plan, arch, build))

    def run(
        self,
        x: Array,
        parameters: Mapping[str, Array],
        conv_out: Array | None = None,
        options: Options | None = None,
    ) -> Outcome:
        """Run all launches on x float32 [N, C_in, H, W].

        parameters: float32 arrays by state_dict key. conv_out: the library's convolution without
        bias, for plans that start from one. Raises: SimulationError, PtxError.
        """
        plan, N = self.plan, x.shape[0]
        device = Device(self.ptx, options)
        tensors = {"x": x, **parameters}
        if conv_out is not None:
            tensors["conv_out"] = conv_out
        memory = {
            name: device.memory.allocate(name, 4 * array.size, "input", array)
            for name, array in tensors.items()
        }
        memory["y"] = device.memory.allocate("y", 4 * N * plan.g.y_elements, "output")
        size = max(4, 4 * (plan.workspace_fixed + N * plan.workspace_per_sample))
        memory["workspace"] = device.memory.allocate("workspace", size, "workspace")
        for launch in plan.launches:
            blocks, team = launch.blocks + launch.blocks_per_sample * N, launch.team
            if team is not None:
                blocks = team.grid(max(team.least, SIMULATED_SMS))
            device.launch(
                launch.kernel,
                blocks,
                launch.threads,
                launch.smem_bytes,
                [N if name == "N" else memory[name].base for name in launch.arguments],
                cooperative=team is not None,
            )
        y = memory["y"]
        findings = device.findings.all()
        problems = [*self.limit_problems, *(str(one) for one in findings)]
        unwritten = int((~y.written).sum())
        if unwritten:
            problems.append(f"{unwritten} output elements were never written")
        shape = (N, plan.g.C_out, plan.g.P, plan.g.Q)
        return Outcome(
            y=y.view(np.float32).reshape(shape).copy(),
            findings=findings,
            problems=tuple(problems),
            counts={name: dict(sorted(one.values.items())) for name, one in device.counts.items()},
            conflicts=dict(sorted(device.conflicts.items())),
            trace=tuple(device.traced),
        )


def _over_limits(plan: Plan, arch: str, build: Build) -> Iterator[str]:
    """What a launch would be refused for on `arch`: shared memory, registers, threads."""
    limits, resources = ARCHS[arch], {one.kernel: one for one in build.resources}
    for launch in plan.launches:
        kernel = resources.get(launch.kernel)
        if kernel is None:  # the launch itself will fail, and say so
            continue
        smem = kernel.smem + launch.smem_bytes
        if smem > limits.smem_per_block:
            most = limits.smem_per_block
            yield f"{launch.kernel}: {smem} bytes of shared memory, {arch} has {most}"
        registers = -(-kernel.registers // 8) * 8 * launch.threads
        if registers > limits.registers_per_sm:
            yield (
                f"{launch.kernel}: {registers} registers for {launch.threads} threads, an SM of "
                f"{arch} has {limits.registers_per_sm}"
            )
