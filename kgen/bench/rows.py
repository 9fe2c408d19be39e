"""What is timed: the kernels of a spec's strategies, and the baselines that users have today."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from kgen.constraints import check
from kgen.errors import UsageError
from kgen.package import find_package
from kgen.reference import EagerBlock, Parameters
from kgen.spec import STRATEGIES, Spec

BASELINES = ("eager", "compile", "compile-max-autotune", "channels_last", "hybrid")
DEFAULT_BASELINES = ("eager", "compile")

# x -> y
Block = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class Prepared:
    """One row before it is timed. make: gives the callable, compiling whatever it needs; x is
    passed through `arrange` first. facts: what the record says of the row."""

    label: str
    kind: Literal["kgen", "baseline"]
    make: Callable[[], Block]
    arrange: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
    spec: Spec | None = None
    facts: dict[str, Any] = field(default_factory=dict)


def chosen_specs(spec: Spec, strategies: Sequence[str] | None) -> tuple[list[Spec], list[str]]:
    """The spec under each strategy, and a line for each that does not fit.

    strategies: None for the spec's own (or the plan's choice), ("all",) for all that fit.
    Raises: UsageError for an unknown strategy, or if one that was named does not fit.
    """
    if strategies is None:
        return [spec], []
    everything = tuple(strategies) == ("all",)
    wanted = STRATEGIES if everything else tuple(strategies)
    found, skipped = [], []
    for name in wanted:
        if name not in STRATEGIES:
            legal = ", ".join(("all", *STRATEGIES))
            raise UsageError(f"--strategies: unknown strategy {name!r}; legal are {legal}")
        variant = spec if spec.schedule.strategy == name else spec.with_strategy(name)
        issues = check(variant)
        if issues and not everything:
            raise UsageError(f"--strategies: {issues[0].message}")
        if issues:
            skipped.append(f"kgen {name}: {issues[0].message}")
        else:
            found.append(variant)
    return found, skipped


@contextmanager
def empty_caches() -> Iterator[None]:
    """kgen's cache in a folder of its own, and none for torch.compile: nothing is compiled yet."""
    from torch._inductor import config

    before = os.environ.get("KGEN_CACHE_DIR")
    with tempfile.TemporaryDirectory() as folder, config.patch(force_disable_caches=True):
        os.environ["KGEN_CACHE_DIR"] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ["KGEN_CACHE_DIR"]
            else:
                os.environ["KGEN_CACHE_DIR"] = before


def kernel_row(spec: Spec, parameters: Parameters) -> Prepared:
    """A strategy's kernel, through its package's module, as a model calls it."""

    def make() -> Block:
        block = find_package(spec).FusedBlock(device=parameters["conv.weight"].device).eval()
        block.load_state_dict(parameters)
        made: Block = block
        return made

    strategy = find_package(spec).manifest["strategy"]
    return Prepared(f"kgen {strategy}", "kgen", make, spec=spec, facts={"strategy": strategy})


def baseline_row(label: str, spec: Spec, parameters: Parameters) -> Prepared:
    """eager, compile, compile-max-autotune or channels_last.

    max-autotune leaves CUDA graphs to the `graph` column, which captures every row alike.
    """
    device = parameters["conv.weight"].device

    def module() -> EagerBlock:
        block = EagerBlock(spec).to(device).eval()
        block.load_state_dict(parameters)
        return block

    if label == "channels_last":
        return Prepared(
            label,
            "baseline",
            lambda: module().to(memory_format=torch.channels_last),  # type: ignore[call-overload]
            lambda x: x.contiguous(memory_format=torch.channels_last),
        )
    if label == "eager":
        return Prepared(label, "baseline", module)
    mode = "max-autotune-no-cudagraphs" if label == "compile-max-autotune" else "default"

    def compiled() -> Block:
        torch._dynamo.reset()  # else a second size of a block is compiled for any size
        made: Block = torch.compile(module(), dynamic=False, mode=mode)
        return made

    return Prepared(label, "baseline", compiled)


def prepare_rows(
    spec: Spec, specs: Sequence[Spec], baselines: Sequence[str], parameters: Parameters
) -> list[Prepared]:
    """All rows, kernels first. Raises: UsageError for an unknown baseline."""
    for name in baselines:
        if name not in BASELINES:
            raise UsageError(
                f"--baselines: unknown baseline {name!r}; legal are {', '.join(BASELINES)}"
            )
    rows = [kernel_row(variant, parameters) for variant in specs]
    if "hybrid" in baselines and "kgen hybrid" not in {row.label for row in rows}:
        rows.append(kernel_row(spec.with_strategy("hybrid"), parameters))
    rows += [baseline_row(name, spec, parameters) for name in baselines if name != "hybrid"]
    return rows
