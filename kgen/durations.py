"""Lengths of time as people write them."""

from __future__ import annotations

import re

from kgen.errors import UsageError

UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_seconds(text: str) -> float:
    """`60s`, `5m`, `1h` or `60` in seconds. Raises: UsageError that names the rule."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    seconds = float(match[1]) * UNITS[match[2]] if match else 0.0
    if not 0 < seconds < 1e9:
        raise UsageError(
            f"{text!r} is not a length of time: a number above 0, then s, m or h, for instance "
            "60s, 5m, 1h; without a letter it is seconds"
        )
    return seconds
