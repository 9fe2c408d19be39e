"""Numbers and foreign text as a page shows them."""

from __future__ import annotations

import math
import re

MISSING = "\u2013"  # a dash: there is no figure, and a reason stands beside it
TIMES = "\u00d7"


def significant(value: float, digits: int = 4) -> str:
    """A number with so many significant digits, in plain notation from 1e-4 to 1e9."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e9:
        return f"{value:.{digits - 1}e}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


def scientific(value: float | None) -> str:
    """An error: 1.13e-06; a dash for None."""
    return MISSING if value is None else f"{value:.2e}"


def optional(value: float | None, digits: int = 4) -> str:
    """`significant`, or a dash for None."""
    return MISSING if value is None else significant(value, digits)


def printable(text: str) -> str:
    """Text without what neither HTML nor XML may hold: control characters, lone surrogates."""
    lines = text.replace("\r\n", "\n")
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]", "\ufffd", lines)


def one_line(text: str, most: int | None = None) -> str:
    """Printable text on one line; cut, with an ellipsis, where it is longer than `most`."""
    line = " ".join(printable(text).split())
    return line if most is None or len(line) <= most else f"{line[: most - 1]}\u2026"


def slug(name: str) -> str:
    """A name as the start of a file name: whatever could lead out of a folder becomes `_`."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)[:64] or "record"
