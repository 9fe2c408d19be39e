"""`kgen export` as a user meets it: exit codes, streams, and what is left behind."""

import json

import pytest
from helpers import TEXT, edited

from kgen.cli import main
from kgen.exporters.kernelbench import kernelbench_source
from kgen.spec import load_spec


@pytest.fixture
def work(tmp_path, monkeypatch):
    """An own working folder with one legal spec, demo.yaml."""
    (tmp_path / "demo.yaml").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def export(capsys):
    """A function that runs `kgen export ARGUMENTS` in this process: code, stdout, stderr."""

    def run(*arguments):
        with pytest.raises(SystemExit) as stop:
            main(["export", *map(str, arguments)])
        captured = capsys.readouterr()
        return stop.value.code or 0, captured.out, captured.err

    return run


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def assert_refused(result, code, *parts):
    assert result[0] == code
    assert result[1] == ""
    assert "Traceback" not in result[2]
    assert len(result[2].splitlines()) == 1, result[2]
    for part in parts:
        assert part in result[2]


KERNELBENCH = ("--format", "kernelbench")
PACKAGE = ("--format", "package")


def test_the_file_is_written_beside_and_a_second_time_is_up_to_date(work, export):
    assert export("demo.yaml", *KERNELBENCH) == (0, "demo_kernelbench.py: written\n", "")
    text = (work / "demo_kernelbench.py").read_text()
    assert text == kernelbench_source(load_spec(work / "demo.yaml"))
    assert export("demo.yaml", *KERNELBENCH) == (0, "demo_kernelbench.py: up to date\n", "")
    assert names_in(work) == ["demo.yaml", "demo_kernelbench.py"]


def test_an_edited_file_is_replaced_only_by_force(work, export):
    path = work / "sub" / "new.py"
    assert export("demo.yaml", *KERNELBENCH, "--output", path)[0] == 0
    path.write_text("# mine\n")
    assert_refused(export("demo.yaml", *KERNELBENCH, "--output", path), 2,
                   f"{path}: exists and differs; --force replaces it")  # fmt: skip
    assert path.read_text() == "# mine\n"
    assert export("demo.yaml", *KERNELBENCH, "--output", path, "--force")[0] == 0
    assert "ModelNew" in path.read_text()
    assert names_in(path.parent) == ["new.py"]


def test_a_dash_prints_the_file(work, export):
    code, out, err = export("demo.yaml", *KERNELBENCH, "--output", "-")
    assert (code, err) == (0, "")
    assert out == kernelbench_source(load_spec(work / "demo.yaml"))
    assert names_in(work) == ["demo.yaml"]
    assert_refused(export("demo.yaml", *PACKAGE, "--output", "-"), 2, "cannot be printed")


def test_the_format_must_be_given(work, export):
    code, out, err = export("demo.yaml")
    assert (code, out) == (2, "")
    assert "--format" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("form", [KERNELBENCH, PACKAGE])
def test_a_missing_or_wrong_spec_is_named(work, export, form):
    assert_refused(export("missing.yaml", *form), 2, "missing.yaml: no such file")
    (work / "bad.yaml").write_text(edited("num_groups: 4", "num_groups: 5"))
    code, out, err = export("bad.yaml", *form)
    assert (code, out) == (2, "")
    assert "bad.yaml:14: chain[3].group_norm.num_groups" in err
    assert names_in(work) == ["bad.yaml", "demo.yaml"]


@pytest.mark.parametrize("option", [("--arch", "80"), ("--package-version", "1.0")])
def test_options_of_the_other_format_are_refused(work, export, option):
    assert_refused(export("demo.yaml", *KERNELBENCH, *option), 2, option[0], "has no meaning")


def test_an_output_that_cannot_be_written_is_named(work, export):
    (work / "folder").mkdir()
    assert_refused(export("demo.yaml", *KERNELBENCH, "--output", "folder"), 2,
                   "folder: is a folder, expected a file")  # fmt: skip
    assert_refused(export("demo.yaml", *KERNELBENCH, "--output", "demo.yaml/x.py"), 2,
                   "demo.yaml/x.py: cannot be")  # fmt: skip


def test_an_architecture_that_is_unknown_or_does_not_fit_is_refused(work, export):
    assert_refused(export("demo.yaml", *PACKAGE, "--arch", "90"), 2, "did you mean sm_90a?")
    assert names_in(work) == ["demo.yaml"]


@pytest.mark.nvrtc
def test_a_package_is_written_for_the_specs_targets(work, export):
    code, out, err = export("demo.yaml", *PACKAGE)
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "demo_package: written; next: pip install demo_package"
    builds = json.loads((work / "demo_package" / "demo" / "build.json").read_text())["builds"]
    assert list(builds) == ["sm_90a"]
    assert names_in(work / "demo_package") == ["LICENSE", "README.md", "demo", "pyproject.toml"]
    assert names_in(work) == ["demo.yaml", "demo_package"]
    assert export("demo.yaml", *PACKAGE) == (0, "demo_package: up to date\n", "")
    assert_refused(export("demo.yaml", *PACKAGE, "--package-version", "2.0"), 2,
                   "demo_package: pyproject.toml differs; --force")  # fmt: skip
    assert export("demo.yaml", *PACKAGE, "--package-version", "2.0", "--force")[0] == 0


@pytest.mark.nvrtc
def test_architectures_may_be_repeated_or_listed(work, export):
    code, _, err = export("demo.yaml", *PACKAGE, "--arch", "90a,8.0", "--arch", "sm_80")
    assert (code, err) == (0, "")
    builds = json.loads((work / "demo_package" / "demo" / "build.json").read_text())["builds"]
    assert sorted(builds) == ["sm_80", "sm_90a"]


def test_a_file_is_checked_and_left_alone(work, export):
    assert_refused(export("demo.yaml", *KERNELBENCH, "--check"), 1,
                   "demo_kernelbench.py: is not there; export it")  # fmt: skip
    assert names_in(work) == ["demo.yaml"]
    export("demo.yaml", *KERNELBENCH)
    assert export("demo.yaml", *KERNELBENCH, "--check") == (
        0, "demo_kernelbench.py: up to date\n", "",
    )  # fmt: skip
    (work / "demo.yaml").write_text(edited("height: 19", "height: 20"))
    before = (work / "demo_kernelbench.py").read_bytes()
    assert_refused(export("demo.yaml", *KERNELBENCH, "--check"), 1, "demo_kernelbench.py: stale")
    assert (work / "demo_kernelbench.py").read_bytes() == before


@pytest.mark.nvrtc
def test_a_package_is_checked_and_left_alone(work, export):
    export("demo.yaml", *PACKAGE, "--arch", "80,90a")
    assert export("demo.yaml", *PACKAGE, "--arch", "80,90a", "--check")[0] == 0
    (work / "demo_package" / "README.md").write_text("mine\n")
    assert_refused(export("demo.yaml", *PACKAGE, "--arch", "80", "--check"), 1,
                   "demo_package: stale: ", "README.md", "demo.sm_90a.cubin")  # fmt: skip
    assert (work / "demo_package" / "README.md").read_text() == "mine\n"
    assert (work / "demo_package" / "demo" / "demo.sm_90a.cubin").exists()


@pytest.mark.parametrize("other", [("--force",), ("--output", "-")])
def test_a_check_goes_with_nothing_that_writes(work, export, other):
    assert_refused(export("demo.yaml", *KERNELBENCH, "--check", *other), 2, "give one of them")
