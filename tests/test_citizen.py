"""The module and its op behave in PyTorch as a native layer does, on the CPU."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from helpers import TEXT, python, spec_of

torch = pytest.importorskip("torch")

import kgen
from kgen._calls import UsualCalls, wants_op
from kgen.emit import emit
from kgen.package import import_package, package_of
from kgen.reference import EagerBlock

ROOT = Path(__file__).parent.parent


@pytest.fixture
def package(tmp_path):
    return import_package(emit(spec_of(), tmp_path))


def random_block(package, seed=7):
    torch.manual_seed(seed)
    block = package.FusedBlock()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return block


def eager_of(block, spec):
    eager = EagerBlock(spec)
    eager.load_state_dict(block.state_dict())
    return eager


def x_of(batch=2, seed=3):
    return torch.rand((batch, 3, 19, 24), generator=torch.Generator().manual_seed(seed))


# ---- Compilers ---------------------------------------------------------------------------------


class CountingBackend:
    """Runs what it is given as it is, and keeps the graphs."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, example_inputs):
        self.graphs.append(graph)
        return graph.forward


def nodes(graph):
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


def test_a_changing_batch_is_compiled_as_often_as_the_eager_block(tmp_path):
    spec = spec_of(batch="dynamic")
    block = random_block(package_of(spec))
    counts = []
    for one in (block, eager_of(block, spec)):
        torch._dynamo.reset()
        backend = CountingBackend()
        compiled = torch.compile(one, fullgraph=True, backend=backend)
        with torch.no_grad():
            for batch in (2, 5, 3, 7):
                x = x_of(batch)
                torch.testing.assert_close(compiled(x), block(x))
        counts.append(len(backend.graphs))
    assert counts[0] == counts[1] == 2  # one for the first batch, one for any
    torch._dynamo.reset()


def test_the_block_is_one_node_of_a_compiled_graph(package):
    torch._dynamo.reset()
    backend = CountingBackend()
    block = random_block(package)
    torch.compile(block, fullgraph=True, backend=backend)(x_of())
    (graph,) = backend.graphs
    assert len(nodes(graph)) == 1
    assert nodes(graph)[0].startswith("kgen.demo_")
    torch._dynamo.reset()


def test_compiled_training_gives_the_same_gradients(package):
    torch._dynamo.reset()
    block = random_block(package)
    other = copy.deepcopy(block)
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    x, x_compiled = (x_of().requires_grad_() for _ in range(2))
    block(x).square().sum().backward()
    compiled(x_compiled).square().sum().backward()
    torch.testing.assert_close(x_compiled.grad, x.grad)
    for one, wanted in zip(other.parameters(), block.parameters(), strict=True):
        torch.testing.assert_close(one.grad, wanted.grad)
    torch._dynamo.reset()


@pytest.mark.parametrize("strict", [True, False])
def test_export_keeps_the_op_and_its_dynamic_batch(strict, tmp_path):
    block = random_block(package_of(spec_of(batch="dynamic")))
    batch = torch.export.Dim("batch", min=1)
    exported = torch.export.export(block, (x_of(2),), dynamic_shapes=({0: batch},), strict=strict)
    targets = nodes(exported.graph_module)
    assert [one for one in targets if "kgen" in one] == targets
    for size in (1, 4):
        torch.testing.assert_close(exported.module()(x_of(size)), block(x_of(size)))


# ---- Gradients ---------------------------------------------------------------------------------


@pytest.mark.parametrize("pointwise", [[{"add": "bias"}, {"mul": "scale"}, "sigmoid"], ["tanh"]])
def test_the_differentiated_function_passes_gradcheck_in_fp64(pointwise):
    chain = [*pointwise, {"group_norm": {"num_groups": 2}}]
    spec = spec_of(chain=chain, in_channels=2, out_channels=4, height=4, width=5, kernel_size=3)
    package = package_of(spec)
    block = random_block(package)
    named = dict(block.named_parameters())
    x = torch.rand(2, 2, 4, 5, dtype=torch.float64)
    tensors = [x, *(named[key].detach().double() for key in package.PARAMETERS)]
    for one in tensors:
        one.requires_grad_()
    assert torch.autograd.gradcheck(package.eager, tensors)
    assert torch.autograd.gradgradcheck(package.eager, tensors)


def penalty(block, x):
    """A loss that has the gradient's norm in it, as gradient penalties do."""
    y = block(x)
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return y.mean() + grad.square().mean()


def test_gradients_of_gradients_equal_the_eager_block_s(package):
    block = random_block(package)
    eager = eager_of(block, spec_of())
    x, x_eager = (x_of().requires_grad_() for _ in range(2))
    penalty(block, x).backward()
    penalty(eager, x_eager).backward()
    torch.testing.assert_close(x.grad, x_eager.grad)
    for (key, one), other in zip(block.named_parameters(), eager.parameters(), strict=True):
        assert other.grad.abs().max() > 0
        torch.testing.assert_close(one.grad, other.grad, msg=key)


