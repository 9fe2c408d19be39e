"""The tuner's driver with executors and evaluations that are faked: no GPU, known times."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import python, spec_of

from kgen.errors import UsageError
from kgen.tune import simulate, tune
from kgen.tune.devices import Device, choose_devices
from kgen.tune.result import choose, is_alike
from kgen.tune.search import ByPrediction
from kgen.tune.space import Candidate, enumerate_space, schedule_key
from kgen.tune.task import STATUSES, Outcome, Task, evaluate, kernel_sha256
from kgen.tune.workers import StartError, TimeLimitError

GPU = Device(0, "Fake GPU", "uuid-0", "sm_90a", "1.0", "13.0")
# Hybrid's times by its threads, ms; the default, two_kernel, takes 0.9.
TIMES = {threads: 0.2 + 0.1 * index for index, threads in enumerate((256, 512, 128, 384, 192, 64))}


def small():
    """A spec with eleven candidates, if hybrid alone is asked for."""
    return spec_of()


def time_of(schedule) -> float:
    """ms of a schedule of `small()`."""
    if schedule["strategy"] != "hybrid":
        return 0.9
    return TIMES.get(schedule["threads"], 2.0 + schedule["threads"] / 1e4)


def timed(ms: float, error: float = 0.001) -> Outcome:
    return Outcome("timed", ms=ms, p20=ms, p80=ms, relative_error=error, rounds=10, max_error=1e-6)


def fake(task: Task) -> Outcome:
    """An evaluation that knows its time without a kernel."""
    if task.step == "compile":
        return Outcome("compiled", registers=64, spills=0, compile_seconds=0.1)
    return timed(time_of(task.schedule))


class Inline(Executor):
    """Runs a task where it is submitted."""

    def __init__(self) -> None:
        self.ended = False

    def submit(self, fn, /, *args, **kwargs):
        future: Future = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future

    def shutdown(self, wait=True, *, cancel_futures=False):
        self.ended = True


def run_tune(tmp_path: Path, evaluator=fake, **options):
    """Tune `small()` over hybrid with fakes; `options` replace what `tune` is given."""
    given = {
        "strategies": ["hybrid"],
        "store": tmp_path / "store.jsonl",
        "found": [GPU],
        "executors": lambda _: Inline(),
        "evaluator": evaluator,
        "budget": 100.0,
        **options,
    }
    return tune(small(), **given)


class Recorder:
    """An evaluation that notes what it was given."""

    def __init__(self, inner=fake):
        self.inner, self.tasks = inner, []

    def __call__(self, task):
        self.tasks.append(task)
        return self.inner(task)

    @property
    def measured(self):
        return [schedule_key(one.schedule) for one in self.tasks if one.step == "measure"]


def test_the_fastest_wins_and_the_rest_are_slower(tmp_path):
    result = run_tune(tmp_path)
    assert result.counts == {"winner": 1, "slower": 10}
    assert result.winner.schedule == {"strategy": "hybrid", "threads": 256}
    assert result.winner.ms == 0.2
    assert "4.5 x as long" in result.winner.reason
    times = [row.ms for row in result.rows]
    assert times == sorted(times)
    assert result.rows[1].reason == "50.0 % slower than the winner"
    assert result.rows[0].outcome.registers == 64  # of the compile step
    assert (result.measured, result.left) == (11, 0)


def test_every_way_to_end_has_its_status_and_reason(tmp_path):
    def evaluator(task):
        threads = task.schedule.get("threads")
        if task.step == "compile":
            if threads == 32:
                return Outcome("compile", "kernel.cu:7: expected a ;")
            if threads == 64:
                return Outcome("spills", "96 bytes of registers spilled to memory", spills=96)
            if threads == 96:
                raise TimeLimitError("killed after 60 s")
            return fake(task)
        if threads == 128:
            return Outcome("wrong", "demo: wrong on uniform, seed 0: left 3 output elements")
        if threads == 192:
            raise TimeLimitError("killed after 60 s")
        if threads == 384:
            raise RuntimeError("demo_norm: CUDA_ERROR_ILLEGAL_ADDRESS\nmore")
        return fake(task)

    result = run_tune(tmp_path, evaluator)
    ends = {row.schedule.get("threads"): (row.status, row.reason) for row in result.rows}
    assert ends[32] == ("compile", "kernel.cu:7: expected a ;")
    assert ends[64] == ("spills", "96 bytes of registers spilled to memory")
    assert ends[96] == ("timeout", "compiling did not end: killed after 60 s")
    assert ends[128][0] == "wrong"
    assert "left 3 output elements" in ends[128][1]
    assert ends[192] == ("timeout", "verifying and timing did not end: killed after 60 s")
    assert ends[384] == ("wrong", "did not run: demo_norm: CUDA_ERROR_ILLEGAL_ADDRESS")
    assert ends[256][0] == "winner"
    assert ends[512][0] == "slower"
    assert result.counts == {
        "winner": 1, "slower": 4, "compile": 1, "spills": 1, "timeout": 2, "wrong": 2,
    }  # fmt: skip
    again = run_tune(tmp_path)  # all of that is the candidates' own fault, and known now
    assert (again.measured, again.counts) == (0, result.counts)
    shown = result.table()
    for text in (
        "expected a ;",
        "96 bytes",
        "killed after 60 s",
        "left 3 output",
        "winner: hybrid",
    ):
        assert text in shown


def test_what_the_constraints_refuse_is_counted_with_its_message(tmp_path):
    recorder = Recorder()
    result = run_tune(
        tmp_path, recorder, strategies=["two_kernel"], search=lambda space, _: ByPrediction(space)
    )
    assert result.counts["constraint"] == len(result.refused) > 0
    assert all(one.reason.startswith("schedule") for one in result.refused)
    groups = result.to_json()["constraint"]
    assert sum(group["count"] for group in groups) == len(result.refused)
    refused = {schedule_key(one.schedule) for one in result.refused}
    assert refused.isdisjoint(schedule_key(task.schedule) for task in recorder.tasks)
    assert set(result.counts) <= set(STATUSES)


def test_results_are_plain_json(tmp_path):
    def infinite(task):
        found = fake(task)
        return replace(found, max_error=float("inf")) if found.status == "timed" else found

    result = run_tune(tmp_path, infinite)
    text = json.dumps(result.to_json(), allow_nan=False)
    values = json.loads(text)
    assert values["winner"]["schedule"] == result.winner.schedule
    assert values["rows"][0]["ms"] == 0.2
    for line in (tmp_path / "store.jsonl").read_text().splitlines():
        assert "Infinity" not in line


def test_tasks_and_outcomes_survive_json():
    task = Task("measure", small().canonical(), {"strategy": "hybrid"}, "sm_90a", device=3)
    assert Task(**json.loads(json.dumps(task.to_json()))) == task
    outcome = timed(0.5)
    assert Outcome.from_json(json.loads(json.dumps(outcome.to_json()))) == outcome


@pytest.mark.parametrize(
    "bad",
    [
        {"status": "winner"},
        {"status": "timed"},
        {"status": "timed", "ms": "0.5"},
        {"status": "timed", "ms": -1.0},
        {"status": "timed", "ms": True},
        {"status": "wrong", "unheard_of": 1},
        {"reason": "none"},
    ],
)
def test_no_outcome_is_made_of_something_else(bad):
    with pytest.raises(ValueError):  # noqa: PT011 - the message names the field
        Outcome.from_json(bad)


def test_the_default_is_measured_first(tmp_path):
    recorder = Recorder()
    run_tune(tmp_path, recorder)
    assert recorder.measured[0] == schedule_key({"strategy": "two_kernel"})


def test_the_default_wins_within_the_noise(tmp_path):
    def close(task):
        if task.step == "compile":
            return fake(task)
        return timed(1.0 if task.schedule["strategy"] == "two_kernel" else 0.99, 0.01)

    result = run_tune(tmp_path, close)
    assert result.winner.is_default
    assert "cannot tell" in result.winner.reason
    assert {row.status for row in result.rows[1:]} == {"slower"}
    assert result.rows[1].reason == "as fast as the winner, within the noise"


def test_the_default_loses_outside_the_noise():
    fast = Candidate("hybrid", {"threads": 32}, "a", 1.0)
    default = Candidate("hybrid", {}, "b", 1.0, is_default=True)
    for other, error, wins in ((1.004, 0.0, default), (1.006, 0.0, fast), (1.05, 0.02, default)):
        outcomes = {fast: timed(1.0, error), default: timed(other, error)}
        assert choose([fast, default], outcomes)[0] is wins, other
    assert not is_alike(timed(1.0, 0.001), timed(1.05, 0.02 / 1.05))


class Clock:
    """A clock that moves when told."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_the_budget_is_kept(tmp_path):
    clock = Clock()

    def slow(task):
        clock.now += 1.0 if task.step == "compile" else 9.0
        return fake(task)

    result = run_tune(tmp_path, slow, clock=clock, budget=45.0)
    assert 3 <= result.measured <= 5  # of 10 s each
    assert result.left == 11 - len(result.rows) > 0
    assert result.seconds <= 45.0 + 10.0
    assert f"{result.left} candidates were not reached" in result.table()
    assert result.winner is not None


