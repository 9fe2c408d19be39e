"""Plans of single_pass and recompute: what their tiles promise, without running a kernel."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from helpers import ROOT, flagship, issues_of, only_issue, spec_of, variant
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kgen import compiler
from kgen._launching import grid as runtime_grid
from kgen.arch import ARCHS
from kgen.compiler import compile_source, parse_resources
from kgen.emit import render
from kgen.errors import SpecError
from kgen.fused import (
    CHUNK_C,
    CHUNKED_ACCUMULATORS,
    IN_FLIGHT,
    MAX_ACCUMULATORS,
    MAX_BLOCKS,
    PORTABLE_ACCUMULATORS,
    THREADS,
    M,
    grid,
)
from kgen.math_kinds import MATHS
from kgen.plan import make_plan
from kgen.spec import FUSED, load_spec

FEW = settings(
    derandomize=True,
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
pairs = st.tuples(st.integers(1, 3), st.integers(1, 3)).map(list)


@st.composite
def plans(draw):
    """(spec, plan) of a fused strategy: any small geometry, any math, any targets."""
    kernel, dilation = [draw(st.integers(1, 5)), draw(st.integers(1, 5))], draw(pairs)
    extent = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    padding = draw(st.sampled_from(["same", 0, 1]))
    inner = [0 if padding == "same" else min(padding, e - 1) for e in extent]
    groups = draw(st.integers(1, 9))
    schedule = {"strategy": draw(st.sampled_from(FUSED))}
    if draw(st.booleans()):
        schedule["math"] = draw(st.sampled_from(list(MATHS)))
    values = variant(
        batch=draw(st.sampled_from(["dynamic", 1, 3, 128])),
        in_channels=draw(st.integers(1, 20)),
        out_channels=groups * draw(st.sampled_from([1, 2, 3, 4, 8, 20, 64, 67, 130])),
        height=max(1, extent[0]) + draw(st.integers(0, 40)),
        width=max(1, extent[1]) + draw(st.sampled_from([0, 1, 7, 20, 61, 130, 300])),
        kernel_size=kernel,
        dilation=dilation,
        stride=[1, 1] if padding == "same" else draw(pairs),
        padding="same" if padding == "same" else inner,
        num_groups=groups,
        schedule=schedule,
        targets=draw(st.lists(st.sampled_from(list(ARCHS)), min_size=1, max_size=2, unique=True)),
    )
    try:
        spec = load_spec(values)
    except SpecError:  # does not fit the chip: other tests are about that
        assume(False)
    return spec, make_plan(spec)


# ---- Tiles ---------------------------------------------------------------------------------------


@FEW
@given(plans())
def test_tiles_cover_the_output_and_units_the_groups(found):
    _, plan = found
    tile, g = plan.fused, plan.g
    down, across = tile.tiles
    assert (down - 1) * tile.tile_h < g.P <= down * tile.tile_h
    assert (across - 1) * tile.tile_w < g.Q <= across * tile.tile_w
    assert tile.tile_w <= tile.n * tile.col_steps
    assert tile.n % 16 == 0
    assert tile.units * tile.unit_groups == plan.num_groups
    assert tile.slab_channels <= tile.channels_m
    assert tile.rows_m * tile.channels_m == M
    if tile.slabs == 1:
        assert tile.slab_channels == tile.unit_groups * tile.group_channels
    else:
        assert tile.unit_groups == 1
        assert (tile.slabs - 1) * tile.slab_channels < tile.group_channels
        assert tile.group_channels <= tile.slabs * tile.slab_channels
    assert tile.group_lanes * tile.unit_groups <= 128
    assert tile.chunks * CHUNK_C >= g.C_in
    assert (g.P * g.Q if tile.whole_rows else g.Q) % tile.vec == 0
    assert (tile.tile_h * g.Q if tile.whole_rows else tile.tile_w) % tile.vec == 0


@FEW
@given(plans())
def test_accumulators_and_blocks_stay_in_their_limits(found):
    spec, plan = found
    tile = plan.fused
    wgmma = all(ARCHS[target].warpgroup_products for target in spec.targets)
    most = MAX_ACCUMULATORS if wgmma else PORTABLE_ACCUMULATORS
    if not tile.is_whole or tile.row_steps * tile.col_steps > 2:
        most = min(most, PORTABLE_ACCUMULATORS)
    if tile.chunks > 1:
        most = CHUNKED_ACCUMULATORS
    assert tile.accumulators <= most
    assert tile.row_steps * tile.col_steps <= MAX_BLOCKS
    assert (plan.registers is not None) == (tile.accumulators > PORTABLE_ACCUMULATORS)
    if plan.registers is not None:
        multiplies, normalises, loads = plan.registers
        assert 2 * multiplies + normalises + loads <= 512  # of the 128 that each thread brings
        assert all(one % 8 == 0 and one >= 24 for one in plan.registers)


@FEW
@given(plans())
def test_shared_memory_is_mapped_without_overlap(found):
    spec, plan = found
    tile, launch = plan.fused, plan.launches[1]
    end = 0
    for region in plan.smem_map:
        assert region.kernel == launch.kernel
        assert region.offset % 16 == 0
        assert end <= region.offset < end + 16
        end = region.offset + region.bytes
    assert end <= launch.smem_bytes < end + 16
    assert launch.smem_bytes == tile.smem
    for target in spec.targets:
        assert tile.smem <= ARCHS[target].smem_per_block
    assert tile.pitch_channel % 32 == 8
    assert tile.pitch_channel >= tile.tile_h * tile.pitch_row
    assert tile.pitch_row >= (plan.g.Q if tile.whole_rows else tile.tile_w)
    assert tile.pitch_x % 8 == 0


@FEW
@given(plans())
def test_launches_and_workspace(found):
    spec, plan = found
    tile, (prepare, fused) = plan.fused, plan.launches
    assert prepare.team is None
    assert (prepare.blocks_per_sample, fused.blocks_per_sample, fused.blocks) == (0, 0, 0)
    assert fused.threads == THREADS
    team, single = fused.team, plan.strategy == "single_pass"
    jobs = plan.num_groups // tile.unit_groups * tile.unit_jobs
    assert team.jobs_per_sample == (jobs if single else 2 * jobs)
    assert team.aligned == single
    for target in spec.targets:
        sms = ARCHS[target].sms
        assert team.least <= sms
        if single:  # every unit fits what is in flight, on every grid that may be launched
            for available in range(team.least, sms + 1):
                assert team.unit_jobs <= IN_FLIGHT * team.grid(available)
    pairs_of_sample = plan.num_groups * (tile.unit_jobs + 1)
    assert plan.workspace_per_sample == 2 * pairs_of_sample
    image = tile.units * tile.slabs * tile.chunks * tile.math.sets * 2 * tile.steps * M * 16
    assert image <= 4 * plan.workspace_fixed - 4 * plan.g.C_out < image + 16
    assert plan.workspace_fixed * 4 % 16 == 0
    keys = {one.key for one in plan.arguments}
    used = set(itertools.chain(prepare.arguments, fused.arguments))
    assert used == keys | {"x", "y", "workspace", "N"}


@pytest.mark.parametrize("aligned", [False, True])
def test_the_package_computes_the_same_grid(aligned):
    """The emitted package has the rule a second time, from its manifest."""
    for unit_jobs in [*range(1, 40), 131, 132, 133, 264, 500]:
        for sms in (1, 2, 3, 5, 82, 108, 132, 148, 170):
            team = {"jobs_per_sample": 4 * unit_jobs, "unit_jobs": unit_jobs, "least": 1,
                    "aligned": aligned}  # fmt: skip
            blocks = grid(unit_jobs, sms, aligned)
            assert runtime_grid({"team": team}, 3, sms) == blocks
            assert 1 <= blocks <= sms
            if aligned and unit_jobs <= sms:
                assert blocks % unit_jobs == 0
            elif aligned:  # as few rounds as all SMs would take
                assert -(-unit_jobs // blocks) == -(-unit_jobs // sms)


# ---- Slices: the convolution as a product --------------------------------------------------------


@FEW
@given(plans())
def test_slices_are_every_tap_once_and_stay_in_the_stage(found):
    _, plan = found
    tile, g = plan.fused, plan.g
    blocks = CHUNK_C // tile.math.slice_channels
    offsets = [one.offset for one in tile.slices]
    assert offsets == sorted(set(offsets))
    taps = {
        (block, m * g.stride[0] + r * g.dilation[0], s)
        for block in range(blocks)
        for m in range(tile.rows_m)
        for r in range(g.R)
        for s in range(g.S)
    }
    places = [(one.block, one.row, one.column) for one in tile.slices]
    assert len(places) == len(set(places))
    assert set(places) == taps
    # The last pixel that any product reads; those past it belong to no column.
    last_row = (tile.row_steps - 1) * tile.rows_m * g.stride[0] * g.stride[1] * tile.pitch_x
    for one in tile.slices:
        last = one.offset + last_row + tile.col_steps * tile.n - 1
        plane = tile.part_bytes // 16 // blocks
        assert one.block * plane <= one.offset
        assert last < (one.block + 1) * plane
    assert 2 * tile.steps - len(tile.slices) in (0, 1)
    for one, other in itertools.pairwise(tile.slices):  # wgmma's stride: 14 bits of 16 bytes
        assert other.offset - one.offset < 1 << 14


def convolved(tile, x, weight):
    """One tile as the kernel computes it: staged pixels, an image of weights, shifts of both."""
    g, blocks = tile.g, CHUNK_C // tile.math.slice_channels
    channels = tile.math.slice_channels
    stage = np.zeros((blocks * tile.in_rows * g.stride[1] * tile.pitch_x, channels))
    for block, h, w in np.ndindex(blocks, tile.in_rows, tile.in_columns):
        place = (h * g.stride[1] + w % g.stride[1]) * tile.pitch_x + w // g.stride[1]
        plane = tile.in_rows * g.stride[1] * tile.pitch_x
        stage[block * plane + place] = x[block * channels : (block + 1) * channels, h, w]
    image = np.zeros((len(tile.slices), tile.rows_m, len(weight), channels))
    for index, one in enumerate(tile.slices):
        for m in range(tile.rows_m):
            down = one.row - m * g.stride[0]
            r, rest = divmod(down, g.dilation[0])
            if down >= 0 and rest == 0 and r < g.R:
                first = one.block * channels
                image[index, m] = weight[:, first : first + channels, r, one.column]
    out = np.zeros((len(weight), tile.tile_h, tile.n * tile.col_steps))
    for step in range(tile.row_steps):
        shift = step * tile.rows_m * g.stride[0] * g.stride[1] * tile.pitch_x
        for index, one in enumerate(tile.slices):
            columns = stage[one.offset + shift :][: tile.n * tile.col_steps]
            sums = np.einsum("mkc,qc->kmq", image[index], columns)
            out[:, step * tile.rows_m : (step + 1) * tile.rows_m] += sums
    return out[:, :, : tile.tile_w]


@settings(FEW, max_examples=25)
@given(plans())
def test_the_slices_and_the_image_give_the_convolution(found):
    _, plan = found
    tile, g = plan.fused, plan.g
    random = np.random.default_rng(0)
    x = random.integers(-9, 9, (CHUNK_C, tile.in_rows, tile.in_columns)).astype(float)
    weight = random.integers(-9, 9, (2, CHUNK_C, g.R, g.S)).astype(float)
    wanted = np.zeros((2, tile.tile_h, tile.tile_w))
    for r, s in np.ndindex(g.R, g.S):
        rows = np.arange(tile.tile_h) * g.stride[0] + r * g.dilation[0]
        columns = np.arange(tile.tile_w) * g.stride[1] + s * g.dilation[1]
        wanted += np.einsum("kc,cpq->kpq", weight[:, :, r, s], x[:, rows][:, :, columns])
    np.testing.assert_array_equal(convolved(tile, x, weight), wanted)


# ---- Which specs are refused ---------------------------------------------------------------------


@pytest.mark.parametrize("strategy", FUSED)
@pytest.mark.parametrize(
    ("knob", "value"), [("tile_k", 4), ("tile_c", 1), ("pixels", 1), ("threads", 256)]
)
def test_knobs_of_the_other_kernels_are_refused(knob, value, strategy):
    issue = only_issue(variant(schedule={"strategy": strategy, knob: value}))
    assert issue.path == f"schedule.{knob}"
    assert strategy in issue.message


@pytest.mark.parametrize("strategy", FUSED)
def test_ffma_is_refused(strategy):
    issue = only_issue(variant(schedule={"strategy": strategy, "math": "ffma"}))
    assert issue.path == "schedule.math"
    assert "fp16x3" in issue.hint


@pytest.mark.parametrize("strategy", FUSED)
def test_their_own_knobs_are_taken(strategy):
    schedule = {"strategy": strategy, "math": "bf16x3", "tile_h": 4, "tile_w": 8,
                "threads": THREADS}  # fmt: skip
    tile = make_plan(spec_of(schedule=schedule)).fused
    assert (tile.math.name, tile.tile_h, tile.tile_w) == ("bf16x3", 4, 8)


@pytest.mark.parametrize("math", list(MATHS))
@pytest.mark.parametrize("strategy", ["two_kernel", "hybrid"])
def test_tensor_core_maths_are_refused_elsewhere(strategy, math):
    issue = only_issue(variant(schedule={"strategy": strategy, "math": math}))
    assert issue.path == "schedule.math"


@pytest.mark.parametrize("math", list(MATHS))
def test_a_math_of_theirs_chooses_between_the_two(math):
    plan = make_plan(spec_of(schedule={"math": math}))
    assert plan.strategy in FUSED
    assert plan.fused.math.name == math
    assert f"math {math} is for single_pass and recompute" in plan.reasons[0]


def test_a_math_implies_that_other_knobs_are_refused():
    issue = only_issue(variant(schedule={"math": "fp16x3", "tile_k": 4}))
    assert issue.path == "schedule.tile_k"
    assert "which math fp16x3 implies" in issue.message


def large(**schedule):
    return variant(
        in_channels=8, out_channels=32, height=1024, width=1024, num_groups=8, schedule=schedule
    )


def test_a_sample_that_does_not_fit_the_chip_is_refused_by_name():
    issue = only_issue(large(strategy="single_pass"))
    assert issue.path == "schedule.strategy"
    assert "single_pass does not fit" in issue.message
    assert "H200 (sm_90a) has 132" in issue.message
    assert issue.hint == "use strategy recompute"
    assert issues_of(large(strategy="recompute")) == []


@pytest.mark.parametrize("schedule", [{}, {"math": "fp16x3"}])
def test_without_a_strategy_it_falls_back_and_says_why(schedule):
    plan = make_plan(load_spec(large(**schedule)))
    assert plan.strategy != "single_pass"
    assert any("single_pass does not fit" in one and "132" in one for one in plan.reasons)


@pytest.mark.parametrize("strategy", FUSED)
def test_a_tile_without_room_is_refused_with_a_hint(strategy):
    values = variant(schedule={"strategy": strategy, "tile_h": 3})
    issue = only_issue(values)
    assert issue.path == "schedule.strategy"
    assert "no tile has the given tile_h" in issue.message
    assert issue.hint == "leave out tile_h and tile_w"


# ---- Emitted text --------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", FUSED)
def test_rendering_is_deterministic(strategy):
    first, second = (render(spec_of(schedule={"strategy": strategy})) for _ in range(2))
    assert first == second
    passes = {"single_pass": 1, "recompute": 2}[strategy]
    assert f"kPasses = {passes}" in first["kernel.cu"]


DEFAULTS = {
    "flagship": flagship(),
    "odd width, stride 2": variant(height=41, width=47, stride=2, padding=1),
    "three chunks, 1x1": variant(in_channels=20, kernel_size=1, height=32, width=32),
    "wide, two slabs": variant(out_channels=96, num_groups=1, width=300),
    "many groups, dynamic batch": variant(
        batch="dynamic", in_channels=8, out_channels=64, num_groups=16, height=64, width=64
    ),
    "5x5, silu": variant(
        kernel_size=5, padding="same", chain=["silu", {"group_norm": {"num_groups": 4}}]
    ),
}


TOO_LARGE = ("flagship", "sm_86", "single_pass")  # the next test is about it


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("name", "target", "strategy"),
    [one for one in itertools.product(DEFAULTS, ARCHS, FUSED) if one != TOO_LARGE],
)
def test_default_schedules_compile_without_spills(name, target, strategy, monkeypatch):
    logs = []
    monkeypatch.setattr(
        compiler, "parse_resources", lambda log: logs.append(log) or parse_resources(log)
    )
    values = {**DEFAULTS[name], "schedule": {"strategy": strategy}, "targets": [target]}
    built = compile_source(render(load_spec(values))["kernel.cu"], target, use_cache=False)
    (log,) = logs
    assert "(C75" not in log, log  # wgmma serialised, or setmaxnreg ignored
    assert len(built.resources) == 2
    for kernel in built.resources:
        assert (kernel.kernel, kernel.spill_stores, kernel.spill_loads) == (kernel.kernel, 0, 0)
        if kernel.kernel.endswith("_fused"):
            assert kernel.registers <= 128  # four warpgroups of an SM


def test_the_flagship_is_too_large_for_the_smallest_chip():
    issue = only_issue(flagship() | {"schedule": {"strategy": "single_pass"}, "targets": ["sm_86"]})
    assert "takes 127 SMs to hold, RTX 3090 (sm_86) has 82" in issue.message
    assert issue.hint == "use strategy recompute"


def test_every_math_has_its_file():
    found = (ROOT / "kgen" / "templates" / "device" / "math").glob("*.cuh")
    assert {one.stem for one in found} == set(MATHS)
