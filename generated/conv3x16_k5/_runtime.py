"""Loads and launches the kernels of an emitted package on torch tensors.

This file is copied, byte for byte, into every emitted package as `_runtime.py`: it imports
nothing of kgen. Needs torch, and cuda-bindings once something is launched.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

_JOB_SLACK = 1 << 16  # numbers of jobs that a block adds before it compares
_STATIC_SMEM_LIMIT = 49152  # bytes of shared memory a block gets without opting in


class LaunchError(RuntimeError):
    """A kernel could not be loaded or launched. The message names the kernel and the reason."""


class Block:
    """The launches of one emitted package, on any number of devices and threads.

    folder: of the package, with kernel.cu and, after `kgen build`, cubins. manifest: its content.
    compile_source: turns (source, arch) into an object with a `cubin`; called where no built cubin
    fits the device.
    """

    def __init__(
        self,
        folder: Path,
        manifest: dict[str, Any],
        compile_source: Callable[..., Any],
    ) -> None:
        self.folder = folder
        self.manifest = manifest
        self.name: str = manifest["name"]
        problem = manifest["spec"]["problem"]
        self.batch: int | None = None if problem["batch"] == "dynamic" else problem["batch"]
        self.sample = (problem["in_channels"], problem["height"], problem["width"])
        self.parameter_shapes = {key: tuple(shape) for key, shape in manifest["parameters"].items()}
        # Read now: the folder may be emitted anew before the first launch.
        self.source = (folder / "kernel.cu").read_text("utf-8")
        output = manifest["output"]
        self.output = (output["C_out"], output["P"], output["Q"])
        self.workspace_fixed: int = manifest["workspace_floats"]
        self.workspace_per_sample: int = manifest["workspace_floats_per_sample"]
        self.x_alignment: int = manifest["x_alignment"]
        self._compile_source = compile_source
        self._convolution: dict[str, list[int]] | None = manifest["convolution"]
        self._launches: list[dict[str, Any]] = manifest["launches"]
        self._lock = threading.Lock()
        # device index -> kernel of each launch and the device's SMs
        self._ready: dict[int, list[tuple[Any, int]]] = {}
        self._bound = threading.local()  # devices whose context this thread has made current

    def check(self, x: torch.Tensor, parameters: dict[str, torch.Tensor]) -> None:
        """Refuse what the kernels were not built for, before anything is launched.

        x: [N, C_in, H, W] float32, any strides. An empty batch is always right.
        Raises: ValueError (shape, device) or TypeError (dtype, layout), naming given and expected.
        """
        given = tuple(x.shape)
        batch_fits = self.batch is None or (x.dim() == 4 and given[0] in (0, self.batch))
        if x.dim() != 4 or given[1:] != self.sample or not batch_fits:
            expected = ", ".join(
                map(str, ("N" if self.batch is None else self.batch, *self.sample))
            )
            raise ValueError(
                f"{self.name}: x has shape {given}, this block was built for ({expected}). Change "
                "the spec's problem and run `kgen emit` again, or load the block with "
                'kgen.load(..., on_mismatch="regenerate")'
            )
        for label, shape in self.parameter_shapes.items():
            if tuple(parameters[label].shape) != shape:
                given = tuple(parameters[label].shape)
                raise ValueError(f"{self.name}: {label} has shape {given}, built for {shape}")
        for label, tensor in (("x", x), *parameters.items()):
            if tensor.dtype != torch.float32:
                raise TypeError(f"{self.name}: {label} is {tensor.dtype}, built for torch.float32")
            if tensor.layout != torch.strided:
                raise TypeError(f"{self.name}: {label} is {tensor.layout}, built for torch.strided")
            if tensor.device != x.device:
                raise ValueError(f"{self.name}: {label} is on {tensor.device}, x on {x.device}")

    def forward(self, x: torch.Tensor, parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        """The block on a CUDA device: a new contiguous [N, C_out, P, Q] tensor.

        Runs on x's device and torch's current stream there, without synchronising. Inputs that
        are not contiguous are copied first. Raises: what `check` raises, and LaunchError.
        """
        self.check(x, parameters)
        if x.shape[0] == 0:
            return x.new_empty((0, *self.output))
        return self.launch(x, parameters)

    def launch(
        self,
        x: torch.Tensor,
        parameters: dict[str, torch.Tensor],
        y: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`forward` after its checks, into tensors of the caller's if given.

        y: contiguous [N, C_out, P, Q], 16-byte aligned; workspace: at least
        `workspace_floats(N)` floats, 16-byte aligned. Raises: LaunchError.
        """
        N = x.shape[0]
        with torch.cuda.device(x.device):
            tensors = {key: one.contiguous() for key, one in parameters.items()}
            tensors["x"] = x = x.contiguous()
            if x.data_ptr() % self.x_alignment:
                tensors["x"] = x.clone(memory_format=torch.contiguous_format)
            if self._convolution is not None:
                conv_out = library_convolution(
                    tensors["x"], tensors["conv.weight"], **self._convolution
                )
                tensors["conv_out"] = conv_out
                y = conv_out if y is None else y  # in place, unless the caller wants it elsewhere
            if y is None:
                y = x.new_empty((N, *self.output))
            if workspace is None:
                workspace = x.new_empty(self.workspace_floats(N))
            tensors["y"], tensors["workspace"] = y, workspace
            for label in ("y", "workspace"):
                if tensors[label].data_ptr() % 16 or not tensors[label].is_contiguous():
                    raise LaunchError(f"{self.name}: {label} must be contiguous, 16-byte aligned")
            self._launch_all(N, x.device.index, tensors)
        return y

    def workspace_floats(self, N: int) -> int:
        """Floats of workspace that a batch of N needs."""
        return self.workspace_fixed + N * self.workspace_per_sample

    def _launch_all(self, N: int, device: int, tensors: dict[str, torch.Tensor]) -> None:
        from cuda.bindings import driver

        for launch in self._launches:  # before the first of them runs
            _check_size(launch, N)
        kernels = self._kernels(device)
        stream = torch.cuda.current_stream(device).cuda_stream
        for (kernel, sms), launch in zip(kernels, self._launches, strict=True):
            names, threads, smem = launch["arguments"], launch["threads"], launch["smem_bytes"]
            # Every argument fills 8 bytes; a kernel's int reads the low half of its own.
            values = (ctypes.c_uint64 * len(names))(
                *(N if name == "N" else tensors[name].data_ptr() for name in names)
            )
            base, size = ctypes.addressof(values), ctypes.sizeof(ctypes.c_uint64)
            pointers = (ctypes.c_void_p * len(names))(
                *(base + index * size for index in range(len(names)))
            )
            blocks = grid(launch, N, sms)
            what = (
                f"{launch['kernel']}: launch of {blocks} blocks x {threads} threads, {smem} bytes "
                "of shared memory"
            )
            parameters = ctypes.addressof(pointers)
            if launch["team"] is None:
                _check(
                    driver.cuLaunchKernel(
                        kernel, blocks, 1, 1, threads, 1, 1, smem, stream, parameters, 0
                    ),
                    what,
                )
            else:
                _check(
                    driver.cuLaunchCooperativeKernel(
                        kernel, blocks, 1, 1, threads, 1, 1, smem, stream, parameters
                    ),
                    f"{what}, all resident",
                )

    def _kernels(self, device: int) -> list[tuple[Any, int]]:
        """The loaded kernels for a device, with this thread's context made current."""
        if device not in getattr(self._bound, "devices", ()):
            self._bind(device)
        found = self._ready.get(device)
        if found is None:
            with self._lock:
                found = self._ready.get(device) or self._load(device)
                self._ready[device] = found
        return found

    def _bind(self, device: int) -> None:
        """Make the device's primary context current: a fresh thread may have none yet."""
        from cuda.bindings import driver

        torch.cuda.current_stream(device)  # torch initialises CUDA and the primary context
        current = _check(driver.cuCtxGetCurrent(), f"{self.name}: cuCtxGetCurrent")
        if int(current) == 0:
            handle = _check(driver.cuDeviceGet(device), f"{self.name}: cuDeviceGet")
            context = _check(driver.cuDevicePrimaryCtxRetain(handle), f"{self.name}: context")
            _check(driver.cuCtxSetCurrent(context), f"{self.name}: cuCtxSetCurrent")
        self._bound.devices = {*getattr(self._bound, "devices", ()), device}

    def _load(self, device: int) -> list[tuple[Any, int]]:
        from cuda.bindings import driver

        major, minor = torch.cuda.get_device_capability(device)
        properties: Any = torch.cuda.get_device_properties(device)
        limit = properties.shared_memory_per_block_optin
        sms: int = properties.multi_processor_count
        for launch in self._launches:
            name, smem, team = launch["kernel"], launch["smem_bytes"], launch["team"]
            if team is not None and team["least"] > sms:
                raise LaunchError(
                    f"{name}: a sample must stay on the chip, which takes {team['least']} SMs; "
                    f"this GPU has {sms}. Emit it with strategy recompute or two_kernel"
                )
            if smem > limit:
                raise LaunchError(
                    f"{name}: a block needs {smem} bytes of shared memory, this GPU (compute "
                    f"capability {major}.{minor}) has {limit}; emit it for this target"
                )
        cubin = find_cubin(self.folder, self.source, (major, minor))
        if cubin is None:
            build = self._compile_source(
                self.source, native_arch(major, minor), version=self.manifest["kgen_version"]
            )
            cubin = build.cubin
        library = _check(
            driver.cuLibraryLoadData(cubin, [], [], 0, [], [], 0), f"{self.name}: loading the cubin"
        )
        handle = _check(driver.cuDeviceGet(device), f"{self.name}: cuDeviceGet")
        kernels = []
        for launch in self._launches:
            name, threads, smem = launch["kernel"], launch["threads"], launch["smem_bytes"]
            kernel = _check(driver.cuLibraryGetKernel(library, name.encode()), f"{name}: lookup")
            attribute = driver.CUfunction_attribute
            most = _check(
                driver.cuKernelGetAttribute(
                    attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, kernel, handle
                ),
                f"{name}: attributes",
            )
            if threads > most:
                raise LaunchError(
                    f"{name}: {threads} threads a block need more registers than this GPU has; "
                    f"its registers allow {most}"
                )
            if smem > _STATIC_SMEM_LIMIT:
                dynamic = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                _check(
                    driver.cuKernelSetAttribute(dynamic, smem, kernel, handle),
                    f"{name}: opting in to {smem} bytes of shared memory",
                )
            kernels.append((driver.CUfunction(int(kernel)), sms))
        return kernels


