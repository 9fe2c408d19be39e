"""Arithmetic opcodes: add, sub, mul, mad, fma, div, rem, min, max, neg, abs."""

from __future__ import annotations

from typing import Any

import numpy as np

from kgen.simulator.ops import (
    FACTORIES,
    ROUNDINGS,
    Factory,
    Function,
    Operation,
    float_finish,
    opcode,
    refuse,
    round_to_f32,
    rounding,
    take,
)
from kgen.simulator.values import DTYPES, FLOATS


@opcode("add")
def _add(modifiers: tuple[str, ...]) -> Operation:
    kind, flags = take("add", modifiers, "ftz", "sat", *ROUNDINGS)
    return _sum("add", kind, flags, np.add)


@opcode("sub")
def _sub(modifiers: tuple[str, ...]) -> Operation:
    kind, flags = take("sub", modifiers, "ftz", "sat", *ROUNDINGS)
    return _sum("sub", kind, flags, np.subtract)


def _sum(op: str, kind: str, flags: set[str], function: Function) -> Operation:
    if kind in FLOATS:
        mode = rounding(flags)
        if mode != "rn":
            if kind != "f32":
                raise refuse(op, (mode, kind))
            return Operation(
                (kind, kind), kind, float_finish(flags, lambda a, b: round_to_f32(
                    function(a.astype(np.float64), b.astype(np.float64)), mode)),
            )  # fmt: skip
        return Operation((kind, kind), kind, float_finish(flags, function))
    if flags - {"sat"}:
        raise refuse(op, (*flags, kind))
    if "sat" in flags:

        def saturated(a: Any, b: Any) -> Any:
            wide = function(a.astype(np.int64), b.astype(np.int64))
            return np.clip(wide, -(2**31), 2**31 - 1).astype(np.int32)

        return Operation((kind, kind), kind, saturated)
    return Operation((kind, kind), kind, function)


@opcode("mul")
def _mul(modifiers: tuple[str, ...]) -> Operation:
    kind, flags = take("mul", modifiers, "ftz", "sat", "lo", "hi", "wide", *ROUNDINGS)
    if kind in FLOATS:
        mode = rounding(flags)
        if mode == "rn":
            return Operation((kind, kind), kind, float_finish(flags, np.multiply))
        return Operation((kind, kind), kind, float_finish(flags, lambda a, b: round_to_f32(
            a.astype(np.float64) * b.astype(np.float64), mode)))  # fmt: skip
    if flags - {"lo", "hi", "wide"}:
        raise refuse("mul", modifiers)
    if "wide" in flags:
        wide = _double(kind)
        return Operation((kind, kind), wide, lambda a, b: a.astype(DTYPES[wide]) * b)
    if "hi" in flags:
        return Operation((kind, kind), kind, lambda a, b: high_product(a, b, kind))
    return Operation((kind, kind), kind, np.multiply)


def _double(kind: str) -> str:
    return f"{kind[0]}{2 * int(kind[1:])}"


def high_product(a: Any, b: Any, kind: str) -> Any:
    """The upper half of an integer product."""
    bits = int(kind[1:])
    if bits < 64:
        wide = DTYPES[_double(kind)]
        return ((a.astype(wide) * b.astype(wide)) >> wide(bits)).astype(DTYPES[kind])
    mask = np.uint64(0xFFFFFFFF)
    ua, ub, half = a.view(np.uint64), b.view(np.uint64), np.uint64(32)
    low = (ua & mask) * (ub & mask)
    first = (ua >> half) * (ub & mask) + (low >> half)
    second = (ua & mask) * (ub >> half) + (first & mask)
    high = (ua >> half) * (ub >> half) + (first >> half) + (second >> half)
    if kind == "s64":
        zero = np.uint64(0)
        high = high - np.where(a < 0, ub, zero) - np.where(b < 0, ua, zero)
        return high.view(np.int64)
    return high


