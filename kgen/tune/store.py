"""What was measured, in a file that is only ever appended to: one JSON object a line.

A line is written at once, under an OS lock, and forced to the disk: a tuner that is interrupted or
killed loses nothing that it told, and several may write to one file. Whatever is no entry of this
version is skipped.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from kgen.compiler import CacheError, cache_dir, locked
from kgen.errors import UsageError
from kgen.spec import Spec
from kgen.tune.devices import Where
from kgen.tune.space import Candidate, block_hash, schedule_key, with_schedule
from kgen.tune.task import Outcome, kernel_sha256

SCHEMA = 1
FORMAT = "kgen-tune"


@dataclass(frozen=True)
class Entry:
    """One line of the file. block: hash of the spec without its schedule; limit: seconds that each
    step of the candidate had."""

    block: str
    where: Where
    schedule: dict[str, Any]
    limit: float
    outcome: Outcome

    def to_json(self) -> dict[str, Any]:
        """Plain values, as they are written."""
        return {
            "format": FORMAT,
            "schema": SCHEMA,
            "block": self.block,
            **self.where.to_json(),
            "schedule": self.schedule,
            "limit": self.limit,
            "outcome": self.outcome.to_json(),
        }

    @classmethod
    def from_json(cls, values: Any) -> Entry:
        """The entry of `to_json`. Raises: ValueError, KeyError or TypeError if it is not one."""
        where = {one.name: values[one.name] for one in fields(Where)}
        if not all(isinstance(one, str) for one in (values["block"], *where.values())):
            raise ValueError("the key is not text")
        schedule, limit = values["schedule"], values["limit"]
        if not isinstance(schedule, dict) or not isinstance(limit, (int, float)):
            raise ValueError("no schedule or no limit")
        outcome = Outcome.from_json(values["outcome"])
        return cls(values["block"], Where(**where), schedule, float(limit), outcome)


class Store:
    """The measurements of one block at one place, in a file that may hold others too.

    limit: seconds for a step; what timed out with less is measured again.
    """

    def __init__(self, path: Path, spec: Spec, where: Where, limit: float) -> None:
        self.path, self._spec, self._where, self._limit = path, spec, where, limit
        self._block = block_hash(spec)
        self._offset = 0
        self._found: dict[str, Outcome] = {}
        self._skipped = {"damaged": 0, "foreign": 0, "of another version": 0}
        self._claims = _Claims(path.with_name(path.name + ".claims"))

    def refresh(self) -> bool:
        """Read what was appended since the last call, by whomever; whether there was anything.

        Raises: UsageError if the file cannot be read.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise UsageError(f"{self.path}: cannot be read: {error.strerror}") from None
        whole, tail = new[: new.rfind(b"\n") + 1], new[new.rfind(b"\n") + 1 :]
        before = len(self._found)
        for line in whole.split(b"\n"):
            self._take(line)
        if tail.endswith(b"}") and _is_json(tail):  # else it may still be growing
            self._take(tail)
            whole += tail
        self._offset += len(whole)
        return len(self._found) > before

    def get(self, candidate: Candidate) -> Outcome | None:
        """What is known about a candidate's kernel, as it would be generated now."""
        outcome = self._found.get(candidate.key)
        if outcome is None:
            return None
        digest = kernel_sha256(with_schedule(self._spec, candidate.schedule))
        return outcome if outcome.kernel_sha256 == digest else None

    def add(self, candidate: Candidate, outcome: Outcome) -> None:
        """Append an outcome, unless it says nothing about another run. Raises: UsageError."""
        if not outcome.lasting:
            return
        self._found[candidate.key] = outcome
        entry = Entry(self._block, self._where, candidate.schedule, self._limit, outcome)
        append(self.path, entry)

    def claim(self, candidate: Candidate) -> bool:
        """Take a candidate for this process; False if another tuner is at it.

        A claim ends with `release` or with the process, however that ends.
        """
        text = f"{self._block} {self._where} {candidate.key}"
        return self._claims.take(text)

    def release(self, candidate: Candidate) -> None:
        """Give a claim back."""
        self._claims.release(f"{self._block} {self._where} {candidate.key}")

    def close(self) -> None:
        """Give all claims back."""
        self._claims.close()

    def warning(self) -> str:
        """One line about all lines that were skipped so far; empty if there were none."""
        listed = [f"{count} {what}" for what, count in self._skipped.items() if count]
        if not listed:
            return ""
        total = sum(self._skipped.values())
        lines = "1 line is" if total == 1 else f"{total} lines are"
        return f"{self.path}: {lines} ignored: {', '.join(listed)}"

    def _take(self, line: bytes) -> None:
        if not line.strip():
            return
        try:
            values = json.loads(line)
        except ValueError:  # UnicodeDecodeError is one
            self._skipped["damaged"] += 1
            return
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            self._skipped["foreign"] += 1
            return
        if values.get("schema") != SCHEMA:
            self._skipped["of another version"] += 1
            return
        try:
            entry = Entry.from_json(values)
        except (ValueError, KeyError, TypeError):
            self._skipped["damaged"] += 1
            return
        if (entry.block, entry.where) != (self._block, self._where):
            return
        if entry.outcome.status == "timeout" and entry.limit < self._limit:
            return
        self._found[schedule_key(entry.schedule)] = entry.outcome


