"""The roofline and the bars of a record as matplotlib figures, and their figures in words.

A palette gives the colours by name, see `kgen.report.pictures.COLOURS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from kgen.bench.record import Record, Row
from kgen.report.figures import (
    PREFERRED,
    by_speed,
    copy_bytes,
    mma_ceilings,
    speed,
    why_missing,
)
from kgen.report.pictures import Chart, load_matplotlib
from kgen.report.text import one_line, significant

# Characters of a label in a picture; the tables have all of it.
_LABEL_MOST, _POINT_MOST = 34, 22
_REASON_MOST = 40
_WIDTH = 4.8  # inches: 460 CSS pixels, readable when a phone shrinks it to its width
_MARKERS = {"kgen": "o", "baseline": "s"}


def _timed(label: str, kind: str, most: int) -> str:
    """A label that names the kind of its times where that is not the preferred one."""
    name = one_line(label, most)
    return name if kind == PREFERRED[0] else f"{name} ({kind})"


def _head(figure: Any, record: Record, palette: dict[str, str]) -> None:
    heading = f"{one_line(record.name, 30)} on {one_line(record.context.gpu, 30)}"
    figure.suptitle(heading, x=0.01, ha="left", fontsize=10, color=palette["ink"])


def _points(record: Record) -> list[tuple[str, str, str, float]]:
    """Label, kind of row, kind of times and flop/s of every row that has times, fastest last."""
    found = []
    for row in record.rows:
        shown = row.shown()
        if shown is not None:
            found.append((row.label, row.kind, shown[0], speed(record, shown[1].median).flops))
    return sorted(found, key=lambda one: one[3])


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places at least `gap` apart for ascending wishes, moved down from the top first.

    They stay between low and high as far as there is room for them.
    """
    places = [min(one, high) for one in wanted]
    for index in range(len(places) - 2, -1, -1):
        places[index] = min(places[index], places[index + 1] - gap)
    if places and places[0] < low:
        places[0] = low
        for index in range(1, len(places)):
            places[index] = max(places[index], places[index - 1] + gap)
    return places


def roofline(record: Record, palette: dict[str, str]) -> Any:
    """flop/s over flop/byte of the block: one point a row under the measured roofs."""
    matplotlib = load_matplotlib()
    intensity = record.flops / record.bytes_needed
    copy, mma, points = copy_bytes(record), mma_ceilings(record), _points(record)
    levels = [*mma.values(), *(one[3] for one in points)]
    if copy is not None:
        levels.append(copy * intensity)
    high, low = (2.5 * max(levels), 0.3 * min(levels)) if levels else (1e12, 1e9)
    ridges = [one / copy for one in mma.values()] if copy is not None else []
    left = max(0.7, math.log10(intensity / min([intensity, *ridges])) + 0.4)
    right = max(1.5 * left, math.log10(max([intensity, *ridges]) / intensity) + 0.4)
    left = max(left, right / 2)  # room for the roofs' names on the left of the points
    x_low, x_high = intensity / 10**left, intensity * 10**right

    figure = matplotlib.figure.Figure(figsize=(_WIDTH, 3.9), layout="constrained")
    axes = figure.add_subplot()
    _dress(matplotlib, axes, palette)
    _head(figure, record, palette)
    axes.set(xscale="log", yscale="log", xlim=(x_low, x_high), ylim=(low / 1e12, high / 1e12))
    axes.set_xlabel("flop a byte of x and y", color=palette["ink"])
    axes.set_ylabel("TFLOP/s", color=palette["ink"])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(matplotlib.ticker.FuncFormatter(_short))
        axis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    axes.axvline(intensity, color=palette["rule"], linewidth=1, zorder=1)

    def height(flops: float) -> float:
        """Of the axes, from 0 to 1."""
        return math.log(flops / low) / math.log(high / low)

    if copy is not None:
        end = min(x_high, max(ridges, default=x_high))
        ends = [x_low, end], [copy * x_low / 1e12, copy * end / 1e12]
        axes.plot(*ends, color=palette["ink"], linewidth=1.6)
    for value in mma.values():
        start = x_low if copy is None else min(max(value / copy, x_low), x_high)
        axes.plot([start, x_high], [value / 1e12] * 2, color=palette["ink"], linewidth=1.6)
        axes.plot([x_low, start], [value / 1e12] * 2, color=palette["rule"], linewidth=1, zorder=1)
    box = {"facecolor": palette["paper"], "edgecolor": "none", "pad": 0.6}
    _roof_labels(axes, mma, height, palette, box)
    if copy is not None:
        axes.text(0.015, height(copy * x_low) - 0.02, f"copy {significant(copy / 1e9)} GB/s",
                  transform=axes.transAxes, fontsize=9, va="top", bbox=box,
                  color=palette["muted"])  # fmt: skip
    else:
        axes.text(0.015, 0.02, "copy bandwidth not measured", transform=axes.transAxes, fontsize=9,
                  color=palette["muted"])  # fmt: skip
    places = spread([height(one[3]) for one in points], 0.062, 0.03, 0.97)
    for (label, kind, times, flops), place in zip(points, places, strict=True):
        note = axes.annotate(
            f"{_timed(label, times, _POINT_MOST)} {significant(flops / 1e12, 3)}",
            (intensity, flops / 1e12), xytext=(left / (left + right) + 0.06, place),
            textcoords="axes fraction", va="center", fontsize=9, color=palette[kind], bbox=box,
            arrowprops={"arrowstyle": "-", "color": palette[kind], "linewidth": 0.7,
                        "shrinkA": 0, "shrinkB": 3, "relpos": (0, 0.5)}, zorder=4,
        )  # fmt: skip
        note.set_in_layout(False)  # a long label must not make the axes narrow
        axes.plot(
            [intensity], [flops / 1e12], marker=_MARKERS[kind], markersize=6, linestyle="none",
            color=palette[kind], zorder=5,
        )  # fmt: skip
    if not points:
        axes.text(0.5, 0.1, "no row has times", transform=axes.transAxes, ha="center",
                  color=palette["ink"])  # fmt: skip
    return figure


