"""Loads, stores, asynchronous copies and atomics."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from kgen.simulator.access import (
    Place,
    check_read,
    check_write,
    count_access,
    resolve,
)
from kgen.simulator.ordering import Strength, strength_of
from kgen.simulator.ptx import TYPE_BYTES, Address, Immediate, Instruction, PtxError, Symbol, Vector
from kgen.simulator.values import DTYPES, raw, typed, unsigned

if TYPE_CHECKING:
    from kgen.simulator.decode import Active, Step, _Decoder
    from kgen.simulator.machine import Resident

OPCODES = ("ld", "ldu", "st", "cp", "atom", "red", "prefetch")
_SPACES = ("global", "shared", "const", "param", "local")
# Modifiers that change caching or ordering, not what one thread reads or writes.
_HINTS = {
    "nc", "weak", "volatile", "relaxed", "acquire", "release", "acq_rel",
    "cta", "gpu", "sys", "cluster", "ca", "cg", "cs", "lu", "cv", "wb", "wt",
}  # fmt: skip


def decode(decoder: _Decoder, instruction: Instruction) -> tuple[Step, str]:
    """The step of a memory instruction and its category. Raises: PtxError."""
    name = instruction.op[0]
    if name in ("ld", "ldu"):
        return _load(decoder, instruction), "load"
    if name == "st":
        return _store(decoder, instruction), "store"
    if name == "cp":
        return _copy(decoder, instruction), "asynchronous copy"
    if name == "prefetch":
        return (lambda resident, active: None), "load"
    return _atomic(decoder, instruction), "atomic"


def _form(op: tuple[str, ...]) -> tuple[str, str, int]:
    """(space, type, vector length) of a load or store. Raises: PtxError."""
    space, count = "generic", 1
    for one in op[1:-1]:
        base = one.split("__")[0]
        if base in _SPACES:
            space = base
        elif one in ("v2", "v4", "v8"):
            count = int(one[1:])
        elif one not in _HINTS and base not in ("L1", "L2", "mmio"):
            raise PtxError(f"unknown modifier .{one}")
    if op[-1] not in DTYPES or op[-1] == "pred":
        raise PtxError(f"unknown type .{op[-1]}")
    return space, op[-1], count


def _load(decoder: _Decoder, instruction: Instruction) -> Step:
    space, kind, count = _form(instruction.op)
    target, source = instruction.operands
    registers = target.items if isinstance(target, Vector) else (target,)
    if len(registers) != count:
        raise PtxError(f"{len(registers)} registers for a vector of {count}")
    stores = [decoder.target(one, kind) for one in registers]
    if space == "param":
        if not isinstance(source, Address) or not isinstance(source.base, Symbol):
            raise PtxError("a parameter is read through its name")
        name, offset, size = source.base.name, source.offset, TYPE_BYTES[kind]

        def load_parameter(resident: Resident, active: Active) -> None:
            data = resident.parameter(name)
            for index, store in enumerate(stores):
                first = offset + index * size
                part = np.frombuffer(data[first : first + size], dtype=unsigned(size))
                store(resident, active, typed(part, kind))

        return load_parameter
    address = decoder.address(source)
    each, strength = TYPE_BYTES[kind], strength_of(instruction.op)
    # The compiler reads a vector where it wants a part of it: what nothing uses may be anything.
    wanted = [one for one in range(count) if count == 1 or decoder.is_used(registers[one])]
    size = each * (max(wanted, default=0) + 1)
    one_for_all = space in ("global", "const")  # a shared address is another word in each block

    def load(resident: Resident, active: Active) -> None:
        where = address(resident, active)
        threads = resident.threads(active)
        if len(where) == 1 and one_for_all and not resident.watching:
            threads = threads[:1]  # the same word for all threads of all blocks
        places = resolve(resident, threads, space, where, size, "load", each * count)
        values: list[Any] = [None] * count
        for place in places:
            count_access(resident, place, each * count, "loaded from")
            for index in wanted:
                got = _read(resident, place, each, index, strength)
                if place.kept is None:
                    values[index] = got
                else:
                    if values[index] is None:
                        values[index] = np.zeros(len(threads), dtype=got.dtype)
                    values[index][place.kept] = got
        for store, value in zip(stores, values, strict=True):
            missing = np.zeros(1, dtype=unsigned(each))
            store(resident, active, typed(missing if value is None else value, kind))

    return load


_WEAK = Strength()


def _read(
    resident: Resident, place: Place, size: int, element: int, strength: Strength = _WEAK
) -> Any:
    """Element `element` of each thread's vector, as unsigned bits."""
    offset = place.offset + element * size
    index = offset >> 2
    if strength.scope:
        resident.polls += 1
    if resident.options.checks:
        for word in (index, index + 1)[: max(1, size // 4)]:
            if strength.scope:
                resident.order.loaded(place, word, strength)
            check_read(resident, place, word, "read", strength.scope)
    if size == 4:
        return place.words[index]
    if size == 8:
        high = place.words[index + 1].astype(np.uint64)
        return (high << np.uint64(32)) | place.words[index]
    return place.words.view(unsigned(size))[offset // size]


def _write(
    resident: Resident, place: Place, size: int, element: int, bits: Any, strength: Strength
) -> None:
    offset = place.offset + element * size
    index = offset >> 2
    resident.changes += 1
    if resident.options.checks:
        for word in (index, index + 1)[: max(1, size // 4)]:
            check_write(resident, place, word, "write", strength.scope)
            if strength.scope:
                resident.order.stored(place, word, strength)
    if size == 4:
        place.words[index] = bits
    elif size == 8:
        place.words[index] = (bits & np.uint64(0xFFFFFFFF)).astype(np.uint32)
        place.words[index + 1] = (bits >> np.uint64(32)).astype(np.uint32)
        place.written[index + 1] = True
    else:
        place.words.view(unsigned(size))[offset // size] = bits
    place.written[index] = True


def _store(decoder: _Decoder, instruction: Instruction) -> Step:
    space, kind, count = _form(instruction.op)
    target, source = instruction.operands
    items = source.items if isinstance(source, Vector) else (source,)
    if len(items) != count:
        raise PtxError(f"{len(items)} registers for a vector of {count}")
    reads = [decoder.source(one, kind) for one in items]
    address = decoder.address(target)
    each, strength = TYPE_BYTES[kind], strength_of(instruction.op)

    def store(resident: Resident, active: Active) -> None:
        threads = resident.threads(active)
        where = address(resident, active)
        values = [np.broadcast_to(raw(read(resident, active)), threads.shape) for read in reads]
        for place in resolve(resident, threads, space, where, each * count, "store"):
            count_access(resident, place, each * count, "stored to")
            for index, value in enumerate(values):
                bits = value if place.kept is None else value[place.kept]
                _write(resident, place, each, index, bits, strength)

    return store


def _copy(decoder: _Decoder, instruction: Instruction) -> Step:
    """cp.async between global and shared memory, its groups and its waits."""
    op, operands = instruction.op, instruction.operands
    if op[:3] == ("cp", "async", "wait_all"):
        return lambda resident, active: resident.copies.wait(resident, active, None)
    if op[:3] == ("cp", "async", "commit_group"):
        return lambda resident, active: resident.copies.commit(resident, active)
    if op[:3] == ("cp", "async", "wait_group"):
        if not isinstance(operands[0], Immediate):
            raise PtxError("wait_group takes a constant")
        allowed = operands[0].bits
        return lambda resident, active: resident.copies.wait(resident, active, allowed)
    hints = [one for one in op[3:] if one not in ("L2__64B", "L2__128B", "L2__256B")]
    if op[:2] != ("cp", "async") or op[2] not in ("ca", "cg") or hints != ["shared", "global"]:
        raise PtxError(f"unknown form {instruction.name}")
    target, source = decoder.address(operands[0]), decoder.address(operands[1])
    if not isinstance(operands[2], Immediate) or operands[2].bits not in (4, 8, 16):
        raise PtxError("cp.async copies 4, 8 or 16 bytes")
    size = operands[2].bits
    given = decoder.source(operands[3], "u32") if len(operands) > 3 else None

    def copy(resident: Resident, active: Active) -> None:
        threads = resident.threads(active)
        wide = threads.shape
        to = np.broadcast_to(target(resident, active), wide)
        origin = np.broadcast_to(source(resident, active), wide)
        taken = np.full(wide, size) if given is None else np.broadcast_to(
            given(resident, active), wide)  # fmt: skip
        content = np.zeros((len(threads), size // 4), dtype=np.uint32)
        for rows, start, length in _parts(taken, size):
            read_from = origin[rows] + np.uint64(start)
            for place in resolve(resident, threads[rows], "global", read_from, length, "copy"):
                count_access(resident, place, length, "loaded from")
                kept = rows if place.kept is None else rows[place.kept]
                for element in range(length // 4):
                    got = _read(resident, place, 4, element)
                    content[kept, start // 4 + element] = got
        for place in resolve(resident, threads, "shared", to, size, "copy"):
            count_access(resident, place, size, "stored to")
            rows = content if place.kept is None else content[place.kept]
            for element in range(size // 4):
                index = (place.offset >> 2) + element
                if resident.options.checks:
                    check_write(resident, place, index, "copy", note=False)
                    resident.copies.start(resident, place, index)
                place.words[index] = rows[:, element]
                place.written[index] = True

    return copy


def _parts(taken: Any, size: int) -> list[tuple[Any, int, int]]:
    """What copies of `size` bytes read where some take only their first bytes.

    (rows, first byte, bytes): whole copies at once, the others word by word.
    """
    whole = np.flatnonzero(taken >= size)
    parts = [(whole, 0, size)] if len(whole) else []
    for start in range(0, size, 4):
        rows = np.flatnonzero((taken > start) & (taken < size))
        if len(rows):
            parts.append((rows, start, 4))
    return parts


_ATOMIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda old, value: old + value,
    "min": min,
    "max": max,
    "and": lambda old, value: old & value,
    "or": lambda old, value: old | value,
    "xor": lambda old, value: old ^ value,
    "exch": lambda old, value: value,
    "inc": lambda old, value: 0 if old >= value else old + 1,
    "dec": lambda old, value: value if old == 0 or old > value else old - 1,
}


def _atomic(decoder: _Decoder, instruction: Instruction) -> Step:
    """atom and red: thread after thread, in the order of their numbers."""
    op, operands = instruction.op, instruction.operands
    kind = op[-1]
    names = [one for one in op[1:-1] if one in _ATOMIC or one == "cas"]
    rest = set(op[1:-1]) - set(names) - _HINTS - {"global", "shared"}
    known = {"b32", "u32", "s32", "f32", "b64", "u64", "s64"}
    if len(names) != 1 or rest or kind not in known:
        raise PtxError(f"unknown form {instruction.name}")
    space = next((one for one in op if one in ("global", "shared")), "generic")
    returns = op[0] == "atom"
    address = decoder.address(operands[1 if returns else 0])
    values = [decoder.source(one, kind) for one in operands[2 if returns else 1 :]]
    store = decoder.target(operands[0], kind) if returns else None
    size, name, dtype = TYPE_BYTES[kind], names[0], DTYPES[kind]
    strength = strength_of(op)

    def atomic(resident: Resident, active: Active) -> None:
        threads = resident.threads(active)
        given = [np.broadcast_to(read(resident, active), threads.shape) for read in values]
        old = np.zeros(len(threads), dtype=dtype)
        where = address(resident, active)
        for place in resolve(resident, threads, space, where, size, "atomic"):
            count_access(resident, place, size, "stored to")
            rows = np.arange(len(threads)) if place.kept is None else place.kept
            whole = len(place.words) // (size // 4) * (size // 4)
            memory, index = place.words[:whole].view(dtype), place.offset >> 2
            resident.polls += 1
            if resident.options.checks:
                check_write(resident, place, index, "atomic", strength.scope)
            for at, (row, offset) in enumerate(zip(rows, place.offset // size, strict=True)):
                current = memory[offset]
                if resident.options.checks:
                    resident.order.atomic(place, strength, at, int(index[at]), reads=returns)
                old[row] = current
                if resident.options.checks and not place.written[offset * size // 4]:
                    resident.report(
                        "uninitialised read", threads[row], "atomic on unwritten memory"
                    )
                if name == "cas":
                    if current == given[0][row]:
                        memory[offset] = given[1][row]
                else:
                    memory[offset] = dtype(_ATOMIC[name](current, given[0][row]))
                place.written[offset * size // 4] = True
                resident.changes += bool(memory[offset] != current)
        if store is not None:
            store(resident, active, old)

    return atomic
