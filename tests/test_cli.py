"""The command line as a user meets it: exit codes, streams, and what is left behind."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from helpers import ROOT, SPECS, TEXT, edited, python, spec_of

import kgen
from kgen.cli import cli, main
from kgen.emit import environment, render
from kgen.errors import BuildError
from kgen.spec import load_spec
from kgen.verdict import CaseResult, Report

PACKAGE_FILES = {
    "__init__.py", "_calls.py", "_compiler.py", "_launching.py", "_op.py", "_runtime.py",
    "kernel.cu", "manifest.json",
}  # fmt: skip


@pytest.fixture
def work(tmp_path, monkeypatch):
    """An own working folder with one legal spec, demo.yaml."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "demo.yaml").write_text(TEXT)
    monkeypatch.chdir(folder)
    return folder


class Result:
    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def kgen_command(capsys):
    """A function that runs `kgen ARGUMENTS` in this process."""

    def run(*arguments) -> Result:
        with pytest.raises(SystemExit) as stop:
            main([str(one) for one in arguments])
        captured = capsys.readouterr()
        return Result(stop.value.code or 0, captured.out, captured.err)

    return run


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def assert_one_line(result: Result, code: int, *parts: str) -> None:
    """A refusal: its code, one line on stderr, no traceback, nothing on stdout."""
    assert result.code == code, result.err
    assert "Traceback" not in result.err
    assert len(result.err.splitlines()) == 1, result.err
    for part in parts:
        assert part in result.err
    assert result.out == ""


# ---- D28: files that are no spec -------------------------------------------------------------


COMMANDS = ("emit", "validate", "explain", "build", "verify")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_missing_file_is_named(work, kgen_command, command):
    assert_one_line(kgen_command(command, "missing.yaml"), 2, "missing.yaml: no such file")


@pytest.mark.parametrize("command", ["emit", "validate", "explain", "build"])
def test_a_folder_is_named(work, kgen_command, command):
    assert_one_line(kgen_command(command, "."), 2, ".: is a folder, expected a spec file")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"version: 1\nname: caf\xe9\n", "bad.yaml:2: is not UTF-8 text"),
        (b"", "bad.yaml: is empty"),
        (b"a: [1, 2\n", "bad.yaml:2: not valid YAML"),
        (b"- a\n", "bad.yaml:1: is not a mapping"),
    ],
    ids=["not UTF-8", "empty", "bad YAML", "a list"],
)
def test_a_file_that_is_no_spec_is_named_with_its_line(
    work, kgen_command, command, content, reason
):
    (work / "bad.yaml").write_bytes(content)
    before = files_below(work)
    result = kgen_command(command, "bad.yaml")
    assert result.code == 2
    assert result.err.startswith(reason)
    assert "Traceback" not in result.err
    assert len(result.err.splitlines()) <= 2  # and its hint
    assert files_below(work) == before


def test_a_wrong_spec_is_refused_with_every_issue(work, kgen_command):
    (work / "bad.yaml").write_text(edited("num_groups: 4", "num_groups: 5") + "extra: 1\n")
    result = kgen_command("emit", "bad.yaml")
    assert result.code == 2
    assert "bad.yaml:14: chain[3].group_norm.num_groups" in result.err
    assert "bad.yaml:18: extra: unknown key extra" in result.err
    assert files_below(work) == {"demo.yaml", "bad.yaml"}


@pytest.mark.parametrize("name", ["../../x", "../escaped", "/tmp/escaped", "a/b", "k*/", "$(id)"])
def test_a_name_cannot_lead_outside_the_output(work, kgen_command, name):
    (work / "bad.yaml").write_text(edited("name: demo", f"name: '{name}'"))
    before = files_below(work.parent)
    result = kgen_command("emit", "--render-only", "--force", "bad.yaml")
    assert result.code == 2
    assert "bad.yaml:2: name: " in result.err
    assert kgen_command("new", name).code == 2
    assert files_below(work.parent) == before


