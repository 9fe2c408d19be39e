"""Models whose blocks are replaced: the same values, gradients and state_dict, and back again."""

import copy
import io
import logging
import traceback
import warnings

import pytest

torch = pytest.importorskip("torch")
from torch import nn
from torch.nn import functional as F  # noqa: N812

import kgen
from kgen.errors import CheckError, UsageError
from kgen.importers import undo
from kgen.importers.optimize import Optimized


class Residual(nn.Module):
    """A block on the main path, a convolution on the other, dropout by the training flag."""

    def __init__(self, C_in, C_out, stride):
        super().__init__()
        self.conv = nn.Conv2d(C_in, C_out, 3, stride=stride, padding=1, bias=False)
        self.scale = nn.Parameter(torch.randn(1, C_out, 1, 1))
        self.norm = nn.GroupNorm(4, C_out)
        self.short = nn.Conv2d(C_in, C_out, 1, stride=stride)

    def forward(self, x):
        v = self.norm(F.relu(self.conv(x) * self.scale))
        v = F.dropout(v, 0.5, self.training)
        return F.relu(v + self.short(x), inplace=True)


class ResNet(nn.Module):
    """Three blocks of different sizes, a BatchNorm, and Python that torch.fx cannot follow."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.SiLU(), nn.GroupNorm(2, 8))
        self.first = Residual(8, 16, 1)
        self.second = Residual(16, 32, 2)
        self.tail = nn.BatchNorm2d(32)
        self.classify = nn.Linear(32, 5)
        self.seen = 0

    def forward(self, x):
        self.seen += 1
        x = self.second(self.first(self.stem(x)))
        if x.shape[0] > 1:
            x = self.tail(x)
        return self.classify(x.mean((2, 3)))


@pytest.fixture
def resnet():
    torch.manual_seed(5)
    model = ResNet()
    with torch.no_grad():  # no parameter at a default value
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
    return model


X = torch.rand(2, 3, 14, 15)


def kernels_of(call):
    """The names of kgen's torch ops that `call` ran."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Names(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "kgen":
                self.names.append(func.name().split("::")[1].rsplit("_", 1)[0])
            return func(*args, **(kwargs or {}))

    with Names() as mode:
        call()
    return mode.names


def outputs(model, x=X, seed=3):
    torch.manual_seed(seed)
    return model(x)


def gradients(model, x=X):
    model.zero_grad()
    x = x.clone().requires_grad_()
    outputs(model, x).square().sum().backward()
    return [x.grad, *(one.grad for one in model.parameters())]


def test_a_resnet_gives_the_same_values_and_gradients(resnet):
    eager = copy.deepcopy(resnet)
    parameters = dict(resnet.named_parameters())
    handle = kgen.optimize(resnet, X)
    assert isinstance(handle, Optimized)
    assert [one.path for one in handle.blocks] == ["stem.0", "first.conv", "second.conv"]
    assert [one.path for one in handle.unmatched] == ["first.short", "second.short"]
    assert len({one.spec.problem for one in handle.blocks}) == 3
    assert str(handle).count("\n") == 4
    assert kernels_of(lambda: outputs(resnet)) == [
        "res_net_stem_0", "res_net_first_conv", "res_net_second_conv",
    ]  # fmt: skip
    outputs(eager)  # for the statistics of the BatchNorm
    eager.seen = resnet.seen = 0
    for mode in (True, False):
        resnet.train(mode)
        eager.train(mode)
        torch.testing.assert_close(outputs(resnet), outputs(eager))
        for ours, theirs in zip(gradients(resnet), gradients(eager), strict=True):
            torch.testing.assert_close(ours, theirs)
    assert resnet.seen == eager.seen == 4
    assert all(one is parameters[name] for name, one in resnet.named_parameters())
    assert list(resnet.state_dict()) == list(eager.state_dict())
    for key, value in resnet.state_dict().items():
        torch.testing.assert_close(value, eager.state_dict()[key])


def test_training_and_loading_reach_the_blocks(resnet):
    eager = copy.deepcopy(resnet)
    kgen.optimize(resnet, X)
    for model in (resnet, eager):
        step = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(3):
            gradients(model)
            step.step()
    torch.testing.assert_close(outputs(resnet), outputs(eager))
    other = ResNet()
    resnet.load_state_dict(other.state_dict())
    torch.testing.assert_close(outputs(resnet.eval()), outputs(other.eval()))


