"""CUDA C++ -> cubin with NVRTC, behind a content-addressed cache. No GPU, driver or toolkit.

This file is also copied, byte for byte, into every emitted package as `_compiler.py`: it imports
nothing of kgen. It needs cuda-bindings, the NVRTC wheel, and filelock (which torch brings).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FLAGS = ("--std=c++17", "--ptxas-options=-v", "--generate-line-info")
CACHE_VARIABLE = "KGEN_CACHE_DIR"
_CACHE_FORMAT = 2  # part of every key; raise it when entries hold something else than before
_LOCK_SECONDS = 600.0


class CompileError(RuntimeError):
    """The source did not compile, or there is no compiler. The message says which and why."""


class CacheError(RuntimeError):
    """The cache folder cannot be used. The message names it and the setting to change."""


@dataclass(frozen=True)
class Resources:
    """What ptxas reports for one kernel. Sizes in bytes; smem is the static part only."""

    kernel: str
    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    smem: int


@dataclass(frozen=True)
class Build:
    """One compiled source. `seconds` is the time NVRTC took, also when the entry was cached."""

    arch: str
    nvrtc: str
    cubin: bytes
    ptx: str
    resources: tuple[Resources, ...]
    seconds: float
    cached: bool


def compile_source(source: str, arch: str, *, version: str = "", use_cache: bool = True) -> Build:
    """Compile CUDA C++ for one architecture, or take it from the cache.

    source: a self-contained file. arch: for instance `sm_90a`. version: of kgen, part of the key.
    The key holds everything that decides the result and nothing else: no path, no time stamp.
    Processes that want the same entry at once compile it once; a lock dies with its owner.
    Raises: CompileError, CacheError.
    """
    nvrtc = nvrtc_version()
    if not use_cache:
        return _nvrtc_compile(source, arch, nvrtc)
    key = cache_key(source, arch, compiler_identity(), version)
    below = Path("cubin", key[:2], key)
    preferred = _preferred_cache()
    found = read_entry(preferred / below) if preferred is not None else None
    if found is not None:  # also from a cache that is read-only
        return found
    root = cache_dir()
    entry = root / below
    with locked(root / "locks" / f"{key}.lock"):
        found = read_entry(entry)  # another process may have finished it meanwhile
        if found is None:
            found = _nvrtc_compile(source, arch, nvrtc)
            _install(entry, found, source)
    return found


def cache_key(source: str, arch: str, nvrtc: str, version: str) -> str:
    """64 hex digits: the SHA-256 of everything that decides the compiled result."""
    parts = [_CACHE_FORMAT, source, list(FLAGS), arch, nvrtc, version]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


# ---- NVRTC -----------------------------------------------------------------------------------


def _bindings() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise CompileError(
            f"no CUDA compiler: {error}; install cuda-bindings and nvidia-cuda-nvrtc "
            "(pip install 'kgen[cuda]')"
        ) from None
    return nvrtc


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call an NVRTC function and return its value. Raises: CompileError on a failure code."""
    try:
        result, *values = function(*arguments)
    except RuntimeError as error:  # the library itself was not found
        reason = str(error).splitlines()[0]
        raise CompileError(
            f"NVRTC cannot be loaded: {reason}; install nvidia-cuda-nvrtc (pip install "
            "'kgen[cuda]')"
        ) from None
    if int(result) != 0:
        raise CompileError(f"{function.__name__} failed: {result.name}")
    return values[0] if values else None


def nvrtc_version() -> str:
    """`major.minor` of the NVRTC in use. Raises: CompileError if there is none."""
    nvrtc = _bindings()
    try:
        result, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CompileError(f"NVRTC cannot be loaded: {reason}; pip install 'kgen[cuda]'") from None
    if int(result) != 0:
        raise CompileError(f"nvrtcVersion failed: {result.name}")
    return f"{major}.{minor}"


def compiler_identity() -> str:
    """NVRTC's version and, where it came as a wheel, the wheel's full one. Raises: CompileError."""
    from importlib.metadata import PackageNotFoundError, version

    wheels = []
    for name in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):
        with suppress(PackageNotFoundError):
            wheels.append(f"{name} {version(name)}")
    return " ".join([nvrtc_version(), *wheels])


