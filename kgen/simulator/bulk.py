"""Bulk copies, cp.async.bulk: global to shared memory through an mbarrier, and back in groups.

They belong to the asynchronous proxy: what ordinary stores wrote is theirs to read only after a
fence.proxy.async of the thread that stored it. Copies to shared memory land when their mbarrier is
waited for; copies from it read their source when their group is waited for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kgen.simulator import mbarriers
from kgen.simulator.access import Place, check_read, check_write, resolve
from kgen.simulator.mbarriers import Barriers, Landing
from kgen.simulator.ptx import Immediate, Instruction, PtxError

if TYPE_CHECKING:
    from kgen.simulator.decode import Active, Step, _Decoder
    from kgen.simulator.machine import Resident
    from kgen.simulator.memory import Allocation

_NEVER = (1 << 31) - 1  # a write time that nothing is ordered after


@dataclass
class _Store:
    """A bulk copy from shared to global memory."""

    thread: int
    source: Any
    target: Any
    allocation: Allocation
    read: bool = False  # whether its source has been read and its target written


@dataclass
class _Groups:
    """One thread's bulk stores: those not committed, and the committed groups, oldest first."""

    open: list[_Store] = field(default_factory=list)
    closed: list[list[_Store]] = field(default_factory=list)


class Bulk:
    """mbarriers and bulk copies of the resident blocks."""

    def __init__(self) -> None:
        self.barriers = Barriers()
        self.barrier_words: Any = None  # words that are part of a live mbarrier
        self._being_read: Any = None  # unread bulk stores that have each word as their source
        self._groups: dict[int, _Groups] = {}

    def start(self, resident: Resident) -> None:
        """Make room, at the first use."""
        if self.barrier_words is None:
            words = len(resident.shared.words)
            self.barrier_words = np.zeros(words, dtype=np.bool_)
            self._being_read = np.zeros(words, dtype=np.int16)

    def check_access(
        self, resident: Resident, place: Place, index: Any, what: str, *, writes: bool
    ) -> None:
        """Look for ordinary accesses to mbarriers, and for writes that disturb a bulk copy."""
        if self.barrier_words is None or place.space != "shared":
            return
        wrong = self.barrier_words[index]
        if wrong.any():
            thread = place.threads[int(np.argmax(wrong))]
            resident.report(mbarriers.MISUSE, thread, f"an ordinary {what} of a live mbarrier")
        if not writes:
            return
        for busy, of in (
            (self._being_read[index] > 0, "a bulk copy that still reads there"),
            (resident.shared.in_flight[index], "a copy that has not been waited for"),
        ):
            if busy.any():
                first = int(np.argmax(busy))
                address = int(place.offset[first]) % (4 * resident.shared.stride)
                detail = f"{what} of shared address {address} against {of}"
                resident.report("race in shared memory", place.threads[first], detail)

    def store(self, resident: Resident, copy: _Store) -> None:
        """A bulk store was issued."""
        self._being_read[copy.source] += 1
        self._groups.setdefault(copy.thread, _Groups()).open.append(copy)

    def commit(self, threads: Any) -> None:
        """cp.async.bulk.commit_group."""
        for thread in threads.tolist():
            groups = self._groups.setdefault(thread, _Groups())
            groups.closed.append(groups.open)
            groups.open = []

    def wait(self, resident: Resident, threads: Any, allowed: int, *, only_read: bool) -> None:
        """cp.async.bulk.wait_group: all but the newest `allowed` groups of each thread."""
        for thread in threads.tolist():
            groups = self._groups.get(thread)
            if groups is None:
                continue
            count = max(0, len(groups.closed) - allowed)
            for group in groups.closed[:count]:
                for copy in group:
                    self._finish(resident, copy, only_read=only_read)
            if not only_read:
                del groups.closed[:count]

    def _finish(self, resident: Resident, copy: _Store, *, only_read: bool) -> None:
        one = copy.allocation
        if not copy.read:
            copy.read = True
            resident.changes += 1
            self._being_read[copy.source] -= 1
            one.words[copy.target] = resident.shared.words[copy.source]
            one.written[copy.target] = True
        place = _words_of(resident, copy.thread, copy.target, one)
        shadow = resident.shadow(place) if resident.options.checks else None
        if shadow is not None:
            who = resident.accessors(place.threads)
            shadow.note_write(copy.target, who, clock=_NEVER if only_read else None)

    def finish(self, resident: Resident) -> None:
        """The blocks have ended: report what nobody waited for, and let it land."""
        for thread, groups in self._groups.items():
            left = [one for group in (*groups.closed, groups.open) for one in group if not one.read]
            if left:
                detail = "a bulk store whose source was still to be read when the block ended"
                resident.report("unfinished copy", thread, detail)
            for one in left:
                self._finish(resident, one, only_read=True)
        for barrier in self.barriers.live.values():
            for copy in barrier.copies[:1]:
                detail = "a bulk copy to shared memory that nobody waited for"
                resident.report("unfinished copy", copy.thread, detail)

    def describe(self, resident: Resident) -> list[str]:
        """The mbarriers, those in the midst of a phase first, for messages about hangs."""
        result = []
        live = self.barriers.live.items()
        for word, one in sorted(live, key=lambda item: item[1].idle):
            block, at = divmod(word, resident.shared.stride)
            block += resident.first_block
            result.append(f"mbarrier at shared address {4 * at} of block {block}: {one.describe()}")
        return result


