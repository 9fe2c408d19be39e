"""benchmarks/kernelbench.py: its problems are the specs' blocks, its steps end in time."""

import importlib.util

import pytest
from helpers import ROOT, SPECS, spec_of

from kgen.spec import load_spec

torch = pytest.importorskip("torch")

from kgen.reference import EagerBlock

SMALL = [
    spec_of(),
    spec_of(batch="dynamic", conv_bias=False, kernel_size=[2, 3], padding="same", stride=1),
    spec_of(stride=2, padding=1, eps=1e-3, chain=[{"mul": "scale"}, "gelu",
                                                 {"group_norm": {"num_groups": 4}}]),
]  # fmt: skip


@pytest.fixture(scope="module")
def script():
    """The script as a module, by another name than the package that it measures with."""
    path = ROOT / "benchmarks" / "kernelbench.py"
    found = importlib.util.spec_from_file_location("benchmark_of_exports", path)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def built(text):
    namespace = {}
    exec(compile(text, "<problem>", "exec"), namespace)
    torch.manual_seed(42)
    return namespace["Model"](*namespace["get_init_inputs"]()), namespace["get_inputs"]


@pytest.mark.parametrize("spec", [*SMALL, *map(load_spec, SPECS)], ids=lambda spec: spec.name)
def test_a_problem_has_the_eager_blocks_weights(script, spec):
    model, _ = built(script.problem_of(spec))
    torch.manual_seed(42)
    eager = EagerBlock(spec).state_dict()
    assert list(model.state_dict()) == list(eager)
    assert all(torch.equal(one, eager[key]) for key, one in model.state_dict().items())


@pytest.mark.parametrize("spec", SMALL, ids=["plain", "dynamic", "strided"])
@pytest.mark.parametrize("scale", [3.0, 0.01, -1.0])
def test_a_problem_computes_the_block_of_scaled_inputs(script, spec, scale):
    model, plain = built(script.problem_of(spec))
    _, scaled = built(script.scaled(script.problem_of(spec), scale))
    torch.manual_seed(0)
    (x,) = plain()
    torch.manual_seed(0)
    (times,) = scaled()
    assert torch.equal(times, scale * x)
    eager = EagerBlock(spec)
    eager.load_state_dict(model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(model(times), eager(times))


@pytest.mark.parametrize(("seconds", "expected"), [(0.0, "no end after 0"), (60, "exit code 2")])
def test_a_step_that_hangs_or_fails_is_told_and_not_waited_for(
    script, tmp_path, monkeypatch, seconds, expected
):
    """Without a checkout every step fails by itself; without time it is ended."""
    arguments = type("Arguments", (), {"spec": "x.yaml", "kernelbench": tmp_path, "trials": 1,
                                       "timings": 1, "limit": seconds})  # fmt: skip
    problem = tmp_path / "problem.py"
    problem.write_text("")
    monkeypatch.setitem(script.STEPS, "unknown", None)
    answer = script.run_step("unknown", arguments, tmp_path, problem)
    assert expected in answer["failed"]
