"""Sizes at which something would overflow, hang or be refused by a GPU: refused when loaded."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

import kgen
from kgen.build import normalise_arch
from kgen.constraints import divisors
from kgen.errors import KgenError, SpecError, UsageError
from kgen.plan import make_plan
from kgen.spec import load_spec


def spec(schedule=None, num_groups=1, targets=("sm_90a",), **problem):
    sizes = {"batch": 1, "in_channels": 1, "out_channels": 32, "height": 32, "width": 32,
             "kernel_size": 1}  # fmt: skip
    return load_spec(
        {
            "version": 1,
            "name": "limits",
            "problem": {**sizes, **problem},
            "chain": [{"add": "bias"}, "sigmoid", {"group_norm": {"num_groups": num_groups}}],
            "schedule": schedule or {},
            "targets": list(targets),
        }
    )


def refused(words, **arguments):
    with pytest.raises(SpecError) as caught:
        spec(**arguments)
    assert words in str(caught.value)


def test_a_plan_never_falls_to_a_hybrid_that_does_not_fit():
    big = spec(in_channels=128, height=8300, width=8300)
    assert make_plan(big).strategy == "two_kernel"  # a group has 2.2e9 elements
    wide = spec(in_channels=64, out_channels=20000, height=8, width=8)
    assert make_plan(wide).strategy == "two_kernel"  # its coefficients exceed shared memory
    refused("hybrid indexes fewer than", in_channels=128, height=8300, width=8300,
            schedule={"strategy": "hybrid"})  # fmt: skip
    refused("bytes of shared memory", out_channels=20000, height=8, width=8,
            schedule={"strategy": "hybrid"})  # fmt: skip


def test_all_of_a_hybrid_blocks_shared_memory_is_counted():
    """At 4096 channels all but the moments take 49,152 bytes; the moments come on top."""
    plan = make_plan(spec(out_channels=4096, height=8, width=8, schedule={"strategy": "hybrid"}))
    (launch,) = plan.launches
    regions = [one.bytes for one in plan.smem_map]
    assert launch.smem_bytes == sum(regions)
    assert regions[1] == 12 * launch.threads // 32
    assert regions[0] + regions[2] == 49152
    assert launch.smem_bytes > 49152  # so the launcher opts in
    for before, after in zip(plan.smem_map, plan.smem_map[1:], strict=False):
        assert before.offset + before.bytes == after.offset


def test_partials_that_cannot_be_indexed_are_refused():
    tile = {"strategy": "two_kernel", "tile_h": 1, "tile_w": 1, "tile_k": 32, "threads": 32}
    refused("partial moments", num_groups=32, height=8300, width=8300, schedule=tile)


def test_planes_that_cannot_be_indexed_are_refused():
    refused("cannot be indexed", height=2147483647, width=1)


def test_large_knobs_are_answered_at_once():
    for schedule in (
        {"strategy": "two_kernel", "tile_h": 2147483647, "pixels": 2},
        {"strategy": "two_kernel", "tile_k": 1000000007, "threads": 96},
    ):
        start = time.perf_counter()
        with pytest.raises(SpecError):
            spec(schedule=schedule)
        assert time.perf_counter() - start < 2


@pytest.mark.parametrize("value", [1, 2, 12, 36, 97, 1024, 2147483647])
def test_divisors(value):
    found = divisors(value)
    assert found == sorted(found)
    if value < 2000:
        assert found == [one for one in range(1, value + 1) if value % one == 0]
    assert (found[0], found[-1]) == (1, value)


@pytest.mark.parametrize("schedule", [
    {"tile_h": 8, "tile_w": 32, "pixels": 8, "tile_k": 12, "threads": 96},
    {"tile_h": 8, "tile_w": 32, "pixels": 8, "tile_k": 32, "threads": 1024},
])  # fmt: skip
def test_any_number_of_sets_that_divides_the_channels_is_legal(schedule):
    made = make_plan(spec(schedule=schedule, in_channels=4, out_channels=96, num_groups=4))
    assert made.threads == schedule["threads"]
    assert made.strategy == "two_kernel"  # implied by the tile


def test_math_implies_the_strategy_that_honours_it():
    assert make_plan(spec(schedule={"math": "ffma"}, in_channels=512)).strategy == "two_kernel"


def test_build_refuses_architectures_that_the_plan_does_not_fit(tmp_path):
    tile = {"strategy": "two_kernel", "tile_h": 16, "tile_w": 32, "tile_c": 50}
    wide = spec(in_channels=50, kernel_size=3, schedule=tile)
    with pytest.raises(SpecError, match="sm_86"):
        kgen.build(wide, ["sm_86"], tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["90a", "sm_90a", "9.0a", "SM90a"])
def test_forms_of_an_architecture(text):
    assert normalise_arch(text) == "sm_90a"


@pytest.mark.parametrize(("text", "hint"), [("90", "did you mean sm_90a"), ("9..0.a", ""),
                                            ("130", ""), ("", "")])  # fmt: skip
def test_other_architectures_are_refused(text, hint):
    with pytest.raises(UsageError, match="unknown architecture") as caught:
        normalise_arch(text)
    assert hint in str(caught.value)


# ---- Packages ---------------------------------------------------------------------------------


def test_a_folder_among_a_packages_files_is_foreign(tmp_path):
    package = kgen.emit(spec(), tmp_path)
    (package / "notes").mkdir()
    with pytest.raises(UsageError, match="holds notes"):
        kgen.emit(spec(), tmp_path)


def test_an_edited_manifest_is_noticed(tmp_path):
    package = kgen.emit(spec(), tmp_path)
    manifest = json.loads((package / "manifest.json").read_text())
    manifest["strategy"] = "mine"
    (package / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UsageError, match=r"manifest\.json was edited"):
        kgen.emit(spec(), tmp_path)


def test_other_line_ends_are_a_difference(tmp_path):
    from kgen.emit import difference, render

    package = kgen.emit(spec(), tmp_path)
    kernel = package / "kernel.cu"
    kernel.write_bytes(kernel.read_bytes().replace(b"\n", b"\r\n"))
    assert difference(package, render(spec())) != ""


def test_a_link_to_a_package_stays_a_link(tmp_path):
    real = tmp_path / "real"
    kgen.emit(spec(), real)
    (tmp_path / "out").mkdir()
    link = tmp_path / "out" / "limits"
    link.symlink_to(real / "limits")
    kgen.emit(spec(height=40), tmp_path / "out")
    assert link.is_symlink()
    assert {one.name for one in (tmp_path / "out").iterdir()} == {"limits"}
    assert (
        json.loads((real / "limits/manifest.json").read_text())["spec"]["problem"]["height"] == 40
    )


def test_a_package_runs_from_a_folder_of_any_name(tmp_path):
    torch = pytest.importorskip("torch")
    package = kgen.emit(spec(), tmp_path)
    odd = package.rename(tmp_path / "my-block v2")
    y = kgen.load(odd)(torch.rand(1, 1, 32, 32))
    assert y.shape == (1, 32, 32, 32)


@pytest.mark.parametrize(("name", "content"), [("manifest.json", "{"), ("manifest.json", "[]"),
                                               ("kernel.cu", None)])  # fmt: skip
def test_a_damaged_package_is_named(tmp_path, name, content):
    package = kgen.emit(spec(), tmp_path)
    if content is None:
        (package / name).unlink()
    else:
        (package / name).write_text(content)
    with pytest.raises(UsageError, match=name.replace(".", r"\.")):
        kgen.load(package)


@pytest.mark.parametrize("damage", ["gone", "list", "text"])
def test_a_damaged_build_is_a_launch_error(tmp_path, damage):
    pytest.importorskip("torch")
    from kgen.runtime import LaunchError, find_cubin

    kernel, builds = "// source", {"sm_90a": {"file": "x.cubin", "sha256": "0"}}
    import hashlib

    digest = hashlib.sha256(kernel.encode()).hexdigest()
    record = {"source_sha256": digest, "builds": {"gone": builds, "list": []}.get(damage, "x")}
    (tmp_path / "build.json").write_text(json.dumps(record) if damage != "text" else "{")
    if damage == "list":  # nothing was built: the compiler is asked
        assert find_cubin(tmp_path, kernel, (9, 0)) is None
        return
    with pytest.raises(LaunchError, match="run `kgen build` again"):
        find_cubin(tmp_path, kernel, (9, 0))


def test_many_processes_load_one_spec_into_an_empty_cache(tmp_path):
    pytest.importorskip("torch")
    path = tmp_path / "limits.yaml"
    path.write_text(
        "version: 1\nname: limits\nproblem: {batch: 1, in_channels: 1, out_channels: 4, height: 8, "
        "width: 8, kernel_size: 1}\nchain: [sigmoid, {group_norm: {num_groups: 1}}]\n"
    )
    program = f"import kgen; kgen.load({str(path)!r}); print('loaded')"
    import os

    environment = {**os.environ, "KGEN_CACHE_DIR": str(tmp_path / "cache")}
    running = [
        subprocess.Popen([sys.executable, "-c", program], env=environment,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(6)
    ]  # fmt: skip
    for one in running:
        out, error = one.communicate(timeout=100)
        assert out == "loaded\n", error


def test_a_cache_variable_with_an_unknown_user_is_named(monkeypatch):
    from kgen.compiler import CacheError, cache_dir

    monkeypatch.setenv("KGEN_CACHE_DIR", "~nosuchuser/x")
    with pytest.raises(CacheError, match="KGEN_CACHE_DIR=~nosuchuser/x"):
        cache_dir()


def test_control_characters_in_a_key_are_quoted(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text('version: 1\n"a\\nb\\e[31m": 1\n')
    with pytest.raises(KgenError) as caught:
        load_spec(path)
    assert "\x1b" not in str(caught.value)
    assert all(line.startswith((str(path), "  hint: ")) for line in str(caught.value).splitlines())
