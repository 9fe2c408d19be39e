"""Narrow floating-point formats, rounded exactly as the hardware does."""

from __future__ import annotations

from typing import Any

import numpy as np


def to_tf32(values: Any, mode: str = "rna") -> Any:
    """fp32 -> TF32 bits in an uint32: 10 mantissa bits kept.

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
    return np.where(nan, np.uint16(0x7FFF), (rounded >> np.uint32(16)).astype(np.uint16))


def from_bf16(bits: Any) -> Any:
    """bfloat16 bits -> fp32, exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
