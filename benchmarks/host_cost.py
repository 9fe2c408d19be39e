"""Measures what a call costs the host, what channels_last costs, and what training keeps.

    python benchmarks/host_cost.py specs/conv8x32_k3_gn8.yaml specs/conv9x6_k3x5.yaml \\
        --output benchmarks/results/h200_host_cost.json

Microseconds are those of `kgen bench`: the least of five medians over many calls, each into an
empty queue. `launches` are the driver calls alone, made from Python with ready arguments, so that
`call` minus `launches` is what the module adds: its checks, the output and the workspace from
torch's allocator, and packing the arguments.
Memory is what is still allocated after the forward pass of a training step, beside x and y, and the
most at any time of the step. Gradients are compared with fp64's.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from circumstances import context

import kgen
from kgen.bench.cuda import CudaTimer, graphed, host_microseconds
from kgen.bench.timing import DYNAMIC_BATCH, time_rounds
from kgen.package import find_package
from kgen.reference import EagerBlock, draw


def host_costs(package, block, eager, x: torch.Tensor) -> dict[str, float]:
    parameters = dict(block.named_parameters())
    ordered = [parameters[key] for key in package.PARAMETERS]
    made = package.block
    with torch.no_grad():
        block(x)
        y = x.new_empty((x.shape[0], *made.output))
        workspace = x.new_empty(made.workspace_floats(x.shape[0]))
        given = dict(zip(("x", *package.PARAMETERS, "y", "workspace"),
                         (x, *ordered, y, workspace), strict=True))  # fmt: skip
        values = [
            x.shape[0] if name == "N" else given[name].data_ptr() if name in given else 0
            for name in made._values
        ]
        prepared = made._mine.__dict__[x.get_device()]
        stream = torch.cuda.current_stream().cuda_stream

        def launches() -> None:
            for one in prepared:
                one.start(x.shape[0], values, stream)

        costs = {
            "launches": host_microseconds(launches),
            "call": host_microseconds(lambda: block(x)),
            "op": host_microseconds(lambda: package.fused_block(x, *ordered)),
            "eager": host_microseconds(lambda: eager(x)),
            "empty": host_microseconds(lambda: x.new_empty((x.shape[0], *made.output))),
        }
    costs["call_with_gradient"] = host_microseconds(lambda: block(x))
    costs["eager_with_gradient"] = host_microseconds(lambda: eager(x))
    costs["call_beyond_launches"] = costs["call"] - costs["launches"]
    return costs


def layouts(block, x: torch.Tensor) -> dict[str, float]:
    """Median milliseconds of graph replays."""
    other = x.to(memory_format=torch.channels_last)
    with torch.no_grad():
        rows = {
            "contiguous": graphed(lambda: block(x)),
            "channels_last": graphed(lambda: block(other)),
        }
        timer = CudaTimer("cuda")
        calls = {label: (lambda _, run=run: run()) for label, run in rows.items()}
        times = time_rounds(calls, timer, cold=True, seconds=3.0)
    return {label: one.median for label, one in times.items()}


def training(module, x: torch.Tensor, weight: torch.Tensor) -> tuple[dict[str, int], list]:
    """Bytes of a training step, and its gradients."""
    x = x.detach().clone().requires_grad_()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = module(x)
    kept = torch.cuda.memory_allocated() - before - y.nbytes
    (y * weight).sum().backward()
    peak = torch.cuda.max_memory_allocated() - before
    return {"kept": kept, "peak": peak}, [x.grad, *(one.grad for one in module.parameters())]


def gradient_errors(package, block, eager, x: torch.Tensor) -> dict[str, object]:
    """Relative errors (in the 2-norm) against fp64 for a few samples, TF32 off."""
    weight = torch.randn((x.shape[0], *package.block.output), device="cuda")
    exact = EagerBlock(kgen.package.spec_of(package)).cuda().double()
    exact.load_state_dict({key: one.double() for key, one in block.state_dict().items()})
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        memory, found = training(block, x, weight)
        eager_memory, other = training(eager, x, weight)
    _, wanted = training(exact, x.double(), weight.double())
    labels = ["x", *(key for key, _ in block.named_parameters())]
    relative = lambda one, right: float((one.double() - right).norm() / right.norm())  # noqa: E731
    return {
        "bytes": memory,
        "eager_bytes": eager_memory,
        "errors": dict(zip(labels, map(relative, found, wanted), strict=True)),
        "eager_errors": dict(zip(labels, map(relative, other, wanted), strict=True)),
    }


def measure(path: Path, samples: int) -> dict[str, object]:
    spec = kgen.load_spec(path)
    package = find_package(spec)
    batch = DYNAMIC_BATCH if spec.problem.batch == "dynamic" else spec.problem.batch
    x, parameters = draw(spec, batch, "uniform", 0, "cuda")
    block = package.FusedBlock(device="cuda")
    eager = EagerBlock(spec).cuda()
    for one in (block, eager):
        one.load_state_dict(parameters)
    row: dict[str, object] = {
        "spec": path.name,
        "spec_hash": spec.hash(),
        "strategy": package.manifest["strategy"],
        "host_us": host_costs(package, block, eager, x),
        "layout_ms": layouts(block, x),
    }
    few = spec.model_copy(
        update={"problem": spec.problem.model_copy(update={"batch": min(batch, samples)})}
    )
    package = find_package(few)
    block = package.FusedBlock(device="cuda")
    block.load_state_dict(parameters)
    eager.zero_grad()
    row["training"] = gradient_errors(package, block, eager, x[: min(batch, samples)])
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("specs", nargs="+", type=Path)
    parser.add_argument("--samples", type=int, default=16, help="of the training step")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    record = {**context("host_cost.py"), "rows": []}
    for path in arguments.specs:
        row = measure(path, arguments.samples)
        record["rows"].append(row)
        costs = "  ".join(f"{key} {value:.1f}" for key, value in row["host_us"].items())
        print(f"{row['spec']} {row['strategy']}  us: {costs}")
        print("   ms:", row["layout_ms"], "training:", row["training"])
        arguments.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
