"""PTX text -> a Module of kernels with decoded instructions.

Covers what NVRTC 12.8 to 13.5 emits for kgen's templates (PTX ISA 8.7 to 9.x). Whatever is not
understood raises PtxError with the line: nothing is skipped that could change a result.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field

from kgen.simulator.scopes import Scopes, next_statement


class PtxError(Exception):
    """The PTX holds something that the simulator does not know; names it and its line."""


@dataclass(frozen=True)
class Register:
    """A virtual register, or a predicate; `negated` for `!%p1` as an operand."""

    name: str
    negated: bool = False


@dataclass(frozen=True)
class Immediate:
    """A constant as bits of the width at which it is used; `float_bits` for 0f and 0d literals."""

    bits: int
    float_bits: int = 0


@dataclass(frozen=True)
class Special:
    """A special register such as %tid.x."""

    name: str


@dataclass(frozen=True)
class Symbol:
    """The address of a variable or a parameter."""

    name: str


@dataclass(frozen=True)
class Address:
    """`[base + offset]`; base None for a plain number."""

    base: Register | Symbol | None
    offset: int = 0


@dataclass(frozen=True)
class Vector:
    """`{a, b, ...}`"""

    items: tuple[Register | Immediate | Symbol | Special, ...]


Operand = Register | Immediate | Special | Symbol | Address | Vector


@dataclass(frozen=True)
class Instruction:
    """One instruction. `op` is the opcode split at its dots; `line` counts from 1 in the PTX."""

    op: tuple[str, ...]
    operands: tuple[Operand, ...]
    predicate: Register | None
    line: int
    source_line: int  # of the CUDA source, 0 where NVRTC gave none
    text: str

    @property
    def name(self) -> str:
        """The opcode as written, for instance `add.f32`."""
        return ".".join(self.op)


@dataclass(frozen=True)
class Variable:
    """A variable: space is global, shared, const or local; data is its initial value or None."""

    name: str
    space: str
    align: int
    size: int
    data: bytes | None = None
    dynamic: bool = False  # `extern .shared x[]`: sized at launch


@dataclass
class Kernel:
    """One entry point, labels resolved to indices into `code`."""

    name: str
    parameters: list[tuple[str, str, int]] = field(default_factory=list)  # name, type, bytes
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    widths: dict[str, int] = field(default_factory=dict)  # register prefix -> bits
    max_threads: int = 1024

    def width(self, register: str) -> int | None:
        """Declared width of a register in bits, by its name or its prefix; None if it has none."""
        return self.widths.get(register, self.widths.get(register.rstrip("0123456789")))


@dataclass
class Module:
    """A parsed PTX file."""

    version: str
    target: str
    variables: dict[str, Variable]
    kernels: dict[str, Kernel]


TYPE_BYTES = {
    "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2,
    "b32": 4, "u32": 4, "s32": 4, "f32": 4, "tf32": 4, "f16x2": 4, "bf16x2": 4,
    "b64": 8, "u64": 8, "s64": 8, "f64": 8, "b128": 16,
}  # fmt: skip

_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)(?:\s+\.ptr\S*(?:\s+\.\w+(?:\s+\d+)?)*)?"
    r"\s+(\w+)(?:\[(\d+)\])?"
)
_SPECIAL = re.compile(r"%(?:n?tid|n?ctaid)\.[xyz]|%(?:laneid|warpid|nwarpid|smid|nsmid|clock64|"
                      r"clock|globaltimer|total_smem_size|dynamic_smem_size|lanemask_\w\w|"
                      r"n?clusterid\.[xyz]|cluster_n?ctaid\.[xyz]|cluster_n?ctarank)")  # fmt: skip


def parse(text: str) -> Module:
    """Parse a PTX file. Raises: PtxError."""
    return _Parser(text).module()


class _Parser:
    def __init__(self, text: str) -> None:
        self._lines = _strip_comments(text).split("\n")
        self._result = Module("", "", {}, {})

    def module(self) -> Module:
        kernel: Kernel | None = None
        source_line, pending, pending_line, depth = 0, "", 0, 0
        number, scopes = 0, Scopes()
        while number < len(self._lines):
            number += 1
            line = self._lines[number - 1].strip()
            if not line:
                continue
            if line.startswith(".section"):  # DWARF data up to the closing brace
                while number <= len(self._lines) and self._lines[number - 1].strip() != "}":
                    number += 1
                continue
            if line.split()[0] == ".loc":
                source_line = int(line.split()[2])
                continue
            if not pending:
                pending_line = number
            pending = f"{pending} {line}".strip()
            if kernel is None:
                kernel, pending = self._top_level(pending, pending_line)
                continue
            while pending and kernel is not None:
                statement, pending = next_statement(pending)
                if statement == "{":
                    depth += 1
                    if depth > 1:
                        scopes.enter(kernel)
                elif statement == "}":
                    depth -= 1
                    if depth:
                        scopes.leave(kernel)
                    else:
                        self._result.kernels[kernel.name] = kernel
                        kernel = None
                elif statement.endswith(":"):
                    kernel.labels[scopes.label(statement[:-1])] = len(kernel.code)
                elif statement.endswith(";"):
                    text = scopes.rewrite(statement[:-1].strip())
                    if text:
                        self._statement(kernel, text, pending_line, source_line)
                elif statement:
                    numbers = [int(one) for one in re.findall(r"\d+", statement)]
                    if statement.startswith((".maxntid", ".reqntid")):
                        kernel.max_threads = _product(numbers)
                if not statement:
                    break
                pending_line = number
        if kernel is not None or pending:
            raise PtxError(f"PTX line {pending_line}: ends inside {pending[:60]!r}")
        if not self._result.kernels:
            raise PtxError("the PTX holds no kernel")
        return self._result

    def _top_level(self, text: str, line: int) -> tuple[Kernel | None, str]:
        """Handle one top-level statement; returns a kernel once its parameter list is closed."""
        words = text.split()
        if words[0] in (".version", ".target", ".address_size", ".file"):
            if words[0] == ".version":
                self._result.version = words[1]
            elif words[0] == ".target":
                self._result.target = words[1].rstrip(",")
            return None, ""
        if ".entry" in text:
            if not text.endswith(")"):
                return None, text
            match = re.search(r"\.entry\s+(\w+)\s*\((.*)\)$", text, re.DOTALL)
            if match is None:
                raise PtxError(f"PTX line {line}: cannot read the entry {text[:80]!r}")
            kernel = Kernel(match[1])
            for part in filter(None, (one.strip() for one in match[2].split(","))):
                found = _PARAMETER.fullmatch(part)
                if found is None:
                    raise PtxError(f"PTX line {line}: cannot read the parameter {part!r}")
                size = TYPE_BYTES[found[1]] * int(found[3] or 1)
                kernel.parameters.append((found[2], found[1], size))
            return kernel, ""
        if ".func" in words:
            raise PtxError(f"PTX line {line}: device functions (.func) are not supported")
        if not text.endswith(";"):
            return None, text
        variable = _variable(text[:-1], line)
        self._result.variables[variable.name] = variable
        return None, ""

    def _statement(self, kernel: Kernel, text: str, line: int, source_line: int) -> None:
        if text.startswith(".reg"):
            self._registers(kernel, text, line)
        elif text.startswith((".shared", ".local")):
            variable = _variable(text, line)
            kernel.variables[variable.name] = variable
        elif text.startswith(".pragma"):
            return
        elif text.startswith("."):
            raise PtxError(f"PTX line {line}: unknown directive {text.split()[0]}")
        else:
            kernel.code.append(_instruction(text, line, source_line, kernel))

    @staticmethod
    def _registers(kernel: Kernel, text: str, line: int) -> None:
        match = re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", text)
        if match is None:
            raise PtxError(f"PTX line {line}: cannot read {text!r}")
        bits = 1 if match[1] == "pred" else 8 * TYPE_BYTES[match[1]]
        for name in match[2].split(","):
            kernel.widths[re.sub(r"<\d+>$", "", name.strip())] = bits


def _strip_comments(text: str) -> str:
    text = re.sub(r"/\*.*?\*/", lambda match: "\n" * match[0].count("\n"), text, flags=re.DOTALL)
    return re.sub(r"//[^\n]*", "", text)


def _product(numbers: list[int]) -> int:
    result = 1
    for number in numbers:
        result *= number
    return result


def _variable(text: str, line: int) -> Variable:
    match = re.fullmatch(
        r"(?:\.visible\s+|\.weak\s+|\.common\s+)?(?P<extern>\.extern\s+)?"
        r"\.(?P<space>global|const|shared|local)\s+(?:\.align\s+(?P<align>\d+)\s+)?"
        r"(?:\.attribute\(.*?\)\s+)?\.(?P<type>\w+)\s+(?P<name>[\w$]+)"
        r"(?P<array>(?:\[\d*\])*)(?:\s*=\s*(?P<value>.*))?",
        text.strip(),
        re.DOTALL,
    )
    if match is None or match["type"] not in TYPE_BYTES:
        raise PtxError(f"PTX line {line}: cannot read the variable {text[:80]!r}")
    unit = TYPE_BYTES[match["type"]]
    extents = re.findall(r"\[(\d*)\]", match["array"])
    dynamic = "" in extents
    size = 0 if dynamic else unit * _product([int(one) for one in extents])
    data = None
    if match["value"] is not None:
        values = [one.strip() for one in match["value"].strip("{} ").split(",")]
        data = b"".join(
            (_number(one, line).bits % (1 << 8 * unit)).to_bytes(unit, "little") for one in values
        )
        data = data.ljust(size, b"\0")
    elif match["space"] in ("global", "const"):
        data = bytes(size)
    align = int(match["align"] or unit)
    return Variable(match["name"], match["space"], align, size, data, dynamic)


def _instruction(text: str, line: int, source_line: int, kernel: Kernel) -> Instruction:
    predicate = None
    rest = text
    if rest.startswith("@"):
        guard, rest = rest[1:].split(None, 1)
        predicate = Register(guard.lstrip("!"), guard.startswith("!"))
    parts = rest.split(None, 1)
    op = tuple(re.sub(r"::", "__", parts[0]).split("."))
    operands = tuple(_operand(one, line) for one in _split(parts[1] if len(parts) > 1 else ""))
    return Instruction(op, operands, predicate, line, source_line, text)


def _split(text: str) -> list[str]:
    """Split operands at commas and at the `|` of paired destinations, outside brackets."""
    result, depth, current = [], 0, ""
    for letter in text:
        if letter in "[{(":
            depth += 1
        elif letter in "]})":
            depth -= 1
        if letter in ",|" and depth == 0:
            result.append(current)
            current = ""
        else:
            current += letter
    return [one.strip() for one in (*result, current) if one.strip()]


def _operand(text: str, line: int) -> Operand:
    if text.startswith("{"):
        items = tuple(_operand(one, line) for one in _split(text.strip("{} ")))
        if any(isinstance(one, (Address, Vector)) for one in items):
            raise PtxError(f"PTX line {line}: cannot read the vector {text!r}")
        return Vector(items)  # type: ignore[arg-type]
    if text.startswith("["):
        inside = text.strip("[] ").replace(" ", "")
        match = re.fullmatch(r"(%[\w$.]+|[A-Za-z_$][\w$.]*)?((?:\+-?|-)?\d+)?", inside)
        if match is None or not inside:
            raise PtxError(f"PTX line {line}: cannot read the address {text!r}")
        offset = int((match[2] or "0").replace("+-", "-"))
        if match[1] is None:
            return Address(None, offset)
        base = Register(match[1]) if match[1].startswith("%") else Symbol(match[1])
        return Address(base, offset)
    if text == "_":  # a result that nobody wants
        return Register("_")
    if text.startswith("!%"):
        return Register(text[1:], negated=True)
    if text.startswith("%"):
        return Special(text) if _SPECIAL.fullmatch(text) else Register(text)
    if re.match(r"-?\d|0[fd][0-9A-Fa-f]", text):
        return _number(text, line)
    return Symbol(text)


def _number(text: str, line: int) -> Immediate:
    if re.fullmatch(r"0[fF][0-9A-Fa-f]{8}", text):
        return Immediate(int(text[2:], 16), 32)
    if re.fullmatch(r"0[dD][0-9A-Fa-f]{16}", text):
        return Immediate(int(text[2:], 16), 64)
    if re.fullmatch(r"-?\d+\.\d*(?:[eE][-+]?\d+)?", text):
        return Immediate(struct.unpack("<I", struct.pack("<f", float(text)))[0], 32)
    if re.fullmatch(r"-?(?:0[xX][0-9A-Fa-f]+|\d+)U?", text):
        return Immediate(int(text.rstrip("U"), 0))
    raise PtxError(f"PTX line {line}: cannot read the number {text!r}")
