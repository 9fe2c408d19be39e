"""A spec as the text of a YAML file, with what it came from as comments."""

from __future__ import annotations

from typing import Any

from kgen.errors import BuildError
from kgen.importers.report import ImportedBlock
from kgen.spec import GroupNorm, Pointwise, Problem, Spec, parse_spec
from kgen.yaml_source import parse_yaml


def spec_text(spec: Spec, blocks: list[ImportedBlock], model: str) -> str:
    """The file of a spec that `blocks` of `model` share.

    Raises: BuildError if the text would not be read back as the same spec.
    """
    lines = [f"# {line}" for line in _origin(blocks, model)]
    lines += ["version: 1", f"name: {spec.name}", "problem:"]
    problem = spec.problem.model_dump()
    for key, field in Problem.model_fields.items():
        if field.is_required() or problem[key] != field.default:
            lines.append(f"  {key}: {_value(problem[key])}")
    lines += ["chain:", *(f"  - {_step(step)}" for step in spec.chain)]
    given = spec.schedule.model_dump(exclude_none=True)
    if given:
        lines += ["schedule:", *(f"  {key}: {value}" for key, value in given.items())]
    lines.append(f"targets: [{', '.join(spec.targets)}]")
    text = "\n".join(lines) + "\n"
    if parse_spec(parse_yaml(text.encode(), spec.name)) != spec:
        raise BuildError(f"{spec.name}: the text of the spec means another spec; a bug in kgen")
    return text


def _origin(blocks: list[ImportedBlock], model: str) -> list[str]:
    lines = [f"Found in {_printable(model)} by `kgen import`."]
    for block in blocks:
        lines.append(f"{_printable(block.path)}: the block's parameters, and the model's")
        width = max(len(key) for key in block.parameters)
        for key, path in block.parameters.items():
            lines.append(f"  {key:{width}}  {_printable(path)}")
    return lines


def _printable(text: str) -> str:
    return "".join(one if one.isprintable() else "?" for one in text)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return str(value[0]) if len(set(value)) == 1 else f"[{value[0]}, {value[1]}]"
    return str(value)


def _step(step: Pointwise | GroupNorm) -> str:
    if isinstance(step, GroupNorm):
        return f"group_norm: {{num_groups: {step.num_groups}, eps: {step.eps!r}}}"
    return step.op if step.parameter is None else f"{step.op}: {step.parameter}"
