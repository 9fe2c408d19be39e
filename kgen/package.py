"""Emitted packages as Python modules, imported from a folder or made from a spec in the cache."""

from __future__ import annotations

import copyreg
import hashlib
import importlib.util
import json
import logging
import os
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from kgen.compiler import CacheError, cache_dir, locked
from kgen.constraints import check
from kgen.emit import render, write
from kgen.errors import SpecError, UsageError
from kgen.spec import Schedule, Spec, load_spec

_log = logging.getLogger("kgen")
_lock = threading.RLock()
_REGENERATING = "RegeneratingBlock"


def import_package(folder: Path) -> ModuleType:
    """Import an emitted package from its folder; the same folder and content give the same module.

    Raises: UsageError if it is not an emitted package.
    """
    folder = folder.resolve()
    for name in ("__init__.py", "manifest.json", "kernel.cu"):
        if not (folder / name).is_file():
            raise UsageError(f"{folder}: is not an emitted package (no {name})")
    try:
        json.loads((folder / "manifest.json").read_text("utf-8"))["spec"]["problem"]
    except (ValueError, KeyError, TypeError):
        raise UsageError(
            f"{folder / 'manifest.json'}: is damaged; emit the package again"
        ) from None
    content = hashlib.sha256(str(folder).encode())
    for path in [*sorted(folder.glob("*.py")), folder / "kernel.cu", folder / "manifest.json"]:
        content.update(path.read_bytes())
    name = f"kgen_package_{content.hexdigest()[:24]}"
    with _lock:
        if name in sys.modules:
            return sys.modules[name]
        found = importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert found is not None
        assert found.loader is not None
        module = importlib.util.module_from_spec(found)
        sys.modules[name] = module
        try:
            found.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        for block in (module.FusedBlock, module.ModelNew):
            copyreg.pickle(block, _reduced)
        return module


def _reduced(block: Any) -> tuple[Any, ...]:
    """How a block is pickled and copied: its package under a name that other processes know."""
    cls = type(block)
    package = sys.modules[block.package_name]
    where = (cls.__name__, str(package._FOLDER), package.spec, package.spec_hash)
    return _restored, where, block.__getstate__()


def _restored(name: str, folder: str, canonical: Mapping[str, Any], spec_hash: str) -> Any:
    """An empty block of a package: the one in that folder, or emitted anew if it is gone."""
    try:
        package: Any = import_package(Path(folder))
        found = package.spec_hash == spec_hash
    except UsageError:
        found = False
    if not found:
        package = package_of(spec_from_canonical(canonical))
    cls = _regenerating(package) if name == _REGENERATING else getattr(package, name)
    return cls.__new__(cls)


def package_of(spec: Spec) -> ModuleType:
    """The package of a spec, emitted into the cache folder if it is not there yet."""
    text = render(spec)
    content = hashlib.sha256("".join(text.values()).encode()).hexdigest()[:16]
    try:
        root = cache_dir()
        folder = root / "package" / content / spec.name
        with locked(root / "locks" / f"package-{content}.lock"):  # others may want it too
            if not write(folder, text, force=True):
                with suppress(OSError):
                    os.utime(folder.parent)  # `kgen cache gc` goes by it
            return import_package(folder)
    except CacheError as error:
        raise UsageError(str(error)) from None


def load(
    source: str | os.PathLike[str] | Spec | ModuleType,
    on_mismatch: Literal["error", "regenerate"] = "error",
    **module_arguments: Any,
) -> Any:
    """A block as a torch.nn.Module, from a spec file, a Spec, a package folder or its module.

    on_mismatch: what happens when x has another batch, height or width than the block was built
    for. `error` raises ValueError; `regenerate` emits and compiles the block for x's size, once
    for each size (once for all batch sizes: it goes to a dynamic batch), and keeps the parameters.
    Other channels always raise: the parameters would not fit.
    module_arguments: device, dtype.
    Raises: SpecError, UsageError, BuildError.
    """
    if on_mismatch not in ("error", "regenerate"):
        raise UsageError(f"on_mismatch is {on_mismatch!r}; legal are 'error' and 'regenerate'")
    package = find_package(source)
    if on_mismatch == "error":
        return package.FusedBlock(**module_arguments)
    return _regenerating(package)(**module_arguments)


