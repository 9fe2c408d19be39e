"""Finds the blocks of a model and the modules whose forward has to change for them.

First the whole model is traced, as deep as that goes, to see which convolutions begin a block. A
module that cannot be traced is left as a call and looked at on its own. Then only the innermost
module that holds a block is traced again, with everything that is not part of a block left as a
call: so little of the model's Python is fixed by the graph, and that graph is what can run in its
place.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import fx, nn

from kgen.arch import ARCHS
from kgen.build import normalise_arch
from kgen.errors import UsageError
from kgen.importers.classify import CONVOLUTIONS, RefusedError
from kgen.importers.match import Graph, Match, altered, changed_parameters, match
from kgen.importers.naming import snake, spec_name
from kgen.importers.report import ImportedBlock, ImportReport, Unmatched
from kgen.importers.shapes import Call, Run, operations, run, values
from kgen.importers.specs import spec_of
from kgen.importers.tracing import INSIDE, UntraceableError, surroundings, trace, why
from kgen.spec import Spec


@dataclass(frozen=True)
class Found:
    """A block in a graph; `blocks` holds one entry for each size of x that it is called with."""

    match: Match
    blocks: list[ImportedBlock]


@dataclass(frozen=True)
class Site:
    """A module whose forward holds blocks.

    variants: its graph and the blocks there, by the training flag that it is for; under None where
    both flags give the same graph.
    """

    module: nn.Module
    path: str
    variants: dict[bool | None, tuple[Graph, list[Found]]]


@dataclass(frozen=True)
class Discovery:
    """A report, and what `optimize` needs besides."""

    report: ImportReport
    sites: list[Site]


@dataclass
class _Scope:
    """The innermost module around some blocks, and the modules between it and their nodes."""

    parts: set[nn.Module]
    labels: list[str]


class _Search:
    def __init__(self, model: nn.Module, seen: Run) -> None:
        self.model, self.run = model, seen
        self.paths = {module: path for path, module in model.named_modules()}
        self.order: list[str] = []  # labels of convolutions, as they are computed
        self.unmatched: dict[tuple[str, str], None] = {}
        self.scopes: dict[nn.Module, _Scope] = {}
        self.untraced: dict[nn.Module, str] = {}
        self.visited: set[nn.Module] = set()

    def title(self, module: nn.Module) -> str:
        return self.paths[module] or type(module).__name__

    def prefix(self, module: nn.Module) -> str:
        return f"{self.paths[module]}." if self.paths[module] else ""

    def refuse(self, label: str, reason: str) -> None:
        self.unmatched.setdefault((label, reason))

    def everywhere(self) -> None:
        """Look at the whole model; what cannot be traced is entered below."""
        queue = [self.model]
        while queue:
            root = queue.pop(0)
            if root in self.visited or not _may_hold_blocks(root):
                continue
            self.visited.add(root)
            calls = self.run.calls.get(root)
            if not calls or type(root).forward is nn.Module.forward:
                queue += root.children()
                continue
            try:
                nodes, opaque = trace(root, lambda _: True, fixed=fixed_arguments(root, calls))
            except UntraceableError as problem:
                self.untraced[root] = f"{self.title(root)} cannot be traced: {problem}"
                queue += root.children()
                continue
            queue += opaque
            self.look(root, Graph(root, self.prefix(root), nodes))
        self.missed()

    def look(self, root: nn.Module, graph: Graph) -> None:
        """Which convolutions of a graph begin a block, and which module is around each."""
        for conv in graph.convolutions():
            module = graph.module(conv)
            if module is not None:
                self.visited.add(module)
            label = graph.label(conv)
            self.order.append(label)
            try:
                found = match(graph, conv)
            except RefusedError as reason:
                self.refuse(label, str(reason))
                continue
            insides = [node.meta[INSIDE] for node in found.nodes]
            common = 0
            while len({one[common : common + 1] for one in insides} - {()}) == 1 and all(
                len(one) > common for one in insides
            ):
                common += 1
            around = insides[0][common - 1] if common else root
            scope = self.scopes.setdefault(around, _Scope(set(), []))
            scope.labels.append(label)
            for one in insides:
                scope.parts.update(one[common:])

    def missed(self) -> None:
        """A reason for the convolutions that are in no graph."""
        for path, module in self.model.named_modules():
            known = module in self.visited or path in self.order  # by a function of its weight
            if known or not isinstance(module, CONVOLUTIONS):
                continue
            if not path:
                self.refuse(type(module).__name__, "it is the whole model, without a GroupNorm")
                continue
            reason = never = "it is not called for the example's inputs"
            parts = path.split(".")
            for end in range(len(parts)):
                above = self.model.get_submodule(".".join(parts[:end]))
                container = type(above).forward is nn.Module.forward
                if above in self.untraced:
                    reason = self.untraced[above]
                elif above not in self.run.calls and not container:
                    reason = never
            self.order.append(path)
            self.refuse(path, reason)

    def site(
        self, module: nn.Module, scope: _Scope, dynamic_batch: bool, targets: list[str] | None
    ) -> Site:
        """The graphs of a scope with their blocks. Raises: UntraceableError if there are none."""
        for part in scope.parts:
            problem = altered(part)
            if problem:
                raise UntraceableError(f"{self.title(part)} has {problem}")
        calls = self.run.calls.get(module)
        if not calls:
            raise UntraceableError(f"{self.title(module)} is not called as a module")
        graphs = {flag: self.narrow(module, scope, calls, flag) for flag in (True, False)}
        code = {flag: one.nodes.python_code("self").src for flag, one in graphs.items()}
        kept: dict[bool | None, Graph] = {flag: graphs[flag] for flag in graphs}
        if code[True] == code[False]:
            kept = {None: graphs[True]}
        elif any(not type(one).__module__.startswith("torch.nn.") for one in scope.parts):
            raise UntraceableError(
                f"the forward of {self.title(module)} depends on the training flag, perhaps on "
                "that of a module inside"
            )
        return Site(
            module,
            self.paths[module],
            {
                flag: (graph, self.blocks(graph, calls, dynamic_batch, targets))
                for flag, graph in kept.items()
            },
        )

    def narrow(self, module: nn.Module, scope: _Scope, calls: list[Call], flag: bool) -> Graph:
        """The forward of a scope, with nothing inlined but the modules that blocks are in."""
        # train() and eval() reach all modules below; what was frozen in the other mode stays so.
        alike = [one for one in module.modules() if one.training == module.training]
        kept = {one: one.training for one in (*alike, *scope.parts)}
        try:
            for one in kept:
                one.training = flag
            for on in (False, True):
                with surroundings(on):
                    nodes, _ = trace(
                        module,
                        scope.parts.__contains__,
                        fixed=fixed_arguments(module, calls),
                        strict=True,
                    )
            self.compare(module, nodes, calls)
        finally:
            for one, training in kept.items():
                one.training = training
        return Graph(module, self.prefix(module), nodes)

    def compare(self, module: nn.Module, nodes: fx.Graph, calls: list[Call]) -> None:
        """Whether a graph does what the forward does, operation by operation.

        Raises: UntraceableError if not: the forward looks at more than its tensors' values.
        """
        for call in calls:
            own = operations(module, call, self.run.mode)
            traced = operations(module, call, self.run.mode, nodes)
            if own != traced:
                raise UntraceableError(
                    f"the forward of {self.title(module)} does something that a graph would lose "
                    f"({_first_difference(own, traced)})"
                )

    def blocks(
        self, graph: Graph, calls: list[Call], dynamic_batch: bool, targets: list[str] | None
    ) -> list[Found]:
        """The blocks of a graph with a spec for each size; those that a rule refuses are left."""
        try:
            sizes = [values(graph.nodes, graph.root, call, self.run.mode) for call in calls]
            compile(graph.nodes.python_code("self").src, "<graph>", "exec")
        except Exception as error:
            raise UntraceableError(why(error)) from error
        result, changed = [], changed_parameters(graph)
        for conv in graph.convolutions():
            label = graph.label(conv)
            try:
                found = match(graph, conv)
                specs = [spec_of(graph, found, one, dynamic_batch, targets) for one in sizes]
                for one in specs[0][1].values():
                    if one.path in changed:
                        raise RefusedError(f"the forward changes {graph.prefix}{one.path} in place")
            except RefusedError as reason:
                if not any(label == one for one, _ in self.unmatched):
                    self.refuse(label, str(reason))
                continue
            norm = graph.module(found.norm)
            blocks = {
                spec: ImportedBlock(
                    label,
                    self.paths[graph.root],
                    "group_norm" if norm is None else f"{graph.prefix}{found.norm.target}",
                    spec,
                    {key: f"{graph.prefix}{one.path}" for key, one in keys.items()},
                )
                for spec, keys in specs
            }
            result.append(Found(found, list(blocks.values())))
        return result


def discover(
    model: nn.Module,
    example: Any,
    *,
    name: str | None = None,
    dynamic_batch: bool = False,
    targets: Sequence[str] | None = None,
) -> Discovery:
    """The blocks of a model. Arguments and errors: see `kgen.import_module`."""
    if isinstance(targets, str):
        raise UsageError(f"targets is {targets!r}, expected a list, for instance [{targets!r}]")
    chosen = device_targets(model) if targets is None else [normalise_arch(one) for one in targets]
    sites = []
    with _random_numbers_kept():
        search = _Search(model, run(model, example))
        search.everywhere()
        for module, scope in search.scopes.items():
            try:
                site = search.site(module, scope, dynamic_batch, chosen)
            except UntraceableError as problem:
                for label in scope.labels:
                    search.refuse(label, str(problem))
                continue
            if any(found for _, found in site.variants.values()):
                sites.append(site)
    prefix = snake(type(model).__name__) if name is None else name
    blocks = _named(sites, prefix, search.order)
    unmatched = tuple(
        Unmatched(label, reason)
        for label, reason in sorted(search.unmatched, key=lambda one: _place(search.order, one[0]))
    )
    return Discovery(ImportReport(type(model).__name__, tuple(blocks), unmatched), sites)


@contextmanager
def _random_numbers_kept() -> Iterator[None]:
    """Afterwards random numbers go on as if nothing had drawn any."""
    state = random.getstate()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(state)


def _first_difference(own: list[str], traced: list[str]) -> str:
    """Where two lists of operations part, in words."""
    for one, other in zip_longest(own, traced, fillvalue="nothing"):
        if one != other:
            return f"{one} becomes {other}"
    return ""


def _named(sites: list[Site], prefix: str, order: list[str]) -> list[ImportedBlock]:
    """Every block once, in order, its spec named; blocks in `sites` are replaced by them."""
    every = [
        (found, index)
        for site in sites
        for _, founds in site.variants.values()
        for found in founds
        for index in range(len(found.blocks))
    ]
    every.sort(key=lambda one: _place(order, one[0].blocks[one[1]].path))
    named: dict[Spec, Spec] = {}
    taken: set[str] = set()
    blocks: dict[tuple[str, str], ImportedBlock] = {}
    for found, index in every:
        old = found.blocks[index]
        if old.spec not in named:
            new = spec_name(prefix, old.path, taken)
            taken.add(new)
            named[old.spec] = old.spec.model_copy(update={"name": new})
        spec = named[old.spec]
        block = ImportedBlock(old.path, old.scope, old.norm, spec, old.parameters)
        found.blocks[index] = block
        blocks.setdefault((block.path, spec.name), block)
    return list(blocks.values())


def _place(order: list[str], label: str) -> int:
    return order.index(label) if label in order else len(order)


def _may_hold_blocks(module: nn.Module) -> bool:
    """Not a single module of torch.nn, which would be a call in every graph."""
    library = type(module).__module__.startswith("torch.nn.")
    return not library or any(True for _ in module.children())


def fixed_arguments(module: nn.Module, calls: list[Call]) -> dict[str, Any]:
    """The arguments of a forward that are None or a flag: Python decides by them.

    Raises: UntraceableError if they differ between calls.
    """
    parameters = inspect.signature(type(module).forward).parameters
    fixed: dict[str, Any] = {}
    bound = [call.bound(module) for call in calls]
    for name, first in bound[0].items():
        if parameters[name].kind in (
            inspect.Parameter.VAR_POSITIONAL,
            inspect.Parameter.VAR_KEYWORD,
        ):
            continue
        flags = [one[name] if isinstance(one[name], (bool, type(None))) else ... for one in bound]
        if any(one is not flags[0] for one in flags):
            raise UntraceableError(
                f"its argument {name} is not the same kind of value in every call"
            )
        if flags[0] is not ...:
            fixed[name] = first
    return fixed


def device_targets(model: nn.Module) -> list[str] | None:
    """The target of the GPU that a model is on; None where it is on none that kgen knows."""
    device = next((one.device for one in model.parameters() if one.is_cuda), None)
    if device is None or not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(device)
    fitting = [
        arch
        for arch in ARCHS.values()
        if arch.capability[0] == major and arch.capability[1] <= minor
    ]
    return [max(fitting, key=lambda arch: arch.capability).name] if fitting else None
