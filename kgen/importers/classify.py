"""What a node of a graph is to a block: an op of the chain, the norm, nothing, or its end."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F  # noqa: N812 - as it is called everywhere

from kgen.importers.tracing import IN_PLACE

_UNARY_MODULES: dict[type[nn.Module], str] = {
    nn.Sigmoid: "sigmoid",
    nn.ReLU: "relu",
    nn.SiLU: "silu",
    nn.Tanh: "tanh",
    nn.Hardswish: "hardswish",
}
_UNARY: dict[Any, str] = {
    torch.sigmoid: "sigmoid", torch.sigmoid_: "sigmoid", F.sigmoid: "sigmoid",
    torch.special.expit: "sigmoid",
    torch.relu: "relu", torch.relu_: "relu", F.relu: "relu", F.relu_: "relu",
    F.silu: "silu", F.hardswish: "hardswish",
    torch.tanh: "tanh", torch.tanh_: "tanh", F.tanh: "tanh",
}  # fmt: skip
_UNARY_METHODS = {
    "sigmoid": "sigmoid", "sigmoid_": "sigmoid", "relu": "relu", "relu_": "relu",
    "tanh": "tanh", "tanh_": "tanh",
}  # fmt: skip
_BINARY: dict[Any, str] = {
    operator.add: "add", operator.iadd: "add", IN_PLACE["add"]: "add", torch.add: "add",
    operator.mul: "mul", operator.imul: "mul", IN_PLACE["mul"]: "mul", torch.mul: "mul",
    torch.multiply: "mul",
}  # fmt: skip
_BINARY_METHODS = {
    "add": "add", "add_": "add", "mul": "mul", "mul_": "mul", "multiply": "mul", "multiply_": "mul",
}  # fmt: skip
CONVOLUTIONS = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d,
    nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip
_CONVOLUTION_FUNCTIONS = (
    torch.conv1d, torch.conv2d, torch.conv3d,
    torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d,
)  # fmt: skip


class RefusedError(Exception):
    """A rule that keeps a convolution out of a block; the message is the reason, in one line."""


@dataclass(frozen=True)
class Op:
    """A pointwise op of a chain; `operand` is what add and mul take beside the chain's value."""

    name: str
    operand: Any = None


@dataclass(frozen=True)
class Norm:
    """A GroupNorm. weight, bias: nodes, or paths of a module's parameters, or None."""

    groups: Any
    eps: Any
    weight: fx.Node | str | None
    bias: fx.Node | str | None


@dataclass(frozen=True)
class Nothing:
    """What gives its input back: nn.Identity, contiguous()."""


@dataclass(frozen=True)
class Conv:
    """A two-dimensional convolution; weight and bias as in `Norm`."""

    x: fx.Node
    weight: fx.Node | str
    bias: fx.Node | str | None
    stride: Any
    padding: Any
    dilation: Any
    groups: Any
    padding_mode: str


