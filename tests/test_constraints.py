import itertools
import re

import pytest
from helpers import SPECS, demo, flagship, issues_of, only_issue, spec_of, variant

from kgen.arch import ARCHS
from kgen.constraints import check, divisors, name_problem, nearest
from kgen.errors import SpecError
from kgen.geometry import geometry
from kgen.plan import make_plan
from kgen.spec import Schedule, load_spec
from kgen.tiling import with_stage

SMEM_STATIC_LIMIT = 49_152  # bytes a block gets without opting in


def hinted_number(issue) -> int:
    """The legal value that an issue's hint names first."""
    match = re.search(r"(?:nearest legal value|must be at least|at most) (\d+)", issue.hint)
    assert match, issue.render("spec")
    return int(match[1])


def assert_hint_is_legal(values: dict, key: str) -> int:
    """The hint's value, put in place of the wrong one, makes the spec legal."""
    legal = hinted_number(only_issue(values))
    assert issues_of(variant(values, **{key: legal})) == []
    return legal


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_shipped_specs_break_no_rule(path):
    assert check(load_spec(path)) == []


# ---- D04, D06: groups ------------------------------------------------------------------------


@pytest.mark.parametrize("num_groups", [0, -2, 5, 4, 7, 1000000])
def test_num_groups_must_divide_out_channels(num_groups):
    values = variant(out_channels=6, num_groups=num_groups)
    issue = only_issue(values)
    assert issue.path == "chain[3].group_norm.num_groups"
    assert f"num_groups {num_groups} does not divide out_channels 6" in issue.message
    assert issue.hint.endswith("num_groups must be one of 1, 2, 3, 6")
    assert_hint_is_legal(values, "num_groups")


@pytest.mark.parametrize("num_groups", [1, 2, 3, 6])
def test_every_divisor_is_a_legal_num_groups(num_groups):
    assert spec_of(out_channels=6, num_groups=num_groups).norm.num_groups == num_groups


def test_very_many_channels_still_get_a_legal_hint():
    assert_hint_is_legal(variant(out_channels=65537, num_groups=2), "num_groups")


def test_one_element_a_group_is_legal():
    spec_of(batch=4, in_channels=3, height=3, width=3, out_channels=5, num_groups=5)


def test_convolution_groups_are_refused_and_one_is_not():
    assert only_issue(
        variant(conv_groups=2, in_channels=4, out_channels=16, num_groups=8)
    ).path == ("problem.conv_groups")
    spec_of(conv_groups=1, in_channels=4, out_channels=16, num_groups=8)


# ---- eps -------------------------------------------------------------------------------------


@pytest.mark.parametrize("eps", [1e-39, 1e-46, 1e-300, 1e39, 1e300])
def test_eps_must_be_a_normal_float32(eps):
    issue = only_issue(variant(eps=eps))
    assert issue.path == "chain[3].group_norm.eps"
    assert "float32" in issue.message


@pytest.mark.parametrize("eps", [1.2e-38, 1e-12, 1e-5, 1.0, 3.4e38])
def test_every_normal_float32_is_a_legal_eps(eps):
    assert spec_of(eps=eps).norm.eps == eps


# ---- D07: geometry ---------------------------------------------------------------------------


def test_padding_same_needs_stride_one():
    for stride in (2, [1, 2], [2, 1]):
        issue = only_issue(variant(padding="same", stride=stride))
        assert issue.path == "problem.padding"
        assert "stride 1" in issue.message
    spec_of(padding="same", stride=1)
    spec_of(padding=1, stride=2)


@pytest.mark.parametrize("key", ["height", "width"])
def test_the_filter_must_fit_the_padded_input(key):
    for changes in ({key: 2}, {key: 4, "kernel_size": 5}, {key: 4, "dilation": 2}):
        values = variant(**changes)
        issue = only_issue(values)
        assert issue.path == f"problem.{key}"
        assert "the filter spans" in issue.message
        assert_hint_is_legal(values, key)
    spec_of(**{key: 3})
    spec_of(**{key: 1}, padding=1)
    spec_of(**{key: 1}, padding="same")


def test_padding_wider_than_the_filter_is_refused_once():
    values = variant(padding=3)
    issue = only_issue(values)
    assert issue.path == "problem.padding"
    assert_hint_is_legal(values, "padding")
    spec_of(padding=2)
    spec_of(padding=4, dilation=2)


# ---- D10: sizes and grids --------------------------------------------------------------------


def test_a_batch_beyond_65535_is_legal():
    sizes = {"in_channels": 4, "out_channels": 8, "num_groups": 8, "height": 3, "width": 3}
    for strategy in ("two_kernel", "hybrid"):
        spec_of(batch=65536, strategy=strategy, **sizes)


