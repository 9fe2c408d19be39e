import json
import math
import os
import random
import re
import socket
import struct
import sys
import threading
import time
from pathlib import Path

import jinja2
import pytest
from helpers import ROOT, SPECS, python, spec_of
from hypothesis import given, settings
from hypothesis import strategies as st

import kgen
from kgen.emit import difference, environment, f32, make_manifest, render, render_template, write
from kgen.errors import BuildError, UsageError
from kgen.plan import make_plan
from kgen.spec import load_spec

emit_module = sys.modules["kgen.emit"]  # the name kgen.emit is the function

TEMPLATES = sorted((ROOT / "kgen" / "templates").glob("*.j2"))
STRATEGIES = ("two_kernel", "hybrid")
PACKAGE_FILES = {
    "__init__.py", "_calls.py", "_compiler.py", "_launching.py", "_op.py", "_runtime.py",
    "kernel.cu", "manifest.json",
}  # fmt: skip


def fp32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


# ---- D23: undefined names --------------------------------------------------------------------

TEMPLATE_TEXT = """\
first line
{{ value }}
{% if condition %}yes{% endif %}
{% for item in items %}{{ item }}{% endfor %}
{{ plan.tile_w }}
"""
COMPLETE = {"value": 1, "condition": True, "items": [1, 2], "plan": {"tile_w": 3}}


def overlay(monkeypatch, folder: Path) -> None:
    """Templates in `folder` take precedence over the project's."""
    own = jinja2.ChoiceLoader([jinja2.FileSystemLoader(folder), environment().loader])
    monkeypatch.setattr(environment(), "loader", own)
    monkeypatch.setattr(environment(), "cache", None)


@pytest.fixture
def own(monkeypatch, tmp_path):
    """A function that renders a text as the template own.cu.j2 in the project's environment."""
    overlay(monkeypatch, tmp_path)

    def render_text(text: str, /, **context):
        (tmp_path / "own.cu.j2").write_text(text)
        return render_template("own.cu.j2", **context)

    return render_text


@pytest.mark.parametrize(
    ("missing", "line"), [("value", 2), ("condition", 3), ("items", 4), ("tile_w", 5)]
)
def test_an_undefined_name_raises_wherever_it_stands(own, missing, line):
    assert own(TEMPLATE_TEXT, **COMPLETE) == "first line\n1\nyes123\n"
    context = {key: value for key, value in COMPLETE.items() if key != missing}
    if missing == "tile_w":
        context["plan"] = {"renamed": 3}
    with pytest.raises(BuildError) as caught:
        own(TEMPLATE_TEXT, **context)
    assert missing in str(caught.value)
    assert f"own.cu.j2:{line}" in str(caught.value)


def test_a_name_renamed_in_the_plan_only_raises_and_leaves_no_file(tmp_path, monkeypatch):
    spec = spec_of()
    source = (ROOT / "kgen" / "templates" / "two_kernel.cu.j2").read_text("utf-8")
    assert source.count("plan.tile.tile_w") >= 1
    line = next(i for i, text in enumerate(source.splitlines(), 1) if "plan.tile.tile_w" in text)
    changed = source.replace("plan.tile.tile_w", "plan.tile.tile_breadth")
    kgen.emit(spec, tmp_path / "right")
    (tmp_path / "two_kernel.cu.j2").write_text(changed)
    overlay(monkeypatch, tmp_path)
    with pytest.raises(BuildError, match=rf"two_kernel\.cu\.j2:{line}: .*tile_breadth"):
        kgen.emit(spec, tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()
    assert (tmp_path / "right" / "demo" / "kernel.cu").exists()


def test_an_included_template_is_the_one_that_is_named(own, tmp_path):
    (tmp_path / "inner.cu.j2").write_text("a\n\n{{ absent }}\n")
    with pytest.raises(BuildError, match=r"template inner\.cu\.j2:3: .*absent"):
        own('{% include "inner.cu.j2" %}')


def test_a_syntax_error_in_a_template_names_its_line(own):
    with pytest.raises(BuildError, match=r"own\.cu\.j2:2"):
        own("first\n{% if %}\n")


@pytest.mark.parametrize(
    "text",
    ["\n{{ 1 + none }}", "\n{{ [1][7] }}", "\n{{ ['absent.cuh'] | paste }}", "\n{{ 'a' | f32 }}"],
)
def test_any_other_failure_in_a_template_names_its_line(own, text):
    with pytest.raises(BuildError, match=r"template own\.cu\.j2:2: ."):
        own(text)


def test_finalize_refuses_none_and_floats_and_prints_cpp_booleans(own):
    for value in (None, 1.0, 0.0, math.nan):
        with pytest.raises(BuildError, match=r"own\.cu\.j2:1: a template printed"):
            own("{{ value }}", value=value)
    assert own("{{ value }}", value=True) == "true"
    assert own("{{ value }}", value=False) == "false"
    assert own("{{ value }}", value=3) == "3"
    assert own("{{ value }}", value="array<float,4> & co") == "array<float,4> & co"


def test_the_last_newline_is_kept(own):
    assert own("text\n") == "text\n"


# ---- Floats ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [(1e-5, "1e-05f"), (1.0, "1.0f"), (0.1, "0.1f"), (3.0, "3.0f"), (1e10, "1e+10f"),
     (16777216.0, "16777216.0f"), (1 / 3, "0.33333334f"), (0.0, "0.0f"), (-2.5, "-2.5f")],
)  # fmt: skip
def test_floats_become_the_shortest_float_literal(value, text):
    assert f32(value) == text


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_a_float_literal_reads_back_as_the_same_value(value):
    text = f32(value)
    assert re.fullmatch(r"-?\d+(\.\d+)?(e[+-]\d+)?f", text)
    assert "." in text or "e" in text  # `1f` is no C++ literal
    assert fp32(float(text[:-1])) == value


