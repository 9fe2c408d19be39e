"""What a plan says about its kernels: arguments, launches, shared memory."""

from __future__ import annotations

from dataclasses import dataclass

from kgen.fused import grid


@dataclass(frozen=True)
class Argument:
    """A parameter of the block: its Python name in the emitted op and its state_dict key."""

    name: str
    key: str


@dataclass(frozen=True)
class Launch:
    """One kernel launch. The grid is one-dimensional: blocks + blocks_per_sample * N blocks.

    arguments: names of tensors, in the kernel's order: `x`, `y`, `workspace`, `conv_out` or a
    parameter's state_dict key; `N` is the batch as an int. A launch with a `team` is cooperative:
    its blocks are resident together, one an SM, and take jobs in turn.
    """

    kernel: str
    blocks_per_sample: int
    threads: int
    smem_bytes: int
    arguments: tuple[str, ...]
    blocks: int = 0
    team: Team | None = None


@dataclass(frozen=True)
class Team:
    """The blocks of a cooperative launch.

    jobs_per_sample: what the blocks share out. unit_jobs: jobs that wait for each other. least:
    resident blocks without which they would wait forever; aligned: see `kgen.fused.grid`.
    """

    jobs_per_sample: int
    unit_jobs: int
    least: int
    aligned: bool

    def grid(self, sms: int) -> int:
        """Blocks on a GPU with so many SMs."""
        return grid(self.unit_jobs, sms, self.aligned)


@dataclass(frozen=True)
class SmemRegion:
    """A row of a kernel's shared-memory map."""

    kernel: str
    name: str
    offset: int
    bytes: int
    layout: str
