"""The tile of the strategies single_pass and recompute: what its knobs imply.

A job is one tile of one sample for one slab of output channels. Tensor cores compute it as
products of 64 rows by `n` columns: rows are `rows_m` output rows times 64 / rows_m channels,
columns are neighbouring output pixels. A tile is row_steps x col_steps such products. Groups are
independent of each other, so a *unit* is what must be normalised together: one sample's tiles for
unit_groups groups. A group of more than 64 channels has several slabs; all belong to its unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil

from kgen.arch import Arch
from kgen.geometry import Geometry
from kgen.math_kinds import MATHS, Math
from kgen.tiling import round_up

WARPGROUP = 128
CONSUMERS = 2  # warpgroups that multiply; one more normalises, one more loads
THREADS = (CONSUMERS + 2) * WARPGROUP
M = 64  # rows of a product
CHUNK_C = 8  # input channels staged at a time
IN_FLIGHT = 2 * CONSUMERS  # jobs of a block between their first load and their last store
MAX_ACCUMULATORS = 128  # of a thread, where warpgroups may have different numbers of registers
PORTABLE_ACCUMULATORS = 64  # elsewhere
CHUNKED_ACCUMULATORS = 32  # where several chunks of channels are summed
MAX_N = 128
MAX_BLOCKS = 4  # products of a tile
PREPARE_BLOCKS, PREPARE_THREADS = 128, 256


@dataclass(frozen=True)
class Slice:
    """16 bytes along K: `slice_channels` input channels, block `block`, of one pixel of the window.

    row: input rows below the first row of the tile; column: of the filter; offset: 16-byte units
    from the tile's first pixel in shared memory.
    """

    block: int
    row: int
    column: int
    offset: int


@dataclass(frozen=True)
class FusedTile:
    """A complete choice for one geometry. Sizes in elements unless a name ends in `bytes`.

    slots: places in shared memory for a part of the staged x. With one more than x has parts, what
    the next products read arrives while these still run.
    """

    g: Geometry
    num_groups: int
    math: Math
    rows_m: int
    row_steps: int
    col_steps: int
    n: int
    tile_w: int
    weights_resident: bool
    slots: int

    @cached_property
    def group_channels(self) -> int:
        """Output channels of one group."""
        return self.g.C_out // self.num_groups

    @cached_property
    def channels_m(self) -> int:
        """Output channels that the rows of one product have room for."""
        return M // self.rows_m

    @cached_property
    def slabs(self) -> int:
        """Jobs that share one group and one tile."""
        return -(-self.group_channels // M)

    @cached_property
    def unit_groups(self) -> int:
        """Groups of one unit: as many as fit the rows of a product and divide num_groups."""
        room = max(1, self.channels_m // self.group_channels)
        return next(one for one in range(room, 0, -1) if self.num_groups % one == 0)

    @cached_property
    def slab_channels(self) -> int:
        """Output channels of one job."""
        if self.slabs > 1:
            return -(-self.group_channels // self.slabs)
        return self.unit_groups * self.group_channels

    @property
    def units(self) -> int:
        """Units of one sample."""
        return self.num_groups // self.unit_groups

    @property
    def tile_h(self) -> int:
        """Output rows of a tile."""
        return self.rows_m * self.row_steps

    @cached_property
    def tiles(self) -> tuple[int, int]:
        """Tiles down and across one output plane."""
        return (-(-self.g.P // self.tile_h), -(-self.g.Q // self.tile_w))

    @cached_property
    def unit_jobs(self) -> int:
        """Jobs of one unit, all of whose partial moments make its statistics."""
        return self.tiles[0] * self.tiles[1] * self.slabs

    @property
    def chunks(self) -> int:
        """Stages in which the input channels pass."""
        return -(-self.g.C_in // CHUNK_C)

    @property
    def accumulators(self) -> int:
        """Registers of a thread that hold its outputs."""
        return self.row_steps * self.col_steps * self.n // 2

    @cached_property
    def tap_rows(self) -> tuple[int, ...]:
        """Input rows, relative to a product's first, that any of its output rows sees."""
        g = self.g
        rows = {m * g.stride[0] + r * g.dilation[0] for m in range(self.rows_m) for r in range(g.R)}
        return tuple(sorted(rows))

    @cached_property
    def in_rows(self) -> int:
        """Input rows of a tile, halo included."""
        return (self.tile_h - 1) * self.g.stride[0] + self.g.extent[0]

    @cached_property
    def in_columns(self) -> int:
        """Input columns of a tile, halo included."""
        return (self.tile_w - 1) * self.g.stride[1] + self.g.extent[1]

    @cached_property
    def pitch_x(self) -> int:
        """Pixels between rows of the staged tile: what the columns of all products reach.

        A multiple of 8, so that rows start at lines of 128 bytes: wgmma was half as fast where
        they did not. Columns lie apart by their remainder modulo the stride, so that the pixels
        of neighbouring outputs are neighbours.
        """
        reach = (self.g.S - 1) * self.g.dilation[1] // self.g.stride[1]
        return round_up(self.n * self.col_steps + reach, 8)

    @cached_property
    def part_bytes(self) -> int:
        """Bytes of one part of the staged tile, 16 for each slice of a pixel."""
        blocks = CHUNK_C // self.math.slice_channels
        return 16 * blocks * self.in_rows * self.g.stride[1] * self.pitch_x

    @cached_property
    def slices(self) -> tuple[Slice, ...]:
        """The slices of K of one chunk, by address: what wgmma's strides can express."""
        g, pitch = self.g, self.pitch_x
        plane = self.part_bytes // 16 // (CHUNK_C // self.math.slice_channels)
        found = []
        for block in range(CHUNK_C // self.math.slice_channels):
            for row in self.tap_rows:
                for column in range(g.S):
                    shift = column * g.dilation[1]
                    place = (row * g.stride[1] + shift % g.stride[1]) * pitch + shift // g.stride[1]
                    found.append(Slice(block, row, column, block * plane + place))
        return tuple(sorted(found, key=lambda one: one.offset))

    @property
    def steps(self) -> int:
        """Products along K of one chunk, two slices each; an odd last slice has no partner."""
        return -(-len(self.slices) // 2)

    @cached_property
    def set_bytes(self) -> int:
        """Bytes of one set of a chunk's weights: [2 * steps][64 rows][16 bytes]."""
        return 2 * self.steps * M * 16

    @property
    def image_chunks(self) -> int:
        """Chunks of weights of all units and slabs."""
        return self.units * self.slabs * self.chunks

    @property
    def chunk_weight_bytes(self) -> int:
        """Bytes of the weights of one chunk, all sets."""
        return self.math.sets * self.set_bytes

    @property
    def smem_weights(self) -> int:
        """Bytes of the weights that stay for the whole launch; 0 where they pass with x."""
        return self.image_chunks * self.chunk_weight_bytes if self.weights_resident else 0

    @property
    def smem_stage(self) -> int:
        """Bytes of what passes with each chunk: parts of x, weights that are not resident."""
        weights = 0 if self.weights_resident else self.chunk_weight_bytes
        return self.slots * self.part_bytes + weights

    @cached_property
    def whole_rows(self) -> bool:
        """Whether a tile spans the output's width: its rows are one run in memory."""
        return self.tiles[1] == 1

    @property
    def is_whole(self) -> bool:
        """Whether tiles cover the output exactly: no thread then masks what it sums."""
        return self.g.P % self.tile_h == 0 and self.g.Q % self.tile_w == 0

    @cached_property
    def pitch_row(self) -> int:
        """Floats between output rows in shared memory; equal to Q where rows make one run."""
        return self.g.Q if self.whole_rows else round_up(self.tile_w, 4)

    @cached_property
    def pitch_channel(self) -> int:
        """Floats between channels in shared memory, 8 modulo 32: stores of 8 channels by 4 pairs
        of pixels then meet no bank twice."""
        needed = self.tile_h * self.pitch_row
        return needed + (8 - needed) % 32

    @cached_property
    def vec(self) -> int:
        """Floats of one store of y: what divides every run's start and length."""
        g = self.g
        lengths = [g.P * g.Q]
        lengths += [self.tile_h * g.Q] if self.whole_rows else [g.Q, self.tile_w]
        return next(vec for vec in (4, 2, 1) if all(one % vec == 0 for one in lengths))

    @cached_property
    def smem_out(self) -> int:
        """Bytes of one consumer's finished tile: float [slab_channels][pitch_channel]."""
        return round_up(4 * self.slab_channels * self.pitch_channel, 16)

    @property
    def smem_small(self) -> tuple[int, int, int, int]:
        """Bytes of: rows' sums, norms, gamma and beta, mbarriers."""
        sums, norms = 2 * CONSUMERS * M * 12, 2 * self.slab_channels * 16
        return sums, norms, 8 * self.g.C_out, 8 * self.mbarriers

    @property
    def mbarriers(self) -> int:
        """Barriers in shared memory: of parts of x, of tiles, of norms."""
        return (CONSUMERS + 1) * self.slots + 2 * CONSUMERS + 4

    @cached_property
    def smem(self) -> int:
        """Dynamic shared memory of a block, bytes."""
        parts = (self.smem_weights, self.smem_stage, CONSUMERS * self.smem_out, *self.smem_small)
        return sum(round_up(part, 16) for part in parts)

    @property
    def group_lanes(self) -> int:
        """Lanes that take one group's moments together."""
        return min(32, 1 << (WARPGROUP // self.unit_groups).bit_length() - 1)

    @property
    def workspace_fixed_bytes(self) -> int:
        """Bytes of the weights' image and the channels' scales."""
        return self.image_chunks * self.chunk_weight_bytes + round_up(4 * self.g.C_out, 16)

    @property
    def workspace_sample_bytes(self) -> int:
        """Bytes of one sample's partial moments and statistics."""
        return 8 * self.num_groups * (self.unit_jobs + 1)

    def least_blocks(self) -> int:
        """Resident blocks that single_pass needs to make progress, see IN_FLIGHT."""
        return -(-self.unit_jobs // IN_FLIGHT)

    def costs(self, arch: Arch, stores: bool) -> dict[str, float]:
        """Expected clocks of an SM for one job, by what limits it, with others in flight.

        Tensor cores take N / 2 clocks for a warpgroup's product, 8/5 of that through mma.sync; the
        chain about 16 instructions for each element, padding included, at 128 lanes; latency is
        half of what one job takes from its first to its last step, because two alternate.
        """
        elements = M * self.n * self.row_steps * self.col_steps
        products = self.row_steps * self.col_steps * self.chunks * self.steps * self.math.products
        tensor = products * self.n / 2
        tensor /= 1 if arch.warpgroup_products else 0.625
        chain = elements / 8
        items = self.in_rows * self.in_columns
        load = self.chunks * (600 + 1.2 * items)
        load += 0 if self.weights_resident else self.chunks * self.chunk_weight_bytes / 24
        clock = arch.fma_rate / 128 / arch.sms
        written = 4 * self.slab_channels * self.tile_h * self.tile_w if stores else 0
        read = 4 * self.g.C_in * items * self.tile_h * self.g.stride[0] / self.in_rows
        return {
            "tensor cores": tensor,
            "chain": chain,
            "loading": load,
            "memory": (written + read / self.units) * arch.sms / arch.bandwidth * clock,
            "latency": (2500 + tensor + chain + (elements / 24 if stores else 0)) / CONSUMERS,
        }


def choices(
    g: Geometry, num_groups: int, math_name: str, limit: int, given_w: int | None = None
) -> list[FusedTile]:
    """Tiles worth comparing, in a fixed order; limit: accumulators of a thread."""
    group_channels, math = g.C_out // num_groups, MATHS[math_name]
    found = []
    across = -(-g.Q // (2 * MAX_N))
    widths = [min(g.Q, -(-g.Q // across))] if across == 1 else []
    for parts in (across, across + 1, 2 * across, 4 * across):
        if parts > 1:
            widths.append(min(g.Q, round_up(-(-g.Q // parts), 4)))
    for tile_w in dict.fromkeys([given_w] if given_w else widths):
        col_steps = -(-tile_w // MAX_N)
        n = round_up(-(-tile_w // col_steps), 16)
        for rows_m in (1, 2, 4):
            if M // rows_m < min(group_channels, M):
                continue
            for row_steps in (1, 2, 4, 8, 16):
                if row_steps > 1 and (row_steps - 1) * rows_m >= g.P:
                    continue
                # Weights that pass with x share its one stage.
                for resident, more in ((True, 1), (True, 0), (False, 0)):
                    tile = FusedTile(
                        g, num_groups, math, rows_m, row_steps, col_steps, n, tile_w, resident,
                        math.parts + more,
                    )  # fmt: skip
                    # More cost registers that are not there: masks, and many products at once.
                    blocks = row_steps * col_steps
                    wide = tile.is_whole and blocks <= 2
                    most = limit if wide else min(limit, PORTABLE_ACCUMULATORS)
                    most = most if tile.chunks == 1 else CHUNKED_ACCUMULATORS
                    if tile.accumulators <= most and blocks <= MAX_BLOCKS:
                        found.append(tile)
    return found


def grid(unit_jobs: int, sms: int, aligned: bool) -> int:
    """Blocks of a launch whose jobs wait for each other, one block an SM.

    Where `aligned`, a unit's jobs take whole rounds of the grid, so that no block starts a unit
    in one round and the next block in another.
    """
    if not aligned:
        return sms
    if unit_jobs <= sms:
        return sms // unit_jobs * unit_jobs
    return ceil(unit_jobs / ceil(unit_jobs / sms))
