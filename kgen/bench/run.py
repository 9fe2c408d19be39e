"""One benchmark: verify, time, check again, and say under which circumstances."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, Protocol

import torch

from kgen.bench.ceilings import measure_ceilings
from kgen.bench.counters import count
from kgen.bench.cuda import CudaTimer, first_call_ms, graphed, host_microseconds, poisoned_replay
from kgen.bench.record import KINDS, Ceilings, Context, Record, Row, RowTimes
from kgen.bench.rows import Block, Prepared, chosen_specs, empty_caches, prepare_rows
from kgen.bench.timing import DYNAMIC_BATCH, Call, Timer, time_rounds
from kgen.checks import Candidate, PackageCandidate, same_bits, verify_candidate
from kgen.errors import UsageError
from kgen.geometry import geometry
from kgen.package import find_package
from kgen.reference import Parameters, chunks, draw, oracle
from kgen.spec import Spec
from kgen.verdict import CASES

BUFFERS = 3  # inputs that the calls of a row take in turn
NEAR = 0.01  # how far a baseline's replay may be from a call: it may choose another algorithm
Progress = Callable[[str], None]


@dataclass
class Lab:
    """Where a benchmark runs. The defaults are a CUDA device; tests put a CPU in its place."""

    device: str
    timer: Timer
    graphed: Callable[[Callable[[], torch.Tensor]], Callable[[], torch.Tensor]]
    host_us: Callable[[Callable[[], object]], float]
    first_ms: Callable[[Callable[[], object]], float]
    ceilings: Callable[[], Ceilings]
    candidate: Callable[[ModuleType], Candidate] = PackageCandidate
    cases: tuple[tuple[str, int], ...] = CASES


class Watch(Protocol):
    """Looks at what surrounds the timing."""

    def timing_begins(self) -> None:
        """Called before the first timed call."""

    def timing_ended(self) -> Context:
        """Called after the last one, at once."""


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


def digest(y: torch.Tensor) -> str:
    """Of a tensor's bits, SHA-256 in hexadecimal."""
    return hashlib.sha256(y.detach().contiguous().view(torch.uint8).cpu().numpy().data).hexdigest()


class _Entry:
    """A row on its way: its callable, its inputs in turn, and what is known of it.

    failed: why it gets no times, or empty. first: of the bits of a kernel's output for the first
    input. graphs: a replay for each input.
    """

    def __init__(self, row: Prepared, xs: Sequence[torch.Tensor]) -> None:
        self.row, self.xs = row, xs
        self.block: Block | None = None
        self.facts: dict[str, Any] = dict(row.facts)
        self.times: dict[str, RowTimes] = {}
        self.failed, self.first = "", ""
        self.graphs: list[Callable[[], torch.Tensor]] = []

    @property
    def is_kernel(self) -> bool:
        return self.row.kind == "kgen"

    def call(self, number: int) -> torch.Tensor:
        assert self.block is not None
        return self.block(self.xs[number % len(self.xs)])

    def replay(self, number: int) -> torch.Tensor:
        return self.graphs[number % len(self.graphs)]()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """What goes wrong in here ends this row, not the benchmark; but for the user's errors."""
        try:
            yield
        except UsageError:
            raise
        except Exception as error:
            reason = (str(error).strip().splitlines() or [""])[0]
            self.failed = f"{type(error).__name__}: {reason}"

    def to_row(self) -> Row:
        found: dict[str, Any] = self.facts | ({} if self.failed else self.times)
        return Row(label=self.row.label, kind=self.row.kind, failed=self.failed or None, **found)


def _standing(entries: Sequence[_Entry]) -> list[_Entry]:
    """The rows that nothing is known against."""
    return [one for one in entries if not one.failed]


