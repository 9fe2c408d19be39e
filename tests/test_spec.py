import copy
import json
import re

import pytest
from helpers import (
    SPECS,
    TEXT,
    demo,
    edited,
    flagship,
    issues_of,
    issues_of_text,
    only_issue,
    spec_of,
    variant,
)

from kgen.errors import SpecError, UsageError
from kgen.package import spec_from_canonical
from kgen.spec import json_schema, load_spec, parse_spec
from kgen.yaml_source import MAX_BYTES, parse_yaml


def line_of(text: str, needle: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if needle in line)


def parse(text: str):
    return parse_spec(parse_yaml(text.encode(), "demo.yaml"))


def test_the_text_that_every_other_test_breaks_is_itself_legal():
    assert issues_of_text(TEXT) == []
    assert parse(TEXT) == load_spec(demo())


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_shipped_specs_load_and_are_named_after_their_file(path):
    assert load_spec(path).name == path.stem


def test_there_are_shipped_specs():
    assert "conv8x32_k3_gn8" in {path.stem for path in SPECS}


# ---- D22: YAML that changes its meaning silently ----------------------------------------------


@pytest.mark.parametrize("written", ["1e-5", "1.0e-5", "0.00001", "1E-5"])
def test_eps_without_a_dot_is_a_number(written):
    eps = parse(edited("eps: 1e-5", f"eps: {written}")).norm.eps
    assert type(eps) is float
    assert eps == 1e-5


# passage of TEXT, what replaces it, the key that is named, part of the reason
D22 = {
    "groups true": ("  kernel_size: 3", "  kernel_size: 3\n  groups: true", "problem.groups",
                    "unknown key groups"),
    "groups empty": ("  kernel_size: 3", "  kernel_size: 3\n  groups:", "problem.groups",
                     "unknown key groups"),
    "name no": ("name: demo", "name: no", "name", "boolean"),
    "name true": ("name: demo", "name: true", "name", "expected text, got True (a boolean)"),
    "name 12": ("name: demo", "name: 12", "name", "expected text, got 12 (an integer)"),
    "kernel_size 3,3": ("kernel_size: 3", "kernel_size: 3,3", "problem.kernel_size", "'3,3'"),
    "threads 256.0": ("schedule:", "schedule:\n  threads: 256.0", "schedule.threads",
                      "expected an integer, got 256.0 (a float)"),
    "huge integer": ("in_channels: 3", "in_channels: 99999999999999999999", "problem.in_channels",
                     "too large: the greatest legal value is 2147483647"),
    "unknown key thread": ("schedule:", "schedule:\n  thread: 256", "schedule.thread",
                           "unknown key thread"),
    "integer true": ("in_channels: 3", "in_channels: true", "problem.in_channels",
                     "expected an integer, got True (a boolean)"),
    "integer text": ("in_channels: 3", 'in_channels: "3"', "problem.in_channels",
                     "expected an integer, got '3' (text)"),
    "integer empty": ("in_channels: 3", "in_channels:", "problem.in_channels",
                      "expected an integer, got None (empty)"),
    "integer date": ("in_channels: 3", "in_channels: 2024-01-01", "problem.in_channels",
                     "expected an integer"),
    "integer infinite": ("in_channels: 3", "in_channels: .inf", "problem.in_channels",
                         "expected an integer"),
    "knob empty": ("schedule:", "schedule:\n  threads:", "schedule.threads", "is empty"),
    "schedule empty": ("schedule:\n  strategy: two_kernel", "schedule:", "schedule",
                       "expected a mapping of keys to values, got None (empty)"),
    "eps text": ("eps: 1e-5", 'eps: "1e-5"', "chain[3].group_norm.eps", "expected a number"),
    "eps boolean": ("eps: 1e-5", "eps: true", "chain[3].group_norm.eps", "expected a number"),
    "eps nan": ("eps: 1e-5", "eps: .nan", "chain[3].group_norm.eps", "not a finite number"),
    "eps zero": ("eps: 1e-5", "eps: 0", "chain[3].group_norm.eps", "must be greater than 0"),
    "groups 4.0": ("num_groups: 4", "num_groups: 4.0", "chain[3].group_norm.num_groups",
                   "expected an integer"),
    "conv_bias no": ("  kernel_size: 3", "  kernel_size: 3\n  conv_bias: no", "problem.conv_bias",
                     "expected true or false, got 'no' (text)"),
    "conv_bias 1": ("  kernel_size: 3", "  kernel_size: 3\n  conv_bias: 1", "problem.conv_bias",
                    "expected true or false"),
    "version true": ("version: 1", "version: true", "version", "True is not a legal value"),
    "targets text": ("targets: [sm_90a]", "targets: sm_90a", "targets", "expected a list"),
}  # fmt: skip


