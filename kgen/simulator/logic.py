"""Logic, shifts, bit fields, comparisons and selection."""

from __future__ import annotations

from typing import Any

import numpy as np

from kgen.simulator.ops import Function, Operation, flush, opcode, refuse, take
from kgen.simulator.ptx import PtxError
from kgen.simulator.values import DTYPES, FLOATS


@opcode("and")
def _and(modifiers: tuple[str, ...]) -> Operation:
    kind, _ = take("and", modifiers)
    return Operation((kind, kind), kind, np.bitwise_and)


@opcode("or")
def _or(modifiers: tuple[str, ...]) -> Operation:
    kind, _ = take("or", modifiers)
    return Operation((kind, kind), kind, np.bitwise_or)


@opcode("xor")
def _xor(modifiers: tuple[str, ...]) -> Operation:
    kind, _ = take("xor", modifiers)
    return Operation((kind, kind), kind, np.bitwise_xor)


@opcode("not")
def _not(modifiers: tuple[str, ...]) -> Operation:
    kind, _ = take("not", modifiers)
    return Operation((kind,), kind, np.invert)


@opcode("shl")
def _shl(modifiers: tuple[str, ...]) -> Operation:
    kind, _ = take("shl", modifiers)
    bits, dtype = int(kind[1:]), DTYPES[kind]

    def shift(a: Any, by: Any) -> Any:
        big = by >= bits
        result = a << np.where(big, 0, by).astype(dtype)
        return np.where(big, dtype(0), result)

    return Operation((kind, "u32"), kind, shift)


@opcode("shr")
def _shr(modifiers: tuple[str, ...]) -> Operation:
    kind, _ = take("shr", modifiers)
    bits, dtype = int(kind[1:]), DTYPES[kind]

    def shift(a: Any, by: Any) -> Any:
        if kind.startswith("s"):  # the sign fills, also where all bits go
            return a >> np.minimum(by, bits - 1).astype(dtype)
        big = by >= bits
        return np.where(big, dtype(0), a >> np.where(big, 0, by).astype(dtype))

    return Operation((kind, "u32"), kind, shift)


@opcode("shf")
def _shf(modifiers: tuple[str, ...]) -> Operation:
    if len(modifiers) != 3 or modifiers[0] not in "lr" or modifiers[2] != "b32":
        raise refuse("shf", modifiers)
    left, clamp = modifiers[0] == "l", modifiers[1] == "clamp"
    if not clamp and modifiers[1] != "wrap":
        raise refuse("shf", modifiers)

    def shift(a: Any, b: Any, by: Any) -> Any:
        count = (np.minimum(by, 32) if clamp else by & 31).astype(np.uint64)
        both = (b.astype(np.uint64) << np.uint64(32)) | a
        moved = (both << count) >> np.uint64(32) if left else both >> count
        return (moved & np.uint64(0xFFFFFFFF)).astype(np.uint32)

    return Operation(("b32", "b32", "u32"), "b32", shift)


@opcode("bfi")
def _bfi(modifiers: tuple[str, ...]) -> Operation:
    if modifiers not in (("b32",), ("b64",)):
        raise refuse("bfi", modifiers)
    bits, kind = (32, np.uint32) if modifiers == ("b32",) else (64, np.uint64)

    def insert(a: Any, b: Any, start: Any, length: Any) -> Any:
        first = (start & 0xFF).astype(np.uint64)
        count = np.minimum(length & 0xFF, bits).astype(np.uint64)
        # Shifts by 64 and more are undefined in C, and so in numpy.
        ones = np.where(count > 63, ~np.uint64(0), (np.uint64(1) << count % 64) - np.uint64(1))
        mask = np.where(first > 63, np.uint64(0), ones << first % 64)
        moved = np.where(first > 63, np.uint64(0), a.astype(np.uint64) << first % 64)
        return ((moved & mask) | (b.astype(np.uint64) & ~mask)).astype(kind)

    return Operation((modifiers[0], modifiers[0], "u32", "u32"), modifiers[0], insert)


@opcode("bfe")
def _bfe(modifiers: tuple[str, ...]) -> Operation:
    if modifiers not in (("u32",), ("s32",)):
        raise refuse("bfe", modifiers)
    signed = modifiers == ("s32",)

    def extract(a: Any, start: Any, length: Any) -> Any:
        first, count = (start & 0xFF).astype(np.int64), (length & 0xFF).astype(np.int64)
        wide = a.astype(np.int64)  # sign-extended for s32, so bits past the top repeat the sign
        part = np.where(first > 31, np.where(wide < 0, -1, 0), wide >> np.minimum(first, 63))
        mask = (np.int64(1) << np.minimum(count, 32)) - 1
        part = part & mask
        if signed:
            top = (part >> np.maximum(np.minimum(count, 32) - 1, 0)) & 1
            part = np.where((count > 0) & (top == 1), part | ~mask, part)
        return part.astype(np.int32 if signed else np.uint32)

    return Operation((modifiers[0], "u32", "u32"), modifiers[0], extract)


