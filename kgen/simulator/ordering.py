"""Order between threads without a barrier: strong accesses, releases, acquires, fences.

A release publishes what its warp knows at the words that it writes; an acquire of such a word
learns it. A fence makes a release of the strong writes that its thread does afterwards, and an
acquire of the strong reads that it did before. Atomics pass on what they find. Order is kept for
warps, not for lanes: what one lane acquires its whole warp has seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kgen.simulator.clocks import Clocks, Known
from kgen.simulator.ptx import Instruction, PtxError

if TYPE_CHECKING:
    from kgen.simulator.access import Place
    from kgen.simulator.decode import Active, Step
    from kgen.simulator.machine import Resident

OPCODES = ("fence", "membar")
_SCOPES = {"cta": 1, "cluster": 2, "gpu": 2, "gl": 2, "sys": 2}
_ANY_BLOCK = -1


@dataclass(frozen=True)
class Strength:
    """How strong an access is: 0 ordinary, 1 within the block, 2 beyond; and what it orders."""

    scope: int = 0
    acquire: bool = False
    release: bool = False


def strength_of(op: tuple[str, ...]) -> Strength:
    """The strength that an opcode's modifiers give an access."""
    scope = max((_SCOPES[one] for one in op[1:] if one in _SCOPES), default=2)
    acquire, release = "acquire" in op or "acq_rel" in op, "release" in op or "acq_rel" in op
    strong = {"volatile", "relaxed", "acquire", "release", "acq_rel"} & set(op)
    if not strong and op[0] not in ("atom", "red"):
        return Strength()
    return Strength(scope, acquire, release)


class Publications:
    """What was published at each word of memory, over a launch: key (memory, word)."""

    def __init__(self) -> None:
        self._at: dict[tuple[str, int], dict[int, Known]] = {}

    def __bool__(self) -> bool:
        return bool(self._at)

    def get(self, key: tuple[str, int], block: int, scope: int, clocks: Clocks) -> Known | None:
        """What a thread of `block` can learn at a word through an access of `scope`."""
        entry = self._at.get(key)
        if entry is None:
            return None
        near = entry.get(block)
        far = entry.get(_ANY_BLOCK) if scope > 1 else None
        if near is None or far is None or near is far:
            return near if far is None else far
        return clocks.merge(near, far)

    def put(
        self, key: tuple[str, int], known: Known | None, scope: int, clocks: Clocks, *, keep: bool
    ) -> None:
        """A strong write: replaces what was published there, or with `keep` adds to it."""
        if not keep:
            self._at.pop(key, None)
        if known is None:
            return
        entry = self._at.setdefault(key, {})
        entry[known.block] = clocks.merge(entry.get(known.block), known)
        if scope > 1:
            entry[_ANY_BLOCK] = clocks.merge(entry.get(_ANY_BLOCK), known)

    def forget(self, memory: str, words: Any) -> None:
        """Ordinary writes: nothing can be learnt from these words any more."""
        if not len(words):
            return
        low, high = words.min(), words.max()
        near = [word for name, word in self._at if name == memory and low <= word <= high]
        keys = [(memory, word) for word in near if (words == word).any()]
        for key in keys:
            del self._at[key]


