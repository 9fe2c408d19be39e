"""Writes the README's table of measured figures from a result file; nothing is typed by hand.

    python benchmarks/table.py benchmarks/results/h200_blocks.json --write README.md

--again: a second run of the same blocks; how far its medians are from the first's is told below the
table. Without --write the table is printed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


COLUMNS = (
    "kgen single_pass",
    "kgen recompute",
    "kgen two_kernel",
    "kgen hybrid",
    "eager",
    "torch.compile",
)


def _cell(row: dict | None) -> str:
    """A median and, in brackets, the largest error; a dash where a strategy does not fit."""
    if row is None or "failed" in row:
        return "-"
    return f"{row['graph']['median']:.3g} ({row['max_error']:.1e})"


def table(path: Path) -> str:
    record = json.loads(path.read_text())
    lines = [
        f"One {record['gpu']}, driver {record['driver']}, torch {record['torch']}, NVRTC "
        f"{record['nvrtc']}, kgen {record['kgen']}, {record['date']}. Median GPU time in ms of "
        f"{record['specs'][0]['rounds']} CUDA-graph replays with a flushed L2, all rows of a block "
        "interleaved in one process; in brackets the largest error against fp64.",
        "",
        f"| block | x | {' | '.join(COLUMNS)} |",
        "|---" * (len(COLUMNS) + 2) + "|",
    ]
    for spec in record["specs"]:
        cells = [_cell(spec["rows"].get(label)) for label in COLUMNS]
        size = " x ".join(map(str, spec["x"]))
        lines.append(f"| `{spec['name']}` | {size} | {' | '.join(cells)} |")
    lines += ["", f"From `{path.as_posix()}`; measured by `{record['command']}`."]
    return "\n".join(lines)


def repeatability(path: Path, again: Path) -> str:
    """The largest change of a block's median from one run to the next, for each column."""
    first, second = (json.loads(one.read_text())["specs"] for one in (path, again))
    changes: dict[str, float] = {}
    for one, other in zip(first, second, strict=True):
        if one["spec_hash"] != other["spec_hash"]:
            raise SystemExit(f"{again}: {other['name']} is not the block of {path}")
        for label, row in one["rows"].items():
            change = abs(other["rows"][label]["graph"]["median"] / row["graph"]["median"] - 1)
            changes[label] = max(change, changes.get(label, 0.0))
    told = ", ".join(f"{label} {100 * change:.1f} %" for label, change in changes.items())
    return f"Largest change of a median in a second run, `{again.as_posix()}`: {told}."


def insert(text: str, body: str) -> str:
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    return f"{head}{BEGIN}\n{body}\n{END}{tail}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--again", type=Path)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    body = table(arguments.results)
    if arguments.again is not None:
        body += f"\n\n{repeatability(arguments.results, arguments.again)}"
    if arguments.write is None:
        print(body)
    else:
        arguments.write.write_text(insert(arguments.write.read_text(), body))


if __name__ == "__main__":
    main()
