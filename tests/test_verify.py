"""The verifier itself: what is right passes, and every known way of cheating or being wrong fails.

Candidates here are functions of torch on the CPU; the same checks judge kernels on a GPU.
"""

import json
import math
from dataclasses import replace

import pytest
from helpers import demo, issues_of, spec_of, variant

torch = pytest.importorskip("torch")

from kgen import checks, verdict
from kgen.checks import check_case, verify_candidate
from kgen.errors import UsageError
from kgen.geometry import geometry
from kgen.ops import OPS
from kgen.reference import (
    DISTRIBUTIONS,
    EagerBlock,
    chain_function,
    chunks,
    draw,
    eager_fp32,
    exact_fp32,
    oracle,
    parameter_shapes,
)
from kgen.spec import load_spec
from kgen.verdict import ATOL, CASES, RTOL, CaseResult, Report
from kgen.verify import verify

FACTORS = ("scale", "group_norm.weight")


@pytest.fixture(scope="module")
def spec():
    """x [2, 3, 19, 24] -> y [2, 12, 17, 22]."""
    return spec_of()


def eager(spec):
    return lambda x, parameters: eager_fp32(spec, x, parameters)


def failures(spec, candidate, cases=CASES[:2]):
    """Reasons of the failed cases; empty if the candidate passed all."""
    report = verify_candidate(spec, candidate, "cpu", cases)
    assert len(report.cases) == len(cases)
    assert report.passed == all(case.passed for case in report.cases)
    assert all(bool(case.reason) != case.passed for case in report.cases)
    return [case.reason for case in report.cases if not case.passed]


def changed(parameters, **values):
    return {**parameters, **{key.replace("__", "."): value for key, value in values.items()}}


# ---- What is right passes --------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"batch": "dynamic"},
        {"conv_bias": False, "padding": "same"},
        {"stride": 2, "dilation": [1, 2], "padding": 1},
        {"chain": [{"mul": "a"}, "silu", {"add": "b"}, {"group_norm": {"num_groups": 3}}]},
        {"in_channels": 9, "out_channels": 6, "num_groups": 3},
    ],
    ids=str,
)
def test_eager_fp32_passes_every_case(changes):
    spec = spec_of(**changes)
    report = verify_candidate(spec, eager(spec), "cpu")
    assert report.passed, report.table()
    assert [(case.distribution, case.seed) for case in report.cases] == list(CASES)
    assert 0 < report.max_error < ATOL
    for case in report.cases:
        assert case.max_error == case.eager_max_error  # the candidate is eager
        assert 0 < case.rms_error <= case.max_error


def test_fp64_passes_with_less_error_than_eager(spec):
    report = verify_candidate(spec, lambda x, p: oracle(spec, x, p).float(), "cpu")
    assert report.passed
    assert all(case.rms_error < case.eager_rms_error for case in report.cases)


def test_a_dynamic_batch_is_verified_at_several_sizes():
    spec, seen = spec_of(batch="dynamic"), []
    verify_candidate(spec, lambda x, p: seen.append(x.shape[0]) or eager_fp32(spec, x, p), "cpu")
    assert len(set(seen)) >= 2
    assert min(seen) >= 2


def test_progress_names_every_case(spec):
    told = []
    verify_candidate(spec, eager(spec), "cpu", CASES[:3], told.append)
    assert told == [f"{name}, seed {seed}" for name, seed in CASES[:3]]


# ---- D20: weak inputs ------------------------------------------------------------------------


def test_zeros_fail(spec):
    g = geometry(spec.problem)
    reasons = failures(spec, lambda x, p: x.new_zeros((2, g.C_out, g.P, g.Q)))
    assert len(reasons) == 2


@pytest.mark.parametrize("key", ["group_norm.weight", "scale"])
def test_inputs_that_make_the_answer_constant_prove_nothing(spec, key):
    x, parameters = draw(spec, 2, "uniform", 0, "cpu")
    assert check_case(spec, eager(spec), x, parameters).passed
    parameters = {**parameters, key: torch.zeros_like(parameters[key])}
    if key == "group_norm.weight":
        parameters["group_norm.bias"] = torch.zeros(12)
    else:  # every group is constant: the output is group_norm.bias, 0 here
        parameters["bias"] = torch.zeros(12, 1, 1)
        parameters["group_norm.bias"] = torch.zeros(12)
    stub = lambda x, p: torch.zeros(2, 12, 17, 22)  # noqa: E731
    for candidate in (stub, eager(spec)):
        result = check_case(spec, candidate, x, parameters)
        assert result.passed
        assert result.constant
        report = Report("demo", "", "", "cpu", ATOL, RTOL, (result,))
        assert not report.passed
        assert "proves nothing" in report.summary()
        assert "ok, but constant" in report.table()
        other = replace(result, constant=False)
        assert replace(report, cases=(result, other)).passed


