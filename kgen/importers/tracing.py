"""Modules as torch.fx graphs, without leaving a trace on the module.

torch.fx runs a forward with proxies for tensors. What it would get wrong without a word is refused
here: tensors made in the forward, switched gradients or autocast, values stored on a module.
"""

from __future__ import annotations

import inspect
import operator
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn


def _in_place(name: str) -> Callable[[Any, Any], Any]:
    """`a += b` and the like as a function, which generated code calls."""
    change: Callable[[Any, Any], Any] = getattr(operator, f"i{name}")

    def function(a: Any, b: Any) -> Any:
        return change(a, b)

    function.__name__ = function.__qualname__ = f"in_place_{name}"
    return function


IN_PLACE = {
    name: _in_place(name)
    for name in (
        "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift",
        "rshift",
    )
}  # fmt: skip
INSIDE = "kgen_inside"  # in a node's meta: the inlined modules that it is in, outermost first


class _Proxy(fx.Proxy):
    """A proxy on which `y += 1` changes y, as it does a tensor; torch.fx would make it y + 1."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("tracer", "node"):
            raise UntraceableError(f"the forward sets .{name} of a tensor")
        object.__setattr__(self, name, value)


def _changed_in_place(name: str) -> Callable[[_Proxy, Any], fx.Proxy]:
    function = IN_PLACE[name]

    def change(self: _Proxy, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return change


for _name in IN_PLACE:
    setattr(_Proxy, f"__i{_name}__", _changed_in_place(_name))


class UntraceableError(Exception):
    """A forward that cannot be a graph; the message is the reason, in one line."""


def trace(
    root: nn.Module,
    inlines: Callable[[nn.Module], bool],
    *,
    fixed: dict[str, Any] | None = None,
    strict: bool = False,
) -> tuple[fx.Graph, dict[nn.Module, str]]:
    """The graph of `root`'s forward, and the modules in it that cannot be graphs, with the reasons.

    inlines: which modules below are part of the graph; modules of torch.nn never are. fixed: values
    of arguments that the graph is made for. strict: raise instead of keeping a module as a call,
    and refuse a forward that stores something. Attributes of all modules are what they were.
    Raises: UntraceableError.
    """
    if type(root).forward is nn.Module.forward:
        raise UntraceableError(f"{type(root).__name__} has no forward")
    if has_other_forward(root):
        raise UntraceableError("its forward was replaced on the instance")
    kinds = {one.kind for one in inspect.signature(type(root).forward).parameters.values()}
    if {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.KEYWORD_ONLY} <= kinds:
        raise UntraceableError("its forward has keyword-only arguments behind *arguments")
    tracer = _Tracer(inlines, strict)
    with hooks_off(root), _attributes_kept(root) as changed, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            graph = tracer.trace(root, fixed or None)
            graph.lint()
        except Exception as error:
            raise UntraceableError(why(error)) from error
    if strict:
        for module, attribute in changed:
            if module is root or inlines(module):
                where = type(module).__name__
                raise UntraceableError(f"{where}.forward stores to self.{attribute}")
    _name_arguments(graph, root)
    return graph, tracer.opaque


def has_other_forward(module: nn.Module) -> bool:
    """Whether a module runs a forward that is not its class's.

    Unpickling may leave the class's own on the instance, which is no other.
    """
    found = vars(module).get("forward")
    own = getattr(found, "__self__", None) is module
    return found is not None and not (own and found.__func__ is type(module).forward)


@contextmanager
def surroundings(on: bool) -> Iterator[None]:
    """Gradients and autocast are enabled, or all disabled.

    A forward that switches one of them to what it is already can only be seen in the other state.
    """
    devices = ("cpu", "cuda")
    before = [torch.is_autocast_enabled(one) for one in devices]
    with torch.set_grad_enabled(on):
        try:
            for one in devices:
                torch.set_autocast_enabled(one, on)
            yield
        finally:
            for one, enabled in zip(devices, before, strict=True):
                torch.set_autocast_enabled(one, enabled)


def why(error: BaseException) -> str:
    """An error of traced code in one line, with the last line of it that is not torch's."""
    if isinstance(error, UntraceableError):
        return str(error)
    reason = (str(error).strip().splitlines() or [""])[0][:200]
    if isinstance(error, fx.proxy.TraceError):
        reason = reason.partition(". ")[0]
        reason = f"control flow that depends on a tensor ({reason})"
    else:
        reason = f"{type(error).__name__}: {reason}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        ours = any(part in frame.filename for part in ("/torch/", "\\torch\\", __file__))
        if not ours and not frame.filename.startswith("<"):
            return f"{frame.filename}:{frame.lineno}: {reason}"
    return reason


def _name_arguments(graph: fx.Graph, root: nn.Module) -> None:
    """Placeholders called as the forward's parameters, so that keywords go on working."""
    names = list(inspect.signature(type(root).forward).parameters)[1:]
    for node, name in zip(
        (one for one in graph.nodes if one.op == "placeholder"), names, strict=False
    ):
        if not str(node.target).startswith("*"):
            node.target = name


