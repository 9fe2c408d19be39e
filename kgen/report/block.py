"""A record's block: its spec, plan and source, and the block in words."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from kgen.bench.record import Record
from kgen.emit import render
from kgen.errors import KgenError
from kgen.explain import explain
from kgen.ops import OPS
from kgen.plan import Plan, make_plan
from kgen.report.figures import size
from kgen.report.text import TIMES, one_line
from kgen.spec import Pointwise, Spec, parse_spec
from kgen.yaml_source import parse_yaml

ARROW = "\u2192"


@dataclass(frozen=True)
class Planned:
    """What this version of kgen makes of a record's spec. facts: as `kgen explain` gives them."""

    spec: Spec
    plan: Plan
    facts: dict[str, Any]
    source: str

    @property
    def digest(self) -> str:
        """SHA-256 of the source, hexadecimal, as a row's kernel_sha256."""
        return hashlib.sha256(self.source.encode()).hexdigest()


def planned(record: Record) -> tuple[Planned | None, str]:
    """Spec, plan and source of a record, or None and the reason in one line.

    A record may be older than this kgen, whose rules may refuse its spec: the measurements stand
    all the same.
    """
    try:
        spec = parse_spec(parse_yaml(record.spec.encode("utf-8", "replace"), "record"))
        plan = make_plan(spec)
        return Planned(spec, plan, explain(spec, plan), render(spec, plan)["kernel.cu"]), ""
    except KgenError as error:
        return None, one_line(str(error), 300)


def title(record: Record, spec: Spec | None) -> str:
    """The block in words, with the size that was measured; the record's name if it has no spec."""
    at = f"at x {size(record.x)}"
    if spec is None:
        return f"{one_line(record.name, 80)} {at}"
    problem, norm = spec.problem, spec.norm
    rows, columns = problem.kernel_size
    conv = [
        f"conv {problem.in_channels}{ARROW}{problem.out_channels} {rows}{TIMES}{columns}",
        *_unless("stride", problem.stride, (1, 1)),
        *_unless("padding", problem.padding, (0, 0)),
        *_unless("dilation", problem.dilation, (1, 1)),
        *([] if problem.conv_bias else ["without bias"]),
    ]
    chain = [_step(step) for step in spec.pointwise]
    return f"{', '.join([' '.join(conv), *chain, f'GroupNorm({norm.num_groups})'])} {at}"


def _unless(name: str, value: object, default: object) -> list[str]:
    if value == default:
        return []
    if isinstance(value, tuple):
        value = value[0] if value[0] == value[1] else TIMES.join(map(str, value))
    return [f"{name} {value}"]


def _step(step: Pointwise) -> str:
    """`+ bias`, `x scale` (with a multiplication sign) or `sigmoid`."""
    if step.parameter is None:
        return step.op
    sign = OPS[step.op].fold
    return f"{sign.replace('*', TIMES) if sign else step.op} {step.parameter}"
