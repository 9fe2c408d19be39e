"""The tile of the two_kernel strategy: what its knobs imply, and a choice where they are absent.

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

from kgen.arch import ARCHS, REGISTERS_PER_THREAD, SMEM_RESERVED, Arch
from kgen.geometry import Geometry
from kgen.spec import Schedule

WARP = 32
TILE_KNOBS = ("tile_h", "tile_w", "tile_k", "tile_c", "pixels")  # of Schedule; two_kernel only
# Registers a thread needs beside its accumulators, its window of x and its weights.
REGISTERS_BESIDE = 44
# Fused multiply-adds in one fully unrolled (c, s) body; more costs compile time, not run time.
UNROLL_LIMIT = 2048
L2_BYTES_PER_CLOCK = 40  # that one SM reads while all of them do
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
    def copy(self) -> int:
        """Floats of one asynchronous copy of x: the most that never straddle the image's edge."""
        fits = (self.g.W, self.tile_w * self.g.stride[1])
        return next(width for width in (4, 2, 1) if all(one % width == 0 for one in fits))

    @cached_property
    def in_w(self) -> int:
        """Input columns of the tile, halo included, in whole aligned copies."""
        shift = -self.g.pad_before[1] % self.copy
        needed = shift + (self.tile_w - 1) * self.g.stride[1] + self.g.extent[1]
        return round_up(needed, self.copy)

    @cached_property
    def pitch_x(self) -> int:
        """Floats between rows of the input tile in shared memory.

        Where a warp covers several rows (tile_w < 32) the pitch is padded, if a pad of less than
        a row does it, so that those rows start tile_w banks apart.
        """
        if self.tile_w >= WARP or WARP % self.tile_w:
            return self.in_w
        for pitch in range(self.in_w, self.in_w + WARP, self.copy):
            if pitch * self.pixels * self.g.stride[0] % WARP == self.tile_w:
                return pitch
        return self.in_w

    @property
    def pitch_k(self) -> int:
        """Floats between filter taps in shared memory; padded to spread the transposing stores."""
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
        """Registers a thread is expected to need, not capped at what there is."""
        return round_up(self.accumulators + self.window + self.thread_k + REGISTERS_BESIDE, 8)

    @property
    def window(self) -> int:
        """Input rows of one column that a thread keeps in registers."""
        if self.unroll[1] == 1:
            return self.pixels
        rows = (self.pixels - 1) * self.g.stride[0] + self.g.extent[0]
        return min(rows, self.pixels * self.g.R)

    def blocks_per_sm(self, arch: Arch) -> int:
        """Blocks that fit one SM at once by threads, expected registers and shared memory."""
        return min(
            arch.blocks_per_sm,
            arch.threads_per_sm // self.threads,
            arch.registers_per_sm // (self.registers * self.threads),
            arch.smem_per_sm // (self.smem + SMEM_RESERVED),
        )

    def min_blocks(self, arch: Arch) -> int:
        """Blocks an SM that the compiler is asked to make room for, within every generation."""
        least = min(ARCHS.values(), key=lambda one: (one.threads_per_sm, one.blocks_per_sm))
        return max(
            1,
            min(
                self.blocks_per_sm(arch), least.threads_per_sm // self.threads, least.blocks_per_sm
            ),
        )

    @property
    def unroll(self) -> tuple[int, int]:
        """Unroll factors of the loops over filter columns and filter rows, capped."""
        row = self.accumulators
        if row * self.g.R * self.g.S <= UNROLL_LIMIT:
            return (self.g.S, self.g.R)
        return (1, self.g.R if row * self.g.R <= UNROLL_LIMIT else 1)

    def cost(self, arch: Arch) -> float:
        """Expected clocks of one SM for each useful output element; lower is better.

        Per block: multiply-adds at 128 lanes a clock, shared-memory wavefronts at one a clock,
        issue slots at four a clock; the longest bounds the main loop. Staging and the epilogue
        come on top, and so does their latency as far as no other resident block hides it. Last,
        the part of a wave in which SMs idle, where the batch is known.
        """
        steps, warps = self.g.taps, self.threads / WARP
        loads_x = self.window * steps / self.g.R
        loads_x *= 1 if self.unroll[1] > 1 else self.g.R
        width = 4 if self.thread_k % 4 == 0 else 2 if self.thread_k % 2 == 0 else 1
        loads_w = steps * self.thread_k / width
        wavefronts = (loads_x * min(self.g.stride[1], 4) + loads_w) * warps
        issue = (self.accumulators * steps + loads_x + loads_w) * warps / 4
        copies = self.g.C_in * self.in_h * self.in_w / self.copy + steps * self.tile_k
        overhead = copies / WARP * 12 / 4 + self.accumulators * warps * 18 / 4
        resident = self.blocks_per_sm(arch)
        exposed = overhead + 2000 * -(-self.g.C_in // self.tile_c)
        staged_bytes = 4 * (self.g.C_in * self.in_h * self.in_w + steps * self.tile_k)
        clocks = max(issue, wavefronts) + overhead + exposed / resident
        clocks += staged_bytes / L2_BYTES_PER_CLOCK
        useful = self.g.P * self.g.Q * self.g.C_out / self.blocks
        return clocks / useful * self._last_wave(arch)

    def _last_wave(self, arch: Arch) -> float:
        """Blocks of the busiest SM over the average; 1 where the batch is dynamic."""
        if self.g.N is None:
            return 1.0
        share = self.g.N * self.blocks / arch.sms
        return math.ceil(share) / share


@lru_cache(maxsize=256)
def complete(
    g: Geometry, group_channels: int, schedule: Schedule, archs: tuple[Arch, ...]
) -> Tile | None:
    """The cheapest tile for archs[0] that is legal on all and keeps every knob that is given.

    None if there is none. Deterministic: candidates are tried in a fixed order and ties keep the
    first.
    """
    best: tuple[float, Tile] | None = None
    for tile in candidates(g, group_channels, schedule):
        if all(is_legal(tile, arch) for arch in archs):
            cost = tile.cost(archs[0])
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
    return tile.registers <= REGISTERS_PER_THREAD and tile.registers * tile.threads <= 65536


def candidates(g: Geometry, group_channels: int, schedule: Schedule) -> Iterator[Tile]:
    """Tiles worth comparing; a knob that the schedule gives is taken as it is.

    Where neither threads nor pixels are given, a thread has at most 64 accumulators: more compile
    longer, risk spills, and were no faster where that was measured.
    """

    def choices(given: int | None, values: tuple[int, ...]) -> tuple[int, ...]:
        return (given,) if given is not None else values

    def up_to(limit: int, values: tuple[int, ...]) -> tuple[int, ...]:
        """Values that are not needlessly above the limit: at most one reaches it."""
        below = tuple(value for value in values if value < limit)
        return (*below, *values[len(below) : len(below) + 1])

    powers = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    # A warp that covers 32 columns of one row stores whole sectors; narrower only where Q is.
    tile_ws = choices(schedule.tile_w, up_to(g.Q, powers[3:])[-4:] if g.Q < 32 else powers[5:])
    tile_hs = choices(schedule.tile_h, up_to(g.P, powers[:7]))
    tile_ks = choices(schedule.tile_k, up_to(g.C_out, (4, 8, 16, 32, 64)))
    for tile_h, tile_w, pixels in product(tile_hs, tile_ws, choices(schedule.pixels, powers[:4])):
        if tile_h % pixels:
            continue
        strips = round_up(tile_h // pixels * tile_w, WARP)
        given = schedule.threads or 0
        choice = (given // strips,) if given else (1, 2, 4, 8, 16)
        for tile_k, sets in product(tile_ks, choice):
            threads = strips * sets
            if not sets or tile_k % sets or threads > 1024 or given not in (0, threads):
                continue
            free = schedule.threads is None and schedule.pixels is None
            if free and (threads > 512 or tile_k // sets * pixels > 64):
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