def _roof_labels(
    axes: Any, mma: dict[str, float], height: Callable[[float], float], palette: Any, box: Any
) -> None:
    """Names of the tensor cores' roofs at the left edge, where memory bounds and no point is."""
    if not mma:
        axes.text(0.015, 0.95, "mma ceilings not measured", transform=axes.transAxes, fontsize=9,
                  color=palette["muted"])  # fmt: skip
    ordered = sorted(mma.items(), key=lambda one: one[1])
    lines: list[list[tuple[str, float]]] = []
    for one in ordered:  # roofs that nearly coincide share a label
        if lines and height(one[1]) - height(lines[-1][0][1]) < 0.03:
            lines[-1].append(one)
        else:
            lines.append([one])
    places = spread([height(line[-1][1]) + 0.012 for line in lines], 0.062, 0.03, 0.95)
    for line, place in zip(lines, places, strict=True):
        named = ", ".join(f"{one_line(name, 14)} {value / 1e12:,.0f}" for name, value in line)
        axes.text(0.015, place, f"mma {named}", transform=axes.transAxes, fontsize=9, zorder=3,
                  color=palette["muted"], va="bottom", bbox=box)  # fmt: skip


def bars(record: Record, palette: dict[str, str]) -> Any:
    """The median of every row, fastest on top, whiskers from p20 to p80."""
    matplotlib = load_matplotlib()
    rows = by_speed(record)
    figure = matplotlib.figure.Figure(
        figsize=(_WIDTH, 1.1 + 0.31 * max(1, len(rows))), layout="constrained"
    )
    axes = figure.add_subplot()
    _dress(matplotlib, axes, palette)
    kinds = [kind for kind in PREFERRED if any(_kind(row) == kind for row in rows)]
    own = PREFERRED[0] if PREFERRED[0] in kinds else ""
    also = "".join(f" ({kind} where named)" for kind in kinds if kind != PREFERRED[0])
    _head(figure, record, palette)
    told = " ".join(part for part in ("ms:", own, "median") if part)
    figure.supxlabel(f"{told}{also}, p20 to p80", fontsize=9, color=palette["ink"])
    longest = max((shown[1].p80 for row in rows if (shown := row.shown())), default=1.0)
    names = []
    for index, row in enumerate(rows):
        shown = row.shown()
        if shown is None:
            names.append(one_line(row.label, _LABEL_MOST))
            why = one_line(why_missing(row), _REASON_MOST)
            axes.text(0.01 * longest, index, why, va="center", fontsize=8, color=palette["muted"])
            continue
        kind, times = shown
        names.append(_timed(row.label, kind, _LABEL_MOST))
        axes.barh(index, times.median, height=0.62, color=palette[row.kind])
        # A rim of the ground keeps a whisker apart from its own bar.
        for colour, width, cap in ((palette["paper"], 3.4, 4), (palette["ink"], 1.2, 3)):
            axes.errorbar(
                times.median, index, capsize=cap, capthick=width, color=colour, linewidth=width,
                xerr=[[times.median - times.p20], [times.p80 - times.median]],
            )  # fmt: skip
        axes.annotate(significant(times.median), (times.p80, index), xytext=(6, 0), fontsize=9,
                      textcoords="offset points", va="center", color=palette["ink"])  # fmt: skip
    # The last tick is left out: its label would reach beyond the picture.
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(nbins=5, prune="upper"))
    axes.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(_short))
    axes.set_yticks(range(len(names)), names)
    axes.set(xlim=(0, 1.22 * longest), ylim=(max(1, len(rows)) - 0.4, -0.6))
    axes.tick_params(axis="y", length=0)
    for text, row in zip(axes.get_yticklabels(), rows, strict=True):
        text.set_color(palette["ink"])
        text.set_fontweight("bold" if row.kind == "kgen" else "normal")
    if not rows:
        axes.text(0.5, 0, "the record has no rows", ha="center", color=palette["ink"])
    return figure


