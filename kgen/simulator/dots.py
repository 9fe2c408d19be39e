"""dp4a and dp2a: sums of products of bytes, which NVRTC makes of some index arithmetic.

PTX ISA, "dp4a" and "dp2a": the bytes of b times the bytes of a, or times the halves of a, where .lo
and .hi say which two bytes of b.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kgen.simulator.ops import Operation, refuse
from kgen.simulator.values import DTYPES

_HALVES: dict[str, tuple[tuple[str, ...], ...]] = {"dp4a": ((),), "dp2a": (("lo",), ("hi",))}


def decode(op: tuple[str, ...]) -> Operation:
    """The operation of a dp4a or dp2a. Raises: PtxError."""
    kinds, half = op[1:][-2:], op[1:-2]
    if len(kinds) != 2 or set(kinds) - {"u32", "s32"} or half not in _HALVES[op[0]]:
        raise refuse(op[0], op[1:])
    size_a, count = (16, 2) if half else (8, 4)
    result = "s32" if "s32" in kinds else "u32"

    def part(values: Any, kind: str, size: int, index: int) -> Any:
        field = (values.view(np.uint32) >> np.uint32(size * index)) & np.uint32((1 << size) - 1)
        field = field.astype(np.int64)
        return (
            np.where(field >> (size - 1), field - (1 << size), field) if kind[0] == "s" else field
        )

    def dot(a: Any, b: Any, c: Any) -> Any:
        total = c.astype(np.int64)
        for index in range(count):
            byte = part(b, kinds[1], 8, index + 2 * (half == ("hi",)))
            total = total + part(a, kinds[0], size_a, index) * byte
        return (total & 0xFFFFFFFF).astype(np.uint32).view(DTYPES[result])

    return Operation((*kinds, result), result, dot)
