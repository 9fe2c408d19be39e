"""Invariants of every plan, over random small specs."""

import itertools
import re

import pytest
from helpers import SPECS, flagship, spec_of, variant
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kgen.arch import ARCHS
from kgen.chain import fold
from kgen.emit import render
from kgen.errors import SpecError
from kgen.explain import as_text, explain
from kgen.geometry import geometry
from kgen.ops import OPS
from kgen.plan import make_plan, resident_blocks
from kgen.spec import STRATEGIES, Spec, load_spec
from kgen.tiling import complete, is_legal

FEW = settings(
    derandomize=True,
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)

pairs = st.tuples(st.integers(1, 3), st.integers(1, 3)).map(list)


@st.composite
def problems(draw):
    """Keys of a problem: any geometry whose filter fits."""
    padding = draw(st.one_of(st.just("same"), st.tuples(st.integers(0, 2), st.integers(0, 2))))
    kernel = [draw(st.integers(1, 5)), draw(st.integers(1, 5))]
    dilation = draw(pairs)
    extent = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    if padding != "same":
        padding = [min(p, e - 1) for p, e in zip(padding, extent, strict=True)]
    inner = [0, 0] if padding == "same" else padding
    least = [
        1 if padding == "same" else max(1, e - 2 * p) for e, p in zip(extent, inner, strict=True)
    ]
    return {
        "batch": draw(st.one_of(st.just("dynamic"), st.integers(1, 5))),
        "in_channels": draw(st.integers(1, 40)),
        "height": draw(st.integers(least[0], least[0] + 60)),
        "width": draw(st.integers(least[1], least[1] + 60)),
        "kernel_size": kernel,
        "stride": [1, 1] if padding == "same" else draw(pairs),
        "padding": padding,
        "dilation": dilation,
        "conv_bias": draw(st.booleans()),
    }


@st.composite
def specs(draw):
    """Checked specs with any chain and, in half of the cases, random knobs."""
    num_groups = draw(st.integers(1, 8))
    changes = draw(problems()) | {"out_channels": num_groups * draw(st.integers(1, 12))}
    chain = []
    for index, op in enumerate(draw(st.lists(st.sampled_from(list(OPS)), max_size=5))):
        chain.append({op: f"p{index}"} if OPS[op].takes_parameter else op)
    changes["chain"] = [*chain, {"group_norm": {"num_groups": num_groups}}]
    strategy = draw(st.sampled_from(["two_kernel", "hybrid", None]))
    schedule = {"strategy": strategy} if strategy else {}
    if strategy == "two_kernel" and draw(st.booleans()):
        for key, values in {
            "tile_h": (1, 2, 3, 4, 8, 12, 16), "tile_w": (1, 5, 8, 16, 32, 40),
            "tile_k": (1, 3, 4, 8, 32),
            "tile_c": (1, 2, 5), "pixels": (1, 2, 4, 8), "threads": (32, 64, 96, 128, 256),
        }.items():  # fmt: skip
            if draw(st.integers(0, 3)) == 0:
                schedule[key] = draw(st.sampled_from(values))
    changes["schedule"] = schedule
    changes["targets"] = draw(
        st.lists(st.sampled_from(list(ARCHS)), min_size=1, max_size=3, unique=True)
    )
    try:
        return load_spec(variant(**changes))
    except SpecError:  # knobs that do not fit together: another file tests those
        assume(False)


def check_invariants(spec: Spec) -> None:
    plan = make_plan(spec)
    g = plan.g
    N = g.N or 1
    assert g.P >= 1
    assert g.Q >= 1
    assert plan.strategy in STRATEGIES
    assert plan.group_channels * plan.num_groups == g.C_out
    assert g.P * g.Q % plan.vec == 0
    for launch in plan.launches:
        jobs = launch.team.jobs_per_sample if launch.team else launch.blocks_per_sample
        assert jobs >= 1 or launch.blocks >= 1
        assert jobs * N + launch.blocks < 2**31
        assert launch.threads % 32 == 0
        assert 32 <= launch.threads <= 1024
        for target in spec.targets:
            assert 0 <= launch.smem_bytes <= ARCHS[target].smem_per_block
    assert len({launch.kernel for launch in plan.launches}) == len(plan.launches)
    check_smem_map(plan)
    check_arguments(plan)
    assert resident_blocks(plan) >= 1
    if plan.tile is not None:
        check_tile(plan)
        check_workspace(plan)
    elif plan.strategy == "hybrid":
        assert plan.workspace_per_sample == 0
        assert plan.launches[0].blocks_per_sample == plan.num_groups


