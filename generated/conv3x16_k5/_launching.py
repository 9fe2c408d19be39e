"""Launches kernels through the driver, each with its return code checked.

This file is copied, byte for byte, into every emitted package: it imports nothing of kgen. Needs
torch, and cuda-bindings once something is launched.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import torch

_MOST_BLOCKS = 2**31 - 1
_MOST_JOBS = 2**31 - (1 << 16) - 1  # a block adds to a job's number before it compares


class LaunchError(RuntimeError):
    """A kernel could not be loaded or launched. The message names the kernel and the reason."""


class Launch:
    """One of a block's launches, for one thread and one device, with memory for its arguments.

    facts: of the manifest. sms: of the device. places: where among a block's values the arguments
    are. Two threads must not share one: the driver reads the arguments while it launches.
    """

    def __init__(self, facts: dict[str, Any], kernel: Any, sms: int, places: list[int]) -> None:
        from cuda.bindings import driver

        self._name, self._kernel = facts["kernel"], kernel
        self._threads, self._smem = facts["threads"], facts["smem_bytes"]
        self._places = places
        # Every argument fills 8 bytes; a kernel's int reads the low half of its own.
        self._arguments = (ctypes.c_uint64 * len(places))()
        self._pack = struct.Struct(f"={len(places)}Q").pack_into
        base = ctypes.addressof(self._arguments)
        self._pointers = (ctypes.c_void_p * len(places))(
            *(base + 8 * index for index in range(len(places)))
        )
        self._address = ctypes.addressof(self._pointers)
        alone = facts["team"] is None
        self._each = facts["blocks_per_sample"] if alone else 0
        self._blocks = facts["blocks"] if alone else grid(facts, 0, sms)
        self._driver_call = driver.cuLaunchKernel if alone else driver.cuLaunchCooperativeKernel
        self._last: tuple[int, ...] = (self._address, 0) if alone else (self._address,)
        self._where = "" if alone else ", all resident"

    def start(self, N: int, values: Sequence[int], stream: int) -> None:
        """Launch on a stream, for N samples. Raises: LaunchError."""
        self._pack(self._arguments, 0, *[values[place] for place in self._places])
        blocks = self._blocks + N * self._each
        result = self._driver_call(
            self._kernel, blocks, 1, 1, self._threads, 1, 1, self._smem, stream, *self._last
        )
        if result[0]:
            what = (
                f"{self._name}: launch of {blocks} blocks x {self._threads} threads, "
                f"{self._smem} bytes of shared memory{self._where}"
            )
            checked(result, what)


def _current_stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


def _empty_output(shape: tuple[int, ...], strides: tuple[int, ...], _: torch.dtype) -> Any:
    return torch.empty_strided(shape, strides, dtype=torch.float32, device="cuda")


# What torch has in public costs microseconds; where a version has the same below it, that is used.
_private: Any = torch._C
_guards: Any = getattr(getattr(_private, "_dynamo", None), "guards", None)
_stream: Any = getattr(_private, "_cuda_getCurrentRawStream", _current_stream)
_device: Any = getattr(_private, "_cuda_getDevice", torch.cuda.current_device)
_empty: Any = getattr(_guards, "_empty_strided_cuda", _empty_output)


def current_stream(device: int) -> int:
    """The handle of torch's current stream on a device."""
    handle: int = _stream(device)
    return handle


def current_device() -> int:
    """The index of the current device; CUDA must have been initialised, as a CUDA tensor tells."""
    index: int = _device()
    return index


def empty_output(shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """A float32 tensor on the current CUDA device, its memory from torch's allocator."""
    y: torch.Tensor = _empty(shape, strides, torch.float32)
    return y


def most_samples(launch: dict[str, Any]) -> int:
    """The largest batch whose blocks or jobs can be numbered in 32 bits."""
    if launch["team"] is not None:
        return int(_MOST_JOBS // launch["team"]["jobs_per_sample"])
    each = launch["blocks_per_sample"]
    return int((_MOST_BLOCKS - launch["blocks"]) // each) if each else _MOST_BLOCKS


def check_size(launch: dict[str, Any], N: int) -> None:
    """Refuse a batch above `most_samples`. Raises: LaunchError."""
    if most_samples(launch) >= N:
        return
    name, team = launch["kernel"], launch["team"]
    if team is not None:
        jobs = N * team["jobs_per_sample"]
        raise LaunchError(f"{name}: a batch of {N} has {jobs} jobs, a launch takes {_MOST_JOBS}")
    blocks = launch["blocks"] + N * launch["blocks_per_sample"]
    raise LaunchError(
        f"{name}: a batch of {N} needs {blocks} blocks, a launch takes {_MOST_BLOCKS}"
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


def checked(result: Sequence[Any], what: str) -> Any:
    """The value of a driver call. Raises: LaunchError with the driver's name and text."""
    status, *values = result
    if int(status) != 0:
        from cuda.bindings import driver

        _, text = driver.cuGetErrorString(status)
        reason = text.decode() if isinstance(text, bytes) else str(text)
        raise LaunchError(f"{what}: {status.name} ({reason})")
    return values[0] if values else None
