"""How products are summed: the maths of a schedule, as data.

A tensor core takes operands of 11 or 8 significant bits and sums in fp32. Splitting an fp32 operand
into two such parts, high and low, and summing high * high + low * high + high * low brings back
most of fp32's accuracy at three products' cost. What each part holds, and how, is in
`templates/device/math/<name>.cuh`; a new math is one row here and one such file.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Math:
    """One way of multiplying on tensor cores.

    element_bytes: of one part of an operand. parts: of x. sets: of the weights, one for each
    kind of weight operand. products: of a set with a part, summed. tolerance_met: whether the
    result meets kgen's tolerance of 1e-4. ptx: operand type in wgmma's name.
    """

    name: str
    ptx: str
    element_bytes: int
    parts: int
    sets: int
    products: int
    tolerance_met: bool

    @property
    def slice_channels(self) -> int:
        """Input channels of one 16-byte slice of K."""
        return 16 // self.element_bytes


MATHS: dict[str, Math] = {
    math.name: math
    for math in (
        Math("fp16x3", "f16", 2, 2, 3, 3, True),
        Math("bf16x3", "bf16", 2, 2, 2, 3, True),
        Math("tf32x3", "tf32", 4, 2, 2, 3, True),
        Math("tf32", "tf32", 4, 1, 1, 1, False),
    )
}
FFMA = "ffma"
ALL_MATHS = (FFMA, *MATHS)
DEFAULT_MATH = "fp16x3"
