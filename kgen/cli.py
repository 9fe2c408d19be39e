"""The command line. Results go to stdout, progress and one-line errors to stderr.

Exit codes: 0 right, 1 a check failed, 2 usage or bad spec, 3 build failed.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import click

from kgen.arch import ARCHS
from kgen.bench.command import bench_command
from kgen.build import build as build_package
from kgen.build import normalise_arch
from kgen.cache import cache_entries, is_stale, remove_entry
from kgen.compiler import CacheError, cache_dir
from kgen.constraints import check as check_spec
from kgen.constraints import name_problem
from kgen.emit import difference, render, render_template
from kgen.errors import CheckError, Issue, KgenError, SpecError, UsageError
from kgen.explain import as_text
from kgen.explain import explain as facts_of
from kgen.exporters.command import export_command
from kgen.importers.command import import_command
from kgen.plan import make_plan
from kgen.report.command import report_command
from kgen.spec import Spec, json_schema, load_spec
from kgen.steps import emit_step_by_step, progress_on_terminal
from kgen.tune.command import tune_command
from kgen.verify import verify as verify_source
from kgen.verify import why_no_simulator
from kgen.version import __version__

SPEC = click.Path(path_type=Path)
_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit with its code; a traceback is shown only with `--debug`."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    arguments = [one for one in arguments if one != "--debug"]  # legal anywhere
    try:
        cli.main(arguments, prog_name="kgen", standalone_mode=False)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.Abort:
        _fail("interrupted", 130)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        context = error.ctx if isinstance(error, click.UsageError) else None
        where = f" (see `{context.command_path} --help`)" if context else ""
        _fail(f"{error.format_message()}{where}", error.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except Exception as error:
        if debug:
            traceback.print_exc()
        if isinstance(error, KgenError):
            click.echo(str(error), err=True)  # file:line first, as editors want it
            sys.exit(error.exit_code)
        if isinstance(error, CacheError):
            click.echo(str(error), err=True)
            sys.exit(UsageError.exit_code)
        reason = (str(error).splitlines() or [""])[0]
        _fail(f"{type(error).__name__}: {reason} (--debug shows the traceback)", 3)
    sys.exit(0)


def _fail(message: str, code: int) -> NoReturn:
    click.echo(f"kgen: {message}", err=True)
    sys.exit(code)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kgen")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def cli(debug: bool) -> None:
    """Generate, compile and verify CUDA kernels for conv + pointwise chain + GroupNorm blocks."""


def _specs(paths: Sequence[Path]) -> list[tuple[Path, Spec]]:
    """Load every spec, or all of `specs/`. All issues of all files are raised as one error."""
    if not paths:
        paths = sorted(Path("specs").glob("*.yaml"))
        if not paths:
            raise UsageError("specs/: holds no *.yaml; name a spec file")
    loaded, problems = [], []
    for path in paths:
        try:
            loaded.append((path, load_spec(path)))
        except KgenError as error:
            problems.append(str(error))
    names: dict[str, Path] = {}
    for path, spec in loaded:
        if spec.name in names:
            issue = Issue("name", f"{spec.name} is also the name in {names[spec.name]}")
            problems.append(str(SpecError(str(path), [issue])))
        names.setdefault(spec.name, path)
    if problems:
        raise UsageError("\n".join(problems))
    return loaded


@cli.command()
@click.argument("specs", nargs=-1, type=SPEC)
@click.option("--output", type=click.Path(path_type=Path), default=Path("generated"),
              show_default=True, help="Folder that holds the packages.")  # fmt: skip
@click.option("--render-only", is_flag=True, help="Write the files; neither compile nor verify.")
@click.option("--no-verify", is_flag=True, help="Stop after compiling.")
@click.option("--check", is_flag=True, help="Write nothing; exit 1 with a diff if stale.")
@click.option("--stdout", "to_stdout", is_flag=True, help="Print kernel.cu of one spec instead.")
@click.option("--force", is_flag=True, help="Replace packages that were edited by hand.")
@_json_option
def emit(
    specs: tuple[Path, ...],
    output: Path,
    render_only: bool,
    no_verify: bool,
    check: bool,
    to_stdout: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Render, compile and verify each spec (default: all of specs/).

    A package is written only once it compiled for all its targets and passed verification where
    a device is there to verify on.
    """
    chosen = [option for option, on in (("--check", check), ("--stdout", to_stdout),
                                        ("--render-only", render_only),
                                        ("--no-verify", no_verify)) if on]  # fmt: skip
    if len(chosen) > 1:
        raise UsageError(f"{' and '.join(chosen)} exclude each other")
    if force and (check or to_stdout):
        raise UsageError(f"--force has no meaning with {chosen[0]}, which writes nothing")
    if as_json and to_stdout:
        raise UsageError("--json and --stdout exclude each other")
    loaded = _specs(specs)
    if to_stdout:
        if len(loaded) != 1:
            raise UsageError(f"--stdout prints one kernel, {len(loaded)} specs were given")
        click.echo(render(loaded[0][1])["kernel.cu"], nl=False)
        return
    if check:
        _check_stale(loaded, output, as_json)
        return
    results = []
    try:
        for path, spec in loaded:
            results.append(
                emit_step_by_step(path, spec, output, render_only, no_verify, force, as_json)
            )
    finally:  # what was written before a spec failed is told too
        if as_json:
            click.echo(json.dumps(results, indent=2))


