"""Plan -> source text -> files: the Jinja environment, render, write, compare.

Rendering is pure and deterministic: the same spec gives the same bytes, whatever the working
folder, the hash seed or the machine. Writing replaces a package as a whole or not at all.
"""

from __future__ import annotations

import ctypes
import difflib
import glob
import hashlib
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2

from kgen.compiler import CacheError, cache_dir, locked
from kgen.errors import BuildError, UsageError
from kgen.plan import Plan, make_plan
from kgen.spec import Spec
from kgen.version import __version__

# Files that `kgen build` or Python leave beside the emitted ones; no part of the golden record.
_BESIDE = ("build.json", "__pycache__")
_RUNTIME_FILES = {
    "_runtime.py": "runtime.py",
    "_launching.py": "_launching.py",
    "_calls.py": "_calls.py",
    "_op.py": "op.py",
    "_compiler.py": "compiler.py",
}


def f32(value: float) -> str:
    """A float as a C++ float literal that reads back as the same fp32 value: 1e-5 -> 1e-05f."""
    rounded = struct.unpack("f", struct.pack("f", value))[0]
    short = next(
        text
        for digits in range(1, 10)
        if struct.unpack("f", struct.pack("f", float(text := f"{rounded:.{digits}g}")))[0]
        == rounded
    )
    return f"{short}f" if any(mark in short for mark in ".en") else f"{short}.0f"


def paste(paths: Iterable[str]) -> str:
    """The text of device files, in order, with a blank line between them."""
    root = files("kgen.templates")
    return "\n\n".join(root.joinpath(path).read_text("utf-8").rstrip("\n") for path in paths)


def camel(name: str) -> str:
    """smem_x_parts -> XParts: a constant's name from that of a region of shared memory."""
    return "".join(part.capitalize() for part in name.removeprefix("smem_").split("_"))