def check_smem_map(plan) -> None:
    """Regions lie one behind the other, aligned, inside what the launch asks for."""
    for kernel, regions in itertools.groupby(plan.smem_map, key=lambda region: region.kernel):
        launch = next(one for one in plan.launches if one.kernel == kernel)
        end = 0
        for region in regions:
            assert region.offset >= end, f"{region.name} overlaps the one before"
            assert region.offset % 4 == 0
            if region.name in ("smem_x", "smem_w"):
                assert region.offset % 16 == 0
            end = region.offset + region.bytes
        assert end <= launch.smem_bytes < end + 16


def check_arguments(plan) -> None:
    keys = {one.key for one in plan.arguments}
    used = set(itertools.chain.from_iterable(one.arguments for one in plan.launches))
    assert used <= keys | {"x", "y", "workspace", "conv_out", "N"}
    library = {"conv.weight"} if plan.strategy == "hybrid" else set()
    assert keys - library <= used, "a parameter that no kernel reads"


def check_tile(plan) -> None:
    """The tiles cover every output exactly once, counted element by element."""
    tile, g = plan.tile, plan.g
    assert is_legal(tile, plan.arch)
    covered = [[0] * g.Q for _ in range(g.P)]
    for tile_p in range(tile.tiles[0]):
        for tile_q in range(tile.tiles[1]):
            rows = range(tile_p * tile.tile_h, min(g.P, (tile_p + 1) * tile.tile_h))
            columns = range(tile_q * tile.tile_w, min(g.Q, (tile_q + 1) * tile.tile_w))
            assert rows
            assert columns
            for p in rows:
                for q in columns:
                    covered[p][q] += 1
    assert all(count == 1 for row in covered for count in row)
    assert (tile.blocks_k - 1) * tile.tile_k < g.C_out <= tile.blocks_k * tile.tile_k
    assert tile.blocks == tile.tiles[0] * tile.tiles[1] * tile.blocks_k
    assert plan.launches[0].blocks_per_sample == tile.blocks
    # the threads of a block cover its tile
    sets = tile.threads // tile.pixel_threads
    assert sets * tile.pixel_threads == tile.threads
    assert sets * tile.thread_k == tile.tile_k
    assert tile.pixel_threads >= tile.strips
    assert tile.strips * tile.pixels == tile.tile_h * tile.tile_w
    assert tile.group_channels % tile.unit == 0
    assert tile.thread_k % tile.unit == 0
    assert 1 <= tile.tile_c <= g.C_in
    # the staged input reaches as far as the last pixel's last tap, from an aligned column on
    shift = -g.pad_before[1] % tile.copy
    assert tile.in_h >= (tile.tile_h - 1) * g.stride[0] + g.extent[0]
    assert tile.in_w >= shift + (tile.tile_w - 1) * g.stride[1] + g.extent[1]
    assert tile.pitch_x >= tile.in_w
    assert tile.pitch_k >= tile.tile_k
    assert g.W % tile.copy == 0
    assert tile.pitch_x % tile.copy == 0
    assert tile.tile_w * g.stride[1] % tile.copy == 0
    assert tile.smem_x == 4 * tile.tile_c * tile.in_h * tile.pitch_x


def check_workspace(plan) -> None:
    """Room for (mean, m2) of every unit and tile, and of every group where they are reduced."""
    tile = plan.tile
    partials = plan.g.C_out // tile.unit * tile.tiles[0] * tile.tiles[1]
    groups = plan.num_groups if plan.separate_reduce else 0
    assert plan.workspace_per_sample == 2 * (partials + groups)
    assert len(plan.launches) == (3 if plan.separate_reduce else 2)
    norm = plan.launches[-1]
    segment = norm.threads * plan.norm_vectors * plan.vec
    plane = plan.g.P * plan.g.Q
    segments = norm.blocks_per_sample // plan.g.C_out
    assert segments * plan.g.C_out == norm.blocks_per_sample
    assert (segments - 1) * segment < plane <= segments * segment


