"""Runs an exported block through KernelBench's own evaluation and timing, on one GPU.

    python benchmarks/kernelbench.py specs/conv8x32_k3_gn8.yaml --kernelbench DIR --output FILE.json

DIR is a checkout of KernelBench; nothing of it is part of this project. The candidate is what `kgen
export --format kernelbench` writes. Reference: KernelBench's own problem for the flagship, else one
written from the spec. Correctness (5 trials) and time (100 trials, CUDA events, cold L2) come from
its `eval_kernel_against_ref`, for inputs times 1, 3, 0.01 and -1; the times of eager and
torch.compile from its `measure_ref_program_time`. Every step is a process with a time limit.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import kgen
from kgen.bench.timing import DYNAMIC_BATCH
from kgen.emit import render
from kgen.ops import OPS
from kgen.spec import Spec

FLAGSHIP = "conv8x32_k3_gn8"
PROBLEM = "level2/21_Conv2d_Add_Scale_Sigmoid_GroupNorm.py"
SCALES = (1.0, 3.0, 0.01, -1.0)

# What KernelBench imports at its top for prompts, servers and progress bars, and does not use here.
UNUSED: dict[str, dict[str, Any]] = {
    "dotenv": {"load_dotenv": lambda *_, **__: False},
    "litellm": {"completion": None},
    "openai": {"OpenAI": None},
    "requests": {},
    "tqdm": {"tqdm": None},
}


# ---- Problems ----------------------------------------------------------------------------------


def problem_of(spec: Spec) -> str:
    """A reference problem in KernelBench's form for a spec that it has no problem for."""
    problem, shapes = spec.problem, [f"{name}_shape" for name in spec.parameters]
    batch = DYNAMIC_BATCH if problem.batch == "dynamic" else problem.batch
    x_shape = (batch, problem.in_channels, problem.height, problem.width)
    arguments = ", ".join(["in_channels", "out_channels", "kernel_size", "num_groups", *shapes])
    lines = [
        "import torch",
        "import torch.nn as nn",
        "",
        "class Model(nn.Module):",
        f"    def __init__(self, {arguments}):",
        "        super().__init__()",
        "        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size, "
        f"stride={problem.stride}, padding={problem.padding!r}, dilation={problem.dilation}, "
        f"bias={problem.conv_bias})",
        *(
            f"        self.{one} = nn.Parameter(torch.randn({one}_shape))"
            for one in spec.parameters
        ),
        f"        self.group_norm = nn.GroupNorm(num_groups, out_channels, eps={spec.norm.eps!r})",
        "",
        "    def forward(self, v):",
        "        v = self.conv(v)",
        *(
            f"        v = {OPS[step.op].torch.format(parameter=f'self.{step.parameter}')}"
            for step in spec.pointwise
        ),
        "        return self.group_norm(v)",
        "",
        "def get_inputs():",
        f"    return [torch.rand{x_shape}]",
        "",
        "def get_init_inputs():",
        f"    shapes = [({problem.out_channels}, 1, 1)] * {len(shapes)}",
        f"    return [{problem.in_channels}, {problem.out_channels}, {problem.kernel_size}, "
        f"{spec.norm.num_groups}, *shapes]",
    ]
    return "\n".join(lines) + "\n"


def scaled(problem: str, scale: float) -> str:
    """The same problem with inputs times `scale`."""
    return (
        f"{problem}\n\n_unscaled_inputs = get_inputs\n\n\n"
        f"def get_inputs():\n    return [{scale!r} * one for one in _unscaled_inputs()]\n"
    )


# ---- Steps: each runs in a process of its own --------------------------------------------------


def import_kernelbench(checkout: Path, module: str) -> Any:
    """A module of the checkout; what it only imports is replaced by nothing where it is missing."""
    for name, content in UNUSED.items():
        try:
            importlib.import_module(name)
        except ImportError:
            sys.modules[name] = stub = types.ModuleType(name)
            vars(stub).update(content)
    sys.path.insert(0, str(checkout / "src"))
    return importlib.import_module(f"kernelbench.{module}")


