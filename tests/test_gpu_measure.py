"""On a GPU: the benchmark and the tuner, whole runs of small blocks."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from helpers import TEXT

from kgen.bench.record import load_record
from kgen.cli import cli
from kgen.tune import tune
from kgen.tune.task import STATUSES

pytestmark = [pytest.mark.gpu, pytest.mark.nvrtc]


@pytest.fixture
def spec_file(tmp_path):
    path = tmp_path / "demo.yaml"
    path.write_text(TEXT)
    return path


def run(*arguments):
    result = CliRunner().invoke(cli, [str(one) for one in arguments])
    assert result.exception is None, f"{result.output}\n{result.exception}"
    return result.output


def test_a_benchmark_of_all_strategies(spec_file, tmp_path):
    out = tmp_path / "bench.json"
    printed = run("bench", spec_file, "--strategies", "all", "--budget", "6s", "--output", out,
                  "--baselines", "eager,channels_last")  # fmt: skip
    record = load_record(out)
    labels = [row.label for row in record.rows]
    assert {"kgen two_kernel", "kgen hybrid", "eager", "channels_last"} <= set(labels)
    for row in record.rows:
        assert row.failed is None, row
        for kind in ("cold", "warm", "graph"):
            assert 0 < row.times(kind).p20 <= row.times(kind).median <= row.times(kind).p80
        assert row.max_error < (1e-4 if row.kind == "kgen" else 1e-1)
        assert row.host_us > 0
        assert row.first_call_ms > 0
    assert record.ceilings.copy_bytes > 1e11
    assert record.ceilings.mma_flops["fp16"] > record.ceilings.mma_flops["fp32"] > 1e12
    assert record.context.gpu in printed


def test_a_benchmark_against_a_slower_one_is_faster(spec_file, tmp_path):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    options = ("--strategies", "two_kernel", "--baselines", "none", "--budget", "6s")
    run("bench", spec_file, *options, "--output", old)
    values = json.loads(old.read_text())
    for kind in ("cold", "warm", "graph"):
        values["rows"][0][kind]["median"] *= 2
    old.write_text(json.dumps(values))
    printed = run("bench", spec_file, *options, "--output", new, "--compare", old)
    assert "  faster (noise" in printed


def test_no_time_holds_what_the_host_takes():
    import statistics
    import time

    import torch

    from kgen.bench.cuda import CudaTimer

    x, timer = torch.zeros(1 << 20, device="cuda"), CudaTimer()

    def call(wait):
        x.add_(1.0)
        end = time.perf_counter() + wait
        while time.perf_counter() < end:
            pass
        x.add_(1.0)

    for _ in range(3):
        timer.time(lambda: call(0.0))
    quick = statistics.median(timer.time(lambda: call(0.0)) for _ in range(20))
    late = statistics.median(timer.time(lambda: call(1e-3)) for _ in range(20))
    assert late < quick + 0.02 < 0.5
    assert timer.time(lambda: x.sum().item()) > 0.0  # one that waits for the device ends too


def test_tuning_ends_with_a_winner_and_a_rerun_measures_nothing_again(spec_file, tmp_path):
    from kgen.spec import load_spec

    spec, store = load_spec(spec_file), tmp_path / "store.jsonl"
    first = tune(spec, strategies=["hybrid"], budget=60.0, store=store)
    assert first.left == 0
    assert first.winner is not None
    assert first.winner.outcome.ms > 0
    lines = store.read_text().splitlines()
    second = tune(spec, strategies=["hybrid"], budget=60.0, store=store)
    assert second.measured == 0
    assert second.winner.schedule == first.winner.schedule
    assert store.read_text().splitlines() == lines
    assert {row.status for row in second.rows} <= set(STATUSES)