def test_two_specs_one_bad_write_nothing(work, kgen_command):
    (work / "bad.yaml").write_text(edited("num_groups: 4", "num_groups: 5", TEXT))
    for order in (("demo.yaml", "bad.yaml"), ("bad.yaml", "demo.yaml")):
        result = kgen_command("emit", "--render-only", *order)
        assert result.code == 2
        assert "bad.yaml:14" in result.err
        assert "demo.yaml" not in result.err
        assert files_below(work) == {"demo.yaml", "bad.yaml"}


def test_the_issues_of_all_files_are_shown(work, kgen_command):
    for name in ("a.yaml", "b.yaml"):
        (work / name).write_text(edited("num_groups: 4", "num_groups: 5"))
    result = kgen_command("validate", "a.yaml", "missing.yaml", "b.yaml")
    assert result.code == 2
    for part in ("a.yaml:14", "missing.yaml: no such file", "b.yaml:14"):
        assert part in result.err


def test_two_specs_of_one_name_are_refused(work, kgen_command):
    (work / "other.yaml").write_text(TEXT)
    assert_one_line(
        kgen_command("emit", "demo.yaml", "other.yaml"),
        2,
        "other.yaml: name: demo is also the name in demo.yaml",
    )
    assert not (work / "generated").exists()


# ---- D28: failures of later steps ------------------------------------------------------------


def break_template(monkeypatch, folder: Path, old: str, new: str) -> None:
    """Change two_kernel.cu.j2 for this test."""
    import jinja2

    source = (ROOT / "kgen" / "templates" / "two_kernel.cu.j2").read_text("utf-8")
    assert old in source
    (folder / "two_kernel.cu.j2").write_text(source.replace(old, new, 1))
    loader = jinja2.ChoiceLoader([jinja2.FileSystemLoader(folder), environment().loader])
    monkeypatch.setattr(environment(), "loader", loader)
    monkeypatch.setattr(environment(), "cache", None)


@pytest.mark.nvrtc
@pytest.mark.parametrize("command", [("emit", "--no-verify"), ("build",)], ids=lambda one: one[0])
def test_a_failing_compile_is_code_3_and_writes_nothing(
    work, kgen_command, monkeypatch, tmp_path, command
):
    break_template(monkeypatch, tmp_path, "constexpr int kTileH", "constexpr imt kTileH")
    result = kgen_command(*command, "demo.yaml")
    assert result.code == 3
    assert re.search(r"^sm_90a, NVRTC [\d.]+: kernel\.cu:\d+: .*imt", result.err)
    assert re.search(r"> +\d+ \| constexpr imt kTileH", result.err)
    assert "Traceback" not in result.err
    assert files_below(work) == {"demo.yaml"}


def test_a_failing_template_is_code_3_and_writes_nothing(work, kgen_command, monkeypatch, tmp_path):
    break_template(monkeypatch, tmp_path, "plan.tile.tile_h", "plan.tile.tile_height")
    result = kgen_command("emit", "--render-only", "demo.yaml")
    assert result.code == 3
    assert re.search(r"^template two_kernel\.cu\.j2:\d+: .*tile_height", result.err)
    assert len(result.err.splitlines()) == 1
    assert files_below(work) == {"demo.yaml"}


def pretend_device(monkeypatch, passed: bool):
    """A device on which verification ends as given."""
    reason = "" if passed else "7 elements are off by more than 0.0001"
    case = CaseResult("uniform", 0, 2, passed, reason, 1.0, 0.1, 1e-6, 1e-7)
    report = Report("demo", "hash", "two_kernel", "a device", 1e-4, 1e-4, (case,))
    asked = []

    def verify(source, **_):
        asked.append(source)
        return report

    monkeypatch.setattr(sys.modules["kgen.steps"], "why_no_device", lambda: "")
    monkeypatch.setattr(sys.modules["kgen.steps"], "verify", verify)
    monkeypatch.setattr(sys.modules["kgen.cli"], "verify_source", verify)
    return asked


