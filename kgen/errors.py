"""What kgen raises: whose fault it is decides the class, the class decides the exit code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Issue:
    """One thing wrong with a spec.

    path: dotted key, for instance `problem.out_channels`; empty for the file as a whole.
    message: the rule and the value that breaks it. hint: the nearest legal value, or empty.
    line: 1-based line of the key in the file, or None where there is no file.
    """

    path: str
    message: str
    hint: str = ""
    line: int | None = None

    def render(self, source: str) -> str:
        """`source:line: path: message`, and the hint on a second line."""
        where = source if self.line is None else f"{source}:{self.line}"
        head = ": ".join(part for part in (where, self.path, self.message) if part)
        return f"{head}\n  hint: {self.hint}" if self.hint else head


class KgenError(Exception):
    """Anything kgen refuses or fails at. `exit_code` is what the command line returns."""

    exit_code = 2


class UsageError(KgenError):
    """The caller asked for something impossible: a missing file, an unwritable folder."""


class SpecError(KgenError):
    """The spec is wrong. Carries every issue found, not only the first."""

    def __init__(self, source: str, issues: Sequence[Issue]) -> None:
        self.source = source
        self.issues = tuple(issues)
        super().__init__("\n".join(issue.render(source) for issue in issues))


class CheckError(KgenError):
    """A check ran and said no: stale output, a wrong kernel."""

    exit_code = 1


class BuildError(KgenError):
    """Rendering or compiling failed; for a valid spec that is a bug in kgen or in the toolchain."""

    exit_code = 3