@opcode("prmt")
def _prmt(modifiers: tuple[str, ...]) -> Operation:
    if modifiers != ("b32",):
        raise refuse("prmt", modifiers)

    def permute(a: Any, b: Any, selector: Any) -> Any:
        both = (b.astype(np.uint64) << np.uint64(32)) | a
        result = np.zeros(np.broadcast(both, selector).shape, dtype=np.uint32)
        for byte in range(4):
            choice = (selector >> (4 * byte)) & 0xF
            value = (both >> ((choice & 7) * 8).astype(np.uint64)) & np.uint64(0xFF)
            sign = np.where(value & np.uint64(0x80), np.uint64(0xFF), np.uint64(0))
            value = np.where(choice & 8, sign, value)
            result |= value.astype(np.uint32) << np.uint32(8 * byte)
        return result

    return Operation(("b32", "b32", "b32"), "b32", permute)


@opcode("popc")
def _popc(modifiers: tuple[str, ...]) -> Operation:
    kind, _ = take("popc", modifiers)
    return Operation((kind,), "u32", lambda a: np.bitwise_count(a).astype(np.uint32))


@opcode("clz")
def _clz(modifiers: tuple[str, ...]) -> Operation:
    if modifiers != ("b32",):
        raise refuse("clz", modifiers)
    return Operation(("b32",), "u32", lambda a: np.uint32(32) - np.ceil(
        np.log2(a.astype(np.float64) + 1)).astype(np.uint32))  # fmt: skip


@opcode("bfind")
def _bfind(modifiers: tuple[str, ...]) -> Operation:
    if modifiers not in (("u32",), ("shiftamt", "u32")):
        raise refuse("bfind", modifiers)
    from_top = "shiftamt" in modifiers

    def find(a: Any) -> Any:  # all ones where no bit is set
        highest = np.floor(np.log2(np.maximum(a, 1).astype(np.float64))).astype(np.uint32)
        place = np.uint32(31) - highest if from_top else highest
        return np.where(a == 0, np.uint32(0xFFFFFFFF), place)

    return Operation(("u32",), "u32", find)


@opcode("brev")
def _brev(modifiers: tuple[str, ...]) -> Operation:
    if modifiers != ("b32",):
        raise refuse("brev", modifiers)

    def reverse(a: Any) -> Any:
        for step, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF)):
            low = np.uint32(mask)
            a = ((a >> np.uint32(step)) & low) | ((a & low) << np.uint32(step))
        return (a >> np.uint32(16)) | (a << np.uint32(16))

    return Operation(("b32",), "b32", reverse)


_COMPARE: dict[str, Function] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal,
    "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip


def comparison(name: str, kind: str) -> Function:
    """A setp comparison. For floats `ne` and the names with u are true where one side is NaN."""
    if name in ("num", "nan"):
        return lambda a, b: (np.isnan(a) | np.isnan(b)) == (name == "nan")
    if kind in FLOATS and name.endswith("u") and name[:-1] in _COMPARE:
        base = _COMPARE[name[:-1]]
        return lambda a, b: base(a, b) | np.isnan(a) | np.isnan(b)
    if kind in FLOATS and name == "ne":  # ordered: false for NaN
        return lambda a, b: (a != b) & ~(np.isnan(a) | np.isnan(b))
    if name not in _COMPARE:
        raise PtxError(f"unknown comparison {name}")
    return _COMPARE[name]


@opcode("setp")
def _setp(modifiers: tuple[str, ...]) -> Operation:
    flags = [one for one in modifiers[1:-1] if one != "ftz"]
    kind, compare = modifiers[-1], comparison(modifiers[0], modifiers[-1])
    if "ftz" in modifiers:
        plain = compare
        compare = lambda a, b: plain(flush(a), flush(b))  # noqa: E731
    if not flags:
        return Operation((kind, kind), "pred", compare)
    combine = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}.get(flags[0])
    if combine is None or len(flags) > 1:
        raise refuse("setp", modifiers)
    return Operation((kind, kind, "pred"), "pred", lambda a, b, p: combine(compare(a, b), p))


@opcode("selp")
def _selp(modifiers: tuple[str, ...]) -> Operation:
    kind, _ = take("selp", modifiers)
    return Operation((kind, kind, "pred"), kind, lambda a, b, p: np.where(p, a, b))


@opcode("mov")
def _mov(modifiers: tuple[str, ...]) -> Operation:
    kind, _ = take("mov", modifiers)
    return Operation((kind,), kind, lambda a: a)
