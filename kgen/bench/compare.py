"""Whether rows became faster or slower since an older record, given the noise of both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kgen.bench.record import Record, Row, RowTimes

SIGMAS = 3.0  # of the difference of two medians, beyond which it is no noise
# Two processes on one idle GPU differ by this much however long each measures: clocks, addresses.
BETWEEN_RUNS = 0.01


@dataclass(frozen=True)
class Change:
    """One row then and now. kind: the column compared. ratio: new over old median. noise: relative
    difference that the two runs cannot tell from nothing."""

    label: str
    kind: str
    old_ms: float
    new_ms: float
    ratio: float
    noise: float
    verdict: Literal["faster", "slower", "same"]

    def sentence(self) -> str:
        """One line for people."""
        change = 100 * (self.ratio - 1)
        return (
            f"{self.label:28} {self.kind:5} {self.old_ms:9.4f} -> {self.new_ms:9.4f} ms "
            f"{change:+6.1f} %  {self.verdict} (noise {100 * self.noise:.1f} %)"
        )


def compare(old: Record, new: Record) -> tuple[list[Change], list[str]]:
    """Changes of the rows that both have, and what else tells the runs apart, a line each."""
    notes = []
    for what, before, now in (
        ("the GPU", old.context.gpu, new.context.gpu),
        ("the driver", old.context.driver, new.context.driver),
        ("torch", old.context.torch, new.context.torch),
        ("NVRTC", old.context.nvrtc, new.context.nvrtc),
        ("the block", old.spec_hash, new.spec_hash),
        ("the size of x", str(old.x), str(new.x)),
    ):
        if before != now:
            notes.append(f"{what} differs: {before} then, {now} now")
    changes = []
    for row in new.rows:
        before_row = old.row(row.label)
        if before_row is None:
            notes.append(f"{row.label}: is new")
            continue
        change = _change(before_row, row)
        if isinstance(change, str):
            notes.append(f"{row.label}: {change}")
        else:
            changes.append(change)
    notes += [f"{row.label}: is gone" for row in old.rows if new.row(row.label) is None]
    return changes, notes


def _change(old: Row, new: Row) -> Change | str:
    for kind in ("graph", "cold", "warm"):
        before, now = old.times(kind), new.times(kind)
        if before is not None and now is not None:
            return _between(new.label, kind, before, now)
    who = [name for name, row in (("old", old), ("new", new)) if row.failed]
    return f"has no time in both ({' and '.join(who) or 'neither'} failed)"


def _between(label: str, kind: str, old: RowTimes, new: RowTimes) -> Change:
    spread = SIGMAS * (old.relative_error**2 + new.relative_error**2) ** 0.5
    noise = max(spread, BETWEEN_RUNS)
    ratio = new.median / old.median
    verdict: Literal["faster", "slower", "same"] = "same"
    if abs(ratio - 1) > noise:
        verdict = "faster" if ratio < 1 else "slower"
    return Change(label, kind, old.median, new.median, ratio, noise, verdict)
