"""Models named on the command line, `model.py:ClassName`, built with the user's arguments."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from kgen.errors import UsageError
from kgen.importers.user_code import execute, parse_python, running

if TYPE_CHECKING:
    from torch import nn


def split_source(text: str) -> tuple[Path, str]:
    """`model.py:Net` as the file and the name in it. Raises: UsageError."""
    file, colon, name = text.rpartition(":")
    if not colon or not file or not name.isidentifier():
        raise UsageError(f"{text!r}: expected FILE.py:NAME, for instance model.py:Net")
    return Path(file), name


def parse_shape(text: str) -> tuple[int, ...]:
    """`128,8,256,256` as a shape. Raises: UsageError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise UsageError(f"--input {text!r}: expected sizes, for instance 128,8,256,256")
    return tuple(int(part) for part in parts)


def parse_init(text: str | None) -> tuple[list[Any], dict[str, Any]]:
    """`--init` as positional and keyword arguments: a JSON list or object. Raises: UsageError."""
    if text is None:
        return [], {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UsageError(f"--init {text!r}: is not JSON: {error}") from None
    if isinstance(value, list):
        return value, {}
    if isinstance(value, dict):
        return [], value
    raise UsageError(f"--init {text!r}: expected a JSON list, or an object for keyword arguments")


def load_model(
    path: Path,
    name: str,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] = MappingProxyType({}),
    announce: Callable[[], None] = lambda: None,
) -> nn.Module:
    """Run the file and build the model called `name` there: a class, a function or a module.

    announce: called before anything of the file runs.
    Raises: UsageError for whatever goes wrong in it.
    """
    from torch import nn

    tree = parse_python(path)
    module = execute(path, compile(tree, str(path), "exec"), announce)
    if not hasattr(module, name):
        classes = [
            key
            for key, value in vars(module).items()
            if isinstance(value, type)
            and issubclass(value, nn.Module)
            and value.__module__ == module.__name__
        ]
        listed = ", ".join(classes[:8]) or "none"
        raise UsageError(f"{path}: has no {name}; modules defined there: {listed}")
    found = getattr(module, name)
    if isinstance(found, nn.Module):
        if args or kwargs:
            raise UsageError(f"{path}: {name} is a module already; --init has no meaning")
        return found
    if not callable(found):
        raise UsageError(f"{path}: {name} is {type(found).__name__}, not a class of nn.Module")
    with running(path):
        model = found(*args, **kwargs)
    if not isinstance(model, nn.Module):
        raise UsageError(f"{path}: {name}(...) gives {type(model).__name__}, not an nn.Module")
    return model
