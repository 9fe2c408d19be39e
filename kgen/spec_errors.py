"""Turns pydantic's findings about a spec into kgen's issues, in kgen's words."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from kgen.yaml_source import KeyPath

_STAND_INS: dict[KeyPath, Any] = {
    ("version",): 1,
    ("name",): "stand_in",
    ("chain",): [{"group_norm": {"num_groups": 1}}],
    ("problem", "batch"): 1,
    ("problem", "in_channels"): 1,
    ("problem", "out_channels"): 1,
    ("problem", "height"): 1,
    ("problem", "width"): 1,
    ("problem", "kernel_size"): 1,
}


def with_stand_ins(values: Any, invalid: list[KeyPath]) -> Any:
    """A copy of `values` with the invalid keys dropped, or replaced where they are required."""
    copy = deepcopy(values)
    for path in invalid:
        keep = path[:2] if path[:1] in (("problem",), ("schedule",)) else path[:1]
        if keep in ((), ("problem",)):
            return None
        parent: Any = copy
        for key in keep[:-1]:
            parent = parent.get(key) if isinstance(parent, dict) else None
        if isinstance(parent, dict):
            parent.pop(str(keep[-1]), None)
            if keep in _STAND_INS:
                parent[str(keep[-1])] = _STAND_INS[keep]
    return copy


def key_path(loc: tuple[int | str, ...]) -> KeyPath:
    """pydantic's location as the path of the key in the file."""
    if len(loc) > 2 and loc[0] == "chain":
        return (*loc[:2], "group_norm", *loc[2:])  # the only op that holds keys of its own
    return loc


def split(path: str) -> KeyPath:
    """`chain[2].group_norm` as ("chain", 2, "group_norm")."""
    parts = path.replace("[", ".").replace("]", "").split(".") if path else []
    return tuple(int(part) if part.isdigit() else part for part in parts)


def dotted(path: KeyPath) -> str:
    """The inverse of `split`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
            continue
        name = part if part.isidentifier() else quote(part)
        text += f".{name}" if text else name
    return text


def quote(value: object) -> str:
    """`value` as it stands in a message, cut to a line's length."""
    try:
        text = repr(value)
    except ValueError:  # Python does not print integers this long
        return "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:57]}..."


_RENAMED = {
    "groups": "use conv_groups for a grouped convolution, num_groups (in group_norm) for the norm",
    "bias": "use conv_bias for the convolution's own bias, `- add: bias` in chain for another",
    "bias_shape": "chain parameters always have the shape [out_channels, 1, 1]",
}


def explain(item: Any, path: KeyPath, siblings: Sequence[str]) -> tuple[str, str]:
    """pydantic's error as (message, hint); `siblings` are the keys legal beside this one."""
    kind, given, context = item["type"], item["input"], item.get("ctx", {})
    if kind == "extra_forbidden":
        key = str(path[-1])
        if key in _RENAMED:
            return f"unknown key {key}", _RENAMED[key]
        if not key.isidentifier():
            return f"unknown key {quote(key)}", f"known keys: {', '.join(siblings)}"
        near = difflib.get_close_matches(key, siblings, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(siblings)}"
        return f"unknown key {key}", hint
    if kind == "missing":
        return "is missing", f"add `{path[-1]}:`"
    wanted = {
        "int_type": "an integer",
        "int_parsing_size": "an integer of at most 2147483647",
        "float_type": "a number",
        "bool_type": "true or false",
        "string_type": "text",
        "tuple_type": "a list",
        "model_type": "a mapping of keys to values",
        "dict_type": "a mapping of keys to values",
    }
    if kind in wanted:
        hint = "quote it to make it text" if kind == "string_type" else ""
        return f"expected {wanted[kind]}, got {quote(given)} ({_yaml_type(given)})", hint
    if kind == "greater_than_equal":
        return f"{quote(given)} is too small: the least legal value is {context['ge']}", ""
    if kind == "greater_than":
        return f"{quote(given)} must be greater than {context['gt']:g}", ""
    if kind == "less_than_equal":
        return f"{quote(given)} is too large: the greatest legal value is {context['le']}", ""
    if kind == "finite_number":
        return f"{quote(given)} is not a finite number", ""
    if kind == "too_short":
        return "must not be empty", ""
    return str(item["msg"]), str(context.get("hint", ""))


def _yaml_type(value: object) -> str:
    names = {bool: "a boolean", int: "an integer", float: "a float", str: "text", list: "a list"}
    return "empty" if value is None else names.get(type(value), "a mapping")
