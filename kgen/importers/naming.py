"""Legal names for specs and for chain parameters, made from the names of a model."""

from __future__ import annotations

import re
from collections.abc import Container

from kgen.constraints import name_problem
from kgen.names import MAX_NAME, MODULE_ATTRIBUTES
from kgen.ops import OPS

_ROOM = 8  # letters kept for a number or a suffix
_ROOM_OF_PATH = 32  # of a spec's name, where both it and the model's name are long


def cleaned(text: str) -> str:
    """`text` in letters, digits and single underscores, beginning with a letter; may be empty."""
    text = re.sub(r"[^A-Za-z0-9]+", "_", text)
    return re.sub(r"^[^A-Za-z]+", "", text)[: MAX_NAME - _ROOM].strip("_")


def snake(text: str) -> str:
    """ToyNet -> toy_net, as file and package names are written."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", text).lower()


def spec_name(prefix: str, path: str, taken: Container[str]) -> str:
    """A spec's name from a model's name and a module path, unlike all in `taken`."""
    tail = cleaned(path)[-_ROOM_OF_PATH:] if cleaned(path) else cleaned(f"b{path}")
    head = cleaned(prefix)[: MAX_NAME - _ROOM - len(tail) - 1].rstrip("_")
    base = cleaned(f"{head}_{tail}") or "block"
    return _first_legal(base, taken, "_block")


def parameter_name(path: str, taken: Container[str]) -> str:
    """A chain parameter's name from its path in the model, unlike all in `taken`.

    It is the last part of the path where that is legal: `stem.bias` becomes `bias`.
    """
    parts = path.split(".")
    last = parts[-1]
    base = last if cleaned(last) == last else cleaned("_".join(parts[-2:]))
    return _first_legal(base or "parameter", taken, "_param", MODULE_ATTRIBUTES | OPS.keys())


def _first_legal(
    base: str, taken: Container[str], suffix: str, reserved: Container[str] = frozenset()
) -> str:
    if base in reserved or name_problem(base):
        base += suffix
    name, number = base, 1
    while name in taken or name in reserved:
        number += 1
        name = f"{base}_{number}"
    return name
