"""Turns saved benchmark records into one HTML page, and into pictures for a README.

Pictures need matplotlib (`pip install 'kgen[report]'`), and nothing needs a GPU or a network.
Equal records give equal bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kgen.bench.record import Record, load_record
from kgen.errors import UsageError
from kgen.files import write_whole
from kgen.report.charts import CHARTS
from kgen.report.figures import check_figures
from kgen.report.page import page
from kgen.report.pictures import png, standalone, svg
from kgen.report.text import slug

__all__ = ["write_pictures", "write_report"]


def write_report(records: Sequence[Path], output: Path) -> Path:
    """Write one self-contained HTML page of the records, at least one, to `output`; returns it.

    Records of one spec stand together, oldest first; times are shown in ms, rates in GB/s and
    TFLOP/s. The file is written whole or not at all.
    Raises: RecordError for a file that is no record or holds figures that cannot be; UsageError if
    there are no records, `output` cannot be written or matplotlib is not installed.
    """
    if not records:
        raise UsageError("no records given; `kgen bench` writes them")
    loaded = []
    for path in records:
        record = load_record(path)
        check_figures(record, str(path))
        loaded.append(record)
    return write_whole(output, page(loaded).encode("utf-8"))


def write_pictures(record: Record, folder: Path) -> list[Path]:
    """Write `<name>_roofline` and `<name>_bars` as .svg and .png into `folder`; returns the paths.

    The SVG follows the viewer's light or dark; the PNG is light, 960 pixels wide.
    Raises: RecordError for figures that cannot be; UsageError if `folder` cannot be written or
    matplotlib is not installed.
    """
    check_figures(record, record.name)
    written = []
    for name, (chart, words) in CHARTS.items():
        stem = f"{slug(record.name)}_{name}"
        text = standalone(svg(chart, record, name), words(record))
        written.append(write_whole(folder / f"{stem}.svg", text.encode("utf-8")))
        written.append(write_whole(folder / f"{stem}.png", png(chart, record)))
    return written