def check_text(step: argparse.Namespace) -> dict[str, Any]:
    checker = import_kernelbench(step.kernelbench, "kernel_static_checker")
    valid, errors, warnings = checker.validate_kernel_static(
        step.candidate.read_text("utf-8"), backend="cuda", precision="fp32"
    )
    return {"valid": valid, "errors": errors, "warnings": warnings}


def compile_candidate(step: argparse.Namespace) -> dict[str, Any]:
    start = time.perf_counter()
    exec(compile(step.candidate.read_text("utf-8"), "<candidate>", "exec"), {})
    return {"seconds": round(time.perf_counter() - start, 1)}


def evaluate(step: argparse.Namespace) -> dict[str, Any]:
    evaluation = import_kernelbench(step.kernelbench, "eval")
    result = evaluation.eval_kernel_against_ref(
        step.problem.read_text("utf-8"),
        step.candidate.read_text("utf-8"),
        seed_num=42,
        num_correct_trials=step.trials,
        num_perf_trials=step.timings,
        measure_performance=True,
        timing_method="cuda_event",
        build_dir=os.environ["TORCH_EXTENSIONS_DIR"],
        device=torch.device("cuda:0"),
        backend="cuda",
        precision=torch.float32,
    )
    if result is None:
        return {"failed": "KernelBench gave no result: it could not lock the build folder"}
    return {
        "compiled": result.compiled,
        "correct": result.correctness,
        "candidate": times(result.runtime_stats),
        "eager": times(result.ref_runtime_stats),
        "metadata": {key: str(value) for key, value in result.metadata.items()},
    }


def reference_time(step: argparse.Namespace) -> dict[str, Any]:
    timing = import_kernelbench(step.kernelbench, "timing")
    stats = timing.measure_ref_program_time(
        step.problem.name,
        step.problem.read_text("utf-8"),
        num_trials=step.timings,
        timing_method="cuda_event",
        use_torch_compile=step.step == "torch.compile",
        device=torch.device("cuda:0"),
        precision="fp32",
    )
    return times(stats) if stats else {"failed": "KernelBench could not time it"}


def times(stats: dict[str, Any]) -> dict[str, Any]:
    """KernelBench's statistics, in ms, without the names of the device."""
    return {key: value for key, value in stats.items() if key not in ("hardware", "device")}


STEPS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "check": check_text,
    "compile": compile_candidate,
    "evaluate": evaluate,
    "eager": reference_time,
    "torch.compile": reference_time,
}