def test_a_budget_that_ends_before_the_first_time_has_no_winner(tmp_path):
    clock = Clock()

    def slow(task):
        clock.now += 100.0
        return fake(task)

    result = run_tune(tmp_path, slow, clock=clock, budget=50.0)
    assert result.winner is None
    assert "no winner" in result.table()


def test_a_rerun_measures_only_what_is_left(tmp_path):
    clock, first, second, third = Clock(), Recorder(), Recorder(), Recorder()

    def ticking(task):
        clock.now += 5.0
        return first(task)

    cut = run_tune(tmp_path, ticking, clock=clock, budget=40.0)
    assert 0 < cut.measured < 11
    done = run_tune(tmp_path, second)
    assert done.measured == 11 - cut.measured
    assert not set(first.measured[: cut.measured]) & set(second.measured)
    assert done.counts == {"winner": 1, "slower": 10}
    assert sum(row.stored for row in done.rows) == cut.measured
    again = run_tune(tmp_path, third)
    assert third.tasks == []
    assert again.winner == replace(done.winner, stored=True)


def test_other_places_and_kernels_are_measured_anew(tmp_path, monkeypatch):
    run_tune(tmp_path)
    for other in (
        replace(GPU, gpu="Other GPU"), replace(GPU, driver="2.0"), replace(GPU, nvrtc="12.8"),
    ):  # fmt: skip
        assert run_tune(tmp_path, found=[other]).measured == 11
    assert run_tune(tmp_path).measured == 0
    with monkeypatch.context() as patched:
        patched.setattr("kgen.tune.store.kernel_sha256", lambda spec: "another kernel")
        assert run_tune(tmp_path).measured == 11


