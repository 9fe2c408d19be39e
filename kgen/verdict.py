"""The verdict of a verification: one result a case, and the report over all of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kgen.math_kinds import MATHS

ATOL = RTOL = 1e-4  # against the fp64 oracle, on every element
LOOSE_ATOL = LOOSE_RTOL = 2e-2  # where the spec asks for less than fp32's accuracy, see tolerance()


def tolerance(math: str | None) -> tuple[float, float]:
    """(atol, rtol) that a spec is held to. `math: tf32` alone is held to less, and says so."""
    kind = MATHS.get(math or "")
    return (ATOL, RTOL) if kind is None or kind.tolerance_met else (LOOSE_ATOL, LOOSE_RTOL)


# Distribution of x and seed; `kgen.reference.DISTRIBUTIONS` says what the names mean.
CASES: tuple[tuple[str, int], ...] = (
    ("uniform", 0),
    ("uniform", 1),
    ("normal x3", 2),
    ("x0.01", 3),
    ("x-1", 4),
    ("constant", 5),
    ("one huge value", 6),
    ("large weights", 7),
)


@dataclass(frozen=True)
class CaseResult:
    """One distribution and seed. Errors are absolute, against fp64; reason is empty if passed.
    constant: the oracle's output is the same everywhere, so that the case shows little. target:
    what was compiled for, where several are run one after the other."""

    distribution: str
    seed: int
    batch: int
    passed: bool
    reason: str
    max_error: float | None = None
    rms_error: float | None = None
    eager_max_error: float | None = None
    eager_rms_error: float | None = None
    ill_conditioned: bool = False
    constant: bool = False
    target: str | None = None


@dataclass(frozen=True)
class Report:
    """The verdict on one spec: passed only if every case did."""

    name: str
    spec_hash: str
    strategy: str
    device: str
    atol: float
    rtol: float
    cases: tuple[CaseResult, ...]
    ran: str = ""  # sizes that were run, where they may differ from the spec's
    seconds: float | None = None
    trace: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """True if all cases passed, and at least one of them shows something."""
        shown = any(not case.constant for case in self.cases)
        return shown and all(case.passed for case in self.cases)

    @property
    def max_error(self) -> float:
        """Largest error of the kernel over all cases that got as far as values."""
        return max((case.max_error for case in self.cases if case.max_error is not None), default=0)

    def headline(self) -> str:
        """One line: how many cases passed, and the errors of the kernel and of eager fp32."""
        passed = sum(case.passed for case in self.cases)
        eager = max((case.eager_max_error or 0.0 for case in self.cases), default=0.0)
        ill = sum(case.ill_conditioned for case in self.cases)
        tail = f", {ill} ill-conditioned (eager fp32 misses the tolerance there)" if ill else ""
        where = f"{self.device}, {self.ran}" if self.ran else self.device
        return (
            f"{passed} of {len(self.cases)} cases passed on {where}: max error "
            f"{self.max_error:.2e} (eager fp32 {eager:.2e}) against fp64, tolerance "
            f"{self.atol:g} + {self.rtol:g} x |y|{tail}"
        )

    def summary(self) -> str:
        """The failures, one line each."""
        wrong = [
            f"{self.name}: wrong on {case.distribution}, seed {case.seed}: {case.reason}"
            for case in self.cases
            if not case.passed
        ]
        if not wrong and not self.passed:
            wrong = [f"{self.name}: proves nothing: the oracle's output is constant in every case"]
        return "\n".join(wrong)

    def table(self) -> str:
        """A line a case: kernel and eager fp32 side by side, errors against fp64."""

        def number(value: float | None) -> str:
            return "-" if value is None else f"{value:.2e}"

        wide = 10 if len({case.target for case in self.cases}) > 1 else 0
        errors = f"{'max error':>12}{'rms':>11}{'eager max':>12}{'rms':>11}"
        head = f"{'target'[:wide].ljust(wide)}{'x':16}{'seed':>5}{'N':>6}{errors}"
        rows = [
            f"{(case.target or '')[:wide].ljust(wide)}{case.distribution:16}{case.seed:>5}"
            f"{case.batch:>6}{number(case.max_error):>12}{number(case.rms_error):>11}"
            f"{number(case.eager_max_error):>12}{number(case.eager_rms_error):>11}"
            f"  {_verdict(case)}"
            for case in self.cases
        ]
        title = f"{self.name} {self.spec_hash} {self.strategy}"
        return "\n".join([title, head, *rows, self.headline()])

    def to_json(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        return {**asdict(self), "passed": self.passed}


def _verdict(case: CaseResult) -> str:
    if not case.passed:
        return f"WRONG: {case.reason}"
    if case.constant:
        return "ok, but constant"
    return "ok, ill-conditioned" if case.ill_conditioned else "ok"
