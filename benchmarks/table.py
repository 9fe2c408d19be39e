"""Writes the tables of README.md, NOTES.md and docs/ from committed records.

    python benchmarks/table.py           # prints them
    python benchmarks/table.py --write   # puts them where they belong

Records are those of `kgen bench`, benchmarks/results/bench_NAME.json and, of a second run,
bench_NAME_again.json, and those of benchmarks/tuning.py and benchmarks/kernelbench.py.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from shapes import SHAPES, shape_name, shaped

import kgen
from kgen.bench.record import Record, Row, load_record
from kgen.report.figures import best_kernel, speed, speedup
from kgen.spec import parse_spec
from kgen.yaml_source import parse_yaml

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"

FLAGSHIP = "conv8x32_k3_gn8"
SPEC = ROOT / f"specs/{FLAGSHIP}.yaml"
BLOCKS = (
    FLAGSHIP,
    "conv3x16_k5",
    "conv9x6_k3x5",
    "conv16x24_s2p1",
    "conv8x32_dynamic",
    "conv48x64_k3",
    "conv8x8_1x1out",
)
COLUMNS = {
    "kgen single_pass": "kgen single_pass",
    "kgen recompute": "kgen recompute",
    "kgen two_kernel": "kgen two_kernel",
    "kgen hybrid": "kgen hybrid",
    "eager": "eager",
    "compile": "torch.compile",
}


def result(name: str) -> Path:
    return RESULTS / f"bench_{name}.json"


def median(row: Row | None) -> float | None:
    """ms of graph replays; None where a strategy does not fit or was not measured."""
    return None if row is None or row.graph is None else row.graph.median


def cell(record: Record, label: str) -> str:
    """A median, bold where it is the fastest of its line and with an arrow where the spec has that
    strategy, and the largest error."""
    row = record.row(label)
    own = median(row)
    if own is None:
        return "-"
    shown = [found for one in COLUMNS if (found := median(record.row(one))) is not None]
    text = f"**{own:.3g}**" if own == min(shown) else f"{own:.3g}"
    spec = parse_spec(parse_yaml(record.spec.encode(), record.name))
    arrow = "→ " if row.strategy == kgen.make_plan(spec).strategy else ""
    return f"{arrow}{text} ({row.max_error:.1e})"


def same_context(records: list[Record]) -> str:
    """GPU and versions. Raises: SystemExit where the records' differ."""
    found = {
        f"One {one.gpu}, driver {one.driver}, torch {one.torch}, NVRTC {one.nvrtc}, kgen {one.kgen}"
        f"{f' at {one.commit[:10]}' if one.commit else ''}"
        for one in (record.context for record in records)
    }
    if len(found) > 1:
        raise SystemExit(f"records of one table were made differently: {sorted(found)}")
    return found.pop()


def blocks_table() -> str:
    records = [load_record(result(name)) for name in BLOCKS]
    dates = sorted(record.context.date[:10] for record in records)
    span = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    rounds = min(
        row.graph.rounds for record in records for row in record.rows if row.graph is not None
    )
    lines = [
        f"{same_context(records)}, {span}. Median GPU time in ms of at least {rounds} CUDA-graph "
        "replays with a flushed L2, all rows of a block interleaved in one process; in brackets "
        "the largest error against fp64. An arrow marks the strategy that the shipped spec names, "
        "bold the fastest; a dash a strategy that does not fit all of the spec's targets. The last "
        "column: x read once and y written once in the fastest kernel's time, as a share of the "
        "copy speed measured in the same run.",
        "",
        f"| block | x | {' | '.join(COLUMNS.values())} | of copy speed |",
        "|---" * (len(COLUMNS) + 3) + "|",
    ]
    for record in records:
        cells = " | ".join(cell(record, label) for label in COLUMNS)
        size = " x ".join(map(str, record.x))
        share = speed(record, median(best_kernel(record))).of_copy
        lines.append(f"| `{record.name}` | {size} | {cells} | {100 * share:.0f} % |")
    others = [
        f"{row.label} {median(row):.3g} ({row.max_error:.1e})"
        for row in records[0].rows
        if row.label not in COLUMNS and median(row) is not None
    ]
    lines += ["", f"`{FLAGSHIP}` beside that: {', '.join(others)}."]
    lines += ["", repeatability(), "", "`benchmarks/results/bench_*.json`, the first by", ""]
    lines += [f"    {records[0].context.command}"]
    return "\n".join(lines)


