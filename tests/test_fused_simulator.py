"""The strategies on tensor cores, run on the simulator: values, range of the maths, hazards."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
from helpers import spec_of

torch = pytest.importorskip("torch")

from kgen.checks import check_case
from kgen.fused import FusedTile
from kgen.math_kinds import MATHS
from kgen.plan import make_plan
from kgen.reference import draw, oracle
from kgen.simulator import simulate
from kgen.simulator.candidate import SimulatedCandidate
from kgen.simulator.device import Options
from kgen.simulator.simulate import Outcome, Simulation
from kgen.spec import FUSED, Spec

pytestmark = pytest.mark.nvrtc

AFFINE = ({"add": "bias"}, {"mul": "scale"}, "sigmoid")
SMALL = {
    "batch": 2,
    "in_channels": 5,
    "out_channels": 8,
    "height": 9,
    "width": 14,
    "kernel_size": 3,
}
EXACT = [name for name, math in MATHS.items() if math.tolerance_met]


def fused_spec(
    strategy: str, groups: int, chain: tuple[Any, ...] = (), eps: float = 1e-5, **changes: Any
) -> Spec:
    """SMALL with keys changed; `knobs` are the schedule's."""
    knobs = changes.pop("knobs", {})
    target = changes.pop("target", "sm_90a")
    return spec_of(
        problem=SMALL | changes,
        chain=[*chain, {"group_norm": {"num_groups": groups, "eps": eps}}],
        schedule={"strategy": strategy, **knobs},
        targets=[target],
    )


def candidate_of(spec: Spec, checks: bool = True) -> SimulatedCandidate:
    simulation = Simulation(spec, make_plan(spec), spec.targets[0])
    return SimulatedCandidate(simulation, Options(checks=checks))


def tile_of(spec: Spec) -> FusedTile:
    tile = make_plan(spec).fused
    assert tile is not None
    return tile


def simulated(spec: Spec, x: Any, parameters: Any, checks: bool = False) -> Any:
    """y; fails where the run itself has a problem."""
    candidate = candidate_of(spec, checks)
    y = candidate(x, parameters)
    assert isinstance(candidate.outcome, Outcome)
    assert candidate.outcome.problems == ()
    return y


def assert_right(spec: Spec, case: tuple[str, int] = ("uniform", 0), batch: int = 0) -> None:
    """Right values on one case, and no finding of the simulator."""
    distribution, seed = case
    batch = batch or make_plan(spec).g.N or 2
    x, parameters = draw(spec, batch, distribution, seed, "cpu")
    candidate = candidate_of(spec)
    result = check_case(spec, candidate, x, parameters, distribution, seed)
    assert candidate.outcome is not None
    assert (result.passed, candidate.outcome.problems) == (True, ()), result.reason


@dataclass(frozen=True)
class Shape:
    """A geometry, and what about its tile makes it worth a run."""

    groups: int
    changes: dict[str, Any]
    chain: tuple[Any, ...] = ()
    holds: Any = lambda tile: True


SHAPES = {
    "padding same, 5x5": Shape(
        8, {"in_channels": 8, "out_channels": 32, "padding": "same", "kernel_size": 5}, AFFINE),
    "stride 2, dilation 2, 5 channels": Shape(
        3, {"out_channels": 24, "height": 21, "width": 23, "stride": 2, "dilation": 2,
            "padding": 1}, ("relu",)),
    "stride [2, 1], kernel [3, 5]": Shape(
        2, {"batch": 1, "in_channels": 9, "out_channels": 6, "height": 20, "width": 20,
            "kernel_size": [3, 5], "stride": [2, 1]}, ("silu",), lambda tile: tile.chunks == 2),
    "1x1, three chunks of channels": Shape(
        4, {"in_channels": 20, "out_channels": 16, "height": 5, "width": 12, "kernel_size": 1},
        (), lambda tile: tile.chunks == 3),
    "several tiles across": Shape(
        4, {"batch": 1, "in_channels": 3, "out_channels": 16, "height": 5, "width": 300}, AFFINE,
        lambda tile: tile.tiles[1] > 1),
    "two products across": Shape(
        4, {"batch": 1, "in_channels": 3, "out_channels": 16, "height": 5, "width": 150,
            "knobs": {"tile_w": 148}}, AFFINE,
        lambda tile: tile.col_steps == 2 and tile.whole_rows),
    "several units": Shape(
        3, {"batch": 1, "in_channels": 8, "out_channels": 96, "height": 8}, ("tanh",),
        lambda tile: tile.units > 1),
    "several slabs": Shape(
        1, {"in_channels": 4, "out_channels": 96, "height": 6}, ("relu",),
        lambda tile: tile.slabs == 2 and tile.units == 1),
    "uneven slabs": Shape(
        1, {"batch": 1, "in_channels": 4, "out_channels": 67, "height": 4}, (),
        lambda tile: tile.slabs * tile.slab_channels > 67),
    "ragged tiles, groups of one channel": Shape(
        16, {"batch": 1, "in_channels": 8, "out_channels": 16, "height": 13, "width": 29,
             "knobs": {"tile_h": 8, "tile_w": 16}}, AFFINE,
        lambda tile: not tile.is_whole and tile.unit_groups == 16 and not tile.whole_rows),
    "a last tile that only some warps fill": Shape(
        4, {"in_channels": 8, "out_channels": 16, "height": 8, "knobs": {"tile_h": 4}}, AFFINE,
        lambda tile: (tile.rows_m, tile.row_steps, tile.g.P % tile.tile_h) == (4, 1, 2)),
    "odd width": Shape(
        4, {"height": 9, "width": 15, "kernel_size": [3, 1]}, ("gelu",),
        lambda tile: tile.vec == 1),
    "runs of two floats": Shape(
        4, {"height": 7, "width": 16}, ("relu",), lambda tile: tile.vec == 2),
}  # fmt: skip


