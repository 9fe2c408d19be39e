"""Times a fused kernel with one stage left out or changed, to show where its time goes.

    python benchmarks/stages.py specs/conv8x32_k3_gn8.yaml \\
        --output benchmarks/results/h200_stages.json

Each variant is the emitted kernel.cu with a few lines replaced. Those that leave a stage out give
wrong values and are only timed; those that keep the values are checked against fp64 first. Graph
replays, L2 not flushed. `--clocks` reads the clock in the kernel and tells, for one block, how many
clocks a warp of each role spent between the reads, which cost a few per cent themselves.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import kgen
from kgen.emit import render

# What is replaced, (old, new) each; `right` whether the values stay right.
Change = tuple[tuple[str, str], ...]

STAGES: dict[str, Change] = {
    "no waiting for statistics": (
        ("while (__any_sync(0xffffffffu, bits == kAbsent));", "while (false);"),
    ),
    "no storing": (
        (
            "          store_vector_streaming<kVecY>(target",
            "          if (v[one][0][0] == 1e30f) store_vector_streaming<kVecY>(target",
        ),
    ),
    "one product of three": (
        (
            "for (int i = 0; i < kProducts; ++i) {",
            "for (int i = kProducts - 1; i < kProducts; ++i) {",
        ),
        ("first && i == 0 && k == 0", "first && i == kProducts - 1 && k == 0"),
    ),
    "no low parts": (
        (
            "          store_pixels(parts[2 - kParts + order],",
            "          if (order + 1 == kParts) store_pixels(parts[2 - kParts + order],",
        ),
    ),
    "no prefetch": (
        ("    prefetch_to_l2(channel + i);", "    if (i < 0) prefetch_to_l2(channel + i);"),
    ),
}

SAME_VALUES: dict[str, Change] = {
    "as emitted": (),
    "prefetch two jobs ahead": (("kAhead = 1;", "kAhead = 2;"),),
}

ROLES = ("consumer 0", "consumer 1", "storer", "maker", "loader")
MARKS = {
    "consumer": (
        "x is there", "products issued", "products of the first part done", "-", "of the rest done",
        "chain and sums", "moments handed on", "place is free", "staged",
    ),
    "storer": ("tile there", "norms there", "stored"),
    "maker": ("statistics made", "statistics there", "norms there"),
    "loader": ("prefetched", "loads issued", "low place is free", "staged",
               "high place is free", "staged"),
}  # fmt: skip


def _mark(role: str, index: str, indent: int, condition: str = "") -> str:
    guard = f"if ({condition}) " if condition else ""
    return f"{' ' * indent}{guard}mark({role}, {index});\n"


def clock_reads() -> Change:
    """Replacements that read the clock at the ends of each role's steps."""
    wide, first = "threadIdx.x % 128 / 32 == 0", "threadIdx.x / 128"
    here = lambda text, mark, before=False: (text, mark + text if before else text + mark)  # noqa: E731
    return (
        here(
            "constexpr int kBatch = 8;",
            "__shared__ unsigned mark_spent[5 * 16], mark_last[5];\n"
            "__device__ __forceinline__ void mark(int role, int index) {\n"
            "  unsigned now;\n"
            '  asm volatile("mov.u32 %0, %%clock;" : "=r"(now)::"memory");\n'
            "  if (threadIdx.x % 32 == 0) {\n"
            "    mark_spent[role * 16 + index] += now - mark_last[role];\n"
            "    mark_last[role] = now;\n  }\n}\n\n",
            before=True,
        ),
        here("    products_begin();\n", _mark("consumer", "0", 4, wide), before=True),
        here(
            "  // Output rows of this thread inside", _mark("consumer", "1", 2, wide), before=True
        ),
        here(
            "    const int left = kMasked ?", _mark(first, "t == 0 ? 2 : 4", 4, wide), before=True
        ),
        here(
            "  if constexpr (kMoments) {\n#pragma unroll\n  ",
            _mark(first, "5", 2, wide),
            before=True,
        ),
        here(
            "    publish_moments(job, smem_sums, thread, workspace);\n",
            _mark("consumer", "6", 4, wide),
        ),
        here("    float* const out = ", _mark("consumer", "7", 4, wide), before=True),
        here(
            "    mbarrier_arrive(barriers.tile_full + consumer);  // (3)\n",
            _mark("consumer", "8", 4, wide),
        ),
        (
            "    mbarrier_wait(barriers.tile_full + consumer, parities >> consumer & 1);  // (3)\n",
            "    mbarrier_wait(barriers.tile_full + consumer, parities >> consumer & 1);  // (3)\n"
            + _mark("2", "0", 4, "storer == 0"),
        ),
        here(
            "    mbarrier_wait(barriers.norms_full + place, stored / 2 % 2);              // (5)\n",
            _mark("2", "1", 4, "storer == 0"),
        ),
        here(
            "    mbarrier_arrive(barriers.norms_empty + place);    // (6)\n",
            _mark("2", "2", 4, "storer == 0"),
        ),
        here("    float2 held[kHeld];", _mark("3", "0", 4), before=True),
        here("    const int place = made % 2;\n", _mark("3", "1", 4), before=True),
        here("    mbarrier_arrive(barriers.norms_full + place);  // (5)\n", _mark("3", "2", 4)),
        (
            "        load_pixels(x_n, job, chunk * kChunkC, batch, v);\n",
            _mark("4", "0", 8, wide)
            + "        load_pixels(x_n, job, chunk * kChunkC, batch, v);\n"
            + _mark("4", "1", 8, wide),
        ),
        (
            "          store_pixels(parts[2 - kParts + order], batch, smem + kXPartsAt + slot *"
            " kPartBytes);\n",
            _mark("4", "2 + 2 * order", 10, wide)
            + "          store_pixels(parts[2 - kParts + order], batch, smem + kXPartsAt + slot *"
            " kPartBytes);\n" + _mark("4", "3 + 2 * order", 10, wide),
        ),
        (
            "  fence_before_products();\n  __syncthreads();\n",
            "  fence_before_products();\n"
            "  if (threadIdx.x < 5 * 16) {\n    mark_spent[threadIdx.x] = 0;\n  }\n"
            "  if (threadIdx.x < 5) {\n"
            '    asm volatile("mov.u32 %0, %%clock;" : "=r"(mark_last[threadIdx.x])::"memory");\n'
            "  }\n  __syncthreads();\n",
        ),
    )


