"""The chain of a spec as the kernels compute it: device functions and per-channel coefficients."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kgen.ops import OPS
from kgen.spec import Spec


@dataclass(frozen=True)
class Coefficient:
    """A per-channel factor or shift of the chain: its parameters combined once per channel."""

    name: str
    terms: tuple[str, ...]
    operator: str  # C++ operator between the terms


@dataclass(frozen=True)
class Step:
    """One op of the chain after folding: a device function of v and of the coefficients named."""

    op: str
    operands: tuple[str, ...] = ()


def pointer_name(parameter: str) -> str:
    """The C++ name of a chain parameter's pointer; the prefix keeps it apart from kgen's names."""
    return f"param_{parameter}"


def fold(spec: Spec) -> tuple[tuple[Coefficient, ...], tuple[Step, ...]]:
    """The chain as device-function calls, runs of the same affine op folded into one.

    The convolution's bias is the first `add`. (v + a) + b becomes v + (a + b), computed once per
    channel, and likewise for products. That rounds in another order than the chain as written, by
    an ulp of the combined parameter; sums and products are never mixed.
    """
    coefficients: list[Coefficient] = []
    steps: list[Step] = []
    chain = [("add", "conv_bias")] if spec.problem.conv_bias else []
    chain += [(step.op, pointer_name(step.parameter or "")) for step in spec.pointwise]
    for name, parameter in chain:
        op = OPS[name]
        if not op.takes_parameter:
            steps.append(Step(name))
        elif op.fold is not None and steps and steps[-1].op == name:
            last = coefficients[-1]
            coefficients[-1] = replace(last, terms=(*last.terms, parameter))
        else:
            kind = {"+": "shift", "*": "factor"}.get(op.fold or "", name)
            coefficient = Coefficient(f"{kind}_{len(coefficients)}", (parameter,), op.fold or "")
            coefficients.append(coefficient)
            steps.append(Step(name, (coefficient.name,)))
    return tuple(coefficients), tuple(steps)
