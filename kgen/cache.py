"""The cache of compiled kernels as a whole: what it holds, and removing entries from it."""

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
    """One entry of the cache, for `kgen cache ls` and `gc`. used: seconds since the epoch."""

    path: Path
    key: str
    arch: str
    nvrtc: str
    kernels: tuple[str, ...]
    size: int
    used: float
    intact: bool


def cache_entries(root: Path) -> Iterator[CacheEntry]:
    """Every entry below a cache folder, damaged ones included, sorted by key."""
    for path in sorted(root.glob("cubin/*/*")):
        if path.name.startswith(".new-") or not path.is_dir():
            continue
        try:
            size = sum(file.stat().st_size for file in path.iterdir())
            used = max(file.stat().st_mtime for file in [path, *path.iterdir()])
        except OSError:  # another process is replacing it
            continue
        build = _read_entry_quietly(path)
        yield CacheEntry(
            path=path,
            key=path.name,
            arch=build.arch if build else "?",
            nvrtc=build.nvrtc if build else "?",
            kernels=tuple(one.kernel for one in build.resources) if build else (),
            size=size,
            used=used,
            intact=build is not None,
        )


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