def test_undo_and_undo_again(resnet):
    before = [dict(vars(one)) for one in resnet.modules()]
    handle = kgen.optimize(resnet, X)
    assert [dict(vars(one)) for one in resnet.modules()] != before
    handle.undo()
    assert [dict(vars(one)) for one in resnet.modules()] == before
    assert kernels_of(lambda: outputs(resnet)) == []
    handle.undo()
    with kgen.optimize(resnet, X):
        assert len(kernels_of(lambda: outputs(resnet))) == 3
    assert kernels_of(lambda: outputs(resnet)) == []


def test_a_with_block_undoes_after_an_exception(resnet):
    with pytest.raises(KeyError, match="mine"), kgen.optimize(resnet, X):
        raise KeyError("mine")
    assert not any("forward" in vars(one) for one in resnet.modules())


def test_a_deep_copy_is_optimized_by_itself(resnet):
    handle = kgen.optimize(resnet, X)
    twin = copy.deepcopy(resnet)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(0.1)
    assert len(kernels_of(lambda: outputs(twin))) == 3
    own = copy.deepcopy(twin)
    assert undo(own) == 3
    assert kernels_of(lambda: outputs(own)) == []
    torch.testing.assert_close(outputs(twin), outputs(own))
    handle.undo()
    assert len(kernels_of(lambda: outputs(twin))) == 3
    with pytest.raises(UsageError, match="is optimized already"):
        kgen.optimize(twin, X)
    assert undo(twin) == 3


def test_a_pickled_model_has_its_own_forward(resnet):
    kgen.optimize(resnet, X)
    file = io.BytesIO()
    torch.save(resnet, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert kernels_of(lambda: outputs(loaded)) == []
    torch.testing.assert_close(outputs(loaded), outputs(resnet))


def test_hooks_and_keywords_of_the_changed_module_still_work():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8)

        def forward(self, image, mask=None, *, double=False):
            v = self.norm(self.conv(image))
            if mask is not None:
                v = v * mask
            return v * 2 if double else v

    model, x = Model(), torch.rand(2, 3, 9, 9)
    wanted = model(image=x)
    seen = []
    model.register_forward_hook(lambda *_: seen.append(1))
    kgen.optimize(model, x)
    torch.testing.assert_close(model(image=x), wanted)
    torch.testing.assert_close(model(x, mask=None, double=False), wanted)
    assert len(seen) == 2
    with pytest.raises(AssertionError, match="mask has been specialized to have value None"):
        model(x, torch.ones(1))


class Plain(nn.Module):
    def __init__(self, conv=None):
        super().__init__()
        self.conv, self.norm = conv or nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8)

    def forward(self, x):
        return self.norm(torch.tanh(self.conv(x)))


def test_another_size_is_an_error_by_default():
    model = Plain()
    kgen.optimize(model, torch.rand(2, 3, 9, 10))
    with pytest.raises(ValueError, match=r"conv: x has shape \(3, 3, 9, 10\)") as caught:
        model(torch.rand(3, 3, 9, 10))
    assert "optimized for (2, 3, 9, 10)" in str(caught.value)
    assert 'on_mismatch="regenerate" or "eager"' in str(caught.value)
    with pytest.raises(ValueError, match=r"x has shape \(2, 4, 9, 10\)"):
        model(torch.rand(2, 4, 9, 10))
    with pytest.raises(TypeError, match=r"x is torch.float64, built for torch.float32"):
        model(torch.rand(2, 3, 9, 10).double())
    assert model(torch.rand(0, 3, 9, 10)).shape == (0, 8, 7, 8)


def test_a_dynamic_batch_takes_any():
    model = Plain()
    eager = copy.deepcopy(model)
    kgen.optimize(model, torch.rand(2, 3, 9, 10), dynamic_batch=True)
    for N in (0, 1, 5):
        x = torch.rand(N, 3, 9, 10)
        torch.testing.assert_close(model(x), eager(x))
    with pytest.raises(ValueError, match=r"optimized for \(N, 3, 9, 10\)"):
        model(torch.rand(2, 3, 10, 9))


def test_regenerating_says_so(caplog):
    model = Plain()
    eager = copy.deepcopy(model)
    kgen.optimize(model, torch.rand(2, 3, 9, 10), on_mismatch="regenerate")
    x = torch.rand(3, 3, 12, 8)
    with caplog.at_level(logging.WARNING, "kgen"):
        for _ in range(2):
            torch.testing.assert_close(model(x), eager(x))
    assert [one.getMessage() for one in caplog.records] == [
        "conv: regenerating for x [3, 3, 12, 8]"
    ]
    assert kernels_of(lambda: model(x)) == ["plain_conv"]
    with pytest.raises(ValueError, match="x has shape"):
        model(torch.rand(2, 4, 9, 10))


