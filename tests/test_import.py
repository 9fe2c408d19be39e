"""Blocks in modules: what is found, the specs of it, and why the rest is not."""

import collections
import copy

import pytest
from helpers import python

torch = pytest.importorskip("torch")
from torch import nn
from torch.nn import functional as F  # noqa: N812

import kgen
from kgen.errors import UsageError
from kgen.importers.naming import parameter_name, spec_name
from kgen.reference import EagerBlock

X = torch.empty(2, 3, 10, 12)


class Ops(nn.Module):
    """conv -> `chain`, a function of the module and v -> GroupNorm."""

    def __init__(self, chain=lambda self, v: v, conv=None, norm=None, **parameters):
        super().__init__()
        self.conv = conv or nn.Conv2d(3, 8, 3)
        self.norm = norm or nn.GroupNorm(4, 8)
        self.chain = chain
        for name, shape in parameters.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))

    def forward(self, x):
        return self.norm(self.chain(self, self.conv(x)))


class Calls(nn.Module):
    """A module whose forward is the given function; its children are keyword arguments."""

    def __init__(self, function, **children):
        super().__init__()
        self.function = function
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, x):
        return self.function(self, x)


def chain_of(spec):
    steps = [one.op if one.parameter is None else (one.op, one.parameter) for one in spec.pointwise]
    return [*steps, (spec.norm.num_groups, spec.norm.eps)]


def only_block(module, x=X, **options):
    report = kgen.import_module(module, x, **options)
    assert report.unmatched == (), str(report)
    (block,) = report.blocks
    return block


def only_reason(module, x=X):
    report = kgen.import_module(module, x)
    assert report.blocks == (), str(report)
    (missed,) = report.unmatched
    assert "\n" not in missed.line()
    return missed.path, missed.reason


# ---- What is found ---------------------------------------------------------------------------


def test_a_block_of_every_kind_of_setting():
    conv = nn.Conv2d(3, 8, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2), bias=False)
    module = Ops(lambda m, v: torch.sigmoid((v + m.bias) * m.scale), conv,
                 nn.GroupNorm(2, 8, eps=1e-3), bias=(8, 1, 1), scale=(1, 8, 1, 1))  # fmt: skip
    block = only_block(module)
    problem = block.spec.problem
    assert (problem.batch, problem.in_channels, problem.out_channels) == (2, 3, 8)
    assert (problem.height, problem.width, problem.kernel_size) == (10, 12, (3, 2))
    assert (problem.stride, problem.padding, problem.dilation) == ((2, 1), (1, 0), (1, 2))
    assert problem.conv_bias is False
    assert chain_of(block.spec) == [("add", "bias"), ("mul", "scale"), "sigmoid", (2, 1e-3)]
    assert (block.path, block.scope, block.norm) == ("conv", "", "norm")
    assert block.parameters == {
        "conv.weight": "conv.weight", "bias": "bias", "scale": "scale",
        "group_norm.weight": "norm.weight", "group_norm.bias": "norm.bias",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("chain", "ops"),
    [
        (lambda m, v: torch.sigmoid(v), ["sigmoid"]),
        (lambda m, v: v.sigmoid(), ["sigmoid"]),
        (lambda m, v: F.sigmoid(v), ["sigmoid"]),
        (lambda m, v: torch.special.expit(v), ["sigmoid"]),
        (lambda m, v: F.relu(v), ["relu"]),
        (lambda m, v: F.relu(v, inplace=True), ["relu"]),
        (lambda m, v: torch.relu_(v), ["relu"]),
        (lambda m, v: v.relu_(), ["relu"]),
        (lambda m, v: v.tanh(), ["tanh"]),
        (lambda m, v: F.silu(v), ["silu"]),
        (lambda m, v: v * torch.sigmoid(v), ["silu"]),
        (lambda m, v: v.sigmoid() * v, ["silu"]),
        (lambda m, v: F.hardswish(v), ["hardswish"]),
        (lambda m, v: F.gelu(v), ["gelu"]),
        (lambda m, v: F.gelu(v, approximate="none").contiguous(), ["gelu"]),
        (lambda m, v: torch.add(m.p, v), [("add", "p")]),
        (lambda m, v: torch.add(v, m.p, alpha=1), [("add", "p")]),
        (lambda m, v: v.add_(m.p), [("add", "p")]),
        (lambda m, v: m.p * v, [("mul", "p")]),
        (lambda m, v: torch.mul(v, m.p), [("mul", "p")]),
        (lambda m, v: v.mul(m.p), [("mul", "p")]),
        (lambda m, v: v + m.flat.view(1, -1, 1, 1), [("add", "flat")]),
        (lambda m, v: v * m.flat[:, None, None], [("mul", "flat")]),
        (lambda m, v: (v + m.p) + m.p, [("add", "p"), ("add", "p_2")]),
    ],
)
def test_the_ops_of_a_chain(chain, ops):
    block = only_block(Ops(chain, p=(8, 1, 1), flat=(8,)))
    assert chain_of(block.spec)[:-1] == ops


