"""Follows a convolution of a graph through its chain to the GroupNorm that ends the block."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from kgen.importers.classify import (
    Conv,
    Norm,
    Nothing,
    Op,
    RefusedError,
    conv_of,
    is_convolution,
    step_of,
    title,
)
from kgen.importers.tracing import HOOKS, IN_PLACE, has_other_forward

_RESHAPES = ("view", "reshape", "unsqueeze", "contiguous")
_VIEWS = ("detach", "t", "transpose", "permute", "squeeze", "flatten", "narrow", "select")


@dataclass(frozen=True)
class Graph:
    """A traced forward. prefix: path of its module in the model, ending in a dot, or empty."""

    root: nn.Module
    prefix: str
    nodes: fx.Graph
    modules: Mapping[str, nn.Module] = field(init=False)

    def __post_init__(self) -> None:
        modules = dict(self.root.named_modules(remove_duplicate=False))
        object.__setattr__(self, "modules", modules)

    def module(self, node: fx.Node) -> nn.Module | None:
        """The module that a node calls, None for nodes that call none."""
        return self.modules.get(str(node.target)) if node.op == "call_module" else None

    def convolutions(self) -> list[fx.Node]:
        """The nodes that convolve, in their order."""
        return [one for one in self.nodes.nodes if is_convolution(one, self.module(one))]

    def label(self, conv: fx.Node) -> str:
        """A convolution's name in the model: its module's path, or that of its weight."""
        if conv.op == "call_module":
            return f"{self.prefix}{conv.target}"
        weight = conv.args[1] if len(conv.args) > 1 else conv.kwargs.get("weight")
        path = _origin(weight) if isinstance(weight, fx.Node) else None
        return f"{self.prefix}{conv.name if path is None else path.removesuffix('.weight')}"


@dataclass(frozen=True)
class Parameter:
    """A parameter of the model: its path below the graph's root, and the node that holds it."""

    path: str
    node: fx.Node | None


@dataclass(frozen=True)
class Match:
    """A block: the nodes from `conv` to `norm`, which nothing else reads.

    steps: op and, for add and mul, the parameter.
    """

    conv: fx.Node
    norm: fx.Node
    nodes: tuple[fx.Node, ...]
    problem: Conv
    weight: Parameter
    bias: Parameter | None
    steps: tuple[tuple[str, Parameter | None], ...]
    groups: int
    eps: float
    gamma: Parameter
    beta: Parameter


def match(graph: Graph, conv: fx.Node) -> Match:
    """The block that `conv` begins. Raises: RefusedError with the rule that it breaks."""
    problem = conv_of(conv, graph.module(conv))
    _unaltered(graph, conv)
    for what, given, legal in (
        ("groups", problem.groups, 1),
        ("padding_mode", problem.padding_mode, "zeros"),
    ):
        if given != legal:
            raise RefusedError(f"it has {what}={given!r}; only {legal!r} is supported")
    weight = _parameter(graph, problem.weight, "its weight")
    bias = None if problem.bias is None else _parameter(graph, problem.bias, "its bias")
    value, nodes = conv, [conv]
    steps: list[tuple[str, Parameter | None]] = []
    while True:
        if _is_silu(value):
            node = _silu(value, nodes)
            value = node
            steps.append(("silu", None))
            continue
        users = list(value.users)
        if len(users) != 1:
            raise RefusedError(_several(graph, value, users, conv))
        node = users[0]
        step = step_of(node, value, graph.module(node), graph.prefix)
        _unaltered(graph, node)
        nodes.append(node)
        if isinstance(step, Norm):
            name = title(node, graph.module(node), graph.prefix)
            if type(step.groups) is not int or not isinstance(step.eps, (int, float)):
                raise RefusedError(f"{name}: num_groups and eps must be numbers")
            gamma = _parameter(graph, step.weight, f"the weight of {name}")
            beta = _parameter(graph, step.bias, f"the bias of {name}")
            return Match(
                conv, node, tuple(nodes), problem, weight, bias, tuple(steps),
                step.groups, float(step.eps), gamma, beta,
            )  # fmt: skip
        if isinstance(step, Op):
            steps.append((step.name, _operand(graph, step)))
        else:
            assert isinstance(step, Nothing)
        value = node


def _several(graph: Graph, value: fx.Node, users: list[fx.Node], conv: fx.Node) -> str:
    what = "its result" if value is conv else title(value, graph.module(value), graph.prefix)
    if not users:
        return f"{what} is not used"
    names = [title(one, graph.module(one), graph.prefix) for one in users]
    listed = " and ".join(names[:3]) + (", among others," if len(names) > 3 else "")
    return f"{what} is used by {len(users)} ops, {listed}; a block's values must have one use"


def _is_silu(value: fx.Node) -> bool:
    return _silu_parts(value) is not None


