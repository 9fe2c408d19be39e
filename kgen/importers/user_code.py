"""Runs a user's Python file; its failures become one line with the file and the line in it."""

from __future__ import annotations

import ast
import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, ModuleType

from kgen.errors import KgenError, UsageError

_MOST_BYTES = 4 << 20


def read_python(path: Path) -> str:
    """The text of a Python file. Raises: UsageError that names the file and the reason."""
    try:
        if path.is_dir():
            raise UsageError(f"{path}: is a folder; give a Python file")
        raw = path.read_bytes()
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read: {getattr(error, 'strerror', error)}") from None
    if len(raw) > _MOST_BYTES:
        raise UsageError(f"{path}: has {len(raw):,} bytes; a file of Python has at most 4 MiB")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(f"{path}: is not UTF-8 text") from None


def parse_python(path: Path) -> ast.Module:
    """The syntax tree of a Python file; nothing of it runs. Raises: UsageError."""
    text = read_python(path)
    try:
        return ast.parse(text, str(path))
    except SyntaxError as error:
        raise UsageError(f"{path}:{error.lineno or 1}: SyntaxError: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(f"{path}: cannot be parsed: {reason}") from None


@contextlib.contextmanager
def running(path: Path) -> Iterator[None]:
    """Around anything that runs code of the file: what it prints goes to stderr.

    Its folder is where its imports look first, as for a script.
    Raises: UsageError for whatever the code raises, with the last line of the file that ran.
    """
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except KgenError:
        raise
    except (Exception, SystemExit) as error:
        reason = (str(error).strip().splitlines() or [""])[0][:300]
        told = f"{type(error).__name__}: {reason}".rstrip(": ")
        raise UsageError(f"{_where(error, path)}: {told}") from error
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)


def execute(path: Path, code: CodeType, announce: Callable[[], None]) -> ModuleType:
    """A module that ran `code`, registered so that its classes can be found by their module.

    announce: called when all is ready and nothing has run yet.
    """
    announce()
    module = ModuleType(f"kgen_user_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    with running(path):
        exec(code, vars(module))  # the user asked for it
    return module


def _where(error: BaseException, path: Path) -> str:
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename == str(path):
            return f"{path}:{frame.lineno}"
    return str(path)
