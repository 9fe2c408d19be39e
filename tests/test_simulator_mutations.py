"""Bugs planted in emitted kernels: the simulator must catch every one, and no correct kernel."""

from __future__ import annotations

import numpy as np
import pytest

from kgen.plan import make_plan
from kgen.spec import load_spec

torch = pytest.importorskip("torch")

from kgen.checks import check_case
from kgen.emit import render
from kgen.reference import draw
from kgen.simulator.candidate import SimulatedCandidate
from kgen.simulator.device import Options, SimulationError
from kgen.simulator.simulate import Simulation

pytestmark = pytest.mark.nvrtc

PROBLEM = {
    "batch": 2, "in_channels": 5, "out_channels": 12, "height": 19, "width": 40,
    "kernel_size": 3, "padding": 1,
}  # fmt: skip
CHAIN = [{"add": "bias"}, {"mul": "scale"}, "sigmoid", {"group_norm": {"num_groups": 3}}]
SCHEDULES = {
    # Channels staged in three parts; ragged tiles; two sets of channels a block.
    "two_kernel": {"strategy": "two_kernel", "tile_h": 8, "tile_w": 32, "tile_k": 8, "tile_c": 2,
                   "pixels": 4, "threads": 128},
    "hybrid": {"strategy": "hybrid", "threads": 64},
}  # fmt: skip


def spec_for(strategy):
    return load_spec(
        {
            "version": 1,
            "name": "mutant",
            "problem": PROBLEM,
            "chain": CHAIN,
            "schedule": SCHEDULES[strategy],
        }
    )


SYNC = "__syncthreads();"
# (strategy, what is wrong, old text, new text, what the report must name)
MUTATIONS = [
    ("two_kernel", "no barrier after the tile is loaded",
     f"    {SYNC}  // (1)", "", "race in shared memory"),
    ("two_kernel", "no barrier before the next channels overwrite the tile",
     f"      {SYNC}  // (2)", "", "race in shared memory"),
    ("two_kernel", "no barrier between the warps' moments and their merge",
     f"  {SYNC}  // (3)", "", "race in shared memory"),
    ("two_kernel", "asynchronous copies are not waited for",
     "    wait_for_async_copies();\n", "", "unfinished copy"),
    ("two_kernel", "waited for after the barrier instead of before",
     f"    wait_for_async_copies();\n    {SYNC}  // (1)",
     f"    {SYNC}  // (1)\n    wait_for_async_copies();", "race in shared memory"),
    ("two_kernel", "barrier that only half of each warp reaches",
     f"    {SYNC}  // (1)", f"    if (threadIdx.x % 32 < 16) {SYNC}", "race in shared memory"),
    ("two_kernel", "barrier that only the first warp reaches",
     f"    {SYNC}  // (1)", f"    if (threadIdx.x < 32) {SYNC}", "deadlock"),
    ("two_kernel", "halo one row too short",
     "constexpr int kInH = (kTileH - 1) * kStrideH + (kR - 1) * kDilationH + 1;",
     "constexpr int kInH = (kTileH - 1) * kStrideH + (kR - 1) * kDilationH;", ""),
    ("two_kernel", "halo shifted by one column",
     "w = q0 * kStrideW - kPadW - kShift + column",
     "w = q0 * kStrideW - kPadW - kShift + column + 1", ""),
    ("two_kernel", "padding rows read from the neighbouring channel",
     "h >= 0 && h < kH && w >= 0", "h < kH && w >= 0", ""),
    ("two_kernel", "image read past its last row",
     "c < kC_in && h >= 0 && h < kH &&", "h >= 0 &&", "out of bounds"),
    ("two_kernel", "row tail not masked",
     "max(0, min(kPixels, kP - p))", "kPixels", ""),
    ("two_kernel", "column tail not masked",
     "pixel_thread < kStrips && q < kQ ?", "pixel_thread < kStrips ?", ""),
    ("two_kernel", "last column of each tile never stored",
     "if (i < rows && (!kRaggedK || c < kC_out)) {",
     "if (i < rows && q != kTileW - 1 && (!kRaggedK || c < kC_out)) {", "uninitialised read"),
    ("two_kernel", "channels past C_out stored",
     "(!kRaggedK || c < kC_out)", "true", ""),
    ("two_kernel", "two blocks store the same tile",
     "const int n = blockIdx.x / (kBlocksK * kTiles);", "const int n = 0;",
     "race in global memory"),
    ("two_kernel", "accumulators start from an element of shared memory",
     "float acc[kThreadK][kPixels] = {};",
     "float acc[kThreadK][kPixels] = {};\n  acc[0][0] = smem_x[threadIdx.x];",
     "uninitialised read"),
    ("two_kernel", "moments overlap the weights",
     "reinterpret_cast<Moments*>(smem_w + kSmemW)", "reinterpret_cast<Moments*>(smem_w)", ""),
    ("two_kernel", "moments past the end of shared memory",
     "reinterpret_cast<Moments*>(smem_w + kSmemW)",
     "reinterpret_cast<Moments*>(smem_w + kSmemW + 64)",
     "out of bounds"),
    ("two_kernel", "weights read as misaligned vectors",
     "const float* w_c = smem_w + k_thread;", "const float* w_c = smem_w + k_thread + 1;",
     "misaligned access"),
    ("two_kernel", "partials of one unit never written, and read by the second kernel",
     "if (k0 / kUnit + unit >= kUnits) {", "if (k0 / kUnit + unit >= kUnits - 1) {",
     "uninitialised read"),
    ("two_kernel", "shuffle among lanes that are not all there",
     "return {values, mean, lanes_sum<32>(squares)};",
     "return {values, mean, threadIdx.x % 32 < 16 ? lanes_sum<32>(squares) : squares};",
     "divergent warp instruction"),
    ("two_kernel", "reduction over half the warp",
     "for (int offset = kLanes / 2; offset > 0; offset /= 2) {\n    value +=",
     "for (int offset = kLanes / 4; offset > 0; offset /= 2) {\n    value +=", ""),
    ("two_kernel", "second kernel stores its vector one float off",
     "store_vector<kVec>(plane + offset, v[i]);", "store_vector<kVec>(plane + offset + 1, v[i]);",
     "misaligned access"),
    ("two_kernel", "second kernel starts one block too far",
     "gridDim.x - 1 - blockIdx.x", "gridDim.x - blockIdx.x", "out of bounds"),
    ("hybrid", "unsynchronised reduction over the warps",
     f"  {SYNC}\n  moments = smem_moments[0];", "  moments = smem_moments[0];",
     "race in shared memory"),
    ("hybrid", "coefficients read before they are complete",
     f"  {SYNC}  // (1)", "", "race in shared memory"),
    ("hybrid", "affine pairs read before they are complete",
     f"  {SYNC}  // (3)", "", "race in shared memory"),
    ("hybrid", "last vector left out",
     "if (offset < kGroup) {\n        const float2 affine",
     "if (offset < kGroup - kVec) {\n        const float2 affine",
     "never written"),
    ("hybrid", "walks past the group",
     "if (offset < kGroup) {\n      load_vector",
     "if (offset < kGroup + kBatch) {\n      load_vector",
     "out of bounds"),
    ("hybrid", "neighbouring group's channels",
     "const int c0 = blockIdx.x % kNumGroups * kGroupChannels;", "const int c0 = 0;", ""),
]  # fmt: skip


