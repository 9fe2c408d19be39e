"""Blocks of PTX statements: splitting them, and names that belong to one block.

Inline assembly arrives as written, several statements to a line, and often within braces of its
own, in which registers and labels may repeat those of the next copy.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kgen.simulator.ptx import Kernel

_LABEL = re.compile(r"[A-Za-z_$%][\w$]*\s*:(?!:)")
_NAME = re.compile(r"(?<![\w$.%])%?[A-Za-z_$][\w$]*")
_DIRECTIVE = re.compile(r"\.(?:maxntid|minnctapersm|reqntid|maxnreg)\b")


def next_statement(text: str) -> tuple[str, str]:
    """The first complete brace, label, directive or statement of `text`, and what follows it.

    The first is empty where `text` holds no complete one.
    """
    if text[:1] in ("{", "}"):
        return text[0], text[1:].lstrip()
    label = _LABEL.match(text)
    if label is not None:
        return re.sub(r"\s", "", label[0]), text[label.end() :].lstrip()
    if _DIRECTIVE.match(text):  # these end with their line
        return text, ""
    end = text.find(";")
    if end < 0:
        return "", text
    return text[: end + 1], text[end + 1 :].lstrip()


@dataclass
class Scope:
    """One pair of braces: its registers under their unique names, its labels, where it begins."""

    number: int
    first: int
    registers: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)


class Scopes:
    """The braces that are open within a kernel's own."""

    def __init__(self) -> None:
        self._open: list[Scope] = []
        self._count = 0

    def enter(self, kernel: Kernel) -> None:
        """An opening brace."""
        self._count += 1
        self._open.append(Scope(self._count, len(kernel.code)))

    def leave(self, kernel: Kernel) -> None:
        """A closing brace: branches within it go to its own labels."""
        from kgen.simulator.ptx import Symbol

        scope = self._open.pop()
        for index in range(scope.first if scope.labels else len(kernel.code), len(kernel.code)):
            one = kernel.code[index]
            operands = tuple(
                Symbol(scope.labels[operand.name])
                if isinstance(operand, Symbol) and operand.name in scope.labels
                else operand
                for operand in one.operands
            )
            if one.op[0] == "bra" and operands != one.operands:
                kernel.code[index] = replace(one, operands=operands)

    def label(self, name: str) -> str:
        """The unique name of a label declared here."""
        if not self._open:
            return name
        unique = f"{name}$s{self._open[-1].number}"
        self._open[-1].labels[name] = unique
        return unique

    def rewrite(self, statement: str) -> str:
        """A statement with the registers of open blocks under their unique names."""
        if not self._open:
            return statement
        if statement.startswith(".reg"):
            scope = self._open[-1]
            names = _declared(statement)
            for name in names:
                scope.registers[name] = f"%{name.lstrip('%')}$s{scope.number}"
            kind = statement.split(None, 2)[1]
            return f".reg {kind} {', '.join(scope.registers[name] for name in names)}"
        unique: dict[str, str] = {}
        for scope in self._open:
            unique |= scope.registers
        return _NAME.sub(lambda match: unique.get(match[0], match[0]), statement)


def _declared(statement: str) -> list[str]:
    names = []
    for one in statement.rstrip("; ").split(None, 2)[2].split(","):
        match = re.fullmatch(r"([%\w$]+)(?:<(\d+)>)?", one.strip())
        if match is not None and match[2] is None:
            names.append(match[1])
        elif match is not None:
            names += [f"{match[1]}{index}" for index in range(int(match[2]))]
    return names
