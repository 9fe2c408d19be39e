"""What follows from a record's measurements: speeds, shares and comparisons. Pure arithmetic.

Nothing is filled in: a figure whose inputs are missing is None, and `why_missing` says why.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kgen.bench.record import KINDS, Record, RecordError, Row
from kgen.report.text import TIMES, one_line, scientific, significant
from kgen.verdict import ATOL

PREFERRED = ("graph", "cold")  # what a comparison rests on: the first that both rows have
COMPILED = "compile"
BASELINES = ("eager", COMPILED, "compile-max-autotune")  # columns of speedups, where measured


@dataclass(frozen=True)
class Speed:
    """What one median means for the block. bytes_per_s and flops: of what the block needs, not of
    what a kernel moves. of_copy: share of the measured copy bandwidth, None if not measured."""

    bytes_per_s: float
    flops: float
    of_copy: float | None


@dataclass(frozen=True)
class Speedup:
    """How many times as fast a row is as a baseline, by medians of `kind`."""

    baseline: str
    kind: str
    factor: float
    baseline_ms: float

    def words(self) -> str:
        """For instance: 5.91 times as fast as eager (2.839 ms)."""
        ms = significant(self.baseline_ms)
        return f"{significant(self.factor, 3)} times as fast as {self.baseline} ({ms} ms)"


def check_figures(record: Record, source: str) -> None:
    """Refuse what cannot be drawn or divided by. Raises: RecordError naming `source` and the key.

    Ceilings may be 0 or absent: then they were not measured.
    """
    for key in ("bytes_needed", "flops"):
        if getattr(record, key) <= 0:
            raise RecordError(f"{source}: {key}: is not a positive number")
    for number, row in enumerate(record.rows):
        for kind in KINDS:
            times = row.times(kind)
            if times is None:
                continue
            for key in ("median", "p20", "p80"):
                value = getattr(times, key)
                if not math.isfinite(value) or value <= 0:
                    raise RecordError(f"{source}: rows.{number}.{kind}.{key}: is not a positive ms")
            if not times.p20 <= times.median <= times.p80:
                raise RecordError(f"{source}: rows.{number}.{kind}: needs p20 <= median <= p80")


def why_missing(row: Row) -> str:
    """Why a row is in no picture; empty if it is in them."""
    if row.failed is not None:
        return f"failed: {one_line(row.failed) or 'no reason recorded'}"
    if row.shown() is None:
        kinds = ", ".join(kind for kind in KINDS if row.times(kind) is not None)
        return f"the record holds no graph or cold times of it (only {kinds or 'none at all'})"
    return ""


def copy_bytes(record: Record) -> float | None:
    """Measured copy bandwidth, bytes/s; None if it was not measured."""
    return _positive(record.ceilings.copy_bytes)


def mma_ceilings(record: Record) -> dict[str, float]:
    """Measured tensor-core ceilings by operand type, flop/s; those not measured left out."""
    found = {name: _positive(value) for name, value in record.ceilings.mma_flops.items()}
    return {name: value for name, value in found.items() if value is not None}


def speed(record: Record, median: float) -> Speed:
    """What a median in ms means for the record's block."""
    rate = record.bytes_needed / (median / 1e3)
    copy = copy_bytes(record)
    return Speed(rate, record.flops / (median / 1e3), rate / copy if copy is not None else None)


def speedup(record: Record, row: Row, baseline: str, kind: str | None = None) -> Speedup | None:
    """A row against a baseline; None if they have no times to compare.

    kind: of both medians; None takes the first of PREFERRED that both have.
    """
    other = record.row(baseline)
    if other is None or other.failed is not None or row.failed is not None or other is row:
        return None
    for one in PREFERRED if kind is None else (kind,):
        own, base = row.times(one), other.times(one)
        if own is not None and base is not None:
            return Speedup(other.label, one, base.median / own.median, base.median)
    return None


def worst_error(row: Row) -> float | None:
    """The larger of the errors before and after timing; NaN if either is; None if neither is."""
    found = [one for one in (row.max_error, row.recheck_error) if one is not None]
    if any(math.isnan(one) for one in found):
        return math.nan
    return max(found, default=None)


def meets_tolerance(row: Row) -> bool | None:
    """Whether a row's largest error is within ATOL; None if it was not compared."""
    worst = worst_error(row)
    return None if worst is None else worst <= ATOL


def best_kernel(record: Record) -> Row | None:
    """The fastest kernel of kgen, of those within the tolerance if there is one."""
    rows = [row for row in record.rows if row.kind == "kgen" and row.shown() is not None]
    within = [row for row in rows if meets_tolerance(row)]
    # Graph and cold times are not comparable: a row without graph times loses to any that has them.
    return min(within or rows, key=_rank, default=None)


def by_speed(record: Record) -> list[Row]:
    """All rows, fastest first; those without times last, in the record's order."""
    timed = [row for row in record.rows if row.shown() is not None]
    return sorted(timed, key=_rank) + [row for row in record.rows if row.shown() is None]


def summary(record: Record) -> str:
    """The best kernel against eager and torch.compile in a few sentences of plain text."""
    best = best_kernel(record)
    if best is None:
        tried = [row for row in record.rows if row.kind == "kgen"]
        if not tried:
            return "No kernel of kgen is in this record."
        reasons = "; ".join(f"{one_line(row.label)} {why_missing(row)}" for row in tried)
        return f"No kernel of kgen could be timed: {reasons}."
    found = best.shown()
    assert found is not None, "best_kernel gives rows with times"
    kind, times = found
    parts = [f"{one_line(best.label)} takes {significant(times.median)} ms ({kind} median)"]
    against = [speedup(record, best, name) for name in BASELINES]
    parts.append("; ".join(_with_kind(one, kind) for one in against if one is not None))
    told = [", ".join(part for part in parts if part) + "."]
    told += [_why_not_against(record, name) for name in BASELINES[:2] if _absent(record, name)]
    share = speed(record, times.median).of_copy
    if share is not None:
        told.append(
            f"Counting every needed byte once, that is {100 * share:.1f} % of the measured copy "
            "bandwidth."
        )
    told.append(_accuracy(best))
    return " ".join(told)


def _with_kind(one: Speedup, kind: str) -> str:
    return one.words() if one.kind == kind else f"{one.words()[:-1]}, both {one.kind})"


def _absent(record: Record, baseline: str) -> bool:
    row = record.row(baseline)
    return row is None or row.shown() is None


def _why_not_against(record: Record, baseline: str) -> str:
    row = record.row(baseline)
    return f"{baseline} {'is not in the record' if row is None else why_missing(row)}."


def _accuracy(row: Row) -> str:
    worst, met = worst_error(row), meets_tolerance(row)
    if met is None:
        return "Its error is not in the record."
    held = "within" if met else "which misses"
    return (
        f"Its largest error against fp64 is {scientific(worst)}, {held} the tolerance of {ATOL:g}."
    )


def _rank(row: Row) -> tuple[int, float]:
    found = row.shown()
    assert found is not None, "only rows with times are ranked"
    return PREFERRED.index(found[0]), found[1].median


def _positive(value: float) -> float | None:
    return value if math.isfinite(value) and value > 0 else None


def size(shape: tuple[int, ...]) -> str:
    """[128, 8, 256, 256]."""
    return f"[{', '.join(map(str, shape))}]"


def factor(value: float) -> str:
    """A speedup: 5.91x with a multiplication sign."""
    return f"{significant(value, 3)}{TIMES}"
