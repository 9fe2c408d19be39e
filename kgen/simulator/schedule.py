"""Which group of threads runs next, and when a launch counts as hung.

The lowest program counter goes first. A group that went round a loop in which it only looked at
what others write spins: it gives way to every other group, and lanes that have run ahead of a
spinning lane of their warp wait for it at the next instruction that the warp executes together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kgen.simulator.device import SimulationError

if TYPE_CHECKING:
    from kgen.simulator.machine import Resident

_PATIENCE = 512  # backward branches of one group before others that could run get their turn
_GIVE_UP = 100_000  # backward branches in a row after which a launch counts as hung
_STALE = 1_000  # instructions without a change after which a loop around a look is waiting
_MOST_STEPS = 1_500_000  # instructions without a write, a barrier or an exit, likewise
_ROUNDS = 1000  # times that every spinning group looks in vain before the launch counts as hung


class Schedule:
    """The order in which the groups of a resident set run."""

    def __init__(self, resident: Resident) -> None:
        self._resident = resident
        self._backward, self._patience = 0, _PATIENCE
        self._spinning: dict[int, int] = {}  # program counter -> turn at which it ran last
        self._parked: set[int] = set()  # waits for spinning lanes of its warps
        self._turn = self._vain = 0
        self._looks: dict[int, int] = {}  # start of a loop -> polls when it was branched to last
        self._changed_at = 0  # step at which a group last changed something
        self.forced = False  # whether the chosen group was parked, and its lanes will not come

    @property
    def spins(self) -> bool:
        """Whether some group spins."""
        return bool(self._spinning)

    def arrive(self, pc: int) -> None:
        """Threads have become ready at `pc`: together with those there they may go on."""
        self._spinning.pop(pc, None)
        self._parked.discard(pc)

    def park(self, pc: int) -> None:
        """The group at `pc` waits for lanes that spin."""
        self._parked.add(pc)

    def choose(self, ready: dict[int, Any]) -> int:
        """The program counter of the group to run. Raises: SimulationError when hung."""
        if self._backward > _GIVE_UP or self._resident.steps - self._changed_at > _MOST_STEPS:
            raise self._hung()
        self._turn += 1
        self.forced = False
        free = [pc for pc in ready if pc not in self._spinning and pc not in self._parked]
        if free:
            if self._backward > self._patience and len(ready) > 1:
                self._patience = self._backward + _PATIENCE
                return max(pc for pc in ready if pc not in self._parked)
            return min(free)
        spinning = [pc for pc in ready if pc in self._spinning]
        if not spinning or (self._vain > 4 * len(spinning) and self._parked):
            self.forced = True
            return min(self._parked)  # the lanes it waits for will not come
        if self._vain > _ROUNDS * len(spinning):
            raise self._hung()
        self._vain += 1
        return min(spinning, key=self._spinning.__getitem__)

    def ran(self, target: int, *, looked: bool, changed: bool) -> None:
        """A group has run; `target` is where it branched back to, -1 if it did not."""
        if changed:
            self._vain, self._changed_at = 0, self._resident.steps
            self._looks.clear()
        if target < 0:
            self._backward, self._patience = 0, _PATIENCE
            return
        self._backward += 1
        if not changed and (looked or self._looked_elsewhere(target)):
            self._spinning[target] = self._turn
            self._backward = 0

    def _looked_elsewhere(self, target: int) -> bool:
        """Whether a loop goes round in which others of its threads look, and nothing changes.

        Lanes that part and meet inside a loop that waits are not the ones that look when they go
        round. Someone has looked since the loop's start was last branched to, and groups that
        spin have not run in between.
        """
        before = self._looks.get(target)
        self._looks[target] = self._resident.polls
        if before is None or self._resident.polls == before:
            return False
        return self._resident.steps - self._changed_at > _STALE

    def _hung(self) -> SimulationError:
        resident = self._resident
        text = f"{resident.launch.kernel.name}: no progress: {resident.where()}"
        if self._spinning and resident.blocks < resident.launch.blocks:
            first, last = resident.first_block, resident.first_block + resident.blocks - 1
            text += (
                f"; only blocks {first} to {last} of {resident.launch.blocks} are resident: blocks "
                "that wait for each other need a cooperative launch"
            )
        return SimulationError(text)


def incomplete(resident: Resident, threads: Any) -> Any:
    """Mask of `threads` whose warp has live lanes that are not among them."""
    warps = resident.size // 32
    here = np.bincount(threads // 32, minlength=warps)
    live = np.bincount(np.flatnonzero(~resident.exited) // 32, minlength=warps)
    return (here < live)[threads // 32]
