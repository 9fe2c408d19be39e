import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from helpers import ROOT, SPECS, python, spec_of

from kgen import compiler
from kgen.arch import ARCHS
from kgen.build import build, compile_kernel, normalise_arch
from kgen.cache import cache_entries, remove_entry
from kgen.cli import cli
from kgen.compiler import (
    CacheError,
    CompileError,
    Resources,
    cache_dir,
    cache_key,
    compile_source,
    compiler_identity,
    nvrtc_version,
    parse_resources,
    supported_archs,
)
from kgen.constraints import check
from kgen.emit import render
from kgen.errors import BuildError, SpecError, UsageError
from kgen.ops import OPS
from kgen.spec import FUSED, load_spec

TINY = """\
extern "C" __global__ void twice(float* x) {
  x[threadIdx.x] *= 2.0f;
}
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of the test's own."""
    folder = tmp_path / "own cache"
    monkeypatch.setenv("KGEN_CACHE_DIR", str(folder))
    return folder


# ---- What the shipped specs compile to -------------------------------------------------------


@pytest.mark.nvrtc
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_shipped_specs_compile_without_spills_or_warnings(path, arch, monkeypatch):
    logs = []
    monkeypatch.setattr(
        compiler, "parse_resources", lambda log: logs.append(log) or parse_resources(log)
    )
    spec = load_spec(path)
    if spec.schedule.strategy in FUSED:  # planned for its targets, and refused for others
        spec = spec.model_copy(update={"targets": (arch,)})
        if check(spec):
            spec = spec.with_strategy("recompute").model_copy(update={"targets": (arch,)})
    built = compile_source(render(spec)["kernel.cu"], arch, use_cache=False)
    assert built.cubin.startswith(b"\x7fELF")
    assert f".target {arch}" in built.ptx
    assert len(built.resources) >= 1
    for kernel in built.resources:
        assert kernel.registers > 0
        assert (kernel.kernel, kernel.spill_stores, kernel.spill_loads) == (kernel.kernel, 0, 0)
    (log,) = logs
    assert not re.search(r"warning|error|\(C75", log, re.IGNORECASE), log  # C75: wgmma serialised


@pytest.mark.nvrtc
def test_a_warning_would_be_seen_in_the_log(monkeypatch):
    logs = []
    monkeypatch.setattr(compiler, "parse_resources", lambda log: logs.append(log) or ())
    compile_source(TINY.replace("{\n", "{\n  int unused;\n"), "sm_90a", use_cache=False)
    assert re.search(r"warning", logs[0], re.IGNORECASE)


@pytest.mark.nvrtc
def test_spills_would_be_counted():
    source = (
        'extern "C" __global__ void __launch_bounds__(1024, 2) spills(float* x) {\n'
        "  float v[96];\n#pragma unroll\n  for (int i = 0; i < 96; ++i) v[i] = x[i * 7];\n"
        "  __syncthreads();\n#pragma unroll\n"
        "  for (int i = 0; i < 96; ++i) x[i * 3] = v[i] * v[95 - i];\n}\n"
    )
    (kernel,) = compile_source(source, "sm_90a", use_cache=False).resources
    assert kernel.spill_stores > 0
    assert kernel.spill_loads > 0


@pytest.mark.nvrtc
def test_a_second_compilation_counts_the_same():
    """Where there is a driver, NVRTC would take it from its own cache, without a log."""
    source = f'extern "C" __global__ void kernel(float* x) {{ x[0] = {os.getpid()}.0f; }}\n'
    first, second = (compile_source(source, "sm_90a", use_cache=False) for _ in range(2))
    assert first.resources[0].registers > 0
    assert second.resources == first.resources
    assert second.cubin == first.cubin


@pytest.mark.parametrize(
    ("version", "own_cache"), [("12.8", False), ("12.9", True), ("13.0", True)]
)
def test_nvrtc_keeps_no_cache_of_its_own(version, own_cache):
    """Before 12.9 it had none, and does not know the option."""
    options = compiler._options("sm_80", version)
    assert options[: 1 + len(compiler.FLAGS)] == ("--gpu-architecture=sm_80", *compiler.FLAGS)
    assert ("--no-cache" in options) == own_cache


