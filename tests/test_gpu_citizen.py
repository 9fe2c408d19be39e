"""On a GPU: streams, devices, graphs, autocast, compilers, gradients, threads, and host cost."""

from __future__ import annotations

import copy
import threading

import pytest

import kgen
from kgen.errors import SpecError
from kgen.package import package_of
from kgen.spec import STRATEGIES, load_spec

torch = pytest.importorskip("torch")

from kgen.bench.cuda import host_microseconds
from kgen.reference import EagerBlock, draw, oracle

pytestmark = [pytest.mark.gpu, pytest.mark.nvrtc]


def spec_of(strategy="single_pass", batch=4, height=64, width=64):
    try:
        return load_spec(
            {
                "version": 1,
                "name": "citizen",
                "problem": {
                    "batch": batch, "in_channels": 8, "height": height, "width": width,
                    "out_channels": 32, "kernel_size": 3,
                },
                "chain": [{"add": "bias"}, {"mul": "scale"}, "sigmoid",
                          {"group_norm": {"num_groups": 8}}],
                "schedule": {"strategy": strategy},
            }
        )  # fmt: skip
    except SpecError as error:
        pytest.skip(str(error.issues[0].message))


def block_of(spec, device="cuda"):
    block = package_of(spec).FusedBlock(device=device)
    _, parameters = draw(spec, 1 if spec.problem.batch == "dynamic" else spec.problem.batch,
                         "uniform", 5, device)  # fmt: skip
    block.load_state_dict(parameters)
    return block


def x_of(spec, seed=0, batch=4, device="cuda"):
    return draw(spec, batch, "uniform", seed, device)[0]


def assert_close_to_fp64(block, spec, x):
    with torch.no_grad():
        error = (block(x).double() - oracle(spec, x, dict(block.state_dict()))).abs().max()
    assert error < 1e-4


# ---- Graphs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("warm_up", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_d13_a_graph_replays_on_new_inputs_and_weights(strategy, warm_up):
    spec = spec_of(strategy, height=60 if warm_up else 56)  # without warm-up: never loaded before
    block = block_of(spec)
    x = x_of(spec)
    if warm_up:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.no_grad():
            for _ in range(3):
                block(x)
        torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        y = block(x)
    for seed in (1, 2):
        x.copy_(x_of(spec, seed))
        with torch.no_grad():
            block.scale.mul_(1.5)
        graph.replay()
        with torch.no_grad():
            assert torch.equal(y, block(x.clone()))  # beside it, in the ordinary way
    assert_close_to_fp64(block, spec, x)


def test_graphs_and_calls_at_once_do_not_share_memory():
    """A graph that replays on one stream while another stream runs the same block."""
    spec = spec_of("single_pass", batch=16)
    block = block_of(spec)
    x, other = x_of(spec, 0, 16), x_of(spec, 1, 16)
    with torch.no_grad():
        wanted, wanted_other = block(x), block(other)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = block(x)
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        for _ in range(50):
            with torch.cuda.stream(side):
                graph.replay()
            beside = block(other)
            torch.cuda.synchronize()
            assert torch.equal(y, wanted)
            assert torch.equal(beside, wanted_other)


# ---- Streams, devices, threads -----------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_d12a_another_device_than_the_current_one(strategy):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    spec = spec_of(strategy)
    block = block_of(spec, "cuda:1")
    x = x_of(spec, device="cuda:1")
    with torch.cuda.device(0), torch.no_grad():
        y = block(x)
        assert torch.cuda.current_device() == 0
        assert y.device == torch.device("cuda:1")
        assert torch.equal(y.cpu(), block_of(spec, "cuda:0")(x.to("cuda:0")).cpu())
        with pytest.raises(ValueError, match="is on cuda:0, x on cuda:1"):
            block_of(spec, "cuda:0")(x)