def decode(decoder: _Decoder, instruction: Instruction) -> Step:
    """The step of a cp.async.bulk instruction. Raises: PtxError."""
    rest, operands = instruction.op[3:], instruction.operands
    if rest == ("commit_group",):
        return lambda resident, active: resident.bulk.commit(resident.threads(active))
    if rest in (("wait_group",), ("wait_group", "read")):
        if not isinstance(operands[0], Immediate):
            raise PtxError("wait_group takes a constant")
        allowed, only_read = operands[0].bits, len(rest) == 2

        def wait(resident: Resident, active: Active) -> None:
            resident.bulk.wait(resident, resident.threads(active), allowed, only_read=only_read)

        return wait
    if rest[:2] == ("prefetch", "L2"):
        return lambda resident, active: None
    hinted = "L2__cache_hint" in rest
    form = tuple(one for one in rest if one != "L2__cache_hint")
    if (
        form
        in (
            ("shared__cluster", "global", "mbarrier__complete_tx__bytes"),
            ("shared__cta", "global", "mbarrier__complete_tx__bytes"),
        )
        and len(operands) == 4 + hinted
    ):
        return _load(decoder, instruction)
    if form == ("global", "shared__cta", "bulk_group") and len(operands) == 3 + hinted:
        return _store(decoder, instruction)
    raise PtxError(f"unknown form {instruction.name}")


def _words_of(resident: Resident, thread: int, words: Any, one: Allocation | None) -> Place:
    """A place of one thread for each of some words."""
    memory = resident.shared if one is None else one
    space, threads = "shared" if one is None else "global", np.full(len(words), thread)
    return Place(space, memory.words, memory.written, 4 * words, threads, None, one)


def _aligned(resident: Resident, thread: int, size: int, *addresses: int) -> bool:
    for what, value in (("size", size), *(("address", one) for one in addresses)):
        if value % 16:
            detail = f"a bulk copy's {what} {value:#x} is no multiple of 16"
            resident.report("misaligned access", thread, detail)
            return False
    return True


def _shared_words(resident: Resident, thread: int, address: int, size: int) -> Any:
    """Words of a thread's shared memory; None, and a finding, where they are outside."""
    if address + size > resident.shared.size:
        detail = (
            f"a bulk copy of {size} bytes at shared address {address} of {resident.shared.size}"
        )
        resident.report("out of bounds", thread, detail)
        return None
    block = thread // resident.threads_per_block
    return block * resident.shared.stride + address // 4 + np.arange(size // 4)


def _global_words(
    resident: Resident, thread: int, address: int, size: int
) -> tuple[Allocation, Any] | None:
    """The allocation and its words; None, and a finding, where they are outside of one."""
    one = resident.memory.find(address, address + size)
    if one is None:
        last = np.array([address + size - 4], dtype=np.uint64)
        first = np.array([address], dtype=np.uint64)
        who = np.array([thread])
        for at in (first, last):  # reports the first that is outside
            if not resolve(resident, who, "global", at, 4, "bulk copy"):
                break
        return None
    return one, (address - one.base) // 4 + np.arange(size // 4)


