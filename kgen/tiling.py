"""The tile of the two_kernel strategy: what its knobs imply, and a good choice where they are absent.

A block computes tile_h x tile_w output pixels of tile_k channels. Its threads form sets of
`pixel_threads`, one set per `thread_k` channels; a thread computes `pixels` rows of one column by
`thread_k` channels in registers. Shared memory holds tile_c input channels with their halo.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product

from kgen.arch import REGISTERS_PER_THREAD, SMEM_RESERVED, Arch
from kgen.geometry import Geometry
from kgen.spec import Schedule

WARP = 32
# Registers a thread needs beside its accumulators: a window of x, weights, addresses.
REGISTERS_BESIDE = 40
# Fused multiply-adds in one fully unrolled (c, s) body; more costs compile time, not run time.
UNROLL_LIMIT = 2048
PREFERRED_SMEM = 48 * 1024  # a stage of at most this size leaves room for several blocks an SM


def round_up(value: int, step: int) -> int:
    """The least multiple of `step` that is at least `value`."""
    return -(-value // step) * step


@dataclass(frozen=True)
class Tile:
    """A complete choice of the two_kernel knobs for one geometry."""

    g: Geometry
    group_channels: int
    tile_h: int
    tile_w: int
    tile_k: int
    tile_c: int
    pixels: int
    threads: int

    @cached_property
    def strips(self) -> int:
        """Vertical strips of `pixels` output pixels in the tile."""
        return self.tile_h // self.pixels * self.tile_w

    @cached_property
    def pixel_threads(self) -> int:
        """Threads that share one set of channels: the strips, rounded up to whole warps."""
        return round_up(self.strips, WARP)

    @cached_property
    def thread_k(self) -> int:
        """Output channels of one thread; 0 where the knobs do not fit together."""
        if self.tile_h % self.pixels:
            return 0
        sets, rest = divmod(self.threads, self.pixel_threads)
        return 0 if rest or sets == 0 or self.tile_k % sets else self.tile_k // sets

    @property
    def accumulators(self) -> int:
        """Registers that hold a thread's outputs."""
        return self.thread_k * self.pixels

    @cached_property
    def unit(self) -> int:
        """Channels whose moments are taken together: of one thread and of one group."""
        return math.gcd(self.thread_k, self.group_channels)

    @cached_property
    def in_h(self) -> int:
        """Input rows of the tile, halo included."""
        return (self.tile_h - 1) * self.g.stride[0] + self.g.extent[0]

    @cached_property
    def in_w(self) -> int:
        """Input columns of the tile, halo included."""
        return (self.tile_w - 1) * self.g.stride[1] + self.g.extent[1]

    @cached_property
    def pitch_x(self) -> int:
        """Floats between rows of the input tile in shared memory.

        Where a warp covers several rows (tile_w < 32) the pitch is padded, if a pad of less than
        a row does it, so that those rows start tile_w banks apart.
        """
        if self.tile_w >= WARP or WARP % self.tile_w:
            return self.in_w
        for pitch in range(self.in_w, self.in_w + WARP):
            if pitch * self.pixels * self.g.stride[0] % WARP == self.tile_w:
                return pitch
        return self.in_w

    @property
    def pitch_k(self) -> int:
        """Floats between filter taps in shared memory; the pad of 4 spreads the transposing stores."""
        return round_up(self.tile_k, 4) + 4

    @cached_property
    def smem_x(self) -> int:
        """Bytes of the input tile: float [tile_c][in_h][pitch_x]."""
        return 4 * self.tile_c * self.in_h * self.pitch_x

    @cached_property
    def smem_w(self) -> int:
        """Bytes of the weights: float [tile_c][R][S][pitch_k]."""
        return 4 * self.tile_c * self.g.R * self.g.S * self.pitch_k

    @property
    def smem_moments(self) -> int:
        """Bytes of the warps' moments: {count, mean, m2} [tile_k / unit][pixel warps]."""
        return 12 * (self.tile_k // self.unit) * (self.pixel_threads // WARP)

    @cached_property
    def smem(self) -> int:
        """Dynamic shared memory of a block, in bytes."""
        return round_up(self.smem_x, 16) + self.smem_w + self.smem_moments

    @cached_property
    def tiles(self) -> tuple[int, int]:
        """Tiles down and across one output plane."""
        return (-(-self.g.P // self.tile_h), -(-self.g.Q // self.tile_w))

    @property
    def blocks_k(self) -> int:
        """Blocks that share one tile, each with tile_k other channels."""
        return -(-self.g.C_out // self.tile_k)

    @cached_property
    def blocks(self) -> int:
        """Blocks of one sample."""
        return self.tiles[0] * self.tiles[1] * self.blocks_k

    @property
    def registers(self) -> int:
        """Registers a thread is expected to need."""
        return min(REGISTERS_PER_THREAD, round_up(self.accumulators + REGISTERS_BESIDE, 8))

    def blocks_per_sm(self, arch: Arch) -> int:
        """Blocks that fit one SM at once by threads, expected registers and shared memory."""
        return min(
            arch.blocks_per_sm,
            arch.threads_per_sm // self.threads,
            arch.registers_per_sm // (self.registers * self.threads),
            arch.smem_per_sm // (self.smem + SMEM_RESERVED),
        )

    @property
    def unroll(self) -> tuple[int, int]:
        """Unroll factors of the loops over filter columns and filter rows, capped."""
        row = self.accumulators
        if row * self.g.R * self.g.S <= UNROLL_LIMIT:
            return (self.g.S, self.g.R)
        return (1, self.g.R if row * self.g.R <= UNROLL_LIMIT else 1)

    def cost(self, arch: Arch) -> float:
        """Expected SM clocks of the convolution per useful output element; lower is better.

        Per block: multiply-adds at 128 lanes a clock, shared-memory wavefronts at one a clock,
        issue slots at four a clock. The longest of them bounds the main loop; filling the tile
        and the epilogue come on top, less what other resident blocks hide.
        """
        warps = self.threads / WARP
        steps = self.g.taps
        fma = self.accumulators * steps * warps / 4
        unrolled_rows = self.unroll[1]
        window = (
            (self.pixels - 1) * self.g.stride[0] + self.g.extent[0]
            if unrolled_rows > 1
            else self.pixels
        )
        loads_x = min(window, self.pixels * unrolled_rows) * self.g.S * self.g.C_in
        loads_x *= self.g.R / unrolled_rows
        width = 4 if self.thread_k % 4 == 0 else 2 if self.thread_k % 2 == 0 else 1
        loads_w = steps * self.thread_k / width
        wavefronts = (loads_x * self.g.stride[1] + loads_w) * warps
        issue = (self.accumulators * steps + loads_x + loads_w) * warps / 4
        staged = self.g.C_in * self.in_h * self.in_w + steps * self.tile_k
        fill = staged / WARP * 12 / 4
        epilogue = self.accumulators * warps * 14 / 4
        resident = self.blocks_per_sm(arch)
        hidden = 1 - 0.5 / resident
        warps_resident = resident * warps
        stall = max(1.0, 8 / warps_resident)
        clocks = max(fma, wavefronts, issue) * stall + (fill + epilogue) * (2 - hidden)
        useful = self.g.P * self.g.Q * self.g.C_out / self.blocks
        return clocks / useful


@lru_cache(maxsize=256)
def complete(g: Geometry, group_channels: int, schedule: Schedule, arch: Arch) -> Tile | None:
    """The cheapest legal tile for `arch` that keeps every knob the schedule gives; None if none is.

    Deterministic: candidates are tried in a fixed order and ties keep the first.
    """
    best: tuple[float, Tile] | None = None
    for tile in candidates(g, group_channels, schedule):
        if is_legal(tile, arch):
            cost = tile.cost(arch)
            if best is None or cost < best[0]:
                best = (cost, tile)
    return best[1] if best else None


def is_legal(tile: Tile, arch: Arch) -> bool:
    """Whether the knobs fit together and a block fits an SM of `arch` without spilling."""
    return (
        tile.thread_k > 0
        and tile.smem <= arch.smem_per_block
        and fits_registers(tile)
        and tile.blocks_per_sm(arch) > 0
    )


def fits_registers(tile: Tile) -> bool:
    """Whether a block of such threads can be resident without spilling its accumulators."""
    need = tile.accumulators + REGISTERS_BESIDE
    return need <= REGISTERS_PER_THREAD and round_up(need, 8) * tile.threads <= 65536


def candidates(g: Geometry, group_channels: int, schedule: Schedule) -> Iterator[Tile]:
    """Tiles worth comparing; a knob that the schedule gives is taken as it is.

    What the free knobs range over is kept to tiles that fill their threads: the strips make whole
    warps, and a thread has at least 8 accumulators if the problem has so many.
    """

    def choices(given: int | None, values: tuple[int, ...]) -> tuple[int, ...]:
        return (given,) if given is not None else values

    def up_to(limit: int, values: tuple[int, ...]) -> tuple[int, ...]:
        """Values that are not needlessly above the limit: at most one reaches it."""
        below = tuple(value for value in values if value < limit)
        return (*below, *values[len(below) : len(below) + 1])

    powers = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    tile_ws = choices(schedule.tile_w, up_to(g.Q, powers[3:]))
    tile_hs = choices(schedule.tile_h, up_to(g.P, powers[:7]))
    tile_ks = choices(schedule.tile_k, up_to(g.C_out, (4, 8, 16, 32, 64)))
    all_free = schedule.threads is None and schedule.tile_k is None and schedule.pixels is None
    for tile_h, tile_w, pixels in product(tile_hs, tile_ws, choices(schedule.pixels, powers[:4])):
        if tile_h % pixels:
            continue
        strips = round_up(tile_h // pixels * tile_w, WARP)
        for tile_k, sets in product(tile_ks, (1, 2, 4, 8, 16)):
            threads = strips * sets
            if tile_k % sets or threads > 1024 or schedule.threads not in (None, threads):
                continue
            if all_free and not (
                64 <= threads <= 512 and 8 <= tile_k // sets * pixels <= 128
            ) and g.C_out * g.P * g.Q >= 4096:
                continue
            yield with_stage(g, group_channels, schedule, tile_h, tile_w, tile_k, pixels, threads)


def with_stage(
    g: Geometry,
    group_channels: int,
    schedule: Schedule,
    tile_h: int,
    tile_w: int,
    tile_k: int,
    pixels: int,
    threads: int,
) -> Tile:
    """A tile whose input channels are staged at once if that is small, else in equal parts."""
    whole = Tile(g, group_channels, tile_h, tile_w, tile_k, 1, pixels, threads)
    if schedule.tile_c is not None:
        tile_c = schedule.tile_c
    else:
        fitting = max(1, PREFERRED_SMEM // (whole.smem_x + whole.smem_w))
        stages = -(-g.C_in // fitting)
        tile_c = -(-g.C_in // stages)
    return Tile(g, group_channels, tile_h, tile_w, tile_k, tile_c, pixels, threads)
