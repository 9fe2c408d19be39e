"""Instructions -> steps: closures that act on the threads of a `Resident`.

A step takes the resident blocks and the indices of the active threads (None for all of them).
Control flow and barriers are left to the machine; they are decoded to `Control`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kgen.simulator import bulk, collectives, mbarriers, ordering, tensor, transfers, warpgroup
from kgen.simulator.inflight import Registry, watch
from kgen.simulator.ops import decode as decode_arithmetic
from kgen.simulator.ptx import (
    Address,
    Immediate,
    Instruction,
    Kernel,
    Operand,
    PtxError,
    Register,
    Special,
    Symbol,
    Vector,
)
from kgen.simulator.values import FLOATS, constant, raw, typed, widened

if TYPE_CHECKING:
    from kgen.simulator.machine import Resident

SPECIALS = {f"%{name}.{axis}" for name in ("tid", "ctaid", "ntid", "nctaid") for axis in "xyz"}
SPECIALS |= {"%laneid", "%warpid"}
SPECIALS |= {f"%lanemask_{order}" for order in ("lt", "le", "eq", "ge", "gt")}

Active = Any  # indices of the active threads, or None for all
Step = Callable[["Resident", Active], None]


@dataclass(frozen=True)
class Vote:
    """What bar.red does beside waiting: `reduce` the predicates of all and store the result."""

    predicate: Callable[[Resident, Active], Any]
    reduce: Callable[[Any], Any]
    store: Callable[[Resident, Active, Any], None]


_REDUCTIONS: dict[tuple[str, ...], Callable[[Any], Any]] = {
    ("popc", "u32"): lambda votes: np.array([np.count_nonzero(votes)], dtype=np.uint32),
    ("and", "pred"): lambda votes: np.array([votes.all()]),
    ("or", "pred"): lambda votes: np.array([votes.any()]),
}


@dataclass(frozen=True)
class Control:
    """An instruction that the machine itself carries out."""

    kind: str  # branch, exit, barrier, arrive
    target: int = -1
    barrier: Callable[[Resident, Active], Any] | None = None
    count: Callable[[Resident, Active], Any] | None = None
    aligned: bool = True  # whether it needs whole warps
    vote: Vote | None = None  # of a barrier that also reduces a predicate over its threads


@dataclass(frozen=True)
class Decoded:
    """One instruction, ready to run. `category` serves the instruction counts."""

    instruction: Instruction
    step: Step | None
    control: Control | None
    category: str
    by_warpgroup: bool = False  # whether four whole warps execute it

    @property
    def together(self) -> bool:
        """Whether whole warps execute it."""
        return self.category in ("collective", "barrier", "tensor core")


def decode_kernel(kernel: Kernel) -> list[Decoded]:
    """Decode every instruction of a kernel. Raises: PtxError with the PTX line."""
    decoder = _Decoder(kernel)
    result = []
    for instruction in kernel.code:
        try:
            result.append(decoder.decode(instruction))
        except PtxError as error:
            raise PtxError(
                f"PTX line {instruction.line}: {error} in `{' '.join(instruction.text.split())}`"
            ) from None
    return watch(result, decoder.registry)


class _Decoder:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.registry = Registry()
        self._mentions = Counter(
            name for one in kernel.code for name in re.findall(r"%[A-Za-z_]\w*", one.text)
        )

    def is_used(self, operand: Operand) -> bool:
        """Whether a register is named more than once in the kernel, thus not only written."""
        return not isinstance(operand, Register) or self._mentions[operand.name] > 1

    def decode(self, instruction: Instruction) -> Decoded:
        op, operands = instruction.op, instruction.operands
        if op[0] == "bra":
            return Decoded(instruction, None, self._branch(operands[0]), "control")
        if op[0] in ("ret", "exit"):
            return Decoded(instruction, None, Control("exit"), "control")
        if op[0] in ("bar", "barrier") and op[1] in ("sync", "arrive", "red", "cta"):
            return Decoded(instruction, None, self._barrier(op, operands), "barrier")
        if op[0] == "mbarrier":
            return Decoded(instruction, mbarriers.decode(self, instruction), None, "mbarrier")
        if op[:3] == ("cp", "async", "bulk"):
            return Decoded(instruction, bulk.decode(self, instruction), None, "asynchronous copy")
        if op[0] in ordering.OPCODES:
            return Decoded(instruction, ordering.decode(instruction), None, "fence")
        if op[0] in transfers.OPCODES:
            step, category = transfers.decode(self, instruction)
            return Decoded(instruction, step, None, category)
        if op[0] in tensor.OPCODES:
            step, category = tensor.decode(self, instruction)
            return Decoded(instruction, step, None, category)
        if op[0] in warpgroup.OPCODES:
            step, wide = warpgroup.decode(self, instruction), op[1] == "mma_async"
            return Decoded(instruction, step, None, "tensor core" if wide else "fence", wide)
        if op[0] in collectives.OPCODES:
            return Decoded(instruction, collectives.decode(self, instruction), None, "collective")
        if op[0] == "setmaxnreg":
            step = warpgroup.deal_registers(self, instruction)
            return Decoded(instruction, step, None, "fence")
        if op[0] in ("nanosleep", "griddepcontrol"):
            return Decoded(instruction, lambda resident, active: None, None, "fence")
        return Decoded(instruction, self._arithmetic(instruction), None, _category(op))

    def _branch(self, operand: Operand) -> Control:
        if not isinstance(operand, Symbol) or operand.name not in self.kernel.labels:
            raise PtxError("unknown branch target")
        return Control("branch", self.kernel.labels[operand.name])

    def _barrier(self, op: tuple[str, ...], operands: tuple[Operand, ...]) -> Control:
        names = set(op[1:]) - {"cta", "aligned"}
        aligned = op[0] == "bar" or "aligned" in op
        if "red" in names:
            return self._voting_barrier(op, operands, aligned=aligned)
        if names not in ({"sync"}, {"arrive"}):
            raise PtxError(f"unknown barrier form {'.'.join(op)}")
        kind = "arrive" if "arrive" in names else "barrier"
        count = self.source(operands[1], "u32") if len(operands) > 1 else None
        return Control(kind, -1, self.source(operands[0], "u32"), count, aligned)

    def _voting_barrier(
        self, op: tuple[str, ...], operands: tuple[Operand, ...], *, aligned: bool
    ) -> Control:
        """bar.red.op.type d, a{, b}, {!}c: a barrier with a reduction of predicates."""
        form = tuple(one for one in op[1:] if one not in ("cta", "red", "aligned"))
        reduce = _REDUCTIONS.get(form)
        if reduce is None or len(operands) not in (3, 4):
            raise PtxError(f"unknown barrier form {'.'.join(op)}")
        vote = Vote(self.source(operands[-1], "pred"), reduce, self.target(operands[0], op[-1]))
        count = self.source(operands[2], "u32") if len(operands) == 4 else None
        return Control("barrier", -1, self.source(operands[1], "u32"), count, aligned, vote)

    def _arithmetic(self, instruction: Instruction) -> Step:
        op, operands = instruction.op, instruction.operands
        if op[0] == "mov" and any(isinstance(one, Vector) for one in operands):
            return self._pack(op, operands)
        if op[0] == "cvta":
            return self._convert_address(op, operands)
        operation = decode_arithmetic(op)
        if len(operands) != 1 + len(operation.sources):
            raise PtxError(f"{len(operands) - 1} sources, expected {len(operation.sources)}")
        sources = [
            self.source(one, kind)
            for one, kind in zip(operands[1:], operation.sources, strict=True)
        ]
        store, function = self.target(operands[0], operation.result), operation.function
        if len(sources) == 2:
            first, second = sources

            def step_two(resident: Resident, active: Active) -> None:
                store(resident, active, function(first(resident, active), second(resident, active)))

            return step_two
        if len(sources) == 3:
            one, two, three = sources

            def step_three(resident: Resident, active: Active) -> None:
                store(
                    resident,
                    active,
                    function(one(resident, active), two(resident, active), three(resident, active)),
                )

            return step_three

        def step(resident: Resident, active: Active) -> None:
            store(resident, active, function(*(one(resident, active) for one in sources)))

        return step

    def _pack(self, op: tuple[str, ...], operands: tuple[Operand, ...]) -> Step:
        """mov between one wide register and a vector of narrower ones."""
        wide, kind = int(op[1][1:]), op[1]
        target, source = operands[0], operands[1]
        vector = target if isinstance(target, Vector) else source
        assert isinstance(vector, Vector)
        part = f"b{wide // len(vector.items)}"
        bits = wide // len(vector.items)
        if isinstance(target, Vector):
            read = self.source(source, kind)
            stores = [self.target(one, part) for one in target.items]

            def unpack(resident: Resident, active: Active) -> None:
                value = read(resident, active)
                for index, store in enumerate(stores):
                    moved = value >> value.dtype.type(bits * index)
                    store(resident, active, typed(moved, part))

            return unpack
        reads = [self.source(one, part) for one in vector.items]
        store_wide = self.target(target, kind)

        def pack(resident: Resident, active: Active) -> None:
            result: Any = np.zeros(1, dtype=f"uint{wide}")
            for index, one in enumerate(reads):
                value: Any = widened(one(resident, active), wide, part)
                result = result | (value << value.dtype.type(bits * index))
            store_wide(resident, active, result)

        return pack

    def _convert_address(self, op: tuple[str, ...], operands: tuple[Operand, ...]) -> Step:
        from kgen.simulator.memory import LOCAL_WINDOW, SHARED_WINDOW

        to_space, space, kind = op[1] == "to", op[-2], op[-1]
        window = {"global": 0, "param": 0, "const": 0, "shared": SHARED_WINDOW,
                  "local": LOCAL_WINDOW}.get(space)  # fmt: skip
        if window is None or kind != "u64":
            raise PtxError(f"unknown form {'.'.join(op)}")
        read, store = self.source(operands[1], kind), self.target(operands[0], kind)
        shift = np.uint64((-window if to_space else window) % (1 << 64))

        def step(resident: Resident, active: Active) -> None:
            store(resident, active, read(resident, active) + shift)

        return step

    def source(self, operand: Operand, kind: str) -> Callable[[Resident, Active], Any]:
        """A function that reads an operand as typed values of the active threads."""
        if isinstance(operand, Immediate):
            bits = operand.bits
            if operand.float_bits and kind in FLOATS and operand.float_bits != 8 * _bytes(kind):
                raise PtxError(f"an fp{operand.float_bits} literal as an {kind} operand")
            value = typed(constant(bits, kind), kind)
            return lambda resident, active: value
        if isinstance(operand, Register):
            name, negated = operand.name, operand.negated
            self.width(name)

            def read(resident: Resident, active: Active) -> Any:
                bits = resident.read(name, active)
                value: Any = typed(bits, kind)
                return ~value if negated else value

            return read
        if isinstance(operand, Special):
            special = operand.name
            if special not in SPECIALS:
                raise PtxError(f"special register {special} is not supported")
            return lambda resident, active: typed(
                widened(resident.special(special, active), 8 * _bytes(kind), "u32"), kind
            )
        if isinstance(operand, Symbol):
            symbol = operand.name
            return lambda resident, active: typed(
                widened(resident.address_of(symbol), 8 * _bytes(kind), "u64"), kind
            )
        raise PtxError(f"cannot use {operand} as a source")

    def target(self, operand: Operand, kind: str) -> Callable[[Resident, Active, Any], None]:
        """A function that stores typed values of the active threads."""
        if not isinstance(operand, Register):
            raise PtxError(f"cannot store to {operand}")
        name = operand.name
        if name == "_":
            return lambda resident, active, value: None
        width = self.width(name)
        if width == 1 or kind == "pred":
            return lambda resident, active, value: resident.write(name, active, raw(value))

        def store(resident: Resident, active: Active, value: Any) -> None:
            resident.write(name, active, widened(raw(value), width, kind))

        return store

    def width(self, register: str) -> int:
        """Declared width of a register in bits, from its prefix."""
        width = self.kernel.width(register)
        if width is None:
            raise PtxError(f"undeclared register {register}")
        return width

    def address(self, operand: Operand) -> Callable[[Resident, Active], Any]:
        """A function that gives the byte addresses of `[base + offset]` as uint64."""
        if not isinstance(operand, Address):
            raise PtxError(f"expected an address, got {operand}")
        offset = np.uint64(operand.offset % (1 << 64))
        if operand.base is None:
            fixed = np.array([offset])
            return lambda resident, active: fixed
        if isinstance(operand.base, Symbol):
            name = operand.base.name
            return lambda resident, active: resident.address_of(name) + offset
        register = operand.base.name
        wide, short = self.width(register) == 64, np.uint32(operand.offset % (1 << 32))

        def read(resident: Resident, active: Active) -> Any:
            bits = resident.read(register, active)
            if wide:
                return bits + offset
            return (bits.astype(np.uint32) + short).astype(np.uint64)  # wraps, as in hardware

        return read


def _bytes(kind: str) -> int:
    from kgen.simulator.values import DTYPES

    return int(np.dtype(DTYPES[kind]).itemsize)


def _category(op: tuple[str, ...]) -> str:
    kind = op[-1]
    if op[0] in ("ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh"):
        return "special function"
    if op[0] in ("fma", "mad") and kind in ("f32", "f64"):
        return "fused multiply-add"
    if kind in ("f32", "f64", "f16"):
        return "floating point"
    return "integer and logic"