@pytest.mark.parametrize("strategy", FUSED)
@pytest.mark.parametrize("name", SHAPES)
def test_geometry(name, strategy):
    shape = SHAPES[name]
    spec = fused_spec(strategy, shape.groups, shape.chain, **shape.changes)
    assert shape.holds(tile_of(spec)), tile_of(spec)
    assert_right(spec)


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("strategy", FUSED)
@pytest.mark.parametrize("math", EXACT)
def test_math(math, strategy, target):
    """Two chunks of channels, of which the second is not full."""
    spec = fused_spec(
        strategy, 2, AFFINE, batch=1, in_channels=11, padding=1, target=target, knobs={"math": math}
    )
    assert tile_of(spec).math.name == math
    assert_right(spec, ("normal x3", 1))


@pytest.mark.parametrize("strategy", FUSED)
@pytest.mark.parametrize(
    ("name", "target"),
    [("several slabs", "sm_80"),
     *(("ragged tiles, groups of one channel", one) for one in ("sm_80", "sm_100a", "sm_120"))],
)  # fmt: skip
def test_target(name, target, strategy):
    shape = SHAPES[name]
    changes = shape.changes | {"batch": 1}
    assert_right(fused_spec(strategy, shape.groups, shape.chain, target=target, **changes))


@pytest.mark.parametrize("strategy", FUSED)
@pytest.mark.parametrize(("batch", "runs"), [(3, 3), (7, 7), ("dynamic", 4)])
def test_batch(batch, runs, strategy):
    assert_right(fused_spec(strategy, 2, ("relu",), batch=batch), batch=runs)


@pytest.mark.parametrize("strategy", FUSED)
def test_chain_without_parameters_or_bias(strategy):
    assert_right(fused_spec(strategy, 4, (), conv_bias=False), ("x-1", 0))


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("strategy", FUSED)
def test_tf32_alone_is_what_it_says(strategy, target):
    """Its error is that of 11 bits: kgen's tolerance is missed, and not by much."""
    spec = fused_spec(strategy, 2, batch=1, in_channels=8, target=target, knobs={"math": "tf32"})
    x, parameters = draw(spec, 1, "normal x3", 0, "cpu")
    y = simulated(spec, x, parameters, checks=True)
    error = float((y.double() - oracle(spec, x, parameters)).abs().max())
    assert 1e-4 < error < 2e-2


# ---- The range of the maths ----------------------------------------------------------------------


def nan_samples(y: Any) -> list[str]:
    """For each sample: `all` where every element is NaN, `none`, or `some`."""
    return ["all" if one.isnan().all() else "some" if one.isnan().any() else "none" for one in y]


