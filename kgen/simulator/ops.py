"""Arithmetic opcodes: one small function each, on arrays of typed values.

`decode(op)` turns an opcode with its modifiers into an `Operation`: the types of its sources and
of its result, and a function from typed arrays to a typed array. Meaning and rounding follow the
PTX ISA; approximations (ex2.approx, rcp.approx ...) are computed in fp64 and rounded once, which
is within the error that the ISA allows the hardware.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kgen.simulator.ptx import PtxError
from kgen.simulator.values import DTYPES

Function = Callable[..., Any]


@dataclass(frozen=True)
class Operation:
    """A decoded arithmetic opcode: types of sources and result, and what it computes."""

    sources: tuple[str, ...]
    result: str
    function: Function


Factory = Callable[[tuple[str, ...]], Operation]
FACTORIES: dict[str, Factory] = {}


def decode(op: tuple[str, ...]) -> Operation:
    """The operation of an opcode. Raises: PtxError naming an opcode that is not known."""
    _load_families()
    if op[0] in ("dp2a", "dp4a"):
        from kgen.simulator import dots

        return dots.decode(op)
    factory = FACTORIES.get(op[0])
    if factory is None:
        raise PtxError(f"unknown opcode {'.'.join(op)}")
    if op[0] != "cvt" and _is_narrow(op):
        from kgen.simulator.narrow import arithmetic

        return arithmetic(op)
    return factory(op[1:])


def _is_narrow(op: tuple[str, ...]) -> bool:
    """Whether the general factories, which know f16 as numpy does, would get an opcode wrong."""
    if op[-1] == "f16":
        return op[0] == "fma" or not {"ftz", "sat"}.isdisjoint(op)
    return op[-1] in ("bf16", "f16x2", "bf16x2", "tf32")


def known_opcodes() -> tuple[str, ...]:
    """The opcodes that `decode` knows, sorted."""
    _load_families()
    return tuple(sorted(FACTORIES))


def _load_families() -> None:
    """Import the modules that register opcodes; they import this one."""
    from kgen.simulator import arithmetic, convert, logic  # noqa: F401


def opcode(*names: str) -> Callable[[Factory], Factory]:
    """Register the decorated factory for the opcodes `names`."""

    def register(factory: Factory) -> Factory:
        for name in names:
            FACTORIES[name] = factory
        return factory

    return register


def refuse(op: str, modifiers: tuple[str, ...]) -> PtxError:
    """The error for a form of a known opcode that is not known."""
    return PtxError(f"unknown form {'.'.join((op, *modifiers))}")


def take(op: str, modifiers: tuple[str, ...], *known: str) -> tuple[str, set[str]]:
    """The type (last modifier) and the flags before it, which must all be known."""
    if not modifiers or modifiers[-1] not in DTYPES:
        raise refuse(op, modifiers)
    flags = set(modifiers[:-1])
    if flags - set(known):
        raise refuse(op, modifiers)
    return modifiers[-1], flags


def flush(values: Any) -> Any:
    """Subnormal fp32 values as zeros of their sign."""
    tiny = np.abs(values) < np.float32(2.0**-126)
    return np.where(tiny, np.copysign(np.float32(0), values), values) if tiny.any() else values


def round_to_f32(exact: Any, mode: str) -> Any:
    """fp64 values rounded to fp32: rn to nearest even, rz to zero, rm down, rp up."""
    near = exact.astype(np.float32)
    if mode == "rn":
        return near
    back = near.astype(np.float64)
    down, up = np.float32(-np.inf), np.float32(np.inf)
    if mode == "rz":
        over = np.abs(back) > np.abs(exact)
        return np.where(over, np.nextafter(near, np.float32(0)), near)
    if mode == "rm":
        return np.where(back > exact, np.nextafter(near, down), near)
    return np.where(back < exact, np.nextafter(near, up), near)


def float_finish(flags: set[str], function: Function) -> Function:
    """Apply .ftz to inputs and result, and .sat to the result, where the opcode has them."""
    ftz, sat = "ftz" in flags, "sat" in flags
    if not ftz and not sat:
        return function

    def finished(*values: Any) -> Any:
        result = function(*(flush(one) for one in values)) if ftz else function(*values)
        result = flush(result) if ftz else result
        if sat:  # NaN becomes +0
            result = np.where(np.isnan(result), np.float32(0), np.clip(result, 0, 1))
        return result.astype(np.float32)

    return finished


ROUNDINGS = ("rn", "rz", "rm", "rp")


def rounding(flags: set[str]) -> str:
    """The rounding mode among an opcode's flags; rn where it has none."""
    return next((one for one in ROUNDINGS if one in flags), "rn")