def test_a_block_of_one_value_a_group_is_beta_whatever_it_is_given():
    values = demo()
    values["problem"] |= {
        "out_channels": 4,
        "height": 3,
        "width": 3,
        "padding": 0,
        "kernel_size": 3,
    }
    values["chain"][-1]["group_norm"]["num_groups"] = 4
    one = load_spec(values)
    x, parameters = draw(one, 2, "uniform", 0, "cpu")
    result = check_case(one, eager(one), x, parameters)
    assert (result.passed, result.constant) == (True, False)
    wrong = lambda x, p: torch.zeros(2, 4, 1, 1)  # noqa: E731
    assert not check_case(one, wrong, x, parameters).passed


def test_ignoring_the_parameters_fails_although_it_is_right_at_their_defaults(spec):
    def ignores_all(x, p):
        plain = changed(p, bias=torch.zeros(12, 1, 1), scale=torch.ones(12, 1, 1))
        plain |= {"group_norm.weight": torch.ones(12), "group_norm.bias": torch.zeros(12)}
        return eager_fp32(spec, x, plain)

    x, parameters = draw(spec, 2, "uniform", 0, "cpu")
    defaults = changed(
        parameters, bias=torch.zeros(12, 1, 1), scale=torch.ones(12, 1, 1),
        group_norm__weight=torch.ones(12), group_norm__bias=torch.zeros(12),
    )  # fmt: skip
    assert check_case(spec, ignores_all, x, defaults).passed
    assert len(failures(spec, ignores_all)) == 2


@pytest.mark.parametrize("key", list(parameter_shapes(spec_of())))
@pytest.mark.parametrize("value", ["default", "one channel"])
def test_ignoring_any_one_parameter_fails(spec, key, value):
    def candidate(x, p):
        wrong = p[key].clone()
        default = 1.0 if key in FACTORS else 0.0
        if value == "default":
            wrong.fill_(default)
        else:
            wrong[5] = default
        return eager_fp32(spec, x, {**p, key: wrong})

    assert len(failures(spec, candidate)) == 2


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_no_drawn_parameter_is_at_its_default(spec, distribution):
    x, parameters = draw(spec, 2, distribution, 0, "cpu")
    assert tuple(x.shape) == (2, 3, 19, 24)
    assert x.dtype == torch.float32
    assert {key: tuple(one.shape) for key, one in parameters.items()} == parameter_shapes(spec)
    for key, value in parameters.items():
        assert value.std() > 0
        default = 1.0 if key in FACTORS else 0.0
        assert (value != default).all()
        if key in FACTORS:
            assert value.abs().min() >= 0.5