def test_in_place_operators_are_ops():
    def chain(m, v):
        v += m.p
        v *= m.q
        return v

    block = only_block(Ops(chain, p=(8, 1, 1), q=(8, 1, 1)))
    assert chain_of(block.spec)[:-1] == [("add", "p"), ("mul", "q")]


@pytest.mark.parametrize(
    ("module", "op"),
    [(nn.ReLU(inplace=True), "relu"), (nn.SiLU(), "silu"), (nn.Tanh(), "tanh"),
     (nn.Sigmoid(), "sigmoid"), (nn.Hardswish(), "hardswish"), (nn.GELU(), "gelu")],
)  # fmt: skip
def test_modules_of_a_chain(module, op):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Identity(), module, nn.GroupNorm(4, 8))
    assert chain_of(only_block(model).spec) == [op, (4, 1e-5)]


def test_functions_in_the_place_of_modules():
    def forward(m, x):
        v = F.conv2d(x, m.conv.weight, m.conv.bias, padding=1)
        return F.group_norm(v, 4, m.norm.weight, m.norm.bias, eps=1e-4)

    model = Calls(forward, conv=nn.Conv2d(3, 8, 3), norm=nn.GroupNorm(4, 8))
    block = only_block(model)
    assert (block.path, block.norm) == ("conv", "group_norm")
    assert block.spec.problem.padding == (1, 1)
    assert chain_of(block.spec) == [(4, 1e-4)]


def test_same_and_valid_padding():
    same = only_block(Ops(conv=nn.Conv2d(3, 8, (3, 4), padding="same")))
    assert same.spec.problem.padding == "same"
    assert only_block(Ops(conv=nn.Conv2d(3, 8, 3, padding="valid"))).spec.problem.padding == (0, 0)


def test_a_subclass_of_conv2d_is_followed_into_its_forward():
    class Own(nn.Conv2d):
        def forward(self, x):
            return super().forward(x)

    block = only_block(Ops(conv=Own(3, 8, 3, padding=1)))
    assert block.path == "conv"
    assert block.spec.problem.padding == (1, 1)


def test_the_spec_means_what_the_module_computes():
    module = Ops(lambda m, v: F.silu((v + m.shift) * m.scale.view(1, -1, 1, 1)),
                 shift=(1, 8, 1, 1), scale=(8,))  # fmt: skip
    block = only_block(module)
    eager = EagerBlock(block.spec)
    named = module.state_dict()
    state = eager.state_dict()
    assert state.keys() == block.parameters.keys()
    eager.load_state_dict(
        {key: named[path].reshape(state[key].shape) for key, path in block.parameters.items()}
    )
    x = torch.randn(2, 3, 10, 12)
    torch.testing.assert_close(eager(x), module(x))


def test_blocks_of_equal_sizes_share_a_spec():
    def part():
        return nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU(), nn.GroupNorm(3, 3))

    report = kgen.import_module(nn.Sequential(part(), part()), X)
    assert [one.path for one in report.blocks] == ["0.0", "1.0"]
    assert len(report.specs) == 1
    assert report.specs[0].name == "sequential_b0_0"