def supported_archs() -> tuple[int, ...]:
    """Compute capabilities, as 10 * major + minor, that the NVRTC in use compiles for."""
    return tuple(_call(_bindings().nvrtcGetSupportedArchs))


def _options(arch: str, version: str) -> tuple[str, ...]:
    """NVRTC's options. From 12.9 on it has a cache of its own in the driver's: what comes from
    there comes without a log, so that registers and spills would be unknown."""
    has_cache = tuple(map(int, version.split("."))) >= (12, 9)
    return (f"--gpu-architecture={arch}", *FLAGS, *(["--no-cache"] if has_cache else []))


def _nvrtc_compile(source: str, arch: str, version: str) -> Build:
    nvrtc = _bindings()
    number = re.fullmatch(r"sm_(\d+)[af]?", arch)
    supported = supported_archs()
    if number is None or int(number[1]) not in supported:
        listed = ", ".join(f"sm_{one}" for one in supported)
        raise CompileError(f"NVRTC {version} cannot compile for {arch}; it supports {listed}")
    program = _call(nvrtc.nvrtcCreateProgram, source.encode(), b"kernel.cu", 0, [], [])
    try:
        options = [option.encode() for option in _options(arch, version)]
        start = time.perf_counter()
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        seconds = time.perf_counter() - start
        log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        if int(result) != 0:
            raise CompileError(f"{arch}, NVRTC {version}: {_first_error(log, source)}")
        cubin = _read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
        ptx = _text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return Build(arch, version, cubin, ptx, parse_resources(log), seconds, cached=False)


def _read(size: Callable[..., Any], read: Callable[..., Any], program: Any) -> bytes:
    count = _call(size, program)
    if count < 2:  # nothing but a terminator; Python shares bytes objects this short
        return b""
    buffer = bytes(count)  # filled in place: what every version of cuda-bindings accepts
    _call(read, program, buffer)
    return buffer


def _text(size: Callable[..., Any], read: Callable[..., Any], program: Any) -> str:
    return _read(size, read, program).rstrip(b"\0").decode("utf-8", errors="replace")


def _first_error(log: str, source: str) -> str:
    """The first error of a compiler log, with the source lines around it."""
    for line in log.splitlines():
        match = re.match(r"kernel\.cu\((\d+)\): (?:fatal )?error:? (.*)", line)
        if match:
            number, lines = int(match[1]), source.splitlines()
            around = range(max(1, number - 2), min(len(lines), number + 2) + 1)
            shown = "\n".join(
                f"  {'>' if one == number else ' '}{one:5d} | {lines[one - 1]}" for one in around
            )
            return f"kernel.cu:{number}: {match[2]}\n{shown}"
    others = [line.strip() for line in log.splitlines() if re.search(r"\b(error|fatal)\b", line)]
    return "\n".join((others or log.strip().splitlines())[:10]) or "no message from the compiler"


def parse_resources(log: str) -> tuple[Resources, ...]:
    """Registers, spills and shared memory of each kernel from a `ptxas -v` log, sorted by name."""

    def number(pattern: str, text: str) -> int:
        match = re.search(pattern, text)
        return int(match[1]) if match else 0

    parts = re.split(r"Compiling entry function '([^']+)' for '[^']+'", log)
    return tuple(
        Resources(
            kernel=name,
            registers=number(r"Used (\d+) registers", body),
            spill_stores=number(r"(\d+) bytes spill stores", body),
            spill_loads=number(r"(\d+) bytes spill loads", body),
            stack=number(r"(\d+) bytes stack frame", body),
            smem=number(r"(\d+) bytes smem", body),
        )
        for name, body in sorted(zip(parts[1::2], parts[2::2], strict=True))
    )


# ---- Cache -----------------------------------------------------------------------------------