def test_a_replica_computes_on_its_device():
    """What DataParallel does with a module; with one GPU both replicas lie there."""
    spec = spec_of(batch="dynamic")
    block = block_of(spec)
    devices = [0, torch.cuda.device_count() - 1]
    x = x_of(spec)
    with torch.no_grad():
        wanted = block(x)
        replicas = torch.nn.parallel.replicate(block, devices)
        for replica, device in zip(replicas, devices, strict=True):
            assert torch.equal(replica(x.to(device)).cpu(), wanted.cpu())


def test_tensors_on_the_cpu_and_the_gpu_are_told_apart():
    spec = spec_of()
    with pytest.raises(ValueError, match="is on cuda:0, x on cpu"):
        block_of(spec)(x_of(spec).cpu())


@pytest.mark.parametrize("own_stream", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_threads_call_one_module_at_once(strategy, own_stream):
    spec = spec_of(strategy)
    block = block_of(spec)
    xs = [x_of(spec, seed) for seed in range(4)]
    with torch.no_grad():
        wanted = [block(x) for x in xs]
    torch.cuda.synchronize()
    wrong, done = [], []

    def work(x, y):
        stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
        with torch.no_grad(), torch.cuda.stream(stream):
            found = [block(x) for _ in range(25)]
            stream.synchronize()
            wrong.extend(index for index, one in enumerate(found) if not torch.equal(one, y))
        done.append(1)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(xs, wanted, strict=True)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert (wrong, len(done)) == ([], 4)


# ---- Compilers, autocast, gradients ------------------------------------------------------------


def test_compiled_with_a_changing_batch():
    spec = spec_of(batch="dynamic")
    block = block_of(spec)
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True)
    with torch.no_grad():
        for batch in (4, 2, 7):
            x = x_of(spec, batch, batch)
            y = compiled(x)
            assert torch.equal(y, block(x))
            assert y.is_contiguous()
    torch._dynamo.reset()


def test_export_gives_the_same_bits():
    spec = spec_of()
    block = block_of(spec)
    x = x_of(spec)
    exported = torch.export.export(block, (x,))
    assert torch.equal(exported.module()(x), block(x))


def test_the_op_is_registered_as_torch_wants_it():
    spec = spec_of()
    package = package_of(spec)
    x, parameters = draw(spec, 4, "uniform", 0, "cuda")
    tensors = [x, *(parameters[key] for key in package.PARAMETERS)]
    for one in tensors:
        one.requires_grad_()
    torch.library.opcheck(package.fused_block, tuple(tensors))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_d25b_autocast_computes_in_float32(dtype):
    spec = spec_of()
    block = block_of(spec)
    eager = EagerBlock(spec).cuda()
    eager.load_state_dict(block.state_dict())
    x = x_of(spec)
    with torch.autocast("cuda", dtype):
        for given in (x, x.to(dtype)):
            with torch.no_grad():
                y, as_autocast = block(given), eager(given)
            assert y.dtype == as_autocast.dtype == torch.float32
            assert torch.equal(y, block(given.float()).detach())
            torch.testing.assert_close(y, as_autocast, atol=0.1, rtol=0.1)
        half = x.to(dtype).requires_grad_()
        block(half).square().sum().backward()
    exact = half.detach().float().requires_grad_()
    block.zero_grad()
    block(exact).square().sum().backward()
    assert half.grad.dtype == dtype
    torch.testing.assert_close(half.grad, exact.grad.to(dtype), atol=1e-2, rtol=1e-2)
    with pytest.raises(TypeError, match=f"x is {dtype}, built for"):
        block(x.to(dtype))


def test_d25a_gradients_against_fp64():
    spec = spec_of("recompute")
    block = block_of(spec)
    x = x_of(spec).requires_grad_()
    weight = torch.randn(4, 32, 62, 62, device="cuda")
    exact = {key: one.detach().double().requires_grad_() for key, one in block.named_parameters()}
    x_exact = x.detach().double().requires_grad_()
    package = package_of(spec)
    wanted = package.eager(x_exact, *(exact[key] for key in package.PARAMETERS))
    (wanted * weight).sum().backward()
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        (block(x) * weight).sum().backward()
    pairs = [(x.grad, x_exact.grad), *((one.grad, exact[key].grad)
                                       for key, one in block.named_parameters())]  # fmt: skip
    for found, grad in pairs:
        assert (found.double() - grad).norm() / grad.norm() < 1e-5


