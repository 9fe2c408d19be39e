"""The simulated device: a loaded PTX module, its memory, and launches on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kgen.simulator.decode import Decoded, decode_kernel
from kgen.simulator.memory import Allocation, GlobalMemory
from kgen.simulator.ordering import Publications
from kgen.simulator.ptx import Kernel, Module, PtxError, Variable, parse
from kgen.simulator.watch import Findings, Shadow


class SimulationError(Exception):
    """The launch could not be completed: a hang, a barrier that cannot be met, a bad launch."""


@dataclass(frozen=True)
class Options:
    """What to do beside computing.

    checks: bounds are always checked; this adds races, initialisation, unfinished copies and
    repeated writes. measure: count sectors and bank conflicts. trace: (block, thread) whose
    instructions are recorded. resident_threads: about how many threads run in lockstep.
    """

    checks: bool = True
    measure: bool = False
    trace: tuple[int, int] | None = None
    resident_threads: int = 8192


@dataclass
class Counts:
    """Deterministic counts by name: instructions by category, bytes, sectors, conflicts."""

    values: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, count: int) -> None:
        """Add to a count."""
        self.values[name] = self.values.get(name, 0) + count


class Device:
    """A simulated GPU with one PTX module loaded."""

    def __init__(self, ptx: str, options: Options | None = None) -> None:
        self.module: Module = parse(ptx)
        self.options = options or Options()
        self.memory = GlobalMemory()
        self.findings = Findings()
        self.counts: dict[str, Counts] = {}
        self.conflicts: dict[tuple[str, int], int] = {}  # (kernel, PTX line) -> bank conflicts
        self.traced: list[str] = []
        self._decoded: dict[str, list[Decoded]] = {}
        self.symbols: dict[str, Allocation] = {
            one.name: self.memory.allocate(
                one.name, one.size, "constant", one.data or bytes(one.size)
            )
            for one in self.module.variables.values()
            if one.space in ("global", "const")
        }

    def launch(
        self,
        kernel: str,
        blocks: int,
        threads: int,
        smem_bytes: int,
        arguments: list[int],
        *,
        cooperative: bool = False,
    ) -> None:
        """Run a kernel over a one-dimensional grid.

        arguments: values of its parameters, addresses as numbers. cooperative: all blocks run at
        the same time, so that they can wait for each other. Findings and counts are added to the
        device's. Raises: SimulationError, PtxError.
        """
        if kernel not in self.module.kernels:
            raise SimulationError(f"no kernel {kernel} in the module")
        code = self.module.kernels[kernel]
        if threads % 32 or not 0 < threads <= code.max_threads:
            raise SimulationError(
                f"{kernel}: {threads} threads; whole warps up to {code.max_threads} can run"
            )
        if len(arguments) != len(code.parameters):
            raise SimulationError(
                f"{kernel}: {len(arguments)} arguments for {len(code.parameters)} parameters"
            )
        if kernel not in self._decoded:
            self._decoded[kernel] = decode_kernel(code)
        from kgen.simulator.machine import Resident

        if self.module.target != "sm_90a" and _uses_wgmma(self._decoded[kernel]):
            raise PtxError(f"wgmma needs target sm_90a, the module is for {self.module.target}")

        launch = Launch(self, code, self._decoded[kernel], blocks, threads, smem_bytes, arguments)
        step = blocks if cooperative else max(1, self.options.resident_threads // threads)
        with np.errstate(all="ignore"):
            for first in range(0, blocks, step):
                try:
                    Resident(launch, first, min(step, blocks - first)).run()
                except SimulationError as error:  # what was found before may be why
                    found = self.findings.all()
                    before = f"; before that: {found[0]}" if found else ""
                    raise SimulationError(f"{error}{before}") from None


class Launch:
    """What the resident sets of one launch share."""

    def __init__(
        self,
        device: Device,
        kernel: Kernel,
        code: list[Decoded],
        blocks: int,
        threads: int,
        smem_bytes: int,
        arguments: list[int],
    ) -> None:
        self.device, self.kernel, self.code = device, kernel, code
        self.blocks, self.threads = blocks, threads
        self.counts = device.counts.setdefault(kernel.name, Counts())
        self.parameters = {
            name: int(value).to_bytes(size, "little")
            for (name, _, size), value in zip(kernel.parameters, arguments, strict=True)
        }
        variables = [*kernel.variables.values(), *device.module.variables.values()]
        self.offsets: dict[str, int] = {}  # of shared and local variables, in their memory
        self.shared_size = self._lay_out(variables, "shared") + smem_bytes
        self.local_size = self._lay_out(variables, "local")
        self.shadows: dict[str, Shadow] = {}
        self.published, self.time = Publications(), 1  # order between blocks
        names = {one.instruction.op[0] for one in code}
        self.wgmma = _uses_wgmma(code)
        counted = any(one.control is not None and one.control.count is not None for one in code)
        self.bulk = any(one.instruction.op[:3] == ("cp", "async", "bulk") for one in code)
        # Whether warps synchronise unevenly.
        self.fine = self.bulk or self.wgmma or counted or "mbarrier" in names
        self.write_counts: dict[str, Any] = {}

    def _lay_out(self, variables: list[Variable], space: str) -> int:
        """Give each variable of a space its offset, dynamic ones last; the bytes they take."""
        end = 0
        mine = [one for one in variables if one.space == space]
        for one in sorted(mine, key=lambda variable: variable.dynamic):
            end = -(-end // one.align) * one.align
            self.offsets[one.name] = end
            end += one.size
        return end


def _uses_wgmma(code: list[Decoded]) -> bool:
    """Whether a kernel has instructions of warpgroups."""
    return any(one.instruction.op[0] == "wgmma" for one in code)
