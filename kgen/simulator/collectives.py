"""Instructions in which the lanes of a warp work together: shfl, vote, redux, match, bar.warp."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kgen.simulator.ptx import Instruction, PtxError, Symbol
from kgen.simulator.values import DTYPES

if TYPE_CHECKING:
    from kgen.simulator.decode import Active, Step, _Decoder
    from kgen.simulator.machine import Resident

OPCODES = ("shfl", "vote", "redux", "activemask", "bar", "elect", "match")


def decode(decoder: _Decoder, instruction: Instruction) -> Step:
    """The step of a warp-wide instruction. Raises: PtxError."""
    name = instruction.op[0]
    if name == "shfl":
        return _shuffle(decoder, instruction)
    if name == "vote":
        return _vote(decoder, instruction)
    if name == "redux":
        return _reduce(decoder, instruction)
    if name == "activemask":
        return _activemask(decoder, instruction)
    if name == "elect":
        return _elect(decoder, instruction)
    if name == "match":
        return _match(decoder, instruction)
    if instruction.op[:3] == ("bar", "warp", "sync"):
        mask = decoder.source(instruction.operands[0], "u32")

        def sync(resident: Resident, active: Active) -> None:
            threads = resident.threads(active)
            _require(resident, threads, np.broadcast_to(mask(resident, active), threads.shape))
            resident.clocks.advance(np.unique(threads // 32))

        return sync
    raise PtxError(f"unknown form {instruction.name}")


def _require(resident: Resident, threads: Any, mask: Any) -> None:
    """Report warps whose mask names lanes that are not here with the others."""
    present = np.zeros(resident.size // 32, dtype=np.uint32)
    np.bitwise_or.at(present, threads // 32, np.uint32(1) << (threads % 32).astype(np.uint32))
    absent = mask & ~present[threads // 32]
    if absent.any():
        first = int(np.argmax(absent != 0))
        detail = f"mask {int(mask[first]):#010x} names lanes {int(absent[first]):#010x}, not here"
        resident.report("divergent warp instruction", threads[first], detail)


def _shuffle(decoder: _Decoder, instruction: Instruction) -> Step:
    op, operands = instruction.op, instruction.operands
    if op[1] != "sync" or op[2] not in ("up", "down", "bfly", "idx") or op[3] != "b32":
        raise PtxError(f"unknown form {instruction.name}")
    mode = op[2]
    store = decoder.target(operands[0], "b32")
    paired = len(operands) == 6
    store_valid = decoder.target(operands[1], "pred") if paired else None
    value, lane_by, clamp, mask = (
        decoder.source(one, "u32") for one in operands[2 if paired else 1 :]
    )

    def shuffle(resident: Resident, active: Active) -> None:
        threads = resident.threads(active)
        wide = threads.shape
        given = np.broadcast_to(value(resident, active), wide)
        by = np.broadcast_to(lane_by(resident, active), wide).astype(np.int64) & 31
        limits = np.broadcast_to(clamp(resident, active), wide).astype(np.int64)
        _require(resident, threads, np.broadcast_to(mask(resident, active), wide))
        lane, segment, bound = threads % 32, (limits >> 8) & 31, limits & 31
        lowest = lane & segment
        highest = lowest | (bound & ~segment)
        if mode == "up":
            source, valid = lane - by, lane - by >= highest
        elif mode == "down":
            source, valid = lane + by, lane + by <= highest
        elif mode == "bfly":
            source, valid = lane ^ by, (lane ^ by) <= highest
        else:
            source = lowest | (by & ~segment)
            valid = source <= highest
        source = np.where(valid, source, lane)
        everyone = np.zeros(resident.size, dtype=np.uint32)
        here = np.zeros(resident.size, dtype=bool)
        everyone[threads], here[threads] = given, True
        origin = threads // 32 * 32 + source
        if not here[origin].all():
            first = int(np.argmin(here[origin]))
            resident.report("divergent warp instruction", threads[first],
                            f"reads lane {int(source[first])}, which is not here")  # fmt: skip
        store(resident, active, everyone[origin])
        if store_valid is not None:
            store_valid(resident, active, valid)

    return shuffle


def _lanes(resident: Resident, threads: Any, values: Any, missing: Any) -> tuple[Any, Any]:
    """Values as [warps, 32] with `missing` for absent lanes, and each thread's warp row."""
    everyone = np.full(resident.size, missing, dtype=values.dtype)
    everyone[threads] = values
    return everyone.reshape(-1, 32), threads // 32