def find_package(source: str | os.PathLike[str] | Spec | ModuleType) -> Any:
    """The imported package of a spec file, a Spec, a package folder; a module is taken as it is.

    Raises: UsageError for anything else.
    """
    if isinstance(source, ModuleType):
        return source
    if isinstance(source, Spec):
        return package_of(source)
    if not isinstance(source, str | os.PathLike):
        raise UsageError(
            f"cannot load a {type(source).__name__}: expected a spec file, a Spec, a package's "
            "folder or its module"
        )
    path = Path(source)
    return import_package(path) if path.is_dir() else package_of(load_spec(path))


def spec_of(package: Any) -> Spec:
    """The spec that a package was emitted from."""
    return spec_from_canonical(package.spec)


def spec_from_canonical(canonical: Mapping[str, Any]) -> Spec:
    """The spec whose `canonical()` is given. Raises: SpecError."""
    values = dict(canonical)
    given = values["schedule"].items()
    values["schedule"] = {key: value for key, value in given if value is not None}
    values["chain"] = [_chain_item(step) for step in values["chain"]]
    return load_spec(values)


def _chain_item(step: dict[str, Any]) -> Any:
    rest = {key: value for key, value in step.items() if key != "op"}
    if step["op"] == "group_norm":
        return {"group_norm": rest}
    return step["op"] if rest["parameter"] is None else {step["op"]: rest["parameter"]}


def resized(spec: Spec, batch: int, height: int, width: int) -> Spec:
    """The spec for other sizes: another batch becomes `dynamic`; knobs that no longer fit go.

    Raises: SpecError if the block does not exist at that size.
    """
    same_batch = spec.problem.batch in ("dynamic", batch)
    problem = spec.problem.model_copy(
        update={
            "batch": spec.problem.batch if same_batch else "dynamic",
            "height": height,
            "width": width,
        }
    )
    new = spec.model_copy(update={"problem": problem})
    if check(new):
        kept = spec.schedule.model_dump(include={"strategy"}, exclude_none=True)
        new = new.model_copy(update={"schedule": Schedule(**kept)})
    issues = check(new)
    if issues:
        raise SpecError(f"{spec.name} for x [{batch}, {height} x {width}]", issues)
    return new


def _regenerating(package: Any) -> Any:
    """A subclass of the package's FusedBlock that regenerates itself for other sizes of x."""
    spec = spec_of(package)
    channels = spec.problem.in_channels
    packages: dict[tuple[int | str, int, int], Any] = {
        (spec.problem.batch, spec.problem.height, spec.problem.width): package
    }
    # Not _lock: `package_of` takes a file's lock and then that one, and so do others at a time.
    one_at_a_time = threading.Lock()

    def package_for(x: Any) -> Any:
        N, H, W = (int(x.shape[axis]) for axis in (0, 2, 3))  # tensors under torch.jit.trace
        if N == 0 and (spec.problem.height, spec.problem.width) == (H, W):
            return package
        for batch in (N, "dynamic"):
            if (batch, H, W) in packages:
                return packages[batch, H, W]
        with one_at_a_time:
            new = resized(spec, N, H, W)
            key = (new.problem.batch, H, W)
            if key not in packages:
                _log.warning("%s: regenerating for x %s", spec.name, list(x.shape))
                packages[key] = package_of(new)
            return packages[key]

    class RegeneratingBlock(package.FusedBlock):  # type: ignore[misc]
        """The block; another batch, height or width of x emits and compiles it anew, once."""

        def forward(self, x: Any) -> Any:
            if x.dim() != 4 or x.shape[1] != channels:
                return super().forward(x)  # raises what a fixed block raises
            chosen = package_for(x)
            if chosen is package:
                return super().forward(x)
            parameters = (attrgetter(key)(self) for key in chosen.PARAMETERS)
            compute = chosen.eager if chosen._calls.is_transformed() else chosen.fused_block
            return compute(x, *parameters)

    assert RegeneratingBlock.__name__ == _REGENERATING
    copyreg.pickle(RegeneratingBlock, _reduced)
    return RegeneratingBlock