def test_a_timeout_is_tried_again_with_more_time(tmp_path):
    def hanging(task):
        if task.schedule.get("threads") == 32:
            raise TimeLimitError(f"killed after {task.limit:g} s")
        return fake(task)

    assert run_tune(tmp_path, hanging, limit=10.0).counts["timeout"] == 1
    assert run_tune(tmp_path, limit=10.0).measured == 0
    assert run_tune(tmp_path, limit=5.0).measured == 0
    longer = run_tune(tmp_path, limit=20.0)
    assert (longer.measured, longer.counts) == (1, {"winner": 1, "slower": 10})


def test_what_says_nothing_about_another_run_is_not_kept(tmp_path):
    def full(task):
        if task.step == "measure" and task.schedule.get("threads") == 32:
            return Outcome("wrong", "out of GPU memory: 3 GiB", lasting=False)
        return fake(task)

    assert run_tune(tmp_path, full).counts["wrong"] == 1
    again = run_tune(tmp_path)
    assert (again.measured, again.counts) == (1, {"winner": 1, "slower": 10})


def test_pruning_keeps_the_optimum_of_a_model_that_is_right_within_the_factor(tmp_path):
    """Times are the predictions, off by a factor of up to 1.4 either way: 1.4 x 1.4 < 2."""
    spec = spec_of(height=64, width=64)
    everything = enumerate_space(spec, ["two_kernel"], factor=1e9)
    off = {
        one.key: one.predicted_ms * (0.72 + 0.68 * (index * 7919 % 1000) / 1000)
        for index, one in enumerate(everything.candidates)
    }
    best = min(off, key=off.__getitem__)
    kept = enumerate_space(spec, ["two_kernel"], factor=2.0)
    assert kept.pruned
    assert best in {one.key for one in kept.candidates}
    assert len(kept.candidates) + len(kept.pruned) == len(everything.candidates)
    assert {one.key for one in kept.pruned}.isdisjoint(one.key for one in kept.candidates)


