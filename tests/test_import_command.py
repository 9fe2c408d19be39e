"""`kgen import` as a user meets it: models and KernelBench problems in files."""

import ast
import json

import pytest
from helpers import python

torch = pytest.importorskip("torch")

from kgen.cli import main
from kgen.errors import BuildError, UsageError
from kgen.importers.kernelbench import needed
from kgen.importers.report import ImportedBlock
from kgen.importers.spec_text import spec_text
from kgen.importers.user_code import read_python
from kgen.spec import load_spec

MODEL = """\
import torch
from torch import nn
from parts import Part

print("loading")


class Net(nn.Module):
    def __init__(self, C_out=16, groups=4):
        super().__init__()
        self.first = Part(3, 8, 2)
        self.second = Part(8, C_out, groups)
        self.third = Part(C_out, C_out, groups)
        self.last = nn.Conv2d(C_out, 4, 1)

    def forward(self, x):
        return self.last(self.third(self.second(self.first(x))))


def build():
    return Net(32)


net = Net()
number = 3


def broken():
    raise RuntimeError("first line\\nsecond line")
"""

PARTS = """\
import torch
from torch import nn


class Part(nn.Module):
    def __init__(self, C_in, C_out, groups):
        super().__init__()
        self.conv = nn.Conv2d(C_in, C_out, 3, bias=False)
        self.scale = nn.Parameter(torch.ones(C_out, 1, 1))
        self.norm = nn.GroupNorm(groups, C_out, eps=1e-6)

    def forward(self, x):
        return self.norm(torch.relu(self.conv(x) * self.scale))
"""

PROBLEM = """\
import torch
import torch.nn as nn

open("ran_too_much", "w").close()


class Unused(undefined_name):
    pass


class Model(nn.Module):
    def __init__(self, C_in, C_out, groups):
        super().__init__()
        self.conv = nn.Conv2d(C_in, C_out, 3)
        self.norm = nn.GroupNorm(groups, C_out)

    def forward(self, x):
        return self.norm(torch.sigmoid(self.conv(x)))


batch, side = 512, 4096
sizes = [8]
sizes.append(16)


def get_inputs():
    return [torch.rand(batch, sizes[0], side, side)]


def get_init_inputs():
    return [*sizes, 4]


if __name__ == "__main__":
    raise SystemExit("not to be run")
raise RuntimeError("nor this")
"""


@pytest.fixture
def work(tmp_path, monkeypatch):
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "model.py").write_text(MODEL)
    (folder / "parts.py").write_text(PARTS)
    (folder / "12_Conv_Sigmoid.py").write_text(PROBLEM)
    monkeypatch.chdir(folder)
    monkeypatch.delitem(__import__("sys").modules, "parts", raising=False)
    return folder


@pytest.fixture
def kgen_import(capsys):
    """A function that runs `kgen import ARGUMENTS`: code, stdout, stderr."""

    def run(*arguments):
        with pytest.raises(SystemExit) as stop:
            main(["import", *(str(one) for one in arguments)])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return stop.value.code or 0, captured.out, captured.err

    return run


def refused(result, *parts, code=2):
    """One line of refusal, perhaps after the line that says that code is executed."""
    given, out, err = result
    assert given == code, err
    assert out == ""
    lines = [one for one in err.splitlines() if one not in ("loading",)]
    lines = [one for one in lines if not one.startswith("kgen: executing code of ")]
    assert len(lines) == 1, err
    for part in parts:
        assert part in lines[0], err


SMALL = ("--input", "2,3,12,13")


# ---- Models ----------------------------------------------------------------------------------


def test_a_spec_for_each_block_and_a_line_for_the_rest(work, kgen_import):
    code, out, err = kgen_import("model.py:Net", *SMALL)
    assert code == 0
    assert err.splitlines() == ["kgen: executing code of model.py", "loading"]
    assert out.splitlines() == [
        "first.conv: specs/net_first_conv.yaml, x [2, 3, 12, 13], "
        "conv2d -> mul -> relu -> group_norm",
        "second.conv: specs/net_second_conv.yaml, x [2, 8, 10, 11], "
        "conv2d -> mul -> relu -> group_norm",
        "third.conv: specs/net_third_conv.yaml, x [2, 16, 8, 9], "
        "conv2d -> mul -> relu -> group_norm",
        "last: not matched: its result leaves the forward before any GroupNorm",
    ]
    spec = load_spec(work / "specs/net_second_conv.yaml")
    assert (spec.name, spec.problem.conv_bias, spec.norm.eps) == ("net_second_conv", False, 1e-6)
    text = (work / "specs/net_second_conv.yaml").read_text()
    assert text.startswith("# Found in model.py:Net by `kgen import`.\n")
    assert "#   scale              second.scale\n" in text
    assert sorted(one.name for one in (work / "specs").iterdir()) == [
        "net_first_conv.yaml", "net_second_conv.yaml", "net_third_conv.yaml",
    ]  # fmt: skip


