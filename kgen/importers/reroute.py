"""Lets a module run the graph of its forward, with fused blocks in the place of their ops.

The forward is set on the instance, as a bound method: the module keeps its class, its parameters
and its submodules, a deep copy is bound to the copy, and deleting the attribute undoes it.
"""

from __future__ import annotations

import linecache
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from types import MethodType, ModuleType
from typing import Any

import torch
from torch import fx, nn

from kgen.importers.classify import conv_of
from kgen.importers.discover import Found, Site
from kgen.importers.match import Graph, Parameter
from kgen.package import package_of, resized, spec_of

_log = logging.getLogger("kgen")
_lock = threading.RLock()
_MARK = "kgen_forward"

Size = tuple[int | str, int, int]  # batch or `dynamic`, height, width


def fused_call(
    label: str, packages: Sequence[ModuleType], on_mismatch: str
) -> Callable[..., torch.Tensor]:
    """A function of x and the block's parameters that chooses the package for x's size.

    label: the block in the model, for messages. packages: of one block, in different sizes.
    """
    spec = spec_of(packages[0])
    C_in = spec.problem.in_channels
    built: dict[Size, Any] = {}
    for package in packages:
        problem = spec_of(package).problem
        built[problem.batch, problem.height, problem.width] = package
    told: set[object] = set()

    def regenerated(N: int, H: int, W: int) -> Any:
        with _lock:
            new = resized(spec, N, H, W)
            key = (new.problem.batch, H, W)
            if key not in built:
                _log.warning("%s: regenerating for x [%d, %d, %d, %d]", label, N, C_in, H, W)
                built[key] = package_of(new)
            return built[key]

    def refusal(shape: tuple[int, ...]) -> str:
        sizes = ", ".join(
            f"({N if N != 'dynamic' else 'N'}, {C_in}, {H}, {W})" for N, H, W in built
        )
        return (
            f"{label}: x has shape {shape}, this block was optimized for {sizes}. Optimize with an "
            "example of that size, with dynamic_batch=True for any number of samples, or with "
            'on_mismatch="regenerate" or "eager"'
        )

    def fused(x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        package = None
        if x.dim() == 4 and x.shape[1] == C_in:
            N, H, W = (int(x.shape[axis]) for axis in (0, 2, 3))  # tensors under torch.jit.trace
            package = built.get((N, H, W)) or built.get(("dynamic", H, W))
            if package is None and N == 0:  # a block of any batch takes none
                package = next((one for size, one in built.items() if size[1:] == (H, W)), None)
            if package is None and on_mismatch == "regenerate":
                package = regenerated(N, H, W)
        if on_mismatch == "eager" and (package is None or x.dtype != torch.float32):
            seen = (tuple(x.shape), x.dtype)
            if seen not in told:
                told.add(seen)
                _log.warning(
                    "%s: x %s %s is computed with PyTorch's ops", label, list(x.shape), x.dtype
                )
            result: torch.Tensor = packages[0].eager(x, *parameters)
            return result
        if package is None:
            raise ValueError(refusal(tuple(x.shape)))
        compute = package.eager if package._calls.is_transformed() else package.fused_block
        fused_result: torch.Tensor = compute(x, *parameters)
        return fused_result

    fused.__name__ = fused.__qualname__ = spec.name
    return fused


def replace_blocks(
    graph: Graph, founds: Sequence[Found], calls: Sequence[Callable[..., torch.Tensor]],
    orders: Sequence[Sequence[str]],
) -> None:  # fmt: skip
    """Put a call of `calls` in the place of each block. orders: the keys that each call takes."""
    nodes = graph.nodes
    for found, call, order in zip(founds, calls, orders, strict=True):
        given = _parameters(found)
        C_out = found.blocks[0].spec.problem.out_channels
        chain = given.keys() - {"conv.weight", "conv.bias", "group_norm.weight", "group_norm.bias"}
        with nodes.inserting_before(found.match.conv):
            arguments = []
            for key in order:
                parameter = given[key]
                node = nodes.get_attr(parameter.path)
                if key in chain and tuple(graph.root.get_parameter(parameter.path).shape) != (
                    C_out, 1, 1,
                ):  # fmt: skip
                    node = nodes.call_method("reshape", (node, (C_out, 1, 1)))
                arguments.append(node)
            # As it is now: where blocks follow each other, x is a fused result already.
            x = conv_of(found.match.conv, graph.module(found.match.conv)).x
            fused = nodes.call_function(call, (x, *arguments))
        found.match.norm.replace_all_uses_with(fused)
        for node in reversed(found.match.nodes):
            nodes.erase_node(node)
    for node in reversed(list(nodes.nodes)):  # parameters that only the blocks read
        reads = node.op == "get_attr" or (node.op == "call_method" and node.target in _VIEWS)
        if reads and not node.users:
            nodes.erase_node(node)
    nodes.lint()


_VIEWS = ("view", "reshape", "unsqueeze")


def _parameters(found: Found) -> Mapping[str, Parameter]:
    """The model's parameters by the block's keys."""
    matched, keys = found.match, list(found.blocks[0].parameters)
    ordered = [matched.weight]
    if matched.bias is not None:
        ordered.append(matched.bias)
    ordered += [one for _, one in matched.steps if one is not None]
    ordered += [matched.gamma, matched.beta]
    return dict(zip(keys, ordered, strict=True))


def forward_of(site: Site) -> Callable[..., Any]:
    """The forward of a site's graphs as a function of the module and its arguments."""
    functions = {
        flag: _compiled(graph.nodes, site.path or type(site.module).__name__, flag)
        for flag, (graph, _) in site.variants.items()
    }
    if None in functions:
        forward = functions[None]
    else:
        training, evaluating = functions[True], functions[False]

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return (training if self.training else evaluating)(self, *args, **kwargs)

    # Pickle stores a bound method by its name: an unpickled model has its own forward again.
    forward.__name__ = "forward"
    setattr(forward, _MARK, True)
    return forward


def _compiled(nodes: fx.Graph, path: str, flag: bool | None) -> Callable[..., Any]:
    code = nodes.python_code("self")
    mode = {True: ", training", False: ", evaluating", None: ""}[flag]
    file = f"<kgen: {path}.forward{mode}, {id(nodes)}>"
    namespace = dict(code.globals)
    exec(compile(code.src, file, "exec"), namespace)  # the model's own ops, written by torch.fx
    lines = code.src.splitlines(keepends=True)
    linecache.cache[file] = (len(code.src), None, lines, file)  # for tracebacks
    forward: Callable[..., Any] = namespace["forward"]
    return forward


def install(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Make `forward` the module's; `restore` undoes it."""
    vars(module)["forward"] = MethodType(forward, module)


def is_rerouted(module: nn.Module) -> bool:
    """Whether the module runs a forward that `install` gave it."""
    return hasattr(getattr(vars(module).get("forward"), "__func__", None), _MARK)


def restore(module: nn.Module) -> bool:
    """Give a module its own forward back; False if it has it."""
    if not is_rerouted(module):
        return False
    del vars(module)["forward"]
    return True
