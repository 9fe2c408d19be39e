"""Warp-wide matrix instructions: mma.sync, ldmatrix, stmatrix.

What mma computes: operands exactly as the hardware takes them, products and their sum with the
accumulator in fp64, rounded once to fp32, to nearest even. Every product of two narrow operands is
exact in fp64 (and in fp32, within its range), so the one rounding is nearly the only error. The ISA
leaves order and rounding of the sum to the hardware, whose tensor cores align and truncate; a
result between those and exact arithmetic would match neither, this one does not depend on an order.
It differs from a device's by a few units in the last place of the largest summand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kgen.simulator.access import Place, check_read, check_write, count_access, resolve
from kgen.simulator.narrow import from_bf16, from_f16, halves, to_tf32
from kgen.simulator.ptx import Instruction, Operand, PtxError, Vector

if TYPE_CHECKING:
    from kgen.simulator.decode import Active, Step, _Decoder
    from kgen.simulator.machine import Resident

OPCODES = ("mma", "ldmatrix", "stmatrix")
ROW_BYTES = 16  # of an 8x8 matrix of 16-bit elements
_SHAPES = {("m16n8k4", "tf32"): 4, ("m16n8k8", "tf32"): 8}
_SHAPES |= {(f"m16n8k{k}", kind): k for k in (8, 16) for kind in ("f16", "bf16")}


def decode(decoder: _Decoder, instruction: Instruction) -> tuple[Step, str]:
    """The step of a matrix instruction and its category. Raises: PtxError."""
    if instruction.op[0] == "mma":
        return _multiply(decoder, instruction), "tensor core"
    if instruction.op[0] == "ldmatrix":
        return _load(decoder, instruction), "load"
    return _store(decoder, instruction), "store"


# ---- Warps --------------------------------------------------------------------------------------


def require_whole(resident: Resident, threads: Any) -> None:
    """Report a warp of which some threads are elsewhere or have exited: all must take part."""
    here = np.bincount(threads // 32, minlength=resident.size // 32)
    torn = (here > 0) & (here < 32)
    if torn.any():
        warp = int(np.argmax(torn))
        first = int(threads[np.argmax(threads // 32 == warp)])
        resident.report(
            "divergent warp instruction", first, f"{here[warp]} of 32 threads of the warp are here"
        )


def _by_warp(resident: Resident, active: Active, values: Any) -> Any:
    """Values of the active threads as [warps, lanes] of all resident warps; 0 where not active."""
    if active is None:
        return np.broadcast_to(values, (resident.size,)).reshape(-1, 32)
    everyone = np.zeros(resident.size, dtype=values.dtype)
    everyone[active] = values
    return everyone.reshape(-1, 32)


def _by_thread(active: Active, lanes: Any) -> Any:
    """The active threads' values out of [warps, lanes]."""
    flat = lanes.reshape(-1)
    return flat if active is None else flat[active]


def _registers(operand: Operand, count: int, what: str) -> tuple[Operand, ...]:
    items = operand.items if isinstance(operand, Vector) else (operand,)
    if len(items) != count:
        raise PtxError(f"{len(items)} registers for {what}, expected {count}")
    return items


# ---- mma ----------------------------------------------------------------------------------------