def test_json(work, kgen_import):
    code, out, _ = kgen_import("model.py:Net", *SMALL, "--json", "--output", "made")
    content = json.loads(out)
    assert code == 0
    assert content["model"] == "model.py:Net"
    assert content["blocks"][0]["file"] == "made/net_first_conv.yaml"
    assert content["blocks"][0]["spec"] == load_spec(content["blocks"][0]["file"]).canonical()
    assert content["unmatched"][0]["path"] == "last"


@pytest.mark.parametrize(
    ("name", "init", "C_out"),
    [("Net", "[24, 3]", 24), ("Net", '{"C_out": 12}', 12), ("build", None, 32), ("net", None, 16)],
)
def test_classes_functions_and_modules(work, kgen_import, name, init, C_out):
    arguments = () if init is None else ("--init", init)
    code, _, err = kgen_import(f"model.py:{name}", *SMALL, *arguments, "--name", "n")
    assert code == 0, err
    assert load_spec("specs/n_second_conv.yaml").problem.out_channels == C_out


def test_options_go_into_the_specs(work, kgen_import):
    arguments = ("--dynamic-batch", "--target", "sm_80,sm_86", "--target", "sm_90a")
    assert kgen_import("model.py:Net", *SMALL, *arguments)[0] == 0
    spec = load_spec("specs/net_first_conv.yaml")
    assert spec.problem.batch == "dynamic"
    assert spec.targets == ("sm_80", "sm_86", "sm_90a")


def test_nothing_is_overwritten_without_force(work, kgen_import):
    assert kgen_import("model.py:Net", *SMALL)[0] == 0
    assert kgen_import("model.py:Net", *SMALL)[0] == 0  # the same content
    edited = work / "specs/net_third_conv.yaml"
    edited.write_text("mine")
    (work / "specs/net_first_conv.yaml").unlink()
    result = kgen_import("model.py:Net", *SMALL)
    refused(result, "specs/net_third_conv.yaml: exists and differs; --force replaces it")
    assert edited.read_text() == "mine"
    assert not (work / "specs/net_first_conv.yaml").exists()  # all or none
    assert kgen_import("model.py:Net", *SMALL, "--force")[0] == 0
    assert load_spec(edited).name == "net_third_conv"


def test_a_folder_that_cannot_be_written(work, kgen_import):
    (work / "file").write_text("")
    result = kgen_import("model.py:Net", *SMALL, "--output", "file/specs")
    refused(result, "file/specs/net_first_conv.yaml: cannot be written")