def test_gradients_of_gradients():
    spec = spec_of(height=16, width=16)
    block = block_of(spec)
    eager = EagerBlock(spec).cuda()
    eager.load_state_dict(block.state_dict())
    grads = []
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        for one in (block, eager):
            x = x_of(spec).requires_grad_()
            (grad,) = torch.autograd.grad(one(x).square().sum(), x, create_graph=True)
            grad.square().sum().backward()
            grads.append([x.grad, *(parameter.grad for parameter in one.parameters())])
    for found, wanted in zip(*grads, strict=True):
        assert (found - wanted).norm() <= 1e-3 * wanted.norm() + 1e-6


# ---- Weights, layouts, host cost ---------------------------------------------------------------


def test_d26_new_weights_are_used_by_the_next_call():
    spec = spec_of()
    block = block_of(spec)
    x = x_of(spec)
    other = {key: 0.5 + one for key, one in draw(spec, 1, "uniform", 9, "cuda")[1].items()}

    def copied():
        for key, parameter in block.named_parameters():
            parameter.data.copy_(other[key])

    def replaced():
        for key, parameter in block.named_parameters():
            parameter.data = other[key] * 2

    def stepped():
        optimizer = torch.optim.Adam(block.parameters(), lr=0.1)
        block(x).square().sum().backward()
        optimizer.step()

    for change in (copied, replaced, stepped, lambda: block.load_state_dict(other, strict=True)):
        with torch.no_grad():
            before = block(x)
        change()
        with torch.no_grad():
            assert not torch.equal(block(x), before)
        assert_close_to_fp64(block, spec, x)
    moved = copy.deepcopy(block).cpu().to("cuda")
    assert torch.equal(moved(x), block(x))
    with pytest.raises(TypeError, match=r"is torch\.float16, built for"):
        copy.deepcopy(block).half()(x)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_memory_that_holds_the_negative_is_read_right(strategy):
    """A view of a complex conjugate keeps its sign in a flag."""
    spec = spec_of(strategy)
    block = block_of(spec)
    x = x_of(spec)
    flagged = torch.complex(x, -x).conj().imag
    assert flagged.is_neg()
    with torch.no_grad():
        assert torch.equal(block(flagged), block(x))


def test_channels_last_gives_the_same_bits():
    spec = spec_of()
    block = block_of(spec)
    x = x_of(spec)
    y = block(x.to(memory_format=torch.channels_last))
    assert torch.equal(y, block(x))
    assert y.is_contiguous()


def test_nothing_waits_for_the_device_and_nothing_is_left_allocated():
    spec = spec_of()
    block = block_of(spec)
    x = x_of(spec)
    with torch.no_grad():
        block(x)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        before = torch.cuda.memory_allocated()
        try:
            y = block(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.memory_allocated() - before == -(-y.nbytes // 512) * 512


def test_a_call_costs_the_host_little_beside_its_launches():
    """benchmarks/host_cost.py records the figures; here only that the direct way is taken."""
    spec = spec_of()
    block = block_of(spec)
    x = x_of(spec)
    named = dict(block.named_parameters())
    package = package_of(spec)
    tensors = [named[key] for key in package.PARAMETERS]
    with torch.no_grad():
        direct = host_microseconds(lambda: block(x))
        through_the_op = host_microseconds(lambda: package.fused_block(x, *tensors))
    assert direct < through_the_op


def test_a_loaded_block_is_the_same_on_the_gpu_after_pickling():
    import pickle

    spec = spec_of()
    block = kgen.load(spec, device="cuda")
    x = x_of(spec)
    assert torch.equal(pickle.loads(pickle.dumps(block))(x), block(x))
