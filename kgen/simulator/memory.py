"""Memory of the simulated device: global allocations, shared memory of blocks, local of threads.

Addresses are 64-bit numbers. Global allocations lie far apart, so that a wrong index hits nothing;
shared addresses count from 0 in each block, and from SHARED_WINDOW where they are generic.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

SHARED_WINDOW = 1 << 52  # generic address of shared memory's first byte
LOCAL_WINDOW = 1 << 53
_GLOBAL_BASE = 1 << 40
_GAP = 1 << 24  # bytes of nothing around each global allocation


@dataclass
class Allocation:
    """One global tensor or variable.

    words: its content as uint32. written: which words hold a value. role: `input`, `output`,
    `workspace` or `constant`.
    """

    name: str
    base: int
    size: int
    role: str
    words: Any = field(repr=False)
    written: Any = field(repr=False)

    def view(self, dtype: Any) -> Any:
        """The content as another dtype; writes go through."""
        return self.words.view(dtype)[: self.size // np.dtype(dtype).itemsize]


class GlobalMemory:
    """The allocations of one simulated device."""

    def __init__(self) -> None:
        self.allocations: list[Allocation] = []
        self._next = _GLOBAL_BASE

    def allocate(self, name: str, size: int, role: str, data: bytes | Any = None) -> Allocation:
        """Allocate `size` bytes, 512-byte aligned; `data` fills them, else they are unwritten."""
        words = np.full(-(-size // 4), 0x7FC5A5A5, dtype=np.uint32)
        if data is not None:
            content = np.frombuffer(bytes(data), np.uint8) if isinstance(data, bytes) else data
            words.view(np.uint8)[:size] = np.ascontiguousarray(content).reshape(-1).view(np.uint8)
        written = np.full(len(words), data is not None)
        made = Allocation(name, self._next, size, role, words, written)
        self._next += -(-size // 512) * 512 + _GAP
        self.allocations.append(made)
        return made

    def find(self, low: int, high: int) -> Allocation | None:
        """The allocation that holds the bytes [low, high), or None."""
        for one in self.allocations:
            if one.base <= low and high <= one.base + one.size:
                return one
        return None


class DividedMemory:
    """Memory of which each owner has `size` bytes: shared memory of blocks, local of threads."""

    def __init__(self, owners: int, size: int) -> None:
        self.size = size
        self.stride = -(-size // 16) * 4  # words between owners
        self.words = np.full(owners * self.stride, 0x7FC5A5A5, dtype=np.uint32)
        self.written = np.zeros(owners * self.stride, dtype=np.bool_)
        self.in_flight = np.zeros(owners * self.stride, dtype=np.bool_)
