"""What the simulator watches for: races, and findings of every kind.

Order between threads is kept as vector clocks of warps. A warp's own clock advances at each
barrier and warp-wide synchronisation; a barrier joins the clocks of those that take part. An access
is ordered after an earlier one of another warp if the joined clock has reached the clock of that
access, and after one of another lane of its own warp if the warp has synchronised since.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kgen.simulator.ptx import Instruction

MAX_FINDINGS = 20


@dataclass(frozen=True)
class Finding:
    """Something wrong, at one instruction; block and thread are those of the first case."""

    kind: str
    kernel: str
    line: int
    source_line: int
    text: str
    block: int
    thread: int
    detail: str

    def __str__(self) -> str:
        source = f", kernel.cu:{self.source_line}" if self.source_line else ""
        return (
            f"{self.kind}: {self.detail} ({self.kernel}, PTX line {self.line}{source}, block "
            f"{self.block}, thread {self.thread}: {' '.join(self.text.split())})"
        )


class Findings:
    """Collects findings, one for each kind and instruction."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str, int], Finding] = {}

    def add(self, kind: str, kernel: str, instruction: Instruction, block: int, thread: int,
            detail: str) -> None:  # fmt: skip
        """Note a finding unless its kind was found at this instruction before."""
        key = (kind, kernel, instruction.line)
        if key not in self._found and len(self._found) < MAX_FINDINGS:
            self._found[key] = Finding(
                kind, kernel, instruction.line, instruction.source_line, instruction.text,
                block, thread, detail,
            )  # fmt: skip

    def all(self) -> tuple[Finding, ...]:
        """Everything found, in order."""
        return tuple(self._found.values())

    def __bool__(self) -> bool:
        return bool(self._found)


class Clocks:
    """Vector clocks of the warps of the resident blocks: seen[warp, w] of the same block."""

    def __init__(self, blocks: int, warps: int) -> None:
        self.warps = warps
        self.own = np.ones(blocks * warps, dtype=np.int32)
        self.seen = np.zeros((blocks * warps, warps), dtype=np.int32)

    def join(self, waited: Any, arrived: Any) -> None:
        """A barrier of one block: `waited` have now seen what all did, `arrived` too, before it."""
        both = np.union1d(waited, arrived).astype(np.int64)
        if not len(both):
            return
        block = both[0] // self.warps * self.warps
        self.seen[both, both - block] = self.own[both]
        self.seen[waited] = self.seen[both].max(axis=0)
        self.own[both] += 1

    def advance(self, warps: Any) -> None:
        """A warp-wide synchronisation of each of `warps`."""
        self.own[warps] += 1


class Shadow:
    """The last accesses of each word of a memory, and whether a new one is ordered after them.

    `first_warp` of a word's memory is 0: warps are numbered over all blocks of the launch, and the
    clocks of blocks that are no longer resident cannot be joined any more.
    """

    def __init__(self, words: int) -> None:
        self.writer = np.full(words, -1, dtype=np.int32)  # thread of the launch
        self.write_clock = np.zeros(words, dtype=np.int32)
        self.reader = np.full(words, -1, dtype=np.int32)  # last reader since the last write
        self.read_clock = np.zeros(words, dtype=np.int32)
        self.readers = np.zeros(words, dtype=np.uint32)  # warps of its block that read since then

    def unordered_write(self, words: Any, who: Accessors) -> Any:
        """Mask of accesses that are not ordered after the last write of their word."""
        writer = self.writer[words]
        return (writer >= 0) & (writer != who.thread) & ~who.after(writer, self.write_clock[words])

    def unordered_reads(self, words: Any, who: Accessors) -> Any:
        """Mask of accesses that are not ordered after all reads since the last write."""
        reader, clock = self.reader[words], self.read_clock[words]
        mask = self.readers[words]
        unordered = (reader >= 0) & (reader != who.thread) & ~who.after(reader, clock)
        several = np.bitwise_count(mask) > 1
        if several.any():
            for warp in range(who.clocks.warps):
                among = several & ((mask >> np.uint32(warp)) & 1).astype(bool)
                if among.any():
                    other = who.warp_in_block != warp
                    unordered |= among & other & (who.clocks.seen[who.warp, warp] < clock)
        return unordered

    def note_read(self, words: Any, who: Accessors) -> None:
        """Remember reads."""
        self.reader[words] = who.thread
        self.read_clock[words] = who.clocks.own[who.warp]
        np.bitwise_or.at(self.readers, words, np.uint32(1) << who.warp_in_block.astype(np.uint32))

    def note_write(self, words: Any, who: Accessors) -> None:
        """Remember writes; earlier reads no longer matter."""
        self.writer[words] = who.thread
        self.write_clock[words] = who.clocks.own[who.warp]
        self.reader[words] = -1
        self.readers[words] = 0


@dataclass(frozen=True)
class Accessors:
    """The threads of one access: launch-wide thread and warp numbers, and their clocks.

    thread: over the launch. warp: over the resident blocks. base_warp: launch-wide number of the
    first resident warp.
    """

    clocks: Clocks
    thread: Any
    warp: Any
    warp_in_block: Any
    base_warp: int

    def after(self, other_thread: Any, clock: Any) -> Any:
        """Whether what `other_thread` did at its warp's `clock` is ordered before now."""
        other = other_thread // 32 - self.base_warp  # resident number of the other's warp
        same_warp = other == self.warp
        warps = self.clocks.warps
        same_block = (other >= 0) & (other // warps == self.warp // warps)
        seen = self.clocks.seen[self.warp, np.where(same_block, other % warps, 0)]
        return np.where(same_warp, clock < self.clocks.own[self.warp], same_block & (seen >= clock))