def test_draws_follow_the_seed(spec):
    one, same, other = (draw(spec, 2, "uniform", seed, "cpu")[0] for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_the_cases_cover_seeds_and_distributions():
    assert len({seed for _, seed in CASES}) >= 2
    assert {name for name, _ in CASES} == set(DISTRIBUTIONS)


# ---- D21: memory -----------------------------------------------------------------------------


def test_memory_returned_unchanged_fails(spec):
    assert len(failures(spec, lambda x, p: torch.empty(2, 12, 17, 22))) == 2


def test_memory_is_poisoned_before_a_candidate_runs(spec, monkeypatch):
    poisoned = []
    real = checks._poisoned
    monkeypatch.setattr(
        checks, "_poisoned", lambda count, device: poisoned.append(count) or real(count, device)
    )
    seen = []

    def candidate(x, p):
        seen.append(list(poisoned))
        return eager_fp32(spec, x, p)

    failures(spec, candidate, CASES[:1])
    assert seen == [[2 * 12 * 17 * 22]]
    assert torch.isnan(real(4, torch.device("cpu"))).all()


@pytest.mark.parametrize("key", ["x", *parameter_shapes(spec_of())])
def test_a_candidate_that_changes_its_inputs_fails(spec, key):
    def candidate(x, p):
        y = eager_fp32(spec, x, p)
        (x if key == "x" else p[key]).view(-1)[-1] += 1.0
        return y

    assert failures(spec, candidate) == [f"changed its input {key}"] * 2


def test_zeroing_x_to_be_right_fails(spec):
    def candidate(x, p):
        x.zero_()
        return torch.zeros(2, 12, 17, 22)

    assert failures(spec, candidate) == ["changed its input x"] * 2


@pytest.mark.parametrize("half", ["upper", "lower"])
def test_writing_half_of_a_shared_output_fails(spec, half):
    shared = torch.full((2, 12, 17, 22), math.nan)

    def candidate(x, p):
        y = eager_fp32(spec, x, p)
        rows = slice(0, 9) if half == "upper" else slice(9, 17)
        shared[:, :, rows] = y[:, :, rows]
        return shared

    assert len(failures(spec, candidate)) == 2


def test_an_answer_left_over_from_another_seed_fails(spec):
    answers = []

    def candidate(x, p):
        answers.append(eager_fp32(spec, x, p))
        return answers[0]

    assert len(failures(spec, candidate)) == 1


# ---- Wrong values ----------------------------------------------------------------------------


def without_last_column(x, p):
    weight = p["conv.weight"].clone()
    weight[..., -1] = 0.0
    return x, {**p, "conv.weight": weight}


def without_last_channel(x, p):
    x = x.clone()
    x[:, -1] = 0.0
    return x, p


def with_tf32_inputs(x, p):
    def cut(value):  # a mantissa of 10 bits, as tensor cores read it
        return (value.view(torch.int32) & ~0x1FFF).view(torch.float32)

    return cut(x.clone()), {**p, "conv.weight": cut(p["conv.weight"].clone())}


def with_swapped_axes(x, p):
    return x, {**p, "conv.weight": p["conv.weight"].transpose(2, 3).contiguous()}


@pytest.mark.parametrize(
    "mistake", [without_last_column, without_last_channel, with_tf32_inputs, with_swapped_axes]
)
def test_a_wrong_convolution_fails(spec, mistake):
    reasons = failures(spec, lambda x, p: eager_fp32(spec, *mistake(x, p)))
    assert len(reasons) == 2
    assert all("elements are off by more than" in reason for reason in reasons)


def test_tf32_would_pass_a_looser_tolerance(spec, monkeypatch):
    candidate = lambda x, p: eager_fp32(spec, *with_tf32_inputs(x, p))  # noqa: E731
    report = verify_candidate(spec, candidate, "cpu", CASES[:2])
    assert not report.passed
    assert ATOL < report.max_error < 1e-1
    monkeypatch.setattr(verdict, "ATOL", 0.1)
    assert verify_candidate(spec, candidate, "cpu", CASES[:2]).passed


def edit_of(spec, edit):
    def candidate(x, p):
        y = eager_fp32(spec, x, p).clone()
        edit(y)
        return y

    return candidate


WRONG_OUTPUTS = {
    "one element": lambda y: y[1, 7, 16, 21].add_(0.01),
    "one channel": lambda y: y[:, 3].neg_(),
    "last row": lambda y: y[:, :, -1].zero_(),
    "last column": lambda y: y[..., -1].copy_(y[..., -2]),
    "last sample": lambda y: y[-1].copy_(y[0]),
    "one nan": lambda y: y[0, 0, 0, 0].fill_(math.nan),
    "one infinity": lambda y: y[1, 11, 16, 21].fill_(math.inf),
    "groups swapped": lambda y: y.copy_(y.roll(3, dims=1)),
}


@pytest.mark.parametrize("name", WRONG_OUTPUTS)
def test_a_wrong_part_of_the_output_fails(spec, name):
    assert len(failures(spec, edit_of(spec, WRONG_OUTPUTS[name]))) == 2
    assert failures(spec, edit_of(spec, lambda y: None)) == []


def test_errors_within_the_tolerance_pass_and_just_beyond_fail(spec):
    assert failures(spec, edit_of(spec, lambda y: y[0, 0, 0, 0].add_(0.5 * ATOL))) == []
    beyond = edit_of(
        spec, lambda y: y[0, 0, 0, 0].add_(1.5 * ATOL + 1.5 * RTOL * y[0, 0, 0, 0].abs())
    )
    assert [reason.split()[0] for reason in failures(spec, beyond)] == ["1", "1"]


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("dtype", lambda y: y.double()),
        ("half", lambda y: y.half()),
        ("shape", lambda y: y[:, :, :-1]),
        ("batch", lambda y: y[:1]),
        ("flat", lambda y: y.flatten()),
        ("device", lambda y: y.to("meta")),
    ],
)
def test_an_output_of_another_kind_fails(spec, name, edit):
    reasons = failures(spec, lambda x, p: edit(eager_fp32(spec, x, p)))
    assert len(reasons) == 2
    assert all(reason.startswith("returned ") for reason in reasons)


