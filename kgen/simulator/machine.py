"""The machine: runs the blocks of a launch, many at a time in lockstep.

The blocks that run together are a `Resident`. Its threads are numbered through: block by block,
thread by thread. All threads at the same program counter execute together; where they differ, the
lowest counter runs first, which brings them together again behind loops and branches. `schedule`
lets others pass groups that wait for them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kgen.simulator.access import Place
from kgen.simulator.bulk import Bulk
from kgen.simulator.clocks import Clocks
from kgen.simulator.copies import AsyncCopies
from kgen.simulator.decode import Control, Decoded
from kgen.simulator.device import Launch, SimulationError
from kgen.simulator.inflight import InFlight
from kgen.simulator.meeting import Meeting
from kgen.simulator.memory import DividedMemory
from kgen.simulator.ordering import Order
from kgen.simulator.products import Warpgroups
from kgen.simulator.ptx import PtxError
from kgen.simulator.schedule import Schedule, incomplete
from kgen.simulator.watch import Accessors, Shadow

Active = Any


_LANEMASKS = {  # bit i is lane i: those before, from, behind a lane, and itself
    "lt": lambda lane: (1 << lane) - 1,
    "le": lambda lane: (2 << lane) - 1,
    "eq": lambda lane: 1 << lane,
    "ge": lambda lane: 0xFFFFFFFF & ~((1 << lane) - 1),
    "gt": lambda lane: 0xFFFFFFFF & ~((2 << lane) - 1),
}


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
        self.shared = DividedMemory(blocks, launch.shared_size)
        self.local = DividedMemory(self.size, launch.local_size)
        warps = launch.threads // 32
        agents = -(-warps // 4) if launch.wgmma else 0
        self.clocks = Clocks(blocks, warps, first_block, launch.blocks, launch.time, agents)
        self.copies, self.bulk, self.order = AsyncCopies(self.size), Bulk(), Order(self)
        self.warpgroups, self.inflight = Warpgroups(self), InFlight(self)
        # What waiting loops look at: strong reads and failed waits; and what may end them.
        self.polls = self.changes = 0
        self.steps = 0  # instructions run, each for a whole group
        self._registers: dict[str, Any] = {}
        self._everyone = np.arange(self.size)
        self._block = self._everyone // launch.threads
        self.exited = np.zeros(self.size, dtype=bool)
        self._meeting, self._schedule = Meeting(self), Schedule(self)
        self._ready: dict[int, Active] = {0: None}
        self._now: Decoded = launch.code[0]
        self.shared_shadow: Shadow | None = None
        if self.options.checks:
            columns = warps + agents if launch.fine else 0
            self.shared_shadow = Shadow(len(self.shared.words), columns)
            if launch.bulk or launch.wgmma:
                self.shared_shadow.watch_bulk()
        self._traced = self._trace_index()

    # ---- What steps use -----------------------------------------------------------------------

    def read(self, name: str, active: Active) -> Any:
        """A register's bits for the active threads; one element if all threads agree."""
        bits = self._registers.get(name)
        if bits is None:
            bits = self.warpgroups.held(name)
            if bits is None:
                bits = self._registers[name] = self._undefined(name)
        return bits if active is None or len(bits) == 1 else bits[active]

    def _kept(self, name: str) -> Any:
        """A register of all threads, kept here or among the accumulators; None if unwritten."""
        bits = self._registers.get(name)
        return self.warpgroups.held(name) if bits is None else bits

    def _undefined(self, name: str) -> Any:
        """What a register holds that nothing has written: the compiler may read it on paths where
        the value does not matter, so it is no finding, but it is a NaN where it does matter."""
        width = self.launch.kernel.width(name)
        assert width is not None  # decoding refuses undeclared registers
        if width == 1:
            return np.zeros(1, dtype=np.bool_)
        return np.array([0x7FC5A5A57FC5A5A5 >> (64 - width)], dtype=f"uint{width}")

    def write(self, name: str, active: Active, bits: Any) -> None:
        """Set a register for the active threads."""
        if active is None:
            self._registers[name] = bits
            return
        old = self._kept(name)
        if old is None:
            old = self._undefined(name)
        # A copy: another register may share the array.
        full = np.full(self.size, old[0], dtype=bits.dtype) if len(old) == 1 else old.copy()
        full[active] = bits
        self._registers[name] = full

    def take(self, names: tuple[str, ...]) -> dict[str, Any]:
        """Take those of some registers out that are kept here."""
        registers = self._registers
        if registers.keys().isdisjoint(names):
            return {}
        return {name: registers.pop(name) for name in names if name in registers}

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
        if name.startswith("%lanemask_"):
            return _LANEMASKS[name.removeprefix("%lanemask_")](tid % 32)
        return np.array([0 if name.startswith(("%tid", "%ctaid")) else 1])

    def address_of(self, symbol: str) -> Any:
        """The address of a variable: in its block or thread for shared and local memory."""
        if symbol in self.launch.offsets:
            return np.array([self.launch.offsets[symbol]], dtype=np.uint64)
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
        schedule, launch = self._schedule, self.launch
        while True:
            if not self._ready:
                if self.exited.all():
                    break
                raise SimulationError(f"{self.launch.kernel.name}: deadlock: {self.where()}")
            start = schedule.choose(self._ready)
            active = self._ready.pop(start)
            schedule.arrive(start)
            stop = min((one for one in self._ready if one > start), default=len(self.launch.code))
            polls, changes = self.polls, self.changes
            try:
                target = self._execute(start, active, stop)
            except ZeroDivisionError as error:
                line = self._now.instruction.line
                raise SimulationError(f"{launch.kernel.name}: {error}, PTX line {line}") from None
            schedule.ran(target, looked=self.polls > polls, changed=self.changes > changes)
        if self.options.checks:
            self.bulk.finish(self)
        self.launch.time = self.clocks.now

    def _execute(self, pc: int, active: Active, stop: int) -> int:
        """Run a group from `pc` until it splits, waits, ends or reaches `stop`.

        Returns where it ended with a backward branch, -1 otherwise.
        """
        code, tally, start = self.launch.code, self.counts.add, pc
        here = self.size if active is None else len(active)
        while pc < stop:
            now = self._now = code[pc]
            self.steps += 1
            if now.by_warpgroup or (now.together and active is not None):
                forced = self._schedule.forced and pc == start
                active = self._whole(pc, active, forced=forced, by_warpgroup=now.by_warpgroup)
                if active is not None and not len(active):
                    return -1
                here = self.size if active is None else len(active)
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
                self.make_ready(pc + 1, kept)
                return self._control(now.control, pc, chosen)
            pc += 1
        self.make_ready(pc, active)
        return -1

    def _whole(self, pc: int, active: Active, *, forced: bool, by_warpgroup: bool) -> Active:
        """The threads whose whole warp or warpgroup is here; the others wait for the rest.

        The rest may spin, or have been sent by the compiler to code that lies behind.

        forced: those will not come, so that warps of which none is whole go on as they are.
        """
        threads = self.threads(active)
        torn = self.warpgroups.torn(active) if by_warpgroup else incomplete(self, threads)
        if torn is None or not torn.any() or (forced and torn.all()):
            return active
        self.make_ready(pc, threads[torn])
        self._schedule.park(pc)
        return threads[~torn]

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

    def _control(self, control: Control, pc: int, active: Active) -> int:
        if control.kind == "branch":
            self.make_ready(control.target, active)
            return control.target if control.target <= pc else -1
        if control.kind == "exit":
            self._exit(active)
            return -1
        self._meeting.meet(control, pc, active)
        return -1

    def _exit(self, active: Active) -> None:
        self.exited[self.threads(active)] = True
        self.changes += 1

    def make_ready(self, pc: int, active: Active) -> None:
        """Make a group ready at `pc`, merged with one that is already there."""
        if pc >= len(self.launch.code):
            self._exit(active)
            return
        self._schedule.arrive(pc)
        if pc in self._ready:
            both = np.concatenate([self.threads(self._ready[pc]), self.threads(active)])
            active = np.sort(both)
        if active is not None and len(active) == self.size:
            active = None
        self._ready[pc] = active

    def where(self) -> str:
        """Where each block waits or spins, the first few."""
        places = [(pc, "", self.threads(active)) for pc, active in sorted(self._ready.items())]
        places += [(pc, f"barrier {one}, ", who) for one, pc, who in self._meeting.waiting()]
        parts = []
        for pc, what, threads in places:
            line = self.launch.code[pc].instruction.line
            who = self.who(self.launch_thread(int(threads[0])))
            blocks = np.unique(self._block[threads]) + self.first_block
            of = f"block {blocks[0]}" if len(blocks) == 1 else f"{len(blocks)} blocks"
            parts.append(f"{len(threads)} threads of {of} (first: {who}) at {what}PTX line {line}")
        return "; ".join((parts + self.bulk.describe(self))[:8])

    # ---- Trace --------------------------------------------------------------------------------

    def _trace_index(self) -> int | None:
        if self.options.trace is None:
            return None
        block, thread = self.options.trace
        if not self.first_block <= block < self.first_block + self.blocks:
            return None
        if thread >= self.threads_per_block:
            return None
        return (block - self.first_block) * self.threads_per_block + thread

    def _trace(self, active: Active) -> None:
        if active is not None and self._traced not in active:
            return
        instruction, shown = self._now.instruction, ""
        for operand in instruction.operands[:1]:
            names = getattr(operand, "items", (operand,))
            values = [self._kept(getattr(one, "name", "")) for one in names]
            shown = ", ".join(
                f"{one[0 if len(one) == 1 else self._traced]:#x}"
                if one.dtype != np.bool_
                else str(one[0 if len(one) == 1 else self._traced])
                for one in values
                if one is not None
            )
        text = " ".join(instruction.text.split())
        self.device.traced.append(f"{instruction.line:6d}  {text}  -> {shown}")
