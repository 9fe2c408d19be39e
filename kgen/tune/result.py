"""What a tuning run found: a row for each candidate, the winner, and how both are shown."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import hypot
from typing import Any

from kgen.tune.devices import Where
from kgen.tune.space import Candidate, Knob, Refused, Space
from kgen.tune.task import STATUSES, TIMED, Outcome

LEAST_NOISE = 0.005  # of a time, relative: what clocks and boards differ by between two candidates
PREDICTED = "predicted"  # the status of a row that was only ranked
SHOWN = 12  # rows of the table


@dataclass(frozen=True)
class Row:
    """One candidate's end. status: of STATUSES, or `predicted`. stored: measured by an earlier run.

    Times in ms; predicted_ms for one sample where the batch is dynamic, the others for 16.
    """

    strategy: str
    schedule: dict[str, Knob]
    status: str
    reason: str
    predicted_ms: float
    is_default: bool = False
    stored: bool = False
    outcome: Outcome | None = None

    @property
    def ms(self) -> float | None:
        """Median time, None where it was not timed."""
        return self.outcome.ms if self.outcome else None

    def knobs(self) -> str:
        """The schedule without its strategy, as text."""
        rest = [f"{key} {value}" for key, value in self.schedule.items() if key != "strategy"]
        return ", ".join(rest) or "free knobs"

    def to_json(self) -> dict[str, Any]:
        """Plain values, the outcome's among the row's."""
        values = asdict(replace(self, outcome=None))
        del values["outcome"]
        measured = self.outcome.to_json() if self.outcome else {}
        hidden = ("status", "reason", "lasting")
        return values | {key: one for key, one in measured.items() if key not in hidden}


@dataclass(frozen=True)
class TuneResult:
    """What was found. rows: best first, then those that failed; refused: by the constraints.

    pruned: candidates that the cost model left out. left: those that were not reached. measured:
    evaluated by this run, the others by earlier ones. seconds: of this run.
    """

    name: str
    block: str
    where: Where | None
    rows: tuple[Row, ...]
    refused: tuple[Refused, ...]
    pruned: int
    left: int
    measured: int
    seconds: float
    notes: tuple[str, ...] = ()
    simulated: bool = False
    interrupted: bool = False

    @property
    def winner(self) -> Row | None:
        """The row to use; None where nothing was right, or nothing was measured."""
        return next((row for row in self.rows if row.status == "winner"), None)

    @property
    def counts(self) -> dict[str, int]:
        """Candidates by status; a status that no candidate has is left out."""
        found = Counter(row.status for row in self.rows)
        found["constraint"] = len(self.refused)
        return {one: found[one] for one in (*STATUSES, PREDICTED) if found[one]}

    def to_json(self) -> dict[str, Any]:
        """Plain values. What the constraints refuse is grouped by rule, with one example each."""
        return {
            "name": self.name,
            "block": self.block,
            "where": self.where.to_json() if self.where else None,
            "simulated": self.simulated,
            "interrupted": self.interrupted,
            "seconds": self.seconds,
            "counts": self.counts,
            "pruned": self.pruned,
            "left": self.left,
            "measured": self.measured,
            "notes": list(self.notes),
            "winner": self.winner.to_json() if self.winner else None,
            "rows": [row.to_json() for row in self.rows],
            "constraint": _by_rule(self.refused),
        }

    def table(self) -> str:
        """The best rows, how many ended how and why, and what to know about the figures."""
        lines = [self._title()]
        shown = [row for row in self.rows if row.status in ("winner", "slower", PREDICTED)]
        picked = shown[:SHOWN] + [row for row in shown[SHOWN:] if row.is_default]
        if picked:
            lines.append(f"{'status':11}{'ms':>9}{'error':>8}{'predicted':>11}  schedule")
        lines += [_line(row) for row in picked]
        if len(shown) > len(picked):
            lines.append(f"  and {len(shown) - len(picked)} more")
        lines += self._failures()
        listed = ", ".join(f"{count} {status}" for status, count in self.counts.items())
        lines.append(f"{listed or 'no candidates'}; the cost model left out {self.pruned}")
        if self.left:
            lines.append(f"{self.left} candidates were not reached; a rerun goes on from here")
        if self.winner:
            lines.append(f"winner: {_schedule(self.winner)}: {self.winner.reason}")
        elif not self.simulated:
            lines.append("no winner: no candidate was verified and timed")
        return "\n".join([*lines, *self.notes])

    def _title(self) -> str:
        if self.simulated:
            return (
                f"{self.name} {self.block}: ranked by the cost model alone; nothing was compiled, "
                "run or timed"
            )
        assert self.where is not None
        how = "interrupted after" if self.interrupted else "in"
        return (
            f"{self.name} {self.block} on {self.where.gpu}, driver {self.where.driver}: "
            f"{self.measured} candidates measured {how} {self.seconds:.0f} s"
        )

    def _failures(self) -> list[str]:
        """A line for each way of failing, with the reason of the first that did."""
        lines = []
        for status in STATUSES[2:-1]:
            rows = [row for row in self.rows if row.status == status]
            if rows:
                default = next((row for row in rows if row.is_default), None)
                one = default or rows[0]
                what = "the default" if default else one.knobs()
                lines.append(f"{status:11}{len(rows)}, e.g. {one.strategy}, {what}: {one.reason}")
        if self.refused:
            rules = _by_rule(self.refused)
            example = rules[0]
            lines.append(
                f"{'constraint':11}{len(self.refused)} by {len(rules)} rules, most often: "
                f"{example['reason']}"
            )
        return lines


def judge(
    space: Space, outcomes: Mapping[Candidate, Outcome], stored: frozenset[Candidate] = frozenset()
) -> tuple[Row, ...]:
    """The rows of all candidates that have an outcome: the winner, the slower, the failed."""
    timed = [one for one, outcome in outcomes.items() if outcome.status == TIMED]
    winner, why = choose(timed, outcomes)
    rows = []
    for candidate, outcome in outcomes.items():
        status, reason = outcome.status, outcome.reason
        if candidate is winner:
            status, reason = "winner", why
        elif winner is not None and status == TIMED:
            status, reason = "slower", _slower(outcome, outcomes[winner])
        rows.append(
            Row(
                strategy=candidate.strategy,
                schedule=candidate.schedule,
                status=status,
                reason=reason,
                predicted_ms=candidate.predicted_ms,
                is_default=candidate.is_default,
                stored=candidate in stored,
                outcome=outcome,
            )
        )
    order = {candidate: index for index, candidate in enumerate(space.candidates)}
    places = {schedule: index for index, schedule in enumerate(STATUSES)}
    ranked = zip(rows, outcomes, strict=True)

    def rank(pair: tuple[Row, Candidate]) -> tuple[int, float, int]:
        row, candidate = pair
        return places[row.status], row.ms or 0.0, order.get(candidate, len(order))

    return tuple(row for row, _ in sorted(ranked, key=rank))


def choose(
    timed: Sequence[Candidate], outcomes: Mapping[Candidate, Outcome]
) -> tuple[Candidate | None, str]:
    """The fastest candidate, or the default where the two cannot be told apart; and why."""
    if not timed:
        return None, ""
    best = min(timed, key=lambda one: outcomes[one].ms or 0.0)
    default = next((one for one in timed if one.is_default), None)
    own = outcomes[best].ms or 0.0
    if default is None:
        return best, f"{own:.4g} ms; the default has no time"
    other = outcomes[default].ms or 0.0
    if default is best:
        return best, f"{own:.4g} ms; the default schedule is the fastest"
    if is_alike(outcomes[best], outcomes[default]):
        return default, (
            f"{other:.4g} ms; the default schedule, which the measurement cannot tell from the "
            f"fastest, {own:.4g} ms"
        )
    return best, f"{own:.4g} ms; the default takes {other:.4g} ms, {other / own:.3g} x as long"


def is_alike(fast: Outcome, slow: Outcome) -> bool:
    """Whether the difference of two medians is within twice its standard error."""
    fast_ms, slow_ms = fast.ms or 0.0, slow.ms or 0.0
    error = hypot((fast.relative_error or 0.0) * fast_ms, (slow.relative_error or 0.0) * slow_ms)
    return slow_ms - fast_ms <= max(2 * error, LEAST_NOISE * fast_ms)


def _slower(outcome: Outcome, winner: Outcome) -> str:
    own, best = outcome.ms or 0.0, winner.ms or 1.0
    if own < best or is_alike(winner, outcome):
        return "as fast as the winner, within the noise"
    return f"{100 * (own / best - 1):.1f} % slower than the winner"


def _schedule(row: Row) -> str:
    return f"{row.strategy}, {row.knobs()}" + (" (default)" if row.is_default else "")


def _line(row: Row) -> str:
    outcome = row.outcome or Outcome(PREDICTED)
    ms = "-" if outcome.ms is None else f"{outcome.ms:.4g}"
    error = outcome.relative_error
    shown = "-" if error is None else f"{100 * error:.2f} %"
    stored = "  (measured before)" if row.stored else ""
    return f"{row.status:11}{ms:>9}{shown:>8}{row.predicted_ms:>11.4g}  {_schedule(row)}{stored}"


def _by_rule(refused: Sequence[Refused]) -> list[dict[str, Any]]:
    """Refused schedules by the rule they break, the most frequent first.

    Messages that differ in numbers alone are of one rule.
    """
    groups: dict[tuple[str, str], list[Refused]] = {}
    for one in refused:
        groups.setdefault((one.strategy, re.sub(r"\d+", "#", one.reason)), []).append(one)
    return [
        {
            "strategy": ones[0].strategy,
            "reason": ones[0].reason,
            "count": len(ones),
            "schedule": ones[0].schedule,
        }
        for ones in sorted(groups.values(), key=len, reverse=True)
    ]
