"""mbarrier objects in shared memory: phases, pending arrivals, bytes still to come.

A phase completes when no arrival and no byte is pending. Bulk copies land when a thread waits for
the phase that they belong to, as late as a real machine could be, so that whoever reads without
waiting finds the old content.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kgen.simulator.access import Place, resolve
from kgen.simulator.clocks import Known
from kgen.simulator.ptx import Instruction, PtxError, Symbol

if TYPE_CHECKING:
    from kgen.simulator.decode import Active, Step, _Decoder
    from kgen.simulator.machine import Resident

_MOST_BYTES = (1 << 20) - 1
_MOST_ARRIVALS = (1 << 20) - 1
MISUSE = "mbarrier misuse"


@dataclass
class Landing:
    """A bulk copy to shared memory that has been issued: the words that it will write."""

    thread: int
    words: Any
    data: Any  # None where it was refused: only its bytes are counted
    size: int


@dataclass
class Barrier:
    """One mbarrier. `index` numbers those of a block; `told` is what arrivals have published."""

    count: int
    index: int
    pending: int = 0
    bytes_due: int = 0
    phase: int = 0
    dropped: int = 0
    told: Known | None = None
    told_before: Known | None = None  # by the arrivals of the phase that completed last
    copies: list[Landing] = field(default_factory=list)
    landed: list[tuple[int, Any]] = field(default_factory=list)  # phase, words: not waited for yet

    @property
    def idle(self) -> bool:
        """Whether nothing has happened in this phase."""
        return self.pending == self.count and not self.bytes_due

    def describe(self) -> str:
        """The state in words."""
        return (
            f"phase {self.phase}, {self.pending} of {self.count} arrivals and {self.bytes_due} "
            f"bytes pending"
        )


class Barriers:
    """The mbarriers of the resident blocks, by their first word."""

    def __init__(self) -> None:
        self.live: dict[int, Barrier] = {}
        self._indices: dict[int, int] = {}  # word -> index of the barrier in its block
        self._counts: dict[int, int] = {}  # block -> barriers it has had

    def initialise(self, resident: Resident, word: int, thread: int, count: int) -> None:
        """mbarrier.init."""
        if word in self.live:
            resident.report(MISUSE, thread, "initialised again while it is in use")
        if not 0 < count <= _MOST_ARRIVALS:
            resident.report(MISUSE, thread, f"a count of {count}")
            count = max(1, min(count, _MOST_ARRIVALS))
        block = thread // resident.threads_per_block
        index = self._counts.get(block, 0)
        self._counts[block] = index + 1
        resident.clocks.column(index)
        self.live[word] = Barrier(count, index, pending=count)

    def arrive(self, resident: Resident, barrier: Barrier, thread: int, count: int) -> None:
        """`count` arrivals, by a thread that is named where they are too many."""
        if count > barrier.pending:
            detail = f"{count} arrivals, {barrier.describe()}"
            resident.report(MISUSE, thread, detail)
        barrier.pending = max(0, barrier.pending - count)
        self.complete(barrier)

    def transact(self, resident: Resident, barrier: Barrier, thread: int, size: int) -> None:
        """Expect more bytes, or fewer where `size` is negative."""
        barrier.bytes_due += size
        if abs(barrier.bytes_due) > _MOST_BYTES:
            resident.report(MISUSE, thread, f"{barrier.bytes_due} bytes pending")
        self.complete(barrier)

    @staticmethod
    def complete(barrier: Barrier) -> None:
        """End the phase if nothing is pending."""
        if barrier.pending == 0 and barrier.bytes_due == 0:
            barrier.phase += 1
            barrier.count -= barrier.dropped
            barrier.dropped, barrier.pending = 0, barrier.count
            barrier.told_before, barrier.told = barrier.told, None

    def land(self, resident: Resident, barrier: Barrier) -> None:
        """Let the outstanding copies write their words and count their bytes."""
        copies, barrier.copies = barrier.copies, []
        for one in copies:
            if one.data is not None:
                resident.shared.words[one.words] = one.data
                resident.shared.written[one.words] = True
                barrier.landed.append((barrier.phase, one.words))
            resident.changes += 1
            self.transact(resident, barrier, one.thread, -one.size)

    def waited(self, resident: Resident, barrier: Barrier, threads: Any) -> None:
        """A wait for the phase before the current one succeeded for `threads` of one block."""
        clocks, warps = resident.clocks, np.unique(threads // 32)
        if barrier.told_before is not None:
            clocks.absorb(warps, barrier.told_before)
        seen = clocks.phases[warps, barrier.index]
        clocks.phases[warps, barrier.index] = np.maximum(seen, barrier.phase)
        kept = []
        for phase, words in barrier.landed:
            if phase >= barrier.phase:
                kept.append((phase, words))
                continue
            resident.shared.in_flight[words] = False
            if resident.shared_shadow is not None:
                resident.shared_shadow.note_copy(words, barrier.index, phase)
        barrier.landed = kept


def decode(decoder: _Decoder, instruction: Instruction) -> Step:
    """The step of an mbarrier instruction. Raises: PtxError."""
    op, name = instruction.op, instruction.op[1]
    known = {"release", "acquire", "relaxed", "cta", "cluster", "shared", "shared__cta",
             "shared__cluster", "b64", "parity", "expect_tx"}  # fmt: skip
    if name == "pending_count" and op[2:] == ("b64",):
        return _pending_count(decoder, instruction)
    if set(op[2:]) - known or op[-1] != "b64":
        raise PtxError(f"unknown form {instruction.name}")
    if name in ("init", "inval"):
        return _initialise(decoder, instruction)
    if name in ("expect_tx", "complete_tx"):
        return _transact(decoder, instruction)
    if name in ("arrive", "arrive_drop"):
        return _arrive(decoder, instruction)
    if name in ("test_wait", "try_wait"):
        return _wait(decoder, instruction)
    raise PtxError(f"unknown form {instruction.name}")


def _space(op: tuple[str, ...]) -> str:
    return "shared" if any(one.startswith("shared") for one in op) else "generic"


def find(resident: Resident, place: Place, what: str) -> list[tuple[Barrier, Any]]:
    """The barriers at the places of threads, each with the rows of its threads."""
    words = place.offset >> 2
    shadow = resident.shared_shadow
    if shadow is not None:  # against its initialisation
        who = resident.accessors(place.threads)
        racing = shadow.unordered_write(words, who, 2)
        if racing.any():
            first = int(np.argmax(racing))
            other = resident.who(int(shadow.writer[words[first]]))
            detail = f"{what} against the initialisation by {other}"
            resident.report("race in shared memory", place.threads[first], detail)
    found = []
    for word in np.unique(words):
        rows = np.flatnonzero(words == word)
        barrier = resident.bulk.barriers.live.get(int(word))
        if barrier is None:
            resident.report(MISUSE, place.threads[rows[0]], f"{what} of one not initialised")
            continue
        found.append((barrier, rows))
    return found


def _initialise(decoder: _Decoder, instruction: Instruction) -> Step:
    op, operands = instruction.op, instruction.operands
    space, address = _space(op), decoder.address(operands[0])
    count = decoder.source(operands[1], "u32") if op[1] == "init" else None

    def initialise(resident: Resident, active: Active) -> None:
        threads = resident.threads(active)
        resident.changes += 1
        bulk = resident.bulk
        bulk.start(resident)
        for place in resolve(resident, threads, space, address(resident, active), 8, "mbarrier"):
            words = place.offset >> 2
            for step in (0, 1):
                place.written[words + step] = count is not None
                place.words[words + step] = 0
                bulk.barrier_words[words + step] = count is not None
            if count is None:
                for barrier, rows in find(resident, place, "inval"):
                    if barrier.copies:
                        detail = "invalidated while a bulk copy counts on it"
                        resident.report(MISUSE, place.threads[rows[0]], detail)
                for word in np.unique(words):
                    bulk.barriers.live.pop(int(word), None)
                continue
            counts = np.broadcast_to(count(resident, active), threads.shape)
            rows = np.arange(len(threads)) if place.kept is None else place.kept
            for word, thread, row in zip(words, place.threads, rows, strict=True):
                bulk.barriers.initialise(resident, int(word), int(thread), int(counts[row]))
            if resident.shared_shadow is not None:
                who = resident.accessors(place.threads)
                for step in (0, 1):
                    resident.shared_shadow.note_write(words + step, who)

    return initialise


def _transact(decoder: _Decoder, instruction: Instruction) -> Step:
    op, operands = instruction.op, instruction.operands
    space, address = _space(op), decoder.address(operands[0])
    size, sign = decoder.source(operands[1], "u32"), 1 if op[1] == "expect_tx" else -1

    def transact(resident: Resident, active: Active) -> None:
        threads = resident.threads(active)
        sizes = np.broadcast_to(size(resident, active), threads.shape)
        resident.changes += 1
        for place in resolve(resident, threads, space, address(resident, active), 8, "mbarrier"):
            given = sizes if place.kept is None else sizes[place.kept]
            for barrier, rows in find(resident, place, op[1]):
                total = sign * int(given[rows].sum())
                thread = int(place.threads[rows[0]])
                resident.bulk.barriers.transact(resident, barrier, thread, total)

    return transact


def _arrive(decoder: _Decoder, instruction: Instruction) -> Step:
    op, operands = instruction.op, instruction.operands
    expects, drops = "expect_tx" in op, op[1] == "arrive_drop"
    first = 0 if len(operands) > 1 and not _is_address(operands[0]) else -1
    unused = first < 0 or (isinstance(operands[0], Symbol) and operands[0].name == "_")
    store = None if unused else decoder.target(operands[0], "b64")
    address = decoder.address(operands[first + 1])
    rest = operands[first + 2 :]
    if len(rest) > 1 or (expects and not rest):
        raise PtxError(f"unknown form {instruction.name}")
    number = decoder.source(rest[0], "u32") if rest else None
    space, releases = _space(op), "relaxed" not in op

    def arrive(resident: Resident, active: Active) -> None:
        threads = resident.threads(active)
        given = np.broadcast_to(
            np.array([1]) if number is None else number(resident, active), threads.shape
        )
        tokens = np.zeros(len(threads), dtype=np.uint64)
        barriers, clocks = resident.bulk.barriers, resident.clocks
        resident.changes += 1
        for place in resolve(resident, threads, space, address(resident, active), 8, "mbarrier"):
            at = np.arange(len(threads)) if place.kept is None else place.kept
            for barrier, rows in find(resident, place, op[1]):
                ones = given[at[rows]].astype(np.int64)
                counts = np.ones(len(rows), dtype=np.int64) if expects else ones
                told = clocks.publish(np.unique(place.threads[rows] // 32)) if releases else None
                # All at once where they end no more than this phase, else one after the other.
                whole = counts.sum() <= barrier.pending
                parts = np.split(rows, [] if whole else np.arange(1, len(rows)))
                done = 0
                for part in parts:
                    here = slice(done, done + len(part))
                    done += len(part)
                    thread = int(place.threads[part[0]])
                    tokens[at[part]] = barrier.phase
                    if told is not None:
                        barrier.told = clocks.merge(barrier.told, told)
                    if expects:
                        barrier.bytes_due += int(ones[here].sum())
                    if drops:
                        barrier.dropped += int(counts[here].sum())
                    barriers.arrive(resident, barrier, thread, int(counts[here].sum()))
        if store is not None:
            store(resident, active, tokens)

    return arrive


def _is_address(operand: Any) -> bool:
    from kgen.simulator.ptx import Address

    return isinstance(operand, Address)


def _wait(decoder: _Decoder, instruction: Instruction) -> Step:
    op, operands = instruction.op, instruction.operands
    by_parity = "parity" in op
    store, address = decoder.target(operands[0], "pred"), decoder.address(operands[1])
    wanted = decoder.source(operands[2], "u32" if by_parity else "b64")
    space, acquires = _space(op), "relaxed" not in op

    def wait(resident: Resident, active: Active) -> None:
        threads = resident.threads(active)
        given = np.broadcast_to(wanted(resident, active), threads.shape).astype(np.int64)
        passed = np.ones(len(threads), dtype=np.bool_)
        barriers = resident.bulk.barriers
        for place in resolve(resident, threads, space, address(resident, active), 8, "mbarrier"):
            at = np.arange(len(threads)) if place.kept is None else place.kept
            for barrier, rows in find(resident, place, op[1]):
                asked = given[at[rows]]
                if not by_parity and ((asked > barrier.phase) | (asked < barrier.phase - 1)).any():
                    detail = f"a state of another phase, {barrier.describe()}"
                    resident.report(MISUSE, place.threads[rows[0]], detail)
                done = _done(barrier, asked, by_parity)
                if not done.all() and barrier.copies:
                    barriers.land(resident, barrier)
                    done = _done(barrier, asked, by_parity)
                passed[at[rows]] = done
                if acquires and done.any():
                    barriers.waited(resident, barrier, place.threads[rows[done]])
        if not passed.all():
            resident.polls += 1
        store(resident, active, passed)

    return wait


def _done(barrier: Barrier, asked: Any, by_parity: bool) -> Any:
    return (barrier.phase & 1) != asked & 1 if by_parity else asked < barrier.phase


def _pending_count(decoder: _Decoder, instruction: Instruction) -> Step:
    raise PtxError(f"{instruction.name} is not supported: states keep no count here")
