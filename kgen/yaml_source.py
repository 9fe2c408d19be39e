"""Reads a spec file into plain Python values and remembers the line of every key.

ruamel.yaml in round-trip mode follows YAML 1.2: `1e-5` is a number, `no` is text, and a repeated
key is an error. What it cannot know is refused here: aliases, several documents, huge files.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    CollectionEndEvent,
    CollectionStartEvent,
    DocumentStartEvent,
    Event,
    MappingStartEvent,
    NodeEvent,
    ScalarEvent,
)
from ruamel.yaml.reader import ReaderError

from kgen.errors import Issue, SpecError, UsageError

MAX_BYTES = 256 * 1024  # a spec is a page long; anything near this is not a spec

MAX_DEPTH = 16  # nested mappings and lists; a spec has 4
MAX_SCALAR = 1000  # characters of one key or value

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True)
class YamlSource:
    """A parsed spec file: `values` as plain dicts, lists and scalars, `lines` by key path."""

    name: str
    values: Any
    lines: dict[KeyPath, int] = field(default_factory=dict)

    def line_of(self, path: KeyPath) -> int | None:
        """The 1-based line of `path`, or of its nearest enclosing key, or None."""
        for end in range(len(path), -1, -1):
            if path[:end] in self.lines:
                return self.lines[path[:end]]
        return None


def read_yaml(path: FilePath) -> YamlSource:
    """Read a spec file.

    Raises: UsageError if it cannot be read, SpecError if it is not one YAML mapping.
    """
    name = str(path)
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise UsageError(f"{name}: no such file") from None
    except IsADirectoryError:
        raise UsageError(f"{name}: is a folder, expected a spec file") from None
    except OSError as error:
        raise UsageError(f"{name}: cannot be read: {error.strerror}") from None
    return parse_yaml(raw, name)


def parse_yaml(raw: bytes, name: str) -> YamlSource:
    """Parse the bytes of a spec file; `name` is what messages call it. Raises: SpecError."""

    def refuse(message: str, line: int | None = None, hint: str = "") -> SpecError:
        return SpecError(name, [Issue("", message, hint, line)])

    if len(raw) > MAX_BYTES:
        raise refuse(f"is longer than the {MAX_BYTES} bytes that a spec may have at most")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise refuse("is not UTF-8 text", line, "save the file as UTF-8") from None
    loader = YAML(typ="rt")
    place, plain, started = _Place(), [], 0
    try:
        for event in loader.parse(io.StringIO(text)):
            started += isinstance(event, DocumentStartEvent)
            problem = place.enter(event) or _forbidden(event)
            if started > 1:
                problem = "a second YAML document is"
            if problem:
                raise refuse(f"{problem} not allowed in a spec", event.start_mark.line + 1)
            if isinstance(event, ScalarEvent) and event.style is None:
                plain.append((event.value, event.start_mark.line + 1))
        documents = list(loader.load_all(io.StringIO(text)))
    except MarkedYAMLError as error:
        raise refuse(*_syntax_error(error, text.split("\n"))) from None
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise refuse(f"not valid YAML: {error.reason}", line) from None
    except ValueError:  # looks like a date, and is none
        value, line = next(one for one in plain if not _is_value(one[0]))
        raise refuse(f"{value!r} is no value that YAML knows", line, "quote it") from None
    except (YAMLError, RecursionError) as error:
        first = (str(error).splitlines() or ["cannot be parsed"])[0]
        raise refuse(f"not valid YAML: {first}") from None
    if not documents or documents == [None]:
        raise refuse("is empty", hint="`kgen new NAME` writes a spec to start from")
    if not isinstance(documents[0], CommentedMap):
        hint = "a spec is a mapping: `key: value`, with a space after the colon"
        raise refuse("is not a mapping of keys to values", 1, hint)
    lines: dict[KeyPath, int] = {(): 1}
    return YamlSource(name, _plain(documents[0], (), lines), lines)


class _Place:
    """Where the parser is: for each open collection whether a key comes next, None in a list."""

    def __init__(self) -> None:
        self._open: list[bool | None] = []

    def enter(self, event: Event) -> str:
        """Follow one event; why it may not stand there, or empty."""
        if isinstance(event, CollectionEndEvent):
            self._open.pop()
        elif isinstance(event, NodeEvent):
            is_key = bool(self._open) and self._open[-1] is True
            if is_key and isinstance(event, CollectionStartEvent):
                return "a list or a mapping as a key is"
            if self._open and self._open[-1] is not None:
                self._open[-1] = not is_key
            if isinstance(event, CollectionStartEvent):
                self._open.append(True if isinstance(event, MappingStartEvent) else None)
            if len(self._open) > MAX_DEPTH:
                return "nesting as deep as this is"
            if isinstance(event, ScalarEvent) and len(event.value) > MAX_SCALAR:
                return f"a value of {len(event.value)} characters is"
        return ""


def _is_value(text: str) -> bool:
    """Whether YAML can make a value of a plain scalar."""
    try:
        YAML(typ="rt").load(text)
    except ValueError:
        return False
    except YAMLError:
        return True
    return True


def _syntax_error(error: MarkedYAMLError, lines: list[str]) -> tuple[str, int | None, str]:
    """Message, 1-based line and hint for text that is not YAML."""
    mark, hint = error.problem_mark or error.context_mark, ""
    problem = " ".join((error.problem or error.context or "cannot be parsed").split())
    if problem == "could not find expected ':'" and error.context_mark:
        mark, hint = error.context_mark, "write `key: value`, with a space after the colon"
        problem += f" in {lines[mark.line].strip()[:60]!r}"
    return f"not valid YAML: {problem}", mark.line + 1 if mark else None, hint


def _forbidden(event: Event) -> str:
    """Why an event of the YAML parser has no place in a spec; empty if it has."""
    if isinstance(event, AliasEvent):
        return "YAML aliases (*name) are"
    if isinstance(event, DocumentStartEvent) and event.version not in (None, (1, 2)):
        return "the %YAML directive (a spec is YAML 1.2) is"
    if getattr(event, "tag", None) is not None:
        return "YAML tags (!name) are"
    if getattr(event, "value", None) == "<<":
        return "YAML merge keys (<<) are"
    return ""


def _plain(node: Any, path: KeyPath, lines: dict[KeyPath, int]) -> Any:
    """Strip ruamel's types from `node` and note the line of every key below `path`."""
    if isinstance(node, CommentedMap):
        result: dict[Any, Any] = {}
        for key, value in node.items():
            below = (*path, str(key))
            lines[below] = node.lc.key(key)[0] + 1
            result[str(key)] = _plain(value, below, lines)
        return result
    if isinstance(node, CommentedSeq):
        items = []
        for index, value in enumerate(node):
            below = (*path, index)
            lines[below] = node.lc.item(index)[0] + 1
            items.append(_plain(value, below, lines))
        return items
    for kind in (bool, int, float, str):
        if isinstance(node, kind):
            return kind(node)
    return None if node is None else str(node)
