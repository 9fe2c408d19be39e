"""Renders the page and writes files whole or not at all."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache

import jinja2
from markupsafe import Markup

from kgen.bench.record import Record
from kgen.report.pictures import COLOURS
from kgen.report.text import printable
from kgen.report.view import views
from kgen.verdict import ATOL
from kgen.version import __version__

# Switches between light and dark; without it the page follows the system. The button is hidden
# until the script runs, so that none is shown that does nothing.
SCRIPT = """
const button = document.getElementById("theme"), root = document.documentElement;
const dark = matchMedia("(prefers-color-scheme: dark)");
button.hidden = false;
button.addEventListener("click", () => {
  const now = root.dataset.theme || (dark.matches ? "dark" : "light");
  root.dataset.theme = now === "dark" ? "light" : "dark";
});
"""


def _finalize(value: object) -> object:
    """What an expression may print: markup as it is, text without control characters."""
    if value is None:
        raise jinja2.TemplateRuntimeError("a template printed None")
    return value if isinstance(value, Markup) else printable(str(value))


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("kgen.report", ""),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=True,
        finalize=_finalize,
    )


def page(records: Sequence[Record]) -> str:
    """The page as one HTML text without any reference to the outside."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    # The browser itself then refuses whatever a record might smuggle in.
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            views=views(records),
            version=__version__,
            tolerance=f"{ATOL:g}",
            colours=COLOURS,
            policy=policy,
            script=Markup(SCRIPT),
        )
    )