@FEW
@given(specs())
def test_every_legal_spec_has_a_sound_plan(spec):
    check_invariants(spec)


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_shipped_specs_have_sound_plans(path):
    check_invariants(load_spec(path))


@FEW
@given(specs())
def test_every_legal_spec_renders(spec):
    text = render(spec)
    compile(text["__init__.py"], "__init__.py", "exec")
    kernel = text["kernel.cu"]
    assert kernel.count("{") == kernel.count("}")
    assert kernel.count("(") == kernel.count(")")
    assert render(spec) == text
    constants = dict(re.findall(r"\b(k[A-Z]\w*) = (-?\d+)[,;]", kernel))
    plan = make_plan(spec)
    assert int(constants["kC_out"]) == plan.g.C_out
    assert int(constants["kP"]) == plan.g.P
    assert int(constants["kQ"]) == plan.g.Q
    if plan.tile is not None:
        assert int(constants["kPitchX"]) == plan.tile.pitch_x
        assert int(constants["kThreadK"]) == plan.tile.thread_k


@FEW
@given(specs(), st.sampled_from(list(ARCHS)))
def test_every_legal_spec_is_explained(spec, arch):
    plan = make_plan(spec)
    facts = explain(spec, plan)
    text = as_text(facts)
    assert spec.name in text
    assert plan.strategy in text
    for launch in plan.launches:
        assert launch.kernel in text
    assert facts["bytes_moved"] >= facts["bytes_needed"] > 0
    assert facts["floor_ms"] > 0


@FEW
@given(problems())
def test_output_sizes_are_torch_s(changes):
    torch = pytest.importorskip("torch")
    spec = load_spec(variant(**changes))
    problem, g = spec.problem, geometry(spec.problem)
    x = torch.empty((2, g.C_in, g.H, g.W), device="meta")
    weight = torch.empty((g.C_out, g.C_in, g.R, g.S), device="meta")
    y = torch.nn.functional.conv2d(
        x, weight, stride=problem.stride, padding=problem.padding, dilation=problem.dilation
    )
    assert tuple(y.shape) == (2, g.C_out, g.P, g.Q)
    if problem.padding == "same":
        assert (g.P, g.Q) == (g.H, g.W)


@FEW
@given(st.integers(1, 6), st.integers(1, 6), pairs)
def test_padding_same_pads_as_torch_does(kernel_h, kernel_w, dilation):
    torch = pytest.importorskip("torch")
    spec = spec_of(kernel_size=[kernel_h, kernel_w], dilation=dilation, padding="same")
    g = geometry(spec.problem)
    x, weight = torch.randn(1, 1, 9, 11), torch.randn(1, 1, kernel_h, kernel_w)
    wanted = torch.nn.functional.conv2d(x, weight, padding="same", dilation=tuple(dilation))
    (top, left), (bottom, right) = g.pad_before, g.pad_after
    padded = torch.nn.functional.pad(x, (left, right, top, bottom))
    given_by_hand = torch.nn.functional.conv2d(padded, weight, dilation=tuple(dilation))
    torch.testing.assert_close(given_by_hand, wanted)


def test_an_even_filter_pads_one_more_after_than_before():  # D07 (b)
    g = geometry(spec_of(kernel_size=4, padding="same").problem)
    assert (g.pad_before, g.pad_after) == ((1, 1), (2, 2))


def test_rectangular_filters_keep_their_axes():  # D07 (a)
    g = geometry(
        spec_of(kernel_size=[3, 5], dilation=[2, 3], padding="same", height=28, width=31).problem
    )
    assert (g.R, g.S, g.P, g.Q) == (3, 5, 28, 31)
    assert g.extent == (5, 13)


@pytest.mark.parametrize(
    ("height", "width"), [(19, 35), (3, 3), (99, 133)]
)  # D08: 17x33, 1x1, 97x131
def test_edges_that_no_tile_divides_are_covered(height, width):
    for knobs in ({}, {"tile_h": 16, "tile_w": 16, "threads": 256}):
        check_invariants(
            spec_of(height=height, width=width, schedule={"strategy": "two_kernel", **knobs})
        )


def test_a_plan_does_not_change():
    for path in SPECS:
        assert make_plan(load_spec(path)) == make_plan(load_spec(path))


