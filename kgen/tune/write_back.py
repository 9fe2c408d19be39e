"""Puts a schedule into a spec file and leaves every other byte of the file as it is.

ruamel.yaml says where the keys and values stand; the text is edited there and nowhere else, then
read again and compared. Dumping the whole file would keep its comments too, but not its quotes,
indentation, flow style and line endings.
"""

from __future__ import annotations

import io
import os
import re
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.nodes import CollectionNode, MappingNode, Node

from kgen.errors import KgenError, UsageError
from kgen.spec import Schedule, parse_spec
from kgen.tune.space import Knob
from kgen.yaml_source import parse_yaml

ORDER = tuple(Schedule.model_fields)  # of keys that are new in the file
BOM = "\ufeff"


def write_schedule(path: Path, schedule: Mapping[str, Knob], read: bytes) -> None:
    """Replace the schedule of the spec file that `read` was read from, whole or not at all.

    Raises: UsageError if the file changed since, cannot be written, or has a schedule that cannot
    be replaced without losing a comment.
    """
    target = path.resolve()  # a link stays a link
    new = edit(read, schedule, str(path))
    try:
        mode = target.stat().st_mode & 0o777
        handle, staging = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(new)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(staging, mode)
            if target.read_bytes() != read:
                raise UsageError(
                    f"{path}: changed while it was tuned; its schedule was not written"
                )
            os.replace(staging, target)
        except BaseException:
            os.unlink(staging)
            raise
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None


def edit(read: bytes, schedule: Mapping[str, Knob], name: str) -> bytes:
    """The file's bytes with another schedule. Raises: UsageError if a comment would be lost."""
    whole = read.decode("utf-8")
    bom = BOM if whole.startswith(BOM) else ""
    text = whole.removeprefix(BOM)
    end = "\r\n" if "\r\n" in text else "\n"
    root = YAML(typ="rt").compose(io.StringIO(text))
    assert isinstance(root, MappingNode), "the file was a spec when it was read"
    pairs = {key.value: (key, value) for key, value in root.value}
    wanted = {key: schedule[key] for key in ORDER if key in schedule}
    if "schedule" not in pairs:
        new = _inserted(text, pairs, wanted, end, flow=bool(root.flow_style))
    else:
        _, node = pairs["schedule"]
        if isinstance(node, MappingNode) and not node.flow_style:
            new = _edited_block(text, node, wanted, end)
        else:
            new = text[: node.start_mark.index] + _flow(wanted) + text[node.end_mark.index :]
    problem = _difference(text, new, wanted, name)
    if problem:
        raise UsageError(f"{name}: {problem}; write it by hand: schedule: {_flow(wanted)}")
    return (bom + new).encode()


def _flow(schedule: Mapping[str, Knob]) -> str:
    return "{" + ", ".join(f"{key}: {value}" for key, value in schedule.items()) + "}"


def _inserted(
    text: str, pairs: Mapping[str, tuple[Node, Node]], wanted: Mapping[str, Knob], end: str,
    flow: bool,
) -> str:  # fmt: skip
    """The text with a schedule before the targets, else as the last key."""
    if flow:
        at = pairs["chain"][0].start_mark.index
        return f"{text[:at]}schedule: {_flow(wanted)}, {text[at:]}"
    lines = [f"schedule:{end}", *(f"  {key}: {value}{end}" for key, value in wanted.items())]
    column = pairs["chain"][0].start_mark.column  # of all keys; rarely other than 0
    block = "".join(" " * column + line for line in lines)
    if "targets" in pairs:
        mark = pairs["targets"][0].start_mark
        at = mark.index - mark.column
        return text[:at] + block + text[at:]
    last = max((value for _, value in pairs.values()), key=lambda node: node.end_mark.index)
    # An end mark may lie behind blank lines and comments, which stay at the end of the file.
    kept = _content_end(text, last)
    head, tail = text[:kept], text[kept:]
    return head + ("" if head.endswith("\n") else end) + block + tail


def _content_end(text: str, node: Node) -> int:
    """The index behind the last line that holds something of a node, its comment included."""
    while isinstance(node, CollectionNode) and node.value and not node.flow_style:
        last = node.value[-1]
        node = last[1] if isinstance(last, tuple) else last
    at = text.find("\n", max(node.start_mark.index, node.end_mark.index - 1))
    return len(text) if at < 0 else at + 1


def _edited_block(text: str, node: MappingNode, wanted: Mapping[str, Knob], end: str) -> str:
    """Values replaced where they stand, lines of other knobs taken out, new ones added last.

    A comment behind a knob that goes stays, on a line of its own.
    """
    edits: list[tuple[int, int, str]] = []  # start, end, new text
    column = node.value[0][0].start_mark.column
    present = {key.value for key, _ in node.value}
    added = "".join(
        f"{' ' * column}{key}: {value}{end}" for key, value in wanted.items() if key not in present
    )
    last_end = 0
    for key, value in node.value:
        line_start = key.start_mark.index - key.start_mark.column
        line_end = text.find("\n", value.end_mark.index)
        line_end = len(text) if line_end < 0 else line_end + 1
        last_end = max(last_end, line_end)
        if key.value in wanted:
            new = str(wanted[key.value])
            if value.value != new:
                edits.append((value.start_mark.index, value.end_mark.index, new))
            continue
        behind = text[value.end_mark.index : line_end].strip()
        kept = f"{' ' * column}{behind}{end}" if behind else ""
        edits.append((line_start, line_end, kept))
    if added:
        missing = "" if text[:last_end].endswith("\n") else end
        edits.append((last_end, last_end, missing + added))
    for start, stop, new in sorted(edits, key=lambda one: (one[0], one[1]), reverse=True):
        text = text[:start] + new + text[stop:]
    return text


def _difference(old: str, new: str, wanted: Mapping[str, Knob], name: str) -> str:
    """What the edit broke; empty if only the schedule's values changed and no comment is gone."""
    try:
        before: dict[str, Any] = parse_yaml(old.encode(), name).values
        source = parse_yaml(new.encode(), name)
        parse_spec(source)
    except KgenError:
        return "its schedule cannot be replaced where it stands"
    after: dict[str, Any] = source.values
    if {**before, "schedule": None} != {**after, "schedule": None}:
        return "its schedule cannot be replaced where it stands"
    if after.get("schedule") != dict(wanted):
        return "its schedule cannot be replaced where it stands"
    if _comments(old) - _comments(new):
        return "a comment inside its schedule would be lost"
    return ""


def _comments(text: str) -> Counter[str]:
    """What follows a `#` at a line's start or behind a space: every comment, and a little more."""
    found = re.findall(r"(?:^|(?<=\s))#[^\r\n]*", text, re.MULTILINE)
    return Counter(one.rstrip() for one in found)