def _check_stale(loaded: list[tuple[Path, Spec]], output: Path, as_json: bool) -> None:
    stale, diffs = [], {}
    for path, spec in loaded:
        diff = difference(output / spec.name, render(spec))
        if diff:
            diffs[spec.name] = diff
            stale.append(f"{output / spec.name}: stale; run `kgen emit {path}`")
    if as_json:
        click.echo(json.dumps([{"name": spec.name, "diff": diffs.get(spec.name, "")}
                               for _, spec in loaded], indent=2))  # fmt: skip
    else:
        click.echo("".join(diffs.values()), nl=False)
    if stale:
        raise CheckError("\n".join(stale))
    if not as_json:
        click.echo(f"{len(loaded)} up to date in {output}")


@cli.command()
@click.argument("specs", nargs=-1, type=SPEC)
@_json_option
def validate(specs: tuple[Path, ...], as_json: bool) -> None:
    """Check specs and print every issue (default: all of specs/)."""
    loaded = _specs(specs)
    if as_json:
        click.echo(json.dumps([{"spec": str(path), "spec_hash": spec.hash(), **spec.canonical()}
                               for path, spec in loaded], indent=2))  # fmt: skip
        return
    for path, spec in loaded:
        click.echo(f"{path}: ok, {spec.name} {spec.hash()}")


@cli.command()
def schema() -> None:
    """Print the JSON Schema of a spec, for editors."""
    click.echo(json.dumps(json_schema(), indent=2))


@cli.command()
@click.argument("spec", type=SPEC)
@click.option("--arch", "archs", multiple=True, help="Target, e.g. 90a; repeat for several. "
              "Default: the spec's targets.")  # fmt: skip
@click.option("--output", type=click.Path(path_type=Path), default=Path("generated"),
              show_default=True, help="Folder that holds the package.")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace a package that was edited by hand.")
def build(spec: Path, archs: tuple[str, ...], output: Path, force: bool) -> None:
    """Emit SPEC with cubins beside it: such a package needs no compiler where it runs."""
    ((_, loaded),) = _specs([spec])
    given = [part for text in archs for part in text.split(",")]
    targets = [normalise_arch(one) for one in given] or list(loaded.targets)
    with progress_on_terminal(f"building {loaded.name} for {', '.join(targets)}"):
        folder = build_package(loaded, targets, output, force=force)
    record = json.loads((folder / "build.json").read_text("utf-8"))
    for target in targets:
        built = record["builds"][target]
        click.echo(f"{folder / built['file']}: {built['bytes']:,} bytes, NVRTC {built['nvrtc']}")


@cli.command()
@click.argument("source", type=SPEC)
@click.option("--device", type=click.Choice(["cuda", "simulator"]), default="cuda",
              show_default=True, help="Where the kernels run.")  # fmt: skip