@pytest.mark.nvrtc
@pytest.mark.parametrize("strategy", ["two_kernel", "hybrid"])
@pytest.mark.parametrize("op", OPS)
def test_every_pointwise_op_compiles(op, strategy):
    item = {op: "p"} if OPS[op].takes_parameter else op
    spec = spec_of(chain=[item, {"group_norm": {"num_groups": 4}}], strategy=strategy)
    source = render(spec)["kernel.cu"]
    assert f"op_{op}(" in source
    assert len(compile_kernel(source, "sm_90a").cubin) > 0


@pytest.mark.nvrtc
@pytest.mark.parametrize("strategy", ["two_kernel", "hybrid"])
@pytest.mark.parametrize(
    "changes",
    [
        {"conv_bias": False, "chain": [{"group_norm": {"num_groups": 4}}]},
        {"batch": "dynamic", "padding": "same", "kernel_size": [4, 3]},
        {"stride": [2, 1], "dilation": [1, 3], "padding": [1, 2]},
        {"height": 3, "width": 3},
        {"in_channels": 1, "out_channels": 1, "num_groups": 1, "kernel_size": 1},
        {"in_channels": 1, "out_channels": 8, "num_groups": 8, "kernel_size": 1, "height": 16384,
         "width": 16385},
    ],
    ids=["bare", "dynamic same", "strided dilated", "one pixel", "ones", "beyond 2**31"],
)  # fmt: skip
def test_unusual_blocks_compile_without_warnings(changes, strategy, monkeypatch):
    if changes.get("height") == 16384 and strategy == "hybrid":
        changes = {**changes, "height": 4096}
    logs = []
    monkeypatch.setattr(
        compiler, "parse_resources", lambda log: logs.append(log) or parse_resources(log)
    )
    source = render(spec_of(strategy=strategy, **changes))["kernel.cu"]
    compile_source(source, "sm_90a", use_cache=False)
    assert not re.search(r"warning", logs[0], re.IGNORECASE), logs[0]


# ---- The compiler's log ----------------------------------------------------------------------

LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'demo_normalise' for 'sm_90a'
ptxas info    : Function properties for demo_normalise
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 96 bytes smem
ptxas info    : Compile time = 12.345 ms
ptxas info    : Compiling entry function 'demo_conv' for 'sm_90a'
ptxas info    : Function properties for demo_conv
    352 bytes stack frame, 348 bytes spill stores, 360 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 352 bytes cumulative stack size