def test_floats_that_need_nine_digits_read_back():
    generator = random.Random(0)
    for _ in range(2000):
        value = struct.unpack("f", struct.pack("I", generator.randrange(1, 0x7F80_0000)))[0]
        assert fp32(float(f32(value)[:-1])) == value


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.floats(min_value=-3e38, max_value=3e38))
def test_a_double_is_rounded_to_float_once(value):
    assert fp32(float(f32(value)[:-1])) == fp32(value)


# ---- Determinism -----------------------------------------------------------------------------

RENDER = """
import hashlib, sys
from kgen.emit import render
from kgen.spec import load_spec
for path in sys.argv[1:]:
    for name, text in render(load_spec(path)).items():
        print(name, hashlib.sha256(text.encode()).hexdigest())
"""


def test_bytes_do_not_depend_on_hash_seed_folder_locale_or_time(tmp_path):
    paths = [str(path) for path in SPECS]
    outputs = set()
    for seed, cwd, extra in (
        ("0", ROOT, {}),
        ("1", tmp_path, {"TZ": "Asia/Tokyo"}),
        ("2", tmp_path, {"LC_ALL": "C", "HOME": "/nowhere"}),
    ):
        done = python("-c", RENDER, *paths, cwd=cwd, PYTHONHASHSEED=seed, **extra)
        assert done.returncode == 0, done.stderr
        outputs.add(done.stdout)
    (output,) = outputs
    assert len(output.splitlines()) == len(PACKAGE_FILES) * len(SPECS)


def test_the_same_content_written_differently_gives_the_same_bytes(tmp_path):
    path = tmp_path / "elsewhere.yaml"
    path.write_text("# a comment\n" + SPECS[0].read_text("utf-8"))
    assert render(load_spec(path)) == render(load_spec(SPECS[0]))


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_no_path_host_user_or_date_gets_into_the_text(path):
    text = "".join(render(load_spec(path)).values())
    assert str(ROOT) not in text
    assert str(Path.home()) + "/" not in text
    assert socket.gethostname() not in text
    for mark in (time.strftime("%Y-%m-%d"), time.strftime("%d %b %Y"), time.strftime("%b %d")):
        assert mark not in text
    kernel = render(load_spec(path))["kernel.cu"]
    assert not re.search(r"(?<![\w/])/(?:home|root|tmp|usr|work|opt)/", kernel)
    assert not re.search(r"\b(19|20)\d\d-\d\d-\d\d\b", kernel)