def _short(value: float, _: int | None = None) -> str:
    return f"{value:g}"


def _kind(row: Row) -> str | None:
    shown = row.shown()
    return None if shown is None else shown[0]


def _dress(matplotlib: Any, axes: Any, palette: dict[str, str]) -> None:
    axes.set_axisbelow(True)
    axes.grid(axis="x", color=palette["rule"], linewidth=0.5)
    axes.tick_params(which="both", color=palette["muted"], labelcolor=palette["ink"], labelsize=9)
    for spine in axes.spines.values():
        spine.set_color(palette["muted"])


def roofline_words(record: Record) -> str:
    """The roofline's figures as a sentence."""
    intensity = record.flops / record.bytes_needed
    copy = copy_bytes(record)
    roofs = ["copy bandwidth not measured" if copy is None else f"copy {copy / 1e9:,.0f} GB/s"]
    roofs += [
        f"mma {one_line(name)} {value / 1e12:,.0f} TFLOP/s"
        for name, value in sorted(mma_ceilings(record).items())
    ] or ["mma ceilings not measured"]
    points = [
        f"{one_line(label)} {significant(flops / 1e12, 3)} TFLOP/s ({times})"
        for label, _, times, flops in reversed(_points(record))
    ] or ["no row has times"]
    return (
        f"Roofline of {one_line(record.name)} at {significant(intensity, 3)} flop a byte. Roofs: "
        f"{', '.join(roofs)}. Points: {', '.join(points)}."
    )


def bars_words(record: Record) -> str:
    """The bars' figures as a sentence."""
    told = []
    for row in by_speed(record):
        shown = row.shown()
        if shown is None:
            told.append(f"{one_line(row.label)} {why_missing(row)}")
        else:
            kind, times = shown
            low, high = significant(times.p20), significant(times.p80)
            told.append(
                f"{one_line(row.label)} {significant(times.median)} ms ({kind}, {low} to {high})"
            )
    listed = "; ".join(told) or "the record has no rows"
    return f"Medians of {one_line(record.name)}, p20 to p80 in brackets: {listed}."


CHARTS: dict[str, tuple[Chart, Callable[[Record], str]]] = {
    "roofline": (roofline, roofline_words),
    "bars": (bars, bars_words),
}
