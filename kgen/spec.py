"""The spec: what a user writes. YAML in, a frozen and structurally valid `Spec` out.

Structure is checked here, rules between keys in `kgen.constraints`; `load_spec` reports both.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from kgen.arch import ARCHS, DEFAULT_TARGET
from kgen.errors import Issue, SpecError
from kgen.math_kinds import ALL_MATHS
from kgen.ops import OPS
from kgen.spec_errors import dotted, explain, key_path, quote, split, with_stand_ins
from kgen.yaml_source import KeyPath, YamlSource, read_yaml

INT_MAX = 2**31 - 1
FUSED = ("single_pass", "recompute")
STRATEGIES = ("hybrid", "two_kernel", *FUSED)
NORMS = ("group_norm",)

Count = Annotated[int, Field(ge=1, le=INT_MAX)]
_COUNT_SCHEMA = {"type": "integer", "minimum": 1, "maximum": INT_MAX}


def _refusal(message: str, given: object, hint: str = "", **names: str) -> PydanticCustomError:
    return PydanticCustomError("refusal", message, {"given": quote(given), "hint": hint, **names})


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _pair(value: object) -> object:
    """`3` stands for `[3, 3]`; a list must hold two integers, for height and width."""
    if type(value) is int:
        if not _is_count(value, 1):
            raise _refusal("expected an integer from 1 to 2147483647, got {given}", value)
        return (value, value)
    if isinstance(value, (list, tuple)) and len(value) == 2:
        return tuple(value)
    raise _refusal("expected an integer or a list of two, [height, width], got {given}", value)


def _pair_schema(minimum: int) -> WithJsonSchema:
    integer = {"type": "integer", "minimum": minimum, "maximum": INT_MAX}
    pair = {"type": "array", "items": integer, "minItems": 2, "maxItems": 2}
    return WithJsonSchema({"anyOf": [integer, pair]})


def _is_count(value: object, least: int) -> bool:
    return type(value) is int and least <= value <= INT_MAX


def _padding(value: object) -> tuple[int, int] | Literal["same"]:
    pair = (value, value) if type(value) is int else value
    if value == "same":
        return "same"
    if isinstance(pair, (list, tuple)) and [_is_count(one, 0) for one in pair] == [True, True]:
        return (pair[0], pair[1])
    raise _refusal("expected `same`, an integer >= 0 or [height, width], got {given}", value)


def _batch(value: object) -> int | Literal["dynamic"]:
    if value == "dynamic":
        return "dynamic"
    if isinstance(value, int) and _is_count(value, 1):
        return value
    raise _refusal("expected an integer from 1 to 2147483647 or `dynamic`, got {given}", value)


Size = Annotated[tuple[Count, Count], BeforeValidator(_pair), _pair_schema(1)]
Padding = Annotated[
    tuple[int, int] | Literal["same"],
    BeforeValidator(_padding),
    WithJsonSchema({"anyOf": [_pair_schema(0).json_schema, {"const": "same"}]}),
]
Batch = Annotated[
    int | Literal["dynamic"],
    BeforeValidator(_batch),
    WithJsonSchema({"anyOf": [_COUNT_SCHEMA, {"const": "dynamic"}]}),
]


def _only(*supported: object, unsupported: tuple[object, ...] = ()) -> BeforeValidator:
    """Accept what kgen can do; tell what it knows but cannot do from what it has never heard of."""

    def check(value: object) -> object:
        if any(type(value) is type(one) and value == one for one in supported):
            return value
        listed = ", ".join(str(one) for one in supported)
        if value in unsupported:
            raise _refusal("{given} is not supported yet; only {listed}", value, listed=listed)
        raise _refusal("{given} is not a legal value; expected {listed}", value, listed=listed)

    return BeforeValidator(check)


def _not_empty(value: object) -> object:
    if value is None:
        raise _refusal("is empty; write a value or leave the key out", value)
    return value


def _conv_groups(value: object) -> object:
    if type(value) is int and value > 1:
        message = "grouped and depthwise convolution ({given} groups) is not supported yet; only 1"
        raise _refusal(message, value)
    return _only(1).func(value)  # type: ignore[call-arg]


# A key that may be left out; unlike the default, an empty value in a file is refused.
Knob = Annotated[Count | None, BeforeValidator(_not_empty), WithJsonSchema(_COUNT_SCHEMA)]


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class Problem(_Model):
    """The block's dimensions. x: [batch, in_channels, height, width], NCHW, float32."""

    batch: Batch
    in_channels: Count
    out_channels: Count
    height: Count
    width: Count
    kernel_size: Size
    stride: Size = (1, 1)
    padding: Padding = (0, 0)
    dilation: Size = (1, 1)
    conv_bias: bool = True
    conv_groups: Annotated[int, BeforeValidator(_conv_groups)] = 1
    padding_mode: Annotated[
        Literal["zeros"], _only("zeros", unsupported=("reflect", "replicate", "circular"))
    ] = "zeros"
    layout: Annotated[Literal["nchw"], _only("nchw", unsupported=("channels_last", "nhwc"))] = (
        "nchw"
    )
    dtype: Annotated[
        Literal["float32"], _only("float32", unsupported=("float16", "bfloat16", "float64"))
    ] = "float32"


