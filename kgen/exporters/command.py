"""`kgen export`: the command line of the exporters."""

from __future__ import annotations

from pathlib import Path

import click

from kgen.errors import CheckError, UsageError
from kgen.spec import Spec, load_spec


@click.command("export")
@click.argument("spec", type=click.Path(path_type=Path))
@click.option("--format", "form", type=click.Choice(["kernelbench", "package"]), required=True,
              help="kernelbench: one Python file. package: a pip-installable folder with "
              "cubins.")  # fmt: skip
@click.option("--output", type=click.Path(path_type=Path),
              help="File or folder to write; `-` prints a file. Default: NAME_kernelbench.py, "
              "NAME_package.")  # fmt: skip
@click.option("--arch", "archs", multiple=True, help="Package: target of a cubin, e.g. 90a; repeat "
              "for several. Default: the spec's targets.")  # fmt: skip
@click.option("--package-version", help="Package: its version. Default: kgen's, with the spec's "
              "hash.")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace files that differ.")
@click.option("--check", is_flag=True, help="Write nothing; exit 1 if an export is stale.")
def export_command(
    spec: Path,
    form: str,
    output: Path | None,
    archs: tuple[str, ...],
    package_version: str | None,
    force: bool,
    check: bool,
) -> None:
    """Write SPEC's block in a form that another project takes."""
    if check and force:
        raise UsageError("--check writes nothing, --force replaces; give one of them")
    if check and output == Path("-"):
        raise UsageError("--check compares with files, --output - prints one; give one of them")
    loaded = load_spec(spec)
    if form == "kernelbench":
        for option, given in (("--arch", archs), ("--package-version", package_version)):
            if given:
                raise UsageError(f"{option} has no meaning with --format kernelbench")
        _kernelbench(loaded, output, force, check)
    else:
        _package(loaded, output, archs, package_version, force, check)


def _told(path: Path, stale: list[str]) -> None:
    """Say what `--check` found. Raises: CheckError if anything is stale."""
    if stale:
        raise CheckError(
            f"{path}: stale: {', '.join(stale)}; export again with --force"
            if path.exists()
            else f"{path}: is not there; export it"
        )
    click.echo(f"{path}: up to date")


def _kernelbench(spec: Spec, output: Path | None, force: bool, check: bool) -> None:
    from kgen.exporters.kernelbench import kernelbench_source
    from kgen.exporters.writing import stale_file, write_file

    text = kernelbench_source(spec)
    if output == Path("-"):
        click.echo(text, nl=False)
        return
    path = output or Path(f"{spec.name}_kernelbench.py")
    if check:
        _told(path, [path.name] if stale_file(path, text.encode()) else [])
        return
    changed = write_file(path, text.encode(), force=force)
    click.echo(f"{path}: {'written' if changed else 'up to date'}")


def _package(
    spec: Spec,
    output: Path | None,
    archs: tuple[str, ...],
    version: str | None,
    force: bool,
    check: bool,
) -> None:
    from kgen.build import normalise_arch
    from kgen.exporters.wheel import package_files
    from kgen.exporters.writing import stale_files, write_folder
    from kgen.steps import progress_on_terminal

    if output == Path("-"):
        raise UsageError("--output -: a package is a folder and cannot be printed")
    folder = output or Path(f"{spec.name}_package")
    given = [part for text in archs for part in text.split(",")]
    targets = list(dict.fromkeys(normalise_arch(one) for one in given)) or list(spec.targets)
    with progress_on_terminal(f"building {spec.name} for {', '.join(targets)}"):
        files = package_files(spec, targets, version)
    if check:
        _told(folder, stale_files(folder, files))
        return
    changed = write_folder(folder, files, force=force)
    if not changed:
        click.echo(f"{folder}: up to date")
        return
    for name, content in files.items():
        if name.endswith(".cubin"):
            click.echo(f"{folder / name}: {len(content):,} bytes")
    click.echo(f"{folder}: written; next: pip install {folder}")