def test_each_device_has_one_worker_and_one_task_at_a_time(tmp_path):
    lock, busy, most, seen, made = threading.Lock(), {}, {}, {}, []

    def evaluator(task):
        if task.step == "compile":
            return fake(task)
        with lock:
            busy[task.device] = busy.get(task.device, 0) + 1
            most[task.device] = max(most.get(task.device, 0), busy[task.device])
        time.sleep(0.02)
        with lock:
            busy[task.device] -= 1
            seen.setdefault(task.device, []).append(schedule_key(task.schedule))
        return fake(task)

    def executors(device):
        made.append(device)
        return ThreadPoolExecutor(4)  # would run several at once, were it given several

    found = [replace(GPU, index=index, uuid=f"uuid-{index}") for index in (0, 1, 2)]
    result = run_tune(tmp_path, evaluator, found=found, devices=[0, 2], executors=executors)
    assert sorted(seen) == [0, 2]
    assert most == {0: 1, 2: 1}
    assert made.count(0) == made.count(2) == made.count(None) == 1
    assert result.counts == {"winner": 1, "slower": 10}
    assert min(map(len, seen.values())) >= 3  # spread, not all on one
    run = [one for ones in seen.values() for one in ones]
    assert len(run) == len(set(run)) == 11


def test_devices_are_chosen_with_reasons():
    second = replace(GPU, index=1)
    assert choose_devices([GPU, second], None, ["sm_90a"]) == [GPU, second]
    assert choose_devices([GPU, second], [1], ["sm_90a"]) == [second]
    with pytest.raises(UsageError, match="no GPU 7; visible are 0, 1"):
        choose_devices([GPU, second], [7], ["sm_90a"])
    with pytest.raises(UsageError, match="cannot be compared"):
        choose_devices([GPU, replace(second, gpu="Other")], None, ["sm_90a"])
    with pytest.raises(UsageError, match="add sm_90a"):
        choose_devices([GPU], None, ["sm_120"])


def test_executors_are_shut_down_whatever_happens(tmp_path):
    for problem in (None, StartError("no torch"), UsageError("the cache is full")):
        made = []

        def executors(_, made=made):
            made.append(Inline())
            return made[-1]

        def evaluator(task, problem=problem):
            if problem is not None:
                raise problem
            return fake(task)

        folder = tmp_path / str(problem)
        if problem is None:
            run_tune(folder, evaluator, executors=executors)
        else:
            with pytest.raises(UsageError, match=str(problem)):
                run_tune(folder, evaluator, executors=executors)
            assert not (folder / "store.jsonl").exists()  # no candidate is to blame
        assert made
        assert all(one.ended for one in made)


def test_ctrl_c_ends_with_what_is_known(tmp_path):
    recorder = Recorder()

    def evaluator(task):
        if task.step == "measure" and len(recorder.measured) == 3:
            os.kill(os.getpid(), signal.SIGINT)  # at the worst moment: before it is written
        return recorder(task)

    before = signal.getsignal(signal.SIGINT)
    result = run_tune(tmp_path, evaluator)
    assert signal.getsignal(signal.SIGINT) is before
    assert result.interrupted
    assert result.measured == 4  # the one that was running when Ctrl-C came is kept
    assert "interrupted after" in result.table()
    assert result.winner is not None
    rest = Recorder()
    assert run_tune(tmp_path, rest).measured == 7
    assert not set(rest.measured) & set(recorder.measured[:4])


def test_a_second_ctrl_c_does_not_wait(tmp_path):
    def evaluator(task):
        if task.step == "measure":
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            pytest.fail("went on after the second Ctrl-C")
        return fake(task)

    result = run_tune(tmp_path, evaluator)
    assert result.interrupted
    assert result.rows == ()


def test_progress_tells_best_and_time_left(tmp_path):
    told = []
    run_tune(tmp_path, progress=told.append)
    assert told[0].best is None
    assert (told[-1].done, told[-1].total, told[-1].best) == (11, 11, 0.2)
    assert 0 < told[-1].seconds_left <= 100
    assert [one.done for one in told] == sorted(one.done for one in told)


