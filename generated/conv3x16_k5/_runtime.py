"""Loads and launches the kernels of an emitted package on torch tensors.

This file is copied, byte for byte, into every emitted package as `_runtime.py`: it imports
nothing of kgen. Needs torch, and cuda-bindings once something is launched.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ._calls import UsualCalls
from ._launching import (
    Launch,
    LaunchError,
    check_size,
    checked,
    current_device,
    current_stream,
    empty_output,
    most_samples,
)

_STATIC_SMEM_LIMIT = 49152  # bytes of shared memory a block gets without opting in
_DENSE = (torch.Tensor, torch.nn.Parameter)  # subclasses may mean something else by their data


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
        # In the order in which the torch op takes them.
        self.parameter_shapes = {key: tuple(shape) for key, shape in manifest["parameters"].items()}
        self._shapes = [torch.Size(shape) for shape in self.parameter_shapes.values()]
        # Read now: the folder may be emitted anew before the first launch.
        self.source = (folder / "kernel.cu").read_text("utf-8")
        output = manifest["output"]
        self.output = (output["C_out"], output["P"], output["Q"])
        plane = output["P"] * output["Q"]
        self._strides = (output["C_out"] * plane, plane, output["Q"], 1)
        self.workspace_fixed: int = manifest["workspace_floats"]
        self.workspace_per_sample: int = manifest["workspace_floats_per_sample"]
        self.x_alignment: int = manifest["x_alignment"]
        self._compile_source = compile_source
        self._convolution: dict[str, list[int]] | None = manifest["convolution"]
        self._launches: list[dict[str, Any]] = manifest["launches"]
        self._most = min(most_samples(launch) for launch in self._launches)
        # What launches take their arguments from, by name.
        self._values = ("x", *self.parameter_shapes, "y", "workspace", "conv_out", "N")
        self._lock = threading.Lock()
        # device index -> kernel of each launch and the device's SMs
        self._ready: dict[int, list[tuple[Any, int]]] = {}
        # Of each thread: launches by device, see Launch, and workspaces by (device, stream).
        self._mine = threading.local()
        self._usual = UsualCalls(dynamic=self.batch is None)

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
            resizable = x.dim() == 4 and given[1] == self.sample[0]
            other = ', or load the block with kgen.load(..., on_mismatch="regenerate")'
            raise ValueError(
                f"{self.name}: x has shape {given}, this block was built for ({expected}). Change "
                f"the spec's problem and run `kgen emit` again{other if resizable else ''}"
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

    def again(self, *tensors: Any) -> torch.Tensor | None:
        """`forward` for a call of a kind that was seen before; None for any other.

        tensors: x and the parameters, or None where a parameter is not to be had. Raises:
        LaunchError.
        """
        if not self._usual.has(tensors):
            return None
        return self._run(tensors)

    def first(self, *tensors: Any) -> torch.Tensor | None:
        """`forward` for a call that needs no torch op; None if something must be done to a tensor.

        It looks at all that `check` looks at, and at strides. Raises: LaunchError.
        """
        x = tensors[0]
        N = self.batch or (x.shape[0] if x.dim() == 4 else 0)
        shapes = (torch.Size((N, *self.sample)), *self._shapes)
        if not N or self._convolution is not None:
            return None
        for one, wanted in zip(tensors, shapes, strict=True):
            if (
                type(one) not in _DENSE
                or one.layout is not torch.strided
                or one.dtype is not torch.float32
                or one.shape != wanted
                or not one.is_cuda
                or one.device != x.device
                or not one.is_contiguous()
                or one.is_neg()  # its memory holds the negative
            ):
                return None
        y = self._run(tensors)
        self._usual.add(tensors)
        return y

    def _run(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """The launches on tensors that are as the kernels read them; None if x is misaligned."""
        x = tensors[0]
        device, N = x.get_device(), self.batch or x.shape[0]
        addresses = [one.data_ptr() for one in tensors]
        if not N or addresses[0] % self.x_alignment:
            return None
        if current_device() != device:
            with torch.cuda.device(device):
                return self._run(tensors)
        y = empty_output((N, *self.output), self._strides)
        stream = current_stream(device)
        addresses += (y.data_ptr(), self._workspace(x, N, device, stream).data_ptr(), 0, N)
        self._launch_all(N, device, stream, addresses)
        return y

    def _workspace(self, x: torch.Tensor, N: int, device: int, stream: int) -> torch.Tensor:
        """This thread's workspace for a stream.

        Calls of one thread on one stream follow each other, so they may share it. Those of two
        threads may not: their launches mix. Nor may a graph's, which replay on any stream.
        """
        if torch.cuda.is_current_stream_capturing():
            return x.new_empty(self.workspace_floats(N))
        mine: dict[Any, Any] = self._mine.__dict__
        floats, found = mine.get((device, stream), (0, None))
        wanted = self.workspace_fixed + N * self.workspace_per_sample
        if found is None or floats < wanted:
            found = x.new_empty(wanted)
            mine[device, stream] = wanted, found
        workspace: torch.Tensor = found
        return workspace

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
            given = {key: one.data_ptr() for key, one in tensors.items()} | {"N": N}
            device = x.get_device()
            values = [given.get(key, 0) for key in self._values]
            self._launch_all(N, device, current_stream(device), values)
        return y

    def workspace_floats(self, N: int) -> int:
        """Floats of workspace that a batch of N needs."""
        return self.workspace_fixed + N * self.workspace_per_sample

    def _launch_all(self, N: int, device: int, stream: int, values: Sequence[int]) -> None:
        """All launches on a stream. values: an address, or N, for each of `_values`."""
        if self._most < N:  # before the first of them runs
            for launch in self._launches:
                check_size(launch, N)
        mine: dict[Any, Any] = self._mine.__dict__
        for one in mine.get(device) or self._prepare(device):
            one.start(N, values, stream)

    def _prepare(self, device: int) -> list[Launch]:
        """This thread's launches for a device, with its context made current."""
        self._bind(device)
        found = self._ready.get(device)
        if found is None:
            with self._lock:
                found = self._ready.get(device) or self._load(device)
                self._ready[device] = found
        prepared = [
            Launch(launch, kernel, sms, [self._values.index(one) for one in launch["arguments"]])
            for launch, (kernel, sms) in zip(self._launches, found, strict=True)
        ]
        mine: dict[Any, Any] = self._mine.__dict__
        mine[device] = prepared
        return prepared

    def _bind(self, device: int) -> None:
        """Make the device's primary context current: a fresh thread may have none yet."""
        from cuda.bindings import driver

        torch.cuda.current_stream(device)  # torch initialises CUDA and the primary context
        current = checked(driver.cuCtxGetCurrent(), f"{self.name}: cuCtxGetCurrent")
        if int(current) == 0:
            handle = checked(driver.cuDeviceGet(device), f"{self.name}: cuDeviceGet")
            context = checked(driver.cuDevicePrimaryCtxRetain(handle), f"{self.name}: context")
            checked(driver.cuCtxSetCurrent(context), f"{self.name}: cuCtxSetCurrent")

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
        library = checked(
            driver.cuLibraryLoadData(cubin, [], [], 0, [], [], 0), f"{self.name}: loading the cubin"
        )
        handle = checked(driver.cuDeviceGet(device), f"{self.name}: cuDeviceGet")
        kernels = []
        for launch in self._launches:
            name, threads, smem = launch["kernel"], launch["threads"], launch["smem_bytes"]
            kernel = checked(driver.cuLibraryGetKernel(library, name.encode()), f"{name}: lookup")
            attribute = driver.CUfunction_attribute
            most = checked(
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
                checked(
                    driver.cuKernelSetAttribute(dynamic, smem, kernel, handle),
                    f"{name}: opting in to {smem} bytes of shared memory",
                )
            kernels.append((driver.CUfunction(int(kernel)), sms))
        return kernels


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