def _ambient() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
    )


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True  # else an in-place change of a buffer would happen while tracing

    def __init__(self, inlines: Callable[[nn.Module], bool], strict: bool) -> None:
        super().__init__()
        self.opaque: dict[nn.Module, str] = {}
        self._inlines = inlines
        self._strict = strict
        self._inside: list[nn.Module] = []
        self._outside = _ambient()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if m in self.opaque or super().is_leaf_module(m, module_qualified_name):
            return True
        return not self._inlines(m)

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if self.is_leaf_module(m, self.path_of_module(m)):
            return super().call_module(m, forward, args, kwargs)
        before, stack = set(self.graph.nodes), self.module_stack.copy()
        self._inside.append(m)
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception as error:
            if self._strict:
                raise
            self.opaque[m] = why(error)
            self.module_stack = stack
            # Later reads of a parameter use the node of the first read: those stay.
            for node in reversed([one for one in self.graph.nodes if one not in before]):
                if node.op != "get_attr":
                    self.graph.erase_node(node)
        finally:
            self._inside.pop()
        return super().call_module(m, forward, args, kwargs)  # as a leaf

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _ambient() != self._outside:
            raise UntraceableError(
                "the forward switches gradients or autocast, which a graph would lose"
            )
        node = super().create_node(*args, **kwargs)
        node.meta[INSIDE] = tuple(self._inside)
        return node

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, torch.Tensor) and not isinstance(a, nn.Parameter):
            known = any(a is one for one in self.root.buffers()) or a in self.tensor_attrs
            if not known:
                message = (
                    "the forward makes a tensor without its inputs, which a graph would freeze"
                )
                raise UntraceableError(message)
        return super().create_arg(a)


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextmanager
def hooks_off(root: nn.Module) -> Iterator[None]:
    """No hook of a module runs meanwhile: hooks are meant for real values, and may keep them."""
    kept = [(getattr(one, name), list(getattr(one, name).items()))
            for one in root.modules() for name in HOOKS]  # fmt: skip
    try:
        for hooks, _ in kept:
            hooks.clear()
        yield
    finally:
        for hooks, items in kept:
            hooks.clear()
            hooks.update(items)


@contextmanager
def attributes_kept(root: nn.Module) -> Iterator[None]:
    """Afterwards every module below `root` holds the attributes that it held before."""
    with _attributes_kept(root):
        yield


@contextmanager
def _attributes_kept(root: nn.Module) -> Iterator[list[tuple[nn.Module, str]]]:
    """Yields a list that afterwards names the attributes that were put back."""
    modules = list(root.modules())
    before = [_contents(vars(one)) for one in modules]
    plain = [
        (module, name, value, value._version, value.clone())
        for module in modules
        for name, value in vars(module).items()
        if type(value) is torch.Tensor and not value.is_inference() and not value.is_meta
    ]
    changed: list[tuple[nn.Module, str]] = []
    try:
        yield changed
    finally:
        for module, name, tensor, version, content in plain:
            if tensor._version != version:
                changed.append((module, name))
                with torch.no_grad():
                    tensor.copy_(content)
        for module, (values, inner) in zip(modules, before, strict=True):
            now = vars(module)
            for name in [*values, *(one for one in list(now) if one not in values)]:
                same = name in now and name in values and now[name] is values[name]
                moved = [one for one in inner.get(name, ()) if not _same(one[1], _items(one[0]))]
                if same and not moved:
                    continue
                changed.append((module, name))
                if name not in values:
                    del now[name]
                    continue
                now[name] = values[name]
                for holder, items in moved:
                    _refill(holder, items)


# What a forward may fill: by name of an attribute, every holder in it and what it holds.
_Holders = dict[str, list[tuple[Any, list[Any]]]]
_HOLDERS = (dict, list, set, deque)
_DEEP = 4  # holders in holders that are looked at


def _contents(values: dict[str, Any]) -> tuple[dict[str, Any], _Holders]:
    """Attributes by name, and what is in those that hold other values."""
    return dict(values), {
        name: [(one, _items(one)) for one in _holders(value, _DEEP)]
        for name, value in values.items()
        if isinstance(value, _HOLDERS)
    }


def _holders(value: Any, deep: int) -> Iterator[Any]:
    if isinstance(value, _HOLDERS) and deep:
        yield value
        for one in list(value.values() if isinstance(value, dict) else value):
            yield from _holders(one, deep - 1)


def _items(holder: Any) -> list[Any]:
    return list(holder.items() if isinstance(holder, dict) else holder)


def _same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(_is(a, b) for a, b in zip(one, other, strict=True))


def _is(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other) == 2:
        return one[0] is other[0] and one[1] is other[1]  # an item of a dict
    return one is other


def _refill(holder: Any, items: list[Any]) -> None:
    holder.clear()
    if isinstance(holder, (dict, set)):
        holder.update(items)
    else:
        holder.extend(items)
