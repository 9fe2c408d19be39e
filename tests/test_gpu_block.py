"""On a GPU: the emitted module under the inputs that broke others (numbers, edges, layouts)."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import kgen
from kgen.errors import SpecError
from kgen.ops import OPS
from kgen.package import import_package, package_of
from kgen.spec import STRATEGIES, load_spec

torch = pytest.importorskip("torch")

from kgen.checks import PackageCandidate, check_case
from kgen.reference import EagerBlock, draw, eager_fp32, oracle

pytestmark = [pytest.mark.gpu, pytest.mark.nvrtc]


def spec_of(strategy=None, *, chain=None, num_groups=8, eps=1e-5, schedule=None, **problem):
    sizes = {"batch": "dynamic", "in_channels": 8, "out_channels": 32, "kernel_size": 3}
    schedule = dict(schedule or {})
    if strategy:
        schedule["strategy"] = strategy
    pointwise = chain if chain is not None else [{"add": "bias"}, {"mul": "scale"}, "sigmoid"]
    try:
        return load_spec(
            {
                "version": 1,
                "name": "probe",
                "problem": {**sizes, **problem},
                "chain": [*pointwise, {"group_norm": {"num_groups": num_groups, "eps": eps}}],
                "schedule": schedule,
            }
        )
    except SpecError as error:
        if "does not fit" in str(error) and strategy in ("single_pass", "recompute"):
            pytest.skip(str(error.issues[0].message))
        raise


def run(spec, x, parameters):
    return PackageCandidate(package_of(spec))(x, parameters)


def assert_right(spec, x, parameters):
    result = check_case(spec, PackageCandidate(package_of(spec)), x, parameters)
    assert result.passed, result
    return result


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_d01a_values_far_from_zero(strategy):
    spec = spec_of(strategy, height=64, width=64)
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(2, 8, 64, 64, device="cuda", generator=generator)
    _, parameters = draw(spec, 2, "uniform", 0, "cuda")
    parameters |= {
        "conv.weight": 0.05 * torch.randn(32, 8, 3, 3, device="cuda", generator=generator),
        "conv.bias": torch.zeros(32, device="cuda"),
        "bias": torch.full((32, 1, 1), 6.0, device="cuda"),
        "scale": torch.ones(32, 1, 1, device="cuda"),
    }
    result = assert_right(spec, x, parameters)
    assert result.max_error < 1e-4


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_d01b_four_million_values_a_group(strategy):
    spec = spec_of(strategy, out_channels=4, num_groups=1, height=1026, width=1026)
    x, parameters = draw(spec, 1, "uniform", 1, "cuda")
    assert assert_right(spec, x, parameters).max_error < 1e-4


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_d02b_ill_conditioned_is_named(strategy):
    spec = spec_of(strategy, height=64, width=64, eps=1e-8)
    x, parameters = draw(spec, 2, "normal x3", 0, "cuda")
    x = x / 3
    parameters |= {
        "conv.weight": 0.05 * torch.randn(32, 8, 3, 3, device="cuda"),
        "conv.bias": torch.zeros(32, device="cuda"),
        "bias": torch.full((32, 1, 1), 8.0, device="cuda"),
        "scale": torch.ones(32, 1, 1, device="cuda"),
    }
    result = check_case(spec, PackageCandidate(package_of(spec)), x, parameters)
    assert result.eager_max_error > 1e-4
    assert result.ill_conditioned or not result.passed


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_d04_tiny_groups(strategy):
    one = spec_of(strategy, out_channels=6, num_groups=6, height=3, width=3, in_channels=3)
    x, parameters = draw(one, 4, "uniform", 0, "cuda")
    y = run(one, x, parameters)
    beta = parameters["group_norm.bias"].view(1, 6, 1, 1).expand(4, 6, 1, 1)
    torch.testing.assert_close(y, beta, atol=2e-5, rtol=0)
    five = spec_of(strategy, out_channels=5, num_groups=1, height=3, width=3, in_channels=3)
    assert_right(five, *draw(five, 4, "uniform", 0, "cuda"))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("batch", ["dynamic", 4])
def test_d05_empty_batch(strategy, batch):
    spec = spec_of(strategy, height=32, width=32, batch=batch)
    x, parameters = draw(spec, 0, "uniform", 0, "cuda")
    y = run(spec, x, parameters)
    torch.cuda.synchronize()
    assert y.shape == (0, 32, 30, 30)
    assert (y.dtype, y.device) == (x.dtype, x.device)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "problem",
    [
        {"kernel_size": [3, 5], "dilation": [2, 3], "padding": "same", "in_channels": 3,
         "height": 28, "width": 31},
        {"kernel_size": 4, "padding": "same", "height": 20, "width": 23},
        {"kernel_size": [5, 2], "stride": [1, 3], "padding": [2, 1], "height": 33, "width": 40},
        {"kernel_size": 1, "height": 17, "width": 9},
        {"kernel_size": 7, "stride": 4, "padding": 3, "height": 65, "width": 63},
        {"kernel_size": 11, "padding": 5, "height": 40, "width": 48},
    ],
)  # fmt: skip
def test_d07_geometry_options(strategy, problem):
    spec = spec_of(strategy, **problem)
    assert_right(spec, *draw(spec, 2, "normal x3", 0, "cuda"))


def test_d07b_same_with_an_even_filter_pads_after():
    spec = spec_of("two_kernel", kernel_size=4, padding="same", in_channels=1, out_channels=1,
                   num_groups=1, height=4, width=4, chain=["relu"], conv_bias=False)  # fmt: skip
    x = torch.zeros(1, 1, 4, 4, device="cuda")
    x[0, 0, 0, 0] = 1
    parameters = {
        "conv.weight": torch.arange(16.0, device="cuda").view(1, 1, 4, 4),
        "group_norm.weight": torch.ones(1, device="cuda"),
        "group_norm.bias": torch.zeros(1, device="cuda"),
    }
    conv = torch.zeros(4, 4, dtype=torch.float64)
    conv[:2, :2] = torch.tensor([[5.0, 4.0], [1.0, 0.0]])
    wanted = (conv - conv.mean()) / (conv.var(unbiased=False) + 1e-5).sqrt()
    y = run(spec, x, parameters)[0, 0].cpu().double()
    torch.testing.assert_close(y, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("shape", [(2, 19, 35), (1, 3, 3), (3, 99, 133)])
def test_d08_ragged_tiles(strategy, shape):
    N, H, W = shape
    tile = {"tile_h": 16, "tile_w": 16} if strategy == "two_kernel" else {}
    spec = spec_of(strategy, height=H, width=W, schedule=tile)
    assert_right(spec, *draw(spec, N, "uniform", 0, "cuda"))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_d09_views_equal_their_dense_copies(strategy):
    spec = spec_of(strategy, height=20, width=24, in_channels=8)
    x, parameters = draw(spec, 4, "normal x3", 0, "cuda")
    wanted = run(spec, x, parameters)
    flat = torch.cat([x.new_zeros(1), x.reshape(-1)])
    views = {
        "permuted": x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
        "channels_last": x.to(memory_format=torch.channels_last),
        "strided rows": torch.stack([x, x], 3).reshape(4, 8, 40, 24)[:, :, ::2, :],
        "misaligned": flat[1:].view_as(x),
    }
    for name, view in views.items():
        y = run(spec, view, parameters)
        assert torch.equal(y, wanted), name
        assert y.is_contiguous(), name
    expanded = x[:1].expand(4, -1, -1, -1)
    assert torch.equal(
        run(spec, expanded, parameters), run(spec, expanded.contiguous(), parameters)
    )
    weight = parameters["conv.weight"]
    turned = weight.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    assert torch.equal(run(spec, x, {**parameters, "conv.weight": turned}), wanted)
    one = spec_of(strategy, height=20, width=24, in_channels=1)
    x, parameters = draw(one, 2, "uniform", 0, "cuda")
    last = x.to(memory_format=torch.channels_last)
    assert torch.equal(run(one, last, parameters), run(one, x, parameters))


def test_d10a_more_than_2_to_31_outputs():
    spec = spec_of("two_kernel", in_channels=1, out_channels=8, kernel_size=1, num_groups=8,
                   height=16384, width=16385, batch=1)  # fmt: skip
    x, parameters = draw(spec, 1, "uniform", 0, "cuda")
    y = run(spec, x, parameters)
    assert y.numel() == 2_147_614_720
    for c in (0, 7):
        v = x[0, 0].double() * parameters["conv.weight"][c].double().item()
        v = v + parameters["conv.bias"][c].double() + parameters["bias"][c].double()
        v = torch.sigmoid(v * parameters["scale"][c].double())
        scale = parameters["group_norm.weight"][c].double() / (v.var(unbiased=False) + 1e-5).sqrt()
        wanted = (v - v.mean()) * scale + parameters["group_norm.bias"][c].double()
        for rows in (slice(0, 2), slice(16382, 16384)):
            error = (y[0, c, rows].double() - wanted[rows]).abs().max()
            assert error < 1e-4, (c, rows, error)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_d10b_batch_above_65535(strategy):
    spec = spec_of(strategy, in_channels=4, out_channels=8, height=3, width=3, num_groups=2)
    assert_right(spec, *draw(spec, 65536, "uniform", 0, "cuda"))


@pytest.mark.parametrize("threads", [32, 96, 256, 1024])
def test_d11_whole_warps_of_any_number(threads):
    spec = spec_of("hybrid", height=29, width=31, schedule={"threads": threads})
    assert_right(spec, *draw(spec, 2, "uniform", 0, "cuda"))


@pytest.mark.parametrize(
    "schedule",
    [
        {"tile_h": 1, "tile_w": 32, "tile_k": 32, "pixels": 1, "threads": 32},
        {"tile_h": 8, "tile_w": 32, "tile_k": 32, "pixels": 1, "threads": 256},
        {"tile_h": 16, "tile_w": 16, "tile_k": 8, "pixels": 1, "threads": 256},
        {"tile_h": 38, "tile_w": 38, "tile_k": 4, "pixels": 2, "threads": 736},
        {"tile_h": 7, "tile_w": 9, "tile_k": 6, "pixels": 7},
        {"tile_h": 4, "tile_w": 64, "tile_k": 4, "pixels": 4, "tile_c": 3},
        {"tile_h": 16, "tile_w": 64, "tile_k": 4, "tile_c": 8, "pixels": 1, "threads": 1024},
    ],
)
def test_knobs_are_honoured_and_right(schedule):
    spec = spec_of("two_kernel", height=75, width=83, schedule=schedule)
    package = package_of(spec)
    assert_right(spec, *draw(spec, 2, "uniform", 0, "cuda"))
    if "threads" in schedule:
        assert package.manifest["launches"][0]["threads"] == schedule["threads"]


def test_d15_more_than_48_kib_opts_in():
    schedule = {"tile_h": 32, "tile_w": 64, "tile_k": 8, "tile_c": 8, "pixels": 4, "threads": 512}
    spec = spec_of("two_kernel", height=96, width=96, schedule=schedule)
    smem = package_of(spec).manifest["launches"][0]["smem_bytes"]
    assert smem > 49152
    assert_right(spec, *draw(spec, 2, "uniform", 0, "cuda"))


def tampered(tmp_path, change):
    folder = kgen.emit(spec_of("two_kernel", height=20, width=24), tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return import_package(folder)


def test_d14_refused_launches_raise_and_name_the_kernel(tmp_path):
    def too_many_threads(manifest):
        manifest["launches"][0]["threads"] = 2048

    package = tampered(tmp_path, too_many_threads)
    x, parameters = draw(spec_of("two_kernel", height=20, width=24), 2, "uniform", 0, "cuda")
    with pytest.raises(RuntimeError, match=r"probe_conv.*2048 threads"):
        PackageCandidate(package)(x, parameters)


def test_d15_more_shared_memory_than_the_gpu_has_raises_with_both_numbers(tmp_path):
    def too_much(manifest):
        manifest["launches"][0]["smem_bytes"] = 300000

    package = tampered(tmp_path, too_much)
    x, parameters = draw(spec_of("two_kernel", height=20, width=24), 2, "uniform", 0, "cuda")
    limit = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    with pytest.raises(RuntimeError, match=f"probe_conv.*300000.*{limit}"):
        PackageCandidate(package)(x, parameters)


def test_d27_wrong_inputs_raise_before_any_launch():
    spec = spec_of(height=64, width=64, batch=2)
    module = kgen.load(spec, device="cuda")
    for shape in ((2, 8, 64, 48), (3, 8, 64, 64), (2, 7, 64, 64), (8, 64, 64)):
        with pytest.raises(ValueError, match="built for"):
            module(torch.zeros(shape, device="cuda"))
    with pytest.raises(TypeError, match="float64"):
        module(torch.zeros(2, 8, 64, 64, device="cuda", dtype=torch.float64))
    with pytest.raises(TypeError, match="float16"):
        module(torch.zeros(2, 8, 64, 64, device="cuda", dtype=torch.float16))
    with pytest.raises(ValueError, match="cpu"):
        kgen.load(spec)(torch.zeros(2, 8, 64, 64, device="cuda"))
    torch.cuda.synchronize()


@pytest.mark.parametrize("channels", [(3, 6), (9, 6), (6, 3), (1, 1), (33, 17)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_d27_odd_channel_counts(strategy, channels):
    c_in, c_out = channels
    groups = 3 if c_out % 3 == 0 else 1
    spec = spec_of(strategy, in_channels=c_in, out_channels=c_out, num_groups=groups, height=21,
                   width=26)  # fmt: skip
    assert_right(spec, *draw(spec, 2, "uniform", 0, "cuda"))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("op", [name for name, op in OPS.items() if not op.takes_parameter])
def test_every_op(strategy, op):
    spec = spec_of(strategy, chain=[{"mul": "a"}, op, {"add": "b"}, {"add": "d"}], height=19,
                   width=30)  # fmt: skip
    assert_right(spec, *draw(spec, 2, "normal x3", 0, "cuda"))


def test_empty_chain_and_no_bias():
    for strategy in STRATEGIES:
        spec = spec_of(strategy, chain=[], conv_bias=False, height=19, width=30)
        assert_right(spec, *draw(spec, 2, "normal x3", 0, "cuda"))


@pytest.mark.parametrize("op", ["sigmoid", "relu", "silu", "tanh"])
def test_nan_and_inf_flow_as_in_fp64(op):
    spec = spec_of("two_kernel", chain=[{"add": "bias"}, op], height=40, width=44)
    x, parameters = draw(spec, 4, "normal x3", 0, "cuda")
    x[0, 3, 10, 10] = float("inf")
    x[1, 2, 20, 7] = float("-inf")
    x[2, 1, 5, 5] = float("nan")
    y, wanted = run(spec, x, parameters), oracle(spec, x, parameters)
    assert torch.equal(y.isnan(), wanted.isnan())
    assert bool(wanted[2].isnan().any())
    finite = wanted.isfinite()
    torch.testing.assert_close(y.double()[finite], wanted[finite], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_same_inputs_same_bits(strategy):
    spec = spec_of(strategy, height=130, width=126)
    x, parameters = draw(spec, 8, "uniform", 0, "cuda")
    first = run(spec, x, parameters)
    for _ in range(20):
        assert torch.equal(run(spec, x, parameters), first)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_d12b_current_stream_is_used(strategy):
    spec = spec_of(strategy, height=64, width=64)
    x, parameters = draw(spec, 4, "uniform", 0, "cuda")
    package = PackageCandidate(package_of(spec))
    wanted = package(x, parameters)
    busy = torch.randn(2048, 2048, device="cuda")
    late = torch.zeros_like(x)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(100):
        with torch.cuda.stream(stream):
            late.zero_()
            for _ in range(4):
                busy @ busy
            late.copy_(x)
            y = package(late, parameters)
        stream.synchronize()
        assert torch.equal(y, wanted)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_module_is_a_drop_in(strategy):
    spec = spec_of(strategy, height=32, width=40)
    torch.manual_seed(3)
    eager = EagerBlock(spec).cuda()
    torch.manual_seed(3)
    block = kgen.load(spec).cuda()
    for (key, a), (other, b) in zip(
        eager.state_dict().items(), block.state_dict().items(), strict=True
    ):
        assert key == other
        assert torch.equal(a, b), key
    x = torch.rand(4, 8, 32, 40, device="cuda")
    wanted = oracle(spec, x, dict(eager.state_dict()))
    assert (block(x).double() - wanted).abs().max() < 1e-4
    other = EagerBlock(spec).cuda()
    block.load_state_dict(other.state_dict(), strict=True)
    wanted = oracle(spec, x, dict(other.state_dict()))
    assert (block(x).double() - wanted).abs().max() < 1e-4


def test_gradients_equal_the_eager_blocks():
    spec = spec_of("two_kernel", height=24, width=28)
    torch.manual_seed(0)
    eager = EagerBlock(spec).cuda()
    block = kgen.load(spec).cuda()
    block.load_state_dict(eager.state_dict())
    x = torch.rand(2, 8, 24, 28, device="cuda", requires_grad=True)
    z = x.detach().clone().requires_grad_()
    weight = torch.rand(2, 32, 22, 26, device="cuda")
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        (eager(x) * weight).sum().backward()
        (block(z) * weight).sum().backward()
    torch.testing.assert_close(z.grad, x.grad, atol=1e-4, rtol=1e-3)
    for (key, a), (_, b) in zip(eager.named_parameters(), block.named_parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, atol=2e-3, rtol=1e-3, msg=key)


def test_regenerate_on_mismatch():
    spec = spec_of("two_kernel", height=32, width=40, batch=4)
    block = kgen.load(spec, on_mismatch="regenerate", device="cuda")
    state = dict(block.state_dict())
    for shape in ((4, 8, 32, 40), (2, 8, 32, 40), (3, 8, 50, 33)):
        x = torch.rand(shape, device="cuda")
        sizes = {"height": shape[2], "width": shape[3]}
        wanted = oracle(spec_of(**sizes), x, state)
        assert (block(x).double() - wanted).abs().max() < 1e-4


def test_a_sparse_input_raises(tmp_path):
    package = import_package(kgen.emit(spec_of("two_kernel", height=20, width=24), tmp_path))
    x = torch.zeros(2, 8, 20, 24, device="cuda").to_sparse()
    with pytest.raises(TypeError, match=r"x is torch\.sparse_coo, built for torch\.strided"):
        package.FusedBlock(device="cuda")(x)


def test_built_cubins_need_no_compiler(tmp_path):
    spec = spec_of("two_kernel", height=20, width=24)
    major, minor = torch.cuda.get_device_capability()
    from kgen.runtime import native_arch

    package = import_package(kgen.build(spec, [native_arch(major, minor)], tmp_path))

    def no_compiler(*_args, **_kwargs):
        raise AssertionError("the compiler was called")

    package.block._compile_source = no_compiler
    assert_right_package(spec, package)


def assert_right_package(spec, package):
    x, parameters = draw(spec, 2, "uniform", 0, "cuda")
    result = check_case(spec, PackageCandidate(package), x, parameters)
    assert result.passed, result


def test_package_runs_without_kgen(tmp_path):
    spec = spec_of("two_kernel", height=20, width=24)
    folder = kgen.emit(spec, tmp_path)
    program = f"""
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name == "kgen" or name.startswith("kgen."):
            raise ImportError("kgen is not here")