def run_bench(
    spec: Spec,
    text: str,
    lab: Lab,
    watch: Watch,
    *,
    strategies: Sequence[str] | None,
    baselines: Sequence[str],
    seconds: float,
    ncu: bool = False,
    progress: Progress = lambda _: None,
) -> Record:
    """Benchmark a checked spec. text: its YAML. seconds: time limit of each of KINDS.

    A row that raises, or a kernel that fails verification, gets no time and the reason.
    Raises: UsageError for unknown strategies and baselines.
    """
    g = geometry(spec.problem)
    N = g.N or DYNAMIC_BATCH
    specs, skipped = chosen_specs(spec, strategies)
    warnings = [f"skipped {one}" for one in skipped]
    x, parameters = draw(spec, N, "uniform", 0, lab.device)
    prepared = prepare_rows(spec, specs, baselines, parameters)
    xs = [x, *(x.clone() for _ in range(_buffers(lab, 4 * N * g.y_elements * len(prepared)) - 1))]
    entries = [_Entry(row, xs) for row in prepared]
    with torch.no_grad():
        for one in entries:
            progress(f"{one.row.label}: first call and verification")
            with one.watched():
                _first_call(one, lab)
                _verify(spec, one, lab, x, parameters)
        watch.timing_begins()
        _time_all(entries, lab, seconds, progress)
        context = watch.timing_ended()  # while the device is as it was
        for one in _standing(entries):
            progress(f"{one.row.label}: checked again")
            with one.watched():
                _check_again(spec, one, x, parameters)
        for one in _standing(entries):
            progress(f"{one.row.label}: host cost{' and ncu' if ncu else ''}")
            with one.watched():
                one.facts["host_us"] = lab.host_us(partial(one.call, 0))
            if ncu and one.row.spec is not None:
                try:
                    counted = count(one.row.spec, lab.device)
                except UsageError as error:
                    warnings.append(f"no counters of {one.row.label}: {error}")
                else:
                    one.facts |= {"ncu": counted.counters, "launch_ns": counted.launch_ns}
    progress("the speed of light")
    return Record(
        name=spec.name,
        spec=text,
        spec_hash=spec.hash(),
        x=(N, g.C_in, g.H, g.W),
        y=(N, g.C_out, g.P, g.Q),
        bytes_needed=4 * N * (g.x_elements + g.y_elements),
        flops=2 * N * g.y_elements * g.taps,
        context=context.model_copy(update={"warnings": (*context.warnings, *warnings)}),
        ceilings=lab.ceilings(),
        rows=tuple(one.to_row() for one in entries),
    )


def _buffers(lab: Lab, output_bytes: int) -> int:
    """BUFFERS, or fewer where their graphs' outputs would not fit. output_bytes: of all rows."""
    if torch.device(lab.device).type != "cuda":
        return BUFFERS
    room = torch.cuda.mem_get_info(lab.device)[0] // 2
    return max(1, min(BUFFERS, room // max(1, output_bytes)))


def _first_call(one: _Entry, lab: Lab) -> None:
    """Make the callable with empty caches and call it once, on the clock."""

    def first() -> None:
        one.block = one.row.make()
        one.xs = [one.row.arrange(x) for x in one.xs]
        one.call(0)

    with empty_caches():
        one.facts["first_call_ms"] = lab.first_ms(first)


def _verify(spec: Spec, one: _Entry, lab: Lab, x: torch.Tensor, parameters: Parameters) -> None:
    """Fill in the errors, and why the row may not be timed."""
    row = one.row
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
            one.failed = report.summary()
            return
    y = one.call(0)
    biggest, rms = errors(spec, y, x, parameters)
    one.facts |= {"max_error": biggest, "rms_error": rms}
    if one.is_kernel:
        one.first = digest(y)
    if biggest > 1.0:
        one.failed = f"its largest error is {biggest:.2e}"


def _time_all(entries: Sequence[_Entry], lab: Lab, seconds: float, progress: Progress) -> None:
    """Times of every row by kind, all rows interleaved."""
    for kind in KINDS:
        if kind == "graph":
            for one in _standing(entries):
                with one.watched():
                    one.graphs = [
                        lab.graphed(partial(one.call, number)) for number in range(len(one.xs))
                    ]
        rows = {one.row.label: one for one in _standing(entries)}
        progress(f"timing {len(rows)} rows, {kind}")
        calls: dict[str, Call] = {
            label: one.replay if kind == "graph" else one.call for label, one in rows.items()
        }
        timed = time_rounds(calls, lab.timer, cold=kind != "warm", seconds=seconds)
        for label, times in timed.items():
            rows[label].times[kind] = RowTimes(**times.to_dict())  # type: ignore[arg-type]


def _check_again(spec: Spec, one: _Entry, x: torch.Tensor, parameters: Parameters) -> None:
    """What was right before must be right after, in calls and in replays of graphs.

    Kernels give the same bits. A replay writes to memory that was poisoned before it.
    """
    y = one.call(0)
    one.facts["recheck_error"] = biggest = errors(spec, y, x, parameters)[0]
    if one.is_kernel and digest(y) != one.first:
        one.failed = f"its output after timing differs; its largest error is {biggest:.2e}"
    elif biggest > 1.0:
        one.failed = f"its largest error after timing is {biggest:.2e}"
    else:
        replayed = poisoned_replay(partial(one.replay, 0))
        if one.is_kernel:
            right = same_bits(replayed, y)
        else:
            right = float((replayed - y).abs_().max()) <= NEAR
        if not right:
            one.failed = "a replay of its graph gives another output than a call"
    one.graphs = []