class Order:
    """Fences and strong reads of the resident threads that may still order something."""

    def __init__(self, resident: Resident) -> None:
        self._resident, self._clocks = resident, resident.clocks
        self.published: Publications = resident.launch.published
        # By thread: what its last fence published, by the fence's scope; what it read, by the scope
        # of the fence that would acquire it.
        self._fenced: dict[int, Any] = {}
        self._observed: dict[int, tuple[Known | None, Known | None]] = {}

    def memory(self, place: Place) -> str:
        """A name of the memory of a place, unique over the launch."""
        if place.allocation is not None:
            return place.allocation.name
        return f"shared memory from block {self._resident.first_block}"

    def loaded(self, place: Place, index: Any, strength: Strength) -> None:
        """A strong read of the words `index`."""
        if not self.published:
            return
        memory = self.memory(place)
        for word in np.unique(index):
            self.read_one((memory, int(word)), place.threads[index == word], strength)

    def read_one(self, key: tuple[str, int], threads: Any, strength: Strength) -> None:
        """A strong read of one word by some threads."""
        resident, clocks = self._resident, self._clocks
        block_of = threads // resident.threads_per_block
        for block in np.unique(block_of):
            mine = threads[block_of == block]
            launch_block = int(block) + resident.first_block
            known = self.published.get(key, launch_block, strength.scope, clocks)
            if known is None:
                continue
            if strength.acquire:
                clocks.absorb(np.unique(mine // 32), known)
                continue
            near = self.published.get(key, launch_block, 1, clocks)
            for thread in mine.tolist():
                old = self._observed.get(thread, (None, None))
                self._observed[thread] = (
                    near if old[0] is None or near is None else clocks.merge(old[0], near),
                    clocks.merge(old[1], known),
                )

    def stored(self, place: Place, index: Any, strength: Strength) -> None:
        """A strong write of the words `index`."""
        if not (strength.release or self._fenced or self.published):
            return
        memory, warps = self.memory(place), np.unique(place.threads // 32)
        fresh = {int(one): self._clocks.publish(one[None]) for one in warps if strength.release}
        for thread, word in zip(place.threads.tolist(), index.tolist(), strict=True):
            self.write_one((memory, word), thread, strength, fresh.get(thread // 32), keep=False)

    def write_one(
        self,
        key: tuple[str, int],
        thread: int,
        strength: Strength,
        fresh: Known | None,
        *,
        keep: bool,
    ) -> None:
        """A strong write of one word by one thread; `fresh` is what a release publishes."""
        if fresh is not None:
            self.published.put(key, fresh, strength.scope, self._clocks, keep=keep)
            return
        fences = self._fenced.get(thread, (None, None))
        if fences[1] is not None and strength.scope > 1:
            self.published.put(key, fences[1], 2, self._clocks, keep=keep)
            keep = True
        self.published.put(key, fences[0], 1, self._clocks, keep=keep)

    def atomic(self, place: Place, strength: Strength, row: int, word: int, *, reads: bool) -> None:
        """One thread's atomic on one word: learns, then publishes beside what is there."""
        if not (strength.release or self._fenced or self.published):
            return
        thread = int(place.threads[row])
        key = (self.memory(place), word)
        if reads and self.published:
            self.read_one(key, place.threads[row : row + 1], strength)
        fresh = None
        if strength.release:
            fresh = self._clocks.publish(np.array([thread // 32]))
        self.write_one(key, thread, strength, fresh, keep=True)

    def fence(self, threads: Any, scope: int) -> None:
        """A fence of `scope` by some threads."""
        clocks = self._clocks
        if self._observed:
            met: dict[tuple[int, int], Known] = {}
            for thread in threads.tolist():
                known = self._observed.get(thread, (None, None))[scope - 1]
                if known is not None:
                    met[thread // 32, id(known)] = known
            for (warp, _), known in met.items():
                clocks.absorb(np.array([warp]), known)
        for warp in np.unique(threads // 32):
            known = clocks.publish(np.array([warp]))
            for thread in threads[threads // 32 == warp].tolist():
                wide = known if scope > 1 else self._fenced.get(thread, (None, None))[1]
                self._fenced[thread] = (known, wide)


def decode(instruction: Instruction) -> Step:
    """The step of a fence. Raises: PtxError."""
    op = instruction.op
    names = set(op[1:])
    if op[1] == "proxy":
        return _proxy_fence(instruction)
    if op[1] == "mbarrier_init":  # an initialised barrier is visible without it here
        return lambda resident, active: None
    scopes = names & _SCOPES.keys()
    if len(scopes) != 1 or names - scopes - {"acq_rel", "sc", "acquire", "release"}:
        raise PtxError(f"unknown form {instruction.name}")
    scope = _SCOPES[scopes.pop()]

    def fence(resident: Resident, active: Active) -> None:
        if resident.options.checks:
            resident.order.fence(resident.threads(active), scope)

    return fence


def _proxy_fence(instruction: Instruction) -> Step:
    """fence.proxy.async: what a thread wrote becomes visible to bulk copies."""
    op = instruction.op
    if op[2:] in (("alias",), ("tensormap__generic",)):
        return lambda resident, active: None
    kind = op[3:] or ("shared__cta",)
    if op[2] != "async" or kind not in (("shared__cta",), ("shared__cluster",), ("global",)):
        raise PtxError(f"unknown form {instruction.name}")

    def fence(resident: Resident, active: Active) -> None:
        shadow = resident.shared_shadow
        if shadow is None or kind == ("global",):
            return
        mask = np.zeros(resident.launch_thread(resident.size), dtype=np.bool_)
        mask[resident.threads(active) + resident.launch_thread(0)] = True
        shadow.proxy_fence(mask, resident.clocks.now)
        resident.clocks.now += 1

    return fence