@opcode("mad")
def _mad(modifiers: tuple[str, ...]) -> Operation:
    kind, flags = take("mad", modifiers, "lo", "hi", "wide", "ftz", "sat", *ROUNDINGS)
    if kind in FLOATS:
        return _fma(modifiers)
    if flags - {"lo", "hi", "wide"}:  # mad.hi.sat among them
        raise refuse("mad", modifiers)
    if "wide" in flags:
        wide = _double(kind)
        return Operation((kind, kind, wide), wide, lambda a, b, c: a.astype(DTYPES[wide]) * b + c)
    if "hi" in flags:
        return Operation((kind,) * 3, kind, lambda a, b, c: high_product(a, b, kind) + c)
    return Operation((kind,) * 3, kind, lambda a, b, c: a * b + c)


@opcode("fma")
def _fma(modifiers: tuple[str, ...]) -> Operation:
    kind, flags = take("fma", modifiers, "ftz", "sat", *ROUNDINGS)
    mode = rounding(flags)
    if kind == "f64" and mode == "rn" and not flags - {"rn"}:
        return Operation((kind,) * 3, kind, _fused_f64)
    if kind != "f32":
        raise refuse("fma", modifiers)

    def fused(a: Any, b: Any, c: Any) -> Any:
        # The product is exact in fp64; the sum is rounded there once more than in hardware.
        exact = a.astype(np.float64)
        exact = exact * b
        exact += c
        return round_to_f32(exact, mode)

    return Operation((kind,) * 3, kind, float_finish(flags, fused))


SPLIT = 2.0**27 + 1.0  # Veltkamp's constant: halves of an fp64 number


def _fused_f64(a: Any, b: Any, c: Any) -> Any:
    """a * b + c in fp64, rounded as if once.

    Product and sum are split into a rounded value and its exact error (Dekker, "A floating-point
    technique for extending the available precision", 1971; Knuth's two-sum); the errors are added
    last. Wrong only where that sum of errors falls on a tie, and beyond 2^996 or below 2^-969.
    """
    with np.errstate(all="ignore"):
        product = a * b
        big_a, big_b = SPLIT * a, SPLIT * b
        high_a, high_b = big_a - (big_a - a), big_b - (big_b - b)
        low_a, low_b = a - high_a, b - high_b
        rest = ((high_a * high_b - product) + high_a * low_b + low_a * high_b) + low_a * low_b
        total = product + c
        other = total - product
        error = (product - (total - other)) + (c - other)
        exact = total + (rest + error)
        return np.where(np.isfinite(total) & np.isfinite(rest), exact, total)


@opcode("div")
def _div(modifiers: tuple[str, ...]) -> Operation:
    kind, flags = take("div", modifiers, "ftz", "approx", "full", "rn")
    if kind in FLOATS:
        return Operation((kind, kind), kind, float_finish(flags, np.divide))
    return Operation((kind, kind), kind, lambda a, b: _integer_quotient(a, b)[0])


@opcode("rem")
def _rem(modifiers: tuple[str, ...]) -> Operation:
    kind, _ = take("rem", modifiers)
    return Operation((kind, kind), kind, lambda a, b: _integer_quotient(a, b)[1])


def _integer_quotient(a: Any, b: Any) -> tuple[Any, Any]:
    """Quotient rounded towards zero and the remainder with the sign of `a`, as PTX has them."""
    if (b == 0).any():
        raise ZeroDivisionError("integer division by zero")
    remainder = np.fmod(a, b)
    return (a - remainder) // b, remainder


def _extreme(name: str) -> Factory:
    def factory(modifiers: tuple[str, ...]) -> Operation:
        kind, flags = take(name, modifiers, "ftz", "NaN")
        function: Function = np.minimum if name == "min" else np.maximum
        if kind in FLOATS and "NaN" not in flags:  # the operand that is a number wins over NaN
            function = np.fmin if name == "min" else np.fmax
        return Operation((kind, kind), kind, float_finish(flags - {"NaN"}, function))

    return factory


FACTORIES["min"] = _extreme("min")
FACTORIES["max"] = _extreme("max")


@opcode("neg")
def _neg(modifiers: tuple[str, ...]) -> Operation:
    kind, flags = take("neg", modifiers, "ftz")
    return Operation((kind,), kind, float_finish(flags, np.negative))


@opcode("abs")
def _abs(modifiers: tuple[str, ...]) -> Operation:
    kind, flags = take("abs", modifiers, "ftz")
    return Operation((kind,), kind, float_finish(flags, np.abs))
