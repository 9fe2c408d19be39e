"""Replaces the blocks of a model in place, all or none, and undoes that."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from torch import nn

from kgen.errors import CheckError, UsageError
from kgen.importers.discover import discover
from kgen.importers.report import ImportedBlock, ImportReport, Unmatched
from kgen.importers.reroute import (
    forward_of,
    fused_call,
    install,
    is_rerouted,
    replace_blocks,
    restore,
)
from kgen.package import package_of
from kgen.spec import Spec, load_spec

_log = logging.getLogger("kgen")
MISMATCHES = ("error", "regenerate", "eager")


class Optimized:
    """A model whose blocks were replaced. `undo()` puts everything back.

    As a context manager it undoes at the end of the block, after an exception too.
    """

    def __init__(self, model: nn.Module, report: ImportReport, changed: list[nn.Module]) -> None:
        self.model = model
        self.report = report
        self._changed = changed

    @property
    def blocks(self) -> tuple[ImportedBlock, ...]:
        """The blocks that were replaced."""
        return self.report.blocks

    @property
    def unmatched(self) -> tuple[Unmatched, ...]:
        """The convolutions that were left as they are, with the reasons."""
        return self.report.unmatched

    def undo(self) -> None:
        """Give every changed module its own forward back; a second time does nothing."""
        for module in self._changed:
            restore(module)
        self._changed = []

    def __enter__(self) -> Optimized:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.undo()

    def __str__(self) -> str:
        return str(self.report)


def optimize_model(
    model: nn.Module,
    example: Any,
    on_mismatch: str,
    dynamic_batch: bool,
    targets: Sequence[str] | None,
    specs: Iterable[Spec | str | os.PathLike[str]],
) -> Optimized:
    """See `kgen.optimize`."""
    if on_mismatch not in MISMATCHES:
        legal = ", ".join(repr(one) for one in MISMATCHES)
        raise UsageError(f"on_mismatch is {on_mismatch!r}; legal are {legal}")
    if any(is_rerouted(one) for one in model.modules()):
        raise UsageError(
            f"{type(model).__name__} is optimized already; undo() it first, or "
            "kgen.importers.undo(model) where it is a copy"
        )
    given = {
        _computed(one): one
        for one in (spec if isinstance(spec, Spec) else load_spec(Path(spec)) for spec in specs)
    }
    found = discover(model, example, dynamic_batch=dynamic_batch, targets=targets)
    if not found.report.blocks:
        raise CheckError("\n".join(["nothing to optimize", *found.report.lines()]))
    report = _with_specs(found.report, given)
    for spec in given.values():
        if spec not in report.specs:
            _log.warning("spec %s computes no block of %s", spec.name, type(model).__name__)
    chosen = {
        old.spec: new.spec for old, new in zip(found.report.blocks, report.blocks, strict=True)
    }
    packages: dict[Spec, ModuleType] = {one: package_of(one) for one in report.specs}
    forwards = []
    for site in found.sites:
        for graph, founds in site.variants.values():
            of_each = [[packages[chosen[one.spec]] for one in entry.blocks] for entry in founds]
            calls = [
                fused_call(entry.blocks[0].path, each, on_mismatch)
                for entry, each in zip(founds, of_each, strict=True)
            ]
            replace_blocks(graph, founds, calls, [each[0].PARAMETERS for each in of_each])
        forwards.append((site.module, forward_of(site)))
    for module, forward in forwards:
        install(module, forward)
    return Optimized(model, report, [module for module, _ in forwards])


def _computed(spec: Spec) -> str:
    """What a spec computes, without how and under which name."""
    return spec.model_copy(update={"name": "block", "schedule": type(spec.schedule)(),
                                   "targets": ("sm_90a",)}).hash()  # fmt: skip


def _with_specs(report: ImportReport, given: dict[str, Spec]) -> ImportReport:
    """The report with the caller's specs where they compute the same."""
    blocks = tuple(
        ImportedBlock(
            one.path,
            one.scope,
            one.norm,
            given.get(_computed(one.spec), one.spec),
            one.parameters,
        )
        for one in report.blocks
    )
    return ImportReport(report.model, blocks, report.unmatched)