def run(strategy, source=None, options=None):
    spec = spec_for(strategy)
    simulation = Simulation(spec, make_plan(spec), "sm_90a", source)
    candidate = SimulatedCandidate(simulation, options or Options())
    x, parameters = draw(spec, 2, "uniform", 0, "cpu")
    return check_case(spec, candidate, x, parameters), candidate.outcome


def mutated(strategy, old, new):
    spec = spec_for(strategy)
    source = render(spec)["kernel.cu"]
    assert old in source, "the mutation no longer applies"
    return source.replace(old, new)


def test_there_are_at_least_twenty():
    assert len(MUTATIONS) >= 20
    assert len({name for _, name, *_ in MUTATIONS}) == len(MUTATIONS)


@pytest.mark.parametrize("strategy", list(SCHEDULES))
def test_correct_kernels_raise_no_alarm(strategy):
    result, outcome = run(strategy)
    assert result.passed, result
    assert outcome.problems == ()


@pytest.mark.parametrize(
    ("strategy", "old", "new", "kind"),
    [(strategy, old, new, kind) for strategy, _, old, new, kind in MUTATIONS],
    ids=[name for _, name, *_ in MUTATIONS],
)
def test_planted_bug_is_caught(strategy, old, new, kind):
    """kind: words of the finding that must name it; empty where wrong values are enough."""
    source = mutated(strategy, old, new)
    if kind == "deadlock":
        with pytest.raises(SimulationError, match=kind):
            run(strategy, source)
        return
    result, outcome = run(strategy, source)
    text = " ".join(outcome.problems)
    assert not result.passed or outcome.problems, "not caught"
    assert kind in text, (result.reason, outcome.problems)


def test_findings_name_kernel_lines_block_and_thread():
    _, outcome = run("two_kernel", mutated("two_kernel", f"    {SYNC}  // (1)", ""))
    found = next(one for one in outcome.findings if one.kind == "race in shared memory")
    source = mutated("two_kernel", f"    {SYNC}  // (1)", "").splitlines()
    assert found.kernel == "mutant_conv"
    assert found.text.startswith("ld.shared")
    assert "address" in source[found.source_line - 1] or "x_c" in source[found.source_line - 1]
    assert 0 <= found.thread < 128
    assert f"PTX line {found.line}, kernel.cu:{found.source_line}, block {found.block}" in str(
        found
    )


def test_checks_off_still_give_the_same_values():
    _, checked = run("two_kernel")
    _, plain = run("two_kernel", options=Options(checks=False))
    np.testing.assert_array_equal(checked.y, plain.y)


def test_results_do_not_depend_on_how_many_blocks_run_at_once():
    _, many = run("two_kernel")
    _, few = run("two_kernel", options=Options(resident_threads=128))
    np.testing.assert_array_equal(many.y, few.y)
    assert few.problems == ()
    assert few.counts == many.counts