"""


def test_the_resource_parser_reads_every_kernel_sorted_by_name():
    assert parse_resources(LOG) == (
        Resources("demo_conv", 255, 348, 360, 352, 0),
        Resources("demo_normalise", 40, 0, 0, 0, 96),
    )
    assert parse_resources("") == ()


@pytest.mark.nvrtc
def test_the_resource_parser_reads_a_real_log():
    (kernel,) = compile_source(TINY, "sm_90a", use_cache=False).resources
    assert kernel.kernel == "twice"
    assert 4 <= kernel.registers <= 32


# ---- D16: what cannot be compiled ------------------------------------------------------------


@pytest.mark.nvrtc
@pytest.mark.parametrize("arch", ["sm_70", "sm_130", "90a", "", "sm_9x", "compute_90"])
def test_an_arch_that_nvrtc_does_not_know_is_named_with_those_it_does(arch):
    if arch == "sm_70" and 70 in supported_archs():  # CUDA 12 still compiles for it
        arch = "sm_30"
    with pytest.raises(CompileError) as caught:
        compile_source(TINY, arch, use_cache=False)
    message = str(caught.value)
    assert f"NVRTC {nvrtc_version()} cannot compile for {arch}" in message
    assert ", ".join(f"sm_{one}" for one in supported_archs()) in message
    assert "\n" not in message
    with pytest.raises(BuildError, match="cannot compile for"):
        compile_kernel(TINY, arch)


@pytest.mark.parametrize("text", ["90a", "sm_90a", "SM_90A", "9.0a", " sm90a "])
def test_an_arch_may_be_written_in_several_ways(text):
    assert normalise_arch(text) == "sm_90a"


@pytest.mark.parametrize("text", ["70", "sm_130", "90", "", "sm_", "hopper"])
def test_an_unknown_arch_is_a_usage_error(text):
    with pytest.raises(UsageError, match="sm_80, sm_86"):
        normalise_arch(text)


@pytest.mark.nvrtc
def test_a_syntax_error_shows_its_line_and_the_lines_around():
    source = TINY.replace("*= 2.0f;", "*= two;")
    with pytest.raises(CompileError) as caught:
        compile_source(source, "sm_90a", use_cache=False)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"sm_90a, NVRTC {nvrtc_version()}: kernel.cu:2: ")
    assert '"two"' in lines[0]
    assert '       1 | extern "C" __global__ void twice(float* x) {' in lines
    assert "  >    2 |   x[threadIdx.x] *= two;" in lines


@pytest.mark.nvrtc
def test_an_error_of_the_assembler_is_shown_without_the_rest_of_its_log():
    source = (
        'extern "C" __global__ void big(float* x) {\n  __shared__ float s[12800];\n'
        "  s[threadIdx.x] = x[0];\n  __syncthreads();\n  x[1] = s[static_cast<int>(x[2])];\n}\n"
    )
    with pytest.raises(CompileError) as caught:
        compile_source(source, "sm_80", use_cache=False)
    assert "too much shared data (0xc800 bytes, 0xc000 max)" in str(caught.value)
    assert "\n" not in str(caught.value)
    fitting = source.replace("12800", "12288")
    assert compile_source(fitting, "sm_80", use_cache=False).resources[0].smem == 49_152


def test_without_the_bindings_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(CompileError, match=r"cuda-bindings.*kgen\[cuda\]"):
        nvrtc_version()
    with pytest.raises(BuildError, match=r"kgen\[cuda\]"):
        compile_kernel(TINY, "sm_90a")


# ---- The key ---------------------------------------------------------------------------------


def test_the_key_holds_source_flags_arch_and_versions(monkeypatch):
    base = (TINY, "sm_90a", "13.0", "0.1.0")
    keys = {cache_key(*base)}
    for index, other in enumerate((TINY + " ", "sm_90", "13.1", "0.1.1")):
        keys.add(cache_key(*(other if at == index else one for at, one in enumerate(base))))
    monkeypatch.setattr(compiler, "FLAGS", (*compiler.FLAGS, "--use_fast_math"))
    keys.add(cache_key(*base))
    monkeypatch.undo()
    monkeypatch.setattr(compiler, "_CACHE_FORMAT", compiler._CACHE_FORMAT + 1)
    keys.add(cache_key(*base))
    assert len(keys) == 7
    assert all(re.fullmatch(r"[0-9a-f]{64}", key) for key in keys)


def test_parts_of_the_key_cannot_run_into_each_other():
    assert cache_key("a", "bc", "", "") != cache_key("ab", "c", "", "")


def test_the_key_is_the_same_in_every_process(tmp_path):
    code = (
        "import sys; from kgen.compiler import cache_key; print(cache_key('x', 'sm_90a', '1', '2'))"
    )
    keys = {
        python("-c", code, cwd=cwd, PYTHONHASHSEED=seed).stdout
        for cwd, seed in ((ROOT, "1"), (tmp_path, "2"))
    }
    assert keys == {cache_key("x", "sm_90a", "1", "2") + "\n"}


# ---- The cache -------------------------------------------------------------------------------


@pytest.mark.nvrtc
def test_the_second_call_is_served_from_the_cache(cache, monkeypatch):
    first = compile_source(TINY, "sm_90a")
    assert not first.cached
    assert [one.name for one in cache.rglob("*.cubin")] == ["kernel.cubin"]
    os.utime(next(cache.rglob("kernel.cubin")), (0, 0))  # old, and still right
    monkeypatch.chdir(cache)
    second = compile_source(TINY, "sm_90a")
    assert second.cached
    assert (second.cubin, second.ptx, second.resources) == (first.cubin, first.ptx, first.resources)
    assert second.seconds == first.seconds


@pytest.mark.nvrtc
def test_another_source_arch_or_version_is_compiled_anew(cache, monkeypatch):
    first = compile_source(TINY, "sm_90a", version="1")
    for changed in (
        compile_source(TINY.replace("2.0f", "3.0f"), "sm_90a", version="1"),
        compile_source(TINY, "sm_80", version="1"),
        compile_source(TINY, "sm_90a", version="2"),
    ):
        assert not changed.cached
    monkeypatch.setattr(compiler, "FLAGS", (*compiler.FLAGS, "--use_fast_math"))
    assert not compile_source(TINY, "sm_90a", version="1").cached
    monkeypatch.undo()
    monkeypatch.setenv("KGEN_CACHE_DIR", str(cache))
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: "99.9")
    assert not compile_source(TINY, "sm_90a", version="1").cached
    monkeypatch.undo()
    monkeypatch.setenv("KGEN_CACHE_DIR", str(cache))
    assert compile_source(TINY, "sm_90a", version="1").cached
    assert first.cubin != compile_source(TINY.replace("2.0f", "3.0f"), "sm_90a", version="1").cubin


@pytest.mark.nvrtc
def test_a_process_with_another_hash_seed_hits_the_same_entry(cache, tmp_path):
    code = (
        "import sys; from kgen.compiler import compile_source\n"
        f"print(compile_source({TINY!r}, 'sm_90a').cached)"
    )
    found = [
        python("-c", code, cwd=cwd, PYTHONHASHSEED=seed).stdout.strip()
        for cwd, seed in ((ROOT, "1"), (tmp_path, "2"))
    ]
    assert found == ["False", "True"]


@pytest.mark.nvrtc
@pytest.mark.parametrize("file", ["kernel.cubin", "kernel.ptx", "entry.json"])
@pytest.mark.parametrize("damage", ["cut", "empty", "missing", "flipped"])
def test_a_damaged_entry_is_rebuilt_once(cache, file, damage):
    whole = compile_source(TINY, "sm_90a")
    path = next(cache.rglob(file))
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "flipped":
        path.write_bytes(content[:40] + bytes([content[40] ^ 1]) + content[41:])
    else:
        path.write_bytes(content[: len(content) // 2 if damage == "cut" else 0])
    again = compile_source(TINY, "sm_90a")
    if file == "entry.json" and damage == "flipped" and again.cached:
        pytest.skip("the flipped bit lies in a figure that decides nothing")
    assert not again.cached
    assert again.cubin == whole.cubin
    assert compile_source(TINY, "sm_90a").cached
    assert list(cache.rglob(".new-*")) == []


@pytest.mark.nvrtc
def test_the_installed_cubin_is_never_rewritten_in_place(cache):
    compile_source(TINY, "sm_90a")
    path = next(cache.rglob("kernel.cubin"))
    with path.open("rb") as mapped:  # like a process that has loaded it
        old = path.stat().st_ino
        path.with_name("kernel.ptx").write_text("damaged")
        compile_source(TINY, "sm_90a")
        assert next(cache.rglob("kernel.cubin")).stat().st_ino != old
        assert mapped.read().startswith(b"\x7fELF")


# ---- D17: locks ------------------------------------------------------------------------------

HOLD_LOCK = """
import sys, time
from pathlib import Path
from kgen.compiler import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.mark.nvrtc
def test_a_killed_owner_leaves_no_lock_behind(cache):
    key = cache_key(TINY, "sm_90a", compiler_identity(), "")
    lock = cache / "locks" / f"{key}.lock"
    owner = subprocess.Popen(
        [sys.executable, "-c", HOLD_LOCK, str(lock)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert owner.stdout.readline() == "held\n"
        owner.send_signal(signal.SIGKILL)
        owner.wait(timeout=30)
    finally:
        owner.kill()
    assert lock.exists()
    start = time.monotonic()
    assert not compile_source(TINY, "sm_90a").cached
    assert time.monotonic() - start < 30


@pytest.mark.nvrtc
def test_a_lock_that_is_held_is_waited_for_and_then_named(cache, monkeypatch):
    key = cache_key(TINY, "sm_90a", compiler_identity(), "")
    lock = cache / "locks" / f"{key}.lock"
    owner = subprocess.Popen(
        [sys.executable, "-c", HOLD_LOCK, str(lock)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert owner.stdout.readline() == "held\n"
        monkeypatch.setattr(compiler, "_LOCK_SECONDS", 0.2)
        with pytest.raises(CacheError, match=re.escape(str(lock))):
            compile_source(TINY, "sm_90a")
    finally:
        owner.kill()
        owner.wait(timeout=30)


RACE = """
import sys, time
from kgen.compiler import compile_source, nvrtc_version
nvrtc_version()
print("ready", flush=True)
sys.stdin.readline()
print(compile_source(sys.argv[1], "sm_90a").cached)
"""


@pytest.mark.nvrtc
def test_eight_processes_on_an_empty_cache_compile_once(cache):
    source = render(spec_of())["kernel.cu"]  # long enough to overlap
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, source],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for _ in range(8)
    ]  # fmt: skip
    for racer in racers:
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        racer.stdin.write("go\n")
        racer.stdin.flush()
    outputs = [racer.communicate(timeout=120) for racer in racers]
    assert [racer.returncode for racer in racers] == [0] * 8, outputs
    assert sorted(out.strip() for out, _ in outputs) == ["False"] + ["True"] * 7
    assert len(list(cache_entries(cache))) == 1


# ---- D19: odd places -------------------------------------------------------------------------


@pytest.mark.nvrtc
def test_a_cache_with_a_space_and_another_letter_works(tmp_path, monkeypatch):
    folder = tmp_path / "my cache" / "\u00fc"
    monkeypatch.setenv("KGEN_CACHE_DIR", str(folder))
    assert not compile_source(TINY, "sm_90a").cached
    assert compile_source(TINY, "sm_90a").cached
    assert cache_dir() == folder


@pytest.mark.nvrtc
def test_a_cache_that_is_a_file_is_one_line_with_the_setting(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        monkeypatch.setenv("KGEN_CACHE_DIR", str(path))
        with pytest.raises(CacheError) as caught:
            compile_source(TINY, "sm_90a")
        message = str(caught.value)
        assert str(path) in message
        assert "set KGEN_CACHE_DIR to a writable folder" in message
        assert "\n" not in message
        with pytest.raises(UsageError, match="KGEN_CACHE_DIR"):
            compile_kernel(TINY, "sm_90a")


def test_the_cache_is_below_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("KGEN_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "kgen"
    assert stat.S_IMODE((tmp_path / ".cache" / "kgen").stat().st_mode) == 0o700
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "kgen"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the standard says: ignore it
    assert cache_dir() != Path("relative/kgen")


@pytest.mark.parametrize("home", ["a file", "absent"])
def test_without_a_usable_home_a_private_temporary_folder_serves(tmp_path, monkeypatch, home):
    monkeypatch.delenv("KGEN_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    (tmp_path / "home").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "home" / ("" if home == "a file" else "below")))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = cache_dir()
    assert folder.parent == tmp_path
    assert folder.is_dir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o777)
    with pytest.raises(CacheError, match="writable by others"):
        cache_dir()
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(CacheError, match="KGEN_CACHE_DIR"):
        cache_dir()


def test_a_user_without_any_home_still_gets_a_cache(tmp_path, monkeypatch):
    monkeypatch.delenv("KGEN_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert cache_dir().parent == tmp_path


def test_a_spec_name_of_300_letters_is_refused():
    with pytest.raises(SpecError, match="300 letters, at most 64"):
        spec_of(name="n" * 300)
    assert spec_of(name="n" * 64).name == "n" * 64


@pytest.mark.nvrtc
def test_the_command_needs_neither_a_path_nor_a_toolkit(tmp_path):
    done = python(
        "-m", "kgen", "emit", str(SPECS[0]), "--output", str(tmp_path / "out"), "--no-verify",
        cwd=tmp_path, PATH="/usr/bin:/bin", CUDA_HOME="", CUDA_PATH="", LD_LIBRARY_PATH="",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "registers" in done.stdout
    assert (tmp_path / "out" / SPECS[0].stem / "kernel.cu").is_file()


# ---- kgen build, kgen cache ------------------------------------------------------------------


@pytest.mark.nvrtc
def test_a_build_puts_cubins_and_their_figures_beside_the_package(tmp_path):
    import json

    folder = build(spec_of(), ["sm_90a"], tmp_path)
    build(spec_of(), ["sm_80"], tmp_path)  # the first one stays
    record = json.loads((folder / "build.json").read_text())
    assert set(record["builds"]) == {"sm_80", "sm_90a"}
    for arch, one in record["builds"].items():
        assert (folder / one["file"]).read_bytes() == (
            compile_kernel(render(spec_of())["kernel.cu"], arch).cubin
        )
        assert {"registers", "spill_stores"} <= set(one["kernels"][0])
    changed = build(spec_of(height=20), ["sm_90a"], tmp_path)
    record = json.loads((changed / "build.json").read_text())
    assert set(record["builds"]) == {"sm_90a"}
    assert not list(changed.glob("*sm_80*"))
    assert not [path for path in changed.iterdir() if path.name.startswith(".")]


@pytest.mark.nvrtc
def test_a_build_that_fails_writes_nothing(tmp_path):
    with pytest.raises(UsageError, match="sm_70"):
        build(spec_of(), ["sm_90a", "sm_70"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.nvrtc
def test_the_cache_is_listed_and_collected(cache):
    runner = CliRunner()
    assert runner.invoke(cli, ["cache", "ls"]).output.startswith("0 entries")
    compile_source(TINY, "sm_90a")
    compile_source(TINY, "sm_80")
    listed = runner.invoke(cli, ["cache", "ls"]).output
    assert listed.count("twice") == 2
    assert f"2 entries, {sum(one.size for one in cache_entries(cache)):,} bytes" in listed
    old = next(one for one in cache_entries(cache) if one.arch == "sm_80")
    for path in [old.path, *old.path.iterdir()]:
        os.utime(path, (0, 0))
    dry = runner.invoke(cli, ["cache", "gc", "--dry-run"]).output
    assert dry.startswith("would remove 1 entries")
    assert len(list(cache_entries(cache))) == 2
    assert runner.invoke(cli, ["cache", "gc"]).output.startswith("removed 1 entries")
    (kept,) = cache_entries(cache)
    assert kept.arch == "sm_90a"
    assert compile_source(TINY, "sm_90a").cached
    assert not compile_source(TINY, "sm_80").cached
    assert runner.invoke(cli, ["cache", "gc", "--days", "0"]).output.startswith("removed 2")
    assert list(cache_entries(cache)) == []


@pytest.mark.nvrtc
def test_a_use_counts_as_a_use_and_a_listing_does_not(cache):
    compile_source(TINY, "sm_90a")
    for path in cache.rglob("*"):
        os.utime(path, (1000, 1000))
    (entry,) = cache_entries(cache)
    assert entry.used == 1000
    assert [one.used for one in cache_entries(cache)] == [1000]
    compile_source(TINY, "sm_90a")
    assert [one.used > 1000 for one in cache_entries(cache)] == [True]


@pytest.mark.nvrtc
def test_a_damaged_entry_is_shown_and_removed(cache):
    compile_source(TINY, "sm_90a")
    next(cache.rglob("kernel.cubin")).write_bytes(b"")
    (entry,) = cache_entries(cache)
    assert not entry.intact
    assert "damaged" in CliRunner().invoke(cli, ["cache", "ls"]).output
    assert CliRunner().invoke(cli, ["cache", "gc"]).output.startswith("removed 1")
    assert list(cache_entries(cache)) == []


def test_removing_what_is_gone_is_a_cache_error(cache):
    with pytest.raises(CacheError, match="cannot be removed"):
        remove_entry(cache / "cubin" / "ab" / "absent")


@pytest.mark.nvrtc
def test_a_cache_that_cannot_be_written_is_one_line(cache, monkeypatch):
    compile_source(TINY, "sm_80")

    def refuse(*_, **__):
        raise OSError(28, "No space left on device", "somewhere")

    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(CacheError, match="somewhere: No space left on device; set KGEN_CACHE_DIR"):
        compile_source(TINY, "sm_90a")
    assert compile_source(TINY, "sm_80").cached
