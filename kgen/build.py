"""Source text -> cubins beside it: what `kgen build` does, and the compile step of `kgen emit`."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kgen.arch import ARCHS
from kgen.compiler import Build, CacheError, CompileError, compile_source
from kgen.constraints import check
from kgen.emit import render, write
from kgen.errors import BuildError, SpecError, UsageError
from kgen.plan import make_plan
from kgen.spec import Spec
from kgen.version import __version__


def build(
    spec: Spec, archs: Sequence[str], output: str | os.PathLike[str], *, force: bool = False
) -> Path:
    """Emit a package and put a cubin for each architecture beside it; returns its folder.

    Cubins that an earlier build of the same source left there stay. With a cubin for its GPU a
    package needs no compiler. Raises: SpecError if the plan does not fit an architecture,
    BuildError, UsageError.
    """
    planned = make_plan(spec)
    for arch in map(normalise_arch, archs):
        both = spec.model_copy(update={"targets": (*spec.targets, arch)})
        if arch in spec.targets:
            continue
        issues = [one for one in check(both) if one.path != "targets"]
        if issues:
            raise SpecError(f"{spec.name} for {arch}", issues)
        if planned.fused is not None and make_plan(both).fused != planned.fused:
            listed = ", ".join(spec.targets)
            raise UsageError(
                f"{spec.name}: its kernel is planned for {listed} and does not fit {arch}; "
                f"add {arch} to the spec's targets"
            )
    text = render(spec)
    builds = [compile_kernel(text["kernel.cu"], arch) for arch in archs]
    folder = Path(output) / spec.name
    write(folder, text, force=force)
    install_cubins(folder, spec.name, text["kernel.cu"], builds)
    return folder


def compile_kernel(source: str, arch: str) -> Build:
    """Compile an emitted kernel.cu. Raises: BuildError, in one line where the fault is the arch."""
    try:
        return compile_source(source, arch, version=__version__)
    except CacheError as error:
        raise UsageError(str(error)) from None
    except CompileError as error:
        raise BuildError(str(error)) from None


def normalise_arch(text: str) -> str:
    """`90a`, `sm_90a` or `9.0a` as `sm_90a`. Raises: UsageError for one kgen does not know."""
    match = re.fullmatch(r"(?:sm_?)?(\d+)\.?(\d)([a-z]?)", text.strip().lower())
    name = f"sm_{match[1]}{match[2]}{match[3]}" if match else text
    if name not in ARCHS:
        near = f"did you mean {name}a? " if f"{name}a" in ARCHS else ""
        known = ", ".join(ARCHS)
        raise UsageError(f"unknown architecture {text!r}; {near}kgen compiles for {known}")
    return name


def install_cubins(folder: Path, name: str, source: str, builds: Sequence[Build]) -> None:
    """Write cubins and build.json beside kernel.cu, each by rename. Raises: UsageError."""
    digest = hashlib.sha256(source.encode()).hexdigest()
    record: dict[str, Any] = {"source_sha256": digest, "kgen_version": __version__, "builds": {}}
    try:
        old = json.loads((folder / "build.json").read_text("utf-8"))
        if old["source_sha256"] == digest:
            record["builds"] = dict(old["builds"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # none yet, or none that can be kept
    try:
        for build in builds:
            file = f"{name}.{build.arch}.cubin"
            _replace(folder / file, build.cubin)
            record["builds"][build.arch] = {
                "file": file,
                "sha256": hashlib.sha256(build.cubin).hexdigest(),
                "bytes": len(build.cubin),
                "nvrtc": build.nvrtc,
                "compile_seconds": round(build.seconds, 3),
                "kernels": [asdict(one) for one in build.resources],
            }
        _replace(folder / "build.json", (json.dumps(record, indent=2) + "\n").encode())
    except OSError as error:
        raise UsageError(
            f"{error.filename or folder}: cannot be written: {error.strerror}"
        ) from None


def _replace(path: Path, content: bytes) -> None:
    handle, staging = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(staging, 0o644)
        os.replace(staging, path)
    except BaseException:
        os.unlink(staging)
        raise
