"""The variants of the emitted kernel that benchmarks/stages.py times still apply and compile."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from kgen.build import compile_kernel
from kgen.emit import render
from kgen.spec import load_spec

ROOT = Path(__file__).parent.parent
SPECS = [ROOT / "specs" / f"conv8x32_{name}.yaml" for name in ("k3_gn8", "recompute")]


@pytest.fixture(scope="module")
def stages():
    found = importlib.util.spec_from_file_location("stages", ROOT / "benchmarks" / "stages.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.mark.nvrtc
@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_every_variant_differs_and_compiles(stages, path):
    spec = load_spec(path)
    source = render(spec)["kernel.cu"]
    found = {**stages.variants(spec), "clocks": stages.with_clocks(source)}
    assert found.pop("as emitted") == source
    assert len({*found.values(), source}) == len(found) + 1
    for text in found.values():
        assert compile_kernel(text, "sm_90a").cubin


def test_a_line_that_is_gone_is_named(stages):
    with pytest.raises(SystemExit, match="no line 'gone'"):
        stages.changed("text", (("gone", ""),))
