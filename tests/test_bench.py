"""The benchmark: statistics, comparison, circumstances, and a whole run on the CPU."""

from __future__ import annotations

import contextlib
import json
import math
import random
import re
import subprocess

import pytest
from helpers import spec_of

torch = pytest.importorskip("torch")

from click.testing import CliRunner

import kgen
from kgen.bench import context as bench_context
from kgen.bench import run as bench_run
from kgen.bench.ceilings import measure_ceilings
from kgen.bench.command import bench_command, default_output
from kgen.bench.compare import compare
from kgen.bench.context import (
    Circumstances,
    checkout_commit,
    clocks,
    other_processes,
    slowed_by,
    slowed_for,
)
from kgen.bench.counters import SHARES, SUMS, combine, parse
from kgen.bench.cuda import LEAST_HOLD_US, CudaTimer
from kgen.bench.record import Context, Record, RecordError, Row, RowTimes, load_record
from kgen.bench.rows import baseline_row, chosen_specs, prepare_rows
from kgen.bench.run import Lab, run_bench
from kgen.bench.table import text_table
from kgen.bench.timing import LEAST_ROUNDS, MOST_ROUNDS, summarise, time_rounds
from kgen.cli import cli
from kgen.errors import UsageError
from kgen.reference import draw

# ---- Statistics ----


class FakeTimer:
    """Calls return their own time; flushes are counted."""

    def __init__(self):
        self.flushes = 0
        self.order = []

    def time(self, call, *, cold=False):
        self.flushes += cold
        value = call()
        self.order.append(value)
        return float(value)


def test_summary_of_known_values():
    times = summarise([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (times.median, times.p20, times.p80, times.rounds) == (3.0, 1.8, 4.2, 5)
    sigma = (4.0 - 2.0) / 1.349
    assert times.relative_error == pytest.approx(1.2533 * sigma / 5**0.5 / 3.0)


def test_the_error_of_the_median_is_what_repetition_shows():
    rng = random.Random(0)
    draw_one = lambda: [rng.gauss(10.0, 0.5) for _ in range(100)]  # noqa: E731
    medians = [summarise(draw_one()).median for _ in range(2000)]
    mean = sum(medians) / len(medians)
    spread = math.sqrt(sum((one - mean) ** 2 for one in medians) / len(medians))
    said = sum(summarise(draw_one()).relative_error for _ in range(200)) / 200 * 10.0
    assert said == pytest.approx(spread, rel=0.1)


def test_rounds_are_interleaved_and_flushed_and_rotate_their_inputs():
    timer, seen = FakeTimer(), []

    def row(base):
        return lambda number: seen.append((base, number)) or base

    found = time_rounds({"a": row(1.0), "b": row(2.0)}, timer, cold=True, seconds=10)
    assert timer.order == [1.0, 2.0] * LEAST_ROUNDS  # steady values need no more
    assert timer.flushes == 2 * LEAST_ROUNDS
    assert [number for base, number in seen if base == 1.0] == [0, 1, *range(LEAST_ROUNDS)]
    assert (found["a"].median, found["b"].median) == (1.0, 2.0)


def test_a_noisy_row_is_measured_longer_until_its_median_is_known():
    rng = random.Random(1)
    found = time_rounds(
        {"steady": lambda _: 1.0, "noisy": lambda _: rng.gauss(1.0, 0.05)},
        FakeTimer(), cold=False, seconds=60,
    )  # fmt: skip
    assert LEAST_ROUNDS < found["noisy"].rounds < MOST_ROUNDS
    assert found["noisy"].relative_error < 0.005
    assert found["steady"].rounds == found["noisy"].rounds


def test_the_budget_ends_the_rounds_but_not_before_three():
    ticks = iter(range(1000))
    rng = random.Random(2)
    found = time_rounds(
        {"noisy": lambda _: rng.uniform(1, 9)}, FakeTimer(),
        cold=False, seconds=6, clock=lambda: next(ticks),
    )  # fmt: skip
    assert found["noisy"].rounds == 7
    late = time_rounds(
        {"a": lambda _: rng.uniform(1, 9)}, FakeTimer(),
        cold=False, seconds=0, clock=lambda: next(ticks),
    )  # fmt: skip
    assert late["a"].rounds == 3


class FakeDevice:
    """A host and a device with clocks in us: what is queued runs in order, not before it is."""

    def __init__(self, monkeypatch):
        self.host = self.device = 0.0
        self.flushes = 0
        self.Event = type("Event", (), {
            "__init__": lambda event, enable_timing: None,
            "record": lambda event: setattr(event, "at", self.queue(0.0)),
            "query": lambda event: self.host >= event.at,
            "synchronize": lambda event: setattr(self, "host", max(self.host, event.at)),
            "elapsed_time": lambda event, end: 1e-3 * (end.at - event.at),
        })  # fmt: skip
        monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "Event", self.Event)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda clocks: self.queue(clocks / 2000))
        self.timer = object.__new__(CudaTimer)
        self.timer.device, self.timer.hold_us, self.timer._scratch = "cuda", LEAST_HOLD_US, self

    def queue(self, microseconds):
        self.device = max(self.device, self.host) + microseconds
        return self.device

    def zero_(self):
        self.flushes += 1
        self.queue(50.0)

    def launches(self, *host_us):
        """A call that spends each of these before a launch of 10 us."""

        def call():
            for one in host_us:
                self.host += one
                self.queue(10.0)

        return call


