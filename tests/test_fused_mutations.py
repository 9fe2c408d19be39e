"""Bugs planted in the kernels on tensor cores: the simulator must catch every one."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from helpers import spec_of

torch = pytest.importorskip("torch")

from kgen.checks import check_case
from kgen.emit import render
from kgen.plan import make_plan
from kgen.reference import draw
from kgen.simulator.candidate import SimulatedCandidate
from kgen.simulator.device import Options, SimulationError
from kgen.simulator.simulate import Simulation
from kgen.spec import FUSED, Spec

pytestmark = pytest.mark.nvrtc

HANG = "no progress|deadlock"  # what the simulator says of a launch that never ends
ONE, TWO = ("single_pass",), ("recompute",)
RAGGED, CHUNKED, STEPPED, UNEVEN = "ragged", "chunked", "stepped", "uneven"

# ragged: 4 tiles a sample, of which 3 have rows or columns outside the output; runs that start
# anywhere in a line; one unit of several groups. chunked: two chunks of input channels, two units,
# tiles that cover the output exactly and span its width. stepped: tiles of several products, of
# which the last has a row outside the output. uneven: a last tile that only some warps fill.
PROBLEMS = {
    RAGGED: {"batch": 3, "in_channels": 5, "out_channels": 12, "height": 9, "width": 15,
             "kernel_size": 3},
    CHUNKED: {"batch": 2, "in_channels": 11, "out_channels": 96, "height": 4, "width": 10,
              "kernel_size": [1, 3]},
    STEPPED: {"batch": 2, "in_channels": 3, "out_channels": 64, "height": 9, "width": 15,
              "kernel_size": 3},
    UNEVEN: {"batch": 2, "in_channels": 3, "out_channels": 16, "height": 8, "width": 10,
             "kernel_size": 3},
}  # fmt: skip
KNOBS = {
    RAGGED: {"tile_h": 4, "tile_w": 8}, CHUNKED: {"tile_h": 1}, STEPPED: {"tile_h": 4},
    UNEVEN: {"tile_h": 4},
}  # fmt: skip
GROUPS = {RAGGED: 4, CHUNKED: 2, STEPPED: 1, UNEVEN: 4}


def spec_for(name: str, strategy: str, target: str = "sm_90a") -> Spec:
    return spec_of(
        name="mutant",
        problem=PROBLEMS[name],
        chain=[{"add": "bias"}, "tanh", {"group_norm": {"num_groups": GROUPS[name]}}],
        schedule={"strategy": strategy, **KNOBS[name]},
        targets=[target],
    )


@dataclass(frozen=True)
class Bug:
    """old -> new in the kernel. found: words that the report must have; empty: values may do."""

    what: str
    old: str
    new: str
    found: str = ""
    problem: str = RAGGED
    strategies: tuple[str, ...] = FUSED
    target: str = "sm_90a"


BUGS = [
    # What is handed from the loader to the products.
    Bug("loaded pixels are not fenced",
        "      fence_before_products();\n      mbarrier_arrive(full",
        "      mbarrier_arrive(full", "proxy fence"),
    Bug("resident weights are not fenced",
        "  fence_before_products();\n  __syncthreads();", "  __syncthreads();", "proxy fence"),
    Bug("a place is overwritten before its products are done",
        "mbarrier_wait(empty + slot_of(sequence, order), (uses - 1) % 2);  // (2)", ""),
    Bug("the loader waits for the wrong parity", "(uses - 1) % 2);  // (2)",
        "uses % 2);  // (2)"),
    Bug("the loader waits for the next place",
        "empty + slot_of(sequence, order), (uses", "empty + slot_of(sequence, order + 1), (uses"),
    Bug("products start before their chunk is staged",
        "mbarrier_wait(full + slot, parities >> slot & 1);  // (1)", ""),
    Bug("a consumer forgets that it has used a place", "    parities ^= 1u << slot;\n", "",
        "", CHUNKED),
    Bug("a consumer counts turns instead of chunks",
        "(kConsumers * turn + consumer) * (kChunks * kParts)",
        "(kConsumers * turn + consumer) * kParts", "", CHUNKED),
    Bug("the low part's place is freed while its products run",
        "        products_wait(1);\n        mbarrier_arrive_lane(barriers.empty + low);  // (2)",
        "        mbarrier_arrive_lane(barriers.empty + low);  // (2)", "race in shared memory"),
    Bug("the stage is freed before the last products are waited for",
        "    products_wait(kBlocks - 1 - t);\n    if (t + 1 == kBlocks) {\n"
        "      mbarrier_arrive_lane(empty);  // (2)\n    }",
        "    if (t + 1 == kBlocks) {\n      mbarrier_arrive_lane(empty);  // (2)\n    }\n"
        "    products_wait(kBlocks - 1 - t);", "race in shared memory"),
    Bug("the stage is freed before a chunk's products are waited for",
        "      products_wait(0);\n      mbarrier_arrive_lane(barriers.empty + slot);  // (2)",
        "      mbarrier_arrive_lane(barriers.empty + slot);  // (2)", "", CHUNKED),
    Bug("sums are read while the last products run",
        "products_wait(kBlocks - 1 - t);", "products_wait(kBlocks - t);"),
    Bug("warps of one warpgroup wait for their products in different places",
        "(job.p0 + kTileH <= kP && columns == kTileW)",
        "(rows == kRowSteps && columns == kTileW)", "divergent warpgroup", UNEVEN),
    Bug("registers are not fenced before the products", "  products_begin();\n", ""),
    Bug("every chunk goes to the first consumer",
        "mbarrier_arrive(full + consumer * kSlots + slot_of",
        "mbarrier_arrive(full + slot_of", HANG, strategies=ONE),
    Bug("the loader leaves out every second job",
        "       index += gridDim.x, consumer = (consumer + 1) % kConsumers) {\n"
        "    const Job job = job_at(index, N);\n    const float* const x_n",
        "       index += 2 * gridDim.x, consumer = (consumer + 1) % kConsumers) {\n"
        "    const Job job = job_at(index, N);\n    const float* const x_n", HANG, strategies=ONE),
    # Moments and statistics.
    Bug("no barrier between the rows' sums and their merge",
        "warpgroup_barrier(1 + consumer);  // (7)", "", "race in shared memory"),
    Bug("one place for the sums of two jobs, by warps", "(2 * consumer + summed % 2) * 64",
        "2 * consumer * 64", "race in shared memory", target="sm_80"),
    Bug("the sums of a set are not moved to the common value", "const float moved = away * count;",
        "const float moved = 0.0f;"),
    Bug("squares are moved by half", "fmaf(away, 2.0f * sum_of_set + moved,",
        "fmaf(away, sum_of_set + moved,"),
    Bug("lanes sum from values of their own",
        "pivot[half] = __shfl_sync(0xffffffffu, v, threadIdx.x % 32 / 4 * 4);",
        "pivot[half] = v;"),
    Bug("statistics are made before all partials are there",
        "while (__any_sync(0xffffffffu, absent));", "while (false);"),
    Bug("statistics are read before they are there",  # those of recompute are there for long
        "while (__any_sync(0xffffffffu, bits == kAbsent));", "while (false);", "", CHUNKED, ONE),
    Bug("makers wait before they make", "      make_statistics(job, workspace, N);\n",
        "      while (peek(statistics_of(workspace, job.unit_n, N)) == kAbsent) {\n      }\n"
        "      make_statistics(job, workspace, N);\n", HANG, strategies=ONE),
    Bug("a group has no maker", "(slot - first + makers) % makers : kUnitGroups",
        "(slot - first + makers) % makers + 1 : kUnitGroups", HANG),
    Bug("no place is marked as absent", "    pairs[i] = kAbsent;\n", "", "uninitialised read"),
    Bug("the places of statistics are not marked", "* kNumGroups * (kUnitJobs + 1);",
        "* kNumGroups * kUnitJobs;", "uninitialised read", CHUNKED, ONE),
    Bug("a partial in the next job's place",
        "slot = job.slab * kTiles + job.tile;\n  const int channels",
        "slot = (job.slab * kTiles + job.tile + 1) % kUnitJobs;\n  const int channels"),
    Bug("partials are published by ordinary stores", "st.relaxed.gpu.global.b64",
        "st.global.b64", "race in global memory"),
    Bug("partials are read by ordinary loads", "ld.relaxed.gpu.global.b64",
        "ld.volatile.shared.b64"),
    Bug("statistics of the first unit for all",
        "bits = peek(statistics_of(workspace, job.unit_n, N) + i * 32 + lane);",
        "bits = peek(statistics_of(workspace, 0, N) + i * 32 + lane);"),
    Bug("norms are used before they are made",
        "mbarrier_wait(barriers.norms_full + place, stored / 2 % 2);", ""),
    Bug("norms are overwritten while they are used",
        "mbarrier_wait(barriers.norms_empty + place, (made / 2 - 1) % 2);  // (6)", "",
        "race in shared memory", CHUNKED),
    Bug("every channel has the first group's norm", "channel / kGroupChannels : 0;\n      float2",
        "0 : 0;\n      float2"),
    # Finished tiles.
    Bug("a tile is stored before it is finished",
        "mbarrier_wait(barriers.tile_full + consumer, parities >> consumer & 1);  // (3)", ""),
    Bug("a tile is overwritten before it is stored",
        "      mbarrier_wait(barriers.tile_empty + consumer, (stored - 1) % 2);  // (4)\n", "",
        "race in shared memory"),
    Bug("the other consumer's tile is stored",
        "reinterpret_cast<const float*>(smem + kTilesAt) + consumer * kTileFloats;",
        "reinterpret_cast<const float*>(smem + kTilesAt) + (1 - consumer) * kTileFloats;"),
    Bug("two of the warps that store free the tile", "by_storers ? 32 * kStorers : 128);",
        "by_storers ? 32 * 2 : 128);", strategies=ONE),
    Bug("one warp finishes a tile", "by_storers ? 32 * kStorers : 128);",
        "by_storers ? 32 * kStorers : one >= kTileFull ? 32 : 128);"),
    Bug("a barrier counts warps", "by_maker ? 32 :", "by_maker ? 1 :", HANG, strategies=ONE),
    Bug("channels past the slab are written", "channel + 8 * half >= kSlabChannels", "false"),
    Bug("runs go past the tile's columns", ": min(kTileW, kQ - job.q0);\n    const int runs",
        ": kTileW;\n    const int runs"),
    Bug("runs start one float late", "kVecY == 4 ? 0 : beyond_line, norms",
        "kVecY == 4 ? 0 : beyond_line - 1, norms", "never written"),
    Bug("every second pair of runs is left out", "pair += kStorers) {", "pair += 2 * kStorers) {",
        "never written"),
    # Which values.
    Bug("columns outside the output are summed", "columns - t % kColSteps * kN : 0)",
        "kTileW - t % kColSteps * kN : 0)"),
    Bug("rows of a step outside the output are summed", "t / kColSteps < rows ?", "true ?", "",
        STEPPED),
    Bug("x is read one row too low", "- kPadH + pixel / kInW;", "- kPadH + pixel / kInW + 1;"),
    Bug("the slices of K lie one pixel further", "first_pixel(t) + offset, next - offset)",
        "first_pixel(t) + offset + 1, next - offset)"),
    Bug("the second slice of a step lies one pixel further", "+ offset, next - offset)",
        "+ offset, next - offset + 1)"),
    Bug("the weights' slices lie closer", "set + k * 128, 64)", "set + k * 128, 32)"),
    Bug("the weights' sets are swapped", "Product{1, 1} : i == 1 ? Product{0, 0}",
        "Product{0, 1} : i == 1 ? Product{1, 0}"),
    Bug("the low parts of x are not scaled",
        "(v[2 * i] - rounded.x) * 2048.0f, (v[2 * i + 1] - rounded.y) * 2048.0f",
        "v[2 * i] - rounded.x, v[2 * i + 1] - rounded.y"),
    Bug("the weights' scale stays", "Affine affine = {unscale, 0.0f};",
        "Affine affine = {1.0f, 0.0f};"),
    Bug("every unit has the first one's weights",
        "kResident ? ((job.unit * kSlabs + job.slab) * kChunks + chunk) : 0",
        "kResident ? chunk : 0", "", CHUNKED),
    Bug("every unit has the first one's bias", "if (kUnits * kSlabs > 1 || turn == 0) {",
        "if (turn == 0) {", "", CHUNKED),
    Bug("sums do not start at zero", "first && i == 0 && k == 0);", "false);"),
    Bug("every chunk starts a new sum", "x_parts + low * kPartBytes, chunk == 0);",
        "x_parts + low * kPartBytes, true);", "", CHUNKED),
    # The order of jobs.
    Bug("a consumer takes every job of its block", "index += kConsumers * gridDim.x, ++turn)",
        "index += gridDim.x, ++turn)"),
    Bug("storing jobs come before their statistics", "(ahead % 2 == 0 ? lag : 0)",
        "(ahead % 2 == 0 ? 0 : lag)", strategies=TWO),
    Bug("the last units are stored twice", "tail ? segment - units :",
        "tail ? segment - units - 1 :", strategies=TWO),
    Bug("the second pass takes statistics too", "job.statistics = head ||",
        "job.statistics = segment >= 0 || head ||", strategies=TWO),
    # Products by warps.
    Bug("the halves of a fragment of x are swapped", "rows, columns[0], columns[1]);",
        "rows, columns[1], columns[0]);", target="sm_80"),
    Bug("the second slice of a step lies one pixel further, by warps",
        "(first_pixel(t) + offset) * 16, (next - offset) * 16);",
        "(first_pixel(t) + offset) * 16, (next - offset + 1) * 16);", target="sm_80"),
    Bug("a fragment's rows are those of the next warp", "lane / 16 * 64 + 16 * warp",
        "lane / 16 * 64 + 16 * (warp ^ 1)", target="sm_80"),
    Bug("products start before their chunk is staged, by warps",
        "mbarrier_wait(full + slot, parities >> slot & 1);  // (1)", "", target="sm_80"),
]  # fmt: skip
# Where both strategies have the code, every second bug is planted in each.
CASES = [(bug, bug.strategies[index % len(bug.strategies)]) for index, bug in enumerate(BUGS)]


def run(spec, source=None):
    simulation = Simulation(spec, make_plan(spec), spec.targets[0], source)
    candidate = SimulatedCandidate(simulation, Options())
    x, parameters = draw(spec, spec.problem.batch, "normal x3", 0, "cpu")
    return check_case(spec, candidate, x, parameters), candidate.outcome


def mutated(spec, bug):
    source = render(spec)["kernel.cu"]
    assert bug.old in source, "the mutation no longer applies"
    return source.replace(bug.old, bug.new)


def verdict_on(spec, source):
    """Whether anything was found, be it that the launch hangs, and what."""
    try:
        result, outcome = run(spec, source)
    except SimulationError as error:
        return True, str(error)
    return not result.passed, "; ".join((result.reason, *outcome.problems))


def test_there_are_at_least_twenty_five():
    assert len({bug.what for bug in BUGS}) == len(BUGS) >= 25


def test_the_problems_hold_what_the_bugs_need():
    for strategy in FUSED:
        ragged = make_plan(spec_for(RAGGED, strategy)).fused
        assert not ragged.is_whole
        assert not ragged.whole_rows
        assert (ragged.vec, ragged.unit_groups, ragged.tiles) == (1, 4, (2, 2))
        assert ragged.slab_channels < ragged.channels_m
        chunked = make_plan(spec_for(CHUNKED, strategy)).fused
        assert chunked.is_whole
        assert chunked.whole_rows
        assert (chunked.chunks, chunked.units) == (2, 2)
        assert chunked.weights_resident
        stepped = make_plan(spec_for(STEPPED, strategy)).fused
        assert (stepped.rows_m, stepped.row_steps, stepped.is_whole) == (1, 4, False)
        uneven = make_plan(spec_for(UNEVEN, strategy)).fused
        assert (uneven.rows_m, uneven.row_steps, uneven.g.P % uneven.tile_h) == (4, 1, 2)
        assert {one.slots - one.math.parts for one in (ragged, chunked, stepped)} == {1}


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("strategy", FUSED)
@pytest.mark.parametrize("name", PROBLEMS)
def test_correct_kernels_raise_no_alarm(name, strategy, target):
    result, outcome = run(spec_for(name, strategy, target))
    assert (result.passed, outcome.problems) == (True, ()), result.reason


@pytest.mark.parametrize(
    ("bug", "strategy"), CASES, ids=[f"{bug.what}, {strategy}" for bug, strategy in CASES]
)
def test_planted_bug_is_caught(bug, strategy):
    spec = spec_for(bug.problem, strategy, bug.target)
    source = mutated(spec, bug)
    if bug.found == HANG:
        with pytest.raises(SimulationError, match=HANG):
            run(spec, source)
        return
    caught, text = verdict_on(spec, source)
    assert caught, "not caught"
    assert bug.found in text


@pytest.mark.parametrize("strategy", FUSED)
def test_weights_that_are_not_scaled_into_range_are_noticed(strategy):
    spec = spec_for(RAGGED, strategy)
    plan, source = make_plan(spec), render(spec)["kernel.cu"]
    old = "const int shift = most > 0.0f ? max(-113, min(113, 14 - exponent)) : 0;"
    assert source.count(old) == 1
    passed = []
    for text in (source, source.replace(old, "const int shift = 0;")):
        candidate = SimulatedCandidate(
            Simulation(spec, plan, "sm_90a", text), Options(checks=False)
        )
        x, parameters = draw(spec, plan.g.N, "large weights", 7, "cpu")
        passed.append(check_case(spec, candidate, x, parameters, "large weights", 7).passed)
    assert passed == [True, False]