class Pointwise(_Model):
    """One pointwise op of the chain; `parameter` names its learned [C_out, 1, 1] parameter."""

    op: str
    parameter: str | None = None


class GroupNorm(_Model):
    """GroupNorm over the chain's result: biased variance, learned weight and bias [C_out]."""

    op: Literal["group_norm"] = "group_norm"
    num_groups: int
    eps: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-5


def _step(value: object) -> Pointwise | GroupNorm:
    """One chain item, `sigmoid`, `{add: bias}` or `{group_norm: {num_groups: 8}}`, as a step."""
    if isinstance(value, (Pointwise, GroupNorm)):
        return value
    if isinstance(value, str):
        name, argument = value, None
    elif isinstance(value, Mapping) and len(value) == 1:
        ((name, argument),) = value.items()
    else:
        raise _refusal("expected an op or one `op: argument` pair, got {given}", value)
    known = (*OPS, *NORMS)
    if name not in known:
        near = difflib.get_close_matches(str(name), known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known ops: {', '.join(known)}"
        raise _refusal("unknown op {given}", name, hint)
    if name in NORMS:
        if not isinstance(argument, Mapping):
            hint = f"write `- {name}: {{num_groups: 8, eps: 1e-5}}`"
            raise _refusal(f"{name} needs a mapping, got {{given}}", argument, hint)
        return GroupNorm.model_validate(dict(argument))
    if OPS[name].takes_parameter:
        if not isinstance(argument, str):
            message = f"{name} needs the name of a per-channel parameter, got {{given}}"
            raise _refusal(message, argument, f"write `- {name}: bias`")
        return Pointwise(op=name, parameter=argument)
    if argument is not None:
        raise _refusal(f"{name} takes no argument, got {{given}}", argument, f"write `- {name}`")
    return Pointwise(op=name)


_CHAIN_SCHEMA = {
    "type": "array",
    "minItems": 1,
    "items": {
        "anyOf": [
            {"enum": [op.name for op in OPS.values() if not op.takes_parameter]},
            *(
                {
                    "type": "object",
                    "properties": {op.name: {"type": "string"}},
                    "required": [op.name],
                    "additionalProperties": False,
                }
                for op in OPS.values()
                if op.takes_parameter
            ),
            {
                "type": "object",
                "properties": {
                    "group_norm": {
                        "type": "object",
                        "properties": {
                            "num_groups": _COUNT_SCHEMA,
                            "eps": {"type": "number", "exclusiveMinimum": 0},
                        },
                        "required": ["num_groups"],
                        "additionalProperties": False,
                    }
                },
                "required": ["group_norm"],
                "additionalProperties": False,
            },
        ]
    },
}


class Schedule(_Model):
    """How to compute it. A key left out is chosen by the plan's cost model.

    strategy: `hybrid` (library convolution, then one fused kernel), `two_kernel` (direct
    convolution with fused chain and partial moments, then normalise in place), `single_pass`
    (every sample stays on the chip until it is normalised) or `recompute` (once for the
    statistics, once more to store).
    math: `ffma` in two_kernel; on tensor cores, in single_pass and recompute, `fp16x3`, `bf16x3`,
    `tf32x3` or, below fp32's accuracy, `tf32`.
    threads: of a block; in hybrid of the fused kernel. tile_h, tile_w: output pixels of a
    tile, not in hybrid. Of two_kernel alone: tile_k: output channels of a block.
    tile_c: input channels staged in shared memory at a time. pixels: output rows of one
    column that a thread computes.
    """

    strategy: Annotated[
        Literal["hybrid", "two_kernel", "single_pass", "recompute"] | None,
        _only(*STRATEGIES),
        BeforeValidator(_not_empty),
        WithJsonSchema({"enum": list(STRATEGIES)}),
    ] = None
    math: Annotated[
        Literal["ffma", "fp16x3", "bf16x3", "tf32x3", "tf32"] | None,
        _only(*ALL_MATHS),
        BeforeValidator(_not_empty),
        WithJsonSchema({"enum": list(ALL_MATHS)}),
    ] = None
    tile_h: Knob = None
    tile_w: Knob = None
    tile_k: Knob = None
    tile_c: Knob = None
    pixels: Knob = None
    threads: Knob = None


class Spec(_Model):
    """One block at one set of dimensions. Hashable and frozen; equal specs have equal hashes."""

    version: Annotated[Literal[1], _only(1)]
    name: str
    problem: Problem
    chain: Annotated[
        tuple[Annotated[Pointwise | GroupNorm, BeforeValidator(_step)], ...],
        BeforeValidator(_as_tuple),
        Field(min_length=1),
        WithJsonSchema(_CHAIN_SCHEMA),
    ]
    schedule: Schedule = Schedule()
    targets: Annotated[
        tuple[Annotated[str, _only(*ARCHS), WithJsonSchema({"enum": list(ARCHS)})], ...],
        BeforeValidator(_as_tuple),
        Field(min_length=1),
    ] = (DEFAULT_TARGET,)

    @property
    def norm(self) -> GroupNorm:
        """The GroupNorm that ends the chain (a rule of `kgen.constraints`)."""
        last = self.chain[-1]
        assert isinstance(last, GroupNorm), "check(spec) was not called"
        return last

    @property
    def pointwise(self) -> tuple[Pointwise, ...]:
        """The chain without its norm."""
        return tuple(step for step in self.chain if isinstance(step, Pointwise))

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the chain's learned parameters, in order."""
        return tuple(step.parameter for step in self.pointwise if step.parameter is not None)

    def with_strategy(self, strategy: str) -> Spec:
        """The same block computed another way, knobs left to the plan; itself if it is that way."""
        if self.schedule.strategy == strategy:
            return self
        return self.model_copy(update={"schedule": Schedule.model_validate({"strategy": strategy})})

    def canonical(self) -> dict[str, Any]:
        """Plain JSON values, defaults filled in; the same for every way of writing the spec."""
        return self.model_dump(mode="json")

    def hash(self) -> str:
        """16 hex digits that identify the spec's content; independent of file and comments."""
        text = json.dumps(self.canonical(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a spec file, for editors."""
    schema = Spec.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "kgen spec"
    return schema


def load_spec(source: str | os.PathLike[str] | Mapping[str, Any]) -> Spec:
    """Read and check a spec: a path to a YAML file, or its content as a mapping.

    Raises: SpecError with every issue, structural and semantic, in the order of the file's
    lines; UsageError if the file cannot be read.
    """
    if isinstance(source, Mapping):
        return parse_spec(YamlSource("spec", dict(source)))
    return parse_spec(read_yaml(Path(source)))


def parse_spec(source: YamlSource) -> Spec:
    """Validate parsed YAML. Raises: SpecError."""
    from kgen.constraints import check

    spec, issues, invalid = _structure(source)
    if spec is not None:
        issues += [
            Issue(issue.path, issue.message, issue.hint, source.line_of(split(issue.path)))
            for issue in check(spec, skip=invalid)
        ]
    if issues:
        raise SpecError(source.name, sorted(issues, key=lambda issue: issue.line or 0))
    assert spec is not None
    return spec


def _structure(source: YamlSource) -> tuple[Spec | None, list[Issue], frozenset[str]]:
    """Structural validation.

    Returns the spec, the issues and the dotted paths that are invalid. Where only some keys are
    wrong, the spec holds stand-in values for them, so that the rules that do not read those keys
    can still be checked; None where not even that is possible.
    """
    try:
        return Spec.model_validate(source.values), [], frozenset()
    except ValidationError as error:
        issues: dict[KeyPath, Issue] = {}
        for item in error.errors(include_url=False):
            path = key_path(item["loc"])
            message, hint = explain(item, path, _keys_beside(path))
            issues.setdefault(path, Issue(dotted(path), message, hint, source.line_of(path)))
    stand_in = with_stand_ins(source.values, list(issues))
    try:
        spec = Spec.model_validate(stand_in)
    except ValidationError:
        spec = None
    return spec, list(issues.values()), frozenset(issue.path for issue in issues.values())


def _keys_beside(path: KeyPath) -> list[str]:
    """The legal keys of the mapping that holds the key at `path`."""
    if path[:1] == ("chain",):
        return ["num_groups", "eps"]
    models: dict[str | int, type[BaseModel]] = {"problem": Problem, "schedule": Schedule}
    return list((models.get(path[0], Spec) if len(path) > 1 else Spec).model_fields)