@pytest.mark.parametrize("options", [{"budget": 0}, {"budget": -1}, {"limit": 0}])
def test_times_must_be_positive(tmp_path, options):
    with pytest.raises(UsageError, match="above 0"):
        run_tune(tmp_path, **options)


def test_the_simulated_ranking_is_the_cost_models():
    from kgen.arch import ARCHS
    from kgen.geometry import geometry
    from kgen.strategy import predicted_ms
    from kgen.tune.space import with_schedule

    spec = spec_of(height=64, width=64)
    result = simulate(spec)
    times = [row.predicted_ms for row in result.rows]
    assert times == sorted(times)
    assert len({row.strategy for row in result.rows}) == 4
    for row in result.rows[:: max(1, len(result.rows) // 50)]:
        own = with_schedule(spec, row.schedule)
        wanted = predicted_ms(own, geometry(own.problem), ARCHS["sm_90a"], row.strategy)
        assert row.predicted_ms == wanted
    assert result.winner is None
    assert "cost model alone" in result.table()
    assert set(result.counts) <= {"predicted", "constraint"}


@pytest.mark.nvrtc
def test_the_compile_step_compiles(tmp_path):
    schedule = {"strategy": "two_kernel"}
    task = Task("compile", small().canonical(), schedule, "sm_90a")
    outcome = evaluate(task)
    assert outcome.status == "compiled"
    assert 0 < outcome.registers <= 255
    assert outcome.spills == 0
    assert len(outcome.kernel_sha256) == 64
    broken = evaluate(replace(task, arch="sm_10"))
    assert broken.status == "compile"
    assert "sm_10" in broken.reason


class WallTimer:
    """A timer for a device that has no events."""

    def __init__(self, device):
        assert device == "cpu"

    def time(self, call, *, cold):
        assert cold
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)


@pytest.fixture
def on_cpu(monkeypatch):
    """The measure step with the package's op for other devices than GPUs, and a wall clock."""
    torch = pytest.importorskip("torch")
    import kgen.bench.cuda
    from kgen.checks import PackageCandidate

    monkeypatch.setattr("kgen.tune.task.device_name", lambda task: "cpu")
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(kgen.bench.cuda, "CudaTimer", WallTimer)
    monkeypatch.setattr(kgen.bench.cuda, "graphed", lambda call: call)
    monkeypatch.setattr(PackageCandidate, "guarded_problem", lambda *_: "")
    return PackageCandidate


def measure_task(**changes):
    task = Task("measure", small().canonical(), {"strategy": "two_kernel"}, "sm_90a", seconds=0.2)
    return replace(task, **changes)


def test_the_measure_step_verifies_and_times(on_cpu):
    outcome = evaluate(measure_task())
    assert outcome.status == "timed", outcome.reason
    assert 0 < outcome.p20 <= outcome.ms <= outcome.p80
    assert outcome.rounds >= 3
    assert 0 < outcome.max_error < 1e-4
    assert outcome.kernel_sha256 == kernel_sha256(small())


def test_the_measure_step_times_nothing_that_is_wrong(on_cpu, monkeypatch):
    right = on_cpu.__call__
    monkeypatch.setattr(on_cpu, "__call__", lambda *given: right(*given) + 0.01)
    monkeypatch.setattr("kgen.bench.timing.time_rounds", lambda *_, **__: pytest.fail("timed"))
    outcome = evaluate(measure_task())
    assert outcome.status == "wrong"
    assert outcome.reason.startswith("demo: wrong on uniform, seed 0: ")
    assert outcome.max_error == pytest.approx(0.01, rel=0.01)
    assert outcome.lasting


def test_want_of_memory_is_not_kept(on_cpu, monkeypatch):
    import torch

    def full(*_):
        raise torch.OutOfMemoryError("tried to allocate 3 GiB")

    monkeypatch.setattr(on_cpu, "__call__", full)
    outcome = evaluate(measure_task())
    assert (outcome.status, outcome.lasting) == ("wrong", False)
    assert "3 GiB" in outcome.reason


def test_importing_the_tuner_needs_neither_torch_nor_optuna():
    code = (
        "import sys, kgen.tune.command; "
        "print([one for one in ('torch', 'optuna', 'rich', 'filelock') if one in sys.modules])"
    )
    assert python("-c", code).stdout.strip() == "[]"
