"""Asynchronous copies that have been issued and not yet been waited for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from kgen.simulator.access import Place
    from kgen.simulator.machine import Resident


@dataclass
class _Pending:
    """One word of each of some threads; group None until it is committed."""

    threads: Any
    words: Any
    group: int | None = None


class AsyncCopies:
    """cp.async of the resident blocks. Words count as written when their thread has waited."""

    def __init__(self) -> None:
        self._pending: list[_Pending] = []
        self._groups = 0

    def start(self, resident: Resident, place: Place, words: Any) -> None:
        """Note the words that the threads of `place` have begun to copy."""
        resident.shared.in_flight[words] = True
        self._pending.append(_Pending(place.threads, words))

    def commit(self, resident: Resident, active: Any) -> None:
        """Close the open copies of the active threads into one group."""
        threads = resident.threads(active)
        kept = []
        for one in self._pending:
            if one.group is not None:
                kept.append(one)
                continue
            mine = np.isin(one.threads, threads, assume_unique=False)
            kept.append(_Pending(one.threads[mine], one.words[mine], self._groups))
            if not mine.all():
                kept.append(_Pending(one.threads[~mine], one.words[~mine]))
        self._pending = [one for one in kept if len(one.threads)]
        self._groups += 1

    def wait(self, resident: Resident, active: Any, allowed: int) -> None:
        """Finish the active threads' copies, all but the newest `allowed` groups.

        With `allowed` 0 (wait_all) copies that were never committed finish too.
        """
        threads = resident.threads(active)
        newest = sorted({one.group for one in self._pending if one.group is not None})
        still = set(newest[len(newest) - allowed :]) if allowed else set()
        kept = []
        for one in self._pending:
            if one.group in still or (one.group is None and allowed):
                kept.append(one)
                continue
            mine = np.isin(one.threads, threads)
            self._finish(resident, one.threads[mine], one.words[mine])
            if not mine.all():
                kept.append(_Pending(one.threads[~mine], one.words[~mine], one.group))
        self._pending = kept

    @staticmethod
    def _finish(resident: Resident, threads: Any, words: Any) -> None:
        if not len(threads):
            return
        resident.shared.in_flight[words] = False
        shadow = resident.shared_shadow
        if shadow is not None:
            shadow.note_write(words, resident.accessors(threads))
