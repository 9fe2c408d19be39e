"""Barriers of a block: bar.sync and bar.arrive, numbered, with or without a count of threads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kgen.simulator.clocks import Known
from kgen.simulator.decode import Control, Vote
from kgen.simulator.device import SimulationError

if TYPE_CHECKING:
    from kgen.simulator.machine import Resident


class Meeting:
    """Who waits at which barrier of its block, and who has only arrived there."""

    def __init__(self, resident: Resident) -> None:
        self._resident = resident
        self._everyone = np.arange(resident.size)
        self._block = self._everyone // resident.threads_per_block
        self._at = np.full(resident.size, -1)  # which barrier a thread waits at
        self._resume = np.zeros(resident.size, dtype=np.int64)
        self._votes = np.zeros(resident.size, dtype=np.bool_)  # predicates brought to bar.red
        self._count: dict[tuple[int, int], int] = {}  # (block, barrier) -> threads it is for
        # (block, barrier) -> threads that only arrived, with what they had done until then.
        self._arrived: dict[tuple[int, int], list[tuple[Any, Known]]] = {}

    def meet(self, control: Control, pc: int, active: Any) -> None:
        """Threads reach a barrier: they wait or only arrive; complete blocks are let go."""
        resident, threads = self._resident, self._resident.threads(active)
        assert control.barrier is not None
        given = control.barrier(resident, active)
        numbers = np.unique(given)
        if len(numbers) > 1:
            for one in numbers.tolist():
                self._meet(control, pc, threads[given == one], one)
            return
        self._meet(control, pc, active, int(numbers[0]))

    def _meet(self, control: Control, pc: int, active: Any, number: int) -> None:
        resident, threads = self._resident, self._resident.threads(active)
        if not 0 <= number < 16:
            raise SimulationError(f"barrier {number}: there are 16")
        resident.changes += 1
        whole = control.count is None
        self._report_divergence(threads, whole=whole, aligned=control.aligned)
        counts = None if control.count is None else np.broadcast_to(
            control.count(resident, active), threads.shape)  # fmt: skip
        if control.kind == "barrier":
            self._at[threads] = number
            self._resume[threads] = pc + 1
        if control.vote is not None:
            self._votes[threads] = control.vote.predicate(resident, active)
        of = self._block[threads]
        for block in np.unique(of).tolist():
            mine = threads[of == block]
            if counts is not None:
                self._note_count(block, number, mine, int(counts[of == block].max()))
            if control.kind == "arrive":
                known = resident.clocks.publish(np.unique(mine // 32))
                self._arrived.setdefault((block, number), []).append((mine, known))
        if control.kind == "arrive":
            resident.make_ready(pc + 1, active)
        self._release(number, np.unique(of), whole=whole, vote=control.vote)

    def waiting(self) -> list[tuple[int, int, Any]]:
        """(barrier, program counter, threads) of those that wait."""
        found = []
        for number in np.unique(self._at[self._at >= 0]).tolist():
            threads = self._everyone[self._at == number]
            for resume in np.unique(self._resume[threads]).tolist():
                found.append((number, resume - 1, threads[self._resume[threads] == resume]))
        return found

    def _note_count(self, block: int, number: int, threads: Any, count: int) -> None:
        resident = self._resident
        known = self._count.setdefault((block, number), count)
        if known != count:
            detail = f"barrier {number} for {count} threads, where others wait for {known}"
            resident.report("barrier count", threads[0], detail)
        if count % 32 or not count:
            detail = f"barrier {number} for {count} threads, which is no whole number of warps"
            resident.report("barrier count", threads[0], detail)

    def _release(self, number: int, blocks: Any, *, whole: bool, vote: Vote | None) -> None:
        """Let go the blocks whose barrier is complete.

        More threads than a count says meet in turns, as many as it says each time.
        """
        resident = self._resident
        waiting = self._everyone[self._at == number]
        exited = resident.exited
        for block in blocks.tolist():
            here = waiting[self._block[waiting] == block]
            came = self._arrived.get((block, number), [])
            if whole:
                first = block * resident.threads_per_block
                expected = int(
                    np.count_nonzero(~exited[first : first + resident.threads_per_block])
                )
            else:
                expected = max(1, self._count[block, number])
            present = len(here) + sum(len(one) for one, _ in came)
            while present >= expected and present:
                room, told = expected, []
                while came and room > 0:
                    threads, known = came.pop(0)
                    told.append(known)
                    room -= len(threads)
                now, here = here[: max(room, 0)], here[max(room, 0) :]
                if len(now):
                    resident.clocks.join(np.unique(now // 32), told)
                    self._at[now] = -1
                    if vote is not None:
                        vote.store(resident, now, vote.reduce(self._votes[now]))
                    for resume in np.unique(self._resume[now]).tolist():
                        resident.make_ready(resume, now[self._resume[now] == resume])
                present -= expected
            if not present:
                self._arrived.pop((block, number), None)
                self._count.pop((block, number), None)

    def _report_divergence(self, threads: Any, *, whole: bool, aligned: bool) -> None:
        """An aligned barrier needs whole warps; one without a count every thread of its block."""
        resident = self._resident
        lanes = np.bincount(threads // 32, minlength=resident.size // 32)
        live = np.bincount(self._everyone[~resident.exited] // 32, minlength=resident.size // 32)
        torn = (lanes > 0) & (lanes < live)
        if aligned and torn.any():
            warp = int(np.argmax(torn))
            detail = f"{lanes[warp]} of {live[warp]} threads of a warp"
            resident.report("divergent barrier", warp * 32, detail)
        if not whole:
            return
        gone = np.bincount(self._block[resident.exited], minlength=resident.blocks)
        block = int(self._block[threads[0]])
        if gone[block]:
            detail = f"{gone[block]} threads of the block have exited"
            resident.report("divergent barrier", threads[0], detail)
