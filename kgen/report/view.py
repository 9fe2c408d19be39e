"""What the page's template is given for each record: every figure as the text that is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from kgen.bench.record import KINDS, Record, Row
from kgen.explain import as_text
from kgen.report import figures
from kgen.report.block import Planned, planned, title
from kgen.report.charts import CHARTS
from kgen.report.drawings import (
    SmemPicture,
    Step,
    TilePicture,
    smem_pictures,
    steps,
    tile_picture,
)
from kgen.report.pictures import svg
from kgen.report.source import highlighted
from kgen.report.text import MISSING, one_line, optional, scientific, significant
from kgen.verdict import ATOL
from kgen.version import __version__


@dataclass(frozen=True)
class Picture:
    """A drawn chart. label: what it shows, with the figures, for those who do not see it."""

    svg: Markup
    label: str


@dataclass(frozen=True)
class TimeLine:
    """One row of the table of times: cells, or why there are none."""

    kind: str
    cells: tuple[str, ...]
    why: str = ""


@dataclass(frozen=True)
class RowView:
    """One kernel or baseline in the tables. verdict: of its error against the tolerance."""

    label: str
    is_kernel: bool
    is_best: bool
    failed: str
    lines: tuple[TimeLine, ...]
    verified: str
    max_error: str
    rms_error: str
    recheck_error: str
    verdict: str
    meets: bool | None
    host_us: str
    first_call_ms: str


@dataclass(frozen=True)
class PlanView:
    """The plan of the spec. source is None where another record on the page shows the same."""

    strategy: str
    notes: tuple[str, ...]
    tile: TilePicture | None
    smem: tuple[SmemPicture, ...]
    steps: tuple[Step, ...]
    explained: str
    source: Markup | None
    source_lines: int
    same_source_as: int


@dataclass(frozen=True)
class RecordView:
    """One record on the page; number: 1 for the first shown."""

    number: int
    record: Record
    title: str
    summary: str
    best: str
    best_ms: str
    against: tuple[str, ...]
    pictures: dict[str, Picture]
    left_out: tuple[tuple[str, str], ...]
    baselines: tuple[str, ...]
    rows: tuple[RowView, ...]
    counters: tuple[tuple[str, ...], ...]
    plan: PlanView | None
    why_no_plan: str
    context: tuple[tuple[str, str], ...]
    clocks: tuple[tuple[str, str, str], ...]
    ceilings: tuple[tuple[str, str], ...]


def views(records: Sequence[Record]) -> list[RecordView]:
    """Views of the records: those of one spec together, by date; specs in the order given."""
    specs = list(dict.fromkeys(record.spec_hash for record in records))
    ordered = sorted(records, key=lambda one: (specs.index(one.spec_hash), one.context.date))
    shown: dict[str, int] = {}
    return [view(record, number, shown) for number, record in enumerate(ordered, start=1)]


def view(record: Record, number: int, shown: dict[str, int]) -> RecordView:
    """One record. shown: digests of sources that the page has, and where; this one is added."""
    plan, why_no_plan = planned(record)
    best = figures.best_kernel(record)
    baselines = tuple(name for name in figures.BASELINES if record.row(name) is not None)
    found = best.shown() if best is not None else None
    against = (
        figures.speedup(record, best, name) if best is not None else None
        for name in figures.BASELINES[:2]
    )
    return RecordView(
        number=number,
        record=record,
        title=title(record, plan.spec if plan is not None else None),
        summary=figures.summary(record),
        best=best.label if best is not None else MISSING,
        best_ms=f"{significant(found[1].median)} ({found[0]})" if found is not None else MISSING,
        against=tuple(_against(one, found[0] if found is not None else "") for one in against),
        pictures={
            name: Picture(Markup(svg(chart, record, f"r{number}-{name}")), words(record))
            for name, (chart, words) in CHARTS.items()
        },
        left_out=tuple(
            (row.label, figures.why_missing(row)) for row in record.rows if figures.why_missing(row)
        ),
        baselines=baselines,
        rows=tuple(_row(record, row, baselines, row is best) for row in figures.by_speed(record)),
        counters=_counters(record),
        plan=_plan(record, plan, number, shown) if plan is not None else None,
        why_no_plan=why_no_plan,
        context=_context(record),
        clocks=_clocks(record),
        ceilings=_ceilings(record),
    )


def _against(one: figures.Speedup | None, kind: str) -> str:
    """A factor, and the kind of its medians where that is not `kind`."""
    if one is None:
        return MISSING
    return figures.factor(one.factor) + ("" if one.kind == kind else f" ({one.kind})")


def _row(record: Record, row: Row, baselines: Sequence[str], is_best: bool) -> RowView:
    meets, worst = figures.meets_tolerance(row), figures.worst_error(row)
    if meets is None:
        verdict = "not compared"
    elif meets:
        verdict = f"meets {ATOL:g}"
    else:
        verdict = f"misses {ATOL:g} ({scientific(worst)})"
    failed = figures.why_missing(row) if row.failed is not None else ""
    lines = () if failed else tuple(_line(record, row, kind, baselines) for kind in KINDS)
    return RowView(
        label=row.label,
        is_kernel=row.kind == "kgen",
        is_best=is_best,
        failed=failed,
        lines=lines,
        verified=_verified(row),
        max_error=scientific(row.max_error),
        rms_error=scientific(row.rms_error),
        recheck_error=scientific(row.recheck_error),
        verdict=verdict,
        meets=meets,
        host_us=optional(row.host_us),
        first_call_ms=optional(row.first_call_ms),
    )


def _verified(row: Row) -> str:
    if row.verified_cases:
        return f"{row.verified_cases:,}"
    return "0" if row.kind == "kgen" else "not applicable"


def _line(record: Record, row: Row, kind: str, baselines: Sequence[str]) -> TimeLine:
    times = row.times(kind)
    if times is None:
        return TimeLine(kind, (), f"no {kind} times in the record")
    speed = figures.speed(record, times.median)
    of_copy = "not measured" if speed.of_copy is None else f"{100 * speed.of_copy:.1f} %"
    cells = [
        significant(times.median),
        significant(times.p20),
        significant(times.p80),
        f"{times.rounds:,}",
        f"{100 * times.relative_error:.2f} %",
        significant(speed.bytes_per_s / 1e9),
        significant(speed.flops / 1e12),
        of_copy,
    ]
    for name in baselines:
        found = figures.speedup(record, row, name, kind)
        cells.append(MISSING if found is None else figures.factor(found.factor))
    return TimeLine(kind, tuple(cells))


def _counters(record: Record) -> tuple[tuple[str, ...], ...]:
    """A table of ncu counters: a head of labels, then a line a counter; empty if there are none."""
    rows = [row for row in record.rows if row.ncu]
    names = sorted({name for row in rows for name in row.ncu or {}})
    lines = [(name, *(optional((row.ncu or {}).get(name), 5) for row in rows)) for name in names]
    return (("counter", *(row.label for row in rows)), *lines) if lines else ()


def _plan(record: Record, found: Planned, number: int, shown: dict[str, int]) -> PlanView:
    plan, digest = found.plan, found.digest
    first = shown.setdefault(digest, number)
    return PlanView(
        strategy=plan.strategy,
        notes=tuple(_plan_notes(record, found)),
        tile=tile_picture(plan),
        smem=tuple(smem_pictures(plan)),
        steps=tuple(steps(plan, record, digest)),
        explained=as_text(found.facts),
        source=highlighted(found.source) if first == number else None,
        source_lines=len(found.source.splitlines()),
        same_source_as=first,
    )


def _plan_notes(record: Record, found: Planned) -> list[str]:
    """Where the plan shown may differ from what was measured."""
    strategy, notes = found.plan.strategy, []
    own = [row for row in record.rows if row.kind == "kgen" and row.strategy == strategy]
    best = figures.best_kernel(record)
    if best is not None and best.strategy not in (None, strategy):
        notes.append(
            f"The spec's own strategy is {strategy}, shown here; the fastest kernel of this record "
            f"is {one_line(best.label)}, whose plan differs."
        )
    digests = {row.kernel_sha256 for row in own if row.kernel_sha256}
    if digests and found.digest not in digests:
        notes.append(
            f"The source below is not the one that was measured: kgen {__version__} emits "
            f"{found.digest[:12]}, measured was {', '.join(sorted(one[:12] for one in digests))} "
            f"of kgen {one_line(record.context.kgen)}."
        )
    elif digests:
        notes.append(f"The source below is the one that was measured (SHA-256 {found.digest}).")
    else:
        notes.append(
            f"Whether the source below was measured is not in the record: it has no digest of a "
            f"{strategy} kernel."
        )
    return notes


def _context(record: Record) -> tuple[tuple[str, str], ...]:
    context = record.context
    cudnn = "not available" if context.cudnn is None else str(context.cudnn)
    return (
        ("GPU", f"{context.gpu}, {context.sms} SMs"),
        ("driver", context.driver),
        ("date", context.date),
        ("torch", context.torch),
        ("CUDA", context.cuda),
        ("cuDNN", cudnn),
        ("NVRTC", context.nvrtc),
        ("kgen", context.kgen + (f", commit {context.commit}" if context.commit else "")),
        ("Python", context.python),
        ("bytes needed", f"{record.bytes_needed:,}"),
        ("flop", f"{record.flops:,}"),
        *((name, str(value)) for name, value in sorted(context.flags.items())),
    )


def _clocks(record: Record) -> tuple[tuple[str, str, str], ...]:
    before, after = record.context.clocks_before, record.context.clocks_after
    return tuple(
        (name, optional(before.get(name)), optional(after.get(name)))
        for name in sorted({*before, *after})
    )


def _ceilings(record: Record) -> tuple[tuple[str, str], ...]:
    """Measured ceilings by name; those that were not measured say so."""
    ceilings = record.ceilings
    rates = [("copy, read and written", ceilings.copy_bytes), ("fill", ceilings.fill_bytes)]
    found = [
        (name, f"{value / 1e9:,.0f} GB/s" if value > 0 else "not measured") for name, value in rates
    ]
    for name, value in sorted(ceilings.mma_flops.items()):
        shown = f"{value / 1e12:,.1f} TFLOP/s" if value > 0 else "not measured"
        found.append((f"mma {name}", shown))
    if not ceilings.mma_flops:
        found.append(("mma", "not measured"))
    return tuple(found)