def test_function_transforms_see_the_gradient(package):
    block = random_block(package)
    eager = eager_of(block, spec_of())

    def loss(model):
        state = {key: one.detach() for key, one in model.named_parameters()}

        def of(values, x):
            return torch.func.functional_call(model, values, (x,)).square().sum()

        return torch.func.grad(of)(state, x_of())

    for key, grad in loss(eager).items():
        torch.testing.assert_close(loss(block)[key], grad)


@pytest.mark.parametrize("frozen", [True, False])
def test_forward_mode_sees_the_tangent(frozen, package):
    from torch.autograd import forward_ad

    block = random_block(package).requires_grad_(not frozen)
    eager = eager_of(block, spec_of())
    x, tangent = x_of(), x_of(seed=4)
    block(x)  # a call of this kind is known then
    with forward_ad.dual_level():
        assert wants_op((x,))
        dual = forward_ad.make_dual(x, tangent)
        found, wanted = (forward_ad.unpack_dual(one(dual)).tangent for one in (block, eager))
    assert wanted.abs().max() > 0
    torch.testing.assert_close(found, wanted)


def test_samples_gradients_by_vmap(package):
    block = random_block(package)
    eager = eager_of(block, spec_of())

    def of(model):
        state = {key: one.detach() for key, one in model.named_parameters()}

        def loss(values, x):
            return torch.func.functional_call(model, values, (x[None].expand(2, -1, -1, -1),)).sum()

        return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(state, x_of(4))

    found, wanted = of(block), of(eager)
    for key, grads in wanted.items():
        assert grads.shape[0] == 4
        torch.testing.assert_close(found[key], grads, atol=1e-3, rtol=1e-3)


def test_without_gradients_nothing_is_kept(package):
    block = random_block(package)
    with torch.no_grad():
        assert block(x_of()).grad_fn is None
    with torch.inference_mode():
        y = block(x_of())
        assert y.is_inference()
    torch.testing.assert_close(y.clone(), block(x_of()).detach())


@pytest.mark.parametrize("samples", [1, 2, 5, 8])
@pytest.mark.parametrize("frozen", [(), ("x",), ("conv.weight", "scale")])
def test_gradients_in_pieces_equal_those_of_the_whole(samples, frozen, monkeypatch):
    """Five samples, in pieces of a few: the last piece may be shorter."""
    package = package_of(spec_of(name="pieces", batch="dynamic"))  # its op is registered here alone
    block = random_block(package)
    for key, parameter in block.named_parameters():
        parameter.requires_grad_(key not in frozen)
    x = x_of(5).requires_grad_("x" not in frozen)
    weight = torch.randn(block(x).shape)
    wanted = [one for one in (x, *block.parameters()) if one.requires_grad]
    whole = torch.autograd.grad((block(x) * weight).sum(), wanted)
    seen = []
    monkeypatch.setattr(package._op, "_PIECE_BYTES", samples * weight[0].nbytes)
    gradients = package._op._gradients
    monkeypatch.setattr(
        package._op, "_gradients", lambda *given: seen.append(len(given[1][0])) or gradients(*given)
    )
    pieces = torch.autograd.grad((block(x) * weight).sum(), wanted)
    assert seen == [min(samples, 5 - start) for start in range(0, 5, samples)]
    for found, one in zip(pieces, whole, strict=True):
        assert one.norm() > 0
        assert found.shape == one.shape
        assert (found - one).norm() < 1e-5 * one.norm()  # sums in another order


def test_a_gradient_that_is_traced_is_not_cut(package, monkeypatch):
    """A compiled backward pass serves other batches too."""
    monkeypatch.setattr(package._op, "_PIECE_BYTES", 1)
    grad = torch.rand(3, 2)
    assert package._op._samples_at_once(grad) == 1
    with torch._subclasses.FakeTensorMode() as mode:
        assert package._op._samples_at_once(mode.from_tensor(grad)) == 3
    assert package._op._samples_at_once(grad[:0]) == 0


def test_a_checkpointed_block_gives_the_same_gradients(package):
    from torch.utils.checkpoint import checkpoint

    block = random_block(package)
    x, again = (x_of().requires_grad_() for _ in range(2))
    block(x).square().sum().backward()
    checkpoint(block, again, use_reentrant=False).square().sum().backward()
    torch.testing.assert_close(again.grad, x.grad)


# ---- Which calls leave torch's dispatcher out --------------------------------------------------


CPU_ACTIVITY = torch.profiler.ProfilerActivity.CPU


