"""Records what another version of NVRTC makes of two small blocks, for tests/test_simulator_ptx.py.

    python tests/ptx/make.py FOLDER_OF_LIBNVRTC sm_90a sm_120

FOLDER_OF_LIBNVRTC is the `lib` folder of an unpacked nvidia-cuda-nvrtc wheel. Each record holds the
spec, the launches of its plan and the PTX, without line information.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
from dataclasses import asdict
from pathlib import Path

from kgen.emit import render
from kgen.plan import make_plan
from kgen.spec import load_spec

SPEC = {
    "version": 1,
    "name": "recorded",
    "problem": {
        "batch": 2, "in_channels": 3, "out_channels": 6, "height": 11, "width": 37,
        "kernel_size": 3, "padding": 1,
    },
    "chain": [{"add": "bias"}, {"mul": "scale"}, "sigmoid", {"group_norm": {"num_groups": 3}}],
}  # fmt: skip
SCHEDULES = {
    "two_kernel": {"strategy": "two_kernel", "tile_h": 4, "tile_w": 32, "tile_k": 4, "tile_c": 2,
                   "pixels": 2, "threads": 64},
    "hybrid": {"strategy": "hybrid", "threads": 64},
}  # fmt: skip


def load_nvrtc(folder: Path) -> ctypes.CDLL:
    builtins = sorted(folder.glob("libnvrtc-builtins.so*"))[0]
    ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(sorted(folder.glob("libnvrtc.so*"))[0]))


def compile_ptx(nvrtc: ctypes.CDLL, source: str, arch: str) -> str:
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    options = [f"--gpu-architecture={arch}".encode(), b"--std=c++17"]
    listed = (ctypes.c_char_p * len(options))(*options)
    created = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None
    )
    if created or nvrtc.nvrtcCompileProgram(program, len(options), listed):
        raise SystemExit(f"NVRTC failed for {arch}")
    nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetPTX(program, text)
    return text.value.decode()


def main() -> None:
    nvrtc = load_nvrtc(Path(sys.argv[1]))
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    version = f"{major.value}.{minor.value}"
    for strategy, schedule in SCHEDULES.items():
        values = {**SPEC, "schedule": schedule}
        spec = load_spec(values)
        plan = make_plan(spec)
        for arch in sys.argv[2:]:
            ptx = compile_ptx(nvrtc, render(spec, plan)["kernel.cu"], arch)
            ptx = re.sub(r"(?m)^\.global \.align \d+ \.u(?:8|32) k\w+( = \d+)?;\n", "", ptx)
            record = {
                "nvrtc": version,
                "arch": arch,
                "spec": values,
                "launches": [asdict(one) for one in plan.launches],
                "workspace_per_sample": plan.workspace_per_sample,
                "ptx": ptx.splitlines(),
            }
            path = Path(__file__).parent / f"nvrtc_{version}_{strategy}_{arch}.json"
            path.write_text(json.dumps(record, indent=0) + "\n")
            print(path.name, len(ptx))


if __name__ == "__main__":
    main()
