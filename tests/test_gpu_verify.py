"""On a GPU: every shipped spec, all strategies, and kernels broken on purpose."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import kgen
from kgen.constraints import check
from kgen.emit import render
from kgen.spec import STRATEGIES, load_spec

on_gpu = pytest.mark.gpu  # not a mark of the whole module: one test needs none

SPECS = sorted((Path(__file__).parent.parent / "specs").glob("*.yaml"))


@on_gpu
@pytest.mark.nvrtc
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_shipped_spec_is_right_at_full_size(path, strategy):
    spec = load_spec(path).with_strategy(strategy)
    if check(spec):
        pytest.skip(check(spec)[0].message)
    report = kgen.verify(spec)
    assert report.passed, report.table()
    assert report.strategy == strategy
    assert len(report.cases) >= 7


BASE = {
    "version": 1,
    "name": "mutant",
    "problem": {
        "batch": 3, "in_channels": 5, "out_channels": 12, "height": 37, "width": 45,
        "kernel_size": 3, "padding": 1,
    },
    "chain": [{"add": "bias"}, {"mul": "scale"}, "sigmoid", {"group_norm": {"num_groups": 3}}],
}  # fmt: skip

MUTATIONS = {
    "two_kernel": {
        "halo: last input row treated as padding": ("h < kH &&", "h < kH - 1 &&"),
        "halo: first input column treated as padding": ("w >= 0 &&", "w >= 1 &&"),
        "both biases dropped": ("v = op_add(v, f.shift_0);", ""),
        "conv bias dropped": ("conv_bias[c] + param_bias[c]", "param_bias[c]"),
        "scale dropped": ("v = op_mul(v, f.factor_1);", ""),
        "one channel wrong": (
            "column[i * kQ] = acc[k][i];", "column[i * kQ] = c == 7 ? 0.5f : acc[k][i];",
        ),
        "last output column skipped": ("q < kQ ? max", "q < kQ - 1 ? max"),
        "write before the output": (
            "float* const y_n = y +",
            "if (blockIdx.x == 0) y[-1] = 0.0f;\n  float* const y_n = y +",
        ),
        "write behind the workspace": (
            "make_float2(moments.mean, moments.m2);\n",
            "make_float2(moments.mean, moments.m2);\n    if (blockIdx.x == gridDim.x - 1) "
            "partials[kWorkspace] = make_float2(0.0f, 0.0f);\n",
        ),
        "variance divided by n - 1": ("moments.m2 / moments.count",
                                      "moments.m2 / (moments.count - 1.0f)"),
        "one tile's moments lost": ("for (int i = threadIdx.x; i < kGroupPartials;",
                                    "for (int i = threadIdx.x + 1; i < kGroupPartials;"),
        "gamma ignored": ("reciprocal_deviation(moments, kEps) * gamma[c]",
                          "reciprocal_deviation(moments, kEps)"),
        "beta ignored": ("const float shift = beta[c];", "const float shift = 0.0f;"),
        "eps outside the root": ("sqrtf(moments.m2 / moments.count + eps)",
                                 "(sqrtf(moments.m2 / moments.count) + eps * 1e3f)"),
    },
    "hybrid": {
        "beta of the neighbour": ("beta[c0 + c]);", "beta[c0 + (c + 1) % kGroupChannels]);"),
        "last vector not loaded": ("if (offset < kGroup) {\n      load_vector",
                                   "if (offset < kGroup - kVec) {\n      load_vector"),
        "mean of the batch only": ("v[i][j] - moments.mean", "v[i][j]"),
        "scale dropped": ("v = op_mul(v, f.factor_1);", ""),
    },
    "single_pass": {
        "scale dropped": ("affine.slope *= f.factor_1, affine.offset *= f.factor_1;", ""),
        "low parts of x ignored": ("(v[2 * i] - rounded.x) * 2048.0f", "0.0f"),
        "low parts of the weights ignored": ("w[2 * i] - rounded.x", "0.0f"),
        "one job's moments lost": ("own.add(values, as_pair",
                                   "own.add(lane == 1 ? 0.0f : values, as_pair"),
        "mean not subtracted": ("value - runs[one].norm.mean", "value"),
        "last float of a run not stored": ("offset < length)", "offset < length - 1)"),
        "write behind the workspace": (
            "    pairs[i] = kAbsent;\n  }\n",
            "    pairs[i] = kAbsent;\n  }\n  if (blockIdx.x == 0) pairs[count + 2] = 0;\n",
        ),
        "statistics of the sample before": (
            "peek(statistics_of(workspace, job.unit_n, N)",
            "peek(statistics_of(workspace, max(job.unit_n - 1, 0), N)",
        ),
    },
    "recompute": {
        "second pass of another unit": ("head ? segment : tail ? segment - units",
                                        "head ? segment : tail ? units - 1"),
    },
}  # fmt: skip


def package(tmp_path, strategy):
    spec = load_spec({**BASE, "schedule": {"strategy": strategy}})
    return kgen.emit(spec, tmp_path)


@on_gpu
@pytest.mark.nvrtc
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_unmutated_package_passes(tmp_path, strategy):
    report = kgen.verify(package(tmp_path, strategy))
    assert report.passed, report.table()


ALL_MUTATIONS = [(strategy, name) for strategy in MUTATIONS for name in MUTATIONS[strategy]]


@pytest.mark.parametrize(("strategy", "name"), ALL_MUTATIONS)
def test_mutation_applies(strategy, name):
    spec = load_spec({**BASE, "schedule": {"strategy": strategy}})
    assert check(spec) == []
    assert MUTATIONS[strategy][name][0] in render(spec)["kernel.cu"]


@on_gpu
@pytest.mark.nvrtc
@pytest.mark.parametrize(("strategy", "name"), ALL_MUTATIONS)
def test_mutant_fails(tmp_path, strategy, name):
    folder = package(tmp_path, strategy)
    old, new = MUTATIONS[strategy][name]
    source = (folder / "kernel.cu").read_text()
    (folder / "kernel.cu").write_text(source.replace(old, new))
    report = kgen.verify(folder)
    assert not report.passed, f"not caught: {name}\n{report.table()}"


@on_gpu
@pytest.mark.nvrtc
def test_package_runs_from_another_folder(tmp_path):
    folder = package(tmp_path / "a", "two_kernel")
    moved = tmp_path / "b" / folder.name
    shutil.copytree(folder, moved)
    shutil.rmtree(folder)
    assert kgen.verify(moved).passed
