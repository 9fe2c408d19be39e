"""Matrix products of warpgroups that are under way, and the accumulators that they write.

`warpgroup` has the instructions. Accumulators are kept as matrices, out of reach of the other
registers, because a product of 64x256 would otherwise have 128 registers to read and to write.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kgen.simulator.inflight import Accumulators
from kgen.simulator.matrices import Readiness, Window

if TYPE_CHECKING:
    from kgen.simulator.access import Place
    from kgen.simulator.decode import Active
    from kgen.simulator.machine import Resident
    from kgen.simulator.ptx import Instruction

GROUP = 128  # threads of a warpgroup
DIVERGENT = "divergent warpgroup instruction"
_UNDEFINED = np.uint32(0x7FC5A5A5)


@dataclass
class _Product:
    """One that is under way: the number of its group among its warpgroup's, and what it reads."""

    group: int
    windows: list[Window]


class Warpgroups:
    """Accumulators and products under way of the resident blocks.

    Warpgroups are numbered over the resident blocks, those of a block after each other; groups of
    products are numbered for each warp. committed, waited: groups that a warp has closed, and how
    many of them it has waited for. fenced: warps that have executed a wgmma.fence.
    """

    def __init__(self, resident: Resident) -> None:
        threads, blocks = resident.threads_per_block, resident.blocks
        self.per_block = -(-threads // GROUP)
        self.count = blocks * self.per_block
        everyone = np.arange(resident.size)
        self._group_of = everyone // threads * self.per_block + everyone % threads // GROUP
        self._threads, self._blocks = threads, blocks
        warps = resident.size // 32
        self.group_of_warp = self._group_of[::32]
        self.committed = np.zeros(warps, dtype=np.int64)
        self.waited = np.zeros(warps, dtype=np.int64)
        self.fenced = np.zeros(warps, dtype=np.bool_)
        self.last: dict[Accumulators, Any] = {}  # newest group that writes them, by warpgroup
        self.reading: dict[str, Any] = {}  # the same of registers of A
        self.unwaited: set[int] = set()  # warpgroups that may touch results too early
        self._being_read: Any = None  # products under way that read a word
        self._under_way: dict[int, list[_Product]] = {}
        self._ended: dict[int, list[int]] = {}  # warpgroup -> time at which each group ended
        self._matrices: dict[Accumulators, Any] = {}
        self._place: dict[str, tuple[Accumulators, int]] = {}  # of a register in them
        # Instructions that a whole warpgroup must execute: how many a warp has, and, by warpgroup
        # and turn, the PTX line of those that some of its warps have executed, and how many.
        self._turns = np.zeros(warps, dtype=np.int64)
        self._lines: dict[tuple[int, int], tuple[int, int]] = {}

    # ---- Accumulators -------------------------------------------------------------------------

    def held(self, name: str) -> Any:
        """The bits of an accumulator of all threads; None if it is kept as other registers are."""
        found = self._place.get(name)
        if found is None:
            return None
        lanes = self._lanes(*found)
        return lanes.reshape(self._blocks, -1)[:, : self._threads].reshape(-1)

    def _lanes(self, one: Accumulators, position: int) -> Any:
        """A register in its matrix, as a view of [blocks, warpgroups, warps, lane / 4, lane % 4].

        PTX ISA, "Matrix Fragments for wgmma.mma_async": warp w has rows 16 w to 16 w + 15, and of
        them and each 8 columns the four elements that it would have of an mma.
        """
        matrix = self._matrices[one].view(np.uint32)
        eight, (half, odd) = position // 4, divmod(position % 4, 2)
        parts = matrix.reshape(self._blocks, self.per_block, 4, 2, 8, one.columns // 8, 4, 2)
        return parts[:, :, :, half, :, eight, :, odd]

    def matrix(self, resident: Resident, one: Accumulators) -> Any:
        """The accumulators as fp32 [warpgroups, 64, columns]; they are kept there from now on."""
        found = self._matrices.get(one)
        if found is None:
            shape = (self.count, 64, one.columns)
            found = self._matrices[one] = np.full(shape, _UNDEFINED).view(np.float32)
            self._place.update({name: (one, index) for index, name in enumerate(one.names)})
        for name, bits in resident.take(one.names).items():
            lanes = self._lanes(one, self._place[name][1])
            wide = np.zeros((self._blocks, self.per_block * GROUP), dtype=np.uint32)
            wide[:, : self._threads] = bits.reshape(self._blocks, -1) if len(bits) > 1 else bits
            lanes[...] = wide.reshape(lanes.shape)
        return found

    def release(self, resident: Resident, one: Accumulators) -> None:
        """Give accumulators back that others use in another order."""
        values = [(name, self.held(name)) for name in one.names]
        for name, bits in values:
            del self._place[name]
            resident.write(name, None, bits)
        del self._matrices[one]

    # ---- Who is there -------------------------------------------------------------------------

    def torn(self, active: Active) -> Any:
        """Mask of the active threads whose warpgroup is not whole; None if all are."""
        if active is None:
            if self._threads % GROUP == 0:
                return None
            active = np.arange(len(self._group_of))
        first, last = active[::GROUP], active[GROUP - 1 :: GROUP]
        if (
            len(active) % GROUP == 0
            and (last - first == GROUP - 1).all()
            and not (first % self._threads % GROUP).any()
        ):
            return None
        group = self._group_of[active]
        mask: Any = np.bincount(group, minlength=self.count)[group] < GROUP
        return mask if mask.any() else None

    def whole(self, resident: Resident, active: Active) -> tuple[Any, Active]:
        """The whole warpgroups that are here, and their threads; the others are reported."""
        torn = self.torn(active)
        if torn is None:
            return self._group_of[resident.threads(active)[::GROUP]], active
        threads = resident.threads(active)
        first = int(threads[np.argmax(torn)])
        here = int((self._group_of[threads] == self._group_of[first]).sum())
        detail = f"{here} of {GROUP} threads of the warpgroup are here"
        resident.report(DIVERGENT, first, detail)
        active = threads[~torn]
        return self._group_of[active[::GROUP]], active

    def warps(self, group: int) -> Any:
        """Resident numbers of a warpgroup's warps."""
        block, inside = divmod(group, self.per_block)
        first = block * (self._threads // 32) + 4 * inside
        return np.arange(first, min(first + 4, (block + 1) * (self._threads // 32)))

    def aligned(self, resident: Resident, warps: Any, instruction: Instruction) -> None:
        """Report warps that are elsewhere than the others of their warpgroup were in this turn.

        PTX ISA, "wgmma.fence", "wgmma.wait_group", "setmaxnreg": .aligned has all threads of the
        warpgroup execute the same instruction, though they need not arrive together.
        """
        if not resident.options.checks:
            return
        for warp in warps.tolist():
            group, turn = int(self.group_of_warp[warp]), int(self._turns[warp])
            self._turns[warp] += 1
            line, count = self._lines.pop((group, turn), (instruction.line, 0))
            if line != instruction.line:
                detail = f"other warps of the warpgroup execute PTX line {line} instead"
                resident.report(DIVERGENT, warp * 32, detail)
            if count + 1 < len(self.warps(group)):
                self._lines[group, turn] = (line, count + 1)

    # ---- Products under way -------------------------------------------------------------------

    def check_write(self, resident: Resident, place: Place, index: Any, what: str) -> None:
        """Look for writes of words that a product still reads."""
        if self._being_read is None or place.space != "shared":
            return
        busy = self._being_read[index] > 0
        if busy.any():
            first = int(np.argmax(busy))
            address = int(place.offset[first]) % (4 * resident.shared.stride)
            detail = f"{what} of shared address {address} against a wgmma that still reads there"
            resident.report("race in shared memory", place.threads[first], detail)

    def start(self, resident: Resident, group: int, windows: list[Window]) -> None:
        """Check what a product of a warpgroup reads, which goes on until it is waited for."""
        warps = self.warps(group)
        ready = Readiness(resident, warps)
        if self._being_read is None:
            self._being_read = np.zeros(len(resident.shared.words), dtype=np.int16)
        for one in windows:
            ready.check(one)
            view = one.of(self._being_read)
            view += 1
        product = _Product(int(self.committed[warps[0]]), windows)
        self._under_way.setdefault(group, []).append(product)

    def note(self, one: Accumulators, fragments: tuple[str, ...], groups: Any) -> None:
        """The registers of a product are in use until it is waited for."""
        number = self.committed[self._first_warp(groups)]
        for table, key in ((self.last, one), *((self.reading, name) for name in fragments)):
            newest = table.get(key)  # type: ignore[attr-defined]
            if newest is None:
                newest = table[key] = np.full(self.count, -1)  # type: ignore[index]
            newest[groups] = number
        self.unwaited.update(groups.tolist())

    def _first_warp(self, groups: Any) -> Any:
        block, inside = np.divmod(groups, self.per_block)
        return block * (self._threads // 32) + 4 * inside

    def wait(self, resident: Resident, warps: Any, allowed: int) -> None:
        """wgmma.wait_group of some warps: all but their newest `allowed` groups have ended."""
        covered = np.maximum(self.committed[warps] - allowed, 0)
        self.waited[warps] = np.maximum(self.waited[warps], covered)
        clocks, groups = resident.clocks, self.group_of_warp[warps]
        for group in np.unique(groups).tolist():
            mine, ends = groups == group, self._ended.setdefault(group, [])
            limit = int(covered[mine].max())
            if limit > len(ends):
                self._end(resident, group, limit)
                ends += [clocks.now] * (limit - len(ends))
                clocks.now += 1
            column = clocks.warps + group % self.per_block
            if resident.options.checks and limit:
                known = [ends[one - 1] if one else 0 for one in covered[mine].tolist()]
                clocks.seen[warps[mine], column] = np.maximum(
                    clocks.seen[warps[mine], column], known
                )
            left = self.warps(group)
            newest = max((int(one[group]) for one in (*self.last.values(), *self.reading.values())),
                         default=-1)  # fmt: skip
            if (self.waited[left] > newest).all():
                self.unwaited.discard(group)

    def _end(self, resident: Resident, group: int, limit: int) -> None:
        """The products of a warpgroup's groups below `limit` have read their matrices."""
        under_way = self._under_way.pop(group, [])
        self._under_way[group] = [one for one in under_way if one.group >= limit]
        shadow, clocks = resident.shared_shadow, resident.clocks
        column = clocks.warps + group % self.per_block
        thread = resident.launch_thread(int(self.warps(group)[0]) * 32)
        for product in under_way:
            if product.group >= limit:
                continue
            for one in product.windows:
                view = one.of(self._being_read)
                view -= 1
                if shadow is not None and shadow.reads is not None:
                    # As reads of the warpgroup at this time, which says nothing about its threads.
                    one.of(shadow.reads, column)[...] = clocks.now
                    one.of(shadow.reader)[...] = thread
                    one.of(shadow.first_reader)[...] = thread
                    one.of(shadow.read_clock)[...] = -1
