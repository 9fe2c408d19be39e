"""Files that are written whole or not at all."""

from __future__ import annotations

from pathlib import Path

from kgen.errors import UsageError


def write_whole(path: Path, content: bytes) -> Path:
    """Write a file whole or not at all; folders on the way are made. Raises: UsageError."""
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(None, "it is a folder")
        try:
            part.write_bytes(content)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None
    return path
