"""The simulator on PTX of other NVRTC versions, recorded by tests/ptx/make.py."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kgen.geometry import geometry
from kgen.simulator.device import Device
from kgen.spec import load_spec

torch = pytest.importorskip("torch")

from kgen.reference import draw, oracle
from kgen.simulator.candidate import library_convolution

RECORDS = sorted((Path(__file__).parent / "ptx").glob("*.json"))


def test_old_and_new_versions_are_recorded():
    versions = {json.loads(path.read_text())["nvrtc"] for path in RECORDS}
    archs = {json.loads(path.read_text())["arch"] for path in RECORDS}
    assert {"12.8", "13.5"} <= versions
    assert {"sm_80", "sm_90a", "sm_120"} <= archs


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_recorded_ptx_computes_the_block_without_findings(path):
    record = json.loads(path.read_text())
    spec = load_spec(record["spec"])
    x, parameters = draw(spec, 2, "uniform", 0, "cpu")
    g = geometry(spec.problem)
    device = Device("\n".join(record["ptx"]))
    tensors = {"x": x, **parameters, "conv_out": library_convolution(spec, x, parameters)}
    memory = {
        name: device.memory.allocate(name, 4 * one.numel(), "input", one.numpy())
        for name, one in tensors.items()
    }
    memory["y"] = device.memory.allocate("y", 8 * g.y_elements, "output")
    size = max(4, 8 * record["workspace_per_sample"])
    memory["workspace"] = device.memory.allocate("workspace", size, "workspace")
    for launch in record["launches"]:
        device.launch(
            launch["kernel"],
            2 * launch["blocks_per_sample"],
            launch["threads"],
            launch["smem_bytes"],
            [memory[name].base for name in launch["arguments"]],
        )
    y = memory["y"].view(np.float32).reshape(2, g.C_out, g.P, g.Q)
    assert not device.findings, device.findings.all()
    assert memory["y"].written.all()
    wanted = oracle(spec, x, parameters).numpy()
    np.testing.assert_allclose(y, wanted, atol=1e-4, rtol=1e-4)