def test_more_than_two_to_the_31_outputs_are_legal():
    spec = spec_of(
        batch=1, in_channels=1, out_channels=8, num_groups=8, kernel_size=1,
        height=16384, width=16385,
    )  # fmt: skip
    assert geometry(spec.problem).y_elements == 2_147_614_720


@pytest.mark.parametrize("strategy", ["two_kernel", "hybrid"])
def test_a_grid_beyond_one_launch_is_refused_with_the_largest_batch(strategy):
    values = variant(batch=2**31 - 1, height=200, width=200, strategy=strategy)
    issue = only_issue(values)
    assert issue.path == "problem.batch"
    assert "a launch takes 2147483647" in issue.message
    assert_hint_is_legal(values, "batch")
    most = hinted_number(issue)
    assert issues_of(variant(values, batch=most + 1)) != []


def test_planes_and_filters_beyond_32_bits_are_refused():
    issue = only_issue(variant(height=2**20, width=2**20))
    assert "height x width is 1099511627776" in issue.message
    issue = only_issue(variant(in_channels=2**30))
    assert "in_channels x kernel_size" in issue.message


def test_a_group_that_hybrid_cannot_index_is_refused_and_two_kernel_takes_it():
    sizes = {
        "batch": 1, "in_channels": 1, "out_channels": 8, "num_groups": 1, "kernel_size": 1,
        "height": 16384, "width": 16385,
    }  # fmt: skip
    issue = only_issue(variant(strategy="hybrid", **sizes))
    assert issue.path == "schedule.strategy"
    assert "2147614720 elements" in issue.message
    spec_of(strategy="two_kernel", **sizes)


def test_hybrid_needs_a_groups_coefficients_in_shared_memory():
    values = variant(strategy="hybrid", out_channels=65536, num_groups=1)
    issue = only_issue(values)
    assert "1048768 bytes of shared memory, sm_90a has 232448" in issue.message
    assert issues_of(variant(values, num_groups=64)) == []


# ---- D11: threads ----------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["two_kernel", "hybrid"])
@pytest.mark.parametrize("threads", [33, 48, 100, 1, 1056, 31])
def test_threads_must_be_whole_warps(strategy, threads):
    values = variant(threads=threads, strategy=strategy)
    issue = only_issue(values)
    assert issue.path == "schedule.threads"
    assert issue.message == f"threads {threads} is not a multiple of 32 from 32 to 1024"
    assert_hint_is_legal(values, "threads")


@pytest.mark.parametrize("threads", [0, -32])
def test_threads_must_be_positive(threads):
    assert only_issue(variant(threads=threads)).path == "schedule.threads"


@pytest.mark.parametrize("threads", [32, 64, 256])
def test_whole_warps_are_legal(threads):
    assert make_plan(spec_of(threads=threads)).threads == threads
    assert make_plan(spec_of(threads=threads, strategy="hybrid")).threads == threads


# ---- The tile's knobs ------------------------------------------------------------------------


def test_pixels_must_divide_tile_h():
    values = variant(tile_h=6, pixels=4)
    assert only_issue(values).path == "schedule.pixels"
    assert_hint_is_legal(values, "pixels")


def test_tile_c_must_not_exceed_the_channels():
    values = variant(tile_c=9)
    assert only_issue(values).path == "schedule.tile_c"
    assert assert_hint_is_legal(values, "tile_c") == 3


def test_threads_must_fit_the_tile():
    values = variant(tile_h=3, tile_w=5, tile_k=8, threads=1024)
    issue = only_issue(values)
    assert issue.path == "schedule.threads"
    assert "does not fit tile_h 3 x tile_w 5" in issue.message
    assert_hint_is_legal(values, "threads")


@pytest.mark.parametrize(
    ("key", "value"),
    [("tile_h", 8), ("tile_w", 8), ("tile_k", 4), ("tile_c", 1), ("pixels", 2), ("math", "ffma")],
)
def test_hybrid_refuses_the_keys_of_a_tile_by_name(key, value):
    issue = only_issue(variant(strategy="hybrid", **{key: value}))
    assert issue.path == f"schedule.{key}"
    assert issue.message == f"{key} has no meaning in strategy hybrid"
    assert issues_of(variant(strategy="two_kernel", **{key: value})) == []


def test_given_knobs_are_kept():
    spec = spec_of(tile_h=8, tile_w=16, tile_k=6, tile_c=2, pixels=2, threads=128)
    tile = make_plan(spec).tile
    assert tile is not None
    knobs = (tile.tile_h, tile.tile_w, tile.tile_k, tile.tile_c, tile.pixels, tile.threads)
    assert knobs == (8, 16, 6, 2, 2, 128)


