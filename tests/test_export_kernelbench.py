"""`kgen export --format kernelbench`: text, initialisation, compilation."""

import ast
import os
import re
import shutil
import subprocess
import sysconfig
import types
from pathlib import Path

import pytest
from helpers import ROOT, SPECS, python, spec_of

from kgen.constraints import check
from kgen.emit import render
from kgen.exporters.kernelbench import kernelbench_source
from kgen.plan import make_plan
from kgen.spec import load_spec

STRATEGIES = ("single_pass", "recompute", "two_kernel", "hybrid")
FLAGSHIP = ROOT / "specs" / "conv8x32_k3_gn8.yaml"
NVCC = shutil.which("nvcc")
GXX = shutil.which("g++")


def every_kernel() -> list:
    """The shipped specs in all strategies that fit them, kernels that differ in their name once."""
    found = {}
    for path in [FLAGSHIP, *SPECS]:
        shipped = load_spec(path)
        for spec in (shipped, *(shipped.with_strategy(one) for one in STRATEGIES)):
            if not check(spec):
                plan = make_plan(spec)
                text = re.sub(f"{spec.name}|{spec.hash()}", "", render(spec, plan)["kernel.cu"])
                found.setdefault(text, pytest.param(spec, id=f"{spec.name}-{plan.strategy}"))
    return list(found.values())


ALL = every_kernel()


def strings_of(text: str) -> dict[str, str]:
    """The string constants of an exported file by name."""
    return {
        node.targets[0].id: node.value.value
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    }


def without_comments(text: str) -> str:
    return "\n".join(re.split("#|//", line, maxsplit=1)[0] for line in text.splitlines())


def loaded(text: str, namespace: dict | None = None):
    """The file executed as KernelBench does it, but for load_inline, whose call is recorded."""
    torch = pytest.importorskip("torch")
    from torch.utils import cpp_extension

    calls = []

    def load_inline(**arguments):
        calls.append(arguments)
        return types.SimpleNamespace(forward=lambda *tensors: tensors)

    namespace = {} if namespace is None else namespace
    kept, cpp_extension.load_inline = cpp_extension.load_inline, load_inline
    try:
        exec(compile("import os\n" + text, "<string>", "exec"), namespace)
    finally:
        cpp_extension.load_inline = kept
    (call,) = calls
    return torch, namespace, call


# ---- The text ----------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ALL)
def test_the_kernel_is_the_emitted_one(spec):
    strings = strings_of(kernelbench_source(spec))
    assert strings["KERNEL_SOURCE"] == render(spec)["kernel.cu"]
    for launch in make_plan(spec).launches:
        assert f"&{launch.kernel})" in strings["TABLE_SOURCE"]


@pytest.mark.parametrize("spec", ALL)
def test_it_keeps_to_the_rules_of_kernelbench(spec):
    """Our reading of the rules: no fallback, no compute in torch, no streams, threads, clocks."""
    text = kernelbench_source(spec)
    tree = ast.parse(text)
    assert not [one for one in ast.walk(tree) if isinstance(one, ast.Try | ast.Pass)]
    code = without_comments(text)
    for word in ("try", "except", "pass"):  # looked for in strings too, C++ included
        assert not re.search(rf"\b{word}\b", code), word
    for name in ("threading", "multiprocessing", "concurrent", "_make_subclass", "perf_counter",
                 "torch.cuda", "torch.nn.", "functional", "__float2half", "half(", "open(",
                 "__file__", "import os", "from __future__"):  # fmt: skip
        assert name not in code, name
    called = {ast.unparse(one.func) for one in ast.walk(tree) if isinstance(one, ast.Call)}
    allowed = {"load_inline", "isinstance", "tuple", "ValueError", "super", "super().__init__",
               "_extension.forward", "torch.randn", "nn.Parameter", "nn.Conv2d",
               "nn.GroupNorm"}  # fmt: skip
    assert called <= allowed
    assert "__global__ void" in code
    assert "load_inline" in code


