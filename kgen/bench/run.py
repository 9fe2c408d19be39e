"""One benchmark: verify, time, check again, and say under which circumstances."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch

from kgen.bench.ceilings import measure_ceilings
from kgen.bench.counters import count
from kgen.bench.cuda import CudaTimer, first_call_ms, graphed, host_microseconds
from kgen.bench.record import KINDS, Ceilings, Context, Record, Row, RowTimes
from kgen.bench.rows import Block, Prepared, chosen_specs, empty_caches, prepare_rows
from kgen.bench.timing import Call, Timer, time_rounds
from kgen.checks import Candidate, PackageCandidate, verify_candidate
from kgen.geometry import geometry
from kgen.package import find_package
from kgen.reference import Parameters, chunks, draw, oracle
from kgen.spec import Spec
from kgen.verdict import CASES

DYNAMIC_BATCH = 16
BUFFERS = 3  # inputs that the calls of a row take in turn
Progress = Callable[[str], None]


@dataclass
class Lab:
    """Where a benchmark runs. The defaults are a CUDA device; tests put a CPU in its place."""

    device: str
    timer: Timer
    graphed: Callable[[Callable[[], object]], Callable[[], object]]
    host_us: Callable[[Callable[[], object]], float]
    first_ms: Callable[[Callable[[], object]], float]
    ceilings: Callable[[], Ceilings]
    candidate: Callable[[ModuleType], Candidate] = PackageCandidate
    cases: tuple[tuple[str, int], ...] = CASES


def cuda_lab(device: int = 0) -> Lab:
    """The current process on one CUDA device."""
    torch.cuda.set_device(device)
    timer = CudaTimer(f"cuda:{device}")
    return Lab(
        f"cuda:{device}", timer, graphed, host_microseconds, first_call_ms,
        lambda: measure_ceilings(timer, f"cuda:{device}"),
    )  # fmt: skip


def errors(
    spec: Spec, y: torch.Tensor, x: torch.Tensor, parameters: Parameters
) -> tuple[float, float]:
    """Largest and root-mean-square error of y against fp64."""
    biggest, squares, elements = 0.0, 0.0, 0
    for part in chunks(spec, x):
        error = (y[part].double() - oracle(spec, x[part], parameters)).abs()
        error = torch.nan_to_num(error, nan=float("inf"))  # a NaN is as wrong as can be
        biggest = max(biggest, float(error.max()))
        squares += float(error.square().sum())
        elements += error.numel()
    return biggest, (squares / elements) ** 0.5


class _Ready:
    """A row that may be timed: its callable, its inputs in turn, and what is known of it."""

    def __init__(self, row: Prepared, block: Block, xs: Sequence[torch.Tensor]) -> None:
        self.row, self.block = row, block
        self.xs = [row.arrange(x) for x in xs]
        self.facts: dict[str, Any] = dict(row.facts)

    def call(self, number: int) -> torch.Tensor:
        return self.block(self.xs[number % len(self.xs)])


def run_bench(
    spec: Spec,
    text: str,
    lab: Lab,
    context: Callable[[], Context],
    *,
    strategies: Sequence[str] | None,
    baselines: Sequence[str],
    seconds: float,
    ncu: bool = False,
    progress: Progress = lambda _: None,
) -> Record:
    """Benchmark a checked spec. text: its YAML. seconds: time limit of each of KINDS.

    Kernels that fail verification get no time. context: called when the timing is over.
    Raises: UsageError for unknown strategies and baselines.
    """
    g = geometry(spec.problem)
    N = g.N or DYNAMIC_BATCH
    specs, skipped = chosen_specs(spec, strategies)
    x, parameters = draw(spec, N, "uniform", 0, lab.device)
    prepared = prepare_rows(spec, specs, baselines, parameters)
    xs = [x, *(x.clone() for _ in range(_buffers(lab, 4 * N * g.y_elements * len(prepared)) - 1))]
    done: dict[str, Row] = {}
    ready: list[_Ready] = []
    with torch.no_grad():
        for row in prepared:
            progress(f"{row.label}: first call and verification")
            one = _first_call(row, lab, xs)
            reason = _verify(spec, row, lab, one, x, parameters)
            if reason:
                done[row.label] = Row(label=row.label, kind=row.kind, failed=reason, **one.facts)
            else:
                ready.append(one)
        times = _time_all(ready, lab, seconds, progress)
        for one in ready:
            label = one.row.label
            progress(f"{label}: checked again")
            again = errors(spec, one.call(0), x, parameters)[0]
            found: dict[str, Any] = {"recheck_error": again, **one.facts, **times[label]}
            # What was right before must be right after; kernels give the same bits.
            wrong = again != one.facts["max_error"] if one.row.kind == "kgen" else again > 1.0
            if wrong:
                for kind in KINDS:
                    found.pop(kind, None)
                found["failed"] = f"its largest error after timing is {again:.2e}"
            else:
                progress(f"{label}: host cost")
                found["host_us"] = lab.host_us(partial(one.call, 0))
            if ncu and one.row.spec is not None and not wrong:
                progress(f"{label}: ncu")
                counted = count(one.row.spec)
                found |= {"ncu": counted.counters, "launch_ns": counted.launch_ns}
            done[label] = Row(label=label, kind=one.row.kind, **found)
    progress("the speed of light")
    ceilings = lab.ceilings()
    circumstances = context()
    return Record(
        name=spec.name,
        spec=text,
        spec_hash=spec.hash(),
        x=(N, g.C_in, g.H, g.W),
        y=(N, g.C_out, g.P, g.Q),
        bytes_needed=4 * N * (g.x_elements + g.y_elements),
        flops=2 * N * g.y_elements * g.taps,
        context=circumstances.model_copy(
            update={"warnings": (*circumstances.warnings, *(f"skipped {one}" for one in skipped))}
        ),
        ceilings=ceilings,
        rows=tuple(done[row.label] for row in prepared),
    )


def _buffers(lab: Lab, output_bytes: int) -> int:
    """BUFFERS, or fewer where their graphs' outputs would not fit. output_bytes: of all rows."""
    if torch.device(lab.device).type != "cuda":
        return BUFFERS
    room = torch.cuda.mem_get_info(lab.device)[0] // 2
    return max(1, min(BUFFERS, room // max(1, output_bytes)))


def _first_call(row: Prepared, lab: Lab, xs: Sequence[torch.Tensor]) -> _Ready:
    """Make the callable with empty caches and call it once, on the clock."""
    made: list[_Ready] = []

    def first() -> None:
        made.append(_Ready(row, row.make(), xs))
        made[0].call(0)

    with empty_caches():
        took = lab.first_ms(first)
    made[0].facts["first_call_ms"] = took
    return made[0]


def _verify(
    spec: Spec,
    row: Prepared,
    lab: Lab,
    one: _Ready,
    x: torch.Tensor,
    parameters: Parameters,
) -> str:
    """Fill in the errors; why the row may not be timed, or empty."""
    if row.spec is not None:
        one.block = row.make()  # what is verified is what is timed, not the first call's copy
        package = find_package(row.spec)
        report = verify_candidate(row.spec, lab.candidate(package), lab.device, lab.cases)
        one.facts |= {
            "spec_hash": row.spec.hash(),
            "kernel_sha256": package.manifest["files"]["kernel.cu"],
            "verified_cases": len(report.cases),
        }
        if not report.passed:
            return report.summary()
    biggest, rms = errors(spec, one.call(0), x, parameters)
    one.facts |= {"max_error": biggest, "rms_error": rms}
    return "" if biggest <= 1.0 else f"its largest error is {biggest:.2e}"


def _time_all(
    ready: Sequence[_Ready], lab: Lab, seconds: float, progress: Progress
) -> dict[str, dict[str, RowTimes]]:
    """Times of every row by kind, all rows interleaved."""
    found: dict[str, dict[str, RowTimes]] = {one.row.label: {} for one in ready}
    for kind in KINDS:
        progress(f"timing {len(ready)} rows, {kind}")
        calls: dict[str, Call] = {one.row.label: one.call for one in ready}
        if kind == "graph":
            calls = {one.row.label: _replays(one, lab.graphed) for one in ready}
        timed = time_rounds(calls, lab.timer, cold=kind != "warm", seconds=seconds)
        for label, times in timed.items():
            found[label][kind] = RowTimes(**times.to_dict())  # type: ignore[arg-type]
    return found


def _replays(one: _Ready, capture: Callable[[Callable[[], object]], Callable[[], object]]) -> Call:
    """One graph for each input, replayed in turn."""
    graphs = [capture(partial(one.call, number)) for number in range(len(one.xs))]
    return lambda number: graphs[number % len(graphs)]()
