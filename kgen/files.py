"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from kgen.errors import UsageError


def write_whole(path: Path, content: bytes) -> Path:
    """Write a file whole or not at all; folders on the way are made. Raises: UsageError.

    Of two that write the same file at once, one's content is there in the end.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(None, "it is a folder")
        try:
            with part.open("xb") as file:
                file.write(content)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None
    return path


def check_writable(path: Path) -> None:
    """Refuse early what `write_whole` would refuse. Raises: UsageError."""
    folder = path.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    problem = ""
    if path.is_dir():
        problem = "it is a folder"
    elif not folder.is_dir():
        problem = f"{folder} is not a folder"
    elif not os.access(folder, os.W_OK):
        problem = f"{folder} is not writable"
    if problem:
        raise UsageError(f"{path}: cannot be written: {problem}")