def test_eager_says_so(caplog):
    model = Plain()
    eager = copy.deepcopy(model)
    kgen.optimize(model, torch.rand(2, 3, 9, 10), on_mismatch="eager")
    x = torch.rand(3, 3, 12, 8)
    with caplog.at_level(logging.WARNING, "kgen"):
        for _ in range(2):
            torch.testing.assert_close(model(x), eager(x))
        assert kernels_of(lambda: model(x)) == []
        double = x.double()
        torch.testing.assert_close(model.double()(double), eager.double()(double))
    assert [one.getMessage() for one in caplog.records] == [
        "conv: x [3, 3, 12, 8] torch.float32 is computed with PyTorch's ops",
        "conv: x [3, 3, 12, 8] torch.float64 is computed with PyTorch's ops",
    ]


def test_a_module_called_with_two_sizes_runs_both():
    class Pyramid(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = Plain()

        def forward(self, x):
            return self.head(x), self.head(x[:, :, ::2])

    model, x = Pyramid(), torch.rand(2, 3, 12, 9)
    eager = copy.deepcopy(model)
    handle = kgen.optimize(model, x)
    assert len(handle.blocks) == 2
    for ours, theirs in zip(model(x), eager(x), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert kernels_of(lambda: model(x)) == ["pyramid_head_conv", "pyramid_head_conv_2"]


def test_blocks_that_follow_each_other_in_one_forward():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(2))
            self.two.weight = self.one.weight
            self.norm = nn.GroupNorm(3, 3)

        def forward(self, x):
            for conv in (self.one, self.two, self.one):
                x = self.norm(torch.relu(conv(x)))
            return x

    model, x = Model(), torch.rand(2, 3, 9, 8)
    eager = copy.deepcopy(model)
    handle = kgen.optimize(model, x)
    assert [one.path for one in handle.blocks] == ["one", "two"]
    assert kernels_of(lambda: model(x)) == ["model_one"] * 3
    for ours, theirs in zip(gradients(model, x), gradients(eager, x), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_parameters_in_other_shapes_and_twice():
    class Model(Plain):
        def __init__(self):
            super().__init__()
            self.flat = nn.Parameter(torch.randn(8))
            self.wide = nn.Parameter(torch.randn(1, 8, 1, 1))

        def forward(self, x):
            v = self.conv(x) * self.flat[:, None, None] + self.wide
            v += self.flat.view(-1, 1, 1)
            return self.norm(v) + self.flat.sum()

    model, x = Model(), torch.rand(2, 3, 9, 9)
    eager = copy.deepcopy(model)
    (block,) = kgen.optimize(model, x).blocks
    assert [path for path in block.parameters.values() if path == "flat"] == ["flat", "flat"]
    for ours, theirs in zip(gradients(model, x), gradients(eager, x), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_an_input_that_is_changed_after_the_convolution():
    """The block reads x where the convolution did, not where the norm is."""

    class Model(Plain):
        def forward(self, x):
            x = x * 1
            v = self.conv(x)
            x += 1
            return self.norm(v).mean() + x.mean()

    model, x = Model(), torch.rand(2, 3, 9, 9)
    eager = copy.deepcopy(model)
    kgen.optimize(model, x)
    with torch.no_grad():
        torch.testing.assert_close(model(x), eager(x))


def test_two_names_of_one_tensor_stay_one_tensor():
    """`y += 1` changes x too, in the graph as in the forward."""

    class Model(Plain):
        def forward(self, x):
            x = self.norm(self.conv(x))
            y = x
            y += 1
            y **= 2
            n = y.shape[2]
            m = n
            m += 1
            return x * n + m

    model, x = Model(), torch.rand(2, 3, 9, 9)
    wanted = model(x)
    kgen.optimize(model, x)
    assert kernels_of(lambda: model(x)) == ["model_conv"]
    torch.testing.assert_close(model(x), wanted)


def test_a_forward_that_depends_on_the_training_flag():
    class Model(Plain):
        def forward(self, x):
            v = super().forward(x)
            return (v * 2, v) if self.training else v

    model, x = Model(), torch.rand(2, 3, 9, 9)
    eager = copy.deepcopy(model)
    kgen.optimize(model.eval(), x)
    assert model.training is False
    torch.testing.assert_close(model(x), eager.eval()(x))
    for ours, theirs in zip(model.train()(x), eager.train()(x), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_flag_of_a_module_inside_is_not_guessed():
    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3)

        def forward(self, x):
            return self.conv(F.dropout(x, 0.5, self.training))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.part, self.norm = Part(), nn.GroupNorm(4, 8)

        def forward(self, x):
            return self.norm(self.part(x))

    with pytest.raises(CheckError, match="depends on the training flag"):
        kgen.optimize(Model(), torch.rand(2, 3, 9, 9))


def test_nothing_to_optimize_is_an_error_with_the_reasons():
    model = Plain(nn.Conv2d(3, 8, 3, padding=1, padding_mode="circular"))
    with pytest.raises(CheckError) as caught:
        kgen.optimize(model, torch.rand(2, 3, 9, 9))
    assert str(caught.value) == (
        "nothing to optimize\n"
        "conv: not matched: it has padding_mode='circular'; only 'zeros' is supported"
    )
    assert not any("forward" in vars(one) for one in model.modules())


def test_a_failure_leaves_the_model_alone(resnet, monkeypatch):
    from kgen.importers import optimize

    real, made = optimize.package_of, []

    def fail_at_the_third(spec):
        if len(made) == 2:
            raise UsageError("no room")
        made.append(spec)
        return real(spec)

    monkeypatch.setattr(optimize, "package_of", fail_at_the_third)
    with pytest.raises(UsageError, match="no room"):
        kgen.optimize(resnet, X)
    assert not any("forward" in vars(one) for one in resnet.modules())


def test_wrong_options_and_a_second_time():
    model = Plain()
    with pytest.raises(UsageError, match="on_mismatch is 'quietly'; legal are 'error', 'regen"):
        kgen.optimize(model, torch.rand(2, 3, 9, 9), on_mismatch="quietly")
    kgen.optimize(model, torch.rand(2, 3, 9, 9))
    with pytest.raises(UsageError, match=r"Plain is optimized already; undo\(\) it first"):
        kgen.optimize(model, torch.rand(2, 3, 9, 9))


def test_specs_of_the_users(tmp_path, caplog):
    model, x = Plain(), torch.rand(2, 3, 9, 9)
    (found,) = kgen.import_module(model, x).specs
    tuned = found.with_strategy("hybrid").model_copy(update={"name": "tuned"})
    other = tuned.model_copy(
        update={"name": "other", "problem": found.problem.model_copy(update={"height": 12})}
    )
    with caplog.at_level(logging.WARNING, "kgen"):
        handle = kgen.optimize(model, x, specs=[tuned, other])
    assert [one.spec for one in handle.blocks] == [tuned]
    assert kernels_of(lambda: model(x)) == ["tuned"]
    assert [one.getMessage() for one in caplog.records] == ["spec other computes no block of Plain"]


def test_tracebacks_show_the_lines_that_ran(resnet):
    kgen.optimize(resnet, X)
    try:
        resnet(torch.rand(3, 3, 14, 15))
    except ValueError:
        shown = traceback.format_exc()
    assert "<kgen: stem.forward" in shown
    assert "res_net_stem_0(" in shown


def test_torch_compile_takes_an_optimized_model():
    model, x = Plain(), torch.rand(2, 3, 9, 9)
    wanted = model(x)
    kgen.optimize(model, x)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), wanted)


@pytest.mark.gpu
def test_an_optimized_model_on_a_gpu(resnet):
    resnet, x = resnet.cuda().eval(), X.cuda()
    eager = copy.deepcopy(resnet)
    kgen.optimize(resnet, x)
    with torch.backends.cudnn.flags(allow_tf32=False):
        torch.testing.assert_close(resnet(x), eager(x), rtol=1e-4, atol=1e-4)
        ours, theirs = gradients(resnet, x), gradients(eager, x)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_a_flag_of_a_module_below_counts_with_the_models():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.drop = (
                nn.Conv2d(3, 8, 3),
                nn.GroupNorm(4, 8),
                nn.Dropout(0.5),
            )

        def forward(self, x):
            y = self.norm(torch.relu(self.conv(x)))
            return y * 2 if self.drop.training else y

    model, x = Model(), torch.rand(2, 3, 9, 9)
    wanted = {flag: model.train(flag)(x).detach() for flag in (True, False)}
    kgen.optimize(model.train(), x)
    for flag in (False, True, False):
        torch.testing.assert_close(model.train(flag)(x), wanted[flag])


def test_an_unpickled_model_is_as_it_was_before(resnet):
    import pickle

    model, x = resnet.eval(), X
    kgen.optimize(model, x)
    copied = pickle.loads(pickle.dumps(model))
    handle = kgen.optimize(copied, x)  # its blocks are found again
    torch.testing.assert_close(copied(x), model(x))
    handle.undo()
    torch.testing.assert_close(copied(x), model(x), atol=1e-4, rtol=1e-4)


def test_torch_jit_trace_takes_an_optimized_model(resnet):
    model, x = resnet.eval(), X
    wanted = model(x).detach()
    kgen.optimize(model, x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(model, x, check_trace=False)
    torch.testing.assert_close(traced(x), wanted, atol=1e-4, rtol=1e-4)
