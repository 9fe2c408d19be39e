"""One access of many threads to memory: where it goes, and whether it may.

Every load, store, copy and atomic goes through `resolve`, which turns addresses into word indices,
and `check`, which looks for what is wrong with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kgen.simulator.memory import LOCAL_WINDOW, SHARED_WINDOW, Allocation, DividedMemory
from kgen.simulator.ptx import PtxError

if TYPE_CHECKING:
    from kgen.simulator.machine import Resident

_WINDOWS = (  # spaces by generic address: name, first byte, end
    ("global", 0, SHARED_WINDOW),
    ("shared", SHARED_WINDOW, LOCAL_WINDOW),
    ("local", LOCAL_WINDOW, (1 << 64) - 1),
)
SECTOR = 32  # bytes that the memory system moves at least


@dataclass
class Place:
    """Where the threads of an access go.

    words, written: the memory's arrays. offset: first byte of each thread from the start of
    `words`. threads: their resident indices; fewer than were active where some had no business
    there. kept: positions of those among the active ones, None for all.
    """

    space: str
    words: Any
    written: Any
    offset: Any
    threads: Any
    kept: Any
    allocation: Allocation | None = None


def resolve(
    resident: Resident,
    threads: Any,
    space: str,
    address: Any,
    size: int,
    what: str,
    align: int | None = None,
) -> list[Place]:
    """Places for `size` bytes at each thread's address; more than one where tensors differ.

    align: of the address, `size` if left out. Wrong addresses are reported and left out: such loads
    give zero, such stores do nothing.
    """
    address = np.broadcast_to(address, threads.shape)
    odd = address % np.uint64(align or size) != 0
    if odd.any():
        first = int(np.argmax(odd))
        detail = f"{what} of {align or size} bytes at {int(address[first]):#x}"
        resident.report("misaligned access", threads[first], detail)
        keep = np.flatnonzero(~odd)
        found = resolve(resident, threads[keep], space, address[keep], size, what, align)
        return _shifted(found, keep)
    if space == "generic":
        places = []
        for name, low, high in _WINDOWS:
            keep = np.flatnonzero((address >= low) & (address < high))
            if len(keep):
                inside = address[keep] - np.uint64(low)
                found = resolve(resident, threads[keep], name, inside, size, what, align)
                places += found if len(keep) == len(threads) else _shifted(found, keep)
        return places
    if space == "shared":
        block = threads // resident.threads_per_block
        return _divided(resident, resident.shared, "shared", block, threads, address, size, what)
    if space == "local":
        return _divided(resident, resident.local, "local", threads, threads, address, size, what)
    if space in ("global", "const"):
        return _global(resident, threads, address, size, what)
    raise PtxError(f"memory space {space} is not supported")


def _shifted(places: list[Place], keep: Any) -> list[Place]:
    for place in places:
        place.kept = keep if place.kept is None else keep[place.kept]
    return places


def _divided(
    resident: Resident,
    memory: DividedMemory,
    space: str,
    owner: Any,
    threads: Any,
    address: Any,
    size: int,
    what: str,
) -> list[Place]:
    """The place in memory of which each owner, a block or a thread, has a part of its own."""
    # Not address + size, which wraps for an address just below zero.
    outside = address > np.uint64(max(memory.size - size, 0))
    if size > memory.size:
        outside = np.ones_like(outside)
    kept = None
    if outside.any():
        first = int(np.argmax(outside))
        where = f"{space} address {_signed(int(address[first]))} of {memory.size}"
        resident.report("out of bounds", threads[first], f"{what} of {size} bytes at {where}")
        kept = np.flatnonzero(~outside)
        threads, address, owner = threads[kept], address[kept], owner[kept]
    offset = address.astype(np.int64) + owner * (4 * memory.stride)
    return [Place(space, memory.words, memory.written, offset, threads, kept)]


def _global(resident: Resident, threads: Any, address: Any, size: int, what: str) -> list[Place]:
    if not len(threads):
        return []
    low, high = int(address.min()), int(address.max()) + size
    found = resident.memory.find(low, high)
    if found is not None:
        offset = (address - np.uint64(found.base)).astype(np.int64)
        return [Place("global", found.words, found.written, offset, threads, None, found)]
    places, left = [], np.ones(len(threads), dtype=bool)
    for one in resident.memory.allocations:
        inside = (address >= one.base) & (address <= one.base + max(one.size - size, -1))
        if inside.any():
            kept = np.flatnonzero(inside)
            left[kept] = False
            offset = (address[kept] - np.uint64(one.base)).astype(np.int64)
            place = Place("global", one.words, one.written, offset, threads[kept], kept, one)
            places.append(place)
    if left.any():
        first = int(np.argmax(left))
        near = _nearest(resident, int(address[first]))
        resident.report("out of bounds", threads[first], f"{what} of {size} bytes {near}")
    return places


def _nearest(resident: Resident, address: int) -> str:
    """An address in terms of the allocation next to it."""
    near = min(
        resident.memory.allocations,
        key=lambda one: min(abs(address - one.base), abs(address - one.base - one.size)),
        default=None,
    )
    if near is None:
        return f"at {address:#x}"
    if address < near.base:
        return f"{near.base - address} bytes before {near.name}"
    return f"at byte {address - near.base} of {near.name}, which has {near.size}"


def check_read(resident: Resident, place: Place, index: Any, what: str, strength: int = 0) -> None:
    """Look for reads of unwritten words, of words still being copied, and for races."""
    unwritten = ~place.written[index]
    if unwritten.any():
        first = int(np.argmax(unwritten))
        resident.report(
            "uninitialised read", place.threads[first], f"{what} {_where(place, first)}"
        )
    if place.space == "shared":
        flying = resident.shared.in_flight[index]
        if flying.any():
            first = int(np.argmax(flying))
            detail = f"{what} {_where(place, first)} before its asynchronous copy was waited for"
            resident.report("unfinished copy", place.threads[first], detail)
        resident.bulk.check_access(resident, place, index, what, writes=False)
    shadow = resident.shadow(place)
    if shadow is None:
        return
    who = resident.accessors(place.threads)
    racing = shadow.unordered_write(index, who, strength)
    if racing.any():
        first = int(np.argmax(racing))
        other = int(shadow.writer[index[first]])
        detail = f"{what} {_where(place, first)} against a write by {resident.who(other)}"
        resident.report(f"race in {place.space} memory", place.threads[first], detail)
    shadow.note_read(index, who, strength)


def check_write(
    resident: Resident,
    place: Place,
    index: Any,
    what: str,
    strength: int = 0,
    *,
    note: bool = True,
) -> None:
    """Look for races, for words that two threads write at once, and for outputs written twice.

    note: whether the write takes effect now; an asynchronous copy is noted when it is waited for.
    """
    resident.bulk.check_access(resident, place, index, what, writes=True)
    resident.warpgroups.check_write(resident, place, index, what)
    if not strength and resident.order.published:
        resident.order.published.forget(resident.order.memory(place), index)
    shadow = resident.shadow(place)
    if shadow is not None:
        who = resident.accessors(place.threads)
        racing = shadow.unordered_write(index, who, strength)
        kind = "write"
        if not racing.any():
            racing, kind = shadow.unordered_reads(index, who, strength), "read"
        if racing.any():
            first = int(np.argmax(racing))
            word, own = int(index[first]), int(who.thread[first])
            last = shadow.writer[word] if kind == "write" else shadow.reader_beside(word, own)
            other = resident.who(int(last))
            detail = f"{what} {_where(place, first)} against a {kind} by {other}"
            resident.report(f"race in {place.space} memory", place.threads[first], detail)
        order = np.argsort(index, kind="stable")
        twice = np.flatnonzero(np.diff(index[order]) == 0)
        if len(twice) and not strength:
            first, second = int(order[twice[0]]), int(order[twice[0] + 1])
            other = resident.who(resident.launch_thread(int(place.threads[second])))
            detail = f"{what} {_where(place, first)} and by {other} in one instruction"
            resident.report(f"race in {place.space} memory", place.threads[first], detail)
        if note:
            shadow.note_write(index, who, strength)
    counts = resident.write_counts(place)
    if counts is not None and not strength:
        again = counts[index] > 0
        if again.any():
            first = int(np.argmax(again))
            detail = f"{what} {_where(place, first)} a second time in this launch"
            resident.report("output written twice", place.threads[first], detail)
        counts[index] = 1


def _signed(address: int) -> int:
    """An address below 0 as such: it has wrapped at 32 bits or at 64, as its register is wide."""
    for bits in (32, 64):
        if 1 << (bits - 1) <= address < 1 << bits:
            return address - (1 << bits)
    return address


def _where(place: Place, first: int) -> str:
    offset = int(place.offset[first])
    if place.allocation is not None:
        return f"of {place.allocation.name}[{offset // 4}]"
    return f"of shared address {offset % (1 << 20)}"


def count_access(resident: Resident, place: Place, size: int, what: str) -> None:
    """Bytes moved; for shared memory wavefronts and conflicts, for global memory sectors."""
    counts = resident.counts
    counts.add(f"bytes {what} {place.space}", size * len(place.threads))
    if not resident.options.measure or not len(place.threads):
        return
    warp = place.threads // 32
    if place.space == "shared":
        _count_banks(resident, place, size, what, warp)
    else:
        _count_sectors(resident, place, size, what, warp)


def _count_banks(resident: Resident, place: Place, size: int, what: str, warp: Any) -> None:
    """Wavefronts: 8- and 16-byte accesses go by half and quarter warps; equal words are one."""
    parts = max(1, size // 4)
    lane = place.threads % 32
    phase = warp * parts + lane // (32 // parts)
    words = np.concatenate([place.offset // 4 + step for step in range(parts)])
    phases = np.tile(phase, parts)
    pairs = np.unique(np.stack([phases, words]), axis=1)
    banks = np.bincount(_dense(pairs[0]) * 32 + pairs[1] % 32)
    banks = np.pad(banks, (0, -len(banks) % 32)).reshape(-1, 32)
    wavefronts = int(banks.max(axis=1).sum())
    ideal = len(np.unique(phase))
    resident.counts.add(f"wavefronts {what} shared", wavefronts)
    resident.counts.add(f"bank conflicts {what} shared", wavefronts - ideal)
    resident.note_conflicts(wavefronts - ideal)


def _count_sectors(resident: Resident, place: Place, size: int, what: str, warp: Any) -> None:
    steps = np.arange(0, size, 4)
    byte = (place.offset[:, None] + steps).reshape(-1)
    owner = np.repeat(warp, len(steps))
    words = np.unique(np.stack([owner, byte // 4]), axis=1)
    sectors = words[0] * (1 << 40) + words[1] // (SECTOR // 4)
    _, filled = np.unique(sectors, return_counts=True)
    resident.counts.add(f"sectors {what} global", len(filled))
    partial = int((filled < SECTOR // 4).sum())
    resident.counts.add(f"partial sectors {what} global", partial)


def _dense(values: Any) -> Any:
    return np.unique(values, return_inverse=True)[1]