def _check_size(launch: dict[str, Any], N: int) -> None:
    """Refuse a batch whose blocks or jobs cannot be numbered in 32 bits. Raises: LaunchError."""
    name, team = launch["kernel"], launch["team"]
    if team is not None:
        jobs = N * team["jobs_per_sample"]
        if jobs >= 2**31 - _JOB_SLACK:
            raise LaunchError(
                f"{name}: a batch of {N} has {jobs} jobs, a launch takes {2**31 - _JOB_SLACK - 1}"
            )
        return
    blocks = launch["blocks"] + N * launch["blocks_per_sample"]
    if blocks >= 2**31:
        raise LaunchError(
            f"{name}: a batch of {N} needs {blocks} blocks, a launch takes {2**31 - 1}"
        )


def grid(launch: dict[str, Any], N: int, sms: int) -> int:
    """Blocks of a launch for a batch of N on a GPU with so many SMs.

    A team's blocks are resident together, one an SM. Where it is `aligned`, as many as let the
    jobs that wait for each other take whole rounds of the grid.
    """
    team = launch["team"]
    if team is None:
        return int(launch["blocks"] + N * launch["blocks_per_sample"])
    jobs = team["unit_jobs"]
    if not team["aligned"]:
        return sms
    return int(sms // jobs * jobs if jobs <= sms else -(-jobs // -(-jobs // sms)))


def library_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    padding: list[int],
    stride: list[int],
    dilation: list[int],
) -> torch.Tensor:
    """cuDNN's convolution in true fp32, whatever torch's TF32 flags say: contiguous NCHW.

    padding: [left, right, top, bottom]. Without bias: torch would add it in a pass over memory of
    its own, the fused kernel adds it for nothing.
    """
    left, right, top, bottom = padding
    if left != right or top != bottom:
        x = torch.nn.functional.pad(x, (left, right, top, bottom))
        left = top = 0
    return torch.cudnn_convolution(
        x, weight, padding=(top, left), stride=stride, dilation=dilation, groups=1,
        benchmark=False, deterministic=True, allow_tf32=False,
    ).contiguous()  # fmt: skip


