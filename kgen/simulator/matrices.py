"""Operands of wgmma in shared memory: descriptors, and the windows of words that they name.

PTX ISA, "Shared Memory Matrix Layout" and "Matrix Descriptor Format" of the asynchronous
warpgroup-level instructions. Only matrices along k without swizzle are known here. Such an operand
consists of core matrices of 8 rows of 16 bytes, 128 bytes without a gap, and a descriptor says how
far apart they are: the leading-dimension offset for the two that are neighbours along k, the
stride-dimension offset for neighbours along m or n. Addresses need be no multiple of more than 16,
so that a window may begin at any row. Everything is a strided view of the shared memory; gathering
through index arrays would take several times as long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kgen.simulator.ptx import PtxError

if TYPE_CHECKING:
    from kgen.simulator.machine import Resident

CORE = 128  # bytes of a core matrix
_ROW_WORDS = 4
_FIELD, _MOST = 0x3FFF, (1 << 31) - 1
_USED = 0xC00E3FFF3FFF3FFF  # bits of a descriptor that mean something
_F16 = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
with np.errstate(invalid="ignore"):
    _FROM_F16 = _F16.astype(np.float64)


@dataclass(frozen=True)
class Window:
    """What a descriptor names: `cores` core matrices along m or n, two along k.

    first: word of the resident shared memory. along_k, along_rows: words between core matrices.
    """

    first: int
    cores: int
    along_k: int
    along_rows: int

    def of(self, array: Any, column: int | None = None) -> Any:
        """The window's elements of an array that has one, or a row of them, for each word.

        The shape is [cores, 2, words of a core matrix]; writes go through.
        """
        item = array.itemsize
        wide = 1 if column is None else array.shape[1]
        step = item * wide
        return np.ndarray(
            (self.cores, 2, CORE // 4),
            array.dtype,
            array,
            self.first * step + item * (column or 0),
            (self.along_rows * step, self.along_k * step, step),
        )

    def elements(self, words: Any, each: int) -> Any:
        """The matrix as [cores, 8 rows, 2, elements of a row], `each` elements a word."""
        dtype, item = (np.uint16, 2) if each == 2 else (np.uint32, 4)
        return np.ndarray(
            (self.cores, 8, 2, _ROW_WORDS * each),
            dtype,
            words,
            4 * self.first,
            (4 * self.along_rows, 4 * _ROW_WORDS, 4 * self.along_k, item),
        )

    def word(self, place: int) -> int:
        """The word at a flat position of `of`."""
        core, inside = divmod(place, CORE // 2)
        half, word = divmod(inside, CORE // 4)
        return self.first + core * self.along_rows + half * self.along_k + word


def window(
    resident: Resident, descriptor: int, rows: int, block: int, thread: int
) -> Window | None:
    """What a thread's descriptor names; None, and a finding, where it leaves the shared memory.

    Raises: PtxError for what is not supported.
    """
    if swizzle := descriptor >> 62:
        name = {1: "128", 2: "64", 3: "32"}[swizzle]
        raise PtxError(f"matrix descriptor {descriptor:#x}: {name}-byte swizzle is not supported")
    if base := descriptor >> 49 & 7:
        raise PtxError(f"matrix descriptor {descriptor:#x}: base offset {base} is not supported")
    if descriptor & ~_USED:
        raise PtxError(f"matrix descriptor {descriptor:#x}: reserved bits are set")
    start, leading, stride = ((descriptor >> bit & _FIELD) << 4 for bit in (0, 16, 32))
    cores = rows // 8
    end = start + leading + (cores - 1) * stride + CORE
    if end > resident.shared.size:
        detail = (
            f"wgmma: a matrix at shared address {start} ends at {end} of {resident.shared.size}"
        )
        resident.report("out of bounds", thread, detail)
        return None
    first = block * resident.shared.stride + start // 4
    return Window(first, cores, leading // 4, stride // 4)


def converted(kind: str, elements: Any) -> Any:
    """Elements as fp64, exact; the low 13 bits of tf32 are ignored, whatever they are."""
    if kind == "f16":
        return _FROM_F16.take(elements)
    if kind == "bf16":
        bits = elements.astype(np.uint32)
        bits <<= np.uint32(16)
        return bits.view(np.float32).astype(np.float64)
    special = (elements & np.uint32(0x7F800000)) == np.uint32(0x7F800000)
    bits = elements & np.uint32(0xFFFFE000)
    if special.any():  # as mma has them in `tensor`
        bits = np.where(special, elements, bits)
    return bits.view(np.float32).astype(np.float64)


class Readiness:
    """What a warpgroup may read through the asynchronous proxy, for one instruction.

    A word is ready if its writer has put a fence.proxy.async behind the write and every warp of the
    group, except the writer's own, is ordered after that fence. A bulk copy needs no fence, but its
    phase must have been seen complete. That covers ordinary races, too.
    """

    def __init__(self, resident: Resident, warps: Any) -> None:
        """warps: resident numbers of the warpgroup's warps."""
        clocks = resident.clocks
        self._resident, count = resident, clocks.warps
        seen = clocks.seen[warps]
        seen[np.arange(len(warps)), warps % count] = _MOST
        # One entry before the first warp, for words that no thread has written.
        self._seen = np.concatenate([[_MOST], seen[:, :count].min(axis=0)])
        block = int(warps[0]) // count
        self._before = (resident.first_block + block) * count - 1
        self._phases = clocks.phases[warps].min(axis=0)
        self._thread = int(warps[0]) * 32

    def check(self, one: Window) -> None:
        """Report words that are not written, not there yet, not fenced, or not ordered."""
        resident = self._resident
        shared, shadow = resident.shared, resident.shared_shadow
        unwritten = ~one.of(shared.written)
        if unwritten.any():
            self._report("uninitialised read", one, unwritten)
        flying = one.of(shared.in_flight)
        if flying.any():
            self._report("unfinished copy", one, flying, " before its copy was waited for")
        if shadow is None or shadow.unfenced is None:
            return
        writer = one.of(shadow.writer) >> 5
        writer -= self._before
        fenced = one.of(shadow.fence_clock)
        late = self._seen.take(writer, mode="clip") < fenced
        unfenced = one.of(shadow.unfenced)
        if unfenced.any():
            late |= unfenced
        if late.any():
            first = int(np.argmax(late))
            word = one.word(first)
            other = resident.who(int(shadow.writer[word]))
            self._report("missing proxy fence", one, late, f", written by {other}")
        by = one.of(shadow.copied_by)
        if by.any():
            copied = self._phases[np.maximum(by - 1, 0)] < one.of(shadow.copied_phase)
            copied &= by > 0
            if copied.any():
                detail = ", written by a bulk copy whose mbarrier was not waited for"
                self._report("race in shared memory", one, copied, detail)

    def _report(self, kind: str, one: Window, mask: Any, more: str = "") -> None:
        resident = self._resident
        address = 4 * (one.word(int(np.argmax(mask))) % resident.shared.stride)
        resident.report(kind, self._thread, f"wgmma of shared address {address}{more}")
