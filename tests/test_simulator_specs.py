"""Every shipped spec on the simulator, all strategies, several architectures."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from helpers import spec_of

import kgen
from kgen.spec import load_spec

torch = pytest.importorskip("torch")

from kgen.arch import ARCHS
from kgen.emit import emit
from kgen.geometry import geometry
from kgen.plan import make_plan
from kgen.reference import draw, oracle
from kgen.simulator.candidate import SimulatedCandidate, library_convolution
from kgen.simulator.device import Options
from kgen.simulator.measure import measure
from kgen.simulator.reduce import reduced
from kgen.simulator.simulate import Simulation
from kgen.verdict import CASES

pytestmark = pytest.mark.nvrtc
SPECS = sorted((Path(__file__).parent.parent / "specs").glob("*.yaml"))


def variant(path, strategy, targets=("sm_80", "sm_90a", "sm_120")):
    spec = load_spec(path).with_strategy(strategy)
    return spec.model_copy(update={"targets": targets})


@pytest.mark.parametrize("strategy", ["two_kernel", "hybrid"])
@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_shipped_spec_is_right_on_the_simulator(path, strategy):
    report = kgen.verify(variant(path, strategy), device="simulator")
    assert report.passed, report.table()
    assert report.strategy == strategy
    assert "simulator (sm_80, sm_90a, sm_120)" in report.device
    assert len(report.cases) == 10
    told = [line.split()[0] for line in report.table().splitlines()[1:-1]]
    assert told == ["target", *8 * ["sm_80"], "sm_90a", "sm_120"]


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_the_reduced_copy_keeps_the_tile_and_its_remainders(path):
    spec = load_spec(path)
    arch = ARCHS[spec.targets[0]]
    full = make_plan(spec, arch)
    small, plan = reduced(spec, arch)
    assert (plan.strategy, plan.separate_reduce) == (full.strategy, full.separate_reduce)
    assert (plan.g.N or 2) <= 2
    assert plan.g.W % 4 == full.g.W % 4
    if full.tile is not None:
        for knob in ("tile_h", "tile_w", "tile_k", "tile_c", "pixels", "threads", "thread_k",
                     "copy", "unroll"):  # fmt: skip
            assert getattr(plan.tile, knob) == getattr(full.tile, knob), knob
        assert plan.g.P % plan.tile.tile_h == full.g.P % full.tile.tile_h
        assert plan.g.Q % plan.tile.tile_w == full.g.Q % full.tile.tile_w
    assert small.problem.out_channels == spec.problem.out_channels


def emitted(tmp_path, strategy="two_kernel", **changes):
    problem = {"batch": 3, "in_channels": 3, "out_channels": 8, "height": 9, "width": 11,
               "kernel_size": 3}  # fmt: skip
    spec = spec_of(problem=problem, strategy=strategy, targets=["sm_90a"], **changes)
    return emit(spec, tmp_path)


@pytest.mark.parametrize(
    ("strategy", "old", "new"),
    [
        ("hybrid", "blockIdx.x) * kGroup", "blockIdx.x % kNumGroups) * kGroup"),
        ("two_kernel", "x + static_cast<long long>(n)", "x + static_cast<long long>(0 * n)"),
    ],
)
def test_a_package_that_takes_another_sample_is_wrong(strategy, old, new, tmp_path):
    folder = emitted(tmp_path, strategy)
    assert kgen.verify(folder, device="simulator").passed
    text = (folder / "kernel.cu").read_text()
    assert text.count(old) == 1, [line for line in text.splitlines() if "long long" in line]
    (folder / "kernel.cu").write_text(text.replace(old, new))
    assert not kgen.verify(folder, device="simulator").passed


@pytest.mark.parametrize(
    ("strategy", "problem", "schedule"),
    [
        # Moments of 12 bytes at the end of the shared memory; weights with a padded pitch.
        ("hybrid", {"in_channels": 1, "out_channels": 4, "height": 4, "width": 4, "kernel_size": 1},
         {"threads": 32}),
        ("two_kernel", {"in_channels": 8, "out_channels": 6, "height": 8, "width": 8,
                        "kernel_size": [1, 4]}, {"tile_k": 3, "pixels": 1}),
    ],
)  # fmt: skip
def test_a_vector_that_is_read_in_part_raises_no_alarm(strategy, problem, schedule):
    spec = spec_of(
        problem={"batch": 1, "conv_bias": False, **problem},
        chain=["tanh", {"group_norm": {"num_groups": 2}}],
        schedule={"strategy": strategy, **schedule},
        targets=["sm_90a", "sm_100a", "sm_120"],
    )
    report = kgen.verify(spec, device="simulator")
    assert report.passed, report.table()


def test_all_samples_of_a_package_run_if_asked(tmp_path):
    folder = emitted(tmp_path)
    assert kgen.verify(folder, device="simulator").cases[0].batch == 2
    assert kgen.verify(folder, device="simulator", full=True).cases[0].batch == 3


def test_a_package_that_would_launch_otherwise_is_wrong(tmp_path):
    folder = emitted(tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["launches"][0]["smem_bytes"] = 16
    manifest["workspace_floats_per_sample"] = 0
    (folder / "manifest.json").write_text(json.dumps(manifest))
    report = kgen.verify(folder, device="simulator")
    assert not report.passed
    assert "launches, workspace_floats_per_sample" in report.summary()


@pytest.mark.parametrize("strategy", ["two_kernel", "single_pass", "recompute"])
def test_the_reduced_copy_has_more_rows_and_columns_than_the_filter_spans(strategy):
    """With tiles of one row and padding, three tiles would be one row of x."""
    problem = {"batch": 3, "in_channels": 7, "out_channels": 10, "height": 9, "width": 11,
               "kernel_size": [3, 2], "stride": [1, 2], "padding": [2, 1]}  # fmt: skip
    spec = spec_of(problem=problem, chain=[{"group_norm": {"num_groups": 2}}], strategy=strategy)
    small, plan = reduced(spec, ARCHS["sm_90a"])
    assert 4 <= small.problem.height <= 9
    assert 3 <= small.problem.width <= 11
    tile = plan.tile or plan.fused
    assert plan.g.P % tile.tile_h == geometry(spec.problem).P % tile.tile_h


def test_the_report_says_what_was_run_and_claims_nothing_more():
    report = kgen.verify(SPECS[0].parent / "conv8x32_k3_gn8.yaml", device="simulator")
    text = report.table()
    assert "a reduced copy of x [128, 8, 256, 256]" in text
    assert "simulator" in text
    assert "verified" not in text


def test_an_emitted_package_is_simulated_with_its_own_source(tmp_path):
    spec = load_spec(SPECS[0].parent / "conv8x8_1x1out.yaml")
    folder = kgen.emit(spec, tmp_path)
    report = kgen.verify(folder, device="simulator")
    assert report.passed
    kernel = folder / "kernel.cu"
    kernel.write_text(kernel.read_text().replace("v = op_mul(v, f.factor_1);", ""))
    broken = kgen.verify(folder, device="simulator")
    assert not broken.passed


def test_one_full_sample_of_the_flagship_is_fast_enough():
    """2.06 M outputs, 148 M multiply-adds: 10 s without checks, 40 s with them."""
    spec = load_spec(SPECS[0].parent / "conv8x32_k3_gn8.yaml")
    simulation = Simulation(spec, make_plan(spec), "sm_90a")
    x, parameters = draw(spec, 1, "uniform", 0, "cpu")
    wanted = oracle(spec, x, parameters)
    for checks, limit in ((False, 10.0), (True, 40.0)):
        candidate = SimulatedCandidate(simulation, Options(checks=checks))
        start = time.perf_counter()
        y = candidate(x, parameters)
        seconds = time.perf_counter() - start
        assert float((y.double() - wanted).abs().max()) < 1e-4
        assert candidate.outcome.problems == ()
        assert seconds < limit, seconds


def test_the_normalise_pass_stores_whole_sectors():
    """Its planes start at multiples of a vector; only their ends may share a sector."""
    counts = measure(load_spec(SPECS[0].parent / "conv8x32_two_kernel.yaml"))["counts"]
    stores = counts["conv8x32_two_kernel_normalise"]
    partial = stores["partial sectors stored to global"]
    assert partial <= 0.07 * stores["sectors stored to global"]


@pytest.mark.parametrize("name", ["conv8x32_k3_gn8", "conv8x32_recompute"])
def test_the_fused_kernel_stores_whole_sectors_and_meets_no_bank_twice(name):
    """Runs are aligned to 16 bytes here: their ends, and a warp's stores, share some sectors."""
    counts = measure(load_spec(SPECS[0].parent / f"{name}.yaml"))["counts"][f"{name}_fused"]
    partial = counts["partial sectors stored to global"]
    assert 0 < partial <= 0.07 * counts["sectors stored to global"]
    for way in ("loaded from", "stored to"):  # a few, of moments and statistics
        assert counts[f"bank conflicts {way} shared"] <= 80