def default_path(spec: Spec) -> Path:
    """Where a block's measurements are kept: beside the cache. Raises: UsageError."""
    try:
        return cache_dir() / "tune" / f"{spec.name}.jsonl"
    except CacheError as error:
        raise UsageError(str(error)) from None


def append(path: Path, entry: Entry) -> None:
    """Write one line at the end of the file, and wait until the disk has it. Raises: UsageError.

    The rest of a line that a killed process or a full disk cut off is closed first.
    """
    line = json.dumps(entry.to_json(), separators=(",", ":")).encode() + b"\n"
    try:
        with locked(path.with_name(path.name + ".lock")):
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                size = os.fstat(handle).st_size
                if size:
                    os.lseek(handle, size - 1, os.SEEK_SET)
                    line = line if os.read(handle, 1) == b"\n" else b"\n" + line
                while line:
                    line = line[os.write(handle, line) :]
                os.fsync(handle)
            finally:
                os.close(handle)
    except CacheError as error:
        raise UsageError(str(error)) from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


class _Claims:
    """Locks on single bytes of a file, one for each candidate; they end with their process.

    Such locks belong to the process: they do not keep its own threads apart, and closing any
    descriptor of the file gives all of them back. So one descriptor serves the whole process, and a
    table says which bytes its tuners hold. Where the system has no such locks, tuners of different
    processes may measure the same candidate, once each.
    """

    _guard = threading.Lock()
    _handles: ClassVar[dict[Path, int]] = {}
    _holders: ClassVar[dict[tuple[Path, int], _Claims]] = {}

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()

    def take(self, text: str) -> bool:
        byte = _byte(text)
        with self._guard:
            if (self._path, byte) in self._holders:
                return False
            if not self._lock(byte):
                return False
            self._holders[self._path, byte] = self
            return True

    def release(self, text: str) -> None:
        with self._guard:
            self._release(_byte(text))

    def close(self) -> None:
        with self._guard:
            own = [byte for (_, byte), holder in self._holders.items() if holder is self]
            for byte in own:
                self._release(byte)
            if not any(path == self._path for path, _ in self._holders):
                handle = self._handles.pop(self._path, None)
                if handle is not None:
                    os.close(handle)

    def _lock(self, byte: int) -> bool:
        try:
            import fcntl
        except ImportError:
            return True
        try:
            if self._path not in self._handles:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._handles[self._path] = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            fcntl.lockf(self._handles[self._path], fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        except (BlockingIOError, PermissionError):
            return False
        except OSError:  # a file system without locks
            return True
        return True

    def _release(self, byte: int) -> None:
        if self._holders.get((self._path, byte)) is not self:
            return
        del self._holders[self._path, byte]
        handle = self._handles.get(self._path)
        if handle is not None:
            import fcntl

            with suppress(OSError):
                fcntl.lockf(handle, fcntl.LOCK_UN, 1, byte)


def _byte(text: str) -> int:
    """The byte that stands for a text; two texts that share one only wait for each other."""
    return int(hashlib.sha256(text.encode()).hexdigest()[:7], 16)