@pytest.mark.parametrize("strategy", FUSED)
@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_fp16x3_out_of_range_is_nan_and_never_a_wrong_value(target, strategy):
    """Sample 0 is in range, right up to its end; each of the others has one value that is not."""
    spec = fused_spec(strategy, 2, ("relu",), batch=5, padding=1, target=target)
    x, parameters = draw(spec, 5, "normal x3", 0, "cpu")
    for sample, value in enumerate((65519.0, 65520.0, -65520.0, 1e9, float("inf"))):
        x[sample, sample, 2 * sample, 3 * sample] = value
    y = simulated(spec, x, parameters)
    assert nan_samples(y) == ["none", "all", "all", "all", "all"]
    wanted = oracle(spec, x, parameters)[0]
    assert bool(((y[0].double() - wanted).abs() <= 1e-4 * (1 + wanted.abs())).all())


@pytest.mark.parametrize("math", ["bf16x3", "tf32x3"])
def test_other_maths_have_the_range_of_fp32(math):
    spec = fused_spec("single_pass", 2, batch=1, conv_bias=False, knobs={"math": math})
    x, parameters = draw(spec, 1, "normal x3", 0, "cpu")
    x *= 1e15
    error = (simulated(spec, x, parameters).double() - oracle(spec, x, parameters)).abs().max()
    assert float(error) < 1e-4


@pytest.mark.parametrize(
    ("math", "strategy"),
    [*itertools.product(EXACT, ["single_pass"]), ("fp16x3", "recompute")],
)
def test_nan_and_inf_in_x_are_nan_groups(math, strategy):
    """As in eager PyTorch, where the chain lets them through; other samples see nothing of it."""
    spec = fused_spec(strategy, 2, ("relu",), batch=4, padding=1, knobs={"math": math})
    x, parameters = draw(spec, 4, "normal x3", 0, "cpu")
    x[1, 2, 4, 5], x[2, 0, 0, 0], x[3, 4, 8, 13] = float("nan"), float("inf"), -float("inf")
    parameters["conv.weight"][::4].abs_()  # relu passes what is positive: in each group, both signs
    parameters["conv.weight"][1::4].abs_().neg_()
    wanted = nan_samples(oracle(spec, x, parameters))
    assert nan_samples(simulated(spec, x, parameters)) == wanted == ["none", "all", "all", "all"]


def test_nan_of_a_parameter_stays_in_its_group():
    spec = fused_spec("single_pass", 4, ({"add": "bias"},), batch=1)
    for key in ("conv.weight", "bias", "group_norm.weight"):
        x, parameters = draw(spec, 1, "uniform", 0, "cpu")
        parameters[key][3] = float("nan")
        found = simulated(spec, x, parameters).isnan()
        assert torch.equal(found, oracle(spec, x, parameters).isnan()), key


@pytest.mark.parametrize("strategy", FUSED)
@pytest.mark.parametrize(
    ("math", "target", "limit"),
    [("fp16x3", "sm_80", 2e-5), ("fp16x3", "sm_90a", 2e-5), ("tf32x3", "sm_90a", 2e-5),
     ("bf16x3", "sm_90a", 2e-4)],
)  # fmt: skip
def test_small_x_keeps_its_bits(math, target, limit, strategy):
    """Nothing but GroupNorm brings x back to size: an absolute error would show."""
    spec = fused_spec(
        strategy, 2, eps=1e-20, batch=1, conv_bias=False, target=target, knobs={"math": math}
    )
    x, parameters = draw(spec, 1, "normal x3", 0, "cpu")
    x *= 1e-6
    error = (simulated(spec, x, parameters).double() - oracle(spec, x, parameters)).abs().max()
    assert float(error) < limit


@pytest.mark.parametrize("strategy", FUSED)
@pytest.mark.parametrize("scale", [1e-20, 1e20])
def test_fp16x3_weights_of_any_size(scale, strategy):
    """Each output channel has its own power of two: sizes differ between them, one is all zero."""
    spec = fused_spec(strategy, 8, batch=1, conv_bias=False)
    x, parameters = draw(spec, 1, "normal x3", 0, "cpu")
    x *= 1e-3  # squares of 1e20 would be infinite
    weight = parameters["conv.weight"]
    weight[::2] *= scale
    weight[3] = 0.0
    y, wanted = simulated(spec, x, parameters), oracle(spec, x, parameters)
    torch.testing.assert_close(y.double(), wanted, atol=1e-4, rtol=1e-4)
    assert bool((y[0, 3] == parameters["group_norm.bias"][3]).all())
    assert bool(wanted[0, 0].std() > 0.1) == (scale > 1)  # whether eps leaves them any size