def _finalize(value: object) -> object:
    """What an expression may print. None and bare floats are refused: both are mistakes."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None or isinstance(value, float):
        raise jinja2.TemplateRuntimeError(
            f"a template printed {value!r}; floats go through the f32 filter, None nowhere"
        )
    return value


@cache
def environment() -> jinja2.Environment:
    """The one Jinja environment: undefined names raise, text is kept as written."""
    env = jinja2.Environment(
        loader=jinja2.PackageLoader("kgen", "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=_finalize,
        autoescape=False,  # C++ and Python, not HTML
    )
    env.filters.update(f32=f32, paste=paste, camel=camel, json=_json, repr=repr)
    return env


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


def render_template(name: str, /, **context: object) -> str:
    """Render one template. Raises: BuildError naming the template, its line and the problem."""
    try:
        return environment().get_template(name).render(**context)
    except Exception as error:
        where = _template_place(error) or name
        reason = error.message if isinstance(error, jinja2.TemplateError) else None
        raise BuildError(f"template {where}: {reason or error}") from error


def _template_place(error: Exception) -> str:
    """`file:line` of the innermost template, included ones too, that an error comes from."""
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"{error.name}:{error.lineno}"
    place, trace = "", error.__traceback__
    while trace is not None:
        file = Path(trace.tb_frame.f_code.co_filename)
        if file.suffix == ".j2":
            place = f"{file.name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


def render(spec: Spec, plan: Plan | None = None) -> dict[str, str]:
    """The emitted package of a checked spec: file name -> text. Raises: BuildError."""
    plan = plan or make_plan(spec)
    text = {
        "kernel.cu": render_template(plan.template, plan=plan),
        "__init__.py": render_template("module.py.j2", plan=plan),
        **{
            target: files("kgen").joinpath(source).read_text("utf-8")
            for target, source in _RUNTIME_FILES.items()
        },
    }
    manifest = make_manifest(spec, plan)
    digests = {name: _digest(body) for name, body in text.items()}
    digests["manifest.json"] = _digest(_json(manifest))  # of what it says beside the digests
    manifest["files"] = dict(sorted(digests.items()))
    text["manifest.json"] = _json(manifest) + "\n"
    return dict(sorted(text.items()))


def emit(spec: Spec, output: str | os.PathLike[str], *, force: bool = False) -> Path:
    """Write the package of a checked spec to `output/<name>`; returns that folder.

    Raises: UsageError if it cannot be written, or if it holds what kgen did not write and not
    `force`; BuildError if a template is wrong.
    """
    folder = Path(output) / spec.name
    write(folder, render(spec), force=force)
    return folder


def make_manifest(spec: Spec, plan: Plan) -> dict[str, Any]:
    """What the plan decided, for the launcher and for tools; plain JSON values."""
    return {
        "kgen_version": __version__,
        "name": spec.name,
        "spec_hash": spec.hash(),
        "strategy": plan.strategy,
        "spec": spec.canonical(),
        "parameters": {key: list(shape) for key, shape in plan.parameter_shapes.items()},
        "output": {"C_out": plan.g.C_out, "P": plan.g.P, "Q": plan.g.Q},
        "x_alignment": plan.x_alignment,
        "convolution": _convolution(plan) if plan.strategy == "hybrid" else None,
        "launches": [asdict(launch) for launch in plan.launches],
        "workspace_floats": plan.workspace_fixed,
        "workspace_floats_per_sample": plan.workspace_per_sample,
    }


def _convolution(plan: Plan) -> dict[str, list[int]]:
    """Geometry of the library's convolution; padding per side as F.pad takes it (W first)."""
    (top, left), (bottom, right) = plan.g.pad_before, plan.g.pad_after
    return {
        "padding": [left, right, top, bottom],
        "stride": list(plan.g.stride),
        "dilation": list(plan.g.dilation),
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def is_beside(name: str) -> bool:
    """Whether a file of a package folder is none that `kgen emit` writes (cubins, caches)."""
    return name in _BESIDE or name.endswith(".cubin")


def difference(package: Path, text: dict[str, str]) -> str:
    """Unified diff from the files in `package` to `text`; empty if they are equal.

    Missing and surplus files count; what `kgen build` left there does not.
    """
    found = {}
    if package.is_dir():
        found = {path.name: path for path in package.iterdir() if not is_beside(path.name)}
    parts = []
    for name in sorted(found.keys() | text.keys()):
        old = _content(found[name]) if name in found else ""
        new = text.get(name, "")
        if (name in found) != (name in text) or old != new:
            before = f"{package.name}/{name}" if name in found else "/dev/null"
            after = f"{package.name}/{name}" if name in text else "/dev/null"
            lines = difflib.unified_diff(
                old.splitlines(keepends=True), new.splitlines(keepends=True), before, after
            )
            body = "".join(lines)
            parts.append(body or f"--- {before}\n+++ {after}\n")
    return "".join(parts)


def write(package: Path, text: dict[str, str], *, force: bool = False) -> bool:
    """Write a package folder; returns whether anything changed.

    The folder is replaced as a whole. One that kgen did not write, or whose files were edited
    since, is left alone unless `force`. Cubins built from the replaced source are dropped.
    Raises: UsageError if it may not or cannot be written; nothing is half-written then.
    """
    if package.is_symlink():  # what it leads to is replaced, not the link
        package = package.resolve()
    with _alone(package):
        return _write(package, text, force)


def _write(package: Path, text: dict[str, str], force: bool) -> bool:
    if package.is_dir() and not difference(package, text):
        return False
    if package.exists() and not force:
        reason = _foreign(package)
        if reason:
            raise UsageError(f"{package}: {reason}; --force replaces it")
    parent = package.parent
    staging: Path | None = None
    try:
        parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{package.name}.", dir=parent))
        for name, body in text.items():
            (staging / name).write_bytes(body.encode())
        staging.chmod(0o777 & ~_umask())
        if package.exists():
            _exchange(package, staging)
        else:
            os.replace(staging, package)
    except OSError as error:
        where = error.filename if error.filename else package
        raise UsageError(f"{where}: cannot be written: {error.strerror}") from None
    finally:
        if staging is not None and staging.exists():
            shutil.rmtree(staging, ignore_errors=True)
    return True


@contextmanager
def _alone(package: Path) -> Iterator[None]:
    """Keep other writers of a package out, and take away what killed ones left beside it.

    Where there is no cache folder to hold the lock, or no filelock, writers are on their own.
    """
    name = f"emit-{_digest(str(package.absolute()))[:32]}.lock"
    try:
        lock = locked(cache_dir() / "locks" / name)
    except (CacheError, ImportError):
        yield
        return
    with lock:
        for left in package.parent.glob(f".{glob.escape(package.name)}.????????"):
            shutil.rmtree(left, ignore_errors=True)
        yield


def _swap(one: Path, other: Path) -> bool:
    """Let two folders change places at one stroke; False where the system cannot."""
    try:
        call = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError):
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    done: int = call(here, os.fsencode(one), here, os.fsencode(other), exchange)
    return done == 0


def _exchange(package: Path, new: Path) -> None:
    """Put `new` in the place of `package`, and the old one in its; there is no moment without one
    where the system can swap them. Where it fails the old one is put back."""
    if _swap(package, new):
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{package.name}.", dir=package.parent))
    try:
        os.replace(package, aside / "old")
        try:
            os.replace(new, package)
        except OSError:
            os.replace(aside / "old", package)
            raise
        shutil.rmtree(aside / "old", ignore_errors=True)
    finally:
        with suppress(OSError):  # still holds the old package where that could not be put back
            aside.rmdir()


def _foreign(package: Path) -> str:
    """Why an existing folder should not be replaced; empty if kgen wrote all of it."""
    if not package.is_dir():
        return "is a file, not a package folder"
    names = {path.name for path in package.iterdir() if not is_beside(path.name)}
    if not names:
        return ""
    try:
        manifest = json.loads((package / "manifest.json").read_text("utf-8"))
        digests = dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return "was not written by kgen (no manifest.json with the files' digests)"
    del manifest["files"]
    for name in sorted(names):
        if name not in digests:
            return f"holds {name}, which kgen did not write"
        content = _json(manifest) if name == "manifest.json" else _content(package / name)
        if _digest(content) != digests[name]:
            return f"{name} was edited since it was emitted"
    return ""


def _content(path: Path) -> str:
    """A file as text, its line ends as they are; a folder's own mark, unlike any emitted text."""
    if not path.is_file():
        return f"({path.name} is not a file)\n"
    return path.read_bytes().decode("utf-8", errors="replace")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
