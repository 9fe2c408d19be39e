"""Register contents: arrays of raw bits, and their views as PTX types.

A register is an array of unsigned integers of its width (bool for predicates), one element a
thread, or a single element where all threads hold the same value. Types are views of those bits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.generic]

DTYPES: dict[str, type[np.generic]] = {
    "pred": np.bool_,
    "u8": np.uint8, "s8": np.int8, "b8": np.uint8,
    "u16": np.uint16, "s16": np.int16, "b16": np.uint16, "f16": np.float16, "bf16": np.uint16,
    "u32": np.uint32, "s32": np.int32, "b32": np.uint32, "f32": np.float32,
    "f16x2": np.uint32, "bf16x2": np.uint32, "tf32": np.uint32,
    "u64": np.uint64, "s64": np.int64, "b64": np.uint64, "f64": np.float64,
}  # fmt: skip
FLOATS = ("f16", "f32", "f64")
_UNSIGNED: dict[int, type[np.generic]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def unsigned(size: int) -> type[np.generic]:
    """The unsigned type of `size` bytes."""
    return _UNSIGNED[size]


def typed(bits: Bits, kind: str) -> Bits:
    """`bits` as PTX type `kind`: reinterpreted; a wider register gives its low bits."""
    wanted = np.dtype(DTYPES[kind])
    if bits.dtype == wanted:
        return bits
    if bits.dtype.itemsize > wanted.itemsize and bits.dtype != np.bool_:
        bits = bits.astype(unsigned(wanted.itemsize))
    return bits.view(wanted)


def raw(values: Bits) -> Bits:
    """Typed values as the bits that a register keeps."""
    if values.dtype == np.bool_ or values.dtype.kind == "u":
        return values
    return values.view(unsigned(values.dtype.itemsize))


def widened(bits: Bits, width: int, kind: str) -> Bits:
    """Values of type `kind` as a register of `width` bits: sign- or zero-extended."""
    target = unsigned(width // 8)
    if bits.dtype.itemsize * 8 == width:
        return raw(bits)
    if kind.startswith("s"):
        signed = bits.view(f"int{8 * bits.dtype.itemsize}")
        return signed.astype(f"int{width}").view(target)
    return raw(bits).astype(target)


def constant(bits: int, kind: str) -> Bits:
    """A one-element register that holds a constant; negative integers wrap as PTX has them."""
    if kind == "pred":
        return np.array([bits != 0])
    size = np.dtype(DTYPES[kind]).itemsize
    return np.array([bits & ((1 << (8 * size)) - 1)], dtype=unsigned(size))