@pytest.mark.parametrize("strategy", FUSED)
def test_fp16x3_small_weights_beside_large_ones(strategy):
    """A channel's small weights lose bits only where its large ones hide them."""
    spec = fused_spec(strategy, 8, batch=1, conv_bias=False)
    x, parameters = draw(spec, 1, "normal x3", 0, "cpu")
    parameters["conv.weight"][:, :, 0] *= 1e-4
    parameters["conv.weight"][:, 1] *= 1e4
    wanted = oracle(spec, x, parameters)
    torch.testing.assert_close(
        simulated(spec, x, parameters).double(), wanted, atol=2e-5, rtol=2e-5
    )


# ---- Statistics of large groups ------------------------------------------------------------------

LARGE = {
    "batch": 1,
    "in_channels": 2,
    "out_channels": 8,
    "height": 98,
    "width": 98,
}  # 73728 a group


def large(math: str) -> Spec:
    spec = fused_spec("recompute", 1, knobs={"math": math}, **LARGE)
    assert make_plan(spec).group_channels * tile_of(spec).g.P * tile_of(spec).g.Q >= 65536
    return spec


def assert_within_tolerance(spec: Spec, x: Any, parameters: Any) -> None:
    result = check_case(spec, candidate_of(spec, checks=False), x, parameters)
    assert result.passed, result.reason


def test_statistics_of_a_large_group():
    spec = large("fp16x3")
    x, parameters = draw(spec, 1, "uniform", 0, "cpu")
    assert_within_tolerance(spec, x, parameters)


@pytest.mark.parametrize("math", ["fp16x3", "tf32x3"])
def test_statistics_of_a_large_flat_image(math):
    spec = large(math)
    x, parameters = draw(spec, 1, "uniform", 0, "cpu")
    x.fill_(0.7502)  # halfway between two values of 11 bits
    assert_within_tolerance(spec, x, parameters)


def test_statistics_of_a_large_group_with_an_outlier():
    spec = large("fp16x3")
    x, parameters = draw(spec, 1, "uniform", 0, "cpu")
    x[0, 0, 40, 40] = 10003.7
    assert_within_tolerance(spec, x, parameters)


@pytest.mark.parametrize("value", [float("nan"), 1e6])
@pytest.mark.parametrize(
    ("row", "changes"),
    [(7, {"height": 8, "stride": [2, 1]}),
     (9, {"height": 11, "stride": [3, 1], "dilation": [2, 1]})],
)  # fmt: skip
def test_what_no_output_sees_has_no_effect(row, changes, value):
    """With several output rows in a product, one past the output sees rows that no other does."""
    spec = fused_spec("single_pass", 2, batch=16, width=66, **changes)
    tile = tile_of(spec)
    g, seen = tile.g, set()
    assert (tile.rows_m, g.P) == (2, 3)
    for p in range(g.P):
        seen |= {p * g.stride[0] + r * g.dilation[0] for r in range(g.R)}
    assert row not in seen
    x, parameters = draw(spec, 1, "uniform", 0, "cpu")
    x[0, 0, row, 3] = value
    assert not simulated(spec, x, parameters).isnan().any()


# ---- Order ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", FUSED)
@pytest.mark.parametrize("name", ["several units", "ragged tiles, groups of one channel"])
def test_bits_do_not_depend_on_the_number_of_sms(name, strategy, monkeypatch):
    """Jobs then meet other blocks and other rounds; sums keep their order."""
    shape = SHAPES[name]
    spec = fused_spec(strategy, shape.groups, shape.chain, **(shape.changes | {"batch": 1}))
    candidate = candidate_of(spec)
    x, parameters = draw(spec, 1, "normal x3", 0, "cpu")
    found, blocks = [], set()
    team = candidate.simulation.plan.launches[1].team
    for sms in (2, 3, 5) if name == "several units" else (2, 5):
        monkeypatch.setattr(simulate, "SIMULATED_SMS", sms)
        blocks.add(team.grid(max(team.least, sms)))
        found.append(candidate(x, parameters).view(torch.int32))
        assert candidate.outcome.problems == ()
    assert len(blocks) > 1
    assert all(torch.equal(one, other) for one, other in itertools.pairwise(found))


@pytest.mark.parametrize("strategy", FUSED)
def test_bits_do_not_depend_on_the_batch_around_a_sample(strategy):
    spec = fused_spec(strategy, 2, ("silu",), batch="dynamic")
    x, parameters = draw(spec, 4, "normal x3", 0, "cpu")
    together = simulated(spec, x, parameters)
    alone = simulated(spec, x[2:3].clone(), parameters)
    assert torch.equal(together[2:3].view(torch.int32), alone.view(torch.int32))