class Mode(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class FunctionMode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def test_a_call_that_nothing_watches_needs_no_op():
    x, weight = torch.rand(2), torch.nn.Parameter(torch.rand(2))
    assert wants_op((x, weight))
    assert not wants_op((x, weight.detach()))
    for ungraded in (torch.no_grad, torch.inference_mode):
        with ungraded():
            assert not wants_op((x, weight))


@pytest.mark.parametrize(
    "context",
    [Mode, FunctionMode, lambda: torch.profiler.profile(activities=[CPU_ACTIVITY])],
)
def test_whoever_watches_sees_the_op(context):
    with torch.no_grad(), context():
        assert wants_op((torch.rand(2),))


def test_function_transforms_and_tracers_see_the_op():
    seen = []

    def function(x):
        seen.append(wants_op((x,)))
        return x.sum()

    with torch.no_grad():
        torch.func.grad(function)(torch.rand(3))
        torch.func.vmap(function)(torch.rand(3, 2))
        torch.fx.experimental.proxy_tensor.make_fx(function)(torch.rand(3))
    assert seen == [True] * 3


class Odd(torch.Tensor):
    pass


def usual(dynamic=False):
    """A kind of call, and tensors of that kind."""
    tensors = (torch.rand(2, 3), torch.nn.Parameter(torch.rand(4)))
    calls = UsualCalls(dynamic)
    with torch.no_grad():
        calls.add(tensors)
        assert calls.has(tensors)
        assert calls.has((torch.rand(2, 3), torch.nn.Parameter(torch.rand(4))))
    return calls, tensors


@pytest.mark.parametrize(
    "other",
    [
        None, torch.rand(2, 4), torch.rand(5, 3), torch.rand(3, 2).t(), torch.rand(2, 3).double(),
        torch.rand(2, 3).as_subclass(Odd), torch.complex(*torch.rand(2, 2, 3)).conj().imag,
        torch.rand(2, 3).to_sparse(), torch.rand(2, 3, device="meta"), torch.rand(2, 3, 1),
        torch.rand(2, 3, requires_grad=True), torch.rand(4, 3)[::2], "x",
    ],
)  # fmt: skip
def test_another_tensor_is_another_kind_of_call(other):
    calls, (x, weight) = usual()
    with torch.no_grad():
        assert calls.has((x, weight))
        assert not calls.has((other, weight))


def test_a_parameter_that_changed_is_another_kind_of_call():
    calls, (x, weight) = usual()
    with torch.no_grad():
        weight.data = torch.rand(4)
        assert calls.has((x, weight))
        weight.data = torch.rand(4).half()
        assert not calls.has((x, weight))


def test_any_batch_is_one_kind_where_the_batch_is_dynamic():
    calls, (_, weight) = usual(dynamic=True)
    with torch.no_grad():
        assert calls.has((torch.rand(7, 3), weight))
        assert not calls.has((torch.rand(2, 4), weight))


def test_gradients_and_watchers_are_no_usual_calls():
    calls, tensors = usual()
    assert not calls.has(tensors)
    with torch.no_grad():
        for context in (
            Mode(), FunctionMode(), torch.autocast("cpu", torch.bfloat16), torch.inference_mode(),
            torch.profiler.profile(activities=[CPU_ACTIVITY]),
        ):  # fmt: skip
            with context:
                assert not calls.has(tensors), context
        seen = []
        torch.func.vmap(lambda x: seen.append(calls.has((x, tensors[1]))) or x)(torch.rand(4, 2, 3))
        assert seen == [False]
        assert calls.has(tensors)


def test_a_few_kinds_are_remembered():
    calls = UsualCalls(dynamic=False)
    kinds = [(torch.rand(2, size),) for size in range(1, 8)]
    for one in kinds:
        calls.add(one)
    assert [calls.has(one) for one in kinds] == [False] * 3 + [True] * 4


# ---- Copies ------------------------------------------------------------------------------------


def through_pickle(block):
    return pickle.loads(pickle.dumps(block))


def through_torch_save(block):
    file = io.BytesIO()
    torch.save(block, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("on_mismatch", ["error", "regenerate"])
@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, through_pickle, through_torch_save])
def test_a_copy_computes_the_same_with_parameters_of_its_own(copied, on_mismatch, package):
    block = kgen.load(package, on_mismatch=on_mismatch)
    other = copied(block)
    assert type(other).__name__ == type(block).__name__
    torch.testing.assert_close(other(x_of()), block(x_of()), rtol=0, atol=0)
    before = block(x_of())
    with torch.no_grad():
        other.conv.weight.add_(1.0)
    same = torch.equal(block(x_of()), before)
    assert same == (copied is not copy.copy)  # a shallow copy shares them, as every module's does


