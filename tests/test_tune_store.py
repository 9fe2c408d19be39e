"""The file of results: nothing is lost, whoever dies, and nothing foreign is believed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import TESTS
from test_tune import GPU, Inline, Recorder, fake, run_tune, small

from kgen.errors import UsageError
from kgen.tune import tune
from kgen.tune.devices import Where
from kgen.tune.space import enumerate_space, schedule_key
from kgen.tune.store import SCHEMA, Entry, Store, append, default_path
from kgen.tune.task import Outcome, Task

WHERE = Where(GPU.gpu, GPU.driver, GPU.nvrtc)


def store_at(path: Path, limit: float = 60.0) -> Store:
    store = Store(path, small(), WHERE, limit)
    store.refresh()
    return store


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def slow_tuner(path: str, log: str, seconds: str) -> None:
    """Tune with evaluations that take a while and note in `log` what they finished."""

    def evaluator(task: Task) -> Outcome:
        if task.step == "measure":
            time.sleep(float(seconds))
            with open(log, "a") as file:
                file.write(schedule_key(task.schedule) + "\n")
        return fake(task)

    tune(
        small(), strategies=["hybrid"], store=Path(path), found=[GPU], evaluator=evaluator,
        executors=lambda _: Inline(), budget=100.0,
    )  # fmt: skip


def start_tuner(path: Path, log: Path, seconds: float) -> subprocess.Popen:
    code = "import sys, test_tune_store as t; t.slow_tuner(*sys.argv[1:])"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]),
    }
    command = [sys.executable, "-c", code, str(path), str(log), str(seconds)]
    return subprocess.Popen(command, env=environment)


def wait_for_lines(path: Path, count: int) -> None:
    end = time.monotonic() + 60
    while not path.exists() or len(path.read_text().splitlines()) < count:
        assert time.monotonic() < end, "the child did nothing"
        time.sleep(0.01)


def test_kill_9_loses_nothing(tmp_path):
    path, log = tmp_path / "store.jsonl", tmp_path / "log"
    child = start_tuner(path, log, 0.15)
    try:
        wait_for_lines(path, 3)
    finally:
        child.kill()
        child.wait()
    kept = {schedule_key(line["schedule"]) for line in lines(path)}
    finished = log.read_text().splitlines()
    assert 3 <= len(kept) < 11
    assert set(finished[: len(kept)]) == kept
    assert len(finished) - len(kept) <= 1  # the one that was measured but not yet told
    rest = Recorder()
    result = run_tune(tmp_path, rest)
    assert result.counts == {"winner": 1, "slower": 10}
    assert not kept & set(rest.measured)
    assert len(rest.measured) == 11 - len(kept)  # claims of the dead tuner are void
    assert result.notes == ()


def test_two_tuners_share_a_store(tmp_path):
    path, logs = tmp_path / "store.jsonl", [tmp_path / "a", tmp_path / "b"]
    children = [start_tuner(path, log, 0.1) for log in logs]
    for child in children:
        assert child.wait(60) == 0
    runs = [log.read_text().splitlines() for log in logs]
    assert all(runs), "one of them did everything"
    together = runs[0] + runs[1]
    assert len(together) == len(set(together)) == 11
    assert sorted(schedule_key(line["schedule"]) for line in lines(path)) == sorted(together)
    result = run_tune(tmp_path)
    assert (result.measured, result.notes) == (0, ())


def test_appending_at_once_tears_no_line(tmp_path):
    code = (
        "import sys, pathlib, test_tune_store as t\n"
        "for i in range(50):\n"
        "    t.append_one(pathlib.Path(sys.argv[1]), 1000 * int(sys.argv[2]) + i)\n"
    )
    path = tmp_path / "store.jsonl"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
    children = [
        subprocess.Popen([sys.executable, "-c", code, str(path), str(one)], env=environment)
        for one in range(3)
    ]
    for child in children:
        assert child.wait(60) == 0
    found = [line["schedule"]["threads"] for line in lines(path)]
    assert sorted(found) == sorted(1000 * one + index for one in range(3) for index in range(50))


def append_one(path: Path, number: int) -> None:
    """One entry with a long reason, told apart by its threads."""
    outcome = Outcome("wrong", "x" * 5000)
    append(path, Entry("block", WHERE, {"threads": number}, 60.0, outcome))


def test_damaged_foreign_and_older_lines_are_ignored_with_one_warning(tmp_path):
    path = tmp_path / "store.jsonl"
    run_tune(tmp_path)
    good = path.read_text().splitlines()
    older = json.dumps(json.loads(good[0]) | {"schema": SCHEMA - 1})
    broken = json.dumps(json.loads(good[1]) | {"outcome": {"status": "timed", "ms": "fast"}})
    listless = json.dumps(json.loads(good[1]) | {"schedule": [1]})
    keyless = json.dumps({k: v for k, v in json.loads(good[1]).items() if k != "gpu"})
    # Each of them names a candidate that would be believed, were it not for what is wrong.
    bad = [older, broken, listless, keyless, '{"a": 1}', "[1]", "null", good[2][:40], "\x00"]
    path.write_bytes("\n".join([*bad, *good[3:]]).encode() + b"\n\xff\xfe\n\n")
    recorder = Recorder()
    result = run_tune(tmp_path, recorder)
    assert result.measured == 3
    assert len(result.notes) == 1
    (note,) = result.notes
    assert note.startswith(f"{path}: 10 lines are ignored: ")
    for part in ("6 damaged", "3 foreign", "1 of another version"):
        assert part in note
    assert result.counts == {"winner": 1, "slower": 10}


def test_entries_of_other_places_are_no_damage(tmp_path):
    run_tune(tmp_path, found=[GPU])
    result = run_tune(tmp_path, found=[replace(GPU, gpu="Other")])
    assert (result.measured, result.notes) == (11, ())


def test_a_line_that_was_cut_off_is_closed_by_the_next(tmp_path):
    path = tmp_path / "store.jsonl"
    run_tune(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])  # the last line without its end
    result = run_tune(tmp_path)
    assert result.measured == 1
    text = path.read_text()
    assert text.endswith("}\n")
    assert len(text.splitlines()) == 12
    again = run_tune(tmp_path)
    assert again.measured == 0
    assert again.notes == (f"{path}: 1 line is ignored: 1 damaged",)


def test_a_last_line_that_lacks_only_its_end_counts(tmp_path):
    path = tmp_path / "store.jsonl"
    run_tune(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    assert run_tune(tmp_path).measured == 0
    append_one(path, 1)
    assert len(lines(path)) == 12


def test_a_store_reads_on_where_it_was(tmp_path):
    path = tmp_path / "store.jsonl"
    space = enumerate_space(small(), ["hybrid"])
    first, second = store_at(path), store_at(path)
    from kgen.tune.space import with_schedule
    from kgen.tune.task import kernel_sha256

    one, two = space.candidates[:2]
    for candidate in (one, two):
        assert second.get(candidate) is None
        digest = kernel_sha256(with_schedule(small(), candidate.schedule))
        first.add(candidate, Outcome("wrong", "for a reason", kernel_sha256=digest))
        assert second.refresh()
        assert second.get(candidate).reason == "for a reason"
    assert not second.refresh()


def test_tuners_of_one_process_keep_out_of_each_others_way(tmp_path):
    space = enumerate_space(small(), ["hybrid"])
    first, second = store_at(tmp_path / "store.jsonl"), store_at(tmp_path / "store.jsonl")
    assert first.claim(space.default)
    assert not second.claim(space.default)
    second.release(space.default)  # not its own
    assert not second.claim(space.default)
    assert second.claim(space.candidates[1])
    first.release(space.default)
    assert second.claim(space.default)
    first.close()
    second.close()


@pytest.mark.skipif(sys.platform == "win32", reason="no byte locks")
def test_closing_one_store_keeps_the_claims_of_another(tmp_path):
    """POSIX would give back all locks of the process on that file."""
    space = enumerate_space(small(), ["hybrid"])
    path = tmp_path / "store.jsonl"
    first, second = store_at(path), store_at(path)
    assert first.claim(space.default)
    assert second.claim(space.candidates[1])
    first.close()
    code = (
        "import sys, pathlib, test_tune_store as t\n"
        "store = t.store_at(pathlib.Path(sys.argv[1]))\n"
        "space = t.enumerate_space(t.small(), ['hybrid'])\n"
        "print(store.claim(space.default), store.claim(space.candidates[1]))\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
    told = subprocess.run([sys.executable, "-c", code, str(path)], env=environment,
                          capture_output=True, text=True, check=True).stdout  # fmt: skip
    assert told == "True False\n"
    second.close()


@pytest.mark.skipif(sys.platform == "win32", reason="no byte locks")
def test_a_claim_ends_with_its_process(tmp_path):
    path = tmp_path / "store.jsonl"
    code = (
        "import sys, pathlib, time, test_tune_store as t\n"
        "store = t.store_at(pathlib.Path(sys.argv[1]))\n"
        "space = t.enumerate_space(t.small(), ['hybrid'])\n"
        "assert store.claim(space.default)\n"
        "print('claimed', flush=True)\n"
        "time.sleep(100)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout.readline() == "claimed\n"
        space = enumerate_space(small(), ["hybrid"])
        store = store_at(path)
        assert not store.claim(space.default)
        assert store.claim(space.candidates[1])
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert store.claim(space.default)
    store.close()


def test_files_that_cannot_be_used_are_refused_in_one_line(tmp_path):
    folder = tmp_path / "folder.jsonl"
    folder.mkdir()
    with pytest.raises(UsageError, match=r"folder\.jsonl: cannot be read"):
        run_tune(tmp_path, store=folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="file") as caught:
        run_tune(tmp_path, store=tmp_path / "file" / "below.jsonl")
    assert "\n" not in str(caught.value)


def test_the_default_place_is_beside_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("KGEN_CACHE_DIR", str(tmp_path))
    assert default_path(small()) == tmp_path / "tune" / "demo.jsonl"
    result = run_tune(tmp_path, store=None)
    assert result.measured == 11
    assert len(lines(tmp_path / "tune" / "demo.jsonl")) == 11