def test_the_tile_loop_has_no_bank_conflicts():
    for name in ("conv8x32_two_kernel", "conv3x16_k5", "conv9x6_k3x5"):
        counts = measure(load_spec(SPECS[0].parent / f"{name}.yaml"))["counts"]
        assert counts[f"{name}_conv"]["bank conflicts loaded from shared"] == 0, name


def test_the_hybrid_kernel_starts_from_the_convolution_without_bias():
    spec = variant(SPECS[0].parent / "conv8x8_1x1out.yaml", "hybrid")
    x, parameters = draw(spec, 2, "uniform", 0, "cpu")
    conv = library_convolution(spec, x, parameters)
    wanted = (x.unsqueeze(1) * parameters["conv.weight"]).sum((2, 3, 4))
    torch.testing.assert_close(conv.reshape(2, 8), wanted, atol=1e-5, rtol=1e-5)


def test_what_a_launch_would_be_refused_for_is_a_problem():
    from dataclasses import replace

    spec = load_spec(SPECS[0].parent / "conv8x8_1x1out.yaml")
    plan = make_plan(spec)
    assert Simulation(spec, plan, "sm_90a").limit_problems == ()
    big = replace(plan.launches[0], smem_bytes=200_000)
    many = replace(plan.launches[0], threads=65536)
    for launch, words in ((big, "200000 bytes of shared memory, sm_86 has 101376"),
                          (many, "registers for 65536 threads")):  # fmt: skip
        changed = replace(plan, launches=(launch, *plan.launches[1:]))
        source = Simulation(spec, plan, "sm_86").source
        problems = Simulation(spec, changed, "sm_86", source).limit_problems
        assert words in " ".join(problems)