@click.option("--full", is_flag=True, help="Simulator: the full size, not a reduced copy.")
@click.option("--trace", metavar="BLOCK:THREAD", help="Simulator: print one thread's instructions.")
@_json_option
def verify(source: Path, device: str, full: bool, trace: str | None, as_json: bool) -> None:
    """Verify SOURCE, a spec file or an emitted package's folder, against the fp64 oracle."""
    if not source.is_dir():
        _specs([source])
    which = _block_and_thread(trace) if trace is not None else None
    with progress_on_terminal(f"verifying {source}") as detail:
        report = verify_source(source, device=device, full=full, trace=which, progress=detail)
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
    else:
        for line in report.trace:
            click.echo(line)
        click.echo(report.table())
    if not report.passed:
        raise CheckError(report.summary())


def _block_and_thread(text: str) -> tuple[int, int]:
    parts = text.split(":")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        raise UsageError(f"--trace {text!r}: expected BLOCK:THREAD, for instance 0:5")
    return int(parts[0]), int(parts[1])


@cli.command()
@click.argument("spec", type=SPEC)
@click.option("--arch", help="GPU generation to plan for; default: the spec's first target.")
@click.option("--simulate", is_flag=True, help="Run a reduced copy on the simulator and count "
              "instructions, bytes, sectors and bank conflicts.")  # fmt: skip
@_json_option
def explain(spec: Path, arch: str | None, simulate: bool, as_json: bool) -> None:
    """Print what the plan decided for SPEC, and why."""
    ((path, loaded),) = _specs([spec])
    if arch is not None:
        target = normalise_arch(arch)
        loaded = loaded.model_copy(update={"targets": (target,)})
        issues = check_spec(loaded)
        if issues:
            raise SpecError(f"{path} for {target}", issues)
    facts = facts_of(loaded, make_plan(loaded, ARCHS[loaded.targets[0]]))
    if simulate:
        problem = why_no_simulator()
        if problem:
            raise UsageError(f"cannot simulate: {problem}")
        from kgen.simulator.measure import measure

        with progress_on_terminal(f"simulating {loaded.name}"):
            facts["simulated"] = measure(loaded)
    click.echo(json.dumps(facts, indent=2) if as_json else as_text(facts))


@cli.command()
@click.argument("name")
@click.option("--output", type=click.Path(path_type=Path),
              help="File to write; default: NAME.yaml.")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace an existing file.")
def new(name: str, output: Path | None, force: bool) -> None:
    """Write a commented spec called NAME to start from."""
    problem = name_problem(name)
    if problem:
        raise UsageError(f"name {name[:40]!r} {problem}")
    path = output or Path(f"{name}.yaml")
    if path.exists() and not force:
        raise UsageError(f"{path}: exists; --force replaces it")
    text = render_template("spec.yaml.j2", name=name)
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None
    click.echo(f"{path}: written; next: kgen emit {path}")


@cli.group()
def cache() -> None:
    """Look at the cache of compiled kernels and loaded packages, or shrink it."""


@cache.command("ls")
@_json_option
def cache_ls(as_json: bool) -> None:
    """List the entries, least recently used first."""
    root = cache_dir()
    entries = sorted(cache_entries(root), key=lambda entry: (entry.used, entry.key))
    if as_json:
        click.echo(json.dumps([{**vars(one), "path": str(one.path)} for one in entries], indent=2))
        return
    for one in entries:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(one.used))
        state = (", ".join(one.kernels) or one.kind) if one.intact else "damaged"
        click.echo(f"{one.key[:16]}  {one.arch:8} {one.size:>9,} bytes  {used}  {state}")
    click.echo(f"{len(entries)} entries, {sum(one.size for one in entries):,} bytes in {root}")


@cache.command("gc")
@click.option("--days", type=click.FloatRange(min=0), default=30.0, show_default=True,
              help="Remove what was not used for this long.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Say what would go; remove nothing.")
def cache_gc(days: float, dry_run: bool) -> None:
    """Remove what was not used lately, damaged entries, and what killed processes left."""
    root, now = cache_dir(), time.time()
    old = [one for one in cache_entries(root) if is_stale(one, days, now)]
    for one in old:
        if not dry_run:
            remove_entry(one.path)
    verb = "would remove" if dry_run else "removed"
    click.echo(f"{verb} {len(old)} entries, {sum(one.size for one in old):,} bytes from {root}")


for one in (bench_command, export_command, import_command, report_command, tune_command):
    cli.add_command(one)


if __name__ == "__main__":
    main()