def test_variance_of_the_other_kind_fails():
    spec = spec_of(out_channels=5, num_groups=1, height=3, width=3)  # five elements a group

    def unbiased(x, p):
        one = {"group_norm.weight": torch.ones(5), "group_norm.bias": torch.zeros(5)}
        n = (eager_fp32(spec, x, {**p, **one}) * (4 / 5) ** 0.5).flatten(1)
        return (n * p["group_norm.weight"] + p["group_norm.bias"]).view(2, 5, 1, 1)

    assert failures(spec, eager(spec)) == []
    assert len(failures(spec, unbiased)) == 2


def test_ignoring_eps_fails():
    spec, without = spec_of(eps=0.5), spec_of(eps=1e-30)
    assert failures(spec, eager(spec)) == []
    assert len(failures(spec, eager(without))) == 2


# ---- D01, D02: conditioning ------------------------------------------------------------------


def far_from_zero(bias: float, eps: float):
    """D01(a): values far from zero with little spread, on a chain without a sigmoid."""
    spec = spec_of(
        batch=2, in_channels=8, out_channels=32, height=64, width=64, num_groups=8, eps=eps,
        chain=[{"add": "bias"}, {"mul": "scale"}, "sigmoid",
               {"group_norm": {"num_groups": 8, "eps": eps}}],
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((2, 8, 64, 64), generator=generator)
    parameters = {
        "conv.weight": 0.05 * torch.randn((32, 8, 3, 3), generator=generator),
        "conv.bias": torch.zeros(32),
        "bias": torch.full((32, 1, 1), bias),
        "scale": torch.ones(32, 1, 1),
        "group_norm.weight": torch.ones(32),
        "group_norm.bias": torch.zeros(32),
    }
    return spec, x, parameters


def one_pass(spec):
    """GroupNorm by E[v^2] - E[v]^2 in fp32, after eager's own chain."""

    def candidate(x, p):
        v = torch.nn.functional.conv2d(x, p["conv.weight"], p["conv.bias"])
        v = torch.sigmoid((v + p["bias"]) * p["scale"])
        groups = v.view(v.shape[0], spec.norm.num_groups, -1)
        mean = groups.mean(-1, keepdim=True)
        variance = ((groups * groups).mean(-1, keepdim=True) - mean * mean).clamp(min=0)
        y = ((groups - mean) / (variance + spec.norm.eps).sqrt()).view_as(v)
        weight, bias = p["group_norm.weight"], p["group_norm.bias"]
        return y * weight.view(-1, 1, 1) + bias.view(-1, 1, 1)

    return candidate


def test_a_one_pass_variance_fails_far_from_zero():
    spec, x, parameters = far_from_zero(bias=6.0, eps=1e-5)
    good = check_case(spec, eager(spec), x, parameters)
    assert good.passed
    assert not good.ill_conditioned
    bad = check_case(spec, one_pass(spec), x, parameters)
    assert not bad.passed
    assert bad.max_error > 10 * good.max_error


def test_a_long_group_agrees_with_the_oracle():
    # D01(b) at a quarter of its length: one running fp32 sum would already be wrong.
    spec = spec_of(batch=1, in_channels=8, out_channels=4, num_groups=1, height=514, width=514)
    x, parameters = draw(spec, 1, "uniform", 0, "cpu")
    result = check_case(spec, eager(spec), x, parameters)
    assert result.passed
    assert result.eager_max_error < 1e-4

    def running_sum(x, p):
        v = torch.nn.functional.conv2d(x, p["conv.weight"], p["conv.bias"])
        v = torch.sigmoid((v + p["bias"]) * p["scale"])
        squares = (v - v.mean()).square().flatten().cumsum(0, dtype=torch.float16)[-1]
        y = (v - v.mean()) / (squares.float() / v.numel() + spec.norm.eps).sqrt()
        weight, bias = p["group_norm.weight"], p["group_norm.bias"]
        return y * weight.view(-1, 1, 1) + bias.view(-1, 1, 1)

    assert not check_case(spec, running_sum, x, parameters).passed


def test_an_ill_conditioned_case_is_said_to_be_one():
    spec, x, parameters = far_from_zero(bias=8.0, eps=1e-8)
    result = check_case(spec, eager(spec), x, parameters)
    assert result.ill_conditioned
    assert result.eager_max_error > 1e-4
    report = Report("n", "h", "s", "cpu", ATOL, RTOL, (result,))
    assert "1 ill-conditioned" in report.headline()
    assert "ill-conditioned" in report.table()


def test_an_ill_conditioned_case_is_no_licence():
    spec, x, parameters = far_from_zero(bias=8.0, eps=1e-8)
    bad = check_case(spec, one_pass(spec), x, parameters)
    assert not bad.passed
    assert bad.ill_conditioned
    assert "4 x eager's own error" in bad.reason
    zeros = check_case(spec, lambda x, p: torch.zeros(2, 32, 62, 62), x, parameters)
    assert not zeros.passed


def test_a_well_conditioned_case_is_not_said_to_be_ill(spec):
    report = verify_candidate(spec, eager(spec), "cpu", CASES[:2])
    assert not any(case.ill_conditioned for case in report.cases)
    assert "ill-conditioned" not in report.headline()


def test_half_precision_is_refused_when_the_spec_is_loaded():  # D03
    for dtype in ("float16", "bfloat16"):
        (issue,) = issues_of(variant(dtype=dtype))
        assert issue.path == "problem.dtype"


def test_one_element_a_group_gives_the_norm_s_bias():  # D04 (b)
    spec = spec_of(batch=4, in_channels=3, height=3, width=3, out_channels=5, num_groups=5)
    x, parameters = draw(spec, 4, "uniform", 0, "cpu")
    wanted = parameters["group_norm.bias"].double().view(1, 5, 1, 1).expand(4, 5, 1, 1)
    torch.testing.assert_close(oracle(spec, x, parameters), wanted, rtol=0, atol=1e-12)
    assert check_case(spec, eager(spec), x, parameters).passed
    assert not check_case(spec, lambda x, p: torch.ones(4, 5, 1, 1), x, parameters).passed


# ---- The reference ---------------------------------------------------------------------------


def test_the_oracle_is_fp64_from_the_same_inputs(spec):
    x, parameters = draw(spec, 2, "uniform", 0, "cpu")
    wanted = oracle(spec, x, parameters)
    assert wanted.dtype == torch.float64
    assert x.dtype == torch.float32
    v = torch.zeros(2, 12, 17, 22, dtype=torch.float64)
    for r in range(3):
        for s in range(3):
            window = x.double()[:, :, r : r + 17, s : s + 22]
            v += torch.einsum(
                "nchw,kc->nkhw", window, parameters["conv.weight"][:, :, r, s].double()
            )
    v = v + parameters["conv.bias"].double().view(-1, 1, 1)
    v = (v + parameters["bias"].double()) * parameters["scale"].double()
    v = 1 / (1 + torch.exp(-v))
    groups = v.view(2, 4, -1)
    mean = groups.mean(-1, keepdim=True)
    variance = ((groups - mean) ** 2).mean(-1, keepdim=True)
    y = ((groups - mean) / torch.sqrt(variance + 1e-5)).view_as(v)
    y = y * parameters["group_norm.weight"].double().view(-1, 1, 1)
    y = y + parameters["group_norm.bias"].double().view(-1, 1, 1)
    torch.testing.assert_close(wanted, y, rtol=1e-12, atol=1e-12)


def test_the_oracle_in_chunks_is_the_oracle(spec, monkeypatch):
    x, parameters = draw(spec, 5, "uniform", 0, "cpu")
    whole = oracle(spec, x, parameters)
    monkeypatch.setattr("kgen.reference.CHUNK_BYTES", 2 * 8 * 12 * 17 * 22)
    parts = list(chunks(spec, x))
    assert [(part.start, part.stop) for part in parts] == [(0, 2), (2, 4), (4, 5)]
    torch.testing.assert_close(
        torch.cat([oracle(spec, x[part], parameters) for part in parts]), whole
    )


@pytest.mark.parametrize("tf32", [True, False])
def test_exact_fp32_restores_the_flags(tf32):
    backends = torch.backends.cudnn
    before = (backends.allow_tf32, backends.benchmark, backends.deterministic)
    try:
        backends.allow_tf32, backends.benchmark, backends.deterministic = tf32, True, False
        with exact_fp32():
            assert not backends.allow_tf32
            assert not backends.benchmark
            assert backends.deterministic
        assert (backends.allow_tf32, backends.benchmark) == (tf32, True)
        with pytest.raises(ZeroDivisionError), exact_fp32():
            raise ZeroDivisionError
        assert (backends.allow_tf32, backends.deterministic) == (tf32, False)
    finally:
        backends.allow_tf32, backends.benchmark, backends.deterministic = before


FORMULAS = {
    "add": lambda v, a: v + a,
    "mul": lambda v, a: v * a,
    "sigmoid": lambda v, _: 1 / (1 + torch.exp(-v)),
    "relu": lambda v, _: torch.where(v > 0, v, 0.0),
    "silu": lambda v, _: v / (1 + torch.exp(-v)),
    "tanh": lambda v, _: 1 - 2 / (torch.exp(2 * v) + 1),
    "hardswish": lambda v, _: v * torch.clamp(v + 3, 0, 6) / 6,
    "gelu": lambda v, _: v * 0.5 * (1 + torch.erf(v / 2**0.5)),
}


def test_every_op_has_a_formula_of_its_own_here():
    assert set(FORMULAS) == set(OPS)


@pytest.mark.parametrize("op", OPS)
def test_an_op_s_torch_expression_is_its_formula(op):
    v = torch.linspace(-9, 9, 2 * 4 * 25, dtype=torch.float64).view(2, 4, 5, 5)
    parameter = torch.tensor([0.5, -1.0, 2.0, 3.0], dtype=torch.float64).view(4, 1, 1)
    function = chain_function(OPS[op].torch)
    given = parameter if OPS[op].takes_parameter else None
    torch.testing.assert_close(function(v, given), FORMULAS[op](v, parameter), rtol=1e-9, atol=1e-9)
    others = [name for name in OPS if name != op]
    for other in others:  # no two ops are alike
        assert not torch.allclose(FORMULAS[other](v, parameter), FORMULAS[op](v, parameter))


@pytest.mark.parametrize("op", [op for op in OPS if OPS[op].fold])
def test_folding_parameters_is_the_same_function(op):
    v, a, b = torch.randn(3, 1000, dtype=torch.float64).unbind(0)
    function = chain_function(OPS[op].torch)
    folded = {"+": a + b, "*": a * b}[OPS[op].fold]
    torch.testing.assert_close(function(function(v, a), b), function(v, folded))


def test_the_eager_module_is_the_reference(spec):
    torch.manual_seed(0)
    module = EagerBlock(spec)
    x, _ = draw(spec, 2, "uniform", 0, "cpu")
    parameters = {key: one.detach() for key, one in module.named_parameters()}
    with torch.no_grad():
        torch.testing.assert_close(module(x), eager_fp32(spec, x, parameters))


# ---- The report ------------------------------------------------------------------------------


def test_a_report_without_cases_has_not_passed():
    assert not Report("n", "h", "s", "cpu", ATOL, RTOL, ()).passed


def test_one_failed_case_fails_the_report(spec):
    good = CaseResult("uniform", 0, 2, True, "", 1e-6, 1e-7, 2e-6, 2e-7)
    bad = CaseResult("uniform", 1, 2, False, "3 elements are off", 1.0, 0.1, 2e-6, 2e-7)
    report = Report("demo", "h", "two_kernel", "cpu", ATOL, RTOL, (good, bad))
    assert not report.passed
    assert report.max_error == 1.0
    assert report.headline().startswith("1 of 2 cases passed on cpu: max error 1.00e+00")
    assert report.summary() == "demo: wrong on uniform, seed 1: 3 elements are off"
    assert "WRONG: 3 elements are off" in report.table()
    assert json.loads(json.dumps(report.to_json()))["passed"] is False
    assert Report("demo", "h", "s", "cpu", ATOL, RTOL, (good,)).passed


def test_the_report_prints_the_reference_s_own_error(spec):
    report = verify_candidate(spec, eager(spec), "cpu", CASES[:1])
    assert f"eager fp32 {report.cases[0].eager_max_error:.2e}" in report.headline()


def test_verify_says_why_it_cannot_run_here(spec):
    if torch.cuda.is_available():
        pytest.skip("a CUDA device is there")
    with pytest.raises(UsageError, match="cannot verify: no CUDA device"):
        verify(spec)
    with pytest.raises(UsageError, match="unknown device 'tpu'; legal are cuda and simulator"):
        verify(spec, device="tpu")
