"""Worker processes: killed when they hang, replaced when they die, gone when the tuner is."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import wait
from pathlib import Path

import pytest
from helpers import TESTS
from test_tune import GPU, Inline, fake, run_tune

from kgen.errors import UsageError
from kgen.tune.devices import local_executors
from kgen.tune.task import Outcome, Task, evaluate
from kgen.tune.workers import (
    KilledError,
    MachineError,
    StartError,
    TimeLimitError,
    WorkerError,
    Workers,
)


def pid_and(value):
    return os.getpid(), value


def sleep_forever(note: str = "") -> None:
    if note:
        Path(note).write_text(str(os.getpid()))
    time.sleep(1000)


def fail(kind: str):
    if kind == "usage":
        raise UsageError("the disk is full")
    if kind == "exit":
        os._exit(7)
    if kind == "kill":
        os.kill(os.getpid(), 9)
    if kind == "abort":
        os.abort()
    if kind == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
    if kind == "disk":
        raise OSError(errno.ENOSPC, "No space left on device")
    if kind == "memory":
        raise RuntimeError("launch: CUDA_ERROR_OUT_OF_MEMORY")
    raise ValueError("first line\nsecond line")


def hang_at_32(task: Task) -> Outcome:
    """Hangs where it measures 32 threads, dies at 64; else the fake evaluation."""
    if task.step == "measure" and task.schedule.get("threads") == 32:
        sleep_forever()
    if task.step == "measure" and task.schedule.get("threads") == 64:
        os.abort()
    return fake(task)


def fail_to_prepare() -> None:
    raise ImportError("No module named 'torch'")


@pytest.fixture
def workers():
    made = []

    def make(count=1, seconds=30.0, **options):
        made.append(Workers(count, limit=lambda *_: seconds, **options))
        return made[-1]

    yield make
    for one in made:
        one.shutdown(cancel_futures=True)


def test_a_worker_is_a_process_that_stays(workers):
    pool = workers()
    first, one = pool.submit(pid_and, 1).result()
    second, two = pool.submit(pid_and, 2).result()
    assert (one, two) == (1, 2)
    assert first == second != os.getpid()


def test_a_task_over_its_limit_is_killed_and_the_next_runs(workers, tmp_path):
    pool, note = workers(seconds=1.0), tmp_path / "pid"
    hanging = pool.submit(sleep_forever, str(note))
    after = pool.submit(pid_and, 5)
    with pytest.raises(TimeLimitError, match="killed after 1 s"):
        hanging.result()
    new, value = after.result()
    old = int(note.read_text())
    assert value == 5
    assert new != old
    assert is_gone(old)


def is_gone(pid: int, seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if Path(f"/proc/{pid}/stat").exists() and (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        ):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(
    ("kind", "error", "message", "lasting"),
    [
        ("raise", WorkerError, "^ValueError: first line$", True),
        ("usage", UsageError, "^the disk is full$", None),
        ("exit", WorkerError, "ended with code 7", True),
        ("abort", WorkerError, "ended by signal 6", True),
        ("kill", KilledError, "was killed", False),
        ("terminate", KilledError, "ended by signal 15", False),
        ("disk", MachineError, "No space left on device", False),
        ("memory", MachineError, "CUDA_ERROR_OUT_OF_MEMORY", False),
    ],
)
def test_a_task_that_fails_says_how_and_the_next_runs(workers, kind, error, message, lasting):
    pool = workers()
    failing, after = pool.submit(fail, kind), pool.submit(pid_and, 1)
    with pytest.raises(error, match=message) as caught:
        failing.result()
    assert getattr(caught.value, "lasting", None) == lasting
    assert after.result()[1] == 1


def test_a_device_that_cannot_be_locked_is_nobodys_fault(workers, tmp_path):
    (tmp_path / "lock").mkdir()
    pool = workers(lock=tmp_path / "lock")
    with pytest.raises(StartError, match="lock: cannot be locked"):
        pool.submit(pid_and, 1).result(timeout=60)
    (tmp_path / "lock").rmdir()
    assert pool.submit(pid_and, 1).result(timeout=60)[1] == 1


def test_a_process_that_the_system_refuses_is_told_and_tried_again(workers, monkeypatch):
    refuse = [True]
    start = multiprocessing.context.SpawnProcess.start

    def maybe(process):
        if refuse[0]:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        start(process)

    monkeypatch.setattr(multiprocessing.context.SpawnProcess, "start", maybe)
    pool = workers()
    with pytest.raises(StartError, match="Resource temporarily unavailable"):
        pool.submit(pid_and, 1).result(timeout=60)
    refuse[0] = False
    assert pool.submit(pid_and, 1).result(timeout=60)[1] == 1


def test_a_process_that_cannot_start_is_nobodys_fault(workers):
    pool = workers(prepare=fail_to_prepare)
    with pytest.raises(StartError, match="No module named 'torch'"):
        pool.submit(pid_and, 1).result()


def test_several_workers_run_at_once(workers, tmp_path):
    pool = workers(2)
    notes = [tmp_path / "a", tmp_path / "b"]
    hanging = [pool.submit(sleep_forever, str(note)) for note in notes]
    end = time.monotonic() + 30
    while not all(note.exists() and note.read_text() for note in notes):
        assert time.monotonic() < end
        time.sleep(0.02)
    pool.shutdown(wait=False, cancel_futures=True)
    assert wait(hanging, timeout=10).not_done == set()
    assert all(is_gone(int(note.read_text())) for note in notes)


def test_shutdown_without_cancelling_finishes_what_was_submitted(workers):
    pool = workers()
    futures = [pool.submit(pid_and, one) for one in range(4)]
    pool.shutdown(wait=True)
    assert [one.result()[1] for one in futures] == [0, 1, 2, 3]
    with pytest.raises(RuntimeError, match="after shutdown"):
        pool.submit(pid_and, 1)


def test_workers_with_one_lock_take_turns(workers, tmp_path):
    lock = tmp_path / "gpu.lock"
    pools = [workers(lock=lock) for _ in range(2)]
    log = tmp_path / "log"
    futures = [pools[one % 2].submit(enter_and_leave, str(log)) for one in range(6)]
    for future in futures:
        future.result()
    words = log.read_text().split()
    assert len(words) == 12
    assert [word[0] for word in words] == ["+", "-"] * 6
    assert all(a[1:] == b[1:] for a, b in zip(words[::2], words[1::2], strict=True))


def enter_and_leave(log: str) -> None:
    for sign in "+-":
        with open(log, "a") as file:
            file.write(f"{sign}{os.getpid()}\n")
        time.sleep(0.05)


def test_a_hanging_candidate_becomes_timeout_and_the_rest_goes_on(tmp_path):
    made = {}

    def executors(device):
        made[device] = Workers(1)
        return made[device]

    result = run_tune(tmp_path, hang_at_32, executors=executors, limit=1.0)
    ends = {row.schedule.get("threads"): (row.status, row.reason) for row in result.rows}
    assert ends[32] == ("timeout", "verifying and timing did not end: killed after 1 s")
    assert ends[64] == ("wrong", "did not run: its process was ended by signal 6")
    assert result.counts == {"winner": 1, "slower": 8, "timeout": 1, "wrong": 1}
    assert sorted(made, key=str) == [0, None]


def compile_really(task: Task) -> Outcome:
    """The real compile step, and a faked time."""
    return evaluate(task) if task.step == "compile" else fake(task)


@pytest.mark.nvrtc
def test_candidates_are_compiled_in_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("KGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("kgen.tune.task.compile_kernel", None)  # not in this process

    def executors(device):
        return Inline() if device is not None else local_executors([GPU], 2)(None)

    result = run_tune(tmp_path, compile_really, executors=executors, limit=60.0)
    assert set(result.counts) <= {"winner", "slower", "spills"}
    assert len(result.rows) == 11
    for row in result.rows:
        assert 0 < row.outcome.registers <= 255
        assert (row.outcome.spills > 0) == (row.status == "spills") == (row.ms is None)
        assert row.outcome.compile_seconds > 0
    assert len(list((tmp_path / "cache" / "cubin").glob("*/*"))) == 11


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
def test_a_killed_tuner_takes_its_workers_along(tmp_path):
    note = tmp_path / "pid"
    code = (
        "import sys, test_tune_workers as t\n"
        "pool = t.Workers(1, limit=lambda *_: 1000.0)\n"
        "pool.submit(t.sleep_forever, sys.argv[1]).result()\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
    child = subprocess.Popen([sys.executable, "-c", code, str(note)], env=environment)
    try:
        end = time.monotonic() + 60
        while not (note.exists() and note.read_text()):
            assert time.monotonic() < end
            time.sleep(0.02)
    finally:
        child.kill()
        child.wait()
    assert is_gone(int(note.read_text()))
