"""The cache as a whole: compiled kernels, packages that `kgen.load` emitted, and removing them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kgen.compiler import Build, CacheError, read_entry


@dataclass(frozen=True)
class CacheEntry:
    """One entry of the cache, for `kgen cache ls` and `gc`.

    kind: `cubin`, `package`, or `leftover` of a process that was killed while it wrote.
    used: seconds since the epoch.
    """

    kind: str
    path: Path
    key: str
    arch: str
    nvrtc: str
    kernels: tuple[str, ...]
    size: int
    used: float
    intact: bool


def cache_entries(root: Path) -> Iterator[CacheEntry]:
    """Every entry below a cache folder, damaged ones included, by kind and key."""
    for path in sorted([*root.glob("cubin/*/*"), *root.glob("package/*")]):
        try:
            files = [file for file in path.rglob("*") if file.is_file()]
            size = sum(file.stat().st_size for file in files)
            used = max(file.stat().st_mtime for file in [path, *files])
        except OSError:  # another process is replacing it
            continue
        if path.parent.name == "package":
            yield CacheEntry("package", path, path.name, "-", "-", (), size, used, intact=True)
            continue
        build = _read_entry_quietly(path)
        yield CacheEntry(
            kind="leftover" if path.name.startswith(".new-") else "cubin",
            path=path,
            key=path.name,
            arch=build.arch if build else "?",
            nvrtc=build.nvrtc if build else "?",
            kernels=tuple(one.kernel for one in build.resources) if build else (),
            size=size,
            used=used,
            intact=build is not None,
        )


def is_stale(entry: CacheEntry, days: float, now: float) -> bool:
    """Whether `gc` removes an entry: unused for `days`, damaged, or left over for an hour."""
    if entry.kind == "leftover":  # a process may still be writing a young one
        return entry.used < now - 3600
    return entry.used < now - 86400 * days or not entry.intact


def remove_entry(path: Path) -> None:
    """Remove one entry: renamed away first, so that no reader sees half of it."""
    try:
        away = Path(tempfile.mkdtemp(prefix=".new-", dir=path.parent))
        os.replace(path, away / "old")
        shutil.rmtree(away)
    except OSError as error:
        raise CacheError(f"{path}: cannot be removed: {error.strerror}") from None


def _read_entry_quietly(entry: Path) -> Build | None:
    """Like `read_entry`, without counting as a use."""
    try:
        status = (entry / "entry.json").stat()
    except OSError:
        return None
    build = read_entry(entry)
    try:
        os.utime(entry / "entry.json", (status.st_atime, status.st_mtime))
    except OSError:
        return build
    return build