def test_a_module_called_with_two_sizes_has_a_spec_for_each():
    head = Ops()
    model = Calls(lambda m, x: m.head(x).mean() + m.head(x[:, :, ::2]).mean(), head=head)
    report = kgen.import_module(model, X)
    assert report.unmatched == ()
    assert [one.spec.problem.height for one in report.blocks] == [10, 5]
    assert {one.path for one in report.blocks} == {"head.conv"}
    assert len({one.spec.name for one in report.blocks}) == 2


def test_options_of_the_specs():
    block = only_block(Ops(), name="My Net", dynamic_batch=True, targets=["sm_80", "sm_90a"])
    assert block.spec.name == "My_Net_conv"
    assert block.spec.problem.batch == "dynamic"
    assert block.spec.targets == ("sm_80", "sm_90a")
    assert only_block(Ops(), targets=["80", "9.0a"]).spec.targets == ("sm_80", "sm_90a")
    with pytest.raises(UsageError, match="unknown architecture 'sm_1'"):
        kgen.import_module(Ops(), X, targets=["sm_1"])
    with pytest.raises(UsageError, match=r"targets is 'sm_80', expected a list, for .*\['sm_80'\]"):
        kgen.import_module(Ops(), X, targets="sm_80")


def test_names_are_legal_and_unlike_each_other():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8)
            self.a = nn.ParameterList([nn.Parameter(torch.ones(8, 1, 1)) for _ in range(2)])
            self.sigmoid = nn.Parameter(torch.ones(8, 1, 1))
            self.gamma = nn.Parameter(torch.ones(8, 1, 1))
            self.inner = nn.Module()
            self.inner.gamma = nn.Parameter(torch.ones(8, 1, 1))
            self._odd__name_ = nn.Parameter(torch.ones(8, 1, 1))

        def forward(self, x):
            v = self.conv(x) + self.a[0] + self.a[1] + self.sigmoid + self.gamma
            return self.norm(v + self.inner.gamma + self._odd__name_)

    block = only_block(Model())
    assert block.parameters == {
        "conv.weight": "conv.weight", "conv.bias": "conv.bias",
        "a_0": "a.0", "a_1": "a.1", "sigmoid_param": "sigmoid", "gamma_param": "gamma",
        "gamma_param_2": "inner.gamma", "odd_name": "_odd__name_",
        "group_norm.weight": "norm.weight", "group_norm.bias": "norm.bias",
    }  # fmt: skip


def test_long_and_odd_names():
    taken = set()
    for path in ("a" * 90, "layer.0.conv", "int", ""):
        name = spec_name("M" * 80, path, taken)
        assert len(name) <= 64
        taken.add(name)
    assert len(taken) == 4
    assert spec_name("", "int", ()) == "int_block"
    assert parameter_name("x.7", {"x_7"}) == "x_7_2"


