"""Charts as SVG and PNG bytes.

Charts are drawn in stand-in colours that `themed` turns into CSS variables, so that one SVG serves
light and dark; a PNG is drawn in the light colours. Equal records give equal bytes.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable
from typing import Any

from markupsafe import escape

from kgen.bench.record import Record
from kgen.errors import UsageError

# Name of a CSS variable: its light and its dark colour, 4.5 to 1 or more against `paper`. Blue and
# orange stay apart for every common kind of colour blindness; shapes tell them apart as well.
COLOURS = {
    "paper": ("#ffffff", "#15181d"),
    "ink": ("#1c2127", "#e8ebef"),
    "muted": ("#57606a", "#a3adb8"),
    "rule": ("#d5dae0", "#3a414a"),
    "kgen": ("#0b63b0", "#64b1ff"),
    "baseline": ("#a84a00", "#f0a35e"),
}
_STAND_INS = {name: f"#{index + 1:02x}fe{index + 1:02x}" for index, name in enumerate(COLOURS)}

_STROKES = "stroke-linejoin: round; stroke-linecap: butt"  # matplotlib's rule for all elements

# (record, colour by name) -> matplotlib.figure.Figure
Chart = Callable[[Record, dict[str, str]], Any]


def load_matplotlib() -> Any:
    """The package, which only reports need. Raises: UsageError if it is not installed."""
    try:
        import matplotlib
        import matplotlib.figure
        import matplotlib.ticker
    except ImportError:
        raise UsageError("matplotlib is not installed (pip install 'kgen[report]')") from None
    return matplotlib


def _settings() -> dict[str, Any]:
    return {
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],  # it comes with matplotlib: the same layout everywhere
        "font.size": 10,
        "svg.fonttype": "none",
        "svg.hashsalt": "kgen",
        "text.parse_math": False,  # labels come from files; a dollar is a dollar
        "axes.unicode_minus": False,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }


def svg(chart: Chart, record: Record, prefix: str) -> str:
    """An inline SVG element, colours as CSS variables, every id beginning with `prefix`."""
    text = _saved(chart, record, _STAND_INS, format="svg", transparent=True).decode("utf-8")
    return themed(text[text.index("<svg") :], prefix)


def png(chart: Chart, record: Record) -> bytes:
    """A PNG in the light colours on an opaque ground, 200 pixels an inch."""
    light = {name: colours[0] for name, colours in COLOURS.items()}
    return _saved(chart, record, light, format="png", dpi=200, facecolor=light["paper"])


def _saved(chart: Chart, record: Record, palette: dict[str, str], **how: Any) -> bytes:
    matplotlib = load_matplotlib()
    # No date, no version of the program: nothing that changes while the record does not.
    unset = ("Date", "Creator", "Format", "Type") if how["format"] == "svg" else ("Software",)
    out = io.BytesIO()
    # Defaults first: a matplotlibrc of the user's must not change the picture.
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_settings())
        chart(record, palette).savefig(out, metadata=dict.fromkeys(unset), **how)
    return out.getvalue()


def themed(text: str, prefix: str) -> str:
    """matplotlib's SVG for use inside a page: see `svg`."""
    text = text.replace("xlink:href", "href")
    text = re.sub(r'\s+xmlns:xlink="[^"]*"', "", text)
    used = set(re.findall(r'(?:url\(#|href="#)([^")]+)', text))

    def keep(match: re.Match[str]) -> str:
        return f' id="{prefix}-{match[1]}"' if match[1] in used else ""

    # A style element inside a page would hold for all of the page: it moves to the root.
    text, rules = re.subn(
        r"<defs>\s*<style[^>]*>\*\{([^}]*)\}</style>\s*</defs>", "", text, count=1
    )
    text = text.replace("<svg ", f'<svg style="{_STROKES}" ', 1) if rules else text
    text = re.sub(r' id="([^"]+)"', keep, text)
    text = re.sub(r'(url\(#|href="#)', rf"\g<1>{prefix}-", text)
    text = text.replace("'DejaVu Sans'", "system-ui")
    for name, stand_in in _STAND_INS.items():
        text = text.replace(stand_in, f"var(--{name}, {COLOURS[name][0]})")
    return text.strip()


def standalone(text: str, label: str) -> str:
    """An SVG file of its own: a ground, and colours that follow the viewer's light or dark."""

    def variables(column: int) -> str:
        return "".join(f"--{name}:{pair[column]};" for name, pair in COLOURS.items())

    style = (
        f"<style>svg{{{variables(0)}}}"
        f"@media (prefers-color-scheme: dark){{svg{{{variables(1)}}}}}</style>"
        '<rect width="100%" height="100%" rx="6" style="fill: var(--paper, #ffffff)"/>'
    )
    head, rest = text.split(">", 1)
    return f'{head} role="img"><title>{escape(label)}</title>{style}{rest}\n'
