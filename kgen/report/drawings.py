"""The plan as pictures: the tile grid, the shared-memory map and the launches, as numbers.

The template turns these into SVG. Only the times of launches are measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from kgen.bench.record import Record
from kgen.launches import Launch
from kgen.plan import Plan
from kgen.report.text import significant

_SIDE = 300.0  # of the tile picture's longer side
_LEAST = 30.0  # of its shorter side; below that the two axes get different scales
_MOST_LINES = 64  # of one direction; more would merge into grey
_BAR = 460.0
_DIGIT = 7.0  # width of a digit in the bar's labels
_TINTS = 4


@dataclass(frozen=True)
class TilePicture:
    """The output plane and its tiles. x, y, lengths in SVG units; words: the same as text.

    plane: (P, Q). columns, rows: places of the grid's lines. tile: x, y, width and height of the
    highlighted one.
    """

    plane: tuple[int, int]
    width: float
    height: float
    columns: tuple[float, ...]
    rows: tuple[float, ...]
    tile: tuple[float, float, float, float]
    words: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Segment:
    """A region of shared memory in the bar. number: its row in the table, 1 for the first."""

    number: int
    name: str
    layout: str
    offset: int
    end: int
    bytes: int
    x: float
    width: float
    tint: int
    has_room: bool


@dataclass(frozen=True)
class SmemPicture:
    """The shared memory of one kernel. ticks: x and byte offset of those that have room."""

    kernel: str
    bytes: int
    limit: int
    limit_of: str
    segments: tuple[Segment, ...]
    ticks: tuple[tuple[float, int], ...]
    words: str


@dataclass(frozen=True)
class Step:
    """One launch in words; grid is empty for what is not kgen's own. bar: where it begins and how
    long it is, in percent of all launches, None where the record has no time of it."""

    kernel: str
    grid: str
    threads: str
    smem: str
    note: str
    time: str = ""
    bar: tuple[float, float] | None = None


def tile_picture(plan: Plan) -> TilePicture | None:
    """The tile grid on one output plane; None for a strategy without tiles."""
    tile = plan.tile or plan.fused
    if tile is None:
        return None
    P, Q, (down, across) = plan.g.P, plan.g.Q, tile.tiles
    scale = _SIDE / max(P, Q)
    width, height = max(_LEAST, Q * scale), max(_LEAST, P * scale)
    sx, sy = width / Q, height / P
    # An inner tile where there is one: those at the last row and column may be cut off.
    row, column = (down - 1) // 2, (across - 1) // 2
    top, left = row * tile.tile_h, column * tile.tile_w
    rows, columns = min(tile.tile_h, P - top), min(tile.tile_w, Q - left)
    every_row, every_column = -(-down // _MOST_LINES), -(-across // _MOST_LINES)
    notes = []
    if sx != sy:
        notes.append("Rows and columns are drawn to different scales.")
    for lines, every in (("horizontal", every_row), ("vertical", every_column)):
        if every > 1:
            notes.append(f"Of the {lines} lines between tiles every {_nth(every)} is drawn.")
    if P % tile.tile_h or Q % tile.tile_w:
        notes.append("The last tiles reach beyond the plane; what lies outside is not stored.")
    many = down * across
    words = (
        f"Output plane of P = {P} rows by Q = {Q} columns, in {down:,} x {across:,} = {many:,} "
        f"{'tile' if many == 1 else 'tiles'} of tile_h = {tile.tile_h} rows by tile_w = "
        f"{tile.tile_w} columns; the tile at rows {top} to {top + rows - 1}, columns {left} to "
        f"{left + columns - 1} is highlighted."
    )
    return TilePicture(
        (P, Q),
        width,
        height,
        tuple(one * tile.tile_w * sx for one in range(1, across) if one % every_column == 0),
        tuple(one * tile.tile_h * sy for one in range(1, down) if one % every_row == 0),
        (left * sx, top * sy, columns * sx, rows * sy),
        words,
        tuple(notes),
    )


def _nth(number: int) -> str:
    endings = {1: "st", 2: "nd", 3: "rd"}
    teen = number // 10 % 10 == 1
    return f"{number}{'th' if teen else endings.get(number % 10, 'th')}"


def smem_pictures(plan: Plan) -> list[SmemPicture]:
    """A bar for each kernel that has a map, as long as the memory that its launch asks for."""
    found = []
    launches = {launch.kernel: launch for launch in plan.launches}
    for kernel in dict.fromkeys(region.kernel for region in plan.smem_map):
        regions = [region for region in plan.smem_map if region.kernel == kernel]
        end = max(region.offset + region.bytes for region in regions)
        total = max(end, launches[kernel].smem_bytes if kernel in launches else 0, 1)
        scale = _BAR / total
        segments = tuple(
            Segment(
                number, region.name, region.layout, region.offset, region.offset + region.bytes,
                region.bytes, region.offset * scale, region.bytes * scale, number % _TINTS,
                region.bytes * scale > _DIGIT * (len(str(number)) + 1),
            )
            for number, region in enumerate(regions, start=1)
        )  # fmt: skip
        ticks: list[tuple[float, int]] = []
        for offset in [*(one.offset for one in segments), total]:
            room = _DIGIT * (len(f"{offset:,}") + 1)
            last = offset == total
            while last and len(ticks) > 1 and offset * scale < ticks[-1][0] + room:
                ticks.pop()  # the end of the memory says more than a start just before it
            if not ticks or offset * scale >= ticks[-1][0] + room:
                ticks.append((offset * scale, offset))
        listed = "; ".join(
            f"{one.number} {one.name}, {one.offset:,} to {one.end:,}" for one in segments
        )
        words = f"Dynamic shared memory of {kernel}, {total:,} bytes: {listed}."
        found.append(
            SmemPicture(
                kernel, total, plan.arch.smem_per_block, plan.arch.name, segments, tuple(ticks),
                words,
            )
        )  # fmt: skip
    return found


def steps(plan: Plan, record: Record, digest: str = "") -> list[Step]:
    """The launches in order, grids for the record's batch and GPU.

    digest: of the plan's source. Times are those of a row that ran the same source, if any.
    """
    found = []
    timed = _launch_ns(plan, record, digest)
    whole, begun = sum(timed), 0.0
    if plan.strategy == "hybrid":
        found.append(Step("convolution of the library", "", "", "", "PyTorch calls cuDNN"))
    for number, launch in enumerate(plan.launches):
        time, bar = "", None
        if timed:
            share = 100 * timed[number] / whole
            time = f"{significant(timed[number] / 1e3)} \u00b5s under ncu, {share:.1f} %"
            bar = (begun, share)
            begun += share
        found.append(
            Step(
                launch.kernel,
                f"{_blocks(launch, record):,} blocks",
                f"{launch.threads:,} threads each",
                f"{launch.smem_bytes:,} bytes of dynamic shared memory each",
                _note(launch),
                time,
                bar,
            )
        )
    return found


def _launch_ns(plan: Plan, record: Record, digest: str) -> tuple[float, ...]:
    """Nanoseconds of each launch of the plan, empty where the record has none."""
    for row in record.rows:
        if row.kernel_sha256 == digest and len(row.launch_ns) == len(plan.launches):
            return row.launch_ns
    return ()


def _blocks(launch: Launch, record: Record) -> int:
    if launch.team is not None:
        return launch.team.grid(record.context.sms)
    return launch.blocks + launch.blocks_per_sample * record.x[0]


def _note(launch: Launch) -> str:
    if launch.team is not None:
        return f"cooperative: {launch.team.jobs_per_sample:,} jobs a sample, taken in turn"
    if not launch.blocks_per_sample:
        return "the same for any batch"
    return f"{launch.blocks_per_sample:,} a sample"