# ---- What is not, and why --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Ops(conv=nn.Conv2d(3, 9, 3, groups=3), norm=nn.GroupNorm(3, 9)),
         "it has groups=3; only 1 is supported"),
        (Ops(conv=nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect")),
         "it has padding_mode='reflect'; only 'zeros' is supported"),
        (Ops(norm=nn.GroupNorm(4, 8, affine=False)),
         "norm (GroupNorm) has no learned weight and bias (affine=False)"),
        (Ops(norm=nn.BatchNorm2d(8)),
         "norm (BatchNorm2d) follows; the norm of a block is nn.GroupNorm"),
        (Ops(norm=nn.InstanceNorm2d(8)),
         "norm (InstanceNorm2d) follows; the norm of a block is nn.GroupNorm"),
        (Ops(norm=nn.GELU(approximate="tanh")),
         "norm (GELU) has approximate='tanh'; the op gelu is the exact one"),
        (Ops(lambda m, v: F.gelu(v, approximate="tanh")),
         "gelu has approximate='tanh'; the op gelu is the exact one"),
        (Ops(lambda m, v: v * 2.0),
         "mul multiplies by the constant 2.0; mul takes a learned parameter"),
        (Ops(lambda m, v: 1 + v), "add adds the constant 1; add takes a learned parameter"),
        (Ops(lambda m, v: torch.add(v, m.p, alpha=2), p=(8, 1, 1)),
         "add has alpha=2; the op add adds its parameter as it is"),
        (Ops(lambda m, v: v - m.p, p=(8, 1, 1)),
         "sub follows before any GroupNorm, and it is no op of a chain"),
        (Ops(lambda m, v: v.clamp(0, 1)),
         ".clamp() follows before any GroupNorm, and it is no op of a chain"),
        (Ops(lambda m, v: v + m.p, p=(8, 8, 10)),
         "add takes p of shape (8, 8, 10); a chain's parameters hold one value a channel, "
         "shape (8, 1, 1)"),
        (Ops(lambda m, v: v + m.p, p=(1,)),
         "add takes p of shape (1,); a chain's parameters hold one value a channel, "
         "shape (8, 1, 1)"),
        (Ops(lambda m, v: v + m.p.exp(), p=(8, 1, 1)),
         "add takes the result of .exp(), not a learned parameter"),
        (Ops(lambda m, v: v + v), "add takes its result twice"),
        (Ops(lambda m, v: F.relu(v) + v),
         "its result is used by 2 ops, relu and add; a block's values must have one use"),
        (Ops(lambda m, v: torch.relu(v) * torch.tanh(v)),
         "its result is used by 2 ops, relu and tanh; a block's values must have one use"),
        (Ops(norm=nn.Conv2d(8, 8, 1)), None),
        (nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()),
         "its result leaves the forward before any GroupNorm"),
        (nn.Sequential(nn.Conv2d(3, 8, 3), nn.Dropout(), nn.GroupNorm(4, 8)),
         "1 (Dropout) follows before any GroupNorm, and it is no op of a chain"),
        (Calls(lambda m, x: (m.conv(x), x)[1], conv=nn.Conv2d(3, 8, 3)),
         "its result is not used"),
        (Calls(lambda m, x: m.norm(F.conv2d(x, m.conv.weight * 2)), conv=nn.Conv2d(3, 8, 3),
               norm=nn.GroupNorm(4, 8)),
         "its weight is computed in the forward, not a parameter"),
        (Calls(lambda m, x: F.group_norm(m.conv(x), 4), conv=nn.Conv2d(3, 8, 3)),
         "group_norm has no learned weight and bias"),
        (Ops(conv=nn.Conv2d(3, 8, 1, padding=1)),
         "problem.padding: padding 1 is not smaller than the filter's span 1: border outputs would "
         "see no input"),
    ],
)  # fmt: skip
def test_what_keeps_a_convolution_out(module, reason):
    if reason is None:
        report = kgen.import_module(module, X)
        assert [str(one.reason) for one in report.unmatched] == [
            "norm (Conv2d) follows before any GroupNorm",
            "its result leaves the forward before any GroupNorm",
        ]
        return
    assert only_reason(module)[1] == reason


def test_other_convolutions_are_named():
    model = nn.Sequential(nn.Conv3d(3, 8, 3), nn.GroupNorm(4, 8))
    x = torch.empty(1, 3, 8, 8, 8)
    reason = "it is a Conv3d; blocks begin with nn.Conv2d"
    assert only_reason(model, x) == ("0", reason)
    model = Calls(lambda m, x: F.conv1d(x, m.w.weight), w=nn.Conv1d(3, 8, 3))
    reason = "it is conv1d; blocks begin with conv2d"
    assert only_reason(model, torch.empty(1, 3, 9)) == ("w", reason)


def test_other_dtypes_are_named():
    reason = "conv.weight is torch.float64; only torch.float32 is supported"
    assert only_reason(Ops().double(), X.double())[1] == reason
    model = Ops(lambda m, v: v + m.p, p=(8, 1, 1))
    model.p = nn.Parameter(model.p.detach().half())
    assert only_reason(model)[1] == "p is torch.float16; only torch.float32 is supported"


