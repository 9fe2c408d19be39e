"""Runs the emitted kernels of shipped specs under compute-sanitizer and records the verdicts.

    python benchmarks/sanitize.py specs/*.yaml --output benchmarks/results/h200_sanitizer.json

One process a tool launches every spec, and with --shapes the first one in all shapes of
shapes.py, with every strategy that fits it, a few samples at full size, through the driver API
alone: no library's kernels run, each tensor is an allocation of its own, and every input byte is
known to be written (the hybrid kernel gets random data for the convolution's output).
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from shapes import SHAPES, shaped

import kgen
from kgen._launching import grid
from kgen.build import compile_kernel
from kgen.constraints import check
from kgen.emit import make_manifest, render
from kgen.spec import STRATEGIES

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
DYNAMIC_BATCH = 3
MOST_SAMPLES = 3  # of a fixed batch: every sample takes the same path
SHAPE = "="  # path=shape: one of shapes.SHAPES of the spec in that file


def variant(case: str, strategy: str) -> kgen.Spec:
    path, _, shape = case.partition(SHAPE)
    spec = kgen.load_spec(path)
    return (shaped(spec, shape) if shape else spec).with_strategy(strategy)


def label(case: str, strategy: str) -> str:
    """A word: `conv8x32_k3_gn8.yaml=batch_8,recompute`."""
    return f"{Path(case).name},{strategy}".replace(" ", "_")


def pairs(cases: list[str]) -> list[tuple[str, str]]:
    """Cases and the strategies that fit them, a block that several of them share only once."""
    found: dict[kgen.Spec, tuple[str, str]] = {}
    for case in cases:
        for strategy in STRATEGIES:
            spec = variant(case, strategy)
            if not check(spec):
                found.setdefault(spec.model_copy(update={"name": "block"}), (case, strategy))
    return list(found.values())


def kernel_digest(spec: kgen.Spec) -> str:
    return hashlib.sha256(render(spec)["kernel.cu"].encode()).hexdigest()


def call(result):
    status, *values = result
    if int(status):
        raise SystemExit(f"driver: {status.name}")
    return values[0] if values else None


def sizes(spec: kgen.Spec, manifest: dict, N: int) -> dict[str, int]:
    """Floats of every tensor that a launch may name."""
    g, C_out = kgen.make_plan(spec).g, spec.problem.out_channels
    return {
        "x": N * g.x_elements,
        "conv.weight": C_out * g.taps,
        "y": N * g.y_elements,
        "conv_out": N * g.y_elements,
        "workspace": max(
            1, manifest["workspace_floats"] + N * manifest["workspace_floats_per_sample"]
        ),
        **dict.fromkeys(("conv.bias", *spec.parameters), C_out),
        "group_norm.weight": C_out,
        "group_norm.bias": C_out,
    }


def launch_once(case: str, strategy: str) -> None:
    """Launch all kernels of one package on random data and check that y is finite."""
    from cuda.bindings import driver

    spec = variant(case, strategy)
    plan = kgen.make_plan(spec)
    manifest = make_manifest(spec, plan)
    N = min(plan.g.N or DYNAMIC_BATCH, MOST_SAMPLES)
    cubin = compile_kernel(render(spec)["kernel.cu"], "sm_90a").cubin
    library = call(driver.cuLibraryLoadData(cubin, [], [], 0, [], [], 0))
    device = call(driver.cuDeviceGet(0))
    count_of_sms = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
    sms = call(driver.cuDeviceGetAttribute(count_of_sms, device))
    rng = np.random.default_rng(0)
    memory = {}
    count = sizes(spec, manifest, N)
    for name in {one for launch in manifest["launches"] for one in launch["arguments"]} - {"N"}:
        memory[name] = call(driver.cuMemAlloc(4 * count[name]))
        if name not in ("y", "workspace"):
            host = rng.random(count[name], dtype=np.float32)
            call(driver.cuMemcpyHtoD(memory[name], host.ctypes.data, host.nbytes))
    for launch in manifest["launches"]:
        kernel = call(driver.cuLibraryGetKernel(library, launch["kernel"].encode()))
        if launch["smem_bytes"] > 49152:
            opt_in = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            call(driver.cuKernelSetAttribute(opt_in, launch["smem_bytes"], kernel, device))
        names = launch["arguments"]
        values = tuple(N if name == "N" else int(memory[name]) for name in names)
        types = tuple(ctypes.c_int if name == "N" else ctypes.c_void_p for name in names)
        function, size = driver.CUfunction(int(kernel)), grid(launch, N, sms)
        shape = (size, 1, 1, launch["threads"], 1, 1, launch["smem_bytes"], 0)
        if launch["team"] is None:
            call(driver.cuLaunchKernel(function, *shape, (values, types), 0))
        else:
            call(driver.cuLaunchCooperativeKernel(function, *shape, (values, types)))
    call(driver.cuCtxSynchronize())
    y = np.empty(count["y"], dtype=np.float32)
    call(driver.cuMemcpyDtoH(y.ctypes.data, memory["y"], y.nbytes))
    for one in memory.values():
        call(driver.cuMemFree(one))
    print(f"ran {label(case, strategy)} finite={bool(np.isfinite(y).all())}", flush=True)


def child(cases: list[str]) -> None:
    from cuda.bindings import driver

    call(driver.cuInit(0))
    context = call(driver.cuDevicePrimaryCtxRetain(call(driver.cuDeviceGet(0))))
    call(driver.cuCtxSetCurrent(context))
    for case, strategy in pairs(cases):
        launch_once(case, strategy)


def run(tool: str, cases: list[str], seconds: float) -> dict[str, object]:
    command = [
        "compute-sanitizer", "--tool", tool, "--error-exitcode", "9",
        sys.executable, __file__, "--child", *cases,
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
        output, code = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as late:
        output, code = (late.stdout or b"").decode(), 124
    ran = re.findall(r"ran (\S+) finite=(\w+)", output)
    summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", output)
    complete = len(ran) == len(pairs(cases)) and all(finite == "True" for _, finite in ran)
    result: dict[str, object] = {
        "tool": tool,
        "clean": code == 0 and complete and bool(summary),
        "exit_code": code,
        "summary": summary,
        "ran": [name for name, _ in ran],
    }
    if not result["clean"]:
        result["output"] = output[-2000:]
    return result


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("specs", nargs="+")
    parser.add_argument("--shapes", action="store_true", help="other shapes of the first spec too")
    parser.add_argument("--seconds", type=float, default=150, help="limit for one tool")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    cases = list(arguments.specs)
    if arguments.shapes:
        cases += [f"{cases[0]}{SHAPE}{shape}" for shape in SHAPES]
    with ThreadPoolExecutor() as pool:  # into the cache, outside the sanitizer
        sources = [render(variant(*pair))["kernel.cu"] for pair in pairs(cases)]
        list(pool.map(lambda source: compile_kernel(source, "sm_90a"), sources))
        results = list(pool.map(lambda tool: run(tool, cases, arguments.seconds), TOOLS))
    from circumstances import context  # brings torch, which the children do without

    digests = {label(*pair): kernel_digest(variant(*pair)) for pair in pairs(cases)}
    record = {**context("sanitize.py"), "kernel_sha256": digests, "results": results}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(record, indent=1) + "\n")
    for one in results:
        print(
            one["tool"], "clean" if one["clean"] else "NOT CLEAN", one["summary"], len(one["ran"])
        )
        if not one["clean"]:
            print(one["output"])


if __name__ == "__main__":
    main()