# PTX ISA, "Matrix Fragments for mma.m16n8k4 / .m16n8k8 / .m16n8k16": lane = 4 * group + member.
# A 32-bit register holds `each` elements that are neighbours along k (1 of tf32, 2 of 16 bits, the
# first in the low half), and the four members of a group cover 4 * each of k together:
#   A: register r has row group + 8 * (r % 2),
#      k = 4 * each * (r // 2) + each * member + element;
#   B: register r has k = 4 * each * r + each * member + element, column group;
#   C and D: register r has row group + 8 * (r // 2), column 2 * member + r % 2.
_LANE = np.arange(32)
_GROUP, _MEMBER = _LANE // 4, _LANE % 4
_ROW_C = np.stack([_GROUP + 8 * (register // 2) for register in range(4)])
_COLUMN_C = np.stack([2 * _MEMBER + register % 2 for register in range(4)])


def fragment_a(k: int, each: int) -> tuple[Any, Any]:
    """(row, k) of each A element as [registers * each, lanes]; `each` elements a register."""
    elements = [(r, e) for r in range(k // (2 * each)) for e in range(each)]
    row = np.stack([_GROUP + 8 * (r % 2) for r, _ in elements])
    return row, np.stack([4 * each * (r // 2) + each * _MEMBER + e for r, e in elements])


def fragment_b(k: int, each: int) -> tuple[Any, Any]:
    """(k, column) of each B element as [registers * each, lanes]."""
    elements = [(r, e) for r in range(k // (4 * each)) for e in range(each)]
    along = np.stack([4 * each * r + each * _MEMBER + e for r, e in elements])
    return along, np.broadcast_to(_GROUP, along.shape)


def fragment_order(fragment: tuple[Any, Any], columns: int) -> Any:
    """For each matrix element in row-major order where [elements, lanes], flattened, has it."""
    return np.argsort((fragment[0] * columns + fragment[1]).reshape(-1))


def unpack(kind: str) -> Callable[[Any], tuple[Any, ...]]:
    """The elements of 32-bit registers, low half first, as fp32."""
    if kind == "tf32":  # the low 13 bits are ignored
        return lambda bits: (to_tf32(bits, "rz").view(np.float32),)
    widen = from_f16 if kind == "f16" else from_bf16
    return lambda bits: tuple(widen(half) for half in halves(bits))


def _multiply(decoder: _Decoder, instruction: Instruction) -> Step:
    op = instruction.op
    if op[1:3] != ("sync", "aligned") or op[4:6] != ("row", "col") or len(op) != 10:
        raise PtxError(f"unknown form {instruction.name}")
    shape, (result, kind, kind_b, accumulator) = op[3], op[6:]
    if "f16" in (result, accumulator):
        raise PtxError(f"f16 accumulators are not supported: {instruction.name}")
    if (shape, kind) not in _SHAPES or kind_b != kind or (result, accumulator) != ("f32", "f32"):
        raise PtxError(f"unknown form {instruction.name}")
    if len(instruction.operands) != 4:
        raise PtxError(f"{len(instruction.operands)} operands, expected 4")
    k, each = _SHAPES[shape, kind], 1 if kind == "tf32" else 2
    to, a, b, c = instruction.operands
    stores = [decoder.target(one, "f32") for one in _registers(to, 4, "D")]
    reads_a = [decoder.source(one, "b32") for one in _registers(a, k // (2 * each), "A")]
    reads_b = [decoder.source(one, "b32") for one in _registers(b, k // (4 * each), "B")]
    reads_c = [decoder.source(one, "f32") for one in _registers(c, 4, "C")]
    in_a, in_b = fragment_order(fragment_a(k, each), k), fragment_order(fragment_b(k, each), 8)
    in_c, halve = fragment_order((_ROW_C, _COLUMN_C), 8), unpack(kind)

    def multiply(resident: Resident, active: Active) -> None:
        require_whole(resident, resident.threads(active))
        warps = resident.size // 32

        def gather(reads: list[Any], shape: tuple[int, int], order: Any, halve: Any) -> Any:
            parts = [
                part
                for read in reads
                for part in halve(_by_warp(resident, active, read(resident, active)))
            ]
            held = np.stack(parts, axis=1).reshape(warps, -1)
            return held.take(order, axis=1).reshape(warps, *shape).astype(np.float64)

        left, right = gather(reads_a, (16, k), in_a, halve), gather(reads_b, (k, 8), in_b, halve)
        total = gather(reads_c, (16, 8), in_c, lambda values: (values,))
        total += left @ right
        rounded = total.astype(np.float32).reshape(warps, -1)
        for register, store in enumerate(stores):
            lanes = rounded.take(_ROW_C[register] * 8 + _COLUMN_C[register], axis=1)
            store(resident, active, _by_thread(active, lanes))

    return multiply


# ---- ldmatrix and stmatrix ----------------------------------------------------------------------

# PTX ISA, "Warp-level matrix load instruction: ldmatrix" and "... store ...: stmatrix": lane
# 8 * i + r gives the address of row r of matrix i. Register i of lane t holds elements 2 * (t % 4)
# and the next of row t // 4 of matrix i; with .trans of column t // 4.


def _form(instruction: Instruction) -> tuple[int, bool]:
    """(number of matrices, whether transposed). Raises: PtxError."""
    op = instruction.op
    trans = op[5:6] == ("trans",)
    space = op[6 if trans else 5 :]
    if (
        op[1:4] != ("sync", "aligned", "m8n8")
        or op[4:5] not in (("x1",), ("x2",), ("x4",))
        or space not in (("shared", "b16"), ("shared__cta", "b16"))
    ):
        raise PtxError(f"unknown form {instruction.name}")
    return int(op[4][1:]), trans


def _transposed(matrices: Any) -> Any:
    """Each 8x8 matrix of 16-bit elements transposed; [..., 8 rows, 4 words]."""
    elements = np.ascontiguousarray(matrices).view(np.uint16)
    return np.ascontiguousarray(elements.swapaxes(-1, -2)).view(np.uint32)


def _places(resident: Resident, threads: Any, where: Any, count: int, what: str) -> Any:
    """Places of the rows of `count` matrices; only the lanes that give one reach memory."""
    giving = np.flatnonzero(threads % 32 < 8 * count)
    addresses = np.broadcast_to(where, threads.shape)[giving]
    return resolve(resident, threads[giving], "shared", addresses, ROW_BYTES, what)


def _as_holder(place: Place, word: int, trans: bool) -> Place:
    """The place as seen by the lanes whose registers hold word `word` of each row.

    For races these are the ones that read and write, not those that give the addresses: a lane
    that wrote a row itself and gives its address still needs a __syncwarp before the others get it.
    With .trans two lanes share a word; the first stands for both.
    """
    row = place.threads % 8
    lane = 8 * word + row // 2 if trans else 4 * row + word
    return replace(place, threads=place.threads // 32 * 32 + lane)


def _load(decoder: _Decoder, instruction: Instruction) -> Step:
    count, trans = _form(instruction)
    target, source = instruction.operands
    stores = [decoder.target(one, "b32") for one in _registers(target, count, "the matrices")]
    address = decoder.address(source)

    def load(resident: Resident, active: Active) -> None:
        threads = resident.threads(active)
        require_whole(resident, threads)
        rows = np.zeros((resident.size, 4), dtype=np.uint32)
        for place in _places(resident, threads, address(resident, active), count, "load"):
            count_access(resident, place, ROW_BYTES, "loaded from")
            for word in range(4):
                index = (place.offset >> 2) + word
                if resident.options.checks:
                    check_read(resident, _as_holder(place, word, trans), index, "read")
                rows[place.threads, word] = place.words[index]
        matrices = rows.reshape(-1, 4, 8, 4)
        if trans:
            matrices = _transposed(matrices)
        for number, store in enumerate(stores):  # row t // 4, word t % 4: all words in order
            store(resident, active, _by_thread(active, matrices[:, number]))

    return load


def _store(decoder: _Decoder, instruction: Instruction) -> Step:
    count, trans = _form(instruction)
    target, source = instruction.operands
    reads = [decoder.source(one, "b32") for one in _registers(source, count, "the matrices")]
    address = decoder.address(target)

    def store(resident: Resident, active: Active) -> None:
        threads = resident.threads(active)
        require_whole(resident, threads)
        matrices = np.zeros((resident.size // 32, 4, 8, 4), dtype=np.uint32)
        for number, read in enumerate(reads):
            lanes = _by_warp(resident, active, read(resident, active))
            matrices[:, number] = lanes.reshape(-1, 8, 4)
        if trans:
            matrices = _transposed(matrices)
        rows = matrices.reshape(-1, 4)
        for place in _places(resident, threads, address(resident, active), count, "store"):
            count_access(resident, place, ROW_BYTES, "stored to")
            for word in range(4):
                index = (place.offset >> 2) + word
                if resident.options.checks:
                    check_write(resident, _as_holder(place, word, trans), index, "write")
                place.words[index] = rows[place.threads, word]
                place.written[index] = True

    return store
