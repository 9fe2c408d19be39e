"""The wheel holds what the command needs: built, installed elsewhere, and used from there."""

import subprocess
import sys
import zipfile

import pytest
from helpers import ROOT, TEXT, python

BUILD = """
import sys
from setuptools import build_meta
print(build_meta.build_wheel(sys.argv[1]))
"""


def run(*command, cwd, **environment):
    done = python(*command, cwd=cwd, timeout=120, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The project's wheel, built without network from a copy of what git would commit."""
    pytest.importorskip("setuptools", minversion="77")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", "kgen",
         "pyproject.toml", "README.md", "LICENSE"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    run("-c", BUILD, str(out), cwd=source)
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_holds_every_template_and_device_file(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "kgen").rglob("*")
        if path.suffix in (".py", ".j2", ".cuh", ".typed") and path.is_file()
    }
    assert len([name for name in wanted if name.endswith(".cuh")]) >= 10
    assert wanted - names == set()
    assert not [name for name in names if name.startswith(("tests/", "generated/", "benchmarks/"))]


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    target = tmp_path_factory.mktemp("site")
    run("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check",
        "--target", str(target), str(wheel), cwd=target)  # fmt: skip
    return target


# The checkout may be installed in this environment too: the wheel's own folder comes first.
KGEN = "import sys; sys.path.insert(0, sys.argv.pop(1)); from kgen.cli import main; main()"


def test_an_installed_wheel_emits_from_an_empty_folder(installed, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "demo.yaml").write_text(TEXT)
    code = "import sys; sys.path.insert(0, sys.argv[1]); import kgen; print(kgen.__file__)"
    where = run("-c", code, str(installed), cwd=tmp_path)
    assert where.startswith(str(installed))
    for strategy in ("two_kernel", "hybrid"):
        (tmp_path / "demo.yaml").write_text(TEXT.replace("two_kernel", strategy))
        run("-c", KGEN, str(installed), "emit", "--render-only", "--force", "../demo.yaml",
            cwd=tmp_path / "empty")  # fmt: skip
        emitted = tmp_path / "empty" / "generated" / "demo"
        in_checkout = python(
            str(ROOT / "cli.py"), "emit", "--stdout", str(tmp_path / "demo.yaml"), cwd=tmp_path
        )
        assert (emitted / "kernel.cu").read_text() == in_checkout.stdout


def test_an_installed_wheel_writes_a_spec_to_start_from(installed, tmp_path):
    run("-c", KGEN, str(installed), "new", "block", cwd=tmp_path)
    assert "name: block" in (tmp_path / "block.yaml").read_text()
    assert "ok, block" in run("-c", KGEN, str(installed), "validate", "block.yaml", cwd=tmp_path)


def test_the_wheel_has_a_console_script_and_no_heavy_requirement(wheel):
    archive = zipfile.ZipFile(wheel)
    (entry_points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
    assert "kgen = kgen.cli:main" in archive.read(entry_points).decode()
    (metadata,) = (name for name in archive.namelist() if name.endswith("METADATA"))
    required = [
        line for line in archive.read(metadata).decode().splitlines()
        if line.startswith("Requires-Dist:") and "extra ==" not in line
    ]  # fmt: skip
    assert required
    assert not [line for line in required if "torch" in line or "nvidia" in line or "cuda" in line]


def test_this_python_is_one_that_the_project_supports():
    assert sys.version_info >= (3, 11)
