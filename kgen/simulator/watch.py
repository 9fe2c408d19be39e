"""What the simulator watches for: races, and findings of every kind.

An access is ordered after an earlier one of another warp if that warp has published since (at a
barrier, a release or an arrival) and this one has seen it, and after one of another lane of its own
warp if the warp has synchronised since; `clocks` keeps who has seen what.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kgen.simulator.clocks import Clocks
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


class Shadow:
    """The last accesses of each word of a memory, and whether a new one is ordered after them.

    Threads are numbered over the launch. Strength: 0 for ordinary accesses, 1 for atomic, volatile
    and relaxed ones of .cta scope, 2 for those of wider scope; strong ones do not race each other.
    warps: of a block, and what else has a column in the clocks, to keep a read time for each; 0
    keeps the last reader's, which is exact only where warps synchronise through barriers of the
    whole block.
    """

    def __init__(self, words: int, warps: int = 0) -> None:
        self.writer = np.full(words, -1, dtype=np.int32)  # thread of the launch
        self.write_clock = np.zeros(words, dtype=np.int32)
        self.reader = np.full(words, -1, dtype=np.int32)  # last reader since the last write
        self.first_reader = self.reader.copy()  # of the same instruction as the last
        self.read_clock = np.zeros(words, dtype=np.int32)
        self.readers = np.zeros(words, dtype=np.uint32)  # warps of its block that read since then
        self.reads = np.zeros((words, warps), dtype=np.int32) if warps else None
        self.strength: Any = None  # of the last write, once there is a strong one
        self.strong_reader: Any = None  # the last strong reader since the last write
        self.strong_clock: Any = None
        # Words last written by a bulk copy: 1 + the index of its mbarrier, and the number of
        # phases that a warp must have seen complete there.
        self.copied_by: Any = None
        self.copied_phase: Any = None
        # Words written by ordinary stores that no proxy fence of their thread has followed, and
        # when one did.
        self.unfenced: Any = None
        self.fence_clock: Any = None

    def watch_bulk(self) -> None:
        """Keep what bulk copies need, too."""
        words = len(self.writer)
        self.copied_by = np.zeros(words, dtype=np.int16)
        self.copied_phase = np.zeros(words, dtype=np.int32)
        self.unfenced = np.zeros(words, dtype=np.bool_)
        self.fence_clock = np.zeros(words, dtype=np.int32)

    def unordered_write(self, words: Any, who: Accessors, strength: int = 0) -> Any:
        """Mask of accesses that are not ordered after the last write of their word."""
        writer = self.writer[words]
        mask = (writer >= 0) & (writer != who.thread) & ~who.after(writer, self.write_clock[words])
        if strength and self.strength is not None:
            mask &= ~self._both_strong(words, writer, who, strength)
        if self.copied_by is not None:
            by = self.copied_by[words].astype(np.int64)
            if by.any():
                seen = who.clocks.phases[who.warp, np.maximum(by - 1, 0)]
                mask |= (by > 0) & (seen < self.copied_phase[words])
        return mask

    def _both_strong(self, words: Any, other: Any, who: Accessors, strength: int) -> Any:
        least = np.minimum(self.strength[words], strength)
        threads = 32 * who.clocks.warps
        return (least > 1) | ((least == 1) & (other // threads == who.thread // threads))

    def unordered_reads(self, words: Any, who: Accessors, strength: int = 0) -> Any:
        """Mask of accesses that are not ordered after all reads since the last write."""
        reader, clock = self.reader[words], self.read_clock[words]
        unordered = (reader >= 0) & (reader != who.thread) & ~who.after(reader, clock)
        first = self.first_reader[words]
        if (own := (reader == who.thread) & (first != reader)).any():
            unordered |= own & ~who.after(first, clock)
        warps = who.clocks.warps
        if self.reads is not None:
            late = self.reads[words] > who.clocks.seen[who.warp]
            late[np.arange(len(words)), who.warp_in_block] = False  # its own lanes: seen above
            late &= (reader >= 0)[:, None]
            # Where the last reader is of this warp, or ordered, others may still not be.
            unordered |= late.any(axis=1)
        else:
            mask = self.readers[words]
            several = np.bitwise_count(mask) > 1
            several &= reader // 32 // warps == who.thread // 32 // warps
            if several.any():
                for warp in range(warps):
                    among = several & ((mask >> np.uint32(warp)) & 1).astype(bool)
                    if among.any():
                        other = who.warp_in_block != warp
                        unordered |= among & other & (who.clocks.seen[who.warp, warp] < clock)
        if not strength and self.strong_reader is not None:
            strong = self.strong_reader[words]
            unordered |= (
                (strong >= 0)
                & (strong != who.thread)
                & ~who.after(strong, self.strong_clock[words])
            )
        return unordered

    def reader_beside(self, word: int, thread: int) -> int:
        """A thread of the launch that read a word last and is not `thread`, if there is one."""
        last = int(self.reader[word])
        return int(self.first_reader[word]) if last == thread else last

    def note_read(self, words: Any, who: Accessors, strength: int = 0) -> None:
        """Remember reads."""
        now = who.clocks.now
        if strength:
            if self.strong_reader is None:
                self.strong_reader = np.full(len(self.writer), -1, dtype=np.int32)
                self.strong_clock = np.zeros(len(self.writer), dtype=np.int32)
            self.strong_reader[words] = who.thread
            self.strong_clock[words] = now
            return
        if self.reads is not None:
            self.reads[words, who.warp_in_block] = now
        else:
            if who.clocks.crossed:  # the mask is of one block's warps: another's begins anew
                block = 32 * who.clocks.warps
                foreign = self.reader[words] // block != who.thread // block
                self.readers[words[foreign]] = 0
            np.bitwise_or.at(
                self.readers, words, np.uint32(1) << who.warp_in_block.astype(np.uint32)
            )
        self.reader[words] = who.thread
        self.first_reader[words[::-1]] = who.thread[::-1]
        self.read_clock[words] = now

    def note_write(
        self, words: Any, who: Accessors, strength: int = 0, clock: int | None = None
    ) -> None:
        """Remember writes; earlier reads no longer matter."""
        self.writer[words] = who.thread
        self.write_clock[words] = who.clocks.now if clock is None else clock
        self.forget_reads(words)
        if strength and self.strength is None:
            self.strength = np.zeros(len(self.writer), dtype=np.uint8)
        if self.strength is not None:
            self.strength[words] = strength
        if self.copied_by is not None:
            self.copied_by[words] = 0
            self.unfenced[words] = True

    def note_copy(self, words: Any, barrier: int, phase: int) -> None:
        """Remember words that a bulk copy wrote for phase number `phase` of an mbarrier."""
        self.writer[words] = -1
        self.copied_by[words] = barrier + 1
        self.copied_phase[words] = phase + 1
        self.unfenced[words] = False
        self.forget_reads(words)

    def forget_reads(self, words: Any) -> None:
        """Reads before a write."""
        self.reader[words] = -1
        self.readers[words] = 0
        if self.reads is not None:
            self.reads[words] = 0
        if self.strong_reader is not None:
            self.strong_reader[words] = -1

    def proxy_fence(self, active: Any, now: int) -> None:
        """A fence.proxy.async of the launch's threads for which the mask `active` is set."""
        if self.unfenced is None:
            return
        words = np.flatnonzero(self.unfenced)
        mine = words[active[self.writer[words]]]
        self.unfenced[mine] = False
        self.fence_clock[mine] = now


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
        """Whether what `other_thread` did at time `clock` is ordered before now."""
        other = other_thread // 32 - self.base_warp  # resident number of the other's warp
        same_warp = other == self.warp
        clocks, warps = self.clocks, self.clocks.warps
        same_block = (other >= 0) & (other // warps == self.warp // warps)
        seen = clocks.seen[self.warp, np.where(same_block, other % warps, 0)]
        after = np.where(same_warp, clock < clocks.synced[self.warp], same_block & (seen >= clock))
        if clocks.crossed:
            foreign = np.flatnonzero(~same_block & (other_thread >= 0))
            if len(foreign):
                known = clocks.known(self.warp[foreign], other[foreign] + self.base_warp)
                after[foreign] = known >= clock[foreign]
        return after