@pytest.mark.parametrize("case", D22)
def test_wrong_values_name_key_line_and_reason(case):
    old, new, key, reason = D22[case]
    text = edited(old, new)
    (issue,) = issues_of_text(text)
    assert issue.path == key
    assert reason in issue.message
    leaf = re.sub(r"\[\d+\]", "", key).split(".")[-1]
    assert issue.line == line_of(text, f"{leaf}:")
    assert issue.render("demo.yaml").startswith(f"demo.yaml:{issue.line}: {key}: ")


def test_a_repeated_key_is_refused_with_both_values():
    text = edited("in_channels: 3", "in_channels: 3\n  in_channels: 16")
    (issue,) = issues_of_text(text)
    assert issue.line == line_of(text, "in_channels: 16")
    assert 'duplicate key "in_channels"' in issue.message
    assert '"16"' in issue.message


def test_a_missing_space_after_the_colon_is_shown_with_its_line():
    text = edited("in_channels: 3", "in_channels:3")
    (issue,) = issues_of_text(text)
    assert issue.line == line_of(text, "in_channels:3")
    assert "'in_channels:3'" in issue.message
    assert "space after the colon" in issue.hint


@pytest.mark.timeout(30)  # expanding it would take all time and memory
def test_an_alias_is_refused_before_it_is_expanded():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)]
    bomb = "\n".join(lines)  # 387 million leaves
    (issue,) = issues_of_text(bomb)
    assert "aliases" in issue.message
    assert issue.line == 2
    (issue,) = issues_of_text(edited("height: 19\n  width: 24", "height: &h 19\n  width: *h"))
    assert "aliases" in issue.message
    assert issue.line == 8


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("in_channels: 3", "<<: {in_channels: 3}", "merge keys"),
        ("in_channels: 3", 'in_channels: !!int "3"', "tags"),
        ("in_channels: 3", 'in_channels: !!python/object/apply:os.system ["id"]', "tags"),
        ("version: 1\n", "%YAML 1.1\n---\nversion: 1\n", "%YAML directive"),
    ],
)
def test_yaml_features_that_a_spec_has_no_use_for_are_refused(old, new, what):
    (issue,) = issues_of_text(edited(old, new))
    assert what in issue.message
    assert issue.line is not None


# ---- Files that are no spec ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "is empty"),
        (b"# nothing but a comment\n", "is empty"),
        (b"\n\n---\n", "is empty"),
        (b"hello", "not a mapping"),
        (b"- version: 1\n", "not a mapping"),
        (b"42\n", "not a mapping"),
        (b"a: [1, 2\n", "not valid YAML"),
        (b"a: b: c\n", "not valid YAML"),
        (b"version: 1\n\tname: x\n", "not valid YAML"),
        (b"name: \x00\n", "not valid YAML"),
        (b"[" * 5000, "nesting as deep as this is not allowed"),
        (b"a: 1" + b"0" * 5000 + b"\n", "a value of 5001 characters is not allowed"),
        (b"a: 2001-13-99\n", "'2001-13-99' is no value that YAML knows"),
        (b"? [[1, 2], [3]]\n: 4\n", "a list or a mapping as a key is not allowed"),
        (b"version: 1\nproblem: {{a: b}: 2}\n", "a list or a mapping as a key is not allowed"),
        (TEXT.encode() + b"---\n" + TEXT.encode(), "a second YAML document is not allowed"),
        (b"#" * (MAX_BYTES + 1), "at most"),
        (TEXT.encode("utf-16"), "not UTF-8"),
        (b"version: 1\nname: caf\xe9\n", "not UTF-8"),
    ],
)
def test_files_that_are_no_spec_are_refused(raw, reason):
    (issue,) = issues_of_text(raw)
    assert issue.path == ""
    assert reason in issue.message


