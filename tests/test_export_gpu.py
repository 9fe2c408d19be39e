"""The exported KernelBench file on a GPU: compiled by torch, and held against the eager block.

Needs a CUDA toolkit with nvcc, a host compiler and ninja as well.
"""

import os
import shutil

import pytest
from helpers import ROOT, spec_of

torch = pytest.importorskip("torch")

from kgen.exporters.kernelbench import kernelbench_source
from kgen.package import package_of
from kgen.reference import EagerBlock, exact_fp32, oracle
from kgen.runtime import native_arch
from kgen.spec import load_spec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.nvrtc,
    pytest.mark.skipif(
        not all(map(shutil.which, ("nvcc", "g++", "ninja"))), reason="nvcc, g++ or ninja is missing"
    ),
]
TOLERANCE = 1e-4


def spec_for(label):
    """A spec for this GPU; `single_pass` is the shipped flagship, which is planned for sm_90a."""
    target = native_arch(*torch.cuda.get_device_capability())
    if label == "single_pass":
        if target != "sm_90a":
            pytest.skip("the flagship is planned for sm_90a")
        return load_spec(ROOT / "specs" / "conv8x32_k3_gn8.yaml")
    changes = {"dynamic": {"batch": "dynamic", "strategy": "two_kernel"}}
    return spec_of(**changes.get(label, {"strategy": label}), targets=[target])


@pytest.fixture(scope="module", params=["single_pass", "two_kernel", "hybrid", "dynamic"])
def case(request, tmp_path_factory):
    """(spec, function that makes ModelNew and the eager block from one seed, x)."""
    spec = spec_for(request.param)
    kept = os.environ.get("TORCH_EXTENSIONS_DIR")
    os.environ["TORCH_EXTENSIONS_DIR"] = str(tmp_path_factory.mktemp("extensions"))
    try:
        namespace = {}
        exec(compile(kernelbench_source(spec), "<exported>", "exec"), namespace)
    finally:
        del os.environ["TORCH_EXTENSIONS_DIR"]
        if kept is not None:
            os.environ["TORCH_EXTENSIONS_DIR"] = kept
    problem, shape = spec.problem, (spec.problem.out_channels, 1, 1)
    arguments = (
        problem.in_channels, problem.out_channels, problem.kernel_size, spec.norm.num_groups,
        *[shape] * len(spec.parameters),
    )  # fmt: skip

    def models():
        torch.manual_seed(42)
        new = namespace["ModelNew"](*arguments).cuda()
        torch.manual_seed(42)
        return new, EagerBlock(spec).cuda()

    batch = 5 if problem.batch == "dynamic" else problem.batch
    x = torch.rand(batch, problem.in_channels, problem.height, problem.width, device="cuda")
    return spec, models, x


def eager_of(eager, x):
    with torch.no_grad(), exact_fp32():
        return eager(x)


def test_equal_seeds_give_equal_results(case):
    spec, models, x = case
    new, eager = models()
    before = x.clone()
    y = new(x)
    expected = oracle(spec, x, dict(eager.named_parameters()))
    torch.testing.assert_close(y.double(), expected, atol=TOLERANCE, rtol=TOLERANCE)
    assert y.is_contiguous()
    assert torch.equal(x, before)


def test_the_kernels_are_those_of_the_emitted_package(case):
    """The same source, launched alike: what the package computes, up to the compilers' versions."""
    spec, models, x = case
    new, _ = models()
    package = package_of(spec)
    named = dict(new.named_parameters())
    with torch.no_grad():
        expected = package.fused_block(x, *(named[key] for key in package.PARAMETERS))
    torch.testing.assert_close(new(x), expected, atol=1e-5, rtol=1e-5)


def test_every_call_computes_into_new_memory(case):
    _, models, x = case
    new, eager = models()
    first = new(x)
    kept = first.clone()
    second = new(x * -0.5)
    assert first.data_ptr() != second.data_ptr()
    assert torch.equal(first, kept)
    torch.testing.assert_close(second, eager_of(eager, x * -0.5), atol=TOLERANCE, rtol=TOLERANCE)
    assert torch.equal(new(x), first)


def test_weights_count_as_they_are_at_the_call(case):
    _, models, x = case
    new, eager = models()
    first = new(x)
    with torch.no_grad():
        for model in (new, eager):
            model.conv.weight.mul_(-2).add_(0.1)
            model.group_norm.bias.add_(0.5)
    changed = new(x)
    assert not torch.equal(first, changed)
    torch.testing.assert_close(changed, eager_of(eager, x), atol=TOLERANCE, rtol=TOLERANCE)
    moved = new.cpu().to(device="cuda", dtype=torch.float32)
    assert torch.equal(moved(x), changed)
    torch.manual_seed(1)
    fresh = {key: 0.5 * torch.randn_like(one) for key, one in eager.state_dict().items()}
    new.load_state_dict(fresh)
    eager.load_state_dict(fresh)
    torch.testing.assert_close(new(x), eager_of(eager, x), atol=TOLERANCE, rtol=TOLERANCE)


def test_train_mode_and_gradient_mode_change_nothing(case):
    _, models, x = case
    new, _ = models()
    y = new.train()(x)
    with torch.no_grad():
        assert torch.equal(new.eval()(x), y)
    assert not y.requires_grad


def test_it_runs_on_the_current_stream(case):
    """Recorded into a graph, which takes only what runs on the stream that is being captured."""
    _, models, x = case
    new, eager = models()
    static = x.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        new(static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = new(static)
    static.copy_(x * 0.25)
    graph.replay()
    torch.cuda.synchronize()
    expected = eager_of(eager, x * 0.25)
    torch.testing.assert_close(y, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_what_it_was_not_built_for_is_refused_with_given_and_expected(case):
    spec, models, x = case
    new, _ = models()
    name, height = spec.name, spec.problem.height
    with pytest.raises(RuntimeError, match=rf"{name}: x has shape .*{height - 1}.*expected .*"):
        new(x[:, :, 1:].contiguous())
    with pytest.raises(RuntimeError, match=f"{name}: x has shape .*expected"):
        new(x[0])
    with pytest.raises(RuntimeError, match=f"{name}: x has strides .*expected contiguous"):
        new(x.to(memory_format=torch.channels_last))
    with pytest.raises(RuntimeError, match=f"{name}: x is Double, expected Float"):
        new(x.double())
    with pytest.raises(RuntimeError, match=f"{name}: x is on cpu, expected a CUDA device"):
        new(x.cpu())
    with pytest.raises(RuntimeError, match=f"{name}: conv.weight is on cpu, x is on cuda"):
        models()[0].cpu()(x)
    with pytest.raises(RuntimeError, match=f"{name}: conv.weight is Double, expected Float"):
        models()[0].double()(x)


def test_a_dynamic_batch_takes_any_number_of_samples(case):
    spec, models, x = case
    if spec.problem.batch != "dynamic":
        with pytest.raises(RuntimeError, match="x has shape"):
            models()[0](x[:1].contiguous())
        return
    new, eager = models()
    for batch in (0, 1, 3):
        y = new(x[:batch])
        assert y.shape[0] == batch
        if batch:
            expected = eager_of(eager, x[:batch])
            torch.testing.assert_close(y, expected, atol=TOLERANCE, rtol=TOLERANCE)