def _require_fence(resident: Resident, thread: int, words: Any, what: str) -> None:
    """Look for ordinary writes of `words` that no proxy fence made visible to a bulk copy."""
    shadow = resident.shared_shadow
    if shadow is None or shadow.unfenced is None:
        return
    place = _words_of(resident, thread, words, None)
    who, writer = resident.accessors(place.threads), shadow.writer[words]
    fence = shadow.fence_clock[words]
    late = shadow.unfenced[words] | ((writer != who.thread) & ~who.after(writer, fence))
    late &= writer >= 0
    if late.any():
        first = int(np.argmax(late))
        address = 4 * (int(words[first]) % resident.shared.stride)
        other = resident.who(int(writer[first]))
        detail = f"{what} shared address {address}, written by {other}"
        resident.report("missing proxy fence", thread, detail)


def _load(decoder: _Decoder, instruction: Instruction) -> Step:
    operands = instruction.operands
    target, source = decoder.address(operands[0]), decoder.address(operands[1])
    length, barrier_at = decoder.source(operands[2], "u32"), decoder.address(operands[3])

    def load(resident: Resident, active: Active) -> None:
        threads, bulk = resident.threads(active), resident.bulk
        bulk.start(resident)
        wide = threads.shape
        to = np.broadcast_to(target(resident, active), wide).tolist()
        origin = np.broadcast_to(source(resident, active), wide).tolist()
        sizes = np.broadcast_to(length(resident, active), wide).tolist()
        places = resolve(resident, threads, "shared", barrier_at(resident, active), 8, "mbarrier")
        for place in places:
            at = np.arange(len(threads)) if place.kept is None else place.kept
            for barrier, rows in mbarriers.find(resident, place, "bulk copy"):
                for row in at[rows]:
                    thread, size = int(threads[row]), int(sizes[row])
                    copy = _landing(resident, thread, int(to[row]), int(origin[row]), size)
                    barrier.copies.append(copy)
        resident.changes += 1

    return load


def _landing(resident: Resident, thread: int, to: int, origin: int, size: int) -> Landing:
    """Check a copy to shared memory and read its source."""
    nothing = Landing(thread, None, None, size)
    if not size or not _aligned(resident, thread, size, to, origin):
        return nothing
    found = _global_words(resident, thread, origin, size)
    words = _shared_words(resident, thread, to, size)
    if found is None or words is None:
        return nothing
    one, origin_words = found
    resident.counts.add("bytes loaded from global", size)
    resident.counts.add("bytes stored to shared", size)
    if resident.options.checks:
        place = _words_of(resident, thread, origin_words, one)
        check_read(resident, place, origin_words, "bulk copy")
        inside = _words_of(resident, thread, words, None)
        check_write(resident, inside, words, "bulk copy", note=False)
        _require_fence(resident, thread, words, "bulk copy to")
        resident.shared.in_flight[words] = True
    return Landing(thread, words, one.words[origin_words], size)


def _store(decoder: _Decoder, instruction: Instruction) -> Step:
    operands = instruction.operands
    target, source = decoder.address(operands[0]), decoder.address(operands[1])
    length = decoder.source(operands[2], "u32")

    def store(resident: Resident, active: Active) -> None:
        threads, bulk = resident.threads(active), resident.bulk
        bulk.start(resident)
        wide = threads.shape
        to = np.broadcast_to(target(resident, active), wide).tolist()
        origin = np.broadcast_to(source(resident, active), wide).tolist()
        sizes = np.broadcast_to(length(resident, active), wide).tolist()
        for thread, there, here, size in zip(threads.tolist(), to, origin, sizes, strict=True):
            if not size or not _aligned(resident, thread, size, there, here):
                continue
            found = _global_words(resident, thread, there, size)
            words = _shared_words(resident, thread, here, size)
            if found is None or words is None:
                continue
            one, target_words = found
            resident.counts.add("bytes loaded from shared", size)
            resident.counts.add("bytes stored to global", size)
            if resident.options.checks:
                inside = _words_of(resident, thread, words, None)
                check_read(resident, inside, words, "bulk copy")
                _require_fence(resident, thread, words, "bulk copy from")
                place = _words_of(resident, thread, target_words, one)
                check_write(resident, place, target_words, "bulk copy", note=False)
                shadow = resident.shadow(place)
                if shadow is not None:
                    who = resident.accessors(place.threads)
                    shadow.note_write(target_words, who, clock=_NEVER)
            bulk.store(resident, _Store(thread, words, target_words, one))
        resident.changes += 1

    return store
