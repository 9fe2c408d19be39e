"""Exports on disk: whole or not at all, and never over what differs unless that is asked for."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from kgen.errors import UsageError
from kgen.files import write_whole

BUILD_RECORD = "build.json"


def stale_file(path: Path, content: bytes) -> bool:
    """Whether a file is missing or holds something else. Raises: UsageError if it is no file."""
    if path.is_dir():
        raise UsageError(f"{path}: is a folder, expected a file")
    return _content(path) != content


def stale_files(folder: Path, files: Mapping[str, bytes]) -> list[str]:
    """Files by their paths in the folder that are missing, differ, or are cubins too many.

    Raises: UsageError if it is no folder.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder}: is a file, expected a folder")
    different = [name for name, content in files.items() if not _same(folder / name, content)]
    return different + _surplus_cubins(folder, files)


def write_file(path: Path, content: bytes, *, force: bool) -> bool:
    """Write one file; returns whether it changed.

    Raises: UsageError if it cannot be written, or if it is there, differs, and not `force`.
    """
    if not stale_file(path, content):
        return False
    if path.exists() and not force:
        raise UsageError(f"{path}: exists and differs; --force replaces it")
    write_whole(path, content)
    return True


def write_folder(folder: Path, files: Mapping[str, bytes], *, force: bool) -> bool:
    """Write a folder of files by their paths in it; returns whether anything changed.

    A new folder appears as a whole. In one that is there, files are replaced one by one, each
    whole; cubins that are not among `files` go, and whatever else lies there stays.
    Raises: UsageError if it cannot be written, or if a file differs and not `force`.
    """
    stale = stale_files(folder, files)
    if not folder.exists():
        _write_new(folder, files)
        return True
    if not stale:
        return False
    blocking = [name for name in stale if (folder / name).exists()]
    foreign = any(folder.iterdir()) and not (folder / "pyproject.toml").exists()
    if not force and (blocking or foreign):
        reason = f"{blocking[0]} differs" if blocking else "is not an exported package"
        raise UsageError(f"{folder}: {reason}; --force replaces what is exported")
    for name in stale:
        if name in files:
            write_whole(folder / name, files[name])
        else:
            (folder / name).unlink(missing_ok=True)
    return True


def _write_new(folder: Path, files: Mapping[str, bytes]) -> None:
    staging: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        inner = staging / "new"  # a folder with the usual permissions, unlike mkdtemp's
        for name, content in files.items():
            (inner / name).parent.mkdir(parents=True, exist_ok=True)
            (inner / name).write_bytes(content)
        os.replace(inner, folder)
    except OSError as error:
        where = error.filename or folder
        raise UsageError(f"{where}: cannot be written: {error.strerror}") from None
    finally:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)


def _surplus_cubins(folder: Path, files: Mapping[str, bytes]) -> list[str]:
    """Cubins of an earlier export, which the wheel would be built with too."""
    packages = {name.partition("/")[0] for name in files if "/" in name}
    found = (path for one in packages for path in (folder / one).glob("*.cubin"))
    return sorted({path.relative_to(folder).as_posix() for path in found} - set(files))


def _same(path: Path, content: bytes) -> bool:
    found = _content(path)
    if path.name == BUILD_RECORD and found is not None:
        return _digests(found) == _digests(content)
    return found == content


def _digests(record: bytes) -> object:
    """What a build.json says of cubins and source; how long the compiler took does not count."""
    try:
        values = json.loads(record)
        builds = {arch: one["sha256"] for arch, one in values["builds"].items()}
        return values["source_sha256"], builds
    except (ValueError, KeyError, TypeError, AttributeError):
        return record


def _content(path: Path) -> bytes | None:
    """A file's content, None where there is none. Raises: UsageError."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
