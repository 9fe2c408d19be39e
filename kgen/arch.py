"""Limits and speeds of each GPU generation that kgen compiles for.

Limits are those of the CUDA C++ Programming Guide, table "Technical Specifications per Compute
Capability". Speeds feed predictions only: sm_90a holds what was measured on an H200 (see
benchmarks/results/), the others are the vendor's figures for one common board of the generation.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Arch:
    """One compilation target.

    Sizes in bytes; bandwidth in bytes/s; fma_rate in fp32 multiply-adds/s; `measured` says
    whether the two speeds were measured or taken from a datasheet.
    """

    name: str
    capability: tuple[int, int]
    board: str
    smem_per_block: int  # with the opt-in attribute; 48 KiB without
    smem_per_sm: int
    threads_per_sm: int
    blocks_per_sm: int
    sms: int
    bandwidth: float
    fma_rate: float
    measured: bool = False

    @property
    def registers_per_sm(self) -> int:
        """32-bit registers of one SM: 64 K on every supported generation."""
        return 65536

    @property
    def warpgroup_products(self) -> bool:
        """Whether warpgroups multiply from shared memory (wgmma): on Hopper alone."""
        return self.name == "sm_90a"


SMEM_RESERVED = 1024  # bytes of shared memory that the system keeps for each block
REGISTERS_PER_THREAD = 255

ARCHS: dict[str, Arch] = {
    arch.name: arch
    for arch in (
        Arch("sm_80", (8, 0), "A100 40GB", 166912, 167936, 2048, 32, 108, 1.55e12, 9.7e12),
        Arch("sm_86", (8, 6), "RTX 3090", 101376, 102400, 1536, 16, 82, 0.94e12, 17.8e12),
        Arch("sm_89", (8, 9), "RTX 4090", 101376, 102400, 1536, 24, 128, 1.01e12, 41.3e12),
        Arch("sm_90a", (9, 0), "H200", 232448, 233472, 2048, 32, 132, 4.2e12, 31.8e12, True),
        Arch("sm_100a", (10, 0), "B200", 232448, 233472, 2048, 32, 148, 8.0e12, 37.2e12),
        Arch("sm_120", (12, 0), "RTX 5090", 101376, 102400, 1536, 24, 170, 1.79e12, 52.4e12),
    )
}
DEFAULT_TARGET = "sm_90a"
