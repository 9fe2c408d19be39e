"""Asynchronous copies that have been issued and not yet been waited for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from kgen.simulator.access import Place
    from kgen.simulator.machine import Resident

_OPEN = (1 << 31) - 1  # the group of copies that no commit has closed


@dataclass
class _Pending:
    """One word of each of some threads, and the number of its group among those of its thread."""

    threads: Any
    words: Any
    group: Any


class AsyncCopies:
    """cp.async of the resident blocks. Words count as written when their thread has waited."""

    def __init__(self, threads: int) -> None:
        self._pending: list[_Pending] = []
        self._committed = np.zeros(threads, dtype=np.int32)  # groups, empty ones too

    def start(self, resident: Resident, place: Place, words: Any) -> None:
        """Note the words that the threads of `place` have begun to copy."""
        resident.shared.in_flight[words] = True
        self._pending.append(_Pending(place.threads, words, np.full(len(words), _OPEN)))

    def commit(self, resident: Resident, active: Any) -> None:
        """Close the open copies of each active thread into its next group."""
        threads = resident.threads(active)
        for one in self._pending:
            mine = (one.group == _OPEN) & np.isin(one.threads, threads)
            one.group[mine] = self._committed[one.threads[mine]]
        self._committed[threads] += 1

    def wait(self, resident: Resident, active: Any, allowed: int | None) -> None:
        """Finish the active threads' groups, all but the newest `allowed` of each.

        None (wait_all) finishes copies that were never committed, too.
        """
        threads = resident.threads(active)
        kept = []
        for one in self._pending:
            done = np.isin(one.threads, threads)
            if allowed is not None:
                done &= one.group < self._committed[one.threads] - allowed
            self._finish(resident, one.threads[done], one.words[done])
            if not done.all():
                kept.append(_Pending(one.threads[~done], one.words[~done], one.group[~done]))
        self._pending = kept

    @staticmethod
    def _finish(resident: Resident, threads: Any, words: Any) -> None:
        if not len(threads):
            return
        resident.shared.in_flight[words] = False
        shadow = resident.shared_shadow
        if shadow is not None:
            shadow.note_write(words, resident.accessors(threads))