sys.meta_path.insert(0, Block())
sys.path.insert(0, {str(tmp_path)!r})
import torch, probe
block = probe.FusedBlock(device="cuda")
x = torch.rand(3, 8, 20, 24, device="cuda")
y = block(x)
parameters = [one.double() for one in (block.conv.weight, block.conv.bias, block.bias, block.scale,
              block.group_norm.weight, block.group_norm.bias)]
wanted = probe.eager(x.double(), *parameters)
assert (y.double() - wanted).abs().max() < 1e-4
print("right")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, timeout=60
    )
    assert done.stdout.strip() == "right", done.stderr
    assert (folder / "kernel.cu").exists()


def test_errors_are_no_worse_than_eager_by_much():
    spec = spec_of("two_kernel", height=128, width=128)
    x, parameters = draw(spec, 4, "uniform", 0, "cuda")
    result = assert_right(spec, x, parameters)
    eager = (eager_fp32(spec, x, parameters).double() - oracle(spec, x, parameters)).abs().max()
    assert result.eager_max_error == pytest.approx(float(eager))
    assert result.max_error < 8 * float(eager)


@pytest.mark.parametrize("channels", [4080, 4096, 4112])
def test_d15_hybrid_around_48_kib_of_shared_memory(channels):
    """At 4096 channels affine pairs and coefficients take exactly 49,152 bytes."""
    spec = spec_of("hybrid", chain=["sigmoid"], in_channels=2, out_channels=channels, num_groups=1,
                   kernel_size=1, height=5, width=4)  # fmt: skip
    assert_right(spec, *draw(spec, 2, "uniform", 0, "cuda"))


