"""`kgen import`: the command line of the importers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kgen.errors import CheckError, UsageError
from kgen.files import write_whole
from kgen.importers.naming import cleaned, snake
from kgen.importers.source import load_model, parse_init, parse_shape, split_source

if TYPE_CHECKING:
    from kgen.importers.report import ImportReport


@click.command("import")
@click.argument("model", required=False)
@click.option("--input", "inputs", multiple=True, metavar="SIZES",
              help="Shape of the model's input, e.g. 128,8,256,256; repeat it for "
              "several.")  # fmt: skip
@click.option("--init", metavar="JSON",
              help="Arguments of the class: a JSON list, or an object for keywords.")  # fmt: skip
@click.option("--kernelbench", type=click.Path(path_type=Path), metavar="FILE",
              help="A KernelBench problem instead of MODEL.")  # fmt: skip
@click.option("--name", help="What the specs' names begin with. Default: of the class or file.")
@click.option("--output", type=click.Path(path_type=Path), default=Path("specs"),
              show_default=True, help="Folder for the specs.")  # fmt: skip
@click.option("--dynamic-batch", is_flag=True, help="Specs for any number of samples.")
@click.option("--target", "targets", multiple=True,
              help="GPU generation of the specs, e.g. sm_90a; repeat it for several.")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace specs that are there.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def import_command(
    model: str | None,
    inputs: tuple[str, ...],
    init: str | None,
    kernelbench: Path | None,
    name: str | None,
    output: Path,
    dynamic_batch: bool,
    targets: tuple[str, ...],
    force: bool,
    as_json: bool,
) -> None:
    """Write a spec for each conv -> chain -> GroupNorm block of MODEL, given as model.py:ClassName.

    This EXECUTES code: all of model.py and the class's constructor; of a KernelBench problem only
    what Model, get_inputs() and get_init_inputs() need. The forward runs on fake tensors, which
    hold sizes and no data. Import no file that you would not run.

    Says of each convolution that is in no block which rule keeps it out. Exit code 1 if there is
    no block.
    """
    if (model is None) == (kernelbench is None):
        raise UsageError("give either MODEL, as model.py:ClassName, or --kernelbench FILE")
    if name is not None and not cleaned(name):
        raise UsageError(f"--name {name[:40]!r}: must hold a letter")
    if kernelbench is not None:
        for option, given in (("--input", inputs), ("--init", init)):
            if given:
                raise UsageError(
                    f"{option} has no meaning with --kernelbench: the file has its own"
                )
        path, label = kernelbench, str(kernelbench)
        prefix = name or snake(cleaned(path.stem)) or "problem"
    else:
        assert model is not None
        path, class_name = split_source(model)
        label, prefix = model, name or snake(class_name)
        if not inputs:
            raise UsageError("--input is missing: the shape of the model's input")
    shapes = [parse_shape(text) for text in inputs]
    args, kwargs = parse_init(init)
    from kgen.importers import import_module, need_torch

    need_torch("kgen import")
    import torch

    def announce() -> None:
        click.echo(f"kgen: executing code of {path}", err=True)

    example: Any
    if kernelbench is not None:
        from kgen.importers.kernelbench import load_problem

        module, example = load_problem(path, announce)
    else:
        module = load_model(path, class_name, args, kwargs, announce)
        example = tuple(torch.empty(shape, device="meta") for shape in shapes)
    from kgen.importers.user_code import running

    with running(path):
        report = import_module(
            module,
            example,
            name=prefix,
            dynamic_batch=dynamic_batch,
            targets=[part for text in targets for part in text.split(",")] or None,
        )
    files = _write(report, label, output, force)
    _show(report, files, label, as_json)
    if not report.blocks:
        raise CheckError(f"{label}: no block of conv -> chain -> GroupNorm was matched")


def _write(report: ImportReport, label: str, output: Path, force: bool) -> dict[str, Path]:
    """Write the specs, all of them or none where one would be replaced; name -> file."""
    from kgen.importers.spec_text import spec_text

    texts = {}
    for spec in report.specs:
        blocks = [one for one in report.blocks if one.spec == spec]
        texts[spec.name] = spec_text(spec, blocks, label).encode()
    files = {name: output / f"{name}.yaml" for name in texts}
    for name, file in files.items():
        if file.exists() and not force and not _holds(file, texts[name]):
            raise UsageError(f"{file}: exists and differs; --force replaces it")
    for name, file in files.items():
        write_whole(file, texts[name])
    return files


def _holds(file: Path, content: bytes) -> bool:
    try:
        return file.read_bytes() == content
    except OSError:
        return False


def _show(report: ImportReport, files: dict[str, Path], label: str, as_json: bool) -> None:
    if as_json:
        content = report.to_json()
        content["model"] = label
        for block in content["blocks"]:
            block["file"] = str(files[block["name"]])
        click.echo(json.dumps(content, indent=2))
        return
    for one in report.blocks:
        click.echo(one.line(str(files[one.spec.name])))
    for missed in report.unmatched:
        click.echo(missed.line())
    if not report.blocks and not report.unmatched:
        click.echo(f"{label}: holds no convolution")
