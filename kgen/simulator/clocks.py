"""Who has seen what: vector clocks of the warps of a launch.

There is one time for the whole launch, which advances whenever a warp publishes. `seen[warp, w]` is
the last time at which `warp` w of the same block published something that reached this warp: all
that w did up to then is ordered before what this warp does now. What warps know of other blocks is
kept apart, as rows over all warps of the launch, because most kernels never need it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Known:
    """What a publication tells: of the warps and mbarriers of its block, and of other blocks.

    block is over the launch; -1 where publications of several blocks came together in `outer`.
    """

    block: int
    inner: Any
    phases: Any
    outer: Any


class Clocks:
    """Vector clocks of the warps of the resident blocks.

    now: the time. seen: see above, and behind the columns of the warps some for `agents` that work
    beside them, as warpgroups' products do. synced: when the lanes of a warp were last ordered.
    phases: the completed phases of each mbarrier of the block that a warp has waited for. crossed:
    whether any warp knows of another block.
    """

    def __init__(
        self,
        blocks: int,
        warps: int,
        first_block: int = 0,
        all_blocks: int = 0,
        start: int = 1,
        agents: int = 0,
    ) -> None:
        self.warps, self.first_block = warps, first_block
        self.all_warps = max(blocks, all_blocks) * warps
        self.now = start
        self.seen = np.zeros((blocks * warps, warps + agents), dtype=np.int32)
        self.synced = np.zeros(blocks * warps, dtype=np.int32)
        self.phases = np.zeros((blocks * warps, 1), dtype=np.int32)
        self.crossed = False
        self._outer: dict[int, Any] = {}  # warp -> row; rows are shared and never changed
        self._table: Any = None  # the distinct rows stacked, and which is a warp's
        self._row_of: Any = None

    def publish(self, warps: Any) -> Known:
        """What `warps`, all of one block, know and have done until now."""
        inside = warps % self.warps
        inner = self.seen[warps].max(axis=0)
        inner[inside] = self.now
        outer = self._merged(warps)
        self.now += 1
        block = int(warps[0]) // self.warps + self.first_block
        return Known(block, inner, self.phases[warps].max(axis=0), outer)

    def absorb(self, warps: Any, known: Known) -> None:
        """`warps`, all of one block, learn what was published."""
        block = int(warps[0]) // self.warps + self.first_block
        if known.block == block:
            self.seen[warps] = np.maximum(self.seen[warps], known.inner)
            # What other lanes of the same warp published is ordered, too.
            self.synced[warps] = np.maximum(self.synced[warps], known.inner[warps % self.warps] + 1)
            count = known.phases.shape[0]
            self.phases[warps, :count] = np.maximum(self.phases[warps, :count], known.phases)
            self._learn(warps, known.outer)
        else:
            row = self.flat(known).outer
            self._learn(warps, row)
            first = block * self.warps
            own = row[first : first + self.warps]
            seen = self.seen[warps]
            np.maximum(seen[:, : self.warps], own, out=seen[:, : self.warps])
            self.seen[warps] = seen
            self.synced[warps] = np.maximum(self.synced[warps], own[warps % self.warps] + 1)

    def join(self, waited: Any, arrived: list[Known]) -> None:
        """A barrier of one block: `waited` have now seen each other's and what arrived before."""
        known = self.publish(waited)
        for one in arrived:
            known = self.merge(known, one)
        self.absorb(waited, known)
        self.synced[waited] = self.now

    def advance(self, warps: Any) -> None:
        """A warp-wide synchronisation of each of `warps`."""
        self.now += 1
        self.synced[warps] = self.now

    def merge(self, one: Known | None, other: Known) -> Known:
        """Two publications as one."""
        if one is None or one is other:
            return other
        if one.block == other.block >= 0:
            few, many = sorted((one.phases, other.phases), key=len)
            phases = many.copy()
            phases[: len(few)] = np.maximum(phases[: len(few)], few)
            inner = np.maximum(one.inner, other.inner)
            return Known(one.block, inner, phases, _larger(one.outer, other.outer))
        return Known(-1, None, None, _larger(self.flat(one).outer, self.flat(other).outer))

    def flat(self, known: Known) -> Known:
        """A publication as one row over the launch; what it says of mbarriers is left out."""
        if known.block < 0:
            return known
        row = (
            np.zeros(self.all_warps, dtype=np.int32) if known.outer is None else known.outer.copy()
        )
        part = row[known.block * self.warps : (known.block + 1) * self.warps]
        np.maximum(part, known.inner[: self.warps], out=part)
        return Known(-1, None, None, row)

    def known(self, warps: Any, others: Any) -> Any:
        """The last time of each of `others`, over the launch, that each of `warps` knows of."""
        if self._table is None:
            rows = {id(row): row for row in self._outer.values()}
            place = {key: index + 1 for index, key in enumerate(rows)}
            empty = np.zeros(self.all_warps, dtype=np.int32)
            self._table = np.stack([empty, *rows.values()])
            self._row_of = np.zeros(len(self.synced), dtype=np.int64)
            for warp, row in self._outer.items():
                self._row_of[warp] = place[id(row)]
        return self._table[self._row_of[warps], others]

    def column(self, index: int) -> None:
        """Make room for the phases of mbarrier number `index` of a block."""
        if index >= self.phases.shape[1]:
            self.phases = np.pad(self.phases, ((0, 0), (0, index + 1)))

    def _merged(self, warps: Any) -> Any:
        row = None
        if self.crossed:
            for warp in warps:
                row = _larger(row, self._outer.get(int(warp)))
        return row

    def _learn(self, warps: Any, row: Any) -> None:
        if row is None:
            return
        made: dict[int, Any] = {}
        for warp in warps:
            old = self._outer.get(int(warp))
            if id(old) not in made:
                made[id(old)] = _larger(old, row)
            self._outer[int(warp)] = made[id(old)]
        self.crossed, self._table = True, None


def _larger(one: Any, other: Any) -> Any:
    if one is None or one is other:
        return other
    return one if other is None else np.maximum(one, other)