def test_large_problems_are_cut_further_and_the_report_says_so():
    spec = load_spec(
        {
            "version": 1,
            "name": "large",
            "problem": {"batch": 32, "in_channels": 512, "out_channels": 512, "height": 28,
                        "width": 28, "kernel_size": 3, "padding": 1},
            "chain": [{"add": "bias"}, "silu", {"group_norm": {"num_groups": 32}}],
            "schedule": {"strategy": "two_kernel"},
        }
    )  # fmt: skip
    plan = reduced(spec, ARCHS["sm_90a"])[1]
    assert plan.g.N == 1
    full = make_plan(spec)
    assert plan.tile.tiles[0] <= 2
    assert plan.g.P % plan.tile.tile_h == full.g.P % full.tile.tile_h


def test_few_cases_are_named_as_few(monkeypatch):
    from kgen.simulator import candidate

    monkeypatch.setattr(candidate, "CASE_MACS", 0)
    report = kgen.verify(SPECS[0].parent / "conv8x8_1x1out.yaml", device="simulator")
    assert len(report.cases) == 2
    assert f"the first 2 of {len(CASES)} cases because of its size" in report.headline()


def test_a_package_broken_by_hand_is_reported_with_what_was_found(tmp_path):
    """Wrong values do not hide the finding behind them; a run that cannot end is not repeated."""
    spec = load_spec(SPECS[0].parent / "conv8x8_1x1out.yaml").with_strategy("two_kernel")
    folder = kgen.emit(spec, tmp_path)
    kernel = folder / "kernel.cu"
    source = kernel.read_text()
    index = "s * kDilationW]"
    assert source.count(index) == 1
    kernel.write_text(source.replace(index, "s * kDilationW - 1]"))
    first = kgen.verify(folder, device="simulator").cases[0].reason
    assert "elements" in first.split("; ")[0]
    assert "out of bounds: load of 4 bytes at shared address -4 of" in first
    kernel.write_text(source.replace("_normalise(", "_renamed("))
    missing = kgen.verify(folder, device="simulator").cases
    assert len(missing) == len(spec.targets)
    assert missing[0].reason.startswith("no kernel ")