@pytest.mark.nvrtc
def test_a_failing_verification_is_code_1_and_writes_nothing(work, kgen_command, monkeypatch):
    asked = pretend_device(monkeypatch, passed=False)
    result = kgen_command("emit", "demo.yaml")
    assert result.code == 1
    assert result.err.endswith(
        "demo: wrong on uniform, seed 0: 7 elements are off by more than 0.0001\n"
    )
    assert len(asked) == 1
    assert files_below(work) == {"demo.yaml"}


@pytest.mark.nvrtc
def test_a_passing_verification_is_told_and_written(work, kgen_command, monkeypatch):
    asked = pretend_device(monkeypatch, passed=True)
    result = kgen_command("emit", "demo.yaml")
    assert result.code == 0, result.err
    assert "1 of 1 cases passed on a device" in result.out
    assert len(asked) == 1
    assert {Path(one).name for one in files_below(work / "generated")} == PACKAGE_FILES


@pytest.mark.parametrize(("passed", "code"), [(True, 0), (False, 1)])
def test_verify_s_code_is_its_verdict(work, kgen_command, monkeypatch, passed, code):
    pretend_device(monkeypatch, passed)
    result = kgen_command("verify", "demo.yaml")
    assert result.code == code
    assert "uniform" in result.out
    assert ("WRONG" in result.out) == (not passed)
    result = kgen_command("verify", "demo.yaml", "--json")
    assert result.code == code
    assert json.loads(result.out)["passed"] is passed


def test_verify_without_a_device_says_so(work, kgen_command):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("a CUDA device is there")
    assert_one_line(kgen_command("verify", "demo.yaml"), 2, "cannot verify: no CUDA device")


@pytest.mark.parametrize("command", ["emit", "new"])
def test_an_output_that_cannot_be_written_is_one_line(work, kgen_command, command):
    (work / "file").write_text("")
    if command == "emit":
        result = kgen_command("emit", "--render-only", "demo.yaml", "--output", "file/below")
        assert result.out.startswith("demo.yaml: demo ")
        result.out = ""
    else:
        result = kgen_command("new", "block", "--output", "file/block.yaml")
    assert_one_line(result, 2, "file", "cannot be written")
    assert files_below(work) == {"demo.yaml", "file"}


def test_a_read_only_folder_is_one_line(work, kgen_command, monkeypatch):
    def refuse(*_, **options):
        raise PermissionError(13, "Permission denied", str(options.get("dir")))

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    result = kgen_command("emit", "--render-only", "demo.yaml")
    result.out = ""
    assert_one_line(result, 2, "generated: cannot be written: Permission denied")
    assert files_below(work) == {"demo.yaml"}


@pytest.mark.nvrtc
def test_an_unusable_cache_is_a_usage_error(work, kgen_command, monkeypatch):
    monkeypatch.setenv("KGEN_CACHE_DIR", str(work / "demo.yaml"))
    for arguments in (
        ("emit", "demo.yaml"),
        ("build", "demo.yaml"),
        ("cache", "ls"),
        ("cache", "gc"),
    ):
        result = kgen_command(*arguments)
        result.out = ""
        assert_one_line(result, 2, str(work / "demo.yaml"), "KGEN_CACHE_DIR")
    assert files_below(work) == {"demo.yaml"}


