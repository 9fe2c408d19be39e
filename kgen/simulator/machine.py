"""The machine: runs the blocks of a launch, many at a time in lockstep.

The blocks that run together are a `Resident`. Its threads are numbered through: block by block,
thread by thread. All threads at the same program counter execute together; where they differ, the
lowest counter runs first, which brings them together again behind loops and branches. A group that
loops for long while others could run lets them pass, so that waiting for another block ends.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kgen.simulator.access import Place
from kgen.simulator.copies import AsyncCopies
from kgen.simulator.decode import Control, Decoded
from kgen.simulator.device import Launch, SimulationError
from kgen.simulator.memory import SharedMemory
from kgen.simulator.ptx import PtxError
from kgen.simulator.watch import Accessors, Clocks, Shadow

Active = Any
_PATIENCE = 512  # backward branches of one group before others that could run get their turn
_GIVE_UP = 100_000  # backward branches in a row after which a launch counts as hung


class Resident:
    """Blocks that run in lockstep: registers, shared memory, program counters."""

    def __init__(self, launch: Launch, first_block: int, blocks: int) -> None:
        self.launch, self.device = launch, launch.device
        self.options, self.memory = launch.device.options, launch.device.memory
        self.watching = self.options.checks or self.options.measure
        self.counts = launch.counts
        self.first_block, self.blocks = first_block, blocks
        self.threads_per_block = launch.threads
        self.size = blocks * launch.threads
        self.shared = SharedMemory(blocks, launch.shared_size)
        self.clocks = Clocks(blocks, launch.threads // 32)
        self.copies = AsyncCopies()
        self._registers: dict[str, Any] = {}
        self._everyone = np.arange(self.size)
        self._block = self._everyone // launch.threads
        self._exited = np.zeros(self.size, dtype=bool)
        self._barrier = np.full(self.size, -1)  # which barrier a thread waits at
        self._resume = np.zeros(self.size, dtype=np.int64)
        self._arrived: dict[int, list[Any]] = {}  # barrier -> arrays of threads that only arrived
        self._ready: dict[int, Active] = {0: None}
        self._now: Decoded = launch.code[0]
        self.shared_shadow = Shadow(len(self.shared.words)) if self.options.checks else None
        self._traced = self._trace_index()

    # ---- What steps use -----------------------------------------------------------------------

    def read(self, name: str, active: Active) -> Any:
        """A register's bits for the active threads; one element if all threads agree."""
        bits = self._registers.get(name)
        if bits is None:
            bits = self._registers[name] = self._undefined(name)
        return bits if active is None or len(bits) == 1 else bits[active]

    def _undefined(self, name: str) -> Any:
        """What a register holds that nothing has written: the compiler may read it on paths where
        the value does not matter, so it is no finding, but it is a NaN where it does matter."""
        width = self.launch.kernel.widths[name.rstrip("0123456789")]
        if width == 1:
            return np.zeros(1, dtype=np.bool_)
        return np.array([0x7FC5A5A57FC5A5A5 >> (64 - width)], dtype=f"uint{width}")

    def write(self, name: str, active: Active, bits: Any) -> None:
        """Set a register for the active threads."""
        if active is None:
            self._registers[name] = bits
            return
        old = self._registers.get(name)
        if old is None:
            full = np.zeros(self.size, dtype=bits.dtype)
        elif len(old) == 1:
            full = np.full(self.size, old[0], dtype=bits.dtype)
        else:
            full = old.copy()  # another register may share the array
        full[active] = bits
        self._registers[name] = full

    def special(self, name: str, active: Active) -> Any:
        """A special register's value, uint32."""
        key = f"special {name}"
        if key not in self._registers:
            self._registers[key] = self._special(name).astype(np.uint32)
        return self.read(key, active)

    def _special(self, name: str) -> Any:
        tid = self._everyone % self.threads_per_block
        values = {
            "%tid.x": tid,
            "%laneid": tid % 32,
            "%warpid": tid // 32,
            "%ctaid.x": self.first_block + self._block,
            "%ntid.x": np.array([self.threads_per_block]),
            "%nctaid.x": np.array([self.launch.blocks]),
        }
        if name in values:
            return values[name]
        if name in ("%tid.y", "%tid.z", "%ctaid.y", "%ctaid.z"):
            return np.array([0])
        if name in ("%ntid.y", "%ntid.z", "%nctaid.y", "%nctaid.z"):
            return np.array([1])
        raise PtxError(f"special register {name} is not supported")

    def address_of(self, symbol: str) -> Any:
        """The address of a variable: in its block for shared memory, global otherwise."""
        if symbol in self.launch.shared_offsets:
            return np.array([self.launch.shared_offsets[symbol]], dtype=np.uint64)
        if symbol in self.device.symbols:
            return np.array([self.device.symbols[symbol].base], dtype=np.uint64)
        raise PtxError(f"unknown symbol {symbol}")

    def parameter(self, name: str) -> bytes:
        """The bytes of a kernel parameter."""
        return self.launch.parameters[name]

    def threads(self, active: Active) -> Any:
        """Numbers of the active threads among the resident ones."""
        return self._everyone if active is None else active

    def launch_thread(self, thread: int) -> int:
        """A resident thread's number over the whole launch."""
        return self.first_block * self.threads_per_block + thread

    def who(self, launch_thread: int) -> str:
        """A thread in words."""
        block, thread = divmod(launch_thread, self.threads_per_block)
        return f"block {block} thread {thread}"

    def report(self, kind: str, thread: Any, detail: str) -> None:
        """Note a finding at the current instruction."""
        block, index = divmod(self.launch_thread(int(thread)), self.threads_per_block)
        self.device.findings.add(
            kind, self.launch.kernel.name, self._now.instruction, block, index, detail
        )

    def shadow(self, place: Place) -> Shadow | None:
        """The access history of a place; None where it is not watched (inputs)."""
        if place.space == "shared":
            return self.shared_shadow
        one = place.allocation
        if one is None or one.role in ("input", "constant"):
            return None
        if one.name not in self.launch.shadows:
            self.launch.shadows[one.name] = Shadow(len(one.words))
        return self.launch.shadows[one.name]

    def accessors(self, threads: Any) -> Accessors:
        """The identities and clocks of threads."""
        warps = self.threads_per_block // 32
        warp = threads // 32
        return Accessors(
            clocks=self.clocks,
            thread=threads + self.first_block * self.threads_per_block,
            warp=warp,
            warp_in_block=warp % warps,
            base_warp=self.first_block * warps,
        )

    def write_counts(self, place: Place) -> Any:
        """Writes of each word of an output in this launch; None for other memory."""
        one = place.allocation
        if one is None or one.role != "output":
            return None
        if one.name not in self.launch.write_counts:
            self.launch.write_counts[one.name] = np.zeros(len(one.words), dtype=np.uint8)
        return self.launch.write_counts[one.name]

    def note_conflicts(self, count: int) -> None:
        """Bank conflicts of the current instruction."""
        if count:
            key = (self.launch.kernel.name, self._now.instruction.line)
            self.device.conflicts[key] = self.device.conflicts.get(key, 0) + count

    # ---- Running ------------------------------------------------------------------------------

    def run(self) -> None:
        """Run all resident blocks to their end. Raises: SimulationError."""
        backward, patience = 0, _PATIENCE
        while True:
            if not self._ready:
                if self._exited.all():
                    return
                raise SimulationError(f"{self.launch.kernel.name}: deadlock: {self._where()}")
            if backward > _GIVE_UP:
                raise SimulationError(f"{self.launch.kernel.name}: no progress: {self._where()}")
            order = sorted(self._ready)
            start = order[-1] if backward > patience and len(order) > 1 else order[0]
            if start != order[0]:
                patience = backward + _PATIENCE
            others = [one for one in order if one != start]
            active = self._ready.pop(start)
            stop = min((one for one in others if one > start), default=len(self.launch.code))
            went_back = self._execute(start, active, stop)
            backward = backward + 1 if went_back else 0
            if not went_back:
                patience = _PATIENCE

    def _execute(self, pc: int, active: Active, stop: int) -> bool:
        """Run a group from `pc` until it splits, waits, ends or reaches `stop`.

        Returns whether it ended with a backward branch.
        """
        code, tally = self.launch.code, self.counts.add
        here = self.size if active is None else len(active)
        while pc < stop:
            now = self._now = code[pc]
            predicate = now.instruction.predicate
            if now.step is not None:
                chosen, count = active, here
                if predicate is not None:
                    chosen, count = self._guarded(predicate, active, here)
                if count:
                    tally(now.category, count)
                    now.step(self, chosen)
                    if self._traced is not None:
                        self._trace(chosen)
                pc += 1
                continue
            tally(now.category, here)
            assert now.control is not None
            chosen, count = active, here
            if predicate is not None:
                chosen, count = self._guarded(predicate, active, here)
            if count == here:
                return self._control(now.control, pc, active)
            if count:
                kept = np.setdiff1d(self.threads(active), chosen, assume_unique=True)
                self._add(pc + 1, kept)
                return self._control(now.control, pc, chosen)
            pc += 1
        self._add(pc, active)
        return False

    def _guarded(self, predicate: Any, active: Active, here: int) -> tuple[Active, int]:
        """The active threads whose predicate holds, and how many they are."""
        values = self.read(predicate.name, active)
        if predicate.negated:
            values = ~values
        if len(values) == 1:
            return (active, here) if values[0] else (active, 0)
        count = int(np.count_nonzero(values))
        if count == here:
            return active, here
        return (self.threads(active)[values] if count else active), count

    def _control(self, control: Control, pc: int, active: Active) -> bool:
        if control.kind == "branch":
            self._add(control.target, active)
            return control.target <= pc
        if control.kind == "exit":
            self._exited[self.threads(active)] = True
            return False
        self._meet(control, pc, active)
        return False

    def _add(self, pc: int, active: Active) -> None:
        """Make a group ready at `pc`, merged with one that is already there."""
        if pc >= len(self.launch.code):
            self._exited[self.threads(active)] = True
            return
        if pc in self._ready:
            both = np.concatenate([self.threads(self._ready[pc]), self.threads(active)])
            active = np.sort(both)
        if active is not None and len(active) == self.size:
            active = None
        self._ready[pc] = active

    def _meet(self, control: Control, pc: int, active: Active) -> None:
        """A barrier: wait, or only arrive; release the blocks in which all are there."""
        assert control.barrier is not None
        numbers = np.unique(control.barrier(self, active))
        if len(numbers) != 1:
            raise SimulationError("a barrier whose number differs between threads")
        number, threads = int(numbers[0]), self.threads(active)
        self._report_divergence(threads)
        if control.kind == "arrive":
            self._arrived.setdefault(number, []).append(threads)
            self._add(pc + 1, active)
        else:
            self._barrier[threads] = number
            self._resume[threads] = pc + 1
        expected = self._expected(control, active)
        waiting = self._everyone[self._barrier == number]
        arrived = np.concatenate([np.empty(0, dtype=np.int64), *self._arrived.get(number, [])])
        present = np.bincount(self._block[waiting], minlength=self.blocks)
        present += np.bincount(self._block[arrived], minlength=self.blocks)
        for block in np.flatnonzero((present >= expected) & (present > 0)):
            released = waiting[self._block[waiting] == block]
            came = arrived[self._block[arrived] == block]
            self.clocks.join(np.unique(released // 32), np.unique(came // 32))
            self._barrier[released] = -1
            for resume in np.unique(self._resume[released]):
                self._add(int(resume), released[self._resume[released] == resume])
            if len(came):
                rest = arrived[self._block[arrived] != block]
                self._arrived[number] = [rest]
                arrived = rest

    def _expected(self, control: Control, active: Active) -> Any:
        if control.count is not None:
            return int(np.max(control.count(self, active)))
        return np.bincount(self._block[~self._exited], minlength=self.blocks)

    def _report_divergence(self, threads: Any) -> None:
        """A barrier needs whole warps, and every thread of its block to come."""
        lanes = np.bincount(threads // 32, minlength=self.size // 32)
        live = np.bincount(self._everyone[~self._exited] // 32, minlength=self.size // 32)
        torn = (lanes > 0) & (lanes < live)
        if torn.any():
            warp = int(np.argmax(torn))
            detail = f"{lanes[warp]} of {live[warp]} threads of a warp"
            self.report("divergent barrier", warp * 32, detail)
        gone = np.bincount(self._block[self._exited], minlength=self.blocks)
        block = int(self._block[threads[0]])
        if gone[block]:
            detail = f"{gone[block]} threads of the block have exited"
            self.report("divergent barrier", threads[0], detail)

    def _where(self) -> str:
        """Where each block waits or spins, the first few."""
        parts = []
        for pc, active in sorted(self._ready.items()):
            threads = self.threads(active)
            line = self.launch.code[pc].instruction.line
            who = self.who(self.launch_thread(int(threads[0])))
            parts.append(f"{len(threads)} threads (first: {who}) at PTX line {line}")
        for number in np.unique(self._barrier[self._barrier >= 0]):
            waiting = self._everyone[self._barrier == number]
            line = self.launch.code[int(self._resume[waiting[0]]) - 1].instruction.line
            who = self.who(self.launch_thread(int(waiting[0])))
            parts.append(
                f"{len(waiting)} threads (first: {who}) at barrier {number}, PTX line {line}"
            )
        return "; ".join(parts[:8])

    # ---- Trace --------------------------------------------------------------------------------

    def _trace_index(self) -> int | None:
        if self.options.trace is None:
            return None
        block, thread = self.options.trace
        if not self.first_block <= block < self.first_block + self.blocks:
            return None
        return (block - self.first_block) * self.threads_per_block + thread

    def _trace(self, active: Active) -> None:
        if active is not None and self._traced not in active:
            return
        instruction, shown = self._now.instruction, ""
        for operand in instruction.operands[:1]:
            names = getattr(operand, "items", (operand,))
            values = [self._registers.get(getattr(one, "name", "")) for one in names]
            shown = ", ".join(
                f"{one[0 if len(one) == 1 else self._traced]:#x}"
                if one.dtype != np.bool_
                else str(one[0 if len(one) == 1 else self._traced])
                for one in values
                if one is not None
            )
        text = " ".join(instruction.text.split())
        self.device.traced.append(f"{instruction.line:6d}  {text}  -> {shown}")
