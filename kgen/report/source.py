"""CUDA C++ as highlighted HTML; the colours are in style.css.j2."""

from __future__ import annotations

from markupsafe import Markup
from pygments import highlight  # type: ignore[import-untyped]
from pygments.formatters import HtmlFormatter  # type: ignore[import-untyped]
from pygments.lexers import get_lexer_by_name  # type: ignore[import-untyped]


def highlighted(source: str) -> Markup:
    """Spans with Pygments' short class names, no element around them; text is escaped."""
    lexer = get_lexer_by_name("cuda", stripnl=False)
    # Pygments escapes what it prints, so that the result is markup.
    return Markup(highlight(source, lexer, HtmlFormatter(nowrap=True)))