def test_no_time_holds_what_the_host_takes(monkeypatch):
    device = FakeDevice(monkeypatch)
    assert device.timer.time(device.launches(20.0, 30.0)) == pytest.approx(0.02)
    assert device.timer.hold_us == LEAST_HOLD_US
    assert device.flushes == 0


def test_a_call_that_the_device_waited_for_is_taken_again_with_flushed_caches(monkeypatch):
    device = FakeDevice(monkeypatch)
    calls = []
    slow = device.launches(20.0, 700.0)
    found = device.timer.time(lambda: calls.append(slow()), cold=True)
    assert found == pytest.approx(0.02)
    assert len(calls) == device.flushes == 3  # behind 250, 450 and 850 us
    kept = device.timer.hold_us
    assert LEAST_HOLD_US < kept < 4 * LEAST_HOLD_US
    for _ in range(100):
        device.timer.time(device.launches(20.0))
    assert device.timer.hold_us == LEAST_HOLD_US


def test_a_call_that_waits_for_the_device_has_a_time_all_the_same(monkeypatch):
    device = FakeDevice(monkeypatch)
    launch = device.launches(20.0)

    def waits():
        launch()
        device.host = max(device.host, device.device)

    assert device.timer.time(waits) == pytest.approx(0.01)
    assert len({device.timer.time(waits) for _ in range(3)}) == 1


# ---- A whole run, on the CPU ----

SPEC = {
    "batch": 2, "in_channels": 3, "out_channels": 8, "height": 9, "width": 11, "kernel_size": 3,
}  # fmt: skip


def context(**changes):
    found = {
        "gpu": "none", "driver": "none", "sms": 1, "torch": torch.__version__, "cuda": "none",
        "cudnn": None, "nvrtc": "none", "kgen": kgen.__version__, "python": "3", "date": "now",
        "command": "kgen bench a.yaml", "flags": {}, "clocks_before": {}, "clocks_after": {},
    }  # fmt: skip
    return Context(**{**found, **changes})


class CpuTimer(FakeTimer):
    def time(self, call, *, cold=False):
        call()
        return 1.0


def on_cpu(package):
    """A package's op where there is no memory to guard."""
    return lambda x, p: package.fused_block(x, *(p[key] for key in package.PARAMETERS))


def cpu_lab(**changes):
    timer = CpuTimer()
    found = {
        "device": "cpu", "timer": timer, "graphed": lambda call: call,
        "host_us": lambda call: call() is None or 7.0, "first_ms": lambda call: call() or 3.0,
        "ceilings": lambda: measure_ceilings(timer, "cpu", floats=64, matrix=8),
        "candidate": on_cpu, "cases": (("uniform", 0), ("normal x3", 1)),
    }  # fmt: skip
    return Lab(**{**found, **changes})


