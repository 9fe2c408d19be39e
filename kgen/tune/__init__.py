"""Finds the fastest schedule of a spec by measuring: `kgen tune`. See docs/tune.md."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kgen.errors import UsageError
from kgen.spec import Spec
from kgen.tune.devices import (
    Device,
    Where,
    choose_devices,
    compiler_processes,
    find_devices,
    local_executors,
)
from kgen.tune.result import PREDICTED, Row, TuneResult
from kgen.tune.run import Executors, Progress, Settings, run
from kgen.tune.search import MakeSearch, make_search
from kgen.tune.space import FACTOR, Space, block_hash, enumerate_space
from kgen.tune.store import Store, default_path
from kgen.tune.task import LIMIT_SECONDS, Outcome, Task, evaluate

__all__ = ["TuneResult", "simulate", "tune"]


def tune(
    spec: Spec,
    *,
    strategies: Sequence[str] | None = None,
    maths: Sequence[str] | None = None,
    budget: float = 60.0,
    devices: Sequence[int] | None = None,
    store: Path | None = None,
    factor: float = FACTOR,
    limit: float = LIMIT_SECONDS,
    seed: int = 0,
    progress: Callable[[Progress], None] = lambda _: None,
    found: Sequence[Device] | None = None,
    executors: Executors | None = None,
    evaluator: Callable[[Task], Outcome] = evaluate,
    search: MakeSearch = make_search,
    clock: Callable[[], float] = time.monotonic,
) -> TuneResult:
    """Measure schedules of a checked spec until the budget, in seconds, is used up.

    strategies, maths, factor: see `enumerate_space`. devices: indices of GPUs, None for all that
    are visible. store: file of results, None for the one beside the cache. limit: seconds for each
    step of a candidate. seed: of the search.
    found, executors, evaluator: the GPUs, the executor of each and what runs there, for other
    machines than this one; see docs/tune.md.
    Ctrl-C ends it early: the result then says so. In a script, call it below
    `if __name__ == "__main__":`, because worker processes import the main module.
    Raises: UsageError without a GPU, for unknown names and files that cannot be used.
    """
    if not budget > 0 or not limit > 0:
        raise UsageError("budget and limit must be above 0 seconds")
    start = clock()
    chosen = choose_devices(find_devices() if found is None else found, devices, spec.targets)
    compilers = compiler_processes(len(chosen))
    where = Where(chosen[0].gpu, chosen[0].driver, chosen[0].nvrtc)
    space = enumerate_space(spec, strategies, maths, factor=factor)
    settings = Settings(
        devices=[one.index for one in chosen],
        budget=budget,
        task=Task("compile", spec.canonical(), {}, chosen[0].arch, limit=limit),
        ahead=compilers,
        executors=executors or local_executors(chosen, compilers),
        evaluate=evaluator,
        clock=clock,
        progress=progress,
        start=start,
    )
    file = Store(store or default_path(spec), spec, where, limit)
    return run(space, search(space, seed), file, where, settings)


def simulate(
    spec: Spec,
    *,
    strategies: Sequence[str] | None = None,
    maths: Sequence[str] | None = None,
    factor: float = FACTOR,
) -> TuneResult:
    """Rank the schedules of a checked spec by the cost model alone; needs no GPU.

    Nothing is compiled or run, so nothing is verified and there is no winner. Raises: UsageError.
    """
    start = time.monotonic()
    space: Space = enumerate_space(spec, strategies, maths, factor=factor)
    ranked = sorted(space.candidates, key=lambda one: one.predicted_ms)
    rows = [
        Row(
            strategy=one.strategy,
            schedule=one.schedule,
            status=PREDICTED,
            reason="by the cost model alone",
            predicted_ms=one.predicted_ms,
            is_default=one.is_default,
        )
        for one in ranked
    ]
    return TuneResult(
        name=spec.name,
        block=block_hash(spec),
        where=None,
        rows=tuple(rows),
        refused=space.refused,
        pruned=len(space.pruned),
        left=0,
        measured=0,
        seconds=time.monotonic() - start,
        simulated=True,
    )
