"""Random small blocks of every geometry in the fused strategies, on the simulator."""

from __future__ import annotations

import random

import pytest

from kgen.constraints import divisors
from kgen.errors import SpecError
from kgen.ops import OPS
from kgen.plan import make_plan
from kgen.spec import FUSED, load_spec

torch = pytest.importorskip("torch")

from kgen.checks import check_case
from kgen.reference import draw
from kgen.simulator.candidate import SimulatedCandidate
from kgen.simulator.device import Options
from kgen.simulator.simulate import Simulation

pytestmark = pytest.mark.nvrtc
MOST = 2_000_000  # multiply-adds
# Whose accumulators the compiler renames between products.
RENAMED = (133, 267, 269, 326)


def random_spec(seed):
    """A legal spec, small enough, or None."""
    rng = random.Random(seed)
    c_out = rng.choice([1, 3, 5, 8, 16, 21, 33, 40, 70, 96, 130])
    ops = [name for name, op in OPS.items() if not op.takes_parameter]
    chain = []
    for index in range(rng.randint(0, 4)):
        kind = rng.choice(["add", "mul", "op"])
        chain.append(rng.choice(ops) if kind == "op" else {kind: f"p{index}"})
    chain.append({"group_norm": {"num_groups": rng.choice(divisors(c_out))}})
    stride = rng.choice([1, 1, 2, [1, 2], 3, [3, 1]])
    problem = {
        "batch": rng.choice([1, 2, 3]),
        "in_channels": rng.randint(1, 19),
        "out_channels": c_out,
        "height": rng.randint(1, 30),
        "width": rng.randint(1, 40),
        "kernel_size": [rng.randint(1, 5), rng.randint(1, 5)],
        "stride": stride,
        "padding": rng.choice([0, 1, 2, "same"]) if stride == 1 else rng.choice([0, 1]),
        "dilation": rng.choice([1, 1, 2, [1, 3]]),
        "conv_bias": rng.random() < 0.7,
    }
    schedule = {
        "strategy": rng.choice(FUSED),
        "math": rng.choice(["fp16x3", "fp16x3", "tf32x3", "bf16x3"]),
    }
    target = rng.choice(["sm_90a", "sm_90a", "sm_80", "sm_120"])
    values = {"version": 1, "name": "random", "problem": problem, "chain": chain}
    try:
        spec = load_spec({**values, "schedule": schedule, "targets": [target]})
    except SpecError:
        return None
    g = make_plan(spec).g
    small = problem["batch"] * g.y_elements * g.taps <= MOST
    # 16 bits of x are not enough for every block: see docs/spec.md.
    return spec if small and schedule["math"] != "bf16x3" else None


LEGAL = [seed for seed in range(200) if random_spec(seed) is not None][:16]
SEEDS = sorted({*LEGAL, *(seed for seed in RENAMED if random_spec(seed) is not None)})


@pytest.mark.parametrize("seed", SEEDS)
def test_random_block_is_right_and_raises_no_alarm(seed):
    spec = random_spec(seed)
    plan = make_plan(spec)
    candidate = SimulatedCandidate(Simulation(spec, plan, spec.targets[0]), Options())
    x, parameters = draw(spec, plan.g.N, "normal x3", seed, "cpu")
    result = check_case(spec, candidate, x, parameters, "normal x3", seed)
    assert result.passed, (result, spec.canonical())
    assert candidate.outcome.problems == ()
