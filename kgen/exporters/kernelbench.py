"""Spec -> one self-contained Python file with `ModelNew`, as KernelBench takes candidates."""

from __future__ import annotations

from kgen.emit import render_template
from kgen.errors import BuildError
from kgen.plan import make_plan
from kgen.spec import Spec

TEMPLATE = "kernelbench.py.j2"


def kernelbench_source(spec: Spec) -> str:
    """The text of the file for a checked spec; the same spec gives the same bytes.

    The module takes x [N, C_in, H, W] float32, contiguous, on a CUDA device, and gives
    y [N, C_out, P, Q]. It compiles itself with torch's `load_inline` where it is loaded: neither
    kgen nor any file beside it is needed. Raises: BuildError if a template is wrong.
    """
    plan = make_plan(spec)
    if '"""' in render_template(plan.template, plan=plan):
        raise BuildError(f"{spec.name}: its kernel holds triple quotes, which would end its string")
    return render_template(TEMPLATE, plan=plan)