# ---- D14: registers --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outputs", "tile_h", "pixels"), [(256, 128, 8), (128, 64, 4)], ids=["256", "128"]
)
def test_too_many_outputs_a_thread_are_refused_with_figures(outputs, tile_h, pixels):
    # 65536 registers / 512 threads = 128 for each
    values = variant(flagship(), schedule={
        "strategy": "two_kernel", "tile_h": tile_h, "tile_w": 32, "tile_k": 32, "pixels": pixels,
        "threads": 512,
    })  # fmt: skip
    issue = only_issue(values)
    assert issue.path == "schedule.threads"
    assert f"{outputs} outputs ({pixels} pixels x 32 channels)" in issue.message
    assert "512 threads" in issue.message
    assert re.search(r"\b128\b", issue.message.split("512 threads")[1])
    assert issue.hint


@pytest.mark.parametrize(("outputs", "pixels"), [(4, 1), (32, 8), (48, 4)])
def test_what_fits_the_registers_is_legal(outputs, pixels):
    tile_k = outputs // pixels
    spec = spec_of(flagship(), schedule={
        "strategy": "two_kernel", "tile_h": 16 * pixels, "tile_w": 32, "tile_k": tile_k,
        "pixels": pixels, "threads": 512, "tile_c": 2,
    })  # fmt: skip
    tile = make_plan(spec).tile
    assert tile is not None
    assert tile.accumulators == outputs
    assert tile.registers * tile.threads <= 65536


def test_outputs_beyond_255_registers_are_refused_however_few_the_threads():
    values = variant(flagship(), schedule={
        "strategy": "two_kernel", "tile_h": 8, "tile_w": 32, "tile_k": 32, "pixels": 8,
        "threads": 32,
    })  # fmt: skip
    assert "256 outputs" in only_issue(values).message


# ---- D15: shared memory ----------------------------------------------------------------------


def staged(tile: int, in_channels: int, tile_c: int | None, **changes) -> dict:
    """A k 3 problem whose tile is `tile` x `tile`, of a width that no vector divides."""
    values = variant(
        batch=2, in_channels=in_channels, out_channels=32, num_groups=8, height=76, width=75,
    )  # fmt: skip
    values["schedule"] = {"strategy": "two_kernel", "tile_h": tile, "tile_w": tile}
    return variant(values, tile_c=tile_c, **changes)


def test_bytes_are_known_before_compiling():
    for in_channels, staged_bytes in ((8, 51_200), (16, 102_400)):
        plan = make_plan(
            spec_of(staged(38, in_channels, in_channels, pixels=2, threads=736, tile_k=8))
        )
        assert plan.tile is not None
        assert plan.tile.smem_x == staged_bytes
        assert plan.launches[0].smem_bytes > staged_bytes > SMEM_STATIC_LIMIT


def test_a_tile_that_no_block_holds_is_refused_with_both_numbers():
    values = staged(32, 64, 64)
    issue = only_issue(values)
    assert issue.path == "schedule.tile_c"
    assert "input tile 295936" in issue.message
    assert "sm_90a has 232448" in issue.message
    total = int(re.search(r"needs (\d+) bytes", issue.message)[1])
    assert total > 295_936
    assert_hint_is_legal(values, "tile_c")


def test_without_tile_c_the_channels_are_staged_in_parts():
    tile = make_plan(spec_of(staged(32, 64, None))).tile
    assert tile is not None
    assert 1 <= tile.tile_c < 64
    assert tile.smem <= ARCHS["sm_90a"].smem_per_block


def test_small_gpus_refuse_what_large_ones_take():
    knobs = {"pixels": 2, "threads": 736, "tile_k": 8}
    spec_of(staged(38, 16, 16, **knobs, targets=["sm_90a"]))
    spec_of(staged(38, 16, 16, **knobs, targets=["sm_80", "sm_100a"]))
    for targets in (["sm_86"], ["sm_90a", "sm_86"], ["sm_89"], ["sm_120"]):
        values = staged(38, 16, 16, **knobs, targets=targets)
        issue = only_issue(values)
        assert f"{targets[-1]} has 101376" in issue.message
        assert_hint_is_legal(values, "tile_c")


def test_a_tile_that_no_staging_makes_fit_is_refused():
    issue = only_issue(variant(height=5000, tile_h=4000, tile_w=32))
    assert issue.path == "schedule.tile_h"
    assert "shared memory" in issue.message
    assert "tile_c" not in issue.hint