def run_step(step: str, arguments: argparse.Namespace, folder: Path, problem: Path) -> Any:
    """A step's result, or why there is none; its process and those it started are ended in time."""
    answer, log = folder / f"{step}.{problem.stem}.json", folder / f"{step}.{problem.stem}.log"
    command = [
        sys.executable, __file__, str(arguments.spec), "--kernelbench", str(arguments.kernelbench),
        "--output", str(answer), "--step", step, "--problem", str(problem),
        "--candidate", str(folder / "candidate.py"),
        "--trials", str(arguments.trials), "--timings", str(arguments.timings),
    ]  # fmt: skip
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(folder / "extensions")}
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(arguments.limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if code == 0:
        return json.loads(answer.read_text("utf-8"))
    why = f"no end after {arguments.limit} s" if code is None else f"exit code {code}"
    tail = log.read_text("utf-8", errors="replace").splitlines()[-20:]
    print("\n".join([f"{step}, {problem.name}: {why}", *tail]), file=sys.stderr)
    return {"failed": why}


# ---- The run -----------------------------------------------------------------------------------


def run(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from circumstances import context

    from kgen.exporters.kernelbench import kernelbench_source

    spec = kgen.load_spec(arguments.spec)
    candidate = kernelbench_source(spec)
    (folder / "candidate.py").write_text(candidate, "utf-8")
    own = arguments.problem or (
        arguments.kernelbench / "KernelBench" / PROBLEM if spec.name == FLAGSHIP else None
    )
    problem = problem_of(spec) if own is None else own.read_text("utf-8")
    problems = {scale: folder / f"problem_{scale:g}.py" for scale in SCALES}
    for scale, path in problems.items():
        path.write_text(problem if scale == 1 else scaled(problem, scale), "utf-8")

    result: dict[str, Any] = context("kernelbench.py")
    result["command"] = (
        f"python benchmarks/kernelbench.py specs/{arguments.spec.name} --kernelbench DIR "
        f"--output benchmarks/results/{arguments.output.name}"
    )
    result |= {
        "kernelbench_commit": arguments.revision or commit_of(arguments.kernelbench),
        "name": spec.name,
        "spec_hash": spec.hash(),
        "problem": "written from the spec" if own is None else own.name,
        "problem_sha256": hashlib.sha256(problem.encode()).hexdigest(),
        "kernel_sha256": hashlib.sha256(render(spec)["kernel.cu"].encode()).hexdigest(),
        "candidate_sha256": hashlib.sha256(candidate.encode()).hexdigest(),
        "trials": {"correctness": arguments.trials, "time": arguments.timings},
        "unit": "ms",
    }
    plain = problems[1.0]
    result["check"] = run_step("check", arguments, folder, plain)
    result["compile"] = run_step("compile", arguments, folder, plain)
    result["scales"] = []
    for scale, path in problems.items():
        one = run_step("evaluate", arguments, folder, path)
        result["scales"].append({"scale": scale, **one})
    result["references"] = {
        row: run_step(row, arguments, folder, plain) for row in ("eager", "torch.compile")
    }
    return result


def commit_of(checkout: Path) -> str | None:
    """The checkout's commit; None for a plain folder, which may lie in another repository."""
    if not (checkout / ".git").exists():
        return None
    done = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "HEAD"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stdout.strip() or None


def table(result: dict[str, Any]) -> str:
    """What a reader wants to know first; times are means, as KernelBench reports them."""

    def mean(stats: dict[str, Any]) -> str:
        return f"{stats['mean']:.4g}" if "mean" in stats else "-"

    lines = [f"{result['name']} in KernelBench's eval, means of its {result['trials']['time']} "
             "timings in ms",
             f"{'inputs':>8}  {'correct':>8}  {'kgen':>8}  {'eager':>8}"]  # fmt: skip
    for one in result["scales"]:
        correct = one.get("failed") or ("yes" if one["correct"] else "NO")
        kernel, eager = mean(one.get("candidate", {})), mean(one.get("eager", {}))
        lines.append(
            f"{'x ' + format(one['scale'], 'g'):>8}  {correct:>8}  {kernel:>8}  {eager:>8}"
        )
    references = (f"{row} {mean(stats)}" for row, stats in result["references"].items())
    lines.append(f"references: {', '.join(references)}; static check: "
                 f"{'valid' if result['check'].get('valid') else 'NOT VALID'}")  # fmt: skip
    return "\n".join(lines)


def is_right(result: dict[str, Any]) -> bool:
    steps = [result["check"], result["compile"], *result["scales"], *result["references"].values()]
    return (
        not any("failed" in one for one in steps)
        and result["check"]["valid"]
        and all(one["correct"] for one in result["scales"])
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("spec", type=Path)
    parser.add_argument("--kernelbench", type=Path, required=True, help="a checkout")
    parser.add_argument("--revision", help="its commit, where it is no git checkout")
    parser.add_argument("--problem", type=Path, help="another reference problem")
    parser.add_argument("--trials", type=int, default=5, help="of correctness")
    parser.add_argument("--timings", type=int, default=100)
    parser.add_argument("--limit", type=int, default=240, help="seconds for each step")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--candidate", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.kernelbench = arguments.kernelbench.absolute()
    if arguments.step:
        answer = STEPS[arguments.step](arguments)
        arguments.output.write_text(json.dumps(answer))
        return
    with tempfile.TemporaryDirectory(prefix="kernelbench-") as name:
        result = run(arguments, Path(name))
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))
    sys.exit(0 if is_right(result) else 1)


if __name__ == "__main__":
    main()