def test_every_step_of_the_host_code_is_checked():
    host = without_comments(strings_of(kernelbench_source(load_spec(FLAGSHIP)))["HOST_SOURCE"])
    calls = re.findall(r"\bcuda[A-Z]\w+\(", host)
    assert len(calls) >= 4
    assert len(calls) == len(re.findall(r"C10_CUDA_CHECK\(\s*cuda[A-Z]\w+\(", host))
    assert "getCurrentCUDAStream" in host
    assert "CUDAGuard" in host
    assert "/*together=*/true" in host
    assert "/*smem_bytes=*/225168" in host


def test_the_text_depends_on_the_spec_alone(tmp_path):
    code = (
        "import sys; from kgen import load_spec;"
        "from kgen.exporters.kernelbench import kernelbench_source;"
        "sys.stdout.write(kernelbench_source(load_spec(sys.argv[1])))"
    )
    texts = {
        python("-c", code, str(FLAGSHIP), cwd=ROOT, PYTHONHASHSEED=seed).stdout
        for seed in ("0", "1")
    }
    assert texts == {kernelbench_source(load_spec(FLAGSHIP))}


def test_targets_are_named_in_full_and_torch_adds_none(monkeypatch):
    spec = spec_of(targets=["sm_80", "sm_90a"])
    _, _, call = loaded(kernelbench_source(spec))
    flags = call["extra_cuda_cflags"]
    assert "-gencode=arch=compute_80,code=sm_80" in flags
    assert "-gencode=arch=compute_90a,code=sm_90a" in flags
    from torch.utils.cpp_extension import _get_cuda_arch_flags

    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    assert _get_cuda_arch_flags(flags) == []


def test_the_name_of_the_extension_changes_with_the_spec():
    names = {loaded(kernelbench_source(spec_of(height=height)))[2]["name"] for height in (19, 21)}
    assert len(names) == 2
    assert all(name.isidentifier() for name in names)


# ---- ModelNew ----------------------------------------------------------------------------------


def arguments_of(spec):
    problem, shape = spec.problem, (spec.problem.out_channels, 1, 1)
    return (
        problem.in_channels, problem.out_channels, problem.kernel_size, spec.norm.num_groups,
        *[shape] * len(spec.parameters),
    )  # fmt: skip


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_equal_seeds_give_the_eager_blocks_weights(path):
    spec = load_spec(path)
    torch, namespace, _ = loaded(kernelbench_source(spec))
    from kgen.reference import EagerBlock

    torch.manual_seed(42)
    eager = EagerBlock(spec)
    torch.manual_seed(42)
    new = namespace["ModelNew"](*arguments_of(spec))
    states = new.state_dict(), eager.state_dict()
    assert list(states[0]) == list(states[1])
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert len({float(one.flatten()[0]) for one in states[0].values()}) >= 4  # not all the same


def test_forward_takes_the_parameters_as_they_are_at_the_call():
    spec = load_spec(FLAGSHIP)
    torch, namespace, _ = loaded(kernelbench_source(spec))
    new = namespace["ModelNew"](*arguments_of(spec))
    given = new.train()("x")
    keys = [argument.key for argument in make_plan(spec).arguments]
    assert given[0] == "x"
    named = dict(new.named_parameters())
    assert [one.data_ptr() for one in given[1:]] == [named[key].data_ptr() for key in keys]
    with torch.no_grad():
        new.conv.weight.mul_(2)
    assert torch.equal(new("x")[1], new.conv.weight)
    moved = new.to(torch.float64)
    assert all(one.dtype == torch.float64 for one in moved("x")[1:])


def test_another_argument_is_refused_by_name():
    spec = load_spec(FLAGSHIP)
    _, namespace, _ = loaded(kernelbench_source(spec))
    right = list(arguments_of(spec))
    right[2] = 3  # as the problem gives it
    namespace["ModelNew"](*right)
    for index, label in enumerate(["in_channels", "out_channels", "kernel_size", "num_groups",
                                   "bias_shape", "scale_shape"]):  # fmt: skip
        wrong = list(right)
        wrong[index] = (8, 1, 1) if "shape" in label else 5
        with pytest.raises(ValueError, match=rf"{label} is .* built for"):
            namespace["ModelNew"](*wrong)