def test_an_image_without_a_batch_is_refused():
    assert only_reason(Ops(), X[0])[1] == "x has shape (3, 10, 12); a block takes [N, C, H, W]"


def test_a_buffer_is_no_learned_parameter():
    model = Ops(lambda m, v: v * m.scale)
    model.register_buffer("scale", torch.ones(8, 1, 1))
    reason = "the operand of mul, scale, is a buffer; blocks take learned parameters"
    assert only_reason(model)[1] == reason


def test_a_computed_weight_is_refused():
    model = Ops(conv=torch.nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 8, 3)))
    assert "it is a ParametrizedConv2d" in only_reason(model)[1]
    model = Ops(norm=nn.GroupNorm(4, 8))
    model.p = nn.Parameter(torch.ones(8, 1, 1))
    nn.utils.parametrize.register_parametrization(model, "p", nn.Softplus())
    model.chain = lambda m, v: v * m.p
    assert kgen.import_module(model, X).blocks == ()


@pytest.mark.parametrize("where", ["conv", "act", "norm"])
def test_hooks_that_a_block_would_not_call(where):
    model = nn.Sequential()
    model.conv, model.act, model.norm = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.GroupNorm(4, 8)
    getattr(model, where).register_forward_hook(lambda *_: None)
    assert only_reason(model) == ("conv", f"{where} has hooks, which a block would not call")


def test_a_hook_between_the_module_and_its_block():
    model = Calls(lambda m, x: m.norm(m.part(x)), part=nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()),
                  norm=nn.GroupNorm(4, 8))  # fmt: skip
    assert only_block(copy.deepcopy(model)).scope == ""
    model.part.register_forward_pre_hook(lambda *_: None)
    assert only_reason(model) == ("part.0", "part has hooks, which a block would not call")


def test_a_replaced_forward_is_refused():
    model = Ops()
    model.norm.forward = lambda v: v
    assert only_reason(model)[1] == "norm has a forward that was replaced on the instance"
    model = Ops()
    model.forward = lambda x: x
    assert "its forward was replaced on the instance" in str(kgen.import_module(model, X))


# ---- Forwards that are no graph --------------------------------------------------------------


class Branch(nn.Module):
    """Control flow in the root, and a child that is a block."""

    def __init__(self):
        super().__init__()
        self.part = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8))
        self.last = nn.Conv2d(8, 8, 1)

    def forward(self, x):
        y = self.part(x)
        if y.shape[2] > 4:
            y = self.last(y)
        return y


def test_control_flow_hides_only_its_own_module():
    report = kgen.import_module(Branch(), X)
    assert [one.path for one in report.blocks] == ["part.0"]
    (missed,) = report.unmatched
    assert missed.path == "last"
    assert missed.reason.startswith("Branch cannot be traced: ")
    assert "control flow that depends on a tensor" in missed.reason
    assert "test_import.py:" in missed.reason


def test_a_child_with_control_flow_hides_nothing_around_it():
    class Gate(nn.Module):
        def forward(self, x):
            return x if x.shape[0] > 100 else x * 2

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.gate, self.norm = nn.Conv2d(3, 8, 3), Gate(), nn.GroupNorm(4, 8)

        def forward(self, x):
            return self.gate(self.norm(self.conv(self.gate(x))))

    assert only_block(Model()).path == "conv"


def test_gradients_switched_in_a_forward():
    def forward(m, x):
        with torch.no_grad():
            x = m.part(x)
        return m.norm(m.conv(x))

    part = nn.Sequential(nn.Conv2d(3, 3, 3), nn.GroupNorm(3, 3))
    model = Calls(forward, part=part, conv=nn.Conv2d(3, 8, 3), norm=nn.GroupNorm(4, 8))
    report = kgen.import_module(model, X)
    assert [one.path for one in report.blocks] == ["part.0"]
    assert "switches gradients or autocast" in report.unmatched[0].reason


def test_a_tensor_made_in_a_forward():
    model = Ops(lambda m, v: v + torch.randn(8, 1, 1))
    before = dict(vars(model))
    assert "makes a tensor without its inputs" in only_reason(model)[1]
    assert vars(model) == before


