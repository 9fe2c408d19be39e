"""Hopper's wgmma: matrix products of four warps, which read shared memory asynchronously.

PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions". The result is computed at once, in fp64
and rounded once to fp32 as `tensor` does for mma; what is asynchronous about it is checked:

- it reads through the asynchronous proxy, so that ordinary stores need a fence.proxy.async of their
  thread and an order behind it (`matrices`);
- what it reads must not be written before a wgmma.wait_group covers it, nor after that by a thread
  that is not ordered behind a wait. Each warpgroup has a column of its own in the clocks: the wait
  of any of its warps tells that warp of the end of the whole product;
- its registers must not be touched before that wait, and not written before it without a
  wgmma.fence between (`inflight`);
- fences, commits and waits must be the same for all warps of a warpgroup (`products`).

A product is executed when all four warps are there; `products` keeps its results. Only f16, bf16
and tf32 with fp32 accumulators and matrices along k without swizzle are known. Products that nobody
waits for are no finding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kgen.simulator.inflight import warps_of
from kgen.simulator.matrices import Window, converted, window
from kgen.simulator.products import DIVERGENT, GROUP
from kgen.simulator.ptx import Immediate, Instruction, Operand, PtxError, Register, Vector
from kgen.simulator.tensor import fragment_a, fragment_order, require_whole, unpack

if TYPE_CHECKING:
    from kgen.simulator.decode import Active, Step, _Decoder
    from kgen.simulator.machine import Resident

OPCODES = ("wgmma",)
_ROW_BYTES = 32  # of an operand, along k
_DEPTH = {"f16": 16, "bf16": 16, "tf32": 8}  # k by operand type


# ---- Decoding -----------------------------------------------------------------------------------


def decode(decoder: _Decoder, instruction: Instruction) -> Step:
    """The step of a wgmma instruction. Raises: PtxError."""
    op = instruction.op
    if op[1] == "mma_async":
        return _multiply(decoder, instruction)
    if op[2:] != ("sync", "aligned"):
        raise PtxError(f"unknown form {instruction.name}")
    if op[1] == "fence":

        def fence(resident: Resident, active: Active) -> None:
            warps = _warps(resident, active, instruction)
            resident.warpgroups.fenced[warps] = True
            resident.inflight.fence(warps)

        return fence
    if op[1] == "commit_group":

        def commit(resident: Resident, active: Active) -> None:
            resident.warpgroups.committed[_warps(resident, active, instruction)] += 1

        return commit
    if op[1] == "wait_group":
        (count,) = instruction.operands
        if not isinstance(count, Immediate):
            raise PtxError("wgmma.wait_group takes a constant")
        allowed = count.bits

        def wait(resident: Resident, active: Active) -> None:
            warps = _warps(resident, active, instruction)
            resident.warpgroups.wait(resident, warps, allowed)

        return wait
    raise PtxError(f"unknown form {instruction.name}")


def deal_registers(decoder: _Decoder, instruction: Instruction) -> Step:
    """The step of setmaxnreg, of which only the alignment matters here."""

    def deal(resident: Resident, active: Active) -> None:
        _warps(resident, active, instruction)

    return deal


def _warps(resident: Resident, active: Active, instruction: Instruction) -> Any:
    """The warps that execute an .aligned instruction, which must be whole."""
    threads = resident.threads(active)
    require_whole(resident, threads)
    warps = warps_of(threads)
    resident.warpgroups.aligned(resident, warps, instruction)
    return warps


def _names(operand: Operand, what: str) -> tuple[str, ...]:
    items = operand.items if isinstance(operand, Vector) else ()
    names = tuple(one.name for one in items if isinstance(one, Register) and not one.negated)
    if len(names) != len(items) or len(set(names)) != len(names) or not names:
        raise PtxError(f"{what} must be different registers")
    return names


def _form(instruction: Instruction) -> tuple[str, int]:
    """(operand type, columns) of a wgmma.mma_async. Raises: PtxError."""
    op = instruction.op
    if len(op) != 8 or op[2:4] != ("sync", "aligned") or op[6] not in _DEPTH or op[7] != op[6]:
        raise PtxError(f"wgmma of {'.'.join(op[5:])} is not supported: {instruction.name}")
    if op[5] != "f32":
        raise PtxError(f"{op[5]} accumulators are not supported: {instruction.name}")
    rest = op[4].removeprefix("m64n").split("k")
    if len(rest) != 2 or not rest[0].isdigit() or rest[1] != str(_DEPTH[op[6]]):
        raise PtxError(f"unknown shape {op[4]} of {instruction.name}")
    columns = int(rest[0])
    if columns % 8 or not 8 <= columns <= 256:
        raise PtxError(f"unknown shape {op[4]} of {instruction.name}")
    return op[6], columns


def _sign(instruction: Instruction, kind: str, from_registers: bool) -> int:
    """The sign of the product, from the constants at the end. Raises: PtxError."""
    given = instruction.operands[4:]
    transposes = 0 if kind == "tf32" else 1 if from_registers else 2
    values = [one.bits for one in given if isinstance(one, Immediate)]
    if len(values) != len(given) or len(values) != 2 + transposes:
        raise PtxError(f"{len(given)} constants after scale-d, expected {2 + transposes}")
    if any(values[2:]):
        raise PtxError("transposed matrices (imm-trans) are not supported")
    if any(one not in (1, -1) for one in values[:2]):
        raise PtxError("imm-scale must be 1 or -1")
    return values[0] * values[1]


def _multiply(decoder: _Decoder, instruction: Instruction) -> Step:
    kind, columns = _form(instruction)
    if len(instruction.operands) < 6:
        raise PtxError(f"{len(instruction.operands)} operands")
    to, a, b, keep_operand = instruction.operands[:4]
    names, fragments = _names(to, "accumulators"), ()  # type: tuple[str, ...], tuple[str, ...]
    if len(names) != columns // 2:
        raise PtxError(f"{len(names)} registers for D, expected {columns // 2}")
    for name in names:
        if decoder.width(name) != 32:
            raise PtxError(f"accumulator {name} has no 32 bits")
    registry = decoder.registry
    one, each = registry.of(names), 1 if kind == "tf32" else 2
    k = _DEPTH[kind]
    if isinstance(a, Vector):
        fragments = _names(a, "the fragment of A")
        if len(fragments) != 4:
            raise PtxError(f"{len(fragments)} registers for A, expected 4")
        registry.fragments.update(fragments)
    reads_a = [decoder.source(Register(name), "b32") for name in fragments]
    descriptor_a = None if fragments else decoder.source(a, "b64")
    descriptor_b, keep = decoder.source(b, "b64"), decoder.source(keep_operand, "pred")
    sign = _sign(instruction, kind, bool(fragments))
    order, halves = fragment_order(fragment_a(k, each), k), unpack(kind)

    def from_registers(resident: Resident, active: Active, count: int) -> Any:
        wide = (count * GROUP,)
        parts = [
            part.reshape(-1, 32)
            for read in reads_a
            for part in halves(np.broadcast_to(read(resident, active), wide))
        ]
        held = np.stack(parts, axis=1).reshape(4 * count, -1)
        return held.take(order, axis=1).reshape(count, 64, k).astype(np.float64)

    def multiply(resident: Resident, active: Active) -> None:
        state = resident.warpgroups
        groups, active = state.whole(resident, active)
        count = len(groups)
        if not count:
            return
        threads = resident.threads(active)[::GROUP].tolist()

        def matrices(read: Any, rows: int) -> tuple[list[Window | None], Any]:
            found = [
                window(resident, one, rows, group // state.per_block, thread)
                for one, group, thread in zip(
                    _uniform(resident, active, read, count).tolist(),
                    groups.tolist(), threads, strict=True,
                )
            ]  # fmt: skip
            return found, _gathered(resident, found, kind, rows, each)

        windows_b, right = matrices(descriptor_b, columns)
        windows_a: list[Window | None] = [None] * count
        if descriptor_a is None:
            left = from_registers(resident, active, count)
        else:
            windows_a, left = matrices(descriptor_a, 64)
        if resident.options.checks:
            resident.inflight.check_product(resident, registry, one, fragments, groups)
            for group, *both in zip(groups.tolist(), windows_a, windows_b, strict=True):
                state.start(resident, group, [one for one in both if one is not None])
            state.note(one, fragments, groups)
        rows = columns if fragments else 64 + columns
        resident.counts.add("bytes loaded from shared", _ROW_BYTES * rows * count)
        product = np.matmul(left, right.swapaxes(1, 2))
        if sign < 0:
            np.negative(product, out=product)
        matrix = state.matrix(resident, one)
        where = _slice(groups)
        kept = _uniform(resident, active, keep, count)
        if kept.all():
            product += matrix[where]
        elif kept.any():
            product[kept] += matrix[groups[kept]]
        matrix[where] = product
        if one.rivals:
            state.release(resident, one)

    return multiply


def _slice(groups: Any) -> Any:
    """Neighbouring numbers as a slice, which needs no copy."""
    first, last = int(groups[0]), int(groups[-1])
    return slice(first, last + 1) if last - first == len(groups) - 1 else groups


def _gathered(
    resident: Resident, windows: list[Window | None], kind: str, rows: int, each: int
) -> Any:
    """Matrices of several warpgroups as fp64 [warpgroups, rows, k]; 0 where there is none."""
    words = resident.shared.words
    if len(windows) == 1 and windows[0] is not None:
        held = windows[0].elements(words, each)
    else:
        held = np.zeros(
            (len(windows), rows // 8, 8, 2, 4 * each), dtype=np.uint16 if each == 2 else np.uint32
        )
        for index, one in enumerate(windows):
            if one is not None:
                held[index] = one.elements(words, each)
    return converted(kind, held).reshape(len(windows), rows, 8 * each)


def _uniform(resident: Resident, active: Active, read: Any, count: int) -> Any:
    """An operand's value for each of `count` warpgroups, which must be the same in all threads."""
    values = read(resident, active)
    if len(values) == 1:
        return values.repeat(count)
    each = values.reshape(count, GROUP)
    differs = each != each[:, :1]
    if differs.any():
        first = int(resident.threads(active)[np.argmax(differs)])
        detail = "a descriptor or scale-d is not the same in all threads of the warpgroup"
        resident.report(DIVERGENT, first, detail)
    return each[:, 0]
