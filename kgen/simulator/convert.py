"""Conversions between types, reciprocals, roots and approximated functions."""

from __future__ import annotations

from typing import Any

import numpy as np

from kgen.simulator.narrow import conversion, is_narrow
from kgen.simulator.ops import (
    FACTORIES,
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


@opcode("rcp")
def _rcp(modifiers: tuple[str, ...]) -> Operation:
    kind, flags = take("rcp", modifiers, "approx", "ftz", "rn")
    one = DTYPES[kind](1)
    return Operation((kind,), kind, float_finish(flags, lambda a: one / a))


@opcode("sqrt")
def _sqrt(modifiers: tuple[str, ...]) -> Operation:
    kind, flags = take("sqrt", modifiers, "approx", "ftz", "rn")
    return Operation((kind,), kind, float_finish(flags, np.sqrt))


def _approximate(name: str, function: Function) -> None:
    """Register a one-operand function that the hardware approximates, for fp32."""

    def factory(modifiers: tuple[str, ...]) -> Operation:
        kind, flags = take(name, modifiers, "approx", "ftz")
        if kind != "f32":
            raise refuse(name, modifiers)

        def rounded(a: Any) -> Any:
            return function(a.astype(np.float64)).astype(np.float32)

        return Operation((kind,), kind, float_finish(flags, rounded))

    FACTORIES[name] = factory


_approximate("ex2", np.exp2)
_approximate("lg2", np.log2)
_approximate("sin", np.sin)
_approximate("cos", np.cos)
_approximate("tanh", np.tanh)
_approximate("rsqrt", lambda a: 1.0 / np.sqrt(a))


@opcode("copysign")
def _copysign(modifiers: tuple[str, ...]) -> Operation:
    kind, _ = take("copysign", modifiers)
    return Operation((kind, kind), kind, lambda a, b: np.copysign(b, a))


@opcode("cvt")
def _cvt(modifiers: tuple[str, ...]) -> Operation:
    if len(modifiers) < 2 or modifiers[-1] not in DTYPES or modifiers[-2] not in DTYPES:
        raise refuse("cvt", modifiers)
    target, source, flags = modifiers[-2], modifiers[-1], set(modifiers[:-2])
    if is_narrow(target, source, flags):
        return conversion(modifiers)
    known = {"rn", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi", "sat", "ftz"}
    if flags - known:
        raise refuse("cvt", modifiers)
    return Operation((source,), target, _conversion(target, source, flags, modifiers))


def _conversion(target: str, source: str, flags: set[str], modifiers: tuple[str, ...]) -> Function:
    to_float, from_float = target in FLOATS, source in FLOATS
    integer_round = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
    rounder = next((integer_round[one] for one in flags if one in integer_round), None)
    dtype = DTYPES[target]
    if from_float and to_float:
        if rounder is not None:
            return float_finish(flags & {"sat", "ftz"}, lambda a: rounder(a).astype(dtype))
        if flags & {"rz", "rm", "rp"} and (target, source) != ("f32", "f64"):
            raise refuse("cvt", modifiers)
        if target == "f32" and source == "f64":
            mode = rounding(flags)
            return float_finish(flags & {"sat", "ftz"}, lambda a: round_to_f32(a, mode))
        return float_finish(flags & {"sat", "ftz"}, lambda a: a.astype(dtype))
    if from_float:
        info: Any = np.iinfo(dtype)
        round_first = rounder or np.trunc

        def to_integer(a: Any) -> Any:  # out of range saturates, NaN becomes 0
            exact = round_first(a.astype(np.float64))
            top = np.nextafter(float(info.max) + 1, 0) if info.bits == 64 else float(info.max)
            inside = np.clip(np.where(np.isnan(exact), 0, exact), float(info.min), top)
            full = inside.astype(dtype)
            return np.where(exact >= float(info.max), info.max, full).astype(dtype)

        return to_integer
    if to_float:
        mode = rounding(flags)
        if mode == "rn" or target == "f64":
            return lambda a: a.astype(dtype)
        return lambda a: round_to_f32(a.astype(np.float64), mode)
    if "sat" in flags:
        limits: Any = np.iinfo(dtype)
        given: Any = np.iinfo(DTYPES[source])
        low, high = max(int(limits.min), int(given.min)), min(int(limits.max), int(given.max))
        return lambda a: np.clip(a, low, high).astype(dtype)
    return lambda a: a.astype(dtype)
