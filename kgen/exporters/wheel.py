"""Spec -> a pip-installable folder: the emitted package with cubins, and what a wheel needs."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence

from kgen.build import build
from kgen.emit import render_template
from kgen.errors import UsageError
from kgen.plan import make_plan
from kgen.spec import Spec
from kgen.version import __version__

# What a version may be: the part of PEP 440 that packages of one block have a use for.
_VERSION = r"\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?(\+[a-z0-9]+(\.[a-z0-9]+)*)?"


def package_files(spec: Spec, archs: Sequence[str], version: str | None = None) -> dict[str, bytes]:
    """The files of the folder, by their path in it; `<name>/` holds the package itself.

    archs: targets of the cubins, as `kgen build` takes them. version: of the package; kgen's
    version with the spec's hash if None. Compiles with NVRTC; needs neither a GPU nor torch.
    Raises: SpecError if the plan does not fit an architecture, BuildError, UsageError.
    """
    version = version or f"{__version__}+{spec.hash()}"
    if not re.fullmatch(_VERSION, version):
        raise UsageError(f"version {version!r}: expected for instance 1.2.0 or 1.2.0+local")
    with tempfile.TemporaryDirectory(prefix="kgen-export-") as scratch:
        package = build(spec, archs, scratch)
        inside = {
            f"{spec.name}/{path.name}": path.read_bytes()
            for path in sorted(package.iterdir())
            if path.is_file()
        }
    plan, data = make_plan(spec), sorted(_name(one) for one in inside if not one.endswith(".py"))
    around = {
        "pyproject.toml": render_template("package.toml.j2", plan=plan, version=version, data=data),
        "README.md": render_template("package.md.j2", plan=plan, version=version, archs=archs),
        "LICENSE": render_template("package_license.j2"),
    }
    return {**{name: text.encode() for name, text in around.items()}, **inside}


def _name(path: str) -> str:
    return path.rpartition("/")[2]