def changed(source: str, change: Change) -> str:
    """kernel.cu with the replacements made. Raises: SystemExit where a line is not there."""
    for old, new in change:
        if old not in source:
            raise SystemExit(f"the kernel has no line {old.strip()!r}")
        source = source.replace(old, new)
    return source


def with_clocks(source: str) -> str:
    """kernel.cu that prints what one block spent, a line a role."""
    body = changed(source, clock_reads()).rstrip().removesuffix("}")
    return body + (
        "  __syncthreads();\n  if (threadIdx.x == 0 && blockIdx.x == 5) {\n"
        "    for (int i = 0; i < 5 * 16; ++i) {\n"
        '      printf("%s%u%s", i % 16 ? "" : "mark: ", mark_spent[i],\n'
        '             i % 16 == 15 ? "\\n" : " ");\n'
        "    }\n  }\n}\n"
    )


def variants(spec: kgen.Spec) -> dict[str, str]:
    """kernel.cu of each variant."""
    source = render(spec)["kernel.cu"]
    changes = {**SAME_VALUES, **STAGES}
    return {name: changed(source, change) for name, change in changes.items()}


def main() -> None:
    import torch
    from circumstances import context

    from kgen.bench.cuda import CudaTimer, graphed
    from kgen.bench.run import errors
    from kgen.bench.timing import time_rounds
    from kgen.package import import_package
    from kgen.reference import draw

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("spec", type=Path)
    parser.add_argument("--clocks", action="store_true", help="print the clocks of each role too")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    spec = kgen.load_spec(arguments.spec)
    text = render(spec)
    x, parameters = draw(spec, spec.problem.batch, "uniform", 0, "cuda")
    rows: dict[str, dict[str, object]] = {}

    def package_of(source: str):
        folder = Path(tempfile.mkdtemp()) / spec.name
        folder.mkdir()
        for file, body in {**text, "kernel.cu": source}.items():
            (folder / file).write_text(body)
        package = import_package(folder)
        ordered = [parameters[key] for key in package.PARAMETERS]
        return lambda: package.fused_block(x, *ordered)

    with torch.no_grad():
        for name, source in variants(spec).items():
            call = package_of(source)
            row: dict[str, object] = {}
            if name in SAME_VALUES:
                row["max_error"], row["rms_error"] = errors(spec, call(), x, parameters)
            replay = graphed(call)
            calls = {name: lambda _, replay=replay: replay()}
            times = time_rounds(calls, CudaTimer("cuda"), cold=False, seconds=2.0)[name]
            rows[name] = {**row, **times.to_dict()}
            print(f"{name:28} {times.median:.4f} ms  {row}", flush=True)
        if arguments.clocks:
            for number, role in enumerate(ROLES):
                print(f"mark {number} is {role}: {', '.join(MARKS[role.split()[0]])}")
            for name, change in SAME_VALUES.items():
                print(f"clocks of {name}:", flush=True)
                package_of(with_clocks(changed(text["kernel.cu"], change)))()
                torch.cuda.synchronize()
    record = {**context("stages.py"), "spec": arguments.spec.name, "spec_hash": spec.hash()}
    arguments.output.write_text(json.dumps({**record, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