def test_the_line_of_a_byte_that_is_not_utf8_is_named():
    (issue,) = issues_of_text(b"version: 1\nname: caf\xe9\n")
    assert issue.line == 2


def test_a_byte_order_mark_and_windows_line_ends_are_legal():
    assert parse("\ufeff" + TEXT) == parse(TEXT)
    assert parse(TEXT.replace("\n", "\r\n")) == parse(TEXT)


def test_a_document_end_marker_is_legal():
    assert parse("---\n" + TEXT + "...\n") == parse(TEXT)


def test_a_huge_hexadecimal_number_is_refused():
    (issue,) = issues_of_text(edited("in_channels: 3", "in_channels: 0x1" + "0" * 900))
    assert issue.path == "problem.in_channels"
    assert len(issue.message) < 200
    (issue,) = issues_of_text(edited("in_channels: 3", "in_channels: 0x1" + "0" * 5000))
    assert issue.message == "a value of 5003 characters is not allowed in a spec"
    assert issue.line == TEXT.splitlines().index("  in_channels: 3") + 1


def test_files_that_cannot_be_read_are_usage_errors(tmp_path):
    with pytest.raises(UsageError, match=r"missing\.yaml: no such file"):
        load_spec(tmp_path / "missing.yaml")
    with pytest.raises(UsageError, match="is a folder"):
        load_spec(tmp_path)
    good = tmp_path / "good.yaml"
    good.write_text(TEXT)
    assert load_spec(good).name == "demo"
    with pytest.raises(UsageError, match="cannot be read: Not a directory"):
        load_spec(good / "below")


# ---- D24: names ------------------------------------------------------------------------------

BAD_NAMES = [
    "my-kernel", "3x3", "double", "", 'k(){} int z=system("id"); void k2', "two\nlines",
    "../../x", "k*/", "/etc/passwd", "a b", "a.b", "a__b", "_a", "__init__", "class", "lambda",
    "kernel\u00e9", "\uff41", "k\n", "n" * 300, "n" * 65, "yes",
    "Null", "threadIdx", "main", "{{name}}",
]  # fmt: skip


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_that_are_no_identifiers_are_refused(name):
    values = variant()
    values["name"] = name
    issue = only_issue(values)
    assert issue.path == "name"
    assert "\n" not in issue.render("spec").split("\n  hint:")[0]
    suggested = issue.hint.removeprefix("for instance ")
    assert issues_of(variant(name=suggested)) == []


@pytest.mark.parametrize("name", ["a", "conv8x32_k3_gn8", "n" * 64, "Kernel_2"])
def test_identifiers_are_legal_names(name):
    assert load_spec(variant(name=name)).name == name


@pytest.mark.parametrize("name", [one for one in BAD_NAMES if one not in ("n" * 65, "n" * 300)])
def test_parameter_names_follow_the_same_rule(name):
    values = variant()
    values["chain"][0] = {"add": name}
    issue = only_issue(values)
    assert issue.path == "chain[0].add"


@pytest.mark.parametrize(
    "name", ["forward", "conv", "group_norm", "training", "x", "parameters", "sigmoid", "self"]
)
def test_parameter_names_that_the_module_needs_are_taken(name):
    values = variant()
    values["chain"][1] = {"mul": name}
    issue = only_issue(values)
    assert issue.path == "chain[1].mul"
    assert "taken" in issue.message
    values["chain"][1] = {"mul": issue.hint.removeprefix("for instance ")}
    assert issues_of(values) == []


def test_a_parameter_name_used_twice_is_refused():
    values = variant()
    values["chain"][1] = {"mul": "bias"}
    issue = only_issue(values)
    assert "used twice (first in chain[0])" in issue.message


def test_the_dtype_comes_from_a_closed_set():
    issue = only_issue(variant(dtype="float; int q"))
    assert issue.path == "problem.dtype"
    assert "not a legal value" in issue.message


