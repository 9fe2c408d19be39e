"""What a benchmark found, as it is saved: one JSON file a run, read back by compare and report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from kgen.errors import KgenError
from kgen.files import write_whole

SCHEMA = 1
KINDS = ("cold", "warm", "graph")


class RecordError(KgenError):
    """A file is no benchmark record that this version can read."""


class Model(BaseModel):
    """Base of all parts: fixed, and nothing unknown."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class RowTimes(Model):
    """ms; relative_error: of the median, see kgen.bench.timing.Times."""

    median: float
    p20: float
    p80: float
    rounds: int
    relative_error: float


class Row(Model):
    """One kernel or baseline. A row that failed has a reason and no times.

    max_error, rms_error: against fp64, before timing; recheck_error: the largest error of the last
    output after timing. host_us: microseconds that one call keeps the host busy; first_call_ms:
    from an empty cache to the first output. ncu: counters by name, where they were asked for, and
    launch_ns: nanoseconds of each of kgen's launches under the profiler, in order.
    """

    label: str
    kind: Literal["kgen", "baseline"]
    strategy: str | None = None
    spec_hash: str | None = None
    kernel_sha256: str | None = None
    verified_cases: int = 0
    failed: str | None = None
    max_error: float | None = None
    rms_error: float | None = None
    recheck_error: float | None = None
    cold: RowTimes | None = None
    warm: RowTimes | None = None
    graph: RowTimes | None = None
    host_us: float | None = None
    first_call_ms: float | None = None
    ncu: dict[str, float] | None = None
    launch_ns: tuple[float, ...] = ()

    def times(self, kind: str) -> RowTimes | None:
        """Times of one of KINDS."""
        found: RowTimes | None = getattr(self, kind)
        return found

    def shown(self) -> tuple[str, RowTimes] | None:
        """What tables, pictures and comparisons show: the device's own time, graph replays where
        there are any, else cold calls; None for a failed row."""
        if self.failed is None:
            for kind in ("graph", "cold"):
                times = self.times(kind)
                if times is not None:
                    return kind, times
        return None


class Ceilings(Model):
    """The speed of light, measured in the same run: bytes a second (read and written), and
    multiply-adds a second of tensor cores times two, by operand type."""

    copy_bytes: float
    fill_bytes: float
    mma_flops: dict[str, float]


class Context(Model):
    """The circumstances. commit: of the checkout that kgen ran from, with `-dirty` where files
    differed; None where there is none. warnings: what may have disturbed the run, a line each."""

    gpu: str
    driver: str
    sms: int
    torch: str
    cuda: str
    cudnn: int | None
    nvrtc: str
    kgen: str
    python: str
    date: str
    command: str
    flags: dict[str, bool | str]
    clocks_before: dict[str, float]
    clocks_after: dict[str, float]
    commit: str | None = None
    warnings: tuple[str, ...] = ()


class Record(Model):
    """One run. spec: the YAML text. bytes_needed: x read once and y written once; flops: two for
    each multiply-add of the convolution."""

    schema_version: int = SCHEMA
    name: str
    spec: str
    spec_hash: str
    x: tuple[int, int, int, int]
    y: tuple[int, int, int, int]
    bytes_needed: int
    flops: int
    context: Context
    ceilings: Ceilings
    rows: tuple[Row, ...]

    def row(self, label: str) -> Row | None:
        """The row of that label."""
        return next((row for row in self.rows if row.label == label), None)

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all. Raises: UsageError."""
        text = json.dumps(self.model_dump(mode="json"), indent=1) + "\n"
        write_whole(path, text.encode())


def load_record(path: Path) -> Record:
    """Read a file that `Record.save` wrote. Raises: RecordError, which names the file's fault."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise RecordError(f"{path}: cannot be read: {reason}") from None
    try:
        found = json.loads(text)
    except ValueError as error:
        raise RecordError(f"{path}: is not JSON: {error}") from None
    if not isinstance(found, dict) or "schema_version" not in found:
        raise RecordError(f"{path}: is no record of kgen bench")
    if found["schema_version"] != SCHEMA:
        raise RecordError(
            f"{path}: has schema {found['schema_version']!r}, this kgen reads {SCHEMA}"
        )
    try:
        return Record.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise RecordError(f"{path}: {where}: {first['msg']}") from None