def bench(spec=None, lab=None, at_the_end=lambda: None, **options):
    spec = spec or spec_of(problem=SPEC)

    class Watch:
        def timing_begins(self):
            pass

        def timing_ended(self):
            at_the_end()
            return context()

    chosen = {"strategies": ("two_kernel", "hybrid"), "baselines": ("eager", "channels_last"),
              "seconds": 1.0, **options}  # fmt: skip
    return run_bench(spec, "name: a\n", lab or cpu_lab(), Watch(), **chosen)


def test_a_run_verifies_times_and_checks_again():
    record = bench()
    assert [row.label for row in record.rows] == [
        "kgen two_kernel", "kgen hybrid", "eager", "channels_last",
    ]  # fmt: skip
    for row in record.rows:
        assert row.failed is None
        for kind in ("cold", "warm", "graph"):
            assert row.times(kind).median == 1.0
        assert row.max_error < 1e-4
        assert (row.host_us, row.first_call_ms) == (7.0, 3.0)
    kernel = record.row("kgen two_kernel")
    assert (kernel.verified_cases, kernel.kind) == (2, "kgen")
    assert kernel.recheck_error == kernel.max_error
    assert len(kernel.kernel_sha256) == 64
    assert (record.x, record.y) == ((2, 3, 9, 11), (2, 8, 7, 9))
    assert record.bytes_needed == 4 * 2 * (3 * 9 * 11 + 8 * 7 * 9)
    assert record.flops == 2 * 2 * 8 * 7 * 9 * 27


def test_a_record_survives_its_file(tmp_path):
    record = bench()
    path = tmp_path / "deep" / "a.json"
    record.save(path)
    assert load_record(path) == record
    assert [one.name for one in path.parent.iterdir()] == ["a.json"]
    with pytest.raises(UsageError, match="cannot be written"):
        record.save(tmp_path / "deep" / "a.json" / "b.json")


def test_a_wrong_kernel_has_no_time(monkeypatch):
    right = bench_run.verify_candidate

    def wrong(spec, candidate, device, cases):
        if spec.schedule.strategy == "hybrid":
            return right(spec, lambda x, p: candidate(x, p) + 1.0, device, cases)
        return right(spec, candidate, device, cases)

    monkeypatch.setattr(bench_run, "verify_candidate", wrong)
    record = bench()
    row = record.row("kgen hybrid")
    assert row.failed
    assert (row.cold, row.warm, row.graph, row.host_us) == (None, None, None, None)
    assert record.row("kgen two_kernel").cold
    assert "kgen hybrid" in text_table(record)
    assert "FAILED" in text_table(record)


def with_blocks(monkeypatch, change):
    """Let `change(label, block)` stand in the place of each row's callable."""
    prepare = bench_run.prepare_rows

    def changed(*given):
        rows = prepare(*given)
        for row in rows:
            row.make = lambda make=row.make, label=row.label: change(label, make())
        return rows

    monkeypatch.setattr(bench_run, "prepare_rows", changed)


def test_a_kernel_that_gives_another_bit_after_timing_loses_its_times(monkeypatch):
    over = []

    def change(label, block):
        def call(x):
            y = block(x)
            if over and label == "kgen hybrid":
                last = y.view(-1)[-1:]
                last.copy_(torch.nextafter(last, last + 1))
            return y

        return call

    with_blocks(monkeypatch, change)
    record = bench(at_the_end=lambda: over.append(1))
    assert "its output after timing differs" in record.row("kgen hybrid").failed
    assert record.row("kgen hybrid").cold is None
    assert record.row("kgen two_kernel").failed is None
    assert record.row("eager").cold


def stale(call):
    """A graph that computes nothing when it is replayed."""
    y = call().clone()
    return lambda: y


def of_another_input(call):
    return lambda: call() + 0.5


@pytest.mark.parametrize("graphed", [stale, of_another_input])
def test_replays_are_looked_at_too(graphed):
    for row in bench(lab=cpu_lab(graphed=graphed)).rows:
        assert row.failed == "a replay of its graph gives another output than a call"
        assert (row.cold, row.warm, row.graph) == (None, None, None)


