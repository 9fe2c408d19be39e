"""The driver: asks the search, hands tasks to executors, keeps what comes back.

It knows neither processes nor GPUs. `executors(None)` gives it an executor to compile on,
`executors(index)` one for each device, and `evaluate` is what runs there.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Executor, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace

from kgen.errors import KgenError, UsageError
from kgen.spec import Spec
from kgen.tune.devices import Where
from kgen.tune.result import TuneResult, judge
from kgen.tune.search import Search
from kgen.tune.space import Candidate, Space, block_hash, with_schedule
from kgen.tune.store import Store
from kgen.tune.task import COMPILED, TIMED, Outcome, Step, Task, evaluate, first_line, kernel_sha256
from kgen.tune.workers import StartError, TimeLimitError

POLL_SECONDS = 0.2  # between looks at the clock and at other tuners' results

Executors = Callable[[int | None], Executor]


@dataclass(frozen=True)
class Progress:
    """What a display shows. best: ms; seconds_left: of the budget."""

    done: int
    total: int
    best: float | None
    seconds_left: float


@dataclass
class Settings:
    """What a driver needs beside the space, the store and the search.

    devices: an index for each. budget: s. ahead: candidates that may be compiling or compiled and
    waiting, beside one for each device. task: the pattern of every task.
    """

    devices: Sequence[int]
    budget: float
    task: Task
    ahead: int = 1
    executors: Executors | None = None
    evaluate: Callable[[Task], Outcome] = evaluate
    clock: Callable[[], float] = time.monotonic
    progress: Callable[[Progress], None] = lambda _: None
    start: float | None = None  # when the budget began; None for now


def run(space: Space, search: Search, store: Store, where: Where, settings: Settings) -> TuneResult:
    """Evaluate candidates until all are known or the budget is used up.

    Ctrl-C ends it early, with the result so far. Raises: UsageError where nothing can run here.
    """
    return _Driver(space, search, store, settings).run(space.spec, where)


@dataclass
class _Flight:
    """A candidate on its way. compiled: what the first step found."""

    candidate: Candidate
    step: Step
    device: int | None = None
    compiled: Outcome | None = None


class _Driver:
    def __init__(self, space: Space, search: Search, store: Store, settings: Settings) -> None:
        assert settings.executors is not None
        self._space, self._search, self._store, self._set = space, search, store, settings
        self._clock = settings.clock
        self._start = self._clock() if settings.start is None else settings.start
        self._open: dict[int | None, Executor] = {}
        self._flights: dict[Future[Outcome], _Flight] = {}
        self._ready: deque[_Flight] = deque()  # compiled, waiting for a device
        self._free = deque(dict.fromkeys(settings.devices))
        self._elsewhere: list[Candidate] = []  # another tuner is at them
        self._outcomes: dict[Candidate, Outcome] = {}
        self._stored: set[Candidate] = set()
        self._measured, self._exhausted, self._interrupted = 0, False, False

    def run(self, spec: Spec, where: Where) -> TuneResult:
        try:
            with _ctrl_c(self._stop):
                self._know()
                self._loop()
        except KeyboardInterrupt:
            self._interrupted = True
        finally:
            for executor in self._open.values():
                executor.shutdown(wait=False, cancel_futures=True)
            self._store.close()
        notes = [one for one in (self._search.note, self._store.warning()) if one]
        return TuneResult(
            name=spec.name,
            block=block_hash(spec),
            where=where,
            rows=judge(self._space, self._outcomes, frozenset(self._stored)),
            refused=self._space.refused,
            pruned=len(self._space.pruned),
            left=len(self._space.candidates) - len(self._outcomes),
            measured=self._measured,
            seconds=self._clock() - self._start,
            notes=tuple(notes),
            interrupted=self._interrupted,
        )

    def _loop(self) -> None:
        while self._left() > 0 and not self._interrupted:
            self._look_elsewhere()
            self._measure_ready()
            self._compile_ahead()
            self._tell_progress()
            if not self._flights:
                if not self._elsewhere:
                    return
                time.sleep(POLL_SECONDS)  # the last ones are another tuner's
                continue
            timeout = min(POLL_SECONDS, max(0.0, self._left()))
            done, _ = wait(self._flights, timeout=timeout, return_when=FIRST_COMPLETED)
            for future in [one for one in self._flights if one in done]:  # as submitted
                self._land(future)
        for future in [one for one in self._flights if one.done()]:
            self._land(future)  # what ended while the last ones were written
        self._tell_progress()

    def _stop(self) -> None:
        self._interrupted = True

    def _left(self) -> float:
        """Seconds of the budget that are left."""
        return self._start + self._set.budget - self._clock()

    def _know(self) -> None:
        """Take what the store holds about candidates that have no outcome yet."""
        if not self._store.refresh():
            return
        for candidate in self._space.candidates:
            if candidate not in self._outcomes:
                self._take_stored(candidate)

    def _take_stored(self, candidate: Candidate) -> bool:
        outcome = self._store.get(candidate)
        if outcome is None:
            return False
        self._stored.add(candidate)
        self._finish(candidate, outcome)
        return True

    def _finish(self, candidate: Candidate, outcome: Outcome) -> None:
        self._outcomes[candidate] = outcome
        self._search.tell(candidate, outcome)

    def _look_elsewhere(self) -> None:
        """Results of other tuners, and candidates that one of them gave up."""
        if not self._elsewhere:
            return
        self._store.refresh()
        for candidate in list(self._elsewhere):
            if self._take_stored(candidate):
                self._elsewhere.remove(candidate)
            elif not self._is_full() and self._store.claim(candidate):
                self._elsewhere.remove(candidate)
                self._begin(candidate)

    def _is_full(self) -> bool:
        waiting = len(self._ready) + sum(one.step == "compile" for one in self._flights.values())
        return waiting >= self._set.ahead + len(self._free)

    def _compile_ahead(self) -> None:
        while not self._exhausted and not self._is_full():
            candidate = self._search.ask()
            if candidate is None:
                self._exhausted = True
            elif not self._store.claim(candidate):
                self._elsewhere.append(candidate)
            else:
                self._begin(candidate)

    def _begin(self, candidate: Candidate) -> None:
        """Start on a candidate that this tuner has claimed, unless it is known meanwhile."""
        self._store.refresh()
        if self._take_stored(candidate):
            self._store.release(candidate)
        else:
            self._submit(_Flight(candidate, "compile"))

    def _measure_ready(self) -> None:
        while self._ready and self._free:
            flight = self._ready.popleft()
            self._submit(replace(flight, step="measure", device=self._free.popleft()))

    def _submit(self, flight: _Flight) -> None:
        if not self._open:  # all at once: devices get ready while the first candidate is compiled
            assert self._set.executors is not None
            for index in (None, *self._set.devices):
                self._open[index] = self._set.executors(index)
        task = replace(
            self._set.task,
            step=flight.step,
            schedule=flight.candidate.schedule,
            device=0 if flight.device is None else flight.device,
        )
        future = self._open[flight.device].submit(self._set.evaluate, task)
        self._flights[future] = flight

    def _land(self, future: Future[Outcome]) -> None:
        """Take a step's outcome: on to the next step, or the candidate's end."""
        flight = self._flights.pop(future)
        outcome = self._outcome(flight, future)
        if flight.device is not None:
            self._free.append(flight.device)
        if outcome.status == COMPILED:
            self._ready.append(replace(flight, compiled=outcome))
            return
        if flight.compiled is not None:
            outcome = replace(
                outcome,
                registers=flight.compiled.registers,
                spills=flight.compiled.spills,
                compile_seconds=flight.compiled.compile_seconds,
                kernel_sha256=outcome.kernel_sha256 or flight.compiled.kernel_sha256,
            )
        if outcome.kernel_sha256 is None:
            spec = with_schedule(self._space.spec, flight.candidate.schedule)
            outcome = replace(outcome, kernel_sha256=kernel_sha256(spec))
        self._measured += 1
        self._store.add(flight.candidate, outcome)
        self._store.release(flight.candidate)
        self._finish(flight.candidate, outcome)

    def _outcome(self, flight: _Flight, future: Future[Outcome]) -> Outcome:
        """What a step found; what went wrong with it, as an outcome of its candidate."""
        try:
            return future.result()
        except (StartError, CancelledError) as error:
            raise UsageError(first_line(error)) from None
        except KgenError:  # of this machine or of kgen, not of the candidate
            raise
        except TimeLimitError as error:
            what = "compiling" if flight.step == "compile" else "verifying and timing"
            return Outcome("timeout", f"{what} did not end: {first_line(error)}")
        except Exception as error:
            status = "compile" if flight.step == "compile" else "wrong"
            reason = f"{'did not compile' if status == 'compile' else 'did not run'}: "
            of_machine = isinstance(error, (OSError, MemoryError))
            lasting = bool(getattr(error, "lasting", not of_machine))
            return Outcome(status, reason + first_line(error), lasting=lasting)

    def _tell_progress(self) -> None:
        times = [one.ms for one in self._outcomes.values() if one.status == TIMED and one.ms]
        self._set.progress(
            Progress(
                done=len(self._outcomes),
                total=len(self._space.candidates),
                best=min(times, default=None),
                seconds_left=max(0.0, self._left()),
            )
        )


@contextmanager
def _ctrl_c(stop: Callable[[], None]) -> Iterator[None]:
    """Let the first Ctrl-C only ask to stop, so that it cannot fall between measuring and writing.

    The second one raises KeyboardInterrupt. In threads other than the first, Ctrl-C stays as it is.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(*_: object) -> None:
        stop()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
