"""`kgen export --format package`: its files, its wheel, and the block in there."""

import hashlib
import json
import re
import sys
import tomllib
import zipfile

import pytest
from helpers import ROOT, python, spec_of

from kgen.emit import render
from kgen.errors import BuildError, UsageError
from kgen.exporters import writing
from kgen.exporters.wheel import package_files
from kgen.exporters.writing import write_folder

pytestmark = pytest.mark.nvrtc
ARCHS = ("sm_90a", "sm_80")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The files of the demo block's package, compiled into a cache of this module's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KGEN_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        return package_files(spec_of(), ARCHS)


@pytest.fixture
def folder(files, tmp_path):
    write_folder(tmp_path / "demo_package", files, force=False)
    return tmp_path / "demo_package"


def state_of(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# ---- The files ---------------------------------------------------------------------------------


def test_it_holds_the_emitted_package_with_intact_cubins(files):
    emitted = {f"demo/{name}": text.encode() for name, text in render(spec_of()).items()}
    assert {name: files[name] for name in emitted} == emitted
    cubins = {f"demo/demo.{arch}.cubin" for arch in ARCHS}
    assert set(files) - set(emitted) == cubins | {
        "demo/build.json", "pyproject.toml", "README.md", "LICENSE",
    }  # fmt: skip
    record = json.loads(files["demo/build.json"])
    assert record["source_sha256"] == hashlib.sha256(files["demo/kernel.cu"]).hexdigest()
    for arch in ARCHS:
        built = record["builds"][arch]
        content = files[f"demo/{built['file']}"]
        assert content.startswith(b"\x7fELF")
        assert built["sha256"] == hashlib.sha256(content).hexdigest()


def test_its_project_file_says_what_a_wheel_needs(files):
    project = tomllib.loads(files["pyproject.toml"].decode())
    assert project["project"]["name"] == "demo"
    assert project["project"]["version"].endswith("+" + spec_of().hash())
    data = project["tool"]["setuptools"]["package-data"]["demo"]
    inside = {name.removeprefix("demo/") for name in files if name.startswith("demo/")}
    assert set(data) == {name for name in inside if not name.endswith(".py")}
    assert "kgen" not in " ".join(project["project"]["dependencies"])


def test_its_requirements_are_those_of_kgens_extras(files):
    """A version that kgen moves on to must be moved here as well."""
    own = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    project = tomllib.loads(files["pyproject.toml"].decode())["project"]
    assert own["torch"][0] in project["dependencies"]
    assert set(project["optional-dependencies"]["nvrtc"]) <= set(own["cuda"])
    assert set(project["optional-dependencies"]["nvrtc12"]) <= set(own["cuda12"])
    (bindings,) = (one for one in project["dependencies"] if one.startswith("cuda-bindings"))
    (oldest,) = (one for one in own["cuda12"] if one.startswith("cuda-bindings"))
    (newest,) = (one for one in own["cuda"] if one.startswith("cuda-bindings"))
    lower, upper = oldest.split(",")[0], newest.split(",")[1]
    assert bindings == f"{lower},{upper}"


def test_its_licence_is_the_projects(files):
    assert files["LICENSE"] == (ROOT / "LICENSE").read_bytes()


def test_its_readme_says_how_to_use_and_to_make_it(files):
    text = files["README.md"].decode()
    assert spec_of().hash() in text
    assert "kgen export SPEC --format package --arch sm_90a --arch sm_80" in text
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    compile(example, "README.md", "exec")
    assert "from demo import FusedBlock" in example


@pytest.mark.parametrize("version", ["1.2.0", "2.0rc1", "1.0.post1+local.1"])
def test_a_version_may_be_given(files, version):
    project = package_files(spec_of(), ["sm_90a"], version)["pyproject.toml"]
    assert tomllib.loads(project.decode())["project"]["version"] == version


@pytest.mark.parametrize("version", ["one", "1.0 beta", '1"', "-1"])
def test_what_is_no_version_is_refused(version):
    with pytest.raises(UsageError, match="expected for instance"):
        package_files(spec_of(), ["sm_90a"], version)


def test_nothing_is_written_where_the_kernel_does_not_compile(monkeypatch, tmp_path):
    def refuse(source, arch):
        raise BuildError("kernel.cu:1: refused")

    monkeypatch.setattr(sys.modules["kgen.build"], "compile_kernel", refuse)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BuildError, match="refused"):
        package_files(spec_of(), ["sm_90a"])
    assert list(tmp_path.iterdir()) == []


# ---- On disk -----------------------------------------------------------------------------------


def test_writing_again_changes_nothing(folder, files):
    before = state_of(folder)
    assert not write_folder(folder, files, force=False)
    assert state_of(folder) == before


def test_how_long_the_compiler_took_is_no_difference(folder, files):
    record = json.loads(files["demo/build.json"])
    for built in record["builds"].values():
        built["compile_seconds"] = 1e6
    again = {**files, "demo/build.json": json.dumps(record).encode()}
    assert not write_folder(folder, again, force=False)


