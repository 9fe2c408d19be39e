"""Narrow floating-point formats: tf32, bf16 and f16, single and in pairs, rounded exactly."""

from __future__ import annotations

from typing import Any

import numpy as np

from kgen.simulator.ops import Function, Operation, float_finish, flush, refuse, round_to_f32
from kgen.simulator.values import FLOATS

PAIRS = {"f16x2": "f16", "bf16x2": "bf16"}
NARROW = ("f16", "bf16", "tf32", *PAIRS)
_NAN16 = np.uint16(0x7FFF)  # what the hardware gives for NaN in either 16-bit format


def to_tf32(values: Any, mode: str = "rna") -> Any:
    """fp32 -> TF32 bits in an uint32: 10 mantissa bits kept, the 13 below them zero.

    mode: rna rounds halves away from zero (cvt.rna.tf32), rn to even, rz truncates, which is what
    mma does to operands that were not converted. NaN and inf keep their kind.
    """
    bits = values.view(np.uint32)
    special = (bits & np.uint32(0x7F800000)) == np.uint32(0x7F800000)
    if mode == "rna":
        rounded = bits + np.uint32(0x1000)
    elif mode == "rn":
        rounded = bits + np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))
    else:
        rounded = bits
    return np.where(special, bits, rounded & np.uint32(0xFFFFE000))


def to_bf16(values: Any) -> Any:
    """fp32 -> bfloat16 bits in an uint16, rounded to nearest even; NaN becomes 0x7FFF."""
    bits = values.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    nan = np.isnan(values)
    return np.where(nan, _NAN16, (rounded >> np.uint32(16)).astype(np.uint16))


def from_bf16(bits: Any) -> Any:
    """bfloat16 bits -> fp32, exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_f16(values: Any) -> Any:
    """fp32 or fp64 -> f16 bits in an uint16, rounded to nearest even; NaN becomes 0x7FFF."""
    return np.where(np.isnan(values), _NAN16, values.astype(np.float16).view(np.uint16))


def from_f16(bits: Any) -> Any:
    """f16 bits -> fp32, exact."""
    return bits.view(np.float16).astype(np.float32)


def halves(bits: Any) -> tuple[Any, Any]:
    """The lower and the upper 16 bits of 32-bit registers."""
    low = (bits & np.uint32(0xFFFF)).astype(np.uint16)
    return low, (bits >> np.uint32(16)).astype(np.uint16)


def joined(low: Any, high: Any) -> Any:
    """Two 16-bit halves as one 32-bit register."""
    return low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))


def is_narrow(target: str, source: str, flags: set[str]) -> bool:
    """Whether `conversion` has a cvt; f16 to integers and within f16 go the way of fp32."""
    if source == "f16" and (target == "f16" or target not in (*FLOATS, *NARROW)):
        return bool(flags & {"sat", "ftz"}) and target == "f16"
    return bool({target, source} & set(NARROW))


def conversion(modifiers: tuple[str, ...]) -> Operation:
    """cvt from or to a narrow format. Raises: PtxError for a form that is not known."""
    target, source, flags = modifiers[-2], modifiers[-1], set(modifiers[:-2])
    if target == "tf32" and source == "f32" and flags in ({"rna"}, {"rn"}, {"rz"}):
        mode = flags.pop()
        return Operation((source,), target, lambda a: to_tf32(a, mode))
    if target in PAIRS and source == "f32" and flags == {"rn"}:
        narrow = to_f16 if target == "f16x2" else to_bf16
        # `cvt d, a, b`: a goes to the upper half.
        return Operation((source, source), target, lambda a, b: joined(narrow(b), narrow(a)))
    if target == "bf16" and source == "f32" and flags == {"rn"}:
        return Operation((source,), target, to_bf16)
    if target == "f32" and source == "bf16" and flags <= {"ftz"}:
        ftz = "ftz" in flags
        return Operation((source,), target, lambda a: flush(from_bf16(a)) if ftz else from_bf16(a))
    # With .ftz too: what an fp32 flush removes is far below the smallest f16.
    if target == "f16" and source in ("f32", "f64") and flags in ({"rn"}, {"rn", "ftz"}):
        return Operation((source,), target, lambda a: to_f16(a).view(np.float16))
    if target == "f16" and source[0] in "us" and flags == {"rn"}:
        return Operation((source,), target, lambda a: a.astype(np.float16))
    if target == "f32" and source == "f16" and flags <= {"ftz", "sat"}:
        return Operation((source,), target, float_finish(flags - {"ftz"}, from_f16))
    if target == "f64" and source == "f16" and not flags:
        return Operation((source,), target, lambda a: a.astype(np.float64))
    raise refuse("cvt", modifiers)


_ARITHMETIC: dict[str, Function] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "fma": lambda a, b, c: _sum_to_odd(a * b, c),
}


def arithmetic(op: tuple[str, ...]) -> Operation:
    """add, sub, mul and fma of f16, bf16 and pairs of them. Raises: PtxError for any other."""
    name, kind, flags = op[0], op[-1], set(op[1:-1])
    if name not in _ARITHMETIC or kind == "tf32" or flags - {"rn"}:
        raise refuse(name, op[1:])
    function, single = _ARITHMETIC[name], PAIRS.get(kind, kind)
    widen = from_f16 if single == "f16" else from_bf16
    narrow = to_f16 if single == "f16" else lambda exact: to_bf16(_to_odd_f32(exact))

    def one(*values: Any) -> Any:
        return narrow(function(*(widen(value).astype(np.float64) for value in values)))

    def pair(*values: Any) -> Any:
        low, high = zip(*(halves(value) for value in values), strict=True)
        return joined(one(*low), one(*high))

    return Operation((kind,) * (3 if name == "fma" else 2), kind, pair if kind in PAIRS else one)


def _sum_to_odd(a: Any, b: Any) -> Any:
    """a + b in fp64, with an odd last bit where it is inexact: later rounding is then correct."""
    total = a + b
    back = total - a
    lost = np.where(np.isfinite(total), (a - (total - back)) + (b - back), 0)
    total = np.where(lost * np.sign(total) < 0, np.nextafter(total, 0), total)
    return (total.view(np.uint64) | (lost != 0)).view(np.float64)


def _to_odd_f32(exact: Any) -> Any:
    """fp64 -> fp32 towards zero, with an odd last bit where that is inexact."""
    near = np.atleast_1d(round_to_f32(exact, "rz"))
    inexact = np.isfinite(near) & (near.astype(np.float64) != exact)
    return (near.view(np.uint32) | inexact).view(np.float32)
