"""The pointwise ops of a chain, as data.

A new op is one row here and one device function `templates/device/pointwise/<name>.cuh`
of the same name; no template and no other module knows the names of ops.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Op:
    """One pointwise op.

    takes_parameter: whether it reads a learned per-channel parameter of shape [C_out, 1, 1].
    torch: the same op as a Python expression of `v` [N, C_out, P, Q] and, if it takes one, of
        the parameter `{parameter}`; it serves the CPU path, the gradient and the oracle.
    prescale: for ops that first multiply by a constant, that constant as C++; then there is
        `<name>_prescaled.cuh`, the op on a value that an affine op before it has multiplied.
    fold: for ops with op(op(v, a), b) = op(v, a <fold> b), the C++ operator that combines
        neighbouring parameters once per block instead of once per element; else None.
    """

    name: str
    torch: str
    takes_parameter: bool = False
    fold: str | None = None
    prescale: str | None = None


OPS: dict[str, Op] = {
    op.name: op
    for op in (
        Op("add", "v + {parameter}", takes_parameter=True, fold="+"),
        Op("mul", "v * {parameter}", takes_parameter=True, fold="*"),
        Op("sigmoid", "torch.sigmoid(v)", prescale="-1.44269504f"),
        Op("relu", "torch.relu(v)"),
        Op("silu", "torch.nn.functional.silu(v)"),
        Op("tanh", "torch.tanh(v)"),
        Op("hardswish", "torch.nn.functional.hardswish(v)"),
        Op("gelu", "torch.nn.functional.gelu(v)"),
    )
}
