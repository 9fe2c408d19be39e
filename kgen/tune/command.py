"""`kgen tune`: the command line of the tuner."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kgen.durations import parse_seconds
from kgen.errors import CheckError, UsageError
from kgen.spec import Spec, parse_spec
from kgen.yaml_source import parse_yaml, read_yaml

if TYPE_CHECKING:
    from kgen.tune.result import TuneResult
    from kgen.tune.run import Progress


def parse_devices(text: str | None) -> list[int] | None:
    """`0,1` as indices; None for all. Raises: UsageError that names the rule."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise UsageError(f"--devices {text!r}: expected numbers of GPUs, for instance 0 or 0,1")
    return [int(part) for part in parts]


def parse_names(option: str, texts: tuple[str, ...]) -> list[str] | None:
    """Names from repeated options and commas; None without options. Raises: UsageError."""
    if not texts:
        return None
    names = [part.strip() for text in texts for part in text.split(",") if part.strip()]
    if not names:
        raise UsageError(f"{option}: expected a name, or several with commas between them")
    return names


@click.command("tune")
@click.argument("spec", type=click.Path(path_type=Path))
@click.option("--budget", default="60s", show_default=True,
              help="Time to spend: 60s, 5m, 1h, or seconds.")  # fmt: skip
@click.option("--strategies", multiple=True,
              help="Strategies to try, e.g. single_pass,recompute. Default: all that "
              "fit.")  # fmt: skip
@click.option("--maths", multiple=True,
              help="Maths to try on tensor cores. Default: the spec's, else all that meet the "
              "tolerance.")  # fmt: skip
@click.option("--devices", help="GPUs to use, e.g. 0,1. Default: all visible.")
@click.option("--store", type=click.Path(path_type=Path),
              help="File of results. Default: in the cache folder.")  # fmt: skip
@click.option("--timeout", default="60s", show_default=True,
              help="After which a candidate counts as hanging, for each of its steps.")  # fmt: skip
@click.option("--seed", default=0, show_default=True, help="Of the search in a large space.")
@click.option("--write", is_flag=True, help="Put the winner into SPEC's schedule.")
@click.option("--simulate", is_flag=True, help="Rank by the cost model alone; needs no GPU.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def tune_command(
    spec: Path,
    budget: str,
    strategies: tuple[str, ...],
    maths: tuple[str, ...],
    devices: str | None,
    store: Path | None,
    timeout: str,
    seed: int,
    write: bool,
    simulate: bool,
    as_json: bool,
) -> None:
    """Find SPEC's fastest schedule: compile, verify and time what is legal and promising.

    Everything measured is kept; a rerun measures what is left. Exit code 1 if nothing was right.
    """
    seconds, limit = parse_seconds(budget), parse_seconds(timeout)
    indices = parse_devices(devices)
    names, given_maths = parse_names("--strategies", strategies), parse_names("--maths", maths)
    if simulate:
        given = (("--write", write), ("--devices", devices), ("--store", store))
        for option, on in given:
            if on:
                raise UsageError(f"{option} has no meaning with --simulate, which measures nothing")
    loaded, raw = read_spec(spec)
    from kgen.tune import simulate as rank
    from kgen.tune import tune as measure

    if simulate:
        _show(rank(loaded, strategies=names, maths=given_maths), as_json)
        return
    with progress_bar(loaded.name) as progress:
        result = measure(
            loaded,
            strategies=names,
            maths=given_maths,
            budget=seconds,
            devices=indices,
            store=store,
            limit=limit,
            seed=seed,
            progress=progress,
        )
    _show(result, as_json)
    if result.interrupted:
        raise click.Abort
    winner = result.winner
    if winner is None:
        raise CheckError(f"{spec}: no schedule was verified and timed")
    if write:
        _write(spec, raw, result, quiet=as_json)


def read_spec(path: Path) -> tuple[Spec, bytes]:
    """A spec and the very bytes that it was parsed from. Raises: SpecError, UsageError."""
    read_yaml(path)  # says what is wrong with the file
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    return parse_spec(parse_yaml(raw, str(path))), raw


def _write(path: Path, raw: bytes, result: TuneResult, quiet: bool) -> None:
    from kgen.tune.write_back import write_schedule

    winner = result.winner
    assert winner is not None
    if winner.is_default:
        said = f"{path}: unchanged, the default schedule won"
    else:
        write_schedule(path, winner.schedule, raw)
        said = f"{path}: schedule written; look over the comments in it, and run `kgen emit {path}`"
    if not quiet:
        click.echo(said)


def _show(result: TuneResult, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(result.to_json(), indent=2))
        return
    click.echo(result.table())


@contextmanager
def progress_bar(name: str) -> Iterator[Callable[[Progress], None]]:
    """A bar with the best time and the time left on stderr; nothing off a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[best]}, {task.fields[left]}"),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"tuning {name}", total=None, best="starting", left="")

        def show(progress: Progress) -> None:
            best = "none timed yet" if progress.best is None else f"best {progress.best:.4g} ms"
            bar.update(
                task,
                completed=progress.done,
                total=progress.total,
                best=best,
                left=f"{progress.seconds_left:.0f} s left",
            )

        yield show
