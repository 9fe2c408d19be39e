"""KernelBench problems: a file with a class Model, get_inputs() and get_init_inputs().

Before anything runs, the file is parsed: names that are missing are told, and only the top-level
statements that those three need, directly or through others, are executed. Tensors that they make
are fake: sizes without data.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kgen.errors import UsageError
from kgen.importers.user_code import execute, parse_python, running

if TYPE_CHECKING:
    from torch import nn

WANTED = {"Model": ast.ClassDef, "get_inputs": ast.FunctionDef, "get_init_inputs": ast.FunctionDef}


def load_problem(
    path: Path, announce: Callable[[], None] = lambda: None
) -> tuple[nn.Module, tuple[Any, ...]]:
    """The problem's model and inputs, of fake tensors. Raises: UsageError.

    announce: called before anything of the file runs.
    """
    from torch import nn

    from kgen.importers.shapes import fake_mode

    tree = parse_python(path)
    _check_names(tree, path)
    kept = ast.Module(needed(tree, set(WANTED)), [])
    mode = fake_mode()
    with mode:
        module = execute(path, compile(kept, str(path), "exec"), announce)
        with running(path):
            arguments = module.get_init_inputs()
            inputs = module.get_inputs()
        for name, value in (("get_init_inputs", arguments), ("get_inputs", inputs)):
            if not isinstance(value, (list, tuple)):
                raise UsageError(f"{path}: {name}() gives {type(value).__name__}, not a list")
        with running(path):
            model = module.Model(*arguments)
    if not isinstance(model, nn.Module):
        raise UsageError(f"{path}: Model is not an nn.Module")
    return model, tuple(inputs)


def _check_names(tree: ast.Module, path: Path) -> None:
    defined = {
        one.name: type(one)
        for one in tree.body
        if isinstance(one, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
    }
    missing = [name for name, kind in WANTED.items() if defined.get(name) is not kind]
    if missing:
        raise UsageError(
            f"{path}: is no KernelBench problem: it defines no {', '.join(missing)} "
            "(a class Model, get_inputs() and get_init_inputs())"
        )


def needed(tree: ast.Module, names: set[str]) -> list[ast.stmt]:
    """The top-level statements that `names` depend on, in their order.

    A statement is needed if it binds a needed name, or changes what one holds; then the names that
    it reads are needed as well. `from m import *` and imports from __future__ are always kept.
    """
    imported = {name for one in tree.body for name in _imported(one)}
    names = set(names)
    kept: set[int] = set()
    while True:
        before = len(kept)
        for index, statement in enumerate(tree.body):
            if index in kept:
                continue
            binds = set(_bound(statement)) | (set(_changed(statement)) - imported)
            if _always(statement) or binds & names:
                kept.add(index)
                names |= {one.id for one in ast.walk(statement) if isinstance(one, ast.Name)}
        if len(kept) == before:
            return [tree.body[index] for index in sorted(kept)]


def _always(statement: ast.stmt) -> bool:
    """Whether a statement may matter to any other: imports of everything, torch's defaults."""
    if isinstance(statement, ast.ImportFrom):
        return statement.module == "__future__" or any(one.name == "*" for one in statement.names)
    return any(
        isinstance(one, ast.Attribute) and one.attr.startswith("set_default_")
        for one in _own(statement)
    )


def _imported(statement: ast.stmt) -> Iterator[str]:
    for node in _own(statement):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0]


def _bound(statement: ast.stmt) -> Iterator[str]:
    """Names that a statement binds in the module, in its branches and loops too."""
    yield from _imported(statement)
    for node in _own(statement):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
            yield node.id


def _changed(statement: ast.stmt) -> Iterator[str]:
    """Names whose values a statement may change: `a[0] = 1`, `del a[0]`, `a.b = 1`, `a.pop()`,
    `change(a)`."""
    for node in _own(statement):
        targets: list[ast.expr] = []
        if isinstance(node, (ast.Attribute, ast.Subscript)):
            targets = [] if isinstance(node.ctx, ast.Load) else [node]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            targets = [node.func]
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            name = getattr(node.value.func, "id", "")
            reads = hasattr(builtins, name) and name not in ("setattr", "delattr")
            targets += [] if reads else node.value.args
        for target in targets:
            while isinstance(target, (ast.Attribute, ast.Subscript)):
                target = target.value
            if isinstance(target, ast.Name):
                yield target.id


def _own(statement: ast.stmt) -> Iterator[ast.AST]:
    """The nodes of a statement that run with it: not the bodies of functions and classes."""
    yield statement
    if isinstance(statement, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return
    for child in ast.iter_child_nodes(statement):
        if isinstance(child, ast.stmt):
            yield from _own(child)
        elif isinstance(child, (ast.ExceptHandler, ast.match_case)):
            for inner in child.body:
                yield from _own(inner)
        else:
            yield from ast.walk(child)