def test_it_leaves_the_problems_names_alone():
    """KernelBench executes problem and candidate in one namespace."""
    before = {"batch_size": 1, "in_channels": 2, "height": 3, "width": 4, "Model": 5,
              "get_inputs": 6, "get_init_inputs": 7}  # fmt: skip
    _, namespace, _ = loaded(kernelbench_source(load_spec(FLAGSHIP)), dict(before))
    assert {key: namespace[key] for key in before} == before


# ---- Compilation, without a GPU ----------------------------------------------------------------


@pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")
@pytest.mark.parametrize("spec", ALL)
def test_nvcc_compiles_the_kernels_for_every_target(spec, tmp_path):
    strings = strings_of(kernelbench_source(spec))
    _, _, call = loaded(kernelbench_source(spec))
    source = tmp_path / "cuda.cu"
    source.write_text("\n".join([strings["KERNEL_SOURCE"], strings["TABLE_SOURCE"]]))
    done = subprocess.run(
        [NVCC, *call["extra_cuda_cflags"], "-Xptxas=-v", "-Xcompiler=-fPIC", "-c", str(source),
         "-o", str(tmp_path / "cuda.o")],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    if "Unsupported gpu architecture" in done.stderr:
        pytest.skip(f"this nvcc is older than a target of {spec.name}")
    assert done.returncode == 0, done.stderr
    for launch in make_plan(spec).launches:
        for target in spec.targets:
            assert f"Compiling entry function '{launch.kernel}' for '{target}'" in done.stderr
    assert not re.findall(r"[1-9]\d* bytes spill", done.stderr)


def test_a_target_of_another_generation_is_compiled_too(tmp_path):
    if NVCC is None:
        pytest.skip("nvcc is not installed")
    test_nvcc_compiles_the_kernels_for_every_target(spec_of(targets=["sm_80", "sm_90a"]), tmp_path)


def host_specs() -> list:
    return [
        *(one.values[0] for one in ALL),
        spec_of(strategy="hybrid", padding="same", kernel_size=[2, 3]),
        spec_of(conv_bias=False, targets=["sm_80", "sm_90a"]),
        spec_of(batch="dynamic", strategy="hybrid"),
    ]


@pytest.mark.skipif(GXX is None, reason="g++ is not installed")
def test_the_host_code_is_right_for_torchs_headers(tmp_path):
    """All of it in one compilation, each in a namespace: the headers take the time."""
    torch = pytest.importorskip("torch")
    from torch.utils.cpp_extension import include_paths

    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"
    if not (toolkit / "cuda_runtime_api.h").is_file():
        pytest.skip("the headers of a CUDA toolkit are not installed")
    includes, parts, bindings = set(), [], []
    for index, spec in enumerate(host_specs()):
        lines = strings_of(kernelbench_source(spec))["HOST_SOURCE"].splitlines()
        includes |= {line for line in lines if line.startswith("#include")}
        body = "\n".join(line for line in lines if not line.startswith("#include"))
        parts.append(f"namespace export_{index} {{\n{body}\n}}\n")
        bindings.append(
            f'm.def("f{index}", torch::wrap_pybind_function(export_{index}::forward), "");'
        )
    source = tmp_path / "main.cpp"
    source.write_text(
        "\n".join([*sorted(includes), *parts, "PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {",
                   *bindings, "}"]) + "\n"
    )  # fmt: skip
    # A torch without CUDA lacks one generated header of macros; the flag says to do without it.
    generated = [] if torch.version.cuda else ["-DC10_USING_CUSTOM_GENERATED_MACROS"]
    paths = [*include_paths(), str(toolkit), sysconfig.get_path("include")]
    done = subprocess.run(
        [GXX, "-fsyntax-only", "-std=c++20", "-Wall", "-DTORCH_EXTENSION_NAME=x",
         "-DTORCH_API_INCLUDE_EXTENSION_H", *generated,
         *(word for path in paths for word in ("-isystem", path)), str(source)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
