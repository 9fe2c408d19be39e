"""Registers of wgmma that are in use by a product, or changed without a fence.

PTX ISA, "wgmma.mma_async" and "wgmma.fence": accumulators and fragments of A belong to the product
until a wgmma.wait_group covers it, and what other instructions did to them needs a wgmma.fence
before the product. The compiler copies registers around asm statements, and a mov between two of
them may stand anywhere: it is no access here, but carries the state of its source to its target.
Reading a fragment of A that a product uses is not looked for, nor reading an accumulator without a
fence before the next product.

Which instructions touch such registers is found while decoding; all others cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kgen.simulator.ptx import Address, Instruction, Operand, Register, Vector

if TYPE_CHECKING:
    from kgen.simulator.decode import Active, Decoded, Step
    from kgen.simulator.machine import Resident

UNFINISHED = "unfinished wgmma"
UNFENCED = "missing wgmma fence"
_STORES = ("st", "red", "bar", "barrier", "mbarrier", "cp", "prefetch")


@dataclass(eq=False)
class Accumulators:
    """The registers of a product's result, in order.

    rivals: others that share registers with these, but are not the same list.
    """

    names: tuple[str, ...]
    rivals: list[Accumulators] = field(default_factory=list)

    @property
    def columns(self) -> int:
        """Of the matrix."""
        return 2 * len(self.names)


@dataclass
class Registry:
    """The registers that a kernel's wgmma use, as found while decoding."""

    accumulators: dict[tuple[str, ...], Accumulators] = field(default_factory=dict)
    writers: dict[str, list[Accumulators]] = field(default_factory=dict)  # by register
    fragments: set[str] = field(default_factory=set)  # registers of A

    def of(self, names: tuple[str, ...]) -> Accumulators:
        """The accumulators with these names."""
        found = self.accumulators.get(names)
        if found is None:
            found = self.accumulators[names] = Accumulators(names)
            for name in names:
                for other in self.writers.setdefault(name, []):
                    if other not in found.rivals:
                        found.rivals.append(other)
                        other.rivals.append(found)
                self.writers[name].append(found)
        return found