def cache_dir() -> Path:
    """The cache folder, created if need be.

    KGEN_CACHE_DIR if set, else `kgen` in XDG_CACHE_HOME or ~/.cache; where that is read-only, a
    private folder below the system's temporary one. Raises: CacheError.
    """
    preferred = _preferred_cache()
    problem = _unusable(preferred) if preferred is not None else "no home folder"
    if preferred is not None and not problem:
        return preferred
    if os.environ.get(CACHE_VARIABLE):
        raise CacheError(f"{preferred}: {problem}; set {CACHE_VARIABLE} to a writable folder")
    user = os.getuid() if hasattr(os, "getuid") else "user"
    path = Path(tempfile.gettempdir()) / f"kgen-{user}"
    problem = _unusable(path) or _shared(path)
    if problem:
        raise CacheError(f"{path}: {problem}; set {CACHE_VARIABLE} to a writable folder")
    return path


def _preferred_cache() -> Path | None:
    """Where the cache should be, writable or not; None without a home. Raises: CacheError."""
    chosen = os.environ.get(CACHE_VARIABLE)
    try:
        if chosen:
            return Path(chosen).expanduser().absolute()
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        if chosen:
            raise CacheError(
                f"{CACHE_VARIABLE}={chosen}: names a user who does not exist"
            ) from None
        return None
    return base / "kgen" if base.is_absolute() else None


def _unusable(path: Path) -> str:
    """Why nothing can be written below `path`; empty if it can."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _shared(path: Path) -> str:
    """Why a folder in a place that everybody can write to must not be trusted; empty if it may."""
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        return "is not a folder"
    if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o022):
        return "belongs to another user or is writable by others"
    return ""


class locked:  # noqa: N801 - used like a function
    """An OS lock on `path`: released when its owner dies, however it dies."""

    def __init__(self, path: Path) -> None:
        from filelock import FileLock

        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CacheError(f"{path.parent}: {error.strerror}; set {CACHE_VARIABLE}") from None
        self._path = path
        self._lock = FileLock(path)

    def __enter__(self) -> None:
        from filelock import Timeout

        try:
            self._lock.acquire(timeout=_LOCK_SECONDS, poll_interval=0.02)
        except Timeout:
            raise CacheError(
                f"{self._path}: another process has held the lock for {_LOCK_SECONDS:.0f} s"
            ) from None
        except OSError as error:
            raise CacheError(f"{self._path}: {error.strerror}; set {CACHE_VARIABLE}") from None

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def read_entry(entry: Path) -> Build | None:
    """A complete, undamaged entry, or None. Touches it, so that `gc` knows it was used."""
    try:
        record = json.loads((entry / "entry.json").read_text("utf-8"))
        cubin = (entry / "kernel.cubin").read_bytes()
        ptx = (entry / "kernel.ptx").read_bytes()
        if record["sha256"] != _digests(cubin, ptx):
            return None
        build = Build(
            arch=record["arch"],
            nvrtc=record["nvrtc"],
            cubin=cubin,
            ptx=ptx.decode(),
            resources=tuple(Resources(**one) for one in record["resources"]),
            seconds=record["seconds"],
            cached=True,
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    try:
        os.utime(entry / "entry.json")
    except OSError:  # a read-only cache still serves
        return build
    return build


def _install(entry: Path, build: Build, source: str) -> None:
    """Put an entry in place by renaming a complete folder; replaces a damaged one."""
    ptx = build.ptx.encode()
    record = {
        "arch": build.arch,
        "nvrtc": build.nvrtc,
        "seconds": build.seconds,
        "resources": [asdict(one) for one in build.resources],
        "sha256": _digests(build.cubin, ptx),
    }
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=".new-", dir=entry.parent))
        try:
            (staging / "kernel.cu").write_text(source, "utf-8")
            (staging / "kernel.cubin").write_bytes(build.cubin)
            (staging / "kernel.ptx").write_bytes(ptx)
            (staging / "entry.json").write_text(json.dumps(record, indent=1), "utf-8")
            if entry.exists():
                os.replace(entry, staging / "damaged")
            os.replace(staging, entry)
            shutil.rmtree(entry / "damaged", ignore_errors=True)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        raise CacheError(
            f"{error.filename or entry}: {error.strerror}; set {CACHE_VARIABLE}"
        ) from None


def _digests(cubin: bytes, ptx: bytes) -> dict[str, str]:
    return {"cubin": hashlib.sha256(cubin).hexdigest(), "ptx": hashlib.sha256(ptx).hexdigest()}