@pytest.mark.parametrize("name", ["demo/__init__.py", "demo/demo.sm_80.cubin", "pyproject.toml"])
def test_what_differs_is_replaced_only_by_force(folder, files, name):
    (folder / name).write_bytes(b"edited")
    before = state_of(folder)
    with pytest.raises(UsageError, match=f"{name} differs; --force"):
        write_folder(folder, files, force=False)
    assert state_of(folder) == before
    assert write_folder(folder, files, force=True)
    assert (folder / name).read_bytes() == files[name]


def test_cubins_of_an_earlier_export_go_and_other_files_stay(folder, files):
    (folder / "notes.txt").write_text("mine")
    less = {name: one for name, one in files.items() if "sm_80" not in name}
    with pytest.raises(UsageError, match=r"demo/demo\.sm_80\.cubin differs"):
        write_folder(folder, less, force=False)
    assert write_folder(folder, less, force=True)
    assert not (folder / "demo" / "demo.sm_80.cubin").exists()
    assert (folder / "notes.txt").read_text() == "mine"


def test_a_folder_of_somebody_elses_is_left_alone(files, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="is not an exported package; --force"):
        write_folder(tmp_path / "mine", files, force=False)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def test_an_empty_folder_is_filled(files, tmp_path):
    (tmp_path / "empty").mkdir()
    assert write_folder(tmp_path / "empty", files, force=False)
    assert (tmp_path / "empty" / "demo" / "kernel.cu").read_bytes() == files["demo/kernel.cu"]


def test_a_new_folder_appears_as_a_whole_or_not_at_all(files, tmp_path, monkeypatch):
    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing.os, "replace", full)
    with pytest.raises(UsageError, match="No space left"):
        write_folder(tmp_path / "new", files, force=False)
    assert list(tmp_path.iterdir()) == []


# ---- The wheel ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(files, tmp_path_factory):
    """A wheel built from the folder, without network."""
    pytest.importorskip("setuptools", minversion="77")
    source, out = tmp_path_factory.mktemp("source") / "demo", tmp_path_factory.mktemp("wheel")
    write_folder(source, files, force=False)
    done = python("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index",
                  "--disable-pip-version-check", "--wheel-dir", str(out), str(source),
                  cwd=out)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_holds_the_package_byte_for_byte(wheel, files):
    archive = zipfile.ZipFile(wheel)
    inside = {name: files[name] for name in files if name.startswith("demo/")}
    assert {name: archive.read(name) for name in inside} == inside
    others = {name for name in archive.namelist() if name not in inside}
    assert all(".dist-info/" in name for name in others)
    assert any(name.endswith("licenses/LICENSE") for name in others)
    (metadata,) = (name for name in others if name.endswith("/METADATA"))
    required = re.findall(r"^Requires-Dist: (.*)$", archive.read(metadata).decode(), re.MULTILINE)
    plain = {re.match(r"[\w-]+", one)[0] for one in required if "extra ==" not in one}
    assert plain == {"torch", "cuda-bindings"}


RUN = """
import importlib, json, sys
sys.path.insert(0, sys.argv[1])

class NoKgen:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "kgen":
            raise ImportError(f"{name} was imported")

sys.meta_path.insert(0, NoKgen())
import torch
demo = importlib.import_module("demo")
assert demo.__file__.startswith(sys.argv[1]), demo.__file__
torch.manual_seed(7)
block = demo.FusedBlock()
x = torch.randn(2, 3, 19, 24)
with torch.no_grad():
    y = block(x)
    named = dict(block.named_parameters())
    expected = demo.eager(x, *(named[key] for key in demo.PARAMETERS))
runtime = sys.modules["demo._runtime"]
cubins = [
    runtime.find_cubin(demo._FOLDER, (demo._FOLDER / "kernel.cu").read_text(), one)
    for one in ((9, 0), (8, 0), (8, 6), (12, 0))
]
print(json.dumps({
    "equal": torch.equal(y, expected), "shape": list(y.shape), "hash": demo.spec_hash,
    "cubins": [None if one is None else len(one) for one in cubins],
}))
"""


def test_the_installed_wheel_runs_without_kgen(wheel, files, tmp_path):
    pytest.importorskip("torch")
    site = tmp_path / "site"
    done = python("-m", "pip", "install", "--quiet", "--no-deps", "--no-index",
                  "--disable-pip-version-check", "--target", str(site), str(wheel),
                  cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    done = python("-c", RUN, str(site), cwd=tmp_path, PYTHONPATH="")
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    older, newer = (len(files[f"demo/demo.{arch}.cubin"]) for arch in ("sm_80", "sm_90a"))
    assert said == {
        "equal": True, "shape": [2, 12, 17, 22], "hash": spec_of().hash(),
        "cubins": [newer, older, older, None],
    }  # fmt: skip