def repeatability() -> str:
    """The largest change of a median where a block was measured twice."""
    changes: dict[str, float] = {}
    twice = [name for name in BLOCKS if result(f"{name}_again").exists()]
    for name in twice:
        first, second = load_record(result(name)), load_record(result(f"{name}_again"))
        if first.spec_hash != second.spec_hash:
            raise SystemExit(f"bench_{name}_again.json is of another block")
        for label in COLUMNS:
            one, other = median(first.row(label)), median(second.row(label))
            if one is not None and other is not None:
                kind = "kgen" if label.startswith("kgen ") else COLUMNS[label]
                changes[kind] = max(changes.get(kind, 0.0), abs(other / one - 1))
    told = ", ".join(f"{kind} {100 * change:.1f} %" for kind, change in changes.items())
    return (
        f"Measured twice: {', '.join(f'`{name}`' for name in twice)}. Largest change of a median: "
        f"{told}."
    )


def sizes_table() -> str:
    lines = [
        "| size | kgen's choice | ms | times torch.compile | times eager | bytes over time, TB/s |",
        "|---|---|---|---|---|---|",
    ]
    for shape in SHAPES:
        record = load_record(result(shape_name(FLAGSHIP, shape)))
        chosen = kgen.make_plan(shaped(kgen.load_spec(SPEC), shape)).strategy
        best, row = best_kernel(record), record.row(f"kgen {chosen}")
        ms = median(row)
        if best.strategy != chosen:
            chosen += f"; {best.strategy} takes {median(best):.3f}"
        factors = (speedup(record, row, label, "graph").factor for label in ("compile", "eager"))
        lines.append(
            f"| {shape.replace('x', ' x ')} | {chosen} | {ms:.3f} | "
            f"{' | '.join(f'{one:.1f}' for one in factors)} | "
            f"{speed(record, ms).bytes_per_s / 1e12:.1f} |"
        )
    return "\n".join(lines)


def tuning_table() -> str:
    record = json.loads((RESULTS / "h200_tuning.json").read_text())
    shown = ("winner", "slower", "spills", "constraint")
    lines = [
        f"One {record['gpu']}, driver {record['driver']}, NVRTC {record['nvrtc']}, "
        f"{record['date']}.",
        "",
        f"| spec | strategies | s | {' | '.join(shown)} | pruned | not reached "
        "| kept after kill -9 | all of them: candidates | s | tuned over best |",
        "|---" * (len(shown) + 9) + "|",
    ]
    for row in record["rows"]:
        tuned, everything = row["tuned"], row["exhaustive"]
        counts = tuned["counts"]
        if set(counts) - set(shown) or everything["left"]:
            raise SystemExit(f"{row['spec']}: the table would not show everything")
        candidates = sum(count for status, count in everything["counts"].items()
                         if status != "constraint")  # fmt: skip
        same = tuned["winner"]["schedule"] == everything["best"]["schedule"]
        cells = [
            f"`{row['spec'].removesuffix('.yaml')}`",
            row["strategies"].replace(",", ", "),
            f"{row['seconds']:.0f}",
            *(str(counts.get(status, 0)) for status in shown),
            str(tuned["pruned"]),
            str(tuned["left"]),
            str(row["kept_after_kill"]),
            str(candidates),
            f"{everything['seconds']:.0f}",
            f"{row['tuned_over_best']:.3f}{', the same schedule' if same else ''}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def kernelbench_table() -> str:
    record = json.loads((RESULTS / "h200_kernelbench.json").read_text())
    lines = [
        f"One {record['gpu']}, driver {record['driver']}, torch {record['torch']}, "
        f"{record['date']}; KernelBench at {record['kernelbench_commit'][:10]}, problem "
        f"`{record['problem']}`. Means of its {record['trials']['time']} timings in ms.",
        "",
        "| inputs times | right | ModelNew | eager |",
        "|---|---|---|---|",
    ]
    for row in record["scales"]:
        trials = row["metadata"]["correctness_trials"].strip("()")
        times = " | ".join(f"{row[one]['mean']:.3g}" for one in ("candidate", "eager"))
        lines.append(f"| {row['scale']:g} | {trials} | {times} |")
    eager, compiled = (record["references"][one]["mean"] for one in ("eager", "torch.compile"))
    lines += ["", f"Its reference times from the same run: eager {eager:.3g}, torch.compile "
              f"{compiled:.3g}."]  # fmt: skip
    return "\n".join(lines)


TABLES = {
    "README.md": blocks_table,
    "benchmarks/NOTES.md": sizes_table,
    "docs/tune.md": tuning_table,
    "docs/export.md": kernelbench_table,
}


def insert(text: str, body: str) -> str:
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    return f"{head}{BEGIN}\n{body}\n{END}{tail}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="into the documents")
    arguments = parser.parse_args()
    for name, make in TABLES.items():
        path, body = ROOT / name, make()
        if arguments.write:
            path.write_text(insert(path.read_text(), body))
        else:
            print(f"{name}:\n\n{body}\n")


if __name__ == "__main__":
    main()
