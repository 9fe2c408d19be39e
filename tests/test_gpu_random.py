"""On a GPU: random small blocks of every geometry, all strategies, against fp64."""

from __future__ import annotations

import random

import pytest

from kgen.constraints import check, divisors
from kgen.errors import SpecError
from kgen.ops import OPS
from kgen.package import package_of
from kgen.spec import STRATEGIES, load_spec

pytest.importorskip("torch")

from kgen.checks import PackageCandidate, check_case
from kgen.reference import draw

pytestmark = [pytest.mark.gpu, pytest.mark.nvrtc]


def random_spec(seed):
    """A legal random spec; drawn again until check() accepts it."""
    rng = random.Random(seed)
    while True:
        c_out = rng.randint(1, 40)
        ops = [name for name, op in OPS.items() if not op.takes_parameter]
        chain = []
        for index in range(rng.randint(0, 4)):
            kind = rng.choice(["add", "mul", "op"])
            chain.append(rng.choice(ops) if kind == "op" else {kind: f"p{index}"})
        chain.append({"group_norm": {"num_groups": rng.choice(divisors(c_out))}})
        stride = rng.choice([1, 1, 2, [1, 2], 3])
        values = {
            "version": 1,
            "name": f"random_{seed}",
            "problem": {
                "batch": rng.choice([1, 2, 3, "dynamic"]),
                "in_channels": rng.randint(1, 20),
                "out_channels": c_out,
                "height": rng.randint(3, 70),
                "width": rng.randint(3, 70),
                "kernel_size": [rng.randint(1, 5), rng.randint(1, 5)],
                "stride": stride,
                "padding": rng.choice([0, 1, 2, "same"]) if stride == 1 else rng.choice([0, 1]),
                "dilation": rng.choice([1, 1, 2, [1, 3]]),
                "conv_bias": rng.random() < 0.7,
            },
            "chain": chain,
            "schedule": {"strategy": rng.choice(STRATEGIES)},
        }
        try:
            spec = load_spec(values)
        except SpecError:
            continue
        assert check(spec) == []
        return spec


@pytest.mark.parametrize("seed", range(120))
def test_random_block(seed):
    spec = random_spec(seed)
    batch = 2 if spec.problem.batch == "dynamic" else spec.problem.batch
    x, parameters = draw(spec, batch, "normal x3", seed, "cuda")
    result = check_case(spec, PackageCandidate(package_of(spec)), x, parameters)
    assert result.passed, (result, spec.canonical())