def test_a_row_that_raises_is_a_row_that_failed(monkeypatch):
    def change(label, block):
        def refused(x):
            raise RuntimeError("the launch was refused\nand more")

        return refused if label == "kgen hybrid" else block

    with_blocks(monkeypatch, change)
    record = bench()
    assert record.row("kgen hybrid").failed == "RuntimeError: the launch was refused"
    assert all(row.graph for row in record.rows if row.label != "kgen hybrid")


def test_a_row_that_cannot_be_captured_is_a_row_that_failed():
    def refuse(call):
        raise RuntimeError("operation not permitted when stream is capturing")

    for row in bench(lab=cpu_lab(graphed=refuse)).rows:
        assert "capturing" in row.failed
        assert row.cold is None


def test_counters_that_cannot_be_taken_are_a_warning(monkeypatch):
    def refuse(spec, device):
        raise UsageError("ncu failed: ERR_NVGPUCTRPERM")

    monkeypatch.setattr(bench_run, "count", refuse)
    record = bench(ncu=True)
    assert all(row.graph for row in record.rows)
    assert record.context.warnings == (
        "no counters of kgen two_kernel: ncu failed: ERR_NVGPUCTRPERM",
        "no counters of kgen hybrid: ncu failed: ERR_NVGPUCTRPERM",
    )


def test_the_circumstances_are_those_of_the_timing():
    """The speed of light is measured with long products, which heat a GPU up."""
    order = []
    lab = cpu_lab()
    bench(
        lab=cpu_lab(ceilings=lambda: order.append("ceilings") or lab.ceilings()),
        at_the_end=lambda: order.append("circumstances"),
    )
    assert order == ["circumstances", "ceilings"]


def test_a_nan_is_an_error():
    spec = spec_of(problem=SPEC)
    x, parameters = draw(spec, 2, "uniform", 0, "cpu")
    y = torch.full((2, 8, 7, 9), float("nan"))
    assert bench_run.errors(spec, y, x, parameters)[0] == math.inf


def test_strategies_and_baselines_are_chosen_by_name():
    spec = spec_of(problem=SPEC)
    specs, skipped = chosen_specs(spec, ("all",))
    assert {one.schedule.strategy for one in specs} >= {"two_kernel", "hybrid", "single_pass"}
    assert skipped == []
    assert chosen_specs(spec, None) == ([spec], [])
    with pytest.raises(UsageError, match="unknown strategy 'fast'; legal are all, hybrid"):
        chosen_specs(spec, ("fast",))
    _, parameters = draw(spec, 2, "uniform", 0, "cpu")
    with pytest.raises(UsageError, match="unknown baseline 'jit'; legal are eager, compile"):
        prepare_rows(spec, [], ("jit",), parameters)
    rows = prepare_rows(spec, [spec.with_strategy("two_kernel")], ("hybrid", "eager"), parameters)
    assert [row.label for row in rows] == ["kgen two_kernel", "kgen hybrid", "eager"]


def test_what_does_not_fit_is_skipped_under_all_and_refused_by_name():
    large = spec_of(problem={**SPEC, "out_channels": 84, "height": 2000, "width": 2000})
    specs, skipped = chosen_specs(large, ("all",))
    assert "single_pass" not in {one.schedule.strategy for one in specs}
    assert any(line.startswith("kgen single_pass: single_pass does not fit") for line in skipped)
    with pytest.raises(UsageError, match="--strategies: single_pass does not fit"):
        chosen_specs(large, ("single_pass",))


def test_channels_last_gets_its_layout():
    spec = spec_of(problem=SPEC)
    x, parameters = draw(spec, 2, "uniform", 0, "cpu")
    row = baseline_row("channels_last", spec, parameters)
    arranged = row.arrange(x)
    assert arranged.is_contiguous(memory_format=torch.channels_last)
    module = row.make()
    assert module.conv.weight.is_contiguous(memory_format=torch.channels_last)
    eager = baseline_row("eager", spec, parameters).make()
    assert torch.allclose(module(arranged), eager(x), atol=1e-4)


def test_the_table_names_what_it_rests_on():
    record = bench()
    text = text_table(record)
    assert "speed of light: copy" in text
    for row in record.rows:
        assert f"\n{row.label} " in text
    warned = record.model_copy(update={"context": context(warnings=("too hot",))})
    assert text_table(warned).endswith("warning: too hot")