def test_the_choice_of_a_tile_is_the_cheapest_legal_one():
    spec = spec_of(height=64, width=64, in_channels=8)
    g, arch = geometry(spec.problem), ARCHS["sm_90a"]
    best = complete(g, 3, spec.schedule, (arch,))
    for tile_h in (4, 8, 16):
        given_one = complete(g, 3, spec.schedule.model_copy(update={"tile_h": tile_h}), (arch,))
        assert given_one.tile_h == tile_h
        assert given_one.cost(arch) >= best.cost(arch)


@pytest.mark.parametrize(
    ("schedule", "strategies"),
    [
        ({}, {"single_pass"}),
        ({"threads": 512}, {"single_pass"}),
        ({"threads": 128}, {"two_kernel", "hybrid"}),
        ({"tile_h": 4}, {"two_kernel"}),
        ({"pixels": 4}, {"two_kernel"}),
        ({"math": "ffma"}, {"two_kernel"}),
        ({"math": "tf32x3"}, {"single_pass", "recompute"}),
    ],
)
def test_a_knob_is_never_given_to_a_strategy_without_it(schedule, strategies):
    plan = make_plan(spec_of(flagship(), schedule=schedule))
    assert plan.strategy in strategies
    if "threads" in schedule:
        assert schedule["threads"] in {launch.threads for launch in plan.launches}


def test_without_a_strategy_the_faster_prediction_wins():
    from kgen.strategy import predicted_ms

    for changes in ({}, {"in_channels": 256, "kernel_size": 5}, {"height": 200, "width": 200}):
        spec = spec_of(schedule={}, **changes)
        g, arch = geometry(spec.problem), ARCHS["sm_90a"]
        times = {name: predicted_ms(spec, g, arch, name) for name in ("two_kernel", "hybrid")}
        assert make_plan(spec).strategy == min(times, key=times.get)
        assert "predicted" in make_plan(spec).reasons[0]
    assert make_plan(spec_of(strategy="hybrid")).reasons == ("strategy hybrid: given by the spec",)


# ---- Folding ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("conv_bias", "chain", "steps", "terms"),
    [
        (True, [{"add": "b"}, {"mul": "s"}, "sigmoid"], ["add", "mul", "sigmoid"],
         [("conv_bias", "param_b"), ("param_s",)]),
        (False, [{"add": "b"}, {"add": "c"}], ["add"], [("param_b", "param_c")]),
        (False, [{"mul": "b"}, {"mul": "c"}, {"add": "d"}], ["mul", "add"],
         [("param_b", "param_c"), ("param_d",)]),
        (True, ["relu", {"add": "b"}], ["add", "relu", "add"], [("conv_bias",), ("param_b",)]),
        (False, ["relu", "relu"], ["relu", "relu"], []),
        (False, [], [], []),
    ],
)  # fmt: skip
def test_neighbouring_parameters_are_folded_and_others_are_not(conv_bias, chain, steps, terms):
    spec = spec_of(conv_bias=conv_bias, chain=[*chain, {"group_norm": {"num_groups": 4}}])
    coefficients, found = fold(spec)
    assert [step.op for step in found] == steps
    assert [one.terms for one in coefficients] == terms
    assert [one for step in found for one in step.operands] == [one.name for one in coefficients]


# ---- The invariants can fail -----------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"workspace_per_sample": 7},
        {"norm_vectors": 0},
        {"vec": 3},
        {"num_groups": 5},
    ],
    ids=str,
)
def test_a_wrong_plan_breaks_an_invariant(change, monkeypatch):
    from dataclasses import replace

    spec = spec_of()
    plan = make_plan(spec)
    check_invariants(spec)
    monkeypatch.setitem(globals(), "make_plan", lambda _: replace(plan, **change))
    with pytest.raises(AssertionError):
        check_invariants(spec)


def test_overlapping_regions_break_an_invariant():
    from dataclasses import replace

    plan = make_plan(spec_of())
    first, second, *rest = plan.smem_map
    moved = replace(plan, smem_map=(first, replace(second, offset=second.offset - 16), *rest))
    check_smem_map(plan)
    with pytest.raises(AssertionError, match="overlaps"):
        check_smem_map(moved)