def test_no_block_is_exit_code_1(work, kgen_import):
    (work / "plain.py").write_text(
        "from torch import nn\n"
        "net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))\n"
        "flat = nn.ReLU()\n"
    )
    code, out, err = kgen_import("plain.py:net", *SMALL)
    assert code == 1
    reason = "1 (BatchNorm2d) follows; the norm of a block is nn.GroupNorm"
    assert out == f"0: not matched: {reason}\n"
    assert err.splitlines()[-1] == (
        "plain.py:net: no block of conv -> chain -> GroupNorm was matched"
    )
    assert not (work / "specs").exists()
    assert kgen_import("plain.py:flat", *SMALL)[:2] == (1, "plain.py:flat: holds no convolution\n")
    code, out, _ = kgen_import("plain.py:net", *SMALL, "--json")
    assert (code, json.loads(out)["blocks"]) == (1, [])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give either MODEL, as model.py:ClassName, or --kernelbench FILE"),
        (("model.py:Net", "--kernelbench", "x.py"), "give either MODEL"),
        (("model.py", *SMALL), "'model.py': expected FILE.py:NAME, for instance model.py:Net"),
        (("model.py:", *SMALL), "'model.py:': expected FILE.py:NAME"),
        (("model.py:Net",), "--input is missing"),
        (("model.py:Net", "--input", "2,x"), "--input '2,x': expected sizes, for instance 128,8"),
        (("model.py:Net", "--input", "2,0,3,3"), "--input '2,0,3,3': expected sizes"),
        (("model.py:Net", *SMALL, "--init", "[1"), "--init '[1': is not JSON: "),
        (("model.py:Net", *SMALL, "--init", "3"), "--init '3': expected a JSON list, or an object"),
        (("model.py:Net", *SMALL, "--name", "12"), "--name '12': must hold a letter"),
        (("model.py:Net", *SMALL, "--target", "sm_1"), "unknown architecture 'sm_1'; kgen"),
        (("missing.py:Net", *SMALL), "missing.py: no such file"),
        ((".:Net", *SMALL), ".: is a folder; give a Python file"),
        (("model.py:Nett", *SMALL), "model.py: has no Nett; modules defined there: Net"),
        (("model.py:number", *SMALL), "model.py: number is int, not a class of nn.Module"),
        (("model.py:net", *SMALL, "--init", "[3]"), "model.py: net is a module already; --init"),
        (("model.py:Net", *SMALL, "--init", "[1, 2, 3]"), "model.py: TypeError: Net.__init__()"),
        (("model.py:broken", *SMALL), "model.py:29: RuntimeError: first line"),
        (("model.py:Net", "--input", "2,4,12,13"),
         "Net does not run on fake tensors of the example's sizes: "),
        (("model.py:Net", *SMALL, *SMALL), "Net does not run on fake tensors"),
        (("--kernelbench", "x.py", *SMALL), "--input has no meaning with --kernelbench"),
        (("--kernelbench", "x.py", "--init", "[]"), "--init has no meaning with --kernelbench"),
        (("--kernelbench", "x.py"), "x.py: no such file"),
        (("--kernelbench", "model.py"), "model.py: is no KernelBench problem: it defines no Model, "
         "get_inputs, get_init_inputs (a class Model"),
    ],
)  # fmt: skip
def test_usage_errors(work, kgen_import, arguments, message):
    result = kgen_import(*arguments)
    refused(result, message)
    assert not (work / "specs").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("class Net(:\n", "bad.py:1: SyntaxError: invalid syntax"),
        ("x = 1\nimport no_such_module\n", "bad.py:2: ModuleNotFoundError: No module named"),
        ("from .sibling import x\n", "bad.py:1: ImportError: attempted relative import"),
        ("\n\nimport sys\nsys.exit('gone')\n", "bad.py:4: SystemExit: gone"),
        ("raise ValueError\n", "bad.py:1: ValueError"),
        ("def Net():\n    return 3\n", "bad.py: Net(...) gives int, not an nn.Module"),
        ("x = 1\0\n", "bad.py"),
    ],
)
def test_files_that_cannot_be_used(work, kgen_import, text, message):
    (work / "bad.py").write_text(text)
    refused(kgen_import("bad.py:Net", *SMALL), message)


def test_files_that_are_no_text(work, monkeypatch):
    path = work / "bytes.py"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match=r"bytes.py: is not UTF-8 text"):
        read_python(path)
    path.write_bytes(b"#" * (4 << 20) + b"\n")
    with pytest.raises(UsageError, match=r"a file of Python has at most 4 MiB"):
        read_python(path)


def test_a_line_of_the_model_is_named(work, kgen_import):
    (work / "line.py").write_text(
        "from torch import nn\n\n\nclass Net(nn.Module):\n    def forward(self, x):\n"
        "        return x.numpy().nothing\n"
    )
    refused(kgen_import("line.py:Net", *SMALL), "line.py:6: ")


def test_the_help_says_that_code_is_executed(kgen_import):
    code, out, _ = kgen_import("--help")
    assert code == 0
    assert "This EXECUTES code" in out


def test_without_torch(work):
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from kgen.cli import main\n"
        "main(['import', 'model.py:Net', '--input', '1,3,9,9'])"
    )
    done = python("-c", code, cwd=work)
    assert done.returncode == 2
    assert done.stderr == "kgen import needs torch (pip install 'kgen[torch]')\n"


# ---- KernelBench -----------------------------------------------------------------------------


def test_a_problem_runs_no_more_than_it_must(work, kgen_import):
    # x would take 256 GiB: the inputs have sizes and no data
    code, out, err = kgen_import("--kernelbench", "12_Conv_Sigmoid.py")
    assert code == 0, err
    assert err == "kgen: executing code of 12_Conv_Sigmoid.py\n"
    assert out == (
        "conv: specs/conv_sigmoid_conv.yaml, x [512, 8, 4096, 4096], "
        "conv2d -> sigmoid -> group_norm\n"
    )
    assert not (work / "ran_too_much").exists()
    problem = load_spec("specs/conv_sigmoid_conv.yaml").problem
    assert (problem.batch, problem.in_channels, problem.out_channels) == (512, 8, 16)