# ---- Tensor cores ----------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["single_pass", "recompute"])
@pytest.mark.parametrize("math", ["fp16x3", "bf16x3", "tf32x3", "tf32"])
def test_every_math(strategy, math):
    spec = spec_of(strategy, height=64, width=66, schedule={"math": math})
    result = assert_right(spec, *draw(spec, 5, "uniform", 0, "cuda"))
    bound = {"fp16x3": 1e-5, "bf16x3": 1e-4, "tf32x3": 1e-5, "tf32": 2e-2}[math]
    assert result.max_error < bound
    assert (result.max_error > 1e-4) == (math == "tf32")


@pytest.mark.parametrize("strategy", ["single_pass", "recompute"])
def test_fp16x3_out_of_range_is_nan_never_wrong(strategy):
    spec = spec_of(strategy, height=64, width=64)
    x, parameters = draw(spec, 3, "uniform", 0, "cuda")
    x[1, 3, 20, 20] = 65520.0
    y, wanted = run(spec, x, parameters), oracle(spec, x, parameters)
    assert bool(y[1].isnan().all())
    for n in (0, 2):
        torch.testing.assert_close(y[n].double(), wanted[n], atol=1e-4, rtol=1e-4)
    x[1, 3, 20, 20] = 65000.0
    assert_right(spec, x, parameters)


@pytest.mark.parametrize("scale", [1e-6, 1e-3])
def test_fp16x3_keeps_its_accuracy_for_small_x(scale):
    spec = spec_of("single_pass", chain=[], conv_bias=False, eps=1e-30, height=64, width=64)
    x, parameters = draw(spec, 2, "normal x3", 0, "cuda")
    y, wanted = run(spec, x * scale, parameters), oracle(spec, x * scale, parameters)
    # Below 2^-14 the parts of x keep 2^-36 absolutely: 1.5e-5 of values of 1e-6.
    bound = 2e-4 if scale == 1e-6 else 1e-5
    torch.testing.assert_close(y.double(), wanted, atol=bound, rtol=0)


@pytest.mark.parametrize("batch", [1, 2, 3, 7, 13, 131])
def test_single_pass_ends_for_any_batch(batch):
    spec = spec_of("single_pass", height=100, width=254)
    assert_right(spec, *draw(spec, batch, "uniform", batch, "cuda"))


def test_a_sample_as_large_as_the_chip():
    spec = spec_of("single_pass", height=512, width=512, batch=3)
    assert_right(spec, *draw(spec, 3, "uniform", 0, "cuda"))