# ---- Unknown keys, unsupported options -------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "hint"),
    [
        ("schedule:", "schedule:\n  thread: 64", "did you mean threads?"),
        ("schedule:", "schedul:", "did you mean schedule?"),
        ("  kernel_size: 3", "  kernel_size: 3\n  paddings: 1", "did you mean padding?"),
        ("eps: 1e-5", "ep: 1e-5", "did you mean eps?"),
        ("- sigmoid", "- sigmod", "did you mean sigmoid?"),
        ("- sigmoid", "- frobnicate", "known ops: add, mul, sigmoid"),
        ("  kernel_size: 3", "  kernel_size: 3\n  zzz: 1", "known keys: batch, in_channels"),
    ],
)
def test_unknown_keys_come_with_the_nearest_known_one(old, new, hint):
    (issue,) = issues_of_text(edited(old, new))
    assert issue.hint.startswith(hint)


def test_groups_alone_is_refused_with_both_meanings():
    for key in ("groups",):
        issue = only_issue(variant(**{key: 4}))
        assert "conv_groups" in issue.hint
        assert "num_groups" in issue.hint


def test_bias_alone_is_refused_with_both_meanings():
    issue = only_issue(variant(bias=True))
    assert "conv_bias" in issue.hint
    assert "add: bias" in issue.hint


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("dtype", "float16", "'float16' is not supported yet; only float32"),
        ("dtype", "bfloat16", "not supported yet"),
        ("dtype", "float64", "not supported yet"),
        ("dtype", "float3", "not a legal value"),
        ("layout", "channels_last", "not supported yet; only nchw"),
        ("layout", "nhcw", "not a legal value"),
        ("padding_mode", "reflect", "not supported yet; only zeros"),
        ("padding_mode", "replicate", "not supported yet"),
        ("padding_mode", "circular", "not supported yet"),
        ("conv_groups", 2, "grouped and depthwise convolution (2 groups) is not supported yet"),
        ("conv_groups", 0, "not a legal value"),
        ("conv_groups", True, "not a legal value"),
        ("strategy", "fastest", "not a legal value"),
        ("math", "fp8", "not a legal value"),
        ("version", 2, "not a legal value; expected 1"),
    ],
)
def test_options_that_are_not_supported_are_refused_by_name(key, value, reason):
    issue = only_issue(variant(**{key: value}))
    assert issue.path.split(".")[-1] == key
    assert reason in issue.message


def test_the_supported_value_of_each_such_option_is_accepted():
    values = variant(
        dtype="float32", layout="nchw", padding_mode="zeros", conv_groups=1, math="ffma",
        conv_bias=False,
    )  # fmt: skip
    assert issues_of(values) == []


@pytest.mark.parametrize("target", ["sm_70", "sm_130", "90a", "sm_90"])
def test_targets_come_from_the_list(target):
    issue = only_issue(variant(targets=["sm_90a", target]))
    assert issue.path == "targets[1]"
    assert "sm_80, sm_86, sm_89, sm_90a, sm_100a, sm_120" in issue.message


def test_a_target_named_twice_is_refused():
    assert only_issue(variant(targets=["sm_86", "sm_86"])).path == "targets[1]"
    assert issues_of(variant(targets=["sm_86", "sm_80"])) == []


@pytest.mark.parametrize("key", ["version", "name", "problem", "chain"])
def test_a_missing_key_is_named(key):
    issue = only_issue(variant(**{key: None}))
    assert issue.path == key
    assert issue.message == "is missing"


@pytest.mark.parametrize(
    "key", ["batch", "in_channels", "out_channels", "height", "width", "kernel_size"]
)
def test_a_missing_dimension_is_named(key):
    issue = only_issue(variant(**{key: None}))
    assert issue.path == f"problem.{key}"


# ---- All at once, in order -------------------------------------------------------------------