def _silu_parts(value: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The nodes of `value * sigmoid(value)`, if that is all that reads `value`."""
    if len(value.users) != 2:
        return None
    for gate, product in (tuple(value.users), tuple(value.users)[::-1]):
        gates = gate.target in (torch.sigmoid, torch.special.expit) or (
            gate.op == "call_method" and gate.target == "sigmoid"
        )
        multiplies = product.target in (operator.mul, torch.mul) or (
            product.op == "call_method" and product.target == "mul"
        )
        alone = list(gate.users) == [product] and not gate.kwargs and not product.kwargs
        if gates and multiplies and alone and set(product.args) == {value, gate}:
            return gate, product
    return None


def _silu(value: fx.Node, nodes: list[fx.Node]) -> fx.Node:
    parts = _silu_parts(value)
    assert parts is not None
    nodes += parts
    return parts[1]


def _operand(graph: Graph, step: Op) -> Parameter | None:
    if step.operand is None:
        return None
    node = step.operand
    path = source_of(node)
    if path is None:
        name = title(node, graph.module(node), graph.prefix)
        raise RefusedError(f"{step.name} takes the result of {name}, not a learned parameter")
    found = _parameter(graph, node, f"the operand of {step.name}")
    return Parameter(found.path, node)


def source_of(node: fx.Node) -> str | None:
    """The path of the attribute that a node holds, perhaps in another shape; else None."""
    while node.op != "get_attr":
        method = node.op == "call_method" and node.target in _RESHAPES
        function = node.target in (torch.reshape, torch.unsqueeze)
        inserted = node.target is operator.getitem and _inserts_dimensions(node.args[1])
        inputs = node.all_input_nodes
        if not (method or function or inserted) or len(inputs) != 1:
            return None
        node = inputs[0]
    return str(node.target)


def changed_parameters(graph: Graph) -> set[str]:
    """Paths of attributes that the forward changes in place, through views of them too."""
    found = set()
    for node in graph.nodes.nodes:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        changes = node.op == "call_method" or node.op == "call_function"
        ends = name.endswith("_") and not name.endswith("__")
        if not changes or not (ends or node.target in IN_PLACE.values()) or not node.args:
            continue
        one: Any = node.args[0]
        while isinstance(one, fx.Node) and one.op != "get_attr":
            view = one.op == "call_method" and one.target in (*_RESHAPES, *_VIEWS)
            part = one.op == "call_function" and one.target in (getattr, operator.getitem)
            one = one.args[0] if view or part else None
        if isinstance(one, fx.Node):
            found.add(str(one.target))
    return found


def _origin(node: fx.Node) -> str | None:
    """The path of the first attribute that a value is computed from."""
    queue = [node]
    while queue:
        one = queue.pop(0)
        if one.op == "get_attr":
            return str(one.target)
        queue += one.all_input_nodes
    return None


def _inserts_dimensions(index: object) -> bool:
    """Whether `value[index]` is all of the value: None, `:` and `...` alone."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(one is None or one is Ellipsis or one == slice(None) for one in parts)


def _parameter(graph: Graph, given: fx.Node | str | None, what: str) -> Parameter:
    """The model's parameter behind a node or a path. Raises: RefusedError if it is not one."""
    node, path = (given, source_of(given)) if isinstance(given, fx.Node) else (None, given)
    if path is None:
        raise RefusedError(f"{what} is computed in the forward, not a parameter")
    owner, _, name = path.rpartition(".")
    module = graph.modules.get(owner)
    parameter = None if module is None else module._parameters.get(name)
    full = f"{graph.prefix}{path}"
    if parameter is None:
        kind = "a buffer" if module is not None and name in module._buffers else "not a parameter"
        kind = "computed (a parametrization)" if hasattr(module, "parametrizations") else kind
        raise RefusedError(f"{what}, {full}, is {kind}; blocks take learned parameters")
    if parameter.dtype != torch.float32:
        raise RefusedError(f"{full} is {parameter.dtype}; only torch.float32 is supported")
    return Parameter(path, node)


def _unaltered(graph: Graph, node: fx.Node) -> None:
    """Raises: RefusedError if calling the node's module does more than its forward."""
    module = graph.module(node)
    if module is not None:
        problem = altered(module)
        if problem:
            raise RefusedError(f"{graph.prefix}{node.target} has {problem}")


def altered(module: nn.Module) -> str:
    """What of a call of a module a block would leave out: hooks, a replaced forward; or empty."""
    if any(getattr(module, name) for name in HOOKS):
        return "hooks, which a block would not call"
    if any(getattr(torch.nn.modules.module, f"_global{name}", None) for name in HOOKS):
        return "global hooks of torch.nn, which a block would not call"
    if has_other_forward(module):
        return "a forward that was replaced on the instance"
    if type(module).__call__ is not nn.Module.__call__:
        return "a __call__ of its own, which a block would not run"
    for name in vars(module):
        if name != "forward" and callable(getattr(type(module), name, None)):
            return f"a method, {name}, that was replaced on the instance"
    return ""