def _vote(decoder: _Decoder, instruction: Instruction) -> Step:
    op, operands = instruction.op, instruction.operands
    if op[1] != "sync" or op[2] not in ("all", "any", "uni", "ballot"):
        raise PtxError(f"unknown form {instruction.name}")
    mode = op[2]
    store = decoder.target(operands[0], "b32" if mode == "ballot" else "pred")
    predicate, mask = decoder.source(operands[1], "pred"), decoder.source(operands[2], "u32")

    def vote(resident: Resident, active: Active) -> None:
        threads = resident.threads(active)
        given = np.broadcast_to(predicate(resident, active), threads.shape)
        _require(resident, threads, np.broadcast_to(mask(resident, active), threads.shape))
        if mode == "ballot":
            lanes, row = _lanes(resident, threads, given, False)
            bits = (lanes.astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(axis=1)
            store(resident, active, bits.astype(np.uint32)[row])
            return
        every, row = _lanes(resident, threads, given, True)
        some, _ = _lanes(resident, threads, given, False)
        verdict = {"all": every.all(axis=1), "any": some.any(axis=1),
                   "uni": every.all(axis=1) | ~some.any(axis=1)}[mode]  # fmt: skip
        store(resident, active, verdict[row])

    return vote


def _reduce(decoder: _Decoder, instruction: Instruction) -> Step:
    op, operands = instruction.op, instruction.operands
    functions: dict[str, Any] = {"add": np.add, "min": np.minimum, "max": np.maximum,
                                 "and": np.bitwise_and, "or": np.bitwise_or,
                                 "xor": np.bitwise_xor}  # fmt: skip
    if op[1] != "sync" or op[2] not in functions or op[3] not in ("u32", "s32", "b32"):
        raise PtxError(f"unknown form {instruction.name}")
    kind, function = op[3], functions[op[2]]
    info: Any = np.iinfo(DTYPES[kind])
    missing = {"add": 0, "or": 0, "xor": 0, "min": info.max, "max": info.min,
               "and": info.max if kind != "s32" else -1}[op[2]]  # fmt: skip
    store = decoder.target(operands[0], kind)
    value, mask = decoder.source(operands[1], kind), decoder.source(operands[2], "u32")

    def reduce(resident: Resident, active: Active) -> None:
        threads = resident.threads(active)
        given = np.broadcast_to(value(resident, active), threads.shape)
        _require(resident, threads, np.broadcast_to(mask(resident, active), threads.shape))
        lanes, row = _lanes(resident, threads, given, missing)
        store(resident, active, function.reduce(lanes, axis=1).astype(DTYPES[kind])[row])

    return reduce


def _activemask(decoder: _Decoder, instruction: Instruction) -> Step:
    store = decoder.target(instruction.operands[0], "b32")

    def activemask(resident: Resident, active: Active) -> None:
        threads = resident.threads(active)
        present = np.zeros(resident.size // 32, dtype=np.uint32)
        np.bitwise_or.at(present, threads // 32, np.uint32(1) << (threads % 32).astype(np.uint32))
        store(resident, active, present[threads // 32])

    return activemask


def _elect(decoder: _Decoder, instruction: Instruction) -> Step:
    """elect.sync: the lowest lane of the mask, as this simulator chooses it."""
    if instruction.op[1:] != ("sync",):
        raise PtxError(f"unknown form {instruction.name}")
    leader, chosen, mask_from = instruction.operands
    unused = isinstance(leader, Symbol) and leader.name == "_"
    store = None if unused else decoder.target(leader, "b32")
    store_chosen, mask = decoder.target(chosen, "pred"), decoder.source(mask_from, "u32")

    def elect(resident: Resident, active: Active) -> None:
        threads = resident.threads(active)
        given = np.broadcast_to(mask(resident, active), threads.shape)
        _require(resident, threads, given)
        lowest = np.bitwise_count((given & (~given + np.uint32(1))) - np.uint32(1))
        if store is not None:
            store(resident, active, lowest.astype(np.uint32))
        store_chosen(resident, active, threads % 32 == lowest)

    return elect


def _match(decoder: _Decoder, instruction: Instruction) -> Step:
    """match.any: the lanes with the same value; match.all: the mask if all have it."""
    op, operands = instruction.op, instruction.operands
    if op[1] not in ("any", "all") or op[2] != "sync" or op[3] not in ("b32", "b64"):
        raise PtxError(f"unknown form {instruction.name}")
    store = decoder.target(operands[0], "b32")
    paired = len(operands) == 4
    store_same = decoder.target(operands[1], "pred") if paired else None
    value = decoder.source(operands[-2], op[3])
    mask, every = decoder.source(operands[-1], "u32"), op[1] == "all"

    def match(resident: Resident, active: Active) -> None:
        threads = resident.threads(active)
        given = np.broadcast_to(value(resident, active), threads.shape)
        named = np.broadcast_to(mask(resident, active), threads.shape)
        _require(resident, threads, named)
        lanes, row = _lanes(resident, threads, given, 0)
        here, _ = _lanes(resident, threads, np.ones(len(threads), dtype=np.bool_), False)
        same = (lanes[row] == given[:, None]) & here[row]
        bits = (same.astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(axis=1)
        found = bits.astype(np.uint32) & named
        if every:
            found = np.where(found == named, named, np.uint32(0))
        store(resident, active, found)
        if store_same is not None:
            store_same(resident, active, found == named)

    return match
