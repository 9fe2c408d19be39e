"""Linters, types and sizes: what a reviewer should not have to look for."""

import re
import shutil
import subprocess
import sysconfig
from importlib.util import find_spec

import pytest
from helpers import ROOT, python

CODE = ("kgen", "tests", "benchmarks", "cli.py")
MODULES = sorted((ROOT / "kgen").rglob("*.py"))
SOURCES = [
    path
    for path in sorted((ROOT / "kgen").rglob("*"))
    if path.suffix in (".py", ".j2", ".cuh") and path.is_file()
]


def run(*command: str):
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )


def tool(name: str) -> str:
    """The tool's path: beside this Python, else on PATH."""
    beside = shutil.which(name, path=sysconfig.get_path("scripts"))
    found = beside or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def test_the_linter_has_nothing_to_say():
    done = run(tool("ruff"), "check", "--no-cache", *CODE)
    assert done.returncode == 0, done.stdout


def test_the_code_is_formatted():
    done = run(tool("ruff"), "format", "--no-cache", "--check", *CODE)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_linter_would_find_something(tmp_path):
    (tmp_path / "bad.py").write_text('"""Bad."""\nimport os\nx=1\n')
    config = str(ROOT / "pyproject.toml")
    bad = str(tmp_path / "bad.py")
    assert "F401" in run(tool("ruff"), "check", "--no-cache", "--config", config, bad).stdout
    assert run(tool("ruff"), "format", "--no-cache", "--check", "--config", config, bad).returncode


@pytest.mark.skipif(find_spec("mypy") is None, reason="mypy is not installed")
def test_the_types_are_right(tmp_path):
    done = python("-m", "mypy", "--cache-dir", str(tmp_path), cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_fits_in_the_head(path):
    assert len(path.read_text("utf-8").splitlines()) <= 400


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_sources_hold_nothing_unfinished(path):
    text = path.read_text("utf-8")
    found = re.findall(r"\b(?:TODO|FIXME|XXX|HACK|breakpoint\(\)|pdb)\b", text)
    assert found == []
    assert text == "" or text.endswith("\n")
    assert not re.search(r"[ \t]+$", text, re.MULTILINE)
    assert not re.search(r"/(?:home|root|work|Users)/\w", text)
    assert re.search(r"[^\x00-\x7f]", text) is None, "plain ASCII, so that every tool reads it"


def test_there_are_sources():
    assert len(MODULES) > 15
    assert len(SOURCES) > 30


@pytest.mark.parametrize("path", sorted((ROOT / "kgen").rglob("*.cuh")), ids=lambda path: path.name)
def test_device_files_begin_with_what_they_are(path):
    text = path.read_text("utf-8")
    assert text.startswith("// ") or len(text.splitlines()) <= 3  # a line that says it itself