# ---- The emitted kernel ----------------------------------------------------------------------


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_the_kernel_is_self_contained_readable_text(path):
    spec = load_spec(path)
    kernel = render(spec)["kernel.cu"]
    assert "#include" not in kernel
    assert "{{" not in kernel
    assert "{%" not in kernel
    assert kernel.startswith(f"// Generated by kgen {kgen.__version__}.")
    assert f"spec_hash: {spec.hash()}" in kernel
    assert kernel.endswith("}\n")
    assert "\r" not in kernel
    assert "\t" not in kernel
    assert not re.search(r"[ \t]+$", kernel, re.MULTILINE)
    assert "\n\n\n" not in kernel
    for launch in make_plan(spec).launches:
        assert re.search(rf'extern "C" __global__[^;{{]*\b{launch.kernel}\(', kernel)


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_the_python_files_are_valid_python_without_trailing_spaces(path):
    text = render(load_spec(path))
    for name in (
        "__init__.py",
        "_runtime.py",
        "_launching.py",
        "_calls.py",
        "_op.py",
        "_compiler.py",
    ):
        compile(text[name], name, "exec")
        assert not re.search(r"[ \t]+$", text[name], re.MULTILINE), name


def test_the_runtime_files_are_the_project_s_own_byte_for_byte():
    text = render(spec_of())
    assert text["_runtime.py"] == (ROOT / "kgen" / "runtime.py").read_text("utf-8")
    assert text["_launching.py"] == (ROOT / "kgen" / "_launching.py").read_text("utf-8")
    assert text["_calls.py"] == (ROOT / "kgen" / "_calls.py").read_text("utf-8")
    assert text["_op.py"] == (ROOT / "kgen" / "op.py").read_text("utf-8")
    assert text["_compiler.py"] == (ROOT / "kgen" / "compiler.py").read_text("utf-8")
    for name in ("_runtime.py", "_launching.py", "_calls.py", "_op.py", "_compiler.py"):
        assert not re.search(r"^\s*(from|import) kgen", text[name], re.MULTILINE)


# ---- Directive budget ------------------------------------------------------------------------


# Templates of exports, which write host code for each launch and tensor, have budgets of their own.
EXPORTS = {"kernelbench.py.j2": 0.27, "package.md.j2": 0.07, "package.toml.j2": 0.07}


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_templates_are_mostly_text(path):
    lines = path.read_text("utf-8").splitlines()
    directives = [line for line in lines if "{%" in line]
    assert len(directives) <= max(1, EXPORTS.get(path.name, 0.05) * len(lines))


def loops_with_directives(text: str) -> list[int]:
    """Lines inside a C++ for or while loop's braces that hold a `{%`."""
    found, depths, depth = [], [], 0
    for number, line in enumerate(text.splitlines(), 1):
        code = re.sub(r"\{\{.*?\}\}|\{%.*?%\}|\{#.*?#\}", "", line).split("//")[0]
        if depths and "{%" in line:
            found.append(number)
        if re.search(r"\b(for|while) \(", code) and code.rstrip().endswith("{"):
            depths.append(depth)
        depth += code.count("{") - code.count("}")
        while depths and depth <= depths[-1]:
            depths.pop()
    return found


@pytest.mark.parametrize(
    "path", [one for one in TEMPLATES if ".cu." in one.name], ids=lambda path: path.name
)
def test_no_directive_stands_inside_a_device_loop(path):
    assert loops_with_directives(path.read_text("utf-8")) == []


def test_a_directive_inside_a_device_loop_would_be_found():
    text = (
        "void f() {\n  for (int i = 0; i < 3; ++i) {\n    {% if a %}\n    g();\n  }\n  {% b %}\n}\n"
    )
    assert loops_with_directives(text) == [3]


def test_device_files_hold_no_template_code():
    paths = sorted((ROOT / "kgen" / "templates" / "device").rglob("*.cuh"))
    assert len(paths) >= 3
    for path in paths:
        assert not re.search(r"\{\{|\{%|\{#", path.read_text("utf-8")), path


# ---- Golden record ---------------------------------------------------------------------------


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_generated_equals_what_the_specs_render_to(path):
    diff = difference(ROOT / "generated" / path.stem, render(load_spec(path)))
    assert not diff, f"stale; run `kgen emit {path.relative_to(ROOT)}`\n{diff[:4000]}"


def test_generated_holds_a_package_for_each_spec_and_nothing_else():
    found = {path.name for path in (ROOT / "generated").iterdir() if path.is_dir()}
    assert found == {path.stem for path in SPECS}


