"""Repeats calls in interleaved rounds until their medians are known well enough."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Protocol

TARGET = 0.005  # relative error of a median at which a row has been measured long enough
LEAST_ROUNDS, MOST_ROUNDS = 100, 2000
DYNAMIC_BATCH = 16  # samples that a block with a dynamic batch is timed at

# What is timed: called with the number of the round, by which it may choose its buffers.
Call = Callable[[int], object]


@dataclass(frozen=True)
class Times:
    """Times of one row in ms.

    relative_error: standard error of the median over the median, as for a normal distribution
    whose quartiles are those measured, which outliers do not move: 1.2533 sigma / sqrt(n) with
    sigma = (p75 - p25) / 1.349 (Kendall and Stuart, "The Advanced Theory of Statistics", 14.12).
    """

    median: float
    p20: float
    p80: float
    rounds: int
    relative_error: float

    def to_dict(self) -> dict[str, float]:
        """The fields by name, for JSON."""
        return asdict(self)


def quantile(ordered: Sequence[float], share: float) -> float:
    """Quantile of sorted values, by linear interpolation between neighbours."""
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def summarise(values: Sequence[float]) -> Times:
    """Median, quantiles and the median's relative error of at least one time in ms."""
    ordered = sorted(values)
    median = statistics.median(ordered)
    sigma = (quantile(ordered, 0.75) - quantile(ordered, 0.25)) / 1.349
    error = 1.2533 * sigma / len(ordered) ** 0.5
    return Times(
        median,
        quantile(ordered, 0.2),
        quantile(ordered, 0.8),
        len(ordered),
        error / median if median > 0 else 0.0,
    )


class Timer(Protocol):
    """Takes the time of one call."""

    def time(self, call: Callable[[], object], *, cold: bool = False) -> float:
        """Milliseconds of one call on the device. cold: flush the caches before it."""


def time_rounds(
    rows: Mapping[str, Call],
    timer: Timer,
    *,
    cold: bool,
    seconds: float,
    target: float = TARGET,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Times]:
    """Every row once a round, so that what drifts hits all rows alike.

    Ends when the median of every row has a relative error below `target` after LEAST_ROUNDS rounds,
    after MOST_ROUNDS, or after `seconds`, but never before three rounds. cold: flush the caches
    before every call.
    """
    for call in rows.values():  # two warm-up calls each, outside all figures
        call(0)
        call(1)
    times: dict[str, list[float]] = {label: [] for label in rows}
    start = clock()
    for number in range(MOST_ROUNDS):
        for label, call in rows.items():
            times[label].append(timer.time(partial(call, number), cold=cold))
        late = clock() - start > seconds
        if number + 1 >= 3 and late:
            break
        if number + 1 >= LEAST_ROUNDS and all(
            summarise(values).relative_error < target for values in times.values()
        ):
            break
    return {label: summarise(values) for label, values in times.items()}
