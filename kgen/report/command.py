"""The command `kgen report`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("report")
@click.argument("records", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("report.html"),
              show_default=True, help="The page.")  # fmt: skip
@click.option("--pictures", type=click.Path(path_type=Path),
              help="Folder for roofline and bars of each record, as SVG and PNG.")  # fmt: skip
def report_command(records: tuple[Path, ...], output: Path, pictures: Path | None) -> None:
    """Make one self-contained HTML page of RECORDS, JSON files that `kgen bench` saved."""
    from kgen.bench.record import load_record
    from kgen.report import write_pictures, write_report

    click.echo(f"{write_report(records, output)}: written")
    if pictures is not None:
        for path in records:
            for one in write_pictures(load_record(path), pictures):
                click.echo(f"{one}: written")
