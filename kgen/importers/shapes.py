"""Sizes of every value of a model, from one run on fake tensors: no data, no memory, no GPU."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parameter import UninitializedParameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from kgen.errors import UsageError
from kgen.importers.tracing import attributes_kept, hooks_off, why


@dataclass(frozen=True)
class Call:
    """One call of a module, on fake tensors."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def bound(self, module: nn.Module) -> dict[str, Any]:
        """The arguments by name, defaults filled in."""
        given = inspect.signature(type(module).forward).bind(module, *self.args, **self.kwargs)
        given.apply_defaults()
        return dict(list(given.arguments.items())[1:])


@dataclass(frozen=True)
class Value:
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Run:
    """What a run on fake tensors showed: the calls of each module, in their order."""

    mode: FakeTensorMode
    calls: dict[nn.Module, list[Call]]


def fake_mode() -> FakeTensorMode:
    """The mode in which models run here; tensors that a model keeps to itself need not be fake."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def run(model: nn.Module, example: Any) -> Run:
    """Run `model` once on fake tensors of the example's sizes; the model stays as it was.

    example: a tensor or a tuple or list of positional arguments.
    Raises: UsageError with the place in the model that failed, in one line.
    """
    args = tuple(example) if isinstance(example, (tuple, list)) else (example,)
    leaves = tree_leaves(args)
    if not any(isinstance(one, torch.Tensor) for one in leaves):
        raise UsageError(
            f"the example holds no tensor, it is a {type(example).__name__}; give a tensor or a "
            "tuple of the forward's arguments"
        )
    _check_kind(model)
    mode = next((one.fake_mode for one in leaves if isinstance(one, FakeTensor)), fake_mode())
    device = next((one.device for one in (*model.parameters(), *model.buffers())), None)
    fake = tree_map(lambda one: _as_fake(one, mode, device), args)
    calls: dict[nn.Module, list[Call]] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.setdefault(module, []).append(Call(args, dict(kwargs)))

    hooks = []
    with hooks_off(model), _fake_state(model, mode):
        for module in model.modules():
            hooks.append(module.register_forward_pre_hook(note, prepend=True, with_kwargs=True))
        try:
            with mode, torch.no_grad():
                model(*fake)
        except Exception as error:
            raise UsageError(
                f"{type(model).__name__} does not run on fake tensors of the example's sizes: "
                f"{why(error)}"
            ) from error
        finally:
            for hook in hooks:
                hook.remove()
    return Run(mode, calls)


def _check_kind(model: nn.Module) -> None:
    """Raises: UsageError for modules whose forward is not Python that can be looked at."""
    name = type(model).__name__
    if hasattr(model, "_orig_mod"):
        raise UsageError(
            f"{name} is compiled by torch.compile; give the module that it was made of"
        )
    for path, module in model.named_modules():
        where = path or name
        if isinstance(module, torch.jit.ScriptModule):
            raise UsageError(
                f"{where} is compiled by torch.jit; give the module that it was made of"
            )
        if any(isinstance(one, UninitializedParameter) for one in module._parameters.values()):
            raise UsageError(f"{where} is lazy and has no sizes yet; run the model once first")


@contextmanager
def _fake_state(model: nn.Module, mode: FakeTensorMode) -> Iterator[None]:
    """Fake parameters and buffers meanwhile: a forward may change them in place."""
    with attributes_kept(model):
        for module in model.modules():
            both: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for held in both:
                for name, tensor in held.items():
                    if tensor is not None and not isinstance(tensor, FakeTensor):
                        held[name] = mode.from_tensor(tensor)
        yield


def _as_fake(value: Any, mode: FakeTensorMode, device: torch.device | None) -> Any:
    if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
        return value
    meta = value.device.type == "meta" or (device is not None and device.type == "meta")
    if not meta or device is None:
        return mode.from_tensor(value)
    with mode:  # sizes alone: they are meant for wherever the model is
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)


def values(
    graph: fx.Graph, root: nn.Module, call: Call, mode: FakeTensorMode
) -> dict[fx.Node, Value]:
    """Shape and dtype of every tensor in `graph`, the forward of `root`, for one call of it."""
    found: dict[fx.Node, Value] = {}

    class Noting(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            if isinstance(result, torch.Tensor):
                found[n] = Value(tuple(result.shape), result.dtype)
            return result

    with hooks_off(root), _fake_state(root, mode), mode, torch.no_grad():
        Noting(fx.GraphModule(root, graph)).run(*_positional(root, call))
    return found


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every operation and the shapes and dtypes of what it gives."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [
            f"{one.dtype} {list(one.shape)}".removeprefix("torch.")
            for one in tree_leaves(result)
            if isinstance(one, torch.Tensor)
        ]
        self.seen.append(f"{func} -> {', '.join(given)}")
        return result


def operations(
    root: nn.Module, call: Call, mode: FakeTensorMode, graph: fx.Graph | None = None
) -> list[str]:
    """What one call of `root` does on fake tensors, or what the graph of its forward does.

    An error counts as the last operation: where the forward raises, the graph must too.
    """
    noted = _Operations()
    with hooks_off(root), _fake_state(root, mode), mode, torch.no_grad(), noted:
        try:
            if graph is None:
                type(root).forward(root, *call.args, **call.kwargs)
            else:
                fx.Interpreter(fx.GraphModule(root, graph)).run(*_positional(root, call))
        except Exception as error:
            noted.seen.append(type(error).__name__)
    return noted.seen


def _positional(root: nn.Module, call: Call) -> list[Any]:
    kinds = inspect.signature(type(root).forward).parameters
    arguments: list[Any] = []
    for name, value in call.bound(root).items():
        if kinds[name].kind is inspect.Parameter.VAR_POSITIONAL:
            arguments += value
        elif kinds[name].kind is not inspect.Parameter.VAR_KEYWORD:
            arguments.append(value)
    return arguments