# ---- Records and comparison ----


def times(median, error=0.001):
    return RowTimes(median=median, p20=median, p80=median, rounds=20, relative_error=error)


def record_of(rows, **changes):
    base = bench()
    return base.model_copy(update={"rows": tuple(rows), **changes})


def kernel(median, label="kgen single_pass", error=0.001, **changes):
    return Row(label=label, kind="kgen", graph=times(median, error), **changes)


@pytest.mark.parametrize(
    ("old", "new", "error", "verdict"),
    [
        (1.0, 1.0, 0.001, "same"),
        (1.0, 1.009, 0.001, "same"),  # two processes differ by that much
        (1.0, 1.02, 0.001, "slower"),
        (1.0, 0.98, 0.001, "faster"),
        (1.0, 1.03, 0.01, "same"),  # 3 sigma of the two are 4.2 %
        (1.0, 1.05, 0.01, "slower"),
    ],
)
def test_verdicts_rest_on_the_noise(old, new, error, verdict):
    then, now = (record_of([kernel(one, error=error)]) for one in (old, new))
    ((change,), _) = compare(then, now)
    assert change.verdict == verdict
    assert verdict in change.sentence()
    assert change.ratio == pytest.approx(new / old)


def test_comparison_tells_what_else_differs():
    old = record_of([kernel(1.0), kernel(1.0, "kgen hybrid")], context=context(gpu="A"))
    new = record_of([kernel(1.0), kernel(2.0, "kgen two_kernel")], context=context(gpu="B"))
    changes, notes = compare(old, new)
    assert [one.label for one in changes] == ["kgen single_pass"]
    assert notes == [
        "the GPU differs: A then, B now", "kgen two_kernel: is new", "kgen hybrid: is gone",
    ]  # fmt: skip
    failed = record_of([Row(label="kgen single_pass", kind="kgen", failed="wrong")])
    changes, notes = compare(record_of([kernel(1.0)]), failed)
    assert changes == []
    assert notes == ["kgen single_pass: has no time in both (new failed)"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is no record of kgen bench"),
        ("{}", "is no record of kgen bench"),
        ('{"schema_version": 99}', "has schema 99, this kgen reads 1"),
        ('{"schema_version": 1}', "name: Field required"),
    ],
)
def test_a_file_that_is_no_record_is_named(tmp_path, text, message):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(RecordError, match=message) as caught:
        load_record(path)
    assert str(path) in str(caught.value)
    with pytest.raises(RecordError, match="cannot be read"):
        load_record(tmp_path / "missing.json")


def test_an_unknown_field_is_refused():
    found = json.loads(bench().model_dump_json())
    found["rows"][0]["speed"] = 1
    with pytest.raises(ValueError, match="speed"):
        Record.model_validate(found)


# ---- Circumstances ----


def smi(**answers):
    def query(arguments):
        for key, text in answers.items():
            if any(key in one for one in arguments):
                return text
        return ""

    return query


def test_clocks_and_throttling_are_read():
    query = smi(clocks="1980, 3201, 45, 310.5")
    assert clocks([], query) == {
        "clocks.sm": 1980.0, "clocks.mem": 3201.0, "temperature.gpu": 45.0, "power.draw": 310.5,
    }  # fmt: skip
    assert clocks([], smi()) == {}
    assert clocks([], smi(clocks="[N/A], 3201, 45, [N/A]")) == {
        "clocks.mem": 3201.0, "temperature.gpu": 45.0,
    }  # fmt: skip
    assert slowed_by([], smi(clocks_event_reasons="0x0000000000000044")) == [
        "the power cap", "hardware thermal limits",
    ]  # fmt: skip
    assert slowed_by([], smi(clocks_throttle_reasons="0x1")) == []  # idle is no throttling
    assert slowed_by([], smi()) == []