def test_a_block_in_a_model_is_copied_with_it(package):
    model = torch.nn.Sequential(package.FusedBlock(), torch.nn.Flatten(), torch.nn.LazyLinear(3))
    model(x_of())
    other = through_pickle(copy.deepcopy(model))
    torch.testing.assert_close(other(x_of()), model(x_of()))
    assert list(other.state_dict()) == list(model.state_dict())


LOADING = """
import sys, torch
block = torch.load(sys.argv[1], weights_only=False)
x, y = torch.load(sys.argv[2])
torch.testing.assert_close(block(x), y)
print(type(block).__name__)
"""


@pytest.mark.parametrize("kept", [True, False])
def test_another_process_loads_a_saved_block(tmp_path, kept):
    """From its folder, or emitted anew where that is gone."""
    folder = emit(spec_of(), tmp_path / "packages")
    block = random_block(import_package(folder))
    torch.save(block, tmp_path / "block.pt")
    torch.save((x_of(), block(x_of())), tmp_path / "values.pt")
    if not kept:
        folder.rename(tmp_path / "elsewhere")
    done = python("-c", LOADING, str(tmp_path / "block.pt"), str(tmp_path / "values.pt"))
    assert done.stdout.strip() == "FusedBlock", done.stderr


SPAWNING = """
import sys, torch, torch.multiprocessing as mp
import kgen

def work(rank, block, x, y, out):
    out.put((rank, torch.equal(block(x), y)))

if __name__ == "__main__":
    block = kgen.load(sys.argv[1])
    x = torch.rand(2, 3, 19, 24)
    out = mp.get_context("spawn").SimpleQueue()
    mp.spawn(work, (block, x, block(x).detach(), out), nprocs=2)
    print(sorted([out.get(), out.get()]))
"""


def test_spawned_processes_get_the_block(tmp_path):
    script, spec = tmp_path / "script.py", tmp_path / "demo.yaml"
    script.write_text(SPAWNING)
    spec.write_text(TEXT)
    done = subprocess.run(
        [sys.executable, str(script), str(spec)], cwd=ROOT, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "[(0, True), (1, True)]", done.stderr


def test_threads_may_call_one_module_at_once(package):
    block = random_block(package)
    xs = [x_of(seed=seed) for seed in range(8)]
    with torch.no_grad():
        wanted = [block(x) for x in xs]
    wrong = []

    def work(x, y):
        with torch.no_grad():
            wrong.extend(index for index in range(20) if not torch.equal(block(x), y))

    threads = [threading.Thread(target=work, args=pair) for pair in zip(xs, wanted, strict=True)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert wrong == []


# ---- Weights -----------------------------------------------------------------------------------


def replace_data(block, values):
    for parameter, value in zip(block.parameters(), values, strict=True):
        parameter.data = value


def write_data(block, values):
    for parameter, value in zip(block.parameters(), values, strict=True):
        parameter.data.copy_(value)


def load(block, values):
    block.load_state_dict(dict(zip(block.state_dict(), values, strict=True)), strict=True)


def assign(block, values):
    state = dict(zip(block.state_dict(), values, strict=True))
    block.load_state_dict(state, strict=True, assign=True)


def step(block, values):
    optimizer = torch.optim.SGD(block.parameters(), lr=1.0)
    for parameter, value in zip(block.parameters(), values, strict=True):
        parameter.grad = parameter.detach() - value
    optimizer.step()


@pytest.mark.parametrize("change", [replace_data, write_data, load, assign, step])
def test_the_next_call_sees_new_weights(change, package):
    block = random_block(package)
    block(x_of())
    torch.manual_seed(11)
    values = [torch.randn_like(one) for one in block.parameters()]
    change(block, values)
    for one, value in zip(block.parameters(), values, strict=True):
        torch.testing.assert_close(one.detach(), value)
    torch.testing.assert_close(block(x_of()), eager_of(block, spec_of())(x_of()))


def test_half_is_refused_by_name_and_float_takes_it_back(package):
    block = random_block(package)
    with pytest.raises(TypeError, match=r"built for torch\.float32"):
        copy.deepcopy(block).half()(x_of())
    with pytest.raises(TypeError, match=r"conv\.weight is torch\.float16, built for"):
        copy.deepcopy(block).half()(x_of())
    assert block.half().float()(x_of()).dtype == torch.float32


def test_a_parametrized_weight_is_used(package):
    block = random_block(package)
    weight = block.conv.weight.detach().clone()

    class Twice(torch.nn.Module):
        def forward(self, value):
            return 2 * value

    torch.nn.utils.parametrize.register_parametrization(block.conv, "weight", Twice())
    other = random_block(package)
    with torch.no_grad():
        other.conv.weight.copy_(2 * weight)
        torch.testing.assert_close(block(x_of()), other(x_of()))
