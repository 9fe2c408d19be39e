"""The command `kgen bench`."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import click

from kgen.bench.compare import compare
from kgen.bench.record import Record, load_record
from kgen.bench.table import text_table
from kgen.durations import parse_seconds
from kgen.errors import CheckError, UsageError
from kgen.files import check_writable
from kgen.spec import Spec, load_spec
from kgen.steps import progress_on_terminal
from kgen.verify import why_no_device


def default_output(name: str) -> Path:
    """Where a record goes if nothing is said: benchmarks/results/bench_<spec's name>.json."""
    return Path("benchmarks/results") / f"bench_{name}.json"


@click.command("bench")
@click.argument("spec", type=click.Path(path_type=Path))
@click.option("--strategies", help="Comma-separated, or `all`; default: the spec's own.")
@click.option("--baselines", default="eager,compile", show_default=True,
              help="Comma-separated: eager, compile, compile-max-autotune, channels_last, hybrid; "
              "`none` for none.")  # fmt: skip
@click.option("--budget", default="30s", show_default=True,
              help="Time limit of the timing, e.g. 20s or 5m.")  # fmt: skip
@click.option("--device", type=click.IntRange(min=0), default=0, show_default=True,
              help="CUDA device.")  # fmt: skip
@click.option("--ncu", is_flag=True, help="Add DRAM bytes, stall reasons and spills from ncu.")
@click.option("--compare", "old", type=click.Path(path_type=Path),
              help="An older record: exit 1 if a kernel became slower.")  # fmt: skip
@click.option("--output", type=click.Path(path_type=Path),
              help="JSON file; default: benchmarks/results/bench_NAME.json.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def bench_command(
    spec: Path,
    strategies: str | None,
    baselines: str,
    budget: str,
    device: int,
    ncu: bool,
    old: Path | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Time SPEC's kernels against PyTorch, verified before and after, and save the record.

    All rows are timed in one process in interleaved rounds: with a flushed L2 and inputs in turn
    (cold), without (warm), and as CUDA graphs with a flushed L2 (graph), until each median is known
    to 0.5 % or the budget ends.
    """
    loaded = load_spec(spec)
    before = load_record(old) if old else None
    seconds = parse_seconds(budget)
    problem = why_no_device()
    if problem:
        raise UsageError(f"cannot benchmark: {problem}")
    path = output or default_output(loaded.name)
    check_writable(path)
    from kgen.bench.counters import why_no_ncu

    missing = why_no_ncu() if ncu else ""
    record = _run(
        spec.read_text("utf-8"), loaded, device, ncu and not missing,
        _names(strategies), _names(baselines) or (), seconds, missing,
    )  # fmt: skip
    changes, notes = compare(before, record) if before else ([], [])
    if as_json:
        found = record.model_dump(mode="json")
        found["compared"] = [vars(one) for one in changes]
        click.echo(json.dumps(found, indent=2))
    else:
        click.echo(text_table(record))
        for line in (*(one.sentence() for one in changes), *notes):
            click.echo(line)
    record.save(path)
    if not as_json:
        click.echo(f"saved {path}")
    failed = [f"{row.label}: {row.failed}" for row in record.rows if row.failed]
    slower = [one.sentence() for one in changes if one.verdict == "slower" and "kgen" in one.label]
    if failed or slower:
        raise CheckError("\n".join((*failed, *slower)))


def _names(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    return tuple(one.strip() for one in text.split(",") if one.strip() and one.strip() != "none")


def _run(
    text: str,
    spec: Spec,
    device: int,
    ncu: bool,
    strategies: tuple[str, ...] | None,
    baselines: tuple[str, ...],
    seconds: float,
    missing: str,
) -> Record:
    import torch

    from kgen.bench.context import Circumstances
    from kgen.bench.run import cuda_lab, run_bench

    if device >= torch.cuda.device_count():
        raise UsageError(f"--device {device}: there are {torch.cuda.device_count()} CUDA devices")
    command = ["kgen", *(shlex.quote(one) for one in sys.argv[1:])]
    circumstances = Circumstances(command, device)
    if missing:
        circumstances.warnings.append(f"no counters: {missing}")
    with progress_on_terminal(f"benchmarking {spec.name}") as detail:
        return run_bench(
            spec, text, cuda_lab(device), circumstances,
            strategies=strategies, baselines=baselines, seconds=seconds / 3, ncu=ncu,
            progress=detail,
        )  # fmt: skip