@pytest.mark.parametrize(
    "store",
    [lambda m, v: setattr(m, "seen", v), lambda m, v: m.log.append(v),
     lambda m, v: setattr(m, "count", m.count + 1)],
)  # fmt: skip
def test_a_forward_that_stores_something(store):
    def chain(m, v):
        store(m, v)
        return v

    model = Ops(chain)
    model.log, model.count = [], 3
    before = dict(vars(model))
    assert "Ops.forward stores to self." in only_reason(model)[1]
    assert vars(model) == before
    assert (model.log, model.count) == ([], 3)


def test_modules_that_are_not_called():
    class Model(Ops):
        def __init__(self):
            super().__init__()
            self.spare = Branch()

        def forward(self, x):
            return super().forward(x)

    report = kgen.import_module(Model(), X)
    assert [one.path for one in report.blocks] == ["conv"]
    reason = "it is not called for the example's inputs"
    assert [(one.path, one.reason) for one in report.unmatched] == [
        ("spare.part.0", reason), ("spare.last", reason),
    ]  # fmt: skip


def test_optional_arguments_are_taken_as_the_example_has_them():
    class Model(Ops):
        def forward(self, x, scale=None, *, tail=False):
            v = self.conv(x)
            if scale is not None:
                v = v * scale
            return self.norm(v) if not tail else v

    assert only_block(Model()).path == "conv"
    reason = only_reason(Model(), (X, torch.ones(8, 1, 1)))[1]
    assert reason == "mul takes the result of scale, not a learned parameter"

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = Model()

        def forward(self, x):
            return self.part(x) + self.part(x, x.mean())

    report = kgen.import_module(Twice(), X)
    assert report.blocks == ()
    assert "its argument scale is not the same kind" in report.unmatched[-1].reason


def test_models_that_do_not_run():
    with pytest.raises(UsageError, match="does not run on fake tensors") as caught:
        kgen.import_module(Ops(), torch.empty(2, 5, 10, 12))
    assert "\n" not in str(caught.value)
    by_value = Calls(lambda m, x: x if x.sum().item() > 0 else -x)
    with pytest.raises(UsageError, match=r"test_import.py:\d+: DataDependentOutputException"):
        kgen.import_module(by_value, X)
    with pytest.raises(UsageError, match="the example holds no tensor, it is a str"):
        kgen.import_module(Ops(), "x")


def test_a_model_without_convolutions():
    report = kgen.import_module(nn.Linear(3, 4), torch.empty(2, 3))
    assert str(report) == "Linear: holds no convolution"


def test_modules_that_are_no_python():
    part = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8))
    with pytest.raises(UsageError, match=r"OptimizedModule is compiled by torch\.compile; give"):
        kgen.import_module(torch.compile(part), X)
    with pytest.raises(UsageError, match=r"0 is compiled by torch\.jit; give the module"):
        kgen.import_module(nn.Sequential(torch.jit.trace(part, torch.rand(2, 3, 9, 9))), X)
    lazy = nn.Sequential(nn.LazyConv2d(8, 3), nn.GroupNorm(4, 8))
    with pytest.raises(UsageError, match="0 is lazy and has no sizes yet; run the model once"):
        kgen.import_module(lazy, X)


def test_a_model_that_is_one_convolution():
    assert only_reason(nn.Conv2d(3, 8, 3)) == (
        "Conv2d", "it is the whole model, without a GroupNorm",
    )  # fmt: skip


# ---- The module afterwards -------------------------------------------------------------------


def test_importing_changes_nothing_and_needs_no_memory():
    model = nn.Sequential(nn.Conv2d(8, 32, 3), nn.BatchNorm2d(32), nn.Conv2d(32, 32, 3),
                          nn.GroupNorm(8, 32), nn.Dropout(0.5))  # fmt: skip
    before = copy.deepcopy(model.state_dict())
    kept = [dict(vars(one)) for one in model.modules()]
    random = torch.get_rng_state()
    # 128 x 8 x 4096 x 4096 floats are 64 GiB: sizes alone are looked at.
    report = kgen.import_module(model, torch.empty(128, 8, 4096, 4096, device="meta"))
    assert [one.path for one in report.blocks] == ["2"]
    assert torch.equal(torch.get_rng_state(), random)
    assert [dict(vars(one)) for one in model.modules()] == kept
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key


