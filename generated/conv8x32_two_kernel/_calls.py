"""Tells which calls of a block may leave torch's dispatcher out.

This file is copied, byte for byte, into every emitted package: it imports nothing of kgen. Needs
torch. What it asks torch about is private to torch, so where a version does not have it, calls go
through the op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_MOST_KINDS = 4  # of calls that are remembered


class UsualCalls:
    """The kinds of calls that were seen to need neither the op nor anything done to their tensors.

    dynamic: whether the size of the first tensor's first dimension does not matter. A kind is what
    `torch._C._dynamo.guards.TensorGuards` compares, in one call from C++: types, dtypes, devices,
    sizes, strides, requires_grad, and all that takes part in dispatching, modes included.
    """

    def __init__(self, dynamic: bool) -> None:
        self._dynamic = dynamic
        self._kinds: list[tuple[Callable[..., bool], bool]] = []

    def has(self, tensors: Sequence[Any]) -> bool:
        """Whether a call with these tensors, or what stands in their place, is of a known kind."""
        for matches, requires_grad in self._kinds:
            if matches(*tensors):
                return not (requires_grad and torch.is_grad_enabled()) and not _listened()
        return False

    def add(self, tensors: Sequence[Any]) -> None:
        """Remember a call for which `wants_op` was false."""
        sizes: list[list[int | None]] = [list(one.shape) for one in tensors]
        if self._dynamic:
            sizes[0][0] = None
        guards: Any = _GUARDS and _GUARDS(
            *tensors,
            dynamic_dims_sizes=sizes,
            dynamic_dims_strides=[list(one.stride()) for one in tensors],
        )
        if guards:
            kind = (guards.check, any(one.requires_grad for one in tensors))
            self._kinds = [kind, *self._kinds[: _MOST_KINDS - 1]]


def wants_op(tensors: Sequence[Any]) -> bool:
    """Whether a call must go through the torch op, for something in torch has to see it.

    That is the case for gradients, autocast, tracers and compilers, function transforms, modes and
    the profiler. Otherwise the op's way through torch's dispatcher costs as much as all the rest.
    """
    if torch.compiler.is_compiling() or not _UNSEEN():
        return True
    return torch.is_grad_enabled() and any(one.requires_grad for one in tensors)


def is_transformed() -> bool:
    """Whether a transform of torch.func or forward-mode differentiation is at work: torch has no
    way to define an op for those."""
    if torch.compiler.is_compiling():
        return False
    private: Any = torch._C
    return bool(private._are_functorch_transforms_active() or _has_tangents())


def _unseen() -> bool:
    private: Any = torch._C
    return (
        private._len_torch_dispatch_stack() == 0
        and private._len_torch_function_stack() == 0
        and not private._are_functorch_transforms_active()
        and private._get_tracing_state() is None
        and not torch.is_autocast_enabled("cuda")
        and not torch.autograd.profiler._is_profiler_enabled
        and not _has_tangents()
    )


def _listened() -> bool:
    """The part of `_unseen` that is not in how tensors are dispatched."""
    private: Any = torch._C
    return bool(
        private._len_torch_function_stack()
        or torch.autograd.profiler._is_profiler_enabled
        or _has_tangents()
    )


def _has_tangents() -> bool:
    """Whether a level of forward-mode differentiation is open."""
    level: int = torch.autograd.forward_ad._current_level
    return level >= 0


def _known() -> bool:
    """Whether this version of torch has all of what `_unseen` asks it."""
    try:
        return isinstance(_unseen(), bool)
    except (AttributeError, TypeError):
        return False


def _guards() -> Any:
    """torch's TensorGuards, if this version has them and they do what they should; else None."""
    try:
        made: Any = torch._C._dynamo.guards.TensorGuards
        one = torch.empty(2, 3)
        known = {"dynamic_dims_sizes": [[None, 3]], "dynamic_dims_strides": [[3, 1]]}
        guards = made(one, **known)
        right = (one, torch.empty(5, 3))
        wrong = (None, torch.empty(2, 4), one.double(), torch.empty(3, 2).t())
        told = [guards.check(each) for each in (*right, *wrong)]
        return made if told == [True] * len(right) + [False] * len(wrong) else None
    except (AttributeError, TypeError):
        return None


_UNSEEN: Callable[[], bool] = _unseen if _known() else lambda: False
_GUARDS: Any = _guards() if _known() else None