def native_arch(major: int, minor: int) -> str:
    """The compilation target of a device: with the architecture's own instructions from 9.0 on."""
    return f"sm_{major}{minor}{'a' if major >= 9 and major < 12 else ''}"


def find_cubin(folder: Path, kernel: str, capability: tuple[int, int]) -> bytes | None:
    """A cubin in `folder`, built from the source `kernel`, that runs on the device; or None.

    The exact architecture first, then the nearest older one of the same major version; targets
    with an `a` run only on their own. Raises: LaunchError if a cubin is damaged or was built from
    another source.
    """
    try:
        record = json.loads((folder / "build.json").read_text("utf-8"))
        builds: dict[str, Any] = dict(record["builds"])
        source_digest: str = record["source_sha256"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        raise LaunchError(f"{folder / 'build.json'}: is damaged; run `kgen build` again") from None
    source = hashlib.sha256(kernel.encode()).hexdigest()
    major, minor = capability
    native = native_arch(major, minor)
    older = [f"sm_{major}{below}" for below in range(minor, -1, -1)]
    for arch in dict.fromkeys([native, *older]):
        built = builds.get(arch)
        if built is None:
            continue
        if source_digest != source:
            raise LaunchError(
                f"{folder}: kernel.cu changed since its cubins were built; run `kgen build` again"
            )
        try:
            cubin: bytes = (folder / built["file"]).read_bytes()
            intact = hashlib.sha256(cubin).hexdigest() == built["sha256"]
        except (OSError, KeyError, TypeError):
            intact = False
        if not intact:
            raise LaunchError(
                f"{folder}: its {arch} cubin is missing or damaged; run `kgen build` again"
            )
        return cubin
    return None


def _check(result: Sequence[Any], what: str) -> Any:
    """The value of a driver call. Raises: LaunchError with the driver's name and text."""
    status, *values = result
    if int(status) != 0:
        from cuda.bindings import driver

        _, text = driver.cuGetErrorString(status)
        reason = text.decode() if isinstance(text, bytes) else str(text)
        raise LaunchError(f"{what}: {status.name} ({reason})")
    return values[0] if values else None