def test_nothing_runs_where_a_name_is_missing(work, kgen_import):
    (work / "half.py").write_text(
        "open('ran_too_much', 'w')\nclass Model: pass\nget_inputs = 3\n"
        "def get_init_inputs():\n    return []\n"
    )
    result = kgen_import("--kernelbench", "half.py")
    refused(result, "half.py: is no KernelBench problem: it defines no get_inputs (")
    assert "executing" not in result[2]
    assert not (work / "ran_too_much").exists()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("return [*sizes, 4]", "return 4", "get_init_inputs() gives int, not a list"),
        ("return [torch.rand(batch, sizes[0], side, side)]", "return torch.rand(2)",
         "get_inputs() gives"),
        ("return [*sizes, 4]", "return [1, 2]", "12_Conv_Sigmoid.py: TypeError: Model.__init__()"),
        ("class Model(nn.Module):", "class Model:", "12_Conv_Sigmoid.py:"),
        ("return [*sizes, 4]", "return [*sizes, 5]",
         "12_Conv_Sigmoid.py:15: ValueError: num_channels (16) must be divisible"),
        ("torch.rand(batch, sizes[0], side, side)", "3", "the example holds no tensor"),
    ],
)  # fmt: skip
def test_problems_that_are_wrong(work, kgen_import, old, new, message):
    assert PROBLEM.count(old) == 1
    (work / "12_Conv_Sigmoid.py").write_text(PROBLEM.replace(old, new))
    refused(kgen_import("--kernelbench", "12_Conv_Sigmoid.py"), message)


def test_a_model_that_is_no_module(work, kgen_import):
    (work / "odd.py").write_text(
        "class Model: pass\ndef get_inputs():\n    return []\n"
        "def get_init_inputs():\n    return []\n"
    )
    refused(kgen_import("--kernelbench", "odd.py"), "odd.py: Model is not an nn.Module")


def lines_needed(text, *names):
    tree = ast.parse(text)
    return [one.lineno for one in needed(tree, set(names))]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("a = 1\nb = a\nc = b\nd = c\n", [1, 2, 3]),
        ("a = 1\nprint(a)\nc = a\n", [1, 3]),
        ("import x\nx.y = 3\nc = x.y\n", [1, 3]),
        ("a = []\na.append(1)\na[0] = 2\na.b = 3\nc = a\nlen(a)\n", [1, 2, 3, 4, 5]),
        ("if 1:\n    c = 1\nelse:\n    d = 2\n", [1]),
        ("try:\n    import q as c\nexcept E:\n    c = 2\nE = 3\n", [1, 5]),
        ("for i in r:\n    c[i] = 1\nr = 3\nc = {}\n", [1, 3, 4]),
        ("with o() as c:\n    pass\ndef o():\n    z\nz = 4\n", [1, 3, 5]),
        ("from m import *\nc = 1\n", [1, 2]),
        ("from __future__ import annotations\nc = 1\n", [1, 2]),
        ("def c():\n    c = 1\n    d = e\ne = 2\nd = 3\n", [1, 4, 5]),
        ("c, d = 1, 2\n(e := 3)\n", [1]),
        ("c: int = e\ne = 1\nc += f\nf = 2\n", [1, 2, 3, 4]),
    ],
)
def test_the_statements_that_a_name_needs(text, lines):
    assert lines_needed(text, "c") == lines


# ---- The text of a spec ----------------------------------------------------------------------

FULL = {
    "version": 1,
    "name": "full",
    "problem": {
        "batch": "dynamic", "in_channels": 3, "out_channels": 8, "height": 20, "width": 21,
        "kernel_size": [3, 2], "stride": 1, "padding": "same", "dilation": [1, 2],
        "conv_bias": False,
    },
    "chain": [{"add": "shift"}, "gelu", {"group_norm": {"num_groups": 2, "eps": 0.00025}}],
    "schedule": {"strategy": "two_kernel"},
    "targets": ["sm_80", "sm_120"],
}  # fmt: skip


def test_a_spec_is_read_back_as_it_was(tmp_path):
    spec = load_spec(FULL)
    block = ImportedBlock("a.\n- b", "", "norm", spec, {"conv.weight": "a\nx: 1"})
    text = spec_text(spec, [block], "model\n.py:Net")
    (tmp_path / "full.yaml").write_text(text)
    assert load_spec(tmp_path / "full.yaml") == spec
    assert "conv_groups" not in text


def test_a_text_that_means_something_else_is_a_bug(monkeypatch):
    from kgen.importers import spec_text as module

    real = module._value
    monkeypatch.setattr(module, "_value", lambda value: "22" if value == 20 else real(value))
    with pytest.raises(BuildError, match="full: the text of the spec means another spec"):
        module.spec_text(load_spec(FULL), [], "model.py:Net")
