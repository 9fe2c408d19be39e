"""Registers an emitted block as a torch op.

This file is copied, byte for byte, into every emitted package as `_op.py`: it imports nothing of
kgen. Needs torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch


def define_op(
    package: Path,
    name: str,
    arguments: Sequence[str],
    cuda: Callable[..., torch.Tensor],
    elsewhere: Callable[..., torch.Tensor],
    differentiable: Callable[..., torch.Tensor],
    output: tuple[int, int, int],
) -> Callable[..., torch.Tensor]:
    """Register `kgen::<name>_<content hash>` for every device, for meta tensors and gradients.

    The name follows from the package's files, so that two packages never share an op and the same
    package imported twice registers once. arguments: names of the op's tensors, x first. cuda: the
    op on CUDA tensors. elsewhere: the op on all others, sparse ones too, which it refuses.
    differentiable: the op in torch ops; the gradient is this function's. output: (C_out, P, Q).
    Under autocast the op computes in float32, as the block's group_norm does.
    """
    content = hashlib.sha256()
    for file in ("__init__.py", "kernel.cu", "manifest.json"):
        content.update((package / file).read_bytes())
    name = f"{name}_{content.hexdigest()[:16]}"
    if not hasattr(torch.ops.kgen, name):
        library: Any = torch.library.Library("kgen", "FRAGMENT")  # type: ignore[no-untyped-call]
        tensors = ", ".join(f"Tensor {one}" for one in arguments)
        library.define(f"{name}({tensors}) -> Tensor")
        library.impl(name, cuda, "CUDA")
        library.impl(name, elsewhere, "CompositeExplicitAutograd")

        def fake(x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
            if any(one.device != x.device for one in parameters):
                raise ValueError(f"{name}: x is on {x.device}, a parameter elsewhere")
            return x.new_empty((x.shape[0], *output))

        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
            ctx.save_for_backward(*inputs)

        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            # Where the gradient is to have a gradient, its graph holds everything anyway.
            compute = _gradients if torch.is_grad_enabled() else _gradients_in_pieces
            with _no_autocast(grad.device.type):
                return compute(differentiable, ctx.saved_tensors, ctx.needs_input_grad, grad)

        torch.library.register_fake(f"kgen::{name}", fake, lib=library)
        torch.library.register_autograd(
            f"kgen::{name}", backward, setup_context=setup_context, lib=library
        )
        for device in _AUTOCAST_DEVICES:
            torch.library.register_autocast(f"kgen::{name}", device, torch.float32, lib=library)
        _LIBRARIES.append(library)
    op: Callable[..., torch.Tensor] = getattr(torch.ops.kgen, name).default
    return op


def _gradients(
    function: Callable[..., torch.Tensor],
    inputs: Sequence[torch.Tensor],
    needs: Sequence[bool],
    grad: torch.Tensor,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of `function` where `needs`, with a graph of their own if gradients are enabled."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        given = [
            one if again else one.detach().requires_grad_(need)
            for one, need in zip(inputs, needs, strict=True)
        ]
        wanted = [one for one, need in zip(given, needs, strict=True) if need]
        found = iter(torch.autograd.grad(function(*given), wanted, grad, create_graph=again))
    return tuple(next(found) if need else None for need in needs)


def _gradients_in_pieces(
    function: Callable[..., torch.Tensor],
    inputs: Sequence[torch.Tensor],
    needs: Sequence[bool],
    grad: torch.Tensor,
) -> tuple[torch.Tensor | None, ...]:
    """The same for a few samples at a time, so that intermediate values of these alone are there.

    Samples do not depend on each other; parameters get the sum of the pieces' gradients.
    """
    x, *parameters = inputs
    samples, step = x.shape[0], _samples_at_once(grad)
    if step >= samples:
        return _gradients(function, inputs, needs, grad)
    of_x = torch.empty_like(x) if needs[0] else None
    sums: list[torch.Tensor | None] = [None] * len(parameters)
    for start in range(0, samples, step):
        part = slice(start, start + step)
        piece, *others = _gradients(function, (x[part], *parameters), needs, grad[part])
        if of_x is not None and piece is not None:
            of_x[part] = piece
        sums = [
            one if total is None or one is None else total + one
            for total, one in zip(sums, others, strict=True)
        ]
    return of_x, *sums


def _samples_at_once(grad: torch.Tensor) -> int:
    """Samples whose output takes _PIECE_BYTES, at least one; all where a tracer looks on."""
    samples = grad.shape[0]
    if type(grad) is not torch.Tensor or samples == 0:
        return samples
    return max(1, _PIECE_BYTES * samples // grad.nbytes)


def _no_autocast(device: str) -> Any:
    """The gradient is computed as the forward pass is, even if backward() runs under autocast."""
    known = device in _AUTOCAST_DEVICES
    return torch.autocast(device, enabled=False) if known else nullcontext()


_PIECE_BYTES = 64 << 20  # of y that the gradient is computed for at a time
_AUTOCAST_DEVICES = ("cuda", "cpu")
_LIBRARIES: list[Any] = []  # a Library undoes its registrations when it is collected