# ---- Usage -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("emitt",), "No such command"),
        (("emit", "--outptu", "x"), "No such option"),
        (("explain",), "Missing argument"),
        (("new",), "Missing argument"),
        (("verify", "demo.yaml", "--device", "tpu"), "Invalid value"),
        (("cache", "gc", "--days", "-1"), "Invalid value"),
        (("emit", "--check", "--stdout", "demo.yaml"), "exclude each other"),
        (("emit", "--check", "--render-only", "demo.yaml"), "exclude each other"),
        (("emit", "--stdout", "--render-only", "demo.yaml"), "exclude each other"),
        (("emit", "--stdout", "--json", "demo.yaml"), "exclude each other"),
        (("emit", "--check", "--force", "demo.yaml"), "no meaning"),
        (("build", "demo.yaml", "--arch", "70"), "unknown architecture '70'"),
        (("explain", "demo.yaml", "--arch", "hopper"), "unknown architecture 'hopper'"),
        (("new", "3x3"), "must be letters, digits and underscores"),
        (("emit",), "specs/: holds no *.yaml"),
        (("validate",), "specs/: holds no *.yaml"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_usage_is_one_line(work, kgen_command, arguments, part):
    assert_one_line(kgen_command(*arguments), 2, part)
    assert files_below(work) == {"demo.yaml"}


def test_stdout_prints_one_kernel_only(work, kgen_command):
    (work / "other.yaml").write_text(edited("name: demo", "name: other"))
    assert_one_line(kgen_command("emit", "--stdout", "demo.yaml", "other.yaml"), 2, "2 specs")


def test_without_arguments_the_help_is_shown():
    done = python(str(ROOT / "cli.py"))
    assert done.returncode == 2
    assert "emit" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_help_and_version_are_code_0(kgen_command):
    for arguments in (("--help",), ("emit", "--help"), ("-h",), ("cache", "ls", "--help")):
        result = kgen_command(*arguments)
        assert result.code == 0
        assert result.out.startswith("Usage: kgen")
    assert kgen.__version__ in kgen_command("--version").out


def test_every_command_has_a_help_text():
    for name, command in cli.commands.items():
        assert command.help, name


# ---- Tracebacks ------------------------------------------------------------------------------


@pytest.mark.parametrize("position", ["before", "after"])
def test_debug_shows_the_traceback(work, position):
    flags = ["--debug"]
    arguments = ["emit", "missing.yaml"]
    arguments = flags + arguments if position == "before" else arguments + flags
    done = python(str(ROOT / "cli.py"), *arguments, cwd=work)
    assert done.returncode == 2
    assert "Traceback" in done.stderr
    assert "missing.yaml: no such file" in done.stderr
    quiet = python(str(ROOT / "cli.py"), "emit", "missing.yaml", cwd=work)
    assert quiet.returncode == 2
    assert quiet.stderr == "missing.yaml: no such file\n"


def test_a_bug_in_kgen_is_one_line_and_code_3(work, kgen_command, monkeypatch):
    def crash(*_, **__):
        raise ZeroDivisionError("division by zero\nand more")

    monkeypatch.setattr(sys.modules["kgen.steps"], "render", crash)
    result = kgen_command("emit", "--render-only", "demo.yaml")
    result.out = ""
    assert_one_line(result, 3, "ZeroDivisionError: division by zero", "--debug")
    result = kgen_command("--debug", "emit", "--render-only", "demo.yaml")
    assert result.code == 3
    assert "Traceback" in result.err


def test_an_interrupt_is_one_line(work, kgen_command, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["kgen.steps"], "render", interrupt)
    result = kgen_command("emit", "--render-only", "demo.yaml")
    assert result.code == 130
    assert result.err.strip().endswith("kgen: interrupted")


def test_a_closed_pipe_is_no_traceback(work):
    command = [sys.executable, str(ROOT / "cli.py"), "emit", "--stdout", "demo.yaml"]
    shell = subprocess.run(
        ["sh", "-c", 'PY="$1"; shift; "$PY" "$@" | head -n 1', "sh", *command],
        cwd=work, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert shell.stdout.startswith("// Generated by kgen")
    assert "Traceback" not in shell.stderr
    assert "Exception ignored" not in shell.stderr


# ---- emit ------------------------------------------------------------------------------------


@pytest.mark.nvrtc
def test_emit_compiles_simulates_without_a_gpu_and_writes(work):
    done = python(str(ROOT / "cli.py"), "emit", "demo.yaml", cwd=work, CUDA_VISIBLE_DEVICES="-1")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.startswith(f"demo.yaml: demo {spec_of().hash()}\n")
    for pattern in (
        r"^  render   \d+ lines of CUDA, \d+ ms$",
        r"^  compile  sm_90a: [\d.]+ s \((cached|NVRTC [\d.]+)\), [\d,]+ bytes$",
        r"^           demo_conv: \d+ registers, no spills$",
        r"^  simulate 8 of 8 cases passed on simulator \(sm_90a\), x \[\d+, \d+, \d+, \d+\]",
        r"^  write    generated/demo \(written\)$",
    ):
        assert re.search(pattern, done.stdout, re.MULTILINE), (pattern, done.stdout)
    assert {path.name for path in (work / "generated" / "demo").iterdir()} == PACKAGE_FILES


@pytest.mark.nvrtc
def test_no_verify_stops_after_compiling(work, kgen_command):
    result = kgen_command("emit", "--no-verify", "demo.yaml")
    assert result.code == 0
    assert "registers" in result.out
    assert "verify   skipped: --no-verify" in result.out
    assert (work / "generated" / "demo" / "kernel.cu").is_file()


def test_render_only_neither_compiles_nor_verifies(work, kgen_command, monkeypatch):
    def fail(*_, **__):
        raise AssertionError("compiled or verified")

    for name in ("compile_kernel", "verify"):
        monkeypatch.setattr(sys.modules["kgen.steps"], name, fail)
    result = kgen_command("emit", "--render-only", "demo.yaml")
    assert result.code == 0
    assert "compile  skipped: --render-only" in result.out
    assert "verify   skipped: --render-only" in result.out
    assert (work / "generated" / "demo" / "kernel.cu").read_text() == (
        render(spec_of())["kernel.cu"]
    )
    assert kgen_command("emit", "--render-only", "demo.yaml").out.endswith("(unchanged)\n")


def test_without_a_compiler_emit_says_so_and_still_writes(work, kgen_command, monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    result = kgen_command("emit", "demo.yaml")
    assert result.code == 0
    assert re.search(r"compile  skipped: no CUDA compiler.*kgen\[cuda\]", result.out)
    assert (work / "generated" / "demo" / "kernel.cu").is_file()
    assert kgen_command("build", "demo.yaml").code == 3


def test_stdout_prints_the_kernel_and_writes_nothing(work, kgen_command):
    result = kgen_command("emit", "--stdout", "demo.yaml")
    assert result.code == 0
    assert result.out == render(spec_of())["kernel.cu"]
    assert files_below(work) == {"demo.yaml"}


def test_check_tells_what_is_stale(work, kgen_command):
    result = kgen_command("emit", "--check", "demo.yaml")
    assert result.code == 1
    assert "generated/demo: stale; run `kgen emit demo.yaml`" in result.err
    assert files_below(work) == {"demo.yaml"}
    kgen_command("emit", "--render-only", "demo.yaml")
    result = kgen_command("emit", "--check", "demo.yaml")
    assert (result.code, result.out) == (0, "1 up to date in generated\n")
    (work / "demo.yaml").write_text(edited("height: 19", "height: 20"))
    before = (work / "generated" / "demo" / "kernel.cu").read_text()
    result = kgen_command("emit", "--check", "demo.yaml")
    assert result.code == 1
    assert "-constexpr int kC_out = 12, kP = 17" in result.out
    assert "+constexpr int kC_out = 12, kP = 18" in result.out
    assert (work / "generated" / "demo" / "kernel.cu").read_text() == before
    facts = json.loads(kgen_command("emit", "--check", "--json", "demo.yaml").out)
    assert [(one["name"], bool(one["diff"])) for one in facts] == [("demo", True)]


def test_force_replaces_what_was_edited(work, kgen_command):
    kgen_command("emit", "--render-only", "demo.yaml")
    kernel = work / "generated" / "demo" / "kernel.cu"
    kernel.write_text("// mine\n")
    result = kgen_command("emit", "--render-only", "demo.yaml")
    assert result.code == 2
    assert "kernel.cu was edited since it was emitted; --force replaces it" in result.err
    assert kernel.read_text() == "// mine\n"
    assert kgen_command("emit", "--render-only", "--force", "demo.yaml").code == 0
    assert kernel.read_text() == render(spec_of())["kernel.cu"]


def test_emit_takes_every_spec_of_the_folder_by_default(work, kgen_command):
    (work / "specs").mkdir()
    for name in ("a", "b"):
        (work / "specs" / f"{name}.yaml").write_text(edited("name: demo", f"name: {name}"))
    assert kgen_command("emit", "--render-only").code == 0
    assert {path.name for path in (work / "generated").iterdir()} == {"a", "b"}
    assert kgen_command("emit", "--check").out == "2 up to date in generated\n"
    assert kgen_command("validate").out.count(": ok, ") == 2


@pytest.mark.nvrtc
def test_json_is_the_only_thing_on_stdout(work, kgen_command):
    (facts,) = json.loads(kgen_command("emit", "--no-verify", "--json", "demo.yaml").out)
    assert facts["name"] == "demo"
    assert facts["written"] is True
    assert facts["skipped"] == {"verify": "--no-verify"}
    assert facts["builds"][0]["arch"] == "sm_90a"
    assert facts["builds"][0]["kernels"][0]["registers"] > 0


def test_emit_works_from_an_empty_folder(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "elsewhere" / "demo.yaml").write_text(TEXT)
    done = python(
        str(ROOT / "cli.py"), "emit", "--render-only", "../elsewhere/demo.yaml",
        cwd=tmp_path / "empty",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "empty" / "generated" / "demo").iterdir()} == (
        PACKAGE_FILES
    )


# ---- The other commands ----------------------------------------------------------------------


def test_new_writes_a_spec_that_is_legal(work, kgen_command):
    result = kgen_command("new", "my_block")
    assert result.out == "my_block.yaml: written; next: kgen emit my_block.yaml\n"
    assert load_spec(work / "my_block.yaml").name == "my_block"
    assert kgen_command("emit", "--render-only", "my_block.yaml").code == 0
    text = (work / "my_block.yaml").read_text()
    assert_one_line(kgen_command("new", "my_block"), 2, "my_block.yaml: exists; --force")
    (work / "my_block.yaml").write_text("mine")
    assert kgen_command("new", "my_block", "--force").code == 0
    assert (work / "my_block.yaml").read_text() == text


def test_what_new_comments_out_is_legal_too(work, kgen_command):
    kgen_command("new", "my_block")
    text = (work / "my_block.yaml").read_text()
    everything = re.sub(r"^( *)# (?=( *)\w+:)", r"\1", text, flags=re.MULTILINE)
    assert everything != text
    (work / "all.yaml").write_text(everything)
    spec = load_spec(work / "all.yaml")
    assert (spec.schedule.strategy, spec.schedule.math) == ("single_pass", "fp16x3")
    assert spec.schedule.tile_h is not None


def test_validate_prints_names_and_hashes(work, kgen_command):
    result = kgen_command("validate", "demo.yaml", *SPECS)
    assert result.code == 0
    assert len(result.out.splitlines()) == 1 + len(SPECS)
    assert result.out.startswith(f"demo.yaml: ok, demo {spec_of().hash()}\n")
    facts = json.loads(kgen_command("validate", "--json", "demo.yaml").out)
    assert facts[0]["problem"]["kernel_size"] == [3, 3]


def test_schema_prints_the_schema(kgen_command):
    assert json.loads(kgen_command("schema").out) == json.loads(json.dumps(kgen.json_schema()))


def test_explain_names_the_decisions(work, kgen_command):
    text = kgen_command("explain", "demo.yaml").out
    for part in ("demo_conv", "smem_x", "workspace", "predicted", "two_kernel for sm_90a"):
        assert part in text
    facts = json.loads(kgen_command("explain", "demo.yaml", "--json").out)
    assert facts["y"] == [2, 12, 17, 22]
    assert json.loads(kgen_command("explain", "demo.yaml", "--arch", "86", "--json").out)[
        "arch"
    ] == ("sm_86")


def test_explain_refuses_an_arch_on_which_the_spec_is_illegal(work, kgen_command):
    knobs = "\n  tile_h: 38\n  tile_w: 38\n  pixels: 2\n  threads: 736\n  tile_k: 4\n  tile_c: 16"
    text = edited("in_channels: 3", "in_channels: 16").replace("two_kernel", "two_kernel" + knobs)
    (work / "large.yaml").write_text(text.replace("height: 19", "height: 76"))
    assert kgen_command("explain", "large.yaml").code == 0
    result = kgen_command("explain", "large.yaml", "--arch", "86")
    assert result.code == 2
    assert "sm_86 has 101376" in result.err


@pytest.mark.nvrtc
def test_build_puts_cubins_beside_the_package(work, kgen_command):
    result = kgen_command("build", "demo.yaml", "--arch", "90a,8.0", "--arch", "sm_86")
    assert result.code == 0
    folder = work / "generated" / "demo"
    for arch in ("sm_90a", "sm_80", "sm_86"):
        assert f"generated/demo/demo.{arch}.cubin: " in result.out
        assert (folder / f"demo.{arch}.cubin").read_bytes().startswith(b"\x7fELF")
    assert kgen_command("emit", "--check", "demo.yaml").code == 0
    assert kgen_command("build", "demo.yaml").out.count("demo.sm_90a.cubin") == 1


def test_errors_leave_stdout_clean_under_the_runner(work):
    result = CliRunner().invoke(cli, ["validate", "missing.yaml"])
    assert result.exit_code != 0
    assert result.stdout == ""


@pytest.mark.parametrize("module", ["-m kgen", "cli.py", "console script"])
def test_the_command_is_reached_in_three_ways(work, module):
    if module == "console script":
        script = Path(sys.executable).with_name("kgen")
        if not script.exists():
            pytest.skip("kgen is not installed beside this Python")
        done = subprocess.run(
            [script, "validate", "demo.yaml"], cwd=work, capture_output=True, text=True, timeout=60,
            check=False, env={**os.environ},
        )  # fmt: skip
    else:
        start = ["-m", "kgen"] if module == "-m kgen" else [str(ROOT / "cli.py")]
        done = python(*start, "validate", "demo.yaml", cwd=work)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("demo.yaml: ok, demo ")


def test_exit_codes_are_told_apart():
    assert kgen.UsageError.exit_code == kgen.SpecError.exit_code == 2
    assert kgen.CheckError.exit_code == 1
    assert BuildError.exit_code == 3


def test_cache_gc_takes_packages_and_leftovers_too(tmp_path, monkeypatch, kgen_command):
    import os
    import time

    from kgen.cache import cache_entries, is_stale

    monkeypatch.setenv("KGEN_CACHE_DIR", str(tmp_path))
    package = tmp_path / "package" / "abc" / "name"
    leftover = tmp_path / "cubin" / "00" / ".new-x"
    for folder in (package, leftover):
        folder.mkdir(parents=True)
        (folder / "kernel.cu").write_text("// old")
    now = time.time()
    kinds = {one.kind: one for one in cache_entries(tmp_path)}
    assert set(kinds) == {"package", "leftover"}
    assert not any(is_stale(one, 30, now) for one in kinds.values())
    assert is_stale(kinds["leftover"], 30, now + 7200)
    assert not is_stale(kinds["package"], 30, now + 7200)
    for path in (package / "kernel.cu", package.parent, leftover / "kernel.cu", leftover):
        os.utime(path, (0, 0))
    assert kgen_command("cache", "gc").code == 0
    assert list(cache_entries(tmp_path)) == []


@pytest.mark.parametrize("arguments", [[], ["cache"]])
def test_a_command_alone_shows_its_help(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    told = capsys.readouterr()
    assert stop.value.code == 2
    assert told.out == ""
    assert told.err.startswith("Usage: kgen")
    assert "(see `kgen" not in told.err