def test_a_model_on_the_meta_device():
    with torch.device("meta"):
        model = Ops()
    assert only_block(model, torch.empty(2, 3, 10, 12)).spec == only_block(Ops()).spec


def test_the_report_as_json():
    report = kgen.import_module(nn.Sequential(Ops(), nn.Conv2d(8, 8, 1)), X)
    content = report.to_json()
    assert content["model"] == "Sequential"
    assert content["blocks"][0]["spec"] == report.blocks[0].spec.canonical()
    assert content["blocks"][0]["parameters"]["group_norm.bias"] == "0.norm.bias"
    assert content["unmatched"] == [
        {"path": "1", "reason": "its result leaves the forward before any GroupNorm"}
    ]


def test_without_torch_it_says_what_to_install():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import kgen\n"
        "for call in (kgen.import_module, kgen.optimize):\n"
        "    try: call(None, None)\n"
        "    except kgen.UsageError as error: print(error)"
    )
    done = python("-c", code)
    assert done.stdout.splitlines() == [
        "kgen.import_module needs torch (pip install 'kgen[torch]')",
        "kgen.optimize needs torch (pip install 'kgen[torch]')",
    ], done.stderr


@pytest.mark.parametrize("imported", ["kgen.importers", "kgen.importers.command"])
def test_importing_the_importers_imports_no_torch(imported):
    code = (
        f"import sys, {imported}; print([one for one in ('torch', 'cuda') if one in sys.modules])"
    )
    assert python("-c", code).stdout.strip() == "[]"


# ---- Forwards that are more than a graph -------------------------------------------------------


