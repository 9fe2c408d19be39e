"""In which order candidates are measured.

A small space is measured whole, the best predicted first. In a large one the tree-structured Parzen
estimator of optuna (Bergstra et al., "Algorithms for Hyper-Parameter Optimization", 2011) proposes
what to measure next, after the best predictions of each strategy have been measured.
"""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from kgen.tune.space import Candidate, Knob, Space
from kgen.tune.task import TIMED, Outcome

SMALL = 64  # candidates up to which a space is measured whole
SEEDS = 16  # of the best predictions, before the sampler proposes


class Search(Protocol):
    """Says what to evaluate next. note: what the user should know about it, or empty."""

    note: str

    def ask(self) -> Candidate | None:
        """A candidate that was neither asked for nor told yet; None when all were."""

    def tell(self, candidate: Candidate, outcome: Outcome) -> None:
        """What became of a candidate, also of one that was not asked for."""


MakeSearch = Callable[[Space, int], Search]


def make_search(space: Space, seed: int = 0, small: int = SMALL) -> Search:
    """The search that suits a space. Without optuna: by prediction, with a note that says so."""
    if len(space.candidates) <= small:
        return ByPrediction(space)
    try:
        return Sampled(space, seed)
    except ImportError:
        search = ByPrediction(space)
        search.note = (
            f"{len(space.candidates)} candidates are measured in the order of their predictions; "
            "with optuna (pip install 'kgen[tune]') measurements guide the search"
        )
        return search


class ByPrediction:
    """The default schedule, then the others by predicted time; ties in the space's order."""

    def __init__(self, space: Space) -> None:
        first, *rest = space.candidates
        self._left = [first, *sorted(rest, key=lambda one: one.predicted_ms)]
        self._left.reverse()
        self._seen: set[Candidate] = set()
        self.note = ""

    def ask(self) -> Candidate | None:
        """The next one."""
        while self._left:
            candidate = self._left.pop()
            if candidate not in self._seen:
                self._seen.add(candidate)
                return candidate
        return None

    def tell(self, candidate: Candidate, outcome: Outcome) -> None:
        """Only notes that it need not be asked for."""
        self._seen.add(candidate)


class Sampled:
    """The default, the best predictions of each strategy, then what optuna's TPE proposes.

    The estimator sees a knob as its place among the knob's values, and the logarithm of the time.
    What it proposes need not be legal, nor new: the nearest candidate that is both is taken.
    Raises: ImportError without optuna.
    """

    def __init__(self, space: Space, seed: int = 0, seeds: int = SEEDS) -> None:
        optuna: Any = importlib.import_module("optuna")
        self._optuna = optuna
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        with warnings.catch_warnings():  # `group` counts as experimental
            warnings.simplefilter("ignore")
            sampler = optuna.samplers.TPESampler(
                seed=seed, multivariate=True, group=True, n_startup_trials=1
            )
        self._study = optuna.create_study(sampler=sampler)
        self._axes = {
            strategy: {knob: values for knob, values in axes.items() if len(values) > 1}
            for strategy, axes in space.axes.items()
            if any(one.strategy == strategy and one.point for one in space.candidates)
        }
        self._left = dict.fromkeys(space.candidates)  # in order; what was not asked for or told
        self._places = {one: self._place(one) for one in space.candidates if one.point}
        self._seeds = _seeds(space, seeds)
        self.note = f"search over {len(space.candidates)} candidates: optuna's TPE, seed {seed}"

    def ask(self) -> Candidate | None:
        """A seed, while there are some; then the candidate nearest to the proposal."""
        while self._seeds:
            candidate = self._seeds.pop()
            if candidate in self._left:
                del self._left[candidate]
                return candidate
        if not self._left:
            return None
        candidate = self._nearest(*self._proposal())
        del self._left[candidate]
        return candidate

    def tell(self, candidate: Candidate, outcome: Outcome) -> None:
        """Hand a measurement to the estimator; one that failed counts as worse than all others."""
        self._left.pop(candidate, None)
        if candidate not in self._places:  # on no axis
            return
        right = outcome.status == TIMED and outcome.ms is not None
        params, distributions = self._trial(candidate)
        self._study.add_trial(
            self._optuna.trial.create_trial(
                state=getattr(self._optuna.trial.TrialState, "COMPLETE" if right else "PRUNED"),
                params=params,
                distributions=distributions,
                value=math.log(outcome.ms) if right and outcome.ms is not None else None,
            )
        )

    def _proposal(self) -> tuple[str, dict[str, int]]:
        """A strategy and the place of each knob, as the estimator likes them."""
        trial = self._study.ask()
        strategy = trial.suggest_categorical("strategy", sorted(self._axes))
        places = {
            knob: trial.suggest_int(f"{strategy}.{knob}", 0, len(values) - 1)
            for knob, values in self._axes[strategy].items()
        }
        # What is measured is told as a trial of its own, with the knobs that were measured.
        self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
        return strategy, places

    def _nearest(self, strategy: str, places: dict[str, int]) -> Candidate:
        """The candidate left that is nearest, each knob's range counting as 1."""
        steps = {knob: len(values) - 1 for knob, values in self._axes[strategy].items()}

        def distance(one: Candidate) -> tuple[float, float]:
            own = self._places[one]
            far = sum(abs(own[knob] - place) / steps[knob] for knob, place in places.items())
            return far, one.predicted_ms

        of_strategy = [one for one in self._left if one.strategy == strategy and one.point]
        if of_strategy:
            return min(of_strategy, key=distance)
        return min(self._left, key=lambda one: one.predicted_ms)

    def _place(self, candidate: Candidate) -> dict[str, int]:
        point: dict[str, Knob] = dict(candidate.point)
        axes = self._axes[candidate.strategy]
        return {knob: values.index(point[knob]) for knob, values in axes.items()}

    def _trial(self, candidate: Candidate) -> tuple[dict[str, Any], dict[str, Any]]:
        distributions = self._optuna.distributions
        params: dict[str, Any] = {"strategy": candidate.strategy}
        kinds = {"strategy": distributions.CategoricalDistribution(sorted(self._axes))}
        for knob, place in self._places[candidate].items():
            name = f"{candidate.strategy}.{knob}"
            params[name] = place
            top = len(self._axes[candidate.strategy][knob]) - 1
            kinds[name] = distributions.IntDistribution(0, top)
        return params, kinds


def _seeds(space: Space, count: int) -> list[Candidate]:
    """The default and the best predictions, one strategy after the other; the first one last."""
    first, *rest = space.candidates
    by_strategy: dict[str, list[Candidate]] = {}
    for one in sorted(rest, key=lambda one: one.predicted_ms):
        by_strategy.setdefault(one.strategy, []).append(one)
    chosen = [first, *_in_turn(by_strategy.values())][:count]
    return chosen[::-1]


def _in_turn(queues: Iterable[list[Candidate]]) -> list[Candidate]:
    """The first of every queue, then the second of every queue, and so on."""
    lists = list(queues)
    longest = max(map(len, lists), default=0)
    return [one[index] for index in range(longest) for one in lists if index < len(one)]