@dataclass(frozen=True)
class _Touched:
    """What an instruction does to registers that are looked after."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    moves: bool


def warps_of(threads: Any) -> Any:
    """The resident numbers of the warps of some threads, in order."""
    return np.flatnonzero(np.bincount(threads >> 5))


class InFlight:
    """States of registers of the resident warps."""

    def __init__(self, resident: Resident) -> None:
        self._warps = resident.size // 32
        # Registers that others than products wrote, by warp, until a wgmma.fence.
        self._changed: dict[str, Any] = {}
        # Copies of accumulators: the group that writes the original.
        self._copied: dict[str, Any] = {}

    def fence(self, warps: Any) -> None:
        """wgmma.fence."""
        for name in list(self._changed):
            self._changed[name][warps] = False
            if not self._changed[name].any():
                del self._changed[name]

    def written(self, name: str, warps: Any) -> None:
        """An ordinary instruction wrote a register."""
        if name not in self._changed:
            self._changed[name] = np.zeros(self._warps, dtype=np.bool_)
        self._changed[name][warps] = True
        if name in self._copied:
            self._copied[name][warps] = -1

    def moved(
        self, resident: Resident, registry: Registry, to: str, sources: Iterable[str], warps: Any
    ) -> None:
        """A mov: the target is what its sources are."""
        changed, newest = np.zeros(len(warps), dtype=np.bool_), np.full(len(warps), -1)
        for name in sources:
            if name in self._changed:
                changed |= self._changed[name][warps]
            newest = np.maximum(newest, self._newest(resident, registry.writers, name, warps))
        if changed.any() or to in self._changed:
            self.written(to, warps)
            self._changed[to][warps] = changed
        if (newest >= 0).any() or to in self._copied:
            self._copied.setdefault(to, np.full(self._warps, -1))[warps] = newest

    def _newest(
        self, resident: Resident, writers: dict[str, list[Accumulators]], name: str, warps: Any
    ) -> Any:
        """The newest group that writes a register, for each of some warps; -1 for none."""
        state = resident.warpgroups
        newest = np.full(len(warps), -1)
        for one in writers.get(name, ()):
            last = state.last.get(one)
            if last is not None:
                newest = np.maximum(newest, last[state.group_of_warp[warps]])
        if name in self._copied:
            newest = np.maximum(newest, self._copied[name][warps])
        return newest

    def check_access(
        self, resident: Resident, registry: Registry, touched: _Touched, warps: Any
    ) -> None:
        """Look for accesses of an ordinary instruction to registers of products under way."""
        state = resident.warpgroups
        for name in touched.reads:
            newest = self._newest(resident, registry.writers, name, warps)
            _report(resident, name, newest, warps, "read")
        for name in touched.writes:
            newest = self._newest(resident, registry.writers, name, warps)
            if name in state.reading:
                newest = np.maximum(newest, state.reading[name][state.group_of_warp[warps]])
            _report(resident, name, newest, warps, "written")

    def check_product(
        self,
        resident: Resident,
        registry: Registry,
        one: Accumulators,
        fragments: tuple[str, ...],
        groups: Any,
    ) -> None:
        """Look for registers of a new product that were changed without a fence, or are in use."""
        state = resident.warpgroups
        warps = np.flatnonzero(np.isin(state.group_of_warp, groups))
        bare = ~state.fenced[warps]
        if bare.any():
            thread = int(warps[np.argmax(bare)]) * 32
            resident.report(UNFENCED, thread, "no wgmma.fence before the first wgmma.mma_async")
        if self._changed:
            for name in sorted(self._changed.keys() & {*one.names, *fragments}):
                changed = self._changed[name][warps]
                if changed.any():
                    thread = int(warps[np.argmax(changed)]) * 32
                    detail = f"{name} was written after the last wgmma.fence"
                    resident.report(UNFENCED, thread, detail)
        # One of another shape does not wait for these. Of the same shape it is the same sum whose
        # registers the compiler renamed in between: the assembler then makes it wait (C7519).
        for other in one.rivals:
            if other in state.last and other.columns != one.columns:
                newest = state.last[other][state.group_of_warp[warps]]
                _report(resident, one.names[0], newest, warps, "written")
        for name in fragments:
            if name in registry.writers:
                newest = self._newest(resident, registry.writers, name, warps)
                _report(resident, name, newest, warps, "read")


def watch(code: list[Decoded], registry: Registry) -> list[Decoded]:
    """The code with checks in front of the instructions that touch registers of wgmma."""
    if not registry.accumulators:
        return code
    tracked = _tracked(code, {*registry.writers, *registry.fragments})
    result = []
    for decoded in code:
        touched = _touched(decoded.instruction, tracked)
        ordinary = decoded.step is not None and decoded.instruction.op[0] != "wgmma"
        if ordinary and (touched.reads or touched.writes):
            decoded = replace(decoded, step=_checked(decoded.step, touched, registry))
        result.append(decoded)
    return result


def _checked(step: Any, touched: _Touched, registry: Registry) -> Step:
    def checked(resident: Resident, active: Active) -> None:
        if resident.options.checks:
            inflight, warps = resident.inflight, warps_of(resident.threads(active))
            if touched.moves:
                for to in touched.writes:
                    inflight.moved(resident, registry, to, touched.reads, warps)
            else:
                if resident.warpgroups.unwaited:
                    inflight.check_access(resident, registry, touched, warps)
                for name in touched.writes:
                    inflight.written(name, warps)
        step(resident, active)

    return checked


def _report(resident: Resident, name: str, newest: Any, warps: Any, what: str) -> None:
    early = newest >= resident.warpgroups.waited[warps]
    if early.any():
        thread = int(warps[np.argmax(early)]) * 32
        detail = f"{name} is {what} before a wgmma.wait_group for the product that uses it"
        resident.report(UNFINISHED, thread, detail)


# ---- Which registers ----------------------------------------------------------------------------


def _names(operands: Iterable[Operand]) -> list[str]:
    names = []
    for operand in operands:
        items: Iterable[Any] = operand.items if isinstance(operand, Vector) else (operand,)
        for one in items:
            if isinstance(one, Register):
                names.append(one.name)
            elif isinstance(one, Address) and isinstance(one.base, Register):
                names.append(one.base.name)
    return names


def _parts(instruction: Instruction) -> tuple[list[str], list[str]]:
    """Registers that an instruction reads and those that it writes."""
    operands = instruction.operands
    stores = instruction.op[0] in _STORES or (operands and isinstance(operands[0], Address))
    if stores or not operands:
        return _names(operands), []
    return _names(operands[1:]), _names(operands[:1])


def _tracked(code: list[Decoded], names: set[str]) -> set[str]:
    """`names` and all that movs connect with them."""
    links = [
        {*reads, *writes}
        for reads, writes in (
            _parts(one.instruction) for one in code if one.instruction.op[0] == "mov"
        )
    ]  # fmt: skip
    grown = set(names)
    while True:
        more = [one for one in links if not one.isdisjoint(grown)]
        if not more:
            return grown
        links = [one for one in links if one.isdisjoint(grown)]
        grown.update(*more)


def _touched(instruction: Instruction, tracked: set[str]) -> _Touched:
    reads, writes = _parts(instruction)
    return _Touched(
        tuple(name for name in reads if name in tracked),
        tuple(name for name in writes if name in tracked),
        instruction.op[0] == "mov",
    )
