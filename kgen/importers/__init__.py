"""Finds conv -> chain -> GroupNorm blocks in torch modules; replaces them and undoes that.

Nothing here is imported together with torch: each function imports it when it is called.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from kgen.errors import UsageError
from kgen.importers.report import ImportedBlock, ImportReport, Unmatched
from kgen.spec import Spec

if TYPE_CHECKING:
    from torch import nn

    from kgen.importers.optimize import Optimized

__all__ = [
    "ImportReport",
    "ImportedBlock",
    "Unmatched",
    "import_module",
    "optimize",
    "undo",
]


def import_module(
    module: nn.Module,
    example: Any,
    *,
    name: str | None = None,
    dynamic_batch: bool = False,
    targets: Sequence[str] | None = None,
) -> ImportReport:
    """The blocks that kgen can compute in `module`, a spec of each, and why others are not.

    The module runs once on fake tensors, which hold sizes and no data, and is not changed.
    example: a tensor, or a tuple of the forward's positional arguments; tensors may be on the meta
    device. name: what the specs' names begin with; default: the class's name. dynamic_batch: specs
    for any number of samples instead of the example's. targets: of the specs; default: the GPU
    that the module is on, else sm_90a.
    Raises: UsageError if the module cannot run on fake tensors.
    """
    need_torch("kgen.import_module")
    from kgen.importers.discover import discover

    found = discover(module, example, name=name, dynamic_batch=dynamic_batch, targets=targets)
    return found.report


def optimize(
    model: nn.Module,
    example_inputs: Any,
    *,
    on_mismatch: Literal["error", "regenerate", "eager"] = "error",
    dynamic_batch: bool = False,
    targets: Sequence[str] | None = None,
    specs: Iterable[Spec | str | os.PathLike[str]] = (),
) -> Optimized:
    """Let `model` compute the blocks that `import_module` finds with kgen's kernels, in place.

    Parameters, state_dict keys, submodules, hooks of the model and its training flag stay what
    they are; only the forward of the modules that hold a block is replaced. The result's `undo()`
    puts it back, as does leaving a `with` block over it. If anything fails, nothing is changed.

    example_inputs, dynamic_batch, targets: as in `import_module`.
    on_mismatch: what a block does with an x of a size that the example did not have. `error`
    raises ValueError; `regenerate` emits and compiles the block for that size, once for each;
    `eager` computes it with PyTorch's ops, for another dtype too. The last two log a warning to
    the logger `kgen`, once for each size.
    specs: specs or spec files, for instance tuned ones, to take for blocks of the same problem
    and chain.
    Raises: CheckError if there is no such block, with the reasons; UsageError, SpecError.
    """
    need_torch("kgen.optimize")
    from kgen.importers.optimize import optimize_model

    return optimize_model(model, example_inputs, on_mismatch, dynamic_batch, targets, specs)


def undo(model: nn.Module) -> int:
    """Take every fused block out of `model`, for instance of a deep copy of an optimised one.

    Returns how many modules got their own forward back.
    """
    need_torch("kgen.importers.undo")
    from kgen.importers.reroute import restore

    return sum(restore(one) for one in model.modules())


def need_torch(who: str) -> None:
    """Raises: UsageError that says what to install, where torch is not there."""
    try:
        import torch  # noqa: F401
    except ImportError:
        raise UsageError(f"{who} needs torch (pip install 'kgen[torch]')") from None