class Body(nn.Module):
    """A block with a gate; forwards below do something around it."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.GroupNorm(4, 8)
        self.gate = nn.Parameter(torch.rand(8, 1, 1))
        self.steps = torch.zeros(1)
        self.drop = nn.Dropout(0.5)
        self.weight = nn.Parameter(torch.rand(8, 3, 3, 5))
        self.flat = nn.Parameter(torch.rand(1, 8, 1, 1))

    def body(self, x):
        return self.norm(torch.relu(self.conv(x)))


def asks_for_a_tensor(self, x, mask=1.0):
    y = self.body(x)
    return y * mask if torch.is_tensor(mask) else y


def asks_for_a_number(self, x, n=2):
    y = self.body(x)
    return y * n if isinstance(n, int) else y


def changes_a_view(self, x):
    t = x.mT
    t += 1
    return self.body(x)


def changes_the_data(self, x):
    y = self.body(x)
    d = y.data
    d *= 2
    return y


def counts(self, x):
    self.steps.add_(1)
    return self.body(x)


def clamps_the_gate(self, x):
    y = self.conv(x)
    self.gate.data.clamp_(0, 0.1)
    return self.norm(y * self.gate)


def views_the_weight(self, x):
    return self.norm(torch.relu(nn.functional.conv2d(x, self.weight.view(8, 3, 5, 3))))


def reads_bits(self, x):
    return self.norm(self.conv(x) * self.gate.view(torch.int32))


def flattens_gamma(self, x):
    return nn.functional.group_norm(self.conv(x), 4, self.flat.view(-1), self.norm.bias)


def switches_off(self, x):
    with torch.no_grad():
        return self.body(x)


def switches_on(self, x):
    with torch.enable_grad():
        return self.body(x)


def without_autocast(self, x):
    with torch.autocast("cpu", enabled=False):
        return self.body(x)


@pytest.mark.parametrize(
    ("forward", "extra", "reason"),
    [
        (asks_for_a_tensor, (torch.rand(2, 1, 8, 8),), "something that a graph would lose"),
        (asks_for_a_number, (3,), "something that a graph would lose"),
        (changes_a_view, (), "something that a graph would lose"),
        (changes_the_data, (), "something that a graph would lose"),
        (counts, (), "stores to self.steps"),
        (clamps_the_gate, (), "the forward changes gate in place"),
        (views_the_weight, (), "its weight, weight, is taken as torch.float32 of shape"),
        (reads_bits, (), "gate as torch.int32"),
        (flattens_gamma, (), "its GroupNorm's weight, flat, is taken as torch.float32 of shape"),
        (switches_off, (), "switches gradients or autocast"),
        (switches_on, (), "switches gradients or autocast"),
        (without_autocast, (), "switches gradients or autocast"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
@pytest.mark.parametrize("grad", [True, False])
def test_a_forward_that_is_more_than_a_graph_is_refused(forward, extra, reason, grad):
    module = type("Model", (Body,), {"forward": forward})()
    x = torch.rand(2, 3, 8, 8)
    steps, state = module.steps.clone(), torch.get_rng_state()
    with torch.set_grad_enabled(grad):
        report = kgen.import_module(module, (x, *extra))
    assert report.blocks == ()
    assert any(reason in one.reason for one in report.unmatched), report.lines()
    assert torch.equal(module.steps, steps)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("kept", "store"),
    [
        (collections.deque([1, 2], maxlen=3), lambda kept, y: kept.append(y)),
        ({"features": [[], {}]}, lambda kept, y: kept["features"][1].update(y=y)),
        ({"features": []}, lambda kept, y: kept["features"].append(y)),
        ({1, 2}, lambda kept, y: kept.add(y)),
    ],
    ids=["deque", "deep", "dict of lists", "set"],
)
def test_what_a_forward_fills_is_emptied_again_and_refused(kept, store):
    def forward(self, x):
        y = self.body(x)
        store(self.kept, y)
        return y

    model = type("Model", (Body,), {"forward": forward})()
    model.kept, before = kept, copy.deepcopy(kept)
    report = kgen.import_module(model, torch.rand(2, 3, 8, 8))
    assert report.blocks == ()
    assert "stores to self.kept" in report.unmatched[0].reason
    assert model.kept is kept
    assert kept == before


def test_masks_may_be_changed_in_place():
    def forward(self, x, mask):
        mask |= x > 0
        return self.body(x * mask)

    model = type("Model", (Body,), {"forward": forward})()
    example = (torch.rand(2, 3, 8, 8), torch.zeros(2, 3, 8, 8, dtype=torch.bool))
    assert len(kgen.import_module(model, example).blocks) == 1


def plain(**changes):
    return type("Model", (Body,), {"forward": Body.body, **changes})()


def test_calls_that_are_more_than_a_forward_are_refused():
    x = torch.rand(2, 3, 8, 8)
    model = plain()
    model.conv._conv_forward = lambda *given: nn.Conv2d._conv_forward(model.conv, *given)
    (one,) = kgen.import_module(model, x).unmatched
    assert "a method, _conv_forward, that was replaced on the instance" in one.reason
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        (one,) = kgen.import_module(plain(), x).unmatched
    finally:
        hook.remove()
    assert "global hooks of torch.nn" in one.reason

    class Doubled(nn.Conv2d):
        def __call__(self, *given):
            return super().__call__(*given) * 2

    def forward(self, x):
        return self.body(x) + self.other(x).mean()

    model = plain(forward=forward)
    model.other = Doubled(3, 3, 1)
    assert kgen.import_module(model, x).blocks == ()
    model = plain()
    model.conv = Doubled(3, 8, 3, padding=1)
    assert kgen.import_module(model, x).blocks == ()


def test_a_bad_module_leaves_the_good_ones():
    class Dense(Body):
        def forward(self, x):
            return self.body(torch.cat([x] if isinstance(x, torch.Tensor) else x, 1))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.good, self.bad = plain(), Dense()

        def forward(self, x):
            return self.good(x).mean() + self.bad(x)

    report = kgen.import_module(Net(), torch.rand(2, 3, 8, 8))
    assert [one.path for one in report.blocks] == ["good.conv"]
    assert [one.path for one in report.unmatched] == ["bad.conv"]