def test_exactly_the_static_limit_is_legal():
    base = variant(in_channels=32, out_channels=32, num_groups=8, height=76, width=75)
    g = geometry(spec_of(base).problem)
    for tile_h, tile_w, tile_k, tile_c, pixels in itertools.product(
        (4, 8, 16), (16, 32), (8, 16, 32), range(8, 33), (1, 2, 4)
    ):
        threads = tile_h // pixels * tile_w
        tile = with_stage(g, 4, Schedule(tile_c=tile_c), tile_h, tile_w, tile_k, pixels, threads)
        if tile.smem == SMEM_STATIC_LIMIT and tile.thread_k * pixels <= 64:
            break
    else:
        pytest.fail("no knobs give exactly 49152 bytes")
    spec = spec_of(base, tile_h=tile_h, tile_w=tile_w, tile_k=tile_k, tile_c=tile_c, pixels=pixels,
                   threads=threads)  # fmt: skip
    assert make_plan(spec).launches[0].smem_bytes == 49_152


# ---- The chain -------------------------------------------------------------------------------


def test_a_chain_ends_with_its_only_norm():
    norm = {"group_norm": {"num_groups": 4}}
    assert "has no group_norm" in only_issue(variant(chain=["sigmoid"])).message
    assert only_issue(variant(chain=[norm, "relu"])).path == "chain[1]"
    assert only_issue(variant(chain=["relu", norm, norm])).path == "chain[2]"
    assert issues_of(variant(chain=[norm])) == []
    assert issues_of(variant(chain=["relu", norm])) == []


# ---- Helpers ---------------------------------------------------------------------------------


def test_nearest_prefers_the_smaller_of_two():
    assert nearest(3, [2, 4]) == 2
    assert nearest(5, divisors(12)) == 4
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


def test_a_name_is_refused_or_accepted_for_a_reason():
    assert name_problem("demo") == ""
    assert "keyword" in name_problem("double")


def test_rules_that_read_an_invalid_key_are_not_run():
    values = demo()
    values["problem"]["out_channels"] = "twelve"
    values["chain"][3]["group_norm"]["num_groups"] = 5
    assert only_issue(values).path == "problem.out_channels"


@pytest.mark.parametrize("name", ["N", "conv_out", "package_name", "workspace", "x", "y"])
def test_a_parameter_may_not_take_the_name_of_what_a_launch_is_given(name):
    values = {
        "version": 1,
        "name": "probe",
        "problem": {
            "batch": 2, "in_channels": 3, "height": 9, "width": 9, "out_channels": 4,
            "kernel_size": 3,
        },
        "chain": [{"add": name}, {"group_norm": {"num_groups": 2}}],
    }  # fmt: skip
    with pytest.raises(SpecError, match=f"parameter name '{name}' is taken"):
        load_spec(values)


def test_hints_hold_for_both_directions_and_all_launches():
    problem = {"batch": 2, "in_channels": 3, "out_channels": 4, "height": 9, "width": 9}
    chain = [{"group_norm": {"num_groups": 2}}]
    wide = variant(problem={**problem, "kernel_size": [3, 5], "padding": 9}, chain=chain)
    assert only_issue(wide).hint == "at most [2, 4]"
    wide["problem"]["padding"] = [2, 4]
    assert issues_of(wide) == []
    many = variant(problem={**problem, "batch": 2**31 - 1, "kernel_size": 3}, chain=chain,
                   schedule={"strategy": "two_kernel", "tile_k": 3})  # fmt: skip
    issue = only_issue(many)
    assert issue.path == "problem.batch"
    many["problem"]["batch"] = int(issue.hint.removeprefix("at most "))
    assert issues_of(many) == []


def test_a_tile_wider_than_the_output_is_refused():
    problem = {"batch": 2, "in_channels": 3, "out_channels": 8, "height": 8, "width": 8,
               "kernel_size": 3}  # fmt: skip
    schedule = {"strategy": "single_pass", "tile_w": 1_000_000_000}
    values = variant(problem=problem, chain=[{"group_norm": {"num_groups": 2}}], schedule=schedule,
                     targets=["sm_90a"])  # fmt: skip
    issue = only_issue(values)
    assert (issue.path, issue.hint) == ("schedule.tile_w", "nearest legal value 6")
    values["schedule"]["tile_w"] = 6
    assert issues_of(values) == []


def test_a_knob_of_another_strategy_has_one_issue():
    values = variant(schedule={"strategy": "single_pass", "tile_c": 1000}, targets=["sm_90a"])
    assert "has no meaning in strategy single_pass" in only_issue(values).message