def test_the_time_that_clocks_were_held_down_is_that_of_the_timing(monkeypatch):
    monkeypatch.setattr(bench_context, "_identity", lambda device: [])
    counts = iter(["5000000, 0, 0, 7 us", "5250000, 0, [N/A], 7 us"])
    query = lambda what: next(counts) if "counters" in what[0] else ""  # noqa: E731
    circumstances = Circumstances(["kgen"], query=query)
    circumstances.timing_begins()
    assert circumstances.throttled() == [
        "the clocks were held down by the power cap for 0.25 s of the timing"
    ]


def test_a_driver_that_does_not_count_is_asked_for_the_moment(monkeypatch):
    monkeypatch.setattr(bench_context, "_identity", lambda device: [])
    circumstances = Circumstances(["kgen"], query=smi(**{"reasons.active": "0x4"}))
    circumstances.timing_begins()
    assert circumstances.throttled() == [
        "the clocks were held down by the power cap when the timing ended"
    ]
    assert slowed_for([], smi(counters="5250000, 0, [N/A], 7 us")) == {
        "the power cap": 5.25, "software thermal limits": 0.0, "a power brake": pytest.approx(7e-6),
    }  # fmt: skip


def test_other_processes_are_named_and_this_one_is_not():
    import os

    text = f"{os.getpid()}, python\n4242, other app\n"
    assert other_processes([], smi(compute=text)) == ["4242 other app"]
    assert other_processes([], smi()) == []


def test_in_a_container_one_process_out_of_sight_is_this_one():
    text = "77, [Not Found]\n4242, other app\n78, [Not Found]\n"
    seen = lambda pid: pid == 4242  # noqa: E731
    assert other_processes([], smi(compute=text), seen) == ["4242 other app", "78 [Not Found]"]
    assert other_processes([], smi(compute="77, [Not Found]\n"), seen) == []
    assert other_processes([], smi(compute="4242, other app\n"), seen) == ["4242 other app"]


def test_a_record_names_the_commit_of_its_checkout(tmp_path):
    def git(*arguments):
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)

    assert checkout_commit(tmp_path) is None
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (tmp_path / "other.txt").write_text("")
    git("init")
    git("add", "other.txt")
    git("commit", "-m", "without the package")
    assert checkout_commit(package) is None
    git("add", ".")
    git("commit", "-m", "with it")
    commit = checkout_commit(package)
    assert re.fullmatch("[0-9a-f]{40}", commit)
    (tmp_path / "other.txt").write_text("changed")
    assert checkout_commit(package) == commit
    (package / "__init__.py").write_text("changed = True")
    assert checkout_commit(package) == f"{commit}-dirty"


def test_ncu_output_becomes_one_row_a_call():
    metrics = {metric: name for name, metric in {**SUMS, **SHARES}.items()}
    lines = ['"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"']
    for launch, scale in ((0, 1), (1, 10)):
        for number, metric in enumerate(metrics):
            value = f"{scale * (number + 1) * 1000:,}"
            lines.append(f'"{launch}","k","{metric}","unit","{value}"')
    found = combine(parse("==PROF== noise\n" + "\n".join(lines), metrics))
    assert found["dram_read_bytes"] == 11000.0  # both launches
    assert found["nanoseconds"] == 33000.0
    assert found["issue_percent"] == 40000.0  # of the longer one
    assert set(found) == {*SUMS, *SHARES}
    assert [one["nanoseconds"] for one in parse("\n".join(lines), metrics)] == [3000.0, 30000.0]


# ---- The command ----


def test_the_command_says_why_it_cannot_run_here(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    path = tmp_path / "a.yaml"
    path.write_text(
        "version: 1\nname: a\nproblem: {batch: 2, in_channels: 3, out_channels: 8, height: 9,"
        " width: 11, kernel_size: 3}\nchain:\n  - group_norm: {num_groups: 2}\n"
    )
    result = CliRunner().invoke(cli, ["bench", str(path)])
    assert isinstance(result.exception, UsageError)
    assert str(result.exception) == "cannot benchmark: no CUDA device"
    result = CliRunner().invoke(bench_command, [str(path), "--compare", str(tmp_path / "no.json")])
    assert isinstance(result.exception, RecordError)
    assert list(tmp_path.iterdir()) == [path]


def test_the_default_output_is_named_after_the_spec():
    assert str(default_output("abc")) == "benchmarks/results/bench_abc.json"
