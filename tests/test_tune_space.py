"""The tuner's space: every candidate is legal, none comes twice, and what a spec asks is kept."""

from __future__ import annotations

from collections import Counter

import pytest
from helpers import SPECS, demo, issues_of, spec_of, variant
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kgen.constraints import check
from kgen.errors import UsageError
from kgen.plan import make_plan
from kgen.spec import STRATEGIES, load_spec
from kgen.tune.space import block_hash, enumerate_space, with_schedule


def plan_of(spec, candidate):
    plan = make_plan(with_schedule(spec, candidate.schedule))
    return plan.strategy, plan.tile, plan.fused, plan.threads


def assert_sound(spec, space):
    """Legal, no duplicates of text or of plan, refused ones illegal."""
    legal = (*space.candidates, *space.pruned)
    for one in legal:
        own = with_schedule(spec, one.schedule)
        assert check(own) == [], one
        assert own.hash() == one.spec_hash
    assert max(Counter(one.key for one in legal).values()) == 1
    assert max(Counter(plan_of(spec, one) for one in legal).values()) == 1
    for one in space.refused[::97]:
        assert check(with_schedule(spec, one.schedule)), one
    assert space.default.is_default
    assert sum(one.is_default for one in legal) == 1
    assert with_schedule(spec, space.default.schedule) == spec


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_shipped_specs_have_a_sound_space(path):
    spec = load_spec(path)
    strategies = [one for one in STRATEGIES if one != "two_kernel"]
    space = enumerate_space(spec, strategies)
    assert_sound(spec, space)
    fits = {one for one in strategies if not check(spec.with_strategy(one))}
    assert fits <= {one.strategy for one in space.candidates}
    assert enumerate_space(spec, strategies) == space  # the same order every time


def test_the_whole_space_of_a_small_spec_is_sound():
    spec = spec_of()
    assert_sound(spec, enumerate_space(spec))


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.fixed_dictionaries(
        {
            "batch": st.sampled_from([1, 2, 7, "dynamic"]),
            "in_channels": st.integers(1, 20),
            "out_channels": st.sampled_from([4, 6, 12, 32, 72]),
            "num_groups": st.sampled_from([1, 2, 4]),
            "height": st.integers(3, 70),
            "width": st.integers(3, 140),
            "kernel_size": st.sampled_from([1, 3, [3, 5]]),
            "padding": st.sampled_from([0, 1]),
            "stride": st.sampled_from([1, 2]),
        }
    ),
    st.sampled_from([(1.0, ["two_kernel"]), (2.0, ["single_pass", "recompute", "hybrid"])]),
)
def test_random_specs_have_a_sound_space(changes, wanted):
    values = variant(schedule=None, **changes)
    assume(not issues_of(values))
    spec = load_spec(values)
    assert_sound(spec, enumerate_space(spec, wanted[1], factor=wanted[0]))


def test_only_the_strategies_asked_for_beside_the_default():
    space = enumerate_space(spec_of(), ["hybrid"])
    assert {one.strategy for one in space.candidates} == {"two_kernel", "hybrid"}
    assert [one.is_default for one in space.candidates if one.strategy == "two_kernel"] == [True]


def test_a_strategy_that_does_not_fit_says_why():
    values = demo()
    values["problem"] |= {"height": 4000, "width": 4000, "batch": 1}
    space = enumerate_space(load_spec(values), ["single_pass"])
    assert [one.strategy for one in space.candidates] == ["two_kernel"]
    assert len(space.refused) == 1
    assert "single_pass does not fit" in space.refused[0].reason


def test_a_math_that_the_spec_names_is_kept():
    def maths(spec, **options):
        space = enumerate_space(spec, **options)
        found = (*space.candidates, *space.pruned)
        return {one.schedule.get("math") for one in found if one.strategy in ("single_pass",)}

    size = {"height": 64, "width": 64}
    assert maths(spec_of(**size)) == {"fp16x3", "bf16x3", "tf32x3"}  # those that meet the tolerance
    named = spec_of(schedule={"strategy": "single_pass", "math": "tf32x3"}, **size)
    assert maths(named) == {"tf32x3"}
    fp32 = spec_of(schedule={"strategy": "two_kernel", "math": "ffma"}, **size)
    assert maths(fp32) == set()
    assert maths(fp32, maths=["fp16x3"]) == {"fp16x3"}


def test_values_that_the_spec_gives_are_on_the_axes():
    spec = spec_of(schedule={"strategy": "two_kernel", "tile_h": 12, "pixels": 3})
    space = enumerate_space(spec, ["two_kernel"])
    assert 12 in space.axes["two_kernel"]["tile_h"]
    assert 3 in space.axes["two_kernel"]["pixels"]
    assert dict(space.default.point)["tile_h"] == 12


def test_the_factor_prunes_by_strategy_and_never_the_default():
    slow = {"strategy": "two_kernel", "tile_h": 1, "tile_w": 8, "tile_k": 4, "pixels": 1}
    spec = spec_of(height=64, width=64, batch=64, schedule=slow)
    space = enumerate_space(spec, ["two_kernel", "hybrid"], factor=1.2)
    best = min(one.predicted_ms for one in space.candidates if one.strategy == "two_kernel")
    assert space.default.predicted_ms > 1.2 * best
    assert all(
        one.predicted_ms <= 1.2 * best
        for one in space.candidates
        if one.strategy == "two_kernel" and not one.is_default
    )
    assert space.pruned
    assert all(one.predicted_ms > 1.2 * best for one in space.pruned)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategies": ["hybird"]}, "unknown strategy 'hybird'; did you mean hybrid"),
        ({"strategies": ["x"]}, "known: hybrid, two_kernel"),
        ({"maths": ["fp16"]}, "unknown math 'fp16'; did you mean fp16x3"),
        ({"factor": 0.5}, "below 1"),
    ],
)
def test_unknown_names_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        enumerate_space(spec_of(), **options)


def test_the_block_has_one_hash_whatever_its_schedule():
    assert block_hash(spec_of()) == block_hash(spec_of(tile_h=8))
    assert block_hash(spec_of()) != block_hash(spec_of(batch=3))


def test_maths_that_no_strategy_has_are_refused():
    with pytest.raises(UsageError, match=r"maths are of the strategies .*single_pass"):
        enumerate_space(spec_of(), ["hybrid"], ["tf32"])