def test_every_mistake_is_reported_at_once_in_line_order():
    text = """\
version: 2
name: 3x3
problem:
  batch: many
  in_channels: 0
  out_channels: 30
  heigth: 19
  width: 24
  kernel_size: [3, 3, 3]
  dtype: float16
chain:
  - add: bias
  - mul: bias
  - sigmod
  - group_norm: {num_groups: 8, eps: 0}
schedule:
  thread: 64
targets: [sm_70]
"""
    issues = issues_of_text(text)
    assert [issue.line for issue in issues] == sorted(issue.line or 0 for issue in issues)
    assert {
        "version", "name", "problem.batch", "problem.in_channels", "problem.heigth",
        "problem.height", "problem.kernel_size", "problem.dtype", "chain[2]",
        "chain[3].group_norm.eps", "schedule.thread", "targets[0]",
    } <= {issue.path for issue in issues}  # fmt: skip


def test_semantic_mistakes_are_reported_beside_structural_ones():
    text = edited("num_groups: 4", "num_groups: 5").replace("version: 1", "version: 2")
    text = text.replace("schedule:\n", "schedule:\n  threads: 33\n")
    paths = [issue.path for issue in issues_of_text(text)]
    assert paths == ["version", "chain[3].group_norm.num_groups", "schedule.threads"]


def test_one_mistake_is_reported_once():
    for values in (
        variant(out_channels=0),
        variant(height="tall"),
        variant(kernel_size=0),
        variant(name=3),
    ):
        only_issue(values)


def test_the_error_text_has_one_line_an_issue_and_one_a_hint():
    with pytest.raises(SpecError) as caught:
        parse(edited("num_groups: 4", "num_groups: 5").replace("version: 1", "version: 2"))
    assert str(caught.value).splitlines() == [
        "demo.yaml:1: version: 2 is not a legal value; expected 1",
        "demo.yaml:14: chain[3].group_norm.num_groups: num_groups 5 does not divide "
        "out_channels 12",
        "  hint: nearest legal value 4; num_groups must be one of 1, 2, 3, 4, 6, 12",
    ]


# ---- Forms -----------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["kernel_size", "stride", "dilation", "padding"])
def test_an_integer_stands_for_a_pair(key):
    assert getattr(load_spec(variant(**{key: 2})).problem, key) == (2, 2)
    assert getattr(load_spec(variant(**{key: [1, 2]})).problem, key) == (1, 2)


@pytest.mark.parametrize("key", ["kernel_size", "stride", "dilation", "padding"])
@pytest.mark.parametrize(
    "value", [[1], [1, 1, 1], [], "1x1", {"h": 1}, [1, "1"], [1, True], 1.0, -1, [1, -1], True]
)
def test_other_forms_of_a_pair_are_refused(key, value):
    issue = only_issue(variant(**{key: value}))
    assert issue.path.startswith(f"problem.{key}")


def test_padding_same_is_legal_and_other_words_are_not():
    assert load_spec(variant(padding="same")).problem.padding == "same"
    assert "`same`" in only_issue(variant(padding="valid")).message


def test_a_batch_may_be_dynamic_and_nothing_else_may():
    assert load_spec(variant(batch="dynamic")).problem.batch == "dynamic"
    assert only_issue(variant(batch="dynamc")).path == "problem.batch"
    assert only_issue(variant(batch=0)).path == "problem.batch"
    assert only_issue(variant(height="dynamic")).path == "problem.height"


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        (7, "expected an op"),
        (None, "expected an op"),
        (["sigmoid"], "expected an op"),
        ({"add": "a", "mul": "b"}, "expected an op"),
        ("add", "needs the name of a per-channel parameter"),
        ({"add": 3}, "needs the name of a per-channel parameter"),
        ({"sigmoid": "x"}, "takes no argument"),
        ({"group_norm": 4}, "needs a mapping"),
        ("group_norm", "needs a mapping"),
        ({"layer_norm": {}}, "unknown op"),
    ],
)
def test_chain_items_of_another_form_are_refused(item, reason):
    values = variant()
    values["chain"][2] = item
    issue = only_issue(values)
    assert issue.path == "chain[2]"
    assert reason in issue.message


def test_an_empty_chain_is_refused():
    assert only_issue(variant(chain=[])).message == "must not be empty"


# ---- Identity --------------------------------------------------------------------------------


