"""Specs to start from, and small tools that several test files share."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from kgen.constraints import check
from kgen.errors import Issue, SpecError
from kgen.spec import Spec, load_spec, parse_spec
from kgen.yaml_source import parse_yaml, read_yaml

ROOT = Path(__file__).resolve().parent.parent
SPECS = sorted((ROOT / "specs").glob("*.yaml"))
TESTS = ROOT / "tests"

# Small, and every dimension differs from every other, so that swapped ones are seen.
TEXT = """\
version: 1
name: demo
problem:
  batch: 2
  in_channels: 3
  out_channels: 12
  height: 19
  width: 24
  kernel_size: 3
chain:
  - add: bias
  - mul: scale
  - sigmoid
  - group_norm: {num_groups: 4, eps: 1e-5}
schedule:
  strategy: two_kernel
targets: [sm_90a]
"""


def flagship() -> dict[str, Any]:
    """The content of specs/conv8x32_k3_gn8.yaml as a fresh mapping."""
    values: dict[str, Any] = read_yaml(ROOT / "specs" / "conv8x32_k3_gn8.yaml").values
    return copy.deepcopy(values)


def demo() -> dict[str, Any]:
    """The content of TEXT as a fresh mapping."""
    values: dict[str, Any] = parse_yaml(TEXT.encode(), "demo.yaml").values
    return values


def variant(base: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """The base (default: `demo()`) with keys of it, of problem, schedule or group_norm changed.

    `None` removes a key; schedule={...} replaces the whole schedule.
    """
    values = demo() if base is None else copy.deepcopy(base)
    for key, value in changes.items():
        if key in ("num_groups", "eps"):
            target = values["chain"][-1]["group_norm"]
        elif key in ("version", "name", "chain", "schedule", "targets", "problem"):
            target = values
        elif key in ("strategy", "math", "threads", "pixels") or key.startswith("tile_"):
            target = values.setdefault("schedule", {})
        else:
            target = values["problem"]
        if value is None:
            target.pop(key, None)
        else:
            target[key] = value
    return values


def spec_of(base: dict[str, Any] | None = None, **changes: Any) -> Spec:
    """A checked Spec of `variant(base, **changes)`."""
    return load_spec(variant(base, **changes))


def issues_of(values: dict[str, Any]) -> list[Issue]:
    """Every issue of a spec given as a mapping; empty if it is legal."""
    try:
        load_spec(values)
    except SpecError as error:
        return list(error.issues)
    return []


def only_issue(values: dict[str, Any]) -> Issue:
    """The one issue of a spec; fails if there are none or several."""
    issues = issues_of(values)
    assert len(issues) == 1, [issue.render("spec") for issue in issues]
    return issues[0]


def issues_of_text(text: str | bytes) -> list[Issue]:
    """Every issue of a spec file's text; empty if it is legal."""
    raw = text if isinstance(text, bytes) else text.encode()
    try:
        spec = parse_spec(parse_yaml(raw, "demo.yaml"))
    except SpecError as error:
        return list(error.issues)
    assert check(spec) == []
    return []


def edited(old: str, new: str, text: str = TEXT) -> str:
    """TEXT with one passage replaced, which must occur exactly once."""
    assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times"
    return text.replace(old, new)


def python(
    *arguments: str, cwd: Path | None = None, timeout: float = 120, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run this interpreter; `environment` adds to the current one, an empty value removes."""
    env = {**os.environ, **environment}
    env = {key: value for key, value in env.items() if value != ""}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
