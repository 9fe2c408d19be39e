"""On a GPU: the simulator and the GPU agree on the same source, for every shipped spec."""

from __future__ import annotations

from pathlib import Path

import pytest

from kgen.package import import_package
from kgen.plan import make_plan
from kgen.spec import STRATEGIES, load_spec

torch = pytest.importorskip("torch")

import kgen
from kgen.arch import ARCHS
from kgen.checks import PackageCandidate
from kgen.constraints import check
from kgen.reference import draw
from kgen.runtime import native_arch
from kgen.simulator.candidate import SimulatedCandidate
from kgen.simulator.device import Options
from kgen.simulator.reduce import reduced
from kgen.simulator.simulate import Simulation

pytestmark = [pytest.mark.gpu, pytest.mark.nvrtc]
SPECS = sorted((Path(__file__).parent.parent / "specs").glob("*.yaml"))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_simulator_and_gpu_agree_within_rounding(tmp_path, path, strategy):
    spec = load_spec(path).with_strategy(strategy)
    if check(spec):
        pytest.skip(check(spec)[0].message)
    arch = native_arch(*torch.cuda.get_device_capability())
    small, _ = reduced(spec, ARCHS[arch])
    small = small.model_copy(update={"targets": (arch,)})
    package = import_package(kgen.emit(small, tmp_path))
    plan = make_plan(small)
    simulation = Simulation(small, plan, arch, package.block.source)
    x, parameters = draw(small, plan.g.N or 2, "uniform", 0, "cpu")
    candidate = SimulatedCandidate(simulation, Options())
    simulated = candidate(x, parameters)
    on_gpu = {key: one.cuda() for key, one in parameters.items()}
    y = PackageCandidate(package)(x.cuda(), on_gpu).cpu()
    assert candidate.outcome.problems == ()
    # Both are within a few fp32 roundings of the exact value; the hybrid's convolution is another
    # library on each side.
    torch.testing.assert_close(simulated, y, atol=2e-5, rtol=2e-5)