def is_convolution(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether a node convolves, in any number of dimensions."""
    if node.op == "call_function":
        return any(node.target is one for one in _CONVOLUTION_FUNCTIONS)
    return isinstance(module, CONVOLUTIONS)


def title(node: fx.Node, module: nn.Module | None = None, prefix: str = "") -> str:
    """A node as a user knows it: `layer.bn (BatchNorm2d)`, `relu`, `.view()`."""
    if node.op == "call_module":
        return f"{prefix}{node.target} ({type(module).__name__})"
    if node.op == "call_method":
        return f".{node.target}()"
    if node.op == "call_function":
        return str(getattr(node.target, "__name__", node.target))
    return f"{prefix}{node.target}" if node.op == "get_attr" else str(node.target)


def conv_of(node: fx.Node, module: nn.Module | None) -> Conv:
    """The convolution of a node for which `is_convolution` holds. Raises: RefusedError."""
    if node.op == "call_module":
        if type(module) is not nn.Conv2d:
            raise RefusedError(
                f"it is {_article(type(module).__name__)}; blocks begin with nn.Conv2d"
            )
        given = _arguments(node, ("input",))
        path = str(node.target)
        bias = None if module.bias is None else f"{path}.bias"
        return Conv(
            _tensor(given["input"]), f"{path}.weight", bias, module.stride, module.padding,
            module.dilation, module.groups, module.padding_mode,
        )  # fmt: skip
    if node.target is not torch.conv2d:
        raise RefusedError(f"it is {title(node)}; blocks begin with conv2d")
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    given = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}
    given |= _arguments(node, names)
    if not isinstance(given["weight"], fx.Node):
        raise RefusedError("its weight is no tensor of the model")
    return Conv(
        _tensor(given["input"]), given["weight"], given["bias"], given["stride"],
        given["padding"], given["dilation"], given["groups"], "zeros",
    )  # fmt: skip


def step_of(
    node: fx.Node, value: fx.Node, module: nn.Module | None, prefix: str
) -> Op | Norm | Nothing:
    """What `node`, a user of the chain's `value`, does to it. Raises: RefusedError."""
    if node.op == "output":
        raise RefusedError("its result leaves the forward before any GroupNorm")
    name = title(node, module, prefix)
    if node.op == "call_module":
        return _module_step(node, module, prefix, name)
    methods = node.op == "call_method"
    unary = _UNARY_METHODS.get(str(node.target)) if methods else _known(_UNARY, node.target)
    if unary is not None:
        _arguments(node, ("input", "inplace"))
        return Op(unary)
    binary = _BINARY_METHODS.get(str(node.target)) if methods else _known(_BINARY, node.target)
    if binary is not None:
        return _binary(node, value, binary)
    if methods and node.target == "contiguous" and not node.args[1:] and not node.kwargs:
        return Nothing()
    if node.target is F.gelu:
        given = _arguments(node, ("input", "approximate"))
        return _gelu(given.get("approximate", "none"), name)
    if node.target is F.group_norm or node.target is torch.group_norm:
        given = _arguments(node, ("input", "num_groups", "weight", "bias", "eps", "cudnn_enabled"))
        weight, bias = given.get("weight"), given.get("bias")
        if weight is None or bias is None:
            raise RefusedError(f"{name} has no learned weight and bias")
        return Norm(given["num_groups"], given.get("eps", 1e-5), weight, bias)
    raise RefusedError(f"{name} follows before any GroupNorm, and it is no op of a chain")


def _module_step(
    node: fx.Node, module: nn.Module | None, prefix: str, name: str
) -> Op | Norm | Nothing:
    kind = type(module)
    _arguments(node, ("input",))
    if kind in _UNARY_MODULES:
        return Op(_UNARY_MODULES[kind])
    if isinstance(module, nn.GELU) and kind is nn.GELU:
        return _gelu(module.approximate, name)
    if kind is nn.Identity:
        return Nothing()
    if isinstance(module, nn.GroupNorm) and kind is nn.GroupNorm:
        path = str(node.target)
        if module.weight is None or module.bias is None:
            raise RefusedError(f"{name} has no learned weight and bias (affine=False)")
        return Norm(module.num_groups, module.eps, f"{path}.weight", f"{path}.bias")
    if "Norm" in kind.__name__:
        raise RefusedError(f"{name} follows; the norm of a block is nn.GroupNorm")
    if is_convolution(node, module):
        raise RefusedError(f"{name} follows before any GroupNorm")
    raise RefusedError(f"{name} follows before any GroupNorm, and it is no op of a chain")


def _gelu(approximate: Any, name: str) -> Op:
    if approximate != "none":
        raise RefusedError(f"{name} has approximate={approximate!r}; the op gelu is the exact one")
    return Op("gelu")


def _binary(node: fx.Node, value: fx.Node, op: str) -> Op:
    given = _arguments(node, ("input", "other", "alpha"))
    alpha = given.get("alpha", 1)
    if type(alpha) not in (int, float) or alpha != 1:
        raise RefusedError(
            f"{title(node)} has alpha={alpha}; the op add adds its parameter as it is"
        )
    operands = [given.get("input"), given.get("other")]
    if operands[0] is value and operands[1] is value:
        raise RefusedError(f"{title(node)} takes its result twice")
    other = operands[1] if operands[0] is value else operands[0]
    if not isinstance(other, fx.Node):
        verb = "adds" if op == "add" else "multiplies by"
        what = f"the constant {other!r}" if isinstance(other, (int, float)) else "no tensor"
        raise RefusedError(f"{title(node)} {verb} {what}; {op} takes a learned parameter")
    return Op(op, other)


def _arguments(node: fx.Node, names: tuple[str, ...]) -> dict[str, Any]:
    """A node's arguments by name. Raises: RefusedError for one that is not in `names`."""
    given = dict(zip(names, node.args, strict=False))
    unknown = [name for name in node.kwargs if name not in names]
    if len(node.args) > len(names) or unknown:
        what = unknown[0] if unknown else f"more than {len(names)} arguments"
        raise RefusedError(f"{title(node)} is called with {what}")
    return given | dict(node.kwargs)


def _tensor(value: Any) -> fx.Node:
    if not isinstance(value, fx.Node):
        raise RefusedError("its input is no value of the forward")
    return value


def _known(table: dict[Any, str], target: Any) -> str | None:
    try:
        return table.get(target)
    except TypeError:  # not hashable
        return None


def _article(name: str) -> str:
    return f"an {name}" if name[:1] in "AEIOU" else f"a {name}"