@pytest.fixture
def package(tmp_path):
    return kgen.emit(spec_of(), tmp_path / "out")


def test_an_emitted_package_is_up_to_date(package):
    assert {path.name for path in package.iterdir()} == PACKAGE_FILES
    assert difference(package, render(spec_of())) == ""


def test_changed_missing_and_surplus_files_are_differences(package):
    text = render(spec_of())
    kernel = package / "kernel.cu"
    kernel.write_text(kernel.read_text().replace("kC_out = 12", "kC_out = 13"))
    diff = difference(package, text)
    assert "-constexpr int kC_out = 13" in diff
    assert "+constexpr int kC_out = 12" in diff
    kernel.write_text(text["kernel.cu"])
    (package / "notes.txt").write_text("surplus\n")
    assert "--- demo/notes.txt\n+++ /dev/null" in difference(package, text)
    (package / "notes.txt").write_text("")
    assert "notes.txt" in difference(package, text)
    (package / "notes.txt").unlink()
    assert difference(package, text) == ""
    kernel.unlink()
    assert "--- /dev/null\n+++ demo/kernel.cu" in difference(package, text)
    assert "+++ demo/manifest.json" in difference(package.parent / "absent", text).replace(
        "absent", "demo"
    )


def test_cubins_build_records_and_caches_are_no_difference(package):
    (package / "demo.sm_90a.cubin").write_bytes(b"\x7fELF")
    (package / "build.json").write_text("{}")
    (package / "__pycache__").mkdir()
    assert difference(package, render(spec_of())) == ""


# ---- Writing ---------------------------------------------------------------------------------


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_writing_again_changes_nothing(package):
    before = {path.name: path.stat().st_mtime_ns for path in package.iterdir()}
    assert write(package, render(spec_of())) is False
    assert {path.name: path.stat().st_mtime_ns for path in package.iterdir()} == before


def test_a_package_is_replaced_as_a_whole(package):
    (package / "demo.sm_90a.cubin").write_bytes(b"built from the old source")
    assert write(package, render(spec_of(height=20))) is True
    assert {path.name for path in package.iterdir()} == PACKAGE_FILES
    assert difference(package, render(spec_of(height=20))) == ""
    assert names_in(package.parent) == ["demo"]
    assert package.stat().st_mode & 0o777 == 0o777 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("edit", ["changed", "added"])
def test_a_package_edited_by_hand_is_left_alone_unless_forced(package, edit):
    target = package / ("kernel.cu" if edit == "changed" else "notes.txt")
    with target.open("a") as file:
        file.write("// by hand\n")
    with pytest.raises(UsageError, match=rf"{target.name}.*--force replaces it"):
        write(package, render(spec_of(height=20)))
    assert target.read_text().endswith("// by hand\n")
    assert write(package, render(spec_of(height=20)), force=True) is True
    assert difference(package, render(spec_of(height=20))) == ""


def test_a_folder_that_kgen_did_not_write_is_left_alone_unless_forced(tmp_path):
    folder = tmp_path / "demo"
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match="was not written by kgen"):
        kgen.emit(spec_of(), tmp_path)
    assert names_in(folder) == ["thesis.tex"]
    kgen.emit(spec_of(), tmp_path, force=True)
    assert {path.name for path in folder.iterdir()} == PACKAGE_FILES


def test_a_file_in_the_package_s_place_is_left_alone(tmp_path):
    (tmp_path / "demo").write_text("a file")
    with pytest.raises(UsageError, match="is a file"):
        kgen.emit(spec_of(), tmp_path)
    assert (tmp_path / "demo").read_text() == "a file"


def test_an_empty_folder_is_filled(tmp_path):
    (tmp_path / "demo").mkdir()
    kgen.emit(spec_of(), tmp_path)
    assert {path.name for path in (tmp_path / "demo").iterdir()} == PACKAGE_FILES