def test_the_hash_does_not_depend_on_how_the_spec_is_written():
    rewritten = """\
# the same content: other order, quotes, pairs and defaults written out
targets: ["sm_90a"]
schedule: {strategy: 'two_kernel'}
chain: [{add: "bias"}, mul: scale, sigmoid, {group_norm: {eps: 0.00001, num_groups: 4}}]
problem: {kernel_size: [3, 3], width: 24, height: 0x13, out_channels: 12, in_channels: 3,
  batch: 2, stride: 1, padding: [0, 0], dilation: 1, conv_bias: true, conv_groups: 1,
  dtype: float32, layout: nchw, padding_mode: zeros}
name: demo
version: 1
"""
    assert parse(rewritten) == parse(TEXT)
    assert parse(rewritten).hash() == parse(TEXT).hash()
    assert re.fullmatch(r"[0-9a-f]{16}", parse(TEXT).hash())


@pytest.mark.parametrize(
    "change",
    [
        {"name": "other"}, {"batch": 3}, {"batch": "dynamic"}, {"in_channels": 4}, {"height": 20},
        {"kernel_size": [3, 1]}, {"padding": 1}, {"padding": "same"}, {"conv_bias": False},
        {"num_groups": 2}, {"eps": 1e-6}, {"strategy": "hybrid"}, {"threads": 64},
        {"targets": ["sm_80"]},
        {"chain": [{"add": "b"}, {"mul": "scale"}, "sigmoid", {"group_norm": {"num_groups": 4}}]},
    ],
    ids=str,
)  # fmt: skip
def test_the_hash_changes_with_every_part_of_the_content(change):
    assert load_spec(variant(**change)).hash() != parse(TEXT).hash()


def test_a_spec_is_frozen_and_hashable():
    spec = parse(TEXT)
    assert len({spec, parse(TEXT)}) == 1
    with pytest.raises(ValueError, match="frozen"):
        spec.name = "other"


def test_loading_leaves_the_mapping_alone():
    values = flagship()
    before = copy.deepcopy(values)
    load_spec(values)
    assert values == before


# ---- JSON Schema -----------------------------------------------------------------------------


def test_the_schema_is_plain_json_and_names_every_key():
    schema = json.loads(json.dumps(json_schema()))
    assert schema["$schema"].endswith("2020-12/schema")
    assert set(schema["required"]) == {"version", "name", "problem", "chain"}
    assert schema["additionalProperties"] is False


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_shipped_specs_are_valid_under_the_schema(path):
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator(json_schema()).validate(
        parse_yaml(path.read_bytes(), path.name).values
    )


@pytest.mark.parametrize(
    "change",
    [
        {"thread": 3}, {"in_channels": "8"}, {"in_channels": True}, {"kernel_size": [3, 3, 3]},
        {"padding": -1}, {"batch": "dynamc"}, {"dtype": "float16"}, {"strategy": "fast"},
        {"threads": "64"}, {"targets": ["sm_70"]}, {"chain": ["sigmod"]}, {"chain": []},
        {"version": 2}, {"eps": 0}, {"eps": "1e-5"},
    ],
    ids=str,
)  # fmt: skip
def test_wrong_specs_are_invalid_under_the_schema(change):
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(json_schema())
    assert validator.is_valid(demo())
    assert not validator.is_valid(variant(**change))


def test_with_strategy_leaves_the_knobs_to_the_plan():
    spec = spec_of(schedule={"strategy": "two_kernel", "tile_h": 8})
    assert spec.with_strategy("two_kernel") is spec
    other = spec.with_strategy("hybrid")
    assert (other.schedule.strategy, other.schedule.tile_h) == ("hybrid", None)
    assert other.problem == spec.problem
    assert other.hash() == spec_of(schedule={"strategy": "hybrid"}).hash()
    with pytest.raises(ValueError, match="winograd"):
        spec.with_strategy("winograd")


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_canonical_values_give_the_same_spec_again(path):
    spec = load_spec(path)
    for one in (spec, spec.with_strategy("hybrid")):
        plain = json.loads(json.dumps(one.canonical()))
        assert spec_from_canonical(plain) == one
        assert spec_from_canonical(plain).hash() == one.hash()
