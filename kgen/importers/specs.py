"""A matched block, at the sizes of a call, as a spec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from kgen.errors import SpecError
from kgen.importers.classify import RefusedError
from kgen.importers.match import Graph, Match, Parameter
from kgen.importers.naming import parameter_name
from kgen.importers.shapes import Value
from kgen.spec import Spec, load_spec

PLACEHOLDER_NAME = "block"


def spec_of(
    graph: Graph,
    found: Match,
    values: Mapping[fx.Node, Value],
    dynamic_batch: bool,
    targets: list[str] | None,
) -> tuple[Spec, dict[str, Parameter]]:
    """The spec, named PLACEHOLDER_NAME, and the model's parameter for each key of the block.

    values: shapes and dtypes of the graph's nodes in one call. Raises: RefusedError.
    """
    conv = found.problem
    x, weight = values.get(conv.x), _shape(graph, found.weight)
    if x is None:
        raise RefusedError("its input is no tensor")
    if x.dtype != torch.float32:
        raise RefusedError(f"x is {x.dtype}; only torch.float32 is supported")
    if len(x.shape) != 4:
        raise RefusedError(f"x has shape {x.shape}; a block takes [N, C, H, W]")
    N, C_in, H, W = x.shape
    C_out, kernel = weight[0], list(weight[2:])
    keys = {"conv.weight": found.weight}
    if found.bias is not None:
        keys["conv.bias"] = found.bias
    for what, given in (
        ("weight", found.weight), ("bias", found.bias), ("GroupNorm's weight", found.gamma),
        ("GroupNorm's bias", found.beta),
    ):  # fmt: skip
        _check_whole(graph, what, given, values)
    chain: list[Any] = []
    for op, parameter in found.steps:
        if parameter is None:
            chain.append(op)
            continue
        _check_operand(graph, op, parameter, values, C_out)
        name = parameter_name(parameter.path, keys)
        keys[name] = parameter
        chain.append({op: name})
    chain.append({"group_norm": {"num_groups": found.groups, "eps": found.eps}})
    content: dict[str, Any] = {
        "version": 1,
        "name": PLACEHOLDER_NAME,
        "problem": {
            "batch": "dynamic" if dynamic_batch else N,
            "in_channels": C_in,
            "out_channels": C_out,
            "height": H,
            "width": W,
            "kernel_size": kernel,
            "stride": _pair(conv.stride, "stride"),
            "padding": _padding(conv.padding),
            "dilation": _pair(conv.dilation, "dilation"),
            "conv_bias": found.bias is not None,
        },
        "chain": chain,
    }
    if targets is not None:
        content["targets"] = targets
    keys["group_norm.weight"] = found.gamma
    keys["group_norm.bias"] = found.beta
    try:
        return load_spec(content), keys
    except SpecError as error:
        issue = error.issues[0]
        if issue.path.startswith("targets"):
            raise  # the caller's mistake, not the model's
        raise RefusedError(f"{issue.path}: {issue.message}") from None


def _shape(graph: Graph, parameter: Parameter) -> tuple[int, ...]:
    return tuple(graph.root.get_parameter(parameter.path).shape)


def _check_whole(
    graph: Graph, what: str, parameter: Parameter | None, values: Mapping[fx.Node, Value]
) -> None:
    """Raises: RefusedError if the forward takes a parameter in another shape or dtype."""
    if parameter is None or parameter.node is None:
        return
    value, shape = values[parameter.node], _shape(graph, parameter)
    if value != Value(shape, torch.float32):
        raise RefusedError(
            f"its {what}, {graph.prefix}{parameter.path}, is taken as {value.dtype} of shape "
            f"{value.shape}, not as it is stored"
        )


def _check_operand(
    graph: Graph, op: str, parameter: Parameter, values: Mapping[fx.Node, Value], C_out: int
) -> None:
    assert parameter.node is not None
    shape, dtype = values[parameter.node].shape, values[parameter.node].dtype
    if dtype != torch.float32:
        raise RefusedError(f"{op} takes {graph.prefix}{parameter.path} as {dtype}")
    if shape not in ((C_out, 1, 1), (1, C_out, 1, 1)):
        raise RefusedError(
            f"{op} takes {graph.prefix}{parameter.path} of shape {shape}; a chain's parameters "
            f"hold one value a channel, shape ({C_out}, 1, 1)"
        )


def _pair(value: Any, what: str) -> list[int]:
    """An int or one or two of them as [height, width]. Raises: RefusedError."""
    items = [value] * 2 if type(value) is int else value
    if not isinstance(items, (tuple, list)) or not all(type(one) is int for one in items):
        raise RefusedError(f"its {what} is computed in the forward")
    return list(items) * 2 if len(items) == 1 else list(items)


def _padding(value: Any) -> Any:
    if value == "valid":
        return [0, 0]
    return value if value == "same" else _pair(value, "padding")