def test_an_output_below_a_file_is_a_usage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        kgen.emit(spec_of(), tmp_path / "file" / "out")
    assert names_in(tmp_path) == ["file"]


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("function", ["tempfile.mkdtemp", "os.replace", "pathlib.Path.write_bytes"])
def test_a_failing_write_leaves_things_as_they_were(tmp_path, monkeypatch, existing, function):
    out = tmp_path / "out"
    out.mkdir()
    if existing:
        kgen.emit(spec_of(), out)
    before = names_in(out)

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied", "somewhere")

    monkeypatch.setattr(function, refuse)
    monkeypatch.setattr(emit_module, "_swap", lambda *_: False)
    with pytest.raises(UsageError, match="somewhere: cannot be written: Permission denied"):
        kgen.emit(spec_of(height=20), out)
    monkeypatch.undo()
    assert names_in(out) == before
    if existing:
        assert difference(out / "demo", render(spec_of())) == ""
    kgen.emit(spec_of(height=20), out)
    assert difference(out / "demo", render(spec_of(height=20))) == ""


def test_the_old_package_comes_back_when_the_new_one_cannot_take_its_place(package, monkeypatch):
    real, calls = os.replace, []

    def fail_second(source, target):
        calls.append(target)
        if len(calls) == 2:
            raise OSError(28, "No space left on device", str(target))
        real(source, target)

    monkeypatch.setattr("os.replace", fail_second)
    monkeypatch.setattr(emit_module, "_swap", lambda *_: False)
    with pytest.raises(UsageError, match="No space left"):
        write(package, render(spec_of(height=20)))
    assert difference(package, render(spec_of())) == ""
    assert names_in(package.parent) == ["demo"]


def test_a_package_is_replaced_at_one_stroke(package, monkeypatch):
    """A reader, or a kill, finds the old one or the new one, never none."""
    if sys.platform != "linux":
        pytest.skip("only Linux swaps folders")
    real = emit_module._swap

    def swap(one, other):
        assert one.is_dir()
        assert real(one, other)
        assert one.is_dir()
        return True

    monkeypatch.setattr(emit_module, "_swap", swap)
    monkeypatch.setattr("os.replace", lambda *_: pytest.fail("it was moved away"))
    assert write(package, render(spec_of(height=20))) is True
    assert difference(package, render(spec_of(height=20))) == ""
    assert names_in(package.parent) == ["demo"]


def test_what_a_killed_writer_left_is_taken_away(package):
    for name in (".demo.ab12cd34", ".demo.keep", ".other.ab12cd34"):
        (package.parent / name).mkdir()
    assert write(package, render(spec_of(height=20))) is True
    assert names_in(package.parent) == [".demo.keep", ".other.ab12cd34", "demo"]


def test_writers_of_one_package_take_turns(package):
    texts = [render(spec_of(height=height)) for height in (20, 21)]
    failed = []

    def work(text):
        try:
            for _ in range(15):
                write(package, text)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(text,)) for text in texts]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert failed == []
    assert "" in [difference(package, text) for text in texts]


# ---- Manifest --------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_manifest_holds_what_the_plan_decided(strategy):
    spec = spec_of(strategy=strategy)
    plan = make_plan(spec)
    text = render(spec)
    manifest = json.loads(text["manifest.json"])
    assert manifest["name"] == "demo"
    assert manifest["spec_hash"] == spec.hash()
    assert manifest["spec"] == json.loads(json.dumps(spec.canonical()))
    assert manifest["kgen_version"] == kgen.__version__
    assert manifest["strategy"] == strategy
    assert manifest["output"] == {"C_out": 12, "P": 17, "Q": 22}
    assert [one["kernel"] for one in manifest["launches"]] == [one.kernel for one in plan.launches]
    assert manifest["workspace_floats_per_sample"] == plan.workspace_per_sample
    assert (manifest["convolution"] is not None) == (strategy == "hybrid")
    assert set(manifest["files"]) == PACKAGE_FILES
    assert "registers" not in text["manifest.json"]  # depends on the compiler: in build.json
    known = {"x", "y", "workspace", "conv_out", *(one.key for one in plan.arguments)}
    for launch in manifest["launches"]:
        assert set(launch["arguments"]) <= known


def test_the_manifest_gives_an_uneven_padding_per_side():
    spec = spec_of(kernel_size=[4, 3], padding="same", strategy="hybrid")
    manifest = make_manifest(spec, make_plan(spec))
    assert manifest["convolution"]["padding"] == [1, 1, 1, 2]


# ---- Formatting ------------------------------------------------------------------------------


def test_no_function_returns_cpp():
    for path in (ROOT / "kgen").glob("*.py"):
        assert "__global__" not in path.read_text("utf-8"), path
